/*
 * The likelihood of a text: the library's scorer against the goldens, its promises and refusals;
 * `linnet perplexity` against sums over what the scorer gives for the same chunks.
 */
#include "golden.h"
#include "scratch.h"

#include <math.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "linnet.h"

static linnet_model *open_model(const char *path)
{
    linnet_model *model;
    linnet_error err;
    assert_ok(linnet_model_open(path, &model, &err), err);
    return model;
}

static linnet_scorer *scorer_on(linnet_model *model, int32_t threads, int32_t length)
{
    linnet_scorer *scorer;
    linnet_error err;
    linnet_engine_options options = {.device = "cpu", .threads = threads, .max_model_len = length};
    assert_ok(linnet_scorer_create(model, &options, &scorer, &err), err);
    return scorer;
}

static void score(linnet_scorer *scorer, const int32_t *ids, size_t n, size_t first, double *out)
{
    linnet_error err;
    assert_ok(linnet_score(scorer, ids, n, first, out, &err), err);
}

/* ---- the library --------------------------------------------------------------------------- */

static void check_golden(const char *model_path, const char *name, double mean_bound,
                         double token_bound)
{
    char path[200];
    linnet_model *model = open_model(model_path);
    linnet_scorer *scorer = scorer_on(model, 2, 300);
    snprintf(path, sizeof path, "golden/%s.json", name);
    json_t *golden = load_json(data_path(path)), *nll = json_object_get(golden, "nll");
    snprintf(path, sizeof path, "golden/%s.safetensors", name);
    struct arrays arrays = arrays_open(data_path(path));
    int32_t n;
    int32_t *ids = integers(json_object_get(nll, "ids"), 0, &n);
    assert_int_equal(n, 300);
    size_t count;
    const float *want = arrays_find(&arrays, "nll.per_token", sizeof(float), &count);
    assert_int_equal(count, n - 1);
    double got[300], sum = 0;
    score(scorer, ids, (size_t)n, 1, got);
    for (int32_t i = 0; i < n - 1; i++) {
        if (!(fabs(-got[i] - want[i]) <= token_bound))
            fail_msg("%s: token %d: %g, expected %g", name, i + 1, -got[i], want[i]);
        sum -= got[i];
    }
    double mean = sum / (n - 1), expected = number(nll, "mean_float64");
    if (!(fabs(mean - expected) <= mean_bound))
        fail_msg("%s: mean %.9f, expected %.9f", name, mean, expected);
    free(ids);
    arrays_close(&arrays);
    json_decref(golden);
    linnet_scorer_destroy(scorer);
    linnet_model_close(model);
}

/* The option reaches a scorer: test_invariants says how near its results are. */
static void cache_in_8_bits(void **state)
{
    (void)state;
    enum { N = 200 };
    int32_t ids[N];
    double got[2][N];
    linnet_model *model = open_model(data_path("qwen3-tiny"));
    for (int i = 0; i < N; i++) ids[i] = 5 + 7 * i % 400;
    for (int int8 = 0; int8 < 2; int8++) {
        linnet_scorer *scorer;
        linnet_error err;
        linnet_engine_options options = {.device = "cpu",
                                         .threads = 2,
                                         .max_model_len = N,
                                         .kv_cache_dtype = int8 ? "int8" : "auto"};
        assert_ok(linnet_scorer_create(model, &options, &scorer, &err), err);
        score(scorer, ids, N, 1, got[int8]);
        linnet_scorer_destroy(scorer);
    }
    assert_memory_not_equal(got[0], got[1], (N - 1) * sizeof **got);
    linnet_model_close(model);
}

/* fp32 weights and activations: within what separates fp32 from float64. */
static void goldens(void **state)
{
    (void)state;
    check_golden(data_path("qwen2-nano-f32"), "qwen2-nano-f32", 1e-5, 1e-4);
    check_golden(data_path("gguf/qwen2-nano-f32.gguf"), "qwen2-nano-f32", 1e-5, 1e-4);
}

