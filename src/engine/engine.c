/* engine.c - what goes into the loop and what comes out of it, its thread, its life. */
#include "engine/engine_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/threads.h"

static_assert((int)BLOCK_TOKENS == (int)KV_BLOCK, "the block manager and the cache agree");

/* ---- lists of requests ------------------------------------------------------------------- */

static void list_append(struct request_list *list, struct request *r)
{
    r->previous = list->last;
    r->next = NULL;
    *(list->last ? &list->last->next : &list->first) = r;
    list->last = r;
}

static void list_remove(struct request_list *list, struct request *r)
{
    *(r->previous ? &r->previous->next : &list->first) = r->next;
    *(r->next ? &r->next->previous : &list->last) = r->previous;
}

/* ---- events ------------------------------------------------------------------------------ */

/* Hands the figures out, for linnet_engine_get_stats. */
void engine_publish(linnet_engine *e)
{
    e->stats.n_running = scheduler_running(e->scheduler);
    e->stats.n_waiting = scheduler_waiting(e->scheduler);
    e->stats.n_blocks_free = block_free_count(e->blocks);
    e->stats.n_preemptions = scheduler_preemptions(e->scheduler);
    pthread_mutex_lock(&e->mutex);
    e->published = e->stats;
    e->last_turn = clock_seconds();
    pthread_mutex_unlock(&e->mutex);
}

void engine_emit(struct choice *c, linnet_event *event)
{
    const struct sequence *q = &c->sequence;
    event->request = c->request->id;
    event->choice = c->index;
    event->prompt_tokens = q->n_prompt;
    event->prompt_done = c->prompt_done;
    event->cached_tokens = q->n_cached;
    event->completion_tokens = q->n_known - q->n_prompt;
    c->request->on_event(c->request->user, event);
}

static linnet_timings timings(const struct choice *c)
{
    double now = clock_seconds(), submitted = c->request->submitted;
    if (!c->started) return (linnet_timings){.queued_s = now - submitted};
    double prefilled = c->first_token ? c->first_token : now;
    return (linnet_timings){.queued_s = c->started - submitted,
                            .prefill_s = prefilled - c->started,
                            .decode_s = now - prefilled};
}

/* The last event of a choice. Its blocks are free before it is told. */
void engine_finish(linnet_engine *e, struct choice *c, linnet_finish why, const linnet_error *error)
{
    if (c->sequence.state == SEQUENCE_FINISHED) return;
    scheduler_remove(e->scheduler, &c->sequence);
    c->request->n_active--;
    engine_publish(e);
    linnet_event event = {.type = LINNET_EVENT_FINISHED,
                          .text = "",
                          .finish = why,
                          .error = error,
                          .timings = timings(c),
                          .preemptions = c->sequence.n_preemptions};
    if (c->stopped)
        event.stop = (int32_t)detokenizer_stop(c->detokenizer);
    else if (c->detokenizer)
        detokenizer_finish(c->detokenizer, &event.text, &event.text_size);
    engine_emit(c, &event);
}

/* Forgets the requests that have nothing left to say and nothing under way. */
void engine_reap(linnet_engine *e)
{
    for (struct request *r = e->requests.first, *next; r; r = next) {
        next = r->next;
        if (r->n_active > 0 || r->n_pending > 0) continue;
        pthread_mutex_lock(&e->mutex);
        list_remove(&e->requests, r);
        pthread_mutex_unlock(&e->mutex);
        request_free(r);
    }
}

/* ---- what comes in ----------------------------------------------------------------------- */

/* Under the mutex. */
static void empty_inbox(linnet_engine *e)
{
    for (struct request *r = e->inbox.first, *next; r; r = next) {
        next = r->next;
        list_append(&e->requests, r);
    }
    e->inbox = (struct request_list){NULL, NULL};
    e->n_inbox = 0;
}

