/* Element casts of NUMERICS section 2, one branch-free function for all element types: what differs
 * is data. Loops over them vectorise; every step is one IEEE operation or an integer one. The same
 * source is the CPU's and the GPU's; but for mt_codec_of, which reads the host's element table. */
#pragma once

#include <float.h>

#include "core/format.h"

#if defined(__CUDACC__)
#define MT_CODEC_INLINE static __host__ __device__ __forceinline__
#else
#define MT_CODEC_INLINE static inline __attribute__((always_inline))
#endif

/* An element type as the casts want it. Codes are sign and magnitude. Bit patterns are signed here:
 * magnitudes are not negative, and signed comparisons are what vector units have. */
typedef struct mt_codec {
    int32_t shift;      /* f32 mantissa bits below the code's */
    int32_t sign;       /* from f32's sign bit down to the code's */
    int32_t max_bits;   /* largest finite value, as f32 bits */
    int32_t min_normal; /* smallest normal value, as f32 bits */
    int32_t rebias;     /* (127 - bias) << mantissa */
    int32_t magic;      /* from a binade to the number that rounds in it, see mt_encode_number */
    int32_t magnitude;  /* mask of a code's magnitude; the sign bit is the next one */
    int32_t nan_code, max_code, inf_code;
    float steps; /* 2^16 / step of the subnormals */
    float step;
} mt_codec;

MT_CODEC_INLINE float mt_pow2(int e) /* -126..127 */
{
    return mt_f32_from_bits((uint32_t)(e + 127) << 23);
}

MT_CODEC_INLINE int32_t mt_bits(float x)
{
    return (int32_t)mt_f32_bits(x);
}

MT_CODEC_INLINE float mt_from_bits(int32_t bits)
{
    return mt_f32_from_bits((uint32_t)bits);
}

static inline mt_codec mt_codec_of(mt_element element)
{
    const mt_element_info *e = &mt_elements[element];
    int least = 1 - e->bias - e->mantissa; /* exponent of the subnormals' step */
    int32_t rebias = (127 - e->bias) << e->mantissa, first = rebias + (1 << e->mantissa);
    mt_codec c;
    c.shift = 23 - e->mantissa;
    c.sign = 31 - e->sign;
    c.max_bits = mt_bits(e->max);
    c.min_normal = (128 - e->bias) << 23;
    c.rebias = rebias;
    c.magic = ((23 - e->mantissa) << 23) + (-first & 0xff);
    c.magnitude = (1 << e->sign) - 1;
    c.nan_code = e->nan_code;
    c.max_code = e->max_code;
    c.inf_code = e->inf_code;
    c.steps = mt_pow2(16 - least);
    c.step = mt_pow2(least);
    return c;
}

/* The code of y that is not NaN: nearest even, saturating. |y| is added to a number whose ulp is
 * the code's step at |y|: the sum's low bits are then |y| in steps, rounded. A normal's steps begin
 * at 1 << mantissa, which its exponent field counts too; that and the bias are taken off
 * beforehand, an even number of steps in the low bits of what is added. */
MT_CODEC_INLINE int32_t mt_encode_number(mt_codec c, float y)
{
    int32_t u = mt_bits(y), magnitude = u & 0x7fffffff;
    int32_t a = magnitude < c.max_bits ? magnitude : c.max_bits, binade = a & 0x7f800000;
    binade = binade > c.min_normal ? binade : c.min_normal;
    int32_t sum = mt_bits(mt_from_bits(a) + mt_from_bits(binade + c.magic));
    return ((sum + (binade >> c.shift)) & c.magnitude) | (u >> c.sign & (c.magnitude + 1));
}

/* The same for any y; NaN to the code the format has for it. */
MT_CODEC_INLINE int32_t mt_encode(mt_codec c, float y)
{
    int32_t code = mt_encode_number(c, y);
    return (mt_bits(y) & 0x7fffffff) > 0x7f800000 ? c.nan_code : code;
}

/* Stochastic rounding with 16 random bits: 2^16 |y| in units of the local step, plus random, cut.
 */
MT_CODEC_INLINE int32_t mt_encode_stochastic(mt_codec c, float y, int32_t random)
{
    int32_t u = mt_bits(y), magnitude = u & 0x7fffffff;
    int32_t a = magnitude < c.max_bits ? magnitude : c.max_bits;
    int32_t small = a < c.min_normal ? a : 0;
    int32_t subnormal = (int32_t)(mt_from_bits(small) * c.steps);
    int32_t normal = (a >> (c.shift - 16)) - (c.rebias << 16);
    int32_t units = a < c.min_normal ? subnormal : normal;
    int32_t code = (units + random) >> 16 | (u >> c.sign & (c.magnitude + 1));
    return magnitude > 0x7f800000 ? c.nan_code : code;
}

