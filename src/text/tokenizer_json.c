/* Reads tokenizer.json. What this file does not name is refused, by its name: a tokenizer that is
 * half understood would give ids that are nearly right. */
#include <string.h>

#include "text/json_lists.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

struct text {
    const char *data;
    size_t size;
};

static linnet_status unsupported(linnet_error *err, const char *part, const char *what)
{
    return error_set(err, LINNET_UNSUPPORTED, "%s '%s' is not understood", part, what);
}

static linnet_status missing(linnet_error *err, const char *part, const char *key)
{
    return error_set(err, LINNET_FORMAT, "%s: '%s' is missing or of the wrong type", part, key);
}

static bool get_text(const json_t *object, const char *key, struct text *out)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_string(value)) return false;
    *out = (struct text){json_string_value(value), json_string_length(value)};
    return true;
}

static const char *get_type(const json_t *object)
{
    const char *type = json_string_value(json_object_get(object, "type"));
    return type ? type : "(no type)";
}

static bool get_flag(const json_t *object, const char *key, bool otherwise)
{
    const json_t *value = json_object_get(object, key);
    return json_is_boolean(value) ? json_is_true(value) : otherwise;
}

static bool is_absent(const json_t *value)
{
    return !value || json_is_null(value);
}

/* {"String": "x"} or {"Regex": "x"} */
static linnet_status get_pattern(const json_t *object, const char *part, struct pattern *out,
                                 linnet_error *err)
{
    const json_t *pattern = json_object_get(object, "pattern");
    struct text text;
    linnet_status status;
    if (get_text(pattern, "String", &text))
        status = pattern_literal(out, text.data, text.size, err);
    else if (get_text(pattern, "Regex", &text))
        status = pattern_compile(out, text.data, text.size, err);
    else
        return missing(err, part, "pattern");
    if (status != LINNET_OK) error_prefix(err, "%s", part);
    return status;
}

/* Calls `each` for an object, or for every element of its "Sequence", in order. Sequences inside
 * sequences are allowed up to a depth that no real file reaches. */
typedef linnet_status each_function(struct tokenizer *t, const json_t *object, linnet_error *err);

static linnet_status for_each(struct tokenizer *t, const json_t *object, const char *part,
                              const char *list, int depth, each_function *each, linnet_error *err)
{
    if (strcmp(get_type(object), "Sequence") != 0) return each(t, object, err);
    const json_t *elements = json_object_get(object, list);
    if (!json_is_array(elements)) return missing(err, part, list);
    if (depth == 4) return unsupported(err, part, "Sequence of Sequences");
    for (size_t i = 0; i < json_array_size(elements); i++) {
        linnet_status status =
            for_each(t, json_array_get(elements, i), part, list, depth + 1, each, err);
        if (status != LINNET_OK) return status;
    }
    return LINNET_OK;
}

/* ---- normalizer --------------------------------------------------------------------------- */

static linnet_status copy_text(struct strbuf *out, struct text text, linnet_error *err)
{
    strbuf_append(out, text.data, text.size);
    return out->failed ? error_memory(err, "a string", text.size) : LINNET_OK;
}

static linnet_status add_normalizer(struct tokenizer *t, const json_t *object, linnet_error *err)
{
    static const struct {
        const char *name;
        enum normalizer_kind kind;
    } kinds[] = {{"NFC", NORMALIZE_NFC},         {"NFD", NORMALIZE_NFD},
                 {"NFKC", NORMALIZE_NFKC},       {"NFKD", NORMALIZE_NFKD},
                 {"Prepend", NORMALIZE_PREPEND}, {"Replace", NORMALIZE_REPLACE},
                 {"Strip", NORMALIZE_STRIP},     {"Lowercase", NORMALIZE_LOWERCASE}};
    static const char part[] = "normalizer";
    const char *type = get_type(object);
    size_t i = 0;
    while (i < sizeof kinds / sizeof kinds[0] && strcmp(type, kinds[i].name) != 0) i++;
    if (i == sizeof kinds / sizeof kinds[0]) return unsupported(err, part, type);
    if (t->n_normalizer == STEP_LIMIT) return unsupported(err, part, "a longer Sequence");
    struct normalizer_step *step = &t->normalizer[t->n_normalizer++];
    step->kind = kinds[i].kind;
    step->left = get_flag(object, "strip_left", true);
    step->right = get_flag(object, "strip_right", true);
    struct text content;
    if (step->kind == NORMALIZE_PREPEND) {
        if (!get_text(object, "prepend", &content)) return missing(err, part, "prepend");
        return copy_text(&step->content, content, err);
    }
    if (step->kind == NORMALIZE_REPLACE) {
        if (!get_text(object, "content", &content)) return missing(err, part, "content");
        linnet_status status = copy_text(&step->content, content, err);
        return status == LINNET_OK ? get_pattern(object, part, &step->pattern, err) : status;
    }
    return LINNET_OK;
}

