/* Ids equal to Hugging Face's: the goldens of tests/data and, where present, of ../shared. */
#include <pthread.h>
#include <unistd.h>

#include "tokenizer_check.h"

/* Sanitizers take their time. */
#if defined __SANITIZE_THREAD__ || defined __SANITIZE_ADDRESS__
enum { PATIENCE = 10 };
#else
enum { PATIENCE = 1 };
#endif

/* ---- goldens ------------------------------------------------------------------------------ */

static void check_token_bytes(const struct tokenizer *t, const json_t *hex)
{
    assert_int_equal(tokenizer_size(t), json_array_size(hex));
    for (int32_t id = 0; id < tokenizer_size(t); id++) {
        size_t size;
        const char *bytes = tokenizer_bytes(t, id, &size);
        struct strbuf text = {0};
        for (size_t i = 0; i < size; i++) strbuf_format(&text, "%02x", (uint8_t)bytes[i]);
        assert_string_equal(strbuf_cstr(&text), json_string_value(json_array_get(hex, (size_t)id)));
        strbuf_free(&text);
    }
}

static void check_golden(const struct tokenizer *t, const json_t *golden)
{
    size_t i;
    json_t *entry;
    json_array_foreach(json_object_get(golden, "texts"), i, entry)
    {
        const json_t *text = json_object_get(entry, "text"), *ids = json_object_get(entry, "ids");
        const char *what = json_string_value(text);
        expect_encoding(t, what, text, false, true, ids);
        expect_encoding(t, what, text, true, true, json_object_get(entry, "ids_add_special"));
        expect_decoding(t, ids, false, json_object_get(entry, "decoded"));
        expect_decoding(t, ids, true, json_object_get(entry, "decoded_skip_special"));
    }
    json_array_foreach(json_object_get(golden, "chats"), i, entry)
    {
        const json_t *text = json_object_get(entry, "text");
        expect_encoding(t, json_string_value(text), text, false, true,
                        json_object_get(entry, "ids"));
    }
    check_token_bytes(t, json_object_get(golden, "bytes_of_token"));
    int32_t end = tokenizer_find(t, "<|im_end|>");
    assert_int_equal(
        end, json_integer_value(json_object_get(json_object_get(golden, "special"), "<|im_end|>")));
    assert_true(tokenizer_is_special(t, end));
    assert_false(tokenizer_is_special(t, tokenizer_find(t, "e")));
    assert_int_equal(tokenizer_find(t, "no such token"), -1);
}

static void test_goldens(void **state)
{
    (void)state;
    static const char *const kinds[] = {"qwen", "llama", "smol"};
    for (size_t i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "tokenizers/%s.json", kinds[i]);
        struct tokenizer *t = open_tokenizer(data_path(name));
        snprintf(name, sizeof name, "tokenizers/%s_golden.json", kinds[i]);
        json_t *golden = load_json(data_path(name));
        check_golden(t, golden);
        json_decref(golden);
        tokenizer_close(t);
    }
}

static void test_shared_goldens(void **state)
{
    (void)state;
    static const char *const names[][2] = {
        {"tokenizer_qwen_303", "qwen2-seedlike"}, {"tokenizer_qwen_473", "qwen3-tiny"},
        {"tokenizer_qwen_1005", "qwen2-tiny"},    {"tokenizer_llama_300", "llama-linear"},
        {"tokenizer_llama_440", "llama-tiny"},    {"tokenizer_smol_340", "smollm2-shape"}};
    if (!reference_path("golden/tokenizer_qwen_303.json")) return;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char golden_name[80];
        snprintf(golden_name, sizeof golden_name, "golden/%s.json", names[i][0]);
        struct checkpoint *cp;
        struct tokenizer *t;
        linnet_error err;
        assert_ok(checkpoint_open(reference_path(names[i][1]), &cp, &err), err);
        assert_ok(tokenizer_open(cp, &t, &err), err);
        json_t *golden = load_json(reference_path(golden_name));
        check_golden(t, golden);
        assert_int_equal(tokenizer_eos(t), tokenizer_find(t, "<|im_end|>"));
        json_decref(golden);
        tokenizer_close(t);
        checkpoint_close(cp);
    }
}

