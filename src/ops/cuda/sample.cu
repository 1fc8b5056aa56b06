#include "ops/cuda/sample.cuh"

#include <float.h>
#include <math.h>
#include <string.h>

extern "C" {
#include "ops/choice.h"
}

/*
 * A row is cut into parts, one for each block; who is last to arrive at the end of a kernel merges
 * the parts of its row. Sums of weights are kept for each tile of a row.
 *
 *   scan    adjusts; maximum, damage. Greedy rows end here.
 *   weigh   sums of tiles, then the draw; or, if there is top_k or top_p, how many candidates and
 *           what mass fall into each bin of exponents
 *   narrow  only for both: the k-th largest, exactly, which the total of top_p depends on
 *   cut     the last that stays, exactly, among those of its bin; sums of tiles, the draw
 */
enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    TILE = 4 * THREADS,
    MAX_TILES = CHOICE_MAX_VOCAB / TILE,
    MAX_PARTS = 160,
    BLOCKS = 1056, /* about as many as the largest devices hold at once */
    LIST = 8192,   /* ids of one bin; if there are more, the whole row is walked */
    EACH = CHOICE_BINS / THREADS
};

typedef unsigned long long mass;

enum { DAMAGED = 1, FINITE = 2 };

struct sample_peak {
    double max;
    int32_t id;    /* lowest that has it, -1: none above -infinity */
    int32_t flags; /* of all of the part, padding too */
};

enum row_state { ROW_DONE, ROW_WEIGH, ROW_NARROW, ROW_CUT };

struct sample_row {
    enum row_state state;
    unsigned int n_arrived; /* wraps to 0 */
    int32_t n_list;         /* > LIST: there were too many */
    int32_t bin;            /* where the cut is */
    mass need;              /* of that bin */
    double max, scale;
    double floor; /* the k-th largest, or -infinity */
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
    struct chosen *chosen;
    int32_t part_size; /* whole tiles */
};

/* ---- a row as a block sees it ---- */

