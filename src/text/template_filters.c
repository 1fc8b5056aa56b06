/* Filters of single values: texts and numbers. Those of sequences are in template_sequence.c. */
#include <math.h>
#include <string.h>

#include "text/template_internal.h"

typedef const struct arguments *args_t;

static bool no_arguments(struct run *r, const char *what, args_t args)
{
    return jinja_bind(r, what, args, NULL, 0, 0, NULL);
}

/* ---- texts ------------------------------------------------------------------------------- */

static bool filter_string(struct run *r, struct value v, args_t args, struct value *out)
{
    *out = (struct value){.kind = VALUE_STRING};
    return no_arguments(r, "string", args) && jinja_string(r, v, &out->text);
}

static bool filter_upper(struct run *r, struct value v, args_t args, struct value *out)
{
    struct text *text;
    return no_arguments(r, "upper", args) && jinja_string(r, v, &text) && jinja_upper(r, text, out);
}

static bool filter_lower(struct run *r, struct value v, args_t args, struct value *out)
{
    struct text *text;
    return no_arguments(r, "lower", args) && jinja_string(r, v, &text) && jinja_lower(r, text, out);
}

static bool filter_title(struct run *r, struct value v, args_t args, struct value *out)
{
    struct text *text;
    return no_arguments(r, "title", args) && jinja_string(r, v, &text) &&
           jinja_title_filter(r, text, out);
}

static bool filter_capitalize(struct run *r, struct value v, args_t args, struct value *out)
{
    struct text *text;
    return no_arguments(r, "capitalize", args) && jinja_string(r, v, &text) &&
           jinja_capitalize(r, text, out);
}

static bool filter_trim(struct run *r, struct value v, args_t args, struct value *out)
{
    struct text *text;
    if (!jinja_string(r, v, &text)) return false;
    struct value self = {.kind = VALUE_STRING, .text = text};
    if (!jinja_find_method(self, "strip")->apply(r, self, args, out)) return false;
    out->text->markup = text->markup;
    return true;
}

static bool filter_replace(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"old", "new", "count"};
    struct value slots[3];
    struct text *text, *old, *replacement;
    int64_t limit = -1;
    if (!jinja_bind(r, "replace", args, names, 3, 2, slots) || !jinja_string(r, v, &text) ||
        !jinja_string(r, slots[0], &old) || !jinja_string(r, slots[1], &replacement))
        return false;
    if (slots[2].kind != VALUE_ABSENT && slots[2].kind != VALUE_NONE &&
        !jinja_need_int(r, "replace", slots[2], &limit))
        return false;
    return jinja_replace(r, text, old, replacement, limit, out);
}

static bool filter_safe(struct run *r, struct value v, args_t args, struct value *out)
{
    struct text *text;
    if (!no_arguments(r, "safe", args) || !jinja_string(r, v, &text) ||
        !jinja_subtext(r, text, 0, text->size, out))
        return false;
    out->text->markup = true;
    return true;
}

static bool filter_escape(struct run *r, struct value v, args_t args, struct value *out)
{
    struct text *text;
    struct builder b = {0};
    if (!no_arguments(r, "escape", args) || !jinja_string(r, v, &text)) return false;
    size_t plain = 0;
    for (size_t i = 0; !text->markup && i < text->size; i++) {
        const char *entity = NULL;
        switch (text->bytes[i]) {
        case '&': entity = "&amp;"; break;
        case '<': entity = "&lt;"; break;
        case '>': entity = "&gt;"; break;
        case '"': entity = "&#34;"; break;
        case '\'': entity = "&#39;"; break;
        default: continue;
        }
        if (!build_text(r, &b, text, plain, i) ||
            !build(r, &b, entity, strlen(entity), text_untrusted(text, i)))
            return false;
        plain = i + 1;
    }
    if (!build_text(r, &b, text, plain, text->size) || !build_done(r, &b, out)) return false;
    out->text->markup = true;
    return true;
}

