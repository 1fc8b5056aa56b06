/*
 * output.h - standard output, where the answer goes and nothing else; and messages for people on
 * standard error. Every byte written is checked: a closed pipe or a full disk is a failure.
 */
#ifndef LINNET_CLI_OUTPUT_H
#define LINNET_CLI_OUTPUT_H

#include <jansson.h>

#include "base/strbuf.h"
#include "linnet.h"

/* Exit codes. */
enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

/* All n bytes to a file descriptor; LINNET_IO naming `what` otherwise. */
linnet_status output_all(int fd, const char *what, const void *bytes, size_t n, linnet_error *err);

/* To standard output; on failure says so on standard error and returns false. */
bool output_write(const void *bytes, size_t n);
bool output_text(const char *text);
/* Takes over `json` (NULL counts as out of memory); one line, or indented for people. */
bool output_json(json_t *json, size_t flags);
/* Takes over the buffer. */
bool output_strbuf(struct strbuf *text);

/* "linnet: MESSAGE" on standard error. Return the exit code that fits. */
int output_error(const linnet_error *err);
int output_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));
void output_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A byte count for people: "98.1 MB". Rotating static buffers: valid for the next 7 calls. */
const char *output_bytes(int64_t bytes);

#endif
