/* Products at the ends: scales far from each other, subnormals, no rows, no members. */
#include <math.h>
#include <string.h>

#include "tests/kernels/quantize_case.h"

/* A member's scales at both ends of f32, one in each operand, meet in the middle. */
static void check_far_scales(mt_device *device, const char *format_a, const char *format_b, int far)
{
    enum { OUT = 5, DEEP = 96, HIGH = 7 };
    struct quantize_case c[2];
    struct quantize_result r[2];
    const char *formats[2] = { format_a, format_b };
    float *values[2], *d = test_alloc(HIGH * OUT, MT_F32);
    mt_stream stream = { device, NULL };
    for (int i = 0; i < 2; i++) {
        case_make(&c[i], MT_GROUP_UNIFORM, 1, &(int64_t){ i ? HIGH : OUT }, &(int64_t){ DEEP }, 0);
        float *x = test_alloc(c[i].total, MT_F32);
        for (int64_t k = 0; k < c[i].total; k++)
            x[k] = ldexpf(1 + (float)(k % 7) / 8, i ? -far : far);
        result_make(&r[i], &c[i], formats[i], NULL, false);
        assert_ok(case_quantize(device, &c[i], x, MT_F32, &r[i], 1));
        values[i] = case_values(device, &r[i].q, MT_ROW, MT_F32);
        test_free(x);
    }
    assert_ok(mt_gemm(&stream, &(struct mt_gemm_args){ .dtype = MT_BF16,
                                                       .layout = MT_GEMM_TN,
                                                       .a = &r[0].q,
                                                       .b = &r[1].q,
                                                       .d = d,
                                                       .d_dtype = MT_F32 }));
    assert_ok(mt_device_synchronize(device));
    int roundings = mt_gemm_scale_roundings(r[0].q.dir[MT_ROW].format, r[1].q.dir[MT_ROW].format);
    for (int i = 0; i < HIGH * OUT; i++) {
        double want = 0; /* all are positive: of the sum's size too */
        for (int k = 0; k < DEEP; k++)
            want += (double)values[0][i % OUT * DEEP + k] * (double)values[1][i / OUT * DEEP + k];
        double limit = (DEEP + 1 + roundings) * 0x1p-24 * want;
        if (!(fabs((double)d[i] - want) <= limit))
            fail_msg("%s, %s by %s, 2^%d: %g, not %g", device->kernel_set, format_a, format_b, far,
                     (double)d[i], want);
    }
    for (int i = 0; i < 2; i++) result_free(&r[i]), test_free(values[i]);
    test_free(d);
}

static void check_formats(mt_device *device)
{
    static const char *const formats[] = { "fp8_tensor", "nvfp4" };
    for (int f = 0; f < 4; f++)
        for (int far = -112; far <= 112; far += 224)
            check_far_scales(device, formats[f / 2], formats[f % 2], far);
}

static void far_scales(void **state)
{
    (void)state;
    for_each_kernel_set(check_formats);
}

/* Gradients of a dense weight of few elements from many rows, which may be summed in parts. */
static void check_dense(mt_device *device, const char *format)
{
    enum { ROWS = 1024, HIGH = 24, WIDE = 72 };
    struct quantize_case c[2];
    struct quantize_result r[2];
    float *values[2], *d = test_alloc(HIGH * WIDE, MT_F32);
    mt_stream stream = { device, NULL };
    for (int i = 0; i < 2; i++) {
        const int64_t wide = i ? HIGH : WIDE;
        case_make(&c[i], MT_GROUP_UNIFORM, 1, &(int64_t){ ROWS }, &wide, 0);
        float *x = test_alloc(c[i].total, MT_F32);
        test_random(x, c[i].total, MT_F32, 3, (uint64_t)i + 1);
        result_make(&r[i], &c[i], NULL, format, false);
        assert_ok(case_quantize(device, &c[i], x, MT_F32, &r[i], 1));
        values[i] = case_values(device, &r[i].q, MT_COL, MT_F32);
        test_free(x);
    }
    for (int i = 0; i < HIGH * WIDE; i++) d[i] = (float)i;
    assert_ok(mt_gemm(&stream, &(struct mt_gemm_args){ .dtype = MT_BF16,
                                                       .layout = MT_GEMM_NT,
                                                       .a = &r[0].q,
                                                       .b = &r[1].q,
                                                       .c = d,
                                                       .d = d,
                                                       .d_dtype = MT_F32 }));
    assert_ok(mt_device_synchronize(device));
    int roundings = mt_gemm_scale_roundings(r[0].q.dir[MT_COL].format, r[1].q.dir[MT_COL].format);
    for (int i = 0; i < HIGH * WIDE; i++) {
        double want = i, size = i;
        for (int k = 0; k < ROWS; k++) {
            const double x = (double)values[0][k * WIDE + i % WIDE],
                         dy = (double)values[1][k * HIGH + i / WIDE];
            want += x * dy, size += fabs(x * dy);
        }
        if (!(fabs((double)d[i] - want) <= (ROWS + 2 + roundings) * 0x1p-24 * size))
            fail_msg("%s, %s: %g, not %g", device->kernel_set, format, (double)d[i], want);
    }
    for (int i = 0; i < 2; i++) result_free(&r[i]), test_free(values[i]);
    test_free(d);
}

static void check_dense_formats(mt_device *device)
{
    static const char *const formats[] = { "fp8_tensor", "fp8_block", "mxfp8", "nvfp4" };
    for (int f = 0; f < 4; f++) check_dense(device, formats[f]);
}

static void dense_gradients(void **state)
{
    (void)state;
    for_each_kernel_set(check_dense_formats);
}

