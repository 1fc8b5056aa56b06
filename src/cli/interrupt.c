#include "cli/interrupt.h"

#include <errno.h>
#include <poll.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <termios.h>
#include <unistd.h>

#include "cli/output.h"
#include "cli/progress.h"

static sem_t wake;
static volatile sig_atomic_t catching, seen, terminate;
static int came = -1; /* an event: readable once an interrupt came, so that poll() misses none */
static const char *volatile unfinished;
static struct termios terminal; /* as found */
static bool has_terminal;

/* From the signal handler. A terminal that is another program's by now is left alone. */
static void leave(void)
{
    progress_erase();
    if (has_terminal && tcgetpgrp(STDIN_FILENO) == getpgrp())
        tcsetattr(STDIN_FILENO, TCSANOW, &terminal);
    if (unfinished) unlink(unfinished);
    _exit(EXIT_INTERRUPTED);
}

static void on_signal(int number)
{
    static const uint64_t one = 1;
    int before = errno;
    if (number != SIGINT) terminate = 1;
    if (!catching || seen) leave(); /* asked twice: no more waiting */
    seen = 1;
    sem_post(&wake);
    ssize_t ignored = write(came, &one, sizeof one);
    (void)ignored;
    errno = before;
}

void interrupt_setup(void)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action = {.sa_handler = on_signal}, found;
    sem_init(&wake, 0, 0);
    came = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    has_terminal = tcgetattr(STDIN_FILENO, &terminal) == 0;
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        sigaction(signals[i], NULL, &found);
        if (found.sa_handler != SIG_IGN) sigaction(signals[i], &action, NULL);
    }
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error of write() */
}

void interrupt_catch(void)
{
    uint64_t ignored;
    seen = 0; /* first: one that comes from here on is seen even if its event is read away */
    while (read(came, &ignored, sizeof ignored) > 0) {
    }
    if (terminate) seen = 1;
    catching = 1;
}

bool interrupt_seen(void)
{
    return seen;
}

bool interrupt_terminate(void)
{
    return terminate;
}

void interrupt_unfinished(const char *path)
{
    unfinished = path;
}

void interrupt_wake(void)
{
    sem_post(&wake);
}

void interrupt_wait(void)
{
    while (sem_wait(&wake) != 0) {
    }
}

bool interrupt_await_input(int fd)
{
    struct pollfd both[2] = {{fd, POLLIN, 0}, {came, POLLIN, 0}};
    while (!seen) {
        int n = poll(both, 2, -1);
        if (n < 0 && errno != EINTR) return true; /* then reading says what is wrong */
        if (n > 0 && both[0].revents && !both[1].revents) return true;
    }
    return false;
}
