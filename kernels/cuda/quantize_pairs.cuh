/* Inside quantize to nvfp4: codes to nearest, two elements at a time. Codes are the least of two
 * lines (e2m1_above), which are f16 sums of products: elements, brought to f16's range by a power
 * of two, have eight bits of eleven, and products are not rounded. It takes no more of factors than
 * that all elements become the codes that their products with enc would: those of eleven bits do
 * where it is chosen what elements are made more by, too. Which ones depends on the mantissas of
 * the member's amax and of the scale alone: tables have them, of quantize_pairs.py. */
#pragma once

#include "kernels/cuda/quantize_decoded.cuh"
#include "kernels/cuda/quantize_nvfp4.cuh"

/* By the mantissa of amax, for each of eight mantissas of scales, a byte from bit 0 on: how many of
 * its last bits the first line's factor is above the least that the member has, the second one's,
 * three bits each, and by how many its other factor is above its first. */
static __constant__ uint64_t MT_PAIR_FACTORS[128] = {
    0x0909090009090909, 0x0040000900000000, 0x0001000900000900, 0x0908090009090909,
    0x1b122c0012242434, 0x191b12881a246224, 0x0001000000000900, 0x0040000900000009,
    0x0908090909091209, 0x0001000900000000, 0x19481a001b190900, 0x0001000900000000,
    0x091b1b881b1b1a1b, 0x0040000000090009, 0x0909090909090009, 0x1212101209121212,
    0x0000000000000000, 0x0000000000000001, 0x0000000900000900, 0x091303240c244191,
    0x090a000909091209, 0x0008090909090908, 0x1248091212091212, 0x0001000900000000,
    0x0900000900000000, 0x0040000000090009, 0x0000000000000000, 0x0001000009000000,
    0x0000000000000000, 0x0000000000000000, 0x0001000000000000, 0x0948090909090909,
    0x0008090909090909, 0x1a1b1b512412a023, 0x00990963011b1c12, 0x0000000900000000,
    0x0009090909090909, 0x0948091209090909, 0x0102090901001201, 0x0909090009090909,
    0x0000000000000000, 0x0001000900000000, 0x0000000900000900, 0x0908090909090909,
    0x0909090009091209, 0x0001000000000000, 0x0000000000000000, 0x080a090009080809,
    0x0909091209090009, 0x0000000000000000, 0x0909090009090909, 0x0001000900000000,
    0x1211111212121250, 0x0001000900000000, 0x0000000000000000, 0x0000000900000009,
    0x0000000000000900, 0x0000000000000000, 0x0000000000000000, 0x0001000000000000,
    0x0900000900000000, 0x1281099900c21324, 0x0000000900000000, 0x0001000000000000,
    0x0909000912090000, 0x0001000000000000, 0x0000000000000000, 0x0040000000000009,
    0x0000000000000000, 0x0001000909000000, 0x0000000900090000, 0x0908090909090909,
    0x0001000000000900, 0x0040000900000000, 0x0908090909090909, 0x0001000000000000,
    0x0000000000000000, 0x0909090909000909, 0x0000000900000000, 0x0948090909090909,
    0x0909090009090909, 0x0000000901000000, 0x0000000000000000, 0x0000004800000000,
    0x0908090009090909, 0x0040000000000009, 0x0001000000000000, 0x0000000000090000,
    0x1b1212000909511b, 0x09121b8809090901, 0x0000004800000000, 0x0948091209090912,
    0x0000000000000900, 0x0001000000000000, 0x0040000900000000, 0x0001000000000900,
    0x0000000000000000, 0x0948090909090912, 0x0000000009000000, 0x0001000000000000,
    0x2c881209242b121b, 0x0000000900000000, 0x0908090909090909, 0x0000000000000000,
    0x00090909080a0909, 0x0000000000000000, 0x0040000900090009, 0x0001000900000000,
    0x0002000900000000, 0x0040000000000900, 0x0a121b120a028103, 0x0809090909090909,
    0x1b88246112090921, 0x0908090009090909, 0x0000000000000000, 0x1249000909090909,
    0x0000000900000900, 0x0c241224001b1244, 0x0949090909000909, 0x0908091209090909,
    0x0000000000000901, 0x0949090909090900, 0x0908090909090909, 0x0909090909080909,
    0x0000000000000000, 0x0001000900000000, 0x0000000000000000, 0x0040000900000009,
};
/* What elements are made more by, in eighths of their last bit, plus 8, in the upper four bits; in
 * the lower ones how many bits the least factor is above enc, plus 8. 0: there are none. */
