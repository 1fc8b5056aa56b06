/* Statements of templates: tokens to tree. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <stdlib.h>
#include <string.h>

#include "base/seed.h"
#include "text/template_internal.h"

static struct node *statement(struct parser *p);

/* ---- helpers, also of template_expression.c ---------------------------------------------- */

static bool out_of_memory(struct parser *p)
{
    error_memory(p->compile->err, "a chat template", p->compile->t->arena.taken);
    return false;
}

struct node *jinja_node(struct parser *p, enum node_kind kind, int line)
{
    struct node *n = arena_new(&p->compile->t->arena, 1, sizeof *n);
    if (!n) {
        out_of_memory(p);
        return NULL;
    }
    n->kind = kind;
    n->line = line;
    n->depth = 1;
    return n;
}

/* Rendering recurses as deep as the tree is, so that is bounded. */
struct node *jinja_adopt(struct parser *p, struct node *parent, const struct node *child)
{
    if (!parent) return NULL;
    if (child->depth >= parent->depth) parent->depth = child->depth + 1;
    if (parent->depth <= MAX_NESTING) return parent;
    jinja_refuse(p->compile, LINNET_UNSUPPORTED, parent->line,
                 "expressions are nested too deeply; the limit is %d", MAX_NESTING);
    return NULL;
}

bool jinja_enter(struct parser *p)
{
    if (++p->depth <= MAX_NESTING) return true;
    return jinja_refuse(p->compile, LINNET_UNSUPPORTED, p->token->line,
                        "the source is nested too deeply; the limit is %d", MAX_NESTING);
}

bool jinja_append(struct parser *p, void **items, size_t *count, size_t *capacity, void *item)
{
    if (!mem_reserve(items, capacity, *count + 1, sizeof item)) return out_of_memory(p);
    ((void **)*items)[(*count)++] = item;
    return true;
}

bool jinja_keep(struct parser *p, void **items, size_t count, struct node ***out)
{
    *out = arena_array(&p->compile->t->arena, count, sizeof **out);
    if (!*out) return out_of_memory(p);
    if (count) memcpy(*out, items, count * sizeof **out);
    return true;
}

static uint64_t hash(const struct parser *p, const char *name)
{
    return XXH3_64bits_withSeed(name, strlen(name), p->seed);
}

static bool grow_table(struct parser *p)
{
    size_t size = p->table_size ? 2 * p->table_size : 256;
    int *table = mem_new(size, sizeof *table);
    if (!table) return out_of_memory(p);
    const struct chat_template *t = p->compile->t;
    for (size_t id = 0; id < t->n_names; id++) {
        size_t at = hash(p, t->names[id]) & (size - 1);
        while (table[at]) at = (at + 1) & (size - 1);
        table[at] = (int)id + 1;
    }
    free(p->table);
    p->table = table;
    p->table_size = size;
    return true;
}

int jinja_intern(struct parser *p, const char *name)
{
    struct chat_template *t = p->compile->t;
    if (2 * t->n_names >= p->table_size && !grow_table(p)) return -1;
    size_t at = hash(p, name) & (p->table_size - 1);
    for (; p->table[at]; at = (at + 1) & (p->table_size - 1))
        if (strcmp(t->names[p->table[at] - 1], name) == 0) return p->table[at] - 1;
    if (!mem_reserve((void **)&t->names, &p->names_capacity, t->n_names + 1, sizeof *t->names)) {
        out_of_memory(p);
        return -1;
    }
    t->names[t->n_names++] = name;
    p->table[at] = (int)t->n_names;
    return (int)t->n_names - 1;
}

static bool mark_assigned(struct parser *p, int id)
{
    size_t had = p->assigned_capacity;
    if (!mem_reserve((void **)&p->assigned, &p->assigned_capacity, (size_t)id + 1, sizeof(bool)))
        return out_of_memory(p);
    memset(p->assigned + had, 0, p->assigned_capacity - had);
    p->assigned[id] = true;
    return true;
}

bool jinja_at_name(const struct parser *p, const char *name)
{
    return p->token->kind == TOKEN_NAME && strcmp(p->token->bytes, name) == 0;
}

