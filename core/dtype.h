/* Scalar types: sizes, names, and the exact conversions of NUMERICS (nearest even, NaN canonical).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "core/inline.h"
#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_dtype {
    MT_F64,
    MT_F32,
    MT_BF16,
    MT_F16,
    MT_I64,
    MT_I32,
    MT_U32,
    MT_U16,
    MT_U8,
    MT_DTYPE_COUNT
} mt_dtype;

/* Bytes of one element. */
size_t mt_dtype_size(mt_dtype dtype);
/* "f32", "bf16", ... */
const char *mt_dtype_name(mt_dtype dtype);
/* Parses a name of mt_dtype_name; MT_ECONFIG names the text and the known names. */
mt_status mt_dtype_parse(mt_dtype *dtype, const char *name);
/* The type that sums over `dtype` are kept in: f64 for f64, f32 for every other float. */
mt_dtype mt_dtype_wide(mt_dtype dtype);

MT_HOST_DEVICE uint32_t mt_f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

MT_HOST_DEVICE float mt_f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

MT_HOST_DEVICE float mt_bf16_to_f32(uint16_t h)
{
    return mt_f32_from_bits((uint32_t)h << 16);
}

/* Nearest even, overflow to Inf, NaN to 0x7FFF. */
MT_HOST_DEVICE uint16_t mt_f32_to_bf16(float x)
{
    uint32_t u = mt_f32_bits(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bool nan =
        (int32_t)(u & 0x7fffffffu) > 0x7f800000; /* signed: vector units compare no other way */
    return (uint16_t)(nan ? 0x7fffu : rounded);
}

float mt_f16_to_f32(uint16_t h);
/* Nearest even, overflow to Inf, NaN to 0x7FFF. */
uint16_t mt_f32_to_f16(float x);

/* Element `i` of an array of any float type, as f64; and back (one rounding through f32 for bf16,
 * f16). */
double mt_load_f64(const void *data, mt_dtype dtype, int64_t i);
void mt_store_f64(void *data, mt_dtype dtype, int64_t i, double x);

#ifdef __cplusplus
}
#endif
