/*
 * The program as people run it: exit codes, what goes to which stream, closed pipes, full disks,
 * Ctrl-C. The second half talks to SmolLM2-135M-Instruct where it is installed (script/get-model).
 */
#include "program.h"

#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <termios.h>
#include <time.h>

static const char question[] = "What is the capital of Japan?";

static void usage(void **state)
{
    (void)state;
    RUN(NULL, "--help");
    assert_code(0);
    assert_contains(result.out, "usage: linnet COMMAND");
    assert_string_equal(result.err, "");
    RUN(NULL, "run", "--help");
    assert_code(0);
    assert_contains(result.out, "--temperature");
    RUN(NULL, "--version");
    assert_code(0);
    assert_string_equal(result.out, "linnet " LINNET_VERSION "\n");
    RUN(NULL, "run", "--temprature", "0", "x");
    assert_code(2);
    assert_contains(result.err, "did you mean '--temperature'?");
    assert_string_equal(result.out, "");
    RUN(NULL, "runn");
    assert_code(2);
    assert_contains(result.err, "did you mean 'run'?");
    RUN(NULL, "run", "--top-p", "2", "x");
    assert_code(2);
    assert_int_equal(RUN(NULL, "help", "run"), 0);
    assert_contains(result.out, "--temperature");
    /* before any model is looked for */
    assert_int_equal(RUN(NULL, "inspect", "-m", "/nowhere/a", "/nowhere/b"), 2);
    assert_int_equal(RUN(NULL, "check", "-m", "/nowhere/a", "/nowhere/b"), 2);
    assert_int_equal(RUN(NULL, "run", "-m", "/nowhere/a", "-c", "1", "x"), 2);
    assert_int_equal(RUN(NULL, "run", "--raw", "--system", "s", "--help"), 0);
    assert_int_equal(RUN(NULL, "serve", "--port", "70000"), 2);
    assert_int_equal(RUN(NULL, "serve", "--tls-key", "k"), 2);
}

static void generated_texts(void **state)
{
    (void)state;
    RUN(NULL, "generate", "man");
    assert_code(0);
    assert_contains(result.out, ".TH LINNET 1");
    RUN(NULL, "generate", "bash");
    assert_code(0);
    FILE *f = popen("bash", "w"); /* options before the command, blanks in names */
    assert_non_null(f);
    fputs(result.out, f);
    fputs(
        "\nCOMP_WORDS=(linnet -t 2 -m run ch) COMP_CWORD=5; _linnet; [ $COMPREPLY = chat ] || exit "
        "1\n"
        "COMP_WORDS=(linnet -q run --temp) COMP_CWORD=3; _linnet; [ $COMPREPLY = --temperature ] "
        "|| exit 2\n"
        "d=$(mktemp -d) && cd $d && : >'a b' && COMP_WORDS=(linnet batch a) COMP_CWORD=2; _linnet\n"
        "rm -r $d; [ \"${COMPREPLY[0]}\" = 'a b' ] || exit 3\n",
        f);
    assert_int_equal(pclose(f), 0);
    RUN(NULL, "generate", "zsh");
    assert_code(0);
    assert_contains(result.out, "#compdef linnet");
    assert_int_equal(RUN(NULL, "generate", "fish"), 2);
}

static void missing_files(void **state)
{
    (void)state;
    RUN(NULL, "run", "-m", "/nowhere/model.gguf", "x");
    assert_code(1);
    assert_contains(result.err, "/nowhere/model.gguf");
    RUN(NULL, "run", "-f", "/nowhere/prompt", "--raw");
    assert_code(1);
    assert_contains(result.err, "/nowhere/prompt");
    assert_int_equal(RUN(NULL, "batch", "/nowhere/in"), 1);
    assert_int_equal(RUN_INTO("/dev/full", "--help"), 1);
    assert_string_equal(result.out, "");
}

/* ---- with the real model ------------------------------------------------------------------- */

