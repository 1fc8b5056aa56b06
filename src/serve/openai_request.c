#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "serve/openai_internal.h"

/* ---- fields that are known and not obeyed -------------------------------------------------- */

static const struct {
    const char *field, *neutral; /* neutral: JSON texts that change nothing, "|" between */
} unsupported[] = {
    {"add_special_tokens", "true"},
    {"allowed_token_ids", ""},
    {"audio", ""},
    {"bad_words", "[]"},
    {"best_of", "1"},
    {"cache_salt", "\"\""},
    {"chat_template", ""},
    {"continue_final_message", "false"},
    {"documents", "[]"},
    {"dry_multiplier", "0|0.0"},
    {"dynatemp_range", "0|0.0"},
    {"grammar", "\"\""},
    {"guided_choice", ""},
    {"guided_grammar", ""},
    {"guided_json", ""},
    {"guided_regex", ""},
    {"json_schema", ""},
    {"length_penalty", "1|1.0"},
    {"logits_processors", "[]"},
    {"mirostat", "0"},
    {"modalities", "[\"text\"]"},
    {"n_probs", "0"},
    {"prompt_logprobs", ""},
    {"reasoning_effort", "\"none\""},
    {"repeat_last_n", ""},
    {"response_format", "{\"type\": \"text\"}"},
    {"return_progress", "false"},
    {"return_prompt_text", "false"},
    {"spaces_between_special_tokens", "true"},
    {"structured_outputs", "{}"},
    {"suffix", "\"\""},
    {"timings_per_token", "false"},
    {"truncate_prompt_tokens", ""},
    {"typical_p", "1|1.0"},
    {"use_beam_search", "false"},
    {"verbosity", "\"medium\""},
    {"web_search_options", ""},
    {"xtc_probability", "0|0.0"},
};

static bool is_neutral(const json_t *value, const char *neutral)
{
    while (*neutral) {
        size_t n = strcspn(neutral, "|");
        json_t *allowed = json_loadb(neutral, n, JSON_DECODE_ANY, NULL);
        bool same = json_equal(allowed, value);
        json_decref(allowed);
        if (same) return true;
        neutral += n;
        neutral += strspn(neutral, "|");
    }
    return false;
}

static linnet_status check_unsupported(struct parser *p)
{
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++) {
        const char *field = unsupported[i].field;
        const json_t *value = get(p, field);
        if (!value || is_neutral(value, unsupported[i].neutral)) continue;
        return FAIL(p, field, LINNET_UNSUPPORTED,
                    "%s: this version does not support it: leave the field out", field);
    }
    return LINNET_OK;
}

/* ---- single values ------------------------------------------------------------------------- */

static linnet_status read_bool(struct parser *p, const char *field, bool *out)
{
    const json_t *value = get(p, field);
    if (!value) return LINNET_OK;
    if (!json_is_boolean(value))
        return FAIL(p, field, LINNET_INVALID, "%s: expected true or false, found %s", field,
                    kind_of(value));
    *out = json_is_true(value);
    return LINNET_OK;
}

bool openai_integer(const json_t *value, int64_t *out)
{
    if (json_is_integer(value)) {
        *out = json_integer_value(value);
        return true;
    }
    double real = json_real_value(value);
    if (!json_is_real(value) || real != floor(real) || fabs(real) > 0x1p53) return false;
    *out = (int64_t)real;
    return true;
}

static linnet_status read_integer(struct parser *p, const char *field, int64_t min, int64_t max,
                                  int64_t *out)
{
    const json_t *value = get(p, field);
    int64_t number;
    if (!value) return LINNET_OK;
    if (!openai_integer(value, &number))
        return FAIL(p, field, LINNET_INVALID, "%s: expected an integer, found %s", field,
                    kind_of(value));
    if (number < min || number > max)
        return FAIL(p, field, LINNET_INVALID,
                    "%s: expected an integer from %lld to %lld, found %lld", field, (long long)min,
                    (long long)max, (long long)number);
    *out = number;
    return LINNET_OK;
}

static linnet_status read_i32(struct parser *p, const char *field, int64_t min, int64_t max,
                              int32_t *out)
{
    int64_t number = *out;
    linnet_status status = read_integer(p, field, min, max, &number);
    *out = (int32_t)number;
    return status;
}

