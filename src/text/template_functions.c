/* Global functions, the loop variable, and how arguments find their places. */
#include <string.h>
#include <time.h>

#include "text/template_internal.h"

typedef const struct arguments *args_t;

/* ---- arguments --------------------------------------------------------------------------- */

bool jinja_bind(struct run *r, const char *what, args_t args, const char *const *names,
                size_t n_names, size_t n_required, struct value *slots)
{
    if (args->count > n_names)
        return jinja_fail(r, "%s takes at most %zu arguments, found %zu", what, n_names,
                          args->count);
    for (size_t i = 0; i < n_names; i++)
        slots[i] = i < args->count ? args->items[i] : (struct value){.kind = VALUE_ABSENT};
    for (size_t k = 0; k < args->n_keywords; k++) {
        size_t i = 0;
        while (i < n_names && strcmp(names[i], args->keywords[k].name) != 0) i++;
        if (i == n_names)
            return jinja_fail(r, "%s takes no argument '%s'", what, args->keywords[k].name);
        if (slots[i].kind != VALUE_ABSENT)
            return jinja_fail(r, "%s got two values for '%s'", what, names[i]);
        slots[i] = args->keywords[k].value;
    }
    for (size_t i = 0; i < n_required; i++)
        if (slots[i].kind == VALUE_ABSENT)
            return jinja_fail(r, "%s needs the argument '%s'", what, names[i]);
    return true;
}

bool jinja_need_text(struct run *r, const char *what, struct value v, struct text **out)
{
    if (v.kind != VALUE_STRING)
        return jinja_fail(r, "%s needs a string, not %s", what, value_type_name(v));
    *out = v.text;
    return true;
}

bool jinja_need_int(struct run *r, const char *what, struct value v, int64_t *out)
{
    return value_is_integer(v, out) ||
           jinja_fail(r, "%s needs an integer, not %s", what, value_type_name(v));
}

/* ---- functions --------------------------------------------------------------------------- */

static bool function_range(struct run *r, args_t args, struct value *out)
{
    int64_t n[3] = {0, 0, 1};
    if (args->count < 1 || args->count > 3 || args->n_keywords)
        return jinja_fail(r, "range takes one to three integers");
    for (size_t i = 0; i < args->count; i++)
        if (!jinja_need_int(r, "range", args->items[i], &n[i])) return false;
    if (args->count == 1) n[1] = n[0], n[0] = 0;
    if (n[2] == 0) return jinja_fail(r, "range: the step cannot be zero");
    uint64_t distance = 0, step = n[2] > 0 ? (uint64_t)n[2] : 0 - (uint64_t)n[2];
    if (n[2] > 0 && n[0] < n[1]) distance = (uint64_t)n[1] - (uint64_t)n[0];
    if (n[2] < 0 && n[0] > n[1]) distance = (uint64_t)n[0] - (uint64_t)n[1];
    uint64_t count = distance ? (distance - 1) / step + 1 : 0;
    if (count > MAX_RANGE)
        return jinja_fail(r, "range: more than %d items, which the sandbox refuses", MAX_RANGE);
    struct range *range = jinja_array(r, 1, sizeof *range);
    if (!range) return false;
    *range = (struct range){n[0], n[1], n[2], (size_t)count};
    *out = (struct value){.kind = VALUE_RANGE, .range = range};
    return true;
}

/* dict(...) and namespace(...): a mapping or pairs, then keywords. */
static bool new_dict(struct run *r, const char *what, args_t args, struct dict **out)
{
    const struct value *items, *pair;
    size_t count, two;
    struct dict *d = jinja_array(r, 1, sizeof *d);
    if (!d) return false;
    *out = d;
    *d = (struct dict){0};
    if (args->count > 1) return jinja_fail(r, "%s takes at most one argument", what);
    if (args->count == 1 && args->items[0].kind == VALUE_DICT) {
        const struct dict *from = args->items[0].dict;
        for (size_t i = 0; i < from->count; i++)
            if (!jinja_dict_set(r, d, from->pairs[i].key, from->pairs[i].value)) return false;
    } else if (args->count == 1) {
        if (!jinja_items(r, args->items[0], &items, &count)) return false;
        for (size_t i = 0; i < count; i++) {
            if (!jinja_items(r, items[i], &pair, &two)) return false;
            if (two != 2) return jinja_fail(r, "%s: expected pairs", what);
            if (!jinja_dict_set(r, d, pair[0], pair[1])) return false;
        }
    }
    for (size_t i = 0; i < args->n_keywords; i++) {
        struct value key;
        if (!jinja_literal(r, args->keywords[i].name, &key) ||
            !jinja_dict_set(r, d, key, args->keywords[i].value))
            return false;
    }
    return true;
}

static bool function_dict(struct run *r, args_t args, struct value *out)
{
    *out = (struct value){.kind = VALUE_DICT};
    return new_dict(r, "dict", args, &out->dict);
}

static bool function_namespace(struct run *r, args_t args, struct value *out)
{
    *out = (struct value){.kind = VALUE_NAMESPACE};
    if (!new_dict(r, "namespace", args, &out->dict)) return false;
    for (size_t i = 0; i < out->dict->count; i++) {
        struct value key = out->dict->pairs[i].key;
        if (key.kind == VALUE_STRING && key.text->size && key.text->bytes[0] == '_')
            return jinja_fail(r, "a namespace's attribute may not begin with '_'");
    }
    return true;
}

static bool function_raise_exception(struct run *r, args_t args, struct value *out)
{
    static const char *const names[] = {"message"};
    struct value message;
    struct text *text;
    (void)out;
    if (!jinja_bind(r, "raise_exception", args, names, 1, 1, &message) ||
        !jinja_string(r, message, &text))
        return false;
    r->status = error_set(r->err, LINNET_INVALID, "%.*s", (int)text->size, text->bytes);
    return false;
}

