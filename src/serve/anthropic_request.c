/* anthropic_request.c - a request of the Messages API as an OpenAI chat request. */
#include <string.h>

#include "serve/anthropic_internal.h"

bool anthropic_is_string(const json_t *value, const char *text)
{
    size_t n = strlen(text);
    return json_string_length(value) == n && memcmp(json_string_value(value), text, n) == 0;
}

bool anthropic_is_type(const json_t *value, const char *type)
{
    return anthropic_is_string(json_object_get(value, "type"), type);
}

static linnet_status set(struct parser *p, json_t *chat, const char *field, json_t *value)
{
    return json_object_set_new(chat, field, value) ? no_memory(p, field) : LINNET_OK;
}

/* ---- tools --------------------------------------------------------------------------------- */

static linnet_status add_tool(struct parser *p, size_t i, const json_t *tool, json_t *names,
                              json_t *list)
{
    static const char field[] = "tools";
    const json_t *type = json_object_get(tool, "type");
    json_t *name = json_object_get(tool, "name"), *schema = json_object_get(tool, "input_schema");
    json_t *description = json_object_get(tool, "description");
    if (type && !json_is_null(type) && !anthropic_is_string(type, "custom"))
        return FAIL(p, field, LINNET_UNSUPPORTED,
                    "tools[%zu]: a tool of type '%.40s' is not supported: give name, description "
                    "and input_schema",
                    i, json_is_string(type) ? json_string_value(type) : kind_of(type));
    if (!openai_is_tool_name(name))
        return FAIL(p, field, LINNET_INVALID,
                    "tools[%zu].name: expected 1 to %d letters, digits, _ and -", i,
                    TOOL_NAME_SIZE - 1);
    if (json_object_get(names, json_string_value(name)))
        return FAIL(p, field, LINNET_INVALID, "tools[%zu].name: there is another tool '%s'", i,
                    json_string_value(name));
    if (description && !json_is_string(description) && !json_is_null(description))
        return FAIL(p, field, LINNET_INVALID, "tools[%zu].description: expected a string, found %s",
                    i, kind_of(description));
    if (!json_is_object(schema))
        return FAIL(p, field, LINNET_INVALID,
                    "tools[%zu].input_schema: expected an object, found %s", i, kind_of(schema));
    if (json_is_null(description)) description = NULL;
    json_t *entry = json_pack("{s:s,s:{s:O,s:O*,s:O}}", "type", "function", "function", "name",
                              name, "description", description, "parameters", schema);
    bool failed = json_array_append_new(list, entry) ||
                  json_object_set_new(names, json_string_value(name), json_true());
    return failed ? no_memory(p, field) : LINNET_OK;
}

static linnet_status read_tools(struct parser *p, json_t *chat)
{
    const json_t *tools = get(p, "tools"), *tool;
    linnet_status status = LINNET_OK;
    size_t i;
    if (!tools) return LINNET_OK;
    if (!json_is_array(tools))
        return FAIL(p, "tools", LINNET_INVALID, "tools: expected a list, found %s", kind_of(tools));
    json_t *list = json_array(), *names = json_object();
    json_array_foreach(tools, i, tool)
    {
        status = add_tool(p, i, tool, names, list);
        if (status) break;
    }
    json_decref(names);
    linnet_status kept = set(p, chat, "tools", list);
    return status ? status : kept;
}

static linnet_status read_tool_choice(struct parser *p, json_t *chat)
{
    static const char field[] = "tool_choice";
    static const char *const words[][2] = {{"auto", "auto"}, {"any", "required"}, {"none", "none"}};
    const json_t *choice = get(p, field);
    const json_t *alone = json_object_get(choice, "disable_parallel_tool_use");
    json_t *name = json_object_get(choice, "name");
    bool named = anthropic_is_type(choice, "tool") && json_is_string(name);
    size_t i = 0;
    if (!choice) return LINNET_OK;
    while (i < 3 && !anthropic_is_type(choice, words[i][0])) i++;
    if (i == 3 && !named)
        return FAIL(p, field, LINNET_INVALID,
                    "%s: expected {\"type\": \"auto\"}, \"any\", \"none\", or {\"type\": \"tool\", "
                    "\"name\": ...}",
                    field);
    if (alone && !json_is_boolean(alone) && !json_is_null(alone))
        return FAIL(p, field, LINNET_INVALID,
                    "%s.disable_parallel_tool_use: expected true or false, found %s", field,
                    kind_of(alone));
    json_t *value = named ? json_pack("{s:s,s:{s:O}}", "type", "function", "function", "name", name)
                          : json_string(words[i][1]);
    linnet_status status = set(p, chat, field, value);
    if (!status && json_is_true(alone)) status = set(p, chat, "parallel_tool_calls", json_false());
    return status;
}

/* ---- the other fields ---------------------------------------------------------------------- */

