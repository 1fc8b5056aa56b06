#include "cli/help.h"

#include <string.h>

enum { HELP_COLUMN = 30, HELP_WIDTH = 100 };

static bool offers(const struct option_spec *spec, enum command command)
{
    return spec->commands & 1u << command;
}

/* "-n, --max-tokens, --predict N" */
static void spelling(const struct option_spec *spec, struct strbuf *out)
{
    if (spec->letter)
        strbuf_format(out, "-%c, ", spec->letter);
    else
        strbuf_text(out, "    ");
    strbuf_format(out, "--%s", spec->name);
    if (spec->other) strbuf_format(out, ", --%s", spec->other);
    if (spec->argument) strbuf_format(out, " %s", spec->argument);
}

/* "a|b" as a list */
static void choices(const char *list, const char *between, struct strbuf *out)
{
    for (const char *c = list; *c; c += strspn(c, "|")) {
        size_t n = strcspn(c, "|");
        if (c != list) strbuf_text(out, between);
        strbuf_append(out, c, n);
        c += n;
    }
}

/* Appends words from HELP_COLUMN on, broken before HELP_WIDTH. */
static void wrapped(const char *text, struct strbuf *out)
{
    size_t column = HELP_COLUMN;
    for (size_t n; *text; text += n, text += strspn(text, " ")) {
        n = strcspn(text, " ");
        if (column > HELP_COLUMN && column + 1 + n > HELP_WIDTH) {
            strbuf_format(out, "\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        }
        if (column > HELP_COLUMN) strbuf_char(out, ' ');
        column += n + (column > HELP_COLUMN);
        strbuf_append(out, text, n);
    }
    strbuf_char(out, '\n');
}

static void option_lines(const struct option_spec *spec, struct strbuf *out)
{
    size_t start = out->size;
    strbuf_text(out, "  ");
    spelling(spec, out);
    size_t used = out->size - start;
    if (used + 2 > HELP_COLUMN)
        strbuf_format(out, "\n%*s", HELP_COLUMN, "");
    else
        strbuf_format(out, "%*s", (int)(HELP_COLUMN - used), "");
    wrapped(spec->help, out);
    if (!spec->choices) return;
    strbuf_format(out, "%*sone of: ", HELP_COLUMN, "");
    choices(spec->choices, ", ", out);
    strbuf_char(out, '\n');
}

static void group_lines(enum option_group group, enum command command, struct strbuf *out)
{
    bool titled = false;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option_spec *spec = &option_table[i];
        if (spec->group != group || !offers(spec, command)) continue;
        if (!titled) strbuf_format(out, "\n%s:\n", group_titles[group]);
        titled = true;
        option_lines(spec, out);
    }
}

static void help_program(struct strbuf *out)
{
    strbuf_format(out, "linnet %s - an inference engine for language models\n\n", LINNET_VERSION);
    strbuf_text(out, "usage: linnet COMMAND [options] [arguments]\n\nCommands:\n");
    for (int i = 0; i < COMMAND_COUNT; i++)
        if (!command_table[i].hidden)
            strbuf_format(out, "  %-10s %s\n", command_table[i].name, command_table[i].summary);
    strbuf_text(out,
                "\n'linnet COMMAND --help' lists a command's options. Options may stand before "
                "or after\narguments; '--' ends them.\n");
    strbuf_text(out, "\nExit status: 0 done, 1 the work failed, 2 wrong usage, 130 interrupted.\n");
}

void help_command(enum command command, struct strbuf *out)
{
    if (command == COMMAND_NONE) {
        help_program(out);
        return;
    }
    const struct command_spec *spec = &command_table[command];
    strbuf_format(out, "usage: linnet %s [options]%s%s\n\n%s\n", spec->name,
                  spec->arguments[0] ? " " : "", spec->arguments, spec->summary);
    for (int group = 0; group < GROUP_COUNT; group++)
        group_lines((enum option_group)group, command, out);
}

/* ---- manual page --------------------------------------------------------------------------- */

/* roff takes '\' and a leading '.' or '\'' for its own. */
static void roff(const char *text, struct strbuf *out)
{
    if (*text == '.' || *text == '\'') strbuf_text(out, "\\&");
    for (; *text; text++) {
        if (*text == '\\')
            strbuf_text(out, "\\e");
        else if (*text == '-')
            strbuf_text(out, "\\-");
        else
            strbuf_char(out, *text);
    }
}

static void man_option(const struct option_spec *spec, struct strbuf *out)
{
    struct strbuf text = {0};
    spelling(spec, &text);
    strbuf_text(out, ".TP\n.B ");
    roff(strbuf_cstr(&text) + (spec->letter ? 0 : 4), out);
    strbuf_char(out, '\n');
    roff(spec->help, out);
    if (spec->choices) {
        strbuf_text(out, ". One of: ");
        choices(spec->choices, ", ", out);
    }
    strbuf_text(out, ".\n.RI ( ");
    const char *blank = "";
    bool everywhere = spec->group == GROUP_GENERAL;
    if (everywhere) strbuf_text(out, "\"every command\"");
    for (int i = 0; i < COMMAND_COUNT && !everywhere; i++) {
        if (!offers(spec, (enum command)i)) continue;
        strbuf_format(out, "%s%s", blank, command_table[i].name);
        blank = "\\ ";
    }
    strbuf_text(out, " )\n");
    strbuf_free(&text);
}

void help_man(struct strbuf *out)
{
    strbuf_format(out, ".TH LINNET 1 \"\" \"linnet %s\" \"User Commands\"\n", LINNET_VERSION);
    strbuf_text(out, ".SH NAME\nlinnet \\- an inference engine for language models\n");
    strbuf_text(out, ".SH SYNOPSIS\n.B linnet\n.I COMMAND\n[options] [arguments]\n");
    strbuf_text(out, ".SH DESCRIPTION\nStandard output carries the answer alone; progress and "
                     "messages go to standard error.\n.SH COMMANDS\n");
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (command_table[i].hidden) continue;
        strbuf_format(out, ".TP\n.B %s ", command_table[i].name);
        roff(command_table[i].arguments, out);
        strbuf_char(out, '\n');
        roff(command_table[i].summary, out);
        strbuf_text(out, ".\n");
    }
    strbuf_text(out,
                ".SH OPTIONS\nOptions may stand before or after arguments; \\-\\- ends them.\n");
    for (int group = 0; group < GROUP_COUNT; group++) {
        strbuf_format(out, ".SS %s\n", group_titles[group]);
        for (int i = 0; i < OPTION_COUNT; i++)
            if (option_table[i].group == (enum option_group)group)
                man_option(&option_table[i], out);
    }
    strbuf_text(out,
                ".SH EXIT STATUS\n0 done, 1 the work failed, 2 wrong usage, 130 interrupted.\n"
                ".SH FILES\n.TP\n.I $LINNET_MODELS, $XDG_DATA_HOME/linnet/models\nmodels by name\n"
                ".TP\n.I $XDG_STATE_HOME/linnet/history\nlines typed in a chat\n"
                ".SH EXAMPLES\n.nf\nlinnet run \"What is the capital of Japan?\"\nlinnet chat\n"
                "linnet batch requests.jsonl \\-o answers.jsonl\n.fi\n");
}

