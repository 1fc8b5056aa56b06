#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/memory.h"
#include "text/tokenizer_internal.h"
#include "text/unicode_tables.h"
#include "text/utf8.h"

void marks_restart(struct marks *m)
{
    m->begins = m->ends = 0;
}

linnet_status growth_spend(size_t *growth, size_t before, size_t after, linnet_error *err)
{
    size_t added = after > before ? after - before : 0;
    if (added > *growth)
        return error_set(err, LINNET_UNSUPPORTED,
                         "the tokenizer's replacements make a text of %zu bytes grow without end",
                         before);
    *growth -= added;
    return LINNET_OK;
}

void marks_move(struct marks *m, struct span from, struct span to, bool equal)
{
    for (; m->begins < m->count && m->spans[m->begins].begin < from.end; m->begins++) {
        size_t *begin = &m->spans[m->begins].begin;
        *begin = equal ? to.begin + (*begin - from.begin) : to.begin;
    }
    for (; m->ends < m->count && m->spans[m->ends].end <= from.end; m->ends++) {
        size_t *end = &m->spans[m->ends].end;
        *end = equal ? to.begin + (*end - from.begin) : to.end;
    }
}

/* Appends text[from.begin, from.end) as it is. */
static void keep(const char *text, struct span from, struct strbuf *out, struct marks *marks)
{
    size_t begin = out->size;
    strbuf_append(out, text + from.begin, from.end - from.begin);
    marks_move(marks, from, (struct span){begin, out->size}, true);
}

/* ---- canonical and compatibility forms (Unicode Standard Annex 15) ------------------------ */

struct code_points {
    utf8proc_int32_t *items;
    size_t count, capacity;
    utf8proc_int32_t *spare; /* for sorting */
    size_t spare_capacity;
};

static int combining_class(utf8proc_int32_t c)
{
    return utf8proc_get_property(c)->combining_class;
}

/* Sorts a run of marks by class, stably. utf8proc's own exchange sort is quadratic, and a hostile
 * text may be nothing but marks. */
static bool sort_marks(struct code_points *p, size_t begin, size_t end)
{
    size_t n = end - begin, first[257] = {0};
    bool ordered = true;
    for (size_t i = begin + 1; i < end && ordered; i++)
        ordered = combining_class(p->items[i - 1]) <= combining_class(p->items[i]);
    if (ordered) return true;
    if (!mem_reserve((void **)&p->spare, &p->spare_capacity, n, sizeof *p->spare)) return false;
    for (size_t i = begin; i < end; i++) first[combining_class(p->items[i]) + 1]++;
    for (size_t c = 0; c < 256; c++) first[c + 1] += first[c];
    for (size_t i = begin; i < end; i++)
        p->spare[first[combining_class(p->items[i])]++] = p->items[i];
    memcpy(p->items + begin, p->spare, n * sizeof *p->items);
    return true;
}

static bool sort_all_marks(struct code_points *p)
{
    for (size_t i = 0; i < p->count;) {
        size_t end = i;
        while (end < p->count && combining_class(p->items[end]) != 0) end++;
        if (end > i + 1 && !sort_marks(p, i, end)) return false;
        i = end > i ? end : i + 1;
    }
    return true;
}

static utf8proc_option_t form_options(enum normalizer_kind kind)
{
    int options = UTF8PROC_STABLE;
    bool composed = kind == NORMALIZE_NFC || kind == NORMALIZE_NFKC;
    options |= composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
    if (kind == NORMALIZE_NFKC || kind == NORMALIZE_NFKD) options |= UTF8PROC_COMPAT;
    return (utf8proc_option_t)options;
}

/* Normalizes the characters of `text` as one run and appends them. */
static bool form_run(const char *text, size_t n, utf8proc_option_t options, struct code_points *p,
                     struct strbuf *out)
{
    enum { LONGEST_DECOMPOSITION = 32 };
    p->count = 0;
    for (size_t i = 0; i < n;) {
        uint32_t c;
        i += utf8_decode(text + i, n - i, &c);
        if (!mem_reserve((void **)&p->items, &p->capacity, p->count + LONGEST_DECOMPOSITION,
                         sizeof *p->items))
            return false;
        utf8proc_ssize_t got = utf8proc_decompose_char((utf8proc_int32_t)c, p->items + p->count,
                                                       LONGEST_DECOMPOSITION, options, NULL);
        if (got <= 0 || got > LONGEST_DECOMPOSITION) { /* no such character exists */
            p->items[p->count] = (utf8proc_int32_t)c;
            got = 1;
        }
        p->count += (size_t)got;
    }
    if (!sort_all_marks(p)) return false;
    utf8proc_ssize_t count =
        utf8proc_normalize_utf32(p->items, (utf8proc_ssize_t)p->count, options);
    for (utf8proc_ssize_t i = 0; i < count; i++) strbuf_utf8(out, (uint32_t)p->items[i]);
    return true;
}

/* Below this every character is its own form and never the second half of a composition. */
static uint32_t inert_below(enum normalizer_kind kind)
{
    return kind == NORMALIZE_NFC ? 0x300 : kind == NORMALIZE_NFD ? 0xC0 : 0xA0;
}

/* An end of a run. So are bytes that are no character: they stay as they are. */
static bool is_simple(uint32_t c, uint32_t limit)
{
    return c < limit || c >= UTF8_INVALID || unicode_is_inert(c);
}

