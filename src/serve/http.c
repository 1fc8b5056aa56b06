/* http.c - libmicrohttpd's callbacks: requests come in piece by piece, replies go out. */
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/memory.h"
#include "serve/server_internal.h"

enum { STREAM_BLOCK = 4096, HEADER_MEMORY = 32 << 10, SEND_BUFFER = 128 << 10 };

/* ---- what a request's headers say ----------------------------------------------------------- */

static const char *header(struct exchange *x, const char *name)
{
    return MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

/* Printable, without what a log line or a header could trip over. */
static void copy_printable(char *out, size_t size, const char *text)
{
    size_t n = 0;
    for (; text && *text && n + 1 < size; text++)
        out[n++] = *text > ' ' && *text <= '~' && *text != '"' && *text != '\\' ? *text : '?';
    out[n] = 0;
}

static void choose_request_id(struct exchange *x)
{
    const char *given = header(x, "x-request-id");
    size_t n = given ? strlen(given) : 0;
    static const char sane[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:";
    if (n > 0 && n < REQUEST_ID_SIZE && strspn(given, sane) == n) {
        memcpy(x->request_id, given, n + 1);
        return;
    }
    unsigned char bytes[12] = {0};
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        memcpy(bytes, &x->arrived, sizeof x->arrived);
    int at = snprintf(x->request_id, REQUEST_ID_SIZE, "req-");
    for (size_t i = 0; i < sizeof bytes; i++)
        at += snprintf(x->request_id + at, 3, "%02x", bytes[i]);
}

static void name_client(struct exchange *x)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct sockaddr *address = info ? info->client_addr : NULL;
    snprintf(x->client, sizeof x->client, "local");
    if (address && address->sa_family == AF_INET)
        inet_ntop(AF_INET, &((const struct sockaddr_in *)(const void *)address)->sin_addr,
                  x->client, sizeof x->client);
    if (address && address->sa_family == AF_INET6)
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr,
                  x->client, sizeof x->client);
}

static struct peer *peer_of(struct MHD_Connection *connection)
{
    return MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
}

/* ---- replies ------------------------------------------------------------------------------- */

/* The origin, if its pages may read the answer. */
static const char *allowed_origin(struct exchange *x)
{
    const struct server_options *o = &x->server->options;
    const char *origin = header(x, "origin");
    for (size_t i = 0; i < o->n_cors_origins && origin; i++) {
        if (strcmp(o->cors_origins[i], "*") == 0) return "*";
        if (strcmp(o->cors_origins[i], origin) == 0) return origin;
    }
    return NULL;
}

