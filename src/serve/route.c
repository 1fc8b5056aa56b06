/* route.c - what there is at which path, and the short answers. */
#include <string.h>

#include "serve/embedded.h"
#include "serve/server_internal.h"

/* ---- on the connection thread --------------------------------------------------------------- */

static void get_page(struct exchange *x)
{
    x->content_type = "text/html; charset=utf-8";
    x->fixed = page_bytes;
    x->fixed_size = page_size;
    x->status = 200;
}

static void get_description(struct exchange *x)
{
    x->fixed = openapi_bytes;
    x->fixed_size = openapi_size;
    x->status = 200;
}

static void get_health(struct exchange *x)
{
    struct server *s = x->server;
    linnet_engine *engine = atomic_load(&s->engine);
    const char *state = "ok";
    linnet_stats stats;
    if (atomic_load(&s->draining)) {
        state = "draining";
    } else if (!engine) {
        state = "loading";
    } else if (atomic_load(&s->failed)) {
        state = "failed";
    } else {
        linnet_engine_get_stats(engine, &stats);
        if (stats.last_step_age_s > s->options.stopped_s) state = "stuck";
    }
    bool ok = strcmp(state, "ok") == 0;
    if (!ok) x->retry_after = 1;
    reply_json(x, ok ? 200 : 503, json_pack("{s:s}", "status", state));
}

static void get_version(struct exchange *x)
{
    reply_json(x, 200, json_pack("{s:s}", "version", linnet_version()));
}

static size_t n_names(const struct server *s)
{
    return s->options.n_names ? s->options.n_names : 1;
}

static const char *name_at(const struct server *s, size_t i)
{
    return s->options.n_names ? s->options.names[i] : s->info.name;
}

static json_t *model_json(const struct server *s, const char *name)
{
    return json_pack("{s:o,s:s,s:I,s:s,s:o,s:n,s:i,s:{s:i,s:I,s:I,s:i,s:s?,s:s?}}", "id",
                     openai_text(name, strlen(name)), "object", "model", "created",
                     (json_int_t)s->metrics.started, "owned_by", "linnet", "root",
                     openai_text(s->info.name, strlen(s->info.name)), "parent", "max_model_len",
                     s->plan.max_model_len, "meta", "n_ctx_train", s->info.context_length,
                     "n_params", (json_int_t)s->info.n_parameters, "size",
                     (json_int_t)s->info.weight_bytes, "n_vocab", s->info.vocab_size,
                     "architecture", s->info.architecture, "dtype", s->info.dtype);
}

static void get_models(struct exchange *x)
{
    const struct server *s = x->server;
    json_t *list = json_array();
    for (size_t i = 0; i < n_names(s); i++)
        json_array_append_new(list, model_json(s, name_at(s, i)));
    reply_json(x, 200, json_pack("{s:s,s:o}", "object", "list", "data", list));
}

static void get_model(struct exchange *x)
{
    const struct server *s = x->server;
    const char *wanted = x->url + strlen(x->route->path);
    for (size_t i = 0; i < n_names(s); i++) {
        if (strcmp(name_at(s, i), wanted) != 0) continue;
        reply_json(x, 200, model_json(s, wanted));
        return;
    }
    reply_error(x, 404, "not_found_error", "model_not_found",
                "there is no model '%.100s' here: GET /v1/models lists those there are", wanted);
}

static void get_metrics(struct exchange *x)
{
    struct server *s = x->server;
    linnet_engine *engine = atomic_load(&s->engine);
    linnet_stats stats;
    const union MHD_DaemonInfo *daemon =
        MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_CURRENT_CONNECTIONS);
    struct metrics_view view = {.model_name = engine ? name_at(s, 0) : "",
                                .stats = engine ? &stats : NULL,
                                .plan = &s->plan,
                                .connections = daemon ? (int)daemon->num_connections : 0};
    if (engine) linnet_engine_get_stats(engine, &stats);
    x->content_type = "text/plain; version=0.0.4; charset=utf-8";
    metrics_write(&s->metrics, &view, &x->reply);
    x->status = 200;
}

/* ---- by a worker --------------------------------------------------------------------------- */

/* Could the text's values be more, or deeper in one another, than is allowed? Before any is made.
 */
static bool is_excessive(const struct strbuf *text)
{
    size_t depth = 0, n = 0;
    bool string = false;
    for (size_t i = 0; i < text->size; i++) {
        char c = text->data[i];
        if (string && c == '\\') i++;
        if (c == '"') string = !string;
        if (string) continue;
        if (c == '[' || c == '{') depth++;
        if ((c == ']' || c == '}') && depth > 0) depth--;
        n += c == '[' || c == '{' || c == ',' || c == ':';
        if (depth > JSON_NESTING || n > JSON_VALUES) return true;
    }
    return false;
}

