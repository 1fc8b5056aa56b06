/* peak.h - what a processor gives at most: the limits that a backend's speed is compared with. */
#ifndef LINNET_OPS_PEAK_H
#define LINNET_OPS_PEAK_H

#include <stdint.h>

struct pool;

enum arithmetic {
    ARITHMETIC_F32,  /* fp32 multiply-adds */
    ARITHMETIC_INT8, /* dot products of 8-bit integers, summed in 32 bits */
    ARITHMETIC_BF16, /* dot products of bf16, summed in fp32 */
    ARITHMETIC_COUNT
};

/*
 * Operations a second, a multiply-add being two, of all threads of the pool at once with every
 * operand in a register, in the widest form that the processor has. 0: it has no instruction for
 * that. Takes some 30 ms.
 */
double cpu_peak(struct pool *pool, enum arithmetic arithmetic);

enum { CACHE_LINE = 64, READ_UNIT = 4 * CACHE_LINE };

/* What is fastest differs: to leave it to the processor which lines it asks for early, to ask for
 * those some way ahead, or for the next ones, to be read once and not kept. */
enum reader { READ_PLAIN, READ_AHEAD, READ_NEXT, READERS };

/* Reads whole READ_UNITs in the widest loads that the processor has, and gives their sum, so that
 * no compiler leaves them out. */
uint64_t cpu_read(const void *data, int64_t bytes, enum reader reader);

#endif
