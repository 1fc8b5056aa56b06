/*
 * check.c - a device against the plain reference: each operation on layers of published widths
 * with random weights, then a model's logits, then the model's goldens where there are some.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/random.h"
#include "base/threads.h"
#include "engine/check_internal.h"
#include "model/random.h"
#include "model/simple.h"

void check_report(struct check *c, const char *operation, const char *dtype, const char *shape,
                  double max_abs, double rms_rel, double bound)
{
    linnet_check_row row = {operation, c->device.text, dtype, shape,
                            max_abs,   rms_rel,        bound, rms_rel <= bound};
    if (!row.pass) c->n_failed++; /* NaN fails too */
    c->on_row(c->user, &row);
}

void check_compare(struct check *c, const char *operation, const char *dtype, const char *shape,
                   const float *got, const float *want, size_t n, double bound)
{
    double max = 0, sum = 0, sum_want = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)got[i] - want[i]);
        if (!(d <= max)) max = d;
        sum += d * d;
        sum_want += (double)want[i] * want[i];
    }
    check_report(c, operation, dtype, shape, max, sqrt(sum / (sum_want > 0 ? sum_want : 1)), bound);
}

double check_bound(double activation_error, int64_t longest_sum, double n_roundings)
{
    return 0x1p-22 * sqrt((double)longest_sum) + 2 * activation_error * sqrt(n_roundings);
}

/* ---- one layer, operation by operation ------------------------------------------------------- */

/* A decoder on the device and one on the reference, fed with the same steps. */
struct pair {
    struct check *check;
    const struct model_config *config;
    struct decoder *device, *reference;
    const char *dtype;
    char shape[64];
    int32_t first, n_tokens; /* positions of the step */
    float *want;             /* room for the widest operation */
    float *kept;             /* what the device gave, operation by operation */
    size_t n_kept, at;
};

/* The values that an operation has left: all rows of its buffer, and of the cache after qkv. */
static size_t collect(const struct pair *p, const struct decoder *d, const char *operation,
                      int32_t layer, float *out)
{
    const struct shape *s = &d->config->shape;
    size_t q = (size_t)(s->n_heads * s->head_dim), kv = (size_t)(s->n_kv_heads * s->head_dim),
           n = 0;
    enum buffer which = BUFFER_X;
    size_t width = (size_t)s->hidden;
    int32_t rows = p->n_tokens;
    if (strcmp(operation, "qkv") == 0) which = BUFFER_Q, width = q;
    if (strcmp(operation, "attention") == 0) which = BUFFER_ATTN, width = q;
    if (strcmp(operation, "gate_up") == 0) which = BUFFER_ACT, width = (size_t)s->intermediate;
    if (strcmp(operation, "head") == 0) which = BUFFER_LOGITS, width = (size_t)s->vocab, rows = 1;
    for (int32_t i = 0; i < rows; i++, n += width)
        d->ops->read_buffer(d->backend, which, i, out + n);
    if (which == BUFFER_Q)
        for (int32_t i = 0; i < rows; i++, n += 2 * kv)
            d->ops->read_kv(d->backend, layer, p->first + i, out + n, out + n + kv);
    return n;
}

static void keep(void *user, const char *operation, int32_t layer)
{
    struct pair *p = user;
    p->n_kept += collect(p, p->device, operation, layer, p->kept + p->n_kept);
}

enum { EACH = 3, LAYER_OPERATIONS = 5 }; /* roundings: of an operation's input, weights, output */

/* How often values have been rounded on the way to an operation's result in a model of one layer:
 * once in the embedding, then each operation's. */
static int32_t roundings(const char *operation)
{
    static const char *const order[] = {"embed",   "qkv",  "attention", "o_proj",
                                        "gate_up", "down", "head"};
    int32_t i = 0;
    while (strcmp(order[i], operation) != 0) i++;
    return 1 + EACH * i;
}

/* Likewise to the logits of n layers. What layer k adds is one part in k of the residual stream's
 * power by then, and so are its errors. */
static double roundings_of_layers(int32_t n)
{
    double sum = roundings("head");
    for (int32_t k = 2; k <= n; k++) sum += (double)EACH * LAYER_OPERATIONS / k;
    return sum;
}

static void compare(void *user, const char *operation, int32_t layer)
{
    struct pair *p = user;
    const struct shape *s = &p->config->shape;
    size_t n = collect(p, p->reference, operation, layer, p->want);
    int64_t longest = s->hidden > s->intermediate ? s->hidden : s->intermediate;
    if (strcmp(operation, "embed") == 0) longest = 0;
    double bound = check_bound(p->device->activation_error, longest, roundings(operation));
    check_compare(p->check, operation, p->dtype, p->shape, p->kept + p->at, p->want, n, bound);
    p->at += n;
}

