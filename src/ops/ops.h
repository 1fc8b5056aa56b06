/*
 * ops.h - the backend contract: everything the model computes is a step, and a backend runs it in
 * about a dozen operations. decoder.c calls them in model order; how one is built from kernels is
 * the backend's own affair.
 *
 * Promise of every backend (docs/numerics.md): each output row depends only on its own inputs, bit
 * for bit. Neither n_tokens, nor the other sequences, nor where blocks lie, nor the number of
 * threads may change it.
 */
#ifndef LINNET_OPS_OPS_H
#define LINNET_OPS_OPS_H

#include "base/dtype.h"
#include "base/error.h"

struct pool;

enum { KV_BLOCK = 16 }; /* tokens a cache block; the block manager's BLOCK_TOKENS */

/* n_tokens tokens of any mix of sequences: prefill, a chunk of one, decode, or all at once. */
struct step {
    int32_t n_tokens, n_seqs, n_logits;
    int32_t max_blocks; /* row length of block_tables */
    /* [n_tokens]; -1 - i: the token that the device chooses for wanted row i of the step before
     * (see `submit`) */
    const int32_t *token_ids;
    const int32_t *positions;    /* [n_tokens] absolute position in its sequence */
    const int32_t *slot_mapping; /* [n_tokens] block * 16 + offset: where its K and V are stored */
    const int32_t *query_start;  /* [n_seqs + 1] first token of each sequence in the step */
    const int32_t
        *context_lens; /* [n_seqs] tokens in the cache once this step has stored its own */
    const int32_t *block_tables; /* [n_seqs, max_blocks] physical block of each logical block */
    const int32_t *logit_rows;   /* [n_logits] the tokens whose logits are wanted */
    /* [n_tokens] or NULL: the sequence length by which dynamic RoPE scaling turns that token (see
     * rope.h). Other models do not read it. */
    const int32_t *rope_lens;
};

/* What bias, penalties and bans do to one id of a row. */
struct adjustment {
    int32_t id;
    float bias;    /* added first */
    bool seen;     /* the repetition penalty touches it */
    bool banned;   /* never chosen */
    int32_t count; /* in the output: frequency and presence penalties */
};

/* How the token of a wanted row is chosen: struct sampling and struct sample_context of
 * engine/sampler.h, which says what the fields mean and in which order they work. */
struct choice_rule {
    float temperature, top_p, min_p;
    int32_t top_k;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed, position, stream; /* of the random number */
    int32_t n_allowed;
    int32_t n_adjustments; /* each id once */
    const struct adjustment *adjustments;
};

/* What came of it. */
struct chosen {
    int32_t id;           /* -1: none */
    linnet_status status; /* LINNET_OK or LINNET_NUMERIC: the row is damaged, or none is left */
};

/* What a backend must know of a model. */
struct shape {
    int32_t n_layers, hidden, intermediate;
    int32_t n_heads, n_kv_heads, head_dim;
    int32_t vocab;  /* rows of the output matrix */
    float norm_eps; /* RMSNorm's, inside the root */
};

/* How a device launches a step: for measuring, and it changes no bit of any result. */
enum launching {
    LAUNCH_BEST,     /* one kernel for all where there is one, else a recorded step */
    LAUNCH_RECORDED, /* no kernel for all */
    LAUNCH_EACH      /* each operation by itself: --enforce-eager */
};

/* What keys and values are kept in. */
enum kv_type {
    KV_OWN, /* the device's own: fp32 on the CPU, bf16 on a GPU */
    KV_INT8 /* 8 bits, and a scale for each token and head (ops.int8_kv) */
};

struct limits {
    int32_t max_tokens; /* in a step */
    int32_t max_logits; /* rows of logits in a step */
    int32_t max_seqs;
    int32_t max_context; /* tokens of one sequence */
    int32_t n_blocks;    /* blocks of the cache, all layers of 16 tokens each */
    enum kv_type kv;
    enum launching launching;
    bool interleaved; /* the host's memory for weights and cache: mem_interleave */
};

/* Rows of a weight matrix as a file holds them, row-major [rows, columns]. */
struct matrix_part {
    enum dtype dtype;
    const void *data;
    int64_t rows, columns;
    /* > 0: rows of each head of this size are interleaved for RoPE, as Llama GGUF files have them:
     * file row 2i + j is row i + j * size / 2 of the head. Loading puts them right. */
    int32_t interleaved;
    bool paired; /* gate, then up, of equal shapes: a backend may lay their rows side by side */
};

