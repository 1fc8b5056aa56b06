/* threads_internal.h - what the tests reach of the default number of threads. */
#ifndef LINNET_BASE_THREADS_INTERNAL_H
#define LINNET_BASE_THREADS_INTERNAL_H

#include <sched.h>
#include <stddef.h>

/*
 * Threads for a process with this affinity mask (of mask_bytes) on the machine whose /proc and /sys
 * are under `root` ("" for this one): the mask's cores, or less where a control group says so.
 */
int threads_for(const char *root, const cpu_set_t *mask, size_t mask_bytes);

#endif
