/* Filters of sequences and dicts. */
#include <string.h>

#include "text/template_internal.h"

typedef const struct arguments *args_t;

static bool no_arguments(struct run *r, const char *what, args_t args)
{
    return jinja_bind(r, what, args, NULL, 0, 0, NULL);
}

/* ---- attributes by path ------------------------------------------------------------------ */

/* "a.b.0" of item; numbers are indices. An ABSENT or None path is the item itself. */
static bool by_path(struct run *r, struct value item, struct value path, struct value *out)
{
    *out = item;
    if (path.kind == VALUE_ABSENT || path.kind == VALUE_NONE) return true;
    if (path.kind != VALUE_STRING) return jinja_item(r, item, path, out);
    const struct text *t = path.text;
    for (size_t at = 0; at <= t->size;) {
        const char *dot = memchr(t->bytes + at, '.', t->size - at);
        size_t end = dot ? (size_t)(dot - t->bytes) : t->size;
        struct value key;
        int64_t index = 0;
        bool number = end > at && end - at < 10;
        for (size_t i = at; i < end; i++) {
            number &= t->bytes[i] >= '0' && t->bytes[i] <= '9';
            if (number) index = index * 10 + (t->bytes[i] - '0');
        }
        if (number)
            key = value_int(index);
        else if (!jinja_subtext(r, t, at, end, &key))
            return false;
        if (!jinja_item(r, *out, key, out)) return false;
        at = end + 1;
    }
    return true;
}

/* What items are compared by: the value at path, in small letters unless case matters. */
static bool sort_key(struct run *r, struct value item, struct value path, bool case_sensitive,
                     struct value *out)
{
    if (!by_path(r, item, path, out)) return false;
    return case_sensitive || out->kind != VALUE_STRING || jinja_lower(r, out->text, out);
}

/* A tuple of keys, for "a,b" as sort takes it. */
static bool sort_keys(struct run *r, struct value item, struct value path, bool case_sensitive,
                      struct value *out)
{
    if (path.kind != VALUE_STRING || !memchr(path.text->bytes, ',', path.text->size))
        return sort_key(r, item, path, case_sensitive, out);
    const struct text *t = path.text;
    size_t count = 1, n = 0;
    for (size_t i = 0; i < t->size; i++) count += t->bytes[i] == ',';
    if (!jinja_new_list(r, VALUE_TUPLE, count, out)) return false;
    for (size_t at = 0; n < count; n++) {
        const char *comma = memchr(t->bytes + at, ',', t->size - at);
        size_t end = comma ? (size_t)(comma - t->bytes) : t->size;
        struct value part;
        if (!jinja_subtext(r, t, at, end, &part) ||
            !sort_key(r, item, part, case_sensitive, &out->list->items[n]))
            return false;
        at = end + 1;
    }
    return true;
}

/* ---- sorting ----------------------------------------------------------------------------- */

struct keyed {
    struct value key, item;
};

/* Merge sort: stable; `reverse` keeps equal ones in order too, as Python's does. */
static bool merge_sort(struct run *r, struct keyed *a, struct keyed *spare, size_t n, bool reverse)
{
    if (n < 2) return true;
    size_t half = n / 2;
    if (!merge_sort(r, a, spare, half, reverse) ||
        !merge_sort(r, a + half, spare, n - half, reverse))
        return false;
    for (size_t i = 0, x = 0, y = half; i < n; i++) {
        bool second = x == half;
        if (x < half && y < n &&
            !(reverse ? jinja_less(r, a[x].key, a[y].key, &second)
                      : jinja_less(r, a[y].key, a[x].key, &second)))
            return false;
        spare[i] = second ? a[y++] : a[x++];
    }
    memcpy(a, spare, n * sizeof *a);
    return jinja_work(r, n);
}

static bool sorted(struct run *r, struct keyed *keyed, size_t count, bool reverse,
                   struct value *out)
{
    struct keyed *spare = jinja_array(r, count, sizeof *spare);
    if (!spare || !merge_sort(r, keyed, spare, count, reverse) ||
        !jinja_new_list(r, VALUE_LIST, count, out))
        return false;
    for (size_t i = 0; i < count; i++) out->list->items[i] = keyed[i].item;
    return true;
}

static bool filter_sort(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"reverse", "case_sensitive", "attribute"};
    struct value slots[3];
    const struct value *items;
    size_t count;
    if (!jinja_bind(r, "sort", args, names, 3, 0, slots) || !jinja_items(r, v, &items, &count))
        return false;
    struct keyed *keyed = jinja_array(r, count, sizeof *keyed);
    if (!keyed) return false;
    for (size_t i = 0; i < count; i++) {
        keyed[i].item = items[i];
        if (!sort_keys(r, items[i], slots[2], value_truth(slots[1]), &keyed[i].key)) return false;
    }
    return sorted(r, keyed, count, value_truth(slots[0]), out);
}

