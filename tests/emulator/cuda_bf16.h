/* cuda_bf16.h - bfloat16 for kernels that run on the host. */
#ifndef LINNET_EMULATOR_BF16_H
#define LINNET_EMULATOR_BF16_H

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

static inline __nv_bfloat16 __float2bfloat16(float v)
{
    uint32_t u;
    memcpy(&u, &v, 4);
    if ((u & 0x7FFFFFFF) > 0x7F800000) return {(uint16_t)0x7FFF};
    return {(uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16)};
}

static inline float __bfloat162float(__nv_bfloat16 v)
{
    uint32_t u = (uint32_t)v.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y)
{
    return {__float2bfloat16(x), __float2bfloat16(y)};
}

static inline float2 __bfloat1622float2(__nv_bfloat162 v)
{
    return {__bfloat162float(v.x), __bfloat162float(v.y)};
}

#endif
