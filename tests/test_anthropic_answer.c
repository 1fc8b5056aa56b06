/* Answers as messages and streams of the Messages API, to the byte; and its errors. */
#include "messages_support.h"

/* ---- answers ------------------------------------------------------------------------------- */

static struct openai_answer answer;
static struct anthropic_reply reply = {
    .id = "msg_1", .model_name = "m", .request = &request, .answer = &answer};

static void add(const char *text)
{
    linnet_event event = {.type = LINNET_EVENT_TOKEN,
                          .prompt_tokens = 5,
                          .cached_tokens = 2,
                          .completion_tokens = answer.completion_tokens + 1,
                          .text = text,
                          .text_size = strlen(text)};
    openai_answer_add(&answer, &event);
}

static void finish(linnet_finish how, int32_t stop, const linnet_error *error)
{
    linnet_event event = {.type = LINNET_EVENT_FINISHED,
                          .prompt_tokens = 5,
                          .cached_tokens = 2,
                          .completion_tokens = answer.completion_tokens,
                          .text = "",
                          .finish = how,
                          .stop = stop,
                          .error = error};
    openai_answer_add(&answer, &event);
}

static void start(const char *prompt, const char *fields)
{
    openai_answer_free(&answer);
    assert_ok(ask(prompt, fields), fault.error);
    openai_answer_start(&answer, &request);
}

/* The digits of ids become "ID". */
static char *without_ids(const struct strbuf *text)
{
    char *copy = strdup(strbuf_cstr(text));
    assert_false(text->failed);
    for (char *id = copy; (id = strstr(id, "\"toolu_"));) {
        id += strlen("\"toolu_");
        assert_int_equal(strspn(id, "0123456789abcdef"), 24);
        memmove(id + 2, id + 24, strlen(id + 24) + 1);
        memcpy(id, "ID", 2);
    }
    return copy;
}

static void assert_written(const struct strbuf *text, const char *expected)
{
    char *copy = without_ids(text);
    assert_string_equal(copy, expected);
    free(copy);
}

static void assert_message(const char *expected)
{
    struct strbuf out = {0};
    anthropic_message(&reply, &out);
    assert_written(&out, expected);
    json_t *json = json_loadb(out.data, out.size, 0, NULL);
    assert_non_null(json);
    json_decref(json);
    strbuf_free(&out);
}

/* Writes what is due, so much at a time. */
static void write_due(struct anthropic_stream *stream, size_t most, struct strbuf *out)
{
    bool all;
    do {
        struct strbuf piece = {0};
        all = anthropic_stream_write(stream, &reply, most, &piece);
        assert_true(all || piece.size > 0);
        strbuf_append(out, piece.data, piece.size);
        strbuf_free(&piece);
    } while (!all);
}

/* Writes what is due and compares just that. */
static void assert_events(struct anthropic_stream *stream, const char *expected)
{
    struct strbuf out = {0};
    anthropic_stream_write(stream, &reply, SIZE_MAX, &out);
    assert_written(&out, expected);
    strbuf_free(&out);
}

#define HEAD \
    "{\"id\":\"msg_1\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"m\",\"content\":"
#define USAGE(n)                                                       \
    "\"usage\":{\"input_tokens\":3,\"cache_creation_input_tokens\":0," \
    "\"cache_read_input_tokens\":2,\"output_tokens\":" n "}"
#define END(reason, n) ",\"stop_reason\":\"" reason "\",\"stop_sequence\":null," USAGE(n) "}"

#define PING "event: ping\ndata: {\"type\":\"ping\"}\n\n"
#define START(usage)                                                            \
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":" HEAD \
    "[],\"stop_reason\":null,\"stop_sequence\":null," usage "}}\n\n" PING
#define OPEN(index, block)                                                                 \
    "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":" index \
    ",\"content_block\":" block "}\n\n"
#define DELTA(index, type, key, text)                                                      \
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":" index \
    ",\"delta\":{\"type\":\"" type "\",\"" key "\":\"" text "\"}}\n\n"
