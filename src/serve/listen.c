/* listen.c - the socket that clients connect to. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "serve/server.h"

enum { BACKLOG = 1024 };

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un local;
};

static linnet_status cannot(const char *what, int fd, const char *advice, linnet_error *err)
{
    int why = errno;
    if (fd >= 0) close(fd);
    return error_set(err, LINNET_IO, "cannot listen on %s: %s%s", what, strerror(why), advice);
}

/* A socket file that nobody listens behind is what a killed server left. */
static bool is_stale(const struct sockaddr_un *address)
{
    struct stat found;
    if (lstat(address->sun_path, &found) != 0 || !S_ISSOCK(found.st_mode)) return false;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    bool stale = connect(fd, (const struct sockaddr *)address, sizeof *address) != 0 &&
                 errno == ECONNREFUSED;
    close(fd);
    return stale;
}

static linnet_status listen_local(const char *path, int *out, linnet_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof address.sun_path)
        return error_set(err, LINNET_INVALID,
                         "a Unix socket's path must have 1 to %zu bytes, not %zu",
                         sizeof address.sun_path - 1, n);
    memcpy(address.sun_path, path, n);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return cannot(path, fd, "", err);
    int failed = bind(fd, (struct sockaddr *)&address, sizeof address);
    if (failed && errno == EADDRINUSE && is_stale(&address) && unlink(path) == 0)
        failed = bind(fd, (struct sockaddr *)&address, sizeof address);
    if (failed || listen(fd, BACKLOG) != 0)
        return cannot(path, fd, errno == EADDRINUSE ? ": is another server running?" : "", err);
    *out = fd;
    return LINNET_OK;
}

static linnet_status listen_inet(const char *host, int port, int *out, linnet_error *err)
{
    char service[16], what[SERVER_ADDRESS_SIZE];
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *found;
    snprintf(service, sizeof service, "%d", port);
    snprintf(what, sizeof what, "%.200s port %d", host, port);
    int failed = getaddrinfo(host, service, &hints, &found);
    if (failed)
        return error_set(err, LINNET_INVALID, "cannot listen on %s: %s", what,
                         failed == EAI_SYSTEM ? strerror(errno) : gai_strerror(failed));
    /* "localhost" may be both ::1 and 127.0.0.1: what most clients try is the latter */
    const struct addrinfo *chosen = found;
    for (const struct addrinfo *a = found; a; a = a->ai_next)
        if (a->ai_family == AF_INET) chosen = a;
    static const int on = 1, off = 0;
    int fd = socket(chosen->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd >= 0 && chosen->ai_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    failed = fd < 0 || bind(fd, chosen->ai_addr, chosen->ai_addrlen) || listen(fd, BACKLOG);
    freeaddrinfo(found);
    if (failed)
        return cannot(what, fd,
                      errno == EADDRINUSE ? ": is another server running? --port takes another one"
                                          : "",
                      err);
    *out = fd;
    return LINNET_OK;
}

linnet_status server_describe(int fd, char *text, linnet_error *err)
{
    union address address = {0};
    socklen_t size = sizeof address;
    int listening = 0;
    socklen_t n = sizeof listening;
    if (getsockname(fd, &address.any, &size) != 0 ||
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &n) != 0 || !listening)
        return error_set(err, LINNET_INVALID,
                         "file descriptor %d is no listening stream socket: a systemd socket unit "
                         "needs ListenStream=",
                         fd);
    char host[INET6_ADDRSTRLEN] = "?";
    if (address.any.sa_family == AF_INET) {
        inet_ntop(AF_INET, &address.v4.sin_addr, host, sizeof host);
        snprintf(text, SERVER_ADDRESS_SIZE, "http://%s:%d", host, ntohs(address.v4.sin_port));
    } else if (address.any.sa_family == AF_INET6) {
        inet_ntop(AF_INET6, &address.v6.sin6_addr, host, sizeof host);
        snprintf(text, SERVER_ADDRESS_SIZE, "http://[%s]:%d", host, ntohs(address.v6.sin6_port));
    } else {
        snprintf(text, SERVER_ADDRESS_SIZE, "unix:%.*s", (int)sizeof address.local.sun_path,
                 address.local.sun_path);
    }
    return LINNET_OK;
}

linnet_status server_listen(const char *host, int port, int *fd, char *text, linnet_error *err)
{
    linnet_status status = strncmp(host, "unix:", 5) == 0 ? listen_local(host + 5, fd, err)
                                                          : listen_inet(host, port, fd, err);
    return status ? status : server_describe(*fd, text, err);
}

bool server_is_local(int fd)
{
    union address address = {0};
    socklen_t size = sizeof address;
    if (getsockname(fd, &address.any, &size) != 0) return false;
    if (address.any.sa_family == AF_UNIX) return true;
    if (address.any.sa_family == AF_INET) return ntohl(address.v4.sin_addr.s_addr) >> 24 == 127;
    return IN6_IS_ADDR_LOOPBACK(&address.v6.sin6_addr);
}
