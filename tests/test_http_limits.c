/*
 * The HTTP server's limits: clients that leave, wait, dribble or do not read; a full queue; keys;
 * draining and stopping; what the log says.
 */
#include "http_client.h"

#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "scratch.h"

static const char chat[] = "/v1/chat/completions", completions[] = "/v1/completions";
static const char quick[] = "{\"prompt\":[40,41],\"max_tokens\":2,\"ignore_eos\":true}";
enum { ATTEMPTS = 5 }; /* of a client that may have been late itself, where time is short */

static struct answered a;

/* ask() into `a`, again where nothing came. */
static void ask_in_time(struct site *site, const char *method, const char *path, const char *body)
{
    a.status = 0;
    for (int i = 0; i < ATTEMPTS && a.status == 0; i++) ask(site, method, path, body, &a);
}

/* Long enough that it never ends by itself in a test. */
static const char endless[] =
    "{\"prompt\":[40,41],\"max_tokens\":23000,\"ignore_eos\":true,\"temperature\":0%s}";

static int ask_endless(struct site *site, const char *more)
{
    char body[512];
    int fd = client_open(site);
    snprintf(body, sizeof body, endless, more);
    client_ask(fd, "POST", completions, "", body);
    return fd;
}

static void open_site(struct site *site, const struct server_options *options, int max_num_seqs)
{
    site_open(site, "127.0.0.1", options);
    site_load(site, max_num_seqs);
}

/* A client that leaves frees its blocks: streaming or not, running, queued, or reading a prompt. */
static void clients_that_leave(void **state)
{
    (void)state;
    struct site site;
    open_site(&site, NULL, 1);
    for (int stream = 0; stream < 2; stream++) {
        const char *more = stream ? ",\"stream\":true" : "";
        int running = ask_endless(&site, more);
        await_running(&site, 1, 0);
        int queued = ask_endless(&site, more);
        await_running(&site, 1, 1);
        close(queued);
        await_running(&site, 1, 0);
        close(running);
        assert_quiet(&site);
        assert_true(site_logged(&site, "client left"));
    }
    int fd = ask_endless(&site, ",\"n\":1,\"stream\":true");
    assert_true(client_head(fd, &a)); /* it streams */
    assert_status(&a, 200);
    struct linger reset = {.l_onoff = 1};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    close(fd); /* by a reset */
    assert_quiet(&site);
    ask(&site, "POST", completions, quick, &a);
    assert_status(&a, 200);
    site_close(&site);
}

static void full_queue(void **state)
{
    (void)state;
    struct server_options options = {.max_queue_requests = 1};
    struct site site;
    open_site(&site, &options, 1);
    int running = ask_endless(&site, "");
    await_running(&site, 1, 0);
    int queued = ask_endless(&site, "");
    await_running(&site, 1, 1);
    for (int i = 0; i < 3; i++) {
        ask(&site, "POST", completions, quick, &a);
        assert_status(&a, 429);
        assert_holds(strbuf_cstr(&a.body), "queue_full");
        assert_in_range(strtol(header_of(&a, "retry-after"), NULL, 10), 1, 120);
    }
    ask(&site, "GET", "/health", NULL, &a);
    assert_status(&a, 200);
    close(queued);
    await_running(&site, 1, 0);
    close(running);
    assert_quiet(&site);
    ask(&site, "POST", completions, quick, &a);
    assert_status(&a, 200);
    site_close(&site);

    options = (struct server_options){.max_queue_tokens = 30000};
    open_site(&site, &options, 1);
    running = ask_endless(&site, "");
    await_running(&site, 1, 0);
    queued = ask_endless(&site, ""); /* alone in the queue: as long as it likes */
    await_running(&site, 1, 1);
    int refused = ask_endless(&site, "");
    assert_true(client_read(refused, &a, false));
    assert_status(&a, 429);
    close(refused);
    close(queued);
    close(running);
    assert_quiet(&site);
    site_close(&site);
}

