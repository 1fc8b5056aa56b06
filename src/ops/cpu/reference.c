/*
 * reference.c - the plain backend: read it top to bottom to learn what the model computes. One
 * thread, fp32 weights and activations, sums in double, no vector code.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "ops/cpu/plain.h"
#include "ops/ops.h"

struct matrix {
    int64_t rows, columns;
    float *w; /* [rows, columns] */
    struct matrix *next;
};

struct vector {
    struct vector *next;
    float v[];
};

struct backend {
    struct shape shape;
    struct limits limits;
    struct matrix *matrices; /* all loaded ones, for close */
    struct vector *vectors;
    float *k, *v;      /* [n_layers, n_blocks * 16 slots, n_kv_heads, head_dim] */
    float *x;          /* [max_tokens, hidden] */
    float *norm;       /* [hidden] */
    float *qkv;        /* [(n_heads + 2 n_kv_heads) head_dim] */
    float *q;          /* [max_tokens, n_heads head_dim] */
    float *attn;       /* [max_tokens, n_heads head_dim] */
    float *gate_up;    /* [2 intermediate] */
    float *act;        /* [max_tokens, intermediate] */
    float *out;        /* [hidden] */
    float *scores;     /* [max_context] */
    float *logits;     /* [max_logits, vocab] */
    const float *rope; /* the step's rows */
};

/* ---- the small operations ---------------------------------------------------------------- */

void plain_rmsnorm(const float *x, const float *weight, int32_t n, float eps, float *out)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    float scale = (float)(1 / sqrt(sum / n + eps));
    for (int32_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

void plain_matvec(const float *w, const float *x, int64_t rows, int64_t columns, float *out)
{
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t c = 0; c < columns; c++) sum += (double)w[r * columns + c] * x[c];
        out[r] = (float)sum;
    }
}

void plain_rope(float *x, const float *row, int32_t head_dim)
{
    int32_t half = head_dim / 2;
    for (int32_t j = 0; j < half; j++) {
        float c = row[j], s = row[half + j], a = x[j], b = x[half + j];
        x[j] = a * c - b * s;
        x[half + j] = b * c + a * s;
    }
}

