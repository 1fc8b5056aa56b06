/*
 * The CPU's kernels: products are those of the file's exact weights, one token gives the same bits
 * as many, every instruction set agrees with the plain operations.
 */
#include "support.h"

#include <math.h>

#include "base/random.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/plain.h"

#if LINNET_EMULATED_KERNELS
extern const struct kernels kernels_emulated_avx512, kernels_emulated_avx512_dots;
#endif

static const struct kernels *usable[10];
static int n_usable;

static int find_kernels(void **state)
{
    (void)state;
    while (kernels_usable(n_usable)) {
        usable[n_usable] = kernels_usable(n_usable);
        n_usable++;
    }
#if LINNET_EMULATED_KERNELS
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        usable[n_usable++] = &kernels_emulated_avx512;
        usable[n_usable++] = &kernels_emulated_avx512_dots;
    }
#endif
    return 0;
}

static float uniform(uint64_t counter)
{
    return (float)(2 * random_uniform(7, counter, 1) - 1);
}

/* What rows are made of besides their scales. */
enum filling { RANDOM = -1, LEAST = 0, MIDDLE = 0x80, MOST = 0xFF }; /* any, or all bytes that */

/* Rows of a type; scales are small f16 numbers, some of them subnormal. */
static uint8_t *new_rows(enum dtype dtype, enum filling filling, int64_t rows, int64_t columns)
{
    int64_t bytes = dtype_bytes(dtype, columns) * rows, block = dtype_block_bytes(dtype);
    uint8_t *data = malloc((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++)
        data[i] = filling == RANDOM ? (uint8_t)random_u64(3, (uint64_t)i, dtype) : (uint8_t)filling;
    for (int64_t b = 0; b < bytes / block; b++) {
        uint16_t d = f16_from_f32(uniform((uint64_t)b) * (b % 5 ? 0.01f : 2e-6f)),
                 m = f16_from_f32(uniform((uint64_t)b + 1));
        float f = uniform((uint64_t)b + 2);
        uint8_t *p = data + b * block;
        if (dtype == DTYPE_F32) memcpy(p, &f, 4);
        if (dtype == DTYPE_F16) memcpy(p, &m, 2);
        if (dtype == DTYPE_BF16) memcpy(p, &(uint16_t){bf16_from_f32(f)}, 2);
        if (block <= 4) continue;
        memcpy(dtype == DTYPE_Q6_K ? p + offsetof(struct block_q6_k, d) : p, &d, 2);
        bool has_min = dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_1 || dtype == DTYPE_Q4_K ||
                       dtype == DTYPE_Q5_K;
        if (has_min) memcpy(p + 2, &m, 2);
    }
    return data;
}

enum { ROWS = 13, TOKENS = 29 }; /* which repeat in a panel; tokens that are no whole tile */

/* Three panels of random rows, each from another row on, and the first one's values in double. */
struct panel {
    enum dtype dtype;
    enum pack pack;
    int64_t columns, bytes, stride;
    uint8_t *data;  /* of the panels, a stride apart: there is room between them */
    double *values; /* [PANEL, columns] */
};

static struct panel new_panel(enum dtype dtype, enum filling filling)
{
    int64_t block = dtype_block(dtype);
    struct panel p = {.dtype = dtype,
                      .pack = pack_of(dtype),
                      .columns = block == 256  ? 768
                                 : block == 32 ? 608
                                               : 601};
    int64_t row_bytes = dtype_bytes(dtype, p.columns);
    uint8_t *rows_data = new_rows(dtype, filling, ROWS, p.columns);
    const void *rows[PANEL];
    float *row = malloc((size_t)p.columns * 4);
    p.values = calloc((size_t)(PANEL * p.columns), sizeof(double));
    for (int r = 0; r < PANEL; r++) {
        rows[r] = rows_data + r % ROWS * row_bytes;
        dtype_to_f32(dtype, rows[r], p.columns, row);
        for (int64_t c = 0; c < p.columns; c++) p.values[r * p.columns + c] = row[c];
    }
    p.bytes = pack_panel_bytes(p.pack, p.columns);
    p.stride = p.bytes + 64;
    p.data = malloc((size_t)(3 * p.stride));
    for (int i = 0; i < 3; i++) {
        const void *turned[PANEL];
        for (int r = 0; r < PANEL; r++) turned[r] = rows[(r + i) % PANEL];
        pack_panel(dtype, turned, p.columns, p.data + i * p.stride);
    }
    free(row), free(rows_data);
    return p;
}

/* TOKENS rows of activations, random ones or as large as they can be, in the form that the kernels
 * want for the panel, and what they then stand for. */
struct activations {
    int64_t stride;
    char *rows;
    double *values;
};

static struct activations new_activations(const struct kernels *k, const struct panel *p,
                                          bool random)
{
    enum activation form = kernels_activation(k, p->pack);
    int64_t columns = p->columns;
    struct activations a = {.stride = activation_bytes(form, columns)};
    a.rows = malloc((size_t)(TOKENS * a.stride));
    a.values = malloc((size_t)(TOKENS * columns) * sizeof(double));
    float *x = malloc((size_t)columns * 4);
    for (int64_t t = 0; t < TOKENS; t++) {
        char *row = a.rows + t * a.stride;
        double *value = a.values + t * columns;
        for (int64_t c = 0; c < columns; c++)
            x[c] = random ? uniform((uint64_t)(t * columns + c) + 999) : t % 2 ? 1 : -1;
        if (form == ACTIVATION_F32) memcpy(row, x, (size_t)columns * 4);
        if (form != ACTIVATION_F32) k->activate(form, x, columns, row);
        for (int64_t c = 0; c < columns; c++) {
            if (form == ACTIVATION_F32) value[c] = x[c];
            if (form == ACTIVATION_BF16) {
                uint16_t h;
                memcpy(&h, row + 2 * c, 2);
                assert_int_equal(h, bf16_from_f32(x[c]));
                value[c] = f32_from_bf16(h);
            }
            if (form == ACTIVATION_I8) {
                const struct quant_group *g = (const struct quant_group *)row + c / GROUP;
                value[c] = (double)g->d * g->q[c % GROUP];
                assert_true(fabs(value[c] - x[c]) <= g->d * 0.500001);
            }
        }
    }
    free(x);
    return a;
}

/* y[n][n_panels * 16] of some of the panels and the first n rows. */
static void multiply(const struct kernels *k, const struct panel *p, int first, int n_panels,
                     const char *rows, int64_t row_bytes, int64_t n, float *y)
{
    struct output out = {.y = y, .stride = n_panels * PANEL, .rows = n_panels * PANEL};
    k->product(p->pack, p->data + first * p->stride, n_panels, p->stride, p->columns, rows,
               row_bytes, n, &out);
}

/* One token, any number of tokens, any number of panels: the same bits; and the exact product of
 * weights and activations but for the rounding of its own sums. */
static void check_products(enum dtype dtype, enum filling filling)
{
    struct panel p = new_panel(dtype, filling);
    static float many[3][TOKENS * PANEL], few[3 * TOKENS * PANEL];
    for (int i = 0; i < n_usable; i++) {
        const struct kernels *k = usable[i];
        struct activations a = new_activations(k, &p, filling == RANDOM);
        for (int panel = 0; panel < 3; panel++)
            multiply(k, &p, panel, 1, a.rows, a.stride, TOKENS, many[panel]);
        for (int n = 1; n < TOKENS; n++) {
            multiply(k, &p, 0, 3, a.rows, a.stride, n, few);
            for (int at = 0; at < 3 * n; at++)
                assert_memory_equal(few + at * PANEL, many[at % 3] + at / 3 * PANEL, PANEL * 4);
        }
        for (int t = 0; t < TOKENS; t++) {
            multiply(k, &p, 0, 1, a.rows + t * a.stride, a.stride, 1, few);
            assert_memory_equal(few, many[0] + t * PANEL, PANEL * 4);
            for (int r = 0; r < PANEL; r++) {
                double sum = 0, size = 0; /* worst case: K u sum |a b| */
                for (int64_t c = 0; c < p.columns; c++) {
                    double term = p.values[r * p.columns + c] * a.values[t * p.columns + c];
                    sum += term;
                    size += fabs(term);
                }
                /* a chain of one or two terms for a group, and the rounding of a scale */
                double terms =
                    (double)(dtype_block(dtype) > 1 ? 2 * p.columns / GROUP + 1 : p.columns);
                if (!(fabs(few[r] - sum) <= terms * 0x1p-24 * size + 1e-30))
                    fail_msg("%s %s row %d: %.9g, expected %.9g", k->name, dtype_name(dtype), r,
                             few[r], sum);
            }
        }
        free(a.rows), free(a.values);
    }
    free(p.data), free(p.values);
}

static void product_does_not_depend_on_tokens(void **state)
{
    (void)state;
    for (enum dtype dtype = 0; dtype < DTYPE_COUNT; dtype++) check_products(dtype, RANDOM);
}

/* The largest sums that there may be: nothing is cut off in 16 bits. */
static void products_at_their_limits(void **state)
{
    (void)state;
    static const enum filling fillings[] = {LEAST, MIDDLE, MOST};
    for (enum dtype dtype = 0; dtype < DTYPE_COUNT; dtype++)
        for (size_t i = 0; i < 3 && dtype_block(dtype) > 1; i++) check_products(dtype, fillings[i]);
}

/* What becomes of sums, in each kind of loop and with each size of a tile: the same arithmetic as
 * on the sums alone, and no row touched beyond those that there are. */
static void check_ends(const struct kernels *k, enum dtype dtype, int n)
{
    enum { PANELS = 4, WIDE = PANELS * PANEL, SOME = WIDE - 3, HALF = WIDE / 2 - 5 };
    struct panel p = new_panel(dtype, RANDOM);
    struct activations a = new_activations(k, &p, true);
    char *data = malloc((size_t)(PANELS * p.stride));
    for (int i = 0; i < PANELS; i++)
        memcpy(data + i * p.stride, p.data + i % 3 * p.stride, (size_t)p.stride);
    static float sums[TOKENS * WIDE], y[TOKENS * WIDE], bias[WIDE], gate[WIDE / 2], up[WIDE / 2];
    static uint16_t y_bf16[TOKENS * WIDE];
    struct output out = {.y = sums, .stride = WIDE, .rows = WIDE};
    k->product(p.pack, data, PANELS, p.stride, p.columns, a.rows, a.stride, n, &out);
    for (int r = 0; r < WIDE; r++) bias[r] = r < SOME ? uniform((uint64_t)r) : NAN;
    for (int kind = 0; kind < 4; kind++) { /* stored or added, without bias or with it */
        bool add = kind & 1, biased = kind & 2;
        for (int i = 0; i < n * WIDE; i++) y[i] = uniform((uint64_t)i + 77);
        out = (struct output){.finish = add ? ADD : STORE,
                              .y = y,
                              .stride = WIDE,
                              .rows = SOME,
                              .bias = biased ? bias : NULL};
        k->product(p.pack, data, PANELS, p.stride, p.columns, a.rows, a.stride, n, &out);
        for (int i = 0; i < n * WIDE; i++) {
            float want = uniform((uint64_t)i + 77), sum = sums[i];
            if (biased) sum += bias[i % WIDE];
            if (i % WIDE < SOME) want = add ? want + sum : sum;
            assert_memory_equal(&y[i], &want, sizeof want);
        }
    }
    for (int i = 0; i < n * WIDE; i++) y[i] = 7, y_bf16[i] = 7;
    out = (struct output){.finish = SILU_MUL, .y = y, .stride = WIDE, .rows = HALF};
    k->product(p.pack, data, PANELS, p.stride, p.columns, a.rows, a.stride, n, &out);
    out.y = NULL, out.y_bf16 = y_bf16;
    k->product(p.pack, data, PANELS, p.stride, p.columns, a.rows, a.stride, n, &out);
    for (int t = 0; t < n; t++) {
        for (int r = 0; r < WIDE / 2; r++) {
            int at = t * WIDE + r / PANEL * 2 * PANEL + r % PANEL;
            gate[r] = sums[at], up[r] = sums[at + PANEL];
        }
        k->silu_mul(gate, up, WIDE / 2, gate);
        for (int r = 0; r < WIDE; r++) {
            float want = r < HALF ? gate[r] : 7;
            uint16_t rounded = r < HALF ? bf16_from_f32(gate[r]) : 7;
            assert_memory_equal(&y[t * WIDE + r], &want, sizeof want);
            assert_int_equal(y_bf16[t * WIDE + r], rounded);
        }
    }
    free(data), free(p.data), free(p.values), free(a.rows), free(a.values);
}

static void products_end_as_they_should(void **state)
{
    (void)state;
    for (int i = 0; i < n_usable; i++)
        for (enum dtype dtype = 0; dtype < DTYPE_COUNT; dtype++)
            for (int n = 1; n <= TOKENS; n += n < 6 ? 1 : 5) check_ends(usable[i], dtype, n);
}

/* A row of zeros with a one in a column. */
static void unit_row(enum activation form, int64_t columns, int64_t c, char *row)
{
    memset(row, 0, (size_t)activation_bytes(form, columns));
    if (form == ACTIVATION_F32) ((float *)row)[c] = 1;
    if (form == ACTIVATION_BF16) ((uint16_t *)row)[c] = bf16_from_f32(1);
    if (form != ACTIVATION_I8) return;
    struct quant_group *g = (struct quant_group *)row;
    for (int64_t i = 0; i < columns / GROUP; i++) g[i].d = 1;
    g[c / GROUP].q[c % GROUP] = 1;
    g[c / GROUP].sum = 1;
    g[c / GROUP].minus[c % GROUP / 16] = g[c / GROUP].minus[2] = -1;
}

/* Each weight multiplied by one is the file's value, to the bit. */
static void packed_weights_are_exact(void **state)
{
    (void)state;
    for (enum dtype dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        struct panel p = new_panel(dtype, RANDOM);
        float got[PANEL];
        char *row = malloc((size_t)p.columns * 8);
        for (int i = 0; i < n_usable; i++) {
            enum activation form = kernels_activation(usable[i], p.pack);
            for (int64_t c = 0; c < p.columns; c++) {
                unit_row(form, p.columns, c, row);
                multiply(usable[i], &p, 0, 1, row, activation_bytes(form, p.columns), 1, got);
                for (int r = 0; r < PANEL; r++)
                    if ((double)got[r] != p.values[r * p.columns + c])
                        fail_msg("%s %s row %d column %lld: %.9g, expected %.9g", usable[i]->name,
                                 dtype_name(dtype), r, (long long)c, got[r],
                                 p.values[r * p.columns + c]);
            }
        }
        free(p.data), free(p.values), free(row);
    }
}

/* Integer sums are exact, so with quantized weights all sets that have fused multiply-adds agree to
 * the bit. */
static void sets_agree_with_quantized_weights(void **state)
{
    (void)state;
    for (enum dtype dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        if (dtype_block(dtype) == 1) continue;
        struct panel p = new_panel(dtype, RANDOM);
        float first[TOKENS * PANEL], other[TOKENS * PANEL];
        for (int i = 0; i < n_usable; i++) {
            if (i > 0 && strcmp(usable[i]->name, "generic") == 0) continue;
            struct activations a = new_activations(usable[i], &p, true);
            multiply(usable[i], &p, 0, 1, a.rows, a.stride, TOKENS, i ? other : first);
            if (i) assert_memory_equal(first, other, sizeof first);
            free(a.rows), free(a.values);
        }
        free(p.data), free(p.values);
    }
}

/* What is not finite must not pass for a number; a group of zeros, or of almost nothing, is one of
 * zeros; the largest magnitudes come out whole. */
static void quantized_rows_at_their_limits(void **state)
{
    (void)state;
    for (int i = 0; i < n_usable; i++) {
        float x[3 * GROUP] = {0};
        struct quant_group g[3];
        for (int c = 0; c < GROUP; c++) x[GROUP + c] = c % 2 ? 3e38f : -3e38f;
        for (int c = 0; c < GROUP; c++) x[2 * GROUP + c] = 1e-38f;
        usable[i]->activate(ACTIVATION_I8, x, 3 * GROUP, g);
        for (int c = 0; c < GROUP; c++) {
            assert_int_equal(g[0].q[c], 0);
            assert_int_equal(g[1].q[c], c % 2 ? 127 : -127);
            assert_int_equal(g[2].q[c], 0);
        }
        assert_true(g[0].d == 0 && g[0].sum == 0 && g[2].d == 0 && isfinite(g[1].d));
        for (int c = 0; c < 3 * GROUP; c += 7)
            for (int bad = 0; bad < 3; bad++) {
                float old = x[c];
                x[c] = bad == 0 ? NAN : bad == 1 ? INFINITY : -INFINITY;
                usable[i]->activate(ACTIVATION_I8, x, 3 * GROUP, g);
                assert_true(isnan(g[c / GROUP].d) && isnan(g[c / GROUP].sum));
                x[c] = old;
            }
    }
}

static void rows_agree_with_plain(void **state)
{
    (void)state;
    for (int32_t n = 2; n <= 200; n += n < 40 ? 2 : 23) {
        float x[400], w[400], want[400], got[400];
        for (int i = 0; i < 400; i++)
            x[i] = 8 * uniform((uint64_t)(i + n)), w[i] = uniform((uint64_t)(i + 7 * n));
        for (int k = 0; k < n_usable; k++) {
            plain_rmsnorm(x, w, n, 1e-5f, want);
            usable[k]->rmsnorm(x, w, n, 1e-5f, got);
            for (int i = 0; i < n; i++)
                assert_true(fabsf(got[i] - want[i]) <= 1e-6f * fabsf(want[i]) + 1e-12f);
            plain_silu_mul(x, w, n, want);
            usable[k]->silu_mul(x, w, n, got);
            for (int i = 0; i < n; i++)
                assert_true(fabsf(got[i] - want[i]) <= 1e-6f * fabsf(want[i]) + 1e-12f);
            if (n % 2) continue;
            memcpy(want, x, sizeof x);
            memcpy(got, x, sizeof x);
            plain_rope(want, w, n);
            usable[k]->rope(got, w, n);
            for (int i = 0; i < n; i++) assert_true(fabsf(got[i] - want[i]) <= 2e-6f);
        }
    }
}

/* silu at the ends of the scale: no NaN, the right limits; NaN stays NaN. */
static void silu_keeps_its_limits(void **state)
{
    (void)state;
    float gate[16] = {-1e30f, -200, -88, -87, 0, 87, 88, 200, 1e30f, NAN}, up[16], out[16];
    for (int i = 0; i < 16; i++) up[i] = 1;
    for (int k = 0; k < n_usable; k++) {
        usable[k]->silu_mul(gate, up, 16, out);
        assert_true(fabsf(out[1]) < 1e-30f && fabsf(out[2]) < 1e-30f && out[4] == 0);
        assert_true(out[5] == 87 && out[6] == 88 && out[7] == 200 && out[8] == 1e30f &&
                    isnan(out[9]));
    }
}

/* Room for a cache in 8 bits of so many floats of keys or values. */
#define BYTES_FOR(floats, head_dim) ((floats) / (16 * (head_dim)) * (16 * (head_dim) + 64))

/* A token's values, `stride` floats apart, to integers at `to`; the floats become what these stand
 * for. Returns the scale, NaN where a value is not finite. */
static float to_int8(float *x, int n, int stride, int8_t *to)
{
    float max = 0;
    for (int d = 0; d < n; d++) {
        if (!isfinite(x[d * stride])) return NAN;
        max = fmaxf(max, fabsf(x[d * stride]));
    }
    for (int d = 0; d < n; d++) {
        to[d * stride] = (int8_t)(max > 0 ? lrintf(x[d * stride] / max * 127) : 0);
        x[d * stride] = max / 127 * (float)to[d * stride];
    }
    return max / 127;
}

/* keys [n][head_dim][16] and values [n][16][head_dim] as the kernels want them, in 8 bits in
 * `room`, 2 * BYTES_FOR. */
static struct kv_head view(float *keys, float *values, int n, int head_dim, int8_t *room)
{
    int64_t bytes = room ? 16 * head_dim + 64 : 16 * head_dim * 4;
    struct kv_head kv = {(const char *)keys, (const char *)values, bytes, room != NULL};
    if (!room) return kv;
    kv.keys = (const char *)room, kv.values = (const char *)room + n * bytes;
    for (int which = 0; which < 2; which++)
        for (int b = 0; b < n; b++, room += bytes)
            for (int t = 0; t < 16; t++) {
                float *x = (which ? values : keys) + b * head_dim * 16 + (which ? t * head_dim : t);
                float scale =
                    to_int8(x, head_dim, which ? 1 : 16, room + (which ? t * head_dim : t));
                memcpy(room + 16 * head_dim + 4 * t, &scale, 4);
            }
    return kv;
}

/* Case N05: scores beyond half precision. One head of 128, q = k1 = 30, k2 differs in one element.
 */
static void large_scores_stay_finite(void **state)
{
    (void)state;
    enum { D = 128 };
    static float keys[D * 16], values[16 * D], q[D], out[D],
        scratch[ATTENTION_QUERIES * (2 * D + 2 + ATTENTION_CHUNK)];
    int32_t block = 0;
    struct kv_head kv = view(keys, values, 1, D, NULL);
    for (int d = 0; d < D; d++) {
        q[d] = keys[d * 16] = keys[d * 16 + 1] = 30;
        values[d] = 1;
        values[D + d] = 0;
    }
    keys[5 * 16 + 1] = 27;
    for (int k = 0; k < n_usable; k++) {
        usable[k]->attend(&(struct query){q, 2, out}, 1, &kv, &block, D, scratch);
        for (int d = 0; d < D; d++) assert_true(fabsf(out[d] - 0.99965f) < 1e-5f);
    }
}

/* A key that is not a number must not pass for one. */
static void attention_keeps_nan(void **state)
{
    (void)state;
    enum { D = 16 };
    static float keys[2 * D * 16], values[2 * 16 * D], q[D], out[D],
        scratch[ATTENTION_QUERIES * (2 * D + 2 + ATTENTION_CHUNK)];
    static int8_t room[2 * BYTES_FOR(2 * D * 16, D)];
    static const int32_t blocks[2] = {0, 1};
    static const int32_t places[] = {0, 7, 15, 16, 18};
    for (int i = 0; i < D; i++) q[i] = 1;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        float *key = &keys[places[i] / 16 * D * 16 + places[i] % 16];
        for (int bad = 0; bad < 2; bad++) {
            *key = bad ? NAN : INFINITY;
            for (int k = 0; k < 2 * n_usable; k++) {
                struct kv_head kv = view(keys, values, 2, D, k % 2 ? room : NULL);
                usable[k / 2]->attend(&(struct query){q, 19, out}, 1, &kv, blocks, D, scratch);
                assert_true(isnan(out[0]));
            }
        }
        *key = 0;
    }
}