/* Neither where scoring begins, nor threads, nor the room, nor what was scored before. */
static void depends_on_the_tokens_alone(void **state)
{
    (void)state;
    enum { N = 700, LATER = 600 }; /* more than a step, more rows than are held at once */
    static int32_t ids[N];
    static double all[N], tail[N];
    for (int32_t i = 0; i < N; i++) ids[i] = (i * 37 + i / 7) % 300;
    linnet_model *model = open_model(data_path("qwen2-nano-f32"));
    linnet_scorer *scorer = scorer_on(model, 1, N), *other = scorer_on(model, 3, 2 * N);
    score(scorer, ids, N, 1, all);
    score(other, ids + 3, 50, 20, tail);
    score(other, ids, N, LATER, tail);
    assert_memory_equal(tail, all + LATER - 1, (N - LATER) * sizeof *all);
    score(scorer, ids, LATER, LATER - 1, tail); /* later tokens say nothing about earlier ones */
    assert_memory_equal(tail, all + LATER - 2, sizeof *all);
    score(scorer, ids, 2, 1, tail);
    assert_memory_equal(tail, all, sizeof *all);
    linnet_scorer_destroy(other);
    linnet_scorer_destroy(scorer);
    linnet_model_close(model);
}

static void refused(linnet_scorer *scorer, size_t n, size_t first, int32_t id, linnet_status status,
                    const char *words)
{
    linnet_error err;
    int32_t ids[20] = {1, id, 2};
    double out[20];
    assert_int_equal(linnet_score(scorer, ids, n, first, out, &err), status);
    if (!strstr(err.message, words)) fail_msg("\"%s\" lacks \"%s\"", err.message, words);
}

static void refusals(void **state)
{
    (void)state;
    linnet_error err;
    linnet_model *model = open_model(data_path("qwen2-nano-f32"));
    linnet_scorer *scorer = scorer_on(model, 1, 16), *none;
    refused(scorer, 3, 0, 1, LINNET_INVALID, "from token 0 of 3");
    refused(scorer, 3, 3, 1, LINNET_INVALID, "from token 3 of 3");
    refused(scorer, 0, 1, 1, LINNET_INVALID, "of 0");
    refused(scorer, 17, 1, 1, LINNET_TOO_LONG, "at most 16");
    refused(scorer, 3, 1, 320, LINNET_INVALID, "token 1 to score is 320");
    refused(scorer, 3, 1, -1, LINNET_INVALID, "is -1");
    linnet_scorer_destroy(scorer);
    linnet_engine_options options = {.device = "cpu", .max_model_len = 32769};
    assert_int_equal(linnet_scorer_create(model, &options, &none, &err), LINNET_TOO_LONG);
    options.max_model_len = 1;
    assert_int_equal(linnet_scorer_create(model, &options, &none, &err), LINNET_INVALID);
    options.max_model_len = -5;
    assert_int_equal(linnet_scorer_create(model, &options, &none, &err), LINNET_INVALID);
    linnet_model_close(model);
    assert_ok(linnet_model_open_tokenizer(data_path("tokenizers/smol.json"), &model, &err), err);
    assert_int_equal(linnet_scorer_create(model, NULL, &none, &err), LINNET_INVALID);
    linnet_model_close(model);
    linnet_scorer_destroy(NULL);
}

/* ---- models with a difference -------------------------------------------------------------- */

static char folder[64];

/* A copy of the smallest model. */
static void copy_model(void)
{
    char command[2500];
    snprintf(command, sizeof command,
             "rm -rf '%s'; mkdir '%s' && cp '%s'/* '%s'/ && chmod u+w '%s'/*", folder, folder,
             data_path("qwen2-nano-f32"), folder, folder);
    assert_int_equal(system(command), 0);
}

static void edit(const char *file, void (*change)(json_t *json))
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    json_t *json = load_json(path);
    change(json);
    assert_int_equal(json_dump_file(json, path, 0), 0);
    json_decref(json);
}

static void add_bos(json_t *tokenizer)
{
    json_object_set_new(
        tokenizer, "post_processor",
        json_pack("{s:s,s:[{s:{s:s,s:i}},{s:{s:s,s:i}}],s:[],s:{s:{s:s,s:[i],s:[s]}}}", "type",
                  "TemplateProcessing", "single", "SpecialToken", "id", "<|endoftext|>", "type_id",
                  0, "Sequence", "id", "A", "type_id", 0, "pair", "special_tokens", "<|endoftext|>",
                  "id", "<|endoftext|>", "ids", 300, "tokens", "<|endoftext|>"));
}

static void shorten(json_t *config)
{
    json_object_set_new(config, "max_position_embeddings", json_integer(48));
}

