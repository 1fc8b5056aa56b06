/*
 * The parser of answers: every form, each cut in two at every place and into single bytes, with the
 * same result; then requests with tools as the templates of real models render them.
 */
#include "support.h"

#include "base/strbuf.h"
#include "serve/openai_internal.h"
#include "text/template.h"

/* ---- answers ------------------------------------------------------------------------------- */

/*
 * What came out, as one line: content as it is, reasoning as «...», a complete call as
 * [name arguments]; the calls that were abandoned leave only their content.
 */
struct seen {
    struct strbuf line, content, reasoning, calls, arguments;
    size_t n_begun, n_complete, n_abandoned;
    bool open;
};

static void on_event(void *user, const struct tool_event *event)
{
    struct seen *s = user;
    switch (event->type) {
    case TOOL_CONTENT: strbuf_append(&s->content, event->text, event->size); break;
    case TOOL_REASONING: strbuf_append(&s->reasoning, event->text, event->size); break;
    case TOOL_CALL_BEGIN:
        assert_false(s->open);
        assert_int_equal(event->index, s->n_begun++);
        strbuf_clear(&s->arguments);
        s->open = true;
        break;
    case TOOL_CALL_ARGUMENTS:
        assert_true(s->open && event->size > 0);
        strbuf_append(&s->arguments, event->text, event->size);
        break;
    case TOOL_CALL_END: {
        assert_true(s->open);
        json_t *json = json_loadb(s->arguments.data, s->arguments.size, JSON_ALLOW_NUL, NULL);
        if (!json_is_object(json)) fail_msg("arguments '%s'", strbuf_cstr(&s->arguments));
        json_decref(json);
        strbuf_format(&s->calls, "[%s %s]", event->name, strbuf_cstr(&s->arguments));
        s->open = false;
        s->n_complete++;
        break;
    }
    case TOOL_CALL_ABANDONED:
        assert_true(s->open);
        s->open = false;
        s->n_abandoned++;
        break;
    }
}

static const char *const names[] = {"f", "get_weather", "add-2"};

enum { THINKS = 1, ONE = 2, PLAIN = 4 }; /* prompt ended with <think>; one call; no tools */

static struct tool_parser parser_for(unsigned flags)
{
    struct tool_options options = {.names = names,
                                   .n_names = flags & PLAIN ? 0 : 3,
                                   .in_reasoning = flags & THINKS,
                                   .one_call = flags & ONE};
    struct tool_parser p;
    tool_parser_init(&p, &options);
    return p;
}

/* The pieces end at first, at second and at the end; step > 0: pieces of that size instead. */
static void read_answer(struct seen *s, unsigned flags, const char *text, size_t n, size_t first,
                        size_t step)
{
    struct tool_parser p = parser_for(flags);
    *s = (struct seen){0};
    for (size_t at = 0; at < n;) {
        size_t size = step ? step : at < first ? first - at : n - at;
        if (size > n - at) size = n - at;
        char *copy = malloc(size); /* so that the sanitizer sees a read beyond it */
        memcpy(copy, text + at, size);
        tool_parser_feed(&p, copy, size, on_event, s);
        free(copy);
        at += size;
    }
    tool_parser_finish(&p, on_event, s);
    assert_false(s->open || tool_parser_failed(&p));
    assert_int_equal(p.n_complete, s->n_complete);
    tool_parser_free(&p);
    if (s->reasoning.size) strbuf_format(&s->line, "«%s»", strbuf_cstr(&s->reasoning));
    strbuf_append(&s->line, s->content.data, s->content.size);
    strbuf_append(&s->line, s->calls.data, s->calls.size);
    strbuf_append(&s->line, "", 1);
}

static void seen_free(struct seen *s)
{
    strbuf_free(&s->line);
    strbuf_free(&s->content);
    strbuf_free(&s->reasoning);
    strbuf_free(&s->calls);
    strbuf_free(&s->arguments);
}

static void check(unsigned flags, const char *text, const char *expected, size_t n_abandoned)
{
    size_t n = strlen(text);
    for (size_t first = 0; first <= n + 1; first++) { /* n + 1: single bytes */
        struct seen s;
        read_answer(&s, flags, text, n, first, first > n);
        if (strcmp(s.line.data, expected) != 0)
            fail_msg("'%s' cut at %zu: expected '%s', found '%s'", text, first, expected,
                     s.line.data);
        if (s.n_abandoned != n_abandoned)
            fail_msg("'%s' cut at %zu: %zu abandoned", text, first, s.n_abandoned);
        seen_free(&s);
    }
}

