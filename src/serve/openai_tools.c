#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "serve/openai_internal.h"

enum { MAX_TOOLS = 128 };

/* ---- tools, tool_choice -------------------------------------------------------------------- */

bool openai_is_tool_name(const json_t *value)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    size_t n = json_string_length(value);
    return n > 0 && n < TOOL_NAME_SIZE && strspn(json_string_value(value), letters) == n;
}

static bool is_string(const json_t *value, const char *text)
{
    return json_is_string(value) && strcmp(json_string_value(value), text) == 0;
}

static bool absent(const json_t *value)
{
    return !value || json_is_null(value);
}

static linnet_status read_tool(struct parser *p, const json_t *tool, size_t i)
{
    const json_t *type = json_object_get(tool, "type");
    const json_t *function = json_object_get(tool, "function");
    const json_t *name = json_object_get(function, "name");
    const json_t *parameters = json_object_get(function, "parameters");
    const json_t *text = json_object_get(function, "description");
    if (!is_string(type, "function"))
        return FAIL(p, "tools", LINNET_INVALID, "tools[%zu].type: expected \"function\", found %s",
                    i, json_is_string(type) ? "another type" : kind_of(type));
    if (!json_is_object(function))
        return FAIL(p, "tools", LINNET_INVALID, "tools[%zu].function: expected an object, found %s",
                    i, kind_of(function));
    if (!openai_is_tool_name(name))
        return FAIL(p, "tools", LINNET_INVALID,
                    "tools[%zu].function.name: expected 1 to %d letters, digits, _ and -", i,
                    TOOL_NAME_SIZE - 1);
    if (!absent(parameters) && !json_is_object(parameters))
        return FAIL(p, "tools", LINNET_INVALID,
                    "tools[%zu].function.parameters: expected an object, found %s", i,
                    kind_of(parameters));
    if (!absent(text) && !json_is_string(text))
        return FAIL(p, "tools", LINNET_INVALID,
                    "tools[%zu].function.description: expected a string, found %s", i,
                    kind_of(text));
    char *copy = mem_string(json_string_value(name), json_string_length(name));
    if (!copy) return no_memory(p, "tools");
    p->out->tools[p->out->n_tools++] = copy;
    return LINNET_OK;
}

static linnet_status read_tool_list(struct parser *p)
{
    const json_t *tools = get(p, "tools");
    size_t n = json_array_size(tools);
    linnet_status status = LINNET_OK;
    if (!tools) return LINNET_OK;
    if (!json_is_array(tools))
        return FAIL(p, "tools", LINNET_INVALID, "tools: expected a list, found %s", kind_of(tools));
    if (n > MAX_TOOLS)
        return FAIL(p, "tools", LINNET_INVALID, "tools: expected at most %d, found %zu", MAX_TOOLS,
                    n);
    p->out->tools = mem_new(n, sizeof *p->out->tools);
    if (!p->out->tools) return no_memory(p, "tools");
    for (size_t i = 0; i < n && !status; i++) status = read_tool(p, json_array_get(tools, i), i);
    return status;
}

static linnet_status choose_named(struct parser *p, const json_t *choice)
{
    const json_t *name = json_object_get(json_object_get(choice, "function"), "name");
    if (!is_string(json_object_get(choice, "type"), "function") || !json_is_string(name))
        return FAIL(p, "tool_choice", LINNET_INVALID,
                    "tool_choice: expected \"none\", \"auto\", \"required\" or {\"type\": "
                    "\"function\", \"function\": {\"name\": ...}}");
    for (size_t i = 0; i < p->out->n_tools; i++)
        if (is_string(name, p->out->tools[i])) {
            p->out->chosen_tool = p->out->tools[i];
            return LINNET_OK;
        }
    return FAIL(p, "tool_choice", LINNET_INVALID, "tool_choice: tools has no function '%.64s'",
                json_string_value(name));
}

static linnet_status read_tool_choice(struct parser *p)
{
    const json_t *choice = get(p, "tool_choice");
    if (!choice || is_string(choice, "auto")) return LINNET_OK;
    if (is_string(choice, "none")) {
        openai_free_tools(p->out);
        return LINNET_OK;
    }
    if (!is_string(choice, "required")) {
        linnet_status status = choose_named(p, choice);
        if (status) return status;
    }
    if (p->out->n_tools == 0)
        return FAIL(p, "tool_choice", LINNET_INVALID, "tool_choice: it needs tools beside it");
    if (json_is_false(get(p, "add_generation_prompt")))
        return FAIL(p, "tool_choice", LINNET_INVALID,
                    "tool_choice: a call can be demanded only with add_generation_prompt");
    p->out->call_demanded = true;
    return LINNET_OK;
}