json_t *route_body(struct exchange *x)
{
    json_error_t where;
    json_t *json = NULL;
    bool excessive = is_excessive(&x->body);
    if (!excessive) json = json_loadb(strbuf_cstr(&x->body), x->body.size, JSON_ALLOW_NUL, &where);
    exchange_free_body(x);
    if (excessive) {
        reply_error(x, 400, "invalid_request_error", "invalid_json",
                    "the body has more than %d JSON values, or more than %d within one another",
                    JSON_VALUES, JSON_NESTING);
    } else if (!json) {
        reply_error(x, 400, "invalid_request_error", "invalid_json",
                    "the body is not valid JSON: line %d, column %d: %.150s", where.line,
                    where.column, where.text);
    } else if (!json_is_object(json)) {
        json_decref(json);
        json = NULL;
        reply_error(x, 400, "invalid_request_error", "invalid_json",
                    "the request's body is not a JSON object");
    }
    return json;
}

/* A reply that takes so much while it is made; false: there is no room for it. */
static bool has_room(struct exchange *x, size_t n)
{
    size_t limit = (size_t)x->server->options.max_memory;
    if (n > limit) {
        reply_error(x, 413, "invalid_request_error", "body_too_large",
                    "the reply would take %zu MiB of memory and the limit is %zu: ask for less at "
                    "a time",
                    n >> 20, limit >> 20);
        return false;
    }
    if (account_take(x, &x->reply_held, n)) return true;
    reply_crowded(x);
    return false;
}

static linnet_status tokenize_text(struct exchange *x, const json_t *body, int32_t **ids, size_t *n,
                                   struct openai_fault *fault)
{
    const json_t *text = json_object_get(body, "prompt");
    const json_t *special = json_object_get(body, "add_special_tokens");
    if (!text) text = json_object_get(body, "content");
    snprintf(fault->field, sizeof fault->field, "prompt");
    if (!json_is_string(text))
        return error_set(&fault->error, LINNET_INVALID,
                         "expected a text as \"prompt\", or a chat as \"messages\"");
    unsigned flags = LINNET_PARSE_SPECIAL | (json_is_false(special) ? 0 : LINNET_ADD_SPECIAL);
    return linnet_tokenize(x->server->model, json_string_value(text), json_string_length(text),
                           flags, ids, n, &fault->error);
}

/* The very tokens that /v1/chat/completions would have for it. */
static linnet_status tokenize_chat(struct exchange *x, json_t *body, int32_t **ids, size_t *n,
                                   struct openai_fault *fault)
{
    struct openai_request request;
    json_object_del(body, "add_special_tokens"); /* the template's affair */
    linnet_status status =
        openai_request_parse(x->server->model, OPENAI_CHAT, body, &request, fault);
    if (!status) {
        *ids = request.prompts->ids;
        *n = request.prompts->n;
        request.prompts->ids = NULL;
    }
    openai_request_free(&request);
    return status;
}

static linnet_status tokenize(struct exchange *x, json_t *body, int32_t **ids, size_t *n,
                              struct openai_fault *fault)
{
    const json_t *special = json_object_get(body, "add_special_tokens");
    if (special && !json_is_boolean(special) && !json_is_null(special)) {
        snprintf(fault->field, sizeof fault->field, "add_special_tokens");
        return error_set(&fault->error, LINNET_INVALID,
                         "add_special_tokens: expected true or false");
    }
    return json_object_get(body, "messages") ? tokenize_chat(x, body, ids, n, fault)
                                             : tokenize_text(x, body, ids, n, fault);
}

/* As text: as JSON values they would take five times that. */
static void write_ids(struct exchange *x, const int32_t *ids, size_t n)
{
    strbuf_format(&x->reply, "{\"count\":%zu,\"max_model_len\":%d,\"tokens\":[", n,
                  x->server->plan.max_model_len);
    for (size_t i = 0; i < n; i++) strbuf_format(&x->reply, i ? ",%d" : "%d", ids[i]);
    strbuf_text(&x->reply, "]}");
    reply_written(x, 200);
}

static void post_tokenize(struct exchange *x)
{
    enum { ID_SIZE = 8 }; /* bytes of text */
    json_t *body = route_body(x);
    int32_t *ids = NULL;
    size_t n = 0;
    struct openai_fault fault = {0};
    if (!body) return;
    linnet_status status = tokenize(x, body, &ids, &n, &fault);
    json_decref(body);
    if (status)
        reply_fault(x, &fault);
    else if (has_room(x, n * ID_SIZE))
        write_ids(x, ids, n);
    linnet_free(ids);
}

