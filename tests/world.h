/*
 * world.h - sequences of random tokens for a decoder, their blocks scattered over the cache, and
 * steps made of any of their next tokens: for tests of what must not change a bit.
 */
#ifndef LINNET_TESTS_WORLD_H
#define LINNET_TESTS_WORLD_H

#include "base/random.h"
#include "base/threads.h"
#include "model/simple.h"
#include "support.h"

#ifndef WORLD_SEQS
#define WORLD_SEQS 24
#endif

enum {
    MAX_SEQS = WORLD_SEQS,
    MAX_LEN = 320,
    BLOCKS_A_SEQ = MAX_LEN / KV_BLOCK,
    N_BLOCKS = MAX_SEQS * BLOCKS_A_SEQ,
    MAX_TOKENS = 512
};

struct test_sequence {
    int32_t tokens[MAX_LEN], n, n_prompt, done; /* done: tokens in the cache */
    int32_t blocks[BLOCKS_A_SEQ];
};

struct world {
    struct checkpoint *cp;
    struct model_config config;
    struct pool *pool;
    struct decoder *decoder;
    struct simple *simple;
    int32_t vocab;
};

/* The checkpoint is the world's from now on. */
static inline void world_open_kv(struct world *w, struct checkpoint *cp, const struct ops *ops,
                                 int threads, enum launching launching, enum kv_type kv)
{
    linnet_error err;
    struct limits limits = {.max_tokens = MAX_TOKENS,
                            .max_logits = MAX_TOKENS,
                            .max_seqs = MAX_SEQS,
                            .max_context = MAX_LEN,
                            .n_blocks = N_BLOCKS,
                            .kv = kv,
                            .launching = launching};
    w->cp = cp;
    assert_ok(model_config_read(w->cp, &w->config, &err), err);
    assert_ok(pool_create(threads, &w->pool, &err), err);
    assert_ok(
        decoder_create(w->cp, &w->config, ops, w->pool, &limits, NULL, NULL, &w->decoder, &err),
        err);
    assert_ok(simple_create(w->decoder, &w->simple, &err), err);
    w->vocab = w->config.shape.vocab;
}

static inline void world_open_with(struct world *w, struct checkpoint *cp, const struct ops *ops,
                                   int threads, enum launching launching)
{
    world_open_kv(w, cp, ops, threads, launching, KV_OWN);
}

static inline void world_open(struct world *w, const char *path, const struct ops *ops, int threads,
                              enum kv_type kv)
{
    linnet_error err;
    struct checkpoint *cp;
    assert_ok(checkpoint_open(path, &cp, &err), err);
    world_open_kv(w, cp, ops, threads, LAUNCH_BEST, kv);
}

static inline void world_close(struct world *w)
{
    simple_destroy(w->simple);
    decoder_destroy(w->decoder);
    pool_destroy(w->pool);
    checkpoint_close(w->cp);
}

/* Sequence i: random tokens, its blocks scattered over the pool. */
static inline void make_sequence(const struct world *w, int i, int32_t n, struct test_sequence *s)
{
    *s = (struct test_sequence){.n = n, .n_prompt = n};
    for (int32_t t = 0; t < n; t++)
        s->tokens[t] = (int32_t)(random_u64(11, (uint64_t)t, (uint64_t)i) % (uint64_t)w->vocab);
    for (int32_t b = 0; b < BLOCKS_A_SEQ; b++)
        s->blocks[b] = (i * BLOCKS_A_SEQ + b) * 47 % N_BLOCKS; /* 47 is coprime to the pool */
}

/* The arrays of a step. */
struct numbers {
    struct step step;
    int32_t ids[MAX_TOKENS], positions[MAX_TOKENS], slots[MAX_TOKENS], rope_lens[MAX_TOKENS],
        rows[MAX_TOKENS], lens[MAX_SEQS], query_start[MAX_SEQS + 1],
        tables[MAX_SEQS * BLOCKS_A_SEQ], of[MAX_SEQS]; /* whose a row of logits is */
};

/* A step of the next counts[i] tokens of each sequence (0: left out), which wants the logits of
 * each one's last. */
static inline void make_step(struct test_sequence *seqs, const int32_t *counts, int n,
                             struct numbers *out)
{
    struct step *step = &out->step;
    *step = (struct step){.max_blocks = BLOCKS_A_SEQ,
                          .token_ids = out->ids,
                          .positions = out->positions,
                          .slot_mapping = out->slots,
                          .query_start = out->query_start,
                          .context_lens = out->lens,
                          .block_tables = out->tables,
                          .logit_rows = out->rows,
                          .rope_lens = out->rope_lens};
    out->query_start[0] = 0;
    for (int i = 0; i < n; i++) {
        struct test_sequence *s = &seqs[i];
        if (!counts[i]) continue;
        for (int32_t c = 0; c < counts[i]; c++, s->done++) {
            int32_t t = step->n_tokens++, p = s->done;
            out->ids[t] = s->tokens[p];
            out->positions[t] = p;
            out->slots[t] = s->blocks[p / KV_BLOCK] * KV_BLOCK + p % KV_BLOCK;
            out->rope_lens[t] = s->n_prompt > p + 1 ? s->n_prompt : p + 1;
        }
        memcpy(out->tables + step->n_seqs * BLOCKS_A_SEQ, s->blocks, sizeof s->blocks);
        out->lens[step->n_seqs] = s->done;
        out->rows[step->n_logits] = step->n_tokens - 1;
        out->of[step->n_logits++] = i;
        out->query_start[++step->n_seqs] = step->n_tokens;
    }
}

/* Runs such a step; logits of sequence i go to logits[i]. */
static inline void run_step(struct world *w, struct test_sequence *seqs, const int32_t *counts,
                            int n, float *const *logits)
{
    static struct numbers numbers;
    linnet_error err;
    make_step(seqs, counts, n, &numbers);
    assert_ok(decoder_step(w->decoder, &numbers.step, &err), err);
    for (int32_t i = 0; i < numbers.step.n_logits; i++)
        memcpy(logits[numbers.of[i]], decoder_logits(w->decoder, i),
               (size_t)w->vocab * sizeof(float));
}

#endif
