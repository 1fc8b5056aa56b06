/*
 * attention.cuh - one chunk of CHUNK_KEYS keys for a tile of 16 query rows, on tensor cores, and
 * how chunks merge: the arithmetic that every attention kernel shares, so that decode and prefill
 * give the same bits. Chunks begin at multiples of CHUNK_KEYS; each has its own maximum, sum and
 * weighted values, and they merge in ascending order.
 *
 * A warp's registers: lane 4 g + t has rows g and g + 8. Scores s[n][0..1] are of row g, keys
 * 8 n + 2 t and + 1; s[n][2..3] of row g + 8. Outputs likewise, dimensions instead of keys.
 */
#ifndef LINNET_OPS_CUDA_ATTENTION_CUH
#define LINNET_OPS_CUDA_ATTENTION_CUH

#include "ops/cuda/cuda_internal.h"
#include "ops/cuda/ptx.cuh"

enum { KEY_TILES = CHUNK_KEYS / 8 };

/* Rows of D values in shared memory lie this far apart: no bank conflicts for ldmatrix. */
template <int D> static constexpr __host__ __device__ int row_stride(void)
{
    return D + 8;
}

/* Where a thread finds its first 16 bytes of a chunk when whole rows are a warp's work. */
template <int D, int THREADS> struct chunk_copy {
    static constexpr int UNITS = D / 8;
    static constexpr int ROWS = THREADS < UNITS ? 1 : THREADS / UNITS; /* at a time */
    static constexpr bool EVEN = THREADS % UNITS == 0 && KV_BLOCK % ROWS == 0;
};

/* The common case: no padding, rows that divide evenly. */
template <int D, int THREADS, bool MASKED>
static __device__ __forceinline__ void
load_even_chunk(bf16 *to, const bf16 *heads, int64_t block_stride, int page, int n_keys, int thread)
{
    typedef chunk_copy<D, THREADS> copy;
    int key = thread / copy::UNITS, d = thread % copy::UNITS * 8;
    heads += key * D + d;
    to += key * row_stride<D>() + d;
#pragma unroll 1 /* code that runs once or twice costs more to fetch than to run */
    for (int b = 0; b < CHUNK_KEYS / KV_BLOCK; b++) {
        const bf16 *from = heads + __shfl_sync(~0u, page, b) * block_stride;
#pragma unroll
        for (int i = 0; i < KV_BLOCK; i += copy::ROWS) {
            int row = b * KV_BLOCK + i;
            copy_async<16>(to + row * row_stride<D>(), from + i * D, !MASKED || row + key < n_keys);
        }
    }
}

/*
 * A chunk's keys or values of one kv head -> shared memory [CHUNK_KEYS][row_stride], by THREADS
 * threads in whole warps. Zeros beyond head_dim and from key n_keys on, so that nothing the cache
 * may hold there matters. heads: the kv head's rows in block 0; page: of lane l, the block of keys
 * 16 (l % 4) to + 15, or any number that is a block's.
 */
template <int D, int THREADS>
static __device__ __forceinline__ void load_chunk(bf16 *to, const bf16 *heads, int64_t block_stride,
                                                  int head_dim, int page, int n_keys, int thread)
{
    if constexpr (chunk_copy<D, THREADS>::EVEN)
        if (head_dim == D) {
            if (n_keys >= CHUNK_KEYS)
                load_even_chunk<D, THREADS, false>(to, heads, block_stride, page, n_keys, thread);
            else
                load_even_chunk<D, THREADS, true>(to, heads, block_stride, page, n_keys, thread);
            return;
        }
    int size = head_dim % 8 == 0 ? 8 : 2, units = D / size;
    for (int i = thread; i < CHUNK_KEYS * units; i += THREADS) {
        int key = i / units, d = i % units * size;
        int block = __shfl_sync(~0u, page, key / KV_BLOCK);
        bool there = key < n_keys && d < head_dim;
        const bf16 *from = heads + block * block_stride + key % KV_BLOCK * head_dim + d;
        if (size == 8)
            copy_async<16>(to + key * row_stride<D>() + d, there ? from : heads, there);
        else
            copy_async<4>(to + key * row_stride<D>() + d, there ? from : heads, there);
    }
}

