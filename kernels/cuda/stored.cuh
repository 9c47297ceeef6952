/* AdamW on one element, and the storage forms of what it reads and writes (kernels/optimizer.h):
 * the arithmetic. */
#pragma once

#include "core/master.h"
#include "core/rng.h"
#include "kernels/codec.h"
#include "kernels/cuda/fp8.cuh"
#include "kernels/optimizer.h"

#define MT_STORED static __device__ __forceinline__

/* What is the same for every element of a call, and then of a step, rounded to real once. */
template <typename R> struct adam_rates {
    R beta1, beta2, rest1, rest2, eps;
};
template <typename R> struct adam : adam_rates<R> {
    R bias1, bias2, decay, lr, clip;
};

template <typename R>
static __host__ __device__ inline adam_rates<R> adam_rates_of(const struct mt_adamw_args *a)
{
    return { (R)a->beta1, (R)a->beta2, (R)(1 - a->beta1), (R)(1 - a->beta2), (R)a->eps };
}

template <typename R>
MT_STORED adam<R> adam_of(const adam_rates<R> &rates, R decay, const struct mt_step_state *s)
{
    adam<R> c;
    (adam_rates<R> &)c = rates;
    c.bias1 = (R)s->bias1, c.bias2 = (R)s->bias2, c.decay = decay;
    c.lr = (R)s->lr, c.clip = (R)s->clip;
    return c;
}

/* Each operation rounded, in the order of NUMERICS section 6. */
template <typename R> MT_STORED void adam_element(R *p, R *m, R *v, R grad, const adam<R> &c)
{
    R g = grad * c.clip;
    *m = c.beta1 * *m + c.rest1 * g;
    *v = c.beta2 * *v + (c.rest2 * g) * g;
    R root = sqrt(*v / c.bias2);
    R u = (*m / c.bias1) / (root + c.eps);
    *p = *p - c.lr * (u + c.decay * *p);
}

/* ---- the same without a division's or a root's own cases
 * ----------------------------------------- Where every operand lies well inside f32's range, the
 * operations below are those that the compiler makes a division or a root of, and give the rounded
 * result; what is left out are their branches for other operands, which keep elements from
 * overlapping: the update was held by them, not by memory. */

/* What the fast way needs beside adam. */
struct adam_fast {
    float inverse1, inverse2; /* of bias1 and bias2 */
    bool usable;
};

/* Exponent fields of 2^-80, 2^-100 and 2^40: between these no quotient below overflows, and none
 * nor what remains of it falls below the normal numbers. */
enum { ADAM_LEAST_M = 47, ADAM_LEAST_V = 27, ADAM_MOST = 167 };

/* Of bits without a sign: those with one lie past all others. */
template <int LEAST> MT_STORED bool adam_inside(uint32_t u)
{
    return (u - ((uint32_t)LEAST << 23) <= (uint32_t)(ADAM_MOST - LEAST) << 23) | (u == 0);
}

MT_STORED float adam_inverse(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return fmaf(y, fmaf(-x, y, 1), y);
}

/* x / y, y > 0; the inverse is adam_inverse's. What remains is taken negative, which leaves a zero
 * its sign. */
MT_STORED float adam_quotient(float x, float y, float inverse)
{
    const float q = x * inverse;
    return fmaf(-inverse, fmaf(y, q, -x), q);
}

MT_STORED float adam_root(float x)
{
    const float some = fmaxf(x, FLT_MIN); /* of a 0, a root whose product with it is 0 */
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(some));
    const float root = x * y, half = 0.5f * y;
    return fmaf(fmaf(-root, root, x), half, root);
}

MT_STORED adam_fast adam_fast_of(const adam<float> &c)
{
    bool usable = c.bias1 >= 0x1p-24f && c.bias1 <= 1 && c.bias2 >= 0x1p-24f && c.bias2 <= 1 &&
                  c.eps >= 0x1p-60f && c.eps <= 0x1p20f;
    return { adam_inverse(c.bias1), adam_inverse(c.bias2), usable };
}

/* adam_element where m and v >= 0 are `inside` once they are new; else false, and what is left is
 * not to be used. */
