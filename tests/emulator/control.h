/* control.h - what tests may ask of the emulated device. Plain C. */
#ifndef LINNET_EMULATOR_CONTROL_H
#define LINNET_EMULATOR_CONTROL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CONTROL __attribute__((visibility("default")))

/* For backends that are opened from now on. */
CONTROL void emulator_set_device(int capability, int multiprocessors);

/* What hardware leaves open (emulator.h): as early as may be, or as late. */
CONTROL void emulator_set_early(bool on);

/* The n-th call that may fail, from 1 on, does so; 0: none. Returns how many there have been since
 * the last time. */
CONTROL long emulator_fail(long n);

/* What has been allocated, created or recorded and not been given back. */
CONTROL long emulator_live(void);

struct emulator_counts {
    long launches, cooperative, recordings, replays;
};
CONTROL struct emulator_counts emulator_count(void);

#ifdef __cplusplus
}
#endif

#endif
