/* The tensor table of a GGUF file: names, shapes, types, and where the numbers lie. */
#include <inttypes.h>
#include <stdlib.h>

#include "base/memory.h"
#include "file/gguf_internal.h"

enum { MAX_NAME = 64, DEFAULT_ALIGNMENT = 32, MIN_ALIGNMENT = 8, MAX_ALIGNMENT = 1 << 16 };

/* The ids are ggml's. */
static bool dtype_of(uint32_t id, enum dtype *out)
{
    switch (id) {
    case 0: *out = DTYPE_F32; return true;
    case 1: *out = DTYPE_F16; return true;
    case 2: *out = DTYPE_Q4_0; return true;
    case 3: *out = DTYPE_Q4_1; return true;
    case 6: *out = DTYPE_Q5_0; return true;
    case 7: *out = DTYPE_Q5_1; return true;
    case 8: *out = DTYPE_Q8_0; return true;
    case 12: *out = DTYPE_Q4_K; return true;
    case 13: *out = DTYPE_Q5_K; return true;
    case 14: *out = DTYPE_Q6_K; return true;
    case 30: *out = DTYPE_BF16; return true;
    default: return false;
    }
}

static linnet_status ends_inside(const struct gguf_part *part, size_t i, linnet_error *err)
{
    return error_set(err, LINNET_FORMAT,
                     "%s: the file ends inside the description of tensor %zu of %zu; it is damaged "
                     "or cut short",
                     part->path, i + 1, part->n_tensors);
}

static linnet_status read_name(struct gguf_part *part, size_t i, struct tensor *t,
                               linnet_error *err)
{
    uint64_t size;
    const uint8_t *bytes;
    if (!reader_u64(&part->reader, &size)) return ends_inside(part, i, err);
    if (size == 0 || size > MAX_NAME)
        return error_set(err, LINNET_FORMAT,
                         "%s: name of tensor %zu: expected 1 to %d bytes, found %" PRIu64,
                         part->path, i + 1, MAX_NAME, size);
    if (!reader_bytes(&part->reader, (size_t)size, &bytes)) return ends_inside(part, i, err);
    struct view name = {(const char *)bytes, (size_t)size};
    if (memchr(name.data, 0, name.size) || !view_is_utf8(name))
        return error_set(err, LINNET_FORMAT,
                         "%s: name of tensor %zu (\"%.*s\") is not UTF-8 text without NUL",
                         part->path, i + 1, view_shown(name), name.data);
    t->name = mem_string(name.data, name.size);
    return t->name ? LINNET_OK : error_memory(err, "a tensor's name", name.size);
}

/* Reads the dimensions (fastest first in the file) and works out the bytes. */
static linnet_status read_shape(struct gguf_part *part, size_t i, struct tensor *t,
                                linnet_error *err)
{
    struct reader *r = &part->reader;
    uint32_t n_dims, type;
    uint64_t dims[TENSOR_MAX_DIMS];
    if (!reader_u32(r, &n_dims)) return ends_inside(part, i, err);
    if (n_dims < 1 || n_dims > TENSOR_MAX_DIMS)
        return error_set(err, LINNET_FORMAT,
                         "%s: tensor %s: expected 1 to %d dimensions, found %" PRIu32, part->path,
                         t->name, TENSOR_MAX_DIMS, n_dims);
    t->n_dims = (int)n_dims;
    size_t elements = 1;
    for (uint32_t d = 0; d < n_dims; d++) {
        if (!reader_u64(r, &dims[d])) return ends_inside(part, i, err);
        if (dims[d] == 0 || dims[d] > INT64_MAX ||
            !size_mul(elements, (size_t)dims[d], &elements) || elements > INT64_MAX)
            return error_set(err, LINNET_FORMAT,
                             "%s: tensor %s: dimension %" PRIu32 " is %" PRId64
                             ": a shape must be positive and its product fit 63 bits",
                             part->path, t->name, d, (int64_t)dims[d]);
        t->shape[n_dims - 1 - d] = (int64_t)dims[d];
    }
    if (!reader_u32(r, &type)) return ends_inside(part, i, err);
    if (!dtype_of(type, &t->dtype))
        return error_set(err, LINNET_UNSUPPORTED,
                         "%s: tensor %s: ggml type %" PRIu32
                         " is not supported; use a file in F32, "
                         "F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K",
                         part->path, t->name, type);
    uint64_t block = (uint64_t)dtype_block(t->dtype);
    if (dims[0] % block != 0)
        return error_set(err, LINNET_FORMAT,
                         "%s: tensor %s: rows of %" PRIu64 " are not a multiple of %s's block of "
                         "%" PRIu64,
                         part->path, t->name, dims[0], dtype_name(t->dtype), block);
    if (!size_mul(elements / (size_t)block, (size_t)dtype_block_bytes(t->dtype), &t->bytes))
        return error_set(err, LINNET_FORMAT,
                         "%s: tensor %s: %zu elements of %s need more bytes than 64 bits can count",
                         part->path, t->name, elements, dtype_name(t->dtype));
    return LINNET_OK;
}