void engine_receive(linnet_engine *e)
{
    struct request *cancelled = NULL;
    pthread_mutex_lock(&e->mutex);
    struct request *added = e->inbox.first;
    empty_inbox(e);
    for (struct request *r = e->cancel_pending ? e->requests.first : NULL; r; r = r->next) {
        if (!r->cancelled) continue;
        r->next_cancelled = cancelled;
        cancelled = r;
    }
    e->cancel_pending = false;
    pthread_mutex_unlock(&e->mutex);

    for (; added; added = added->next)
        for (int32_t i = 0; i < added->n_choices; i++)
            scheduler_add(e->scheduler, &added->choices[i].sequence);
    for (struct request *r = cancelled; r; r = r->next_cancelled)
        for (int32_t i = 0; i < r->n_choices; i++)
            engine_finish(e, &r->choices[i], LINNET_FINISH_CANCELLED, NULL);
}

/* Ends every request and takes no more; `error` says why to those who still try. */
void engine_close(linnet_engine *e, linnet_finish why, const linnet_error *error)
{
    engine_drop_steps(e);
    pthread_mutex_lock(&e->mutex);
    if (!e->closed.status) e->closed = *error;
    empty_inbox(e);
    pthread_mutex_unlock(&e->mutex);
    for (struct request *r = e->requests.first; r; r = r->next)
        for (int32_t i = 0; i < r->n_choices; i++)
            engine_finish(e, &r->choices[i], why, why == LINNET_FINISH_ERROR ? error : NULL);
    engine_reap(e);
    engine_publish(e);
}

/* ---- the thread -------------------------------------------------------------------------- */

/* Sleeps while there is nothing to do. False: stop. */
static bool wait_for_work(linnet_engine *e)
{
    pthread_mutex_lock(&e->mutex);
    e->idle = true;
    while (!e->stopping && !e->inbox.first && !e->requests.first)
        pthread_cond_wait(&e->wake, &e->mutex);
    e->idle = false;
    e->last_turn = clock_seconds();
    bool go_on = !e->stopping;
    pthread_mutex_unlock(&e->mutex);
    return go_on;
}

static void shut_down(linnet_engine *e)
{
    linnet_error err;
    error_set(&err, LINNET_CANCELLED, "the engine is shutting down");
    engine_close(e, LINNET_FINISH_CANCELLED, &err);
}

static void *engine_main(void *arg)
{
    linnet_engine *e = arg;
    while (wait_for_work(e)) engine_turn(e);
    shut_down(e);
    return NULL;
}

linnet_status engine_start_thread(linnet_engine *e, linnet_error *err)
{
    e->has_thread = thread_start(&e->thread, engine_main, e) == 0;
    return e->has_thread
               ? LINNET_OK
               : error_set(err, LINNET_MEMORY, "the system gives no thread to the engine");
}

/* ---- life -------------------------------------------------------------------------------- */

size_t step_numbers(const struct limits *limits)
{
    size_t max_tokens = (size_t)limits->max_tokens, max_seqs = (size_t)limits->max_seqs;
    return 4 * max_tokens + 3 * max_seqs + 1 + max_seqs * (size_t)blocks_for(limits->max_context);
}

static linnet_status reserve_step(linnet_engine *e, linnet_error *err)
{
    const struct limits *limits = &e->config.limits;
    size_t max_tokens = (size_t)limits->max_tokens, max_seqs = (size_t)limits->max_seqs;
    size_t max_blocks = (size_t)blocks_for(limits->max_context);
    size_t count = step_numbers(limits);
    e->numbers = mem_new(count, sizeof *e->numbers);
    if (!e->numbers) return error_memory(err, "the step", count * sizeof *e->numbers);
    struct step_arrays *a = &e->arrays;
    a->token_ids = e->numbers;
    a->positions = a->token_ids + max_tokens;
    a->slot_mapping = a->positions + max_tokens;
    a->rope_lens = a->slot_mapping + max_tokens;
    a->query_start = a->rope_lens + max_tokens;
    a->context_lens = a->query_start + max_seqs + 1;
    a->logit_rows = a->context_lens + max_seqs;
    a->block_tables = a->logit_rows + max_seqs;
    e->step = (struct step){.max_blocks = (int32_t)max_blocks,
                            .token_ids = a->token_ids,
                            .positions = a->positions,
                            .slot_mapping = a->slot_mapping,
                            .query_start = a->query_start,
                            .context_lens = a->context_lens,
                            .block_tables = a->block_tables,
                            .logit_rows = a->logit_rows,
                            .rope_lens = e->config.dynamic_rope_context ? a->rope_lens : NULL};
    return LINNET_OK;
}

