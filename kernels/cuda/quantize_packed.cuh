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
/* Waits for this thread's copies. */
static __device__ __forceinline__ void copies_done(void)
{
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
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
