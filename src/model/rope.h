/*
 * rope.h - rotary position embedding: inverse frequencies of each kind of scaling, and the table.
 * Default: Su et al., RoFormer. Linear, dynamic NTK, yarn (Peng et al.), llama3: as Hugging Face
 * transformers defines them.
 *
 * Dynamic scaling makes the base depend on the length of the sequence. Here that length is a
 * property of the token: for a prompt of n tokens, n for the prompt's tokens and position + 1 for
 * those generated, so that neither chunks nor preemption change it.
 */
#ifndef LINNET_MODEL_ROPE_H
#define LINNET_MODEL_ROPE_H

#include "model/config.h"

struct rope {
    struct rope_config config;
    int32_t head_dim;
    int32_t max_context;
    double attention_factor;
    const float *divisors; /* [head_dim / 2] from the file (rope_freqs.weight), or NULL */
    float *table;     /* [max_context, head_dim]: cos of each pair, then sin; NULL if dynamic */
    int32_t n_filled; /* rows of the table, which grows as rows are asked for */
};

/* divisors (may be NULL) are copied by nobody: they must outlive the rope. */
linnet_status rope_create(const struct rope_config *config, int32_t head_dim, int32_t max_context,
                          const float *divisors, struct rope *out, linnet_error *err);
void rope_destroy(struct rope *r);

/* inv_freq[head_dim / 2] for a sequence of `length` tokens (only dynamic looks at it). */
void rope_inverse_frequencies(const struct rope *r, int32_t length, double *inv_freq);

/* Fills the table up to that many rows at once. */
void rope_fill(struct rope *r, int32_t n);

/* One row: cos[head_dim / 2], then sin, both times the attention factor. length: see above. */
void rope_row(struct rope *r, int32_t position, int32_t length, float *row);

#endif
