#include "base/error.h"

#include <stdio.h>
#include <string.h>

const char *linnet_status_name(linnet_status status)
{
    switch (status) {
    case LINNET_OK: return "ok";
    case LINNET_INVALID: return "invalid argument";
    case LINNET_IO: return "input/output error";
    case LINNET_FORMAT: return "damaged file";
    case LINNET_UNSUPPORTED: return "not supported";
    case LINNET_MEMORY: return "out of memory";
    case LINNET_TOO_LONG: return "too long";
    case LINNET_CANCELLED: return "cancelled";
    case LINNET_NUMERIC: return "the model produced NaN or infinity";
    case LINNET_DEVICE: return "device failure";
    case LINNET_INTERNAL: return "internal error";
    }
    return "unknown status";
}

const char *linnet_version(void)
{
    return LINNET_VERSION;
}

/* Length of the valid UTF-8 sequence at s, or 0. */
static int utf8_length(const unsigned char *s)
{
    if (s[0] < 0x80) return 1;
    int n = s[0] >= 0xC2 && s[0] <= 0xDF   ? 2
            : (s[0] & 0xF0) == 0xE0        ? 3
            : s[0] >= 0xF0 && s[0] <= 0xF4 ? 4
                                           : 0;
    for (int i = 1; i < n; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    if (n == 3 && ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F))) return 0;
    if (n == 4 && ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F))) return 0;
    return n;
}

static void clean(char *text)
{
    unsigned char *s = (unsigned char *)text;
    while (*s) {
        int n = utf8_length(s);
        bool control = n == 1 && (*s < 0x20 || *s == 0x7F);
        bool c1_control = n == 2 && s[0] == 0xC2 && s[1] < 0xA0;
        if (n == 0 || control || c1_control) {
            *s++ = '?';
            continue;
        }
        s += n;
    }
}

linnet_status error_set(linnet_error *err, linnet_status status, const char *format, ...)
{
    if (!err) return status;
    err->status = status;
    va_list args;
    va_start(args, format);
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    clean(err->message);
    return status;
}

linnet_status error_prefix(linnet_error *err, const char *format, ...)
{
    if (!err) return LINNET_INTERNAL;
    char prefix[LINNET_ERROR_SIZE / 2];
    char old[LINNET_ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(prefix, sizeof prefix, format, args);
    va_end(args);
    memcpy(old, err->message, sizeof old);
    int n = snprintf(err->message, sizeof err->message, "%s: ", prefix);
    int room = (int)sizeof err->message - n - 1; /* a long old message loses its end */
    snprintf(err->message + n, (size_t)room + 1, "%.*s", room, old);
    clean(err->message);
    return err->status;
}

linnet_status error_memory(linnet_error *err, const char *what, size_t bytes)
{
    return error_set(err, LINNET_MEMORY, "out of memory: %s needs %zu bytes", what, bytes);
}
