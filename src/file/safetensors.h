/*
 * safetensors.h - one safetensors file: a JSON header of names, types, shapes and byte ranges,
 * then the bytes. All of it is checked when opened: each range is as long as its shape says, and
 * together they cover the data without overlap or hole, as the reference library demands.
 */
#ifndef LINNET_FILE_SAFETENSORS_H
#define LINNET_FILE_SAFETENSORS_H

#include "file/checkpoint.h"
#include "file/mapping.h"

struct safetensors {
    struct mapping map; /* zero for bytes in memory */
    json_t *header;     /* holds the tensors' names */
    struct tensor *tensors;
    size_t n_tensors;
};

/* F32, F16 and BF16 only. On failure nothing is left to close. */
linnet_status safetensors_open_in(const char *directory, const char *name, struct safetensors *out,
                                  linnet_error *err);
/* The same over bytes in memory, which must outlive it; `name` is for messages. */
linnet_status safetensors_open_memory(const void *bytes, size_t size, const char *name,
                                      struct safetensors *out, linnet_error *err);
void safetensors_close(struct safetensors *s);

#endif
