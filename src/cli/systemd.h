/* systemd.h - what a service tells systemd and gets from it, without its library. */
#ifndef LINNET_CLI_SYSTEMD_H
#define LINNET_CLI_SYSTEMD_H

#include "base/error.h"

/* The socket that systemd opened for us (sd_listen_fds(3)); *fd is -1 if it opened none. */
linnet_status systemd_socket(int *fd, linnet_error *err);

/* "READY=1" and the like (sd_notify(3)); nothing where nobody listens. */
void systemd_notify(const char *state);

#endif
