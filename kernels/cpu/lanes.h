/* Whole vectors of reals: `vec` holds LANES of them. Functions of a real that take long are here
 * for several vectors in step: a chain of dependent operations keeps few units busy, and a core
 * looks too few operations ahead to find the next chain by itself. */
#pragma once

#include "kernels/cpu/vecmath.h"
#if MT_ISA_LEVEL > 0
#include <immintrin.h>
#endif

#if MT_ISA_LEVEL == 512
enum { VECTOR = 64 }; /* bytes */
#elif MT_ISA_LEVEL == 2
enum { VECTOR = 32 };
#else
enum { VECTOR = 16 };
#endif
enum { LANES = VECTOR / sizeof(mt_real) };

typedef mt_real vec __attribute__((vector_size(VECTOR), may_alias));
typedef mt_real_bits vec_bits __attribute__((vector_size(VECTOR), may_alias));
#if MT_ELEM_BITS == 64
typedef uint64_t vec_words __attribute__((vector_size(VECTOR)));
#else
typedef uint32_t vec_words __attribute__((vector_size(VECTOR)));
#endif
/* The same in memory, at any element. */
typedef mt_real vec_at __attribute__((vector_size(VECTOR), aligned(sizeof(mt_real)), may_alias));

#if MT_ISA_LEVEL == 512 && MT_ELEM_BITS == 64
#define MT_VEC_OP(op, ...) (vec) _mm512_##op##_pd(__VA_ARGS__)
typedef __m512d mt_register;
#elif MT_ISA_LEVEL == 512
#define MT_VEC_OP(op, ...) (vec) _mm512_##op##_ps(__VA_ARGS__)
typedef __m512 mt_register;
#elif MT_ISA_LEVEL == 2 && MT_ELEM_BITS == 64
#define MT_VEC_OP(op, ...) (vec) _mm256_##op##_pd(__VA_ARGS__)
typedef __m256d mt_register;
#elif MT_ISA_LEVEL == 2
#define MT_VEC_OP(op, ...) (vec) _mm256_##op##_ps(__VA_ARGS__)
typedef __m256 mt_register;
#endif

MT_INLINE vec broadcast(mt_real x)
{
    return x - (vec){ 0 };
}

/* a b + c, fused where there is an instruction for it. */
MT_INLINE vec multiply_add(vec a, vec b, vec c)
{
#if MT_ISA_LEVEL > 0
    return MT_VEC_OP(fmadd, (mt_register)a, (mt_register)b, (mt_register)c);
#else
    return a * b + c;
#endif
}

/* LANES neighbouring elements. */
MT_INLINE vec load_elements(const mt_elem *p)
{
#if MT_ELEM_BITS == 16
    mt_real x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = mt_get(p + i);
    return *(const vec_at *)x;
#else
    return *(const vec_at *)p;
#endif
}

/* And stored, each rounded. */
MT_INLINE void store_lanes(mt_elem *to, vec x)
{
#if MT_ELEM_BITS == 16
    mt_real lane[LANES];
    memcpy(lane, &x, sizeof x);
#pragma omp simd
    for (int i = 0; i < LANES; i++) mt_put(to + i, lane[i]);
#else
    *(vec_at *)to = x;
#endif
}

/* x where the mask is set, else y. */
MT_INLINE vec choose(vec_bits mask, vec x, vec y)
{
    return (vec)((mask & (vec_bits)x) | (~mask & (vec_bits)y));
}

/* The larger and the smaller; x where either is NaN. */
MT_INLINE vec larger(vec x, vec y)
{
#if MT_ISA_LEVEL > 0
    return MT_VEC_OP(max, (mt_register)y, (mt_register)x);
#else
    return choose(y > x, y, x);
#endif
}

MT_INLINE vec smaller(vec x, vec y)
{
#if MT_ISA_LEVEL > 0
    return MT_VEC_OP(min, (mt_register)y, (mt_register)x);
#else
    return choose(y < x, y, x);
#endif
}

/* Lanes that are less than `count`, which fits a lane: to compare it as it is needs no branch. */
MT_INLINE vec_bits lanes_below(int64_t count)
{
    vec_bits lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane < (mt_real_bits)count;
}

/* Lanes of x and y in groups of `width`: the even groups of both by turns (odd 0), or the odd ones
 * (odd 1). All but x and y are constants. */