struct view {
    const struct choice_rule *rule;
    struct sample_row *row;
    float *logits;
    double *adjusted;
    struct chosen *chosen;
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
    v.n_allowed = max(0, min(v.rule->n_allowed, v.vocab));
    v.begin = (int32_t)blockIdx.x * a.part_size;
    v.end = min(v.begin + a.part_size, v.vocab);
    v.top_k = v.rule->top_k > 0 && v.rule->top_k < v.n_allowed;
    v.top_p = v.rule->top_p < 1;
    v.least = choice_least(v.rule->min_p);
    return v;
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

/* f(id, logit) for ids in [begin, end), where begin is a multiple of 4; a thread has 4 in a row.
 * `after` is called by all threads of a warp at once, when a tile is done. */
template <class F, class After>
__device__ inline void walk(const float *logits, int32_t vocab, int32_t begin, int32_t end, F f,
                            After after)
{
    bool aligned = vocab % 4 == 0;
    for (int32_t tile = begin; tile < end; tile += TILE) {
        int32_t id = tile + 4 * (int32_t)threadIdx.x;
        if (aligned && id < end) {
            float4 four = *reinterpret_cast<const float4 *>(logits + id);
            f(id, four.x);
            f(id + 1, four.y);
            f(id + 2, four.z);
            f(id + 3, four.w);
        } else {
            for (int32_t j = id; j < id + 4 && j < end; j++) f(j, logits[j]);
        }
        after(tile);
    }
}

__device__ inline void nothing(int32_t)
{
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
template <class T> __device__ struct found find_bin(const T *bins, mass need)
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

/* ---- scan ---- */

__device__ inline struct sample_peak higher(struct sample_peak a, struct sample_peak b)
{
    bool other = b.max > a.max || (b.max == a.max && b.id >= 0 && (a.id < 0 || b.id < a.id));
    int32_t flags = a.flags | b.flags;
    if (other) a = b;
    a.flags = flags;
    return a;
}

__device__ struct sample_peak block_peak(struct sample_peak p)
{
    __shared__ struct sample_peak warps[WARPS];
    for (int i = 16; i > 0; i /= 2)
        p = higher(p, {__shfl_xor_sync(~0u, p.max, i), __shfl_xor_sync(~0u, p.id, i),
                       __shfl_xor_sync(~0u, p.flags, i)});
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = p;
    __syncthreads();
    p = warps[0];
    for (int i = 1; i < WARPS; i++) p = higher(p, warps[i]);
    return p;
}

/* Puts adjusted values and marks in place; returns flags of what was there. */
__device__ int32_t adjust(const struct view &v)
{
    int32_t flags = 0;
    for (int32_t i = (int32_t)threadIdx.x; i < v.rule->n_adjustments; i += THREADS) {
        const struct adjustment a = v.rule->adjustments[i];
        if (a.id < v.begin || a.id >= v.end || a.id >= v.n_allowed) continue;
        float logit = v.logits[a.id];
        if (!(logit <= FLT_MAX)) flags |= DAMAGED;
        if (logit > -INFINITY) flags |= FINITE;
        v.adjusted[i] = choice_adjusted(v.rule, &a, logit);
        v.logits[a.id] = __uint_as_float(MARK | (uint32_t)i);
    }
    __syncthreads();
    return flags;
}

__device__ struct sample_peak part_peak(const struct view &v)
{
    int32_t flags = v.rule->n_adjustments > 0 ? adjust(v) : 0;
    float best = -INFINITY;
    int32_t best_id = -1;
    struct sample_peak adjusted = {-INFINITY, -1, 0};
    bool finite = false, damaged = false;
    walk(
        v.logits, v.vocab, v.begin, v.end,
        [&](int32_t id, float logit) {
            if (logit <= FLT_MAX) {
                finite |= logit > -INFINITY;
                if (logit > best && id < v.n_allowed) best = logit, best_id = id;
                return;
            }
            int32_t slot = slot_of(logit);
            if (logit == logit || slot >= v.rule->n_adjustments ||
                v.rule->adjustments[slot].id != id)
                damaged = true;
            else
                adjusted =
                    higher(adjusted, {v.adjusted[slot], v.adjusted[slot] > -INFINITY ? id : -1, 0});
        },
        nothing);
    flags |= (finite ? FINITE : 0) | (damaged ? DAMAGED : 0);
    return block_peak(higher({best, best_id, flags}, adjusted));
}

static __global__ void __launch_bounds__(THREADS) scan_rows(struct args a)
{
    struct view v = view_row(a);
    bool sampled = v.rule->temperature > 0;
    if (sampled && (v.top_k || v.top_p)) {
        int64_t bins = (int64_t)blockIdx.y * CHOICE_BINS;
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < CHOICE_BINS; i += gridDim.x * THREADS)
            a.work.masses[bins + i] = 0, a.work.counts[bins + i] = 0;
    }
    struct sample_peak *peaks = a.work.peaks + (int64_t)blockIdx.y * MAX_PARTS;
    struct sample_peak p = part_peak(v);
    if (threadIdx.x == 0) peaks[blockIdx.x] = p;
    if (!last_of_row(v.row)) return;
    p = {-INFINITY, -1, 0};
    if (threadIdx.x < gridDim.x) {
        const struct sample_peak *other = peaks + threadIdx.x;
        p = {__ldcg(&other->max), __ldcg(&other->id), __ldcg(&other->flags)};
    }
    p = block_peak(p);
    if (threadIdx.x > 0) return;
    bool bad = (p.flags & DAMAGED) || !(p.flags & FINITE) || p.id < 0;
    v.row->state = bad || !sampled ? ROW_DONE : ROW_WEIGH;
    if (bad || !sampled) {
        *v.chosen = {bad ? -1 : p.id, bad ? LINNET_NUMERIC : LINNET_OK};
        return;
    }
    v.row->n_list = 0;
    v.row->max = p.max;
    v.row->scale = choice_scale(v.rule);
    v.row->floor = -INFINITY;
}

/* ---- the draw ---- */

/* kept(x, exponent, id); sums of tiles in shared memory. */
template <class Kept>
__device__ void draw(const struct view &v, const mass *sums, int32_t n_tiles, Kept kept)
{
    enum { TILES = MAX_TILES / THREADS };
    int32_t first = (int32_t)threadIdx.x * TILES;
    mass sum = 0;
    for (int i = 0; i < TILES; i++) sum += first + i < n_tiles ? sums[first + i] : 0;
    mass total = block_sum(sum);
    struct found f = find_thread(sum, choice_draw(v.rule, total) + 1);
    int32_t tile = f.thread * TILES;
    while (sums[tile] < f.rest) f.rest -= sums[tile++];

    double max = v.row->max, scale = v.row->scale;
    int32_t id = tile * TILE + 4 * (int32_t)threadIdx.x;
    uint64_t weights[4];
    sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        weights[i] = 0;
        if (id + i < v.n_allowed) {
            double x = value_of(v, v.logits[id + i]), y = choice_exponent(x, max, scale);
            uint64_t weight = choice_weight(y);
            if (weight >= v.least && kept(x, y, id + i)) weights[i] = weight;
        }
        sum += weights[i];
    }
    f = find_thread(sum, f.rest);
    if (f.thread != (int32_t)threadIdx.x) return;
    int i = 0;
    for (; i < 3 && weights[i] < f.rest; i++) f.rest -= weights[i];
    *v.chosen = {id + i, LINNET_OK};
}

