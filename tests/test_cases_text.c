/*
 * Bugs that other engines had in chats, end tokens and padding ids, asked through linnet.h of tiny
 * models (and of SmolLM2's template where it is installed). Each test names its case in
 * ../shared/cases/README.md, where the expected values come from.
 */
#include "cases.h"
#include "scratch.h"

/* ---- chats ------------------------------------------------------------------------------- */

/* A model directory with one of the published templates, or a text, as its own. */
static linnet_model *open_with_template(const char *name, const json_t *text, bool *has_ids)
{
    char *directory = strdup(scratch_create()), file[128];
    const char *tokenizer = NULL;
    scratch_copy_all(directory, data_path("qwen3-tiny"));
    if (text) {
        scratch_text(directory, "chat_template.jinja", json_string_value(text));
    } else {
        snprintf(file, sizeof file, "chat_template_%s.jinja", name);
        scratch_copy(directory, "chat_template.jinja", data_path(file));
        snprintf(file, sizeof file, "tokenizers/%.*s_tokenizer.json.gz", (int)strcspn(name, "_"),
                 name);
        tokenizer = cases_path(file);
    }
    if (tokenizer) scratch_copy(directory, "tokenizer.json", tokenizer);
    *has_ids = tokenizer != NULL;
    linnet_model *model = open_model(directory);
    scratch_remove(directory);
    free(directory);
    return model;
}

/* The body that linnet.h takes: the template's own variables go into chat_template_kwargs. */
static char *chat_body(const json_t *input)
{
    json_t *body = json_object(), *kwargs = json_object(), *value;
    const char *key;
    json_object_foreach((json_t *)(uintptr_t)input, key, value)
    {
        bool field = strcmp(key, "messages") == 0 || strcmp(key, "tools") == 0 ||
                     strcmp(key, "add_generation_prompt") == 0;
        json_object_set(field ? body : kwargs, key, value);
    }
    json_object_set_new(body, "chat_template_kwargs", kwargs);
    char *text = json_dumps(body, 0);
    json_decref(body);
    return text;
}

static void assert_chat(const linnet_model *model, const json_t *test, const char *expected,
                        const json_t *ids)
{
    char *rendered, *body = chat_body(json_object_get(test, "input"));
    int32_t *found;
    size_t n, size;
    linnet_error err;
    assert_ok(linnet_chat_tokenize(model, body, strlen(body), &rendered, &size, &found, &n, &err),
              err);
    assert_int_equal(size, strlen(expected));
    assert_string_equal(rendered, expected);
    for (size_t i = 0; ids && i < n; i++)
        assert_int_equal(found[i], json_integer_value(json_array_get(ids, i)));
    if (ids) assert_int_equal(n, json_array_size(ids));
    linnet_free(rendered);
    linnet_free(found);
    free(body);
}

/* C01, C03, C05: text and ids of every published chat. A list of parts (C03.raw), which Hugging
 * Face's renderer refuses, is the plain string of C01.a here. */
static void published_chats(void **state)
{
    (void)state;
    json_t *all = load_json(data_path("chat.json")), *cases = json_object_get(all, "cases"), *test;
    size_t i, n_checked = 0, plain = 0;
    linnet_model *model = NULL;
    const char *open = "";
    bool has_ids = false;
    json_array_foreach(cases, i, test)
    {
        const char *id = json_string_value(json_object_get(test, "id"));
        const char *name = json_string_value(json_object_get(test, "template"));
        const json_t *text = json_object_get(test, "template_text");
        bool real = strcmp(name, "smollm2_gguf") == 0;
        if (!json_object_get(json_object_get(test, "input"), "messages")) continue; /* C05.d */
        if (text || strcmp(name, open) != 0) {
            linnet_model_close(model);
            real = real && smollm2_path();
            model = real ? open_model(smollm2_path()) : open_with_template(name, text, &has_ids);
            has_ids = has_ids || real;
            open = name;
        }
        const json_t *same = test;
        for (plain = 0; strcmp(id, "C03.raw") == 0; plain++) {
            same = json_array_get(cases, plain);
            if (strcmp(json_string_value(json_object_get(same, "template")), name) == 0) break;
        }
        assert_chat(model, test, json_string_value(json_object_get(same, "rendered")),
                    has_ids ? json_object_get(same, "ids") : NULL);
        n_checked++;
    }
    assert_true(n_checked >= 18);
    linnet_model_close(model);
    json_decref(all);
}

