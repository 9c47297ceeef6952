/* Inside quantize of nvfp4: scales of segments, and codes under 4over6. */
#pragma once

#include "kernels/cuda/quantize_squares.cuh"

/* ---- 4over6: what codes read back as ---------------------------------------------------------
 * Under the bound of 256 and an amax of bf16's bits the value of code q is RN(q one), `one` being
 * that of 1: products of E2M1, E4M3 and bf16 are exact, 3/2 over 3 (2^9) is a power of two, and of
 * a quotient by 3 the rounding error is a third of the last bit, 3/2 of which rounding takes back,
 * at worst as a tie. All is divided by a power of two about amax, which changes no rounding that
 * counts, and codes as bits of a float are their values times 2^-126. */

/* Under any bound (wide) `one` has two parts, 48 bits of the quotient: the values are quotients by
 * 21 or 3, which come no nearer to where rounding changes (every scale and amax compared). */

enum { ONES = MT_DIR_COUNT * NIBBLE_SCALES }; /* before the second parts */

/* 1 over that power; 0 where it does not hold: an error of an element that has a code is 2^-29 of
 * amax or more, or 0, and what counts beside its square is no subnormal from 2^-18 on. */
static __device__ __forceinline__ float unit_of(const side &s, const level &l, bool wide = false)
{
    const uint32_t bits = mt_f32_bits(l.amax);
    const float least = s.options.squared_error ? 0x1p-18f : 0x1p-60f;
    const bool holds = (wide || s.options.four_over_six == 256) && !(bits & 0xffff) &&
                       l.amax >= least && l.amax <= 0x1p60f;
    return holds ? mt_f32_from_bits(0x7f000000u - (bits & 0x7f800000u)) : 0;
}

/* What elements are multiplied by under each of the scales that a block of the member may have: a
 * thread has one, of side s. */
template <bool WIDE>
static __device__ __forceinline__ void make_scale(float enc[MT_DIR_COUNT][NIBBLE_SCALES],
                                                  float *ones, const job &j, const side &s,
                                                  const level &l)
{
    static_assert(TILE_THREADS == ONES, "a thread has one of a direction's");
    const int dir = (int)threadIdx.x / NIBBLE_SCALES, stored = (int)threadIdx.x % NIBBLE_SCALES;
    float v[2];
    byte_pair_values<CODES_E4M3>(v, j.e4m3, (uint32_t)stored);
    enc[dir][stored] = mt_nvfp4_encode(v[0] * l.s_dec);
    if (!ones) return;
    const float range = 6.0f * (float)s.options.four_over_six, all = v[0] * l.amax;
    const float unit = unit_of(s, l, WIDE), one = all / range;
    ones[threadIdx.x] = one * unit * 0x1p126f;
    if (WIDE) ones[ONES + threadIdx.x] = fmaf(-one, range, all) / range * unit * 0x1p126f;
}

static __device__ __forceinline__ void make_scales(float enc[MT_DIR_COUNT][NIBBLE_SCALES],
                                                   float *ones, const job &j, const frame &f)
{
    const int dir = (int)threadIdx.x / NIBBLE_SCALES;
    const side &s = j.p.sides[dir];
    if (s.present && j.codes) make_scale<false>(enc, ones, j, s, f.to[dir].l);
}

/* Two scales as they are stored. */
static __device__ __forceinline__ uint32_t stored_pair(const job &j, float low, float high)
{
#if MT_CONVERTS_FP8
    return native_pair(MT_ELEMENT_E4M3, low, high);
#else
    return (uint32_t)mt_encode_number(j.e4m3, low) | (uint32_t)mt_encode_number(j.e4m3, high) << 8;
#endif
}

/* ---- 4over6: the choice ------------------------------------------------------------------------
 */

