/*
 * stream.c - an answer as server-sent events. What came since the last look is copied under the
 * mutex and formatted outside of it; while the client takes nothing, nothing is formatted, and the
 * next event then carries all that has come.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "serve/server_internal.h"

static void write_event(struct exchange *x, json_t *json)
{
    char *text = json ? json_dumps(json, JSON_COMPACT) : NULL;
    json_decref(json);
    if (!text) x->out.failed = true;
    strbuf_text(&x->out, "data: ");
    if (text) strbuf_text(&x->out, text);
    strbuf_text(&x->out, "\n\n");
    free(text);
}

static struct openai_reply reply_of(struct exchange *x)
{
    return (struct openai_reply){.id = x->id,
                                 .model_name =
                                     x->request.model ? x->request.model : route_name(x->server),
                                 .created = x->created,
                                 .answers = x->answers,
                                 .n_answers = x->n_answers};
}

static void write_chunk(struct exchange *x, json_t *choice)
{
    struct openai_reply reply = reply_of(x);
    write_event(x, openai_chunk(&x->request, &reply, json_pack("[o]", choice), NULL));
}

/* ---- one choice ---------------------------------------------------------------------------- */

/* What is new in an answer: its text and tokens as an answer of their own, of a chat also the
 * deltas that the text has become. */
enum { LOOK_TOKENS = 256, LOOK_BYTES = 64 << 10 }; /* of a choice at a time; of all, about */
enum { LOOK_MESSAGES = 4 << 10 };

struct fresh {
    struct openai_answer answer;
    json_t *deltas; /* a list */
    const char *finish_reason;
    bool good; /* not failed, not cut off */
    bool more; /* waits */
};

static bool take_tokens(const struct openai_answer *a, struct cursor *c,
                        struct openai_answer *fresh)
{
    size_t n_tokens = a->n_tokens - c->tokens, text_end = a->text.size;
    if (n_tokens > LOOK_TOKENS) {
        n_tokens = LOOK_TOKENS;
        text_end = a->tokens[c->tokens + n_tokens].text_offset;
    }
    size_t n_text = text_end - c->text, last = c->tokens + n_tokens;
    *fresh = (struct openai_answer){.has_logprobs = a->has_logprobs,
                                    .n_tokens = n_tokens,
                                    .finish = a->finish,
                                    .error = a->error};
    strbuf_append(&fresh->text, strbuf_cstr(&a->text) + c->text, n_text);
    size_t first = n_tokens ? a->tokens[c->tokens].first_top : a->n_top;
    fresh->n_top = (last < a->n_tokens ? a->tokens[last].first_top : a->n_top) - first;
    fresh->tokens = mem_new(n_tokens, sizeof *fresh->tokens);
    fresh->top = mem_new(fresh->n_top, sizeof *fresh->top);
    if (!fresh->tokens || !fresh->top || fresh->text.failed) return false;
    if (n_tokens) memcpy(fresh->tokens, a->tokens + c->tokens, n_tokens * sizeof *fresh->tokens);
    if (fresh->n_top) memcpy(fresh->top, a->top + first, fresh->n_top * sizeof *fresh->top);
    for (size_t k = 0; k < n_tokens; k++) fresh->tokens[k].first_top -= first;
    c->tokens = last;
    c->text = text_end;
    return true;
}

/* Under the mutex. A long answer that waits comes in pieces: the others' turn is between them. */
static bool take_fresh(struct exchange *x, size_t i, struct fresh *fresh)
{
    const struct openai_answer *a = &x->answers[i];
    struct cursor *c = &x->cursors[i];
    *fresh = (struct fresh){.deltas = json_array(), .good = true};
    if (a->failed || !take_tokens(a, c, &fresh->answer)) return false;
    size_t stop = c->deltas + LOOK_TOKENS;
    while (c->deltas < a->n_deltas && c->deltas < stop) {
        size_t end = openai_delta_join(a, c->deltas);
        if (end > stop) end = stop;
        json_array_append_new(fresh->deltas, openai_delta(a, c->deltas, end));
        c->deltas = end;
    }
    fresh->more = c->tokens < a->n_tokens || c->deltas < a->n_deltas;
    if (a->finish == LINNET_FINISH_NONE || fresh->more) return true;
    fresh->finish_reason = openai_finish_reason(a);
    fresh->good = openai_answer_is_good(a);
    return true;
}

