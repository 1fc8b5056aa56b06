/* run - one answer to a prompt. */
#include <unistd.h>

#include "base/memory.h"
#include "cli/commands.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/session.h"

struct prompt {
    int32_t *ids;
    size_t n;
};

static linnet_status chat_prompt(const struct session *s, const struct strbuf *text,
                                 struct prompt *prompt, linnet_error *err)
{
    const char *system = s->options->system;
    json_t *messages = json_array(), *content = json_stringn(strbuf_cstr(text), text->size);
    json_t *instructions = system ? json_string(system) : NULL;
    linnet_status status = LINNET_OK;
    if (!content || (system && !instructions))
        status = error_set(err, LINNET_FORMAT, "the prompt is not valid UTF-8 text");
    if (instructions)
        json_array_append_new(messages,
                              json_pack("{s:s,s:O}", "role", "system", "content", instructions));
    if (content)
        json_array_append_new(messages, json_pack("{s:s,s:O}", "role", "user", "content", content));
    if (!status)
        status = session_chat_ids(s, messages, "use --raw to let it continue a text", &prompt->ids,
                                  &prompt->n, err);
    json_decref(messages);
    json_decref(content);
    json_decref(instructions);
    return status;
}

static linnet_status given_ids(const struct integers *given, struct prompt *prompt,
                               linnet_error *err)
{
    prompt->ids = mem_new(given->n, sizeof *prompt->ids);
    if (!prompt->ids) return error_memory(err, "the prompt", given->n * sizeof *prompt->ids);
    for (size_t i = 0; i < given->n; i++) prompt->ids[i] = (int32_t)given->items[i];
    prompt->n = given->n;
    return LINNET_OK;
}

/* A final line end of a file or of `echo` is no part of a chat message. */
static void drop_line_end(struct strbuf *text)
{
    if (text->size && text->data[text->size - 1] == '\n') text->data[--text->size] = 0;
}

static linnet_status make_prompt(const struct session *s, struct strbuf *text,
                                 struct prompt *prompt, linnet_error *err)
{
    const struct options *o = s->options;
    linnet_status status;
    if (o->given[OPTION_PROMPT_IDS])
        status = given_ids(&o->prompt_ids, prompt, err);
    else if (o->raw)
        status = linnet_tokenize(s->model, strbuf_cstr(text), text->size,
                                 LINNET_ADD_SPECIAL | LINNET_PARSE_SPECIAL, &prompt->ids,
                                 &prompt->n, err);
    else
        status = chat_prompt(s, text, prompt, err);
    if (!status && prompt->n == 0)
        status = error_set(err, LINNET_INVALID, "the prompt is empty: it has no tokens");
    return status;
}

/* ---- printing ------------------------------------------------------------------------------ */

static json_t *logprobs_json(const struct openai_answer *a)
{
    json_t *list = json_array();
    for (size_t i = 0; i < a->n_tokens; i++) {
        const struct openai_token *token = &a->tokens[i];
        json_t *top = json_array();
        for (size_t k = token->first_top; k < token->first_top + token->n_top; k++)
            json_array_append_new(
                top, json_pack("[i,o]", a->top[k].id, openai_logprob(a->top[k].logprob)));
        json_array_append_new(list, json_pack("{s:i,s:o,s:o}", "id", token->id, "logprob",
                                              openai_logprob(token->logprob), "top", top));
    }
    return list;
}

/* {"text", "token_ids", "finish_reason"} and "logprobs" if they were asked for */
static json_t *answer_json(const struct openai_answer *a, bool logprobs)
{
    json_t *ids = json_array();
    for (size_t i = 0; i < a->n_tokens; i++)
        json_array_append_new(ids, json_integer(a->tokens[i].id));
    json_t *json =
        json_pack("{s:o,s:o,s:s}", "text", openai_text(strbuf_cstr(&a->text), a->text.size),
                  "token_ids", ids, "finish_reason", linnet_finish_name(a->finish));
    if (logprobs) json_object_set_new(json, "logprobs", logprobs_json(a));
    return json;
}

