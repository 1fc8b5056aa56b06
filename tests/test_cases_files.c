/*
 * Bugs that other engines had in loading: broken files, tensors that are missing or too many,
 * broken weights. Each test names its case in ../shared/cases/README.md.
 */
#include "cases.h"
#include "tensor_files.h"

#include <math.h>
#include <sys/wait.h>

#include "file/checkpoint.h"
#include "ops/cpu/kernels.h"

/* Opens a model and loads it into an engine, all of which must fail with these words. */
static void assert_never_runs(const char *path, const char *words)
{
    linnet_model *model;
    linnet_engine *engine;
    linnet_error err = {0};
    linnet_status status = linnet_model_open(path, &model, &err);
    if (!status) {
        status = linnet_engine_create(model, &(linnet_engine_options){.kv_cache_memory = 1 << 20},
                                      &engine, &err);
        if (!status) fail_msg("%s: runs, although it should be refused for \"%s\"", path, words);
        linnet_model_close(model);
    }
    if (!strstr(err.message, words)) fail_msg("\"%s\" lacks \"%s\"", err.message, words);
}

/* ---- L02, L04, L06: broken files ----------------------------------------------------------- */

static int64_t peak_kilobytes(void)
{
    char line[256];
    long long kilobytes = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f)) sscanf(line, "VmHWM: %lld", &kilobytes);
    if (f) fclose(f);
    return kilobytes;
}

enum verdict { REFUSED, OPENED, NO_MESSAGE, ODD_STATUS, TOO_SLOW, TOO_LARGE };

static enum verdict try_to_load(const char *path)
{
    linnet_model *model;
    linnet_engine *engine;
    linnet_error err = {0};
    int64_t before = peak_kilobytes();
    linnet_status status = linnet_model_open(path, &model, &err);
    if (!status) {
        status = linnet_engine_create(model, NULL, &engine, &err);
        if (!status) return OPENED;
        linnet_model_close(model);
    }
    int64_t grown = peak_kilobytes() - before;
    if (!err.message[0] || strchr(err.message, '\n')) return NO_MESSAGE;
    if (err.status != status || status == LINNET_INTERNAL || status == LINNET_MEMORY)
        return ODD_STATUS;
    if (cpu_seconds() > 1) return TOO_SLOW;
    return grown > 100 * 1024 ? TOO_LARGE : REFUSED;
}

/* In a process of its own: no signal, no exit, little time, little memory. */
static void assert_refused_file(const char *path)
{
    static const char *const faults[] = {"", "opened", "no message", "odd status", "slow", "large"};
    int status;
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) _exit((int)try_to_load(path));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status)) fail_msg("%s: signal %d", path, WTERMSIG(status));
    int code = WEXITSTATUS(status);
    if (code) fail_msg("%s: %s", path, code <= TOO_LARGE ? faults[code] : "ended the process");
}

/* Every file of the set: a GGUF or directory as it is, safetensors also as a model's weights (the
 * good ones hold the wrong tensors, so they are refused too). */
static void broken_files(void **state)
{
    (void)state;
    char *directory = strdup(scratch_create());
    DIR *d = opendir(data_path("files"));
    assert_non_null(d);
    int n = 0;
    for (struct dirent *e; (e = readdir(d)); n++) {
        if (e->d_name[0] == '.') continue;
        const char *path = scratch_path(data_path("files"), e->d_name);
        assert_refused_file(path);
        if (!strstr(e->d_name, ".safetensors")) continue;
        scratch_copy_all(directory, data_path("qwen2-nano-f32"));
        scratch_copy(directory, "model.safetensors", path);
        assert_refused_file(directory);
    }
    assert_true(n > 35);
    closedir(d);
    scratch_remove(directory);
    free(directory);
}

/* L06: half a download, with all else in place: the message names the file that is missing, or the
 * tensor that is elsewhere; what the index does not name does not matter. */
static void shards(void **state)
{
    (void)state;
    const char *whole = reference_path("llama-tiny");
    if (!whole) {
        print_message("../shared/reference is absent\n");
        skip();
    }
    char *directory = strdup(scratch_create());
    static const char second[] = "model-00002-of-00002.safetensors";
    scratch_copy_all(directory, whole);
    scratch_text(directory, "stray.safetensors", "never looked at");
    linnet_model *model = open_model(directory);
    linnet_engine_destroy(open_engine(model, 64, (linnet_engine_options){.threads = 1}));
    linnet_model_close(model);
    remove(scratch_path(directory, second));
    assert_never_runs(directory, second);
    scratch_copy(directory, second, scratch_path(whole, "model-00001-of-00002.safetensors"));
    assert_never_runs(directory, "tensor ");
    size_t size;
    char *bytes = load_file(scratch_path(whole, second), &size);
    scratch_write(directory, second, bytes, size / 2);
    free(bytes);
    assert_never_runs(directory, second);
    scratch_remove(directory);
    free(directory);
}

