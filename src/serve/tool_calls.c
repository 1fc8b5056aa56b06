#include "serve/tool_calls.h"

#include <string.h>

static const char think_open[] = "<think>";
static const char think_close[] = "</think>";
static const char call_open[] = "<tool_call>";
static const char call_close[] = "</tool_call>";
static const char python_tag[] = "<|python_tag|>";

/* ---- giving out ---------------------------------------------------------------------------- */

static void give_text(struct tool_parser *p)
{
    if (p->text.size == 0) return;
    struct tool_event event = {
        .type = p->text_type, .text = strbuf_cstr(&p->text), .size = p->text.size};
    p->emit(p->user, &event);
    strbuf_clear(&p->text);
}

static void give_call(struct tool_parser *p, enum tool_event_type type, const char *text,
                      size_t size)
{
    struct tool_event event = {type, p->n_begun - 1, p->call.name, text, size};
    give_text(p);
    p->emit(p->user, &event);
}

static void begin_call(struct tool_parser *p)
{
    p->call.begun = true;
    p->n_begun++;
    give_call(p, TOOL_CALL_BEGIN, NULL, 0);
}

static void give_arguments(struct tool_parser *p)
{
    struct tool_reading *call = &p->call;
    size_t end = call->arguments_end ? call->arguments_end : call->source.size;
    if (!call->begun || !call->seen[TOOL_FIELD_ARGUMENTS] || call->source.failed) return;
    if (end <= call->given) return;
    give_call(p, TOOL_CALL_ARGUMENTS, call->source.data + call->given, end - call->given);
    call->given = end;
}

/* Blanks before more text: kept, unless nothing that they could separate stands before them. */
static void settle_blanks(struct tool_parser *p)
{
    bool keep = p->state == TOOL_IN_REASONING ? p->has_reasoning : !p->after_tag || p->has_content;
    if (keep) strbuf_append(&p->text, p->blank.data, p->blank.size);
    strbuf_clear(&p->blank);
}

static void add_text(struct tool_parser *p, const char *bytes, size_t n)
{
    bool reasoning = p->state == TOOL_IN_REASONING;
    enum tool_event_type type = reasoning ? TOOL_REASONING : TOOL_CONTENT;
    if (n == 0) return;
    if (p->text_type != type) give_text(p);
    p->text_type = type;
    settle_blanks(p);
    strbuf_append(&p->text, bytes, n);
    if (reasoning) {
        p->has_reasoning = true;
        return;
    }
    p->state = TOOL_IN_CONTENT;
    p->has_content = true;
    p->after_tag = false;
}

/* ---- calls --------------------------------------------------------------------------------- */

static void read_call(struct tool_parser *p, enum tool_state state, const char *tag)
{
    struct strbuf source = p->call.source;
    strbuf_clear(&source);
    p->call = (struct tool_reading){.source = source, .tagged = tag == call_open};
    strbuf_text(&p->call.source, tag);
    p->state = state;
}

static void abandon(struct tool_parser *p)
{
    give_arguments(p);
    if (p->call.begun) give_call(p, TOOL_CALL_ABANDONED, NULL, 0);
    p->tag_size = 0;
    p->state = TOOL_IN_CONTENT;
    add_text(p, p->call.source.data, p->call.source.size);
}

static void complete(struct tool_parser *p)
{
    struct tool_reading *call = &p->call;
    give_arguments(p);
    if (!call->seen[TOOL_FIELD_ARGUMENTS]) give_call(p, TOOL_CALL_ARGUMENTS, "{}", 2);
    give_call(p, TOOL_CALL_END, strbuf_cstr(&call->source), call->source.size);
    strbuf_clear(&p->blank);
    p->tag_size = 0;
    p->n_complete++;
    p->after_tag = true;
    p->state = p->options.one_call ? TOOL_CLOSED : TOOL_IN_CONTENT;
}

static bool text_is(const struct json_scan *s, const char *text)
{
    size_t n = strlen(text);
    return s->text_size == n && n <= sizeof s->text && memcmp(s->text, text, n) == 0;
}

