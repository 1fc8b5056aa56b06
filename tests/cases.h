/* cases.h - what the tests of public bug reports share: models, engines, and asking them things. */
#ifndef LINNET_TESTS_CASES_H
#define LINNET_TESTS_CASES_H

#include "engine_load.h"

#if defined(__SANITIZE_ADDRESS__)
#define SLOW_BUILD 1 /* sanitizers: the same tests with fewer lengths and requests */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SLOW_BUILD 1
#endif
#endif
#ifndef SLOW_BUILD
#define SLOW_BUILD 0
#endif

static const char japan[] = "What is the capital of Japan?";
static const char tokyo[] = "The capital of Japan is Tokyo.";
static const char counting[] = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17";

static inline linnet_model *open_model(const char *path)
{
    linnet_model *model;
    linnet_error err;
    assert_ok(linnet_model_open(path, &model, &err), err);
    return model;
}

/* An engine whose pool holds n_tokens; max_model_len 0: as many as that. */
static inline linnet_engine *open_engine(linnet_model *model, int32_t n_tokens,
                                         linnet_engine_options options)
{
    linnet_plan plan;
    linnet_engine *engine;
    linnet_error err;
    linnet_engine_options probe = {.kv_cache_memory = 1 << 24};
    assert_ok(linnet_engine_plan(model, &probe, &plan, &err), err);
    options.kv_cache_memory = n_tokens * plan.kv_bytes_per_token;
    assert_ok(linnet_engine_create(model, &options, &engine, &err), err);
    return engine;
}

/* linnet_free() them. */
static inline int32_t *text_ids(const linnet_model *model, const char *text, int32_t *n)
{
    int32_t *ids;
    size_t n_ids;
    linnet_error err;
    assert_ok(linnet_tokenize(model, text, strlen(text), LINNET_ADD_SPECIAL, &ids, &n_ids, &err),
              err);
    *n = (int32_t)n_ids;
    return ids;
}

static inline int32_t *chat_ids(const linnet_model *model, const char *user, int32_t *n)
{
    int32_t *ids;
    size_t n_ids;
    linnet_error err;
    json_t *json = json_pack("{s:[{s:s,s:s}]}", "messages", "role", "user", "content", user);
    char *request = json_dumps(json, 0);
    assert_ok(linnet_chat_tokenize(model, request, strlen(request), NULL, NULL, &ids, &n_ids, &err),
              err);
    free(request);
    json_decref(json);
    *n = (int32_t)n_ids;
    return ids;
}

/* Jobs that own their prompt: end them with ask_free. */
static inline struct job *raw_job(const linnet_model *model, const char *text, int32_t max_tokens)
{
    int32_t n, *ids = text_ids(model, text, &n);
    return job_new(ids, n, max_tokens);
}

static inline struct job *chat_job(const linnet_model *model, const char *user, int32_t max_tokens)
{
    int32_t n, *ids = chat_ids(model, user, &n);
    return job_new(ids, n, max_tokens);
}

static inline void ask_free(struct job *job)
{
    linnet_free((void *)(uintptr_t)job->request.prompt);
    job_free(job);
}

static inline struct job *ask(struct job *job, linnet_engine *engine)
{
    job_submit(job, engine);
    job_wait(job);
    return job;
}

static inline void assert_answer(struct job *job, int32_t choice, const char *text,
                                 linnet_finish finish)
{
    struct answer *a = &job->answers[choice];
    if (a->fault) fail_msg("choice %d: %s", choice, a->fault);
    if (a->finish != finish)
        fail_msg("choice %d ended with \"%s\" (%s) instead of \"%s\"", choice,
                 linnet_finish_name(a->finish), a->error.message, linnet_finish_name(finish));
    assert_string_equal(strbuf_cstr(&a->text), text);
}

static inline void assert_tokens(const struct answer *a, const int32_t *tokens, int32_t n)
{
    assert_int_equal(a->n_tokens, n);
    for (int32_t i = 0; i < n; i++)
        if (a->tokens[i] != tokens[i])
            fail_msg("token %d is %d instead of %d", i, a->tokens[i], tokens[i]);
}

static inline void assert_refused(linnet_engine *engine, const linnet_request *request,
                                  linnet_status status, const char *words)
{
    linnet_error err = {0};
    uint64_t id;
    if (linnet_engine_submit(engine, request, &id, &err) != status)
        fail_msg("expected \"%s\", got status %d: %s", words, (int)err.status, err.message);
    if (!strstr(err.message, words)) fail_msg("\"%s\" lacks \"%s\"", err.message, words);
}

/* Nothing runs, and every block is back. */
static inline void assert_at_rest(linnet_engine *engine)
{
    linnet_stats stats;
    linnet_engine_get_stats(engine, &stats);
    assert_int_equal(stats.n_running + stats.n_waiting, 0);
    assert_int_equal(stats.n_blocks_free, stats.n_blocks);
}

#endif
