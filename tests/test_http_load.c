/*
 * Many clients at once on a crowded engine: some leave, some are refused for now, and every answer
 * that is complete is the one that its request gets alone. At the end every block is back. And many
 * short answers at once, none of which may be lost on the way from the engine to its connection.
 */
#include "http_client.h"

#include <stdatomic.h>

enum { N_CLIENTS = 24, N_ROUNDS = 8, N_KINDS = 8, SEEN_S = 300 };

static struct site site;
static char bodies[N_KINDS][2][512]; /* whole, streamed */
static char expected[N_KINDS][4096];
static atomic_int n_complete, n_left, n_refused;

static void text_of(const struct answered *a, char *text, size_t size)
{
    json_t *json = body_json(a);
    json_t *choice = json_array_get(json_object_get(json, "choices"), 0);
    snprintf(text, size, "%s", json_string_value(json_object_get(choice, "text")));
    json_decref(json);
}

static void make_requests(void)
{
    for (int k = 0; k < N_KINDS; k++) {
        struct answered a = {0};
        for (int stream = 0; stream < 2; stream++)
            snprintf(bodies[k][stream], sizeof bodies[k][stream],
                     "{\"prompt\":\"number %d is the %s\",\"max_tokens\":%d,\"temperature\":%s,"
                     "\"seed\":%d,\"ignore_eos\":true,\"stream\":%s}",
                     k % 3, k % 2 ? "first of all the others" : "last", 10 + 12 * k,
                     k % 4 ? "1.2" : "0", k, stream ? "true" : "false");
        ask(&site, "POST", "/v1/completions", bodies[k][0], &a);
        assert_status(&a, 200);
        text_of(&a, expected[k], sizeof expected[k]);
        strbuf_free(&a.body);
    }
}

/* One request, and what came of it; false if the answer is another than the one expected. */
static bool one_request(int kind, bool stream, bool leave)
{
    struct answered a = {0};
    char text[4096];
    int fd = client_open(&site);
    bool right = true;
    client_ask(fd, "POST", "/v1/completions", "", bodies[kind][stream]);
    if (leave) {
        usleep(2000 * (useconds_t)(kind + 1));
        atomic_fetch_add(&n_left, 1);
    } else if (!client_read(fd, &a, false)) {
        right = false;
    } else if (a.status == 429) {
        atomic_fetch_add(&n_refused, 1);
        usleep(5000);
    } else if (stream) {
        struct streamed s;
        streamed_read(&s, &a.body);
        right = a.status == 200 && s.n_done == 1 && !s.error &&
                strcmp(strbuf_cstr(&s.text[0]), expected[kind]) == 0;
        streamed_free(&s);
        atomic_fetch_add(&n_complete, 1);
    } else {
        right = a.status == 200;
        if (right) text_of(&a, text, sizeof text);
        right = right && strcmp(text, expected[kind]) == 0;
        atomic_fetch_add(&n_complete, 1);
    }
    close(fd);
    strbuf_free(&a.body);
    return right;
}

static void *client(void *arg)
{
    int *n_wrong = arg;
    uint32_t number = (uint32_t)*n_wrong * 7919u + 1;
    *n_wrong = 0;
    for (int i = 0; i < N_ROUNDS; i++) {
        number = number * 1664525u + 1013904223u;
        int kind = (int)(number >> 16) % N_KINDS;
        *n_wrong += !one_request(kind, number >> 28 & 1, (number >> 24 & 3) == 0);
    }
    return NULL;
}

static void all_clients(void)
{
    pthread_t threads[N_CLIENTS];
    int wrong[N_CLIENTS];
    for (int i = 0; i < N_CLIENTS; i++) {
        wrong[i] = i;
        assert_int_equal(pthread_create(&threads[i], NULL, client, &wrong[i]), 0);
    }
    for (int i = 0; i < N_CLIENTS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(wrong[i], 0);
    }
}

/* How often each of these happens is the threads' affair; that it does is what is asked. */
static bool has_seen_all(void)
{
    linnet_stats stats;
    linnet_engine_get_stats(site.engine, &stats);
    return atomic_load(&n_complete) > N_CLIENTS && atomic_load(&n_left) > 0 &&
           atomic_load(&n_refused) > 0 && stats.n_preemptions > 0;
}

static void crowd(void **state)
{
    (void)state;
    struct server_options options = {.max_queue_requests = 8};
    site_open(&site, "127.0.0.1", &options);
    linnet_error err;
    linnet_engine_options small = {.threads = 1,
                                   .kv_cache_memory = 600 << 10, /* some are preempted */
                                   .max_model_len = 200,
                                   .max_num_seqs = 6,
                                   .max_num_batched_tokens = 32};
    assert_ok(linnet_model_open(data_path("qwen3-tiny"), &site.model, &err), err);
    assert_ok(linnet_engine_create(site.model, &small, &site.engine, &err), err);
    assert_ok(server_attach(site.server, site.model, site.engine, &err), err);
    make_requests();
    double end = clock_seconds() + SEEN_S;
    do all_clients();
    while (!has_seen_all() && clock_seconds() < end);
    assert_true(has_seen_all());
    assert_quiet(&site);
    site_close(&site);
}

/* ---- short answers ------------------------------------------------------------------------- */

enum { N_HASTY = 64, N_HASTY_ROUNDS = 12, ANSWER_S = 300 };

struct hasty {
    pthread_t thread;
    bool stream;
    const char *fault; /* NULL: everything was answered */
};

/* Eight choices of a stream wake their connection again and again while it is being served. */
static void *hasty_client(void *arg)
{
    static const char whole[] = "{\"prompt\":[40],\"max_tokens\":3,\"ignore_eos\":true}",
                      streamed[] = "{\"prompt\":[40],\"max_tokens\":3,\"ignore_eos\":true,"
                                   "\"n\":8,\"stream\":true}";
    struct hasty *client = arg;
    struct timeval patience = {.tv_sec = ANSWER_S};
    for (int i = 0; i < N_HASTY_ROUNDS && !client->fault; i++) {
        struct answered a = {0};
        int fd = client_open(&site);
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        client_ask(fd, "POST", "/v1/completions", "", client->stream ? streamed : whole);
        if (!client_read(fd, &a, false))
            client->fault = "no answer came";
        else if (a.status != 200)
            client->fault = "a request was refused";
        else if (a.closed)
            client->fault = "an answer has no end";
        close(fd);
        strbuf_free(&a.body);
    }
    return NULL;
}

static void nobody_is_forgotten(void **state)
{
    (void)state;
    static struct hasty clients[N_HASTY];
    site_open(&site, "127.0.0.1", NULL);
    site_load(&site, 64);
    for (int i = 0; i < N_HASTY; i++) {
        clients[i] = (struct hasty){.stream = i % 2};
        assert_int_equal(pthread_create(&clients[i].thread, NULL, hasty_client, &clients[i]), 0);
    }
    for (int i = 0; i < N_HASTY; i++) pthread_join(clients[i].thread, NULL);
    for (int i = 0; i < N_HASTY; i++)
        if (clients[i].fault) fail_msg("client %d: %s", i, clients[i].fault);
    assert_quiet(&site);
    site_close(&site);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(crowd),
                                       cmocka_unit_test(nobody_is_forgotten)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
