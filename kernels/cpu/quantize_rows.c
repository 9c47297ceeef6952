/* The common case by a shorter way: a row direction with 1-D blocks or one scale, rounded to
 * nearest, from or to plain elements. Rows are streamed in parts that stay in the nearest cache;
 * the arithmetic and its order are those of the tiles. */
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

static void write_row_scales(const struct row_scales *p, const grid *cells, int64_t line,
                             int64_t block, int n)
{
    if (p->shape.scale_size > 1)
        for (int b = 0; b < n; b++)
            memcpy(scale_at(p, line, block + b), &cells->dec[b], sizeof(float));
    else if (p->s->d.swizzled)
        for (int b = 0; b < n; b++) *scale_at(p, line, block + b) = (char)cells->stored[b];
    else
        memcpy(scale_at(p, line, block), cells->stored, (size_t)n); /* lines of bytes */
}

static void read_row_scales(const struct row_scales *p, grid *cells, int64_t line, int64_t block,
                            int n)
{
    if (p->shape.scale_size > 1)
        for (int b = 0; b < n; b++)
            memcpy(&cells->dec[b], scale_at(p, line, block + b), sizeof(float));
    else if (p->s->d.swizzled)
        for (int b = 0; b < n; b++) cells->stored[b] = (uint8_t)*scale_at(p, line, block + b);
    else
        memcpy(cells->stored, scale_at(p, line, block), (size_t)n);
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

/* Whether columns [c, c + n) of row r could be measured without being loaded as f32. */
static bool measure_stored(const struct rows_task *k, const tile *t, int64_t r, int64_t c, int n)
{
    const mt_direction *d = &k->source->d;
    float most;
    if (k->codes || d->format->dtype != MT_BF16) return false;
    const uint16_t *x = (const uint16_t *)d->codes + t->m->offset + r * t->m->cols + c;
    if (!bf16_largest(&most, x, n)) return false;
    if (k->amax && most > *k->amax) *k->amax = most;
    return true;
}

/* Columns [c, c + n) of row r: amax into *most, then codes and scales. */
static void quantize_part(workspace *ws, const struct rows_task *k, const struct row_scales *scales,
                          const tile *t, int64_t r, int64_t c, int n)
{
    const side *s = k->row;
    grid *cells = &ws->cells;
    int width = (n + CHUNK - 1) / CHUNK * CHUNK, block = s->whole ? PART : s->block_cols;
    int blocks = (n + block - 1) / block;
    if (measure_stored(k, t, r, c, n)) return;
    load_plain(ws->x, k->source, t->m->offset + r * t->m->cols + c, n);
    for (int i = n; i < width; i++) ws->x[i] = 0;
    bool nan = *k->nans > 0;
    if (k->amax || !s->whole || k->count) {
        float most;
        nan = block_amaxes(cells->amax, &most, ws->x, width, block);
        if (k->count && nan) *k->nans += (int32_t)count_nans(ws->x, n);
        if (k->amax && most > *k->amax) *k->amax = most;
    }
    if (!k->codes) return;
    s->rule(s, k->level, blocks, cells->amax, cells->enc, cells->dec, cells->stored);
    int per_byte = s->d.format->codes_per_byte;
    uint8_t *out = codes_at(s, t, r, c), *codes = per_byte == 1 && n == width ? out : ws->codes;
    encode_line(codes, ws->x, line_scales_of(cells->enc, block), width, s->codec, !nan);
    if (codes != out) pack_codes(out, codes, n, per_byte);
    if (!s->whole) write_row_scales(scales, cells, r, c / block, blocks);
}

void quantize_rows(workspace *ws, const struct rows_task *k, const tile *t)
{
    struct row_scales scales = row_scales_of(k->row, t);
    for (int r = 0; r < t->rows; r++)
        for (int c = 0; c < t->cols; c += PART) {
            int n = t->cols - c < PART ? t->cols - c : PART;
            quantize_part(ws, k, &scales, t, t->r0 + r, t->c0 + c, n);
        }
}

/* Columns [c, c + n) of row r as values in ws->x. */
static void dequantize_part(workspace *ws, const side *s, const struct row_scales *scales,
                            const level *l, const tile *t, int64_t r, int64_t c, int n)
{
    int width = (n + CHUNK - 1) / CHUNK * CHUNK, block = s->whole ? PART : s->block_cols;
    int per_byte = s->d.format->codes_per_byte;
    const uint8_t *codes = codes_at(s, t, r, c);
    if (per_byte > 1 || n < width) {
        unpack_codes(ws->codes, codes, n, per_byte);
        memset(ws->codes + n, 0, (size_t)(width - n));
        codes = ws->codes;
    }
    read_row_scales(scales, &ws->cells, s->whole ? 0 : r, s->whole ? 0 : c / block,
                    (n + block - 1) / block);
    decode_scales(&ws->cells, s, (n + block - 1) / block, l);
    decode_line(ws->x, codes, line_scales_of(ws->cells.dec, block), width, s->codec);
}

void dequantize_rows(workspace *ws, const side *s, const side *out, const level *l, const tile *t)
{
    struct row_scales scales = row_scales_of(s, t);
    for (int r = 0; r < t->rows; r++)
        for (int c = 0; c < t->cols; c += PART) {
            int n = t->cols - c < PART ? t->cols - c : PART;
            dequantize_part(ws, s, &scales, l, t, t->r0 + r, t->c0 + c, n);
            save_plain(out, t->m->offset + (t->r0 + r) * t->m->cols + t->c0 + c, ws->x, n);
        }
}
