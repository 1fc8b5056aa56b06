/* Streaming back to text: one by one equals the whole, stop strings never leak. */
#include "tokenizer_check.h"

static struct detokenizer *create(const struct tokenizer *t, bool skip_special, bool include_stop,
                                  const char *const *stops, size_t n)
{
    struct detokenizer *d;
    linnet_error err;
    struct detokenizer_options options = {skip_special, stops, n, include_stop};
    assert_ok(detokenizer_create(t, &options, &d, &err), err);
    return d;
}

static void push_text(struct strbuf *out, struct detokenizer *d, int32_t id)
{
    const char *text;
    size_t size;
    detokenizer_push(d, id, &text, &size);
    strbuf_append(out, text, size);
}

static void finish_text(struct strbuf *out, struct detokenizer *d)
{
    const char *text;
    size_t size;
    detokenizer_finish(d, &text, &size);
    strbuf_append(out, text, size);
}

/* Every id alone, against Hugging Face's decoder, and ids that no tokenizer has. */
static void test_every_id(void **state)
{
    (void)state;
    static const char *const names[] = {"qwen", "llama", "smol", "spm"};
    json_t *cases = load_json(data_path("tokenizers/cases.json"));
    for (size_t f = 0; f < 4; f++) {
        char file[64];
        snprintf(file, sizeof file, "tokenizers/%s.json", names[f]);
        struct tokenizer *t = open_tokenizer(data_path(file));
        const json_t *singles = json_object_get(json_object_get(cases, "singles"), names[f]);
        assert_int_equal(json_array_size(singles), tokenizer_size(t));
        struct detokenizer *d = create(t, false, false, NULL, 0);
        int32_t outside[] = {-1, INT32_MIN, INT32_MAX, tokenizer_size(t), tokenizer_size(t) + 300};
        for (int32_t id = 0; id < tokenizer_size(t); id++) {
            struct strbuf text = {0}, whole = {0};
            linnet_error err;
            const json_t *expected = json_array_get(singles, (size_t)id);
            push_text(&text, d, id);
            finish_text(&text, d);
            detokenizer_reset(d);
            assert_ok(tokenizer_decode(t, &id, 1, false, &whole, &err), err);
            assert_int_equal(text.size, json_string_length(expected));
            assert_memory_equal(strbuf_cstr(&text), json_string_value(expected), text.size);
            assert_int_equal(whole.size, text.size);
            assert_memory_equal(strbuf_cstr(&whole), strbuf_cstr(&text), text.size);
            strbuf_free(&text);
            strbuf_free(&whole);
        }
        for (size_t i = 0; i < sizeof outside / sizeof outside[0]; i++) {
            struct strbuf text = {0};
            size_t size;
            push_text(&text, d, outside[i]);
            finish_text(&text, d);
            assert_int_equal(text.size, 0);
            tokenizer_bytes(t, outside[i], &size);
            assert_int_equal(size, 0);
            strbuf_free(&text);
        }
        detokenizer_destroy(d);
        tokenizer_close(t);
    }
    json_decref(cases);
}

static void test_split_characters(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer(data_path("tokenizers/llama.json"));
    struct token_list ids = encode(t, "\xF0\x9F\xA6\x99!", 5, false, true);
    struct detokenizer *d = create(t, false, false, NULL, 0);
    const char *text;
    size_t size;
    assert_int_equal(ids.count, 5);
    for (size_t i = 0; i < 3; i++) {
        detokenizer_push(d, ids.ids[i], &text, &size);
        assert_int_equal(size, 0);
    }
    detokenizer_push(d, ids.ids[3], &text, &size);
    assert_int_equal(size, 4);
    assert_memory_equal(text, "\xF0\x9F\xA6\x99", 4);
    /* Half a character, then another: one U+FFFD at once; at the end of the answer likewise. */
    detokenizer_reset(d);
    detokenizer_push(d, ids.ids[0], &text, &size);
    detokenizer_push(d, ids.ids[1], &text, &size);
    assert_int_equal(size, 0);
    detokenizer_push(d, ids.ids[4], &text, &size);
    assert_int_equal(size, 4);
    assert_memory_equal(text, "\xEF\xBF\xBD!", 4);
    detokenizer_push(d, ids.ids[0], &text, &size);
    assert_int_equal(size, 0);
    detokenizer_finish(d, &text, &size);
    assert_int_equal(size, 3);
    detokenizer_destroy(d);
    token_list_free(&ids);
    tokenizer_close(t);
}

