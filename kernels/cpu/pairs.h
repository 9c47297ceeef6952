/* Kernels on bf16 that multiply pairs of depths, and the orders in which these want their operands.
 * A file that includes this is compiled once for each way to do so, MT_PAIRS: amx (amx.h, AMX
 * tiles) or dots (dots.h, AVX-512's dot products of pairs), beside the bf16 variant of avx512.
 *
 * A step multiplies 32 rows of A by 32 columns of B over 32 depths. Both ways flush subnormals, of
 * operands and of sums. A tile of A is 16 rows of 32 depths; one of B, "pairs", is 16 pairs of
 * depths by 16 columns. */
#pragma once

#define MT_ISA  avx512
#define MT_ELEM bf16
#include <immintrin.h>

#include "kernels/cpu/vecmath.h"

#define MT_PAIRS_CPU(name) MT_CAT(name, MT_PAIRS, MT_ELEM)
#define MT_PAIRS_amx       1
#define MT_PAIRS_dots      2

/* STEP: the edge of a step. TILE: elements of a tile of A or B. */
enum { STEP = 32, HALF = STEP / 2, TILE = HALF * STEP };

/* Operands of some steps. A's rows are `pitch` elements apart, its steps `stride`; B's steps are
 * tiles behind each other, those of its other 16 columns `apart` elements after. */
struct steps {
    const mt_elem *a, *b;
    int64_t pitch, stride, apart, count;
};

#if MT_GLUE(MT_PAIRS_, MT_PAIRS) == MT_PAIRS_amx
#include "kernels/cpu/amx.h"
#elif MT_GLUE(MT_PAIRS_, MT_PAIRS) == MT_PAIRS_dots
#include "kernels/cpu/dots.h"
#endif

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

/* `lines` lines of `cols` elements, `ld` apart (a line is one depth), by `order` to panels of STEP
 * columns with ceil(lines / STEP) steps, zeros past the last line and column: of each step two
 * tiles, `apart` elements from each other. */
typedef void step_order(mt_elem *, mt_elem *, const mt_elem *, int64_t);
MT_INLINE void pack_lines(mt_elem *to, const mt_elem *from, int64_t ld, mt_elem *edge,
                          int64_t lines, int64_t cols, int64_t apart, step_order *order)
{
    int64_t steps = mt_ceil_div(lines, STEP), each = apart == TILE ? 2 * TILE : TILE;
    for (int64_t j = 0; j < cols; j += STEP, to += 2 * steps * TILE)
        for (int64_t q = 0; q < steps; q++) {
            const mt_elem *at = from + q * STEP * ld + j;
            int64_t height = mt_min(STEP, lines - q * STEP), width = mt_min(STEP, cols - j);
            bool whole = height == STEP && width == STEP;
            if (!whole) at = copy_edge(edge, at, ld, height, width);
            order(to + q * each, to + q * each + apart, at, whole ? ld : STEP);
        }
}
