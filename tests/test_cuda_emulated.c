/*
 * test_cuda_emulated.c - the CUDA backend but for gemm.cu, run on the host (tests/emulator), as a
 * GPU before Hopper (capability 80: separate kernels, recorded steps) and as one that has the
 * decode kernel (90). The emulated tensor core is one function, so equal bits between all ways to
 * the same result are asked for here as on a GPU.
 */
#include <math.h>

#include "emulator/control.h"
#include "engine/check_internal.h"
#include "engine/sampler.h"
#include "model/random.h"
#include "poison.h"
#include "world.h"

const struct ops *linnet_cuda_ops(const struct ops_cuda_request *request, char *text,
                                  size_t text_size, int64_t *free_bytes, linnet_error *err);

static const struct ops *find_ops(int capability)
{
    struct ops_cuda_request request = {OPS_ABI, 0};
    char text[128];
    int64_t free_bytes;
    linnet_error err;
    emulator_set_device(capability, 3);
    const struct ops *ops = linnet_cuda_ops(&request, text, sizeof text, &free_bytes, &err);
    if (!ops) fail_msg("%s", err.message);
    return ops;
}

/* ---- models ------------------------------------------------------------------------------ */

struct test_model {
    const char *name;                 /* in tests/data; or */
    const struct random_shape *shape; /* random weights */
    bool decodes;                     /* the decode kernel takes it */
    int n_ways;
};

/* Padding everywhere and copies of 4 bytes; more heads in a group than a tile has rows. */
static const struct random_shape padded = {"padded", "qwen2", 88,   152, 2,    20,  1,
                                           20,       212,     4096, 1e4, 1e-6, true};
/* Queries in shared memory. */
static const struct random_shape wide = {"wide", "llama", 64,   64,  1,    2,    1,
                                         256,    129,     4096, 1e4, 1e-5, false};
/* Sums in 16 segments of 4 and 5 units; the decode kernel with the largest group. */
static const struct random_shape deep = {"deep", "qwen3", 128,  4160, 1,    8,   1,
                                         128,    64,      4096, 1e6,  1e-6, true};

static const struct test_model models[] = {{"qwen2-nano-f32", NULL, false, 2},
                                           {"qwen3-tiny", NULL, true, 4},
                                           {"gguf/qwen2-mini-q4_k_mix.gguf", NULL, true, 1},
                                           {"padded", &padded, false, 1},
                                           {"wide", &wide, false, 1},
                                           {"deep", &deep, true, 1}};
enum { N_MODELS = sizeof models / sizeof *models };

static struct checkpoint *open_model(const struct test_model *m)
{
    struct checkpoint *cp;
    linnet_error err;
    if (m->shape)
        assert_ok(random_checkpoint_of(m->shape, DTYPE_BF16, 1, &cp, &err), err);
    else
        assert_ok(checkpoint_open(data_path(m->name), &cp, &err), err);
    return cp;
}

/* ---- one result, whatever the way -------------------------------------------------------- */

enum { N = 10, N_DECODE = 7 }; /* sequences; steps of one token at the end of each */

static int32_t length_of(int i)
{
    return i == 0 ? 210 : 8 + (i * 29) % 37;
}

/* Logits after each token of the sequences, [n][vocab]. */
struct oracle {
    float *rows[N];
};

static void make_oracle(const struct test_model *m, struct oracle *o)
{
    struct world w;
    struct test_sequence s;
    linnet_error err;
    world_open_with(&w, open_model(m), find_ops(80), 2, LAUNCH_EACH);
    for (int i = 0; i < N; i++) {
        make_sequence(&w, i, length_of(i), &s);
        o->rows[i] = malloc((size_t)s.n * (size_t)w.vocab * sizeof(float));
        assert_ok(simple_forward(w.simple, s.tokens, s.n, 0, s.n, 0, true, o->rows[i], &err), err);
    }
    world_close(&w);
}

