/* program.h - runs the program as people do, and keeps its exit code and what it wrote. */
#ifndef LINNET_TESTS_PROGRAM_H
#define LINNET_TESTS_PROGRAM_H

#include "scratch.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

static const char program[] = LINNET_BINARY_DIR "/linnet";

struct result {
    int code; /* exit code, or minus the signal */
    char out[1 << 16], err[1 << 16];
};
static struct result result;

static inline void slurp(const char *path, char *text, size_t size)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    text[fread(text, 1, size - 1, f)] = 0;
    fclose(f);
}

static char scratch[64], out_path[80], err_path[80], work_path[80];

/* Runs the program with standard input from a text and output into `out` (NULL: collected). */
static inline pid_t start(const char *out, const char *input, const char *const *words)
{
    int pipe_ends[2];
    assert_int_equal(pipe(pipe_ends), 0);
    close(open(out_path, O_WRONLY | O_CREAT | O_TRUNC, 0600)); /* nothing old is left to read */
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const char *argv[32] = {program};
        for (int i = 0; words[i]; i++) argv[i + 1] = words[i];
        dup2(pipe_ends[0], STDIN_FILENO);
        close(pipe_ends[1]);
        dup2(open(out ? out : out_path, O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
        dup2(open(err_path, O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
        execv(program, (char *const *)(uintptr_t)argv);
        _exit(99);
    }
    close(pipe_ends[0]);
    if (input && write(pipe_ends[1], input, strlen(input)) < 0) fail_msg("cannot feed the program");
    close(pipe_ends[1]);
    return pid;
}

static inline int finish(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    slurp(out_path, result.out, sizeof result.out);
    slurp(err_path, result.err, sizeof result.err);
    return result.code;
}

#define RUN(input, ...)     finish(start(NULL, input, (const char *const[]){__VA_ARGS__, NULL}))
#define RUN_INTO(path, ...) finish(start(path, NULL, (const char *const[]){__VA_ARGS__, NULL}))
#define assert_contains(text, s)                                         \
    do {                                                                 \
        if (!strstr(text, s)) fail_msg("no '%s' in '%.2000s'", s, text); \
    } while (0)
#define assert_code(expected)                                                                  \
    do {                                                                                       \
        if (result.code != (expected))                                                         \
            fail_msg("exit code %d, expected %d: %.2000s", result.code, expected, result.err); \
    } while (0)

/* The whole of standard output as one JSON value. json_decref it. */
static inline json_t *output_json(void)
{
    json_error_t where;
    json_t *json = json_loads(result.out, 0, &where);
    if (!json) fail_msg("output is not one JSON value: %s: '%.500s'", where.text, result.out);
    return json;
}

/* A model that the tests bring with them. */
static inline const char *tiny_path(void)
{
    return data_path("qwen3-tiny");
}

static char *models_before; /* LINNET_MODELS; NULL: not set */

/* The installed model alone in a folder of the test's: without a file of packed weights, which may
 * be another version's and then has a line on standard error. */
static inline int link_model(void)
{
    char link[300];
    const char *model = smollm2_path(), *models = getenv("LINNET_MODELS");
    models_before = models ? strdup(models) : NULL;
    if (!model) return 0;
    snprintf(link, sizeof link, "%s/%s", scratch, strrchr(model, '/') + 1);
    return symlink(model, link) || setenv("LINNET_MODELS", scratch, 1);
}

/* Before and after a group of tests. */
static inline int prepare(void **state)
{
    (void)state;
    snprintf(scratch, sizeof scratch, "%s", scratch_create());
    if (link_model()) return 1;
    snprintf(out_path, sizeof out_path, "%s/out", scratch);
    snprintf(err_path, sizeof err_path, "%s/err", scratch);
    snprintf(work_path, sizeof work_path, "%s/jsonl", scratch);
    int fd = open(out_path, O_WRONLY | O_CREAT, 0600);
    return fd < 0 || close(fd) != 0;
}

static inline int tidy_up(void **state)
{
    (void)state;
    if (models_before)
        setenv("LINNET_MODELS", models_before, 1);
    else
        unsetenv("LINNET_MODELS");
    free(models_before);
    scratch_remove(scratch);
    return 0;
}

#endif
