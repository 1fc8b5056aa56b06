/*
 * cpu.c - the CPU backend: the vector kernels of kernels.c, on all threads of the pool. Between
 * two matrix products the caller's thread alone does what is too small to share.
 */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/threads.h"
#include "ops/cpu/kernels.h"

static_assert((int)PANEL == (int)KV_BLOCK, "a vector of scores is a block of keys");

/* Rows of one dtype; a matrix merged from q, k and v may have up to four such segments. */
struct segment {
    enum pack pack;
    int64_t first_row, rows, n_panels, panel_bytes;
    uint8_t *panels;
};

enum { MAX_SEGMENTS = 4 };

struct matrix {
    int64_t rows, columns, n_panels;
    int n_segments;
    struct segment segments[MAX_SEGMENTS];
    struct matrix_part source; /* embedding only: rows are read where the file has them */
    uint8_t *pages;
    size_t bytes;
    struct matrix *next;
};

struct vector {
    struct vector *next;
    float v[];
};

struct backend {
    struct shape shape;
    struct limits limits;
    struct pool *pool;
    const struct kernels *kernels;
    struct matrix *matrices;
    struct vector *vectors;
    float *cache; /* [n_layers][K, V][n_blocks][n_kv_heads][16 * head_dim] */
    size_t cache_bytes;
    float *x, *norm, *qkv, *attn, *gate_up, *act, *logits; /* rows of the step; qkv holds q, k, v */
    float *buffers;
    size_t buffer_bytes;
    const float *rope; /* the step's rows */
    float *scratch;    /* [threads][scratch_size] */
    int64_t scratch_size;
};

/* ---- choosing kernels ------------------------------------------------------------------------ */

static const struct kernels *forced;

#if defined(__x86_64__)
static bool has_f16c(void) /* not a name that every compiler's builtin knows */
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static const struct kernels *best_kernels(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2 && avx512) return &kernels_avx512;
    if (avx2) return &kernels_avx2;
#endif
    return &kernels_generic;
}

const char *ops_cpu_kernels(void)
{
    return forced ? forced->name : best_kernels()->name;
}

bool ops_cpu_force(const char *name)
{
    const struct kernels *const sets[] = {
#if defined(__x86_64__)
        &kernels_avx512,
        &kernels_avx2,
#endif
        &kernels_generic
    };
    forced = NULL;
    if (!name) return true;
    int n = (int)(sizeof sets / sizeof *sets), best = 0;
    while (sets[best] != best_kernels()) best++;
    for (int i = best; i < n; i++)
        if (strcmp(sets[i]->name, name) == 0) forced = sets[i];
    return forced != NULL;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int64_t cpu_cache_bytes(const struct shape *s, int32_t n_blocks)
{
    return 2 * (int64_t)sizeof(float) * s->n_layers * n_blocks * KV_BLOCK * s->n_kv_heads *
           s->head_dim;
}

/* Widths of the rows of each buffer; logits have rows of their own number. */
static int64_t row_width(const struct shape *s)
{
    int64_t q = (int64_t)s->n_heads * s->head_dim, kv = (int64_t)s->n_kv_heads * s->head_dim;
    return 2 * (int64_t)s->hidden + q + 2 * kv + q + 3 * (int64_t)s->intermediate;
}

static int64_t thread_scratch(const struct shape *s, const struct limits *l)
{
    int64_t widest = s->hidden > s->intermediate ? s->hidden : s->intermediate;
    if (widest < (int64_t)s->n_heads * s->head_dim) widest = (int64_t)s->n_heads * s->head_dim;
    int64_t rows = l->max_tokens > l->max_logits ? l->max_tokens : l->max_logits;
    int64_t product = (widest + rows) * PANEL, attention = s->head_dim + ATTENTION_CHUNK;
    int64_t size = product > attention ? product : attention;
    return (size + 63) / 64 * 64 + 64; /* threads do not share cache lines */
}

static int64_t row_bytes(const struct shape *s, const struct limits *l)
{
    return (int64_t)sizeof(float) *
           (l->max_tokens * row_width(s) + (int64_t)l->max_logits * s->vocab);
}

static int64_t cpu_buffer_bytes(const struct shape *s, const struct limits *l, int32_t n_threads)
{
    return row_bytes(s, l) + (int64_t)sizeof(float) * thread_scratch(s, l) * n_threads;
}

static int64_t cpu_matrix_bytes(enum dtype dtype, int64_t rows, int64_t columns)
{
    return (rows + PANEL - 1) / PANEL * pack_panel_bytes(pack_of(dtype), columns);
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
        mem_pages_free(m->pages, m->bytes);
        free(m);
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
                {&b->gate_up, 2 * s->intermediate},
                {&b->act, s->intermediate}};
    float *at = b->buffers;
    for (size_t i = 0; i < sizeof plan / sizeof *plan; i++) {
        *plan[i].buffer = at;
        at += plan[i].width * b->limits.max_tokens;
    }
    b->logits = at;
}

