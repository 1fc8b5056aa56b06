/*
 * products.c - matrix products, compiled once for each instruction set. A panel of weights,
 * or two, is multiplied with a tile of tokens at a time; each token's sums are the same in a tile
 * of any size.
 */
#include "ops/cpu/products.h"

#include <string.h>

#include "ops/cpu/dots.h"
#include "ops/cpu/rows.h"

static_assert(PANEL == VECS * LANES, "a panel is VECS vectors");

/* Tokens of a tile: as many as leave room in the registers for their sums. */
enum {
    WIDE = LANES == 16                     ? 12
           : LANES == 8 || REGISTERS == 32 ? 4
                                           : 2, /* with quantized weights */
    MIDDLE = LANES == 16 ? 4 : WIDE / 2,
    FEW = LANES == 16 ? 2 : 1,
    PLAIN = LANES == 16       ? 12
            : REGISTERS == 32 ? 6
            : LANES == 8      ? 5
                              : 3, /* with others */
    SMALL = LANES == 16                     ? 4
            : LANES == 8 || REGISTERS == 32 ? 2
                                            : 1,
    TWO = 2,                           /* panels at once */
    PLAIN_PANELS = LANES == 16 ? 2 : 1 /* with a tile of PLAIN tokens */
};

static_assert((int)WIDE <= (int)MOST_ROWS && (int)PLAIN <= (int)MOST_ROWS, "a tile has pointers");

/* Where the weights are that a tile passes over. */
enum reading {
    CACHED,
    FRESH, /* in memory; arithmetic takes its time, or other tiles follow */
    ONCE   /* in memory, and memory alone is waited for */
};

/* Bytes by which memory is asked for weights before they are wanted: AHEAD for the second cache,
 * early enough for any tile. Where they are read ONCE the processor is as early by itself; asked
 * for a line before, as what is not to be kept, they neither drive the tokens' rows out of the
 * nearest cache nor go on to the others. */
enum { AHEAD = 8192, NEXT = 64, LINE = 64 };
enum { NEAREST = 32 << 10 }; /* bytes of the nearest cache, at least */

INLINE void ask(enum reading reading, const void *weights, int64_t size)
{
    const char *at = weights;
    if (reading == CACHED) return;
#pragma GCC unroll 12
    for (int64_t i = 0; i < size; i += LINE)
        if (reading == ONCE)
            __builtin_prefetch(at + NEXT + i, 0, 0);
        else
            __builtin_prefetch(at + AHEAD + i, 0, 2);
}

/* Tokens of the next tile, of those left. */
INLINE int64_t next_tile(int64_t left, int64_t most, int64_t some, int64_t few)
{
    return left >= most ? most : left >= some ? some : left >= few ? few : 1;
}

/* ---- where sums go --------------------------------------------------------------------------- */

/* Asks for what end_tile will write, while the tile is computed. */
INLINE void begin_tile(const struct output *out, int64_t panel, int n_panels, int64_t token,
                       int tile)
{
    int apart = out->finish == SILU_MUL ? 2 : 1; /* panels of 16 rows of y */
    int64_t at = token * out->stride + panel / apart * PANEL;
    for (int t = 0; t < tile; t++, at += out->stride)
        for (int64_t i = at; i < at + n_panels / apart * PANEL; i += PANEL)
            __builtin_prefetch(out->y_bf16 ? (void *)(out->y_bf16 + i) : (void *)(out->y + i), 1);
}

/* Where 16 rows of a token go: to y or, rounded, to y_bf16. */
struct place {
    float *y;
    uint16_t *y_bf16;
};

INLINE void end_panel(enum finish finish, bool in_bf16, const float *sums, const float *up,
                      const float *bias, struct place to)
{
    for (int i = 0; i < PANEL; i += LANES) {
        vec sum = v_load(sums + i);
        if (finish == SILU_MUL) sum = v_silu_mul(sum, v_load(up + i));
        if (bias) sum = sum + v_load(bias + i);
        if (finish == ADD) sum = v_load(to.y + i) + sum;
        if (in_bf16)
            v_store_bf16(to.y_bf16 + i, sum);
        else
            v_store(to.y + i, sum);
    }
}

