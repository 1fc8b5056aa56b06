/*
 * Long texts and long replies: while a worker is at one, where the test holds it for as long as it
 * likes, others are answered, and who waits hears of it when the server stops.
 */
#include "http_client.h"

#include <dlfcn.h>
#include <stdatomic.h>

#include "serve/server_internal.h"

static const char tokenize[] = "/tokenize";
static const char quick[] = "{\"prompt\":[40,41],\"max_tokens\":2,\"ignore_eos\":true}";
static struct answered a;

/* ---- a worker that is held ------------------------------------------------------------------ */

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool closed;
    int n_held;
} gate = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void gate_set(bool closed)
{
    pthread_mutex_lock(&gate.mutex);
    gate.closed = closed;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.mutex);
}

static void gate_pass(void)
{
    pthread_mutex_lock(&gate.mutex);
    gate.n_held++;
    pthread_cond_broadcast(&gate.changed);
    while (gate.closed) pthread_cond_wait(&gate.changed, &gate.mutex);
    gate.n_held--;
    pthread_mutex_unlock(&gate.mutex);
}

static int gate_held(void)
{
    pthread_mutex_lock(&gate.mutex);
    int n = gate.n_held;
    pthread_mutex_unlock(&gate.mutex);
    return n;
}

static void await_held(int n)
{
    for (double end = clock_seconds() + 300; gate_held() != n && clock_seconds() < end;)
        usleep(1000);
    assert_int_equal(gate_held(), n);
}

struct bytes {
    const char *data;
    size_t n;
};

static size_t give_bytes(void *buffer, size_t size, void *user)
{
    struct bytes *from = user;
    size_t n = size < from->n ? size : from->n;
    memcpy(buffer, from->data, n);
    from->data += n;
    from->n -= n;
    return n;
}

/* The library's door: a worker that has a long text stands before it while the gate is closed. */
json_t *json_loadb(const char *text, size_t n, size_t flags, json_error_t *error)
{
    struct bytes from = {text, n};
    if (n > LONG_BODY) gate_pass();
    return json_load_callback(give_bytes, &from, flags, error);
}

/* And one that writes a reply with so many choices. */
enum { MANY_CHOICES = 128 };

int json_dump_callback(const json_t *json, json_dump_callback_t write, void *user, size_t flags)
{
    static int (*dump)(const json_t *, json_dump_callback_t, void *, size_t);
    if (!dump) *(void **)&dump = dlsym(RTLD_NEXT, "json_dump_callback");
    if (json_array_size(json_object_get(json, "choices")) >= MANY_CHOICES) gate_pass();
    return dump(json, write, user, flags);
}

/* ---- requests ------------------------------------------------------------------------------- */

/* A body that is a long one. */
static struct strbuf long_text(void)
{
    struct strbuf body = {0};
    strbuf_text(&body, "{\"prompt\":\"");
    while (body.size < 2 * LONG_BODY) strbuf_text(&body, "the quick brown fox ");
    strbuf_text(&body, "\"}");
    return body;
}

static int ask_long(struct site *site)
{
    struct strbuf body = long_text();
    int fd = client_open(site);
    client_ask(fd, "POST", tokenize, "", strbuf_cstr(&body));
    strbuf_free(&body);
    return fd;
}

/* That so many long ones wait for a worker. */
static void await_waiting(struct site *site, int n)
{
    int found = -1;
    for (double end = clock_seconds() + 300; found != n && clock_seconds() < end; usleep(1000)) {
        pthread_mutex_lock(&site->server->mutex);
        found = 0;
        for (int i = 0; i < N_JOBS; i++) {
            struct exchange *x = site->server->long_jobs[i].first;
            for (; x; x = x->next_job) found++;
        }
        pthread_mutex_unlock(&site->server->mutex);
    }
    assert_int_equal(found, n);
}

static void assert_answered(int fd, int status)
{
    assert_true(client_read(fd, &a, false));
    assert_status(&a, status);
    close(fd);
}

/* ---- tests ---------------------------------------------------------------------------------- */

/* More long texts than there are workers: the short requests of others are answered while one is
 * read and the rest wait. */
