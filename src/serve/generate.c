/* generate.c - a request goes to the engine, its answers come back. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/clock.h"
#include "base/memory.h"
#include "serve/server_internal.h"

/* ---- what the engine says, on its thread ---------------------------------------------------- */

/* A prompt is no longer waiting for its first step. */
static void leave_queue(struct submission *sub)
{
    struct server *s = sub->exchange->server;
    if (sub->begun) return;
    sub->begun = true;
    pthread_mutex_lock(&s->mutex);
    s->n_queued -= sub->exchange->request.request.n;
    s->queued_tokens -= sub->queue_tokens;
    pthread_mutex_unlock(&s->mutex);
}

static void leave_engine(struct submission *sub)
{
    struct server *s = sub->exchange->server;
    pthread_mutex_lock(&s->mutex);
    s->n_live -= sub->exchange->request.request.n;
    s->live_tokens -= sub->live_tokens;
    pthread_mutex_unlock(&s->mutex);
}

static void measure_token(struct exchange *x, size_t choice, double now)
{
    struct metrics *m = &x->server->metrics;
    double last = x->last_token[choice];
    x->last_token[choice] = now;
    if (last > 0) {
        metrics_observe(m, INTER_TOKEN_LATENCY, now - last);
    } else if (x->first_token <= 0) {
        x->first_token = now;
        metrics_observe(m, TIME_TO_FIRST_TOKEN, now - x->arrived);
    }
}

static void measure_choice(struct exchange *x, const linnet_event *e, double now)
{
    struct server *s = x->server;
    struct metrics *m = &s->metrics;
    const linnet_timings *t = &e->timings;
    metrics_count_finish(m, e->finish);
    if (e->finish != LINNET_FINISH_STOP && e->finish != LINNET_FINISH_LENGTH) return;
    metrics_observe(m, E2E_REQUEST_LATENCY, now - x->arrived);
    metrics_observe(m, REQUEST_QUEUE_TIME, t->queued_s);
    metrics_observe(m, REQUEST_INFERENCE_TIME, t->prefill_s + t->decode_s);
    metrics_observe(m, REQUEST_PREFILL_TIME, t->prefill_s);
    metrics_observe(m, REQUEST_DECODE_TIME, t->decode_s);
    metrics_observe(m, REQUEST_PROMPT_TOKENS, e->prompt_tokens);
    metrics_observe(m, REQUEST_GENERATION_TOKENS, e->completion_tokens);
    if (e->completion_tokens > 1)
        metrics_observe(m, TIME_PER_OUTPUT_TOKEN, t->decode_s / (e->completion_tokens - 1));
    pthread_mutex_lock(&s->mutex);
    s->mean_answer += (e->completion_tokens - s->mean_answer) / 16;
    pthread_mutex_unlock(&s->mutex);
}

/* An answer may fail by itself (its logits are damaged); with these the engine has stopped. */
static bool ends_engine(linnet_status status)
{
    return status == LINNET_DEVICE || status == LINNET_MEMORY || status == LINNET_INTERNAL;
}

void generate_give_way(struct exchange *x)
{
    pthread_mutex_lock(&x->mutex);
    bool first = !x->crowded;
    x->crowded = true;
    if (first) x->too_large = account_is_too_large(x);
    bool others = !x->too_large;
    pthread_mutex_unlock(&x->mutex);
    if (others) atomic_store(&x->server->crowded_at, clock_seconds());
    exchange_cancel(x, false);
}

void generate_cancelled(struct exchange *x, linnet_error *why)
{
    pthread_mutex_lock(&x->mutex);
    bool crowded = x->crowded, too_large = x->too_large;
    pthread_mutex_unlock(&x->mutex);
    if (too_large) { /* as often as it is asked for */
        error_set(
            why, LINNET_INVALID,
            "the answer takes more than the %lld MiB of memory that there are for all: %slower "
            "max_tokens, or n or top_logprobs",
            (long long)x->server->options.max_memory >> 20,
            x->request.stream ? "" : "ask for a stream, or ");
        return;
    }
    error_set(why, LINNET_CANCELLED, "%s",
              crowded ? "requests and replies take too much memory at once: ask again later"
                      : "the server is shutting down: ask again later");
}