bool jinja_at_op(const struct parser *p, int op)
{
    return p->token->kind == TOKEN_OPERATOR && p->token->op == op;
}

bool jinja_skip_name(struct parser *p, const char *name)
{
    if (!jinja_at_name(p, name)) return false;
    p->token++;
    return true;
}

bool jinja_skip_op(struct parser *p, int op)
{
    if (!jinja_at_op(p, op)) return false;
    p->token++;
    return true;
}

struct node *jinja_syntax_error(struct parser *p, const char *expected)
{
    const struct token *t = p->token;
    const char *found = t->kind == TOKEN_NAME           ? t->bytes
                        : t->kind == TOKEN_STRING       ? "a string"
                        : t->kind == TOKEN_INTEGER      ? "an integer"
                        : t->kind == TOKEN_FLOAT        ? "a float"
                        : t->kind == TOKEN_BLOCK_END    ? "the end of the tag"
                        : t->kind == TOKEN_VARIABLE_END ? "the end of the expression"
                        : t->kind == TOKEN_END          ? "the end of the template"
                                                        : "an operator";
    jinja_refuse(p->compile, LINNET_FORMAT, t->line, "expected %s, found %s", expected, found);
    return NULL;
}

/* ---- blocks ------------------------------------------------------------------------------ */

static bool at_end_word(const struct parser *p, const char *const *ends)
{
    for (; *ends; ends++)
        if (jinja_at_name(p, *ends)) return true;
    return false;
}

static struct node *text_node(struct parser *p)
{
    struct node *n = jinja_node(p, STATEMENT_TEXT, p->token->line);
    struct text *text = arena_new(&p->compile->t->arena, 1, sizeof *text);
    if (!n || !text) return NULL;
    text->bytes = p->token->bytes;
    text->size = p->token->size;
    n->constant = (struct value){.kind = VALUE_STRING, .text = text};
    p->token++;
    return n;
}

static struct node *print_node(struct parser *p)
{
    p->token++;
    struct node *n = jinja_node(p, STATEMENT_PRINT, p->token->line);
    if (!n) return NULL;
    n->left = jinja_tuple(p, TUPLE_CONDITION);
    if (!n->left) return NULL;
    if (p->token->kind != TOKEN_VARIABLE_END) return jinja_syntax_error(p, "'}}'");
    p->token++;
    return n;
}

/* Statements up to {% and one of the words (at which it stops), or up to the end if ends is NULL.
 */
static bool parse_block(struct parser *p, const char *const *ends, struct block *out)
{
    void **items = NULL;
    size_t count = 0, capacity = 0;
    bool ok = jinja_enter(p);
    while (ok) {
        struct node *n;
        if (p->token->kind == TOKEN_END) {
            if (ends)
                ok = jinja_refuse(p->compile, LINNET_FORMAT, p->token->line,
                                  "the template ends before '%s'", ends[0]);
            break;
        }
        if (p->token->kind == TOKEN_DATA) {
            n = text_node(p);
        } else if (p->token->kind == TOKEN_VARIABLE_BEGIN) {
            n = print_node(p);
        } else {
            p->token++;
            if (ends && at_end_word(p, ends)) break;
            n = statement(p);
            if (n && p->token->kind != TOKEN_BLOCK_END) n = jinja_syntax_error(p, "'%}'");
            p->token++;
        }
        ok = n && jinja_append(p, (void **)&items, &count, &capacity, n);
    }
    p->depth--;
    if (ok) ok = jinja_keep(p, items, count, &out->items);
    out->count = count;
    free(items);
    return ok;
}

/* The rest of the opening tag, then the block. */
static bool body(struct parser *p, const char *const *ends, struct block *out)
{
    jinja_skip_op(p, ':');
    if (p->token->kind != TOKEN_BLOCK_END) return jinja_syntax_error(p, "'%}'");
    p->token++;
    return parse_block(p, ends, out);
}

/* A body whose end tag has one word: the word is passed. */
static bool whole_body(struct parser *p, const char *end, struct block *out)
{
    const char *ends[] = {end, NULL};
    if (!body(p, ends, out)) return false;
    p->token++;
    return true;
}

