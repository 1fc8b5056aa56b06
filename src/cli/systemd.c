#include "cli/systemd.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

linnet_status systemd_socket(int *fd, linnet_error *err)
{
    enum { FIRST = 3 };
    const char *pid = getenv("LISTEN_PID"), *count = getenv("LISTEN_FDS");
    *fd = -1;
    if (!pid || !count || strtol(pid, NULL, 10) != (long)getpid()) return LINNET_OK;
    long n = strtol(count, NULL, 10);
    if (n != 1)
        return error_set(err, LINNET_INVALID,
                         "systemd gave %ld sockets: expected one ListenStream= in the socket unit",
                         n);
    int flags = fcntl(FIRST, F_GETFL);
    if (flags < 0 || fcntl(FIRST, F_SETFD, FD_CLOEXEC) < 0 ||
        fcntl(FIRST, F_SETFL, flags | O_NONBLOCK) < 0)
        return error_set(err, LINNET_IO, "systemd's socket (file descriptor %d) is not there",
                         FIRST);
    *fd = FIRST;
    return LINNET_OK;
}

void systemd_notify(const char *state)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *path = getenv("NOTIFY_SOCKET");
    size_t n = path ? strlen(path) : 0;
    if (n < 2 || n >= sizeof address.sun_path || (path[0] != '/' && path[0] != '@')) return;
    memcpy(address.sun_path, path, n);
    if (path[0] == '@') address.sun_path[0] = 0; /* the abstract namespace */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    ssize_t ignored =
        sendto(fd, state, strlen(state), MSG_NOSIGNAL, (struct sockaddr *)&address, size);
    (void)ignored;
    close(fd);
}
