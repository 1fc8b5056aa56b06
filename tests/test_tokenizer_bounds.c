/* Tokenizer files that mean harm, and texts that try to become control tokens. Expected ids are
 * those of Hugging Face's tokenizers 0.23 where it has an opinion. */
#include <time.h>

#include "text/tokenizer_internal.h"
#include "tokenizer_check.h"

struct small {
    const char *added, *normalizer, *pre, *decoder, *vocab, *merges, *options; /* NULL: usual */
};

#define OR(value, usual) ((value) ? (value) : (usual))

/* A tokenizer.json; ' stands for ". */
static char *json_of(const struct small *s)
{
    struct strbuf b = {0};
    strbuf_format(&b,
                  "{'added_tokens':[%s],'normalizer':%s,'pre_tokenizer':%s,'decoder':%s,"
                  "'model':{'type':'BPE','vocab':{%s},'merges':[%s]%s}}",
                  OR(s->added, ""), OR(s->normalizer, "null"), OR(s->pre, "null"),
                  OR(s->decoder, "{'type':'ByteLevel'}"), OR(s->vocab, "'a':0,'b':1"),
                  OR(s->merges, ""), OR(s->options, ""));
    assert_false(b.failed);
    for (size_t i = 0; i < b.size; i++)
        if (b.data[i] == '\'') b.data[i] = '"';
    return b.data;
}

static linnet_status open_small(const struct small *s, struct tokenizer **t, linnet_error *err)
{
    char *text = json_of(s);
    linnet_status status = tokenizer_open_json(text, strlen(text), "small", t, err);
    free(text);
    return status;
}

static void expect_refused(const struct small *s, linnet_status expected, const char *message)
{
    struct tokenizer *t;
    linnet_error err;
    assert_int_equal(open_small(s, &t, &err), expected);
    if (!strstr(err.message, message)) fail_msg("'%s' lacks '%s'", err.message, message);
}

/* Encodes with untrusted ranges and compares the ids, as "1,2,3". */
static void expect_spans(const struct small *s, const char *text, const struct span *spans,
                         size_t n_spans, const char *expected)
{
    struct tokenizer *t;
    linnet_error err;
    struct token_list list = {0};
    struct strbuf ids = {0};
    struct encode_options options = {
        .parse_special = true, .untrusted = spans, .n_untrusted = n_spans};
    assert_ok(open_small(s, &t, &err), err);
    assert_ok(tokenizer_encode(t, text, strlen(text), &options, &list, &err), err);
    write_ids(&ids, list.ids, list.count);
    assert_string_equal(strbuf_cstr(&ids), expected);
    strbuf_free(&ids);
    token_list_free(&list);
    tokenizer_close(t);
}

#define UNTRUSTED(...) \
    (struct span[]){__VA_ARGS__}, sizeof((struct span[]){__VA_ARGS__}) / sizeof(struct span)

/* ---- replacements that grow --------------------------------------------------------------- */

/* Eight steps, each of which makes sixteen of one. */
static char *growing_steps(void)
{
    struct strbuf b = {0};
    for (int i = 0; i < 8; i++)
        strbuf_format(&b, "%s{'type':'Replace','pattern':{'String':'a'},'content':'%s'}",
                      i ? "," : "{'type':'Sequence','normalizers':[", "aaaaaaaaaaaaaaaa");
    strbuf_text(&b, "]}");
    return b.data;
}

static void test_growth(void **state)
{
    (void)state;
    char *steps = growing_steps();
    struct tokenizer *t;
    linnet_error err;
    struct token_list list = {0};
    struct encode_options options = {0};
    struct small s = {.normalizer = steps};
    assert_ok(open_small(&s, &t, &err), err);
    assert_int_equal(tokenizer_encode(t, "a", 1, &options, &list, &err), LINNET_UNSUPPORTED);
    assert_non_null(strstr(err.message, "grow without end"));
    assert_int_equal(list.count, 0);
    assert_ok(tokenizer_encode(t, "b", 1, &options, &list, &err), err);
    assert_int_equal(list.count, 1);
    token_list_free(&list);
    tokenizer_close(t);
    s.added = "{'id':5,'content':'a!','normalized':true}";
    expect_refused(&s, LINNET_UNSUPPORTED, "grow without end");
    free(steps);
}

