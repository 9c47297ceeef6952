/* AdamW on one element, and the storage forms of what it reads and writes (kernels/optimizer.h):
 * the arithmetic, of the host too, so that tests without a GPU compare it with the CPU's. */
#pragma once

#include "core/master.h"
#include "core/rng.h"
#include "kernels/codec.h"
#include "kernels/optimizer.h"

#define MT_STORED static __host__ __device__ __forceinline__

/* What is the same for every element, rounded to real once. */
template <typename R> struct adam {
    R beta1, beta2, rest1, rest2, bias1, bias2, eps, decay, lr, clip;
};

template <typename R> MT_STORED adam<R> adam_of(const struct mt_adamw_args *a)
{
    const struct mt_step_state *s = a->state;
    adam<R> c;
    c.beta1 = (R)a->beta1, c.beta2 = (R)a->beta2;
    c.rest1 = (R)(1 - a->beta1), c.rest2 = (R)(1 - a->beta2);
    c.bias1 = (R)s->bias1, c.bias2 = (R)s->bias2;
    c.eps = (R)a->eps, c.decay = (R)a->decay;
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

template <int LEAST> MT_STORED bool adam_inside(float x)
{
    uint32_t u = mt_f32_bits(x) & 0x7fffffffu;
    return (u - ((uint32_t)LEAST << 23) <= (uint32_t)(ADAM_MOST - LEAST) << 23) | (u == 0);
}

MT_STORED float adam_inverse(float x)
{
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
#else
    float y = 1 / x;
#endif
    return fmaf(y, fmaf(-x, y, 1), y);
}

/* x / y; the inverse is adam_inverse's. */
MT_STORED float adam_quotient(float x, float y, float inverse)
{
    float q = x * inverse;
    q = fmaf(inverse, fmaf(-y, q, x), q);
    return x == 0 ? x : q; /* the sign of a zero */
}

MT_STORED float adam_root(float x)
{
#ifdef __CUDA_ARCH__
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
#else
    float y = 1 / sqrtf(x);
#endif
    float root = x * y, half = 0.5f * y;
    root = fmaf(fmaf(-root, root, x), half, root);
    return x == 0 ? x : root;
}

MT_STORED adam_fast adam_fast_of(const adam<float> &c)
{
    bool usable = c.bias1 >= 0x1p-24f && c.bias1 <= 1 && c.bias2 >= 0x1p-24f && c.bias2 <= 1 &&
                  c.eps >= 0x1p-60f && c.eps <= 0x1p20f;
    return { adam_inverse(c.bias1), adam_inverse(c.bias2), usable };
}

/* adam_element where m and v are `inside` once they are new; else false, and what is left is not
 * to be used. */
MT_STORED bool adam_element_fast(float *p, float *m, float *v, float grad, const adam<float> &c,
                                 const adam_fast &f)
{
    float g = grad * c.clip;
    *m = c.beta1 * *m + c.rest1 * g;
    *v = c.beta2 * *v + (c.rest2 * g) * g;
    float root = adam_root(adam_quotient(*v, c.bias2, f.inverse2)) + c.eps;
    float u = adam_quotient(adam_quotient(*m, c.bias1, f.inverse1), root, adam_inverse(root));
    *p = *p - c.lr * (u + c.decay * *p);
    return adam_inside<ADAM_LEAST_M>(*m) & adam_inside<ADAM_LEAST_V>(*v);
}

/* The two words of Philox that hold the 16 bits of elements [e, e + 4), e a multiple of 4. */
MT_STORED void stored_draw(uint32_t words[2], uint64_t seed, uint64_t e, uint32_t stream,
                           uint32_t step)
{
    const uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    const uint32_t counter[4] = { (uint32_t)(e >> 3), (uint32_t)(e >> 35), stream, step };
    uint32_t all[4];
    mt_philox(all, counter, key);
    words[0] = e & 4 ? all[2] : all[0], words[1] = e & 4 ? all[3] : all[1];
}

/* A carry out of the mantissa of what is not finite would change what it is: NaN has one pattern,
 * and the lower half of Inf is 0. */
MT_STORED uint16_t stored_stochastic(float x, uint32_t random)
{
    uint32_t u = mt_f32_bits(x);
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (u + random) >> 16);
}

/* The scale of a block whose largest magnitude has these bits; 1 / it is stored. */
MT_STORED float stored_scale(mt_codec e4m3, int32_t amax)
{
    return mt_encode_scale(mt_from_bits(amax), mt_from_bits(e4m3.max_bits), false, FLT_MAX);
}

/* The least code whose value is at least y >= 0, the largest one if there is none: the nearest, or
 * the one after it. */
MT_STORED uint8_t stored_encode_up(mt_codec e4m3, float y)
{
    int32_t nearest = mt_encode(e4m3, y);
    int32_t value = mt_bits(mt_decode_number(e4m3, (uint8_t)nearest));
    return (uint8_t)(nearest + (nearest < e4m3.max_code && value < mt_bits(y) ? 1 : 0));
}
