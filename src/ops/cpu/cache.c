/*
 * cache.c - the CPU's paged cache of keys and values: [n_layers][K, V][n_blocks][n_kv_heads], and
 * of each a block of 16 tokens in the layout of struct kv_head (kernels.h).
 */
#include <string.h>

#include "ops/cpu/cpu_internal.h"

static int64_t head_bytes(enum kv_type kv, int32_t head_dim)
{
    int64_t values = (int64_t)KV_BLOCK * head_dim;
    return kv == KV_INT8 ? values + KV_BLOCK * (int64_t)sizeof(float)
                         : values * (int64_t)sizeof(float);
}

int64_t cpu_cache_bytes(const struct shape *s, enum kv_type kv, int32_t n_blocks)
{
    return 2 * (int64_t)s->n_layers * n_blocks * s->n_kv_heads * head_bytes(kv, s->head_dim);
}

static int64_t block_bytes(const struct backend *b)
{
    return b->shape.n_kv_heads * head_bytes(b->limits.kv, b->shape.head_dim);
}

/* This layer's keys (or values) of one block and kv head. */
static char *cache_block(const struct backend *b, int32_t layer, int values, int64_t block,
                         int32_t kv_head)
{
    return b->cache +
           ((2 * layer + values) * (int64_t)b->limits.n_blocks + block) * block_bytes(b) +
           kv_head * head_bytes(b->limits.kv, b->shape.head_dim);
}

struct kv_head cpu_kv_head(const struct backend *b, int32_t layer, int32_t kv_head)
{
    return (struct kv_head){.keys = cache_block(b, layer, 0, 0, kv_head),
                            .values = cache_block(b, layer, 1, 0, kv_head),
                            .block_bytes = block_bytes(b),
                            .int8 = b->limits.kv == KV_INT8};
}

/* Element d of token t of a block: keys lie dimension by dimension, values token by token. */
static int64_t element(const struct backend *b, int values, int32_t t, int32_t d)
{
    return values ? (int64_t)t * b->shape.head_dim + d : (int64_t)d * KV_BLOCK + t;
}

static float *scale_of(const struct backend *b, char *block, int32_t t)
{
    return (float *)(void *)(block + KV_BLOCK * b->shape.head_dim) + t;
}

/* 8 bits and a scale, the largest magnitude over 127, to the nearest. What is not finite makes the
 * scale NaN, and so every value. */
static void store_int8(const struct backend *b, int values, int32_t t, const float *x, char *block)
{
    int32_t n = b->shape.head_dim;
    float max = 0, probe = 0;
    for (int32_t d = 0; d < n; d++) {
        float size = x[d] < 0 ? -x[d] : x[d];
        max = size > max ? size : max;
        probe += x[d] - x[d];
    }
    bool zeros = probe != 0 || max < TINIEST;
    for (int32_t d = 0; d < n; d++) {
        float q = zeros ? 0 : (x[d] * (127 / max) + 0x1.8p23f) - 0x1.8p23f;
        ((int8_t *)block)[element(b, values, t, d)] = (int8_t)q;
    }
    *scale_of(b, block, t) = probe != 0 ? probe : max / 127;
}

static void store(const struct backend *b, int values, int32_t t, const float *x, char *block)
{
    if (b->limits.kv == KV_INT8) {
        store_int8(b, values, t, x, block);
        return;
    }
    float *to = (float *)(void *)block;
    if (values)
        memcpy(to + element(b, 1, t, 0), x, (size_t)b->shape.head_dim * sizeof(float));
    else
        for (int32_t d = 0; d < b->shape.head_dim; d++) to[element(b, 0, t, d)] = x[d];
}

void cpu_store_kv(const struct backend *b, int32_t layer, int32_t slot, const float *k,
                  const float *v)
{
    for (int32_t h = 0; h < b->shape.n_kv_heads; h++)
        for (int values = 0; values < 2; values++)
            store(b, values, slot % KV_BLOCK, (values ? v : k) + h * b->shape.head_dim,
                  cache_block(b, layer, values, slot / KV_BLOCK, h));
}

void cpu_read_kv(struct backend *b, int32_t layer, int32_t slot, float *k, float *v)
{
    int32_t head_dim = b->shape.head_dim, t = slot % KV_BLOCK;
    for (int32_t h = 0; h < b->shape.n_kv_heads; h++)
        for (int values = 0; values < 2; values++) {
            char *block = cache_block(b, layer, values, slot / KV_BLOCK, h);
            float *out = (values ? v : k) + h * head_dim;
            for (int32_t d = 0; d < head_dim; d++) {
                int64_t at = element(b, values, t, d);
                out[d] = b->limits.kv == KV_INT8
                             ? *scale_of(b, block, t) * (float)((int8_t *)block)[at]
                             : ((float *)(void *)block)[at];
            }
        }
}

void cpu_copy_blocks(struct backend *b, int32_t layer, const int32_t *from, int32_t to, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        for (int values = 0; values < 2; values++)
            memcpy(cache_block(b, layer, values, to + i, 0),
                   cache_block(b, layer, values, from[i], 0), (size_t)block_bytes(b));
}
