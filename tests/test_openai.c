/*
 * OpenAI requests and responses. The few library functions that openai.c calls are replaced here by
 * a model of one token a byte, so that the messages are tested alone; tests/test_program.c runs
 * them on a real model.
 */
#include "support.h"

#include "serve/openai.h"

enum { VOCABULARY = 256 };

/* What openai.c handed to the template last, and what it wrote, "hello" if NULL. */
static char seen_by_template[1024];
static const char *written_by_template;
static bool has_tools; /* the request: it is rendered without them first */

void linnet_free(void *memory)
{
    free(memory);
}

void linnet_model_get_info(const linnet_model *model, linnet_model_info *info)
{
    (void)model;
    *info = (linnet_model_info){.name = "bytes", .vocab_size = VOCABULARY, .context_length = 100};
}

void linnet_sampling_defaults(const linnet_model *model, linnet_sampling *sampling)
{
    (void)model;
    *sampling = (linnet_sampling){
        .temperature = 0.75F, .top_p = 0.5F, .top_k = 20, .repetition_penalty = 1};
}

linnet_status linnet_tokenize(const linnet_model *model, const char *text, size_t n, unsigned flags,
                              int32_t **ids, size_t *n_ids, linnet_error *error)
{
    (void)model, (void)error;
    assert_true(flags & LINNET_PARSE_SPECIAL);
    *ids = malloc((n + 1) * sizeof **ids);
    for (size_t i = 0; i < n; i++) (*ids)[i] = (unsigned char)text[i];
    *n_ids = n;
    return LINNET_OK;
}

linnet_status linnet_detokenize(const linnet_model *model, const int32_t *ids, size_t n,
                                unsigned flags, char **text, size_t *size, linnet_error *error)
{
    (void)model, (void)flags, (void)error;
    *text = malloc(n + 1);
    for (size_t i = 0; i < n; i++) (*text)[i] = (char)ids[i];
    (*text)[n] = 0;
    *size = n;
    return LINNET_OK;
}

linnet_status linnet_chat_tokenize(const linnet_model *model, const char *request, size_t n,
                                   char **rendered, size_t *rendered_size, int32_t **ids,
                                   size_t *n_ids, linnet_error *error)
{
    bool plain = has_tools && !strstr(request, "\"tools\":");
    const char *text = written_by_template && !plain ? written_by_template : "hello";
    snprintf(seen_by_template, sizeof seen_by_template, "%.*s", (int)n, request);
    if (strstr(request, "image_url"))
        return error_set(error, LINNET_INVALID, "content part 'image_url' is not supported");
    *rendered_size = strlen(text);
    *rendered = strdup(text);
    return linnet_tokenize(model, text, strlen(text), LINNET_PARSE_SPECIAL, ids, n_ids, error);
}

const char *linnet_finish_name(linnet_finish finish)
{
    static const char *const names[] = {"none", "stop", "length", "cancelled", "error"};
    return names[finish];
}

/* ---- requests ------------------------------------------------------------------------------ */

static struct openai_request request;
static struct openai_fault fault;

static linnet_status parse(enum openai_endpoint endpoint, const char *body)
{
    json_error_t where;
    json_t *json = json_loads(body, JSON_DECODE_ANY | JSON_ALLOW_NUL, &where);
    if (!json) fail_msg("test body '%s': %s", body, where.text);
    openai_request_free(&request);
    has_tools = json_object_get(json, "tools");
    linnet_status status = openai_request_parse(NULL, endpoint, json, &request, &fault);
    json_decref(json);
    return status;
}

/* A chat request with one message and these fields more. */
static linnet_status chat(const char *fields)
{
    char body[2048];
    snprintf(body, sizeof body, "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]%s%s}",
             *fields ? ", " : "", fields);
    return parse(OPENAI_CHAT, body);
}

static void chat_defaults(void **state)
{
    (void)state;
    assert_ok(chat(""), fault.error);
    const linnet_request *r = &request.request;
    assert_int_equal(request.n_prompts, 1);
    assert_int_equal(request.prompts[0].n, 5);
    assert_int_equal(request.prompts[0].ids[0], 'h');
    assert_int_equal(r->max_tokens, 0);
    assert_int_equal(r->n, 1);
    assert_true(r->sampling.temperature == 0.75F && r->sampling.top_k == 20);
    assert_false(r->sampling.has_seed || r->want_logprobs || r->ignore_eos || request.stream);
    assert_null(request.model);
}

