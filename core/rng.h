/* Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011). A draw is a pure function
 * of its key and counter: the same bits on every device, thread count and rank count. */
#pragma once

#include <stdint.h>

#include "core/inline.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out = Philox4x32-10(counter, key). */
MT_HOST_DEVICE void mt_philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* Draw `index` of (seed, stream): 32 uniform bits. */
uint32_t mt_rng_u32(uint64_t seed, uint32_t stream, uint64_t index);
/* Uniform on [0, bound), bound > 0, without modulo bias beyond 2^-64. */
uint64_t mt_rng_below(uint64_t seed, uint32_t stream, uint64_t index, uint64_t bound);
/* Uniform on [0, 1), 53 bits. */
double mt_rng_uniform(uint64_t seed, uint32_t stream, uint64_t index);
/* Standard normal (Box-Muller in f64, the same libm everywhere it is drawn: on the CPU). */
double mt_rng_normal(uint64_t seed, uint32_t stream, uint64_t index);

#ifdef __cplusplus
}
#endif