static void add_cors(struct exchange *x, struct MHD_Response *response)
{
    static const char token[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_, ";
    const char *origin = allowed_origin(x);
    if (x->server->options.n_cors_origins) MHD_add_response_header(response, "Vary", "Origin");
    if (!origin) return;
    MHD_add_response_header(response, "Access-Control-Allow-Origin", origin);
    MHD_add_response_header(response, "Access-Control-Expose-Headers", "x-request-id, retry-after");
    if (strcmp(x->method, "OPTIONS") != 0) return;
    const char *wanted = header(x, "access-control-request-headers");
    bool sane = wanted && strlen(wanted) < 1024 && strspn(wanted, token) == strlen(wanted);
    MHD_add_response_header(response, "Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS");
    MHD_add_response_header(response, "Access-Control-Allow-Headers",
                            sane ? wanted : "authorization, content-type");
    MHD_add_response_header(response, "Access-Control-Max-Age", "600");
}

static enum MHD_Result send_response(struct exchange *x, int status, struct MHD_Response *response)
{
    char seconds[16];
    if (!response) return MHD_NO;
    MHD_add_response_header(response, "x-request-id", x->request_id);
    if (x->content_type) MHD_add_response_header(response, "Content-Type", x->content_type);
    if (x->allow) MHD_add_response_header(response, "Allow", x->allow);
    if (status == 401) MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (status == 500) MHD_add_response_header(response, "x-should-retry", "false");
    if (x->retry_after) {
        snprintf(seconds, sizeof seconds, "%d", x->retry_after);
        MHD_add_response_header(response, "Retry-After", seconds);
    }
    add_cors(x, response);
    x->outcome = status;
    x->last_sent = clock_seconds();
    atomic_store(&x->stage, STAGE_SENT);
    enum MHD_Result result = MHD_queue_response(x->connection, (unsigned)status, response);
    MHD_destroy_response(response);
    return result;
}

static struct MHD_Response *fixed_response(const struct exchange *x)
{
    void *bytes = (void *)(uintptr_t)x->fixed; /* which are only read */
    return MHD_create_response_from_buffer(x->fixed_size, bytes, MHD_RESPMEM_PERSISTENT);
}

static enum MHD_Result send_reply(struct exchange *x)
{
    struct strbuf text = x->reply;
    if (x->fixed) return send_response(x, x->status, fixed_response(x));
    x->reply = (struct strbuf){0};
    account_set(x, &x->reply_held, account_request(x) + text.capacity); /* until it is sent */
    x->reply_size = text.size;
    struct peer *peer = peer_of(x->connection);
    if (peer) /* what it holds is everybody's: nobody may keep it for ever */
        peer->deadline = clock_seconds() + x->server->options.stall_s +
                         (double)text.size / x->server->options.reply_slowest;
    if (text.failed || x->gone) {
        strbuf_free(&text);
        return MHD_NO;
    }
    struct MHD_Response *response =
        MHD_create_response_from_buffer(text.size, text.data, MHD_RESPMEM_MUST_FREE);
    if (!response) strbuf_free(&text);
    return send_response(x, x->status, response);
}

static void stream_end(void *x)
{
    exchange_release(x);
}

static enum MHD_Result send_stream(struct exchange *x)
{
    exchange_hold(x);
    struct MHD_Response *response = MHD_create_response_from_callback(
        MHD_SIZE_UNKNOWN, STREAM_BLOCK, stream_read, x, stream_end);
    if (!response) {
        exchange_release(x);
        return MHD_NO;
    }
    MHD_add_response_header(response, "Cache-Control", "no-cache");
    MHD_add_response_header(response, "X-Accel-Buffering", "no");
    x->content_type = "text/event-stream; charset=utf-8";
    return send_response(x, 200, response);
}

/* ---- the request comes in ------------------------------------------------------------------- */

static bool is_busy_or_absent(struct exchange *x)
{
    struct server *s = x->server;
    if (x->route->generates && atomic_load(&s->draining)) {
        reply_stopping(x);
        return true;
    }
    if (x->route->needs_engine && !atomic_load(&s->engine)) {
        x->retry_after = 1;
        reply_error(x, 503, "unavailable_error", NULL,
                    "the model is still being loaded: ask again in a second");
        return true;
    }
    return false;
}

static void refuse_method(struct exchange *x)
{
    static const char *const allowed[] = {"OPTIONS", "GET, HEAD, OPTIONS", "POST, OPTIONS",
                                          "GET, HEAD, POST, OPTIONS"};
    x->allow = allowed[(x->route->get != NULL) + 2 * (x->route->post != NULL)];
    if (strcmp(x->method, "OPTIONS") == 0) {
        x->content_type = NULL;
        x->status = 204;
        atomic_store(&x->stage, STAGE_REPLY);
        return;
    }
    reply_error(x, 405, "invalid_request_error", "method_not_allowed",
                "%s does not take this method: it takes %s", x->route->path, x->allow);
}

/* Everything that can be refused before the body is read; else the stage stays RECEIVING. */
static void begin(struct exchange *x, const char *url)
{
    struct server *s = x->server;
    const char *length = header(x, "content-length");
    bool options = strcmp(x->method, "OPTIONS") == 0, post = strcmp(x->method, "POST") == 0;
    bool get = strcmp(x->method, "GET") == 0 || strcmp(x->method, "HEAD") == 0;
    x->route = route_find(url);
    if (!options && !(x->route && x->route->open) && !keys_admit(s, x->connection)) {
        reply_error(x, 401, "authentication_error", "invalid_api_key",
                    "a valid API key is needed: send it as 'Authorization: Bearer KEY'");
        return;
    }
    if (!x->route) {
        reply_error(x, 404, "not_found_error", "not_found", "there is nothing at %.200s", url);
        return;
    }
    if (!(get && x->route->get) && !(post && x->route->post)) {
        refuse_method(x);
        return;
    }
    if (is_busy_or_absent(x)) return;
    if (length && strtoull(length, NULL, 10) > (unsigned long long)s->options.max_body)
        reply_error(x, 413, "invalid_request_error", "body_too_large",
                    "the body has %.20s bytes and the limit is %lld", length,
                    (long long)s->options.max_body);
    if (post && x->route->generates && atomic_load(&x->stage) == STAGE_RECEIVING) {
        x->counted = true;
        atomic_fetch_add(&s->n_working, 1);
    }
}

static const char *method_name(const char *method)
{
    static const char *const known[] = {"GET",   "HEAD",   "POST",    "PUT",
                                        "PATCH", "DELETE", "OPTIONS", "TRACE"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(method, known[i]) == 0) return known[i];
    return "?";
}

static enum MHD_Result arrive(struct server *s, struct MHD_Connection *connection, const char *url,
                              const char *method, void **context)
{
    struct exchange *x = exchange_new(s, connection);
    struct peer *peer = peer_of(connection);
    if (!x) return MHD_NO;
    *context = x;
    x->outcome = 499;
    x->method = method_name(method);
    snprintf(x->url, sizeof x->url, "%s", url);
    copy_printable(x->path, sizeof x->path, url);
    choose_request_id(x);
    name_client(x);
    if (peer) peer->deadline = x->arrived + s->options.body_s;
    begin(x, url);
    bool with_body = strcmp(x->method, "POST") == 0 || strcmp(x->method, "PUT") == 0;
    /* at once, and without a 100 Continue; libmicrohttpd then reads no body */
    if (with_body && atomic_load(&x->stage) == STAGE_REPLY) return send_reply(x);
    return MHD_YES;
}

static enum MHD_Result receive(struct exchange *x, const char *bytes, size_t n)
{
    struct server *s = x->server;
    struct peer *peer = peer_of(x->connection);
    size_t limit = (size_t)s->options.max_body;
    if (peer) /* what came fast earns no time to be silent in */
        peer->deadline =
            fmin(peer->deadline + (double)n / BODY_SLOWEST, clock_seconds() + s->options.body_s);
    x->body_seen += n;
    if (x->body_seen > 2 * limit) return MHD_NO; /* chunks without end */
    if (atomic_load(&x->stage) != STAGE_RECEIVING) return MHD_YES;
    if (x->body_seen <= limit && !x->body_refused) {
        x->body_refused = !account_take(x, &x->body_held, n);
        strbuf_append(&x->body, bytes, n);
        account_set(x, &x->body_held, x->body.capacity);
    }
    if (x->body_seen > limit || x->body_refused) exchange_free_body(x);
    return MHD_YES;
}

static enum MHD_Result wait_for(struct exchange *x)
{
    if (x->server->closing) return MHD_NO;
    exchange_watch(x);
    x->suspended = true;
    MHD_suspend_connection(x->connection);
    return MHD_YES;
}

/* The whole request is there. */
static enum MHD_Result complete(struct exchange *x)
{
    struct peer *peer = peer_of(x->connection);
    if (peer) peer->deadline = INFINITY;
    if (strcmp(x->method, "POST") != 0) {
        x->route->get(x);
        return send_reply(x);
    }
    if (x->body_refused || x->body.failed) {
        reply_crowded(x);
        return send_reply(x);
    }
    if (x->body_seen > (size_t)x->server->options.max_body) {
        reply_error(x, 413, "invalid_request_error", "body_too_large",
                    "the body has more than %lld bytes, the limit",
                    (long long)x->server->options.max_body);
        return send_reply(x);
    }
    if (atomic_load(&x->server->stopping)) {
        reply_stopping(x);
        return send_reply(x);
    }
    atomic_store(&x->stage, STAGE_WORKING);
    enum MHD_Result result = wait_for(x);
    exchange_work(x);
    return result;
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_size, void **context)
{
    struct exchange *x = *context;
    (void)version;
    if (!x) return arrive(cls, connection, url, method, context);
    if (*upload_size) {
        size_t n = *upload_size;
        *upload_size = 0;
        return receive(x, upload, n);
    }
    if (x->gone) return MHD_NO;
    switch (atomic_load(&x->stage)) {
    case STAGE_RECEIVING: return complete(x);
    case STAGE_WORKING:
    case STAGE_WAITING: return wait_for(x);
    case STAGE_STREAM: return send_stream(x);
    case STAGE_REPLY: return send_reply(x);
    case STAGE_SENT: break; /* by http_refuse_body */
    }
    return MHD_NO;
}

/* libmicrohttpd takes a reply before a body or after it, not while it comes: this one goes past it.
 * It goes on reading what the client sends until that has heard. */
void http_refuse_body(struct exchange *x)
{
    struct strbuf text = {0};
    if (x->server->options.tls_certificate) return; /* the socket is not for plain text */
    reply_stopping(x);
    strbuf_format(&text,
                  "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: %s\r\nContent-Length: "
                  "%zu\r\nRetry-After: %d\r\nx-request-id: %s\r\n\r\n",
                  x->status, MHD_get_reason_phrase_for((unsigned)x->status), x->content_type,
                  x->reply.size, x->retry_after, x->request_id);
    strbuf_append(&text, x->reply.data, x->reply.size);
    ssize_t sent =
        text.failed ? 0 : send(x->socket, text.data, text.size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == (ssize_t)text.size) x->outcome = x->status;
    strbuf_free(&text);
    exchange_free_body(x);
    atomic_store(&x->stage, STAGE_SENT);
}

void http_resume(struct exchange *x)
{
    if (!x->suspended || !x->connection) return;
    x->suspended = false;
    x->resumed = clock_seconds();
    MHD_resume_connection(x->connection);
}

/* ---- connections --------------------------------------------------------------------------- */

static void on_completed(void *cls, struct MHD_Connection *connection, void **context,
                         enum MHD_RequestTerminationCode why)
{
    struct server *s = cls;
    struct exchange *x = *context;
    struct peer *peer = peer_of(connection);
    if (peer) peer->deadline = clock_seconds() + s->options.idle_s;
    if (!x) return;
    if (why == MHD_REQUEST_TERMINATED_TIMEOUT_REACHED && x->outcome == 499) x->outcome = 408;
    *context = NULL;
    if (why != MHD_REQUEST_TERMINATED_COMPLETED_OK) exchange_cancel(x, true);
    exchange_end(x);
}

/* What the system keeps for a client that does not read. A connection does not have it from the
 * listening socket if that is a Unix socket, or if it came before us, by systemd's. */
static void bound_send_buffer(int socket)
{
    static const int size = SEND_BUFFER;
    setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
}

static void on_connection(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode what)
{
    struct server *s = cls;
    struct peer *peer = *context;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        int socket =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        bound_send_buffer(socket);
        peer = mem_new(1, sizeof *peer);
        *context = peer;
        if (!peer) return; /* then only libmicrohttpd's own time-out holds */
        peer->socket = socket;
        peer->deadline = clock_seconds() + s->options.header_s;
        peer->next = s->peers;
        if (peer->next) peer->next->previous = peer;
        s->peers = peer;
    } else if (peer) {
        if (peer->previous)
            peer->previous->next = peer->next;
        else
            s->peers = peer->next;
        if (peer->next) peer->next->previous = peer->previous;
        free(peer);
        *context = NULL;
    }
}

