/* server.c - the server's life, the loop that owns the connections, and its workers. */
#include "serve/server.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/threads.h"
#include "serve/server_internal.h"

/* How long clients may take to hear that the server stops; and in how many turns of the loop at
 * least, which may itself stand still for so long. */
static const double farewell_s = 1;
enum { FAREWELL_TURNS = 100 };
static const double tick_s = 0.25;

/* How long after somebody was refused for want of memory others are hurried. */
static const double crowded_for_s = 2;

/* ---- handing exchanges from thread to thread ------------------------------------------------ */

void exchange_work(struct exchange *x)
{
    struct server *s = x->server;
    bool answered = atomic_load(&x->stage) == STAGE_WAITING;
    pthread_mutex_lock(&x->mutex);
    bool dropped = x->crowded || x->gone; /* its reply is short, and frees memory */
    pthread_mutex_unlock(&x->mutex);
    bool is_long = answered ? !dropped && account_reply(x) > LONG_REPLY : x->body.size > LONG_BODY;
    struct jobs *jobs = &(is_long ? s->long_jobs : s->jobs)[answered ? JOB_REPLY : JOB_REQUEST];
    exchange_hold(x);
    pthread_mutex_lock(&s->mutex);
    x->next_job = NULL;
    if (jobs->first)
        jobs->last->next_job = x;
    else
        jobs->first = x;
    jobs->last = x;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->mutex);
}

static void wake_loop(struct server *s)
{
    static const uint64_t one = 1;
    ssize_t ignored = write(s->wake_fd, &one, sizeof one); /* full: it is awake */
    (void)ignored;
}

void exchange_wake(struct exchange *x)
{
    struct server *s = x->server;
    pthread_mutex_lock(&s->mutex);
    bool first = !s->ready, known = x->is_ready;
    if (!known) {
        exchange_hold(x);
        x->is_ready = true;
        x->next_ready = NULL;
        if (first)
            s->ready = x;
        else
            s->ready_last->next_ready = x;
        s->ready_last = x;
    }
    pthread_mutex_unlock(&s->mutex);
    if (!known && first) wake_loop(s);
}

/* A long text or reply occupies a worker for seconds: there is never more than one at work, so that
 * the others' need not wait. When the server stops, none is read any more. */
struct exchange *server_take_job(struct server *s, bool *is_long)
{
    *is_long = (s->long_jobs[JOB_REPLY].first || s->long_jobs[JOB_REQUEST].first) &&
               (!s->long_job || atomic_load(&s->stopping));
    struct jobs *jobs = *is_long ? s->long_jobs : s->jobs;
    if (!jobs[JOB_REPLY].first) jobs++;
    struct exchange *x = jobs->first;
    if (x) jobs->first = x->next_job;
    if (*is_long) s->long_job = true;
    return x;
}

static void work(struct exchange *x)
{
    if (exchange_is_gone(x))
        reply_error(x, 499, "client_error", NULL, "the client has left");
    else if (atomic_load(&x->stage) == STAGE_WAITING)
        generate_reply(x);
    else if (atomic_load(&x->server->stopping))
        reply_stopping(x);
    else
        x->route->post(x);
    enum stage stage = atomic_load(&x->stage);
    if (stage == STAGE_REPLY || stage == STAGE_STREAM) exchange_wake(x);
}

