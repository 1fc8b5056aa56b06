/* Expressions of templates: tokens to tree, with Jinja's own precedence. */
#include <stdlib.h>
#include <string.h>

#include "text/template_internal.h"

/* Nodes being gathered; kept in the arena once complete. */
struct nodes {
    void **items;
    size_t count, capacity;
};

static struct node *keep_items(struct parser *p, struct node *n, struct nodes *list)
{
    for (size_t i = 0; n && i < list->count; i++) n = jinja_adopt(p, n, list->items[i]);
    if (n && !jinja_keep(p, list->items, list->count, &n->items)) n = NULL;
    if (n) n->n_items = list->count;
    free(list->items);
    return n;
}

static struct node *drop_items(struct nodes *list)
{
    free(list->items);
    return NULL;
}

static bool gather(struct parser *p, struct nodes *list, struct node *item)
{
    return item && jinja_append(p, (void **)&list->items, &list->count, &list->capacity, item);
}

static struct node *pair(struct parser *p, enum node_kind kind, int line, int op, struct node *left,
                         struct node *right)
{
    if (!left || !right) return NULL;
    struct node *n = jinja_node(p, kind, line);
    if (!n) return NULL;
    n->op = op;
    n->left = left;
    n->right = right;
    return jinja_adopt(p, jinja_adopt(p, n, left), right);
}

static struct node *constant(struct parser *p, struct value v)
{
    struct node *n = jinja_node(p, EXPR_CONST, p->token->line);
    if (n) n->constant = v;
    return n;
}

/* Adjacent string literals are one. */
static struct node *string(struct parser *p)
{
    struct arena *arena = &p->compile->t->arena;
    struct node *n = constant(p, (struct value){.kind = VALUE_STRING});
    struct text *text = arena_new(arena, 1, sizeof *text);
    if (!n || !text) return NULL;
    size_t size = 0;
    const struct token *first = p->token;
    for (; p->token->kind == TOKEN_STRING; p->token++) size += p->token->size;
    char *bytes = arena_array(arena, size + 1, 1);
    if (!bytes) return NULL;
    text->bytes = bytes;
    text->size = size;
    for (; first < p->token; bytes += first->size, first++)
        memcpy(bytes, first->bytes, first->size);
    *bytes = 0;
    n->constant.text = text;
    return n;
}

static struct node *list_or_dict(struct parser *p, bool dict)
{
    struct nodes items = {0};
    struct node *n = jinja_node(p, dict ? EXPR_DICT : EXPR_LIST, p->token->line);
    int end = dict ? '}' : ']';
    p->token++;
    while (!jinja_at_op(p, end)) {
        if (items.count && !jinja_skip_op(p, ',')) {
            jinja_syntax_error(p, "',' or the end of a list or dict");
            return drop_items(&items);
        }
        if (jinja_at_op(p, end)) break;
        if (!gather(p, &items, jinja_expression(p, true))) return drop_items(&items);
        if (!dict) continue;
        if (!jinja_skip_op(p, ':')) {
            jinja_syntax_error(p, "':' after the key of a dict");
            return drop_items(&items);
        }
        if (!gather(p, &items, jinja_expression(p, true))) return drop_items(&items);
    }
    p->token++;
    return keep_items(p, n, &items);
}

static struct node *name(struct parser *p)
{
    const struct token *token = p->token;
    struct node *n;
    if (strcmp(token->bytes, "true") == 0 || strcmp(token->bytes, "True") == 0) {
        n = constant(p, value_bool(true));
    } else if (strcmp(token->bytes, "false") == 0 || strcmp(token->bytes, "False") == 0) {
        n = constant(p, value_bool(false));
    } else if (strcmp(token->bytes, "none") == 0 || strcmp(token->bytes, "None") == 0) {
        n = constant(p, value_none());
    } else {
        n = jinja_node(p, EXPR_NAME, token->line);
        if (!n) return NULL;
        n->name = token->bytes;
        n->id = jinja_intern(p, token->bytes);
        if (n->id < 0) return NULL;
        if (p->definition) {
            p->definition->uses_varargs |= n->id == ID_VARARGS;
            p->definition->uses_kwargs |= n->id == ID_KWARGS;
            p->definition->uses_caller |= n->id == ID_CALLER;
        }
    }
    p->token++;
    return n;
}