static linnet_status cpu_open(const struct shape *shape, const struct limits *limits,
                              struct pool *pool, struct backend **out, linnet_error *err)
{
    struct backend *b = mem_new(1, sizeof *b);
    if (!b) return error_memory(err, "the CPU backend", sizeof *b);
    b->shape = *shape;
    b->limits = *limits;
    b->pool = pool;
    b->kernels = forced ? forced : best_kernels();
    b->cache_bytes = (size_t)cpu_cache_bytes(shape, limits->n_blocks);
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
    cut_buffers(b);
    *out = b;
    return LINNET_OK;
}

/* ---- loading --------------------------------------------------------------------------------- */

struct packing {
    const struct matrix_part *part;
    const struct segment *segment;
};

static void pack_share(void *arg, int thread, int n_threads)
{
    const struct packing *p = arg;
    int64_t begin, end, row_bytes = dtype_bytes(p->part->dtype, p->part->columns);
    pool_share(p->segment->n_panels, 1, thread, n_threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        const void *rows[PANEL] = {NULL};
        for (int64_t r = 0; r < PANEL && i * PANEL + r < p->part->rows; r++)
            rows[r] = (const char *)p->part->data +
                      matrix_source_row(i * PANEL + r, p->part->interleaved) * row_bytes;
        pack_panel(p->part->dtype, rows, p->part->columns,
                   p->segment->panels + i * p->segment->panel_bytes);
    }
}

static struct matrix *new_matrix(struct backend *b)
{
    struct matrix *m = mem_new(1, sizeof *m);
    if (!m) return NULL;
    m->next = b->matrices;
    b->matrices = m;
    return m;
}

static linnet_status cpu_load_matrix(struct backend *b, const struct matrix_part *parts,
                                     int n_parts, struct matrix **out, linnet_error *err)
{
    if (n_parts > MAX_SEGMENTS)
        return error_set(err, LINNET_INTERNAL, "a matrix of %d parts", n_parts);
    struct matrix *m = new_matrix(b);
    if (!m) return error_memory(err, "a weight matrix", sizeof *m);
    m->columns = parts[0].columns;
    m->n_segments = n_parts;
    for (int i = 0; i < n_parts; i++)
        m->bytes += (size_t)cpu_matrix_bytes(parts[i].dtype, parts[i].rows, m->columns);
    m->pages = mem_pages(m->bytes, true);
    if (!m->pages) return error_memory(err, "a weight matrix", m->bytes);
    uint8_t *at = m->pages;
    for (int i = 0; i < n_parts; i++) {
        enum pack pack = pack_of(parts[i].dtype);
        int64_t n_panels = (parts[i].rows + PANEL - 1) / PANEL,
                panel_bytes = pack_panel_bytes(pack, m->columns);
        m->segments[i] = (struct segment){pack, m->rows, parts[i].rows, n_panels, panel_bytes, at};
        m->rows += parts[i].rows;
        m->n_panels += n_panels;
        at += n_panels * panel_bytes;
        pool_run(b->pool, pack_share, &(struct packing){&parts[i], &m->segments[i]});
    }
    *out = m;
    return LINNET_OK;
}

