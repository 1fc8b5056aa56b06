#include "file/safetensors.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/memory.h"
#include "base/reader.h"

enum { MAX_HEADER = 100000000 }; /* bytes; the reference library's limit */

static const char metadata_key[] = "__metadata__";

/* What is being read: the names stand in every message. */
struct header_reader {
    const char *name; /* of the file */
    const uint8_t *data;
    size_t size; /* bytes of data behind the header */
    linnet_error *err;
};

static linnet_status read_dtype(const struct header_reader *h, const json_t *info, struct tensor *t)
{
    const char *text = json_string_value(json_object_get(info, "dtype"));
    if (!text)
        return error_set(h->err, LINNET_FORMAT, "%s: tensor %s: expected a string \"dtype\"",
                         h->name, t->name);
    if (strcmp(text, "F32") == 0)
        t->dtype = DTYPE_F32;
    else if (strcmp(text, "F16") == 0)
        t->dtype = DTYPE_F16;
    else if (strcmp(text, "BF16") == 0)
        t->dtype = DTYPE_BF16;
    else
        return error_set(h->err, LINNET_UNSUPPORTED,
                         "%s: tensor %s: expected dtype F32, F16 or BF16, found \"%.40s\"", h->name,
                         t->name, text);
    return LINNET_OK;
}

static linnet_status read_shape(const struct header_reader *h, const json_t *info, struct tensor *t)
{
    const json_t *shape = json_object_get(info, "shape");
    if (!json_is_array(shape))
        return error_set(h->err, LINNET_FORMAT, "%s: tensor %s: expected an array \"shape\"",
                         h->name, t->name);
    size_t n_dims = json_array_size(shape), elements = 1;
    if (n_dims > TENSOR_MAX_DIMS)
        return error_set(h->err, LINNET_UNSUPPORTED,
                         "%s: tensor %s: expected at most %d dimensions, found %zu", h->name,
                         t->name, TENSOR_MAX_DIMS, n_dims);
    t->n_dims = (int)n_dims;
    for (size_t d = 0; d < n_dims; d++) {
        const json_t *item = json_array_get(shape, d);
        if (!json_is_integer(item) || json_integer_value(item) < 0)
            return error_set(h->err, LINNET_FORMAT,
                             "%s: tensor %s: dimension %zu is not an integer of 0 or more", h->name,
                             t->name, d);
        t->shape[d] = json_integer_value(item);
        if (!size_mul(elements, (size_t)t->shape[d], &elements) || elements > INT64_MAX)
            return error_set(h->err, LINNET_FORMAT,
                             "%s: tensor %s: the product of its shape does not fit 63 bits",
                             h->name, t->name);
    }
    if (!size_mul(elements, (size_t)dtype_block_bytes(t->dtype), &t->bytes))
        return error_set(h->err, LINNET_FORMAT,
                         "%s: tensor %s: %zu elements need more bytes than 64 bits can count",
                         h->name, t->name, elements);
    return LINNET_OK;
}

static linnet_status read_range(const struct header_reader *h, const json_t *info, struct tensor *t)
{
    const json_t *range = json_object_get(info, "data_offsets");
    const json_t *first = json_array_get(range, 0), *last = json_array_get(range, 1);
    if (json_array_size(range) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return error_set(h->err, LINNET_FORMAT,
                         "%s: tensor %s: expected \"data_offsets\" [begin, end]", h->name, t->name);
    json_int_t begin = json_integer_value(first), end = json_integer_value(last);
    if (begin < 0 || end < begin || (uint64_t)end > h->size)
        return error_set(h->err, LINNET_FORMAT,
                         "%s: tensor %s: bytes %" PRId64 " to %" PRId64
                         " are not inside the file's %zu bytes of data; it is damaged or not "
                         "wholly downloaded",
                         h->name, t->name, (int64_t)begin, (int64_t)end, h->size);
    if ((uint64_t)(end - begin) != t->bytes)
        return error_set(h->err, LINNET_FORMAT,
                         "%s: tensor %s: its shape needs %zu bytes of %s, its range has %" PRId64,
                         h->name, t->name, t->bytes, dtype_name(t->dtype), (int64_t)(end - begin));
    t->data = h->data + begin;
    return LINNET_OK;
}

static linnet_status check_metadata(const struct header_reader *h, json_t *metadata)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return error_set(h->err, LINNET_FORMAT, "%s: %s: expected an object", h->name,
                         metadata_key);
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return error_set(h->err, LINNET_FORMAT, "%s: %s: key %.100s: expected a string",
                             h->name, metadata_key, key);
    }
    return LINNET_OK;
}