static struct node *primary(struct parser *p)
{
    struct node *n = NULL;
    switch (p->token->kind) {
    case TOKEN_NAME: return name(p);
    case TOKEN_STRING: return string(p);
    case TOKEN_INTEGER:
        n = constant(p, value_int(p->token->integer));
        p->token++;
        return n;
    case TOKEN_FLOAT:
        n = constant(p, value_float(p->token->real));
        p->token++;
        return n;
    default: break;
    }
    if (jinja_at_op(p, '[')) return list_or_dict(p, false);
    if (jinja_at_op(p, '{')) return list_or_dict(p, true);
    if (!jinja_skip_op(p, '(')) return jinja_syntax_error(p, "an expression");
    n = jinja_tuple(p, TUPLE_CONDITION | TUPLE_PARENTHESES);
    if (n && !jinja_skip_op(p, ')')) return jinja_syntax_error(p, "')'");
    return n;
}

/* (a, b, key=c) into n->items and n->keywords. */
static struct node *call_arguments(struct parser *p, struct node *n)
{
    struct nodes items = {0};
    struct keyword_node *keywords = NULL;
    size_t n_keywords = 0, capacity = 0;
    bool ok = n != NULL;
    p->token++;
    for (bool first = true; ok && !jinja_at_op(p, ')'); first = false) {
        if (!first && !jinja_skip_op(p, ',')) {
            ok = jinja_syntax_error(p, "',' or ')' in a call");
            break;
        }
        if (!first && jinja_at_op(p, ')')) break;
        if (jinja_at_op(p, '*') || jinja_at_op(p, OP_POWER)) {
            ok = jinja_refuse(p->compile, LINNET_UNSUPPORTED, p->token->line,
                              "arguments by * or ** are not supported");
            break;
        }
        if (p->token->kind == TOKEN_NAME && p->token[1].kind == TOKEN_OPERATOR &&
            p->token[1].op == '=') {
            const char *key = p->token->bytes;
            p->token += 2;
            struct node *value = jinja_expression(p, true);
            ok = value && (n = jinja_adopt(p, n, value)) != NULL &&
                 mem_reserve((void **)&keywords, &capacity, n_keywords + 1, sizeof *keywords);
            if (ok) keywords[n_keywords++] = (struct keyword_node){key, value};
        } else if (n_keywords) {
            ok = jinja_syntax_error(p, "a keyword argument: positional ones come first");
        } else {
            ok = gather(p, &items, jinja_expression(p, true));
        }
    }
    if (ok) {
        p->token++;
        n->keywords = arena_array(&p->compile->t->arena, n_keywords, sizeof *keywords);
        if (n->keywords && n_keywords) memcpy(n->keywords, keywords, n_keywords * sizeof *keywords);
        n->n_keywords = n_keywords;
        ok = n->keywords != NULL;
    }
    free(keywords);
    return ok ? keep_items(p, n, &items) : drop_items(&items);
}

static struct node *call(struct parser *p, struct node *callee)
{
    struct node *n = jinja_node(p, EXPR_CALL, p->token->line);
    if (!n) return NULL;
    n->left = callee;
    if (!jinja_adopt(p, n, callee) || !call_arguments(p, n)) return NULL;
    if (callee->kind == EXPR_NAME &&
        !jinja_append(p, (void **)&p->called, &p->n_called, &p->called_capacity, callee))
        return NULL;
    if (callee->kind == EXPR_ATTRIBUTE && !jinja_is_method(callee->name)) {
        jinja_refuse(p->compile, LINNET_UNSUPPORTED, n->line,
                     "unknown method '%s'; use a template without it", callee->name);
        return NULL;
    }
    return n;
}

