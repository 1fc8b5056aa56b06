/* Opening the files of a GGUF model: one, or the parts NAME-00001-of-00003.gguf of a split set. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/memory.h"
#include "base/strbuf.h"
#include "file/gguf_internal.h"

static const char split_number[] = "split.no", split_count[] = "split.count",
                  split_tensors[] = "split.tensors.count";

static void part_close(struct gguf_part *part)
{
    mapping_close(&part->map);
    free(part->path);
    free(part->entries);
    free(part->by_key);
    *part = (struct gguf_part){0};
}

void gguf_close(struct gguf *g)
{
    if (!g) return;
    for (size_t i = 0; i < g->n_tensors; i++) free((char *)g->tensors[i].name);
    for (size_t i = 0; i < g->n_parts; i++) part_close(&g->parts[i]);
    free(g->tensors);
    free(g->parts);
    free(g->path);
    free(g);
}

/* On failure the caller still closes the part. */
static linnet_status part_open(const char *path, struct gguf_part *part, linnet_error *err)
{
    part->path = mem_string(path, strlen(path));
    if (!part->path) return error_memory(err, "a path", strlen(path));
    linnet_status status = mapping_open(path, &part->map, err);
    if (status) return status;
    part->reader = (struct reader){part->map.data, part->map.size, 0};
    return gguf_read_metadata(part, err);
}

/* Absent: the value in *out stays. */
static linnet_status read_number(const struct gguf_part *part, const char *key, int64_t *out,
                                 linnet_error *err)
{
    struct gguf one = {.parts = (struct gguf_part *)part, .n_parts = 1};
    if (!gguf_has(&one, key) || gguf_integer(&one, key, out)) return LINNET_OK;
    return error_set(err, LINNET_FORMAT, "%s: key %s: expected an integer", part->path, key);
}

/* The part's path without "-00001-of-00003.gguf"; 0 if it is not called so. */
static size_t stem_length(const char *path, int64_t number, int64_t count)
{
    char end[64];
    int n = snprintf(end, sizeof end, "-%05" PRId64 "-of-%05" PRId64 ".gguf", number + 1, count);
    size_t size = strlen(path);
    return size > (size_t)n && strcmp(path + size - (size_t)n, end) == 0 ? size - (size_t)n : 0;
}

/* Later parts repeat some keys of the first; none may differ from it or be new. */
static linnet_status check_agreement(const struct gguf_part *first, const struct gguf_part *part,
                                     linnet_error *err)
{
    for (size_t i = 0; i < part->n_entries; i++) {
        const struct gguf_entry *e = &part->entries[i];
        if (view_equal(e->key, view_text(split_number))) continue;
        const struct gguf_entry *f = gguf_find(first, e->key);
        struct view value = {(const char *)e->data, e->size};
        if (!f || f->type != e->type || f->element != e->element || f->count != e->count ||
            !view_equal(value, (struct view){(const char *)f->data, f->size}))
            return error_set(err, LINNET_FORMAT,
                             "%s: key %.*s does not agree with %s; the parts are not of one model",
                             part->path, view_shown(e->key), e->key.data, first->path);
    }
    return LINNET_OK;
}

static linnet_status check_part(const struct gguf *g, size_t i, linnet_error *err)
{
    const struct gguf_part *part = &g->parts[i];
    int64_t number = -1, count = -1;
    linnet_status status = read_number(part, split_number, &number, err);
    if (!status) status = read_number(part, split_count, &count, err);
    if (status) return status;
    if (number != (int64_t)i || count != (int64_t)g->n_parts)
        return error_set(err, LINNET_FORMAT,
                         "%s: expected split.no %zu and split.count %zu, found %" PRId64
                         " and %" PRId64,
                         part->path, i, g->n_parts, number, count);
    return check_agreement(&g->parts[0], part, err);
}

/* Opens all parts beside `path`, which is part `number` of `count`. */
static linnet_status open_set(const char *path, int64_t number, int64_t count, struct gguf *g,
                              linnet_error *err)
{
    size_t stem = stem_length(path, number, count);
    if (stem == 0)
        return error_set(err, LINNET_FORMAT,
                         "%s: is part %" PRId64 " of %" PRId64 ": its name must end in "
                         "-%05" PRId64 "-of-%05" PRId64 ".gguf for the others to be found",
                         path, number + 1, count, number + 1, count);
    g->parts = mem_new((size_t)count, sizeof *g->parts);
    if (!g->parts) return error_memory(err, "the split set", (size_t)count * sizeof *g->parts);
    g->n_parts = (size_t)count;
    struct strbuf name = {0};
    linnet_status status = LINNET_OK;
    for (size_t i = 0; i < g->n_parts && !status; i++) {
        strbuf_clear(&name);
        strbuf_append(&name, path, stem);
        strbuf_format(&name, "-%05zu-of-%05zu.gguf", i + 1, g->n_parts);
        if (name.failed) {
            status = error_memory(err, "a path", stem);
            break;
        }
        status = part_open(strbuf_cstr(&name), &g->parts[i], err);
        if (status) error_prefix(err, "part %zu of %zu is needed", i + 1, g->n_parts);
        if (!status) status = check_part(g, i, err);
    }
    strbuf_free(&name);
    return status;
}

