/* Statistics of quantized tensors, on the host. */
#include "train/measure.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/codec.h"

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
    static double field_##name(const mt_measure *m)                                                \
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
FIELD(cosine, ratio(m->product, sqrt(m->squares) * sqrt(m->decoded_squares)))
FIELD(scale_min, m->scales ? m->scale_min : (double)NAN)
FIELD(scale_max, m->scales ? m->scale_max : (double)NAN)

#define ENTRY(name) { #name, field_##name },
const mt_measure_field mt_measure_fields[] = { ENTRY(count) ENTRY(nonfinite) ENTRY(min) ENTRY(max)
                                                   ENTRY(mean) ENTRY(std) ENTRY(l2) ENTRY(amax)
                                                       ENTRY(underflow) ENTRY(saturated) ENTRY(mse)
                                                           ENTRY(snr) ENTRY(cosine) ENTRY(scale_min)
                                                               ENTRY(scale_max) };
const int mt_measure_field_count = sizeof mt_measure_fields / sizeof *mt_measure_fields;

static void add_scales(mt_measure *m, int64_t count, double least, double most)
{
    if (count && (!m->scales || least < m->scale_min)) m->scale_min = least;
    if (count && (!m->scales || most > m->scale_max)) m->scale_max = most;
    m->scales += count;
}

void mt_measure_merge(mt_measure *to, const mt_measure *from)
{
    if (from->count && (!to->count || from->min < to->min)) to->min = from->min;
    if (from->count && (!to->count || from->max > to->max)) to->max = from->max;
    to->count += from->count, to->nonfinite += from->nonfinite, to->nonzero += from->nonzero;
    to->vanished += from->vanished, to->saturated += from->saturated;
    to->amax = fmax(to->amax, from->amax);
    to->sum += from->sum, to->squares += from->squares;
    to->error_squares += from->error_squares, to->product += from->product;
    to->decoded_squares += from->decoded_squares;
    add_scales(to, from->scales, from->scale_min, from->scale_max);
    for (int i = 0; i < 256; i++) to->codes[i] += from->codes[i];
}

/* ---- one member ---------------------------------------------------------------------------------
 */

/* A direction of one member: its source, what its codes hold, and what they were made with. */
struct view {
    const mt_direction *d;
    mt_dir dir;
    int64_t m, k, cell_rows, cell_cols;
    float *x;       /* rotated under rht */
    float *cast;    /* what is quantized: x, or what rows hold of it (source=dequantized) */
    const float *q; /* decoded */
    const uint8_t *codes;
    const void *scales;
    float s_dec, given; /* of nvfp4; of fp8_delayed */
    float ovf;
};

/* NUMERICS section 2: 16 tokens of a column times diag(s) H16 / 4, rounded to bf16; the tail is
 * only rounded. */
static void rotate(float *values, int64_t m, int64_t k, uint16_t mask)
{
    for (int64_t c = 0; c < k; c++)
        for (int64_t r = 0; r < m; r += 16) {
            float in[16], *x = values + r * k + c;
            int rows = m - r < 16 ? (int)(m - r) : 16;
            for (int i = 0; i < rows; i++) in[i] = x[i * k];
            for (int j = 0; j < rows; j++) {
                float acc = in[j];
                if (rows == 16) {
                    acc = 0;
                    for (int i = 0; i < 16; i++) {
                        bool minus = (__builtin_popcount((unsigned)(i & j)) & 1) ^ (mask >> i & 1);
                        acc += in[i] * (minus ? -0.25f : 0.25f);
                    }
                }
                x[j * k] = mt_bf16_to_f32(mt_f32_to_bf16(acc));
            }
        }
}

/* What a cell's elements were multiplied by before the cast, and what its codes decode with. */
static float encoding_scale(const struct view *v, int64_t cell_row, int64_t cell_col, float amax,
                            double *decode)
{
    const mt_format *f = v->d->format;
    mt_direction_shape shape = mt_direction_shape_of(v->d, v->dir, v->m, v->k);
    int64_t line = v->dir == MT_ROW ? cell_row * v->cell_rows : cell_col * v->cell_cols;
    int64_t block = v->dir == MT_ROW ? cell_col : cell_row;
    *decode = 0;
    if (f->scale == MT_SCALE_NONE) return 1;
    if (f->scale == MT_SCALE_F32) {
        float s = f->delayed ? v->given
                             : mt_encode_scale(amax, mt_elements[v->d->options.element].max,
                                               v->d->options.pow2, f->block ? v->ovf : FLT_MAX);
        *decode = (double)(1 / s);
        return s;
    }
    int stored = ((const uint8_t *)v->scales)[mt_scale_place(v->d, &shape, line, block)];
    if (f->scale == MT_SCALE_E8M0) {
        *decode = ldexp(1, stored - 127);
        return ldexpf(1, 127 - stored);
    }
    float scale = mt_decode_number(mt_codec_of(MT_ELEMENT_E4M3), (uint8_t)stored) * v->s_dec,
          enc = 1 / scale;
    *decode = (double)scale;
    return enc > FLT_MAX ? FLT_MAX : enc;
}

