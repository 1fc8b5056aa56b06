/* The engine over a model that notices where everything lies (fake_model.h). */
#include "engine_load.h"
#include "fake_model.h"

static const struct fake_options roomy = {
    .n_blocks = 256, .max_seqs = 16, .max_tokens = 128, .max_context = 256};

/* All tests run twice: the host chooses the tokens, then a device does. What is compared with is
 * always the host's. */
static bool on_device;

static linnet_engine *new_engine(const struct fake_options *options, struct fake_model **model)
{
    struct fake_options o = *options;
    o.device = on_device;
    return fake_engine(&o, model);
}

static void finish_all(linnet_engine *e)
{
    while (checked_turn(e)) continue;
}

static void run_job(linnet_engine *e, struct job *job)
{
    job_submit(job, e);
    finish_all(e);
    assert_true(job_done(job));
}

static linnet_stats stats_of(linnet_engine *e)
{
    linnet_stats stats;
    linnet_engine_get_stats(e, &stats);
    return stats;
}

/* Prompts of many lengths around block and chunk edges; some have a common beginning. */
enum { N_JOBS = 24 };

static void make_jobs(struct job **jobs, int32_t (*prompts)[160])
{
    static const int32_t lengths[N_JOBS] = {1,  2,  15, 16, 17,  31, 32, 33, 47, 48, 63,  64,
                                            65, 79, 80, 96, 100, 5,  16, 32, 48, 64, 128, 150};
    for (int32_t i = 0; i < N_JOBS; i++) {
        for (int32_t p = 0; p < lengths[i]; p++)
            prompts[i][p] = (int32_t)(random_u64(i % 3 ? 9 : (uint64_t)i, (uint64_t)p, 0) % 60);
        jobs[i] = job_new(prompts[i], lengths[i], 40 + i);
        jobs[i]->request.ignore_eos = i % 2;
        jobs[i]->request.want_logprobs = !on_device;
        jobs[i]->request.logprobs = 3;
        jobs[i]->request.n = i % 5 == 0 ? 3 : 1;
        jobs[i]->request.sampling.temperature = i % 4 ? 0.8f : 0;
        jobs[i]->request.sampling.seed = (uint64_t)i;
    }
}

/* Whatever the budget, the batch, the pool and the prefix cache: the answers are those of a run
 * alone in which each prompt is one chunk. */
static void answers_do_not_depend_on_the_load(void **state)
{
    (void)state;
    static int32_t prompts[N_JOBS][160];
    struct job *alone[N_JOBS], *jobs[N_JOBS];
    make_jobs(alone, prompts);
    make_jobs(jobs, prompts);
    struct fake_options whole = roomy;
    whole.max_tokens = 512;
    for (int i = 0; i < N_JOBS; i++) {
        linnet_engine *e = fake_engine(&whole, NULL);
        run_job(e, alone[i]);
        linnet_engine_destroy(e);
    }
    static const struct fake_options loads[] = {
        {.n_blocks = 256, .max_seqs = 16, .max_tokens = 512, .max_context = 256},
        {.n_blocks = 256, .max_seqs = 16, .max_tokens = 64, .max_context = 256},
        {.n_blocks = 256, .max_seqs = 16, .max_tokens = 17, .max_context = 256},
        {.n_blocks = 256, .max_seqs = 1, .max_tokens = 1, .max_context = 256},
        {.n_blocks = 256, .max_seqs = 8, .max_tokens = 3, .max_context = 256},
        {.n_blocks = 14, .max_seqs = 16, .max_tokens = 64, .max_context = 256},
        {.n_blocks = 15, .max_seqs = 5, .max_tokens = 30, .max_context = 256},
    };
    int64_t preemptions = 0, cached = 0;
    for (size_t k = 0; k < 2 * sizeof loads / sizeof *loads; k++) {
        struct fake_options options = loads[k / 2];
        options.prefix_caching = k % 2;
        linnet_engine *e = new_engine(&options, NULL);
        for (int i = 0; i < N_JOBS; i++) job_submit(jobs[i], e);
        finish_all(e);
        for (int i = 0; i < N_JOBS; i++) {
            assert_same_answers(jobs[i], alone[i], i);
            job_reset(jobs[i]);
        }
        linnet_stats stats = stats_of(e);
        assert_int_equal(stats.n_blocks_free, stats.n_blocks);
        assert_int_equal(block_held_count(e->blocks), 0);
        preemptions += stats.n_preemptions;
        cached += stats.cached_tokens;
        linnet_engine_destroy(e);
    }
    assert_true(preemptions > 30);
    assert_true(cached > 1000);
    for (int i = 0; i < N_JOBS; i++) {
        job_free(alone[i]);
        job_free(jobs[i]);
    }
}