static void on_event(void *user, const linnet_event *e)
{
    struct submission *sub = user;
    struct exchange *x = sub->exchange;
    double now = clock_seconds();
    bool finished = e->type == LINNET_EVENT_FINISHED;
    leave_queue(sub);
    if (finished) measure_choice(x, e, now); /* before its reply can go out */
    pthread_mutex_lock(&x->mutex);
    size_t choice = sub->index * (size_t)x->request.request.n + (size_t)e->choice;
    openai_answer_add(&x->answers[choice], e);
    account_add(x, &x->reply_held, account_event(x, e));
    if (e->type == LINNET_EVENT_TOKEN) measure_token(x, choice, now);
    if (finished) {
        x->n_finished++;
        x->preemptions += e->preemptions;
        sub->n_left--;
    }
    bool last = sub->n_left == 0;
    bool all = x->n_finished == x->n_answers && x->submitted, gone = x->gone;
    bool stream = x->request.stream;
    /* with one answer, its first call may be its end: nobody hears the rest */
    bool closed = !finished && x->n_answers == 1 && openai_answer_is_closed(x->answers);
    pthread_mutex_unlock(&x->mutex);
    if (closed) exchange_cancel(x, false);
    if (!finished && account_is_greedy(x)) generate_give_way(x);
    if (e->error && ends_engine(e->error->status)) atomic_store(&x->server->failed, true);
    if (!gone && stream && e->type != LINNET_EVENT_PROMPT) exchange_wake(x);
    if (!gone && !stream && finished && all) exchange_work(x);
    if (!last) return;
    leave_engine(sub);
    exchange_release(x);
}

/* ---- admission ----------------------------------------------------------------------------- */

/* Seconds until about one request's place is free, at the speed measured so far. */
static int retry_after(struct server *s)
{
    linnet_stats stats;
    linnet_engine_get_stats(atomic_load(&s->engine), &stats);
    pthread_mutex_lock(&s->mutex);
    double each = s->n_live > 0 ? (double)s->live_tokens / s->n_live : 0;
    pthread_mutex_unlock(&s->mutex);
    double done = (double)(stats.prompt_tokens - stats.cached_tokens + stats.generated_tokens);
    if (done <= 0 || stats.step_seconds <= 0) return 1;
    return (int)fmin(120, fmax(1, ceil(each * stats.step_seconds / done)));
}

/* Takes the places of all prompts in the queue, or none. */
static bool enter_queue(struct exchange *x)
{
    struct server *s = x->server;
    const struct openai_request *r = &x->request;
    int64_t queue = 0, live = 0;
    for (size_t i = 0; i < r->n_prompts; i++) {
        struct submission *sub = &x->submissions[i];
        int64_t n_prompt = (int64_t)r->prompts[i].n, room = s->plan.max_model_len - n_prompt;
        int64_t most =
            r->request.max_tokens && r->request.max_tokens < room ? r->request.max_tokens : room;
        sub->queue_tokens = r->request.n * (n_prompt + most);
        queue += sub->queue_tokens;
    }
    int32_t n = (int32_t)r->n_prompts * r->request.n;
    pthread_mutex_lock(&s->mutex);
    bool crowded =
        s->n_queued + n > s->options.max_queue_requests && s->n_live >= s->plan.max_num_seqs;
    bool heavy = s->n_queued > 0 && s->queued_tokens + queue > s->options.max_queue_tokens;
    if (!crowded && !heavy) {
        for (size_t i = 0; i < r->n_prompts; i++) {
            struct submission *sub = &x->submissions[i];
            double answer = r->request.max_tokens ? fmin(s->mean_answer, r->request.max_tokens)
                                                  : s->mean_answer;
            sub->live_tokens = (int64_t)r->prompts[i].n + r->request.n * (int64_t)answer;
            live += sub->live_tokens;
        }
        s->n_queued += n;
        s->n_live += n;
        s->queued_tokens += queue;
        s->live_tokens += live;
    }
    pthread_mutex_unlock(&s->mutex);
    return !crowded && !heavy;
}

/* ---- submission, by a worker ---------------------------------------------------------------- */

