/*
 * random.h - models of published shapes with random weights, for benchmarks without a download.
 */
#ifndef LINNET_MODEL_RANDOM_H
#define LINNET_MODEL_RANDOM_H

#include "file/checkpoint.h"

/*
 * shape: "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-0.6b", "llama-3.2-1b",
 * "smollm2-135m"; LINNET_INVALID with the list of names otherwise. The matrices are of `dtype`, the
 * vectors F32. Weights are a function of shape, dtype and seed alone.
 */
linnet_status random_checkpoint(const char *shape, enum dtype dtype, uint64_t seed,
                                struct checkpoint **out, linnet_error *err);

#endif
