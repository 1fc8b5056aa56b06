/* GGUF files: every value type, split sets, and files that are broken on purpose. */
#include "gguf_builder.h"
#include "scratch.h"

#include "base/memory.h"

/* Opens, fails the test if that works or if the message does not contain `word`. */
static void refused(const struct strbuf *b, linnet_status status, const char *word)
{
    struct gguf *g;
    linnet_error err;
    if (gguf_open_memory(b->data, b->size, "test", &g, &err) == LINNET_OK)
        fail_msg("opened what should be refused for \"%s\"", word);
    if (!strstr(err.message, word)) fail_msg("expected \"%s\" in: %s", word, err.message);
    assert_int_equal(err.status, status);
}

static void values_of_every_type(void **state)
{
    (void)state;
    struct strbuf b = {0};
    put_header(&b, 2, 0, 14);
    put_key(&b, "u8", GGUF_U8), strbuf_char(&b, (char)200);
    put_key(&b, "i8", GGUF_I8), strbuf_char(&b, (char)-3);
    put_key(&b, "u16", GGUF_U16), strbuf_append(&b, "\xff\xff", 2);
    put_key(&b, "i16", GGUF_I16), strbuf_append(&b, "\xff\xff", 2);
    put_key(&b, "u32", GGUF_U32), put_u32(&b, 4000000000u);
    put_key(&b, "i32", GGUF_I32), put_u32(&b, (uint32_t)-7);
    put_key(&b, "f32", GGUF_F32), put_u32(&b, f32_bits(0.5f));
    put_key(&b, "bool", GGUF_BOOL), strbuf_char(&b, 1);
    put_key(&b, "string", GGUF_STRING), put_string(&b, "h\xc3\xa9\x1b!");
    put_key(&b, "u64", GGUF_U64), put_u64(&b, 1ull << 63);
    put_key(&b, "i64", GGUF_I64), put_u64(&b, (uint64_t)INT64_MIN);
    put_key(&b, "f64", GGUF_F64), put_u64(&b, 0x3ff8000000000000ull);
    put_key_array(&b, "strings", GGUF_STRING, 2), put_string(&b, "a\xff"), put_string(&b, "");
    put_key_array(&b, "numbers", GGUF_I16, 3), strbuf_append(&b, "123456", 6);

    struct gguf *g;
    linnet_error err;
    assert_ok(gguf_open_memory(b.data, b.size, "test", &g, &err), err);
    static const struct {
        const char *key;
        int64_t value;
    } integers[] = {{"u8", 200}, {"i8", -3},           {"u16", 65535},    {"i16", -1},
                    {"i32", -7}, {"u32", 4000000000u}, {"i64", INT64_MIN}};
    int64_t i;
    double d;
    bool yes;
    struct view v;
    struct gguf_array a;
    for (size_t k = 0; k < sizeof integers / sizeof integers[0]; k++) {
        assert_true(gguf_integer(g, integers[k].key, &i));
        assert_true(i == integers[k].value);
    }
    assert_false(gguf_integer(g, "u64", &i)); /* does not fit */
    assert_false(gguf_integer(g, "f32", &i));
    assert_false(gguf_integer(g, "absent", &i));
    assert_true(gguf_number(g, "f32", &d) && d == 0.5);
    assert_true(gguf_number(g, "f64", &d) && d == 1.5);
    assert_false(gguf_number(g, "u8", &d));
    assert_true(gguf_bool(g, "bool", &yes) && yes);
    assert_true(gguf_string(g, "string", &v) && v.size == 5);
    assert_true(gguf_array(g, "strings", &a) && a.element == GGUF_STRING && a.count == 2);
    assert_int_equal(a.size, 18);
    assert_true(gguf_array(g, "numbers", &a) && a.element == GGUF_I16 && a.count == 3);
    assert_memory_equal(a.data, "123456", 6);

    static const char *const shown[] = {
        "200", "-3",  "65535",     "-1",          NULL,
        "-7",  "0.5", "true",      "h\xc3\xa9?!", "9223372036854775808",
        NULL,  "1.5", "string[2]", "i16[3]"};
    char text[32];
    assert_int_equal(gguf_key_count(g), 14);
    for (size_t k = 0; k < 14; k++) {
        gguf_describe(g, k, text, sizeof text);
        if (shown[k]) assert_string_equal(text, shown[k]);
    }
    gguf_describe(g, 8, text, 3); /* é does not fit behind h */
    assert_string_equal(text, "h");
    v = gguf_key(g, 8);
    assert_true(v.size == 6 && memcmp(v.data, "string", 6) == 0);
    gguf_close(g);
    strbuf_free(&b);
}