static linnet_status read_number(struct parser *p, const char *field, double min, double max,
                                 float *out)
{
    const json_t *value = get(p, field);
    if (!value) return LINNET_OK;
    if (!json_is_number(value))
        return FAIL(p, field, LINNET_INVALID, "%s: expected a number, found %s", field,
                    kind_of(value));
    double number = json_number_value(value);
    if (!(number >= min && number <= max))
        return FAIL(p, field, LINNET_INVALID, "%s: expected a number from %g to %g, found %g",
                    field, min, max, number);
    *out = (float)number;
    return LINNET_OK;
}

/* ---- sampling ------------------------------------------------------------------------------ */

static linnet_status read_sampling(struct parser *p)
{
    linnet_sampling *s = &p->out->request.sampling;
    int64_t seed = -1;
    linnet_status status;
    linnet_sampling_defaults(p->model, s);
    if ((status = read_number(p, "temperature", 0, LIMIT_TEMPERATURE, &s->temperature)) ||
        (status = read_number(p, "top_p", LIMIT_LEAST_TOP_P, 1, &s->top_p)) ||
        (status = read_number(p, "min_p", 0, 1, &s->min_p)) ||
        (status = read_number(p, "repeat_penalty", LIMIT_LEAST_REPETITION_PENALTY,
                              LIMIT_REPETITION_PENALTY, &s->repetition_penalty)) ||
        (status = read_number(p, "repetition_penalty", LIMIT_LEAST_REPETITION_PENALTY,
                              LIMIT_REPETITION_PENALTY, &s->repetition_penalty)) ||
        (status = read_number(p, "presence_penalty", -LIMIT_PENALTY, LIMIT_PENALTY,
                              &s->presence_penalty)) ||
        (status = read_number(p, "frequency_penalty", -LIMIT_PENALTY, LIMIT_PENALTY,
                              &s->frequency_penalty)) ||
        (status = read_i32(p, "top_k", -1, INT32_MAX, &s->top_k)) ||
        (status = read_integer(p, "seed", 0, INT64_MAX, &seed)))
        return status;
    if (s->top_k < 0) s->top_k = 0; /* -1 is vLLM's way to say off */
    s->has_seed = seed >= 0;
    s->seed = s->has_seed ? (uint64_t)seed : 0;
    return LINNET_OK;
}

static linnet_status read_logit_bias(struct parser *p)
{
    static const char field[] = "logit_bias";
    json_t *value = json_object_get(p->body, field);
    const char *key;
    json_t *bias;
    if (!get(p, field)) return LINNET_OK;
    if (!json_is_object(value))
        return FAIL(p, field, LINNET_INVALID,
                    "%s: expected an object of token ids and biases, found %s", field,
                    kind_of(value));
    size_t n = 0, count = json_object_size(value);
    if (count > (size_t)p->info.vocab_size)
        return FAIL(p, field, LINNET_INVALID, "%s: expected at most %d tokens, found %zu", field,
                    p->info.vocab_size, count);
    p->out->logit_bias = mem_new(count, sizeof *p->out->logit_bias);
    if (!p->out->logit_bias) return no_memory(p, field);
    json_object_foreach(value, key, bias)
    {
        char *end;
        long long id = strtoll(key, &end, 10);
        bool digits = *key >= '0' && *key <= '9' && !*end;
        if (!digits || id < 0 || id >= p->info.vocab_size)
            return FAIL(p, field, LINNET_INVALID,
                        "%s: expected token ids from 0 to %d, found '%.32s'", field,
                        p->info.vocab_size - 1, key);
        if (!json_is_number(bias))
            return FAIL(p, field, LINNET_INVALID, "%s: expected a number for token %lld, found %s",
                        field, id, kind_of(bias));
        double amount = fmax(-1e4, fmin(1e4, json_number_value(bias)));
        p->out->logit_bias[n++] = (linnet_logit_bias){(int32_t)id, (float)amount};
    }
    p->out->request.sampling.logit_bias = p->out->logit_bias;
    p->out->request.sampling.n_logit_bias = n;
    return LINNET_OK;
}

/* ---- length and stops ---------------------------------------------------------------------- */

