#include "cli/interrupt.h"

#include <semaphore.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#include "cli/output.h"
#include "cli/progress.h"

static sem_t wake;
static volatile sig_atomic_t catching, seen, terminate;

static void on_signal(int number)
{
    if (number != SIGINT) terminate = 1;
    if (!catching) {
        progress_erase();
        _exit(number == SIGINT ? EXIT_INTERRUPTED : 128 + number);
    }
    if (seen) { /* asked twice: no more waiting */
        signal(number, SIG_DFL);
        raise(number);
    }
    seen = 1;
    sem_post(&wake);
}

void interrupt_setup(void)
{
    struct sigaction action = {.sa_handler = on_signal};
    sem_init(&wake, 0, 0);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error of write() */
}

void interrupt_catch(void)
{
    seen = 0;
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

void interrupt_wake(void)
{
    sem_post(&wake);
}

void interrupt_wait(void)
{
    while (sem_wait(&wake) != 0) {
    }
}