static bool need_dict(struct run *r, const char *what, struct value v)
{
    return v.kind == VALUE_DICT ||
           jinja_fail(r, "%s needs a dict, not %s", what, value_type_name(v));
}

static bool filter_dictsort(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"case_sensitive", "by", "reverse"};
    struct value slots[3], none = {.kind = VALUE_ABSENT};
    if (!jinja_bind(r, "dictsort", args, names, 3, 0, slots) || !need_dict(r, "dictsort", v))
        return false;
    const struct text *by = slots[1].kind == VALUE_STRING ? slots[1].text : NULL;
    bool by_value = by && text_equals(by, "value");
    if (slots[1].kind != VALUE_ABSENT && !by_value && !(by && text_equals(by, "key")))
        return jinja_fail(r, "dictsort: sort by 'key' or 'value'");
    struct keyed *keyed = jinja_array(r, v.dict->count, sizeof *keyed);
    if (!keyed) return false;
    for (size_t i = 0; i < v.dict->count; i++) {
        const struct pair *p = &v.dict->pairs[i];
        if (!jinja_pair(r, p->key, p->value, &keyed[i].item) ||
            !sort_key(r, by_value ? p->value : p->key, none, value_truth(slots[0]), &keyed[i].key))
            return false;
    }
    return sorted(r, keyed, v.dict->count, value_truth(slots[2]), out);
}

static bool filter_unique(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"case_sensitive", "attribute"};
    struct value slots[2], key, *found;
    const struct value *items;
    struct dict seen = {0};
    size_t count, n = 0;
    if (!jinja_bind(r, "unique", args, names, 2, 0, slots) || !jinja_items(r, v, &items, &count))
        return false;
    struct value *kept = jinja_array(r, count, sizeof *kept);
    if (!kept) return false;
    for (size_t i = 0; i < count; i++) {
        if (!sort_key(r, items[i], slots[1], value_truth(slots[0]), &key) ||
            !jinja_dict_find(r, &seen, key, &found))
            return false;
        if (found) continue;
        if (!jinja_dict_set(r, &seen, key, value_none())) return false;
        kept[n++] = items[i];
    }
    return jinja_new_iterator(r, kept, n, out);
}

static bool extreme(struct run *r, const char *what, struct value v, args_t args, bool largest,
                    struct value *out)
{
    static const char *const names[] = {"case_sensitive", "attribute"};
    struct value slots[2], best = {0}, key;
    const struct value *items;
    size_t count;
    if (!jinja_bind(r, what, args, names, 2, 0, slots) || !jinja_items(r, v, &items, &count))
        return false;
    *out = value_undefined("the extreme of an empty sequence");
    for (size_t i = 0; i < count; i++) {
        bool better = i == 0;
        if (!sort_key(r, items[i], slots[1], value_truth(slots[0]), &key)) return false;
        if (i && !(largest ? jinja_less(r, best, key, &better) : jinja_less(r, key, best, &better)))
            return false;
        if (!better) continue;
        best = key;
        *out = items[i];
    }
    return true;
}

static bool filter_min(struct run *r, struct value v, args_t args, struct value *out)
{
    return extreme(r, "min", v, args, false, out);
}

static bool filter_max(struct run *r, struct value v, args_t args, struct value *out)
{
    return extreme(r, "max", v, args, true, out);
}

static bool filter_sum(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"attribute", "start"};
    struct value slots[2], item;
    const struct value *items;
    size_t count;
    if (!jinja_bind(r, "sum", args, names, 2, 0, slots) || !jinja_items(r, v, &items, &count))
        return false;
    *out = slots[1].kind == VALUE_ABSENT ? value_int(0) : slots[1];
    if (out->kind == VALUE_STRING) return jinja_fail(r, "sum cannot add strings; use join");
    for (size_t i = 0; i < count; i++)
        if (!by_path(r, items[i], slots[0], &item) || !jinja_binary(r, '+', *out, item, out))
            return false;
    return true;
}

/* ---- choosing and changing --------------------------------------------------------------- */

