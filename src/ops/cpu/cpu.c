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
    enum activation form; /* of the rows that it is multiplied with */
    int64_t first_row, rows, n_panels;
    int64_t stride; /* bytes from a panel to the next */
    uint8_t *panels;
};

enum { MAX_SEGMENTS = 4 };

struct matrix {
    int64_t rows, columns;
    int64_t n_panels; /* that threads share; of a paired matrix a panel of gate and one of up */
    bool paired;      /* gate's panels and up's lie in turn */
    int n_segments;
    bool wants[3];       /* the forms of an input that its segments want */
    int64_t forms_bytes; /* of a row of them, ACTIVATION_I8 first */
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
    float *x, *norm, *qkv, *attn, *act, *logits; /* rows of the step; qkv holds q, k, v */
    char *forms; /* rows of a product's input in the forms that it wants */
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

enum { AVX_VNNI = 1 << 4, AVX512_BF16 = 1 << 5 }; /* in eax of leaf 7, subleaf 1 */

static bool has_leaf_7_1(unsigned bit)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit);
}
#endif

/* The sets of a machine, each a superset of the next; false where this one cannot run it. */
static const struct {
    const struct kernels *kernels;
    bool avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16; /* what it needs */
} sets[] = {
#if defined(__x86_64__)
    {&kernels_avx512_bf16, true, false, true, true, true},
    {&kernels_avx512_vnni, true, false, true, true, false},
    {&kernels_avx512, true, false, true, false, false},
    {&kernels_avx2_vnni, true, true, false, false, false},
    {&kernels_avx2, true, false, false, false, false},
#endif
    {&kernels_generic, false, false, false, false, false},
};
enum { N_SETS = sizeof sets / sizeof *sets };

static bool runs(int set)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return (!sets[set].avx2 || avx2) && (!sets[set].avx_vnni || has_leaf_7_1(AVX_VNNI)) &&
           (!sets[set].avx512 || avx512) &&
           (!sets[set].avx512_vnni || __builtin_cpu_supports("avx512vnni")) &&
           (!sets[set].avx512_bf16 || has_leaf_7_1(AVX512_BF16));
#else
    return set == N_SETS - 1;
#endif
}

const struct kernels *kernels_usable(int i)
{
    for (int set = 0; set < N_SETS; set++)
        if (runs(set) && i-- == 0) return sets[set].kernels;
    return NULL;
}

static const struct kernels *chosen_kernels(void)
{
    return forced ? forced : kernels_usable(0);
}

const char *ops_cpu_kernels(void)
{
    return chosen_kernels()->name;
}

bool ops_cpu_force(const char *name)
{
    forced = NULL;
    if (!name) return true;
    for (int i = 0; !forced && kernels_usable(i); i++)
        if (strcmp(kernels_usable(i)->name, name) == 0) forced = kernels_usable(i);
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
    return 2 * (int64_t)s->hidden + q + 2 * kv + q + (int64_t)s->intermediate;
}

static int64_t widest_input(const struct shape *s)
{
    int64_t widest = s->hidden > s->intermediate ? s->hidden : s->intermediate;
    return widest > (int64_t)s->n_heads * s->head_dim ? widest : (int64_t)s->n_heads * s->head_dim;
}

/* A row of a product's input in 8 bits, then in bf16: a matrix may want both. */
static int64_t forms_bytes(int64_t columns)
{
    return activation_bytes(ACTIVATION_I8, columns) + activation_bytes(ACTIVATION_BF16, columns);
}

static int64_t max_rows(const struct limits *l)
{
    return l->max_tokens > l->max_logits ? l->max_tokens : l->max_logits;
}

enum {
    ALONE = 4, /* rows that every thread prepares for itself: cheaper than to wait for each other */
    RUN = 8    /* panels a call of the kernel for one token */
};

/* A thread's own memory, in floats. */
struct scratch {
    float *expanded; /* a panel's weights */
    float *rows;     /* [RUN, tokens, 16]: what RUN panels give, or a pair of them */
    float *norm;     /* [ALONE, columns] */
    char *forms;     /* [ALONE, forms_bytes] */
};

/* Floats of each part. */
static void scratch_sizes(const struct shape *s, const struct limits *l, int64_t size[4])
{
    int64_t widest = widest_input(s);
    size[0] = widest * PANEL;
    size[1] = RUN * max_rows(l) * PANEL;
    size[2] = ALONE * widest;
    size[3] = (ALONE * forms_bytes(widest_input(s)) + 3) / 4;
}