static void tensors_are_slowest_first(void **state)
{
    (void)state;
    struct strbuf b = {0};
    put_header(&b, 3, 2, 1);
    put_key_u32(&b, "general.alignment", 64);
    put_tensor(&b, "m", 3, 32, 8, 64); /* Q8_0: 34 bytes a row */
    put_tensor(&b, "v", 0, 2, 0, 0);
    put_data(&b, 64, 64 + 3 * 34);
    struct gguf *g;
    linnet_error err;
    assert_ok(gguf_open_memory(b.data, b.size, "test", &g, &err), err);
    assert_int_equal(gguf_tensor_count(g), 2);
    const struct tensor *m = gguf_tensor(g, 0), *v = gguf_tensor(g, 1);
    assert_string_equal(m->name, "m");
    assert_true(m->dtype == DTYPE_Q8_0 && m->n_dims == 2 && m->shape[0] == 3 && m->shape[1] == 32);
    assert_true(m->bytes == 102 && *(const uint8_t *)m->data == 64);
    assert_true(v->n_dims == 1 && v->shape[0] == 2 && v->bytes == 8);
    gguf_close(g);

    b.size -= 1; /* the last byte is missing */
    refused(&b, LINNET_FORMAT, "tensor m");
    strbuf_free(&b);
}

/* One tensor, described in full by the caller. */
static void refused_tensor(uint64_t rows, uint64_t columns, uint32_t type, uint64_t offset,
                           linnet_status status, const char *word)
{
    struct strbuf b = {0};
    put_header(&b, 3, 1, 0);
    put_tensor(&b, "token_embd.weight", rows, columns, type, offset);
    put_data(&b, 32, 4096);
    refused(&b, status, word);
    strbuf_free(&b);
}

static void odd_tensors(void **state)
{
    (void)state;
    refused_tensor(1, 0, 0, 0, LINNET_FORMAT, "token_embd.weight: dimension 0");
    refused_tensor(1, 31, 8, 0, LINNET_FORMAT, "multiple of Q8_0's block of 32");
    refused_tensor(1, 128, 12, 0, LINNET_FORMAT, "multiple of Q4_K's block of 256");
    refused_tensor(1, 32, 0, 4, LINNET_FORMAT, "offset 4 is not a multiple");
    refused_tensor(1, 32, 0, 4096, LINNET_FORMAT, "expected 128 bytes at offset 4096");
    refused_tensor(1ull << 32, 1ull << 30, 0, 0, LINNET_FORMAT, "token_embd.weight");
    refused_tensor(1ull << 62, 1, 0, 0, LINNET_FORMAT, "token_embd.weight");
    for (uint32_t type = 0; type < 300; type++) {
        static const uint32_t known[] = {0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30};
        bool supported = false;
        char word[40];
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) supported |= type == known[i];
        snprintf(word, sizeof word, "token_embd.weight: ggml type %u ", type);
        if (!supported) refused_tensor(1, 256, type, 0, LINNET_UNSUPPORTED, word);
    }
}

