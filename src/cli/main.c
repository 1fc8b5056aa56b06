#include <fcntl.h>
#include <langinfo.h>
#include <locale.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "cli/commands.h"
#include "cli/help.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/progress.h"

static int print_help(enum command command)
{
    struct strbuf text = {0};
    help_command(command, &text);
    return output_strbuf(&text) ? EXIT_DONE : EXIT_FAILED;
}

static int command_generate(const struct options *options)
{
    static const struct {
        const char *name;
        void (*make)(struct strbuf *out);
    } kinds[] = {{"man", help_man}, {"bash", help_bash}, {"zsh", help_zsh}};
    const char *kind = options->arguments.n ? options->arguments.items[0] : "";
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (strcmp(kinds[i].name, kind) != 0) continue;
        struct strbuf text = {0};
        kinds[i].make(&text);
        return output_strbuf(&text) ? EXIT_DONE : EXIT_FAILED;
    }
    return output_usage("generate: expected man, bash or zsh, found '%s'", kind);
}

static int perform(const struct options *options, double started)
{
    if (options->version)
        return output_text("linnet " LINNET_VERSION "\n") ? EXIT_DONE : EXIT_FAILED;
    if (options->help) return print_help(options->command);
    switch (options->command) {
    case COMMAND_RUN: return command_run(options, started);
    case COMMAND_CHAT: return command_chat(options);
    case COMMAND_BATCH: return command_batch(options);
    case COMMAND_BENCH: return command_bench(options);
    case COMMAND_TOKENIZE: return command_tokenize(options);
    case COMMAND_INSPECT: return command_inspect(options);
    case COMMAND_CHECK: return command_check(options);
    case COMMAND_PERPLEXITY: return command_perplexity(options);
    case COMMAND_PACK: return command_pack(options);
    case COMMAND_GENERATE: return command_generate(options);
    case COMMAND_SERVE: return command_serve(options);
    case COMMAND_NONE: break;
    }
    return output_usage("no command: 'linnet --help' lists them; to begin with: linnet chat");
}

/* A stream that was closed before we began must not become a file that we open: reading it gives
 * nothing, writing to it fails. */
static void hold_standard_streams(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDONLY) != fd) _exit(EXIT_FAILED);
}

int main(int argc, char **argv)
{
    double started = clock_seconds();
    struct options options;
    linnet_error err;
    hold_standard_streams();
    setlocale(LC_CTYPE, "");
    if (strcmp(nl_langinfo(CODESET), "UTF-8") != 0) setlocale(LC_CTYPE, "C.UTF-8");
    interrupt_setup();
    int code = EXIT_USAGE;
    linnet_status status = options_parse(argc, argv, &options, &err);
    if (!status && !options.help && !options.version) status = options_check(&options, &err);
    if (status) {
        output_usage("%s", err.message);
    } else {
        progress_enable(!options.quiet);
        code = perform(&options, started);
    }
    options_free(&options);
    return code;
}
