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

/* A member is measured in so many parts, whatever threads there are, whose sums are then added in
 * order. */
enum { PARTS = 64 };

/* A direction of one member: its source, what its codes hold, and what they were made with. */
struct view {
    const mt_direction *d;
    mt_direction_shape shape;
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

/* What each part counts, and a line of its own, as long as the widest member's. */
struct desk {
    mt_measure parts[PARTS];
    int64_t width;
    float lines[]; /* [PARTS][width] */
};

/* NUMERICS section 2: 16 tokens of a column times diag(s) H16 / 4, rounded to bf16; the tail is
 * only rounded. */
static void rotate(float *values, int64_t m, int64_t k, uint16_t mask)
{
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < m; r += 16)
        for (int64_t c = 0; c < k; c++) {
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
    int stored = ((const uint8_t *)v->scales)[mt_scale_place(v->d, &v->shape, line, block)];
    if (f->scale == MT_SCALE_E8M0) {
        *decode = ldexp(1, stored - 127);
        return ldexpf(1, 127 - stored);
    }
    float scale = mt_decode_number(mt_codec_of(MT_ELEMENT_E4M3), (uint8_t)stored) * v->s_dec,
          enc = 1 / scale;
    *decode = (double)scale;
    return enc > FLT_MAX ? FLT_MAX : enc;
}

static bool is_coded(const struct view *v)
{
    return v->d->format->element != MT_ELEMENT_PLAIN;
}

/* most[c] = the largest magnitude in column c of rows [r0, r1) of what is quantized; NaN is none.
 */
static void largest(float *most, const struct view *v, int64_t r0, int64_t r1)
{
    for (int64_t c = 0; c < v->k; c++) most[c] = 0;
    for (int64_t r = r0; r < r1; r++) {
        const float *x = v->cast + r * v->k;
#pragma omp simd
        for (int64_t c = 0; c < v->k; c++) {
            float a = fabsf(x[c]);
            most[c] = a > most[c] ? a : most[c];
        }
    }
}

/* Of a row of cells, what each column was multiplied by, from its largest magnitude. */
static void encode_cells(mt_measure *m, const struct view *v, int64_t i, float *line)
{
    for (int64_t j = 0, c0 = 0; c0 < v->k; j++, c0 += v->cell_cols) {
        int64_t c1 = c0 + v->cell_cols < v->k ? c0 + v->cell_cols : v->k;
        float amax = 0;
        double decode;
        for (int64_t c = c0; c < c1; c++) amax = line[c] > amax ? line[c] : amax;
        float enc = encoding_scale(v, i, j, amax, &decode);
        if (is_coded(v) && amax > 0) add_scales(m, 1, decode, decode);
        for (int64_t c = c0; c < c1; c++) line[c] = enc;
    }
}

/* Counts of a row, and its least and largest elements. */
static void count_row(mt_measure *m, const float *x, const float *cast, const float *q,
                      const float *enc, float most, int64_t k)
{
    int64_t count = 0, nonzero = 0, vanished = 0, saturated = 0;
    float least = INFINITY, largest = -INFINITY;
#pragma omp simd reduction(+ : count, nonzero, vanished, saturated) reduction(min : least)         \
    reduction(max : largest)
    for (int64_t c = 0; c < k; c++) {
        const bool finite = fabsf(x[c]) <= FLT_MAX, any = finite & (x[c] != 0);
        const float low = finite ? x[c] : INFINITY, high = finite ? x[c] : -INFINITY;
        count += finite, nonzero += any, vanished += any & (q[c] == 0);
        saturated += finite & (fabsf(cast[c] * enc[c]) > most);
        least = low < least ? low : least, largest = high > largest ? high : largest;
    }
    if (count && (!m->count || (double)least < m->min)) m->min = (double)least;
    if (count && (!m->count || (double)largest > m->max)) m->max = (double)largest;
    m->count += count, m->nonfinite += k - count;
    m->nonzero += nonzero, m->vanished += vanished, m->saturated += saturated;
}

/* Its sums. */
static void sum_row(mt_measure *m, const float *x, const float *q, int64_t k)
{
    double sum = 0, squares = 0, errors = 0, product = 0, decoded = 0;
#pragma omp simd reduction(+ : sum, squares, errors, product, decoded)
    for (int64_t c = 0; c < k; c++) {
        const bool finite = fabsf(x[c]) <= FLT_MAX;
        const double a = finite ? (double)x[c] : 0, b = finite ? (double)q[c] : 0;
        sum += a, squares += a * a;
        errors += (a - b) * (a - b), product += a * b, decoded += b * b;
    }
    m->sum += sum, m->squares += squares;
    m->error_squares += errors, m->product += product, m->decoded_squares += decoded;
}

static void add_rows(mt_measure *m, const struct view *v, int64_t r0, int64_t r1, const float *enc)
{
    const float most = is_coded(v) ? mt_elements[v->d->options.element].max : (float)INFINITY;
    for (int64_t r = r0; r < r1; r++) {
        const float *x = v->x + r * v->k, *q = v->q + r * v->k;
        count_row(m, x, v->cast + r * v->k, q, enc, most, v->k);
        sum_row(m, x, q, v->k);
    }
}

static void add_codes(mt_measure *m, const struct view *v, int64_t l0, int64_t l1)
{
    int per_byte = v->d->format->codes_per_byte;
    int64_t width = v->shape.transposed ? v->m : v->k;
    for (int64_t l = l0; l < l1; l++) {
        const uint8_t *codes = v->codes + l * v->shape.code_pitch;
        for (int64_t c = 0; c < width; c++) {
            int byte = codes[c / per_byte];
            m->codes[per_byte == 1 ? byte : byte >> (c % 2 * 4) & 15]++;
        }
    }
}

/* Of so many in all, each part's. */
static int64_t of_parts(int64_t all)
{
    return (all + PARTS - 1) / PARTS;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Part p of all rows, or rows of cells, and of the lines of codes. */
static void measure_part(mt_measure *m, const struct view *v, int p, float *line, bool cells)
{
    const int64_t rows = (v->m + v->cell_rows - 1) / v->cell_rows,
                  each = of_parts(cells ? rows : v->m);
    const int64_t lines = of_parts(v->shape.code_lines);
    const int64_t first = p * each, last = least(first + each, cells ? rows : v->m);
    if (is_coded(v)) add_codes(m, v, p * lines, least((p + 1) * lines, v->shape.code_lines));
    if (!cells) add_rows(m, v, first, last, line);
    for (int64_t i = first; cells && i < last; i++) {
        const int64_t r0 = i * v->cell_rows, r1 = least(r0 + v->cell_rows, v->m);
        largest(line, v, r0, r1);
        encode_cells(m, v, i, line);
        add_rows(m, v, r0, r1, line);
    }
}

/* Of a member that is one cell: its scale, from the largest magnitude of all parts. */
static void encode_whole(mt_measure *m, const struct view *v, struct desk *b)
{
    const int64_t each = of_parts(v->m);
#pragma omp parallel for schedule(static)
    for (int p = 0; p < PARTS; p++)
        largest(b->lines + p * b->width, v, p * each, least((p + 1) * each, v->m));
    for (int p = 1; p < PARTS; p++)
        for (int64_t c = 0; c < v->k; c++)
            b->lines[c] = fmaxf(b->lines[c], b->lines[p * b->width + c]);
    encode_cells(m, v, 0, b->lines);
}

static void measure_member(mt_measure *m, struct view *v, struct desk *b)
{
    bool square = v->d->options.two_d;
    int64_t block = v->d->format->block;
    v->cell_rows = v->dir == MT_COL || square ? block : 1;
    v->cell_cols = v->dir == MT_ROW || square ? block : 1;
    if (!block) v->cell_rows = v->m, v->cell_cols = v->k;
    *m = (mt_measure){ 0 };
    if (!v->m || !v->k) return;
    if (v->d->options.rht) rotate(v->x, v->m, v->k, v->d->options.rht_mask);
    if (v->d->options.rht && v->cast != v->x) rotate(v->cast, v->m, v->k, v->d->options.rht_mask);
    if (!block) encode_whole(m, v, b);
    memset(b->parts, 0, sizeof b->parts);
#pragma omp parallel for schedule(dynamic, 1)
    for (int p = 0; p < PARTS; p++)
        measure_part(&b->parts[p], v, p, block ? b->lines + p * b->width : b->lines, block > 0);
    for (int p = 0; p < PARTS; p++) mt_measure_merge(m, &b->parts[p]);
    m->amax = m->count ? fmax(fabs(m->min), fabs(m->max)) : 0;
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

/* The places of a room: of fetched arrays, those from FETCHED on. */
enum { IN_X, IN_VALUES, IN_ROWS, IN_CODES, IN_DESK, FETCHED };

void mt_measure_room_free(mt_measure_room *room)
{
    for (int i = 0; i < MT_MEASURE_PLACES; i++) free(room->memory[i]);
    *room = (mt_measure_room){ 0 };
}

/* *p: so many bytes. */
static mt_status take(void **p, mt_measure_room *room, int place, size_t bytes)
{
    if (bytes > room->bytes[place] || !room->memory[place]) {
        free(room->memory[place]);
        room->memory[place] = malloc(bytes + 1);
        room->bytes[place] = room->memory[place] ? bytes : 0;
    }
    *p = room->memory[place];
    MT_REQUIRE(*p, MT_ENOMEM, "statistics: no memory for %zu bytes", bytes);
    return MT_OK;
}

/* What is measured, in the host's memory. */
struct copy {
    mt_device *from;
    mt_measure_room *room;
    mt_qtensor plain;
    float *scale[MT_DIR_COUNT];
    const uint32_t *first_step;
    int used;
};

/* *p becomes a copy of the `bytes` there; NULL stays NULL. */
static mt_status fetch(struct copy *c, const void **p, size_t bytes)
{
    void *host;
    if (!*p) return MT_OK;
    MT_TRY(take(&host, c->room, FETCHED + c->used++, bytes));
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
        if (scale) c->scale[i] = c->room->memory[FETCHED + c->used - 1];
    }
    return fetch(c, (const void **)&c->first_step, sizeof *c->first_step);
}

static void view_and_measure(mt_measure *m, const struct copy *c, const mt_qtensor *q, mt_dir dir,
                             float *x, float *cast, const float *values, struct desk *desk)
{
    const mt_group *g = &c->plain.group;
    const mt_direction *d = &q->dir[dir];
    mt_dtype source = c->plain.dir[MT_ROW].format->dtype;
    const char *codes = d->codes, *scales = d->scales;
    for (int64_t i = 0; i < g->members; i++) {
        int64_t rows = mt_group_rows(g, i), cols = mt_group_cols(g, i), at = mt_group_offset(g, i);
        mt_direction_shape shape = mt_direction_shape_of(d, dir, rows, cols);
        struct view v = { .d = d,
                          .shape = shape,
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
        measure_member(&m[i], &v, desk);
        codes += shape.code_bytes;
        scales += (size_t)shape.scale_count * shape.scale_size;
    }
}

static mt_status open_desk(struct desk **desk, mt_measure_room *room, const mt_group *g)
{
    void *memory;
    int64_t width = 0;
    for (int64_t i = 0; i < g->members; i++)
        if (mt_group_cols(g, i) > width) width = mt_group_cols(g, i);
    MT_TRY(take(&memory, room, IN_DESK, sizeof **desk + (size_t)(PARTS * width) * sizeof(float)));
    *desk = memory;
    (*desk)->width = width;
    return MT_OK;
}

mt_status mt_measure_direction(mt_measure *m, mt_device *device, mt_stream *host,
                               const mt_qtensor *plain, const mt_qtensor *out, mt_dir dir,
                               const struct mt_quantize_args *args, float rescale,
                               mt_measure_room *room)
{
    mt_qtensor q = *out;
    struct mt_quantize_args now = *args;
    struct copy c = {
        .from = device, .room = room, .plain = *plain, .first_step = args->first_step
    };
    struct desk *desk = NULL;
    void *x, *values, *rows, *memory;
    size_t bytes = (size_t)mt_group_capacity(&plain->group) * sizeof(float);
    mt_format_spec spec = mt_direction_spec(&q.dir[dir]);
    bool chained = spec.options.from_dequantized;
    if (chained && !q.dir[MT_ROW].format)
        q.dir[MT_ROW] = mt_direction_of(mt_format_spec_of_rows(spec));
    MT_TRY(take(&x, room, IN_X, bytes));
    MT_TRY(take(&values, room, IN_VALUES, bytes));
    MT_TRY(take(&rows, room, IN_ROWS, chained ? bytes : 0));
    MT_TRY(take(&memory, room, IN_CODES, mt_qtensor_bytes(&q)));
    memset(memory, 0, mt_qtensor_bytes(&q));
    MT_TRY(fetch_tensor(&c, args));
    for (int64_t i = 0; c.scale[dir] && i < c.plain.group.members; i++)
        c.scale[dir][i] = fminf(c.scale[dir][i] * rescale, FLT_MAX);
    q.group = c.plain.group;
    mt_qtensor_place(&q, memory);
    now.src = &c.plain, now.src_dir = MT_ROW, now.out = &q;
    memcpy(now.scale, c.scale, sizeof c.scale);
    now.first_step = c.first_step;
    MT_TRY(open_desk(&desk, room, &c.plain.group));
    MT_TRY(mt_quantize(host, &now));
    MT_TRY(decode(host, x, &c.plain, MT_ROW, args->dtype));
    MT_TRY(decode(host, values, &q, dir, args->dtype));
    if (chained) MT_TRY(decode(host, rows, &q, MT_ROW, args->dtype));
    view_and_measure(m, &c, &q, dir, x, chained ? rows : x, values, desk);
    return MT_OK;
}