/* The logits of the longest sequence are the reference's, as far as bf16 goes. */
static void check_numbers(const struct test_model *m, const struct oracle *o)
{
    struct world w;
    struct test_sequence s;
    linnet_error err;
    double rounding = find_ops(80)->activation_error(DTYPE_BF16), error = 0, size = 0;
    world_open_with(&w, open_model(m), &ops_reference, 2, LAUNCH_BEST);
    make_sequence(&w, 0, length_of(0), &s);
    size_t n = (size_t)s.n * (size_t)w.vocab;
    float *want = malloc(n * sizeof *want);
    assert_ok(simple_forward(w.simple, s.tokens, s.n, 0, s.n, 0, true, want, &err), err);
    for (size_t i = 0; i < n; i++) {
        error += ((double)o->rows[0][i] - want[i]) * ((double)o->rows[0][i] - want[i]);
        size += (double)want[i] * want[i];
    }
    const struct shape *shape = &w.config.shape;
    double bound = check_bound(rounding, (int64_t)shape->hidden * shape->n_layers, 19);
    if (!(sqrt(error / size) <= bound))
        fail_msg("%s: rms_rel %g, at most %g is right", m->name, sqrt(error / size), bound);
    free(want);
    world_close(&w);
}

/* Whatever is not written in the step itself, or known to be in the cache, must not matter. */
static void poison_all(const struct world *w, const struct test_sequence *seqs, bool inputs)
{
    static int32_t used[N_BLOCKS];
    memset(used, 0, sizeof used);
    for (int i = 0; i < N; i++)
        for (int32_t b = 0; b * KV_BLOCK < seqs[i].done; b++) {
            int32_t left = seqs[i].done - b * KV_BLOCK;
            used[seqs[i].blocks[b]] = left < KV_BLOCK ? left : KV_BLOCK;
        }
    assert_true(poison_cache(w->decoder->backend, used));
    assert_true(poison_buffers(w->decoder->backend, inputs));
}

struct way {
    int capability;
    bool early, eager;
    uint64_t seed; /* of how prompts are cut, and where blocks lie */
};

static void step_and_compare(struct world *w, struct test_sequence *seqs, const int32_t *counts,
                             const struct oracle *o, const char *what)
{
    const struct shape *s = &w->config.shape;
    size_t vocab = (size_t)w->vocab;
    static float *got[N];
    bool whole =
        s->hidden % 64 == 0 && s->n_heads * s->head_dim % 64 == 0 && s->intermediate % 64 == 0;
    for (int i = 0; i < N; i++) got[i] = realloc(got[i], vocab * sizeof(float));
    poison_all(w, seqs, whole);
    run_step(w, seqs, counts, N, got);
    for (int i = 0; i < N; i++)
        if (counts[i] && memcmp(got[i], o->rows[i] + (size_t)(seqs[i].done - 1) * vocab,
                                vocab * sizeof(float)) != 0)
            fail_msg("%s: sequence %d after %d tokens differs from itself alone", what, i,
                     seqs[i].done);
}

