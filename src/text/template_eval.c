/* Expressions: walks the tree, and looks things up in values. */
#include <stdlib.h>
#include <string.h>

#include "text/template_internal.h"

bool jinja_fail_undefined(struct run *r, struct value v)
{
    return jinja_fail(r, "'%s' is undefined", v.name);
}

/* ---- attributes and items ---------------------------------------------------------------- */

static bool dict_item(struct run *r, const struct dict *d, const char *name, struct value *out)
{
    if (!jinja_work(r, 1 + d->count / 32)) return false;
    const struct value *found = dict_find_name(d, name);
    *out = found ? *found : value_undefined(name);
    return true;
}

static bool bind_method(struct run *r, struct value self, const struct method *method,
                        struct value *out)
{
    *out = value_undefined(method->name);
    if (!method->apply) return true; /* the immutable sandbox hides what changes its object */
    struct bound_method *bound = jinja_array(r, 1, sizeof *bound);
    if (!bound) return false;
    *bound = (struct bound_method){self, method};
    *out = (struct value){.kind = VALUE_METHOD, .method = bound};
    return true;
}

bool jinja_attribute(struct run *r, struct value object, const char *name, struct value *out)
{
    *out = value_undefined(name);
    if (object.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, object);
    if (object.kind == VALUE_LOOP) return jinja_loop_attribute(r, object.loop, name, out);
    if (object.kind == VALUE_NAMESPACE) return dict_item(r, object.dict, name, out);
    if (object.kind == VALUE_CYCLER && strcmp(name, "current") == 0) {
        *out = object.cycler->items.items[object.cycler->position];
        return true;
    }
    if (object.kind == VALUE_MACRO && strcmp(name, "name") == 0)
        return jinja_literal(r, object.macro->definition->name, out);
    const struct method *method = jinja_find_method(object, name);
    if (method) return bind_method(r, object, method, out);
    return object.kind != VALUE_DICT || dict_item(r, object.dict, name, out);
}

static bool sequence_item(struct run *r, struct value object, int64_t index, struct value *out)
{
    size_t count;
    if (!jinja_length(r, object, &count)) return false;
    if (index < 0) index += (int64_t)count;
    *out = value_undefined("item");
    if (index < 0 || (uint64_t)index >= count) return true;
    if (object.kind == VALUE_RANGE) {
        *out = value_int(object.range->start + index * object.range->step);
    } else if (object.kind == VALUE_STRING) {
        const struct text *t = object.text;
        int32_t c;
        size_t begin = utf8_offset(t->bytes, t->size, (size_t)index);
        size_t n = template_decode(t->bytes, t->size, begin, &c);
        return jinja_subtext(r, t, begin, begin + n, out);
    } else {
        *out = object.list->items[index];
    }
    return true;
}

bool jinja_item(struct run *r, struct value object, struct value key, struct value *out)
{
    int64_t index;
    *out = value_undefined("item");
    switch (object.kind) {
    case VALUE_UNDEFINED: return jinja_fail_undefined(r, object);
    case VALUE_DICT:
    case VALUE_NAMESPACE: {
        struct value *found;
        if (key.kind == VALUE_LIST || key.kind == VALUE_DICT) return true;
        if (!jinja_dict_find(r, object.dict, key, &found)) return false;
        if (found) *out = *found;
        if (found) return true;
        break;
    }
    case VALUE_STRING:
    case VALUE_LIST:
    case VALUE_TUPLE:
    case VALUE_RANGE:
        if (value_is_integer(key, &index)) return sequence_item(r, object, index, out);
        break;
    default: break;
    }
    if (key.kind != VALUE_STRING) return true;
    char name[64]; /* object["name"] falls back to the attribute; none has a longer name */
    if (key.text->size >= sizeof name || memchr(key.text->bytes, 0, key.text->size)) return true;
    if (key.text->size) memcpy(name, key.text->bytes, key.text->size);
    name[key.text->size] = 0;
    const struct method *method = jinja_find_method(object, name);
    if (method) return bind_method(r, object, method, out);
    return object.kind != VALUE_LOOP || jinja_loop_attribute(r, object.loop, name, out);
}

/* A bound of a slice as Python clips it. */
static int64_t clip(int64_t bound, int64_t count, int64_t low, int64_t high)
{
    if (bound < 0) bound = bound < -count ? low : bound + count;
    return bound < low ? low : bound > high ? high : bound;
}

