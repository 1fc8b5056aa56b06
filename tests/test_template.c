/*
 * Chat templates against Hugging Face's renderer: the cases of chat.json, the goldens, and
 * template_snippets.json (expected texts written by transformers 5.24 with jinja2 3.1.6); then what
 * only this renderer has: the origin of each byte, refusals, and bounds.
 */
#include "support.h"

#include <time.h>

#include "text/template.h"

static const char *const trusted[] = {"bos_token", "eos_token", NULL};

static linnet_status render(const char *source, size_t size, const json_t *context, int64_t now,
                            struct rendered *out, linnet_error *err)
{
    struct chat_template *t;
    *out = (struct rendered){0};
    linnet_status status = template_compile(source, size, "chat template", &t, err);
    if (status != LINNET_OK) return status;
    status = template_render(t, context, trusted, now, out, err);
    template_free(t);
    return status;
}

static void assert_text(const char *what, const struct rendered *out, const json_t *expected)
{
    const char *want = json_string_value(expected);
    size_t size = json_string_length(expected);
    assert_non_null(want);
    if (out->text.size != size || memcmp(strbuf_cstr(&out->text), want, size) != 0)
        fail_msg("%s:\nexpected: %s\nfound:    %s", what, want, strbuf_cstr(&out->text));
}

/* ---- the cases of public bug reports ----------------------------------------------------- */

/* Without the chat.json's sums these templates could be anything. */
static char *template_of(const json_t *test, size_t *size)
{
    const char *name = json_string_value(json_object_get(test, "template"));
    const json_t *own = json_object_get(test, "template_text");
    char file[128], command[1500], sum[65] = {0};
    if (own) {
        *size = json_string_length(own);
        return strdup(json_string_value(own));
    }
    snprintf(file, sizeof file, "chat_template_%s.jinja", name);
    const char *path = data_path(file);
    snprintf(command, sizeof command, "sha256sum '%s'", path);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    assert_int_equal(fread(sum, 1, 64, f), 64);
    pclose(f);
    assert_string_equal(sum, json_string_value(json_object_get(test, "template_sha256")));
    return load_file(path, size);
}

static void chat_cases(void **state)
{
    (void)state;
    json_t *all = load_json(data_path("chat.json")), *test;
    size_t i, checked = 0;
    json_array_foreach(json_object_get(all, "cases"), i, test)
    {
        size_t size;
        linnet_error err;
        struct rendered out;
        char *source = template_of(test, &size);
        const char *id = json_string_value(json_object_get(test, "id"));
        const json_t *expected = json_object_get(test, "rendered");
        linnet_status status = render(source, size, json_object_get(test, "input"), 0, &out, &err);
        if (expected) {
            assert_ok(status, err);
            assert_text(id, &out, expected);
        } else {
            assert_non_null(json_object_get(test, "error"));
            assert_int_equal(status, LINNET_INVALID);
        }
        rendered_free(&out);
        free(source);
        checked++;
    }
    assert_true(checked >= 18);
    json_decref(all);
}

/* ---- the goldens, where they are --------------------------------------------------------- */

static const char *golden_template(const json_t *config, const char *model, char **owned,
                                   size_t *size)
{
    const json_t *inner = json_object_get(config, "chat_template");
    char name[128];
    *owned = NULL;
    if (inner) {
        *size = json_string_length(inner);
        return json_string_value(inner);
    }
    snprintf(name, sizeof name, "%s/chat_template.jinja", model);
    return *owned = load_file(reference_path(name), size);
}

static void golden_chats(void **state)
{
    static const char *const goldens[] = {"llama_300", "llama_440", "qwen_1005",
                                          "qwen_303",  "qwen_473",  "smol_340"};
    (void)state;
    for (size_t g = 0; g < sizeof goldens / sizeof *goldens; g++) {
        char name[128];
        snprintf(name, sizeof name, "golden/tokenizer_%s.json", goldens[g]);
        const char *path = reference_path(name);
        if (!path) continue; /* the chat cases and snippets are here in any case */
        json_t *golden = load_json(path), *chat;
        const char *model = json_string_value(json_array_get(json_object_get(golden, "models"), 0));
        snprintf(name, sizeof name, "%s/tokenizer_config.json", model);
        json_t *config = load_json(reference_path(name));
        char *owned;
        size_t size, i;
        const char *source = golden_template(config, model, &owned, &size);
        json_array_foreach(json_object_get(golden, "chats"), i, chat)
        {
            linnet_error err;
            struct rendered out;
            json_t *context = json_copy(chat);
            json_object_set(context, "bos_token", json_object_get(config, "bos_token"));
            json_object_set(context, "eos_token", json_object_get(config, "eos_token"));
            assert_ok(render(source, size, context, 0, &out, &err), err);
            assert_text(goldens[g], &out, json_object_get(chat, "text"));
            rendered_free(&out);
            json_decref(context);
        }
        free(owned);
        json_decref(config);
        json_decref(golden);
    }
}

