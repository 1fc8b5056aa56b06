/* help.h - every text that is made from the option table. */
#ifndef LINNET_CLI_HELP_H
#define LINNET_CLI_HELP_H

#include "base/strbuf.h"
#include "cli/options.h"

/* --help of one command, or of the program (COMMAND_NONE). */
void help_command(enum command command, struct strbuf *out);
void help_man(struct strbuf *out);
void help_bash(struct strbuf *out);
void help_zsh(struct strbuf *out);

#endif
