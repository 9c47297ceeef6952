/* Casts and amaxes along a line of values; lengths are multiples of CHUNK. */
#pragma once

#include "kernels/codec.h"
#include "kernels/cpu/unroll.h"

enum { CHUNK = 16, CUT_SHIFT = 6, CUT = 1 << CUT_SHIFT, LINE_MAX = 1024 };

/* Scales along a line: value i has scale i >> shift. 0, or 4 and more (CHUNK values share one). */
typedef struct line_scales {
    const float *values;
    int shift;
} line_scales;

static inline line_scales line_scales_of(const float *values, int block)
{
    return (line_scales){ values, __builtin_ctz((unsigned)block) };
}

/* How a cast rounds: to nearest, of what is no NaN or of anything; stochastically. */
typedef enum rounding { ROUND_NUMBER, ROUND_NEAREST, ROUND_STOCHASTIC } rounding;

MT_CODEC_INLINE int32_t cast_to(mt_codec codec, rounding how, float y, int32_t random)
{
    return how == ROUND_NUMBER    ? mt_encode_number(codec, y)
           : how == ROUND_NEAREST ? mt_encode(codec, y)
                                  : mt_encode_stochastic(codec, y, random);
}

/* Codes of n values as words, n <= CUT: bytes are cut from several vectors of them at once. */
MT_CODEC_INLINE void encode_part(uint8_t *restrict codes, const float *restrict x, line_scales s,
                                 const int32_t *restrict random, int at, int n, mt_codec codec,
                                 rounding how)
{
    const bool draws = how == ROUND_STOCHASTIC;
    int32_t words[CUT];
    for (int i = 0; i < n; i += CHUNK) {
        const float *v = x + at + i, *scale = s.values + ((at + i) >> s.shift);
        const int32_t *bits = draws ? random + at + i : NULL;
        int32_t *w = words + i;
        if (s.shift == 0) {
#pragma omp simd
            for (int j = 0; j < CHUNK; j++)
                w[j] = cast_to(codec, how, v[j] * scale[j], draws ? bits[j] : 0);
        } else {
            const float one = *scale;
#pragma omp simd
            for (int j = 0; j < CHUNK; j++)
                w[j] = cast_to(codec, how, v[j] * one, draws ? bits[j] : 0);
        }
    }
#pragma omp simd
    for (int i = 0; i < n; i++) codes[at + i] = (uint8_t)words[i];
}

/* codes = the cast of x * scale. */
MT_CODEC_INLINE void encode_line(uint8_t *restrict codes, const float *restrict x, line_scales s,
                                 const int32_t *restrict random, int n, mt_codec codec,
                                 rounding how)
{
    int at = 0;
    for (; at + CUT <= n; at += CUT) encode_part(codes, x, s, random, at, CUT, codec, how);
    for (; at < n; at += CHUNK) encode_part(codes, x, s, random, at, CHUNK, codec, how);
}

/* words[c] = the codes of x[c], x[c + pitch], ... times scales[c], `count` of them that share its
 * bits, the first one's lowest. */
MT_CODEC_INLINE void encode_stack(uint32_t *restrict words, const float *restrict x,
                                  const float *restrict scales, const int32_t *restrict random,
                                  int pitch, int n, int count, mt_codec codec, rounding how)
{
    const bool draws = how == ROUND_STOCHASTIC;
    for (int at = 0; at < n; at += CHUNK)
#pragma omp simd
        for (int j = at; j < at + CHUNK; j++) {
            uint32_t word = 0;
            MT_UNROLL
            for (int i = 0; i < count; i++) {
                int k = i * pitch + j;
                word |= (uint32_t)cast_to(codec, how, x[k] * scales[j], draws ? random[k] : 0)
                        << 32 / count * i;
            }
            words[j] = word;
        }
}

/* Values of n codes, n <= CUT, which are words first. `numbers`: they are finite. */
MT_CODEC_INLINE void decode_part(float *restrict x, const uint8_t *restrict codes, line_scales s,
                                 int at, int n, mt_codec codec, bool numbers)
{
    int32_t words[CUT];
#pragma omp simd
    for (int i = 0; i < n; i++) words[i] = codes[at + i];
    for (int i = 0; i < n; i += CHUNK) {
        const float *scale = s.values + ((at + i) >> s.shift), one = *scale;
        const int32_t *w = words + i;
        float *v = x + at + i;
#pragma omp simd
        for (int j = 0; j < CHUNK; j++) {
            uint8_t code = (uint8_t)w[j];
            v[j] = numbers ? mt_decode_number(codec, code) : mt_decode(codec, code);
        }
        if (s.shift == 0)
#pragma omp simd
            for (int j = 0; j < CHUNK; j++) v[j] *= scale[j];
        else
#pragma omp simd
            for (int j = 0; j < CHUNK; j++) v[j] *= one;
    }
}

