/* Requests of the Messages API as chat requests, to the byte, and through these. */
#include "messages_support.h"

/* ---- requests ------------------------------------------------------------------------------ */

/* The chat request as text; NULL: refused. free() it. */
static char *convert(enum anthropic_endpoint endpoint, const char *body)
{
    json_t *json = read_json(body), *chat = NULL, *before = json_deep_copy(json);
    linnet_status status = anthropic_request(endpoint, json, &chat, &fault);
    assert_true(json_equal(json, before)); /* it is the caller's */
    json_decref(before);
    json_decref(json);
    assert_int_equal(status == LINNET_OK, chat != NULL);
    char *text = chat ? json_dumps(chat, JSON_COMPACT) : NULL;
    json_decref(chat);
    return text;
}

static void assert_chat(const char *body, const char *expected)
{
    char *text = convert(ANTHROPIC_MESSAGES, body);
    if (!text) fail_msg("%s: %s", body, fault.error.message);
    assert_string_equal(text, expected);
    free(text);
}

#define BEGIN "{\"model\":\"m\",\"max_tokens\":5,"
#define REST  ",\"chat_template_kwargs\":{\"enable_thinking\":false}}"

static void simple_request(void **state)
{
    (void)state;
    assert_chat(BEGIN MESSAGES "}", BEGIN MESSAGES REST);
    /* All that is passed on, and all that is ignored. */
    assert_chat(BEGIN MESSAGES
                ",\"temperature\":0.5,\"top_p\":0.25,\"top_k\":7,\"stream\":true,\"seed\":3,"
                "\"stop_sequences\":[\"a\",\"b\"],\"metadata\":{\"user_id\":\"u\"},"
                "\"service_tier\":\"auto\",\"container\":null,\"inference_geo\":\"eu\","
                "\"cache_control\":{\"type\":\"ephemeral\"},\"context_management\":{\"edits\":[]},"
                "\"output_config\":{\"effort\":\"high\"},\"mcp_servers\":[],\"new\":1}",
                BEGIN "\"temperature\":0.5,\"top_p\":0.25,\"top_k\":7,\"stream\":true,\"seed\":3,"
                      "" MESSAGES ",\"stop\":[\"a\",\"b\"]" REST);
    char *text = convert(ANTHROPIC_COUNT_TOKENS, "{\"model\":\"m\"," MESSAGES "}");
    assert_string_equal(text, "{\"model\":\"m\"," MESSAGES REST);
    free(text);
}

static void system_and_texts(void **state)
{
    (void)state;
    assert_chat(BEGIN "\"system\":\"be\",\"messages\":[" USER "]}",
                BEGIN "\"messages\":[{\"role\":\"system\",\"content\":\"be\"}," USER "]" REST);
    assert_chat(BEGIN "\"system\":[{\"type\":\"text\",\"text\":\"b\",\"cache_control\":{\"type\":"
                      "\"ephemeral\"}},{\"type\":\"text\",\"text\":\"e\"}],\"messages\":[" USER
                      "]}",
                BEGIN "\"messages\":[{\"role\":\"system\",\"content\":\"be\"}," USER "]" REST);
    assert_chat(BEGIN "\"system\":[],\"messages\":[" USER "]}", BEGIN MESSAGES REST);
    assert_chat(
        BEGIN
        "\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\\u0000\"},"
        "{\"type\":\"text\",\"text\":\"\xC3\xA9\",\"citations\":null}]},"
        "{\"role\":\"assistant\",\"content\":\"\"},{\"role\":\"user\",\"content\":[{\"type\":"
        "\"text\",\"text\":\"\"}]},{\"role\":\"system\",\"content\":\"now\"}," USER "]}",
        BEGIN "\"messages\":[{\"role\":\"user\",\"content\":\"a\\u0000\xC3\xA9\"},"
              "{\"role\":\"assistant\",\"content\":\"\"},{\"role\":\"user\",\"content\":\"\"},"
              "{\"role\":\"system\",\"content\":\"now\"}," USER "]" REST);
    /* Neighbours of one role are one turn. */
    assert_chat(BEGIN "\"messages\":[{\"role\":\"user\",\"content\":\"a\"},"
                      "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"b\"}]}]}",
                BEGIN "\"messages\":[{\"role\":\"user\",\"content\":\"a\\n\\nb\"}]" REST);
}

