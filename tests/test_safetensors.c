/* safetensors files: what the reference library takes is taken, what it refuses is refused. */
#include "support.h"

#include "base/memory.h"
#include "base/strbuf.h"
#include "file/safetensors.h"

static linnet_status open_bytes(const char *header, size_t n_data, struct strbuf *file,
                                struct safetensors *s, linnet_error *err)
{
    uint64_t n = strlen(header);
    strbuf_clear(file);
    strbuf_append(file, &n, 8);
    strbuf_text(file, header);
    for (size_t i = 0; i < n_data; i++) strbuf_char(file, (char)i);
    return safetensors_open_memory(file->data, file->size, "test", s, err);
}

static const struct tensor *find(const struct safetensors *s, const char *name)
{
    for (size_t i = 0; i < s->n_tensors; i++)
        if (strcmp(s->tensors[i].name, name) == 0) return &s->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static void good_headers(void **state)
{
    (void)state;
    struct strbuf file = {0};
    struct safetensors s;
    linnet_error err;
    assert_ok(open_bytes("{\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
                         "\"__metadata__\":{\"format\":\"pt\"},"
                         "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
                         "\"e\":{\"dtype\":\"F16\",\"shape\":[0,9],\"data_offsets\":[4,4]}}  ",
                         16, &file, &s, &err),
              err);
    assert_int_equal(s.n_tensors, 3);
    const struct tensor *a = find(&s, "a"), *b = find(&s, "b"), *e = find(&s, "e");
    assert_true(a->n_dims == 0 && a->bytes == 4 && a->dtype == DTYPE_F32);
    assert_true(b->n_dims == 2 && b->shape[0] == 2 && b->shape[1] == 3 && b->dtype == DTYPE_BF16);
    assert_true(b->bytes == 12 && *(const char *)b->data == 4);
    assert_true(e->bytes == 0 && e->shape[1] == 9);
    safetensors_close(&s);
    assert_ok(open_bytes("{}", 0, &file, &s, &err), err);
    assert_int_equal(s.n_tensors, 0);
    safetensors_close(&s);
    strbuf_free(&file);
}

static void bad_headers(void **state)
{
    (void)state;
#define INFO(dtype, shape, range) \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" range "}"
    static const struct {
        const char *header;
        size_t n_data;
        const char *word;
        linnet_status status;
    } cases[] = {
        {"{\"w\":" INFO("F32", "[1]", "[0,4]"), 4, "header", LINNET_FORMAT},
        {"[1]", 0, "JSON object", LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1]", "[0,4]") ",\"w\":" INFO("F32", "[1]", "[4,8]") "}", 8,
         "duplicate", LINNET_FORMAT},
        {"{\"w\":" INFO("I64", "[1]", "[0,8]") "}", 8, "tensor w: expected dtype",
         LINNET_UNSUPPORTED},
        {"{\"w\":" INFO("F8_E4M3", "[1]", "[0,1]") "}", 1, "\"F8_E4M3\"", LINNET_UNSUPPORTED},
        {"{\"w\":" INFO("F32", "[1,1,1,1,1]", "[0,4]") "}", 4, "tensor w: expected at most 4",
         LINNET_UNSUPPORTED},
        {"{\"w\":" INFO("F32", "[-1]", "[0,4]") "}", 4, "tensor w: dimension 0", LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1.0]", "[0,4]") "}", 4, "tensor w: dimension 0", LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "\"1\"", "[0,4]") "}", 4, "tensor w: expected an array",
         LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[4611686018427387904]", "[0,0]") "}", 0,
         "tensor w:", LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1]", "[0]") "}", 4, "tensor w: expected \"data_offsets\"",
         LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1]", "[0,4,8]") "}", 8, "tensor w: expected \"data_offsets\"",
         LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1]", "[0,8]") "}", 8, "tensor w: its shape needs 4 bytes",
         LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1]", "[4,0]") "}", 8, "tensor w: bytes 4 to 0", LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1]", "[-4,0]") "}", 4, "tensor w: bytes -4", LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1]", "[0,4]") "}", 3, "tensor w: bytes 0 to 4", LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1]", "[0,4]") "}", 5, "last 1 bytes", LINNET_FORMAT},
        {"{\"w\":" INFO("F32", "[1]", "[4,8]") "}", 8, "4 bytes before tensor w", LINNET_FORMAT},
        {"{\"v\":" INFO("F32", "[2]", "[0,8]") ",\"w\":" INFO("F32", "[1]", "[4,8]") "}", 8,
         "tensors v and w overlap", LINNET_FORMAT},
        {"{\"v\":" INFO("F32", "[1]", "[0,4]") ",\"w\":" INFO("F32", "[1]", "[0,4]") "}", 4,
         "overlap", LINNET_FORMAT},
        {"{\"w\":7}", 0, "tensor w: expected an object", LINNET_FORMAT},
        {"{\"w\":{\"shape\":[],\"data_offsets\":[0,4]}}", 4, "tensor w: expected a string",
         LINNET_FORMAT},
        {"{\"__metadata__\":[]}", 0, "__metadata__", LINNET_FORMAT},
        {"{\"__metadata__\":{\"n\":1}}", 0, "key n: expected a string", LINNET_FORMAT},
        {"{\"a\\u0000b\":" INFO("F32", "[1]", "[0,4]") "}", 4, "header", LINNET_FORMAT},
    };
    struct strbuf file = {0};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct safetensors s;
        linnet_error err;
        if (open_bytes(cases[i].header, cases[i].n_data, &file, &s, &err) == LINNET_OK)
            fail_msg("opened %s", cases[i].header);
        if (!strstr(err.message, cases[i].word))
            fail_msg("%s: expected \"%s\" in: %s", cases[i].header, cases[i].word, err.message);
        assert_int_equal(err.status, cases[i].status);
    }
    strbuf_free(&file);
}