static linnet_status submit(struct exchange *x, size_t i, linnet_error *err)
{
    struct server *s = x->server;
    struct submission *sub = &x->submissions[i];
    linnet_request request = x->request.request;
    linnet_engine *engine = atomic_load(&s->engine);
    uint64_t id = 0;
    request.prompt = x->request.prompts[i].ids;
    request.n_prompt = x->request.prompts[i].n;
    request.on_event = on_event;
    request.user = sub;
    if (x->request.debug && !request.sampling.has_seed &&
        getrandom(&sub->seed, sizeof sub->seed, 0) == sizeof sub->seed) {
        sub->seed >>= 1; /* what a request can say */
        request.sampling.has_seed = true;
        request.sampling.seed = sub->seed;
    }
    exchange_hold(x);
    linnet_status status = linnet_engine_submit(engine, &request, &id, err);
    if (status) {
        leave_queue(sub);
        leave_engine(sub);
        exchange_release(x);
        return status;
    }
    pthread_mutex_lock(&x->mutex);
    sub->id = id;
    bool cancelled = x->cancelled;
    pthread_mutex_unlock(&x->mutex);
    if (cancelled) linnet_engine_cancel(engine, id);
    return LINNET_OK;
}

static void submit_all(struct exchange *x)
{
    linnet_error err;
    bool stream = x->request.stream;
    size_t n = x->request.n_prompts;
    for (size_t i = 0; i < n; i++) {
        linnet_status status = submit(x, i, &err);
        if (!status) continue;
        for (size_t k = i + 1; k < n; k++) {
            leave_queue(&x->submissions[k]);
            leave_engine(&x->submissions[k]);
        }
        exchange_cancel(x, false);
        if (status == LINNET_DEVICE) atomic_store(&x->server->failed, true);
        reply_status(x, &err);
        return;
    }
    atomic_store(&x->stage, stream ? STAGE_STREAM : STAGE_WAITING);
    pthread_mutex_lock(&x->mutex);
    x->submitted = true;
    bool all = x->n_finished == x->n_answers;
    pthread_mutex_unlock(&x->mutex);
    if (all && !stream) exchange_work(x); /* a long reply waits for its turn */
}

/* Places for the answers; from here on the connection thread may look at them. */
static bool prepare(struct exchange *x, struct openai_request *request)
{
    size_t n_answers = request->n_prompts * (size_t)request->request.n;
    struct openai_answer *answers = mem_new(n_answers, sizeof *answers);
    struct submission *submissions = mem_new(request->n_prompts, sizeof *submissions);
    x->cursors = mem_new(n_answers, sizeof *x->cursors);
    x->last_token = mem_new(n_answers, sizeof *x->last_token);
    for (size_t i = 0; submissions && i < request->n_prompts; i++)
        submissions[i] =
            (struct submission){.exchange = x, .index = i, .n_left = request->request.n};
    pthread_mutex_lock(&x->mutex);
    x->request = *request;
    for (size_t i = 0; answers && i < n_answers; i++) openai_answer_start(&answers[i], &x->request);
    x->answers = answers;
    x->submissions = submissions;
    x->n_answers = answers ? n_answers : 0;
    pthread_mutex_unlock(&x->mutex);
    if (x->route->messages)
        anthropic_make_id(x->id);
    else
        openai_make_id(request->endpoint, x->id);
    x->created = time(NULL);
    return answers && submissions && x->cursors && x->last_token;
}

static bool fits(struct exchange *x)
{
    int32_t context = x->server->plan.max_model_len;
    for (size_t i = 0; i < x->request.n_prompts; i++) {
        size_t n = x->request.prompts[i].n;
        if (n < (size_t)context) continue;
        struct openai_fault fault = {0};
        error_set(&fault.error, LINNET_TOO_LONG,
                  "this model's maximum context length is %d tokens and the prompt has %zu, which "
                  "leaves none for the answer: shorten it",
                  context, n);
        snprintf(fault.field, sizeof fault.field, "%s",
                 x->request.endpoint == OPENAI_CHAT ? "messages" : "prompt");
        reply_fault(x, &fault);
        return false;
    }
    return true;
}