/* ---- targets ----------------------------------------------------------------------------- */

static struct node *target_name(struct parser *p)
{
    static const char *const reserved[] = {"true", "false", "none", "True", "False", "None", NULL};
    if (p->token->kind != TOKEN_NAME) return jinja_syntax_error(p, "a name to assign to");
    if (at_end_word(p, reserved)) return jinja_syntax_error(p, "a name that can be assigned to");
    struct node *n = jinja_node(p, EXPR_NAME, p->token->line);
    if (!n) return NULL;
    n->name = p->token->bytes;
    n->id = jinja_intern(p, n->name);
    if (n->id < 0 || !mark_assigned(p, n->id)) return NULL;
    p->token++;
    return n;
}

static struct node *target(struct parser *p, bool with_namespace);

static struct node *single_target(struct parser *p, bool with_namespace)
{
    if (jinja_skip_op(p, '(')) {
        if (!jinja_enter(p)) return NULL;
        struct node *inner = target(p, with_namespace);
        p->depth--;
        if (inner && !jinja_skip_op(p, ')')) return jinja_syntax_error(p, "')'");
        return inner;
    }
    bool dotted =
        p->token->kind == TOKEN_NAME && p->token[1].kind == TOKEN_OPERATOR && p->token[1].op == '.';
    if (!dotted || !with_namespace) return target_name(p);
    struct node *n = jinja_node(p, EXPR_ATTRIBUTE, p->token->line);
    struct node *object = jinja_node(p, EXPR_NAME, p->token->line);
    if (!n || !object) return NULL;
    object->name = p->token->bytes;
    object->id = jinja_intern(p, object->name);
    if (object->id < 0) return NULL;
    p->token += 2;
    if (p->token->kind != TOKEN_NAME) return jinja_syntax_error(p, "a name after '.'");
    n->name = p->token->bytes;
    n->left = object;
    p->token++;
    return n;
}

static struct node *target(struct parser *p, bool with_namespace)
{
    struct node *first = single_target(p, with_namespace);
    if (!first || !jinja_at_op(p, ',')) return first;
    struct node *tuple = jinja_node(p, EXPR_TUPLE, first->line);
    void **items = NULL;
    size_t count = 0, capacity = 0;
    bool ok = tuple && jinja_append(p, (void **)&items, &count, &capacity, first);
    while (ok && jinja_skip_op(p, ',')) {
        if (p->token->kind == TOKEN_BLOCK_END || jinja_at_op(p, '=') || jinja_at_op(p, ')') ||
            jinja_at_name(p, "in"))
            break;
        struct node *next = single_target(p, with_namespace);
        ok = next && jinja_append(p, (void **)&items, &count, &capacity, next);
    }
    ok = ok && jinja_keep(p, items, count, &tuple->items);
    free(items);
    if (!ok) return NULL;
    tuple->n_items = count;
    return tuple;
}

/* ---- statements -------------------------------------------------------------------------- */

static struct node *parse_if(struct parser *p, struct node *n)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct node *last = n;
    for (;;) {
        last->test = jinja_tuple(p, 0);
        if (!last->test || !body(p, ends, &last->body)) return NULL;
        if (!jinja_skip_name(p, "elif")) break;
        last->right = jinja_node(p, STATEMENT_IF, p->token->line);
        last = last->right;
        if (!last) return NULL;
    }
    if (jinja_skip_name(p, "else")) return whole_body(p, "endif", &last->otherwise) ? n : NULL;
    p->token++;
    return n;
}

static struct node *parse_for(struct parser *p, struct node *n)
{
    static const char *const ends[] = {"endfor", "else", NULL};
    n->left = target(p, false);
    if (!n->left) return NULL;
    if (!jinja_skip_name(p, "in")) return jinja_syntax_error(p, "'in'");
    n->right = jinja_tuple(p, TUPLE_ENDS_AT_RECURSIVE);
    if (!n->right) return NULL;
    if (jinja_skip_name(p, "if")) {
        n->test = jinja_expression(p, true);
        if (!n->test) return NULL;
    }
    if (jinja_at_name(p, "recursive")) {
        jinja_refuse(p->compile, LINNET_UNSUPPORTED, n->line,
                     "recursive loops are not supported; use a template without them");
        return NULL;
    }
    p->loops++;
    bool ok = body(p, ends, &n->body);
    p->loops--;
    if (!ok) return NULL;
    if (jinja_skip_name(p, "else")) return whole_body(p, "endfor", &n->otherwise) ? n : NULL;
    p->token++;
    return n;
}

