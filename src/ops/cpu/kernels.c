/*
 * kernels.c - compiled once for each instruction set; KERNEL_SET names the table it exports.
 * Nothing here may depend on how many tokens are computed together.
 */
#include "ops/cpu/kernels.h"

#include <math.h>

#include "ops/cpu/vector.h"

static_assert(PANEL == VECS * LANES, "a panel is VECS vectors");

enum { PANELS_AT_ONCE = 2 };

/* ---- weights -------------------------------------------------------------------------------- */

/* What a group of 32 columns needs besides its quants. */
struct group {
    vec scale[VECS], min[VECS];
    const uint8_t *q;
};

INLINE const uint8_t *open_simple(const uint8_t *p, bool with_min, struct group *g)
{
    for (int v = 0; v < VECS; v++) g->scale[v] = v_from_f16((const uint16_t *)p + v * LANES);
    p += PANEL * 2;
    if (with_min) {
        for (int v = 0; v < VECS; v++) g->min[v] = v_from_f16((const uint16_t *)p + v * LANES);
        p += PANEL * 2;
    }
    g->q = p;
    return p;
}

enum {
    NIBBLES = GROUP / 2 * PANEL, /* bytes of a group's quants */
    BYTES = GROUP * PANEL,
    SUPER_HEAD = PANEL * 2, /* bytes of d (or of dmin) of a super-block */
};

/* Group i of a panel: where its quants are, and its scales. */
INLINE void open_group(enum pack pack, const uint8_t *panel, int64_t i, struct group *g)
{
    const uint8_t *super;
    int64_t in_super = i % SUPER_GROUPS;
    switch (pack) {
    case PACK_Q8_0: open_simple(panel + i * (PANEL * 2 + BYTES), false, g); return;
    case PACK_Q5_1: open_simple(panel + i * (PANEL * 4 + BYTES), true, g); return;
    case PACK_Q4_0: open_simple(panel + i * (PANEL * 2 + NIBBLES), false, g); return;
    case PACK_Q4_1: open_simple(panel + i * (PANEL * 4 + NIBBLES), true, g); return;
    case PACK_Q4_K:
    case PACK_Q5_K: {
        int64_t group_bytes = 2 * PANEL + (pack == PACK_Q4_K ? NIBBLES : BYTES);
        super = panel + i / SUPER_GROUPS * (2 * SUPER_HEAD + SUPER_GROUPS * group_bytes);
        const uint8_t *p = super + 2 * SUPER_HEAD + in_super * group_bytes;
        for (int v = 0; v < VECS; v++) {
            g->scale[v] =
                v_from_f16((const uint16_t *)super + v * LANES) * v_from_u8(p + v * LANES);
            g->min[v] = v_set(0) - v_from_f16((const uint16_t *)(super + SUPER_HEAD) + v * LANES) *
                                       v_from_u8(p + PANEL + v * LANES);
        }
        g->q = p + 2 * PANEL;
        return;
    }
    case PACK_Q6_K:
        super = panel + i / SUPER_GROUPS * (SUPER_HEAD + SUPER_GROUPS * (2 * PANEL + BYTES));
        g->q = super + SUPER_HEAD + in_super * (2 * PANEL + BYTES) + 2 * PANEL;
        for (int v = 0; v < VECS; v++) { /* both halves' scales: the second lies in min */
            const int8_t *scale = (const int8_t *)g->q - 2 * PANEL + v * LANES;
            vec d = v_from_f16((const uint16_t *)super + v * LANES);
            g->scale[v] = d * v_from_i8(scale);
            g->min[v] = d * v_from_i8(scale + PANEL);
        }
        return;
    default: return;
    }
}

/* Runs over a group's columns with the half and the parity of j known to the compiler. */
/* clang-format off */
#define FOR_EACH_COLUMN(half, odd, j)                                                              \
    _Pragma("GCC unroll 2")                                                                        \
    for (int half = 0; half < 2; half++)                                                           \
        for (int pair = half * 16; pair < half * 16 + 16; pair += 2)                               \
            _Pragma("GCC unroll 2")                                                                \
            for (int odd = 0, j = pair; odd < 2; odd++, j++)
/* clang-format on */

/* Vector v of column j (0..31) of a group, as the exact fp32 weight. `odd` is j % 2 and `half`
 * j / 16, both known when this is compiled. */
INLINE vec group_weight(enum pack pack, const struct group *g, int half, int odd, int j, int v)
{
    const uint8_t *nibbles = g->q + j / 2 * PANEL + v * LANES,
                  *bytes = g->q + j * PANEL + v * LANES;
    switch (pack) {
    case PACK_Q8_0: return g->scale[v] * v_from_i8((const int8_t *)bytes);
    case PACK_Q5_1:
    case PACK_Q5_K: return v_fma(g->scale[v], v_from_u8(bytes), g->min[v]);
    case PACK_Q4_0:
        return g->scale[v] * ((odd ? v_from_high(nibbles) : v_from_low(nibbles)) - v_set(8));
    case PACK_Q4_1:
    case PACK_Q4_K:
        return v_fma(g->scale[v], odd ? v_from_high(nibbles) : v_from_low(nibbles), g->min[v]);
    case PACK_Q6_K: return (half ? g->min[v] : g->scale[v]) * v_from_i8((const int8_t *)bytes);
    default: return v_set(0);
    }
}

