/* Arithmetic on tiles: amax, scale rules, casts, the Hadamard rotation, random bits. Every
 * operation is one of NUMERICS section 2, in its order; loops run over independent elements. */
#include <float.h>

#include "kernels/cpu/bf16_line.h"
#include "kernels/cpu/draw.h"
#include "kernels/cpu/quantize_priv.h"
#include "kernels/cpu/unroll.h"

/* ---- scale rules -------------------------------------------------------------------------------
 */

static void rule_f32(const side *s, const level *l, int n, const float *restrict amax,
                     float *restrict enc, float *restrict dec, uint8_t *stored)
{
    (void)l, (void)stored;
    float max = mt_elements[s->d.options.element].max, overflow = s->overflow;
    bool pow2 = s->d.options.pow2;
#pragma omp simd
    for (int i = 0; i < n; i++) {
        enc[i] = mt_encode_scale(amax[i], max, pow2, overflow);
        dec[i] = 1.0f / enc[i];
    }
}

static void rule_member(const side *s, const level *l, int n, const float *amax, float *enc,
                        float *dec, uint8_t *stored)
{
    (void)s, (void)amax, (void)stored;
    for (int i = 0; i < n; i++) enc[i] = l->enc, dec[i] = l->dec;
}

static void rule_e8m0(const side *s, const level *l, int n, const float *amax, float *enc,
                      float *dec, uint8_t *stored)
{
    (void)l;
    const mt_element_info *e = &mt_elements[s->d.options.element];
    bool floor = s->d.options.scale_floor;
    float inverse = 1.0f / e->max;
    int32_t emax = e->emax, exponents[CELLS];
#pragma omp simd
    for (int i = 0; i < n; i++) {
        int32_t exponent = mt_e8m0_exponent(amax[i], inverse, emax, floor);
        exponents[i] = exponent;
        enc[i] = mt_e8m0_scale(254 - exponent);
        dec[i] = mt_e8m0_scale(exponent);
    }
#pragma omp simd
    for (int i = 0; i < n; i++) stored[i] = (uint8_t)exponents[i];
}

/* Cells from E4M3 block scales: NUMERICS' enc = min(RN(1 / RN(float(sf) S_dec)), FLT_MAX). */
static void nvfp4_cells(const level *l, int n, const float *wanted, float *enc, float *dec,
                        uint8_t *stored)
{
    const mt_codec e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    for (int i = 0; i < n; i++) {
        stored[i] = (uint8_t)mt_encode_number(e4m3, wanted[i]);
        dec[i] = mt_decode(e4m3, stored[i]) * l->s_dec;
        enc[i] = mt_nvfp4_encode(dec[i]);
    }
}

static void rule_e4m3(const side *s, const level *l, int n, const float *amax, float *enc,
                      float *dec, uint8_t *stored)
{
    (void)s;
    float wanted[CELLS];
    for (int i = 0; i < n; i++) wanted[i] = amax[i] * l->g; /* the cast saturates */
    nvfp4_cells(l, n, wanted, enc, dec, stored);
}

static scale_rule *const rules[] = {
    [MT_SCALE_NONE] = rule_member,
    [MT_SCALE_F32] = rule_f32,
    [MT_SCALE_E8M0] = rule_e8m0,
    [MT_SCALE_E4M3] = rule_e4m3,
};

level member_level(const side *s, float amax, const float *given)
{
    level l = { .amax = amax, .enc = 1.0f };
    if (s->whole) {
        float max = mt_elements[s->d.options.element].max;
        if (!s->d.format->delayed)
            l.enc = mt_encode_scale(amax, max, s->d.options.pow2, FLT_MAX);
        else if (given)
            l.enc = *given;
    }
    l.dec = 1.0f / l.enc;
    if (s->d.format->second_level) {
        l.s_enc = mt_nvfp4_encode_scale(&s->d.options, amax);
        l.g = l.s_enc * (1.0f / 6.0f);
        l.s_dec = mt_nvfp4_decode_scale(&s->d.options, amax);
    }
    return l;
}

