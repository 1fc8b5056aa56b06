/* pack.c - from the rows of a file to panels of 16 rows (layouts: kernels.h). */
#include <string.h>

#include "ops/cpu/kernels.h"

enum pack pack_of(enum dtype dtype)
{
    static const enum pack of[DTYPE_COUNT] = {
        [DTYPE_F32] = PACK_F32,   [DTYPE_F16] = PACK_F16,   [DTYPE_BF16] = PACK_BF16,
        [DTYPE_Q8_0] = PACK_Q8_0, [DTYPE_Q4_0] = PACK_Q4_0, [DTYPE_Q4_1] = PACK_Q4_1,
        [DTYPE_Q5_0] = PACK_Q5_0, [DTYPE_Q5_1] = PACK_Q5_1, [DTYPE_Q4_K] = PACK_Q4_K,
        [DTYPE_Q5_K] = PACK_Q5_K, [DTYPE_Q6_K] = PACK_Q6_K};
    return of[dtype];
}

/* Columns that a run of the layout covers, and its bytes. */
static void run_of(enum pack pack, int64_t *columns, int64_t *bytes)
{
    static const struct {
        int columns, bytes;
    } runs[] = {
        [PACK_F32] = {1, PANEL * 4},
        [PACK_F16] = {1, PANEL * 2},
        [PACK_BF16] = {2, PANEL * 4},
        [PACK_Q8_0] = {GROUP, HALVES + 2 * NIBBLES},
        [PACK_Q4_0] = {GROUP, HALVES + NIBBLES},
        [PACK_Q4_1] = {GROUP, 2 * HALVES + NIBBLES},
        [PACK_Q5_0] = {GROUP, HALVES + NIBBLES + QUAD},
        [PACK_Q5_1] = {GROUP, 2 * HALVES + NIBBLES + QUAD},
        [PACK_Q4_K] = {GROUP * SUPER_GROUPS, 2 * HALVES + SUPER_GROUPS * (2 * PANEL + NIBBLES)},
        [PACK_Q5_K] = {GROUP * SUPER_GROUPS,
                       2 * HALVES + SUPER_GROUPS * (2 * PANEL + NIBBLES + QUAD)},
        [PACK_Q6_K] = {GROUP * SUPER_GROUPS,
                       HALVES + SUPER_GROUPS * (2 * PANEL + NIBBLES + 2 * QUAD)}};
    *columns = runs[pack].columns;
    *bytes = runs[pack].bytes;
}

int64_t pack_panel_bytes(enum pack pack, int64_t columns)
{
    int64_t run_columns, run_bytes;
    run_of(pack, &run_columns, &run_bytes);
    return (columns + run_columns - 1) / run_columns * run_bytes;
}

static void put_f16(uint8_t *run, int r, uint16_t h)
{
    memcpy(run + 2 * r, &h, 2);
}

/* 32 quants, byte i holding columns i (low half) and 16 + i: the files' order of Q4 and Q5 blocks,
 * and the panel's. */
static void put_nibbles(uint8_t *nibbles, int r, const uint8_t file[16])
{
    for (int i = 0; i < 4; i++) memcpy(nibbles + i * QUAD + 4 * r, file + 4 * i, 4);
}

/* Two K-quant groups' bytes, of which this one has the low or the high halves, to 16 bytes. */
static void gather_nibbles(const uint8_t file[32], bool high, uint8_t out[16])
{
    for (int i = 0; i < 16; i++)
        out[i] = high ? (uint8_t)(file[i] >> 4 | (file[16 + i] & 0xF0))
                      : (uint8_t)((file[i] & 15) | file[16 + i] << 4);
}

/* Bit j of `high` is the fifth bit of column j. */
static void put_fifth(uint8_t *fifth, int r, uint32_t high)
{
    for (int k = 0; k < 4; k++) {
        uint8_t bits = 0;
        for (int i = 0; i < 8; i++) bits |= (uint8_t)((high >> (4 * i + k) & 1) << i);
        fifth[4 * r + k] = bits;
    }
}

static void put_q8_0(const void *block, int r, uint8_t *run)
{
    const uint8_t *b = block;
    memcpy(run + 2 * r, b, 2);
    for (int i = 0; i < 8; i++) memcpy(run + HALVES + i * QUAD + 4 * r, b + 2 + 4 * i, 4);
}

static void put_q4_0(const void *block, int r, uint8_t *run)
{
    const uint8_t *b = block;
    memcpy(run + 2 * r, b, 2);
    put_nibbles(run + HALVES, r, b + 2);
}

static void put_q4_1(const void *block, int r, uint8_t *run)
{
    const uint8_t *b = block;
    memcpy(run + 2 * r, b, 2);
    memcpy(run + HALVES + 2 * r, b + 2, 2);
    put_nibbles(run + 2 * HALVES, r, b + 4);
}

static void put_q5(const uint8_t high[4], const uint8_t q[16], int r, uint8_t *quants)
{
    put_nibbles(quants, r, q);
    put_fifth(quants + NIBBLES, r,
              (uint32_t)high[0] | (uint32_t)high[1] << 8 | (uint32_t)high[2] << 16 |
                  (uint32_t)high[3] << 24);
}

