/* Arithmetic on packed bf16 elements and codes for the short ways of quantize and dequantize. What
 * instructions do here is what kernels/codec.h says, bit for bit. */
#pragma once

#include "kernels/cuda/quantize.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define MT_CONVERTS_FP8 1
#else
#define MT_CONVERTS_FP8 0
#endif

/* What codes look like to a kernel. */
enum { CODES_E4M3, CODES_E5M2, CODES_E2M1 };

static __host__ __device__ __forceinline__ bool mt_is_short(const side &s)
{
    int e = s.options.element;
    return !s.plain && (e == MT_ELEMENT_E4M3 || e == MT_ELEMENT_E5M2 || e == MT_ELEMENT_E2M1);
}

static __host__ __device__ __forceinline__ int mt_codes_kind(const side &s)
{
    int e = s.options.element;
    return e == MT_ELEMENT_E4M3 ? CODES_E4M3 : e == MT_ELEMENT_E5M2 ? CODES_E5M2 : CODES_E2M1;
}

static __device__ __forceinline__ int lane_of_warp(void)
{
    return (int)(threadIdx.x % 32);
}

/* As tile_at, by a whole warp: three loads one after the other for a thousand members. */
static __device__ __forceinline__ int64_t member_at_by_warp(const int64_t *first, int64_t count,
                                                            int64_t at)
{
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t step = (high - low + 31) >> 5, probe = low + lane_of_warp() * step;
        unsigned below = __ballot_sync(~0u, probe < high && first[probe] <= at);
        low += (31 - __clz((int)below)) * step; /* lane 0 probes `low` itself */
        high = low + step < high ? low + step : high;
    }
    return low;
}

/* ---- scales of a tile -------------------------------------------------------------------------
 */

/* The scales of the blocks in a tile: that of block b of line i, both counted from the tile's
 * first, lies at `at` + scale_offset, in scales. */
struct lattice {
    uint8_t *at;
    int64_t line, block; /* steps */
    bool swizzled;
};

static __device__ __forceinline__ lattice lattice_of(const side &s, const shape &p, uint8_t *scales,
                                                     int64_t line0, int64_t along0)
{
    int64_t block0 = s.whole ? 0 : along0 >> s.block_shift;
    lattice l = { scales, p.line_stride, p.block_stride, s.swizzled };
    if (s.whole || s.scale == MT_SCALE_NONE) {
        l.line = l.block = 0;
    } else if (s.swizzled) { /* a tile begins at a tile of scales */
        l.at += mt_swizzled_scale(line0, block0, p.scale_blocks);
    } else {
        int64_t line = s.shared ? line0 >> s.block_shift : line0;
        l.at +=
            (line * p.line_stride + block0 * p.block_stride) * (s.scale == MT_SCALE_F32 ? 4 : 1);
        if (s.shared) l.line = 0;
    }
    return l;
}

static __device__ __forceinline__ int64_t scale_offset(const lattice &l, int line, int block)
{
    if (l.swizzled) return (block >> 2) * 512 + (line & 31) * 16 + (line >> 5) * 4 + (block & 3);
    return line * l.line + block * l.block;
}

/* From line i to i + 1 of eight whose first is a multiple of 8; two of them to i + 2, .. */
static __device__ __forceinline__ int64_t line_step(const lattice &l)
{
    return l.swizzled ? 16 : l.line;
}
/* From line i to i + 32, and from block b to b + 1 of four whose first is a multiple of 4. */
static __device__ __forceinline__ int64_t lines_step(const lattice &l)
{
    return l.swizzled ? 4 : l.line * 32;
}
static __device__ __forceinline__ int64_t block_step(const lattice &l)
{
    return l.swizzled ? 1 : l.block;
}

/* ---- elements ---------------------------------------------------------------------------------
 */

static __device__ __forceinline__ float low_bf16(uint32_t pair)
{
    return mt_f32_from_bits(pair << 16);
}
static __device__ __forceinline__ float high_bf16(uint32_t pair)
{
    return mt_f32_from_bits(pair & 0xffff0000u);
}
static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
#if defined(__CUDA_ARCH__)
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
#else
    return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
           (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16;
#endif
}

