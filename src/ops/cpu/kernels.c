/*
 * kernels.c - work on rows, attention, and the table of an instruction set; compiled once for each,
 * KERNEL_SET. Nothing here may depend on how many tokens are computed together.
 */
#include "ops/cpu/kernels.h"

#include <math.h>

#include "ops/cpu/products.h"
#include "ops/cpu/rows.h"

/* ---- row operations -------------------------------------------------------------------------- */

/* Sum of 16 partial sums by halves: those of each half of them first. */
INLINE float sum_lanes(const vec acc[VECS])
{
    vec sum[VECS];
    for (int v = 0; v < VECS; v++) sum[v] = acc[v];
    for (int half = VECS / 2; half > 0; half /= 2)
        for (int v = 0; v < half; v++) sum[v] = sum[v] + sum[v + half];
    return v_sum(sum[0]);
}

static void rmsnorm(const float *x, const float *weight, int32_t n, float eps, float *out)
{
    vec acc[VECS];
    for (int v = 0; v < VECS; v++) acc[v] = v_set(0);
    int32_t i = 0;
    for (; i + PANEL <= n; i += PANEL)
        for (int v = 0; v < VECS; v++) {
            vec xi = v_load(x + i + v * LANES);
            acc[v] = v_fma(xi, xi, acc[v]);
        }
    float sum = sum_lanes(acc);
    for (int32_t tail = i; tail < n; tail++) sum += x[tail] * x[tail];
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES)
        v_store(out + i, v_load(x + i) * v_set(scale) * v_load(weight + i));
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

static void rope(float *x, const float *row, int32_t head_dim)
{
    int32_t half = head_dim / 2, j = 0;
    for (; j + LANES <= half; j += LANES) {
        vec c = v_load(row + j), s = v_load(row + half + j), a = v_load(x + j),
            b = v_load(x + half + j);
        v_store(x + j, v_fma(a, c, v_set(0) - b * s));
        v_store(x + half + j, v_fma(b, c, a * s));
    }
    for (; j < half; j++) {
        float c = row[j], s = row[half + j], a = x[j], b = x[half + j];
        x[j] = fmaf(a, c, -(b * s));
        x[half + j] = fmaf(b, c, a * s);
    }
}

static void silu_mul(const float *gate, const float *up, int32_t n, float *out)
{
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        v_store(out + i, v_silu_mul(v_load(gate + i), v_load(up + i)));
    if (i == n) return;
    float tail[2][LANES] = {{0}}; /* the same arithmetic for the rest of the row */
    for (int32_t j = i; j < n; j++) tail[0][j - i] = gate[j], tail[1][j - i] = up[j];
    v_store(tail[0], v_silu_mul(v_load(tail[0]), v_load(tail[1])));
    for (int32_t j = i; j < n; j++) out[j] = tail[0][j - i];
}

/* ---- attention ------------------------------------------------------------------------------- */

/* What the registers hold sums of: queries together, and for n of them blocks of keys, vectors of
 * values. A multiply-add's latency wants several sums. */
enum { QUERIES = LANES == 16 ? 8 : 4, MOST_BLOCKS = 4, MOST_VALUES = 8 };
static_assert((int)QUERIES <= (int)ATTENTION_QUERIES && (int)QUERIES <= (int)MOST_ROWS,
              "there is room for the queries, and pointers to them");

INLINE int blocks_at_once(int n)
{
    if (LANES == 16) return n <= 6 ? 4 : n == 7 ? 3 : 2;
    return n == 1 ? 4 : n == 2 ? 2 : 1;
}

INLINE int values_at_once(int n)
{
    if (LANES == 16) return n <= 6 ? 4 : 2;
    return n == 1 ? 8 : n == 2 ? 4 : 2;
}

/* A tile of queries that look at one sequence's keys at a time, so that each key is loaded once for
 * all of them. In a chunk query i looks at n[i] keys, no fewer than the one before it. */
