/* scratch.h - a directory that a test fills and throws away. */
#ifndef LINNET_TESTS_SCRATCH_H
#define LINNET_TESTS_SCRATCH_H

#include "support.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

static inline char *scratch_create(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/linnet-test-XXXXXX");
    if (!mkdtemp(path)) fail_msg("cannot create a directory in /tmp");
    return path;
}

/* The path of a file in it; valid for the next three calls. */
static inline const char *scratch_path(const char *directory, const char *name)
{
    static char paths[4][512];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

static inline void scratch_write(const char *directory, const char *name, const void *bytes,
                                 size_t size)
{
    FILE *f = fopen(scratch_path(directory, name), "wb");
    if (!f || fwrite(bytes, 1, size, f) != size || fclose(f) != 0)
        fail_msg("cannot write %s", name);
}

static inline void scratch_text(const char *directory, const char *name, const char *text)
{
    scratch_write(directory, name, text, strlen(text));
}

static inline void scratch_copy(const char *directory, const char *name, const char *from)
{
    size_t size;
    char *bytes = load_file(from, &size);
    scratch_write(directory, name, bytes, size);
    free(bytes);
}

/* Copies the plain files of a directory. */
static inline void scratch_copy_all(const char *directory, const char *from)
{
    DIR *d = opendir(from);
    if (!d) fail_msg("cannot open %s", from);
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.') scratch_copy(directory, e->d_name, scratch_path(from, e->d_name));
    closedir(d);
}

/* Removes the files, then the directory. */
static inline void scratch_remove(const char *directory)
{
    DIR *d = opendir(directory);
    for (struct dirent *e; d && (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            remove(scratch_path(directory, e->d_name));
    if (d) closedir(d);
    rmdir(directory);
}

#endif