static linnet_status read_info(struct gguf *g, struct gguf_part *part, size_t i, uint64_t *offset,
                               linnet_error *err)
{
    if (!mem_reserve((void **)&g->tensors, &g->capacity, g->n_tensors + 1, sizeof *g->tensors))
        return error_memory(err, "the tensor table", (g->n_tensors + 1) * sizeof *g->tensors);
    struct tensor *t = &g->tensors[g->n_tensors];
    *t = (struct tensor){0};
    linnet_status status = read_name(part, i, t, err);
    if (status) return status;
    g->n_tensors++; /* from here on gguf_close frees the name */
    status = read_shape(part, i, t, err);
    if (status) return status;
    return reader_u64(&part->reader, offset) ? LINNET_OK : ends_inside(part, i, err);
}

static linnet_status read_alignment(const struct gguf_part *part, size_t *out, linnet_error *err)
{
    *out = DEFAULT_ALIGNMENT;
    const struct gguf_entry *e = gguf_find(part, view_text("general.alignment"));
    if (!e) return LINNET_OK;
    uint32_t value = 0;
    if (e->type == GGUF_U32) memcpy(&value, e->data, sizeof value);
    if (value < MIN_ALIGNMENT || value > MAX_ALIGNMENT || (value & (value - 1)) != 0)
        return error_set(err, LINNET_FORMAT,
                         "%s: general.alignment: expected a power of two from %d to %d as u32, "
                         "found %" PRIu32 " (%s)",
                         part->path, MIN_ALIGNMENT, MAX_ALIGNMENT, value, gguf_type_name(e->type));
    *out = value;
    return LINNET_OK;
}

/* `start` is where the part's data section begins. */
static linnet_status place(const struct gguf_part *part, size_t start, size_t alignment,
                           uint64_t offset, struct tensor *t, linnet_error *err)
{
    size_t size = part->reader.size, room = start < size ? size - start : 0;
    if (offset % alignment != 0)
        return error_set(err, LINNET_FORMAT,
                         "%s: tensor %s: offset %" PRIu64 " is not a multiple of the alignment %zu",
                         part->path, t->name, offset, alignment);
    if (offset > room || t->bytes > room - (size_t)offset)
        return error_set(err, LINNET_FORMAT,
                         "%s: tensor %s: expected %zu bytes at offset %" PRIu64
                         " of the data, found %zu bytes of data in all; the file is damaged or "
                         "not wholly downloaded",
                         part->path, t->name, t->bytes, offset, room);
    t->data = part->reader.data + start + offset;
    return LINNET_OK;
}

static linnet_status read_table(struct gguf *g, struct gguf_part *part, uint64_t *offsets,
                                linnet_error *err)
{
    size_t first = g->n_tensors, alignment, start;
    linnet_status status = read_alignment(part, &alignment, err);
    for (size_t i = 0; i < part->n_tensors && !status; i++)
        status = read_info(g, part, i, &offsets[i], err);
    if (status) return status;
    if (!size_add(part->reader.pos, alignment - 1, &start)) start = SIZE_MAX;
    start -= start % alignment;
    for (size_t i = 0; i < part->n_tensors && !status; i++)
        status = place(part, start, alignment, offsets[i], &g->tensors[first + i], err);
    return status;
}

linnet_status gguf_read_tensors(struct gguf *g, struct gguf_part *part, linnet_error *err)
{
    uint64_t *offsets = mem_new(part->n_tensors, sizeof *offsets);
    if (!offsets) return error_memory(err, "the tensor table", part->n_tensors * sizeof *offsets);
    linnet_status status = read_table(g, part, offsets, err);
    free(offsets);
    return status;
}

static int compare_names(const void *a, const void *b)
{
    const struct tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static int compare_places(const void *a, const void *b)
{
    const struct tensor *const *x = a, *const *y = b;
    uintptr_t p = (uintptr_t)(*x)->data, q = (uintptr_t)(*y)->data;
    return (p > q) - (p < q);
}

static linnet_status check_sorted(const struct gguf *g, const struct tensor **sorted,
                                  linnet_error *err)
{
    size_t n = g->n_tensors;
    for (size_t i = 0; i < n; i++) sorted[i] = &g->tensors[i];
    qsort(sorted, n, sizeof *sorted, compare_names);
    for (size_t i = 1; i < n; i++)
        if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0)
            return error_set(err, LINNET_FORMAT, "%s: tensor %s appears twice", g->path,
                             sorted[i]->name);
    qsort(sorted, n, sizeof *sorted, compare_places);
    for (size_t i = 1; i < n; i++)
        if ((uintptr_t)sorted[i]->data - (uintptr_t)sorted[i - 1]->data < sorted[i - 1]->bytes)
            return error_set(err, LINNET_FORMAT, "%s: tensors %s and %s overlap", g->path,
                             sorted[i - 1]->name, sorted[i]->name);
    return LINNET_OK;
}

linnet_status gguf_check_tensors(const struct gguf *g, linnet_error *err)
{
    const struct tensor **sorted = mem_new(g->n_tensors, sizeof *sorted);
    if (!sorted) return error_memory(err, "the tensor table", g->n_tensors * sizeof *sorted);
    linnet_status status = check_sorted(g, sorted, err);
    free(sorted);
    return status;
}
