/* What every test program includes: cmocka, and the numeric layer. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the four above */
#include <cmocka.h>
#undef test_free /* cmocka's own; below it is ours */

#include "kernels/ops.h"

/* Asserts MT_OK, printing the error's sentence and trace otherwise. */
#define assert_ok(x)                                                                               \
    do {                                                                                           \
        mt_status assert_ok_ = (x);                                                                \
        if (assert_ok_ != MT_OK)                                                                   \
            fail_msg("%s: %s [%s]", mt_status_name(assert_ok_), mt_error_message(),                \
                     mt_error_trace());                                                            \
    } while (0)

/* Asserts a status, and that the error's sentence holds `words`. */
#define assert_fails(x, code, words) test_assert_fails((x), (code), (words), __FILE__, __LINE__)
void test_assert_fails(mt_status got, mt_status want, const char *words, const char *file,
                       int line);

/* The device under test: MIXTAPE_TEST_DEVICE (cpu unless set; "cuda" needs a GPU), with the kernel
 * set of MIXTAPE_KERNELS and threads of MIXTAPE_THREADS if set. */
mt_device *test_device(void);
const char *test_device_name(void);
/* Whether large cases are left to a build without sanitizers, or to a GPU: here they take minutes.
 */
bool test_small(void);

/* mt_device_open, with memory that the host sees too on cuda: tests look at what a device holds. */
mt_status test_open(mt_device **device, const char *name, const char *kernel_set, int threads);

/* Opens kernel set i of [0, TEST_SETS): those of the cpu, and those of cuda if it is under test. Up
 * to TEST_GEMM_SETS are those that differ from one before them in nothing but their GEMM.
 * False: this machine or build does not run it. *name is what messages call it. */
enum { TEST_SETS = 7, TEST_GEMM_SETS = 10 };
bool test_open_set(mt_device **device, const char **name, int i, int threads);

/* Whether the cpu's kernels of this dtype multiply pairs of bf16, which flushes subnormals. */
bool test_multiplies_pairs(const mt_device *device, mt_dtype dtype);

/* Device memory holding `count` elements of dtype; test_free releases. Poisoned with NaN bytes,
 * with canaries on both sides that test_free checks. */
void *test_alloc(int64_t count, mt_dtype dtype);
/* Whether the device under test sees all of it: a GPU what was pinned before main (pinned.c). */
bool test_is_seen(const void *p, size_t bytes);
void test_free(void *p);

/* Uniform in [-scale, scale) from (seed, index): stored rounded to dtype. */
void test_random(void *p, int64_t count, mt_dtype dtype, double scale, uint64_t seed);

/* Asserts |got[i] - want[i]| <= absolute + relative * |want[i]| for all i; NaN never passes unless
 * both are. Prints the worst index, both values and the limit. */
void test_assert_near(const char *what, const void *got, mt_dtype dtype, const double *want,
                      int64_t count, double absolute, double relative);

/* Half a unit in the last place, relative: 2^-53, 2^-24, 2^-8, 2^-11 for f64, f32, bf16, f16. */
double test_epsilon(mt_dtype dtype);
