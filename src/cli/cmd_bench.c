/*
 * bench - speed of prefill and decode through the engine as it is, on random prompts; the ladder of
 * the design's stages; and where the time of a step goes (bench_operations.c).
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/random.h"
#include "cli/bench_internal.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/session.h"

struct bench {
    struct session session;
    const struct options *options;
    linnet_device_info device; /* of the ladder */
    struct integers prompts, batches;
    double bandwidth; /* bytes a second, measured */
    linnet_peaks peaks;
    uint64_t n_prompts_made;
    json_t *rows;        /* with --json */
    bool titled, failed; /* failed: could not write a row of the ladder */
};

static int64_t default_prompts[] = {128, 512}, default_batches[] = {1, 2, 4, 8, 16};
/* --operations has one table for each: the longer prompt alone, and one sequence. */
static const struct integers one_prompt = {default_prompts + 1, 1},
                             one_batch = {default_batches, 1};

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
    size_t n, n_seen; /* n_seen: of them, up to the step that is looked at */
};

struct measurement {
    struct bench *bench;
    pthread_mutex_t lock;
    struct sequence *sequences;
    size_t n_sequences, n_prompt, max_tokens; /* tokens of each */
    size_t n_submitted, n_finished;
    int64_t prompt_steps; /* in which a part of a prompt was read */
    double prefill_s;
    linnet_error error;
};

static void on_event(void *user, const linnet_event *event);

/* Hands the next sequence over. */
static linnet_status submit(struct measurement *m, linnet_error *err)
{
    struct bench *b = m->bench;
    int32_t *ids = mem_new(m->n_prompt, sizeof *ids);
    uint64_t id, stream = b->n_prompts_made++;
    if (!ids) return error_memory(err, "a prompt", m->n_prompt * sizeof *ids);
    for (size_t i = 0; i < m->n_prompt; i++)
        ids[i] = (int32_t)(random_u64((uint64_t)b->options->seed, i, stream) %
                           (uint64_t)b->session.info.vocab_size);
    linnet_request request = {
        .prompt = ids,
        .n_prompt = m->n_prompt,
        .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1},
        .max_tokens = (int32_t)m->max_tokens,
        .ignore_eos = true,
        .on_event = on_event,
        .user = &m->sequences[m->n_submitted],
    };
    linnet_status status = linnet_engine_submit(b->session.engine, &request, &id, err);
    if (!status) m->n_submitted++;
    free(ids);
    return status;
}

