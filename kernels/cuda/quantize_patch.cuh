/* Inside the shortest way of quantize: a thread's patch of a tile, its magnitudes, its codes in
 * rows. */
#pragma once

#include "kernels/cuda/quantize_turns.cuh"

enum { RUN = 8, ROWS = 8 }; /* of a thread's patch: elements, rows */
/* What a kernel makes: codes of directions, or what they are worth (MT_LAYOUT_DECODED). */
enum { ROW_CODES = 1, COLUMN_CODES = 2, ROW_VALUES = 4, COLUMN_VALUES = 8 };

/* A warp has sixteen rows of a tile, half warps eight that follow each other. */
static __device__ __forceinline__ int patch_row(void)
{
    return (int)(threadIdx.x / 16) * ROWS;
}
static __device__ __forceinline__ int patch_column(void)
{
    return (int)(threadIdx.x % 16) * RUN;
}

/* ---- magnitudes -------------------------------------------------------------------------------
 */

/* Two elements, 0 for NaN. */
static __device__ __forceinline__ uint32_t without_nans(uint32_t w)
{
    w = (w & 0x7fff) > 0x7f80 ? w & 0xffff0000u : w;
    return (w & 0x7fff0000u) > 0x7f800000u ? w & 0xffff : w;
}

/* The same, NaNs without their signs. */
static __device__ __forceinline__ uint32_t without_nan_signs(uint32_t w)
{
    w = (w & 0x7fff) > 0x7f80 ? w & 0xffff7fffu : w;
    return (w & 0x7fff0000u) > 0x7f800000u ? w & 0x7fffffff : w;
}

/* The k-th of four: registers have no index. */
template <typename T> static __device__ __forceinline__ T one_of(const T x[4], int k)
{
    return k & 2 ? (k & 1 ? x[3] : x[2]) : (k & 1 ? x[1] : x[0]);
}

/* ---- codes ------------------------------------------------------------------------------------
 */

/* fp8 codes of four products. */
template <int CODES>
static __device__ __forceinline__ uint32_t encode_products(const side &s, float a, float b, float c,
                                                           float d)
{
#if MT_CONVERTS_FP8
    const mt_element element = CODES == CODES_E4M3 ? MT_ELEMENT_E4M3 : MT_ELEMENT_E5M2;
    return native_pair(element, a, b) | native_pair(element, c, d) << 16;
#else
    return mt_encode(s.codec, a) | mt_encode(s.codec, b) << 8 | mt_encode(s.codec, c) << 16 |
           (uint32_t)mt_encode(s.codec, d) << 24;
#endif
}

/* Two elements times powers of two, a pair of bf16: in bf16 what the products are in f32, but for
 * some below 2^-126, whose codes are 0 with their signs either way. */
static __device__ __forceinline__ uint32_t times_powers(uint32_t x, uint32_t powers)
{
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(powers), "r"(0x80008000u));
    return y;
}
static __device__ __forceinline__ uint32_t power_words(float low, float high)
{
    return __byte_perm(mt_f32_bits(low), mt_f32_bits(high), 0x7632);
}

/* Of four elements. POW2: they are multiplied by powers of two. */
template <int CODES, bool POW2>
static __device__ __forceinline__ uint32_t encode_four(const side &s, const uint32_t w[2],
                                                       const float enc[4])
{
    float v[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t y =
            POW2 ? times_powers(w[h], power_words(enc[h * 2], enc[h * 2 + 1])) : w[h];
        v[h * 2] = low_bf16(y) * (POW2 ? 1 : enc[h * 2]);
        v[h * 2 + 1] = high_bf16(y) * (POW2 ? 1 : enc[h * 2 + 1]);
    }
    return encode_products<CODES>(s, v[0], v[1], v[2], v[3]);
}

/* Of eight with one scale. */
template <int CODES>
static __device__ __forceinline__ void encode_row(uint32_t q[2], const side &s, const uint32_t w[4],
                                                  float enc)
{
    const float same[4] = { enc, enc, enc, enc };
#pragma unroll
    for (int h = 0; h < 2; h++) q[h] = encode_four<CODES, false>(s, w + h * 2, same);
}

/* What the draws of a patch's rows share: of Philox's first three rounds what the row has no part
 * in. */
struct draws {
    uint32_t first, row, upper, word, lower, last;
};

