/*
 * The HTTP server over a tiny model in this process: routes and errors, the framing of HTTP/1.1,
 * answers whole and streamed against the engine's own, and everything that a client may do wrong.
 */
#include "http_client.h"

#include <math.h>
#include <sys/stat.h>

#include "scratch.h"

static const char chat[] = "/v1/chat/completions", completions[] = "/v1/completions";
static struct answered a;

static struct site shared;

static int open_shared(void **state)
{
    (void)state;
    site_open(&shared, "127.0.0.1", NULL);
    site_load(&shared, 8);
    return 0;
}

static int close_shared(void **state)
{
    (void)state;
    assert_quiet(&shared);
    site_close(&shared);
    strbuf_free(&a.body);
    return 0;
}

/* ---- routes -------------------------------------------------------------------------------- */

static void routes(void **state)
{
    (void)state;
    static const struct {
        const char *method, *path, *body;
        int status;
        const char *words; /* in the body */
    } cases[] = {
        {"GET", "/", NULL, 200, "<html"},
        {"GET", "/health", NULL, 200, "{\"status\":\"ok\"}"},
        {"GET", "/version", NULL, 200, LINNET_VERSION},
        {"GET", "/v1/models", NULL, 200, "\"max_model_len\":24000"},
        {"GET", "/v1/models/qwen3-tiny", NULL, 200, "\"object\":\"model\""},
        {"GET", "/v1/models/other", NULL, 404, "model_not_found"},
        {"GET", "/v1/models/", NULL, 404, "not_found"},
        {"GET", "/metrics", NULL, 200, "linnet:num_requests_running"},
        {"GET", "/nothing", NULL, 404, "not_found_error"},
        {"GET", "/v1/%2e%2e/%00x", NULL, 404, "not_found_error"},
        {"POST", "/nothing", "{}", 404, "not_found_error"},
        {"GET", chat, NULL, 405, "method_not_allowed"},
        {"POST", "/health", "{}", 405, "method_not_allowed"},
        {"DELETE", "/v1/models/qwen3-tiny", NULL, 405, "method_not_allowed"},
        {"PUT", chat, "{}", 405, "method_not_allowed"},
        {"BREW", "/v1/models", NULL, 405, "method_not_allowed"},
        {"POST", chat, "", 400, "not valid JSON"},
        {"POST", chat, "{", 400, "not valid JSON"},
        {"POST", chat, "[]", 400, "not a JSON object"},
        {"POST", chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}", 400,
         "not valid JSON"},
        {"POST", chat, "{}", 400, "\"param\":\"messages\""},
        {"POST", chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"model\":\"m\"}",
         404, "model_not_found"},
        {"POST", chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"n\":0}", 400,
         "\"param\":\"n\""},
        {"POST", chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"n\":100000}", 400,
         "\"param\":\"n\""},
        {"POST", completions, "{\"prompt\":\"x\",\"suffix\":\"y\"}", 400, "\"param\":\"suffix\""},
        {"POST", completions, "{\"prompt\":\"x\",\"echo\":true,\"logprobs\":0}", 400,
         "\"param\":\"echo\""},
        {"POST", completions, "{\"prompt\":\"x\",\"model\":\"\",\"max_tokens\":1}", 200,
         "\"model\":\"qwen3-tiny\""},
        {"POST", completions, "{\"prompt\":[999999]}", 400, "\"param\":\"prompt\""},
        {"POST", completions, "{\"prompt\":[-1]}", 400, "\"param\":\"prompt\""},
        {"POST", completions, "{\"prompt\":\"x\",\"logit_bias\":{\"480\":1}}", 400,
         "\"param\":\"logit_bias\""},
        {"POST", "/v1/messages/count_tokens",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"model\":\"m\"}", 404,
         "not_found_error"},
        {"POST", "/tokenize", "{\"prompt\":\"hello\"}", 200, "\"count\":"},
        {"POST", "/tokenize", "{\"content\":\"hello\"}", 200, "\"tokens\":["},
        {"POST", "/tokenize", "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", 200,
         "\"count\":"},
        {"POST", "/tokenize", "{\"messages\":7}", 400, "invalid_request_error"},
        {"POST", "/tokenize", "{}", 400, "expected a text"},
        {"POST", "/tokenize", "{\"prompt\":\"x\",\"add_special_tokens\":{}}", 400,
         "\"param\":\"add_special_tokens\""},
        {"POST", "/tokenize",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"add_special_tokens\":false}", 200,
         "\"count\":"},
        {"POST", "/tokenize",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[{\"type\":\"function\","
         "\"function\":{\"name\":\"x\",\"description\":5}}]}",
         400, "\"param\":\"tools\""},
        {"POST", "/detokenize", "{\"tokens\":[40.0]}", 200, "\"content\":"},
        {"POST", "/detokenize", "{\"tokens\":[1e9]}", 400, "tokens[0]"},
        {"POST", "/detokenize", "{\"tokens\":[480]}", 400, "tokens[0]"},
        {"POST", "/detokenize", "{}", 400, "expected a list"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ask(&shared, cases[i].method, cases[i].path, cases[i].body, &a);
        if (a.status != cases[i].status)
            fail_msg("%s %s %s: %d", cases[i].method, cases[i].path, cases[i].body, a.status);
        assert_holds(strbuf_cstr(&a.body), cases[i].words);
        assert_non_null(header_of(&a, "x-request-id"));
        const char *type = header_of(&a, "content-type");
        if (a.status != 200) assert_string_equal(type, "application/json");
        if (a.status == 405) assert_holds(header_of(&a, "allow"), "OPTIONS");
        if (a.status < 400) continue;
        json_t *json = body_json(&a), *error = json_object_get(json, "error");
        assert_true(json_is_string(json_object_get(error, "message")));
        assert_true(json_is_string(json_object_get(error, "type")));
        bool messages = strncmp(cases[i].path, "/v1/messages", 12) == 0; /* Anthropic's form */
        assert_true(messages || json_object_get(error, "param"));
        assert_true(messages || json_object_get(error, "code"));
        json_decref(json);
    }
}

static void tokens_and_back(void **state)
{
    (void)state;
    char body[4096];
    ask(&shared, "POST", "/tokenize", "{\"prompt\":\"a h\xC3\xA9llo <b>\"}", &a);
    assert_status(&a, 200);
    json_t *json = body_json(&a);
    json_t *ids = json_object_get(json, "tokens");
    assert_int_equal(json_integer_value(json_object_get(json, "count")), json_array_size(ids));
    char *list = json_dumps(ids, JSON_COMPACT);
    snprintf(body, sizeof body, "{\"tokens\":%s}", list);
    free(list);
    json_decref(json);
    ask(&shared, "POST", "/detokenize", body, &a);
    assert_status(&a, 200);
    json = body_json(&a);
    assert_string_equal(json_string_value(json_object_get(json, "prompt")), "a h\xC3\xA9llo <b>");
    json_decref(json);
}

/* Case H04. */
static void methods_and_framing(void **state)
{
    (void)state;
    static const char *const paths[] = {"/",  "/health",   "/metrics", "/v1/models",
                                        chat, completions, "/tokenize"};
    int fd = client_open(&shared); /* all of it on one connection */
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        client_ask(fd, "OPTIONS", paths[i], "", NULL);
        assert_true(client_read(fd, &a, false));
        assert_status(&a, 204);
        assert_holds(header_of(&a, "allow"), "OPTIONS");
        client_ask(fd, "HEAD", paths[i], "", NULL);
        assert_true(client_read(fd, &a, true));
        assert_status(&a, i < 4 ? 200 : 405);
    }
    client_text(fd, "POST /tokenize HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n");
    client_text(fd, "6\r\n{\"prom\r\n");
    usleep(20000);
    client_text(fd, "8\r\npt\":\"hi\"\r\n1\r\n}\r\n0\r\n\r\n");
    assert_true(client_read(fd, &a, false));
    assert_status(&a, 200);
    client_ask(fd, "GET", "/health", "", NULL);
    assert_true(client_read(fd, &a, false));
    assert_status(&a, 200);
    /* two at once in one packet */
    client_text(fd,
                "GET /health HTTP/1.1\r\nHost: t\r\n\r\nGET /version HTTP/1.1\r\nHost: t\r\n\r\n");
    assert_true(client_read(fd, &a, false));
    assert_status(&a, 200);
    assert_true(client_read(fd, &a, false));
    assert_holds(strbuf_cstr(&a.body), "version");
    close(fd);
}

/* Case H04: 100 Continue where it is due, the last word where it is not. */
static void expectations(void **state)
{
    (void)state;
    char head[512];
    struct strbuf body = {0};
    strbuf_text(&body, "{\"prompt\":\"");
    for (int i = 0; i < 100000; i++) strbuf_char(&body, 'x');
    strbuf_text(&body, "\"}");
    for (int version = 0; version < 2; version++) {
        int fd = client_open(&shared);
        snprintf(head, sizeof head,
                 "POST /tokenize HTTP/1.%d\r\nHost: t\r\nExpect: 100-continue\r\n"
                 "Content-Length: %zu\r\n\r\n",
                 version, body.size);
        client_text(fd, head);
        if (version == 1) {
            assert_true(client_read(fd, &a, false));
            assert_int_equal(a.status, 100);
        }
        client_send(fd, body.data, body.size);
        assert_true(client_read(fd, &a, false));
        assert_status(&a, 200);
        close(fd);
    }
    int fd = client_open(&shared);
    client_ask(fd, "POST", "/tokenize", "Expect: 100-continue\r\nContent-Length: 1000000000\r\n",
               NULL);
    assert_true(client_read(fd, &a, false));
    assert_status(&a, 413);
    assert_holds(strbuf_cstr(&a.body), "body_too_large");
    close(fd);
    ask_with(&shared, "POST", "/tokenize", "Expect: something-else\r\n", "{\"prompt\":\"x\"}", &a);
    assert_true(a.status == 200 || a.status == 417);
    strbuf_free(&body);
}

static void request_ids(void **state)
{
    (void)state;
    ask_with(&shared, "GET", "/health", "X-Request-Id: my-id.7\r\n", NULL, &a);
    assert_string_equal(header_of(&a, "x-request-id"), "my-id.7");
    ask_with(&shared, "GET", "/health", "X-Request-Id: a b\"c\r\n", NULL, &a);
    assert_int_equal(strncmp(header_of(&a, "x-request-id"), "req-", 4), 0);
    ask_with(&shared, "GET", "/nothing", "x-request-id: other\r\n", NULL, &a);
    assert_string_equal(header_of(&a, "x-request-id"), "other");
    assert_true(site_logged(&shared, " other GET /nothing 404"));
}

static void cross_origin(void **state)
{
    (void)state;
    static const char *const origins[] = {"https://good.example"};
    struct server_options options = {.cors_origins = origins, .n_cors_origins = 1};
    struct site site;
    site_open(&site, "127.0.0.1", &options);
    ask_with(&site, "OPTIONS", chat,
             "Origin: https://good.example\r\nAccess-Control-Request-Method: POST\r\n"
             "Access-Control-Request-Headers: authorization, x-thing\r\n",
             NULL, &a);
    assert_status(&a, 204);
    assert_string_equal(header_of(&a, "access-control-allow-origin"), "https://good.example");
    assert_string_equal(header_of(&a, "access-control-allow-headers"), "authorization, x-thing");
    assert_holds(header_of(&a, "access-control-allow-methods"), "POST");
    ask_with(&site, "GET", "/health", "Origin: https://good.example\r\n", NULL, &a);
    assert_string_equal(header_of(&a, "access-control-allow-origin"), "https://good.example");
    ask_with(&site, "GET", "/health", "Origin: https://bad.example\r\n", NULL, &a);
    assert_null(header_of(&a, "access-control-allow-origin"));
    site_close(&site);
    ask_with(&shared, "GET", "/health", "Origin: https://good.example\r\n", NULL, &a);
    assert_null(header_of(&a, "access-control-allow-origin"));
}

/* ---- answers ------------------------------------------------------------------------------- */

/* What the engine itself answers. */
static void direct(const char *messages, int32_t max_tokens, struct strbuf *text)
{
    int32_t *ids;
    size_t n;
    linnet_error err;
    assert_ok(
        linnet_chat_tokenize(shared.model, messages, strlen(messages), NULL, NULL, &ids, &n, &err),
        err);
    struct job *job = job_new(ids, (int32_t)n, max_tokens);
    linnet_sampling_defaults(shared.model, &job->request.sampling);
    job->request.sampling.temperature = 0;
    job->request.ignore_eos = true;
    job_submit(job, shared.engine);
    job_wait(job);
    strbuf_append(text, strbuf_cstr(&job->answers[0].text), job->answers[0].text.size);
    job_free(job);
    linnet_free(ids);
}

static const char *content_of(const json_t *json, size_t i)
{
    json_t *choice = json_array_get(json_object_get(json, "choices"), i);
    json_t *text = json_object_get(choice, "text");
    if (!text) text = json_object_get(json_object_get(choice, "message"), "content");
    return json_string_value(text);
}

static json_t *with_stream(const json_t *body)
{
    json_t *copy = json_deep_copy(body);
    json_object_set_new(copy, "stream", json_true());
    return copy;
}

static void post_json(struct site *site, const char *path, const json_t *body)
{
    char *text = json_dumps(body, JSON_COMPACT);
    ask(site, "POST", path, text, &a);
    free(text);
}

/* Streamed and whole answers are the same, and their last words are. */
static void compare_both(const char *path, const char *text)
{
    struct streamed s;
    json_error_t where;
    json_t *body = json_loads(text, 0, &where), *stream = with_stream(body);
    post_json(&shared, path, body);
    assert_status(&a, 200);
    json_t *whole = body_json(&a);
    post_json(&shared, path, stream);
    assert_status(&a, 200);
    assert_holds(header_of(&a, "content-type"), "text/event-stream");
    streamed_read(&s, &a.body);
    assert_int_equal(s.n_done, 1);
    assert_null(s.error);
    assert_null(s.usage);
    json_t *choices = json_object_get(whole, "choices"), *choice;
    size_t i, n_entries = 0;
    json_array_foreach(choices, i, choice)
    {
        assert_string_equal(strbuf_cstr(&s.text[i]), content_of(whole, i));
        assert_true(json_equal(s.finish[i], json_object_get(choice, "finish_reason")));
        assert_int_equal(s.roles[i], path == chat);
        json_t *logprobs = json_object_get(choice, "logprobs");
        json_t *entries = json_object_get(logprobs, path == chat ? "content" : "token_logprobs");
        n_entries += json_array_size(entries);
        if (json_array_size(choices) == 1 && entries) assert_true(json_equal(entries, s.logprobs));
    }
    assert_int_equal(n_entries, json_array_size(s.logprobs));
    streamed_free(&s);
    json_decref(whole);
    json_decref(body);
    json_decref(stream);
}

static void streams_equal_whole_answers(void **state)
{
    (void)state;
    static const char *const chats[] = {
        "{\"messages\":[{\"role\":\"user\",\"content\":\"h\xC3\xA9llo\"}],\"temperature\":0,"
        "\"max_tokens\":60,\"ignore_eos\":true}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"one two\"}],\"temperature\":1.5,"
        "\"seed\":3,\"max_tokens\":40,\"n\":4}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"one two\"}],\"temperature\":1,"
        "\"seed\":3,\"max_tokens\":200,\"stop\":[\"e\",\"qu\"],\"ignore_eos\":true}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"temperature\":0,"
        "\"max_tokens\":20,\"logprobs\":true,\"top_logprobs\":3,\"ignore_eos\":true}",
    };
    static const char *const plain[] = {
        "{\"prompt\":\"one two three\",\"temperature\":0,\"max_tokens\":30,\"ignore_eos\":true}",
        "{\"prompt\":[\"one\",\"two\"],\"temperature\":0,\"n\":2,\"ignore_eos\":true}",
        "{\"prompt\":[\"one\",\"two \"],\"temperature\":0,\"n\":2,\"ignore_eos\":true,\"echo\":"
        "true}",
        "{\"prompt\":[40,41,42],\"temperature\":0,\"ignore_eos\":true,\"echo\":true}",
        "{\"prompt\":[[40,41],[42]],\"temperature\":0,\"ignore_eos\":true}",
        "{\"prompt\":[40,41,42],\"temperature\":0,\"logprobs\":2,\"ignore_eos\":true}",
    };
    for (size_t i = 0; i < sizeof chats / sizeof *chats; i++) compare_both(chat, chats[i]);
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) compare_both(completions, plain[i]);
}

