/* sample_select.cuh - which values stay, exactly, among those of one bin: sample.cu's last block of
 * a row looks at the few that are left. */
#ifndef LINNET_OPS_CUDA_SAMPLE_SELECT_H
#define LINNET_OPS_CUDA_SAMPLE_SELECT_H

#include "ops/cuda/sample_row.cuh"

/* ---- exact selection in a bin ---- */

/* Notes an id of the row's bin. */
__device__ inline void note(const struct args &a, const struct view &v, int32_t id)
{
    if (__ldcg(&v.row->n_list) > LIST) return;
    int32_t at = atomicAdd(&v.row->n_list, 1);
    if (at < LIST) a.work.lists[(int64_t)blockIdx.y * LIST + at] = id;
}

/* f(id, x, exponent) for what the threads have of the row's bin, by the list if it is whole. */
struct bin_walk {
    const struct view *v;
    const int32_t *list;
    int32_t n_list, bin;
    double max, scale, floor, bin_scale;

    template <class F> __device__ void operator()(F f) const
    {
        bool listed = n_list <= LIST;
        int32_t n = listed ? n_list : v->n_allowed;
        for (int32_t i = (int32_t)threadIdx.x; i < n; i += THREADS) {
            int32_t id = listed ? __ldcg(list + i) : i;
            double x = value_of(*v, v->logits[id]), y = choice_exponent(x, max, scale);
            if (listed || (bin_of(y, bin_scale) == bin && x >= floor)) f(id, x, y);
        }
    }
};

__device__ struct bin_walk walk_of_bin(const struct args &a, const struct view &v)
{
    const int32_t *list = a.work.lists + (int64_t)blockIdx.y * LIST;
    const struct sample_row *r = v.row;
    return {&v, list, __ldcg(&r->n_list), r->bin, r->max, r->scale, r->floor, r->bin_scale};
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
template <class Visit> static __device__ struct selected select_key(Visit visit, mass need)
{
    __shared__ struct sums32<THREADS> digits;
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
        digits.low[threadIdx.x] = digits.high[threadIdx.x] = 0;
        __syncthreads();
        visit([&](uint64_t k, mass m) {
            if (top == 64 || (k ^ key) >> top == 0)
                add_to(&digits, (int32_t)((uint32_t)(k >> shift) & mask), m);
        });
        __syncthreads();
        struct found f = find_thread(sum_at(&digits, THREADS - 1 - threadIdx.x), need);
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

#endif