/* The errors of both candidates of a segment where codes' values are whatever they are. */
template <bool SQUARED>
static __device__ __noinline__ float2 errors_otherwise(const job *j, const side *s, uint32_t stored,
                                                       float amax, float2 enc, uint4 low,
                                                       uint4 high)
{
    const uint32_t w[8] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
    const float range = 6.0f * (float)s->options.four_over_six;
    float2 error = make_float2(0, 0);
#pragma unroll 1
    for (int i = 0; i < SEGMENT; i++) {
        const float x = fabsf(element_of(w, i));
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float sf = mt_decode_number(j->e4m3, (uint8_t)(stored >> 8 * c));
            const uint32_t q = e2m1_above(x * (c ? enc.y : enc.x)) - E2M1_BASE;
            const float value = mt_decode_number(s->codec, (uint8_t)q) * sf;
            const float d = fabsf(value * amax / range - x);
            (c ? error.y : error.x) += SQUARED ? d * d : d;
        }
    }
    return error;
}

/* x / 6, rounded once: of all bf16 magnitudes. */
static __device__ __forceinline__ float sixth_of(float x)
{
    const float sixth = 1.0f / 6.0f, q = x * sixth;
    return x > FLT_MAX ? x : fmaf(fmaf(q, -6.0f, x), sixth, q);
}

/* Codes, less their signs, and scale of a segment: its amax becomes 6, or 4 if the error is then
 * smaller (a NaN keeps 6). Errors are summed in order; a code's value has its element's sign.
 * element: the magnitude of one; words: all of them, in order. */
template <bool SQUARED, bool WIDE, bool KNOWN, typename F, typename W>
static __device__ __forceinline__ uint32_t choose(uint32_t q[2], const job &j, const float *scales,
                                                  const float *ones, float unit, const side &s,
                                                  const level &l, uint32_t magnitude, F element,
                                                  W words)
{
    const float base = sixth_of(mt_f32_from_bits(magnitude << 16)) * l.s_enc;
    const uint32_t stored = stored_pair(j, base, base * 1.5f);
    float error[2] = { 0, 0 }, enc[2], one[2], low[2];
    uint32_t code[2][2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        enc[c] = scales[stored >> 8 * c & 0xff], one[c] = ones[stored >> 8 * c & 0xff];
        low[c] = WIDE ? ones[ONES + (stored >> 8 * c & 0xff)] : 0;
        code[c][0] = code[c][1] = 0u - E2M1_BASE * 0x11111111u;
    }
    if (!KNOWN && unit == 0) { /* what is added then is 0, or NaN where they are not finite */
        uint32_t w[8];
        words(w);
        const float2 e = errors_otherwise<SQUARED>(
            &j, &s, stored, l.amax, make_float2(enc[0], enc[1]), make_uint4(w[0], w[1], w[2], w[3]),
            make_uint4(w[4], w[5], w[6], w[7]));
        error[0] = e.x, error[1] = e.y;
    }
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) {
        const float x = element(i);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t n = e2m1_above(x * enc[c]);
            const float of_one = mt_f32_from_bits((n - E2M1_BASE) << 22);
            const float value = WIDE ? fmaf(of_one, one[c], of_one * low[c]) : of_one * one[c];
            const float d = fabsf(fmaf(x, -unit, value));
            code[c][i / 8] += n << i % 8 * 4;
            error[c] += SQUARED ? d * d : d;
        }
    }
    const bool four = error[1] < error[0];
    q[0] = four ? code[1][0] : code[0][0], q[1] = four ? code[1][1] : code[0][1];
    return (four ? stored >> 8 : stored) & 0xff;
}

/* With signs. FOUR: the error is of magnitudes, or of squares; WIDE: under any bound. */
enum { NO_CHOICE, BY_MAGNITUDES, BY_SQUARES, WIDE = 4 };

template <int FOUR, bool KNOWN = false>
static __device__ __forceinline__ uint32_t choose_codes(uint32_t q[2], const job &j,
                                                        const float *scales, const float *ones,
                                                        float unit, const side &s, const level &l,
                                                        uint32_t magnitude, const uint32_t w[8],
                                                        bool nans)
{
    uint32_t v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = w[i] & 0x7fff7fffu;
    const uint32_t stored = choose<(FOUR & 3) == BY_SQUARES, (FOUR & WIDE) != 0, KNOWN>(
        q, j, scales, ones, unit, s, l, magnitude, [&](int i) { return element_of(v, i); },
        [&](uint32_t to[8]) {
#pragma unroll
            for (int i = 0; i < 8; i++) to[i] = w[i];
        });
    q[0] |= nibble_signs(w, nans), q[1] |= nibble_signs(w + 4, nans);
    return stored;
}
