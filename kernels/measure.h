/* Statistics of a quantized tensor (NUMERICS section 7): what a format does to the values it is
 * given, member by member, in f64. */
#pragma once

#include <float.h>

#include "core/device.h"
#include "core/qtensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sums over the finite elements of a member, or of several. */
typedef struct mt_measured {
    int64_t count, nonfinite, nonzero;
    int64_t vanished;  /* not 0, but 0 when decoded */
    int64_t saturated; /* beyond the largest code before they are cut */
    double min, max, amax, sum, squares;
    double error_squares, product, decoded_squares; /* of x - q, x q, q */
    int64_t scales;                                 /* of blocks that are not all zeros */
    double scale_min, scale_max;                    /* of these, as values */
    int64_t codes[256];
} mt_measured;

void mt_measure_merge(mt_measured *to, const mt_measured *from);

/* measured[i] = what direction `dir` of `out` has of member i of `src`, from which mt_quantize made
 * it.
 *
 * src: plain, of which direction row is read. out: the same group; direction `dir` compact, its
 * scales in either layout, its amax there where a member has one scale or a second level. Under rht
 * the rotated values are what is measured. Under from_dequantized `out` has the row direction, too:
 * errors are those to src, scales and saturation of what the rows hold. scale: fp8_delayed's s,
 * f32[N], as quantize got it; NULL: 1. measured: device, [N], written whole. Counts, codes and the
 * values of extremes are the same on every device; sums, whose order is the kernel set's own, the
 * same in every call. On the CPU it takes two or three times the largest member in f32 as scratch,
 * which stays as all scratch does. */
struct mt_measure_args {
    mt_dtype dtype;
    const mt_qtensor *src, *out;
    mt_dir dir;
    const float *scale;
    mt_measured *measured;
};

/* F's ovf (NUMERICS section 2) of blocks of fp8_block: of the source's type. */
static inline float mt_measure_overflow(const struct mt_measure_args *a)
{
    const mt_dtype source = a->src->dir[MT_ROW].format->dtype;
    if (a->out->dir[a->dir].options.from_dequantized) return FLT_MAX;
    return source == MT_BF16 ? mt_bf16_to_f32(0x7f7f) : source == MT_F16 ? 65504.0f : FLT_MAX;
}

#ifdef __cplusplus
}
#endif