/* ---- weigh ---- */

__device__ void load_sums(mass *sums, const mass *from, int32_t n_tiles)
{
    for (int i = threadIdx.x; i < n_tiles; i += THREADS) sums[i] = __ldcg(from + i);
    __syncthreads();
}

/* The sum of a tile's weights, whose warps bring theirs: *own is the thread's, and is cleared. */
__device__ inline void add_to_tile(mass *sums, int32_t tile, mass *own)
{
    mass sum = warp_sum(*own);
    if (threadIdx.x % 32 == 0 && sum > 0) atomicAdd(sums + tile / TILE, sum);
    *own = 0;
}

/* Rows without top_k and top_p. */
__device__ void weigh_and_draw(const struct args &a, const struct view &v, mass *sums)
{
    double max = v.row->max, scale = v.row->scale;
    int32_t n_tiles = (v.vocab + TILE - 1) / TILE;
    mass *all = a.work.sums + (int64_t)blockIdx.y * MAX_TILES, own = 0;
    for (int i = threadIdx.x; i < n_tiles; i += THREADS) sums[i] = 0;
    __syncthreads();
    walk(
        v.logits, v.vocab, v.begin, v.end,
        [&](int32_t id, float logit) {
            if (id >= v.n_allowed) return;
            double y = choice_exponent(value_of(v, logit), max, scale);
            uint64_t weight = choice_weight(y);
            own += weight >= v.least ? weight : 0;
        },
        [&](int32_t tile) { add_to_tile(sums, tile, &own); });
    __syncthreads();
    for (int i = v.begin / TILE + threadIdx.x; i * TILE < v.end; i += THREADS) all[i] = sums[i];
    if (!last_of_row(v.row)) return;
    load_sums(sums, all, n_tiles);
    draw(v, sums, n_tiles, [](double, double, int32_t) { return true; });
}

/* Adds to a bin in shared memory; a warp that has but one bin adds once. */
__device__ inline void add_to_bin(mass *masses, int32_t bin, mass m)
{
    unsigned int active = __activemask();
    int lane = threadIdx.x % 32, leader = __ffs(active) - 1;
    if (active == ~0u && __all_sync(active, bin == __shfl_sync(active, bin, leader))) {
        m = warp_sum(m);
        if (lane != leader) return;
    }
    atomicAdd(masses + bin, m);
}