/* Who is more urgent comes first, whoever came first. */
static void priorities(void **state)
{
    (void)state;
    struct site site;
    open_site(&site, NULL, 1);
    int running = ask_endless(&site, "");
    await_running(&site, 1, 0);
    int first = client_open(&site);
    client_ask(first, "POST", completions, "", quick);
    await_running(&site, 1, 1);
    int urgent = ask_endless(&site, ",\"priority\":-1,\"stream\":true");
    await_running(&site, 1, 2);
    close(running);
    char line[256] = "";
    assert_true(client_head(urgent, &a));
    while (strncmp(line, "data: ", 6) != 0) assert_true(client_line(urgent, line, sizeof line));
    await_running(&site, 1, 1); /* the first still waits */
    close(urgent);
    assert_true(client_read(first, &a, false));
    assert_status(&a, 200);
    close(first);
    site_close(&site);
}

/* Case H08. */
static void keys(void **state)
{
    (void)state;
    static const char *const given[] = {"k-1234567890abcdef"};
    static const char *const wrong[] = {
        "",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: k-1234567890abcdef\r\n",
        "Authorization: Basic k-1234567890abcdef\r\n",
        "Authorization: Bearer k-1234567890abcde\r\n",
        "Authorization: Bearer k-1234567890abcdefx\r\n",
        "Authorization: Bearer K-1234567890abcdef\r\n",
        "Authorization: Bearer k-1234567890abcdef k\r\n",
        "Authorization: Bearer x\r\nAuthorization: Bearer k-1234567890abcdef\r\n",
        "Authorization: Bearer k-1234567890abcdef\r\nAuthorization: Bearer x\r\n",
        "X-Api-Key: k\r\n",
        "X-Api-Key: \r\n",
    };
    static const char *const right[] = {"Authorization: Bearer k-1234567890abcdef\r\n",
                                        "authorization: bearer k-1234567890abcdef\r\n",
                                        "X-API-Key: k-1234567890abcdef\r\n",
                                        "Authorization: BEARER from-file\r\n"};
    static const char *const paths[] = {"/v1/models", "/metrics", "/nothing", "/version"};
    const char *folder = scratch_create();
    scratch_text(folder, "keys", "# people\n\nfrom-file\r\n");
    struct server_options options = {.keys = given, .n_keys = 1};
    options.key_file = scratch_path(folder, "keys");
    struct site site;
    linnet_error err;
    open_site(&site, &options, 2);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        for (size_t k = 0; k < sizeof paths / sizeof *paths; k++) {
            ask_with(&site, "GET", paths[k], wrong[i], NULL, &a);
            assert_status(&a, 401);
            assert_holds(strbuf_cstr(&a.body), "authentication_error");
            assert_holds(header_of(&a, "www-authenticate"), "Bearer");
        }
        ask_with(&site, "POST", chat, wrong[i], "{\"stream\":true}", &a);
        assert_status(&a, 401);
    }
    static const char with_nul[] = "GET /v1/models HTTP/1.1\r\nHost: t\r\n"
                                   "Authorization: Bearer k-1234567890abcdef\0x\r\n\r\n";
    int odd_client = client_open(&site);
    client_send(odd_client, with_nul, sizeof with_nul - 1);
    assert_true(client_read(odd_client, &a, false));
    assert_true(a.status == 401 || a.status == 400);
    close(odd_client);
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        ask_with(&site, "GET", "/v1/models", right[i], NULL, &a);
        assert_status(&a, 200);
    }
    /* the body is not waited for, and no 100 is sent */
    int fd = client_open(&site);
    client_ask(fd, "POST", chat, "Expect: 100-continue\r\nContent-Length: 1000\r\n", NULL);
    assert_true(client_read(fd, &a, false));
    assert_status(&a, 401);
    close(fd);
    struct strbuf huge = {0};
    strbuf_text(&huge, "Authorization: Bearer ");
    for (int i = 0; i < 1 << 20; i++) strbuf_char(&huge, 'k');
    strbuf_text(&huge, "\r\n");
    ask_with(&site, "GET", "/v1/models", strbuf_cstr(&huge), NULL, &a);
    assert_true(a.status == 0 || a.status == 401 || a.status == 431 || a.status == 413);
    strbuf_free(&huge);
    ask(&site, "GET", "/health", NULL, &a);
    assert_status(&a, 200);
    ask(&site, "GET", "/", NULL, &a);
    assert_status(&a, 200);

    scratch_text(folder, "keys", "another\n"); /* as on SIGHUP */
    assert_ok(server_reload_keys(site.server, &err), err);
    ask_with(&site, "GET", "/v1/models", "Authorization: Bearer from-file\r\n", NULL, &a);
    assert_status(&a, 401);
    ask_with(&site, "GET", "/v1/models", "Authorization: Bearer another\r\n", NULL, &a);
    assert_status(&a, 200);
    scratch_text(folder, "keys", "\n# none\n");
    assert_int_not_equal(server_reload_keys(site.server, &err), LINNET_OK);
    ask_with(&site, "GET", "/v1/models", "Authorization: Bearer another\r\n", NULL, &a);
    assert_status(&a, 200);
    assert_true(site_logged(&site, " 401 "));
    assert_false(site_says(&site, "k-123"));
    assert_false(site_says(&site, "another"));
    site_close(&site);

    static const char *const bad[] = {"", "a b", "caf\xC3\xA9"};
    for (size_t i = 0; i < 3; i++) {
        char text[SERVER_ADDRESS_SIZE];
        struct server *server;
        int socket;
        struct server_options odd = {.keys = &bad[i], .n_keys = 1};
        assert_ok(server_listen("127.0.0.1", 0, &socket, text, &err), err);
        assert_int_equal(server_start(&odd, socket, &server, &err), LINNET_INVALID);
    }
}

