/* The common case by a shorter way: a row direction with 1-D blocks or one scale, rounded to
 * nearest, from or to plain elements. Rows are streamed in parts that stay in the nearest cache;
 * the arithmetic and its order are those of the tiles. */
#include "kernels/cpu/bf16_line.h"
#include "kernels/cpu/quantize_priv.h"

enum { PART = LINE_MAX };

/* Where the scales of a member's row lie. */
struct row_scales {
    const side *s;
    mt_direction_shape shape;
    char *first;
};

static struct row_scales row_scales_of(const side *s, const tile *t)
{
    struct row_scales p = { s, mt_direction_shape_of(&s->d, MT_ROW, t->m->rows, t->m->cols), NULL };
    p.first = (char *)s->d.scales + (size_t)t->m->scales[s->which] * p.shape.scale_size;
    return p;
}

static char *scale_at(const struct row_scales *p, int64_t line, int64_t block)
{
    return p->first +
           (size_t)mt_scale_place(&p->s->d, &p->shape, line, block) * p->shape.scale_size;
}

/* The scales of n cells from `at` on. */
static void write_row_scales(const struct row_scales *p, const grid *cells, int at, int64_t line,
                             int64_t block, int n)
{
    const float *dec = cells->dec + at;
    const uint8_t *stored = cells->stored + at;
    if (p->shape.scale_size > 1)
        for (int b = 0; b < n; b++) memcpy(scale_at(p, line, block + b), &dec[b], sizeof(float));
    else if (p->s->d.swizzled)
        for (int b = 0; b < n; b++) *scale_at(p, line, block + b) = (char)stored[b];
    else
        memcpy(scale_at(p, line, block), stored, (size_t)n); /* lines of bytes */
}

static void read_row_scales(const struct row_scales *p, grid *cells, int at, int64_t line,
                            int64_t block, int n)
{
    float *dec = cells->dec + at;
    uint8_t *stored = cells->stored + at;
    if (p->shape.scale_size > 1)
        for (int b = 0; b < n; b++) memcpy(&dec[b], scale_at(p, line, block + b), sizeof(float));
    else if (p->s->d.swizzled)
        for (int b = 0; b < n; b++) stored[b] = (uint8_t)*scale_at(p, line, block + b);
    else
        memcpy(stored, scale_at(p, line, block), (size_t)n);
}

static uint8_t *codes_at(const side *s, const tile *t, int64_t row, int64_t col)
{
    int per_byte = s->d.format->codes_per_byte;
    int64_t pitch = (t->m->cols + per_byte - 1) / per_byte;
    return (uint8_t *)s->d.codes + t->m->codes[s->which] + row * pitch + col / per_byte;
}

bool rows_suffice(const side *s)
{
    return s->present && !s->plain && s->dir == MT_ROW && (s->whole || s->block_rows == 1);
}

/* What is worked on at once: columns [c, c + n) of rows [r, r + rows), `pitch` values apart in the
 * workspace. Pitches are multiples of blocks, and of CHUNK. */
struct part {
    int64_t r, c;
    int rows, n, pitch;
};

/* The part at (r, c) of a tile: of one row where rows are long, else as many as there is room for.
 */
static struct part part_of(const side *s, const tile *t, int r, int c)
{
    int unit = s->whole ? CHUNK : s->block_cols;
    struct part p = { .r = t->r0 + r, .c = t->c0 + c };
    p.n = t->cols - c < PART ? t->cols - c : PART;
    p.pitch = (p.n + unit - 1) / unit * unit;
    p.rows = t->cols > PART ? 1 : PART / p.pitch;
    p.rows = t->rows - r < p.rows ? t->rows - r : p.rows;
    return p;
}

/* The values of a part: in x, or where they lie. */
static const float *load_part(float *x, const struct rows_task *k, const tile *t,
                              const struct part *p)
{
    int64_t from = t->m->offset + p->r * t->m->cols + p->c;
    if (p->n == p->pitch && (p->rows == 1 || p->n == t->m->cols)) {
        if (k->source->d.format->dtype == MT_F32) return (const float *)k->source->d.codes + from;
        load_plain(x, k->source, from, p->rows * p->n);
        return x;
    }
    for (int i = 0; i < p->rows; i++) {
        float *row = x + i * p->pitch;
        load_plain(row, k->source, from + i * t->m->cols, p->n);
        for (int c = p->n; c < p->pitch; c++) row[c] = 0;
    }
    return x;
}

