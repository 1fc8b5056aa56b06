/* Checkpoints: GGUF and directory give the same tensors under the same names. */
#include "gguf_builder.h"
#include "scratch.h"

#include "file/checkpoint_internal.h"

static struct checkpoint *open_good(const char *path)
{
    struct checkpoint *cp;
    linnet_error err;
    assert_ok(checkpoint_open(path, &cp, &err), err);
    for (size_t i = 1; i < cp->n_tensors; i++)
        assert_true(strcmp(cp->tensors[i - 1].name, cp->tensors[i].name) < 0);
    return cp;
}

static void refused(const char *path, linnet_status status, const char *word)
{
    struct checkpoint *cp;
    linnet_error err;
    if (checkpoint_open(path, &cp, &err) == LINNET_OK)
        fail_msg("%s: opened what should be refused for \"%s\"", path, word);
    if (!strstr(err.message, word)) fail_msg("expected \"%s\" in: %s", word, err.message);
    assert_int_equal(err.status, status);
}

static void names(void **state)
{
    (void)state;
    static const struct {
        const char *gguf, *hf;
    } cases[] = {
        {"token_embd.weight", "model.embed_tokens.weight"},
        {"output_norm.weight", "model.norm.weight"},
        {"output.weight", "lm_head.weight"},
        {"blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"},
        {"blk.10.attn_q.weight", "model.layers.10.self_attn.q_proj.weight"},
        {"blk.10.attn_k.bias", "model.layers.10.self_attn.k_proj.bias"},
        {"blk.10.attn_v.bias", "model.layers.10.self_attn.v_proj.bias"},
        {"blk.1.attn_qkv.weight", "model.layers.1.self_attn.qkv_proj.weight"},
        {"blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"},
        {"blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight"},
        {"blk.1.attn_k_norm.weight", "model.layers.1.self_attn.k_norm.weight"},
        {"blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"},
        {"blk.1.ffn_gate.weight", "model.layers.1.mlp.gate_proj.weight"},
        {"blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"},
        {"blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"},
        {"rope_freqs.weight", "rope_freqs.weight"},
        {"blk.01.attn_q.weight", "blk.01.attn_q.weight"},
        {"blk..attn_q.weight", "blk..attn_q.weight"},
        {"blk.1.weight", "blk.1.weight"},
        {"blk.1.attn_q", "blk.1.attn_q"},
        {"blk.1.attn_q.scale", "blk.1.attn_q.scale"},
        {"blk.1.token_embd.weight", "blk.1.token_embd.weight"},
        {"attn_q.weight", "attn_q.weight"},
        {"blk.1.ffn_gate_exps.weight", "blk.1.ffn_gate_exps.weight"},
        {".weight", ".weight"},
        {"x", "x"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *name = checkpoint_name_from_gguf(cases[i].gguf);
        assert_string_equal(name, cases[i].hf);
        free(name);
    }
}

static void same_tensors(const char *gguf, const char *directory)
{
    struct checkpoint *a = open_good(gguf), *b = open_good(directory);
    assert_int_equal(a->n_tensors, b->n_tensors);
    for (size_t i = 0; i < b->n_tensors; i++) {
        const struct tensor *y = &b->tensors[i], *x = checkpoint_find(a, y->name);
        if (!x) fail_msg("%s: no tensor %s", gguf, y->name);
        assert_int_equal(x->n_dims, y->n_dims);
        assert_memory_equal(x->shape, y->shape, sizeof x->shape);
        if (x->dtype != y->dtype) continue; /* vectors of an F16 model are F32 in GGUF */
        assert_int_equal(x->bytes, y->bytes);
        assert_memory_equal(x->data, y->data, x->bytes);
    }
    assert_null(checkpoint_find(a, "model.layers.0"));
    assert_null(checkpoint_find(a, "zzz"));
    assert_string_equal(a->chat_template, b->chat_template);
    checkpoint_close(a);
    checkpoint_close(b);
}

static void gguf_equals_directory(void **state)
{
    (void)state;
    same_tensors(data_path("gguf/qwen2-nano-f32.gguf"), data_path("qwen2-nano-f32"));
    const char *gguf = reference_path("gguf/qwen2-nano-f16.gguf");
    if (gguf) same_tensors(gguf, reference_path("qwen2-nano-f16"));
}

static void nano_directory(void **state)
{
    (void)state;
    struct checkpoint *cp = open_good(data_path("qwen2-nano-f32"));
    assert_null(cp->gguf);
    assert_int_equal(cp->n_tensors, 26);
    assert_string_equal(json_string_value(json_object_get(cp->config, "model_type")), "qwen2");
    assert_true(json_is_object(cp->generation_config) && json_is_object(cp->tokenizer_config));
    assert_true(cp->tokenizer_json && cp->tokenizer_json[0] == '{');
    assert_int_equal(cp->tokenizer_json_size, 8529);
    assert_int_equal(strlen(cp->chat_template), 311);
    const struct tensor *t = checkpoint_find(cp, "model.layers.1.mlp.down_proj.weight");
    assert_true(t && t->n_dims == 2 && t->shape[0] == 64 && t->shape[1] == 128);
    checkpoint_close(cp);
}

/* Every model of the reference set, with the tensors that its configuration asks for. */
static void reference_models(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int layers;
        size_t n_tensors;
    } models[] = {
        {"llama-dynamic", 1, 11},
        {"llama-linear", 1, 11},
        {"llama-tiny", 2, 21},
        {"qwen2-nano-f16", 2, 26},
        {"qwen2-nano-f32", 2, 26},
        {"qwen2-seedlike", 1, 14},
        {"qwen2-tiny", 4, 50},
        {"qwen2-yarn", 1, 14},
        {"qwen3-tiny", 2, 24},
        {"smollm2-shape", 1, 11},
        {"gguf/llama-tiny-bf16.gguf", 2, 22},
        {"gguf/qwen2-mini-bf16.gguf", 1, 14},
        {"gguf/qwen2-mini-q4_0.gguf", 1, 14},
        {"gguf/qwen2-mini-q4_1.gguf", 1, 14},
        {"gguf/qwen2-mini-q4_k_mix.gguf", 1, 14},
        {"gguf/qwen2-mini-q6_k.gguf", 1, 14},
        {"gguf/qwen2-mini-q8_0.gguf", 1, 14},
        {"gguf/qwen2-nano-f16.gguf", 2, 26},
        {"gguf/qwen2-nano-f32.gguf", 2, 26},
        {"gguf/smollm2-shape-q4_0.gguf", 1, 11},
    };
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        const char *path = reference_path(models[i].name);
        if (!path) continue;
        struct checkpoint *cp = open_good(path);
        assert_int_equal(cp->n_tensors, models[i].n_tensors);
        assert_non_null(checkpoint_find(cp, "model.embed_tokens.weight"));
        assert_non_null(checkpoint_find(cp, "model.norm.weight"));
        for (int layer = 0; layer < models[i].layers; layer++) {
            char name[64];
            snprintf(name, sizeof name, "model.layers.%d.self_attn.o_proj.weight", layer);
            assert_non_null(checkpoint_find(cp, name));
        }
        assert_non_null(cp->chat_template);
        assert_true((cp->gguf != NULL) != (cp->config != NULL));
        checkpoint_close(cp);
    }
}

