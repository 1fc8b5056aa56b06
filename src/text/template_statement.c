/* Runs the statements of a template: scopes, loops, blocks, macros. */
#include <string.h>

#include "text/template_internal.h"

static enum flow execute_one(struct run *r, const struct node *n);

/* ---- scopes ------------------------------------------------------------------------------ */

bool jinja_bind_name(struct run *r, struct scope *scope, int id, struct value v)
{
    if (!jinja_work(r, 1 + scope->count / 32)) return false;
    for (size_t i = 0; i < scope->count; i++) {
        if (scope->bindings[i].id != id) continue;
        scope->bindings[i].value = v;
        return true;
    }
    if (scope->count == scope->capacity) {
        size_t capacity = scope->capacity ? 2 * scope->capacity : 4;
        struct binding *bindings = jinja_array(r, capacity, sizeof *bindings);
        if (!bindings) return false;
        if (scope->count) memcpy(bindings, scope->bindings, scope->count * sizeof *bindings);
        scope->bindings = bindings;
        scope->capacity = capacity;
    }
    scope->bindings[scope->count++] = (struct binding){id, v};
    return true;
}

static bool from_context(struct run *r, const struct node *n, struct value *out)
{
    const json_t *json = json_object_get(r->context, n->name);
    const struct function *function = json ? NULL : jinja_find_function(n->name);
    if (json) {
        bool untrusted = true;
        for (const char *const *t = r->trusted; t && *t; t++)
            if (strcmp(*t, n->name) == 0) untrusted = false;
        return jinja_from_json(r, json, untrusted, 0, out);
    }
    *out = value_undefined(n->name);
    if (function) *out = (struct value){.kind = VALUE_FUNCTION, .function = function};
    return true;
}

bool jinja_lookup(struct run *r, const struct node *n, struct value *out)
{
    size_t looked = 0;
    for (const struct scope *s = r->scope; s; s = s->parent) {
        looked += 1 + s->count;
        for (size_t i = 0; i < s->count; i++) {
            if (s->bindings[i].id != n->id) continue;
            *out = s->bindings[i].value;
            return jinja_work(r, looked / 32);
        }
    }
    struct value *known = &r->variables[n->id];
    if (known->kind == VALUE_ABSENT && !from_context(r, n, known)) return false;
    *out = *known;
    return jinja_work(r, looked / 32);
}

static struct scope *new_scope(struct run *r, struct scope *parent)
{
    struct scope *scope = jinja_array(r, 1, sizeof *scope);
    if (scope) *scope = (struct scope){.parent = parent};
    return scope;
}

static bool assign(struct run *r, struct scope *scope, const struct node *target, struct value v)
{
    const struct value *items;
    size_t count;
    struct value object;
    if (target->kind == EXPR_NAME) return jinja_bind_name(r, scope, target->id, v);
    if (target->kind == EXPR_TUPLE) {
        if (!jinja_items(r, v, &items, &count)) return false;
        if (count != target->n_items)
            return jinja_fail(r, "expected %zu values to unpack, found %zu", target->n_items,
                              count);
        for (size_t i = 0; i < count; i++)
            if (!assign(r, scope, target->items[i], items[i])) return false;
        return true;
    }
    if (!jinja_lookup(r, target->left, &object)) return false;
    if (object.kind != VALUE_NAMESPACE)
        return jinja_fail(r, "cannot assign an attribute of %s; only namespaces have them",
                          value_type_name(object));
    if (target->name[0] == '_')
        return jinja_fail(r, "a namespace's attribute may not begin with '_': %s", target->name);
    struct value *old = dict_find_name(object.dict, target->name), key;
    if (!jinja_work(r, 1 + object.dict->count / 32)) return false;
    if (old) {
        *old = v;
        return true;
    }
    return jinja_literal(r, target->name, &key) && jinja_dict_set(r, object.dict, key, v);
}