#define MT_LANE(i, width, odd)                                                                     \
    ((i) % (width) + (i) / (2 * (width)) * 2 * (width) + (i) / (width) % 2 * LANES +               \
     (odd) * (width))
#define MT_LANES_2(i, w, odd) MT_LANE(i, w, odd), MT_LANE(i + 1, w, odd)
#define MT_LANES_4(i, w, odd) MT_LANES_2(i, w, odd), MT_LANES_2(i + 2, w, odd)
#define MT_LANES_8(i, w, odd) MT_LANES_4(i, w, odd), MT_LANES_4(i + 4, w, odd)
#if MT_ISA_LEVEL == 512 && MT_ELEM_BITS != 64
#define MT_LANES_ALL(w, odd) MT_LANES_8(0, w, odd), MT_LANES_8(8, w, odd)
#elif MT_ISA_LEVEL == 512 || (MT_ISA_LEVEL == 2 && MT_ELEM_BITS != 64)
#define MT_LANES_ALL(w, odd) MT_LANES_8(0, w, odd)
#elif MT_ISA_LEVEL == 2 || MT_ELEM_BITS != 64
#define MT_LANES_ALL(w, odd) MT_LANES_4(0, w, odd)
#else
#define MT_LANES_ALL(w, odd) MT_LANES_2(0, w, odd)
#endif
#ifdef __clang__
#define MT_GROUPS(x, y, w, odd) __builtin_shufflevector(x, y, MT_LANES_ALL(w, odd))
#else
#define MT_GROUPS(x, y, w, odd) __builtin_shuffle(x, y, (vec_bits){ MT_LANES_ALL(w, odd) })
#endif

/* Turns about blocks of `width` x `width` elements in rows `width` apart. */
MT_INLINE void turn_blocks(vec *a, vec *b, int width)
{
    vec x = *a, y = *b;
    if (width == 1) *a = MT_GROUPS(x, y, 1, 0), *b = MT_GROUPS(x, y, 1, 1);
#if MT_ISA_LEVEL > 0 || MT_ELEM_BITS != 64
    if (width == 2) *a = MT_GROUPS(x, y, 2, 0), *b = MT_GROUPS(x, y, 2, 1);
#endif
#if MT_ISA_LEVEL == 512 || (MT_ISA_LEVEL == 2 && MT_ELEM_BITS != 64)
    if (width == 4) *a = MT_GROUPS(x, y, 4, 0), *b = MT_GROUPS(x, y, 4, 1);
#endif
#if MT_ISA_LEVEL == 512 && MT_ELEM_BITS != 64
    if (width == 8) *a = MT_GROUPS(x, y, 8, 0), *b = MT_GROUPS(x, y, 8, 1);
#endif
}

/* x[i][j] becomes x[j][i]. */
MT_INLINE void transpose(vec *x)
{
    MT_UNROLL
    for (int width = 1; width < LANES; width *= 2) MT_UNROLL
    for (int i = 0; i < LANES; i++)
        if (!(i & width)) turn_blocks(&x[i], &x[i + width], width);
}

/* Lane i is the sum, and the maximum, over the lanes of x[i], halves onto each other; spoils x. */
MT_INLINE vec sums_of_lanes(vec *x)
{
    MT_UNROLL
    for (int width = LANES / 2; width > 0; width /= 2) MT_UNROLL
    for (int i = 0; i < width; i++) {
        turn_blocks(&x[i], &x[i + width], width);
        x[i] += x[i + width];
    }
    return x[0];
}

MT_INLINE vec maxima_of_lanes(vec *x)
{
    MT_UNROLL
    for (int width = LANES / 2; width > 0; width /= 2) MT_UNROLL
    for (int i = 0; i < width; i++) {
        turn_blocks(&x[i], &x[i + width], width);
        x[i] = larger(x[i], x[i + width]);
    }
    return x[0];
}

/* The same of one vector. */
MT_INLINE mt_real lanes_sum(vec x)
{
    MT_UNROLL
    for (int width = LANES / 2; width > 0; width /= 2) {
        vec y = x;
        turn_blocks(&x, &y, width);
        x += y;
    }
    return x[0];
}

MT_INLINE mt_real lanes_max(vec x)
{
    MT_UNROLL
    for (int width = LANES / 2; width > 0; width /= 2) {
        vec y = x;
        turn_blocks(&x, &y, width);
        x = larger(x, y);
    }
    return x[0];
}