/* As end_panel, where there are fewer rows. */
INLINE void end_last_panel(enum finish finish, bool in_bf16, const float *sums, const float *up,
                           const float *bias, struct place to, int64_t rows)
{
    float all_bias[PANEL] = {0}, all[PANEL] = {0};
    uint16_t all_bf16[PANEL];
    size_t n = (size_t)rows;
    if (bias) memcpy(all_bias, bias, n * sizeof *bias);
    if (finish == ADD) memcpy(all, to.y, n * sizeof *all);
    end_panel(finish, in_bf16, sums, up, bias ? all_bias : NULL, (struct place){all, all_bf16});
    if (in_bf16)
        memcpy(to.y_bf16, all_bf16, n * sizeof *all_bf16);
    else
        memcpy(to.y, all, n * sizeof *all);
}

INLINE void end_tile_as(enum finish finish, bool in_bf16, const struct output *out, int64_t panel,
                        int n_panels, int64_t token, int tile, const float *sums)
{
    int apart = finish == SILU_MUL ? 2 : 1;
    for (int p = 0; p < n_panels; p += apart, sums += apart * tile * PANEL) {
        int64_t row = (panel + p) / apart * PANEL, rows = out->rows - row,
                at = token * out->stride + row;
        const float *bias = finish != SILU_MUL && out->bias ? out->bias + row : NULL;
        for (int t = 0; t < tile; t++, at += out->stride) {
            const float *sum = sums + t * PANEL,
                        *up = finish == SILU_MUL ? sum + tile * PANEL : NULL;
            struct place to = {.y = in_bf16 ? NULL : out->y + at,
                               .y_bf16 = in_bf16 ? out->y_bf16 + at : NULL};
            if (rows >= PANEL)
                end_panel(finish, in_bf16, sum, up, bias, to);
            else
                end_last_panel(finish, in_bf16, sum, up, bias, to, rows);
        }
    }
}

/* The sums of a tile, [n_panels][tile][16], of panels and tokens from these on. Not in line: there
 * are many kinds of tiles. */
__attribute__((noinline)) static void end_tile(const struct output *out, int64_t panel,
                                               int n_panels, int64_t token, int tile,
                                               const float *sums)
{
    if (out->finish == ADD)
        end_tile_as(ADD, false, out, panel, n_panels, token, tile, sums);
    else if (out->finish == STORE)
        end_tile_as(STORE, false, out, panel, n_panels, token, tile, sums);
    else if (out->y_bf16)
        end_tile_as(SILU_MUL, true, out, panel, n_panels, token, tile, sums);
    else
        end_tile_as(SILU_MUL, false, out, panel, n_panels, token, tile, sums);
}

/* ---- quantized weights ----------------------------------------------------------------------- */

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
    vec d[VECS], dmin[VECS]; /* of the super-block */
    vec scale[2][VECS];      /* of the first and the last 16 columns, where they differ */
    vec min[VECS];
    const uint8_t *q;
};

INLINE void open_super(struct form f, const uint8_t *head, struct scales *s)
{
    const uint16_t *d = (const uint16_t *)head;
    for (int v = 0; v < VECS; v++) {
        s->d[v] = v_from_f16(d + v * LANES);
        if (f.with_min) s->dmin[v] = v_set(0) - v_from_f16(d + PANEL + v * LANES);
    }
}