static void load_of_500_requests(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) {
        struct fake_options crowded = {.n_blocks = 10,
                                       .max_seqs = 12,
                                       .max_tokens = 40,
                                       .max_context = 200,
                                       .prefix_caching = k % 2,
                                       .dynamic_rope_context = k / 2 ? 40 : 0};
        struct fake_options alone = crowded;
        alone.n_blocks = 64;
        alone.max_tokens = 512;
        alone.prefix_caching = false;
        struct load load = {.crowded = new_engine(&crowded, NULL),
                            .alone = fake_engine(&alone, NULL),
                            .turn = checked_turn,
                            .n_requests = 500,
                            .seed = 100 + (uint64_t)k,
                            .n_vocab = FAKE_VOCAB - 1,
                            .max_prompt = 50,
                            .max_tokens = 100,
                            .plain = !on_device ? 0
                                     : k        ? 30 * (uint64_t)k
                                                : 1 << 30};
        load_test(&load);
        const struct fake_model *m = load.crowded->config.runner.self;
        if (on_device) {
            print_message("%lld of %lld steps were begun ahead\n", (long long)m->n_ahead,
                          (long long)m->n_steps);
            assert_true(m->n_ahead > m->n_steps / 3);
        }
        assert_true(stats_of(load.crowded).n_preemptions > 100);
        linnet_engine_destroy(load.crowded);
        linnet_engine_destroy(load.alone);
    }
}

static void answers_of_one_request_share_its_prompt(void **state)
{
    (void)state;
    int32_t prompt[100];
    for (int i = 0; i < 100; i++) prompt[i] = i % 59;
    for (int k = 0; k < 2; k++) {
        struct fake_options options = roomy;
        options.prefix_caching = k;
        struct fake_model *m;
        linnet_engine *e = new_engine(&options, &m);
        struct job *job = job_new(prompt, 100, 20);
        job->request.n = 4;
        job->request.ignore_eos = true;
        job->request.sampling.temperature = 2;
        job_submit(job, e);
        checked_turn(e); /* the first computes the prompt; the others wait for it */
        assert_int_equal(stats_of(e).n_running, 1);
        checked_turn(e);
        assert_int_equal(stats_of(e).n_running, 4);
        /* 6 blocks shared; each has a seventh of its own */
        assert_int_equal(block_held_count(e->blocks), 6 + 4);
        finish_all(e);
        assert_int_equal(m->n_tokens, 100 + 3 * 4 + 4 * 19);
        assert_int_equal(job->answers[0].cached_tokens, 0);
        assert_int_equal(job->answers[3].cached_tokens, 96);
        assert_int_equal(stats_of(e).prompt_tokens, 400);
        assert_int_equal(stats_of(e).cached_tokens, 3 * 96);
        int differ = 0;
        for (int i = 1; i < 4; i++)
            differ += memcmp(job->answers[0].tokens, job->answers[i].tokens, 80) != 0;
        assert_int_equal(differ, 3);
        job_free(job);
        linnet_engine_destroy(e);
    }
}

/* The first of the answers is gone before the others could hold its blocks. */
static void answers_survive_the_first(void **state)
{
    (void)state;
    int32_t prompt[40] = {0};
    linnet_engine *e = new_engine(&roomy, NULL);
    struct job *job = job_new(prompt, 40, 1); /* each ends with its first token */
    job->request.n = 5;
    run_job(e, job);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(job->answers[i].finish, LINNET_FINISH_LENGTH);
        assert_int_equal(job->answers[i].tokens[0], job->answers[0].tokens[0]);
    }
    job_free(job);
    linnet_engine_destroy(e);
}