#define CLOSE(index) \
    "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":" index "}\n\n"
#define STOP(reason, sequence, usage)                                                              \
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"" reason \
    "\",\"stop_sequence\":" sequence "}," usage "}\n\n"                                            \
    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"

#define OPEN_TEXT(index)     OPEN(index, "{\"type\":\"text\",\"text\":\"\"}")
#define TEXT_DELTA(index, t) DELTA(index, "text_delta", "text", t)
#define OPEN_THINKING(index) \
    OPEN(index, "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}")
#define THINKING_DELTA(index, t) DELTA(index, "thinking_delta", "thinking", t)
#define SIGNATURE(index)         DELTA(index, "signature_delta", "signature", "")
#define OPEN_USE(index, name) \
    OPEN(index, "{\"type\":\"tool_use\",\"id\":\"toolu_ID\",\"name\":\"" name "\",\"input\":{}}")
#define JSON_DELTA(index, t) DELTA(index, "input_json_delta", "partial_json", t)

static void a_text(void **state)
{
    (void)state;
    struct anthropic_stream stream = {0};
    start("hello", "");
    assert_events(&stream, START("\"usage\":{\"input_tokens\":5,\"cache_creation_input_tokens\":0,"
                                 "\"cache_read_input_tokens\":0,\"output_tokens\":0}"));
    assert_events(&stream, "");
    assert_null(anthropic_stop_reason(&reply));
    add("Hel");
    add("lo \\\"");
    assert_events(&stream, OPEN_TEXT("0") TEXT_DELTA("0", "Hello \\\\\\\""));
    assert_events(&stream, "");
    add("\xC3\xA9\n");
    assert_events(&stream, TEXT_DELTA("0", "\xC3\xA9\\n"));
    assert_false(stream.ended);
    finish(LINNET_FINISH_STOP, 0, NULL);
    assert_events(&stream, CLOSE("0") STOP("end_turn", "null", USAGE("3")));
    assert_true(stream.ended);
    assert_events(&stream, "");
    assert_message(
        HEAD "[{\"type\":\"text\",\"text\":\"Hello \\\\\\\"\xC3\xA9\\n\"}]" END("end_turn", "3"));
}

static void why_it_ended(void **state)
{
    (void)state;
    struct anthropic_stream stream = {0};
    start("hello", ",\"stop_sequences\":[\"a\",\"\xC3\xA9\\n\"]");
    add("x");
    finish(LINNET_FINISH_STOP, 2, NULL);
    assert_events(&stream, START(USAGE("1")) OPEN_TEXT("0") TEXT_DELTA("0", "x") CLOSE("0")
                               STOP("stop_sequence", "\"\xC3\xA9\\n\"", USAGE("1")));
    assert_message(HEAD "[{\"type\":\"text\",\"text\":\"x\"}],\"stop_reason\":\"stop_sequence\","
                        "\"stop_sequence\":\"\xC3\xA9\\n\"," USAGE("1") "}");

    start("hello", ""); /* nothing was said at all */
    finish(LINNET_FINISH_STOP, 0, NULL);
    stream = (struct anthropic_stream){0};
    assert_events(&stream, START(USAGE("0")) STOP("end_turn", "null", USAGE("0")));
    assert_message(HEAD "[]" END("end_turn", "0"));

    start("hello", ",\"max_tokens\":2");
    add("x");
    add("y");
    finish(LINNET_FINISH_LENGTH, 0, NULL);
    assert_message(HEAD "[{\"type\":\"text\",\"text\":\"xy\"}]" END("max_tokens", "2"));
    start("hello", ",\"max_tokens\":3");
    add("x");
    finish(LINNET_FINISH_LENGTH, 0, NULL);
    assert_message(
        HEAD "[{\"type\":\"text\",\"text\":\"x\"}]" END("model_context_window_exceeded", "1"));
}