INLINE void open_group(struct form f, const uint8_t *group, struct scales *s)
{
    s->q = group + f.quants;
    const uint16_t *d = (const uint16_t *)group;
    for (int v = 0; v < VECS; v++) {
        int at = v * LANES;
        if (f.halves) {
            s->scale[0][v] = s->d[v] * v_from_i8((const int8_t *)group + at);
            s->scale[1][v] = s->d[v] * v_from_i8((const int8_t *)group + PANEL + at);
        } else if (f.super) {
            s->scale[0][v] = s->d[v] * v_from_u8(group + at);
            s->min[v] = s->dmin[v] * v_from_u8(group + PANEL + at);
        } else {
            s->scale[0][v] = v_from_f16(d + at);
            if (f.with_min) s->min[v] = v_from_f16(d + PANEL + at);
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
    KEEP(packed);
    bytes four = i < 4 ? b_left(packed, 0, 15) : b_right(packed, 4, 15);
    if (f.bits == 5) {
        bytes fifth = b_load(lane + NIBBLES);
        KEEP(fifth);
        return b_or(four, i <= 4 ? b_left(fifth, 4 - i, 16) : b_right(fifth, i - 4, 16));
    }
    if (f.bits == 6) {
        bytes sixth = b_load(lane + NIBBLES + i / 4 * QUAD);
        KEEP(sixth);
        return b_or(four, j < 3 ? b_left(sixth, 4 - 2 * j, 48) : b_right(sixth, 2, 48));
    }
    return four;
}

INLINE const struct quant_group *group_of(const struct rows *r, int t)
{
    return (const struct quant_group *)row_of(r, t);
}

/* Adds the products of quads a and b to each token's sums. */
INLINE void add_quads(struct form f, int tile, const uint8_t *weights, int a, int b,
                      const struct rows *x, dots sum[][VECS])
{
    bytes wa[VECS], wb[VECS];
    for (int v = 0; v < VECS; v++) {
        wa[v] = quad_weights(f, weights, a, v);
        wb[v] = quad_weights(f, weights, b, v);
    }
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++) {
        const int8_t *q = group_of(x, t)->q;
        for (int v = 0; v < VECS; v++)
            sum[t][v] = d_add(f.magnitude, sum[t][v], wa[v], q + 4 * a, wb[v], q + 4 * b);
    }
}

/* Asks for a quarter of a group's weights at a time. */
INLINE void ask_quarter(struct form f, enum reading reading, const uint8_t *weights, int quarter)
{
    int size = f.group_bytes / 4;
    if (reading == ONCE) ask(ONCE, weights + quarter * size, size - LINE / 2);
}

enum part { FIRST_16, LAST_16, ALL }; /* of a group's columns, as in `minus` */

/* Adds the products of that part of a group to each token's sums, scaled. */
INLINE void add_part(struct form f, int tile, enum reading reading, enum part part,
                     const struct scales *s, const struct rows *x, vec acc[][VECS])
{
    int chains = tile == 1 ? DOT_CHAINS : 1;
    dots sums[DOT_CHAINS][WIDE][VECS], first[WIDE];
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++) {
        first[t] = f.offset ? i_times(group_of(x, t)->minus + part, f.offset) : i_set(0);
        for (int v = 0; v < VECS; v++) {
            sums[0][t][v] = d_begin(f.magnitude, first[t]);
            if (chains > 1) sums[chains - 1][t][v] = i_set(0);
        }
    }
    if (part != ALL) {
        int i = part == FIRST_16 ? 0 : 4;
        ask_quarter(f, reading, s->q, i / 2);
        add_quads(f, tile, s->q, i, i + 1, x, sums[0]);
        ask_quarter(f, reading, s->q, i / 2 + 1);
        add_quads(f, tile, s->q, i + 2, i + 3, x, sums[chains - 1]);
    } else if (f.bits == 5 || LANES == 16) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            ask_quarter(f, reading, s->q, i);
            add_quads(f, tile, s->q, i, 4 + i, x, sums[i % chains]);
        }
    } else { /* unrolled, compilers would spill the sums */
#pragma GCC unroll 1
        for (int i = 0; i < 4; i++) {
            ask_quarter(f, reading, s->q, i);
            add_quads(f, tile, s->q, i, 4 + i, x, sums[0]);
        }
    }
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++) {
        vec d = v_set(group_of(x, t)->d);
        for (int v = 0; v < VECS; v++) {
            dots sum = sums[0][t][v];
            if (chains > 1) sum = i_add(sum, sums[chains - 1][t][v]);
            acc[t][v] = v_fma(v_from_dots(d_end(f.magnitude, sum, first[t])),
                              s->scale[part == LAST_16][v] * d, acc[t][v]);
        }
    }
}

INLINE void add_min(int tile, const struct scales *s, const struct rows *x, vec acc[][VECS])
{
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++) {
        vec sum = v_set(group_of(x, t)->sum);
        for (int v = 0; v < VECS; v++) acc[t][v] = v_fma(s->min[v], sum, acc[t][v]);
    }
}

