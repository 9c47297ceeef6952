/* Steps of pairs (pairs.h) on AMX tiles: 0 to 3 are the sums, two by two, 4 and 5 A, 6 and 7 B. */
#pragma once

#include "kernels/cpu/pairs.h"

/* The compilers' tile loads do not say that they read memory, nor ldtilecfg how much: stores before
 * this happen before it. */
MT_INLINE void visible(const void *p)
{
    __asm__ volatile("" ::"r"(p) : "memory");
}

/* Tiles for 1 to STEP rows of A: fewer rows take less time, and nothing past them is read. */
MT_INLINE void begin_steps(int64_t rows)
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

MT_INLINE void end_steps(void)
{
    _tile_release();
}

MT_INLINE void zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

MT_INLINE void load_sums(const float *sums, int64_t ld, bool two)
{
    visible(sums);
    _tile_loadd(0, sums, ld * 4);
    _tile_loadd(1, sums + HALF, ld * 4);
    if (two) _tile_loadd(2, sums + HALF * ld, ld * 4);
    if (two) _tile_loadd(3, sums + HALF * ld + HALF, ld * 4);
}

MT_INLINE void store_sums(float *sums, int64_t ld, bool two)
{
    _tile_stored(0, sums, ld * 4);
    _tile_stored(1, sums + HALF, ld * 4);
    if (two) _tile_stored(2, sums + HALF * ld, ld * 4);
    if (two) _tile_stored(3, sums + HALF * ld + HALF, ld * 4);
    visible(sums);
}

/* B streams, so that it does not push A's rows out of L1. */
MT_INLINE void multiply_tiles(const struct steps *x, bool two)
{
    const mt_elem *a0 = x->a, *a1 = x->a + HALF * x->pitch, *b0 = x->b, *b1 = x->b + x->apart;
    int64_t pitch = x->pitch * 2, stride = x->stride;
    visible(a0);
    for (int64_t s = 0; s < x->count; s++) {
        _tile_stream_loadd(6, b0 + s * TILE, 64);
        _tile_loadd(4, a0 + s * stride, pitch);
        _tile_stream_loadd(7, b1 + s * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two) _tile_loadd(5, a1 + s * stride, pitch);
        _tile_dpbf16ps(1, 4, 7);
        if (two) _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
    }
}

MT_INLINE void multiply_sums(float *sums, int64_t ld, bool add, const struct steps *x, bool two)
{
    if (add)
        load_sums(sums, ld, two);
    else
        zero_sums();
    multiply_tiles(x, two);
    store_sums(sums, ld, two);
}

/* sums [rows, STEP], lines `ld` apart, of the rows that begin_steps was told: the product, added to
 * what is there or in its place. */
MT_INLINE void multiply(float *sums, int64_t ld, bool add, int64_t rows, const struct steps *x)
{
    if (rows > HALF)
        multiply_sums(sums, ld, add, x, true);
    else
        multiply_sums(sums, ld, add, x, false);
}
