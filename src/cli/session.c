#include "cli/session.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/threads.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/progress.h"

static linnet_status open_model(struct session *s, const char *path, linnet_error *err)
{
    const struct options *o = s->options;
    if (o->tokenizer) return linnet_model_open_tokenizer(o->tokenizer, &s->model, err);
    if (o->random)
        return linnet_model_random(o->random, o->dtype, (uint64_t)o->seed, &s->model, err);
    return linnet_model_open(path, &s->model, err);
}

/* Whoever asks for the device later hears what there is to say. */
static void *wake_device(void *options)
{
    linnet_device_info info;
    linnet_error err;
    linnet_device_find(((const struct options *)options)->device, &info, &err);
    return NULL;
}

linnet_status session_open(struct session *s, const struct options *options, bool positional,
                           linnet_error *err)
{
    *s = (struct session){.options = options};
    double begun = clock_seconds();
    const char *path = options->model;
    pthread_t waking;
    if (positional && options->arguments.n) path = options->arguments.items[0];
    /* a GPU wakes while the model is opened */
    bool wakes = options->command != COMMAND_TOKENIZE && options->command != COMMAND_PACK &&
                 thread_start(&waking, wake_device, (void *)(uintptr_t)options) == 0;
    linnet_status status = open_model(s, path, err);
    if (wakes) pthread_join(waking, NULL);
    if (status) return status;
    linnet_model_get_info(s->model, &s->info);
    s->load_s = clock_seconds() - begun;
    return LINNET_OK;
}

linnet_status session_start(struct session *s, const linnet_engine_options *engine,
                            linnet_error *err)
{
    linnet_engine_options options = *engine;
    double begun = clock_seconds();
    options.progress = progress_loading;
    progress_begin("loading", NULL);
    linnet_status status = linnet_engine_create(s->model, &options, &s->engine, err);
    progress_end();
    if (status) return status;
    linnet_engine_get_plan(s->engine, &s->plan);
    s->load_s += clock_seconds() - begun;
    if (s->plan.packed_reason && !s->options->quiet) output_note("%s", s->plan.packed_reason);
    if (!s->options->verbose) return LINNET_OK;
    struct strbuf device = {0};
    session_device(s->plan.device, s->plan.device_reason, &device);
    output_note("device: %s", strbuf_cstr(&device));
    output_note("%s: weights %s%s, cache %s for %lld tokens, loaded in %.2f s", s->info.name,
                output_bytes(s->plan.weights), s->plan.packed ? " (packed file)" : "",
                output_bytes(s->plan.kv_cache), (long long)s->plan.n_blocks * s->plan.block_tokens,
                s->load_s);
    strbuf_free(&device);
    return LINNET_OK;
}

void session_close(struct session *s)
{
    if (s->engine) linnet_engine_destroy(s->engine);
    if (s->model) linnet_model_close(s->model);
    s->engine = NULL;
    s->model = NULL;
}

linnet_engine_options session_engine_options(const struct options *o)
{
    return (linnet_engine_options){
        .device = o->device,
        .threads = (int32_t)o->threads,
        .max_model_len = (int32_t)o->max_model_len,
        .max_num_seqs = (int32_t)o->max_num_seqs,
        .max_num_batched_tokens = (int32_t)o->max_num_batched_tokens,
        .kv_cache_memory = o->kv_cache_memory,
        .no_prefix_caching = o->no_prefix_caching,
        .enforce_eager = o->enforce_eager,
        .numa = o->numa,
        .kv_cache_dtype = o->kv_cache_dtype,
    };
}

