/* rope.cuh - one head of one token by one warp: q/k norm, RoPE, rounding to bf16; and where the
 * cache has its slots. */
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

/* in: [head_dim], written by other blocks; rope: [head_dim]; norm: [head_dim] or NULL. A second
 * copy goes to `also` unless it is NULL. */
static __device__ __forceinline__ void rope_head(const float *in, const float *rope,
                                                 const float *norm, int32_t head_dim, float eps,
                                                 bf16 *out, bf16 *also = NULL)
{
    int lane = threadIdx.x % 32, half = head_dim / 2;
    float scale = 1;
    if (norm) {
        float sum = 0;
        for (int i = lane; i < head_dim; i += 32) sum = fmaf(__ldcg(in + i), __ldcg(in + i), sum);
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        scale = 1.0f / sqrtf(sum / (float)head_dim + eps);
    }
    for (int j = lane; j < half; j += 32) {
        float a = __ldcg(in + j), b = __ldcg(in + half + j), c = rope[j], s = rope[half + j];
        if (norm) a = a * scale * norm[j], b = b * scale * norm[half + j];
        bf16 low = __float2bfloat16(a * c - b * s), high = __float2bfloat16(b * c + a * s);
        out[j] = low;
        out[half + j] = high;
        if (also) also[j] = low, also[half + j] = high;
    }
}

static __device__ __forceinline__ void copy_head(const float *in, int32_t head_dim, bf16 *out,
                                                 bf16 *also = NULL)
{
    for (int i = threadIdx.x % 32; i < head_dim; i += 32) {
        bf16 v = __float2bfloat16(__ldcg(in + i));
        out[i] = v;
        if (also) also[i] = v;
    }
}

#endif