static linnet_status read_lengths(struct parser *p)
{
    linnet_request *r = &p->out->request;
    const json_t *value = get(p, "n_predict");
    linnet_status status;
    r->max_tokens = p->out->endpoint == OPENAI_COMPLETIONS ? 16 : 0;
    bool endless = json_is_integer(value) && json_integer_value(value) == -1;
    if (endless) r->max_tokens = 0;
    if ((!endless && (status = read_i32(p, "n_predict", 1, INT32_MAX, &r->max_tokens))) ||
        (status = read_i32(p, "max_tokens", 1, INT32_MAX, &r->max_tokens)) ||
        (status = read_i32(p, "max_completion_tokens", 1, INT32_MAX, &r->max_tokens)) ||
        (status = read_i32(p, "min_tokens", 0, INT32_MAX, &r->min_tokens)))
        return status;
    if (r->max_tokens && r->min_tokens > r->max_tokens)
        return FAIL(p, "min_tokens", LINNET_INVALID,
                    "min_tokens: expected at most max_tokens (%d), found %d", r->max_tokens,
                    r->min_tokens);
    return LINNET_OK;
}

static linnet_status add_stop(struct parser *p, const json_t *text, size_t index)
{
    if (!json_is_string(text))
        return FAIL(p, "stop", LINNET_INVALID, "stop: expected strings, found %s", kind_of(text));
    size_t n = json_string_length(text);
    if (n == 0)
        return FAIL(p, "stop", LINNET_INVALID, "stop: expected texts with at least one character");
    if (memchr(json_string_value(text), 0, n))
        return FAIL(p, "stop", LINNET_INVALID, "stop: expected texts without the character U+0000");
    p->out->stop[index] = mem_string(json_string_value(text), n);
    if (!p->out->stop[index]) return no_memory(p, "stop");
    p->out->request.n_stop = index + 1;
    return LINNET_OK;
}

static linnet_status read_stop(struct parser *p)
{
    const json_t *value = get(p, "stop");
    linnet_status status = LINNET_OK;
    if (!value) return LINNET_OK;
    bool list = json_is_array(value);
    if (!list && !json_is_string(value))
        return FAIL(p, "stop", LINNET_INVALID, "stop: expected a string or a list, found %s",
                    kind_of(value));
    size_t n = list ? json_array_size(value) : 1;
    if (n > LIMIT_STOPS)
        return FAIL(p, "stop", LINNET_INVALID, "stop: expected at most %d texts, found %zu",
                    LIMIT_STOPS, n);
    p->out->stop = mem_new(n, sizeof *p->out->stop);
    if (!p->out->stop) return no_memory(p, "stop");
    for (size_t i = 0; i < n && !status; i++)
        status = add_stop(p, list ? json_array_get(value, i) : value, i);
    p->out->request.stop = (const char *const *)p->out->stop;
    return status;
}

/* A list of token ids of this model. */
static linnet_status read_ids(struct parser *p, const char *field, const json_t *list,
                              int32_t **out, size_t *n_out)
{
    size_t n = json_array_size(list);
    if (!json_is_array(list))
        return FAIL(p, field, LINNET_INVALID, "%s: expected a list of token ids, found %s", field,
                    kind_of(list));
    int32_t *ids = mem_new(n, sizeof *ids);
    if (!ids) return no_memory(p, field);
    *out = ids;
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(list, i);
        int64_t id;
        if (!openai_integer(item, &id))
            return FAIL(p, field, LINNET_INVALID, "%s: expected token ids, found %s", field,
                        kind_of(item));
        if (id < 0 || id >= p->info.vocab_size)
            return FAIL(p, field, LINNET_INVALID, "%s: expected token ids from 0 to %d, found %lld",
                        field, p->info.vocab_size - 1, (long long)id);
        ids[i] = (int32_t)id;
    }
    *n_out = n;
    return LINNET_OK;
}

static linnet_status read_stops(struct parser *p)
{
    linnet_request *r = &p->out->request;
    const json_t *ids = get(p, "stop_token_ids");
    bool skip_special = true;
    linnet_status status;
    if ((status = read_stop(p)) ||
        (ids && (status = read_ids(p, "stop_token_ids", ids, &p->out->stop_ids, &r->n_stop_ids))) ||
        (status = read_bool(p, "ignore_eos", &r->ignore_eos)) ||
        (status = read_i32(p, "priority", INT32_MIN, INT32_MAX, &r->priority)) ||
        (status = read_bool(p, "include_stop_str_in_output", &r->include_stop)) ||
        (status = read_bool(p, "skip_special_tokens", &skip_special)))
        return status;
    if (r->n_stop_ids > LIMIT_STOP_IDS)
        return FAIL(p, "stop_token_ids", LINNET_INVALID,
                    "stop_token_ids: expected at most %d, found %zu", LIMIT_STOP_IDS,
                    r->n_stop_ids);
    r->stop_ids = p->out->stop_ids;
    r->keep_special_tokens = !skip_special;
    return LINNET_OK;
}