/* Runs a block with its text going into *out instead. */
static enum flow capture(struct run *r, const struct block *block, struct value *out)
{
    struct builder b = {0}, *outer = r->capture;
    r->capture = &b;
    enum flow flow = jinja_execute(r, block);
    r->capture = outer;
    if (flow != FLOW_NEXT) return flow;
    return build_done(r, &b, out) ? FLOW_NEXT : FLOW_FAIL;
}

/* The same in a scope of its own. */
static enum flow capture_inner(struct run *r, const struct block *block, struct value *out)
{
    struct scope *outer = r->scope, *inner = new_scope(r, outer);
    if (!inner) return FLOW_FAIL;
    r->scope = inner;
    enum flow flow = capture(r, block, out);
    r->scope = outer;
    return flow;
}

/* ---- loops ------------------------------------------------------------------------------- */

/* Finds the next item that passes the filter, which runs in a scope that has only the target. */
bool jinja_loop_next(struct run *r, struct loop *loop, bool *more)
{
    *more = false;
    while (!*more && loop->position < loop->n_source) {
        struct value item = loop->source[loop->position++], passes;
        if (!jinja_work(r, 1)) return false;
        if (loop->node->test) {
            struct scope *outer = r->scope;
            loop->scope->count = 0;
            r->scope = loop->scope;
            bool ok = assign(r, loop->scope, loop->node->left, item) &&
                      jinja_eval(r, loop->node->test, &passes);
            r->scope = outer;
            if (!ok) return false;
            if (!value_truth(passes)) continue;
        }
        loop->items[loop->count++] = item;
        *more = true;
    }
    return true;
}

static bool start_loop(struct run *r, const struct node *n, struct loop **out)
{
    struct value iterable;
    struct loop *loop = jinja_array(r, 1, sizeof *loop);
    if (!loop || !jinja_eval(r, n->right, &iterable)) return false;
    *loop = (struct loop){.node = n};
    if (!jinja_items(r, iterable, &loop->source, &loop->n_source)) return false;
    loop->items = jinja_array(r, loop->n_source, sizeof *loop->items);
    loop->scope = new_scope(r, r->scope);
    *out = loop;
    return loop->items && loop->scope;
}

static enum flow execute_for(struct run *r, const struct node *n)
{
    struct loop *loop;
    struct scope *outer = r->scope;
    bool completed = false; /* a body ran to its end: Jinja's condition for no else */
    if (!start_loop(r, n, &loop)) return FLOW_FAIL;
    struct value self = {.kind = VALUE_LOOP, .loop = loop};
    struct scope *inner = new_scope(r, outer);
    enum flow flow = inner ? FLOW_NEXT : FLOW_FAIL;
    for (size_t i = 0; flow != FLOW_FAIL && flow != FLOW_BREAK; i++) {
        bool more = i < loop->count;
        if (!more && !jinja_loop_next(r, loop, &more)) return FLOW_FAIL;
        if (!more) break;
        loop->index0 = i;
        inner->count = 0;
        if (!assign(r, inner, n->left, loop->items[i]) || !jinja_bind_name(r, inner, ID_LOOP, self))
            return FLOW_FAIL;
        r->scope = inner;
        flow = jinja_execute(r, &n->body);
        r->scope = outer;
        completed |= flow == FLOW_NEXT;
    }
    if (flow == FLOW_FAIL) return flow;
    if (completed || n->otherwise.count == 0) return FLOW_NEXT;
    struct scope *other = new_scope(r, outer);
    if (!other) return FLOW_FAIL;
    r->scope = other;
    flow = jinja_execute(r, &n->otherwise);
    r->scope = outer;
    return flow;
}

/* ---- macros ------------------------------------------------------------------------------ */

