/* chat - a conversation. */
#include <string.h>
#include <unistd.h>

#include "cli/chat_internal.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"

static const char prompt_sign[] = "\1\033[1m\1>\1\033[0m\1 ",
                  more_sign[] = "\1\033[2m\1.\1\033[0m\1 ";
static const char plain_sign[] = "> ", plain_more[] = ". ";

static void say(const char *format, va_list args)
{
    bool dim = isatty(STDERR_FILENO);
    if (dim) fputs("\033[2m", stderr);
    vfprintf(stderr, format, args);
    fputs(dim ? "\033[0m\n" : "\n", stderr);
}

void chat_say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(format, args);
    va_end(args);
}

void chat_remark(const struct chat *chat, const char *format, ...)
{
    va_list args;
    if (chat->options.quiet) return;
    va_start(args, format);
    say(format, args);
    va_end(args);
}

linnet_status chat_add(struct chat *chat, const char *role, const char *text, size_t n,
                       linnet_error *err)
{
    json_t *message = json_pack("{s:s,s:o}", "role", role, "content", json_stringn(text, n));
    if (!message) return error_set(err, LINNET_INVALID, "this is not valid UTF-8 text");
    if (json_array_append_new(chat->messages, message) != 0)
        return error_memory(err, "the conversation", n);
    return LINNET_OK;
}

const char *chat_role(const struct chat *chat, size_t back)
{
    size_t n = json_array_size(chat->messages);
    if (back >= n) return "";
    const json_t *message = json_array_get(chat->messages, n - 1 - back);
    const char *role = json_string_value(json_object_get(message, "role"));
    return role ? role : "";
}

void chat_drop_last(struct chat *chat)
{
    size_t n = json_array_size(chat->messages);
    if (n) json_array_remove(chat->messages, n - 1);
}

/* ---- an answer ----------------------------------------------------------------------------- */

static bool on_text(void *user, const char *text, size_t n)
{
    struct chat *chat = user;
    chat->broken = !output_write(text, n);
    return !chat->broken;
}

static void after_answer(struct chat *chat, const struct exchange *x)
{
    const struct openai_answer *a = &x->answers[0];
    strbuf_clear(&chat->speed);
    exchange_speed(x, &chat->speed);
    int32_t used = a->prompt_tokens + a->completion_tokens;
    if (x->interrupted)
        chat_remark(chat, "(stopped; what there is stays in the conversation)");
    else if (a->finish == LINNET_FINISH_LENGTH && used >= chat->session.plan.max_model_len)
        chat_say("(the context of %d tokens is full: /clear begins anew, /undo takes a turn back)",
                 chat->session.plan.max_model_len);
    else if (a->finish == LINNET_FINISH_LENGTH)
        chat_remark(chat, "(cut at --max-tokens %d: /set max-tokens N changes it)",
                    a->completion_tokens);
    if (chat->options.verbose) chat_remark(chat, "%s", strbuf_cstr(&chat->speed));
}

static linnet_status ask(struct chat *chat, const int32_t *ids, size_t n, linnet_error *err)
{
    const struct options *o = &chat->options;
    struct exchange x;
    linnet_request request = {
        .prompt = ids,
        .n_prompt = n,
        .sampling = session_sampling(&chat->session),
        .max_tokens = (int32_t)o->max_tokens,
        .min_tokens = (int32_t)o->min_tokens,
        .ignore_eos = o->ignore_eos,
        .stop = o->stop.items,
        .n_stop = o->stop.n,
    };
    linnet_status status = exchange_run(&chat->session, &request, on_text, chat, &x, err);
    const struct openai_answer *a = status ? NULL : &x.answers[0];
    if (a && !chat->broken) chat->broken = !output_text("\n");
    if (a && a->finish == LINNET_FINISH_ERROR) {
        *err = a->error;
        status = a->error.status;
    } else if (a && x.interrupted && a->text.size == 0) {
        status = error_set(err, LINNET_CANCELLED, "stopped before the first word");
    } else if (a) {
        status = chat_add(chat, "assistant", strbuf_cstr(&a->text), a->text.size, err);
        if (!status && !chat->broken) after_answer(chat, &x);
    }
    exchange_free(&x);
    return status;
}

bool chat_answer(struct chat *chat, const char *consequence)
{
    linnet_error err;
    int32_t *ids = NULL;
    size_t n = 0;
    linnet_status status =
        session_chat_ids(&chat->session, chat->messages,
                         "'linnet run --raw' lets it continue a text", &ids, &n, &err);
    if (!status) status = ask(chat, ids, n, &err);
    linnet_free(ids);
    if (!status) return true;
    if (status != LINNET_CANCELLED) chat->failed = true;
    chat_say("%s; %s%s", err.message, consequence,
             status == LINNET_TOO_LONG ? ": /clear begins anew, /undo takes a turn back" : "");
    return false;
}