static void long_texts(void **state)
{
    (void)state;
    enum { N = 4 };
    static const char *const others[][3] = {
        {"POST", "/v1/chat/completions",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"max_tokens\":2}"},
        {"POST", "/v1/completions", quick},
        {"POST", tokenize, "{\"prompt\":\"x\"}"},
        {"GET", "/health", NULL},
        {"GET", "/v1/models", NULL},
    };
    struct site site;
    int fds[N];
    site_open(&site, "127.0.0.1", NULL);
    site_load(&site, 2);
    gate_set(true);
    for (int i = 0; i < N; i++) fds[i] = ask_long(&site);
    await_held(1);
    await_waiting(&site, N - 1);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        ask(&site, others[i][0], others[i][1], others[i][2], &a);
        assert_status(&a, 200);
        assert_int_equal(gate_held(), 1);
    }
    await_waiting(&site, N - 1);
    gate_set(false);
    for (int i = 0; i < N; i++) assert_answered(fds[i], 200);
    site_close(&site);
}

/* A long reply does not take the other worker, too. */
static void long_replies(void **state)
{
    (void)state;
    struct site site;
    struct strbuf body = {0};
    site_open(&site, "127.0.0.1", NULL);
    site_load(&site, 8);
    strbuf_text(&body, "{\"prompt\":[40");
    for (int i = 1; i < 1000; i++) strbuf_text(&body, ",41");
    strbuf_format(&body, "],\"n\":%d,\"max_tokens\":1,\"return_token_ids\":true}", MANY_CHOICES);
    gate_set(true);
    int reading = ask_long(&site), answer = client_open(&site);
    await_held(1);
    client_ask(answer, "POST", "/v1/completions", "", strbuf_cstr(&body));
    await_waiting(&site, 1); /* answered and not written */
    ask(&site, "POST", "/v1/completions", quick, &a);
    assert_status(&a, 200);
    assert_int_equal(gate_held(), 1);
    gate_set(false);
    assert_answered(reading, 200);
    assert_answered(answer, 200);
    strbuf_free(&body);
    site_close(&site);
}

static void *stop(void *server)
{
    server_stop(server);
    return NULL;
}

/* Who waits for a worker or is still sending hears that the server stops, at once; what is being
 * read is read to its end. */
static void stopping(void **state)
{
    (void)state;
    static const char head[] = "POST %s HTTP/1.1\r\nHost: t\r\n%s\r\n\r\n%s";
    static const struct {
        const char *path, *length, *part, *words; /* words: in the answer */
        int status;
    } under_way[] = {
        {"/v1/completions", "Content-Length: 1000", "{\"prompt\":", "unavailable_error", 503},
        {"/v1/completions", "Content-Length: 1000", "", "unavailable_error", 503},
        {"/v1/completions", "Transfer-Encoding: chunked", "9\r\n{\"prompt\"\r\n",
         "unavailable_error", 503},
        {"/v1/messages", "Content-Length: 1000", "{", "overloaded_error", 529},
    };
    enum { N = sizeof under_way / sizeof *under_way };
    struct site site;
    pthread_t stopper;
    int fds[N];
    site_open(&site, "127.0.0.1", NULL);
    site_load(&site, 2);
    gate_set(true);
    int reading = ask_long(&site);
    await_held(1);
    int waiting[2] = {ask_long(&site), ask_long(&site)};
    await_waiting(&site, 2);
    for (int i = 0; i < N; i++) {
        char text[256];
        fds[i] = client_open(&site);
        snprintf(text, sizeof text, head, under_way[i].path, under_way[i].length,
                 under_way[i].part);
        client_text(fds[i], text);
    }
    for (double end = clock_seconds() + 300; clock_seconds() < end; usleep(1000))
        if (atomic_load(&site.server->n_working) == N) break;
    assert_int_equal(atomic_load(&site.server->n_working), N);
    assert_int_equal(pthread_create(&stopper, NULL, stop, site.server), 0);
    for (int i = 0; i < N; i++) {
        assert_answered(fds[i], under_way[i].status);
        assert_holds(strbuf_cstr(&a.body), under_way[i].words);
        assert_holds(strbuf_cstr(&a.body), "shutting down");
        assert_non_null(header_of(&a, "retry-after"));
        assert_non_null(header_of(&a, "x-request-id"));
    }
    for (int i = 0; i < 2; i++) {
        assert_answered(waiting[i], 503);
        assert_holds(strbuf_cstr(&a.body), "shutting down");
    }
    gate_set(false);
    assert_answered(reading, 200);
    pthread_join(stopper, NULL);
    assert_true(site_says(&site, " /v1/messages 529"));
    assert_true(site_says(&site, " /v1/completions 503"));
    linnet_engine_destroy(site.engine);
    linnet_model_close(site.model);
    server_free(site.server);
}

static int done(void **state)
{
    (void)state;
    strbuf_free(&a.body);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(long_texts),
        cmocka_unit_test(long_replies),
        cmocka_unit_test(stopping),
    };
    return cmocka_run_group_tests(tests, NULL, done);
}