static void odd_metadata(void **state)
{
    (void)state;
    struct strbuf b = {0};
    for (uint32_t version = 0; version < 9; version++) {
        if (version == 2 || version == 3) continue;
        strbuf_clear(&b), put_header(&b, version, 0, 0);
        refused(&b, LINNET_UNSUPPORTED, "version 2 or 3");
    }
    strbuf_clear(&b), put_header(&b, 0x03000000, 0, 0);
    refused(&b, LINNET_UNSUPPORTED, "big-endian");
    strbuf_clear(&b), strbuf_text(&b, "GGML....................");
    refused(&b, LINNET_FORMAT, "not a GGUF file");

    strbuf_clear(&b), put_header(&b, 3, 0, 1), put_key(&b, "flag", GGUF_BOOL), strbuf_char(&b, 2);
    refused(&b, LINNET_FORMAT, "key flag");
    strbuf_clear(&b), put_header(&b, 3, 0, 1), put_key(&b, "", GGUF_U64), put_u64(&b, 1);
    refused(&b, LINNET_FORMAT, "key 1: expected 1 to 65535 bytes");
    strbuf_clear(&b), put_header(&b, 3, 0, 1), put_key_array(&b, "deep", GGUF_ARRAY, 1);
    for (int i = 0; i < 200000; i++) put_u32(&b, GGUF_ARRAY), put_u64(&b, 1);
    refused(&b, LINNET_UNSUPPORTED, "key deep: an array of arrays");
    strbuf_clear(&b), put_header(&b, 3, 0, 1), put_key_array(&b, "odd", 13, 1), put_u64(&b, 0);
    refused(&b, LINNET_FORMAT, "key odd: expected an element type");

    static const uint32_t alignments[] = {0, 1, 4, 24, 33, 1u << 17, 1u << 31};
    for (size_t i = 0; i < sizeof alignments / sizeof alignments[0]; i++) {
        strbuf_clear(&b), put_header(&b, 3, 0, 1);
        put_key_u32(&b, "general.alignment", alignments[i]);
        refused(&b, LINNET_FORMAT, "general.alignment");
    }
    strbuf_clear(&b), put_header(&b, 3, 0, 1), put_key_u32(&b, "split.count", 2);
    refused(&b, LINNET_UNSUPPORTED, "split");
    strbuf_free(&b);
}

static void vocabulary_cross_checks(void **state)
{
    (void)state;
    struct strbuf tokens = {0}, b = {0};
    put_header(&tokens, 3, 0, 2);
    put_key_array(&tokens, "tokenizer.ggml.tokens", GGUF_STRING, 2);
    put_string(&tokens, "a"), put_string(&tokens, "\xff");

    strbuf_append(&b, tokens.data, tokens.size);
    put_key_u32(&b, "tokenizer.ggml.eos_token_id", 1);
    struct gguf *g;
    linnet_error err;
    assert_ok(gguf_open_memory(b.data, b.size, "test", &g, &err), err);
    gguf_close(g);

    strbuf_clear(&b), strbuf_append(&b, tokens.data, tokens.size);
    put_key_u32(&b, "tokenizer.ggml.bos_token_id", 2);
    refused(&b, LINNET_FORMAT, "tokenizer.ggml.bos_token_id: expected a token id below 2, found 2");
    strbuf_clear(&b), strbuf_append(&b, tokens.data, tokens.size);
    put_key_array(&b, "tokenizer.ggml.scores", GGUF_F32, 3), put_data(&b, 1, 12);
    refused(&b, LINNET_FORMAT, "tokenizer.ggml.scores: expected 2 entries");
    strbuf_clear(&b), strbuf_append(&b, tokens.data, tokens.size);
    put_key_array(&b, "tokenizer.ggml.scores", GGUF_I32, 2), put_data(&b, 1, 8);
    refused(&b, LINNET_FORMAT, "tokenizer.ggml.scores: expected an array of f32");
    static const char *const merges[] = {"", "ab", " b", "a ", " ", "a b c", "a  b"};
    for (size_t i = 0; i < sizeof merges / sizeof merges[0]; i++) {
        strbuf_clear(&b), strbuf_append(&b, tokens.data, tokens.size);
        put_key_array(&b, "tokenizer.ggml.merges", GGUF_STRING, 2);
        put_string(&b, "a b"), put_string(&b, merges[i]);
        refused(&b, LINNET_FORMAT, "tokenizer.ggml.merges: entry 1");
    }
    strbuf_free(&tokens);
    strbuf_free(&b);
}

