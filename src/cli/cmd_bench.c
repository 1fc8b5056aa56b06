/*
 * bench - speed of prefill and decode through the engine as it is, on random prompts; and the
 * ladder of the design's stages.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/random.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/session.h"

struct bench {
    struct session session;
    const struct options *options;
    struct integers prompts, batches;
    double bandwidth; /* bytes a second, measured */
    uint64_t n_prompts_made;
    json_t *rows; /* with --json */
    bool titled;
};

static int64_t default_prompts[] = {128, 512}, default_batches[] = {1, 2, 4, 8, 16};

static int64_t largest(const struct integers *list)
{
    int64_t most = 0;
    for (size_t i = 0; i < list->n; i++)
        if (list->items[i] > most) most = list->items[i];
    return most;
}

/* ---- one measurement ----------------------------------------------------------------------- */

/* When each token of one sequence came. */
struct sequence {
    struct measurement *measurement;
    double *times;
    size_t n;
};

struct measurement {
    pthread_mutex_t lock;
    struct sequence *sequences;
    size_t n_sequences, n_finished, max_tokens;
    double prefill_s;
    linnet_error error;
};

static void on_event(void *user, const linnet_event *event)
{
    struct sequence *sequence = user;
    struct measurement *m = sequence->measurement;
    double now = clock_seconds();
    pthread_mutex_lock(&m->lock);
    if (event->type == LINNET_EVENT_TOKEN && sequence->n < m->max_tokens)
        sequence->times[sequence->n++] = now;
    if (event->type == LINNET_EVENT_FINISHED) {
        m->prefill_s = event->timings.prefill_s;
        if (event->error) m->error = *event->error;
        m->n_finished++;
        interrupt_wake();
    }
    pthread_mutex_unlock(&m->lock);
}

static linnet_status submit(struct bench *b, struct sequence *sequence, size_t n_prompt,
                            linnet_error *err)
{
    int32_t *ids = mem_new(n_prompt, sizeof *ids);
    uint64_t id, stream = b->n_prompts_made++;
    if (!ids) return error_memory(err, "a prompt", n_prompt * sizeof *ids);
    for (size_t i = 0; i < n_prompt; i++)
        ids[i] = (int32_t)(random_u64((uint64_t)b->options->seed, i, stream) %
                           (uint64_t)b->session.info.vocab_size);
    linnet_request request = {
        .prompt = ids,
        .n_prompt = n_prompt,
        .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1},
        .max_tokens = (int32_t)sequence->measurement->max_tokens,
        .ignore_eos = true,
        .on_event = on_event,
        .user = sequence,
    };
    linnet_status status = linnet_engine_submit(b->session.engine, &request, &id, err);
    free(ids);
    return status;
}

static void measurement_free(struct measurement *m)
{
    for (size_t i = 0; m->sequences && i < m->n_sequences; i++) free(m->sequences[i].times);
    free(m->sequences);
    pthread_mutex_destroy(&m->lock);
}