/* One bound for a whole text, not one for each of its segments. */
static void test_growth_of_segments(void **state)
{
    (void)state;
    struct strbuf step = {0}, text = {0};
    strbuf_text(&step, "{'type':'Replace','pattern':{'String':'a'},'content':'");
    for (int i = 0; i < 8000; i++) strbuf_char(&step, 'b');
    strbuf_text(&step, "'}");
    struct small s = {.normalizer = step.data,
                      .added = "{'id':5,'content':'!','normalized':false}"};
    for (int i = 0; i < 20; i++) strbuf_text(&text, "a!");
    struct tokenizer *t;
    linnet_error err;
    struct token_list list = {0};
    struct encode_options options = {0};
    assert_ok(open_small(&s, &t, &err), err);
    assert_ok(tokenizer_encode(t, "a", 1, &options, &list, &err), err);
    assert_int_equal(tokenizer_encode(t, text.data, text.size, &options, &list, &err),
                     LINNET_UNSUPPORTED);
    token_list_free(&list);
    tokenizer_close(t);
    strbuf_free(&step);
    strbuf_free(&text);
}

static void test_decoder_growth(void **state)
{
    (void)state;
    struct strbuf decoder = {0}, vocab = {0};
    strbuf_text(&decoder, "{'type':'Replace','pattern':{'String':'a'},'content':'");
    for (int i = 0; i < 2000; i++) strbuf_char(&decoder, 'b');
    strbuf_text(&decoder, "'}");
    for (int i = 1; i < 100; i++) strbuf_format(&vocab, "%s'%0*d':%d", i > 1 ? "," : "", i, 0, i);
    for (size_t i = 0; i < vocab.size; i++)
        if (vocab.data[i] == '0' && vocab.data[i + 1] == '0') vocab.data[i] = 'a';
    struct small s = {.decoder = decoder.data, .vocab = vocab.data};
    expect_refused(&s, LINNET_UNSUPPORTED, "decoded, the vocabulary is larger than");
    strbuf_free(&decoder);
    strbuf_free(&vocab);
}

static void test_metaspace(void **state)
{
    (void)state;
    struct small s = {.pre = "{'type':'Metaspace','replacement':'__','prepend_scheme':'never'}"};
    expect_refused(&s, LINNET_FORMAT, "replacement '__': expected one character");
    s = (struct small){.decoder =
                           "{'type':'Metaspace','replacement':'__','prepend_scheme':'never'}"};
    expect_refused(&s, LINNET_FORMAT, "replacement '__': expected one character");
    s = (struct small){.pre = "{'type':'Metaspace','replacement':'_','prepend_scheme':'first'}",
                       .normalizer = "{'type':'Strip','strip_left':true,'strip_right':false}"};
    expect_refused(&s, LINNET_UNSUPPORTED, "prepend_scheme first");
    s.normalizer = "{'type':'Replace','pattern':{'String':'b'},'content':''}";
    expect_refused(&s, LINNET_UNSUPPORTED, "prepend_scheme first");
    s.normalizer = "{'type':'Strip','strip_left':false,'strip_right':true}";
    s.vocab = "'a':0,'_':1";
    expect_spans(&s, "a ", NULL, 0, "1,0");
}

/* ---- sizes -------------------------------------------------------------------------------- */

static void test_sizes(void **state)
{
    (void)state;
    struct small s = {.vocab = "'a':70000,'b':1"};
    expect_refused(&s, LINNET_FORMAT, "token 'a' has id 70000: expected 0 to 65");
    struct strbuf added = {0};
    strbuf_text(&added, "{'id':2,'content':'");
    for (int i = 0; i < 513; i++) strbuf_char(&added, 'x');
    strbuf_text(&added, "'}");
    s = (struct small){.added = added.data};
    expect_refused(&s, LINNET_UNSUPPORTED, "expected at most 512 bytes, found 513");
    strbuf_free(&added);
}