static bool filter_map(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"attribute", "default"};
    const struct value *items;
    const struct filter *filter = NULL;
    struct value slots[2];
    struct arguments rest = *args;
    size_t count;
    if (!value_truth(v)) return jinja_new_iterator(r, NULL, 0, out);
    if (args->count == 0) {
        if (!jinja_bind(r, "map", args, names, 2, 1, slots)) return false;
    } else {
        struct text *name;
        char copy[32] = {0};
        if (!jinja_need_text(r, "map", args->items[0], &name)) return false;
        if (name->size < sizeof copy) memcpy(copy, name->bytes, name->size);
        filter = jinja_find_filter(copy);
        if (!filter) return jinja_fail(r, "map: unknown filter '%s'", copy);
        rest.items++;
        rest.count--;
    }
    if (!jinja_items(r, v, &items, &count)) return false;
    struct value *mapped = jinja_array(r, count, sizeof *mapped);
    if (!mapped || ++r->depth > MAX_DEPTH)
        return mapped && jinja_fail(r, "map: filters are nested too deeply");
    for (size_t i = 0; i < count; i++) {
        bool ok = filter ? filter->apply(r, items[i], &rest, &mapped[i])
                         : by_path(r, items[i], slots[0], &mapped[i]);
        if (!ok || !jinja_work(r, 1)) return false;
        if (!filter && mapped[i].kind == VALUE_UNDEFINED && slots[1].kind != VALUE_ABSENT &&
            slots[1].kind != VALUE_NONE)
            mapped[i] = slots[1];
    }
    r->depth--;
    return jinja_new_iterator(r, mapped, count, out);
}

/* select, reject, selectattr, rejectattr: items that pass a test, or are true. */
static bool choose(struct run *r, const char *what, struct value v, args_t args, bool by_attribute,
                   bool keep, struct value *out)
{
    const struct value *items;
    const struct test *test = NULL;
    struct arguments rest = *args;
    struct value path = {.kind = VALUE_ABSENT}, item;
    size_t count, n = 0;
    if (!value_truth(v)) return jinja_new_iterator(r, NULL, 0, out);
    if (by_attribute) {
        if (rest.count == 0) return jinja_fail(r, "%s needs the name of an attribute", what);
        path = *rest.items++;
        rest.count--;
    }
    if (rest.count) {
        struct text *name;
        char copy[32] = {0};
        if (!jinja_need_text(r, what, *rest.items, &name)) return false;
        if (name->size < sizeof copy) memcpy(copy, name->bytes, name->size);
        test = jinja_find_test(copy);
        if (!test) return jinja_fail(r, "%s: unknown test '%s'", what, copy);
        rest.items++;
        rest.count--;
    }
    if (!jinja_items(r, v, &items, &count)) return false;
    struct value *kept = jinja_array(r, count, sizeof *kept);
    if (!kept) return false;
    for (size_t i = 0; i < count; i++) {
        bool passes;
        if (!by_path(r, items[i], path, &item) || !jinja_work(r, 1)) return false;
        if (!test)
            passes = value_truth(item);
        else if (!jinja_check(r, test, item, &rest, &passes))
            return false;
        if (passes == keep) kept[n++] = items[i];
    }
    return jinja_new_iterator(r, kept, n, out);
}

static bool filter_select(struct run *r, struct value v, args_t args, struct value *out)
{
    return choose(r, "select", v, args, false, true, out);
}

static bool filter_reject(struct run *r, struct value v, args_t args, struct value *out)
{
    return choose(r, "reject", v, args, false, false, out);
}

static bool filter_selectattr(struct run *r, struct value v, args_t args, struct value *out)
{
    return choose(r, "selectattr", v, args, true, true, out);
}

static bool filter_rejectattr(struct run *r, struct value v, args_t args, struct value *out)
{
    return choose(r, "rejectattr", v, args, true, false, out);
}

static bool filter_join(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"d", "attribute"};
    struct value slots[2], item;
    const struct value *items;
    struct text *separator = NULL, *text;
    struct builder b = {0};
    size_t count;
    if (!jinja_bind(r, "join", args, names, 2, 0, slots) || !jinja_items(r, v, &items, &count))
        return false;
    if (slots[0].kind != VALUE_ABSENT && !jinja_string(r, slots[0], &separator)) return false;
    for (size_t i = 0; i < count; i++) {
        if (!by_path(r, items[i], slots[1], &item) || !jinja_string(r, item, &text)) return false;
        if (i && separator && !build_text(r, &b, separator, 0, separator->size)) return false;
        if (!build_text(r, &b, text, 0, text->size)) return false;
    }
    return build_done(r, &b, out);
}

static bool filter_first(struct run *r, struct value v, args_t args, struct value *out)
{
    const struct value *items;
    size_t count;
    if (!no_arguments(r, "first", args)) return false;
    *out = value_undefined("the first item of an empty sequence");
    if (v.kind == VALUE_STRING || v.kind == VALUE_LIST || v.kind == VALUE_TUPLE)
        return jinja_item(r, v, value_int(0), out);
    if (v.kind == VALUE_ITERATOR) { /* takes one, leaves the rest */
        struct iterator *it = v.iterator;
        if (it->position < it->count) *out = it->items[it->position++];
        return true;
    }
    if (!jinja_items(r, v, &items, &count)) return false;
    if (count) *out = items[0];
    return true;
}