static void answers_are_the_engines(void **state)
{
    (void)state;
    struct strbuf expected = {0};
    direct("{\"messages\":[{\"role\":\"user\",\"content\":\"tell me\"}]}", 80, &expected);
    assert_true(expected.size > 0);
    ask(&shared, "POST", chat,
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"tell \"},"
        "{\"type\":\"text\",\"text\":\"me\"}]}],\"temperature\":0,\"max_tokens\":80,"
        "\"ignore_eos\":true,\"model\":\"qwen3-tiny\"}",
        &a);
    assert_status(&a, 200);
    json_t *json = body_json(&a);
    assert_string_equal(content_of(json, 0), strbuf_cstr(&expected));
    assert_string_equal(json_string_value(json_object_get(json, "object")), "chat.completion");
    json_decref(json);
    strbuf_free(&expected);
}

/* Case H02. */
static void usage_only_when_asked(void **state)
{
    (void)state;
    static const struct {
        const char *options;
        bool usage;
    } cases[] = {{"", false},
                 {",\"stream_options\":{}", false},
                 {",\"stream_options\":{\"include_usage\":false}", false},
                 {",\"stream_options\":null", false},
                 {",\"stream_options\":{\"include_usage\":true}", true}};
    char body[512];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct streamed s;
        snprintf(body, sizeof body,
                 "{\"prompt\":[40,41,42],\"max_tokens\":5,\"temperature\":0,\"ignore_eos\":true,"
                 "\"n\":2,\"stream\":true%s}",
                 cases[i].options);
        ask(&shared, "POST", completions, body, &a);
        assert_status(&a, 200);
        streamed_read(&s, &a.body);
        assert_int_equal(s.usage != NULL, cases[i].usage);
        if (s.usage) {
            json_t *usage = s.usage;
            assert_int_equal(json_integer_value(json_object_get(usage, "prompt_tokens")), 3);
            assert_int_equal(json_integer_value(json_object_get(usage, "completion_tokens")), 10);
            assert_int_equal(json_integer_value(json_object_get(usage, "total_tokens")), 13);
        }
        streamed_free(&s);
    }
    ask(&shared, "POST", completions,
        "{\"prompt\":\"x\",\"stream_options\":{\"include_usage\":true}}", &a);
    assert_status(&a, 400);
    assert_holds(strbuf_cstr(&a.body), "\"param\":\"stream_options\"");
}

