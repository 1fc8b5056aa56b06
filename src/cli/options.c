#include "cli/options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/limits.h"
#include "base/memory.h"

enum { LONGEST_NAME = 48 };

static size_t smallest(size_t a, size_t b, size_t c)
{
    size_t m = a < b ? a : b;
    return m < c ? m : c;
}

/* Insertions, deletions, replacements and swaps of neighbours that lead from a to b. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b), rows[3][LONGEST_NAME + 1];
    if (n > LONGEST_NAME || m > LONGEST_NAME) return LONGEST_NAME;
    for (size_t j = 0; j <= m; j++) rows[0][j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t *row = rows[i % 3], *last = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            row[j] = smallest(row[j - 1] + 1, last[j] + 1, last[j - 1] + (a[i - 1] != b[j - 1]));
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped && before[j - 2] + 1 < row[j]) row[j] = before[j - 2] + 1;
        }
    }
    return rows[n % 3][m];
}

struct nearest {
    const char *typed, *name;
    size_t distance;
};

/* An abbreviation counts as one slip, however much was left out. */
static void consider(struct nearest *best, const char *name)
{
    if (!name) return;
    size_t n = strlen(best->typed);
    bool beginning = n >= 2 && strncmp(name, best->typed, n) == 0;
    size_t distance = beginning ? 1 : edit_distance(best->typed, name);
    if (distance >= best->distance) return;
    best->name = name;
    best->distance = distance;
}

static struct nearest nearest_to(const char *typed)
{
    return (struct nearest){typed, NULL, strlen(typed) / 2 + 2};
}

static bool belongs(const struct option_spec *spec, enum command command)
{
    return command == COMMAND_NONE || spec->commands & 1u << command;
}

static const char *command_name(enum command command)
{
    return command == COMMAND_NONE ? "" : command_table[command].name;
}

static linnet_status unknown_option(const char *typed, enum command command, linnet_error *err)
{
    const char *blank = command == COMMAND_NONE ? "" : " ", *name = command_name(command);
    struct nearest best = nearest_to(typed + strspn(typed, "-"));
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!belongs(&option_table[i], command)) continue;
        consider(&best, option_table[i].name);
        consider(&best, option_table[i].other);
    }
    if (best.name)
        return error_set(err, LINNET_INVALID, "unknown option '%s': did you mean '--%s'?", typed,
                         best.name);
    return error_set(err, LINNET_INVALID,
                     "unknown option '%s': 'linnet%s%s --help' lists those there are", typed, blank,
                     name);
}

static linnet_status find_command(const char *typed, enum command *out, linnet_error *err)
{
    struct nearest best = nearest_to(typed);
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(command_table[i].name, typed) == 0) {
            *out = (enum command)i;
            return LINNET_OK;
        }
        if (!command_table[i].hidden) consider(&best, command_table[i].name);
    }
    if (best.name)
        return error_set(err, LINNET_INVALID, "unknown command '%s': did you mean '%s'?", typed,
                         best.name);
    return error_set(err, LINNET_INVALID,
                     "unknown command '%s': 'linnet --help' lists those there are", typed);
}

static linnet_status out_of_range(const char *what, const struct option_spec *spec,
                                  const char *text, linnet_error *err)
{
    const char *kind = spec->kind == OPTION_KIND_NUMBER ? "a number" : "a whole number";
    if (spec->max >= 0x1p62)
        return error_set(err, LINNET_INVALID, "%s: expected %s from %.10g, found '%s'", what, kind,
                         spec->min, text);
    return error_set(err, LINNET_INVALID, "%s: expected %s from %.10g to %.10g, found '%s'", what,
                     kind, spec->min, spec->max, text);
}

static bool parse_integer(const char *text, const char **end, int64_t *out)
{
    char *stop;
    errno = 0;
    long long value = strtoll(text, &stop, 10);
    if (stop == text || errno) return false;
    *end = stop;
    *out = value;
    return true;
}

static bool in_range(const struct option_spec *spec, double value)
{
    return value >= spec->min && value <= spec->max;
}

bool options_size(const char *text, int64_t *bytes)
{
    static const char units[] = "kKmMgGtT"; /* each in both cases */
    char *end;
    if (*text < '0' || *text > '9') return false;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || errno || !isfinite(value) || value < 0) return false;
    const char *unit = *end ? strchr(units, *end) : NULL;
    if (unit) {
        for (const char *u = units; u <= unit; u += 2) value *= 1024;
        end++;
    }
    if (unit && *end == 'i') end++;
    if (*end == 'b' || *end == 'B') end++;
    if (*end || value >= 0x1p62) return false;
    *bytes = (int64_t)value;
    return true;
}

