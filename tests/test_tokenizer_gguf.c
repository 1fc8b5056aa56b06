/* The tokenizer of a GGUF file gives the ids of the tokenizer.json that it was made from. */
#include "gguf_builder.h"
#include "tokenizer_check.h"

/* ---- GGUF metadata from a tokenizer.json -------------------------------------------------- */

static void put_key_string(struct strbuf *b, const char *key, const char *value)
{
    put_key(b, key, GGUF_STRING);
    put_string(b, value);
}

/* The tokens by id, and their types. */
static const char **tokens_of(json_t *root, size_t *count, int32_t **types)
{
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab"), *entry;
    json_t *added = json_object_get(root, "added_tokens");
    const char **tokens = calloc(4096, sizeof *tokens), *key;
    *types = calloc(4096, sizeof **types);
    *count = 0;
    json_object_foreach(vocab, key, entry)
    {
        size_t id = (size_t)json_integer_value(entry);
        assert_true(id < 4096);
        tokens[id] = key;
        (*types)[id] = strlen(key) == 6 && strncmp(key, "<0x", 3) == 0 ? 6 : 1;
        if (id >= *count) *count = id + 1;
    }
    size_t i;
    json_array_foreach(added, i, entry)
    {
        size_t id = (size_t)json_integer_value(json_object_get(entry, "id"));
        tokens[id] = json_string_value(json_object_get(entry, "content"));
        bool special = json_is_true(json_object_get(entry, "special"));
        (*types)[id] = strcmp(tokens[id], "<unk>") == 0 ? 2 : special ? 3 : 4;
        if (id >= *count) *count = id + 1;
    }
    return tokens;
}

static void put_merges(struct strbuf *b, const json_t *merges)
{
    put_key_array(b, "tokenizer.ggml.merges", GGUF_STRING, json_array_size(merges));
    for (size_t i = 0; i < json_array_size(merges); i++) {
        const json_t *merge = json_array_get(merges, i);
        struct strbuf text = {0};
        strbuf_format(&text, "%s %s", json_string_value(json_array_get(merge, 0)),
                      json_string_value(json_array_get(merge, 1)));
        put_string(b, text.data);
        strbuf_free(&text);
    }
}

/* SentencePiece knows scores: the later a merge, the lower that of its result. */
static void put_scores(struct strbuf *b, const char **tokens, size_t count, const json_t *merges)
{
    put_key_array(b, "tokenizer.ggml.scores", GGUF_F32, count);
    for (size_t id = 0; id < count; id++) {
        float score = -1000;
        for (size_t i = 0; i < json_array_size(merges); i++) {
            char whole[64];
            const json_t *merge = json_array_get(merges, i);
            snprintf(whole, sizeof whole, "%s%s", json_string_value(json_array_get(merge, 0)),
                     json_string_value(json_array_get(merge, 1)));
            if (strcmp(whole, tokens[id]) == 0) score = -(float)i;
        }
        strbuf_append(b, &score, 4);
    }
}

/* `pre` NULL: the SentencePiece form. */
static struct strbuf gguf_of(const char *file, const char *pre, int32_t broken_type)
{
    struct strbuf b = {0};
    int32_t *types;
    size_t count;
    json_t *root = load_json(data_path(file));
    const json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    const char **tokens = tokens_of(root, &count, &types);
    if (broken_type) types[count - 1] = broken_type;
    put_header(&b, 3, 0, 6);
    put_key_string(&b, "general.architecture", "llama");
    put_key_string(&b, "tokenizer.ggml.model", pre ? "gpt2" : "llama");
    if (pre)
        put_key_string(&b, "tokenizer.ggml.pre", pre);
    else
        put_key_u32(&b, "tokenizer.ggml.bos_token_id", 1);
    put_key_array(&b, "tokenizer.ggml.tokens", GGUF_STRING, count);
    for (size_t i = 0; i < count; i++) put_string(&b, tokens[i]);
    put_key_array(&b, "tokenizer.ggml.token_type", GGUF_I32, count);
    strbuf_append(&b, types, count * sizeof *types);
    if (pre)
        put_merges(&b, merges);
    else
        put_scores(&b, tokens, count, merges);
    free(tokens);
    free(types);
    json_decref(root);
    return b;
}