/* Subnormals of one operand by large numbers of the other: exact, but where pairs of bf16 are
 * multiplied, which takes them for zeros. */
static void check_subnormals(mt_device *device)
{
    enum { OUT = 5, DEEP = 64, HIGH = 7 };
    const double small = 0x1p-128, large = 0x1p120, exact = DEEP * small * large;
    const bool flushes = test_multiplies_pairs(device, MT_BF16);
    const double limit = flushes ? DEEP * (0x1p-126 * large + 0x1p-126) : 0;
    mt_stream stream = { device, NULL };
    for (int turn = 0; turn < 2; turn++) {
        void *w = test_alloc(OUT * DEEP, MT_BF16), *x = test_alloc(HIGH * DEEP, MT_BF16);
        float *d = test_alloc(HIGH * OUT, MT_F32);
        for (int i = 0; i < OUT * DEEP; i++) mt_store_f64(w, MT_BF16, i, turn ? large : small);
        for (int i = 0; i < HIGH * DEEP; i++) mt_store_f64(x, MT_BF16, i, turn ? small : large);
        mt_qtensor a = mt_qtensor_plain(mt_group_uniform(1, OUT, DEEP), MT_BF16, w);
        mt_qtensor b = mt_qtensor_plain(mt_group_uniform(1, HIGH, DEEP), MT_BF16, x);
        assert_ok(mt_gemm(&stream, &(struct mt_gemm_args){ .dtype = MT_BF16,
                                                           .layout = MT_GEMM_TN,
                                                           .a = &a,
                                                           .b = &b,
                                                           .d = d,
                                                           .d_dtype = MT_F32 }));
        assert_ok(mt_device_synchronize(device));
        for (int i = 0; i < HIGH * OUT; i++)
            if (!(fabs((double)d[i] - exact) <= limit))
                fail_msg("%s: %g, not %g within %g", device->kernel_set, (double)d[i], exact,
                         limit);
        test_free(w), test_free(x), test_free(d);
    }
}

static void subnormals(void **state)
{
    (void)state;
    for_each_kernel_set(check_subnormals);
}

/* Gradients from codes of no rows at all, of which there is no memory, are zeros. */
static void check_no_rows(mt_device *device)
{
    enum { MEMBERS = 2, WIDE = 48, COUNT = MEMBERS * WIDE * WIDE };
    struct quantize_case c;
    struct quantize_result r;
    uint16_t *d = test_alloc(COUNT, MT_BF16);
    case_make(&c, MT_GROUP_UNIFORM, MEMBERS, &(int64_t){ 0 }, &(int64_t){ WIDE }, 0);
    result_make(&r, &c, NULL, "mxfp8", false);
    memset(d, 0xaa, COUNT * sizeof *d);
    assert_ok(mt_gemm(&(mt_stream){ device, NULL }, &(struct mt_gemm_args){ .dtype = MT_BF16,
                                                                            .layout = MT_GEMM_NT,
                                                                            .a = &r.q,
                                                                            .b = &r.q,
                                                                            .d = d,
                                                                            .d_dtype = MT_BF16 }));
    assert_ok(mt_device_synchronize(device));
    for (int k = 0; k < COUNT; k++) assert_int_equal(d[k], 0);
    result_free(&r);
    test_free(d);
}

/* Nor are there results of them. */
static void check_no_results(mt_device *device)
{
    enum { MEMBERS = 2, WIDE = 1024, N = 2048 };
    struct quantize_case rows, weights;
    struct quantize_result x, w;
    case_make(&rows, MT_GROUP_UNIFORM, MEMBERS, &(int64_t){ 0 }, &(int64_t){ WIDE }, 0);
    case_make(&weights, MT_GROUP_UNIFORM, MEMBERS, &(int64_t){ N }, &(int64_t){ WIDE }, 0);
    result_make(&x, &rows, "fp8_block", NULL, false);
    result_make(&w, &weights, "fp8_block:2d", NULL, false);
    assert_ok(mt_gemm(&(mt_stream){ device, NULL }, &(struct mt_gemm_args){ .dtype = MT_BF16,
                                                                            .layout = MT_GEMM_TN,
                                                                            .a = &w.q,
                                                                            .b = &x.q,
                                                                            .d = x.q.dir[0].codes,
                                                                            .d_dtype = MT_BF16 }));
    assert_ok(mt_device_synchronize(device));
    result_free(&x), result_free(&w);
}

static void codes_of_no_rows(void **state)
{
    (void)state;
    for_each_kernel_set(check_no_rows);
    for_each_kernel_set(check_no_results);
}

/* Codes of no members: there are no factors either. */
static void check_no_members(mt_device *device)
{
    struct quantize_case c;
    struct quantize_result r;
    case_make(&c, MT_GROUP_UNIFORM, 0, NULL, NULL, 0);
    result_make(&r, &c, "nvfp4", "nvfp4", false);
    for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++)
        assert_ok(mt_gemm(&(mt_stream){ device, NULL },
                          &(struct mt_gemm_args){ .dtype = MT_BF16,
                                                  .layout = (mt_gemm_layout)layout,
                                                  .a = &r.q,
                                                  .b = &r.q,
                                                  .d_dtype = MT_BF16 }));
    result_free(&r);
}

static void codes_of_no_members(void **state)
{
    (void)state;
    for_each_kernel_set(check_no_members);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(far_scales),          cmocka_unit_test(dense_gradients),
        cmocka_unit_test(subnormals),          cmocka_unit_test(codes_of_no_rows),
        cmocka_unit_test(codes_of_no_members),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