/* ---- start --------------------------------------------------------------------------------- */

static void on_complaint(void *cls, const char *format, va_list args)
    __attribute__((format(printf, 2, 0)));

/* What it says of single clients is no news; of the start it is. */
static void on_complaint(void *cls, const char *format, va_list args)
{
    struct server *s = cls;
    if (!s->daemon) vsnprintf(s->log_buffer, sizeof s->log_buffer, format, args);
}

static linnet_status read_pem(const char *path, char **out, linnet_error *err)
{
    enum { MOST = 1 << 20 };
    struct stat found;
    FILE *f = fopen(path, "re");
    if (!f || fstat(fileno(f), &found) != 0 || !S_ISREG(found.st_mode) || found.st_size > MOST) {
        linnet_status status =
            error_set(err, LINNET_IO, "%s: %s", path,
                      f ? "expected a PEM file of at most 1 MiB" : strerror(errno));
        if (f) fclose(f);
        return status;
    }
    char *text = mem_new((size_t)found.st_size + 1, 1);
    size_t n = text ? fread(text, 1, (size_t)found.st_size, f) : 0;
    fclose(f);
    if (!text) return error_memory(err, path, (size_t)found.st_size);
    if (n == 0 || !strstr(text, "-----BEGIN ")) {
        free(text);
        return error_set(err, LINNET_FORMAT, "%s: expected a PEM file ('-----BEGIN ...')", path);
    }
    *out = text;
    return LINNET_OK;
}

