/* cpu_internal.h - what the files of the CPU backend share: memory, and how work is dealt out. */
#ifndef LINNET_OPS_CPU_CPU_INTERNAL_H
#define LINNET_OPS_CPU_CPU_INTERNAL_H

#include "base/threads.h"
#include "ops/cpu/kernels.h"

static_assert((int)PANEL == (int)KV_BLOCK, "a vector of scores is a block of keys");

/* Rows of one dtype; a matrix merged from q, k and v may have up to four such segments. */
struct segment {
    enum pack pack;
    enum activation form; /* of the rows that it is multiplied with */
    int64_t first_row, rows, n_panels;
    int64_t stride; /* bytes from a panel to the next */
    uint8_t *panels;
};

enum { MAX_SEGMENTS = 4 };

struct matrix {
    int64_t rows, columns;
    int64_t n_panels; /* that threads share; of a paired matrix a panel of gate and one of up */
    int n_segments;
    bool wants[ACTIVATIONS]; /* the forms of an input that its segments want */
    int64_t forms_bytes;     /* of a row of them, ACTIVATION_I8 first */
    struct segment segments[MAX_SEGMENTS];
    struct matrix_part source; /* embedding only: rows are read where the file has them */
    size_t bytes;
    struct matrix *next;
};

/* Memory of matrices, one after another: most are smaller than a huge page. */
struct slab {
    struct slab *next;
    char *data;
    size_t bytes, used;
};

struct vector {
    struct vector *next;
    float v[];
};

struct backend {
    struct shape shape;
    struct limits limits;
    struct pool *pool;
    const struct kernels *kernels;
    struct matrix *matrices;
    struct slab *slabs;
    struct vector *vectors;
    struct store store; /* all zero: matrices are in slabs */
    char *cache;        /* cache.c */
    size_t cache_bytes;
    float *x, *norm, *qkv, *attn, *act, *logits; /* rows of the step; qkv holds q, k, v */
    bool act_in_bf16; /* its rows are rounded already, as the layer's down wants them */
    float *parts;     /* of chunks of attention, merged later (attention.c) */
    char *forms;      /* rows of a product's input in the forms that it wants */
    float *buffers;
    size_t buffer_bytes;
    const float *rope; /* the step's rows */
    float *scratch;    /* [threads][scratch_size] */
    int64_t scratch_size;
};

enum {
    ALONE = 4 /* rows that every thread prepares for itself: cheaper than to wait for each other */
};

/* The set in use: the best one, or the one that was forced. */
const struct kernels *kernels_chosen(void);

/* Work on the rows of a step: by the caller alone where waking the pool would cost more. */
struct rows_work {
    struct backend *b;
    const struct step *s;
    const struct layer *w;
    const struct matrix_part *embedding;
    const struct product *product;
    int32_t layer;
    int64_t n;
    void (*row)(const struct rows_work *, int64_t i, int thread);
};

void cpu_for_rows(struct rows_work *work);

/* y[t] = w x[t] (+ bias), or added to y, or silu(first half) * second half. x may be normalized
 * first, and its rows chosen. */
struct product {
    struct backend *b;
    const struct matrix *w;
    const float *x;         /* rows of the matrix's columns */
    const uint16_t *x_bf16; /* in place of x: w wants nothing else, columns are even; NULL: x */
    int64_t n;
    const struct vector *norm; /* NULL: none */
    const int32_t *row_of;     /* row i is x's row_of[i]; NULL: row i */
    const struct vector *bias;
    float *y;
    uint16_t *y_bf16; /* in place of y; NULL: y */
    int64_t y_stride;
    enum finish finish;
};

void cpu_product(const struct product *p);

/* Bytes of the rows of products' inputs in other forms (struct backend, forms), and floats of a
 * thread's memory for products. */
int64_t cpu_forms_bytes(const struct shape *s, const struct limits *l);
int64_t cpu_product_scratch(const struct shape *s, const struct limits *l);

/* Attention (attention.c), and floats of the parts that it keeps. */
void cpu_attention(struct backend *b, const struct step *s, int32_t layer);
int64_t cpu_attention_parts(const struct shape *s, const struct limits *l);

/* The cache (cache.c): a token's keys and values [n_kv_heads, head_dim] into its slot, and where a
 * layer's of a kv head lie. */
void cpu_store_kv(const struct backend *b, int32_t layer, int32_t slot, const float *k,
                  const float *v);
struct kv_head cpu_kv_head(const struct backend *b, int32_t layer, int32_t kv_head);

/* ops.h. */
int64_t cpu_cache_bytes(const struct shape *s, enum kv_type kv, int32_t n_blocks);
void cpu_read_kv(struct backend *b, int32_t layer, int32_t slot, float *k, float *v);
void cpu_copy_blocks(struct backend *b, int32_t layer, const int32_t *from, int32_t to, int32_t n);
int64_t cpu_matrix_bytes(enum dtype dtype, int64_t rows, int64_t columns);
void cpu_use_store(struct backend *b, const struct store *store);
linnet_status cpu_load_matrix(struct backend *b, const struct matrix_part *parts, int n_parts,
                              struct matrix **out, linnet_error *err);
linnet_status cpu_load_embedding(struct backend *b, const struct matrix_part *part,
                                 struct matrix **out, linnet_error *err);

#endif
