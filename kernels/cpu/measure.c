/* Statistics of what quantize made: a member at a time, of f32 values in the source's orientation.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/codec.h"
#include "kernels/cpu/isa.h"

/* A member is measured in so many parts, whatever threads there are, whose sums are then added in
 * order. */
enum { PARTS = 64 };

/* A direction of one member: its values, what its codes hold, and what they were made with. */
struct view {
    const mt_direction *d;
    mt_direction_shape shape;
    mt_dir dir;
    int threads;
    int64_t m, k, cell_rows, cell_cols;
    float *x;       /* rotated under rht */
    float *cast;    /* what is quantized: x, or what rows hold of it (source=dequantized) */
    const float *q; /* decoded */
    float s_dec, given, overflow; /* of nvfp4; of fp8_delayed; F's ovf */
};

/* What each part counts, and a line of its own, as long as the widest member's. */
struct desk {
    mt_measured parts[PARTS];
    int64_t width;
    float lines[]; /* [PARTS][width] */
};

/* NUMERICS section 2: 16 tokens of a column times diag(s) H16 / 4, rounded to bf16; the tail is
 * only rounded. */
static void rotate(const struct view *v, float *values)
{
    const uint16_t mask = v->d->options.rht_mask;
    const int64_t m = v->m, k = v->k;
#pragma omp parallel for schedule(static) num_threads(v->threads)
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

static bool is_coded(const struct view *v)
{
    return v->d->format->element != MT_ELEMENT_PLAIN;
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
                                               v->d->options.pow2, v->overflow);
        *decode = (double)(1 / s);
        return s;
    }
    int stored = ((const uint8_t *)v->d->scales)[mt_scale_place(v->d, &v->shape, line, block)];
    if (f->scale == MT_SCALE_E8M0) {
        *decode = ldexp(1, stored - 127);
        return ldexpf(1, 127 - stored);
    }
    float scale = mt_decode_number(mt_codec_of(MT_ELEMENT_E4M3), (uint8_t)stored) * v->s_dec,
          enc = 1 / scale;
    *decode = (double)scale;
    return enc > FLT_MAX ? FLT_MAX : enc;
}

