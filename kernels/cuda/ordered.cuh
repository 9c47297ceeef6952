/* Sums whose contract fixes their order. */
#pragma once

#include "kernels/cuda/element.cuh"

/* x[0] + x[1] + ... in f64, one after another, by one warp; every lane gets it. The chain of
 * additions is what takes the time: a warp loads ahead of it. */
template <typename R>
static __device__ __forceinline__ double mt_ordered_sum(const R *x, int64_t count)
{
    enum { AHEAD = 8, STEP = 32 * AHEAD };
    int lane = threadIdx.x % 32;
    double sum = 0;
    R next[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) next[i] = i * 32 + lane < count ? x[i * 32 + lane] : R(0);
    for (int64_t from = 0; from < count; from += STEP) {
        R now[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int64_t at = from + STEP + i * 32 + lane;
            now[i] = next[i];
            next[i] = at < count ? x[at] : R(0); /* to add 0 changes nothing */
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int j = 0; j < 32; j++) sum += (double)__shfl_sync(~0u, now[i], j);
    }
    return sum;
}