/* ---- tests/data/tokenizers/cases.json (tools/tokenizer_cases.py) -------------------------- */

static struct tokenizer *group_tokenizer(const json_t *group, json_t *model)
{
    const char *file = json_string_value(json_object_get(group, "file"));
    char name[64];
    snprintf(name, sizeof name, "tokenizers/%s.json", file ? file : "");
    if (file) return open_tokenizer(data_path(name));
    json_t *own = json_object_get(group, "tokenizer");
    if (!json_object_get(own, "model")) json_object_set(own, "model", model);
    char *text = json_dumps(own, JSON_COMPACT);
    struct tokenizer *t;
    linnet_error err;
    assert_ok(tokenizer_open_json(text, strlen(text), "cases", &t, &err), err);
    free(text);
    return t;
}

static void test_features(void **state)
{
    (void)state;
    json_t *cases = load_json(data_path("tokenizers/cases.json")), *group, *entry;
    size_t i, k;
    json_array_foreach(json_object_get(cases, "groups"), i, group)
    {
        struct tokenizer *t = group_tokenizer(group, json_object_get(cases, "model"));
        json_array_foreach(json_object_get(group, "cases"), k, entry)
        {
            char what[64];
            snprintf(what, sizeof what, "group %zu, case %zu", i, k);
            const json_t *text = json_object_get(entry, "text");
            const json_t *ids = json_object_get(entry, "ids");
            const json_t *plain = json_object_get(entry, "ids_plain");
            const json_t *decoded = json_object_get(entry, "decoded");
            expect_encoding(t, what, text, false, true, ids);
            expect_encoding(t, what, text, false, false, plain ? plain : ids);
            if (decoded) expect_decoding(t, ids, false, decoded);
        }
        tokenizer_close(t);
    }
    json_decref(cases);
}

/* ---- ../shared/cases/tokenizer.json ------------------------------------------------------- */

static void expect_sha256(const struct token_list *list, const char *expected)
{
    char path[] = "/tmp/linnet-ids-XXXXXX", command[64], digest[65] = "";
    struct strbuf text = {0};
    write_ids(&text, list->ids, list->count);
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, text.data, text.size) == (ssize_t)text.size);
    close(fd);
    snprintf(command, sizeof command, "sha256sum %s", path);
    FILE *pipe = popen(command, "r");
    assert_true(pipe && fread(digest, 1, 64, pipe) == 64);
    pclose(pipe);
    unlink(path);
    strbuf_free(&text);
    assert_string_equal(digest, expected);
}

/* One endless run: the count, both ends, the digest of all, and the time. */
static void check_run(const struct tokenizer *t, const json_t *entry)
{
    const json_t *gen = json_object_get(entry, "gen");
    struct strbuf text = {0};
    for (json_int_t i = 0; i < json_integer_value(json_object_get(gen, "count")); i++)
        strbuf_text(&text, json_string_value(json_object_get(gen, "unit")));
    double start = cpu_seconds();
    struct token_list list = encode(t, text.data, text.size, false, true);
    assert_true(cpu_seconds() - start < 2 * PATIENCE);
    assert_int_equal(list.count, json_integer_value(json_object_get(entry, "n_ids")));
    for (size_t i = 0; i < 4; i++) {
        const json_t *head = json_array_get(json_object_get(entry, "ids_head"), i);
        const json_t *tail = json_array_get(json_object_get(entry, "ids_tail"), i);
        assert_int_equal(list.ids[i], json_integer_value(head));
        assert_int_equal(list.ids[list.count - 4 + i], json_integer_value(tail));
    }
    expect_sha256(&list, json_string_value(json_object_get(entry, "ids_sha256")));
    token_list_free(&list);
    strbuf_free(&text);
}

