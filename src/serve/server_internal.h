/*
 * server_internal.h - what the files of the server share.
 *
 * Who may touch what. An exchange (one request and its reply) is the connection thread's, but for
 * what stands under its mutex, which the engine's thread writes, and for the time that it lies with
 * a worker: from exchange_work() to exchange_wake() it is the worker's. It lives until the last of
 * connection, worker and engine lets it go.
 */
#ifndef LINNET_SERVE_SERVER_INTERNAL_H
#define LINNET_SERVE_SERVER_INTERNAL_H

#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "serve/anthropic.h"
#include "serve/metrics.h"
#include "serve/openai.h"
#include "serve/server.h"

enum {
    N_WORKERS = 2,
    REQUEST_ID_SIZE = 129,
    KEY_SIZE = 256,       /* longest key and a NUL */
    BODY_SLOWEST = 1024,  /* bytes a second */
    LONG_BODY = 64 << 10, /* bytes: one worker at most reads such a one, */
    LONG_REPLY = 4 << 20, /* or makes one that takes so much */
    JSON_NESTING = 128,
    JSON_VALUES = 1 << 20 /* a value takes far more memory than its text */
};

struct exchange;

struct route {
    const char *path;
    bool prefix;                      /* of longer paths too */
    bool open;                        /* needs no key */
    bool needs_engine;                /* 503 while there is none */
    bool generates;                   /* 503 while draining */
    bool messages;                    /* of the Anthropic API: errors have its form */
    void (*get)(struct exchange *x);  /* NULL: not a method of it. On the connection thread */
    void (*post)(struct exchange *x); /* by a worker, with a body */
};

enum stage {
    STAGE_RECEIVING, /* headers are there, the body may be on its way */
    STAGE_WORKING,   /* with a worker */
    STAGE_WAITING,   /* the engine has it; the whole answer comes at its end */
    STAGE_STREAM,    /* the engine has it; the answer may begin */
    STAGE_REPLY,     /* status and reply are set */
    STAGE_SENT       /* handed to libmicrohttpd */
};

/* What was already sent of an answer. */
struct cursor {
    size_t text, tokens, deltas;
    bool begun, finished;
};

/* What the engine's thread writes about one prompt. */
struct submission {
    struct exchange *exchange;
    size_t index; /* of its prompt */
    uint64_t id;
    uint64_t seed;                     /* with debug, where the request has none */
    int32_t n_left;                    /* choices not finished */
    bool begun;                        /* has left the queue */
    int64_t queue_tokens, live_tokens; /* what it may come to, what it is likely to */
};

/* Exchanges that wait for a worker. */
struct jobs {
    struct exchange *first, *last;
};

/* Answers that are there go before new requests. */
enum job_kind { JOB_REPLY, JOB_REQUEST, N_JOBS };

struct exchange {
    struct server *server;
    atomic_int n_holders;
    struct exchange *previous, *next; /* server->exchanges */
    struct exchange *next_ready, *next_job;
    bool is_ready; /* in server->ready, under its mutex */

    struct MHD_Connection *connection; /* NULL once it is gone */
    int socket;
    bool suspended, watched;
    const struct route *route;
    const char *method; /* static */
    char request_id[REQUEST_ID_SIZE];
    char url[256];
    char path[256], client[64]; /* for the log; printable */
    double arrived;
    struct strbuf body;
    size_t body_seen;        /* all that came of it */
    atomic_size_t body_held; /* its shares of server->held_bytes, */
    atomic_size_t reply_held, out_held;
    bool body_refused;

    _Atomic enum stage stage;
    int status;  /* of the reply */
    int outcome; /* the same, or 408 or 499 where none was sent: for the log */
    const char *content_type, *allow;
    int retry_after; /* seconds; 0: none */
    struct strbuf reply;
    const void *fixed; /* the reply in place of `reply`, if it is always the same */
    size_t fixed_size;
    bool counted; /* in server->n_working */