struct tile {
    int n_queries, head_dim;
    int32_t n[QUERIES];
    float *q;      /* [QUERIES][head_dim], and so one distance apart */
    float *scores; /* [QUERIES][ATTENTION_CHUNK] */
    float *part[QUERIES];
};

INLINE float *scores_of(const struct tile *t, int i)
{
    return t->scores + i * ATTENTION_CHUNK;
}

/* LANES values, from the i-th of a block on. */
INLINE vec kv_load(bool int8, const char *block, int64_t i)
{
    return int8 ? v_from_i8((const int8_t *)block + i)
                : v_load((const float *)(const void *)block + i);
}

/* The scales of a block in 8 bits. */
INLINE const float *kv_scales(const char *block, int head_dim)
{
    return (const float *)(const void *)(block + PANEL * head_dim);
}

/* Scores of n_blocks blocks of 16 keys; n_queries * n_blocks * VECS chains at once. */
INLINE void score_blocks(bool int8, int n_queries, int n_blocks, const struct tile *t,
                         const struct kv_head *kv, const int32_t *blocks, int32_t first)
{
    const char *k[MOST_BLOCKS];
    vec acc[QUERIES][MOST_BLOCKS][VECS];
    for (int b = 0; b < n_blocks; b++) k[b] = kv->keys + blocks[b] * kv->block_bytes;
#pragma GCC unroll 8
    for (int i = 0; i < n_queries; i++)
#pragma GCC unroll 4
        for (int b = 0; b < n_blocks; b++)
            for (int v = 0; v < VECS; v++) acc[i][b][v] = v_set(0);
    struct rows q = rows_of(n_queries, t->q, t->head_dim * (int64_t)sizeof(float));
    for (int64_t at = 0, end = t->head_dim * PANEL; at < end; at += PANEL) {
        __asm__("" : "+r"(at)); /* or compilers keep distances between the blocks */
#pragma GCC unroll 4
        for (int b = 0; b < n_blocks; b++) {
            vec key[VECS];
            for (int v = 0; v < VECS; v++) key[v] = kv_load(int8, k[b], at + v * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < n_queries; i++)
                for (int v = 0; v < VECS; v++)
                    acc[i][b][v] =
                        v_fma(key[v], v_set(*(const float *)row_of(&q, i)), acc[i][b][v]);
        }
        next_rows(n_queries, &q, sizeof(float));
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_queries; i++)
#pragma GCC unroll 4
        for (int b = 0; b < n_blocks; b++)
            for (int v = 0; v < VECS; v++) {
                vec score = acc[i][b][v];
                if (int8) score = score * v_load(kv_scales(k[b], t->head_dim) + v * LANES);
                v_store(scores_of(t, i) + first + b * PANEL + v * LANES, score);
            }
}

INLINE void chunk_scores(bool int8, int n_queries, const struct tile *t, const struct kv_head *kv,
                         const int32_t *blocks)
{
    int at_once = blocks_at_once(n_queries);
    int32_t n_blocks = (t->n[n_queries - 1] + PANEL - 1) / PANEL, b = 0;
    for (; b + at_once <= n_blocks; b += at_once)
        score_blocks(int8, n_queries, at_once, t, kv, blocks + b, b * PANEL);
    for (; b < n_blocks; b++) score_blocks(int8, n_queries, 1, t, kv, blocks + b, b * PANEL);
}

/* part[d..d + width * LANES) += p v over keys begin to end, for n_queries queries from `query` on;
 * from 0 where begin is 0. */