INLINE void quantized_tile(enum pack pack, int tile, enum reading reading, const uint8_t *panel,
                           int64_t columns, const void *x, int64_t x_stride, float *y)
{
    struct form f = form_of(pack);
    vec acc[WIDE][VECS];
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++)
        for (int v = 0; v < VECS; v++) acc[t][v] = v_set(0);
    struct rows rows = rows_of(tile, x, x_stride);
    struct scales s;
    for (int64_t left = columns / GROUP; left > 0;) {
        int64_t n = f.super ? SUPER_GROUPS : left;
        if (f.super) open_super(f, panel, &s);
        panel += f.head_bytes;
        for (int64_t g = 0; g < n; g++, panel += f.group_bytes) {
            open_group(f, panel, &s);
            if (reading == FRESH) ask(FRESH, s.q, f.group_bytes);
            if (f.halves) {
                add_part(f, tile, reading, FIRST_16, &s, &rows, acc);
                add_part(f, tile, reading, LAST_16, &s, &rows, acc);
            } else {
                add_part(f, tile, reading, ALL, &s, &rows, acc);
            }
            if (f.with_min) add_min(tile, &s, &rows, acc);
            next_rows(tile, &rows, sizeof(struct quant_group));
        }
        left -= n;
    }
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++)
        for (int v = 0; v < VECS; v++) v_store(y + t * PANEL + v * LANES, acc[t][v]);
}

/* A tile of tokens times one panel or two; the rows of tokens stay in the nearest cache. */
INLINE void quantized_tiles(enum pack pack, int n_panels, int tile, enum reading reading,
                            const uint8_t *panels, int64_t stride, int64_t columns, const char *x,
                            int64_t x_stride, float *sums)
{
    for (int p = 0; p < n_panels; p++)
        quantized_tile(pack, tile, reading, panels + p * stride, columns, x, x_stride,
                       sums + p * tile * PANEL);
}

INLINE void quantized_panels(enum pack pack, int n_panels, const uint8_t *panels, int64_t stride,
                             int64_t columns, const char *x, int64_t x_stride, int64_t n,
                             int64_t panel, const struct output *out)
{
    float sums[TWO * WIDE * PANEL];
    bool once = n == 1 || (n == FEW && FEW * x_stride <= NEAREST / 2);
    for (int64_t t = 0, tile; t < n; t += tile, x += tile * x_stride) {
        enum reading reading = t == 0 ? FRESH : CACHED;
        tile = next_tile(n - t, WIDE, MIDDLE, FEW);
        if (tile > 1) begin_tile(out, panel, n_panels, t, (int)tile);
        if (tile == WIDE)
            quantized_tiles(pack, n_panels, WIDE, reading, panels, stride, columns, x, x_stride,
                            sums);
        else if (tile == MIDDLE)
            quantized_tiles(pack, n_panels, MIDDLE, reading, panels, stride, columns, x, x_stride,
                            sums);
        else if (tile == FEW && FEW > 1 && once)
            quantized_tiles(pack, n_panels, FEW, ONCE, panels, stride, columns, x, x_stride, sums);
        else if (tile == FEW && FEW > 1)
            quantized_tiles(pack, n_panels, FEW, reading, panels, stride, columns, x, x_stride,
                            sums);
        else if (once)
            quantized_tiles(pack, n_panels, 1, ONCE, panels, stride, columns, x, x_stride, sums);
        else
            quantized_tiles(pack, n_panels, 1, CACHED, panels, stride, columns, x, x_stride, sums);
        end_tile(out, panel, n_panels, t, (int)tile, sums);
    }
}

INLINE void quantized(enum pack pack, const uint8_t *panels, int64_t n_panels, int64_t stride,
                      int64_t columns, const void *x, int64_t x_stride, int64_t n,
                      const struct output *out)
{
    for (int64_t p = 0; p < n_panels; p += TWO)
        quantized_panels(pack, p + TWO <= n_panels ? TWO : 1, panels + p * stride, stride, columns,
                         x, x_stride, n, p, out);
}

/* ---- other weights --------------------------------------------------------------------------- */

