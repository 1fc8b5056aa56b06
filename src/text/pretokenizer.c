#include <string.h>
#include <utf8proc.h>

#include "base/memory.h"
#include "text/tokenizer_internal.h"
#include "text/unicode_tables.h"
#include "text/utf8.h"

const char gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* Collects the ranges of one split, as its behavior says. */
struct splitter {
    struct pieces *out;
    enum split_behavior behavior;
    size_t first;      /* index of this text's first piece in out */
    bool any, matched; /* was there a range yet; was the last one a match */
    linnet_error *err;
};

static linnet_status push(struct pieces *out, struct span span, linnet_error *err)
{
    if (!mem_reserve((void **)&out->spans, &out->capacity, out->count + 1, sizeof span))
        return error_memory(err, "the pieces of a text", (out->count + 1) * sizeof span);
    out->spans[out->count++] = span;
    return LINNET_OK;
}

static linnet_status split_range(struct splitter *s, size_t begin, size_t end, bool match)
{
    bool joins = false;
    switch (s->behavior) {
    case SPLIT_REMOVED:
        if (match) return LINNET_OK;
        break;
    case SPLIT_ISOLATED: break;
    case SPLIT_MERGED_WITH_PREVIOUS: joins = s->any && match && !s->matched; break;
    case SPLIT_MERGED_WITH_NEXT: joins = s->any && !match && s->matched; break;
    case SPLIT_CONTIGUOUS: joins = s->any && match == s->matched; break;
    }
    s->any = true;
    s->matched = match;
    if (joins && s->out->count > s->first) {
        s->out->spans[s->out->count - 1].end = end;
        return LINNET_OK;
    }
    return push(s->out, (struct span){begin, end}, s->err);
}

/* Finds the next match of a step in text[from, n). */
typedef linnet_status find_function(const struct pretokenizer_step *step, struct matcher *m,
                                    const char *text, size_t n, size_t from, size_t *begin,
                                    size_t *end, linnet_error *err);

static linnet_status find_pattern(const struct pretokenizer_step *step, struct matcher *m,
                                  const char *text, size_t n, size_t from, size_t *begin,
                                  size_t *end, linnet_error *err)
{
    return pattern_find(&step->pattern, m, text, n, from, begin, end, err);
}

static bool is_numeric(uint32_t c)
{
    if (c < 0x80) return c >= '0' && c <= '9';
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
    if (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO) return true;
    if (category != UTF8PROC_CATEGORY_CN) return false;
    for (size_t i = 0; i < unicode_recent_category_count; i++) {
        const struct unicode_category *recent = &unicode_recent_categories[i];
        if (c >= recent->first && c <= recent->last) return recent->name[0] == 'N';
    }
    return (c >= 0x11DE0 && c <= 0x11DE9) || (c >= 0x16FF4 && c <= 0x16FF6); /* Unicode 17 */
}

static linnet_status find_digit(const struct pretokenizer_step *step, struct matcher *m,
                                const char *text, size_t n, size_t from, size_t *begin, size_t *end,
                                linnet_error *err)
{
    (void)step, (void)m, (void)err;
    *begin = *end = n + 1;
    while (from < n) {
        uint32_t c;
        size_t length = utf8_decode(text + from, n - from, &c);
        if (is_numeric(c)) {
            *begin = from;
            *end = from + length;
            break;
        }
        from += length;
    }
    return LINNET_OK;
}

/* Splits base[piece]. Matches follow one another as in any search for all: an empty one never
 * directly behind another match. */