/* What a device that chooses tokens needs besides. */
static linnet_status reserve_rules(linnet_engine *e, linnet_error *err)
{
    size_t max_seqs = (size_t)e->config.limits.max_seqs;
    e->rules = mem_new(max_seqs, sizeof *e->rules);
    return e->rules ? LINNET_OK
                    : error_memory(err, "the rules of a step", max_seqs * sizeof *e->rules);
}

linnet_status engine_open(const struct engine_config *config, linnet_engine **out,
                          linnet_error *err)
{
    linnet_engine *e = mem_new(1, sizeof *e);
    if (!e) {
        if (config->runner.close) config->runner.close(config->runner.self);
        return error_memory(err, "the engine", sizeof *e);
    }
    e->config = *config;
    e->idle = true;
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->wake, NULL);
    struct block_manager_options blocks = {.n_blocks = config->limits.n_blocks,
                                           .prefix_caching = config->prefix_caching,
                                           .hash_seed = config->hash_seed};
    linnet_status status = block_manager_create(&blocks, &e->blocks, err);
    if (!status)
        status = scheduler_create(e->blocks, config->limits.max_seqs, config->limits.max_tokens,
                                  &e->scheduler, err);
    if (!status) status = sampler_create(config->n_vocab, &e->sampler, err);
    if (!status) status = reserve_step(e, err);
    if (!status && config->runner.submit) status = reserve_rules(e, err);
    if (status) {
        linnet_engine_destroy(e);
        return status;
    }
    e->stats.n_blocks = config->limits.n_blocks;
    engine_publish(e);
    *out = e;
    return LINNET_OK;
}

void linnet_engine_destroy(linnet_engine *e)
{
    if (!e) return;
    if (e->has_thread) {
        pthread_mutex_lock(&e->mutex);
        e->stopping = true;
        pthread_cond_signal(&e->wake);
        pthread_mutex_unlock(&e->mutex);
        pthread_join(e->thread, NULL);
    } else if (e->sampler) {
        shut_down(e);
    }
    if (e->config.runner.close) e->config.runner.close(e->config.runner.self);
    if (e->sampler) sampler_destroy(e->sampler);
    scheduler_destroy(e->scheduler);
    if (e->blocks) block_manager_destroy(e->blocks);
    pthread_cond_destroy(&e->wake);
    pthread_mutex_destroy(&e->mutex);
    free(e->numbers);
    free(e->rules);
    free(e);
}

/* ---- from other threads ------------------------------------------------------------------ */

linnet_status linnet_engine_submit(linnet_engine *e, const linnet_request *request, uint64_t *id,
                                   linnet_error *err)
{
    struct request *r;
    linnet_status status = request_create(&e->config, request, &r, err);
    if (status) return status;
    pthread_mutex_lock(&e->mutex);
    status = e->closed.status;
    if (status) {
        error_set(err, status, "%s", e->closed.message);
    } else {
        r->id = ++e->last_id;
        if (id) *id = r->id; /* before the first event can come */
        list_append(&e->inbox, r);
        e->n_inbox += r->n_choices;
        pthread_cond_signal(&e->wake);
    }
    pthread_mutex_unlock(&e->mutex);
    if (status) request_free(r);
    return status;
}

void linnet_engine_cancel(linnet_engine *e, uint64_t id)
{
    pthread_mutex_lock(&e->mutex);
    struct request *lists[] = {e->inbox.first, e->requests.first};
    for (int i = 0; i < 2; i++)
        for (struct request *r = lists[i]; r; r = r->next)
            if (r->id == id) r->cancelled = e->cancel_pending = true;
    pthread_mutex_unlock(&e->mutex);
}

void linnet_engine_get_stats(linnet_engine *e, linnet_stats *stats)
{
    pthread_mutex_lock(&e->mutex);
    *stats = e->published;
    stats->n_waiting += e->n_inbox;
    stats->last_step_age_s = e->idle ? 0 : clock_seconds() - e->last_turn;
    pthread_mutex_unlock(&e->mutex);
}
