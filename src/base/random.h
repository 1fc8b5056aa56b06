/*
 * random.h - counter-based random numbers: a pure function of (seed, counter), no state, so a
 * sampled token depends on nothing but its request's seed and its position.
 * Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3").
 */
#ifndef LINNET_BASE_RANDOM_H
#define LINNET_BASE_RANDOM_H

#include <stdint.h>

#include "base/host_device.h"

/* 64 random bits for (seed, counter, stream). */
HOST_DEVICE uint64_t random_u64(uint64_t seed, uint64_t counter, uint64_t stream)
{
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0, c1 = (uint32_t)p1, c2 = n2, c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return (uint64_t)c1 << 32 | c0;
}

/* Uniform in [0, 1), 53 bits. */
HOST_DEVICE double random_uniform(uint64_t seed, uint64_t counter, uint64_t stream)
{
    return (double)(random_u64(seed, counter, stream) >> 11) * 0x1p-53;
}

#endif
