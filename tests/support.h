/*
 * support.h - what every test needs: cmocka, and where the data lies. The tests stand alone with
 * tests/data; where the larger shared sets (../shared/reference, ../shared/cases) are present
 * beside the checkout, they run all of those too.
 */
#ifndef LINNET_TESTS_SUPPORT_H
#define LINNET_TESTS_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <jansson.h>

#include "base/error.h"

/* Whether an emulated processor runs the tests, some twenty times slower: the longest do less. */
enum { EMULATED = LINNET_EMULATED };

/* Path of a file below tests/data, below ../shared/reference or ../shared/cases. Rotating static
 * buffers: valid for the next 15 calls. The shared ones return NULL where the file is absent. */
const char *data_path(const char *name);
const char *reference_path(const char *name);
const char *cases_path(const char *name);

/* Loads JSON; fails the test if it cannot. json_decref it. */
json_t *load_json(const char *path);

/* All bytes of a file (".gz" is unpacked), NUL-terminated; fails the test if it cannot. free() it.
 */
char *load_file(const char *path, size_t *size);

/* Of all threads of this process, which begins at 0: what else runs on the machine does not count.
 */
double cpu_seconds(void);

/* Fails the test with the message if status is not LINNET_OK. */
#define assert_ok(status, err)                                                      \
    do {                                                                            \
        if ((status) != LINNET_OK) fail_msg("unexpected error: %s", (err).message); \
    } while (0)

/* SmolLM2-135M-Instruct Q4_1 where it is installed (see script/quickstart), else NULL. */
const char *smollm2_path(void);

#endif