/* Case H06 (a), (b). However the client goes on: a byte now and then earns it no time. */
static void late_headers(void **state)
{
    (void)state;
    struct server_options options = {.header_s = 0.3};
    struct site site;
    site_open(&site, "127.0.0.1", &options);
    int fd = client_open(&site);
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    client_text(fd, "GET /health HTTP/1.1\r\nHost: ");
    double end = clock_seconds() + 300;
    do client_text(fd, "t");
    while (poll(&ready, 1, 50) == 0 && clock_seconds() < end);
    assert_true(ready.revents);
    assert_cut(fd);
    close(fd);
    ask_in_time(&site, "GET", "/health", NULL);
    assert_status(&a, 503); /* there is no model */
    site_close(&site);
}

static void late_body(void **state)
{
    (void)state;
    struct server_options options = {.body_s = 0.3};
    struct site site;
    open_site(&site, &options, 2);
    int fd = client_open(&site);
    client_text(fd, "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000\r\n\r\n"
                    "0123456789");
    assert_cut(fd);
    close(fd);
    site_close(&site);
}

static void late_request(void **state)
{
    (void)state;
    struct server_options options = {.idle_s = 0.3};
    struct site site;
    site_open(&site, "127.0.0.1", &options);
    int fd = client_open(&site);
    client_ask(fd, "GET", "/health", "", NULL);
    assert_true(client_read(fd, &a, false));
    assert_cut(fd);
    close(fd);
    site_close(&site);
}

/* Case H06 (c): a reader that does not read neither slows the others nor keeps its blocks. */
static void slow_reader(void **state)
{
    (void)state;
    struct server_options options = {.stall_s = 3};
    struct site site;
    open_site(&site, &options, 4);
    int fd = -1, small = 2048, attempts = 0;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)site.port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    do { /* again where this client was late before it had sent all */
        if (fd >= 0) close(fd);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
        client_ask(fd, "POST", completions, "",
                   "{\"prompt\":[40],\"max_tokens\":20000,\"ignore_eos\":true,\"stream\":true,"
                   "\"logprobs\":20}");
        assert_true(++attempts <= ATTEMPTS);
    } while (!has_begun(fd));
    for (int i = 0; i < 8; i++) {
        ask_in_time(&site, "POST", completions, quick);
        assert_status(&a, 200);
    }
    assert_true(site_logged(&site, "client left")); /* cut off */
    assert_quiet(&site);
    close(fd);
    site_close(&site);
}