/* ---- snippets ---------------------------------------------------------------------------- */

static void snippets(void **state)
{
    (void)state;
    setenv("TZ", "UTC", 1);
    tzset();
    json_t *all = load_json(data_path("template_snippets.json")), *test;
    const json_t *context = json_object_get(all, "context");
    size_t i, checked = 0;
    json_array_foreach(json_object_get(all, "cases"), i, test)
    {
        const json_t *source = json_object_get(test, "template");
        const json_t *expected = json_object_get(test, "out");
        linnet_error err;
        struct rendered out;
        linnet_status status =
            render(json_string_value(source), json_string_length(source), context,
                   json_integer_value(json_object_get(all, "now")), &out, &err);
        if (expected && status != LINNET_OK)
            fail_msg("%s: %s", json_string_value(source), err.message);
        if (!expected && status == LINNET_OK)
            fail_msg("%s: expected an error, found: %s", json_string_value(source),
                     strbuf_cstr(&out.text));
        if (expected) assert_text(json_string_value(source), &out, expected);
        rendered_free(&out);
        checked++;
    }
    assert_true(checked > 900);
    json_decref(all);
}

/* ---- where each byte came from ----------------------------------------------------------- */

/* Renders, and gives back the text with untrusted ranges in « ». */
static char *marked(const char *source, const char *context_text)
{
    json_t *context = json_loads(context_text, 0, NULL);
    assert_non_null(context);
    linnet_error err;
    struct rendered out;
    assert_ok(render(source, strlen(source), context, 0, &out, &err), err);
    struct strbuf b = {0};
    size_t at = 0;
    for (size_t i = 0; i < out.n_untrusted; i++) {
        struct span s = out.untrusted[i];
        assert_true(s.begin < s.end && s.end <= out.text.size);
        assert_true(i == 0 || s.begin > at);
        strbuf_append(&b, out.text.data + at, s.begin - at);
        strbuf_char(&b, '[');
        strbuf_append(&b, out.text.data + s.begin, s.end - s.begin);
        strbuf_char(&b, ']');
        at = s.end;
    }
    strbuf_append(&b, strbuf_cstr(&out.text) + at, out.text.size - at);
    rendered_free(&out);
    json_decref(context);
    return b.data;
}

