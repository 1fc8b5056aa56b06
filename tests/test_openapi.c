/*
 * The description that GET /openapi.json serves against the server: the same routes, with the
 * statuses that each can have; and against the parsers of requests: the same fields, the same
 * limits, the same values of what is not supported. The pages in docs/ name each field too.
 */
#include "http_client.h"

#include "serve/server_internal.h"

static struct site site;
static json_t *description;

/* What the parser looks for in a request's body, seen at the library's door. */
static const json_t *watched;
static json_t *asked;

json_t *json_object_get(const json_t *object, const char *key)
{
    if (object && object == watched) json_object_set_new(asked, key, json_true());
    return key ? json_object_getn(object, key, strlen(key)) : NULL;
}

static int open_all(void **state)
{
    (void)state;
    struct answered a = {0};
    site_open(&site, "127.0.0.1", NULL);
    site_load(&site, 2);
    ask(&site, "GET", "/openapi.json", NULL, &a);
    assert_status(&a, 200);
    assert_string_equal(header_of(&a, "content-type"), "application/json");
    description = body_json(&a);
    strbuf_free(&a.body);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    json_decref(description);
    site_close(&site);
    return 0;
}

/* "#/components/..." */
static json_t *resolve(json_t *schema)
{
    const char *reference = json_string_value(json_object_get(schema, "$ref"));
    if (!reference) return schema;
    json_t *found = description;
    char path[128], *rest = NULL;
    snprintf(path, sizeof path, "%s", reference);
    for (char *part = strtok_r(path + 2, "/", &rest); part; part = strtok_r(NULL, "/", &rest))
        found = json_object_get(found, part);
    if (!found) fail_msg("there is no %s", reference);
    return resolve(found);
}

/* The properties of a schema and of all that it is made of. */
static void gather(json_t *schema, json_t *properties)
{
    size_t i;
    json_t *part;
    schema = resolve(schema);
    json_object_update(properties, json_object_get(schema, "properties"));
    json_array_foreach(json_object_get(schema, "allOf"), i, part) gather(part, properties);
}

/* A request's parser, by an endpoint of one API or of the other. */
static linnet_status parse_openai(int endpoint, const json_t *body, struct openai_request *request,
                                  struct openai_fault *fault)
{
    return openai_request_parse(site.model, (enum openai_endpoint)endpoint, body, request, fault);
}

static linnet_status parse_messages(int endpoint, const json_t *body,
                                    struct openai_request *request, struct openai_fault *fault)
{
    json_t *made = NULL;
    *request = (struct openai_request){.stream = false};
    linnet_status status = anthropic_request((enum anthropic_endpoint)endpoint, body, &made, fault);
    if (!status) status = parse_openai(OPENAI_CHAT, made, request, fault);
    json_decref(made);
    return status;
}

static const struct {
    linnet_status (*parse)(int endpoint, const json_t *body, struct openai_request *request,
                           struct openai_fault *fault);
    int endpoint;
    const char *schema, *page, *least; /* least: a request that is good */
    size_t n_fields;                   /* at least */
} requests[] = {
    {parse_openai, OPENAI_CHAT, "ChatRequest", "serving.md",
     "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tool_choice\":\"auto\"}", 61},
    {parse_openai, OPENAI_COMPLETIONS, "CompletionRequest", "serving.md", "{\"prompt\":\"x\"}", 61},
    {parse_messages, ANTHROPIC_MESSAGES, "MessagesRequest", "serving-anthropic.md",
     "{\"model\":\"m\",\"max_tokens\":5,\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", 16},
    {parse_messages, ANTHROPIC_COUNT_TOKENS, "CountTokensRequest", "serving-anthropic.md",
     "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", 16},
};
enum { N_REQUESTS = sizeof requests / sizeof *requests };

static json_t *properties_of(size_t r)
{
    json_t *properties = json_object(), *schemas = json_object_get(description, "components");
    schemas = json_object_get(schemas, "schemas");
    gather(json_object_get(schemas, requests[r].schema), properties);
    assert_true(json_object_size(properties) >= requests[r].n_fields);
    return properties;
}

