/* openai_answer.c - an answer as it grows, and as the parts of messages and chunks. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/memory.h"
#include "serve/openai.h"

static void make_id(const char *prefix, char id[OPENAI_ID_SIZE])
{
    unsigned char bytes[12];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) {
        double now = clock_seconds();
        memset(bytes, 0, sizeof bytes);
        memcpy(bytes, &now, sizeof now);
    }
    int n = snprintf(id, OPENAI_ID_SIZE, "%s", prefix);
    for (size_t i = 0; i < sizeof bytes; i++) n += snprintf(id + n, 3, "%02x", bytes[i]);
}

void openai_make_id(enum openai_endpoint endpoint, char id[OPENAI_ID_SIZE])
{
    make_id(endpoint == OPENAI_CHAT ? "chatcmpl-" : "cmpl-", id);
}

/* ---- growing ------------------------------------------------------------------------------- */

static void add_token(struct openai_answer *a, const linnet_event *event)
{
    if (!mem_reserve((void **)&a->tokens, &a->token_capacity, a->n_tokens + 1, sizeof *a->tokens) ||
        !mem_reserve((void **)&a->top, &a->top_capacity, a->n_top + event->n_top, sizeof *a->top)) {
        a->failed = true;
        return;
    }
    a->tokens[a->n_tokens++] =
        (struct openai_token){event->token, event->has_logprobs ? event->logprob : 0, a->n_top,
                              event->n_top, a->text.size};
    if (event->n_top) memcpy(a->top + a->n_top, event->top, event->n_top * sizeof *a->top);
    a->n_top += event->n_top;
    a->has_logprobs |= event->has_logprobs;
}

static void add_call(struct openai_answer *a, const char *name)
{
    if (!mem_reserve((void **)&a->calls, &a->call_capacity, a->n_calls + 1, sizeof *a->calls)) {
        a->failed = true;
        return;
    }
    struct openai_call *call = &a->calls[a->n_calls++];
    *call = (struct openai_call){0};
    make_id("call_", call->id);
    snprintf(call->name, sizeof call->name, "%s", name);
}

static void add_delta(struct openai_answer *a, const struct tool_event *event, struct strbuf *to)
{
    struct openai_delta delta = {event->type, event->index, to ? to->size : 0, event->size};
    if (!mem_reserve((void **)&a->deltas, &a->delta_capacity, a->n_deltas + 1, sizeof *a->deltas)) {
        a->failed = true;
        return;
    }
    a->deltas[a->n_deltas++] = delta;
    if (!to) return;
    strbuf_append(to, event->text, event->size);
    a->failed |= to->failed;
}

static void on_part(void *user, const struct tool_event *event)
{
    struct openai_answer *a = user;
    if (event->type == TOOL_CALL_BEGIN) add_call(a, event->name);
    if (a->failed) return;
    switch (event->type) {
    case TOOL_CONTENT: add_delta(a, event, &a->content); break;
    case TOOL_REASONING: add_delta(a, event, &a->reasoning); break;
    case TOOL_CALL_BEGIN: add_delta(a, event, NULL); break;
    case TOOL_CALL_ARGUMENTS: add_delta(a, event, &a->calls[event->index].arguments); break;
    case TOOL_CALL_END: a->calls[event->index].complete = true; break;
    case TOOL_CALL_ABANDONED: break;
    }
}

void openai_answer_start(struct openai_answer *answer, const struct openai_request *request)
{
    const char *const *names = (const char *const *)request->tools;
    struct tool_options options = {.names = request->chosen_tool ? &request->chosen_tool : names,
                                   .n_names = request->chosen_tool ? 1 : request->n_tools,
                                   .in_reasoning = request->in_reasoning,
                                   .one_call = request->one_call};
    if (request->endpoint != OPENAI_CHAT) return;
    answer->is_parsed = true;
    tool_parser_init(&answer->parser, &options);
    if (!request->answer_prefix) return;
    tool_parser_feed(&answer->parser, request->answer_prefix, strlen(request->answer_prefix),
                     on_part, answer);
}

static void parse(struct openai_answer *a, const linnet_event *event)
{
    struct tool_parser *parser = &a->parser;
    if (event->text_size) tool_parser_feed(parser, event->text, event->text_size, on_part, a);
    if (event->type == LINNET_EVENT_FINISHED) tool_parser_finish(parser, on_part, a);
    if (event->type == LINNET_EVENT_TOKEN && parser->state == TOOL_IN_REASONING)
        a->reasoning_tokens++;
    a->failed |= tool_parser_failed(parser);
}

