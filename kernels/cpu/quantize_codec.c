/* Arithmetic on tiles: amax, scale rules, casts, the Hadamard rotation, random bits. Every
 * operation is one of NUMERICS section 2, in its order; loops run over independent elements. */
#include <float.h>

#include "kernels/cpu/draw.h"
#include "kernels/cpu/quantize_priv.h"
#include "kernels/cpu/unroll.h"

/* ---- scale rules -------------------------------------------------------------------------------
 */

static void rule_f32(const side *s, const level *l, int n, const float *amax, float *enc,
                     float *dec, uint8_t *stored)
{
    (void)l, (void)stored;
    float max = mt_elements[s->d.options.element].max;
    for (int i = 0; i < n; i++) {
        enc[i] = mt_encode_scale(amax[i], max, s->d.options.pow2, s->overflow);
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

/* The largest magnitude of each column, NaN left out. */
static void column_magnitudes(float *restrict most, const float *restrict x, int rows, int width)
{
#pragma omp simd
    for (int c = 0; c < width; c++) most[c] = mt_from_bits(mt_magnitude_bits(x[c]));
    for (int r = 1; r < rows; r++) {
        const float *restrict row = x + r * TILE;
#pragma omp simd
        for (int c = 0; c < width; c++) {
            int32_t a = mt_magnitude_bits(row[c]), b = mt_bits(most[c]);
            most[c] = mt_from_bits(a > b ? a : b);
        }
    }
}

float measure_tile(workspace *ws, const side *s, const tile *t, const float *x)
{
    float tile_most = 0;
    memset(ws->cells.amax, 0, (size_t)cell_count(s, t) * sizeof(float));
    for (int i = 0; i < cell_rows(s, t); i++) {
        int r = i * s->block_rows, rows = t->rows - r < s->block_rows ? t->rows - r : s->block_rows;
        float *cells = ws->cells.amax + i * grid_pitch(s), most;
        const float *values = x + r * TILE;
        if (rows > 1 || s->block_cols == 1) {
            column_magnitudes(ws->most, values, rows, t->width);
            values = ws->most;
        }
        if (s->block_cols > 1) {
            block_amaxes(cells, &most, values, t->width, s->block_cols);
        } else {
            block_amaxes(cells, &most, values, t->width, TILE);
            memcpy(cells, values, (size_t)t->width * sizeof(float));
        }
        tile_most = most > tile_most ? most : tile_most;
    }
    return tile_most;
}

/* ---- casts -------------------------------------------------------------------------------------
 */

static void encode_with(workspace *ws, const side *s, const tile *t, const float *x,
                        const float *enc)
{
    for (int r = 0; r < t->rows; r++) {
        line_scales line = row_cells(s, enc, r);
        uint8_t *codes = ws->codes + r * TILE;
        if (s->d.options.sr)
            encode_line_stochastic(codes, x + r * TILE, line, ws->random + r * TILE, t->width,
                                   s->codec);
        else
            encode_line(codes, x + r * TILE, line, t->width, s->codec, false);
    }
}

void encode_tile(workspace *ws, const side *s, const tile *t, const float *x)
{
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

/* 16 rows of x times diag(signs) H16 / 4, each sum in order of the tokens, for 16 columns at a
 * time: CHUNK, which widths are multiples of. */
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
    for (int j = 0; j < 16; j++) {
        float *restrict y = out + j * TILE;
#pragma omp simd
        for (int c = 0; c < width; c++) y[c] = mt_bf16_to_f32(mt_f32_to_bf16(y[c]));
    }
}

void rotate_tile(float *out, const float *x, const tile *t, uint16_t mask)
{
    int whole = t->rows / 16 * 16;
    for (int r = 0; r < whole; r += 16) rotate_rows(out + r * TILE, x + r * TILE, t->width, mask);
    for (int r = whole; r < t->rows; r++)
        for (int c = 0; c < t->width; c++)
            out[r * TILE + c] = mt_bf16_to_f32(mt_f32_to_bf16(x[r * TILE + c]));
}

void draw_tile(workspace *ws, const tile *t, const uint32_t key[2], uint32_t first_row,
               uint32_t member_index, uint32_t step)
{
    for (int r = 0; r < t->rows; r++) {
        const uint32_t first[4] = { (uint32_t)(t->c0 / MT_DRAW), first_row + (uint32_t)(t->r0 + r),
                                    member_index, step };
        mt_draw_row(ws->random + r * TILE, key, first);
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
