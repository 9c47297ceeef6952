/* Inside group_quantize and group_dequantize: work is cut into tiles of at most 128 x 128 elements
 * of one member. Every scale block lies within a tile (all block sizes divide 128), so tiles need
 * nothing of each other beyond whole-member amaxes.
 *
 * In a tile everything is kept in the source's orientation, rows of TILE elements: the values, the
 * codes, and the *grid*: one cell per scale block. Only storage knows about transposed columns. */
#pragma once

#include "kernels/cpu/isa.h"
#include "kernels/cpu/quantize_line.h"

enum {
    TILE = 128,
    AREA = TILE * TILE,
    CELLS = AREA / CHUNK,
    WORD_ROWS = 8, /* codes in 32 bits, at most */
    SIDES = 3      /* row and column direction of the result; the source */
};
enum { SOURCE = MT_DIR_COUNT };

/* A member of the group, and where its parts begin. */
typedef struct member {
    int64_t rows, cols;
    int64_t offset; /* elements */
    int64_t unit;   /* the first of its units */
    int64_t column; /* columns of the members before it */
    int64_t codes[SIDES], scales[SIDES];
} member;

/* The part of a member that is worked on: rows [r0, r0 + rows), columns [c0, c0 + cols). */
typedef struct tile {
    const member *m;
    int64_t index; /* of the member */
    int64_t r0, c0;
    int rows, cols;
    int width; /* cols rounded up to CHUNK: padding columns are 0 */
} tile;

/* Scales that follow from a member's amax. */
typedef struct level {
    float amax;
    float enc, dec;        /* formats with one f32 scale for the member */
    float s_enc, g, s_dec; /* nvfp4 */
} level;

/* One cell per scale block: row-major, pitch TILE / block_cols of the side. */
typedef struct grid {
    float amax[CELLS];
    float enc[CELLS]; /* values are multiplied by this before the cast */
    float dec[CELLS]; /* decoded codes are multiplied by this */
    uint8_t stored[CELLS];
} grid;

struct side;
typedef void scale_rule(const struct side *s, const level *l, int n, const float *amax, float *enc,
                        float *dec, uint8_t *stored);

/* A direction while a kernel runs. */
typedef struct side {
    mt_direction d;
    mt_dir dir;
    int which; /* MT_ROW, MT_COL or SOURCE: its place in member.codes */
    mt_codec codec;
    bool present, plain, whole;
    bool transposed;            /* codes are stored column by column */
    int block_rows, block_cols; /* of a cell; TILE x TILE where the tile has one scale or none */
    float overflow;             /* F's ovf */
    scale_rule *rule;
} side;

typedef struct workspace {
    _Alignas(64) float x[AREA];       /* the source */
    float other[AREA], rotated[AREA]; /* the column direction's values where not the source's */
    uint8_t codes[AREA];
    uint32_t words[AREA / 4]; /* codes that are stored column by column: 4 or 8 rows to a word */
    int32_t random[AREA];
    grid cells, six, four;
    float sums[TILE], most[TILE];
    bool nan; /* among the values last measured; true before */
} workspace;

/* Rows of a tile that have values: those past the last one, up to a word of codes, are 0. */
static inline int padded_rows(const tile *t)
{
    return (t->rows + WORD_ROWS - 1) / WORD_ROWS * WORD_ROWS;
}

static inline int grid_pitch(const side *s)
{
    return TILE / s->block_cols;
}

static inline int cell_rows(const side *s, const tile *t)
{
    return (t->rows + s->block_rows - 1) / s->block_rows;
}

static inline int cell_cols(const side *s, const tile *t)
{
    return (t->cols + s->block_cols - 1) / s->block_cols;
}

/* Cells of a tile, those between rows of the grid included. */
static inline int cell_count(const side *s, const tile *t)
{
    return cell_rows(s, t) * grid_pitch(s);
}

/* The cells that belong to row r, as scales along it. */
static inline line_scales row_cells(const side *s, const float *cells, int r)
{
    return line_scales_of(cells + r / s->block_rows * grid_pitch(s), s->block_cols);
}

/* What one thread works on at a time: a tile, or long rows the short way. */
enum { LONG_ROWS = 32, LONG_COLS = 8192 };
typedef struct unit_size {
    int64_t rows, cols;
} unit_size;

/* What quantize_rows does with a unit. */
struct rows_task {
    const side *source, *row;
    const level *level;
    float *amax;   /* raised to the largest magnitude; NULL: not wanted */
    int32_t *nans; /* counted up if `count`, else the unit's number of them */
    bool count;
};

