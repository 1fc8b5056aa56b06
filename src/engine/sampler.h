/*
 * sampler.h - from a row of logits to a token: one interface for greedy and sampled choice.
 *
 * Order (that of Hugging Face and OpenAI): logit bias -> repetition penalty (prompt and output)
 * -> frequency * count and presence (output only) -> temperature -> top_k (all ties with the k-th
 * stay) -> top_p (smallest set reaching p, on the top_k result) -> min_p (relative to the maximum)
 * -> softmax. A choice depends on the logits, the settings, and (seed, position, stream) alone.
 * Ties in the maximum go to the lowest id. The vocabulary is never sorted as a whole.
 *
 * Weights are integers, so that their sums have no order (the arithmetic is in ops/choice.h):
 * weight = round(2^44 e^y), y = (x - max) / temperature, x being the adjusted logit. top_p keeps
 * the fewest of the highest y whose weights reach ceil(top_p * total), at least one token; of those
 * equal to the last as many as it takes, lowest ids first. min_p keeps weights >= min_p 2^44.
 *
 * The draw: r = random_u64(seed, n_prompt + n_output, stream); the chosen token is the first, ids
 * ascending, at which the running sum of the weights that are left exceeds floor(r * total / 2^64).
 */
#ifndef LINNET_ENGINE_SAMPLER_H
#define LINNET_ENGINE_SAMPLER_H

#include "base/error.h"
#include "base/limits.h"
#include "linnet.h"
#include "ops/ops.h"

enum { SAMPLER_MAX_LOGPROBS = LIMIT_LOGPROBS };

/* In range, as checked when the request came: all finite, repetition_penalty > 0. */
struct sampling {
    float temperature;                         /* 0: greedy */
    int32_t top_k;                             /* 0: off */
    float top_p;                               /* 1: off */
    float min_p;                               /* 0: off */
    float repetition_penalty;                  /* 1: off */
    float presence_penalty, frequency_penalty; /* 0: off */
    uint64_t seed;
    const linnet_logit_bias *bias; /* clamped to +-1e4, added up; ids out of range: ignored */
    int32_t n_bias;
};

/* Whether the choice depends on which tokens came before. */
static inline bool has_penalties(const struct sampling *s)
{
    return s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0;
}

/* What the choice may look at besides the logits. */
struct sample_context {
    const int32_t *tokens; /* prompt then output */
    int32_t n_prompt, n_output;
    const int32_t *banned; /* ids that must not come now (end tokens before min_tokens) */
    int32_t n_banned;
    int32_t n_allowed; /* ids >= this are padding rows of the matrix: never chosen */
    uint64_t stream;   /* which of the request's n answers */
};

struct sample {
    int32_t id;
    float logprob; /* raw: log-softmax of the logits as the model gave them */
    int32_t n_top;
    struct {
        int32_t id;
        float logprob;
    } top[SAMPLER_MAX_LOGPROBS]; /* the highest raw ones, descending, ties by id; fewer than asked
                                    for if -infinity and ids >= n_allowed leave no more */
};

/* Working memory for one thread: reserved once for a vocabulary. */
struct sampler;
linnet_status sampler_create(int32_t n_vocab, struct sampler **out, linnet_error *err);
void sampler_destroy(struct sampler *s);

/*
 * The rule by which a device, or sampler_choose, chooses. It points to the adjustments, which are
 * the caller's, as many as sampler_rule_capacity says at most, each id once. Ids out of range are
 * left out; biases of one id are added up as floats. Allocates nothing. The capacity never shrinks
 * as the output grows.
 */
int32_t sampler_rule_capacity(int32_t n_vocab, const struct sampling *settings,
                              const struct sample_context *context);
void sampler_rule(struct sampler *s, const struct sampling *settings,
                  const struct sample_context *context, struct adjustment *adjustments,
                  struct choice_rule *out);

/*
 * Chooses a token from logits[0..n_vocab), which stay untouched. n_logprobs < 0: no
 * log-probabilities (the fields stay unset); 0..20: the chosen one's and that many of the top.
 * LINNET_NUMERIC if a logit is NaN or +infinity, or all are -infinity, or all that are not are
 * banned or padding: the request must end with that error. A logit of -infinity is never chosen.
 * Allocates nothing.
 */
linnet_status sampler_choose(struct sampler *s, const float *logits,
                             const struct sampling *settings, const struct sample_context *context,
                             int32_t n_logprobs, struct sample *out, linnet_error *err);

/* The filtered distribution itself, for tests: probabilities[n_vocab], summing to 1. */
linnet_status sampler_distribution(struct sampler *s, const float *logits,
                                   const struct sampling *settings,
                                   const struct sample_context *context, float *probabilities,
                                   linnet_error *err);

#endif