static struct node *captured(struct parser *p)
{
    return jinja_node(p, EXPR_CAPTURED, p->token->line);
}

static struct node *parse_set(struct parser *p, struct node *n)
{
    n->left = target(p, true);
    if (!n->left) return NULL;
    if (jinja_skip_op(p, '=')) {
        n->right = jinja_tuple(p, TUPLE_CONDITION);
        return n->right ? n : NULL;
    }
    n->kind = STATEMENT_SET_BLOCK;
    n->right = jinja_filters(p, captured(p), false);
    return n->right && whole_body(p, "endset", &n->body) ? n : NULL;
}

static struct node *parse_filter_block(struct parser *p, struct node *n)
{
    n->right = jinja_filters(p, captured(p), true);
    return n->right && whole_body(p, "endfilter", &n->body) ? n : NULL;
}

static bool parameters(struct parser *p, struct definition *d)
{
    struct parameter *list = NULL;
    size_t count = 0, capacity = 0;
    bool ok = true;
    p->token++;
    while (ok && !jinja_at_op(p, ')')) {
        if (count && !jinja_skip_op(p, ',')) {
            ok = jinja_syntax_error(p, "',' or ')'");
            break;
        }
        struct node *name = target_name(p), *preset = NULL;
        ok = name != NULL;
        if (ok && jinja_skip_op(p, '=')) {
            preset = jinja_expression(p, true);
            ok = preset != NULL;
        } else if (ok && count && list[count - 1].preset) {
            ok = jinja_syntax_error(p, "a default value, as the parameter before has one");
        }
        if (!ok) break;
        ok = mem_reserve((void **)&list, &capacity, count + 1, sizeof *list);
        if (ok) list[count++] = (struct parameter){name->name, name->id, preset};
    }
    if (ok) {
        p->token++;
        d->parameters = arena_array(&p->compile->t->arena, count, sizeof *list);
        ok = d->parameters != NULL;
        if (ok && count) memcpy(d->parameters, list, count * sizeof *list);
        d->n_parameters = count;
    }
    free(list);
    return ok;
}

/* Parameters and body; break and continue do not reach out of it. */
static bool definition_body(struct parser *p, struct definition *d, const char *end)
{
    int loops = p->loops;
    struct definition *outer = p->definition;
    p->loops = 0;
    p->definition = d;
    bool ok = whole_body(p, end, &d->body);
    p->definition = outer;
    p->loops = loops;
    if (outer) { /* a use within an inner one counts for the outer too, as in Jinja */
        outer->uses_caller |= d->uses_caller;
        outer->uses_varargs |= d->uses_varargs;
        outer->uses_kwargs |= d->uses_kwargs;
    }
    return ok;
}

static struct node *parse_macro(struct parser *p, struct node *n)
{
    struct definition *d = arena_new(&p->compile->t->arena, 1, sizeof *d);
    struct node *name = d ? target_name(p) : NULL;
    if (!name) return NULL;
    n->definition = d;
    d->name = name->name;
    d->id = name->id;
    if (!jinja_at_op(p, '(')) return jinja_syntax_error(p, "'(' after the name of a macro");
    return parameters(p, d) && definition_body(p, d, "endmacro") ? n : NULL;
}

static struct node *parse_call(struct parser *p, struct node *n)
{
    struct definition *d = arena_new(&p->compile->t->arena, 1, sizeof *d);
    if (!d) return NULL;
    n->definition = d;
    d->name = "caller";
    d->id = ID_CALLER;
    if (jinja_at_op(p, '(') && !parameters(p, d)) return NULL;
    n->right = jinja_expression(p, true);
    if (!n->right) return NULL;
    if (n->right->kind != EXPR_CALL) return jinja_syntax_error(p, "a call of a macro");
    return definition_body(p, d, "endcall") ? n : NULL;
}

