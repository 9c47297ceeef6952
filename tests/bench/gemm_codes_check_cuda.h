/* What products of codes on a GPU must be: values of operands, the f64 product, what fp8 tensor
 * cores may lose, and operands whose scales differ far. */
#pragma once

#include "tests/bench/gemm_codes_cuda.h"

/* The values of an operand; those past the last member's are 0. */
static double *decoded(const mt_qtensor *q, const mt_direction *d)
{
    size_t bytes = (size_t)mt_group_capacity(&q->group) * sizeof(double);
    double *host = malloc(bytes + 1);
    assert_non_null(host);
    void *y = device_buffer(bytes);
    CUDA_OK(cudaMemset(y, 0, bytes));
    assert_ok(mt_dequantize(
        &stream,
        &(struct mt_dequantize_args){
            .dtype = MT_BF16, .src = q, .dir = (mt_dir)(d - q->dir), .y = y, .y_dtype = MT_F64 }));
    CUDA_OK(cudaStreamSynchronize(queue));
    CUDA_OK(cudaMemcpy(host, y, bytes, cudaMemcpyDefault));
    device_free(y);
    return host;
}

/* The f64 product of these operands. */
static double *reference(const struct product *p, const double *a, const double *b, bool sizes)
{
    int64_t counts[] = { mt_group_capacity(&p->a.group), mt_group_capacity(&p->b.group) };
    const double *from[] = { a, b };
    void *there[2];
    double *d = malloc((size_t)p->count * sizeof *d + 1);
    assert_non_null(d);
    for (int o = 0; o < 2; o++) {
        double *values = malloc((size_t)counts[o] * sizeof *values + 1);
        assert_non_null(values);
        for (int64_t i = 0; i < counts[o]; i++) values[i] = sizes ? fabs(from[o][i]) : from[o][i];
        there[o] = upload(values, (size_t)counts[o] * sizeof *values);
        free(values);
    }
    mt_qtensor x = mt_qtensor_plain(p->a.group, MT_F64, there[0]);
    mt_qtensor y = mt_qtensor_plain(p->b.group, MT_F64, there[1]);
    struct mt_gemm_args args = { .dtype = MT_F64,
                                 .layout = p->layout,
                                 .a = &x,
                                 .b = &y,
                                 .d = device_buffer((size_t)p->count * sizeof *d),
                                 .d_dtype = MT_F64 };
    assert_ok(mt_gemm(&stream, &args));
    CUDA_OK(cudaStreamSynchronize(queue));
    CUDA_OK(cudaMemcpy(d, args.d, (size_t)p->count * sizeof *d, cudaMemcpyDefault));
    device_free(args.d), device_free(there[0]), device_free(there[1]);
    return d;
}

/* Lines of codes in member e of ragged rows: its columns, or its rows, and how long they are. */
static int64_t lines_of(const mt_qtensor *q, mt_dir dir, const struct rows *rows, int64_t e)
{
    return dir == MT_COL ? q->group.k : rows->counts[e];
}

static int64_t length_of(const mt_qtensor *q, mt_dir dir, const struct rows *rows, int64_t e)
{
    return dir == MT_COL ? rows->counts[e] : q->group.k;
}

/* Where its scales begin: of blocks of each line beside each other. */
static int64_t first_scale(const mt_qtensor *q, mt_dir dir, const struct rows *rows, int64_t e)
{
    int64_t first = 0;
    for (int64_t m = 0; m < e; m++)
        first += (length_of(q, dir, rows, m) + 127) / 128 * lines_of(q, dir, rows, m);
    return first;
}

/* The largest scale of line n of an operand in member e, of blocks that are not all 0. */
static double level_of(const mt_qtensor *q, mt_dir dir, const struct rows *rows,
                       const float *scales, const double *values, int64_t e, int64_t n)
{
    const int64_t lines = lines_of(q, dir, rows, e), first = first_scale(q, dir, rows, e);
    const int64_t start = rows->start[e], columns = q->group.k;
    double level = 0;
    for (int64_t r = 0; r < length_of(q, dir, rows, e); r++)
        if (values[dir == MT_COL ? (start + r) * columns + n : (start + n) * columns + r] != 0)
            level = fmax(level, (double)scales[first + r / 128 * lines + n]);
    return level;
}

/* What fp8 tensor cores may lose in element (i, j) of member e: mt_gemm_fp8_loss of each 128; and
 * what levels do of the operands that have one (not 0). */