/* Published reports of what broke other engines: each must name what is wrong. */
static void broken_files(void **state)
{
    (void)state;
    static const struct {
        const char *name, *word;
    } cases[] = {
        {"g06_nkv_2p63", "9223372036854775808 keys"},
        {"g07_ntensors_2p61", "2305843009213693952 tensors"},
        {"g07b_ntensors_minus1", "18446744073709551615 tensors"},
        {"g08_key_len_huge", "key 11 of 11"},
        {"g09_str_len_wrap", "key general.name"},
        {"g10_array_len_huge", "key x"},
        {"g10b_array_bytes_wrap", "key x"},
        {"g11b_value_type_99", "key x: expected a value type 0 to 12, found 99"},
        {"g16_ndims_5", "tensor t: expected 1 to 4 dimensions, found 5"},
        {"g17_ndims_2p32", "tensor t: expected 1 to 4 dimensions, found 4294967295"},
        {"g19_dims_product_wrap", "t: dimension"},
        {"g20_bytes_wrap_after_pad", "tensor t:"},
        {"g21_negative_dim", "t: dimension"},
        {"g22_dup_tensor", "token_embd.weight appears twice"},
        {"g23_dup_key", "key llama.embedding_length appears twice"},
        {"g25_offset_past_eof", "tensor t:"},
        {"g25b_offset_wrap", "tensor t:"},
        {"g26_overlap", "tensors a and b overlap"},
        {"g27_type_200", "t: ggml type 200"},
        {"g28_type_4_removed", "t: ggml type 4 "},
        {"g29_name_200_bytes", "name of tensor 1"},
        {"g29b_name_nul", "name of tensor 1"},
        {"g31_token_type_u8", "tokenizer.ggml.token_type"},
        {"g31b_token_type_short", "tokenizer.ggml.token_type: expected 4 entries"},
        {"g31c_merge_without_space", "tokenizer.ggml.merges: entry 0"},
        {"g31d_eos_out_of_range", "tokenizer.ggml.eos_token_id"},
        {"g40_key_not_utf8", "UTF-8"},
    };
    double start = cpu_seconds();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[64];
        struct gguf *g;
        linnet_error err;
        snprintf(name, sizeof name, "files/%s.gguf", cases[i].name);
        if (gguf_open(data_path(name), &g, &err) == LINNET_OK) fail_msg("%s was opened", name);
        assert_true(err.status == LINNET_FORMAT || err.status == LINNET_UNSUPPORTED);
        if (!strstr(err.message, cases[i].word))
            fail_msg("expected \"%s\" in: %s", cases[i].word, err.message);
    }
    assert_true(cpu_seconds() - start < 1);
}

/* Where the data section of a good file begins: the lowest tensor. */
static size_t head_size(const char *bytes, size_t size)
{
    struct gguf *g;
    linnet_error err;
    assert_ok(gguf_open_memory(bytes, size, "test", &g, &err), err);
    size_t head = size;
    for (size_t i = 0; i < gguf_tensor_count(g); i++) {
        size_t begin = (size_t)((const char *)gguf_tensor(g, i)->data - bytes);
        if (begin < head) head = begin;
    }
    gguf_close(g);
    return head;
}

/* Each shorter file is a separate allocation, so that a sanitizer sees one byte too many. */
static void every_truncation_is_refused(void **state)
{
    (void)state;
    size_t size;
    char *bytes = load_file(data_path("gguf/qwen2-nano-f32.gguf"), &size);
    size_t head = head_size(bytes, size);
    assert_true(head > 1000 && head < size);
    for (size_t n = 0; n < size; n += n < head ? 1 : 4097) {
        struct gguf *g;
        linnet_error err;
        char *copy = malloc(n ? n : 1);
        memcpy(copy, bytes, n);
        if (gguf_open_memory(copy, n, "test", &g, &err) == LINNET_OK)
            fail_msg("opened the first %zu of %zu bytes", n, size);
        free(copy);
    }
    free(bytes);
}

/* A wrong byte may go unnoticed (a letter of a token), but all that is then handed out must lie
 * inside the file. */