static bool indent_lines(struct run *r, struct builder *b, const struct text *t,
                         const struct text *indent, bool first, bool blank)
{
    struct value self = {.kind = VALUE_STRING, .text = (struct text *)t}, lines, with_newline;
    static const struct arguments none = {0};
    struct text newline = {.bytes = "\n", .size = 1};
    if (!jinja_concat(r, t, &newline, &with_newline)) return false;
    self = with_newline;
    if (!jinja_find_method(self, "splitlines")->apply(r, self, &none, &lines)) return false;
    for (size_t i = 0; i < lines.list->count; i++) {
        const struct text *line = lines.list->items[i].text;
        if (i && !build(r, b, "\n", 1, false)) return false;
        if ((i ? blank || line->size : first) && !build_text(r, b, indent, 0, indent->size))
            return false;
        if (!build_text(r, b, line, 0, line->size)) return false;
    }
    return true;
}

static bool filter_indent(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"width", "first", "blank"};
    struct value slots[3], blanks;
    struct text *text;
    struct builder b = {0};
    int64_t width = 4;
    if (!jinja_bind(r, "indent", args, names, 3, 0, slots) ||
        !jinja_need_text(r, "indent", v, &text))
        return false;
    if (slots[0].kind != VALUE_STRING) {
        if (slots[0].kind != VALUE_ABSENT && !jinja_need_int(r, "indent", slots[0], &width))
            return false;
        if (width < 0) width = 0;
        if (width > 1000) return jinja_fail(r, "indent: a width of more than 1000");
        char *bytes = jinja_array(r, (size_t)width, 1);
        if (!bytes) return false;
        memset(bytes, ' ', (size_t)width);
        if (!jinja_text(r, bytes, (size_t)width, false, &blanks)) return false;
        slots[0] = blanks;
    }
    return indent_lines(r, &b, text, slots[0].text, value_truth(slots[1]), value_truth(slots[2])) &&
           build_done(r, &b, out);
}

static bool filter_format(struct run *r, struct value v, args_t args, struct value *out)
{
    struct text *text;
    struct value tuple;
    if (args->n_keywords) return jinja_fail(r, "format: keyword arguments are not supported");
    if (!jinja_string(r, v, &text) || !jinja_new_list(r, VALUE_TUPLE, args->count, &tuple))
        return false;
    if (args->count) memcpy(tuple.list->items, args->items, args->count * sizeof *args->items);
    return jinja_format_percent(r, text, tuple, out);
}

/* ---- numbers ----------------------------------------------------------------------------- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Blanks and single underscores between digits dropped, as Python's int() and float() allow. */
static size_t clean_number(const struct text *t, char *out, size_t room)
{
    size_t begin = text_skip_space(t->bytes, 0, t->size), n = 0;
    size_t end = text_back_over_space(t->bytes, begin, t->size);
    for (size_t i = begin; i < end; i++) {
        bool inner =
            i > begin && i + 1 < end && is_digit(t->bytes[i - 1]) && is_digit(t->bytes[i + 1]);
        if (t->bytes[i] == '_' && inner) continue;
        if (n + 1 >= room) return 0;
        out[n++] = t->bytes[i];
    }
    out[n] = 0;
    return n;
}

static bool parse_int(const struct text *t, int64_t base, int64_t *out)
{
    char text[128];
    size_t n = clean_number(t, text, sizeof text), i = 0;
    bool negative = text[0] == '-' && n > 0, any = false;
    if (n == 0) return false;
    if (text[0] == '-' || text[0] == '+') i++;
    int64_t prefix = 0;
    if (i + 1 < n && text[i] == '0') {
        char kind = (char)(text[i + 1] | 0x20);
        prefix = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 0;
    }
    if (prefix && (base == prefix || base == 0)) i += 2;
    if (base == 0) base = prefix ? prefix : 10;
    for (*out = 0; i < n; i++, any = true) {
        char c = (char)(text[i] | 0x20);
        int value = is_digit(text[i]) ? text[i] - '0' : c >= 'a' && c <= 'z' ? c - 'a' + 10 : 99;
        if (value >= base || __builtin_mul_overflow(*out, base, out) ||
            __builtin_sub_overflow(*out, value, out))
            return false;
    }
    return any && (negative || !__builtin_sub_overflow((int64_t)0, *out, out));
}