static void pings(void **state)
{
    (void)state;
    struct server_options options = {.ping_s = 0.05};
    struct site site;
    struct streamed s;
    open_site(&site, &options, 1);
    int running = ask_endless(&site, "");
    await_running(&site, 1, 0);
    int waiting = client_open(&site);
    client_ask(waiting, "POST", completions, "",
               "{\"prompt\":[40],\"max_tokens\":3,\"ignore_eos\":true,\"stream\":true}");
    assert_true(client_head(waiting, &a));
    char line[64];
    for (int n = 0; n < 3;) {
        assert_true(client_line(waiting, line, sizeof line));
        n += strcmp(line, ": ping") == 0;
    }
    close(running);
    struct strbuf rest = {0};
    bool data = false;
    while (client_line(waiting, line, sizeof line) && strncmp(line, "data: [DONE]", 12) != 0)
        data |= strncmp(line, "data: {", 7) == 0;
    assert_true(data);
    close(waiting);
    strbuf_free(&rest);
    ask(&site, "POST", completions,
        "{\"prompt\":[40],\"max_tokens\":3,\"ignore_eos\":true,\"stream\":true}", &a);
    streamed_read(&s, &a.body);
    assert_int_equal(s.n_done, 1);
    streamed_free(&s);
    site_close(&site);
}

static void loading_and_draining(void **state)
{
    (void)state;
    struct site site;
    site_open(&site, "127.0.0.1", NULL);
    ask(&site, "GET", "/health", NULL, &a);
    assert_status(&a, 503);
    assert_holds(strbuf_cstr(&a.body), "loading");
    ask(&site, "POST", chat, "{}", &a);
    assert_status(&a, 503);
    assert_non_null(header_of(&a, "retry-after"));
    ask(&site, "GET", "/v1/models", NULL, &a);
    assert_status(&a, 503);
    ask(&site, "GET", "/metrics", NULL, &a);
    assert_status(&a, 200);
    site_load(&site, 1);
    ask(&site, "GET", "/health", NULL, &a);
    assert_status(&a, 200);

    int running = ask_endless(&site, ""), last = client_open(&site);
    await_running(&site, 1, 0);
    client_ask(last, "POST", completions, "", quick);
    await_running(&site, 1, 1);
    server_drain(site.server);
    assert_false(server_wait_idle(site.server, 0));
    ask(&site, "GET", "/health", NULL, &a);
    assert_status(&a, 503);
    assert_holds(strbuf_cstr(&a.body), "draining");
    ask(&site, "POST", completions, quick, &a);
    assert_status(&a, 503);
    assert_non_null(header_of(&a, "retry-after"));
    close(running);
    assert_true(client_read(last, &a, false)); /* what was at work, or waited, is finished */
    assert_status(&a, 200);
    assert_true(server_wait_idle(site.server, 20));
    close(last);
    site_close(&site);
}

/* Who is still served when the server stops hears of it. */
static void stopping(void **state)
{
    (void)state;
    /* tokens without text: nobody reads meanwhile, and what the system keeps must not fill */
    static const char silent[] = ",\"stream\":true,\"logit_bias\":{\"470\":1000}";
    struct site site;
    struct streamed s;
    open_site(&site, NULL, 2);
    int stream = ask_endless(&site, silent), whole = ask_endless(&site, "");
    int queued = ask_endless(&site, silent), idle = client_open(&site);
    await_running(&site, 2, 1);
    int fds[] = {stream, queued};
    server_stop(site.server);
    for (int i = 0; i < 2; i++) {
        assert_true(client_read(fds[i], &a, false));
        streamed_read(&s, &a.body);
        assert_non_null(s.error);
        assert_int_equal(s.n_done, 1);
        streamed_free(&s);
    }
    assert_true(client_read(whole, &a, false));
    assert_status(&a, 503);
    assert_cut(idle);
    assert_quiet(&site);
    close(stream);
    close(whole);
    close(queued);
    close(idle);
    linnet_engine_destroy(site.engine);
    linnet_model_close(site.model);
    server_free(site.server);
}

