/*
 * gpu_error.h - what CUDA's errors mean to a user, and the way out. Knows their names only, so
 * that it is plain C and tested without a GPU.
 */
#ifndef LINNET_OPS_GPU_ERROR_H
#define LINNET_OPS_GPU_ERROR_H

#include "base/error.h"

/*
 * One sentence for the error `name` ("cudaErrorNoDevice"), which CUDA itself explains as `text`.
 * `what`: what the GPU was doing ("a step"); NULL: it was being opened. Returns *err's status.
 */
linnet_status gpu_error(const char *name, const char *text, const char *what, linnet_error *err);

/* A driver that offers CUDA `driver` (12040 is 12.4; 0: there is none) where the backend was built
 * with `runtime`. */
linnet_status gpu_driver_error(int driver, int runtime, linnet_error *err);

#endif
