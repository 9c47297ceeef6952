/* What the tests of routing and of the optimizer share: devices of 1, 2 and 3 threads, bounds per
 * element, arithmetic rounded to real. */
#pragma once

#include "tests/support/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_THREADS = 3 };

static mt_device *devices[MAX_THREADS];
static const mt_dtype dtypes[3] = { MT_F64, MT_F32, MT_BF16 };

static inline int open_devices(void **state)
{
    (void)state;
    for (int i = 0; i < MAX_THREADS; i++)
        if (test_open(&devices[i], test_device_name(), NULL, i + 1) != MT_OK) return 1;
    return 0;
}

static inline int close_devices(void **state)
{
    (void)state;
    for (int i = 0; i < MAX_THREADS; i++) mt_device_destroy(&devices[i]);
    return 0;
}

static inline mt_stream on_threads(int threads)
{
    return (mt_stream){ devices[threads - 1], NULL };
}

/* One rounding to real: relative. */
static inline double real_epsilon(mt_dtype dtype)
{
    return test_epsilon(mt_dtype_wide(dtype));
}

static inline void near_all(const char *what, const void *got, mt_dtype dtype, int64_t count,
                            const double *want, const double *limit)
{
    for (int64_t i = 0; i < count; i++) {
        double g = mt_load_f64(got, dtype, i);
        if (!(fabs(g - want[i]) <= limit[i]))
            fail_msg("%s[%lld] is %.17g, must be %.17g within %.3g", what, (long long)i, g, want[i],
                     limit[i]);
    }
}

static inline void same_bits(const char *what, const void *a, const void *b, size_t bytes)
{
    if (bytes && memcmp(a, b, bytes)) fail_msg("%s depends on the number of threads", what);
}

static inline double *doubles(int64_t n)
{
    double *p = calloc((size_t)n + 1, sizeof *p);
    assert_non_null(p);
    return p;
}

/* a + b, a / b, a b, each rounded to real. */
static inline double real_add(mt_dtype real, double a, double b)
{
    return real == MT_F64 ? a + b : (double)((float)a + (float)b);
}
static inline double real_divide(mt_dtype real, double a, double b)
{
    return real == MT_F64 ? a / b : (double)((float)a / (float)b);
}
static inline double real_multiply(mt_dtype real, double a, double b)
{
    return real == MT_F64 ? a * b : (double)((float)a * (float)b);
}