static __constant__ uint8_t MT_PAIR_MORE[128] = {
    0x87, 0x88, 0x88, 0x87, 0xb2, 0xa4, 0x88, 0x88, 0x87, 0x88, 0xa5, 0x88, 0xa5, 0x88, 0x87, 0x96,
    0x00, 0x88, 0x88, 0x68, 0x87, 0x87, 0x96, 0x88, 0x88, 0x88, 0x00, 0x88, 0x00, 0x88, 0x88, 0x87,
    0x87, 0xa4, 0x58, 0x88, 0x87, 0x87, 0x78, 0x87, 0x00, 0x88, 0x88, 0x87, 0x87, 0x88, 0x00, 0x87,
    0x87, 0x00, 0x87, 0x88, 0xa6, 0x88, 0x00, 0x88, 0x88, 0x88, 0x00, 0x88, 0x88, 0x58, 0x88, 0x88,
    0x87, 0x88, 0x88, 0x88, 0x00, 0x88, 0x88, 0x87, 0x88, 0x88, 0x87, 0x88, 0x00, 0x87, 0x88, 0x87,
    0x87, 0x88, 0x00, 0x88, 0x87, 0x88, 0x88, 0x88, 0x5a, 0x59, 0x88, 0x87, 0x88, 0x88, 0x88, 0x88,
    0x00, 0x87, 0x88, 0x88, 0xb3, 0x88, 0x87, 0x00, 0x87, 0x88, 0x88, 0x88, 0x78, 0x88, 0x68, 0x87,
    0xb4, 0x87, 0x88, 0x87, 0x88, 0x58, 0x87, 0x87, 0x88, 0x87, 0x87, 0x87, 0x00, 0x88, 0x88, 0x88,
};

enum {
    LEAST_EXPONENT = 40, /* of amax, so that enc and the powers of two are normal numbers */
    MOST_EXPONENT = 156
};

/* What makes f16 numbers of a member's elements. */
struct pair_level {
    uint32_t power, more; /* two bf16 numbers, what is added to two f16 ones' bits */
    uint32_t most;        /* magnitude that elements may have: 0 where nothing is known of them */
};

static __device__ __forceinline__ pair_level pair_level_of(float amax)
{
    const uint32_t bits = mt_f32_bits(amax), exponent = bits >> 23;
    const uint32_t more = MT_PAIR_MORE[bits >> 16 & 0x7f];
    pair_level l = {};
    if (!more || bits & 0xffff || exponent < LEAST_EXPONENT || exponent > MOST_EXPONENT) return l;
    l.power = (MOST_EXPONENT + 1 - exponent) * 0x00800080u;
    l.more = ((more >> 4) - 8) * 0x00010001u;
    l.most = bits >> 16;
    return l;
}