/* Whether the row goes on with a cut at top_p, for a total that is what `masses` hold. */
__device__ void plan_top_p(const struct view &v, const mass *masses)
{
    mass sum = 0;
    for (int i = 0; i < EACH; i++) sum += __ldcg(masses + threadIdx.x * EACH + i);
    struct found f = find_bin(masses, choice_need(v.rule->top_p, block_sum(sum)));
    if (threadIdx.x > 0) return;
    v.row->bin = f.thread;
    v.row->need = f.rest;
    v.row->state = ROW_CUT;
}

__device__ void plan(const struct view &v, const mass *masses, const uint32_t *counts)
{
    struct found k = {-1, 0, 0};
    if (v.top_k) k = find_bin(counts, (mass)v.rule->top_k);
    if (v.top_p && k.thread < 0) { /* fewer than k have a weight, if there is a k */
        plan_top_p(v, masses);
    } else if (threadIdx.x == 0) {
        v.row->bin = k.thread < 0 ? CHOICE_BINS : k.thread;
        v.row->need = k.rest;
        v.row->state = v.top_p ? ROW_NARROW : ROW_CUT;
    }
}

static __global__ void __launch_bounds__(THREADS) weigh_rows(struct args a)
{
    __shared__ mass masses[CHOICE_BINS];
    __shared__ uint32_t counts[CHOICE_BINS];
    struct view v = view_row(a);
    if (v.row->state == ROW_DONE) return;
    if (!v.top_k && !v.top_p) {
        weigh_and_draw(a, v, masses);
        return;
    }
    for (int i = threadIdx.x; i < CHOICE_BINS; i += THREADS) masses[i] = 0, counts[i] = 0;
    __syncthreads();
    double max = v.row->max, scale = v.row->scale;
    walk(
        v.logits, v.vocab, v.begin, v.end,
        [&](int32_t id, float logit) {
            if (id >= v.n_allowed) return;
            double y = choice_exponent(value_of(v, logit), max, scale);
            int32_t bin = choice_bin(y);
            if (bin == CHOICE_BINS) return;
            if (v.top_k) atomicAdd(counts + bin, 1);
            if (v.top_p) add_to_bin(masses, bin, choice_weight(y));
        },
        nothing);
    __syncthreads();
    mass *all_masses = a.work.masses + (int64_t)blockIdx.y * CHOICE_BINS;
    uint32_t *all_counts = a.work.counts + (int64_t)blockIdx.y * CHOICE_BINS;
    for (int i = threadIdx.x; i < CHOICE_BINS; i += THREADS) {
        if (masses[i] > 0) atomicAdd(all_masses + i, masses[i]);
        if (counts[i] > 0) atomicAdd(all_counts + i, counts[i]);
    }
    if (last_of_row(v.row)) plan(v, all_masses, all_counts);
}

/* ---- exact selection in a bin ---- */

/* Notes an id of the row's bin. */
__device__ inline void note(const struct args &a, const struct view &v, int32_t id)
{
    int32_t at = atomicAdd(&v.row->n_list, 1);
    if (at < LIST) a.work.lists[(int64_t)blockIdx.y * LIST + at] = id;
}

/* f(id, x, exponent) for what the threads have of the row's bin, by the list if it is whole. */
struct bin_walk {
    const struct view *v;
    const int32_t *list;
    int32_t n_list, bin;
    double max, scale, floor;

    template <class F> __device__ void operator()(F f) const
    {
        bool listed = n_list <= LIST;
        int32_t n = listed ? n_list : v->n_allowed;
        for (int32_t i = (int32_t)threadIdx.x; i < n; i += THREADS) {
            int32_t id = listed ? __ldcg(list + i) : i;
            double x = value_of(*v, v->logits[id]), y = choice_exponent(x, max, scale);
            if (listed || (choice_bin(y) == bin && x >= floor)) f(id, x, y);
        }
    }
};

__device__ struct bin_walk walk_of_bin(const struct args &a, const struct view &v)
{
    return {&v,
            a.work.lists + (int64_t)blockIdx.y * LIST,
            __ldcg(&v.row->n_list),
            v.row->bin,
            v.row->max,
            v.row->scale,
            v.row->floor};
}

