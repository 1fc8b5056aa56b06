/* anthropic_messages.c - system and messages of the Messages API as OpenAI's messages. */
#include <string.h>

#include "serve/anthropic_internal.h"

/*
 * The chat that is being put together. Neighbouring messages of one role are one turn, as the API
 * has it. A turn of the user is its tool results, in the order of the calls (some templates show no
 * ids), then its text.
 */
struct chat {
    struct parser *p;
    json_t *messages;
    const char *role;    /* of the turn at hand; NULL: none yet */
    struct strbuf text;  /* of the turn */
    bool has_text;       /* be it empty */
    bool gap;            /* text of another message follows it */
    struct strbuf think; /* of a turn of the assistant */
    json_t *calls;       /* of a turn of the assistant */
    json_t *results;     /* id: message, or null while there is none; of the last calls */
    size_t n_missing;    /* of results */
    json_t *ids;         /* all ids of calls so far, as keys */
    bool failed;         /* memory ran out */
};

/* Where in the request something stands. */
struct place {
    const char *field;
    char path[80];
};

static void set(struct chat *c, json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value)) c->failed = true;
}

static void append(struct chat *c, json_t *list, json_t *value)
{
    if (json_array_append_new(list, value)) c->failed = true;
}

static json_t *text_json(const struct strbuf *text)
{
    return text->failed ? NULL : json_stringn(strbuf_cstr(text), text->size);
}

/* Where text goes: messages that became one turn have a blank line between. */
static struct strbuf *turn_text(struct chat *c)
{
    if (c->gap) strbuf_text(&c->text, "\n\n");
    c->gap = false;
    c->has_text = true;
    return &c->text;
}

/* ---- blocks -------------------------------------------------------------------------------- */

static linnet_status refuse_block(struct chat *c, const struct place *at, const json_t *block)
{
    const json_t *type = json_object_get(block, "type");
    if (!json_is_object(block))
        return FAIL(c->p, at->field, LINNET_INVALID, "%s: expected a block, found %s", at->path,
                    kind_of(block));
    if (!json_is_string(type))
        return FAIL(c->p, at->field, LINNET_INVALID, "%s.type: expected a string, found %s",
                    at->path, kind_of(type));
    return FAIL(c->p, at->field, LINNET_UNSUPPORTED,
                "%s: a block of type '%.40s' is not supported here: this server reads text",
                at->path, json_string_value(type));
}

static linnet_status add_text(struct chat *c, const struct place *at, const json_t *block,
                              struct strbuf *to)
{
    const json_t *text = json_object_get(block, "text");
    if (!anthropic_is_type(block, "text")) return refuse_block(c, at, block);
    if (!json_is_string(text))
        return FAIL(c->p, at->field, LINNET_INVALID, "%s.text: expected a string, found %s",
                    at->path, kind_of(text));
    strbuf_append(to, json_string_value(text), json_string_length(text));
    return LINNET_OK;
}

/* A string, or a list of text blocks, which are joined with nothing between. */
static linnet_status add_texts(struct chat *c, const struct place *at, const json_t *content,
                               struct strbuf *to)
{
    const json_t *block;
    size_t i;
    if (json_is_string(content)) {
        strbuf_append(to, json_string_value(content), json_string_length(content));
        return LINNET_OK;
    }
    if (!json_is_array(content))
        return FAIL(c->p, at->field, LINNET_INVALID,
                    "%s: expected a string or a list of blocks, found %s", at->path,
                    kind_of(content));
    json_array_foreach(content, i, block)
    {
        struct place inside = {at->field, ""};
        snprintf(inside.path, sizeof inside.path, "%.50s[%zu]", at->path, i);
        linnet_status status = add_text(c, &inside, block, to);
        if (status) return status;
    }
    return LINNET_OK;
}

static linnet_status read_id(struct chat *c, const struct place *at, const json_t *block,
                             const char *key, const char **id)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    const json_t *value = json_object_get(block, key);
    size_t n = json_string_length(value);
    *id = json_string_value(value);
    if (n > 0 && strspn(*id, letters) == n) return LINNET_OK;
    return FAIL(c->p, at->field, LINNET_INVALID, "%s.%s: expected letters, digits, _ and -%s",
                at->path, key, json_is_string(value) ? "" : " in a string");
}

