/* The factor of a member's sums: what bf16 does not hold of its operands, scales that are one for
 * all of a member. */
#pragma once

#include "core/qtensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A member's scale that is not in its decoded codes: the one or, of a second level, the other; both
 * NULL: 1. */
typedef struct mt_gemm_scale {
    const float *scales, *amax;
    mt_format_options options;
} mt_gemm_scale;

typedef struct mt_gemm_factor {
    mt_gemm_scale a, b;
} mt_gemm_factor;

MT_HOST_DEVICE bool mt_gemm_scales(const mt_gemm_scale *s)
{
    return s->scales || s->amax;
}

MT_HOST_DEVICE bool mt_gemm_has_factor(const mt_gemm_factor *f)
{
    return mt_gemm_scales(&f->a) || mt_gemm_scales(&f->b);
}

MT_HOST_DEVICE float mt_gemm_scale_of(const mt_gemm_scale *s, int64_t member)
{
    if (s->scales) return s->scales[member];
    return s->amax ? mt_nvfp4_decode_scale(&s->options, s->amax[member]) : 1.0f;
}

/* The product of both, exact. */
MT_HOST_DEVICE double mt_gemm_factor_of(const mt_gemm_factor *f, int64_t member)
{
    return (double)mt_gemm_scale_of(&f->a, member) * (double)mt_gemm_scale_of(&f->b, member);
}

#ifdef __cplusplus
}
#endif
