/*
 * kernels.h - the vector kernels, compiled once for each instruction set (kernels.c, products.c)
 * and reached through one table; the layout of weights that they read (pack.c), and the form that
 * they want activations in.
 *
 * Weights are kept in panels of 16 rows, columns running in order, so that a vector's lanes are
 * rows: one kernel shape serves 1 token and 512, and a sum has one order. With quantized weights
 * the products of 32 columns are an exact sum of integers, and these sums are added up, scaled, in
 * ascending order. Otherwise each output element is a chain of fused multiply-adds over ascending
 * columns, cut into segments of 256 columns that are added in ascending order (a shorter chain
 * loses fewer bits).
 */
#ifndef LINNET_OPS_CPU_KERNELS_H
#define LINNET_OPS_CPU_KERNELS_H

#include "base/dtype.h"
#include "ops/ops.h"

enum { PANEL = 16 };       /* rows of a panel */
enum { SEGMENT = 256 };    /* columns of a chain */
enum { GROUP = 32 };       /* columns of a group of quantized weights */
enum { SUPER_GROUPS = 8 }; /* groups of a K-quant super-block */
enum {                     /* bytes of f16 [16], [16][4] and nibbles, see below */
       HALVES = PANEL * 2,
       QUAD = PANEL * 4,
       NIBBLES = 4 * QUAD
};

/* Files hold matrices (file/packed.h): grows with every change of what one consists of, the panels
 * of a type, the order and the stride of segments; test_packed notices. */
enum { PACK_LAYOUT = 1 };

/*
 * Layouts of a panel. Row r of the panel is element r of every 16-element run.
 *   PACK_F32, F16   [columns][16]
 *   PACK_BF16       [columns / 2][16][2]: pairs of columns, of an odd number the last with a zero
 *
 * Quants come in quads of columns, [16][4], eight to a group of 32 columns:
 *   nibbles   u8 [4][16][4]: quad i in the low half of a byte, quad 4 + i in the high one
 *   fifth     u8 [16][4]: bit i is the fifth bit of quad i
 *   sixth     u8 [2][16][4]: bits 2i and 2i + 1 of the first are bits 4 and 5 of quad i, of the
 *             second of quad 4 + i
 *   bytes     i8 [8][16][4]
 * A group is
 *   PACK_Q8_0   f16 d[16]; bytes                                      w = d q
 *   PACK_Q4_0   f16 d[16]; nibbles                                    w = d (q - 8)
 *   PACK_Q4_1   f16 d[16], m[16]; nibbles                             w = d q + m
 *   PACK_Q5_0   f16 d[16]; nibbles; fifth                             w = d (q - 16)
 *   PACK_Q5_1   f16 d[16], m[16]; nibbles; fifth                      w = d q + m
 * and a super-block of 8 groups
 *   PACK_Q4_K   f16 d[16], dmin[16]; then 8 times
 *               u8 scale[16], min[16]; nibbles                        w = (d scale) q - (dmin min)
 *   PACK_Q5_K   likewise, with fifth after the nibbles
 *   PACK_Q6_K   f16 d[16]; then 8 times
 *               i8 scale[2][16], one for 16 columns; nibbles; sixth   w = (d scale) (q - 32)
 */
enum pack {
    PACK_F32,
    PACK_F16,
    PACK_BF16,
    PACK_Q8_0,
    PACK_Q4_0,
    PACK_Q4_1,
    PACK_Q5_0,
    PACK_Q5_1,
    PACK_Q4_K,
    PACK_Q5_K,
    PACK_Q6_K
};

enum pack pack_of(enum dtype dtype);
/* Bytes of a panel of that many columns. */
int64_t pack_panel_bytes(enum pack pack, int64_t columns);
/* Fills a panel from 16 rows: row r's bytes are at rows[r]. */
void pack_panel(enum dtype dtype, const void *const rows[PANEL], int64_t columns, void *panel);

/* What is rounded to 8 bits and has nothing larger is zeros. */
static const float TINIEST = 1e-30f;

/* The form in which a product wants a row of activations. */
enum activation {
    ACTIVATION_F32,  /* as they are */
    ACTIVATION_BF16, /* [columns, a last odd one with a zero] */
    ACTIVATION_I8,   /* [columns / 32] of: */
    ACTIVATIONS
};

/* x[j] = d q[j], |q[j]| <= 127. d is NaN if any of x is not finite. */
struct quant_group {
    int8_t q[GROUP];
    float d, sum;     /* sum of d q[j] */
    int32_t minus[3]; /* minus the sums of q: of columns 0 to 15, 16 to 31, all */
};

