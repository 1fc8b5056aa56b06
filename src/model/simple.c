#include "model/simple.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

struct simple {
    struct decoder *d;
    int32_t *positions, *slots, *rope_lens, *rows; /* [max_tokens] */
    int32_t *block_table;                          /* [max_blocks]: 0, 1, 2, ... */
    int32_t *gathered;                             /* [max_blocks]; NULL: read in place */
    int32_t max_blocks, n_gathered;                /* blocks to copy in this step */
    float *logits;                                 /* [vocab] */
};

linnet_status simple_create(struct decoder *d, struct simple **out, linnet_error *err)
{
    struct simple *s = mem_new(1, sizeof *s);
    size_t n = (size_t)d->limits.max_tokens;
    if (!s) return error_memory(err, "a sequence", sizeof *s);
    s->d = d;
    s->max_blocks = (d->limits.max_context + KV_BLOCK - 1) / KV_BLOCK;
    if (s->max_blocks > d->limits.n_blocks) s->max_blocks = d->limits.n_blocks;
    s->positions = mem_new(n, sizeof(int32_t));
    s->slots = mem_new(n, sizeof(int32_t));
    s->rope_lens = mem_new(n, sizeof(int32_t));
    s->rows = mem_new(n, sizeof(int32_t));
    s->block_table = mem_new((size_t)s->max_blocks, sizeof(int32_t));
    s->logits = mem_new((size_t)d->config->shape.vocab, sizeof(float));
    if (!s->positions || !s->slots || !s->rope_lens || !s->rows || !s->block_table || !s->logits) {
        simple_destroy(s);
        return error_memory(err, "a sequence", n * 4 * sizeof(int32_t));
    }
    for (int32_t i = 0; i < s->max_blocks; i++) s->block_table[i] = i;
    *out = s;
    return LINNET_OK;
}

void simple_scatter(struct simple *s)
{
    for (int32_t i = 0; i < s->max_blocks; i++) s->block_table[i] = s->max_blocks - 1 - i;
}

linnet_status simple_gather(struct simple *s, linnet_error *err)
{
    s->gathered = mem_new((size_t)s->max_blocks, sizeof *s->gathered);
    if (!s->gathered)
        return error_memory(err, "a block table", (size_t)s->max_blocks * sizeof *s->gathered);
    for (int32_t i = 0; i < s->max_blocks; i++) s->gathered[i] = s->max_blocks + i;
    return LINNET_OK;
}

static void gather(void *user, const char *operation, int32_t layer)
{
    const struct simple *s = user;
    if (strcmp(operation, "qkv") == 0)
        s->d->ops->copy_blocks(s->d->backend, layer, s->block_table, s->gathered[0], s->n_gathered);
}

void simple_destroy(struct simple *s)
{
    if (!s) return;
    free(s->positions);
    free(s->slots);
    free(s->rope_lens);
    free(s->rows);
    free(s->block_table);
    free(s->gathered);
    free(s->logits);
    free(s);
}

linnet_status simple_forward(struct simple *s, const int32_t *tokens, int32_t n_prompt,
                             int32_t from, int32_t n, int32_t chunk, bool all, float *logits,
                             linnet_error *err)
{
    const struct limits *limits = &s->d->limits;
    size_t vocab = (size_t)s->d->config->shape.vocab;
    if (n > s->max_blocks * KV_BLOCK || n > limits->max_context)
        return error_set(err, LINNET_TOO_LONG, "%d tokens do not fit into %d blocks of %d", n,
                         s->max_blocks, KV_BLOCK);
    if (chunk <= 0 || chunk > limits->max_tokens) chunk = limits->max_tokens;
    if (all && chunk > limits->max_logits) chunk = limits->max_logits;
    for (int32_t at = from; at < n; at += chunk) {
        int32_t count = n - at < chunk ? n - at : chunk, context = at + count;
        for (int32_t t = 0; t < count; t++) {
            int32_t p = at + t;
            s->positions[t] = p;
            s->slots[t] = s->block_table[p / KV_BLOCK] * KV_BLOCK + p % KV_BLOCK;
            s->rope_lens[t] = n_prompt > p + 1 ? n_prompt : p + 1;
            s->rows[t] = t;
        }
        if (!all) s->rows[0] = count - 1;
        int32_t query_start[2] = {0, count};
        struct step step = {.n_tokens = count,
                            .n_seqs = 1,
                            .n_logits = all ? count : context == n,
                            .max_blocks = s->max_blocks,
                            .token_ids = tokens + at,
                            .positions = s->positions,
                            .slot_mapping = s->slots,
                            .query_start = query_start,
                            .context_lens = &context,
                            .block_tables = s->gathered ? s->gathered : s->block_table,
                            .logit_rows = s->rows,
                            .rope_lens = s->rope_lens};
        s->n_gathered = (context + KV_BLOCK - 1) / KV_BLOCK;
        linnet_status status = s->gathered ? decoder_step_observed(s->d, &step, gather, s, err)
                                           : decoder_step(s->d, &step, err);
        if (status != LINNET_OK) return status;
        for (int32_t i = 0; i < step.n_logits; i++)
            memcpy(logits + (size_t)(all ? at - from + i : 0) * vocab, decoder_logits(s->d, i),
                   vocab * sizeof(float));
    }
    return LINNET_OK;
}

linnet_status simple_generate(struct simple *s, int32_t *tokens, int32_t n_prompt, int32_t n_new,
                              int32_t n_allowed, bool with_cache, linnet_error *err)
{
    for (int32_t n = n_prompt; n < n_prompt + n_new; n++) {
        int32_t from = with_cache && n > n_prompt ? n - 1 : 0, best = 0;
        linnet_status status =
            simple_forward(s, tokens, n_prompt, from, n, 0, false, s->logits, err);
        if (status != LINNET_OK) return status;
        for (int32_t i = 1; i < n_allowed; i++)
            if (s->logits[i] > s->logits[best]) best = i;
        tokens[n] = best;
    }
    return LINNET_OK;
}
