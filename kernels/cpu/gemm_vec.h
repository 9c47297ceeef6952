/* The vector of the GEMM micro-kernel: VL reals of one register, and the few operations on it.
 * Fused multiply-adds of the cpu backend are asked for here, in lanes.h and in vecmath.h. */
#pragma once

#include "kernels/cpu/unroll.h"
#include "kernels/cpu/variant.h"

#if MT_ISA_LEVEL > 0
#include <immintrin.h>

#if MT_ISA_LEVEL == 512 && MT_ELEM_BITS == 64
typedef __m512d vec;
#define VEC(op) _mm512_##op##_pd
#elif MT_ISA_LEVEL == 512
typedef __m512 vec;
#define VEC(op) _mm512_##op##_ps
#elif MT_ELEM_BITS == 64
typedef __m256d vec;
#define VEC(op) _mm256_##op##_pd
#else
typedef __m256 vec;
#define VEC(op) _mm256_##op##_ps
#endif
enum { VL = sizeof(vec) / sizeof(mt_real) };

MT_INLINE vec vec_zero(void)
{
    return VEC(setzero)();
}

MT_INLINE vec vec_all(mt_real x)
{
    return VEC(set1)(x);
}

MT_INLINE vec vec_load(const mt_real *p)
{
    return VEC(loadu)(p);
}

MT_INLINE void vec_store(mt_real *p, vec x)
{
    VEC(storeu)(p, x);
}

MT_INLINE vec vec_add(vec a, vec b)
{
    return VEC(add)(a, b);
}

/* a b + c, rounded once */
MT_INLINE vec vec_fma(vec a, vec b, vec c)
{
    return VEC(fmadd)(a, b, c);
}

/* VL elements as reals, and back with one rounding (mt_get, mt_put). */
MT_INLINE vec vec_get(const mt_elem *p)
{
#if MT_ELEM_BITS != 16
    return vec_load(p);
#elif MT_ISA_LEVEL == 512
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#else
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#endif
}

#if MT_ELEM_BITS == 16 && MT_ISA_LEVEL == 512
MT_INLINE __m512i vec_rounded(vec x) /* in the low half of each lane */
{
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fff));
}
#elif MT_ELEM_BITS == 16
MT_INLINE __m256i vec_rounded(vec x)
{
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i sum = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fff), nan);
}
#endif

MT_INLINE void vec_put(mt_elem *p, vec x)
{
#if MT_ELEM_BITS != 16
    vec_store(p, x);
#elif MT_ISA_LEVEL == 512
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(vec_rounded(x)));
#else
    __m256i x16 = _mm256_packus_epi32(vec_rounded(x), vec_rounded(x));
    x16 = _mm256_permute4x64_epi64(x16, 0x08);
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_castsi256_si128(x16));
#endif
}

#if MT_ELEM_BITS == 16
/* VL pairs of neighbouring elements, split into the reals of the first and of the second of each
 * pair. */
MT_INLINE void vec_get_pairs(vec *first, vec *second, const mt_elem *p)
{
#if MT_ISA_LEVEL == 512
    __m512i u = _mm512_loadu_si512(p);
    *first = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
    *second = _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000u)));
#else
    __m256i u = _mm256_loadu_si256((const __m256i *)(const void *)p);
    *first = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
    *second = _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000u)));
#endif
}

/* The reverse, each rounded once. */
MT_INLINE void vec_put_pairs(mt_elem *p, vec first, vec second)
{
#if MT_ISA_LEVEL == 512
    __m512i high = _mm512_slli_epi32(vec_rounded(second), 16);
    _mm512_storeu_si512(p, _mm512_or_si512(vec_rounded(first), high));
#else
    __m256i high = _mm256_slli_epi32(vec_rounded(second), 16);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_or_si256(vec_rounded(first), high));
#endif
}
#endif
#endif
