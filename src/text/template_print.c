/* Values as Python's str() and repr() print them. */
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "text/template_internal.h"

/* ---- floats ------------------------------------------------------------------------------ */

/* The C library writes and reads the decimal point of the host program's locale. */
static char decimal_point(void)
{
    const struct lconv *l = localeconv();
    return l && l->decimal_point && l->decimal_point[0] ? l->decimal_point[0] : '.';
}

double float_parse(const char *text, size_t size, bool *ok)
{
    char copy[400], point = decimal_point(), *end;
    *ok = size > 0 && size < sizeof copy;
    if (!*ok) return 0;
    for (size_t i = 0; i < size; i++) copy[i] = text[i] == '.' ? point : text[i];
    copy[size] = 0;
    double f = strtod(copy, &end);
    *ok = end == copy + size;
    return f;
}

/* The shortest digits that read back as f: their count, and the decimal exponent of the first. */
static int shortest_digits(double f, char digits[20], int *exponent)
{
    char text[FLOAT_TEXT];
    for (int precision = 0;; precision++) {
        snprintf(text, sizeof text, "%.*e", precision, f);
        if (precision == 16 || strtod(text, NULL) == f) break;
    }
    int n = 0;
    const char *e = strchr(text, 'e');
    for (const char *c = text; c < e; c++)
        if (*c >= '0' && *c <= '9') digits[n++] = *c;
    *exponent = atoi(e + 1);
    while (n > 1 && digits[n - 1] == '0') n--;
    return n;
}

size_t float_repr(double f, char out[FLOAT_TEXT])
{
    if (isnan(f)) return (size_t)snprintf(out, FLOAT_TEXT, "nan");
    if (isinf(f)) return (size_t)snprintf(out, FLOAT_TEXT, f < 0 ? "-inf" : "inf");
    char digits[20];
    int exponent, at = 0, n = shortest_digits(fabs(f), digits, &exponent);
    if (signbit(f)) out[at++] = '-';
    if (exponent < -4 || exponent >= 16) {
        out[at++] = digits[0];
        if (n > 1) out[at++] = '.';
        for (int i = 1; i < n; i++) out[at++] = digits[i];
        return (size_t)(at +
                        snprintf(out + at, 8, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent)));
    }
    if (exponent < 0) {
        out[at++] = '0';
        out[at++] = '.';
        for (int i = -1; i > exponent; i--) out[at++] = '0';
    }
    for (int i = 0; i < n || i <= exponent + 1; i++) { /* at least one digit after the point */
        if (i == exponent + 1 && i > 0) out[at++] = '.';
        if (i < n || exponent >= 0) out[at++] = i < n ? digits[i] : '0';
    }
    out[at] = 0;
    return (size_t)at;
}

/* ---- everything else --------------------------------------------------------------------- */

static bool literal(struct run *r, struct builder *b, const char *text)
{
    return build(r, b, text, strlen(text), false);
}

static bool printable(int32_t c)
{
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP: return false;
    case UTF8PROC_CATEGORY_ZS: return c == ' ';
    default: return true;
    }
}