static __device__ __forceinline__ draws draws_of(const job &j, const tile &t, int row, int column)
{
    const uint32_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u, w0 = 0x9E3779B9u, w1 = 0xBB67AE85u;
    const uint32_t member = j.first_member + (uint32_t)t.index;
    const uint32_t place = (uint32_t)(t.c0 + column) / RUN;
    const uint32_t k0 = j.key[0], k1 = j.key[1];
    const uint32_t second = __umulhi(m0, place) ^ draw_step(j) ^ k1;
    const uint32_t third = __umulhi(m1, second) ^ m1 * member ^ (k0 + w0);
    draws d;
    d.first = (uint32_t)t.r0 + (t.index ? 0 : j.first_row) + (uint32_t)row;
    d.row = __umulhi(m1, member) ^ k0;
    d.upper = m0 * place ^ (k1 + w1);
    d.word = m1 * second ^ (k0 + 2 * w0);
    d.lower = __umulhi(m0, third) ^ (k1 + 2 * w1);
    d.last = m0 * third;
    return d;
}

/* A job with the keys of Philox's rounds from the fourth on, which are then at hand. */
struct drawn_job {
    job j;
    uint32_t keys[7][2];
};

static inline drawn_job with_keys(const job *j)
{
    drawn_job w;
    w.j = *j;
    for (uint32_t r = 0; r < 7; r++) {
        w.keys[r][0] = j->key[0] + (r + 3) * 0x9E3779B9u;
        w.keys[r][1] = j->key[1] + (r + 3) * 0xBB67AE85u;
    }
    return w;
}

static __device__ __forceinline__ uint32_t round_key(const drawn_job &w, int round, int word)
{
    return w.keys[round][word];
}
static __device__ __forceinline__ uint32_t round_key(const job &j, int round, int word)
{
    return j.key[word] + ((uint32_t)round + 3) * (word ? 0xBB67AE85u : 0x9E3779B9u);
}

/* The bits of row i of a patch's elements, as they lie: a draw is eight elements. */
template <typename JOB>
static __device__ __forceinline__ void draw_row(uint32_t bits[4], const JOB &j, const draws &d,
                                                int i)
{
    const uint32_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u;
    const uint64_t p = (uint64_t)m0 * ((d.first + (uint32_t)i) ^ d.row);
    const uint64_t q = (uint64_t)m1 * ((uint32_t)(p >> 32) ^ d.upper);
    uint32_t c0 = (uint32_t)(q >> 32) ^ d.word, c1 = (uint32_t)q, c2 = (uint32_t)p ^ d.lower,
             c3 = d.last;
#pragma unroll
    for (int round = 0; round < 7; round++) {
        const uint64_t p0 = (uint64_t)m0 * c0, p1 = (uint64_t)m1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ round_key(j, round, 0), c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ round_key(j, round, 1), c3 = (uint32_t)p0;
    }
    bits[0] = c0, bits[1] = c1, bits[2] = c2, bits[3] = c3;
}

/* Of eight products; of E2M1 with powers of two. */
template <int CODES, bool POW2>
static __device__ __forceinline__ void encode_run(uint32_t q[2], const side &s, const uint32_t w[4],
                                                  const float enc[RUN])
{
    if (CODES == CODES_E2M1) {
        q[0] = shifted_nibbles(w, enc) | nibble_signs(w, false);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) q[i] = encode_four<CODES, POW2>(s, w + i * 2, enc + i * 4);
    }
}

template <int KIND>
static __device__ __forceinline__ void store_run(uint8_t *to, const uint32_t q[2])
{
    if (kind<KIND>::HALF)
        store_4(to, q[0]);
    else
        store_8(to, q[0], q[1]);
}

/* ---- parts of lines that begin anywhere -------------------------------------------------------
 */

enum { SECTOR = 32 }; /* bytes */

/* The last bytes of sixteen, from `from` on, which is not 0; the first ones, before `to`. */
static __device__ __forceinline__ void put_tail(uint8_t *p, const uint32_t q[4], int from)
{
    const uint32_t w = one_of(q, from >> 2);
    const int words = (from + 3) & ~3;
    if (from & 1) store_1(p + from, w >> (from & 3) * 8);
    if ((from + 1) & 2) store_2(p + (from | 3) - 1, w >> 16);
    if (words & 4) store_4(p + words, words & 8 ? q[3] : q[1]);
    if (words <= 8) store_8(p + 8, q[2], q[3]);
}
static __device__ __forceinline__ void put_head(uint8_t *p, const uint32_t q[4], int to)
{
    const uint32_t w = one_of(q, to >> 2);
    if (to & 8) store_8(p, q[0], q[1]);
    if (to & 4) store_4(p + (to & 8), to & 8 ? q[2] : q[0]);
    if (to & 2) store_2(p + (to & 12), w);
    if (to & 1) store_1(p + (to & 14), w >> (to & 2) * 8);
}
