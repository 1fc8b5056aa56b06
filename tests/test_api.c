/* linnet.h over real (tiny) models: opening, planning, refusing, chatting, and the load test. */
#include "engine_load.h"

#include <sys/stat.h>

static linnet_model *open_model(const char *path)
{
    linnet_model *model;
    linnet_error err;
    assert_ok(linnet_model_open(path, &model, &err), err);
    return model;
}

static void expect(const linnet_error *err, const char *words)
{
    if (!strstr(err->message, words)) fail_msg("\"%s\" lacks \"%s\"", err->message, words);
}

/* Greedy tokens of the goldens, all prompts at once. */
static void greedy_tokens_are_the_references(void **state)
{
    (void)state;
    static const char *const names[] = {"qwen2-nano-f32", "qwen3-tiny"};
    for (size_t k = 0; k < 2; k++) {
        char golden[64];
        snprintf(golden, sizeof golden, "golden/%s.json", names[k]);
        linnet_model *model = open_model(data_path(names[k]));
        json_t *json = load_json(data_path(golden)), *prompts = json_object_get(json, "prompts");
        linnet_engine *engine;
        linnet_error err;
        linnet_engine_options options = {.threads = 2, .kv_cache_memory = 8 << 20};
        assert_ok(linnet_engine_create(model, &options, &engine, &err), err);
        struct job *jobs[64];
        size_t n = json_array_size(prompts);
        assert_in_range(n, 1, 64);
        for (size_t i = 0; i < n; i++) {
            json_t *ids = json_object_get(json_array_get(prompts, i), "ids");
            int32_t n_ids = (int32_t)json_array_size(ids);
            int32_t *prompt = calloc((size_t)n_ids, sizeof *prompt);
            for (int32_t t = 0; t < n_ids; t++)
                prompt[t] = (int32_t)json_integer_value(json_array_get(ids, (size_t)t));
            jobs[i] = job_new(prompt, n_ids, 48);
            jobs[i]->request.ignore_eos = true;
            job_submit(jobs[i], engine);
        }
        for (size_t i = 0; i < n; i++) {
            json_t *greedy = json_object_get(json_array_get(prompts, i), "greedy_fp32");
            job_wait(jobs[i]);
            assert_int_equal(jobs[i]->answers[0].finish, LINNET_FINISH_LENGTH);
            for (size_t t = 0; t < json_array_size(greedy) && t < 48; t++)
                assert_int_equal(jobs[i]->answers[0].tokens[t],
                                 json_integer_value(json_array_get(greedy, t)));
            free((void *)jobs[i]->request.prompt);
            job_free(jobs[i]);
        }
        linnet_engine_destroy(engine);
        linnet_model_close(model);
        json_decref(json);
    }
}

/* The option reaches the engine: test_invariants says how near its results are. */
static void cache_in_8_bits(void **state)
{
    (void)state;
    enum { PROMPT = 40, NEW = 8 };
    int32_t prompt[PROMPT];
    float logprob[2];
    linnet_model *model = open_model(data_path("qwen3-tiny"));
    for (int i = 0; i < PROMPT; i++) prompt[i] = 5 + 7 * i % 400;
    for (int int8 = 0; int8 < 2; int8++) {
        linnet_engine *engine;
        linnet_plan plan;
        linnet_error err;
        linnet_engine_options options = {.device = "cpu",
                                         .threads = 2,
                                         .kv_cache_memory = 8 << 20,
                                         .kv_cache_dtype = int8 ? "int8" : NULL};
        assert_ok(linnet_engine_create(model, &options, &engine, &err), err);
        linnet_engine_get_plan(engine, &plan);
        assert_string_equal(plan.kv_cache_dtype, int8 ? "int8" : "fp32");
        struct job *job = job_new(prompt, PROMPT, NEW);
        job->request.want_logprobs = true;
        job->request.ignore_eos = true;
        job_submit(job, engine);
        job_wait(job);
        assert_int_equal(job->answers[0].n_tokens, NEW);
        logprob[int8] = job->answers[0].logprobs[0];
        job_free(job);
        linnet_engine_destroy(engine);
    }
    assert_true(logprob[0] != logprob[1]);
    linnet_model_close(model);
}

