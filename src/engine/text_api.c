/* text_api.c - text to tokens and back, and chats, as linnet.h offers them. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/memory.h"
#include "base/strbuf.h"
#include "engine/model_internal.h"

static linnet_status need_tokenizer(const linnet_model *m, linnet_error *err)
{
    if (m->tokenizer) return LINNET_OK;
    return error_set(err, LINNET_UNSUPPORTED, "%s has no tokenizer: give token ids", m->name);
}

/* Hands an encoded text over as linnet.h's malloc'ed array. */
static linnet_status encode(const linnet_model *m, const char *text, size_t n,
                            const struct encode_options *options, int32_t **ids, size_t *n_ids,
                            linnet_error *err)
{
    struct token_list list = {0};
    linnet_status status = tokenizer_encode(m->tokenizer, text, n, options, &list, err);
    if (status == LINNET_OK && !list.ids) { /* an empty text is no failure */
        list.ids = mem_new(1, sizeof *list.ids);
        if (!list.ids) status = error_memory(err, "token ids", sizeof *list.ids);
    }
    if (status) {
        token_list_free(&list);
        return status;
    }
    *ids = list.ids;
    *n_ids = list.count;
    return LINNET_OK;
}

linnet_status linnet_tokenize(const linnet_model *m, const char *text, size_t n, unsigned flags,
                              int32_t **ids, size_t *n_ids, linnet_error *err)
{
    linnet_status status = need_tokenizer(m, err);
    if (status) return status;
    struct encode_options options = {.add_special = flags & LINNET_ADD_SPECIAL,
                                     .parse_special = flags & LINNET_PARSE_SPECIAL};
    return encode(m, text, n, &options, ids, n_ids, err);
}

linnet_status linnet_detokenize(const linnet_model *m, const int32_t *ids, size_t n, unsigned flags,
                                char **text, size_t *size, linnet_error *err)
{
    linnet_status status = need_tokenizer(m, err);
    if (status) return status;
    struct strbuf out = {0};
    status = tokenizer_decode(m->tokenizer, ids, n, flags & LINNET_SKIP_SPECIAL, &out, err);
    if (!status) strbuf_append(&out, "", 0);
    if (!status && (out.failed || !out.data)) {
        if (out.failed)
            strbuf_free(&out);
        else
            out.data = mem_string("", 0);
        if (!out.data) status = error_memory(err, "the text", n);
    }
    if (status) {
        strbuf_free(&out);
        return status;
    }
    *text = out.data;
    *size = out.size;
    return LINNET_OK;
}

/* ---- chats ------------------------------------------------------------------------------- */

static linnet_status bad_request(linnet_error *err, const char *what)
{
    return error_set(err, LINNET_INVALID, "%s", what);
}

/* The text parts of a content list, joined: *content becomes one string. */
static linnet_status join_parts(json_t *message, size_t index, linnet_error *err)
{
    struct strbuf text = {0};
    size_t i;
    json_t *part;
    linnet_status status = LINNET_OK;
    json_array_foreach(json_object_get(message, "content"), i, part)
    {
        json_t *value = json_object_get(part, "text");
        const char *type = json_string_value(json_object_get(part, "type"));
        if (!type)
            status =
                error_set(err, LINNET_INVALID,
                          "messages[%zu].content[%zu] must be an object with a \"type\"", index, i);
        else if (strcmp(type, "text") != 0)
            status = error_set(err, LINNET_UNSUPPORTED,
                               "messages[%zu].content[%zu] is of type \"%s\": only \"text\" is "
                               "supported",
                               index, i, type);
        else if (!json_is_string(value))
            status = error_set(err, LINNET_INVALID,
                               "messages[%zu].content[%zu] has no string \"text\"", index, i);
        if (status) break;
        strbuf_append(&text, json_string_value(value), json_string_length(value));
    }
    if (!status) {
        json_t *joined = text.failed ? NULL : json_stringn(strbuf_cstr(&text), text.size);
        if (json_object_set_new(message, "content", joined))
            status = error_memory(err, "a message", text.size);
    }
    strbuf_free(&text);
    return status;
}

static linnet_status check_message(json_t *message, size_t index, linnet_error *err)
{
    if (!json_is_object(message))
        return error_set(err, LINNET_INVALID, "messages[%zu] must be an object", index);
    const char *role = json_string_value(json_object_get(message, "role"));
    if (!role) return error_set(err, LINNET_INVALID, "messages[%zu] has no string \"role\"", index);
    json_t *content = json_object_get(message, "content");
    if (json_is_string(content)) return LINNET_OK;
    if (json_is_array(content)) return join_parts(message, index, err);
    bool calls = strcmp(role, "assistant") == 0 &&
                 json_array_size(json_object_get(message, "tool_calls")) > 0;
    if (calls && (!content || json_is_null(content))) return LINNET_OK;
    return error_set(err, LINNET_INVALID,
                     "messages[%zu].content must be a string or a list of text parts", index);
}

/* The model's own special tokens, by the names under which templates know them. */
static const char *const token_names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                          "pad_token", "cls_token", "mask_token"};
enum { N_TOKEN_NAMES = sizeof token_names / sizeof *token_names };

