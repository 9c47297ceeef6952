/* Statistics of quantized tensors: their fields, and how they are taken. */
#include "train/measure.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

/* ---- fields -------------------------------------------------------------------------------------
 */

static double part(int64_t some, int64_t all)
{
    return all ? (double)some / (double)all : (double)NAN;
}

static double ratio(double a, double b)
{
    return b != 0 ? a / b : (double)NAN;
}

#define FIELD(name, value)                                                                         \
    static double field_##name(const mt_measured *m)                                               \
    {                                                                                              \
        return value;                                                                              \
    }
FIELD(count, (double)m->count)
FIELD(nonfinite, (double)m->nonfinite)
FIELD(min, m->count ? m->min : (double)NAN)
FIELD(max, m->count ? m->max : (double)NAN)
FIELD(mean, ratio(m->sum, (double)m->count))
FIELD(std,
      sqrt(fmax(0, ratio(m->squares, (double)m->count) - pow(ratio(m->sum, (double)m->count), 2))))
FIELD(l2, sqrt(m->squares))
FIELD(amax, m->amax)
FIELD(underflow, part(m->vanished, m->nonzero))
FIELD(saturated, part(m->saturated, m->count))
FIELD(mse, ratio(m->error_squares, (double)m->count))
FIELD(snr, m->squares > 0 ? 10 * log10(ratio(m->squares, m->error_squares)) : (double)NAN)
FIELD(cosine, ratio(m->product, sqrt(m->squares * m->decoded_squares)))
FIELD(scale_min, m->scales ? m->scale_min : (double)NAN)
FIELD(scale_max, m->scales ? m->scale_max : (double)NAN)

#define ENTRY(name) { #name, field_##name },
const mt_measure_field mt_measure_fields[] = { ENTRY(count) ENTRY(nonfinite) ENTRY(min) ENTRY(max)
                                                   ENTRY(mean) ENTRY(std) ENTRY(l2) ENTRY(amax)
                                                       ENTRY(underflow) ENTRY(saturated) ENTRY(mse)
                                                           ENTRY(snr) ENTRY(cosine) ENTRY(scale_min)
                                                               ENTRY(scale_max) };
const int mt_measure_field_count = sizeof mt_measure_fields / sizeof *mt_measure_fields;

/* ---- a direction --------------------------------------------------------------------------------
 */

void mt_measure_room_free(mt_measure_room *room)
{
    if (room->device) mt_device_free(room->device, &room->memory, room->bytes, MT_MEMORY_STATE);
    *room = (mt_measure_room){ 0 };
}

static mt_status make_room(mt_measure_room *room, mt_device *device, size_t bytes)
{
    if (room->device == device && bytes <= room->bytes) return MT_OK;
    mt_measure_room_free(room);
    MT_TRY(mt_device_alloc(device, &room->memory, bytes, MT_MEMORY_STATE));
    room->device = device, room->bytes = bytes;
    return MT_OK;
}

/* to = from times `by`, of n members. */
static mt_status rescale(mt_device *device, float *to, const float *from, float by, int64_t n)
{
    const size_t bytes = (size_t)n * sizeof(float);
    float *host = calloc((size_t)n + 1, sizeof *host);
    MT_REQUIRE(host, MT_ENOMEM, "statistics: no memory for %lld scales", (long long)n);
    mt_status status = mt_device_copy(device, host, from, bytes);
    for (int64_t i = 0; i < n; i++) host[i] = fminf(host[i] * by, FLT_MAX);
    if (status == MT_OK) status = mt_device_copy(device, to, host, bytes);
    free(host);
    return status;
}

static size_t aligned(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

mt_status mt_measure_direction(mt_measured *m, mt_stream *stream, const mt_qtensor *plain,
                               const mt_qtensor *out, mt_dir dir,
                               const struct mt_quantize_args *args, float by, mt_measure_room *room)
{
    const size_t n = (size_t)plain->group.members;
    mt_qtensor q = mt_qtensor_select(out, dir);
    struct mt_quantize_args now = *args;
    mt_format_spec spec = mt_direction_spec(&q.dir[dir]);
    if (spec.options.from_dequantized)
        q.dir[MT_ROW] = out->dir[MT_ROW].format ? out->dir[MT_ROW]
                                                : mt_direction_of(mt_format_spec_of_rows(spec));
    if (n == 0) return MT_OK;
    const size_t measured = aligned(n * sizeof *m), scales = aligned(n * sizeof(float));
    MT_TRY(make_room(room, stream->device, measured + scales + mt_qtensor_bytes(&q)));
    char *p = room->memory;
    if (now.scale[dir] && by != 1) {
        float *scale = (float *)(void *)(p + measured);
        MT_TRY(rescale(stream->device, scale, now.scale[dir], by, (int64_t)n));
        now.scale[dir] = scale;
    }
    mt_qtensor_place(&q, p + measured + scales);
    now.src = plain, now.src_dir = MT_ROW, now.out = &q;
    MT_TRY(mt_quantize(stream, &now));
    MT_TRY(mt_measure(stream, &(struct mt_measure_args){ .dtype = args->dtype,
                                                         .src = plain,
                                                         .out = &q,
                                                         .dir = dir,
                                                         .scale = now.scale[dir],
                                                         .measured = (mt_measured *)(void *)p }));
    return mt_device_copy(stream->device, m, p, n * sizeof *m);
}