static double loss_of(const struct product *p, const struct rows *rows, const double *a,
                      const double *b, int64_t e, int64_t i, int64_t j, const double level[2])
{
    double loss = 0, largest = 0, sum = 0;
    bool wgrad = p->layout == MT_GEMM_NT, along = p->layout == MT_GEMM_TN;
    int64_t start = rows->start[e], depth = wgrad ? rows->counts[e] : p->depth;
    for (int64_t q = 0; q < depth; q++) {
        if (q % 128 == 0) loss += mt_gemm_fp8_loss(largest), largest = sum = 0;
        int64_t at = wgrad   ? (start + q) * p->k + j
                     : along ? (e * p->n + j) * p->k + q
                             : (e * p->n + q) * p->k + j;
        double y = b[wgrad ? (start + q) * p->n + i : (start + i) * p->depth + q], x = a[at] * y;
        sum += x, largest = fmax(largest, fmax(fabs(x), fabs(sum)));
        loss += mt_gemm_fp8_level_loss(level[0], fabs(y)) +
                mt_gemm_fp8_level_loss(level[1], fabs(a[at]));
    }
    return loss + mt_gemm_fp8_loss(largest);
}

/* A direction's on the host. */
static float *block_scales(const mt_qtensor *q, const mt_direction *d)
{
    size_t bytes = mt_direction_scale_bytes(d, (mt_dir)(d - q->dir), &q->group);
    float *scales = malloc(bytes + 1);
    assert_non_null(scales);
    if (bytes > 0) CUDA_OK(cudaMemcpy(scales, d->scales, bytes, cudaMemcpyDefault));
    return scales;
}

/* An operand whose lines have scales far from each other, as from their own, and blocks of zeros,
 * whose scale is 1. */
static void spread(mt_qtensor *q, mt_dir dir, const struct rows *rows, uint64_t seed)
{
    const mt_direction *d = &q->dir[dir];
    size_t bytes = mt_direction_code_bytes(d, dir, &q->group);
    size_t scale_bytes = mt_direction_scale_bytes(d, dir, &q->group);
    uint8_t *codes = calloc(bytes, 1);
    float *scales = calloc(scale_bytes, 1);
    mt_codec codec = mt_codec_of(d->options.element);
    assert_true(codes && scales);
    for (int64_t e = 0; e < rows->members; e++) {
        const int64_t lines = lines_of(q, dir, rows, e), length = length_of(q, dir, rows, e);
        const int64_t first = first_scale(q, dir, rows, e);
        for (int64_t n = 0; n < lines; n++)
            for (int64_t r = 0; r < length; r++) {
                const int64_t block = e * 3 + r / 128;
                bool zero = (block * 5 + n) % 7 == 0 || n == 3;
                uint64_t at = (uint64_t)(rows->start[e] * q->group.k + n * length + r);
                int code = 1 + (int)(4 * mt_rng_uniform(seed, 0, at));
                scales[first + r / 128 * lines + n] =
                    zero ? 1 : ldexpf(1, -40 + (int)(n % 23) + (int)((block * 3 + n) % 9));
                codes[at] = zero ? 0 : (uint8_t)mt_encode(codec, (float)(at % 3 ? code : -code));
            }
    }
    CUDA_OK(cudaMemcpy(d->codes, codes, bytes, cudaMemcpyDefault));
    CUDA_OK(cudaMemcpy(d->scales, scales, scale_bytes, cudaMemcpyDefault));
    free(codes), free(scales);
}

/* Compact codes of columns, by steps of 128 rows. */
static uint8_t *padded_codes(mt_direction *d, const mt_qtensor *q, const struct rows *rows)
{
    const int64_t lines = q->group.k;
    const size_t compact = mt_direction_code_bytes(d, MT_COL, &q->group);
    d->layout = MT_LAYOUT_PADDED;
    const size_t bytes = mt_direction_code_bytes(d, MT_COL, &q->group);
    uint8_t *from = malloc(compact + 1), *to = calloc(bytes + 1, 1);
    assert_true(from && to);
    if (compact > 0) CUDA_OK(cudaMemcpy(from, d->codes, compact, cudaMemcpyDefault));
    int64_t steps = 0; /* before the member */
    for (int64_t e = 0; e < rows->members; steps += (rows->counts[e++] + 127) / 128)
        for (int64_t n = 0; n < lines; n++)
            for (int64_t r = 0; r < rows->counts[e]; r++)
                to[((steps + r / 128) * lines + n) * 128 + r % 128] =
                    from[rows->start[e] * lines + n * rows->counts[e] + r];
    d->codes = upload(to, bytes);
    free(from), free(to);
    return d->codes;
}