static void prefix_is_found_again(void **state)
{
    (void)state;
    int32_t prompt[64] = {1, 2, 3};
    struct fake_options options = roomy;
    options.prefix_caching = true;
    struct fake_model *m;
    linnet_engine *e = new_engine(&options, &m);
    struct job *job = job_new(prompt, 64, 1);
    run_job(e, job);
    assert_int_equal(job->answers[0].cached_tokens, 0);
    assert_int_equal(m->n_tokens, 64);
    job_reset(job);
    run_job(e, job); /* all of it is known, at a block's edge: one block is computed anew */
    assert_int_equal(job->answers[0].cached_tokens, 48);
    assert_int_equal(m->n_tokens, 64 + 16);
    job_free(job);
    linnet_engine_destroy(e);
}

/* Whatever the chunks, a prompt's tokens carry its whole length, the answer's their own. */
static void dynamic_rope_lengths(void **state)
{
    (void)state;
    int32_t prompt[50] = {1};
    struct fake_options options = roomy;
    options.dynamic_rope_context = 40;
    options.max_tokens = 17;
    struct fake_model *m;
    linnet_engine *e = new_engine(&options, &m);
    struct job *job = job_new(prompt, 50, 8);
    job->request.ignore_eos = true;
    job_submit(job, e);
    while (job->answers[0].n_tokens < 7) checked_turn(e);
    const struct sequence *q = &e->requests.first->choices[0].sequence;
    for (int32_t p = 0; p < q->n_known - 1; p++)
        assert_int_equal(m->slots[q->blocks[p / 16] * 16 + p % 16].rope_len, p < 50 ? 50 : p + 1);
    finish_all(e);
    job_free(job);
    linnet_engine_destroy(e);
}

static void cancel_frees_within_a_step(void **state)
{
    (void)state;
    int32_t prompt[200] = {5};
    linnet_engine *e = new_engine(&roomy, NULL);
    struct job *a = job_new(prompt, 200, 0), *b = job_new(prompt, 20, 5),
               *c = job_new(prompt, 9, 0);
    a->request.n = 3;
    job_submit(a, e);
    job_submit(b, e);
    checked_turn(e);
    assert_true(block_held_count(e->blocks) > 12);
    linnet_engine_cancel(e, a->id);
    linnet_engine_cancel(e, 12345);
    checked_turn(e);
    assert_int_equal(a->n_finished, 3);
    assert_int_equal(a->answers[2].finish, LINNET_FINISH_CANCELLED);
    assert_true(block_held_count(e->blocks) <= 2);
    job_submit(c, e);
    linnet_engine_cancel(e, c->id); /* before it ever ran */
    finish_all(e);
    assert_int_equal(c->answers[0].finish, LINNET_FINISH_CANCELLED);
    assert_int_equal(c->answers[0].n_tokens, 0);
    assert_int_equal(b->answers[0].n_tokens, 5);
    assert_int_equal(b->answers[0].finish, LINNET_FINISH_LENGTH);
    linnet_engine_cancel(e, b->id); /* long done */
    job_free(a);
    job_free(b);
    job_free(c);
    linnet_engine_destroy(e);
}

static void nan_ends_only_its_own_request(void **state)
{
    (void)state;
    int32_t bad[10] = {FAKE_NAN}, good[10] = {1};
    linnet_engine *e = new_engine(&roomy, NULL);
    struct job *a = job_new(bad, 10, 30), *b = job_new(good, 10, 30),
               *alone = job_new(good, 10, 30);
    a->request.ignore_eos = b->request.ignore_eos = alone->request.ignore_eos = true;
    run_job(e, alone);
    job_submit(a, e);
    job_submit(b, e);
    finish_all(e);
    assert_int_equal(a->answers[0].finish, LINNET_FINISH_ERROR);
    assert_int_equal(a->answers[0].error.status, LINNET_NUMERIC);
    assert_int_equal(a->answers[0].n_tokens, 11); /* positions 9 to 19 gave numbers */
    assert_same_answers(b, alone, 0);
    job_free(a);
    job_free(b);
    job_free(alone);
    linnet_engine_destroy(e);
}

