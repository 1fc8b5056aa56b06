/*
 * golden.h - reads reference results (tools/README.md): golden/NAME.json and NAME.safetensors.
 */
#ifndef LINNET_TESTS_GOLDEN_H
#define LINNET_TESTS_GOLDEN_H

#include "support.h"

/* A file of named arrays; unlike the engine's own reader it also takes F64. */
struct arrays {
    char *bytes;
    const char *data;
    json_t *header;
};

static inline struct arrays arrays_open(const char *path)
{
    struct arrays a;
    size_t size;
    uint64_t n;
    a.bytes = load_file(path, &size);
    memcpy(&n, a.bytes, 8);
    a.header = json_loadb(a.bytes + 8, n, 0, NULL);
    assert_non_null(a.header);
    a.data = a.bytes + 8 + n;
    return a;
}

static inline void arrays_close(struct arrays *a)
{
    json_decref(a->header);
    free(a->bytes);
}

/* NULL if absent; *count elements of 4 (F32) or 8 (F64) bytes. */
static inline const void *arrays_find(const struct arrays *a, const char *name, size_t element,
                                      size_t *count)
{
    const json_t *entry = json_object_get(a->header, name),
                 *range = json_object_get(entry, "data_offsets");
    if (!entry) return NULL;
    assert_string_equal(json_string_value(json_object_get(entry, "dtype")),
                        element == 8 ? "F64" : "F32");
    size_t begin = (size_t)json_integer_value(json_array_get(range, 0));
    size_t end = (size_t)json_integer_value(json_array_get(range, 1));
    *count = (end - begin) / element;
    return a->data + begin;
}

static inline double number(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    if (!json_is_number(v)) fail_msg("golden without %s", key);
    return json_number_value(v);
}

/* The integers of a JSON array, malloc'ed with room for `more`. */
static inline int32_t *integers(const json_t *array, size_t more, int32_t *n)
{
    *n = (int32_t)json_array_size(array);
    int32_t *ids = calloc((size_t)*n + more + 1, sizeof *ids);
    for (int32_t i = 0; i < *n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(array, (size_t)i));
    return ids;
}

#endif