static void *worker_main(void *arg)
{
    struct server *s = arg;
    pthread_mutex_lock(&s->mutex);
    while (!s->workers_stop) {
        bool is_long;
        struct exchange *x = server_take_job(s, &is_long);
        if (!x) {
            pthread_cond_wait(&s->work, &s->mutex);
            continue;
        }
        s->n_busy++;
        pthread_mutex_unlock(&s->mutex);
        work(x);
        exchange_release(x);
        pthread_mutex_lock(&s->mutex);
        s->n_busy--;
        if (is_long) s->long_job = false;
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

/* ---- the loop ------------------------------------------------------------------------------ */

static void resume_ready(struct server *s)
{
    uint64_t ignored;
    ssize_t n = read(s->wake_fd, &ignored, sizeof ignored);
    (void)n;
    pthread_mutex_lock(&s->mutex);
    struct exchange *x = s->ready;
    s->ready = s->ready_last = NULL;
    while (x) {
        /* who is still ahead in this chain stays ready: a wake now must not link it elsewhere */
        struct exchange *next = x->next_ready;
        x->is_ready = false;
        pthread_mutex_unlock(&s->mutex);
        http_resume(x);
        exchange_release(x);
        pthread_mutex_lock(&s->mutex);
        x = next;
    }
    pthread_mutex_unlock(&s->mutex);
}

/* Since when a client has been slow to take or to send; INFINITY: it is our turn. */
static double waits_since(const struct exchange *x, double least_rate)
{
    enum stage stage = atomic_load(&x->stage);
    if (stage == STAGE_RECEIVING) return x->arrived + (double)x->body_seen / least_rate;
    if (stage != STAGE_SENT || x->fixed) return INFINITY;
    if (!x->request.stream) return x->last_sent + (double)x->reply_size / least_rate;
    return x->suspended ? INFINITY : fmax(x->last_sent, x->resumed);
}

/* While requests are refused for want of memory, who takes or sends what holds them up more slowly
 * than a good network does is cut off. */
static void cut_off_slow(struct server *s, double now)
{
    enum { TIMES = 16 }; /* the least rate otherwise */
    for (struct exchange *x = s->exchanges; x; x = x->next)
        if (now - waits_since(x, TIMES * s->options.reply_slowest) >= s->options.crowded_s &&
            account_holds_up(x))
            shutdown(x->socket, SHUT_RDWR); /* libmicrohttpd sees a client that left */
}

/* What happens because time goes by: pings, and clients that are late. `now` is when they were last
 * listened to: what they have sent since may be in time, and we late. */
static void tick(struct server *s, double now)
{
    if (now < s->next_tick) return;
    s->next_tick = now + fmin(tick_s, s->options.ping_s / 4);
    for (struct exchange *x = s->exchanges; x; x = x->next) {
        bool quiet = x->suspended && atomic_load(&x->stage) == STAGE_SENT &&
                     now - x->last_sent >= s->options.ping_s;
        if (!quiet) continue;
        x->ping_due = true;
        http_resume(x);
    }
    if (now - atomic_load(&s->crowded_at) < crowded_for_s && !atomic_load(&s->stopping))
        cut_off_slow(s, now);
    for (struct peer *p = s->peers; p; p = p->next) {
        if (now < p->deadline) continue;
        p->deadline = INFINITY;
        shutdown(p->socket, SHUT_RDWR); /* libmicrohttpd sees a client that left */
    }
}

static int loop_timeout(struct server *s, double now)
{
    MHD_UNSIGNED_LONG_LONG theirs;
    double wait = s->peers ? fmax(0, s->next_tick - now) * 1000 + 1 : 1000;
    if (MHD_get_timeout(s->daemon, &theirs) == MHD_YES && (double)theirs < wait)
        wait = (double)theirs;
    return (int)wait;
}

/* Nothing is left to tell its client, who may well leave. */
static bool is_answered(const struct exchange *x)
{
    if (atomic_load(&x->stage) != STAGE_SENT) return false;
    return !x->request.stream || (x->stream_ended && x->out_sent == x->out.size);
}

static void turn(struct server *s)
{
    struct epoll_event events[64];
    int n = epoll_wait(s->epoll_fd, events, 64, loop_timeout(s, clock_seconds()));
    for (int i = 0; i < n; i++) {
        struct exchange *x = events[i].data.ptr;
        if (!x || is_answered(x)) continue; /* NULL: the two that only wake us */
        exchange_cancel(x, true);
        http_resume(x);
    }
    resume_ready(s);
    tick(s, s->heard);
    s->heard = clock_seconds();
    MHD_run(s->daemon);
}

/* Something that clients are to hear is on its way: in the engine, unless that is given up, or with
 * the workers, or back from either. */
static bool owes(struct server *s, bool engine)
{
    pthread_mutex_lock(&s->mutex);
    bool found = s->n_busy > 0 || s->ready || (engine && s->n_live > 0);
    for (int i = 0; i < N_JOBS; i++) found |= s->jobs[i].first || s->long_jobs[i].first;
    pthread_mutex_unlock(&s->mutex);
    return found;
}

/* Everybody who waits hears that the server stops: bodies under way and answers here, what lies
 * with the workers by them. What they are at comes to its end. Their clients' time begins only when
 * all of it has come. */
static void farewell(struct server *s)
{
    double now = clock_seconds(), deadline = now + farewell_s;
    double engine_deadline = now + s->options.stopped_s;
    for (int n = 0; s->exchanges && (n < FAREWELL_TURNS || now < deadline); n++) {
        /* each time: some are submitted only now */
        for (struct exchange *x = s->exchanges; x; x = x->next) {
            exchange_cancel(x, false);
            if (atomic_load(&x->stage) == STAGE_RECEIVING) http_refuse_body(x);
        }
        s->next_tick = 0;
        turn(s);
        now = clock_seconds();
        if (!owes(s, now < engine_deadline)) continue;
        n = 0;
        deadline = now + farewell_s;
    }
}

static void *loop_main(void *arg)
{
    struct server *s = arg;
    while (!atomic_load(&s->stopping)) turn(s);
    farewell(s);
    s->closing = true;
    for (struct exchange *x = s->exchanges; x; x = x->next) {
        exchange_cancel(x, true);
        http_resume(x); /* none may be suspended when the daemon stops */
    }
    MHD_run(s->daemon);
    MHD_stop_daemon(s->daemon);
    s->daemon = NULL;
    return NULL;
}

/* ---- life ---------------------------------------------------------------------------------- */

/* A copy of a text that lives as long as the server; NULL for NULL. */
static const char *keep(struct server *s, const char *text, bool *failed)
{
    char *copy = text ? mem_string(text, strlen(text)) : NULL;
    if (!copy) {
        *failed |= text != NULL;
        return NULL;
    }
    char **grown = mem_resize(s->strings, s->n_strings + 1, sizeof *grown);
    if (!grown) {
        free(copy);
        *failed = true;
        return NULL;
    }
    s->strings = grown;
    grown[s->n_strings++] = copy;
    return copy;
}

static const char **keep_list(struct server *s, const char *const *list, size_t n, bool *failed)
{
    const char **copy = mem_new(n, sizeof *copy);
    if (!copy) *failed = true;
    for (size_t i = 0; copy && i < n; i++) copy[i] = keep(s, list[i], failed);
    return copy;
}

static linnet_status copy_options(struct server *s, const struct server_options *in,
                                  linnet_error *err)
{
    enum { USUAL_BODY = 8 << 20, BODIES = 32 };
    struct server_options *o = &s->options;
    bool failed = false;
    *o = *in;
    o->names = keep_list(s, in->names, in->n_names, &failed);
    o->keys = keep_list(s, in->keys, in->n_keys, &failed);
    o->cors_origins = keep_list(s, in->cors_origins, in->n_cors_origins, &failed);
    o->key_file = keep(s, in->key_file, &failed);
    o->tls_certificate = keep(s, in->tls_certificate, &failed);
    o->tls_key = keep(s, in->tls_key, &failed);
    if (!o->max_connections) o->max_connections = 4096;
    if (!o->max_queue_requests) o->max_queue_requests = 1024;
    if (!o->max_queue_tokens) o->max_queue_tokens = 4 << 20;
    if (!o->max_body) o->max_body = USUAL_BODY;
    if (!o->max_memory)
        o->max_memory = BODIES * (o->max_body > USUAL_BODY ? o->max_body : USUAL_BODY);
    if (o->header_s <= 0) o->header_s = 20;
    if (o->idle_s <= 0) o->idle_s = 75;
    if (o->body_s <= 0) o->body_s = 30;
    if (o->stall_s <= 0) o->stall_s = 120;
    if (o->reply_slowest <= 0) o->reply_slowest = 64 << 10;
    if (o->crowded_s <= 0) o->crowded_s = 5;
    if (o->ping_s <= 0) o->ping_s = 15;
    if (o->stopped_s <= 0) o->stopped_s = 120;
    return failed ? error_set(err, LINNET_MEMORY, "out of memory: the server's options")
                  : LINNET_OK;
}

/* Room for a socket a connection, as far as the system gives it. */
static void fit_connections(struct server *s)
{
    enum { OTHERS = 64 };
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    rlim_t want = (rlim_t)s->options.max_connections + OTHERS;
    if (limit.rlim_cur < want) {
        limit.rlim_cur = limit.rlim_max < want ? limit.rlim_max : want;
        setrlimit(RLIMIT_NOFILE, &limit);
        getrlimit(RLIMIT_NOFILE, &limit);
    }
    if (limit.rlim_cur < want && limit.rlim_cur > OTHERS + 1)
        s->options.max_connections = (int32_t)(limit.rlim_cur - OTHERS);
}

static linnet_status open_loop(struct server *s, linnet_error *err)
{
    struct epoll_event event = {.events = EPOLLIN};
    s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    s->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (s->epoll_fd < 0 || s->wake_fd < 0)
        return error_set(err, LINNET_IO, "the server's event queue: %s", strerror(errno));
    s->daemon = http_start(s, err);
    if (!s->daemon) return err ? err->status : LINNET_IO;
    int theirs = MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    if (epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, s->wake_fd, &event) != 0 ||
        epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, theirs, &event) != 0)
        return error_set(err, LINNET_IO, "the server's event queue: %s", strerror(errno));
    return LINNET_OK;
}