struct form {
    const char *text, *expected;
};

static void check_all(unsigned flags, const struct form *forms, size_t n, size_t n_abandoned)
{
    for (size_t i = 0; i < n; i++) check(flags, forms[i].text, forms[i].expected, n_abandoned);
}
#define CHECK_ALL(flags, forms, n_abandoned) \
    check_all(flags, forms, sizeof(forms) / sizeof *(forms), n_abandoned)

static void plain_text(void **state)
{
    (void)state;
    static const struct form forms[] = {
        {"", ""},
        {"Hello.", "Hello."},
        {"  \n", "  \n"},
        {" a  b\n\nc \n", " a  b\n\nc \n"},
        {"a < b <too <tool <tool_cal", "a < b <too <tool <tool_cal"},
        {"a <<tool_call", "a <<tool_call"},
        {"<tool_response>x</tool_response>", "<tool_response>x</tool_response>"},
        {"</tool_call></think>", "</tool_call></think>"},
        {"x <think>y</think>", "x <think>y</think>"},
        {"x {\"name\": \"f\", \"arguments\": {}}", "x {\"name\": \"f\", \"arguments\": {}}"},
        {"h\xC3\xA9 \xF0\x9F\x99\x82 <\xE2\x82\xAC", "h\xC3\xA9 \xF0\x9F\x99\x82 <\xE2\x82\xAC"},
    };
    CHECK_ALL(0, forms, 0);
    CHECK_ALL(PLAIN, forms, 0);
    CHECK_ALL(ONE, forms, 0);
    check(PLAIN, "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
          "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", 0);
    check(PLAIN, "{\"name\": \"f\", \"arguments\": {}}", "{\"name\": \"f\", \"arguments\": {}}", 0);
}