static bool surplus(struct run *r, const struct definition *d, const struct arguments *args,
                    struct scope *scope)
{
    size_t extra = args->count > d->n_parameters ? args->count - d->n_parameters : 0;
    if (extra && !d->uses_varargs)
        return jinja_fail(r, "macro '%s' takes at most %zu arguments, found %zu", d->name,
                          d->n_parameters, args->count);
    struct value list, map = {.kind = VALUE_DICT, .dict = jinja_array(r, 1, sizeof(struct dict))};
    if (!map.dict || !jinja_new_list(r, VALUE_TUPLE, extra, &list)) return false;
    *map.dict = (struct dict){0};
    for (size_t i = 0; i < extra; i++) list.list->items[i] = args->items[d->n_parameters + i];
    for (size_t i = 0; i < args->n_keywords; i++) {
        const struct keyword *k = &args->keywords[i];
        size_t j = 0;
        struct value key;
        while (j < d->n_parameters && strcmp(d->parameters[j].name, k->name) != 0) j++;
        if (j < d->n_parameters && j < args->count)
            return jinja_fail(r, "macro '%s' got two values for '%s'", d->name, k->name);
        if (j < d->n_parameters) continue;
        if (!d->uses_kwargs)
            return jinja_fail(r, "macro '%s' takes no argument '%s'", d->name, k->name);
        if (!jinja_literal(r, k->name, &key) || !jinja_dict_set(r, map.dict, key, k->value))
            return false;
    }
    return (!d->uses_varargs || jinja_bind_name(r, scope, ID_VARARGS, list)) &&
           (!d->uses_kwargs || jinja_bind_name(r, scope, ID_KWARGS, map));
}

/* The argument for parameter `i`, or NULL. */
static const struct value *argument(const struct definition *d, const struct arguments *args,
                                    size_t i)
{
    if (i < args->count) return &args->items[i];
    for (size_t k = 0; k < args->n_keywords; k++)
        if (strcmp(args->keywords[k].name, d->parameters[i].name) == 0)
            return &args->keywords[k].value;
    return NULL;
}

/* A default sees the parameters and not what has their names outside, so all are bound before. */
static bool parameters(struct run *r, const struct definition *d, const struct arguments *args,
                       struct scope *scope)
{
    for (size_t i = 0; i < d->n_parameters; i++) {
        const struct value *given = argument(d, args, i);
        struct value v = given ? *given : value_undefined(d->parameters[i].name);
        if (!jinja_bind_name(r, scope, d->parameters[i].id, v)) return false;
    }
    for (size_t i = 0; i < d->n_parameters; i++) {
        const struct parameter *p = &d->parameters[i];
        struct value v;
        if (!p->preset || argument(d, args, i)) continue;
        if (!jinja_eval(r, p->preset, &v) || !jinja_bind_name(r, scope, p->id, v)) return false;
    }
    return true;
}

bool jinja_call_macro(struct run *r, const struct macro *macro, const struct arguments *args,
                      const struct macro *caller, struct value *out)
{
    const struct definition *d = macro->definition;
    struct scope *outer = r->scope, *scope = new_scope(r, macro->scope);
    struct value caller_value = value_undefined("caller");
    if (caller) caller_value = (struct value){.kind = VALUE_MACRO, .macro = (struct macro *)caller};
    if (!scope) return false;
    r->scope = scope;
    bool ok = surplus(r, d, args, scope) &&
              (!d->uses_caller || d->id == ID_CALLER ||
               jinja_bind_name(r, scope, ID_CALLER, caller_value)) &&
              parameters(r, d, args, scope) && capture(r, &d->body, out) == FLOW_NEXT;
    r->scope = outer;
    return ok;
}

static struct macro *new_macro(struct run *r, const struct node *n)
{
    struct macro *macro = jinja_array(r, 1, sizeof *macro);
    if (macro) *macro = (struct macro){n->definition, r->scope};
    return macro;
}

/* ---- statements -------------------------------------------------------------------------- */

static bool print(struct run *r, struct value v)
{
    struct text *text;
    return jinja_string(r, v, &text) && jinja_emit(r, text);
}

