#include "text/template.h"

#include <stdlib.h>
#include <string.h>

#include "text/template_internal.h"

bool jinja_refuse(struct compile *c, linnet_status status, int line, const char *format, ...)
{
    char message[LINNET_ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    error_set(c->err, status, "%s line %d: %s", c->t->name, line, message);
    return false;
}

/* Far above what templates take, which are mostly text; a source of nothing but the shortest
 * expressions would take more than a hundred times its size. */
static size_t compile_limit(size_t source)
{
    enum { FACTOR = 64, LEAST = 1 << 20, MOST = 64 << 20 };
    size_t limit = FACTOR * source + LEAST;
    return limit < MOST ? limit : MOST;
}

linnet_status template_compile(const char *source, size_t size, const char *name,
                               struct chat_template **out, linnet_error *err)
{
    linnet_error local;
    *out = NULL;
    if (!err) err = &local;
    if (size > MAX_SOURCE)
        return error_set(err, LINNET_UNSUPPORTED,
                         "%s: expected at most %d bytes, found %zu; use a smaller template", name,
                         MAX_SOURCE, size);
    struct chat_template *t = mem_new(1, sizeof *t);
    if (t) t->name = mem_string(name, strlen(name));
    if (!t || !t->name) {
        template_free(t);
        return error_memory(err, name, sizeof *t);
    }
    t->arena.limit = compile_limit(size);
    struct compile c = {.t = t, .err = err};
    err->status = LINNET_OK;
    bool ok = jinja_tokenize(&c, source, size) && jinja_parse(&c);
    free(c.tokens.items);
    if (ok) {
        *out = t;
        return LINNET_OK;
    }
    if (err->status == LINNET_OK || err->status == LINNET_MEMORY)
        error_set(err, LINNET_MEMORY,
                  "%s: compiling takes more than %zu bytes of memory; use a smaller template", name,
                  t->arena.limit);
    template_free(t);
    return err->status;
}

void template_free(struct chat_template *t)
{
    if (!t) return;
    arena_free(&t->arena);
    free(t->names);
    free(t->name);
    free(t);
}

void rendered_free(struct rendered *r)
{
    strbuf_free(&r->text);
    free(r->untrusted);
    *r = (struct rendered){0};
}

/* ---- failing while rendering ------------------------------------------------------------- */

bool jinja_fail(struct run *r, const char *format, ...)
{
    char message[LINNET_ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    r->status = error_set(r->err, LINNET_INVALID, "%s line %d: %s", r->t->name, r->line, message);
    return false;
}

bool jinja_fail_memory(struct run *r)
{
    r->status = error_set(r->err, LINNET_MEMORY,
                          "%s line %d: rendering needs more than %zu bytes of memory; send less",
                          r->t->name, r->line, r->arena.limit);
    return false;
}

bool jinja_work(struct run *r, size_t steps)
{
    r->steps += steps;
    if (r->steps <= MAX_STEPS) return true;
    return jinja_fail(r, "rendering takes more than %d steps; send less, or use another template",
                      MAX_STEPS);
}

void *jinja_array(struct run *r, size_t count, size_t size)
{
    void *piece = arena_array(&r->arena, count, size);
    if (!piece) jinja_fail_memory(r);
    return piece;
}

linnet_status template_render(const struct chat_template *t, const json_t *context,
                              const char *const *trusted, int64_t now, struct rendered *out,
                              linnet_error *err)
{
    struct scope root = {0};
    struct run r = {.t = t,
                    .arena = {.limit = MAX_RENDER_MEMORY},
                    .context = context,
                    .trusted = trusted,
                    .now = now,
                    .err = err,
                    .scope = &root,
                    .out = out};
    *out = (struct rendered){0};
    r.variables = arena_new(&r.arena, t->n_names, sizeof *r.variables);
    if (!r.variables)
        jinja_fail_memory(&r);
    else
        jinja_execute(&r, &t->body);
    arena_free(&r.arena);
    if (r.status == LINNET_OK && out->text.failed)
        r.status = error_memory(err, "the rendered chat", out->text.size);
    if (r.status != LINNET_OK) rendered_free(out);
    return r.status;
}
