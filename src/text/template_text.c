/* Texts of templates: UTF-8 that knows, byte by byte, whether it is the callers' own words. */
#include <string.h>
#include <utf8proc.h>

#include "text/template_internal.h"
#include "text/utf8.h"

enum { WORK_BYTES = 64, MIN_TAIL = 256 };

size_t template_decode(const char *bytes, size_t size, size_t at, int32_t *code_point)
{
    uint32_t c;
    size_t n = utf8_decode(bytes + at, size - at, &c);
    *code_point = (int32_t)(c < UTF8_INVALID ? c : UTF8_REPLACEMENT);
    return n;
}

size_t utf8_count(const char *bytes, size_t size)
{
    size_t n = 0;
    int32_t c;
    for (size_t at = 0; at < size; n++)
        at += (unsigned char)bytes[at] < 0x80 ? 1 : template_decode(bytes, size, at, &c);
    return n;
}

size_t utf8_offset(const char *bytes, size_t size, size_t characters)
{
    size_t at = 0;
    int32_t c;
    for (; characters > 0 && at < size; characters--)
        at += (unsigned char)bytes[at] < 0x80 ? 1 : template_decode(bytes, size, at, &c);
    return at;
}

bool code_point_is_space(int32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
           c == 0x202F || c == 0x205F || c == 0x3000;
}

size_t text_skip_space(const char *bytes, size_t begin, size_t end)
{
    while (begin < end) {
        int32_t c;
        size_t n = template_decode(bytes, end, begin, &c);
        if (!code_point_is_space(c)) break;
        begin += n;
    }
    return begin;
}

size_t text_back_over_space(const char *bytes, size_t begin, size_t end)
{
    while (end > begin) {
        size_t start = end - 1;
        while (start > begin && end - start < 4 && ((unsigned char)bytes[start] & 0xC0) == 0x80)
            start--;
        int32_t c;
        if (template_decode(bytes, end, start, &c) != end - start || !code_point_is_space(c)) break;
        end = start;
    }
    return end;
}

size_t text_find(const struct text *t, size_t from, const struct text *needle)
{
    if (from > t->size || needle->size > t->size - from) return SIZE_MAX;
    if (needle->size == 0) return from;
    const char *found = memmem(t->bytes + from, t->size - from, needle->bytes, needle->size);
    return found ? (size_t)(found - t->bytes) : SIZE_MAX;
}

bool text_equals(const struct text *t, const char *text)
{
    return t->size == strlen(text) && memcmp(t->bytes, text, t->size) == 0;
}

static bool new_text(struct run *r, const struct text *t, struct value *out)
{
    struct text *copy = jinja_array(r, 1, sizeof *copy);
    if (!copy) return false;
    *copy = *t;
    *out = (struct value){.kind = VALUE_STRING, .text = copy};
    return true;
}

bool jinja_text(struct run *r, const char *bytes, size_t size, bool untrusted, struct value *out)
{
    struct text t = {.bytes = bytes, .size = size, .untrusted = untrusted};
    return new_text(r, &t, out);
}

bool jinja_literal(struct run *r, const char *text, struct value *out)
{
    return jinja_text(r, text, strlen(text), false, out);
}

bool jinja_subtext(struct run *r, const struct text *t, size_t begin, size_t end, struct value *out)
{
    struct text part = {.bytes = t->bytes + begin,
                        .marks = t->marks ? t->marks + begin : NULL,
                        .size = end > begin ? end - begin : 0,
                        .untrusted = t->untrusted};
    return new_text(r, &part, out);
}

/* ---- building ---------------------------------------------------------------------------- */

static bool build_reserve(struct run *r, struct builder *b, size_t more, bool marks)
{
    size_t need;
    if (!size_add(b->size, more, &need) || need > MAX_RENDER_MEMORY) return jinja_fail_memory(r);
    if (!jinja_work(r, 1 + more / WORK_BYTES)) return false;
    if (need > b->capacity) {
        size_t capacity = 2 * need < 64 ? 64 : 2 * need;
        char *bytes = jinja_array(r, capacity, 1);
        if (!bytes) return false;
        if (b->size) memcpy(bytes, b->bytes, b->size);
        b->bytes = bytes;
        if (b->marks) {
            uint8_t *copy = jinja_array(r, capacity, 1);
            if (!copy) return false;
            memcpy(copy, b->marks, b->size);
            b->marks = copy;
        }
        b->capacity = capacity;
    }
    if (marks && !b->marks) {
        b->marks = jinja_array(r, b->capacity, 1);
        if (!b->marks) return false;
        memset(b->marks, b->untrusted, b->size);
    }
    return true;
}

