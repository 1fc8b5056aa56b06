/* exchange.c - one request and its reply, and who still needs it. */
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "base/clock.h"
#include "base/memory.h"
#include "serve/server_internal.h"

struct exchange *exchange_new(struct server *s, struct MHD_Connection *connection)
{
    struct exchange *x = mem_new(1, sizeof *x);
    if (!x) return NULL;
    x->server = s;
    x->connection = connection;
    x->arrived = clock_seconds();
    x->content_type = "application/json";
    x->method = "?";
    x->socket = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    atomic_init(&x->n_holders, 1);
    pthread_mutex_init(&x->mutex, NULL);
    x->next = s->exchanges;
    if (x->next) x->next->previous = x;
    s->exchanges = x;
    return x;
}

void exchange_hold(struct exchange *x)
{
    atomic_fetch_add(&x->n_holders, 1);
}

void exchange_release(struct exchange *x)
{
    if (atomic_fetch_sub(&x->n_holders, 1) > 1) return;
    for (size_t i = 0; x->answers && i < x->n_answers; i++) openai_answer_free(&x->answers[i]);
    free(x->answers);
    free(x->cursors);
    free(x->last_token);
    free(x->submissions);
    openai_request_free(&x->request);
    exchange_free_body(x); /* only now: it may have been waiting to be read */
    strbuf_free(&x->reply);
    strbuf_free(&x->out);
    account_set(x, &x->reply_held, 0);
    account_set(x, &x->out_held, 0);
    pthread_mutex_destroy(&x->mutex);
    free(x);
}

void exchange_end(struct exchange *x)
{
    struct server *s = x->server;
    if (x->watched) epoll_ctl(s->epoll_fd, EPOLL_CTL_DEL, x->socket, NULL);
    metrics_count_status(&s->metrics, x->outcome);
    log_request(x);
    exchange_cancel(x, true);
    x->connection = NULL;
    if (x->previous)
        x->previous->next = x->next;
    else
        s->exchanges = x->next;
    if (x->next) x->next->previous = x->previous;
    if (x->counted && atomic_fetch_sub(&s->n_working, 1) == 1) {
        pthread_mutex_lock(&s->mutex);
        pthread_cond_broadcast(&s->idle);
        pthread_mutex_unlock(&s->mutex);
    }
    exchange_release(x);
}

void exchange_free_body(struct exchange *x)
{
    strbuf_free(&x->body);
    account_set(x, &x->body_held, 0);
}

void exchange_cancel(struct exchange *x, bool gone)
{
    linnet_engine *engine = atomic_load(&x->server->engine);
    pthread_mutex_lock(&x->mutex);
    if (gone) x->gone = true;
    x->cancelled = true;
    size_t n = x->submissions && x->n_finished < x->n_answers ? x->request.n_prompts : 0;
    for (size_t i = 0; i < n; i++)
        if (x->submissions[i].id && x->submissions[i].n_left > 0)
            linnet_engine_cancel(engine, x->submissions[i].id);
    pthread_mutex_unlock(&x->mutex);
}

bool exchange_is_gone(struct exchange *x)
{
    pthread_mutex_lock(&x->mutex);
    bool gone = x->gone;
    pthread_mutex_unlock(&x->mutex);
    return gone;
}

void exchange_watch(struct exchange *x)
{
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLONESHOT, .data = {.ptr = x}};
    if (x->watched) return;
    x->watched = epoll_ctl(x->server->epoll_fd, EPOLL_CTL_ADD, x->socket, &event) == 0;
}

/* ---- replies ------------------------------------------------------------------------------- */

static int write_bytes(const char *bytes, size_t n, void *reply)
{
    strbuf_append(reply, bytes, n);
    return 0;
}

void reply_json(struct exchange *x, int status, json_t *json)
{
    static const char instead[] =
        "{\"error\":{\"message\":\"out of memory\",\"type\":\"server_error\",\"param\":null,"
        "\"code\":null}}";
    strbuf_free(&x->reply);
    bool good = json && json_dump_callback(json, write_bytes, &x->reply, JSON_COMPACT) == 0 &&
                !x->reply.failed;
    json_decref(json);
    if (!good) {
        strbuf_free(&x->reply);
        strbuf_text(&x->reply, instead);
    }
    x->status = good ? status : 500;
    atomic_store(&x->stage, STAGE_REPLY);
}

void reply_written(struct exchange *x, int status)
{
    if (x->reply.failed) {
        reply_json(x, 500, NULL);
        return;
    }
    x->status = status;
    atomic_store(&x->stage, STAGE_REPLY);
}

/* The error in the form that the route's clients know. */
static void reply_message(struct exchange *x, int status, const char *message, json_t *openai)
{
    if (!x->route || !x->route->messages) {
        reply_json(x, status, openai);
        return;
    }
    json_decref(openai);
    reply_json(x, anthropic_http_status(status), anthropic_error(status, message, x->request_id));
}

void reply_error(struct exchange *x, int status, const char *type, const char *code,
                 const char *format, ...)
{
    linnet_error err; /* for its care with control characters */
    char text[LINNET_ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    error_set(&err, LINNET_INVALID, "%s", text);
    reply_message(x, status, err.message,
                  json_pack("{s:{s:o,s:s,s:n,s:s?}}", "error", "message",
                            openai_text(err.message, strlen(err.message)), "type", type, "param",
                            "code", code));
}

void reply_fault(struct exchange *x, const struct openai_fault *fault)
{
    int status = openai_http_status(fault->error.status);
    if (status == 503) x->retry_after = 1;
    reply_message(x, status, fault->error.message, openai_error(fault));
}

void reply_status(struct exchange *x, const linnet_error *err)
{
    struct openai_fault fault = {.error = *err};
    if (err->status == LINNET_CANCELLED) {
        x->retry_after = 5;
        reply_error(x, 503, "unavailable_error", NULL, "%s", err->message);
        return;
    }
    reply_fault(x, &fault);
}

void reply_stopping(struct exchange *x)
{
    x->retry_after = 5;
    reply_error(x, 503, "unavailable_error", NULL, "the server is shutting down: ask again later");
}

void reply_crowded(struct exchange *x)
{
    atomic_store(&x->server->crowded_at, clock_seconds());
    x->retry_after = 1;
    reply_error(x, 503, "unavailable_error", NULL,
                "requests and replies take too much memory at once: ask again in a second");
}