/* The larger of unsigned 16-bit halves. */
static __device__ __forceinline__ uint32_t larger_halves(uint32_t a, uint32_t b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t w;
    asm("max.u16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
    return w;
#else
    uint32_t low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
    return low | (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16;
#endif
}

/* The smaller ones. */
static __device__ __forceinline__ uint32_t smaller_halves(uint32_t a, uint32_t b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t w;
    asm("min.u16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
    return w;
#else
    return ~larger_halves(~a, ~b);
#endif
}

/* Four words of four bytes, the first of each in y[0], .. */
static __device__ __forceinline__ void turn_bytes(uint32_t y[4], const uint32_t x[4])
{
    const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
    const uint32_t c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
    y[0] = __byte_perm(a, b, 0x5410), y[1] = __byte_perm(a, b, 0x7632);
    y[2] = __byte_perm(c, d, 0x5410), y[3] = __byte_perm(c, d, 0x7632);
}

/* ---- 16 bytes at a time ------------------------------------------------------------------
 */

/* One store: ptxas cuts those of C into words where registers are few. */
static __device__ __forceinline__ void store_16(void *to, uint32_t x, uint32_t y, uint32_t z,
                                                uint32_t w)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z),
                 "r"(w)
                 : "memory");
#else
    *(uint4 *)to = make_uint4(x, y, z, w);
#endif
}

/* The same of 8, 4, 2 and 1 bytes, which nobody reads in the kernel: C's go by way of a pointer
 * that may be anywhere. */
static __device__ __forceinline__ void store_8(void *to, uint32_t x, uint32_t y)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x), "r"(y));
#else
    *(uint2 *)to = make_uint2(x, y);
#endif
}
static __device__ __forceinline__ void store_4(void *to, uint32_t x)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(x));
#else
    *(uint32_t *)to = x;
#endif
}

static __device__ __forceinline__ void store_2(void *to, uint32_t x)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.b16 [%0], %1;" ::"l"(to), "h"((uint16_t)x));
#else
    *(uint16_t *)to = (uint16_t)x;
#endif
}
static __device__ __forceinline__ void store_1(void *to, uint32_t x)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "r"(x));
#else
    *(uint8_t *)to = (uint8_t)x;
#endif
}

/* To shared memory, on their way; past the first `bytes` zeros, nothing being read there. */
static __device__ __forceinline__ void copy_16(void *to, const void *from, int bytes)
{
#if defined(__CUDA_ARCH__)
    uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(bytes)
                 : "memory");
#else
    memset(to, 0, 16);
    memcpy(to, from, (size_t)bytes);
#endif
}
static __device__ __forceinline__ void copy_16(void *to, const void *from)
{
#if defined(__CUDA_ARCH__)
    uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#else
    memcpy(to, from, 16);
#endif
}
/* Waits for this thread's copies. */
static __device__ __forceinline__ void copies_done(void)
{
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
/* What was sent for since the last time is one group, */
static __device__ __forceinline__ void copies_sent(void)
{
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/* and a warp waits for all groups, but the last where there is `more`. */
static __device__ __forceinline__ void copies_before(bool more)
{
#if defined(__CUDA_ARCH__)
    if (more)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
    __syncwarp();
}

/* ---- decode -----------------------------------------------------------------------------------
 */

/* Two f16 values as f32. */
static __device__ __forceinline__ void wide_halves(float v[2], uint32_t h)
{
#if defined(__CUDA_ARCH__)
    v[0] = __half2float(__ushort_as_half((uint16_t)h));
    v[1] = __half2float(__ushort_as_half((uint16_t)(h >> 16)));
#else
    v[0] = mt_f16_load((uint16_t)h), v[1] = mt_f16_load((uint16_t)(h >> 16));
#endif
}

/* The values of the codes in the two bytes of `codes`; c: their codec. */
template <int CODES>
static __device__ __forceinline__ void byte_pair_values(float v[2], const mt_codec &c,
                                                        uint32_t codes)
{
#if MT_CONVERTS_FP8
    native_values(v, CODES == CODES_E4M3 ? MT_ELEMENT_E4M3 : MT_ELEMENT_E5M2, codes & 0xffff);
#else
    v[0] = mt_decode(c, (uint8_t)codes), v[1] = mt_decode(c, (uint8_t)(codes >> 8));
#endif
}

/* The values of E2M1 codes that lie in bits [0, 4) and [16, 20), or where HIGH in the four above
 * each: as f16 subnormals and normals they are the code's value times 2^-14. */
template <bool HIGH>
static __device__ __forceinline__ void nibble_pair_values(float v[2], uint32_t w)
{
    uint32_t h = (w << (HIGH ? 5 : 9) & 0x0e000e00u) | (w << (HIGH ? 8 : 12) & 0x80008000u);
#if defined(__CUDA_ARCH__)
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(h) : "r"(0x74007400u)); /* 2^14 */
    wide_halves(v, h);
#else
    wide_halves(v, h);
    v[0] *= 0x1p14f, v[1] *= 0x1p14f;
#endif
}

/* ---- encode -----------------------------------------------------------------------------------
 *
 * Sixteen elements are eight words of two bf16 elements, the even one below; so are their random
 * bits, two 16-bit draws a word. */

/* The larger magnitudes of two words' elements as bf16 bits, above 0x7f80 if there is a NaN, with
 * any sign. */
static __device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t w;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
    return w;
#else
    return larger_halves(a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

/* That of the words' elements, without signs. */
template <int COUNT> static __device__ __forceinline__ uint32_t magnitudes(const uint32_t w[COUNT])
{
    uint32_t most = w[0];
#pragma unroll
    for (int i = 1; i < COUNT; i++) most = larger_pair(most, w[i]);
    return most & 0x7fff7fffu;
}
/* The same of the smaller ones, for words without NaN. */
static __device__ __forceinline__ uint32_t smaller_pair(uint32_t a, uint32_t b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t w;
    asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(a), "r"(b));
    return w;
#else
    a &= 0x7fff7fffu, b &= 0x7fff7fffu;
    uint32_t low = (a & 0xffff) < (b & 0xffff) ? a & 0xffff : b & 0xffff;
    return low | (a >> 16 < b >> 16 ? a >> 16 : b >> 16) << 16;
#endif
}

static __device__ __forceinline__ uint32_t larger_half(uint32_t w)
{
    return (w & 0xffff) > w >> 16 ? w & 0xffff : w >> 16;
}

/* The same where there are NaNs, which do not count: from what was found before in the low half,
 * and the number of NaNs in the high half, to both after two more elements. */
static __device__ __noinline__ uint32_t found_among_nans(uint32_t w, uint32_t found)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t a = w >> 16 * i & 0x7fff, most = found & 0xffff;
        found += a > 0x7f80 ? 0x10000 : a > most ? a - most : 0;
    }
    return found;
}