/* The inside of [ ]: an expression, or a slice. */
static struct node *subscript(struct parser *p, struct node *object)
{
    int line = p->token->line;
    struct node *parts[3] = {0};
    int n_parts = 0, colons = 0;
    p->token++;
    while (!jinja_at_op(p, ']')) {
        if (jinja_at_op(p, ':') && colons < 2) {
            p->token++;
            n_parts = ++colons;
            continue;
        }
        if (n_parts > colons) return jinja_syntax_error(p, "']'");
        parts[colons] = jinja_expression(p, true);
        if (!parts[colons]) return NULL;
        n_parts = colons + 1;
        if (jinja_at_op(p, ',')) {
            jinja_refuse(p->compile, LINNET_UNSUPPORTED, line,
                         "a subscript with commas is not supported");
            return NULL;
        }
    }
    if (n_parts == 0) return jinja_syntax_error(p, "a subscript");
    p->token++;
    if (colons == 0) return pair(p, EXPR_ITEM, line, 0, object, parts[0]);
    struct node *n = jinja_node(p, EXPR_SLICE, line);
    if (!n) return NULL;
    n->left = object;
    if (!jinja_adopt(p, n, object)) return NULL;
    for (int i = 0; i < 3; i++)
        if (parts[i] && !jinja_adopt(p, n, parts[i])) return NULL;
    n->n_items = 3;
    return jinja_keep(p, (void **)parts, 3, &n->items) ? n : NULL;
}

static struct node *attribute(struct parser *p, struct node *object)
{
    int line = p->token->line;
    p->token++;
    if (p->token->kind == TOKEN_INTEGER) {
        struct node *index = constant(p, value_int(p->token->integer));
        p->token++;
        return pair(p, EXPR_ITEM, line, 0, object, index);
    }
    if (p->token->kind != TOKEN_NAME) return jinja_syntax_error(p, "a name after '.'");
    struct node *n = jinja_node(p, EXPR_ATTRIBUTE, line);
    if (!n) return NULL;
    n->name = p->token->bytes;
    n->left = object;
    p->token++;
    return jinja_adopt(p, n, object);
}

static struct node *postfix(struct parser *p, struct node *n)
{
    while (n) {
        if (jinja_at_op(p, '.'))
            n = attribute(p, n);
        else if (jinja_at_op(p, '['))
            n = subscript(p, n);
        else if (jinja_at_op(p, '('))
            n = call(p, n);
        else
            break;
    }
    return n;
}

struct node *jinja_filters(struct parser *p, struct node *input, bool starts_inline)
{
    while (input && (starts_inline || jinja_at_op(p, '|'))) {
        if (!starts_inline) p->token++;
        starts_inline = false;
        if (p->token->kind != TOKEN_NAME) return jinja_syntax_error(p, "the name of a filter");
        struct node *n = jinja_node(p, EXPR_FILTER, p->token->line);
        if (!n) return NULL;
        n->name = p->token->bytes;
        n->filter = jinja_find_filter(n->name);
        if (!n->filter) {
            jinja_refuse(p->compile, LINNET_UNSUPPORTED, n->line,
                         "unknown filter '%s'; use a template without it", n->name);
            return NULL;
        }
        n->left = input;
        if (!jinja_adopt(p, n, input)) return NULL;
        p->token++;
        if (jinja_at_op(p, '(') && !call_arguments(p, n)) return NULL;
        input = n;
    }
    return input;
}

static bool starts_test_argument(const struct parser *p)
{
    switch (p->token->kind) {
    case TOKEN_NAME:
        return !jinja_at_name(p, "else") && !jinja_at_name(p, "or") && !jinja_at_name(p, "and");
    case TOKEN_STRING:
    case TOKEN_INTEGER:
    case TOKEN_FLOAT: return true;
    default: return jinja_at_op(p, '[') || jinja_at_op(p, '{');
    }
}