bool build(struct run *r, struct builder *b, const char *bytes, size_t size, bool untrusted)
{
    if (size == 0) return true;
    if (b->size == 0 && !b->marks) b->untrusted = untrusted;
    if (!build_reserve(r, b, size, b->untrusted != untrusted)) return false;
    memcpy(b->bytes + b->size, bytes, size);
    if (b->marks) memset(b->marks + b->size, untrusted, size);
    b->size += size;
    return true;
}

bool build_text(struct run *r, struct builder *b, const struct text *t, size_t begin, size_t end)
{
    if (!t->marks) return build(r, b, t->bytes + begin, end - begin, t->untrusted);
    if (!build_reserve(r, b, end - begin, true)) return false;
    if (end > begin) {
        memcpy(b->bytes + b->size, t->bytes + begin, end - begin);
        memcpy(b->marks + b->size, t->marks + begin, end - begin);
    }
    b->size += end - begin;
    return true;
}

bool build_code_point(struct run *r, struct builder *b, int32_t c, bool untrusted)
{
    utf8proc_uint8_t bytes[4];
    utf8proc_ssize_t n = utf8proc_encode_char(c, bytes);
    return build(r, b, (const char *)bytes, n > 0 ? (size_t)n : 0, untrusted);
}

bool build_done(struct run *r, struct builder *b, struct value *out)
{
    struct text t = {.bytes = b->bytes ? b->bytes : "",
                     .marks = b->marks,
                     .size = b->size,
                     .untrusted = b->untrusted};
    return new_text(r, &t, out);
}

static void copy_marks(uint8_t *to, const struct text *t)
{
    if (t->marks)
        memcpy(to, t->marks, t->size);
    else
        memset(to, t->untrusted, t->size);
}

bool jinja_concat(struct run *r, const struct text *a, const struct text *b, struct value *out)
{
    size_t size = a->size + b->size;
    struct text t = *a;
    t.size = size;
    t.markup = false;
    if (!jinja_work(r, 1 + b->size / WORK_BYTES)) return false;
    if (b->size == 0) return new_text(r, &t, out);
    struct tail *tail = a->tail;
    if (!tail || tail->used != a->size || tail->capacity < size) {
        size_t capacity = 2 * size < MIN_TAIL ? size : 2 * size;
        if (size > MAX_RENDER_MEMORY) return jinja_fail_memory(r);
        char *bytes = jinja_array(r, capacity, 1);
        tail = jinja_array(r, 1, sizeof *tail);
        if (!bytes || !tail || !jinja_work(r, a->size / WORK_BYTES)) return false;
        tail->marks = jinja_array(r, capacity, 1);
        if (!tail->marks) return false;
        tail->capacity = capacity;
        if (a->size) memcpy(bytes, a->bytes, a->size);
        copy_marks(tail->marks, a);
        t.bytes = bytes;
    }
    memcpy((char *)t.bytes + a->size, b->bytes, b->size);
    copy_marks(tail->marks + a->size, b);
    tail->used = size;
    t.marks = tail->marks;
    t.tail = tail;
    return new_text(r, &t, out);
}

/* ---- output ------------------------------------------------------------------------------ */

static bool add_range(struct run *r, size_t begin, size_t end)
{
    struct rendered *o = r->out;
    if (o->n_untrusted && o->untrusted[o->n_untrusted - 1].end == begin) {
        o->untrusted[o->n_untrusted - 1].end = end;
        return true;
    }
    if (!mem_reserve((void **)&o->untrusted, &o->capacity, o->n_untrusted + 1,
                     sizeof *o->untrusted))
        return jinja_fail_memory(r);
    o->untrusted[o->n_untrusted++] = (struct span){begin, end};
    return true;
}

bool jinja_emit(struct run *r, const struct text *t)
{
    if (t->size == 0) return true;
    if (r->capture) return build_text(r, r->capture, t, 0, t->size);
    size_t base = r->out->text.size;
    if (t->size > MAX_OUTPUT - base)
        return jinja_fail(r, "the rendered text is longer than %d bytes; send less", MAX_OUTPUT);
    if (!jinja_work(r, 1 + t->size / WORK_BYTES)) return false;
    strbuf_append(&r->out->text, t->bytes, t->size);
    if (r->out->text.failed) return jinja_fail_memory(r);
    if (!t->marks) return !t->untrusted || add_range(r, base, base + t->size);
    for (size_t i = 0; i < t->size;) {
        size_t begin = i;
        bool untrusted = t->marks[i];
        while (i < t->size && (t->marks[i] != 0) == untrusted) i++;
        if (untrusted && !add_range(r, base + begin, base + i)) return false;
    }
    return true;
}
