/*
 * kernels.c - work on rows, attention, and the table of an instruction set; compiled once for each,
 * KERNEL_SET. Nothing here may depend on how many tokens are computed together.
 */
#include "ops/cpu/kernels.h"

#include <math.h>

#include "ops/cpu/products.h"
#include "ops/cpu/vector.h"

/* ---- row operations -------------------------------------------------------------------------- */

/* Sum of 16 partial sums in a fixed order. */
INLINE float sum_lanes(const vec acc[VECS])
{
    float lane[PANEL];
    for (int v = 0; v < VECS; v++) v_store(lane + v * LANES, acc[v]);
    for (int width = PANEL / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
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
    for (; i + LANES <= n; i += LANES) {
        vec g = v_load(gate + i);
        v_store(out + i, g / (v_set(1) + v_exp(v_set(0) - g)) * v_load(up + i));
    }
    if (i == n) return;
    float tail[2][LANES] = {{0}}; /* the same arithmetic for the rest of the row */
    for (int32_t j = i; j < n; j++) tail[0][j - i] = gate[j], tail[1][j - i] = up[j];
    vec g = v_load(tail[0]);
    v_store(tail[0], g / (v_set(1) + v_exp(v_set(0) - g)) * v_load(tail[1]));
    for (int32_t j = i; j < n; j++) out[j] = tail[0][j - i];
}

/* ---- attention ------------------------------------------------------------------------------- */

/* scores[16 * n_blocks] = q k for blocks of 16 keys; n_blocks chains of VECS vectors at once. */
INLINE void score_blocks(int n_blocks, const float *q, const float *keys, int64_t block_stride,
                         const int32_t *blocks, int32_t head_dim, float *scores)
{
    const float *k[4];
    vec acc[4][VECS];
#pragma GCC unroll 4
    for (int b = 0; b < n_blocks; b++) {
        k[b] = keys + blocks[b] * block_stride;
        for (int v = 0; v < VECS; v++) acc[b][v] = v_set(0);
    }
    for (int32_t d = 0; d < head_dim; d++) {
        vec qd = v_set(q[d]);
#pragma GCC unroll 4
        for (int b = 0; b < n_blocks; b++)
            for (int v = 0; v < VECS; v++)
                acc[b][v] = v_fma(v_load(k[b] + d * PANEL + v * LANES), qd, acc[b][v]);
    }
#pragma GCC unroll 4
    for (int b = 0; b < n_blocks; b++)
        for (int v = 0; v < VECS; v++) v_store(scores + b * PANEL + v * LANES, acc[b][v]);
}

/* out[0..width * LANES) += p v over n keys, for that part of the dimensions */
INLINE void add_values(int width, const float *p, const float *values, int64_t block_stride,
                       const int32_t *blocks, int32_t n, int32_t head_dim, float *out)
{
    vec acc[8];
#pragma GCC unroll 8
    for (int w = 0; w < width; w++) acc[w] = v_set(0);
    for (int32_t i = 0; i < n; i++) {
        const float *value = values + blocks[i / PANEL] * block_stride + i % PANEL * head_dim;
        vec pi = v_set(p[i]);
#pragma GCC unroll 8
        for (int w = 0; w < width; w++) acc[w] = v_fma(v_load(value + w * LANES), pi, acc[w]);
    }
#pragma GCC unroll 8
    for (int w = 0; w < width; w++) v_store(out + w * LANES, acc[w]);
}

static void weigh_values(const float *p, const float *values, int64_t block_stride,
                         const int32_t *blocks, int32_t n, int32_t head_dim, float *out)
{
    int32_t d = 0;
    for (; d + 8 * LANES <= head_dim; d += 8 * LANES)
        add_values(8, p, values + d, block_stride, blocks, n, head_dim, out + d);
    for (; d + LANES <= head_dim; d += LANES)
        add_values(1, p, values + d, block_stride, blocks, n, head_dim, out + d);
    for (; d < head_dim; d++) {
        float sum = 0;
        for (int32_t i = 0; i < n; i++)
            sum = fmaf(values[blocks[i / PANEL] * block_stride + i % PANEL * head_dim + d], p[i],
                       sum);
        out[d] = sum;
    }
}

/* Scales n scores in place. Returns their maximum; *probe is 0, or NaN if one is not finite. */
static float scale_scores(float *scores, int32_t n, float scale, float *probe)
{
    float lane[LANES], largest = -INFINITY;
    vec max = v_set(-INFINITY), sum = v_set(0);
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec s = v_load(scores + i) * v_set(scale);
        max = v_max(max, s);
        sum = sum + (s - s);
        v_store(scores + i, s);
    }
    v_store(lane, max);
    for (int l = 0; l < LANES; l++) largest = lane[l] > largest ? lane[l] : largest;
    v_store(lane, sum);
    *probe = 0;
    for (int l = 0; l < LANES; l++) *probe += lane[l];
    for (; i < n; i++) {
        scores[i] *= scale;
        largest = scores[i] > largest ? scores[i] : largest;
        *probe += scores[i] - scores[i];
    }
    return largest;
}

