/* rope.cuh - the norm of a head, by a warp, and its rotation; and where the cache has its slots. */
#ifndef LINNET_OPS_CUDA_ROPE_CUH
#define LINNET_OPS_CUDA_ROPE_CUH

#include "ops/cuda/cuda_internal.h"

/* Of a layer's keys or values: [block][kv head][KV_BLOCK][head_dim] */
static __device__ __forceinline__ int64_t cache_offset(int32_t slot, int32_t kv_head,
                                                       int32_t n_kv_heads, int32_t head_dim)
{
    return (((int64_t)(slot / KV_BLOCK) * n_kv_heads + kv_head) * KV_BLOCK + slot % KV_BLOCK) *
           head_dim;
}

/* 1 / RMS of a head, by a warp; in: [head_dim], written by other blocks. */
static __device__ __forceinline__ float head_scale(const float *in, int32_t head_dim, float eps)
{
    float sum = 0;
    for (int i = threadIdx.x % 32; i < head_dim; i += 32)
        sum = fmaf(__ldcg(in + i), __ldcg(in + i), sum);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return 1.0f / sqrtf(sum / (float)head_dim + eps);
}

/* The rotation of one pair of values. */
static __device__ __forceinline__ void rotate(float a, float b, float cosine, float sine,
                                              float *low, float *high)
{
    *low = a * cosine - b * sine;
    *high = b * cosine + a * sine;
}

#endif