static void chat_all_fields(void **state)
{
    (void)state;
    assert_ok(
        chat("\"model\": \"m\", \"max_tokens\": 5, \"max_completion_tokens\": 7, "
             "\"temperature\": 0, \"top_p\": 0.9, \"top_k\": -1, \"min_p\": 0.1, \"n\": 3, "
             "\"stop\": [\"a\", \"bc\"], \"seed\": 42, \"presence_penalty\": -1, "
             "\"frequency_penalty\": 1.5, \"repetition_penalty\": 1.25, "
             "\"logit_bias\": {\"5\": -100, \"255\": 1e308}, \"logprobs\": true, "
             "\"top_logprobs\": 4, \"min_tokens\": 2, \"ignore_eos\": true, \"priority\": -7, "
             "\"stop_token_ids\": [1, 2], \"include_stop_str_in_output\": true, "
             "\"skip_special_tokens\": false, \"return_token_ids\": true, \"user\": \"me\", "
             "\"stream\": true, \"stream_options\": {\"include_usage\": true}, "
             "\"something_new\": {\"a\": 1}"),
        fault.error);
    const linnet_request *r = &request.request;
    const linnet_sampling *s = &r->sampling;
    assert_string_equal(request.model, "m");
    assert_true(r->max_tokens == 7 && r->min_tokens == 2 && r->priority == -7 && r->n == 3);
    assert_true(s->temperature == 0 && s->top_p == 0.9F && s->min_p == 0.1F && s->top_k == 0);
    assert_true(s->has_seed && s->seed == 42);
    assert_true(s->presence_penalty == -1 && s->frequency_penalty == 1.5F);
    assert_true(s->repetition_penalty == 1.25F);
    assert_int_equal(s->n_logit_bias, 2);
    assert_int_equal(s->logit_bias[0].id, 5);
    assert_true(s->logit_bias[0].bias == -100 && s->logit_bias[1].bias == 1e4F);
    assert_int_equal(r->n_stop, 2);
    assert_string_equal(r->stop[1], "bc");
    assert_int_equal(r->n_stop_ids, 2);
    assert_int_equal(r->stop_ids[1], 2);
    assert_true(r->want_logprobs && r->logprobs == 4);
    assert_true(r->ignore_eos && r->include_stop && r->keep_special_tokens);
    assert_true(request.stream && request.include_usage && request.return_token_ids);
}

#define TOOLS                                                                         \
    "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", " \
    "\"parameters\": {\"type\": \"object\"}}}, "                                      \
    "{\"type\": \"function\", \"function\": {\"name\": \"add-2\"}}]"

static void what_the_template_sees(void **state)
{
    (void)state;
    written_by_template = "a prompt that names get_weather";
    assert_ok(chat(TOOLS ", \"add_generation_prompt\": false, "
                         "\"chat_template_kwargs\": {\"enable_thinking\": false}, \"seed\": 1"),
              fault.error);
    assert_non_null(strstr(seen_by_template, "\"tools\":[{\"type\":\"function\","));
    assert_non_null(strstr(seen_by_template, "\"add_generation_prompt\":false"));
    assert_non_null(strstr(seen_by_template, "\"enable_thinking\":false"));
    assert_null(strstr(seen_by_template, "seed"));
    assert_ok(chat(TOOLS ", \"tool_choice\": \"none\""), fault.error);
    assert_null(strstr(seen_by_template, "tools"));
    assert_int_equal(request.n_tools, 0);
    written_by_template = NULL;
}

static void other_names_and_nulls(void **state)
{
    (void)state;
    assert_ok(chat("\"n_predict\": 9, \"repeat_penalty\": 1.5, \"stop\": \"x\", \"seed\": null, "
                   "\"temperature\": null, \"response_format\": {\"type\": \"text\"}, "
                   "\"tool_choice\": \"auto\", \"best_of\": 1, \"echo\": false, \"top_k\": 3.0"),
              fault.error);
    assert_int_equal(request.request.max_tokens, 9);
    assert_true(request.request.sampling.repetition_penalty == 1.5F);
    assert_int_equal(request.request.sampling.top_k, 3);
    assert_string_equal(request.request.stop[0], "x");
    assert_ok(chat("\"n_predict\": -1"), fault.error);
    assert_int_equal(request.request.max_tokens, 0);
}

