/* seed.h - what nobody outside can foretell. */
#ifndef LINNET_BASE_SEED_H
#define LINNET_BASE_SEED_H

#include <stdint.h>

/* For a hash table whose keys come from a file. Where the system has no random bytes to give, the
 * time: at least not the same in every process. */
uint64_t seed_for_hashing(void);

#endif