static linnet_status add_tool_use(struct chat *c, const struct place *at, const json_t *block)
{
    json_t *name = json_object_get(block, "name"), *input = json_object_get(block, "input");
    const char *id;
    linnet_status status = read_id(c, at, block, "id", &id);
    if (status) return status;
    if (!openai_is_tool_name(name))
        return FAIL(c->p, at->field, LINNET_INVALID,
                    "%s.name: expected 1 to %d letters, digits, _ and -", at->path,
                    TOOL_NAME_SIZE - 1);
    if (!json_is_object(input))
        return FAIL(c->p, at->field, LINNET_INVALID, "%s.input: expected an object, found %s",
                    at->path, kind_of(input));
    if (json_object_get(c->ids, id))
        return FAIL(c->p, at->field, LINNET_INVALID,
                    "%s.id: '%.64s' was used before: each tool_use needs an id of its own",
                    at->path, id);
    set(c, c->ids, id, json_true());
    set(c, c->results, id, json_null());
    c->n_missing++;
    append(c, c->calls,
           json_pack("{s:s,s:s,s:{s:O,s:O}}", "id", id, "type", "function", "function", "name",
                     name, "arguments", input));
    return LINNET_OK;
}

static linnet_status add_tool_result(struct chat *c, const struct place *at, const json_t *block)
{
    const json_t *content = json_object_get(block, "content");
    const json_t *failed = json_object_get(block, "is_error");
    struct strbuf text = {0};
    struct place inside = {at->field, ""};
    const char *id;
    linnet_status status = read_id(c, at, block, "tool_use_id", &id);
    if (status) return status;
    const json_t *place = json_object_get(c->results, id);
    if (!json_is_null(place))
        return FAIL(c->p, at->field, LINNET_INVALID, "%s.tool_use_id: '%.64s' is %s", at->path, id,
                    place ? "answered twice" : "no tool_use of the message before");
    if (c->has_text)
        return FAIL(c->p, at->field, LINNET_INVALID,
                    "%s: tool_result blocks must come before the message's text", at->path);
    if (failed && !json_is_boolean(failed) && !json_is_null(failed))
        return FAIL(c->p, at->field, LINNET_INVALID,
                    "%s.is_error: expected true or false, found %s", at->path, kind_of(failed));
    if (json_is_true(failed)) strbuf_text(&text, "Error: ");
    snprintf(inside.path, sizeof inside.path, "%.60s.content", at->path);
    if (content && !json_is_null(content)) status = add_texts(c, &inside, content, &text);
    if (!status) {
        json_t *message = json_pack("{s:s,s:s,s:o}", "role", "tool", "tool_call_id", id, "content",
                                    text_json(&text));
        set(c, c->results, id, message);
        c->n_missing--;
    }
    strbuf_free(&text);
    return status;
}

static linnet_status add_thinking(struct chat *c, const struct place *at, const json_t *block)
{
    const json_t *text = json_object_get(block, "thinking");
    if (!json_is_string(text))
        return FAIL(c->p, at->field, LINNET_INVALID, "%s.thinking: expected a string, found %s",
                    at->path, kind_of(text));
    strbuf_append(&c->think, json_string_value(text), json_string_length(text));
    return LINNET_OK;
}

static linnet_status add_block(struct chat *c, const struct place *at, const json_t *block)
{
    bool user = strcmp(c->role, "user") == 0, assistant = strcmp(c->role, "assistant") == 0;
    if (user && anthropic_is_type(block, "tool_result")) return add_tool_result(c, at, block);
    if (assistant && anthropic_is_type(block, "tool_use")) return add_tool_use(c, at, block);
    if (assistant && anthropic_is_type(block, "thinking")) return add_thinking(c, at, block);
    if (assistant && anthropic_is_type(block, "redacted_thinking")) return LINNET_OK;
    return add_text(c, at, block, turn_text(c));
}

/* ---- turns --------------------------------------------------------------------------------- */

static void end_user(struct chat *c)
{
    const char *id;
    json_t *message;
    bool results = json_object_size(c->results) > 0;
    json_object_foreach(c->results, id, message) append(c, c->messages, json_incref(message));
    json_object_clear(c->results);
    if (results && !c->has_text) return;
    append(c, c->messages, json_pack("{s:s,s:o}", "role", "user", "content", text_json(&c->text)));
}

static void end_assistant(struct chat *c)
{
    json_t *message = json_pack("{s:s,s:o}", "role", "assistant", "content", text_json(&c->text));
    if (c->think.size) set(c, message, "reasoning_content", text_json(&c->think));
    if (json_array_size(c->calls)) set(c, message, "tool_calls", json_copy(c->calls));
    append(c, c->messages, message);
    json_array_clear(c->calls);
}

static linnet_status blame_missing(struct chat *c)
{
    const char *id = "", *key;
    json_t *result;
    json_object_foreach(c->results, key, result)
    {
        if (json_is_null(result)) id = key;
    }
    return FAIL(c->p, "messages", LINNET_INVALID,
                "messages: the tool_use '%.64s' has no tool_result in the message after it", id);
}