static void expect_spm(const struct tokenizer *t, const char *tokens, bool skip, const char *text)
{
    struct strbuf out = {0};
    struct detokenizer *d = create(t, skip, false, NULL, 0);
    char copy[200];
    snprintf(copy, sizeof copy, "%s", tokens);
    for (char *token = strtok(copy, "|"); token; token = strtok(NULL, "|")) {
        assert_true(tokenizer_find(t, token) >= 0);
        push_text(&out, d, tokenizer_find(t, token));
    }
    finish_text(&out, d);
    assert_string_equal(strbuf_cstr(&out), text);
    strbuf_free(&out);
    detokenizer_destroy(d);
}

/* Values of Hugging Face's decoder. */
static void test_sentencepiece(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer(data_path("tokenizers/spm.json"));
#define B "\xE2\x96\x81"
#define R "\xEF\xBF\xBD"
    expect_spm(t, B "|" B "the", false, " the"); /* one blank, once */
    expect_spm(t, B B "|a", false, " a");
    expect_spm(t, "<0x20>|a", false, "a");
    expect_spm(t, "<s>|" B "the|" B "a", true, "the a");
    expect_spm(t, "<s>|" B "the", false, "<s> the");
    expect_spm(t, "<0xE6>|<0x97>|<0xA5>|a", false,
               "\xE6\x97\xA5"
               "a");
    expect_spm(t, "<0xE6>|<0x97>|a", false, R R "a"); /* one for each byte */
    expect_spm(t, "<0xE6>|<0x97>", false, R R);
    expect_spm(t, "<0xE6>|</s>|<0x97>|<0xA5>", true, "\xE6\x97\xA5");  /* skipped: not there */
    expect_spm(t, "<0xC6>|<0x33>|<0x33>|a|<0x33>", false, R R R "a3"); /* to the run's end */
    tokenizer_close(t);
}

/* ---- stop strings ------------------------------------------------------------------------- */

struct stop_case {
    const char *text;
    const char *stops[3];
    bool include;
    const char *expected;
    size_t stop; /* which one, from 1; 0: none */
};

static void test_stops(void **state)
{
    (void)state;
    static const struct stop_case cases[] = {
        {"The capital of Japan is", {"of Jap"}, false, "The capital ", 1},
        {"The capital of Japan is", {"of Jap"}, true, "The capital of Jap", 1},
        {"The capital of Japan is", {"of Jap", "capital of Japan", "of"}, false, "The capital ", 3},
        {"The capital", {"The"}, false, "", 1},
        {"abcabd", {"abd"}, false, "abc", 1},
        {"aaab", {"aab"}, false, "a", 1},
        {"xyz", {"yz", "xyz", "z"}, false, "", 2}, /* all end here: the longest */
        {"abcd", {"abce", "bcd"}, false, "a", 2},
        {"abc", {"abcd"}, false, "abc", 0}, /* given out at the end */
        {"n\xC3\xA9!", {"\xC3\xA9"}, false, "n", 1},
        {"ab", {"b"}, false, "a", 1},
    };
    struct tokenizer *t = open_tokenizer(data_path("tokenizers/llama.json"));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct stop_case *c = &cases[i];
        size_t n = 0;
        while (n < 3 && c->stops[n]) n++;
        struct detokenizer *d = create(t, true, c->include, c->stops, n);
        struct token_list ids = encode(t, c->text, strlen(c->text), false, true);
        struct strbuf out = {0};
        bool stopped = false;
        for (size_t k = 0; k < ids.count && !stopped; k++) {
            const char *text;
            size_t size;
            stopped = detokenizer_push(d, ids.ids[k], &text, &size);
            strbuf_append(&out, text, size);
        }
        finish_text(&out, d);
        assert_string_equal(strbuf_cstr(&out), c->expected);
        assert_int_equal(stopped, c->stop != 0);
        assert_int_equal(detokenizer_stop(d), c->stop);
        strbuf_free(&out);
        token_list_free(&ids);
        detokenizer_destroy(d);
    }
    tokenizer_close(t);
}

static void test_stop_refusals(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer(data_path("tokenizers/llama.json"));
    struct detokenizer *d;
    linnet_error err;
    const char *const empty[] = {"a", ""}, *const broken[] = {"\xC3"};
    struct detokenizer_options options = {.stops = empty, .n_stops = 2};
    assert_int_equal(detokenizer_create(t, &options, &d, &err), LINNET_INVALID);
    assert_non_null(strstr(err.message, "stop string 1 is empty"));
    options = (struct detokenizer_options){.stops = broken, .n_stops = 1};
    assert_int_equal(detokenizer_create(t, &options, &d, &err), LINNET_INVALID);
    tokenizer_close(t);
}