/* ---- completion ---------------------------------------------------------------------------- */

static bool is_file(const struct option_spec *spec)
{
    return spec->kind == OPTION_KIND_FILE;
}

/* "|" separated spellings as a pattern of a case statement */
static void case_pattern(const struct option_spec *spec, struct strbuf *out)
{
    strbuf_format(out, "--%s", spec->name);
    if (spec->other) strbuf_format(out, "|--%s", spec->other);
    if (spec->letter) strbuf_format(out, "|-%c", spec->letter);
}

/* Words that compgen offers; names may have blanks in them. */
static void bash_words(const char *compgen, struct strbuf *out)
{
    strbuf_format(out, "mapfile -t COMPREPLY < <(compgen %s -- \"$current\")", compgen);
}

/* Finds the command: the first word that is neither an option nor an option's value. */
static void bash_find_command(struct strbuf *out)
{
    strbuf_text(out, "    for ((i = 1; i < COMP_CWORD; i++)); do\n"
                     "        case ${COMP_WORDS[i]} in\n        =) ((i++));;\n        ");
    const char *bar = "";
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (option_table[i].kind == OPTION_KIND_FLAG) continue;
        strbuf_text(out, bar);
        case_pattern(&option_table[i], out);
        bar = "|";
    }
    strbuf_text(out, ") [[ ${COMP_WORDS[i+1]} == = ]] || ((i++));;\n        -*) ;;\n"
                     "        *) command=${COMP_WORDS[i]}; break;;\n        esac\n    done\n");
}

static void bash_values(struct strbuf *out)
{
    strbuf_text(out, "    case $previous in\n");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option_spec *spec = &option_table[i];
        if (spec->kind == OPTION_KIND_FLAG) continue;
        strbuf_text(out, "    ");
        case_pattern(spec, out);
        strbuf_text(out, ") ");
        if (is_file(spec)) {
            bash_words("-f", out);
            strbuf_text(out, "; ");
        } else if (spec->choices) {
            struct strbuf words = {0};
            strbuf_text(&words, "-W '");
            choices(spec->choices, " ", &words);
            strbuf_text(&words, "'");
            bash_words(strbuf_cstr(&words), out);
            strbuf_text(out, "; ");
            strbuf_free(&words);
        }
        strbuf_text(out, "return;;\n");
    }
    strbuf_text(out, "    esac\n");
}

