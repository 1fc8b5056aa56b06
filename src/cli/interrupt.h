/*
 * interrupt.h - Ctrl-C and its like. Until interrupt_catch the program just ends with code 130.
 * Afterwards the first SIGINT or SIGTERM is noted and wakes whoever waits; the second one kills.
 */
#ifndef LINNET_CLI_INTERRUPT_H
#define LINNET_CLI_INTERRUPT_H

#include <stdbool.h>

void interrupt_setup(void);
void interrupt_catch(void);     /* forgets an earlier one, notes the next */
bool interrupt_seen(void);      /* SIGINT or SIGTERM since interrupt_catch */
bool interrupt_terminate(void); /* a SIGTERM or SIGHUP at any time */

/* A semaphore that an interrupt posts too: the one place where the program sleeps. */
void interrupt_wake(void);
void interrupt_wait(void);

#endif