/* Keys in the order of doubles; -0 is 0. */
__device__ inline uint64_t key_of(double x)
{
    uint64_t bits = (uint64_t)__double_as_longlong(x + 0.0);
    return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}

__device__ inline double value_of_key(uint64_t key)
{
    return __longlong_as_double((long long)(key >> 63 ? key & ~((uint64_t)1 << 63) : ~key));
}

struct selected {
    uint64_t key;
    mass rest; /* what is needed of the keys equal to it */
};

/*
 * The largest key such that it and the higher ones reach need, which all of them do. visit(f) calls
 * f(key, mass) for the thread's own. Digits of 8 bits, from the highest bit in which keys differ.
 */
template <class Visit> __device__ struct selected select_key(Visit visit, mass need)
{
    __shared__ mass digits[THREADS];
    __shared__ unsigned int all[2], any[2]; /* low and high halves of what all or any keys have */
    if (threadIdx.x < 2) all[threadIdx.x] = ~0u, any[threadIdx.x] = 0;
    __syncthreads();
    uint64_t own_all = ~(uint64_t)0, own_any = 0;
    visit([&](uint64_t key, mass) { own_all &= key, own_any |= key; });
    for (int i = 0; i < 2; i++) {
        unsigned int in_all = __reduce_and_sync(~0u, (unsigned int)(own_all >> 32 * i));
        unsigned int in_any = __reduce_or_sync(~0u, (unsigned int)(own_any >> 32 * i));
        if (threadIdx.x % 32 == 0) atomicAnd(all + i, in_all), atomicOr(any + i, in_any);
    }
    __syncthreads();
    uint64_t key = (uint64_t)all[1] << 32 | all[0];
    uint64_t differ = key ^ ((uint64_t)any[1] << 32 | any[0]);
    int top = differ ? 64 - __clzll((long long)differ) : 0;
    while (top > 0 && (differ << (64 - top)) != 0) {
        int shift = top > 8 ? top - 8 : 0;
        uint32_t mask = (1u << (top - shift)) - 1;
        digits[threadIdx.x] = 0;
        __syncthreads();
        visit([&](uint64_t k, mass m) {
            if (top == 64 || (k ^ key) >> top == 0)
                atomicAdd(digits + ((uint32_t)(k >> shift) & mask), m);
        });
        __syncthreads();
        struct found f = find_thread(digits[THREADS - 1 - threadIdx.x], need);
        need = f.rest;
        key = (key & ~((uint64_t)mask << shift)) | (uint64_t)(THREADS - 1 - f.thread) << shift;
        top = shift;
    }
    return {key, need};
}

/* The k-th largest of the row's bin. */
__device__ double select_top_k(const struct bin_walk &each, mass need)
{
    return value_of_key(
        select_key([&](auto f) { each([&](int32_t, double x, double) { f(key_of(x), 1); }); }, need)
            .key);
}

/* The cut of top_p in the row's bin. */
__device__ struct cut select_top_p(const struct bin_walk &each, mass need)
{
    struct selected s = select_key(
        [&](auto f) { each([&](int32_t, double, double y) { f(key_of(y), choice_weight(y)); }); },
        need);
    double value = value_of_key(s.key);
    mass one = choice_weight(value), ties = s.rest / one + (s.rest % one != 0), n = 0;
    each([&](int32_t, double, double y) { n += y == value; });
    if (block_sum(n) == ties) return {value, INT32_MAX};
    s = select_key(
        [&](auto f) {
            each([&](int32_t id, double, double y) {
                if (y == value) f(~(uint64_t)id, 1);
            });
        },
        ties);
    return {value, (int32_t)~s.key};
}

