/*
 * products.c - matrix products, compiled once for each instruction set. A panel of weights is
 * multiplied with a tile of tokens at a time; each token's sums are the same in a tile of any size.
 */
#include "ops/cpu/products.h"

#include "ops/cpu/dots.h"

static_assert(PANEL == VECS * LANES, "a panel is VECS vectors");

/* Tokens of a tile: as many as leave room in the registers for their sums. */
enum {
    WIDE = LANES == 16  ? 12
           : LANES == 8 ? 4
                        : 2, /* with quantized weights */
    MIDDLE = WIDE / 2,
    PLAIN = LANES == 16  ? 12
            : LANES == 8 ? 6
                         : 3
};

/* ---- quantized weights ----------------------------------------------------------------------- */

static const float TINIEST = 1e-30f; /* a group with nothing larger is a group of zeros */

/* What the group's layout comes to, known when a loop is compiled. */
struct form {
    bool super;                  /* scales of 8 bits below those of a super-block */
    bool with_min;               /* w = scale q + min */
    bool halves;                 /* a scale for each 16 columns */
    int bits;                    /* of a quant */
    int offset;                  /* w = scale (q - offset) */
    int group_bytes, head_bytes; /* of one group; of what comes before the 8 of a super-block */
    int quants;                  /* where a group's quants begin */
    enum magnitude magnitude;
};

INLINE struct form form_of(enum pack pack)
{
    struct form f = {0};
    f.super = pack >= PACK_Q4_K;
    f.with_min = pack == PACK_Q4_1 || pack == PACK_Q5_1 || pack == PACK_Q4_K || pack == PACK_Q5_K;
    f.halves = pack == PACK_Q6_K;
    f.bits = pack == PACK_Q8_0                                             ? 8
             : pack == PACK_Q6_K                                           ? 6
             : pack == PACK_Q5_0 || pack == PACK_Q5_1 || pack == PACK_Q5_K ? 5
                                                                           : 4;
    f.offset = f.with_min ? 0 : f.bits == 8 ? SIGNED_OFFSET : 1 << (f.bits - 1);
    f.magnitude = f.bits == 8 ? ANY_BYTE : f.bits == 4 ? UP_TO_15 : UP_TO_63;
    if (f.super) {
        f.head_bytes = f.with_min ? 2 * HALVES : HALVES;
        f.quants = 2 * PANEL;
    } else {
        f.quants = f.with_min ? 2 * HALVES : HALVES;
    }
    f.group_bytes = f.quants + (f.bits == 8   ? 2 * NIBBLES
                                : f.bits == 6 ? NIBBLES + 2 * QUAD
                                : f.bits == 5 ? NIBBLES + QUAD
                                              : NIBBLES);
    return f;
}

/* What a group needs besides its quants. */
struct scales {
    vec scale[2][VECS]; /* of the first and the last 16 columns, where they differ */
    vec min[VECS];
    const uint8_t *q;
};

INLINE void open_group(struct form f, const uint8_t *panel, int64_t i, struct scales *s)
{
    const uint8_t *super = panel, *group = panel + i * f.group_bytes;
    if (f.super) {
        super = panel + i / SUPER_GROUPS * (f.head_bytes + SUPER_GROUPS * f.group_bytes);
        group = super + f.head_bytes + i % SUPER_GROUPS * f.group_bytes;
    }
    s->q = group + f.quants;
    const uint16_t *d = (const uint16_t *)(f.super ? super : group);
    for (int v = 0; v < VECS; v++) {
        int at = v * LANES;
        vec scale = v_from_f16(d + at);
        if (f.with_min) s->min[v] = v_from_f16(d + PANEL + at);
        if (f.halves) {
            s->scale[0][v] = scale * v_from_i8((const int8_t *)group + at);
            s->scale[1][v] = scale * v_from_i8((const int8_t *)group + PANEL + at);
        } else {
            if (f.super) scale = scale * v_from_u8(group + at);
            s->scale[0][v] = scale;
            if (f.super) s->min[v] = v_set(0) - s->min[v] * v_from_u8(group + PANEL + at);
        }
    }
}

