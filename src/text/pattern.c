#include "text/pattern.h"

#include <ctype.h>
#include <string.h>

#include "text/unicode_tables.h"

enum { GROUP_LIMIT = 64 };

/* Writes PCRE2's form of an Oniguruma pattern. */
struct translator {
    const char *source;
    size_t size, pos;
    struct strbuf out;
    size_t groups[GROUP_LIMIT]; /* where in `out` the open groups began */
    size_t depth;
    size_t atom; /* where in `out` the last atom began: what a quantifier applies to */
    linnet_error *err;
};

static linnet_status refuse(struct translator *t, const char *what)
{
    return error_set(t->err, LINNET_UNSUPPORTED,
                     "regular expression at byte %zu: %s is not understood", t->pos, what);
}

static char peek(const struct translator *t, size_t ahead)
{
    return ahead < t->size - t->pos ? t->source[t->pos + ahead] : 0;
}

/* Oniguruma's \s: White_Space. PCRE2's own has U+180E as well. */
static const char blanks[] = "\\x09-\\x0D\\x20\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}"
                             "\\x{2029}\\x{202F}\\x{205F}\\x{3000}";

/* The members of a general category ("L", "Lu"), for use inside a class. */
static void category(struct strbuf *out, const char *name)
{
    strbuf_format(out, "\\p{%s}", name);
    for (size_t i = 0; i < unicode_recent_category_count; i++) {
        const struct unicode_category *c = &unicode_recent_categories[i];
        if (strncmp(c->name, name, strlen(name)) == 0)
            strbuf_format(out, "\\x{%X}-\\x{%X}", (unsigned)c->first, (unsigned)c->last);
    }
}

static void word(struct strbuf *out)
{
    category(out, "L");
    category(out, "M");
    category(out, "Nd");
    strbuf_text(out, "\\p{Pc}");
}

/* \p{...} or \P{...}; pos is at the letter p. */
static linnet_status property(struct translator *t, bool in_class)
{
    bool negative = t->source[t->pos] == 'P';
    char name[32] = "";
    size_t i = 0;
    if (peek(t, 1) == '{')
        while (i < sizeof name - 1 && isalpha((unsigned char)peek(t, 2 + i))) {
            name[i] = peek(t, 2 + i);
            i++;
        }
    if (i == 0 || peek(t, 2 + i) != '}') return refuse(t, "this \\p");
    bool general = i <= 2 && strchr("LMNPSZC", name[0]);
    if (negative && in_class) return refuse(t, "\\P inside [ ]");
    if (!in_class) strbuf_text(&t->out, negative ? "[^" : "[");
    if (general)
        category(&t->out, name);
    else
        strbuf_format(&t->out, "\\p{sc:%s}", name);
    if (!in_class) strbuf_text(&t->out, "]");
    t->pos += i + 3;
    return LINNET_OK;
}

static void shorthand(struct translator *t, char letter, bool in_class)
{
    bool negative = isupper((unsigned char)letter);
    if (!in_class) strbuf_text(&t->out, negative ? "[^" : "[");
    switch (tolower((unsigned char)letter)) {
    case 's': strbuf_text(&t->out, blanks); break;
    case 'w': word(&t->out); break;
    default: category(&t->out, "Nd"); break;
    }
    if (!in_class) strbuf_char(&t->out, ']');
    t->pos++;
}

