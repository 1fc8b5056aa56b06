/* measure.c - what `bench` needs besides requests: the ladder of stages, and the machine's limit.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/random.h"
#include "base/threads.h"
#include "engine/api_internal.h"
#include "model/random.h"
#include "model/simple.h"
#include "ops/peak.h"

linnet_status linnet_model_random(const char *shape, const char *dtype, uint64_t seed,
                                  linnet_model **out, linnet_error *err)
{
    struct checkpoint *cp;
    enum dtype type = DTYPE_F32;
    while (type < DTYPE_COUNT && strcasecmp(dtype_name(type), dtype) != 0) type++;
    if (type == DTYPE_COUNT)
        return error_set(
            err, LINNET_INVALID,
            "dtype \"%s\": use f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k or q6_k",
            dtype);
    linnet_status status = random_checkpoint(shape, type, seed, &cp, err);
    return status ? status : model_from_checkpoint(cp, out, err);
}

/* ---- the ladder ------------------------------------------------------------------------------ */

struct ladder {
    linnet_model *model;
    const linnet_engine_options *options;
    int32_t n_prompt, n_tokens;
    int32_t n_ids;   /* ids that may be chosen: those of the tokenizer */
    int32_t *tokens; /* prompt and answer */
    linnet_ladder_fn on_row;
    void *user;
};

static void tell(const struct ladder *l, const char *stage, int32_t n_tokens, double seconds)
{
    linnet_ladder_row row = {stage, n_tokens, seconds};
    l->on_row(l->user, &row);
}

/* The first answer is the measure of the others. */
static linnet_status same_tokens(const struct ladder *l, const char *stage, const int32_t *tokens,
                                 linnet_error *err)
{
    if (memcmp(tokens, l->tokens, (size_t)(l->n_prompt + l->n_tokens) * sizeof *tokens) == 0)
        return LINNET_OK;
    return error_set(err, LINNET_INTERNAL,
                     "stage \"%s\" gives other tokens than the one before: please report this",
                     stage);
}

/* One sequence on a decoder of one's own. */
struct simple_stage {
    const char *name;
    enum cache { NO_CACHE, CONTIGUOUS, GATHERED, PAGED } cache;
    enum launching launching;
};

/* On the CPU only the first four; the last where the device has such a kernel. */
static const struct simple_stage stages[] = {
    {"no cache", NO_CACHE, LAUNCH_EACH},
    {"contiguous cache", CONTIGUOUS, LAUNCH_EACH},
    {"paged cache, gathered", GATHERED, LAUNCH_EACH},
    {"paged attention", PAGED, LAUNCH_EACH},
    {"recorded step (CUDA graph)", PAGED, LAUNCH_RECORDED},
    {"one kernel a step", PAGED, LAUNCH_BEST},
};
enum { N_STAGES = sizeof stages / sizeof *stages };

/* What the stages compute with; the decoder is kept while the next stage wants the same. */
struct simple_bench {
    struct device device;
    struct pool *pool;
    struct limits limits;
    struct decoder *d;
    struct simple *s;
    int32_t *tokens;
};

/* In their order: asked about a stage once the one before has run. */
static bool stage_exists(const struct simple_bench *b, const struct simple_stage *stage)
{
    bool (*has_whole_step)(const struct backend *) = b->device.ops->has_whole_step;
    switch (stage->launching) {
    case LAUNCH_EACH: return true;
    case LAUNCH_RECORDED: return b->device.gpu;
    case LAUNCH_BEST: return has_whole_step && has_whole_step(b->d->backend);
    }
    return false;
}