static void on_event(void *user, const linnet_event *event)
{
    struct sequence *sequence = user;
    struct measurement *m = sequence->measurement;
    double now = clock_seconds();
    pthread_mutex_lock(&m->lock);
    /* The others come while the first is between two steps: the engine finds all of them at the
     * next, however late this thread or another is. */
    if (event->type != LINNET_EVENT_FINISHED)
        while (m->n_submitted < m->n_sequences && !m->error.status) submit(m, &m->error);
    if (event->type == LINNET_EVENT_PROMPT) m->prompt_steps++;
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
    *m = (struct measurement){
        .bench = b, .n_sequences = batch, .n_prompt = n_prompt, .max_tokens = max_tokens};
    pthread_mutex_init(&m->lock, NULL);
    m->sequences = mem_new(batch, sizeof *m->sequences);
    if (!m->sequences) return error_memory(err, "the sequences", batch * sizeof *m->sequences);
    for (size_t i = 0; i < batch; i++) {
        m->sequences[i].measurement = m;
        m->sequences[i].times = mem_new(max_tokens, sizeof(double));
        if (!m->sequences[i].times) return error_memory(err, "the times", max_tokens * 8);
    }
    pthread_mutex_lock(&m->lock);
    linnet_status status = submit(m, err); /* on_event hands the others over */
    pthread_mutex_unlock(&m->lock);
    if (status) return status;
    for (bool finished = false; !finished;) {
        interrupt_wait();
        pthread_mutex_lock(&m->lock);
        finished = m->n_finished == m->n_submitted;
        pthread_mutex_unlock(&m->lock);
    }
    if (m->error.status) *err = m->error;
    return m->error.status;
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

/* The steps in which every sequence was decoding. */
struct window {
    double *times; /* how long each took */
    size_t n;
    double context; /* tokens that one looked at, of all sequences; summed over the steps */
};

/* How many tokens of the sequence there were at a time, counted on from n. */
static size_t tokens_at(const struct sequence *s, size_t n, double time)
{
    while (n < s->n && s->times[n] <= time) n++;
    return n;
}

static void add_steps(const struct measurement *m, size_t n_prompt, struct window *window)
{
    double all_began = 0, one_ended = 1e300;
    for (size_t i = 0; i < m->n_sequences; i++) {
        const struct sequence *s = &m->sequences[i];
        if (s->n == 0) return;
        if (s->times[0] > all_began) all_began = s->times[0];
        if (s->times[s->n - 1] < one_ended) one_ended = s->times[s->n - 1];
    }
    const struct sequence *last = &m->sequences[m->n_sequences - 1];
    for (size_t i = 1; i < last->n; i++) {
        if (last->times[i - 1] < all_began || last->times[i] > one_ended) continue;
        window->times[window->n++] = last->times[i] - last->times[i - 1];
        for (size_t k = 0; k < m->n_sequences; k++) {
            struct sequence *s = &m->sequences[k];
            s->n_seen = tokens_at(s, s->n_seen, last->times[i - 1]);
            window->context += (double)(n_prompt + s->n_seen);
        }
    }
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

struct row {
    const char *what;
    int64_t batch, prompt, generated;
    double step_s, tokens_s;
    double bytes, flops; /* of one step; it reads every weight that the plan counts once */
};

/* First line of a table; JSON has it in its rows. */
static void title(struct bench *b, const char *device, const char *reason, struct strbuf *out)
{
    b->titled = true;
    strbuf_text(out, "device: ");
    session_device(device, reason, out);
    strbuf_char(out, '\n');
}

static void title_speeds(const struct bench *b, struct strbuf *line)
{
    const char *dtype = b->session.info.dtype, *arithmetic;
    bool measured = linnet_peak_of(&b->peaks, dtype, &arithmetic) > 0;
    strbuf_format(line, "%s, %s; ", b->session.info.name, dtype);
    bench_limits(b->bandwidth, &b->peaks, line);
    strbuf_format(line, "\n%-8s %6s %7s %10s %10s %8s %7s %9s", "", "batch", "prompt", "ms/step",
                  "tokens/s", "GB/s", "share", "GFLOP/s");
    if (measured) strbuf_format(line, " of %s", arithmetic);
    strbuf_char(line, '\n');
}

static bool show(struct bench *b, const struct row *r)
{
    const char *device = b->session.plan.device, *dtype = b->session.info.dtype;
    double rate = r->bytes / r->step_s, share = b->bandwidth > 0 ? rate / b->bandwidth : 0;
    double flops = r->flops / r->step_s, peak = linnet_peak_of(&b->peaks, dtype, NULL);
    double peak_share = peak > 0 ? flops / peak : 0;
    if (b->rows) {
        json_t *json =
            json_pack("{s:s,s:s,s:s,s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:f}", "what", r->what,
                      "device", device, "dtype", dtype, "batch", (json_int_t)r->batch, "prompt",
                      (json_int_t)r->prompt, "generated", (json_int_t)r->generated, "ms_step",
                      r->step_s * 1e3, "tok_s", r->tokens_s, "gbytes_s", rate / 1e9,
                      "bandwidth_share", share, "tflops", flops / 1e12, "peak_share", peak_share);
        return json_array_append_new(b->rows, json) == 0;
    }
    struct strbuf line = {0};
    if (!b->titled) {
        title(b, device, b->session.plan.device_reason, &line);
        title_speeds(b, &line);
    }
    strbuf_format(&line, "%-8s %6lld %7lld %10.2f %10.1f %8.2f %6.0f%% %9.1f", r->what,
                  (long long)r->batch, (long long)r->prompt, r->step_s * 1e3, r->tokens_s,
                  rate / 1e9, 100 * share, flops / 1e9);
    if (peak > 0) strbuf_format(&line, " %6.0f%%", 100 * peak_share);
    strbuf_char(&line, '\n');
    return output_strbuf(&line);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static linnet_status prefill(struct bench *b, int64_t n_prompt, struct row *row, linnet_error *err)
{
    size_t repeat = (size_t)b->options->repeat;
    double *times = mem_new(repeat, sizeof *times);
    int64_t steps = 1;
    linnet_status status = LINNET_OK;
    if (!times) return error_memory(err, "the times", repeat * sizeof *times);
    /* The first one finds memory untouched and is not counted. */
    for (size_t i = 0; i <= repeat && !status; i++) {
        struct measurement m;
        status = measure(b, 1, (size_t)n_prompt, 1, &m, err);
        if (i > 0) times[i - 1] = m.prefill_s;
        if (m.prompt_steps) steps = m.prompt_steps; /* the same each time */
        measurement_free(&m);
    }
    double total = median(times, repeat);
    free(times);
    if (!status && total <= 0)
        status = error_set(err, LINNET_INTERNAL, "the engine measured no time for a prefill");
    const linnet_model_info *info = &b->session.info;
    *row = (struct row){
        .what = "prefill",
        .batch = 1,
        .prompt = n_prompt,
        .step_s = total / (double)steps,
        .tokens_s = (double)n_prompt / total,
        .bytes = (double)b->session.plan.weights,
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
    size_t most = (size_t)(generated + head_start(batch, n_prompt, (int64_t)budget));
    struct window window = {.times = mem_new((size_t)repeat * most, sizeof(double))};
    linnet_status status = LINNET_OK;
    if (!window.times) return error_memory(err, "the times", (size_t)repeat * most * 8);
    for (int64_t i = 0; i < repeat && !status; i++) {
        struct measurement m;
        status = measure(b, (size_t)batch, (size_t)n_prompt, most, &m, err);
        if (!status) add_steps(&m, (size_t)n_prompt, &window);
        measurement_free(&m);
    }
    double step = median(window.times, window.n);
    double context = window.n ? window.context / (double)window.n : 0; /* of all sequences */
    free(window.times);
    if (!status && step <= 0)
        status = error_set(err, LINNET_INVALID,
                           "batch %lld: no step had all sequences in it: raise --generated or "
                           "--max-num-seqs",
                           (long long)batch);
    const linnet_model_info *info = &b->session.info;
    double kv = context * (double)b->session.plan.kv_bytes_per_token;
    *row = (struct row){
        .what = "decode",
        .batch = batch,
        .prompt = n_prompt,
        .generated = generated,
        .step_s = step,
        .tokens_s = (double)batch / step,
        .bytes = (double)b->session.plan.weights + kv,
        .flops = step_flops(info, (double)batch, (double)batch, context / (double)batch),
    };
    return status;
}

/* Room for the largest row, unless the user said otherwise. */
static linnet_status engine_options(struct bench *b, linnet_engine_options *e, linnet_error *err)
{
    int64_t batch = largest(&b->batches), prompt = largest(&b->prompts);
    linnet_plan plan;
    e->no_prefix_caching = true;
    if (!e->max_num_seqs) e->max_num_seqs = (int32_t)batch;
    linnet_status status = linnet_engine_plan(b->session.model, e, &plan, err);
    if (status) return status;
    int64_t longest =
        prompt + b->options->generated + head_start(batch, prompt, plan.max_num_batched_tokens);
    if (longest > INT32_MAX / 2)
        return error_set(err, LINNET_TOO_LONG, "a sequence of %lld tokens is too long",
                         (long long)longest);
    if (!e->max_model_len) e->max_model_len = (int32_t)longest;
    if (e->kv_cache_memory) return LINNET_OK;
    status = linnet_engine_plan(b->session.model, e, &plan, err);
    if (status) return status;
    int64_t tokens = batch * (longest + plan.block_tokens),
            least = e->max_model_len + plan.block_tokens;
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
    if (!status && b->options->operations)
        return bench_operations(&b->session, &engine, &b->prompts, &b->batches, b->rows);
    if (!status) status = session_start(&b->session, &engine, &err);
    if (status) return output_error(&err);
    b->bandwidth = linnet_measure_bandwidth(b->options->device, b->session.plan.threads);
    linnet_measure_peaks(b->options->device, b->session.plan.threads, &b->peaks);
    size_t n_batches = b->options->generated ? b->batches.n : 0;
    size_t n = b->prompts.n * (1 + n_batches);
    for (size_t i = 0; i < n; i++) { /* prefill of each prompt, then each batch after each prompt */
        struct row row = {0};
        int64_t prompt = b->prompts.items[i % b->prompts.n];
        if (i < b->prompts.n)
            status = prefill(b, prompt, &row, &err);
        else
            status = decode(b, b->batches.items[i / b->prompts.n - 1], prompt, &row, &err);
        if (status) return output_error(&err);
        if (!show(b, &row)) return EXIT_FAILED;
    }
    return EXIT_DONE;
}

/* ---- ladder -------------------------------------------------------------------------------- */

static void title_ladder(struct bench *b, struct strbuf *line)
{
    title(b, b->device.name, b->device.reason, line);
    strbuf_format(line, "%-28s %8s %9s %10s\n", "stage", "tokens", "s", "tokens/s");
}

static void on_stage(void *user, const linnet_ladder_row *stage)
{
    struct bench *b = user;
    double rate = stage->seconds > 0 ? stage->n_tokens / stage->seconds : 0;
    if (b->failed) return; /* said once is enough */
    if (b->rows) {
        json_t *row = json_pack("{s:s,s:i,s:f,s:f}", "stage", stage->stage, "n_tokens",
                                stage->n_tokens, "seconds", stage->seconds, "tok_s", rate);
        b->failed = json_array_append_new(b->rows, row) != 0;
        return;
    }
    struct strbuf line = {0};
    if (!b->titled) title_ladder(b, &line);
    strbuf_format(&line, "%-28s %8d %9.3f %10.1f\n", stage->stage, stage->n_tokens, stage->seconds,
                  rate);
    b->failed = !output_strbuf(&line);
}

static int ladder(struct bench *b)
{
    const struct options *o = b->options;
    linnet_engine_options engine = session_engine_options(o);
    linnet_error err;
    if (linnet_device_find(o->device, &b->device, &err)) return output_error(&err);
    int64_t prompt = b->device.gpu ? 128 : 16, tokens = b->device.gpu ? 128 : 32;
    if (o->given[OPTION_PROMPT]) prompt = o->prompt.items[0];
    if (o->given[OPTION_GENERATED]) tokens = o->generated;
    if (o->dry_run) return session_dry_run(&b->session, &engine);
    if (linnet_ladder(b->session.model, &engine, (int32_t)prompt, (int32_t)tokens, on_stage, b,
                      &err))
        return output_error(&err);
    return b->failed ? EXIT_FAILED : EXIT_DONE;
}

/* ---- limits -------------------------------------------------------------------------------- */

static int limits(const struct options *o)
{
    linnet_device_info device;
    linnet_peaks peaks;
    linnet_error err;
    if (linnet_device_find(o->device, &device, &err)) return output_error(&err);
    double bandwidth = linnet_measure_bandwidth(o->device, (int32_t)o->threads);
    linnet_measure_peaks(o->device, (int32_t)o->threads, &peaks);
    if (o->json) {
        json_t *json = json_pack("{s:s,s:f,s:f,s:f,s:f}", "device", device.name, "read_gbytes_s",
                                 bandwidth / 1e9, "fp32_gflops", peaks.fp32 / 1e9, "int8_gflops",
                                 peaks.int8 / 1e9, "bf16_gflops", peaks.bf16 / 1e9);
        return output_json(json, JSON_INDENT(1) | JSON_REAL_PRECISION(6)) ? EXIT_DONE : EXIT_FAILED;
    }
    struct strbuf line = {0};
    strbuf_text(&line, "device: ");
    session_device(device.name, device.reason, &line);
    strbuf_char(&line, '\n');
    bench_limits(bandwidth, &peaks, &line);
    strbuf_char(&line, '\n');
    return output_strbuf(&line) ? EXIT_DONE : EXIT_FAILED;
}

int command_bench(const struct options *o)
{
    struct bench b = {.options = o, .prompts = o->prompt, .batches = o->batch};
    linnet_error err;
    bool stages = o->arguments.n > 0;
    if (stages && strcmp(o->arguments.items[0], "limits") == 0) return limits(o);
    if (!b.prompts.n && o->operations) b.prompts = one_prompt;
    if (!b.batches.n && o->operations) b.batches = one_batch;
    if (!b.prompts.n) b.prompts = (struct integers){default_prompts, 2};
    if (!b.batches.n) b.batches = (struct integers){default_batches, 5};
    while (o->max_num_seqs && largest(&b.batches) > o->max_num_seqs) b.batches.n--; /* ascending */
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