static bool take_key(struct tool_reading *call)
{
    static const char *const harmless[] = {"type", "id"};
    const struct json_scan *s = &call->scan;
    bool arguments = text_is(s, "arguments") || text_is(s, "parameters");
    call->field = arguments            ? TOOL_FIELD_ARGUMENTS
                  : text_is(s, "name") ? TOOL_FIELD_NAME
                                       : TOOL_FIELD_OTHER;
    if (call->field == TOOL_FIELD_OTHER) {
        /* An object without a tag may be anything: a key that no call has decides early. */
        bool known = call->tagged;
        for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++)
            known |= text_is(s, harmless[i]);
        return known;
    }
    if (call->seen[call->field]) return false;
    call->seen[call->field] = true;
    return true;
}

static bool take_name(struct tool_parser *p)
{
    struct tool_reading *call = &p->call;
    for (size_t i = 0; i < p->options.n_names; i++) {
        const char *name = p->options.names[i];
        if (!text_is(&call->scan, name) || strlen(name) >= sizeof call->name) continue;
        memcpy(call->name, name, strlen(name) + 1);
        return true;
    }
    return false;
}

/* What a byte at `offset` of the source means for the call; false: this is none. */
static bool follow(struct tool_parser *p, enum json_step step, char c, size_t depth, size_t offset)
{
    struct tool_reading *call = &p->call;
    bool begin = step == JSON_STEP_BEGIN && depth == 1;
    bool end = step == JSON_STEP_END && call->scan.depth == 1;
    if (step == JSON_STEP_BAD) return false;
    if (step == JSON_STEP_KEY && depth == 1) return take_key(call);
    if (step == JSON_STEP_END && call->scan.depth == 0) return *call->name;
    if (begin && call->field == TOOL_FIELD_NAME) return c == '"';
    if (end && call->field == TOOL_FIELD_NAME) return take_name(p);
    if (begin && call->field == TOOL_FIELD_ARGUMENTS) {
        call->arguments_begin = call->given = offset;
        return c == '{';
    }
    if (end && call->field == TOOL_FIELD_ARGUMENTS) call->arguments_end = offset + 1;
    return true;
}

/* ---- a byte in each state: false means that it must be looked at again, in another state --- */

static bool take_object(struct tool_parser *p, char c)
{
    struct tool_reading *call = &p->call;
    size_t depth = call->scan.depth, offset = call->source.size;
    if (!follow(p, json_scan(&call->scan, c), c, depth, offset)) {
        abandon(p);
        return false;
    }
    strbuf_char(&call->source, c);
    bool done = depth == 1 && call->scan.depth == 0;
    if (!call->begun && *call->name && (call->arguments_begin || done)) begin_call(p);
    if (done) p->state = TOOL_AFTER_OBJECT;
    return true;
}

static bool take_before_object(struct tool_parser *p, char c)
{
    if (json_is_blank(c)) {
        strbuf_char(&p->call.source, c);
        return true;
    }
    if (c == '{')
        p->state = TOOL_IN_OBJECT;
    else
        abandon(p);
    return false;
}

static bool take_after_object(struct tool_parser *p, char c)
{
    bool blank = json_is_blank(c) && p->tag_size == 0;
    if (p->call.tagged ? c == call_close[p->tag_size] : c == ';') {
        strbuf_char(&p->call.source, c);
        if (p->call.tagged && ++p->tag_size == sizeof call_close - 1) complete(p);
        return true;
    }
    if (blank) {
        strbuf_char(&p->call.source, c);
        return true;
    }
    if (p->call.tagged || c != '{') {
        abandon(p);
        return false;
    }
    complete(p);
    if (p->state != TOOL_CLOSED) read_call(p, TOOL_IN_OBJECT, "");
    return false;
}