/* ---- pre-tokenizer ------------------------------------------------------------------------ */

/* NULL, and err filled, if there are too many. */
static struct pretokenizer_step *new_step(struct tokenizer *t, enum pretokenizer_kind kind,
                                          linnet_error *err)
{
    if (t->n_pretokenizer == STEP_LIMIT) {
        unsupported(err, "pre_tokenizer", "a longer Sequence");
        return NULL;
    }
    struct pretokenizer_step *step = &t->pretokenizer[t->n_pretokenizer++];
    step->kind = kind;
    step->behavior = SPLIT_ISOLATED;
    return step;
}

static linnet_status add_split(struct tokenizer *t, const json_t *object, linnet_error *err)
{
    static const char *const behaviors[] = {"Removed", "Isolated", "MergedWithPrevious",
                                            "MergedWithNext", "Contiguous"};
    struct pretokenizer_step *step = new_step(t, PRETOKENIZE_SPLIT, err);
    if (!step) return LINNET_UNSUPPORTED;
    const char *behavior = json_string_value(json_object_get(object, "behavior"));
    if (!behavior) return missing(err, "pre_tokenizer Split", "behavior");
    size_t i = 0;
    while (i < 5 && strcmp(behavior, behaviors[i]) != 0) i++;
    if (i == 5) return unsupported(err, "pre_tokenizer Split: behavior", behavior);
    step->behavior = (enum split_behavior)i;
    step->invert = get_flag(object, "invert", false);
    return get_pattern(object, "pre_tokenizer Split", &step->pattern, err);
}

static linnet_status add_byte_level(struct tokenizer *t, const json_t *object, linnet_error *err)
{
    t->bpe.byte_level = true;
    if (get_flag(object, "add_prefix_space", true)) {
        struct pretokenizer_step *edit = new_step(t, PRETOKENIZE_EDIT, err);
        if (!edit) return LINNET_UNSUPPORTED;
        edit->prepend = PREPEND_ALWAYS;
        linnet_status status = copy_text(&edit->replacement, (struct text){" ", 1}, err);
        if (status != LINNET_OK) return status;
    }
    if (!get_flag(object, "use_regex", true)) return LINNET_OK;
    struct pretokenizer_step *split = new_step(t, PRETOKENIZE_SPLIT, err);
    if (!split) return LINNET_UNSUPPORTED;
    return pattern_compile(&split->pattern, gpt2_pattern, strlen(gpt2_pattern), err);
}

/* "prepend_scheme", or the older flag. */
static linnet_status get_prepend(const json_t *object, enum prepend_scheme *out, linnet_error *err)
{
    const char *scheme = json_string_value(json_object_get(object, "prepend_scheme"));
    if (!scheme)
        *out = get_flag(object, "add_prefix_space", true) ? PREPEND_ALWAYS : PREPEND_NEVER;
    else if (strcmp(scheme, "always") == 0)
        *out = PREPEND_ALWAYS;
    else if (strcmp(scheme, "first") == 0)
        *out = PREPEND_FIRST;
    else if (strcmp(scheme, "never") == 0)
        *out = PREPEND_NEVER;
    else
        return unsupported(err, "Metaspace: prepend_scheme", scheme);
    return LINNET_OK;
}

