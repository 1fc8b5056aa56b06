/* openai_internal.h - what the readers of a request share. */
#ifndef LINNET_SERVE_OPENAI_INTERNAL_H
#define LINNET_SERVE_OPENAI_INTERNAL_H

#include <stdio.h>

#include "serve/openai.h"

/* What every step of the parser works on. */
struct parser {
    const linnet_model *model;
    const json_t *body;
    struct openai_request *out;
    struct openai_fault *fault;
    linnet_model_info info;
};

static inline linnet_status blame(struct parser *p, const char *field, linnet_status status)
{
    snprintf(p->fault->field, sizeof p->fault->field, "%s", field);
    return status;
}

#define FAIL(p, field, status, ...) \
    blame(p, field, error_set(&(p)->fault->error, status, __VA_ARGS__))

static inline linnet_status no_memory(struct parser *p, const char *field)
{
    return FAIL(p, field, LINNET_MEMORY, "out of memory: %s of a request", field);
}

/* The value of a field, NULL if it is absent or null. */
static inline const json_t *get(const struct parser *p, const char *field)
{
    const json_t *value = json_object_get(p->body, field);
    return json_is_null(value) ? NULL : value;
}

static inline const char *kind_of(const json_t *value)
{
    if (!value) return "none";
    switch (json_typeof(value)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "a list";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "an integer";
    case JSON_REAL: return "a number with a fraction";
    case JSON_TRUE: return "true";
    case JSON_FALSE: return "false";
    case JSON_NULL: return "null";
    }
    return "something else";
}

/* ---- openai_tools.c ------------------------------------------------------------------------ */

/* tools, tool_choice, parallel_tool_calls, and the legacy fields, which are refused. */
linnet_status openai_read_tools(struct parser *p);

/* 1 to TOOL_NAME_SIZE - 1 letters, digits, _ and -. */
bool openai_is_tool_name(const json_t *value);

/* The messages as templates expect them: a tool call's arguments are an object, not its text; a
 * message of nothing but calls has the content "". */
linnet_status openai_template_messages(struct parser *p, json_t **messages);

/* Reads off the rendered prompt whether the answer begins inside reasoning and, where a call is
 * demanded, in which form; then puts the call's beginning behind the prompt. plain: the same prompt
 * without the request's tools: what the template makes of them is the difference. */
linnet_status openai_expect_answer(struct parser *p, const char *rendered, size_t size,
                                   const char *plain, size_t plain_size);

void openai_free_tools(struct openai_request *request);

#endif
