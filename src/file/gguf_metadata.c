/* The head of a GGUF file: counts, keys and values, read once from front to back. */
#include <inttypes.h>
#include <stdlib.h>

#include <utf8proc.h>

#include "base/memory.h"
#include "file/gguf_internal.h"

enum {
    MAX_KEY = 65535,     /* the specification's limit */
    MIN_ENTRY = 14,      /* bytes: length, one byte of key, type, one byte of value */
    MIN_TENSOR_INFO = 33 /* bytes: length, one byte of name, n_dims, one dimension, type, offset */
};

static const struct {
    const char *name;
    size_t size; /* bytes of a scalar */
} types[] = {
    [GGUF_U8] = {"u8", 1},       [GGUF_I8] = {"i8", 1},     [GGUF_U16] = {"u16", 2},
    [GGUF_I16] = {"i16", 2},     [GGUF_U32] = {"u32", 4},   [GGUF_I32] = {"i32", 4},
    [GGUF_F32] = {"f32", 4},     [GGUF_BOOL] = {"bool", 1}, [GGUF_STRING] = {"string", 0},
    [GGUF_ARRAY] = {"array", 0}, [GGUF_U64] = {"u64", 8},   [GGUF_I64] = {"i64", 8},
    [GGUF_F64] = {"f64", 8},
};
enum { N_TYPES = sizeof types / sizeof types[0] };

const char *gguf_type_name(enum gguf_type type)
{
    return types[type].name;
}

bool view_is_utf8(struct view v)
{
    const utf8proc_uint8_t *p = (const utf8proc_uint8_t *)v.data;
    for (size_t i = 0; i < v.size;) {
        size_t rest = v.size - i;
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate(p + i, rest < 4 ? (utf8proc_ssize_t)rest : 4, &c);
        if (n <= 0) return false;
        i += (size_t)n;
    }
    return true;
}

static bool read_string(struct reader *r, struct view *out)
{
    uint64_t size;
    const uint8_t *bytes;
    struct reader ahead = *r;
    if (!reader_u64(&ahead, &size) || size > SIZE_MAX ||
        !reader_bytes(&ahead, (size_t)size, &bytes))
        return false;
    *r = ahead;
    *out = (struct view){(const char *)bytes, (size_t)size};
    return true;
}

static linnet_status ends_inside(const struct gguf_part *part, const struct gguf_entry *e,
                                 linnet_error *err)
{
    return error_set(err, LINNET_FORMAT,
                     "%s: key %.*s: its value needs more bytes than the file has (%zu in all); the "
                     "file is damaged or cut short",
                     part->path, view_shown(e->key), e->key.data, part->reader.size);
}

static linnet_status read_array(struct gguf_part *part, struct gguf_entry *e, linnet_error *err)
{
    struct reader *r = &part->reader;
    uint32_t element;
    uint64_t count;
    size_t bytes;
    struct view string;
    if (!reader_u32(r, &element) || !reader_u64(r, &count)) return ends_inside(part, e, err);
    if (element == GGUF_ARRAY)
        return error_set(err, LINNET_UNSUPPORTED,
                         "%s: key %.*s: an array of arrays is not supported", part->path,
                         view_shown(e->key), e->key.data);
    if (element >= N_TYPES)
        return error_set(err, LINNET_FORMAT,
                         "%s: key %.*s: expected an element type 0 to %d, found %" PRIu32,
                         part->path, view_shown(e->key), e->key.data, N_TYPES - 1, element);
    size_t begin = r->pos;
    if (element == GGUF_STRING) {
        for (uint64_t i = 0; i < count; i++)
            if (!read_string(r, &string)) return ends_inside(part, e, err);
    } else if (count > SIZE_MAX || !size_mul((size_t)count, types[element].size, &bytes) ||
               !reader_skip(r, bytes)) {
        return ends_inside(part, e, err);
    }
    e->element = (enum gguf_type)element;
    e->count = (size_t)count;
    e->data = r->data + begin;
    e->size = r->pos - begin;
    return LINNET_OK;
}

static linnet_status read_value(struct gguf_part *part, struct gguf_entry *e, linnet_error *err)
{
    struct reader *r = &part->reader;
    struct view string;
    if (e->type == GGUF_ARRAY) return read_array(part, e, err);
    if (e->type == GGUF_STRING) {
        if (!read_string(r, &string)) return ends_inside(part, e, err);
        e->data = (const uint8_t *)string.data;
        e->size = string.size;
        return LINNET_OK;
    }
    e->size = types[e->type].size;
    if (!reader_bytes(r, e->size, &e->data)) return ends_inside(part, e, err);
    if (e->type == GGUF_BOOL && e->data[0] > 1)
        return error_set(err, LINNET_FORMAT, "%s: key %.*s: expected a bool 0 or 1, found %d",
                         part->path, view_shown(e->key), e->key.data, e->data[0]);
    return LINNET_OK;
}