INLINE void add_values(bool int8, int n_queries, int width, const struct tile *t, int query,
                       const struct kv_head *kv, const int32_t *blocks, int32_t begin, int32_t end,
                       int32_t d)
{
    vec acc[QUERIES][MOST_VALUES];
#pragma GCC unroll 8
    for (int i = 0; i < n_queries; i++)
#pragma GCC unroll 8
        for (int w = 0; w < width; w++)
            acc[i][w] = begin ? v_load(t->part[query + i] + d + w * LANES) : v_set(0);
    for (int32_t key = begin, stop; key < end;) {
        const char *block = kv->values + blocks[key / PANEL] * kv->block_bytes;
        int64_t value = key % PANEL * t->head_dim + d;
        stop = key / PANEL * PANEL + PANEL;
        stop = stop < end ? stop : end;
        for (; key < stop; key++, value += t->head_dim)
#pragma GCC unroll 8
            for (int w = 0; w < width; w++) {
                vec one = kv_load(int8, block, value + w * LANES);
#pragma GCC unroll 8
                for (int i = 0; i < n_queries; i++)
                    acc[i][w] = v_fma(one, v_set(scores_of(t, query + i)[key]), acc[i][w]);
            }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_queries; i++)
#pragma GCC unroll 8
        for (int w = 0; w < width; w++) v_store(t->part[query + i] + d + w * LANES, acc[i][w]);
}

INLINE void weigh_keys(bool int8, int n_queries, const struct tile *t, int query,
                       const struct kv_head *kv, const int32_t *blocks, int32_t begin, int32_t end)
{
    int width = values_at_once(n_queries);
    int32_t d = 0;
    for (; d + width * LANES <= t->head_dim; d += width * LANES)
        add_values(int8, n_queries, width, t, query, kv, blocks, begin, end, d);
    for (; d + LANES <= t->head_dim; d += LANES)
        add_values(int8, n_queries, 1, t, query, kv, blocks, begin, end, d);
    for (; d < t->head_dim; d++)
        for (int i = query; i < query + n_queries; i++) {
            float sum = begin ? t->part[i][d] : 0;
            for (int32_t key = begin; key < end; key++) {
                const char *block = kv->values + blocks[key / PANEL] * kv->block_bytes;
                int64_t at = key % PANEL * t->head_dim + d;
                float value = int8 ? (float)((const int8_t *)block)[at]
                                   : ((const float *)(const void *)block)[at];
                sum = fmaf(value, scores_of(t, i)[key], sum);
            }
            t->part[i][d] = sum;
        }
}

/* The keys that all queries look at, then what some look at besides: never one beyond its own,
 * whatever lies there. */
INLINE void weigh_values(bool int8, int n_queries, const struct tile *t, const struct kv_head *kv,
                         const int32_t *blocks)
{
    weigh_keys(int8, n_queries, t, 0, kv, blocks, 0, t->n[0]);
    for (int i = 1; i < n_queries; i++)
        if (t->n[i] > t->n[0]) weigh_keys(int8, 1, t, i, kv, blocks, t->n[0], t->n[i]);
}

/* The weights of n values times the values' scales: what the integers are multiplied by. */
static void scale_weights(float *weights, int32_t n, const struct tile *t, const struct kv_head *kv,
                          const int32_t *blocks)
{
    for (int32_t key = 0; key < n; key += PANEL) { /* the last block's rest is not read */
        const float *scales =
            kv_scales(kv->values + blocks[key / PANEL] * kv->block_bytes, t->head_dim);
        for (int v = 0; v < VECS; v++)
            v_store(weights + key + v * LANES,
                    v_load(weights + key + v * LANES) * v_load(scales + v * LANES));
    }
}

/* Scales n scores in place, their padding like the first of them. Returns their maximum; *probe is
 * 0, or NaN if one is not finite. */
static float scale_scores(float *scores, int32_t n, float scale, float *probe)
{
    int32_t padded = (n + PANEL - 1) / PANEL * PANEL;
    vec max = v_set(-INFINITY), sum = v_set(0);
    for (int32_t i = n; i < padded; i++) scores[i] = scores[0];
    for (int32_t i = 0; i < padded; i += LANES) {
        vec s = v_load(scores + i) * v_set(scale);
        max = v_max(max, s);
        sum = sum + (s - s);
        v_store(scores + i, s);
    }
    *probe = v_sum(sum);
    return v_largest(max);
}

