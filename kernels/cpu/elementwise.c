/* Elementwise ops, SwiGLU, embedding. */
#include "kernels/cpu/lanes.h"

/* Fewer elements than this are done by one thread: starting the others costs more. */
enum { SERIAL = 1 << 14 };

mt_status MT_CPU(fill)(mt_stream *stream, const struct mt_fill_args *args)
{
    (void)stream;
    mt_elem *y = args->y, value;
    mt_store_f64(&value, MT_ELEM_DTYPE, 0, args->value);
#pragma omp parallel for simd if (args->count >= SERIAL)
    for (int64_t i = 0; i < args->count; i++) y[i] = value;
    return MT_OK;
}

static void cast_f64(mt_elem *y, const void *from, int64_t count)
{
    const double *x = from;
#pragma omp parallel for simd if (count >= SERIAL)
    for (int64_t i = 0; i < count; i++) mt_put(y + i, (mt_real)x[i]);
}

static void cast_f32(mt_elem *y, const void *from, int64_t count)
{
    const float *x = from;
#pragma omp parallel for simd if (count >= SERIAL)
    for (int64_t i = 0; i < count; i++) mt_put(y + i, (mt_real)x[i]);
}

static void cast_bf16(mt_elem *y, const void *from, int64_t count)
{
    const uint16_t *x = from;
#pragma omp parallel for simd if (count >= SERIAL)
    for (int64_t i = 0; i < count; i++) mt_put(y + i, (mt_real)mt_bf16_to_f32(x[i]));
}

static void cast_f16(mt_elem *y, const void *from, int64_t count)
{
    const uint16_t *x = from;
#pragma omp parallel for if (count >= SERIAL)
    for (int64_t i = 0; i < count; i++) mt_put(y + i, (mt_real)mt_f16_to_f32(x[i]));
}

mt_status MT_CPU(cast)(mt_stream *stream, const struct mt_cast_args *args)
{
    (void)stream;
    static void (*const from[MT_DTYPE_COUNT])(mt_elem *, const void *, int64_t) = {
        [MT_F64] = cast_f64,
        [MT_F32] = cast_f32,
        [MT_BF16] = cast_bf16,
        [MT_F16] = cast_f16,
    };
    from[args->x_dtype](args->y, args->x, args->count);
    return MT_OK;
}

mt_status MT_CPU(add)(mt_stream *stream, const struct mt_add_args *args)
{
    (void)stream;
    mt_elem *y = args->y;
    const mt_elem *a = args->a, *b = args->b;
#pragma omp parallel for simd if (args->count >= SERIAL)
    for (int64_t i = 0; i < args->count; i++) mt_put(y + i, mt_get(a + i) + mt_get(b + i));
    return MT_OK;
}

MT_INLINE int64_t rows_of(int64_t rows, const int64_t *rows_used)
{
    return rows_used ? mt_min(rows, *rows_used) : rows;
}

void MT_CPU(swiglu_row)(mt_elem *y, const mt_elem *gate, const mt_elem *up, int64_t width)
{
    int64_t f = 0;
#if MT_ELEM_BITS != 16
    for (; f + LANES <= width; f += LANES) {
        vec g = *(const vec_at *)(gate + f);
        *(vec_at *)(y + f) = g / (1 + exp_lanes(-g)) * *(const vec_at *)(up + f);
    }
#endif
#pragma omp simd
    for (int64_t i = f; i < width; i++) {
        mt_real g = mt_get(gate + i);
        mt_put(y + i, g / (1 + mt_exp(-g)) * mt_get(up + i));
    }
}

