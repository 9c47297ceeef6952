/* Draws on top of Philox. Key = the seed's two halves; counter = (index, stream, 0). */
#include "core/rng.h"

#include <math.h>

__extension__ typedef unsigned __int128 u128;

static void draw(uint32_t out[4], uint64_t seed, uint32_t stream, uint64_t index)
{
    const uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    const uint32_t counter[4] = { (uint32_t)index, (uint32_t)(index >> 32), stream, 0 };
    mt_philox(out, counter, key);
}

uint32_t mt_rng_u32(uint64_t seed, uint32_t stream, uint64_t index)
{
    uint32_t out[4];
    draw(out, seed, stream, index / 4);
    return out[index % 4];
}

uint64_t mt_rng_below(uint64_t seed, uint32_t stream, uint64_t index, uint64_t bound)
{
    uint32_t out[4];
    draw(out, seed, stream, index);
    uint64_t wide = (uint64_t)out[0] << 32 | out[1];
    return (uint64_t)(((u128)wide * bound) >> 64);
}

double mt_rng_uniform(uint64_t seed, uint32_t stream, uint64_t index)
{
    uint32_t out[4];
    draw(out, seed, stream, index);
    return (double)(((uint64_t)out[0] << 32 | out[1]) >> 11) * 0x1p-53;
}

double mt_rng_normal(uint64_t seed, uint32_t stream, uint64_t index)
{
    uint32_t out[4];
    draw(out, seed, stream, index);
    double u = ((double)(((uint64_t)out[0] << 32 | out[1]) >> 11) + 0.5) * 0x1p-53; /* in (0, 1) */
    double v = (double)(((uint64_t)out[2] << 32 | out[3]) >> 11) * 0x1p-53;
    return sqrt(-2.0 * log(u)) * cos(2.0 * 3.14159265358979323846 * v);
}