/* No file can know which tokens share a slot: two tables of the same tokens are not alike. */
static void test_seeds(void **state)
{
    (void)state;
    static struct vocabulary v[2];
    static struct merges m[2];
    linnet_error err;
    for (int k = 0; k < 2; k++) {
        assert_ok(vocabulary_create(&v[k], 64, &err), err);
        assert_ok(merges_create(&m[k], 64, &err), err);
        for (int32_t i = 0; i < 64; i++) {
            char written[8];
            int n = snprintf(written, sizeof written, "t%d", (int)i);
            assert_ok(vocabulary_add(&v[k], i, written, (size_t)n, &err), err);
            assert_ok(merges_add(&m[k], i, i, i, i, &err), err);
        }
        assert_int_equal(vocabulary_find(&v[k], "t33", 3), 33);
    }
    bool tokens_alike = true, merges_alike = true;
    for (size_t i = 0; i <= v[0].slot_mask; i++)
        tokens_alike &= v[0].slots[i].id == v[1].slots[i].id;
    for (size_t i = 0; i <= m[0].mask; i++)
        merges_alike &= m[0].slots[i].left == m[1].slots[i].left;
    assert_false(tokens_alike);
    assert_false(merges_alike);
    for (int k = 0; k < 2; k++) {
        vocabulary_free(&v[k]);
        free(m[k].slots);
    }
}

/* ---- control tokens ----------------------------------------------------------------------- */

#define SPECIAL(id, content, more) \
    "{'id':" #id ",'content':'" content "','special':true,'normalized':false" more "}"
#define ADDED(id, content, more) \
    "{'id':" #id ",'content':'" content "','special':false,'normalized':false" more "}"

/* A piece that is written as a special token is that token only where the template wrote it. */
static void test_whole_pieces(void **state)
{
    (void)state;
    struct small s = {.added = SPECIAL(2, "ba", ""), .options = ",'ignore_merges':true"};
    expect_spans(&s, "ba", NULL, 0, "2");
    expect_spans(&s, "ba", UNTRUSTED({0, 2}), "1,0");
    s.pre = "{'type':'ByteLevel','add_prefix_space':false,'use_regex':false}";
    expect_spans(&s, "ba", UNTRUSTED({0, 2}), "1,0");
    s.vocab = "'a':0,'b':1,'ba':2"; /* in the model's vocabulary as well, and made by a merge */
    s.merges = "'b a'";
    expect_spans(&s, "ba", UNTRUSTED({1, 2}), "1,0");
    s.options = NULL;
    expect_spans(&s, "ba", UNTRUSTED({1, 2}), "1,0");
}

static void test_single_characters(void **state)
{
    (void)state;
    struct small s = {.added = SPECIAL(2, "c", "") "," ADDED(3, "d", ",'single_word':true"),
                      .options = ",'unk_token':'b'"};
    expect_spans(&s, "ac", NULL, 0, "0,2");
    expect_spans(&s, "ac", UNTRUSTED({0, 2}), "0,1");
    expect_spans(&s, "ad d", UNTRUSTED({0, 2}), "0,1,1,3"); /* inside a word it is no token */
    s.pre = "{'type':'ByteLevel','add_prefix_space':false,'use_regex':false}";
    expect_spans(&s, "ac", UNTRUSTED({0, 2}), "0,1");
    /* a letter of the model's own vocabulary that the file also uses as padding */
    s = (struct small){.added = SPECIAL(1, "b", "")};
    expect_spans(&s, "ab", UNTRUSTED({0, 2}), "0,1");
    s = (struct small){.added = SPECIAL(2, "<0x63>", ""), .options = ",'byte_fallback':true"};
    expect_spans(&s, "ac", NULL, 0, "0");
}