/* Floats that one step's operations leave, all together. */
static size_t all_buffers(const struct shape *s, int32_t n_tokens)
{
    size_t q = (size_t)(s->n_heads * s->head_dim), kv = (size_t)(s->n_kv_heads * s->head_dim);
    return (size_t)n_tokens * (3 * (size_t)s->hidden + 2 * q + 2 * kv + (size_t)s->intermediate) +
           (size_t)s->vocab;
}

enum { LONG = 300, MAX_BLOCKS = LONG / KV_BLOCK + 1 }; /* tokens; more than a chunk of keys */

/* The next n tokens of the sequence, on both. */
static linnet_status run_pair(struct pair *p, int32_t n, linnet_error *err)
{
    int32_t ids[LONG], positions[LONG], lens[LONG], query_start[2] = {0, n}, context = p->first + n,
                                                    last = n - 1;
    int32_t blocks[MAX_BLOCKS];
    for (int32_t i = 0; i < n; i++) {
        positions[i] = p->first + i;
        ids[i] =
            (int32_t)(random_u64(1, (uint64_t)positions[i], 0) % (uint64_t)p->config->shape.vocab);
        lens[i] = LONG;
    }
    for (int32_t i = 0; i < MAX_BLOCKS; i++) blocks[i] = i;
    struct step s = {.n_tokens = n,
                     .n_seqs = 1,
                     .n_logits = 1,
                     .max_blocks = MAX_BLOCKS,
                     .token_ids = ids,
                     .positions = positions,
                     .slot_mapping = positions,
                     .query_start = query_start,
                     .context_lens = &context,
                     .block_tables = blocks,
                     .logit_rows = &last,
                     .rope_lens = lens};
    snprintf(p->shape + strcspn(p->shape, ","), sizeof p->shape - strcspn(p->shape, ","),
             ", %d at %d", n, p->first);
    p->n_tokens = n;
    p->n_kept = p->at = 0;
    linnet_status status = decoder_step_observed(p->device, &s, keep, p, err);
    if (!status) status = decoder_step_observed(p->reference, &s, compare, p, err);
    p->first += n;
    return status;
}

/* What the layer takes on both sides: its weights in the file's form, packed, and as fp32. */
static linnet_status check_room(const struct random_shape *s, linnet_error *err)
{
    int64_t a_layer =
        (int64_t)s->hidden * (3 * (int64_t)s->intermediate + 2 * (int64_t)s->heads * s->head_dim +
                              2 * (int64_t)s->kv_heads * s->head_dim);
    int64_t need = 3 * (int64_t)sizeof(float) * (a_layer + 2 * (int64_t)s->vocab * s->hidden),
            left = available_memory();
    if (need <= left) return LINNET_OK;
    return error_set(err, LINNET_MEMORY,
                     "checking a layer of %s takes %lld bytes and %lld are free", s->name,
                     (long long)need, (long long)left);
}

/* A prompt of n tokens, then one token: the many- and the one-token forms of each operation. */
static linnet_status check_layer(struct check *c, const struct random_shape *shape,
                                 enum dtype dtype, int32_t n, linnet_error *err)
{
    struct limits limits = {.max_tokens = n,
                            .max_logits = 1,
                            .max_seqs = 1,
                            .max_context = LONG + 1,
                            .n_blocks = MAX_BLOCKS};
    struct checkpoint *cp;
    struct model_config config;
    struct pair p = {.check = c, .config = &config, .dtype = dtype_name(dtype)};
    snprintf(p.shape, sizeof p.shape, "%s", shape->name);
    linnet_status status = check_room(shape, err);
    if (!status) status = random_checkpoint_of(shape, dtype, 1, &cp, err);
    if (status) return status;
    status = model_config_read(cp, &config, err);
    if (!status)
        status = decoder_create(cp, &config, c->device.ops, c->pool, &limits, NULL, NULL, &p.device,
                                err);
    if (!status)
        status = decoder_create(cp, &config, &ops_reference, c->pool, &limits, NULL, NULL,
                                &p.reference, err);
    if (!status) {
        size_t room = all_buffers(&config.shape, n);
        p.want = mem_new(room, sizeof(float));
        p.kept = mem_new(room, sizeof(float));
        if (!p.want || !p.kept)
            status = error_memory(err, "the comparison", room * 2 * sizeof(float));
    }
    if (!status) status = run_pair(&p, n, err);
    if (!status) status = run_pair(&p, 1, err);
    free(p.want);
    free(p.kept);
    decoder_destroy(p.device);
    decoder_destroy(p.reference);
    checkpoint_close(cp);
    return status;
}

