/*
 * rows.h - where a kernel stands in several rows that it goes along together, `stride` bytes apart.
 * There are fewer registers for addresses than a wide tile has rows: a pointer to each SHARE.
 */
#ifndef LINNET_OPS_CPU_ROWS_H
#define LINNET_OPS_CPU_ROWS_H

#include "ops/cpu/vector.h"

enum { MOST_ROWS = 12, SHARE = LANES == 16 ? 3 : 1 };

struct rows {
    const char *first[(MOST_ROWS + SHARE - 1) / SHARE];
    int64_t stride;
};

INLINE struct rows rows_of(int n, const void *row, int64_t stride)
{
    struct rows r = {.stride = stride};
    for (int i = 0; i < n; i += SHARE) r.first[i / SHARE] = (const char *)row + i * stride;
    return r;
}

/* Compilers are not to see where the next ones are: they would keep a pointer for each row, and
 * spill sums instead. */
INLINE void next_rows(int n, struct rows *r, int64_t distance)
{
    for (int i = 0; i < n; i += SHARE) {
        r->first[i / SHARE] += distance;
        __asm__("" : "+r"(r->first[i / SHARE]));
    }
}

INLINE const char *row_of(const struct rows *r, int i)
{
    return r->first[i / SHARE] + i % SHARE * r->stride;
}

#endif
