/* Quantize to bytes and to PLANAR_NIBBLES: bf16 rows that begin at multiples of 16 bytes, as they
 * lie, gathered, with weights, or SwiGLU's; 1-D blocks or one scale a member. A thread block has a
 * strip of tiles and no more. Threads have eight elements each of eight rows; those of the next
 * tile are on their way meanwhile, each to where only its thread looks. Only magnitudes, codes of
 * columns and planar scales of rows meet in shared memory. The arithmetic is that of the tiles. */
#include "kernels/cuda/quantize_bytes_kernel.cuh"

typedef mt_status (*launcher)(mt_stream *, const job *);

template <int KIND, int CODES> static launcher launcher_of(int dirs, const job *j)
{
    if constexpr (KIND != PLANAR_NIBBLES) {
        enum { BOTH = ROW_CODES | COLUMN_CODES };
        if (j->row_weight) return launch<KIND, BOTH, CODES, WEIGHTED>;
        if (j->row_token) return launch<KIND, BOTH, CODES, GATHERED>;
        if (j->swiglu) return launch<KIND, BOTH, CODES, SWIGLU>;
        if (j->z) return launch<KIND, BOTH, CODES, GRADIENT>;
    }
    return dirs == ROW_CODES      ? launch<KIND, ROW_CODES, CODES, LYING>
           : dirs == COLUMN_CODES ? launch<KIND, COLUMN_CODES, CODES, LYING>
                                  : launch<KIND, ROW_CODES | COLUMN_CODES, CODES, LYING>;
}

int mt_cuda_swiglu_bytes(void)
{
    return sizeof(bytes_space<LINES, ROW_CODES | COLUMN_CODES, SWIGLU>);
}

bool mt_cuda_bytes_suffice(const job *j)
{
    const bool both = j->p.sides[MT_ROW].present && j->p.sides[MT_COL].present;
    const bool made = j->row_token || j->swiglu || j->z;
    if (!j->codes || keeps_values(j)) return false;
    if (made && (!both || mt_cuda_short_kind(j) == PLANAR_NIBBLES)) return false;
    return strips_suffice(j);
}

bool mt_cuda_bytes_give(const job *j)
{
    return (mt_cuda_bytes_suffice(j) || mt_cuda_values_suffice(j)) &&
           !mt_cuda_gathered_suffice(j) && mt_cuda_short_kind(j) == WHOLE && gives_found(*j);
}

/* Strips of so many tiles, where those of the group give each place of a block on the card one;
 * otherwise a tile each. */
static int strip_of(const mt_stream *stream, const job *j, int tiles)
{
    enum { PLACES = 3 /* on a multiprocessor */ };
    const int64_t fill = (int64_t)mt_cuda_multiprocessors(stream) * PLACES * tiles;
    return mt_cuda_in_strips(stream) || mt_cuda_plan_units(&j->p.group) >= fill ? tiles : 1;
}

/* Where scales of rows are bytes, strips go along the rows, so that more of them are written at
 * once: tiles of such a one; 1: down the columns. */
static int tiles_along(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const int kind = mt_cuda_short_kind(j);
    const bool lying = !j->row_token && !j->swiglu && !j->z;
    if (!lying || j->p.group.k <= TILE || keeps_values(j)) return 1;
    if (kind == PLANAR) return col->present ? 2 : 4;
    return kind == PLANAR_NIBBLES && row->present ? 4 : 1;
}

int mt_cuda_bytes_wide(const mt_stream *stream, const job *j)
{
    return strip_of(stream, j, tiles_along(j));
}

int mt_cuda_bytes_rows(const mt_stream *stream, const job *j)
{
    const bool made = j->row_token || j->swiglu || j->z;
    if (tiles_along(j) > 1) return TILE;
    return strip_of(stream, j, made ? 4 : j->p.sides[MT_ROW].present ? 2 : 3) * TILE;
}

mt_status mt_cuda_quantize_bytes(mt_stream *stream, const job *j)
{
    /* by kind; to E4M3, E5M2 */
    static launcher (*const kinds[KINDS][2])(
        int, const job *) = { { launcher_of<WHOLE, CODES_E4M3>, launcher_of<WHOLE, CODES_E5M2> },
                              { launcher_of<LINES, CODES_E4M3>, launcher_of<LINES, CODES_E5M2> },
                              { launcher_of<PLANAR, CODES_E4M3>, launcher_of<PLANAR, CODES_E5M2> },
                              { NULL, NULL },
                              { launcher_of<PLANAR_NIBBLES, CODES_E2M1>, NULL } };
    static_assert(WHOLE == 0 && LINES == 1 && PLANAR == 2 && NIBBLES == 3, "order of the table");
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const int dirs = (row->present ? ROW_CODES : 0) + (col->present ? COLUMN_CODES : 0);
    const bool e5m2 = mt_codes_kind(row->present ? *row : *col) == CODES_E5M2;
    return kinds[mt_cuda_short_kind(j)][e5m2](dirs, j)(stream, j);
}