static linnet_status cpu_load_embedding(struct backend *b, const struct matrix_part *part,
                                        struct matrix **out, linnet_error *err)
{
    struct matrix *m = new_matrix(b);
    if (!m) return error_memory(err, "the embedding", sizeof *m);
    m->rows = part->rows;
    m->columns = part->columns;
    m->source = *part;
    *out = m;
    return LINNET_OK;
}

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

/* ---- matrix products --------------------------------------------------------------------- */

enum { RUN = 8 }; /* panels a call of the one-token kernel */

/* y[t][row] = (or +=) w[row] x[t] (+ bias[row]) */
struct product {
    struct backend *b;
    const struct matrix *w;
    const float *x, *bias;
    float *y;
    int64_t n, y_stride;
    bool add;
};

/* rows: [n, 16] of that panel */
static void finish_panel(const struct product *p, const struct segment *s, int64_t panel,
                         const float *rows)
{
    int64_t first = panel * PANEL, valid = s->rows - first < PANEL ? s->rows - first : PANEL;
    for (int64_t t = 0; t < p->n; t++) {
        float *y = p->y + t * p->y_stride + s->first_row + first;
        const float *from = rows + t * PANEL,
                    *bias = p->bias ? p->bias + s->first_row + first : NULL;
        for (int64_t r = 0; r < valid; r++) {
            float sum = bias ? from[r] + bias[r] : from[r];
            y[r] = p->add ? y[r] + sum : sum;
        }
    }
}

static void product_panels(const struct product *p, const struct segment *s, int64_t begin,
                           int64_t end, float *scratch)
{
    const struct kernels *k = p->b->kernels;
    int64_t columns = p->w->columns;
    float *rows = scratch, *expanded = scratch + p->n * PANEL;
    if (p->n == 1) {
        float some[RUN * PANEL];
        for (int64_t panel = begin; panel < end; panel += RUN) {
            int64_t count = end - panel < RUN ? end - panel : RUN;
            k->panels_vector(s->pack, s->panels + panel * s->panel_bytes, count, s->panel_bytes,
                             p->x, columns, some);
            for (int64_t i = 0; i < count; i++) finish_panel(p, s, panel + i, some + i * PANEL);
        }
        return;
    }
    for (int64_t panel = begin; panel < end; panel++) {
        k->panel_expand(s->pack, s->panels + panel * s->panel_bytes, columns, expanded);
        k->panel_matrix(expanded, p->x, columns, p->n, columns, rows);
        finish_panel(p, s, panel, rows);
    }
}

static void product_share(void *arg, int thread, int n_threads)
{
    const struct product *p = arg;
    int64_t begin, end, first = 0;
    pool_share(p->w->n_panels, 1, thread, n_threads, &begin, &end);
    for (int i = 0; i < p->w->n_segments; first += p->w->segments[i++].n_panels) {
        const struct segment *s = &p->w->segments[i];
        int64_t from = begin > first ? begin - first : 0,
                to = end - first < s->n_panels ? end - first : s->n_panels;
        if (from < to) product_panels(p, s, from, to, p->b->scratch + thread * p->b->scratch_size);
    }
}

static void product(struct backend *b, const struct matrix *w, const float *x, int64_t n, float *y,
                    int64_t y_stride, const struct vector *bias, bool add)
{
    struct product p = {b, w, x, bias ? bias->v : NULL, y, n, y_stride, add};
    pool_run(b->pool, product_share, &p);
}

/* ---- row-wise work ----------------------------------------------------------------------- */

/* Work on the rows of a step: by the caller alone where waking the pool would cost more. */
struct rows_work {
    struct backend *b;
    const struct step *s;
    const struct layer *w;
    const struct vector *norm;
    const int32_t *row_of; /* norm: row i reads x row row_of[i]; NULL: row i */
    const struct matrix_part *embedding;
    int32_t layer;
    int64_t n;
    void (*row)(const struct rows_work *, int64_t i);
};

enum { ROWS_ALONE = 4 };