/* Each is refused with status 400, and the error names the field. */
static void refused_fields(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"logit_bias", "{\"256\": 5}"},
        {"logit_bias", "{\"4294967296\": 5}"},
        {"logit_bias", "{\"-1\": 5}"},
        {"logit_bias", "{\"x\": 1}"},
        {"logit_bias", "{\"\": 1}"},
        {"logit_bias", "{\" 5\": 1}"},
        {"logit_bias", "{\"5\": \"a\"}"},
        {"logit_bias", "[]"},
        {"seed", "-1"},
        {"seed", "1.5"},
        {"seed", "\"1\""},
        {"n", "0"},
        {"n", "100000"},
        {"n", "1.5"},
        {"max_tokens", "0"},
        {"max_tokens", "-5"},
        {"max_tokens", "\"8\""},
        {"max_completion_tokens", "3000000000"},
        {"min_tokens", "-1"},
        {"priority", "2147483648"},
        {"temperature", "-0.5"},
        {"temperature", "\"hot\""},
        {"temperature", "true"},
        {"top_p", "0"},
        {"top_p", "1.5"},
        {"top_p", "1e-40"},
        {"min_p", "2"},
        {"top_k", "-2"},
        {"presence_penalty", "2.5"},
        {"frequency_penalty", "-3"},
        {"repetition_penalty", "0"},
        {"repetition_penalty", "0.00001"},
        {"temperature", "10001"},
        {"stop", "5"},
        {"stop", "[\"a\", 5]"},
        {"stop", "\"\""},
        {"stop", "[\"a\", \"\"]"},
        {"stop", "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]"},
        {"stop_token_ids", "[256]"},
        {"stop_token_ids", "[-1]"},
        {"stop_token_ids", "[1.5]"},
        {"stop_token_ids", "5"},
        {"logprobs", "3"},
        {"top_logprobs", "21"},
        {"top_logprobs", "5"},
        {"ignore_eos", "1"},
        {"stream", "\"yes\""},
        {"stream_options", "{\"include_usage\": true}"},
        {"model", "5"},
        {"model", "\"a\\u0000b\""},
        {"tools", "{}"},
        {"tools", "[5]"},
        {"tools", "[{}]"},
        {"tools", "[{\"type\": \"web_search\"}]"},
        {"tools", "[{\"type\": \"function\"}]"},
        {"tools", "[{\"type\": \"function\", \"function\": {}}]"},
        {"tools", "[{\"type\": \"function\", \"function\": {\"name\": \"\"}}]"},
        {"tools", "[{\"type\": \"function\", \"function\": {\"name\": \"a b\"}}]"},
        {"tools", "[{\"type\": \"function\", \"function\": {\"name\": \"a\\u0000\"}}]"},
        {"tools", "[{\"type\": \"function\", \"function\": {\"name\": \"a\", "
                  "\"parameters\": []}}]"},
        {"tools", "[{\"type\": \"function\", \"function\": {\"name\": "
                  "\"a2345678901234567890123456789012345678901234567890123456789012345\"}}]"},
        {"tools", "[{\"type\": \"function\", \"function\": {\"name\": \"not_in_prompt\"}}]"},
        {"tool_choice", "\"required\""},
        {"tool_choice", "\"sometimes\""},
        {"tool_choice", "5"},
        {"tool_choice", "{\"type\": \"function\"}"},
        {"tool_choice", "{\"type\": \"function\", \"function\": {\"name\": \"f\"}}"},
        {"parallel_tool_calls", "1"},
        {"functions", "[{\"name\": \"f\"}]"},
        {"function_call", "\"auto\""},
        {"function_call", "{\"name\": \"f\"}"},
        {"chat_template_kwargs", "[]"},
        {"add_generation_prompt", "\"no\""},
        {"response_format", "{\"type\": \"json_object\"}"},
        {"chat_template", "\"{{ x }}\""},
        {"continue_final_message", "true"},
        {"structured_outputs", "{\"regex\": \"a\"}"},
        {"prompt_logprobs", "1"},
        {"truncate_prompt_tokens", "5"},
        {"cache_salt", "\"s\""},
        {"grammar", "\"root ::= x\""},
        {"best_of", "2"},
        {"echo", "true"},
        {"reasoning_effort", "\"high\""},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char fields[256];
        snprintf(fields, sizeof fields, "\"%s\": %s", bad[i][0], bad[i][1]);
        linnet_status status = chat(fields);
        if (openai_http_status(status) != 400) fail_msg("%s was accepted", fields);
        if (strcmp(fault.field, bad[i][0]) != 0)
            fail_msg("%s: the fault names '%s': %s", fields, fault.field, fault.error.message);
        if (!strstr(fault.error.message, bad[i][0]))
            fail_msg("%s: the message does not name it: %s", fields, fault.error.message);
        openai_request_free(&request);
    }
    assert_int_not_equal(chat("\"max_tokens\": 2, \"min_tokens\": 3"), LINNET_OK);
    assert_string_equal(fault.field, "min_tokens");
}

#define MESSAGE(more)  "{\"messages\": [{\"role\": \"assistant\", \"content\": \"\", " more "}]}"
#define CALL_OF(words) "{\"function\": {\"name\": \"f\", \"arguments\": " words "}}"

