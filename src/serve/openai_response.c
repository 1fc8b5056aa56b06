#include <stdlib.h>
#include <string.h>

#include "serve/openai.h"

/* ---- errors -------------------------------------------------------------------------------- */

int openai_http_status(linnet_status status)
{
    switch (status) {
    case LINNET_OK: return 200;
    case LINNET_INVALID:
    case LINNET_UNSUPPORTED:
    case LINNET_TOO_LONG: return 400;
    case LINNET_MEMORY: return 503;
    default: return 500;
    }
}

json_t *openai_error(const struct openai_fault *fault)
{
    int http = openai_http_status(fault->error.status);
    const char *type = http == 400   ? "invalid_request_error"
                       : http == 503 ? "unavailable_error"
                                     : "server_error";
    json_t *code = fault->error.status == LINNET_TOO_LONG ? json_string("context_length_exceeded")
                                                          : json_null();
    json_t *param = fault->field[0] ? json_string(fault->field) : json_null();
    return json_pack("{s:{s:o,s:s,s:o,s:o}}", "error", "message",
                     openai_text(fault->error.message, strlen(fault->error.message)), "type", type,
                     "param", param, "code", code);
}

/* ---- responses ----------------------------------------------------------------------------- */

json_t *openai_text(const char *bytes, size_t n)
{
    json_t *text = json_stringn(bytes, n);
    if (text) return text;
    struct strbuf clean = {0};
    for (size_t i = 0; i < n;) {
        json_t *good = NULL;
        size_t length = 1;
        for (; length <= 4 && i + length <= n; length++)
            if ((good = json_stringn(bytes + i, length))) break;
        json_decref(good);
        if (good)
            strbuf_append(&clean, bytes + i, length);
        else
            strbuf_utf8(&clean, 0xFFFD);
        i += good ? length : 1;
    }
    text = clean.failed ? NULL : json_stringn(strbuf_cstr(&clean), clean.size);
    strbuf_free(&clean);
    return text;
}

json_t *openai_logprob(float logprob)
{
    return json_real(logprob >= -9999 ? (double)logprob : -9999.0);
}

/* The text of one token, empty if it has none. linnet_free it; may be NULL with *n = 0. */
static char *token_text(const linnet_model *model, int32_t id, size_t *n)
{
    char *text = NULL;
    *n = 0;
    if (linnet_detokenize(model, &id, 1, 0, &text, n, NULL)) return NULL;
    return text;
}

static json_t *chat_token(const linnet_model *model, int32_t id, float logprob)
{
    size_t n;
    char *text = token_text(model, id, &n);
    json_t *bytes = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(bytes, json_integer((uint8_t)text[i]));
    json_t *token = json_pack("{s:o,s:o,s:o}", "token", openai_text(text ? text : "", n), "logprob",
                              openai_logprob(logprob), "bytes", bytes);
    linnet_free(text);
    return token;
}

static json_t *chat_logprobs(const linnet_model *model, const struct openai_answer *a)
{
    json_t *content = json_array();
    for (size_t i = 0; i < a->n_tokens; i++) {
        const struct openai_token *token = &a->tokens[i];
        json_t *entry = chat_token(model, token->id, token->logprob), *top = json_array();
        for (size_t k = token->first_top; k < token->first_top + token->n_top; k++)
            json_array_append_new(top, chat_token(model, a->top[k].id, a->top[k].logprob));
        json_object_set_new(entry, "top_logprobs", top);
        json_array_append_new(content, entry);
    }
    return json_pack("{s:o}", "content", content);
}

static json_t *completion_logprobs(const linnet_model *model, const struct openai_answer *a)
{
    json_t *tokens = json_array(), *values = json_array(), *tops = json_array(),
           *offsets = json_array();
    for (size_t i = 0; i < a->n_tokens; i++) {
        const struct openai_token *token = &a->tokens[i];
        size_t n;
        char *text = token_text(model, token->id, &n);
        json_t *top = json_object();
        json_array_append_new(tokens, openai_text(text ? text : "", n));
        linnet_free(text);
        for (size_t k = token->first_top; k < token->first_top + token->n_top; k++) {
            text = token_text(model, a->top[k].id, &n);
            json_t *key = openai_text(text ? text : "", n);
            json_object_setn_new(top, json_string_value(key), json_string_length(key),
                                 openai_logprob(a->top[k].logprob));
            json_decref(key);
            linnet_free(text);
        }
        json_array_append_new(values, openai_logprob(token->logprob));
        json_array_append_new(tops, top);
        json_array_append_new(offsets, json_integer((json_int_t)token->text_offset));
    }
    return json_pack("{s:o,s:o,s:o,s:o}", "tokens", tokens, "token_logprobs", values,
                     "top_logprobs", tops, "text_offset", offsets);
}