/* ---- reading ------------------------------------------------------------------------------- */

/* A message: one line; lines ending in a backslash and the one after them; or all between """. */
static enum line_result read_message(struct chat *chat, struct strbuf *out)
{
    static const char fence[] = "\"\"\"";
    bool edited = lines_interactive(chat->lines) && isatty(STDOUT_FILENO), fenced = false;
    struct strbuf line = {0};
    enum line_result result;
    strbuf_clear(out);
    interrupt_catch();
    for (bool first = true, more = true; more; first = false) {
        strbuf_clear(&line);
        result = edited ? lines_read(chat->lines, first ? prompt_sign : more_sign, &line)
                        : lines_read(chat->lines, first ? plain_sign : plain_more, &line);
        if (result != LINE_READ) break;
        const char *text = strbuf_cstr(&line);
        size_t n = line.size;
        if (first && n >= 3 && memcmp(text, fence, 3) == 0) {
            fenced = true;
            text += 3;
            n -= 3;
        }
        more = fenced;
        if (fenced && n >= 3 && memcmp(text + n - 3, fence, 3) == 0) {
            more = false;
            n -= 3;
        } else if (!fenced && n > 0 && text[n - 1] == '\\') {
            more = true;
            n--;
        }
        strbuf_append(out, text, n);
        if (more && !(fenced && first && n == 0)) strbuf_char(out, '\n');
    }
    strbuf_free(&line);
    if (result == LINE_END && out->size > 0) return LINE_READ; /* the last line had no end */
    return result;
}

static void banner(const struct chat *chat)
{
    struct strbuf device = {0};
    session_device(chat->session.plan.device, chat->session.plan.device_reason, &device);
    chat_remark(chat, "device: %s", strbuf_cstr(&device));
    strbuf_free(&device);
    chat_remark(chat, "%s, context of %d tokens. /help lists the commands, Ctrl-D leaves.",
                chat->session.info.name, chat->session.plan.max_model_len);
}

static void handle(struct chat *chat, const struct strbuf *message)
{
    linnet_error err;
    const char *text = strbuf_cstr(message);
    if (message->failed) {
        chat_say("out of memory: the message is too long");
        chat->failed = true;
    } else if (text[0] == '/' && message->size > 1 && !memchr(text, '\n', message->size)) {
        chat_command(chat, text, message->size);
    } else if (strspn(text, " \t\r\n") < message->size) {
        if (chat_add(chat, "user", text, message->size, &err)) {
            chat_say("%s", err.message);
            chat->failed = true;
        } else if (!chat_answer(chat, "your message was not added")) {
            chat_drop_last(chat);
        }
    }
}

static int converse(struct chat *chat)
{
    struct strbuf message = {0};
    bool interrupted = false;
    while (!chat->leave && !chat->broken && !interrupt_terminate()) {
        enum line_result result = read_message(chat, &message);
        if (interrupt_terminate() || result == LINE_END) break;
        if (result == LINE_INTERRUPTED) {
            interrupted = !lines_interactive(chat->lines);
            if (interrupted) break;
            chat_remark(chat, "\n(Ctrl-D or /quit leaves)");
            continue;
        }
        handle(chat, &message);
    }
    strbuf_free(&message);
    if (lines_interactive(chat->lines) && !chat->leave) fputc('\n', stderr);
    if (interrupted || interrupt_terminate()) return EXIT_INTERRUPTED;
    bool failed = chat->broken || (chat->failed && !lines_interactive(chat->lines));
    return failed ? EXIT_FAILED : EXIT_DONE;
}

int command_chat(const struct options *o)
{
    struct chat chat = {.options = *o, .messages = json_array()};
    struct strbuf history = {0};
    linnet_engine_options engine = session_engine_options(o);
    linnet_error err;
    int code;
    linnet_status status = session_open(&chat.session, &chat.options, false, &err);
    if (!status && o->dry_run) {
        code = session_dry_run(&chat.session, &engine);
    } else {
        if (!status && o->system)
            status = chat_add(&chat, "system", o->system, strlen(o->system), &err);
        if (!status) status = session_start(&chat.session, &engine, &err);
        if (!status) {
            chat.lines = lines_open(lines_history_path(&history) ? history.data : NULL);
            if (!chat.lines) status = error_memory(&err, "the line editor", 1);
        }
        if (!status && lines_interactive(chat.lines)) banner(&chat);
        code = status ? output_error(&err) : converse(&chat);
    }
    lines_close(chat.lines);
    session_close(&chat.session);
    json_decref(chat.messages);
    strbuf_free(&chat.speed);
    strbuf_free(&history);
    return code;
}