/* Quad i (0..7) of a group, for the rows of vector v. */
INLINE bytes quad_weights(struct form f, const uint8_t *q, int i, int v)
{
    const uint8_t *lane = q + v * 4 * LANES;
    int j = i % 4;
    if (f.bits == 8) return b_weights(ANY_BYTE, b_load(lane + i * QUAD));
    bytes packed = b_load(lane + j * QUAD);
    bytes four = i < 4 ? b_left(packed, 0, 15) : b_right(packed, 4, 15);
    if (f.bits == 5) {
        bytes fifth = b_load(lane + NIBBLES);
        return b_or(four, i <= 4 ? b_left(fifth, 4 - i, 16) : b_right(fifth, i - 4, 16));
    }
    if (f.bits == 6) {
        bytes sixth = b_load(lane + NIBBLES + i / 4 * QUAD);
        return b_or(four, j < 3 ? b_left(sixth, 4 - 2 * j, 48) : b_right(sixth, 2, 48));
    }
    return four;
}

INLINE const struct quant_group *group_of(const void *x, int64_t x_stride, int t, int64_t g)
{
    return (const struct quant_group *)((const char *)x + t * x_stride) + g;
}

/* Adds the products of quads a and b to each token's sums. */
INLINE void add_quads(struct form f, int tile, const uint8_t *weights, int a, int b, const void *x,
                      int64_t x_stride, int64_t g, dots sum[][VECS])
{
    bytes wa[VECS], wb[VECS];
    for (int v = 0; v < VECS; v++) {
        wa[v] = quad_weights(f, weights, a, v);
        wb[v] = quad_weights(f, weights, b, v);
    }
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++) {
        const int8_t *q = group_of(x, x_stride, t, g)->q;
        bytes xa = b_quad(q + 4 * a), xb = b_quad(q + 4 * b);
        for (int v = 0; v < VECS; v++)
            sum[t][v] = d_add(f.magnitude, sum[t][v], wa[v], xa, wb[v], xb);
    }
}

enum part { FIRST_16, LAST_16, ALL }; /* of a group's columns, as in `minus` */

/* Adds the products of that part of a group to each token's sums, scaled. */
INLINE void add_part(struct form f, int tile, enum part part, const struct scales *s, const void *x,
                     int64_t x_stride, int64_t g, vec acc[][VECS])
{
    dots sum[WIDE][VECS], first[WIDE];
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++) {
        first[t] = i_set(f.offset ? f.offset * group_of(x, x_stride, t, g)->minus[part] : 0);
        for (int v = 0; v < VECS; v++) sum[t][v] = d_begin(f.magnitude, first[t]);
    }
    if (part != ALL) {
        int i = part == FIRST_16 ? 0 : 4;
        add_quads(f, tile, s->q, i, i + 1, x, x_stride, g, sum);
        add_quads(f, tile, s->q, i + 2, i + 3, x, x_stride, g, sum);
    } else if (f.bits == 5) {
        add_quads(f, tile, s->q, 0, 4, x, x_stride, g, sum);
        add_quads(f, tile, s->q, 1, 5, x, x_stride, g, sum);
        add_quads(f, tile, s->q, 2, 6, x, x_stride, g, sum);
        add_quads(f, tile, s->q, 3, 7, x, x_stride, g, sum);
    } else { /* unrolled, compilers would spill the sums */
#pragma GCC unroll 1
        for (int i = 0; i < 4; i++) add_quads(f, tile, s->q, i, 4 + i, x, x_stride, g, sum);
    }
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++) {
        vec d = v_set(group_of(x, x_stride, t, g)->d);
        for (int v = 0; v < VECS; v++)
            acc[t][v] = v_fma(v_from_dots(d_end(f.magnitude, sum[t][v], first[t])),
                              s->scale[part == LAST_16][v] * d, acc[t][v]);
    }
}

