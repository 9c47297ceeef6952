/* RMSNorm. */
#include "kernels/cpu/lanes.h"

#include "kernels/cpu/backend.h"
#include "kernels/cpu/rowblocks.h"

/* Fewer elements than this are done by one thread: starting the others costs more. */
enum { SERIAL = 1 << 14 };

static mt_real norm_row(mt_elem *y, const mt_elem *x, const mt_real *w, int64_t width, mt_real eps)
{
    mt_real mean = dot_of(x, x, width) / (mt_real)width;
    mt_real rstd = 1 / (mt_real)sqrt((double)(mean + eps));
#pragma omp simd
    for (int64_t c = 0; c < width; c++) mt_put(y + c, mt_rounded(mt_get(x + c) * rstd) * w[c]);
    return rstd;
}

mt_status MT_CPU(rmsnorm_fwd)(mt_stream *stream, const struct mt_rmsnorm_fwd_args *args)
{
    (void)stream;
    int64_t width = args->width;
    if (width == 0) return MT_OK;
#pragma omp parallel for schedule(static) if (args->rows * width >= SERIAL)
    for (int64_t r = 0; r < args->rows; r++)
        ((mt_real *)args->rstd)[r] =
            norm_row((mt_elem *)args->y + r * width, (const mt_elem *)args->x + r * width, args->w,
                     width, (mt_real)args->eps);
    return MT_OK;
}

/* One row of dx; `add` and `dw` (this row's xhat dy is added to it) may be NULL. */
static void norm_row_bwd(mt_elem *dx, const mt_elem *add, mt_real *dw, const mt_elem *dy,
                         const mt_elem *x, mt_real rstd, const mt_real *w, int64_t width)
{
    vec sums = { 0 };
    mt_real sum = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        sums += load_elements(dy + i) * *(const vec_at *)(w + i) * (load_elements(x + i) * rstd);
    for (; i < width; i++) sum += mt_get(dy + i) * w[i] * (mt_get(x + i) * rstd);
    mt_real mean = (lanes_sum(sums) + sum) / (mt_real)width;
    if (dw) {
#pragma omp simd
        for (int64_t c = 0; c < width; c++) dw[c] += mt_get(dy + c) * (mt_get(x + c) * rstd);
    }
    if (add) {
#pragma omp simd
        for (int64_t c = 0; c < width; c++)
            mt_put(dx + c,
                   mt_get(add + c) + rstd * (mt_get(dy + c) * w[c] - mt_get(x + c) * rstd * mean));
    } else {
#pragma omp simd
        for (int64_t c = 0; c < width; c++)
            mt_put(dx + c, rstd * (mt_get(dy + c) * w[c] - mt_get(x + c) * rstd * mean));
    }
}

mt_status MT_CPU(rmsnorm_bwd)(mt_stream *stream, const struct mt_rmsnorm_bwd_args *args)
{
    int64_t rows = args->rows, width = args->width;
    if (width == 0) return MT_OK;
    int64_t block = mt_row_block(rows), blocks = mt_ceil_div(rows, block);
    void *partials = NULL;
    if (args->dw && blocks)
        MT_TRY(mt_cpu_scratch(stream, &partials, (size_t)(blocks * width) * sizeof(mt_real)));
#pragma omp parallel for schedule(static) if (rows * width >= SERIAL)
    for (int64_t b = 0; b < blocks; b++) {
        mt_real *dw = partials ? (mt_real *)partials + b * width : NULL;
        if (dw) memset(dw, 0, (size_t)width * sizeof *dw);
        for (int64_t r = b * block; r < mt_min(rows, (b + 1) * block); r++)
            norm_row_bwd((mt_elem *)args->dx + r * width,
                         args->dx_add ? (const mt_elem *)args->dx_add + r * width : NULL, dw,
                         (const mt_elem *)args->dy + r * width,
                         (const mt_elem *)args->x + r * width, ((const mt_real *)args->rstd)[r],
                         args->w, width);
    }
    if (args->dw) mt_add_partials(args->dw, args->accumulate, partials, blocks, width, width);
    return MT_OK;
}
