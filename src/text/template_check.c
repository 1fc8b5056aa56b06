/* Tests: what may stand after "is". */
#include <math.h>
#include <string.h>

#include "text/template_internal.h"

enum {
    IS_DEFINED,
    IS_UNDEFINED,
    IS_NONE,
    IS_BOOLEAN,
    IS_TRUE,
    IS_FALSE,
    IS_INTEGER,
    IS_FLOAT,
    IS_NUMBER,
    IS_STRING,
    IS_MAPPING,
    IS_ITERABLE,
    IS_SEQUENCE,
    IS_CALLABLE,
    IS_ESCAPED,
    IS_ODD,
    IS_EVEN,
    IS_LOWER,
    IS_UPPER,
    IS_DIVISIBLE,
    IS_SAME,
    IS_IN,
    IS_EQ,
    IS_NE,
    IS_LT,
    IS_LE,
    IS_GT,
    IS_GE
};

const struct test *jinja_find_test(const char *name)
{
    static const struct test tests[] = {
        {"defined", IS_DEFINED, false},
        {"undefined", IS_UNDEFINED, false},
        {"none", IS_NONE, false},
        {"boolean", IS_BOOLEAN, false},
        {"true", IS_TRUE, false},
        {"false", IS_FALSE, false},
        {"integer", IS_INTEGER, false},
        {"float", IS_FLOAT, false},
        {"number", IS_NUMBER, false},
        {"string", IS_STRING, false},
        {"mapping", IS_MAPPING, false},
        {"iterable", IS_ITERABLE, false},
        {"sequence", IS_SEQUENCE, false},
        {"callable", IS_CALLABLE, false},
        {"escaped", IS_ESCAPED, false},
        {"odd", IS_ODD, false},
        {"even", IS_EVEN, false},
        {"lower", IS_LOWER, false},
        {"upper", IS_UPPER, false},
        {"divisibleby", IS_DIVISIBLE, true},
        {"sameas", IS_SAME, true},
        {"in", IS_IN, true},
        {"==", IS_EQ, true},
        {"eq", IS_EQ, true},
        {"equalto", IS_EQ, true},
        {"!=", IS_NE, true},
        {"ne", IS_NE, true},
        {"<", IS_LT, true},
        {"lt", IS_LT, true},
        {"lessthan", IS_LT, true},
        {"<=", IS_LE, true},
        {"le", IS_LE, true},
        {">", IS_GT, true},
        {"gt", IS_GT, true},
        {"greaterthan", IS_GT, true},
        {">=", IS_GE, true},
        {"ge", IS_GE, true},
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (strcmp(tests[i].name, name) == 0) return &tests[i];
    return NULL;
}

static bool is_callable(struct value v)
{
    switch (v.kind) {
    case VALUE_UNDEFINED: /* calling it is its own error */
    case VALUE_LOOP:
    case VALUE_MACRO:
    case VALUE_FUNCTION:
    case VALUE_METHOD:
    case VALUE_JOINER: return true;
    default: return false;
    }
}

/* v % by == remainder */
static bool has_remainder(struct run *r, struct value v, struct value by, double remainder,
                          bool *out)
{
    struct value result;
    double f;
    if (v.kind == VALUE_STRING || !jinja_binary(r, '%', v, by, &result)) {
        if (v.kind == VALUE_STRING) jinja_fail(r, "a string has no remainder");
        return false;
    }
    *out = value_is_number(result, &f) && f == remainder;
    return true;
}

static bool is_same(struct value a, struct value b)
{
    if (a.kind != b.kind) return false;
    switch (a.kind) {
    case VALUE_UNDEFINED:
    case VALUE_NONE: return true;
    case VALUE_BOOL: return a.boolean == b.boolean;
    case VALUE_INT: return a.integer == b.integer;
    case VALUE_FLOAT: return a.real == b.real;
    case VALUE_STRING: return a.text->bytes == b.text->bytes && a.text->size == b.text->size;
    default: return a.dict == b.dict;
    }
}

static bool check_relation(struct run *r, int id, struct value v, struct value other, bool *out)
{
    bool equal;
    switch (id) {
    case IS_DIVISIBLE: return has_remainder(r, v, other, 0, out);
    case IS_SAME: *out = is_same(v, other); return true;
    case IS_IN: return jinja_contains(r, other, v, out);
    case IS_EQ: return jinja_equal(r, v, other, 0, out);
    case IS_NE:
        if (!jinja_equal(r, v, other, 0, &equal)) return false;
        *out = !equal;
        return true;
    case IS_LT: return jinja_less(r, v, other, out);
    case IS_GT: return jinja_less(r, other, v, out);
    default:
        if (!(id == IS_LE ? jinja_less(r, v, other, out) : jinja_less(r, other, v, out)) ||
            !jinja_equal(r, v, other, 0, &equal))
            return false;
        *out |= equal;
        return true;
    }
}

static bool check_text_case(struct run *r, struct value v, bool upper, bool *out)
{
    struct text *text;
    if (!jinja_string(r, v, &text)) return false;
    *out = text_has_case(text, upper);
    return jinja_work(r, text->size / 16);
}

bool jinja_check(struct run *r, const struct test *test, struct value v,
                 const struct arguments *args, bool *out)
{
    double f;
    if (args->n_keywords || args->count != (size_t)test->has_other)
        return jinja_fail(r, "the test '%s' takes %d arguments", test->name, test->has_other);
    if (test->has_other) return check_relation(r, test->id, v, args->items[0], out);
    *out = false;
    switch (test->id) {
    case IS_DEFINED: *out = v.kind != VALUE_UNDEFINED; break;
    case IS_UNDEFINED: *out = v.kind == VALUE_UNDEFINED; break;
    case IS_NONE: *out = v.kind == VALUE_NONE; break;
    case IS_BOOLEAN: *out = v.kind == VALUE_BOOL; break;
    case IS_TRUE: *out = v.kind == VALUE_BOOL && v.boolean; break;
    case IS_FALSE: *out = v.kind == VALUE_BOOL && !v.boolean; break;
    case IS_INTEGER: *out = v.kind == VALUE_INT; break;
    case IS_FLOAT: *out = v.kind == VALUE_FLOAT; break;
    case IS_NUMBER: *out = value_is_number(v, &f); break;
    case IS_STRING: *out = v.kind == VALUE_STRING; break;
    case IS_MAPPING: *out = v.kind == VALUE_DICT; break;
    case IS_ITERABLE: *out = value_iterable(v); break;
    case IS_SEQUENCE:
        *out = value_has_length(v) && v.kind != VALUE_VIEW && v.kind != VALUE_LOOP;
        break;
    case IS_CALLABLE: *out = is_callable(v); break;
    case IS_ESCAPED: *out = v.kind == VALUE_STRING && v.text->markup; break;
    case IS_ODD: return has_remainder(r, v, value_int(2), 1, out);
    case IS_EVEN: return has_remainder(r, v, value_int(2), 0, out);
    case IS_LOWER: return check_text_case(r, v, false, out);
    case IS_UPPER: return check_text_case(r, v, true, out);
    default: return jinja_fail(r, "internal error: an unknown test");
    }
    return true;
}