static bool slice_text(struct run *r, const struct text *t, int64_t start, int64_t step, size_t n,
                       struct value *out)
{
    if (step == 1) {
        size_t begin = utf8_offset(t->bytes, t->size, (size_t)start);
        size_t end = begin + utf8_offset(t->bytes + begin, t->size - begin, n);
        return jinja_subtext(r, t, begin, end, out);
    }
    const struct value *characters;
    size_t count;
    struct builder b = {0};
    struct value whole = {.kind = VALUE_STRING, .text = (struct text *)t};
    if (!jinja_items(r, whole, &characters, &count)) return false;
    for (size_t i = 0; i < n; i++) {
        const struct text *c = characters[start + (int64_t)i * step].text;
        if (!build_text(r, &b, c, 0, c->size)) return false;
    }
    return build_done(r, &b, out);
}

bool jinja_slice(struct run *r, struct value object, const struct value bounds[3],
                 struct value *out)
{
    int64_t values[3] = {0}, step = 1;
    size_t length;
    bool given[3];
    if (object.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, object);
    for (int i = 0; i < 3; i++) {
        given[i] = bounds[i].kind != VALUE_ABSENT && bounds[i].kind != VALUE_NONE;
        if (given[i] && !value_is_integer(bounds[i], &values[i]))
            return jinja_fail(r, "the bounds of a slice must be integers, not %s",
                              value_type_name(bounds[i]));
    }
    if (object.kind != VALUE_STRING && object.kind != VALUE_LIST && object.kind != VALUE_TUPLE &&
        object.kind != VALUE_RANGE)
        return jinja_fail(r, "%s cannot be sliced", value_type_name(object));
    if (given[2]) step = values[2];
    if (step == 0) return jinja_fail(r, "the step of a slice cannot be zero");
    if (!jinja_length(r, object, &length)) return false;
    int64_t count = (int64_t)length, low = step < 0 ? -1 : 0, high = step < 0 ? count - 1 : count;
    int64_t start = step < 0 ? high : 0, stop = step < 0 ? -1 : count;
    if (given[0]) start = clip(values[0], count, low, high);
    if (given[1]) stop = clip(values[1], count, low, high);
    if (step > count) step = count + 1; /* no further than one step past the end */
    if (step < -count) step = -count - 1;
    int64_t distance = step > 0 ? stop - start : start - stop;
    size_t n = distance > 0 ? (size_t)((distance - 1) / (step > 0 ? step : -step) + 1) : 0;
    if (object.kind == VALUE_STRING) return slice_text(r, object.text, start, step, n, out);
    const struct value *items;
    bool range = object.kind == VALUE_RANGE;
    if (!jinja_items(r, object, &items, &length)) return false;
    if (!jinja_new_list(r, range ? VALUE_LIST : object.kind, n, out)) return false;
    for (size_t i = 0; i < n; i++) out->list->items[i] = items[start + (int64_t)i * step];
    return true;
}

/* ---- the kinds of expressions ------------------------------------------------------------ */

static bool eval_items(struct run *r, const struct node *n, struct value **out)
{
    *out = jinja_array(r, n->n_items, sizeof **out);
    if (!*out) return false;
    for (size_t i = 0; i < n->n_items; i++)
        if (!jinja_eval(r, n->items[i], &(*out)[i])) return false;
    return true;
}

static bool eval_arguments(struct run *r, const struct node *n, struct arguments *out)
{
    struct value *items;
    struct keyword *keywords = NULL;
    if (!eval_items(r, n, &items)) return false;
    if (n->n_keywords) {
        keywords = jinja_array(r, n->n_keywords, sizeof *keywords);
        if (!keywords) return false;
    }
    for (size_t i = 0; i < n->n_keywords; i++) {
        keywords[i].name = n->keywords[i].name;
        if (!jinja_eval(r, n->keywords[i].value, &keywords[i].value)) return false;
    }
    *out = (struct arguments){items, n->n_items, keywords, n->n_keywords};
    return true;
}

static bool eval_list(struct run *r, const struct node *n, struct value *out)
{
    struct list *list = jinja_array(r, 1, sizeof *list);
    if (!list) return false;
    *list = (struct list){.count = n->n_items};
    *out = (struct value){.kind = n->kind == EXPR_LIST ? VALUE_LIST : VALUE_TUPLE, .list = list};
    return eval_items(r, n, &list->items);
}

static bool eval_dict(struct run *r, const struct node *n, struct value *out)
{
    struct dict *d = jinja_array(r, 1, sizeof *d);
    if (!d) return false;
    *d = (struct dict){0};
    for (size_t i = 0; i + 1 < n->n_items; i += 2) {
        struct value key, v;
        if (!jinja_eval(r, n->items[i], &key) || !jinja_eval(r, n->items[i + 1], &v) ||
            !jinja_dict_set(r, d, key, v))
            return false;
    }
    *out = (struct value){.kind = VALUE_DICT, .dict = d};
    return true;
}

