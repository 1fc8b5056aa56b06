#define XXH_INLINE_ALL
#include <xxhash.h>

#include "file/packed.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/memory.h"
#include "base/reader.h"
#include "base/strbuf.h"
#include "file/checkpoint_internal.h"
#include "file/gguf_internal.h"

static const char magic[8] = "linnetPK", name_in_directory[] = "linnet.packed";

enum { HEADER_BYTES = 64, HASHED_BYTES = HEADER_BYTES - 8 };

struct packed {
    char *path;
    uint64_t source[2];
    uint32_t layout;
    size_t position;     /* in the data: where the next matrix is */
    XXH3_state_t recipe; /* of packed_describe */

    /* of a file that is read */
    struct mapping map;
    const uint8_t *data;
    size_t data_bytes;
    uint64_t wanted_recipe;

    /* of one that is written */
    bool writing;
    char *temporary; /* a name until it is whole, and */
    bool named;      /* whether it has that */
    bool one_group;  /* all of the model's files have that group */
    mode_t mode;     /* that all of them have */
    gid_t group;
    int fd;
    void *room; /* the matrix that is being made, written with the next call */
    size_t room_bytes, n_room;
};

static size_t whole_pages(size_t bytes)
{
    return (bytes + PACKED_PAGE - 1) / PACKED_PAGE * PACKED_PAGE;
}

/* ---- the model that it was made from ------------------------------------------------------- */

/* The i-th of the files that hold the weights; NULL: there are no more. */
static const struct mapping *file_of(const struct checkpoint *cp, size_t i)
{
    const struct storage *storage = cp->internal;
    if (cp->gguf) return i < cp->gguf->n_parts ? &cp->gguf->parts[i].map : NULL;
    return i < storage->n_shards ? &storage->shards[i].map : NULL;
}

static void add_tensor(XXH3_state_t *state, const struct tensor *t)
{
    int64_t facts[2 + TENSOR_MAX_DIMS] = {t->dtype, t->n_dims};
    for (int i = 0; i < t->n_dims; i++) facts[2 + i] = t->shape[i];
    XXH3_128bits_update(state, t->name, strlen(t->name) + 1);
    XXH3_128bits_update(state, facts, sizeof facts);
}

/* From the middle of some tensors: other weights differ nearly everywhere. */
static void add_samples(XXH3_state_t *state, const struct checkpoint *cp)
{
    enum { SAMPLES = 64, SAMPLE_BYTES = 512 };
    size_t n = cp->n_tensors < SAMPLES ? cp->n_tensors : SAMPLES;
    for (size_t i = 0; i < n; i++) {
        const struct tensor *t = &cp->tensors[i * cp->n_tensors / n];
        size_t bytes = t->bytes < SAMPLE_BYTES ? t->bytes : SAMPLE_BYTES;
        XXH3_128bits_update(state, (const char *)t->data + (t->bytes - bytes) / 2, bytes);
    }
}

static void source_of(const struct checkpoint *cp, uint64_t source[2])
{
    const struct mapping *file;
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    for (size_t i = 0; (file = file_of(cp, i)); i++) {
        uint64_t facts[3] = {file->size, (uint64_t)file->modified_s, (uint64_t)file->modified_ns};
        XXH3_128bits_update(&state, facts, sizeof facts);
    }
    for (size_t i = 0; i < cp->n_tensors; i++) add_tensor(&state, &cp->tensors[i]);
    add_samples(&state, cp);
    XXH128_hash_t hash = XXH3_128bits_digest(&state);
    source[0] = hash.low64;
    source[1] = hash.high64;
}

char *packed_path(const struct checkpoint *cp)
{
    struct strbuf path = {0};
    strbuf_text(&path, cp->path);
    strbuf_format(&path, cp->gguf ? ".packed" : "/%s", name_in_directory);
    if (!path.failed) return path.data;
    strbuf_free(&path);
    return NULL;
}

/* ---- hashes -------------------------------------------------------------------------------- */