static void add_element(mt_measure *m, float x, float cast, float q, float enc, float most)
{
    double a = (double)x, b = (double)q;
    if (!isfinite(a)) {
        m->nonfinite++;
        return;
    }
    if (!m->count || a < m->min) m->min = a;
    if (!m->count || a > m->max) m->max = a;
    m->count++;
    m->amax = fmax(m->amax, fabs(a));
    m->sum += a, m->squares += a * a;
    m->nonzero += a != 0, m->vanished += a != 0 && b == 0;
    m->saturated += fabsf(cast * enc) > most;
    m->error_squares += (a - b) * (a - b), m->product += a * b, m->decoded_squares += b * b;
}

static void add_cell(mt_measure *m, const struct view *v, int64_t i, int64_t j)
{
    int64_t r1 = (i + 1) * v->cell_rows < v->m ? (i + 1) * v->cell_rows : v->m;
    int64_t c1 = (j + 1) * v->cell_cols < v->k ? (j + 1) * v->cell_cols : v->k;
    bool coded = v->d->format->element != MT_ELEMENT_PLAIN;
    float amax = 0, most = coded ? mt_elements[v->d->options.element].max : (float)INFINITY;
    for (int64_t r = i * v->cell_rows; r < r1; r++)
        for (int64_t c = j * v->cell_cols; c < c1; c++) {
            float a = fabsf(v->cast[r * v->k + c]);
            if (a > amax) amax = a;
        }
    double decode;
    float enc = encoding_scale(v, i, j, amax, &decode);
    if (coded && amax > 0) add_scales(m, 1, decode, decode);
    for (int64_t r = i * v->cell_rows; r < r1; r++)
        for (int64_t c = j * v->cell_cols; c < c1; c++) {
            int64_t at = r * v->k + c;
            add_element(m, v->x[at], v->cast[at], v->q[at], enc, most);
        }
}

static void add_codes(mt_measure *m, const struct view *v)
{
    mt_direction_shape s = mt_direction_shape_of(v->d, v->dir, v->m, v->k);
    int per_byte = v->d->format->codes_per_byte;
    int64_t width = s.transposed ? v->m : v->k;
    for (int64_t l = 0; l < s.code_lines; l++)
        for (int64_t c = 0; c < width; c++) {
            int byte = v->codes[l * s.code_pitch + c / per_byte];
            m->codes[per_byte == 1 ? byte : byte >> (c % 2 * 4) & 15]++;
        }
}

static void measure_member(mt_measure *m, struct view *v)
{
    const mt_format *f = v->d->format;
    bool square = v->d->options.two_d;
    int64_t block = f->block;
    v->cell_rows = v->dir == MT_COL || square ? block : 1;
    v->cell_cols = v->dir == MT_ROW || square ? block : 1;
    if (!block) v->cell_rows = v->m, v->cell_cols = v->k;
    *m = (mt_measure){ 0 };
    if (!v->m || !v->k) return;
    if (v->d->options.rht) rotate(v->x, v->m, v->k, v->d->options.rht_mask);
    if (v->d->options.rht && v->cast != v->x) rotate(v->cast, v->m, v->k, v->d->options.rht_mask);
    for (int64_t i = 0; i * v->cell_rows < v->m; i++)
        for (int64_t j = 0; j * v->cell_cols < v->k; j++) add_cell(m, v, i, j);
    if (f->element != MT_ELEMENT_PLAIN) add_codes(m, v);
}

/* ---- a direction --------------------------------------------------------------------------------
 */

static mt_status decode(mt_stream *stream, float *to, const mt_qtensor *q, mt_dir dir,
                        mt_dtype dtype)
{
    return mt_dequantize(stream,
                         &(struct mt_dequantize_args){
                             .dtype = dtype, .src = q, .dir = dir, .y = to, .y_dtype = MT_F32 });
}

/* What is measured, in the host's memory. */
struct copy {
    mt_device *from;
    mt_qtensor plain;
    float *scale[MT_DIR_COUNT];
    const uint32_t *first_step;
    void *memory[5 + MT_DIR_COUNT];
    int used;
};

/* *p becomes a copy of the `bytes` there; NULL stays NULL. */
static mt_status fetch(struct copy *c, const void **p, size_t bytes)
{
    if (!*p) return MT_OK;
    void *host = c->memory[c->used++] = malloc(bytes + 1);
    MT_REQUIRE(host, MT_ENOMEM, "statistics: no memory for %zu bytes", bytes);
    MT_TRY(mt_device_copy(c->from, host, *p, bytes));
    *p = host;
    return MT_OK;
}

