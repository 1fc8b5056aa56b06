/* tokenize - from text to ids, the way back, and rendered chats. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "cli/commands.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/session.h"

static json_t *ids_json(const int32_t *ids, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(list, json_integer(ids[i]));
    return list;
}

static void ids_text(const int32_t *ids, size_t n, struct strbuf *out)
{
    for (size_t i = 0; i < n; i++) strbuf_format(out, "%s%d", i ? " " : "", ids[i]);
    strbuf_char(out, '\n');
}

static int encode(const struct session *s, const struct strbuf *text)
{
    unsigned flags = LINNET_ADD_SPECIAL | (s->options->special ? LINNET_PARSE_SPECIAL : 0);
    int32_t *ids = NULL;
    size_t n;
    linnet_error err;
    bool good;
    if (linnet_tokenize(s->model, strbuf_cstr(text), text->size, flags, &ids, &n, &err))
        return output_error(&err);
    if (s->options->json) {
        good = output_json(json_pack("{s:o}", "ids", ids_json(ids, n)), 0);
    } else {
        struct strbuf out = {0};
        ids_text(ids, n, &out);
        good = output_strbuf(&out);
    }
    linnet_free(ids);
    return good ? EXIT_DONE : EXIT_FAILED;
}

/* Exactly the bytes of the text; a line end is added on a terminal only. */
static int decode(const struct session *s, const struct strbuf *text)
{
    struct integers numbers;
    linnet_error err;
    char *decoded = NULL;
    size_t size;
    if (memchr(strbuf_cstr(text), 0, text->size))
        return output_usage("--decode: expected numbers, found the character U+0000");
    if (strspn(strbuf_cstr(text), " \t\r\n[]") == text->size)
        numbers = (struct integers){0};
    else if (options_integers(strbuf_cstr(text), "--decode", 0, INT32_MAX, &numbers, &err))
        return output_usage("%s", err.message);
    int32_t *ids = mem_new(numbers.n, sizeof *ids);
    linnet_status status = LINNET_OK;
    if (!ids) status = error_memory(&err, "the token ids", numbers.n * sizeof *ids);
    for (size_t i = 0; i < numbers.n && ids; i++) ids[i] = (int32_t)numbers.items[i];
    if (!status) status = linnet_detokenize(s->model, ids, numbers.n, 0, &decoded, &size, &err);
    free(ids);
    free(numbers.items);
    if (status) return output_error(&err);
    bool good;
    if (s->options->json)
        good = output_json(json_pack("{s:o}", "text", openai_text(decoded, size)), 0);
    else
        good = output_write(decoded, size) && (!isatty(STDOUT_FILENO) || output_text("\n"));
    linnet_free(decoded);
    return good ? EXIT_DONE : EXIT_FAILED;
}

/* The text is a list of messages, or an object that holds one. */
static int render(const struct session *s, const struct strbuf *text)
{
    json_error_t where;
    json_t *json = json_loadb(strbuf_cstr(text), text->size, JSON_ALLOW_NUL, &where);
    linnet_error err;
    if (!json) {
        error_set(&err, LINNET_FORMAT, "--chat: expected JSON, line %d: %s", where.line,
                  where.text);
        return output_error(&err);
    }
    if (json_is_array(json)) json = json_pack("{s:o}", "messages", json);
    char *request = json_dumps(json, JSON_COMPACT), *rendered = NULL;
    json_decref(json);
    int32_t *ids = NULL;
    size_t n = 0, size = 0;
    linnet_status status =
        request ? linnet_chat_tokenize(s->model, request, strlen(request), &rendered, &size, &ids,
                                       &n, &err)
                : error_set(&err, LINNET_MEMORY, "out of memory: the messages as JSON");
    free(request);
    if (status == LINNET_INVALID) err.status = LINNET_FORMAT; /* the text is wrong, not the usage */
    if (status) return output_error(&err);
    bool good;
    if (s->options->json) {
        good = output_json(
            json_pack("{s:o,s:o}", "text", openai_text(rendered, size), "ids", ids_json(ids, n)),
            0);
    } else {
        struct strbuf out = {0};
        strbuf_append(&out, rendered, size);
        strbuf_text(&out, "\n");
        ids_text(ids, n, &out);
        good = output_strbuf(&out);
    }
    linnet_free(rendered);
    linnet_free(ids);
    return good ? EXIT_DONE : EXIT_FAILED;
}

/* --decode takes ids as several arguments too: `linnet tokenize --decode $(linnet tokenize hello)`
 */
static linnet_status read_text(const struct options *o, struct strbuf *text, linnet_error *err)
{
    const struct texts *arguments = &o->arguments;
    if (arguments->n < 2) return input_text(o, text, err);
    if (!o->decode || o->file)
        return error_set(err, LINNET_INVALID,
                         "unexpected argument '%s' (put a text with blanks in quotes)",
                         arguments->items[1]);
    for (size_t i = 0; i < arguments->n; i++) strbuf_format(text, "%s ", arguments->items[i]);
    return text->failed ? error_memory(err, "the token ids", text->size) : LINNET_OK;
}

int command_tokenize(const struct options *o)
{
    struct session s = {0};
    struct strbuf text = {0};
    linnet_error err;
    linnet_status status = read_text(o, &text, &err);
    int code = EXIT_DONE;
    if (status || session_open(&s, o, false, &err))
        code = output_error(&err);
    else
        code = o->decode ? decode(&s, &text) : o->chat ? render(&s, &text) : encode(&s, &text);
    session_close(&s);
    strbuf_free(&text);
    return code;
}
