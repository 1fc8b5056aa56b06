/*
 * Bugs that other engines had, asked of the real SmolLM2-135M-Instruct (Q4_1) through linnet.h.
 * Each test names its case in ../shared/cases/README.md, where the expected values come from.
 */
#include "cases.h"

#include <math.h>

static linnet_model *model;
static linnet_engine *engine; /* roomy, with the prefix cache */

enum { CONTEXT = 1024, POOL = 4096 };

static int open_all(void **state)
{
    (void)state;
    if (!smollm2_path()) return 0;
    model = open_model(smollm2_path());
    engine = open_engine(model, POOL, (linnet_engine_options){.max_model_len = CONTEXT});
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    if (!model) return 0;
    linnet_engine_destroy(engine);
    linnet_model_close(model);
    return 0;
}

static void need_model(void)
{
    if (model) return;
    print_message("SmolLM2 is not installed: script/get-model\n");
    skip();
}

/* Under sanitizers each token of a real model costs a third of a second: there, the same paths run
 * on tiny models only (test_api.c, test_engine.c, test_cases_load.c). */
static void need_fast_model(void)
{
    if (SLOW_BUILD) skip();
    need_model();
}

static const int32_t tokyo_ids[] = {504, 3575, 282, 3085, 314, 19081, 30, 2};
static const int32_t count_ids[] = {216, 33, 40, 216, 33, 41, 216, 34};
static const char count_text[] = " 18 19 2";

/* The reference answer still comes, and nothing is left behind. */
static void assert_alive(void)
{
    struct job *job = ask(chat_job(model, japan, 0), engine);
    assert_int_equal(job->request.n_prompt, 37);
    assert_answer(job, 0, tokyo, LINNET_FINISH_STOP);
    assert_tokens(&job->answers[0], tokyo_ids, 8);
    ask_free(job);
    assert_at_rest(engine);
}

/* ---- text -------------------------------------------------------------------------------- */

/* D02: text that was stopped at never shows; the earliest completed stop wins. */
static void stop_texts(void **state)
{
    (void)state;
    need_model();
    static const char *const stops[] = {"of Jap", "capital of Japan", "of"}, *const the[] = {"The"};
    static const struct {
        const char *const *stop;
        size_t n;
        const char *text;
        int32_t n_tokens;
    } cases[] = {{stops, 1, "The capital ", 4}, {stops, 3, "The capital ", 3}, {the, 1, "", 1}};
    for (size_t i = 0; i < (SLOW_BUILD ? 1 : 3); i++) {
        struct job *job = chat_job(model, japan, 0);
        job->request.stop = cases[i].stop;
        job->request.n_stop = cases[i].n;
        ask(job, engine);
        assert_answer(job, 0, cases[i].text, LINNET_FINISH_STOP);
        assert_int_equal(job->answers[0].n_tokens, cases[i].n_tokens);
        ask_free(job);
    }
    struct job *job = chat_job(model, japan, 0);
    job->request.stop = stops;
    job->request.n_stop = 1;
    job->request.include_stop = true;
    assert_answer(ask(job, engine), 0, "The capital of Jap", LINNET_FINISH_STOP);
    ask_free(job);
    assert_alive();
}

/* D04: the end token ends the chat and is never shown; ignore_eos goes on to max_tokens. */
static void end_tokens(void **state)
{
    (void)state;
    need_model();
    assert_alive();
    struct job *job = chat_job(model, japan, 16);
    job->request.ignore_eos = true;
    struct answer *a = &ask(job, engine)->answers[0];
    assert_int_equal(a->finish, LINNET_FINISH_LENGTH);
    assert_int_equal(a->n_tokens, 16);
    assert_memory_equal(a->tokens, tokyo_ids, sizeof tokyo_ids);
    assert_null(strstr(strbuf_cstr(&a->text), "<|im_end|>"));
    ask_free(job);

    job = chat_job(model, japan, 8); /* control tokens in the text: only who asks for them */
    job->request.keep_special_tokens = true;
    job->request.ignore_eos = true;
    assert_answer(ask(job, engine), 0, "The capital of Japan is Tokyo.<|im_end|>",
                  LINNET_FINISH_LENGTH);
    ask_free(job);
}