static struct node *test(struct parser *p, struct node *input)
{
    int line = p->token->line;
    p->token++;
    bool negated = jinja_skip_name(p, "not");
    if (p->token->kind != TOKEN_NAME) return jinja_syntax_error(p, "the name of a test");
    struct node *n = jinja_node(p, EXPR_TEST, line);
    if (!n) return NULL;
    n->name = p->token->bytes;
    n->check = jinja_find_test(n->name);
    if (!n->check) {
        jinja_refuse(p->compile, LINNET_UNSUPPORTED, line,
                     "unknown test '%s'; use a template without it", n->name);
        return NULL;
    }
    n->left = input;
    p->token++;
    if (!jinja_adopt(p, n, input)) return NULL;
    if (jinja_at_op(p, '(')) {
        if (!call_arguments(p, n)) return NULL;
    } else if (starts_test_argument(p)) {
        if (jinja_at_name(p, "is")) return jinja_syntax_error(p, "no second test");
        struct node *argument = primary(p);
        if (argument) argument = postfix(p, argument);
        struct nodes items = {0};
        if (!gather(p, &items, argument)) return drop_items(&items);
        if (!keep_items(p, n, &items)) return NULL;
    }
    if (!negated) return n;
    struct node *opposite = jinja_node(p, EXPR_UNARY, line);
    if (!opposite) return NULL;
    opposite->op = OP_NOT;
    opposite->left = n;
    return jinja_adopt(p, opposite, n);
}

static struct node *unary(struct parser *p, bool with_filter)
{
    struct node *n;
    if (!jinja_enter(p)) return NULL;
    if (jinja_at_op(p, '-') || jinja_at_op(p, '+')) {
        n = jinja_node(p, EXPR_UNARY, p->token->line);
        if (!n) return NULL;
        n->op = p->token->op;
        p->token++;
        n->left = unary(p, false);
        n = n->left ? jinja_adopt(p, n, n->left) : NULL;
    } else {
        n = primary(p);
    }
    n = postfix(p, n);
    while (n && with_filter) {
        if (jinja_at_op(p, '|'))
            n = jinja_filters(p, n, false);
        else if (jinja_at_name(p, "is"))
            n = test(p, n);
        else if (jinja_at_op(p, '('))
            n = call(p, n);
        else
            break;
    }
    p->depth--;
    return n;
}

static struct node *power(struct parser *p)
{
    struct node *left = unary(p, true);
    while (left && jinja_at_op(p, OP_POWER)) {
        int line = p->token++->line;
        left = pair(p, EXPR_BINARY, line, OP_POWER, left, unary(p, true));
    }
    return left;
}

static struct node *product(struct parser *p)
{
    struct node *left = power(p);
    while (left && (jinja_at_op(p, '*') || jinja_at_op(p, '/') || jinja_at_op(p, '%') ||
                    jinja_at_op(p, OP_FLOOR_DIVIDE))) {
        const struct token *op = p->token++;
        left = pair(p, EXPR_BINARY, op->line, op->op, left, power(p));
    }
    return left;
}

static struct node *concat(struct parser *p)
{
    struct node *first = product(p);
    if (!first || !jinja_at_op(p, '~')) return first;
    struct node *n = jinja_node(p, EXPR_CONCAT, p->token->line);
    struct nodes items = {0};
    if (!gather(p, &items, first)) return drop_items(&items);
    while (jinja_skip_op(p, '~'))
        if (!gather(p, &items, product(p))) return drop_items(&items);
    return keep_items(p, n, &items);
}

static struct node *sum(struct parser *p)
{
    struct node *left = concat(p);
    while (left && (jinja_at_op(p, '+') || jinja_at_op(p, '-'))) {
        const struct token *op = p->token++;
        left = pair(p, EXPR_BINARY, op->line, op->op, left, concat(p));
    }
    return left;
}

static int comparison(struct parser *p)
{
    static const int ops[] = {OP_EQ, OP_NE, '<', '>', OP_LE, OP_GE};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (jinja_skip_op(p, ops[i])) return ops[i];
    if (jinja_skip_name(p, "in")) return OP_IN;
    if (!jinja_at_name(p, "not") || p->token[1].kind != TOKEN_NAME ||
        strcmp(p->token[1].bytes, "in") != 0)
        return 0;
    p->token += 2;
    return OP_NOT_IN;
}