static void thinking(void **state)
{
    (void)state;
    static const char usage[] =
        "\"usage\":{\"input_tokens\":3,\"cache_creation_input_tokens\":0,\"cache_read_input_"
        "tokens\":2,\"output_tokens\":3,\"output_tokens_details\":{\"thinking_tokens\":2}}";
    struct anthropic_stream stream = {0};
    char expected[2048];
    start("hello <think>\n", "");
    add("so ");
    assert_events(
        &stream,
        START("\"usage\":{\"input_tokens\":3,\"cache_creation_input_tokens\":0,\"cache_read_input_"
              "tokens\":2,\"output_tokens\":1,\"output_tokens_details\":{\"thinking_tokens\":1}}")
            OPEN_THINKING("0") THINKING_DELTA("0", "so"));
    add("it");
    assert_events(&stream, THINKING_DELTA("0", " it"));
    add("\n</think>\n\nYes");
    assert_events(&stream, SIGNATURE("0") CLOSE("0") OPEN_TEXT("1") TEXT_DELTA("1", "Yes"));
    finish(LINNET_FINISH_STOP, 0, NULL);
    snprintf(expected, sizeof expected,
             CLOSE("1") "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":"
                        "{\"stop_reason\":\"end_turn\",\"stop_sequence\":null},%s}\n\n"
                        "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
             usage);
    assert_events(&stream, expected);
    snprintf(expected, sizeof expected,
             HEAD "[{\"type\":\"thinking\",\"thinking\":\"so it\",\"signature\":\"\"},"
                  "{\"type\":\"text\",\"text\":\"Yes\"}],\"stop_reason\":\"end_turn\","
                  "\"stop_sequence\":null,%s}",
             usage);
    assert_message(expected);

    start("hello <think>\n", ""); /* cut while it thinks: the block is closed all the same */
    stream = (struct anthropic_stream){0};
    add("so");
    assert_int_equal(answer.reasoning_tokens, 1);
    finish(LINNET_FINISH_LENGTH, 0, NULL);
    struct strbuf out = {0};
    anthropic_stream_write(&stream, &reply, SIZE_MAX, &out);
    assert_non_null(strstr(out.data, THINKING_DELTA("0", "so") SIGNATURE("0") CLOSE("0")));
    strbuf_free(&out);
}

#define CALLED(name, arguments) \
    "<tool_call>\n{\"name\": \"" name "\", \"arguments\": " arguments "}\n</tool_call>"

static void tool_calls(void **state)
{
    (void)state;
    struct anthropic_stream stream = {0};
    start(tool_prompt, TOOLS);
    add("See:\n<tool_call>\n{\"name\": \"add-2\", \"arguments\": {\"a\":");
    assert_events(&stream, START(USAGE("1")) OPEN_TEXT("0") TEXT_DELTA("0", "See:") CLOSE("0")
                               OPEN_USE("1", "add-2") JSON_DELTA("1", "{\\\"a\\\":"));
    add("  1.50");
    assert_events(&stream, JSON_DELTA("1", "  1.50"));
    add("}}\n</tool_call>\n" CALLED("get_weather", "{}") "\nThen.");
    assert_events(&stream, JSON_DELTA("1", "}") CLOSE("1") OPEN_USE("2", "get_weather") JSON_DELTA(
                               "2", "{}") CLOSE("2") OPEN_TEXT("3") TEXT_DELTA("3", "\\nThen."));
    finish(LINNET_FINISH_STOP, 0, NULL);
    assert_events(&stream, CLOSE("3") STOP("tool_use", "null", USAGE("3")));
    assert_message(HEAD "[{\"type\":\"text\",\"text\":\"See:\"},{\"type\":\"tool_use\",\"id\":"
                        "\"toolu_ID\",\"name\":\"add-2\",\"input\":{\"a\":  1.50}},{\"type\":"
                        "\"tool_use\",\"id\":\"toolu_ID\",\"name\":\"get_weather\",\"input\":{}},"
                        "{\"type\":\"text\",\"text\":\"\\nThen.\"}]" END("tool_use", "3"));
    /* One id in both forms. */
    struct strbuf out = {0};
    anthropic_message(&reply, &out);
    char id[64];
    snprintf(id, sizeof id, "\"toolu_%s\"", answer.calls[0].id + strlen("call_"));
    assert_non_null(strstr(out.data, id));
    strbuf_free(&out);
}

