#include "model/decoder.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "model/weights.h"

/* ---- the forward pass, in model order ----------------------------------------------------- */

static void prepare_rope(struct decoder *d, const struct step *s)
{
    int32_t head_dim = d->config->shape.head_dim;
    if (!d->rope_rows) return; /* the device has them all */
    for (int32_t t = 0; t < s->n_tokens; t++) {
        int32_t length = s->rope_lens ? s->rope_lens[t] : 0;
        rope_row(&d->rope, s->positions[t], length, d->rope_rows + (size_t)t * (size_t)head_dim);
    }
}

static void ignore(void *user, const char *operation, int32_t layer)
{
    (void)user, (void)operation, (void)layer;
}

static void enqueue(struct decoder *d, const struct step *s, decoder_observe_fn observe, void *user)
{
    const struct ops *ops = d->ops;
    struct backend *b = d->backend;
    prepare_rope(d, s);
    ops->begin(b, s, d->rope_rows, observe == ignore);
    ops->embed(b, s, d->embedding);
    observe(user, "embed", -1);
    for (int32_t i = 0; i < d->config->shape.n_layers; i++) {
        const struct layer *layer = &d->layers[i];
        ops->qkv(b, s, i, layer);
        observe(user, "qkv", i);
        ops->attention(b, s, i);
        observe(user, "attention", i);
        ops->o_proj(b, s, layer);
        observe(user, "o_proj", i);
        ops->gate_up(b, s, layer);
        observe(user, "gate_up", i);
        ops->down(b, s, layer);
        observe(user, "down", i);
    }
    if (s->n_logits > 0) ops->head(b, s, d->final_norm, d->head);
    observe(user, "head", -1);
}

linnet_status decoder_step_observed(struct decoder *d, const struct step *s,
                                    decoder_observe_fn observe, void *user, linnet_error *err)
{
    enqueue(d, s, observe, user);
    return d->ops->finish(d->backend, err);
}

linnet_status decoder_step(struct decoder *d, const struct step *s, linnet_error *err)
{
    return decoder_step_observed(d, s, ignore, NULL, err);
}

bool decoder_can_choose(const struct decoder *d)
{
    return d->ops->submit != NULL;
}

linnet_status decoder_submit(struct decoder *d, const struct step *s,
                             const struct choice_rule *rules, linnet_error *err)
{
    enqueue(d, s, ignore, NULL);
    if (s->n_logits > 0) d->ops->choose(d->backend, s, rules);
    return d->ops->submit(d->backend, err);
}

linnet_status decoder_collect(struct decoder *d, const struct chosen **out, linnet_error *err)
{
    return d->ops->collect(d->backend, out, err);
}

const float *decoder_logits(const struct decoder *d, int32_t i)
{
    return d->ops->logits(d->backend, i);
}

/* ---- loading ------------------------------------------------------------------------------ */

struct loader {
    const struct checkpoint *cp;
    struct decoder *d;
    decoder_progress_fn progress;
    void *user;
    int64_t done, total;
    struct packed *packed; /* or NULL */
    linnet_error *err;
    linnet_status status;
};

static void loaded(struct loader *l, const struct tensor *t)
{
    checkpoint_release(l->cp, t);
    l->done += (int64_t)t->bytes;
    if (l->progress) l->progress(l->user, l->done, l->total);
}

/* What a file of packed weights must have in this place. */
static void describe(struct loader *l, const struct tensor *const *tensors, int n,
                     const struct matrix_part *parts, int n_parts)
{
    for (int i = 0; i < n && tensors[i]; i++)
        packed_describe(l->packed, tensors[i]->name, strlen(tensors[i]->name) + 1);
    for (int i = 0; i < n_parts; i++) {
        int64_t facts[] = {parts[i].dtype, parts[i].rows, parts[i].columns, parts[i].interleaved,
                           parts[i].paired};
        packed_describe(l->packed, facts, sizeof facts);
    }
}

/*
 * Stacks up to three tensors (NULL ends the list) into one matrix. Of the stack's rows the first
 * `turned` (those of q and k) are interleaved by heads of `head_dim`; a file that has q, k and v
 * in one tensor needs it cut there.
 */