static linnet_status escape(struct translator *t, bool in_class)
{
    t->pos++;
    unsigned char c = (unsigned char)peek(t, 0);
    switch (c) {
    case 's':
    case 'd':
    case 'w': shorthand(t, (char)c, in_class); return LINNET_OK;
    case 'S':
        if (in_class) {
            strbuf_text(&t->out, "\\S\\x{180E}");
            t->pos++;
            return LINNET_OK;
        } /* fall through */
    case 'D':
    case 'W':
        if (in_class) return refuse(t, "\\D or \\W inside [ ]");
        shorthand(t, (char)c, in_class);
        return LINNET_OK;
    case 'p':
    case 'P': return property(t, in_class);
    case 'v': /* for PCRE2 a class, for Oniguruma the vertical tab */
        strbuf_text(&t->out, "\\x0B");
        t->pos++;
        return LINNET_OK;
    case 'u':
        for (size_t i = 1; i <= 4; i++)
            if (!isxdigit((unsigned char)peek(t, i))) return refuse(t, "this \\u");
        strbuf_format(&t->out, "\\x{%.4s}", t->source + t->pos + 1);
        t->pos += 5;
        return LINNET_OK;
    default: break;
    }
    bool plain = c > 0x20 && c < 0x7F && (!isalnum(c) || strchr("nrtfeax", c));
    bool anchor = !in_class && c && strchr("AzZ", c);
    if (!plain && !anchor) return refuse(t, "the escape after \\");
    strbuf_char(&t->out, '\\');
    strbuf_char(&t->out, (char)c);
    t->pos++;
    return LINNET_OK;
}

static linnet_status character_class(struct translator *t)
{
    strbuf_char(&t->out, '[');
    t->pos++;
    if (peek(t, 0) == '^') {
        strbuf_char(&t->out, '^');
        t->pos++;
    }
    while (t->pos < t->size && t->source[t->pos] != ']') {
        char c = t->source[t->pos];
        if (c == '[') return refuse(t, "[ inside [ ]");
        if (c == '&' && peek(t, 1) == '&') return refuse(t, "&& inside [ ]");
        if (c == '\\') {
            linnet_status status = escape(t, true);
            if (status != LINNET_OK) return status;
            continue;
        }
        strbuf_char(&t->out, c);
        t->pos++;
    }
    if (t->pos == t->size) return refuse(t, "[ without ]");
    strbuf_char(&t->out, ']');
    t->pos++;
    return LINNET_OK;
}

static linnet_status open_group(struct translator *t)
{
    static const char *const kinds[] = {"(?i:", "(?i)", "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
    if (peek(t, 1) != '?') {
        if (t->depth == GROUP_LIMIT) return refuse(t, "deep nesting");
        t->groups[t->depth++] = t->out.size;
        strbuf_text(&t->out, "(?:"); /* nobody asks for what a group captured */
        t->pos++;
        return LINNET_OK;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        size_t n = strlen(kinds[i]);
        if (t->size - t->pos < n || memcmp(t->source + t->pos, kinds[i], n) != 0) continue;
        if (kinds[i][n - 1] != ')') {
            if (t->depth == GROUP_LIMIT) return refuse(t, "deep nesting");
            t->groups[t->depth++] = t->out.size;
        }
        strbuf_text(&t->out, kinds[i]);
        t->pos += n;
        return LINNET_OK;
    }
    return refuse(t, "this kind of ( )");
}

/* {2}, {2,}, {2,5} or {,5}; anything else is plain text. Oniguruma's {2}+ repeats the whole,
 * PCRE2's is possessive. */
static void interval(struct translator *t)
{
    size_t n = 1;
    bool from_zero = peek(t, 1) == ','; /* {,5}: for PCRE2 plain text */
    n += from_zero;
    while (isdigit((unsigned char)peek(t, n)) || (!from_zero && peek(t, n) == ',')) n++;
    if (n == 1 + (size_t)from_zero || peek(t, n) != '}') {
        t->atom = t->out.size;
        strbuf_text(&t->out, "\\{");
        t->pos++;
        return;
    }
    n++;
    bool repeated = peek(t, n) == '+';
    if (repeated && !t->out.failed) {
        size_t atom_size = t->out.size - t->atom;
        strbuf_text(&t->out, "(?:");
        if (t->out.failed) return;
        memmove(t->out.data + t->atom + 3, t->out.data + t->atom, atom_size);
        memcpy(t->out.data + t->atom, "(?:", 3);
    }
    strbuf_text(&t->out, from_zero ? "{0" : "{");
    strbuf_append(&t->out, t->source + t->pos + 1, n - 1);
    if (repeated) strbuf_char(&t->out, ')');
    t->pos += n;
}

static linnet_status translate(struct translator *t)
{
    while (t->pos < t->size) {
        char c = t->source[t->pos];
        size_t before = t->out.size;
        linnet_status status = LINNET_OK;
        if (c == '\\') {
            status = escape(t, false);
            t->atom = before;
        } else if (c == '[') {
            status = character_class(t);
            t->atom = before;
        } else if (c == '(') {
            status = open_group(t);
        } else if (c == ')') {
            if (t->depth == 0) return refuse(t, ") without (");
            t->atom = t->groups[--t->depth];
            strbuf_char(&t->out, ')');
            t->pos++;
        } else if (c == '{') {
            interval(t);
        } else {
            bool starts_atom = ((unsigned char)c & 0xC0) != 0x80 && !(c && strchr("*+?|", c));
            if (starts_atom) t->atom = before;
            strbuf_char(&t->out, c);
            t->pos++;
        }
        if (status != LINNET_OK) return status;
    }
    return t->out.failed ? error_memory(t->err, "a regular expression", t->size) : LINNET_OK;
}

linnet_status pattern_compile(struct pattern *p, const char *source, size_t n, linnet_error *err)
{
    struct translator t = {.source = source, .size = n, .err = err};
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    linnet_status status = context ? translate(&t) : error_memory(err, "PCRE2", 0);
    if (status == LINNET_OK) {
        int code;
        size_t offset;
        pcre2_set_newline(context, PCRE2_NEWLINE_LF);
        p->code = pcre2_compile((PCRE2_SPTR)strbuf_cstr(&t.out), t.out.size,
                                PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                                &code, &offset, context);
        if (!p->code) {
            char reason[128] = "";
            pcre2_get_error_message(code, (PCRE2_UCHAR *)reason, sizeof reason);
            status = error_set(err, LINNET_UNSUPPORTED, "regular expression: %s", reason);
        } else {
            pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); /* without, the interpreter works */
        }
    }
    pcre2_compile_context_free(context);
    strbuf_free(&t.out);
    return status;
}

