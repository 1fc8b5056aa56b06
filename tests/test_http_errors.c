/*
 * A model that breaks over one token of its vocabulary: requests that come upon it end with an
 * error, each in the form of its API; all others are answered as if there were none.
 */
#include "http_client.h"
#include "tensor_files.h"

static const char chat[] = "/v1/chat/completions", completions[] = "/v1/completions",
                  messages[] = "/v1/messages";
static const char why[] = "NaN";
static struct site site;
static struct answered a;
static char directory[64];
static int32_t broken; /* the token "~" */

/* qwen3-tiny, but for the embedding of "~", which is NaN; the output matrix, which is a copy of
 * the embeddings, is whole. */
static void break_token(void)
{
    static const char embedding[] = "model.embed_tokens.weight";
    json_t *tokenizer = load_json(data_path("qwen3-tiny/tokenizer.json"));
    json_t *vocabulary = json_object_get(json_object_get(tokenizer, "model"), "vocab");
    broken = (int32_t)json_integer_value(json_object_get(vocabulary, "~"));
    assert_true(broken > 0);
    json_decref(tokenizer);

    char *path = strdup(scratch_path(directory, "model.safetensors"));
    for (int pass = 0; pass < 2; pass++) {
        struct tensors t = read_tensors(path);
        json_t *entry = json_object_get(t.header, embedding);
        json_int_t width = json_integer_value(json_array_get(json_object_get(entry, "shape"), 1));
        json_t *begin = json_array_get(json_object_get(entry, "data_offsets"), 0);
        char *row = t.bytes + (t.data - t.bytes) + json_integer_value(begin) +
                    broken * width * 2; /* BF16 */
        assert_string_equal(json_string_value(json_object_get(entry, "dtype")), "BF16");
        for (json_int_t i = 0; pass && i < width; i++) memcpy(row + 2 * i, "\xC0\x7F", 2);
        write_tensors(&t, path, NULL, pass ? NULL : "lm_head.weight", embedding);
        json_decref(t.header);
        free(t.bytes);
    }
    free(path);
    set_config(directory, "tie_word_embeddings", json_false());
}

static int open_all(void **state)
{
    (void)state;
    snprintf(directory, sizeof directory, "%s", scratch_create());
    scratch_copy_all(directory, data_path("qwen3-tiny"));
    break_token();
    site_open(&site, "127.0.0.1", NULL);
    site_load_from(&site, directory, 4);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    site_close(&site);
    scratch_remove(directory);
    strbuf_free(&a.body);
    return 0;
}

/* A body with the broken token's id in the place of BROKEN. */
static const char *biased(const char *body)
{
    static char text[512];
    const char *at = strstr(body, "BROKEN");
    if (!at) return body;
    snprintf(text, sizeof text, "%.*s%d%s", (int)(at - body), body, broken, at + 6);
    return text;
}

static void assert_broken(const char *path, const char *body, const char *type)
{
    ask(&site, "POST", path, body, &a);
    assert_status(&a, 500);
    assert_string_equal(header_of(&a, "x-should-retry"), "false");
    json_t *json = body_json(&a), *error = json_object_get(json, "error");
    assert_string_equal(json_string_value(json_object_get(error, "type")), type);
    assert_holds(json_string_value(json_object_get(error, "message")), why);
    json_decref(json);
}

static void whole_answers(void **state)
{
    (void)state;
    assert_broken(chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi ~\"}]}",
                  "server_error");
    assert_broken(chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"~\"}],\"n\":3}",
                  "server_error");
    assert_broken(completions, "{\"prompt\":[\"one\",\"~\"],\"max_tokens\":3}", "server_error");
    assert_broken(messages,
                  "{\"model\":\"\",\"max_tokens\":5,\"messages\":[{\"role\":\"user\",\"content\":"
                  "\"hi ~\"}]}",
                  "api_error");
    assert_quiet(&site);
}