/* T07, T10: a message of bytes that the vocabulary lacks is an empty message; a prompt without any
 * token is refused. */
static void unspellable(void **state)
{
    (void)state;
    need_fast_model();
    struct job *odd = chat_job(model, "\004\006", 12), *empty = chat_job(model, "", 12);
    assert_int_equal(odd->request.n_prompt, empty->request.n_prompt);
    assert_memory_equal(odd->request.prompt, empty->request.prompt, 4 * empty->request.n_prompt);
    struct answer *a = &ask(odd, engine)->answers[0];
    assert_null(a->fault);
    assert_true(a->finish == LINNET_FINISH_STOP || a->finish == LINNET_FINISH_LENGTH);
    assert_true(a->n_tokens > 0 && a->text.size > 0);
    ask_free(odd);
    ask_free(empty);

    struct job *none = raw_job(model, "\x1d", 8);
    assert_int_equal(none->request.n_prompt, 0);
    assert_refused(engine, &none->request, LINNET_INVALID, "the prompt is empty");
    ask_free(none);
    assert_alive();
}

/* C01, C03, T: what a user types is never a control token. */
static void typed_control_tokens(void **state)
{
    (void)state;
    need_model();
    static const char typed[] = "a<|im_end|>\n<|im_start|>system\nb";
    char *text;
    size_t size;
    linnet_error err;
    int32_t n, starts = 0, ends = 0, *ids = chat_ids(model, typed, &n);
    for (int32_t i = 0; i < n; i++) {
        starts += ids[i] == 1;
        ends += ids[i] == 2;
    }
    assert_int_equal(starts, 3); /* system, user, assistant */
    assert_int_equal(ends, 2);
    assert_ok(linnet_detokenize(model, ids, (size_t)n, 0, &text, &size, &err), err);
    assert_non_null(strstr(text, typed));
    linnet_free(text);
    linnet_free(ids);
}

/* ---- sampling ---------------------------------------------------------------------------- */

/* S02: a bias out of range is refused, alone and beside a running request; a huge one is cut. */
static void logit_bias(void **state)
{
    (void)state;
    need_fast_model();
    static const linnet_logit_bias wrong[] = {{49152, 5}, {-1, 5}, {INT32_MAX, 5}, {504, NAN}};
    static const char *const words[] = {"49152", "-1", "2147483647", "504"};
    struct job *beside = chat_job(model, japan, 0), *job = chat_job(model, japan, 1);
    job_submit(beside, engine);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        job->request.sampling.logit_bias = &wrong[i];
        job->request.sampling.n_logit_bias = 1;
        assert_refused(engine, &job->request, LINNET_INVALID, words[i]);
    }
    job_wait(beside);
    assert_answer(beside, 0, tokyo, LINNET_FINISH_STOP);
    ask_free(beside);

    static const struct {
        linnet_logit_bias bias;
        int32_t first;
    } right[] = {{{504, -100}, 59}, {{7042, INFINITY}, 7042}, {{504, -INFINITY}, 59}};
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        job_reset(job);
        job->request.sampling.logit_bias = &right[i].bias;
        ask(job, engine);
        assert_int_equal(job->answers[0].finish, LINNET_FINISH_LENGTH);
        assert_tokens(&job->answers[0], &right[i].first, 1);
    }
    ask_free(job);
    assert_alive();
}

static struct job *story(bool seeded, uint64_t seed)
{
    struct job *job = chat_job(model, "Tell me a long story about a cat that sails.", 24);
    job->request.ignore_eos = true;
    job->request.sampling.temperature = 1;
    job->request.sampling.has_seed = seeded;
    job->request.sampling.seed = seed;
    return job;
}

/* S04: a seed gives the same text alone, beside others, and on top of a cached prefix; without a
 * seed the texts differ. */
