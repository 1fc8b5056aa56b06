/*
 * engine_load.h - many random requests through a crowded engine, each compared with its run alone.
 * It uses the public interface only, so that it runs on any model; `turn` lets a test that has the
 * inside at hand step the engine itself and look at it between steps.
 */
#ifndef LINNET_TESTS_ENGINE_LOAD_H
#define LINNET_TESTS_ENGINE_LOAD_H

#include "support.h"

#include <pthread.h>
#include <unistd.h>

#include "base/random.h"
#include "base/strbuf.h"

/* What came of one choice. */
struct answer {
    int32_t *tokens;
    float *logprobs; /* chosen, then the first of the top */
    int32_t n_tokens, capacity;
    struct strbuf text;
    linnet_finish finish; /* NONE until the last event */
    int32_t stop;
    linnet_error error;
    int32_t prompt_done, cached_tokens, preemptions;
    linnet_timings timings;
    const char *fault; /* an event that should not have come */
};

/* A request, its answers, and when to cancel it. */
struct job {
    linnet_request request;
    linnet_engine *engine;
    uint64_t id;
    int32_t cancel_after; /* tokens of any choice; -1: never */
    int32_t n_seen, n_finished;
    pthread_mutex_t mutex; /* guards n_finished for who waits */
    pthread_cond_t done;
    struct answer answers[128];
};

static inline void job_event(void *user, const linnet_event *event)
{
    struct job *job = user;
    struct answer *a = &job->answers[event->choice];
    bool token = event->type == LINNET_EVENT_TOKEN;
    if (a->finish) a->fault = "an event after the last";
    if (event->completion_tokens != a->n_tokens + token) a->fault = "completion_tokens";
    if (event->prompt_done < a->prompt_done) a->fault = "prompt_done went back";
    if (event->type == LINNET_EVENT_PROMPT && event->prompt_done == a->prompt_done)
        a->fault = "a PROMPT event without progress";
    if (token && event->prompt_done != event->prompt_tokens) a->fault = "a token before the prompt";
    a->prompt_done = event->prompt_done;
    a->cached_tokens = event->cached_tokens;
    if (event->text_size) strbuf_append(&a->text, event->text, event->text_size);
    if (token) {
        if (a->n_tokens == a->capacity) {
            a->capacity = a->capacity * 2 + 16;
            a->tokens = realloc(a->tokens, (size_t)a->capacity * sizeof *a->tokens);
            a->logprobs = realloc(a->logprobs, (size_t)a->capacity * 2 * sizeof *a->logprobs);
        }
        a->tokens[a->n_tokens] = event->token;
        a->logprobs[2 * a->n_tokens] = event->has_logprobs ? event->logprob : 0;
        a->logprobs[2 * a->n_tokens + 1] = event->n_top ? event->top[0].logprob : 0;
        a->n_tokens++;
        if (++job->n_seen == job->cancel_after) linnet_engine_cancel(job->engine, event->request);
    }
    if (event->type != LINNET_EVENT_FINISHED) return;
    if (!event->finish) a->fault = "FINISHED without a reason";
    a->finish = event->finish;
    a->stop = event->stop;
    a->timings = event->timings;
    a->preemptions = event->preemptions;
    if (event->error) a->error = *event->error;
    pthread_mutex_lock(&job->mutex);
    job->n_finished++;
    pthread_cond_broadcast(&job->done);
    pthread_mutex_unlock(&job->mutex);
}

static inline linnet_sampling greedy(void)
{
    return (linnet_sampling){.top_p = 1, .repetition_penalty = 1, .has_seed = true};
}

static inline struct job *job_new(const int32_t *prompt, int32_t n_prompt, int32_t max_tokens)
{
    struct job *job = calloc(1, sizeof *job);
    job->request = (linnet_request){.prompt = prompt,
                                    .n_prompt = (size_t)n_prompt,
                                    .sampling = greedy(),
                                    .n = 1,
                                    .max_tokens = max_tokens,
                                    .on_event = job_event,
                                    .user = job};
    job->cancel_after = -1;
    pthread_mutex_init(&job->mutex, NULL);
    pthread_cond_init(&job->done, NULL);
    return job;
}

/* Ready for another run of the same request. */
static inline void job_reset(struct job *job)
{
    for (int i = 0; i < 128; i++) {
        free(job->answers[i].tokens);
        free(job->answers[i].logprobs);
        strbuf_free(&job->answers[i].text);
        job->answers[i] = (struct answer){0};
    }
    job->n_seen = job->n_finished = 0;
}

