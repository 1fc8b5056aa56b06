/*
 * server.h - the HTTP server around one engine: what the program needs of it.
 *
 * One thread owns every connection, in libmicrohttpd's epoll loop; two more read requests and write
 * long answers, so that no text, however long, holds up the others' tokens; only one of the two
 * reads long ones. The engine's thread only leaves its events with the exchange that they belong
 * to.
 *
 * Life: server_listen, server_start (answers at once: 503 while loading), server_attach once there
 * is an engine, server_drain, server_stop; then the engine is destroyed, which delivers its last
 * events; then server_free.
 */
#ifndef LINNET_SERVE_SERVER_H
#define LINNET_SERVE_SERVER_H

#include "base/error.h"

struct server;

enum server_log { SERVER_LOG_TEXT, SERVER_LOG_JSON, SERVER_LOG_NONE };

/* One line without its end, from any thread of the server. */
typedef void (*server_log_fn)(void *user, const char *line);

/* Zero takes the default everywhere. */
struct server_options {
    const char *const *names; /* what the model is called; none: its own name */
    size_t n_names;
    const char *const *keys; /* who may ask; none, and no file: everybody */
    size_t n_keys;
    const char *key_file;            /* a key a line; read again by server_reload_keys */
    const char *const *cors_origins; /* web pages that may ask; "*" is any */
    size_t n_cors_origins;
    const char *tls_certificate, *tls_key; /* PEM files, both or none */

    int32_t max_connections;    /* 4096 */
    int32_t max_queue_requests; /* 1024 waiting */
    int64_t max_queue_tokens;   /* 4 M: what the waiting may come to, prompts and answers */
    int64_t max_body;           /* 8 MiB */
    int64_t max_memory;         /* 32 times max_body, not less than 256 MiB: for all requests and
                                   replies together, engine and connections apart */

    double header_s;      /* 20: the first request's headers must be there */
    double idle_s;        /* 75: the next request's on a connection that is kept */
    double body_s;        /* 30: the body must be there, and a second more for each KiB of it */
    double stall_s;       /* 120: a client that takes nothing for so long is cut off */
    double reply_slowest; /* 65536 bytes a second, after stall_s: at which a whole reply is taken */
    double crowded_s;     /* 5: what stall_s is while requests are refused for want of memory, at 16
                             times reply_slowest, for bodies too */
    double ping_s;        /* 15: a comment in a stream that has nothing else to say */
    double stopped_s;     /* 120: an engine that takes no step for so long is unhealthy; when the
                             server stops it waits no longer for what the engine has to say */

    enum server_log log_format;
    server_log_fn log;
    void *log_user;
};

/*
 * Opens a listening socket: `host` is a name, an address or "unix:PATH"; port 0 is any that is
 * free. *text (SERVER_ADDRESS_SIZE) is what to tell people: "http://127.0.0.1:8000".
 */
enum { SERVER_ADDRESS_SIZE = 256 };
linnet_status server_listen(const char *host, int port, int *fd, char *text, linnet_error *err);

/* What a socket that somebody else opened is bound to (systemd's). */
linnet_status server_describe(int fd, char *text, linnet_error *err);

/* True if only this machine can reach the socket. */
bool server_is_local(int fd);

/* Begins to answer on `fd`, which it takes over, on failure too. Strings are copied. */
linnet_status server_start(const struct server_options *options, int fd, struct server **out,
                           linnet_error *err);

/* From here on there is an engine. Both must stay until after server_stop. */
linnet_status server_attach(struct server *server, linnet_model *model, linnet_engine *engine,
                            linnet_error *err);

/* Reads the key file again. On failure the old keys stay. */
linnet_status server_reload_keys(struct server *server, linnet_error *err);

/* Takes no more work (503) and goes on with what there is. */
void server_drain(struct server *server);

/* Waits up to so many seconds until nothing is at work. */
bool server_wait_idle(struct server *server, double seconds);

/* Ends what is at work, telling its clients, closes all connections. */
void server_stop(struct server *server);

/* For who has called server_stop, and destroyed the engine since. NULL is allowed. */
void server_free(struct server *server);

#endif
