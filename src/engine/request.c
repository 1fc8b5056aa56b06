/* request.c - what a request may ask for, and its own copy of it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/limits.h"
#include "base/memory.h"
#include "engine/engine_internal.h"

static const float MAX_BIAS = 1e4f;

/* NaN is in no range. */
static linnet_status check_range(const char *name, float value, float low, float high,
                                 linnet_error *err)
{
    if (value >= low && value <= high) return LINNET_OK;
    return error_set(err, LINNET_INVALID, "%s must be between %g and %g, not %g", name, (double)low,
                     (double)high, (double)value);
}

static linnet_status check_count(const char *name, int64_t value, int64_t low, int64_t high,
                                 linnet_error *err)
{
    if (value >= low && value <= high) return LINNET_OK;
    return error_set(err, LINNET_INVALID, "%s must be between %lld and %lld, not %lld", name,
                     (long long)low, (long long)high, (long long)value);
}

static linnet_status check_ids(const char *what, const int32_t *ids, size_t n, int32_t n_vocab,
                               linnet_error *err)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= n_vocab)
            return error_set(err, LINNET_INVALID, "%s %zu is %d: the model's token ids are 0 to %d",
                             what, i, ids[i], n_vocab - 1);
    return LINNET_OK;
}

static linnet_status check_sampling(const linnet_sampling *s, int32_t n_vocab, linnet_error *err)
{
    const struct {
        const char *name;
        float value, low, high;
    } ranges[] = {
        {"temperature", s->temperature, 0, (float)LIMIT_TEMPERATURE},
        {"top_p", s->top_p, (float)LIMIT_LEAST_TOP_P, 1},
        {"min_p", s->min_p, 0, 1},
        {"repetition_penalty", s->repetition_penalty, (float)LIMIT_LEAST_REPETITION_PENALTY,
         (float)LIMIT_REPETITION_PENALTY},
        {"presence_penalty", s->presence_penalty, -(float)LIMIT_PENALTY, (float)LIMIT_PENALTY},
        {"frequency_penalty", s->frequency_penalty, -(float)LIMIT_PENALTY, (float)LIMIT_PENALTY},
    };
    linnet_status status = check_count("top_k", s->top_k, 0, INT32_MAX, err);
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges && !status; i++)
        status = check_range(ranges[i].name, ranges[i].value, ranges[i].low, ranges[i].high, err);
    if (!status)
        status =
            check_count("the number of logit biases", (int64_t)s->n_logit_bias, 0, n_vocab, err);
    for (size_t i = 0; i < s->n_logit_bias && !status; i++) {
        status = check_ids("logit_bias id", &s->logit_bias[i].id, 1, n_vocab, err);
        if (!status && isnan(s->logit_bias[i].bias))
            status = error_set(err, LINNET_INVALID, "the logit_bias of token %d is not a number",
                               s->logit_bias[i].id);
    }
    return status;
}

static linnet_status check_stops(const struct engine_config *config, const linnet_request *in,
                                 linnet_error *err)
{
    linnet_status status =
        check_count("the number of stop strings", (int64_t)in->n_stop, 0, LIMIT_STOPS, err);
    if (!status)
        status =
            check_count("the number of stop ids", (int64_t)in->n_stop_ids, 0, LIMIT_STOP_IDS, err);
    if (!status) status = check_ids("stop id", in->stop_ids, in->n_stop_ids, config->n_vocab, err);
    if (status) return status;
    for (size_t i = 0; i < in->n_stop; i++)
        if (!in->stop[i] || !*in->stop[i])
            return error_set(err, LINNET_INVALID, "stop string %zu is empty", i);
    if (in->n_stop && !config->tokenizer)
        return error_set(err, LINNET_INVALID,
                         "stop strings need a tokenizer and this model has none: use stop ids");
    return LINNET_OK;
}

/* *max_tokens: how many tokens an answer may have. */
static linnet_status check_length(const struct engine_config *config, const linnet_request *in,
                                  int32_t *max_tokens, linnet_error *err)
{
    int32_t context = config->limits.max_context;
    if (in->n_prompt == 0 || !in->prompt)
        return error_set(err, LINNET_INVALID, "the prompt is empty: it needs at least one token");
    if (in->n_prompt >= (size_t)context)
        return error_set(err, LINNET_TOO_LONG,
                         "the prompt has %zu tokens and the context holds %d, one of them for the "
                         "answer: shorten the prompt or raise max_model_len",
                         in->n_prompt, context);
    int32_t left = context - (int32_t)in->n_prompt;
    *max_tokens = in->max_tokens == 0 || in->max_tokens > left ? left : in->max_tokens;
    int32_t need = blocks_for((int32_t)in->n_prompt + *max_tokens - 1);
    if (need > config->limits.n_blocks)
        return error_set(err, LINNET_TOO_LONG,
                         "a prompt of %zu tokens with an answer of up to %d needs %d cache blocks "
                         "and there are %d: lower max_tokens or raise kv_cache_memory",
                         in->n_prompt, *max_tokens, need, config->limits.n_blocks);
    return check_ids("prompt token", in->prompt, in->n_prompt, config->n_vocab, err);
}