/* scores -> exp(score - max) in place, zeros in the padding; returns their sum. */
static float softmax_terms(float *scores, int32_t n, float max)
{
    int32_t padded = (n + PANEL - 1) / PANEL * PANEL;
    vec acc[VECS];
    for (int v = 0; v < VECS; v++) acc[v] = v_set(0);
    for (int32_t i = 0; i < padded; i += LANES)
        v_store(scores + i, v_exp(v_load(scores + i) - v_set(max)));
    for (int32_t i = n; i < padded; i++) scores[i] = 0;
    for (int32_t i = 0; i < padded; i += PANEL)
        for (int v = 0; v < VECS; v++) acc[v] = acc[v] + v_load(scores + i + v * LANES);
    return sum_lanes(acc);
}

static void chunk_scores(const float *q, const float *keys, int64_t block_stride,
                         const int32_t *blocks, int32_t n_keys, int32_t head_dim, float *scores)
{
    int32_t n_blocks = (n_keys + PANEL - 1) / PANEL, b = 0;
    for (; b + 4 <= n_blocks; b += 4)
        score_blocks(4, q, keys, block_stride, blocks + b, head_dim, scores + b * PANEL);
    for (; b < n_blocks; b++)
        score_blocks(1, q, keys, block_stride, blocks + b, head_dim, scores + b * PANEL);
}

static void attend(const float *q, const float *keys, const float *values, int64_t block_stride,
                   const int32_t *block_table, int32_t n_keys, int32_t head_dim, float *scratch,
                   float *out)
{
    float *part = scratch, *scores = scratch + head_dim;
    float scale = 1.0f / sqrtf((float)head_dim), max = -INFINITY, sum = 0;
    for (int32_t first = 0; first < n_keys; first += ATTENTION_CHUNK) {
        const int32_t *blocks = block_table + first / PANEL;
        int32_t n = n_keys - first < ATTENTION_CHUNK ? n_keys - first : ATTENTION_CHUNK;
        chunk_scores(q, keys, block_stride, blocks, n, head_dim, scores);
        float probe, chunk_max = scale_scores(scores, n, scale, &probe);
        float chunk_sum = softmax_terms(scores, n, chunk_max) + probe;
        weigh_values(scores, values, block_stride, blocks, n, head_dim, part);
        /* merge, ascending: both parts brought to the larger maximum */
        float new_max = max > chunk_max ? max : chunk_max;
        float old_weight = first ? expf(max - new_max) : 0, weight = expf(chunk_max - new_max);
        for (int32_t d = 0; d < head_dim; d++)
            out[d] = (first ? out[d] * old_weight : 0) + part[d] * weight;
        sum = sum * old_weight + chunk_sum * weight;
        max = new_max;
    }
    float inverse = 1.0f / sum;
    for (int32_t d = 0; d < head_dim; d++) out[d] *= inverse;
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
    .attend = attend,
};