/* "replacement": one character. */
static linnet_status get_mark(const json_t *object, const char *part, struct text *out,
                              linnet_error *err)
{
    uint32_t c;
    if (!get_text(object, "replacement", out) || out->size == 0)
        return missing(err, part, "replacement");
    if (utf8_decode(out->data, out->size, &c) == out->size) return LINNET_OK;
    return error_set(err, LINNET_FORMAT, "%s: replacement '%.40s': expected one character", part,
                     out->data);
}

/* Whether the normalizer may take away how a text begins. What is then left is not the first for
 * Hugging Face, which asks where in the raw text it was. */
static bool loses_start(const struct tokenizer *t)
{
    for (size_t i = 0; i < t->n_normalizer; i++) {
        const struct normalizer_step *step = &t->normalizer[i];
        if (step->kind == NORMALIZE_STRIP && step->left) return true;
        if (step->kind == NORMALIZE_REPLACE && step->content.size == 0) return true;
    }
    return false;
}

static linnet_status add_metaspace(struct tokenizer *t, const json_t *object, linnet_error *err)
{
    struct text mark;
    linnet_status status = get_mark(object, "pre_tokenizer Metaspace", &mark, err);
    if (status != LINNET_OK) return status;
    struct pretokenizer_step *edit = new_step(t, PRETOKENIZE_EDIT, err);
    if (!edit) return LINNET_UNSUPPORTED;
    status = get_prepend(object, &edit->prepend, err);
    if (edit->prepend == PREPEND_FIRST && loses_start(t))
        return unsupported(err, "pre_tokenizer Metaspace",
                           "prepend_scheme first, after a normalizer that removes text");
    if (status == LINNET_OK) status = copy_text(&edit->replacement, mark, err);
    if (status != LINNET_OK || !get_flag(object, "split", true)) return status;
    struct pretokenizer_step *split = new_step(t, PRETOKENIZE_SPLIT, err);
    if (!split) return LINNET_UNSUPPORTED;
    split->behavior = SPLIT_MERGED_WITH_NEXT;
    return pattern_literal(&split->pattern, mark.data, mark.size, err);
}

static linnet_status add_pretokenizer(struct tokenizer *t, const json_t *object, linnet_error *err)
{
    const char *type = get_type(object);
    if (t->bpe.byte_level)
        return error_set(err, LINNET_UNSUPPORTED,
                         "pre_tokenizer '%s' after ByteLevel: expected "
                         "ByteLevel to be the last",
                         type);
    if (strcmp(type, "Split") == 0) return add_split(t, object, err);
    if (strcmp(type, "ByteLevel") == 0) return add_byte_level(t, object, err);
    if (strcmp(type, "Metaspace") == 0) return add_metaspace(t, object, err);
    if (strcmp(type, "Digits") != 0) return unsupported(err, "pre_tokenizer", type);
    struct pretokenizer_step *step = new_step(t, PRETOKENIZE_DIGITS, err);
    if (!step) return LINNET_UNSUPPORTED;
    if (!get_flag(object, "individual_digits", false)) step->behavior = SPLIT_CONTIGUOUS;
    return LINNET_OK;
}

/* ---- model -------------------------------------------------------------------------------- */

/* The text of a tokenizer.json, in its three parts. */
struct parts {
    struct json_range vocab, merges;
    const json_t *root; /* all else */
};

static linnet_status broken_list(const struct json_cursor *c, const char *list, linnet_error *err)
{
    return error_set(err, LINNET_FORMAT, "model: '%s' at byte %zu of it: expected %s", list, c->pos,
                     list[0] == 'v' ? "\"token\": id, ..." : "two tokens, ...");
}

/* {"token": id, ...} */
static linnet_status read_vocabulary(struct tokenizer *t, const struct parts *parts, size_t n_added,
                                     linnet_error *err)
{
    if (!parts->vocab.data) return missing(err, "model", "vocab");
    struct json_cursor c = {.range = parts->vocab};
    linnet_status status =
        vocabulary_create(&t->vocabulary, json_count_commas(c.range) + n_added, err);
    bool more = json_skip(&c, '{') && !json_skip(&c, '}');
    while (more && status == LINNET_OK) {
        struct json_range token;
        int64_t id;
        if (!json_string_at(&c, &token) || !json_skip(&c, ':') || !json_integer_at(&c, &id)) break;
        status = vocabulary_add(&t->vocabulary, id, token.data, token.size, err);
        more = json_skip(&c, ',');
        if (!more && !json_skip(&c, '}')) break;
    }
    if (status == LINNET_OK && (c.failed || more || c.pos != c.range.size))
        status = broken_list(&c, "vocab", err);
    json_cursor_free(&c);
    return status;
}

