/* The tojson filter: Python's json.dumps(x, ensure_ascii, indent, separators, sort_keys). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "text/template_internal.h"

struct dump {
    struct run *r;
    struct builder b;
    bool ensure_ascii, sort_keys, pretty;
    const struct text *indent, *item_separator, *key_separator;
};

static bool literal(struct dump *d, const char *text)
{
    return build(d->r, &d->b, text, strlen(text), false);
}

static bool part(struct dump *d, const struct text *t)
{
    return build_text(d->r, &d->b, t, 0, t->size);
}

static bool new_line(struct dump *d, int depth)
{
    if (!d->pretty) return true;
    if (!literal(d, "\n")) return false;
    for (int i = 0; i < depth; i++)
        if (!part(d, d->indent)) return false;
    return true;
}

static bool escape(struct dump *d, int32_t c, bool untrusted)
{
    static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
    char text[16];
    const char *simple = c > 0 && c < 0x80 ? strchr(from, c) : NULL;
    if (simple)
        snprintf(text, sizeof text, "\\%c", to[simple - from]);
    else if (c < 0x10000)
        snprintf(text, sizeof text, "\\u%04x", (unsigned)c);
    else
        snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xD800 + ((unsigned)(c - 0x10000) >> 10),
                 0xDC00 + ((unsigned)c & 0x3FF));
    return build(d->r, &d->b, text, strlen(text), untrusted);
}

static bool dump_text(struct dump *d, const struct text *t)
{
    size_t plain = 0, at = 0;
    if (!literal(d, "\"")) return false;
    while (at < t->size) {
        int32_t c = (unsigned char)t->bytes[at];
        size_t n = c < 0x80 ? 1 : template_decode(t->bytes, t->size, at, &c);
        if (c < 0x20 || c == '"' || c == '\\' || (c > 0x7E && d->ensure_ascii)) {
            if (!build_text(d->r, &d->b, t, plain, at) || !escape(d, c, text_untrusted(t, at)))
                return false;
            plain = at + n;
        }
        at += n;
    }
    return build_text(d->r, &d->b, t, plain, at) && literal(d, "\"");
}

static bool dump_scalar(struct dump *d, struct value v)
{
    char text[FLOAT_TEXT];
    switch (v.kind) {
    case VALUE_NONE: return literal(d, "null");
    case VALUE_BOOL: return literal(d, v.boolean ? "true" : "false");
    case VALUE_INT:
        snprintf(text, sizeof text, "%lld", (long long)v.integer);
        return literal(d, text);
    case VALUE_FLOAT:
        if (isnan(v.real)) return literal(d, "NaN");
        if (isinf(v.real)) return literal(d, v.real < 0 ? "-Infinity" : "Infinity");
        float_repr(v.real, text);
        return literal(d, text);
    default: return jinja_fail(d->r, "tojson: %s has no JSON form", value_type_name(v));
    }
}

static bool dump_value(struct dump *d, struct value v, int depth);

static bool dump_list(struct dump *d, const struct list *list, int depth)
{
    if (list->count == 0) return literal(d, "[]");
    if (!literal(d, "[")) return false;
    for (size_t i = 0; i < list->count; i++) {
        if (i && !part(d, d->item_separator)) return false;
        if (!new_line(d, depth + 1) || !dump_value(d, list->items[i], depth + 1)) return false;
    }
    return new_line(d, depth) && literal(d, "]");
}

static bool dump_key(struct dump *d, struct value key)
{
    if (key.kind == VALUE_STRING) return dump_text(d, key.text);
    if (key.kind == VALUE_TUPLE) return jinja_fail(d->r, "tojson: a tuple cannot be a key");
    return literal(d, "\"") && dump_scalar(d, key) && literal(d, "\"");
}

static bool sort_pairs(struct run *r, struct pair *pairs, size_t count)
{
    /* Merge sort: stable, and an error can end it. */
    if (count < 2) return true;
    size_t half = count / 2;
    struct pair *merged = jinja_array(r, count, sizeof *merged);
    if (!merged || !jinja_work(r, count)) return false;
    if (!sort_pairs(r, pairs, half) || !sort_pairs(r, pairs + half, count - half)) return false;
    for (size_t i = 0, a = 0, b = half; i < count; i++) {
        bool second = a == half;
        if (a < half && b < count && !jinja_less(r, pairs[b].key, pairs[a].key, &second))
            return false;
        merged[i] = second ? pairs[b++] : pairs[a++];
    }
    memcpy(pairs, merged, count * sizeof *pairs);
    return true;
}

