/*
 * norm.cuh - the two halves of RMSNorm around matrix products, in the one order of sums that every
 * kernel keeps to: squares of a panel's 16 rows, then the panels.
 */
#ifndef LINNET_OPS_CUDA_NORM_CUH
#define LINNET_OPS_CUDA_NORM_CUH

#include "ops/cuda/cuda_internal.h"

/*
 * Sum of squares of a panel's 16 rows of one token. Lane 4 g + t has rows g (low) and g + 8 (high)
 * of one of the tokens of its t; afterwards all lanes of that t have the token's sum.
 */
static __device__ __forceinline__ float panel_squares(float low, float high)
{
    float sum = fmaf(high, high, low * low);
    sum += __shfl_xor_sync(~0u, sum, 4);
    sum += __shfl_xor_sync(~0u, sum, 8);
    sum += __shfl_xor_sync(~0u, sum, 16);
    return sum;
}

/* 1 / rms of one token, by a whole warp; every lane gets it. squares: of the token, [n_panels],
 * written by other blocks of this or an earlier kernel. */
static __device__ __forceinline__ float token_scale(const float *squares, int n_panels, int width,
                                                    float eps)
{
    float sum = 0;
    for (int p = threadIdx.x % 32; p < n_panels; p += 32) sum += __ldcg(squares + p);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return 1.0f / sqrtf(sum / (float)width + eps);
}

static __device__ __forceinline__ float silu(float v)
{
    return __fdividef(v, 1.0f + __expf(-v));
}

#endif
