/* The format table: one row per number format (NUMERICS sections 2 and 3). Kernels read the row; a
 * new format is a new row here, a codec row in each backend, and a tolerance row in the tests. */
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
    MT_ELEMENT_E2M1,
    MT_ELEMENT_COUNT
} mt_element;

typedef struct mt_element_info {
    const char *name; /* "e4m3"; NULL for plain */
    int mantissa;     /* bits */
    int bias;         /* of the exponent */
    int sign;         /* place of the sign bit in a code */
    int emax;         /* floor(log2(max)) */
    float max;
    uint8_t max_code; /* largest finite, positive */
    uint8_t nan_code; /* what a NaN becomes */
    uint8_t inf_code; /* decodes to Inf (E5M2); 0: none. Other codes above max_code are NaN. */
} mt_element_info;

typedef enum mt_scale { MT_SCALE_NONE, MT_SCALE_F32, MT_SCALE_E8M0, MT_SCALE_E4M3 } mt_scale;

/* Options of a direction (NUMERICS section 2), as bits where a set of them is meant. */
enum {
    MT_OPT_E5M2 = 1 << 0,   /* elements E5M2 in place of E4M3 */
    MT_OPT_POW2 = 1 << 1,   /* f32 scales cut to powers of two */
    MT_OPT_2D = 1 << 2,     /* square blocks */
    MT_OPT_SR = 1 << 3,     /* stochastic rounding */
    MT_OPT_RHT = 1 << 4,    /* column direction: random Hadamard transform along 16 tokens */
    MT_OPT_4OVER6 = 1 << 5, /* each block maps its amax to 6 or to 4, whichever errs less */
    MT_OPT_ERR = 1 << 6,    /* how 4over6 measures the error */
    MT_OPT_SCALE = 1 << 7,  /* how E8M0 scales round */
    MT_OPT_SOURCE = 1 << 8  /* column direction: from the row direction's dequantized values */
};

typedef struct mt_format_options {
    mt_element element;
    bool pow2, two_d, sr, rht, squared_error, scale_floor, from_dequantized;
    uint16_t rht_mask; /* bit i set: token i of 16 changes its sign; 0 without rht */
    int four_over_six; /* the bound, 256 or 448; 0: off */
} mt_format_options;

typedef struct mt_format {
    mt_format_id id;
    const char *name;
    mt_dtype dtype;     /* plain formats: the element; others: the type codes are stored in (u8) */
    mt_element element; /* by default; option e5m2 swaps E4M3 for E5M2 */
    mt_scale scale;
    int block;          /* elements along the line that share a scale; 0: the whole member */
    bool second_level;  /* one more f32 scale per member (nvfp4), made from the direction's amax */
    int codes_per_byte; /* 1, or 2 for E2M1 */
    bool column_transposed; /* the column direction is stored [K,M] */
    bool block_major[2];    /* scales of the row, column direction stored [blocks, lines] */
    bool pow2;              /* f32 scales are powers of two by default */
    bool delayed;           /* the scale is given: it comes from an amax history */
    int shard_atom;         /* a shard boundary falls on multiples of this many rows and columns */
    uint32_t options;       /* the MT_OPT_* bits that have a meaning here */
} mt_format;

extern const mt_format mt_formats[MT_FORMAT_COUNT];
extern const mt_element_info mt_elements[MT_ELEMENT_COUNT];
extern const uint16_t mt_rht_default_mask; /* 0xD7E8 */

/* A format's options when none are given. */
mt_format_options mt_format_defaults(const mt_format *format);

/* The plain format of a dtype: f64, f32, bf16 or f16. */
const mt_format *mt_format_plain(mt_dtype dtype);
/* Whether members keep an f32 factor outside of what their codes are worth: fp8_tensor's and
 * fp8_delayed's scale, nvfp4's second level. Scales of blocks are of the codes. */
static inline bool mt_format_has_factor(const mt_format *format)
{
    return format->second_level || (format->scale == MT_SCALE_F32 && format->block == 0);
}
/* Whether codes depend on the amax of the whole member. */
static inline bool mt_format_needs_amax(const mt_format *format)
{
    return mt_format_has_factor(format) && !format->delayed;
}
/* Looks a name up; MT_ECONFIG names the text and the known names. */
mt_status mt_format_find(const mt_format **format, const char *name);

#ifdef __cplusplus
}
#endif