/* scores -> exp(score - max) in place, zeros in the padding; returns their sum. */
static float softmax_terms(float *scores, int32_t n, float max)
{
    int32_t padded = (n + PANEL - 1) / PANEL * PANEL;
    vec acc[VECS];
    for (int v = 0; v < VECS; v++) acc[v] = v_set(0);
    for (int32_t i = 0; i < padded; i += PANEL)
        for (int v = 0; v < VECS; v++) {
            float *at = scores + i + v * LANES;
            vec term = v_exp(v_load(at) - v_set(max));
            v_store(at, term);
            if (i + PANEL <= n) acc[v] = acc[v] + term;
        }
    if (n == padded) return sum_lanes(acc);
    for (int32_t i = n; i < padded; i++) scores[i] = 0;
    for (int v = 0; v < VECS; v++) acc[v] = acc[v] + v_load(scores + padded - PANEL + v * LANES);
    return sum_lanes(acc);
}

/* part = the chunk's weighted values; max and sum of exponentials of each query. */
INLINE void attend_chunk(bool int8, int n_queries, const struct tile *t, const struct kv_head *kv,
                         const int32_t *blocks, float *max, float *sum)
{
    float scale = 1.0f / sqrtf((float)t->head_dim);
    chunk_scores(int8, n_queries, t, kv, blocks);
    for (int i = 0; i < n_queries; i++) {
        float probe;
        max[i] = scale_scores(scores_of(t, i), t->n[i], scale, &probe);
        sum[i] = softmax_terms(scores_of(t, i), t->n[i], max[i]) + probe;
        if (int8) scale_weights(scores_of(t, i), t->n[i], t, kv, blocks);
    }
    weigh_values(int8, n_queries, t, kv, blocks);
}

INLINE void attend_chunk_of(bool int8, const struct tile *t, const struct kv_head *kv,
                            const int32_t *blocks, float *max, float *sum)
{
    switch (t->n_queries) {
    case 2: attend_chunk(int8, 2, t, kv, blocks, max, sum); break;
    case 3: attend_chunk(int8, 3, t, kv, blocks, max, sum); break;
    case 4: attend_chunk(int8, 4, t, kv, blocks, max, sum); break;
#if defined(__AVX512F__)
    case 5: attend_chunk(int8, 5, t, kv, blocks, max, sum); break;
    case 6: attend_chunk(int8, 6, t, kv, blocks, max, sum); break;
    case 7: attend_chunk(int8, 7, t, kv, blocks, max, sum); break;
    case 8: attend_chunk(int8, 8, t, kv, blocks, max, sum); break;
#endif
    default: attend_chunk(int8, 1, t, kv, blocks, max, sum);
    }
}

/* A tile's queries to where it has them. */
static void gather_queries(const struct query *queries, int32_t n, int32_t head_dim, float *scratch)
{
    for (int i = 0; i < n; i++)
        memcpy(scratch + i * head_dim, queries[i].q, (size_t)head_dim * sizeof(float));
}

/* The chunk that begins at key `first`, of the queries that have keys there; which of the n is the
 * first such. The queries are gathered. */
static int32_t chunk_parts(const struct query *queries, int32_t n, const struct kv_head *kv,
                           const int32_t *block_table, int32_t head_dim, int32_t first,
                           float *const parts[], float *scratch)
{
    const int32_t *blocks = block_table + first / PANEL;
    float max[QUERIES], sum[QUERIES];
    int32_t begin = 0;
    while (queries[begin].n_keys <= first) begin++;
    struct tile t = {.n_queries = n - begin,
                     .head_dim = head_dim,
                     .q = scratch + begin * head_dim,
                     .scores = scratch + QUERIES * head_dim};
    for (int i = 0; i < t.n_queries; i++) {
        int32_t left = queries[begin + i].n_keys - first;
        t.n[i] = left < ATTENTION_CHUNK ? left : ATTENTION_CHUNK;
        t.part[i] = parts[begin + i];
    }
    if (kv->int8)
        attend_chunk_of(true, &t, kv, blocks, max, sum);
    else
        attend_chunk_of(false, &t, kv, blocks, max, sum);
    for (int i = 0; i < t.n_queries; i++) {
        t.part[i][head_dim] = max[i];
        t.part[i][head_dim + 1] = sum[i];
    }
    return begin;
}

