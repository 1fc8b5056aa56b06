/*
 * template_internal.h - what the files of the chat-template interpreter share.
 *
 * Source -> tokens (template_lexer.c) -> tree (template_parser.c, template_expression.c), once;
 * then, for each render, the tree is walked (template_statement.c, template_eval.c). All memory of
 * a render is in one bounded arena; values are immutable except for namespaces, as in the
 * immutable sandbox, so they share their parts freely.
 */
#ifndef LINNET_TEXT_TEMPLATE_INTERNAL_H
#define LINNET_TEXT_TEMPLATE_INTERNAL_H

#include "base/arena.h"
#include "base/memory.h"
#include "text/template.h"

enum {
    MAX_SOURCE = 1 << 20,  /* bytes of a template */
    MAX_NESTING = 200,     /* of expressions and blocks in the source */
    MAX_DEPTH = 1200,      /* of calls while rendering: nesting times macro recursion */
    MAX_VALUE_DEPTH = 200, /* of lists within lists */
    MAX_RANGE = 100000,    /* items of range(), as the sandbox has it */
    MAX_RENDER_MEMORY = 64 << 20,
    MAX_OUTPUT = 16 << 20,
    MAX_STEPS = 20000000
};

/* ---- values ------------------------------------------------------------------------------ */

enum value_kind {
    VALUE_ABSENT, /* no value at all: an argument that was not given */
    VALUE_UNDEFINED,
    VALUE_NONE,
    VALUE_BOOL,
    VALUE_INT,
    VALUE_FLOAT,
    VALUE_STRING,
    VALUE_LIST,
    VALUE_TUPLE,
    VALUE_DICT,
    VALUE_RANGE,
    VALUE_VIEW,     /* dict.keys(), .values(), .items() */
    VALUE_ITERATOR, /* what map, select, reverse... give: can be walked once */
    VALUE_NAMESPACE,
    VALUE_LOOP,
    VALUE_MACRO,
    VALUE_FUNCTION,
    VALUE_METHOD,
    VALUE_CYCLER,
    VALUE_JOINER
};

struct value {
    enum value_kind kind;
    union {
        const char *name; /* UNDEFINED: of what */
        bool boolean;
        int64_t integer;
        double real;
        struct text *text;
        struct list *list; /* LIST, TUPLE */
        struct dict *dict; /* DICT, NAMESPACE */
        struct range *range;
        struct view *view;
        struct iterator *iterator;
        struct loop *loop;
        struct macro *macro;
        const struct function *function;
        struct bound_method *method;
        struct cycler *cycler;
        struct joiner *joiner;
    };
};

/*
 * UTF-8 bytes, and whether each came from an untrusted string of the context: `marks` has a byte
 * for each (1: untrusted), or is NULL where all are as `untrusted` says.
 * `tail`, where there is one, is a buffer with room behind these bytes: a concatenation whose left
 * side ends where the buffer's used part ends appends in place, so growing a text is linear.
 */
struct text {
    const char *bytes;
    const uint8_t *marks;
    size_t size;
    struct tail *tail;
    bool untrusted;
    bool markup; /* from `safe` or `escape`: adding to it escapes the other side */
};

/* `used` may lie beyond what an older value shows of the buffer. */
struct tail {
    size_t used, capacity;
    uint8_t *marks; /* of a text's bytes */
};

struct list {
    struct value *items;
    size_t count;
    struct tail *tail; /* as for text */
};

struct pair {
    struct value key, value;
};

struct dict {
    struct pair *pairs; /* in insertion order */
    size_t count, capacity;
};

struct range {
    int64_t start, stop, step;
    size_t count;
};

enum view_of { VIEW_KEYS, VIEW_VALUES, VIEW_ITEMS };

struct view {
    const struct dict *dict;
    enum view_of of;
};

struct iterator {
    const struct value *items;
    size_t count, position;
};

struct cycler {
    struct list items;
    size_t position;
};

struct joiner {
    struct value separator;
    bool used;
};

struct keyword {
    const char *name;
    struct value value;
};