/* ["a", "b"] or "a b" */
static bool merge_at(struct json_cursor *c, struct json_range *left, struct json_range *right)
{
    if (json_skip(c, '['))
        return json_string_at(c, left) && json_skip(c, ',') && json_string_at(c, right) &&
               json_skip(c, ']');
    struct json_range both;
    if (!json_string_at(c, &both)) return false;
    const char *blank = memchr(both.data, ' ', both.size);
    if (!blank) return false;
    *left = (struct json_range){both.data, (size_t)(blank - both.data)};
    *right = (struct json_range){blank + 1, both.size - left->size - 1};
    return !memchr(right->data, ' ', right->size);
}

/* *result: of the merge before, then of this one. */
static linnet_status add_merge(struct tokenizer *t, size_t rank, struct json_range left,
                               struct json_range right, int32_t *result, struct strbuf *whole,
                               linnet_error *err)
{
    const struct vocabulary *v = &t->vocabulary;
    int32_t a = vocabulary_find(v, left.data, left.size);
    int32_t b = vocabulary_find(v, right.data, right.size);
    *result =
        vocabulary_find_joined(v, left.data, left.size, right.data, right.size, *result + 1, whole);
    if (whole->failed) return error_memory(err, "merges", left.size + right.size);
    if (a < 0 || b < 0 || *result < 0)
        return error_set(err, LINNET_FORMAT,
                         "merge %zu: '%.*s' + '%.*s': a part or the whole is no token", rank,
                         (int)(left.size < 40 ? left.size : 40), left.data,
                         (int)(right.size < 40 ? right.size : 40), right.data);
    if (v->tokens[*result].flags & (TOKEN_SPECIAL | TOKEN_ADDED)) return LINNET_OK; /* never made */
    return merges_add(&t->bpe.merges, a, b, (int32_t)rank, *result, err);
}

static linnet_status read_merges(struct tokenizer *t, const struct parts *parts, linnet_error *err)
{
    if (!parts->merges.data) return missing(err, "model", "merges");
    struct json_cursor c = {.range = parts->merges};
    struct strbuf whole = {0};
    int32_t result = -1;
    size_t rank = 0, commas = json_count_commas(c.range);
    bool more = json_skip(&c, '[') && !json_skip(&c, ']');
    bool pairs = json_skip(&c, '['); /* of which each has a comma of its own */
    if (pairs) c.pos--;
    linnet_status status = merges_create(&t->bpe.merges, pairs ? commas / 2 + 1 : commas, err);
    for (; more && status == LINNET_OK; rank++) {
        struct json_range left, right;
        if (!merge_at(&c, &left, &right)) break;
        status = add_merge(t, rank, left, right, &result, &whole, err);
        more = json_skip(&c, ',');
        if (!more && !json_skip(&c, ']')) break;
    }
    if (status == LINNET_OK && (c.failed || more || c.pos != c.range.size)) {
        status = broken_list(&c, "merges", err);
        error_prefix(err, "merge %zu", rank);
    }
    strbuf_free(&whole);
    json_cursor_free(&c);
    return status;
}