static __global__ void __launch_bounds__(THREADS) narrow_rows(struct args a)
{
    struct view v = view_row(a);
    if (v.row->state != ROW_NARROW) return;
    double max = v.row->max, scale = v.row->scale;
    int32_t bin = v.row->bin;
    walk(
        v.logits, v.vocab, v.begin, v.end,
        [&](int32_t id, float logit) {
            if (id >= v.n_allowed) return;
            if (choice_bin(choice_exponent(value_of(v, logit), max, scale)) == bin) note(a, v, id);
        },
        nothing);
    if (!last_of_row(v.row)) return;

    struct bin_walk each = walk_of_bin(a, v);
    double kth = select_top_k(each, v.row->need);
    mass kept = 0;
    each([&](int32_t, double x, double y) { kept += x >= kth ? choice_weight(y) : 0; });
    kept = block_sum(kept);
    mass *masses = a.work.masses + (int64_t)blockIdx.y * CHOICE_BINS;
    for (int i = bin + threadIdx.x; i < CHOICE_BINS; i += THREADS) masses[i] = i == bin ? kept : 0;
    if (threadIdx.x == 0) v.row->floor = kth, v.row->n_list = 0;
    __threadfence();
    __syncthreads();
    plan_top_p(v, masses);
}

static __global__ void __launch_bounds__(THREADS) cut_rows(struct args a)
{
    __shared__ mass sums[MAX_TILES];
    struct view v = view_row(a);
    if (v.row->state != ROW_CUT) return;
    double max = v.row->max, scale = v.row->scale, floor = v.row->floor;
    int32_t bin = v.row->bin, n_tiles = (v.vocab + TILE - 1) / TILE;
    mass *all = a.work.sums + (int64_t)blockIdx.y * MAX_TILES, own = 0;
    for (int i = threadIdx.x; i < n_tiles; i += THREADS) sums[i] = 0;
    __syncthreads();
    walk(
        v.logits, v.vocab, v.begin, v.end,
        [&](int32_t id, float logit) {
            if (id >= v.n_allowed) return;
            double x = value_of(v, logit), y = choice_exponent(x, max, scale);
            int32_t at = choice_bin(y);
            if (at > bin || at == CHOICE_BINS || x < floor) return;
            if (at == bin) {
                note(a, v, id);
            } else {
                uint64_t weight = choice_weight(y);
                own += weight >= v.least ? weight : 0;
            }
        },
        [&](int32_t tile) { add_to_tile(sums, tile, &own); });
    __syncthreads();
    for (int i = v.begin / TILE + threadIdx.x; i * TILE < v.end; i += THREADS) all[i] = sums[i];
    if (!last_of_row(v.row)) return;

    load_sums(sums, all, n_tiles);
    bool by_count = !v.top_p;
    struct cut cut = {-INFINITY, INT32_MAX};
    struct bin_walk each = walk_of_bin(a, v);
    if (bin < CHOICE_BINS) {
        cut = by_count ? (struct cut){select_top_k(each, v.row->need), INT32_MAX}
                       : select_top_p(each, v.row->need);
    }
    auto kept = [&](double x, double y, int32_t id) {
        double value = by_count ? x : y;
        return x >= floor && (value > cut.value || (value == cut.value && id <= cut.last_tie));
    };
    each([&](int32_t id, double x, double y) {
        uint64_t weight = choice_weight(y);
        if (weight >= v.least && kept(x, y, id)) atomicAdd(sums + id / TILE, (mass)weight);
    });
    __syncthreads();
    draw(v, sums, n_tiles, kept);
}

/* ---- the host's side ---- */

/* Adds an array of n elements to the scratch memory; NULL memory only counts. */
static void *take(char *memory, size_t *used, size_t n, size_t size)
{
    void *at = memory ? memory + *used : NULL;
    *used += (n * size + 255) / 256 * 256;
    return at;
}