side side_of(const mt_direction *d, mt_dir dir, int which, bool reading)
{
    side s = { .d = *d, .dir = dir, .which = which, .present = d->format != NULL };
    if (!s.present) return s;
    const mt_format *f = d->format;
    s.plain = f->element == MT_ELEMENT_PLAIN;
    s.whole = !s.plain && f->block == 0;
    s.transposed = !s.plain && mt_direction_shape_of(d, dir, 1, 1).transposed;
    s.codec = mt_codec_of(d->options.element);
    s.rule = s.whole ? rule_member : rules[f->scale];
    s.overflow = FLT_MAX;
    bool square = d->options.two_d && !(reading && f->scale != MT_SCALE_F32);
    s.block_rows = f->block == 0 ? TILE : square || dir == MT_COL ? f->block : 1;
    s.block_cols = f->block == 0 ? TILE : square || dir == MT_ROW ? f->block : 1;
    return s;
}

/* ---- amax --------------------------------------------------------------------------------------
 */

/* The largest magnitude of each column: a NaN's is above all, or left out if `skip`. */
MT_CODEC_INLINE void column_magnitudes(float *restrict most, const float *restrict x, int rows,
                                       int width, bool skip)
{
    int32_t largest[TILE] = { 0 };
    for (int r = 0; r < rows; r++) {
        const float *restrict row = x + r * TILE;
        for (int c = 0; c < width; c += CHUNK)
#pragma omp simd
            for (int i = c; i < c + CHUNK; i++) {
                int32_t a = skip ? mt_magnitude_bits(row[i]) : mt_bits(row[i]) & 0x7fffffff;
                largest[i] = a > largest[i] ? a : largest[i];
            }
    }
    memcpy(most, largest, (size_t)width * sizeof *most);
}

/* cells = the amax of each `block` values of each row. Whole rows of a tile are one line. */
static float measure_lines(workspace *ws, float *cells, const tile *t, const float *x, int block)
{
    float largest = 0, most;
    int length = t->width == TILE ? LINE_MAX : t->width, step = length > TILE ? length : TILE;
    for (int at = 0; at < t->rows * TILE; at += step) {
        int left = t->rows * TILE - at;
        int n = left < length ? left : length;
        ws->nan |= block_amaxes(cells + at / block, &most, x + at, n, block);
        largest = most > largest ? most : largest;
    }
    return largest;
}

/* A row of cells, each of several rows of x. Returns the largest. */
static float measure_columns(workspace *ws, const side *s, float *cells, const float *x, int rows,
                             int width)
{
    bool wide = s->block_cols > 1;
    int block = wide ? s->block_cols : TILE;
    float one, largest, *columns = wide ? ws->most : cells, *amax = wide ? cells : &one;
    column_magnitudes(columns, x, rows, width, false);
    if (block_amaxes(amax, &largest, columns, width, block)) {
        ws->nan = true;
        column_magnitudes(columns, x, rows, width, true);
        block_amaxes(amax, &largest, columns, width, block);
    }
    return largest;
}

float measure_tile(workspace *ws, const side *s, const tile *t, const float *x, bool cells_too)
{
    float largest = 0;
    ws->nan = false;
    if (!cells_too) return measure_lines(ws, ws->most, t, x, TILE);
    memset(ws->cells.amax, 0, (size_t)cell_count(s, t) * sizeof(float));
    if (s->block_rows == 1) return measure_lines(ws, ws->cells.amax, t, x, s->block_cols);
    for (int r = 0; r < t->rows; r += s->block_rows) {
        float *cells = ws->cells.amax + r / s->block_rows * grid_pitch(s);
        int rows = t->rows - r < s->block_rows ? t->rows - r : s->block_rows;
        float most = measure_columns(ws, s, cells, x + r * TILE, rows, t->width);
        largest = most > largest ? most : largest;
    }
    return largest;
}

/* ---- casts -------------------------------------------------------------------------------------
 */

