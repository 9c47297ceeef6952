/* How masters are stored: as they are, or split into a bf16 parameter and the int16 that makes it
 * whole again (NUMERICS section 6). Splitting loses nothing: every pattern of 32 bits comes back,
 * but that NaN has one pattern, that of casts to bf16: others would round up to a zero. */
#pragma once

#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_master {
    MT_MASTER_REAL,  /* f32; f64 under f64 compute */
    MT_MASTER_SPLIT, /* bf16 + i16 */
    MT_MASTER_COUNT
} mt_master;

/* "f32", "bf16+i16": as configurations name them. */
const char *mt_master_name(mt_master master);

/* Compared as signed integers, for which the oldest vectors have instructions. */
MT_HOST_DEVICE bool mt_master_is_nan(uint32_t bits)
{
    return (int32_t)(bits & 0x7fffffffu) > 0x7f800000;
}

/* The nearest bf16, ties away from zero, and what is left: the lower 16 bits. An i16 is below 0
 * exactly where the bf16 was rounded up. NaN is 0x7fff and 0. */
MT_HOST_DEVICE uint16_t mt_master_high(uint32_t bits)
{
    return (uint16_t)(mt_master_is_nan(bits) ? 0x7fffu : (bits + 0x8000u) >> 16);
}

MT_HOST_DEVICE int16_t mt_master_low(uint32_t bits)
{
    return (int16_t)(uint16_t)(mt_master_is_nan(bits) ? 0 : bits);
}

/* ((high - (low < 0)) << 16) | (uint16_t)low */
MT_HOST_DEVICE uint32_t mt_master_join(uint16_t high, int16_t low)
{
    return ((uint32_t)high << 16) + (uint32_t)(int32_t)low;
}

#ifdef __cplusplus
}
#endif
