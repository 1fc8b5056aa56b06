/*
 * matrix.c - weights of the CPU backend: how they are packed, and products with them on all
 * threads of the pool.
 */
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "ops/cpu/cpu_internal.h"

enum { RUN = 16 }; /* panels that pass while a block of tokens stays in a core's cache */

/* ---- memory ---------------------------------------------------------------------------------- */

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

/* A thread's own memory, in floats. */
struct scratch {
    float *rows; /* [2, tokens, 16]: of panels of gate and up that are unlike */
    float *norm; /* [ALONE, columns] */
    char *forms; /* [ALONE, forms_bytes] */
};

/* Floats of each part. */
static void scratch_sizes(const struct shape *s, const struct limits *l, int64_t size[3])
{
    int64_t widest = widest_input(s);
    size[0] = 2 * max_rows(l) * PANEL;
    size[1] = ALONE * widest;
    size[2] = (ALONE * forms_bytes(widest_input(s)) + 3) / 4;
}

int64_t cpu_forms_bytes(const struct shape *s, const struct limits *l)
{
    return max_rows(l) * forms_bytes(widest_input(s));
}

int64_t cpu_product_scratch(const struct shape *s, const struct limits *l)
{
    int64_t size[3];
    scratch_sizes(s, l, size);
    return size[0] + size[1] + size[2];
}

int64_t cpu_matrix_bytes(enum dtype dtype, int64_t rows, int64_t columns)
{
    return (rows + PANEL - 1) / PANEL * pack_panel_bytes(pack_of(dtype), columns);
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
        const void *rows[PANEL];
        for (int64_t r = 0; r < PANEL; r++) {
            int64_t row = i * PANEL + r; /* where there are no more, the first again: unused */
            if (row >= p->part->rows) row = i * PANEL;
            rows[r] = (const char *)p->part->data +
                      matrix_source_row(row, p->part->interleaved) * row_bytes;
        }
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

static struct slab *new_slab(struct backend *b, size_t bytes)
{
    enum { SHARED = 32 << 20, LARGE = SHARED / 4 }; /* large ones would leave much of it empty */
    struct slab *slab = mem_new(1, sizeof *slab);
    if (!slab) return NULL;
    slab->bytes = bytes < LARGE ? SHARED : bytes;
    slab->data = mem_pages(slab->bytes, true);
    if (!slab->data) {
        free(slab);
        return NULL;
    }
    if (b->limits.interleaved) mem_interleave(slab->data, slab->bytes); /* cpu_open could */
    slab->next = b->slabs;
    b->slabs = slab;
    return slab;
}

/* In the first slab that has room for it, from a cache line's beginning on. */
static void *place_in_slab(struct backend *b, size_t bytes)
{
    enum { LINE = 64 };
    bytes = (bytes + LINE - 1) / LINE * LINE;
    struct slab *slab = b->slabs;
    while (slab && slab->bytes - slab->used < bytes) slab = slab->next;
    if (!slab) slab = new_slab(b, bytes);
    if (!slab) return NULL;
    slab->used += bytes;
    return slab->data + slab->used - bytes;
}

static linnet_status place_matrix(struct backend *b, struct matrix *m, void **place, bool *filled,
                                  linnet_error *err)
{
    if (b->store.next) return b->store.next(b->store.self, m->bytes, place, filled, err);
    *place = place_in_slab(b, m->bytes);
    return *place ? LINNET_OK : error_memory(err, "a weight matrix", m->bytes);
}

void cpu_use_store(struct backend *b, const struct store *store)
{
    b->store = *store;
}

linnet_status cpu_load_matrix(struct backend *b, const struct matrix_part *parts, int n_parts,
                              struct matrix **out, linnet_error *err)
{
    if (n_parts > MAX_SEGMENTS)
        return error_set(err, LINNET_INTERNAL, "a matrix of %d parts", n_parts);
    struct matrix *m = new_matrix(b);
    if (!m) return error_memory(err, "a weight matrix", sizeof *m);
    m->columns = parts[0].columns;
    m->n_segments = n_parts;
    for (int i = 0; i < n_parts; i++)
        m->bytes += (size_t)cpu_matrix_bytes(parts[i].dtype, parts[i].rows, m->columns);
    bool filled = false;
    void *place;
    linnet_status status = place_matrix(b, m, &place, &filled, err);
    if (status) return status;
    bool paired = n_parts == 2 && parts[0].paired && parts[1].paired; /* panels in turn */
    uint8_t *at = place;
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
        at += paired ? panel_bytes : n_panels * panel_bytes;
    }
    for (int form = 0; form < ACTIVATIONS; form++)
        if (m->wants[form] && form != ACTIVATION_F32)
            m->forms_bytes += activation_bytes(form, m->columns);
    if (paired) {
        m->n_panels /= 2;
        m->segments[0].stride = m->segments[1].stride =
            m->segments[0].stride + m->segments[1].stride;
    }
    for (int i = 0; i < n_parts && !filled; i++)
        pool_run(b->pool, pack_share, &(struct packing){&parts[i], &m->segments[i]});
    *out = m;
    return LINNET_OK;
}

