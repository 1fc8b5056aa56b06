/*
 * The engine on a device that chooses tokens itself: what happens when, while one step is under way
 * and the next is planned. test_engine.c has the loads; here are the single cases.
 */
#include "engine_load.h"
#include "fake_model.h"

#include "base/clock.h"
#include "file/checkpoint.h"

static const struct fake_options roomy = {
    .n_blocks = 256, .max_seqs = 16, .max_tokens = 128, .max_context = 256, .device = true};

struct rig {
    linnet_engine *engine;
    struct fake_model *model;
};

static struct rig rig_new(const struct fake_options *options)
{
    struct rig rig;
    rig.engine = fake_engine(options, &rig.model);
    return rig;
}

static void finish_all(linnet_engine *e)
{
    while (checked_turn(e)) continue;
    linnet_stats stats;
    linnet_engine_get_stats(e, &stats);
    assert_int_equal(stats.n_blocks_free, stats.n_blocks);
    assert_int_equal(stats.n_running + stats.n_waiting, 0);
}

/* A request of its own for each i, greedy unless i is odd. */
static struct job *new_job(int32_t *prompt, int32_t n_prompt, int32_t max_tokens, int32_t i)
{
    for (int32_t p = 0; p < n_prompt; p++)
        prompt[p] = (int32_t)(random_u64(31, (uint64_t)p, (uint64_t)i) % 60);
    struct job *job = job_new(prompt, n_prompt, max_tokens);
    job->request.ignore_eos = true;
    job->request.sampling.temperature = i % 2 ? 1 : 0;
    job->request.sampling.seed = (uint64_t)i;
    return job;
}

/* Runs the same request on a host of its own and compares. */
static void expect_host_answer(struct job *job)
{
    struct fake_options options = roomy;
    options.device = false;
    linnet_engine *host = fake_engine(&options, NULL);
    struct job *alone = job_new(job->request.prompt, (int32_t)job->request.n_prompt, 0);
    alone->request = job->request;
    alone->request.user = alone;
    job_submit(alone, host);
    finish_all(host);
    assert_same_answers(job, alone, 0);
    job_free(alone);
    linnet_engine_destroy(host);
}

/* Runs n jobs at once on a device and compares each with the host's; returns the figures. */
enum { MAX_JOBS = 12 };

static linnet_stats run_jobs(const struct fake_options *options, struct job **jobs, int n,
                             int64_t *n_ahead)
{
    struct rig rig = rig_new(options);
    linnet_stats stats;
    double begun = clock_seconds();
    for (int i = 0; i < n; i++) job_submit(jobs[i], rig.engine);
    finish_all(rig.engine);
    linnet_engine_get_stats(rig.engine, &stats);
    assert_true(stats.step_seconds > 0); /* no time counts twice */
    assert_true(stats.step_seconds <= clock_seconds() - begun);
    *n_ahead = rig.model->n_ahead;
    assert_int_equal(stats.n_steps, rig.model->n_steps);
    for (int i = 0; i < n; i++) {
        expect_host_answer(jobs[i]);
        job_free(jobs[i]);
    }
    linnet_engine_destroy(rig.engine);
    return stats;
}

static void length_is_known_beforehand(void **state)
{
    (void)state;
    int32_t prompt[20];
    struct rig rig = rig_new(&roomy);
    struct job *job = new_job(prompt, 20, 12, 0);
    job_submit(job, rig.engine);
    finish_all(rig.engine);
    assert_int_equal(job->answers[0].finish, LINNET_FINISH_LENGTH);
    assert_int_equal(rig.model->n_steps, 12);
    assert_int_equal(rig.model->n_tokens, 20 + 11); /* nothing is thrown away */
    assert_int_equal(rig.model->n_ahead, 11);
    expect_host_answer(job);
    job_free(job);
    linnet_engine_destroy(rig.engine);
}

/* What a callback sees. */
struct watcher {
    struct job *job;
    struct rig rig;
    int32_t under_way[64], n_tokens; /* at each token */
    int32_t n_blocks_free;           /* at the end */
};

