/*
 * packed.h - a model's weights as a backend lays them out in memory, in a file beside the model
 * (MODEL.gguf.packed, or linnet.packed in a directory): a start that finds it maps the weights
 * instead of packing them anew. It holds nothing that could not be made again, and is used only if
 * it was made from these very files and every byte is still what was written.
 *
 * All numbers are little-endian:
 *   header  "linnetPK", u32 layout, u32 0, u64 source[2], u64 bytes of data, u64 hash of the table,
 *           u64 recipe, u64 hash of these 56 bytes; zeros up to PACKED_PAGE
 *   data    the matrices in the order in which they are loaded, each at a multiple of PACKED_PAGE
 *   table   u64 for each PACKED_CHUNK of data (the last may be shorter): its hash
 * Hashes are XXH3 of 64 bits. The source is the XXH3 of 128 bits over sizes and times of change of
 * the model's files, names, types and shapes of its tensors, and some bytes of 64 of them; the
 * recipe is over what packed_describe was told.
 */
#ifndef LINNET_FILE_PACKED_H
#define LINNET_FILE_PACKED_H

#include "base/threads.h"
#include "file/checkpoint.h"

enum { PACKED_PAGE = 4096, PACKED_CHUNK = 1 << 20 };

struct packed; /* such a file, mapped, or being written */

/* Where the file of that model is or would be; free(). NULL if memory is short. */
char *packed_path(const struct checkpoint *cp);

/*
 * Opens and checks the file of a model; `layout` is what its backend calls its own (ops.h).
 * LINNET_OK with NULL: there is none. Any failure means that the weights must be packed, and says
 * why.
 */
linnet_status packed_open(const struct checkpoint *cp, uint32_t layout, struct pool *pool,
                          struct packed **out, linnet_error *err);
/* The same over bytes in memory, which must outlive it; `path` is for messages. */
linnet_status packed_open_memory(const void *bytes, size_t size, const char *path,
                                 const uint64_t source[2], uint32_t layout, struct pool *pool,
                                 struct packed **out, linnet_error *err);

/* Begins a new file, which is in its place after packed_commit. Until then it has no name where the
 * system has such files; where not, or if `named`, that of its place with ".new" behind it. */
linnet_status packed_create(const struct checkpoint *cp, uint32_t layout, bool named,
                            struct packed **out, linnet_error *err);
/* Writes what is left and puts the file in its place. *bytes: its size. */
linnet_status packed_commit(struct packed *p, struct pool *pool, int64_t *bytes, linnet_error *err);

/* The next matrix, as ops.h's store wants it: of a file that is read *filled, until packed_close;
 * otherwise room for it, until the next call. */
linnet_status packed_next(void *packed, size_t bytes, void **place, bool *filled,
                          linnet_error *err);

/* How the next matrices come from tensors: which, in what order, cut and joined how. */
void packed_describe(struct packed *p, const void *facts, size_t n);
/* After the last matrix: whether all was described as it was when the file was written, and all of
 * it was taken. */
linnet_status packed_complete(const struct packed *p, linnet_error *err);

/* A file that was not committed is gone. NULL is fine. */
void packed_close(struct packed *p);

#endif
