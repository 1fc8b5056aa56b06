/*
 * The promise of docs/numerics.md on a GPU, bit for bit: sequences whose tokens the device chooses,
 * greedily and by all kinds of rules, in batches of 2 to 200, prompts cut anywhere, blocks
 * anywhere, in every way to launch a step, with NaN wherever a step must not look; and the engine,
 * crowded, against itself alone. Each is compared with the sequence alone, launched operation by
 * operation: every token, and every row of logits.
 *
 * usage: device_bits [small | quick]. small: no layers of published widths. quick: a few steps for
 * tools that slow a GPU down a hundred times, and no NaN, which would hide memory never written.
 */
#define WORLD_SEQS 200
#include "engine_load.h"
#include "poison.h"
#include "world.h"

#include "engine/api_internal.h"
#include "engine/sampler.h"
#include "model/random.h"

enum { MOST_NEW = 6, MAX_ADJUSTMENTS = 320 };

static struct device gpu;
static bool small, quick;
static int32_t n_new = MOST_NEW; /* tokens of an answer */

struct way {
    const char *what;
    enum launching launching;
    bool together; /* all decode once the last prompt is read, so that steps are recorded */
    bool chunks;   /* prompts are cut */
    bool poison;
};

static const struct way alone_way = {"alone", LAUNCH_EACH, true, false, false};
static const struct way ways[] = {
    {"one kernel a step or recorded", LAUNCH_BEST, true, false, false},
    {"recorded", LAUNCH_RECORDED, true, true, false},
    {"each operation by itself", LAUNCH_EACH, false, true, false},
    {"among prompts", LAUNCH_BEST, false, true, false},
    {"poisoned", LAUNCH_BEST, true, true, true},
    {"recorded, poisoned", LAUNCH_RECORDED, true, false, true},
    {"each by itself, poisoned", LAUNCH_EACH, false, true, true},
};
enum { N_WAYS = sizeof ways / sizeof *ways };

/* What a sequence has given: ids, and the logits that they were chosen from. */
struct answers {
    int32_t ids[MAX_SEQS][MOST_NEW];
    float *rows; /* [MAX_SEQS, MOST_NEW, vocab] */
};

struct play {
    struct world w;
    struct sampler *sampler;
    struct test_sequence seqs[MAX_SEQS];
    struct numbers numbers;
    struct choice_rule rules[MAX_SEQS];
    struct adjustment adjustments[MAX_SEQS][MAX_ADJUSTMENTS];
    struct answers got;
    int n;
    char what[160]; /* the model and the way */
};

static void play_open(struct play *p, const char *name, struct checkpoint *cp,
                      const struct way *way)
{
    linnet_error err;
    snprintf(p->what, sizeof p->what, "%s, %s", name, way->what);
    world_open_with(&p->w, cp, gpu.ops, 4, way->launching);
    assert_ok(sampler_create(p->w.vocab, &p->sampler, &err), err);
    p->got.rows = malloc((size_t)MAX_SEQS * MOST_NEW * (size_t)p->w.vocab * sizeof(float));
    assert_non_null(p->got.rows);
}

static void play_close(struct play *p)
{
    free(p->got.rows);
    sampler_destroy(p->sampler);
    world_close(&p->w);
}

static float *row_of(const struct answers *a, int i, int32_t t, int32_t vocab)
{
    return a->rows + ((size_t)i * MOST_NEW + (size_t)t) * (size_t)vocab;
}

static int32_t length_of(int i)
{
    return i == 0 ? 250 : 1 + (i * 29) % 47;
}

static const linnet_logit_bias bias[] = {{3, 2.5f}, {50, 4}, {7, -1e4f}};

/* Order: temperature, top_k, top_p, min_p, repetition, presence, frequency, seed, bias. */
static const struct sampling settings[] = {
    {0, 0, 1, 0, 1, 0, 0, 1, NULL, 0},
    {1, 0, 1, 0, 1, 0, 0, 2, NULL, 0},
    {0.8f, 20, 1, 0, 1, 0, 0, 3, NULL, 0},
    {1.5f, 0, 0.9f, 0, 1, 0, 0, 4, bias, 3},
    {2, 0, 1, 0.05f, 1, 0, 0, 5, NULL, 0},
    {1.2f, 40, 0.95f, 0.01f, 1.3f, 0.5f, 0.25f, 6, bias, 3},
    {0, 0, 1, 0, 1.5f, 0.5f, 0.5f, 7, NULL, 0},
};

static void make_rule(struct play *p, int row, int i)
{
    const struct test_sequence *s = &p->seqs[i];
    struct sampling g = settings[i % (int)(sizeof settings / sizeof *settings)];
    struct sample_context context = {.tokens = s->tokens,
                                     .n_prompt = s->n_prompt,
                                     .n_output = s->n - s->n_prompt,
                                     .n_allowed = p->w.vocab};
    g.seed += (uint64_t)i;
    sampler_rule(p->sampler, &g, &context, p->adjustments[row], &p->rules[row]);
    assert_true(p->rules[row].n_adjustments <= MAX_ADJUSTMENTS);
}

