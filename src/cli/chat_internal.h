/* chat_internal.h - the state of a conversation, shared by cmd_chat.c and chat_commands.c. */
#ifndef LINNET_CLI_CHAT_INTERNAL_H
#define LINNET_CLI_CHAT_INTERNAL_H

#include "cli/lines.h"
#include "cli/session.h"

struct chat {
    struct options options; /* a copy that /set changes; lists still belong to the caller */
    struct session session;
    struct lines *lines;
    json_t *messages;
    struct strbuf speed; /* of the last answer */
    bool leave, broken;  /* broken: standard output is gone */
    bool failed;         /* something asked for was not done */
};

/* A dim line on standard error: a fault, or what was asked for. */
void chat_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same for what --quiet leaves out. */
void chat_remark(const struct chat *chat, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

linnet_status chat_add(struct chat *chat, const char *role, const char *text, size_t n,
                       linnet_error *err);
/* Role of the last message, or of the one `back` before it; "" if there is none. */
const char *chat_role(const struct chat *chat, size_t back);
void chat_drop_last(struct chat *chat);

/* Answers the last message, which is the user's. If there is no answer: false, the conversation is
 * as it was, and the reason was said, with `consequence` behind it. */
bool chat_answer(struct chat *chat, const char *consequence);

/* "/name arguments", n bytes with a NUL behind them. */
void chat_command(struct chat *chat, const char *line, size_t n);

#endif