static void hermes_calls(void **state)
{
    (void)state;
    static const struct form forms[] = {
        {"<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
         "[f {\"a\": 1}]"},
        {"<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>", "[f {}]"},
        {"\n\n <tool_call>\n\n{ \"name\" : \"f\" , \"arguments\" : { } } \n</tool_call>\n",
         "[f { }]"},
        {"<tool_call>\n{\"arguments\": {\"a\": [1, {}]}, \"name\": \"get_weather\"}\n</tool_call>",
         "[get_weather {\"a\": [1, {}]}]"},
        {"<tool_call>\n{\"name\": \"f\", \"parameters\": {\"a\": 1}}\n</tool_call>",
         "[f {\"a\": 1}]"},
        {"<tool_call>\n{\"name\": \"f\"}\n</tool_call>", "[f {}]"},
        {"<tool_call>\n{\"id\": 7, \"name\": \"f\", \"x\": [{\"name\": 1}], \"arguments\": "
         "{\"name\": \"g\", \"arguments\": 2}, \"y\": null}</tool_call>",
         "[f {\"name\": \"g\", \"arguments\": 2}]"},
        {"Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
         "Let me see.[f {}]"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n<tool_call>{\"name\": "
         "\"add-2\", \"arguments\": {\"b\": 2}}</tool_call>",
         "[f {}][add-2 {\"b\": 2}]"},
        {"One.\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\nTwo. "
         "<tool_call>{\"name\": \"f\", \"arguments\": {\"k\":0}}</tool_call> Three.\n",
         "One.\nTwo. Three.\n[f {}][f {\"k\":0}]"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\nDone.", "Done.[f {}]"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"}{][ \\\" \\\\ \\/ \\n "
         "\\u00e9\\uD83D\\ude42 </tool_call> <tool_call>\"}}</tool_call>",
         "[f {\"s\": \"}{][ \\\" \\\\ \\/ \\n \\u00e9\\uD83D\\ude42 </tool_call> <tool_call>\"}]"},
        {"<tool_call>{\"\\u006eame\": \"\\u0067et_weather\", \"arguments\": {\"\xC3\xA9\": "
         "\"\xF0\x9F\x99\x82\"}}</tool_call>",
         "[get_weather {\"\xC3\xA9\": \"\xF0\x9F\x99\x82\"}]"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {\"n\": [0, -1, 1.5e-3, 10E+2, true, false, "
         "null, \"\", [], [[]]]}}</tool_call>",
         "[f {\"n\": [0, -1, 1.5e-3, 10E+2, true, false, null, \"\", [], [[]]]}]"},
        /* the answer's end closes a complete object */
        {"<tool_call>{\"name\": \"f\", \"arguments\": {}}", "[f {}]"},
        {"<tool_call>{\"name\": \"f\", \"arguments\": {}}\n</tool_c", "[f {}]"},
        {"<tool_call>\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
         "<tool_call>\n[f {}]"},
        {"a <tool_<tool_call>{\"name\": \"f\"}</tool_call>", "a <tool_[f {}]"},
    };
    CHECK_ALL(0, forms, 0);
}

static void llama_calls(void **state)
{
    (void)state;
    static const struct form forms[] = {
        {"{\"name\": \"f\", \"parameters\": {\"a\": \"b\"}}", "[f {\"a\": \"b\"}]"},
        {"\n\n{\"name\": \"f\", \"arguments\": {}}\n", "[f {}]"},
        {"{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", "[f {}]"},
        {"{\"parameters\": {\"a\": {\"b\": {}}}, \"name\": \"f\"}", "[f {\"a\": {\"b\": {}}}]"},
        {"<|python_tag|>{\"name\": \"f\", \"parameters\": {}}", "[f {}]"},
        {"<|python_tag|> {\"name\": \"f\"}", "[f {}]"},
        {"{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"add-2\", \"parameters\": {\"x\": 1}}",
         "[f {}][add-2 {\"x\": 1}]"},
        {"{\"name\": \"f\", \"parameters\": {}}\n{\"name\": \"f\", \"parameters\": {}};\n",
         "[f {}][f {}]"},
    };
    CHECK_ALL(0, forms, 0);
}

#define CALL "<tool_call>{\"name\": \"f\", \"arguments\": "
#define SAME(text) \
    {              \
        text, text \
    }

/* Each comes back as content, to the last byte. */
static void no_calls(void **state)
{
    (void)state;
    static const struct form never_begun[] = {
        SAME("<tool_call>"),
        SAME("<tool_call>\n"),
        SAME("<tool_call>hello</tool_call>"),
        SAME("<tool_call>[]</tool_call>"),
        SAME("<tool_call>{}</tool_call>"),
        SAME("<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>"),
        SAME("<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>"),
        SAME("<tool_call>{\"name\": \"F\"}</tool_call> and more"),
        SAME("<tool_call>{\"name\": \"f\\u0000\"}</tool_call>"),
        SAME("<tool_call>{\"name\": \"\\u00e6\"}</tool_call>"),
        SAME("<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>"),
        SAME("<tool_call>{\"name\": null, \"arguments\": {}}</tool_call>"),
        SAME("<tool_call>{\"arguments\": {}}</tool_call>"),
        SAME("<tool_call>{\"arguments\": {}, \"name\": \"g\"}</tool_call>"),
        SAME("<tool_call>{name: \"f\"}</tool_call>"),
        SAME("<tool_call>{'name': 'f'}</tool_call>"),
        SAME("<tool_call>{\"name\": \"f\",}</tool_call>"),
        SAME("<tool_call>{\"name\" \"f\"}</tool_call>"),
        SAME("<tool_call>{\"name\": \"f\", \"name\": \"f\"}</tool_call>"),
        SAME("<tool_call>{\"name\": \"f\", \"x\": tru}</tool_call>"),
        SAME(CALL "[]}</tool_call>"),
        SAME(CALL "\"{}\"}</tool_call>"),
        SAME(CALL "null}</tool_call>"),
        SAME("<tool_call>{\"name\": \"f\", \"x\": 01"),
        SAME("{\"city\": \"Paris\"}"),
        SAME("{\"name\": \"Paris\", \"parameters\": {}}"),
        SAME("{\"name\": \"f\", \"age\": 3, \"parameters\": {}}"),
        SAME("{ \"name\": \"f\""),
        SAME("{ }"),
        SAME("{"),
        SAME("<|python_tag|>print(1)"),
        SAME("<|python_tag|>"),
        SAME("<|python_"),
    };
    static const struct form begun[] = {
        SAME(CALL "{"),
        SAME(CALL "{\"a\": \"x"),
        SAME(CALL "{\"a\": 1]}}</tool_call>"),
        SAME(CALL "{\"a\": [1}]}</tool_call>"),
        SAME(CALL "{\"a\": 01}}</tool_call>"),
        SAME(CALL "{\"a\": 1.}}</tool_call>"),
        SAME(CALL "{\"a\": -}}</tool_call>"),
        SAME(CALL "{\"a\": 1e}}</tool_call>"),
        SAME(CALL "{\"a\": NaN}}</tool_call>"),
        SAME(CALL "{\"a\": nul}}</tool_call>"),
        SAME(CALL "{\"a\": \"\\x\"}}</tool_call>"),
        SAME(CALL "{\"a\": \"\\u12g4\"}}</tool_call>"),
        SAME(CALL "{\"a\": \"x\ny\"}}</tool_call>"),
        SAME(CALL "{\"a\": 1,}}</tool_call>"),
        SAME(CALL "{,}}</tool_call>"),
        SAME(CALL "{\"a\": [1,]}}</tool_call>"),
        SAME(CALL "{1: 2}}</tool_call>"),
        SAME(CALL "{}}}</tool_call>"),
        SAME(CALL "{}} hello"),
        SAME(CALL "{}}</tool_calls>"),
        SAME(CALL "{}} </tool_ call>"),
        SAME(CALL "{}, \"arguments\": {}}</tool_call>"),
        SAME(CALL "{}, \"parameters\": {}}</tool_call>"),
        SAME("Before \n" CALL "{} after"),
        SAME("{\"name\": \"f\", \"parameters\": {}} is the call"),
        SAME("{\"name\": \"f\", \"parameters\": {}"),
        SAME("{\"name\": \"f\", \"parameters\": {}}</tool_call>"),
    };
    CHECK_ALL(0, never_begun, 0);
    CHECK_ALL(0, begun, 1);
    check(0, CALL "{\"a\": oops " CALL "{}}</tool_call>", CALL "{\"a\": oops[f {}]", 1);
    check(0, CALL "{\"a\":1}}</tool_call>\n" CALL "{\"b", CALL "{\"b[f {\"a\":1}]", 1);
    check(0, "{\"name\": \"f\"}; {\"name\": \"g\"}", "{\"name\": \"g\"}[f {}]", 0);
}

static void reasoning(void **state)
{
    (void)state;
    static const struct form closed[] = {
        {"<think>\nso it is\n</think>\n\nYes.", "«so it is»Yes."},
        {"\n<think>a  b\n\nc</think>d\n", "«a  b\n\nc»d\n"},
        {"<think>\n\n</think>\n\nYes.\n", "Yes.\n"},
        {"<think></think>", ""},
        {"<think>a</think>\n\n", "«a»"},
        {"<think>a </thin </</think>b", "«a </thin </»b"},
        {"<think>" CALL "{}}</tool_call></think>x", "«" CALL "{}}</tool_call>»x"},
        {"<think>a</think>\n" CALL "{\"k\": 1}}</tool_call>", "«a»[f {\"k\": 1}]"},
        {"<think>a</think>\n\n{\"name\": \"f\", \"parameters\": {}}", "«a»[f {}]"},
        {"<think>a</think><think>b</think>", "«a»<think>b</think>"},
        {"<think>\nnever closed </thi", "«never closed </thi»"},
        {"<think>\nnever closed\n", "«never closed\n»"},
        {"<think>", ""},
        {"<thin", "<thin"},
        {" <thinking>x", " <thinking>x"},
    };
    static const struct form open[] = {
        {"so it is\n</think>\n\nYes.", "«so it is»Yes."},
        {"\n\n</think>\n\nYes.", "Yes."},
        {"</think>" CALL "{}}</tool_call>", "[f {}]"},
        {"it goes on", "«it goes on»"},
        {"it goes on\n</think", "«it goes on\n</think»"},
        {"{\"name\": \"f\"}</think>a </think>", "«{\"name\": \"f\"}»a </think>"},
    };
    CHECK_ALL(0, closed, 0);
    CHECK_ALL(THINKS, open, 0);
    check(PLAIN, "<think>\na\n</think>\n\nb \n\n c <think>\n", "«a»b \n\n c <think>\n", 0);
    check(PLAIN | THINKS, "a\n</think>\n" CALL "{}}", "«a»" CALL "{}}", 0);
}

static void one_call(void **state)
{
    (void)state;
    static const struct form forms[] = {
        {"a " CALL "{\"k\": 1}}</tool_call> b " CALL "{}}</tool_call> c", "a[f {\"k\": 1}]"},
        {"{\"name\": \"f\"}; {\"name\": \"add-2\"}", "[f {}]"},
        {"<tool_call>no</tool_call>" CALL "{}}</tool_call>x", "<tool_call>no</tool_call>[f {}]"},
    };
    CHECK_ALL(ONE, forms, 0);
}

/* Text is passed on at once, arguments too, and a tag only as long as it may be one. */
static void nothing_waits_longer_than_it_must(void **state)
{
    (void)state;
    static const struct {
        const char *piece;
        size_t content, arguments; /* bytes that must be out by then */
    } steps[] = {
        {"Hello", 5, 0},
        {" <", 5, 0},
        {"b", 8, 0},
        {"<tool_cal", 8, 0},
        {"m", 18, 0},
        {"<tool_call>\n{\"name\": \"f\", ", 18, 0},
        {"\"arguments\": {\"text\": \"some", 18, 14},
        {" more", 18, 19},
        {"\"}", 18, 21},
        {"}\n</tool_call>", 18, 21},
    };
    struct tool_parser p = parser_for(0);
    struct seen s = {0};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        tool_parser_feed(&p, steps[i].piece, strlen(steps[i].piece), on_event, &s);
        if (s.content.size != steps[i].content || s.arguments.size != steps[i].arguments)
            fail_msg("after '%s': '%s' and '%s'", steps[i].piece, strbuf_cstr(&s.content),
                     strbuf_cstr(&s.arguments));
    }
    tool_parser_finish(&p, on_event, &s);
    assert_int_equal(s.n_complete, 1);
    tool_parser_free(&p);
    seen_free(&s);
}

/* Depth costs no stack and is bounded; long texts take linear time. */
static void deep_and_long(void **state)
{
    (void)state;
    static const char *const parts[] = {"<", " ", "{", "[", "<tool_call>", CALL "{\"a\": [[["};
    struct strbuf text = {0};
    struct seen s;
    for (size_t depth = JSON_SCAN_DEPTH - 2; depth <= JSON_SCAN_DEPTH - 1; depth++) {
        strbuf_clear(&text);
        strbuf_text(&text, CALL "{\"a\": ");
        for (size_t i = 0; i < depth; i++) strbuf_char(&text, '[');
        for (size_t i = 0; i < depth; i++) strbuf_char(&text, ']');
        strbuf_text(&text, "}}</tool_call>");
        read_answer(&s, 0, text.data, text.size, 0, 7);
        assert_int_equal(s.n_complete, depth == JSON_SCAN_DEPTH - 2);
        if (s.n_complete == 0) assert_string_equal(s.line.data, text.data);
        seen_free(&s);
    }
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        strbuf_clear(&text);
        while (text.size < 1000000) strbuf_text(&text, parts[i]);
        read_answer(&s, 0, text.data, text.size, 0, 5);
        assert_int_equal(s.content.size, text.size);
        seen_free(&s);
    }
    strbuf_free(&text);
}

