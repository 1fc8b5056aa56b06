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
 * A matrix for tensor cores: panels of 16 rows; of each 16 columns a panel has 512 bytes, 16 for
 * each lane of a warp: the A fragment of m16n8k16, which is also that of a warp of wgmma. Lane
 * 4 g + t holds, in this order, columns 2t, 2t + 1 of row g, of row g + 8, then columns 2t + 8,
 * 2t + 9 of both. Columns are padded with zeros to a multiple of K_UNIT. `paired` (gate_up): panel
 * p holds rows 8p to 8p + 7 of the upper half of the matrix, then the same of the lower half.
 */
struct matrix {
    int64_t rows, columns, padded; /* padded: columns, a multiple of K_UNIT */
    int64_t panels;
    bool paired;
    bf16 *data; /* packed [panels, padded / 16, 32, 8]; or, for the embedding, [rows, columns] */
    struct matrix *next;
};

struct vector {
    float *data; /* device */
    struct vector *next;
};

enum { PANEL_ROWS = 16, K_UNIT = 64, CHUNK_KEYS = 64 };

/*
 * Columns are summed in segments of whole K_UNITs, a function of their number alone: one chain of
 * tensor-core products of 16 columns each, ascending, from zero; then the segments' sums are added
 * to zero in ascending order. Every kernel keeps to it.
 */
static inline __host__ __device__ int32_t n_segments(int64_t padded)
{
    return padded / K_UNIT >= 64 ? 16 : 8;
}

/* First column of segment s (s == n_segments: the end). Short matrices have empty segments, whose
 * sum is zero. */
static inline __host__ __device__ int64_t segment_begin(int64_t padded, int32_t s)
{
    return padded / K_UNIT * s / n_segments(padded) * K_UNIT;
}

/*
 * Inputs of matrix products lie in one of two orders. Fragments, for products of up to 8 tokens
 * and for GPUs before Hopper: [tokens / 8][padded / 32][8 tokens][4 lanes][8 values], so that a
 * lane's 16 bytes are its B fragments of two m16n8k16. Cores, for wgmma: [padded / 64][capacity /
 * 8][8 groups of 8 columns][8 tokens][8 columns], so that a tile is contiguous and made of the
 * 8 x 16-byte core matrices of wgmma without swizzle.
 */
struct act {
    bf16 *data;
    int64_t padded;   /* columns, a multiple of K_UNIT */
    int64_t capacity; /* tokens, a multiple of ACT_TOKENS */
    bool cores;
};

enum { ACT_TOKENS = 128 };

static inline __host__ __device__ int64_t act_at(const struct act &a, int64_t token, int64_t column)
{
    if (a.cores)
        return ((column / 64 * (a.capacity / 8) + token / 8) * 8 + column % 64 / 8) * 64 +
               token % 8 * 8 + column % 8;
    int64_t in_step = column % 16, lane = in_step % 8 / 2;
    return ((token / 8 * (a.padded / 32) + column / 32) * 8 + token % 8) * 32 + lane * 8 +
           column % 32 / 16 * 4 + in_step / 8 * 2 + column % 2;
}

/*
 * A product y[t][r] = sum of m[r] in[t], and what becomes of it. RMSNorm is in two halves: who
 * writes the residual stream x also writes `act` = bf16(x * weight of the next norm) and, panel by
 * panel, the sums of squares of x; who reads multiplies its sums by scale(t) = 1 / rms (norm.cuh).
 */
enum product_to {
    TO_ROWS,     /* y[t][r] = scale sum + bias */
    TO_RESIDUAL, /* y[t][r] += sum + bias; act, out_squares if there is a gamma */
    TO_ACT       /* a paired matrix: act[t][r] = bf16(silu(scale sum_gate) * (scale sum_up)) */
};

struct product {
    enum product_to to;
    const struct matrix *m;
    struct act in;
    int32_t n; /* tokens */
    /* scale(t) from squares[t][in_panels], `in_width` columns and eps; NULL: 1 */
    const float *squares;
    int32_t in_panels, in_width;
    float eps;
    const float *bias; /* [rows] or NULL */
    float *y;          /* [n, rows] */
    struct act out;
    const float *gamma; /* [rows] */
    float *out_squares; /* [n, panels] */
};

/* One step's numbers on the device, each [n_tokens] unless it says otherwise. */
struct device_step {
    int32_t *token_ids, *positions, *slot_mapping;
    int32_t *seq_of;       /* which sequence a token belongs to */
    int32_t *query_start;  /* [n_seqs + 1] */
    int32_t *context_lens; /* [n_seqs] */
    int32_t *block_tables; /* [n_seqs, max_blocks] */
    int32_t *logit_rows;   /* [n_logits] */
    int32_t *tiles;        /* [attention_tiles, 4], 16-byte aligned, and */
    int32_t *singles;      /* [n_seqs]: see attention_plan */
    const float *rope;     /* [n_tokens, head_dim]; or by position, */
    bool rope_by_position; /* of all positions */
};