#define TEXT(t) "{\"type\":\"text\",\"text\":\"" t "\"}"
#define USE(id, n) \
    "{\"type\":\"tool_use\",\"id\":\"" id "\",\"name\":\"f\",\"input\":{\"a\":" n "}}"
#define RESULT(id, content) \
    "{\"type\":\"tool_result\",\"tool_use_id\":\"" id "\",\"content\":" content "}"
#define ASSISTANT(blocks) "{\"role\":\"assistant\",\"content\":[" blocks "]}"
#define USERS(blocks)     "{\"role\":\"user\",\"content\":[" blocks "]}"
#define CALL(id, n) \
    "{\"id\":\"" id \
    "\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":{\"a\":" n "}}}"
#define TOOL(id, text) "{\"role\":\"tool\",\"tool_call_id\":\"" id "\",\"content\":\"" text "\"}"

static void calls_and_results(void **state)
{
    (void)state;
    assert_chat(BEGIN "\"messages\":[" USER "," ASSISTANT(TEXT("See:") "," USE(
                    "toolu_1", "1.0")) "," USERS(RESULT("toolu_1", "\"3\"")) "]}",
                BEGIN "\"messages\":[" USER
                      ",{\"role\":\"assistant\",\"content\":\"See:\",\"tool_calls\":[" CALL(
                          "toolu_1", "1.0") "]}," TOOL("toolu_1", "3") "]" REST);
    /* Results in the order of the calls; text after them; what an error is said to be. */
    assert_chat(
        BEGIN "\"messages\":[" USER "," ASSISTANT(USE("a", "1") "," USE("b", "2")) "," USERS(RESULT(
            "b",
            "[" TEXT("t") "," TEXT(
                "wo") "]") ",{\"type\":\"tool_result\","
                           "\"tool_use_id\":\"a\",\"is_error\":true,\"content\":\"bad\"}," TEXT(
                               "go") "," TEXT(" on")) "," ASSISTANT(TEXT("k")) "," USER "]}",
        BEGIN
        "\"messages\":[" USER
        ",{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[" CALL("a", "1") "," CALL(
            "b",
            "2") "]}," TOOL("a",
                            "Error: bad") "," TOOL("b",
                                                   "two") ","
                                                          "{\"role\":\"user\",\"content\":\"go "
                                                          "on\"},{\"role\":\"assistant\","
                                                          "\"content\":"
                                                          "\"k\"}," USER "]" REST);
    /* Turns in pieces; results without content. */
    assert_chat(
        BEGIN
        "\"messages\":[" USER "," ASSISTANT(TEXT("p")) "," ASSISTANT(USE("a", "1")) "," ASSISTANT(
            TEXT("q") "," USE("b", "2")) "," USERS("{\"type\":\"tool_result\",\"tool_use_id\":"
                                                   "\"a\"}") "," USERS(RESULT("b", "null")) "]}",
        BEGIN "\"messages\":[" USER
              ",{\"role\":\"assistant\",\"content\":\"p\\n\\nq\",\"tool_calls\":[" CALL(
                  "a", "1") "," CALL("b", "2") "]}," TOOL("a", "") "," TOOL("b", "") "]" REST);
}

static void thinking_in_messages(void **state)
{
    (void)state;
    assert_chat(BEGIN "\"messages\":[" USER "," ASSISTANT(
                    "{\"type\":\"thinking\",\"thinking\":\"hm\",\"signature\":\"s\"},"
                    "{\"type\":\"redacted_thinking\",\"data\":\"xx\"}," TEXT("y")) "," USER "]}",
                BEGIN "\"messages\":[" USER ",{\"role\":\"assistant\",\"content\":\"y\","
                      "\"reasoning_content\":\"hm\"}," USER "]" REST);
}

static void thinking_field(void **state)
{
    (void)state;
    static const struct {
        const char *field;
        const char *enabled;
    } cases[] = {
        {"null", "false"},
        {"{\"type\":\"disabled\"}", "false"},
        {"{\"type\":\"adaptive\"}", "true"},
        {"{\"type\":\"between_tools\"}", "true"},
        {"{\"type\":\"enabled\",\"budget_tokens\":1024}", "true"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[256], expected[256];
        snprintf(body, sizeof body, "{\"model\":\"m\",\"max_tokens\":2000,%s,\"thinking\":%s}",
                 MESSAGES, cases[i].field);
        snprintf(expected, sizeof expected,
                 "{\"model\":\"m\",\"max_tokens\":2000,%s,\"chat_template_kwargs\":"
                 "{\"enable_thinking\":%s}}",
                 MESSAGES, cases[i].enabled);
        assert_chat(body, expected);
    }
}

#define CHAT_TOOLS                                                                         \
    ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"add-2\",\"description\":" \
    "\"adds\","                                                                            \
    "\"parameters\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"number\"}}}}}," \
    "{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"parameters\":{}}}]"

static void tools_and_choices(void **state)
{
    (void)state;
    static const char *const choices[][2] = {
        {"null", ""},
        {"{\"type\":\"auto\"}", ",\"tool_choice\":\"auto\""},
        {"{\"type\":\"any\"}", ",\"tool_choice\":\"required\""},
        {"{\"type\":\"none\"}", ",\"tool_choice\":\"none\""},
        {"{\"type\":\"tool\",\"name\":\"add-2\"}",
         ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"add-2\"}}"},
        {"{\"type\":\"auto\",\"disable_parallel_tool_use\":true}",
         ",\"tool_choice\":\"auto\",\"parallel_tool_calls\":false"},
        {"{\"type\":\"any\",\"disable_parallel_tool_use\":false}", ",\"tool_choice\":\"required\""},
    };
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        char body[1024], expected[1024];
        snprintf(body, sizeof body, "%s,\"tool_choice\":%s}", BEGIN MESSAGES TOOLS, choices[i][0]);
        snprintf(expected, sizeof expected, "%s%s%s", BEGIN MESSAGES CHAT_TOOLS, choices[i][1],
                 REST);
        assert_chat(body, expected);
    }
}

/* Each is refused, and the error names the field and what is wrong. */
struct refusal {
    const char *body, *field, *words;
};

static void assert_refused(const struct refusal *r)
{
    char *text = convert(ANTHROPIC_MESSAGES, r->body);
    if (text) fail_msg("%s was accepted: %s", r->body, text);
    if (strcmp(fault.field, r->field) != 0)
        fail_msg("%s: the fault names '%s': %s", r->body, fault.field, fault.error.message);
    if (strncmp(fault.error.message, r->field, strlen(r->field)) != 0 ||
        !strstr(fault.error.message, r->words))
        fail_msg("%s: %s", r->body, fault.error.message);
    assert_int_equal(openai_http_status(fault.error.status), 400);
}

#define LIST(messages) BEGIN "\"messages\":[" messages "]}"
#define ONE(message)   LIST(message "," USER)

static void refused_messages(void **state)
{
    (void)state;
    static const struct refusal cases[] = {
        {BEGIN "\"messages\":null}", "messages", "found none"},
        {BEGIN "\"messages\":\"x\"}", "messages", "found a string"},
        {LIST(""), "messages", "an empty one"},
        {ONE("5"), "messages", "messages[0]: expected an object, found an integer"},
        {ONE("{\"content\":\"x\"}"), "messages", "messages[0].role: expected"},
        {ONE("{\"role\":\"tool\",\"content\":\"x\"}"), "messages", "messages[0].role"},
        {ONE("{\"role\":\"user\"}"), "messages", "messages[0].content: expected a string or a"},
        {ONE("{\"role\":\"user\",\"content\":5}"), "messages", "found an integer"},
        {ONE("{\"role\":\"user\",\"content\":\"\"}"), "messages", "content: it must not be empty"},
        {ONE(USERS("")), "messages", "it must not be empty"},
        {ONE(USERS("5")), "messages", "messages[0].content[0]: expected a block, found an integer"},
        {ONE(USERS("{}")), "messages", "messages[0].content[0].type: expected a string"},
        {ONE(USERS("{\"type\":\"text\"}")), "messages", "content[0].text: expected a string"},
        {ONE(USERS(TEXT("a") ",{\"type\":\"image\",\"source\":{}}")), "messages",
         "messages[0].content[1]: a block of type 'image' is not supported"},
        {ONE(USERS("{\"type\":\"document\"}")), "messages", "'document' is not supported"},
        {ONE(USERS("{\"type\":\"search_result\"}")), "messages", "'search_result'"},
        {ONE(USERS(USE("a", "1"))), "messages", "'tool_use' is not supported"},
        {ONE(USERS("{\"type\":\"thinking\",\"thinking\":\"\"}")), "messages", "'thinking'"},
        {ONE(ASSISTANT(RESULT("a", "\"\""))), "messages", "'tool_result' is not supported"},
        {ONE(ASSISTANT("{\"type\":\"server_tool_use\"}")), "messages", "'server_tool_use'"},
        {ONE(ASSISTANT("{\"type\":\"thinking\"}")), "messages", "content[0].thinking: expected"},
        {ONE("{\"role\":\"system\",\"content\":[{\"type\":\"tool_use\"}]}"), "messages",
         "'tool_use' is not supported"},
        {ONE(ASSISTANT("{\"type\":\"tool_use\",\"name\":\"f\",\"input\":{}}")), "messages",
         "content[0].id: expected letters, digits, _ and - in a string"},
        {ONE(ASSISTANT("{\"type\":\"tool_use\",\"id\":\"a b\",\"name\":\"f\",\"input\":{}}")),
         "messages", "content[0].id: expected letters"},
        {ONE(ASSISTANT("{\"type\":\"tool_use\",\"id\":\"a\\u0000\",\"name\":\"f\",\"input\":{}}")),
         "messages", "content[0].id: expected letters"},
        {ONE(ASSISTANT("{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"f g\",\"input\":{}}")),
         "messages", "content[0].name: expected 1 to 64"},
        {ONE(ASSISTANT("{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"f\",\"input\":\"{}\"}")),
         "messages", "content[0].input: expected an object, found a string"},
        {LIST(USER "," ASSISTANT(USE("a", "1") "," USE("a", "2")) "," USERS(RESULT("a", "\"\""))),
         "messages", "messages[1].content[1].id: 'a' was used before"},
        /* Who answers whom. */
        {LIST(USER "," ASSISTANT(USE("a", "1")) "," USER), "messages",
         "the tool_use 'a' has no tool_result in the message after it"},
        {LIST(USER "," ASSISTANT(USE("a", "1") "," USE("b", "1")) "," USERS(RESULT("a", "\"\""))),
         "messages", "the tool_use 'b' has no tool_result"},
        {LIST(USER "," ASSISTANT(USE("a", "1"))), "messages", "the tool_use 'a' has no"},
        {LIST(USER "," ASSISTANT(USE("a", "1")) ",{\"role\":\"system\",\"content\":\"x\"}," USERS(
             RESULT("a", "\"\""))),
         "messages", "the tool_use 'a' has no"},
        {LIST(USERS(RESULT("a", "\"\""))), "messages",
         "messages[0].content[0].tool_use_id: 'a' is no tool_use of the message before"},
        {LIST(USER "," ASSISTANT(USE("a", "1")) "," USERS(RESULT("a", "\"\"")) "," ASSISTANT(
             TEXT("x")) "," USERS(RESULT("a", "\"\""))),
         "messages", "messages[4].content[0].tool_use_id: 'a' is no tool_use"},
        {LIST(USER
              "," ASSISTANT(USE("a", "1")) "," USERS(RESULT("a", "\"\"") "," RESULT("a", "\"\""))),
         "messages", "'a' is answered twice"},
        {LIST(USER "," ASSISTANT(USE("a", "1")) "," USERS(TEXT("x") "," RESULT("a", "\"\""))),
         "messages", "messages[2].content[1]: tool_result blocks must come before"},
        {LIST(USER "," ASSISTANT(USE("a", "1")) "," USERS(RESULT("a", "5"))), "messages",
         "messages[2].content[0].content: expected a string or a list of blocks"},
        {LIST(USER "," ASSISTANT(USE("a", "1")) "," USERS(RESULT("a", "[{\"type\":\"image\"}]"))),
         "messages", "messages[2].content[0].content[0]: a block of type 'image'"},
        {LIST(USER "," ASSISTANT(USE("a", "1")) "," USERS(
             "{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"is_error\":1}")),
         "messages", "is_error: expected true or false"},
        {LIST(USER "," ASSISTANT(USE("a", "1")) "," USERS("{\"type\":\"tool_result\"}")),
         "messages", "tool_use_id: expected letters"},
        {LIST(USER "," ASSISTANT(TEXT("The answer is ("))), "messages",
         "the last one is the assistant's"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) assert_refused(&cases[i]);
}

static void refused_fields(void **state)
{
    (void)state;
    static const struct refusal cases[] = {
        {"[]", "", "not a JSON object"},
        {"5", "", "not a JSON object"},
        {"{\"max_tokens\":5," MESSAGES "}", "model", "missing"},
        {"{\"model\":\"m\"," MESSAGES "}", "max_tokens", "missing"},
        {"{\"model\":\"m\",\"max_tokens\":5}", "messages", "found none"},
        {BEGIN MESSAGES ",\"system\":5}", "system", "expected a string or a list of blocks"},
        {BEGIN MESSAGES ",\"system\":[{\"type\":\"image\"}]}", "system", "system[0]: a block of"},
        {BEGIN MESSAGES ",\"stop_sequences\":\"x\"}", "stop_sequences", "expected a list"},
        {BEGIN MESSAGES ",\"stop_sequences\":[\"x\",\"\"]}", "stop_sequences",
         "stop_sequences[1]: expected a text"},
        {BEGIN MESSAGES ",\"stop_sequences\":[5]}", "stop_sequences", "expected a text"},
        {BEGIN MESSAGES ",\"stop_sequences\":[\"a\\u0000\"]}", "stop_sequences", "U+0000"},
        {BEGIN MESSAGES ",\"stop_sequences\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\","
                        "\"9\",\"0\",\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\"]}",
         "stop_sequences", "expected at most 16 texts, found 17"},
        {BEGIN MESSAGES ",\"tools\":{}}", "tools", "expected a list, found an object"},
        {BEGIN MESSAGES ",\"tools\":[5]}", "tools", "tools[0].name"},
        {BEGIN MESSAGES ",\"tools\":[{\"type\":\"bash_20250124\",\"name\":\"bash\"}]}", "tools",
         "tools[0]: a tool of type 'bash_20250124' is not supported"},
        {BEGIN MESSAGES ",\"tools\":[{\"type\":5,\"name\":\"f\"," SCHEMA "}]}", "tools",
         "tools[0]: a tool of type 'an integer' is not supported"},
        {BEGIN MESSAGES ",\"tools\":[{\"name\":\"f\"}]}", "tools", "tools[0].input_schema"},
        {BEGIN MESSAGES ",\"tools\":[{\"name\":\"f g\"," SCHEMA "}]}", "tools", "tools[0].name"},
        {BEGIN MESSAGES ",\"tools\":[{\"name\":\"f\",\"description\":5," SCHEMA "}]}", "tools",
         "tools[0].description: expected a string"},
        {BEGIN MESSAGES ",\"tools\":[{\"name\":\"f\"," SCHEMA "},{\"name\":\"f\"," SCHEMA "}]}",
         "tools", "tools[1].name: there is another tool 'f'"},
        {BEGIN MESSAGES ",\"tool_choice\":\"auto\"}", "tool_choice", "expected {\"type\""},
        {BEGIN MESSAGES ",\"tool_choice\":{\"type\":\"tool\"}}", "tool_choice", "\"name\": ...}"},
        {BEGIN MESSAGES ",\"tool_choice\":{\"type\":\"auto\",\"disable_parallel_tool_use\":1}}",
         "tool_choice", "tool_choice.disable_parallel_tool_use: expected true or false"},
        {BEGIN MESSAGES ",\"thinking\":true}", "thinking", "thinking.type: expected"},
        {BEGIN MESSAGES ",\"thinking\":{\"type\":\"enabled\"}}", "thinking", "budget_tokens"},
        {BEGIN MESSAGES ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1000}}", "thinking",
         "at least 1024"},
        {BEGIN MESSAGES ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024}}", "thinking",
         "expected less than max_tokens (5), found 1024"},
        {BEGIN MESSAGES ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":2e3}}", "thinking",
         "expected less than max_tokens (5), found 2000"},
        {BEGIN MESSAGES ",\"thinking\":{\"type\":\"adaptive\\u0000\"}}", "thinking",
         "thinking.type"},
        {BEGIN MESSAGES ",\"mcp_servers\":[{}]}", "mcp_servers", "this server calls no others"},
        {BEGIN MESSAGES ",\"output_config\":{\"format\":{}}}", "output_config", "cannot constrain"},
        {BEGIN MESSAGES ",\"output_config\":5}", "output_config", "expected an object"},
        {BEGIN MESSAGES ",\"output_format\":{}}", "output_format", "cannot constrain"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) assert_refused(&cases[i]);
}

