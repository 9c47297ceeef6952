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

/* a b + c: fused where that is one instruction, since exp is most of the time of softmax and
 * SwiGLU. */
MT_INLINE mt_real mt_multiply_add(mt_real a, mt_real b, mt_real c)
{
#if !defined(__FMA__) && !defined(__ARM_FEATURE_FMA)
    return a * b + c;
#elif MT_ELEM_BITS == 64
    return __builtin_fma(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

/* exp(x) within 1.1 ulp over the whole range, gradual underflow included; exp(+Inf) = +Inf,
 * exp(-Inf) = 0, NaN stays NaN.
 *
 * exp(x) = 2^n exp(r), r = x - n ln 2, |r| <= ln(2) / 2. `shift` has an ulp of 1, so that adding it
 * rounds to an integer and leaves in the low bits of the sum n + 2 bias. Halved (once down, once
 * up) and moved to the exponent these are two powers of two with product 2^n: neither leaves the
 * range of normal numbers, and a subnormal result is rounded once. Clamping keeps n small; beyond
 * the clamps the result is 0 or Inf anyway. */
#if MT_ELEM_BITS == 64
MT_INLINE double mt_exp(double x)
{
    const double shift = 0x1.8p52 + 2 * 1023;
    x = mt_clamp(x, 746);
    double sum = mt_multiply_add(x, 0x1.71547652b82fep+0, shift), n = sum - shift; /* 1 / ln 2 */
    double r = mt_multiply_add(n, -0x1.62e42feep-1, x); /* ln 2 in two parts, this product exact */
    r = mt_multiply_add(n, -0x1.a39ef35793c76p-33, r);
    double p = 1.0 / 6227020800; /* the rest of the series is below 2^-57 */
    p = mt_multiply_add(p, r, 1.0 / 479001600);
    p = mt_multiply_add(p, r, 1.0 / 39916800);
    p = mt_multiply_add(p, r, 1.0 / 3628800);
    p = mt_multiply_add(p, r, 1.0 / 362880);
    p = mt_multiply_add(p, r, 1.0 / 40320);
    p = mt_multiply_add(p, r, 1.0 / 5040);
    p = mt_multiply_add(p, r, 1.0 / 720);
    p = mt_multiply_add(p, r, 1.0 / 120);
    p = mt_multiply_add(p, r, 1.0 / 24);
    p = mt_multiply_add(p, r, 1.0 / 6);
    p = mt_multiply_add(p, r, 0.5);
    p = mt_multiply_add(p, r * r, r) + 1;
    uint64_t bits = (uint64_t)mt_to_bits(sum), half = bits >> 1;
    return p * mt_from_bits((int64_t)(half << 52)) * mt_from_bits((int64_t)((bits - half) << 52));
}
#else
MT_INLINE float mt_exp(float x)
{
    const float shift = 0x1.8p23f + 2 * 127;
    x = mt_clamp(x, 104);
    float sum = mt_multiply_add(x, 0x1.715476p+0f, shift), n = sum - shift; /* 1 / ln 2 */
    float r = mt_multiply_add(n, -0x1.63p-1f, x); /* ln 2 in two parts, this product exact */
    r = mt_multiply_add(n, 0x1.bd0106p-13f, r);
    float p = 1.9875691500e-4f; /* minimax, Cephes expf */
    p = mt_multiply_add(p, r, 1.3981999507e-3f);
    p = mt_multiply_add(p, r, 8.3334519073e-3f);
    p = mt_multiply_add(p, r, 4.1665795894e-2f);
    p = mt_multiply_add(p, r, 1.6666665459e-1f);
    p = mt_multiply_add(p, r, 5.0000001201e-1f);
    p = mt_multiply_add(p, r * r, r) + 1;
    uint32_t bits = (uint32_t)mt_to_bits(sum), half = bits >> 1;
    return p * mt_f32_from_bits(half << 23) * mt_f32_from_bits((bits - half) << 23);
}
#endif
