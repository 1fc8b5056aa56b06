/* commands.h - one function a command; each returns the program's exit code. */
#ifndef LINNET_CLI_COMMANDS_H
#define LINNET_CLI_COMMANDS_H

#include "cli/options.h"

/* started: when the process began, on the monotonic clock. */
int command_run(const struct options *options, double started);
int command_chat(const struct options *options);
int command_batch(const struct options *options);
int command_serve(const struct options *options);
int command_bench(const struct options *options);
int command_tokenize(const struct options *options);
int command_inspect(const struct options *options);
int command_check(const struct options *options);
int command_perplexity(const struct options *options);
int command_pack(const struct options *options);

#endif
