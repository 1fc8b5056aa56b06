/* Values of templates: what they are, how they compare, how lists and dicts are made. */
#include <math.h>
#include <string.h>

#include "text/template_internal.h"

const char *value_type_name(struct value v)
{
    static const char *const names[] = {
        [VALUE_ABSENT] = "nothing",    [VALUE_UNDEFINED] = "undefined",
        [VALUE_NONE] = "None",         [VALUE_BOOL] = "bool",
        [VALUE_INT] = "int",           [VALUE_FLOAT] = "float",
        [VALUE_STRING] = "str",        [VALUE_LIST] = "list",
        [VALUE_TUPLE] = "tuple",       [VALUE_DICT] = "dict",
        [VALUE_RANGE] = "range",       [VALUE_VIEW] = "dict view",
        [VALUE_ITERATOR] = "iterator", [VALUE_NAMESPACE] = "namespace",
        [VALUE_LOOP] = "loop",         [VALUE_MACRO] = "macro",
        [VALUE_FUNCTION] = "function", [VALUE_METHOD] = "method",
        [VALUE_CYCLER] = "cycler",     [VALUE_JOINER] = "joiner",
    };
    return names[v.kind];
}

bool value_truth(struct value v)
{
    switch (v.kind) {
    case VALUE_ABSENT:
    case VALUE_UNDEFINED:
    case VALUE_NONE: return false;
    case VALUE_BOOL: return v.boolean;
    case VALUE_INT: return v.integer != 0;
    case VALUE_FLOAT: return v.real != 0;
    case VALUE_STRING: return v.text->size > 0;
    case VALUE_LIST:
    case VALUE_TUPLE: return v.list->count > 0;
    case VALUE_DICT: return v.dict->count > 0;
    case VALUE_RANGE: return v.range->count > 0;
    case VALUE_VIEW: return v.view->dict->count > 0;
    default: return true;
    }
}

bool value_is_integer(struct value v, int64_t *out)
{
    if (v.kind != VALUE_INT && v.kind != VALUE_BOOL) return false;
    *out = v.kind == VALUE_INT ? v.integer : v.boolean;
    return true;
}

bool value_is_number(struct value v, double *out)
{
    int64_t i;
    if (v.kind == VALUE_FLOAT)
        *out = v.real;
    else if (value_is_integer(v, &i))
        *out = (double)i;
    else
        return false;
    return true;
}

bool value_iterable(struct value v)
{
    switch (v.kind) {
    case VALUE_UNDEFINED:
    case VALUE_STRING:
    case VALUE_LIST:
    case VALUE_TUPLE:
    case VALUE_DICT:
    case VALUE_RANGE:
    case VALUE_VIEW:
    case VALUE_ITERATOR:
    case VALUE_LOOP: return true;
    default: return false;
    }
}

bool value_has_length(struct value v)
{
    return value_iterable(v) && v.kind != VALUE_ITERATOR;
}

/* ---- comparing --------------------------------------------------------------------------- */

/* -1, 0, 1; 2 if one is NaN. An int and a float compare exactly, as in Python. */
static int compare_numbers(struct value a, struct value b)
{
    int64_t i, j;
    double x = 0, y = 0;
    if (value_is_integer(a, &i) && value_is_integer(b, &j)) return (i > j) - (i < j);
    value_is_number(a, &x);
    value_is_number(b, &y);
    if (isnan(x) || isnan(y)) return 2;
    if (x != y || fabs(x) < 0x1p53) return (x > y) - (x < y);
    bool a_is_int = value_is_integer(a, &i);
    if (!a_is_int && !value_is_integer(b, &i)) return 0;
    double f = a_is_int ? y : x;
    if (f >= 0x1p63) return a_is_int ? -1 : 1;
    int64_t whole = (int64_t)f;
    int order = (i > whole) - (i < whole);
    return a_is_int ? order : -order;
}

static int compare_texts(const struct text *a, const struct text *b)
{
    size_t n = a->size < b->size ? a->size : b->size;
    int order = n ? memcmp(a->bytes, b->bytes, n) : 0; /* the order of UTF-8 is code points' */
    return order ? order : (a->size > b->size) - (a->size < b->size);
}

static bool equal_dicts(struct run *r, const struct dict *a, const struct dict *b, int depth,
                        bool *out)
{
    *out = a->count == b->count;
    for (size_t i = 0; *out && i < a->count; i++) {
        struct value *other;
        if (!jinja_dict_find(r, b, a->pairs[i].key, &other)) return false;
        *out = other != NULL;
        if (other && !jinja_equal(r, a->pairs[i].value, *other, depth, out)) return false;
    }
    return true;
}

