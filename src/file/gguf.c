/* Reading an open GGUF file: typed access to its metadata, and its tensors. */
#include "file/gguf.h"

#include <inttypes.h>
#include <stdio.h>

#include <utf8proc.h>

#include "file/gguf_internal.h"

const char *gguf_path(const struct gguf *g)
{
    return g->path;
}

static const struct gguf_entry *find(const struct gguf *g, const char *key)
{
    return gguf_find(&g->parts[0], view_text(key));
}

bool gguf_has(const struct gguf *g, const char *key)
{
    return find(g, key) != NULL;
}

bool gguf_string(const struct gguf *g, const char *key, struct view *out)
{
    const struct gguf_entry *e = find(g, key);
    if (!e || e->type != GGUF_STRING) return false;
    *out = (struct view){(const char *)e->data, e->size};
    return true;
}

static bool load_integer(enum gguf_type type, const uint8_t *p, int64_t *out)
{
    union {
        int8_t i8;
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        uint64_t u64;
    } v;
    switch (type) {
    case GGUF_U8: *out = *p; return true;
    case GGUF_I8:
        memcpy(&v.i8, p, 1);
        *out = v.i8;
        return true;
    case GGUF_U16:
        memcpy(&v.u16, p, 2);
        *out = v.u16;
        return true;
    case GGUF_I16:
        memcpy(&v.i16, p, 2);
        *out = v.i16;
        return true;
    case GGUF_U32:
        memcpy(&v.u32, p, 4);
        *out = v.u32;
        return true;
    case GGUF_I32:
        memcpy(&v.i32, p, 4);
        *out = v.i32;
        return true;
    case GGUF_I64: memcpy(out, p, 8); return true;
    case GGUF_U64:
        memcpy(&v.u64, p, 8);
        if (v.u64 > INT64_MAX) return false;
        *out = (int64_t)v.u64;
        return true;
    default: return false;
    }
}

static bool load_number(enum gguf_type type, const uint8_t *p, double *out)
{
    float f;
    if (type == GGUF_F64) {
        memcpy(out, p, 8);
        return true;
    }
    if (type != GGUF_F32) return false;
    memcpy(&f, p, 4);
    *out = (double)f;
    return true;
}

bool gguf_integer(const struct gguf *g, const char *key, int64_t *out)
{
    const struct gguf_entry *e = find(g, key);
    return e && load_integer(e->type, e->data, out);
}

bool gguf_number(const struct gguf *g, const char *key, double *out)
{
    const struct gguf_entry *e = find(g, key);
    return e && load_number(e->type, e->data, out);
}

bool gguf_bool(const struct gguf *g, const char *key, bool *out)
{
    const struct gguf_entry *e = find(g, key);
    if (!e || e->type != GGUF_BOOL) return false;
    *out = e->data[0] != 0;
    return true;
}

bool gguf_array(const struct gguf *g, const char *key, struct gguf_array *out)
{
    const struct gguf_entry *e = find(g, key);
    if (!e || e->type != GGUF_ARRAY) return false;
    *out = (struct gguf_array){e->element, e->count, e->data, e->size};
    return true;
}

size_t gguf_key_count(const struct gguf *g)
{
    return g->parts[0].n_entries;
}

struct view gguf_key(const struct gguf *g, size_t i)
{
    return g->parts[0].entries[i].key;
}

/* Copies whole characters while they fit; what a terminal should not get becomes '?'. */
static void describe_text(struct view text, char *out, size_t n)
{
    const utf8proc_uint8_t *p = (const utf8proc_uint8_t *)text.data;
    size_t used = 0, i = 0;
    while (i < text.size) {
        size_t rest = text.size - i;
        utf8proc_int32_t c = 0;
        utf8proc_ssize_t length =
            utf8proc_iterate(p + i, rest < 4 ? (utf8proc_ssize_t)rest : 4, &c);
        bool shown = length > 0 && c >= 0x20 && (c < 0x7F || c >= 0xA0);
        size_t in = length > 0 ? (size_t)length : 1, produced = shown ? in : 1;
        if (used + produced + 1 > n) break;
        memcpy(out + used, shown ? text.data + i : "?", produced);
        used += produced;
        i += in;
    }
    out[used] = 0;
}

void gguf_describe(const struct gguf *g, size_t i, char *out, size_t n)
{
    const struct gguf_entry *e = &g->parts[0].entries[i];
    uint64_t large;
    int64_t integer;
    double number;
    if (n == 0) return;
    if (e->type == GGUF_STRING)
        describe_text((struct view){(const char *)e->data, e->size}, out, n);
    else if (e->type == GGUF_ARRAY)
        snprintf(out, n, "%s[%zu]", gguf_type_name(e->element), e->count);
    else if (e->type == GGUF_BOOL)
        snprintf(out, n, "%s", e->data[0] ? "true" : "false");
    else if (load_number(e->type, e->data, &number))
        snprintf(out, n, "%.9g", number);
    else if (load_integer(e->type, e->data, &integer))
        snprintf(out, n, "%" PRId64, integer);
    else { /* a u64 above INT64_MAX */
        memcpy(&large, e->data, 8);
        snprintf(out, n, "%" PRIu64, large);
    }
}

size_t gguf_tensor_count(const struct gguf *g)
{
    return g->n_tensors;
}

const struct tensor *gguf_tensor(const struct gguf *g, size_t i)
{
    return &g->tensors[i];
}