/* f16 factors under a scale as it is stored: both of the first line, and the second one's twice. */
static __device__ __forceinline__ uint2 factors_of(const job &j, const pair_level &l, float amax,
                                                   float enc, uint32_t stored)
{
    const uint32_t bits = mt_f32_bits(amax), mantissa = bits >> 16 & 0x7f;
    float v[2];
    if (l.most == 0 || stored == 0) return make_uint2(0, 0);
    byte_pair_values<CODES_E4M3>(v, j.e4m3, stored);
    const uint32_t at = mt_f32_bits(v[0]) >> 20 & 7;
    const uint32_t above = (uint32_t)(MT_PAIR_FACTORS[mantissa] >> at * 8) & 0xff;
    const float by = 2 * enc * mt_f32_from_bits((bits & 0x7f800000u) - (15u << 23));
    const uint32_t least =
        __half_as_ushort(__float2half_rn(by)) + (MT_PAIR_MORE[mantissa] & 15) - 8;
    const uint32_t first = least + (above & 7);
    return make_uint2(first | (first + (above >> 6)) << 16,
                      (least + (above >> 3 & 7)) * 0x00010001u);
}

/* Two elements' magnitudes; not 0, so that what is added may be less than 0. */
static __device__ __forceinline__ uint32_t f16_pair(uint32_t w, const pair_level &l)
{
    uint32_t y = w;
#if defined(__CUDA_ARCH__)
    asm("{\n\t.reg .b32 a;\n\tabs.bf16x2 a, %1;\n\tfma.rn.bf16x2 %0, a, %2, %3;\n\t}"
        : "=r"(y)
        : "r"(w), "r"(l.power), "r"(0x00010001));
#endif
    return y * 8 + l.more;
}

/* The bits of both lines' least, MT_PAIR_BASE more than codes; the second line bends at 4096. Where
 * products with the first one's factors are next to each other, half of their sum is the even one:
 * of a tie that none of eleven bits makes. */
enum { MT_PAIR_BASE = 0x6c00 - 6 };

static __device__ __forceinline__ uint32_t pair_above(uint32_t x, uint32_t lower, uint32_t upper,
                                                      uint32_t second)
{
    uint32_t a = x, b = x;
#if defined(__CUDA_ARCH__)
    asm("{\n\t.reg .b32 c;\n\t"
        "fma.rn.f16x2 %0, %2, %3, %6;\n\tfma.rn.f16x2 c, %2, %4, %6;\n\t" /* + 2042 */
        "fma.rn.f16x2 %1, %2, %5, %7;\n\tadd.rn.f16x2 %0, %0, c;\n\t}"    /* + 4088 */
        : "=&r"(a), "=&r"(b)
        : "r"(x), "r"(lower), "r"(upper), "r"(second), "r"(0x67fa67fa), "r"(0x6bfc6bfc));
#endif
    return __vimin3_u16x2(a, b, 0x6c016c01); /* 4100 */
}

/* Signs of two words' elements where codes of columns have them: two of each. */
enum { MT_PAIR_SIGNS = 0xfbd9 }; /* a byte of sign bits for each element */

/* Codes of a row's eight elements from their lines. */
static __device__ __forceinline__ uint32_t pairs_of_row(const uint32_t above[4],
                                                        const uint32_t w[4])
{
    const uint32_t base = MT_PAIR_BASE * 0x10001u * 257u;
    uint32_t q[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        q[i] = above[i * 2] + (above[i * 2 + 1] << 8) - base +
               (bytes_at(w[i * 2], w[i * 2 + 1], MT_PAIR_SIGNS) & 0x08080808u);
    return __byte_perm(q[0], q[1], 0x5410) + (__byte_perm(q[0], q[1], 0x7632) << 4);
}

/* Codes of four rows of two columns from their lines, joined. */
static __device__ __forceinline__ uint32_t pairs_of_columns(uint32_t above, uint32_t w0,
                                                            uint32_t w1, uint32_t w2, uint32_t w3)
{
    const uint32_t base = MT_PAIR_BASE * 0x10001u * 0x1111u, even = 0x0f0f0f0fu;
    const uint32_t signs =
        (bytes_at(w0, w2, MT_PAIR_SIGNS) & even) | (bytes_at(w1, w3, MT_PAIR_SIGNS) & ~even);
    return above - base + (signs & 0x88888888u);
}
