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

/* Most lines are a tile wide. */
static inline void copy_line(void *restrict to, const void *restrict from, int bytes)
{
    if (bytes == TILE)
        memcpy(to, from, TILE);
    else
        memcpy(to, from, (size_t)bytes);
}

void pack_codes(uint8_t *restrict out, const uint8_t *restrict codes, int n, int per_byte)
{
    if (per_byte == 1) {
        copy_line(out, codes, n);
        return;
    }
#pragma omp simd
    for (int i = 0; i < n / 2; i++) out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    if (n % 2) out[n / 2] = codes[n - 1];
}

void unpack_codes(uint8_t *restrict codes, const uint8_t *restrict in, int n, int per_byte)
{
    if (per_byte == 1) {
        copy_line(codes, in, n);
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

enum { LINE_WORDS = TILE / 4 };
typedef uint32_t quad __attribute__((vector_size(16), aligned(4), may_alias));
#ifdef __clang__
#define PICK(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define PICK(x, y, ...) __builtin_shuffle(x, y, (quad){ __VA_ARGS__ })
#endif

/* out[c][r] = in[r][c] of 4 x 4 words. */
static inline void turn_quads(uint32_t *restrict out, int out_pitch, const uint32_t *restrict in,
                              int in_pitch)
{
    quad a = *(const quad *)in, b = *(const quad *)(in + in_pitch);
    quad c = *(const quad *)(in + 2 * in_pitch), d = *(const quad *)(in + 3 * in_pitch);
    quad ab = PICK(a, b, 0, 4, 1, 5);
    quad cd = PICK(c, d, 0, 4, 1, 5);
    *(quad *)out = PICK(ab, cd, 0, 1, 4, 5);
    *(quad *)(out + out_pitch) = PICK(ab, cd, 2, 3, 6, 7);
    ab = PICK(a, b, 2, 6, 3, 7);
    cd = PICK(c, d, 2, 6, 3, 7);
    *(quad *)(out + 2 * out_pitch) = PICK(ab, cd, 0, 1, 4, 5);
    *(quad *)(out + 3 * out_pitch) = PICK(ab, cd, 2, 3, 6, 7);
}

/* Lines of whole columns to and from words[i][c], the codes of `count` rows of column c. */
static void write_words(const workspace *ws, const struct code_place *p)
{
    const int count = 4 * p->per_byte, bytes = (p->length + p->per_byte - 1) / p->per_byte;
    uint32_t lines[4 * LINE_WORDS];
    for (int c = 0; c < p->lines; c += 4) {
        for (int i = 0; i * count < p->length; i += 4)
            turn_quads(lines + i, LINE_WORDS, ws->words + i * TILE + c, TILE);
        for (int i = 0; i < 4 && c + i < p->lines; i++)
            copy_line(p->first + (c + i) * p->pitch, lines + i * LINE_WORDS, bytes);
    }
}

static void read_words(workspace *ws, const struct code_place *p)
{
    const int count = 4 * p->per_byte, bytes = (p->length + p->per_byte - 1) / p->per_byte;
    const uint32_t mask = p->per_byte > 1 ? 15 : 255;
    uint32_t lines[4 * LINE_WORDS] = { 0 };
    for (int c = 0; c < p->lines; c += 4) {
        for (int i = 0; i < 4 && c + i < p->lines; i++)
            copy_line(lines + i * LINE_WORDS, p->first + (c + i) * p->pitch, bytes);
        for (int i = 0; i * count < p->length; i += 4)
            turn_quads(ws->words + i * TILE + c, TILE, lines + i, LINE_WORDS);
    }
    for (int r = 0; r < p->length; r++) {
        const uint32_t *words = ws->words + r / count * TILE;
        const int shift = 32 / count * (r % count);
        uint8_t *codes = ws->codes + r * TILE;
#pragma omp simd
        for (int c = 0; c < TILE; c++) codes[c] = (uint8_t)(words[c] >> shift & mask);
    }
}

void write_codes(workspace *ws, const side *s, const tile *t)
{
    struct code_place p = code_place_of(s, t);
    if (p.transposed) {
        write_words(ws, &p);
        return;
    }
    for (int i = 0; i < p.lines; i++)
        pack_codes(p.first + i * p.pitch, ws->codes + i * TILE, p.length, p.per_byte);
}

static void read_codes(workspace *ws, const side *s, const tile *t)
{
    struct code_place p = code_place_of(s, t);
    if (p.transposed) read_words(ws, &p);
    for (int i = 0; !p.transposed && i < p.lines; i++)
        unpack_codes(ws->codes + i * TILE, p.first + i * p.pitch, p.length, p.per_byte);
    for (int r = 0; t->cols < t->width && r < t->rows; r++) /* padding is decoded, too */
        memset(ws->codes + r * TILE + t->cols, 0, (size_t)(t->width - t->cols));
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
    int repeat;                 /* lines that a cell's scale is stored for */
    int rows, cols;             /* cells */
    int64_t row_step, col_step; /* from a cell's scale to the next one's, where not swizzled */
};

static struct scale_place scale_place_of(const side *s, const tile *t)
{
    bool row = s->dir == MT_ROW;
    struct scale_place p = {
        .shape = mt_direction_shape_of(&s->d, s->dir, t->m->rows, t->m->cols),
        .rows = cell_rows(s, t),
        .cols = cell_cols(s, t),
        .repeat = 1,
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
    p.row_step = row ? p.shape.line_stride : p.shape.block_stride;
    p.col_step = row ? p.shape.block_stride : p.shape.line_stride;
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

/* Copies between the grid, rows of `pitch` cells, and scales of `size` bytes, which are written if
 * `store`. */
MT_CODEC_INLINE void copy_even(const struct scale_place *p, char *cells, int pitch, int size,
                               bool store)
{
    bool tall = p->cols == 1;
    int64_t i_step = tall ? p->col_step : p->row_step, j_step = tall ? p->row_step : p->col_step;
    int outer = tall ? 1 : p->rows, inner = tall ? p->rows : p->cols, each = tall ? pitch : 1;
    int64_t first = p->line * p->shape.line_stride + p->block * p->shape.block_stride;
    for (int i = 0; i < outer; i++) {
        char *scales = p->first + (first + i * i_step) * size, *row = cells + i * pitch * size;
        for (int j = 0; j < inner; j++) {
            char *scale = scales + j * j_step * size, *cell = row + j * each * size;
            memcpy(store ? scale : cell, store ? cell : scale, (size_t)size);
        }
    }
}

void write_scales(workspace *ws, const side *s, const tile *t)
{
    struct scale_place p = scale_place_of(s, t);
    bool row = s->dir == MT_ROW;
    if (p.repeat == 1 && !s->d.swizzled) {
        if (p.shape.scale_size == 1)
            copy_even(&p, (char *)ws->cells.stored, grid_pitch(s), 1, true);
        else
            copy_even(&p, (char *)ws->cells.dec, grid_pitch(s), sizeof(float), true);
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
    if (p.shape.scale_size > 1)
        copy_even(&p, (char *)cells->dec, grid_pitch(s), sizeof(float), false);
    else if (!s->d.swizzled)
        copy_even(&p, (char *)cells->stored, grid_pitch(s), 1, false);
    for (int i = 0; s->d.swizzled && i < p.rows; i++)
        for (int j = 0; j < p.cols; j++) {
            int64_t line = p.line + (row ? i : j), block = p.block + (row ? j : i);
            int64_t place = mt_scale_place(&s->d, &p.shape, line, block);
            cells->stored[i * grid_pitch(s) + j] = (uint8_t)p.first[place];
        }
    decode_scales(cells, s, cell_count(s, t), l);
}

void pad_rows(float *x, const tile *t)
{
    size_t rows = (size_t)(padded_rows(t) - t->rows);
    memset(x + t->rows * TILE, 0, rows * TILE * sizeof *x);
}

/* Rows are far from each other where they are long: no machine expects the next tile by itself. */
void fetch_next(const side *source, const tile *t, int r)
{
    if (t->c0 + 2 * TILE > t->m->cols) return;
    int size = (int)mt_dtype_size(source->d.format->dtype);
    const char *next = (const char *)source->d.codes + (element_at(t, r) + TILE) * size;
    for (int i = 0; i < TILE * size; i += 64) __builtin_prefetch(next + i);
}

void read_tile(workspace *ws, const side *source, const level *l, const tile *t)
{
    read_codes(ws, source, t);
    read_scales(ws, source, l, t);
}

void load_tile(workspace *ws, const side *source, const level *l, const tile *t)
{
    if (source->plain) {
        for (int r = 0; r < t->rows; r++) {
            float *x = ws->x + r * TILE;
            fetch_next(source, t, r);
            load_plain(x, source, element_at(t, r), t->cols);
            for (int c = t->cols; c < t->width; c++) x[c] = 0;
        }
        pad_rows(ws->x, t);
        return;
    }
    read_tile(ws, source, l, t);
    decode_tile(ws->x, ws, source, t);
    pad_rows(ws->x, t);
}