/* Vector v of a panel's column 2 pair + odd. */
INLINE vec plain_weight(enum pack pack, const uint8_t *panel, int64_t pair, int odd, int v)
{
    int64_t at = (2 * pair + odd) * PANEL + v * LANES;
    switch (pack) {
    case PACK_F32: return v_load((const float *)panel + at);
    case PACK_F16: return v_from_f16((const uint16_t *)panel + at);
    default: return v_from_bf16_pair(panel + pair * QUAD + v * LANES * 4, odd);
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

/* A column of some panels times that of each token. */
INLINE void plain_column(enum pack pack, int n_panels, int tile, const uint8_t *panels,
                         int64_t stride, int64_t pair, int odd, const char *x, int64_t x_stride,
                         vec acc[][PLAIN][VECS])
{
    vec w[TWO][VECS];
    for (int p = 0; p < n_panels; p++)
        for (int v = 0; v < VECS; v++)
            w[p][v] = plain_weight(pack, panels + p * stride, pair, odd, v);
#pragma GCC unroll 12
    for (int t = 0; t < tile; t++) {
        vec xc = v_set(((const float *)(x + t * x_stride))[2 * pair + odd]);
        for (int p = 0; p < n_panels; p++)
            for (int v = 0; v < VECS; v++) acc[p][t][v] = v_fma(w[p][v], xc, acc[p][t][v]);
    }
}

/* n_panels * tile * VECS independent chains: enough of them hide the latency of a multiply-add.
 * Weights become fp32 on the way, beside the arithmetic. */
INLINE void plain_tile(enum pack pack, int n_panels, int tile, enum reading reading,
                       const uint8_t *panels, int64_t stride, int64_t columns, const char *x,
                       int64_t x_stride, float *sums)
{
    const int PAIR_BYTES = pack == PACK_F32 ? 2 * QUAD : QUAD;
    for (int64_t first = 0, end; first < columns; first = end) {
        vec acc[TWO][PLAIN][VECS];
        end = segment_end(first, columns);
        for (int p = 0; p < n_panels; p++)
#pragma GCC unroll 12
            for (int t = 0; t < tile; t++)
                for (int v = 0; v < VECS; v++) acc[p][t][v] = v_set(0);
        int64_t pair = first / 2;
        for (; pair < end / 2; pair++) {
            for (int p = 0; p < n_panels; p++)
                ask(reading, panels + p * stride + pair * PAIR_BYTES, PAIR_BYTES);
            plain_column(pack, n_panels, tile, panels, stride, pair, 0, x, x_stride, acc);
            plain_column(pack, n_panels, tile, panels, stride, pair, 1, x, x_stride, acc);
        }
        if (end % 2) plain_column(pack, n_panels, tile, panels, stride, pair, 0, x, x_stride, acc);
        for (int p = 0; p < n_panels; p++)
#pragma GCC unroll 12
            for (int t = 0; t < tile; t++)
                end_segment(first, sums + (p * tile + t) * PANEL, acc[p][t]);
    }
}

INLINE void plain_panels(enum pack pack, int n_panels, const uint8_t *panels, int64_t stride,
                         int64_t columns, const char *x, int64_t x_stride, int64_t n, int64_t panel,
                         const struct output *out)
{
    float sums[TWO * PLAIN * PANEL];
    for (int64_t t = 0, tile; t < n; t += tile, x += tile * x_stride) {
        enum reading reading = t == 0 ? FRESH : CACHED;
        tile = next_tile(n - t, PLAIN, SMALL, 1);
        if (tile > 1) begin_tile(out, panel, n_panels, t, (int)tile);
        if (tile == PLAIN)
            for (int p = 0; p < n_panels; p += PLAIN_PANELS)
                plain_tile(pack, n_panels < PLAIN_PANELS ? n_panels : PLAIN_PANELS, PLAIN, reading,
                           panels + p * stride, stride, columns, x, x_stride,
                           sums + p * PLAIN * PANEL);
        else if (tile == SMALL)
            plain_tile(pack, n_panels, SMALL, reading, panels, stride, columns, x, x_stride, sums);
        else if (n == 1)
            plain_tile(pack, n_panels, 1, ONCE, panels, stride, columns, x, x_stride, sums);
        else
            plain_tile(pack, n_panels, 1, CACHED, panels, stride, columns, x, x_stride, sums);
        end_tile(out, panel, n_panels, t, (int)tile, sums);
    }
}

INLINE void plain(enum pack pack, const uint8_t *panels, int64_t n_panels, int64_t stride,
                  int64_t columns, const void *x, int64_t x_stride, int64_t n,
                  const struct output *out)
{
    int64_t p = 0;
    for (; p + TWO <= n_panels; p += TWO)
        plain_panels(pack, TWO, panels + p * stride, stride, columns, x, x_stride, n, p, out);
    if (p < n_panels)
        plain_panels(pack, 1, panels + p * stride, stride, columns, x, x_stride, n, p, out);
}

#if defined(__AVX512BF16__)
/* The panel that comes after, which the tiles that pass over this one ask for at their own pace:
 * each for its part. A tile alone has no time for that: it stays at one line, which costs less than
 * to look whether it should. */
struct ahead {
    const uint8_t *at;
    int64_t pace; /* bytes a pair of columns */
};

INLINE struct ahead ahead_of(const uint8_t *panel, int64_t pairs, int64_t tile, int64_t n_tiles)
{
    int64_t pace = n_tiles > 1 ? QUAD / n_tiles : 0;
    return (struct ahead){panel + tile * pace * pairs, pace};
}

/* Pairs of columns at a time, both in bf16. */
INLINE void bf16_tile(int n_panels, int tile, enum reading reading, const uint8_t *panels,
                      int64_t stride, int64_t pairs, const char *x, int64_t x_stride, float *sums,
                      struct ahead ahead)
{
    enum { PAIRS = SEGMENT / 2 };
    struct rows rows = rows_of(tile, x, x_stride);
    for (int64_t first = 0; first < pairs; first += PAIRS) {
        int64_t end = pairs - first < PAIRS ? pairs : first + PAIRS;
        vec acc[TWO][PLAIN][VECS];
        for (int p = 0; p < n_panels; p++)
#pragma GCC unroll 12
            for (int t = 0; t < tile; t++) acc[p][t][0] = v_set(0);
        for (int64_t c = first; c < end; c++) {
            for (int p = 0; p < n_panels; p++) {
                const uint8_t *at = panels + p * stride + c * QUAD;
                bytes w = b_load(at);
                ask(reading, at, QUAD);
#pragma GCC unroll 12
                for (int t = 0; t < tile; t++)
                    acc[p][t][0] = BF16_DOT(acc[p][t][0], w, row_of(&rows, t));
            }
            if (tile == PLAIN) {
                __builtin_prefetch(ahead.at);
                ahead.at += ahead.pace;
            }
            next_rows(tile, &rows, 4);
        }
        for (int p = 0; p < n_panels; p++)
#pragma GCC unroll 12
            for (int t = 0; t < tile; t++)
                end_segment(first, sums + (p * tile + t) * PANEL, acc[p][t]);
    }
}

/* As plain_panels, but twelve tokens hide a dot product's latency by themselves, and one or two
 * wait for memory, which gives a single stream sooner. */
INLINE void bf16_panels(int n_panels, const uint8_t *panels, int64_t stride, int64_t pairs,
                        const char *x, int64_t x_stride, int64_t n, int64_t panel,
                        const struct output *out)
{
    const struct ahead nothing = {0};
    float sums[TWO * PLAIN * PANEL];
    for (int64_t t = 0, tile; t < n; t += tile, x += tile * x_stride) {
        enum reading reading = t == 0 ? FRESH : CACHED, alone = n <= SMALL ? ONCE : reading;
        tile = next_tile(n - t, PLAIN, SMALL, FEW);
        if (tile > 1) begin_tile(out, panel, n_panels, t, (int)tile);
        if (tile == PLAIN)
            for (int p = 0; p < n_panels; p++)
                bf16_tile(1, PLAIN, reading, panels + p * stride, stride, pairs, x, x_stride,
                          sums + p * PLAIN * PANEL,
                          ahead_of(panels + (n_panels + p) * stride, pairs, t / PLAIN, n / PLAIN));
        else if (tile == SMALL)
            bf16_tile(n_panels, SMALL, alone, panels, stride, pairs, x, x_stride, sums, nothing);
        else if (tile == FEW)
            for (int p = 0; p < n_panels; p++)
                bf16_tile(1, FEW, alone, panels + p * stride, stride, pairs, x, x_stride,
                          sums + p * FEW * PANEL, nothing);
        else
            for (int p = 0; p < n_panels; p++)
                bf16_tile(1, 1, alone, panels + p * stride, stride, pairs, x, x_stride,
                          sums + p * PANEL, nothing);
        end_tile(out, panel, n_panels, t, (int)tile, sums);
    }
}
#endif

INLINE void bf16(enum pack pack, const uint8_t *panels, int64_t n_panels, int64_t stride,
                 int64_t columns, const void *x, int64_t x_stride, int64_t n,
                 const struct output *out)
{
#if defined(__AVX512BF16__)
    (void)pack;
    int64_t pairs = (columns + 1) / 2, p = 0;
    for (; p + TWO <= n_panels; p += TWO)
        bf16_panels(TWO, panels + p * stride, stride, pairs, x, x_stride, n, p, out);
    if (p < n_panels) bf16_panels(1, panels + p * stride, stride, pairs, x, x_stride, n, p, out);
#else
    plain(pack, panels, n_panels, stride, columns, x, x_stride, n, out);
#endif
}

/* ---- the table's ----------------------------------------------------------------------------- */

/* A function for each layout: together in one, compilers spend registers worse. */
#define EACH_PACK(X)        \
    X(PACK_F32, plain)      \
    X(PACK_F16, plain)      \
    X(PACK_BF16, bf16)      \
    X(PACK_Q8_0, quantized) \
    X(PACK_Q4_0, quantized) \
    X(PACK_Q4_1, quantized) \
    X(PACK_Q5_0, quantized) \
    X(PACK_Q5_1, quantized) \
    X(PACK_Q4_K, quantized) \
    X(PACK_Q5_K, quantized) \
    X(PACK_Q6_K, quantized)

#define FUNCTION(pack, kind)                                                                  \
    __attribute__((noinline)) static void product_##pack(                                     \
        const void *panels, int64_t n_panels, int64_t stride, int64_t columns, const void *x, \
        int64_t x_stride, int64_t n, const struct output *out)                                \
    {                                                                                         \
        kind(pack, panels, n_panels, stride, columns, x, x_stride, n, out);                   \
    }
EACH_PACK(FUNCTION)

void KERNEL(product)(enum pack pack, const void *panels, int64_t n_panels, int64_t stride,
                     int64_t columns, const void *x, int64_t x_stride, int64_t n,
                     const struct output *out)
{
    switch (pack) {
#define CASE(pack, kind) \
    case pack: product_##pack(panels, n_panels, stride, columns, x, x_stride, n, out); return;
        EACH_PACK(CASE)
    }
}

static void to_bf16(const float *x, int64_t columns, uint16_t *out)
{
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) v_store_bf16(out + c, v_load(x + c));
    for (; c < columns; c++) out[c] = bf16_from_f32(x[c]);
    if (columns % 2) out[columns] = 0;
}