static void check_way(const struct test_model *m, const struct oracle *o, const struct way *way)
{
    struct world w;
    static struct test_sequence seqs[N];
    int32_t counts[N];
    char what[160];
    snprintf(what, sizeof what, "%s, capability %d%s%s", m->name, way->capability,
             way->early ? ", early" : "", way->eager ? ", eager" : "");
    world_open_with(&w, open_model(m), find_ops(way->capability), 2,
                    way->eager ? LAUNCH_EACH : LAUNCH_BEST);
    emulator_set_early(way->early);
    struct emulator_counts before = emulator_count();
    for (int i = 0; i < N; i++) {
        make_sequence(&w, i, length_of(i), &seqs[i]);
        for (int b = 0; b < BLOCKS_A_SEQ; b++)
            seqs[i].blocks[b] = (seqs[i].blocks[b] * 7 + (int32_t)way->seed) % N_BLOCKS;
    }
    for (uint64_t turn = 0, left = 1; left; turn++) {
        left = 0;
        for (int i = 0; i < N; i++) {
            int32_t rest = seqs[i].n - N_DECODE - seqs[i].done;
            counts[i] = (int32_t)(random_u64(way->seed, turn, (uint64_t)i) % (i == 0 ? 90 : 24));
            if (counts[i] > rest) counts[i] = rest;
            left += (uint64_t)counts[i];
            if (rest && !left && i == N - 1) counts[i] = 1, left = 1;
        }
        if (left) step_and_compare(&w, seqs, counts, o, what);
        left = 0;
        for (int i = 0; i < N; i++) left += seqs[i].done < seqs[i].n - N_DECODE;
    }
    static const int sizes[N_DECODE] = {N, N, 8, 3, 3, 1, 1}; /* the first so many decode */
    for (int turn = 0; turn < N_DECODE; turn++) {
        for (int i = 0; i < N; i++) counts[i] = i < sizes[turn];
        step_and_compare(&w, seqs, counts, o, what);
    }
    struct emulator_counts after = emulator_count();
    long decodes = m->decodes && way->capability >= 90 && !way->eager ? 5 : 0;
    assert_true(after.cooperative - before.cooperative >= decodes);
    assert_int_equal(after.cooperative > before.cooperative, decodes > 0);
    assert_true(after.replays - before.replays >= (way->eager ? 0 : N_DECODE - decodes));
    assert_int_equal(after.recordings > before.recordings, !way->eager);
    world_close(&w);
    emulator_set_early(false);
}

static void every_way(void **state)
{
    (void)state;
    static const struct way ways[] = {
        {90, false, false, 1}, {80, true, true, 2}, {90, true, false, 3}, {80, false, false, 4}};
    for (int i = 0; i < N_MODELS; i++) {
        struct oracle o;
        make_oracle(&models[i], &o);
        check_numbers(&models[i], &o);
        for (size_t k = 0; k < sizeof ways / sizeof *ways; k++) check_way(&models[i], &o, &ways[k]);
        for (int k = 0; k < N; k++) free(o.rows[k]);
    }
    assert_int_equal(emulator_live(), 0);
}

/* ---- tokens chosen on the device --------------------------------------------------------- */

enum { N_STEPS = 8, DAMAGED = 2, DAMAGED_FROM = 5, MAX_ADJUSTMENTS = 600 };

static const linnet_logit_bias bias[] = {{3, 2.5f}, {50, 4}, {7, -1e4f}, {3, 1}};

/* Order: temperature, top_k, top_p, min_p, repetition, presence, frequency, seed, bias. */
static const struct sampling settings[] = {
    {0, 0, 1, 0, 1, 0, 0, 1, NULL, 0},
    {1, 0, 1, 0, 1, 0, 0, 2, NULL, 0},
    {0.8f, 20, 1, 0, 1, 0, 0, 3, NULL, 0},
    {1.5f, 0, 0.9f, 0, 1, 0, 0, 4, NULL, 0},
    {1.5f, 30, 0.8f, 0, 1, 0, 0, 5, bias, 4},
    {2, 0, 1, 0.05f, 1, 0, 0, 6, bias, 4},
    {1.2f, 40, 0.95f, 0.01f, 1.3f, 0.5f, 0.25f, 7, bias, 4},
    {0, 0, 1, 0, 1.5f, 0.5f, 0.5f, 8, bias, 4},
};

/* Those of sequence i; a step ahead nothing can depend on the tokens before. */
static struct sampling settings_of(int i, bool ahead)
{
    struct sampling g = settings[i % 8];
    g.seed += (uint64_t)i;
    if (ahead) g.repetition_penalty = 1, g.presence_penalty = g.frequency_penalty = 0;
    return g;
}

static const int32_t banned[] = {11, 13};

static struct sample_context context_of(const struct world *w, const struct test_sequence *s,
                                        int32_t n_output)
{
    return (struct sample_context){.tokens = s->tokens,
                                   .n_prompt = s->n_prompt,
                                   .n_output = n_output,
                                   .banned = banned,
                                   .n_banned = 2,
                                   .n_allowed = w->vocab - 5};
}

struct choices {
    struct world w;
    struct sampler *sampler;
    struct test_sequence seqs[N];
    struct choice_rule rules[N];
    struct adjustment adjustments[N][MAX_ADJUSTMENTS];
    struct numbers numbers;
    int n;
    bool ahead;
};