linnet_status options_integers(const char *text, const char *what, double min, double max,
                               struct integers *out, linnet_error *err)
{
    static const char between[] = ", \t\r\n[]";
    const struct option_spec range = {.kind = OPTION_KIND_INTEGER, .min = min, .max = max};
    size_t capacity = 0;
    *out = (struct integers){0};
    for (const char *p = text + strspn(text, between); *p; p += strspn(p, between)) {
        int64_t value;
        const char *end = p;
        if (!parse_integer(p, &end, &value) || (*end && !strchr(between, *end)) ||
            !in_range(&range, (double)value)) {
            char found[32];
            snprintf(found, sizeof found, "%.*s", (int)strcspn(p, between), p);
            free(out->items);
            *out = (struct integers){0};
            return out_of_range(what, &range, found, err);
        }
        if (!mem_reserve((void **)&out->items, &capacity, out->n + 1, sizeof *out->items)) {
            free(out->items);
            *out = (struct integers){0};
            return error_memory(err, what, (capacity + 1) * sizeof *out->items);
        }
        out->items[out->n++] = value;
        p = end;
    }
    if (out->n == 0)
        return error_set(err, LINNET_INVALID, "%s: expected numbers like 1,2,3, found '%.32s'",
                         what, text);
    return LINNET_OK;
}

static bool is_choice(const char *choices, const char *text)
{
    for (const char *c = choices; c; c = strchr(c, '|') ? strchr(c, '|') + 1 : NULL) {
        size_t n = strcspn(c, "|");
        if (strlen(text) == n && memcmp(c, text, n) == 0) return true;
        bool numbered = n > 2 && c[n - 2] == ':' && c[n - 1] == 'N';
        if (!numbered || strncmp(c, text, n - 1) != 0) continue;
        const char *digits = text + n - 1;
        size_t count = strspn(digits, "0123456789");
        if (count > 0 && count < 5 && !digits[count]) return true;
    }
    return false;
}

static linnet_status append_text(struct texts *list, const char *text, linnet_error *err)
{
    const char **grown = mem_resize(list->items, list->n + 1, sizeof *grown);
    if (!grown) return error_memory(err, "the command line", (list->n + 1) * sizeof *grown);
    grown[list->n++] = text;
    list->items = grown;
    return LINNET_OK;
}

static linnet_status add_text(struct texts *list, size_t most, const char *what, const char *text,
                              linnet_error *err)
{
    if (!*text)
        return error_set(err, LINNET_INVALID, "%s: expected a text of at least one character",
                         what);
    if (list->n == most)
        return error_set(err, LINNET_INVALID, "%s: expected at most %zu of them", what, most);
    return append_text(list, text, err);
}

/* Nothing changes on failure. */
static linnet_status store(struct options *options, enum option_id id, const char *what,
                           const char *text, linnet_error *err)
{
    const struct option_spec *spec = &option_table[id];
    void *field = (char *)options + spec->offset;
    const char *end = "";
    int64_t integer;
    struct integers list;
    switch (spec->kind) {
    case OPTION_KIND_FLAG: *(bool *)field = true; break;
    case OPTION_KIND_INTEGER:
        if (!parse_integer(text, &end, &integer) || *end || !in_range(spec, (double)integer))
            return out_of_range(what, spec, text, err);
        *(int64_t *)field = integer;
        break;
    case OPTION_KIND_NUMBER: {
        char *stop;
        double number = strtod(text, &stop);
        if (stop == text || *stop || !in_range(spec, number))
            return out_of_range(what, spec, text, err);
        *(double *)field = number;
        break;
    }
    case OPTION_KIND_SIZE:
        if (!options_size(text, &integer) || !in_range(spec, (double)integer))
            return error_set(err, LINNET_INVALID, "%s: expected a size like 512M or 2G, found '%s'",
                             what, text);
        *(int64_t *)field = integer;
        break;
    case OPTION_KIND_CHOICE:
        if (!is_choice(spec->choices, text))
            return error_set(err, LINNET_INVALID, "%s: expected one of %s, found '%s'", what,
                             spec->choices, text);
        *(const char **)field = text;
        break;
    case OPTION_KIND_TEXT:
    case OPTION_KIND_FILE: *(const char **)field = text; break;
    case OPTION_KIND_TEXTS:
        if (add_text(field, (size_t)spec->max, what, text, err)) return err->status;
        break;
    case OPTION_KIND_INTEGERS:
        if (options_integers(text, what, spec->min, spec->max, &list, err)) return err->status;
        free(((struct integers *)field)->items);
        *(struct integers *)field = list;
        break;
    }
    options->given[id] = true;
    return LINNET_OK;
}

static bool same_name(const char *name, const char *typed, size_t n)
{
    return name && strlen(name) == n && memcmp(name, typed, n) == 0;
}

static int find_long(const char *typed, size_t n)
{
    for (int i = 0; i < OPTION_COUNT; i++)
        if (same_name(option_table[i].name, typed, n) || same_name(option_table[i].other, typed, n))
            return i;
    return -1;
}

static int find_letter(char letter)
{
    for (int i = 0; i < OPTION_COUNT; i++)
        if (option_table[i].letter == letter) return i;
    return -1;
}

struct arguments {
    int argc, next;
    char **argv;
};