static void bash_options(enum command command, struct strbuf *out)
{
    const char *blank = "";
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (command != COMMAND_NONE && !offers(&option_table[i], command)) continue;
        strbuf_format(out, "%s--%s", blank, option_table[i].name);
        blank = " ";
    }
}

void help_bash(struct strbuf *out)
{
    strbuf_text(out, "# bash completion for linnet; made from its option table\n_linnet()\n{\n"
                     "    local current=${COMP_WORDS[COMP_CWORD]} "
                     "previous=${COMP_WORDS[COMP_CWORD-1]} command= options= i\n"
                     "    [[ $current == = ]] && current=\n"
                     "    [[ $previous == = ]] && previous=${COMP_WORDS[COMP_CWORD-2]}\n");
    bash_find_command(out);
    bash_values(out);
    strbuf_text(out, "    case $command in\n");
    for (int c = 0; c < COMMAND_COUNT; c++) {
        if (command_table[c].hidden) continue;
        strbuf_format(out, "    %s) options='", command_table[c].name);
        bash_options((enum command)c, out);
        strbuf_text(out, "';;\n");
    }
    strbuf_text(out, "    *) options='");
    bash_options(COMMAND_NONE, out);
    strbuf_text(out, "';;\n    esac\n    if [[ $current == -* ]]; then\n        ");
    bash_words("-W \"$options\"", out);
    strbuf_text(out, "\n    elif [[ -z $command ]]; then\n        ");
    struct strbuf names = {0};
    strbuf_text(&names, "-W '");
    for (int c = 0; c < COMMAND_COUNT; c++)
        if (!command_table[c].hidden)
            strbuf_format(&names, "%s%s", c ? " " : "", command_table[c].name);
    strbuf_text(&names, "'");
    bash_words(strbuf_cstr(&names), out);
    strbuf_free(&names);
    strbuf_text(out, "\n    else\n        ");
    bash_words("-f", out);
    strbuf_text(out, "\n    fi\n}\ncomplete -o filenames -F _linnet linnet\n");
}

/* Inside '...[help]...' of _arguments: no quote, bracket or colon may stay as it is. */
static void zsh_text(const char *text, struct strbuf *out)
{
    for (; *text; text++) {
        if (*text == '\'')
            strbuf_text(out, "'\\''");
        else if (strchr("[]:", *text))
            strbuf_format(out, "\\%c", *text);
        else
            strbuf_char(out, *text);
    }
}

static void zsh_option(const char *dashes, const char *name, const struct option_spec *spec,
                       struct strbuf *out)
{
    strbuf_format(out, "        '%s%s%s[", spec->kind == OPTION_KIND_TEXTS ? "*" : "", dashes,
                  name);
    zsh_text(spec->help, out);
    strbuf_char(out, ']');
    if (spec->kind != OPTION_KIND_FLAG) {
        strbuf_char(out, ':');
        zsh_text(spec->argument, out);
        strbuf_char(out, ':');
        if (is_file(spec)) strbuf_text(out, "_files");
        if (spec->choices) {
            strbuf_char(out, '(');
            choices(spec->choices, " ", out);
            strbuf_char(out, ')');
        }
    }
    strbuf_text(out, "' \\\n");
}

void help_zsh(struct strbuf *out)
{
    strbuf_text(out, "#compdef linnet\n# zsh completion for linnet; made from its option table\n"
                     "local -a commands\ncommands=(\n");
    for (int c = 0; c < COMMAND_COUNT; c++) {
        if (command_table[c].hidden) continue;
        strbuf_format(out, "    '%s:", command_table[c].name);
        zsh_text(command_table[c].summary, out);
        strbuf_text(out, "'\n");
    }
    strbuf_text(out, ")\nif (( CURRENT == 2 )); then\n    _describe command commands\n    "
                     "_arguments '--help[print help]' '--version[print the version]'\n    return\n"
                     "fi\ncase ${words[2]} in\n");
    for (int c = 0; c < COMMAND_COUNT; c++) {
        if (command_table[c].hidden) continue;
        strbuf_format(out, "    %s) _arguments \\\n", command_table[c].name);
        for (int i = 0; i < OPTION_COUNT; i++) {
            const struct option_spec *spec = &option_table[i];
            char letter[2] = {spec->letter, 0};
            if (!offers(spec, (enum command)c)) continue;
            if (spec->letter) zsh_option("-", letter, spec, out);
            zsh_option("--", spec->name, spec, out);
        }
        strbuf_text(out, "        '*:file:_files';;\n");
    }
    strbuf_text(out, "esac\n");
}
