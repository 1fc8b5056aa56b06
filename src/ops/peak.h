/* peak.h - what the processor's arithmetic gives at most: the other limit beside the bandwidth. */
#ifndef LINNET_OPS_PEAK_H
#define LINNET_OPS_PEAK_H

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

#endif
