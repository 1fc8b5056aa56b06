/* tokenizer_check.h - opening tokenizers and comparing ids, for the tests of the text room. */
#ifndef LINNET_TESTS_TOKENIZER_CHECK_H
#define LINNET_TESTS_TOKENIZER_CHECK_H

#include "support.h"

#include "base/strbuf.h"
#include "text/tokenizer.h"

static inline struct tokenizer *open_tokenizer(const char *path)
{
    size_t size;
    linnet_error err;
    struct tokenizer *t;
    char *bytes = load_file(path, &size);
    linnet_status status = tokenizer_open_json(bytes, size, path, &t, &err);
    free(bytes);
    assert_ok(status, err);
    return t;
}

static inline struct token_list encode(const struct tokenizer *t, const char *text, size_t n,
                                       bool add_special, bool parse_special)
{
    linnet_error err;
    struct token_list list = {0};
    struct encode_options options = {.add_special = add_special, .parse_special = parse_special};
    assert_ok(tokenizer_encode(t, text, n, &options, &list, &err), err);
    return list;
}

static inline void write_ids(struct strbuf *out, const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++) strbuf_format(out, i ? ",%d" : "%d", (int)ids[i]);
}

static inline void expect_ids(const char *what, const struct token_list *found,
                              const json_t *expected)
{
    bool equal = found->count == json_array_size(expected);
    for (size_t i = 0; i < found->count && equal; i++)
        equal = found->ids[i] == json_integer_value(json_array_get(expected, i));
    if (equal) return;
    struct strbuf text = {0};
    write_ids(&text, found->ids, found->count);
    char *want = json_dumps(expected, JSON_COMPACT);
    fail_msg("%s: expected %s, found [%s]", what, want, strbuf_cstr(&text));
}

/* Encodes a JSON string and compares. */
static inline void expect_encoding(const struct tokenizer *t, const char *what, const json_t *text,
                                   bool add_special, bool parse_special, const json_t *expected)
{
    struct token_list list =
        encode(t, json_string_value(text), json_string_length(text), add_special, parse_special);
    expect_ids(what, &list, expected);
    token_list_free(&list);
}

static inline int32_t *ids_of(const json_t *array, size_t *n)
{
    *n = json_array_size(array);
    int32_t *ids = malloc((*n + 1) * sizeof *ids);
    for (size_t i = 0; i < *n; i++) ids[i] = (int32_t)json_integer_value(json_array_get(array, i));
    return ids;
}

static inline void expect_decoding(const struct tokenizer *t, const json_t *array,
                                   bool skip_special, const json_t *expected)
{
    size_t n;
    linnet_error err;
    struct strbuf out = {0};
    int32_t *ids = ids_of(array, &n);
    assert_ok(tokenizer_decode(t, ids, n, skip_special, &out, &err), err);
    assert_int_equal(out.size, json_string_length(expected));
    assert_memory_equal(strbuf_cstr(&out), json_string_value(expected), out.size);
    strbuf_free(&out);
    free(ids);
}

#endif