linnet_status pattern_literal(struct pattern *p, const char *bytes, size_t n, linnet_error *err)
{
    if (n == 0) return error_set(err, LINNET_UNSUPPORTED, "a pattern is the empty string");
    strbuf_append(&p->literal, bytes, n);
    return p->literal.failed ? error_memory(err, "a pattern", n) : LINNET_OK;
}

void pattern_free(struct pattern *p)
{
    pcre2_code_free(p->code);
    strbuf_free(&p->literal);
    p->code = NULL;
}

linnet_status matcher_create(struct matcher *m, linnet_error *err)
{
    m->data = pcre2_match_data_create(1, NULL);
    m->context = pcre2_match_context_create(NULL);
    if (!m->data || !m->context) return error_memory(err, "PCRE2", 0);
    return LINNET_OK;
}

void matcher_free(struct matcher *m)
{
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->context);
}

linnet_status pattern_find(const struct pattern *p, struct matcher *m, const char *text, size_t n,
                           size_t from, size_t *begin, size_t *end, linnet_error *err)
{
    *begin = *end = n + 1;
    if (!p->code) {
        const char *at = memmem(text + from, n - from, p->literal.data, p->literal.size);
        if (!at) return LINNET_OK;
        *begin = (size_t)(at - text);
        *end = *begin + p->literal.size;
        return LINNET_OK;
    }
    uint32_t options = PCRE2_NO_UTF_CHECK;
    int rc = pcre2_match(p->code, (PCRE2_SPTR)text, n, from, options, m->data, m->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter backtracks on the heap */
        rc = pcre2_match(p->code, (PCRE2_SPTR)text, n, from, options | PCRE2_NO_JIT, m->data,
                         m->context);
    if (rc == PCRE2_ERROR_NOMATCH) return LINNET_OK;
    if (rc == PCRE2_ERROR_NOMEMORY || rc == PCRE2_ERROR_HEAPLIMIT)
        return error_memory(err, "a regular expression", n);
    if (rc < 0)
        return error_set(err, LINNET_UNSUPPORTED,
                         "the tokenizer's regular expression takes too long on this text");
    const size_t *found = pcre2_get_ovector_pointer(m->data);
    *begin = found[0];
    *end = found[1];
    return LINNET_OK;
}