/* External names, one per instruction set. */
#define side_of         MT_CPU_ISA(side_of)
#define plan_members    MT_CPU_ISA(plan_members)
#define tile_at         MT_CPU_ISA(tile_at)
#define pad_rows        MT_CPU_ISA(pad_rows)
#define fetch_next      MT_CPU_ISA(fetch_next)
#define read_tile       MT_CPU_ISA(read_tile)
#define load_tile       MT_CPU_ISA(load_tile)
#define load_plain      MT_CPU_ISA(load_plain)
#define save_plain      MT_CPU_ISA(save_plain)
#define store_plain     MT_CPU_ISA(store_plain)
#define pack_codes      MT_CPU_ISA(pack_codes)
#define unpack_codes    MT_CPU_ISA(unpack_codes)
#define decode_scales   MT_CPU_ISA(decode_scales)
#define write_codes     MT_CPU_ISA(write_codes)
#define write_scales    MT_CPU_ISA(write_scales)
#define scale_tile      MT_CPU_ISA(scale_tile)
#define encode_tile     MT_CPU_ISA(encode_tile)
#define decode_tile     MT_CPU_ISA(decode_tile)
#define save_tile_bf16  MT_CPU_ISA(save_tile_bf16)
#define member_level    MT_CPU_ISA(member_level)
#define measure_tile    MT_CPU_ISA(measure_tile)
#define rotate_tile     MT_CPU_ISA(rotate_tile)
#define measure_rotated MT_CPU_ISA(measure_rotated)
#define draw_tile       MT_CPU_ISA(draw_tile)
#define add_row_sums    MT_CPU_ISA(add_row_sums)
#define count_nans      MT_CPU_ISA(count_nans)
#define rows_suffice    MT_CPU_ISA(rows_suffice)
#define measure_rows    MT_CPU_ISA(measure_rows)
#define quantize_rows   MT_CPU_ISA(quantize_rows)
#define dequantize_rows MT_CPU_ISA(dequantize_rows)

/* ---- quantize_io.c: between tiles and memory ---- */

/* Fills members[N] for `sides` (absent ones skipped); returns the number of units. `members` NULL
 * only counts. */
int64_t plan_members(member *members, const mt_group *group, const side *const sides[SIDES],
                     unit_size size);

/* Unit `u` as a tile. */
tile tile_at(const member *members, int64_t count, unit_size size, int64_t u);

/* n elements of a plain direction from `element` on, as f32; and back, rounded. */
void load_plain(float *x, const side *s, int64_t element, int n);
void save_plain(const side *s, int64_t element, const float *x, int n);

/* Asks for row r of the tile to the right of a plain source's. */
void fetch_next(const side *source, const tile *t, int r);
/* Fills rows past the last one, up to padded_rows, with 0. */
void pad_rows(float *x, const tile *t);
/* ws->codes and ws->cells of a direction that is not plain. */
void read_tile(workspace *ws, const side *source, const level *l, const tile *t);
/* ws->x = the values of a direction, padding columns and rows 0. */
void load_tile(workspace *ws, const side *source, const level *l, const tile *t);

/* Elements of a plain format from x. */
void store_plain(const side *s, const tile *t, const float *x);

/* n codes to bytes and back: one or two in each. */
void pack_codes(uint8_t *out, const uint8_t *codes, int n, int per_byte);
void unpack_codes(uint8_t *codes, const uint8_t *in, int n, int per_byte);
/* cells->dec[0..n) from the stored scales; f32 scales are there already. */
void decode_scales(grid *cells, const side *s, int n, const level *l);

/* ws->codes, or ws->words, and ws->cells to memory. */
void write_codes(workspace *ws, const side *s, const tile *t);
void write_scales(workspace *ws, const side *s, const tile *t);

/* ---- quantize_codec.c: arithmetic on tiles ---- */

/* A direction as a side. When reading, square blocks of mx and nvfp4 are the lines they are stored
 * as. An absent direction gives an absent side. */
side side_of(const mt_direction *d, mt_dir dir, int which, bool reading);

/* `given`: the scale of a delayed format, NULL for 1. */
level member_level(const side *s, float amax, const float *given);

/* The largest magnitude of x; with `cells` also cells->amax of every block. */
float measure_tile(workspace *ws, const side *s, const tile *t, const float *x, bool cells);
/* cells->enc, dec, stored from cells->amax, by the side's rule; under 4over6 also by the values. */
void scale_tile(workspace *ws, const side *s, const level *l, const tile *t, const float *x);
/* ws->codes, or ws->words, from x and ws->cells. */
void encode_tile(workspace *ws, const side *s, const tile *t, const float *x);
/* out = decoded ws->codes times ws->cells.dec, padding columns 0. */
void decode_tile(float *out, workspace *ws, const side *s, const tile *t);

/* The same as bf16 to where they belong in `out`. False: `out` is not bf16, or not all is numbers
 * and scales that bf16 takes exactly; what was written does not count then. */
bool save_tile_bf16(const workspace *ws, const side *s, const side *out, const tile *t);

/* out = x rotated along the tokens, rounded to bf16 (rht). */
void rotate_tile(float *out, const float *x, const tile *t, uint16_t mask);
/* The largest magnitude of that, NaN left out. */
float measure_rotated(workspace *ws, const tile *t, const float *x, uint16_t mask);
/* ws->random: the 16 bits of every element. */
void draw_tile(workspace *ws, const tile *t, const uint32_t key[2], uint32_t first_row,
               uint32_t member_index, uint32_t step);
/* sums += rows of x, in order. */
void add_row_sums(float *sums, const float *x, const tile *t);
int64_t count_nans(const float *x, int n);

/* ---- quantize_rows.c: the short way ---- */

/* Whether the short way knows the direction; the other side must be plain. */
bool rows_suffice(const side *s);
/* The largest magnitude of a plain source; *nans: counted up by its NaNs. */
float measure_rows(workspace *ws, const side *source, int32_t *nans, const tile *t);
void quantize_rows(workspace *ws, const struct rows_task *task, const tile *t);
void dequantize_rows(workspace *ws, const side *s, const side *out, const level *l, const tile *t);