static void too_large(void **state)
{
    (void)state;
    struct server_options options = {.max_body = 2000};
    struct site site;
    struct strbuf body = {0};
    site_open(&site, "127.0.0.1", &options);
    site_load(&site, 2);
    for (int i = 0; i < 3000; i++) strbuf_char(&body, ' ');
    ask(&site, "POST", "/tokenize", strbuf_cstr(&body), &a);
    assert_status(&a, 413);
    int fd = client_open(&site); /* the same without saying so before */
    client_text(fd,
                "POST /tokenize HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nbb8\r\n");
    client_send(fd, body.data, body.size);
    client_text(fd, "\r\n0\r\n\r\n");
    assert_true(client_read(fd, &a, false));
    assert_status(&a, 413);
    close(fd);
    fd = client_open(&site); /* and without end */
    client_text(fd, "POST /tokenize HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < 10; i++) {
        client_text(fd, "bb8\r\n");
        client_send(fd, body.data, body.size);
        client_text(fd, "\r\n");
    }
    assert_cut(fd);
    close(fd);
    strbuf_clear(&body);
    strbuf_text(&body, "{\"prompt\":");
    for (int i = 0; i < 900; i++) strbuf_char(&body, '[');
    for (int i = 0; i < 900; i++) strbuf_char(&body, ']');
    strbuf_text(&body, "}");
    ask(&site, "POST", completions, strbuf_cstr(&body), &a);
    assert_status(&a, 400);
    assert_holds(strbuf_cstr(&a.body), "within one another");
    /* in a text they are none */
    ask(&site, "POST", "/tokenize",
        "{\"prompt\":\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\\\"[\"}",
        &a);
    assert_status(&a, 200);
    strbuf_free(&body);
    site_close(&site);
}

static void unix_socket(void **state)
{
    (void)state;
    const char *folder = scratch_create();
    char host[128], text[SERVER_ADDRESS_SIZE];
    struct site site;
    linnet_error err;
    int fd;
    snprintf(host, sizeof host, "unix:%s", scratch_path(folder, "s"));
    site_open(&site, host, NULL);
    site_load(&site, 2);
    ask(&site, "POST", completions, quick, &a);
    assert_status(&a, 200);
    assert_true(site_logged(&site, " local "));
    /* another server finds it in use; one after us takes the file that we leave */
    assert_int_equal(server_listen(host, 0, &fd, text, &err), LINNET_IO);
    assert_holds(err.message, "another server");
    site_close(&site);
    assert_ok(server_listen(host, 0, &fd, text, &err), err);
    close(fd);
    assert_ok(server_listen(host, 0, &fd, text, &err), err);
    assert_true(server_is_local(fd));
    close(fd);
    unlink(host + 5);
    assert_int_equal(server_listen("unix:", 0, &fd, text, &err), LINNET_INVALID);
    assert_int_equal(server_listen("no such host", 0, &fd, text, &err), LINNET_INVALID);
}

/* Files that may be open: as many as the system allows. */
static int raise_file_limit(void)
{
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    return limit.rlim_cur < INT32_MAX ? (int)limit.rlim_cur : INT32_MAX;
}

/* One stream after another: however long the test takes, there is one. */
struct flow {
    struct site *site;
    int fd; /* -1: none yet */
};

