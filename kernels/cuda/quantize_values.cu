/* Quantize of bf16 rows to bytes where a direction is kept decoded (MT_LAYOUT_DECODED): by the way
 * of quantize to bytes, what codes are worth being stored in their place. Scales of blocks are
 * powers of two. */
#include "kernels/cuda/quantize_bytes_kernel.cuh"

typedef mt_status (*launcher)(mt_stream *, const job *);

enum { VALUES = ROW_VALUES | COLUMN_VALUES, VALUES_AND_CODES = ROW_VALUES | COLUMN_CODES };

/* What is made of directions. */
static int made_of(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    return (row->present ? row->decoded ? ROW_VALUES : ROW_CODES : 0) |
           (col->present ? col->decoded ? COLUMN_VALUES : COLUMN_CODES : 0);
}

template <int KIND, int CODES, int FROM> static launcher launcher_from(int made)
{
    return made == VALUES             ? launch<KIND, VALUES, CODES, FROM>
           : made == VALUES_AND_CODES ? launch<KIND, VALUES_AND_CODES, CODES, FROM>
           : made == ROW_VALUES       ? launch<KIND, ROW_VALUES, CODES, FROM>
           : made == COLUMN_VALUES    ? launch<KIND, COLUMN_VALUES, CODES, FROM>
                                      : NULL;
}

/* NULL: what no pass of training takes: dY, which alone is E5M2, is not gathered without weights,
 * nor is a SwiGLU. */
template <int KIND, int CODES> static launcher launcher_of(int made, const job *j)
{
    const bool lying = !j->row_token && !j->swiglu && !j->z;
    if (made == VALUES && j->row_weight) return launch<KIND, VALUES, CODES, WEIGHTED>;
    if (made == VALUES && j->z) return launch<KIND, VALUES, CODES, GRADIENT>;
    if (lying) return launcher_from<KIND, CODES, LYING>(made);
    if constexpr (CODES == CODES_E4M3) {
        if (j->row_token && !j->row_weight) return launcher_from<KIND, CODES, GATHERED>(made);
        if (j->swiglu) return launcher_from<KIND, CODES, SWIGLU>(made);
    }
    return NULL;
}

/* NULL: no kernel of this file. */
static launcher launcher_for(const job *j)
{
    static launcher (*const kinds[][2])(int, const job *) = {
        { launcher_of<WHOLE, CODES_E4M3>, launcher_of<WHOLE, CODES_E5M2> },
        { launcher_of<LINES, CODES_E4M3>, launcher_of<LINES, CODES_E5M2> },
        { launcher_of<PLANAR, CODES_E4M3>, launcher_of<PLANAR, CODES_E5M2> }
    };
    static_assert(WHOLE == 0 && LINES == 1 && PLANAR == 2, "order of the table");
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    const bool e5m2 = mt_codes_kind(row->present ? *row : *col) == CODES_E5M2;
    return kinds[mt_cuda_short_kind(j)][e5m2](made_of(j), j);
}

bool mt_cuda_values_suffice(const job *j)
{
    const int kind = mt_cuda_short_kind(j);
    if (!keeps_values(j) || (kind != WHOLE && kind != LINES && kind != PLANAR)) return false;
    return strips_suffice(j) && launcher_for(j) != NULL;
}

mt_status mt_cuda_quantize_values(mt_stream *stream, const job *j)
{
    return launcher_for(j)(stream, j);
}