static linnet_status start_threads(struct server *s, linnet_error *err)
{
    for (; s->n_workers < N_WORKERS; s->n_workers++)
        if (thread_start(&s->workers[s->n_workers], worker_main, s) != 0)
            return error_set(err, LINNET_MEMORY, "the system gives no thread to the server");
    s->has_loop = thread_start(&s->loop_thread, loop_main, s) == 0;
    return s->has_loop ? LINNET_OK
                       : error_set(err, LINNET_MEMORY, "the system gives no thread to the server");
}

linnet_status server_start(const struct server_options *options, int fd, struct server **out,
                           linnet_error *err)
{
    struct server *s = mem_new(1, sizeof *s);
    linnet_error mine;
    if (!err) err = &mine;
    if (!s) {
        close(fd);
        return error_memory(err, "the server", sizeof *s);
    }
    s->listen_fd = fd;
    s->epoll_fd = s->wake_fd = -1;
    s->mean_answer = 128;
    atomic_init(&s->crowded_at, -INFINITY);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&s->idle, &monotonic);
    pthread_condattr_destroy(&monotonic);
    metrics_init(&s->metrics);
    linnet_status status = copy_options(s, options, err);
    if (!status) status = keys_load(s, err);
    if (!status) fit_connections(s);
    if (!status) status = open_loop(s, err);
    if (!status) status = start_threads(s, err);
    if (status) {
        server_stop(s);
        server_free(s);
        return status;
    }
    *out = s;
    return LINNET_OK;
}