bool jinja_equal(struct run *r, struct value a, struct value b, int depth, bool *out)
{
    double x, y;
    if (!jinja_work(r, 1)) return false;
    if (depth > MAX_VALUE_DEPTH) return jinja_fail(r, "values are nested too deeply to compare");
    *out = false;
    if (value_is_number(a, &x) && value_is_number(b, &y)) {
        *out = compare_numbers(a, b) == 0;
        return true;
    }
    if (a.kind != b.kind) return true;
    switch (a.kind) {
    case VALUE_ABSENT:
    case VALUE_UNDEFINED:
    case VALUE_NONE: *out = true; return true;
    case VALUE_STRING:
        if (!jinja_work(r, a.text->size / 64)) return false;
        *out = a.text->size == b.text->size && compare_texts(a.text, b.text) == 0;
        return true;
    case VALUE_LIST:
    case VALUE_TUPLE:
        *out = a.list->count == b.list->count;
        for (size_t i = 0; *out && i < a.list->count; i++)
            if (!jinja_equal(r, a.list->items[i], b.list->items[i], depth + 1, out)) return false;
        return true;
    case VALUE_DICT: return equal_dicts(r, a.dict, b.dict, depth + 1, out);
    case VALUE_RANGE:
        *out = a.range->count == b.range->count &&
               (a.range->count == 0 || (a.range->start == b.range->start &&
                                        (a.range->count == 1 || a.range->step == b.range->step)));
        return true;
    default: *out = a.dict == b.dict; return true; /* the same object */
    }
}

bool jinja_less(struct run *r, struct value a, struct value b, bool *out)
{
    double x, y;
    if (a.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, a);
    if (b.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, b);
    if (value_is_number(a, &x) && value_is_number(b, &y)) {
        *out = compare_numbers(a, b) == -1;
        return true;
    }
    if (a.kind == VALUE_STRING && b.kind == VALUE_STRING) {
        if (!jinja_work(r, 1 + a.text->size / 64)) return false;
        *out = compare_texts(a.text, b.text) < 0;
        return true;
    }
    if (a.kind != b.kind || (a.kind != VALUE_LIST && a.kind != VALUE_TUPLE))
        return jinja_fail(r, "'<' is not defined between %s and %s", value_type_name(a),
                          value_type_name(b));
    for (size_t i = 0; i < a.list->count && i < b.list->count; i++) {
        bool equal;
        if (!jinja_equal(r, a.list->items[i], b.list->items[i], 0, &equal)) return false;
        if (equal) continue;
        if (++r->depth > MAX_DEPTH) return jinja_fail(r, "values are nested too deeply");
        bool ok = jinja_less(r, a.list->items[i], b.list->items[i], out);
        r->depth--;
        return ok;
    }
    *out = a.list->count < b.list->count;
    return true;
}

bool jinja_contains(struct run *r, struct value container, struct value item, bool *out)
{
    const struct value *items;
    size_t count;
    *out = false;
    if (container.kind == VALUE_STRING) {
        if (item.kind != VALUE_STRING)
            return jinja_fail(r, "'in' a string needs a string, not %s", value_type_name(item));
        *out = text_find(container.text, 0, item.text) != SIZE_MAX;
        return jinja_work(r, 1 + container.text->size / 64);
    }
    if (container.kind == VALUE_DICT) {
        struct value *found;
        if (!jinja_dict_find(r, container.dict, item, &found)) return false;
        *out = found != NULL;
        return true;
    }
    if (!jinja_items(r, container, &items, &count)) return false;
    for (size_t i = 0; !*out && i < count; i++)
        if (!jinja_equal(r, items[i], item, 0, out)) return false;
    return true;
}

/* ---- lists ------------------------------------------------------------------------------- */

bool jinja_new_list(struct run *r, enum value_kind kind, size_t count, struct value *out)
{
    struct list *list = jinja_array(r, 1, sizeof *list);
    struct value *items = list ? jinja_array(r, count, sizeof *items) : NULL;
    if (!items || !jinja_work(r, count)) return false;
    *list = (struct list){.items = items, .count = count};
    *out = (struct value){.kind = kind, .list = list};
    return true;
}

bool jinja_pair(struct run *r, struct value a, struct value b, struct value *out)
{
    if (!jinja_new_list(r, VALUE_TUPLE, 2, out)) return false;
    out->list->items[0] = a;
    out->list->items[1] = b;
    return true;
}

