/*
 * Any bytes as a file of packed weights: refused, or all that is handed out can be read. The input
 * is the header and what follows its page. Its mark and hash are put right, else hardly any input
 * would get past them; so is the table of a file with little data whose first byte is odd.
 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <stdlib.h>
#include <string.h>

#include "file/packed.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

enum { HEADER = 64, BYTES_AT = 32, TABLE_HASH_AT = 40, HASH_AT = 56, LAYOUT = 1 };

static void put_hash(uint8_t *at, const uint8_t *bytes, size_t n)
{
    uint64_t hash = XXH3_64bits(bytes, n);
    memcpy(at, &hash, sizeof hash);
}

static void put_table_right(uint8_t *file, uint8_t *behind, size_t n)
{
    uint64_t data;
    memcpy(&data, file + BYTES_AT, sizeof data);
    if (n < 8 || data > n - 8 || data > PACKED_CHUNK) return;
    put_hash(behind + data, behind, data);
    put_hash(file + TABLE_HASH_AT, behind + data, data ? 8 : 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static struct pool *pool;
    static const uint64_t source[2] = {0, 0};
    struct packed *packed;
    linnet_error err;
    if (size < HEADER || (!pool && pool_create(1, &pool, &err))) return 0;
    size_t behind = size - HEADER;
    uint8_t *file = calloc(PACKED_PAGE + behind, 1);
    if (!file) return 0;
    memcpy(file, bytes, HEADER);
    memcpy(file + PACKED_PAGE, bytes + HEADER, behind);
    if (bytes[0] & 1) put_table_right(file, file + PACKED_PAGE, behind);
    memcpy(file, "linnetPK", 8);
    put_hash(file + HASH_AT, file, HASH_AT);
    if (packed_open_memory(file, PACKED_PAGE + behind, "fuzz", source, LAYOUT, pool, &packed,
                           &err) == LINNET_OK) {
        void *place;
        bool filled;
        for (size_t n = 1; packed_next(packed, n, &place, &filled, &err) == LINNET_OK; n += 1000)
            for (size_t i = 0; i < n; i++) (void)((volatile uint8_t *)place)[i];
        packed_close(packed);
    }
    free(file);
    return 0;
}
