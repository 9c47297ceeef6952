/* Rotations of columns (rht). */
#pragma once

#include "kernels/cuda/quantize_tile.cuh"

/* Sixteen tokens of a column rotated (rht), before they are rounded to bf16. */
static __device__ __forceinline__ void rotate(float y[SEGMENT], const float x[SEGMENT],
                                              uint32_t mask)
{
    float v[SEGMENT];
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) v[i] = x[i] * (mask >> i & 1 ? -0.25f : 0.25f);
#pragma unroll
    for (int k = 0; k < SEGMENT; k++) {
        y[k] = 0;
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) {
            bool minus = ((i & k) ^ (i & k) >> 1 ^ (i & k) >> 2 ^ (i & k) >> 3) & 1;
            y[k] = minus ? y[k] - v[i] : y[k] + v[i];
        }
    }
}

/* x = x rotated along the tokens in sixteens, all rounded to bf16 (rht). */
static __device__ void rotate_tile(float *x, const tile &t, uint32_t mask)
{
    MT_SEGMENTS(segment, t.cols)
    {
        int c = segment / SEGMENTS, at = segment % SEGMENTS;
        float v[SEGMENT], y[SEGMENT];
        get_segment<MT_COL>(v, x, c, at);
        if (at * SEGMENT + SEGMENT <= t.rows) {
            rotate(y, v, mask);
        } else {
#pragma unroll
            for (int i = 0; i < SEGMENT; i++) y[i] = v[i];
        }
#pragma unroll
        for (int i = 0; i < SEGMENT; i++) y[i] = mt_rounded<mt_bf16>(y[i]);
        put_segment<MT_COL>(x, y, c, at);
    }
}