static linnet_status prepare_stage(struct simple_bench *b, const struct ladder *l,
                                   const struct simple_stage *stage, linnet_error *err)
{
    struct limits *limits = &b->limits;
    linnet_status status = LINNET_OK;
    simple_destroy(b->s);
    b->s = NULL;
    if (!b->d || limits->launching != stage->launching) {
        limits->launching = stage->launching;
        decoder_destroy(b->d);
        b->d = NULL;
        status = decoder_create(l->model->checkpoint, &l->model->config, b->device.ops, b->pool,
                                limits, NULL, NULL, &b->d, err);
    }
    if (!status) status = simple_create(b->d, &b->s, err);
    if (!status && stage->cache >= GATHERED) simple_scatter(b->s);
    if (!status && stage->cache == GATHERED) status = simple_gather(b->s, err);
    memcpy(b->tokens, l->tokens, (size_t)l->n_prompt * sizeof *b->tokens);
    return status;
}

/* A GPU's first run loads kernels and records steps: the second one is measured. */
static int n_runs(const struct device *device)
{
    return device->gpu ? 2 : 1;
}

static linnet_status run_stage(struct simple_bench *b, const struct ladder *l,
                               const struct simple_stage *stage, linnet_error *err)
{
    double seconds = 0;
    linnet_status status = prepare_stage(b, l, stage, err);
    for (int run = 0; run < n_runs(&b->device) && !status; run++) {
        double begin = clock_seconds();
        status = simple_generate(b->s, b->tokens, l->n_prompt, l->n_tokens, l->n_ids,
                                 stage->cache != NO_CACHE, err);
        seconds = clock_seconds() - begin;
    }
    size_t length = (size_t)(l->n_prompt + l->n_tokens);
    if (!status && stage == stages) memcpy(l->tokens, b->tokens, length * sizeof *b->tokens);
    if (!status) status = same_tokens(l, stage->name, b->tokens, err);
    if (!status) tell(l, stage->name, l->n_tokens, seconds);
    return status;
}

static linnet_status simple_stages(const struct ladder *l, linnet_error *err)
{
    int32_t length = l->n_prompt + l->n_tokens;
    struct simple_bench b = {.limits = {.max_tokens = length < 512 ? length : 512,
                                        .max_logits = 1,
                                        .max_seqs = 1,
                                        .max_context = length,
                                        .n_blocks = 2 * blocks_for(length),
                                        .kv = plan_kv(l->options),
                                        .interleaved = plan_interleaves(l->options)}};
    b.tokens = mem_new((size_t)length, sizeof *b.tokens);
    linnet_status status = find_device(l->options->device, &b.device, err);
    if (!status) status = plan_check_device(l->options, &b.device, err);
    if (!status && !b.tokens)
        status = error_memory(err, "the tokens", (size_t)length * sizeof *b.tokens);
    if (!status) status = pool_create(l->options->threads, &b.pool, err);
    for (int i = 0; i < N_STAGES && !status && stage_exists(&b, &stages[i]); i++)
        status = run_stage(&b, l, &stages[i], err);
    simple_destroy(b.s);
    decoder_destroy(b.d);
    pool_destroy(b.pool);
    free(b.tokens);
    return status;
}

/* What the requests of a stage have given; changed by the engine's thread only. */
struct stage {
    pthread_mutex_t mutex;
    pthread_cond_t done;
    int32_t n_left, length, n_prompt;
    int32_t *tokens; /* [n, length] */
    linnet_error error;
};

struct stage_request {
    struct stage *stage;
    int32_t index, n;
};

static void on_event(void *user, const linnet_event *event)
{
    struct stage_request *r = user;
    struct stage *s = r->stage;
    if (event->type == LINNET_EVENT_TOKEN)
        s->tokens[r->index * s->length + s->n_prompt + r->n++] = event->token;
    if (event->type != LINNET_EVENT_FINISHED) return;
    pthread_mutex_lock(&s->mutex);
    if (event->finish != LINNET_FINISH_LENGTH || r->n != s->length - s->n_prompt)
        error_set(&s->error, LINNET_INTERNAL, "%s",
                  event->error ? event->error->message : "an answer ended early");
    if (--s->n_left == 0) pthread_cond_signal(&s->done);
    pthread_mutex_unlock(&s->mutex);
}

enum { BATCH = 8 };