static void origins(void **state)
{
    static const char context[] = "{\"u\": \"user words\", \"e\": \"\", \"bos_token\": \"<s>\", "
                                  "\"d\": {\"key\": \"val\\\"\"}, \"l\": [\"x\", \"y\"], \"n\": 7}";
    static const struct {
        const char *source, *expected;
    } cases[] = {
        {"{{ bos_token }}{{ u }}!", "<s>[user words]!"},
        {"<|a|>{{ u }}{{ u }}<|b|>", "<|a|>[user wordsuser words]<|b|>"},
        {"{{ '<' + u + '>' }}", "<[user words]>"},
        {"{{ '<' ~ u ~ '>' ~ n }}", "<[user words]>7"},
        {"{{ ('<' ~ u ~ '>')[1:-1] }}", "[user words]"},
        {"{{ ('<' ~ u ~ '>')[:5] }}|{{ ('a' ~ u)[::-1] }}", "<[user]|[sdrow resu]a"},
        {"{{ ('<' ~ u)|upper }}", "<[USER WORDS]"},
        {"{{ u.replace('user', bos_token) }}", "<s>[ words]"},
        {"{{ 'a-b'.replace('-', u) }}", "a[user words]b"},
        {"{{ u.split(' ')|join('+') }}", "[user]+[words]"},
        {"{{ l|map('upper')|join(',') }}", "[X],[Y]"},
        {"{{ d|tojson }}", "{\"[key]\": \"[val\\\"]\"}"},
        {"{{ d }}", "{'[key]': '[val\"]'}"},
        {"{% for k, v in d.items() %}{{ k }}={{ v|length }}{% endfor %}", "[key]=4"},
        {"{% set x %}<{{ u }}>{% endset %}{{ x|trim }}", "<[user words]>"},
        {"{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(u) ~ f('t') }}", "<[user words]><t>"},
        {"{% filter upper %}a{{ u }}{% endfilter %}", "A[USER WORDS]"},
        {"{{ ('  ' ~ u ~ ' ').strip() }}", "[user words]"},
        {"{{ '%s:%s' % (u, 'x') }}|{{ '{}.'.format(u) }}", "[user words]:x|[user words]."},
        {"{{ ('\\n' ~ u)|indent(2) }}", "\n  [user words]"},
        {"{% set ns = namespace(t='') %}{% for x in l %}{% set ns.t = ns.t ~ '<' ~ x %}"
         "{% endfor %}{{ ns.t }}",
         "<[x]<[y]"},
        {"{{ u[0] }}{{ 'user words' }}{{ u == 'user words' }}", "[u]user wordsTrue"},
        {"{{ e }}{{ e ~ 'x' }}", "x"},
        {"{{ strftime_now('%Y ' ~ e) }}|{{ strftime_now('%Y ' ~ u) }}",
         "1970 |[1970 user words]"}, /* any byte of the format may be the user's */
        {"{{ u|e }}{{ ('<' ~ u)|e }}", "[user words]&lt;[user words]"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *found = marked(cases[i].source, context);
        assert_string_equal(found, cases[i].expected);
        free(found);
    }
}

/* A growing text shares its buffer with older values: those must not change. */
static void shared_buffers(void **state)
{
    (void)state;
    char *found = marked("{% set a = 'x' * 300 %}{% set b = a + '1' %}{% set c = b + '2' %}"
                         "{% set d = b + u %}{{ b[-2:] }} {{ c[-3:] }} {{ d[-3:] }} "
                         "{% set k = [1] + [2] %}{% set m = k + [3] %}{% set n = k + [4] %}"
                         "{{ k }}{{ m }}{{ n }}",
                         "{\"u\": \"3\"}");
    assert_string_equal(found, "x1 x12 x1[3] [1, 2][1, 2, 3][1, 2, 4]");
    free(found);
}

/* ---- refusals ---------------------------------------------------------------------------- */

static void refusals(void **state)
{
    static const struct {
        const char *source, *message;
        linnet_status status;
    } cases[] = {
        {"a\nb\n{{ x|foo }}", "chat template line 3: unknown filter 'foo'", LINNET_UNSUPPORTED},
        {"{{ x is foo }}", "chat template line 1: unknown test 'foo'", LINNET_UNSUPPORTED},
        {"\n{{ foo(1) }}", "chat template line 2: unknown function 'foo'", LINNET_UNSUPPORTED},
        {"{{ x.foo() }}", "chat template line 1: unknown method 'foo'", LINNET_UNSUPPORTED},
        {"{% include 'x' %}", "chat template line 1: unknown or misplaced tag 'include'",
         LINNET_UNSUPPORTED},
        {"{% for x in y recursive %}{% endfor %}", "chat template line 1: recursive loops",
         LINNET_UNSUPPORTED},
        {"{{ f(*x) }}", "chat template line 1: arguments by *", LINNET_UNSUPPORTED},
        {"\n\n{% if x %}", "chat template line 3: the template ends before 'elif'", LINNET_FORMAT},
        {"{{ 1", "chat template line 1: an expression has no end", LINNET_FORMAT},
        {"{{ 'a }}", "chat template line 1: a string has no end", LINNET_FORMAT},
        {"{{ 99999999999999999999 }}", "chat template line 1: an integer does not fit",
         LINNET_FORMAT},
        {"\n{{ x.y }}", "chat template line 2: 'x' is undefined", LINNET_INVALID},
        {"\n{{ 9223372036854775807 + 1 }}", "chat template line 2: an integer does not fit",
         LINNET_INVALID},
        {"{{ l.append(1) }}", "chat template line 1: list has no method 'append'", LINNET_INVALID},
        {"{{ raise_exception('Roles must ' ~ 'alternate!') }}", "Roles must alternate!",
         LINNET_INVALID},
    };
    (void)state;
    json_t *context = json_pack("{s:[i]}", "l", 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        linnet_error err = {0};
        struct rendered out;
        const char *source = cases[i].source, *message = cases[i].message;
        assert_int_equal(render(source, strlen(source), context, 0, &out, &err), cases[i].status);
        assert_int_equal(err.status, cases[i].status);
        assert_null(out.text.data);
        if (strncmp(err.message, message, strlen(message)) != 0)
            fail_msg("%s: found \"%s\"", source, err.message);
        assert_int_not_equal(render(source, strlen(source), context, 0, &out, NULL), LINNET_OK);
    }
    json_decref(context);
}

/* ---- bounds ------------------------------------------------------------------------------ */

static char *repeated(const char *part, size_t times, const char *middle, const char *end)
{
    struct strbuf b = {0};
    for (size_t i = 0; i < times; i++) strbuf_text(&b, part);
    strbuf_text(&b, middle);
    for (size_t i = 0; i < times; i++) strbuf_text(&b, end);
    return b.data;
}

static void hostile_templates_end(void **state)
{
    static const char *const sources[] = {
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 9) }}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x|tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}"
        "{% endfor %}{{ ns.x == ns.x[0] }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}"
        "{% endfor %}{{ ns.x }}",
        "{% for i in range(99999) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxxx' * 99 }}{% endfor %}",
        "{{ 'a'.ljust(10 ** 15) }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        "{% set x = ['a'] * 99999 %}{{ x|unique|list }}{{ x|map('upper')|map('lower')|join * 99 }}"
        "{{ 'a' * 9999999 * 9999999 }}",
        "{% set a = 'a' * 2000000 %}{{ a.rfind('b' ~ a[:1000000]) }}{{ a.rfind(a[1:1000000] ~ 'b') "
        "}}",
        "{% set a = 'a' * 2000000 %}{{ a.rpartition(a[:1000000] ~ 'b') }}",
        "{% set a = 'a' * 2000000 %}{{ a.rsplit(a[:1000000] ~ 'b') }}",
    };
    (void)state;
    json_t *context = json_object();
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        linnet_error err;
        struct rendered out;
        double begin = cpu_seconds();
        if (render(sources[i], strlen(sources[i]), context, 0, &out, &err) == LINNET_OK)
            fail_msg("%s: expected an error", sources[i]);
        if (cpu_seconds() - begin > 20) fail_msg("%s: takes too long", sources[i]);
    }
    json_decref(context);
}