static inline int64_t activation_bytes(enum activation a, int64_t columns)
{
    return a == ACTIVATION_I8     ? columns / GROUP * (int64_t)sizeof(struct quant_group)
           : a == ACTIVATION_BF16 ? (columns + 1) / 2 * 4
                                  : columns * 4;
}

/* What becomes of a product's sums. */
enum finish {
    STORE,
    ADD,     /* to y */
    SILU_MUL /* of panels that are gate and up in turn: silu(gate) * up */
};

/* y[token][row], rows of the product's panels one after another, the last of which may be more than
 * there are. */
struct output {
    enum finish finish;
    float *y;
    uint16_t *y_bf16;     /* rounded to bf16, in place of y; NULL: y. Only with SILU_MUL */
    int64_t stride, rows; /* elements from a token to the next; rows of y */
    const float *bias;    /* [rows], added first; NULL: none. Not with SILU_MUL */
};

/* Keys of an attention chunk: partial results merge at its absolute multiples (numerics.md). */
enum { ATTENTION_CHUNK = 256 };
enum { ATTENTION_QUERIES = 8 }; /* that share the loading of a key, at most */

/* One layer's keys and values of a kv head: block b of either is block_bytes b further. In fp32 a
 * block is keys [head_dim][16] or values [16][head_dim]; in 8 bits int8_t in the same order, then a
 * float for each of its tokens: q = scale i8. */
struct kv_head {
    const char *keys, *values;
    int64_t block_bytes;
    bool int8;
};

struct query {
    const float *q; /* [head_dim] of one head, not scaled yet */
    int32_t n_keys; /* at least 1 */
    float *out;     /* [head_dim] */
};

/* Floats of what a chunk gives for one query: [head_dim] weighted values, the largest score, the
 * sum of exponentials. */
static inline int64_t attention_part(int32_t head_dim)
{
    return (int64_t)head_dim + 2;
}

static inline int64_t attention_scratch(int32_t head_dim)
{
    return ATTENTION_QUERIES * (head_dim + ATTENTION_CHUNK + attention_part(head_dim));
}

struct kernels {
    const char *name;

    bool bf16_dots; /* bf16 weights are multiplied with bf16 activations, not with fp32 ones */

    /* A row of activations in another form, not ACTIVATION_F32. */
    void (*activate)(enum activation form, const float *x, int64_t columns, void *out);
    /*
     * n_panels panels, `stride` bytes apart, times n tokens, whose rows lie x_stride bytes apart in
     * the form of kernels_activation.
     */
    void (*product)(enum pack pack, const void *panels, int64_t n_panels, int64_t stride,
                    int64_t columns, const void *x, int64_t x_stride, int64_t n,
                    const struct output *out);

    void (*rmsnorm)(const float *x, const float *weight, int32_t n, float eps, float *out);
    void (*rope)(float *x, const float *row, int32_t head_dim);
    void (*silu_mul)(const float *gate, const float *up, int32_t n, float *out);

    int32_t queries; /* that share the loading of a key: ATTENTION_QUERIES at most */
    /*
     * n queries over one sequence's keys, each looking at no fewer than the one before. scratch:
     * attention_scratch floats. What a query gets does not depend on the others.
     */
    void (*attend)(const struct query *queries, int32_t n, const struct kv_head *kv,
                   const int32_t *block_table, int32_t head_dim, float *scratch);
    /*
     * The same in two halves, with the same bits. For at most `queries` of them one chunk,
     * which begins at key `first` (the last query has it), into parts[i] of each query i that has
     * keys there; returns the first of those. Then the n chunks' parts of a query, which lie one
     * after the other, to its result.
     */
    int32_t (*attend_chunk)(const struct query *queries, int32_t n, const struct kv_head *kv,
                            const int32_t *block_table, int32_t head_dim, int32_t first,
                            float *const parts[], float *scratch);
    void (*merge_chunks)(const float *parts, int32_t n, int32_t head_dim, float *out);
};

static inline enum activation kernels_activation(const struct kernels *k, enum pack pack)
{
    if (pack == PACK_BF16 && k->bf16_dots) return ACTIVATION_BF16;
    return pack <= PACK_BF16 ? ACTIVATION_F32 : ACTIVATION_I8;
}

extern const struct kernels kernels_generic, kernels_avx2, kernels_avx2_vnni, kernels_avx512,
    kernels_avx512_vnni, kernels_avx512_bf16, kernels_neon, kernels_neon_dot;

/* The i-th set that this machine can run, the best first; NULL: no more. */
const struct kernels *kernels_usable(int i);

/* What kernels.c's table is made of; one of each for an instruction set. */
#define KERNEL_JOIN(name, set) name##_##set
#define KERNEL_OF(name, set)   KERNEL_JOIN(name, set)
#define KERNEL(name)           KERNEL_OF(name, KERNEL_SET)

#endif
