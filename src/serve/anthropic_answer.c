/* anthropic_answer.c - what was answered to a Messages request: whole, as a stream, or an error. */
#include <stdlib.h>
#include <string.h>

#include "serve/anthropic.h"

void anthropic_make_id(char id[ANTHROPIC_ID_SIZE])
{
    char chat[OPENAI_ID_SIZE];
    openai_make_id(OPENAI_CHAT, chat);
    snprintf(id, ANTHROPIC_ID_SIZE, "msg_%.24s", strchr(chat, '-') + 1);
}

/* ---- errors -------------------------------------------------------------------------------- */

enum { OVERLOADED = 529 };

int anthropic_http_status(int http)
{
    return http == 503 ? OVERLOADED : http;
}

static const char *error_type(int http)
{
    switch (http) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return "request_too_large";
    case 429: return "rate_limit_error";
    case 503:
    case OVERLOADED: return "overloaded_error";
    case 504: return "timeout_error";
    }
    return http >= 400 && http < 500 ? "invalid_request_error" : "api_error";
}

json_t *anthropic_error(int http, const char *message, const char *request_id)
{
    return json_pack("{s:s,s:{s:s,s:o},s:s*}", "type", "error", "error", "type", error_type(http),
                     "message", openai_text(message, strlen(message)), "request_id", request_id);
}

/* ---- JSON text ----------------------------------------------------------------------------- */

static int write_bytes(const char *bytes, size_t n, void *user)
{
    strbuf_append(user, bytes, n);
    return 0;
}

/* Takes over the JSON; NULL: it could not be made. */
static void write_json(struct strbuf *out, json_t *json)
{
    if (!json || json_dump_callback(json, write_bytes, out, JSON_COMPACT | JSON_ENCODE_ANY))
        out->failed = true;
    json_decref(json);
}

static json_t *text_json(const struct strbuf *text, size_t begin, size_t size)
{
    return openai_text(strbuf_cstr(text) + begin, size);
}

/* ---- what both forms say ------------------------------------------------------------------- */

const char *anthropic_stop_reason(const struct anthropic_reply *reply)
{
    const struct openai_answer *a = reply->answer;
    int32_t max_tokens = reply->request->request.max_tokens;
    if (a->finish == LINNET_FINISH_NONE) return NULL;
    if (strcmp(openai_finish_reason(a), "tool_calls") == 0) return "tool_use";
    if (a->finish == LINNET_FINISH_STOP) return a->stop ? "stop_sequence" : "end_turn";
    if (a->finish != LINNET_FINISH_LENGTH) return NULL;
    return a->completion_tokens >= max_tokens ? "max_tokens" : "model_context_window_exceeded";
}

/* Which one it was; null where that is not why the answer ended. */
static json_t *stop_sequence(const struct anthropic_reply *reply)
{
    const linnet_request *r = &reply->request->request;
    const char *reason = anthropic_stop_reason(reply);
    size_t stop = (size_t)reply->answer->stop;
    if (!reason || strcmp(reason, "stop_sequence") != 0 || stop > r->n_stop) return json_null();
    return json_string(r->stop[stop - 1]);
}

/* input_tokens are those that were not in the cache; nothing is ever paid for putting them in. */
static json_t *usage_json(const struct anthropic_reply *reply)
{
    const struct openai_answer *a = reply->answer;
    json_int_t prompt =
        a->prompt_tokens ? a->prompt_tokens : (json_int_t)reply->request->prompts[0].n;
    json_int_t thinking = a->reasoning_tokens;
    json_t *details = thinking ? json_pack("{s:I}", "thinking_tokens", thinking) : NULL;
    return json_pack("{s:I,s:i,s:I,s:I,s:o*}", "input_tokens", prompt - a->cached_tokens,
                     "cache_creation_input_tokens", 0, "cache_read_input_tokens",
                     (json_int_t)a->cached_tokens, "output_tokens",
                     (json_int_t)a->completion_tokens, "output_tokens_details", details);
}

/* An answer's "call_..." is "toolu_..." here. */
static json_t *tool_id(const struct openai_call *call)
{
    return json_sprintf("toolu_%s", strchr(call->id, '_') + 1);
}

/* ---- the whole message --------------------------------------------------------------------- */

/* The next block of the content from delta *at on: its kind and size in bytes; begin is its first
 * delta. Calls that were none are passed over: their text comes again as text. */