/* The lane's page for load_chunk. */
static __device__ __forceinline__ int chunk_page(const int32_t *table, int chunk, int n_keys)
{
    int key = chunk * CHUNK_KEYS + threadIdx.x % 4 * KV_BLOCK;
    return key < n_keys ? table[key / KV_BLOCK] : 0;
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

static __device__ __forceinline__ uint32_t pack_bf16(float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&v;
}

/* What scores are multiplied by: head_dim^-0.5, and log2 e because weights are powers of 2. */
static inline float attention_scale(int32_t head_dim)
{
    return (float)(1.4426950408889634 / sqrt((double)head_dim));
}

/* What a chunk gives for rows g [0] and g + 8 [1]: maximum and sum of the weights. */
struct chunk {
    float max[2], sum[2];
};

/* s += the part of q k of 16 dimensions from d on; a: their A fragment. s begins at zero and d
 * ascends. */
template <int D>
static __device__ __forceinline__ void add_scores(float s[KEY_TILES][4], const uint32_t a[4],
                                                  const bf16 *keys, int d)
{
    int lane = threadIdx.x % 32;
    const bf16 *row = keys + (lane / 16 * 8 + lane % 8) * row_stride<D>() + lane / 8 % 2 * 8 + d;
#pragma unroll
    for (int n = 0; n < KEY_TILES; n += 2) {
        uint32_t b[4];
        ldmatrix(b, row + n * 8 * row_stride<D>());
        mma_16816(s[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_16816(s[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
}

/* o = weights p times the chunk's values, N tiles of 8 dimensions from d on. */
template <int D, int N>
static __device__ __forceinline__ void
weigh_values(float o[N][4], const uint32_t p[KEY_TILES / 2][4], const bf16 *values, int d)
{
    int lane = threadIdx.x % 32;
    const bf16 *row = values + (lane / 8 % 2 * 8 + lane % 8) * row_stride<D>() + lane / 16 * 8 + d;
#pragma unroll
    for (int n = 0; n < N; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0;
#pragma unroll
    for (int k = 0; k < KEY_TILES / 2; k++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldmatrix_transposed(b, row + k * 16 * row_stride<D>() + n * 8);
            mma_16816(o[n], p[k][0], p[k][1], p[k][2], p[k][3], b[0], b[1]);
            mma_16816(o[n + 1], p[k][0], p[k][1], p[k][2], p[k][3], b[2], b[3]);
        }
}

/*
 * Scores (q k, unscaled; scale holds head_dim^-0.5 log2 e) -> weights relative to the chunk's own
 * maximum, as the four A fragments p[i] of 16 keys each. n_keys[j]: how many of the chunk's keys
 * row g + 8 j sees; 0: none, its weights are zero and max is -infinity. Sums are of the weights as
 * rounded to bf16: two by two over ascending key tiles in a lane, then over the row's four lanes.
 * For speed, MASKED: false if all rows see all keys; HALVES: 1 if there are but 8 rows.
 */
template <bool MASKED = true, int HALVES = 2>
static __device__ __forceinline__ struct chunk
chunk_weights(float s[KEY_TILES][4], float scale, const int n_keys[2], uint32_t p[KEY_TILES / 2][4])
{
    struct chunk c;
    int t = threadIdx.x % 4;
    bool normal = !MASKED; /* no exp2 is denormal */
    float from[2];
#pragma unroll
    for (int j = 0; j < HALVES; j++) {
        float max = -INFINITY, min = INFINITY;
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float v = s[n][2 * j + i] * scale;
                if (MASKED && 8 * n + 2 * t + i >= n_keys[j]) v = -INFINITY;
                s[n][2 * j + i] = v;
                max = fmaxf(max, v);
                if (!MASKED) min = fminf(min, v);
            }
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
        c.max[j] = max;
        /* a row without keys: exp2(-inf) = 0, not NaN */
        from[j] = !MASKED || n_keys[j] > 0 ? max : 0.0f;
        normal = normal && min - max >= -126.0f;
    }
    normal = !MASKED && __all_sync(~0u, normal);
    auto weigh = [&](auto exp2_of) {
#pragma unroll
        for (int j = 0; j < HALVES; j++) {
            float sum = 0;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                uint32_t pair =
                    pack_bf16(exp2_of(s[n][2 * j] - from[j]), exp2_of(s[n][2 * j + 1] - from[j]));
                sum += __uint_as_float(pair << 16);
                sum += __uint_as_float(pair & 0xFFFF0000u);
                p[n / 2][n % 2 * 2 + j] = pair;
            }
            c.sum[j] = sum;
        }
    };
    /* exp2f scales for the sake of denormal results; without them it is but the instruction */
    if (normal)
        weigh([](float x) { return exp2_normal(x); });
    else
        weigh([](float x) { return exp2f(x); });
#pragma unroll
    for (int j = 0; j < HALVES; j++) {
        c.sum[j] += __shfl_xor_sync(~0u, c.sum[j], 1);
        c.sum[j] += __shfl_xor_sync(~0u, c.sum[j], 2);
    }
#pragma unroll
    for (int n = 0; n < KEY_TILES && HALVES == 1; n++) p[n / 2][n % 2 * 2 + 1] = 0;
    return c;
}

/* How the running result of a row (max, sum; begins with max = -infinity, sum = 0) takes the next
 * chunk's: both are multiplied by these. */
static __device__ __forceinline__ void merge_factors(float *max, float *sum, float chunk_max,
                                                     float chunk_sum, float *old, float *add)
{
    float larger = fmaxf(*max, chunk_max);
    *old = *max == -INFINITY ? 0.0f : exp2f(*max - larger);
    *add = chunk_max == -INFINITY ? 0.0f : exp2f(chunk_max - larger);
    *sum = fmaf(chunk_sum, *add, *sum * *old);
    *max = larger;
}

/*
 * merge_factors of up to 32 chunks that follow one another, a lane for each (-infinity: none).
 * before: the maximum so far. Returns the maximum with all of them.
 */
static __device__ __forceinline__ float merge_factors_of_lanes(float before, float chunk_max,
                                                               float *old, float *add)
{
    int lane = threadIdx.x % 32;
    float max = fmaxf(before, chunk_max), sum = 0;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        float other = __shfl_up_sync(~0u, max, i);
        if (lane >= i) max = fmaxf(max, other);
    }
    float previous = __shfl_up_sync(~0u, max, 1);
    if (lane == 0) previous = before;
    merge_factors(&previous, &sum, chunk_max, 0, old, add);
    return __shfl_sync(~0u, max, 31);
}

static __device__ __forceinline__ float merge_value(float running, float chunk, float old,
                                                    float add)
{
    return fmaf(chunk, add, running * old);
}

/* act_at of a row's columns from an even one on: act_at(a, token, column) = token's + column's. */
static __device__ __forceinline__ int64_t act_token(const struct act &a, unsigned token)
{
    return a.cores ? (int64_t)(token / 8) * 512 + token % 8 * 8
                   : (int64_t)(token / 8) * (int)(a.padded / 32) * 256 + token % 8 * 32;
}

static __device__ __forceinline__ int64_t act_column(const struct act &a, unsigned column)
{
    if (a.cores)
        return (int64_t)(column / 64) * ((int)a.capacity * 64) + column % 64 / 8 * 64 + column % 8;
    return column / 32 * 256 + column % 8 / 2 * 8 + column % 32 / 16 * 4 + column % 16 / 8 * 2 +
           column % 2;
}

#endif