static void refused_messages(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "{}",
        "{\"messages\": null}",
        "{\"messages\": \"hi\"}",
        "{\"messages\": []}",
        "{\"messages\": [\"hi\"]}",
        "{\"messages\": [{\"content\": \"hi\"}]}",
        "{\"messages\": [{\"role\": 5, \"content\": \"hi\"}]}",
        "{\"messages\": [{\"role\": \"user\"}]}",
        "{\"messages\": [{\"role\": \"user\", \"content\": 5}]}",
        "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}",
        "{\"messages\": [{\"role\": \"function\", \"name\": \"f\", \"content\": \"1\"}]}",
        MESSAGE("\"function_call\": {\"name\": \"f\"}"),
        MESSAGE("\"tool_calls\": 5"),
        MESSAGE("\"tool_calls\": [5]"),
        MESSAGE("\"tool_calls\": [{\"type\": \"function\"}]"),
        MESSAGE("\"tool_calls\": [{\"type\": \"x\", \"function\": {\"name\": \"f\"}}]"),
        MESSAGE("\"tool_calls\": [{\"function\": {\"name\": \"a b\"}}]"),
        MESSAGE("\"tool_calls\": [" CALL_OF("\"{\"") "]"),
        MESSAGE("\"tool_calls\": [" CALL_OF("\"5\"") "]"),
        MESSAGE("\"tool_calls\": [" CALL_OF("[]") "]"),
        "{\"messages\": [{\"role\": \"user\", \"content\": \"\", \"tool_calls\": [" CALL_OF(
            "\"{}\"") "]}]}",
        "{\"messages\": [{\"role\": \"tool\", \"content\": \"1\", \"tool_call_id\": 5}]}",
        MESSAGE("\"reasoning_content\": {}"),
        MESSAGE("\"tool_calls\": [{\"id\": {}, \"function\": {\"name\": \"f\"}}]"),
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (parse(OPENAI_CHAT, bad[i]) == LINNET_OK) fail_msg("%s was accepted", bad[i]);
        assert_string_equal(fault.field, "messages");
    }
    assert_int_equal(parse(OPENAI_CHAT, "[]"), LINNET_INVALID);
    assert_string_equal(fault.field, "");
}

static void completion_prompts(void **state)
{
    (void)state;
    assert_ok(parse(OPENAI_COMPLETIONS, "{\"prompt\": \"ab\", \"logprobs\": 2}"), fault.error);
    assert_int_equal(request.n_prompts, 1);
    assert_int_equal(request.prompts[0].n, 2);
    assert_int_equal(request.request.max_tokens, 16);
    assert_true(request.request.want_logprobs && request.request.logprobs == 2);
    assert_ok(parse(OPENAI_COMPLETIONS, "{\"prompt\": [\"a\", \"bcd\"], \"n\": 2}"), fault.error);
    assert_int_equal(request.n_prompts, 2);
    assert_int_equal(request.prompts[1].n, 3);
    assert_ok(parse(OPENAI_COMPLETIONS, "{\"prompt\": [7, 8, 9]}"), fault.error);
    assert_int_equal(request.n_prompts, 1);
    assert_int_equal(request.prompts[0].ids[2], 9);
    assert_ok(parse(OPENAI_COMPLETIONS, "{\"prompt\": [[7, 8], [9]]}"), fault.error);
    assert_int_equal(request.n_prompts, 2);
    assert_int_equal(request.prompts[1].ids[0], 9);

    assert_ok(parse(OPENAI_COMPLETIONS, "{\"prompt\": [\"a\\u0000b\", [7]], \"echo\": true}"),
              fault.error);
    assert_int_equal(request.prompts[0].text_size, 3);
    assert_memory_equal(request.prompts[0].text, "a\0b", 3);

    static const char *const bad[] = {
        "{}",
        "{\"prompt\": \"\"}",
        "{\"prompt\": []}",
        "{\"prompt\": [[]]}",
        "{\"prompt\": {}}",
        "{\"prompt\": 5}",
        "{\"prompt\": [256]}",
        "{\"prompt\": [999999]}",
        "{\"prompt\": [-1]}",
        "{\"prompt\": [1, \"a\"]}",
        "{\"prompt\": [\"a\", 1]}",
        "{\"prompt\": [[1], [1.5]]}",
        "{\"prompt\": [\"a\", \"b\"], \"n\": 100}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (parse(OPENAI_COMPLETIONS, bad[i]) == LINNET_OK) fail_msg("%s was accepted", bad[i]);
        assert_string_equal(fault.field, "prompt");
    }
}

/* ---- tools --------------------------------------------------------------------------------- */