static void put_q5_0(const void *block, int r, uint8_t *run)
{
    struct block_q5_0 b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    put_q5(b.high, b.q, r, run + HALVES);
}

static void put_q5_1(const void *block, int r, uint8_t *run)
{
    struct block_q5_1 b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    put_f16(run + HALVES, r, b.m);
    put_q5(b.high, b.q, r, run + 2 * HALVES);
}

static void put_k_scales(const uint8_t scales[12], int group, int r, uint8_t *run)
{
    int scale, min;
    dtype_k_scales(scales, group, &scale, &min);
    run[r] = (uint8_t)scale;
    run[PANEL + r] = (uint8_t)min;
}

static void put_q4_k(const void *block, int r, uint8_t *run)
{
    struct block_q4_k b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    put_f16(run + HALVES, r, b.dmin);
    uint8_t *p = run + 2 * HALVES, nibbles[16];
    for (int g = 0; g < SUPER_GROUPS; g++, p += 2 * PANEL + NIBBLES) {
        put_k_scales(b.scales, g, r, p);
        gather_nibbles(b.q + g / 2 * 32, g % 2, nibbles);
        put_nibbles(p + 2 * PANEL, r, nibbles);
    }
}

static void put_q5_k(const void *block, int r, uint8_t *run)
{
    struct block_q5_k b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    put_f16(run + HALVES, r, b.dmin);
    uint8_t *p = run + 2 * HALVES, nibbles[16];
    for (int g = 0; g < SUPER_GROUPS; g++, p += 2 * PANEL + NIBBLES + QUAD) {
        uint32_t high = 0;
        for (int j = 0; j < GROUP; j++) high |= (uint32_t)(b.high[j] >> g & 1) << j;
        put_k_scales(b.scales, g, r, p);
        gather_nibbles(b.q + g / 2 * 32, g % 2, nibbles);
        put_nibbles(p + 2 * PANEL, r, nibbles);
        put_fifth(p + 2 * PANEL + NIBBLES, r, high);
    }
}

static void put_q6_k(const void *block, int r, uint8_t *run)
{
    struct block_q6_k b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    uint8_t *p = run + HALVES, nibbles[16];
    for (int g = 0; g < SUPER_GROUPS; g++, p += 2 * PANEL + NIBBLES + 2 * QUAD) {
        p[r] = (uint8_t)b.scales[2 * g];
        p[PANEL + r] = (uint8_t)b.scales[2 * g + 1];
        gather_nibbles(b.low + g / 4 * 64 + g % 2 * 32, g % 4 >= 2, nibbles);
        put_nibbles(p + 2 * PANEL, r, nibbles);
        uint8_t *sixth = p + 2 * PANEL + NIBBLES + 4 * r;
        for (int j = 0; j < GROUP; j++) { /* column 4 i + k of a half to bits 2 i of byte k */
            int bits = b.high[g / 4 * 32 + j] >> 2 * (g % 4) & 3;
            sixth[j / 16 * QUAD + j % 4] |= (uint8_t)(bits << 2 * (j % 16 / 4));
        }
    }
}

static void pack_plain(const void *const rows[PANEL], int64_t columns, int size, bool pairs,
                       uint8_t *panel)
{
    for (int r = 0; r < PANEL; r++) {
        const uint8_t *row = rows[r];
        if (!row) continue;
        if (size == 4)
            for (int64_t c = 0; c < columns; c++)
                memcpy(panel + (c * PANEL + r) * 4, row + c * 4, 4);
        else if (pairs)
            for (int64_t c = 0; c < columns; c += 2)
                memcpy(panel + (c * PANEL + 2 * r) * 2, row + c * 2, c + 1 < columns ? 4 : 2);
        else
            for (int64_t c = 0; c < columns; c++)
                memcpy(panel + (c * PANEL + r) * 2, row + c * 2, 2);
    }
}

void pack_panel(enum dtype dtype, const void *const rows[PANEL], int64_t columns, void *panel)
{
    static void (*const put[DTYPE_COUNT])(const void *, int, uint8_t *) = {
        [DTYPE_Q8_0] = put_q8_0, [DTYPE_Q4_0] = put_q4_0, [DTYPE_Q4_1] = put_q4_1,
        [DTYPE_Q5_0] = put_q5_0, [DTYPE_Q5_1] = put_q5_1, [DTYPE_Q4_K] = put_q4_k,
        [DTYPE_Q5_K] = put_q5_k, [DTYPE_Q6_K] = put_q6_k};
    enum pack pack = pack_of(dtype);
    memset(panel, 0, (size_t)pack_panel_bytes(pack, columns));
    if (!put[dtype]) {
        pack_plain(rows, columns, (int)dtype_block_bytes(dtype), pack == PACK_BF16, panel);
        return;
    }
    int64_t run_columns, run_bytes, block_bytes = dtype_block_bytes(dtype);
    run_of(pack, &run_columns, &run_bytes);
    for (int64_t run = 0; run < columns / run_columns; run++)
        for (int r = 0; r < PANEL; r++)
            if (rows[r])
                put[dtype]((const uint8_t *)rows[r] + run * block_bytes, r,
                           (uint8_t *)panel + run * run_bytes);
}