static int64_t thread_scratch(const struct shape *s, const struct limits *l)
{
    int64_t part[4], attention = attention_scratch(s->head_dim);
    scratch_sizes(s, l, part);
    int64_t product = part[0] + part[1] + part[2] + part[3];
    int64_t size = product > attention ? product : attention;
    return (size + 63) / 64 * 64 + 64; /* threads do not share cache lines */
}

static int64_t row_bytes(const struct shape *s, const struct limits *l)
{
    return (int64_t)sizeof(float) *
               (l->max_tokens * row_width(s) + (int64_t)l->max_logits * s->vocab) +
           max_rows(l) * forms_bytes(widest_input(s));
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
                {&b->act, s->intermediate}};
    float *at = b->buffers;
    for (size_t i = 0; i < sizeof plan / sizeof *plan; i++) {
        *plan[i].buffer = at;
        at += plan[i].width * b->limits.max_tokens;
    }
    b->logits = at;
    b->forms = (char *)(at + (int64_t)b->limits.max_logits * s->vocab);
}

static linnet_status cpu_open(const struct shape *shape, const struct limits *limits,
                              struct pool *pool, struct backend **out, linnet_error *err)
{
    struct backend *b = mem_new(1, sizeof *b);
    if (!b) return error_memory(err, "the CPU backend", sizeof *b);
    b->shape = *shape;
    b->limits = *limits;
    b->pool = pool;
    b->kernels = chosen_kernels();
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
                   p->segment->panels + i * p->segment->stride);
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
    m->paired = n_parts == 2 && parts[0].paired && parts[1].paired;
    uint8_t *at = m->pages;
    for (int i = 0; i < n_parts; i++) {
        struct segment *segment = &m->segments[i];
        enum pack pack = pack_of(parts[i].dtype);
        int64_t n_panels = (parts[i].rows + PANEL - 1) / PANEL,
                panel_bytes = pack_panel_bytes(pack, m->columns);
        *segment = (struct segment){pack,     kernels_activation(b->kernels, pack),
                                    m->rows,  parts[i].rows,
                                    n_panels, panel_bytes,
                                    at};
        m->wants[segment->form] = true;
        m->rows += parts[i].rows;
        m->n_panels += n_panels;
        at += m->paired ? panel_bytes : n_panels * panel_bytes;
    }
    for (int form = 0; form < 3; form++)
        if (m->wants[form] && form != ACTIVATION_F32)
            m->forms_bytes += activation_bytes(form, m->columns);
    if (m->paired) {
        m->n_panels /= 2;
        m->segments[0].stride = m->segments[1].stride =
            m->segments[0].stride + m->segments[1].stride;
    }
    for (int i = 0; i < n_parts; i++)
        pool_run(b->pool, pack_share, &(struct packing){&parts[i], &m->segments[i]});
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

/* ---- rows ---------------------------------------------------------------------------------- */

/* Work on the rows of a step: by the caller alone where waking the pool would cost more. */
struct rows_work {
    struct backend *b;
    const struct step *s;
    const struct layer *w;
    const struct matrix_part *embedding;
    const struct product *product;
    int32_t layer;
    int64_t n;
    void (*row)(const struct rows_work *, int64_t i);
};

static void rows_share(void *arg, int thread, int n_threads)
{
    const struct rows_work *work = arg;
    int64_t begin, end;
    pool_share(work->n, 1, thread, n_threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) work->row(work, i);
}

static void for_rows(struct rows_work *work)
{
    if (work->n <= ALONE)
        rows_share(work, 0, 1);
    else
        pool_run(work->b->pool, rows_share, work);
}

/* ---- matrix products --------------------------------------------------------------------- */

/* What becomes of a product's rows. */
enum finish { STORE, ADD, SILU_MUL };

/* y[t] = w x[t] (+ bias), or added to y, or silu(first half) * second half. x may be normalized
 * first, and its rows chosen. */
struct product {
    struct backend *b;
    const struct matrix *w;
    const float *x; /* rows of the matrix's columns */
    int64_t n;
    const struct vector *norm; /* NULL: none */
    const int32_t *row_of;     /* row i is x's row_of[i]; NULL: row i */
    const struct vector *bias;
    float *y;
    int64_t y_stride;
    enum finish finish;
};

