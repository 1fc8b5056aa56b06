/* operations.c - how long each operation of a step takes, and how much work it is. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/random.h"
#include "base/threads.h"
#include "engine/api_internal.h"
#include "model/decoder.h"
#include "model/weights.h"

static const char *const names[] = {"embed",   "qkv",  "attention", "o_proj",
                                    "gate_up", "down", "head"};
enum { EMBED, QKV, ATTENTION, O_PROJ, GATE_UP, DOWN, HEAD, N_OPERATIONS };

/* ---- work ---------------------------------------------------------------------------------- */

struct work {
    double bytes, flops, least_seconds;
};

/* What a step has, in sums over its sequences and tokens. */
struct load {
    double tokens, rows; /* rows of logits */
    double keys;         /* that its tokens look at */
    double cached;       /* tokens whose keys and values are read */
};

struct measuring {
    const linnet_peaks *peaks;
    const struct ops *ops;
    const struct shape *shape;
    struct weights weights;
    linnet_operation_fn on_row;
    void *user;

    struct decoder *d;
    struct step step;
    int32_t *numbers; /* the step's arrays */
    int32_t *token_ids, *positions, *slots, *query_start, *context_lens, *tables, *rows, *rope_lens;
    int32_t max_blocks;

    double last;                   /* when the operation before ended */
    double (*times)[N_OPERATIONS]; /* [runs] of each step */
    double *now;                   /* of the step that runs */
};

/* A product with a matrix, for so many tokens. NULL: none. */
static void add_product(const struct measuring *m, const struct tensor *t, double tokens,
                        struct work *w)
{
    if (!t) return;
    double flops = 2 * tokens * (double)t->shape[0] * (double)t->shape[1];
    double peak = linnet_peak_of(m->peaks, dtype_name(t->dtype), NULL);
    w->bytes += (double)m->ops->matrix_bytes(t->dtype, t->shape[0], t->shape[1]);
    w->flops += flops;
    if (peak > 0) w->least_seconds += flops / peak;
}

static void add_attention(const struct measuring *m, const struct load *load, struct work *w)
{
    const struct shape *s = m->shape;
    double flops = 4 * load->keys * s->n_layers * s->n_heads * s->head_dim;
    double token_bytes = (double)m->ops->cache_bytes(s, m->d->limits.kv, 1) / KV_BLOCK;
    w->bytes += load->cached * token_bytes;
    w->flops += flops;
    if (m->peaks->fp32 > 0) w->least_seconds += flops / m->peaks->fp32;
}

static void work_of(const struct measuring *m, const struct load *load, struct work *work)
{
    const struct tensor *e = m->weights.embedding;
    work[EMBED].bytes += load->tokens * (double)dtype_bytes(e->dtype, e->shape[1]);
    for (int32_t i = 0; i < m->shape->n_layers; i++) {
        const struct layer_tensors *l = &m->weights.layers[i];
        for (int k = 0; k < 3; k++) add_product(m, l->qkv[k], load->tokens, &work[QKV]);
        add_product(m, l->o_proj, load->tokens, &work[O_PROJ]);
        add_product(m, l->gate, load->tokens, &work[GATE_UP]);
        add_product(m, l->up, load->tokens, &work[GATE_UP]);
        add_product(m, l->down, load->tokens, &work[DOWN]);
    }
    add_attention(m, load, &work[ATTENTION]);
    if (load->rows > 0) add_product(m, m->weights.head, load->rows, &work[HEAD]);
}

/* ---- steps --------------------------------------------------------------------------------- */

static void on_operation(void *user, const char *operation, int32_t layer)
{
    struct measuring *m = user;
    double now = clock_seconds();
    int i = 0;
    (void)layer;
    while (strcmp(names[i], operation) != 0) i++;
    m->now[i] += now - m->last;
    m->last = now;
}

/* Runs the step; what it takes is added to m->now. */
static linnet_status run_step(struct measuring *m, linnet_error *err)
{
    m->last = clock_seconds();
    return decoder_step_observed(m->d, &m->step, on_operation, m, err);
}

/* Token t of the step is at a position of a sequence, whose blocks lie one behind the other. */
static void set_token(struct measuring *m, int32_t t, int32_t sequence, int32_t position,
                      int32_t n_prompt)
{
    uint64_t random = random_u64(4, (uint64_t)position, (uint64_t)sequence);
    m->token_ids[t] = (int32_t)(random % (uint64_t)m->shape->vocab);
    m->positions[t] = position;
    m->slots[t] =
        m->tables[sequence * m->max_blocks + position / KV_BLOCK] * KV_BLOCK + position % KV_BLOCK;
    m->rope_lens[t] = position < n_prompt ? n_prompt : position + 1;
}

/* Blocks of sequences of n tokens. */
static void set_tables(struct measuring *m, int32_t batch, int32_t n)
{
    int32_t blocks = blocks_for(n);
    for (int32_t s = 0; s < batch; s++)
        for (int32_t i = 0; i < m->max_blocks; i++)
            m->tables[s * m->max_blocks + i] = i < blocks ? s * blocks + i : 0;
}

