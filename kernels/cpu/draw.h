/* Random bits of elements that lie in a row: draws of core/rng.h, many at a time. */
#pragma once

#include "core/rng.h"

#define MT_DRAW_INLINE static inline __attribute__((always_inline))

/* Elements that share a draw; draws at once. */
enum { MT_DRAW = 8, MT_DRAWS = 16 };

MT_DRAW_INLINE uint32_t mt_high_product(uint32_t a, uint32_t b)
{
    return (uint32_t)((uint64_t)a * b >> 32);
}

/* The bits of MT_DRAW * MT_DRAWS elements: mt_philox of MT_DRAWS counters, of which `first` is the
 * first.
 */
MT_DRAW_INLINE void mt_draw_row(uint16_t *restrict random, const uint32_t key[2],
                                const uint32_t first[4])
{
    uint32_t a[MT_DRAWS], b[MT_DRAWS], c[MT_DRAWS], d[MT_DRAWS], words[4 * MT_DRAWS];
    for (int i = 0; i < MT_DRAWS; i++)
        a[i] = first[0] + (uint32_t)i, b[i] = first[1], c[i] = first[2], d[i] = first[3];
    for (uint32_t round = 0; round < 10; round++) {
        uint32_t k0 = key[0] + round * 0x9E3779B9u, k1 = key[1] + round * 0xBB67AE85u;
#pragma omp simd
        for (int i = 0; i < MT_DRAWS; i++) {
            uint32_t high0 = mt_high_product(0xD2511F53u, a[i]), low0 = 0xD2511F53u * a[i];
            uint32_t high1 = mt_high_product(0xCD9E8D57u, c[i]), low1 = 0xCD9E8D57u * c[i];
            a[i] = high1 ^ b[i] ^ k0, b[i] = low1;
            c[i] = high0 ^ d[i] ^ k1, d[i] = low0;
        }
    }
    for (int i = 0; i < MT_DRAWS; i++)
        words[4 * i] = a[i], words[4 * i + 1] = b[i], words[4 * i + 2] = c[i],
                  words[4 * i + 3] = d[i];
    for (int i = 0; i < 4 * MT_DRAWS; i++)
        random[2 * i] = (uint16_t)words[i], random[2 * i + 1] = (uint16_t)(words[i] >> 16);
}