/* The tag that p->tag begins or is, among those that may stand here; NULL: none. */
static const char *find_tag(const struct tool_parser *p)
{
    bool start = p->state == TOOL_AT_START, calls = p->options.n_names > 0;
    const struct {
        const char *tag;
        bool allowed;
    } tags[] = {{think_open, start && !p->thought},
                {think_close, p->state == TOOL_IN_REASONING},
                {call_open, calls && p->state != TOOL_IN_REASONING},
                {python_tag, calls && start}};
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++)
        if (tags[i].allowed && strncmp(tags[i].tag, p->tag, p->tag_size) == 0) return tags[i].tag;
    return NULL;
}

static void take_whole_tag(struct tool_parser *p, const char *tag)
{
    p->tag_size = 0;
    if (tag == call_open || tag == python_tag) {
        read_call(p, TOOL_BEFORE_OBJECT, tag);
        return;
    }
    strbuf_clear(&p->blank);
    p->thought = true;
    p->after_tag = tag == think_close;
    p->state = tag == think_open ? TOOL_IN_REASONING : TOOL_AT_START;
}

static bool take_tag(struct tool_parser *p, char c)
{
    p->tag[p->tag_size++] = c;
    const char *tag = find_tag(p);
    if (tag) {
        if (!tag[p->tag_size]) take_whole_tag(p, tag);
        return true;
    }
    /* Every tag has its only '<' in front: what did not become one holds no other's beginning. */
    size_t n = p->tag_size - 1;
    p->tag_size = 0;
    if (n == 0)
        add_text(p, &c, 1);
    else
        add_text(p, p->tag, n);
    return n == 0;
}

static bool take_text(struct tool_parser *p, char c)
{
    if (p->tag_size || c == '<') return take_tag(p, c);
    if (json_is_blank(c)) {
        strbuf_char(&p->blank, c);
        return true;
    }
    if (c == '{' && p->state == TOOL_AT_START && p->options.n_names) {
        read_call(p, TOOL_IN_OBJECT, "");
        return false;
    }
    add_text(p, &c, 1);
    return true;
}

static bool take(struct tool_parser *p, char c)
{
    switch (p->state) {
    case TOOL_BEFORE_OBJECT: return take_before_object(p, c);
    case TOOL_IN_OBJECT: return take_object(p, c);
    case TOOL_AFTER_OBJECT: return take_after_object(p, c);
    case TOOL_CLOSED: return true;
    default: return take_text(p, c);
    }
}

/* ---- the parser ---------------------------------------------------------------------------- */

void tool_parser_init(struct tool_parser *p, const struct tool_options *options)
{
    *p = (struct tool_parser){.options = *options, .thought = options->in_reasoning};
    if (options->in_reasoning) p->state = TOOL_IN_REASONING;
}

void tool_parser_feed(struct tool_parser *p, const char *text, size_t n, tool_event_fn emit,
                      void *user)
{
    p->emit = emit;
    p->user = user;
    for (size_t i = 0; i < n; i++) {
        if (p->state == TOOL_IN_CONTENT && p->options.n_names == 0) { /* nothing to look for */
            add_text(p, text + i, n - i);
            break;
        }
        while (!take(p, text[i])) continue;
    }
    give_text(p);
    if (p->state == TOOL_IN_OBJECT) give_arguments(p);
}

void tool_parser_finish(struct tool_parser *p, tool_event_fn emit, void *user)
{
    p->emit = emit;
    p->user = user;
    if (p->state == TOOL_AFTER_OBJECT)
        complete(p);
    else if (p->state == TOOL_BEFORE_OBJECT || p->state == TOOL_IN_OBJECT)
        abandon(p);
    else
        add_text(p, p->tag, p->tag_size);
    p->tag_size = 0;
    if (!p->after_tag && p->blank.size) settle_blanks(p);
    give_text(p);
}

void tool_parser_free(struct tool_parser *p)
{
    strbuf_free(&p->blank);
    strbuf_free(&p->text);
    strbuf_free(&p->call.source);
}

bool tool_parser_failed(const struct tool_parser *p)
{
    return p->blank.failed || p->text.failed || p->call.source.failed;
}