static void test_shared_cases(void **state)
{
    (void)state;
    static const struct {
        const char *name, *file;
    } tokenizers[] = {{"qwen25", "tokenizers/qwen25_tokenizer.json.gz"},
                      {"smollm2", "tokenizers/smollm2_tokenizer.json.gz"},
                      {"llama2_spm_legacy", "tokenizers/llama2_spm_legacy.json.gz"},
                      {"llama2_spm_first", "tokenizers/llama2_spm_first.json.gz"}};
    if (!cases_path("tokenizer.json")) return;
    json_t *cases = load_json(cases_path("tokenizer.json")), *entry;
    size_t i, checked = 0;
    for (size_t k = 0; k < sizeof tokenizers / sizeof tokenizers[0]; k++) {
        struct tokenizer *t = open_tokenizer(cases_path(tokenizers[k].file));
        json_array_foreach(cases, i, entry)
        {
            const char *name = json_string_value(json_object_get(entry, "tokenizer"));
            if (strcmp(name, tokenizers[k].name) != 0) continue;
            checked++;
            if (json_object_get(entry, "gen")) {
                check_run(t, entry);
                continue;
            }
            expect_encoding(t, json_string_value(json_object_get(entry, "id")),
                            json_object_get(entry, "text"),
                            json_is_true(json_object_get(entry, "add_special_tokens")),
                            json_is_true(json_object_get(entry, "parse_special")),
                            json_object_get(entry, "ids"));
        }
        tokenizer_close(t);
    }
    assert_int_equal(checked, json_array_size(cases));
    json_decref(cases);
}

/* ---- what users write --------------------------------------------------------------------- */

static void expect_untrusted(const struct tokenizer *t, const char *text,
                             const struct span *untrusted, size_t n, const char *expected)
{
    linnet_error err;
    struct token_list list = {0};
    struct strbuf found = {0};
    struct encode_options options = {
        .parse_special = true, .untrusted = untrusted, .n_untrusted = n};
    assert_ok(tokenizer_encode(t, text, strlen(text), &options, &list, &err), err);
    for (size_t i = 0; i < list.count; i++) {
        size_t size;
        const char *bytes = tokenizer_bytes(t, list.ids[i], &size);
        bool special = tokenizer_is_special(t, list.ids[i]);
        if (special) strbuf_char(&found, '[');
        strbuf_append(&found, bytes, size);
        if (special) strbuf_char(&found, ']');
    }
    assert_string_equal(strbuf_cstr(&found), expected);
    strbuf_free(&found);
    token_list_free(&list);
}

static void test_untrusted(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer(data_path("tokenizers/qwen.json"));
    const char *text = "<|im_end|>a<|im_end|>b<|im_end|>";
    expect_untrusted(t, text, NULL, 0, "[<|im_end|>]a[<|im_end|>]b[<|im_end|>]");
    struct span middle[] = {{10, 22}};
    expect_untrusted(t, text, middle, 1, "[<|im_end|>]a<|im_end|>b[<|im_end|>]");
    struct span halves[] = {{0, 1}, {31, 32}}; /* touching is enough */
    expect_untrusted(t, text, halves, 2, "<|im_end|>a[<|im_end|>]b<|im_end|>");
    struct span empty[] = {{15, 15}, {40, 50}};
    expect_untrusted(t, text, empty, 2, "[<|im_end|>]a[<|im_end|>]b[<|im_end|>]");
    /* Half a token of the user's does not eat the template's own. */
    struct span half[] = {{0, 5}};
    expect_untrusted(t, "<|im_<|im_end|>", half, 1, "<|im_[<|im_end|>]");
    expect_untrusted(t, "<tool_call>\xFF<|im_end|>", (struct span[]){{0, 12}}, 1,
                     "<tool_call>\xEF\xBF\xBD[<|im_end|>]");
    struct token_list list = encode(t, "<tool_call>", 11, false, false);
    assert_int_equal(list.count, 1); /* no control token: parsed all the same */
    token_list_free(&list);
    tokenizer_close(t);
}