static mt_status fetch_tensor(struct copy *c, const struct mt_quantize_args *args)
{
    mt_group *g = &c->plain.group;
    mt_direction *d = &c->plain.dir[MT_ROW];
    size_t members = (size_t)g->members, word = sizeof(int64_t);
    MT_TRY(fetch(c, (const void **)&g->first_dims, members * word));
    MT_TRY(fetch(c, (const void **)&g->last_dims, members * word));
    MT_TRY(fetch(c, (const void **)&g->offsets, (members + 1) * word));
    MT_TRY(fetch(c, (const void **)&d->codes, mt_direction_code_bytes(d, MT_ROW, g)));
    c->plain.dir[MT_COL] = *d;
    for (int i = 0; i < MT_DIR_COUNT; i++) {
        const void *scale = args->scale[i];
        MT_TRY(fetch(c, &scale, members * sizeof(float)));
        if (scale) c->scale[i] = c->memory[c->used - 1];
    }
    return fetch(c, (const void **)&c->first_step, sizeof *c->first_step);
}

static void view_and_measure(mt_measure *m, const struct copy *c, const mt_qtensor *q, mt_dir dir,
                             float *x, float *cast, const float *values)
{
    const mt_group *g = &c->plain.group;
    const mt_direction *d = &q->dir[dir];
    mt_dtype source = c->plain.dir[MT_ROW].format->dtype;
    const char *codes = d->codes, *scales = d->scales;
    for (int64_t i = 0; i < g->members; i++) {
        int64_t rows = mt_group_rows(g, i), cols = mt_group_cols(g, i), at = mt_group_offset(g, i);
        mt_direction_shape shape = mt_direction_shape_of(d, dir, rows, cols);
        struct view v = { .d = d,
                          .dir = dir,
                          .m = rows,
                          .k = cols,
                          .x = x + at,
                          .cast = cast + at,
                          .q = values + at,
                          .codes = (const uint8_t *)codes,
                          .scales = scales,
                          .given = c->scale[dir] ? c->scale[dir][i] : 1,
                          .ovf = cast != x           ? FLT_MAX
                                 : source == MT_BF16 ? mt_bf16_to_f32(0x7f7f)
                                 : source == MT_F16  ? 65504.0f
                                                     : FLT_MAX };
        if (d->format->second_level) v.s_dec = mt_nvfp4_decode_scale(&d->options, d->amax[i]);
        measure_member(&m[i], &v);
        codes += shape.code_bytes;
        scales += (size_t)shape.scale_count * shape.scale_size;
    }
}

mt_status mt_measure_direction(mt_measure *m, mt_device *device, mt_stream *host,
                               const mt_qtensor *plain, const mt_qtensor *out, mt_dir dir,
                               const struct mt_quantize_args *args, float rescale)
{
    mt_status status = MT_OK;
    mt_qtensor q = *out;
    struct mt_quantize_args now = *args;
    struct copy c = { .from = device, .plain = *plain, .first_step = args->first_step };
    size_t count = (size_t)mt_group_capacity(&plain->group) + 1;
    mt_format_spec spec = mt_direction_spec(&q.dir[dir]);
    bool chained = spec.options.from_dequantized;
    if (chained && !q.dir[MT_ROW].format)
        q.dir[MT_ROW] = mt_direction_of(mt_format_spec_of_rows(spec));
    float *x = malloc(count * sizeof *x), *values = malloc(count * sizeof *values);
    float *rows = chained ? malloc(count * sizeof *rows) : NULL;
    void *memory = calloc(1, mt_qtensor_bytes(&q) + 1);
    if (!x || !values || (chained && !rows) || !memory) {
        status = MT_FAIL(MT_ENOMEM, "statistics: no memory for %zu elements", count);
        goto cleanup;
    }
    MT_TRY_CLEANUP(fetch_tensor(&c, args));
    for (int64_t i = 0; c.scale[dir] && i < c.plain.group.members; i++)
        c.scale[dir][i] = fminf(c.scale[dir][i] * rescale, FLT_MAX);
    q.group = c.plain.group;
    mt_qtensor_place(&q, memory);
    now.src = &c.plain, now.src_dir = MT_ROW, now.out = &q;
    memcpy(now.scale, c.scale, sizeof c.scale);
    now.first_step = c.first_step;
    MT_TRY_CLEANUP(mt_quantize(host, &now));
    MT_TRY_CLEANUP(decode(host, x, &c.plain, MT_ROW, args->dtype));
    MT_TRY_CLEANUP(decode(host, values, &q, dir, args->dtype));
    if (chained) MT_TRY_CLEANUP(decode(host, rows, &q, MT_ROW, args->dtype));
    view_and_measure(m, &c, &q, dir, x, chained ? rows : x, values);
cleanup:
    for (int i = 0; i < c.used; i++) free(c.memory[i]);
    free(x), free(values), free(rows), free(memory);
    return status;
}