/* ---- what to send back --------------------------------------------------------------------- */

static linnet_status read_logprobs(struct parser *p)
{
    linnet_request *r = &p->out->request;
    linnet_status status;
    if (p->out->endpoint == OPENAI_COMPLETIONS) {
        r->want_logprobs = get(p, "logprobs") != NULL && !json_is_false(get(p, "logprobs"));
        return r->want_logprobs ? read_i32(p, "logprobs", 0, LIMIT_LOGPROBS, &r->logprobs)
                                : LINNET_OK;
    }
    if ((status = read_bool(p, "logprobs", &r->want_logprobs)) ||
        (status = read_i32(p, "top_logprobs", 0, LIMIT_LOGPROBS, &r->logprobs)))
        return status;
    if (r->logprobs > 0 && !r->want_logprobs)
        return FAIL(p, "top_logprobs", LINNET_INVALID,
                    "top_logprobs: it needs \"logprobs\": true beside it");
    return LINNET_OK;
}

static linnet_status read_stream(struct parser *p)
{
    const json_t *value = get(p, "stream_options");
    linnet_status status = read_bool(p, "stream", &p->out->stream);
    if (status || !value) return status;
    if (!json_is_object(value))
        return FAIL(p, "stream_options", LINNET_INVALID,
                    "stream_options: expected an object, found %s", kind_of(value));
    if (!p->out->stream)
        return FAIL(p, "stream_options", LINNET_INVALID,
                    "stream_options: it needs \"stream\": true beside it");
    const json_t *usage = json_object_get(value, "include_usage");
    if (usage && !json_is_boolean(usage) && !json_is_null(usage))
        return FAIL(p, "stream_options", LINNET_INVALID,
                    "stream_options: include_usage: expected true or false, found %s",
                    kind_of(usage));
    p->out->include_usage = json_is_true(usage);
    return LINNET_OK;
}

/* The engine computes no log-probabilities of a prompt: an answer with some would mislead. */
static linnet_status read_echo(struct parser *p)
{
    bool *echo = &p->out->echo;
    linnet_status status = read_bool(p, "echo", echo);
    if (status || !*echo) return status;
    if (p->out->endpoint == OPENAI_CHAT)
        return FAIL(p, "echo", LINNET_UNSUPPORTED,
                    "echo: chats do not support it: leave the field out");
    if (p->out->request.want_logprobs)
        return FAIL(p, "echo", LINNET_UNSUPPORTED,
                    "echo: the log-probabilities of a prompt's tokens are not computed: leave out "
                    "echo or logprobs");
    return LINNET_OK;
}

static linnet_status read_reply(struct parser *p)
{
    linnet_request *r = &p->out->request;
    const json_t *model = get(p, "model");
    linnet_status status;
    r->n = 1;
    if (model && !json_is_string(model))
        return FAIL(p, "model", LINNET_INVALID, "model: expected a string, found %s",
                    kind_of(model));
    if (model && strlen(json_string_value(model)) != json_string_length(model))
        return FAIL(p, "model", LINNET_INVALID,
                    "model: expected a name without the character U+0000");
    if (model && json_string_length(model) > 0 &&
        !(p->out->model = mem_string(json_string_value(model), json_string_length(model))))
        return no_memory(p, "model");
    if ((status = read_i32(p, "n", 1, OPENAI_MAX_CHOICES, &r->n)) ||
        (status = read_bool(p, "return_token_ids", &p->out->return_token_ids)) ||
        (status = read_bool(p, "debug", &p->out->debug)) || (status = read_logprobs(p)) ||
        (status = read_echo(p)))
        return status;
    return read_stream(p);
}

/* ---- prompts ------------------------------------------------------------------------------- */