static linnet_status read_added(struct tokenizer *t, const json_t *added, linnet_error *err)
{
    for (size_t i = 0; i < json_array_size(added); i++) {
        const json_t *entry = json_array_get(added, i);
        const json_t *id = json_object_get(entry, "id");
        struct text content;
        if (!json_is_integer(id) || !get_text(entry, "content", &content))
            return error_set(err, LINNET_FORMAT, "added_tokens[%zu]: expected id and content", i);
        if (content.size == 0) continue;
        struct added_token token = {.content = content.data,
                                    .size = content.size,
                                    .single_word = get_flag(entry, "single_word", false),
                                    .lstrip = get_flag(entry, "lstrip", false),
                                    .rstrip = get_flag(entry, "rstrip", false),
                                    .normalized = get_flag(entry, "normalized", true),
                                    .special = get_flag(entry, "special", false)};
        token.id = vocabulary_find(&t->vocabulary, content.data, content.size);
        linnet_status status = LINNET_OK;
        if (token.id < 0) {
            status = vocabulary_add(&t->vocabulary, json_integer_value(id), content.data,
                                    content.size, err);
            token.id = (int32_t)json_integer_value(id);
            if (status == LINNET_OK) t->vocabulary.tokens[token.id].flags |= TOKEN_ADDED;
        } else if (token.id != json_integer_value(id)) {
            return error_set(err, LINNET_FORMAT,
                             "added_tokens[%zu] '%s': id %lld, but %d in the "
                             "vocabulary",
                             i, content.data, (long long)json_integer_value(id), (int)token.id);
        }
        if (status == LINNET_OK) status = tokenizer_add_token(t, &token, err);
        if (status != LINNET_OK) return status;
    }
    return LINNET_OK;
}

static linnet_status read_model(struct tokenizer *t, const struct parts *parts, linnet_error *err)
{
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    const json_t *model = json_object_get(parts->root, "model");
    const char *type = json_string_value(json_object_get(model, "type"));
    if (!json_is_object(model)) return missing(err, "the file", "model");
    /* Old files name no type: theirs is seen by the merges. */
    if (type ? strcmp(type, "BPE") != 0 : !parts->merges.data)
        return unsupported(err, "model", type ? type : "(no type)");
    for (size_t i = 0; i < 2; i++) {
        struct text affix;
        if (get_text(model, affixes[i], &affix) && affix.size)
            return unsupported(err, "model: option", affixes[i]);
    }
    if (json_number_value(json_object_get(model, "dropout")) != 0)
        return unsupported(err, "model: option", "dropout");
    t->bpe.fuse_unknown = get_flag(model, "fuse_unk", false);
    t->bpe.byte_fallback = get_flag(model, "byte_fallback", false);
    t->bpe.ignore_merges = get_flag(model, "ignore_merges", false);
    const json_t *added = json_object_get(parts->root, "added_tokens");
    linnet_status status = read_vocabulary(t, parts, json_array_size(added), err);
    if (status == LINNET_OK) status = read_added(t, added, err);
    if (status == LINNET_OK) status = read_merges(t, parts, err);
    struct text unknown;
    if (status == LINNET_OK && get_text(model, "unk_token", &unknown)) {
        t->bpe.unknown = vocabulary_find(&t->vocabulary, unknown.data, unknown.size);
        if (t->bpe.unknown < 0)
            return error_set(err, LINNET_FORMAT, "model: unk_token '%s' is no token", unknown.data);
    }
    return status;
}

/* The sets for normalized text hold the normalized contents. */
static linnet_status normalize_added(struct tokenizer *t, linnet_error *err)
{
    struct added_set raw = t->added_normalized;
    struct matcher matcher;
    struct strbuf text[2] = {{0}};
    struct marks marks = {0};
    size_t total = 0, growth;
    linnet_status status = matcher_create(&matcher, err);
    t->added_normalized = (struct added_set){0};
    for (size_t i = 0; i < raw.count; i++) total += raw.tokens[i].size;
    growth = growth_allowed(total);
    for (size_t i = 0; i < raw.count && status == LINNET_OK; i++) {
        struct added_token token = raw.tokens[i];
        for (size_t k = 0; k < t->n_normalizer && status == LINNET_OK; k++) {
            struct strbuf *out = &text[k % 2];
            strbuf_clear(out);
            status = normalize(&t->normalizer[k], &matcher, token.content, token.size, out, &marks,
                               &growth, err);
            token.content = strbuf_cstr(out);
            token.size = out->size;
        }
        if (status == LINNET_OK) status = tokenizer_add_token(t, &token, err);
    }
    matcher_free(&matcher);
    strbuf_free(&text[0]);
    strbuf_free(&text[1]);
    added_set_free(&raw);
    return status;
}

