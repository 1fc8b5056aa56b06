/*
 * lines.h - lines typed by a person: editing and history on a terminal, plain reading otherwise.
 * The terminal is back in its own state whenever no line is being read.
 */
#ifndef LINNET_CLI_LINES_H
#define LINNET_CLI_LINES_H

#include "base/strbuf.h"
#include "linnet.h"

struct lines;

enum line_result { LINE_READ, LINE_END, LINE_INTERRUPTED };

/* history: a file, created with its directories; NULL keeps none. Out of memory gives NULL. */
struct lines *lines_open(const char *history);
void lines_close(struct lines *lines);
bool lines_interactive(const struct lines *lines);

/* One line without its end. Ctrl-C gives LINE_INTERRUPTED, Ctrl-D or the end of input LINE_END. */
enum line_result lines_read(struct lines *lines, const char *prompt, struct strbuf *out);

/* $XDG_STATE_HOME/linnet/history, or ~/.local/state/linnet/history; false if there is no home. */
bool lines_history_path(struct strbuf *out);

#endif
