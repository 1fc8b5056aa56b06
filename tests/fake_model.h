/*
 * fake_model.h - a runner that notices where everything lies. It stores token, position and RoPE
 * length at the physical slot it is told, and derives logits from a hash of the whole context as
 * found by walking the block table. A wrong slot, a stale or foreign block, a context one short or
 * one long, a wrong order: each changes the tokens.
 *
 * As a device it chooses tokens itself, and does the work of a step only when it is collected: what
 * came between must not have mattered.
 */
#ifndef LINNET_TESTS_FAKE_MODEL_H
#define LINNET_TESTS_FAKE_MODEL_H

#include <math.h>

#include "engine/engine_internal.h"
#include "support.h"

#include "base/random.h"
#include "submitted.h"

struct fake_slot {
    int32_t token, position, rope_len;
};

struct fake_model {
    struct limits limits;
    int32_t n_vocab;
    int32_t dynamic_rope_context;       /* shorter lengths are all one, as in rope_row */
    struct fake_slot *slots;            /* [n_blocks * 16] */
    float *logits;                      /* [max_logits, n_vocab] */
    const struct block_manager *blocks; /* NULL: not looked at */
    int32_t nan_token; /* a context that starts with it gives NaN after 20 tokens; -1: none */
    int64_t fail_at;   /* this step fails as a device would; -1: none */
    int64_t n_steps, n_tokens;
    const char *fault; /* a step no backend should be given */

    /* As a device. */
    struct sampler *sampler;
    int32_t max_adjustments;
    struct submitted *under_way[2], *before; /* the older first; the one collected last */
    int32_t n_under_way;
    struct chosen *chosen;        /* what was handed out last */
    int64_t fail_collect_at;      /* counted like fail_at; -1: none */
    int64_t n_collected, n_ahead; /* steps that were submitted while another was under way */
};

static void fake_logits(struct fake_model *m, const struct step *s, int32_t seq, int32_t row,
                        float *logits)
{
    int32_t position = s->context_lens[seq] - (s->query_start[seq + 1] - row);
    const int32_t *table = s->block_tables + (size_t)seq * (size_t)s->max_blocks;
    uint64_t hash = 0;
    for (int32_t p = 0; p <= position; p++) {
        const struct fake_slot *slot = &m->slots[table[p / 16] * 16 + p % 16];
        hash = random_u64(hash, (uint64_t)slot->token << 32 | (uint32_t)slot->position,
                          (uint64_t)slot->rope_len);
    }
    float scale = hash % 4 ? 12 : 1; /* most contexts are sure of themselves, some are not */
    for (int32_t i = 0; i < m->n_vocab; i++)
        logits[i] = scale * (float)random_uniform(hash, (uint64_t)i, 5);
    int32_t first = m->slots[table[0] * 16].token;
    if (first == m->nan_token && position >= 20) logits[3] = NAN;
}

static void fake_check(struct fake_model *m, const struct step *s)
{
    if (s->n_tokens < 1 || s->n_tokens > m->limits.max_tokens) m->fault = "n_tokens";
    if (s->n_seqs < 1 || s->n_seqs > m->limits.max_seqs) m->fault = "n_seqs";
    if (s->n_logits > m->limits.max_logits) m->fault = "n_logits";
    if (s->query_start[0] != 0 || s->query_start[s->n_seqs] != s->n_tokens)
        m->fault = "query_start";
    for (int32_t i = 0; i < s->n_seqs; i++)
        if (s->context_lens[i] > m->limits.max_context) m->fault = "a context beyond its limit";
    for (int32_t i = 0; i < s->n_tokens && m->blocks; i++)
        if (block_count(m->blocks, s->slot_mapping[i] / 16) != 1)
            m->fault = "a write to a block that is shared or free";
}

static void fake_run(struct fake_model *m, const struct step *s)
{
    m->n_tokens += s->n_tokens;
    for (int32_t i = 0; i < s->n_tokens; i++) {
        int32_t rope_len = s->rope_lens ? s->rope_lens[i] : 0;
        if (rope_len < m->dynamic_rope_context) rope_len = m->dynamic_rope_context;
        m->slots[s->slot_mapping[i]] =
            (struct fake_slot){s->token_ids[i], s->positions[i], rope_len};
    }
    for (int32_t i = 0; i < s->n_logits; i++) {
        int32_t seq = 0;
        while (s->query_start[seq + 1] <= s->logit_rows[i]) seq++;
        fake_logits(m, s, seq, s->logit_rows[i], m->logits + (size_t)i * (size_t)m->n_vocab);
    }
}

static linnet_status fake_step(void *self, const struct step *s, linnet_error *err)
{
    struct fake_model *m = self;
    if (m->n_steps++ == m->fail_at) return error_set(err, LINNET_DEVICE, "the device fell over");
    if (m->n_under_way > 0) m->fault = "a step beside one that is under way";
    for (int32_t i = 0; i < s->n_tokens; i++)
        if (s->token_ids[i] < 0) m->fault = "a token that is not known";
    fake_check(m, s);
    fake_run(m, s);
    return LINNET_OK;
}

static const float *fake_row(void *self, int32_t i)
{
    const struct fake_model *m = self;
    return m->logits + (size_t)i * (size_t)m->n_vocab;
}

