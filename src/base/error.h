/* error.h - the one way to fail: return a status, leave one line that says what to do. */
#ifndef LINNET_BASE_ERROR_H
#define LINNET_BASE_ERROR_H

#include <stdarg.h>

#include "linnet.h"

/*
 * Fills err (may be NULL) and returns status, so that a failing path is one line:
 *     return error_set(err, LINNET_FORMAT, "%s: expected %d, found %d", path, want, got);
 * Bytes of the message that could upset a terminal or a log (control characters, broken UTF-8)
 * come out as '?', so names from untrusted files may be passed as they are.
 */
linnet_status error_set(linnet_error *err, linnet_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " before the message that is already in err. Returns err's status. */
linnet_status error_prefix(linnet_error *err, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The message for failed memory, in one place: "out of memory: WHAT needs N bytes". */
linnet_status error_memory(linnet_error *err, const char *what, size_t bytes);

#endif
