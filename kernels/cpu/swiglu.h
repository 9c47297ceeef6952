/* SwiGLU of a row, and its gradient: for whole matrices, and for what a product has just left in a
 * cache. */
#pragma once

#include "kernels/cpu/vecmath.h"

/* y = silu(gate) up */
MT_INLINE void swiglu_row(mt_elem *y, const mt_elem *gate, const mt_elem *up, int64_t width)
{
#pragma omp simd
    for (int64_t f = 0; f < width; f++) {
        mt_real g = mt_get(gate + f);
        mt_put(y + f, g / (1 + mt_exp(-g)) * mt_get(up + f));
    }
}

/* dy may be dgate or dup. */
MT_INLINE void swiglu_row_bwd(mt_elem *dgate, mt_elem *dup, const mt_elem *dy, const mt_elem *gate,
                              const mt_elem *up, int64_t width)
{
#pragma omp simd
    for (int64_t f = 0; f < width; f++) {
        mt_real g = mt_get(gate + f), d = mt_get(dy + f), s = 1 / (1 + mt_exp(-g));
        mt_put(dgate + f, d * mt_get(up + f) * (s * (1 + g * (1 - s))));
        mt_put(dup + f, d * (g * s));
    }
}
