/*
 * The CPU's kernels: packed weights are the exact fp32 values of the file, one token gives the
 * same bits as many, every instruction set agrees with the plain operations.
 */
#include "support.h"

#include <math.h>

#include "base/random.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/plain.h"

static const struct kernels *usable[3];
static int n_usable;

static int find_kernels(void **state)
{
    (void)state;
    static const struct kernels *const sets[] = {
#if defined(__x86_64__)
        &kernels_avx512,
        &kernels_avx2,
#endif
        &kernels_generic
    };
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++)
        if (ops_cpu_force(sets[i]->name)) usable[n_usable++] = sets[i];
    ops_cpu_force(NULL);
    return 0;
}

static float uniform(uint64_t counter)
{
    return (float)(2 * random_uniform(7, counter, 1) - 1);
}

/* Random rows of a type; scales are small f16 numbers, some of them subnormal. */
static uint8_t *random_rows(enum dtype dtype, int64_t rows, int64_t columns)
{
    int64_t bytes = dtype_bytes(dtype, columns) * rows, block = dtype_block_bytes(dtype);
    uint8_t *data = malloc((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) data[i] = (uint8_t)random_u64(3, (uint64_t)i, dtype);
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

enum { ROWS = 13, TOKENS = 29 }; /* a panel that is not full, tokens that are no whole tile */

static void packed_weights_are_exact(void **state)
{
    (void)state;
    for (enum dtype dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        int64_t columns = 768, row_bytes = dtype_bytes(dtype, columns);
        uint8_t *data = random_rows(dtype, ROWS, columns);
        const void *rows[PANEL] = {NULL};
        for (int r = 0; r < ROWS; r++) rows[r] = data + r * row_bytes;
        uint8_t *panel = malloc((size_t)pack_panel_bytes(pack_of(dtype), columns));
        pack_panel(dtype, rows, columns, panel);
        float *want = malloc((size_t)columns * 4), *got = malloc((size_t)columns * PANEL * 4);
        for (int i = 0; i < n_usable; i++) {
            usable[i]->panel_expand(pack_of(dtype), panel, columns, got);
            for (int r = 0; r < PANEL; r++) {
                if (r < ROWS)
                    dtype_to_f32(dtype, rows[r], columns, want);
                else
                    memset(want, 0, (size_t)columns * 4);
                for (int64_t c = 0; c < columns; c++)
                    if (got[c * PANEL + r] != want[c])
                        fail_msg("%s %s row %d column %lld: %.9g, expected %.9g", usable[i]->name,
                                 dtype_name(dtype), r, (long long)c, got[c * PANEL + r], want[c]);
            }
        }
        free(want), free(got), free(panel), free(data);
    }
}

/* One token, any number of tokens: the same bits; and close to the plain product. */
static void product_does_not_depend_on_tokens(void **state)
{
    (void)state;
    for (enum dtype dtype = 0; dtype < DTYPE_COUNT; dtype++) {
        int64_t columns = dtype_block(dtype) == 256  ? 768
                          : dtype_block(dtype) == 32 ? 608
                                                     : 601,
                row_bytes = dtype_bytes(dtype, columns);
        uint8_t *data = random_rows(dtype, PANEL, columns);
        const void *rows[PANEL];
        for (int r = 0; r < PANEL; r++) rows[r] = data + r * row_bytes;
        uint8_t *panel = malloc((size_t)pack_panel_bytes(pack_of(dtype), columns));
        pack_panel(dtype, rows, columns, panel);
        float *x = malloc((size_t)(TOKENS * columns) * 4), *w = malloc((size_t)columns * PANEL * 4),
              *plain = malloc((size_t)columns * PANEL * 4);
        for (int64_t i = 0; i < TOKENS * columns; i++) x[i] = uniform((uint64_t)i + 999);
        for (int r = 0; r < PANEL; r++) dtype_to_f32(dtype, rows[r], columns, plain + r * columns);
        float many[TOKENS * PANEL], few[TOKENS * PANEL], one[3 * PANEL], want[PANEL];
        int64_t bytes = pack_panel_bytes(pack_of(dtype), columns);
        uint8_t *three = malloc((size_t)(3 * bytes)); /* the same panel in each place of a run */
        for (int p = 0; p < 3; p++) memcpy(three + p * bytes, panel, (size_t)bytes);
        for (int i = 0; i < n_usable; i++) {
            usable[i]->panel_expand(pack_of(dtype), panel, columns, w);
            usable[i]->panel_matrix(w, x, columns, TOKENS, columns, many);
            for (int n = 1; n < TOKENS; n++) {
                usable[i]->panel_matrix(w, x, columns, n, columns, few);
                assert_memory_equal(few, many, (size_t)n * PANEL * 4);
            }
            for (int t = 0; t < TOKENS; t++) {
                usable[i]->panels_vector(pack_of(dtype), three, 3, bytes, x + t * columns, columns,
                                         one);
                for (int p = 0; p < 3; p++)
                    assert_memory_equal(one + p * PANEL, many + t * PANEL, PANEL * 4);
                plain_matvec(plain, x + t * columns, PANEL, columns, want);
                for (int r = 0; r < PANEL; r++) {
                    double size = 0; /* worst case: K u sum |a b| */
                    for (int64_t c = 0; c < columns; c++)
                        size += fabs((double)plain[r * columns + c] * x[t * columns + c]);
                    assert_true(fabs((double)one[r] - want[r]) <= (double)columns * 0x1p-24 * size);
                }
            }
        }
        free(x), free(w), free(plain), free(panel), free(data), free(three);
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

/* Case N05: scores beyond half precision. One head of 128, q = k1 = 30, k2 differs in one element.
 */
static void large_scores_stay_finite(void **state)
{
    (void)state;
    enum { D = 128 };
    static float keys[D * 16], values[16 * D], q[D], out[D], scratch[D + ATTENTION_CHUNK];
    int32_t block = 0;
    for (int d = 0; d < D; d++) {
        q[d] = keys[d * 16] = keys[d * 16 + 1] = 30;
        values[d] = 1;
        values[D + d] = 0;
    }
    keys[5 * 16 + 1] = 27;
    for (int k = 0; k < n_usable; k++) {
        usable[k]->attend(q, keys, values, D * 16, &block, 2, D, scratch, out);
        for (int d = 0; d < D; d++) assert_true(fabsf(out[d] - 0.99965f) < 1e-5f);
    }
}

/* A key that is not a number must not pass for one. */
static void attention_keeps_nan(void **state)
{
    (void)state;
    enum { D = 16 };
    static float keys[2 * D * 16], values[2 * 16 * D], q[D], out[D], scratch[D + ATTENTION_CHUNK];
    static const int32_t blocks[2] = {0, 1};
    static const int32_t places[] = {0, 7, 15, 16, 18};
    for (int i = 0; i < D; i++) q[i] = 1;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        float *key = &keys[places[i] / 16 * D * 16 + places[i] % 16];
        for (int bad = 0; bad < 2; bad++) {
            *key = bad ? NAN : INFINITY;
            for (int k = 0; k < n_usable; k++) {
                usable[k]->attend(q, keys, values, D * 16, blocks, 19, D, scratch, out);
                assert_true(isnan(out[0]));
            }
        }
        *key = 0;
    }
}

/* Attention over several chunks against the formula in double, for odd lengths and block orders. */
static void attention_agrees_with_formula(void **state)
{
    (void)state;
    enum { D = 40, BLOCKS = 40 };
    static float keys[BLOCKS * D * 16], values[BLOCKS * 16 * D], scratch[D + ATTENTION_CHUNK];
    float q[D], out[D];
    int32_t table[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) table[i] = (i * 7 + 3) % BLOCKS;
    for (int i = 0; i < BLOCKS * D * 16; i++)
        keys[i] = uniform((uint64_t)i), values[i] = uniform((uint64_t)i + 77777);
    for (int d = 0; d < D; d++) q[d] = 4 * uniform((uint64_t)d + 5);
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
            usable[k]->attend(q, keys, values, D * 16, table, lengths[l], D, scratch, out);
            for (int d = 0; d < D; d++)
                if (!(fabs(out[d] - want[d] / sum) < 2e-6))
                    fail_msg("%s: %d keys: %g, expected %g", usable[k]->name, lengths[l], out[d],
                             want[d] / sum);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_weights_are_exact),
        cmocka_unit_test(product_does_not_depend_on_tokens),
        cmocka_unit_test(rows_agree_with_plain),
        cmocka_unit_test(silu_keeps_its_limits),
        cmocka_unit_test(large_scores_stay_finite),
        cmocka_unit_test(attention_agrees_with_formula),
        cmocka_unit_test(attention_keeps_nan),
    };
    return cmocka_run_group_tests(tests, find_kernels, NULL);
}
