/* Tiles and memory: members and units, plain elements, packed and transposed codes, scales. */
#include "kernels/cpu/quantize_priv.h"

/* ---- members and units -------------------------------------------------------------------------
 */

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

int64_t plan_members(member *members, const mt_group *group, const side *const sides[SIDES],
                     unit_size size)
{
    member at = { 0 };
    for (int64_t i = 0; i < group->members; i++) {
        at.rows = mt_group_rows(group, i);
        at.cols = mt_group_cols(group, i);
        at.offset = mt_group_offset(group, i);
        if (members) members[i] = at;
        at.unit += ceil_div(at.rows, size.rows) * ceil_div(at.cols, size.cols);
        at.column += at.cols;
        for (int j = 0; j < SIDES; j++) {
            if (!sides[j]->present) continue;
            mt_direction_shape s =
                mt_direction_shape_of(&sides[j]->d, sides[j]->dir, at.rows, at.cols);
            at.codes[j] += s.code_bytes;
            at.scales[j] += s.scale_count;
        }
    }
    return at.unit;
}

tile tile_at(const member *members, int64_t count, unit_size size, int64_t u)
{
    int64_t low = 0, high = count; /* the last member that begins at or before u */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (members[middle].unit <= u)
            low = middle;
        else
            high = middle;
    }
    const member *m = &members[low];
    int64_t across = ceil_div(m->cols, size.cols), at = u - m->unit;
    tile t = { .m = m, .index = low, .r0 = at / across * size.rows, .c0 = at % across * size.cols };
    t.rows = (int)(m->rows - t.r0 < size.rows ? m->rows - t.r0 : size.rows);
    t.cols = (int)(m->cols - t.c0 < size.cols ? m->cols - t.c0 : size.cols);
    t.width = (t.cols + CHUNK - 1) / CHUNK * CHUNK;
    return t;
}

/* ---- plain elements ----------------------------------------------------------------------------
 */

static void load_f64(float *restrict x, const void *p, int64_t at, int n)
{
    const double *s = (const double *)p + at;
#pragma omp simd
    for (int i = 0; i < n; i++) x[i] = (float)s[i];
}

static void load_f32(float *restrict x, const void *p, int64_t at, int n)
{
    memcpy(x, (const float *)p + at, (size_t)n * sizeof *x);
}

static void load_bf16(float *restrict x, const void *p, int64_t at, int n)
{
    const uint16_t *s = (const uint16_t *)p + at;
#pragma omp simd
    for (int i = 0; i < n; i++) x[i] = mt_bf16_to_f32(s[i]);
}

static void load_f16(float *restrict x, const void *p, int64_t at, int n)
{
    const uint16_t *s = (const uint16_t *)p + at;
#pragma omp simd
    for (int i = 0; i < n; i++) x[i] = mt_f16_load(s[i]);
}

static void store_f64(void *p, int64_t at, const float *restrict x, int n)
{
    double *y = (double *)p + at;
#pragma omp simd
    for (int i = 0; i < n; i++) y[i] = (double)x[i];
}

static void store_f32(void *p, int64_t at, const float *restrict x, int n)
{
    memcpy((float *)p + at, x, (size_t)n * sizeof *x);
}

static void store_bf16(void *p, int64_t at, const float *restrict x, int n)
{
    uint16_t *y = (uint16_t *)p + at;
#pragma omp simd
    for (int i = 0; i < n; i++) y[i] = mt_f32_to_bf16(x[i]);
}

static void store_f16(void *p, int64_t at, const float *restrict x, int n)
{
    uint16_t *y = (uint16_t *)p + at;
#pragma omp simd
    for (int i = 0; i < n; i++) y[i] = mt_f16_store(x[i]);
}

static const struct plain_row {
    void (*load)(float *restrict x, const void *p, int64_t at, int n);
    void (*store)(void *p, int64_t at, const float *restrict x, int n);
} plain_rows[MT_F16 + 1] = {
    [MT_F64] = { load_f64, store_f64 },
    [MT_F32] = { load_f32, store_f32 },
    [MT_BF16] = { load_bf16, store_bf16 },
    [MT_F16] = { load_f16, store_f16 },
};

void load_plain(float *x, const side *s, int64_t element, int n)
{
    plain_rows[s->d.format->dtype].load(x, s->d.codes, element, n);
}

void save_plain(const side *s, int64_t element, const float *x, int n)
{
    plain_rows[s->d.format->dtype].store(s->d.codes, element, x, n);
}

/* First element of row r of a tile. */
static int64_t element_at(const tile *t, int r)
{
    return t->m->offset + (t->r0 + r) * t->m->cols + t->c0;
}

void store_plain(const side *s, const tile *t, const float *x)
{
    for (int r = 0; r < t->rows; r++) save_plain(s, element_at(t, r), x + r * TILE, t->cols);
}

/* ---- codes -------------------------------------------------------------------------------------
 */

