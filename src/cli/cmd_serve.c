/*
 * serve - the HTTP server. The main thread waits for signals; the model is opened on another, while
 * the server already answers (503, "loading").
 */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/threads.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/session.h"
#include "cli/systemd.h"
#include "serve/server.h"

struct service {
    const struct options *options;
    struct server *server;
    struct session session;
    char address[SERVER_ADDRESS_SIZE];
    bool local, activated; /* only this machine reaches it; systemd opened the socket */
    pthread_t loader, main;
    linnet_status loaded;
    linnet_error error;
};

/* Signals that the main thread takes with sigtimedwait; SIGUSR1 is the loader's word. One that was
 * ignored when the program started stays so. */
static void choose_signals(sigset_t *set)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction found;
    sigemptyset(set);
    sigaddset(set, SIGUSR1);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        if (sigaction(signals[i], NULL, &found) == 0 && found.sa_handler != SIG_IGN)
            sigaddset(set, signals[i]);
}

/* The next signal within so many seconds, 0 if there is none. */
static int next_signal(double seconds)
{
    sigset_t set;
    struct timespec wait = {.tv_sec = (time_t)seconds,
                            .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    choose_signals(&set);
    int number = sigtimedwait(&set, NULL, &wait);
    return number > 0 ? number : 0;
}

static void on_log(void *user, const char *line)
{
    struct strbuf text = {0};
    linnet_error err;
    (void)user;
    strbuf_format(&text, "%s\n", line);
    if (!text.failed) output_all(STDERR_FILENO, "the log", text.data, text.size, &err);
    strbuf_free(&text);
}

static linnet_status open_socket(struct service *v, int *fd, linnet_error *err)
{
    const struct options *o = v->options;
    char host[SERVER_ADDRESS_SIZE];
    linnet_status status = systemd_socket(fd, err);
    if (status) return status;
    if (*fd >= 0) {
        v->activated = true;
        status = server_describe(*fd, v->address, err);
    } else {
        snprintf(host, sizeof host, "%s%s", o->unix_socket ? "unix:" : "",
                 o->unix_socket ? o->unix_socket : o->host);
        status = server_listen(host, (int)o->port, fd, v->address, err);
    }
    if (status) return status;
    v->local = server_is_local(*fd);
    return LINNET_OK;
}

static linnet_status start(struct service *v, linnet_error *err)
{
    const struct options *o = v->options;
    int fd;
    linnet_status status = open_socket(v, &fd, err);
    if (status) return status;
    enum server_log format = SERVER_LOG_TEXT;
    if (o->log_format && strcmp(o->log_format, "json") == 0) format = SERVER_LOG_JSON;
    if (o->quiet || (o->log_format && strcmp(o->log_format, "none") == 0)) format = SERVER_LOG_NONE;
    struct server_options options = {.names = o->served_model_name.items,
                                     .n_names = o->served_model_name.n,
                                     .keys = o->api_key.items,
                                     .n_keys = o->api_key.n,
                                     .key_file = o->api_key_file,
                                     .cors_origins = o->cors_origin.items,
                                     .n_cors_origins = o->cors_origin.n,
                                     .tls_certificate = o->tls_certificate,
                                     .tls_key = o->tls_key,
                                     .max_connections = (int32_t)o->max_connections,
                                     .max_queue_requests = (int32_t)o->max_queue_requests,
                                     .max_queue_tokens = o->max_queue_tokens,
                                     .max_body = o->max_body,
                                     .log_format = format,
                                     .log = on_log};
    status = server_start(&options, fd, &v->server, err);
    if (status) return status;
    if (!v->local && !o->api_key.n && !o->api_key_file)
        output_note("warning: other machines can reach %s and no key is asked for: give "
                    "--api-key-file, or --host 127.0.0.1",
                    v->address);
    return LINNET_OK;
}

static void *load(void *arg)
{
    struct service *v = arg;
    linnet_engine_options engine = session_engine_options(v->options);
    struct session *s = &v->session;
    v->loaded = session_open(s, v->options, true, &v->error);
    if (!v->loaded) v->loaded = session_start(s, &engine, &v->error);
    if (!v->loaded) v->loaded = server_attach(v->server, s->model, s->engine, &v->error);
    pthread_kill(v->main, SIGUSR1);
    return NULL;
}

static void reload(struct service *v)
{
    linnet_error err;
    if (server_reload_keys(v->server, &err))
        output_note("the keys stay as they were: %s", err.message);
    else
        output_note("the keys were read again");
}

static const char *shown_address(const struct service *v, char text[SERVER_ADDRESS_SIZE + 1])
{
    bool tls = v->options->tls_key && strncmp(v->address, "http:", 5) == 0;
    snprintf(text, SERVER_ADDRESS_SIZE + 1, "%s%s", tls ? "https" : v->address,
             tls ? v->address + 4 : "");
    return text;
}

/* Until the model is there (true), or somebody asked us to stop. */
static bool await_model(struct service *v)
{
    char address[SERVER_ADDRESS_SIZE + 1];
    struct strbuf line = {0};
    for (;;) {
        int number = next_signal(3600);
        if (number == SIGTERM || number == SIGINT) return false;
        if (number == SIGHUP) reload(v);
        if (number == SIGUSR1) break;
    }
    pthread_join(v->loader, NULL);
    if (v->loaded) return true;
    strbuf_format(&line, "linnet: serving %s at %s\n", v->session.info.name,
                  shown_address(v, address));
    output_strbuf(&line);
    systemd_notify("READY=1");
    return true;
}

/* Serves until it is asked to stop, then lets what is at work end. */
static void serve(struct service *v)
{
    for (;;) {
        int number = next_signal(3600);
        if (number == SIGTERM || number == SIGINT) break;
        if (number == SIGHUP) reload(v);
    }
    systemd_notify("STOPPING=1");
    server_drain(v->server);
    double deadline = clock_seconds() + v->options->drain_timeout;
    while (!server_wait_idle(v->server, 0.05) && clock_seconds() < deadline) {
        int number = next_signal(0);
        if (number == SIGTERM || number == SIGINT) return; /* asked twice */
    }
}

static void remove_socket(const struct service *v)
{
    if (v->options->unix_socket && !v->activated) unlink(v->options->unix_socket);
}

int command_serve(const struct options *options)
{
    struct service v = {.options = options, .main = pthread_self()};
    linnet_error err;
    sigset_t signals;
    if (options->dry_run) {
        linnet_engine_options engine = session_engine_options(options);
        linnet_status status = session_open(&v.session, options, true, &err);
        int code = status ? output_error(&err) : session_dry_run(&v.session, &engine);
        session_close(&v.session);
        return code;
    }
    choose_signals(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    linnet_status status = start(&v, &err);
    if (status) return output_error(&err);
    if (thread_start(&v.loader, load, &v) != 0) {
        error_set(&err, LINNET_MEMORY, "the system gives no thread to the loader");
        v.loaded = LINNET_MEMORY;
        v.error = err;
    } else if (!await_model(&v)) { /* a load cannot be interrupted: nothing is at work yet */
        systemd_notify("STOPPING=1");
        remove_socket(&v);
        _exit(EXIT_DONE);
    }
    if (!v.loaded) serve(&v);
    server_stop(v.server);
    remove_socket(&v);
    session_close(&v.session); /* its last events go to the server */
    server_free(v.server);
    return v.loaded ? output_error(&v.error) : EXIT_DONE;
}