static linnet_status open_gguf(const struct strbuf *bytes, struct gguf **g, struct tokenizer **t,
                               linnet_error *err)
{
    *t = NULL;
    linnet_status status = gguf_open_memory(bytes->data, bytes->size, "memory", g, err);
    if (status != LINNET_OK) return status;
    struct checkpoint cp = {.path = (char *)"memory", .gguf = *g};
    status = tokenizer_open(&cp, t, err);
    if (status != LINNET_OK) gguf_close(*g);
    return status;
}

/* Both forms of one tokenizer, over its random texts in cases.json. */
static void check_pair(const char *name, const char *pre)
{
    char file[64];
    snprintf(file, sizeof file, "tokenizers/%s.json", name);
    struct strbuf bytes = gguf_of(file, pre, 0);
    struct gguf *g;
    struct tokenizer *t;
    linnet_error err;
    assert_ok(open_gguf(&bytes, &g, &t, &err), err);
    json_t *cases = load_json(data_path("tokenizers/cases.json")), *group, *entry;
    size_t i, k, checked = 0;
    json_array_foreach(json_object_get(cases, "groups"), i, group)
    {
        const char *group_name = json_string_value(json_object_get(group, "file"));
        if (!group_name || strcmp(group_name, name) != 0) continue;
        json_array_foreach(json_object_get(group, "cases"), k, entry)
        {
            const json_t *ids = json_object_get(entry, "ids");
            expect_encoding(t, name, json_object_get(entry, "text"), false, true, ids);
            expect_decoding(t, ids, false, json_object_get(entry, "decoded"));
            checked++;
        }
    }
    assert_int_equal(checked, 150);
    json_decref(cases);
    tokenizer_close(t);
    gguf_close(g);
    strbuf_free(&bytes);
}

static void test_byte_level(void **state)
{
    (void)state;
    check_pair("qwen", "qwen2");
    check_pair("llama", "llama-bpe");
    check_pair("smol", "smollm");
}

static void test_sentencepiece(void **state)
{
    (void)state;
    check_pair("spm", NULL);
    struct strbuf bytes = gguf_of("tokenizers/spm.json", NULL, 0);
    struct gguf *g;
    struct tokenizer *t;
    linnet_error err;
    assert_ok(open_gguf(&bytes, &g, &t, &err), err);
    struct token_list list = encode(t, "", 0, true, true);
    assert_int_equal(list.count, 1); /* BOS alone, no lone blank */
    assert_int_equal(list.ids[0], tokenizer_bos(t));
    token_list_free(&list);
    tokenizer_close(t);
    gguf_close(g);
    strbuf_free(&bytes);
}

static void test_refusals(void **state)
{
    (void)state;
    struct gguf *g;
    struct tokenizer *t;
    linnet_error err;
    struct strbuf bytes = gguf_of("tokenizers/smol.json", "brand-new", 0);
    assert_int_equal(open_gguf(&bytes, &g, &t, &err), LINNET_UNSUPPORTED);
    assert_non_null(strstr(err.message, "tokenizer.ggml.pre 'brand-new'"));
    strbuf_free(&bytes);
    bytes = gguf_of("tokenizers/smol.json", "smollm", 9);
    assert_int_equal(open_gguf(&bytes, &g, &t, &err), LINNET_FORMAT);
    assert_non_null(strstr(err.message, "token_type: entry 339"));
    strbuf_free(&bytes);
}