/* Where a plain search finds the first stop to be complete: its end, and in *begin its start. */
static size_t search(const char *text, size_t n, const char *const *stops, size_t n_stops,
                     size_t *begin)
{
    for (size_t end = 1; end <= n; end++) {
        *begin = SIZE_MAX;
        for (size_t i = 0; i < n_stops; i++) {
            size_t size = strlen(stops[i]);
            if (size <= end && memcmp(text + end - size, stops[i], size) == 0 &&
                end - size < *begin)
                *begin = end - size;
        }
        if (*begin != SIZE_MAX) return end;
    }
    return 0;
}

/* How much of the end of text could become a stop. */
static size_t held_back(const char *text, size_t n, const char *const *stops, size_t n_stops)
{
    size_t held = 0;
    for (size_t i = 0; i < n_stops; i++)
        for (size_t k = 1; k < strlen(stops[i]) && k <= n; k++)
            if (memcmp(text + n - k, stops[i], k) == 0 && k > held) held = k;
    return held;
}

#define NEXT(random, n) \
    ((size_t)((*(random) = *(random)*6364136223846793005u + 1442695040888963407u) >> 33) % (n))

/* Characters and the tokens that spell them; "\xC3\xA9" and "\xC3\xA8" take two, a byte each. */
static const struct {
    const char *text, *tokens[2];
} units[] = {{"a", {"a"}},   {"t", {"t"}},
             {"at", {"at"}}, {"\xC3\xA9", {"\xC3\x83", "\xC2\xA9"}},
             {"an", {"an"}}, {"\xC3\xA8", {"\xC3\x83", "\xC2\xA8"}}};

/* Pushes one unit, token by token. What is shown must be what a plain search of the whole text
 * would show, after every push. */
static bool push_unit(struct detokenizer *d, const struct tokenizer *t, size_t unit,
                      const char *const *stops, size_t n_stops, bool include, struct strbuf *all,
                      struct strbuf *shown)
{
    bool stopped = false;
    for (size_t k = 0; k < 2 && units[unit].tokens[k]; k++) {
        bool last = k == 1 || !units[unit].tokens[1];
        int32_t id = tokenizer_find(t, units[unit].tokens[k]);
        const char *text;
        size_t size, begin;
        assert_true(id >= 0);
        if (last) strbuf_text(all, units[unit].text);
        stopped = detokenizer_push(d, id, &text, &size);
        strbuf_append(shown, text, size);
        size_t end = search(strbuf_cstr(all), all->size, stops, n_stops, &begin);
        assert_int_equal(stopped, end != 0);
        size_t held = held_back(strbuf_cstr(all), all->size, stops, n_stops);
        size_t want = !end ? all->size - held : include ? end : begin;
        assert_int_equal(shown->size, want);
        assert_memory_equal(strbuf_cstr(shown), strbuf_cstr(all), want);
    }
    return stopped;
}

/* Random texts with random stops, twice with one detokenizer. */
static void check_random_stops(const struct tokenizer *t, uint64_t seed)
{
    char storage[3][12];
    const char *stops[3] = {storage[0], storage[1], storage[2]};
    uint64_t random = seed * 0x9E3779B97F4A7C15u + 1;
    size_t n_stops = NEXT(&random, 4), kinds = 2 + 2 * NEXT(&random, 3);
    bool include = NEXT(&random, 2);
    for (size_t i = 0; i < n_stops; i++) {
        size_t count = 1 + NEXT(&random, 4);
        storage[i][0] = 0;
        for (size_t k = 0; k < count; k++) {
            size_t unit = NEXT(&random, kinds);
            strcat(storage[i], unit == 2 ? "a" : unit == 4 ? "n" : units[unit].text);
        }
    }
    struct detokenizer *d = create(t, false, include, stops, n_stops);
    for (int round = 0; round < 2; round++) {
        struct strbuf all = {0}, shown = {0};
        bool stopped = false;
        for (size_t i = 0; i < 12 && !stopped; i++)
            stopped = push_unit(d, t, NEXT(&random, kinds), stops, n_stops, include, &all, &shown);
        size_t before = shown.size;
        finish_text(&shown, d);
        if (stopped)
            assert_int_equal(shown.size, before);
        else
            assert_string_equal(strbuf_cstr(&shown), strbuf_cstr(&all));
        detokenizer_reset(d);
        strbuf_free(&all);
        strbuf_free(&shown);
    }
    detokenizer_destroy(d);
}

static void test_random_stops(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer(data_path("tokenizers/qwen.json"));
    for (uint64_t seed = 0; seed < 3000; seed++) check_random_stops(t, seed);
    tokenizer_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_id),      cmocka_unit_test(test_split_characters),
        cmocka_unit_test(test_sentencepiece), cmocka_unit_test(test_stops),
        cmocka_unit_test(test_stop_refusals), cmocka_unit_test(test_random_stops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