/* n requests of the same prompt at once. */
static linnet_status run_requests(linnet_engine *e, const struct ladder *l, struct stage *s,
                                  int32_t n, linnet_error *err)
{
    struct stage_request requests[BATCH];
    linnet_error refused;
    s->n_left = n;
    for (int32_t i = 0; i < n; i++) {
        memcpy(s->tokens + i * s->length, l->tokens, (size_t)l->n_prompt * sizeof *s->tokens);
        requests[i] = (struct stage_request){s, i, 0};
        linnet_request r = {
            .prompt = l->tokens,
            .n_prompt = (size_t)l->n_prompt,
            .max_tokens = l->n_tokens,
            .ignore_eos = true,
            .sampling = {.temperature = 0, .top_p = 1, .repetition_penalty = 1, .has_seed = true},
            .on_event = on_event,
            .user = &requests[i]};
        if (!linnet_engine_submit(e, &r, NULL, &refused)) continue;
        pthread_mutex_lock(&s->mutex);
        s->n_left -= n - i;
        s->error = refused;
        pthread_mutex_unlock(&s->mutex);
        break;
    }
    pthread_mutex_lock(&s->mutex);
    while (s->n_left > 0) pthread_cond_wait(&s->done, &s->mutex);
    pthread_mutex_unlock(&s->mutex);
    return s->error.status ? error_set(err, s->error.status, "%s", s->error.message) : LINNET_OK;
}

/* The paged cache behind the scheduler: one sequence, then a batch. */
static linnet_status engine_stages(const struct ladder *l, linnet_error *err)
{
    static const struct {
        const char *name;
        int32_t n;
    } loads[2] = {{"paged cache, scheduler", 1}, {"continuous batching, 8", BATCH}};
    linnet_engine_options options = *l->options;
    linnet_engine *e;
    struct device device;
    options.no_prefix_caching = true;
    linnet_status status = find_device(options.device, &device, err);
    if (!status) status = linnet_engine_create(l->model, &options, &e, err);
    if (status) return status;
    struct stage s = {.length = l->n_prompt + l->n_tokens, .n_prompt = l->n_prompt};
    linnet_plan plan;
    linnet_engine_get_plan(e, &plan);
    if (s.length > plan.max_model_len)
        status = error_set(err, LINNET_TOO_LONG,
                           "%d tokens of prompt and answer do not fit into max_model_len %d",
                           s.length, plan.max_model_len);
    s.tokens = mem_new((size_t)(BATCH * s.length), sizeof *s.tokens);
    pthread_mutex_init(&s.mutex, NULL);
    pthread_cond_init(&s.done, NULL);
    if (!status && !s.tokens)
        status = error_memory(err, "the tokens", (size_t)(BATCH * s.length) * sizeof *s.tokens);
    for (int i = 0; i < 2 && !status; i++) {
        double seconds = 0;
        for (int run = 0; run < n_runs(&device) && !status; run++) {
            double begin = clock_seconds();
            status = run_requests(e, l, &s, loads[i].n, err);
            seconds = clock_seconds() - begin;
        }
        for (int32_t j = 0; j < loads[i].n && !status; j++)
            status = same_tokens(l, loads[i].name, s.tokens + j * s.length, err);
        if (!status) tell(l, loads[i].name, loads[i].n * l->n_tokens, seconds);
    }
    linnet_engine_destroy(e);
    pthread_cond_destroy(&s.done);
    pthread_mutex_destroy(&s.mutex);
    free(s.tokens);
    return status;
}