static bool eval_unary(struct run *r, const struct node *n, struct value *out)
{
    struct value v;
    int64_t i;
    if (!jinja_eval(r, n->left, &v)) return false;
    r->line = n->line;
    if (n->op == OP_NOT) {
        *out = value_bool(!value_truth(v));
        return true;
    }
    if (v.kind == VALUE_UNDEFINED) return jinja_fail_undefined(r, v);
    if (v.kind == VALUE_FLOAT) {
        *out = value_float(n->op == '-' ? -v.real : v.real);
        return true;
    }
    if (!value_is_integer(v, &i))
        return jinja_fail(r, "bad operand for unary %c: %s", n->op, value_type_name(v));
    if (n->op == '-' && __builtin_sub_overflow((int64_t)0, i, &i))
        return jinja_fail(r, "an integer does not fit in 64 bits");
    *out = value_int(i);
    return true;
}

static bool compare_one(struct run *r, int op, struct value a, struct value b, bool *out)
{
    bool ok, equal = false;
    switch (op) {
    case OP_EQ:
    case OP_NE: ok = jinja_equal(r, a, b, 0, out); break;
    case OP_IN:
    case OP_NOT_IN: ok = jinja_contains(r, b, a, out); break;
    case '<': return jinja_less(r, a, b, out);
    case '>': return jinja_less(r, b, a, out);
    default: /* not the negation of '<': NaN is neither */
        ok = (op == OP_LE ? jinja_less(r, a, b, out) : jinja_less(r, b, a, out)) &&
             jinja_equal(r, a, b, 0, &equal);
        *out |= equal;
        return ok;
    }
    if (op == OP_NE || op == OP_NOT_IN) *out = !*out;
    return ok;
}

static bool eval_compare(struct run *r, const struct node *n, struct value *out)
{
    struct value left, right;
    bool result = true;
    if (!jinja_eval(r, n->left, &left)) return false;
    for (size_t i = 0; result && i < n->n_items; i++) {
        if (!jinja_eval(r, n->items[i], &right)) return false;
        r->line = n->line;
        if (!compare_one(r, n->ops[i], left, right, &result)) return false;
        left = right;
    }
    *out = value_bool(result);
    return true;
}

static bool eval_concat(struct run *r, const struct node *n, struct value *out)
{
    struct text *all = NULL;
    for (size_t i = 0; i < n->n_items; i++) {
        struct value v;
        struct text *text;
        if (!jinja_eval(r, n->items[i], &v) || !jinja_string(r, v, &text)) return false;
        if (i > 0 && !jinja_concat(r, all, text, out)) return false;
        all = i > 0 ? out->text : text;
    }
    return true;
}

static bool eval_attribute(struct run *r, const struct node *n, struct value *out)
{
    struct value object;
    if (!jinja_eval(r, n->left, &object)) return false;
    r->line = n->line;
    return jinja_attribute(r, object, n->name, out);
}

static bool eval_item(struct run *r, const struct node *n, struct value *out)
{
    struct value object, key;
    if (!jinja_eval(r, n->left, &object) || !jinja_eval(r, n->right, &key)) return false;
    r->line = n->line;
    return jinja_item(r, object, key, out);
}

static bool eval_slice(struct run *r, const struct node *n, struct value *out)
{
    struct value object, bounds[3] = {0};
    if (!jinja_eval(r, n->left, &object)) return false;
    for (int i = 0; i < 3; i++)
        if (n->items[i] && !jinja_eval(r, n->items[i], &bounds[i])) return false;
    r->line = n->line;
    return jinja_slice(r, object, bounds, out);
}

static bool eval_condition(struct run *r, const struct node *n, struct value *out)
{
    struct value test;
    if (!jinja_eval(r, n->test, &test)) return false;
    if (value_truth(test)) return jinja_eval(r, n->left, out);
    if (n->right) return jinja_eval(r, n->right, out);
    *out = value_undefined("an if expression without else");
    return true;
}

static bool eval_binary(struct run *r, const struct node *n, struct value *out)
{
    struct value a, b;
    if (!jinja_eval(r, n->left, &a) || !jinja_eval(r, n->right, &b)) return false;
    r->line = n->line;
    return jinja_binary(r, n->op, a, b, out);
}

static bool eval_logical(struct run *r, const struct node *n, struct value *out)
{
    if (!jinja_eval(r, n->left, out)) return false;
    if (value_truth(*out) != (n->kind == EXPR_AND)) return true;
    return jinja_eval(r, n->right, out);
}

static bool eval_filter(struct run *r, const struct node *n, struct value *out)
{
    struct value input;
    struct arguments args;
    if (!jinja_eval(r, n->left, &input) || !eval_arguments(r, n, &args)) return false;
    r->line = n->line;
    return n->filter->apply(r, input, &args, out);
}

