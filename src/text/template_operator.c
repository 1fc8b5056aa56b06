/* Arithmetic of templates, as Python does it within 64 bits, and Python's "%" formatting. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "text/template_internal.h"

static bool overflow(struct run *r)
{
    return jinja_fail(r, "an integer does not fit in 64 bits");
}

static bool mismatch(struct run *r, int op, struct value a, struct value b)
{
    const char *name = op == OP_POWER ? "**" : op == OP_FLOOR_DIVIDE ? "//" : NULL;
    char single[2] = {(char)op, 0};
    if (a.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, a);
    if (b.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, b);
    return jinja_fail(r, "'%s' is not defined between %s and %s", name ? name : single,
                      value_type_name(a), value_type_name(b));
}

static bool integer_power(struct run *r, int64_t base, int64_t exponent, struct value *out)
{
    int64_t result = 1;
    if (exponent < 0) {
        if (base == 0) return jinja_fail(r, "0 cannot be raised to a negative power");
        *out = value_float(pow((double)base, (double)exponent));
        return true;
    }
    for (; exponent > 0; exponent >>= 1) {
        if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) return overflow(r);
        if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) return overflow(r);
    }
    *out = value_int(result);
    return true;
}

static bool integer_operation(struct run *r, int op, int64_t a, int64_t b, struct value *out)
{
    int64_t result;
    bool bad = false;
    switch (op) {
    case '+': bad = __builtin_add_overflow(a, b, &result); break;
    case '-': bad = __builtin_sub_overflow(a, b, &result); break;
    case '*': bad = __builtin_mul_overflow(a, b, &result); break;
    case OP_POWER: return integer_power(r, a, b, out);
    default:
        if (b == 0) return jinja_fail(r, "division by zero");
        if (op == '/') {
            *out = value_float((double)a / (double)b);
            return true;
        }
        if (b == -1) { /* the one quotient that can overflow */
            bad = op != '%' && __builtin_sub_overflow((int64_t)0, a, &result);
            if (op == '%') result = 0;
            break;
        }
        result = op == '%' ? a % b : a / b;
        if (a % b != 0 && (a % b < 0) != (b < 0)) result += op == '%' ? b : -1;
    }
    if (bad) return overflow(r);
    *out = value_int(result);
    return true;
}

static bool float_operation(struct run *r, int op, double a, double b, struct value *out)
{
    double remainder;
    switch (op) {
    case '+': *out = value_float(a + b); return true;
    case '-': *out = value_float(a - b); return true;
    case '*': *out = value_float(a * b); return true;
    case OP_POWER:
        if (a == 0 && b < 0) return jinja_fail(r, "0.0 cannot be raised to a negative power");
        if (a < 0 && b != floor(b)) return jinja_fail(r, "complex numbers are not supported");
        *out = value_float(pow(a, b));
        if (isinf(out->real) && isfinite(a) && isfinite(b))
            return jinja_fail(r, "a float is too large");
        return true;
    default: break;
    }
    if (b == 0) return jinja_fail(r, "division by zero");
    if (op == '/') {
        *out = value_float(a / b);
        return true;
    }
    remainder = fmod(a, b); /* then to the sign of b, as Python's divmod */
    double quotient = (a - remainder) / b;
    if (remainder != 0 && (remainder < 0) != (b < 0)) {
        remainder += b;
        quotient -= 1;
    } else if (remainder == 0) {
        remainder = copysign(0, b);
    }
    double whole = floor(quotient);
    if (quotient - whole > 0.5) whole += 1;
    if (quotient == 0) whole = copysign(0, a / b);
    *out = value_float(op == '%' ? remainder : whole);
    return true;
}

static bool repeat(struct run *r, struct value v, int64_t times, struct value *out)
{
    if (times < 0) times = 0;
    if (v.kind == VALUE_STRING) {
        struct builder b = {0};
        if (v.text->size == 0) times = 0;
        for (int64_t i = 0; i < times; i++)
            if (!build_text(r, &b, v.text, 0, v.text->size)) return false;
        return build_done(r, &b, out);
    }
    size_t n = v.list->count, total;
    if (!size_mul(n, (size_t)times, &total)) return jinja_fail_memory(r);
    if (!jinja_new_list(r, v.kind, total, out)) return false;
    for (size_t i = 0; i < total; i++) out->list->items[i] = v.list->items[i % n];
    return true;
}

static bool repeatable(struct value v)
{
    return v.kind == VALUE_STRING || v.kind == VALUE_LIST || v.kind == VALUE_TUPLE;
}

static bool add_texts(struct run *r, struct value a, struct value b, struct value *out)
{
    static const struct arguments none = {0};
    bool markup = a.text->markup || b.text->markup;
    const struct filter *escape = jinja_find_filter("escape");
    if (markup && !(escape->apply(r, a, &none, &a) && escape->apply(r, b, &none, &b))) return false;
    if (!jinja_concat(r, a.text, b.text, out)) return false;
    out->text->markup = markup;
    return true;
}

bool jinja_binary(struct run *r, int op, struct value a, struct value b, struct value *out)
{
    int64_t i, j;
    double x, y;
    if (op == '%' && a.kind == VALUE_STRING) return jinja_format_percent(r, a.text, b, out);
    if (value_is_integer(a, &i) && value_is_integer(b, &j))
        return integer_operation(r, op, i, j, out);
    if (value_is_number(a, &x) && value_is_number(b, &y)) return float_operation(r, op, x, y, out);
    if (op == '*' && repeatable(a) && value_is_integer(b, &j)) return repeat(r, a, j, out);
    if (op == '*' && repeatable(b) && value_is_integer(a, &i)) return repeat(r, b, i, out);
    if (op != '+' || a.kind != b.kind || !repeatable(a)) return mismatch(r, op, a, b);
    if (a.kind == VALUE_STRING) return add_texts(r, a, b, out);
    return jinja_concat_lists(r, a, b, out);
}

