/* What the tests of the dense kernels share. */
#pragma once

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "tests/support/test.h"

enum { DTYPES = 3 };
static const mt_dtype dtypes[DTYPES] = { MT_F64, MT_F32, MT_BF16 };

static inline mt_stream *stream(void)
{
    static mt_stream s;
    s.device = test_device();
    return &s;
}

/* Device memory with random contents, and a copy of any device memory as f64; free both. */
static inline void *random_buffer(int64_t count, mt_dtype dtype, double scale, uint64_t seed)
{
    void *p = test_alloc(count, dtype);
    test_random(p, count, dtype, scale, seed);
    return p;
}

static inline double *as_f64(const void *p, mt_dtype dtype, int64_t count)
{
    double *x = malloc((size_t)(count ? count : 1) * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < count; i++) x[i] = mt_load_f64(p, dtype, i);
    return x;
}

static inline double *zeros(int64_t count)
{
    double *x = calloc((size_t)(count ? count : 1), sizeof *x);
    assert_non_null(x);
    return x;
}

/* Asserts |got - want| <= bound + the rounding to dtype, each element with its own bound; NaN
 * passes only where both are. */
static inline void assert_within(const char *what, const void *got, mt_dtype dtype,
                                 const double *want, const double *bound, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        double g = mt_load_f64(got, dtype, i);
        double limit = bound[i] + test_epsilon(dtype) * (fabs(want[i]) + bound[i]) +
                       (dtype == MT_F64   ? 0x1p-1074
                        : dtype == MT_F32 ? 0x1p-149
                                          : 0x1p-133);
        if (g == want[i] || (isnan(g) && isnan(want[i])) || fabs(g - want[i]) <= limit) continue;
        fail_msg("%s[%lld] (%s) is %.17g, must be %.17g within %.3g", what, (long long)i,
                 mt_dtype_name(dtype), g, want[i], limit);
    }
}

/* Asserts that memory still holds the poison of test_alloc from element `from` on. */
static inline void assert_poison(const void *p, mt_dtype dtype, int64_t from, int64_t to)
{
    const unsigned char *bytes = p;
    for (size_t i = (size_t)from * mt_dtype_size(dtype); i < (size_t)to * mt_dtype_size(dtype); i++)
        if (bytes[i] != 0xff) fail_msg("byte %zu past the rows in use was written", i);
}

static inline void assert_same_bits(const char *what, const void *a, const void *b, int64_t count,
                                    mt_dtype dtype)
{
    if (count && memcmp(a, b, (size_t)count * mt_dtype_size(dtype)) != 0)
        fail_msg("%s differs in its bits", what);
}

/* Asserts that `run` leaves the same bits in `out` with 1, 2 and 3 threads. */
static inline void assert_thread_independent(const char *what, void (*run)(void *), void *context,
                                             const void *out, int64_t count, mt_dtype dtype)
{
    size_t bytes = (size_t)count * mt_dtype_size(dtype);
    void *first = malloc(bytes ? bytes : 1);
    int before = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        run(context);
        if (threads == 1)
            memcpy(first, out, bytes);
        else
            assert_same_bits(what, out, first, count, dtype);
    }
    omp_set_num_threads(before);
    free(first);
}

/* Asserts that `grad` [count] holds the derivatives of `loss` by x, all f64, against central
 * differences. The limit: h^2 for the third derivative, and `terms` roundings of numbers as large
 * as `size` over h; x and the derivatives of the functions tested are of order 1. */
static inline void assert_gradient(const char *what, double (*loss)(void *), void *context,
                                   double *x, const double *grad, int64_t count, double size,
                                   double terms)
{
    const double h = 0x1p-17, limit = (h * h + terms * 0x1p-53 / h) * (1 + size);
    for (int64_t i = 0; i < count; i++) {
        double at = x[i];
        x[i] = at + h;
        double above = loss(context);
        x[i] = at - h;
        double below = loss(context), slope = (above - below) / (2 * h);
        x[i] = at;
        if (!(fabs(slope - grad[i]) <= limit))
            fail_msg("%s[%lld] is %.12g, central difference %.12g, limit %.3g", what, (long long)i,
                     grad[i], slope, limit);
    }
}

/* sum of weights * y, the scalar that gradients are taken of; size collects sum of |weights * y|.
 */
static inline double weighted(const double *weights, const double *y, int64_t count, double *size)
{
    double sum = 0, all = 0;
    for (int64_t i = 0; i < count; i++) sum += weights[i] * y[i], all += fabs(weights[i] * y[i]);
    if (size) *size = all;
    return sum;
}

/* a * b in real. */
static inline double times(double a, double b, mt_dtype real)
{
    return real == MT_F32 ? (double)((float)a * (float)b) : a * b;
}

static inline double minus(double a, double b, mt_dtype real)
{
    return real == MT_F32 ? (double)((float)a - (float)b) : a - b;
}

static inline double rounded(double x, mt_dtype dtype)
{
    uint64_t stored;
    mt_store_f64(&stored, dtype, 0, x);
    return mt_load_f64(&stored, dtype, 0);
}

/* rstd of x[0..width) in f64; its relative error in real: a sum of `width` squares, halved by the
 * root, and four roundings. */
static inline double rstd_of(const double *x, int64_t width, double eps)
{
    double sum = 0;
    for (int64_t c = 0; c < width; c++) sum += x[c] * x[c];
    return 1 / sqrt(sum / (double)width + eps);
}

static inline double rstd_error(int64_t width, mt_dtype real)
{
    return (0.5 * (double)width + 5) * test_epsilon(real);
}