static void rows_share(void *arg, int thread, int n_threads)
{
    const struct rows_work *work = arg;
    int64_t begin, end;
    pool_share(work->n, 1, thread, n_threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) work->row(work, i);
}

static void for_rows(struct rows_work *work)
{
    if (work->n <= ROWS_ALONE)
        rows_share(work, 0, 1);
    else
        pool_run(work->b->pool, rows_share, work);
}

static void norm_row(const struct rows_work *w, int64_t i)
{
    struct backend *b = w->b;
    int32_t hidden = b->shape.hidden;
    int64_t from = w->row_of ? w->row_of[i] : i;
    b->kernels->rmsnorm(b->x + from * hidden, w->norm->v, hidden, b->shape.norm_eps,
                        b->norm + i * hidden);
}

static void norm_rows(struct backend *b, const struct vector *norm, const int32_t *row_of,
                      int64_t n)
{
    for_rows(&(struct rows_work){.b = b, .norm = norm, .row_of = row_of, .n = n, .row = norm_row});
}

/* This layer's keys (or values) of one block and kv head: 16 * head_dim floats. */
static float *cache_block(const struct backend *b, int32_t layer, int values, int64_t block,
                          int32_t kv_head)
{
    const struct shape *s = &b->shape;
    int64_t head_size = (int64_t)KV_BLOCK * s->head_dim, block_size = head_size * s->n_kv_heads;
    int64_t half = block_size * b->limits.n_blocks;
    return b->cache + (2 * layer + values) * half + block * block_size + kv_head * head_size;
}

static void store_row(const struct rows_work *w, int64_t t)
{
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
    int32_t slot = w->s->slot_mapping[t], offset = slot % KV_BLOCK;
    for (int32_t h = 0; h < s->n_kv_heads; h++) {
        const float *k = row + (s->n_heads + h) * head_dim, *v = k + s->n_kv_heads * head_dim;
        float *keys = cache_block(b, w->layer, 0, slot / KV_BLOCK, h);
        float *values = cache_block(b, w->layer, 1, slot / KV_BLOCK, h);
        for (int32_t d = 0; d < head_dim; d++) keys[d * KV_BLOCK + offset] = k[d];
        memcpy(values + offset * head_dim, v, (size_t)head_dim * sizeof(float));
    }
}

static void silu_row(const struct rows_work *w, int64_t t)
{
    struct backend *b = w->b;
    int32_t n = b->shape.intermediate;
    const float *gate = b->gate_up + t * 2 * n;
    b->kernels->silu_mul(gate, gate + n, n, b->act + t * n);
}

static void embed_row(const struct rows_work *w, int64_t t)
{
    struct backend *b = w->b;
    const struct matrix_part *e = w->embedding;
    int64_t row_bytes = dtype_bytes(e->dtype, e->columns);
    dtype_to_f32(e->dtype, (const char *)e->data + w->s->token_ids[t] * row_bytes, e->columns,
                 b->x + t * b->shape.hidden);
}

/* ---- attention --------------------------------------------------------------------------- */

struct attention {
    struct backend *b;
    const struct step *s;
    int32_t layer;
};

/* Items are (token, query head); a thread takes a run of them. */
static void attention_share(void *arg, int thread, int n_threads)
{
    const struct attention *a = arg;
    struct backend *b = a->b;
    const struct step *s = a->s;
    const struct shape *shape = &b->shape;
    int32_t n_heads = shape->n_heads, group = n_heads / shape->n_kv_heads,
            head_dim = shape->head_dim, seq = 0;
    int64_t begin, end, block_stride = (int64_t)KV_BLOCK * head_dim * shape->n_kv_heads;
    int64_t q_stride = (int64_t)(n_heads + 2 * shape->n_kv_heads) * head_dim;
    float *scratch = b->scratch + thread * b->scratch_size;
    pool_share((int64_t)s->n_tokens * n_heads, 1, thread, n_threads, &begin, &end);
    for (int64_t item = begin; item < end; item++) {
        int32_t t = (int32_t)(item / n_heads), h = (int32_t)(item % n_heads), kv_head = h / group;
        while (t >= s->query_start[seq + 1]) seq++;
        b->kernels->attend(b->qkv + t * q_stride + h * head_dim,
                           cache_block(b, a->layer, 0, 0, kv_head),
                           cache_block(b, a->layer, 1, 0, kv_head), block_stride,
                           s->block_tables + (int64_t)seq * s->max_blocks, s->positions[t] + 1,
                           head_dim, scratch, b->attn + item * head_dim);
    }
}

