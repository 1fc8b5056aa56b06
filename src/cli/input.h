/* input.h - texts from files and standard input. */
#ifndef LINNET_CLI_INPUT_H
#define LINNET_CLI_INPUT_H

#include "base/strbuf.h"
#include "cli/options.h"

/* Appends all of a file ("-": standard input). */
linnet_status input_read(const char *path, struct strbuf *out, linnet_error *err);

/*
 * The text a command works on: its argument, --file, or standard input (also "-"). LINNET_INVALID
 * if there is none of them: standard input is a terminal.
 */
linnet_status input_text(const struct options *options, struct strbuf *out, linnet_error *err);
/* Whether that text comes from a file or standard input, not from the command line. */
bool input_is_file(const struct options *options);

/* Lines of a file descriptor, the caller's, as they come. Zeroed but for fd at first. */
struct input_lines {
    int fd;
    struct strbuf buffer; /* read, and from `next` on not handed out */
    size_t next, searched;
    bool ended;
};

enum input_result { INPUT_LINE, INPUT_END, INPUT_INTERRUPTED, INPUT_FAILED /* see errno */ };

/* The next line with its end, if it has one; it lives until the next call. */
enum input_result input_line(struct input_lines *lines, const char **text, size_t *n);
void input_lines_free(struct input_lines *lines);

#endif