/* What is known beforehand of a request's memory, and of its reply's if that is not a stream. */
static bool fits_memory(struct exchange *x)
{
    size_t limit = (size_t)x->server->options.max_memory, known = account_request(x);
    known += x->request.stream ? account_debug(x) /* it comes at the end, as a whole */
                               : account_reply(x);
    if (known > limit) {
        struct openai_fault fault = {0};
        error_set(&fault.error, LINNET_INVALID,
                  "the reply takes %zu MiB of memory and the limit is %zu: ask for a stream, lower "
                  "n, or leave out echo, return_token_ids and debug",
                  known >> 20, limit >> 20);
        snprintf(fault.field, sizeof fault.field, "%s", account_reason(x));
        reply_fault(x, &fault);
        return false;
    }
    if (account_take(x, &x->reply_held, known)) return true;
    reply_crowded(x);
    return false;
}

/* Whether the request's model is one of the served; else says so. */
static bool is_served(struct exchange *x, const struct openai_request *request)
{
    if (!request->model || route_serves(x->server, request->model)) return true;
    reply_error(x, 404, "not_found_error", "model_not_found",
                "there is no model '%.200s' here: GET /v1/models lists those there are",
                request->model);
    return false;
}

static void generate(struct exchange *x, enum openai_endpoint endpoint, json_t *body)
{
    struct openai_request request;
    struct openai_fault fault;
    if (!body) return;
    linnet_status status = openai_request_parse(x->server->model, endpoint, body, &request, &fault);
    json_decref(body);
    if (status) {
        openai_request_free(&request);
        reply_fault(x, &fault);
        return;
    }
    if (!is_served(x, &request)) {
        openai_request_free(&request);
        return;
    }
    if (!prepare(x, &request)) {
        reply_error(x, 503, "unavailable_error", NULL, "out of memory: the request's answers");
        return;
    }
    if (!fits(x) || !fits_memory(x)) return;
    if (!enter_queue(x)) {
        x->retry_after = retry_after(x->server);
        reply_error(x, 429, "rate_limit_error", "queue_full",
                    "too many requests are waiting: ask again in %d s", x->retry_after);
        return;
    }
    submit_all(x);
}

void generate_chat(struct exchange *x)
{
    generate(x, OPENAI_CHAT, route_body(x));
}

void generate_completions(struct exchange *x)
{
    generate(x, OPENAI_COMPLETIONS, route_body(x));
}

/* The body as that of a chat; NULL: the reply says why not. */
static json_t *chat_body(struct exchange *x, enum anthropic_endpoint endpoint)
{
    struct openai_fault fault = {0};
    json_t *body = route_body(x), *chat = NULL;
    if (!body) return NULL;
    if (anthropic_request(endpoint, body, &chat, &fault)) reply_fault(x, &fault);
    json_decref(body);
    return chat;
}

void generate_messages(struct exchange *x)
{
    generate(x, OPENAI_CHAT, chat_body(x, ANTHROPIC_MESSAGES));
}

void generate_count(struct exchange *x)
{
    struct openai_request request;
    struct openai_fault fault;
    json_t *chat = chat_body(x, ANTHROPIC_COUNT_TOKENS);
    if (!chat) return;
    if (openai_request_parse(x->server->model, OPENAI_CHAT, chat, &request, &fault))
        reply_fault(x, &fault);
    else if (is_served(x, &request))
        reply_json(x, 200, anthropic_count(&request));
    openai_request_free(&request);
    json_decref(chat);
}

/* ---- the whole answer ---------------------------------------------------------------------- */

static json_t *sampling_json(const struct exchange *x)
{
    const linnet_request *r = &x->request.request;
    const linnet_sampling *p = &r->sampling;
    int32_t room = x->server->plan.max_model_len - (int32_t)x->request.prompts[0].n;
    bool endless = r->max_tokens == 0 || r->max_tokens > room;
    json_t *seeds = json_array();
    for (size_t i = 0; i < x->request.n_prompts; i++)
        json_array_append_new(
            seeds, json_integer((json_int_t)(p->has_seed ? p->seed : x->submissions[i].seed)));
    return json_pack("{s:f,s:f,s:i,s:f,s:f,s:f,s:f,s:i,s:i,s:i,s:b,s:i,s:o}", "temperature",
                     (double)p->temperature, "top_p", (double)p->top_p, "top_k", p->top_k, "min_p",
                     (double)p->min_p, "repetition_penalty", (double)p->repetition_penalty,
                     "presence_penalty", (double)p->presence_penalty, "frequency_penalty",
                     (double)p->frequency_penalty, "n", r->n, "max_tokens",
                     endless ? room : r->max_tokens, "min_tokens", r->min_tokens, "ignore_eos",
                     (int)r->ignore_eos, "logit_bias", (int)p->n_logit_bias, "seeds", seeds);
}

