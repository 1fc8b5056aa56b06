/* input.h - texts from files and standard input. */
#ifndef LINNET_CLI_INPUT_H
#define LINNET_CLI_INPUT_H

#include "base/strbuf.h"
#include "cli/options.h"

/* Appends all of a file ("-": standard input). */
linnet_status input_read(const char *path, struct strbuf *out, linnet_error *err);

/*
 * The text a command works on: its argument, --file, or standard input. LINNET_INVALID if there is
 * none of them (standard input is a terminal) or two of them.
 */
linnet_status input_text(const struct options *options, struct strbuf *out, linnet_error *err);

#endif
