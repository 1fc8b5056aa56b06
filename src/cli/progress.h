/*
 * progress.h - one progress bar at a time, on standard error and only if that is a terminal. It
 * shows up when the work takes longer than a moment, moves at most ten times a second, and is
 * erased at the end.
 */
#ifndef LINNET_CLI_PROGRESS_H
#define LINNET_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

void progress_enable(bool enable); /* false (--quiet): nothing is ever shown */
void progress_begin(const char *label, const char *unit);
void progress_update(int64_t done, int64_t total);
void progress_loading(void *user, int64_t done, int64_t total); /* a linnet_progress_fn */
void progress_end(void);

/* Async-signal-safe: erases the bar. */
void progress_erase(void);

#endif