/* Runs `batch` sequences to their end. measurement_free after any outcome. */
static linnet_status measure(struct bench *b, size_t batch, size_t n_prompt, size_t max_tokens,
                             struct measurement *m, linnet_error *err)
{
    linnet_status status = LINNET_OK;
    size_t submitted = 0;
    *m = (struct measurement){.n_sequences = batch, .max_tokens = max_tokens};
    pthread_mutex_init(&m->lock, NULL);
    m->sequences = mem_new(batch, sizeof *m->sequences);
    if (!m->sequences) return error_memory(err, "the sequences", batch * sizeof *m->sequences);
    for (size_t i = 0; i < batch; i++) {
        m->sequences[i].measurement = m;
        m->sequences[i].times = mem_new(max_tokens, sizeof(double));
        if (!m->sequences[i].times) return error_memory(err, "the times", max_tokens * 8);
    }
    for (; submitted < batch && !status; submitted += !status)
        status = submit(b, &m->sequences[submitted], n_prompt, err);
    for (bool finished = submitted == 0; !finished;) {
        interrupt_wait();
        pthread_mutex_lock(&m->lock);
        finished = m->n_finished == submitted;
        pthread_mutex_unlock(&m->lock);
    }
    if (!status && m->error.status) {
        *err = m->error;
        status = m->error.status;
    }
    return status;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t n)
{
    if (n == 0) return 0;
    qsort(values, n, sizeof *values, ascending);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* Appends the lengths of those steps in which every sequence was decoding. */
static size_t step_times(const struct measurement *m, double *out)
{
    double all_began = 0, one_ended = 1e300;
    size_t n = 0;
    for (size_t i = 0; i < m->n_sequences; i++) {
        const struct sequence *s = &m->sequences[i];
        if (s->n == 0) return 0;
        if (s->times[0] > all_began) all_began = s->times[0];
        if (s->times[s->n - 1] < one_ended) one_ended = s->times[s->n - 1];
    }
    const struct sequence *last = &m->sequences[m->n_sequences - 1];
    for (size_t i = 1; i < last->n; i++)
        if (last->times[i - 1] >= all_began && last->times[i] <= one_ended)
            out[n++] = last->times[i] - last->times[i - 1];
    return n;
}

/* ---- what a step costs --------------------------------------------------------------------- */

/* Multiply-adds count two. Matrices of every layer for each token, the output matrix for each row
 * of logits, attention for each token over `context` others. */
static double step_flops(const linnet_model_info *m, double tokens, double rows, double context)
{
    double q = (double)m->n_heads * m->head_dim, kv = (double)m->n_kv_heads * m->head_dim;
    double h = m->hidden_size, layer = h * (2 * q + 2 * kv + 3.0 * m->intermediate_size);
    return 2 * tokens * m->n_layers * (layer + 2 * q * context) + 2 * rows * h * m->vocab_size;
}

/* A decode step reads every weight once (of an embedding that is not also the output matrix only
 * a few rows) and the keys and values of each sequence. */
static double weights_read(const linnet_model_info *m)
{
    double used = step_flops(m, 1, 1, 0) / 2, share = used / (double)m->n_parameters;
    return (double)m->weight_bytes * (share < 1 ? share : 1);
}

struct row {
    const char *what;
    int64_t batch, prompt, generated;
    double step_s, tokens_s, bytes, flops; /* bytes and flops of one step */
};

static bool show(struct bench *b, const struct row *r)
{
    const char *device = b->session.plan.device, *dtype = b->session.info.dtype;
    double rate = r->bytes / r->step_s, share = b->bandwidth > 0 ? rate / b->bandwidth : 0;
    double tflops = r->flops / r->step_s / 1e12;
    if (b->rows) {
        json_t *json = json_pack(
            "{s:s,s:s,s:s,s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:f}", "what", r->what, "device", device,
            "dtype", dtype, "batch", (json_int_t)r->batch, "prompt", (json_int_t)r->prompt,
            "generated", (json_int_t)r->generated, "ms_step", r->step_s * 1e3, "tok_s", r->tokens_s,
            "gbytes_s", rate / 1e9, "bandwidth_share", share, "tflops", tflops);
        return json_array_append_new(b->rows, json) == 0;
    }
    struct strbuf line = {0};
    if (!b->titled) {
        strbuf_format(&line, "%s, %s, on %s; memory reads at %.1f GB/s\n", b->session.info.name,
                      dtype, device, b->bandwidth / 1e9);
        strbuf_format(&line, "%-8s %6s %7s %10s %10s %8s %7s %8s\n", "", "batch", "prompt",
                      "ms/step", "tokens/s", "GB/s", "share", "TFLOP/s");
    }
    b->titled = true;
    strbuf_format(&line, "%-8s %6lld %7lld %10.2f %10.1f %8.2f %6.0f%% %8.3f\n", r->what,
                  (long long)r->batch, (long long)r->prompt, r->step_s * 1e3, r->tokens_s,
                  rate / 1e9, 100 * share, tflops);
    return output_strbuf(&line);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static linnet_status prefill(struct bench *b, int64_t n_prompt, struct row *row, linnet_error *err)
{
    size_t repeat = (size_t)b->options->repeat;
    double *times = mem_new(repeat, sizeof *times);
    linnet_status status = LINNET_OK;
    if (!times) return error_memory(err, "the times", repeat * sizeof *times);
    for (size_t i = 0; i < repeat && !status; i++) {
        struct measurement m;
        status = measure(b, 1, (size_t)n_prompt, 1, &m, err);
        times[i] = m.prefill_s;
        measurement_free(&m);
    }
    double total = median(times, repeat);
    free(times);
    if (!status && total <= 0)
        status = error_set(err, LINNET_INTERNAL, "the engine measured no time for a prefill");
    int64_t budget = b->session.plan.max_num_batched_tokens;
    int64_t steps = (n_prompt + budget - 1) / budget;
    const linnet_model_info *info = &b->session.info;
    *row = (struct row){
        .what = "prefill",
        .batch = 1,
        .prompt = n_prompt,
        .step_s = total / (double)steps,
        .tokens_s = (double)n_prompt / total,
        .bytes = weights_read(info),
        .flops = step_flops(info, (double)n_prompt, 1, (double)n_prompt / 2) / (double)steps,
    };
    return status;
}

/* Tokens that the first sequences may generate before the last one has read its prompt. */
static int64_t head_start(int64_t batch, int64_t n_prompt, int64_t budget)
{
    int64_t left = budget > 2 * batch ? budget - batch : (budget + 1) / 2;
    return batch * n_prompt / left + batch + 2;
}

static linnet_status decode(struct bench *b, int64_t batch, int64_t n_prompt, struct row *row,
                            linnet_error *err)
{
    int64_t generated = b->options->generated, repeat = b->options->repeat;
    size_t budget = (size_t)b->session.plan.max_num_batched_tokens;
    size_t most = (size_t)(generated + head_start(batch, n_prompt, (int64_t)budget)), n = 0;
    double *times = mem_new((size_t)repeat * most, sizeof *times);
    linnet_status status = LINNET_OK;
    if (!times) return error_memory(err, "the times", (size_t)repeat * most * sizeof *times);
    for (int64_t i = 0; i < repeat && !status; i++) {
        struct measurement m;
        status = measure(b, (size_t)batch, (size_t)n_prompt, most, &m, err);
        if (!status) n += step_times(&m, times + n);
        measurement_free(&m);
    }
    double step = median(times, n), context = (double)n_prompt + (double)generated / 2;
    free(times);
    if (!status && step <= 0)
        status = error_set(err, LINNET_INVALID,
                           "batch %lld: no step had all sequences in it: raise --generated or "
                           "--max-num-seqs",
                           (long long)batch);
    const linnet_model_info *info = &b->session.info;
    double kv = (double)batch * context * (double)b->session.plan.kv_bytes_per_token;
    *row = (struct row){
        .what = "decode",
        .batch = batch,
        .prompt = n_prompt,
        .generated = generated,
        .step_s = step,
        .tokens_s = (double)batch / step,
        .bytes = weights_read(info) + kv,
        .flops = step_flops(info, (double)batch, (double)batch, context),
    };
    return status;
}

/* Room for the largest row, unless the user said otherwise. */
static linnet_status engine_options(struct bench *b, linnet_engine_options *e, linnet_error *err)
{
    int64_t batch = largest(&b->batches), first = b->prompts.items[0];
    int64_t budget = e->max_num_batched_tokens ? e->max_num_batched_tokens : 512;
    int64_t decoding = first + b->options->generated + head_start(batch, first, budget);
    int64_t longest = largest(&b->prompts) + 1;
    linnet_plan plan;
    if (decoding > longest) longest = decoding;
    if (longest > INT32_MAX / 2)
        return error_set(err, LINNET_TOO_LONG, "a sequence of %lld tokens is too long",
                         (long long)longest);
    e->no_prefix_caching = true;
    if (!e->max_num_seqs) e->max_num_seqs = (int32_t)batch;
    if (!e->max_model_len) e->max_model_len = (int32_t)longest;
    if (e->kv_cache_memory) return LINNET_OK;
    linnet_status status = linnet_engine_plan(b->session.model, e, &plan, err);
    if (status) return status;
    int64_t tokens = batch * (decoding + plan.block_tokens), least = longest + plan.block_tokens;
    e->kv_cache_memory = (tokens > least ? tokens : least) * plan.kv_bytes_per_token;
    return LINNET_OK;
}

static int speeds(struct bench *b)
{
    linnet_error err;
    linnet_status status;
    linnet_engine_options engine = session_engine_options(b->options);
    status = engine_options(b, &engine, &err);
    if (!status && b->options->dry_run) return session_dry_run(&b->session, &engine);
    if (!status) status = session_start(&b->session, &engine, &err);
    if (status) return output_error(&err);
    b->bandwidth = linnet_measure_bandwidth(b->options->device, b->session.plan.threads);
    size_t n = b->prompts.n + b->batches.n;
    for (size_t i = 0; i < n; i++) {
        struct row row = {0};
        if (i < b->prompts.n)
            status = prefill(b, b->prompts.items[i], &row, &err);
        else
            status = decode(b, b->batches.items[i - b->prompts.n], b->prompts.items[0], &row, &err);
        if (status) return output_error(&err);
        if (!show(b, &row)) return EXIT_FAILED;
    }
    return EXIT_DONE;
}

/* ---- ladder -------------------------------------------------------------------------------- */

static void on_stage(void *user, const linnet_ladder_row *stage)
{
    struct bench *b = user;
    double rate = stage->seconds > 0 ? stage->n_tokens / stage->seconds : 0;
    if (b->rows) {
        json_array_append_new(b->rows,
                              json_pack("{s:s,s:i,s:f,s:f}", "stage", stage->stage, "n_tokens",
                                        stage->n_tokens, "seconds", stage->seconds, "tok_s", rate));
        return;
    }
    struct strbuf line = {0};
    if (!b->titled)
        strbuf_format(&line, "%-28s %8s %9s %10s\n", "stage", "tokens", "s", "tokens/s");
    b->titled = true;
    strbuf_format(&line, "%-28s %8d %9.3f %10.1f\n", stage->stage, stage->n_tokens, stage->seconds,
                  rate);
    output_strbuf(&line);
}

static int ladder(struct bench *b)
{
    enum { PROMPT = 16, TOKENS = 32 }; /* the first stage is quadratic */
    const struct options *o = b->options;
    int64_t prompt = o->given[OPTION_PROMPT] ? o->prompt.items[0] : PROMPT;
    int64_t tokens = o->given[OPTION_GENERATED] ? o->generated : TOKENS;
    linnet_engine_options engine = session_engine_options(o);
    linnet_error err;
    if (linnet_ladder(b->session.model, &engine, (int32_t)prompt, (int32_t)tokens, on_stage, b,
                      &err))
        return output_error(&err);
    return EXIT_DONE;
}

int command_bench(const struct options *o)
{
    struct bench b = {.options = o, .prompts = o->prompt, .batches = o->batch};
    linnet_error err;
    bool stages = o->arguments.n > 0;
    if (stages && strcmp(o->arguments.items[0], "ladder") != 0)
        return output_usage("unknown bench '%s': did you mean 'ladder'?", o->arguments.items[0]);
    if (o->model && o->random) return output_usage("--model and --random: which one?");
    if (!b.prompts.n) b.prompts = (struct integers){default_prompts, 2};
    if (!b.batches.n) b.batches = (struct integers){default_batches, 5};
    if (session_open(&b.session, o, false, &err)) {
        int code = output_error(&err);
        session_close(&b.session);
        return code;
    }
    if (o->json) b.rows = json_array();
    int code = stages ? ladder(&b) : speeds(&b);
    if (b.rows && code == EXIT_DONE && !o->dry_run &&
        !output_json(json_incref(b.rows), JSON_INDENT(1) | JSON_REAL_PRECISION(6)))
        code = EXIT_FAILED;
    json_decref(b.rows);
    session_close(&b.session);
    return code;
}