static void flow_begin(struct flow *flow)
{
    if (flow->fd >= 0) close(flow->fd);
    flow->fd = client_open(flow->site);
    client_ask(flow->fd, "POST", completions, "Connection: close\r\n",
               "{\"prompt\":[40,41],\"max_tokens\":20000,\"ignore_eos\":true,\"stream\":true}");
}

/* A stream has something new, now that all that had come was read. */
static void assert_goes_on(struct flow *flow)
{
    char buffer[4096];
    ssize_t n = 1;
    if (flow->fd < 0) flow_begin(flow);
    for (int i = 0; i < 100 && n > 0; i++) n = recv(flow->fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (n > 0 || (n < 0 && errno == EAGAIN)) n = recv(flow->fd, buffer, sizeof buffer, 0);
    if (n == 0) { /* it was the end of it */
        flow_begin(flow);
        n = recv(flow->fd, buffer, sizeof buffer, 0);
    }
    if (n <= 0) fail_msg("no token comes: %s", n ? strerror(errno) : "the stream is closed");
}

/* Part of the headers, headers alone, a request answered and no other: each a third. The tokens of
 * somebody else go on meanwhile. */
static void many_idle_connections(void **state)
{
    (void)state;
    enum { MOST = 3000, EVERY = 250, FILES = 200 };
    static const char *const begin[] = {
        "GET /health HTT", "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: t\r\n\r\n"};
    static const char *const end[] = {"P/1.1\r\nHost: t\r\n\r\n", "{\"prompt\":\"x\"}",
                                      "GET /health HTTP/1.1\r\nHost: t\r\n\r\n"};
    static int fds[MOST];
    struct server_options options = {.header_s = 1e4, .body_s = 1e4, .idle_s = 1e4, .stall_s = 1e4};
    struct site site;
    int n_files = raise_file_limit(), n = n_files > 2 * MOST + FILES ? MOST : (n_files - FILES) / 2;
    open_site(&site, &options, 2);
    struct flow stream = {&site, -1};
    for (int i = 0; i < n; i++) {
        fds[i] = client_open(&site);
        client_text(fds[i], begin[i % 3]);
        if (i % EVERY == 0) assert_goes_on(&stream);
    }
    ask(&site, "POST", completions, quick, &a);
    assert_status(&a, 200);
    assert_goes_on(&stream);
    ask(&site, "GET", "/metrics", NULL, &a); /* all are there at the same time */
    const char *connections = strstr(strbuf_cstr(&a.body), "\nlinnet:http_connections");
    assert_non_null(connections);
    assert_true(strtol(strchr(connections, ' '), NULL, 10) >= n);
    for (int i = 0; i < n; i++) {
        if (i % 3 == 2) assert_true(client_read(fds[i], &a, false));
        client_text(fds[i], end[i % 3]);
        assert_true(client_read(fds[i], &a, false));
        assert_status(&a, 200);
        close(fds[i]);
        if (i % EVERY == 0) assert_goes_on(&stream);
    }
    close(stream.fd);
    assert_quiet(&site);
    site_close(&site);
    if (n == MOST) return;
    print_message("%d connections, not %d: the system allows %d open files\n", n, MOST, n_files);
    skip();
}

/* ---- a socket that somebody else has opened, as systemd does ----------------------------------
 */

/* The send buffer of the connection whose other end is this client. The server's sockets are this
 * process's. */
static int send_buffer_of_peer(int client)
{
    struct sockaddr_storage mine, other;
    socklen_t size = sizeof mine;
    assert_int_equal(getsockname(client, (struct sockaddr *)&mine, &size), 0);
    for (int fd = 3; fd < 1024; fd++) {
        socklen_t other_size = sizeof other, n = sizeof(int);
        int buffer;
        if (getpeername(fd, (struct sockaddr *)&other, &other_size) != 0) continue;
        if (other_size != size || memcmp(&other, &mine, size) != 0) continue;
        assert_int_equal(getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, &n), 0);
        return buffer;
    }
    fail_msg("no socket of this process is connected to the client");
    return 0;
}