static void device_failure_ends_everything(void **state)
{
    (void)state;
    int32_t prompt[10] = {1};
    struct fake_model *m;
    linnet_engine *e = new_engine(&roomy, &m);
    m->fail_at = 3;
    struct job *a = job_new(prompt, 10, 0), *b = job_new(prompt, 10, 2);
    a->request.ignore_eos = b->request.ignore_eos = true;
    a->request.n = 2;
    job_submit(a, e);
    job_submit(b, e);
    finish_all(e);
    assert_int_equal(b->answers[0].finish, LINNET_FINISH_LENGTH);
    assert_int_equal(a->answers[0].finish, LINNET_FINISH_ERROR);
    assert_int_equal(a->answers[1].error.status, LINNET_DEVICE);
    assert_int_equal(stats_of(e).n_blocks_free, roomy.n_blocks);
    linnet_error err;
    uint64_t id;
    assert_int_equal(linnet_engine_submit(e, &a->request, &id, &err), LINNET_DEVICE);
    assert_non_null(strstr(err.message, "the device fell over"));
    job_free(a);
    job_free(b);
    linnet_engine_destroy(e);
}

/* What ends an answer, and in which order the reasons count. */
static void ends(void **state)
{
    (void)state;
    int32_t prompt[10] = {4, 2};
    linnet_engine *e = new_engine(&roomy, NULL);
    struct job *free_run = job_new(prompt, 10, 30);
    free_run->request.ignore_eos = true;
    run_job(e, free_run);
    const int32_t *tokens = free_run->answers[0].tokens;
    assert_int_equal(free_run->answers[0].n_tokens, 30);

    struct job *job = job_new(prompt, 10, 30);
    job->request.ignore_eos = true;
    job->request.stop_ids = &tokens[9];
    job->request.n_stop_ids = 1;
    int32_t first = 0;
    while (tokens[first] != tokens[9]) first++;
    job->request.max_tokens = first + 1; /* the stop id counts before the length */
    run_job(e, job);
    assert_int_equal(job->answers[0].finish, LINNET_FINISH_STOP);
    assert_int_equal(job->answers[0].n_tokens, first + 1);

    job_reset(job);
    job->request.max_tokens = 30;
    job->request.min_tokens = 25; /* banned until then */
    run_job(e, job);
    assert_true(job->answers[0].n_tokens >= 25);
    for (int i = 0; i < 25; i++) assert_int_not_equal(job->answers[0].tokens[i], tokens[9]);
    job_reset(job);
    job->request.min_tokens = 0;

    linnet_logit_bias eos = {FAKE_EOS, INFINITY}; /* clamped, and still more than enough */
    job->request.sampling.logit_bias = &eos;
    job->request.sampling.n_logit_bias = 1;
    job->request.ignore_eos = false;
    run_job(e, job);
    assert_int_equal(job->answers[0].n_tokens, 1);
    assert_int_equal(job->answers[0].tokens[0], FAKE_EOS);
    assert_int_equal(job->answers[0].finish, LINNET_FINISH_STOP);

    job_reset(job);
    job->request.sampling.n_logit_bias = 0;
    job->request.n_stop_ids = 0;
    job->request.ignore_eos = true;
    job->request.max_tokens = 0; /* the context is the end */
    run_job(e, job);
    assert_int_equal(job->answers[0].n_tokens, roomy.max_context - 10);
    assert_int_equal(job->answers[0].finish, LINNET_FINISH_LENGTH);
    job_free(job);
    job_free(free_run);
    linnet_engine_destroy(e);
}

static void random_seeds_differ(void **state)
{
    (void)state;
    int32_t prompt[10] = {4, 2};
    linnet_engine *e = new_engine(&roomy, NULL);
    struct job *jobs[2];
    for (int i = 0; i < 2; i++) {
        jobs[i] = job_new(prompt, 10, 30);
        jobs[i]->request.ignore_eos = true;
        jobs[i]->request.sampling.has_seed = false;
        jobs[i]->request.sampling.temperature = 5;
        run_job(e, jobs[i]);
    }
    assert_memory_not_equal(jobs[0]->answers[0].tokens, jobs[1]->answers[0].tokens, 120);
    job_free(jobs[0]);
    job_free(jobs[1]);
    linnet_engine_destroy(e);
}

static void refuse(linnet_engine *e, const linnet_request *r, linnet_status status,
                   const char *words)
{
    linnet_error err = {0};
    uint64_t id;
    assert_int_equal(linnet_engine_submit(e, r, &id, &err), status);
    if (!strstr(err.message, words)) fail_msg("\"%s\" lacks \"%s\"", err.message, words);
}