static void free_fresh(struct fresh *fresh)
{
    openai_answer_free(&fresh->answer);
    json_decref(fresh->deltas);
}

/* {"index", "delta" or "text", "logprobs", "finish_reason"}; takes over the first two JSONs. */
static json_t *choice_json(const struct exchange *x, size_t i, json_t *body, json_t *logprobs,
                           const char *finish)
{
    bool chat = x->request.endpoint == OPENAI_CHAT;
    return json_pack("{s:I,s:o,s:o,s:s?}", "index", (json_int_t)i, chat ? "delta" : "text", body,
                     "logprobs", logprobs, "finish_reason", finish);
}

static void write_role(struct exchange *x, size_t i)
{
    write_chunk(x, choice_json(x, i, json_pack("{s:s,s:s}", "role", "assistant", "content", ""),
                               json_null(), NULL));
}

/* A chunk with a piece of the answer; the first one carries what there is to say of its tokens. */
static void write_piece(struct exchange *x, size_t i, json_t *body,
                        const struct openai_answer *told)
{
    const struct openai_request *r = &x->request;
    json_t *logprobs = told ? openai_logprobs(x->server->model, r->endpoint, told) : json_null();
    json_t *choice = choice_json(x, i, body, logprobs, NULL);
    if (r->return_token_ids) {
        json_t *ids = json_array();
        for (size_t k = 0; told && k < told->n_tokens; k++)
            json_array_append_new(ids, json_integer(told->tokens[k].id));
        json_object_set_new(choice, "token_ids", ids);
    }
    write_chunk(x, choice);
}

static void write_fresh(struct exchange *x, size_t i, const struct fresh *fresh)
{
    const struct openai_answer *told = &fresh->answer;
    bool tokens = told->n_tokens > 0 && (told->has_logprobs || x->request.return_token_ids);
    if (x->request.endpoint != OPENAI_CHAT) {
        if (told->text.size || tokens)
            write_piece(x, i, openai_text(strbuf_cstr(&told->text), told->text.size), told);
        return;
    }
    size_t n = json_array_size(fresh->deltas);
    for (size_t k = 0; k < n; k++)
        write_piece(x, i, json_incref(json_array_get(fresh->deltas, k)), k == 0 ? told : NULL);
    if (n == 0 && tokens) write_piece(x, i, json_object(), told);
}

static void write_finish(struct exchange *x, size_t i, const char *reason)
{
    json_t *nothing = x->request.endpoint == OPENAI_CHAT ? json_object() : json_string("");
    write_chunk(x, choice_json(x, i, nothing, json_null(), reason));
}

/* An answer has failed, and the others with it: no more tokens are made, and the error comes when
 * all that were made have been told. */
static void fail(struct exchange *x, const struct openai_answer *failed)
{
    if (x->failure.status) return;
    x->failure = failed->error;
    if (failed->finish == LINNET_FINISH_CANCELLED) generate_cancelled(x, &x->failure);
    exchange_cancel(x, false);
}

static void write_choice(struct exchange *x, size_t i, const struct fresh *fresh)
{
    struct cursor *c = &x->cursors[i];
    bool ended = fresh->finish_reason != NULL;
    if (!c->begun && (fresh->answer.n_tokens || (ended && fresh->good))) {
        c->begun = true;
        if (x->request.endpoint == OPENAI_CHAT) write_role(x, i);
        if (x->request.echo) write_piece(x, i, openai_echo(&x->request, i), NULL);
    }
    if (c->begun) write_fresh(x, i, fresh);
    if (ended && fresh->good) write_finish(x, i, fresh->finish_reason);
    if (!fresh->good) fail(x, &fresh->answer);
    c->finished = ended;
    x->n_told += ended;
}

/* ---- the end ------------------------------------------------------------------------------- */

static void write_failure(struct exchange *x)
{
    struct openai_fault fault = {.error = x->failure};
    write_event(x, openai_error(&fault));
    strbuf_text(&x->out, "data: [DONE]\n\n");
    x->stream_ended = true;
}