static linnet_status fake_submit(void *self, const struct step *s, const struct choice_rule *rules,
                                 linnet_error *err)
{
    struct fake_model *m = self;
    free(m->chosen); /* valid until now */
    m->chosen = NULL;
    if (m->n_steps++ == m->fail_at) return error_set(err, LINNET_DEVICE, "the device fell over");
    if (m->n_under_way == 2) {
        m->fault = "three steps under way";
        return error_set(err, LINNET_INTERNAL, "%s", m->fault);
    }
    fake_check(m, s);
    int64_t n_adjustments = 0;
    for (int32_t i = 0; i < s->n_logits; i++) n_adjustments += rules[i].n_adjustments;
    if (n_adjustments > m->max_adjustments) m->fault = "too many adjustments";
    struct submitted *step = submitted_new(s, rules);
    if (!names_rows(step, m->n_under_way ? m->under_way[m->n_under_way - 1] : NULL))
        m->fault = "a token of no row";
    m->n_ahead += m->n_under_way;
    m->under_way[m->n_under_way++] = step;
    return LINNET_OK;
}

static linnet_status fake_collect(void *self, const struct chosen **out, linnet_error *err)
{
    struct fake_model *m = self;
    if (m->n_under_way == 0) {
        m->fault = "nothing to collect";
        return error_set(err, LINNET_INTERNAL, "%s", m->fault);
    }
    struct submitted *step = m->under_way[0];
    m->under_way[0] = m->under_way[1];
    m->n_under_way--;
    find_tokens(step, m->before);
    fake_run(m, &step->step);
    free(m->chosen);
    m->chosen = calloc((size_t)step->step.n_logits + 1, sizeof *m->chosen);
    for (int32_t i = 0; i < step->step.n_logits; i++)
        m->chosen[i] = step->chosen[i] =
            choose_by_rule(m->sampler, m->logits + (size_t)i * (size_t)m->n_vocab, &step->rules[i]);
    submitted_free(m->before);
    m->before = step;
    *out = m->chosen;
    return m->n_collected++ == m->fail_collect_at
               ? error_set(err, LINNET_DEVICE, "the device fell over late")
               : LINNET_OK;
}

static void fake_close(void *self)
{
    struct fake_model *m = self;
    if (m->n_under_way > 0) fail_msg("%d steps were never collected", m->n_under_way);
    submitted_free(m->before);
    sampler_destroy(m->sampler);
    free(m->chosen);
    free(m->slots);
    free(m->logits);
    free(m);
}

struct fake_options {
    int32_t n_blocks, max_seqs, max_tokens, max_context;
    bool prefix_caching;
    int32_t dynamic_rope_context;
    const struct tokenizer *tokenizer;
    bool device;             /* chooses tokens itself */
    int32_t max_adjustments; /* 0: as many as there may ever be */
};

enum { FAKE_VOCAB = 61, FAKE_EOS = 7, FAKE_NAN = FAKE_VOCAB - 1 };

static linnet_engine *fake_engine(const struct fake_options *options, struct fake_model **model)
{
    struct limits limits = {.max_tokens = options->max_tokens,
                            .max_logits = options->max_seqs,
                            .max_seqs = options->max_seqs,
                            .max_context = options->max_context,
                            .n_blocks = options->n_blocks};
    struct fake_model *m = calloc(1, sizeof *m);
    m->limits = limits;
    m->n_vocab = FAKE_VOCAB;
    m->dynamic_rope_context = options->dynamic_rope_context;
    m->nan_token = FAKE_NAN;
    m->fail_at = m->fail_collect_at = -1;
    m->slots = calloc((size_t)limits.n_blocks * 16, sizeof *m->slots);
    m->logits = calloc((size_t)limits.max_logits * FAKE_VOCAB, sizeof *m->logits);
    struct engine_config config = {
        .runner = {.self = m, .step = fake_step, .logits = fake_row, .close = fake_close},
        .tokenizer = options->tokenizer,
        .n_vocab = FAKE_VOCAB,
        .eos = {FAKE_EOS},
        .n_eos = 1,
        .limits = limits,
        .prefix_caching = options->prefix_caching,
        .hash_seed = 1,
        .dynamic_rope_context = options->dynamic_rope_context};
    linnet_engine *engine;
    linnet_error err;
    assert_ok(sampler_create(FAKE_VOCAB, &m->sampler, &err), err);
    m->max_adjustments =
        options->max_adjustments ? options->max_adjustments : limits.max_seqs * FAKE_VOCAB;
    if (options->device) {
        config.runner.max_adjustments = m->max_adjustments;
        config.runner.submit = fake_submit;
        config.runner.collect = fake_collect;
    }
    assert_ok(engine_open(&config, &engine, &err), err);
    m->blocks = engine->blocks;
    if (model) *model = m;
    return engine;
}

/* One step, after which every block must be accounted for and every sequence hold what it needs. */
static bool checked_turn(linnet_engine *e)
{
    bool more = engine_turn(e);
    char message[256];
    if (!block_manager_check(e->blocks, message, sizeof message)) fail_msg("%s", message);
    const struct fake_model *m = e->config.runner.self;
    if (m->fault) fail_msg("the step is wrong: %s", m->fault);
    return more;
}

#endif