static void refusals(void **state)
{
    (void)state;
    static int32_t prompt[300];
    struct fake_options options = roomy;
    options.n_blocks = 10;
    linnet_engine *e = new_engine(&options, NULL);
    struct job *job = job_new(prompt, 10, 10);
    const linnet_request good = job->request;
    linnet_request r = good;

    r.n_prompt = 256;
    refuse(e, &r, LINNET_TOO_LONG, "the prompt has 256 tokens and the context holds 256");
    r.n_prompt = 100, r.max_tokens = 62;
    refuse(e, &r, LINNET_TOO_LONG, "needs 11 cache blocks and there are 10");
    r.n_prompt = 0;
    refuse(e, &r, LINNET_INVALID, "prompt is empty");

    static const struct {
        size_t offset;
        float value;
        const char *words;
    } settings[] = {
        {offsetof(linnet_sampling, temperature), -1, "temperature must be between 0"},
        {offsetof(linnet_sampling, temperature), NAN, "temperature must be between 0"},
        {offsetof(linnet_sampling, temperature), INFINITY, "temperature must be between 0"},
        {offsetof(linnet_sampling, top_p), 0, "top_p"},
        {offsetof(linnet_sampling, top_p), 1.5f, "top_p"},
        {offsetof(linnet_sampling, top_p), NAN, "top_p"},
        {offsetof(linnet_sampling, min_p), -0.1f, "min_p"},
        {offsetof(linnet_sampling, min_p), NAN, "min_p"},
        {offsetof(linnet_sampling, repetition_penalty), 0, "repetition_penalty"},
        {offsetof(linnet_sampling, presence_penalty), 3, "presence_penalty"},
        {offsetof(linnet_sampling, frequency_penalty), NAN, "frequency_penalty"},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        r = good;
        memcpy((char *)&r.sampling + settings[i].offset, &settings[i].value, sizeof(float));
        refuse(e, &r, LINNET_INVALID, settings[i].words);
    }
    int32_t ids[2] = {3, FAKE_VOCAB};
    linnet_logit_bias bias[2] = {{FAKE_VOCAB, 1}, {0, NAN}};
    const char *stops[2] = {"a", ""};
    r = good, r.prompt = ids, r.n_prompt = 2;
    refuse(e, &r, LINNET_INVALID, "prompt token 1 is 61");
    ids[1] = -1;
    refuse(e, &r, LINNET_INVALID, "prompt token 1 is -1");
    r = good, r.stop_ids = ids, r.n_stop_ids = 2;
    refuse(e, &r, LINNET_INVALID, "stop id 1 is -1");
    r = good, r.sampling.logit_bias = bias, r.sampling.n_logit_bias = 1;
    refuse(e, &r, LINNET_INVALID, "logit_bias id");
    r.sampling.logit_bias = bias + 1;
    refuse(e, &r, LINNET_INVALID, "not a number");
    r = good, r.sampling.top_k = -1;
    refuse(e, &r, LINNET_INVALID, "top_k");
    r = good, r.n = 129;
    refuse(e, &r, LINNET_INVALID, "n must be between 0 and 128, not 129");
    r = good, r.logprobs = 21;
    refuse(e, &r, LINNET_INVALID, "logprobs");
    r = good, r.max_tokens = -1;
    refuse(e, &r, LINNET_INVALID, "max_tokens");
    r = good, r.min_tokens = 11;
    refuse(e, &r, LINNET_INVALID, "min_tokens must be between 0 and 10");
    r = good, r.stop = stops, r.n_stop = 2;
    refuse(e, &r, LINNET_INVALID, "stop string 1 is empty");
    r.n_stop = 1;
    refuse(e, &r, LINNET_INVALID, "no"); /* tokenizer */
    r = good, r.on_event = NULL;
    refuse(e, &r, LINNET_INVALID, "on_event");
    job_free(job);
    linnet_engine_destroy(e);
}

/* ---- with the real thread ---------------------------------------------------------------- */

static void threaded_load(void **state)
{
    (void)state;
    struct fake_options crowded = {.n_blocks = 10,
                                   .max_seqs = 12,
                                   .max_tokens = 40,
                                   .max_context = 200,
                                   .prefix_caching = true};
    struct fake_options alone = crowded;
    alone.n_blocks = 64;
    struct load load = {.crowded = new_engine(&crowded, NULL),
                        .alone = fake_engine(&alone, NULL),
                        .n_requests = 200,
                        .seed = 5,
                        .n_vocab = FAKE_VOCAB - 1,
                        .max_prompt = 50,
                        .max_tokens = 100,
                        .plain = on_device ? 20 : 0};
    linnet_error err;
    assert_ok(engine_start_thread(load.crowded, &err), err);
    assert_ok(engine_start_thread(load.alone, &err), err);
    load_test(&load);
    linnet_engine_destroy(load.crowded);
    linnet_engine_destroy(load.alone);
}