/* Arguments become objects, absent contents become "", everything else stays as it was. */
static void calls_in_messages(void **state)
{
    (void)state;
    assert_ok(
        parse(OPENAI_CHAT,
              "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"},"
              "{\"role\": \"assistant\", \"content\": null, \"reasoning\": \"r\", \"tool_calls\": ["
              "{\"id\": \"call_1\", \"type\": \"function\", \"function\": {\"name\": \"f\", "
              "\"arguments\": \"{\\\"b\\\": 1.0, \\\"a\\\": [\\\"\\u00e9\\\"]}\"}},"
              "{\"function\": {\"name\": \"f\", \"arguments\": {\"c\": 2}}},"
              "{\"function\": {\"name\": \"f\", \"arguments\": \"\"}},"
              "{\"function\": {\"name\": \"f\"}}]},"
              "{\"role\": \"tool\", \"tool_call_id\": \"call_1\", \"content\": \"3\"}]}"),
        fault.error);
    assert_string_equal(
        seen_by_template,
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},"
        "{\"role\":\"assistant\",\"content\":\"\",\"reasoning\":\"r\",\"tool_calls\":["
        "{\"id\":\"call_1\",\"type\":\"function\",\"function\":{\"name\":\"f\","
        "\"arguments\":{\"b\":1.0,\"a\":[\"\xC3\xA9\"]}}},"
        "{\"function\":{\"name\":\"f\",\"arguments\":{\"c\":2}}},"
        "{\"function\":{\"name\":\"f\",\"arguments\":{}}},"
        "{\"function\":{\"name\":\"f\",\"arguments\":{}}}],\"reasoning_content\":\"r\"},"
        "{\"role\":\"tool\",\"tool_call_id\":\"call_1\",\"content\":\"3\"}]}");
}

static void too_many_tools(void **state)
{
    (void)state;
    written_by_template = "tools", has_tools = true;
    for (size_t n = 128; n <= 129; n++) {
        json_t *tools = json_array(), *body;
        for (size_t i = 0; i < n; i++)
            json_array_append_new(
                tools, json_pack("{s:s,s:{s:s}}", "type", "function", "function", "name", "hello"));
        body = json_pack("{s:[{s:s,s:s}],s:o}", "messages", "role", "user", "content", "x", "tools",
                         tools);
        openai_request_free(&request);
        linnet_status status = openai_request_parse(NULL, OPENAI_CHAT, body, &request, &fault);
        assert_int_equal(status == LINNET_OK, n == 128);
        json_decref(body);
    }
    assert_string_equal(fault.field, "tools");
    written_by_template = NULL;
}