MT_CODEC_INLINE void decode_parts(float *restrict x, const uint8_t *restrict codes, line_scales s,
                                  int n, mt_codec codec, bool numbers)
{
    int at = 0;
    for (; at + CUT <= n; at += CUT) decode_part(x, codes, s, at, CUT, codec, numbers);
    for (; at < n; at += CHUNK) decode_part(x, codes, s, at, CHUNK, codec, numbers);
}

/* Whether no code is Inf or NaN. */
MT_CODEC_INLINE bool all_numbers(const uint8_t *codes, int n, mt_codec codec)
{
    uint8_t most = 0, mask = (uint8_t)codec.magnitude;
    for (int i = 0; i < n; i++) {
        uint8_t m = codes[i] & mask;
        most = m > most ? m : most;
    }
    return most <= codec.max_code;
}

/* x = decoded codes * scale. */
MT_CODEC_INLINE void decode_line(float *restrict x, const uint8_t *restrict codes, line_scales s,
                                 int n, mt_codec codec)
{
    if (all_numbers(codes, n, codec))
        decode_parts(x, codes, s, n, codec, true);
    else
        decode_parts(x, codes, s, n, codec, false);
}

MT_CODEC_INLINE int32_t amax_without_nan(const float *restrict x, int n)
{
    int32_t most = 0;
    for (int i = 0; i < n; i++) {
        int32_t a = mt_magnitude_bits(x[i]);
        most = a > most ? a : most;
    }
    return most;
}

/* lanes[j] = the largest magnitude among x[j], x[j + CHUNK], ... */
MT_CODEC_INLINE void keep_largest(int32_t *restrict lanes, const float *restrict x, int n)
{
#pragma omp simd
    for (int j = 0; j < CHUNK; j++) {
        int32_t most = mt_bits(x[j]) & 0x7fffffff;
        MT_UNROLL
        for (int i = CHUNK; i < n; i += CHUNK) {
            int32_t a = mt_bits(x[i + j]) & 0x7fffffff;
            most = a > most ? a : most;
        }
        lanes[j] = most;
    }
}

MT_CODEC_INLINE void keep_blocks(int32_t *restrict lanes, const float *restrict x, int blocks,
                                 int block)
{
    for (int b = 0; b < blocks; b++) keep_largest(lanes + b * CHUNK, x + b * block, block);
}

/* lanes[i] = the larger of lanes[2 i] and lanes[2 i + 1]. */
MT_CODEC_INLINE void halve(int32_t *lanes, int n)
{
#pragma omp simd
    for (int i = 0; i < n; i++)
        lanes[i] = lanes[2 * i] > lanes[2 * i + 1] ? lanes[2 * i] : lanes[2 * i + 1];
}

/* amax of each `block` of n <= LINE_MAX values, NaN left out (the last block may be shorter), and
 * the largest of them. Returns whether there is a NaN. Magnitudes as bits: NaN is above 0x7f800000.
 */
MT_CODEC_INLINE bool block_amaxes(float *restrict amax, float *largest, const float *restrict x,
                                  int n, int block)
{
    int32_t lanes[LINE_MAX], most = 0;
    int blocks = n / block, rest = n - blocks * block;
    if (block == CHUNK) /* known lengths make straight code */
        keep_blocks(lanes, x, blocks, CHUNK);
    else if (block == 2 * CHUNK)
        keep_blocks(lanes, x, blocks, 2 * CHUNK);
    else if (block == 8 * CHUNK)
        keep_blocks(lanes, x, blocks, 8 * CHUNK);
    else
        keep_blocks(lanes, x, blocks, block);
    if (rest) keep_largest(lanes + blocks++ * CHUNK, x + (n - rest), rest);
    for (int width = CHUNK / 2; width > 0; width /= 2) halve(lanes, blocks * width);
    for (int b = 0; b < blocks; b++) {
        most = lanes[b] > most ? lanes[b] : most;
        amax[b] = mt_from_bits(lanes[b]);
    }
    bool nan = most > 0x7f800000;
    if (nan) {
        most = 0;
        for (int b = 0; b < blocks; b++) {
            int part = n - b * block < block ? n - b * block : block;
            int32_t a = amax_without_nan(x + b * block, part);
            most = a > most ? a : most;
            amax[b] = mt_from_bits(a);
        }
    }
    *largest = mt_from_bits(most);
    return nan;
}