static linnet_status read_entry(struct gguf_part *part, size_t n_keys, linnet_error *err)
{
    struct gguf_entry e = {0};
    uint32_t type;
    size_t number = part->n_entries + 1;
    if (!read_string(&part->reader, &e.key) || !reader_u32(&part->reader, &type))
        return error_set(err, LINNET_FORMAT,
                         "%s: key %zu of %zu does not fit into the file (%zu bytes); the file is "
                         "damaged or cut short",
                         part->path, number, n_keys, part->reader.size);
    if (e.key.size == 0 || e.key.size > MAX_KEY)
        return error_set(err, LINNET_FORMAT, "%s: key %zu: expected 1 to %d bytes, found %zu",
                         part->path, number, MAX_KEY, e.key.size);
    if (!view_is_utf8(e.key) || memchr(e.key.data, 0, e.key.size))
        return error_set(err, LINNET_FORMAT, "%s: key %zu (%.*s) is not UTF-8 text", part->path,
                         number, view_shown(e.key), e.key.data);
    if (type >= N_TYPES)
        return error_set(err, LINNET_FORMAT,
                         "%s: key %.*s: expected a value type 0 to %d, found %" PRIu32, part->path,
                         view_shown(e.key), e.key.data, N_TYPES - 1, type);
    e.type = (enum gguf_type)type;
    linnet_status status = read_value(part, &e, err);
    if (status) return status;
    if (!mem_reserve((void **)&part->entries, &part->capacity, number, sizeof e))
        return error_memory(err, "GGUF metadata", number * sizeof e);
    part->entries[part->n_entries++] = e;
    return LINNET_OK;
}

static int compare_views(struct view a, struct view b)
{
    int order = memcmp(a.data, b.data, a.size < b.size ? a.size : b.size);
    return order ? order : (a.size > b.size) - (a.size < b.size);
}

static int compare_entries(const void *a, const void *b)
{
    const struct gguf_entry *const *x = a, *const *y = b;
    return compare_views((*x)->key, (*y)->key);
}

static linnet_status index_keys(struct gguf_part *part, linnet_error *err)
{
    part->by_key = mem_new(part->n_entries, sizeof *part->by_key);
    if (!part->by_key)
        return error_memory(err, "GGUF metadata", part->n_entries * sizeof *part->by_key);
    for (size_t i = 0; i < part->n_entries; i++) part->by_key[i] = &part->entries[i];
    qsort(part->by_key, part->n_entries, sizeof *part->by_key, compare_entries);
    for (size_t i = 1; i < part->n_entries; i++) {
        struct view key = part->by_key[i]->key;
        if (view_equal(key, part->by_key[i - 1]->key))
            return error_set(err, LINNET_FORMAT, "%s: key %.*s appears twice", part->path,
                             view_shown(key), key.data);
    }
    return LINNET_OK;
}

const struct gguf_entry *gguf_find(const struct gguf_part *part, struct view key)
{
    struct gguf_entry wanted = {.key = key};
    const struct gguf_entry *p = &wanted, **found = NULL;
    if (part->n_entries)
        found = bsearch(&p, part->by_key, part->n_entries, sizeof *part->by_key, compare_entries);
    return found ? *found : NULL;
}

static linnet_status read_version(struct gguf_part *part, linnet_error *err)
{
    const uint8_t *magic;
    uint32_t version;
    if (!reader_bytes(&part->reader, 4, &magic) || memcmp(magic, "GGUF", 4) != 0)
        return error_set(err, LINNET_FORMAT,
                         "%s: not a GGUF file (it does not begin with \"GGUF\"); give a GGUF file "
                         "or a Hugging Face model directory",
                         part->path);
    if (!reader_u32(&part->reader, &version))
        return error_set(err, LINNET_FORMAT, "%s: the file ends after %zu bytes", part->path,
                         part->reader.size);
    if (version == __builtin_bswap32(2) || version == __builtin_bswap32(3))
        return error_set(err, LINNET_UNSUPPORTED,
                         "%s: a big-endian GGUF file; only little-endian ones are supported",
                         part->path);
    if (version != 2 && version != 3)
        return error_set(err, LINNET_UNSUPPORTED,
                         "%s: expected GGUF version 2 or 3, found %" PRIu32 "; convert the model "
                         "again",
                         part->path, version);
    return LINNET_OK;
}

linnet_status gguf_read_metadata(struct gguf_part *part, linnet_error *err)
{
    struct reader *r = &part->reader;
    uint64_t n_tensors, n_keys;
    linnet_status status = read_version(part, err);
    if (status) return status;
    if (!reader_u64(r, &n_tensors) || !reader_u64(r, &n_keys))
        return error_set(err, LINNET_FORMAT, "%s: the file ends after %zu bytes", part->path,
                         r->size);
    size_t rest = r->size - r->pos;
    if (n_tensors > rest / MIN_TENSOR_INFO || n_keys > rest / MIN_ENTRY)
        return error_set(err, LINNET_FORMAT,
                         "%s: claims %" PRIu64 " tensors and %" PRIu64
                         " keys, more than its %zu bytes can hold",
                         part->path, n_tensors, n_keys, r->size);
    part->n_tensors = (size_t)n_tensors;
    for (uint64_t i = 0; i < n_keys; i++) {
        status = read_entry(part, (size_t)n_keys, err);
        if (status) return status;
    }
    return index_keys(part, err);
}
