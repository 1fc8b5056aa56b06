/* products.h - what products.c gives to the table of kernels.c, in each instruction set. */
#ifndef LINNET_OPS_CPU_PRODUCTS_H
#define LINNET_OPS_CPU_PRODUCTS_H

#include "ops/cpu/kernels.h"

#if defined(__AVX512BF16__)
enum { BF16_DOTS = true };
#else
enum { BF16_DOTS = false };
#endif

void KERNEL(activate)(enum activation form, const float *x, int64_t columns, void *out);
void KERNEL(product)(enum pack pack, const void *panels, int64_t n_panels, int64_t stride,
                     int64_t columns, const void *x, int64_t x_stride, int64_t n,
                     const struct output *out);

#endif