/* What the template wrote is found, whatever longer token the users' words would complete. */
static void test_overlaps(void **state)
{
    (void)state;
    struct small s = {.added = SPECIAL(2, "<a>", "") "," SPECIAL(3, "<a>bb", ""),
                      .vocab = "'a':0,'b':1,'<':4,'>':5"};
    expect_spans(&s, "<a>bb", NULL, 0, "3");
    expect_spans(&s, "<a>bb", UNTRUSTED({3, 5}), "2,1,1");
    expect_spans(&s, "<a>bb", UNTRUSTED({4, 5}), "2,1,1");
    expect_spans(&s, "<a>bb", UNTRUSTED({2, 3}), "4,0,5,1,1");
    s.added = SPECIAL(2, "<a>", "") "," SPECIAL(3, "b<a>b", "");
    expect_spans(&s, "b<a>b", UNTRUSTED({4, 5}), "1,2,1"); /* begins inside the longer one */
    expect_spans(&s, "b<a>b", UNTRUSTED({0, 1}), "1,2,1");
    s.added = ADDED(2, "<a>", "") "," SPECIAL(3, "<a>b", "");
    expect_spans(&s, "<a>b", UNTRUSTED({0, 4}), "2,1"); /* not special: always parsed */
}

/* Blanks that a token takes in may be the users'. */
static void test_strips(void **state)
{
    (void)state;
    struct small s = {.added = SPECIAL(2, "<a>", ",'lstrip':true,'rstrip':true"),
                      .vocab = "'a':0,'b':1,' ':3"};
    expect_spans(&s, "a <a> b", UNTRUSTED({0, 2}, {5, 7}), "0,2,1");
    expect_spans(&s, "a <a> b", UNTRUSTED({0, 3}), "0,3,0,3,1");
    /* Hugging Face: the second token has nothing left. */
    s.added = SPECIAL(2, "<a>", ",'rstrip':true") "," ADDED(4, "  ", ",'lstrip':true");
    expect_spans(&s, "<a>  b", NULL, 0, "2,1");
    expect_spans(&s, "<a>b  b", NULL, 0, "2,1,4,1");
    s.added = SPECIAL(2, "<a>", ",'rstrip':true") "," ADDED(4, "  ", "");
    expect_spans(&s, "<a>  b", NULL, 0, "2,4,1");
}

/* Marks that change places take their origin with them: the whole run is as untrusted as any of
 * it. Here NFC turns the untrusted U+0301 and the template's U+0323 around. */
static void test_reordered_marks(void **state)
{
    (void)state;
    struct small s = {.normalizer = "{'type':'NFC'}",
                      .added = "{'id':2,'content':'\\u0301','special':true,'normalized':true}",
                      .vocab = "'a':0,'q':1,'\\u0323':3"};
    const char *text = "q\xCC\x81\xCC\xA3";
    expect_spans(&s, text, NULL, 0, "1,3,2");
    expect_spans(&s, text, UNTRUSTED({1, 3}), "1,3");
}

static void test_low_interval(void **state)
{
    (void)state;
    struct small s = {.vocab = "'a':0,'b':1,'aa':2,'aaa':3,'ab':4,'{':5",
                      .merges = "'a a','aa a'",
                      .pre = "{'type':'Split','pattern':{'Regex':'a{,2}'},'behavior':'Isolated',"
                             "'invert':false}"};
    expect_spans(&s, "aaab", NULL, 0, "2,0,1");
    s.pre = "{'type':'Split','pattern':{'Regex':'a{,}'},'behavior':'Isolated','invert':false}";
    expect_spans(&s, "aaab", NULL, 0, "3,1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_growth),          cmocka_unit_test(test_growth_of_segments),
        cmocka_unit_test(test_decoder_growth),  cmocka_unit_test(test_metaspace),
        cmocka_unit_test(test_sizes),           cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_whole_pieces),    cmocka_unit_test(test_single_characters),
        cmocka_unit_test(test_overlaps),        cmocka_unit_test(test_strips),
        cmocka_unit_test(test_reordered_marks), cmocka_unit_test(test_low_interval),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
