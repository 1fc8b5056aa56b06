/*
 * simple.h - one sequence at a time, without block manager or scheduler: the first two stages of
 * the design (no cache at all; one contiguous cache) and the oracle of the tests.
 */
#ifndef LINNET_MODEL_SIMPLE_H
#define LINNET_MODEL_SIMPLE_H

#include "model/decoder.h"

struct simple; /* step arrays for one decoder */

linnet_status simple_create(struct decoder *d, struct simple **out, linnet_error *err);
void simple_destroy(struct simple *s);

/* From now on the cache is not contiguous: logical blocks lie at physical ones in descending order.
 * Before the first token only. */
void simple_scatter(struct simple *s);

/* And from now on the blocks in use are copied into a contiguous cache before each attention, as an
 * attention that cannot read through a block table would need. The decoder's cache has as many
 * blocks again for that. */
linnet_status simple_gather(struct simple *s, linnet_error *err);

/*
 * Runs tokens[from..n) of a sequence whose first `from` tokens are already in the cache, as steps
 * of at most `chunk` tokens (0: as many as the decoder takes). Unless told otherwise
 * logical block i is physical block i. n_prompt: the prompt's length (dynamic RoPE depends on it).
 * logits: [vocab] of the last token, or with `all` [n - from, vocab].
 */
linnet_status simple_forward(struct simple *s, const int32_t *tokens, int32_t n_prompt,
                             int32_t from, int32_t n, int32_t chunk, bool all, float *logits,
                             linnet_error *err);

/* Greedy continuation of tokens[0..n_prompt) by n_new tokens below n_allowed, written behind them.
 * Without cache every token recomputes the whole sequence. */
linnet_status simple_generate(struct simple *s, int32_t *tokens, int32_t n_prompt, int32_t n_new,
                              int32_t n_allowed, bool with_cache, linnet_error *err);

#endif