static struct scratch scratch_of(const struct backend *b, int thread)
{
    int64_t size[4];
    scratch_sizes(&b->shape, &b->limits, size);
    float *at = b->scratch + thread * b->scratch_size;
    return (struct scratch){.expanded = at,
                            .rows = at + size[0],
                            .norm = at + size[0] + size[1],
                            .forms = (char *)(at + size[0] + size[1] + size[2])};
}

/* The input's rows in each form that the matrix wants. */
struct inputs {
    const char *rows[3];
    int64_t stride[3];
};

/* Where a row's bf16 form begins. */
static int64_t bf16_begins(const struct matrix *w)
{
    return w->wants[ACTIVATION_I8] ? activation_bytes(ACTIVATION_I8, w->columns) : 0;
}

/* Row i normalized, and in the other forms. */
static void prepare_row(const struct product *p, int64_t i, float *norm, char *forms)
{
    const struct kernels *k = p->b->kernels;
    int64_t columns = p->w->columns;
    const float *x = p->x + (p->row_of ? p->row_of[i] : i) * columns;
    if (p->norm) {
        k->rmsnorm(x, p->norm->v, (int32_t)columns, p->b->shape.norm_eps, norm);
        x = norm;
    }
    if (p->w->wants[ACTIVATION_I8]) k->activate(ACTIVATION_I8, x, columns, forms);
    if (p->w->wants[ACTIVATION_BF16])
        k->activate(ACTIVATION_BF16, x, columns, forms + bf16_begins(p->w));
}

static struct inputs inputs_at(const struct product *p, const float *norm, const char *forms)
{
    const struct matrix *w = p->w;
    return (struct inputs){
        .rows = {[ACTIVATION_F32] = (const char *)(p->norm ? norm : p->x),
                 [ACTIVATION_I8] = forms,
                 [ACTIVATION_BF16] = forms + bf16_begins(w)},
        .stride = {w->columns * (int64_t)sizeof(float), w->forms_bytes, w->forms_bytes}};
}

static void prepare_shared_row(const struct rows_work *w, int64_t i)
{
    const struct matrix *m = w->product->w;
    prepare_row(w->product, i, w->b->norm + i * m->columns, w->b->forms + i * m->forms_bytes);
}

/* y (+)= row (+ bias), n of them at most PANEL */
static void finish_row(const float *row, const float *bias, bool add, int64_t n, float *y)
{
    float sum[PANEL];
    for (int r = 0; r < PANEL; r++) sum[r] = row[r];
    if (bias)
        for (int64_t r = 0; r < n; r++) sum[r] += bias[r];
    if (n == PANEL && add)
        for (int r = 0; r < PANEL; r++) y[r] += sum[r];
    else if (add)
        for (int64_t r = 0; r < n; r++) y[r] += sum[r];
    else
        memcpy(y, sum, (size_t)n * sizeof(float));
}

/* rows: [n, 16] of that panel, of n tokens from t on */
static void finish_panel(const struct product *p, const struct segment *s, int64_t panel, int64_t t,
                         int64_t n, const float *rows)
{
    int64_t first = panel * PANEL, valid = s->rows - first < PANEL ? s->rows - first : PANEL;
    const float *bias = p->bias ? p->bias->v + s->first_row + first : NULL;
    float *y = p->y + t * p->y_stride + s->first_row + first;
    for (int64_t i = 0; i < n; i++)
        finish_row(rows + i * PANEL, bias, p->finish == ADD, valid, y + i * p->y_stride);
}

/* Tokens that are computed together: their rows stay in a core's cache while RUN panels pass. */
static int64_t token_block(const struct product *p, int64_t stride)
{
    enum { ROWS_BYTES = 192 << 10, TILES = 12 /* a multiple of every kernel's tile */ };
    int64_t n = ROWS_BYTES / stride / TILES * TILES;
    if (n < TILES) n = TILES;
    return n < p->n ? n : p->n;
}

/* y[panel][token]: n_panels panels of the segment with n tokens from t on. */
static void run_kernel(const struct product *p, const struct segment *s, int64_t panel,
                       int64_t n_panels, int64_t t, int64_t n, const struct inputs *in,
                       const struct scratch *scratch, float *y)
{
    p->b->kernels->product(s->pack, s->panels + panel * s->stride, n_panels, s->stride,
                           p->w->columns, in->rows[s->form] + t * in->stride[s->form],
                           in->stride[s->form], n, scratch->expanded, y);
}