/* The turn is whole: what follows is another role's, or ("") nothing. */
static linnet_status end_turn(struct chat *c, const char *next)
{
    if (!c->role) return LINNET_OK;
    bool assistant = strcmp(c->role, "assistant") == 0;
    if (c->n_missing && !(assistant && strcmp(next, "user") == 0)) return blame_missing(c);
    if (assistant)
        end_assistant(c);
    else if (strcmp(c->role, "user") == 0)
        end_user(c);
    else
        append(c, c->messages,
               json_pack("{s:s,s:o}", "role", "system", "content", text_json(&c->text)));
    c->failed |= c->text.failed || c->think.failed;
    strbuf_clear(&c->text);
    strbuf_clear(&c->think);
    c->has_text = c->gap = false;
    return LINNET_OK;
}

/* A message of this role follows: one turn more, or more of the turn at hand. */
static linnet_status begin_message(struct chat *c, const char *role)
{
    if (c->role && strcmp(c->role, role) == 0) {
        c->gap = c->text.size > 0;
        return LINNET_OK;
    }
    linnet_status status = end_turn(c, role);
    c->role = role;
    return status;
}

static linnet_status read_message(struct chat *c, size_t i, const json_t *message)
{
    static const char *const roles[] = {"user", "assistant", "system"};
    const json_t *role = json_object_get(message, "role"), *block;
    const json_t *content = json_object_get(message, "content");
    struct place at = {"messages", ""};
    size_t k = 0;
    snprintf(at.path, sizeof at.path, "messages[%zu].content", i);
    if (!json_is_object(message))
        return FAIL(c->p, "messages", LINNET_INVALID, "messages[%zu]: expected an object, found %s",
                    i, kind_of(message));
    while (k < 3 && !anthropic_is_string(role, roles[k])) k++;
    if (k == 3)
        return FAIL(c->p, "messages", LINNET_INVALID,
                    "messages[%zu].role: expected \"user\", \"assistant\" or \"system\"", i);
    linnet_status status = begin_message(c, roles[k]);
    if (status) return status;
    bool empty = json_is_array(content) ? json_array_size(content) == 0
                                        : json_is_string(content) && !json_string_length(content);
    if (empty && k != 1)
        return FAIL(c->p, "messages", LINNET_INVALID, "%s: it must not be empty", at.path);
    if (!json_is_array(content)) return add_texts(c, &at, content, turn_text(c));
    json_array_foreach(content, k, block)
    {
        struct place inside = {at.field, ""};
        snprintf(inside.path, sizeof inside.path, "%.50s[%zu]", at.path, k);
        if ((status = add_block(c, &inside, block))) return status;
    }
    return LINNET_OK;
}

static linnet_status read_system(struct chat *c)
{
    static const struct place at = {"system", "system"};
    const json_t *system = get(c->p, "system");
    if (!system) return LINNET_OK;
    c->role = "system";
    linnet_status status = add_texts(c, &at, system, &c->text);
    if (c->text.size == 0) c->role = NULL;
    return status;
}

static linnet_status read_list(struct chat *c)
{
    static const char field[] = "messages";
    const json_t *messages = get(c->p, field), *message;
    linnet_status status;
    size_t i;
    if (json_array_size(messages) == 0)
        return FAIL(c->p, field, LINNET_INVALID, "%s: expected a list of messages, found %s", field,
                    json_is_array(messages) ? "an empty one" : kind_of(messages));
    json_array_foreach(messages, i, message)
    {
        if ((status = read_message(c, i, message))) return status;
    }
    bool prefill = strcmp(c->role, "assistant") == 0;
    if ((status = end_turn(c, ""))) return status;
    if (!prefill) return LINNET_OK;
    return FAIL(c->p, field, LINNET_UNSUPPORTED,
                "%s: the last one is the assistant's, and an answer cannot be begun for it: end "
                "with a message of the user",
                field);
}

linnet_status anthropic_read_messages(struct parser *p, json_t *chat)
{
    struct chat c = {.p = p,
                     .messages = json_array(),
                     .calls = json_array(),
                     .results = json_object(),
                     .ids = json_object()};
    linnet_status status = read_system(&c);
    if (!status) status = read_list(&c);
    if (json_object_set_new(chat, "messages", c.messages)) c.failed = true;
    if (!status && c.failed) status = no_memory(p, "messages");
    json_decref(c.calls);
    json_decref(c.results);
    json_decref(c.ids);
    strbuf_free(&c.text);
    strbuf_free(&c.think);
    return status;
}
