/* keys.c - who may ask. A key is never logged and compared in a time that says nothing about it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/memory.h"
#include "serve/server_internal.h"

enum { MAX_KEYS = 1024 };

struct key_list {
    struct key *keys;
    size_t n, capacity;
};

static void forget(struct key_list *list)
{
    if (list->keys) explicit_bzero(list->keys, list->capacity * sizeof *list->keys);
    free(list->keys);
}

/* A header's value: printable ASCII without blanks, so that a key is always the whole of it. */
static bool is_key(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (text[i] <= ' ' || text[i] > '~') return false;
    return n > 0 && n < KEY_SIZE;
}

static linnet_status add(struct key_list *list, const char *text, size_t n, const char *where,
                         linnet_error *err)
{
    if (!is_key(text, n))
        return error_set(err, LINNET_INVALID,
                         "%s: expected a key of 1 to %d printable characters without blanks, found "
                         "%zu bytes",
                         where, KEY_SIZE - 1, n);
    if (list->n == MAX_KEYS)
        return error_set(err, LINNET_INVALID, "%s: expected at most %d keys", where, MAX_KEYS);
    if (!mem_reserve((void **)&list->keys, &list->capacity, list->n + 1, sizeof *list->keys))
        return error_memory(err, "the keys", (list->n + 1) * sizeof *list->keys);
    struct key *key = &list->keys[list->n++];
    *key = (struct key){.size = n};
    memcpy(key->text, text, n);
    return LINNET_OK;
}

/* A key a line; blank lines and lines that begin with # do not count. */
static linnet_status read_file(struct key_list *list, const char *path, linnet_error *err)
{
    char line[2 * KEY_SIZE], where[256];
    size_t before = list->n;
    linnet_status status = LINNET_OK;
    FILE *f = fopen(path, "re");
    if (!f)
        return error_set(err, LINNET_IO, "%s: the keys cannot be read: %s", path, strerror(errno));
    for (int number = 1; !status && fgets(line, sizeof line, f); number++) {
        size_t n = strcspn(line, "\r\n");
        bool whole = n < strlen(line) || feof(f);
        for (int c = 0; !whole && c != EOF && c != '\n';) c = fgetc(f); /* of a longer line */
        snprintf(where, sizeof where, "%.200s, line %d", path, number);
        if (n && line[0] != '#') status = add(list, line, n, where, err);
    }
    if (!status && ferror(f))
        status =
            error_set(err, LINNET_IO, "%s: the keys cannot be read: %s", path, strerror(errno));
    if (!status && list->n == before)
        status = error_set(err, LINNET_INVALID, "%s: expected a key a line, found none", path);
    explicit_bzero(line, sizeof line);
    fclose(f);
    return status;
}

linnet_status keys_load(struct server *s, linnet_error *err)
{
    struct key_list list = {0};
    linnet_status status = LINNET_OK;
    for (size_t i = 0; i < s->options.n_keys && !status; i++)
        status = add(&list, s->options.keys[i], strlen(s->options.keys[i]), "an API key", err);
    if (!status && s->options.key_file) status = read_file(&list, s->options.key_file, err);
    if (status) {
        forget(&list);
        return status;
    }
    pthread_mutex_lock(&s->mutex);
    struct key_list old = {s->keys, s->n_keys, s->n_keys};
    s->keys = list.keys;
    s->n_keys = list.n;
    pthread_mutex_unlock(&s->mutex);
    forget(&old);
    return LINNET_OK;
}

/*
 * libmicrohttpd before 0.9.77 ends a value at a NUL that the client sent. Its line's end has become
 * NULs too, so what comes after the first one tells: more text, and this was no key.
 */
static bool is_whole(const char *value, size_t n)
{
#if MHD_VERSION < 0x00097700
    return value[n + 1] == 0;
#else
    (void)value;
    (void)n;
    return true;
#endif
}

struct shown {
    const char *bearer, *plain; /* Authorization, x-api-key */
    size_t bearer_size, plain_size;
    int n_bearer, n_plain;
};

static enum MHD_Result on_header(void *cls, enum MHD_ValueKind kind, const char *name,
                                 size_t name_size, const char *value, size_t size)
{
    struct shown *shown = cls;
    (void)kind;
    (void)name_size;
    if (strcasecmp(name, "authorization") == 0) {
        shown->bearer = value;
        shown->bearer_size = size;
        shown->n_bearer++;
    } else if (strcasecmp(name, "x-api-key") == 0) {
        shown->plain = value;
        shown->plain_size = size;
        shown->n_plain++;
    }
    return MHD_YES;
}

/* Every key is compared with all of its bytes, whichever fits and wherever they differ. */
static bool is_known(struct server *s, const char *text, size_t n)
{
    struct key shown = {.size = n};
    unsigned found = 0;
    memcpy(shown.text, text, n < KEY_SIZE ? n : KEY_SIZE);
    for (size_t k = 0; k < s->n_keys; k++) {
        unsigned different = (unsigned)(s->keys[k].size ^ n) | (unsigned)((n >> 16) != 0);
        for (size_t i = 0; i < KEY_SIZE; i++) different |= s->keys[k].text[i] ^ shown.text[i];
        found |= different == 0;
    }
    explicit_bzero(&shown, sizeof shown);
    return found;
}

bool keys_admit(struct server *s, struct MHD_Connection *connection)
{
    struct shown shown = {0};
    pthread_mutex_lock(&s->mutex);
    bool open = s->n_keys == 0, known = false;
    if (!open) {
        MHD_get_connection_values_n(connection, MHD_HEADER_KIND, on_header, &shown);
        const char *key = shown.plain;
        size_t n = shown.plain_size;
        if (shown.n_bearer && shown.bearer_size > 7 &&
            strncasecmp(shown.bearer, "bearer ", 7) == 0) {
            key = shown.bearer + 7;
            n = shown.bearer_size - 7;
        } else if (shown.n_bearer) {
            key = NULL;
        }
        if (key && is_whole(key, n) && shown.n_bearer <= 1 && shown.n_plain <= 1)
            known = is_known(s, key, n);
    }
    pthread_mutex_unlock(&s->mutex);
    return open || known;
}