static size_t n_chunks(size_t bytes)
{
    return bytes / PACKED_CHUNK + (bytes % PACKED_CHUNK > 0);
}

struct hashing {
    const uint8_t *data;
    size_t bytes;
    uint64_t *table;       /* to fill, or */
    const uint8_t *wanted; /* to compare with */
    atomic_bool differs;
};

static void hash_share(void *arg, int thread, int n_threads)
{
    struct hashing *h = arg;
    int64_t begin, end;
    pool_share((int64_t)n_chunks(h->bytes), 1, thread, n_threads, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        size_t at = (size_t)i * PACKED_CHUNK, left = h->bytes - at;
        uint64_t hash = XXH3_64bits(h->data + at, left < PACKED_CHUNK ? left : PACKED_CHUNK);
        if (h->table)
            h->table[i] = hash;
        else if (memcmp(h->wanted + i * 8, &hash, 8) != 0)
            h->differs = true;
    }
}

/* ---- reading ------------------------------------------------------------------------------- */

static linnet_status damaged(const char *path, linnet_error *err)
{
    return error_set(err, LINNET_FORMAT, "%s is damaged: 'linnet pack' makes it anew", path);
}

static linnet_status other(const struct packed *p, linnet_error *err)
{
    return error_set(err, LINNET_INVALID,
                     "%s was made from other files than the model's, or before they changed: "
                     "'linnet pack' makes it anew",
                     p->path);
}

/* The header, checked. *table_hash: what the table must have. */
static linnet_status read_header(struct packed *p, struct reader *r, uint64_t *table_hash,
                                 linnet_error *err)
{
    const uint8_t *header;
    char found[8];
    uint32_t layout, zero;
    uint64_t source[2], bytes, hash;
    if (r->size < HEADER_BYTES || !reader_copy(r, found, sizeof found) || !reader_u32(r, &layout) ||
        !reader_u32(r, &zero) || !reader_copy(r, source, sizeof source) || !reader_u64(r, &bytes) ||
        !reader_u64(r, table_hash) || !reader_u64(r, &p->wanted_recipe) || !reader_u64(r, &hash) ||
        memcmp(found, magic, sizeof magic) != 0)
        return damaged(p->path, err);
    header = r->data;
    if (XXH3_64bits(header, HASHED_BYTES) != hash) return damaged(p->path, err);
    if (layout != p->layout)
        return error_set(err, LINNET_UNSUPPORTED,
                         "%s is another version's: 'linnet pack' makes it anew", p->path);
    if (memcmp(source, p->source, sizeof source) != 0) return other(p, err);
    p->data_bytes = (size_t)bytes;
    return LINNET_OK;
}

static linnet_status check(struct packed *p, const void *bytes, size_t size, struct pool *pool,
                           linnet_error *err)
{
    struct reader r = {bytes, size, 0};
    struct hashing h = {0};
    uint64_t table_hash = 0;
    linnet_status status = read_header(p, &r, &table_hash, err);
    if (status) return status;
    size_t table_bytes = n_chunks(p->data_bytes) * 8;
    if (!reader_skip(&r, PACKED_PAGE - HEADER_BYTES) ||
        !reader_bytes(&r, p->data_bytes, &p->data) || !reader_bytes(&r, table_bytes, &h.wanted) ||
        r.pos != size || XXH3_64bits(h.wanted, table_bytes) != table_hash)
        return damaged(p->path, err);
    h.data = p->data;
    h.bytes = p->data_bytes;
    pool_run(pool, hash_share, &h);
    return h.differs ? damaged(p->path, err) : LINNET_OK;
}

static linnet_status new_packed(const char *path, const uint64_t source[2], uint32_t layout,
                                struct packed **out, linnet_error *err)
{
    struct packed *p = mem_new(1, sizeof *p);
    if (!p) return error_memory(err, "the packed weights", sizeof *p);
    *p = (struct packed){.path = mem_string(path, strlen(path)),
                         .source = {source[0], source[1]},
                         .layout = layout,
                         .fd = -1};
    XXH3_64bits_reset(&p->recipe);
    *out = p;
    return p->path ? LINNET_OK : error_memory(err, "a path", strlen(path));
}

