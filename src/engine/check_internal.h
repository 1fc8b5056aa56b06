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
 * Relative error (rms) that fp32 sums of K products may have: K roundings of 2^-24 that behave as
 * independent ones give sqrt(K) of them; times four for the operations that came before.
 */
double check_bound(int64_t longest_sum);

/* Reference results beside the model (golden/NAME.json and .safetensors in its folder or one of
 * the two above; tools/README.md says where they come from). Nothing is reported where there are
 * none. */
linnet_status check_goldens(struct check *c, linnet_model *m, linnet_error *err);

#endif