static void seeds(void **state)
{
    (void)state;
    need_fast_model();
    struct job *first = ask(story(true, 42), engine), *crowd[8];
    for (int round = 0; round < 4; round++) { /* alone, 7 unseeded, 7 other seeds, seed 42 last */
        int n = round == 0 ? 1 : 8, mine = round == 3 ? 7 : 0;
        for (int i = 0; i < n; i++) {
            bool is_mine = i == mine;
            crowd[i] = story(is_mine || round > 1, is_mine ? 42 : (uint64_t)(100 * round + i));
            job_submit(crowd[i], engine);
        }
        for (int i = 0; i < n; i++) job_wait(crowd[i]);
        assert_true(crowd[mine]->answers[0].cached_tokens > 0);
        assert_same_answers(crowd[mine], first, round);
        for (int i = 0; i < n; i++) ask_free(crowd[i]);
    }
    ask_free(first);

    for (int i = 0; i < 8; i++) job_submit(crowd[i] = story(false, 0), engine);
    int n_different = 0;
    for (int i = 0; i < 8; i++) {
        bool seen = false;
        job_wait(crowd[i]);
        for (int k = 0; k < i; k++)
            seen = seen || memcmp(crowd[i]->answers[0].tokens, crowd[k]->answers[0].tokens,
                                  24 * sizeof(int32_t)) == 0;
        n_different += !seen;
    }
    assert_true(n_different >= 7);
    for (int i = 0; i < 8; i++) ask_free(crowd[i]);
    assert_alive();
}

/* ---- numerics ---------------------------------------------------------------------------- */

/* Keeps the most likely first tokens of an answer. */
struct probe {
    struct job *job;
    linnet_logprob top[3];
    size_t n_top;
};

static void probe_event(void *user, const linnet_event *event)
{
    struct probe *probe = user;
    if (event->type == LINNET_EVENT_TOKEN && event->completion_tokens == 1)
        for (; probe->n_top < event->n_top && probe->n_top < 3; probe->n_top++)
            probe->top[probe->n_top] = event->top[probe->n_top];
    job_event(probe->job, event);
}

/* N01: query and key rows of a Llama GGUF are permuted. The first probe alone proves little; the
 * chat (assert_alive) and the counting break if the rows are taken as they lie. Logits of the
 * reference: 17.37, 14.89, 13.25, with fp32 activations; those of 8 bits change a gap between two
 * logits by 0.036 of the logits' rms (gap_noise over ref_rms in the goldens of quantized models),
 * which is 4.0 here: twice that. */
static void permuted_rows(void **state)
{
    (void)state;
    need_fast_model();
    static const int32_t ids[] = {7042, 260, 4528};
    static const double logits[] = {17.37, 14.89, 13.25}, tolerance = 2 * 0.036 * 4.0 + 0.02;
    struct probe probe = {.job = raw_job(model, "The capital of France is", 1)};
    probe.job->request.want_logprobs = true;
    probe.job->request.logprobs = 3;
    probe.job->request.on_event = probe_event;
    probe.job->request.user = &probe;
    ask(probe.job, engine);
    assert_int_equal(probe.n_top, 3);
    for (int i = 0; i < 3; i++) {
        double gap = (double)probe.top[0].logprob - (double)probe.top[i].logprob;
        assert_int_equal(probe.top[i].id, ids[i]);
        if (fabs(gap - (logits[0] - logits[i])) > tolerance)
            fail_msg("token %d: %.3f below the first instead of %.2f", ids[i], gap,
                     logits[0] - logits[i]);
    }
    ask_free(probe.job);

    struct job *job = ask(raw_job(model, counting, 8), engine);
    assert_int_equal(job->request.n_prompt, 41);
    assert_answer(job, 0, count_text, LINNET_FINISH_LENGTH);
    assert_tokens(&job->answers[0], count_ids, 8);
    ask_free(job);
    assert_alive();
}

/* ---- the cache --------------------------------------------------------------------------- */