static bool filter_last(struct run *r, struct value v, args_t args, struct value *out)
{
    const struct value *items;
    size_t count;
    if (!no_arguments(r, "last", args)) return false;
    if (v.kind == VALUE_ITERATOR) return jinja_fail(r, "last: an iterator cannot be reversed");
    *out = value_undefined("the last item of an empty sequence");
    if (v.kind == VALUE_STRING || v.kind == VALUE_LIST || v.kind == VALUE_TUPLE)
        return jinja_item(r, v, value_int(-1), out);
    if (!jinja_items(r, v, &items, &count)) return false;
    if (count) *out = items[count - 1];
    return true;
}

static bool filter_list(struct run *r, struct value v, args_t args, struct value *out)
{
    const struct value *items;
    size_t count;
    if (!no_arguments(r, "list", args) || !jinja_items(r, v, &items, &count) ||
        !jinja_new_list(r, VALUE_LIST, count, out))
        return false;
    if (count) memcpy(out->list->items, items, count * sizeof *items);
    return true;
}

static bool filter_reverse(struct run *r, struct value v, args_t args, struct value *out)
{
    const struct value *items;
    size_t count;
    if (!no_arguments(r, "reverse", args)) return false;
    if (v.kind == VALUE_STRING) {
        struct value bounds[3] = {{0}, {0}, value_int(-1)};
        return jinja_slice(r, v, bounds, out);
    }
    if (!jinja_items(r, v, &items, &count)) return false;
    struct value *reversed = jinja_array(r, count, sizeof *reversed);
    if (!reversed || !jinja_work(r, count)) return false;
    for (size_t i = 0; i < count; i++) reversed[i] = items[count - 1 - i];
    if (v.kind != VALUE_ITERATOR) return jinja_new_iterator(r, reversed, count, out);
    struct iterator whole = {.items = reversed, .count = count}; /* Python makes a list of it */
    struct value iterator = {.kind = VALUE_ITERATOR, .iterator = &whole};
    return filter_list(r, iterator, args, out);
}

static bool filter_items(struct run *r, struct value v, args_t args, struct value *out)
{
    const struct value *items;
    size_t count;
    if (!no_arguments(r, "items", args)) return false;
    if (v.kind != VALUE_UNDEFINED && !need_dict(r, "items", v)) return false;
    struct view view = {v.dict, VIEW_ITEMS};
    struct value all = {.kind = VALUE_VIEW, .view = &view};
    return jinja_items(r, v.kind == VALUE_DICT ? all : v, &items, &count) &&
           jinja_new_iterator(r, items, count, out);
}

static bool filter_batch(struct run *r, struct value v, args_t args, struct value *out)
{
    static const char *const names[] = {"linecount", "fill_with"};
    struct value slots[2];
    const struct value *items;
    size_t count;
    int64_t size;
    if (!jinja_bind(r, "batch", args, names, 2, 1, slots) ||
        !jinja_need_int(r, "batch", slots[0], &size) || !jinja_items(r, v, &items, &count))
        return false;
    if (size < 1 || size > MAX_RANGE) return jinja_fail(r, "batch: expected 1 to %d", MAX_RANGE);
    size_t n = (count + (size_t)size - 1) / (size_t)size;
    struct value *rows = jinja_array(r, n, sizeof *rows);
    if (!rows) return false;
    bool fills = slots[1].kind != VALUE_ABSENT && slots[1].kind != VALUE_NONE;
    for (size_t i = 0; i < n; i++) {
        size_t begin = i * (size_t)size, left = count - begin;
        size_t have = left < (size_t)size ? left : (size_t)size;
        if (!jinja_new_list(r, VALUE_LIST, fills ? (size_t)size : have, &rows[i])) return false;
        for (size_t j = 0; j < rows[i].list->count; j++)
            rows[i].list->items[j] = j < have ? items[begin + j] : slots[1];
    }
    return jinja_new_iterator(r, rows, n, out);
}

const struct filter jinja_sequence_filters[] = {
    {"join", filter_join},
    {"items", filter_items},
    {"first", filter_first},
    {"last", filter_last},
    {"list", filter_list},
    {"reverse", filter_reverse},
    {"sort", filter_sort},
    {"dictsort", filter_dictsort},
    {"unique", filter_unique},
    {"min", filter_min},
    {"max", filter_max},
    {"sum", filter_sum},
    {"map", filter_map},
    {"select", filter_select},
    {"reject", filter_reject},
    {"selectattr", filter_selectattr},
    {"rejectattr", filter_rejectattr},
    {"batch", filter_batch},
    {0},
};