void openai_answer_add(struct openai_answer *answer, const linnet_event *event)
{
    answer->prompt_tokens = event->prompt_tokens;
    answer->cached_tokens = event->cached_tokens;
    answer->completion_tokens = event->completion_tokens;
    if (event->type == LINNET_EVENT_PROMPT) return;
    if (event->type == LINNET_EVENT_TOKEN) add_token(answer, event);
    if (event->text_size) strbuf_append(&answer->text, event->text, event->text_size);
    if (answer->is_parsed) parse(answer, event);
    if (event->type != LINNET_EVENT_FINISHED) return;
    answer->finish = event->finish;
    answer->stop = event->stop;
    answer->timings = event->timings;
    if (event->error) answer->error = *event->error;
    if (!answer->failed && !answer->text.failed) return;
    answer->failed = true;
    answer->finish = LINNET_FINISH_ERROR;
    error_memory(&answer->error, "the answer's text", answer->text.size);
}

void openai_answer_free(struct openai_answer *answer)
{
    for (size_t i = 0; i < answer->n_calls; i++) strbuf_free(&answer->calls[i].arguments);
    tool_parser_free(&answer->parser);
    strbuf_free(&answer->text);
    strbuf_free(&answer->content);
    strbuf_free(&answer->reasoning);
    free(answer->calls);
    free(answer->deltas);
    free(answer->tokens);
    free(answer->top);
    *answer = (struct openai_answer){0};
}

bool openai_answer_is_closed(const struct openai_answer *answer)
{
    return answer->is_parsed && answer->parser.state == TOOL_CLOSED;
}

bool openai_answer_is_good(const struct openai_answer *answer)
{
    return answer->finish != LINNET_FINISH_ERROR &&
           (answer->finish != LINNET_FINISH_CANCELLED || openai_answer_is_closed(answer));
}

const char *openai_finish_reason(const struct openai_answer *answer)
{
    linnet_finish finish = answer->finish;
    bool called = answer->is_parsed && answer->parser.n_complete > 0;
    if (called && finish != LINNET_FINISH_ERROR &&
        (finish == LINNET_FINISH_STOP || openai_answer_is_closed(answer)))
        return "tool_calls";
    return linnet_finish_name(finish);
}

/* ---- messages ------------------------------------------------------------------------------ */

static json_t *text_of(const struct strbuf *b)
{
    return openai_text(strbuf_cstr(b), b->size);
}

static json_t *calls_json(const struct openai_answer *a)
{
    json_t *calls = json_array();
    for (size_t i = 0; i < a->n_calls; i++) {
        const struct openai_call *call = &a->calls[i];
        if (!call->complete) continue;
        json_array_append_new(calls, json_pack("{s:s,s:s,s:{s:s,s:o}}", "id", call->id, "type",
                                               "function", "function", "name", call->name,
                                               "arguments", text_of(&call->arguments)));
    }
    return calls;
}

json_t *openai_message(const struct openai_answer *answer)
{
    const struct strbuf *content = answer->is_parsed ? &answer->content : &answer->text;
    bool other = answer->reasoning.size || answer->parser.n_complete;
    json_t *message =
        json_pack("{s:s,s:o,s:n}", "role", "assistant", "content",
                  content->size == 0 && other ? json_null() : text_of(content), "refusal");
    if (answer->reasoning.size)
        json_object_set_new(message, "reasoning_content", text_of(&answer->reasoning));
    if (answer->parser.n_complete) json_object_set_new(message, "tool_calls", calls_json(answer));
    return message;
}

/* ---- chunks -------------------------------------------------------------------------------- */

size_t openai_delta_join(const struct openai_answer *answer, size_t first)
{
    const struct openai_delta *d = answer->deltas;
    size_t end = first + 1;
    if (d[first].type == TOOL_CALL_BEGIN) return end;
    while (end < answer->n_deltas && d[end].type == d[first].type && d[end].call == d[first].call)
        end++;
    return end;
}

static json_t *call_chunk(const struct openai_answer *a, const struct openai_delta *delta,
                          json_t *text)
{
    const struct openai_call *call = &a->calls[delta->call];
    json_int_t index = (json_int_t)delta->call;
    if (delta->type == TOOL_CALL_ARGUMENTS)
        return json_pack("{s:[{s:I,s:{s:o}}]}", "tool_calls", "index", index, "function",
                         "arguments", text);
    return json_pack("{s:[{s:I,s:s,s:s,s:{s:s,s:o}}]}", "tool_calls", "index", index, "id",
                     call->id, "type", "function", "function", "name", call->name, "arguments",
                     text);
}

json_t *openai_delta(const struct openai_answer *answer, size_t first, size_t end)
{
    const struct openai_delta *d = &answer->deltas[first];
    const struct strbuf *from = d->type == TOOL_CONTENT     ? &answer->content
                                : d->type == TOOL_REASONING ? &answer->reasoning
                                                            : &answer->calls[d->call].arguments;
    size_t size = 0;
    for (size_t i = first; i < end; i++) size += answer->deltas[i].size;
    json_t *text = openai_text(strbuf_cstr(from) + d->begin, size);
    switch (d->type) {
    case TOOL_CONTENT: return json_pack("{s:o}", "content", text);
    case TOOL_REASONING: return json_pack("{s:o}", "reasoning_content", text);
    default: return call_chunk(answer, d, text);
    }
}
