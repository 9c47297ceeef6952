/* Functions of a real that a compiler inlines into vector loops. */
#pragma once

#include "kernels/cpu/unroll.h"
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

#if MT_ELEM_BITS == 64
#define MT_EXP_PER_LN2  0x1.71547652b82fep+0 /* 1 / ln 2 */
#define MT_EXP_LN2_HIGH 0x1.62e42feep-1      /* ln 2 in two parts, n times this one exact */
#define MT_EXP_LN2_LOW  0x1.a39ef35793c76p-33
enum { MT_EXP_TERMS = 12 };
/* (exp(r) - 1 - r) / r^2, highest power first: the rest of the series is below 2^-57. */
static const double mt_exp_terms[MT_EXP_TERMS] = {
    1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
    1.0 / 5040,       1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,
};
#else
#define MT_EXP_PER_LN2  0x1.715476p+0f
#define MT_EXP_LN2_HIGH 0x1.63p-1f
#define MT_EXP_LN2_LOW  -0x1.bd0106p-13f
enum { MT_EXP_TERMS = 6 };
static const float mt_exp_terms[MT_EXP_TERMS] = {
    /* minimax, Cephes expf */
    1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
    4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f,
};
#endif

/* exp(x) within 1.1 ulp over the whole range, gradual underflow included; exp(+Inf) = +Inf,
 * exp(-Inf) = 0, NaN stays NaN.
 *
 * exp(x) = 2^n exp(r), r = x - n ln 2, |r| <= ln(2) / 2. `shift` has an ulp of 1, so that adding it
 * rounds to an integer and leaves in the low bits of the sum n + 2 bias. Halved (once down, once
 * up) and moved to the exponent these are two powers of two with product 2^n: neither leaves the
 * range of normal numbers, and a subnormal result is rounded once. Clamping keeps n small; beyond
 * the clamps the result is 0 or Inf anyway. */
MT_INLINE mt_real mt_exp(mt_real x)
{
#if MT_ELEM_BITS == 64
    enum { MANTISSA = 52 };
    const mt_real shift = 0x1.8p52 + 2 * 1023, limit = 746;
    typedef uint64_t unsigned_bits;
#else
    enum { MANTISSA = 23 };
    const mt_real shift = 0x1.8p23f + 2 * 127, limit = 104;
    typedef uint32_t unsigned_bits;
#endif
    x = mt_clamp(x, limit);
    mt_real sum = mt_multiply_add(x, MT_EXP_PER_LN2, shift), n = sum - shift;
    mt_real r = mt_multiply_add(n, -MT_EXP_LN2_HIGH, x);
    r = mt_multiply_add(n, -MT_EXP_LN2_LOW, r);
    mt_real p = mt_exp_terms[0];
    MT_UNROLL
    for (int i = 1; i < MT_EXP_TERMS; i++) p = mt_multiply_add(p, r, mt_exp_terms[i]);
    p = mt_multiply_add(p, r * r, r) + 1;
    unsigned_bits bits = (unsigned_bits)mt_to_bits(sum), half = bits >> 1;
    return p * mt_from_bits((mt_real_bits)(half << MANTISSA)) *
           mt_from_bits((mt_real_bits)((bits - half) << MANTISSA));
}

MT_INLINE int64_t mt_f64_bits(double x)
{
    int64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

MT_INLINE double mt_f64_from(int64_t u)
{
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* log(x) of a sum of exponentials, in double: +0 and above, or NaN. Under f32 within 2^-49 of the
 * result, which to the nearest float is as good as exact.
 *
 * x = 2^n m, m from sqrt(1/2) up to sqrt(2); log m = 2 atanh(s), s = (m - 1) / (m + 1). */
MT_INLINE double mt_log(double x)
{
#if MT_ELEM_BITS == 64
    return log(x);
#else
    const uint64_t least = 0x3fe6a09e667f3bcd, one = 0x3ff0000000000000;
    const uint64_t mantissa = ((uint64_t)1 << 52) - 1, integer = 0x4330000000000000;
    const int64_t inf = 0x7ff0000000000000;
    int64_t u = mt_f64_bits(x);
    uint64_t above = (uint64_t)u - least;
    /* 2^52 + 1023 + n, since few machines shift 64 bits with their sign or convert them. */
    double n = mt_f64_from((int64_t)(((above + one) >> 52 & 0xfff) | integer));
    double m = mt_f64_from((int64_t)((above & mantissa) + least));
    double s = (m - 1) / (m + 1), t = s * s, p = 2.0 / 17;
    MT_UNROLL
    for (int i = 15; i > 1; i -= 2) p = p * t + 2.0 / i;
    p = (n - (0x1p52 + 1023)) * 0x1.62e42fefa39efp-1 + (p * t * s + 2 * s);
    /* Masks, since compilers leave a loop alone where they see branches. */
    int64_t finite = -(int64_t)(u > 0) & -(int64_t)(u < inf), zero = -(int64_t)(u == 0);
    int64_t v = (mt_f64_bits(p) & finite) | (u & ~finite);
    return mt_f64_from((v & ~zero) | ((inf | INT64_MIN) & zero));
#endif
}