/* Numbers that no double holds stay as they were written. */
static void arguments_as_written(void **state)
{
    (void)state;
    start(tool_prompt, TOOLS);
    add(CALLED("add-2", "{\"a\": 123456789012345678901234567890, \"b\": \"\\u00e9\"}"));
    finish(LINNET_FINISH_STOP, 0, NULL);
    struct strbuf out = {0};
    anthropic_message(&reply, &out);
    assert_non_null(strstr(out.data, "\"input\":{\"a\": 123456789012345678901234567890, "
                                     "\"b\": \"\\u00e9\"}}]"));
    strbuf_free(&out);
}

/* The call whose beginning was put behind the prompt; the rest is cut off after it. */
static void demanded_call(void **state)
{
    (void)state;
    struct anthropic_stream stream = {0};
    start(tool_prompt, TOOLS ",\"tool_choice\":{\"type\":\"tool\",\"name\":\"add-2\"}");
    add(" {\"a\": 1}}\n</tool_call>");
    add("and more");
    assert_true(openai_answer_is_closed(&answer));
    assert_null(anthropic_stop_reason(&reply));
    finish(LINNET_FINISH_CANCELLED, 0, NULL);
    assert_events(&stream,
                  START(USAGE("2")) OPEN_USE("0", "add-2") JSON_DELTA("0", "{\\\"a\\\": 1}")
                      CLOSE("0") STOP("tool_use", "null", USAGE("2")));
    assert_message(HEAD "[{\"type\":\"tool_use\",\"id\":\"toolu_ID\",\"name\":\"add-2\",\"input\":"
                        "{\"a\": 1}}]" END("tool_use", "2"));
}

/* What turns out to be no call is text; a stream has told its beginning by then. */
static void abandoned_call(void **state)
{
    (void)state;
    static const char cut[] = "<tool_call>{\"name\": \"add-2\", \"arguments\": {\"a\": ";
    struct anthropic_stream stream = {0};
    start(tool_prompt, TOOLS ",\"max_tokens\":2");
    add("A ");
    add(cut);
    finish(LINNET_FINISH_LENGTH, 0, NULL);
    assert_message(HEAD "[{\"type\":\"text\",\"text\":\"A <tool_call>{\\\"name\\\": \\\"add-2\\\", "
                        "\\\"arguments\\\": {\\\"a\\\": \"}]" END("max_tokens", "2"));
    assert_events(&stream, START(USAGE("2")) OPEN_TEXT("0") TEXT_DELTA("0", "A") CLOSE("0")
                               OPEN_USE("1", "add-2") JSON_DELTA("1", "{\\\"a\\\": ") CLOSE("1")
                                   OPEN_TEXT("2")
                                       TEXT_DELTA("2", " <tool_call>{\\\"name\\\": \\\"add-2\\\", "
                                                       "\\\"arguments\\\": {\\\"a\\\": ") CLOSE("2")
                                           STOP("max_tokens", "null", USAGE("2")));
}

/* ---- what a client adds up ------------------------------------------------------------------ */