static rounding rounding_of(const workspace *ws, const side *s)
{
    bool number = !ws->nan && !s->whole; /* what has cells was measured */
    return s->d.options.sr ? ROUND_STOCHASTIC : number ? ROUND_NUMBER : ROUND_NEAREST;
}

/* Rows of whole lines with cells of their own are one line. */
MT_CODEC_INLINE void encode_rows(workspace *ws, const side *s, const tile *t, const float *x,
                                 const float *enc, rounding how)
{
    bool one = t->width == TILE && s->block_rows == 1;
    int step = one ? t->rows : 1, n = one ? t->rows * TILE : t->width;
    for (int at = 0; at < t->rows * TILE; at += step * TILE) {
        line_scales line = row_cells(s, enc, at / TILE);
        encode_line(ws->codes + at, x + at, line, ws->random + at, n, s->codec, how);
    }
}

static void encode_with(workspace *ws, const side *s, const tile *t, const float *x,
                        const float *enc)
{
    switch (rounding_of(ws, s)) {
    case ROUND_NUMBER: encode_rows(ws, s, t, x, enc, ROUND_NUMBER); return;
    case ROUND_NEAREST: encode_rows(ws, s, t, x, enc, ROUND_NEAREST); return;
    case ROUND_STOCHASTIC: encode_rows(ws, s, t, x, enc, ROUND_STOCHASTIC); return;
    }
}

/* The scales of row r's cells, one for each column. */
static const float *column_scales(float *line, const side *s, const float *cells, int r, int width)
{
    line_scales scales = row_cells(s, cells, r);
    if (scales.shift == 0) return scales.values;
    for (int c = 0; c < width; c++) line[c] = scales.values[c >> scales.shift];
    return line;
}

/* ws->words from x, `count` rows to a word. */
MT_CODEC_INLINE void encode_words(workspace *ws, const side *s, const tile *t, const float *x,
                                  int count, rounding how)
{
    float line[TILE];
    const float *scales = NULL;
    for (int r = 0; r < t->rows; r += count) {
        if (r % s->block_rows == 0) scales = column_scales(line, s, ws->cells.enc, r, t->width);
        encode_stack(ws->words + r / count * TILE, x + r * TILE, scales, ws->random + r * TILE,
                     TILE, t->width, count, s->codec, how);
    }
}

MT_CODEC_INLINE void encode_turned(workspace *ws, const side *s, const tile *t, const float *x,
                                   rounding how)
{
    if (s->d.format->codes_per_byte == 1)
        encode_words(ws, s, t, x, 4, how);
    else
        encode_words(ws, s, t, x, 8, how);
}

static void encode_columns(workspace *ws, const side *s, const tile *t, const float *x)
{
    switch (rounding_of(ws, s)) {
    case ROUND_NUMBER: encode_turned(ws, s, t, x, ROUND_NUMBER); return;
    case ROUND_NEAREST: encode_turned(ws, s, t, x, ROUND_NEAREST); return;
    case ROUND_STOCHASTIC: encode_turned(ws, s, t, x, ROUND_STOCHASTIC); return;
    }
}

void encode_tile(workspace *ws, const side *s, const tile *t, const float *x)
{
    if (s->transposed)
        encode_columns(ws, s, t, x);
    else
        encode_with(ws, s, t, x, ws->cells.enc);
}

void decode_tile(float *out, workspace *ws, const side *s, const tile *t)
{
    for (int r = 0; r < t->rows; r++) {
        line_scales line = row_cells(s, ws->cells.dec, r);
        decode_line(out + r * TILE, ws->codes + r * TILE, line, t->width, s->codec);
        for (int c = t->cols; c < t->width; c++) out[r * TILE + c] = 0;
    }
}