/* out[c][r] = in[r][c] for a block of 8 x 8 bytes in rows of TILE. */
static void turn_block(uint8_t *restrict out, const uint8_t *restrict in)
{
    static const uint64_t masks[3] = { 0x00ff00ff00ff00ffu, 0x0000ffff0000ffffu,
                                       0x00000000ffffffffu };
    uint64_t a[8];
    for (int i = 0; i < 8; i++) memcpy(&a[i], in + i * TILE, 8);
    for (int stage = 2; stage >= 0; stage--) {
        int step = 1 << stage, shift = 8 << stage;
        for (int i = 0; i < 8; i++) {
            if (i & step) continue;
            uint64_t swap = (a[i] >> shift ^ a[i + step]) & masks[stage];
            a[i + step] ^= swap;
            a[i] ^= swap << shift;
        }
    }
    for (int i = 0; i < 8; i++) memcpy(out + i * TILE, &a[i], 8);
}

/* out[c][r] = in[r][c], r < rows, c < cols; rounded up to 8 in both. */
static void turn(uint8_t *restrict out, const uint8_t *restrict in, int rows, int cols)
{
    for (int r = 0; r < rows; r += 8)
        for (int c = 0; c < cols; c += 8) turn_block(out + c * TILE + r, in + r * TILE + c);
}

void pack_codes(uint8_t *restrict out, const uint8_t *restrict codes, int n, int per_byte)
{
    if (per_byte == 1) {
        memcpy(out, codes, (size_t)n);
        return;
    }
#pragma omp simd
    for (int i = 0; i < n / 2; i++) out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    if (n % 2) out[n / 2] = codes[n - 1];
}

void unpack_codes(uint8_t *restrict codes, const uint8_t *restrict in, int n, int per_byte)
{
    if (per_byte == 1) {
        memcpy(codes, in, (size_t)n);
        return;
    }
#pragma omp simd
    for (int i = 0; i < n / 2; i++) {
        codes[2 * i] = in[i] & 15;
        codes[2 * i + 1] = in[i] >> 4;
    }
    if (n % 2) codes[n - 1] = in[n / 2] & 15;
}

/* Where a tile's codes lie: `lines` lines of `length` codes, `pitch` bytes apart. */
struct code_place {
    uint8_t *first;
    int64_t pitch;
    int lines, length, per_byte;
    bool transposed;
};

static struct code_place code_place_of(const side *s, const tile *t)
{
    const mt_format *f = s->d.format;
    mt_direction_shape shape = mt_direction_shape_of(&s->d, s->dir, t->m->rows, t->m->cols);
    struct code_place p = { .pitch = shape.code_pitch,
                            .per_byte = f->codes_per_byte,
                            .transposed = shape.transposed };
    int64_t line = p.transposed ? t->c0 : t->r0, first = p.transposed ? t->r0 : t->c0;
    p.lines = p.transposed ? t->cols : t->rows;
    p.length = p.transposed ? t->rows : t->cols;
    p.first = (uint8_t *)s->d.codes + t->m->codes[s->which] + line * p.pitch + first / p.per_byte;
    return p;
}

void write_codes(workspace *ws, const side *s, const tile *t)
{
    struct code_place p = code_place_of(s, t);
    const uint8_t *codes = ws->codes;
    if (p.transposed) {
        turn(ws->turned, ws->codes, t->rows, t->cols);
        codes = ws->turned;
    }
    for (int i = 0; i < p.lines; i++)
        pack_codes(p.first + i * p.pitch, codes + i * TILE, p.length, p.per_byte);
}

static void read_codes(workspace *ws, const side *s, const tile *t)
{
    struct code_place p = code_place_of(s, t);
    uint8_t *codes = p.transposed ? ws->turned : ws->codes;
    for (int i = 0; i < p.lines; i++)
        unpack_codes(codes + i * TILE, p.first + i * p.pitch, p.length, p.per_byte);
    if (p.transposed) turn(ws->codes, ws->turned, t->cols, t->rows);
}

/* ---- scales ------------------------------------------------------------------------------------
 */

/* Where the scales of a tile's cells lie. Cell (i, j) is that of scale lines [line, line + repeat)
 * and block `block`: i counts lines and j blocks in the row direction, the other way in the column
 * one. */
struct scale_place {
    mt_direction_shape shape;
    char *first; /* of the member */
    int64_t line, block;
    int repeat;     /* lines that a cell's scale is stored for */
    int rows, cols; /* cells */
};

static struct scale_place scale_place_of(const side *s, const tile *t)
{
    bool row = s->dir == MT_ROW;
    struct scale_place p = {
        .shape = mt_direction_shape_of(&s->d, s->dir, t->m->rows, t->m->cols),
        .rows = cell_rows(s, t),
        .cols = cell_cols(s, t),
    };
    p.first = (char *)s->d.scales + (size_t)t->m->scales[s->which] * p.shape.scale_size;
    if (s->whole) return p; /* the one scale */
    int line_cell = row ? s->block_rows : s->block_cols;
    int block_cell = row ? s->block_cols : s->block_rows;
    int64_t line0 = row ? t->r0 : t->c0, block0 = row ? t->c0 : t->r0;
    bool shared = s->d.options.two_d && s->d.format->scale == MT_SCALE_F32;
    p.repeat = shared ? 1 : line_cell;
    p.line = shared ? line0 / line_cell : line0;
    p.block = block0 / block_cell;
    return p;
}