/* Takes the part over, also when it fails. */
static linnet_status open_single(struct gguf_part *part, struct gguf *g, linnet_error *err)
{
    g->parts = mem_new(1, sizeof *g->parts);
    if (!g->parts) {
        part_close(part);
        return error_memory(err, "the GGUF file", sizeof *g->parts);
    }
    g->parts[0] = *part;
    g->n_parts = 1;
    return LINNET_OK;
}

static linnet_status open_parts(const char *path, struct gguf *g, linnet_error *err)
{
    enum { MAX_PARTS = 99999 }; /* five digits */
    struct gguf_part given = {0};
    int64_t count = 1, number = -1;
    linnet_status status = part_open(path, &given, err);
    if (!status) status = read_number(&given, split_count, &count, err);
    if (!status) status = read_number(&given, split_number, &number, err);
    if (!status && count <= 1) return open_single(&given, g, err);
    if (!status && (count > MAX_PARTS || number < 0 || number >= count))
        status = error_set(err, LINNET_FORMAT,
                           "%s: split.no %" PRId64 " of split.count %" PRId64 " is impossible",
                           path, number, count);
    part_close(&given);
    return status ? status : open_set(path, number, count, g, err);
}

/* All parts' tensors, then what can only be checked over the whole. */
static linnet_status finish(struct gguf *g, linnet_error *err)
{
    linnet_status status = LINNET_OK;
    for (size_t i = 0; i < g->n_parts && !status; i++)
        status = gguf_read_tensors(g, &g->parts[i], err);
    if (status) return status;
    int64_t promised = (int64_t)g->n_tensors;
    status = read_number(&g->parts[0], split_tensors, &promised, err);
    if (!status && promised != (int64_t)g->n_tensors)
        status = error_set(err, LINNET_FORMAT,
                           "%s: key %s: expected %" PRId64 " tensors, found %zu in %zu file(s)",
                           g->path, split_tensors, promised, g->n_tensors, g->n_parts);
    if (!status) status = gguf_check_tensors(g, err);
    return status ? status : gguf_check_vocabulary(g, err);
}

static linnet_status create(const char *path, struct gguf **out, linnet_error *err)
{
    struct gguf *g = mem_new(1, sizeof *g);
    if (g) g->path = mem_string(path, strlen(path));
    if (!g || !g->path) {
        gguf_close(g);
        return error_memory(err, "the GGUF file", sizeof *g);
    }
    *out = g;
    return LINNET_OK;
}

linnet_status gguf_open(const char *path, struct gguf **out, linnet_error *err)
{
    struct gguf *g;
    linnet_status status = create(path, &g, err);
    if (status) return status;
    status = open_parts(path, g, err);
    if (!status) status = finish(g, err);
    if (status)
        gguf_close(g);
    else
        *out = g;
    return status;
}

static linnet_status open_memory(const void *bytes, size_t size, struct gguf *g, linnet_error *err)
{
    struct gguf_part part = {.path = mem_string(g->path, strlen(g->path)),
                             .reader = {bytes, size, 0}};
    linnet_status status =
        part.path ? gguf_read_metadata(&part, err) : error_memory(err, "a path", strlen(g->path));
    if (status) {
        part_close(&part);
        return status;
    }
    status = open_single(&part, g, err);
    if (status) return status;
    int64_t count = 1;
    status = read_number(&g->parts[0], split_count, &count, err);
    if (!status && count > 1)
        status = error_set(err, LINNET_UNSUPPORTED,
                           "%s: one part of a split set cannot be read from memory", g->path);
    return status ? status : finish(g, err);
}

linnet_status gguf_open_memory(const void *bytes, size_t size, const char *name, struct gguf **out,
                               linnet_error *err)
{
    struct gguf *g;
    linnet_status status = create(name, &g, err);
    if (status) return status;
    status = open_memory(bytes, size, g, err);
    if (status)
        gguf_close(g);
    else
        *out = g;
    return status;
}
