/* The gradient of a bias: column sums over each member's rows, in the order in which mt_quantize
 * sums them too: row by row within each 128, then these sums. */
#include "kernels/cpu/gemm_priv.h"

enum { COLS = 64, ROWS = 128 };

/* `cols` columns, at most COLS, of `rows` rows of `ld` elements. */
static void add_columns(mt_real *db, const mt_elem *dy, int64_t rows, int64_t cols, int64_t ld,
                        bool accumulate)
{
    mt_real sums[COLS] = { 0 };
    for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
        mt_real part[COLS] = { 0 };
        for (int64_t r = r0; r < mt_min(rows, r0 + ROWS); r++)
            for (int64_t j = 0; j < cols; j++) part[j] += mt_get(dy + r * ld + j);
        for (int64_t j = 0; j < cols; j++) sums[j] += part[j];
    }
    for (int64_t j = 0; j < cols; j++) db[j] = (accumulate ? db[j] : 0) + sums[j];
}

mt_status MT_CPU(bias_grad)(mt_stream *stream, const struct mt_bias_grad_args *args)
{
    const mt_group *g = &args->dy->group;
    const mt_elem *dy = args->dy->dir[MT_ROW].codes;
    int64_t n = g->k, parts = mt_ceil_div(n, COLS);
#pragma omp parallel for num_threads(stream->device->threads) schedule(dynamic, 1)
    for (int64_t t = 0; t < g->members * parts; t++) {
        int64_t e = t / parts, j = t % parts * COLS;
        add_columns((mt_real *)args->db + e * n + j, dy + mt_group_offset(g, e) + j,
                    mt_group_rows(g, e), mt_min(COLS, n - j), n, args->accumulate);
    }
    return MT_OK;
}