/* ---- through the chat request --------------------------------------------------------------- */

static void whole_requests(void **state)
{
    (void)state;
    assert_ok(ask("hello", ",\"temperature\":0,\"top_k\":5,\"stream\":true,\"seed\":9,"
                           "\"stop_sequences\":[\"a\",\"bc\"]"),
              fault.error);
    assert_string_equal(request.model, "m");
    assert_int_equal(request.request.max_tokens, 40);
    assert_true(request.request.sampling.temperature == 0 && request.request.sampling.top_k == 5);
    assert_true(request.stream && request.request.sampling.seed == 9);
    assert_int_equal(request.request.n_stop, 2);
    assert_string_equal(request.request.stop[1], "bc");
    json_t *count = anthropic_count(&request);
    char *text = json_dumps(count, JSON_COMPACT);
    assert_string_equal(text, "{\"input_tokens\":5}");
    free(text);
    json_decref(count);
    assert_non_null(
        strstr(seen_by_template, "\"chat_template_kwargs\":{\"enable_thinking\":false}"));

    assert_ok(ask(tool_prompt, TOOLS ",\"tool_choice\":{\"type\":\"tool\",\"name\":\"add-2\"}"),
              fault.error);
    assert_string_equal(request.chosen_tool, "add-2");
    assert_true(request.one_call && request.call_demanded);
    assert_int_equal(request.n_tools, 2);
}