static void check_integers(const json_t *list, const int *expected, size_t n)
{
    assert_int_equal(json_array_size(list), n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(json_integer_value(json_array_get(list, i)), expected[i]);
}

static const int answer_ids[] = {504, 3575, 282, 3085, 314, 19081, 30, 2};

static void capital_of_japan(void **state)
{
    (void)state;
    RUN(NULL, "run", "--temperature", "0", "--json", "--logprobs", "2", question);
    assert_code(0);
    json_t *json = output_json();
    const char *text = json_string_value(json_object_get(json, "text"));
    assert_string_equal(text, "The capital of Japan is Tokyo.");
    check_integers(json_object_get(json, "token_ids"), answer_ids, 8);
    assert_int_equal(json_array_size(json_object_get(json, "prompt_token_ids")), 37);
    assert_string_equal(json_string_value(json_object_get(json, "finish_reason")), "stop");
    json_t *usage_json = json_object_get(json, "usage"),
           *timings = json_object_get(json, "timings");
    assert_int_equal(json_integer_value(json_object_get(usage_json, "prompt_tokens")), 37);
    assert_int_equal(json_integer_value(json_object_get(usage_json, "completion_tokens")), 8);
    assert_int_equal(json_integer_value(json_object_get(usage_json, "total_tokens")), 45);
    static const char *const names[] = {"load_s",   "ttft_s",        "prefill_s",
                                        "decode_s", "prefill_tok_s", "decode_tok_s"};
    for (size_t i = 0; i < 6; i++)
        assert_true(json_real_value(json_object_get(timings, names[i])) > 0);
    json_t *logprobs = json_object_get(json, "logprobs");
    assert_int_equal(json_array_size(logprobs), 8);
    for (size_t i = 0; i < 8; i++) {
        json_t *entry = json_array_get(logprobs, i), *top = json_object_get(entry, "top");
        assert_int_equal(json_integer_value(json_object_get(entry, "id")), answer_ids[i]);
        assert_int_equal(json_array_size(top), 2);
        json_t *first = json_array_get(top, 0), *second = json_array_get(top, 1);
        assert_int_equal(json_integer_value(json_array_get(first, 0)), answer_ids[i]);
        assert_true(json_real_value(json_array_get(first, 1)) ==
                    json_real_value(json_object_get(entry, "logprob")));
        assert_true(json_real_value(json_array_get(first, 1)) >
                    json_real_value(json_array_get(second, 1)));
    }
    json_decref(json);
}

static void streams_alone_on_stdout(void **state)
{
    (void)state;
    RUN(NULL, "run", "--temperature", "0", question);
    assert_code(0);
    assert_string_equal(result.out, "The capital of Japan is Tokyo.\n");
    assert_string_equal(result.err, "");
    RUN("What is the capital of Japan?\n", "run", "--temperature=0", "-v");
    assert_code(0);
    assert_string_equal(result.out, "The capital of Japan is Tokyo.\n");
    assert_contains(result.err, "tokens/s");
    RUN("What is the capital of Japan?\n", "run", "--temperature=0", "-");
    assert_string_equal(result.out, "The capital of Japan is Tokyo.\n");
    RUN(NULL, "run", "--temperature", "0", "-n3", question);
    assert_string_equal(result.out, "The capital of\n");
}

/* D02: text that was stopped at never shows, not even its first half. */
static void stop_strings(void **state)
{
    (void)state;
    RUN(NULL, "run", "--temperature", "0", "--stop", "of Jap", question);
    assert_code(0);
    assert_string_equal(result.out, "The capital \n");
    RUN(NULL, "run", "--temperature", "0", "--stop", "of Jap", "--stop", "capital of Japan",
        "--stop", "of", question);
    assert_string_equal(result.out, "The capital \n");
    RUN(NULL, "run", "--temperature", "0", "--json", "--stop", "The", question);
    assert_code(0);
    json_t *json = output_json();
    assert_string_equal(json_string_value(json_object_get(json, "text")), "");
    assert_string_equal(json_string_value(json_object_get(json, "finish_reason")), "stop");
    json_decref(json);
}

static void several_answers(void **state)
{
    (void)state;
    RUN(NULL, "run", "--temperature", "0", "--json", "--answers", "3", question);
    assert_code(0);
    json_t *json = output_json(), *choices = json_object_get(json, "choices"), *choice;
    size_t i;
    assert_int_equal(json_array_size(choices), 3);
    json_array_foreach(choices, i, choice)
        check_integers(json_object_get(choice, "token_ids"), answer_ids, 8);
    json_t *usage_json = json_object_get(json, "usage");
    assert_int_equal(json_integer_value(json_object_get(usage_json, "completion_tokens")), 24);
    json_decref(json);
}

static void raw_and_ids(void **state)
{
    (void)state;
    static const char counting[] = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17";
    RUN(NULL, "run", "--raw", "--temperature", "0", "-n", "8", "--json", counting);
    assert_code(0);
    json_t *json = output_json();
    assert_string_equal(json_string_value(json_object_get(json, "text")), " 18 19 2");
    json_t *ids = json_object_get(json, "prompt_token_ids");
    assert_int_equal(json_array_size(ids), 41);
    char *list = json_dumps(ids, JSON_COMPACT);
    json_decref(json);
    RUN(NULL, "run", "--prompt-ids", list, "--temperature", "0", "-n", "8");
    assert_code(0);
    assert_string_equal(result.out, " 18 19 2\n");
    free(list);
    assert_int_equal(RUN(NULL, "run", "--prompt-ids", "49152"), 2);
    assert_int_equal(RUN(NULL, "run", "--raw", ""), 2);
}

static void too_long(void **state)
{
    (void)state;
    RUN(NULL, "run", "-c", "32", "--temperature", "0", question);
    assert_code(1);
    assert_contains(result.err, "37");
    assert_contains(result.err, "32");
    assert_string_equal(result.out, "");
}

static void broken_outputs(void **state)
{
    (void)state;
    RUN_INTO("/dev/full", "run", "--temperature", "0", question);
    assert_code(1);
    assert_contains(result.err, "No space left");
    RUN_INTO("/dev/full", "run", "--temperature", "0", "--json", question);
    assert_code(1);
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    close(ends[0]); /* who reads has left */
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], STDOUT_FILENO);
        dup2(open(err_path, O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
        execl(program, "linnet", "run", "-n", "8", "--temperature", "0", "hello", NULL);
        _exit(99);
    }
    close(ends[1]);
    finish(pid);
    assert_code(1);
    assert_contains(result.err, "Broken pipe");
}