/* Reads the events of a stream as clients do: the message that they add up to. */
static json_t *accumulate(char *events)
{
    json_t *message = NULL;
    struct strbuf json = {0};
    bool stopped = false;
    for (char *next, *event = events; *event; event = next) {
        char *data = strstr(event, "\ndata: "), *end = strstr(event, "\n\n");
        assert_true(data && end && data < end && !strncmp(event, "event: ", 7) && !stopped);
        *data = *end = 0;
        next = end + 2;
        json_t *body = read_json(data + 7);
        const char *type = json_string_value(json_object_get(body, "type"));
        json_t *content = json_object_get(message, "content");
        size_t index = (size_t)json_integer_value(json_object_get(body, "index"));
        json_t *block = json_array_get(content, index);
        assert_string_equal(event + 7, type);
        if (!strcmp(type, "message_start")) {
            message = json_incref(json_object_get(body, "message"));
        } else if (!strcmp(type, "content_block_start")) {
            assert_int_equal(index, json_array_size(content));
            json_array_append(content, json_object_get(body, "content_block"));
        } else if (!strcmp(type, "content_block_delta")) {
            json_t *delta = json_object_get(body, "delta");
            assert_int_equal(index + 1, json_array_size(content));
            static const char *const keys[] = {"text", "thinking", "signature", "partial_json"};
            for (int i = 0; i < 4; i++) {
                const char *more = json_string_value(json_object_get(delta, keys[i]));
                if (!more) continue;
                const char *old = json_string_value(json_object_get(block, keys[i]));
                if (i == 3)
                    strbuf_text(&json, more);
                else
                    json_object_set_new(block, keys[i], json_sprintf("%s%s", old, more));
            }
        } else if (!strcmp(type, "content_block_stop")) {
            if (json.size) json_object_set_new(block, "input", read_json(json.data));
            strbuf_clear(&json);
        } else if (!strcmp(type, "message_delta")) {
            json_object_update(message, json_object_get(body, "delta"));
            json_object_set(message, "usage", json_object_get(body, "usage"));
        } else {
            stopped = !strcmp(type, "message_stop");
            assert_true(stopped || !strcmp(type, "ping"));
        }
        json_decref(body);
    }
    assert_true(stopped);
    strbuf_free(&json);
    return message;
}

/* However the text was cut and whenever the stream was looked at, it adds up to the message. */
static void streams_add_up(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "Hello, world",
        "<think>\nhm\n</think>\n\nSee:\n" CALLED(
            "add-2", "{\"a\": [1, {\"b\": \"\\n}\"}]}") "\n" CALLED("get_weather", "{}"),
        "<think>only this",
        CALLED("add-2", "{}") " text between " CALLED("add-2", "{\"x\": null}") " and after ",
        "not a <tool_call>{\"nome\"}</tool_call> at all",
        "  ",
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        for (size_t step = 1; step < 9; step += step < 3 ? 1 : 5) {
            for (int way = 0; way < 6; way++) {
                static const size_t mosts[] = {SIZE_MAX, 100, 1};
                size_t most = mosts[way / 2];
                bool often = way % 2;
                struct anthropic_stream stream = {0};
                struct strbuf out = {0}, whole = {0};
                start(tool_prompt, TOOLS);
                for (size_t at = 0; at < strlen(texts[i]); at += step) {
                    char piece[16];
                    snprintf(piece, step + 1, "%s", texts[i] + at);
                    add(piece);
                    if (often) write_due(&stream, most, &out);
                }
                finish(LINNET_FINISH_STOP, 0, NULL);
                write_due(&stream, most, &out);
                anthropic_message(&reply, &whole);
                json_t *sum = accumulate(out.data), *message = read_json(whole.data);
                char *a = json_dumps(sum, JSON_SORT_KEYS), *b = json_dumps(message, JSON_SORT_KEYS);
                assert_string_equal(a, b);
                free(a);
                free(b);
                json_decref(sum);
                json_decref(message);
                strbuf_free(&out);
                strbuf_free(&whole);
            }
        }
    }
}

/* ---- errors -------------------------------------------------------------------------------- */

