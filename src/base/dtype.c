#include "base/dtype.h"

#include <math.h>

static const struct {
    const char *name;
    int block, bytes;
} info[DTYPE_COUNT] = {
    [DTYPE_F32] = {"F32", 1, 4},
    [DTYPE_F16] = {"F16", 1, 2},
    [DTYPE_BF16] = {"BF16", 1, 2},
    [DTYPE_Q8_0] = {"Q8_0", 32, sizeof(struct block_q8_0)},
    [DTYPE_Q4_0] = {"Q4_0", 32, sizeof(struct block_q4_0)},
    [DTYPE_Q4_1] = {"Q4_1", 32, sizeof(struct block_q4_1)},
    [DTYPE_Q5_0] = {"Q5_0", 32, sizeof(struct block_q5_0)},
    [DTYPE_Q5_1] = {"Q5_1", 32, sizeof(struct block_q5_1)},
    [DTYPE_Q4_K] = {"Q4_K", 256, sizeof(struct block_q4_k)},
    [DTYPE_Q5_K] = {"Q5_K", 256, sizeof(struct block_q5_k)},
    [DTYPE_Q6_K] = {"Q6_K", 256, sizeof(struct block_q6_k)},
};

const char *dtype_name(enum dtype dtype)
{
    return info[dtype].name;
}

int64_t dtype_block(enum dtype dtype)
{
    return info[dtype].block;
}

int64_t dtype_block_bytes(enum dtype dtype)
{
    return info[dtype].bytes;
}

float f32_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3FF;
    if (exponent == 31) return f32_from_bits(sign | 0x7F800000u | mantissa << 13);
    if (exponent) return f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float f = (float)mantissa * 0x1p-24f;
    return sign ? -f : f;
}

uint16_t f16_from_f32(float f)
{
    uint32_t bits = f32_bits(f), sign = bits >> 16 & 0x8000;
    float a = fabsf(f);
    if (a != a) return (uint16_t)(sign | 0x7E00);
    if (a >= 65520.0f) return (uint16_t)(sign | 0x7C00);
    if (a < 0x1p-14f) return (uint16_t)(sign | (uint32_t)lrintf(a * 0x1p24f));
    uint32_t x = bits & 0x7FFFFFFF;
    x += 0xFFF + (x >> 13 & 1); /* nearest even */
    return (uint16_t)(sign | (x - (112u << 23)) >> 13);
}