static linnet_status check_messages(struct parser *p)
{
    static const char field[] = "messages";
    const json_t *messages = get(p, field), *message;
    size_t i;
    if (!messages) return FAIL(p, field, LINNET_INVALID, "%s: the field is missing", field);
    if (!json_is_array(messages))
        return FAIL(p, field, LINNET_INVALID, "%s: expected a list, found %s", field,
                    kind_of(messages));
    if (json_array_size(messages) == 0)
        return FAIL(p, field, LINNET_INVALID, "%s: expected at least one message", field);
    json_array_foreach(messages, i, message)
    {
        const json_t *content = json_object_get(message, "content");
        if (!json_is_object(message))
            return FAIL(p, field, LINNET_INVALID, "%s[%zu]: expected an object, found %s", field, i,
                        kind_of(message));
        if (!json_is_string(json_object_get(message, "role")))
            return FAIL(p, field, LINNET_INVALID, "%s[%zu]: expected a string as role", field, i);
        bool known = json_is_string(content) || json_is_array(content) || json_is_null(content);
        bool calls = json_is_array(json_object_get(message, "tool_calls"));
        if (content ? !known : !calls)
            return FAIL(p, field, LINNET_INVALID,
                        "%s[%zu]: expected a string or a list of parts as content, found %s", field,
                        i, content ? kind_of(content) : "none");
    }
    return LINNET_OK;
}

static linnet_status add_prompt(struct parser *p, const char *field, int32_t *ids, size_t n)
{
    struct openai_prompt *prompt = &p->out->prompts[p->out->n_prompts++];
    *prompt = (struct openai_prompt){.ids = ids, .n = n};
    if (n > 0) return LINNET_OK;
    return FAIL(p, field, LINNET_INVALID, "%s: expected at least one token, found none", field);
}

/* Only what the template is meant to see goes to the template. */
static char *template_input(const struct parser *p, json_t *messages, bool tools)
{
    static const char *const fields[] = {"add_generation_prompt", "chat_template_kwargs"};
    json_t *input = json_pack("{s:O}", "messages", messages);
    if (tools) json_object_set(input, "tools", json_object_get(p->body, "tools"));
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (get(p, fields[i]))
            json_object_set(input, fields[i], json_object_get(p->body, fields[i]));
    char *text = json_dumps(input, JSON_COMPACT);
    json_decref(input);
    return text;
}

/* The chat as its template has it; ids may be NULL. */
static linnet_status render(struct parser *p, json_t *messages, bool tools, char **text,
                            size_t *size, int32_t **ids, size_t *n)
{
    int32_t *unwanted = NULL;
    size_t none = 0;
    char *input = template_input(p, messages, tools);
    if (!input) return no_memory(p, "messages");
    linnet_status status =
        linnet_chat_tokenize(p->model, input, strlen(input), text, size, ids ? ids : &unwanted,
                             ids ? n : &none, &p->fault->error);
    free(input);
    linnet_free(unwanted);
    return status ? blame(p, "messages", status) : LINNET_OK;
}

/* The rendered chat's tokens, and what its text says about the answer to come. */
static linnet_status render_chat(struct parser *p, json_t *messages)
{
    char *rendered = NULL, *plain = NULL; /* plain: without the tools */
    size_t size = 0, plain_size = 0, n = 0;
    int32_t *ids = NULL;
    bool tools = p->out->n_tools > 0;
    linnet_status status = LINNET_OK;
    if (tools) status = render(p, messages, false, &plain, &plain_size, NULL, NULL);
    if (!status) status = render(p, messages, tools, &rendered, &size, &ids, &n);
    if (!status) status = add_prompt(p, "messages", ids, n);
    if (!status) status = openai_expect_answer(p, rendered, size, plain, plain_size);
    linnet_free(plain);
    if (p->out->debug) {
        p->out->rendered = rendered;
        p->out->rendered_size = size;
    } else {
        linnet_free(rendered);
    }
    return status;
}

static linnet_status read_chat(struct parser *p)
{
    const json_t *variables = get(p, "chat_template_kwargs");
    bool ignored = true;
    linnet_status status;
    if ((status = check_messages(p)) || (status = openai_read_tools(p)) ||
        (status = read_bool(p, "add_generation_prompt", &ignored)))
        return status;
    if (variables && !json_is_object(variables))
        return FAIL(p, "chat_template_kwargs", LINNET_INVALID,
                    "chat_template_kwargs: expected an object, found %s", kind_of(variables));
    json_t *messages = NULL;
    if ((status = openai_template_messages(p, &messages))) return status;
    p->out->prompts = mem_new(1, sizeof *p->out->prompts);
    status = p->out->prompts ? render_chat(p, messages) : no_memory(p, "messages");
    json_decref(messages);
    return status;
}

