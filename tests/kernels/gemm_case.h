/* Products of the grouped GEMM and what their results must be: what its tests share. */
#pragma once

#include "tests/support/test.h"

#include <math.h>
#include <stdlib.h>

#include "core/rng.h"

enum { MOST_MEMBERS = 8, TAIL = 3 };

struct shape {
    int64_t members, n, k;
    bool ragged; /* else every member has rows[0] */
    int64_t rows[MOST_MEMBERS];
};

/* How the operands and the result of one call are given. Wide means real (f32, or f64 for f64). */
struct form {
    bool packed, wide_w, wide_x, wide_d;
    enum { NO_C, SAME_C, OTHER_C } c;
    bool bias;
    bool (*has)(mt_gemm_layout layout);
};

static inline bool any(mt_gemm_layout layout)
{
    (void)layout;
    return true;
}

static inline bool weighted(mt_gemm_layout layout)
{
    return layout != MT_GEMM_NT;
}

static inline bool fprop(mt_gemm_layout layout)
{
    return layout == MT_GEMM_TN;
}

static inline bool wgrad(mt_gemm_layout layout)
{
    return layout == MT_GEMM_NT;
}

static const struct form forms[] = {
    { false, false, false, false, NO_C, false, any },
    { false, false, false, true, NO_C, false, any },
    { false, false, false, true, SAME_C, false, any },
    { false, false, false, true, OTHER_C, false, any },
    { true, false, false, false, NO_C, false, weighted },
    { true, false, false, true, NO_C, false, weighted },
    { true, false, false, false, SAME_C, false, weighted },
    { true, false, false, false, OTHER_C, true, fprop },
    { true, false, false, true, SAME_C, true, fprop },
    { false, false, false, false, NO_C, true, fprop },
    { false, true, false, true, NO_C, false, weighted }, /* the router */
    { false, true, false, false, OTHER_C, true, fprop },
    { true, false, true, true, NO_C, false, weighted },
    { false, false, true, false, OTHER_C, false, any },
    { false, true, true, true, SAME_C, false, any },
    { false, true, false, true, OTHER_C, false, wgrad },
    { false, false, false, false, SAME_C, false, wgrad },
};
enum { FORMS = sizeof forms / sizeof forms[0] };

/* A shape with its operands, as elements and as the same values wide; sums of the products in long
 * double. */
struct problem {
    struct shape s;
    mt_dtype dtype, real;
    int64_t rows, weights;
    int64_t first_dims[MOST_MEMBERS], start[MOST_MEMBERS + 1];
    int64_t offsets_n[MOST_MEMBERS + 1], offsets_k[MOST_MEMBERS + 1];
    void *x[2], *dy[2], *w[2], *packed[2], *bias; /* x, dy, w: as elements, wide */
    double *sum[MT_GEMM_LAYOUT_COUNT], *size[MT_GEMM_LAYOUT_COUNT];
};

/* Values with exact zeros of both signs; `special` adds NaN, Inf and large values here and there.
 */
static inline void *operand(void **wide, int64_t count, int64_t tail, const struct problem *p,
                            bool special, uint64_t seed)
{
    static const double specials[] = { (double)NAN, (double)INFINITY, -(double)INFINITY, 1e30 };
    void *e = test_alloc(count + tail, p->dtype);
    *wide = test_alloc(count + tail, p->real);
    test_random(e, count, p->dtype, 1, seed);
    for (int64_t i = 0; i < count; i++) {
        double u = mt_rng_uniform(seed, 8, (uint64_t)i);
        if (u < 0.1) mt_store_f64(e, p->dtype, i, u < 0.05 ? 0.0 : -0.0);
        if (special && u > 1 - 2.0 / (double)(count + 1))
            mt_store_f64(e, p->dtype, i, specials[i % 4]);
        mt_store_f64(*wide, p->real, i, mt_load_f64(e, p->dtype, i));
    }
    return e;
}

static inline mt_group rows_group(const struct problem *p, int64_t width, const int64_t *offsets)
{
    return p->s.ragged
               ? mt_group_ragged_rows(p->s.members, p->rows + TAIL, width, p->first_dims, offsets)
               : mt_group_uniform(p->s.members, p->s.rows[0], width);
}

static inline int64_t result_count(const struct problem *p, mt_gemm_layout layout)
{
    return layout == MT_GEMM_NT ? p->weights : p->rows * (layout == MT_GEMM_TN ? p->s.n : p->s.k);
}