/*
 * Where matrices lie if not in memory of the backend's own. `next` gives the place of the next one,
 * in the order of load_matrix: it is filled already, may only be read and stays; or it is to be
 * filled, and then not looked at any more once the next one is asked for.
 */
struct store {
    void *self;
    linnet_status (*next)(void *self, size_t bytes, void **place, bool *filled, linnet_error *err);
};

/* The row of the file that holds row r of a head-interleaved matrix. */
int64_t matrix_source_row(int64_t r, int32_t interleaved);

struct backend; /* a device with its buffers and cache */
struct matrix;  /* [rows, columns] weights in the backend's own layout */
struct vector;  /* fp32 weights: norms, biases */

/* One layer's weights. NULL where the model has none. */
struct layer {
    struct vector *input_norm;      /* [hidden] */
    struct matrix *qkv;             /* [(n_heads + 2 n_kv_heads) head_dim, hidden] */
    struct vector *qkv_bias;        /* [(n_heads + 2 n_kv_heads) head_dim] */
    struct vector *q_norm, *k_norm; /* [head_dim], before RoPE (Qwen3) */
    struct matrix *o_proj;          /* [hidden, n_heads head_dim] */
    struct vector *o_bias;          /* [hidden] */
    struct vector *post_norm;       /* [hidden] */
    struct matrix *gate_up;         /* [2 intermediate, hidden]: gate's rows, then up's */
    struct matrix *down;            /* [hidden, intermediate] */
    struct vector *next_norm;       /* the next layer's input_norm, or the model's final norm */
};

/* The activations that may be looked at between operations (tests, check). */
enum buffer {
    BUFFER_X,     /* [n_tokens, hidden] residual stream */
    BUFFER_Q,     /* [n_tokens, n_heads * head_dim] after RoPE */
    BUFFER_ATTN,  /* [n_tokens, n_heads * head_dim] before o_proj */
    BUFFER_ACT,   /* [n_tokens, intermediate] silu(gate) * up */
    BUFFER_LOGITS /* [n_logits, vocab] */
};

/*
 * The table. Operations are enqueued in order and return nothing; `finish` waits for them and says
 * whether any failed. All memory is reserved by open and load_*.
 */
struct ops {
    const char *name; /* "reference", "cpu", "cuda" */
    /* Relative error (rms) of activations between operations, or as a product with weights of that
     * type takes them, whichever is larger: 0 for fp32, 0.0017 for bf16, 0.006 for 8 bits and a
     * scale for each 32. */
    double (*activation_error)(enum dtype dtype);

    /* `pool` is the caller's and outlives the backend; a device backend may ignore it. */
    linnet_status (*open)(const struct shape *shape, const struct limits *limits, struct pool *pool,
                          struct backend **out, linnet_error *err);
    void (*close)(struct backend *b); /* frees its matrices and vectors too */

    /* Before the first load_matrix, for backends that say what they put there: `layout` is not 0,
     * and another one after each change of it. */
    void (*use_store)(struct backend *b, const struct store *store);
    uint32_t layout;

    /* Parts have equal columns and are stacked by rows. part->data is not needed afterwards, except
     * by load_embedding, which may go on reading it. */
    linnet_status (*load_matrix)(struct backend *b, const struct matrix_part *parts, int n_parts,
                                 struct matrix **out, linnet_error *err);
    linnet_status (*load_embedding)(struct backend *b, const struct matrix_part *part,
                                    struct matrix **out, linnet_error *err);
    linnet_status (*load_vector)(struct backend *b, const float *values, int64_t n,
                                 struct vector **out, linnet_error *err);
    /* After the last load_*: waits for what is still on its way, and frees what only loading needs.
     * NULL: nothing to do. */
    linnet_status (*loaded)(struct backend *b, linnet_error *err);

    /* Bytes, for the plan made before anything is loaded. */
    int64_t (*matrix_bytes)(enum dtype dtype, int64_t rows, int64_t columns);
    int64_t (*embedding_bytes)(enum dtype dtype, int64_t rows, int64_t columns);
    int64_t (*cache_bytes)(const struct shape *shape, enum kv_type kv, int32_t n_blocks);
    int64_t (*buffer_bytes)(const struct shape *shape, const struct limits *limits,
                            int32_t n_threads);

    /* The rope rows of all positions, from load_vector, for models whose rows depend on nothing
     * else; NULL: rows are wanted with every step. */
    void (*use_rope)(struct backend *b, const struct vector *table);