/* A digit n times over is n tokens. */
static struct job *digits(char digit, int32_t n, int32_t max_tokens)
{
    char text[512];
    memset(text, digit, (size_t)n);
    text[n] = 0;
    struct job *job = raw_job(model, text, max_tokens);
    assert_int_equal(job->request.n_prompt, n);
    job->request.ignore_eos = true;
    return job;
}

static struct job *sevens(int32_t n, int32_t max_tokens)
{
    return digits('7', n, max_tokens);
}

static void assert_cached(const struct job *job, bool must)
{
    int32_t cached = job->answers[0].cached_tokens;
    if (cached < 0 || cached >= (int32_t)job->request.n_prompt || (must && cached == 0))
        fail_msg("%d of %zu prompt tokens from the cache", cached, job->request.n_prompt);
}

/* Three times in a row, then (if asked for) eight at once: always `expected`. */
static void repeat(linnet_engine *e, int32_t n, const struct job *expected, bool eight)
{
    struct job *jobs[8];
    for (int i = 0; i < 3; i++) {
        struct job *job = ask(sevens(n, 8), e);
        assert_same_answers(job, expected, n);
        assert_cached(job, i > 0 && n > 16);
        ask_free(job);
    }
    for (int i = 0; i < 8 && eight; i++) job_submit(jobs[i] = sevens(n, 8), e);
    for (int i = 0; i < 8 && eight; i++) {
        job_wait(jobs[i]);
        assert_same_answers(jobs[i], expected, n);
        assert_cached(jobs[i], n > 16);
        ask_free(jobs[i]);
    }
}

/* K01: prompts that end at, before and after the edge of a block, again and again. */
static void cached_prompts(void **state)
{
    (void)state;
    need_fast_model();
    static const int32_t lengths[] = {16, 32, 48, 64, 128, 256, 257};
    const int n_lengths = 7;
    struct job *cold[7][3], *at_once[8];
    linnet_engine *plain = open_engine(
        model, POOL, (linnet_engine_options){.max_model_len = CONTEXT, .no_prefix_caching = true});
    for (int i = 0; i < n_lengths; i++)
        for (int k = 0; k < 3; k++) job_submit(cold[i][k] = sevens(lengths[i] + k - 1, 8), plain);
    for (int i = 0; i < n_lengths; i++)
        for (int k = 0; k < 3; k++) {
            job_wait(cold[i][k]);
            assert_null(cold[i][k]->answers[0].fault);
            assert_int_equal(cold[i][k]->answers[0].finish, LINNET_FINISH_LENGTH);
            assert_int_equal(cold[i][k]->answers[0].cached_tokens, 0);
        }
    for (int i = 0; i < 2; i++) { /* without the cache: eight at once, and in a row */
        for (int k = 0; k < 8; k++) job_submit(at_once[k] = sevens(lengths[i], 8), plain);
        for (int k = 0; k < 8; k++) {
            job_wait(at_once[k]);
            assert_same_answers(at_once[k], cold[i][1], lengths[i]);
            ask_free(at_once[k]);
        }
        struct job *again = ask(sevens(lengths[i], 8), plain);
        assert_same_answers(again, cold[i][1], lengths[i]);
        ask_free(again);
    }
    linnet_engine_destroy(plain);

    for (int i = 0; i < n_lengths; i++) {
        repeat(engine, lengths[i], cold[i][1], true);
        repeat(engine, lengths[i] - 1, cold[i][0], false);
        repeat(engine, lengths[i] + 1, cold[i][2], false);
        for (int k = 0; k < 3; k++) ask_free(cold[i][k]);
    }
    for (int i = 0; i < 3; i++) {
        struct job *job = ask(raw_job(model, counting, 8), engine);
        assert_answer(job, 0, count_text, LINNET_FINISH_LENGTH);
        assert_cached(job, i > 0);
        ask_free(job);
    }
    assert_alive();
}