/* The sum and the sum of absolute products of every element of a layout's result. */
static inline void reference(struct problem *p, mt_gemm_layout layout)
{
    const double *x = p->x[1], *dy = p->dy[1], *w = p->w[1]; /* converted below when f32 */
    int64_t n = p->s.n, k = p->s.k, count = result_count(p, layout);
    double *wide[3] = { NULL, NULL, NULL };
    const void *from[3] = { p->x[1], p->dy[1], p->w[1] };
    int64_t counts[3] = { p->rows * k, p->rows * n, p->weights };
    for (int o = 0; o < 3; o++) {
        wide[o] = test_alloc(counts[o], MT_F64);
        for (int64_t i = 0; i < counts[o]; i++) wide[o][i] = mt_load_f64(from[o], p->real, i);
    }
    x = wide[0], dy = wide[1], w = wide[2];
    p->sum[layout] = test_alloc(count, MT_F64);
    p->size[layout] = test_alloc(count, MT_F64);
    for (int64_t e = 0; e < p->s.members; e++) {
        int64_t r0 = p->start[e], rows = p->start[e + 1] - r0;
        int64_t height = layout == MT_GEMM_NT ? n : rows, cols = layout == MT_GEMM_TN ? n : k;
        int64_t depth = layout == MT_GEMM_TN ? k : layout == MT_GEMM_NN ? n : rows;
        const double *a = layout == MT_GEMM_TN ? x + r0 * k : dy + r0 * n;
        const double *b = layout == MT_GEMM_NT ? x + r0 * k : w + e * n * k;
        int64_t ai = layout == MT_GEMM_TN ? k : layout == MT_GEMM_NN ? n : 1;
        int64_t ap = layout == MT_GEMM_NT ? n : 1;
        int64_t bj = layout == MT_GEMM_TN ? k : 1, bp = layout == MT_GEMM_TN ? 1 : k;
        int64_t at = layout == MT_GEMM_NT ? e * n * k : r0 * cols;
        for (int64_t i = 0; i < height; i++)
            for (int64_t j = 0; j < cols; j++, at++) {
                long double sum = 0, size = 0;
                for (int64_t q = 0; q < depth; q++) {
                    long double product =
                        (long double)a[i * ai + q * ap] * (long double)b[j * bj + q * bp];
                    sum += product, size += fabsl(product);
                }
                p->sum[layout][at] = (double)sum, p->size[layout][at] = (double)size;
            }
    }
    for (int o = 0; o < 3; o++) test_free(wide[o]);
}

static inline struct problem *make(mt_device *device, const struct shape *s, mt_dtype dtype,
                                   bool special)
{
    struct problem *p = calloc(1, sizeof *p);
    assert_non_null(p);
    *p = (struct problem){ .s = *s, .dtype = dtype, .real = mt_dtype_wide(dtype) };
    for (int64_t e = 0; e < s->members; e++) {
        p->first_dims[e] = s->ragged ? s->rows[e] : s->rows[0];
        p->start[e + 1] = p->start[e] + p->first_dims[e];
        p->offsets_n[e + 1] = p->start[e + 1] * s->n;
        p->offsets_k[e + 1] = p->start[e + 1] * s->k;
    }
    p->rows = p->start[s->members];
    p->weights = s->members * s->n * s->k;
    int64_t tail = s->ragged ? TAIL : 0;
    p->x[0] = operand(&p->x[1], p->rows * s->k, tail * s->k, p, special, 1);
    p->dy[0] = operand(&p->dy[1], p->rows * s->n, tail * s->n, p, special, 2);
    p->w[0] = operand(&p->w[1], p->weights, 0, p, special, 3);
    p->bias = test_alloc(s->members * s->n, p->real);
    test_random(p->bias, s->members * s->n, p->real, 1, 4);
    mt_qtensor out = mt_qtensor_plain(mt_group_uniform(s->members, s->n, s->k), dtype, NULL);
    for (int d = 0; d < MT_DIR_COUNT; d++) {
        size_t bytes =
            device->kernels[dtype]->packed_bytes(dtype, (mt_dir)d, s->members, s->n, s->k);
        p->packed[d] = test_alloc((int64_t)bytes, MT_U8);
        out.dir[d].codes = p->packed[d];
        out.dir[d].layout = MT_LAYOUT_PACKED;
    }
    mt_stream stream = { device, NULL };
    assert_ok(mt_pack_weight(
        &stream, &(struct mt_pack_weight_args){ .dtype = dtype, .master = p->w[1], .out = &out }));
    for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++)
        reference(p, (mt_gemm_layout)layout);
    return p;
}

static inline void unmake(struct problem *p)
{
    void *all[] = { p->x[0],   p->x[1],      p->dy[0],     p->dy[1],   p->w[0],
                    p->w[1],   p->packed[0], p->packed[1], p->bias,    p->sum[0],
                    p->sum[1], p->sum[2],    p->size[0],   p->size[1], p->size[2] };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) test_free(all[i]);
    free(p);
}

/* Element i of C, which every type of a result of dtype holds. */
static inline double c_at(const struct problem *p, int64_t i, int64_t count)
{
    double x = 0.5 - (double)i / (double)count;
    if (p->dtype == MT_F64) return x;
    if (p->dtype == MT_F32) return (double)(float)x;
    return (double)mt_bf16_to_f32(mt_f32_to_bf16((float)x));
}

/* How a product is made; false: not so. */
typedef bool (*gemm_way)(mt_stream *stream, const struct mt_gemm_args *args, const void *path);