/* Vector v of column c of an unquantized panel. */
INLINE vec plain_weight(enum pack pack, const uint8_t *panel, int64_t c, int v)
{
    int64_t at = c * PANEL + v * LANES;
    switch (pack) {
    case PACK_F32: return v_load((const float *)panel + at);
    case PACK_F16: return v_from_f16((const uint16_t *)panel + at);
    default: return v_from_bf16((const uint16_t *)panel + at);
    }
}

/* total (+)= acc: the end of a segment of columns. */
INLINE void end_segment(int64_t first_column, float *total, const vec acc[VECS])
{
    for (int v = 0; v < VECS; v++) {
        vec old = first_column ? v_load(total + v * LANES) : v_set(0);
        v_store(total + v * LANES, old + acc[v]);
    }
}

INLINE int64_t segment_end(int64_t first, int64_t columns)
{
    return columns - first < SEGMENT ? columns : first + SEGMENT;
}

/*
 * n_panels panels, `stride` bytes apart, at once: a single one has too few independent chains to
 * hide the latency of a fused multiply-add.
 */
INLINE void vector_groups(enum pack pack, int n_panels, const uint8_t *panels, int64_t stride,
                          const float *x, int64_t columns, float *y)
{
    for (int64_t first = 0, end; first < columns; first = end) {
        vec acc[PANELS_AT_ONCE][VECS];
        end = segment_end(first, columns);
        for (int p = 0; p < n_panels; p++)
            for (int v = 0; v < VECS; v++) acc[p][v] = v_set(0);
        for (int64_t c = first; c < end; c += GROUP) {
            struct group g[PANELS_AT_ONCE];
            for (int p = 0; p < n_panels; p++)
                open_group(pack, panels + p * stride, c / GROUP, &g[p]);
            FOR_EACH_COLUMN(half, odd, j)
            {
                vec xj = v_set(x[c + j]);
                for (int p = 0; p < n_panels; p++)
                    for (int v = 0; v < VECS; v++)
                        acc[p][v] =
                            v_fma(group_weight(pack, &g[p], half, odd, j, v), xj, acc[p][v]);
            }
        }
        for (int p = 0; p < n_panels; p++) end_segment(first, y + p * PANEL, acc[p]);
    }
}

INLINE void vector_plain(enum pack pack, int n_panels, const uint8_t *panels, int64_t stride,
                         const float *x, int64_t columns, float *y)
{
    for (int64_t first = 0, end; first < columns; first = end) {
        vec acc[PANELS_AT_ONCE][VECS];
        end = segment_end(first, columns);
        for (int p = 0; p < n_panels; p++)
            for (int v = 0; v < VECS; v++) acc[p][v] = v_set(0);
        for (int64_t c = first; c < end; c++) {
            vec xc = v_set(x[c]);
            for (int p = 0; p < n_panels; p++)
                for (int v = 0; v < VECS; v++)
                    acc[p][v] = v_fma(plain_weight(pack, panels + p * stride, c, v), xc, acc[p][v]);
        }
        for (int p = 0; p < n_panels; p++) end_segment(first, y + p * PANEL, acc[p]);
    }
}

INLINE void vector_any(enum pack pack, int n_panels, const uint8_t *panels, int64_t stride,
                       const float *x, int64_t columns, float *y)
{
    if (pack <= PACK_BF16)
        vector_plain(pack, n_panels, panels, stride, x, columns, y);
    else
        vector_groups(pack, n_panels, panels, stride, x, columns, y);
}

INLINE void vector_all(enum pack pack, int64_t n_panels, const uint8_t *panels, int64_t stride,
                       const float *x, int64_t columns, float *y)
{
    int64_t p = 0;
    for (; p + PANELS_AT_ONCE <= n_panels; p += PANELS_AT_ONCE)
        vector_any(pack, PANELS_AT_ONCE, panels + p * stride, stride, x, columns, y + p * PANEL);
    for (; p < n_panels; p++)
        vector_any(pack, 1, panels + p * stride, stride, x, columns, y + p * PANEL);
}

static void panels_vector(enum pack pack, const void *panels, int64_t n_panels, int64_t stride,
                          const float *x, int64_t columns, float *y)
{
    switch (pack) { /* one specialised loop each */
    case PACK_F32: vector_all(PACK_F32, n_panels, panels, stride, x, columns, y); return;
    case PACK_F16: vector_all(PACK_F16, n_panels, panels, stride, x, columns, y); return;
    case PACK_BF16: vector_all(PACK_BF16, n_panels, panels, stride, x, columns, y); return;
    case PACK_Q8_0: vector_all(PACK_Q8_0, n_panels, panels, stride, x, columns, y); return;
    case PACK_Q5_1: vector_all(PACK_Q5_1, n_panels, panels, stride, x, columns, y); return;
    case PACK_Q4_0: vector_all(PACK_Q4_0, n_panels, panels, stride, x, columns, y); return;
    case PACK_Q4_1: vector_all(PACK_Q4_1, n_panels, panels, stride, x, columns, y); return;
    case PACK_Q4_K: vector_all(PACK_Q4_K, n_panels, panels, stride, x, columns, y); return;
    case PACK_Q5_K: vector_all(PACK_Q5_K, n_panels, panels, stride, x, columns, y); return;
    case PACK_Q6_K: vector_all(PACK_Q6_K, n_panels, panels, stride, x, columns, y); return;
    }
}

