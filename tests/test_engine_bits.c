/*
 * The promise at the level of the engine, by memcmp of every row of logits that a token was chosen
 * from: prefix hit = cold, preempted = straight, beside others = alone, any step budget. The real
 * decoder on tiny models, with the engine turned by hand, on the CPU and on a GPU where there is
 * one. And so for an engine one step ahead, on a device made up of that decoder and a queue.
 */
#include "golden.h"

#include "base/random.h"
#include "base/threads.h"
#include "engine/api_internal.h"
#include "engine/engine_internal.h"
#include "model/decoder.h"
#include "submitted.h"

enum { N = 10, MAX_NEW = 48, MAX_PROMPT = 80 };

/* What one request has given: its tokens and the logits before each. */
struct record {
    struct rig *rig;
    uint64_t seed;
    int32_t tokens[MAX_NEW], n, cached, preemptions;
    float *logits; /* [MAX_NEW, vocab] */
    bool finished;
};

struct rig {
    struct checkpoint *cp;
    struct model_config config;
    struct pool *pool;
    struct decoder *decoder;
    linnet_engine *engine;
    const float *row; /* the logits that the engine asked for last */

    /* As a device: the step submitted last and the two before, with their logits. */
    struct sampler *sampler;
    struct submitted *steps[3];
    float *logits[3]; /* [N, vocab] */
    int32_t n_under_way, n_ahead;
};

static linnet_status rig_step(void *self, const struct step *s, linnet_error *err)
{
    struct rig *rig = self;
    return decoder_step(rig->decoder, s, err);
}

static const float *rig_logits(void *self, int32_t i)
{
    struct rig *rig = self;
    return rig->row = decoder_logits(rig->decoder, i);
}

/* Runs the step at once; what came of it is kept until it is collected. */
static linnet_status rig_submit(void *self, const struct step *s, const struct choice_rule *rules,
                                linnet_error *err)
{
    struct rig *rig = self;
    size_t vocab = (size_t)rig->config.shape.vocab;
    struct submitted *step = submitted_new(s, rules);
    float *logits = rig->logits[2];
    assert_true(rig->n_under_way < 2);
    assert_true(names_rows(step, rig->n_under_way ? rig->steps[0] : NULL));
    find_tokens(step, rig->steps[0]);
    submitted_free(rig->steps[2]);
    for (int i = 2; i > 0; i--) {
        rig->steps[i] = rig->steps[i - 1];
        rig->logits[i] = rig->logits[i - 1];
    }
    rig->steps[0] = step;
    rig->logits[0] = logits;
    rig->n_ahead += rig->n_under_way++;
    linnet_status status = decoder_step(rig->decoder, &step->step, err);
    for (int32_t i = 0; i < s->n_logits && !status; i++) {
        memcpy(logits + (size_t)i * vocab, decoder_logits(rig->decoder, i), vocab * sizeof *logits);
        step->chosen[i] = choose_by_rule(rig->sampler, logits + (size_t)i * vocab, &step->rules[i]);
    }
    return status;
}

static linnet_status rig_collect(void *self, const struct chosen **out, linnet_error *err)
{
    struct rig *rig = self;
    (void)err;
    assert_true(rig->n_under_way > 0);
    *out = rig->steps[--rig->n_under_way]->chosen;
    return LINNET_OK;
}

/* The row that the token was chosen from: as a device, that of the request's seed in the step
 * collected last. */
static const float *chosen_row(const struct rig *rig, uint64_t seed)
{
    const struct submitted *step = rig->steps[rig->n_under_way];
    if (!rig->sampler) return rig->row;
    for (int32_t i = 0; i < step->step.n_logits; i++)
        if (step->rules[i].seed == seed)
            return rig->logits[rig->n_under_way] + (size_t)i * (size_t)rig->config.shape.vocab;
    fail_msg("a token of no row");
    return NULL;
}

struct setting {
    const char *what;
    int32_t n_blocks, max_tokens;
    bool prefix_caching, device;
};

