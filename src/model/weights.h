/*
 * weights.h - binds the tensors of a checkpoint to their places in the model, once. Nothing below
 * checks names or shapes again.
 */
#ifndef LINNET_MODEL_WEIGHTS_H
#define LINNET_MODEL_WEIGHTS_H

#include "model/config.h"

/* One layer's tensors, NULL where the model has none. Shapes as struct layer has them. */
struct layer_tensors {
    const struct tensor *input_norm, *post_norm;
    const struct tensor *qkv[3];  /* q, k, v; or all in qkv[0] */
    const struct tensor *bias[3]; /* likewise */
    const struct tensor *q_norm, *k_norm;
    const struct tensor *o_proj, *o_bias;
    const struct tensor *gate, *up, *down;
};

struct weights {
    const struct tensor *embedding, *final_norm, *head; /* head == embedding when tied */
    const struct tensor *rope_freqs;                    /* or NULL */
    struct layer_tensors *layers;                       /* [n_layers] */
};

/* Fails with the tensor's name, what was expected and what was found if one is missing, has
 * another shape, or has no place in the model. Free with weights_free. */
linnet_status weights_bind(const struct checkpoint *cp, const struct model_config *config,
                           struct weights *out, linnet_error *err);
void weights_free(struct weights *w);

#endif