linnet_status openai_read_tools(struct parser *p)
{
    const json_t *parallel = get(p, "parallel_tool_calls");
    const json_t *functions = get(p, "functions"), *call = get(p, "function_call");
    linnet_status status;
    if (functions && !(json_is_array(functions) && json_array_size(functions) == 0))
        return FAIL(p, "functions", LINNET_UNSUPPORTED,
                    "functions: this old field is not supported: use tools");
    if (call && !is_string(call, "none"))
        return FAIL(p, "function_call", LINNET_UNSUPPORTED,
                    "function_call: this old field is not supported: use tool_choice");
    if (parallel && !json_is_boolean(parallel))
        return FAIL(p, "parallel_tool_calls", LINNET_INVALID,
                    "parallel_tool_calls: expected true or false, found %s", kind_of(parallel));
    if ((status = read_tool_list(p)) || (status = read_tool_choice(p))) return status;
    /* A function that is named is called once, as OpenAI's own server does it. */
    p->out->one_call = json_is_false(parallel) || p->out->chosen_tool;
    return LINNET_OK;
}

void openai_free_tools(struct openai_request *request)
{
    for (size_t i = 0; i < request->n_tools; i++) free(request->tools[i]);
    free(request->tools);
    free(request->answer_prefix);
    request->tools = NULL;
    request->n_tools = 0;
    request->answer_prefix = NULL;
}

/* ---- messages ------------------------------------------------------------------------------ */

/* The object that a call's arguments are or spell. NULL: they are none. */
static json_t *arguments_object(json_t *arguments)
{
    if (absent(arguments)) return json_object();
    if (json_is_object(arguments)) return json_incref(arguments);
    size_t n = json_string_length(arguments);
    if (json_is_string(arguments) && n == 0) return json_object();
    json_t *object = json_is_string(arguments)
                         ? json_loadb(json_string_value(arguments), n, JSON_ALLOW_NUL, NULL)
                         : NULL;
    if (json_is_object(object)) return object;
    json_decref(object);
    return NULL;
}

static linnet_status call_for_template(struct parser *p, json_t *call, size_t i, size_t k)
{
    json_t *function = json_object_get(call, "function");
    const json_t *type = json_object_get(call, "type"), *id = json_object_get(call, "id");
    if (!absent(id) && !json_is_string(id))
        return FAIL(p, "messages", LINNET_INVALID,
                    "messages[%zu].tool_calls[%zu].id: expected a string, found %s", i, k,
                    kind_of(id));
    if (!json_is_object(function) || (!absent(type) && !is_string(type, "function")))
        return FAIL(p, "messages", LINNET_INVALID,
                    "messages[%zu].tool_calls[%zu]: expected an object of type \"function\" with "
                    "a function",
                    i, k);
    if (!openai_is_tool_name(json_object_get(function, "name")))
        return FAIL(p, "messages", LINNET_INVALID,
                    "messages[%zu].tool_calls[%zu].function.name: expected 1 to %d letters, "
                    "digits, _ and -",
                    i, k, TOOL_NAME_SIZE - 1);
    json_t *arguments = arguments_object(json_object_get(function, "arguments"));
    if (!arguments)
        return FAIL(p, "messages", LINNET_INVALID,
                    "messages[%zu].tool_calls[%zu].function.arguments: expected a string that "
                    "holds a JSON object",
                    i, k);
    if (json_object_set_new(function, "arguments", arguments)) return no_memory(p, "messages");
    return LINNET_OK;
}

static linnet_status calls_for_template(struct parser *p, json_t *message, size_t i)
{
    json_t *calls = json_object_get(message, "tool_calls"), *call;
    size_t k;
    if (absent(calls)) return LINNET_OK;
    bool some = json_array_size(calls) > 0;
    bool by_assistant = is_string(json_object_get(message, "role"), "assistant");
    if (!json_is_array(calls) || (some && !by_assistant))
        return FAIL(p, "messages", LINNET_INVALID,
                    "messages[%zu].tool_calls: expected a list in a message of the assistant", i);
    json_array_foreach(calls, k, call)
    {
        linnet_status status = call_for_template(p, call, i, k);
        if (status) return status;
    }
    if (!some) json_object_del(message, "tool_calls");
    if (some && absent(json_object_get(message, "content")))
        json_object_set_new(message, "content", json_string(""));
    return LINNET_OK;
}

