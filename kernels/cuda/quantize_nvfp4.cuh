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

/* What a block knows of its member, in shared memory; behind elements, which begin at 128 bytes. */
struct nvfp4_tables {
    float enc[MT_DIR_COUNT][NIBBLE_SCALES]; /* of make_levels */
    level levels[MT_DIR_COUNT];
    strip strips[WARPS];  /* each warp's own */
    uint32_t most[WARPS]; /* what warps found of the member */
    int nans[WARPS];
};

/* make_levels of a block's member, and its amaxes so far; ones: of 4over6, or NULL. */
template <bool WIDE, typename SPACE>
static __device__ __forceinline__ void fill_tables(SPACE *sp, float *ones, strip *p, const job &j)
{
    const int lane = lane_of_warp();
    if (lane < MT_DIR_COUNT && j.measure[lane])
        p->seen[lane] = __ldcg((const uint32_t *)j.amax[lane] + p->index);
    make_levels<WIDE>(sp->enc, ones, sp->levels, j, p->index);
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

/* Rows of a strip, alone: each thread reads a segment as it lies while it works on the one before,
 * 32 rows above. make: a segment's codes and its scale, of its row in the strip, its elements,
 * their amax and whether there are NaNs. Rows that end half a segment on are words of 4 bytes. */
template <typename M>
static __device__ __forceinline__ void make_rows(const strip &p, found *it, M make)
{
    enum { STEP = TILE_THREADS / SEGMENTS };
    static_assert(STEP == 32, "lines_step");
    const part &to = p.parts[MT_ROW];
    const int at = (int)threadIdx.x % SEGMENTS, first = (int)threadIdx.x / SEGMENTS;
    const lattice scales = scales_of(to);
    const int64_t step = lines_step(scales), down = to.scales_down - (TILE / STEP - 1) * step;
    uint8_t *codes = to.codes + (uint64_t)(uint32_t)first * to.pitch + at * SEGMENT / 2;
    uint8_t *scale = scales.at + scale_offset(scales, first, at);
    const uint4 *from = (const uint4 *)(p.plain + (uint64_t)(uint32_t)first * p.cols) + at * 2;
    const int rows = at * SEGMENT < p.width ? p.rows : 0;
    const bool both = at * SEGMENT + SEGMENT <= p.width; /* halves */
    const bool whole = (((uintptr_t)to.codes | to.pitch) & 7) == 0;
    uint4 next[2];
    auto ask = [&](int row) {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        next[0] = row < rows ? __ldcs(from) : zero;
        next[1] = row < rows && both ? __ldcs(from + 1) : zero;
        from += (uint32_t)p.cols * (STEP / 8);
    };
    ask(first);
#pragma unroll 1
    for (int row = first; row < rows; row += STEP) {
        const uint32_t w[8] = { next[0].x, next[0].y, next[0].z, next[0].w,
                                next[1].x, next[1].y, next[1].z, next[1].w };
        uint32_t q[2];
        int nans = 0;
        ask(row + STEP);
        const uint32_t most = magnitude_of<8>(w, &nans);
        raise(&it->most[MT_ROW], most), it->nans += nans;
        store_1(scale, make(q, row, w, most, nans > 0));
        if (whole) {
            store_8(codes, q[0], q[1]);
        } else {
            store_4(codes, q[0]);
            if (both) store_4(codes + 4, q[1]);
        }
        codes += to.pitch * STEP, scale += row % TILE < TILE - STEP ? step : down;
    }
}