static struct node *parse_with(struct parser *p, struct node *n)
{
    void **items = NULL;
    size_t count = 0, capacity = 0;
    bool ok = true;
    while (ok && p->token->kind != TOKEN_BLOCK_END) {
        if (count && !jinja_skip_op(p, ',')) {
            ok = jinja_syntax_error(p, "','");
            break;
        }
        struct node *name = target(p, false), *value = NULL;
        if (name && !jinja_skip_op(p, '=')) name = jinja_syntax_error(p, "'='");
        if (name) value = jinja_expression(p, true);
        ok = value && jinja_append(p, (void **)&items, &count, &capacity, name) &&
             jinja_append(p, (void **)&items, &count, &capacity, value);
    }
    ok = ok && jinja_keep(p, items, count, &n->items);
    free(items);
    n->n_items = count;
    return ok && whole_body(p, "endwith", &n->body) ? n : NULL;
}

static struct node *parse_generation(struct parser *p, struct node *n)
{
    int loops = p->loops; /* it is a call block in Hugging Face's renderer */
    p->loops = 0;
    bool ok = whole_body(p, "endgeneration", &n->body);
    p->loops = loops;
    return ok ? n : NULL;
}

static struct node *parse_leave(struct parser *p, struct node *n)
{
    if (p->loops > 0) return n;
    jinja_refuse(p->compile, LINNET_FORMAT, n->line, "'break' or 'continue' outside a loop");
    return NULL;
}

static struct node *statement(struct parser *p)
{
    static const struct {
        const char *word;
        enum node_kind kind;
        struct node *(*parse)(struct parser *p, struct node *n);
    } statements[] = {
        {"if", STATEMENT_IF, parse_if},
        {"for", STATEMENT_FOR, parse_for},
        {"set", STATEMENT_SET, parse_set},
        {"macro", STATEMENT_MACRO, parse_macro},
        {"call", STATEMENT_CALL, parse_call},
        {"filter", STATEMENT_FILTER, parse_filter_block},
        {"with", STATEMENT_WITH, parse_with},
        {"generation", STATEMENT_GENERATION, parse_generation},
        {"break", STATEMENT_BREAK, parse_leave},
        {"continue", STATEMENT_CONTINUE, parse_leave},
    };
    if (p->token->kind != TOKEN_NAME) return jinja_syntax_error(p, "the name of a tag");
    for (size_t i = 0; i < sizeof statements / sizeof *statements; i++) {
        if (strcmp(p->token->bytes, statements[i].word) != 0) continue;
        struct node *n = jinja_node(p, statements[i].kind, p->token->line);
        p->token++;
        return n ? statements[i].parse(p, n) : NULL;
    }
    jinja_refuse(p->compile, LINNET_UNSUPPORTED, p->token->line,
                 "unknown or misplaced tag '%s'; use a template without it", p->token->bytes);
    return NULL;
}

/* A called name must be a function, or something the template assigns somewhere. */
static bool check_calls(struct parser *p)
{
    for (size_t i = 0; i < p->n_called; i++) {
        const struct node *n = p->called[i];
        bool assigned = (size_t)n->id < p->assigned_capacity && p->assigned[n->id];
        if (assigned || n->id < N_FIXED_IDS || jinja_find_function(n->name)) continue;
        return jinja_refuse(p->compile, LINNET_UNSUPPORTED, n->line,
                            "unknown function '%s'; use a template without it", n->name);
    }
    return true;
}

bool jinja_parse(struct compile *c)
{
    static const char *const fixed[N_FIXED_IDS] = {"loop", "caller", "varargs", "kwargs"};
    struct parser p = {.compile = c, .token = c->tokens.items, .seed = seed_for_hashing()};
    bool ok = true;
    for (int i = 0; ok && i < N_FIXED_IDS; i++) ok = jinja_intern(&p, fixed[i]) == i;
    ok = ok && parse_block(&p, NULL, &c->t->body) && check_calls(&p);
    free(p.table);
    free(p.assigned);
    free(p.called);
    return ok;
}
