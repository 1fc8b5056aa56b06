/*
 * plain.h - the small operations that the goldens name, one row at a time, in the plainest C:
 * the reference for every backend. Sums run in double, so that what they give is the formula's
 * value and not an order's.
 */
#ifndef LINNET_OPS_CPU_PLAIN_H
#define LINNET_OPS_CPU_PLAIN_H

#include <stdint.h>

/* out[n] = x / sqrt(mean(x^2) + eps) * weight. Zhang and Sennrich 2019; as in HF: fp32 throughout.
 */
void plain_rmsnorm(const float *x, const float *weight, int32_t n, float eps, float *out);

/* out[rows] = w [rows, columns] x[columns] */
void plain_matvec(const float *w, const float *x, int64_t rows, int64_t columns, float *out);

/* Turns dimensions (j, j + head_dim / 2) of x[head_dim] by row: cos[head_dim / 2], sin[...]. */
void plain_rope(float *x, const float *row, int32_t head_dim);

/* out[n] = silu(gate) * up, silu(g) = g / (1 + exp(-g)) */
void plain_silu_mul(const float *gate, const float *up, int32_t n, float *out);

#endif
