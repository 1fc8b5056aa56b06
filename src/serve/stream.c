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

/* What is new in an answer, as an answer of its own. Under the mutex. */
static bool take_fresh(struct exchange *x, size_t i, struct openai_answer *fresh)
{
    const struct openai_answer *a = &x->answers[i];
    struct cursor *c = &x->cursors[i];
    size_t n_tokens = a->n_tokens - c->tokens, n_text = a->text.size - c->text;
    *fresh = (struct openai_answer){.has_logprobs = a->has_logprobs,
                                    .n_tokens = n_tokens,
                                    .finish = a->finish,
                                    .error = a->error};
    strbuf_append(&fresh->text, strbuf_cstr(&a->text) + c->text, n_text);
    size_t first = n_tokens ? a->tokens[c->tokens].first_top : a->n_top;
    fresh->n_top = a->n_top - first;
    fresh->tokens = mem_new(n_tokens, sizeof *fresh->tokens);
    fresh->top = mem_new(fresh->n_top, sizeof *fresh->top);
    if (!fresh->tokens || !fresh->top || fresh->text.failed) return false;
    if (n_tokens) memcpy(fresh->tokens, a->tokens + c->tokens, n_tokens * sizeof *fresh->tokens);
    if (fresh->n_top) memcpy(fresh->top, a->top + first, fresh->n_top * sizeof *fresh->top);
    for (size_t k = 0; k < n_tokens; k++) fresh->tokens[k].first_top -= first;
    c->tokens = a->n_tokens;
    c->text = a->text.size;
    return true;
}

/* {"index", "delta" or "text", "logprobs", "finish_reason"}; takes over the first two JSONs. */
static json_t *choice_json(const struct exchange *x, size_t i, json_t *body, json_t *logprobs,
                           const char *finish)
{
    bool chat = x->request.endpoint == OPENAI_CHAT;
    return json_pack("{s:I,s:o,s:o,s:s?}", "index", (json_int_t)i, chat ? "delta" : "text", body,
                     "logprobs", logprobs, "finish_reason", finish);
}

static json_t *content_json(const struct exchange *x, const struct strbuf *text)
{
    json_t *content = openai_text(strbuf_cstr(text), text->size);
    return x->request.endpoint == OPENAI_CHAT ? json_pack("{s:o}", "content", content) : content;
}

static void write_role(struct exchange *x, size_t i)
{
    write_chunk(x, choice_json(x, i, json_pack("{s:s,s:s}", "role", "assistant", "content", ""),
                               json_null(), NULL));
}

static void write_fresh(struct exchange *x, size_t i, const struct openai_answer *fresh)
{
    const struct openai_request *r = &x->request;
    json_t *logprobs = openai_logprobs(x->server->model, r->endpoint, fresh);
    json_t *choice = choice_json(x, i, content_json(x, &fresh->text), logprobs, NULL);
    if (r->return_token_ids) {
        json_t *ids = json_array();
        for (size_t k = 0; k < fresh->n_tokens; k++)
            json_array_append_new(ids, json_integer(fresh->tokens[k].id));
        json_object_set_new(choice, "token_ids", ids);
    }
    write_chunk(x, choice);
}

static void write_finish(struct exchange *x, size_t i, linnet_finish finish)
{
    json_t *nothing = x->request.endpoint == OPENAI_CHAT ? json_object() : json_string("");
    write_chunk(x, choice_json(x, i, nothing, json_null(), linnet_finish_name(finish)));
}

/* False: the answer has failed, and the stream with it. */
static bool write_choice(struct exchange *x, size_t i, const struct openai_answer *fresh)
{
    const struct openai_request *r = &x->request;
    struct cursor *c = &x->cursors[i];
    bool tokens = fresh->n_tokens > 0 && (fresh->has_logprobs || r->return_token_ids);
    bool ended = fresh->finish != LINNET_FINISH_NONE;
    bool good = fresh->finish != LINNET_FINISH_ERROR && fresh->finish != LINNET_FINISH_CANCELLED;
    if (!c->begun && good && (fresh->n_tokens || ended)) {
        c->begun = true;
        if (r->endpoint == OPENAI_CHAT) write_role(x, i);
    }
    if (fresh->text.size || tokens) write_fresh(x, i, fresh);
    if (ended && good) write_finish(x, i, fresh->finish);
    c->finished = ended;
    return good;
}

/* ---- the end ------------------------------------------------------------------------------- */

static void write_failure(struct exchange *x, const struct openai_answer *failed)
{
    struct openai_fault fault = {.error = failed->error};
    if (failed->finish == LINNET_FINISH_CANCELLED)
        error_set(&fault.error, LINNET_CANCELLED, "the server is shutting down: ask again later");
    write_event(x, openai_error(&fault));
    strbuf_text(&x->out, "data: [DONE]\n\n");
    x->stream_ended = true;
    exchange_cancel(x, false);
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

/* Formats what has come. */
static void look(struct exchange *x)
{
    size_t n_finished = 0;
    for (size_t i = 0; i < x->n_answers && !x->stream_ended; i++) {
        struct openai_answer fresh;
        n_finished += x->cursors[i].finished;
        if (x->cursors[i].finished) continue;
        pthread_mutex_lock(&x->mutex);
        bool taken = take_fresh(x, i, &fresh);
        pthread_mutex_unlock(&x->mutex);
        if (!taken) x->out.failed = true;
        if (taken && !write_choice(x, i, &fresh)) write_failure(x, &fresh);
        n_finished += x->cursors[i].finished;
        openai_answer_free(&fresh);
    }
    if (!x->stream_ended && n_finished == x->n_answers) write_end(x);
}

ssize_t stream_read(void *user, uint64_t position, char *buffer, size_t size)
{
    struct exchange *x = user;
    (void)position;
    if (x->gone) return MHD_CONTENT_READER_END_WITH_ERROR;
    if (x->out_sent == x->out.size) {
        strbuf_clear(&x->out);
        x->out_sent = 0;
        if (x->stream_ended) return MHD_CONTENT_READER_END_OF_STREAM;
        look(x);
        if (x->out.failed) return MHD_CONTENT_READER_END_WITH_ERROR;
        if (x->out.size == 0 && x->ping_due) strbuf_text(&x->out, ": ping\n\n");
        x->ping_due = false;
    }
    size_t n = x->out.size - x->out_sent;
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
