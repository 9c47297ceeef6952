/* Codes along a line straight to bf16: exact, without a float between, where they are numbers and
 * their scales of few bits. */
#pragma once

#include "kernels/cpu/quantize_line.h"

/* Scales of numbers that are one bf16 times each: bf16's bits of the scale and, of E2M1 alone, of
 * 1.5 times it. */
typedef struct bf16_scales {
    uint16_t *once, *more;
} bf16_scales;

/* E2M1's scales may have 6 significant bits, or be 0; those of codes with more bits are powers of
 * two. */
MT_CODEC_INLINE bool is_e2m1(mt_codec codec)
{
    return codec.shift == 22;
}

/* False: a scale is none of these, or takes a code out of bf16's normal numbers. */
MT_CODEC_INLINE bool bf16_scales_of(bf16_scales s, const float *restrict scales, int n,
                                    mt_codec codec)
{
    const int32_t least = 128 - (mt_bits(codec.step) >> 23), most = 380 - (codec.max_bits >> 23);
    const int32_t below = is_e2m1(codec) ? 0x3ffff : 0x7fffff;
    const int32_t zero = is_e2m1(codec) ? 0 : -1; /* the bits of no scale */
    int32_t other = 0;
    for (int i = 0; i < n; i++) {
        int32_t u = mt_bits(scales[i]), e = u >> 23;
        int32_t outside = ((e < least) | (e > most)) & (u != zero);
        other |= (u & below) | outside;
        s.once[i] = (uint16_t)(u >> 16);
        s.more[i] = (uint16_t)(mt_bits(scales[i] * 1.5f) >> 16);
    }
    return other == 0;
}

/* Bits of a number are linear in its value from one power of two to the next, and then half as
 * steep: at m steps they are the least of these lines, the first one that of normal codes, the
 * others of subnormals, which have 3 bits at most. A power of two adds its exponent. */
MT_CODEC_INLINE uint16_t bf16_by_lines(uint16_t u, uint16_t once, mt_codec codec)
{
    const uint16_t mask = (uint16_t)codec.magnitude, sign = (uint16_t)(1 << (codec.sign - 16));
    const uint16_t slope = (uint16_t)(1 << (codec.shift - 16));
    const uint16_t base = (uint16_t)(codec.rebias * slope - (127 << 7));
    uint16_t m = u & mask, a = (uint16_t)(m * slope), b = (uint16_t)(2 * a);
    uint16_t c = (uint16_t)(4 * a), d = (uint16_t)(8 * a);
    a = (uint16_t)(a + 384), b = (uint16_t)(b + 256), c = (uint16_t)(c + 128);
    a = a < b ? a : b, c = c < d ? c : d;
    a = (uint16_t)((a < c ? a : c) + (uint16_t)(base - 384) + once);
    return (uint16_t)((m ? a : 0) | (u & (mask + 1)) * sign);
}

/* 0.5, 1, 1.5, 2, 3, 4, 6 times the scale: it or 1.5 of it, times a power of two. */
MT_CODEC_INLINE uint16_t bf16_of_e2m1(uint16_t u, uint16_t once, uint16_t more)
{
    uint16_t m = u & 7, value = m > 1 && (m & 1) ? more : once;
    value = (uint16_t)(value + (m >> 1) * 128 - 128);
    return (uint16_t)((m && once ? value : 0) | (u & 8) << 12);
}

/* Numbers times scales as bf16, exact, without a float between; `each` has a scale of its own, or
 * all have the first. */
MT_CODEC_INLINE void decode_bf16_part(uint16_t *restrict y, const uint8_t *restrict codes,
                                      const uint16_t *restrict once, const uint16_t *restrict more,
                                      bool each, int n, mt_codec codec)
{
    const uint16_t first = once[0];
    if (is_e2m1(codec))
#pragma omp simd
        for (int i = 0; i < n; i++) y[i] = bf16_of_e2m1(codes[i], once[i], more[i]);
    else
#pragma omp simd
        for (int i = 0; i < n; i++) y[i] = bf16_by_lines(codes[i], each ? once[i] : first, codec);
}

/* n of them, a multiple of CHUNK, 1 << shift of which share a scale: one (E2M1), or one or CUT and
 * more. */
MT_CODEC_INLINE void decode_bf16(uint16_t *restrict y, const uint8_t *restrict codes, bf16_scales s,
                                 int shift, int n, mt_codec codec)
{
    int at = 0;
    for (; at + CUT <= n; at += CUT) {
        const uint16_t *once = s.once + (at >> shift), *more = s.more + (at >> shift);
        decode_bf16_part(y + at, codes + at, once, more, shift == 0, CUT, codec);
    }
    for (; at < n; at += CHUNK) {
        const uint16_t *once = s.once + (at >> shift), *more = s.more + (at >> shift);
        decode_bf16_part(y + at, codes + at, once, more, shift == 0, CHUNK, codec);
    }
}
