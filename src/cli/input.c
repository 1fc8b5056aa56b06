#include "cli/input.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "cli/interrupt.h"

linnet_status input_read(const char *path, struct strbuf *out, linnet_error *err)
{
    bool standard = strcmp(path, "-") == 0;
    const char *name = standard ? "standard input" : path;
    int fd = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return error_set(err, LINNET_IO, "cannot open %s: %s", name, strerror(errno));
    char buffer[1 << 16];
    ssize_t n;
    while ((n = read(fd, buffer, sizeof buffer)) != 0) {
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) break;
        strbuf_append(out, buffer, (size_t)n);
    }
    linnet_status status = LINNET_OK;
    if (n < 0) status = error_set(err, LINNET_IO, "cannot read %s: %s", name, strerror(errno));
    if (!status && out->failed) status = error_memory(err, name, out->size);
    if (!standard) close(fd);
    return status;
}

bool input_is_file(const struct options *options)
{
    const struct texts *arguments = &options->arguments;
    return options->file || arguments->n == 0 || strcmp(arguments->items[0], "-") == 0;
}

linnet_status input_text(const struct options *options, struct strbuf *out, linnet_error *err)
{
    const char *argument = options->arguments.n ? options->arguments.items[0] : NULL;
    if (options->file) return input_read(options->file, out, err);
    if (!input_is_file(options)) {
        strbuf_text(out, argument);
        return out->failed ? error_memory(err, "the text", strlen(argument)) : LINNET_OK;
    }
    if (!argument && isatty(STDIN_FILENO))
        return error_set(err, LINNET_INVALID,
                         "no text: give it as an argument in quotes, with --file, or on standard "
                         "input");
    return input_read("-", out, err);
}

/* ---- lines --------------------------------------------------------------------------------- */

/* Drops what was handed out once it is most of the buffer, so that all in all each byte moves a
 * few times only. */
static void compact(struct input_lines *l)
{
    if (l->next <= l->buffer.size / 2) return;
    memmove(l->buffer.data, l->buffer.data + l->next, l->buffer.size - l->next);
    l->buffer.size -= l->next;
    l->searched -= l->next;
    l->next = 0;
}

enum input_result input_line(struct input_lines *l, const char **text, size_t *n)
{
    char bytes[1 << 16];
    for (;;) {
        const char *data = strbuf_cstr(&l->buffer), *end = NULL;
        if (l->searched < l->buffer.size)
            end = memchr(data + l->searched, '\n', l->buffer.size - l->searched);
        l->searched = end ? (size_t)(end - data) + 1 : l->buffer.size;
        if (end || (l->ended && l->next < l->searched)) {
            *text = data + l->next;
            *n = l->searched - l->next;
            l->next = l->searched;
            return INPUT_LINE;
        }
        if (l->ended) return INPUT_END;
        compact(l);
        if (!interrupt_await_input(l->fd)) return INPUT_INTERRUPTED;
        ssize_t got = read(l->fd, bytes, sizeof bytes);
        if (got < 0 && errno != EINTR && errno != EAGAIN) return INPUT_FAILED;
        if (got > 0) strbuf_append(&l->buffer, bytes, (size_t)got);
        l->ended = got == 0;
        if (l->buffer.failed) {
            errno = ENOMEM;
            return INPUT_FAILED;
        }
    }
}

void input_lines_free(struct input_lines *lines)
{
    strbuf_free(&lines->buffer);
}