static json_t *prompt_json(const struct exchange *x, size_t i)
{
    const struct openai_request *r = &x->request;
    const struct openai_prompt *prompt = &r->prompts[i];
    json_t *ids = json_array();
    char *text = NULL;
    size_t n = 0;
    for (size_t k = 0; k < prompt->n; k++) json_array_append_new(ids, json_integer(prompt->ids[k]));
    if (!r->rendered)
        linnet_detokenize(x->server->model, prompt->ids, prompt->n, 0, &text, &n, NULL);
    json_t *shown =
        r->rendered ? openai_text(r->rendered, r->rendered_size) : openai_text(text ? text : "", n);
    linnet_free(text);
    return json_pack("{s:o,s:o}", "text", shown, "token_ids", ids);
}

json_t *generate_debug(struct exchange *x)
{
    json_t *prompts = json_array(), *timings = json_array();
    for (size_t i = 0; i < x->request.n_prompts; i++)
        json_array_append_new(prompts, prompt_json(x, i));
    pthread_mutex_lock(&x->mutex);
    for (size_t i = 0; i < x->n_answers; i++) {
        const linnet_timings *t = &x->answers[i].timings;
        json_array_append_new(timings,
                              json_pack("{s:f,s:f,s:f}", "queued_s", t->queued_s, "prefill_s",
                                        t->prefill_s, "decode_s", t->decode_s));
    }
    int preemptions = x->preemptions;
    pthread_mutex_unlock(&x->mutex);
    return json_pack("{s:o,s:o,s:o,s:i}", "prompts", prompts, "sampling", sampling_json(x),
                     "timings", timings, "preemptions", preemptions);
}

/* The answers are in the reply: only what the log says of them is kept. */
static void drop_answers(struct exchange *x)
{
    pthread_mutex_lock(&x->mutex);
    for (size_t i = 0; i < x->n_answers; i++) {
        struct openai_answer *a = &x->answers[i], kept = {.prompt_tokens = a->prompt_tokens,
                                                          .cached_tokens = a->cached_tokens,
                                                          .completion_tokens = a->completion_tokens,
                                                          .finish = a->finish,
                                                          .timings = a->timings};
        openai_answer_free(a);
        *a = kept;
    }
    pthread_mutex_unlock(&x->mutex);
}

static void reply_openai(struct exchange *x, const char *model_name)
{
    struct openai_reply reply = {.id = x->id,
                                 .model_name = model_name,
                                 .created = x->created,
                                 .answers = x->answers,
                                 .n_answers = x->n_answers};
    json_t *json = openai_response(x->server->model, &x->request, &reply);
    if (json && x->request.debug) json_object_set_new(json, "debug", generate_debug(x));
    drop_answers(x);
    reply_json(x, 200, json);
}

static void reply_messages(struct exchange *x, const char *model_name)
{
    struct anthropic_reply reply = {x->id, model_name, &x->request, x->answers, NULL};
    strbuf_free(&x->reply);
    anthropic_message(&reply, &x->reply);
    drop_answers(x);
    reply_written(x, 200);
}

void generate_reply(struct exchange *x)
{
    for (size_t i = 0; i < x->n_answers; i++) {
        const struct openai_answer *a = &x->answers[i];
        linnet_error err = a->error;
        if (openai_answer_is_good(a)) continue;
        if (a->finish == LINNET_FINISH_CANCELLED) generate_cancelled(x, &err);
        drop_answers(x);
        reply_status(x, &err);
        return;
    }
    const char *model_name = x->request.model ? x->request.model : route_name(x->server);
    if (x->route->messages)
        reply_messages(x, model_name);
    else
        reply_openai(x, model_name);
}