void MT_CPU(swiglu_row_bwd)(mt_elem *dgate, mt_elem *dup, const mt_elem *dy, const mt_elem *gate,
                            const mt_elem *up, int64_t width)
{
    int64_t f = 0;
#if MT_ELEM_BITS != 16
    for (; f + LANES <= width; f += LANES) {
        vec g = *(const vec_at *)(gate + f), d = *(const vec_at *)(dy + f);
        vec s = 1 / (1 + exp_lanes(-g));
        *(vec_at *)(dgate + f) = d * *(const vec_at *)(up + f) * (s * (1 + g * (1 - s)));
        *(vec_at *)(dup + f) = d * (g * s);
    }
#endif
#pragma omp simd
    for (int64_t i = f; i < width; i++) {
        mt_real g = mt_get(gate + i), d = mt_get(dy + i), s = 1 / (1 + mt_exp(-g));
        mt_put(dgate + i, d * mt_get(up + i) * (s * (1 + g * (1 - s))));
        mt_put(dup + i, d * (g * s));
    }
}

mt_status MT_CPU(swiglu_fwd)(mt_stream *stream, const struct mt_swiglu_fwd_args *args)
{
    (void)stream;
    int64_t rows = rows_of(args->rows, args->rows_used), width = args->width;
#pragma omp parallel for schedule(static) if (rows * width >= SERIAL)
    for (int64_t r = 0; r < rows; r++) {
        const mt_elem *gate = (const mt_elem *)args->x + r * 2 * width;
        MT_CPU(swiglu_row)((mt_elem *)args->y + r * width, gate, gate + width, width);
    }
    return MT_OK;
}

mt_status MT_CPU(swiglu_bwd)(mt_stream *stream, const struct mt_swiglu_bwd_args *args)
{
    (void)stream;
    int64_t rows = rows_of(args->rows, args->rows_used), width = args->width;
#pragma omp parallel for schedule(static) if (rows * width >= SERIAL)
    for (int64_t r = 0; r < rows; r++) {
        const mt_elem *gate = (const mt_elem *)args->x + r * 2 * width;
        mt_elem *dgate = (mt_elem *)args->dx + r * 2 * width;
        MT_CPU(swiglu_row_bwd)
        (dgate, dgate + width, (const mt_elem *)args->dy + r * width, gate, gate + width, width);
    }
    return MT_OK;
}

mt_status MT_CPU(embedding_fwd)(mt_stream *stream, const struct mt_embedding_fwd_args *args)
{
    (void)stream;
    int64_t width = args->width;
#pragma omp parallel for schedule(static) if (args->tokens_count * width >= SERIAL)
    for (int64_t t = 0; t < args->tokens_count; t++) {
        const mt_real *w = (const mt_real *)args->w + args->tokens[t] * width;
        mt_elem *y = (mt_elem *)args->y + t * width;
#pragma omp simd
        for (int64_t c = 0; c < width; c++) mt_put(y + c, w[c]);
    }
    return MT_OK;
}

/* Columns [from, to) of the gradient: every element sums its tokens in order, whoever owns the
 * columns. */
static void embedding_bwd_columns(const struct mt_embedding_bwd_args *args, int64_t from,
                                  int64_t to)
{
    int64_t width = args->width;
    mt_real *dw = args->dw;
    if (!args->accumulate)
        for (int64_t v = 0; v < args->vocab; v++)
            memset(dw + v * width + from, 0, (size_t)(to - from) * sizeof *dw);
    for (int64_t t = 0; t < args->tokens_count; t++) {
        const mt_elem *dy = (const mt_elem *)args->dy + t * width;
        mt_real *row = dw + args->tokens[t] * width;
#pragma omp simd
        for (int64_t c = from; c < to; c++) row[c] += mt_get(dy + c);
    }
}

mt_status MT_CPU(embedding_bwd)(mt_stream *stream, const struct mt_embedding_bwd_args *args)
{
    (void)stream;
    enum { LINE = 64 / sizeof(mt_real) };
    int64_t work = (args->tokens_count + args->vocab) * args->width;
    int64_t lines = mt_ceil_div(args->width, LINE);
#pragma omp parallel if (work >= SERIAL)
    {
        int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        int64_t from = lines * thread / threads * LINE, to = lines * (thread + 1) / threads * LINE;
        to = mt_min(to, args->width);
        if (from < to) embedding_bwd_columns(args, from, to);
    }
    return MT_OK;
}
