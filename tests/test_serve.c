/*
 * `linnet serve` as people run it: its one line, signals, systemd's two protocols, TLS, and what it
 * says when it cannot start.
 */
#include "http_client.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "scratch.h"

static const char program[] = LINNET_BINARY_DIR "/linnet";
static const char quick[] = "{\"prompt\":[40,41],\"max_tokens\":2,\"ignore_eos\":true}";
static struct answered a;
static char folder[64];

struct running {
    pid_t pid;
    int out;          /* its standard output */
    struct site site; /* where it listens */
    char line[512];
};

/* `socket` becomes file descriptor 3 with the variables of socket activation; -1: none. */
static void start_with(struct running *r, int socket, const char *notify, const char *const *words)
{
    int ends[2];
    *r = (struct running){.pid = 0};
    assert_int_equal(pipe(ends), 0);
    r->pid = fork();
    assert_true(r->pid >= 0);
    if (r->pid == 0) {
        const char *argv[32] = {program, "serve", "-m", data_path("qwen3-tiny"), "-t", "1"};
        for (int i = 0; words[i]; i++) argv[i + 6] = words[i];
        dup2(ends[1], STDOUT_FILENO);
        /* two servers may write to it: each at the end */
        dup2(open(scratch_path(folder, "err"), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600),
             STDERR_FILENO);
        if (socket >= 0) {
            char pid[16];
            snprintf(pid, sizeof pid, "%d", (int)getpid());
            setenv("LISTEN_PID", pid, 1);
            setenv("LISTEN_FDS", "1", 1);
            if (socket != 3) dup2(socket, 3);
        }
        if (notify) setenv("NOTIFY_SOCKET", notify, 1);
        execv(program, (char *const *)(uintptr_t)argv);
        _exit(99);
    }
    close(ends[1]);
    r->out = ends[0];
}

/* Waits for its line. */
static void await_ready(struct running *r)
{
    size_t n = 0;
    while (n + 1 < sizeof r->line && read(r->out, r->line + n, 1) == 1 && r->line[n] != '\n') n++;
    r->line[n] = 0;
    const char *at = strstr(r->line, " at ");
    if (!at) fail_msg("it said '%s': %s", r->line, load_file(scratch_path(folder, "err"), &n));
    if (strncmp(at + 4, "unix:", 5) == 0)
        snprintf(r->site.path, sizeof r->site.path, "%.107s", at + 9);
    else
        r->site.port = (int)strtol(strrchr(r->line, ':') + 1, NULL, 10);
}