static bool parse_float(const struct text *t, double *out)
{
    char text[400];
    size_t n = clean_number(t, text, sizeof text);
    bool ok, sign = text[0] == '-' || text[0] == '+';
    if (n == 0) return false;
    /* strtod knows more spellings (hexadecimal, "nan(1)") than Python does */
    bool plain = strspn(text + sign, "0123456789.eE+-") == n - sign;
    char word[12] = {0};
    for (size_t i = sign; i < n && i - sign < sizeof word - 1; i++)
        word[i - sign] = (char)(text[i] | 0x20);
    if (!plain && strcmp(word, "inf") != 0 && strcmp(word, "infinity") != 0 &&
        strcmp(word, "nan") != 0)
        return false;
    *out = float_parse(text, n, &ok);
    return ok;
}

static bool float_to_int(double f, int64_t *out)
{
    if (!(f > -0x1p63 && f < 0x1p63)) return false;
    *out = (int64_t)f;
    return true;
}

static bool filter_int(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"default", "base"};
    struct value slots[2];
    int64_t i, base = 10;
    double f;
    if (!jinja_bind(r, "int", args, names, 2, 0, slots)) return false;
    if (slots[1].kind != VALUE_ABSENT && !jinja_need_int(r, "int", slots[1], &base)) return false;
    if (v.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, v);
    if (base != 0 && (base < 2 || base > 36)) return jinja_fail(r, "int: a base from 2 to 36");
    bool ok = value_is_integer(v, &i);
    if (v.kind == VALUE_FLOAT) ok = float_to_int(v.real, &i);
    if (v.kind == VALUE_FLOAT && !ok && isfinite(v.real))
        return jinja_fail(r, "an integer does not fit in 64 bits");
    if (v.kind == VALUE_STRING)
        ok = parse_int(v.text, base, &i) || (parse_float(v.text, &f) && float_to_int(f, &i));
    *out = ok ? value_int(i) : slots[0].kind == VALUE_ABSENT ? value_int(0) : slots[0];
    return true;
}

static bool filter_float(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"default"};
    struct value slot;
    double f;
    if (!jinja_bind(r, "float", args, names, 1, 0, &slot)) return false;
    if (v.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, v);
    bool ok = value_is_number(v, &f) || (v.kind == VALUE_STRING && parse_float(v.text, &f));
    *out = ok ? value_float(f) : slot.kind == VALUE_ABSENT ? value_float(0) : slot;
    return true;
}

static bool filter_abs(struct run *r, struct value v, args_t args, struct value *out)
{
    int64_t i;
    if (!no_arguments(r, "abs", args)) return false;
    if (v.kind == VALUE_FLOAT) {
        *out = value_float(fabs(v.real));
        return true;
    }
    if (v.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, v);
    if (!jinja_need_int(r, "abs", v, &i)) return false;
    if (i < 0 && __builtin_sub_overflow((int64_t)0, i, &i))
        return jinja_fail(r, "an integer does not fit in 64 bits");
    *out = value_int(i);
    return true;
}

/* Correctly rounded decimal digits, half to even: what printf gives. */
static double round_digits(double f, int64_t precision)
{
    char text[400];
    bool ok;
    if (!isfinite(f) || precision > 300) return f;
    if (precision < -300) return copysign(0, f);
    if (precision < 0) {
        double unit = pow(10, (double)-precision);
        return rint(f / unit) * unit;
    }
    int n = snprintf(text, sizeof text, "%.*f", (int)precision, f);
    if (n < 0 || (size_t)n >= sizeof text) return f;
    double rounded = float_parse(text, (size_t)n, &ok);
    return ok ? rounded : f;
}

