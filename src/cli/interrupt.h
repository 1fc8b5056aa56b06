/*
 * interrupt.h - Ctrl-C and its like. Until interrupt_catch the program just ends with code 130.
 * Afterwards the first SIGINT, SIGTERM or SIGHUP is noted and wakes whoever waits; the second one
 * ends the program. Whenever it ends so, the progress bar is erased, the terminal is as it was
 * found, and an unfinished file is gone. A signal that was ignored when we began stays ignored.
 */
#ifndef LINNET_CLI_INTERRUPT_H
#define LINNET_CLI_INTERRUPT_H

#include <stdbool.h>

void interrupt_setup(void);
void interrupt_catch(void);     /* forgets an earlier Ctrl-C, notes the next */
bool interrupt_seen(void);      /* since interrupt_catch; a SIGTERM or SIGHUP at any time */
bool interrupt_terminate(void); /* a SIGTERM or SIGHUP at any time */

/* The file that must not stay if we are ended; NULL: none. The name must live until then. */
void interrupt_unfinished(const char *path);

/* A semaphore that an interrupt posts too: where the program sleeps while the engine works. */
void interrupt_wake(void);
void interrupt_wait(void);

/* Waits until fd can be read (at its end it can). False: an interrupt came, before or meanwhile. */
bool interrupt_await_input(int fd);

#endif