static json_t *special_token(const linnet_model *m, const char *name)
{
    const json_t *config = m->checkpoint ? m->checkpoint->tokenizer_config : NULL;
    json_t *stated = json_object_get(config, name);
    if (json_is_object(stated)) stated = json_object_get(stated, "content");
    if (json_is_string(stated)) return json_incref(stated);
    int32_t id = strcmp(name, "bos_token") == 0   ? tokenizer_bos(m->tokenizer)
                 : strcmp(name, "eos_token") == 0 ? tokenizer_eos(m->tokenizer)
                                                  : -1;
    if (id < 0) return NULL;
    size_t n;
    const char *bytes = tokenizer_bytes(m->tokenizer, id, &n);
    return json_text(bytes, n);
}

/* Merges the request's own template variables; what they replace is no longer trusted. */
static linnet_status merge_kwargs(json_t *context, json_t *kwargs, linnet_error *err)
{
    static const char *const reserved[] = {"messages", "tools", "add_generation_prompt"};
    if (!kwargs || json_is_null(kwargs)) return LINNET_OK;
    if (!json_is_object(kwargs)) return bad_request(err, "chat_template_kwargs must be an object");
    for (size_t i = 0; i < sizeof reserved / sizeof *reserved; i++)
        if (json_object_get(kwargs, reserved[i]))
            return error_set(err, LINNET_INVALID,
                             "chat_template_kwargs must not contain \"%s\": it has a field of its "
                             "own",
                             reserved[i]);
    if (json_object_update(context, kwargs)) return error_memory(err, "chat_template_kwargs", 0);
    return LINNET_OK;
}

struct chat {
    json_t *context;
    const char *trusted[N_TOKEN_NAMES + 1];
};

/* Fills context and trusted from a request, which is changed on the way. */
static linnet_status build_context(const linnet_model *m, json_t *request, struct chat *chat,
                                   linnet_error *err)
{
    if (!json_is_object(request)) return bad_request(err, "the chat must be a JSON object");
    json_t *messages = json_object_get(request, "messages");
    json_t *tools = json_object_get(request, "tools");
    json_t *prompt = json_object_get(request, "add_generation_prompt");
    json_t *kwargs = json_object_get(request, "chat_template_kwargs");
    if (!json_is_array(messages)) return bad_request(err, "messages must be a list");
    if (json_array_size(messages) == 0) return bad_request(err, "messages is empty");
    if (tools && !json_is_array(tools) && !json_is_null(tools))
        return bad_request(err, "tools must be a list");
    if (prompt && !json_is_boolean(prompt))
        return bad_request(err, "add_generation_prompt must be true or false");
    size_t i;
    json_t *message;
    json_array_foreach(messages, i, message)
    {
        linnet_status status = check_message(message, i, err);
        if (status) return status;
    }
    chat->context = json_pack("{s:O,s:O?,s:b}", "messages", messages, "tools",
                              json_array_size(tools) ? tools : NULL, "add_generation_prompt",
                              !prompt || json_is_true(prompt));
    if (!chat->context) return error_memory(err, "the chat", 0);
    /* Hugging Face names tools even where there are none. */
    if (!json_object_get(chat->context, "tools"))
        json_object_set_new(chat->context, "tools", json_null());
    size_t n_trusted = 0;
    for (i = 0; i < N_TOKEN_NAMES; i++) {
        json_t *token = special_token(m, token_names[i]);
        if (!token) continue;
        json_object_set_new(chat->context, token_names[i], token);
        if (!json_object_get(kwargs, token_names[i])) chat->trusted[n_trusted++] = token_names[i];
    }
    return merge_kwargs(chat->context, kwargs, err);
}

static linnet_status render(const linnet_model *m, json_t *request, struct rendered *out,
                            linnet_error *err)
{
    struct chat chat = {0};
    linnet_status status = build_context(m, request, &chat, err);
    if (!status)
        status = template_render(m->chat_template, chat.context, chat.trusted, (int64_t)time(NULL),
                                 out, err);
    json_decref(chat.context);
    return status;
}

linnet_status linnet_chat_tokenize(const linnet_model *m, const char *request, size_t n,
                                   char **rendered, size_t *rendered_size, int32_t **ids,
                                   size_t *n_ids, linnet_error *err)
{
    linnet_status status = need_tokenizer(m, err);
    if (status) return status;
    if (!m->chat_template)
        return error_set(err, LINNET_UNSUPPORTED,
                         "%s has no chat template: give the whole prompt as text", m->name);
    json_error_t where;
    json_t *json = json_loadb(request, n, JSON_ALLOW_NUL, &where);
    if (!json)
        return error_set(err, LINNET_INVALID, "the chat is not JSON: line %d, column %d: %s",
                         where.line, where.column, where.text);
    struct rendered out = {0};
    status = render(m, json, &out, err);
    json_decref(json);
    struct encode_options options = {
        .parse_special = true, .untrusted = out.untrusted, .n_untrusted = out.n_untrusted};
    if (!status)
        status = encode(m, strbuf_cstr(&out.text), out.text.size, &options, ids, n_ids, err);
    if (!status && rendered) {
        *rendered = mem_string(strbuf_cstr(&out.text), out.text.size);
        if (!*rendered) {
            status = error_memory(err, "the rendered chat", out.text.size);
            free(*ids);
            *ids = NULL;
        }
    }
    if (!status && rendered_size) *rendered_size = out.text.size;
    rendered_free(&out);
    return status;
}