/* Attention over several chunks against the formula in double, for odd lengths and block orders. */
static void check_attention(bool int8)
{
    enum { D = 40, BLOCKS = 40 };
    static int8_t room[2 * BYTES_FOR(BLOCKS * D * 16, D)];
    static float keys[BLOCKS * D * 16], values[BLOCKS * 16 * D],
        scratch[ATTENTION_QUERIES * (2 * D + 2 + ATTENTION_CHUNK)];
    float q[D], out[D];
    int32_t table[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) table[i] = (i * 7 + 3) % BLOCKS;
    for (int i = 0; i < BLOCKS * D * 16; i++)
        keys[i] = uniform((uint64_t)i), values[i] = uniform((uint64_t)i + 77777);
    for (int d = 0; d < D; d++) q[d] = 4 * uniform((uint64_t)d + 5);
    struct kv_head kv = view(keys, values, BLOCKS, D, int8 ? room : NULL);
    static const int32_t lengths[] = {1,   2,   15,  16,  17,  63,  64, 65,
                                      255, 256, 257, 300, 512, 513, 640};
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
        double sum = 0, want[D] = {0};
        for (int32_t i = 0; i < lengths[l]; i++) {
            double dot = 0;
            for (int d = 0; d < D; d++)
                dot += (double)q[d] * keys[table[i / 16] * D * 16 + d * 16 + i % 16];
            double p = exp(dot / sqrt(D));
            sum += p;
            for (int d = 0; d < D; d++)
                want[d] += p * values[table[i / 16] * D * 16 + i % 16 * D + d];
        }
        for (int k = 0; k < n_usable; k++) {
            usable[k]->attend(&(struct query){q, lengths[l], out}, 1, &kv, table, D, scratch);
            for (int d = 0; d < D; d++)
                if (!(fabs(out[d] - want[d] / sum) < 2e-6))
                    fail_msg("%s: %d keys: %g, expected %g", usable[k]->name, lengths[l], out[d],
                             want[d] / sum);
        }
    }
}

