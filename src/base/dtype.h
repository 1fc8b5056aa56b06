/*
 * dtype.h - the number formats of weights, block by block as the files hold them.
 * Source: the GGUF specification and the public ggml block layouts. All little-endian.
 */
#ifndef LINNET_BASE_DTYPE_H
#define LINNET_BASE_DTYPE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum dtype {
    DTYPE_F32,
    DTYPE_F16,
    DTYPE_BF16,
    DTYPE_Q8_0,
    DTYPE_Q4_0,
    DTYPE_Q4_1,
    DTYPE_Q5_0,
    DTYPE_Q5_1,
    DTYPE_Q4_K,
    DTYPE_Q5_K,
    DTYPE_Q6_K,
    DTYPE_COUNT
};

/* w[j] = d * q[j] */
struct block_q8_0 {
    uint16_t d; /* f16 */
    int8_t q[32];
};

/* w[j] = d * (nibble[j] - 8); nibble j: low half of q[j], nibble j + 16: high half */
struct block_q4_0 {
    uint16_t d;
    uint8_t q[16];
};

/* w[j] = d * nibble[j] + m */
struct block_q4_1 {
    uint16_t d, m;
    uint8_t q[16];
};

/* as q4_0 with a fifth bit, bit j of `high`; minus 16 */
struct block_q5_0 {
    uint16_t d;
    uint8_t high[4];
    uint8_t q[16];
};

struct block_q5_1 {
    uint16_t d, m;
    uint8_t high[4];
    uint8_t q[16];
};

/* 8 groups of 32: w = d * scale * nibble - dmin * min; scales and mins 6 bits each, packed */
struct block_q4_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t q[128];
};

struct block_q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t high[32];
    uint8_t q[128];
};

/* 16 groups of 16: w = d * scale * (six bits - 32) */
struct block_q6_k {
    uint8_t low[128];
    uint8_t high[64];
    int8_t scales[16];
    uint16_t d;
};

static_assert(sizeof(struct block_q8_0) == 34, "q8_0");
static_assert(sizeof(struct block_q4_0) == 18, "q4_0");
static_assert(sizeof(struct block_q4_1) == 20, "q4_1");
static_assert(sizeof(struct block_q5_0) == 22, "q5_0");
static_assert(sizeof(struct block_q5_1) == 24, "q5_1");
static_assert(sizeof(struct block_q4_k) == 144, "q4_k");
static_assert(sizeof(struct block_q5_k) == 176, "q5_k");
static_assert(sizeof(struct block_q6_k) == 210, "q6_k");

const char *dtype_name(enum dtype dtype); /* "Q4_1" */
int64_t dtype_block(enum dtype dtype);    /* elements a block; a row is a whole number of them */
int64_t dtype_block_bytes(enum dtype dtype);

/* Bytes of n elements; n must be a multiple of the block. */
static inline int64_t dtype_bytes(enum dtype dtype, int64_t n)
{
    return n / dtype_block(dtype) * dtype_block_bytes(dtype);
}

/* Expands n elements (a multiple of the block) to exact fp32. src needs no alignment. */
void dtype_to_f32(enum dtype dtype, const void *src, int64_t n, float *dst);

/* The quants of a block before scale and minimum: element j (0..31), or j of group g of 32. */
static inline int q5_quant(const uint8_t q[16], const uint8_t high[4], int j)
{
    return (j < 16 ? q[j] & 15 : q[j - 16] >> 4) | (high[j / 8] >> (j % 8) & 1) << 4;
}

static inline int q4_k_quant(const struct block_q4_k *b, int g, int j)
{
    int byte = b->q[g / 2 * 32 + j];
    return g % 2 ? byte >> 4 : byte & 15;
}

static inline int q5_k_quant(const struct block_q5_k *b, int g, int j)
{
    int byte = b->q[g / 2 * 32 + j];
    return (g % 2 ? byte >> 4 : byte & 15) | (b->high[j] >> g & 1) << 4;
}

/* -32..31; the scale is scales[2 g + j / 16] */
static inline int q6_k_quant(const struct block_q6_k *b, int g, int j)
{
    int half = g / 4, quarter = g % 4, byte = b->low[half * 64 + quarter % 2 * 32 + j];
    int low = quarter < 2 ? byte & 15 : byte >> 4;
    return (low | (b->high[half * 32 + j] >> (2 * quarter) & 3) << 4) - 32;
}

/* Scale and minimum of group g (0..7) of a Q4_K or Q5_K block: w = d*scale*q - dmin*min. */
void dtype_k_scales(const uint8_t scales[12], int g, int *scale, int *min);

static inline float f32_from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t f32_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

static inline float f32_from_bf16(uint16_t h)
{
    return f32_from_bits((uint32_t)h << 16);
}

/* Round to nearest even; NaN stays NaN. */
uint16_t bf16_from_f32(float f);

/* Subnormals are kept: real K-quant scales use them. */
float f32_from_f16(uint16_t h);
uint16_t f16_from_f32(float f);

#endif