/* L04: limits do not make a real vocabulary slow. */
static void real_model_opens_fast(void **state)
{
    (void)state;
    const char *path = smollm2_path();
    if (!path) path = data_path("gguf/qwen2-nano-f32.gguf");
    double begin = cpu_seconds();
    linnet_model_close(open_model(path));
    assert_true(cpu_seconds() - begin < (SLOW_BUILD ? 5 : 1));
}

/* ---- N03: tensors that may or may not be there --------------------------------------------- */

/* Greedy tokens after a fixed prompt. */
static void first_tokens(const char *path, int32_t tokens[16])
{
    static const int32_t prompt[] = {10, 20, 30, 40, 50};
    linnet_model *model = open_model(path);
    linnet_engine *engine = open_engine(model, 256, (linnet_engine_options){.threads = 1});
    struct job *job = job_new(prompt, 5, 16);
    job->request.ignore_eos = true;
    ask(job, engine);
    assert_int_equal(job->answers[0].n_tokens, 16);
    memcpy(tokens, job->answers[0].tokens, 16 * sizeof *tokens);
    job_free(job);
    linnet_engine_destroy(engine);
    linnet_model_close(model);
}

/* Each tensor deleted, biases and norms among them: the load fails naming it. One too many too. */
static void every_tensor_counts(void **state)
{
    (void)state;
    static const struct {
        const char *model, *needed, *extra, *original;
        size_t n_tensors;
    } models[] = {
        {"qwen2-nano-f32", "model.layers.1.self_attn.k_proj.bias",
         "model.layers.1.self_attn.o_proj.bias", "model.norm.weight", 26},
        {"qwen3-tiny", "model.layers.1.self_attn.q_norm.weight",
         "model.layers.0.self_attn.q_proj.bias", "model.norm.weight", 24},
    };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char *directory = strdup(scratch_create());
        scratch_copy_all(directory, data_path(models[i].model));
        char *path = strdup(scratch_path(directory, "model.safetensors"));
        struct tensors t = read_tensors(path);
        const char *name;
        json_t *entry;
        assert_int_equal(json_object_size(t.header), models[i].n_tensors);
        assert_non_null(json_object_get(t.header, models[i].needed));
        json_object_foreach(t.header, name, entry)
        {
            write_tensors(&t, path, name, NULL, NULL);
            assert_never_runs(directory, name);
        }
        write_tensors(&t, path, NULL, models[i].extra, models[i].original);
        assert_never_runs(directory, models[i].extra);
        write_tensors(&t, path, NULL, "model.layers.2.mlp.up_proj.weight",
                      "model.layers.1.mlp.up_proj.weight");
        assert_never_runs(directory, "model.layers.2.mlp.up_proj.weight");
        write_tensors(&t, path, models[i].needed, models[i].needed, models[i].original);
        assert_never_runs(directory, models[i].needed);
        json_decref(t.header);
        free(t.bytes);
        free(path);
        scratch_remove(directory);
        free(directory);
    }
}

/* A model says whether its output matrix is the embedding; attention_bias asks for biases where the
 * architecture has none of its own. */
static void tied_or_not(void **state)
{
    (void)state;
    int32_t tied[16], untied[16];
    char *directory = strdup(scratch_create());
    scratch_copy_all(directory, data_path("qwen2-nano-f32"));
    char *path = strdup(scratch_path(directory, "model.safetensors"));
    struct tensors t = read_tensors(path);
    first_tokens(directory, tied);
    set_config(directory, "tie_word_embeddings", json_false());
    assert_never_runs(directory, "lm_head.weight");
    write_tensors(&t, path, NULL, "lm_head.weight", "model.embed_tokens.weight");
    first_tokens(directory, untied);
    assert_memory_equal(untied, tied, sizeof tied);
    set_config(directory, "tie_word_embeddings", json_true());
    first_tokens(directory, untied); /* a copy of what is tied is allowed */
    assert_memory_equal(untied, tied, sizeof tied);
    json_decref(t.header);
    free(t.bytes);
    free(path);

    scratch_copy_all(directory, data_path("qwen3-tiny"));
    set_config(directory, "attention_bias", json_true());
    assert_never_runs(directory, "bias");
    scratch_remove(directory);
    free(directory);
}

/* ---- N01: the same weights in both forms ---------------------------------------------------- */

struct pair {
    const char *directory, *gguf;
};

static void answer_all(const char *path, struct job **jobs, int n)
{
    linnet_model *model = open_model(path);
    linnet_engine *engine = open_engine(model, 4096, (linnet_engine_options){.threads = 1});
    for (int i = 0; i < n; i++) ask(jobs[i], engine);
    linnet_engine_destroy(engine);
    linnet_model_close(model);
}

/* Kernels that do not round activations to bf16: that makes much of RoPE factors' last bits, which
 * differ between the forms. */
static void force_fp32_activations(void)
{
    int i = 0;
    while (kernels_usable(i)->bf16_dots) i++;
    assert_true(ops_cpu_force(kernels_usable(i)->name));
}

/* N01: query and key rows of a Llama GGUF are permuted, Qwen's are not; from a directory and from a
 * GGUF file the same distributions come. */
