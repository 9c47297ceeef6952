/* Scalar types. */
#include "core/dtype.h"

static const struct {
    const char *name;
    size_t size;
} dtypes[MT_DTYPE_COUNT] = {
    [MT_F64] = { "f64", 8 }, [MT_F32] = { "f32", 4 }, [MT_BF16] = { "bf16", 2 },
    [MT_F16] = { "f16", 2 }, [MT_I64] = { "i64", 8 }, [MT_I32] = { "i32", 4 },
    [MT_U32] = { "u32", 4 }, [MT_U16] = { "u16", 2 }, [MT_U8] = { "u8", 1 },
};

size_t mt_dtype_size(mt_dtype dtype)
{
    return dtypes[dtype].size;
}

const char *mt_dtype_name(mt_dtype dtype)
{
    return (unsigned)dtype < MT_DTYPE_COUNT ? dtypes[dtype].name : "unknown dtype";
}

mt_status mt_dtype_parse(mt_dtype *dtype, const char *name)
{
    MT_REQUIRE(name, MT_EINVAL, "dtype: no name");
    for (int i = 0; i < MT_DTYPE_COUNT; i++)
        if (!strcmp(dtypes[i].name, name)) {
            *dtype = (mt_dtype)i;
            return MT_OK;
        }
    return MT_FAIL(MT_ECONFIG, "dtype '%s' is not one of f64 f32 bf16 f16 i64 i32 u32 u16 u8",
                   name);
}

mt_dtype mt_dtype_wide(mt_dtype dtype)
{
    return dtype == MT_F64 ? MT_F64 : MT_F32;
}

float mt_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    if (exponent == 31u) return mt_f32_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return mt_f32_from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
    float x = (float)mantissa * 0x1p-24f;
    return sign ? -x : x;
}

uint16_t mt_f32_to_f16(float x)
{
    uint32_t u = mt_f32_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return 0x7fff;
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above */
    if (a < 0x38800000u) {                                   /* below 2^-14: a multiple of 2^-24 */
        float r = mt_f32_from_bits(a) + 0.5f;                /* ulp of [0.5, 1) is 2^-24 */
        return (uint16_t)(sign | (mt_f32_bits(r) - 0x3f000000u));
    }
    a += 0xfffu + (a >> 13 & 1u);
    return (uint16_t)(sign | ((a >> 13) - (112u << 10)));
}

double mt_load_f64(const void *data, mt_dtype dtype, int64_t i)
{
    switch (dtype) {
    case MT_F64: return ((const double *)data)[i];
    case MT_F32: return (double)((const float *)data)[i];
    case MT_BF16: return (double)mt_bf16_to_f32(((const uint16_t *)data)[i]);
    case MT_F16: return (double)mt_f16_to_f32(((const uint16_t *)data)[i]);
    case MT_I64: return (double)((const int64_t *)data)[i];
    case MT_I32: return (double)((const int32_t *)data)[i];
    case MT_U32: return (double)((const uint32_t *)data)[i];
    case MT_U16: return (double)((const uint16_t *)data)[i];
    case MT_U8: return (double)((const uint8_t *)data)[i];
    case MT_DTYPE_COUNT: break;
    }
    MT_ASSERT(!"a known dtype");
    return 0;
}

void mt_store_f64(void *data, mt_dtype dtype, int64_t i, double x)
{
    switch (dtype) {
    case MT_F64: ((double *)data)[i] = x; return;
    case MT_F32: ((float *)data)[i] = (float)x; return;
    case MT_BF16: ((uint16_t *)data)[i] = mt_f32_to_bf16((float)x); return;
    case MT_F16: ((uint16_t *)data)[i] = mt_f32_to_f16((float)x); return;
    case MT_I64: ((int64_t *)data)[i] = (int64_t)x; return;
    case MT_I32: ((int32_t *)data)[i] = (int32_t)x; return;
    case MT_U32: ((uint32_t *)data)[i] = (uint32_t)x; return;
    case MT_U16: ((uint16_t *)data)[i] = (uint16_t)x; return;
    case MT_U8: ((uint8_t *)data)[i] = (uint8_t)x; return;
    case MT_DTYPE_COUNT: break;
    }
    MT_ASSERT(!"a known dtype");
}
