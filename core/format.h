/* The format table: one row per number format (NUMERICS sections 2 and 3). Kernels read the row; a new
 * format is a new row here, a codec row in each backend, and a tolerance row in the tests. */
#pragma once

#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_format_id {
    MT_FORMAT_F64,
    MT_FORMAT_F32,
    MT_FORMAT_BF16,
    MT_FORMAT_F16,
    MT_FORMAT_FP8_TENSOR,
    MT_FORMAT_FP8_DELAYED,
    MT_FORMAT_FP8_BLOCK,
    MT_FORMAT_MXFP8,
    MT_FORMAT_MXFP6_E3M2,
    MT_FORMAT_MXFP6_E2M3,
    MT_FORMAT_MXFP4,
    MT_FORMAT_NVFP4,
    MT_FORMAT_COUNT
} mt_format_id;

typedef enum mt_element {
    MT_ELEMENT_PLAIN, /* a scalar type of its own: no code, no scale */
    MT_ELEMENT_E4M3,
    MT_ELEMENT_E5M2,
    MT_ELEMENT_E3M2,
    MT_ELEMENT_E2M3,
    MT_ELEMENT_E2M1
} mt_element;

typedef enum mt_scale { MT_SCALE_NONE, MT_SCALE_F32, MT_SCALE_E8M0, MT_SCALE_E4M3 } mt_scale;

typedef struct mt_format {
    mt_format_id id;
    const char *name;
    mt_dtype dtype;     /* plain formats: the element; others: the type codes are stored in (u8) */
    mt_element element; /* by default; option e5m2 swaps E4M3 for E5M2 */
    mt_scale scale;
    int block;              /* elements along the line that share a scale; 0: the whole member */
    bool second_level;      /* one more f32 scale per member (nvfp4) */
    int codes_per_byte;     /* 1, or 2 for E2M1 */
    bool column_transposed; /* the column direction is stored [K,M] */
    int shard_atom;         /* a shard boundary falls on multiples of this many rows and columns */
    uint32_t options;       /* the MT_OPT_* bits that have a meaning here */
} mt_format;

extern const mt_format mt_formats[MT_FORMAT_COUNT];

/* The plain format of a dtype: f64, f32, bf16 or f16. */
const mt_format *mt_format_plain(mt_dtype dtype);
/* Looks a name up; MT_ECONFIG names the text and the known names. */
mt_status mt_format_find(const mt_format **format, const char *name);

#ifdef __cplusplus
}
#endif
