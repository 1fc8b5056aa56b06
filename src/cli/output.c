#include "cli/output.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "cli/progress.h"

linnet_status output_all(int fd, const char *what, const void *bytes, size_t n, linnet_error *err)
{
    for (const char *p = bytes; n > 0;) {
        ssize_t done = write(fd, p, n);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && errno == EAGAIN) { /* whoever shares the stream wants it so: wait */
            struct pollfd room = {fd, POLLOUT, 0};
            poll(&room, 1, -1);
            continue;
        }
        if (done <= 0)
            return error_set(err, LINNET_IO, "cannot write to %s: %s", what, strerror(errno));
        p += done;
        n -= (size_t)done;
    }
    return LINNET_OK;
}

bool output_write(const void *bytes, size_t n)
{
    linnet_error err;
    if (output_all(STDOUT_FILENO, "standard output", bytes, n, &err) == LINNET_OK) return true;
    output_error(&err);
    return false;
}

bool output_text(const char *text)
{
    return output_write(text, strlen(text));
}

bool output_json(json_t *json, size_t flags)
{
    char *text = json ? json_dumps(json, flags | JSON_ENCODE_ANY) : NULL;
    json_decref(json);
    linnet_error err;
    if (!text) {
        error_set(&err, LINNET_MEMORY, "out of memory: the answer as JSON");
        output_error(&err);
        return false;
    }
    bool good = output_text(text) && output_text("\n");
    free(text);
    return good;
}

bool output_strbuf(struct strbuf *text)
{
    linnet_error err;
    bool good = !text->failed;
    if (good)
        good = output_write(strbuf_cstr(text), text->size);
    else
        output_error((error_set(&err, LINNET_MEMORY, "out of memory: the text to print"), &err));
    strbuf_free(text);
    return good;
}

int output_error(const linnet_error *err)
{
    progress_end();
    fprintf(stderr, "linnet: %s\n", err->message);
    switch (err->status) {
    case LINNET_CANCELLED: return EXIT_INTERRUPTED;
    case LINNET_INVALID: return EXIT_USAGE;
    default: return EXIT_FAILED;
    }
}

int output_usage(const char *format, ...)
{
    va_list args;
    fputs("linnet: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return EXIT_USAGE;
}

void output_note(const char *format, ...)
{
    va_list args;
    progress_end();
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

const char *output_bytes(int64_t bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    static char buffers[8][32];
    static unsigned next;
    char *text = buffers[next++ % 8];
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1000 && unit + 1 < sizeof units / sizeof *units) value /= 1000, unit++;
    snprintf(text, sizeof buffers[0], unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return text;
}
