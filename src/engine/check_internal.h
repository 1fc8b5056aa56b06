/* check_internal.h - what the files of `check` share. */
#ifndef LINNET_ENGINE_CHECK_INTERNAL_H
#define LINNET_ENGINE_CHECK_INTERNAL_H

#include "engine/api_internal.h"

struct pool;

struct check {
    struct device device;
    struct pool *pool;
    linnet_check_fn on_row;
    void *user;
    int32_t n_failed;
};

/* A row of the table; it passes if rms_rel <= bound. */
void check_report(struct check *c, const char *operation, const char *dtype, const char *shape,
                  double max_abs, double rms_rel, double bound);

/* The same from two lists of n values. */
void check_compare(struct check *c, const char *operation, const char *dtype, const char *shape,
                   const float *got, const float *want, size_t n, double bound);

/*
 * Relative error (rms) that a result may have. fp32 sums of K products: K roundings of 2^-24 that
 * behave as independent ones give sqrt(K) of them; times four for the operations before. On a
 * device that keeps less than fp32 (activation_error of ops.h), roundings of its type add up the
 * same way, and products and SiLU at most double them.
 */
double check_bound(double activation_error, int64_t longest_sum, double n_roundings);

/* Reference results beside the model (golden/NAME.json and .safetensors in its folder or one of
 * the two above; tools/README.md says where they come from). Nothing is reported where there are
 * none. */
linnet_status check_goldens(struct check *c, linnet_model *m, linnet_error *err);

#endif