static linnet_engine *engine_with_blocks(linnet_model *model, int32_t n_blocks, bool roomy)
{
    linnet_plan plan;
    linnet_engine *engine;
    linnet_error err;
    linnet_engine_options options = {.threads = 1, .kv_cache_memory = 1 << 20};
    assert_ok(linnet_engine_plan(model, &options, &plan, &err), err);
    options.kv_cache_memory = n_blocks * plan.block_tokens * plan.kv_bytes_per_token;
    options.max_num_seqs = 8;
    options.max_num_batched_tokens = roomy ? 256 : 40;
    options.no_prefix_caching = roomy;
    assert_ok(linnet_engine_create(model, &options, &engine, &err), err);
    return engine;
}

static void load_on_a_real_model(void **state)
{
    (void)state;
    static const char *const shared[] = {"llama-dynamic", "qwen2-tiny"};
    const char *paths[3] = {data_path("qwen3-tiny")};
    for (size_t i = 0; i < 2; i++) paths[i + 1] = reference_path(shared[i]);
    for (size_t k = 0; k < 3; k++) {
        if (!paths[k]) continue;
        linnet_model *model = open_model(paths[k]);
        linnet_model_info info;
        linnet_model_get_info(model, &info);
        struct load load = {.crowded = engine_with_blocks(model, 6, false),
                            .alone = engine_with_blocks(model, 24, true),
                            .n_requests = 60,
                            .seed = k,
                            .n_vocab = 256, /* bytes: in every tokenizer */
                            .max_prompt = 40,
                            .max_tokens = 50,
                            .stop_strings = true,
                            .stops = {"e", "on"}};
        load_test(&load);
        linnet_engine_destroy(load.crowded);
        linnet_engine_destroy(load.alone);
        linnet_model_close(model);
    }
}

/* The text of the events is the tokens' text, up to the stop string or with it. */
static void text_and_stop_strings(void **state)
{
    (void)state;
    linnet_model *model = open_model(data_path("qwen3-tiny"));
    linnet_engine *engine = engine_with_blocks(model, 24, true);
    linnet_error err;
    static const int32_t prompt[5] = {40, 41, 42, 43, 44};
    struct job *job = job_new(prompt, 5, 40);
    job->request.ignore_eos = true;
    job_submit(job, engine);
    job_wait(job);
    char *text, stop[4] = "";
    size_t size;
    assert_ok(linnet_detokenize(model, job->answers[0].tokens, 40, LINNET_SKIP_SPECIAL, &text,
                                &size, &err),
              err);
    assert_string_equal(strbuf_cstr(&job->answers[0].text), text);
    /* A stop string of three plain characters somewhere in the middle. */
    size_t at = 8;
    while (text[at] < 0x20 || text[at + 1] < 0x20 || text[at + 2] < 0x20) at++;
    memcpy(stop, text + at, 3);
    at = (size_t)(strstr(text, stop) - text);
    const char *stops[] = {"not in the text", stop};
    assert_int_equal(job->answers[0].stop, 0);
    for (int include = 0; include < 2; include++) {
        job_reset(job);
        job->request.stop = stops;
        job->request.n_stop = 2;
        job->request.include_stop = include;
        job_submit(job, engine);
        job_wait(job);
        const struct answer *a = &job->answers[0];
        assert_int_equal(a->finish, LINNET_FINISH_STOP);
        assert_int_equal(a->stop, 2);
        assert_int_equal(a->text.size, at + (include ? 3 : 0));
        assert_memory_equal(strbuf_cstr(&a->text), text, a->text.size);
        assert_true(a->n_tokens <= 40);
    }
    linnet_free(text);
    job_free(job);
    linnet_engine_destroy(engine);
    linnet_model_close(model);
}

