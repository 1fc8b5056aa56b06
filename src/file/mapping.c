#include "file/mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static linnet_status map_descriptor(int fd, const char *path, struct mapping *out,
                                    linnet_error *err)
{
    struct stat info;
    if (fstat(fd, &info) != 0) return error_set(err, LINNET_IO, "%s: cannot be examined: %m", path);
    if (S_ISDIR(info.st_mode))
        return error_set(err, LINNET_IO, "%s: expected a file, found a directory", path);
    if (!S_ISREG(info.st_mode))
        return error_set(err, LINNET_IO, "%s: expected a regular file, found a device or pipe",
                         path);
    if (info.st_size == 0)
        return error_set(err, LINNET_FORMAT, "%s: the file is empty; download it again", path);
    void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) return error_set(err, LINNET_IO, "%s: cannot be mapped: %m", path);
    *out = (struct mapping){
        data,         (size_t)info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec,
        info.st_mode, info.st_gid};
    return LINNET_OK;
}

linnet_status mapping_open(const char *path, struct mapping *out, linnet_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return error_set(err, LINNET_IO, "%s: cannot be opened: %m", path);
    linnet_status status = map_descriptor(fd, path, out, err);
    close(fd);
    return status;
}

void mapping_close(struct mapping *m)
{
    if (m->data) munmap((void *)m->data, m->size);
    *m = (struct mapping){0};
}

void mapping_release(const void *data, size_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)data, end = begin + bytes;
    begin = (begin + page - 1) / page * page; /* pages shared with neighbours stay */
    end = end / page * page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_DONTNEED);
}

static bool is_plain(const char *name)
{
    return *name && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

/* Both resolved. */
static bool may_lead_to(const char *directory, const char *target)
{
    static const char snapshots[] = "/snapshots", blobs[] = "/blobs/";
    size_t n = strlen(directory), n_snapshots = sizeof snapshots - 1;
    if (strncmp(target, directory, n) == 0 && target[n] == '/') return true;
    const char *revision = strrchr(directory, '/');
    if (!revision || (size_t)(revision - directory) < n_snapshots) return false;
    size_t cache = (size_t)(revision - directory) - n_snapshots;
    return memcmp(directory + cache, snapshots, n_snapshots) == 0 &&
           strncmp(target, directory, cache) == 0 &&
           strncmp(target + cache, blobs, sizeof blobs - 1) == 0;
}

static linnet_status check_link(const char *directory, const char *path, linnet_error *err)
{
    struct stat info;
    if (lstat(path, &info) != 0 || !S_ISLNK(info.st_mode)) return LINNET_OK;
    char *root = realpath(directory, NULL), *target = root ? realpath(path, NULL) : NULL;
    linnet_status status = LINNET_OK;
    if (!target)
        status = error_set(err, LINNET_IO, "%s: a link that cannot be followed: %m", path);
    else if (!may_lead_to(root, target))
        status = error_set(err, LINNET_INVALID,
                           "%s: a link to %s, outside the model's directory; put the file itself "
                           "(or a hard link) there",
                           path, target);
    free(root);
    free(target);
    return status;
}

linnet_status mapping_open_in(const char *directory, const char *name, struct mapping *out,
                              linnet_error *err)
{
    char path[PATH_MAX];
    if (!is_plain(name))
        return error_set(err, LINNET_FORMAT,
                         "%s: file name \"%.200s\" must be a plain name in that directory",
                         directory, name);
    int n = snprintf(path, sizeof path, "%s/%s", directory, name);
    if (n < 0 || (size_t)n >= sizeof path)
        return error_set(err, LINNET_IO, "%.100s.../%.200s: the path is too long", directory, name);
    linnet_status status = check_link(directory, path, err);
    return status ? status : mapping_open(path, out, err);
}

bool mapping_present_in(const char *directory, const char *name)
{
    char path[PATH_MAX];
    struct stat info;
    int n = snprintf(path, sizeof path, "%s/%s", directory, name);
    return n > 0 && (size_t)n < sizeof path && (lstat(path, &info) == 0 || errno != ENOENT);
}