/* The prompt of the first sequence, in as many steps as it takes. */
static linnet_status prefill(struct measuring *m, int32_t n_prompt, struct work *work,
                             linnet_error *err)
{
    linnet_status status = LINNET_OK;
    for (int32_t at = 0; at < n_prompt && !status; at += m->step.n_tokens) {
        int32_t left = n_prompt - at, most = m->d->limits.max_tokens;
        int32_t n = left < most ? left : most, end = at + n;
        for (int32_t t = 0; t < n; t++) set_token(m, t, 0, at + t, n_prompt);
        m->query_start[1] = n;
        m->context_lens[0] = end;
        m->rows[0] = n - 1;
        m->step.n_tokens = n;
        m->step.n_seqs = 1;
        m->step.n_logits = end == n_prompt;
        struct load load = {n, m->step.n_logits, 0.5 * n * ((double)at + end + 1), end};
        if (work) work_of(m, &load, work);
        status = run_step(m, err);
    }
    return status;
}

/* A token behind n_prompt others of each sequence; run again, it computes the same again. */
static void prepare_decode(struct measuring *m, int32_t batch, int32_t n_prompt, struct work *work)
{
    int32_t blocks = blocks_for(n_prompt + 1);
    for (int32_t s = 0; s < batch; s++) {
        set_token(m, s, s, n_prompt, n_prompt);
        m->query_start[s + 1] = s + 1;
        m->context_lens[s] = n_prompt + 1;
        m->rows[s] = s;
        for (int32_t layer = 0; s > 0 && layer < m->shape->n_layers; layer++)
            m->ops->copy_blocks(m->d->backend, layer, m->tables, s * blocks, blocks);
    }
    m->step.n_tokens = m->step.n_seqs = m->step.n_logits = batch;
    double keys = (double)batch * (n_prompt + 1);
    work_of(m, &(struct load){batch, batch, keys, keys}, work);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static double total(const double *times)
{
    double sum = 0;
    for (int i = 0; i < N_OPERATIONS; i++) sum += times[i];
    return sum;
}

static int by_total(const void *a, const void *b)
{
    double x = total(a), y = total(b);
    return (x > y) - (x < y);
}

/* The rows of the median step: its parts are those of one step, and add up. */
static void tell(struct measuring *m, const char *what, int32_t batch, int32_t n_prompt,
                 size_t n_runs, const struct work *work)
{
    struct work all = {0};
    qsort(m->times, n_runs, sizeof *m->times, by_total);
    const double *times = m->times[n_runs / 2];
    double seconds = total(times);
    linnet_operation_row row = {.what = what, .batch = batch, .prompt = n_prompt};
    for (int i = 0; i < N_OPERATIONS; i++) {
        row.operation = names[i];
        row.seconds = times[i];
        row.step_share = times[i] / seconds;
        row.bytes = work[i].bytes;
        row.flops = work[i].flops;
        row.least_seconds = work[i].least_seconds;
        all.bytes += row.bytes;
        all.flops += row.flops;
        all.least_seconds += row.least_seconds;
        m->on_row(m->user, &row);
    }
    row = (linnet_operation_row){what, batch,     n_prompt,  "step",           seconds,
                                 1,    all.bytes, all.flops, all.least_seconds};
    m->on_row(m->user, &row);
}

/* A first run wakes threads and touches memory: it is not counted. */
static linnet_status measure_prefill(struct measuring *m, int32_t n_prompt, int32_t repeat,
                                     linnet_error *err)
{
    struct work work[N_OPERATIONS] = {0};
    set_tables(m, 1, n_prompt + 1);
    linnet_status status = prefill(m, n_prompt, work, err);
    for (int32_t i = 0; i < repeat && !status; i++) {
        m->now = m->times[i];
        memset(m->now, 0, sizeof *m->times);
        status = prefill(m, n_prompt, NULL, err);
    }
    if (!status) tell(m, "prefill", 1, n_prompt, (size_t)repeat, work);
    return status;
}

static linnet_status measure_decode(struct measuring *m, int32_t batch, int32_t n_prompt,
                                    int32_t n_steps, linnet_error *err)
{
    struct work work[N_OPERATIONS] = {0};
    set_tables(m, batch, n_prompt + 1);
    prepare_decode(m, batch, n_prompt, work);
    linnet_status status = run_step(m, err);
    for (int32_t i = 0; i < n_steps && !status; i++) {
        m->now = m->times[i];
        memset(m->now, 0, sizeof *m->times);
        status = run_step(m, err);
    }
    if (!status) tell(m, "decode", batch, n_prompt, (size_t)n_steps, work);
    return status;
}

/* ---- room ---------------------------------------------------------------------------------- */

static linnet_status check_what(const linnet_operations_options *what, const linnet_plan *plan,
                                linnet_error *err)
{
    int32_t longest = 0, widest = 1;
    if (what->repeat < 1 || (what->n_batches > 0 && what->decode_steps < 1))
        return error_set(err, LINNET_INVALID, "repeat %d, decode_steps %d: give at least 1",
                         what->repeat, what->decode_steps);
    for (size_t i = 0; i < what->n_prompts; i++) {
        if (what->prompts[i] < 1 || what->prompts[i] >= plan->max_model_len)
            return error_set(err, LINNET_TOO_LONG,
                             "a prompt of %d tokens and one more do not fit into max_model_len %d",
                             what->prompts[i], plan->max_model_len);
        if (what->prompts[i] > longest) longest = what->prompts[i];
    }
    for (size_t i = 0; i < what->n_batches; i++) {
        if (what->batches[i] < 1 || what->batches[i] > plan->max_num_seqs)
            return error_set(err, LINNET_INVALID,
                             "batch: expected 1 to max_num_seqs (%d), found %d", plan->max_num_seqs,
                             what->batches[i]);
        if (what->batches[i] > widest) widest = what->batches[i];
    }
    int64_t blocks = (int64_t)widest * blocks_for(longest + 1);
    if (blocks <= plan->n_blocks) return LINNET_OK;
    return error_set(err, LINNET_TOO_LONG,
                     "%d sequences of %d tokens take %lld blocks of the cache and it has %d: raise "
                     "kv_cache_memory",
                     widest, longest + 1, (long long)blocks, plan->n_blocks);
}

static linnet_status make_room(struct measuring *m, const linnet_operations_options *what,
                               const struct limits *limits, linnet_error *err)
{
    size_t tokens = (size_t)limits->max_tokens, seqs = (size_t)limits->max_seqs;
    size_t runs = (size_t)(what->repeat > what->decode_steps ? what->repeat : what->decode_steps);
    m->max_blocks = blocks_for(limits->max_context);
    size_t n = 4 * tokens + 3 * seqs + 1 + seqs * (size_t)m->max_blocks;
    m->numbers = mem_new(n, sizeof *m->numbers);
    m->times = mem_new(runs, sizeof *m->times);
    if (!m->numbers || !m->times)
        return error_memory(err, "the steps", n * sizeof *m->numbers + runs * sizeof *m->times);
    m->now = m->times[0];
    m->token_ids = m->numbers;
    m->positions = m->token_ids + tokens;
    m->slots = m->positions + tokens;
    m->rope_lens = m->slots + tokens;
    m->rows = m->rope_lens + tokens;
    m->context_lens = m->rows + seqs;
    m->query_start = m->context_lens + seqs;
    m->tables = m->query_start + seqs + 1;
    m->step = (struct step){.max_blocks = m->max_blocks,
                            .token_ids = m->token_ids,
                            .positions = m->positions,
                            .slot_mapping = m->slots,
                            .query_start = m->query_start,
                            .context_lens = m->context_lens,
                            .block_tables = m->tables,
                            .logit_rows = m->rows,
                            .rope_lens = m->rope_lens};
    return LINNET_OK;
}

static linnet_status measure_all(struct measuring *m, const linnet_operations_options *what,
                                 linnet_error *err)
{
    linnet_status status = LINNET_OK;
    for (size_t i = 0; i < what->n_prompts && !status; i++) {
        status = measure_prefill(m, what->prompts[i], what->repeat, err);
        for (size_t k = 0; k < what->n_batches && !status; k++)
            status = measure_decode(m, what->batches[k], what->prompts[i], what->decode_steps, err);
    }
    return status;
}

linnet_status linnet_operations(linnet_model *model, const linnet_engine_options *options,
                                const linnet_operations_options *what, const linnet_peaks *peaks,
                                linnet_operation_fn on_row, void *user, linnet_error *err)
{
    static const linnet_engine_options defaults = {0};
    struct device device;
    linnet_plan plan;
    struct pool *pool = NULL;
    if (!options) options = &defaults;
    linnet_status status = find_device(options->device, &device, err);
    if (!status && device.gpu)
        status = error_set(err, LINNET_UNSUPPORTED,
                           "operations are timed on the CPU alone: a GPU starts them without "
                           "waiting for each; use --device cpu");
    if (!status) status = linnet_engine_plan(model, options, &plan, err);
    if (!status) status = check_what(what, &plan, err);
    if (status) return status;
    struct limits limits = plan_limits(&plan, options);
    struct measuring m = {.peaks = peaks,
                          .ops = device.ops,
                          .shape = &model->config.shape,
                          .on_row = on_row,
                          .user = user};
    status = weights_bind(model->checkpoint, &model->config, &m.weights, err);
    if (status) return status;
    status = make_room(&m, what, &limits, err);
    if (!status) status = pool_create(plan.threads, &pool, err);
    if (!status)
        status = decoder_create(model->checkpoint, &model->config, device.ops, pool, &limits, NULL,
                                NULL, &m.d, err);
    if (!status) status = measure_all(&m, what, err);
    decoder_destroy(m.d);
    pool_destroy(pool);
    weights_free(&m.weights);
    free(m.numbers);
    free(m.times);
    return status;
}
