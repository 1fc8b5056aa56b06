/*
 * template.h - chat templates: an interpreter of the part of Jinja that models' templates use,
 * rendering exactly what Hugging Face's renderer gives (trim_blocks, lstrip_blocks, loop controls,
 * its tojson, strftime_now and raise_exception, the immutable sandbox).
 * A compiled template is immutable and may be shared by threads.
 */
#ifndef LINNET_TEXT_TEMPLATE_H
#define LINNET_TEXT_TEMPLATE_H

#include <jansson.h>

#include "base/error.h"
#include "base/strbuf.h"
#include "text/tokenizer.h"

struct chat_template;

/* Compiles; unknown syntax, tags, filters and tests, and calls of unknown functions and methods,
 * are refused here, with `name` and the line: "chat template line 12: unknown filter 'foo'". */
linnet_status template_compile(const char *source, size_t size, const char *name,
                               struct chat_template **out, linnet_error *err);
void template_free(struct chat_template *t);

/* What came out, and which bytes of it are the callers' own words (from `context`), so that
 * tokenizing never takes those for control tokens. Ranges ascend and do not touch. */
struct rendered {
    struct strbuf text;
    struct span *untrusted;
    size_t n_untrusted, capacity;
};
void rendered_free(struct rendered *r);

/*
 * Renders with the variables of `context` (a JSON object: messages, tools, add_generation_prompt,
 * bos_token, ... ; null means None). Strings under the keys in `trusted` (NULL-terminated list:
 * "bos_token", "eos_token", ...) count as the template's own text; all other strings are untrusted.
 * A template that calls raise_exception fails with LINNET_INVALID and exactly its message. Memory,
 * steps and nesting are bounded: a hostile template ends with an error. `now` (seconds since the
 * epoch, local time zone) is what strftime_now formats.
 */
linnet_status template_render(const struct chat_template *t, const json_t *context,
                              const char *const *trusted, int64_t now, struct rendered *out,
                              linnet_error *err);

#endif