static linnet_status message_for_template(struct parser *p, json_t *message, size_t i)
{
    const json_t *role = json_object_get(message, "role");
    static const char *const texts[] = {"tool_call_id", "reasoning", "reasoning_content"};
    json_t *reasoning = json_object_get(message, "reasoning");
    if (is_string(role, "function") || !absent(json_object_get(message, "function_call")))
        return FAIL(p, "messages", LINNET_UNSUPPORTED,
                    "messages[%zu]: the old function messages are not supported: use tool_calls "
                    "and role \"tool\"",
                    i);
    for (size_t k = 0; k < sizeof texts / sizeof *texts; k++) {
        const json_t *text = json_object_get(message, texts[k]);
        if (!absent(text) && !json_is_string(text))
            return FAIL(p, "messages", LINNET_INVALID,
                        "messages[%zu].%s: expected a string, found %s", i, texts[k],
                        kind_of(text));
    }
    if (json_is_string(reasoning) && absent(json_object_get(message, "reasoning_content")))
        json_object_set(message, "reasoning_content", reasoning);
    return calls_for_template(p, message, i);
}

linnet_status openai_template_messages(struct parser *p, json_t **messages)
{
    size_t i;
    json_t *message;
    linnet_status status = LINNET_OK;
    *messages = json_deep_copy(get(p, "messages"));
    if (!*messages) return no_memory(p, "messages");
    json_array_foreach(*messages, i, message)
    {
        status = message_for_template(p, message, i);
        if (status) break;
    }
    if (!status) return LINNET_OK;
    json_decref(*messages);
    *messages = NULL;
    return status;
}

/* ---- the answer that will come ------------------------------------------------------------- */

static bool ends_in_reasoning(const char *rendered, size_t size)
{
    static const char tag[] = "<think>";
    size_t n = sizeof tag - 1;
    while (size && json_is_blank(rendered[size - 1])) size--;
    return size >= n && memcmp(rendered + size - n, tag, n) == 0;
}

static size_t count(const char *text, size_t size, const char *part)
{
    size_t n = 0;
    const char *end = text + size;
    while (text && (text = memmem(text, (size_t)(end - text), part, strlen(part)))) n++, text++;
    return n;
}

/*
 * The beginning of a call as the model would write it. It ends before a blank: tokens begin with
 * their blank.
 */
static linnet_status write_prefix(struct parser *p, const char *rendered, size_t size,
                                  const char *plain, size_t plain_size, struct strbuf *prefix)
{
    static const char json_form[] = "{\"name\": function name, \"parameters\"";
    bool hermes = count(rendered, size, "<tool_call>") > count(plain, plain_size, "<tool_call>");
    if (!hermes && count(rendered, size, json_form) == count(plain, plain_size, json_form))
        return FAIL(p, "tool_choice", LINNET_UNSUPPORTED,
                    "tool_choice: this model's chat template asks for calls in a form that cannot "
                    "be demanded: use \"auto\"");
    if (p->out->in_reasoning) strbuf_text(prefix, "\n</think>\n\n");
    strbuf_text(prefix, hermes ? "<tool_call>\n{\"name\":" : "{\"name\":");
    if (p->out->chosen_tool)
        strbuf_format(prefix, " \"%s\", \"%s\":", p->out->chosen_tool,
                      hermes ? "arguments" : "parameters");
    return LINNET_OK;
}

/* Puts the prefix behind the chat's only prompt. */
static linnet_status append_prefix(struct parser *p, const struct strbuf *prefix)
{
    struct openai_prompt *prompt = p->out->prompts;
    int32_t *ids = NULL;
    size_t n = 0;
    p->out->answer_prefix = prefix->failed ? NULL : mem_string(prefix->data, prefix->size);
    if (!p->out->answer_prefix) return no_memory(p, "tool_choice");
    linnet_status status = linnet_tokenize(p->model, prefix->data, prefix->size,
                                           LINNET_PARSE_SPECIAL, &ids, &n, &p->fault->error);
    if (status) return blame(p, "tool_choice", status);
    int32_t *all = mem_resize(prompt->ids, prompt->n + n, sizeof *all);
    if (all) {
        memcpy(all + prompt->n, ids, n * sizeof *all);
        *prompt = (struct openai_prompt){.ids = all, .n = prompt->n + n};
    }
    linnet_free(ids);
    return all ? LINNET_OK : no_memory(p, "tool_choice");
}

linnet_status openai_expect_answer(struct parser *p, const char *rendered, size_t size,
                                   const char *plain, size_t plain_size)
{
    struct strbuf prefix = {0};
    p->out->in_reasoning = ends_in_reasoning(rendered, size);
    if (p->out->n_tools && size == plain_size && memcmp(rendered, plain, size) == 0)
        return FAIL(p, "tools", LINNET_UNSUPPORTED,
                    "tools: this model's chat template has no place for them: leave the field out, "
                    "or take a model that was made for tools");
    if (!p->out->call_demanded) return LINNET_OK;
    linnet_status status = write_prefix(p, rendered, size, plain, plain_size, &prefix);
    if (!status) status = append_prefix(p, &prefix);
    strbuf_free(&prefix);
    return status;
}