struct arguments {
    const struct value *items;
    size_t count;
    const struct keyword *keywords;
    size_t n_keywords;
};

struct run;

struct function {
    const char *name;
    bool (*call)(struct run *r, const struct arguments *args, struct value *out);
};

struct filter {
    const char *name;
    bool (*apply)(struct run *r, struct value input, const struct arguments *args,
                  struct value *out);
};

struct test {
    const char *name;
    int id;         /* of template_check.c */
    bool has_other; /* takes one argument; the rest take none */
};

/* apply is NULL for methods that change their object: the sandbox hides those. */
struct method {
    const char *name;
    bool (*apply)(struct run *r, struct value self, const struct arguments *args,
                  struct value *out);
};

struct bound_method {
    struct value self;
    const struct method *method;
};

/* ---- tree -------------------------------------------------------------------------------- */

enum op {
    /* other operators are their own character */
    OP_EQ = 256,
    OP_NE,
    OP_LE,
    OP_GE,
    OP_POWER,
    OP_FLOOR_DIVIDE,
    OP_IN,
    OP_NOT_IN,
    OP_NOT
};

enum node_kind {
    EXPR_CONST,     /* constant */
    EXPR_NAME,      /* id, name */
    EXPR_LIST,      /* items */
    EXPR_TUPLE,     /* items */
    EXPR_DICT,      /* items: key, value, key, value... */
    EXPR_UNARY,     /* op left */
    EXPR_BINARY,    /* left op right */
    EXPR_AND,       /* left, right */
    EXPR_OR,        /* left, right */
    EXPR_COMPARE,   /* left, then ops[i] items[i] */
    EXPR_CONCAT,    /* items */
    EXPR_CONDITION, /* left if test else right (NULL: undefined) */
    EXPR_ATTRIBUTE, /* left.name */
    EXPR_ITEM,      /* left[right] */
    EXPR_SLICE,     /* left[items[0]:items[1]:items[2]], each may be NULL */
    EXPR_CALL,      /* left(items, keywords) */
    EXPR_FILTER,    /* left | filter(items, keywords) */
    EXPR_TEST,      /* left is check(items, keywords) */
    EXPR_CAPTURED,  /* the text of the filter block or set block around it */

    STATEMENT_TEXT,       /* constant */
    STATEMENT_PRINT,      /* left */
    STATEMENT_IF,         /* test, body; right: the next STATEMENT_IF of the chain; otherwise */
    STATEMENT_FOR,        /* target left in right, if test; body, otherwise */
    STATEMENT_SET,        /* target left = right */
    STATEMENT_SET_BLOCK,  /* target left = right (filters of EXPR_CAPTURED) of body */
    STATEMENT_MACRO,      /* definition */
    STATEMENT_CALL,       /* right (EXPR_CALL) with definition as its caller */
    STATEMENT_FILTER,     /* right (filters of EXPR_CAPTURED) of body */
    STATEMENT_WITH,       /* items: target, value...; body */
    STATEMENT_GENERATION, /* body */
    STATEMENT_BREAK,
    STATEMENT_CONTINUE
};

struct block {
    struct node **items;
    size_t count;
};

struct keyword_node {
    const char *name;
    struct node *value;
};

struct parameter {
    const char *name;
    int id;
    struct node *preset; /* NULL: none */
};

struct definition {
    const char *name;
    int id;
    struct parameter *parameters;
    size_t n_parameters;
    struct block body;
    bool uses_varargs, uses_kwargs, uses_caller;
};

struct node {
    enum node_kind kind;
    int line;
    int depth; /* 1 + that of the deepest child */
    int op;
    int id; /* of a name, for scopes */
    const char *name;
    struct node *left, *right, *test;
    struct node **items;
    size_t n_items;
    int *ops;
    struct keyword_node *keywords;
    size_t n_keywords;
    struct value constant;
    const struct filter *filter;
    const struct test *check;
    struct block body, otherwise;
    struct definition *definition;
};

/* Names with a meaning of their own have fixed ids. */
enum { ID_LOOP, ID_CALLER, ID_VARARGS, ID_KWARGS, N_FIXED_IDS };