static json_t *result_json(const struct session *s, const struct prompt *prompt,
                           const struct exchange *x, double started)
{
    const struct openai_answer *a = &x->answers[0];
    bool logprobs = s->options->given[OPTION_LOGPROBS];
    json_t *json = answer_json(a, logprobs), *ids = json_array();
    for (size_t i = 0; i < prompt->n; i++) json_array_append_new(ids, json_integer(prompt->ids[i]));
    json_object_set_new(json, "prompt_token_ids", ids);
    json_t *usage = openai_usage(x->answers, x->n, x->n);
    json_object_set_new(json, "usage", usage);
    double ttft = x->first_token_at > 0 ? x->first_token_at - started : 0;
    json_object_set_new(json, "timings",
                        json_pack("{s:f,s:f,s:f,s:f,s:f,s:f}", "load_s", s->load_s, "ttft_s", ttft,
                                  "prefill_s", a->timings.prefill_s, "decode_s",
                                  a->timings.decode_s, "prefill_tok_s", exchange_prefill_rate(a),
                                  "decode_tok_s", exchange_decode_rate(a)));
    if (x->n == 1) return json;
    json_t *choices = json_array();
    for (size_t i = 0; i < x->n; i++)
        json_array_append_new(choices, answer_json(&x->answers[i], logprobs));
    json_object_set_new(json, "choices", choices);
    return json;
}

struct stream {
    bool failed, any;
    char last;
};

static bool on_text(void *user, const char *text, size_t n)
{
    struct stream *stream = user;
    stream->failed = !output_write(text, n);
    stream->any = true;
    stream->last = text[n - 1];
    return !stream->failed;
}

/* Several answers: one after the other, each under its number. */
static bool print_answers(const struct exchange *x)
{
    for (size_t i = 0; i < x->n; i++) {
        const struct openai_answer *a = &x->answers[i];
        struct strbuf text = {0};
        strbuf_format(&text, "%s--- answer %zu of %zu ---\n", i ? "\n" : "", i + 1, x->n);
        strbuf_append(&text, strbuf_cstr(&a->text), a->text.size);
        strbuf_char(&text, '\n');
        if (!output_strbuf(&text)) return false;
    }
    return true;
}

static int outcome(const struct session *s, const struct exchange *x)
{
    for (size_t i = 0; i < x->n; i++)
        if (x->answers[i].finish == LINNET_FINISH_ERROR) return output_error(&x->answers[i].error);
    if (x->interrupted) return EXIT_INTERRUPTED;
    bool tell = s->options->verbose || (isatty(STDERR_FILENO) && !s->options->quiet);
    if (tell && !s->options->json) {
        struct strbuf speed = {0};
        exchange_speed(x, &speed);
        output_note("%s%s", isatty(STDOUT_FILENO) ? "\n" : "", strbuf_cstr(&speed));
        strbuf_free(&speed);
    }
    return EXIT_DONE;
}

static int ask(struct session *s, const struct prompt *prompt, double started)
{
    const struct options *o = s->options;
    linnet_request request = {
        .prompt = prompt->ids,
        .n_prompt = prompt->n,
        .sampling = session_sampling(s),
        .n = (int32_t)o->answers,
        .max_tokens = (int32_t)o->max_tokens,
        .min_tokens = (int32_t)o->min_tokens,
        .ignore_eos = o->ignore_eos,
        .stop = o->stop.items,
        .n_stop = o->stop.n,
        .want_logprobs = o->given[OPTION_LOGPROBS],
        .logprobs = (int32_t)o->logprobs,
    };
    struct exchange x;
    struct stream stream = {0};
    linnet_error err;
    bool streaming = !o->json && o->answers == 1, written = true;
    linnet_status status = exchange_run(s, &request, streaming ? on_text : NULL, &stream, &x, &err);
    int code = EXIT_FAILED;
    if (status) {
        code = output_error(&err);
    } else if (!stream.failed) {
        if (o->json)
            written = output_json(result_json(s, prompt, &x, started), JSON_REAL_PRECISION(9));
        else if (!streaming)
            written = print_answers(&x);
        else if (!stream.any || stream.last != '\n')
            written = output_text("\n");
        if (written) code = outcome(s, &x);
    }
    exchange_free(&x);
    return code;
}

int command_run(const struct options *o, double started)
{
    struct session s = {0};
    struct prompt prompt = {0};
    struct strbuf text = {0};
    linnet_error err;
    linnet_engine_options engine = session_engine_options(o);
    if (!o->given[OPTION_PROMPT_IDS] && !o->dry_run) {
        linnet_status status = input_text(o, &text, &err);
        if (status) {
            strbuf_free(&text);
            return output_error(&err);
        }
        if (!o->raw && input_is_file(o)) drop_line_end(&text);
    }
    int code;
    if (session_open(&s, o, false, &err))
        code = output_error(&err);
    else if (o->dry_run)
        code = session_dry_run(&s, &engine);
    else if (make_prompt(&s, &text, &prompt, &err) || session_start(&s, &engine, &err))
        code = output_error(&err);
    else
        code = ask(&s, &prompt, started);
    session_close(&s);
    linnet_free(prompt.ids);
    strbuf_free(&text);
    return code;
}