/* ---- the operations ---------------------------------------------------------------------- */

static void cpu_begin(struct backend *b, const struct step *s, const float *rope, bool whole)
{
    (void)s, (void)whole;
    b->rope = rope;
}

static void cpu_embed(struct backend *b, const struct step *s, const struct matrix *embedding)
{
    for_rows(&(struct rows_work){
        .b = b, .s = s, .embedding = &embedding->source, .n = s->n_tokens, .row = embed_row});
}

static void cpu_qkv(struct backend *b, const struct step *s, int32_t layer, const struct layer *w)
{
    norm_rows(b, w->input_norm, NULL, s->n_tokens);
    product(b, w->qkv, b->norm, s->n_tokens, b->qkv, w->qkv->rows, w->qkv_bias, false);
    for_rows(&(struct rows_work){
        .b = b, .s = s, .w = w, .layer = layer, .n = s->n_tokens, .row = store_row});
}

static void cpu_attention(struct backend *b, const struct step *s, int32_t layer)
{
    pool_run(b->pool, attention_share, &(struct attention){b, s, layer});
}

static void cpu_o_proj(struct backend *b, const struct step *s, const struct layer *w)
{
    product(b, w->o_proj, b->attn, s->n_tokens, b->x, b->shape.hidden, w->o_bias, true);
}

static void cpu_gate_up(struct backend *b, const struct step *s, const struct layer *w)
{
    norm_rows(b, w->post_norm, NULL, s->n_tokens);
    product(b, w->gate_up, b->norm, s->n_tokens, b->gate_up, w->gate_up->rows, NULL, false);
    for_rows(&(struct rows_work){.b = b, .s = s, .n = s->n_tokens, .row = silu_row});
}

static void cpu_down(struct backend *b, const struct step *s, const struct layer *w)
{
    product(b, w->down, b->act, s->n_tokens, b->x, b->shape.hidden, NULL, true);
}

static void cpu_head(struct backend *b, const struct step *s, const struct vector *norm,
                     const struct matrix *w)
{
    norm_rows(b, norm, s->logit_rows, s->n_logits);
    product(b, w, b->norm, s->n_logits, b->logits, b->shape.vocab, NULL, false);
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
    memcpy(out, from[which].data + row * from[which].stride,
           (size_t)from[which].width * sizeof(float));
}

static void cpu_read_kv(struct backend *b, int32_t layer, int32_t slot, float *k, float *v)
{
    int32_t head_dim = b->shape.head_dim, offset = slot % KV_BLOCK;
    for (int32_t h = 0; h < b->shape.n_kv_heads; h++) {
        const float *keys = cache_block(b, layer, 0, slot / KV_BLOCK, h);
        const float *values = cache_block(b, layer, 1, slot / KV_BLOCK, h);
        for (int32_t d = 0; d < head_dim; d++) k[h * head_dim + d] = keys[d * KV_BLOCK + offset];
        memcpy(v + h * head_dim, values + offset * head_dim, (size_t)head_dim * sizeof(float));
    }
}

static void cpu_copy_blocks(struct backend *b, int32_t layer, const int32_t *from, int32_t to,
                            int32_t n)
{
    size_t bytes = (size_t)(b->shape.n_kv_heads * KV_BLOCK * b->shape.head_dim) * sizeof(float);
    for (int32_t i = 0; i < n; i++)
        for (int values = 0; values < 2; values++)
            memcpy(cache_block(b, layer, values, to + i, 0),
                   cache_block(b, layer, values, from[i], 0), bytes);
}

const struct ops ops_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
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
};