/* Waits until the answer has begun, so that the signal meets a running request. */
static void await_output(void)
{
    const struct timespec pause = {0, 10000000};
    for (int i = 0; i < 24000; i++) {
        slurp(out_path, result.out, sizeof result.out);
        if (result.out[0]) return;
        nanosleep(&pause, NULL);
    }
    fail_msg("no output in 240 s");
}

static void interrupted(void **state)
{
    (void)state;
    static const char *const words[] = {"run", "--ignore-eos", "-n", "4000", "--temperature",
                                        "0",   "hello",        NULL};
    pid_t pid = start(NULL, NULL, words);
    await_output();
    kill(pid, SIGINT);
    finish(pid);
    assert_code(130);
    assert_true(result.out[0] != 0);
}

static void tokenize(void **state)
{
    (void)state;
    static const char sentence[] = "The capital of Japan is Tokyo.";
    RUN(NULL, "tokenize", "--json", sentence);
    assert_code(0);
    json_t *json = output_json();
    check_integers(json_object_get(json, "ids"), answer_ids, 7); /* without its end token */
    json_decref(json);
    RUN(sentence, "tokenize");
    assert_string_equal(result.out, "504 3575 282 3085 314 19081 30\n");
    RUN("504 3575 282 3085 314 19081 30\n", "tokenize", "--decode");
    assert_code(0);
    assert_string_equal(result.out, sentence);
    RUN(NULL, "tokenize", "--decode", "3575", "282");
    assert_string_equal(result.out, " capital of");
    RUN("", "tokenize", "--decode");
    assert_code(0);
    assert_string_equal(result.out, "");
    RUN(NULL, "tokenize", "--special", "<|im_start|>");
    assert_string_equal(result.out, "1\n");
    RUN(NULL, "tokenize", "<|im_start|>");
    assert_true(strcmp(result.out, "1\n") != 0);
    RUN("[{\"role\": \"user\", \"content\": \"Name one river.\"}]", "tokenize", "--chat", "--json");
    assert_code(0);
    json = output_json();
    assert_contains(json_string_value(json_object_get(json, "text")), "Name one river.<|im_end|>");
    assert_int_equal(json_array_size(json_object_get(json, "ids")), 34);
    json_decref(json);
    assert_int_equal(RUN("{", "tokenize", "--chat"), 1);
}