static size_t place(const struct shape *shape, const struct limits *limits, char *memory,
                    struct sample_work *w)
{
    size_t used = 0, n = (size_t)limits->max_logits;
    w->vocab = shape->vocab;
    w->rows = (struct sample_row *)take(memory, &used, n, sizeof *w->rows);
    w->peaks = (struct sample_peak *)take(memory, &used, n * MAX_PARTS, sizeof *w->peaks);
    w->sums = (mass *)take(memory, &used, n * MAX_TILES, sizeof *w->sums);
    w->masses = (mass *)take(memory, &used, n * CHOICE_BINS, sizeof *w->masses);
    w->counts = (uint32_t *)take(memory, &used, n * CHOICE_BINS, sizeof *w->counts);
    w->lists = (int32_t *)take(memory, &used, n * LIST, sizeof *w->lists);
    w->adjusted = (double *)take(memory, &used, SAMPLE_ADJUSTMENTS, sizeof *w->adjusted);
    return used;
}

size_t sample_bytes(const struct shape *shape, const struct limits *limits)
{
    struct sample_work work;
    return place(shape, limits, NULL, &work);
}

void sample_place(const struct shape *shape, const struct limits *limits, void *scratch,
                  struct sample_work *out)
{
    place(shape, limits, (char *)scratch, out);
}

size_t sample_rules_bytes(const struct limits *limits)
{
    return (size_t)limits->max_logits * sizeof(struct choice_rule) +
           SAMPLE_ADJUSTMENTS * sizeof(struct adjustment);
}

bool sample_fits(const struct choice_rule *rules, int32_t n)
{
    int64_t total = 0;
    for (int32_t i = 0; i < n; i++) total += rules[i].n_adjustments;
    return total <= SAMPLE_ADJUSTMENTS;
}

size_t sample_pack(const struct choice_rule *rules, int32_t n, void *host, void *device,
                   enum sample_stage *stage)
{
    struct choice_rule *out = (struct choice_rule *)host;
    struct adjustment *adjustments = (struct adjustment *)(out + n);
    const struct adjustment *there =
        (const struct adjustment *)((const struct choice_rule *)device + n);
    size_t used = 0;
    *stage = SAMPLE_GREEDY;
    for (int32_t i = 0; i < n; i++) {
        const struct choice_rule *rule = rules + i;
        size_t n_adjustments = (size_t)rule->n_adjustments;
        out[i] = *rule;
        out[i].adjustments = there + used;
        if (n_adjustments > 0)
            memcpy(adjustments + used, rule->adjustments, n_adjustments * sizeof *adjustments);
        used += n_adjustments;
        if (!(rule->temperature > 0)) continue;
        bool top_k = rule->top_k > 0, top_p = rule->top_p < 1;
        enum sample_stage needs = top_k && top_p   ? SAMPLE_NARROW
                                  : top_k || top_p ? SAMPLE_CUT
                                                   : SAMPLE_DRAW;
        if (needs > *stage) *stage = needs;
    }
    return (size_t)n * sizeof *out + used * sizeof *adjustments;
}

cudaError_t sample_run(cudaStream_t stream, const struct sample_work *work, float *logits,
                       const void *rules, int32_t n, enum sample_stage stage, struct chosen *chosen)
{
    struct args a = {*work, logits, (const struct choice_rule *)rules, chosen, 0};
    int32_t tiles = (work->vocab + TILE - 1) / TILE;
    int32_t parts = n < BLOCKS ? BLOCKS / n : 1;
    if (parts > MAX_PARTS) parts = MAX_PARTS;
    int32_t tiles_of_part = (tiles + parts - 1) / parts;
    a.part_size = tiles_of_part * TILE;
    dim3 grid((unsigned int)((tiles + tiles_of_part - 1) / tiles_of_part), (unsigned int)n);
    scan_rows<<<grid, THREADS, 0, stream>>>(a);
    if (stage >= SAMPLE_DRAW) weigh_rows<<<grid, THREADS, 0, stream>>>(a);
    if (stage >= SAMPLE_NARROW) narrow_rows<<<grid, THREADS, 0, stream>>>(a);
    if (stage >= SAMPLE_CUT) cut_rows<<<grid, THREADS, 0, stream>>>(a);
    return cudaGetLastError();
}
