/*
 * The promise at the level of the engine, by memcmp of every row of logits that a token was chosen
 * from: prefix hit = cold, preempted = straight, beside others = alone, any step budget. The real
 * decoder on tiny models, with the engine turned by hand.
 */
#include "golden.h"

#include "base/random.h"
#include "base/threads.h"
#include "engine/engine_internal.h"
#include "model/decoder.h"

enum { N = 10, MAX_NEW = 48, MAX_PROMPT = 80 };

/* What one request has given: its tokens and the logits before each. */
struct record {
    struct rig *rig;
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

static void rig_open(struct rig *rig, const char *path, int32_t n_blocks, int32_t max_tokens,
                     bool prefix_caching)
{
    linnet_error err;
    struct limits limits = {.max_tokens = max_tokens,
                            .max_logits = N,
                            .max_seqs = N,
                            .max_context = 128,
                            .n_blocks = n_blocks};
    *rig = (struct rig){0};
    assert_ok(checkpoint_open(path, &rig->cp, &err), err);
    assert_ok(model_config_read(rig->cp, &rig->config, &err), err);
    assert_ok(pool_create(2, &rig->pool, &err), err);
    assert_ok(decoder_create(rig->cp, &rig->config, &ops_cpu, rig->pool, &limits, NULL, NULL,
                             &rig->decoder, &err),
              err);
    const struct rope_config *rope = &rig->config.rope;
    struct engine_config config = {.runner = {.self = rig, .step = rig_step, .logits = rig_logits},
                                   .n_vocab = rig->config.shape.vocab,
                                   .limits = limits,
                                   .prefix_caching = prefix_caching,
                                   .dynamic_rope_context =
                                       rope->kind == ROPE_DYNAMIC ? rope->original_context : 0};
    assert_ok(engine_open(&config, &rig->engine, &err), err);
}

static void rig_close(struct rig *rig)
{
    linnet_engine_destroy(rig->engine);
    decoder_destroy(rig->decoder);
    pool_destroy(rig->pool);
    checkpoint_close(rig->cp);
}

static void on_event(void *user, const linnet_event *event)
{
    struct record *r = user;
    size_t vocab = (size_t)r->rig->config.shape.vocab;
    if (event->type == LINNET_EVENT_TOKEN) {
        memcpy(r->logits + (size_t)r->n * vocab, r->rig->row, vocab * sizeof(float));
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
                         .logits = calloc((size_t)MAX_NEW * (size_t)vocab, sizeof(float))};
    linnet_request request = {.prompt = prompt,
                              .n_prompt = (size_t)n,
                              .max_tokens = MAX_NEW,
                              .on_event = on_event,
                              .user = r,
                              .sampling = {.temperature = i % 3 ? 0 : 1,
                                           .top_p = 1,
                                           .repetition_penalty = 1,
                                           .seed = (uint64_t)i,
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
static int32_t run_all(const char *path, const struct record *alone, int32_t n_blocks,
                       int32_t max_tokens, bool prefix, const char *what, int32_t *cached)
{
    struct rig rig;
    int32_t preemptions = 0;
    *cached = 0;
    rig_open(&rig, path, n_blocks, max_tokens, prefix);
    for (int round = 0; round < 2; round++) { /* the second finds the first one's blocks */
        struct record got[N];
        for (int i = 0; i < N; i++) submit(&rig, i, &got[i]);
        for (int turn = 0; engine_turn(rig.engine); turn++) assert_true(turn < 5000);
        for (int i = 0; i < N; i++) {
            expect_same(&rig, &got[i], &alone[i], i, what);
            preemptions += got[i].preemptions;
            *cached += got[i].cached;
            free(got[i].logits);
        }
    }
    rig_close(&rig);
    return preemptions;
}

static void check_model(const char *name)
{
    struct rig solo;
    struct record alone[N];
    char path[1200];
    int32_t cached;
    snprintf(path, sizeof path, "%s", name);
    rig_open(&solo, path, 64, 128, false);
    for (int i = 0; i < N; i++) {
        submit(&solo, i, &alone[i]);
        while (engine_turn(solo.engine)) continue;
        assert_int_equal(alone[i].n, MAX_NEW);
    }
    run_all(path, alone, 128, 256, false, "beside others", &cached);
    assert_int_equal(cached, 0);
    run_all(path, alone, 128, 17, false, "small steps", &cached);
    run_all(path, alone, 128, 256, true, "prefix hits", &cached);
    assert_true(cached > 200);
    assert_true(run_all(path, alone, 14, 64, false, "preempted", &cached) > 3);
    assert_true(run_all(path, alone, 14, 64, true, "preempted, prefix hits", &cached) > 3);
    assert_true(cached > 0);
    for (int i = 0; i < N; i++) free(alone[i].logits);
    rig_close(&solo);
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