static inline void job_free(struct job *job)
{
    job_reset(job);
    pthread_mutex_destroy(&job->mutex);
    pthread_cond_destroy(&job->done);
    free(job);
}

static inline void job_submit(struct job *job, linnet_engine *engine)
{
    linnet_error err;
    job->engine = engine;
    assert_ok(linnet_engine_submit(engine, &job->request, &job->id, &err), err);
    if (job->cancel_after == 0) linnet_engine_cancel(engine, job->id);
}

static inline bool job_done(struct job *job)
{
    pthread_mutex_lock(&job->mutex);
    bool done = job->n_finished == job->request.n;
    pthread_mutex_unlock(&job->mutex);
    return done;
}

/* For an engine with a thread of its own. */
static inline void job_wait(struct job *job)
{
    pthread_mutex_lock(&job->mutex);
    while (job->n_finished < job->request.n) pthread_cond_wait(&job->done, &job->mutex);
    pthread_mutex_unlock(&job->mutex);
}

/* The crowded run of a job equals its run alone, as far as it got before it was cancelled. */
static inline void assert_same_answers(const struct job *crowded, const struct job *alone,
                                       int number)
{
    for (int32_t i = 0; i < crowded->request.n; i++) {
        const struct answer *a = &crowded->answers[i], *b = &alone->answers[i];
        if (a->fault) fail_msg("request %d, choice %d: %s", number, i, a->fault);
        if (b->fault) fail_msg("request %d, choice %d, alone: %s", number, i, b->fault);
        bool cancelled = a->finish == LINNET_FINISH_CANCELLED;
        size_t n = (size_t)a->n_tokens;
        if (cancelled ? a->n_tokens > b->n_tokens : a->n_tokens != b->n_tokens)
            fail_msg("request %d, choice %d: %d tokens, alone %d", number, i, a->n_tokens,
                     b->n_tokens);
        for (size_t t = 0; t < n; t++)
            if (a->tokens[t] != b->tokens[t])
                fail_msg("request %d, choice %d: token %zu is %d, alone %d (%d preemptions)",
                         number, i, t, a->tokens[t], b->tokens[t], a->preemptions);
        if (n) assert_memory_equal(a->logprobs, b->logprobs, 2 * n * sizeof *a->logprobs);
        if (cancelled) continue;
        assert_int_equal(a->finish, b->finish);
        assert_string_equal(strbuf_cstr(&a->text), strbuf_cstr(&b->text));
    }
}

struct load {
    linnet_engine *crowded, *alone;
    /* One step of an engine without a thread, true while it has work; NULL: both have threads. */
    bool (*turn)(linnet_engine *engine);
    bool at_once; /* without `turn`: nobody waits between two requests */
    int32_t n_requests;
    uint64_t seed;
    int32_t n_vocab;      /* ids for prompts */
    int32_t max_prompt;   /* tokens */
    int32_t max_tokens;   /* of an answer */
    uint64_t plain;       /* > 0: one request in so many has penalties or log-probabilities */
    bool stop_strings;    /* the model has a tokenizer */
    const char *stops[2]; /* to choose from */
};

static inline uint64_t draw(const struct load *l, uint64_t *counter, uint64_t n)
{
    return random_u64(l->seed, (*counter)++, 77) % n;
}

/* Half of the prompts start with one of four common prefixes, so that blocks are shared. */
static inline void random_prompt(const struct load *l, uint64_t *counter, int32_t *prompt,
                                 int32_t n)
{
    uint64_t prefix = draw(l, counter, 8);
    int32_t common = prefix < 4 ? (int32_t)draw(l, counter, (uint64_t)n + 1) : 0;
    for (int32_t i = 0; i < n; i++)
        prompt[i] = i < common
                        ? (int32_t)(random_u64(prefix, (uint64_t)i, 1) % (uint64_t)l->n_vocab)
                        : (int32_t)draw(l, counter, (uint64_t)l->n_vocab);
}