static void every_wrong_byte_is_harmless(void **state)
{
    (void)state;
    size_t size, opened = 0;
    char *bytes = load_file(data_path("gguf/qwen2-nano-f32.gguf"), &size);
    size_t head = head_size(bytes, size);
    for (size_t i = 0; i < 2 * head; i++) {
        struct gguf *g;
        linnet_error err;
        char flip = i % 2 ? (char)0xFF : (char)0x80, *at = bytes + i / 2;
        *at ^= flip;
        if (gguf_open_memory(bytes, size, "test", &g, &err) == LINNET_OK) {
            for (size_t t = 0; t < gguf_tensor_count(g); t++) {
                const struct tensor *p = gguf_tensor(g, t);
                const char *data = p->data;
                assert_true(data >= bytes && p->bytes <= size - (size_t)(data - bytes));
            }
            gguf_close(g);
            opened++;
        }
        *at ^= flip;
    }
    assert_true(opened > 0 && opened < 2 * head);
    free(bytes);
}

static void large_vocabulary_is_fast(void **state)
{
    (void)state;
    enum { N = 152064 };
    struct strbuf b = {0};
    char word[32];
    put_header(&b, 3, 0, 3);
    put_key_array(&b, "tokenizer.ggml.tokens", GGUF_STRING, N);
    for (int i = 0; i < N; i++) snprintf(word, sizeof word, "token%d", i), put_string(&b, word);
    put_key_array(&b, "tokenizer.ggml.token_type", GGUF_I32, N);
    for (int i = 0; i < N; i++) put_u32(&b, 1);
    put_key_array(&b, "tokenizer.ggml.merges", GGUF_STRING, N);
    for (int i = 0; i < N; i++) snprintf(word, sizeof word, "to ken%d", i), put_string(&b, word);
    struct gguf *g;
    linnet_error err;
    double start = cpu_seconds();
    assert_ok(gguf_open_memory(b.data, b.size, "test", &g, &err), err);
    for (int i = 0; i < 1000; i++) assert_true(gguf_has(g, "tokenizer.ggml.merges"));
    assert_true(cpu_seconds() - start < 0.25); /* some 5 ms; sanitizers take more */
    gguf_close(g);
    strbuf_free(&b);
}

/* ---- split sets -------------------------------------------------------------------------- */

/* What to write, and what to do wrong in part 2. */
struct part_plan {
    uint32_t number, count, tensors, layers;
    const char *extra; /* a key only this part has */
    const char *tensor;
};

static void write_part(const char *directory, const char *file, const struct part_plan *plan)
{
    struct strbuf b = {0};
    put_header(&b, 3, 1, plan->extra ? 5 : 4);
    put_key_u32(&b, "split.no", plan->number);
    put_key_u32(&b, "split.count", plan->count);
    put_key_u32(&b, "split.tensors.count", plan->tensors);
    put_key_u32(&b, "llama.block_count", plan->layers);
    if (plan->extra) put_key_u32(&b, plan->extra, 1);
    put_tensor(&b, plan->tensor, 0, 2, 0, 0);
    put_data(&b, 32, 8);
    scratch_write(directory, file, b.data, b.size);
    strbuf_free(&b);
}

static const struct part_plan good_parts[3] = {
    {0, 3, 3, 1, "general.name", "a"}, {1, 3, 3, 1, NULL, "b"}, {2, 3, 3, 1, NULL, "c"}};
static const char *const part_names[3] = {"m-00001-of-00003.gguf", "m-00002-of-00003.gguf",
                                          "m-00003-of-00003.gguf"};

static void split_sets_open_from_any_part(void **state)
{
    (void)state;
    char *directory = scratch_create();
    for (int i = 0; i < 3; i++) write_part(directory, part_names[i], &good_parts[i]);
    for (int i = 0; i < 3; i++) {
        struct gguf *g;
        linnet_error err;
        const char *path = scratch_path(directory, part_names[i]);
        assert_ok(gguf_open(path, &g, &err), err);
        assert_string_equal(gguf_path(g), path);
        assert_int_equal(gguf_tensor_count(g), 3);
        assert_string_equal(gguf_tensor(g, 2)->name, "c");
        assert_memory_equal(gguf_tensor(g, 2)->data, "\0\1\2\3\4\5\6\7", 8);
        assert_true(gguf_has(g, "general.name")); /* only the first part has it */
        gguf_close(g);
    }
    scratch_remove(directory);
}

