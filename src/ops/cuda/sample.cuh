/*
 * sample.cuh - tokens chosen on the device, by the rule of engine/sampler.h and with the arithmetic
 * of ops/choice.h: the same logits and the same rule give the same token as on the CPU, always.
 * Every sum is of integers and every maximum has its lowest id, so that no order matters.
 */
#ifndef LINNET_OPS_CUDA_SAMPLE_H
#define LINNET_OPS_CUDA_SAMPLE_H

#include <cuda_runtime.h>

extern "C" {
#include "ops/ops.h"
}

enum { SAMPLE_ADJUSTMENTS = 1 << 18 }; /* of all rows of a step */

/* Which kernels a step needs at least; more do no harm. */
enum sample_stage {
    SAMPLE_GREEDY, /* no row is sampled */
    SAMPLE_DRAW,   /* some are, without top_k and top_p */
    SAMPLE_CUT,    /* some have top_k or top_p */
    SAMPLE_NARROW  /* some have both */
};

struct sample_row;  /* sample.cu */
struct sample_peak; /* sample.cu */

/* Scratch memory on the device, for limits.max_logits rows. */
struct sample_work {
    int32_t vocab;
    struct sample_row *rows;    /* [max_logits] */
    struct sample_peak *peaks;  /* [max_logits, parts] */
    unsigned long long *sums;   /* [max_logits, tiles] */
    unsigned long long *masses; /* [max_logits, bins] */
    uint32_t *counts;           /* [max_logits, bins] */
    int32_t *lists;             /* [max_logits, list] */
    double *adjusted;           /* [SAMPLE_ADJUSTMENTS] */
};

/* Bytes of the scratch memory; sample_place divides it. It must be zeroed once. */
size_t sample_bytes(const struct shape *shape, const struct limits *limits);
void sample_place(const struct shape *shape, const struct limits *limits, void *scratch,
                  struct sample_work *out);

/* Bytes for the rules of a step, on the host (pinned) and on the device. */
size_t sample_rules_bytes(const struct limits *limits);
/*
 * Writes n rules and their adjustments, SAMPLE_ADJUSTMENTS in all at most, to `host` as they are to
 * lie at `device`. Returns the bytes to copy: the whole is dense.
 */
size_t sample_pack(const struct choice_rule *rules, int32_t n, void *host, void *device,
                   enum sample_stage *stage);

/*
 * chosen[i] from logits[i][vocab] by rules[i] (at `device`), n >= 1 of them, all on the device and
 * 16-byte aligned. Spends the logits: in place of adjusted ones there are marks afterwards. told:
 * the same in pinned memory of the host, or NULL.
 */
cudaError_t sample_run(cudaStream_t stream, const struct sample_work *work, float *logits,
                       const void *rules, int32_t n, enum sample_stage stage, struct chosen *chosen,
                       struct chosen *told);

#endif