linnet_sampling session_sampling(const struct session *s)
{
    const struct options *o = s->options;
    const bool *given = o->given;
    linnet_sampling sampling = {0};
    linnet_sampling_defaults(s->model, &sampling);
    if (given[OPTION_TEMPERATURE]) sampling.temperature = (float)o->temperature;
    if (given[OPTION_TOP_P]) sampling.top_p = (float)o->top_p;
    if (given[OPTION_MIN_P]) sampling.min_p = (float)o->min_p;
    if (given[OPTION_TOP_K]) sampling.top_k = (int32_t)o->top_k;
    if (given[OPTION_REPETITION_PENALTY])
        sampling.repetition_penalty = (float)o->repetition_penalty;
    if (given[OPTION_PRESENCE_PENALTY]) sampling.presence_penalty = (float)o->presence_penalty;
    if (given[OPTION_FREQUENCY_PENALTY]) sampling.frequency_penalty = (float)o->frequency_penalty;
    sampling.has_seed = given[OPTION_SEED];
    sampling.seed = (uint64_t)o->seed;
    return sampling;
}

/* ---- plan ---------------------------------------------------------------------------------- */

json_t *session_plan_json(const linnet_plan *p)
{
    return json_pack("{s:s?,s:s?,s:s?,s:I,s:I,s:I,s:I,s:I,s:I,s:i,s:i,s:I,s:i,s:i,s:i,s:i}",
                     "device", p->device, "device_reason", p->device_reason, "kv_cache_dtype",
                     p->kv_cache_dtype, "scratch", (json_int_t)p->scratch, "weights",
                     (json_int_t)p->weights, "kv_cache", (json_int_t)p->kv_cache, "activations",
                     (json_int_t)p->activations, "total", (json_int_t)p->total, "available",
                     (json_int_t)p->available, "n_blocks", p->n_blocks, "block_tokens",
                     p->block_tokens, "kv_bytes_per_token", (json_int_t)p->kv_bytes_per_token,
                     "max_model_len", p->max_model_len, "max_num_seqs", p->max_num_seqs,
                     "max_num_batched_tokens", p->max_num_batched_tokens, "threads", p->threads);
}

void session_device(const char *device, const char *reason, struct strbuf *out)
{
    strbuf_text(out, device ? device : "?");
    if (reason) strbuf_format(out, "; no GPU: %s", reason);
}

bool session_print_plan(const linnet_plan *p, struct strbuf *out)
{
    strbuf_text(out, "device       ");
    session_device(p->device, p->device_reason, out);
    strbuf_format(out, "\nweights      %s\n", output_bytes(p->weights));
    strbuf_format(out, "KV cache     %s: %d blocks of %d tokens, %s a token, %s\n",
                  output_bytes(p->kv_cache), p->n_blocks, p->block_tokens,
                  output_bytes(p->kv_bytes_per_token), p->kv_cache_dtype);
    strbuf_format(out, "activations  %s\n", output_bytes(p->activations));
    if (p->scratch)
        strbuf_format(out, "scratch      %s: loading, recorded steps\n", output_bytes(p->scratch));
    strbuf_format(out, "total        %s of %s available\n", output_bytes(p->total),
                  output_bytes(p->available));
    strbuf_format(out, "limits       %d tokens a sequence, %d sequences and %d tokens a step\n",
                  p->max_model_len, p->max_num_seqs, p->max_num_batched_tokens);
    return !out->failed;
}

int session_dry_run(const struct session *s, const linnet_engine_options *engine)
{
    linnet_plan plan;
    linnet_error err;
    if (linnet_engine_plan(s->model, engine, &plan, &err)) return output_error(&err);
    if (s->options->json)
        return output_json(session_plan_json(&plan), JSON_INDENT(2)) ? EXIT_DONE : EXIT_FAILED;
    struct strbuf text = {0};
    session_print_plan(&plan, &text);
    return output_strbuf(&text) ? EXIT_DONE : EXIT_FAILED;
}

linnet_status session_chat_ids(const struct session *s, json_t *messages, const char *instead,
                               int32_t **ids, size_t *n, linnet_error *err)
{
    if (!s->info.has_chat_template)
        return error_set(err, LINNET_UNSUPPORTED, "%s has no chat template: %s", s->info.name,
                         instead);
    json_t *request = json_pack("{s:O}", "messages", messages);
    char *text = request ? json_dumps(request, JSON_COMPACT) : NULL;
    json_decref(request);
    if (!text) return error_set(err, LINNET_MEMORY, "out of memory: the messages as JSON");
    linnet_status status =
        linnet_chat_tokenize(s->model, text, strlen(text), NULL, NULL, ids, n, err);
    free(text);
    return status;
}