static void errors(void **state)
{
    (void)state;
    static const struct {
        int http;
        const char *type;
    } cases[] = {
        {400, "invalid_request_error"}, {401, "authentication_error"},
        {403, "permission_error"},      {404, "not_found_error"},
        {405, "invalid_request_error"}, {413, "request_too_large"},
        {429, "rate_limit_error"},      {500, "api_error"},
        {503, "overloaded_error"},      {504, "timeout_error"},
        {529, "overloaded_error"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char expected[256];
        json_t *json = anthropic_error(cases[i].http, "no\xFF", i % 2 ? "req_1" : NULL);
        char *text = json_dumps(json, JSON_COMPACT);
        snprintf(
            expected, sizeof expected,
            "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":\"no\xEF\xBF\xBD\"}%s}",
            cases[i].type, i % 2 ? ",\"request_id\":\"req_1\"" : "");
        assert_string_equal(text, expected);
        free(text);
        json_decref(json);
    }
    assert_int_equal(anthropic_http_status(503), 529);
    assert_int_equal(anthropic_http_status(429), 429);
    assert_int_equal(anthropic_http_status(openai_http_status(LINNET_MEMORY)), 529);
}

#define ERROR(type, message)                                              \
    "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"" type \
    "\",\"message\":\"" message "\"}}\n\n"

static void failing_streams(void **state)
{
    (void)state;
    linnet_error error = {LINNET_NUMERIC, "the model produced NaN"};
    struct anthropic_stream stream = {0};
    start("hello", "");
    add("x");
    finish(LINNET_FINISH_ERROR, 0, &error);
    assert_null(anthropic_stop_reason(&reply));
    assert_events(&stream, START(USAGE("1")) OPEN_TEXT("0") TEXT_DELTA("0", "x")
                               ERROR("api_error", "the model produced NaN"));
    assert_true(stream.ended);
    assert_events(&stream, "");

    start("hello", "");
    stream = (struct anthropic_stream){0};
    error.status = LINNET_MEMORY;
    finish(LINNET_FINISH_ERROR, 0, &error);
    assert_events(&stream, START(USAGE("0")) ERROR("overloaded_error", "the model produced NaN"));

    start("hello", "");
    stream = (struct anthropic_stream){0};
    finish(LINNET_FINISH_CANCELLED, 0, NULL);
    assert_events(&stream,
                  START(USAGE("0"))
                      ERROR("overloaded_error",
                            "the answer was cancelled, as when the server stops: ask again later"));

    linnet_error why = {.status = LINNET_INVALID, .message = "it takes too much memory"};
    stream = (struct anthropic_stream){0};
    reply.why = &why;
    assert_events(&stream,
                  START(USAGE("0")) ERROR("invalid_request_error", "it takes too much memory"));
    why.status = LINNET_CANCELLED;
    stream = (struct anthropic_stream){0};
    assert_events(&stream, START(USAGE("0")) ERROR("overloaded_error", "it takes too much memory"));
    reply.why = NULL;

    struct strbuf out = {0};
    stream = (struct anthropic_stream){0};
    anthropic_stream_ping(&out);
    anthropic_stream_fail(&stream, 500, "why", &out);
    anthropic_stream_fail(&stream, 500, "why", &out);
    assert_string_equal(out.data, PING ERROR("api_error", "why"));
    assert_true(stream.ended);
    strbuf_free(&out);
}

static void ids(void **state)
{
    (void)state;
    char a[ANTHROPIC_ID_SIZE], b[ANTHROPIC_ID_SIZE];
    anthropic_make_id(a);
    anthropic_make_id(b);
    assert_int_equal(strncmp(a, "msg_", 4), 0);
    assert_int_equal(strspn(a + 4, "0123456789abcdef"), 24);
    assert_int_equal(strlen(a), 28);
    assert_string_not_equal(a, b);
}

static int release(void **state)
{
    (void)state;
    openai_answer_free(&answer);
    openai_request_free(&request);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text),
        cmocka_unit_test(why_it_ended),
        cmocka_unit_test(thinking),
        cmocka_unit_test(tool_calls),
        cmocka_unit_test(arguments_as_written),
        cmocka_unit_test(demanded_call),
        cmocka_unit_test(abandoned_call),
        cmocka_unit_test(streams_add_up),
        cmocka_unit_test(errors),
        cmocka_unit_test(failing_streams),
        cmocka_unit_test(ids),
    };
    return cmocka_run_group_tests(tests, NULL, release);
}