MT_STORED bool adam_element_fast(float *p, float *m, float *v, float grad, const adam<float> &c,
                                 const adam_fast &f)
{
    float g = grad * c.clip;
    *m = c.beta1 * *m + c.rest1 * g;
    *v = c.beta2 * *v + (c.rest2 * g) * g;
    float root = adam_root(adam_quotient(*v, c.bias2, f.inverse2)) + c.eps;
    float u = adam_quotient(adam_quotient(*m, c.bias1, f.inverse1), root, adam_inverse(root));
    *p = *p - c.lr * (u + c.decay * *p);
    return adam_inside<ADAM_LEAST_M>(mt_f32_bits(*m) & 0x7fffffffu) &
           adam_inside<ADAM_LEAST_V>(mt_f32_bits(*v));
}

/* The words of Philox that hold the 16 bits of elements [e, e + 4), a lane's four, of the streams
 * `first` (of m) and the one after it: a draw is of eight elements, so that of two lanes one makes
 * each. All of a warp ask together. */
MT_STORED void stored_draw(uint32_t m[2], uint32_t v[2], uint64_t seed, uint64_t e, uint32_t first,
                           uint32_t step)
{
    const bool odd = e & 4;
    const uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    const uint32_t counter[4] = { (uint32_t)(e >> 3), (uint32_t)(e >> 35), first + (odd ? 1 : 0),
                                  step };
    uint32_t all[4];
    mt_philox(all, counter, key);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t own = odd ? all[2 + i] : all[i],
                       other = __shfl_xor_sync(~0u, odd ? all[i] : all[2 + i], 1);
        m[i] = odd ? other : own, v[i] = odd ? own : other;
    }
}

/* A carry out of the mantissa of what is not finite would change what it is: NaN has one pattern,
 * and the lower half of Inf is 0. */
MT_STORED uint16_t stored_stochastic(float x, uint32_t random)
{
    uint32_t u = mt_f32_bits(x);
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (u + random) >> 16);
}

/* ---- moments of E4M3 with a scale for a block --------------------------------------------------
 */

/* The scale of a block whose largest magnitude has these bits, and what is stored, 1 / it. */
struct stored_scale {
    float scale, inverse;
};
MT_STORED stored_scale stored_scale_of(mt_codec e4m3, int32_t amax)
{
    const float x = mt_from_bits(amax), most = mt_from_bits(e4m3.max_bits);
    stored_scale s;
    if (amax && adam_inside<ADAM_LEAST_M>((uint32_t)amax)) {
        s.scale = adam_quotient(most, x, adam_inverse(x));
        s.inverse = adam_quotient(1, s.scale, adam_inverse(s.scale));
    } else {
        s.scale = mt_encode_scale(x, most, false, FLT_MAX), s.inverse = 1.0f / s.scale;
    }
    return s;
}

/* Two at a time. */
MT_STORED void stored_values(float x[2], mt_codec e4m3, uint32_t codes)
{
    if (MT_HAS_NATIVE_FP8)
        native_values(x, MT_ELEMENT_E4M3, codes);
    else
        x[0] = mt_decode(e4m3, (uint8_t)codes), x[1] = mt_decode(e4m3, (uint8_t)(codes >> 8));
}
MT_STORED uint32_t stored_codes(mt_codec e4m3, float low, float high)
{
    if (MT_HAS_NATIVE_FP8) return native_pair(MT_ELEMENT_E4M3, low, high);
    return (uint32_t)mt_encode(e4m3, low) | (uint32_t)mt_encode(e4m3, high) << 8;
}

/* NaN stays. */
MT_STORED float stored_at_most(float x, float most)
{
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
    return y;
}
/* The least codes whose values are at least low, high >= 0, the largest one if there is none: the
 * nearest, or the one after it. */
MT_STORED uint32_t stored_codes_up(mt_codec e4m3, float low, float high)
{
    const float most = mt_from_bits(e4m3.max_bits),
                y[2] = { stored_at_most(low, most), stored_at_most(high, most) };
    const uint32_t codes = stored_codes(e4m3, y[0], y[1]);
    float value[2];
    stored_values(value, e4m3, codes);
    return codes + (value[0] < y[0] ? 1 : 0) + (value[1] < y[1] ? 0x100 : 0);
}
