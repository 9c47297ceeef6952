/* The factor of a member's sums: what bf16 does not hold of its operands, scales that are one for
 * all of a member. */
#pragma once

#include "core/qtensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A member's scale that is not in its decoded codes, few bytes of a kernel's arguments. */
typedef struct mt_gemm_scale {
    const float *values; /* of members, NULL: 1 */
    int bound;           /* values are amaxes, of a second level with this bound; 0: scales */
} mt_gemm_scale;

typedef struct mt_gemm_factor {
    mt_gemm_scale a, b;
} mt_gemm_factor;

MT_HOST_DEVICE bool mt_gemm_has_factor(const mt_gemm_factor *f)
{
    return f->a.values || f->b.values;
}

MT_HOST_DEVICE float mt_gemm_scale_of(const mt_gemm_scale *s, int64_t member)
{
    mt_format_options options; /* the bound is all that is asked of it */
    if (!s->values) return 1;
    if (!s->bound) return s->values[member];
    options.four_over_six = s->bound;
    return mt_nvfp4_decode_scale(&options, s->values[member]);
}

/* The product of both, exact. */
MT_HOST_DEVICE double mt_gemm_factor_of(const mt_gemm_factor *f, int64_t member)
{
    return (double)mt_gemm_scale_of(&f->a, member) * (double)mt_gemm_scale_of(&f->b, member);
}

#ifdef __cplusplus
}
#endif
