/* sample_row.cuh - what the kernels of sample.cu share: a row as a block sees it, and what a
 * block's threads, or the blocks of a row, do together. */
#ifndef LINNET_OPS_CUDA_SAMPLE_ROW_H
#define LINNET_OPS_CUDA_SAMPLE_ROW_H

#include <float.h>
#include <math.h>
#include <string.h>

#include "ops/cuda/sample.cuh"

extern "C" {
#include "ops/choice.h"
}

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    TILE = 4 * THREADS,
    MAX_TILES = CHOICE_MAX_VOCAB / TILE,
    MAX_PARTS = 160,
    BLOCKS = 792, /* about as many as a large device holds at once */
    LIST = 8192,  /* ids of one bin; if there are more, the whole row is walked */
    BINS = 1024,  /* of exponents, highest first, as wide as the row needs */
    EACH = BINS / THREADS
};

typedef unsigned long long mass;

enum { DAMAGED = 1, FINITE = 2 };

struct sample_peak {
    double max;
    int32_t id;    /* lowest that has it, -1: none above -infinity */
    int32_t flags; /* of all of the part, padding too */
    float min;     /* of those not adjusted, above -infinity; padding may count */
};

enum row_state { ROW_DONE, ROW_WEIGH, ROW_NARROW, ROW_CUT };

struct sample_row {
    enum row_state state;
    unsigned int n_arrived; /* wraps to 0 */
    int32_t n_list;         /* > LIST: there were too many */
    int32_t bin;            /* where the cut is */
    mass need;              /* of that bin */
    double max, scale;
    double floor;     /* the k-th largest, or -infinity */
    double bin_scale; /* from exponents to bins, negative */
    float low;        /* logits below are in lower bins than `bin`, surely */
};

/* What the last block knows of the cut. Values are logits for top_k, exponents for top_p. */
struct cut {
    double value;
    int32_t last_tie; /* ids up to this stay of those equal to it */
};

struct args {
    struct sample_work work;
    float *logits;
    const struct choice_rule *rules;
    struct chosen *chosen, *told;
    int32_t part_size; /* whole tiles */
};

/* ---- a row as a block sees it ---- */

struct view {
    const struct choice_rule *rule;
    struct sample_row *row;
    float *logits;
    double *adjusted;
    struct chosen *chosen, *told;         /* the same for the host; NULL: it does not ask */
    int32_t vocab, n_allowed, begin, end; /* begin, end: this block's part */
    bool top_k, top_p;
    uint64_t least; /* weight that min_p keeps */
};

__device__ struct view view_row(const struct args &a)
{
    struct view v;
    int32_t row = (int32_t)blockIdx.y;
    v.rule = a.rules + row;
    v.row = a.work.rows + row;
    v.vocab = a.work.vocab;
    v.logits = a.logits + (int64_t)row * v.vocab;
    v.adjusted =
        a.work.adjusted + (v.rule->adjustments - (const struct adjustment *)(a.rules + gridDim.y));
    v.chosen = a.chosen + row;
    v.told = a.told ? a.told + row : NULL;
    v.n_allowed = max(0, min(v.rule->n_allowed, v.vocab));
    v.begin = (int32_t)blockIdx.x * a.part_size;
    v.end = min(v.begin + a.part_size, v.vocab);
    v.top_k = v.rule->top_k > 0 && v.rule->top_k < v.n_allowed;
    v.top_p = v.rule->top_p < 1;
    v.least = choice_least(v.rule->min_p);
    return v;
}

static __device__ void tell(const struct view &v, struct chosen c)
{
    *v.chosen = c;
    if (v.told) *v.told = c;
}

/* An adjusted logit is replaced by a NaN that says where its value is. */
enum { MARK = 0xFFC00000u, SLOT = 0x003FFFFF };

__device__ inline int32_t slot_of(float mark)
{
    return (int32_t)(__float_as_uint(mark) & SLOT);
}

/* After scan: a row that goes on has no other NaN. */
__device__ inline double value_of(const struct view &v, float logit)
{
    return logit == logit ? (double)logit : v.adjusted[slot_of(logit)];
}

/*
 * f(id, logit) for ids in [begin, end), where begin is a multiple of 4; a thread has 4 in a row,
 * which skip(four) may take care of at once. `after` is called by all threads of a warp together,
 * when a tile is done.
 */