static bool print_text(struct run *r, struct builder *b, const struct text *t)
{
    bool single = memchr(t->bytes, '\'', t->size) && !memchr(t->bytes, '"', t->size);
    char quote = single ? '"' : '\'';
    if (!build(r, b, &quote, 1, false)) return false;
    for (size_t at = 0; at < t->size;) {
        int32_t c;
        size_t n = template_decode(t->bytes, t->size, at, &c);
        char escaped[12] = {0};
        if (c == quote || c == '\\')
            snprintf(escaped, sizeof escaped, "\\%c", (char)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            snprintf(escaped, sizeof escaped, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (!printable(c))
            snprintf(escaped, sizeof escaped,
                     c < 0x100     ? "\\x%02x"
                     : c < 0x10000 ? "\\u%04x"
                                   : "\\U%08x",
                     (unsigned)c);
        bool ok = escaped[0] ? build(r, b, escaped, strlen(escaped), text_untrusted(t, at))
                             : build_text(r, b, t, at, at + n);
        if (!ok) return false;
        at += n;
    }
    return build(r, b, &quote, 1, false);
}

static bool print_items(struct run *r, struct builder *b, const struct value *items, size_t count,
                        int depth)
{
    for (size_t i = 0; i < count; i++) {
        if (i && !literal(r, b, ", ")) return false;
        if (!jinja_print(r, b, items[i], true, depth)) return false;
    }
    return true;
}

static bool print_dict(struct run *r, struct builder *b, const struct dict *d, int depth)
{
    if (!literal(r, b, "{")) return false;
    for (size_t i = 0; i < d->count; i++) {
        if (i && !literal(r, b, ", ")) return false;
        if (!jinja_print(r, b, d->pairs[i].key, true, depth) || !literal(r, b, ": ") ||
            !jinja_print(r, b, d->pairs[i].value, true, depth))
            return false;
    }
    return literal(r, b, "}");
}

static bool print_view(struct run *r, struct builder *b, struct value v, int depth)
{
    static const char *const names[] = {"dict_keys([", "dict_values([", "dict_items(["};
    const struct value *items;
    size_t count;
    return jinja_items(r, v, &items, &count) && literal(r, b, names[v.view->of]) &&
           print_items(r, b, items, count, depth) && literal(r, b, "])");
}

static bool print_number(struct run *r, struct builder *b, struct value v)
{
    char text[FLOAT_TEXT];
    if (v.kind == VALUE_FLOAT)
        float_repr(v.real, text);
    else
        snprintf(text, sizeof text, "%lld", (long long)v.integer);
    return literal(r, b, text);
}

static bool print_range(struct run *r, struct builder *b, const struct range *range)
{
    char text[100];
    snprintf(text, sizeof text, range->step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)",
             (long long)range->start, (long long)range->stop, (long long)range->step);
    return literal(r, b, text);
}

bool jinja_print(struct run *r, struct builder *b, struct value v, bool repr, int depth)
{
    if (depth > MAX_VALUE_DEPTH) return jinja_fail(r, "a value is nested too deeply to print");
    if (!jinja_work(r, 1)) return false;
    switch (v.kind) {
    case VALUE_ABSENT:
    case VALUE_UNDEFINED: return literal(r, b, repr ? "Undefined" : "");
    case VALUE_NONE: return literal(r, b, "None");
    case VALUE_BOOL: return literal(r, b, v.boolean ? "True" : "False");
    case VALUE_INT:
    case VALUE_FLOAT: return print_number(r, b, v);
    case VALUE_STRING:
        return repr ? print_text(r, b, v.text) : build_text(r, b, v.text, 0, v.text->size);
    case VALUE_LIST:
        return literal(r, b, "[") && print_items(r, b, v.list->items, v.list->count, depth + 1) &&
               literal(r, b, "]");
    case VALUE_TUPLE:
        return literal(r, b, "(") && print_items(r, b, v.list->items, v.list->count, depth + 1) &&
               literal(r, b, v.list->count == 1 ? ",)" : ")");
    case VALUE_DICT: return print_dict(r, b, v.dict, depth + 1);
    case VALUE_VIEW: return print_view(r, b, v, depth + 1);
    case VALUE_RANGE: return print_range(r, b, v.range);
    case VALUE_NAMESPACE:
        return literal(r, b, "<Namespace ") && print_dict(r, b, v.dict, depth + 1) &&
               literal(r, b, ">");
    default: return jinja_fail(r, "%s cannot be printed", value_type_name(v));
    }
}

bool jinja_string(struct run *r, struct value v, struct text **out)
{
    struct builder b = {0};
    struct value text = v;
    if (v.kind != VALUE_STRING && (!jinja_print(r, &b, v, false, 0) || !build_done(r, &b, &text)))
        return false;
    *out = text.text;
    return true;
}
