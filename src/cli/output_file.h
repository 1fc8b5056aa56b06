/*
 * output_file.h - a file that appears whole or not at all: it is written beside the one asked for
 * and renamed at the end. Devices and pipes are written as they are.
 */
#ifndef LINNET_CLI_OUTPUT_FILE_H
#define LINNET_CLI_OUTPUT_FILE_H

#include <sys/types.h>

#include "base/error.h"

struct output_file {
    int fd;           /* -1: not open */
    const char *path; /* the caller's */
    char *target, *temporary;
};

/* mode: of a file that is not there yet, before umask. Close it after any outcome. */
linnet_status output_file_open(struct output_file *file, const char *path, mode_t mode,
                               linnet_error *err);

/* LINNET_OK in `status`: complete and on the disk under its name. Else, or if that fails: gone. */
linnet_status output_file_close(struct output_file *file, linnet_status status, linnet_error *err);

#endif
