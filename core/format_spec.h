/* A format with its options, and its text: FMT[:OPT[+OPT]...] (NUMERICS section 8). */
#pragma once

#include "core/format.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_format_spec {
    const mt_format *format;
    mt_format_options options;
} mt_format_spec;

enum { MT_FORMAT_SPEC_TEXT = 128 };

/* The format without options. */
mt_format_spec mt_format_spec_default(mt_format_id id);

/* Reads "nvfp4:2d+sr" and checks it.
 * Errors: MT_ECONFIG names the text and the unknown name, the value, or the rule that is broken. */
mt_status mt_format_spec_parse(mt_format_spec *spec, const char *text);

/* The same without the check of combinations, for callers that add defaults of their own: `given`
 * receives the MT_OPT_* bits that the text names (also those it names to keep them off). */
mt_status mt_format_spec_read(mt_format_spec *spec, uint32_t *given, const char *text);

/* Fails with the reason when an option has no meaning for the format or two options clash. */
mt_status mt_format_spec_check(const mt_format_spec *spec);

/* Options other than the format's defaults, as MT_OPT_* bits. */
uint32_t mt_format_spec_options(const mt_format_spec *spec);

/* Without the options that concern column directions alone (rht, source), for a row direction. */
mt_format_spec mt_format_spec_of_rows(mt_format_spec spec);

/* Whether bf16 holds what coded elements are worth, but for the factor that a member may have: a
 * code of at most 4 significant bits times a power of two, or E2M1 times an E4M3 scale, at most 6
 * (but for exponents at the ends of f32's own range: NUMERICS section 5). */
static inline bool mt_format_spec_fits_bf16(const mt_format_spec *spec)
{
    const mt_format *f = spec->format;
    return f->scale == MT_SCALE_E8M0 || mt_format_has_factor(f) ||
           (f->scale == MT_SCALE_F32 && spec->options.pow2);
}

bool mt_format_spec_equal(const mt_format_spec *a, const mt_format_spec *b);

/* The shortest text that reads back as `spec` where the options in `defaults` (E5M2, 2D, SR) are on
 * unless the text says otherwise. */
void mt_format_spec_print(char text[MT_FORMAT_SPEC_TEXT], const mt_format_spec *spec,
                          uint32_t defaults);

#ifdef __cplusplus
}
#endif