/* An unused id fills the matrix up: it is no token, and decodes to nothing. */
static void test_unused(void **state)
{
    (void)state;
    struct gguf *g;
    struct tokenizer *t;
    linnet_error err;
    struct strbuf bytes = gguf_of("tokenizers/qwen.json", "qwen2", 5);
    assert_ok(open_gguf(&bytes, &g, &t, &err), err);
    assert_int_equal(tokenizer_size(t), 1004);
    size_t size;
    tokenizer_bytes(t, 1004, &size);
    assert_int_equal(size, 0);
    tokenizer_close(t);
    gguf_close(g);
    strbuf_free(&bytes);
}

/* A vocabulary of three: "a", "b" and one more; both ids are `id` as u32. */
static struct strbuf tiny_gguf(const char *model, const char *third, int32_t type, uint32_t id)
{
    struct strbuf b = {0};
    const int32_t types[] = {1, 1, type};
    const float scores[] = {0, 0, 0};
    put_header(&b, 3, 0, 9);
    put_key_string(&b, "tokenizer.ggml.model", model);
    put_key_string(&b, "tokenizer.ggml.pre", "llama-bpe"); /* adds BOS */
    put_key_array(&b, "tokenizer.ggml.tokens", GGUF_STRING, 3);
    put_string(&b, "a");
    put_string(&b, "b");
    put_string(&b, third);
    put_key_array(&b, "tokenizer.ggml.token_type", GGUF_I32, 3);
    strbuf_append(&b, types, sizeof types);
    put_key_array(&b, "tokenizer.ggml.merges", GGUF_STRING, 0);
    put_key_array(&b, "tokenizer.ggml.scores", GGUF_F32, 3);
    strbuf_append(&b, scores, sizeof scores);
    put_key_u32(&b, "tokenizer.ggml.bos_token_id", id);
    put_key_u32(&b, "tokenizer.ggml.eos_token_id", id);
    put_key_u32(&b, "tokenizer.ggml.unknown_token_id", id);
    return b;
}

/* A token that is looked for in texts and is no UTF-8 would cut characters in two. */
static void test_broken_characters(void **state)
{
    (void)state;
    static const char *const models[] = {"gpt2", "llama"};
    for (int32_t type = 1; type <= 4; type++)
        for (size_t i = 0; i < 2; i++) {
            struct gguf *g;
            struct tokenizer *t;
            linnet_error err;
            struct strbuf bytes = tiny_gguf(models[i], "\x9F\x98\x80", type, 0);
            linnet_status status = open_gguf(&bytes, &g, &t, &err);
            if (type == 1) {
                assert_ok(status, err);
                tokenizer_close(t);
                gguf_close(g);
            } else {
                assert_int_equal(status, LINNET_FORMAT);
                assert_non_null(strstr(err.message, "id 2: expected UTF-8"));
            }
            strbuf_free(&bytes);
        }
}

static void test_no_ids(void **state)
{
    (void)state;
    static const struct {
        uint32_t id;
        int32_t expected; /* -2: refused */
    } cases[] = {{UINT32_MAX, -1}, {1, 1}, {2, -1}, {3, -2}, {UINT32_MAX - 1, -2}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct gguf *g;
        struct tokenizer *t;
        linnet_error err;
        struct strbuf bytes = tiny_gguf(i % 2 ? "gpt2" : "llama", "c", 5, cases[i].id);
        linnet_status status = open_gguf(&bytes, &g, &t, &err);
        if (cases[i].expected == -2) {
            assert_int_equal(status, LINNET_FORMAT);
            assert_non_null(strstr(err.message, "expected a token id below 3"));
        } else {
            assert_ok(status, err);
            assert_int_equal(tokenizer_bos(t), cases[i].expected); /* 2 is unused: no token */
            assert_int_equal(tokenizer_eos(t), cases[i].expected);
            struct token_list list = encode(t, "", 0, true, true);
            assert_int_equal(list.count, cases[i].expected >= 0);
            token_list_free(&list);
            tokenizer_close(t);
            gguf_close(g);
        }
        strbuf_free(&bytes);
    }
}