static struct MHD_Daemon *start(struct server *s, char *certificate, char *key)
{
    const struct server_options *o = &s->options;
    unsigned flags = MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    struct MHD_OptionItem tls[] = {{MHD_OPTION_HTTPS_MEM_CERT, 0, certificate},
                                   {MHD_OPTION_HTTPS_MEM_KEY, 0, key},
                                   {MHD_OPTION_END, 0, NULL}};
    if (!certificate) tls[0].option = MHD_OPTION_END;
    if (certificate) flags |= MHD_USE_TLS;
    return MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, s, MHD_OPTION_EXTERNAL_LOGGER, on_complaint, s,
        MHD_OPTION_LISTEN_SOCKET, s->listen_fd, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)o->max_connections, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)ceil(o->stall_s),
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEADER_MEMORY, MHD_OPTION_NOTIFY_COMPLETED,
        on_completed, s, MHD_OPTION_NOTIFY_CONNECTION, on_connection, s, MHD_OPTION_ARRAY, tls,
        MHD_OPTION_END);
}

struct MHD_Daemon *http_start(struct server *s, linnet_error *err)
{
    const struct server_options *o = &s->options;
    char *certificate = NULL, *key = NULL;
    struct MHD_Daemon *daemon = NULL;
    linnet_status status = LINNET_OK;
    if (!o->tls_certificate != !o->tls_key)
        status = error_set(err, LINNET_INVALID, "TLS needs both a certificate and its key");
    if (!status && o->tls_certificate) status = read_pem(o->tls_certificate, &certificate, err);
    if (!status && o->tls_key) status = read_pem(o->tls_key, &key, err);
    if (!status) daemon = start(s, certificate, key);
    if (!status && !daemon) {
        size_t n = strcspn(s->log_buffer, "\n");
        error_set(err, o->tls_key ? LINNET_FORMAT : LINNET_IO, "the server does not start: %.*s%s",
                  (int)n, n ? s->log_buffer : "",
                  o->tls_key ? " (is the key the certificate's?)" : "");
    }
    if (daemon) s->listen_fd = -1; /* its own now */
    if (key) explicit_bzero(key, strlen(key));
    free(key);
    free(certificate);
    return daemon;
}
