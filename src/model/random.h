/*
 * random.h - models of published shapes with random weights, for benchmarks without a download.
 */
#ifndef LINNET_MODEL_RANDOM_H
#define LINNET_MODEL_RANDOM_H

#include "file/checkpoint.h"

/* What config.json says of a published model. */
struct random_shape {
    const char *name, *type; /* type: model_type */
    int hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, context;
    double theta, eps;
    bool tied;
};

int32_t random_shape_count(void);
const struct random_shape *random_shape_at(int32_t i);

/*
 * shape: "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-0.6b", "llama-3.2-1b",
 * "smollm2-135m"; LINNET_INVALID with the list of names otherwise. The matrices are of `dtype`, the
 * vectors F32. Weights are a function of shape, dtype and seed alone.
 */
linnet_status random_checkpoint(const char *shape, enum dtype dtype, uint64_t seed,
                                struct checkpoint **out, linnet_error *err);

/* The same for any shape. */
linnet_status random_checkpoint_of(const struct random_shape *shape, enum dtype dtype,
                                   uint64_t seed, struct checkpoint **out, linnet_error *err);

#endif