/* The sum of a[i] b[i]: of two vectors in turns, then of their lanes. */
MT_INLINE mt_real dot_of(const mt_elem *a, const mt_elem *b, int64_t width)
{
    vec sum[2] = { { 0 }, { 0 } };
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) MT_UNROLL
    for (int j = 0; j < 2; j++)
        sum[j] = multiply_add(load_elements(a + i + j * LANES), load_elements(b + i + j * LANES),
                              sum[j]);
    for (; i + LANES <= width; i += LANES)
        sum[0] = multiply_add(load_elements(a + i), load_elements(b + i), sum[0]);
    mt_real rest = 0;
    for (; i < width; i++) rest += mt_get(a + i) * mt_get(b + i);
    return lanes_sum(sum[0] + sum[1]) + rest;
}

/* The steps of mt_exp for x[0 .. count) cut to [least, most]: exp(x) = p 2^n, n = sum - shift. */
MT_INLINE void exp_steps(vec *p, vec *n, vec *sum, const vec *from, int count, mt_real shift,
                         mt_real least, mt_real most)
{
    vec x[8];
    MT_UNROLL
    for (int j = 0; j < count; j++) {
        x[j] = smaller(larger(from[j], broadcast(least)), broadcast(most));
        sum[j] = multiply_add(x[j], broadcast(MT_EXP_PER_LN2), broadcast(shift));
        n[j] = sum[j] - shift;
    }
    MT_UNROLL
    for (int j = 0; j < count; j++) x[j] = multiply_add(n[j], broadcast(-MT_EXP_LN2_HIGH), x[j]);
    MT_UNROLL
    for (int j = 0; j < count; j++) {
        x[j] = multiply_add(n[j], broadcast(-MT_EXP_LN2_LOW), x[j]);
        p[j] = broadcast(mt_exp_terms[0]);
    }
    MT_UNROLL
    for (int i = 1; i < MT_EXP_TERMS; i++) MT_UNROLL
    for (int j = 0; j < count; j++) p[j] = multiply_add(p[j], x[j], broadcast(mt_exp_terms[i]));
    MT_UNROLL
    for (int j = 0; j < count; j++) p[j] = multiply_add(p[j], x[j] * x[j], x[j]) + 1;
}

/* exp of x[0 .. count): as mt_exp, but x above mt_exp_most counts as that. So 2^n needs one product
 * more only below: it is 2^(n + lift) 2^-lift, and a subnormal result is rounded once. */
MT_INLINE void exp_vectors(vec *x, int count)
{
#if MT_ELEM_BITS == 64
    enum { LIFT = 600, MANTISSA = 52, BIAS = 1023 };
    const mt_real shift = 0x1.8p52 + BIAS + LIFT, drop = 0x1p-600, least = -746, most = 290;
#else
    enum { LIFT = 64, MANTISSA = 23, BIAS = 127 };
    const mt_real shift = 0x1.8p23f + BIAS + LIFT, drop = 0x1p-64f, least = -104, most = 43;
#endif
    vec sum[8], p[8], n[8];
    exp_steps(p, n, sum, x, count, shift, least, most);
    MT_UNROLL
    for (int j = 0; j < count; j++) x[j] = p[j] * (vec)((vec_bits)sum[j] << MANTISSA) * drop;
}

/* mt_exp of every lane. */
MT_INLINE vec exp_lanes(vec x)
{
#if MT_ELEM_BITS == 64
    const mt_real shift = 0x1.8p52 + 2 * 1023, limit = 746;
#else
    const mt_real shift = 0x1.8p23f + 2 * 127, limit = 104;
#endif
    vec sum, p, n;
    exp_steps(&p, &n, &sum, &x, 1, shift, -limit, limit);
#if MT_ISA_LEVEL == 512 /* p 2^n, rounded once */
    return MT_VEC_OP(scalef, (mt_register)p, (mt_register)n);
#else
    enum { MANTISSA = MT_ELEM_BITS == 64 ? 52 : 23 };
    const vec_bits top_bit = { 0 }, bits = (vec_bits)sum,
                   half = (bits >> 1) & ~(top_bit + MT_SIGN_BIT);
    const vec_words rest = (vec_words)bits - (vec_words)half; /* of a NaN anything, and it wraps */
    return p * (vec)(half << MANTISSA) * (vec)(rest << MANTISSA);
#endif
}
