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

enum { KEY_TILES = CHUNK_KEYS / 8 };

static __device__ __forceinline__ void mma_16816(float c[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                 uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

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

/*
 * Scores (q k, unscaled; scale holds head_dim^-0.5 log2 e) -> weights relative to the chunk's own
 * maximum, as the four A fragments p[i] of 16 keys each. n_keys[j]: how many of the chunk's keys
 * row g + 8 j sees; 0: none, its weights are zero and max is -infinity. Sums are of the weights as
 * rounded to bf16: two by two over ascending key tiles in a lane, then over the row's four lanes.
 */
static __device__ __forceinline__ struct chunk chunk_weights(float s[KEY_TILES][4], float scale,
                                                             const int n_keys[2],
                                                             uint32_t p[KEY_TILES / 2][4],
                                                             int n_rows = 2)
{
    struct chunk c;
    int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float max = -INFINITY, sum = 0;
        if (j >= n_rows) { /* nobody wants rows g + 8 */
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) p[n / 2][n % 2 * 2 + j] = 0;
            continue;
        }
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float v = 8 * n + 2 * t + i < n_keys[j] ? s[n][2 * j + i] * scale : -INFINITY;
                s[n][2 * j + i] = v;
                max = fmaxf(max, v);
            }
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
        max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
        float from = n_keys[j] > 0 ? max : 0.0f; /* a row without keys: exp2(-inf) = 0, not NaN */
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) {
            uint32_t pair = pack_bf16(exp2f(s[n][2 * j] - from), exp2f(s[n][2 * j + 1] - from));
            float2 w = __bfloat1622float2(*(__nv_bfloat162 *)&pair);
            sum += w.x;
            sum += w.y;
            p[n / 2][n % 2 * 2 + j] = pair;
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        c.max[j] = max;
        c.sum[j] = sum;
    }
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

static __device__ __forceinline__ float merge_value(float running, float chunk, float old,
                                                    float add)
{
    return fmaf(chunk, add, running * old);
}

#endif