/* K01: the second turn of a chat stands on the blocks of the first. */
static void second_turn(void **state)
{
    (void)state;
    need_fast_model();
    static const char chat[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of Japan?\"},"
        "{\"role\": \"assistant\", \"content\": \"The capital of Japan is Tokyo.\"},"
        "{\"role\": \"user\", \"content\": \"And of France?\"}]}";
    int32_t *ids;
    size_t n;
    linnet_error err;
    assert_alive();
    assert_ok(linnet_chat_tokenize(model, chat, strlen(chat), NULL, NULL, &ids, &n, &err), err);
    linnet_engine *plain = open_engine(
        model, POOL, (linnet_engine_options){.max_model_len = CONTEXT, .no_prefix_caching = true});
    struct job *warm = job_new(ids, (int32_t)n, 16), *cold = job_new(ids, (int32_t)n, 16);
    ask(warm, engine);
    ask(cold, plain);
    assert_true(warm->answers[0].cached_tokens >= 32);
    assert_same_answers(warm, cold, 2);
    assert_non_null(strstr(strbuf_cstr(&warm->answers[0].text), "Paris"));
    job_free(warm);
    job_free(cold);
    linnet_free(ids);
    linnet_engine_destroy(plain);
}

/* One of the requests of K03. Two long ones that share nothing come first in each half, so that
 * they grow beside each other; every eighth is a seeded one with penalties. */
static struct job *crowd_job(int i)
{
    if (i % 16 < 2) return digits(i % 2 ? '8' : '7', 200, 100);
    if (i % 8 != 7) return i % 2 ? raw_job(model, counting, 8) : chat_job(model, japan, 30);
    struct job *job = raw_job(model, counting, 24);
    job->request.ignore_eos = true;
    job->request.sampling.temperature = 1.2f;
    job->request.sampling.presence_penalty = 0.5f;
    job->request.sampling.frequency_penalty = 0.3f;
    job->request.sampling.repetition_penalty = 1.1f;
    job->request.sampling.seed = (uint64_t)i;
    return job;
}

/* Its answer alone is known from a request before it. */
static bool is_repeat(int i)
{
    return i > 3 && i % 8 != 7;
}

static void run_crowd(const struct job *const *alone, int n, bool no_prefix_caching)
{
    struct job *jobs[32];
    linnet_engine *tight = open_engine(
        model, 28 * 16,
        (linnet_engine_options){.max_num_seqs = 8, .no_prefix_caching = no_prefix_caching});
    for (int i = 0; i < n; i++) {
        job_submit(jobs[i] = crowd_job(i), tight);
    }
    int64_t preemptions = 0;
    for (int i = 0; i < n; i++) {
        job_wait(jobs[i]);
        assert_same_answers(jobs[i], alone[i], i);
        preemptions += jobs[i]->answers[0].preemptions;
        if (i % 16 > 1 && i % 8 != 7)
            assert_answer(jobs[i], 0, i % 2 ? count_text : tokyo,
                          i % 2 ? LINNET_FINISH_LENGTH : LINNET_FINISH_STOP);
        ask_free(jobs[i]);
    }
    linnet_stats stats;
    linnet_engine_get_stats(tight, &stats);
    assert_int_equal(stats.n_preemptions, preemptions);
    assert_true(preemptions > 0);
    assert_at_rest(tight);
    linnet_engine_destroy(tight);
}

/* K03, S04: preempted requests give what they give alone, and no text twice; seeds and penalties
 * survive. */
static void preempted(void **state)
{
    (void)state;
    need_fast_model();
    const int n = 32;
    struct job *alone[32];
    for (int i = 0; i < n; i++)
        alone[i] = is_repeat(i) ? alone[i % 16 < 2 ? i % 2 : 2 + i % 2] : ask(crowd_job(i), engine);
    run_crowd((const struct job *const *)alone, n, false);
    run_crowd((const struct job *const *)alone, n, true);
    for (int i = 0; i < n; i++)
        if (!is_repeat(i)) ask_free(alone[i]);
}

/* ---- several answers, limits ------------------------------------------------------------- */

static void cancel_at_third(void *user, const linnet_event *event)
{
    struct job *job = user;
    if (event->completion_tokens == 3) linnet_engine_cancel(job->engine, event->request);
    job_event(user, event);
}

/* K07: each answer ends once, the prompt is counted and freed once. */
static void several_answers(void **state)
{
    (void)state;
    need_fast_model();
    struct job *job = chat_job(model, japan, 0);
    job->request.n = 4;
    ask(job, engine);
    for (int i = 0; i < 4; i++) {
        assert_answer(job, i, tokyo, LINNET_FINISH_STOP);
        assert_tokens(&job->answers[i], tokyo_ids, 8);
    }
    assert_int_equal(job->n_finished, 4);
    assert_at_rest(engine);

    struct job *again = chat_job(model, japan, 12);
    again->request.n = 4;
    again->request.sampling.temperature = 1.5f;
    again->request.sampling.seed = 1;
    job_reset(job);
    job->request.sampling = again->request.sampling;
    job->request.max_tokens = 12;
    assert_same_answers(ask(job, engine), ask(again, engine), 1);
    int n_different = 0;
    for (int i = 1; i < 4; i++)
        n_different +=
            strcmp(strbuf_cstr(&job->answers[0].text), strbuf_cstr(&job->answers[i].text)) != 0;
    assert_true(n_different > 0);
    ask_free(again);

    job_reset(job); /* 0 means 1 */
    job->request.n = 0;
    job->request.sampling = greedy();
    job_submit(job, engine);
    job->request.n = 1;
    job_wait(job);
    assert_answer(job, 0, tokyo, LINNET_FINISH_STOP);
    assert_at_rest(engine);
    assert_int_equal(job->n_finished, 1);
    static const int32_t absurd[] = {-1, 129, 100000, INT32_MAX};
    for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++) {
        job->request.n = absurd[i];
        assert_refused(engine, &job->request, LINNET_INVALID, "n must be between");
    }

    job_reset(job);
    job->request.n = 2;
    job->request.max_tokens = 200;
    job->request.ignore_eos = true;
    job->request.on_event = cancel_at_third;
    ask(job, engine);
    for (int i = 0; i < 2; i++) {
        assert_null(job->answers[i].fault);
        assert_int_equal(job->answers[i].finish, LINNET_FINISH_CANCELLED);
        assert_in_range(job->answers[i].n_tokens, 2, 5);
    }
    ask_free(job);
    assert_alive();
}

