/*
 * kernels.h - the vector kernels, compiled once for each instruction set (kernels.c) and reached
 * through one table; and the layout of weights that they read (pack.c).
 *
 * Weights are kept in panels of 16 rows, columns running in order, so that a vector's lanes are
 * rows. Each output element is a chain of fused multiply-adds over ascending columns, cut into
 * segments of 256 columns that are added in ascending order (a shorter chain loses fewer bits):
 * the same for 1 token and for 512, for 8 lanes and for 16.
 */
#ifndef LINNET_OPS_CPU_KERNELS_H
#define LINNET_OPS_CPU_KERNELS_H

#include "base/dtype.h"
#include "ops/ops.h"

enum { PANEL = 16 };       /* rows of a panel */
enum { SEGMENT = 256 };    /* columns of a chain */
enum { GROUP = 32 };       /* columns of a group of quantized weights */
enum { SUPER_GROUPS = 8 }; /* groups of a K-quant super-block */

/*
 * Layouts of a panel. Row r of the panel is element r of every 16-element run.
 *   PACK_F32 / F16 / BF16   [columns][16]
 *   PACK_Q8_0   a group: f16 d[16]; i8 q[32][16]                        w = d q        (Q8_0, Q5_0)
 *   PACK_Q5_1   a group: f16 d[16], m[16]; u8 q[32][16]                 w = d q + m
 *   PACK_Q4_0   a group: f16 d[16]; u8 q[16][16], column 2i low nibble  w = d (q - 8)
 *   PACK_Q4_1   a group: f16 d[16], m[16]; u8 q[16][16]                 w = d q + m
 *   PACK_Q4_K   a super-block: f16 d[16], dmin[16]; then 8 groups of
 *               u8 scale[16], min[16]; u8 q[16][16]             w = (d scale) q - (dmin min)
 *   PACK_Q5_K   likewise with u8 q[32][16]
 *   PACK_Q6_K   a super-block: f16 d[16]; then 8 groups of
 *               i8 scale[2][16] (one for each 16 columns); i8 q[32][16]  w = (d scale) q
 */
enum pack {
    PACK_F32,
    PACK_F16,
    PACK_BF16,
    PACK_Q8_0,
    PACK_Q5_1,
    PACK_Q4_0,
    PACK_Q4_1,
    PACK_Q4_K,
    PACK_Q5_K,
    PACK_Q6_K
};

enum pack pack_of(enum dtype dtype);
/* Bytes of a panel of that many columns. */
int64_t pack_panel_bytes(enum pack pack, int64_t columns);
/* Fills a panel from up to 16 rows: row r's bytes are at rows[r], or NULL for a row of zeros. */
void pack_panel(enum dtype dtype, const void *const rows[PANEL], int64_t columns, void *panel);

/* Keys of an attention chunk: partial results merge at its absolute multiples (numerics.md). */
enum { ATTENTION_CHUNK = 256 };

struct kernels {
    const char *name;

    /* y[n_panels * 16] = panels x, for one token. Panels lie `stride` bytes apart; x: [columns] */
    void (*panels_vector)(enum pack pack, const void *panels, int64_t n_panels, int64_t stride,
                          const float *x, int64_t columns, float *y);
    /* A panel as fp32: out[columns][16] */
    void (*panel_expand)(enum pack pack, const void *panel, int64_t columns, float *out);
    /* y[t][0..16) = w x[t] for n tokens. w: [columns][16]; x: [n, x_stride]; y: [n, 16] */
    void (*panel_matrix)(const float *w, const float *x, int64_t x_stride, int64_t n,
                         int64_t columns, float *y);

    void (*rmsnorm)(const float *x, const float *weight, int32_t n, float eps, float *out);
    void (*rope)(float *x, const float *row, int32_t head_dim);
    void (*silu_mul)(const float *gate, const float *up, int32_t n, float *out);

    /*
     * One query head over n_keys keys. keys/values: this layer's cache at this kv head, block b at
     * + b * block_stride: keys [head_dim][16], values [16][head_dim]. scratch: head_dim +
     * ATTENTION_CHUNK floats. q is not scaled yet.
     */
    void (*attend)(const float *q, const float *keys, const float *values, int64_t block_stride,
                   const int32_t *block_table, int32_t n_keys, int32_t head_dim, float *scratch,
                   float *out);
};

extern const struct kernels kernels_generic, kernels_avx2, kernels_avx512;

#endif
