/* Random bits of elements that lie in a row: draws of core/rng.h, many at a time. */
#pragma once

#include <string.h>

#include "core/rng.h"
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define MT_DRAW_INLINE static inline __attribute__((always_inline))

/* Elements that share a draw; draws at once. */
enum { MT_DRAW = 8, MT_DRAWS = 16 };

/* 32-bit words in lanes of 64, whose upper halves are whatever is there. */
#if defined(__AVX512F__)
typedef uint64_t mt_wide __attribute__((vector_size(64)));
#elif defined(__AVX2__)
typedef uint64_t mt_wide __attribute__((vector_size(32)));
#else
typedef uint64_t mt_wide __attribute__((vector_size(16)));
#endif
enum { MT_WIDE = sizeof(mt_wide) / sizeof(uint64_t) };

MT_DRAW_INLINE mt_wide mt_wide_product(mt_wide a, uint32_t b)
{
#if defined(__AVX512F__)
    return (mt_wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (mt_wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
    return (mt_wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
    return (a & 0xffffffffu) * b;
#endif
}

/* The bits of MT_DRAW * MT_DRAWS elements: mt_philox of MT_DRAWS counters, of which `first` is the
 * first.
 */
MT_DRAW_INLINE void mt_draw_row(uint16_t *random, const uint32_t key[2], const uint32_t first[4])
{
    uint64_t counters[MT_DRAWS], words[2 * MT_DRAWS];
    for (int i = 0; i < MT_DRAWS; i++) counters[i] = first[0] + (uint32_t)i;
    for (int i = 0; i < MT_DRAWS; i += MT_WIDE) {
        mt_wide a, b, c, d, zero = { 0 };
        memcpy(&a, counters + i, sizeof a);
        b = zero + first[1], c = zero + first[2], d = zero + first[3];
        for (uint32_t round = 0; round < 10; round++) {
            uint32_t k0 = key[0] + round * 0x9E3779B9u, k1 = key[1] + round * 0xBB67AE85u;
            mt_wide p = mt_wide_product(a, 0xD2511F53u), q = mt_wide_product(c, 0xCD9E8D57u);
            a = q >> 32 ^ b ^ k0, b = q;
            c = p >> 32 ^ d ^ k1, d = p;
        }
        a = (a & 0xffffffffu) | b << 32, c = (c & 0xffffffffu) | d << 32;
        for (int j = 0; j < MT_WIDE; j++) words[2 * (i + j)] = a[j], words[2 * (i + j) + 1] = c[j];
    }
    memcpy(random, words, sizeof words); /* low halves first, as bytes lie in a word */
}