static bool eval_test(struct run *r, const struct node *n, struct value *out)
{
    struct value input;
    struct arguments args;
    bool result;
    if (!jinja_eval(r, n->left, &input) || !eval_arguments(r, n, &args)) return false;
    r->line = n->line;
    if (!jinja_check(r, n->check, input, &args, &result)) return false;
    *out = value_bool(result);
    return true;
}

/* ---- calls ------------------------------------------------------------------------------- */

static bool call_cycler(struct run *r, struct cycler *c, const char *name, struct value *out)
{
    *out = value_none();
    if (strcmp(name, "reset") == 0) {
        c->position = 0;
        return true;
    }
    if (strcmp(name, "next") != 0) return jinja_fail(r, "a cycler has no method '%s'", name);
    *out = c->items.items[c->position];
    c->position = (c->position + 1) % c->items.count;
    return true;
}

bool jinja_call(struct run *r, struct value callee, const struct arguments *args,
                const struct macro *caller, struct value *out)
{
    if (callee.kind == VALUE_MACRO) return jinja_call_macro(r, callee.macro, args, caller, out);
    if (caller) return jinja_fail(r, "only a macro can be called by a call block");
    switch (callee.kind) {
    case VALUE_FUNCTION: return callee.function->call(r, args, out);
    case VALUE_METHOD: return callee.method->method->apply(r, callee.method->self, args, out);
    case VALUE_JOINER:
        if (!callee.joiner->used) {
            callee.joiner->used = true;
            return jinja_literal(r, "", out);
        }
        *out = callee.joiner->separator;
        return true;
    case VALUE_UNDEFINED: return jinja_fail_undefined(r, callee);
    default: return jinja_fail(r, "%s cannot be called", value_type_name(callee));
    }
}

bool jinja_call_node(struct run *r, const struct node *n, const struct macro *caller,
                     struct value *out)
{
    struct value callee, object;
    struct arguments args;
    const struct node *name = n->left;
    if (name->kind != EXPR_ATTRIBUTE) {
        if (!jinja_eval(r, name, &callee) || !eval_arguments(r, n, &args)) return false;
        r->line = n->line;
        return jinja_call(r, callee, &args, caller, out);
    }
    if (!jinja_eval(r, name->left, &object)) return false;
    r->line = n->line;
    if (object.kind != VALUE_LOOP && object.kind != VALUE_CYCLER) {
        if (!jinja_attribute(r, object, name->name, &callee)) return false;
        if (callee.kind == VALUE_UNDEFINED)
            return jinja_fail(r, "%s has no method '%s' (none that changes it is allowed)",
                              value_type_name(object), name->name);
        return eval_arguments(r, n, &args) && jinja_call(r, callee, &args, caller, out);
    }
    if (!eval_arguments(r, n, &args)) return false;
    if (object.kind == VALUE_CYCLER) return call_cycler(r, object.cycler, name->name, out);
    return jinja_loop_call(r, object.loop, name->name, &args, out);
}

static bool eval_node(struct run *r, const struct node *n, struct value *out)
{
    switch (n->kind) {
    case EXPR_CONST: *out = n->constant; return true;
    case EXPR_NAME: return jinja_lookup(r, n, out);
    case EXPR_LIST:
    case EXPR_TUPLE: return eval_list(r, n, out);
    case EXPR_DICT: return eval_dict(r, n, out);
    case EXPR_UNARY: return eval_unary(r, n, out);
    case EXPR_BINARY: return eval_binary(r, n, out);
    case EXPR_AND:
    case EXPR_OR: return eval_logical(r, n, out);
    case EXPR_COMPARE: return eval_compare(r, n, out);
    case EXPR_CONCAT: return eval_concat(r, n, out);
    case EXPR_CONDITION: return eval_condition(r, n, out);
    case EXPR_ATTRIBUTE: return eval_attribute(r, n, out);
    case EXPR_ITEM: return eval_item(r, n, out);
    case EXPR_SLICE: return eval_slice(r, n, out);
    case EXPR_CALL: return jinja_call_node(r, n, NULL, out);
    case EXPR_FILTER: return eval_filter(r, n, out);
    case EXPR_TEST: return eval_test(r, n, out);
    case EXPR_CAPTURED: *out = r->captured; return true;
    default: return jinja_fail(r, "internal error: not an expression");
    }
}

bool jinja_eval(struct run *r, const struct node *n, struct value *out)
{
    if (!jinja_work(r, 1)) return false;
    if (++r->depth > MAX_DEPTH)
        return jinja_fail(r, "calls are nested too deeply; the limit is %d", MAX_DEPTH);
    bool ok = eval_node(r, n, out);
    r->depth--;
    return ok;
}