static void watch(void *user, const linnet_event *event)
{
    struct watcher *w = user;
    linnet_stats stats;
    if (event->type == LINNET_EVENT_TOKEN) w->under_way[w->n_tokens++] = w->rig.model->n_under_way;
    linnet_engine_get_stats(w->rig.engine, &stats);
    w->n_blocks_free = stats.n_blocks_free;
    job_event(w->job, event);
}

/* Tokens are told while the next step is under way, and the last one at once. */
static void tokens_are_told_early(void **state)
{
    (void)state;
    int32_t prompt[20];
    struct watcher w = {.rig = rig_new(&roomy), .job = new_job(prompt, 20, 6, 1)};
    w.job->request.on_event = watch;
    w.job->request.user = &w;
    job_submit(w.job, w.rig.engine);
    checked_turn(w.rig.engine); /* begins the prompt */
    assert_int_equal(w.n_tokens, 0);
    for (int32_t turn = 1; turn <= 6; turn++) {
        checked_turn(w.rig.engine);
        assert_int_equal(w.n_tokens, turn);
        assert_int_equal(w.under_way[turn - 1], turn < 6);
    }
    assert_int_equal(w.job->answers[0].finish, LINNET_FINISH_LENGTH);
    assert_false(checked_turn(w.rig.engine));
    job_free(w.job);
    linnet_engine_destroy(w.rig.engine);
}

/* The step begun before the end token was known has one row for nothing, which nobody hears of. */
static void end_token_is_found_late(void **state)
{
    (void)state;
    int32_t prompt[20];
    struct watcher w = {.rig = rig_new(&roomy), .job = new_job(prompt, 20, 30, 0)};
    struct job *job = w.job;
    job_submit(job, w.rig.engine);
    finish_all(w.rig.engine);
    int32_t end = job->answers[0].tokens[14], first = 0;
    while (job->answers[0].tokens[first] != end) first++;
    int64_t before = w.rig.model->n_tokens;
    job_reset(job);
    job->request.stop_ids = &end;
    job->request.n_stop_ids = 1;
    job->request.on_event = watch;
    job->request.user = &w;
    job_submit(job, w.rig.engine);
    finish_all(w.rig.engine);
    assert_int_equal(job->answers[0].finish, LINNET_FINISH_STOP);
    assert_int_equal(job->answers[0].n_tokens, first + 1);
    assert_int_equal(w.under_way[first], 1);
    assert_int_equal(w.n_blocks_free, roomy.n_blocks); /* at once */
    assert_int_equal(w.rig.model->n_tokens - before, 20 + first + 1);
    assert_int_equal(w.rig.model->n_collected, w.rig.model->n_steps);
    job->request.on_event = job_event;
    expect_host_answer(job);
    job_free(job);
    linnet_engine_destroy(w.rig.engine);
}

/* Everything that callbacks hear, in order. */
static void write_down(void *user, const linnet_event *event)
{
    struct strbuf *log = user;
    strbuf_format(log, "%d: %d.%d token %d, %d of %d (%d), %d; \"%.*s\" %d %d\n", event->type,
                  (int)event->request, event->choice, event->token, event->prompt_done,
                  event->prompt_tokens, event->cached_tokens, event->completion_tokens,
                  (int)event->text_size, event->text, event->finish, event->preemptions);
}

/*
 * Chunks of prompts, tokens, stop strings and ends come in the order of the host's loop: one
 * request after the other in small steps, then all at once in steps that hold all prompts (an end
 * that is found late moves the chunks of others).
 */
