/* Casts and amaxes along a line of values; lengths are multiples of CHUNK. */
#pragma once

#include "kernels/codec.h"

enum { CHUNK = 16, LANES = 8, LINE_PART = 256, LINE_MAX = 1024 };

/* Scales along a line: value i has scale i >> shift. 0, or 4 and more (CHUNK values share one). */
typedef struct line_scales {
    const float *values;
    int shift;
} line_scales;

static inline line_scales line_scales_of(const float *values, int block)
{
    return (line_scales){ values, __builtin_ctz((unsigned)block) };
}

/* Words of codes of `part` values from `at` on. */
MT_CODEC_INLINE void encode_part(int32_t *restrict words, const float *restrict x, line_scales s,
                                 int at, int part, mt_codec codec, bool numbers)
{
    if (s.shift == 0) {
#pragma omp simd
        for (int i = 0; i < part; i++) {
            float y = x[at + i] * s.values[at + i];
            words[i] = numbers ? mt_encode_number(codec, y) : mt_encode(codec, y);
        }
        return;
    }
    for (int i = 0; i < part; i += CHUNK) {
        float scale = s.values[(at + i) >> s.shift];
        const float *v = x + at + i;
        int32_t *w = words + i;
#pragma omp simd
        for (int j = 0; j < CHUNK; j++) {
            float y = v[j] * scale;
            w[j] = numbers ? mt_encode_number(codec, y) : mt_encode(codec, y);
        }
    }
}

/* codes = the cast of x * scale. `numbers`: no product is NaN. Codes are made as words and then cut
 * to bytes: loops that vectorise well. */
MT_CODEC_INLINE void encode_line(uint8_t *restrict codes, const float *restrict x,
                                 line_scales scales, int n, mt_codec codec, bool numbers)
{
    for (int at = 0; at < n; at += LINE_PART) {
        int32_t words[LINE_PART];
        int part = n - at < LINE_PART ? n - at : LINE_PART;
        if (numbers)
            encode_part(words, x, scales, at, part, codec, true);
        else
            encode_part(words, x, scales, at, part, codec, false);
#pragma omp simd
        for (int i = 0; i < part; i++) codes[at + i] = (uint8_t)words[i];
    }
}

/* y = x * scale, where scales begin at value `at`. */
MT_CODEC_INLINE void multiply_part(float *restrict y, const float *restrict x, line_scales s,
                                   int at, int part)
{
    if (s.shift == 0) {
#pragma omp simd
        for (int i = 0; i < part; i++) y[i] = x[i] * s.values[at + i];
        return;
    }
    for (int i = 0; i < part; i += CHUNK) {
        float scale = s.values[(at + i) >> s.shift], *w = y + i;
        const float *v = x + i;
#pragma omp simd
        for (int j = 0; j < CHUNK; j++) w[j] = v[j] * scale;
    }
}

MT_CODEC_INLINE void encode_line_stochastic(uint8_t *restrict codes, const float *restrict x,
                                            line_scales scales, const uint16_t *restrict random,
                                            int n, mt_codec codec)
{
    for (int at = 0; at < n; at += LINE_PART) {
        float y[LINE_PART];
        int32_t words[LINE_PART];
        int part = n - at < LINE_PART ? n - at : LINE_PART;
        const uint16_t *bits = random + at;
        multiply_part(y, x + at, scales, at, part);
#pragma omp simd
        for (int i = 0; i < part; i++) words[i] = mt_encode_stochastic(codec, y[i], bits[i]);
#pragma omp simd
        for (int i = 0; i < part; i++) codes[at + i] = (uint8_t)words[i];
    }
}

/* x = decoded codes * scale. */
MT_CODEC_INLINE void decode_line(float *restrict x, const uint8_t *restrict codes,
                                 line_scales scales, int n, mt_codec codec)
{
    for (int at = 0; at < n; at += LINE_PART) {
        float y[LINE_PART];
        uint8_t most = 0, mask = (uint8_t)codec.magnitude;
        int part = n - at < LINE_PART ? n - at : LINE_PART;
        const uint8_t *c = codes + at;
        for (int i = 0; i < part; i++) {
            uint8_t m = c[i] & mask;
            most = m > most ? m : most;
        }
        if (most <= codec.max_code) {
#pragma omp simd
            for (int i = 0; i < part; i++) y[i] = mt_decode_number(codec, c[i]);
        } else {
#pragma omp simd
            for (int i = 0; i < part; i++) y[i] = mt_decode(codec, c[i]);
        }
        multiply_part(x + at, y, scales, at, part);
    }
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

/* lanes[i] = the larger of lanes[2 i] and lanes[2 i + 1]. */
MT_CODEC_INLINE void halve(int32_t *lanes, int n)
{
#pragma omp simd
    for (int i = 0; i < n; i++)
        lanes[i] = lanes[2 * i] > lanes[2 * i + 1] ? lanes[2 * i] : lanes[2 * i + 1];
}

/* lanes[j] = the largest magnitude among x[j], x[j + LANES], ... */
MT_CODEC_INLINE void keep_largest(int32_t *restrict lanes, const float *restrict x, int n)
{
    int32_t l[LANES];
    for (int j = 0; j < LANES; j++) l[j] = mt_bits(x[j]) & 0x7fffffff;
    for (int i = LANES; i < n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            int32_t a = mt_bits(x[i + j]) & 0x7fffffff;
            l[j] = a > l[j] ? a : l[j];
        }
    for (int j = 0; j < LANES; j++) lanes[j] = l[j];
}

/* amax of each `block` of n <= LINE_MAX values, NaN left out (the last block may be shorter), and
 * the largest of them. Returns whether there is a NaN. Magnitudes as bits: NaN is above 0x7f800000.
 */
MT_CODEC_INLINE bool block_amaxes(float *restrict amax, float *largest, const float *restrict x,
                                  int n, int block)
{
    int32_t lanes[LINE_MAX / CHUNK * LANES], most = 0;
    int blocks = 0;
    for (int at = 0; at < n; at += block, blocks++) {
        int part = n - at < block ? n - at : block;
        int32_t *l = lanes + blocks * LANES;
        if (part == CHUNK) /* known lengths make straight code */
            keep_largest(l, x + at, CHUNK);
        else if (part == 2 * CHUNK)
            keep_largest(l, x + at, 2 * CHUNK);
        else
            keep_largest(l, x + at, part);
    }
    for (int width = LANES / 2; width > 0; width /= 2) halve(lanes, blocks * width);
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