static __device__ __forceinline__ float element_of(const uint32_t w[], int i)
{
    return i % 2 ? high_bf16(w[i / 2]) : low_bf16(w[i / 2]);
}

/* fp8 codes of products. */
static __device__ __forceinline__ void encode_bytes(uint32_t q[4], const side &s,
                                                    const uint32_t w[8], const float enc[16])
{
#if MT_CONVERTS_FP8
    if (s.options.element == MT_ELEMENT_E4M3) {
#pragma unroll
        for (int i = 0; i < 16; i += 4)
            q[i / 4] = native_pair(MT_ELEMENT_E4M3, element_of(w, i) * enc[i],
                                   element_of(w, i + 1) * enc[i + 1]) |
                       native_pair(MT_ELEMENT_E4M3, element_of(w, i + 2) * enc[i + 2],
                                   element_of(w, i + 3) * enc[i + 3])
                           << 16;
    } else {
#pragma unroll
        for (int i = 0; i < 16; i += 4)
            q[i / 4] = native_pair(MT_ELEMENT_E5M2, element_of(w, i) * enc[i],
                                   element_of(w, i + 1) * enc[i + 1]) |
                       native_pair(MT_ELEMENT_E5M2, element_of(w, i + 2) * enc[i + 2],
                                   element_of(w, i + 3) * enc[i + 3])
                           << 16;
    }
#else
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
        q[i / 4] = 0;
        for (int e = 0; e < 4; e++)
            q[i / 4] |= (uint32_t)mt_encode(s.codec, element_of(w, i + e) * enc[i + e]) << 8 * e;
    }
#endif
}

/* The least of two positive floats and a number, as bits: NaN is above all. */
static __device__ __forceinline__ uint32_t least_of(float a, float b, float most)
{
    const int x = (int)mt_f32_bits(a), y = (int)mt_f32_bits(b), top = (int)mt_f32_bits(most);
#if defined(__CUDA_ARCH__)
    return (uint32_t)__vimin3_s32(x, y, top);
#else
    const int least = x < y ? x : y;
    return (uint32_t)(top < least ? top : least);
#endif
}

/* The code of E2M1 of a magnitude is that of its value in units of 1/2 below 2, of 1 less 2 below
 * 4, of 2 less 4 above: the least of two lines, each rounded once, ties to even. The second bends
 * at 4, where its sum is 2^24: from there on a float's last bit is twice as much. As bits the sums
 * are E2M1_BASE more than the code; NaN becomes the largest code. */
