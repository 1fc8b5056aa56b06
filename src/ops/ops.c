#include "ops/ops.h"

int64_t matrix_source_row(int64_t r, int32_t interleaved)
{
    if (interleaved <= 0) return r;
    int64_t head = r / interleaved, in_head = r % interleaved, half = interleaved / 2;
    int64_t row = in_head < half ? 2 * in_head : 2 * (in_head - half) + 1;
    return head * interleaved + row;
}