static bool dump_dict(struct dump *d, const struct dict *dict, int depth)
{
    struct pair *pairs = dict->pairs;
    if (dict->count == 0) return literal(d, "{}");
    if (d->sort_keys) {
        pairs = jinja_array(d->r, dict->count, sizeof *pairs);
        if (!pairs) return false;
        memcpy(pairs, dict->pairs, dict->count * sizeof *pairs);
        if (!sort_pairs(d->r, pairs, dict->count)) return false;
    }
    if (!literal(d, "{")) return false;
    for (size_t i = 0; i < dict->count; i++) {
        if (i && !part(d, d->item_separator)) return false;
        if (!new_line(d, depth + 1) || !dump_key(d, pairs[i].key) || !part(d, d->key_separator) ||
            !dump_value(d, pairs[i].value, depth + 1))
            return false;
    }
    return new_line(d, depth) && literal(d, "}");
}

static bool dump_value(struct dump *d, struct value v, int depth)
{
    if (depth > MAX_VALUE_DEPTH)
        return jinja_fail(d->r, "tojson: a value is nested deeper than %d", MAX_VALUE_DEPTH);
    if (!jinja_work(d->r, 1)) return false;
    switch (v.kind) {
    case VALUE_STRING: return dump_text(d, v.text);
    case VALUE_LIST:
    case VALUE_TUPLE: return dump_list(d, v.list, depth);
    case VALUE_DICT: return dump_dict(d, v.dict, depth);
    default: return dump_scalar(d, v);
    }
}

static bool set_indent(struct dump *d, struct value indent)
{
    struct value text;
    int64_t width;
    if (indent.kind == VALUE_STRING) {
        d->indent = indent.text;
        return true;
    }
    if (!jinja_need_int(d->r, "tojson: indent", indent, &width)) return false;
    if (width > 1000) return jinja_fail(d->r, "tojson: an indent of more than 1000");
    if (width < 0) width = 0;
    char *blanks = jinja_array(d->r, (size_t)width, 1);
    if (!blanks) return false;
    memset(blanks, ' ', (size_t)width);
    if (!jinja_text(d->r, blanks, (size_t)width, false, &text)) return false;
    d->indent = text.text;
    return true;
}

bool jinja_tojson(struct run *r, struct value input, const struct arguments *args,
                  struct value *out)
{
    static const char *const names[] = {"ensure_ascii", "indent", "separators", "sort_keys"};
    struct value slots[4], text;
    struct dump d = {.r = r};
    if (!jinja_bind(r, "tojson", args, names, 4, 0, slots)) return false;
    d.ensure_ascii = value_truth(slots[0]);
    d.sort_keys = value_truth(slots[3]);
    d.pretty = slots[1].kind != VALUE_ABSENT && slots[1].kind != VALUE_NONE;
    if (d.pretty && !set_indent(&d, slots[1])) return false;
    if (!jinja_literal(r, d.pretty ? "," : ", ", &text)) return false;
    d.item_separator = text.text;
    if (!jinja_literal(r, ": ", &text)) return false;
    d.key_separator = text.text;
    if (slots[2].kind != VALUE_ABSENT && slots[2].kind != VALUE_NONE) {
        const struct value *items;
        size_t count;
        if (!jinja_items(r, slots[2], &items, &count)) return false;
        if (count != 2 || items[0].kind != VALUE_STRING || items[1].kind != VALUE_STRING)
            return jinja_fail(r, "tojson: separators must be two strings");
        d.item_separator = items[0].text;
        d.key_separator = items[1].text;
    }
    return dump_value(&d, input, 0) && build_done(r, &d.b, out);
}