static const char batch_lines[] =
    "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{"
    "\"messages\":[{\"role\":\"user\",\"content\":\"What is the capital of Japan?\"}],"
    "\"temperature\":0}}\n"
    "not json\n"
    "{\"custom_id\":\"b\\u0000c\",\"url\":\"/v1/completions\",\"body\":{"
    "\"prompt\":\"1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17\",\"max_tokens\":8,"
    "\"temperature\":0}}\n"
    "{\"custom_id\":\"c\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{"
    "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"logit_bias\":{\"49152\":5}}}\n";

static json_t *batch_line(const char **text)
{
    json_t *json = json_loads(*text, JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, NULL);
    assert_non_null(json);
    *text = strchr(*text, '\n') + 1;
    return json;
}

static void check_batch(const char *text)
{
    json_t *line = batch_line(&text), *body, *message;
    body = json_object_get(json_object_get(line, "response"), "body");
    assert_string_equal(json_string_value(json_object_get(line, "custom_id")), "a");
    message = json_object_get(json_array_get(json_object_get(body, "choices"), 0), "message");
    assert_string_equal(json_string_value(json_object_get(message, "content")),
                        "The capital of Japan is Tokyo.");
    assert_true(json_is_null(json_object_get(line, "error")));
    json_decref(line);
    line = batch_line(&text);
    assert_int_equal(
        json_integer_value(json_object_get(json_object_get(line, "response"), "status_code")), 400);
    json_decref(line);
    line = batch_line(&text);
    assert_int_equal(json_string_length(json_object_get(line, "custom_id")), 3); /* with its NUL */
    body = json_object_get(json_object_get(line, "response"), "body");
    message = json_array_get(json_object_get(body, "choices"), 0);
    assert_string_equal(json_string_value(json_object_get(message, "text")), " 18 19 2");
    json_decref(line);
    line = batch_line(&text);
    assert_string_equal(json_string_value(json_object_get(json_object_get(line, "error"), "param")),
                        "logit_bias");
    json_decref(line);
    assert_string_equal(text, "");
}

static void batch(void **state)
{
    (void)state;
    static char text[1 << 16];
    RUN(batch_lines, "batch");
    assert_code(1); /* two lines are wrong */
    check_batch(result.out);
    unlink(work_path);
    RUN(batch_lines, "batch", "-o", work_path);
    assert_code(1);
    assert_string_equal(result.out, "");
    slurp(work_path, text, sizeof text);
    check_batch(text);
    unlink(work_path);
    RUN(batch_lines, "batch", "-o", "/dev/full");
    assert_code(1);
    assert_contains(result.err, "No space left");
}

static void chat_from_a_pipe(void **state)
{
    (void)state;
    RUN("What is the capital of Japan?\n/tokens\n/quit\n", "chat", "--temperature", "0");
    assert_code(0);
    assert_string_equal(result.out, "The capital of Japan is Tokyo.\n");
    assert_contains(result.err, "of 8192 tokens in 2 messages");
    RUN("/nothing\n", "chat");
    assert_code(1);
    assert_contains(result.err, "/help");
}

/* ---- on a terminal ------------------------------------------------------------------------- */

enum { PATIENCE_MS = 240000 }; /* sanitizers on a busy machine */

struct terminal {
    int fd;
    pid_t pid;
    char text[1 << 16];
    size_t size, seen; /* seen: where the next await begins to look */
};
static struct terminal terminal;

static void open_terminal(const char *const *words)
{
    terminal = (struct terminal){.fd = -1};
    terminal.pid = forkpty(&terminal.fd, NULL, NULL, NULL);
    assert_true(terminal.pid >= 0);
    if (terminal.pid > 0) return;
    const char *argv[32] = {program};
    for (int i = 0; words[i]; i++) argv[i + 1] = words[i];
    setenv("TERM", "xterm", 1);
    setenv("XDG_STATE_HOME", work_path, 1); /* a history of its own */
    execv(program, (char *const *)(uintptr_t)argv);
    _exit(99);
}