/* ---- requests as templates render them ------------------------------------------------------ */

/* The shape of Llama 3.1's: a call is JSON alone, and there is at most one. */
static const char llama_template[] =
    "{%- for m in messages %}"
    "{%- if 'tool_calls' in m %}"
    "{%- if not m.tool_calls|length == 1 %}{{- raise_exception('one call') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    "{{- '<|start|>assistant\n\n{\"name\": \"' + call.name + '\", \"parameters\": ' }}"
    "{{- call.arguments | tojson }}{{- '}<|eot|>' }}"
    "{%- elif m.role == 'tool' %}{{- '<|start|>ipython\n\n' + m.content + '<|eot|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '\n\n' }}"
    "{%- if tools and loop.first %}"
    "{{- 'Respond in the format {\"name\": function name, \"parameters\": ...}.\n' }}"
    "{%- for t in tools %}{{- t | tojson }}{{- '\n' }}{%- endfor %}{%- endif %}"
    "{{- m.content + '<|eot|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant\n\n' }}{%- endif %}";

static const char tool[] =
    "{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"description\": "
    "\"Weather <now>\", \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": "
    "{\"type\": \"string\"}}}}}";

/* Renders a conversation with a call and its result; reads its body with the server's functions. */
static void render_calls(const char *source, size_t size, struct rendered *out)
{
    static const char *const trusted[] = {NULL};
    struct openai_request request = {.endpoint = OPENAI_CHAT};
    struct openai_fault fault;
    struct chat_template *t;
    linnet_error err;
    struct strbuf text = {0};
    strbuf_format(
        &text,
        "{\"tools\": [%s], \"messages\": [{\"role\": \"user\", \"content\": \"Oslo?\"}, "
        "{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{\"id\": \"call_1\", "
        "\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"arguments\": "
        "\"{\\\"city\\\":\\\"Oslo\\\",\\\"days\\\":[1,2.50]}\"}}]}, "
        "{\"role\": \"tool\", \"tool_call_id\": \"call_1\", \"content\": \"rain\"}]}",
        tool);
    json_t *body = json_loads(text.data, 0, NULL), *messages = NULL;
    assert_non_null(body);
    struct parser p = {.body = body, .out = &request, .fault = &fault};
    assert_ok(openai_read_tools(&p), fault.error);
    assert_ok(openai_template_messages(&p, &messages), fault.error);
    json_t *context = json_pack("{s:o,s:O,s:b}", "messages", messages, "tools",
                                json_object_get(body, "tools"), "add_generation_prompt", 1);
    assert_ok(template_compile(source, size, "test", &t, &err), err);
    assert_ok(template_render(t, context, trusted, 0, out, &err), err);
    assert_ok(openai_expect_answer(&p, out->text.data, out->text.size, "", 0), fault.error);
    assert_false(request.in_reasoning);
    template_free(t);
    json_decref(context);
    json_decref(body);
    strbuf_free(&text);
    openai_request_free(&request);
}