static void attention_agrees_with_formula(void **state)
{
    (void)state;
    check_attention(false);
    check_attention(true);
}

/* The same in halves: a chunk at a time, then merged. */
static void attend_by_chunks(const struct kernels *set, const struct query *query,
                             const struct kv_head *kv, const int32_t *table, int32_t head_dim,
                             float *out)
{
    enum { CHUNKS = 3, WIDEST = 80 };
    static float parts[CHUNKS * (WIDEST + 2)],
        scratch[ATTENTION_QUERIES * (2 * WIDEST + 2 + ATTENTION_CHUNK)];
    int32_t n = (query->n_keys + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK;
    for (int32_t i = n - 1; i >= 0; i--) {
        float *part = parts + i * attention_part(head_dim);
        set->attend_chunk(query, 1, kv, table, head_dim, i * ATTENTION_CHUNK, &part, scratch);
    }
    set->merge_chunks(parts, n, head_dim, out);
}

/* A query gets the same bits alone and beside others, and keys beyond its own are not looked at,
 * whatever they are. */
static void queries_do_not_depend_on_each_other(void **state)
{
    (void)state;
    enum { D = 75, BLOCKS = 40, N = 11 }; /* more than the widest vectors at once, and a rest */
    static int8_t room[2 * BYTES_FOR(BLOCKS * D * 16, D)];
    static float keys[BLOCKS * D * 16], values[BLOCKS * 16 * D], q[N][D], together[N][D], alone[D],
        scratch[ATTENTION_QUERIES * (2 * D + 2 + ATTENTION_CHUNK)];
    static const int32_t starts[] = {1, 5, 250, 251, 254, 256, 500, 509};
    int32_t table[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) table[i] = (i * 7 + 3) % BLOCKS;
    for (int i = 0; i < N * D; i++) q[i / D][i % D] = 4 * uniform((uint64_t)i + 5);
    for (size_t l = 0; l < sizeof starts / sizeof *starts; l++)
        for (int step = 0; step < 3; step++) {
            int32_t last = starts[l] + (N - 1) * step;
            for (int i = 0; i < BLOCKS * D * 16; i++)
                keys[i] = uniform((uint64_t)i), values[i] = uniform((uint64_t)i + 77777);
            for (int32_t key = last; key < BLOCKS * 16; key++) /* nobody's */
                for (int d = 0; d < D; d++) {
                    keys[(table[key / 16] * D + d) * 16 + key % 16] = NAN;
                    values[(table[key / 16] * 16 + key % 16) * D + d] = INFINITY;
                }
            struct query queries[N];
            for (int i = 0; i < N; i++)
                queries[i] = (struct query){q[i], starts[l] + i * step, together[i]};
            for (int k = 0; k < 2 * n_usable; k++) {
                const struct kernels *set = usable[k % n_usable];
                struct kv_head kv = view(keys, values, BLOCKS, D, k < n_usable ? NULL : room);
                set->attend(queries, N, &kv, table, D, scratch);
                for (int i = 0; i < N; i++) {
                    set->attend(&(struct query){q[i], queries[i].n_keys, alone}, 1, &kv, table, D,
                                scratch);
                    assert_memory_equal(alone, together[i], sizeof alone);
                    assert_true(isfinite(alone[0]));
                    attend_by_chunks(set, &queries[i], &kv, table, D, alone);
                    assert_memory_equal(alone, together[i], sizeof alone);
                }
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_weights_are_exact),
        cmocka_unit_test(product_does_not_depend_on_tokens),
        cmocka_unit_test(products_at_their_limits),
        cmocka_unit_test(products_end_as_they_should),
        cmocka_unit_test(sets_agree_with_quantized_weights),
        cmocka_unit_test(quantized_rows_at_their_limits),
        cmocka_unit_test(rows_agree_with_plain),
        cmocka_unit_test(silu_keeps_its_limits),
        cmocka_unit_test(large_scores_stay_finite),
        cmocka_unit_test(attention_agrees_with_formula),
        cmocka_unit_test(attention_keeps_nan),
        cmocka_unit_test(queries_do_not_depend_on_each_other),
    };
    return cmocka_run_group_tests(tests, find_kernels, NULL);
}