/* Reads until the text shows up after what was awaited before. */
static void await(const char *text)
{
    const char *found;
    while (!(found = strstr(terminal.text + terminal.seen, text))) {
        struct pollfd p = {terminal.fd, POLLIN, 0};
        ssize_t n = poll(&p, 1, PATIENCE_MS) == 1 ? read(terminal.fd, terminal.text + terminal.size,
                                                         sizeof terminal.text - 1 - terminal.size)
                                                  : 0;
        if (n <= 0) fail_msg("'%s' did not show up in '%s'", text, terminal.text);
        terminal.size += (size_t)n;
        terminal.text[terminal.size] = 0;
    }
    terminal.seen = (size_t)(found - terminal.text) + strlen(text);
}

/* Until a line can be typed: the prompt is there and the editor has taken the terminal over. Before
 * that the kernel's own line discipline would get the keys. */
static void await_prompt(void)
{
    struct termios settings;
    const struct timespec pause = {0, 5000000};
    await(">");
    for (int left = PATIENCE_MS / 5; left > 0; left--) {
        assert_int_equal(tcgetattr(terminal.fd, &settings), 0);
        if (!(settings.c_lflag & ICANON)) return;
        nanosleep(&pause, NULL);
    }
    fail_msg("no line editor after the prompt in '%s'", terminal.text);
}

static void type(const char *keys)
{
    assert_int_equal(write(terminal.fd, keys, strlen(keys)), strlen(keys));
}

static int close_terminal(void)
{
    struct termios settings;
    char rest[1024];
    int status;
    while (read(terminal.fd, rest, sizeof rest) > 0) {
    }
    assert_int_equal(waitpid(terminal.pid, &status, 0), terminal.pid);
    assert_int_equal(tcgetattr(terminal.fd, &settings), 0);
    assert_true(settings.c_lflag & ICANON && settings.c_lflag & ECHO);
    close(terminal.fd);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void chat_on_a_terminal(void **state)
{
    (void)state;
    static const char *const words[] = {"chat", "--ignore-eos", "--temperature", "0", NULL};
    open_terminal(words);
    await("/help");
    await_prompt();
    type("abc\003"); /* drops the line */
    await("leaves)");
    await_prompt();
    type("What is the capital of Japan?\r");
    await("Tokyo.");
    type("\003"); /* stops the answer, keeps the chat */
    await("(stopped");
    await_prompt();
    type("/tokens\r");
    await("in 2 messages");
    await_prompt();
    type("\004");
    assert_int_equal(close_terminal(), 0);

    open_terminal(words);
    await("/help");
    await_prompt();
    type("abc");
    await("abc");
    kill(terminal.pid, SIGTERM);
    assert_int_equal(close_terminal(), 130);
    char history[128];
    snprintf(history, sizeof history, "%s/linnet/history", work_path);
    slurp(history, result.out, sizeof result.out);
    assert_contains(result.out, "Japan?");
    snprintf(history, sizeof history, "rm -r '%s'", work_path);
    assert_int_equal(system(history), 0);
}

static void inspect_and_plan(void **state)
{
    (void)state;
    RUN(NULL, "inspect", "--json");
    assert_code(0);
    json_t *json = output_json();
    assert_true(json_is_object(json_object_get(json, "plan")));
    assert_true(json_array_size(json_object_get(json, "tensors")) > 200);
    json_decref(json);
    RUN(NULL, "inspect", smollm2_path());
    assert_code(0);
    assert_contains(result.out, "llama");
    RUN(NULL, "run", "--dry-run", "-c", "256");
    assert_code(0);
    assert_contains(result.out, "KV cache");
}

/* ---- with a tiny model of tests/data -------------------------------------------------------- */

/* A batch whose standard input neither gives anything nor ends gets the signal. 130, or if the
 * signal is ignored as under nohup, 0 at the end of input. */
static void signal_while_waiting(int number, bool ignored)
{
    char message[4096] = "";
    int in[2], err[2], status;
    size_t had = 0;
    assert_int_equal(pipe(in) | pipe(err), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (ignored) signal(number, SIG_IGN);
        dup2(in[0], STDIN_FILENO);
        dup2(err[1], STDERR_FILENO);
        close(in[1]);
        execl(program, "linnet", "batch", "-v", "-m", tiny_path(), "-o", work_path, NULL);
        _exit(99);
    }
    close(err[1]);
    for (ssize_t n = 1; n > 0 && had<sizeof message - 1; had += n> 0 ? (size_t)n : 0) {
        bool ready = strstr(message, "loaded"); /* -v says so */
        if (ready && number) kill(pid, number);
        if (ready && ignored) close(in[1]);
        if (ready) number = 0;
        n = read(err[0], message + had, sizeof message - 1 - had);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    close(in[0]), close(err[0]);
    if (!ignored) close(in[1]);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) != (ignored ? 0 : 130)) fail_msg("%d: %s", status, message);
    assert_null(strstr(message, "cannot read"));
    assert_int_equal(access(work_path, F_OK) == 0, ignored);
    unlink(work_path);
}

