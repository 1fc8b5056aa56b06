/* http_client.h - a server on a tiny model in this process, and a client made of plain sockets. */
#ifndef LINNET_TESTS_HTTP_CLIENT_H
#define LINNET_TESTS_HTTP_CLIENT_H

#include "engine_load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/clock.h"
#include "serve/server.h"

/* ---- the server ---------------------------------------------------------------------------- */

struct site {
    linnet_model *model;
    linnet_engine *engine;
    struct server *server;
    int port;
    char path[108]; /* of a Unix socket, or "" */
    pthread_mutex_t mutex;
    char log[1 << 16];
    size_t log_size;
};

static inline void site_log(void *user, const char *line)
{
    struct site *site = user;
    pthread_mutex_lock(&site->mutex);
    site->log_size += (size_t)snprintf(site->log + site->log_size,
                                       sizeof site->log - site->log_size, "%s\n", line);
    if (site->log_size >= sizeof site->log) site->log_size = 0;
    pthread_mutex_unlock(&site->mutex);
}

static inline bool site_says(struct site *site, const char *words)
{
    pthread_mutex_lock(&site->mutex);
    bool found = strstr(site->log, words) != NULL;
    pthread_mutex_unlock(&site->mutex);
    return found;
}

/* Waits for what the log says of a request: it is written after the reply. */
static inline bool site_logged(struct site *site, const char *words)
{
    for (double end = clock_seconds() + 300; clock_seconds() < end; usleep(2000))
        if (site_says(site, words)) return true;
    return false;
}

/* The listening server; site_load then gives it its engine. */
static inline void site_open(struct site *site, const char *host,
                             const struct server_options *given)
{
    char address[SERVER_ADDRESS_SIZE];
    struct server_options options = {0};
    linnet_error err;
    int fd;
    if (given) options = *given;
    *site = (struct site){.log = ""};
    pthread_mutex_init(&site->mutex, NULL);
    options.log = site_log;
    options.log_user = site;
    assert_ok(server_listen(host, 0, &fd, address, &err), err);
    if (strncmp(address, "unix:", 5) == 0)
        snprintf(site->path, sizeof site->path, "%.107s", address + 5);
    else
        site->port = (int)strtol(strrchr(address, ':') + 1, NULL, 10);
    assert_ok(server_start(&options, fd, &site->server, &err), err);
}

static inline void site_load_from(struct site *site, const char *path, int max_num_seqs)
{
    linnet_error err;
    linnet_engine_options options = {.threads = 1,
                                     .kv_cache_memory = 64 << 20,
                                     .max_model_len = 24000,
                                     .max_num_seqs = max_num_seqs,
                                     .max_num_batched_tokens = 256};
    assert_ok(linnet_model_open(path, &site->model, &err), err);
    assert_ok(linnet_engine_create(site->model, &options, &site->engine, &err), err);
    assert_ok(server_attach(site->server, site->model, site->engine, &err), err);
}

static inline void site_load(struct site *site, int max_num_seqs)
{
    site_load_from(site, data_path("qwen3-tiny"), max_num_seqs);
}

static inline void site_close(struct site *site)
{
    server_stop(site->server);
    if (site->engine) linnet_engine_destroy(site->engine);
    if (site->model) linnet_model_close(site->model);
    server_free(site->server);
    if (site->path[0]) unlink(site->path);
    pthread_mutex_destroy(&site->mutex);
}

/* Nothing runs, nothing waits, every block is free. */
static inline void assert_quiet(struct site *site)
{
    linnet_stats stats;
    for (double end = clock_seconds() + 300; clock_seconds() < end; usleep(2000)) {
        linnet_engine_get_stats(site->engine, &stats);
        if (!stats.n_running && !stats.n_waiting && stats.n_blocks == stats.n_blocks_free) return;
    }
    fail_msg("%d run, %d wait, %d of %d blocks are free", stats.n_running, stats.n_waiting,
             stats.n_blocks_free, stats.n_blocks);
}

static inline void await_running(struct site *site, int running, int waiting)
{
    linnet_stats stats;
    for (double end = clock_seconds() + 300; clock_seconds() < end; usleep(1000)) {
        linnet_engine_get_stats(site->engine, &stats);
        if (stats.n_running == running && stats.n_waiting == waiting) return;
    }
    fail_msg("%d run and %d wait, expected %d and %d", stats.n_running, stats.n_waiting, running,
             waiting);
}

/* ---- the client ---------------------------------------------------------------------------- */

struct answered {
    int status;
    char head[8192];
    struct strbuf body;
    bool closed; /* the server ended the connection */
};