static linnet_status read_entries(const struct header_reader *h, struct safetensors *s)
{
    const char *key;
    json_t *info;
    linnet_status status = LINNET_OK;
    json_object_foreach(s->header, key, info)
    {
        if (strcmp(key, metadata_key) == 0) {
            status = check_metadata(h, info);
            if (status) return status;
            continue;
        }
        struct tensor *t = &s->tensors[s->n_tensors++];
        t->name = key;
        if (!json_is_object(info))
            return error_set(h->err, LINNET_FORMAT, "%s: tensor %s: expected an object", h->name,
                             key);
        status = read_dtype(h, info, t);
        if (!status) status = read_shape(h, info, t);
        if (!status) status = read_range(h, info, t);
        if (status) return status;
    }
    return LINNET_OK;
}

/* By place; empty tensors before the one that begins there. */
static int compare_places(const void *a, const void *b)
{
    const struct tensor *x = a, *y = b;
    if (x->data != y->data) return (uintptr_t)x->data < (uintptr_t)y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static linnet_status check_cover(const struct header_reader *h, struct safetensors *s)
{
    const uint8_t *expected = h->data;
    qsort(s->tensors, s->n_tensors, sizeof *s->tensors, compare_places);
    for (size_t i = 0; i < s->n_tensors; i++) {
        const struct tensor *t = &s->tensors[i];
        const uint8_t *begin = t->data;
        if (begin < expected)
            return error_set(h->err, LINNET_FORMAT, "%s: tensors %s and %s overlap", h->name,
                             s->tensors[i - 1].name, t->name);
        if (begin > expected)
            return error_set(h->err, LINNET_FORMAT,
                             "%s: %zu bytes before tensor %s belong to no tensor", h->name,
                             (size_t)(begin - expected), t->name);
        expected = begin + t->bytes;
    }
    size_t rest = h->size - (size_t)(expected - h->data);
    if (rest > 0)
        return error_set(h->err, LINNET_FORMAT, "%s: the last %zu bytes belong to no tensor",
                         h->name, rest);
    return LINNET_OK;
}

/* With what stands before the place, which as a rule shows the tensor's name. */
static linnet_status bad_json(const char *name, const char *text, const json_error_t *error,
                              linnet_error *err)
{
    enum { CONTEXT = 80 };
    int end = error->position > 0 ? error->position : 0, begin = end > CONTEXT ? end - CONTEXT : 0;
    return error_set(err, LINNET_FORMAT, "%s: header, byte %d: %s, after %.*s", name, end,
                     error->text, end - begin, text + begin);
}

static linnet_status parse(const void *bytes, size_t size, const char *name, struct safetensors *s,
                           linnet_error *err)
{
    struct reader r = {bytes, size, 0};
    uint64_t n;
    const uint8_t *text;
    json_error_t error;
    if (!reader_u64(&r, &n) || n < 2 || n > MAX_HEADER || !reader_bytes(&r, (size_t)n, &text))
        return error_set(err, LINNET_FORMAT,
                         "%s: not a safetensors file, or cut short (%zu bytes; expected a header "
                         "of at most %d)",
                         name, size, MAX_HEADER);
    s->header = json_loadb((const char *)text, (size_t)n, JSON_REJECT_DUPLICATES, &error);
    if (!s->header) return bad_json(name, (const char *)text, &error, err);
    if (!json_is_object(s->header))
        return error_set(err, LINNET_FORMAT, "%s: header: expected a JSON object", name);
    size_t count = json_object_size(s->header);
    s->tensors = mem_new(count, sizeof *s->tensors);
    if (!s->tensors) return error_memory(err, "the tensor table", count * sizeof *s->tensors);
    struct header_reader h = {name, r.data + r.pos, size - r.pos, err};
    linnet_status status = read_entries(&h, s);
    return status ? status : check_cover(&h, s);
}

linnet_status safetensors_open_memory(const void *bytes, size_t size, const char *name,
                                      struct safetensors *out, linnet_error *err)
{
    struct safetensors s = {0};
    linnet_status status = parse(bytes, size, name, &s, err);
    if (status)
        safetensors_close(&s);
    else
        *out = s;
    return status;
}

linnet_status safetensors_open_in(const char *directory, const char *name, struct safetensors *out,
                                  linnet_error *err)
{
    struct mapping map;
    linnet_status status = mapping_open_in(directory, name, &map, err);
    if (status) return status;
    status = safetensors_open_memory(map.data, map.size, name, out, err);
    if (status) {
        mapping_close(&map);
        error_prefix(err, "%s", directory);
        return status;
    }
    out->map = map;
    return LINNET_OK;
}

void safetensors_close(struct safetensors *s)
{
    json_decref(s->header);
    free(s->tensors);
    mapping_close(&s->map);
    *s = (struct safetensors){0};
}
