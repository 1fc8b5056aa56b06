/*
 * messages_support.h - what the tests of the Messages API share: a model of one token a byte in the
 * place of the few library functions that are called, and a request with some fields.
 */
#ifndef LINNET_TESTS_MESSAGES_SUPPORT_H
#define LINNET_TESTS_MESSAGES_SUPPORT_H

#include "support.h"

#include "serve/anthropic.h"

/* What the template wrote; what it was given. */
static const char *prompt_text;
static bool has_tools; /* the chat: it is rendered without them first */
static char seen_by_template[4096];

void linnet_free(void *memory)
{
    free(memory);
}

void linnet_model_get_info(const linnet_model *model, linnet_model_info *info)
{
    (void)model;
    *info = (linnet_model_info){.name = "bytes", .vocab_size = 256, .context_length = 100};
}

void linnet_sampling_defaults(const linnet_model *model, linnet_sampling *sampling)
{
    (void)model;
    *sampling = (linnet_sampling){.temperature = 0.75F, .top_p = 1, .repetition_penalty = 1};
}

linnet_status linnet_tokenize(const linnet_model *model, const char *text, size_t n, unsigned flags,
                              int32_t **ids, size_t *n_ids, linnet_error *error)
{
    (void)model, (void)error, (void)flags;
    *ids = malloc((n + 1) * sizeof **ids);
    for (size_t i = 0; i < n; i++) (*ids)[i] = (unsigned char)text[i];
    *n_ids = n;
    return LINNET_OK;
}

linnet_status linnet_detokenize(const linnet_model *model, const int32_t *ids, size_t n,
                                unsigned flags, char **text, size_t *size, linnet_error *error)
{
    (void)model, (void)ids, (void)n, (void)flags, (void)text, (void)size;
    return error_set(error, LINNET_INTERNAL, "not needed here");
}

linnet_status linnet_chat_tokenize(const linnet_model *model, const char *request, size_t n,
                                   char **rendered, size_t *rendered_size, int32_t **ids,
                                   size_t *n_ids, linnet_error *error)
{
    snprintf(seen_by_template, sizeof seen_by_template, "%.*s", (int)n, request);
    bool plain = has_tools && !strstr(seen_by_template, "\"tools\":") &&
                 strstr(prompt_text, "add-2"); /* which a template has shown */
    const char *text = plain ? "plain" : prompt_text;
    *rendered_size = strlen(text);
    *rendered = strdup(text);
    return linnet_tokenize(model, text, *rendered_size, 0, ids, n_ids, error);
}

const char *linnet_finish_name(linnet_finish finish)
{
    static const char *const names[] = {"none", "stop", "length", "cancelled", "error"};
    return names[finish];
}

/* ---- requests ------------------------------------------------------------------------------ */

static struct openai_fault fault;

static json_t *read_json(const char *text)
{
    json_error_t where;
    json_t *json = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, &where);
    if (!json) fail_msg("'%s': %s", text, where.text);
    return json;
}

#define USER     "{\"role\":\"user\",\"content\":\"x\"}"
#define MESSAGES "\"messages\":[" USER "]"

#define SCHEMA "\"input_schema\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"number\"}}}"
#define TOOLS                                                                            \
    ",\"tools\":[{\"name\":\"add-2\",\"description\":\"adds\"," SCHEMA "},"              \
    "{\"type\":\"custom\",\"name\":\"get_weather\",\"input_schema\":{},\"strict\":true," \
    "\"cache_control\":{\"type\":\"ephemeral\"}}]"

static struct openai_request request;

/* With these fields more; the rendered prompt is `prompt`. */
static linnet_status ask(const char *prompt, const char *fields)
{
    char body[2048];
    json_t *chat;
    snprintf(body, sizeof body, "{\"model\":\"m\",\"max_tokens\":40,%s%s}", MESSAGES, fields);
    prompt_text = prompt;
    openai_request_free(&request);
    json_t *json = read_json(body);
    linnet_status status = anthropic_request(ANTHROPIC_MESSAGES, json, &chat, &fault);
    json_decref(json);
    if (status) return status;
    has_tools = json_object_get(chat, "tools");
    status = openai_request_parse(NULL, OPENAI_CHAT, chat, &request, &fault);
    json_decref(chat);
    return status;
}

static const char tool_prompt[] = "add-2 get_weather <tool_call>";

#endif