static void real_model_opens_fast(void **state)
{
    (void)state;
    const char *path = smollm2_path();
    if (!path) path = data_path("gguf/qwen2-nano-f32.gguf");
    double start = cpu_seconds();
    checkpoint_close(open_good(path));
    assert_true(cpu_seconds() - start < 1);
}

/* ---- directories ------------------------------------------------------------------------- */

static const char one_tensor[] = "=\0\0\0\0\0\0\0{\"a\": {\"dtype\": \"F32\", \"shape\": [1], "
                                 "\"data_offsets\": [0, 4]}}\1\2\3\4";

static void write_single(const char *directory)
{
    scratch_write(directory, "model.safetensors", one_tensor, sizeof one_tensor - 1);
    scratch_text(directory, "config.json", "{}");
}

static void published_directories(void **state)
{
    (void)state;
    refused(data_path("files/i01_missing_shard"), LINNET_IO, "model-00002-of-00002.safetensors");
    refused(data_path("files/i04_wrong_shard"), LINNET_FORMAT, "tensor ");
    refused(data_path("files/i05_not_string"), LINNET_FORMAT, "tensor a: expected a file name");
    refused(data_path("files/ok_two_shards"), LINNET_IO, "config.json");

    char *directory = scratch_create();
    scratch_copy_all(directory, data_path("files/ok_two_shards"));
    scratch_text(directory, "config.json", "{}");
    scratch_text(directory, "stray.safetensors", "not looked at");
    scratch_text(directory, "model.safetensors", "the index wins");
    struct checkpoint *cp = open_good(directory);
    assert_true(cp->n_tensors == 2 && checkpoint_find(cp, "a") && checkpoint_find(cp, "b"));
    assert_null(cp->generation_config);
    assert_null(cp->tokenizer_json);
    assert_null(cp->chat_template);
    checkpoint_close(cp);
    scratch_remove(directory);
}

