/* Storage forms of what AdamW reads and writes (kernels/optimizer.h): a block is opened into reals
 * and closed again. Real storage opens where it lies. The other forms are of f32 only. */
#pragma once

#include "kernels/codec.h"
#include "kernels/cpu/draw.h"
#include "kernels/cpu/variant.h"

/* Elements opened at a time, a multiple of an FP8 block and of a row of draws; the FP8 block. */
enum { STORED_BLOCK = 1024, STORED_SCALED = 128 };

/* One array of a call. */
struct stored {
    void *codes;
    void *beside; /* scales, or lower halves; NULL where the form has none */
    uint64_t seed;
    int64_t first; /* place of element 0 in its param */
    uint32_t stream, step;
};

/* `open` returns elements [at, at + n), in `x` or where they lie; `close` stores them from there.
 */
struct stored_form {
    mt_real *(*open)(const struct stored *s, mt_real *x, int64_t at, int64_t n);
    void (*close)(const struct stored *s, const mt_real *x, int64_t at, int64_t n);
};

static mt_real *open_real(const struct stored *s, mt_real *x, int64_t at, int64_t n)
{
    (void)x, (void)n;
    return (mt_real *)s->codes + at;
}

static void close_real(const struct stored *s, const mt_real *x, int64_t at, int64_t n)
{
    (void)s, (void)x, (void)at, (void)n;
}

#if MT_ELEM_BITS == 32

/* ---- bf16 + i16 ---- */

static void join_halves(float *restrict x, const uint16_t *restrict high,
                        const int16_t *restrict low, int64_t n)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] = mt_f32_from_bits(mt_master_join(high[i], low[i]));
}

static mt_real *open_split(const struct stored *s, mt_real *x, int64_t at, int64_t n)
{
    join_halves(x, (const uint16_t *)s->codes + at, (const int16_t *)s->beside + at, n);
    return x;
}

static void close_split(const struct stored *s, const mt_real *restrict x, int64_t at, int64_t n)
{
    uint16_t *restrict high = (uint16_t *)s->codes + at;
    int16_t *restrict low = (int16_t *)s->beside + at;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = mt_f32_bits(x[i]);
        high[i] = mt_master_high(bits), low[i] = mt_master_low(bits);
    }
}

/* ---- bf16 ---- */

static mt_real *open_bf16(const struct stored *s, mt_real *restrict x, int64_t at, int64_t n)
{
    const uint16_t *restrict from = (const uint16_t *)s->codes + at;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] = mt_bf16_to_f32(from[i]);
    return x;
}

static void close_bf16(const struct stored *s, const mt_real *restrict x, int64_t at, int64_t n)
{
    uint16_t *restrict to = (uint16_t *)s->codes + at;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] = mt_f32_to_bf16(x[i]);
}

/* The 16 random bits of elements [at, at + n); writes whole rows of draws. A row begins at a
 * multiple of its draws, which therefore differ in their lower 32 bits alone. */
static void draw_bits(uint16_t *random, const struct stored *s, int64_t at, int64_t n)
{
    const uint32_t key[2] = { (uint32_t)s->seed, (uint32_t)(s->seed >> 32) };
    for (int64_t i = 0; i < n; i += MT_DRAW * MT_DRAWS) {
        uint64_t draw = (uint64_t)(s->first + at + i) / MT_DRAW;
        const uint32_t first[4] = { (uint32_t)draw, (uint32_t)(draw >> 32), s->stream, s->step };
        mt_draw_row(random + i, key, first);
    }
}

/* A carry out of the mantissa of what is not finite would change what it is. */
static void close_bf16_stochastic(const struct stored *s, const mt_real *restrict x, int64_t at,
                                  int64_t n)
{
    uint16_t random[STORED_BLOCK], *restrict to = (uint16_t *)s->codes + at;
    draw_bits(random, s, at, n);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = mt_f32_bits(x[i]);
        bool nan = (int32_t)(u & 0x7fffffffu) > 0x7f800000;
        to[i] = (uint16_t)(nan ? 0x7fffu : (u + random[i]) >> 16);
    }
}

/* ---- fp8 with a scale per 128 ---- */