enum { MAX_GRAPH = 256 }; /* tokens of the largest step that is recorded */

/* What the operations were given when last called: the same weights in every step. */
struct model_parts {
    const struct matrix *embedding, *head;
    const struct layer **layers; /* [n_layers] */
};

/* Inputs of products in one order. */
struct act_set {
    struct act normed; /* hidden: x times the next norm's weight */
    struct act attn;   /* n_heads * head_dim */
    struct act act;    /* intermediate */
};

struct decode; /* decode.cu's */
struct steps;  /* step.cu's */

/* Attention's own: see attention.cu. */
struct attention_memory {
    int shared_limit;  /* bytes of shared memory that a block may have */
    uint32_t *tickets; /* zero between launches */
    float *scratch;    /* chunks of sequences that several blocks share */
    int64_t scratch_floats;
    int32_t n_tiles, n_singles; /* of this step; neither: every token by itself */
};

struct backend {
    struct shape shape;
    struct limits limits;
    int device;
    int capability;      /* compute capability of the code that runs: 10 major + minor */
    int multiprocessors; /* of the device */
    cudaStream_t stream;
    cudaError_t failed; /* the first failure; later work is skipped */
    const char *failed_at;
    struct pool *pool;       /* for loading */
    struct loading *loading; /* NULL but while weights are loaded */
    struct weight_block *weight_blocks;
    struct matrix *matrices;
    struct vector *vectors;
    struct model_parts model;
    bf16 *cache;                  /* [n_layers][K, V][n_blocks][n_kv_heads][16][head_dim] */
    struct act_set fragments;     /* on Hopper for up to 8 tokens, elsewhere for all */
    struct act_set cores;         /* on Hopper */
    struct act normed, attn, act; /* of this step: one set or the other */
    float *x;                     /* [max_tokens, hidden] */
    int32_t hidden_panels;
    float *squares, *head_squares; /* [tokens, hidden_panels] of x; of the wanted rows */
    float *qkv;                    /* [max_tokens, (n_heads + 2 n_kv_heads) head_dim] */
    bf16 *q;                       /* [max_tokens, n_heads head_dim] */
    float *logits;                 /* [max_logits, vocab] */
    float *row;                    /* room for the widest row that is read back */
    struct attention_memory attention;
    struct chosen *chosen; /* [max_logits] of the last step */
    struct device_step step;
    const struct vector *rope; /* of all positions, or NULL */
    struct step now; /* the step being enqueued; its max_blocks is that of step.block_tables */
    struct steps *steps;
    struct decode *decode; /* NULL: this GPU or model has no such kernel */
    bool in_decode;        /* this step is decode.cu's */
};

static inline int64_t padded_columns(int64_t columns)
{
    return (columns + K_UNIT - 1) / K_UNIT * K_UNIT;
}

static inline int64_t panel_count(int64_t rows, bool paired)
{
    return paired ? (rows / 2 + 7) / 8 : (rows + PANEL_ROWS - 1) / PANEL_ROWS;
}

/* ---- errors.cu ---- */

/* Keeps the first error; true while all is well. */
bool cuda_good(struct backend *b, cudaError_t status, const char *what);
/* The error that was kept as a sentence for the user; LINNET_OK if there is none. */
linnet_status cuda_failure(const struct backend *b, linnet_error *err);
/* Whether a GPU can be used: its name for people, and the memory that is free on it. */
linnet_status cuda_find(int index, char *text, size_t text_size, int64_t *free_bytes,
                        linnet_error *err);

/* ---- load.cu: these operations of the table ---- */

int64_t cuda_matrix_bytes(enum dtype dtype, int64_t rows, int64_t columns);
int64_t cuda_embedding_bytes(enum dtype dtype, int64_t rows, int64_t columns);
linnet_status cuda_load_matrix(struct backend *b, const struct matrix_part *parts, int n_parts,
                               struct matrix **out, linnet_error *err);
linnet_status cuda_load_embedding(struct backend *b, const struct matrix_part *part,
                                  struct matrix **out, linnet_error *err);
linnet_status cuda_load_vector(struct backend *b, const float *values, int64_t n,
                               struct vector **out, linnet_error *err);
linnet_status cuda_loaded(struct backend *b, linnet_error *err);
/* Frees matrices and vectors, and what loading has left. */
void cuda_unload(struct backend *b);