static inline int client_open(const struct site *site)
{
    struct timeval patience = {.tv_sec = 120};
    struct sockaddr_in inet = {.sin_family = AF_INET, .sin_port = htons((uint16_t)site->port)};
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    bool is_local = site->path[0] != 0;
    inet.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    memcpy(local.sun_path, site->path, sizeof local.sun_path);
    int fd = socket(is_local ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    int failed = is_local ? connect(fd, (struct sockaddr *)&local, sizeof local)
                          : connect(fd, (struct sockaddr *)&inet, sizeof inet);
    assert_int_equal(failed, 0);
    return fd;
}

static inline void client_send(int fd, const char *text, size_t n)
{
    while (n > 0) {
        ssize_t sent = send(fd, text, n, MSG_NOSIGNAL);
        if (sent <= 0) return; /* the server may refuse without reading on */
        text += sent;
        n -= (size_t)sent;
    }
}

static inline void client_text(int fd, const char *text)
{
    client_send(fd, text, strlen(text));
}

/* One byte; false at the end of the connection. */
static inline bool client_byte(int fd, char *c)
{
    return recv(fd, c, 1, 0) == 1;
}

/* Whether the server has begun to answer, of which nothing is taken. */
static inline bool has_begun(int fd)
{
    char c;
    return recv(fd, &c, 1, MSG_PEEK) == 1;
}

/* That the server ends the connection, whatever it says before; not that we lose patience. */
static inline void assert_cut(int fd)
{
    char c;
    errno = 0;
    while (client_byte(fd, &c)) continue;
    assert_true(errno == 0 || errno == ECONNRESET);
}

/* Up to a line's end, which is left out. */
static inline bool client_line(int fd, char *line, size_t size)
{
    size_t n = 0;
    char c;
    while (client_byte(fd, &c)) {
        if (c == '\n') {
            line[n] = 0;
            return true;
        }
        if (c != '\r' && n + 1 < size) line[n++] = c;
    }
    line[n] = 0;
    return false;
}

/* A header's value, or NULL. Valid until the next call. */
static inline const char *header_of(const struct answered *a, const char *name)
{
    static _Thread_local char value[1024];
    size_t n = strlen(name);
    for (const char *line = a->head; line && *line;
         line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (strncasecmp(line, name, n) != 0 || line[n] != ':') continue;
        snprintf(value, sizeof value, "%.*s", (int)strcspn(line + n + 2, "\n"), line + n + 2);
        return value;
    }
    return NULL;
}

static inline void client_body(int fd, struct answered *a, size_t n)
{
    char buffer[4096];
    while (n > 0) {
        ssize_t got = recv(fd, buffer, n < sizeof buffer ? n : sizeof buffer, 0);
        if (got <= 0) {
            a->closed = true;
            return;
        }
        strbuf_append(&a->body, buffer, (size_t)got);
        n -= (size_t)got;
    }
}

/* Status line and headers. False: the connection ended before. */
static inline bool client_head(int fd, struct answered *a)
{
    char line[2048];
    size_t n = 0;
    strbuf_free(&a->body);
    *a = (struct answered){.head = ""};
    if (!client_line(fd, line, sizeof line)) {
        a->closed = true;
        return false;
    }
    a->status = (int)strtol(line + 9, NULL, 10);
    while (client_line(fd, line, sizeof line) && line[0])
        n += (size_t)snprintf(a->head + n, sizeof a->head - n, "%s\n", line);
    return true;
}

/* The whole reply; `head`: to a HEAD request. */
static inline bool client_read(int fd, struct answered *a, bool head)
{
    char line[64];
    if (!client_head(fd, a)) return false;
    const char *coding = header_of(a, "transfer-encoding");
    if (head || a->status == 204 || a->status == 100) return true;
    if (coding && strcmp(coding, "chunked") == 0) {
        size_t n = 0;
        do {
            if (!client_line(fd, line, sizeof line)) {
                a->closed = true;
                return true;
            }
            n = strtoul(line, NULL, 16);
            client_body(fd, a, n);
            client_line(fd, line, sizeof line);
        } while (n > 0 && !a->closed);
        return true;
    }
    const char *length = header_of(a, "content-length");
    client_body(fd, a, length ? strtoul(length, NULL, 10) : SIZE_MAX);
    return true;
}

/* `headers` are whole lines ("A: b\r\n"). */
static inline void client_ask(int fd, const char *method, const char *path, const char *headers,
                              const char *body)
{
    struct strbuf text = {0};
    strbuf_format(&text, "%s %s HTTP/1.1\r\nHost: test\r\n%s", method, path, headers);
    if (body) strbuf_format(&text, "Content-Length: %zu\r\n", strlen(body));
    strbuf_text(&text, "\r\n");
    if (body) strbuf_text(&text, body);
    client_send(fd, text.data, text.size);
    strbuf_free(&text);
}

/* One request on a connection of its own. */
static inline void ask_with(struct site *site, const char *method, const char *path,
                            const char *headers, const char *body, struct answered *a)
{
    int fd = client_open(site);
    client_ask(fd, method, path, headers, body);
    client_read(fd, a, strcmp(method, "HEAD") == 0);
    close(fd);
}

static inline void ask(struct site *site, const char *method, const char *path, const char *body,
                       struct answered *a)
{
    ask_with(site, method, path, "", body, a);
}

static inline json_t *body_json(const struct answered *a)
{
    json_error_t where;
    json_t *json = json_loadb(strbuf_cstr(&a->body), a->body.size, JSON_ALLOW_NUL, &where);
    if (!json) fail_msg("no JSON: %s: '%.500s'", where.text, strbuf_cstr(&a->body));
    return json;
}

static inline void assert_holds(const char *text, const char *words)
{
    if (!text || !strstr(text, words))
        fail_msg("'%s' is not in '%.1500s'", words, text ? text : "(none)");
}

static inline void assert_status(const struct answered *a, int status)
{
    if (a->status != status)
        fail_msg("status %d, expected %d: %.1000s", a->status, status, strbuf_cstr(&a->body));
}

/* ---- streams ------------------------------------------------------------------------------- */

/* A stream's events, checked for their form, put together. */
struct streamed {
    struct strbuf text[8];
    json_t *finish[8]; /* finish_reason, once each */
    int roles[8];
    json_t *usage, *debug, *error, *logprobs; /* logprobs: all entries, in order */
    int n_chunks, n_done, n_pings;
};

static inline void streamed_free(struct streamed *s)
{
    for (int i = 0; i < 8; i++) {
        strbuf_free(&s->text[i]);
        json_decref(s->finish[i]);
    }
    json_decref(s->usage);
    json_decref(s->debug);
    json_decref(s->error);
    json_decref(s->logprobs);
    *s = (struct streamed){.n_chunks = 0};
}

static inline void streamed_choice(struct streamed *s, json_t *choice)
{
    size_t i = (size_t)json_integer_value(json_object_get(choice, "index"));
    json_t *delta = json_object_get(choice, "delta"), *text = json_object_get(choice, "text");
    json_t *finish = json_object_get(choice, "finish_reason");
    json_t *logprobs = json_object_get(choice, "logprobs"), *entries;
    assert_true(i < 8);
    assert_null(s->finish[i]); /* nothing comes after it */
    if (json_object_get(delta, "role")) s->roles[i]++;
    if (!text) text = json_object_get(delta, "content");
    if (delta && json_string_length(text)) assert_int_equal(s->roles[i], 1);
    strbuf_append(&s->text[i], json_string_value(text) ? json_string_value(text) : "",
                  json_string_length(text));
    if (json_is_string(finish)) s->finish[i] = json_incref(finish);
    entries = json_object_get(logprobs, "content");
    if (!entries) entries = json_object_get(logprobs, "token_logprobs");
    if (entries && !s->logprobs) s->logprobs = json_array();
    if (entries) json_array_extend(s->logprobs, entries);
}

static inline void streamed_read(struct streamed *s, const struct strbuf *body)
{
    const char *at = strbuf_cstr(body);
    *s = (struct streamed){.n_chunks = 0};
    while (*at) {
        const char *end = strstr(at, "\n\n");
        if (!end) fail_msg("an event without its end: '%.200s'", at);
        assert_int_equal(s->n_done, 0);
        if (*at == ':') {
            s->n_pings++;
        } else if (strncmp(at, "data: [DONE]", 12) == 0) {
            s->n_done++;
        } else {
            json_error_t where;
            json_t *json = json_loadb(at + 6, (size_t)(end - at) - 6, JSON_ALLOW_NUL, &where);
            if (strncmp(at, "data: ", 6) != 0 || !json) fail_msg("an odd event: '%.300s'", at);
            json_t *choices = json_object_get(json, "choices"), *choice;
            size_t i;
            if (json_object_get(json, "error"))
                s->error = json_incref(json_object_get(json, "error"));
            else
                assert_true(json_is_array(choices));
            json_array_foreach(choices, i, choice) streamed_choice(s, choice);
            if (json_object_get(json, "usage")) {
                assert_null(s->usage);
                assert_int_equal(json_array_size(choices), 0);
                s->usage = json_incref(json_object_get(json, "usage"));
            }
            if (json_object_get(json, "debug"))
                s->debug = json_incref(json_object_get(json, "debug"));
            s->n_chunks++;
            json_decref(json);
        }
        at = end + 2;
    }
}

#endif