bool save_tile_bf16(const workspace *ws, const side *s, const side *out, const tile *t)
{
    uint16_t once[TILE] = { 0 }, more[TILE] = { 0 }, line[TILE];
    uint16_t *to = (uint16_t *)out->d.codes + t->m->offset + t->r0 * t->m->cols + t->c0;
    float scales[TILE];
    const bool one = t->width == TILE, in_place = t->width == t->cols;
    const bf16_scales each = { once, more };
    if (out->d.format->dtype != MT_BF16) return false;
    for (int r = 0; r < t->rows; r += one ? t->rows : 1)
        if (!all_numbers(ws->codes + r * TILE, one ? t->rows * TILE : t->width, s->codec))
            return false;
    for (int r = 0; r < t->rows; r++, to += t->m->cols) {
        if (r % s->block_rows == 0 &&
            !bf16_scales_of(each, column_scales(scales, s, ws->cells.dec, r, t->cols), t->cols,
                            s->codec))
            return false;
        decode_bf16(in_place ? to : line, ws->codes + r * TILE, each, 0, t->width, s->codec);
        if (!in_place) memcpy(to, line, (size_t)t->cols * sizeof *to);
    }
    return true;
}

/* ---- 4over6 ------------------------------------------------------------------------------------
 */

/* e[c] = |RN(RN(RN(q sf) A) / (6 bound)) - x|, or its square. */
static void row_errors(float *restrict e, const uint8_t *restrict codes, line_scales sf,
                       const float *restrict x, int width, const side *s, float amax)
{
    float value[TILE];
    mt_codec codec = s->codec;
    float range = 6.0f * (float)s->d.options.four_over_six;
    bool squared = s->d.options.squared_error;
    decode_line(value, codes, sf, width, codec);
#pragma omp simd
    for (int c = 0; c < width; c++) {
        float d = mt_from_bits(mt_bits(value[c] * amax / range - x[c]) & 0x7fffffff);
        e[c] = squared ? d * d : d;
    }
}

/* Adds a row's errors to its cells: along the row in order first, where cells are wider than one.
 */
static void add_errors(float *sums, const float *e, const side *s, int width)
{
    if (s->block_cols == 1) {
        for (int c = 0; c < width; c++) sums[c] += e[c];
        return;
    }
    for (int c = 0; c < width; c += s->block_cols) {
        float sum = 0;
        for (int i = 0; i < s->block_cols; i++) sum += e[c + i];
        sums[c / s->block_cols] += sum;
    }
}

/* One candidate: its cells, and the error of every cell in `errors`. */
static void try_candidate(workspace *ws, grid *cells, float *errors, const side *s, const level *l,
                          const tile *t, const float *x)
{
    const mt_codec e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    int n = cell_count(s, t);
    float sf[CELLS], e[TILE];
    nvfp4_cells(l, n, cells->amax, cells->enc, cells->dec, cells->stored);
    for (int i = 0; i < n; i++) sf[i] = mt_decode(e4m3, cells->stored[i]), errors[i] = 0;
    encode_with(ws, s, t, x, cells->enc);
    for (int r = 0; r < t->rows; r++) {
        line_scales line = row_cells(s, sf, r);
        row_errors(e, ws->codes + r * TILE, line, x + r * TILE, t->width, s, l->amax);
        add_errors(errors + r / s->block_rows * grid_pitch(s), e, s, t->width);
    }
}

static void four_over_six(workspace *ws, const side *s, const level *l, const tile *t,
                          const float *x)
{
    int n = cell_count(s, t);
    float error6[CELLS], error4[CELLS];
    grid *cells = &ws->cells, *six = &ws->six, *four = &ws->four;
    for (int i = 0; i < n; i++) { /* the amax of a candidate: its scale before the cast */
        six->amax[i] = cells->amax[i] / 6.0f * l->s_enc;
        four->amax[i] = six->amax[i] * 1.5f;
    }
    try_candidate(ws, six, error6, s, l, t, x);
    try_candidate(ws, four, error4, s, l, t, x);
    for (int i = 0; i < n; i++) {
        const grid *best = error4[i] < error6[i] ? four : six; /* NaN keeps 6 */
        cells->enc[i] = best->enc[i];
        cells->dec[i] = best->dec[i];
        cells->stored[i] = best->stored[i];
    }
}