static void rig_open(struct rig *rig, const char *path, const struct ops *ops,
                     const struct setting *setting)
{
    linnet_error err;
    struct limits limits = {.max_tokens = setting->max_tokens,
                            .max_logits = N,
                            .max_seqs = N,
                            .max_context = 128,
                            .n_blocks = setting->n_blocks};
    *rig = (struct rig){0};
    assert_ok(checkpoint_open(path, &rig->cp, &err), err);
    assert_ok(model_config_read(rig->cp, &rig->config, &err), err);
    assert_ok(pool_create(2, &rig->pool, &err), err);
    assert_ok(decoder_create(rig->cp, &rig->config, ops, rig->pool, &limits, NULL, NULL,
                             &rig->decoder, &err),
              err);
    const struct rope_config *rope = &rig->config.rope;
    struct engine_config config = {.runner = {.self = rig, .step = rig_step, .logits = rig_logits},
                                   .n_vocab = rig->config.shape.vocab,
                                   .limits = limits,
                                   .prefix_caching = setting->prefix_caching,
                                   .dynamic_rope_context =
                                       rope->kind == ROPE_DYNAMIC ? rope->original_context : 0};
    if (setting->device) {
        config.runner.submit = rig_submit;
        config.runner.collect = rig_collect;
        config.runner.max_adjustments = INT32_MAX;
        assert_ok(sampler_create(config.n_vocab, &rig->sampler, &err), err);
        for (int i = 0; i < 3; i++)
            rig->logits[i] = calloc(N * (size_t)config.n_vocab, sizeof *rig->logits[i]);
    }
    assert_ok(engine_open(&config, &rig->engine, &err), err);
}

static void rig_close(struct rig *rig)
{
    linnet_engine_destroy(rig->engine);
    assert_int_equal(rig->n_under_way, 0);
    if (rig->sampler) sampler_destroy(rig->sampler);
    for (int i = 0; i < 3; i++) {
        submitted_free(rig->steps[i]);
        free(rig->logits[i]);
    }
    decoder_destroy(rig->decoder);
    pool_destroy(rig->pool);
    checkpoint_close(rig->cp);
}

static void on_event(void *user, const linnet_event *event)
{
    struct record *r = user;
    size_t vocab = (size_t)r->rig->config.shape.vocab;
    if (event->type == LINNET_EVENT_TOKEN) {
        memcpy(r->logits + (size_t)r->n * vocab, chosen_row(r->rig, r->seed),
               vocab * sizeof(float));
        r->tokens[r->n++] = event->token;
    }
    if (event->type != LINNET_EVENT_FINISHED) return;
    assert_int_equal(event->finish, LINNET_FINISH_LENGTH);
    r->finished = true;
    r->cached = event->cached_tokens;
    r->preemptions = event->preemptions;
}

/* Request i: prompts come in pairs with the same beginning; every third is sampled. */
static void submit(struct rig *rig, int i, struct record *r)
{
    linnet_error err;
    int32_t prompt[MAX_PROMPT], n = 20 + i * 37 % (MAX_PROMPT - 20),
                                vocab = rig->config.shape.vocab;
    for (int32_t t = 0; t < n; t++)
        prompt[t] =
            (int32_t)(random_u64(23, (uint64_t)t, t < 40 ? 0 : (uint64_t)i) % (uint64_t)vocab);
    *r = (struct record){.rig = rig,
                         .seed = (uint64_t)i,
                         .logits = calloc((size_t)MAX_NEW * (size_t)vocab, sizeof(float))};
    linnet_request request = {.prompt = prompt,
                              .n_prompt = (size_t)n,
                              .max_tokens = MAX_NEW,
                              .on_event = on_event,
                              .user = r,
                              .sampling = {.temperature = i % 3 ? 0 : 1,
                                           .top_p = 1,
                                           .repetition_penalty = 1,
                                           .seed = r->seed,
                                           .has_seed = true}};
    assert_ok(linnet_engine_submit(rig->engine, &request, NULL, &err), err);
}

