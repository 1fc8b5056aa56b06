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

/* ---- words of four bytes ---------------------------------------------------------------------
 *
 * In most layouts a row's bytes come in words that lie 16 words apart in the panel: so words of
 * rows are turned into rows of words, four by four. */

typedef uint32_t four __attribute__((vector_size(16)));

/* out[w][r] = word w of row r, for four of each. */
static inline void turn(const uint8_t *const rows[4], int64_t at, uint8_t *out)
{
    four a, b, c, d;
    memcpy(&a, rows[0] + at, 16);
    memcpy(&b, rows[1] + at, 16);
    memcpy(&c, rows[2] + at, 16);
    memcpy(&d, rows[3] + at, 16);
    four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5),
         cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    four ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7),
         cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    a = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    b = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    c = __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5);
    d = __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7);
    memcpy(out, &a, 16);
    memcpy(out + QUAD, &b, 16);
    memcpy(out + 2 * QUAD, &c, 16);
    memcpy(out + 3 * QUAD, &d, 16);
}

/* 4 n words of each row, from byte `at` on. */
static inline void turn_fours(const uint8_t *const rows[PANEL], int64_t at, int64_t n, uint8_t *out)
{
    for (int64_t i = 0; i < n; i++, at += 16, out += 4 * QUAD)
        for (int r = 0; r < PANEL; r += 4) turn(rows + r, at, out + 4 * r);
}

/* Whole rows of n words. */
static void turn_rows(const uint8_t *const rows[PANEL], int64_t n, uint8_t *out)
{
    turn_fours(rows, 0, n / 4, out);
    for (int64_t w = n / 4 * 4; w < n; w++)
        for (int r = 0; r < PANEL; r++) memcpy(out + w * QUAD + 4 * r, rows[r] + 4 * w, 4);
}

static inline void turn_halves(const uint8_t *const rows[PANEL], int64_t at, uint8_t *out)
{
    for (int r = 0; r < PANEL; r++) memcpy(out + 2 * r, rows[r] + at, 2);
}

/* ---- formats of blocks: one block of each row to a run of the panel ----------------------------
 */

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

static void put_q8_0(const uint8_t *const blocks[PANEL], uint8_t *run)
{
    turn_halves(blocks, 0, run);
    turn_fours(blocks, 2, 2, run + HALVES);
}

static void put_q4_0(const uint8_t *const blocks[PANEL], uint8_t *run)
{
    turn_halves(blocks, 0, run);
    turn_fours(blocks, 2, 1, run + HALVES);
}

static void put_q4_1(const uint8_t *const blocks[PANEL], uint8_t *run)
{
    turn_halves(blocks, 0, run);
    turn_halves(blocks, 2, run + HALVES);
    turn_fours(blocks, 4, 1, run + 2 * HALVES);
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
        uint8_t sixth[2][4] = {{0}};
        for (int j = 0; j < GROUP; j++) { /* column 4 i + k of a half to bits 2 i of byte k */
            int bits = b.high[g / 4 * 32 + j] >> 2 * (g % 4) & 3;
            sixth[j / 16][j % 4] |= (uint8_t)(bits << 2 * (j % 16 / 4));
        }
        for (int half = 0; half < 2; half++)
            memcpy(p + 2 * PANEL + NIBBLES + half * QUAD + 4 * r, sixth[half], 4);
    }
}

/* A block of one row. */
#define ROW_BY_ROW(format)                                                      \
    static void rows_##format(const uint8_t *const blocks[PANEL], uint8_t *run) \
    {                                                                           \
        for (int r = 0; r < PANEL; r++) put_##format(blocks[r], r, run);        \
    }
ROW_BY_ROW(q5_0)
ROW_BY_ROW(q5_1)
ROW_BY_ROW(q4_k)
ROW_BY_ROW(q5_k)
ROW_BY_ROW(q6_k)

/* ---- panels ------------------------------------------------------------------------------------
 */

static void pack_f16(const uint8_t *const rows[PANEL], int64_t columns, uint8_t *panel)
{
    enum { CHUNK = 32 }; /* columns whose part of the panel stays in the nearest cache */
    for (int64_t first = 0; first < columns; first += CHUNK)
        for (int r = 0; r < PANEL; r++)
            for (int64_t c = first; c < columns && c < first + CHUNK; c++)
                memcpy(panel + (c * PANEL + r) * 2, rows[r] + c * 2, 2);
}

static void pack_bf16(const uint8_t *const rows[PANEL], int64_t columns, uint8_t *panel)
{
    int64_t pairs = columns / 2;
    turn_rows(rows, pairs, panel);
    if (columns % 2 == 0) return;
    memset(panel + pairs * QUAD, 0, QUAD);
    for (int r = 0; r < PANEL; r++) memcpy(panel + pairs * QUAD + 4 * r, rows[r] + pairs * 4, 2);
}

static void pack_rows(enum dtype dtype, const uint8_t *const rows[PANEL], int64_t columns,
                      uint8_t *panel)
{
    static void (*const put[DTYPE_COUNT])(const uint8_t *const[PANEL], uint8_t *) = {
        [DTYPE_Q8_0] = put_q8_0,  [DTYPE_Q4_0] = put_q4_0,  [DTYPE_Q4_1] = put_q4_1,
        [DTYPE_Q5_0] = rows_q5_0, [DTYPE_Q5_1] = rows_q5_1, [DTYPE_Q4_K] = rows_q4_k,
        [DTYPE_Q5_K] = rows_q5_k, [DTYPE_Q6_K] = rows_q6_k};
    if (dtype == DTYPE_F32) turn_rows(rows, columns, panel);
    if (dtype == DTYPE_F16) pack_f16(rows, columns, panel);
    if (dtype == DTYPE_BF16) pack_bf16(rows, columns, panel);
    if (!put[dtype]) return;
    int64_t run_columns, run_bytes, block_bytes = dtype_block_bytes(dtype);
    run_of(pack_of(dtype), &run_columns, &run_bytes);
    const uint8_t *blocks[PANEL];
    for (int r = 0; r < PANEL; r++) blocks[r] = rows[r];
    for (int64_t run = 0; run < columns / run_columns; run++, panel += run_bytes) {
        put[dtype](blocks, panel);
        for (int r = 0; r < PANEL; r++) blocks[r] += block_bytes;
    }
}

void pack_panel(enum dtype dtype, const void *const rows[PANEL], int64_t columns, void *panel)
{
    const uint8_t *row[PANEL];
    for (int r = 0; r < PANEL; r++) row[r] = rows[r];
    pack_rows(dtype, row, columns, panel);
}