static const struct value nothing[1]; /* the items of what has none */

bool jinja_new_iterator(struct run *r, const struct value *items, size_t count, struct value *out)
{
    struct iterator *iterator = jinja_array(r, 1, sizeof *iterator);
    if (!iterator) return false;
    *iterator = (struct iterator){.items = count ? items : nothing, .count = count};
    *out = (struct value){.kind = VALUE_ITERATOR, .iterator = iterator};
    return true;
}

/* As for texts: the left list's buffer is continued where it has room, so that growing a list
 * item by item is linear. */
bool jinja_concat_lists(struct run *r, struct value a, struct value b, struct value *out)
{
    size_t n = a.list->count, count = n + b.list->count;
    struct list *list = jinja_array(r, 1, sizeof *list);
    if (!list || !jinja_work(r, 1 + b.list->count)) return false;
    *list = *a.list;
    list->count = count;
    struct tail *tail = list->tail;
    if (!tail || tail->used != n || tail->capacity < count) {
        tail = jinja_array(r, 1, sizeof *tail);
        list->items = tail ? jinja_array(r, 2 * count, sizeof *list->items) : NULL;
        if (!list->items || !jinja_work(r, n)) return false;
        if (n) memcpy(list->items, a.list->items, n * sizeof *list->items);
        *tail = (struct tail){.capacity = 2 * count};
    }
    if (b.list->count) memcpy(list->items + n, b.list->items, b.list->count * sizeof *list->items);
    tail->used = count;
    list->tail = tail;
    *out = (struct value){.kind = a.kind, .list = list};
    return true;
}

static bool text_items(struct run *r, const struct text *t, const struct value **items,
                       size_t *count)
{
    *count = utf8_count(t->bytes, t->size);
    struct value *list = jinja_array(r, *count, sizeof *list);
    if (!list || !jinja_work(r, *count)) return false;
    size_t at = 0;
    for (size_t i = 0; i < *count; i++) {
        int32_t c;
        size_t n = template_decode(t->bytes, t->size, at, &c);
        if (!jinja_subtext(r, t, at, at + n, &list[i])) return false;
        at += n;
    }
    *items = list;
    return true;
}

static bool dict_items(struct run *r, const struct dict *d, enum view_of of,
                       const struct value **items, size_t *count)
{
    struct value *list = jinja_array(r, d->count, sizeof *list);
    if (!list || !jinja_work(r, d->count)) return false;
    for (size_t i = 0; i < d->count; i++) {
        const struct pair *p = &d->pairs[i];
        if (of != VIEW_ITEMS)
            list[i] = of == VIEW_KEYS ? p->key : p->value;
        else if (!jinja_pair(r, p->key, p->value, &list[i]))
            return false;
    }
    *items = list;
    *count = d->count;
    return true;
}

static bool range_items(struct run *r, const struct range *range, const struct value **items,
                        size_t *count)
{
    struct value *list = jinja_array(r, range->count, sizeof *list);
    if (!list || !jinja_work(r, range->count)) return false;
    for (size_t i = 0; i < range->count; i++)
        list[i] = value_int(range->start + (int64_t)i * range->step);
    *items = list;
    *count = range->count;
    return true;
}

bool jinja_items(struct run *r, struct value v, const struct value **items, size_t *count)
{
    *items = nothing;
    *count = 0;
    switch (v.kind) {
    case VALUE_UNDEFINED: return true;
    case VALUE_LIST:
    case VALUE_TUPLE:
        *items = v.list->items;
        *count = v.list->count;
        return jinja_work(r, 1);
    case VALUE_STRING: return text_items(r, v.text, items, count);
    case VALUE_DICT: return dict_items(r, v.dict, VIEW_KEYS, items, count);
    case VALUE_VIEW: return dict_items(r, v.view->dict, v.view->of, items, count);
    case VALUE_RANGE: return range_items(r, v.range, items, count);
    case VALUE_ITERATOR:
        *items = v.iterator->items + v.iterator->position;
        *count = v.iterator->count - v.iterator->position;
        v.iterator->position = v.iterator->count;
        return jinja_work(r, 1);
    default: return jinja_fail(r, "%s is not iterable", value_type_name(v));
    }
}

bool jinja_length(struct run *r, struct value v, size_t *out)
{
    *out = 0;
    switch (v.kind) {
    case VALUE_UNDEFINED: return true;
    case VALUE_LIST:
    case VALUE_TUPLE: *out = v.list->count; return true;
    case VALUE_STRING:
        *out = utf8_count(v.text->bytes, v.text->size);
        return jinja_work(r, v.text->size / 64);
    case VALUE_DICT: *out = v.dict->count; return true;
    case VALUE_VIEW: *out = v.view->dict->count; return true;
    case VALUE_RANGE: *out = v.range->count; return true;
    default: return jinja_fail(r, "%s has no length", value_type_name(v));
    }
}