/* Stores cell `at`'s scale for its lines. */
static void write_cell(const struct scale_place *p, const side *s, int64_t line, int64_t block,
                       const grid *cells, int at)
{
    int64_t end = line + p->repeat < p->shape.scale_lines ? line + p->repeat : p->shape.scale_lines;
    for (int64_t i = line; i < end; i++) {
        int64_t place = mt_scale_place(&s->d, &p->shape, i, block);
        if (p->shape.scale_size == 1)
            p->first[place] = (char)cells->stored[at];
        else
            memcpy(p->first + place * (int64_t)sizeof(float), &cells->dec[at], sizeof(float));
    }
}

/* Where the scales of cell row i lie if they are single bytes at even distances, *step apart; else
 * NULL. */
static uint8_t *even_scales(const struct scale_place *p, const side *s, int i, int64_t *step)
{
    bool row = s->dir == MT_ROW;
    int64_t line = p->line + (row ? i : 0), block = p->block + (row ? 0 : i);
    if (s->whole || s->d.swizzled || p->shape.scale_size > 1) return NULL;
    *step = row ? p->shape.block_stride : p->shape.line_stride;
    return (uint8_t *)p->first + line * p->shape.line_stride + block * p->shape.block_stride;
}

void write_scales(const workspace *ws, const side *s, const tile *t)
{
    struct scale_place p = scale_place_of(s, t);
    bool row = s->dir == MT_ROW;
    int64_t step;
    if (p.repeat == 1 && even_scales(&p, s, 0, &step)) {
        for (int i = 0; i < p.rows; i++) {
            uint8_t *restrict out = even_scales(&p, s, i, &step);
            const uint8_t *restrict stored = ws->cells.stored + i * grid_pitch(s);
            for (int j = 0; j < p.cols; j++) out[j * step] = stored[j];
        }
        return;
    }
    for (int i = 0; i < p.rows; i++)
        for (int j = 0; j < p.cols; j++) {
            int64_t line = p.line + (row ? i : j) * p.repeat, block = p.block + (row ? j : i);
            write_cell(&p, s, line, block, &ws->cells, i * grid_pitch(s) + j);
        }
}

static void keep_f32(float *dec, const uint8_t *stored, int n, const level *l)
{
    (void)dec, (void)stored, (void)n, (void)l;
}

static void decode_e8m0(float *restrict dec, const uint8_t *restrict stored, int n, const level *l)
{
    (void)l;
#pragma omp simd
    for (int i = 0; i < n; i++)
        dec[i] = stored[i] == 255 ? mt_from_bits(0x7fc00000) : mt_e8m0_scale(stored[i]);
}

static void decode_e4m3(float *restrict dec, const uint8_t *restrict stored, int n, const level *l)
{
    const mt_codec e4m3 = mt_codec_of(MT_ELEMENT_E4M3);
    float s_dec = l->s_dec;
#pragma omp simd
    for (int i = 0; i < n; i++) dec[i] = mt_decode(e4m3, stored[i]) * s_dec;
}

void decode_scales(grid *cells, const side *s, int n, const level *l)
{
    static void (*const rows[])(float *, const uint8_t *, int, const level *) = {
        [MT_SCALE_F32] = keep_f32,
        [MT_SCALE_E8M0] = decode_e8m0,
        [MT_SCALE_E4M3] = decode_e4m3,
    };
    rows[s->d.format->scale](cells->dec, cells->stored, n, l);
}

static void read_scales(workspace *ws, const side *s, const level *l, const tile *t)
{
    struct scale_place p = scale_place_of(s, t);
    grid *cells = &ws->cells;
    bool row = s->dir == MT_ROW;
    memset(cells->stored, 0, (size_t)cell_count(s, t)); /* also what no element belongs to */
    for (int i = 0; i < p.rows; i++) {
        int64_t step;
        const uint8_t *in = even_scales(&p, s, i, &step);
        uint8_t *stored = cells->stored + i * grid_pitch(s);
        for (int j = 0; in && j < p.cols; j++) stored[j] = in[j * step];
        for (int j = 0; !in && j < p.cols; j++) {
            int64_t line = p.line + (row ? i : j), block = p.block + (row ? j : i);
            int64_t place = mt_scale_place(&s->d, &p.shape, line, block);
            int at = i * grid_pitch(s) + j;
            if (p.shape.scale_size == 1)
                cells->stored[at] = (uint8_t)p.first[place];
            else
                memcpy(&cells->dec[at], p.first + place * (int64_t)sizeof(float), sizeof(float));
        }
    }
    decode_scales(cells, s, cell_count(s, t), l);
}

void load_tile(workspace *ws, const side *source, const level *l, const tile *t)
{
    if (source->plain) {
        for (int r = 0; r < t->rows; r++) {
            float *x = ws->x + r * TILE;
            load_plain(x, source, element_at(t, r), t->cols);
            for (int c = t->cols; c < t->width; c++) x[c] = 0;
        }
        return;
    }
    read_codes(ws, source, t);
    read_scales(ws, source, l, t);
    decode_tile(ws->x, ws, source, t);
}
