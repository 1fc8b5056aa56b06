/* log.c - one line a request: what was asked for and how it went, never texts or keys. */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "serve/server_internal.h"

static void timestamp(char text[40])
{
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t n = strftime(text, 40, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(text + n, 40 - n, ".%03ldZ", now.tv_nsec / 1000000);
}

struct outcome {
    bool generates, gone;
    int32_t prompt, cached, completion;
    linnet_timings timings;
    const char *finish;
    int preemptions;
};

static struct outcome outcome_of(struct exchange *x)
{
    struct outcome o = {.finish = "none"};
    pthread_mutex_lock(&x->mutex);
    o.generates = x->n_answers > 0;
    o.gone = x->gone;
    size_t n = x->request.request.n > 0 ? (size_t)x->request.request.n : 1;
    for (size_t i = 0; x->answers && i < x->n_answers; i++) {
        const struct openai_answer *a = &x->answers[i];
        o.completion += a->completion_tokens;
        if (i % n == 0) {
            o.prompt += a->prompt_tokens;
            o.cached += a->cached_tokens;
        }
        if (i > 0) continue;
        o.timings = a->timings;
        o.finish = linnet_finish_name(a->finish);
    }
    o.preemptions = x->preemptions;
    pthread_mutex_unlock(&x->mutex);
    return o;
}

static void write_text(struct exchange *x, const char *when, const struct outcome *o, double total,
                       struct strbuf *out)
{
    strbuf_format(out, "%s %s %s %s %s %d", when, x->client, x->request_id, x->method, x->path,
                  x->outcome);
    if (o->generates)
        strbuf_format(out,
                      " prompt %d (%d cached) answer %d %s, queued %.3f prefill %.3f decode %.3f",
                      o->prompt, o->cached, o->completion, o->finish, o->timings.queued_s,
                      o->timings.prefill_s, o->timings.decode_s);
    if (o->preemptions) strbuf_format(out, " preempted %d", o->preemptions);
    strbuf_format(out, " total %.3f s%s", total, o->gone ? " client left" : "");
}

static void write_json(struct exchange *x, const char *when, const struct outcome *o, double total,
                       struct strbuf *out)
{
    json_t *json = json_pack("{s:s,s:s,s:s,s:s,s:s,s:i,s:f,s:b}", "time", when, "client", x->client,
                             "id", x->request_id, "method", x->method, "route", x->path, "status",
                             x->outcome, "total_s", total, "client_left", (int)o->gone);
    if (o->generates)
        json_object_update_new(json, json_pack("{s:i,s:i,s:i,s:s,s:f,s:f,s:f,s:i}", "prompt_tokens",
                                               o->prompt, "cached_tokens", o->cached,
                                               "completion_tokens", o->completion, "finish_reason",
                                               o->finish, "queued_s", o->timings.queued_s,
                                               "prefill_s", o->timings.prefill_s, "decode_s",
                                               o->timings.decode_s, "preemptions", o->preemptions));
    char *text = json_dumps(json, JSON_COMPACT | JSON_REAL_PRECISION(6));
    json_decref(json);
    if (text) strbuf_text(out, text);
    free(text);
}

void log_request(struct exchange *x)
{
    struct server *s = x->server;
    if (!s->options.log || s->options.log_format == SERVER_LOG_NONE) return;
    char when[40];
    struct strbuf line = {0};
    struct outcome o = outcome_of(x);
    double total = clock_seconds() - x->arrived;
    timestamp(when);
    if (s->options.log_format == SERVER_LOG_JSON)
        write_json(x, when, &o, total, &line);
    else
        write_text(x, when, &o, total, &line);
    if (!line.failed) s->options.log(s->options.log_user, strbuf_cstr(&line));
    strbuf_free(&line);
}

void log_note(struct server *s, const char *format, ...)
{
    char text[512], when[40];
    struct strbuf line = {0};
    va_list args;
    if (!s->options.log) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    timestamp(when);
    if (s->options.log_format == SERVER_LOG_JSON) {
        json_t *json =
            json_pack("{s:s,s:o}", "time", when, "note", openai_text(text, strlen(text)));
        char *dump = json_dumps(json, JSON_COMPACT);
        json_decref(json);
        if (dump) strbuf_text(&line, dump);
        free(dump);
    } else {
        strbuf_format(&line, "%s %s", when, text);
    }
    if (!line.failed) s->options.log(s->options.log_user, strbuf_cstr(&line));
    strbuf_free(&line);
}