/* The field at fault of the least request with one more field; "" if it is good. */
static const char *fault_of(size_t r, const char *field, json_t *value)
{
    static struct openai_fault fault;
    struct openai_request request;
    json_t *body = json_loads(requests[r].least, 0, NULL);
    json_object_set_new(body, field, value);
    if (strcmp(field, "min_tokens") == 0 && json_integer_value(value) == INT32_MAX)
        json_object_set(body, "max_tokens", value);
    if (strcmp(field, "top_logprobs") == 0) json_object_set_new(body, "logprobs", json_true());
    linnet_status status = requests[r].parse(requests[r].endpoint, body, &request, &fault);
    if (status && !fault.field[0]) fail_msg("%s: %s", field, fault.error.message);
    openai_request_free(&request);
    json_decref(body);
    return fault.field;
}

static void same_fields(void **state)
{
    (void)state;
    for (size_t r = 0; r < N_REQUESTS; r++) {
        struct openai_request request;
        struct openai_fault fault;
        const char *field;
        json_t *value, *properties = properties_of(r);
        json_t *body = json_loads(requests[r].least, 0, NULL);
        asked = json_object();
        watched = body;
        assert_ok(requests[r].parse(requests[r].endpoint, body, &request, &fault), fault.error);
        watched = NULL;
        json_object_foreach(properties, field, value) if (!json_object_get(asked, field))
            fail_msg("%s: the parser does not know %s", requests[r].schema, field);
        json_object_foreach(asked, field, value) if (!json_object_get(properties, field))
            fail_msg("%s: openapi.json lacks %s", requests[r].schema, field);
        openai_request_free(&request);
        json_decref(asked);
        json_decref(properties);
        json_decref(body);
    }
}

/* The page about a route says of every field that there is one. */
static void same_pages(void **state)
{
    (void)state;
    for (size_t r = 0; r < N_REQUESTS; r++) {
        char path[512], quoted[80];
        const char *field;
        json_t *value, *properties = properties_of(r);
        snprintf(path, sizeof path, "%s/docs/%s", LINNET_SOURCE_DIR, requests[r].page);
        char *page = load_file(path, NULL);
        json_object_foreach(properties, field, value)
        {
            snprintf(quoted, sizeof quoted, "`%s`", field);
            if (!strstr(page, quoted)) fail_msg("%s lacks %s", requests[r].page, quoted);
        }
        free(page);
        json_decref(properties);
    }
}

static json_t *beyond(const json_t *limit, int by)
{
    double number = json_number_value(limit);
    if (json_is_integer(limit) && json_integer_value(limit) < INT64_MAX)
        return json_integer(json_integer_value(limit) + by);
    return json_real(by > 0 ? number * 1.001 : number * 0.999);
}

static void check_limit(size_t r, const char *field, const json_t *schema, const char *keyword)
{
    const json_t *limit = json_object_get(schema, keyword);
    bool most = strcmp(keyword, "maximum") == 0;
    if (!limit) return;
    if (*fault_of(r, field, json_copy((json_t *)limit)))
        fail_msg("%s: its %s is refused", field, keyword);
    if (strcmp(fault_of(r, field, beyond(limit, most ? 1 : -1)), field) != 0)
        fail_msg("%s: more than its %s is not refused", field, keyword);
}

static void check_items(size_t r, const char *field, const json_t *schema)
{
    const json_t *limit = json_object_get(schema, "maxItems");
    json_t *list = json_array();
    bool ids = strcmp(field, "stop_token_ids") == 0;
    bool texts = strcmp(field, "stop") == 0 || strcmp(field, "stop_sequences") == 0;
    if (limit)
        for (json_int_t i = json_integer_value(limit); i >= 0; i--)
            json_array_append_new(list, texts ? json_string("~") : json_integer(1));
    if (limit && strcmp(fault_of(r, field, json_incref(list)), field) != 0)
        fail_msg("%s: more than its maxItems is not refused", field);
    json_array_remove(list, 0);
    if (limit && (ids || texts) && *fault_of(r, field, json_incref(list)))
        fail_msg("%s: its maxItems are refused", field);
    json_decref(list);
}