static linnet_status check(const struct engine_config *config, const linnet_request *in,
                           int32_t *max_tokens, linnet_error *err)
{
    linnet_status status = LINNET_OK;
    if (!in->on_event) status = error_set(err, LINNET_INVALID, "the request has no on_event");
    if (!status) status = check_count("max_tokens", in->max_tokens, 0, INT32_MAX, err);
    if (!status) status = check_length(config, in, max_tokens, err);
    if (!status) status = check_count("n", in->n, 0, LIMIT_CHOICES, err);
    if (!status)
        status = check_count("min_tokens", in->min_tokens, 0,
                             in->max_tokens ? in->max_tokens : INT32_MAX, err);
    if (!status) status = check_count("logprobs", in->logprobs, 0, SAMPLER_MAX_LOGPROBS, err);
    if (!status) status = check_sampling(&in->sampling, config->n_vocab, err);
    if (!status) status = check_stops(config, in, err);
    return status;
}

static float clamp_bias(float bias)
{
    return fmaxf(-MAX_BIAS, fminf(MAX_BIAS, bias));
}

static int by_id(const void *a, const void *b)
{
    const linnet_logit_bias *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

/* Leaves each id once, so that the sum does not depend on who adds it up; returns how many. */
static int32_t merge_bias(linnet_logit_bias *bias, int32_t n)
{
    int32_t used = 0;
    qsort(bias, (size_t)n, sizeof *bias, by_id);
    for (int32_t i = 0; i < n; i++) {
        if (used > 0 && bias[used - 1].id == bias[i].id)
            bias[used - 1].bias = clamp_bias(bias[used - 1].bias + bias[i].bias);
        else
            bias[used++] = bias[i];
    }
    return used;
}

static linnet_status copy_sampling(struct request *r, const linnet_sampling *in, linnet_error *err)
{
    r->sampling = (struct sampling){
        .temperature = in->temperature,
        .top_k = in->top_k,
        .top_p = in->top_p,
        .min_p = in->min_p,
        .repetition_penalty = in->repetition_penalty,
        .presence_penalty = in->presence_penalty,
        .frequency_penalty = in->frequency_penalty,
        .seed = in->seed,
    };
    uint64_t *seed = &r->sampling.seed;
    if (!in->has_seed && getrandom(seed, sizeof *seed, 0) != sizeof *seed)
        return error_set(err, LINNET_IO, "the system gives no random numbers: set a seed");
    linnet_logit_bias *bias = mem_new(in->n_logit_bias, sizeof *bias);
    if (!bias) return error_memory(err, "logit_bias", in->n_logit_bias * sizeof *bias);
    for (size_t i = 0; i < in->n_logit_bias; i++)
        bias[i] = (linnet_logit_bias){in->logit_bias[i].id, clamp_bias(in->logit_bias[i].bias)};
    r->sampling.bias = bias;
    r->sampling.n_bias = merge_bias(bias, (int32_t)in->n_logit_bias);
    return LINNET_OK;
}

static linnet_status copy_ends(struct request *r, const struct engine_config *config,
                               const linnet_request *in, linnet_error *err)
{
    size_t n_eos = in->ignore_eos ? 0 : (size_t)config->n_eos;
    r->ends = mem_new(n_eos + in->n_stop_ids, sizeof *r->ends);
    if (!r->ends) return error_memory(err, "stop ids", (n_eos + in->n_stop_ids) * sizeof *r->ends);
    r->n_ends = (int32_t)(n_eos + in->n_stop_ids);
    if (n_eos) memcpy(r->ends, config->eos, n_eos * sizeof *r->ends);
    if (in->n_stop_ids) memcpy(r->ends + n_eos, in->stop_ids, in->n_stop_ids * sizeof *r->ends);
    return LINNET_OK;
}

/*
 * What must be equal for equal tokens to have equal keys. With dynamic RoPE scaling a prompt that
 * is longer than the original context turns all its tokens by its own length; every other token
 * beyond the original context is turned by its position, which all sequences have in common.
 */
static uint64_t sharing_key(int32_t n_prompt, const struct engine_config *config)
{
    int32_t original = config->dynamic_rope_context;
    return original && n_prompt > original ? (uint64_t)n_prompt : 0;
}

static linnet_status create_choices(struct request *r, const struct engine_config *config,
                                    const linnet_request *in, linnet_error *err)
{
    size_t n_tokens = in->n_prompt + (size_t)r->max_tokens;
    size_t n_blocks = (size_t)blocks_for((int32_t)n_tokens);
    r->numbers = mem_new((size_t)r->n_choices * (n_tokens + n_blocks), sizeof *r->numbers);
    if (!r->numbers)
        return error_memory(err, "the request",
                            (size_t)r->n_choices * (n_tokens + n_blocks) * sizeof *r->numbers);
    struct detokenizer_options text = {.skip_special = !in->keep_special_tokens,
                                       .stops = in->stop,
                                       .n_stops = in->n_stop,
                                       .include_stop = in->include_stop};
    int32_t *numbers = r->numbers;
    for (int32_t i = 0; i < r->n_choices; i++) {
        struct choice *c = &r->choices[i];
        c->request = r;
        c->index = i;
        c->sequence = (struct sequence){
            .tokens = numbers,
            .blocks = numbers + n_tokens,
            .n_prompt = (int32_t)in->n_prompt,
            .n_known = (int32_t)in->n_prompt,
            .n_max = (int32_t)n_tokens,
            .priority = in->priority,
            .key = sharing_key((int32_t)in->n_prompt, config),
            .next_sibling = &r->choices[(i + 1) % r->n_choices].sequence,
            .owner = c,
        };
        memcpy(numbers, in->prompt, in->n_prompt * sizeof *numbers);
        numbers += n_tokens + n_blocks;
        if (!config->tokenizer) continue;
        linnet_status status = detokenizer_create(config->tokenizer, &text, &c->detokenizer, err);
        if (status) return status;
    }
    return LINNET_OK;
}

/*
 * A device that chooses is told of every id that bias, bans or penalties touch. Steps are planned
 * ahead only for answers with at most their share of what it takes, so that it can choose for any
 * number of them.
 */
static linnet_status prepare_for_device(struct request *r, const struct engine_config *config,
                                        linnet_error *err)
{
    const struct sequence *q = &r->choices[0].sequence;
    struct sample_context last = {.n_prompt = q->n_prompt,
                                  .n_output = q->n_max - q->n_prompt,
                                  .n_banned = r->min_tokens > 0 ? r->n_ends : 0};
    size_t count = (size_t)sampler_rule_capacity(config->n_vocab, &r->sampling, &last);
    size_t share = (size_t)(config->runner.max_adjustments / config->limits.max_seqs);
    bool needs_tokens = r->n_logprobs >= 0 || has_penalties(&r->sampling) || count > share;
    r->adjustments = mem_new((size_t)r->n_choices * count, sizeof *r->adjustments);
    if (!r->adjustments)
        return error_memory(err, "the request",
                            (size_t)r->n_choices * count * sizeof *r->adjustments);
    for (int32_t i = 0; i < r->n_choices; i++) {
        r->choices[i].adjustments = r->adjustments + (size_t)i * count;
        r->choices[i].sequence.needs_tokens = needs_tokens;
    }
    return LINNET_OK;
}

linnet_status request_create(const struct engine_config *config, const linnet_request *in,
                             struct request **out, linnet_error *err)
{
    int32_t max_tokens = 0;
    linnet_status status = check(config, in, &max_tokens, err);
    if (status) return status;
    int32_t n = in->n ? in->n : 1;
    size_t bytes = sizeof(struct request) + (size_t)n * sizeof(struct choice);
    struct request *r = mem_new(1, bytes);
    if (!r) return error_memory(err, "the request", bytes);
    r->on_event = in->on_event;
    r->user = in->user;
    r->submitted = clock_seconds();
    r->n_logprobs = in->want_logprobs ? in->logprobs : -1;
    r->max_tokens = max_tokens;
    r->min_tokens = in->min_tokens;
    r->include_stop = in->include_stop;
    r->n_active = r->n_choices = n;
    status = copy_sampling(r, &in->sampling, err);
    if (!status) status = copy_ends(r, config, in, err);
    if (!status) status = create_choices(r, config, in, err);
    if (!status && config->runner.submit) status = prepare_for_device(r, config, err);
    if (status) {
        request_free(r);
        return status;
    }
    *out = r;
    return LINNET_OK;
}

void request_free(struct request *r)
{
    if (!r) return;
    for (int32_t i = 0; i < r->n_choices; i++)
        if (r->choices[i].detokenizer) detokenizer_destroy(r->choices[i].detokenizer);
    free((void *)r->sampling.bias);
    free(r->ends);
    free(r->numbers);
    free(r->adjustments);
    free(r);
}