static linnet_status read_ids(const struct server *s, const json_t *list, int32_t **out,
                              linnet_error *err)
{
    size_t n = json_array_size(list);
    if (!json_is_array(list))
        return error_set(err, LINNET_INVALID, "tokens: expected a list of token ids");
    int32_t *ids = calloc(n ? n : 1, sizeof *ids);
    if (!ids) return error_memory(err, "tokens", n * sizeof *ids);
    *out = ids;
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(list, i);
        int64_t id;
        if (!openai_integer(item, &id) || id < 0 || id >= s->info.vocab_size)
            return error_set(err, LINNET_INVALID, "tokens[%zu]: expected a token id from 0 to %d",
                             i, s->info.vocab_size - 1);
        ids[i] = (int32_t)id;
    }
    return LINNET_OK;
}

/* The bytes of these tokens' text, about; counted a piece at a time, as far as `most`. */
static size_t text_size(const struct exchange *x, const int32_t *ids, size_t n, size_t most)
{
    enum { PIECE = 4096 };
    size_t sum = 0;
    for (size_t i = 0; i < n && sum <= most; i += PIECE) {
        char *text = NULL;
        size_t size = 0;
        linnet_detokenize(x->server->model, ids + i, n - i < PIECE ? n - i : PIECE, 0, &text, &size,
                          NULL);
        linnet_free(text);
        sum += size;
    }
    return sum;
}

static void write_text(struct exchange *x, const int32_t *ids, size_t n)
{
    enum { TIMES = 4 }; /* as bytes, as a JSON value, and twice in the reply */
    char *text = NULL;
    size_t size = 0;
    struct openai_fault fault = {.field = "tokens"};
    if (!has_room(x, TIMES * text_size(x, ids, n, (size_t)x->server->options.max_memory))) return;
    if (linnet_detokenize(x->server->model, ids, n, 0, &text, &size, &fault.error)) {
        reply_fault(x, &fault);
    } else {
        json_t *shown = openai_text(text, size);
        reply_json(x, 200, json_pack("{s:O,s:o}", "prompt", shown, "content", shown));
    }
    linnet_free(text);
}

static void post_detokenize(struct exchange *x)
{
    json_t *body = route_body(x);
    int32_t *ids = NULL;
    struct openai_fault fault = {.field = "tokens"};
    if (!body) return;
    const json_t *list = json_object_get(body, "tokens");
    size_t n = json_array_size(list);
    linnet_status status = read_ids(x->server, list, &ids, &fault.error);
    json_decref(body);
    if (status)
        reply_fault(x, &fault);
    else
        write_text(x, ids, n);
    free(ids);
}

/* ---- the table ----------------------------------------------------------------------------- */

static const struct route routes[] = {
    {.path = "/", .open = true, .get = get_page},
    {.path = "/openapi.json", .open = true, .get = get_description},
    {.path = "/health", .open = true, .get = get_health},
    {.path = "/version", .get = get_version},
    {.path = "/metrics", .get = get_metrics},
    {.path = "/v1/models", .needs_engine = true, .get = get_models},
    {.path = "/v1/models/", .prefix = true, .needs_engine = true, .get = get_model},
    {.path = "/v1/chat/completions",
     .needs_engine = true,
     .generates = true,
     .post = generate_chat},
    {.path = "/v1/completions",
     .needs_engine = true,
     .generates = true,
     .post = generate_completions},
    {.path = "/v1/messages",
     .needs_engine = true,
     .generates = true,
     .messages = true,
     .post = generate_messages},
    {.path = "/v1/messages/count_tokens",
     .needs_engine = true,
     .messages = true,
     .post = generate_count},
    {.path = "/tokenize", .needs_engine = true, .post = post_tokenize},
    {.path = "/detokenize", .needs_engine = true, .post = post_detokenize},
};

const struct route *route_at(size_t i)
{
    return i < sizeof routes / sizeof *routes ? &routes[i] : NULL;
}

const struct route *route_find(const char *path)
{
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        size_t n = strlen(routes[i].path);
        if (strncmp(path, routes[i].path, n) != 0) continue;
        if (routes[i].prefix ? path[n] != 0 : path[n] == 0) return &routes[i];
    }
    return NULL;
}

bool route_serves(const struct server *s, const char *name)
{
    for (size_t i = 0; i < n_names(s); i++)
        if (strcmp(name_at(s, i), name) == 0) return true;
    return false;
}

const char *route_name(const struct server *s)
{
    return name_at(s, 0);
}