INLINE void quantized_tile(enum pack pack, int tile, const uint8_t *panel, int64_t columns,
                           const void *x, int64_t x_stride, float *y)
{
    struct form f = form_of(pack);
    vec acc[WIDE][VECS];
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++)
        for (int v = 0; v < VECS; v++) acc[t][v] = v_set(0);
    for (int64_t g = 0; g < columns / GROUP; g++) {
        struct scales s;
        open_group(f, panel, g, &s);
        if (f.halves) {
            add_part(f, tile, FIRST_16, &s, x, x_stride, g, acc);
            add_part(f, tile, LAST_16, &s, x, x_stride, g, acc);
        } else {
            add_part(f, tile, ALL, &s, x, x_stride, g, acc);
        }
        if (!f.with_min) continue;
#pragma GCC unroll 12
        for (int t = 0; t < tile; t++) {
            vec sum = v_set(group_of(x, x_stride, t, g)->sum);
            for (int v = 0; v < VECS; v++) acc[t][v] = v_fma(s.min[v], sum, acc[t][v]);
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++)
        for (int v = 0; v < VECS; v++) v_store(y + t * PANEL + v * LANES, acc[t][v]);
}

INLINE void quantized_panel(enum pack pack, const uint8_t *panel, int64_t columns, const void *x,
                            int64_t x_stride, int64_t n, float *y)
{
    const char *row = x;
    for (; n >= WIDE; n -= WIDE, row += WIDE * x_stride, y += WIDE * PANEL)
        quantized_tile(pack, WIDE, panel, columns, row, x_stride, y);
    for (; n >= MIDDLE; n -= MIDDLE, row += MIDDLE * x_stride, y += MIDDLE * PANEL)
        quantized_tile(pack, MIDDLE, panel, columns, row, x_stride, y);
    for (; n > 0; n--, row += x_stride, y += PANEL)
        quantized_tile(pack, 1, panel, columns, row, x_stride, y);
}

INLINE void quantized(enum pack pack, const uint8_t *panels, int64_t n_panels, int64_t stride,
                      int64_t columns, const void *x, int64_t x_stride, int64_t n, float *y)
{
    for (int64_t p = 0; p < n_panels; p++)
        quantized_panel(pack, panels + p * stride, columns, x, x_stride, n, y + p * n * PANEL);
}

/* ---- other weights --------------------------------------------------------------------------- */