static void encode_values(uint8_t *codes, const float *x, line_scales enc, int n, mt_codec codec,
                          bool nan)
{
    if (nan)
        encode_line(codes, x, enc, NULL, n, codec, ROUND_NEAREST);
    else
        encode_line(codes, x, enc, NULL, n, codec, ROUND_NUMBER);
}

/* Codes of a part, where they are stored at once if they lie there as they are made. */
static void write_part(workspace *ws, const side *s, const tile *t, const struct part *p,
                       const float *x, line_scales enc, bool nan)
{
    int per_byte = s->d.format->codes_per_byte, values = p->rows * p->pitch;
    bool whole_rows = p->rows == 1 || p->n == t->m->cols;
    if (per_byte == 1 && p->n == p->pitch && whole_rows) {
        encode_values(codes_at(s, t, p->r, p->c), x, enc, values, s->codec, nan);
        return;
    }
    encode_values(ws->codes, x, enc, values, s->codec, nan);
    if (p->n == p->pitch && whole_rows) {
        pack_codes(codes_at(s, t, p->r, p->c), ws->codes, values, per_byte);
        return;
    }
    for (int i = 0; i < p->rows; i++)
        pack_codes(codes_at(s, t, p->r + i, p->c), ws->codes + i * p->pitch, p->n, per_byte);
}

static void quantize_part(workspace *ws, const struct rows_task *k, const struct row_scales *scales,
                          const tile *t, const struct part *p, int block)
{
    const side *s = k->row;
    grid *cells = &ws->cells;
    int values = p->rows * p->pitch, blocks = s->whole ? 1 : values / block;
    const float *x = load_part(ws->x, k, t, p);
    bool nan = *k->nans > 0;
    if (k->amax || !s->whole || k->count) {
        float most;
        nan = block_amaxes(cells->amax, &most, x, values, s->whole ? TILE : block);
        if (k->count && nan) *k->nans += (int32_t)count_nans(x, values);
        if (k->amax && most > *k->amax) *k->amax = most;
    }
    s->rule(s, k->level, blocks, cells->amax, cells->enc, cells->dec, cells->stored);
    write_part(ws, s, t, p, x, line_scales_of(cells->enc, block), nan);
    for (int i = 0; i < p->rows && !s->whole; i++) {
        int at = i * p->pitch / block;
        write_row_scales(scales, cells, at, p->r + i, p->c / block, (p->n + block - 1) / block);
    }
}

void quantize_rows(workspace *ws, const struct rows_task *k, const tile *t)
{
    struct row_scales scales = row_scales_of(k->row, t);
    int block = k->row->whole ? PART : k->row->block_cols, step = 1;
    for (int r = 0; r < t->rows; r += step)
        for (int c = 0; c < t->cols; c += PART) {
            struct part p = part_of(k->row, t, r, c);
            quantize_part(ws, k, &scales, t, &p, block);
            step = p.rows;
        }
}

/* The largest magnitude of n bf16 numbers as they are stored; false where there is a NaN. */
static bool bf16_largest(float *largest, const uint16_t *x, int n)
{
    int16_t most = 0;
    for (int i = 0; i < n; i++) {
        int16_t a = (int16_t)(x[i] & 0x7fff);
        most = a > most ? a : most;
    }
    *largest = mt_bf16_to_f32((uint16_t)most);
    return most <= 0x7f80;
}

/* The largest magnitude of n elements, NaN left out; *nans: counted up by its NaNs. */
static float stored_largest(workspace *ws, int32_t *nans, const side *source, int64_t element,
                            int n)
{
    float amax[PART / TILE], largest;
    mt_dtype dtype = source->d.format->dtype;
    const float *x = ws->x;
    if (dtype == MT_BF16 && bf16_largest(&largest, (const uint16_t *)source->d.codes + element, n))
        return largest;
    if (dtype == MT_F32 && n % CHUNK == 0)
        x = (const float *)source->d.codes + element;
    else
        load_plain(ws->x, source, element, n);
    for (; n % CHUNK; n++) ws->x[n] = 0;
    if (block_amaxes(amax, &largest, x, n, TILE)) *nans += (int32_t)count_nans(x, n);
    return largest;
}

float measure_rows(workspace *ws, const side *source, int32_t *nans, const tile *t)
{
    float largest = 0;
    bool together = t->cols == t->m->cols; /* rows are one line */
    int rows = together ? 1 : t->rows, cols = together ? t->rows * t->cols : t->cols;
    for (int r = 0; r < rows; r++) {
        if (t->cols == TILE) fetch_next(source, t, r);
        for (int c = 0; c < cols; c += PART) {
            int n = cols - c < PART ? cols - c : PART;
            int64_t element = t->m->offset + (t->r0 + r) * t->m->cols + t->c0 + c;
            float most = stored_largest(ws, nans, source, element, n);
            largest = most > largest ? most : largest;
        }
    }
    return largest;
}