json_t *openai_logprobs(const linnet_model *model, enum openai_endpoint endpoint,
                        const struct openai_answer *answer)
{
    if (!answer->has_logprobs) return json_null();
    return endpoint == OPENAI_CHAT ? chat_logprobs(model, answer)
                                   : completion_logprobs(model, answer);
}

static json_t *ids_json(const int32_t *ids, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(list, json_integer(ids[i]));
    return list;
}

static const struct openai_prompt *prompt_of(const struct openai_request *request, size_t choice)
{
    return &request->prompts[choice / (size_t)request->request.n];
}

json_t *openai_echo(const struct openai_request *request, size_t choice)
{
    const struct openai_prompt *prompt = prompt_of(request, choice);
    return openai_text(prompt->text ? prompt->text : "", prompt->text_size);
}

/* Each made clean by itself, as in a stream. */
static json_t *completion_text(const struct openai_request *request, const struct openai_answer *a,
                               size_t index)
{
    json_t *echo = openai_echo(request, index);
    json_t *text = openai_text(strbuf_cstr(&a->text), a->text.size);
    struct strbuf both = {0};
    strbuf_append(&both, json_string_value(echo), json_string_length(echo));
    strbuf_append(&both, json_string_value(text), json_string_length(text));
    json_decref(echo);
    json_decref(text);
    text = both.failed ? NULL : json_stringn(strbuf_cstr(&both), both.size);
    strbuf_free(&both);
    return text;
}

static json_t *choice_json(const linnet_model *model, const struct openai_request *request,
                           const struct openai_answer *a, size_t index)
{
    bool chat = request->endpoint == OPENAI_CHAT;
    json_t *choice = json_pack("{s:I}", "index", (json_int_t)index);
    if (chat)
        json_object_set_new(choice, "message", openai_message(a));
    else
        json_object_set_new(choice, "text", completion_text(request, a, index));
    json_object_set_new(choice, "logprobs", openai_logprobs(model, request->endpoint, a));
    json_object_set_new(choice, "finish_reason", json_string(openai_finish_reason(a)));
    if (!request->return_token_ids) return choice;
    const struct openai_prompt *prompt = prompt_of(request, index);
    json_t *ids = json_array();
    for (size_t i = 0; i < a->n_tokens; i++)
        json_array_append_new(ids, json_integer(a->tokens[i].id));
    json_object_set_new(choice, "token_ids", ids);
    json_object_set_new(choice, "prompt_token_ids", ids_json(prompt->ids, prompt->n));
    return choice;
}

json_t *openai_usage(const struct openai_answer *answers, size_t n_answers, size_t n_per_prompt)
{
    json_int_t prompt = 0, cached = 0, completion = 0, reasoning = 0;
    for (size_t i = 0; i < n_answers; i++) {
        reasoning += answers[i].reasoning_tokens;
        completion += answers[i].completion_tokens;
        if (i % n_per_prompt) continue;
        prompt += answers[i].prompt_tokens;
        cached += answers[i].cached_tokens;
    }
    json_t *details = reasoning ? json_pack("{s:I}", "reasoning_tokens", reasoning) : NULL;
    return json_pack("{s:I,s:I,s:I,s:{s:I},s:o*}", "prompt_tokens", prompt, "completion_tokens",
                     completion, "total_tokens", prompt + completion, "prompt_tokens_details",
                     "cached_tokens", cached, "completion_tokens_details", details);
}

json_t *openai_response(const linnet_model *model, const struct openai_request *request,
                        const struct openai_reply *reply)
{
    json_t *choices = json_array();
    for (size_t i = 0; i < reply->n_answers; i++)
        json_array_append_new(choices, choice_json(model, request, &reply->answers[i], i));
    const char *object = request->endpoint == OPENAI_CHAT ? "chat.completion" : "text_completion";
    json_t *usage = openai_usage(reply->answers, reply->n_answers, (size_t)request->request.n);
    return json_pack("{s:s,s:s,s:I,s:o,s:n,s:o,s:o}", "id", reply->id, "object", object, "created",
                     (json_int_t)reply->created, "model",
                     openai_text(reply->model_name, strlen(reply->model_name)),
                     "system_fingerprint", "choices", choices, "usage", usage);
}

json_t *openai_chunk(const struct openai_request *request, const struct openai_reply *reply,
                     json_t *choices, json_t *usage)
{
    bool chat = request->endpoint == OPENAI_CHAT;
    json_t *chunk = json_pack(
        "{s:s,s:s,s:I,s:o,s:o}", "id", reply->id, "object",
        chat ? "chat.completion.chunk" : "text_completion", "created", (json_int_t)reply->created,
        "model", openai_text(reply->model_name, strlen(reply->model_name)), "choices", choices);
    if (usage) json_object_set_new(chunk, "usage", usage);
    return chunk;
}