    /* A generation. */
    struct openai_request request;
    char id[OPENAI_ID_SIZE];
    int64_t created;
    size_t n_answers;
    struct submission *submissions;       /* [n_prompts] */
    struct strbuf out;                    /* of the stream: formatted and not yet sent */
    size_t out_sent, next_choice, n_told; /* whose turn it is; choices told to their end */
    bool stream_ended, ping_due;
    struct cursor *cursors; /* [n_answers] */
    linnet_error failure;   /* of the first answer that failed; its event ends the stream */
    struct anthropic_stream messages; /* in its place where the route is anthropic */
    double last_sent;                 /* of a whole reply: when it began */
    double resumed;                   /* of a stream: when libmicrohttpd was last told to read it */
    size_t reply_size;

    pthread_mutex_t mutex; /* guards what follows */
    struct openai_answer *answers;
    size_t n_finished;
    bool submitted;     /* all of it */
    double *last_token; /* [n_answers] when the newest came */
    double first_token;
    bool gone;               /* the client is */
    bool cancelled;          /* whatever of it is submitted yet */
    bool crowded, too_large; /* cancelled for want of memory; which it alone wants */
    int preemptions;
};

struct peer {
    struct peer *previous, *next;
    int socket;
    double deadline; /* for the client's next bytes */
};

struct key {
    unsigned char text[KEY_SIZE];
    size_t size;
};

struct server {
    struct server_options options; /* its strings are the server's own, see `strings` */
    char **strings;
    size_t n_strings;
    int listen_fd, epoll_fd, wake_fd;
    struct MHD_Daemon *daemon;
    pthread_t loop_thread, workers[N_WORKERS];
    int n_workers;
    bool has_loop;

    /* The connection thread's. */
    struct exchange *exchanges;
    struct peer *peers;
    double next_tick;
    double heard;         /* when libmicrohttpd last began to read what has come */
    bool closing;         /* nothing may be suspended any more */
    char log_buffer[512]; /* libmicrohttpd's complaint at the start */

    linnet_model *model; /* set before engine */
    linnet_model_info info;
    linnet_plan plan;
    _Atomic(linnet_engine *) engine;
    atomic_bool draining, failed;
    atomic_bool stopping;      /* what has not begun is refused */
    atomic_int n_working;      /* exchanges at work */
    atomic_size_t body_bytes;  /* of bodies, */
    atomic_size_t held_bytes;  /* and by all requests and replies, see account.c, */
    atomic_int n_sharing;      /* and by how many */
    _Atomic double crowded_at; /* when somebody was refused for want of memory */

    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t work, idle;
    struct exchange *ready, *ready_last;
    struct jobs jobs[N_JOBS], long_jobs[N_JOBS]; /* the latter have long bodies, or will have
                                                    long replies */
    bool long_job;                               /* one of them is with a worker */
    int n_busy;                                  /* workers */
    bool workers_stop;
    int32_t n_queued, n_live; /* prompts not begun; prompts not finished */
    int64_t queued_tokens, live_tokens;
    double mean_answer; /* tokens; of those that have finished */
    struct key *keys;
    size_t n_keys;

    struct metrics metrics;
};

/* ---- server.c ---- */

/* Hands x to a worker, or back to the connection thread. From any thread. */
void exchange_work(struct exchange *x);
/* The next one to work at, or NULL; under the mutex. */
struct exchange *server_take_job(struct server *s, bool *is_long);
void exchange_wake(struct exchange *x);

/* ---- exchange.c ---- */

struct exchange *exchange_new(struct server *s, struct MHD_Connection *connection);
void exchange_hold(struct exchange *x);
void exchange_release(struct exchange *x);
/* The connection is done with it. */
void exchange_end(struct exchange *x);
void exchange_free_body(struct exchange *x);
/* Ends its requests in the engine. `gone`: nobody waits for the answer. */
void exchange_cancel(struct exchange *x, bool gone);
bool exchange_is_gone(struct exchange *x); /* its client is */
/* Watches the socket of an exchange that waits, for its client leaving. */
void exchange_watch(struct exchange *x);