/* NaN in every buffer, and in the cache wherever no token lies. */
static void poison_all(const struct play *p)
{
    static int32_t used[N_BLOCKS];
    const struct shape *s = &p->w.config.shape;
    bool padded = s->hidden % 64 || s->n_heads * s->head_dim % 64 || s->intermediate % 64;
    memset(used, 0, sizeof used);
    for (int i = 0; i < p->n; i++)
        for (int32_t b = 0; b * KV_BLOCK < p->seqs[i].done; b++) {
            int32_t left = p->seqs[i].done - b * KV_BLOCK;
            used[p->seqs[i].blocks[b]] = left < KV_BLOCK ? left : KV_BLOCK;
        }
    assert_true(poison_cache(p->w.decoder->backend, used));
    assert_true(poison_buffers(p->w.decoder->backend, !padded));
}

/* How many tokens each sequence has in the next step; false: all have answered. */
static bool next_counts(const struct play *p, const struct way *way, uint64_t turn, int32_t *counts)
{
    int32_t room = MAX_TOKENS;
    bool reading = false;
    for (int i = 0; i < p->n; i++) reading |= p->seqs[i].done < p->seqs[i].n_prompt;
    for (int i = 0; i < p->n; i++) {
        const struct test_sequence *s = &p->seqs[i];
        int32_t count = s->n - s->done;
        if (s->done >= s->n_prompt && (s->n == s->n_prompt + n_new || (reading && way->together)))
            count = 0;
        if (s->done < s->n_prompt && way->chunks) {
            int32_t part = 1 + (int32_t)(random_u64(turn, (uint64_t)i, 3) % 90);
            if (part < count) count = part;
        }
        counts[i] = count < room ? count : room;
        room -= counts[i];
    }
    return room < MAX_TOKENS;
}

static void run_turn(struct play *p, const int32_t *counts)
{
    struct step *step = &p->numbers.step;
    const struct chosen *chosen;
    linnet_error err;
    make_step(p->seqs, counts, p->n, &p->numbers);
    for (int32_t row = 0; row < step->n_logits; row++) make_rule(p, row, p->numbers.of[row]);
    assert_ok(decoder_submit(p->w.decoder, step, p->rules, &err), err);
    assert_ok(decoder_collect(p->w.decoder, &chosen, &err), err);
    for (int32_t row = 0; row < step->n_logits; row++) {
        int i = p->numbers.of[row];
        struct test_sequence *s = &p->seqs[i];
        int32_t t = s->n - s->n_prompt;
        if (s->done < s->n) continue; /* in the middle of its prompt */
        if (chosen[row].status)
            fail_msg("%s, %d at once: sequence %d, token %d: status %d, as for NaN", p->what, p->n,
                     i, t, (int)chosen[row].status);
        s->tokens[s->n++] = p->got.ids[i][t] = chosen[row].id;
        gpu.ops->read_buffer(p->w.decoder->backend, BUFFER_LOGITS, row,
                             row_of(&p->got, i, t, p->w.vocab));
    }
}

/* The first n sequences from beginning to end; `place` turns their blocks around. */
static void play_all(struct play *p, const struct way *way, int first, int n, int32_t place)
{
    int32_t counts[MAX_SEQS];
    p->n = first + n;
    for (int i = 0; i < p->n; i++) {
        make_sequence(&p->w, i, length_of(i), &p->seqs[i]);
        if (i < first) p->seqs[i].n = p->seqs[i].done = p->seqs[i].n_prompt + n_new; /* out */
        for (int b = 0; b < BLOCKS_A_SEQ; b++)
            p->seqs[i].blocks[b] = (p->seqs[i].blocks[b] * 7 + place) % N_BLOCKS;
    }
    for (uint64_t turn = 0; next_counts(p, way, turn, counts); turn++) {
        if (way->poison) poison_all(p);
        run_turn(p, counts);
    }
}

static void expect_same(const struct play *p, const struct answers *alone)
{
    size_t vocab = (size_t)p->w.vocab;
    for (int i = 0; i < p->n; i++)
        for (int32_t t = 0; t < n_new; t++) {
            if (memcmp(row_of(&p->got, i, t, p->w.vocab), row_of(alone, i, t, p->w.vocab),
                       vocab * sizeof(float)) != 0)
                fail_msg("%s, %d at once: sequence %d, token %d: its logits are not those that it "
                         "has alone",
                         p->what, p->n, i, t);
            if (p->got.ids[i][t] != alone->ids[i][t])
                fail_msg("%s, %d at once: sequence %d, token %d is %d, alone %d", p->what, p->n, i,
                         t, p->got.ids[i][t], alone->ids[i][t]);
        }
}

