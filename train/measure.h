/* Statistics of a quantized tensor (NUMERICS section 7): what a format does to the values it is
 * given, member by member, in f64. */
#pragma once

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sums over the finite elements of a member, or of several. */
typedef struct mt_measure {
    int64_t count, nonfinite, nonzero;
    int64_t vanished;  /* not 0, but 0 when decoded */
    int64_t saturated; /* beyond the largest code before they are cut */
    double min, max, amax, sum, squares;
    double error_squares, product, decoded_squares; /* of x - q, x q, q */
    int64_t scales;                                 /* of blocks that are not all zeros */
    double scale_min, scale_max;                    /* of these, as values */
    int64_t codes[256];
} mt_measure;

typedef struct mt_measure_field {
    const char *name;
    double (*value)(const mt_measure *m);
} mt_measure_field;

/* count nonfinite min max mean std l2 amax underflow saturated mse snr cosine scale_min scale_max;
 * NaN where a field has no value (an empty member, an error of 0 in snr). */
extern const mt_measure_field mt_measure_fields[];
extern const int mt_measure_field_count;

/* Memory that calls use one after another, which grows as they need it; {0} has none. */
enum { MT_MEASURE_PLACES = 12 };
typedef struct mt_measure_room {
    void *memory[MT_MEASURE_PLACES];
    size_t bytes[MT_MEASURE_PLACES];
} mt_measure_room;
void mt_measure_room_free(mt_measure_room *room);

void mt_measure_merge(mt_measure *to, const mt_measure *from);

/* Quantizes `plain` by args (out, amax aside: scale, seed, stream, step) in direction `dir` of
 * `out`, a qtensor whose directions have formats and options but no memory, and measures each
 * member: m [members]. Under rht the rotated values are what is measured; under source=dequantized
 * errors are those to `plain`, scales and saturation of what the rows hold. fp8_delayed's scale is
 * `rescale` times args->scale, which may be that of other elements. `plain` and args->scale
 * are in the memory of `device`; the work is done on copies by `host`, a stream of a cpu device, in
 * the same bits, in `room`. */
mt_status mt_measure_direction(mt_measure *m, mt_device *device, mt_stream *host,
                               const mt_qtensor *plain, const mt_qtensor *out, mt_dir dir,
                               const struct mt_quantize_args *args, float rescale,
                               mt_measure_room *room);

#ifdef __cplusplus
}
#endif
