/*
 * pattern.h - the regular expressions of tokenizer files, compiled by PCRE2 with the meaning that
 * Hugging Face's engine (Oniguruma, Unicode 16) gives them.
 */
#ifndef LINNET_TEXT_PATTERN_H
#define LINNET_TEXT_PATTERN_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"
#include "base/strbuf.h"

struct pattern {
    pcre2_code *code;      /* NULL: the literal string below */
    struct strbuf literal; /* not empty */
};

/* What matching needs besides the pattern: one a thread. */
struct matcher {
    pcre2_match_data *data;
    pcre2_match_context *context;
};

linnet_status pattern_compile(struct pattern *p, const char *source, size_t n, linnet_error *err);
linnet_status pattern_literal(struct pattern *p, const char *bytes, size_t n, linnet_error *err);
void pattern_free(struct pattern *p);

linnet_status matcher_create(struct matcher *m, linnet_error *err);
void matcher_free(struct matcher *m);

/* The first match in text (well-formed UTF-8) at or after `from`; *begin is n + 1 if there is
 * none. */
linnet_status pattern_find(const struct pattern *p, struct matcher *m, const char *text, size_t n,
                           size_t from, size_t *begin, size_t *end, linnet_error *err);

#endif