void scale_tile(workspace *ws, const side *s, const level *l, const tile *t, const float *x)
{
    grid *cells = &ws->cells;
    if (s->d.options.four_over_six)
        four_over_six(ws, s, l, t, x);
    else
        s->rule(s, l, cell_count(s, t), cells->amax, cells->enc, cells->dec, cells->stored);
}

/* ---- rotation, random bits, sums ---------------------------------------------------------------
 */

/* 16 rows of x times diag(signs) H16 / 4, each sum in order of the tokens and not rounded yet, for
 * 16 columns at a time: CHUNK, which widths are multiples of. */
static void rotate_rows(float *restrict out, const float *restrict x, int width, uint16_t mask)
{
    typedef float strip __attribute__((vector_size(CHUNK * sizeof(float)), may_alias, aligned(4)));
    for (int c = 0; c < width; c += CHUNK) {
        strip row[16];
        MT_UNROLL
        for (int i = 0; i < 16; i++)
            row[i] = *(const strip *)(x + i * TILE + c) * (mask >> i & 1 ? -0.25f : 0.25f);
        MT_UNROLL
        for (int j = 0; j < 16; j++) {
            strip y = { 0 };
            MT_UNROLL
            for (int i = 0; i < 16; i++)
                y = __builtin_popcount((unsigned)(i & j)) % 2 ? y - row[i] : y + row[i];
            *(strip *)(out + j * TILE + c) = y;
        }
    }
}

void rotate_tile(float *out, const float *x, const tile *t, uint16_t mask)
{
    int whole = t->rows / 16 * 16;
    for (int r = 0; r < t->rows; r++) {
        float *restrict y = out + r * TILE;
        const float *from = r < whole ? y : x + r * TILE;
        if (r < whole && r % 16 == 0) rotate_rows(y, x + r * TILE, t->width, mask);
#pragma omp simd
        for (int c = 0; c < t->width; c++) y[c] = mt_bf16_to_f32(mt_f32_to_bf16(from[c]));
    }
}

/* Rounding keeps the order: the largest is rounded alone. */
float measure_rotated(workspace *ws, const tile *t, const float *x, uint16_t mask)
{
    float largest = 0;
    tile part = *t;
    ws->nan = false;
    for (int r = 0; r < t->rows; r += part.rows, x += part.rows * TILE) {
        const float *y = x;
        part.rows = t->rows - r < 16 ? t->rows - r : 16;
        if (part.rows == 16) rotate_rows(ws->rotated, x, t->width, mask), y = ws->rotated;
        float most = measure_lines(ws, ws->most, &part, y, TILE);
        largest = most > largest ? most : largest;
    }
    return mt_bf16_to_f32(mt_f32_to_bf16(largest));
}

void draw_tile(workspace *ws, const tile *t, const uint32_t key[2], uint32_t first_row,
               uint32_t member_index, uint32_t step)
{
    for (int r = 0; r < padded_rows(t); r++) {
        const uint32_t first[4] = { (uint32_t)(t->c0 / MT_DRAW), first_row + (uint32_t)(t->r0 + r),
                                    member_index, step };
        uint16_t bits[TILE];
        int32_t *random = ws->random + r * TILE;
        mt_draw_row(bits, key, first);
#pragma omp simd
        for (int c = 0; c < TILE; c++) random[c] = bits[c];
    }
}

void add_row_sums(float *restrict sums, const float *restrict x, const tile *t)
{
    for (int r = 0; r < t->rows; r++)
#pragma omp simd
        for (int c = 0; c < t->width; c++) sums[c] += x[r * TILE + c];
}

int64_t count_nans(const float *x, int n)
{
    int32_t count = 0;
    for (int i = 0; i < n; i++) count += (mt_bits(x[i]) & 0x7fffffff) > 0x7f800000 ? 1 : 0;
    return count;
}