struct chat_template {
    struct arena arena;
    char *name;
    const char **names; /* by id */
    size_t n_names;
    struct block body;
};

/* ---- tokens ------------------------------------------------------------------------------ */

enum token_kind {
    TOKEN_END,
    TOKEN_DATA,
    TOKEN_BLOCK_BEGIN,
    TOKEN_BLOCK_END,
    TOKEN_VARIABLE_BEGIN,
    TOKEN_VARIABLE_END,
    TOKEN_NAME,
    TOKEN_STRING,
    TOKEN_INTEGER,
    TOKEN_FLOAT,
    TOKEN_OPERATOR
};

struct token {
    enum token_kind kind;
    int line;
    int op;            /* OPERATOR */
    const char *bytes; /* NAME (NUL-terminated), STRING, DATA */
    size_t size;
    int64_t integer;
    double real;
};

struct token_vector {
    struct token *items; /* the last one is TOKEN_END; free() it */
    size_t count, capacity;
};

struct compile {
    struct chat_template *t;
    linnet_error *err;
    struct token_vector tokens;
};

/* Leaves "NAME line N: message" and the status. Always false. */
bool jinja_refuse(struct compile *c, linnet_status status, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

bool jinja_tokenize(struct compile *c, const char *source, size_t size);

/* ---- parser ------------------------------------------------------------------------------ */

struct parser {
    struct compile *compile;
    const struct token *token; /* the current one */
    int depth;
    int loops;                     /* open loops that break may leave */
    struct definition *definition; /* innermost macro, or NULL */
    int *table;                    /* of names: open addressing, id + 1 */
    size_t table_size, names_capacity;
    uint64_t seed;  /* of the table: no source can know which names share a slot */
    bool *assigned; /* by id: some statement gives it a value */
    size_t assigned_capacity;
    struct node **called; /* EXPR_NAMEs that are called */
    size_t n_called, called_capacity;
};

bool jinja_parse(struct compile *c);

/* For expressions; all return NULL after jinja_refuse. */
struct node *jinja_expression(struct parser *p, bool with_condition);
enum { TUPLE_CONDITION = 1, TUPLE_PARENTHESES = 2, TUPLE_ENDS_AT_RECURSIVE = 4 };
struct node *jinja_tuple(struct parser *p, int flags);
struct node *jinja_filters(struct parser *p, struct node *input, bool starts_inline);
struct node *jinja_syntax_error(struct parser *p, const char *expected);
struct node *jinja_node(struct parser *p, enum node_kind kind, int line);
struct node *jinja_adopt(struct parser *p, struct node *parent, const struct node *child);
int jinja_intern(struct parser *p, const char *name); /* -1 on failure */
bool jinja_append(struct parser *p, void **items, size_t *count, size_t *capacity, void *item);
bool jinja_at_name(const struct parser *p, const char *name);
bool jinja_at_op(const struct parser *p, int op);
bool jinja_skip_name(struct parser *p, const char *name);
bool jinja_skip_op(struct parser *p, int op);
bool jinja_enter(struct parser *p);
/* The gathered pointers of a malloc'ed vector, moved to the arena. */
bool jinja_keep(struct parser *p, void **items, size_t count, struct node ***out);

/* ---- rendering --------------------------------------------------------------------------- */

struct binding {
    int id;
    struct value value;
};

struct scope {
    struct scope *parent;
    struct binding *bindings;
    size_t count, capacity;
};

struct macro {
    const struct definition *definition;
    struct scope *scope;
};

struct loop {
    const struct node *node;
    struct scope *scope; /* of the filter */
    const struct value *source;
    size_t n_source, position; /* next of source to look at */
    struct value *items;       /* those that passed the filter so far */
    size_t count;
    size_t index0;
    bool has_changed_value;
    struct value changed_value;
};

/* Gathers a text. `marks` stays NULL while all bytes are alike. */
struct builder {
    char *bytes;
    uint8_t *marks;
    size_t size, capacity;
    bool untrusted;
};

struct run {
    const struct chat_template *t;
    struct arena arena;
    const json_t *context;
    const char *const *trusted;
    int64_t now;
    linnet_error *err;
    linnet_status status; /* of the failure */
    int line;
    int depth;
    uint64_t steps;
    struct scope *scope;
    struct builder *capture; /* where text goes; NULL: to out */
    struct rendered *out;
    struct value *variables; /* of the context, by id; ABSENT until first used */
    struct value captured;
};

/* Leaves "NAME line N: message". Always false. */
bool jinja_fail(struct run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool jinja_fail_memory(struct run *r);
bool jinja_fail_undefined(struct run *r, struct value v);
/* Counts work: false once there was too much. */
bool jinja_work(struct run *r, size_t steps);
void *jinja_array(struct run *r, size_t count, size_t size); /* NULL after jinja_fail */

enum flow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE, FLOW_FAIL };
enum flow jinja_execute(struct run *r, const struct block *block);
bool jinja_eval(struct run *r, const struct node *n, struct value *out);
bool jinja_call(struct run *r, struct value callee, const struct arguments *args,
                const struct macro *caller, struct value *out);
bool jinja_call_node(struct run *r, const struct node *n, const struct macro *caller,
                     struct value *out);
bool jinja_call_macro(struct run *r, const struct macro *macro, const struct arguments *args,
                      const struct macro *caller, struct value *out);
bool jinja_bind_name(struct run *r, struct scope *scope, int id, struct value v);
bool jinja_lookup(struct run *r, const struct node *n, struct value *out);
bool jinja_attribute(struct run *r, struct value object, const char *name, struct value *out);
bool jinja_item(struct run *r, struct value object, struct value key, struct value *out);
bool jinja_slice(struct run *r, struct value object, const struct value bounds[3],
                 struct value *out);
bool jinja_binary(struct run *r, int op, struct value a, struct value b, struct value *out);
bool jinja_format_percent(struct run *r, const struct text *format, struct value argument,
                          struct value *out);
bool jinja_loop_next(struct run *r, struct loop *loop, bool *more);
bool jinja_loop_attribute(struct run *r, struct loop *loop, const char *name, struct value *out);
bool jinja_loop_call(struct run *r, struct loop *loop, const char *name,
                     const struct arguments *args, struct value *out);

/* ---- values: template_value.c ------------------------------------------------------------ */

static inline struct value value_undefined(const char *name)
{
    return (struct value){.kind = VALUE_UNDEFINED, .name = name};
}

static inline struct value value_none(void)
{
    return (struct value){.kind = VALUE_NONE};
}

static inline struct value value_bool(bool b)
{
    return (struct value){.kind = VALUE_BOOL, .boolean = b};
}

static inline struct value value_int(int64_t i)
{
    return (struct value){.kind = VALUE_INT, .integer = i};
}

static inline struct value value_float(double f)
{
    return (struct value){.kind = VALUE_FLOAT, .real = f};
}

const char *value_type_name(struct value v); /* "str", "dict"... */
bool value_truth(struct value v);
bool value_is_number(struct value v, double *out);   /* bool, int or float */
bool value_is_integer(struct value v, int64_t *out); /* bool or int */
bool jinja_equal(struct run *r, struct value a, struct value b, int depth, bool *out);
bool jinja_less(struct run *r, struct value a, struct value b, bool *out);
bool jinja_contains(struct run *r, struct value container, struct value item, bool *out);
/* The items of anything that can be walked, in order. Uses up iterators. */
bool jinja_items(struct run *r, struct value v, const struct value **items, size_t *count);
bool jinja_length(struct run *r, struct value v, size_t *out); /* len(); false if it has none */
bool value_iterable(struct value v);
bool value_has_length(struct value v);
bool jinja_new_list(struct run *r, enum value_kind kind, size_t count, struct value *out);
bool jinja_new_iterator(struct run *r, const struct value *items, size_t count, struct value *out);
bool jinja_concat_lists(struct run *r, struct value a, struct value b, struct value *out);
bool jinja_pair(struct run *r, struct value a, struct value b, struct value *out); /* a tuple */
bool jinja_dict_find(struct run *r, const struct dict *d, struct value key, struct value **out);
struct value *dict_find_name(const struct dict *d, const char *name);
bool jinja_dict_set(struct run *r, struct dict *d, struct value key, struct value v);
bool jinja_from_json(struct run *r, const json_t *json, bool untrusted, int depth,
                     struct value *out);

/* ---- text: template_text.c --------------------------------------------------------------- */

bool jinja_text(struct run *r, const char *bytes, size_t size, bool untrusted, struct value *out);
bool jinja_literal(struct run *r, const char *text, struct value *out); /* trusted, copied not */
bool jinja_subtext(struct run *r, const struct text *t, size_t begin, size_t end,
                   struct value *out);
bool jinja_concat(struct run *r, const struct text *a, const struct text *b, struct value *out);
bool build(struct run *r, struct builder *b, const char *bytes, size_t size, bool untrusted);
bool build_text(struct run *r, struct builder *b, const struct text *t, size_t begin, size_t end);
bool build_code_point(struct run *r, struct builder *b, int32_t c, bool untrusted);
bool build_done(struct run *r, struct builder *b, struct value *out);
bool jinja_emit(struct run *r, const struct text *t); /* to the capture or the output */
static inline bool text_untrusted(const struct text *t, size_t at)
{
    return t->marks ? t->marks[at] : t->untrusted;
}
bool text_equals(const struct text *t, const char *text);
/* The code point at `at` (< size) and the bytes it takes. */
size_t template_decode(const char *bytes, size_t size, size_t at, int32_t *code_point);
size_t utf8_count(const char *bytes, size_t size);
size_t utf8_offset(const char *bytes, size_t size, size_t characters);
bool code_point_is_space(int32_t c); /* str.isspace */
size_t text_skip_space(const char *bytes, size_t begin, size_t end);
size_t text_back_over_space(const char *bytes, size_t begin, size_t end);
/* Where needle first stands in [from, size), or SIZE_MAX. */
size_t text_find(const struct text *t, size_t from, const struct text *needle);

/* ---- printing: template_print.c, template_json.c ----------------------------------------- */

bool jinja_string(struct run *r, struct value v, struct text **out); /* str(v) */
bool jinja_print(struct run *r, struct builder *b, struct value v, bool repr, int depth);
enum { FLOAT_TEXT = 40 };
size_t float_repr(double f, char out[FLOAT_TEXT]);
double float_parse(const char *text, size_t size, bool *ok); /* of checked characters */
bool jinja_tojson(struct run *r, struct value input, const struct arguments *args,
                  struct value *out);

/* ---- tables ------------------------------------------------------------------------------ */

const struct filter *jinja_find_filter(const char *name);
const struct test *jinja_find_test(const char *name);
const struct function *jinja_find_function(const char *name);
bool jinja_is_method(const char *name); /* of any type */
const struct method *jinja_find_method(struct value self, const char *name);
extern const struct filter jinja_sequence_filters[]; /* template_sequence.c; ends with {0} */
bool jinja_lower(struct run *r, const struct text *t, struct value *out);
bool jinja_upper(struct run *r, const struct text *t, struct value *out);
bool jinja_capitalize(struct run *r, const struct text *t, struct value *out);
bool jinja_title_filter(struct run *r, const struct text *t, struct value *out);
bool text_has_case(const struct text *t, bool upper);
extern const struct method jinja_case_methods[];
bool jinja_replace(struct run *r, const struct text *t, const struct text *old,
                   const struct text *new_text, int64_t limit, struct value *out);
bool jinja_check(struct run *r, const struct test *test, struct value v,
                 const struct arguments *args, bool *out);

/*
 * Puts arguments where they belong: names has the parameters' names, the first n_required must be
 * there; slots not given become ABSENT. `what` is for messages.
 */
bool jinja_bind(struct run *r, const char *what, const struct arguments *args,
                const char *const *names, size_t n_names, size_t n_required, struct value *slots);
/* The same for arguments that must be strings or integers. */
bool jinja_need_text(struct run *r, const char *what, struct value v, struct text **out);
bool jinja_need_int(struct run *r, const char *what, struct value v, int64_t *out);

#endif