/* Every type of weights on a small layer, then layers of the published models in bf16, one each,
 * with a small vocabulary; the last of them with more keys than a chunk of attention. */
static linnet_status check_operations(struct check *c, linnet_error *err)
{
    enum { SHORT = 37 }; /* more than two blocks, and no whole tile */
    struct random_shape small = *random_shape_at(0);
    small.name = "small", small.layers = 1, small.vocab = 1003; /* no multiple of a panel */
    small.hidden = 512, small.intermediate = 1024, small.heads = 8, small.kv_heads = 2,
    small.head_dim = 64;
    linnet_status status = LINNET_OK;
    for (enum dtype dtype = DTYPE_F32; dtype < DTYPE_COUNT && !status; dtype++)
        status = check_layer(c, &small, dtype, SHORT, err);
    for (int32_t i = 0; i < random_shape_count() && !status; i++) {
        struct random_shape shape = *random_shape_at(i);
        shape.layers = 1;
        shape.vocab = 1024;
        status =
            check_layer(c, &shape, DTYPE_BF16, i == random_shape_count() - 1 ? LONG : SHORT, err);
    }
    return status;
}

/* ---- a model ----------------------------------------------------------------------------- */

/* The same prompt on both, all rows of logits. */
static linnet_status check_model(struct check *c, linnet_model *m, linnet_error *err)
{
    static const struct limits limits = {
        .max_tokens = 32, .max_logits = 32, .max_seqs = 1, .max_context = 32, .n_blocks = 2};
    const struct shape *s = &m->config.shape;
    int32_t ids[24], n = 24;
    char shape[64];
    size_t count = (size_t)n * (size_t)s->vocab;
    float *logits[2] = {mem_new(count, sizeof(float)), mem_new(count, sizeof(float))};
    const struct ops *ops[2] = {c->device.ops, &ops_reference};
    double error = 0;
    linnet_status status = logits[0] && logits[1]
                               ? LINNET_OK
                               : error_memory(err, "the logits", 2 * count * sizeof(float));
    for (int32_t i = 0; i < n; i++)
        ids[i] = (int32_t)(random_u64(2, (uint64_t)i, 0) % (uint64_t)s->vocab);
    for (int i = 0; i < 2 && !status; i++) {
        struct decoder *d = NULL;
        struct simple *simple = NULL;
        status = decoder_create(m->checkpoint, &m->config, ops[i], c->pool, &limits, NULL, NULL, &d,
                                err);
        if (!status) status = simple_create(d, &simple, err);
        if (!status) status = simple_forward(simple, ids, n, 0, n, 0, true, logits[i], err);
        if (!status && i == 0) error = d->activation_error;
        simple_destroy(simple);
        decoder_destroy(d);
    }
    snprintf(shape, sizeof shape, "[%d, %d]", n, s->vocab);
    double bound =
        check_bound(error, (int64_t)s->hidden * s->n_layers, roundings_of_layers(s->n_layers));
    if (!status) check_compare(c, "logits", m->dtype, shape, logits[0], logits[1], count, bound);
    free(logits[0]);
    free(logits[1]);
    return status;
}

/* The reference keeps fp32 weights: refuse before the machine starts to swap. */
static linnet_status check_memory(const linnet_model *m, linnet_error *err)
{
    int64_t need = 0, left = available_memory();
    linnet_status status =
        decoder_check_tensors(m->checkpoint, &m->config, &ops_reference, &need, err);
    if (!status && need > left - left / 8)
        status = error_set(err, LINNET_MEMORY,
                           "the plain reference of %s takes %lld bytes and %lld are free: check a "
                           "smaller model of this kind",
                           m->name, (long long)need, (long long)left);
    return status;
}

linnet_status linnet_check(linnet_model *model, const char *device, int32_t threads,
                           linnet_check_fn on_row, void *user, int32_t *n_failed, linnet_error *err)
{
    struct check c = {.on_row = on_row, .user = user};
    linnet_status status = find_device(device, &c.device, err);
    if (!status && model && !model->checkpoint)
        status = error_set(err, LINNET_INVALID, "%s is a tokenizer: a model is needed to check one",
                           model->path);
    if (!status) status = pool_create(threads, &c.pool, err);
    if (status) return status;
    status = check_operations(&c, err);
    if (!status && model) status = check_memory(model, err);
    if (!status && model) status = check_model(&c, model, err);
    if (!status && model) status = check_goldens(&c, model, err);
    pool_destroy(c.pool);
    *n_failed = c.n_failed;
    return status;
}