/* A group whose largest value is tiny or NaN: zeros, or NaN if any of it is not finite. */
static void quantize_nothing(const float *x, struct quant_group *out)
{
    vec probe = v_set(0);
    for (int i = 0; i < GROUP; i += LANES) probe = probe + (v_load(x + i) - v_load(x + i));
    float bad = v_sum(probe);
    *out = (struct quant_group){.d = bad, .sum = bad};
}

/* A group of 32 values in 8 bits. What is not finite makes d NaN, and so every product. */
INLINE void quantize_group(const float *x, struct quant_group *out)
{
    vec largest = v_set(0);
    for (int i = 0; i < GROUP; i += LANES) largest = v_max(largest, v_abs(v_load(x + i)));
    float max = v_largest(largest), half[2];
    if (!(max >= TINIEST)) {
        quantize_nothing(x, out);
        return;
    }
    vec inverse = v_set(127 / max), q[2][VECS];
    for (int h = 0; h < 2; h++) {
        vec sum = v_set(0);
        for (int v = 0; v < VECS; v++) { /* NaN if x is NaN or infinite */
            q[h][v] = v_round(v_load(x + h * PANEL + v * LANES) * inverse);
            sum = sum + q[h][v];
        }
        half[h] = v_sum(sum);
    }
    float all = half[0] + half[1];
    if (all != all) {
        *out = (struct quant_group){.d = all, .sum = all};
        return;
    }
    for (int h = 0; h < 2; h++)
        for (int v = 0; v < VECS; v++) v_store_i8(out->q + h * PANEL + v * LANES, q[h][v]);
    out->d = max / 127;
    out->sum = out->d * all;
    out->minus[0] = -(int32_t)half[0];
    out->minus[1] = -(int32_t)half[1];
    out->minus[2] = -(int32_t)all;
}

void KERNEL(activate)(enum activation form, const float *x, int64_t columns, void *out)
{
    if (form == ACTIVATION_BF16) to_bf16(x, columns, out);
    if (form != ACTIVATION_I8) return;
    for (int64_t g = 0; g < columns / GROUP; g++)
        quantize_group(x + g * GROUP, (struct quant_group *)out + g);
}
