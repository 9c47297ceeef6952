/* AMX tiles for kernels on bf16: multiplying, and the orders in which tiles want their operands.
 *
 * A step multiplies 32 rows of A by 32 columns of B over 32 depths: tiles 0 to 3 are the sums (two
 * by two), 4 and 5 A, 6 and 7 B. The tiles flush subnormals, of operands and of sums. A tile of A
 * is 16 rows of 32 depths; one of B, "pairs", is 16 pairs of depths by 16 columns. */
#pragma once

#define MT_AMX  1
#define MT_ISA  avx512
#define MT_ELEM bf16
#include <immintrin.h>

#include "kernels/cpu/variant.h"

/* STEP: the edge of a step. TILE: elements of a tile of A or B. */
enum { STEP = 32, HALF = STEP / 2, TILE = HALF * STEP };

/* ---- tiles -------------------------------------------------------------------------------------
 */

/* The compilers' tile loads do not say that they read memory, nor ldtilecfg how much: stores before
 * this happen before it. */
MT_INLINE void visible(const void *p)
{
    __asm__ volatile("" ::"r"(p) : "memory");
}

/* Tiles for 1 to STEP rows of A: fewer rows take less time, and nothing past them is read. */
MT_INLINE void shape_tiles(int64_t rows)
{
    _Alignas(64) struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = { .palette = 1 };
    uint8_t upper = (uint8_t)mt_min(rows, HALF);
    uint8_t lower = (uint8_t)(rows > HALF ? rows - HALF : HALF);
    const uint8_t heights[8] = { upper, upper, lower, lower, upper, lower, HALF, HALF };
    for (int t = 0; t < 8; t++) config.bytes[t] = 64, config.rows[t] = heights[t];
    visible(&config);
    _tile_loadconfig(&config);
}

MT_INLINE void zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* `steps` steps. A's two tiles have rows `pitch` bytes apart and move by `stride` bytes; B's are
 * packed pairs. B streams, so that it does not push A's rows out of L1. */
MT_INLINE void multiply(const mt_elem *a0, const mt_elem *a1, int64_t pitch, int64_t stride,
                        const mt_elem *b0, const mt_elem *b1, int64_t steps, bool two)
{
    const char *p0 = (const char *)a0, *p1 = (const char *)a1;
    visible(p0);
    for (int64_t s = 0; s < steps; s++) {
        _tile_stream_loadd(6, b0 + s * TILE, 64);
        _tile_loadd(4, p0 + s * stride, pitch);
        _tile_stream_loadd(7, b1 + s * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two) _tile_loadd(5, p1 + s * stride, pitch);
        _tile_dpbf16ps(1, 4, 7);
        if (two) _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
    }
}

MT_INLINE void store_sums(float sums[4][HALF * HALF], bool two)
{
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (two) _tile_stored(2, sums[2], 64);
    if (two) _tile_stored(3, sums[3], 64);
    visible(sums);
}

/* ---- orders ------------------------------------------------------------------------------------
 */

/* Part of a step's operand, with zeros around it: `edge` [STEP, STEP]. */
static inline const mt_elem *copy_edge(mt_elem *edge, const mt_elem *from, int64_t ld,
                                       int64_t height, int64_t width)
{
    memset(edge, 0, STEP * STEP * sizeof *edge);
    for (int64_t i = 0; i < height; i++)
        memcpy(edge + i * STEP, from + i * ld, (size_t)width * sizeof *edge);
    return edge;
}

/* 4 x 4 32-bit units transposed in each 128-bit lane. */
MT_INLINE void transpose_lanes(__m512i r[4])
{
    __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c), r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d), r[3] = _mm512_unpackhi_epi64(b, d);
}

/* Lane l is the 16 bytes at p + l * pitch. */
MT_INLINE __m512i load_lanes(const mt_elem *p, int64_t pitch)
{
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128((const void *)(p + pitch)));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128((const void *)(p + 2 * pitch)));
    return _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_loadu_si128((const void *)(p + 3 * pitch)));
}

/* A tile of A: STEP lines of HALF columns become HALF rows of STEP depths. */
MT_INLINE void transpose_tile(mt_elem *to, const mt_elem *from, int64_t ld)
{
    for (int64_t h = 0; h < HALF; h += 8) {
        __m512i low[4], high[4];
        for (int64_t q = 0; q < 4; q++) {
            __m512i even = load_lanes(from + 2 * q * ld + h, 8 * ld);
            __m512i odd = load_lanes(from + (2 * q + 1) * ld + h, 8 * ld);
            low[q] = _mm512_unpacklo_epi16(even, odd), high[q] = _mm512_unpackhi_epi16(even, odd);
        }
        transpose_lanes(low);
        transpose_lanes(high);
        for (int64_t i = 0; i < 4; i++) {
            _mm512_store_si512(to + (h + i) * STEP, low[i]);
            _mm512_store_si512(to + (h + 4 + i) * STEP, high[i]);
        }
    }
}

static inline void transpose_step(mt_elem *to0, mt_elem *to1, const mt_elem *from, int64_t ld)
{
    transpose_tile(to0, from, ld);
    transpose_tile(to1, from + HALF, ld);
}

/* Two tiles of B: STEP lines of STEP columns, neighbouring lines interleaved. */
static inline void pair_step(mt_elem *to0, mt_elem *to1, const mt_elem *from, int64_t ld)
{
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int64_t q = 0; q < HALF; q++) {
        __m512i even = _mm512_loadu_si512(from + 2 * q * ld);
        __m512i odd = _mm512_loadu_si512(from + (2 * q + 1) * ld);
        even = _mm512_permutexvar_epi64(order, even), odd = _mm512_permutexvar_epi64(order, odd);
        _mm512_store_si512(to0 + q * STEP, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to1 + q * STEP, _mm512_unpackhi_epi16(even, odd));
    }
}

/* `lines` lines of `cols` elements, `ld` apart (a line is one depth), as pairs of panels of HALF
 * columns, each ceil(lines / STEP) tiles, zeros past the last line and column. */
static inline void pack_lines(mt_elem *to, const mt_elem *from, int64_t ld, mt_elem *edge,
                              int64_t lines, int64_t cols,
                              void (*step)(mt_elem *, mt_elem *, const mt_elem *, int64_t))
{
    int64_t steps = mt_ceil_div(lines, STEP);
    for (int64_t j = 0; j < cols; j += STEP, to += 2 * steps * TILE)
        for (int64_t q = 0; q < steps; q++) {
            const mt_elem *at = from + q * STEP * ld + j;
            int64_t height = mt_min(STEP, lines - q * STEP), width = mt_min(STEP, cols - j);
            bool whole = height == STEP && width == STEP;
            if (!whole) at = copy_edge(edge, at, ld, height, width);
            step(to + q * TILE, to + (steps + q) * TILE, at, whole ? ld : STEP);
        }
}