/* ---- one request --------------------------------------------------------------------------- */

static void on_event(void *user, const linnet_event *event)
{
    struct exchange *x = user;
    pthread_mutex_lock(&x->lock);
    openai_answer_add(&x->answers[event->choice], event);
    x->prompt_done = event->prompt_done;
    x->prompt_tokens = event->prompt_tokens;
    if (event->type == LINNET_EVENT_TOKEN && x->first_token_at == 0)
        x->first_token_at = clock_seconds();
    if (event->choice == 0 && event->text_size)
        strbuf_append(&x->fresh, event->text, event->text_size);
    if (event->type == LINNET_EVENT_FINISHED) x->n_finished++;
    interrupt_wake();
    pthread_mutex_unlock(&x->lock);
}

/* Takes what came since the last time. True once all is finished. */
static bool collect(struct exchange *x, struct strbuf *text, bool *reading)
{
    pthread_mutex_lock(&x->lock);
    struct strbuf taken = x->fresh;
    x->fresh = *text;
    strbuf_clear(&x->fresh);
    *text = taken;
    bool finished = x->n_finished == x->n;
    *reading = x->first_token_at == 0;
    int32_t done = x->prompt_done, total = x->prompt_tokens;
    pthread_mutex_unlock(&x->lock);
    if (*reading && !finished) progress_update(done, total);
    return finished;
}

linnet_status exchange_run(struct session *s, linnet_request *request, exchange_text_fn on_text,
                           void *user, struct exchange *x, linnet_error *err)
{
    uint64_t id;
    *x = (struct exchange){.n = request->n > 0 ? (size_t)request->n : 1};
    pthread_mutex_init(&x->lock, NULL);
    x->answers = mem_new(x->n, sizeof *x->answers);
    if (!x->answers) return error_memory(err, "the answers", x->n * sizeof *x->answers);
    request->on_event = on_event;
    request->user = x;
    interrupt_catch();
    progress_begin("reading the prompt", "tokens");
    linnet_status status = linnet_engine_submit(s->engine, request, &id, err);
    struct strbuf text = {0};
    bool finished = status != LINNET_OK, stopped = false, reading = true;
    while (!finished) {
        interrupt_wait();
        finished = collect(x, &text, &reading);
        if (!reading) progress_end();
        if (interrupt_seen() && !finished) x->interrupted = true;
        if (text.size && on_text && !stopped) stopped = !on_text(user, text.data, text.size);
        if (x->interrupted || stopped) linnet_engine_cancel(s->engine, id);
    }
    progress_end();
    strbuf_free(&text);
    return status;
}

void exchange_free(struct exchange *x)
{
    for (size_t i = 0; x->answers && i < x->n; i++) openai_answer_free(&x->answers[i]);
    free(x->answers);
    strbuf_free(&x->fresh);
    pthread_mutex_destroy(&x->lock);
    x->answers = NULL;
}

double exchange_prefill_rate(const struct openai_answer *a)
{
    int32_t n = a->prompt_tokens - a->cached_tokens;
    return a->timings.prefill_s > 0 ? n / a->timings.prefill_s : 0;
}

double exchange_decode_rate(const struct openai_answer *a)
{
    int32_t n = a->completion_tokens - 1; /* the first one comes with the prompt */
    return a->timings.decode_s > 0 && n > 0 ? n / a->timings.decode_s : 0;
}

void exchange_speed(const struct exchange *x, struct strbuf *out)
{
    const struct openai_answer *a = &x->answers[0];
    strbuf_format(out, "%d tokens", a->completion_tokens);
    double rate = exchange_decode_rate(a);
    if (rate > 0) strbuf_format(out, ", %.1f tokens/s", rate);
    strbuf_format(out, "; prompt %d tokens", a->prompt_tokens);
    if (a->cached_tokens) strbuf_format(out, " (%d cached)", a->cached_tokens);
    rate = exchange_prefill_rate(a);
    if (rate > 0) strbuf_format(out, ", %.1f tokens/s", rate);
}