static enum flow execute_if(struct run *r, const struct node *n)
{
    for (; n; n = n->right) {
        struct value v;
        if (!jinja_eval(r, n->test, &v)) return FLOW_FAIL;
        if (value_truth(v)) return jinja_execute(r, &n->body);
        if (!n->right) return jinja_execute(r, &n->otherwise);
    }
    return FLOW_NEXT;
}

/* Set blocks and filter blocks: the body's text through the filters. */
static enum flow filtered(struct run *r, const struct node *n, struct value *out)
{
    struct value outer = r->captured, text;
    enum flow flow = capture_inner(r, &n->body, &text);
    if (flow != FLOW_NEXT) return flow;
    r->captured = text;
    bool ok = jinja_eval(r, n->right, out);
    r->captured = outer;
    return ok ? FLOW_NEXT : FLOW_FAIL;
}

static enum flow execute_with(struct run *r, const struct node *n)
{
    struct scope *outer = r->scope, *inner = new_scope(r, outer);
    if (!inner) return FLOW_FAIL;
    for (size_t i = 0; i + 1 < n->n_items; i += 2) {
        struct value v;
        if (!jinja_eval(r, n->items[i + 1], &v) || !assign(r, inner, n->items[i], v))
            return FLOW_FAIL;
    }
    r->scope = inner;
    enum flow flow = jinja_execute(r, &n->body);
    r->scope = outer;
    return flow;
}

static enum flow execute_one(struct run *r, const struct node *n)
{
    struct value v;
    struct macro *macro;
    enum flow flow;
    bool ok;
    r->line = n->line;
    switch (n->kind) {
    case STATEMENT_TEXT: ok = jinja_emit(r, n->constant.text); break;
    case STATEMENT_PRINT: ok = jinja_eval(r, n->left, &v) && print(r, v); break;
    case STATEMENT_IF: return execute_if(r, n);
    case STATEMENT_FOR: return execute_for(r, n);
    case STATEMENT_SET: ok = jinja_eval(r, n->right, &v) && assign(r, r->scope, n->left, v); break;
    case STATEMENT_SET_BLOCK:
        flow = filtered(r, n, &v);
        if (flow != FLOW_NEXT) return flow;
        ok = assign(r, r->scope, n->left, v);
        break;
    case STATEMENT_FILTER:
        flow = filtered(r, n, &v);
        if (flow != FLOW_NEXT) return flow;
        ok = print(r, v);
        break;
    case STATEMENT_MACRO:
        macro = new_macro(r, n);
        v = (struct value){.kind = VALUE_MACRO, .macro = macro};
        ok = macro && jinja_bind_name(r, r->scope, n->definition->id, v);
        break;
    case STATEMENT_CALL:
        macro = new_macro(r, n);
        ok = macro && jinja_call_node(r, n->right, macro, &v) && print(r, v);
        break;
    case STATEMENT_GENERATION:
        ok = capture_inner(r, &n->body, &v) == FLOW_NEXT && jinja_emit(r, v.text);
        break;
    case STATEMENT_WITH: return execute_with(r, n);
    case STATEMENT_BREAK: return FLOW_BREAK;
    case STATEMENT_CONTINUE: return FLOW_CONTINUE;
    default: ok = jinja_fail(r, "internal error: not a statement"); break;
    }
    return ok ? FLOW_NEXT : FLOW_FAIL;
}

enum flow jinja_execute(struct run *r, const struct block *block)
{
    enum flow flow = FLOW_NEXT;
    if (++r->depth > MAX_DEPTH) {
        jinja_fail(r, "calls are nested too deeply; the limit is %d", MAX_DEPTH);
        return FLOW_FAIL;
    }
    for (size_t i = 0; flow == FLOW_NEXT && i < block->count; i++) {
        flow = jinja_work(r, 1) ? execute_one(r, block->items[i]) : FLOW_FAIL;
    }
    r->depth--;
    return flow;
}