static void damaged_model(void **state)
{
    (void)state;
    char path[128];
    const float nan = NAN;
    copy_model();
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    struct arrays arrays = arrays_open(path);
    size_t count;
    const char *norm = arrays_find(&arrays, "model.norm.weight", sizeof(float), &count);
    assert_non_null(norm);
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)(norm - arrays.bytes), SEEK_SET), 0);
    assert_int_equal(fwrite(&nan, sizeof nan, 1, f), 1);
    fclose(f);
    arrays_close(&arrays);
    linnet_model *model = open_model(folder);
    linnet_scorer *scorer = scorer_on(model, 1, 16);
    refused(scorer, 3, 2, 1, LINNET_NUMERIC, "after token 1 are not finite");
    linnet_scorer_destroy(scorer);
    linnet_model_close(model);
}

/* ---- the program --------------------------------------------------------------------------- */

static char output[1 << 14];

/* Runs `linnet perplexity ARGUMENTS`; both streams come out in `output`. */
static int perplexity(const char *arguments)
{
    char command[4096];
    snprintf(command, sizeof command, "%s/linnet perplexity %s 2>&1", LINNET_BINARY_DIR, arguments);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    output[fread(output, 1, sizeof output - 1, f)] = 0;
    int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void says(const char *arguments, int code, const char *words)
{
    int got = perplexity(arguments);
    if (got != code || !strstr(output, words))
        fail_msg("perplexity %s: code %d, expected %d and '%s': %s", arguments, got, code, words,
                 output);
}

static void same(const json_t *json, const char *key, double expected)
{
    double got = number(json, key);
    if (!(fabs(got - expected) <= 1e-9 * fabs(expected)))
        fail_msg("%s: %.12g, expected %.12g: %s", key, got, expected, output);
}

struct expected {
    size_t chunk, limit; /* limit 0: none */
    bool all;
    int32_t bos; /* -1: none */
};

/* What the program should say of a text, by other means. */
static void check_text(const char *path, const char *arguments, const char *text_path,
                       struct expected e)
{
    linnet_error err;
    linnet_model *model = open_model(path);
    linnet_scorer *scorer = scorer_on(model, 1, (int32_t)e.chunk);
    size_t size, n, scored = 0, read = 0, chunks = 0;
    char *text = load_file(text_path, &size);
    int32_t *ids;
    double *scores = calloc(e.chunk, sizeof *scores), sum = 0, squares = 0;
    assert_ok(linnet_tokenize(model, text, size, LINNET_ADD_SPECIAL, &ids, &n, &err), err);
    if (e.bos >= 0) assert_int_equal(ids[0], e.bos);
    if (e.limit) n = e.limit;
    for (size_t at = 0; at + (e.all ? 2 : e.chunk) <= n; at += e.chunk, chunks++) {
        size_t length = n - at < e.chunk ? n - at : e.chunk, first = e.all ? 1 : length / 2 + 1;
        if (e.bos >= 0) ids[at] = e.bos;
        score(scorer, ids + at, length, first, scores);
        for (size_t i = 0; i < length - first; i++) {
            sum -= scores[i];
            squares += scores[i] * scores[i];
        }
        scored += length - first;
        read += length;
    }
    assert_true(chunks > 1);
    double mean = sum / (double)scored,
           error = sqrt((squares / (double)scored - mean * mean) / ((double)scored - 1));
    if (perplexity(arguments) != 0) fail_msg("perplexity %s: %s", arguments, output);
    json_t *json = json_loads(output, 0, NULL);
    if (!json) fail_msg("not JSON: %s", output);
    same(json, "nll", mean);
    same(json, "perplexity", exp(mean));
    assert_true(fabs(number(json, "nll_error") - error) < 1e-9);
    assert_true(fabs(number(json, "perplexity_error") - error * exp(mean)) < 1e-6);
    same(json, "tokens_scored", (double)scored);
    same(json, "tokens_read", (double)read);
    same(json, "tokens", (double)n);
    same(json, "chunks", (double)chunks);
    same(json, "chunk_tokens", (double)e.chunk);
    assert_int_equal(e.bos < 0, json_is_null(json_object_get(json, "bos")));
    if (e.bos >= 0) same(json, "bos", e.bos);
    json_decref(json);
    free(scores);
    linnet_free(ids);
    free(text);
    linnet_scorer_destroy(scorer);
    linnet_model_close(model);
}

static void chunks_of_a_text(void **state)
{
    (void)state;
    char text[1200], model[1200], arguments[3000];
    snprintf(text, sizeof text, "%s", data_path("chat_template_qwen3_0_6b.jinja"));
    snprintf(model, sizeof model, "%s", data_path("qwen2-nano-f32"));
    snprintf(arguments, sizeof arguments, "--device cpu --json -m '%s' '%s'", model, text);
    check_text(model, arguments, text, (struct expected){512, 0, false, -1});
    snprintf(arguments, sizeof arguments, "--device cpu --json -m '%s' -c 65 -n 200 -f '%s'", model,
             text);
    check_text(model, arguments, text, (struct expected){65, 200, false, -1});
    snprintf(arguments, sizeof arguments,
             "--device cpu --json -m '%s' --all --ctx-size 64 -n 200 <'%s'", model, text);
    check_text(model, arguments, text, (struct expected){64, 200, true, -1});
    snprintf(arguments, sizeof arguments, "-m '%s' --all -c 64 -n 193 -t 1 --device cpu '%s'",
             model, text);
    /* the rest is one token, which says nothing */
    says(arguments, 0, "scored      189 of 193 tokens: 3 chunks of 64, all but the first of each");
}

static void begins_with_bos(void **state)
{
    (void)state;
    char text[1200], arguments[3000];
    snprintf(text, sizeof text, "%s", data_path("chat_template_qwen3_0_6b.jinja"));
    copy_model();
    edit("tokenizer.json", add_bos);
    edit("config.json", shorten);
    snprintf(arguments, sizeof arguments, "--device cpu --json -m '%s' -n 100 '%s'", folder, text);
    check_text(folder, arguments, text, (struct expected){48, 100, false, 300});
    snprintf(arguments, sizeof arguments, "-m '%s' -n 100 -q '%s'", folder, text);
    says(arguments, 0, "2 chunks of 48, the second half of each; each begins with BOS");
    snprintf(arguments, sizeof arguments, "-m '%s' -c 49 '%s'", folder, text);
    says(arguments, 1, "the model was made for 48 tokens");
}

static void bad_input(void **state)
{
    (void)state;
    char arguments[3000];
    const char *model = data_path("qwen2-nano-f32"),
               *text = data_path("chat_template_qwen3_0_6b.jinja");
    says("-m /nowhere/a </dev/null", 1, "/nowhere/a");
    says("/nowhere/text", 1, "cannot open /nowhere/text");
    says("a --file b", 2, "which one?");
    says("a --stop x", 2, "not one of 'linnet perplexity'");
    snprintf(arguments, sizeof arguments, "-m '%s' </dev/null", model);
    says(arguments, 1, "the text has 0 tokens, and a chunk takes 512");
    snprintf(arguments, sizeof arguments, "-m '%s' -c 300 -n 299 '%s'", model, text);
    says(arguments, 1, "--max-tokens leaves 299 tokens, and a chunk takes 300");
    snprintf(arguments, sizeof arguments, "-m '%s' -n 1 --all '%s'", model, text);
    says(arguments, 1, "--max-tokens leaves 1 tokens, and a chunk takes 2");
    snprintf(arguments, sizeof arguments, "-m '%s' -c 2 '%s'", model, text);
    says(arguments, 2, "leave none to score");
    snprintf(arguments, sizeof arguments, "-m '%s' -c 3 -n 3 -q '%s'", model, text);
    says(arguments, 0, "scored      1 of 3 tokens: 1 chunk of 3");
    assert_null(strstr(output, "+/-")); /* one value has no spread */
    snprintf(arguments, sizeof arguments, "-m '%s' '%s' >/dev/full", model, text);
    assert_int_equal(perplexity(arguments), 1);
}

static int prepare(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "%s", scratch_create());
    return 0;
}

static int tidy_up(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cache_in_8_bits),
        cmocka_unit_test(goldens),
        cmocka_unit_test(depends_on_the_tokens_alone),
        cmocka_unit_test(refusals),
        cmocka_unit_test(damaged_model),
        cmocka_unit_test(begins_with_bos),
        cmocka_unit_test(chunks_of_a_text),
        cmocka_unit_test(bad_input),
    };
    return cmocka_run_group_tests(tests, prepare, tidy_up);
}
