/*
 * mapping.h - a regular file, mapped read-only. The file must not shrink while it is mapped: the
 * operating system would end the process (SIGBUS) when a page that is gone is read.
 */
#ifndef LINNET_FILE_MAPPING_H
#define LINNET_FILE_MAPPING_H

#include "base/error.h"

struct mapping {
    const uint8_t *data;
    size_t size;
    int64_t modified_s, modified_ns; /* when the file was changed last, since 1970 */
    uint32_t mode, group;            /* who may read it: st_mode, st_gid */
};

/* Refuses, each with its own message: missing, no permission, a directory, not a regular file
 * (pipes and devices are never waited for), empty. */
linnet_status mapping_open(const char *path, struct mapping *out, linnet_error *err);
void mapping_close(struct mapping *m); /* a zeroed mapping is fine */

/* Of bytes in a mapping that will hardly be read again: their pages leave this process's memory.
 * What is read again comes from the file. */
void mapping_release(const void *data, size_t bytes);

/*
 * A direct child of `directory`. The name must be a plain one (no '/', not "." or ".."), and what
 * it leads to must lie in the directory: a symbolic link out of it is refused, except from
 * CACHE/snapshots/REVISION to CACHE/blobs, which is how Hugging Face's download cache is built.
 */
linnet_status mapping_open_in(const char *directory, const char *name, struct mapping *out,
                              linnet_error *err);

/* Whether the directory has an entry of that name, be it a link that leads nowhere. */
bool mapping_present_in(const char *directory, const char *name);

#endif