static void expect_parts(const struct rendered *out, const char *const *parts, size_t n)
{
    const char *at = out->text.data;
    for (size_t i = 0; i < n; i++) {
        at = strstr(at, parts[i]);
        if (!at) fail_msg("no '%s' in '%s'", parts[i], out->text.data);
        at += strlen(parts[i]);
    }
}

static void rendered_by_qwen(void **state)
{
    (void)state;
    static const char *const files[] = {"chat_template_qwen25_7b_instruct.jinja",
                                        "chat_template_qwen3_0_6b.jinja"};
    static const char *const parts[] = {
        "<tools>\n", tool, "\n</tools>",
        "<|im_end|>\n<|im_start|>user\nOslo?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": [1, 2.5]}}\n"
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"};
    for (size_t i = 0; i < 2; i++) {
        struct rendered out;
        size_t size;
        char *source = load_file(data_path(files[i]), &size);
        render_calls(source, size, &out);
        expect_parts(&out, parts, 4);
        rendered_free(&out);
        free(source);
    }
}

static void rendered_by_llama(void **state)
{
    (void)state;
    static const char *const parts[] = {
        "<|start|>user\n\nRespond in the format", tool,
        "\nOslo?<|eot|><|start|>assistant\n\n"
        "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\", \"days\": [1, 2.5]}}"
        "<|eot|><|start|>ipython\n\nrain<|eot|><|start|>assistant\n\n"};
    struct rendered out;
    render_calls(llama_template, sizeof llama_template - 1, &out);
    expect_parts(&out, parts, 3);
    rendered_free(&out);
}

/* SmolLM2's template shows tools to nobody: the request is told so. */
static void template_without_tools(void **state)
{
    (void)state;
    char *name = "get_weather";
    struct openai_request request = {.tools = &name, .n_tools = 1};
    struct openai_fault fault;
    struct parser p = {.out = &request, .fault = &fault};
    static const char rendered[] = "<|im_start|>user\nOslo?<|im_end|>\n<|im_start|>assistant\n";
    assert_int_equal(
        openai_expect_answer(&p, rendered, sizeof rendered - 1, rendered, sizeof rendered - 1),
        LINNET_UNSUPPORTED);
    assert_string_equal(fault.field, "tools");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_text),
        cmocka_unit_test(hermes_calls),
        cmocka_unit_test(llama_calls),
        cmocka_unit_test(no_calls),
        cmocka_unit_test(reasoning),
        cmocka_unit_test(one_call),
        cmocka_unit_test(nothing_waits_longer_than_it_must),
        cmocka_unit_test(deep_and_long),
        cmocka_unit_test(rendered_by_qwen),
        cmocka_unit_test(rendered_by_llama),
        cmocka_unit_test(template_without_tools),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