static bool same_bytes(const char *a, size_t n, const char *b, size_t m)
{
    return n == m && (n == 0 || memcmp(a, b, n) == 0);
}

static bool form(enum normalizer_kind kind, const char *text, size_t n, struct strbuf *out,
                 struct marks *marks)
{
    struct code_points points = {0};
    utf8proc_option_t options = form_options(kind);
    uint32_t limit = inert_below(kind), c;
    size_t kept = 0, last = 0; /* [kept, last) is to be copied; last: the character before i */
    bool ok = true;
    for (size_t i = 0; i < n && ok;) {
        size_t length = utf8_decode(text + i, n - i, &c);
        if (is_simple(c, limit)) {
            last = c < limit ? i : i + length; /* an inert character composes with nothing */
            i += length;
            continue;
        }
        /* A run: the character before, and all up to the next simple one. */
        size_t end = i;
        while (end < n) {
            length = utf8_decode(text + end, n - end, &c);
            if (is_simple(c, limit)) break;
            end += length;
        }
        keep(text, (struct span){kept, last}, out, marks);
        size_t begin = out->size;
        ok = form_run(text + last, end - last, options, &points, out);
        bool equal = ok && same_bytes(text + last, end - last, strbuf_cstr(out) + begin,
                                      out->size - begin); /* else marks may have changed places */
        marks_move(marks, (struct span){last, end}, (struct span){begin, out->size}, equal);
        i = kept = last = end;
    }
    keep(text, (struct span){kept, n}, out, marks);
    free(points.items);
    free(points.spare);
    return ok;
}

/* ---- the other steps ---------------------------------------------------------------------- */

static void strip(const struct normalizer_step *step, const char *text, size_t n,
                  struct strbuf *out, struct marks *marks)
{
    size_t begin = 0, end = n;
    uint32_t c;
    while (step->left && begin < end) {
        size_t length = utf8_decode(text + begin, end - begin, &c);
        if (!utf8_is_white_space(c)) break;
        begin += length;
    }
    while (step->right && end > begin) {
        size_t length = utf8_decode_last(text + begin, end - begin, &c);
        if (!utf8_is_white_space(c)) break;
        end -= length;
    }
    marks_move(marks, (struct span){0, begin}, (struct span){0, 0}, false);
    keep(text, (struct span){begin, end}, out, marks);
    marks_move(marks, (struct span){end, n}, (struct span){out->size, out->size}, false);
}

static void lowercase(const char *text, size_t n, struct strbuf *out, struct marks *marks)
{
    for (size_t i = 0; i < n;) {
        uint32_t c;
        size_t length = utf8_decode(text + i, n - i, &c), begin = out->size;
        if (c >= UTF8_INVALID)
            strbuf_append(out, text + i, length);
        else
            strbuf_utf8(out, c == 0x130 ? 'i' : (uint32_t)utf8proc_tolower((utf8proc_int32_t)c));
        if (c == 0x130) strbuf_utf8(out, 0x307); /* the one that becomes two */
        marks_move(marks, (struct span){i, i + length}, (struct span){begin, out->size}, false);
        i += length;
    }
}

static linnet_status replace(const struct normalizer_step *step, struct matcher *matcher,
                             const char *text, size_t n, struct strbuf *out, struct marks *marks,
                             size_t growth, linnet_error *err)
{
    size_t done = 0;
    for (size_t from = 0; from <= n;) {
        size_t begin, end;
        linnet_status status =
            pattern_find(&step->pattern, matcher, text, n, from, &begin, &end, err);
        if (status != LINNET_OK) return status;
        if (begin > n) break;
        if (end == begin) { /* an empty match replaces nothing */
            uint32_t c;
            from = end < n ? end + utf8_decode(text + end, n - end, &c) : n + 1;
            continue;
        }
        keep(text, (struct span){done, begin}, out, marks);
        size_t start = out->size;
        strbuf_append(out, step->content.data, step->content.size);
        marks_move(marks, (struct span){begin, end}, (struct span){start, out->size}, false);
        done = from = end;
        status = growth_spend(&(size_t){growth}, done, out->size, err); /* before it is too late */
        if (status != LINNET_OK) return status;
    }
    keep(text, (struct span){done, n}, out, marks);
    return LINNET_OK;
}

linnet_status normalize(const struct normalizer_step *step, struct matcher *matcher,
                        const char *text, size_t n, struct strbuf *out, struct marks *marks,
                        size_t *growth, linnet_error *err)
{
    linnet_status status = LINNET_OK;
    bool ok = true;
    marks_restart(marks);
    switch (step->kind) {
    case NORMALIZE_PREPEND:
        if (n) strbuf_append(out, step->content.data, step->content.size);
        keep(text, (struct span){0, n}, out, marks);
        break;
    case NORMALIZE_REPLACE:
        status = replace(step, matcher, text, n, out, marks, *growth, err);
        break;
    case NORMALIZE_STRIP: strip(step, text, n, out, marks); break;
    case NORMALIZE_LOWERCASE: lowercase(text, n, out, marks); break;
    default: ok = form(step->kind, text, n, out, marks); break;
    }
    if (!ok || out->failed) return error_memory(err, "a normalized text", n);
    return status == LINNET_OK ? growth_spend(growth, n, out->size, err) : status;
}