template <class F, class After, class Skip>
__device__ inline void walk(const float *logits, int32_t vocab, int32_t begin, int32_t end, F f,
                            After after, Skip skip)
{
    bool aligned = vocab % 4 == 0;
    int32_t id = begin + 4 * (int32_t)threadIdx.x;
    float4 next = {};
    if (aligned && id < end) next = *reinterpret_cast<const float4 *>(logits + id);
    for (int32_t tile = begin; tile < end; tile += TILE, id += TILE) {
        float4 four = next; /* the next ones are on their way before these are used */
        if (aligned && id + TILE < end)
            next = *reinterpret_cast<const float4 *>(logits + id + TILE);
        if (aligned && id < end) {
            if (!skip(four)) {
                f(id, four.x);
                f(id + 1, four.y);
                f(id + 2, four.z);
                f(id + 3, four.w);
            }
        } else {
            for (int32_t j = id; j < id + 4 && j < end; j++) f(j, logits[j]);
        }
        after(tile);
    }
}

__device__ inline void nothing(int32_t)
{
}

__device__ inline bool never(const float4 &)
{
    return false;
}

/* BINS where the weight is 0. */
__device__ inline int32_t bin_of(double exponent, double bin_scale)
{
    if (!(exponent > CHOICE_LEAST_EXPONENT)) return BINS;
    double bin = exponent * bin_scale;
    return bin < BINS - 1 ? (int32_t)bin : BINS - 1;
}

/* Sums in shared memory, whose atomics are fast for 32 bits only. */
template <int N> struct sums32 {
    uint32_t low[N], high[N]; /* a sum's upper half stays below 2^31 */
};

template <int N> __device__ inline void add_to(struct sums32<N> *sums, int32_t at, mass m)
{
    uint32_t low = (uint32_t)m, high = (uint32_t)(m >> 32);
    if (atomicAdd(sums->low + at, low) + low < low) high++;
    if (high > 0) atomicAdd(sums->high + at, high);
}

template <int N> __device__ inline mass sum_at(const struct sums32<N> *sums, int32_t at)
{
    return (mass)sums->high[at] << 32 | sums->low[at];
}

/* ---- together ---- */

/* True in the whole block if it is the last of its row; what the others wrote is then visible. */
__device__ bool last_of_row(struct sample_row *row)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(&row->n_arrived, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (last) __threadfence();
    return last;
}

__device__ inline mass warp_sum(mass m)
{
    for (int i = 16; i > 0; i /= 2) m += __shfl_xor_sync(~0u, m, i);
    return m;
}

struct found {
    int32_t thread; /* -1: the sum of all does not reach it */
    mass rest;      /* what is needed of that thread's own */
    mass total;
};

/* The first thread at which the running sum of m reaches need >= 1. */
__device__ struct found find_thread(mass m, mass need)
{
    __shared__ mass warps[WARPS];
    __shared__ struct found found;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mass sum = m;
    for (int i = 1; i < 32; i *= 2) {
        mass before = __shfl_up_sync(~0u, sum, i);
        if (lane >= i) sum += before;
    }
    __syncthreads(); /* who came before has read `found` */
    if (lane == 31) warps[warp] = sum;
    if (threadIdx.x == 0) found.thread = -1;
    __syncthreads();
    mass total = 0;
    for (int i = 0; i < WARPS; i++) {
        if (i == warp) sum += total;
        total += warps[i];
    }
    if (sum - m < need && sum >= need)
        found.thread = (int32_t)threadIdx.x, found.rest = need - (sum - m);
    __syncthreads();
    return {found.thread, found.rest, total};
}

/* The same for bins: a thread has EACH of them. `thread` of the answer is a bin. */
template <class T> static __device__ struct found find_bin(const T *bins, mass need)
{
    __shared__ struct found found;
    mass own[EACH], sum = 0;
    for (int i = 0; i < EACH; i++) sum += own[i] = __ldcg(bins + threadIdx.x * EACH + i);
    struct found f = find_thread(sum, need);
    if (f.thread < 0) return f;
    if (f.thread == (int32_t)threadIdx.x) {
        int i = 0;
        for (; own[i] < f.rest; i++) f.rest -= own[i];
        found = {f.thread * EACH + i, f.rest, f.total};
    }
    __syncthreads();
    return found;
}

__device__ mass block_sum(mass m)
{
    return find_thread(m, 1).total;
}

#endif