/* A demanded call is begun behind the prompt, in the form that the template asks for. */
static void demanded_calls(void **state)
{
    (void)state;
    static const char hermes[] = "get_weather <tool_call>\n",
                      llama[] =
                          "get_weather {\"name\": function name, \"parameters\": dictionary}\n";
    static const char thinking[] = "get_weather <tool_call> assistant\n<think>\n";
    static const char required[] = "\"tool_choice\": \"required\"";
    static const char named[] = "\"tool_choice\": {\"type\": \"function\", \"function\": "
                                "{\"name\": \"add-2\"}}";
    static const struct {
        const char *prompt, *choice, *prefix;
    } cases[] = {
        {hermes, required, "<tool_call>\n{\"name\":"},
        {hermes, named, "<tool_call>\n{\"name\": \"add-2\", \"arguments\":"},
        {llama, required, "{\"name\":"},
        {llama, named, "{\"name\": \"add-2\", \"parameters\":"},
        {thinking, required, "\n</think>\n\n<tool_call>\n{\"name\":"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char fields[512], ids[256];
        snprintf(fields, sizeof fields, TOOLS ", %s", cases[i].choice);
        written_by_template = cases[i].prompt;
        assert_ok(chat(fields), fault.error);
        assert_string_equal(request.answer_prefix, cases[i].prefix);
        size_t n = request.prompts[0].n;
        for (size_t k = 0; k < n; k++) ids[k] = (char)request.prompts[0].ids[k];
        ids[n] = 0;
        assert_int_equal(strncmp(ids, cases[i].prompt, strlen(cases[i].prompt)), 0);
        assert_string_equal(ids + strlen(cases[i].prompt), cases[i].prefix);
    }
    written_by_template = "get_weather [AVAILABLE_TOOLS]";
    assert_int_equal(chat(TOOLS ", \"tool_choice\": \"required\""), LINNET_UNSUPPORTED);
    assert_string_equal(fault.field, "tool_choice");
    assert_ok(chat(TOOLS ", \"tool_choice\": \"auto\""), fault.error);
    assert_null(request.answer_prefix);
    written_by_template = hermes;
    assert_int_equal(
        chat(TOOLS ", \"tool_choice\": \"required\", \"add_generation_prompt\": false"),
        LINNET_INVALID);
    written_by_template = NULL;
}

static void token(struct openai_answer *answer, int32_t id, const char *text)
{
    const linnet_logprob top[2] = {{id, -0.25F}, {1, -2}};
    linnet_event event = {.type = LINNET_EVENT_TOKEN,
                          .prompt_tokens = 5,
                          .cached_tokens = 2,
                          .completion_tokens = (int32_t)answer->n_tokens + 1,
                          .token = id,
                          .text = text,
                          .text_size = strlen(text),
                          .has_logprobs = true,
                          .logprob = -0.25F,
                          .top = top,
                          .n_top = 2};
    openai_answer_add(answer, &event);
}

static void finish(struct openai_answer *answer, linnet_finish how, const char *rest)
{
    linnet_event event = {.type = LINNET_EVENT_FINISHED,
                          .prompt_tokens = 5,
                          .cached_tokens = 2,
                          .completion_tokens = (int32_t)answer->n_tokens,
                          .text = rest,
                          .text_size = strlen(rest),
                          .finish = how};
    openai_answer_add(answer, &event);
}

static json_t *at(json_t *json, const char *path)
{
    char copy[128];
    snprintf(copy, sizeof copy, "%s", path);
    for (char *key = strtok(copy, "."); key; key = strtok(NULL, ".")) {
        json = *key >= '0' && *key <= '9' ? json_array_get(json, (size_t)atoi(key))
                                          : json_object_get(json, key);
        if (!json) fail_msg("no '%s' in the response", path);
    }
    return json;
}

#define assert_text(json, path, text) assert_string_equal(json_string_value(at(json, path)), text)
#define assert_number(json, path, n)  assert_int_equal(json_integer_value(at(json, path)), n)

static json_t *respond(struct openai_answer *answers, size_t n)
{
    struct openai_reply reply = {
        .id = "id-1", .model_name = "m", .created = 1700000000, .answers = answers, .n_answers = n};
    json_t *json = openai_response(NULL, &request, &reply);
    assert_non_null(json);
    for (size_t i = 0; i < n; i++) openai_answer_free(&answers[i]);
    return json;
}

static void chat_response(void **state)
{
    (void)state;
    struct openai_answer answers[2] = {0};
    assert_ok(chat("\"n\": 2, \"logprobs\": true, \"top_logprobs\": 2, \"return_token_ids\": true"),
              fault.error);
    token(&answers[0], 'A', "A");
    token(&answers[0], 0xC3, "");
    token(&answers[0], 0xA9, "\xC3\xA9");
    finish(&answers[0], LINNET_FINISH_STOP, "!");
    token(&answers[1], 'B', "B");
    finish(&answers[1], LINNET_FINISH_LENGTH, "");
    json_t *json = respond(answers, 2);
    assert_text(json, "object", "chat.completion");
    assert_text(json, "id", "id-1");
    assert_number(json, "created", 1700000000);
    assert_text(json, "model", "m");
    assert_int_equal(json_array_size(at(json, "choices")), 2);
    assert_text(json, "choices.0.message.role", "assistant");
    assert_text(json, "choices.0.message.content", "A\xC3\xA9!");
    assert_text(json, "choices.0.finish_reason", "stop");
    assert_text(json, "choices.1.finish_reason", "length");
    assert_number(json, "choices.1.index", 1);
    assert_number(json, "choices.0.token_ids.2", 0xA9);
    assert_text(json, "choices.0.logprobs.content.0.token", "A");
    assert_text(json, "choices.0.logprobs.content.1.token", "\xEF\xBF\xBD");
    assert_number(json, "choices.0.logprobs.content.1.bytes.0", 0xC3);
    assert_true(json_real_value(at(json, "choices.0.logprobs.content.0.logprob")) == -0.25);
    assert_int_equal(json_array_size(at(json, "choices.0.logprobs.content.2.top_logprobs")), 2);
    assert_number(json, "usage.prompt_tokens", 5);
    assert_number(json, "usage.completion_tokens", 4);
    assert_number(json, "usage.total_tokens", 9);
    assert_number(json, "usage.prompt_tokens_details.cached_tokens", 2);
    json_decref(json);
}

static void completion_response(void **state)
{
    (void)state;
    struct openai_answer answers[2] = {0};
    assert_ok(parse(OPENAI_COMPLETIONS, "{\"prompt\": [\"hello\", \"world\"], \"logprobs\": 2}"),
              fault.error);
    for (int i = 0; i < 2; i++) {
        token(&answers[i], 'A', "A");
        token(&answers[i], 'B', "B");
        finish(&answers[i], LINNET_FINISH_STOP, "");
    }
    json_t *json = respond(answers, 2);
    assert_text(json, "object", "text_completion");
    assert_text(json, "choices.1.text", "AB");
    assert_number(json, "choices.0.logprobs.text_offset.1", 1);
    assert_text(json, "choices.0.logprobs.tokens.1", "B");
    assert_true(json_real_value(at(json, "choices.0.logprobs.top_logprobs.0.A")) == -0.25);
    assert_number(json, "usage.prompt_tokens", 10);
    assert_number(json, "usage.completion_tokens", 4);
    json_decref(json);
}

static void without_logprobs(void **state)
{
    (void)state;
    struct openai_answer answer = {0};
    assert_ok(chat(""), fault.error);
    finish(&answer, LINNET_FINISH_STOP, "");
    json_t *json = respond(&answer, 1);
    assert_true(json_is_null(at(json, "choices.0.logprobs")));
    assert_null(json_object_get(at(json, "choices.0"), "token_ids"));
    assert_text(json, "choices.0.message.content", "");
    json_decref(json);
}

static struct openai_answer answer_of(const char *fields, const char *prompt, const char *text,
                                      linnet_finish how)
{
    struct openai_answer answer = {0};
    written_by_template = prompt;
    assert_ok(chat(fields), fault.error);
    written_by_template = NULL;
    openai_answer_start(&answer, &request);
    for (size_t i = 0; text[i]; i++) {
        const char piece[2] = {text[i], 0};
        token(&answer, (unsigned char)text[i], piece);
    }
    finish(&answer, how, "");
    return answer;
}

static const char hermes_prompt[] = "get_weather <tool_call>";
static const char two_calls[] =
    "<think>\nhm\n</think>\n\nSee:\n<tool_call>\n{\"name\": \"add-2\", \"arguments\": {\"a\":  "
    "[1]}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_weather\"}\n</tool_call>";

static void response_with_calls(void **state)
{
    (void)state;
    struct openai_answer answer = answer_of(TOOLS, hermes_prompt, two_calls, LINNET_FINISH_STOP);
    assert_string_equal(answer.text.data, two_calls);
    json_t *json = respond(&answer, 1);
    assert_text(json, "choices.0.finish_reason", "tool_calls");
    assert_text(json, "choices.0.message.content", "See:");
    assert_text(json, "choices.0.message.reasoning_content", "hm");
    assert_int_equal(json_array_size(at(json, "choices.0.message.tool_calls")), 2);
    assert_text(json, "choices.0.message.tool_calls.0.type", "function");
    assert_text(json, "choices.0.message.tool_calls.0.function.name", "add-2");
    assert_text(json, "choices.0.message.tool_calls.0.function.arguments", "{\"a\":  [1]}");
    assert_text(json, "choices.0.message.tool_calls.1.function.name", "get_weather");
    assert_text(json, "choices.0.message.tool_calls.1.function.arguments", "{}");
    const char *first = json_string_value(at(json, "choices.0.message.tool_calls.0.id"));
    const char *second = json_string_value(at(json, "choices.0.message.tool_calls.1.id"));
    assert_int_equal(strlen(first), strlen("call_") + 24);
    assert_int_equal(strncmp(first, "call_", 5), 0);
    assert_string_not_equal(first, second);
    assert_true(json_integer_value(at(json, "usage.completion_tokens_details.reasoning_tokens")) >
                0);
    json_decref(json);
}

static void response_without_content(void **state)
{
    (void)state;
    struct openai_answer answer = answer_of(
        TOOLS ", \"tool_choice\": \"required\", \"parallel_tool_calls\": false", hermes_prompt,
        " \"add-2\", \"arguments\": {}}\n</tool_call>and more", LINNET_FINISH_CANCELLED);
    assert_true(openai_answer_is_closed(&answer));
    json_t *json = respond(&answer, 1);
    assert_text(json, "choices.0.finish_reason", "tool_calls");
    assert_true(json_is_null(at(json, "choices.0.message.content")));
    assert_text(json, "choices.0.message.tool_calls.0.function.name", "add-2");
    assert_null(json_object_get(at(json, "choices.0.message"), "reasoning_content"));
    assert_null(json_object_get(at(json, "usage"), "completion_tokens_details"));
    json_decref(json);

    static const char cut[] = "<tool_call>{\"name\": \"add-2\", \"arguments\": {\"a\": ";
    answer = answer_of(TOOLS, hermes_prompt, cut, LINNET_FINISH_LENGTH);
    json = respond(&answer, 1);
    assert_text(json, "choices.0.finish_reason", "length");
    assert_text(json, "choices.0.message.content", cut);
    assert_null(json_object_get(at(json, "choices.0.message"), "tool_calls"));
    json_decref(json);

    answer = answer_of("", NULL, "<think>all of it", LINNET_FINISH_LENGTH);
    json = respond(&answer, 1);
    assert_true(json_is_null(at(json, "choices.0.message.content")));
    assert_text(json, "choices.0.message.reasoning_content", "all of it");
    json_decref(json);

    answer = answer_of("", "prompt <think>\n", "so\n</think>\n\nYes", LINNET_FINISH_STOP);
    json = respond(&answer, 1);
    assert_text(json, "choices.0.message.content", "Yes");
    assert_text(json, "choices.0.message.reasoning_content", "so");
    json_decref(json);

    answer = answer_of("", NULL, strstr(two_calls, "See:"),
                       LINNET_FINISH_STOP); /* no tools: only text */
    json = respond(&answer, 1);
    assert_text(json, "choices.0.finish_reason", "stop");
    assert_text(json, "choices.0.message.content", strstr(two_calls, "See:"));
    json_decref(json);
}

/* What a client adds up from the chunks is what the whole message says. */
static void chunks(void **state)
{
    (void)state;
    struct openai_answer answer = answer_of(TOOLS, hermes_prompt, two_calls, LINNET_FINISH_STOP);
    char content[64] = "", reasoning[64] = "", arguments[2][64] = {"", ""};
    size_t n_begun = 0, n_chunks = 0;
    for (size_t i = 0, end; i < answer.n_deltas; i = end, n_chunks++) {
        end = openai_delta_join(&answer, i);
        assert_true(end > i && end <= answer.n_deltas);
        json_t *delta = openai_delta(&answer, i, end);
        assert_int_equal(json_object_size(delta), 1);
        const char *text = json_string_value(json_object_get(delta, "content"));
        if (text) strcat(content, text);
        text = json_string_value(json_object_get(delta, "reasoning_content"));
        if (text) strcat(reasoning, text);
        json_t *calls = json_object_get(delta, "tool_calls");
        if (calls) {
            size_t index = (size_t)json_integer_value(at(calls, "0.index"));
            json_t *call = at(calls, "0");
            if (json_object_get(call, "id")) {
                assert_int_equal(index, n_begun++);
                assert_text(call, "type", "function");
                assert_text(call, "function.name", index ? "get_weather" : "add-2");
                assert_text(call, "function.arguments", "");
            } else {
                assert_null(json_object_get(call, "type"));
                assert_null(json_object_get(at(call, "function"), "name"));
            }
            strcat(arguments[index], json_string_value(at(call, "function.arguments")));
        }
        json_decref(delta);
    }
    assert_string_equal(content, "See:");
    assert_string_equal(reasoning, "hm");
    assert_string_equal(arguments[0], "{\"a\":  [1]}");
    assert_string_equal(arguments[1], "{}");
    assert_int_equal(n_begun, 2);
    assert_int_equal(n_chunks, 6);
    assert_true(answer.n_deltas > n_chunks); /* a token a byte: they came one by one */
    assert_string_equal(openai_finish_reason(&answer), "tool_calls");
    openai_answer_free(&answer);
}

static void errors(void **state)
{
    (void)state;
    struct openai_fault f = {.field = "messages"};
    error_set(&f.error, LINNET_TOO_LONG, "200 tokens, at most 100");
    json_t *json = openai_error(&f);
    assert_text(json, "error.message", "200 tokens, at most 100");
    assert_text(json, "error.type", "invalid_request_error");
    assert_text(json, "error.param", "messages");
    assert_text(json, "error.code", "context_length_exceeded");
    json_decref(json);
    f = (struct openai_fault){.error = {.status = LINNET_NUMERIC, .message = "NaN"}};
    json = openai_error(&f);
    assert_text(json, "error.type", "server_error");
    assert_true(json_is_null(at(json, "error.param")));
    json_decref(json);
    assert_int_equal(openai_http_status(LINNET_NUMERIC), 500);
    assert_int_equal(openai_http_status(LINNET_MEMORY), 503);
    assert_int_equal(openai_http_status(LINNET_UNSUPPORTED), 400);
}

static void texts_and_ids(void **state)
{
    (void)state;
    char a[OPENAI_ID_SIZE], b[OPENAI_ID_SIZE];
    openai_make_id(OPENAI_CHAT, a);
    openai_make_id(OPENAI_CHAT, b);
    assert_int_equal(strlen(a), strlen("chatcmpl-") + 24);
    assert_string_not_equal(a, b);
    json_t *text = openai_text("a\xFF\xE2\x82z\xC3\xA9", 7);
    assert_string_equal(json_string_value(text), "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz\xC3\xA9");
    json_decref(text);
    text = openai_text("a\0b", 3);
    assert_int_equal(json_string_length(text), 3);
    json_decref(text);
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
        cmocka_unit_test(chat_defaults),
        cmocka_unit_test(chat_all_fields),
        cmocka_unit_test(what_the_template_sees),
        cmocka_unit_test(other_names_and_nulls),
        cmocka_unit_test(refused_fields),
        cmocka_unit_test(refused_messages),
        cmocka_unit_test(completion_prompts),
        cmocka_unit_test(calls_in_messages),
        cmocka_unit_test(too_many_tools),
        cmocka_unit_test(demanded_calls),
        cmocka_unit_test(response_with_calls),
        cmocka_unit_test(response_without_content),
        cmocka_unit_test(chunks),
        cmocka_unit_test(chat_response),
        cmocka_unit_test(completion_response),
        cmocka_unit_test(without_logprobs),
        cmocka_unit_test(errors),
        cmocka_unit_test(texts_and_ids),
    };
    return cmocka_run_group_tests(tests, NULL, release);
}