/* The prompt added last: a text as it was given, token ids as the text that they are. */
static linnet_status keep_text(struct parser *p, const json_t *value)
{
    struct openai_prompt *prompt = &p->out->prompts[p->out->n_prompts - 1];
    if (!json_is_string(value))
        return blame(p, "prompt",
                     linnet_detokenize(p->model, prompt->ids, prompt->n, 0, &prompt->text,
                                       &prompt->text_size, &p->fault->error));
    prompt->text_size = json_string_length(value);
    prompt->text = mem_string(json_string_value(value), prompt->text_size);
    return prompt->text ? LINNET_OK : no_memory(p, "prompt");
}

static linnet_status read_prompt(struct parser *p, const json_t *value)
{
    int32_t *ids = NULL;
    size_t n = 0;
    linnet_status status;
    if (json_is_string(value)) {
        status =
            linnet_tokenize(p->model, json_string_value(value), json_string_length(value),
                            LINNET_ADD_SPECIAL | LINNET_PARSE_SPECIAL, &ids, &n, &p->fault->error);
        if (status) return blame(p, "prompt", status);
    } else {
        status = read_ids(p, "prompt", value, &ids, &n);
        if (status) {
            free(ids);
            return status;
        }
    }
    status = add_prompt(p, "prompt", ids, n);
    return status || !p->out->echo ? status : keep_text(p, value);
}

/* A string, a list of strings, a list of ids, a list of lists of ids. */
static linnet_status read_completion(struct parser *p)
{
    const json_t *value = get(p, "prompt");
    linnet_status status = LINNET_OK;
    if (!value) return FAIL(p, "prompt", LINNET_INVALID, "prompt: the field is missing");
    if (!json_is_string(value) && json_array_size(value) == 0)
        return FAIL(p, "prompt", LINNET_INVALID,
                    "prompt: expected a text, token ids, or a list of these, found %s",
                    json_is_array(value) ? "an empty list" : kind_of(value));
    bool several = json_is_array(value) && !json_is_number(json_array_get(value, 0));
    size_t n = several ? json_array_size(value) : 1;
    if (n > OPENAI_MAX_PROMPTS || n * (size_t)p->out->request.n > OPENAI_MAX_CHOICES)
        return FAIL(p, "prompt", LINNET_INVALID,
                    "prompt: expected at most %d answers in all, found %zu prompts with n = %d",
                    OPENAI_MAX_CHOICES, n, p->out->request.n);
    p->out->prompts = mem_new(n, sizeof *p->out->prompts);
    if (!p->out->prompts) return no_memory(p, "prompt");
    for (size_t i = 0; i < n && !status; i++)
        status = read_prompt(p, several ? json_array_get(value, i) : value);
    return status;
}

linnet_status openai_request_parse(const linnet_model *model, enum openai_endpoint endpoint,
                                   const json_t *body, struct openai_request *out,
                                   struct openai_fault *fault)
{
    struct parser p = {.model = model, .body = body, .out = out, .fault = fault};
    linnet_status status;
    *out = (struct openai_request){.endpoint = endpoint};
    *fault = (struct openai_fault){0};
    linnet_model_get_info(model, &p.info);
    if (!json_is_object(body))
        return FAIL(&p, "", LINNET_INVALID, "the request's body is not a JSON object");
    if ((status = check_unsupported(&p)) || (status = read_reply(&p)) ||
        (status = read_sampling(&p)) || (status = read_logit_bias(&p)) ||
        (status = read_lengths(&p)) || (status = read_stops(&p)))
        return status;
    return endpoint == OPENAI_CHAT ? read_chat(&p) : read_completion(&p);
}

void openai_request_free(struct openai_request *request)
{
    for (size_t i = 0; i < request->n_prompts; i++) {
        linnet_free(request->prompts[i].ids);
        linnet_free(request->prompts[i].text);
    }
    for (size_t i = 0; i < request->request.n_stop; i++) free(request->stop[i]);
    free(request->prompts);
    free(request->stop);
    free(request->stop_ids);
    free(request->logit_bias);
    free(request->model);
    openai_free_tools(request);
    linnet_free(request->rendered);
    *request = (struct openai_request){0};
}