static void indexes_that_lie(void **state)
{
    (void)state;
    static const struct {
        const char *index, *word;
    } cases[] = {
        {"{}", "weight_map"},
        {"{\"weight_map\":{}}", "weight_map"},
        {"{\"weight_map\":[]}", "weight_map"},
        {"{\"weight_map\":{\"a\":\"s\",\"a\":\"s\"}}", "duplicate"},
        {"{\"weight_map\":{\"a\":\"model.safetensors\",\"b\":\"model.safetensors\"}}",
         "tensor b should lie in model.safetensors"},
        {"{\"weight_map\":{\"b\":\"model.safetensors\"}}", "tensor a lies in model.safetensors"},
        {"{\"weight_map\":{\"a\":\"../model.safetensors\"}}", "plain name"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "plain name"},
        {"{\"weight_map\":{\"a\":\"..\"}}", "plain name"},
        {"{\"weight_map\":{\"a\":\".\"}}", "plain name"},
        {"{\"weight_map\":{\"a\":\"\"}}", "plain name"},
        {"{\"weight_map\":", "line 1"},
    };
    char *directory = scratch_create();
    write_single(directory);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        scratch_text(directory, "model.safetensors.index.json", cases[i].index);
        refused(directory, LINNET_FORMAT, cases[i].word);
    }
    scratch_remove(directory);
}

static void json_files(void **state)
{
    (void)state;
    char *directory = scratch_create();
    refused(directory, LINNET_IO, "model.safetensors");
    write_single(directory);
    remove(scratch_path(directory, "config.json"));
    refused(directory, LINNET_IO, "config.json");
    scratch_text(directory, "config.json", "[]");
    refused(directory, LINNET_FORMAT, "config.json: expected a JSON object");
    scratch_text(directory, "config.json", "{\n\"a\": 1,\n\"a\": 2}");
    refused(directory, LINNET_FORMAT, "config.json: line 3: duplicate");
    scratch_text(directory, "config.json", "{}");
    scratch_text(directory, "generation_config.json", "{");
    refused(directory, LINNET_FORMAT, "generation_config.json");
    remove(scratch_path(directory, "generation_config.json"));
    size_t size = (16 << 20) + 1;
    char *large = malloc(size);
    memset(large, ' ', size);
    scratch_write(directory, "tokenizer_config.json", large, size);
    free(large);
    refused(directory, LINNET_FORMAT, "tokenizer_config.json: expected at most 16777216 bytes");
    scratch_remove(directory);
}

static void template_is(const char *directory, const char *expected)
{
    struct checkpoint *cp = open_good(directory);
    if (expected)
        assert_string_equal(cp->chat_template, expected);
    else
        assert_null(cp->chat_template);
    checkpoint_close(cp);
}

static void chat_templates(void **state)
{
    (void)state;
    char *directory = scratch_create();
    write_single(directory);
    template_is(directory, NULL);
    scratch_text(directory, "tokenizer_config.json", "{\"chat_template\": null}");
    template_is(directory, NULL);
    scratch_text(directory, "tokenizer_config.json", "{\"chat_template\": \"one\"}");
    template_is(directory, "one");
    scratch_text(directory, "tokenizer_config.json",
                 "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"t\"},"
                 "{\"name\": \"default\", \"template\": \"two\"}]}");
    template_is(directory, "two");
    scratch_text(directory, "tokenizer_config.json",
                 "{\"chat_template\": [{\"name\": \"tool_use\", \"template\": \"t\"}]}");
    template_is(directory, NULL);
    scratch_text(directory, "chat_template.jinja", "three\n");
    template_is(directory, "three\n");
    scratch_write(directory, "chat_template.jinja", "a\0b", 3);
    refused(directory, LINNET_FORMAT, "chat_template.jinja");
    remove(scratch_path(directory, "chat_template.jinja"));
    scratch_text(directory, "tokenizer_config.json", "{\"chat_template\": 7}");
    refused(directory, LINNET_FORMAT, "chat_template");
    scratch_text(directory, "tokenizer_config.json",
                 "{\"chat_template\": [{\"name\": \"default\", \"template\": 7}]}");
    refused(directory, LINNET_FORMAT, "chat_template");
    scratch_remove(directory);
}