static constexpr uint32_t E2M1_BASE = 0x4b800000u - 6;

static __device__ __forceinline__ uint32_t e2m1_above(float a)
{
    const float bend = 0x1p24f;
    return least_of(fmaf(a, 2.0f, bend - 6.0f), a + (bend - 4.0f), bend + 2.0f);
}
/* The same in 65536ths, not rounded but cut. */
static constexpr uint32_t E2M1_UNITS_BASE = 0x4b800000u - (6 << 16);

static __device__ __forceinline__ uint32_t e2m1_units_above(float a)
{
    const float bend = 0x1p24f;
    return least_of(__fmaf_rz(a, 0x1p17f, bend - 0x6p16f), __fmaf_rz(a, 0x1p16f, bend - 0x4p16f),
                    bend + 0x2p16f);
}

/* Bits of a where the mask has them, else of b, in one instruction. */
static __device__ __forceinline__ uint32_t pick_bits(uint32_t mask, uint32_t a, uint32_t b)
{
#if defined(__CUDA_ARCH__)
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(y) : "r"(mask), "r"(a), "r"(b));
    return y;
#else
    return (a & mask) | (b & ~mask);
#endif
}

/* Sign bits of eight elements where E2M1 codes have them; a NaN has none. */
static __device__ __forceinline__ uint32_t nibble_signs(const uint32_t w[4], bool nans)
{
    uint32_t a = __byte_perm(w[0], w[1], 0x7531), b = __byte_perm(w[2], w[3], 0x7531);
    uint32_t even = __byte_perm(a, b, 0x6420), odd = __byte_perm(a, b, 0x7531);
    uint32_t signs = pick_bits(0x0f0f0f0fu, even >> 4, odd) & 0x88888888u;
    if (nans) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if ((w[i / 2] >> i % 2 * 16 & 0x7fff) > 0x7f80) signs &= ~(8u << 4 * i);
    }
    return signs;
}

/* E2M1 codes, less their signs, of eight products; cut after adding where `random` is not NULL. */
static __device__ __forceinline__ uint32_t magnitude_nibbles(const uint32_t w[4],
                                                             const float enc[8],
                                                             const uint32_t *random)
{
    uint32_t q = 0u - E2M1_BASE * 0x11111111u, x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float a = fabsf(element_of(w, i)) * enc[i];
        if (random) /* bits above 65536ths are codes */
            x[i] = e2m1_units_above(a) + (random[i / 2] >> i % 2 * 16 & 0xffff);
        else
            q += e2m1_above(a) << 4 * i;
    }
    if (!random) return q;
#pragma unroll
    for (int i = 0; i < 2; i++)
        x[i] = __byte_perm(__byte_perm(x[i], x[i + 2], 0x0062),
                           __byte_perm(x[i + 4], x[i + 6], 0x0062), 0x5410);
    return x[0] + (x[1] << 4) - (E2M1_UNITS_BASE >> 16 & 0xff) * (0x01010101u * 17);
}

/* The same of products with powers of two, two elements at a time: bf16 holds a quarter of each, as
 * do the lines, which round once so. The second bends at 64. */
static __device__ __forceinline__ uint32_t shifted_nibbles(const uint32_t w[4], const float enc[8])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t base = 0x4280 - 6;
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t by =
            __byte_perm(mt_f32_bits(enc[i * 2]), mt_f32_bits(enc[i * 2 + 1]), 0x7632);
        uint32_t half, quarter, a, b;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(half) : "r"(by), "r"(0x3f003f00));
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(quarter) : "r"(by), "r"(0x3e803e80));
        asm("fma.rn.bf16x2 %0, %2, %3, %5;\n\t" /* value / 2 + 62.5 */
            "fma.rn.bf16x2 %1, %2, %4, %6;"     /* value / 4 + 63 */
            : "=&r"(a), "=r"(b)
            : "r"(w[i] & 0x7fff7fffu), "r"(half), "r"(quarter), "r"(0x427a427a), "r"(0x427c427c));
        x[i] = __vimin3_s16x2(a, b, 0x42814281); /* 64.5; NaN is above all */
    }
    const uint32_t a = __byte_perm(x[0], x[1], 0x6240), b = __byte_perm(x[2], x[3], 0x6240);
    return __byte_perm(a, b, 0x5410) + (__byte_perm(a, b, 0x7632) << 4) -
           (base & 0xff) * (0x01010101u * 17);
#else
    return magnitude_nibbles(w, enc, NULL);
#endif
}