static void events_are_those_of_the_host(void **state)
{
    (void)state;
    static const char *const stops[] = {"3", "P%"};
    static int32_t prompts[MAX_JOBS][160];
    struct checkpoint *cp;
    struct tokenizer *tokenizer;
    linnet_error err;
    struct strbuf logs[2] = {0};
    assert_ok(checkpoint_open(data_path("qwen3-tiny"), &cp, &err), err);
    assert_ok(tokenizer_open(cp, &tokenizer, &err), err);
    for (int run = 0; run < 4; run++) {
        struct fake_options options = roomy;
        bool device = run % 2, one_by_one = run < 2;
        options.max_tokens = one_by_one ? 40 : 1024;
        options.tokenizer = tokenizer;
        options.device = device;
        struct rig rig = rig_new(&options);
        for (int i = 0; i < MAX_JOBS; i++) {
            struct job *job = new_job(prompts[i], 5 + i * 13, 60, i);
            job->request.stop = stops;
            job->request.n_stop = i % 3;
            job->request.ignore_eos = i % 4;
            job->request.on_event = write_down;
            job->request.user = &logs[device];
            job_submit(job, rig.engine);
            if (one_by_one) finish_all(rig.engine);
            job_free(job);
        }
        finish_all(rig.engine);
        linnet_engine_destroy(rig.engine);
    }
    assert_string_equal(strbuf_cstr(&logs[0]), strbuf_cstr(&logs[1]));
    assert_non_null(strstr(strbuf_cstr(&logs[0]), ", 60; \"\" 2 0")); /* some had their length */
    for (int device = 0; device < 2; device++) strbuf_free(&logs[device]);
    tokenizer_close(tokenizer);
    checkpoint_close(cp);
}

static void cancel_while_under_way(void **state)
{
    (void)state;
    int32_t prompts[3][40];
    struct fake_options options = roomy;
    options.n_blocks = 4;
    struct rig rig = rig_new(&options);
    struct job *a = new_job(prompts[0], 20, 40, 0), *b = new_job(prompts[1], 40, 10, 1),
               *c = new_job(prompts[2], 5, 8, 2);
    job_submit(a, rig.engine);
    job_submit(b, rig.engine); /* must wait for a's blocks */
    job_submit(c, rig.engine);
    for (int i = 0; i < 5; i++) checked_turn(rig.engine);
    assert_int_equal(a->answers[0].n_tokens, 4);
    assert_int_equal(rig.model->n_under_way, 1);
    linnet_engine_cancel(rig.engine, a->id);
    checked_turn(rig.engine); /* b takes the blocks that the step under way still writes */
    assert_int_equal(a->answers[0].finish, LINNET_FINISH_CANCELLED);
    assert_int_equal(a->answers[0].n_tokens, 4);
    assert_int_equal(rig.model->n_under_way, 1);
    linnet_stats stats;
    linnet_engine_get_stats(rig.engine, &stats);
    assert_int_equal(stats.n_running, 1);
    finish_all(rig.engine);
    expect_host_answer(a);
    expect_host_answer(b);
    expect_host_answer(c);

    job_reset(a); /* the only one: its step is waited for, and nothing is told */
    job_submit(a, rig.engine);
    checked_turn(rig.engine);
    linnet_engine_cancel(rig.engine, a->id);
    assert_false(checked_turn(rig.engine));
    assert_int_equal(rig.model->n_under_way, 0);
    assert_int_equal(a->answers[0].n_tokens, 0);
    job_free(a);
    job_free(b);
    job_free(c);
    linnet_engine_destroy(rig.engine);
}

/* Each request takes over the block that the last step of the one before, begun in vain, writes. */
static void pool_of_one_block(void **state)
{
    (void)state;
    int32_t prompts[MAX_JOBS][3], ends[MAX_JOBS];
    linnet_logit_bias likely[MAX_JOBS];
    struct fake_options options = roomy;
    options.n_blocks = 1;
    for (int caching = 0; caching < 2; caching++) {
        struct job *jobs[MAX_JOBS];
        int64_t n_ahead;
        options.prefix_caching = caching;
        for (int i = 0; i < MAX_JOBS; i++) {
            jobs[i] = new_job(prompts[i], 3, 14, i);
            ends[i] = (int32_t)(random_u64(8, (uint64_t)i, 0) % 60);
            jobs[i]->request.stop_ids = &ends[i];
            jobs[i]->request.n_stop_ids = 1;
            likely[i] = (linnet_logit_bias){ends[i], 2};
            jobs[i]->request.sampling.logit_bias = &likely[i];
            jobs[i]->request.sampling.n_logit_bias = 1;
        }
        run_jobs(&options, jobs, MAX_JOBS, &n_ahead);
        assert_true(n_ahead > 30);
    }
}

