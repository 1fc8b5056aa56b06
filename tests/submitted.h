/*
 * submitted.h - what a device that chooses tokens itself does, for runners that tests make up: it
 * keeps a copy of each step with its rules, finds the tokens that a step names by their rows, and
 * chooses by a rule as sampler_choose would.
 */
#ifndef LINNET_TESTS_SUBMITTED_H
#define LINNET_TESTS_SUBMITTED_H

#include "engine/sampler.h"
#include "ops/ops.h"
#include "support.h"

struct submitted {
    struct step step;
    int32_t *numbers; /* the memory of its arrays */
    struct choice_rule *rules;
    struct chosen *chosen; /* [n_logits] */
};

static inline int32_t *copy_numbers(int32_t **to, const int32_t *from, int32_t n)
{
    int32_t *copy = *to;
    memcpy(copy, from, (size_t)n * sizeof *copy);
    *to += n;
    return copy;
}

static inline struct submitted *submitted_new(const struct step *s, const struct choice_rule *rules)
{
    struct submitted *copy = calloc(1, sizeof *copy);
    int32_t n = s->n_tokens, n_seqs = s->n_seqs, n_logits = s->n_logits;
    int32_t *to = calloc((size_t)(4 * n + 2 * n_seqs + 1 + n_seqs * s->max_blocks + n_logits) + 1,
                         sizeof *to);
    copy->numbers = to;
    copy->step = *s;
    copy->step.token_ids = copy_numbers(&to, s->token_ids, n);
    copy->step.positions = copy_numbers(&to, s->positions, n);
    copy->step.slot_mapping = copy_numbers(&to, s->slot_mapping, n);
    copy->step.query_start = copy_numbers(&to, s->query_start, n_seqs + 1);
    copy->step.context_lens = copy_numbers(&to, s->context_lens, n_seqs);
    copy->step.block_tables = copy_numbers(&to, s->block_tables, n_seqs * s->max_blocks);
    copy->step.logit_rows = copy_numbers(&to, s->logit_rows, n_logits);
    if (s->rope_lens) copy->step.rope_lens = copy_numbers(&to, s->rope_lens, n);
    copy->rules = calloc((size_t)n_logits + 1, sizeof *copy->rules);
    copy->chosen = calloc((size_t)n_logits + 1, sizeof *copy->chosen);
    for (int32_t i = 0; i < n_logits; i++) {
        copy->rules[i] = rules[i];
        size_t bytes = (size_t)rules[i].n_adjustments * sizeof(struct adjustment);
        struct adjustment *adjustments = malloc(bytes + 1);
        if (bytes) memcpy(adjustments, rules[i].adjustments, bytes);
        copy->rules[i].adjustments = adjustments;
    }
    return copy;
}

static inline void submitted_free(struct submitted *s)
{
    if (!s) return;
    for (int32_t i = 0; i < s->step.n_logits; i++) free((void *)s->rules[i].adjustments);
    free(s->rules);
    free(s->chosen);
    free(s->numbers);
    free(s);
}

/* Every token that is named by its row follows the token of that row. */
static inline bool names_rows(const struct submitted *s, const struct submitted *before)
{
    for (int32_t i = 0; i < s->step.n_tokens; i++) {
        int32_t row = -1 - s->step.token_ids[i];
        if (row < 0) continue;
        if (!before || row >= before->step.n_logits) return false;
        if (s->step.positions[i] != before->step.positions[before->step.logit_rows[row]] + 1)
            return false;
    }
    return true;
}

/* Where nothing was chosen, any token will do. */
static inline void find_tokens(struct submitted *s, const struct submitted *before)
{
    for (int32_t i = 0; i < s->step.n_tokens; i++) {
        int32_t row = -1 - s->step.token_ids[i];
        if (row < 0) continue;
        int32_t id = before->chosen[row].id;
        s->numbers[i] = id < 0 ? 0 : id; /* token_ids come first */
    }
}

/* Turns the rule back into what sampler_choose takes: tokens that would give these counts. */
static inline struct chosen choose_by_rule(struct sampler *sampler, const float *logits,
                                           const struct choice_rule *rule)
{
    int32_t n = (int32_t)rule->position, n_output = 0, n_seen = 0, n_banned = 0;
    size_t room = (size_t)rule->n_adjustments + 1;
    int32_t *tokens = malloc(((size_t)n + 1) * sizeof *tokens);
    int32_t *banned = malloc(room * sizeof *banned);
    linnet_logit_bias *bias = malloc(room * sizeof *bias);
    for (int32_t i = 0; i < n; i++) tokens[i] = -1;
    for (int32_t i = 0; i < rule->n_adjustments; i++) {
        const struct adjustment *a = &rule->adjustments[i];
        bias[i] = (linnet_logit_bias){a->id, a->bias};
        if (a->banned) banned[n_banned++] = a->id;
        for (int32_t k = 0; k < a->count; k++) tokens[n - ++n_output] = a->id;
        if (a->seen && a->count == 0) tokens[n_seen++] = a->id;
    }
    struct sampling sampling = {rule->temperature,
                                rule->top_k,
                                rule->top_p,
                                rule->min_p,
                                rule->repetition_penalty,
                                rule->presence_penalty,
                                rule->frequency_penalty,
                                rule->seed,
                                bias,
                                rule->n_adjustments};
    struct sample_context context = {tokens,   n - n_output,    n_output,    banned,
                                     n_banned, rule->n_allowed, rule->stream};
    struct sample sample = {.id = -1};
    linnet_error err;
    linnet_status status = sampler_choose(sampler, logits, &sampling, &context, -1, &sample, &err);
    free(tokens);
    free(banned);
    free(bias);
    return (struct chosen){status ? -1 : sample.id, status};
}

#endif
