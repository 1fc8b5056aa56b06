/* Cross-checks of the tokenizer's arrays: the text room indexes one by another. */
#include <inttypes.h>

#include "file/gguf_internal.h"

static linnet_status expect_array(const struct gguf *g, const char *key, enum gguf_type element,
                                  bool *present, struct gguf_array *out, linnet_error *err)
{
    *present = gguf_has(g, key);
    if (!*present) return LINNET_OK;
    if (!gguf_array(g, key, out))
        return error_set(err, LINNET_FORMAT, "%s: key %s: expected an array of %s", g->path, key,
                         gguf_type_name(element));
    if (out->element != element)
        return error_set(err, LINNET_FORMAT, "%s: key %s: expected an array of %s, found one of %s",
                         g->path, key, gguf_type_name(element), gguf_type_name(out->element));
    return LINNET_OK;
}

static linnet_status check_per_token(const struct gguf *g, const char *key, enum gguf_type element,
                                     size_t n_tokens, linnet_error *err)
{
    bool present;
    struct gguf_array a;
    linnet_status status = expect_array(g, key, element, &present, &a, err);
    if (status || !present || a.count == n_tokens) return status;
    return error_set(err, LINNET_FORMAT,
                     "%s: key %s: expected %zu entries (one a token), found %zu", g->path, key,
                     n_tokens, a.count);
}

/* "left right", neither side empty. Blanks inside symbols are written otherwise by every
 * vocabulary, so there is exactly one. */
static bool is_merge(struct view v)
{
    const char *blank = v.size ? memchr(v.data, ' ', v.size) : NULL;
    if (!blank || blank == v.data) return false;
    size_t right = (size_t)(v.data + v.size - blank) - 1;
    return right > 0 && !memchr(blank + 1, ' ', right);
}

static linnet_status check_merges(const struct gguf *g, linnet_error *err)
{
    static const char key[] = "tokenizer.ggml.merges";
    bool present;
    struct gguf_array merges;
    linnet_status status = expect_array(g, key, GGUF_STRING, &present, &merges, err);
    if (status || !present) return status;
    struct reader r = {merges.data, merges.size, 0};
    for (size_t i = 0; i < merges.count; i++) {
        uint64_t size = 0;
        const uint8_t *bytes = NULL;
        if (!reader_u64(&r, &size) || !reader_bytes(&r, (size_t)size, &bytes))
            return error_set(err, LINNET_INTERNAL, "%s: key %s was not checked", g->path, key);
        struct view merge = {(const char *)bytes, (size_t)size};
        if (!is_merge(merge))
            return error_set(err, LINNET_FORMAT,
                             "%s: key %s: entry %zu: expected two symbols with one blank between "
                             "them, found \"%.*s\"",
                             g->path, key, i, view_shown(merge), merge.data);
    }
    return LINNET_OK;
}

static bool is_none(int64_t id)
{
    return id == -1 || id == UINT32_MAX;
}

int32_t gguf_token_id(const struct gguf *g, const char *key)
{
    int64_t id;
    return gguf_integer(g, key, &id) && id >= 0 && id <= INT32_MAX ? (int32_t)id : -1;
}

static linnet_status check_ids(const struct gguf *g, size_t n_tokens, linnet_error *err)
{
    static const char *const keys[] = {
        "tokenizer.ggml.bos_token_id",     "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",     "tokenizer.ggml.eom_token_id",
        "tokenizer.ggml.unknown_token_id",
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        int64_t id;
        if (!gguf_has(g, keys[i])) continue;
        if (!gguf_integer(g, keys[i], &id))
            return error_set(err, LINNET_FORMAT, "%s: key %s: expected an integer", g->path,
                             keys[i]);
        if (is_none(id)) continue;
        if (id < 0 || (uint64_t)id >= n_tokens)
            return error_set(err, LINNET_FORMAT,
                             "%s: key %s: expected a token id below %zu, found %" PRId64, g->path,
                             keys[i], n_tokens, id);
    }
    return LINNET_OK;
}

linnet_status gguf_check_vocabulary(const struct gguf *g, linnet_error *err)
{
    static const char key[] = "tokenizer.ggml.tokens";
    bool present;
    struct gguf_array tokens;
    linnet_status status = expect_array(g, key, GGUF_STRING, &present, &tokens, err);
    if (status || !present) return status;
    if (tokens.count == 0 || tokens.count > INT32_MAX)
        return error_set(err, LINNET_FORMAT, "%s: key %s: expected 1 to %d tokens, found %zu",
                         g->path, key, INT32_MAX, tokens.count);
    status = check_per_token(g, "tokenizer.ggml.token_type", GGUF_I32, tokens.count, err);
    if (!status) status = check_per_token(g, "tokenizer.ggml.scores", GGUF_F32, tokens.count, err);
    if (!status) status = check_merges(g, err);
    return status ? status : check_ids(g, tokens.count, err);
}