linnet_status cpu_load_embedding(struct backend *b, const struct matrix_part *part,
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

/* ---- products -------------------------------------------------------------------------------- */

static struct scratch scratch_of(const struct backend *b, int thread)
{
    int64_t size[3];
    scratch_sizes(&b->shape, &b->limits, size);
    float *at = b->scratch + thread * b->scratch_size;
    return (struct scratch){
        .rows = at, .norm = at + size[0], .forms = (char *)(at + size[0] + size[1])};
}

/* The input's rows in each form that the matrix wants. */
struct inputs {
    const char *rows[ACTIVATIONS];
    int64_t stride[ACTIVATIONS];
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
    if (p->x_bf16)
        return (struct inputs){
            .rows = {[ACTIVATION_BF16] = (const char *)p->x_bf16},
            .stride = {[ACTIVATION_BF16] = w->columns * (int64_t)sizeof(uint16_t)}};
    return (struct inputs){
        .rows = {[ACTIVATION_F32] = (const char *)(p->norm ? norm : p->x),
                 [ACTIVATION_I8] = forms,
                 [ACTIVATION_BF16] = forms + bf16_begins(w)},
        .stride = {w->columns * (int64_t)sizeof(float), w->forms_bytes, w->forms_bytes}};
}

static void prepare_shared_row(const struct rows_work *w, int64_t i, int thread)
{
    const struct matrix *m = w->product->w;
    float *norm = m->wants[ACTIVATION_F32]
                      ? w->b->norm + i * m->columns
                      : scratch_of(w->b, thread).norm; /* for the other forms */
    prepare_row(w->product, i, norm, w->b->forms + i * m->forms_bytes);
}

/* Tokens that are computed together: their rows stay in a core's cache while RUN panels pass. */
static int64_t token_block(const struct product *p, int64_t stride)
{
    enum { ROWS_BYTES = 192 << 10, TILES = 12 /* whole tiles, but of 5 */ };
    int64_t n = ROWS_BYTES / stride / TILES * TILES;
    if (n < TILES) n = TILES;
    return n < p->n ? n : p->n;
}

/* n_panels panels from `first` on, `stride` bytes apart, with n tokens from t on. */
static void run_kernel(const struct product *p, const struct segment *s, int64_t first,
                       int64_t n_panels, int64_t stride, int64_t t, int64_t n,
                       const struct inputs *in, const struct output *out)
{
    p->b->kernels->product(s->pack, s->panels + first * s->stride, n_panels, stride, p->w->columns,
                           in->rows[s->form] + t * in->stride[s->form], in->stride[s->form], n,
                           out);
}

/* Where rows from `first` on, of which there are so many, go, of tokens from t on. */
static struct output output_of(const struct product *p, int64_t first, int64_t rows, int64_t t)
{
    return (struct output){.finish = p->finish,
                           .y = p->y + t * p->y_stride + first,
                           .y_bf16 = p->y_bf16 ? p->y_bf16 + t * p->y_stride + first : NULL,
                           .stride = p->y_stride,
                           .rows = rows,
                           .bias = p->bias ? p->bias->v + first : NULL};
}

static void product_panels(const struct product *p, const struct segment *s, int64_t begin,
                           int64_t end, const struct inputs *in)
{
    int64_t block = token_block(p, in->stride[s->form]), n, n_panels;
    for (int64_t panel = begin; panel < end; panel += n_panels) {
        n_panels = end - panel < RUN ? end - panel : RUN;
        for (int64_t t = 0; t < p->n; t += n) {
            int64_t row = panel * PANEL;
            struct output out = output_of(p, s->first_row + row, s->rows - row, t);
            n = p->n - t < block ? p->n - t : block;
            run_kernel(p, s, panel, n_panels, s->stride, t, n, in, &out);
        }
    }
}

/* A panel of gate and one of up that are of different types: each alone, then together. */
static void silu_apart(const struct product *p, int64_t panel, int64_t t, int64_t n,
                       const struct inputs *in, const struct output *out, float *rows)
{
    float *gates = rows, *ups = rows + n * PANEL;
    int64_t n_rows = out->rows < PANEL ? out->rows : PANEL;
    for (int i = 0; i < 2; i++) {
        struct output alone = {.y = i ? ups : gates, .stride = PANEL, .rows = PANEL};
        run_kernel(p, &p->w->segments[i], panel, 1, 0, t, n, in, &alone);
    }
    p->b->kernels->silu_mul(gates, ups, (int32_t)(n * PANEL), gates);
    for (int64_t i = 0; i < n; i++) {
        const float *row = gates + i * PANEL;
        if (!out->y_bf16) memcpy(out->y + i * out->stride, row, (size_t)n_rows * sizeof(float));
        for (int64_t r = 0; r < n_rows && out->y_bf16; r++)
            out->y_bf16[i * out->stride + r] = bf16_from_f32(row[r]);
    }
}

/* Panels of gate and those of up beside them, to the activations that they give. */
static void silu_panels(const struct product *p, int64_t begin, int64_t end,
                        const struct inputs *in, const struct scratch *scratch)
{
    const struct segment *gate = &p->w->segments[0], *up = &p->w->segments[1];
    bool alike = gate->pack == up->pack;
    int64_t stride = in->stride[gate->form] > in->stride[up->form] ? in->stride[gate->form]
                                                                   : in->stride[up->form];
    int64_t block = token_block(p, stride), n, n_pairs;
    for (int64_t panel = begin; panel < end; panel += n_pairs) {
        n_pairs = !alike ? 1 : end - panel < RUN / 2 ? end - panel : RUN / 2;
        for (int64_t t = 0; t < p->n; t += n) {
            int64_t row = panel * PANEL;
            struct output out = output_of(p, row, gate->rows - row, t);
            n = p->n - t < block ? p->n - t : block;
            if (alike)
                run_kernel(p, gate, panel, 2 * n_pairs, gate->stride / 2, t, n, in, &out);
            else
                silu_apart(p, panel, t, n, in, &out, scratch->rows);
        }
    }
}

static void product_share(void *arg, int thread, int n_threads)
{
    const struct product *p = arg;
    struct backend *b = p->b;
    struct scratch scratch = scratch_of(b, thread);
    struct inputs in = inputs_at(p, b->norm, b->forms);
    if (p->n <= ALONE && !p->x_bf16) {
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
        if (from < to) product_panels(p, s, from, to, &in);
    }
}

void cpu_product(const struct product *p)
{
    if (p->n > ALONE && !p->x_bf16 && (p->norm || p->w->forms_bytes))
        cpu_for_rows(
            &(struct rows_work){.b = p->b, .product = p, .n = p->n, .row = prepare_shared_row});
    pool_run(p->b->pool, product_share, (void *)p);
}