/* A stream has its status before its first token: the error is an event, before [DONE]. */
static void streams(void **state)
{
    (void)state;
    static const struct {
        const char *path, *body, *text; /* text: what comes before the error */
    } cases[] = {
        {chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"~\"}],\"stream\":true}", ""},
        {completions, "{\"prompt\":\"~\",\"stream\":true}", ""},
        {chat,
         "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"temperature\":0,\"stream\":true,"
         "\"logit_bias\":{\"BROKEN\":1000}}",
         "~"},
        {completions,
         "{\"prompt\":\"hi\",\"temperature\":0,\"stream\":true,\"logit_bias\":{\"BROKEN\":1000}}",
         "~"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct streamed s;
        ask(&site, "POST", cases[i].path, biased(cases[i].body), &a);
        assert_status(&a, 200);
        streamed_read(&s, &a.body);
        assert_string_equal(strbuf_cstr(&s.text[0]), cases[i].text);
        assert_null(s.finish[0]);
        assert_string_equal(json_string_value(json_object_get(s.error, "type")), "server_error");
        assert_holds(json_string_value(json_object_get(s.error, "message")), why);
        assert_int_equal(s.n_done, 1);
        assert_false(a.closed); /* the reply has its end */
        streamed_free(&s);
    }
    assert_quiet(&site);
}

/* One answer fails: whatever the engine has made of the others until then comes before the error.
 */
static void streams_of_several(void **state)
{
    (void)state;
    static const char body[] =
        "{\"prompt\":[\"~\",\"one\",\"two\"],\"n\":2,\"max_tokens\":4000,\"ignore_eos\":true,"
        "\"logprobs\":0,\"stream\":true,\"logit_bias\":{\"BROKEN\":-1000}}";
    for (int i = 0; i < 20; i++) {
        struct streamed s;
        linnet_stats before, after;
        assert_quiet(&site);
        linnet_engine_get_stats(site.engine, &before);
        ask(&site, "POST", completions, biased(body), &a);
        assert_status(&a, 200);
        streamed_read(&s, &a.body);
        assert_string_equal(json_string_value(json_object_get(s.error, "type")), "server_error");
        assert_holds(json_string_value(json_object_get(s.error, "message")), why);
        assert_int_equal(s.n_done, 1);
        linnet_engine_get_stats(site.engine, &after);
        assert_int_equal(json_array_size(s.logprobs),
                         after.generated_tokens - before.generated_tokens);
        streamed_free(&s);
    }
    assert_quiet(&site);
}

/* The last event of a stream of the Messages API. */
static void assert_fails(const char *event)
{
    assert_holds(event, "\"type\":\"api_error\"");
    assert_holds(event, why);
    assert_string_equal(strstr(event, "\n\n"), "\n\n"); /* nothing comes after it */
    assert_false(a.closed);
}

static void stream_of_messages(void **state)
{
    (void)state;
    ask(&site, "POST", messages,
        "{\"model\":\"\",\"max_tokens\":5,\"stream\":true,\"messages\":[{\"role\":\"user\","
        "\"content\":\"hi ~\"}]}",
        &a);
    assert_status(&a, 200);
    const char *last = strstr(strbuf_cstr(&a.body), "event: error\ndata: ");
    assert_holds(strbuf_cstr(&a.body), "event: message_start\n");
    assert_fails(last);

    /* any token is as likely as any other: some answers come upon the broken one before their end
     */
    last = NULL;
    for (int seed = 0; seed < 64 && !last; seed++) {
        char body[256];
        snprintf(body, sizeof body,
                 "{\"model\":\"\",\"max_tokens\":4000,\"stream\":true,\"temperature\":10000,"
                 "\"top_k\":0,\"top_p\":1,\"seed\":%d,\"messages\":[{\"role\":\"user\","
                 "\"content\":\"hi\"}]}",
                 seed);
        ask(&site, "POST", messages, body, &a);
        assert_status(&a, 200);
        last = strstr(strbuf_cstr(&a.body), "event: error\ndata: ");
        assert_holds(strbuf_cstr(&a.body), last ? "\"text_delta\"" : "event: message_stop\n");
    }
    assert_fails(last);
    assert_quiet(&site);
}

/* An answer under way beside broken ones is the one that its request gets alone. */
static void others(void **state)
{
    (void)state;
    static const char good[] = "{\"prompt\":\"tell me\",\"max_tokens\":600,\"temperature\":1,"
                               "\"seed\":5,\"ignore_eos\":true,\"stream\":true,"
                               "\"logit_bias\":{\"BROKEN\":-1000}}";
    struct streamed alone, beside;
    ask(&site, "POST", completions, biased(good), &a);
    streamed_read(&alone, &a.body);
    int fd = client_open(&site);
    client_ask(fd, "POST", completions, "", biased(good));
    assert_true(has_begun(fd));
    for (int i = 0; i < 8; i++)
        assert_broken(completions, "{\"prompt\":\"~\",\"max_tokens\":3}", "server_error");
    assert_true(client_read(fd, &a, false));
    streamed_read(&beside, &a.body);
    assert_null(beside.error);
    assert_string_equal(strbuf_cstr(&beside.text[0]), strbuf_cstr(&alone.text[0]));
    assert_string_equal(json_string_value(beside.finish[0]), "length");
    close(fd);
    streamed_free(&alone);
    streamed_free(&beside);
    ask(&site, "GET", "/health", NULL, &a);
    assert_status(&a, 200);
    ask(&site, "GET", "/metrics", NULL, &a);
    assert_holds(strbuf_cstr(&a.body), "finished_reason=\"error\"} ");
    assert_quiet(&site);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_answers),
        cmocka_unit_test(streams),
        cmocka_unit_test(streams_of_several),
        cmocka_unit_test(stream_of_messages),
        cmocka_unit_test(others),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