/* Scales a block, stores the scale's inverse, returns the scale. */
static float scale_block(const struct stored *s, const float *restrict x, int64_t at, int n)
{
    int32_t amax = 0;
#pragma omp simd reduction(max : amax)
    for (int i = 0; i < n; i++) {
        int32_t a = mt_magnitude_bits(x[i]);
        amax = a > amax ? a : amax;
    }
    float scale =
        mt_encode_scale(mt_from_bits(amax), mt_elements[MT_ELEMENT_E4M3].max, false, FLT_MAX);
    ((float *)s->beside)[at / STORED_SCALED] = 1.0f / scale;
    return scale;
}

static void decode_block(float *restrict x, const struct stored *s, int64_t at, int n)
{
    const mt_codec e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    const uint8_t *restrict codes = (const uint8_t *)s->codes + at;
    float inverse = ((const float *)s->beside)[at / STORED_SCALED];
#pragma omp simd
    for (int i = 0; i < n; i++) x[i] = mt_decode(e4m3, codes[i]) * inverse;
}

static mt_real *open_fp8(const struct stored *s, mt_real *x, int64_t at, int64_t n)
{
    for (int64_t i = 0; i < n; i += STORED_SCALED)
        decode_block(x + i, s, at + i, (int)mt_min(STORED_SCALED, n - i));
    return x;
}

static void close_fp8(const struct stored *s, const mt_real *x, int64_t at, int64_t n)
{
    const mt_codec e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    for (int64_t j = 0; j < n; j += STORED_SCALED) {
        int count = (int)mt_min(STORED_SCALED, n - j);
        const float *restrict from = x + j;
        uint8_t *restrict to = (uint8_t *)s->codes + at + j;
        float scale = scale_block(s, from, at + j, count);
#pragma omp simd
        for (int i = 0; i < count; i++) to[i] = (uint8_t)mt_encode(e4m3, from[i] * scale);
    }
}

static mt_real *open_fp8_root(const struct stored *s, mt_real *x, int64_t at, int64_t n)
{
    open_fp8(s, x, at, n);
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * x[i];
    return x;
}

/* The least code whose value is at least y >= 0, the largest one if there is none: the nearest, or
 * the one after it. */
MT_INLINE uint8_t encode_up(mt_codec c, float y)
{
    int32_t nearest = mt_encode(c, y), value = mt_bits(mt_decode_number(c, (uint8_t)nearest));
    return (uint8_t)(nearest + (nearest < c.max_code && value < mt_bits(y) ? 1 : 0));
}

static void close_fp8_root(const struct stored *s, const mt_real *restrict x, int64_t at, int64_t n)
{
    const mt_codec e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    float root[STORED_SCALED];
    for (int64_t j = 0; j < n; j += STORED_SCALED) {
        int count = (int)mt_min(STORED_SCALED, n - j);
        uint8_t *restrict to = (uint8_t *)s->codes + at + j;
        for (int i = 0; i < count; i++) root[i] = sqrtf(x[j + i]);
        float scale = scale_block(s, root, at + j, count);
#pragma omp simd
        for (int i = 0; i < count; i++) to[i] = encode_up(e4m3, root[i] * scale);
    }
}

#endif

/* Of the master, and of m and v: by form, and by whether they are rounded stochastically. */
static const struct stored_form master_forms[MT_MASTER_COUNT] = {
    [MT_MASTER_REAL] = { open_real, close_real },
#if MT_ELEM_BITS == 32
    [MT_MASTER_SPLIT] = { open_split, close_split },
#endif
};

/* Of the gradient, by whether it is bf16: never closed. */
static const struct stored_form gradient_forms[2] = {
    { open_real, NULL },
#if MT_ELEM_BITS == 32
    { open_bf16, NULL },
#endif
};

static const struct stored_form moment_forms[MT_MOMENTS_COUNT][2][2] = {
    [MT_MOMENTS_REAL] = { { { open_real, close_real }, { open_real, close_real } } },
#if MT_ELEM_BITS == 32
    [MT_MOMENTS_BF16] = { { { open_bf16, close_bf16 }, { open_bf16, close_bf16 } },
                          { { open_bf16, close_bf16_stochastic },
                            { open_bf16, close_bf16_stochastic } } },
    [MT_MOMENTS_FP8] = { { { open_fp8, close_fp8 }, { open_fp8_root, close_fp8_root } } },
#endif
};
