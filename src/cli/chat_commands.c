/* chat_commands.c - what begins with a slash in a chat. */
#include <stdlib.h>
#include <string.h>

#include "cli/chat_internal.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/output_file.h"

static void complain(struct chat *chat, const linnet_error *err)
{
    chat->failed = true;
    chat_say("%s", err->message);
}

static void do_clear(struct chat *chat, const char *arguments)
{
    (void)arguments;
    size_t n = json_array_size(chat->messages);
    const char *first = n ? chat_role(chat, n - 1) : "";
    size_t kept = strcmp(first, "system") == 0;
    while (json_array_size(chat->messages) > kept) chat_drop_last(chat);
    chat_remark(chat, "(a new conversation)");
}

static void do_system(struct chat *chat, const char *arguments)
{
    linnet_error err;
    json_t *first = json_array_get(chat->messages, 0);
    const char *role = json_string_value(json_object_get(first, "role"));
    if (role && strcmp(role, "system") == 0) json_array_remove(chat->messages, 0);
    if (!*arguments) {
        chat_remark(chat, "(no system message of your own)");
        return;
    }
    json_t *rest = chat->messages;
    chat->messages = json_array();
    if (chat_add(chat, "system", arguments, strlen(arguments), &err))
        complain(chat, &err);
    else
        chat_remark(chat, "(system message set)");
    json_array_extend(chat->messages, rest);
    json_decref(rest);
}

static bool can_be_set(const struct option_spec *spec)
{
    return spec->group == GROUP_SAMPLING && spec->commands & 1u << COMMAND_CHAT &&
           (spec->kind == OPTION_KIND_INTEGER || spec->kind == OPTION_KIND_NUMBER);
}

static void list_settings(const struct chat *chat)
{
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option_spec *spec = &option_table[i];
        const void *field = (const char *)&chat->options + spec->offset;
        if (!can_be_set(spec)) continue;
        if (!chat->options.given[i])
            chat_say("  %-20s (default)  %s", spec->name, spec->help);
        else if (spec->kind == OPTION_KIND_NUMBER)
            chat_say("  %-20s %-9g  %s", spec->name, *(const double *)field, spec->help);
        else
            chat_say("  %-20s %-9lld  %s", spec->name, (long long)*(const int64_t *)field,
                     spec->help);
    }
}

static void do_set(struct chat *chat, const char *arguments)
{
    char name[48];
    linnet_error err;
    size_t n = strcspn(arguments, " \t="), rest = n + strspn(arguments + n, " \t=");
    if (n == 0) {
        list_settings(chat);
        return;
    }
    snprintf(name, sizeof name, "%.*s", (int)n, arguments);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option_spec *spec = &option_table[i];
        bool named =
            strcmp(spec->name, name) == 0 || (spec->other && strcmp(spec->other, name) == 0);
        if (!named || !can_be_set(spec)) continue;
        if (options_assign(&chat->options, name, arguments + rest, &err)) complain(chat, &err);
        return;
    }
    error_set(&err, LINNET_INVALID, "there is no setting '%s': /set lists them", name);
    complain(chat, &err);
}

static void do_regenerate(struct chat *chat, const char *arguments)
{
    (void)arguments;
    if (strcmp(chat_role(chat, 0), "assistant") == 0 && strcmp(chat_role(chat, 1), "user") == 0) {
        json_t *old =
            json_incref(json_array_get(chat->messages, json_array_size(chat->messages) - 1));
        chat_drop_last(chat);
        if (!chat_answer(chat, "the old answer stays")) json_array_append(chat->messages, old);
        json_decref(old);
    } else {
        chat_say("(there is no answer yet)");
    }
}

static void do_undo(struct chat *chat, const char *arguments)
{
    (void)arguments;
    size_t before = json_array_size(chat->messages);
    while (strcmp(chat_role(chat, 0), "assistant") == 0) chat_drop_last(chat);
    if (strcmp(chat_role(chat, 0), "user") == 0) chat_drop_last(chat);
    if (json_array_size(chat->messages) < before)
        chat_remark(chat, "(the last turn is gone)");
    else
        chat_say("(there is no turn to take back)");
}

static linnet_status save(const struct chat *chat, const char *path, linnet_error *err)
{
    json_t *all = json_pack("{s:o,s:O}", "model",
                            openai_text(chat->session.info.name, strlen(chat->session.info.name)),
                            "messages", chat->messages);
    char *text = all ? json_dumps(all, JSON_INDENT(1)) : NULL;
    json_decref(all);
    if (!text) return error_set(err, LINNET_MEMORY, "out of memory: the conversation as JSON");
    struct output_file file;
    linnet_status status = output_file_open(&file, path, 0600, err); /* what is said is private */
    if (!status) status = output_all(file.fd, path, text, strlen(text), err);
    if (!status) status = output_all(file.fd, path, "\n", 1, err);
    free(text);
    return output_file_close(&file, status, err);
}

/* The name after /save or /load; standard input and output are the conversation's own. */
static linnet_status check_name(const char *command, const char *name, linnet_error *err)
{
    if (!*name) return error_set(err, LINNET_INVALID, "/%s FILE: which file?", command);
    if (strcmp(name, "-") != 0) return LINNET_OK;
    return error_set(err, LINNET_INVALID, "/%s -: the chat itself is there; name a file", command);
}

