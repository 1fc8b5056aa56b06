/*
 * 500 random requests through linnet.h from several threads at once, with cancels from outside, on
 * a real tiny model and a pool that is far too small: each answer equals the one that the request
 * gets alone, and every block comes back.
 */
#include "cases.h"

enum { N_THREADS = 5, N_EACH = SLOW_BUILD ? 16 : 100 };

struct client {
    struct load load; /* what random_job draws from */
    pthread_t thread;
    struct job *jobs[N_EACH];
    uint64_t counter;
    int n_refused; /* cmocka's checks are the main thread's */
};

static void *submit_all(void *arg)
{
    struct client *c = arg;
    uint64_t counter = UINT64_C(1) << 32; /* of its own, so that the jobs do not depend on it */
    for (int i = 0; i < N_EACH; i++) {
        struct job *job = c->jobs[i];
        linnet_error err;
        job->engine = c->load.crowded;
        if (linnet_engine_submit(job->engine, &job->request, &job->id, &err)) c->n_refused++;
        if (job->cancel_after == 0) linnet_engine_cancel(job->engine, job->id);
        if (draw(&c->load, &counter, 8) == 0) usleep((useconds_t)draw(&c->load, &counter, 3000));
        if (draw(&c->load, &counter, 16) == 0) { /* some earlier request, finished or not */
            struct job *other = c->jobs[draw(&c->load, &counter, (uint64_t)i + 1)];
            linnet_engine_cancel(job->engine, other->id);
        }
    }
    return NULL;
}

static void compare_with_alone(const struct client *c)
{
    for (int i = 0; i < N_EACH; i++) {
        struct job *job = c->jobs[i],
                   *alone = job_new(job->request.prompt, (int32_t)job->request.n_prompt, 0);
        alone->request = job->request;
        alone->request.user = alone;
        ask(alone, c->load.alone);
        assert_same_answers(job, alone, i);
        job_free(alone);
    }
}

static void five_hundred(void **state)
{
    (void)state;
    linnet_model *model = open_model(data_path("qwen3-tiny"));
    linnet_engine *crowded = open_engine(
        model, 8 * 16,
        (linnet_engine_options){.threads = 1, .max_num_seqs = 12, .max_num_batched_tokens = 48});
    linnet_engine *alone = open_engine(
        model, 24 * 16,
        (linnet_engine_options){.threads = 1, .max_model_len = 8 * 16, .no_prefix_caching = true});
    struct client *clients = calloc(N_THREADS, sizeof *clients);
    for (int k = 0; k < N_THREADS; k++) {
        struct client *c = &clients[k];
        c->load = (struct load){.crowded = crowded,
                                .alone = alone,
                                .seed = 500 + (uint64_t)k,
                                .n_vocab = 470,
                                .max_prompt = 60,
                                .max_tokens = 60,
                                .stop_strings = true,
                                .stops = {"e", "on"}};
        for (int i = 0; i < N_EACH; i++) c->jobs[i] = random_job(&c->load, &c->counter);
    }
    for (int k = 0; k < N_THREADS; k++)
        assert_int_equal(pthread_create(&clients[k].thread, NULL, submit_all, &clients[k]), 0);
    for (int k = 0; k < N_THREADS; k++) pthread_join(clients[k].thread, NULL);
    int n_cancelled = 0, n_whole = 0;
    for (int k = 0; k < N_THREADS; k++) {
        assert_int_equal(clients[k].n_refused, 0);
        for (int i = 0; i < N_EACH; i++) {
            job_wait(clients[k].jobs[i]);
            bool cancelled = clients[k].jobs[i]->answers[0].finish == LINNET_FINISH_CANCELLED;
            n_cancelled += cancelled;
            n_whole += !cancelled;
        }
    }
    linnet_stats stats;
    linnet_engine_get_stats(crowded, &stats);
    print_message("%d whole, %d cancelled, %lld preemptions, %lld of %lld tokens cached\n", n_whole,
                  n_cancelled, (long long)stats.n_preemptions, (long long)stats.cached_tokens,
                  (long long)stats.prompt_tokens);
    /* How often depends on how the threads fall; that it happens at all does not. */
    assert_true(n_cancelled > 0 && n_whole > 0);
    assert_true(stats.n_preemptions > 0 && stats.cached_tokens > 0);
    assert_at_rest(crowded);
    for (int k = 0; k < N_THREADS; k++) compare_with_alone(&clients[k]);
    assert_at_rest(alone);
    for (int k = 0; k < N_THREADS; k++)
        for (int i = 0; i < N_EACH; i++) ask_free(clients[k].jobs[i]);
    free(clients);
    linnet_engine_destroy(crowded);
    linnet_engine_destroy(alone);
    linnet_model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(five_hundred)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