static void product_panels(const struct product *p, const struct segment *s, int64_t begin,
                           int64_t end, const struct inputs *in, const struct scratch *scratch)
{
    int64_t block = token_block(p, in->stride[s->form]), n_panels, n;
    for (int64_t panel = begin; panel < end; panel += n_panels) {
        n_panels = end - panel < RUN ? end - panel : RUN;
        for (int64_t t = 0; t < p->n; t += n) {
            n = p->n - t < block ? p->n - t : block;
            run_kernel(p, s, panel, n_panels, t, n, in, scratch, scratch->rows);
            for (int64_t i = 0; i < n_panels; i++)
                finish_panel(p, s, panel + i, t, n, scratch->rows + i * n * PANEL);
        }
    }
}

/* Panels of gate and those of up beside them, to the activations that they give. */
static void silu_panels(const struct product *p, int64_t begin, int64_t end,
                        const struct inputs *in, const struct scratch *scratch)
{
    const struct segment *gate = &p->w->segments[0], *up = &p->w->segments[1];
    int64_t stride = in->stride[gate->form] > in->stride[up->form] ? in->stride[gate->form]
                                                                   : in->stride[up->form];
    int64_t block = token_block(p, stride), n;
    float *gates = scratch->rows, *ups = gates + block * PANEL;
    for (int64_t first = begin; first < end; first += RUN)
        for (int64_t t = 0; t < p->n; t += n) {
            n = p->n - t < block ? p->n - t : block;
            for (int64_t panel = first; panel < end && panel < first + RUN; panel++) {
                int64_t row = panel * PANEL,
                        valid = gate->rows - row < PANEL ? gate->rows - row : PANEL;
                run_kernel(p, gate, panel, 1, t, n, in, scratch, gates);
                run_kernel(p, up, panel, 1, t, n, in, scratch, ups);
                p->b->kernels->silu_mul(gates, ups, (int32_t)(n * PANEL), gates);
                for (int64_t i = 0; i < n; i++)
                    memcpy(p->y + (t + i) * p->y_stride + row, gates + i * PANEL,
                           (size_t)valid * sizeof(float));
            }
        }
}

static void product_share(void *arg, int thread, int n_threads)
{
    const struct product *p = arg;
    struct backend *b = p->b;
    struct scratch scratch = scratch_of(b, thread);
    struct inputs in = inputs_at(p, b->norm, b->forms);
    if (p->n <= ALONE) {
        for (int64_t i = 0; i < p->n; i++)
            prepare_row(p, i, scratch.norm + i * p->w->columns,
                        scratch.forms + i * p->w->forms_bytes);
        in = inputs_at(p, scratch.norm, scratch.forms);
    }
    int64_t begin, end, first = 0;
    pool_share(p->w->n_panels, 1, thread, n_threads, &begin, &end);
    if (p->finish == SILU_MUL) {
        silu_panels(p, begin, end, &in, &scratch);
        return;
    }
    for (int i = 0; i < p->w->n_segments; first += p->w->segments[i++].n_panels) {
        const struct segment *s = &p->w->segments[i];
        int64_t from = begin > first ? begin - first : 0,
                to = end - first < s->n_panels ? end - first : s->n_panels;
        if (from < to) product_panels(p, s, from, to, &in, &scratch);
    }
}

static void product(const struct product *p)
{
    bool wanted = p->norm != NULL;
    for (int i = 0; i < p->w->n_segments; i++) wanted |= p->w->segments[i].form != ACTIVATION_F32;
    if (wanted && p->n > ALONE)
        for_rows(
            &(struct rows_work){.b = p->b, .product = p, .n = p->n, .row = prepare_shared_row});
    pool_run(p->b->pool, product_share, (void *)p);
}

/* ---- row-wise work ----------------------------------------------------------------------- */

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