    /* The step that the following operations belong to, and its rope rows [n_tokens, head_dim] (cos
     * of the first half of the dimensions, then sin), or NULL after use_rope. `whole`: nobody looks
     * at buffers before finish, so that a device may replay a recording of the same shape instead
     * of the operations. */
    void (*begin)(struct backend *b, const struct step *s, const float *rope, bool whole);
    /* x = rows of the embedding */
    void (*embed)(struct backend *b, const struct step *s, const struct matrix *embedding);
    /* RMSNorm, one GEMM, bias, q/k norm, RoPE, K and V into their slots of this layer's cache */
    void (*qkv)(struct backend *b, const struct step *s, int32_t layer, const struct layer *w);
    /* paged grouped-query attention over the block table; scores scaled by head_dim^-0.5 */
    void (*attention)(struct backend *b, const struct step *s, int32_t layer);
    /* x += attn W^T (+ bias) */
    void (*o_proj)(struct backend *b, const struct step *s, const struct layer *w);
    /* RMSNorm, one GEMM for gate and up, act = silu(gate) * up */
    void (*gate_up)(struct backend *b, const struct step *s, const struct layer *w);
    /* x += act W^T */
    void (*down)(struct backend *b, const struct step *s, const struct layer *w);
    /* RMSNorm and GEMM on the wanted rows -> logits */
    void (*head)(struct backend *b, const struct step *s, const struct vector *norm,
                 const struct matrix *w);
    linnet_status (*finish)(struct backend *b, linnet_error *err);

    /*
     * A device that chooses tokens itself offers these three (NULL elsewhere), in place of finish:
     * `choose` after head, [n_logits] rules with max_adjustments adjustments in all at most;
     * `submit` starts the step and returns at once; `collect` waits for the oldest step that was
     * submitted and gives what was chosen, [n_logits], until the next submit. Two steps may be
     * under way, and steps run in the order of their submits.
     *
     * When submit returns, everything that the step consists of has been read: its arrays, its rope
     * rows, the rules and their adjustments may change at once. If it fails, the step is not
     * collected, and no further one will succeed.
     *
     * The next step may name the tokens that this one chooses by their rows. A row that was refused
     * has id -1, and may be named all the same: the device takes any valid token there. What the
     * next step computes for it is for nothing, but it disturbs nobody.
     *
     * Logits of such a step are not fetched, and need not outlive the choice.
     */
    void (*choose)(struct backend *b, const struct step *s, const struct choice_rule *rules);
    linnet_status (*submit)(struct backend *b, linnet_error *err);
    linnet_status (*collect)(struct backend *b, const struct chosen **out, linnet_error *err);
    int32_t max_adjustments;

    /* Both for `bench ladder`. copy_blocks, between qkv and attention: K and V of this layer's
     * blocks from[0..n) to the blocks to, to + 1, ... has_whole_step: whether LAUNCH_BEST has one
     * kernel for a step that decodes one sequence; NULL: no. */
    void (*copy_blocks)(struct backend *b, int32_t layer, const int32_t *from, int32_t to,
                        int32_t n);
    bool (*has_whole_step)(const struct backend *b);

    /* Read bandwidth of the device's memory, measured now, in bytes a second; NULL: the host's. */
    double (*read_bandwidth)(void);

    /* After finish. Logits of wanted row i: [vocab] fp32 in host memory, until the next step. */
    const float *(*logits)(struct backend *b, int32_t i);
    void (*read_buffer)(struct backend *b, enum buffer which, int32_t row, float *out);
    /* K and V of one slot: [n_kv_heads, head_dim] each */
    void (*read_kv)(struct backend *b, int32_t layer, int32_t slot, float *k, float *v);

    bool int8_kv; /* has KV_INT8 */
};

extern const struct ops ops_reference; /* plain C, top to bottom readable */
extern const struct ops ops_cpu;       /* vector code, chosen at run time */

/*
 * The CUDA backend is a shared object, liblinnet_cuda.so, so that the same program runs where there
 * is no driver. Its one symbol, of this type: the table for a device, or NULL and a message. text
 * gets the device's name for people, *free_bytes the memory that is free on it.
 */
enum { OPS_ABI = 9 }; /* grows with every change of this header */
struct ops_cuda_request {
    int abi, index;
};
typedef const struct ops *(*ops_cuda_fn)(const struct ops_cuda_request *request, char *text,
                                         size_t text_size, int64_t *free_bytes, linnet_error *err);
#define OPS_CUDA_LIBRARY "liblinnet_cuda.so"
#define OPS_CUDA_SYMBOL  "linnet_cuda_ops"

/* The instruction set that ops_cpu uses here: "avx512_bf16", "avx2", "neon", "generic", ... `force`
 * (tests): one of these names, or NULL for the best; false if the machine cannot. */
const char *ops_cpu_kernels(void);
bool ops_cpu_force(const char *name);

#endif