INLINE void expand_groups(enum pack pack, const uint8_t *panel, int64_t columns, float *out)
{
    for (int64_t i = 0; i < columns / GROUP; i++) {
        struct group g;
        open_group(pack, panel, i, &g);
        FOR_EACH_COLUMN(half, odd, j)
        for (int v = 0; v < VECS; v++)
            v_store(out + (i * GROUP + j) * PANEL + v * LANES,
                    group_weight(pack, &g, half, odd, j, v));
    }
}

INLINE void expand_plain(enum pack pack, const uint8_t *panel, int64_t columns, float *out)
{
    for (int64_t c = 0; c < columns; c++)
        for (int v = 0; v < VECS; v++)
            v_store(out + c * PANEL + v * LANES, plain_weight(pack, panel, c, v));
}

static void panel_expand(enum pack pack, const void *panel, int64_t columns, float *out)
{
    switch (pack) {
    case PACK_F32: expand_plain(PACK_F32, panel, columns, out); return;
    case PACK_F16: expand_plain(PACK_F16, panel, columns, out); return;
    case PACK_BF16: expand_plain(PACK_BF16, panel, columns, out); return;
    case PACK_Q8_0: expand_groups(PACK_Q8_0, panel, columns, out); return;
    case PACK_Q5_1: expand_groups(PACK_Q5_1, panel, columns, out); return;
    case PACK_Q4_0: expand_groups(PACK_Q4_0, panel, columns, out); return;
    case PACK_Q4_1: expand_groups(PACK_Q4_1, panel, columns, out); return;
    case PACK_Q4_K: expand_groups(PACK_Q4_K, panel, columns, out); return;
    case PACK_Q5_K: expand_groups(PACK_Q5_K, panel, columns, out); return;
    case PACK_Q6_K: expand_groups(PACK_Q6_K, panel, columns, out); return;
    }
}

/* tile tokens at once: tile * VECS independent chains */
INLINE void matrix_tile(int tile, const float *w, const float *x, int64_t x_stride, int64_t columns,
                        float *y)
{
    for (int64_t first = 0, end; first < columns; first = end) {
        vec acc[12][VECS];
        end = segment_end(first, columns);
#pragma GCC unroll 12
        for (int t = 0; t < tile; t++)
            for (int v = 0; v < VECS; v++) acc[t][v] = v_set(0);
        for (int64_t c = first; c < end; c++) {
            vec wc[VECS];
            for (int v = 0; v < VECS; v++) wc[v] = v_load(w + c * PANEL + v * LANES);
#pragma GCC unroll 12
            for (int t = 0; t < tile; t++) {
                vec xc = v_set(x[t * x_stride + c]);
                for (int v = 0; v < VECS; v++) acc[t][v] = v_fma(wc[v], xc, acc[t][v]);
            }
        }
#pragma GCC unroll 12
        for (int t = 0; t < tile; t++) end_segment(first, y + t * PANEL, acc[t]);
    }
}

static void panel_matrix(const float *w, const float *x, int64_t x_stride, int64_t n,
                         int64_t columns, float *y)
{
    enum { TILE = LANES == 16 ? 12 : LANES == 8 ? 6 : 3 };
    int64_t t = 0;
    for (; t + TILE <= n; t += TILE)
        matrix_tile(TILE, w, x + t * x_stride, x_stride, columns, y + t * PANEL);
    switch (n - t) {
    case 11: matrix_tile(11, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 10: matrix_tile(10, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 9: matrix_tile(9, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 8: matrix_tile(8, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 7: matrix_tile(7, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 6: matrix_tile(6, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 5: matrix_tile(5, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 4: matrix_tile(4, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 3: matrix_tile(3, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 2: matrix_tile(2, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    case 1: matrix_tile(1, w, x + t * x_stride, x_stride, columns, y + t * PANEL); return;
    default: return;
    }
}

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

#define TABLE_NAME(set) kernels_##set
#define TABLE(set)      TABLE_NAME(set)
#define NAME_TEXT(set)  #set
#define NAME(set)       NAME_TEXT(set)

const struct kernels TABLE(KERNEL_SET) = {
    .name = NAME(KERNEL_SET),
    .panels_vector = panels_vector,
    .panel_expand = panel_expand,
    .panel_matrix = panel_matrix,
    .rmsnorm = rmsnorm,
    .rope = rope,
    .silu_mul = silu_mul,
    .attend = attend,
};