/* ---- matrix.cu ---- */

/* rows [n, columns] bf16 on the device -> rows first.. of the packed matrix (of a paired one,
 * counted through both halves), zeros in their padding columns; rows that only the last panel has
 * are zero already. On any stream, but one call at a time. */
void matrix_pack(struct backend *b, cudaStream_t stream, const bf16 *rows, int64_t first, int64_t n,
                 struct matrix *m);

/* Any GPU, any number of tokens; p->in in fragments. */
void matrix_product(struct backend *b, const struct product *p);

/* ---- gemm.cu ---- */

/* Whether this device has it. */
bool has_gemm(const struct backend *b);
/* A product for more than 8 tokens on Hopper; p->in and p->out are in cores order. False on other
 * devices. */
bool gemm_run(struct backend *b, const struct product *p);

/* ---- rows.cu ---- */

/* x = the tokens' rows of the embedding */
void rows_embed(struct backend *b, const struct matrix *embedding, int32_t n);
/* Rows of x (row i is row_of[i]; NULL: i) as the input of a product, and their squares. */
void rows_prepare(struct backend *b, const struct vector *norm, const int32_t *row_of, int32_t n,
                  struct act out, float *squares);
/* q/k norms, RoPE; q to its buffer, k and v to their slots */
void rows_rope_store(struct backend *b, int32_t layer, const struct layer *w, int32_t n);
/* K and V of a layer's blocks from[0..n) to the blocks to, to + 1, ... */
void rows_copy_blocks(struct backend *b, int32_t layer, const int32_t *from, int32_t to, int32_t n);
/* One token's columns as fp32 on the device. */
void rows_read_act(struct backend *b, struct act a, int32_t token, int32_t columns, float *out);

/* ---- attention.cu ---- */

/* Once shape, limits, device, capability and stream are set. attention_bytes: what it reserves. */
size_t attention_bytes(const struct shape *shape, const struct limits *limits);
bool attention_open(struct backend *b);
void attention_close(struct backend *b);

/* How a step is divided, into host->tiles and singles, which travel with the step's other numbers:
 * tiles of the sequences with several tokens {first token, end, first row, keys}, rows being
 * (token, head of the group) pairs, longest first; and the tokens of sequences with only one.
 * attention_tiles: the most tiles that there can be. */
int64_t attention_tiles(const struct shape *shape, int64_t n_tokens, int64_t n_seqs);
void attention_plan(struct backend *b, const struct step *s, struct device_step *host);

/* Where every sequence has one token, launches depend on their number and max_blocks alone, so that
 * such a step can be recorded. */
void attention_run(struct backend *b, const struct step *s, int32_t layer);

/* ---- decode.cu ---- */

bool decode_open(struct backend *b);
void decode_close(struct backend *b);
size_t decode_bytes(int capability, const struct shape *s, const struct limits *l);
bool decode_can(const struct backend *b, const struct step *s);
/* The whole step, from token ids to logits. */
void decode_run(struct backend *b, const struct step *s);

/* ---- step.cu: operations of the table (ops.h) ---- */

bool step_open(struct backend *b);
void step_close(struct backend *b);
size_t step_bytes(const struct shape *shape, const struct limits *l);
void step_use_rope(struct backend *b, const struct vector *table);
void step_begin(struct backend *b, const struct step *s, const float *rope, bool whole);
void step_embed(struct backend *b, const struct step *s, const struct matrix *embedding);
void step_qkv(struct backend *b, const struct step *s, int32_t layer, const struct layer *w);
void step_attention(struct backend *b, const struct step *s, int32_t layer);
void step_o_proj(struct backend *b, const struct step *s, const struct layer *w);
void step_gate_up(struct backend *b, const struct step *s, const struct layer *w);
void step_down(struct backend *b, const struct step *s, const struct layer *w);
void step_head(struct backend *b, const struct step *s, const struct vector *norm,
               const struct matrix *w);
linnet_status step_finish(struct backend *b, linnet_error *err);
const float *step_logits(struct backend *b, int32_t i);
void step_choose(struct backend *b, const struct step *s, const struct choice_rule *rules);
linnet_status step_submit(struct backend *b, linnet_error *err);
linnet_status step_collect(struct backend *b, const struct chosen **out, linnet_error *err);

/* This layer's keys (0) or values (1). */
static inline bf16 *cache_of(const struct backend *b, int32_t layer, int values)
{
    int64_t half = (int64_t)b->limits.n_blocks * KV_BLOCK * b->shape.n_kv_heads * b->shape.head_dim;
    return b->cache + (2 * (int64_t)layer + values) * half;
}

#endif