/* ---- dicts ------------------------------------------------------------------------------- */

static bool hashable(struct value key)
{
    return key.kind != VALUE_LIST && key.kind != VALUE_DICT;
}

bool jinja_dict_find(struct run *r, const struct dict *d, struct value key, struct value **out)
{
    *out = NULL;
    if (!hashable(key)) return jinja_fail(r, "%s cannot be a key", value_type_name(key));
    size_t length = key.kind == VALUE_STRING ? key.text->size / 64 : 0; /* of each comparison */
    if (!jinja_work(r, 1 + d->count / 16 + (d->count ? length : 0))) return false;
    for (size_t i = 0; i < d->count; i++) {
        const struct value *k = &d->pairs[i].key;
        bool equal;
        if (k->kind == VALUE_STRING && key.kind == VALUE_STRING)
            equal = k->text->size == key.text->size && compare_texts(k->text, key.text) == 0;
        else if (!jinja_equal(r, *k, key, 0, &equal))
            return false;
        if (equal) {
            *out = &d->pairs[i].value;
            return true;
        }
    }
    return true;
}

struct value *dict_find_name(const struct dict *d, const char *name)
{
    for (size_t i = 0; i < d->count; i++) {
        const struct value *key = &d->pairs[i].key;
        if (key->kind == VALUE_STRING && text_equals(key->text, name)) return &d->pairs[i].value;
    }
    return NULL;
}

bool jinja_dict_set(struct run *r, struct dict *d, struct value key, struct value v)
{
    struct value *old;
    if (!jinja_dict_find(r, d, key, &old)) return false;
    if (old) {
        *old = v;
        return true;
    }
    if (d->count == d->capacity) {
        size_t capacity = d->capacity ? 2 * d->capacity : 4;
        struct pair *pairs = jinja_array(r, capacity, sizeof *pairs);
        if (!pairs) return false;
        if (d->count) memcpy(pairs, d->pairs, d->count * sizeof *pairs);
        d->pairs = pairs;
        d->capacity = capacity;
    }
    d->pairs[d->count++] = (struct pair){key, v};
    return true;
}

static bool dict_from_json(struct run *r, const json_t *json, bool untrusted, int depth,
                           struct value *out)
{
    size_t count = json_object_size(json);
    struct dict *d = jinja_array(r, 1, sizeof *d);
    struct pair *pairs = d ? jinja_array(r, count, sizeof *pairs) : NULL;
    if (!pairs) return false;
    *d = (struct dict){.pairs = pairs, .capacity = count};
    void *it = json_object_iter((json_t *)json);
    for (; it; it = json_object_iter_next((json_t *)json, it)) {
        struct pair *p = &pairs[d->count++];
        if (!jinja_text(r, json_object_iter_key(it), json_object_iter_key_len(it), untrusted,
                        &p->key) ||
            !jinja_from_json(r, json_object_iter_value(it), untrusted, depth + 1, &p->value))
            return false;
    }
    *out = (struct value){.kind = VALUE_DICT, .dict = d};
    return true;
}

bool jinja_from_json(struct run *r, const json_t *json, bool untrusted, int depth,
                     struct value *out)
{
    if (depth > MAX_VALUE_DEPTH)
        return jinja_fail(r, "the context is nested deeper than %d", MAX_VALUE_DEPTH);
    switch (json_typeof(json)) {
    case JSON_OBJECT: return dict_from_json(r, json, untrusted, depth, out);
    case JSON_ARRAY:
        if (!jinja_new_list(r, VALUE_LIST, json_array_size(json), out)) return false;
        for (size_t i = 0; i < out->list->count; i++)
            if (!jinja_from_json(r, json_array_get(json, i), untrusted, depth + 1,
                                 &out->list->items[i]))
                return false;
        return true;
    case JSON_STRING:
        return jinja_text(r, json_string_value(json), json_string_length(json), untrusted, out);
    case JSON_INTEGER: *out = value_int(json_integer_value(json)); return true;
    case JSON_REAL: *out = value_float(json_real_value(json)); return true;
    case JSON_TRUE:
    case JSON_FALSE: *out = value_bool(json_is_true(json)); return true;
    default: *out = value_none(); return true;
    }
}