uint16_t bf16_from_f32(float f)
{
    uint32_t bits = f32_bits(f);
    if (f != f) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void dtype_k_scales(const uint8_t s[12], int g, int *scale, int *min)
{
    if (g < 4) {
        *scale = s[g] & 63;
        *min = s[g + 4] & 63;
    } else {
        *scale = (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        *min = s[g + 4] >> 4 | s[g] >> 6 << 4;
    }
}

static void expand_q8_0(const void *src, float *dst)
{
    struct block_q8_0 b;
    memcpy(&b, src, sizeof b);
    float d = f32_from_f16(b.d);
    for (int j = 0; j < 32; j++) dst[j] = d * (float)b.q[j];
}

static void expand_q4_0(const void *src, float *dst)
{
    struct block_q4_0 b;
    memcpy(&b, src, sizeof b);
    float d = f32_from_f16(b.d);
    for (int j = 0; j < 16; j++) {
        dst[j] = d * (float)((b.q[j] & 15) - 8);
        dst[j + 16] = d * (float)((b.q[j] >> 4) - 8);
    }
}

static void expand_q4_1(const void *src, float *dst)
{
    struct block_q4_1 b;
    memcpy(&b, src, sizeof b);
    float d = f32_from_f16(b.d), m = f32_from_f16(b.m);
    for (int j = 0; j < 16; j++) {
        dst[j] = d * (float)(b.q[j] & 15) + m;
        dst[j + 16] = d * (float)(b.q[j] >> 4) + m;
    }
}

static void expand_q5_0(const void *src, float *dst)
{
    struct block_q5_0 b;
    memcpy(&b, src, sizeof b);
    float d = f32_from_f16(b.d);
    for (int j = 0; j < 32; j++) dst[j] = d * (float)(q5_quant(b.q, b.high, j) - 16);
}

static void expand_q5_1(const void *src, float *dst)
{
    struct block_q5_1 b;
    memcpy(&b, src, sizeof b);
    float d = f32_from_f16(b.d), m = f32_from_f16(b.m);
    for (int j = 0; j < 32; j++) dst[j] = d * (float)q5_quant(b.q, b.high, j) + m;
}

static void expand_q4_k(const void *src, float *dst)
{
    struct block_q4_k b;
    memcpy(&b, src, sizeof b);
    float d = f32_from_f16(b.d), dmin = f32_from_f16(b.dmin);
    for (int g = 0; g < 8; g++) {
        int scale, min;
        dtype_k_scales(b.scales, g, &scale, &min);
        float ds = d * (float)scale, dm = dmin * (float)min;
        for (int j = 0; j < 32; j++) dst[g * 32 + j] = ds * (float)q4_k_quant(&b, g, j) - dm;
    }
}

static void expand_q5_k(const void *src, float *dst)
{
    struct block_q5_k b;
    memcpy(&b, src, sizeof b);
    float d = f32_from_f16(b.d), dmin = f32_from_f16(b.dmin);
    for (int g = 0; g < 8; g++) {
        int scale, min;
        dtype_k_scales(b.scales, g, &scale, &min);
        float ds = d * (float)scale, dm = dmin * (float)min;
        for (int j = 0; j < 32; j++) dst[g * 32 + j] = ds * (float)q5_k_quant(&b, g, j) - dm;
    }
}

static void expand_q6_k(const void *src, float *dst)
{
    struct block_q6_k b;
    memcpy(&b, src, sizeof b);
    float d = f32_from_f16(b.d);
    for (int j = 0; j < 256; j++)
        dst[j] = d * (float)b.scales[j / 16] * (float)q6_k_quant(&b, j / 32, j % 32);
}

static void expand_blocks(void (*expand)(const void *, float *), enum dtype dtype, const char *src,
                          int64_t n, float *dst)
{
    int64_t block = dtype_block(dtype), bytes = dtype_block_bytes(dtype);
    for (int64_t i = 0; i < n / block; i++) expand(src + i * bytes, dst + i * block);
}

void dtype_to_f32(enum dtype dtype, const void *src, int64_t n, float *dst)
{
    const char *p = src;
    uint16_t h;
    switch (dtype) {
    case DTYPE_F32: memcpy(dst, src, (size_t)n * 4); return;
    case DTYPE_F16:
        for (int64_t i = 0; i < n; i++) {
            memcpy(&h, p + 2 * i, 2);
            dst[i] = f32_from_f16(h);
        }
        return;
    case DTYPE_BF16:
        for (int64_t i = 0; i < n; i++) {
            memcpy(&h, p + 2 * i, 2);
            dst[i] = f32_from_bf16(h);
        }
        return;
    case DTYPE_Q8_0: expand_blocks(expand_q8_0, dtype, p, n, dst); return;
    case DTYPE_Q4_0: expand_blocks(expand_q4_0, dtype, p, n, dst); return;
    case DTYPE_Q4_1: expand_blocks(expand_q4_1, dtype, p, n, dst); return;
    case DTYPE_Q5_0: expand_blocks(expand_q5_0, dtype, p, n, dst); return;
    case DTYPE_Q5_1: expand_blocks(expand_q5_1, dtype, p, n, dst); return;
    case DTYPE_Q4_K: expand_blocks(expand_q4_k, dtype, p, n, dst); return;
    case DTYPE_Q5_K: expand_blocks(expand_q5_k, dtype, p, n, dst); return;
    case DTYPE_Q6_K: expand_blocks(expand_q6_k, dtype, p, n, dst); return;
    case DTYPE_COUNT: break;
    }
}