static struct matrix *load_stacked(struct loader *l, const struct tensor *const *tensors, int n,
                                   int64_t turned, int32_t head_dim, bool paired)
{
    struct matrix_part parts[4];
    struct matrix *m = NULL;
    int n_parts = 0;
    int64_t row = 0;
    if (l->status != LINNET_OK) return NULL;
    for (int i = 0; i < n && tensors[i]; i++) {
        const struct tensor *t = tensors[i];
        int64_t rows = t->shape[0], columns = t->shape[1],
                row_bytes = dtype_bytes(t->dtype, columns);
        int64_t head = row >= turned ? 0 : rows < turned - row ? rows : turned - row;
        const char *data = t->data;
        if (head)
            parts[n_parts++] = (struct matrix_part){t->dtype, data, head, columns, head_dim, false};
        if (head < rows)
            parts[n_parts++] = (struct matrix_part){
                t->dtype, data + head * row_bytes, rows - head, columns, 0, paired};
        row += rows;
    }
    if (l->packed) describe(l, tensors, n, parts, n_parts);
    l->status = l->d->ops->load_matrix(l->d->backend, parts, n_parts, &m, l->err);
    for (int i = 0; i < n && tensors[i]; i++) {
        double error = l->d->ops->activation_error(tensors[i]->dtype);
        if (error > l->d->activation_error) l->d->activation_error = error;
        loaded(l, tensors[i]);
    }
    return m;
}

static struct matrix *load_one(struct loader *l, const struct tensor *t)
{
    return load_stacked(l, &t, 1, 0, 0, false);
}

/* The same for vectors, as fp32. */
static struct vector *load_vectors(struct loader *l, const struct tensor *const *tensors, int n,
                                   int64_t turned, int32_t head_dim)
{
    int64_t count = 0, at = 0;
    struct vector *v = NULL;
    if (l->status != LINNET_OK || !tensors[0]) return NULL;
    for (int i = 0; i < n && tensors[i]; i++) count += tensors[i]->shape[0];
    float *raw = mem_new((size_t)count * 2, sizeof(float));
    if (!raw) {
        l->status = error_memory(l->err, "a weight vector", (size_t)count * 2 * sizeof(float));
        return NULL;
    }
    float *values = raw + count;
    for (int i = 0; i < n && tensors[i]; at += tensors[i++]->shape[0]) {
        dtype_to_f32(tensors[i]->dtype, tensors[i]->data, tensors[i]->shape[0], raw + at);
        loaded(l, tensors[i]);
    }
    for (int64_t r = 0; r < count; r++)
        values[r] = raw[r < turned ? matrix_source_row(r, head_dim) : r];
    l->status = l->d->ops->load_vector(l->d->backend, values, count, &v, l->err);
    free(raw);
    return v;
}

static struct vector *load_norm(struct loader *l, const struct tensor *t)
{
    return load_vectors(l, &t, 1, 0, 0);
}

static void load_layer(struct loader *l, const struct layer_tensors *t, bool interleaved,
                       struct layer *out)
{
    const struct shape *s = &l->d->config->shape;
    int64_t turned = interleaved ? (int64_t)(s->n_heads + s->n_kv_heads) * s->head_dim : 0;
    const struct tensor *gate_up[2] = {t->gate, t->up};
    out->input_norm = load_norm(l, t->input_norm);
    out->qkv = load_stacked(l, t->qkv, 3, turned, s->head_dim, false);
    out->qkv_bias = load_vectors(l, t->bias, 3, turned, s->head_dim);
    out->q_norm = load_norm(l, t->q_norm);
    out->k_norm = load_norm(l, t->k_norm);
    out->o_proj = load_one(l, t->o_proj);
    out->o_bias = load_norm(l, t->o_bias);
    out->post_norm = load_norm(l, t->post_norm);
    out->gate_up = load_stacked(l, gate_up, 2, 0, 0, true);
    out->down = load_one(l, t->down);
}

static linnet_status load_rope(struct decoder *d, const struct tensor *freqs, linnet_error *err)
{
    const struct shape *s = &d->config->shape;
    if (freqs) {
        d->rope_divisors = mem_new((size_t)s->head_dim / 2, sizeof(float));
        if (!d->rope_divisors)
            return error_memory(err, "RoPE frequencies", (size_t)s->head_dim * 2);
        dtype_to_f32(freqs->dtype, freqs->data, s->head_dim / 2, d->rope_divisors);
    }
    return rope_create(&d->config->rope, s->head_dim, d->limits.max_context, d->rope_divisors,
                       &d->rope, err);
}