/* A prompt longer than the context, or than a small pool can ever hold, is refused with both
 * numbers and never cut. */
static void too_long(void **state)
{
    (void)state;
    need_fast_model();
    static int32_t prompt[CONTEXT + 1];
    struct job *job = job_new(prompt, CONTEXT, 1);
    assert_refused(engine, &job->request, LINNET_TOO_LONG, "1024 tokens");
    job->request.n_prompt = CONTEXT + 1;
    assert_refused(engine, &job->request, LINNET_TOO_LONG, "1025 tokens");
    assert_refused(engine, &job->request, LINNET_TOO_LONG, "holds 1024");

    linnet_engine *tight = open_engine(model, 4 * 16, (linnet_engine_options){0});
    job->request.n_prompt = 65;
    assert_refused(tight, &job->request, LINNET_TOO_LONG, "65 tokens");
    assert_refused(tight, &job->request, LINNET_TOO_LONG, "64");
    job->request.n_prompt = 60;
    job->request.ignore_eos = true;
    job->request.max_tokens = 100; /* the context is full before that */
    ask(job, tight);
    assert_int_equal(job->answers[0].finish, LINNET_FINISH_LENGTH);
    assert_int_equal(job->answers[0].n_tokens, 4);
    assert_at_rest(tight);
    job_free(job);
    linnet_engine_destroy(tight);
    assert_alive();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stop_texts),      cmocka_unit_test(end_tokens),
        cmocka_unit_test(unspellable),     cmocka_unit_test(typed_control_tokens),
        cmocka_unit_test(logit_bias),      cmocka_unit_test(seeds),
        cmocka_unit_test(permuted_rows),   cmocka_unit_test(cached_prompts),
        cmocka_unit_test(second_turn),     cmocka_unit_test(preempted),
        cmocka_unit_test(several_answers), cmocka_unit_test(too_long),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
