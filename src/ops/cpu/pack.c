/* pack.c - from the rows of a file to panels of 16 rows (layouts: kernels.h). */
#include <string.h>

#include "ops/cpu/kernels.h"

enum { NIBBLES = GROUP / 2 * PANEL, BYTES = GROUP * PANEL };

enum pack pack_of(enum dtype dtype)
{
    static const enum pack of[DTYPE_COUNT] = {
        [DTYPE_F32] = PACK_F32,   [DTYPE_F16] = PACK_F16,   [DTYPE_BF16] = PACK_BF16,
        [DTYPE_Q8_0] = PACK_Q8_0, [DTYPE_Q4_0] = PACK_Q4_0, [DTYPE_Q4_1] = PACK_Q4_1,
        [DTYPE_Q5_0] = PACK_Q8_0, [DTYPE_Q5_1] = PACK_Q5_1, [DTYPE_Q4_K] = PACK_Q4_K,
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
        [PACK_BF16] = {1, PANEL * 2},
        [PACK_Q8_0] = {GROUP, PANEL * 2 + BYTES},
        [PACK_Q5_1] = {GROUP, PANEL * 4 + BYTES},
        [PACK_Q4_0] = {GROUP, PANEL * 2 + NIBBLES},
        [PACK_Q4_1] = {GROUP, PANEL * 4 + NIBBLES},
        [PACK_Q4_K] = {GROUP * SUPER_GROUPS, PANEL * 4 + SUPER_GROUPS * (2 * PANEL + NIBBLES)},
        [PACK_Q5_K] = {GROUP * SUPER_GROUPS, PANEL * 4 + SUPER_GROUPS * (2 * PANEL + BYTES)},
        [PACK_Q6_K] = {GROUP * SUPER_GROUPS, PANEL * 2 + SUPER_GROUPS * (2 * PANEL + BYTES)}};
    *columns = runs[pack].columns;
    *bytes = runs[pack].bytes;
}

int64_t pack_panel_bytes(enum pack pack, int64_t columns)
{
    int64_t run_columns, run_bytes;
    run_of(pack, &run_columns, &run_bytes);
    return columns / run_columns * run_bytes;
}

static void put_f16(uint8_t *run, int r, uint16_t h)
{
    memcpy(run + 2 * r, &h, 2);
}

/* 32 four-bit values, 16 bytes as in the file (low half first), into row r of q[16][16]. */
static void put_nibbles(uint8_t *q, int r, const uint8_t file[16])
{
    for (int i = 0; i < 8; i++) {
        int a = file[2 * i], b = file[2 * i + 1];
        q[i * PANEL + r] = (uint8_t)((a & 15) | (b & 15) << 4);
        q[(i + 8) * PANEL + r] = (uint8_t)(a >> 4 | (b & 0xF0));
    }
}

static void put_q8_0(const void *block, int r, uint8_t *run)
{
    struct block_q8_0 b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    for (int j = 0; j < GROUP; j++) run[2 * PANEL + j * PANEL + r] = (uint8_t)b.q[j];
}

static void put_q4_0(const void *block, int r, uint8_t *run)
{
    struct block_q4_0 b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    put_nibbles(run + 2 * PANEL, r, b.q);
}

static void put_q4_1(const void *block, int r, uint8_t *run)
{
    struct block_q4_1 b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    put_f16(run + 2 * PANEL, r, b.m);
    put_nibbles(run + 4 * PANEL, r, b.q);
}

static void put_q5_0(const void *block, int r, uint8_t *run)
{
    struct block_q5_0 b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    for (int j = 0; j < GROUP; j++)
        run[2 * PANEL + j * PANEL + r] = (uint8_t)(q5_quant(b.q, b.high, j) - 16);
}

static void put_q5_1(const void *block, int r, uint8_t *run)
{
    struct block_q5_1 b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    put_f16(run + 2 * PANEL, r, b.m);
    for (int j = 0; j < GROUP; j++)
        run[4 * PANEL + j * PANEL + r] = (uint8_t)q5_quant(b.q, b.high, j);
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
    put_f16(run + 2 * PANEL, r, b.dmin);
    uint8_t *p = run + 4 * PANEL;
    for (int g = 0; g < SUPER_GROUPS; g++, p += 2 * PANEL + NIBBLES) {
        put_k_scales(b.scales, g, r, p);
        for (int i = 0; i < GROUP / 2; i++)
            p[2 * PANEL + i * PANEL + r] =
                (uint8_t)(q4_k_quant(&b, g, 2 * i) | q4_k_quant(&b, g, 2 * i + 1) << 4);
    }
}

static void put_q5_k(const void *block, int r, uint8_t *run)
{
    struct block_q5_k b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    put_f16(run + 2 * PANEL, r, b.dmin);
    uint8_t *p = run + 4 * PANEL;
    for (int g = 0; g < SUPER_GROUPS; g++, p += 2 * PANEL + BYTES) {
        put_k_scales(b.scales, g, r, p);
        for (int j = 0; j < GROUP; j++)
            p[2 * PANEL + j * PANEL + r] = (uint8_t)q5_k_quant(&b, g, j);
    }
}

static void put_q6_k(const void *block, int r, uint8_t *run)
{
    struct block_q6_k b;
    memcpy(&b, block, sizeof b);
    put_f16(run, r, b.d);
    uint8_t *p = run + 2 * PANEL;
    for (int g = 0; g < SUPER_GROUPS; g++, p += 2 * PANEL + BYTES) {
        p[r] = (uint8_t)b.scales[2 * g];
        p[PANEL + r] = (uint8_t)b.scales[2 * g + 1];
        for (int j = 0; j < GROUP; j++)
            p[2 * PANEL + j * PANEL + r] = (uint8_t)q6_k_quant(&b, g, j);
    }
}

static void pack_plain(const void *const rows[PANEL], int64_t columns, int size, uint8_t *panel)
{
    for (int r = 0; r < PANEL; r++) {
        const uint8_t *row = rows[r];
        if (!row) continue;
        if (size == 4)
            for (int64_t c = 0; c < columns; c++)
                memcpy(panel + (c * PANEL + r) * 4, row + c * 4, 4);
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
        pack_plain(rows, columns, (int)dtype_block_bytes(dtype), panel);
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
