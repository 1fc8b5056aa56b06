/* score.c - how likely a model finds a given text: log-probabilities of its tokens. */
#include <math.h>
#include <stdlib.h>

#include "base/limits.h"
#include "base/memory.h"
#include "base/threads.h"
#include "engine/api_internal.h"
#include "model/simple.h"

enum {
    STEP_TOKENS = 512,
    LOGITS_BYTES = 32 << 20 /* of the rows of logits held at once, whatever the text's length */
};

struct linnet_scorer {
    const struct model_config *config;
    struct pool *pool;
    struct decoder *decoder;
    struct simple *simple;
    int32_t n_rows;
    float *logits; /* [n_rows, vocab] */
};

/* A cache for one sequence, steps no longer than it, and as many rows of logits as their room
 * holds. */
static linnet_status plan_scorer(const linnet_model *m, const linnet_engine_options *o,
                                 const struct device *device, linnet_plan *plan, linnet_error *err)
{
    const struct shape *shape = &m->config.shape;
    int32_t length = o->max_model_len ? o->max_model_len : m->config.context_length;
    int32_t rows = (int32_t)(LOGITS_BYTES / sizeof(float)) / shape->vocab,
            tokens = length < STEP_TOKENS ? length : STEP_TOKENS;
    if (length < LIMIT_LEAST_CONTEXT) tokens = 1; /* refused below */
    if (rows > tokens) rows = tokens;
    linnet_engine_options one = {
        .threads = o->threads,
        .max_model_len = length,
        .max_num_seqs = rows < 1 ? 1 : rows, /* the plan has a row of logits for each */
        .max_num_batched_tokens = tokens,
        .kv_cache_dtype = o->kv_cache_dtype,
        .numa = o->numa};
    one.kv_cache_memory = device->ops->cache_bytes(shape, plan_kv(&one), 1) * blocks_for(length);
    return plan_on(m, &one, device, plan, err);
}

static linnet_status scorer_load(linnet_scorer *s, const linnet_model *m,
                                 const linnet_engine_options *o, const struct device *device,
                                 const linnet_plan *plan, linnet_error *err)
{
    struct limits limits = plan_limits(plan, o);
    size_t vocab = (size_t)m->config.shape.vocab;
    limits.max_seqs = 1;
    s->config = &m->config;
    s->n_rows = limits.max_logits;
    s->logits = mem_new((size_t)s->n_rows * vocab, sizeof *s->logits);
    if (!s->logits)
        return error_memory(err, "the logits", (size_t)s->n_rows * vocab * sizeof *s->logits);
    linnet_status status = pool_create(plan->threads, &s->pool, err);
    if (!status)
        status = decoder_create(m->checkpoint, &m->config, device->ops, s->pool, &limits,
                                o->progress, o->progress_user, &s->decoder, err);
    return status ? status : simple_create(s->decoder, &s->simple, err);
}

linnet_status linnet_scorer_create(linnet_model *m, const linnet_engine_options *options,
                                   linnet_scorer **out, linnet_error *err)
{
    static const linnet_engine_options defaults = {0};
    const linnet_engine_options *o = options ? options : &defaults;
    struct device device;
    linnet_plan plan;
    if (!m->checkpoint)
        return error_set(err, LINNET_INVALID, "%s is a tokenizer without a model", m->path);
    linnet_status status = find_device(o->device, &device, err);
    if (!status) status = plan_scorer(m, o, &device, &plan, err);
    if (status) return status;
    linnet_scorer *s = mem_new(1, sizeof *s);
    if (!s) return error_memory(err, "a scorer", sizeof *s);
    status = scorer_load(s, m, o, &device, &plan, err);
    if (status)
        linnet_scorer_destroy(s);
    else
        *out = s;
    return status;
}

void linnet_scorer_destroy(linnet_scorer *s)
{
    if (!s) return;
    simple_destroy(s->simple);
    decoder_destroy(s->decoder);
    pool_destroy(s->pool);
    free(s->logits);
    free(s);
}

/* Rows of logits, and the token that follows each. */
struct rows {
    const float *logits; /* [n, vocab] */
    const int32_t *next; /* [n] */
    int32_t n, vocab;
    double *logprobs; /* [n] */
};

/* NaN if a logit is NaN or +infinity, or all are -infinity. */
static double log_probability(const float *logits, int32_t n, int32_t id)
{
    double max = -INFINITY, sum = 0;
    for (int32_t i = 0; i < n; i++)
        if (logits[i] > max) max = logits[i];
    for (int32_t i = 0; i < n; i++) sum += exp(logits[i] - max);
    return logits[id] - max - log(sum);
}

static void score_share(void *arg, int thread, int n_threads)
{
    const struct rows *r = arg;
    int64_t begin, end;
    pool_share(r->n, 1, thread, n_threads, &begin, &end);
    for (int64_t i = begin; i < end; i++)
        r->logprobs[i] = log_probability(r->logits + i * r->vocab, r->vocab, r->next[i]);
}

static linnet_status check_tokens(const linnet_scorer *s, const int32_t *tokens, size_t n,
                                  size_t first, linnet_error *err)
{
    int32_t longest = s->decoder->limits.max_context, vocab = s->config->shape.vocab;
    if (first < 1 || first >= n)
        return error_set(err, LINNET_INVALID,
                         "scoring from token %zu of %zu on: expected 1 to the last one", first, n);
    if (n > (size_t)longest)
        return error_set(err, LINNET_TOO_LONG,
                         "%zu tokens to score: this scorer was made for at most %d", n, longest);
    for (size_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= vocab)
            return error_set(err, LINNET_INVALID,
                             "token %zu to score is %d: the vocabulary has ids 0 to %d", i,
                             tokens[i], vocab - 1);
    return LINNET_OK;
}

linnet_status linnet_score(linnet_scorer *s, const int32_t *tokens, size_t n, size_t first,
                           double *logprobs, linnet_error *err)
{
    linnet_status status = check_tokens(s, tokens, n, first, err);
    if (status) return status;
    /* the row of token i says what follows it */
    int32_t length = (int32_t)n, at = (int32_t)first - 1;
    if (at > 0) status = simple_forward(s->simple, tokens, length, 0, at, 0, false, s->logits, err);
    for (int32_t count; at < length - 1 && !status; at += count) {
        count = length - 1 - at < s->n_rows ? length - 1 - at : s->n_rows;
        status = simple_forward(s->simple, tokens, length, at, at + count, 0, true, s->logits, err);
        if (status) break;
        struct rows rows = {s->logits, tokens + at + 1, count, s->config->shape.vocab, logprobs};
        pool_run(s->pool, score_share, &rows);
        for (int32_t i = 0; i < count && !status; i++)
            if (isnan(logprobs[i]))
                status = error_set(err, LINNET_NUMERIC,
                                   "the logits after token %d are not finite: the model file may "
                                   "be damaged ('linnet check' looks for faults of the device)",
                                   at + i);
        logprobs += count;
    }
    return status;
}