/* ---- "%s" % x ---------------------------------------------------------------------------- */

struct conversion {
    bool left, zero, plus, blank;
    int width, precision; /* -1: none */
    char kind;
};

static bool pad(struct run *r, struct builder *b, const struct conversion *c,
                const struct text *text)
{
    size_t length = utf8_count(text->bytes, text->size), sign = 0;
    size_t fill = c->width > 0 && (size_t)c->width > length ? (size_t)c->width - length : 0;
    bool zero = c->zero && !c->left && c->kind != 's' && c->kind != 'r';
    if (zero && text->size && strchr("+- ", text->bytes[0])) sign = 1;
    if (!build_text(r, b, text, 0, sign)) return false;
    for (size_t i = 0; !c->left && i < fill; i++)
        if (!build(r, b, zero ? "0" : " ", 1, false)) return false;
    if (!build_text(r, b, text, sign, text->size)) return false;
    for (size_t i = 0; c->left && i < fill; i++)
        if (!build(r, b, " ", 1, false)) return false;
    return true;
}

static bool convert(struct run *r, struct builder *b, const struct conversion *c, struct value v)
{
    struct value text;
    struct builder part = {0};
    char number[512], format[16];
    double f;
    int64_t i;
    const char *sign = c->plus ? "+" : c->blank ? " " : "";
    if (c->kind == 's' || c->kind == 'r') {
        if (!jinja_print(r, &part, v, c->kind == 'r', 0) || !build_done(r, &part, &text))
            return false;
        if (c->precision >= 0)
            text.text->size = utf8_offset(text.text->bytes, text.text->size, (size_t)c->precision);
        return pad(r, b, c, text.text);
    }
    if (!value_is_number(v, &f))
        return jinja_fail(r, "%%%c needs a number, not %s", c->kind, value_type_name(v));
    if (strchr("oxX", c->kind)) {
        if (!value_is_integer(v, &i) || i < 0)
            return jinja_fail(r, "%%%c needs an integer that is not negative", c->kind);
        const char *number_format = c->kind == 'o' ? "%llo" : c->kind == 'x' ? "%llx" : "%llX";
        snprintf(number, sizeof number, number_format, (unsigned long long)i);
    } else if (strchr("diu", c->kind)) {
        if (v.kind == VALUE_FLOAT && !(f > -0x1p63 && f < 0x1p63)) return overflow(r);
        if (!value_is_integer(v, &i)) i = (int64_t)f;
        snprintf(format, sizeof format, "%%%slld", sign);
        snprintf(number, sizeof number, format, (long long)i);
    } else {
        snprintf(format, sizeof format, "%%%s.*%c", sign, c->kind);
        snprintf(number, sizeof number, format, c->precision < 0 ? 6 : c->precision, f);
    }
    return jinja_text(r, number, strlen(number), false, &text) && pad(r, b, c, text.text);
}

static bool read_int(const struct text *t, size_t *at, int *out)
{
    if (*at >= t->size || t->bytes[*at] < '0' || t->bytes[*at] > '9') return true;
    for (*out = 0; *at < t->size && t->bytes[*at] >= '0' && t->bytes[*at] <= '9'; (*at)++) {
        *out = *out * 10 + (t->bytes[*at] - '0');
        if (*out > 200) return false;
    }
    return true;
}

static bool read_conversion(struct run *r, const struct text *t, size_t *at, struct conversion *c)
{
    *c = (struct conversion){.width = -1, .precision = -1};
    for (; *at < t->size && t->bytes[*at] && strchr("-0+ ", t->bytes[*at]); (*at)++) {
        c->left |= t->bytes[*at] == '-';
        c->zero |= t->bytes[*at] == '0';
        c->plus |= t->bytes[*at] == '+';
        c->blank |= t->bytes[*at] == ' ';
    }
    bool ok = read_int(t, at, &c->width);
    if (ok && *at < t->size && t->bytes[*at] == '.') {
        c->precision = 0;
        (*at)++;
        ok = read_int(t, at, &c->precision);
    }
    if (!ok) return jinja_fail(r, "a width or precision of more than 200 in a format");
    c->kind = *at < t->size ? t->bytes[*at] : 0;
    if (!c->kind || !strchr("srdiuoxXfFeEgG%", c->kind))
        return jinja_fail(r, "unsupported conversion in a format; use %%s or %%d");
    (*at)++;
    return true;
}

bool jinja_format_percent(struct run *r, const struct text *t, struct value argument,
                          struct value *out)
{
    struct builder b = {0};
    const struct value *items = &argument;
    size_t count = 1, used = 0, at = 0;
    if (argument.kind == VALUE_TUPLE) {
        items = argument.list->items;
        count = argument.list->count;
    }
    while (at < t->size) {
        const char *percent = memchr(t->bytes + at, '%', t->size - at);
        size_t end = percent ? (size_t)(percent - t->bytes) : t->size;
        struct conversion c;
        if (!build_text(r, &b, t, at, end)) return false;
        if (!percent) break;
        at = end + 1;
        if (!read_conversion(r, t, &at, &c)) return false;
        if (c.kind == '%') {
            if (!build(r, &b, "%", 1, text_untrusted(t, end))) return false;
            continue;
        }
        if (used == count) return jinja_fail(r, "not enough arguments for a format");
        if (!convert(r, &b, &c, items[used++])) return false;
    }
    if (used < count && argument.kind != VALUE_DICT && argument.kind != VALUE_LIST)
        return jinja_fail(r, "not all arguments were used by a format");
    return build_done(r, &b, out);
}