static void interrupted_while_waiting(void **state)
{
    (void)state;
    signal_while_waiting(SIGINT, false);
    signal_while_waiting(SIGTERM, false);
    signal_while_waiting(SIGINT, true);
    signal_while_waiting(SIGHUP, true);
}

static void chat_commands(void **state)
{
    (void)state;
    char load[200], script[512];
    RUN("/help\n/tokens\n/stats\n/nothing\n", "chat", "-q", "-m", tiny_path());
    assert_code(1);
    assert_contains(result.err, "/regenerate");
    assert_contains(result.err, "0 of");
    assert_contains(result.err, "last answer");
    assert_contains(result.err, "no command '/nothing'");
    RUN("/set top-p 7\nhello\n/tokens\n", "chat", "-n", "2", "-m", tiny_path());
    assert_code(1);
    assert_contains(result.err, "in 2 messages"); /* the refused value did not stay */

    FILE *f = fopen(work_path, "w"); /* a middle system message, and an answer that is too long */
    assert_non_null(f);
    fputs("[{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"system\", \"content\": \"s\"},"
          "{\"role\": \"user\", \"content\": \"",
          f);
    for (int i = 0; i < 200; i++) fputs("word ", f);
    fputs("\"}, {\"role\": \"assistant\", \"content\": \"old\"}]", f);
    fclose(f);
    snprintf(load, sizeof load, "/load %s\n", work_path);
    snprintf(script, sizeof script, "%s/regenerate\n/save %s\n/clear\n/tokens\n/load -\n", load,
             work_path);
    RUN(script, "chat", "-c", "64", "-m", tiny_path());
    assert_code(1);
    assert_contains(result.err, "the old answer stays");
    assert_contains(result.err, "0 of 64");
    assert_contains(result.err, "/load -");
    json_t *saved = load_json(work_path), *messages = json_object_get(saved, "messages");
    assert_int_equal(json_array_size(messages), 4);
    json_t *last = json_array_get(messages, 3);
    assert_string_equal(json_string_value(json_object_get(last, "content")), "old");
    json_decref(saved);
    unlink(work_path);
}

static void check_json(const char *wrong)
{
    static const char *const keys[] = {"operation", "device",  "dtype", "shape",
                                       "max_abs",   "rms_rel", "bound", "pass"};
    json_t *json = output_json(), *row;
    size_t i, n_goldens = 0, n_wrong = 0;
    json_array_foreach(json, i, row)
    {
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
            assert_non_null(json_object_get(row, keys[k]));
        const char *operation = json_string_value(json_object_get(row, "operation"));
        bool pass = json_is_true(json_object_get(row, "pass"));
        if (!pass && (!wrong || strcmp(operation, wrong) != 0)) fail_msg("%s differs", operation);
        n_wrong += !pass;
        n_goldens += strcmp(operation, "golden greedy") == 0;
    }
    assert_true(n_goldens > 1);
    assert_int_equal(n_wrong, wrong ? 1 : 0);
    json_decref(json);
}