static enum anthropic_block next_block(const struct openai_answer *a, size_t *at, size_t *begin,
                                       size_t *size)
{
    enum anthropic_block kind = ANTHROPIC_BLOCK_NONE;
    *size = 0;
    for (; *at < a->n_deltas; ++*at) {
        const struct openai_delta *d = &a->deltas[*at];
        bool text = d->type == TOOL_CONTENT, thinking = d->type == TOOL_REASONING;
        if (!text && !thinking && !a->calls[d->call].complete) continue;
        enum anthropic_block its = text       ? ANTHROPIC_BLOCK_TEXT
                                   : thinking ? ANTHROPIC_BLOCK_THINKING
                                              : ANTHROPIC_BLOCK_TOOL_USE;
        if (kind && (its != kind || d->type == TOOL_CALL_BEGIN)) break;
        if (!kind) *begin = *at;
        kind = its;
        *size += d->size;
    }
    return kind;
}

static void write_call(const struct openai_call *call, struct strbuf *out)
{
    strbuf_text(out, "{\"type\":\"tool_use\",\"id\":");
    write_json(out, tool_id(call));
    strbuf_text(out, ",\"name\":");
    write_json(out, json_string(call->name));
    strbuf_text(out, ",\"input\":");
    strbuf_append(out, call->arguments.data, call->arguments.size);
    strbuf_char(out, '}');
}

static void write_content(const struct openai_answer *a, struct strbuf *out)
{
    enum anthropic_block kind;
    size_t at = 0, begin = 0, size = 0, n = 0;
    strbuf_char(out, '[');
    while ((kind = next_block(a, &at, &begin, &size))) {
        const struct openai_delta *d = &a->deltas[begin];
        if (n++) strbuf_char(out, ',');
        if (kind == ANTHROPIC_BLOCK_TOOL_USE)
            write_call(&a->calls[d->call], out);
        else if (kind == ANTHROPIC_BLOCK_TEXT)
            write_json(out, json_pack("{s:s,s:o}", "type", "text", "text",
                                      text_json(&a->content, d->begin, size)));
        else
            write_json(out, json_pack("{s:s,s:o,s:s}", "type", "thinking", "thinking",
                                      text_json(&a->reasoning, d->begin, size), "signature", ""));
    }
    strbuf_char(out, ']');
}