static void write_end(struct exchange *x)
{
    struct openai_reply reply = reply_of(x);
    bool usage = x->request.include_usage;
    if (usage || x->request.debug) {
        json_t *sum =
            usage ? openai_usage(x->answers, x->n_answers, (size_t)x->request.request.n) : NULL;
        json_t *chunk = openai_chunk(&x->request, &reply, json_array(), sum);
        if (chunk && x->request.debug) json_object_set_new(chunk, "debug", generate_debug(x));
        write_event(x, chunk);
    }
    strbuf_text(&x->out, "data: [DONE]\n\n");
    x->stream_ended = true;
}

/* The same in the form of the Anthropic API, which has one answer. Written under the mutex, so not
 * too much at a time. */
static bool look_for_messages(struct exchange *x)
{
    struct anthropic_reply reply = {x->id,
                                    x->request.model ? x->request.model : route_name(x->server),
                                    &x->request, x->answers, NULL};
    linnet_error why;
    pthread_mutex_lock(&x->mutex);
    bool cancelled = x->answers->finish == LINNET_FINISH_CANCELLED;
    pthread_mutex_unlock(&x->mutex);
    if (cancelled) {
        generate_cancelled(x, &why);
        reply.why = &why;
    }
    pthread_mutex_lock(&x->mutex);
    bool all = anthropic_stream_write(&x->messages, &reply, LOOK_MESSAGES, &x->out);
    linnet_finish finish = x->answers->finish;
    pthread_mutex_unlock(&x->mutex);
    x->stream_ended = x->messages.ended;
    if (x->stream_ended && finish == LINNET_FINISH_NONE) exchange_cancel(x, false);
    return all || x->out.failed;
}

/* Formats what has come of a choice; false: more of it waits. */
static bool look_at_choice(struct exchange *x, size_t i)
{
    struct fresh fresh;
    if (x->cursors[i].finished) return true;
    pthread_mutex_lock(&x->mutex);
    bool taken = take_fresh(x, i, &fresh);
    pthread_mutex_unlock(&x->mutex);
    if (taken)
        write_choice(x, i, &fresh);
    else
        x->out.failed = true;
    free_fresh(&fresh);
    return !fresh.more;
}

/* Formats what has come, a piece of each choice in turn while there is room; false: more waits. */
static bool look(struct exchange *x)
{
    bool all = true;
    if (x->route->messages) return look_for_messages(x);
    for (size_t n = 0; n < x->n_answers && x->out.size < LOOK_BYTES; n++) {
        all &= look_at_choice(x, x->next_choice);
        x->next_choice = (x->next_choice + 1) % x->n_answers;
    }
    if (x->n_told < x->n_answers) return all || x->out.failed;
    if (x->failure.status)
        write_failure(x);
    else
        write_end(x);
    return true;
}

ssize_t stream_read(void *user, uint64_t position, char *buffer, size_t size)
{
    struct exchange *x = user;
    (void)position;
    if (x->gone) return MHD_CONTENT_READER_END_WITH_ERROR;
    if (x->out_sent == x->out.size) {
        strbuf_free(&x->out);
        x->out_sent = 0;
        if (x->stream_ended) return MHD_CONTENT_READER_END_OF_STREAM;
        while (!look(x) && x->out.size == 0) continue; /* what waits may have no text */
        if (x->out.failed) return MHD_CONTENT_READER_END_WITH_ERROR;
        if (x->out.size == 0 && x->ping_due) {
            if (x->route->messages)
                anthropic_stream_ping(&x->out);
            else
                strbuf_text(&x->out, ": ping\n\n");
        }
        x->ping_due = false;
        account_set(x, &x->out_held, x->out.capacity);
        if (account_is_greedy(x)) generate_give_way(x);
    }
    size_t n = x->out.size - x->out_sent;
    if (n == 0 && x->server->closing) return MHD_CONTENT_READER_END_WITH_ERROR;
    if (n == 0) { /* until the engine or the clock has something */
        x->suspended = true;
        MHD_suspend_connection(x->connection);
        return 0;
    }
    if (n > size) n = size;
    memcpy(buffer, x->out.data + x->out_sent, n);
    x->out_sent += n;
    x->last_sent = clock_seconds();
    return (ssize_t)n;
}
