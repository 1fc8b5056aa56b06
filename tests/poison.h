/* poison.h - NaN over what a step must not depend on, for tests of the CUDA backend on a GPU or on
 * the emulated one. Both wait for what is under way, and return false if the device refuses. */
#ifndef LINNET_TESTS_POISON_H
#define LINNET_TESTS_POISON_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct backend;

#define CONTROL __attribute__((visibility("default")))

/* Over what a step writes before it reads it: residual stream, queries, logits and so on; with
 * `inputs` also over all inputs of products, whose padding must stay zero elsewhere. */
CONTROL bool poison_buffers(struct backend *b, bool inputs);
/* Over the cache's slots but the first used[block] ones of each block. */
CONTROL bool poison_cache(struct backend *b, const int32_t *used);

#ifdef __cplusplus
}
#endif

#endif