static inline struct job *random_job(const struct load *l, uint64_t *counter)
{
    int32_t n_prompt = 1 + (int32_t)draw(l, counter, (uint64_t)l->max_prompt);
    int32_t *prompt = calloc((size_t)n_prompt, sizeof *prompt);
    random_prompt(l, counter, prompt, n_prompt);
    struct job *job =
        job_new(prompt, n_prompt, 1 + (int32_t)draw(l, counter, (uint64_t)l->max_tokens));
    linnet_request *r = &job->request;
    if (draw(l, counter, 4) == 0) r->n = 2 + (int32_t)draw(l, counter, 4);
    if (draw(l, counter, 4) == 0) r->ignore_eos = true;
    if (draw(l, counter, 4) == 0) r->priority = (int32_t)draw(l, counter, 3) - 1;
    if (draw(l, counter, 5) == 0)
        r->min_tokens = (int32_t)draw(l, counter, (uint64_t)r->max_tokens + 1);
    if (draw(l, counter, 3)) {
        r->sampling.temperature = 0.2f + (float)draw(l, counter, 100) / 50;
        r->sampling.seed = draw(l, counter, UINT64_MAX);
        if (draw(l, counter, 3) == 0) r->sampling.top_k = 1 + (int32_t)draw(l, counter, 20);
        if (draw(l, counter, 3) == 0) r->sampling.top_p = 0.5f + (float)draw(l, counter, 50) / 100;
        if (draw(l, counter, 3) == 0) r->sampling.min_p = (float)draw(l, counter, 20) / 100;
    }
    if (draw(l, counter, 3) == 0) r->sampling.repetition_penalty = 1.3f;
    if (draw(l, counter, 4) == 0) r->sampling.presence_penalty = 0.5f;
    if (draw(l, counter, 4) == 0) r->sampling.frequency_penalty = 0.25f;
    if (draw(l, counter, 2) == 0) {
        r->want_logprobs = true;
        r->logprobs = (int32_t)draw(l, counter, 5);
    }
    if (l->plain && draw(l, counter, l->plain)) {
        r->sampling.repetition_penalty = 1;
        r->sampling.presence_penalty = r->sampling.frequency_penalty = 0;
        r->want_logprobs = false;
    }
    if (draw(l, counter, 4) == 0) {
        r->stop_ids = prompt; /* any id will do */
        r->n_stop_ids = 1;
    }
    if (l->stop_strings && draw(l, counter, 3) == 0) {
        r->stop = l->stops;
        r->n_stop = 2;
        r->include_stop = draw(l, counter, 2);
    }
    if (draw(l, counter, 5) == 0) job->cancel_after = (int32_t)draw(l, counter, 12);
    return job;
}

/* Hands in a few requests between any two steps, or all as fast as may be. */
static inline void run_crowded(const struct load *l, struct job **jobs, uint64_t *counter)
{
    for (int32_t next = 0; next < l->n_requests;) {
        for (uint64_t n = draw(l, counter, 4); n > 0 && next < l->n_requests; n--)
            job_submit(jobs[next++], l->crowded);
        if (l->turn)
            l->turn(l->crowded);
        else if (!l->at_once)
            usleep((useconds_t)draw(l, counter, 500));
    }
    while (l->turn && l->turn(l->crowded)) continue;
    for (int32_t i = 0; i < l->n_requests && !l->turn; i++) job_wait(jobs[i]);
}

/*
 * Runs the load; the caller looks at how often the crowded engine had to preempt. Both engines must
 * be fresh.
 */
static inline void load_test(const struct load *l)
{
    uint64_t counter = 0;
    struct job **jobs = calloc((size_t)l->n_requests, sizeof *jobs);
    for (int32_t i = 0; i < l->n_requests; i++) jobs[i] = random_job(l, &counter);
    run_crowded(l, jobs, &counter);

    int64_t generated = 0, cached = 0, preemptions = 0;
    for (int32_t i = 0; i < l->n_requests; i++) {
        assert_true(job_done(jobs[i]));
        for (int32_t c = 0; c < jobs[i]->request.n; c++) {
            generated += jobs[i]->answers[c].n_tokens;
            cached += jobs[i]->answers[c].cached_tokens;
            preemptions += jobs[i]->answers[c].preemptions;
        }
    }
    linnet_stats stats;
    linnet_engine_get_stats(l->crowded, &stats);
    assert_int_equal(stats.n_blocks_free, stats.n_blocks);
    assert_int_equal(stats.n_running + stats.n_waiting, 0);
    assert_int_equal(stats.generated_tokens, generated);
    assert_int_equal(stats.cached_tokens, cached);
    assert_int_equal(stats.n_preemptions, preemptions);

    for (int32_t i = 0; i < l->n_requests; i++) {
        struct job *alone = job_new(jobs[i]->request.prompt, (int32_t)jobs[i]->request.n_prompt, 0);
        alone->request = jobs[i]->request;
        alone->request.user = alone;
        job_submit(alone, l->alone);
        while (l->turn && l->turn(l->alone)) continue;
        job_wait(alone);
        assert_same_answers(jobs[i], alone, i);
        job_free(alone);
    }
    for (int32_t i = 0; i < l->n_requests; i++) {
        free((void *)jobs[i]->request.prompt);
        job_free(jobs[i]);
    }
    free(jobs);
}

#endif