static int end(struct running *r)
{
    int status;
    assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
    close(r->out);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void assert_said(const char *words)
{
    size_t n;
    char *text = load_file(scratch_path(folder, "err"), &n);
    assert_holds(text, words);
    free(text);
}

static void await_said(const char *words)
{
    for (double end = clock_seconds() + 300; clock_seconds() < end; usleep(2000)) {
        char *text = load_file(scratch_path(folder, "err"), NULL);
        bool said = strstr(text, words) != NULL;
        free(text);
        if (said) return;
    }
    fail_msg("it does not say: %s", words);
}

static void await_draining(struct running *r)
{
    for (double end = clock_seconds() + 300; clock_seconds() < end; usleep(2000)) {
        ask(&r->site, "GET", "/health", NULL, &a);
        if (a.status == 503) return;
    }
    fail_msg("the server does not drain");
}

#define WORDS(...)        \
    (const char *const[]) \
    {                     \
        __VA_ARGS__, NULL \
    }
#define START(r, ...) start_with(r, -1, NULL, WORDS(__VA_ARGS__))
#define FAILS(code, words, ...)                \
    do {                                       \
        struct running failing;                \
        START(&failing, __VA_ARGS__);          \
        assert_int_equal(end(&failing), code); \
        assert_said(words);                    \
    } while (0)

/* The status that a command with curl writes. */
static void assert_curl(const char *command, int status)
{
    char line[64] = "";
    FILE *f = popen(command, "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    pclose(f);
    assert_int_equal(strtol(line, NULL, 10), status);
}

static void answers_and_stops(void **state)
{
    (void)state;
    struct running r;
    START(&r, "--port", "0", "--served-model-name", "tiny", "--log-format", "json");
    await_ready(&r);
    assert_holds(r.line, "linnet: serving qwen3-tiny at http://127.0.0.1:");
    ask(&r.site, "POST", "/v1/completions", quick, &a);
    assert_status(&a, 200);
    assert_holds(strbuf_cstr(&a.body), "\"model\":\"tiny\"");
    kill(r.pid, SIGTERM);
    assert_int_equal(end(&r), 0);
    assert_said("\"route\":\"/v1/completions\"");
}

/* curl sends a long body only after it was told to. */
static void long_body_of_curl(void **state)
{
    (void)state;
    struct running r;
    char command[512];
    if (system("command -v curl >/dev/null") != 0) skip();
    START(&r, "--port", "0");
    await_ready(&r);
    snprintf(command, sizeof command,
             "head -c 100000 /dev/zero | tr '\\0' x | sed 's/.*/{\"prompt\":\"&\"}/' | curl -s -o "
             "/dev/null -w '%%{http_code}' -H 'Expect: 100-continue' --data-binary @- --max-time "
             "120 http://127.0.0.1:%d/tokenize",
             r.site.port);
    assert_curl(command, 200);
    kill(r.pid, SIGTERM);
    assert_int_equal(end(&r), 0);
}

/* The first SIGTERM lets an answer end, within the time; the second does not. */
static void terminate_twice(void **state)
{
    (void)state;
    static const char body[] = "{\"prompt\":[40],\"max_tokens\":30000,\"ignore_eos\":true,"
                               "\"stream\":true,\"logit_bias\":{\"470\":1000}}"; /* no text */
    for (int twice = 0; twice < 2; twice++) {
        struct running r;
        START(&r, "--port", "0", "--drain-timeout", twice ? "600" : "0.2");
        await_ready(&r);
        int fd = client_open(&r.site);
        client_ask(fd, "POST", "/v1/completions", "", body);
        assert_true(client_head(fd, &a));
        double begun = clock_seconds();
        kill(r.pid, SIGTERM);
        if (twice) {
            await_draining(&r); /* two signals at once are one */
            kill(r.pid, SIGTERM);
        }
        char line[4096];
        bool told = false;
        while (client_line(fd, line, sizeof line)) told |= strstr(line, "shutting down") != NULL;
        assert_true(told);
        assert_int_equal(end(&r), 0);
        assert_true(clock_seconds() - begun < 300); /* not the 600 */
        close(fd);
    }
}

static void keys_from_a_file(void **state)
{
    (void)state;
    struct running r;
    scratch_text(folder, "keys", "first\n");
    START(&r, "--port", "0", "--api-key-file", scratch_path(folder, "keys"));
    await_ready(&r);
    ask_with(&r.site, "GET", "/v1/models", "Authorization: Bearer first\r\n", NULL, &a);
    assert_status(&a, 200);
    scratch_text(folder, "keys", "second\n");
    kill(r.pid, SIGHUP);
    for (int i = 0; i < 1000; i++) {
        ask_with(&r.site, "GET", "/v1/models", "Authorization: Bearer second\r\n", NULL, &a);
        if (a.status == 200) break;
        usleep(10000);
    }
    assert_status(&a, 200);
    unlink(scratch_path(folder, "keys"));
    kill(r.pid, SIGHUP); /* nothing to read: they stay */
    await_said("the keys stay as they were");
    ask_with(&r.site, "GET", "/v1/models", "Authorization: Bearer second\r\n", NULL, &a);
    assert_status(&a, 200);
    kill(r.pid, SIGINT);
    assert_int_equal(end(&r), 0);
    assert_said("the keys were read again");
}

static void socket_file(void **state)
{
    (void)state;
    struct running r;
    const char *path = scratch_path(folder, "sock");
    START(&r, "--unix-socket", path);
    await_ready(&r);
    ask(&r.site, "POST", "/v1/completions", quick, &a);
    assert_status(&a, 200);
    FAILS(1, "is another server running?", "--unix-socket", path);
    kill(r.pid, SIGTERM);
    assert_int_equal(end(&r), 0);
    assert_int_not_equal(access(path, F_OK), 0);
}

static void systemd(void **state)
{
    (void)state;
    struct running r;
    linnet_error err;
    char address[SERVER_ADDRESS_SIZE], text[128];
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = 30};
    int fd, notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    snprintf(to.sun_path, sizeof to.sun_path, "%s", scratch_path(folder, "notify"));
    assert_int_equal(bind(notify, (struct sockaddr *)&to, sizeof to), 0);
    setsockopt(notify, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    assert_ok(server_listen("127.0.0.1", 0, &fd, address, &err), err);
    start_with(&r, fd, to.sun_path, WORDS("--port", "1"));
    close(fd);
    await_ready(&r);
    assert_holds(r.line, address);
    ssize_t n = recv(notify, text, sizeof text - 1, 0);
    assert_true(n > 0);
    text[n] = 0;
    assert_string_equal(text, "READY=1");
    ask(&r.site, "POST", "/v1/completions", quick, &a);
    assert_status(&a, 200);
    kill(r.pid, SIGTERM);
    n = recv(notify, text, sizeof text - 1, 0);
    assert_true(n > 0);
    text[n] = 0;
    assert_string_equal(text, "STOPPING=1");
    assert_int_equal(end(&r), 0);
    close(notify);
}

/* systemd itself finds no fault with the unit, where it is installed. */
static void unit_is_sound(void **state)
{
    (void)state;
    char command[1024];
    const char *unit = scratch_path(folder, "linnet.service");
    snprintf(command, sizeof command, "sed 's|/usr/bin/linnet|%s|' %s/contrib/linnet.service > %s",
             program, LINNET_SOURCE_DIR, unit);
    assert_int_equal(system(command), 0);
    size_t n;
    char *text = load_file(unit, &n);
    assert_holds(text, "Type=notify");
    assert_holds(text, program);
    free(text);
    if (system("command -v systemd-analyze >/dev/null") != 0) skip();
    snprintf(command, sizeof command, "systemd-analyze verify --man=no %s 2>&1", unit);
    assert_int_equal(system(command), 0);
}

static void encrypted(void **state)
{
    (void)state;
    struct running r;
    char command[1024];
    const char *key = scratch_path(folder, "key.pem"), *pem = scratch_path(folder, "cert.pem");
    snprintf(command, sizeof command,
             "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "
             "/CN=localhost -days 2 -keyout %s -out %s 2>/dev/null",
             key, pem);
    if (system("command -v openssl >/dev/null && command -v curl >/dev/null") != 0) skip();
    assert_int_equal(system(command), 0);
    START(&r, "--port", "0", "--tls-certificate", pem, "--tls-key", key);
    await_ready(&r);
    assert_holds(r.line, " at https://127.0.0.1:");
    snprintf(command, sizeof command,
             "curl -s -k -o /dev/null -w '%%{http_code}' --max-time 120 -d '%s' "
             "https://127.0.0.1:%d/v1/completions",
             quick, r.site.port);
    assert_curl(command, 200);
    kill(r.pid, SIGTERM);
    assert_int_equal(end(&r), 0);
}

static void what_cannot_start(void **state)
{
    (void)state;
    linnet_error err;
    char address[SERVER_ADDRESS_SIZE];
    const char *port = NULL;
    int fd;
    assert_ok(server_listen("127.0.0.1", 0, &fd, address, &err), err);
    port = strrchr(address, ':') + 1;
    FAILS(1, "is another server running? --port takes another one", "--port", port);
    close(fd);
    FAILS(1, "cannot listen on 192.0.2.1 port 0", "--host", "192.0.2.1", "--port", "0");
    FAILS(1, "/nowhere/keys: the keys cannot be read", "--port", "0", "--api-key-file",
          "/nowhere/keys");
    FAILS(2, "printable characters without blanks", "--port", "0", "--api-key", "a b");
    scratch_text(folder, "no.pem", "nonsense");
    scratch_text(folder, "bad.pem",
                 "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    FAILS(1, "/nowhere/c: No such file", "--port", "0", "--tls-certificate", "/nowhere/c",
          "--tls-key", "/nowhere/k");
    FAILS(1, "expected a PEM file", "--port", "0", "--tls-certificate",
          scratch_path(folder, "no.pem"), "--tls-key", scratch_path(folder, "no.pem"));
    FAILS(1, "is the key the certificate's?", "--port", "0", "--tls-certificate",
          scratch_path(folder, "bad.pem"), "--tls-key", scratch_path(folder, "bad.pem"));
    FAILS(2, "a socket file has no port", "--unix-socket", "/tmp/x", "--port", "1");
    FAILS(1, "cannot listen on", "--unix-socket", "/nowhere/s");
}

static void warns_of_strangers(void **state)
{
    (void)state;
    struct running r;
    START(&r, "--host", "0.0.0.0", "--port", "0");
    await_ready(&r);
    kill(r.pid, SIGTERM);
    assert_int_equal(end(&r), 0);
    assert_said("warning: other machines can reach");
}

/* A model that cannot be loaded ends the server that already listens. */
static void model_is_missing(void **state)
{
    (void)state;
    FAILS(1, "/nowhere/model", "--port", "0", "-m", "/nowhere/model");
    struct running r;
    START(&r, "--dry-run");
    assert_int_equal(end(&r), 0);
}

/* The reference answer of the cases, with its numbers (cases H02, D02, S02). */
static void the_real_model(void **state)
{
    (void)state;
    static const char question[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"What is the capital of Japan?\"}],"
        "\"temperature\":0%s}";
    static const struct {
        const char *more, *text;
    } cases[] = {
        {"", "The capital of Japan is Tokyo."},
        {",\"stop\":[\"of Jap\"]", "The capital "},
        {",\"stop\":[\"of Jap\",\"capital of Japan\",\"of\"]", "The capital "},
        {",\"stop\":[\"The\"]", ""},
    };
    if (!smollm2_path()) skip();
    struct running r;
    char body[512];
    START(&r, "-m", smollm2_path(), "--port", "0", "-c", "1024");
    await_ready(&r);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct streamed s;
        char more[256];
        snprintf(more, sizeof more,
                 "%s,\"stream\":true,\"stream_options\":{\"include_usage\":true}", cases[i].more);
        snprintf(body, sizeof body, question, more);
        ask(&r.site, "POST", "/v1/chat/completions", body, &a);
        assert_status(&a, 200);
        streamed_read(&s, &a.body);
        assert_string_equal(strbuf_cstr(&s.text[0]), cases[i].text);
        assert_string_equal(json_string_value(s.finish[0]), "stop");
        assert_int_equal(json_integer_value(json_object_get(s.usage, "prompt_tokens")), 37);
        if (i == 0) {
            assert_int_equal(json_integer_value(json_object_get(s.usage, "completion_tokens")), 8);
            assert_int_equal(json_integer_value(json_object_get(s.usage, "total_tokens")), 45);
        }
        streamed_free(&s);
    }
    static const char *const odd[] = {"{\"49152\":5}", "{\"4294967296\":5}", "{\"-1\":5}",
                                      "{\"x\":1}",     "{\"504\":\"a\"}",    "[]"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        char more[64];
        snprintf(more, sizeof more, ",\"logit_bias\":%s", odd[i]);
        snprintf(body, sizeof body, question, more);
        ask(&r.site, "POST", "/v1/chat/completions", body, &a);
        assert_status(&a, 400);
        assert_holds(strbuf_cstr(&a.body), "\"param\":\"logit_bias\"");
    }
    kill(r.pid, SIGTERM);
    assert_int_equal(end(&r), 0);
}

static int make_folder(void **state)
{
    (void)state;
    snprintf(folder, sizeof folder, "%s", scratch_create());
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    strbuf_free(&a.body);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_and_stops), cmocka_unit_test(long_body_of_curl),
        cmocka_unit_test(terminate_twice),   cmocka_unit_test(keys_from_a_file),
        cmocka_unit_test(socket_file),       cmocka_unit_test(systemd),
        cmocka_unit_test(unit_is_sound),     cmocka_unit_test(encrypted),
        cmocka_unit_test(what_cannot_start), cmocka_unit_test(warns_of_strangers),
        cmocka_unit_test(model_is_missing),  cmocka_unit_test(the_real_model),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
