#include "cli/input.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

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

linnet_status input_text(const struct options *options, struct strbuf *out, linnet_error *err)
{
    const char *argument = options->arguments.n ? options->arguments.items[0] : NULL;
    if (argument && options->file)
        return error_set(err, LINNET_INVALID, "a text as argument and --file: which one?");
    if (options->file) return input_read(options->file, out, err);
    if (argument && strcmp(argument, "-") != 0) {
        strbuf_text(out, argument);
        return out->failed ? error_memory(err, "the text", strlen(argument)) : LINNET_OK;
    }
    if (!argument && isatty(STDIN_FILENO))
        return error_set(err, LINNET_INVALID,
                         "no text: give it as an argument in quotes, with --file, or on standard "
                         "input");
    return input_read("-", out, err);
}