/* ---- post-processor ----------------------------------------------------------------------- */

static linnet_status add_affix(struct tokenizer *t, const json_t *template, const char *name,
                               bool before, linnet_error *err)
{
    static const char part[] = "post_processor TemplateProcessing";
    const json_t *entry = json_object_get(json_object_get(template, "special_tokens"), name);
    const json_t *ids = json_object_get(entry, "ids");
    if (!json_is_array(ids)) return missing(err, part, name);
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *id = json_array_get(ids, i);
        size_t *count = before ? &t->n_prefix : &t->n_suffix;
        int32_t *list = before ? t->prefix : t->suffix;
        if (*count == AFFIX_LIMIT) return unsupported(err, part, "a longer template");
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= t->vocabulary.size)
            return missing(err, part, name);
        list[(*count)++] = (int32_t)json_integer_value(id);
    }
    return LINNET_OK;
}

static linnet_status add_postprocessor(struct tokenizer *t, const json_t *object, linnet_error *err)
{
    const char *type = get_type(object);
    if (strcmp(type, "ByteLevel") == 0) return LINNET_OK; /* it changes offsets only */
    if (strcmp(type, "TemplateProcessing") != 0) return unsupported(err, "post_processor", type);
    if (t->n_prefix || t->n_suffix) return unsupported(err, "post_processor", "a second template");
    const json_t *single = json_object_get(object, "single");
    if (!json_is_array(single)) return missing(err, "post_processor TemplateProcessing", "single");
    bool before = true;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *piece = json_array_get(single, i);
        const json_t *special = json_object_get(piece, "SpecialToken");
        const char *name = json_string_value(json_object_get(special, "id"));
        if (json_object_get(piece, "Sequence")) {
            if (!before) return unsupported(err, "post_processor", "a template of two texts");
            before = false;
            continue;
        }
        if (!name) return missing(err, "post_processor TemplateProcessing", "SpecialToken");
        linnet_status status = add_affix(t, object, name, before, err);
        if (status != LINNET_OK) return status;
    }
    return LINNET_OK;
}

/* ---- decoder ------------------------------------------------------------------------------ */

enum decoder_stage { DECODER_START, DECODER_REPLACED, DECODER_BYTES, DECODER_FUSED, DECODER_END };

/* The forms that exist: ByteLevel; Metaspace; or some of Replace, ByteFallback, Fuse, Strip, in
 * this order. */
static linnet_status add_decoder(struct tokenizer *t, const json_t *object, linnet_error *err)
{
    static const char part[] = "decoder";
    const char *type = get_type(object);
    struct decoder_config *d = &t->decoder;
    struct text from, to;
    int next;
    if (strcmp(type, "ByteLevel") == 0 || strcmp(type, "Metaspace") == 0) {
        if (d->stage != DECODER_START) return unsupported(err, part, "this Sequence");
        next = DECODER_END;
    } else if (strcmp(type, "Replace") == 0) {
        next = DECODER_REPLACED;
    } else if (strcmp(type, "ByteFallback") == 0) {
        next = DECODER_BYTES;
    } else if (strcmp(type, "Fuse") == 0) {
        next = DECODER_FUSED;
    } else if (strcmp(type, "Strip") == 0 && d->stage == DECODER_FUSED) {
        next = DECODER_END;
    } else {
        return unsupported(err, part, type);
    }
    if (next <= d->stage) return unsupported(err, part, "this Sequence");
    d->stage = next;
    if (strcmp(type, "ByteLevel") == 0) d->byte_level = true;
    if (strcmp(type, "ByteFallback") == 0) d->byte_fallback = true;
    if (strcmp(type, "Strip") == 0) {
        const json_t *start = json_object_get(object, "start");
        if (!get_text(object, "content", &from) || from.size != 1 || from.data[0] != ' ' ||
            json_integer_value(json_object_get(object, "stop")) != 0 ||
            json_integer_value(start) < 0)
            return unsupported(err, part, "Strip of anything but leading blanks");
        d->strip_left = (size_t)json_integer_value(start);
    }
    if (strcmp(type, "Metaspace") == 0) {
        enum prepend_scheme prepend;
        linnet_status status = get_mark(object, "decoder Metaspace", &from, err);
        if (status == LINNET_OK) status = get_prepend(object, &prepend, err);
        if (status != LINNET_OK) return status;
        d->first_dropped = prepend != PREPEND_NEVER;
        status = copy_text(&d->from, from, err);
        return status == LINNET_OK ? copy_text(&d->to, (struct text){" ", 1}, err) : status;
    }
    if (strcmp(type, "Replace") == 0) {
        if (!get_text(json_object_get(object, "pattern"), "String", &from) ||
            !get_text(object, "content", &to))
            return unsupported(err, part, "Replace of anything but a String");
        linnet_status status = copy_text(&d->from, from, err);
        return status == LINNET_OK ? copy_text(&d->to, to, err) : status;
    }
    return LINNET_OK;
}