/* What the system keeps for a client that does not read is bounded there too, also for who came
 * before the server did. */
static void handed_over_socket(void **state)
{
    (void)state;
    struct site site = {.log = ""};
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    struct server_options options = {.log_format = SERVER_LOG_NONE};
    linnet_error err;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), clients[2];
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, size), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &size), 0);
    site.port = ntohs(address.sin_port);
    clients[0] = client_open(&site);
    assert_ok(server_start(&options, fd, &site.server, &err), err);
    clients[1] = client_open(&site);
    for (int i = 0; i < 2; i++) {
        client_ask(clients[i], "GET", "/", "", NULL);
        assert_true(client_read(clients[i], &a, false));
        assert_status(&a, 200);
        assert_int_equal(send_buffer_of_peer(clients[i]), 2 * (128 << 10)); /* as Linux counts */
        close(clients[i]);
    }
    server_stop(site.server);
    server_free(site.server);
}

static void log_lines(void **state)
{
    (void)state;
    struct server_options options = {.log_format = SERVER_LOG_JSON};
    struct site site;
    open_site(&site, &options, 2);
    ask_with(&site, "POST", chat, "X-Request-Id: r-1\r\n",
             "{\"messages\":[{\"role\":\"user\",\"content\":\"sesame\"}],\"max_tokens\":3,"
             "\"ignore_eos\":true}",
             &a);
    assert_status(&a, 200);
    assert_true(site_logged(&site, "\n"));
    json_error_t where;
    json_t *line = json_loads(site.log, JSON_DISABLE_EOF_CHECK, &where);
    assert_non_null(line);
    assert_string_equal(json_string_value(json_object_get(line, "id")), "r-1");
    assert_string_equal(json_string_value(json_object_get(line, "route")), chat);
    assert_int_equal(json_integer_value(json_object_get(line, "status")), 200);
    assert_int_equal(json_integer_value(json_object_get(line, "completion_tokens")), 3);
    assert_string_equal(json_string_value(json_object_get(line, "finish_reason")), "length");
    json_decref(line);
    assert_false(site_says(&site, "sesame"));
    ask(&site, "GET", "/metrics", NULL, &a);
    static const char *const rows[] = {
        "linnet:request_success_total{model_name=\"qwen3-tiny\",engine=\"0\",finished_reason="
        "\"length\"} 1\n",
        "linnet:generation_tokens_total{model_name=\"qwen3-tiny\",engine=\"0\"} 3\n",
        "linnet:time_to_first_token_seconds_count{model_name=\"qwen3-tiny\",engine=\"0\"} 1\n",
        "linnet:inter_token_latency_seconds_count{model_name=\"qwen3-tiny\",engine=\"0\"} 2\n",
        "linnet:e2e_request_latency_seconds_bucket{model_name=\"qwen3-tiny\",engine=\"0\",le="
        "\"+Inf\"} 1\n",
        "linnet:http_requests_total{status=\"200\"} 1\n",
        "\nprocess_resident_memory_bytes ",
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_holds(strbuf_cstr(&a.body), rows[i]);
    site_close(&site);
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
        cmocka_unit_test(clients_that_leave),
        cmocka_unit_test(full_queue),
        cmocka_unit_test(priorities),
        cmocka_unit_test(keys),
        cmocka_unit_test(late_headers),
        cmocka_unit_test(late_body),
        cmocka_unit_test(late_request),
        cmocka_unit_test(slow_reader),
        cmocka_unit_test(pings),
        cmocka_unit_test(loading_and_draining),
        cmocka_unit_test(stopping),
        cmocka_unit_test(too_large),
        cmocka_unit_test(unix_socket),
        cmocka_unit_test(many_idle_connections),
        cmocka_unit_test(handed_over_socket),
        cmocka_unit_test(log_lines),
    };
    return cmocka_run_group_tests(tests, NULL, done);
}