static void hostile_headers(void **state)
{
    (void)state;
    struct strbuf file = {0}, header = {0};
    struct safetensors s;
    linnet_error err;
    strbuf_text(&header, "{\"w\":");
    for (int i = 0; i < 1000000; i++) strbuf_char(&header, '[');
    assert_int_equal(open_bytes(strbuf_cstr(&header), 0, &file, &s, &err), LINNET_FORMAT);
    for (int bit = 0; bit < 64; bit++) {
        uint64_t n = 1ull << bit;
        char bytes[16] = "________{}";
        memcpy(bytes, &n, 8);
        assert_int_equal(safetensors_open_memory(bytes, 10, "test", &s, &err),
                         bit == 1 ? LINNET_OK : LINNET_FORMAT);
        if (bit == 1) safetensors_close(&s);
    }
    strbuf_free(&file);
    strbuf_free(&header);
}

static void published_files(void **state)
{
    (void)state;
    static const struct {
        const char *name, *word; /* of the message, or a tensor that must be there */
        bool good;
    } cases[] = {
        {"ok19_space_padded", "a", true},
        {"ok20_empty_and_scalar", "z", true},
        {"ok21_unordered", "b", true},
        {"ok22_metadata", "a", true},
        {"ok23_escaped_name", "a.\xf0\x9f\x98\x80", true},
        {"s09_shape_wrap", "tensor a: the product", false},
        {"s18b_offset_wrap", "after {\"a\": {", false},
    };
    double start = cpu_seconds();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[64];
        struct safetensors s;
        linnet_error err;
        snprintf(name, sizeof name, "%s.safetensors", cases[i].name);
        linnet_status status = safetensors_open_in(data_path("files"), name, &s, &err);
        if (cases[i].good) {
            assert_ok(status, err);
            find(&s, cases[i].word);
            safetensors_close(&s);
        } else {
            assert_int_equal(status, LINNET_FORMAT);
            if (!strstr(err.message, cases[i].word))
                fail_msg("expected \"%s\" in: %s", cases[i].word, err.message);
        }
    }
    assert_true(cpu_seconds() - start < 1);
}

static void every_truncation_is_refused(void **state)
{
    (void)state;
    size_t size;
    uint64_t n_header;
    char *bytes = load_file(data_path("qwen2-nano-f32/model.safetensors"), &size);
    memcpy(&n_header, bytes, 8);
    assert_true(n_header > 1000 && n_header + 8 < size);
    for (size_t n = 0; n < size; n += n < n_header + 8 ? 1 : 4097) {
        struct safetensors s;
        linnet_error err;
        char *copy = malloc(n ? n : 1); /* exactly n bytes, so that a sanitizer sees one more */
        memcpy(copy, bytes, n);
        assert_int_equal(safetensors_open_memory(copy, n, "test", &s, &err), LINNET_FORMAT);
        free(copy);
    }
    free(bytes);
}

static void every_wrong_byte_is_harmless(void **state)
{
    (void)state;
    size_t size;
    uint64_t n_header;
    char *bytes = load_file(data_path("qwen2-nano-f32/model.safetensors"), &size);
    memcpy(&n_header, bytes, 8);
    for (size_t i = 0; i < n_header + 8; i++) {
        struct safetensors s;
        linnet_error err;
        char old = bytes[i];
        bytes[i] = (char)(old ^ 1); /* digits stay digits, mostly */
        if (safetensors_open_memory(bytes, size, "test", &s, &err) == LINNET_OK) {
            for (size_t t = 0; t < s.n_tensors; t++) {
                const char *data = s.tensors[t].data;
                assert_true(data >= bytes && s.tensors[t].bytes <= size - (size_t)(data - bytes));
            }
            safetensors_close(&s);
        }
        bytes[i] = old;
    }
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_headers),
        cmocka_unit_test(bad_headers),
        cmocka_unit_test(hostile_headers),
        cmocka_unit_test(published_files),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(every_wrong_byte_is_harmless),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