static size_t count_ids(const linnet_model *model, const char *content)
{
    char body[256];
    int32_t *ids;
    size_t n;
    linnet_error err;
    snprintf(body, sizeof body, "{\"messages\": [{\"role\": \"user\", \"content\": %s}]}", content);
    assert_ok(linnet_chat_tokenize(model, body, strlen(body), NULL, NULL, &ids, &n, &err), err);
    linnet_free(ids);
    return n;
}

/* C03: parts are joined with nothing between; other kinds are refused by name. */
static void content_parts(void **state)
{
    (void)state;
    linnet_model *model = open_model(data_path("qwen3-tiny"));
    size_t whole = count_ids(model, "\"Name one river.\""), empty = count_ids(model, "\"\"");
    assert_int_equal(count_ids(model, "[{\"type\": \"text\", \"text\": \"Name one river.\"}]"),
                     whole);
    assert_int_equal(count_ids(model, "[{\"type\": \"text\", \"text\": \"Name one \"},"
                                      "{\"type\": \"text\", \"text\": \"river.\"}]"),
                     whole);
    assert_int_equal(count_ids(model, "[]"), empty);
    static const struct {
        const char *content, *word;
    } bad[] = {{"[{\"type\": \"image_url\", \"image_url\": {\"url\": \"x\"}}]", "image_url"},
               {"[{\"type\": \"text\"}]", "\"text\""},
               {"[{\"type\": \"text\", \"text\": 5}]", "\"text\""},
               {"5", "content"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char body[256];
        int32_t *ids;
        size_t n;
        linnet_error err;
        snprintf(body, sizeof body, "{\"messages\": [{\"role\": \"user\", \"content\": %s}]}",
                 bad[i].content);
        assert_true(linnet_chat_tokenize(model, body, strlen(body), NULL, NULL, &ids, &n, &err) !=
                    LINNET_OK);
        if (!strstr(err.message, bad[i].word))
            fail_msg("\"%s\" lacks \"%s\"", err.message, bad[i].word);
    }
    linnet_model_close(model);
}

/* ---- end tokens -------------------------------------------------------------------------- */

/* A prompt of the goldens of qwen3-tiny whose answer runs into an end token. */
struct ending {
    int32_t prompt[160], greedy[48];
    int32_t n_prompt, step, end;
};

static struct ending find_ending(void)
{
    struct ending e = {.step = -1};
    json_t *golden = load_json(data_path("golden/qwen3-tiny.json")), *test;
    size_t i;
    json_array_foreach(json_object_get(golden, "prompts"), i, test)
    {
        json_t *ids = json_object_get(test, "ids"), *greedy = json_object_get(test, "greedy_fp32"),
               *step = json_object_get(test, "eos_step");
        if (!json_is_integer(step) || json_integer_value(step) == 0) continue;
        e.step = (int32_t)json_integer_value(step);
        e.n_prompt = (int32_t)json_array_size(ids);
        for (int32_t t = 0; t < e.n_prompt; t++)
            e.prompt[t] = (int32_t)json_integer_value(json_array_get(ids, (size_t)t));
        for (int32_t t = 0; t < 48; t++)
            e.greedy[t] = (int32_t)json_integer_value(json_array_get(greedy, (size_t)t));
        e.end = e.greedy[e.step];
        break;
    }
    json_decref(golden);
    assert_true(e.step > 0 && (e.end == 470 || e.end == 472));
    return e;
}

static void set_json(const char *directory, const char *file, const char *key, json_t *value)
{
    json_t *json = load_json(scratch_path(directory, file));
    json_object_set_new(json, key, value);
    assert_int_equal(json_dump_file(json, scratch_path(directory, file), 0), 0);
    json_decref(json);
}

/* Which of the three files names the end token (a set of bits), and whether that ends the answer.
 */
static void assert_ends(const struct ending *e, unsigned where, bool ignore_eos)
{
    char *directory = strdup(scratch_create());
    const int other = 471; /* <|im_start|>: is not generated here */
    for (int32_t t = 0; t < 48; t++) assert_true(e->greedy[t] != other);
    const char *name = e->end == 472 ? "<|im_end|>" : "<|endoftext|>";
    scratch_copy_all(directory, data_path("qwen3-tiny"));
    set_json(directory, "config.json", "eos_token_id", json_integer(where & 1 ? e->end : other));
    set_json(directory, "generation_config.json", "eos_token_id",
             where & 2 ? json_pack("[i,i]", other, e->end) : json_integer(other));
    set_json(directory, "tokenizer_config.json", "eos_token",
             json_string(where & 4 ? name : "<|im_start|>"));
    linnet_model *model = open_model(directory);
    linnet_engine *engine = open_engine(model, 512, (linnet_engine_options){.threads = 1});
    struct job *job = job_new(e->prompt, e->n_prompt, 48);
    job->request.ignore_eos = ignore_eos;
    struct answer *a = &ask(job, engine)->answers[0];
    bool ends = where && !ignore_eos;
    if ((a->finish == LINNET_FINISH_STOP) != ends)
        fail_msg("end token in files %u: ended with \"%s\"", where, linnet_finish_name(a->finish));
    assert_tokens(a, e->greedy, ends ? e->step + 1 : 48);
    assert_null(strstr(strbuf_cstr(&a->text), name));
    job_free(job);
    linnet_engine_destroy(engine);
    linnet_model_close(model);
    scratch_remove(directory);
    free(directory);
}

/* D04: the union of config.json, generation_config.json and tokenizer_config.json ends an answer;
 * ignore_eos overrules all of them. */
static void end_tokens_join(void **state)
{
    (void)state;
    struct ending e = find_ending();
    for (unsigned where = 0; where < 8; where++) assert_ends(&e, where, false);
    assert_ends(&e, 7, true);
}

/* ---- ids without a token ----------------------------------------------------------------- */

/* D06: rows of the matrix beyond the tokenizer are never chosen; in a prompt they are fine, ids
 * beyond the matrix never are. */
static void padding_ids(void **state)
{
    (void)state;
    linnet_model *model = open_model(data_path("qwen3-tiny"));
    linnet_engine *engine = open_engine(model, 512, (linnet_engine_options){.threads = 1});
    linnet_model_info info;
    linnet_error err;
    linnet_model_get_info(model, &info);
    assert_int_equal(info.vocab_size, 480); /* the tokenizer has 473 */
    int32_t prompt[] = {479, 0, 473, 40};
    linnet_logit_bias bias[7];
    for (int32_t i = 0; i < 7; i++) bias[i] = (linnet_logit_bias){473 + i, 100};
    for (int temperature = 0; temperature < 3; temperature++) {
        struct job *job = job_new(prompt, 4, 20);
        job->request.ignore_eos = true;
        job->request.sampling.temperature = (float)temperature;
        job->request.sampling.logit_bias = bias;
        job->request.sampling.n_logit_bias = 7;
        job->request.want_logprobs = true;
        job->request.logprobs = 20;
        struct answer *a = &ask(job, engine)->answers[0];
        assert_null(a->fault);
        assert_int_equal(a->finish, LINNET_FINISH_LENGTH);
        for (int32_t t = 0; t < a->n_tokens; t++) assert_in_range(a->tokens[t], 0, 472);
        job_free(job);
    }
    static const int32_t wrong[] = {480, 999999, -1, INT32_MIN, INT32_MAX};
    static const char *const words[] = {"480", "999999", "-1", "-2147483648", "2147483647"};
    for (size_t i = 0; i < 5; i++) {
        struct job *job = job_new(&wrong[i], 1, 3);
        assert_refused(engine, &job->request, LINNET_INVALID, words[i]);
        job_free(job);
    }
    for (int32_t id = -1; id < 482; id++) {
        char *text;
        size_t size;
        assert_ok(linnet_detokenize(model, &id, 1, 0, &text, &size, &err), err);
        if (id < 0 || id > 472) assert_int_equal(size, 0);
        linnet_free(text);
    }
    assert_at_rest(engine);
    linnet_engine_destroy(engine);
    linnet_model_close(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_chats),
        cmocka_unit_test(content_parts),
        cmocka_unit_test(end_tokens_join),
        cmocka_unit_test(padding_ids),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