/* The same, which the part that has the cell's first element counts where it is not all zeros. */
static float count_scale(mt_measured *m, const struct view *v, int64_t i, int64_t j, float amax)
{
    mt_measured one = { .scales = 1 };
    float enc = encoding_scale(v, i, j, amax, &one.scale_min);
    one.scale_max = one.scale_min;
    if (m && is_coded(v) && amax > 0) mt_measure_merge(m, &one);
    return enc;
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
static void encode_cells(mt_measured *m, const struct view *v, int64_t i, float *line)
{
    for (int64_t j = 0, c0 = 0; c0 < v->k; j++, c0 += v->cell_cols) {
        int64_t c1 = c0 + v->cell_cols < v->k ? c0 + v->cell_cols : v->k;
        float amax = 0;
        for (int64_t c = c0; c < c1; c++) amax = line[c] > amax ? line[c] : amax;
        const float enc = count_scale(m, v, i, j, amax);
        for (int64_t c = c0; c < c1; c++) line[c] = enc;
    }
}

/* Counts of a row, and its least and largest elements. */
static void count_row(mt_measured *m, const float *x, const float *cast, const float *q,
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
static void sum_row(mt_measured *m, const float *x, const float *q, int64_t k)
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

static void add_rows(mt_measured *m, const struct view *v, int64_t r0, int64_t r1, const float *enc)
{
    const float most = is_coded(v) ? mt_elements[v->d->options.element].max : (float)INFINITY;
    for (int64_t r = r0; r < r1; r++) {
        const float *x = v->x + r * v->k, *q = v->q + r * v->k;
        count_row(m, x, v->cast + r * v->k, q, enc, most, v->k);
        sum_row(m, x, q, v->k);
    }
}

static void add_codes(mt_measured *m, const struct view *v, int64_t l0, int64_t l1)
{
    int per_byte = v->d->format->codes_per_byte;
    int64_t width = v->shape.transposed ? v->m : v->k;
    for (int64_t l = l0; l < l1; l++) {
        const uint8_t *codes = (const uint8_t *)v->d->codes + l * v->shape.code_pitch;
        for (int64_t c = 0; c < width; c++) {
            int byte = codes[c / per_byte];
            m->codes[per_byte == 1 ? byte : byte >> (c % 2 * 4) & 15]++;
        }
    }
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Part p of all rows of cells, or where one cell is the member, of rows; and of the lines of codes.
 */
static void measure_part(mt_measured *m, const struct view *v, int p, float *line)
{
    const bool whole = v->d->format->block == 0;
    const int64_t step = whole ? 1 : v->cell_rows, rows = (v->m + step - 1) / step;
    const int64_t each = (rows + PARTS - 1) / PARTS, first = p * each;
    const int64_t lines = v->shape.code_lines, some = (lines + PARTS - 1) / PARTS;
    if (is_coded(v)) add_codes(m, v, p * some, least((p + 1) * some, lines));
    if (whole) {
        const float amax = v->d->amax ? v->d->amax[0] : 0;
        const float enc = count_scale(p ? NULL : m, v, 0, 0, amax);
        for (int64_t c = 0; c < v->k; c++) line[c] = enc;
        add_rows(m, v, first, least(first + each, v->m), line);
        return;
    }
    for (int64_t i = first; i < least(first + each, rows); i++) {
        const int64_t r0 = i * step, r1 = least(r0 + step, v->m);
        largest(line, v, r0, r1);
        encode_cells(m, v, i, line);
        add_rows(m, v, r0, r1, line);
    }
}

static void measure_member(mt_measured *m, struct view *v, struct desk *b)
{
    const bool square = v->d->options.two_d;
    const int64_t block = v->d->format->block;
    v->cell_rows = v->dir == MT_COL || square ? block : 1;
    v->cell_cols = v->dir == MT_ROW || square ? block : 1;
    if (!block) v->cell_rows = v->m, v->cell_cols = v->k;
    if (v->d->options.rht) rotate(v, v->x);
    if (v->d->options.rht && v->cast != v->x) rotate(v, v->cast);
    memset(b->parts, 0, sizeof b->parts);
#pragma omp parallel for schedule(dynamic, 1) num_threads(v->threads)
    for (int p = 0; p < PARTS; p++) measure_part(&b->parts[p], v, p, b->lines + p * b->width);
    for (int p = 0; p < PARTS; p++) mt_measure_merge(m, &b->parts[p]);
    m->amax = m->count ? fmax(fabs(m->min), fabs(m->max)) : 0;
}

/* ---- the op -------------------------------------------------------------------------------------
 */

static mt_status decode(mt_stream *stream, const struct mt_measure_args *a, float *to,
                        const mt_qtensor *q, mt_dir dir)
{
    return MT_CPU_ISA(dequantize)(
        stream, &(struct mt_dequantize_args){
                    .dtype = a->dtype, .src = q, .dir = dir, .y = to, .y_dtype = MT_F32 });
}

/* Member i: its source, what was made of it, and room for the values of `x`, `q` and the rows. */
static mt_status run_member(mt_stream *stream, const struct mt_measure_args *a, int64_t i,
                            const mt_qtensor *src, const mt_qtensor *out, float *const values[3],
                            struct desk *desk)
{
    const mt_direction *d = &out->dir[a->dir];
    const bool chained = d->options.from_dequantized;
    struct view v = { .d = d,
                      .shape = mt_direction_shape_of(d, a->dir, out->group.m, out->group.k),
                      .dir = a->dir,
                      .threads = stream->device->threads,
                      .m = out->group.m,
                      .k = out->group.k,
                      .x = values[0],
                      .q = values[1],
                      .cast = chained ? values[2] : values[0],
                      .given = a->scale ? a->scale[i] : 1,
                      .overflow = d->format->block ? mt_measure_overflow(a) : FLT_MAX };
    a->measured[i] = (mt_measured){ 0 };
    if (v.m == 0 || v.k == 0) return MT_OK;
    if (d->format->second_level) v.s_dec = mt_nvfp4_decode_scale(&d->options, d->amax[0]);
    MT_TRY(decode(stream, a, v.x, src, MT_ROW));
    MT_TRY(decode(stream, a, values[1], out, a->dir));
    if (chained) MT_TRY(decode(stream, a, v.cast, out, MT_ROW));
    measure_member(&a->measured[i], &v, desk);
    return MT_OK;
}

mt_status MT_CPU_ISA(measure)(mt_stream *stream, const struct mt_measure_args *args)
{
    const mt_group *g = &args->src->group;
    const mt_qtensor source = mt_qtensor_select(args->src, MT_ROW);
    mt_qtensor out = mt_qtensor_select(args->out, args->dir);
    const bool chained = out.dir[args->dir].options.from_dequantized;
    const int tensors = chained ? 3 : 2;
    int64_t most = 0, width = 0;
    if (chained) out.dir[MT_ROW] = args->out->dir[MT_ROW];
    MT_TRY(mt_group_check_members(g, "measure: the group"));
    for (int64_t i = 0; i < g->members; i++) {
        const int64_t k = mt_group_cols(g, i), count = mt_group_rows(g, i) * k;
        if (count > most) most = count;
        if (k > width) width = k;
    }
    const size_t each = ((size_t)most * sizeof(float) + 63) / 64 * 64;
    const size_t views = ((size_t)g->members * sizeof source + 63) / 64 * 64;
    const size_t bytes = sizeof(struct desk) + (size_t)(PARTS * width) * sizeof(float);
    char *p;
    MT_TRY(mt_cpu_operands(stream, (void **)&p, (size_t)tensors * each + 2 * views + bytes));
    float *values[3] = { NULL };
    for (int i = 0; i < tensors; i++, p += each) values[i] = (float *)(void *)p;
    mt_qtensor *from = (mt_qtensor *)(void *)p, *to = (mt_qtensor *)(void *)(p + views);
    struct desk *desk = (struct desk *)(void *)(p + 2 * views);
    desk->width = width;
    MT_TRY(mt_qtensor_split(from, &source));
    MT_TRY(mt_qtensor_split(to, &out));
    for (int64_t i = 0; i < g->members; i++)
        MT_TRY(run_member(stream, args, i, &from[i], &to[i], values, desk));
    return MT_OK;
}