/* A tree may be more than a hundred times as large as its source. */
static void large_trees_are_refused(void **state)
{
    (void)state;
    linnet_error err;
    struct chat_template *t;
    char *source = repeated("1,", 500000, "]}}", "");
    memcpy(source, "{{[1", 4); /* in place of two items */
    linnet_status status = template_compile(source, strlen(source), "chat template", &t, &err);
    assert_int_equal(status, LINNET_MEMORY);
    assert_non_null(strstr(err.message, "compiling takes more than 65"));
    assert_null(t);
    free(source);
    source = repeated("{{ messages[0]['content'] | trim }}{% if a == b and c %}x{% endif %}", 10000,
                      "", "");
    assert_ok(template_compile(source, strlen(source), "chat template", &t, &err), err);
    template_free(t);
    free(source);
}

static void deep_sources_are_refused(void **state)
{
    static const char *const parts[][3] = {
        {"(", "1", ")"},   {"[", "", "]"},     {"not ", "1", ""},    {"-", "1", ""},
        {"1 + ", "1", ""}, {"x[", "0", "]"},   {"{1: ", "1", "}"},   {"1 if ", "1", " else 1"},
        {"f(", "1", ")"},  {"2 ** ", "1", ""}, {"", "1", "|string"}, {"1 and ", "1", ""},
    };
    (void)state;
    json_t *context = json_object();
    for (size_t i = 0; i <= sizeof parts / sizeof *parts; i++) {
        bool blocks = i == sizeof parts / sizeof *parts;
        char *inner = blocks ? repeated("{% if 1 %}", 20000, "x", "{% endif %}")
                             : repeated(parts[i][0], 20000, parts[i][1], parts[i][2]);
        struct strbuf source = {0};
        strbuf_format(&source, blocks ? "%s" : "{%% macro f(x) %%}{%% endmacro %%}{{ %s }}", inner);
        linnet_error err;
        struct rendered out;
        assert_int_not_equal(render(source.data, source.size, context, 0, &out, &err), LINNET_OK);
        assert_non_null(strstr(err.message, "nested too deeply"));
        strbuf_free(&source);
        free(inner);
    }
    json_decref(context);
}

/* Texts and lists that grow message by message are linear in a long conversation. */
static void long_conversations(void **state)
{
    static const char source[] =
        "{% set ns = namespace(t='', l=[]) %}{% for m in messages %}"
        "{% set ns.t = ns.t ~ '<' ~ m.role ~ '>' ~ m.content|trim %}"
        "{% set ns.l = ns.l + [m.content] %}{% endfor %}{{ ns.t }}|{{ ns.l|length }}";
    (void)state;
    json_t *context = json_object(), *messages = json_array();
    char content[201];
    memset(content, 'w', 200);
    content[200] = 0;
    for (int i = 0; i < 10000; i++)
        json_array_append_new(messages,
                              json_pack("{s:s, s:s}", "role", "user", "content", content));
    json_object_set_new(context, "messages", messages);
    linnet_error err;
    struct rendered out;
    assert_ok(render(source, sizeof source - 1, context, 0, &out, &err), err);
    assert_int_equal(out.text.size, 10000 * 206 + 6);
    assert_int_equal(out.n_untrusted, 20000);
    rendered_free(&out);
    json_decref(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chat_cases),
        cmocka_unit_test(golden_chats),
        cmocka_unit_test(snippets),
        cmocka_unit_test(origins),
        cmocka_unit_test(shared_buffers),
        cmocka_unit_test(refusals),
        cmocka_unit_test(hostile_templates_end),
        cmocka_unit_test(deep_sources_are_refused),
        cmocka_unit_test(large_trees_are_refused),
        cmocka_unit_test(long_conversations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