/* Rows for the operations: all of them now, or room for those of a step. */
static linnet_status share_rope(struct decoder *d, linnet_error *err)
{
    size_t head_dim = (size_t)d->config->shape.head_dim;
    size_t tokens = (size_t)d->limits.max_tokens;
    if (d->rope.table && d->ops->use_rope) {
        struct vector *table;
        rope_fill(&d->rope, d->limits.max_context);
        int64_t n = (int64_t)d->limits.max_context * (int64_t)head_dim;
        linnet_status status = d->ops->load_vector(d->backend, d->rope.table, n, &table, err);
        if (status == LINNET_OK) d->ops->use_rope(d->backend, table);
        return status;
    }
    d->rope_rows = mem_new(tokens * head_dim, sizeof(float));
    if (d->rope_rows) return LINNET_OK;
    return error_memory(err, "RoPE rows", tokens * head_dim * sizeof(float));
}

static void load_all(struct loader *l, const struct checkpoint *cp, const struct weights *w)
{
    struct decoder *d = l->d;
    const struct tensor *e = w->embedding;
    struct matrix_part embedding = {e->dtype, e->data, e->shape[0], e->shape[1], 0, false};
    l->status = d->ops->load_embedding(d->backend, &embedding, &d->embedding, l->err);
    bool interleaved = cp->gguf && d->config->arch == ARCH_LLAMA; /* and in no other files */
    for (int32_t i = 0; i < d->config->shape.n_layers; i++)
        load_layer(l, &w->layers[i], interleaved, &d->layers[i]);
    d->final_norm = load_norm(l, w->final_norm);
    for (int32_t i = 0; i < d->config->shape.n_layers; i++)
        d->layers[i].next_norm =
            i + 1 < d->config->shape.n_layers ? d->layers[i + 1].input_norm : d->final_norm;
    d->head = load_one(l, w->head);
}

/* packed: taken over when it succeeds; NULL: none */
static linnet_status create(const struct checkpoint *cp, const struct model_config *config,
                            const struct ops *ops, struct pool *pool, const struct limits *limits,
                            decoder_progress_fn progress, void *user, struct packed *packed,
                            struct decoder **out, linnet_error *err)
{
    struct weights w;
    linnet_status status = weights_bind(cp, config, &w, err);
    if (status != LINNET_OK) return status;
    struct decoder *d = mem_new(1, sizeof *d);
    struct layer *layers = mem_new((size_t)config->shape.n_layers, sizeof *layers);
    if (!d || !layers) {
        free(d);
        free(layers);
        weights_free(&w);
        return error_memory(err, "the decoder", sizeof *d);
    }
    *d = (struct decoder){.config = config, .ops = ops, .limits = *limits, .layers = layers};
    status = load_rope(d, w.rope_freqs, err);
    if (status == LINNET_OK) status = ops->open(&config->shape, limits, pool, &d->backend, err);
    if (status == LINNET_OK) status = share_rope(d, err);
    if (status == LINNET_OK && packed)
        ops->use_store(d->backend, &(struct store){packed, packed_next});
    if (status == LINNET_OK) {
        struct loader l = {
            .cp = cp, .d = d, .progress = progress, .user = user, .packed = packed, .err = err};
        for (size_t i = 0; i < cp->n_tensors; i++) l.total += (int64_t)cp->tensors[i].bytes;
        load_all(&l, cp, &w);
        status = l.status;
        if (status == LINNET_OK && packed) status = packed_complete(packed, err);
        if (status == LINNET_OK && ops->loaded) status = ops->loaded(d->backend, err);
        if (progress && status == LINNET_OK) progress(user, l.total, l.total);
    }
    weights_free(&w);
    if (status != LINNET_OK) {
        decoder_destroy(d);
        return status;
    }
    d->packed = packed;
    *out = d;
    return LINNET_OK;
}

