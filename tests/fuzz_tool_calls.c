/*
 * Any answer in any pieces. The first byte chooses the options, the second the cut. However it is
 * cut the result is the same, and nothing of the text is lost but blanks and the think tags.
 */
#include <stdlib.h>
#include <string.h>

#include "base/strbuf.h"
#include "serve/tool_calls.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What came out: reasoning; then content and the sources of calls, in order. */
struct result {
    struct strbuf reasoning, rest, calls, arguments;
    size_t n_begun, n_complete;
    bool open;
};

static void require(bool condition)
{
    if (!condition) abort();
}

static void on_event(void *user, const struct tool_event *event)
{
    struct result *r = user;
    switch (event->type) {
    case TOOL_CONTENT: strbuf_append(&r->rest, event->text, event->size); break;
    case TOOL_REASONING: strbuf_append(&r->reasoning, event->text, event->size); break;
    case TOOL_CALL_BEGIN:
        require(!r->open && event->index == r->n_begun);
        r->n_begun++;
        r->open = true;
        strbuf_clear(&r->arguments);
        break;
    case TOOL_CALL_ARGUMENTS:
        require(r->open && event->size > 0);
        strbuf_append(&r->arguments, event->text, event->size);
        break;
    case TOOL_CALL_END: {
        struct json_scan scan = {0};
        require(r->open && r->arguments.size >= 2);
        for (size_t i = 0; i < r->arguments.size; i++) {
            require(json_scan(&scan, r->arguments.data[i]) != JSON_STEP_BAD);
            require((scan.depth == 0) == (i + 1 == r->arguments.size));
        }
        strbuf_format(&r->calls, "%s ", event->name);
        strbuf_append(&r->calls, r->arguments.data, r->arguments.size);
        strbuf_append(&r->rest, event->text, event->size);
        r->n_complete++;
        r->open = false;
        break;
    }
    case TOOL_CALL_ABANDONED:
        require(r->open);
        r->open = false;
        break;
    }
}

/* In pieces of `step` bytes. */
static struct tool_parser run(const struct tool_options *options, const char *text, size_t n,
                              size_t step, struct result *r)
{
    struct tool_parser p;
    *r = (struct result){0};
    tool_parser_init(&p, options);
    for (size_t at = 0; at < n; at += step) {
        size_t piece = step < n - at ? step : n - at;
        char *copy = malloc(piece);
        memcpy(copy, text + at, piece);
        tool_parser_feed(&p, copy, piece, on_event, r);
        free(copy);
        if (step >= n) break;
    }
    tool_parser_finish(&p, on_event, r);
    require(!r->open && p.n_begun == r->n_begun && p.n_complete == r->n_complete);
    tool_parser_free(&p);
    return p;
}

static void result_free(struct result *r)
{
    strbuf_free(&r->reasoning);
    strbuf_free(&r->rest);
    strbuf_free(&r->calls);
    strbuf_free(&r->arguments);
}

static bool same(const struct strbuf *a, const struct strbuf *b)
{
    return a->size == b->size && (a->size == 0 || memcmp(a->data, b->data, a->size) == 0);
}

/* Whether `text` begins, but for blanks, with `part`; moves behind it. */
static bool skip(const char **text, const char *end, const char *part, size_t n)
{
    const char *at = *text;
    for (size_t i = 0; i < n; i++) {
        if (json_is_blank(part[i])) continue;
        while (at < end && json_is_blank(*at)) at++;
        if (at == end || *at++ != part[i]) return false;
    }
    *text = at;
    return true;
}

static void account(const char *text, size_t n, bool in_reasoning, const struct result *r,
                    const struct tool_parser *p)
{
    const char *end = text + n;
    if (p->thought) {
        if (!in_reasoning) require(skip(&text, end, "<think>", 7));
        require(skip(&text, end, r->reasoning.data, r->reasoning.size));
        if (p->state != TOOL_IN_REASONING) require(skip(&text, end, "</think>", 8));
    } else {
        require(r->reasoning.size == 0);
    }
    require(skip(&text, end, r->rest.data, r->rest.size));
    if (p->state == TOOL_CLOSED) return;
    while (text < end && json_is_blank(*text)) text++;
    require(text == end);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"f", "get_weather"};
    if (size < 2) return 0;
    struct tool_options options = {.names = names,
                                   .n_names = data[0] & 4 ? 0 : 2,
                                   .in_reasoning = data[0] & 1,
                                   .one_call = data[0] & 2};
    size_t n = size - 2;
    const char *text = (const char *)data + 2;
    struct result whole, pieces;
    struct tool_parser p = run(&options, text, n, n + 1, &whole);
    account(text, n, options.in_reasoning, &whole, &p);
    run(&options, text, n, 1 + data[1] % 16, &pieces);
    require(same(&whole.reasoning, &pieces.reasoning) && same(&whole.rest, &pieces.rest));
    require(same(&whole.calls, &pieces.calls) && whole.n_begun == pieces.n_begun);
    result_free(&whole);
    result_free(&pieces);
    return 0;
}