/* The next token of each, which is row i's of the step before if that is under way. */
static void submit(struct choices *c, int t)
{
    int32_t counts[N];
    linnet_error err;
    for (int i = 0; i < c->n; i++) {
        struct test_sequence *s = &c->seqs[i];
        struct sampling g = settings_of(i, c->ahead);
        struct sample_context context = context_of(&c->w, s, t);
        if (t > 0 && c->ahead) s->tokens[s->n_prompt + t - 1] = -1 - i;
        counts[i] = t > 0 ? 1 : s->n_prompt;
        sampler_rule(c->sampler, &g, &context, c->adjustments[i], &c->rules[i]);
        assert_true(c->rules[i].n_adjustments <= MAX_ADJUSTMENTS);
    }
    make_step(c->seqs, counts, c->n, &c->numbers);
    assert_ok(decoder_submit(c->w.decoder, &c->numbers.step, c->rules, &err), err);
    memset(&c->numbers, 0x7F, sizeof c->numbers); /* all of it has been read */
    memset(c->rules, 0x7F, sizeof c->rules);
    memset(c->adjustments, 0x7F, sizeof c->adjustments);
}

static void collect(struct choices *c, int t)
{
    const struct chosen *chosen;
    linnet_error err;
    assert_ok(decoder_collect(c->w.decoder, &chosen, &err), err);
    for (int i = 0; i < c->n; i++) {
        bool bad = i == DAMAGED && t >= DAMAGED_FROM;
        assert_int_equal(chosen[i].status, bad ? LINNET_NUMERIC : LINNET_OK);
        assert_int_equal(chosen[i].id < 0, bad);
        c->seqs[i].tokens[c->seqs[i].n_prompt + t] = bad ? 0 : chosen[i].id;
    }
}

/* NaN in the first slot of a sequence. */
static void damage(struct choices *c)
{
    int32_t used[N_BLOCKS];
    for (int i = 0; i < N_BLOCKS; i++) used[i] = KV_BLOCK;
    used[c->seqs[DAMAGED].blocks[0]] = 0;
    assert_true(poison_cache(c->w.decoder->backend, used));
}

/* What was chosen is what the sampler chooses from the same logits. */
static void check_choices(struct choices *c, struct world *oracle)
{
    size_t vocab = (size_t)c->w.vocab;
    float *logits = malloc(MAX_LEN * vocab * sizeof *logits);
    linnet_error err;
    for (int i = 0; i < c->n; i++) {
        const struct test_sequence *s = &c->seqs[i];
        struct sampling g = settings_of(i, c->ahead);
        int n = i == DAMAGED ? DAMAGED_FROM : N_STEPS;
        assert_ok(simple_forward(oracle->simple, s->tokens, s->n_prompt, 0, s->n_prompt + n - 1, 0,
                                 true, logits, &err),
                  err);
        for (int t = 0; t < n; t++) {
            struct sample_context context = context_of(&c->w, s, t);
            struct sample sample;
            assert_ok(sampler_choose(c->sampler, logits + (size_t)(s->n_prompt + t - 1) * vocab, &g,
                                     &context, -1, &sample, &err),
                      err);
            if (sample.id != s->tokens[s->n_prompt + t])
                fail_msg("settings %d, token %d: %d was chosen, not %d", i, t,
                         s->tokens[s->n_prompt + t], sample.id);
        }
    }
    free(logits);
}