static linnet_status read_stops(struct parser *p, json_t *chat)
{
    static const char field[] = "stop_sequences";
    json_t *stops = json_object_get(p->body, field), *stop;
    size_t i;
    if (!get(p, field)) return LINNET_OK;
    if (!json_is_array(stops))
        return FAIL(p, field, LINNET_INVALID, "%s: expected a list, found %s", field,
                    kind_of(stops));
    if (json_array_size(stops) > LIMIT_STOPS)
        return FAIL(p, field, LINNET_INVALID, "%s: expected at most %d texts, found %zu", field,
                    LIMIT_STOPS, json_array_size(stops));
    json_array_foreach(stops, i, stop)
    {
        size_t n = json_string_length(stop);
        if (n == 0 || strlen(json_string_value(stop)) != n)
            return FAIL(p, field, LINNET_INVALID,
                        "%s[%zu]: expected a text of at least one character and without U+0000",
                        field, i);
    }
    return set(p, chat, "stop", json_incref(stops));
}

/* Without the field there is no thinking, as in the API: where the template can be told so. */
static linnet_status read_thinking(struct parser *p, json_t *chat)
{
    static const char field[] = "thinking";
    const json_t *thinking = get(p, field), *limit = get(p, "max_tokens");
    const json_t *budget = json_object_get(thinking, "budget_tokens");
    bool enabled = anthropic_is_type(thinking, "enabled");
    int64_t tokens = 0, most = INT64_MAX;
    bool other =
        anthropic_is_type(thinking, "adaptive") || anthropic_is_type(thinking, "between_tools");
    if (thinking && !enabled && !other && !anthropic_is_type(thinking, "disabled"))
        return FAIL(p, field, LINNET_INVALID,
                    "%s.type: expected \"enabled\", \"disabled\" or \"adaptive\"", field);
    if (enabled && (!openai_integer(budget, &tokens) || tokens < 1024))
        return FAIL(p, field, LINNET_INVALID,
                    "%s.budget_tokens: expected an integer of at least 1024", field);
    if (enabled && openai_integer(limit, &most) && tokens >= most)
        return FAIL(p, field, LINNET_INVALID,
                    "%s.budget_tokens: expected less than max_tokens (%lld), found %lld", field,
                    (long long)most, (long long)tokens);
    return set(p, chat, "chat_template_kwargs",
               json_pack("{s:b}", "enable_thinking", (int)(enabled || other)));
}

/* Fields whose being ignored would change what the caller gets. */
static linnet_status check_refused(struct parser *p)
{
    const json_t *servers = get(p, "mcp_servers");
    const json_t *output = get(p, "output_config"), *format = json_object_get(output, "format");
    if (servers && !(json_is_array(servers) && json_array_size(servers) == 0))
        return FAIL(p, "mcp_servers", LINNET_UNSUPPORTED,
                    "mcp_servers: this server calls no others: connect to them in the client");
    if (output && !json_is_object(output))
        return FAIL(p, "output_config", LINNET_INVALID,
                    "output_config: expected an object, found %s", kind_of(output));
    if (format && !json_is_null(format))
        return FAIL(p, "output_config", LINNET_UNSUPPORTED,
                    "output_config.format: this version cannot constrain an answer: leave it out");
    if (get(p, "output_format"))
        return FAIL(p, "output_format", LINNET_UNSUPPORTED,
                    "output_format: this version cannot constrain an answer: leave it out");
    return LINNET_OK;
}

static linnet_status read_same(struct parser *p, enum anthropic_endpoint endpoint, json_t *chat)
{
    static const char *const same[] = {"model", "max_tokens", "temperature", "top_p",
                                       "top_k", "stream",     "seed"};
    static const char *const required[] = {"model", "max_tokens"};
    size_t n_required = endpoint == ANTHROPIC_MESSAGES ? 2 : 1;
    for (size_t i = 0; i < n_required; i++)
        if (!get(p, required[i]))
            return FAIL(p, required[i], LINNET_INVALID, "%s: the field is missing", required[i]);
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        json_t *value = json_object_get(p->body, same[i]);
        if (value && set(p, chat, same[i], json_incref(value))) return p->fault->error.status;
    }
    return LINNET_OK;
}

/* ---- the request --------------------------------------------------------------------------- */

static linnet_status convert(struct parser *p, enum anthropic_endpoint endpoint, json_t *chat)
{
    linnet_status status;
    if (!json_is_object(p->body))
        return FAIL(p, "", LINNET_INVALID, "the request's body is not a JSON object");
    if ((status = read_same(p, endpoint, chat)) || (status = check_refused(p)) ||
        (status = anthropic_read_messages(p, chat)) || (status = read_stops(p, chat)) ||
        (status = read_tools(p, chat)) || (status = read_tool_choice(p, chat)))
        return status;
    return read_thinking(p, chat);
}

linnet_status anthropic_request(enum anthropic_endpoint endpoint, const json_t *body, json_t **chat,
                                struct openai_fault *fault)
{
    struct parser p = {.body = body, .fault = fault};
    *fault = (struct openai_fault){0};
    *chat = json_object();
    linnet_status status = convert(&p, endpoint, *chat);
    if (!status) return LINNET_OK;
    json_decref(*chat);
    *chat = NULL;
    return status;
}

json_t *anthropic_count(const struct openai_request *request)
{
    return json_pack("{s:I}", "input_tokens", (json_int_t)request->prompts[0].n);
}