void anthropic_message(const struct anthropic_reply *reply, struct strbuf *out)
{
    strbuf_text(out, "{\"id\":");
    write_json(out, json_string(reply->id));
    strbuf_text(out, ",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
    write_json(out, openai_text(reply->model_name, strlen(reply->model_name)));
    strbuf_text(out, ",\"content\":");
    write_content(reply->answer, out);
    strbuf_text(out, ",\"stop_reason\":");
    write_json(out, json_pack("s?", anthropic_stop_reason(reply)));
    strbuf_text(out, ",\"stop_sequence\":");
    write_json(out, stop_sequence(reply));
    strbuf_text(out, ",\"usage\":");
    write_json(out, usage_json(reply));
    strbuf_char(out, '}');
}

/* ---- the stream ---------------------------------------------------------------------------- */

/* Takes over the data, whose first key is "type": the event's name. */
static void write_event(struct strbuf *out, json_t *data)
{
    const char *name = json_string_value(json_object_get(data, "type"));
    strbuf_format(out, "event: %s\ndata: ", name ? name : "");
    write_json(out, data);
    strbuf_text(out, "\n\n");
}

void anthropic_stream_ping(struct strbuf *out)
{
    write_event(out, json_pack("{s:s}", "type", "ping"));
}

void anthropic_stream_fail(struct anthropic_stream *stream, int http, const char *message,
                           struct strbuf *out)
{
    if (stream->ended) return;
    stream->ended = true;
    write_event(out, anthropic_error(http, message, NULL));
}

static void write_start(const struct anthropic_reply *reply, struct strbuf *out)
{
    json_t *message =
        json_pack("{s:s,s:s,s:s,s:o,s:[],s:n,s:n,s:o}", "id", reply->id, "type", "message", "role",
                  "assistant", "model", openai_text(reply->model_name, strlen(reply->model_name)),
                  "content", "stop_reason", "stop_sequence", "usage", usage_json(reply));
    write_event(out, json_pack("{s:s,s:o}", "type", "message_start", "message", message));
    anthropic_stream_ping(out);
}

static void write_delta(struct anthropic_stream *s, const char *type, const char *key, json_t *text,
                        struct strbuf *out)
{
    write_event(out, json_pack("{s:s,s:I,s:{s:s,s:o}}", "type", "content_block_delta", "index",
                               (json_int_t)s->n_blocks - 1, "delta", "type", type, key, text));
}

static void close_block(struct anthropic_stream *s, struct strbuf *out)
{
    if (s->block == ANTHROPIC_BLOCK_NONE) return;
    if (s->block == ANTHROPIC_BLOCK_THINKING)
        write_delta(s, "signature_delta", "signature", json_string(""), out);
    write_event(out, json_pack("{s:s,s:I}", "type", "content_block_stop", "index",
                               (json_int_t)s->n_blocks - 1));
    s->block = ANTHROPIC_BLOCK_NONE;
}

static void open_block(struct anthropic_stream *s, enum anthropic_block block, json_t *start,
                       struct strbuf *out)
{
    close_block(s, out);
    s->block = block;
    write_event(out, json_pack("{s:s,s:I,s:o}", "type", "content_block_start", "index",
                               (json_int_t)s->n_blocks++, "content_block", start));
}

/* Deltas [first, end), which are of one kind. */
static void write_run(struct anthropic_stream *s, const struct openai_answer *a, size_t first,
                      size_t end, struct strbuf *out)
{
    const struct openai_delta *d = &a->deltas[first];
    size_t size = 0;
    for (size_t i = first; i < end; i++) size += a->deltas[i].size;
    if (d->type == TOOL_CONTENT) {
        if (s->block != ANTHROPIC_BLOCK_TEXT)
            open_block(s, ANTHROPIC_BLOCK_TEXT, json_pack("{s:s,s:s}", "type", "text", "text", ""),
                       out);
        write_delta(s, "text_delta", "text", text_json(&a->content, d->begin, size), out);
    } else if (d->type == TOOL_REASONING) {
        if (s->block != ANTHROPIC_BLOCK_THINKING)
            open_block(
                s, ANTHROPIC_BLOCK_THINKING,
                json_pack("{s:s,s:s,s:s}", "type", "thinking", "thinking", "", "signature", ""),
                out);
        write_delta(s, "thinking_delta", "thinking", text_json(&a->reasoning, d->begin, size), out);
    } else if (d->type == TOOL_CALL_BEGIN) {
        const struct openai_call *call = &a->calls[d->call];
        open_block(s, ANTHROPIC_BLOCK_TOOL_USE,
                   json_pack("{s:s,s:o,s:s,s:{}}", "type", "tool_use", "id", tool_id(call), "name",
                             call->name, "input"),
                   out);
    } else {
        write_delta(s, "input_json_delta", "partial_json",
                    text_json(&a->calls[d->call].arguments, d->begin, size), out);
    }
}

static void write_end(struct anthropic_stream *s, const struct anthropic_reply *reply,
                      struct strbuf *out)
{
    const struct openai_answer *a = reply->answer;
    const char *reason = anthropic_stop_reason(reply);
    if (!reason && a->finish == LINNET_FINISH_ERROR) {
        int http = openai_http_status(a->error.status);
        anthropic_stream_fail(s, http, a->error.message, out);
    } else if (!reason && reply->why) {
        int http = openai_http_status(reply->why->status);
        anthropic_stream_fail(s, reply->why->status == LINNET_CANCELLED ? OVERLOADED : http,
                              reply->why->message, out);
    } else if (!reason) {
        anthropic_stream_fail(s, OVERLOADED,
                              "the answer was cancelled, as when the server stops: ask again later",
                              out);
    }
    if (s->ended) return;
    close_block(s, out);
    write_event(out, json_pack("{s:s,s:{s:s,s:o},s:o}", "type", "message_delta", "delta",
                               "stop_reason", reason, "stop_sequence", stop_sequence(reply),
                               "usage", usage_json(reply)));
    write_event(out, json_pack("{s:s}", "type", "message_stop"));
    s->ended = true;
}

bool anthropic_stream_write(struct anthropic_stream *stream, const struct anthropic_reply *reply,
                            size_t most, struct strbuf *out)
{
    const struct openai_answer *a = reply->answer;
    if (stream->ended) return true;
    if (!stream->begun) write_start(reply, out);
    stream->begun = true;
    while (stream->sent < a->n_deltas) {
        size_t end = openai_delta_join(a, stream->sent);
        if (out->size >= most) return false;
        if (end - stream->sent > most) end = stream->sent + most;
        write_run(stream, a, stream->sent, end, out);
        stream->sent = end;
    }
    if (a->finish != LINNET_FINISH_NONE) write_end(stream, reply, out);
    return true;
}
