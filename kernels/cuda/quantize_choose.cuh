/* Inside quantize of nvfp4: scales of segments, and codes under 4over6. */
#pragma once

#include "kernels/cuda/quantize_squares.cuh"

/* What 4over6 takes: of a member what the codes of 1 and 1.5 read back as under each scale, and of
 * a thread what each of the eight does under its block's candidates. */
struct choices {
    float value[2][MT_DIR_COUNT][2][NIBBLE_SCALES]; /* of this member and the next */
    float of_code[2][8][TILE_THREADS];
};

/* What elements are multiplied by under each of the scales that a block of the member may have. */
static __device__ __forceinline__ void make_scales(float enc[MT_DIR_COUNT][NIBBLE_SCALES],
                                                   choices *of, int table, const job &j,
                                                   const frame &f)
{
    static_assert(TILE_THREADS == MT_DIR_COUNT * NIBBLE_SCALES,
                  "a thread has one of a direction's");
    const int dir = (int)threadIdx.x / NIBBLE_SCALES, stored = (int)threadIdx.x % NIBBLE_SCALES;
    const side &s = j.p.sides[dir];
    const level &l = f.to[dir].l;
    float v[2];
    if (!s.present || !j.codes) return;
    byte_pair_values<CODES_E4M3>(v, j.e4m3, (uint32_t)stored);
    enc[dir][stored] = mt_nvfp4_encode(v[0] * l.s_dec);
    if (!of || !s.options.four_over_six) return;
    const float range = 6.0f * (float)s.options.four_over_six;
    of->value[table][dir][0][stored] = v[0] * l.amax / range;
    of->value[table][dir][1][stored] = v[0] * 1.5f * l.amax / range;
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

/* ---- 4over6 -----------------------------------------------------------------------------------
 */

/* Where the value of code 0 under candidate 0 is, as shared memory's address; others follow. */
enum { CODE_STEP = TILE_THREADS * 4, CANDIDATE_STEP = 8 * CODE_STEP };

static __device__ __forceinline__ void put_value(uint32_t at, float x)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x));
#endif
}
static __device__ __forceinline__ float get_value(uint32_t at)
{
    float x = 0;
#if defined(__CUDA_ARCH__)
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
#endif
    return x;
}

/* What codes read back as under a candidate. Powers of two times 1 and 1.5 as long as no product
 * leaves the normal numbers; else one by one. */
static __device__ __forceinline__ void put_values(uint32_t at, const choices *of, int table,
                                                  const job &j, const side &s, const level &l,
                                                  uint32_t stored)
{
    if (l.amax >= 0x1p-60f && l.amax <= 0x1p100f) {
        const float one = of->value[table][s.dir][0][stored];
        const float more = of->value[table][s.dir][1][stored];
        put_value(at + CODE_STEP, one * 0.5f), put_value(at + 2 * CODE_STEP, one);
        put_value(at + 3 * CODE_STEP, more), put_value(at + 4 * CODE_STEP, one * 2);
        put_value(at + 5 * CODE_STEP, more * 2), put_value(at + 6 * CODE_STEP, one * 4);
        put_value(at + 7 * CODE_STEP, more * 4);
        return;
    }
    const float range = 6.0f * (float)s.options.four_over_six;
#pragma unroll 1
    for (uint32_t code = 1; code < 8; code++) {
        const float sf = mt_decode_number(j.e4m3, (uint8_t)stored);
        const float value = mt_decode_number(s.codec, (uint8_t)code) * sf;
        put_value(at + code * CODE_STEP, value * l.amax / range);
    }
}

/* Codes, less their signs, and scale of a segment: its amax becomes 6, or 4 if the error is then
 * smaller (a NaN keeps 6). Errors are summed in order; a code's value has its element's sign. */
template <bool SQUARED>
static __device__ __forceinline__ uint32_t choose(uint32_t q[2], const job &j, const float *scales,
                                                  choices *of, int table, const side &s,
                                                  const level &l, uint32_t magnitude,
                                                  const uint32_t w[8])
{
    const float base = mt_f32_from_bits(magnitude << 16) / 6.0f * l.s_enc;
    const uint32_t stored = stored_pair(j, base, base * 1.5f);
    const uint32_t at = shared_address(of->of_code[0][0] + threadIdx.x);
    float error[2] = { 0, 0 }, enc[2];
    uint32_t code[2][2];
    put_value(at, 0), put_value(at + CANDIDATE_STEP, 0);
#pragma unroll
    for (int c = 0; c < 2; c++) {
        put_values(at + c * CANDIDATE_STEP, of, table, j, s, l, stored >> 8 * c & 0xff);
        enc[c] = scales[stored >> 8 * c & 0xff];
        code[c][0] = code[c][1] = 0u - E2M1_BASE * 0x11111111u;
    }
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) {
        const float x = fabsf(element_of(w, i));
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t n = e2m1_above(x * enc[c]);
            const float d = fabsf(
                get_value(n * CODE_STEP + (at - E2M1_BASE * CODE_STEP) + c * CANDIDATE_STEP) - x);
            code[c][i / 8] += n << i % 8 * 4;
            error[c] += SQUARED ? d * d : d;
        }
    }
    const bool four = error[1] < error[0];
    q[0] = four ? code[1][0] : code[0][0], q[1] = four ? code[1][1] : code[0][1];
    return (four ? stored >> 8 : stored) & 0xff;
}

/* With signs. */
static __device__ __forceinline__ uint32_t choose_codes(uint32_t q[2], const job &j,
                                                        const float *scales, choices *of, int table,
                                                        const side &s, const level &l,
                                                        uint32_t magnitude, const uint32_t w[8],
                                                        bool nans)
{
    const uint32_t stored = s.options.squared_error
                                ? choose<true>(q, j, scales, of, table, s, l, magnitude, w)
                                : choose<false>(q, j, scales, of, table, s, l, magnitude, w);
    q[0] |= nibble_signs(w, nans), q[1] |= nibble_signs(w + 4, nans);
    return stored;
}
