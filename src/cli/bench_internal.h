/* bench_internal.h - the parts of `bench`. */
#ifndef LINNET_CLI_BENCH_INTERNAL_H
#define LINNET_CLI_BENCH_INTERNAL_H

#include "cli/session.h"

/* "memory reads at 31.2 GB/s; fp32 117, int8 470, bf16 235 GFLOP/s": the limits that shares are of.
 * Peaks that were not measured are left out. */
void bench_limits(double bandwidth, const linnet_peaks *peaks, struct strbuf *out);

/* --operations. Rows go to the JSON list if there is one. Returns the exit code. */
int bench_operations(const struct session *session, const linnet_engine_options *engine,
                     const struct integers *prompts, const struct integers *batches, json_t *rows);

#endif