/* The codes of a part, and its scales to ws->cells. */
static const uint8_t *read_part(workspace *ws, const side *s, const struct row_scales *scales,
                                const level *l, const tile *t, const struct part *p, int block)
{
    const uint8_t *codes = codes_at(s, t, p->r, p->c);
    int per_byte = s->d.format->codes_per_byte, values = p->rows * p->pitch;
    int blocks = s->whole ? 1 : values / block, per_row = (p->n + block - 1) / block;
    if (p->n == p->pitch && (p->rows == 1 || p->n == t->m->cols)) {
        if (per_byte > 1) unpack_codes(ws->codes, codes, values, per_byte), codes = ws->codes;
    } else {
        memset(ws->codes, 0, (size_t)values);
        for (int i = 0; i < p->rows; i++)
            unpack_codes(ws->codes + i * p->pitch, codes_at(s, t, p->r + i, p->c), p->n, per_byte);
        codes = ws->codes;
    }
    if (s->whole) read_row_scales(scales, &ws->cells, 0, 0, 0, 1);
    for (int i = 0; i < p->rows && !s->whole; i++)
        read_row_scales(scales, &ws->cells, i * p->pitch / block, p->r + i, p->c / block, per_row);
    decode_scales(&ws->cells, s, blocks, l);
    return codes;
}

/* A part straight to bf16; false where its scales or codes are not of that kind. */
static bool save_bf16(const workspace *ws, const side *s, const side *out, const uint8_t *codes,
                      const tile *t, const struct part *p, int block)
{
    uint16_t values[PART], once[PART], more[PART], of_blocks[2][PART / CHUNK];
    uint16_t *place = (uint16_t *)out->d.codes + t->m->offset + p->r * t->m->cols + p->c;
    const int n = p->rows * p->pitch, shift = __builtin_ctz((unsigned)block);
    const bool in_place = p->n == p->pitch && (p->rows == 1 || p->n == t->m->cols);
    bf16_scales scales = { of_blocks[0], of_blocks[1] };
    uint16_t *to = in_place ? place : values;
    if (out->d.format->dtype != MT_BF16) return false;
    if (!bf16_scales_of(scales, ws->cells.dec, s->whole ? 1 : n >> shift, s->codec)) return false;
    if (!all_numbers(codes, n, s->codec)) return false;
    for (int i = 0; i < n && shift < CUT_SHIFT; i += CHUNK) {
        const uint16_t first = of_blocks[0][i >> shift], second = of_blocks[1][i >> shift];
        for (int j = i; j < i + CHUNK; j++) once[j] = first, more[j] = second;
    }
    if (shift < CUT_SHIFT) scales = (bf16_scales){ once, more };
    decode_bf16(to, codes, scales, shift < CUT_SHIFT ? 0 : shift, n, s->codec);
    for (int i = 0; i < p->rows && !in_place; i++)
        memcpy(place + i * t->m->cols, values + i * p->pitch, (size_t)p->n * sizeof *to);
    return true;
}

static void save_part(const side *out, const float *x, const tile *t, const struct part *p)
{
    int64_t to = t->m->offset + p->r * t->m->cols + p->c;
    if (p->n == p->pitch && p->n == t->m->cols) {
        save_plain(out, to, x, p->rows * p->n);
        return;
    }
    for (int i = 0; i < p->rows; i++, x += p->pitch) save_plain(out, to + i * t->m->cols, x, p->n);
}

void dequantize_rows(workspace *ws, const side *s, const side *out, const level *l, const tile *t)
{
    struct row_scales scales = row_scales_of(s, t);
    int block = s->whole ? PART : s->block_cols, step = 1;
    for (int r = 0; r < t->rows; r += step)
        for (int c = 0; c < t->cols; c += PART) {
            struct part p = part_of(s, t, r, c);
            const uint8_t *codes = read_part(ws, s, &scales, l, t, &p, block);
            step = p.rows;
            if (save_bf16(ws, s, out, codes, t, &p, block)) continue;
            line_scales dec = line_scales_of(ws->cells.dec, block);
            decode_line(ws->x, codes, dec, p.rows * p.pitch, s->codec);
            save_part(out, ws->x, t, &p);
        }
}
