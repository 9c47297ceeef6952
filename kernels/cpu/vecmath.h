/* Functions of a real that a compiler inlines into vector loops. */
#pragma once

#include "kernels/cpu/variant.h"

#if MT_ELEM_BITS == 64
typedef int64_t mt_real_bits;
#define MT_SIGN_BIT INT64_MIN
#else
typedef int32_t mt_real_bits;
#define MT_SIGN_BIT INT32_MIN
#endif

MT_INLINE mt_real_bits mt_to_bits(mt_real x)
{
    mt_real_bits u;
    memcpy(&u, &x, sizeof u);
    return u;
}

MT_INLINE mt_real mt_from_bits(mt_real_bits u)
{
    mt_real x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* x with its magnitude cut to `limit`; NaN stays. Integer comparisons, since compilers leave a loop
 * with floating ones alone where those may raise a flag. */
MT_INLINE mt_real mt_clamp(mt_real x, mt_real limit)
{
    mt_real_bits u = mt_to_bits(x), sign = u & MT_SIGN_BIT, a = u ^ sign;
    a = a > mt_to_bits(limit) && a <= mt_to_bits((mt_real)INFINITY) ? mt_to_bits(limit) : a;
    return mt_from_bits(a | sign);
}

/* Integers in the order of the reals they stand for, and back: maxima that every compiler
 * vectorises. NaN sorts outside the infinities, on the side of its sign. */
MT_INLINE mt_real_bits mt_to_order(mt_real x)
{
    mt_real_bits u = mt_to_bits(x);
    return u < 0 ? u ^ ~MT_SIGN_BIT : u;
}

MT_INLINE mt_real mt_from_order(mt_real_bits u)
{
    return mt_from_bits(u < 0 ? u ^ ~MT_SIGN_BIT : u);
}

/* exp(x) within 1 ulp over the whole range, gradual underflow included; exp(+Inf) = +Inf, exp(-Inf)
 * = 0, NaN stays NaN.
 *
 * exp(x) = 2^n exp(r), r = x - n ln 2, |r| <= ln(2) / 2. Adding `shift` rounds to an integer and
 * leaves that integer in the low bits of the sum. 2^n is applied as two factors, so that neither
 * leaves the range of normal numbers and a subnormal result is rounded once. Clamping keeps n
 * small; beyond the clamps the result is 0 or Inf anyway. */
#if MT_ELEM_BITS == 64
/* 2^n for an integer kept in the low bits of a sum with shift. */
MT_INLINE double mt_exp_scale(double n_shifted)
{
    uint64_t u;
    memcpy(&u, &n_shifted, sizeof u);
    u = (u + 1023u) << 52;
    memcpy(&n_shifted, &u, sizeof u);
    return n_shifted;
}

MT_INLINE double mt_exp(double x)
{
    const double shift = 0x1.8p52;
    x = mt_clamp(x, 746);
    double n = (x * 0x1.71547652b82fep+0 + shift) - shift; /* 1 / ln 2 */
    double r = (x - n * 0x1.62e42feep-1) -
               n * 0x1.a39ef35793c76p-33; /* ln 2 in two parts, the first product exact */
    double p = 1.0 / 6227020800;          /* Taylor: the rest is below 2^-57 */
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * (r * r) + r + 1;
    double half = n * 0.5 + shift, rest = n - (half - shift) + shift;
    return p * mt_exp_scale(half) * mt_exp_scale(rest);
}
#else
/* 2^n for an integer kept in the low bits of a sum with shift. */
MT_INLINE float mt_exp_scale(float n_shifted)
{
    return mt_f32_from_bits((mt_f32_bits(n_shifted) + 127u) << 23);
}

MT_INLINE float mt_exp(float x)
{
    const float shift = 0x1.8p23f;
    x = mt_clamp(x, 104);
    float n = (x * 0x1.715476p+0f + shift) - shift; /* 1 / ln 2 */
    float r = (x - n * 0x1.63p-1f) -
              n * -0x1.bd0106p-13f; /* ln 2 in two parts, the first product exact */
    float p = 1.9875691500e-4f;     /* minimax, Cephes expf */
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1;
    float half = n * 0.5f + shift, rest = n - (half - shift) + shift;
    return p * mt_exp_scale(half) * mt_exp_scale(rest);
}
#endif