static linnet_status split_piece(struct encoder *e, const struct pretokenizer_step *step,
                                 const char *base, struct span piece, find_function *find,
                                 struct splitter *s)
{
    const char *text = base + piece.begin;
    size_t n = piece.end - piece.begin, done = 0, from = 0;
    *s = (struct splitter){s->out, step->behavior, s->out->count, false, false, e->err};
    linnet_status status = LINNET_OK;
    while (from <= n && status == LINNET_OK) {
        size_t begin, end;
        status = find(step, &e->matcher, text, n, from, &begin, &end, e->err);
        if (status != LINNET_OK || begin > n) break;
        if (begin == end) {
            uint32_t c;
            from = end < n ? end + utf8_decode(text + end, n - end, &c) : n + 1;
            if (begin == done) continue; /* it would cut nothing off */
        } else {
            from = end;
        }
        if (begin > done)
            status = split_range(s, piece.begin + done, piece.begin + begin, step->invert);
        if (status == LINNET_OK)
            status = split_range(s, piece.begin + begin, piece.begin + end, !step->invert);
        done = end;
    }
    if (status == LINNET_OK && done < n)
        status = split_range(s, piece.begin + done, piece.end, step->invert);
    return status;
}

static linnet_status split_all(struct encoder *e, const struct pretokenizer_step *step,
                               const char *base, const struct pieces *in, struct pieces *out,
                               find_function *find)
{
    struct splitter splitter = {.out = out};
    out->count = 0;
    for (size_t i = 0; i < in->count; i++) {
        linnet_status status = split_piece(e, step, base, in->spans[i], find, &splitter);
        if (status != LINNET_OK) return status;
    }
    return LINNET_OK;
}

static bool begins_with(const char *text, size_t n, const char *prefix, size_t size)
{
    return n >= size && memcmp(text, prefix, size) == 0;
}

/* Writes every piece anew, with blanks replaced and a prefix where one is due. */
static linnet_status edit_all(struct encoder *e, const struct pretokenizer_step *step, bool first,
                              const char *base, const struct pieces *in, struct pieces *out,
                              struct strbuf *text)
{
    const char *mark = step->replacement.data;
    size_t mark_size = step->replacement.size;
    strbuf_clear(text);
    out->count = 0;
    for (size_t i = 0; i < in->count; i++) {
        const char *piece = base + in->spans[i].begin;
        size_t n = in->spans[i].end - in->spans[i].begin, begin = text->size;
        bool leads = first && i == 0 && in->spans[i].begin == 0;
        bool wanted = step->prepend == PREPEND_ALWAYS || (step->prepend == PREPEND_FIRST && leads);
        bool marked = n == 0 || piece[0] == ' ' || begins_with(piece, n, mark, mark_size);
        if (wanted && !marked) strbuf_append(text, mark, mark_size);
        for (size_t k = 0; k < n;) {
            const char *blank = memchr(piece + k, ' ', n - k);
            size_t run = blank ? (size_t)(blank - (piece + k)) : n - k;
            strbuf_append(text, piece + k, run);
            if (blank) strbuf_append(text, mark, mark_size);
            k += run + (blank != NULL);
        }
        if (text->failed) return error_memory(e->err, "a text", n);
        linnet_status status = growth_spend(&e->growth, n, text->size - begin, e->err);
        if (status == LINNET_OK) status = push(out, (struct span){begin, text->size}, e->err);
        if (status != LINNET_OK) return status;
    }
    return LINNET_OK;
}

linnet_status pretokenize(struct encoder *e, const char *text, size_t n, bool first,
                          const char **base, const struct pieces **pieces)
{
    struct pieces *in = &e->pieces[0], *out = &e->pieces[1];
    struct strbuf *edited = &e->edited[0];
    in->count = 0;
    linnet_status status = push(in, (struct span){0, n}, e->err);
    *base = text;
    for (size_t i = 0; i < e->t->n_pretokenizer && status == LINNET_OK; i++) {
        const struct pretokenizer_step *step = &e->t->pretokenizer[i];
        switch (step->kind) {
        case PRETOKENIZE_SPLIT: status = split_all(e, step, *base, in, out, find_pattern); break;
        case PRETOKENIZE_DIGITS: status = split_all(e, step, *base, in, out, find_digit); break;
        case PRETOKENIZE_EDIT:
            status = edit_all(e, step, first, *base, in, out, edited);
            *base = strbuf_cstr(edited);
            edited = edited == &e->edited[0] ? &e->edited[1] : &e->edited[0];
            break;
        }
        struct pieces *swap = in;
        in = out;
        out = swap;
    }
    *pieces = in;
    return status;
}