linnet_status packed_open_memory(const void *bytes, size_t size, const char *path,
                                 const uint64_t source[2], uint32_t layout, struct pool *pool,
                                 struct packed **out, linnet_error *err)
{
    struct packed *p = NULL;
    linnet_status status = new_packed(path, source, layout, &p, err);
    if (!status) status = check(p, bytes, size, pool, err);
    if (status) {
        packed_close(p);
        return status;
    }
    *out = p;
    return LINNET_OK;
}

static bool is_there(const struct checkpoint *cp, const char *path)
{
    return cp->gguf ? access(path, F_OK) == 0 : mapping_present_in(cp->path, name_in_directory);
}

static linnet_status map(const struct checkpoint *cp, const char *path, struct mapping *out,
                         linnet_error *err)
{
    linnet_status status = cp->gguf ? mapping_open(path, out, err)
                                    : mapping_open_in(cp->path, name_in_directory, out, err);
    if (!status) madvise((void *)out->data, out->size, MADV_HUGEPAGE); /* failure is no error */
    return status;
}

linnet_status packed_open(const struct checkpoint *cp, uint32_t layout, struct pool *pool,
                          struct packed **out, linnet_error *err)
{
    *out = NULL;
    if (!cp->mapped) return LINNET_OK; /* made in memory */
    char *path = packed_path(cp);
    if (!path) return error_memory(err, "a path", strlen(cp->path));
    struct mapping mapping = {0};
    uint64_t source[2];
    linnet_status status = LINNET_OK;
    if (is_there(cp, path)) {
        status = map(cp, path, &mapping, err);
        if (status == LINNET_FORMAT) damaged(path, err); /* empty */
        if (!status) {
            source_of(cp, source);
            status = packed_open_memory(mapping.data, mapping.size, path, source, layout, pool, out,
                                        err);
        }
        if (status)
            mapping_close(&mapping);
        else
            (*out)->map = mapping;
    }
    free(path);
    return status;
}

/* ---- writing ------------------------------------------------------------------------------- */

static linnet_status failed(const struct packed *p, const char *what, linnet_error *err)
{
    return error_set(err, LINNET_IO, "%s: cannot be %s: %s", p->path, what, strerror(errno));
}

static linnet_status write_at(struct packed *p, const void *bytes, size_t n, size_t offset,
                              linnet_error *err)
{
    for (size_t done = 0; done < n;) {
        ssize_t written =
            pwrite(p->fd, (const char *)bytes + done, n - done, (off_t)(offset + done));
        if (written < 0 && errno != EINTR) return failed(p, "written", err);
        if (written > 0) done += (size_t)written;
    }
    return LINNET_OK;
}

/* Who may read and write all of the model may this; of those in a group only if it is the model's.
 */
static linnet_status set_mode(struct packed *p, linnet_error *err)
{
    struct stat made;
    mode_t mode = p->mode;
    if (fstat(p->fd, &made) != 0) return failed(p, "examined", err);
    bool grouped = made.st_gid == p->group || fchown(p->fd, (uid_t)-1, p->group) == 0;
    if (!grouped || !p->one_group) mode &= (mode_t)~0060;
    if (fchmod(p->fd, mode) == 0) return LINNET_OK;
    return made.st_mode & 0666 & ~mode ? failed(p, "given the model's mode", err) : LINNET_OK;
}

/* What set_mode needs. */
static void note_mode(struct packed *p, const struct checkpoint *cp)
{
    const struct mapping *file = file_of(cp, 0);
    p->mode = 0666;
    p->group = file->group;
    p->one_group = true;
    for (size_t i = 0; (file = file_of(cp, i)); i++) {
        p->mode &= file->mode;
        if (file->group != p->group) p->one_group = false;
    }
}