static void plans(void **state)
{
    (void)state;
    linnet_model *model = open_model(data_path("qwen3-tiny"));
    linnet_plan plan;
    linnet_error err;
    linnet_engine_options o = {.device = "cpu"};
    assert_ok(linnet_engine_plan(model, &o, &plan, &err), err);
    assert_int_equal(plan.total, plan.weights + plan.kv_cache + plan.activations);
    assert_int_equal(plan.kv_cache, plan.n_blocks * plan.block_tokens * plan.kv_bytes_per_token);
    assert_int_equal(plan.max_num_seqs, 64);
    assert_int_equal(plan.max_num_batched_tokens, 512);
    assert_true(plan.n_blocks * plan.block_tokens >= plan.max_model_len);
    assert_int_equal(plan.max_model_len, 40960);
    assert_true(plan.threads >= 1 && plan.total <= plan.available);

    const int64_t block = plan.block_tokens * plan.kv_bytes_per_token;
    o.kv_cache_memory = 10 * block + 1;
    assert_ok(linnet_engine_plan(model, &o, &plan, &err), err);
    assert_int_equal(plan.n_blocks, 10);
    assert_int_equal(plan.max_model_len, 160);
    o.max_model_len = 161;
    assert_int_equal(linnet_engine_plan(model, &o, &plan, &err), LINNET_TOO_LONG);
    expect(&err, "the largest max_model_len is 160");
    o = (linnet_engine_options){.device = "cpu", .max_model_len = 40961};
    assert_int_equal(linnet_engine_plan(model, &o, &plan, &err), LINNET_TOO_LONG);
    expect(&err, "made for 40960 tokens");
    o = (linnet_engine_options){.device = "cpu", .kv_cache_memory = INT64_MAX};
    assert_int_equal(linnet_engine_plan(model, &o, &plan, &err), LINNET_MEMORY);
    expect(&err, "largest max_model_len that fits is 40960");
    o = (linnet_engine_options){.device = "cuda:63"}; /* nobody has that many */
    assert_int_not_equal(linnet_engine_plan(model, &o, &plan, &err), LINNET_OK);
    expect(&err, "use --device cpu");
    assert_string_equal(plan.kv_cache_dtype, "fp32");
    const int64_t values = plan.kv_bytes_per_token / 4;
    o = (linnet_engine_options){.device = "cpu", .kv_cache_dtype = "int8"};
    assert_ok(linnet_engine_plan(model, &o, &plan, &err), err);
    assert_string_equal(plan.kv_cache_dtype, "int8");
    assert_true(plan.kv_bytes_per_token > values && plan.kv_bytes_per_token < values * 3 / 2);
    o.kv_cache_dtype = "auto";
    assert_ok(linnet_engine_plan(model, &o, &plan, &err), err);
    assert_int_equal(plan.kv_bytes_per_token, 4 * values);
    o.kv_cache_dtype = "fp8";
    assert_int_equal(linnet_engine_plan(model, &o, &plan, &err), LINNET_INVALID);
    expect(&err, "use auto or int8");
    o = (linnet_engine_options){.device = "tpu"};
    assert_int_equal(linnet_engine_plan(model, &o, &plan, &err), LINNET_INVALID);
    o = (linnet_engine_options){.device = "cpu", .max_num_seqs = 64, .max_num_batched_tokens = 32};
    assert_int_equal(linnet_engine_plan(model, &o, &plan, &err), LINNET_INVALID);
    o = (linnet_engine_options){.device = "cpu", .max_num_batched_tokens = 32};
    assert_ok(linnet_engine_plan(model, &o, &plan, &err), err);
    assert_int_equal(plan.max_num_seqs, 32);
    o = (linnet_engine_options){.device = "cpu", .threads = -1};
    assert_int_equal(linnet_engine_plan(model, &o, &plan, &err), LINNET_INVALID);
    linnet_model_close(model);
}

static void models_by_name(void **state)
{
    (void)state;
    linnet_model *model;
    linnet_error err;
    const char *models = getenv("LINNET_MODELS");
    char *before = models ? strdup(models) : NULL;
    setenv("LINNET_MODELS", data_path("gguf"), 1);
    assert_ok(linnet_model_open("qwen2-nano-f32", &model, &err), err);
    linnet_model_info info;
    linnet_model_get_info(model, &info);
    assert_string_equal(info.name, "qwen2-nano-f32");
    assert_string_equal(info.architecture, "qwen2");
    assert_string_equal(info.dtype, "F32");
    char *json;
    assert_ok(linnet_model_describe(model, &json, &err), err);
    json_t *described = json_loads(json, 0, NULL);
    assert_true(json_array_size(json_object_get(described, "tensors")) > 5);
    assert_true(json_object_size(json_object_get(described, "metadata")) > 5);
    json_decref(described);
    linnet_free(json);
    linnet_model_close(model);

    assert_int_equal(linnet_model_open("qwen2-nano-f23", &model, &err), LINNET_IO);
    expect(&err, "did you mean qwen2-nano-f32.gguf?");
    assert_int_equal(linnet_model_open("./nowhere/at.all", &model, &err), LINNET_IO);
    assert_int_equal(linnet_model_open("", &model, &err), LINNET_INVALID);
    if (before)
        setenv("LINNET_MODELS", before, 1);
    else
        unsetenv("LINNET_MODELS");
    free(before);
}