linnet_status server_attach(struct server *s, linnet_model *model, linnet_engine *engine,
                            linnet_error *err)
{
    s->model = model;
    linnet_model_get_info(model, &s->info);
    linnet_engine_get_plan(engine, &s->plan);
    if (!s->info.has_tokenizer)
        return error_set(err, LINNET_UNSUPPORTED, "%s has no tokenizer: it cannot be served",
                         s->info.name);
    atomic_store(&s->engine, engine);
    return LINNET_OK;
}

linnet_status server_reload_keys(struct server *s, linnet_error *err)
{
    return keys_load(s, err);
}

void server_drain(struct server *s)
{
    atomic_store(&s->draining, true);
}

bool server_wait_idle(struct server *s, double seconds)
{
    double until = clock_seconds() + seconds;
    struct timespec when = {.tv_sec = (time_t)until,
                            .tv_nsec = (long)((until - floor(until)) * 1e9)};
    int late = 0;
    pthread_mutex_lock(&s->mutex);
    while (atomic_load(&s->n_working) > 0 && !late)
        late = pthread_cond_timedwait(&s->idle, &s->mutex, &when);
    bool idle = atomic_load(&s->n_working) == 0;
    pthread_mutex_unlock(&s->mutex);
    return idle;
}

void server_stop(struct server *s)
{
    server_drain(s);
    pthread_mutex_lock(&s->mutex);
    atomic_store(&s->stopping, true);
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->mutex);
    if (s->has_loop) {
        wake_loop(s);
        pthread_join(s->loop_thread, NULL);
    } else if (s->daemon) {
        MHD_stop_daemon(s->daemon);
    }
    s->has_loop = false;
    s->daemon = NULL;
    pthread_mutex_lock(&s->mutex);
    s->workers_stop = true;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->mutex);
    while (s->n_workers > 0) pthread_join(s->workers[--s->n_workers], NULL);
}

static void release_jobs(struct jobs *jobs)
{
    for (struct exchange *x = jobs->first, *next; x; x = next) {
        next = x->next_job;
        exchange_release(x);
    }
}

void server_free(struct server *s)
{
    if (!s) return;
    for (struct exchange *x = s->ready, *next; x; x = next) {
        next = x->next_ready;
        exchange_release(x);
    }
    for (int i = 0; i < N_JOBS; i++) {
        release_jobs(&s->jobs[i]);
        release_jobs(&s->long_jobs[i]);
    }
    if (s->epoll_fd >= 0) close(s->epoll_fd);
    if (s->wake_fd >= 0) close(s->wake_fd);
    if (s->listen_fd >= 0) close(s->listen_fd);
    for (size_t i = 0; i < s->n_strings; i++) {
        explicit_bzero(s->strings[i], strlen(s->strings[i])); /* some are keys */
        free(s->strings[i]);
    }
    free(s->strings);
    free((void *)(uintptr_t)s->options.names);
    free((void *)(uintptr_t)s->options.keys);
    free((void *)(uintptr_t)s->options.cors_origins);
    if (s->keys) explicit_bzero(s->keys, s->n_keys * sizeof *s->keys);
    free(s->keys);
    metrics_free(&s->metrics);
    pthread_cond_destroy(&s->work);
    pthread_cond_destroy(&s->idle);
    pthread_mutex_destroy(&s->mutex);
    free(s);
}