/* out, max and sum of the chunks before and a chunk's, both brought to the larger maximum. */
static void merge_chunk(bool first, const float *part, int32_t head_dim, float *out, float *max,
                        float *sum)
{
    float chunk_max = part[head_dim], chunk_sum = part[head_dim + 1];
    float new_max = !first && *max > chunk_max ? *max : chunk_max;
    float old_weight = first ? 0 : expf(*max - new_max), weight = expf(chunk_max - new_max);
    for (int32_t d = 0; d < head_dim; d++)
        out[d] = fmaf(part[d], weight, first ? 0 : out[d] * old_weight);
    *sum = fmaf(chunk_sum, weight, first ? 0 : *sum * old_weight);
    *max = new_max;
}

static void normalize(float *out, int32_t head_dim, float sum)
{
    float inverse = 1.0f / sum;
    for (int32_t d = 0; d < head_dim; d++) out[d] *= inverse;
}

static void attend_tile(const struct query *queries, int n, const struct kv_head *kv,
                        const int32_t *block_table, int32_t head_dim, float *scratch)
{
    float max[QUERIES], sum[QUERIES], *parts[QUERIES];
    gather_queries(queries, n, head_dim, scratch);
    for (int i = 0; i < QUERIES; i++)
        parts[i] = scratch + QUERIES * (head_dim + ATTENTION_CHUNK) + i * attention_part(head_dim);
    for (int32_t first = 0; first < queries[n - 1].n_keys; first += ATTENTION_CHUNK)
        for (int32_t i = chunk_parts(queries, n, kv, block_table, head_dim, first, parts, scratch);
             i < n; i++)
            merge_chunk(first == 0, parts[i], head_dim, queries[i].out, &max[i], &sum[i]);
    for (int i = 0; i < n; i++) normalize(queries[i].out, head_dim, sum[i]);
}

static void attend(const struct query *queries, int32_t n, const struct kv_head *kv,
                   const int32_t *block_table, int32_t head_dim, float *scratch)
{
    for (int32_t i = 0; i < n; i += QUERIES)
        attend_tile(queries + i, n - i < QUERIES ? n - i : QUERIES, kv, block_table, head_dim,
                    scratch);
}

static int32_t attend_one_chunk(const struct query *queries, int32_t n, const struct kv_head *kv,
                                const int32_t *block_table, int32_t head_dim, int32_t first,
                                float *const parts[], float *scratch)
{
    gather_queries(queries, n, head_dim, scratch);
    return chunk_parts(queries, n, kv, block_table, head_dim, first, parts, scratch);
}

static void merge_chunks(const float *parts, int32_t n, int32_t head_dim, float *out)
{
    float max, sum;
    for (int32_t i = 0; i < n; i++)
        merge_chunk(i == 0, parts + i * attention_part(head_dim), head_dim, out, &max, &sum);
    normalize(out, head_dim, sum);
}

#define NAME_TEXT(set) #set
#define NAME(set)      NAME_TEXT(set)

const struct kernels KERNEL(kernels) = {
    .name = NAME(KERNEL_SET),
    .bf16_dots = BF16_DOTS,
    .activate = KERNEL(activate),
    .product = KERNEL(product),
    .rmsnorm = rmsnorm,
    .rope = rope,
    .silu_mul = silu_mul,
    .queries = QUERIES,
    .attend = attend,
    .attend_chunk = attend_one_chunk,
    .merge_chunks = merge_chunks,
};