static void preemption_waits_for_the_tokens(void **state)
{
    (void)state;
    int32_t prompts[4][30];
    for (int caching = 0; caching < 2; caching++) {
        struct fake_options options = roomy;
        options.n_blocks = 9;
        options.prefix_caching = caching;
        struct rig rig = rig_new(&options);
        struct job *jobs[4];
        for (int i = 0; i < 4; i++) {
            jobs[i] = new_job(prompts[i], 20 + 3 * i, 60, i);
            job_submit(jobs[i], rig.engine);
        }
        int64_t preemptions = 0;
        for (bool more = true; more;) {
            linnet_stats stats;
            int64_t n_ahead = rig.model->n_ahead;
            more = checked_turn(rig.engine);
            linnet_engine_get_stats(rig.engine, &stats);
            if (stats.n_preemptions > preemptions) assert_int_equal(n_ahead, rig.model->n_ahead);
            preemptions = stats.n_preemptions;
        }
        assert_true(preemptions > 2);
        assert_true(rig.model->n_ahead > rig.model->n_steps / 2);
        for (int i = 0; i < 4; i++) {
            expect_host_answer(jobs[i]);
            job_free(jobs[i]);
        }
        linnet_engine_destroy(rig.engine);
    }
}

static void several_answers(void **state)
{
    (void)state;
    int32_t prompts[3][100];
    struct job *jobs[3];
    int64_t n_ahead;
    for (int i = 0; i < 3; i++) {
        jobs[i] = new_job(prompts[i], 50 + 25 * i, 20, 1);
        jobs[i]->request.n = 4 + i;
        jobs[i]->request.ignore_eos = false;
    }
    linnet_stats stats = run_jobs(&roomy, jobs, 3, &n_ahead);
    assert_int_equal(stats.cached_tokens, 3 * 48 + 4 * 64 + 5 * 96); /* siblings' blocks */
    assert_true(n_ahead > 20);
}

/* A block may be found as soon as its tokens are known and its step is begun. */
static void blocks_just_completed_are_found(void **state)
{
    (void)state;
    int32_t prompt[26], longer[80];
    struct fake_options options = roomy;
    options.prefix_caching = true;
    struct rig rig = rig_new(&options);
    struct job *a = new_job(prompt, 26, 40, 0);
    job_submit(a, rig.engine);
    while (a->answers[0].n_tokens < 6) checked_turn(rig.engine);
    /* 32 tokens are known; the step that computes the last of them is under way */
    assert_int_equal(rig.model->n_under_way, 1);
    memcpy(longer, prompt, sizeof prompt);
    memcpy(longer + 26, a->answers[0].tokens, 6 * sizeof *longer);
    longer[32] = 5;
    struct job *b = job_new(longer, 33, 20);
    job_submit(b, rig.engine);
    finish_all(rig.engine);
    assert_int_equal(b->answers[0].cached_tokens, 32);
    expect_host_answer(a);
    expect_host_answer(b);

    /* The last token that is computed of an answer completes a block: 26 + 39 = 64 + 1 */
    memcpy(longer + 26, a->answers[0].tokens, 40 * sizeof *longer);
    struct job *c = job_new(longer, 66, 3);
    job_submit(c, rig.engine);
    finish_all(rig.engine);
    assert_int_equal(c->answers[0].cached_tokens, 64);
    job_reset(a);
    a->request.max_tokens = 39; /* 64 are computed, the last in the last step */
    a->request.sampling.temperature = 3;
    job_submit(a, rig.engine);
    finish_all(rig.engine);
    memcpy(longer + 26, a->answers[0].tokens, 39 * sizeof *longer);
    job_reset(c);
    c->request.n_prompt = 65;
    job_submit(c, rig.engine);
    finish_all(rig.engine);
    assert_int_equal(c->answers[0].cached_tokens, 64);
    expect_host_answer(c);
    job_free(a);
    job_free(b);
    job_free(c);
    linnet_engine_destroy(rig.engine);
}

