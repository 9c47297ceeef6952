/* Sums over the rows of a matrix, the same for any number of threads: the rows are cut into blocks
 * whose size depends on their number alone, each block is summed by itself into a row of partials,
 * and the partials are added in order. */
#pragma once

#include "kernels/cpu/variant.h"

/* At most 256 blocks, of 16 rows or more. */
MT_INLINE int64_t mt_row_block(int64_t rows)
{
    int64_t block = mt_ceil_div(rows, 256);
    return block < 16 ? 16 : block;
}

/* out[c] = (accumulate ? out[c] : 0) + sum of partials[b][c] over the blocks in order; partials
 * [blocks, stride], destroyed. */
MT_INLINE void mt_add_partials(mt_real *out, bool accumulate, mt_real *partials, int64_t blocks,
                               int64_t stride, int64_t width)
{
    for (int64_t b = 1; b < blocks; b++) {
        const mt_real *row = partials + b * stride;
#pragma omp simd
        for (int64_t c = 0; c < width; c++) partials[c] += row[c];
    }
    for (int64_t c = 0; c < width; c++)
        out[c] = (accumulate ? out[c] : 0) + (blocks ? partials[c] : 0);
}