/* "--name", "--name value", "--name=value" */
static linnet_status parse_long(struct arguments *args, const char *arg, struct options *options,
                                linnet_error *err)
{
    char what[LONGEST_NAME];
    size_t n = strcspn(arg + 2, "=");
    int id = find_long(arg + 2, n);
    snprintf(what, sizeof what, "%.*s", (int)n + 2, arg);
    if (id < 0) return unknown_option(what, options->command, err);
    const char *value = arg[2 + n] ? arg + n + 3 : NULL;
    if (option_table[id].kind == OPTION_KIND_FLAG) {
        if (value) return error_set(err, LINNET_INVALID, "option '%s' takes no value", what);
    } else if (!value) {
        if (args->next >= args->argc)
            return error_set(err, LINNET_INVALID, "option '%s' needs a value: %s %s", what, what,
                             option_table[id].argument);
        value = args->argv[args->next++];
    }
    return store(options, (enum option_id)id, what, value, err);
}

/* "-v", "-qv", "-n 8", "-n8" */
static linnet_status parse_letters(struct arguments *args, const char *arg, struct options *options,
                                   linnet_error *err)
{
    size_t n = strcspn(arg + 1, "=");
    if (n > 1 && find_long(arg + 1, n) >= 0)
        return error_set(err, LINNET_INVALID, "unknown option '%s': did you mean '-%s'?", arg, arg);
    for (const char *p = arg + 1; *p; p++) {
        char what[3] = {'-', *p, 0};
        int id = find_letter(*p);
        if (id < 0) return unknown_option(p == arg + 1 ? arg : what, options->command, err);
        const char *value = NULL;
        if (option_table[id].kind != OPTION_KIND_FLAG) {
            if (p[1])
                value = p + 1 + (p[1] == '=');
            else if (args->next < args->argc)
                value = args->argv[args->next++];
            else
                return error_set(err, LINNET_INVALID, "option '%s' needs a value: %s %s", what,
                                 what, option_table[id].argument);
        }
        linnet_status status = store(options, (enum option_id)id, what, value, err);
        if (status || value) return status;
    }
    return LINNET_OK;
}

static linnet_status check_belonging(const struct options *options, linnet_error *err)
{
    enum command command = options->command;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option_spec *spec = &option_table[i];
        if (options->given[i] && !belongs(spec, command))
            return error_set(err, LINNET_INVALID,
                             "option '--%s' is not one of 'linnet %s': 'linnet %s --help' lists "
                             "those there are",
                             spec->name, command_name(command), command_name(command));
    }
    if (command != COMMAND_NONE &&
        options->arguments.n > (size_t)command_table[command].max_arguments)
        return error_set(err, LINNET_INVALID,
                         "unexpected argument '%s' (put a text with blanks in quotes)",
                         options->arguments.items[command_table[command].max_arguments]);
    return LINNET_OK;
}

linnet_status options_parse(int argc, char **argv, struct options *options, linnet_error *err)
{
    *options = (struct options){.command = COMMAND_NONE,
                                .answers = 1,
                                .generated = 64,
                                .repeat = 3,
                                .dtype = "bf16",
                                .host = "127.0.0.1",
                                .port = 8000,
                                .drain_timeout = 30};
    struct arguments args = {argc, 1, argv};
    bool only_arguments = false;
    while (args.next < argc) {
        const char *arg = argv[args.next++];
        linnet_status status;
        if (!only_arguments && strcmp(arg, "--") == 0) {
            only_arguments = true;
            continue;
        }
        if (!only_arguments && strncmp(arg, "--", 2) == 0)
            status = parse_long(&args, arg, options, err);
        else if (!only_arguments && arg[0] == '-' && arg[1])
            status = parse_letters(&args, arg, options, err);
        else if (options->command == COMMAND_NONE && strcmp(arg, "help") == 0)
            status = store(options, OPTION_HELP, "help", NULL, err); /* `linnet help run` */
        else if (options->command == COMMAND_NONE)
            status = find_command(arg, &options->command, err);
        else
            status = append_text(&options->arguments, arg, err);
        if (status) return status;
    }
    return check_belonging(options, err);
}

linnet_status options_assign(struct options *options, const char *name, const char *text,
                             linnet_error *err)
{
    int id = find_long(name, strlen(name));
    if (id < 0 || !belongs(&option_table[id], options->command))
        return unknown_option(name, options->command, err);
    /* Lists are refused before they are touched, and are never what makes options_check fail. */
    struct options changed = *options;
    linnet_status status = store(&changed, (enum option_id)id, name, text, err);
    if (!status) status = options_check(&changed, err);
    if (!status) *options = changed;
    return status;
}

void options_free(struct options *options)
{
    free(options->arguments.items);
    free(options->stop.items);
    free(options->served_model_name.items);
    free(options->api_key.items);
    free(options->cors_origin.items);
    free(options->prompt_ids.items);
    free(options->batch.items);
    free(options->prompt.items);
    *options = (struct options){.command = COMMAND_NONE};
}