/* The result of one call, tail included, in new memory; NULL: it cannot be had that way. */
static inline void *run_by(mt_device *device, struct problem *p, mt_gemm_layout layout,
                           const struct form *f, gemm_way way, const void *path)
{
    int64_t n = p->s.n, k = p->s.k, count = result_count(p, layout);
    int64_t tail = p->s.ragged && layout != MT_GEMM_NT ? TAIL * (layout == MT_GEMM_TN ? n : k) : 0;
    mt_dtype d_dtype = f->wide_d ? p->real : p->dtype;
    mt_qtensor x = mt_qtensor_plain(rows_group(p, k, p->offsets_k), f->wide_x ? p->real : p->dtype,
                                    p->x[f->wide_x]);
    mt_qtensor dy = mt_qtensor_plain(rows_group(p, n, p->offsets_n), f->wide_x ? p->real : p->dtype,
                                     p->dy[f->wide_x]);
    mt_qtensor w = mt_qtensor_plain(mt_group_uniform(p->s.members, n, k),
                                    f->wide_w ? p->real : p->dtype, p->w[f->wide_w]);
    if (layout == MT_GEMM_NT && f->wide_w) /* NT has no weight: x is the operand that is wide */
        x = mt_qtensor_plain(rows_group(p, k, p->offsets_k), p->real, p->x[1]);
    for (int d = 0; f->packed && d < MT_DIR_COUNT; d++)
        w.dir[d].codes = p->packed[d], w.dir[d].layout = MT_LAYOUT_PACKED;
    void *d = test_alloc(count + tail, d_dtype), *c = NULL;
    if (f->c) {
        c = f->c == SAME_C ? d : test_alloc(count + tail, d_dtype);
        for (int64_t i = 0; i < count; i++) mt_store_f64(c, d_dtype, i, c_at(p, i, count));
    }
    mt_stream stream = { device, NULL };
    const struct mt_gemm_args args = {
        .dtype = p->dtype,
        .layout = layout,
        .a = layout == MT_GEMM_NT ? &x : &w,
        .b = layout == MT_GEMM_TN ? &x : &dy,
        .d = d,
        .d_dtype = d_dtype,
        .c = c,
        .bias = f->bias ? p->bias : NULL,
    };
    const bool made = way(&stream, &args, path);
    for (int64_t i = 0; i < tail * (int64_t)mt_dtype_size(d_dtype); i++)
        if (((unsigned char *)d)[count * (int64_t)mt_dtype_size(d_dtype) + i] != 0xff)
            fail_msg("the capacity tail was written at byte %lld", (long long)i);
    if (f->c == OTHER_C) test_free(c);
    if (!made) test_free(d);
    return made ? d : NULL;
}

static inline bool by_gemm(mt_stream *stream, const struct mt_gemm_args *args, const void *path)
{
    (void)path;
    assert_ok(mt_gemm(stream, args));
    return true;
}

static inline void *run(mt_device *device, struct problem *p, mt_gemm_layout layout,
                        const struct form *f)
{
    return run_by(device, p, layout, f, by_gemm, NULL);
}

/* Bound of NUMERICS section 5 with K + 1 roundings, C and bias among the terms, and one output
 * rounding. */
static inline void verify(mt_device *device, const struct problem *p, mt_gemm_layout layout,
                          const struct form *f, const void *d)
{
    mt_dtype d_dtype = f->wide_d ? p->real : p->dtype;
    int64_t count = result_count(p, layout), n = p->s.n;
    bool flushes = test_multiplies_pairs(device, p->dtype);
    for (int64_t e = 0, at = 0; e < p->s.members; e++) {
        int64_t rows = p->start[e + 1] - p->start[e];
        int64_t depth = layout == MT_GEMM_TN ? p->s.k : layout == MT_GEMM_NN ? n : rows;
        int64_t end =
            at + (layout == MT_GEMM_NT ? n * p->s.k : rows * (layout == MT_GEMM_TN ? n : p->s.k));
        for (; at < end; at++) {
            double c = f->c ? c_at(p, at, count) : 0;
            double bias = f->bias ? mt_load_f64(p->bias, p->real, e * n + at % n) : 0;
            double want = p->sum[layout][at] + c + bias, got = mt_load_f64(d, d_dtype, at);
            double limit = (double)(depth + 1) * test_epsilon(p->real) *
                           (p->size[layout][at] + fabs(c) + fabs(bias));
            if (flushes) limit += (double)depth * 0x1p-126;
            if (d_dtype == MT_BF16) limit += test_epsilon(MT_BF16) * (fabs(want) + limit);
            if (got == want || (isnan(got) && isnan(want)) || fabs(got - want) <= limit) continue;
            fail_msg("%s %s layout %d, n %lld, k %lld, form %d, element %lld of member %lld: "
                     "%.17g, must be "
                     "%.17g within %.3g",
                     device->kernel_set, mt_dtype_name(p->dtype), (int)layout, (long long)n,
                     (long long)p->s.k, (int)(f - forms), (long long)at, (long long)e, got, want,
                     limit);
        }
    }
}
