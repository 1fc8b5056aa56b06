/*
 * decoder.h - the model: a pure function of a step, the weights and the cache. It knows no
 * request, no scheduler and no text.
 */
#ifndef LINNET_MODEL_DECODER_H
#define LINNET_MODEL_DECODER_H

#include "file/packed.h"
#include "model/config.h"
#include "model/rope.h"
#include "ops/ops.h"

struct decoder {
    const struct model_config *config;
    const struct ops *ops;
    struct backend *backend;
    struct limits limits;
    struct matrix *embedding;  /* [vocab, hidden] */
    struct layer *layers;      /* [n_layers] */
    struct vector *final_norm; /* [hidden] */
    struct matrix *head;       /* [vocab, hidden] */
    double activation_error;   /* ops.h: the largest that a matrix has */
    struct rope rope;
    float *rope_divisors;  /* [head_dim / 2] from rope_freqs.weight, or NULL */
    float *rope_rows;      /* [max_tokens, head_dim] of the step */
    struct packed *packed; /* the file that the matrices are in; NULL: the backend has them */
    linnet_error unpacked; /* with a status: why the file of packed weights was not used */
};

/* done of total weight bytes are loaded. */
typedef void (*decoder_progress_fn)(void *user, int64_t done, int64_t total);

/*
 * Binds every tensor of the checkpoint to its place (missing, extra or misshapen ones are
 * refused), loads them into a backend of `ops`, reserves cache and buffers. Matrices come from the
 * model's file of packed weights, if it has one and the backend takes it.
 */
linnet_status decoder_create(const struct checkpoint *cp, const struct model_config *config,
                             const struct ops *ops, struct pool *pool, const struct limits *limits,
                             decoder_progress_fn progress, void *user, struct decoder **out,
                             linnet_error *err);
void decoder_destroy(struct decoder *d);

/* Writes that file, *bytes long, for backends of `ops` (LINNET_UNSUPPORTED: they take none). */
linnet_status decoder_pack(const struct checkpoint *cp, const struct model_config *config,
                           const struct ops *ops, struct pool *pool, decoder_progress_fn progress,
                           void *user, int64_t *bytes, linnet_error *err);

/* Checks names and shapes of all tensors without loading; *weight_bytes: what the backend will
 * keep of them. */
linnet_status decoder_check_tensors(const struct checkpoint *cp, const struct model_config *config,
                                    const struct ops *ops, int64_t *weight_bytes,
                                    linnet_error *err);

/* Bytes that the decoder itself reserves besides its backend: the RoPE table and a step's rows. */
int64_t decoder_buffer_bytes(const struct model_config *config, const struct limits *limits);

/*
 * Runs a step and waits for it. Logits of wanted row i: decoder_logits(d, i), [vocab], valid until
 * the next step. Fails only if the device does. Allocates nothing.
 */
linnet_status decoder_step(struct decoder *d, const struct step *s, linnet_error *err);
const float *decoder_logits(const struct decoder *d, int32_t i);

/*
 * The same in two halves, where the device chooses tokens itself (see ops.h): `submit` starts a
 * step and returns, `collect` waits for the oldest one and gives what was chosen for its wanted
 * rows, until the next submit. The step and its rules may change once submit returns. At most two
 * steps are under way, and none when decoder_step is called.
 */
bool decoder_can_choose(const struct decoder *d);
linnet_status decoder_submit(struct decoder *d, const struct step *s,
                             const struct choice_rule *rules, linnet_error *err);
linnet_status decoder_collect(struct decoder *d, const struct chosen **out, linnet_error *err);

/* Looks at buffers between operations: called after "embed", "qkv", "attention", "o_proj",
 * "gate_up", "down", "head" of each layer (-1 outside layers). For tests and check. */
typedef void (*decoder_observe_fn)(void *user, const char *operation, int32_t layer);
linnet_status decoder_step_observed(struct decoder *d, const struct step *s,
                                    decoder_observe_fn observe, void *user, linnet_error *err);

#endif