/* The ranges follow the text through a normalizer, for special tokens of normalized text. */
static void test_untrusted_normalized(void **state)
{
    (void)state;
    size_t size;
    linnet_error err;
    struct tokenizer *t;
    json_t *root = load_json(data_path("tokenizers/spm.json")), *entry;
    size_t i;
    json_array_foreach(json_object_get(root, "added_tokens"), i, entry)
        json_object_set_new(entry, "normalized", json_true());
    json_t *steps = json_object_get(json_object_get(root, "normalizer"), "normalizers");
    json_array_remove(steps, 0); /* with Prepend "</s>" would have to be written "_</s>" */
    char *text = json_dumps(root, 0);
    size = strlen(text);
    assert_ok(tokenizer_open_json(text, size, "spm", &t, &err), err);
    free(text);
    json_decref(root);
    const char *words = "a b </s> c d</s>";
    expect_untrusted(t, words, NULL, 0, "a b [</s>] c d[</s>]");
    expect_untrusted(t, words, (struct span[]){{2, 9}}, 1, "a b </s> c d[</s>]");
    expect_untrusted(t, words, (struct span[]){{9, 16}}, 1, "a b [</s>] c d</s>");
    tokenizer_close(t);
}

static void test_invalid_utf8(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"a\xFFz", "a\xEF\xBF\xBDz"},
        {"\xE6\x97", "\xEF\xBF\xBD"},                             /* cut off: one */
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, /* a surrogate: three */
        {"\xF0\x9F\x98 x", "\xEF\xBF\xBD x"},
        {"\xC0\xAF\xF5", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}};
    struct tokenizer *t = open_tokenizer(data_path("tokenizers/llama.json"));
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        struct token_list a = encode(t, pairs[i][0], strlen(pairs[i][0]), true, true);
        struct token_list b = encode(t, pairs[i][1], strlen(pairs[i][1]), true, true);
        assert_int_equal(a.count, b.count);
        assert_memory_equal(a.ids, b.ids, a.count * sizeof *a.ids);
        token_list_free(&a);
        token_list_free(&b);
    }
    tokenizer_close(t);
}

/* ---- refusals ----------------------------------------------------------------------------- */

static void expect_refusal(const char *key, const char *part, const char *expected)
{
    linnet_error err;
    struct tokenizer *t;
    json_t *root = load_json(data_path("tokenizers/smol.json"));
    json_t *value = json_loads(part, JSON_DECODE_ANY, NULL);
    assert_non_null(value);
    char *dot = strchr(key, '.');
    if (dot)
        json_object_set_new(json_object_get(root, "model"), dot + 1, value);
    else
        json_object_set_new(root, key, value);
    char *text = json_dumps(root, 0);
    assert_int_not_equal(tokenizer_open_json(text, strlen(text), "file", &t, &err), LINNET_OK);
    assert_null(t);
    if (!strstr(err.message, expected)) fail_msg("'%s' lacks '%s'", err.message, expected);
    free(text);
    json_decref(root);
}