/* A file of tests/data, or a shape with random weights. */
static struct checkpoint *open_checkpoint(const char *name, const struct random_shape *shape)
{
    struct checkpoint *cp;
    linnet_error err;
    if (shape)
        assert_ok(random_checkpoint_of(shape, DTYPE_BF16, 1, &cp, &err), err);
    else
        assert_ok(checkpoint_open(data_path(name), &cp, &err), err);
    return cp;
}

static void check_batches(const char *name, const struct random_shape *shape)
{
    static const int all[] = {2, 3, 8, 17, 64, MAX_SEQS}, few[] = {2, 9};
    static struct play alone, play;
    const int *sizes = quick ? few : all;
    size_t n_sizes = quick ? 2 : 6;
    if (shape) name = shape->name;
    print_message("%s: %s\n", gpu.text, name);
    play_open(&alone, name, open_checkpoint(name, shape), &alone_way);
    for (int i = 0; i < sizes[n_sizes - 1]; i++) play_all(&alone, &alone_way, i, 1, 0);
    for (int k = 0; k < N_WAYS; k++) {
        if (quick && ways[k].poison) continue;
        play_open(&play, name, open_checkpoint(name, shape), &ways[k]);
        for (size_t i = 0; i < n_sizes; i++) {
            play_all(&play, &ways[k], 0, sizes[i], 1 + 3 * k + (int32_t)i);
            expect_same(&play, &alone.got);
        }
        play_close(&play);
    }
    play_close(&alone);
}

static void batches(void **state)
{
    (void)state;
    if (!quick) check_batches("qwen2-nano-f32", NULL);
    check_batches("qwen3-tiny", NULL);
    if (!quick) check_batches("gguf/qwen2-mini-q4_k_mix.gguf", NULL);
}

/* Two layers of each, with a small vocabulary that is no whole number of panels. */
static void published_widths(void **state)
{
    (void)state;
    for (int32_t i = 0; i < random_shape_count(); i++) {
        struct random_shape shape = *random_shape_at(i);
        shape.layers = 2;
        shape.vocab = 1003;
        check_batches(NULL, &shape);
    }
}

/* ---- the engine -------------------------------------------------------------------------- */

static linnet_engine *open_engine(linnet_model *model, int32_t n_blocks, bool alone)
{
    linnet_plan plan;
    linnet_engine *engine;
    linnet_error err;
    linnet_engine_options options = {.device = "cuda",
                                     .max_num_seqs = 8,
                                     .max_num_batched_tokens = alone ? 256 : 100,
                                     .no_prefix_caching = alone,
                                     .enforce_eager = alone};
    assert_ok(linnet_engine_plan(model, &options, &plan, &err), err);
    options.kv_cache_memory = (int64_t)n_blocks * plan.block_tokens * plan.kv_bytes_per_token;
    assert_ok(linnet_engine_create(model, &options, &engine, &err), err);
    return engine;
}

/* Too few blocks: requests are preempted, and find blocks of others' prompts. */
static void engine(void **state)
{
    (void)state;
    linnet_model *model;
    linnet_error err;
    linnet_stats stats;
    int32_t n_requests = quick ? 6 : 200;
    assert_ok(linnet_model_open(data_path("qwen3-tiny"), &model, &err), err);
    struct load load = {.crowded = open_engine(model, 12, false),
                        .alone = open_engine(model, 80, true),
                        .at_once = true,
                        .n_requests = n_requests,
                        .seed = 1,
                        .n_vocab = 256,
                        .max_prompt = 80,
                        .max_tokens = quick ? 20 : 80,
                        .plain = 2};
    load_test(&load);
    linnet_engine_get_stats(load.crowded, &stats);
    print_message("%lld preemptions, %lld tokens of prompts were in the cache\n",
                  (long long)stats.n_preemptions, (long long)stats.cached_tokens);
    assert_true(quick || stats.n_preemptions > 0);
    assert_true(quick || stats.cached_tokens > 0);
    linnet_engine_destroy(load.crowded);
    linnet_engine_destroy(load.alone);
    linnet_model_close(model);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(batches), cmocka_unit_test(engine),
                                       cmocka_unit_test(published_widths)};
    linnet_error err;
    quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    small = quick || (argc > 1 && strcmp(argv[1], "small") == 0);
    if (quick) n_new = 3;
    if (argc > 2 || (argc > 1 && !small)) {
        fprintf(stderr, "usage: device_bits [small | quick]\n");
        return 2;
    }
    if (find_device("cuda", &gpu, &err) != LINNET_OK) {
        fprintf(stderr, "device_bits: %s\n", err.message);
        return 1;
    }
    if (!small) return cmocka_run_group_tests(tests, NULL, NULL);
    const struct CMUnitTest some[] = {tests[0], tests[1]};
    return cmocka_run_group_tests(some, NULL, NULL);
}