/* Vector v of column c of a panel. */
INLINE vec plain_weight(enum pack pack, const uint8_t *panel, int64_t c, int v)
{
    int64_t at = c * PANEL + v * LANES;
    switch (pack) {
    case PACK_F32: return v_load((const float *)panel + at);
    case PACK_F16: return v_from_f16((const uint16_t *)panel + at);
    default: return v_from_bf16_pair(panel + (c / 2 * PANEL + v * LANES) * 4, c % 2);
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

enum { PANELS_AT_ONCE = 2 };

/* One token. Two panels at once where there are two: a single one has too few independent chains to
 * hide the latency of a fused multiply-add. */
INLINE void plain_vector(enum pack pack, int n_panels, const uint8_t *panels, int64_t stride,
                         int64_t columns, const float *x, float *y)
{
    for (int64_t first = 0, end; first < columns; first = end) {
        vec acc[PANELS_AT_ONCE][VECS];
        end = segment_end(first, columns);
        for (int p = 0; p < n_panels; p++)
            for (int v = 0; v < VECS; v++) acc[p][v] = v_set(0);
        int64_t c = first;
        for (; c + 2 <= end; c += 2) {
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                vec xc = v_set(x[c + odd]);
                for (int p = 0; p < n_panels; p++)
                    for (int v = 0; v < VECS; v++)
                        acc[p][v] = v_fma(plain_weight(pack, panels + p * stride, c + odd, v), xc,
                                          acc[p][v]);
            }
        }
        for (; c < end; c++)
            for (int p = 0; p < n_panels; p++)
                for (int v = 0; v < VECS; v++)
                    acc[p][v] = v_fma(plain_weight(pack, panels + p * stride, c, v), v_set(x[c]),
                                      acc[p][v]);
        for (int p = 0; p < n_panels; p++) end_segment(first, y + p * PANEL, acc[p]);
    }
}

INLINE void plain_expand(enum pack pack, const uint8_t *panel, int64_t columns, float *out)
{
    for (int64_t c = 0; c < columns; c++)
        for (int v = 0; v < VECS; v++)
            v_store(out + c * PANEL + v * LANES, plain_weight(pack, panel, c, v));
}

/* A panel in fp32; tile * VECS independent chains. */
INLINE void plain_tile(int tile, const float *w, int64_t columns, const char *x, int64_t x_stride,
                       float *y)
{
    for (int64_t first = 0, end; first < columns; first = end) {
        vec acc[PLAIN][VECS];
        end = segment_end(first, columns);
#pragma GCC unroll 12
        for (int t = 0; t < tile; t++)
            for (int v = 0; v < VECS; v++) acc[t][v] = v_set(0);
        for (int64_t c = first; c < end; c++) {
            vec wc[VECS];
            for (int v = 0; v < VECS; v++) wc[v] = v_load(w + c * PANEL + v * LANES);
#pragma GCC unroll 12
            for (int t = 0; t < tile; t++) {
                vec xc = v_set(((const float *)(x + t * x_stride))[c]);
                for (int v = 0; v < VECS; v++) acc[t][v] = v_fma(wc[v], xc, acc[t][v]);
            }
        }
#pragma GCC unroll 12
        for (int t = 0; t < tile; t++) end_segment(first, y + t * PANEL, acc[t]);
    }
}

static void plain_panel(const float *w, int64_t columns, const char *x, int64_t x_stride, int64_t n,
                        float *y)
{
    for (; n >= PLAIN; n -= PLAIN, x += PLAIN * x_stride, y += PLAIN * PANEL)
        plain_tile(PLAIN, w, columns, x, x_stride, y);
    for (; n >= PLAIN / 3; n -= PLAIN / 3, x += PLAIN / 3 * x_stride, y += PLAIN / 3 * PANEL)
        plain_tile(PLAIN / 3, w, columns, x, x_stride, y);
    for (; n > 0; n--, x += x_stride, y += PANEL) plain_tile(1, w, columns, x, x_stride, y);
}

INLINE void plain(enum pack pack, const uint8_t *panels, int64_t n_panels, int64_t stride,
                  int64_t columns, const void *x, int64_t x_stride, int64_t n, float *scratch,
                  float *y)
{
    int64_t p = 0;
    if (n == 1) {
        for (; p + PANELS_AT_ONCE <= n_panels; p += PANELS_AT_ONCE)
            plain_vector(pack, PANELS_AT_ONCE, panels + p * stride, stride, columns, x,
                         y + p * PANEL);
        for (; p < n_panels; p++)
            plain_vector(pack, 1, panels + p * stride, stride, columns, x, y + p * PANEL);
        return;
    }
    for (; p < n_panels; p++) {
        const float *w = (const float *)(panels + p * stride);
        if (pack != PACK_F32) {
            plain_expand(pack, panels + p * stride, columns, scratch);
            w = scratch;
        }
        plain_panel(w, columns, x, x_stride, n, y + p * n * PANEL);
    }
}

#if defined(__AVX512BF16__)
/* Pairs of columns at a time, both in bf16. */
INLINE void bf16_tile(int tile, const uint8_t *panel, int64_t pairs, const char *x,
                      int64_t x_stride, float *y)
{
    enum { PAIRS = SEGMENT / 2 };
    for (int64_t first = 0; first < pairs; first += PAIRS) {
        int64_t end = pairs - first < PAIRS ? pairs : first + PAIRS;
        vec acc[PLAIN];
#pragma GCC unroll 12
        for (int t = 0; t < tile; t++) acc[t] = v_set(0);
        for (int64_t c = first; c < end; c++) {
            __m512bh w = (__m512bh)_mm512_loadu_si512(panel + c * PANEL * 4);
#pragma GCC unroll 12
            for (int t = 0; t < tile; t++) {
                int32_t pair;
                memcpy(&pair, x + t * x_stride + c * 4, 4);
                acc[t] = _mm512_dpbf16_ps(acc[t], w, (__m512bh)_mm512_set1_epi32(pair));
            }
        }
#pragma GCC unroll 12
        for (int t = 0; t < tile; t++) end_segment(first, y + t * PANEL, &acc[t]);
    }
}

static void bf16_panel(const uint8_t *panel, int64_t pairs, const char *x, int64_t x_stride,
                       int64_t n, float *y)
{
    for (; n >= PLAIN; n -= PLAIN, x += PLAIN * x_stride, y += PLAIN * PANEL)
        bf16_tile(PLAIN, panel, pairs, x, x_stride, y);
    for (; n >= PLAIN / 3; n -= PLAIN / 3, x += PLAIN / 3 * x_stride, y += PLAIN / 3 * PANEL)
        bf16_tile(PLAIN / 3, panel, pairs, x, x_stride, y);
    for (; n > 0; n--, x += x_stride, y += PANEL) bf16_tile(1, panel, pairs, x, x_stride, y);
}
#endif

static void bf16(const uint8_t *panels, int64_t n_panels, int64_t stride, int64_t columns,
                 const void *x, int64_t x_stride, int64_t n, float *scratch, float *y)
{
#if defined(__AVX512BF16__)
    (void)scratch;
    for (int64_t p = 0; p < n_panels; p++)
        bf16_panel(panels + p * stride, (columns + 1) / 2, x, x_stride, n, y + p * n * PANEL);
#else
    plain(PACK_BF16, panels, n_panels, stride, columns, x, x_stride, n, scratch, y);
#endif
}

/* ---- the table's ----------------------------------------------------------------------------- */

void KERNEL(product)(enum pack pack, const void *panels, int64_t n_panels, int64_t stride,
                     int64_t columns, const void *x, int64_t x_stride, int64_t n, float *scratch,
                     float *y)
{
    switch (pack) { /* one specialised loop each */
    case PACK_F32:
        plain(PACK_F32, panels, n_panels, stride, columns, x, x_stride, n, scratch, y);
        return;
    case PACK_F16:
        plain(PACK_F16, panels, n_panels, stride, columns, x, x_stride, n, scratch, y);
        return;
    case PACK_BF16: bf16(panels, n_panels, stride, columns, x, x_stride, n, scratch, y); return;
#define QUANTIZED(pack) \
    case pack: quantized(pack, panels, n_panels, stride, columns, x, x_stride, n, y); return;
        QUANTIZED(PACK_Q8_0)
        QUANTIZED(PACK_Q4_0)
        QUANTIZED(PACK_Q4_1)
        QUANTIZED(PACK_Q5_0)
        QUANTIZED(PACK_Q5_1)
        QUANTIZED(PACK_Q4_K)
        QUANTIZED(PACK_Q5_K)
        QUANTIZED(PACK_Q6_K)
#undef QUANTIZED
    }
}

/* A group of 32 values in 8 bits. What is not finite makes d NaN, and so every product. */
INLINE void quantize_group(const float *x, struct quant_group *out)
{
    vec largest = v_set(0), probe = v_set(0);
    for (int i = 0; i < GROUP; i += LANES) {
        vec v = v_load(x + i);
        largest = v_max(largest, v_abs(v));
        probe = probe + (v - v);
    }
    float max = v_largest(largest), bad = v_sum(probe);
    if (bad != 0 || max < TINIEST) {
        *out = (struct quant_group){.d = bad, .sum = bad};
        return;
    }
    vec inverse = v_set(127 / max);
    int32_t half[2];
    for (int h = 0; h < 2; h++) {
        vec sum = v_set(0);
        for (int i = h * GROUP / 2; i < (h + 1) * GROUP / 2; i += LANES) {
            vec q = v_round(v_load(x + i) * inverse);
            sum = sum + q;
            v_store_i8(out->q + i, q);
        }
        half[h] = (int32_t)v_sum(sum);
    }
    out->d = max / 127;
    out->sum = out->d * (float)(half[0] + half[1]);
    out->minus[0] = -half[0];
    out->minus[1] = -half[1];
    out->minus[2] = -half[0] - half[1];
}

static void to_bf16(const float *x, int64_t columns, uint16_t *out)
{
    int64_t c = 0;
#if defined(__AVX512BF16__)
    for (; c + LANES <= columns; c += LANES)
        _mm256_storeu_si256((__m256i *)(out + c), (__m256i)_mm512_cvtneps_pbh(v_load(x + c)));
#endif
    for (; c < columns; c++) out[c] = bf16_from_f32(x[c]);
    if (columns % 2) out[columns] = 0;
}

void KERNEL(activate)(enum activation form, const float *x, int64_t columns, void *out)
{
    if (form == ACTIVATION_BF16) to_bf16(x, columns, out);
    if (form != ACTIVATION_I8) return;
    for (int64_t g = 0; g < columns / GROUP; g++)
        quantize_group(x + g * GROUP, (struct quant_group *)out + g);
}