linnet_status linnet_ladder(linnet_model *model, const linnet_engine_options *options,
                            int32_t n_prompt, int32_t n_tokens, linnet_ladder_fn on_row, void *user,
                            linnet_error *err)
{
    static const linnet_engine_options defaults = {0};
    if (!model->checkpoint)
        return error_set(err, LINNET_INVALID, "%s is a tokenizer: a ladder needs a model",
                         model->path);
    if (n_prompt < 1 || n_tokens < 1 || (int64_t)n_prompt + n_tokens > model->config.context_length)
        return error_set(err, LINNET_TOO_LONG,
                         "%d tokens of prompt and %d of answer do not fit into a context of %d",
                         n_prompt, n_tokens, model->config.context_length);
    int32_t n_ids = model->config.shape.vocab;
    if (model->tokenizer && tokenizer_size(model->tokenizer) < n_ids)
        n_ids = tokenizer_size(model->tokenizer);
    struct ladder l = {
        model, options ? options : &defaults, n_prompt, n_tokens, n_ids, NULL, on_row, user};
    l.tokens = mem_new((size_t)(n_prompt + n_tokens), sizeof *l.tokens);
    if (!l.tokens)
        return error_memory(err, "the tokens", (size_t)(n_prompt + n_tokens) * sizeof *l.tokens);
    for (int32_t i = 0; i < n_prompt; i++)
        l.tokens[i] = (int32_t)(random_u64(3, (uint64_t)i, 0) % (uint64_t)n_ids);
    linnet_status status = simple_stages(&l, err);
    if (!status) status = engine_stages(&l, err);
    free(l.tokens);
    return status;
}

/* ---- limits ------------------------------------------------------------------------------- */

struct reading {
    const char *data;
    int64_t n; /* cache lines */
    enum reader reader;
    uint64_t sums[1024]; /* a thread each, so that nothing is left out as useless */
};

static void read_share(void *arg, int thread, int n_threads)
{
    struct reading *r = arg;
    int64_t begin, end;
    pool_share(r->n, READ_UNIT / CACHE_LINE, thread, n_threads, &begin, &end);
    r->sums[thread] = cpu_read(r->data + begin * CACHE_LINE, (end - begin) * CACHE_LINE, r->reader);
}

static double host_bandwidth(int32_t threads)
{
    enum { BYTES = 1 << 29, PASSES = 4 * READERS };
    struct pool *pool;
    double best = 0;
    char *data = mem_pages(BYTES, true);
    struct reading r = {.data = data, .n = BYTES / CACHE_LINE};
    if (data && pool_create(threads, &pool, NULL) == LINNET_OK) {
        memset(data, 1, BYTES); /* real pages: untouched ones are all the same zeros */
        for (int pass = 0; pass < PASSES; pass++) {
            double begin = clock_seconds();
            r.reader = pass % READERS;
            pool_run(pool, read_share, &r);
            double rate = BYTES / (clock_seconds() - begin);
            best = rate > best ? rate : best;
        }
        pool_destroy(pool);
    }
    mem_pages_free(data, BYTES);
    return best;
}

double linnet_measure_bandwidth(const char *device, int32_t threads)
{
    struct device d;
    if (find_device(device, &d, NULL) != LINNET_OK) return 0;
    return d.ops->read_bandwidth ? d.ops->read_bandwidth() : host_bandwidth(threads);
}

void linnet_measure_peaks(const char *device, int32_t threads, linnet_peaks *peaks)
{
    struct device d;
    struct pool *pool;
    *peaks = (linnet_peaks){0};
    if (find_device(device, &d, NULL) != LINNET_OK || d.gpu) return;
    if (pool_create(threads, &pool, NULL) != LINNET_OK) return;
    peaks->fp32 = cpu_peak(pool, ARITHMETIC_F32);
    peaks->int8 = cpu_peak(pool, ARITHMETIC_INT8);
    if (d.ops->activation_error(DTYPE_BF16) > 0) /* the device uses them */
        peaks->bf16 = cpu_peak(pool, ARITHMETIC_BF16);
    pool_destroy(pool);
}

double linnet_peak_of(const linnet_peaks *peaks, const char *dtype, const char **arithmetic)
{
    enum dtype type = 0;
    while (type < DTYPE_COUNT && strcasecmp(dtype_name(type), dtype) != 0) type++;
    bool quantized = type < DTYPE_COUNT && dtype_block(type) > 1;
    double peak = quantized ? peaks->int8 : type == DTYPE_BF16 ? peaks->bf16 : 0;
    if (arithmetic) *arithmetic = peak == 0 ? "fp32" : quantized ? "int8" : "bf16";
    return peak == 0 ? peaks->fp32 : peak;
}
