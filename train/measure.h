/* Statistics of quantized tensors as runs write them: their fields, and how a direction is
 * measured.
 */
#pragma once

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_measure_field {
    const char *name;
    double (*value)(const mt_measured *m);
} mt_measure_field;

/* count nonfinite min max mean std l2 amax underflow saturated mse snr cosine scale_min scale_max;
 * NaN where a field has no value (an empty member, an error of 0 in snr). */
extern const mt_measure_field mt_measure_fields[];
extern const int mt_measure_field_count;

/* Device memory that calls use one after another, which grows as they need it; {0} has none. Where
 * steps are recorded it stays between them: what is freed makes them be recorded anew. */
typedef struct mt_measure_room {
    mt_device *device;
    void *memory;
    size_t bytes;
} mt_measure_room;
void mt_measure_room_free(mt_measure_room *room);

/* Quantizes `plain` by args (out, amax aside: scale, seed, stream, step) in direction `dir` of
 * `out`, a qtensor whose directions have formats and options but no memory, and measures each
 * member: m [members], in the host's memory. fp8_delayed's scale is `rescale` times args->scale,
 * which may be that of other elements. All is done on the stream's device, in `room`. */
mt_status mt_measure_direction(mt_measured *m, mt_stream *stream, const mt_qtensor *plain,
                               const mt_qtensor *out, mt_dir dir,
                               const struct mt_quantize_args *args, float rescale,
                               mt_measure_room *room);

#ifdef __cplusplus
}
#endif