void plain_silu_mul(const float *gate, const float *up, int32_t n, float *out)
{
    for (int32_t i = 0; i < n; i++) out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* ---- memory ------------------------------------------------------------------------------ */

static void reference_close(struct backend *b)
{
    if (!b) return;
    for (struct matrix *m = b->matrices, *next; m; m = next) {
        next = m->next;
        free(m->w);
        free(m);
    }
    for (struct vector *v = b->vectors, *next; v; v = next) {
        next = v->next;
        free(v);
    }
    float *all[] = {b->k,    b->v,       b->x,   b->norm, b->qkv,    b->q,
                    b->attn, b->gate_up, b->act, b->out,  b->scores, b->logits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(b);
}

static int64_t reference_cache_bytes(const struct shape *s, enum kv_type kv, int32_t n_blocks)
{
    (void)kv;
    return 2 * (int64_t)sizeof(float) * s->n_layers * n_blocks * KV_BLOCK * s->n_kv_heads *
           s->head_dim;
}

static int64_t reference_buffer_bytes(const struct shape *s, const struct limits *l,
                                      int32_t n_threads)
{
    (void)n_threads; /* it computes on one */
    int64_t a_token = s->hidden + 2 * s->n_heads * s->head_dim + s->intermediate;
    return (int64_t)sizeof(float) * (l->max_tokens * a_token + (int64_t)l->max_logits * s->vocab);
}

static int64_t reference_matrix_bytes(enum dtype dtype, int64_t rows, int64_t columns)
{
    (void)dtype;
    return rows * columns * (int64_t)sizeof(float);
}

static linnet_status reference_open(const struct shape *shape, const struct limits *limits,
                                    struct pool *pool, struct backend **out, linnet_error *err)
{
    (void)pool;
    struct backend *b = mem_new(1, sizeof *b);
    if (!b) return error_memory(err, "the reference backend", sizeof *b);
    b->shape = *shape;
    b->limits = *limits;
    size_t tokens = (size_t)limits->max_tokens, head = (size_t)shape->head_dim;
    size_t cache = (size_t)reference_cache_bytes(shape, KV_OWN, limits->n_blocks) / 2;
    size_t q_size = (size_t)shape->n_heads * head, inter = (size_t)shape->intermediate;
    const struct {
        float **buffer;
        size_t count;
    } plan[] = {{&b->k, cache / sizeof(float)},
                {&b->v, cache / sizeof(float)},
                {&b->x, tokens * (size_t)shape->hidden},
                {&b->norm, (size_t)shape->hidden},
                {&b->qkv, q_size + 2 * (size_t)shape->n_kv_heads * head},
                {&b->q, tokens * q_size},
                {&b->attn, tokens * q_size},
                {&b->gate_up, 2 * inter},
                {&b->act, tokens * inter},
                {&b->out, (size_t)shape->hidden},
                {&b->scores, (size_t)limits->max_context},
                {&b->logits, (size_t)limits->max_logits * (size_t)shape->vocab}};
    for (size_t i = 0; i < sizeof plan / sizeof *plan; i++) {
        *plan[i].buffer = mem_new(plan[i].count, sizeof(float));
        if (!*plan[i].buffer) {
            reference_close(b);
            return error_memory(err, "a buffer of the reference backend",
                                plan[i].count * sizeof(float));
        }
    }
    *out = b;
    return LINNET_OK;
}

static linnet_status reference_load_matrix(struct backend *b, const struct matrix_part *parts,
                                           int n_parts, struct matrix **out, linnet_error *err)
{
    int64_t rows = 0, columns = parts[0].columns;
    for (int p = 0; p < n_parts; p++) rows += parts[p].rows;
    struct matrix *m = mem_new(1, sizeof *m);
    float *w = mem_new((size_t)(rows * columns), sizeof(float));
    if (!m || !w) {
        free(m);
        free(w);
        return error_memory(err, "a weight matrix", (size_t)(rows * columns) * sizeof(float));
    }
    *m = (struct matrix){rows, columns, w, b->matrices};
    b->matrices = m;
    for (int p = 0; p < n_parts; p++) {
        int64_t row_bytes = dtype_bytes(parts[p].dtype, columns);
        for (int64_t r = 0; r < parts[p].rows; r++, w += columns) {
            int64_t source = matrix_source_row(r, parts[p].interleaved);
            dtype_to_f32(parts[p].dtype, (const char *)parts[p].data + source * row_bytes, columns,
                         w);
        }
    }
    *out = m;
    return LINNET_OK;
}

static linnet_status reference_load_embedding(struct backend *b, const struct matrix_part *part,
                                              struct matrix **out, linnet_error *err)
{
    return reference_load_matrix(b, part, 1, out, err);
}

static linnet_status reference_load_vector(struct backend *b, const float *values, int64_t n,
                                           struct vector **out, linnet_error *err)
{
    struct vector *v = mem_new(1, sizeof *v + (size_t)n * sizeof(float));
    if (!v) return error_memory(err, "a weight vector", (size_t)n * sizeof(float));
    memcpy(v->v, values, (size_t)n * sizeof(float));
    v->next = b->vectors;
    b->vectors = v;
    *out = v;
    return LINNET_OK;
}

/* ---- the operations, in model order ------------------------------------------------------- */

static void reference_begin(struct backend *b, const struct step *s, const float *rope, bool whole)
{
    (void)s, (void)whole;
    b->rope = rope;
}

static void reference_embed(struct backend *b, const struct step *s, const struct matrix *e)
{
    size_t hidden = (size_t)b->shape.hidden;
    for (int32_t t = 0; t < s->n_tokens; t++)
        memcpy(b->x + (size_t)t * hidden, e->w + (size_t)s->token_ids[t] * hidden,
               hidden * sizeof(float));
}

/* Where K (or V) of one slot and layer begins: [n_kv_heads, head_dim]. */
static size_t slot_offset(const struct backend *b, int32_t layer, int32_t slot)
{
    size_t slots = (size_t)b->limits.n_blocks * KV_BLOCK;
    size_t kv_size = (size_t)(b->shape.n_kv_heads * b->shape.head_dim);
    return ((size_t)layer * slots + (size_t)slot) * kv_size;
}

static void reference_qkv(struct backend *b, const struct step *s, int32_t layer,
                          const struct layer *w)
{
    const struct shape *shape = &b->shape;
    int32_t head_dim = shape->head_dim, q_size = shape->n_heads * head_dim;
    int32_t kv_size = shape->n_kv_heads * head_dim;
    for (int32_t t = 0; t < s->n_tokens; t++) {
        const float *row = b->rope + (size_t)t * (size_t)head_dim;
        float *q = b->qkv, *k = b->qkv + q_size, *v = k + kv_size;
        plain_rmsnorm(b->x + (size_t)t * (size_t)shape->hidden, w->input_norm->v, shape->hidden,
                      shape->norm_eps, b->norm);
        plain_matvec(w->qkv->w, b->norm, w->qkv->rows, w->qkv->columns, b->qkv);
        if (w->qkv_bias)
            for (int32_t i = 0; i < q_size + 2 * kv_size; i++) b->qkv[i] += w->qkv_bias->v[i];
        for (int32_t h = 0; h < shape->n_heads + shape->n_kv_heads; h++) {
            const struct vector *norm = h < shape->n_heads ? w->q_norm : w->k_norm;
            float *head = b->qkv + h * head_dim;
            if (norm) plain_rmsnorm(head, norm->v, head_dim, shape->norm_eps, head);
            plain_rope(head, row, head_dim);
        }
        memcpy(b->q + (size_t)t * (size_t)q_size, q, (size_t)q_size * sizeof(float));
        size_t at = slot_offset(b, layer, s->slot_mapping[t]);
        memcpy(b->k + at, k, (size_t)kv_size * sizeof(float));
        memcpy(b->v + at, v, (size_t)kv_size * sizeof(float));
    }
}

/* One query head over keys 0..n-1 of its sequence. */
static void attend(struct backend *b, const float *q, const int32_t *block_table, int32_t layer,
                   int32_t kv_head, int32_t n, float *out)
{
    int32_t head_dim = b->shape.head_dim;
    float scale = 1.0f / sqrtf((float)head_dim), max = -INFINITY;
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t slot = block_table[i / KV_BLOCK] * KV_BLOCK + i % KV_BLOCK;
        const float *k = b->k + slot_offset(b, layer, slot) + kv_head * head_dim;
        double dot = 0;
        for (int32_t d = 0; d < head_dim; d++) dot += (double)q[d] * k[d];
        b->scores[i] = (float)dot * scale;
        if (b->scores[i] > max) max = b->scores[i];
    }
    for (int32_t i = 0; i < n; i++) {
        b->scores[i] = expf(b->scores[i] - max);
        sum += b->scores[i];
    }
    for (int32_t d = 0; d < head_dim; d++) out[d] = 0;
    for (int32_t i = 0; i < n; i++) {
        int32_t slot = block_table[i / KV_BLOCK] * KV_BLOCK + i % KV_BLOCK;
        const float *v = b->v + slot_offset(b, layer, slot) + kv_head * head_dim;
        float p = (float)(b->scores[i] / sum);
        for (int32_t d = 0; d < head_dim; d++) out[d] += p * v[d];
    }
}

static void reference_attention(struct backend *b, const struct step *s, int32_t layer)
{
    const struct shape *shape = &b->shape;
    int32_t group = shape->n_heads / shape->n_kv_heads, head_dim = shape->head_dim;
    for (int32_t seq = 0; seq < s->n_seqs; seq++) {
        const int32_t *block_table = s->block_tables + (size_t)seq * (size_t)s->max_blocks;
        for (int32_t t = s->query_start[seq]; t < s->query_start[seq + 1]; t++) {
            int32_t n_keys = s->positions[t] + 1; /* causal */
            for (int32_t h = 0; h < shape->n_heads; h++) {
                size_t at = ((size_t)t * (size_t)shape->n_heads + (size_t)h) * (size_t)head_dim;
                attend(b, b->q + at, block_table, layer, h / group, n_keys, b->attn + at);
            }
        }
    }
}

/* x[t] += W in[t] (+ bias) for every token */
static void add_product(struct backend *b, const struct step *s, const struct matrix *w,
                        const float *in, const struct vector *bias)
{
    for (int32_t t = 0; t < s->n_tokens; t++) {
        float *x = b->x + (size_t)t * (size_t)w->rows;
        plain_matvec(w->w, in + (size_t)t * (size_t)w->columns, w->rows, w->columns, b->out);
        for (int64_t i = 0; i < w->rows; i++) x[i] += bias ? b->out[i] + bias->v[i] : b->out[i];
    }
}

static void reference_o_proj(struct backend *b, const struct step *s, const struct layer *w)
{
    add_product(b, s, w->o_proj, b->attn, w->o_bias);
}

static void reference_gate_up(struct backend *b, const struct step *s, const struct layer *w)
{
    int32_t hidden = b->shape.hidden, n = b->shape.intermediate;
    for (int32_t t = 0; t < s->n_tokens; t++) {
        plain_rmsnorm(b->x + (size_t)t * (size_t)hidden, w->post_norm->v, hidden, b->shape.norm_eps,
                      b->norm);
        plain_matvec(w->gate_up->w, b->norm, w->gate_up->rows, w->gate_up->columns, b->gate_up);
        plain_silu_mul(b->gate_up, b->gate_up + n, n, b->act + (size_t)t * (size_t)n);
    }
}

static void reference_down(struct backend *b, const struct step *s, const struct layer *w)
{
    add_product(b, s, w->down, b->act, NULL);
}

static void reference_head(struct backend *b, const struct step *s, const struct vector *norm,
                           const struct matrix *w)
{
    int32_t hidden = b->shape.hidden;
    for (int32_t i = 0; i < s->n_logits; i++) {
        plain_rmsnorm(b->x + (size_t)s->logit_rows[i] * (size_t)hidden, norm->v, hidden,
                      b->shape.norm_eps, b->norm);
        plain_matvec(w->w, b->norm, w->rows, w->columns,
                     b->logits + (size_t)i * (size_t)b->shape.vocab);
    }
}

static linnet_status reference_finish(struct backend *b, linnet_error *err)
{
    (void)b, (void)err;
    return LINNET_OK;
}

/* ---- looking at results ------------------------------------------------------------------- */

static const float *reference_logits(struct backend *b, int32_t i)
{
    return b->logits + (size_t)i * (size_t)b->shape.vocab;
}

static void reference_read_buffer(struct backend *b, enum buffer which, int32_t row, float *out)
{
    const struct shape *s = &b->shape;
    const struct {
        const float *data;
        int32_t width;
    } from[] = {[BUFFER_X] = {b->x, s->hidden},
                [BUFFER_Q] = {b->q, s->n_heads * s->head_dim},
                [BUFFER_ATTN] = {b->attn, s->n_heads * s->head_dim},
                [BUFFER_ACT] = {b->act, s->intermediate},
                [BUFFER_LOGITS] = {b->logits, s->vocab}};
    size_t width = (size_t)from[which].width;
    memcpy(out, from[which].data + (size_t)row * width, width * sizeof(float));
}

static void reference_read_kv(struct backend *b, int32_t layer, int32_t slot, float *k, float *v)
{
    size_t at = slot_offset(b, layer, slot), n = (size_t)(b->shape.n_kv_heads * b->shape.head_dim);
    memcpy(k, b->k + at, n * sizeof(float));
    memcpy(v, b->v + at, n * sizeof(float));
}

static double reference_activation_error(enum dtype dtype)
{
    (void)dtype;
    return 0;
}

const struct ops ops_reference = {
    .name = "reference",
    .activation_error = reference_activation_error,
    .open = reference_open,
    .close = reference_close,
    .load_matrix = reference_load_matrix,
    .load_embedding = reference_load_embedding,
    .load_vector = reference_load_vector,
    .matrix_bytes = reference_matrix_bytes,
    .embedding_bytes = reference_matrix_bytes,
    .cache_bytes = reference_cache_bytes,
    .buffer_bytes = reference_buffer_bytes,
    .begin = reference_begin,
    .embed = reference_embed,
    .qkv = reference_qkv,
    .attention = reference_attention,
    .o_proj = reference_o_proj,
    .gate_up = reference_gate_up,
    .down = reference_down,
    .head = reference_head,
    .finish = reference_finish,
    .logits = reference_logits,
    .read_buffer = reference_read_buffer,
    .read_kv = reference_read_kv,
};