static bool function_strftime_now(struct run *r, args_t args, struct value *out)
{
    static const char *const names[] = {"format"};
    struct value slot;
    struct text *format = NULL;
    struct tm local;
    time_t now = (time_t)r->now;
    if (!jinja_bind(r, "strftime_now", args, names, 1, 1, &slot) ||
        !jinja_need_text(r, "strftime_now", slot, &format))
        return false;
    if (format->size > 256 || memchr(format->bytes, 0, format->size))
        return jinja_fail(r, "strftime_now: expected a format of at most 256 characters");
    if (!localtime_r(&now, &local)) return jinja_fail(r, "strftime_now: the time is out of range");
    enum { ROOM = 8192 };
    char *text = jinja_array(r, ROOM, 1);
    char copy[260];
    if (!text) return false;
    memcpy(copy, format->bytes, format->size);
    copy[format->size] = 0;
    strcat(copy, "!"); /* so that 0 always means that it did not fit */
    size_t n = strftime(text, ROOM, copy, &local);
    if (n == 0) return jinja_fail(r, "strftime_now: the time is longer than %d bytes", ROOM);
    bool untrusted = false; /* it cannot be told which byte of the format gave which of the time */
    for (size_t i = 0; i < format->size; i++) untrusted |= text_untrusted(format, i);
    return jinja_text(r, text, n - 1, untrusted, out);
}

static bool function_cycler(struct run *r, args_t args, struct value *out)
{
    struct cycler *c = jinja_array(r, 1, sizeof *c);
    if (!c) return false;
    if (args->count == 0 || args->n_keywords) return jinja_fail(r, "cycler needs items");
    *c = (struct cycler){.items = {(struct value *)args->items, args->count, NULL}};
    *out = (struct value){.kind = VALUE_CYCLER, .cycler = c};
    return true;
}

static bool function_joiner(struct run *r, args_t args, struct value *out)
{
    static const char *const names[] = {"sep"};
    struct value slot, comma;
    struct joiner *j = jinja_array(r, 1, sizeof *j);
    if (!j || !jinja_bind(r, "joiner", args, names, 1, 0, &slot) || !jinja_literal(r, ", ", &comma))
        return false;
    *j = (struct joiner){slot.kind == VALUE_ABSENT ? comma : slot, false};
    *out = (struct value){.kind = VALUE_JOINER, .joiner = j};
    return true;
}

const struct function *jinja_find_function(const char *name)
{
    static const struct function functions[] = {
        {"range", function_range},
        {"dict", function_dict},
        {"namespace", function_namespace},
        {"raise_exception", function_raise_exception},
        {"strftime_now", function_strftime_now},
        {"cycler", function_cycler},
        {"joiner", function_joiner},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, name) == 0) return &functions[i];
    return NULL;
}

/* ---- the loop variable ------------------------------------------------------------------- */

/* Looks ahead until there are `count` items or no more. */
static bool look_ahead(struct run *r, struct loop *loop, size_t count)
{
    bool more = true;
    while (more && loop->count < count)
        if (!jinja_loop_next(r, loop, &more)) return false;
    return true;
}

bool jinja_loop_attribute(struct run *r, struct loop *loop, const char *name, struct value *out)
{
    int64_t index0 = (int64_t)loop->index0;
    bool whole = strcmp(name, "length") == 0 || strncmp(name, "revindex", 8) == 0;
    if (!look_ahead(r, loop, whole ? SIZE_MAX : loop->index0 + 1)) return false;
    *out = value_undefined(name);
    if (strcmp(name, "index") == 0) {
        *out = value_int(index0 + 1);
    } else if (strcmp(name, "index0") == 0) {
        *out = value_int(index0);
    } else if (strcmp(name, "first") == 0) {
        *out = value_bool(index0 == 0);
    } else if (strcmp(name, "length") == 0) {
        *out = value_int((int64_t)loop->count);
    } else if (strcmp(name, "revindex") == 0) {
        *out = value_int((int64_t)loop->count - index0);
    } else if (strcmp(name, "revindex0") == 0) {
        *out = value_int((int64_t)loop->count - index0 - 1);
    } else if (strcmp(name, "depth") == 0 || strcmp(name, "depth0") == 0) {
        *out = value_int(name[5] == 0);
    } else if (strcmp(name, "previtem") == 0) {
        if (index0 > 0) *out = loop->items[index0 - 1];
    } else if (strcmp(name, "last") == 0 || strcmp(name, "nextitem") == 0) {
        if (!look_ahead(r, loop, loop->index0 + 2)) return false;
        bool last = loop->count == loop->index0 + 1;
        if (name[0] == 'l')
            *out = value_bool(last);
        else if (!last)
            *out = loop->items[index0 + 1];
    }
    return true;
}

bool jinja_loop_call(struct run *r, struct loop *loop, const char *name, args_t args,
                     struct value *out)
{
    if (strcmp(name, "cycle") == 0) {
        if (args->count == 0) return jinja_fail(r, "loop.cycle needs items");
        *out = args->items[loop->index0 % args->count];
        return true;
    }
    if (strcmp(name, "changed") != 0) return jinja_fail(r, "loop has no method '%s'", name);
    struct list list = {(struct value *)args->items, args->count, NULL};
    struct value now = {.kind = VALUE_TUPLE, .list = jinja_array(r, 1, sizeof list)};
    bool equal = false;
    if (!now.list) return false;
    *now.list = list;
    if (loop->has_changed_value && !jinja_equal(r, now, loop->changed_value, 0, &equal))
        return false;
    loop->has_changed_value = true;
    loop->changed_value = now;
    *out = value_bool(!equal);
    return true;
}
