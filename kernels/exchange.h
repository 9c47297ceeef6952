/* Rows on their way to experts of other ranks, in blocks (dist/exchange.h does the sending).
 *
 * There are P ranks, each with S = E / P experts: rank r has experts [r S, (r + 1) S). A buffer is
 * P blocks of `lines` lines; a line is a row of D elements. Block r goes to rank r, or came from
 * it. A block begins with its head, in `head_lines` lines: int64 bytes in use after that number,
 * then int64 [S]: rows for each expert of the receiver; then, where it has any, a real of each row.
 * Its rows follow at line head_lines, expert after expert. Lines are numbered over the whole
 * buffer, in int32. What no row has filled is never read.
 *
 * A line's bytes times `lines` are a multiple of 8, and so are the addresses of buffers; head_lines
 * lines hold 8 (S + 1) bytes or more, and the reals (mt_exchange_head).
 *
 * A line may be coded: it then holds the codes of its row, ceil(D / codes of a byte) bytes, and, at
 * the next multiple of 4, their ceil(D / block) scales, as the format's row direction would have
 * them for that row alone (NUMERICS sections 2 and 3), and is a multiple of 16 bytes long. What it
 * decodes to, quantized again in that format, decodes to the same values (mt_exchange_codes). */
#pragma once

#include "core/device.h"
#include "core/format_spec.h"

#ifdef __cplusplus
extern "C" {
#endif

struct mt_blocks {
    int64_t ranks, experts;    /* P, S */
    int64_t lines, head_lines; /* of a block; rows that it has room for: the difference */
};

/* Whether lines can be coded in this format: blocks along a row, scales that are powers of two made
 * from the block alone, rounding to nearest. A block's amax rounds to a code between half the
 * largest and the largest; so the scale that it asks for when it is quantized again is the same,
 * or, where it has become just half the largest, half of it, and codes twice as large, all of which
 * there are. */
bool mt_exchange_codes(const mt_format_spec *spec);
/* Bytes of a line of `width` elements; coded->format NULL: as they are. */
int64_t mt_exchange_line(mt_dtype dtype, int64_t width, const mt_format_spec *coded);
/* Bytes of a head for `experts`, with a real of each of so many rows. */
int64_t mt_exchange_head(mt_dtype dtype, int64_t experts, int64_t rows);

/* Where the rows of a route plan go: heads int64 [P, 1 + S]; token_line int32 [T, k]: the line of
 * each choice, -1 where it was dropped or its block is full; line_token int32 [P lines]: the token
 * of each line, -1: none. Each block takes its first rows; *most (int64) becomes at least the
 * number of rows for any one block: what has room for that many leaves none out. chosen, position,
 * row_token and offsets [E + 1] are of mt_route_plan over all E experts. width: D. */
struct mt_exchange_plan_args {
    mt_dtype dtype;
    struct mt_blocks blocks;
    int64_t tokens, top_k, width;
    const int32_t *chosen, *position, *row_token;
    const int64_t *offsets;
    int64_t *heads;
    int32_t *token_line, *line_token;
    int64_t *most;
};

/* Writes heads into a buffer y [P lines, D], and, where index (int32 [P lines]) is not NULL, rows:
 * line l becomes row index[l] of x [rows, D]. Lines with index -1 stay as they are. coded, with a
 * format: y's lines are coded, and without index x is a buffer [P lines, D] whose lines in use, by
 * the heads, become the same lines of y. The bytes in use that `heads` has are those of lines that
 * are not coded; y is given its own. reals: real [P lines], those of lines in use go into the heads
 * of lines that are not coded; NULL: there are none. */
struct mt_exchange_pack_args {
    mt_dtype dtype;
    struct mt_blocks blocks;
    int64_t width;
    void *y;
    const void *x;
    const int32_t *index;
    const int64_t *heads;
    const void *reals;
    mt_format_spec coded;
};

/* A buffer y [P lines, D] from one of coded lines, x, that has arrived: heads, and the lines in
 * use. A value beyond the largest of the dtype becomes that, unless its block had an infinity (E8M0
 * scale 0xFE). */
struct mt_exchange_unpack_args {
    mt_dtype dtype;
    struct mt_blocks blocks;
    int64_t width;
    void *y;
    const void *x;
    mt_format_spec coded;
};

/* The rows of a buffer y that has arrived, sorted by expert, then by sender, then as they were
 * sent: heads int64 [P, 1 + S] as received; counts int64 [S], offsets int64 [S + 1] and
 * element_offsets int64 [MT_ROUTE_WIDTHS][S + 1] as of mt_route_plan; row_line int32 [P lines]: the
 * line of each row, unspecified past offsets[S]; line_row int32 [P lines]: the row of each line,
 * -1: none. */
struct mt_exchange_arrivals_args {
    mt_dtype dtype;
    struct mt_blocks blocks;
    int64_t width;
    const void *y;
    int64_t *heads, *counts, *offsets;
    int64_t widths[3];
    int64_t *element_offsets; /* NULL is not written */
    int32_t *row_line, *line_row;
};

/* The gradient of routing weights from a buffer x that has come back with reals: of each row, the
 * gradient of a factor of 1 (mt_weights_bwd without weights). dweights[t, slot] = the real of line
 * token_line[t, slot] over weights[t, slot]; 0 without a line, and where the weight is 0. dweights
 * and weights real [T, k], token_line int32 [T, k] as of mt_exchange_plan; width: D. */
struct mt_exchange_weights_bwd_args {
    mt_dtype dtype;
    struct mt_blocks blocks;
    int64_t tokens, top_k, width;
    void *dweights;
    const void *x, *weights;
    const int32_t *token_line;
};

#ifdef __cplusplus
}
#endif