/* What the chat request refuses is named as the Messages API names it. */
static void faults_of_the_chat(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"temperature", ",\"temperature\":-1"},
        {"top_p", ",\"top_p\":2"},
        {"top_k", ",\"top_k\":1.5"},
        {"stream", ",\"stream\":1"},
        {"model", ",\"model\":5"},
        {"max_tokens", ",\"max_tokens\":0"},
        {"max_tokens", ",\"max_tokens\":\"5\""},
        {"tool_choice", ",\"tool_choice\":{\"type\":\"any\"}"},
        {"tool_choice", TOOLS ",\"tool_choice\":{\"type\":\"tool\",\"name\":\"other\"}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        linnet_status status = ask(tool_prompt, cases[i][1]);
        if (openai_http_status(status) != 400) fail_msg("%s was accepted", cases[i][1]);
        assert_string_equal(fault.field, cases[i][0]);
    }
    assert_int_equal(ask("no tools here", TOOLS), LINNET_UNSUPPORTED);
    assert_string_equal(fault.field, "tools");
}

static int release(void **state)
{
    (void)state;
    openai_request_free(&request);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(simple_request),    cmocka_unit_test(system_and_texts),
        cmocka_unit_test(calls_and_results), cmocka_unit_test(thinking_in_messages),
        cmocka_unit_test(thinking_field),    cmocka_unit_test(tools_and_choices),
        cmocka_unit_test(refused_messages),  cmocka_unit_test(refused_fields),
        cmocka_unit_test(whole_requests),    cmocka_unit_test(faults_of_the_chat),
    };
    return cmocka_run_group_tests(tests, NULL, release);
}