struct submitter {
    linnet_engine *engine;
    int32_t prompt[50];
    int32_t number;
    int32_t n_wrong;
};

static void *submit_and_cancel(void *arg)
{
    struct submitter *s = arg;
    for (uint64_t i = 0; i < 60; i++) {
        uint64_t random = random_u64((uint64_t)s->number, i, 0);
        struct job *job = job_new(s->prompt, 1 + (int32_t)(random % 50), 30);
        job->request.n = 1 + (int32_t)(random >> 8 & 3);
        job->engine = s->engine;
        linnet_error err;
        linnet_stats stats;
        if (linnet_engine_submit(s->engine, &job->request, &job->id, &err)) s->n_wrong++;
        if (random >> 16 & 1) linnet_engine_cancel(s->engine, job->id - (random >> 17 & 1));
        linnet_engine_get_stats(s->engine, &stats);
        if (random >> 18 & 1) linnet_engine_cancel(s->engine, job->id);
        job_wait(job);
        for (int32_t c = 0; c < job->request.n; c++) s->n_wrong += job->answers[c].fault != NULL;
        job_free(job);
    }
    return NULL;
}

static void many_threads(void **state)
{
    (void)state;
    struct fake_options options = roomy;
    options.n_blocks = 16;
    options.prefix_caching = true;
    struct submitter submitters[4] = {0};
    pthread_t threads[4];
    linnet_engine *e = new_engine(&options, NULL);
    linnet_error err;
    assert_ok(engine_start_thread(e, &err), err);
    for (int i = 0; i < 4; i++) {
        submitters[i].engine = e;
        submitters[i].number = i;
        assert_int_equal(pthread_create(&threads[i], NULL, submit_and_cancel, &submitters[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(submitters[i].n_wrong, 0);
    }
    linnet_stats stats = stats_of(e);
    assert_int_equal(stats.n_blocks_free, stats.n_blocks);
    linnet_engine_destroy(e);
}

/* Destroying a busy engine cancels, and the last events still come. */
static void destroy_while_busy(void **state)
{
    (void)state;
    int32_t prompt[50] = {1};
    for (int threaded = 0; threaded < 2; threaded++) {
        linnet_engine *e = new_engine(&roomy, NULL);
        struct job *jobs[20];
        linnet_error err;
        if (threaded) assert_ok(engine_start_thread(e, &err), err);
        for (int i = 0; i < 20; i++) {
            jobs[i] = job_new(prompt, 50, 0);
            jobs[i]->request.ignore_eos = true;
            jobs[i]->request.n = 2;
            job_submit(jobs[i], e);
            if (!threaded && i == 10) engine_turn(e);
        }
        linnet_engine_destroy(e);
        for (int i = 0; i < 20; i++) {
            assert_int_equal(jobs[i]->n_finished, 2);
            assert_null(jobs[i]->answers[0].fault);
            job_free(jobs[i]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_do_not_depend_on_the_load),
        cmocka_unit_test(load_of_500_requests),
        cmocka_unit_test(answers_of_one_request_share_its_prompt),
        cmocka_unit_test(answers_survive_the_first),
        cmocka_unit_test(prefix_is_found_again),
        cmocka_unit_test(dynamic_rope_lengths),
        cmocka_unit_test(cancel_frees_within_a_step),
        cmocka_unit_test(nan_ends_only_its_own_request),
        cmocka_unit_test(device_failure_ends_everything),
        cmocka_unit_test(ends),
        cmocka_unit_test(random_seeds_differ),
        cmocka_unit_test(refusals),
        cmocka_unit_test(threaded_load),
        cmocka_unit_test(many_threads),
        cmocka_unit_test(destroy_while_busy),
    };
    int failed = cmocka_run_group_tests_name("host", tests, NULL, NULL);
    on_device = true;
    return failed + cmocka_run_group_tests_name("device", tests, NULL, NULL);
}