static bool filter_round(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"precision", "method"};
    struct value slots[2];
    int64_t precision = 0;
    double f;
    if (!jinja_bind(r, "round", args, names, 2, 0, slots)) return false;
    if (slots[0].kind != VALUE_ABSENT && !jinja_need_int(r, "round", slots[0], &precision))
        return false;
    if (v.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, v);
    if (!value_is_number(v, &f)) return jinja_fail(r, "round needs a number");
    const struct text *method = slots[1].kind == VALUE_STRING ? slots[1].text : NULL;
    if (!method && slots[1].kind != VALUE_ABSENT)
        return jinja_fail(r, "round: method must be common, ceil or floor");
    if (!method || text_equals(method, "common")) {
        bool whole = v.kind != VALUE_FLOAT;
        if (whole && precision < 0)
            return jinja_fail(r, "round: an integer to a negative precision is not supported");
        *out = whole ? v : value_float(round_digits(f, precision));
        return true;
    }
    bool ceiling = text_equals(method, "ceil");
    if (!ceiling && !text_equals(method, "floor"))
        return jinja_fail(r, "round: method must be common, ceil or floor");
    double unit = pow(10, (double)precision);
    *out = value_float((ceiling ? ceil(f * unit) : floor(f * unit)) / unit);
    return true;
}

/* ---- others ------------------------------------------------------------------------------ */

static bool filter_default(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"default_value", "boolean"};
    struct value slots[2];
    if (!jinja_bind(r, "default", args, names, 2, 0, slots)) return false;
    bool use = v.kind == VALUE_UNDEFINED || (value_truth(slots[1]) && !value_truth(v));
    *out = v;
    if (!use) return true;
    *out = slots[0];
    return slots[0].kind != VALUE_ABSENT || jinja_literal(r, "", out);
}

static bool filter_length(struct run *r, struct value v, args_t args, struct value *out)
{
    size_t n;
    if (!no_arguments(r, "length", args) || !jinja_length(r, v, &n)) return false;
    *out = value_int((int64_t)n);
    return true;
}

static bool filter_attr(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"name"};
    struct value slot;
    struct text *name;
    char copy[64];
    if (!jinja_bind(r, "attr", args, names, 1, 1, &slot) ||
        !jinja_need_text(r, "attr", slot, &name))
        return false;
    *out = value_undefined("attribute");
    if (v.kind == VALUE_DICT && name->size < sizeof copy) { /* keys are no attributes */
        if (name->size) memcpy(copy, name->bytes, name->size);
        copy[name->size] = 0;
        if (!jinja_find_method(v, copy)) return true;
    }
    return jinja_item(r, v, slot, out);
}

static const struct filter filters[] = {
    {"tojson", jinja_tojson},
    {"trim", filter_trim},
    {"length", filter_length},
    {"count", filter_length},
    {"default", filter_default},
    {"d", filter_default},
    {"string", filter_string},
    {"upper", filter_upper},
    {"lower", filter_lower},
    {"title", filter_title},
    {"capitalize", filter_capitalize},
    {"replace", filter_replace},
    {"indent", filter_indent},
    {"safe", filter_safe},
    {"escape", filter_escape},
    {"e", filter_escape},
    {"format", filter_format},
    {"int", filter_int},
    {"float", filter_float},
    {"abs", filter_abs},
    {"round", filter_round},
    {"attr", filter_attr},
    {0},
};

const struct filter *jinja_find_filter(const char *name)
{
    for (const struct filter *f = filters; f->name; f++)
        if (strcmp(f->name, name) == 0) return f;
    for (const struct filter *f = jinja_sequence_filters; f->name; f++)
        if (strcmp(f->name, name) == 0) return f;
    return NULL;
}
