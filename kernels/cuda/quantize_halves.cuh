/* Inside the ways of quantize that keep nvfp4's rows decoded: two lanes have a segment. */
#pragma once

#include "kernels/cuda/quantize_choose.cuh"
#include "kernels/cuda/quantize_decoded.cuh"
#include "kernels/cuda/quantize_patch.cuh"

/* Eight elements of each of two segments of a line, whose other halves lane ^ OTHER has, as what
 * their codes are times the segments' scales. bits: where they are drawn. */
template <int OTHER>
static __device__ __forceinline__ void decode_halves(uint4 y[2], const job &j, const uint4 x[2],
                                                     float g, const float *scale_enc,
                                                     const uint32_t (*bits)[4])
{
    enum { HALVES = 2 }; /* magnitudes of both are in a word */
    uint32_t w[HALVES][4], most[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        w[h][0] = x[h].x, w[h][1] = x[h].y, w[h][2] = x[h].z, w[h][3] = x[h].w;
        most[h] = magnitudes<4>(w[h]);
    }
    uint32_t both =
        larger_halves(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
    if (larger_halves(both, 0x7f807f80u) != 0x7f807f80u) { /* NaNs do not count, nor have signs */
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            uint32_t numbers[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                numbers[i] = without_nans(w[h][i]);
                w[h][i] = (w[h][i] & 0x7fff7fffu) | signs_of_numbers(w[h][i]);
            }
            most[h] = larger_half(magnitudes<4>(numbers));
        }
        both = most[0] | most[1] << 16;
    }
    both = larger_halves(both, __shfl_xor_sync(~0u, both, OTHER));
    const uint32_t stored = stored_pair(j, low_bf16(both) * g, high_bf16(both) * g);
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const uint32_t own = stored >> 8 * h & 0xff;
        const uint32_t scale = scale_twice(own), scales[2] = { scale, scale };
        const float by = scale_enc[own], enc[8] = { by, by, by, by, by, by, by, by };
        uint32_t v[4];
        nibble_values(v, magnitude_nibbles(w[h], enc, bits ? bits[h] : NULL), w[h], scales, false);
        y[h] = make_uint4(v[0], v[1], v[2], v[3]);
    }
}