static void links(void **state)
{
    (void)state;
    char *directory = scratch_create();
    write_single(directory);
    assert_int_equal(
        symlink("model.safetensors", scratch_path(directory, "generation_config.json")), 0);
    refused(directory, LINNET_FORMAT, "generation_config.json: line 1"); /* followed: inside */
    remove(scratch_path(directory, "generation_config.json"));
    assert_int_equal(symlink("/etc/passwd", scratch_path(directory, "chat_template.jinja")), 0);
    refused(directory, LINNET_INVALID, "outside the model's directory");
    remove(scratch_path(directory, "chat_template.jinja"));
    char sibling[96]; /* its path begins with the directory's */
    snprintf(sibling, sizeof sibling, "%s-2", directory);
    FILE *f = fopen(sibling, "w");
    assert_true(f && fputs("{}", f) >= 0 && fclose(f) == 0);
    assert_int_equal(symlink(sibling, scratch_path(directory, "tokenizer.json")), 0);
    refused(directory, LINNET_INVALID, "outside the model's directory");
    remove(sibling);
    remove(scratch_path(directory, "tokenizer.json"));
    assert_int_equal(symlink("absent", scratch_path(directory, "tokenizer.json")), 0);
    refused(directory, LINNET_IO, "tokenizer.json");
    scratch_remove(directory);
}

/* CACHE/snapshots/REVISION/file -> CACHE/blobs/HASH, as Hugging Face's downloader leaves it. */
static void download_cache(void **state)
{
    (void)state;
    char *cache = scratch_create(), blobs[128], snapshots[128], revision[160];
    snprintf(blobs, sizeof blobs, "%s/blobs", cache);
    snprintf(snapshots, sizeof snapshots, "%s/snapshots", cache);
    snprintf(revision, sizeof revision, "%s/abc", snapshots);
    assert_int_equal(mkdir(blobs, 0700) | mkdir(snapshots, 0700) | mkdir(revision, 0700), 0);
    scratch_write(blobs, "h1", one_tensor, sizeof one_tensor - 1);
    scratch_text(blobs, "h2", "{}");
    scratch_text(cache, "secret", "{}");
    assert_int_equal(symlink("../../blobs/h1", scratch_path(revision, "model.safetensors")), 0);
    assert_int_equal(symlink("../../blobs/h2", scratch_path(revision, "config.json")), 0);
    checkpoint_close(open_good(revision));
    assert_int_equal(symlink("../../secret", scratch_path(revision, "tokenizer.json")), 0);
    refused(revision, LINNET_INVALID, "outside the model's directory");
    scratch_remove(revision);
    scratch_remove(snapshots);
    scratch_remove(blobs);
    scratch_remove(cache);
}

/* ---- GGUF files -------------------------------------------------------------------------- */

static void gguf_edge_cases(void **state)
{
    (void)state;
    char *directory = scratch_create();
    const char *path = scratch_path(directory, "m.gguf");
    struct strbuf b = {0};
    put_header(&b, 3, 2, 0);
    put_tensor(&b, "output_norm.weight", 0, 8, 0, 0);
    put_tensor(&b, "model.norm.weight", 0, 8, 0, 32);
    put_data(&b, 32, 64);
    scratch_write(directory, "m.gguf", b.data, b.size);
    refused(path, LINNET_FORMAT, "tensor model.norm.weight is there twice");

    strbuf_clear(&b), put_header(&b, 3, 0, 1), put_key_u32(&b, "tokenizer.chat_template", 1);
    scratch_write(directory, "m.gguf", b.data, b.size);
    refused(path, LINNET_FORMAT, "tokenizer.chat_template");
    strbuf_clear(&b), put_header(&b, 3, 0, 1);
    put_key(&b, "tokenizer.chat_template", GGUF_STRING), put_u64(&b, 3);
    strbuf_append(&b, "a\0b", 3);
    scratch_write(directory, "m.gguf", b.data, b.size);
    refused(path, LINNET_FORMAT, "tokenizer.chat_template");
    refused(scratch_path(directory, "absent"), LINNET_IO, "absent");
    refused("", LINNET_IO, "give a GGUF file");
    strbuf_free(&b);
    scratch_remove(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(gguf_equals_directory),
        cmocka_unit_test(nano_directory),
        cmocka_unit_test(reference_models),
        cmocka_unit_test(real_model_opens_fast),
        cmocka_unit_test(published_directories),
        cmocka_unit_test(indexes_that_lie),
        cmocka_unit_test(json_files),
        cmocka_unit_test(chat_templates),
        cmocka_unit_test(links),
        cmocka_unit_test(download_cache),
        cmocka_unit_test(gguf_edge_cases),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
