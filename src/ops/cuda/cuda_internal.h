/*
 * cuda_internal.h - what the files of the CUDA backend share: its memory, and the launches that
 * each file offers. Weights and cache are bf16, sums fp32; the residual stream is fp32.
 */
#ifndef LINNET_OPS_CUDA_INTERNAL_H
#define LINNET_OPS_CUDA_INTERNAL_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>

extern "C" {
#include "base/dtype.h"
#include "base/error.h"
#include "base/memory.h"
#include "ops/ops.h"
}

typedef __nv_bfloat16 bf16;

/*
 * A matrix for tensor cores: panels of 16 rows; of each 32 columns, lane l of a warp holds columns
 * 8 (l % 4) to 8 (l % 4) + 7 of rows l / 4 and l / 4 + 8, sixteen values side by side: the weights
 * of two products of m16n8k16. Columns are padded with zeros to a multiple of 32.
 */
struct matrix {
    int64_t rows, columns, padded; /* padded: columns, a multiple of 32 */
    bf16 *data;                    /* packed; or, for the embedding, [rows, columns] */
    struct matrix *next;
};

struct vector {
    float *data; /* device */
    struct vector *next;
};

enum { K_STEP = 32, PANEL_ROWS = 16, N_SEGMENTS = 8, CHUNK_KEYS = 256 };

/* One step's numbers on the device, each [n_tokens] unless it says otherwise. */
struct device_step {
    int32_t *token_ids, *positions, *slot_mapping;
    int32_t *seq_of;       /* which sequence a token belongs to */
    int32_t *block_tables; /* [n_seqs, max_blocks] */
    int32_t *logit_rows;   /* [n_logits] */
    float *rope;           /* [n_tokens, head_dim] */
};

enum { MAX_GRAPH = 256 }; /* tokens of the largest step that is recorded */

/* A recorded step. */
struct graph {
    cudaGraphExec_t exec; /* NULL: not yet */
    int32_t max_blocks;
};

struct backend {
    struct shape shape;
    struct limits limits;
    int device;
    cudaStream_t stream;
    cudaError_t failed; /* the first failure; later work is skipped */
    const char *failed_at;
    struct matrix *matrices;
    struct vector *vectors;
    bf16 *cache;        /* [n_layers][K, V][n_blocks][n_kv_heads][16][head_dim] */
    float *x;           /* [max_tokens, hidden] */
    bf16 *normed;       /* [max_tokens, hidden padded] */
    float *qkv;         /* [max_tokens, (n_heads + 2 n_kv_heads) head_dim] */
    bf16 *q;            /* [max_tokens, n_heads head_dim] */
    bf16 *attn;         /* [max_tokens, n_heads head_dim padded] */
    float *gate_up;     /* [max_tokens, 2 intermediate] */
    bf16 *act;          /* [max_tokens, intermediate padded] */
    float *logits;      /* [max_logits, vocab] */
    float *host_logits; /* pinned */
    struct device_step step;
    void *step_memory, *host_step; /* device and pinned; the same layout */
    size_t step_bytes;
    void *staging, *host_staging; /* for loading */
    int32_t n_logits;
    struct graph graphs[MAX_GRAPH + 1]; /* by number of tokens */
    struct graph *graph;                /* of this step, or NULL */
    bool recording;
};

enum { STAGING_BYTES = 32 << 20 };

static inline int64_t padded_columns(int64_t columns)
{
    return (columns + K_STEP - 1) / K_STEP * K_STEP;
}

/* Keeps the first error; true while all is well. */
bool cuda_good(struct backend *b, cudaError_t status, const char *what);

/* ---- matrix.cu ---- */

/* rows [n, columns] bf16 on the device -> rows first.. of the packed matrix */
void matrix_pack(struct backend *b, const bf16 *rows, int64_t first, int64_t n, struct matrix *m);

/* y[t][r] = (or +=) m[r] x[t] (+ bias[r]); x: [n, m->padded] */
void matrix_product(struct backend *b, const struct matrix *m, const bf16 *x, int32_t n, float *y,
                    const struct vector *bias, bool add);

/* ---- rows.cu ---- */

void rows_embed(struct backend *b, const struct matrix *embedding, int32_t n);
/* normed[i] = RMSNorm(x[row_of ? row_of[i] : i]) */
void rows_norm(struct backend *b, const struct vector *weight, const int32_t *row_of, int32_t n);
/* q/k norms, RoPE; q to its buffer, k and v to their slots */
void rows_rope_store(struct backend *b, int32_t layer, const struct layer *w, int32_t n);
void rows_silu_mul(struct backend *b, int32_t n);

/* ---- attention.cu ---- */

void attention_run(struct backend *b, const struct step *s, int32_t layer);

/* This layer's keys (0) or values (1). */
static inline bf16 *cache_of(const struct backend *b, int32_t layer, int values)
{
    int64_t half = (int64_t)b->limits.n_blocks * KV_BLOCK * b->shape.n_kv_heads * b->shape.head_dim;
    return b->cache + (2 * (int64_t)layer + values) * half;
}

#endif