static void expect_same(const struct rig *rig, const struct record *got, const struct record *alone,
                        int i, const char *what)
{
    assert_true(got->finished);
    assert_int_equal(got->n, MAX_NEW);
    assert_memory_equal(got->tokens, alone->tokens, sizeof got->tokens);
    if (memcmp(got->logits, alone->logits,
               (size_t)MAX_NEW * (size_t)rig->config.shape.vocab * sizeof(float)) != 0)
        fail_msg("%s: %s: request %d: logits differ from those it gives alone", rig->cp->path, what,
                 i);
}

/* All requests at once, some again once the first are done; returns preemptions, *cached tokens. */
static int32_t run_all(const char *path, const struct ops *ops, const struct record *alone,
                       const struct setting *setting, int32_t *cached)
{
    struct rig rig;
    int32_t preemptions = 0;
    *cached = 0;
    rig_open(&rig, path, ops, setting);
    for (int round = 0; round < 2; round++) { /* the second finds the first one's blocks */
        struct record got[N];
        for (int i = 0; i < N; i++) submit(&rig, i, &got[i]);
        for (int turn = 0; engine_turn(rig.engine); turn++) assert_true(turn < 5000);
        for (int i = 0; i < N; i++) {
            expect_same(&rig, &got[i], &alone[i], i, setting->what);
            preemptions += got[i].preemptions;
            *cached += got[i].cached;
            free(got[i].logits);
        }
    }
    if (setting->device) assert_true(rig.n_ahead > MAX_NEW);
    rig_close(&rig);
    return preemptions;
}

static void check_ops(const char *path, const struct ops *ops)
{
    static const struct setting alone_setting = {"alone", 64, 128, false, false};
    static const struct setting settings[] = {
        {"beside others", 128, 256, false, false},
        {"small steps", 128, 17, false, false},
        {"prefix hits", 128, 256, true, false},
        {"preempted", 14, 64, false, false},
        {"preempted, prefix hits", 14, 64, true, false},
        {"ahead, beside others", 128, 256, false, true},
        {"ahead, small steps", 128, 17, false, true},
        {"ahead, preempted, prefix hits", 14, 64, true, true},
    };
    struct rig solo;
    struct record alone[N];
    rig_open(&solo, path, ops, &alone_setting);
    for (int i = 0; i < N; i++) {
        submit(&solo, i, &alone[i]);
        while (engine_turn(solo.engine)) continue;
        assert_int_equal(alone[i].n, MAX_NEW);
    }
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const struct setting *s = &settings[i];
        int32_t cached, preemptions = run_all(path, ops, alone, s, &cached);
        if (s->n_blocks == 14) assert_true(preemptions > 3);
        if (s->prefix_caching)
            assert_true(cached > (s->n_blocks == 14 ? 0 : 200));
        else
            assert_int_equal(cached, 0);
    }
    for (int i = 0; i < N; i++) free(alone[i].logits);
    rig_close(&solo);
}

static void check_model(const char *name)
{
    struct device gpu;
    char path[1200];
    snprintf(path, sizeof path, "%s", name);
    check_ops(path, &ops_cpu);
    if (find_device("cuda", &gpu, NULL) != LINNET_OK) return;
    print_message("%s: %s\n", gpu.text, path);
    check_ops(path, gpu.ops);
}

static void own_model(void **state)
{
    (void)state;
    check_model(data_path("qwen3-tiny"));
}

static void reference_models(void **state)
{
    (void)state;
    static const char *const models[] = {"llama-dynamic", "llama-tiny", "qwen2-nano-f16",
                                         "gguf/qwen2-mini-q4_0.gguf"};
#ifdef __SANITIZE_THREAD__
    skip(); /* twenty times slower; own_model has shown the threads */
#endif
    if (!reference_path("golden")) skip();
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        check_model(reference_path(models[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(own_model),
                                       cmocka_unit_test(reference_models)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