static void check_choosing(const struct test_model *m, const struct way *way, int n, bool ahead)
{
    static struct choices c;
    struct world oracle;
    linnet_error err;
    c.n = n, c.ahead = ahead;
    world_open_with(&oracle, open_model(m), find_ops(80), 1, LAUNCH_EACH);
    world_open_with(&c.w, open_model(m), find_ops(way->capability), 1,
                    way->eager ? LAUNCH_EACH : LAUNCH_BEST);
    emulator_set_early(way->early);
    assert_true(decoder_can_choose(c.w.decoder));
    assert_ok(sampler_create(c.w.vocab, &c.sampler, &err), err);
    for (int i = 0; i < n; i++) make_sequence(&c.w, i, 5 + 7 * i, &c.seqs[i]);
    for (int t = 0; t < N_STEPS; t++) {
        if (t == DAMAGED_FROM) damage(&c);
        submit(&c, t);
        if (ahead && t > 0) collect(&c, t - 1);
        if (!ahead) collect(&c, t);
    }
    if (ahead) collect(&c, N_STEPS - 1);
    check_choices(&c, &oracle);
    sampler_destroy(c.sampler);
    world_close(&c.w);
    world_close(&oracle);
    emulator_set_early(false);
}

static void choosing(void **state)
{
    (void)state;
    static const struct way ways[] = {
        {80, false, false, 0}, {80, true, true, 0}, {90, false, false, 0}, {90, true, false, 0}};
    for (size_t k = 0; k < sizeof ways / sizeof *ways; k++)
        for (int ahead = 0; ahead < 2; ahead++)
            check_choosing(&models[k % 2 ? 0 : 1], &ways[k], ways[k].capability == 90 ? 8 : N,
                           ahead);
    assert_int_equal(emulator_live(), 0);
}

/* ---- failures ---------------------------------------------------------------------------- */

/* Opens, loads and runs with the n-th call failing; false once there are not as many. *mended:
 * calls that failed and did no harm. */
static bool fail_once(const struct test_model *m, int capability, long n, int *mended)
{
    const struct limits limits = {
        .max_tokens = 32, .max_logits = 4, .max_seqs = 4, .max_context = 64, .n_blocks = 8};
    static struct numbers numbers;
    struct checkpoint *cp = open_model(m);
    struct model_config config;
    struct pool *pool;
    struct decoder *d = NULL;
    linnet_error err = {LINNET_OK, ""};
    const struct ops *ops = find_ops(capability);
    assert_ok(model_config_read(cp, &config, &err), err);
    assert_ok(pool_create(2, &pool, &err), err);
    struct test_sequence s = {.n = 20, .n_prompt = 8, .blocks = {2, 1}};
    emulator_fail(n);
    linnet_status status = decoder_create(cp, &config, ops, pool, &limits, NULL, NULL, &d, &err);
    if (status) assert_null(d);
    for (int i = 0; i < 6 && !status; i++) { /* the prompt, then others with and without choosing */
        int32_t count = i ? 1 : s.n_prompt;
        const struct chosen *chosen;
        struct choice_rule rule = {.temperature = i == 5 ? 1.0f : 0.0f,
                                   .top_p = 0.5f,
                                   .top_k = 3,
                                   .repetition_penalty = 1,
                                   .n_allowed = config.shape.vocab};
        make_step(&s, &count, 1, &numbers);
        if (i < 3) {
            status = decoder_step(d, &numbers.step, &err);
            continue;
        }
        status = decoder_submit(d, &numbers.step, &rule, &err);
        if (!status) status = decoder_collect(d, &chosen, &err);
    }
    long calls = emulator_fail(0);
    if (n <= calls && !status) ++*mended;
    if (n > calls && status) fail_msg("%s: %s", m->name, err.message);
    if (status) assert_true(err.message[0]);
    if (status && d) assert_int_not_equal(decoder_step(d, &numbers.step, &err), LINNET_OK);
    decoder_destroy(d);
    pool_destroy(pool);
    checkpoint_close(cp);
    if (emulator_live() != 0)
        fail_msg("%s: call %ld failed, %ld of the device's things are left", m->name, n,
                 emulator_live());
    return n <= calls;
}

/* One may be mended: a block of weights is asked for again, no larger than it must be. The second
 * time is for the decode kernel: every third call will do. */
static void failures(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        long n = 1;
        int mended = 0;
        while (fail_once(&models[i], i ? 90 : 80, n, &mended)) n += i ? 3 : 1;
        assert_true(n > 100);
        assert_in_range(mended, i ? 0 : 1, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(choosing), cmocka_unit_test(failures),
                                       cmocka_unit_test(every_way)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
