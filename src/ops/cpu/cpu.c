/*
 * cpu.c - the CPU backend: the vector kernels of kernels.c, on all threads of the pool. Between
 * two matrix products the caller's thread alone does what is too small to share.
 */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "ops/cpu/cpu_internal.h"

/* ---- memory ---------------------------------------------------------------------------------- */

/* Widths of the rows of each buffer; logits have rows of their own number. */
static int64_t row_width(const struct shape *s)
{
    int64_t q = (int64_t)s->n_heads * s->head_dim, kv = (int64_t)s->n_kv_heads * s->head_dim;
    return 2 * (int64_t)s->hidden + q + 2 * kv + q + (int64_t)s->intermediate;
}

static int64_t thread_scratch(const struct shape *s, const struct limits *l)
{
    int64_t product = cpu_product_scratch(s, l), attention = attention_scratch(s->head_dim);
    int64_t size = product > attention ? product : attention;
    return (size + 63) / 64 * 64 + 64; /* threads do not share cache lines */
}

static int64_t row_bytes(const struct shape *s, const struct limits *l)
{
    return (int64_t)sizeof(float) *
               (l->max_tokens * row_width(s) + (int64_t)l->max_logits * s->vocab +
                cpu_attention_parts(s, l)) +
           cpu_forms_bytes(s, l);
}

static int64_t cpu_buffer_bytes(const struct shape *s, const struct limits *l, int32_t n_threads)
{
    return row_bytes(s, l) + (int64_t)sizeof(float) * thread_scratch(s, l) * n_threads;
}

/* Its rows are read where the file has them. */
static int64_t cpu_embedding_bytes(enum dtype dtype, int64_t rows, int64_t columns)
{
    (void)dtype, (void)rows, (void)columns;
    return 0;
}