/* Some of the batch sit a step out, so that their token is known when the next is planned. */
static void budget_smaller_than_the_batch(void **state)
{
    (void)state;
    int32_t prompts[MAX_JOBS][30];
    for (int32_t budget = 1; budget < 8; budget += 2) {
        struct fake_options options = roomy;
        struct job *jobs[MAX_JOBS];
        int64_t n_ahead;
        options.max_tokens = budget;
        for (int i = 0; i < MAX_JOBS; i++) jobs[i] = new_job(prompts[i], 1 + i * 2, 10 + i, i);
        linnet_stats stats = run_jobs(&options, jobs, MAX_JOBS, &n_ahead);
        assert_true(n_ahead > stats.n_steps / 2);
    }
}

static void long_prompts_beside_answers(void **state)
{
    (void)state;
    static int32_t prompts[MAX_JOBS][160];
    for (int32_t budget = 17; budget < 80; budget += 31) {
        struct fake_options options = roomy;
        struct job *jobs[MAX_JOBS];
        int64_t n_ahead;
        options.max_tokens = budget;
        options.dynamic_rope_context = 0;
        for (int i = 0; i < MAX_JOBS; i++) jobs[i] = new_job(prompts[i], 5 + i * 13, 40 - i, i);
        linnet_stats stats = run_jobs(&options, jobs, MAX_JOBS, &n_ahead);
        assert_true(n_ahead > stats.n_steps * 3 / 4);
    }
}

/* Bias and bans depend on how many tokens there are, not on which. */
static void bias_and_bans_are_pipelined(void **state)
{
    (void)state;
    int32_t prompts[MAX_JOBS][30], ends[2] = {12, 40};
    const linnet_logit_bias bias[4] = {{12, 9}, {50, 2.5f}, {40, -1}, {50, 1.25f}};
    struct job *jobs[MAX_JOBS];
    int64_t n_ahead;
    for (int i = 0; i < MAX_JOBS; i++) {
        jobs[i] = new_job(prompts[i], 1 + i * 2, 20 + i, i);
        jobs[i]->request.sampling.logit_bias = bias;
        jobs[i]->request.sampling.n_logit_bias = 4;
        jobs[i]->request.stop_ids = ends;
        jobs[i]->request.n_stop_ids = 2;
        jobs[i]->request.min_tokens = i;
    }
    linnet_stats stats = run_jobs(&roomy, jobs, MAX_JOBS, &n_ahead);
    assert_true(n_ahead > stats.n_steps * 3 / 4);
}

/* 16 sequences share 64 adjustments: answers with up to 4 go ahead; with more, the device still
 * chooses for a step that has no more than 64, and else the host. */
static void more_adjustments_than_the_device_takes(void **state)
{
    (void)state;
    int32_t prompts[MAX_JOBS][30];
    struct fake_options options = roomy;
    linnet_logit_bias bias[6];
    options.max_adjustments = 64;
    for (int32_t i = 0; i < 6; i++) bias[i] = (linnet_logit_bias){9 * i, 1};
    for (int32_t n_bias = 4; n_bias <= 6; n_bias++) {
        struct rig rig = rig_new(&options);
        struct job *jobs[MAX_JOBS];
        for (int i = 0; i < MAX_JOBS; i++) {
            jobs[i] = new_job(prompts[i], 1 + i * 2, i < 2 ? 30 : 20, i);
            jobs[i]->request.sampling.logit_bias = bias;
            jobs[i]->request.sampling.n_logit_bias = (size_t)n_bias;
            job_submit(jobs[i], rig.engine);
        }
        finish_all(rig.engine);
        assert_int_equal(rig.model->n_ahead > 0, n_bias == 4);
        int64_t by_host = rig.model->n_steps - rig.model->n_collected;
        assert_int_equal(by_host > 0, n_bias == 6);
        assert_true(by_host < 25); /* the device, when there are fewer */
        for (int i = 0; i < MAX_JOBS; i++) {
            expect_host_answer(jobs[i]);
            job_free(jobs[i]);
        }
        linnet_engine_destroy(rig.engine);
    }
}