/* What may be only one of a few values takes these, and no other. */
static void check_values(size_t r, const char *field, const json_t *schema)
{
    const json_t *values = json_object_get(schema, "enum");
    json_t *value;
    size_t i;
    json_array_foreach(values, i, value) if (*fault_of(r, field, json_incref(value)))
        fail_msg("%s: one of its values is refused", field);
    if (values && strcmp(fault_of(r, field, json_pack("{s:s}", "odd", "value")), field) != 0)
        fail_msg("%s: a value that it does not list is not refused", field);
}

static void same_limits(void **state)
{
    (void)state;
    for (size_t r = 0; r < N_REQUESTS; r++) {
        const char *field;
        json_t *schema, *properties = properties_of(r), *choice;
        size_t i;
        json_object_foreach(properties, field, schema)
        {
            check_limit(r, field, schema, "minimum");
            check_limit(r, field, schema, "maximum");
            check_items(r, field, schema);
            check_values(r, field, schema);
            json_array_foreach(json_object_get(schema, "anyOf"), i, choice)
            {
                check_limit(r, field, choice, "minimum");
                check_limit(r, field, choice, "maximum");
                if (strcmp(field, "prompt") != 0) check_items(r, field, choice);
            }
        }
        json_decref(properties);
    }
}

/* A route's operation has the statuses that the route can have, and "security" where it is open. */
static void check_operation(const struct route *route, bool post, const json_t *operation)
{
    const json_t *answers = json_object_get(operation, "responses");
    const struct {
        const char *status;
        bool can;
    } statuses[] = {{"200", true},
                    {"400", post},
                    {"401", !route->open},
                    {"413", post},
                    {"429", route->generates},
                    {"500", post},
                    {"503", route->needs_engine && !route->messages},
                    {"529", route->needs_engine && route->messages}};
    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        if (statuses[i].can && !json_object_get(answers, statuses[i].status))
            fail_msg("%s: openapi.json lacks status %s", route->path, statuses[i].status);
    if (!json_object_get(operation, "security") == route->open)
        fail_msg("%s: openapi.json is wrong about its key", route->path);
}

/* Every route is there, and takes just the methods that it should; and no other is. */
static void same_routes(void **state)
{
    (void)state;
    struct answered a = {0};
    json_t *paths = json_object_get(description, "paths");
    const struct route *route;
    size_t n = 0;
    for (; (route = route_at(n)); n++) {
        char path[128];
        snprintf(path, sizeof path, "%s%s", route->path, route->prefix ? "{id}" : "");
        const json_t *methods = json_object_get(paths, path), *operation = NULL;
        if (!methods) fail_msg("openapi.json lacks the route %s", path);
        assert_int_equal(json_object_size(methods), (route->get != NULL) + (route->post != NULL));
        if (route->get && !(operation = json_object_get(methods, "get")))
            fail_msg("openapi.json lacks GET %s", path);
        if (route->get) check_operation(route, false, operation);
        if (route->post && !(operation = json_object_get(methods, "post")))
            fail_msg("openapi.json lacks POST %s", path);
        if (route->post) check_operation(route, true, operation);
        ask(&site, "OPTIONS", route->prefix ? "/v1/models/qwen3-tiny" : path, NULL, &a);
        assert_status(&a, 204);
        assert_string_equal(header_of(&a, "allow"),
                            route->get ? "GET, HEAD, OPTIONS" : "POST, OPTIONS");
    }
    assert_int_equal(json_object_size(paths), n);
    strbuf_free(&a.body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_fields),
        cmocka_unit_test(same_pages),
        cmocka_unit_test(same_limits),
        cmocka_unit_test(same_routes),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