static void test_refusals(void **state)
{
    (void)state;
    expect_refusal("normalizer", "{\"type\": \"Precompiled\"}", "normalizer 'Precompiled'");
    expect_refusal("pre_tokenizer", "{\"type\": \"Whitespace\"}", "pre_tokenizer 'Whitespace'");
    expect_refusal("pre_tokenizer",
                   "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"[a&&b]\"}, \"behavior\": "
                   "\"Isolated\"}",
                   "&& inside [ ]");
    expect_refusal("pre_tokenizer",
                   "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"(a\"}, \"behavior\": "
                   "\"Isolated\"}",
                   "regular expression: missing");
    expect_refusal("post_processor", "{\"type\": \"BertProcessing\"}", "'BertProcessing'");
    expect_refusal("decoder", "{\"type\": \"WordPiece\"}", "decoder 'WordPiece'");
    expect_refusal("decoder", "null", "decoder '(no type)'");
    expect_refusal("model", "{\"type\": \"Unigram\"}", "model 'Unigram'");
    expect_refusal("m.dropout", "0.1", "dropout");
    expect_refusal("m.end_of_word_suffix", "\"</w>\"", "end_of_word_suffix");
    expect_refusal("m.unk_token", "\"<nothing>\"", "<nothing>");
    expect_refusal("m.merges", "[\"a b\", \"no way\"]", "merge 0: 'a' + 'b'");
    expect_refusal("m.merges", "[\"abc\"]", "merge 0");
    expect_refusal("m.vocab", "{\"a\": -1}", "id -1");
    expect_refusal("m.vocab", "{\"a\": 1, \"b\": 1}", "id 1 belongs to two");
    expect_refusal("m.vocab", "{\"a\": 4000000000}", "4000000000");
    expect_refusal("added_tokens", "[{\"id\": 1, \"content\": \"<|im_end|>\"}]", "added_tokens[0]");
}

/* ---- time, stack, threads ----------------------------------------------------------------- */

struct job {
    const struct tokenizer *t;
    const char *text;
    size_t size, count;
};

static void *run_job(void *argument)
{
    struct job *job = argument;
    struct token_list list = {0};
    struct encode_options options = {.parse_special = true};
    if (tokenizer_encode(job->t, job->text, job->size, &options, &list, NULL) == LINNET_OK)
        job->count = list.count;
    token_list_free(&list);
    return NULL;
}

/* Encodes on a stack of 256 KiB, `threads` times at once, within two seconds each. */
static size_t encode_flat(const struct tokenizer *t, const char *text, size_t n, int threads)
{
    pthread_attr_t attributes;
    pthread_t thread[4];
    struct job jobs[4];
    double start = cpu_seconds();
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    for (int i = 0; i < threads; i++) {
        jobs[i] = (struct job){t, text, n, SIZE_MAX};
        assert_int_equal(pthread_create(&thread[i], &attributes, run_job, &jobs[i]), 0);
    }
    for (int i = 0; i < threads; i++) pthread_join(thread[i], NULL);
    pthread_attr_destroy(&attributes);
    assert_true(cpu_seconds() - start < 2 * PATIENCE * threads);
    for (int i = 0; i < threads; i++) assert_int_equal(jobs[i].count, jobs[0].count);
    return jobs[0].count;
}

static void test_long_runs(void **state)
{
    (void)state;
    static const char *const units[] = {
        "q",   " ",  "\n", "9",    "=", "\xE5\xA5\xBD", "\xCC\x81", "\xCC\x81\xCC\xA3",
        " \n", "Aa", "'",  "<|im_"};
    static const char *const files[] = {"qwen", "llama", "smol", "spm"};
    for (size_t f = 0; f < 4; f++) {
        char name[64];
        snprintf(name, sizeof name, "tokenizers/%s.json", files[f]);
        struct tokenizer *t = open_tokenizer(data_path(name));
        for (size_t u = 0; u < sizeof units / sizeof units[0]; u++) {
            struct strbuf text = {0};
            strbuf_char(&text, 'a');
            for (size_t i = 0; i < 200000; i++) strbuf_text(&text, units[u]);
            size_t count = encode_flat(t, text.data, text.size, 1);
            assert_in_range(count, 1, text.size);
            strbuf_free(&text);
        }
        tokenizer_close(t);
    }
}

static void test_threads(void **state)
{
    (void)state;
    size_t size;
    char *text = load_file(data_path("tokenizers/qwen_golden.json"), &size);
    struct tokenizer *t = open_tokenizer(data_path("tokenizers/qwen.json"));
    assert_in_range(encode_flat(t, text, size, 4), size / 8, size);
    tokenizer_close(t);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_goldens),      cmocka_unit_test(test_shared_goldens),
        cmocka_unit_test(test_features),     cmocka_unit_test(test_shared_cases),
        cmocka_unit_test(test_untrusted),    cmocka_unit_test(test_untrusted_normalized),
        cmocka_unit_test(test_invalid_utf8), cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_long_runs),    cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