static void both_forms(void **state)
{
    (void)state;
    force_fp32_activations();
    const struct pair pairs[] = {
        {data_path("qwen2-nano-f32"), data_path("gguf/qwen2-nano-f32.gguf")},
        {reference_path("llama-tiny"), reference_path("gguf/llama-tiny-bf16.gguf")},
        {reference_path("qwen2-nano-f16"), reference_path("gguf/qwen2-nano-f16.gguf")}};
    static int32_t prompt[130];
    static const int32_t lengths[] = {1, 17, 40, 130};
    for (int32_t t = 0; t < 130; t++) prompt[t] = (int32_t)(random_u64(3, (uint64_t)t, 0) % 250);
    for (size_t k = 0; k < 3; k++) {
        struct job *jobs[2][4];
        if (!pairs[k].directory || !pairs[k].gguf) continue;
        for (int i = 0; i < 8; i++) {
            struct job *job = jobs[i / 4][i % 4] = job_new(prompt, lengths[i % 4], 16);
            job->request.ignore_eos = job->request.want_logprobs = true;
            job->request.logprobs = 1;
        }
        answer_all(pairs[k].directory, jobs[0], 4);
        answer_all(pairs[k].gguf, jobs[1], 4);
        for (int i = 0; i < 4; i++) {
            const struct answer *a = &jobs[0][i]->answers[0], *b = &jobs[1][i]->answers[0];
            assert_tokens(b, a->tokens, a->n_tokens);
            for (int32_t t = 0; t < 2 * a->n_tokens; t++)
                if (fabsf(a->logprobs[t] - b->logprobs[t]) > 1e-4f)
                    fail_msg("%s: log-probability %g, GGUF %g", pairs[k].directory,
                             (double)a->logprobs[t], (double)b->logprobs[t]);
        }
        for (int i = 0; i < 8; i++) job_free(jobs[i / 4][i % 4]);
    }
    ops_cpu_force(NULL);
}

/* ---- S06: broken weights -------------------------------------------------------------------- */

/* Either the load is refused, or every answer ends with an error before its first token. */
static void assert_no_answer(const char *path)
{
    static const int32_t prompt[] = {10, 20, 30};
    linnet_model *model;
    linnet_engine *engine;
    linnet_error err;
    if (linnet_model_open(path, &model, &err)) return;
    linnet_engine_options options = {.kv_cache_memory = 8 << 20, .max_model_len = 64};
    if (linnet_engine_create(model, &options, &engine, &err) == LINNET_OK) {
        for (int temperature = 0; temperature < 2; temperature++) {
            struct job *job = job_new(prompt, 3, 8);
            job->request.sampling.temperature = (float)temperature;
            struct answer *a = &ask(job, engine)->answers[0];
            assert_int_equal(a->finish, LINNET_FINISH_ERROR);
            assert_int_equal(a->error.status, LINNET_NUMERIC);
            assert_true(a->error.message[0] && a->n_tokens == 0 && a->text.size == 0);
            job_free(job);
        }
        assert_at_rest(engine);
        linnet_engine_destroy(engine);
    }
    linnet_model_close(model);
}

/* Where the data of model.norm.weight lies in the file, and its one weight replaced. */
static void break_norm(const char *from, const char *to, float value)
{
    struct checkpoint *cp;
    linnet_error err;
    size_t size;
    char *bytes = load_file(from, &size);
    assert_ok(checkpoint_open(from, &cp, &err), err);
    const struct tensor *norm = checkpoint_find(cp, "model.norm.weight");
    assert_true(norm && norm->dtype == DTYPE_F32);
    char *at = memmem(bytes, size, norm->data, norm->bytes);
    assert_non_null(at);
    memcpy(at + 4 * 7, &value, sizeof value);
    checkpoint_close(cp);
    FILE *f = fopen(to, "wb");
    assert_true(f && fwrite(bytes, 1, size, f) == size && fclose(f) == 0);
    free(bytes);
}

/* S06: n1_nan_norm and n2_inf_norm, of SmolLM2 where it is and of a tiny model. (That a healthy
 * request beside a broken one is untouched: nan_ends_only_its_own_request in test_engine.c.) */
static void broken_norm(void **state)
{
    (void)state;
    char *directory = strdup(scratch_create());
    char *path = strdup(scratch_path(directory, "broken.gguf"));
    const char *models[] = {data_path("gguf/qwen2-nano-f32.gguf"), smollm2_path()};
    for (int i = 0; i < 2 && models[i]; i++) {
        break_norm(models[i], path, NAN);
        assert_no_answer(path);
        break_norm(models[i], path, INFINITY);
        assert_no_answer(path);
    }
    scratch_remove(directory);
    free(path);
    free(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(broken_files),          cmocka_unit_test(shards),
        cmocka_unit_test(real_model_opens_fast), cmocka_unit_test(every_tensor_counts),
        cmocka_unit_test(tied_or_not),           cmocka_unit_test(both_forms),
        cmocka_unit_test(broken_norm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