static void refused_set(const char *directory, int given, const char *word)
{
    struct gguf *g;
    linnet_error err;
    if (gguf_open(scratch_path(directory, part_names[given]), &g, &err) == LINNET_OK)
        fail_msg("opened a set that should be refused for \"%s\"", word);
    if (!strstr(err.message, word)) fail_msg("expected \"%s\" in: %s", word, err.message);
}

static void split_sets_must_agree(void **state)
{
    (void)state;
    static const struct {
        struct part_plan second;
        const char *word;
    } wrong[] = {
        {{2, 3, 3, 1, NULL, "b"}, "m-00002-of-00003.gguf: expected split.no 1"},
        {{1, 4, 3, 1, NULL, "b"}, "m-00002-of-00003.gguf: expected split.no 1 and split.count 3"},
        {{1, 3, 4, 1, NULL, "b"}, "key split.tensors.count does not agree"},
        {{1, 3, 3, 2, NULL, "b"}, "key llama.block_count does not agree"},
        {{1, 3, 3, 1, "general.type", "b"}, "key general.type does not agree"},
        {{1, 3, 3, 1, NULL, "a"}, "tensor a appears twice"},
    };
    char *directory = scratch_create();
    for (int i = 0; i < 3; i++) write_part(directory, part_names[i], &good_parts[i]);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        write_part(directory, part_names[1], &wrong[i].second);
        refused_set(directory, 0, wrong[i].word);
    }
    remove(scratch_path(directory, part_names[1]));
    refused_set(directory, 0, "m-00002-of-00003.gguf");
    refused_set(directory, 2, "part 2 of 3 is needed");

    struct part_plan plan = good_parts[1]; /* all parts promise four tensors */
    for (int i = 0; i < 3; i++) {
        plan = good_parts[i];
        plan.tensors = 4;
        write_part(directory, part_names[i], &plan);
    }
    refused_set(directory, 0, "split.tensors.count: expected 4 tensors, found 3");

    struct gguf *g;
    linnet_error err;
    write_part(directory, "other.gguf", &good_parts[0]);
    assert_int_equal(gguf_open(scratch_path(directory, "other.gguf"), &g, &err), LINNET_FORMAT);
    assert_non_null(strstr(err.message, "-00001-of-00003.gguf"));
    scratch_remove(directory);
}

static void files_that_are_none(void **state)
{
    (void)state;
    char *directory = scratch_create();
    struct gguf *g;
    linnet_error err;
    assert_int_equal(gguf_open(scratch_path(directory, "absent.gguf"), &g, &err), LINNET_IO);
    assert_non_null(strstr(err.message, "absent.gguf"));
    assert_int_equal(gguf_open(directory, &g, &err), LINNET_IO);
    assert_non_null(strstr(err.message, "found a directory"));
    scratch_text(directory, "empty.gguf", "");
    assert_int_equal(gguf_open(scratch_path(directory, "empty.gguf"), &g, &err), LINNET_FORMAT);
    assert_non_null(strstr(err.message, "empty"));
    assert_int_equal(mkfifo(scratch_path(directory, "pipe"), 0600), 0);
    assert_int_equal(gguf_open(scratch_path(directory, "pipe"), &g, &err), LINNET_IO);
    assert_non_null(strstr(err.message, "regular file"));
    scratch_remove(directory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_of_every_type),
        cmocka_unit_test(tensors_are_slowest_first),
        cmocka_unit_test(odd_tensors),
        cmocka_unit_test(odd_metadata),
        cmocka_unit_test(vocabulary_cross_checks),
        cmocka_unit_test(broken_files),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(every_wrong_byte_is_harmless),
        cmocka_unit_test(large_vocabulary_is_fast),
        cmocka_unit_test(split_sets_open_from_any_part),
        cmocka_unit_test(split_sets_must_agree),
        cmocka_unit_test(files_that_are_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
