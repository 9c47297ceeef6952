/* Statistics of quantized tensors: adding them up, and the check of the op's arguments. */
#include "kernels/measure.h"

#include <math.h>

#include "kernels/check.h"

void mt_measure_merge(mt_measured *to, const mt_measured *from)
{
    if (from->count && (!to->count || from->min < to->min)) to->min = from->min;
    if (from->count && (!to->count || from->max > to->max)) to->max = from->max;
    if (from->scales && (!to->scales || from->scale_min < to->scale_min))
        to->scale_min = from->scale_min;
    if (from->scales && (!to->scales || from->scale_max > to->scale_max))
        to->scale_max = from->scale_max;
    to->count += from->count, to->nonfinite += from->nonfinite, to->nonzero += from->nonzero;
    to->vanished += from->vanished, to->saturated += from->saturated, to->scales += from->scales;
    to->amax = fmax(to->amax, from->amax);
    to->sum += from->sum, to->squares += from->squares;
    to->error_squares += from->error_squares, to->product += from->product;
    to->decoded_squares += from->decoded_squares;
    for (int i = 0; i < 256; i++) to->codes[i] += from->codes[i];
}

mt_status mt_measure_check(const struct mt_measure_args *a)
{
    MT_TRY(mt_check_source(a->src, MT_ROW, "measure"));
    MT_TRY(mt_check_source(a->out, a->dir, "measure"));
    const mt_format *plain = a->src->dir[MT_ROW].format;
    const mt_direction *d = &a->out->dir[a->dir];
    MT_REQUIRE(plain->element == MT_ELEMENT_PLAIN, MT_EINVAL,
               "measure: the source is %s, not plain", plain->name);
    MT_REQUIRE(mt_check_same_group(&a->src->group, &a->out->group), MT_EINVAL,
               "measure: source and result are not of one group");
    MT_REQUIRE(d->layout == MT_LAYOUT_COMPACT, MT_EUNSUPPORTED, "measure: codes are not compact");
    MT_REQUIRE(d->amax || !mt_format_has_factor(d->format) || a->out->group.members == 0, MT_EINVAL,
               "measure: the amax of %s is NULL", d->format->name);
    MT_REQUIRE(a->dir == MT_COL || (!d->options.rht && !d->options.from_dequantized), MT_EINVAL,
               "measure: rht and source=dequantized are for the column direction");
    if (d->options.from_dequantized) {
        MT_TRY(mt_check_source(a->out, MT_ROW, "measure: the rows"));
        MT_REQUIRE(a->out->dir[MT_ROW].layout == MT_LAYOUT_COMPACT, MT_EUNSUPPORTED,
                   "measure: codes of the rows are not compact");
    }
    MT_CHECK_POINTER("measure", a, measured, a->out->group.members);
    return MT_OK;
}
