/* Inside the ways of quantize to nvfp4 by strips. */
#pragma once

#include "kernels/cuda/quantize_choose.cuh"
#include "kernels/cuda/quantize_ring.cuh"
#include "kernels/cuda/quantize_strips.cuh"

/* What follows from a member's amax. */
static __device__ __forceinline__ level nvfp4_level(const side &s, float amax)
{
    level l = { amax, 1.0f, 1.0f, 0, 0, 0 };
    l.s_enc = mt_nvfp4_encode_scale(&s.options, amax);
    l.g = l.s_enc * (1.0f / 6.0f);
    l.s_dec = 1.0f / l.s_enc;
    return l;
}

/* make_scales, and the member's levels; a thread has a scale of a direction. */
template <bool WIDE>
static __device__ __forceinline__ void make_levels(float enc[MT_DIR_COUNT][NIBBLE_SCALES],
                                                   float *ones, level levels[MT_DIR_COUNT],
                                                   const job &j, int member)
{
    const int dir = (int)(threadIdx.x / NIBBLE_SCALES);
    const side &s = j.p.sides[dir];
    if (!s.present) return;
    const level l = nvfp4_level(s, j.amax[dir][member]);
    make_scale<WIDE>(enc, ones, j, s, l);
    if (threadIdx.x % NIBBLE_SCALES == 0) levels[dir] = l;
}

/* Whether lines of columns begin and end at multiples of 16 bytes. */
static __device__ __forceinline__ bool has_even_nibbles(const strip &p)
{
    const part &to = p.parts[MT_COL];
    return to.aligned && (to.padded || p.height % 32 == 0);
}

/* What tiles leave to each other; left: rows of the strip below this one. */
static __device__ __forceinline__ uneven uneven_of(const strip &p, const uint32_t *codes, int half,
                                                   int left)
{
    const bool first = left + TILE >= p.rows, aligned = p.parts[MT_COL].aligned;
    return uneven{ codes, half, !first && !aligned, left > 0 && !has_even_nibbles(p) };
}

/* Turned codes and their scales to where they go. */
static __device__ __forceinline__ void put_columns(const uint8_t *scales, const strip &p,
                                                   const uneven &u)
{
    const part &to = p.parts[MT_COL];
    const int bytes = ((to.padded ? (int)TILE : p.height) + 1) / 2;
    if (has_even_nibbles(p))
        put_even_lines(u.codes, u.half, to.codes, to.pitch, p.width, bytes);
    else
        put_uneven_lines(u, to.codes, to.pitch, p.width, bytes);
    const int block = (int)(threadIdx.x % SEGMENTS), line = (int)(threadIdx.x / SEGMENTS);
    if (block * SEGMENT >= p.height) return;
    static_assert(TILE_THREADS == 32 * SEGMENTS, "a turn is 32 lines");
    const lattice l = scales_of(to);
    const int64_t step = lines_step(l);
    uint8_t *at = l.at + scale_offset(l, line, block);
#pragma unroll
    for (int i = 0; i < TILE; i += 32, at += step)
        if (line + i < p.width) store_1(at, scales[threadIdx.x + i * SEGMENTS]);
}