static void do_save(struct chat *chat, const char *arguments)
{
    linnet_error err;
    linnet_status status = check_name("save", arguments, &err);
    if (!status) status = save(chat, arguments, &err);
    if (status)
        complain(chat, &err);
    else
        chat_remark(chat, "(saved in %s)", arguments);
}

static bool is_conversation(const json_t *messages)
{
    size_t i;
    const json_t *message;
    if (!json_is_array(messages)) return false;
    json_array_foreach(messages, i, message)
    {
        if (!json_is_string(json_object_get(message, "role")) ||
            !json_is_string(json_object_get(message, "content")))
            return false;
    }
    return true;
}

static void do_load(struct chat *chat, const char *arguments)
{
    linnet_error err;
    struct strbuf text = {0};
    json_error_t where;
    json_t *all = NULL, *messages = NULL;
    linnet_status status = check_name("load", arguments, &err);
    if (!status) status = input_read(arguments, &text, &err);
    if (!status) {
        all = json_loadb(strbuf_cstr(&text), text.size, JSON_ALLOW_NUL, &where);
        messages = json_is_array(all) ? all : json_object_get(all, "messages");
        if (!is_conversation(messages))
            status =
                error_set(&err, LINNET_FORMAT,
                          "%s: expected a JSON list of messages with role and content", arguments);
    }
    if (status) {
        complain(chat, &err);
    } else {
        json_decref(chat->messages);
        chat->messages = json_incref(messages);
        chat_remark(chat, "(%zu messages loaded)", json_array_size(messages));
    }
    json_decref(all);
    strbuf_free(&text);
}

static void do_stats(struct chat *chat, const char *arguments)
{
    (void)arguments;
    linnet_stats stats;
    linnet_engine_get_stats(chat->session.engine, &stats);
    chat_say("last answer: %s", chat->speed.size ? chat->speed.data : "none yet");
    chat_say("all: %lld tokens read, %lld of them cached, %lld generated in %lld steps",
             (long long)stats.prompt_tokens, (long long)stats.cached_tokens,
             (long long)stats.generated_tokens, (long long)stats.n_steps);
    chat_say("cache: %d of %d blocks free; device: %s", stats.n_blocks_free, stats.n_blocks,
             chat->session.plan.device);
}

static void do_tokens(struct chat *chat, const char *arguments)
{
    (void)arguments;
    linnet_error err;
    int32_t *ids = NULL;
    size_t n = 0;
    if (json_array_size(chat->messages) == 0) {
        chat_say("0 of %d tokens", chat->session.plan.max_model_len);
    } else if (session_chat_ids(&chat->session, chat->messages, "no tokens", &ids, &n, &err)) {
        complain(chat, &err);
    } else {
        chat_say("%zu of %d tokens in %zu messages", n, chat->session.plan.max_model_len,
                 json_array_size(chat->messages));
    }
    linnet_free(ids);
}

static void do_quit(struct chat *chat, const char *arguments)
{
    (void)arguments;
    chat->leave = true;
}

static void do_help(struct chat *chat, const char *arguments);

static const struct {
    const char *name, *arguments, *help;
    void (*perform)(struct chat *chat, const char *arguments);
} commands[] = {
    {"help", "", "this list", do_help},
    {"clear", "", "begin a new conversation; the system message stays", do_clear},
    {"system", "TEXT", "replace the system message; without a text: none", do_system},
    {"set", "NAME VALUE", "change a setting, like temperature 0.7; alone: list them", do_set},
    {"regenerate", "", "answer the last message again", do_regenerate},
    {"undo", "", "take back the last message and its answer", do_undo},
    {"save", "FILE", "write the conversation as JSON", do_save},
    {"load", "FILE", "go on with a saved conversation", do_load},
    {"stats", "", "speed and cache", do_stats},
    {"tokens", "", "how much of the context is used", do_tokens},
    {"quit", "", "leave, like Ctrl-D", do_quit},
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void do_help(struct chat *chat, const char *arguments)
{
    (void)chat, (void)arguments;
    for (size_t i = 0; i < N_COMMANDS; i++)
        chat_say("  /%-11s %-11s %s", commands[i].name, commands[i].arguments, commands[i].help);
    chat_say("  Several lines: end each but the last with \\, or put \"\"\" before the first "
             "and after the last.");
    chat_say("  Ctrl-C stops an answer.");
}

void chat_command(struct chat *chat, const char *line, size_t size)
{
    linnet_error err;
    if (strlen(line) != size) {
        error_set(&err, LINNET_INVALID, "a command has no character U+0000");
        complain(chat, &err);
        return;
    }
    size_t n = strcspn(line + 1, " \t");
    const char *arguments = line + 1 + n + strspn(line + 1 + n, " \t");
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strlen(commands[i].name) != n || memcmp(commands[i].name, line + 1, n) != 0) continue;
        commands[i].perform(chat, arguments);
        return;
    }
    error_set(&err, LINNET_INVALID, "there is no command '/%.*s': /help lists them",
              (int)(n < 40 ? n : 40), line + 1);
    complain(chat, &err);
}
