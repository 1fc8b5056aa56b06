#include "cli/output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/memory.h"
#include "base/strbuf.h"
#include "cli/interrupt.h"

linnet_status output_file_open(struct output_file *file, const char *path, mode_t mode,
                               linnet_error *err)
{
    struct stat about;
    struct strbuf name = {0};
    *file = (struct output_file){.fd = -1, .path = path};
    bool exists = stat(path, &about) == 0;
    if (exists && !S_ISREG(about.st_mode)) {
        file->fd = open(path, O_WRONLY | O_CLOEXEC);
        if (file->fd >= 0) return LINNET_OK;
        return error_set(err, LINNET_IO, "cannot open %s: %s", path, strerror(errno));
    }
    file->target = exists ? realpath(path, NULL) : mem_string(path, strlen(path)); /* keeps links */
    if (file->target) strbuf_format(&name, "%s.XXXXXX", file->target);
    if (!file->target || name.failed) {
        strbuf_free(&name);
        return error_memory(err, "a file name", strlen(path));
    }
    interrupt_unfinished(name.data);
    file->fd = mkostemp(name.data, O_CLOEXEC);
    if (file->fd < 0) {
        interrupt_unfinished(NULL);
        strbuf_free(&name);
        return error_set(err, LINNET_IO, "cannot create a file beside %s: %s", path,
                         strerror(errno));
    }
    file->temporary = name.data;
    mode_t mask = umask(0);
    umask(mask);
    if (fchmod(file->fd, exists ? about.st_mode & 07777 : mode & ~mask) == 0) return LINNET_OK;
    return error_set(err, LINNET_IO, "cannot set the mode of %s: %s", path, strerror(errno));
}

linnet_status output_file_close(struct output_file *file, linnet_status status, linnet_error *err)
{
    if (file->fd >= 0) {
        if (!status && file->temporary && fsync(file->fd) != 0)
            status = error_set(err, LINNET_IO, "cannot write %s: %s", file->path, strerror(errno));
        if (close(file->fd) != 0 && !status)
            status = error_set(err, LINNET_IO, "cannot write %s: %s", file->path, strerror(errno));
    }
    if (file->temporary) {
        if (!status && rename(file->temporary, file->target) != 0)
            status = error_set(err, LINNET_IO, "cannot rename %s to %s: %s", file->temporary,
                               file->target, strerror(errno));
        if (status) unlink(file->temporary);
        interrupt_unfinished(NULL);
    }
    free(file->target);
    free(file->temporary);
    *file = (struct output_file){.fd = -1};
    return status;
}