static linnet_status name_temporary(struct packed *p, const char *end, linnet_error *err)
{
    struct strbuf name = {0};
    strbuf_format(&name, "%s.%s", p->path, end);
    if (!name.failed) {
        p->temporary = name.data;
        return LINNET_OK;
    }
    strbuf_free(&name);
    return error_memory(err, "a path", strlen(p->path));
}

/* A file without a name, where there may be such and they can be given one later: it is gone with
 * whoever is killed. False: there is none. */
static bool create_nameless(struct packed *p)
{
    char *folder = mem_string(p->path, strlen(p->path));
    if (!folder || access("/proc/self/fd", X_OK) != 0) {
        free(folder);
        return false;
    }
    char *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0;
    p->fd = open(slash ? folder : ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    free(folder);
    return p->fd >= 0;
}

/* What somebody who was killed has left there is overwritten; who holds the lock is at work. */
static linnet_status create_named(struct packed *p, linnet_error *err)
{
    enum { ATTEMPTS = 10 };
    struct stat opened, there;
    linnet_status status = name_temporary(p, "new", err);
    for (int i = 0; i < ATTEMPTS && !status && !p->named; i++) {
        if (p->fd >= 0) close(p->fd); /* it was put in its place meanwhile */
        p->fd = open(p->temporary, O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (p->fd < 0)
            return error_set(err, LINNET_IO, "%s: cannot be created: %s", p->temporary,
                             strerror(errno));
        if (flock(p->fd, LOCK_EX | LOCK_NB) != 0)
            return error_set(err, LINNET_IO, "%s: %s", p->temporary,
                             errno == EWOULDBLOCK ? "another process is writing it"
                                                  : strerror(errno));
        p->named = fstat(p->fd, &opened) == 0 && stat(p->temporary, &there) == 0 &&
                   opened.st_ino == there.st_ino && opened.st_dev == there.st_dev;
    }
    if (!status && (!p->named || ftruncate(p->fd, 0) != 0)) status = failed(p, "created", err);
    return status;
}

static linnet_status give_name(struct packed *p, linnet_error *err)
{
    uint64_t random;
    char end[24], open_file[64];
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return failed(p, "put in its place", err);
    snprintf(end, sizeof end, "%016llx", (unsigned long long)random);
    snprintf(open_file, sizeof open_file, "/proc/self/fd/%d", p->fd);
    linnet_status status = name_temporary(p, end, err);
    if (status) return status;
    p->named = linkat(AT_FDCWD, open_file, AT_FDCWD, p->temporary, AT_SYMLINK_FOLLOW) == 0;
    return p->named ? LINNET_OK : failed(p, "put in its place", err);
}

/* In place of what is there. */
static linnet_status put_in_place(struct packed *p, linnet_error *err)
{
    linnet_status status = set_mode(p, err);
    if (!status && !p->named) status = give_name(p, err);
    if (!status && rename(p->temporary, p->path) != 0) status = failed(p, "put in its place", err);
    if (!status) p->named = false;
    return status;
}

linnet_status packed_create(const struct checkpoint *cp, uint32_t layout, bool named,
                            struct packed **out, linnet_error *err)
{
    if (!cp->mapped)
        return error_set(err, LINNET_INVALID, "%s is no file: nothing to pack", cp->path);
    char *path = packed_path(cp);
    if (!path) return error_memory(err, "a path", strlen(cp->path));
    struct packed *p = NULL;
    uint64_t source[2];
    source_of(cp, source);
    linnet_status status = new_packed(path, source, layout, &p, err);
    free(path);
    if (!status) {
        p->writing = true;
        note_mode(p, cp);
        if (named || !create_nameless(p)) status = create_named(p, err);
    }
    if (status) {
        packed_close(p);
        return status;
    }
    *out = p;
    return LINNET_OK;
}

/* Writes the matrix that has been made since the last call. */
static linnet_status write_room(struct packed *p, linnet_error *err)
{
    if (p->n_room == 0) return LINNET_OK;
    size_t begin = p->position - whole_pages(p->n_room), n = p->n_room;
    p->n_room = 0;
    return write_at(p, p->room, n, PACKED_PAGE + begin, err);
}

static linnet_status make_room(struct packed *p, size_t bytes, void **place, linnet_error *err)
{
    linnet_status status = write_room(p, err);
    if (status) return status;
    if (bytes > p->room_bytes) {
        mem_pages_free(p->room, p->room_bytes);
        p->room_bytes = 0;
        p->room = mem_pages(bytes, true);
        if (!p->room) return error_memory(err, "a weight matrix", bytes);
        p->room_bytes = bytes;
    }
    p->n_room = bytes;
    p->position += whole_pages(bytes);
    *place = p->room;
    return LINNET_OK;
}

linnet_status packed_next(void *packed, size_t bytes, void **place, bool *filled, linnet_error *err)
{
    struct packed *p = packed;
    *filled = !p->writing;
    if (p->writing) return make_room(p, bytes, place, err);
    if (bytes > p->data_bytes || p->position > p->data_bytes - bytes) return other(p, err);
    *place = (void *)(uintptr_t)(p->data + p->position);
    p->position += whole_pages(bytes);
    return LINNET_OK;
}

void packed_describe(struct packed *p, const void *facts, size_t n)
{
    XXH3_64bits_update(&p->recipe, facts, n);
}

linnet_status packed_complete(const struct packed *p, linnet_error *err)
{
    if (p->writing) return LINNET_OK;
    bool all = p->position == p->data_bytes;
    return all && XXH3_64bits_digest(&p->recipe) == p->wanted_recipe ? LINNET_OK : other(p, err);
}

/* The table behind the data, then the header. */
static linnet_status write_ends(struct packed *p, struct pool *pool, const uint8_t *data,
                                linnet_error *err)
{
    size_t n = n_chunks(p->position);
    struct hashing h = {.data = data, .bytes = p->position, .table = mem_new(n, 8)};
    if (!h.table) return error_memory(err, "hashes", n * 8);
    pool_run(pool, hash_share, &h);
    uint64_t header[HEADER_BYTES / 8] = {[1] = p->layout,
                                         [2] = p->source[0],
                                         [3] = p->source[1],
                                         [4] = p->position,
                                         [5] = XXH3_64bits(h.table, n * 8),
                                         [6] = XXH3_64bits_digest(&p->recipe)};
    memcpy(header, magic, sizeof magic);
    header[HASHED_BYTES / 8] = XXH3_64bits(header, HASHED_BYTES);
    linnet_status status = write_at(p, h.table, n * 8, PACKED_PAGE + p->position, err);
    if (!status) status = write_at(p, header, sizeof header, 0, err);
    free(h.table);
    return status;
}

linnet_status packed_commit(struct packed *p, struct pool *pool, int64_t *bytes, linnet_error *err)
{
    linnet_status status = write_room(p, err);
    size_t size = PACKED_PAGE + p->position;
    if (status) return status;
    if (ftruncate(p->fd, (off_t)size) != 0) return failed(p, "written", err); /* the last page */
    const uint8_t *data = mmap(NULL, size, PROT_READ, MAP_PRIVATE, p->fd, 0);
    if (data == MAP_FAILED) return failed(p, "mapped", err);
    status = write_ends(p, pool, data + PACKED_PAGE, err);
    munmap((void *)data, size);
    if (!status && fsync(p->fd) != 0) status = failed(p, "written", err);
    if (!status) status = put_in_place(p, err);
    *bytes = (int64_t)(size + n_chunks(p->position) * 8);
    return status;
}

void packed_close(struct packed *p)
{
    if (!p) return;
    if (p->named) unlink(p->temporary);
    if (p->fd >= 0) close(p->fd);
    mem_pages_free(p->room, p->room_bytes);
    mapping_close(&p->map);
    free(p->temporary);
    free(p->path);
    free(p);
}