static struct node *compare(struct parser *p)
{
    int line = p->token->line;
    struct node *left = sum(p);
    if (!left) return NULL;
    struct nodes items = {0};
    int *ops = NULL;
    size_t n_ops = 0, capacity = 0;
    bool ok = true;
    for (int op; ok && (op = comparison(p)) != 0;) {
        ok = mem_reserve((void **)&ops, &capacity, n_ops + 1, sizeof *ops) &&
             gather(p, &items, sum(p));
        if (ok) ops[n_ops++] = op;
    }
    if (ok && n_ops == 0) {
        free(ops);
        free(items.items);
        return left;
    }
    struct node *n = ok ? jinja_node(p, EXPR_COMPARE, line) : NULL;
    if (n) {
        n->left = left;
        n->ops = arena_array(&p->compile->t->arena, n_ops, sizeof *ops);
        if (n->ops) memcpy(n->ops, ops, n_ops * sizeof *ops);
        n = n->ops ? jinja_adopt(p, n, left) : NULL;
    }
    free(ops);
    return n ? keep_items(p, n, &items) : drop_items(&items);
}

static struct node *negation(struct parser *p)
{
    if (!jinja_at_name(p, "not")) return compare(p);
    if (!jinja_enter(p)) return NULL;
    struct node *n = jinja_node(p, EXPR_UNARY, p->token->line);
    if (!n) return NULL;
    n->op = OP_NOT;
    p->token++;
    n->left = negation(p);
    p->depth--;
    return n->left ? jinja_adopt(p, n, n->left) : NULL;
}

static struct node *conjunction(struct parser *p)
{
    struct node *left = negation(p);
    while (left && jinja_at_name(p, "and")) {
        int line = p->token++->line;
        left = pair(p, EXPR_AND, line, 0, left, negation(p));
    }
    return left;
}

static struct node *disjunction(struct parser *p)
{
    struct node *left = conjunction(p);
    while (left && jinja_at_name(p, "or")) {
        int line = p->token++->line;
        left = pair(p, EXPR_OR, line, 0, left, conjunction(p));
    }
    return left;
}

struct node *jinja_expression(struct parser *p, bool with_condition)
{
    if (!jinja_enter(p)) return NULL;
    struct node *n = disjunction(p);
    while (n && with_condition && jinja_at_name(p, "if")) {
        struct node *condition = jinja_node(p, EXPR_CONDITION, p->token->line);
        p->token++;
        if (!condition) return NULL;
        condition->left = n;
        condition->test = disjunction(p);
        if (!condition->test) return NULL;
        if (jinja_skip_name(p, "else")) {
            condition->right = jinja_expression(p, true);
            if (!condition->right || !jinja_adopt(p, condition, condition->right)) return NULL;
        }
        n = jinja_adopt(p, jinja_adopt(p, condition, condition->test), n);
    }
    p->depth--;
    return n;
}

struct node *jinja_tuple(struct parser *p, int flags)
{
    struct nodes items = {0};
    bool is_tuple = false;
    int line = p->token->line;
    for (;;) {
        if (p->token->kind == TOKEN_VARIABLE_END || p->token->kind == TOKEN_BLOCK_END ||
            jinja_at_op(p, ')') ||
            ((flags & TUPLE_ENDS_AT_RECURSIVE) && jinja_at_name(p, "recursive")))
            break;
        if (!gather(p, &items, jinja_expression(p, flags & TUPLE_CONDITION)))
            return drop_items(&items);
        if (!jinja_skip_op(p, ',')) break;
        is_tuple = true;
    }
    if (!is_tuple && items.count == 1) {
        struct node *only = items.items[0];
        free(items.items);
        return only;
    }
    if (!is_tuple && !(flags & TUPLE_PARENTHESES)) {
        drop_items(&items);
        return jinja_syntax_error(p, "an expression");
    }
    return keep_items(p, jinja_node(p, EXPR_TUPLE, line), &items);
}
