/* locate.c - from the name of a model to its path. */
#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/strbuf.h"
#include "engine/model_internal.h"

static const char DEFAULT_MODEL[] = "SmolLM2-135M-Instruct.Q4_1.gguf";

enum { MAX_PLACES = 2, MAX_NAME = 255 };

/* The directories of installed models, the first one first. */
struct places {
    struct strbuf path[MAX_PLACES];
    int n;
};

static void find_places(struct places *p)
{
    const char *models = getenv("LINNET_MODELS"), *data = getenv("XDG_DATA_HOME");
    const char *home = getenv("HOME");
    *p = (struct places){0};
    if (models && *models) strbuf_text(&p->path[p->n++], models);
    if (data && *data)
        strbuf_format(&p->path[p->n++], "%s/linnet/models", data);
    else if (home && *home)
        strbuf_format(&p->path[p->n++], "%s/.local/share/linnet/models", home);
}

static void free_places(struct places *p)
{
    for (int i = 0; i < p->n; i++) strbuf_free(&p->path[i]);
}

/* PLACE/NAME or PLACE/NAME.gguf; NULL if neither is there. */
static char *find_in(const struct places *p, const char *name)
{
    static const char *const endings[] = {"", ".gguf"};
    for (int i = 0; i < 2 * p->n; i++) {
        struct strbuf b = {0};
        strbuf_format(&b, "%s/%s%s", strbuf_cstr(&p->path[i / 2]), name, endings[i % 2]);
        if (!b.failed && access(b.data, F_OK) == 0) return b.data;
        strbuf_free(&b);
    }
    return NULL;
}

/* Edits (Levenshtein) from a to b, case aside. Both at most MAX_NAME bytes. */
static size_t distance(const char *a, const char *b)
{
    size_t row[MAX_NAME + 1], n = strlen(b);
    for (size_t j = 0; j <= n; j++) row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            bool differ = tolower((unsigned char)a[i - 1]) != tolower((unsigned char)b[j - 1]);
            size_t change = diagonal + differ;
            size_t insert = row[j - 1] + 1, drop = row[j] + 1;
            diagonal = row[j];
            row[j] = change < insert ? change : insert;
            if (drop < row[j]) row[j] = drop;
        }
    }
    return row[n];
}

/* The installed name nearest to `name`, "" if nothing is installed. Room: MAX_NAME + 1. */
static void find_nearest(const struct places *p, const char *name, char *nearest)
{
    size_t best = SIZE_MAX;
    *nearest = 0;
    for (int i = 0; i < p->n; i++) {
        DIR *dir = opendir(strbuf_cstr(&p->path[i]));
        for (struct dirent *entry; dir && (entry = readdir(dir));) {
            if (entry->d_name[0] == '.') continue;
            size_t d = distance(name, entry->d_name);
            if (d >= best) continue;
            best = d;
            memcpy(nearest, entry->d_name, strlen(entry->d_name) + 1); /* at most MAX_NAME */
        }
        if (dir) closedir(dir);
    }
}

static linnet_status not_found(const struct places *p, const char *name, linnet_error *err)
{
    const char *first = p->n ? strbuf_cstr(&p->path[0]) : "the models directory";
    if (!name)
        return error_set(err, LINNET_IO,
                         "no model given, and %s is not in %s: name one with -m, or install it "
                         "with script/quickstart",
                         DEFAULT_MODEL, first);
    char nearest[MAX_NAME + 1] = "";
    if (!strchr(name, '/') && strlen(name) <= MAX_NAME) find_nearest(p, name, nearest);
    if (*nearest)
        return error_set(err, LINNET_IO,
                         "%s: no such file, and no model of that name in %s; "
                         "did you mean %s?",
                         name, first, nearest);
    return error_set(err, LINNET_IO,
                     "%s: no such file or directory, and no model of that name "
                     "in %s",
                     name, first);
}

linnet_status model_locate(const char *name, char **path, linnet_error *err)
{
    if (name && !*name) return error_set(err, LINNET_INVALID, "the model's name is empty");
    if (name && access(name, F_OK) == 0) {
        *path = mem_string(name, strlen(name));
        return *path ? LINNET_OK : error_memory(err, "a path", strlen(name));
    }
    struct places places;
    find_places(&places);
    *path = name && strchr(name, '/') ? NULL : find_in(&places, name ? name : DEFAULT_MODEL);
    linnet_status status = *path ? LINNET_OK : not_found(&places, name, err);
    free_places(&places);
    return status;
}