linnet_status decoder_create(const struct checkpoint *cp, const struct model_config *config,
                             const struct ops *ops, struct pool *pool, const struct limits *limits,
                             decoder_progress_fn progress, void *user, struct decoder **out,
                             linnet_error *err)
{
    struct packed *packed = NULL;
    linnet_error unpacked = {LINNET_OK, ""};
    if (ops->layout && !limits->interleaved) /* a file's pages are where they are */
        unpacked.status = packed_open(cp, ops->layout, pool, &packed, &unpacked);
    linnet_status status = LINNET_INVALID;
    if (packed) {
        status = create(cp, config, ops, pool, limits, progress, user, packed, out, &unpacked);
        if (status) packed_close(packed);
        unpacked.status = status;
    }
    if (status) status = create(cp, config, ops, pool, limits, progress, user, NULL, out, err);
    if (!status) (*out)->unpacked = unpacked;
    return status;
}

linnet_status decoder_pack(const struct checkpoint *cp, const struct model_config *config,
                           const struct ops *ops, struct pool *pool, decoder_progress_fn progress,
                           void *user, int64_t *bytes, linnet_error *err)
{
    struct limits least = {
        .max_tokens = 1, .max_logits = 1, .max_seqs = 1, .max_context = KV_BLOCK, .n_blocks = 1};
    struct packed *packed;
    struct decoder *d = NULL;
    if (!ops->layout)
        return error_set(err, LINNET_UNSUPPORTED, "%s takes no packed weights", ops->name);
    linnet_status status = packed_create(cp, ops->layout, false, &packed, err);
    if (status) return status;
    status = create(cp, config, ops, pool, &least, progress, user, packed, &d, err);
    if (status)
        packed_close(packed);
    else
        status = packed_commit(packed, pool, bytes, err);
    decoder_destroy(d);
    return status;
}

void decoder_destroy(struct decoder *d)
{
    if (!d) return;
    if (d->backend) d->ops->close(d->backend);
    packed_close(d->packed);
    rope_destroy(&d->rope);
    free(d->rope_divisors);
    free(d->rope_rows);
    free(d->layers);
    free(d);
}

/* ---- the plan ------------------------------------------------------------------------------ */

static int64_t vector_bytes(const struct tensor *t)
{
    return t ? t->shape[0] * (int64_t)sizeof(float) : 0;
}

static int64_t matrix_bytes(const struct ops *ops, const struct tensor *t)
{
    return t ? ops->matrix_bytes(t->dtype, t->shape[0], t->shape[1]) : 0;
}

static int64_t layer_bytes(const struct ops *ops, const struct layer_tensors *l)
{
    const struct tensor *matrices[] = {l->qkv[0], l->qkv[1], l->qkv[2], l->o_proj,
                                       l->gate,   l->up,     l->down};
    const struct tensor *vectors[] = {l->input_norm, l->post_norm, l->bias[0], l->bias[1],
                                      l->bias[2],    l->q_norm,    l->k_norm,  l->o_bias};
    int64_t bytes = 0;
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++)
        bytes += matrix_bytes(ops, matrices[i]);
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) bytes += vector_bytes(vectors[i]);
    return bytes;
}

int64_t decoder_buffer_bytes(const struct model_config *config, const struct limits *limits)
{
    int64_t head_dim = config->shape.head_dim,
            table = config->rope.kind == ROPE_DYNAMIC ? 0 : limits->max_context;
    return (limits->max_tokens + table) * head_dim * (int64_t)sizeof(float);
}

linnet_status decoder_check_tensors(const struct checkpoint *cp, const struct model_config *config,
                                    const struct ops *ops, int64_t *weight_bytes, linnet_error *err)
{
    struct weights w;
    linnet_status status = weights_bind(cp, config, &w, err);
    if (status != LINNET_OK) return status;
    int64_t bytes =
        vector_bytes(w.final_norm) + vector_bytes(w.rope_freqs) + matrix_bytes(ops, w.head);
    bytes += ops->embedding_bytes(w.embedding->dtype, w.embedding->shape[0], w.embedding->shape[1]);
    for (int32_t i = 0; i < config->shape.n_layers; i++) bytes += layer_bytes(ops, &w.layers[i]);
    weights_free(&w);
    *weight_bytes = bytes;
    return LINNET_OK;
}