static void debug_field(void **state)
{
    (void)state;
    static const char body[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":4,\"top_k\":7,"
        "\"debug\":true%s}";
    char text[512];
    snprintf(text, sizeof text, body, "");
    ask(&shared, "POST", chat, text, &a);
    json_t *json = body_json(&a), *debug = json_object_get(json, "debug");
    json_t *prompt = json_array_get(json_object_get(debug, "prompts"), 0);
    assert_holds(json_string_value(json_object_get(prompt, "text")), "hi");
    json_t *usage = json_object_get(json, "usage");
    assert_int_equal(json_array_size(json_object_get(prompt, "token_ids")),
                     json_integer_value(json_object_get(usage, "prompt_tokens")));
    json_t *sampling = json_object_get(debug, "sampling");
    assert_int_equal(json_integer_value(json_object_get(sampling, "top_k")), 7);
    json_t *timing = json_array_get(json_object_get(debug, "timings"), 0);
    assert_true(json_real_value(json_object_get(timing, "prefill_s")) > 0);
    /* the seed that was drawn gives the answer again */
    json_int_t seed = json_integer_value(json_array_get(json_object_get(sampling, "seeds"), 0));
    snprintf(text, sizeof text,
             "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":4,\"top_k\":7,"
             "\"seed\":%lld}",
             (long long)seed);
    ask(&shared, "POST", chat, text, &a);
    json_t *again = body_json(&a);
    assert_string_equal(content_of(again, 0), content_of(json, 0));
    assert_null(json_object_get(again, "debug"));
    json_decref(again);
    json_decref(json);
    struct streamed s;
    snprintf(text, sizeof text, body, ",\"stream\":true");
    ask(&shared, "POST", chat, text, &a);
    streamed_read(&s, &a.body);
    assert_non_null(s.debug);
    streamed_free(&s);
}

/* The prompt stands before each of its answers, which are the same as without it. */
static void echo(void **state)
{
    (void)state;
    static const char *const prompts[] = {"\"a h\xC3\xA9llo <b>\"", "[40,41,42]"};
    for (size_t i = 0; i < 2; i++) {
        char body[256], shown[256] = "a h\xC3\xA9llo <b>";
        if (i == 1) {
            ask(&shared, "POST", "/detokenize", "{\"tokens\":[40,41,42]}", &a);
            json_t *text = body_json(&a);
            snprintf(shown, sizeof shown, "%s", json_string_value(json_object_get(text, "prompt")));
            json_decref(text);
        }
        json_t *answers[2];
        for (int with = 0; with < 2; with++) {
            snprintf(body, sizeof body,
                     "{\"prompt\":%s,\"temperature\":0,\"n\":2,\"ignore_eos\":true,\"echo\":%s}",
                     prompts[i], with ? "true" : "false");
            ask(&shared, "POST", completions, body, &a);
            assert_status(&a, 200);
            answers[with] = body_json(&a);
        }
        for (size_t c = 0; c < 2; c++) {
            const char *text = content_of(answers[1], c);
            assert_int_equal(strncmp(text, shown, strlen(shown)), 0);
            assert_string_equal(text + strlen(shown), content_of(answers[0], c));
        }
        json_decref(answers[0]);
        json_decref(answers[1]);
    }
}

static void context_overflow(void **state)
{
    (void)state;
    struct strbuf body = {0};
    strbuf_text(&body, "{\"prompt\":[1");
    for (int i = 1; i < 24000; i++) strbuf_text(&body, ",1");
    strbuf_text(&body, "],\"max_tokens\":1,\"stream\":true}");
    ask(&shared, "POST", completions, strbuf_cstr(&body), &a);
    assert_status(&a, 400);
    assert_holds(strbuf_cstr(&a.body), "\"code\":\"context_length_exceeded\"");
    assert_holds(strbuf_cstr(&a.body), "maximum context length is 24000 tokens and the prompt has "
                                       "24000");
    strbuf_free(&body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routes),
        cmocka_unit_test(tokens_and_back),
        cmocka_unit_test(methods_and_framing),
        cmocka_unit_test(expectations),
        cmocka_unit_test(request_ids),
        cmocka_unit_test(cross_origin),
        cmocka_unit_test(streams_equal_whole_answers),
        cmocka_unit_test(answers_are_the_engines),
        cmocka_unit_test(usage_only_when_asked),
        cmocka_unit_test(debug_field),
        cmocka_unit_test(echo),
        cmocka_unit_test(context_overflow),
    };
    return cmocka_run_group_tests(tests, open_shared, close_shared);
}
