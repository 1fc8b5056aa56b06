/*
 * choice.h - the arithmetic of choosing a token, in one text for the CPU and for devices, so that
 * both come to the same token always: engine/sampler.h has the rule, docs/numerics.md the reasons.
 *
 * A weight is an integer, 2^44 for the maximum, so that sums of weights are the same in every
 * order. What is not an integer (adjusted logits, exponents) is a few double operations on one
 * value, each rounded: compile with -ffp-contract=off, or -fmad=false.
 */
#ifndef LINNET_OPS_CHOICE_H
#define LINNET_OPS_CHOICE_H

#include <math.h>
#include <string.h>

#include "base/host_device.h"
#include "base/random.h"
#include "ops/ops.h"

enum {
    CHOICE_WEIGHT_BITS = 44,
    CHOICE_MAX_VOCAB = 1 << 19, /* so that no sum of weights passes 2^63 */
    CHOICE_LEAST_EXPONENT = -32 /* e^-32 2^44 is nearer to 0 than to 1 */
};

/* The logit after bias, penalties and bans. Never NaN or +infinity if the logit is not. */
HOST_DEVICE double choice_adjusted(const struct choice_rule *rule, const struct adjustment *a,
                                   float logit)
{
    if (a->banned) return -INFINITY;
    double x = (double)logit + a->bias, repetition = rule->repetition_penalty;
    if (a->seen) x = x > 0 ? x / repetition : x * repetition;
    if (a->count > 0) x -= (double)rule->frequency_penalty * a->count + rule->presence_penalty;
    return x;
}

HOST_DEVICE double choice_scale(const struct choice_rule *rule)
{
    return 1.0 / rule->temperature;
}

/* In [CHOICE_LEAST_EXPONENT, 0] for x <= max, which is finite; never lower for a higher x. */
HOST_DEVICE double choice_exponent(double x, double max, double scale)
{
    double y = (x - max) * scale;
    return y > CHOICE_LEAST_EXPONENT ? y : CHOICE_LEAST_EXPONENT;
}

/*
 * round(e^y 2^44) for an exponent y, halves to even: 2^44 for 0, 0 for CHOICE_LEAST_EXPONENT. The
 * exponential is the same everywhere: y = k ln 2 + r, |r| <= ln 2 / 2, Taylor to r^7 (relative
 * error below 8e-9). No branch, so that compilers vectorise it.
 */
HOST_DEVICE uint64_t choice_weight(double exponent)
{
    const double to_integer = 0x1.8p52; /* adding it leaves round(y / ln 2) in the low bits */
    double shifted = exponent * 0x1.71547652b82fep+0 + to_integer;
    double r = exponent - (shifted - to_integer) * 0x1.62e42fefa39efp-1;
    double e = 1.0 / 5040;
    e = e * r + 1.0 / 720;
    e = e * r + 1.0 / 120;
    e = e * r + 1.0 / 24;
    e = e * r + 1.0 / 6;
    e = e * r + 0.5;
    e = e * r + 1;
    e = e * r + 1;
    uint64_t k, bits;
    memcpy(&k, &shifted, 8);
    memcpy(&bits, &e, 8);
    bits += (k + CHOICE_WEIGHT_BITS) << 52;
    memcpy(&e, &bits, 8);
    e += 0x1p52; /* leaves the integer in the low bits */
    memcpy(&bits, &e, 8);
    return bits & (((uint64_t)1 << 52) - 1);
}

/* The high half of the 128 bits of a b. */
HOST_DEVICE uint64_t choice_multiply_high(uint64_t a, uint64_t b)
{
#ifdef __CUDA_ARCH__
    return __umul64hi(a, b);
#else
    return (uint64_t)((unsigned __int128)a * b >> 64);
#endif
}

/*
 * The mass that top_p < 1 wants of a total: their product rounded up, at least 1. top_p counts as
 * the 64-bit binary fraction that it is, bits below 2^-64 dropped; nothing else is rounded.
 */
HOST_DEVICE uint64_t choice_need(float top_p, uint64_t total)
{
    uint64_t fraction = top_p > 0 ? (uint64_t)(top_p * 0x1p64) : 0;
    uint64_t need = choice_multiply_high(fraction, total) + (fraction * total != 0);
    return need > 0 ? need : 1;
}

/* The least weight that min_p keeps: min_p 2^44 rounded up, never above the maximum's. */
HOST_DEVICE uint64_t choice_least(float min_p)
{
    if (!(min_p > 0)) return 0;
    return (uint64_t)ceil((min_p < 1 ? (double)min_p : 1.0) * 0x1p44);
}

/* Which unit of the total is drawn: in [0, total), by the random number's 64 bits. */
HOST_DEVICE uint64_t choice_draw(const struct choice_rule *rule, uint64_t total)
{
    return choice_multiply_high(random_u64(rule->seed, rule->position, rule->stream), total);
}

#endif