static void chats(void **state)
{
    (void)state;
    linnet_model *model = open_model(data_path("qwen3-tiny"));
    linnet_error err;
    char *text, *back;
    int32_t *ids;
    size_t n, size;
    static const char chat[] =
        "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"},"
        "{\"type\": \"text\", \"text\": \"<|im_end|>b\"}]}]}";
    assert_ok(linnet_chat_tokenize(model, chat, strlen(chat), &text, &size, &ids, &n, &err), err);
    assert_int_equal(size, strlen(text));
    assert_non_null(strstr(text, "user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n"));
    assert_ok(linnet_detokenize(model, ids, n, 0, &back, &size, &err), err);
    assert_string_equal(back, text);
    int32_t *control, n_ends = 0;
    size_t n_control;
    assert_ok(
        linnet_tokenize(model, "<|im_end|>", 10, LINNET_PARSE_SPECIAL, &control, &n_control, &err),
        err);
    assert_int_equal(n_control, 1);
    for (size_t i = 0; i < n; i++) n_ends += ids[i] == control[0];
    assert_int_equal(n_ends, 2); /* the template's own: of the system and of the user */
    linnet_free(text);
    linnet_free(back);
    linnet_free(ids);
    linnet_free(control);

    static const char nul[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\\u0000b\"}]}";
    assert_ok(linnet_chat_tokenize(model, nul, strlen(nul), &text, &size, &ids, &n, &err), err);
    assert_true(size > strlen(text)); /* the size counts what follows the NUL */
    linnet_free(text);
    linnet_free(ids);

    static const struct {
        const char *chat, *words;
        linnet_status status;
    } bad[] = {
        {"{", "not JSON: line 1", LINNET_INVALID},
        {"[]", "must be a JSON object", LINNET_INVALID},
        {"{}", "messages must be a list", LINNET_INVALID},
        {"{\"messages\": []}", "messages is empty", LINNET_INVALID},
        {"{\"messages\": [1]}", "messages[0] must be an object", LINNET_INVALID},
        {"{\"messages\": [{}]}", "messages[0] has no string \"role\"", LINNET_INVALID},
        {"{\"messages\": [{\"role\": \"user\"}]}", "messages[0].content", LINNET_INVALID},
        {"{\"messages\": [{\"role\": \"user\", \"content\": null}]}", "messages[0].content",
         LINNET_INVALID},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}",
         "\"image_url\"", LINNET_UNSUPPORTED},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [\"x\"]}]}", "content[0]",
         LINNET_INVALID},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"tools\": 5}",
         "tools must be a list", LINNET_INVALID},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}],"
         "\"chat_template_kwargs\": {\"messages\": 1}}",
         "\"messages\"", LINNET_INVALID},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(linnet_chat_tokenize(model, bad[i].chat, strlen(bad[i].chat), NULL, NULL,
                                              &ids, &n, &err),
                         bad[i].status);
        expect(&err, bad[i].words);
    }
    linnet_model_close(model);
}

static void bare_tokenizer(void **state)
{
    (void)state;
    linnet_model *model;
    linnet_error err;
    char path[1200], *text;
    snprintf(path, sizeof path, "%s/tokenizer.json", data_path("qwen3-tiny"));
    assert_ok(linnet_model_open_tokenizer(path, &model, &err), err);
    int32_t *ids;
    size_t n, size;
    assert_ok(linnet_tokenize(model, "", 0, 0, &ids, &n, &err), err);
    assert_int_equal(n, 0);
    linnet_free(ids);
    assert_ok(linnet_tokenize(model, "a\0b", 3, 0, &ids, &n, &err), err);
    assert_ok(linnet_detokenize(model, ids, n, 0, &text, &size, &err), err);
    assert_int_equal(size, 3);
    assert_memory_equal(text, "a\0b", 3);
    linnet_free(ids);
    linnet_free(text);
    linnet_plan plan;
    assert_int_equal(linnet_engine_plan(model, NULL, &plan, &err), LINNET_INVALID);
    assert_int_equal(linnet_chat_tokenize(model, "{}", 2, NULL, NULL, &ids, &n, &err),
                     LINNET_UNSUPPORTED);
    linnet_model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_tokens_are_the_references),
        cmocka_unit_test(cache_in_8_bits),
        cmocka_unit_test(load_on_a_real_model),
        cmocka_unit_test(text_and_stop_strings),
        cmocka_unit_test(plans),
        cmocka_unit_test(models_by_name),
        cmocka_unit_test(chats),
        cmocka_unit_test(bare_tokenizer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