static void cpu_close(struct backend *b)
{
    if (!b) return;
    for (struct matrix *m = b->matrices, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    for (struct slab *s = b->slabs, *next; s; s = next) {
        next = s->next;
        mem_pages_free(s->data, s->bytes);
        free(s);
    }
    for (struct vector *v = b->vectors, *next; v; v = next) {
        next = v->next;
        free(v);
    }
    mem_pages_free(b->cache, b->cache_bytes);
    mem_pages_free(b->buffers, b->buffer_bytes);
    mem_pages_free(b->scratch,
                   (size_t)b->scratch_size * (size_t)pool_threads(b->pool) * sizeof(float));
    free(b);
}

static void cut_buffers(struct backend *b)
{
    const struct shape *s = &b->shape;
    int64_t q = (int64_t)s->n_heads * s->head_dim, kv = (int64_t)s->n_kv_heads * s->head_dim;
    const struct {
        float **buffer;
        int64_t width;
    } plan[] = {{&b->x, s->hidden},
                {&b->norm, s->hidden},
                {&b->qkv, q + 2 * kv},
                {&b->attn, q},
                {&b->act, s->intermediate}};
    float *at = b->buffers;
    for (size_t i = 0; i < sizeof plan / sizeof *plan; i++) {
        *plan[i].buffer = at;
        at += plan[i].width * b->limits.max_tokens;
    }
    b->logits = at;
    b->parts = b->logits + (int64_t)b->limits.max_logits * s->vocab;
    b->forms = (char *)(b->parts + cpu_attention_parts(s, &b->limits));
}

static linnet_status cpu_open(const struct shape *shape, const struct limits *limits,
                              struct pool *pool, struct backend **out, linnet_error *err)
{
    struct backend *b = mem_new(1, sizeof *b);
    if (!b) return error_memory(err, "the CPU backend", sizeof *b);
    b->shape = *shape;
    b->limits = *limits;
    b->pool = pool;
    b->kernels = kernels_chosen();
    b->cache_bytes = (size_t)cpu_cache_bytes(shape, limits->kv, limits->n_blocks);
    b->buffer_bytes = (size_t)row_bytes(shape, limits);
    b->scratch_size = thread_scratch(shape, limits);
    size_t scratch = (size_t)b->scratch_size * (size_t)pool_threads(pool) * sizeof(float);
    b->cache = mem_pages(b->cache_bytes,
                         false); /* touched block by block: huge pages would zero far too much */
    b->buffers = mem_pages(b->buffer_bytes, false);
    b->scratch = mem_pages(scratch, false);
    if (!b->cache || !b->buffers || !b->scratch) {
        error_memory(err, "cache and activations", b->cache_bytes + b->buffer_bytes + scratch);
        cpu_close(b);
        return LINNET_MEMORY;
    }
    if (limits->interleaved && !mem_interleave(b->cache, b->cache_bytes)) {
        cpu_close(b);
        return error_set(err, LINNET_UNSUPPORTED,
                         "this system does not spread memory over nodes: leave --numa out");
    }
    cut_buffers(b);
    *out = b;
    return LINNET_OK;
}

/* ---- loading --------------------------------------------------------------------------------- */

static linnet_status cpu_load_vector(struct backend *b, const float *values, int64_t n,
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

/* ---- row-wise work ------------------------------------------------------------------------ */

static void rows_share(void *arg, int thread, int n_threads)
{
    const struct rows_work *work = arg;
    int64_t begin, end;
    pool_share(work->n, 1, thread, n_threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) work->row(work, i, thread);
}

void cpu_for_rows(struct rows_work *work)
{
    if (work->n <= ALONE)
        rows_share(work, 0, 1);
    else
        pool_run(work->b->pool, rows_share, work);
}

static void store_row(const struct rows_work *w, int64_t t, int thread)
{
    (void)thread;
    struct backend *b = w->b;
    const struct shape *s = &b->shape;
    int32_t head_dim = s->head_dim, heads = s->n_heads + s->n_kv_heads;
    float *row = b->qkv + t * (heads + s->n_kv_heads) * head_dim;
    for (int32_t h = 0; h < heads; h++) {
        const struct vector *norm = h < s->n_heads ? w->w->q_norm : w->w->k_norm;
        float *head = row + h * head_dim;
        if (norm) b->kernels->rmsnorm(head, norm->v, head_dim, s->norm_eps, head);
        b->kernels->rope(head, b->rope + t * head_dim, head_dim);
    }
    const float *k = row + s->n_heads * head_dim;
    cpu_store_kv(b, w->layer, w->s->slot_mapping[t], k, k + s->n_kv_heads * head_dim);
}

static void embed_row(const struct rows_work *w, int64_t t, int thread)
{
    (void)thread;
    struct backend *b = w->b;
    const struct matrix_part *e = w->embedding;
    int64_t row_bytes = dtype_bytes(e->dtype, e->columns);
    dtype_to_f32(e->dtype, (const char *)e->data + w->s->token_ids[t] * row_bytes, e->columns,
                 b->x + t * b->shape.hidden);
}

/* ---- the operations ---------------------------------------------------------------------- */

static void cpu_begin(struct backend *b, const struct step *s, const float *rope, bool whole)
{
    (void)s, (void)whole;
    b->rope = rope;
}

static void cpu_embed(struct backend *b, const struct step *s, const struct matrix *embedding)
{
    cpu_for_rows(&(struct rows_work){
        .b = b, .s = s, .embedding = &embedding->source, .n = s->n_tokens, .row = embed_row});
}

static void cpu_qkv(struct backend *b, const struct step *s, int32_t layer, const struct layer *w)
{
    cpu_product(&(struct product){.b = b,
                                  .w = w->qkv,
                                  .x = b->x,
                                  .n = s->n_tokens,
                                  .norm = w->input_norm,
                                  .bias = w->qkv_bias,
                                  .y = b->qkv,
                                  .y_stride = w->qkv->rows});
    cpu_for_rows(&(struct rows_work){
        .b = b, .s = s, .w = w, .layer = layer, .n = s->n_tokens, .row = store_row});
}

static void cpu_o_proj(struct backend *b, const struct step *s, const struct layer *w)
{
    cpu_product(&(struct product){.b = b,
                                  .w = w->o_proj,
                                  .x = b->attn,
                                  .n = s->n_tokens,
                                  .bias = w->o_bias,
                                  .y = b->x,
                                  .y_stride = b->shape.hidden,
                                  .finish = ADD});
}

static void cpu_gate_up(struct backend *b, const struct step *s, const struct layer *w)
{
    const bool *wants = w->down->wants;
    b->act_in_bf16 = wants[ACTIVATION_BF16] && !wants[ACTIVATION_I8] && !wants[ACTIVATION_F32] &&
                     b->shape.intermediate % 2 == 0;
    cpu_product(&(struct product){.b = b,
                                  .w = w->gate_up,
                                  .x = b->x,
                                  .n = s->n_tokens,
                                  .norm = w->post_norm,
                                  .y = b->act,
                                  .y_bf16 = b->act_in_bf16 ? (uint16_t *)b->act : NULL,
                                  .y_stride = b->shape.intermediate,
                                  .finish = SILU_MUL});
}

static void cpu_down(struct backend *b, const struct step *s, const struct layer *w)
{
    cpu_product(&(struct product){.b = b,
                                  .w = w->down,
                                  .x = b->act,
                                  .x_bf16 = b->act_in_bf16 ? (const uint16_t *)b->act : NULL,
                                  .n = s->n_tokens,
                                  .y = b->x,
                                  .y_stride = b->shape.hidden,
                                  .finish = ADD});
}

static void cpu_head(struct backend *b, const struct step *s, const struct vector *norm,
                     const struct matrix *w)
{
    cpu_product(&(struct product){.b = b,
                                  .w = w,
                                  .x = b->x,
                                  .n = s->n_logits,
                                  .norm = norm,
                                  .row_of = s->logit_rows,
                                  .y = b->logits,
                                  .y_stride = b->shape.vocab});
}

static linnet_status cpu_finish(struct backend *b, linnet_error *err)
{
    (void)b, (void)err;
    return LINNET_OK;
}

static const float *cpu_logits(struct backend *b, int32_t i)
{
    return b->logits + (int64_t)i * b->shape.vocab;
}

static void cpu_read_buffer(struct backend *b, enum buffer which, int32_t row, float *out)
{
    const struct shape *s = &b->shape;
    int64_t q = (int64_t)s->n_heads * s->head_dim,
            qkv = q + 2 * (int64_t)s->n_kv_heads * s->head_dim;
    const struct {
        const float *data;
        int64_t stride, width;
    } from[] = {[BUFFER_X] = {b->x, s->hidden, s->hidden},
                [BUFFER_Q] = {b->qkv, qkv, q},
                [BUFFER_ATTN] = {b->attn, q, q},
                [BUFFER_ACT] = {b->act, s->intermediate, s->intermediate},
                [BUFFER_LOGITS] = {b->logits, s->vocab, s->vocab}};
    if (which == BUFFER_ACT && b->act_in_bf16) {
        const uint16_t *act = (const uint16_t *)b->act + (int64_t)row * s->intermediate;
        for (int32_t i = 0; i < s->intermediate; i++) out[i] = f32_from_bf16(act[i]);
        return;
    }
    memcpy(out, from[which].data + row * from[which].stride,
           (size_t)from[which].width * sizeof(float));
}

static double cpu_activation_error(enum dtype dtype)
{
    static const double of[] = {
        [ACTIVATION_F32] = 0, [ACTIVATION_BF16] = 0.0017, [ACTIVATION_I8] = 0.006};
    return of[kernels_activation(kernels_chosen(), pack_of(dtype))];
}

const struct ops ops_cpu = {
    .name = "cpu",
    .activation_error = cpu_activation_error,
    .open = cpu_open,
    .close = cpu_close,
    .use_store = cpu_use_store,
    .layout = PACK_LAYOUT,
    .load_matrix = cpu_load_matrix,
    .load_embedding = cpu_load_embedding,
    .load_vector = cpu_load_vector,
    .matrix_bytes = cpu_matrix_bytes,
    .embedding_bytes = cpu_embedding_bytes,
    .cache_bytes = cpu_cache_bytes,
    .buffer_bytes = cpu_buffer_bytes,
    .begin = cpu_begin,
    .embed = cpu_embed,
    .qkv = cpu_qkv,
    .attention = cpu_attention,
    .o_proj = cpu_o_proj,
    .gate_up = cpu_gate_up,
    .down = cpu_down,
    .head = cpu_head,
    .finish = cpu_finish,
    .copy_blocks = cpu_copy_blocks,
    .logits = cpu_logits,
    .read_buffer = cpu_read_buffer,
    .read_kv = cpu_read_kv,
    .int8_kv = true,
};