/* The queries of some heads of one kv head, of some tokens of a sequence. */
static void attend_some(const struct attention *a, int32_t seq, int32_t first_token,
                        int32_t end_token, int32_t first_head, int32_t end_head, float *scratch)
{
    struct backend *b = a->b;
    const struct step *s = a->s;
    const struct shape *shape = &b->shape;
    int32_t head_dim = shape->head_dim, group = shape->n_heads / shape->n_kv_heads, n = 0;
    int64_t q_stride = (int64_t)(shape->n_heads + 2 * shape->n_kv_heads) * head_dim;
    const float *keys = cache_block(b, a->layer, 0, 0, first_head / group),
                *values = cache_block(b, a->layer, 1, 0, first_head / group);
    const int32_t *table = s->block_tables + (int64_t)seq * s->max_blocks;
    struct query queries[ATTENTION_QUERIES];
    for (int32_t t = first_token; t < end_token; t++)
        for (int32_t h = first_head; h < end_head; h++) {
            queries[n++] =
                (struct query){.q = b->qkv + t * q_stride + h * head_dim,
                               .n_keys = s->positions[t] + 1,
                               .out = b->attn + ((int64_t)t * shape->n_heads + h) * head_dim};
            if (n < ATTENTION_QUERIES && (h + 1 < end_head || t + 1 < end_token)) continue;
            b->kernels->attend(queries, n, keys, values,
                               (int64_t)KV_BLOCK * head_dim * shape->n_kv_heads, table, head_dim,
                               scratch);
            n = 0;
        }
}

/*
 * Items are (run of tokens of a sequence, kv head), dealt out in turn: later tokens have more keys.
 * The heads of a kv head, and tokens where these are few, go together and share its keys. Where
 * that gives the threads unequal work, every head is an item.
 */
static void attention_share(void *arg, int thread, int n_threads)
{
    const struct attention *a = arg;
    const struct step *s = a->s;
    const struct shape *shape = &a->b->shape;
    int32_t group = shape->n_heads / shape->n_kv_heads, heads = group, columns = shape->n_kv_heads;
    int32_t run = group < ATTENTION_QUERIES ? ATTENTION_QUERIES / group : 1, item = 0;
    int64_t n_items = (int64_t)s->n_tokens / run * columns;
    if (n_items % n_threads && n_items < 8 * (int64_t)n_threads)
        heads = run = 1, columns = shape->n_heads;
    float *scratch = a->b->scratch + thread * a->b->scratch_size;
    for (int32_t seq = 0; seq < s->n_seqs; seq++) {
        int32_t begin = s->query_start[seq], end = s->query_start[seq + 1];
        for (int32_t t = begin; t < end; t += run)
            for (int32_t c = 0; c < columns; c++)
                if (item++ % n_threads == thread)
                    attend_some(a, seq, t, t + run < end ? t + run : end, c * heads,
                                (c + 1) * heads, scratch);
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
    product(&(struct product){.b = b,
                              .w = w->qkv,
                              .x = b->x,
                              .n = s->n_tokens,
                              .norm = w->input_norm,
                              .bias = w->qkv_bias,
                              .y = b->qkv,
                              .y_stride = w->qkv->rows});
    for_rows(&(struct rows_work){
        .b = b, .s = s, .w = w, .layer = layer, .n = s->n_tokens, .row = store_row});
}

static void cpu_attention(struct backend *b, const struct step *s, int32_t layer)
{
    pool_run(b->pool, attention_share, &(struct attention){b, s, layer});
}

static void cpu_o_proj(struct backend *b, const struct step *s, const struct layer *w)
{
    product(&(struct product){.b = b,
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
    product(&(struct product){.b = b,
                              .w = w->gate_up,
                              .x = b->x,
                              .n = s->n_tokens,
                              .norm = w->post_norm,
                              .y = b->act,
                              .y_stride = b->shape.intermediate,
                              .finish = SILU_MUL});
}

static void cpu_down(struct backend *b, const struct step *s, const struct layer *w)
{
    product(&(struct product){.b = b,
                              .w = w->down,
                              .x = b->act,
                              .n = s->n_tokens,
                              .y = b->x,
                              .y_stride = b->shape.hidden,
                              .finish = ADD});
}

static void cpu_head(struct backend *b, const struct step *s, const struct vector *norm,
                     const struct matrix *w)
{
    product(&(struct product){.b = b,
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

static double cpu_activation_error(enum dtype dtype)
{
    static const double of[] = {
        [ACTIVATION_F32] = 0, [ACTIVATION_BF16] = 0.0017, [ACTIVATION_I8] = 0.006};
    return of[kernels_activation(chosen_kernels(), pack_of(dtype))];
}

const struct ops ops_cpu = {
    .name = "cpu",
    .activation_error = cpu_activation_error,
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
