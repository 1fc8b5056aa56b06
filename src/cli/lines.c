#include "cli/lines.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "base/memory.h"
#include "cli/input.h"
#include "cli/interrupt.h"

#ifdef LINNET_HAVE_EDIT
#include <histedit.h>
#endif

struct lines {
    bool interactive;
    struct input_lines plain; /* without an editor */
#ifdef LINNET_HAVE_EDIT
    EditLine *editor;
    History *history;
    char *history_path;
    const char *prompt;
#endif
};

bool lines_history_path(struct strbuf *out)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    if (state && state[0] == '/')
        strbuf_format(out, "%s/linnet/history", state);
    else if (home && *home)
        strbuf_format(out, "%s/.local/state/linnet/history", home);
    return out->size > 0 && !out->failed;
}

static enum line_result read_plain(struct lines *lines, const char *prompt, struct strbuf *out)
{
    if (lines->interactive) fputs(prompt, stderr);
    const char *text;
    size_t n;
    enum input_result result = input_line(&lines->plain, &text, &n);
    if (result == INPUT_INTERRUPTED) return LINE_INTERRUPTED;
    if (result != INPUT_LINE) return LINE_END;
    while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r')) n--;
    strbuf_append(out, text, n);
    return LINE_READ;
}

#ifdef LINNET_HAVE_EDIT

enum { HISTORY_LINES = 1000 };

static char *prompt_text(EditLine *editor)
{
    struct lines *lines;
    static char nothing[] = "";
    if (el_get(editor, EL_CLIENTDATA, &lines) != 0) return nothing;
    return (char *)(uintptr_t)lines->prompt; /* the interface is older than const */
}

/* One character for the editor; an interrupt ends the line. */
static int read_character(EditLine *editor, wchar_t *out)
{
    mbstate_t state = {0};
    (void)editor;
    for (;;) {
        char byte;
        if (!interrupt_await_input(STDIN_FILENO)) {
            errno = EINTR;
            return -1;
        }
        ssize_t n = read(STDIN_FILENO, &byte, 1);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) return (int)n;
        size_t used = mbrtowc(out, &byte, 1, &state);
        if (used == (size_t)-2) continue; /* the character goes on */
        if (used == (size_t)-1) *out = L'?';
        return 1;
    }
}

static void open_history(struct lines *lines, const char *path)
{
    HistEvent event;
    lines->history = history_init();
    if (!lines->history) return;
    history(lines->history, &event, H_SETSIZE, HISTORY_LINES);
    history(lines->history, &event, H_SETUNIQUE, 1);
    el_set(lines->editor, EL_HIST, history, lines->history);
    char *copy = path ? mem_string(path, strlen(path)) : NULL;
    if (!copy) return;
    for (char *p = strchr(copy + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = 0;
        mkdir(copy, 0700);
        *p = '/';
    }
    history(lines->history, &event, H_LOAD, copy);
    lines->history_path = copy;
}

static void open_editor(struct lines *lines, const char *history_path)
{
    lines->editor = el_init("linnet", stdin, stdout, stderr);
    if (!lines->editor) return;
    el_set(lines->editor, EL_CLIENTDATA, lines);
    el_set(lines->editor, EL_PROMPT_ESC, prompt_text, '\1');
    el_set(lines->editor, EL_EDITOR, "emacs");
    el_set(lines->editor, EL_SIGNAL, 1); /* the terminal is restored before our handlers run */
    el_wset(lines->editor, EL_GETCFN, read_character);
    open_history(lines, history_path);
}

/* What is typed is private. */
static void remember(struct lines *lines, const char *line)
{
    HistEvent event;
    if (!lines->history || line[strspn(line, " \t\r\n")] == 0) return;
    history(lines->history, &event, H_ENTER, line);
    if (!lines->history_path) return;
    mode_t mask = umask(077);
    history(lines->history, &event, H_SAVE, lines->history_path);
    umask(mask);
}

static enum line_result read_edited(struct lines *lines, const char *prompt, struct strbuf *out)
{
    int n = 0;
    lines->prompt = prompt;
    const char *line = el_gets(lines->editor, &n);
    if (interrupt_seen()) {
        el_reset(lines->editor);
        return LINE_INTERRUPTED;
    }
    if (!line || n <= 0) return LINE_END;
    remember(lines, line);
    size_t size = strcspn(line, "\n");
    strbuf_append(out, line, size);
    return LINE_READ;
}

#endif

struct lines *lines_open(const char *history_path)
{
    struct lines *lines = mem_new(1, sizeof *lines);
    if (!lines) return NULL;
    lines->interactive = isatty(STDIN_FILENO);
    lines->plain.fd = STDIN_FILENO;
#ifdef LINNET_HAVE_EDIT
    if (lines->interactive && isatty(STDOUT_FILENO)) open_editor(lines, history_path);
#else
    (void)history_path;
#endif
    return lines;
}

bool lines_interactive(const struct lines *lines)
{
    return lines->interactive;
}

enum line_result lines_read(struct lines *lines, const char *prompt, struct strbuf *out)
{
#ifdef LINNET_HAVE_EDIT
    if (lines->editor) return read_edited(lines, prompt, out);
#endif
    return read_plain(lines, prompt, out);
}

void lines_close(struct lines *lines)
{
    if (!lines) return;
#ifdef LINNET_HAVE_EDIT
    if (lines->editor) el_end(lines->editor);
    if (lines->history) history_end(lines->history);
    free(lines->history_path);
#endif
    input_lines_free(&lines->plain);
    free(lines);
}