/* A control token's own character is that token only where the template wrote it. */
static void test_control_characters(void **state)
{
    (void)state;
    static const char *const models[] = {"gpt2", "llama"};
    for (size_t i = 0; i < 2; i++) {
        struct gguf *g;
        struct tokenizer *t;
        linnet_error err;
        struct strbuf bytes = tiny_gguf(models[i], "c", 3, UINT32_MAX);
        assert_ok(open_gguf(&bytes, &g, &t, &err), err);
        for (int parse = 0; parse < 2; parse++) {
            struct token_list list = encode(t, "ac", 2, false, parse);
            assert_int_equal(list.count, 1 + parse);
            assert_int_equal(list.ids[0], 0);
            if (parse) assert_int_equal(list.ids[1], 2);
            token_list_free(&list);
        }
        tokenizer_close(t);
        gguf_close(g);
        strbuf_free(&bytes);
    }
}

/* ---- real files, where present ------------------------------------------------------------ */

static struct tokenizer *open_model(const char *path, struct checkpoint **cp)
{
    struct tokenizer *t;
    linnet_error err;
    assert_ok(checkpoint_open(path, cp, &err), err);
    assert_ok(tokenizer_open(*cp, &t, &err), err);
    return t;
}

static void test_reference_files(void **state)
{
    (void)state;
    static const char *const names[][2] = {{"gguf/qwen2-mini-bf16.gguf", "tokenizer_qwen_303"},
                                           {"gguf/llama-tiny-bf16.gguf", "tokenizer_llama_440"},
                                           {"gguf/smollm2-shape-q4_0.gguf", "tokenizer_smol_340"}};
    for (size_t i = 0; i < 3 && reference_path(names[i][0]); i++) {
        char name[64];
        struct checkpoint *cp;
        struct tokenizer *t = open_model(reference_path(names[i][0]), &cp);
        snprintf(name, sizeof name, "golden/%s.json", names[i][1]);
        json_t *golden = load_json(reference_path(name)), *entry;
        size_t k;
        json_array_foreach(json_object_get(golden, "texts"), k, entry)
        {
            const json_t *ids = json_object_get(entry, "ids");
            expect_encoding(t, name, json_object_get(entry, "text"), false, true, ids);
            expect_encoding(t, name, json_object_get(entry, "text"), true, true,
                            json_object_get(entry, "ids_add_special"));
            expect_decoding(t, ids, true, json_object_get(entry, "decoded_skip_special"));
        }
        json_decref(golden);
        tokenizer_close(t);
        checkpoint_close(cp);
    }
}

static void test_smollm2(void **state)
{
    (void)state;
    if (!smollm2_path() || !cases_path("tokenizer.json")) return;
    struct checkpoint *cp;
    struct tokenizer *t = open_model(smollm2_path(), &cp);
    json_t *cases = load_json(cases_path("tokenizer.json")), *entry;
    size_t i;
    json_array_foreach(cases, i, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "tokenizer"));
        if (strcmp(name, "smollm2") != 0 || json_object_get(entry, "gen")) continue;
        expect_encoding(t, json_string_value(json_object_get(entry, "id")),
                        json_object_get(entry, "text"), false, true, json_object_get(entry, "ids"));
    }
    assert_int_equal(tokenizer_size(t), 49152);
    assert_int_equal(tokenizer_eos(t), 2);
    json_decref(cases);
    tokenizer_close(t);
    checkpoint_close(cp);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_byte_level),
        cmocka_unit_test(test_sentencepiece),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_unused),
        cmocka_unit_test(test_broken_characters),
        cmocka_unit_test(test_no_ids),
        cmocka_unit_test(test_control_characters),
        cmocka_unit_test(test_reference_files),
        cmocka_unit_test(test_smollm2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
