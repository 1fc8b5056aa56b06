/*
 * How attention's work is cut into items and dealt out to threads changes no bit: steps of several
 * sequences, long and short, with runs of tokens across the ends of chunks, on 1 to 7 threads.
 */
#include <math.h>

#include "base/random.h"
#include "base/threads.h"
#include "ops/cpu/cpu_internal.h"
#include "support.h"

enum { MAX_SEQS = 6, CONTEXT = 32768, MAX_TOKENS = 64, MAX_BLOCKS = CONTEXT / KV_BLOCK };

/* A sequence's tokens in the step, and all its tokens after it. */
struct part {
    int32_t n_tokens, n_keys;
};

struct load {
    int32_t n_heads, n_kv_heads, head_dim;
    int n;
    struct part parts[MAX_SEQS];
};

static const struct load loads[] = {
    {9, 3, 64, 1, {{1, 2110}}},
    {4, 1, 40, 3, {{1, 2000}, {1, 300}, {1, 257}}},
    {2, 1, 64, 4, {{5, 2306}, {3, 770}, {0, 16}, {1, 1}}},
    {6, 2, 16, 2, {{7, 1030}, {2, 3073}}},
    {7, 7, 43, 2, {{1, 1500}, {2, 255}}},
    {14, 2, 64, 1, {{3, 1281}}},
    {10, 1, 64, 2, {{2, 1030}, {1, 300}}},
};

static float number(uint64_t i, uint64_t stream)
{
    return (float)((double)random_u64(5, i, stream) * 0x1p-63 - 1);
}

/* Everything a step's attention reads, and the results [n_tokens, n_heads, head_dim]. */
static void attend(const struct load *load, enum kv_type kv, int threads, float *out, size_t *n)
{
    struct shape shape = {.n_layers = 1,
                          .hidden = 32,
                          .intermediate = 32,
                          .n_heads = load->n_heads,
                          .n_kv_heads = load->n_kv_heads,
                          .head_dim = load->head_dim,
                          .vocab = 32,
                          .norm_eps = 1e-6f};
    struct limits limits = {.max_tokens = MAX_TOKENS,
                            .max_logits = MAX_SEQS,
                            .max_seqs = MAX_SEQS,
                            .max_context = CONTEXT,
                            .n_blocks = MAX_SEQS * MAX_BLOCKS,
                            .kv = kv};
    static int32_t positions[MAX_TOKENS], starts[MAX_SEQS + 1], tables[MAX_SEQS * MAX_BLOCKS];
    struct step step = {.n_seqs = load->n,
                        .max_blocks = MAX_BLOCKS,
                        .positions = positions,
                        .query_start = starts,
                        .block_tables = tables};
    struct pool *pool;
    struct backend *b;
    linnet_error err;
    assert_ok(pool_create(threads, &pool, &err), err);
    assert_ok(ops_cpu.open(&shape, &limits, pool, &b, &err), err);
    int32_t width = load->n_kv_heads * load->head_dim;
    float *k = malloc(2 * (size_t)width * sizeof *k), *v = k + width;
    for (int32_t i = 0; i < MAX_SEQS * MAX_BLOCKS; i++)
        tables[i] = (int32_t)((int64_t)i * 1001 % (MAX_SEQS * MAX_BLOCKS)); /* coprime */
    for (int seq = 0; seq < load->n; seq++) {
        const struct part *part = &load->parts[seq];
        for (int32_t t = 0; t < part->n_keys; t++) {
            uint64_t at = (uint64_t)(seq * CONTEXT + t) * (uint64_t)width;
            for (int32_t i = 0; i < width; i++) {
                k[i] = number(at + (uint64_t)i, 1);
                v[i] = number(at + (uint64_t)i, 2);
            }
            int32_t block = tables[seq * MAX_BLOCKS + t / KV_BLOCK];
            cpu_store_kv(b, 0, block * KV_BLOCK + t % KV_BLOCK, k, v);
        }
        for (int32_t t = 0; t < part->n_tokens; t++)
            positions[step.n_tokens++] = part->n_keys - part->n_tokens + t;
        starts[seq + 1] = step.n_tokens;
    }
    int64_t row = (int64_t)(load->n_heads + 2 * load->n_kv_heads) * load->head_dim;
    for (int64_t i = 0; i < step.n_tokens * row; i++) b->qkv[i] = 3 * number((uint64_t)i, 3);
    int64_t parts = cpu_attention_parts(&shape, &limits);
    for (int64_t i = 0; i < parts; i++) b->parts[i] = NAN; /* nobody's */
    cpu_attention(b, &step, 0);
    *n = (size_t)(step.n_tokens * load->n_heads * load->head_dim);
    memcpy(out, b->attn, *n * sizeof *out);
    free(k);
    ops_cpu.close(b);
    pool_destroy(pool);
}

static void same_bits_on_any_number_of_threads(void **state)
{
    (void)state;
    static float want[MAX_TOKENS * 14 * 64], got[MAX_TOKENS * 14 * 64];
    size_t n;
    for (size_t i = 0; i < sizeof loads / sizeof *loads; i++)
        for (enum kv_type kv = KV_OWN; kv <= KV_INT8; kv++) {
            attend(&loads[i], kv, 1, want, &n);
            for (int threads = 2; threads <= 7; threads++) {
                attend(&loads[i], kv, threads, got, &n);
                for (size_t at = 0; at < n; at++)
                    if (memcmp(&want[at], &got[at], sizeof *want) != 0)
                        fail_msg("load %zu, cache %d, %d threads: value %zu is %g, alone %g", i, kv,
                                 threads, at, got[at], want[at]);
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bits_on_any_number_of_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