/* One golden token is changed: that row fails, and the command with it. The right goldens pass. */
static void check_against_goldens(void **state)
{
    (void)state;
    char command[2048], golden[200], model[200];
    snprintf(command, sizeof command,
             "mkdir -p '%s.d/golden' && cp '%s.json' '%s.safetensors' "
             "'%s.d/golden' && ln -sfn '%s' '%s.d/qwen3-tiny'",
             work_path, data_path("golden/qwen3-tiny"), data_path("golden/qwen3-tiny"), work_path,
             tiny_path(), work_path);
    assert_int_equal(system(command), 0);
    snprintf(golden, sizeof golden, "%s.d/golden/qwen3-tiny.json", work_path);
    snprintf(model, sizeof model, "%s.d/qwen3-tiny", work_path);
    json_t *json = load_json(golden);
    json_t *prompt = json_array_get(json_object_get(json, "prompts"), 0);
    json_array_set_new(json_object_get(prompt, "greedy_fp32"), 0, json_integer(0));
    assert_int_equal(json_dump_file(json, golden, 0), 0);
    json_decref(json);
    RUN(NULL, "check", "--json", model);
    assert_code(1);
    check_json("golden greedy");
#ifndef __SANITIZE_ADDRESS__ /* minutes more, for the same code */
    RUN(NULL, "check", "--json", tiny_path());
    assert_code(0);
    check_json(NULL);
#endif
    snprintf(command, sizeof command, "rm -r '%s.d'", work_path);
    assert_int_equal(system(command), 0);
}

/* `linnet pack`, and what is said of its file later. */
static void packed_weights(void **state)
{
    (void)state;
    char command[1200], model[300], packed[320];
    snprintf(command, sizeof command, "mkdir -p '%s.d' && cp '%s' '%s.d/mix.gguf'", work_path,
             data_path("gguf/qwen2-mini-q4_k_mix.gguf"), work_path);
    assert_int_equal(system(command), 0);
    snprintf(model, sizeof model, "%s.d/mix.gguf", work_path);
    snprintf(packed, sizeof packed, "%s.packed", model);
    RUN(NULL, "pack", model);
    assert_code(0);
    assert_contains(result.err, packed);
    assert_string_equal(result.out, "");
    RUN(NULL, "run", "-v", "--device", "cpu", "-m", model, "--prompt-ids", "1,2", "-n", "1");
    assert_code(0);
    assert_contains(result.err, "(packed file)");
    snprintf(command, sizeof command, "touch -d 2001-01-01 '%s'", model);
    assert_int_equal(system(command), 0);
    RUN(NULL, "run", "--device", "cpu", "-m", model, "--prompt-ids", "1,2", "-n", "1");
    assert_code(0);
    assert_contains(result.err, "'linnet pack' makes it anew");
    RUN(NULL, "run", "-q", "--device", "cpu", "-m", model, "--prompt-ids", "1,2", "-n", "1");
    assert_code(0);
    assert_string_equal(result.err, "");
    assert_int_equal(RUN(NULL, "pack", "-m", model, model), 2);
    assert_int_equal(RUN(NULL, "pack", "/nowhere/a"), 1);
    snprintf(command, sizeof command, "rm -r '%s.d'", work_path);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(usage),          cmocka_unit_test(generated_texts),
        cmocka_unit_test(missing_files),  cmocka_unit_test(interrupted_while_waiting),
        cmocka_unit_test(chat_commands),  cmocka_unit_test(check_against_goldens),
        cmocka_unit_test(packed_weights),
    };
    const struct CMUnitTest with_model[] = {
        cmocka_unit_test(capital_of_japan), cmocka_unit_test(streams_alone_on_stdout),
        cmocka_unit_test(stop_strings),     cmocka_unit_test(several_answers),
        cmocka_unit_test(raw_and_ids),      cmocka_unit_test(too_long),
        cmocka_unit_test(broken_outputs),   cmocka_unit_test(interrupted),
        cmocka_unit_test(tokenize),         cmocka_unit_test(batch),
        cmocka_unit_test(chat_from_a_pipe), cmocka_unit_test(chat_on_a_terminal),
        cmocka_unit_test(inspect_and_plan),
    };
    int failed = cmocka_run_group_tests(alone, prepare, tidy_up);
    if (smollm2_path()) return failed + cmocka_run_group_tests(with_model, prepare, tidy_up);
    printf("no model: script/get-model installs it; %zu tests did not run\n",
           sizeof with_model / sizeof *with_model);
    return failed;
}