/* ---- the whole ---------------------------------------------------------------------------- */

/* "<s>" or {"content": "<s>"} */
static int32_t named_token(const struct tokenizer *t, const json_t *config, const char *key)
{
    const json_t *value = json_object_get(config, key);
    if (json_is_object(value)) value = json_object_get(value, "content");
    if (!json_is_string(value)) return -1;
    return vocabulary_find(&t->vocabulary, json_string_value(value), json_string_length(value));
}

static linnet_status read_parts(struct tokenizer *t, const struct parts *parts,
                                const json_t *config, linnet_error *err)
{
    const json_t *root = parts->root;
    if (!json_is_object(root))
        return error_set(err, LINNET_FORMAT, "expected a JSON object with 'model'");
    const json_t *normalizer = json_object_get(root, "normalizer");
    const json_t *pretokenizer = json_object_get(root, "pre_tokenizer");
    const json_t *post = json_object_get(root, "post_processor");
    const json_t *decoder = json_object_get(root, "decoder");
    linnet_status status = LINNET_OK;
    if (!is_absent(normalizer))
        status = for_each(t, normalizer, "normalizer", "normalizers", 0, add_normalizer, err);
    if (status == LINNET_OK && !is_absent(pretokenizer))
        status =
            for_each(t, pretokenizer, "pre_tokenizer", "pretokenizers", 0, add_pretokenizer, err);
    if (status == LINNET_OK) status = read_model(t, parts, err);
    if (status == LINNET_OK && t->added_normalized.count) status = normalize_added(t, err);
    if (status == LINNET_OK && !is_absent(post))
        status = for_each(t, post, "post_processor", "processors", 0, add_postprocessor, err);
    if (status == LINNET_OK)
        status = for_each(t, decoder, "decoder", "decoders", 0, add_decoder, err);
    if (status == LINNET_OK) status = tokenizer_finish(t, err);
    if (status != LINNET_OK) return status;
    t->bos = named_token(t, config, "bos_token");
    t->eos = named_token(t, config, "eos_token");
    if (!config && t->n_prefix) t->bos = t->prefix[0];
    if (!config && t->n_suffix) t->eos = t->suffix[t->n_suffix - 1];
    return LINNET_OK;
}

linnet_status tokenizer_from_json(struct tokenizer *t, const char *bytes, size_t size,
                                  const json_t *config, linnet_error *err)
{
    struct parts parts = {0};
    struct strbuf rest = {0};
    size_t valid = utf8_valid(bytes, size);
    if (valid < size) return error_set(err, LINNET_FORMAT, "byte %zu is not UTF-8", valid);
    linnet_status status = json_cut_lists(bytes, size, &parts.vocab, &parts.merges, &rest, err);
    json_error_t json_error;
    json_t *root = NULL;
    if (status == LINNET_OK) {
        root = json_loadb(strbuf_cstr(&rest), rest.size, JSON_ALLOW_NUL, &json_error);
        parts.root = root;
        status = root ? read_parts(t, &parts, config, err)
                      : error_set(err, LINNET_FORMAT, "%s (line %d without vocab and merges)",
                                  json_error.text, json_error.line);
    }
    json_decref(root);
    strbuf_free(&rest);
    return status;
}
