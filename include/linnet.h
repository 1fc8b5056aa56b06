/*
 * linnet.h - the one public header of liblinnet, an inference engine for language models.
 *
 * A *model* is opened from a GGUF file or a Hugging Face directory. It is immutable and may be
 * shared by any number of threads. An *engine* owns everything mutable: the cache, the scheduler,
 * the compute threads. A *request* is one prompt and how to sample from it; it is handed to the
 * engine, which answers through events.
 *
 * The library never exits, aborts or prints. Every function that can fail returns a linnet_status
 * and, where it takes a linnet_error, says in it what went wrong and what to do next.
 *
 * Promise: with one model and one device type, the tokens of a request depend on nothing but the
 * request. Not on what else runs, how its prompt was cut, or whether its prefix was cached.
 */
#ifndef LINNET_H
#define LINNET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LINNET_VERSION_MAJOR 0
#define LINNET_VERSION_MINOR 1
#define LINNET_VERSION_PATCH 0
#define LINNET_VERSION       "0.1.0"

#ifndef LINNET_API
#define LINNET_API __attribute__((visibility("default")))
#endif

/* ---- status ------------------------------------------------------------------------------ */

typedef enum linnet_status {
    LINNET_OK = 0,
    LINNET_INVALID,     /* an argument or option is wrong */
    LINNET_IO,          /* the operating system refused (missing file, full disk, ...) */
    LINNET_FORMAT,      /* a file is damaged or contradicts itself */
    LINNET_UNSUPPORTED, /* well formed, but not something this version can do */
    LINNET_MEMORY,      /* not enough memory */
    LINNET_TOO_LONG,    /* prompt or context can never fit */
    LINNET_CANCELLED,   /* the caller asked for it */
    LINNET_NUMERIC,     /* the model produced NaN or infinity */
    LINNET_DEVICE,      /* the compute device failed */
    LINNET_INTERNAL     /* a fault of ours: please report it */
} linnet_status;

#define LINNET_ERROR_SIZE 1024

typedef struct linnet_error {
    linnet_status status;
    char message[LINNET_ERROR_SIZE]; /* one line of UTF-8, no final full stop or newline */
} linnet_error;

/* A short English name of a status ("out of memory"). Static storage. */
LINNET_API const char *linnet_status_name(linnet_status status);

/* "0.1.0". Static storage. */
LINNET_API const char *linnet_version(void);

#ifdef __cplusplus
}
#endif
#endif