/* The value of a finite code; bits above it are ignored. */
MT_CODEC_INLINE float mt_decode_number(mt_codec c, uint8_t code)
{
    int32_t u = code, m = u & c.magnitude, sign = u & (c.magnitude + 1);
    int32_t subnormal = mt_bits((float)m * c.step), normal = (m + c.rebias) << c.shift;
    int32_t value = m < 1 << (23 - c.shift) ? subnormal : normal;
    return mt_from_bits(value | (int32_t)((uint32_t)sign << c.sign));
}

/* The value of any code: Inf and NaN too. */
MT_CODEC_INLINE float mt_decode(mt_codec c, uint8_t code)
{
    int32_t value = mt_bits(mt_decode_number(c, code)), m = code & c.magnitude;
    int32_t beyond = m == c.inf_code ? 0x7f800000 | (value & INT32_MIN) : 0x7fc00000;
    return mt_from_bits(m > c.max_code ? beyond : value);
}

/* |x| as f32 bits, 0 for NaN: their order is that of magnitudes. */
MT_CODEC_INLINE int32_t mt_magnitude_bits(float x)
{
    int32_t a = mt_bits(x) & 0x7fffffff;
    return a > 0x7f800000 ? 0 : a;
}

/* F(amax, max, 0, pow2, overflow): the scale before a cast to elements up to `max`. */
MT_CODEC_INLINE float mt_encode_scale(float amax, float max, bool pow2, float overflow)
{
    float s = max / amax;
    s = s > FLT_MAX ? overflow : s;
    s = mt_from_bits(mt_bits(s) & (pow2 ? 0x7f800000 : 0x7fffffff));
    return amax > 0.0f && amax <= FLT_MAX ? s : 1.0f;
}

/* 2^(e - 127) of an E8M0 scale below 255. */
MT_CODEC_INLINE float mt_e8m0_scale(int32_t e)
{
    return mt_from_bits(e == 0 ? 0x00400000 : e << 23);
}

/* The exponent byte of an E8M0 scale: rounded up from amax / max (`inverse` is 1 / max), or by the
 * OCP rule; 0xFE for Inf. */
MT_CODEC_INLINE int32_t mt_e8m0_exponent(float amax, float inverse, int32_t emax, bool floor)
{
    int32_t a = mt_bits(amax), v = mt_bits(amax * inverse);
    /* one more for a mantissa above 0, of subnormals above one half */
    int32_t up = (v + (v > 0x7fffff ? 0x7fffff : 0x3fffff)) >> 23;
    int32_t down = (a >> 23) - emax, exponent = floor ? down : up;
    exponent = exponent > 0 ? exponent : 0;
    return exponent < 0xfe && a < 0x7f800000 ? exponent : 0xfe;
}

/* What values are multiplied by under an E4M3 block scale of value dec in all. */
MT_CODEC_INLINE float mt_nvfp4_encode(float dec)
{
    float inverse = 1.0f / dec;
    return inverse < FLT_MAX ? inverse : FLT_MAX;
}

/* Conversions that the storage of plain formats needs in loops; those of core/dtype.h, branch-free.
 */
MT_CODEC_INLINE float mt_f16_load(uint16_t h)
{
    uint32_t m = h & 0x7fffu, sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t subnormal = mt_f32_bits((float)(int32_t)m * 0x1p-24f);
    uint32_t normal = (m << 13) + (112u << 23), special = (m << 13) | 0x7f800000u;
    return mt_f32_from_bits((m < 0x400u ? subnormal : m < 0x7c00u ? normal : special) | sign);
}

MT_CODEC_INLINE uint16_t mt_f16_store(float x)
{
    uint32_t u = mt_f32_bits(x), a = u & 0x7fffffffu;
    uint32_t capped = a < 0x477ff000u ? a : 0x477ff000u; /* 65520: rounds to Inf */
    uint32_t subnormal = mt_f32_bits(mt_f32_from_bits(capped) + 0.5f) - 0x3f000000u;
    uint32_t normal = ((capped + 0xfffu + (capped >> 13 & 1u)) >> 13) - (112u << 10);
    uint32_t h = (a < 0x38800000u ? subnormal : normal) | (u & 0x80000000u) >> 16;
    return (uint16_t)(a > 0x7f800000u ? 0x7fffu : h);
}