/* Set the reply: stage becomes STAGE_REPLY. */
void reply_json(struct exchange *x, int status, json_t *json); /* takes over json */
void reply_written(struct exchange *x, int status);            /* x->reply is the body already */
void reply_error(struct exchange *x, int status, const char *type, const char *code,
                 const char *format, ...) __attribute__((format(printf, 5, 6)));
void reply_fault(struct exchange *x, const struct openai_fault *fault);
void reply_status(struct exchange *x, const linnet_error *err);
void reply_stopping(struct exchange *x);
void reply_crowded(struct exchange *x);

/* ---- account.c ----------------------------------------------------------------------------- */

/* Adds to one of x's shares if there is room for it; false: there is none. */
bool account_take(struct exchange *x, atomic_size_t *share, size_t n);
/* Adds whether there is room or not; sets a share to n. */
void account_add(struct exchange *x, atomic_size_t *share, size_t n);
void account_set(struct exchange *x, atomic_size_t *share, size_t n);
/* What each may have when there is too little for all. */
size_t account_part(struct server *s);
/* There is too little for all, and x has more than its part: the one to give way. */
bool account_is_greedy(struct exchange *x);
/* It has most of what all may have together: it would come to that at any time. */
bool account_is_too_large(struct exchange *x);
/* More than half is taken, and x has at least half a part of it. */
bool account_holds_up(struct exchange *x);
/* The parsed request and its empty answers. */
size_t account_request(const struct exchange *x);
/* What an answer grows by, and its reply if that is made as a whole. */
size_t account_event(const struct exchange *x, const linnet_event *event);
/* At most, while the whole reply is made of the answers that there are. */
size_t account_reply(const struct exchange *x);
/* Of that, what `debug` takes, which a stream has at its end too. */
size_t account_debug(const struct exchange *x);
/* The field that makes most of what is known of a request beforehand. */
const char *account_reason(const struct exchange *x);

/* ---- http.c ---- */

struct MHD_Daemon *http_start(struct server *s, linnet_error *err);
void http_resume(struct exchange *x);
/* The server stops: a client whose body is still under way is told at once. */
void http_refuse_body(struct exchange *x);

/* ---- route.c ---- */

const struct route *route_find(const char *path);
const struct route *route_at(size_t i); /* one after another, then NULL */
/* The body as a JSON object; else NULL, and the reply is set. */
json_t *route_body(struct exchange *x);
/* Is the model called so? What is it called? */
bool route_serves(const struct server *s, const char *name);
const char *route_name(const struct server *s);

/* ---- generate.c ---- */

void generate_chat(struct exchange *x);
void generate_completions(struct exchange *x);
void generate_messages(struct exchange *x);
void generate_count(struct exchange *x);
/* The whole answer, once every choice has finished. By a worker. */
void generate_reply(struct exchange *x);
/* Ends it for want of memory; the client is told. */
void generate_give_way(struct exchange *x);
/* Why an answer was cancelled. */
void generate_cancelled(struct exchange *x, linnet_error *why);
/* The "debug" field of an answer that is finished. */
json_t *generate_debug(struct exchange *x);

/* ---- stream.c ---- */

/* libmicrohttpd's reader of a stream: MHD_ContentReaderCallback. */
ssize_t stream_read(void *x, uint64_t position, char *buffer, size_t size);

/* ---- keys.c ---- */

linnet_status keys_load(struct server *s, linnet_error *err);
/* Does the connection show exactly one of the keys? True if there are none. */
bool keys_admit(struct server *s, struct MHD_Connection *connection);

/* ---- log.c ---- */

void log_request(struct exchange *x);
void log_note(struct server *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