/* Penalties look at the token just chosen; log-probabilities need the logits. */
static void some_requests_are_not_pipelined(void **state)
{
    (void)state;
    int32_t prompts[3][20];
    for (int kind = 0; kind < 4; kind++) {
        struct rig rig = rig_new(&roomy);
        struct job *plain = new_job(prompts[0], 20, 40, 1), *other = new_job(prompts[1], 10, 8, 3),
                   *third = new_job(prompts[2], 20, 30, 2);
        linnet_sampling *sampling = &other->request.sampling;
        if (kind == 0) other->request.want_logprobs = true;
        if (kind == 1) sampling->repetition_penalty = 1.5f;
        if (kind == 2) sampling->presence_penalty = 1;
        if (kind == 3) sampling->frequency_penalty = 0.5f;
        job_submit(other, rig.engine);
        finish_all(rig.engine);
        assert_int_equal(rig.model->n_steps, 8);
        assert_int_equal(rig.model->n_ahead, 0);
        assert_int_equal(rig.model->n_collected, kind == 0 ? 0 : 8);
        expect_host_answer(other);
        job_reset(other);
        job_submit(plain, rig.engine); /* ahead before the other comes and after it has gone */
        while (plain->answers[0].n_tokens < 10) checked_turn(rig.engine);
        assert_int_equal(rig.model->n_ahead, 10);
        job_submit(third, rig.engine); /* is taken in ahead, the other is not */
        job_submit(other, rig.engine);
        while (!job_done(other)) checked_turn(rig.engine);
        assert_int_equal(rig.model->n_ahead, 11);
        finish_all(rig.engine);
        assert_true(rig.model->n_ahead > 28);
        expect_host_answer(plain);
        expect_host_answer(third);
        job_free(third);
        expect_host_answer(other);
        job_free(plain);
        job_free(other);
        linnet_engine_destroy(rig.engine);
    }
}

static void failures(void **state)
{
    (void)state;
    int32_t prompts[3][20];
    for (int collecting = 0; collecting < 2; collecting++)
        for (int64_t at = 0; at < 6; at++) {
            struct rig rig = rig_new(&roomy);
            struct job *jobs[3];
            *(collecting ? &rig.model->fail_collect_at : &rig.model->fail_at) = at;
            for (int i = 0; i < 3; i++) {
                jobs[i] = new_job(prompts[i], 10 + i, 20, i);
                job_submit(jobs[i], rig.engine);
            }
            finish_all(rig.engine);
            assert_int_equal(rig.model->n_under_way, 0);
            for (int i = 0; i < 3; i++) {
                assert_int_equal(jobs[i]->answers[0].finish, LINNET_FINISH_ERROR);
                assert_int_equal(jobs[i]->answers[0].error.status, LINNET_DEVICE);
                assert_null(jobs[i]->answers[0].fault);
                job_free(jobs[i]);
            }
            linnet_engine_destroy(rig.engine);
        }
}

/* fake_close sees that nothing is left under way. */
static void shutdown_while_under_way(void **state)
{
    (void)state;
    int32_t prompt[20];
    for (int turns = 0; turns < 4; turns++) {
        struct rig rig = rig_new(&roomy);
        struct job *job = new_job(prompt, 20, 30, 0);
        job_submit(job, rig.engine);
        for (int i = 0; i < turns; i++) checked_turn(rig.engine);
        assert_int_equal(rig.model->n_under_way, turns > 0);
        linnet_engine_destroy(rig.engine);
        assert_int_equal(job->answers[0].finish, LINNET_FINISH_CANCELLED);
        assert_int_equal(job->answers[0].n_tokens, turns > 0 ? turns - 1 : 0);
        job_free(job);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(length_is_known_beforehand),
        cmocka_unit_test(tokens_are_told_early),
        cmocka_unit_test(end_token_is_found_late),
        cmocka_unit_test(events_are_those_of_the_host),
        cmocka_unit_test(cancel_while_under_way),
        cmocka_unit_test(pool_of_one_block),
        cmocka_unit_test(preemption_waits_for_the_tokens),
        cmocka_unit_test(several_answers),
        cmocka_unit_test(blocks_just_completed_are_found),
        cmocka_unit_test(budget_smaller_than_the_batch),
        cmocka_unit_test(long_prompts_beside_answers),
        cmocka_unit_test(bias_and_bans_are_pipelined),
        cmocka_unit_test(more_adjustments_than_the_device_takes),
        cmocka_unit_test(some_requests_are_not_pipelined),
        cmocka_unit_test(failures),
        cmocka_unit_test(shutdown_while_under_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
