/* The contracts of kernels/quantize.h beside the arithmetic: passes, bias gradient, NaN counts,
 * scale layouts, output types, delayed scales, hybrid results, what is refused. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/backend.h"
#include "tests/kernels/quantize_case.h"

static mt_stream the_stream(void)
{
    return (mt_stream){ test_device(), NULL };
}

/* ---- what comes with the codes ---- */

/* Column sums in rows of 128, then these sums, in f32; NaNs per member; a tail that is neither read
 * nor written, under every kind of work. */
static void test_bias_and_nan(void **state)
{
    (void)state;
    enum { N = 4, K = 70 };
    static const int64_t rows[N] = { 5, 0, 300, 129 };
    struct quantize_case c;
    case_make(&c, MT_GROUP_VARYING_FIRST, N, rows, &(int64_t){ K }, 9);
    mt_stream stream = the_stream();
    for (int special = 0; special < 2; special++)
        for (int both = 0; both < 2; both++) {
            struct quantize_result r;
            float *x = case_source(&c, MT_F32, 8, special), *db = test_alloc(N * K, MT_F32);
            int64_t *nan = test_alloc(N, MT_I64), running[N] = { 1, 2, 3, 4 };
            result_make(&r, &c, "mxfp8", both ? "nvfp4" : NULL, false);
            mt_qtensor source = mt_qtensor_plain(c.group, MT_F32, x);
            for (int again = 0; again < 2; again++)
                assert_ok(
                    mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                                     .src = &source,
                                                                     .out = &r.q,
                                                                     .bias_grad = db,
                                                                     .accumulate = again,
                                                                     .nan = nan,
                                                                     .running_nan = running }));
            for (int pass = MT_QUANTIZE_AMAX; pass <= MT_QUANTIZE_CODES;
                 pass++) /* once of the two */
                assert_ok(
                    mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                                     .pass = (mt_quantize_pass)pass,
                                                                     .src = &source,
                                                                     .out = &r.q,
                                                                     .running_nan = running }));
            for (int64_t i = 0; i < N; i++) {
                int64_t nans = 0;
                for (int64_t j = c.offsets[i]; j < c.offsets[i + 1]; j++) nans += isnan(x[j]);
                assert_int_equal(nan[i], nans);
                assert_int_equal(running[i], i + 1 + 3 * nans);
                for (int64_t k = 0; k < K; k++) {
                    float sum = 0;
                    for (int64_t r0 = 0; r0 < rows[i]; r0 += 128) {
                        float part = 0;
                        for (int64_t j = r0; j < rows[i] && j < r0 + 128; j++)
                            part += x[c.offsets[i] + j * K + k];
                        sum = r0 ? sum + part : part;
                    }
                    float want = sum + sum, got = db[i * K + k];
                    assert_true(got == want || (isnan(got) && isnan(want)));
                }
            }
            result_free(&r);
            test_free(x), test_free(db), test_free(nan);
        }
}

/* AMAX then CODES is ALL; CODES with other amaxes uses them. */
static void test_passes(void **state)
{
    (void)state;
    static const char *const specs[] = { "fp8_tensor", "nvfp4:rht+sr", "nvfp4:source=dequantized",
                                         "mxfp8" };
    struct quantize_case c;
    case_make(&c, MT_GROUP_VARYING_FIRST, 3, (int64_t[]){ 33, 0, 150 }, &(int64_t){ 40 }, 0);
    mt_stream stream = the_stream();
    void *x = case_source(&c, MT_BF16, 21, false);
    mt_qtensor source = mt_qtensor_plain(c.group, MT_BF16, x);
    for (size_t f = 0; f < sizeof specs / sizeof specs[0]; f++)
        for (int only_col = 0; only_col < 2; only_col++) {
            struct quantize_result all, two;
            const char *row = only_col ? NULL : specs[f];
            result_make(&all, &c, row, specs[f], false);
            assert_ok(case_quantize(test_device(), &c, x, MT_BF16, &all, 1));
            result_make(&two, &c, row, specs[f], false);
            for (int pass = MT_QUANTIZE_AMAX; pass <= MT_QUANTIZE_CODES; pass++)
                assert_ok(
                    mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_BF16,
                                                                     .pass = (mt_quantize_pass)pass,
                                                                     .src = &source,
                                                                     .out = &two.q,
                                                                     .seed = 1,
                                                                     .stream = 2,
                                                                     .step = 3 }));
            if (row) assert_same_direction(&all, &two, MT_ROW);
            assert_same_direction(&all, &two, MT_COL);
            result_free(&all), result_free(&two);
        }
    struct quantize_result r;
    result_make(&r, &c, "fp8_tensor:pow2", NULL, false);
    for (int i = 0; i < 3; i++) r.q.dir[MT_ROW].amax[i] = 448 * 4;
    assert_ok(mt_quantize(
        &stream, &(struct mt_quantize_args){
                     .dtype = MT_BF16, .pass = MT_QUANTIZE_CODES, .src = &source, .out = &r.q }));
    for (int i = 0; i < 3; i++) assert_true(((float *)r.q.dir[MT_ROW].scales)[i] == 4);
    result_free(&r);
    test_free(x);
}

/* Directions of different formats are what each is by itself; a plain direction may be the source's
 * own bytes, or the source cast. */
static void test_hybrid(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        { "mxfp8", "nvfp4:rht" }, { "fp8_tensor", "fp8_block" }, { "nvfp4:2d", "mxfp4:sr" },
        { "bf16", "mxfp8" },      { "mxfp6_e3m2", "f16" },       { "fp8_tensor", "fp8_tensor:rht" }
    };
    struct quantize_case c;
    case_make(&c, MT_GROUP_VARYING_BOTH, 3, (int64_t[]){ 33, 4, 140 }, (int64_t[]){ 20, 300, 64 },
              7);
    float *x = case_source(&c, MT_F32, 17, false);
    for (size_t f = 0; f < sizeof pairs / sizeof pairs[0]; f++) {
        struct quantize_result both, row, col;
        result_make(&both, &c, pairs[f][0], pairs[f][1], false);
        result_make(&row, &c, pairs[f][0], NULL, false);
        result_make(&col, &c, NULL, pairs[f][1], false);
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &both, 3));
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &row, 3));
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &col, 3));
        assert_same_direction(&both, &row, MT_ROW);
        assert_same_direction(&both, &col, MT_COL);
        result_free(&both), result_free(&row), result_free(&col);
    }
    struct quantize_result r;
    result_make(&r, &c, "mxfp8", NULL, false);
    r.q.dir[MT_COL] = mt_direction_of(mt_format_spec_default(MT_FORMAT_F32));
    r.q.dir[MT_COL].codes = x;
    uint32_t before = mt_f32_bits(x[5]);
    assert_ok(case_quantize(test_device(), &c, x, MT_F32, &r, 3));
    assert_int_equal(mt_f32_bits(x[5]), before);
    r.q.dir[MT_COL] = (mt_direction){ .format = NULL };
    result_free(&r);
    test_free(x);
}

/* ---- reading ---- */

/* bf16, f16 and f64 results are the f32 values rounded once. */
static void test_output_types(void **state)
{
    (void)state;
    static const mt_dtype types[] = { MT_BF16, MT_F16, MT_F64 };
    static const char *const specs[] = { "mxfp8", "nvfp4", "fp8_tensor:e5m2", "fp8_block:2d",
                                         "f32" };
    struct quantize_case c;
    case_make(&c, MT_GROUP_VARYING_LAST, 3, &(int64_t){ 33 }, (int64_t[]){ 20, 0, 140 }, 2);
    void *x = case_source(&c, MT_F32, 31, true);
    for (size_t f = 0; f < sizeof specs / sizeof specs[0]; f++) {
        struct quantize_result r;
        result_make(&r, &c, specs[f], specs[f], false);
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &r, 3));
        for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
            float *values = case_values(test_device(), &r.q, (mt_dir)dir, MT_F32);
            for (int t = 0; t < 3; t++) {
                void *y = case_values(test_device(), &r.q, (mt_dir)dir, types[t]);
                for (int64_t i = 0; i < c.total; i++) {
                    double want;
                    mt_store_f64(&want, types[t], 0, (double)values[i]);
                    size_t size = mt_dtype_size(types[t]);
                    if (!isnan(values[i]) || types[t] != MT_F64)
                        assert_memory_equal((char *)y + (size_t)i * size, &want, size);
                }
                test_free(y);
            }
            test_free(values);
        }
        result_free(&r);
    }
    test_free(x);
}

/* Quantizing into swizzled scales is quantizing and converting; back again is the same; both read
 * alike. */
static void test_swizzle(void **state)
{
    (void)state;
    static const char *const specs[] = { "mxfp8", "mxfp4:2d", "nvfp4", "nvfp4:2d" };
    struct quantize_case c;
    case_make(&c, MT_GROUP_VARYING_FIRST, 4, (int64_t[]){ 33, 0, 140, 513 }, &(int64_t){ 150 }, 0);
    mt_stream stream = the_stream();
    void *x = case_source(&c, MT_F32, 41, false);
    for (size_t f = 0; f < sizeof specs / sizeof specs[0]; f++) {
        struct quantize_result a, b;
        result_make(&a, &c, specs[f], specs[f], false);
        result_make(&b, &c, specs[f], specs[f], true);
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &a, 3));
        assert_ok(case_quantize(test_device(), &c, x, MT_F32, &b, 3));
        for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
            void *tiles = test_alloc((int64_t)b.scale_bytes[dir], MT_U8);
            void *lines = test_alloc((int64_t)a.scale_bytes[dir], MT_U8);
            assert_ok(mt_swizzle_scales(
                &stream, &(struct mt_swizzle_scales_args){
                             .dtype = MT_F32, .src = &a.q, .dir = (mt_dir)dir, .out = tiles }));
            assert_ok(mt_swizzle_scales(
                &stream, &(struct mt_swizzle_scales_args){
                             .dtype = MT_F32, .src = &b.q, .dir = (mt_dir)dir, .out = lines }));
            assert_memory_equal(tiles, b.q.dir[dir].scales, b.scale_bytes[dir]);
            assert_memory_equal(lines, a.q.dir[dir].scales, a.scale_bytes[dir]);
            void *va = case_values(test_device(), &a.q, (mt_dir)dir, MT_F32);
            void *vb = case_values(test_device(), &b.q, (mt_dir)dir, MT_F32);
            assert_memory_equal(va, vb, (size_t)c.total * sizeof(float));
            test_free(va), test_free(vb), test_free(tiles), test_free(lines);
        }
        result_free(&a), result_free(&b);
    }
    test_free(x);
}

/* ---- delayed scaling ---- */

static void test_delayed(void **state)
{
    (void)state;
    enum { N = 2, L = 4 };
    struct quantize_case c;
    struct quantize_result r;
    case_make(&c, MT_GROUP_UNIFORM, N, &(int64_t){ 20 }, &(int64_t){ 20 }, 0);
    mt_stream stream = the_stream();
    float *x = test_alloc(c.total, MT_F32), scale[N] = { 2, 0.5f }, history[L][N] = { { 0 } };
    test_random(x, c.total, MT_F32, 1, 5);
    x[7] = -3, x[400] = 100;
    result_make(&r, &c, "fp8_delayed", "fp8_delayed", false);
    mt_qtensor source = mt_qtensor_plain(c.group, MT_F32, x);
    history[0][1] = 200; /* of an earlier micro-batch */
    assert_ok(
        mt_quantize(&stream, &(struct mt_quantize_args){ .dtype = MT_F32,
                                                         .src = &source,
                                                         .out = &r.q,
                                                         .scale = { scale, scale },
                                                         .running_amax = { history[0], NULL } }));
    assert_true(history[0][0] == 3 && history[0][1] == 200);
    assert_true(r.q.dir[MT_ROW].amax[0] == 3 && r.q.dir[MT_ROW].amax[1] == 100);
    const float *stored = r.q.dir[MT_COL].scales;
    assert_true(stored[0] == 0.5f && stored[1] == 2);
    assert_int_equal(((uint8_t *)r.q.dir[MT_ROW].codes)[7], 0x80 | 0x4c); /* -6 = -1.5 2^2 */
    struct mt_delayed_update_args update = { .dtype = MT_F32,
                                             .members = N,
                                             .length = L,
                                             .margin = 1,
                                             .element = MT_ELEMENT_E4M3,
                                             .history = history[0],
                                             .scale = scale };
    history[2][0] = 5;
    assert_ok(mt_delayed_update(&stream, &update));
    static const float rolled[L][N] = { { 0, 0 }, { 5, 0 }, { 0, 0 }, { 3, 200 } };
    assert_memory_equal(history, rolled, sizeof rolled);
    assert_true(scale[0] == 224.0f / 5 && scale[1] == 224.0f / 200);
    assert_ok(mt_delayed_update(&stream, &update)); /* nothing seen: nothing changes */
    assert_memory_equal(history, rolled, sizeof rolled);
    update.most_recent = true;
    history[0][0] = 7, history[0][1] = INFINITY;
    assert_ok(mt_delayed_update(&stream, &update));
    assert_true(scale[0] == 32 && scale[1] == 224.0f / 200); /* Inf keeps the scale */
    history[0][0] = 0x1p-149f, history[0][1] = 0;
    assert_ok(mt_delayed_update(&stream, &update));
    assert_true(scale[0] == FLT_MAX && isinf(history[L - 1][1]));
    float other[N] = { 9, 3 }; /* the larger becomes that of both, a NaN too */
    update.other = other;
    history[0][0] = 4, history[0][1] = NAN;
    assert_ok(mt_delayed_update(&stream, &update));
    assert_true(scale[0] == 224.0f / 9 && other[0] == 9 && isnan(other[1]));
    assert_true(history[L - 1][0] == 9 && isnan(history[L - 1][1]) && history[0][0] == 0);
    other[0] = NAN, other[1] = 2, history[0][1] = 8;
    assert_ok(mt_delayed_update(&stream, &update));
    assert_true(isnan(other[0]) && other[1] == 8 && scale[0] == 224.0f / 9 && scale[1] == 28);
    update.length = 1;
    assert_fails(mt_delayed_update(&stream, &update), MT_EINVAL, "needs 2");
    result_free(&r);
    test_free(x);
}

/* ---- refusals ---- */

static void test_refusals(void **state)
{
    (void)state;
    struct quantize_case c;
    struct quantize_result r;
    case_make(&c, MT_GROUP_VARYING_FIRST, 2, (int64_t[]){ 3, 4 }, &(int64_t){ 8 }, 1);
    mt_stream stream = the_stream();
    void *x = case_source(&c, MT_F32, 1, false);
    mt_qtensor source = mt_qtensor_plain(c.group, MT_F32, x);
    result_make(&r, &c, "mxfp8", "nvfp4", false);
    const mt_qtensor good = r.q;
    struct mt_quantize_args args = { .dtype = MT_F32, .src = &source, .out = &r.q };
#define REFUSED(change, code, words)                                                               \
    do {                                                                                           \
        change;                                                                                    \
        assert_fails(mt_quantize(&stream, &args), (code), (words));                                \
        r.q = good;                                                                                \
        source = mt_qtensor_plain(c.group, MT_F32, x);                                             \
    } while (0)
    REFUSED(r.q.dir[MT_ROW].options.rht = true, MT_EINVAL, "are for the column direction");
    REFUSED(r.q.dir[MT_ROW].options.from_dequantized = true, MT_EINVAL,
            "are for the column direction");
    r.q.dir[MT_COL].options.from_dequantized = true;
    REFUSED(r.q.dir[MT_ROW] = source.dir[MT_ROW], MT_EINVAL,
            "the codes of the row direction hold, which is f32: it has none");
    REFUSED(r.q.dir[MT_COL].options.scale_floor = true, MT_ECONFIG, "only mx scales");
    REFUSED(r.q.dir[MT_COL].layout = MT_LAYOUT_PADDED, MT_EUNSUPPORTED,
            "column direction is not compact");
    REFUSED(r.q.dir[MT_ROW].codes = NULL, MT_EINVAL, "codes of the row direction are NULL");
    REFUSED(r.q.dir[MT_COL].scales = NULL, MT_EINVAL, "scales of the column direction are NULL");
    REFUSED(r.q.dir[MT_COL].amax = NULL, MT_EINVAL, "amax of the column direction is NULL");
    REFUSED(r.q.group.m++, MT_EINVAL, "not of one group");
    REFUSED(source.dir[MT_ROW].format = NULL, MT_EINVAL, "the source has no row direction");
    REFUSED(source.dir[MT_ROW].codes = NULL, MT_EINVAL, "the source's codes are NULL");
    args.pass = MT_QUANTIZE_PASS_COUNT;
    REFUSED((void)0, MT_EINVAL, "pass 3");
    args.pass = MT_QUANTIZE_ALL;
    if (!strcmp(test_device_name(), "cpu")) { /* a GPU's counts are not read on the host */
        c.first[1] = 6;                       /* 9 rows where the capacity is 8 */
        REFUSED((void)0, MT_EINVAL, "exceed the capacity of 64 elements");
        c.first[1] = -1;
        REFUSED((void)0, MT_EINVAL, "member 1 is -1 x 8, dims must not be negative");
        c.first[1] = 4;
    }
    assert_ok(mt_quantize(&stream, &args));
    struct mt_dequantize_args read = { .dtype = MT_F32, .src = &r.q, .y = x, .y_dtype = MT_I32 };
    assert_fails(mt_dequantize(&stream, &read), MT_EINVAL, "y cannot be i32");
    read.y_dtype = MT_F32, read.y = NULL;
    assert_fails(mt_dequantize(&stream, &read), MT_EINVAL, "y is NULL");
    struct mt_swizzle_scales_args turn = { .dtype = MT_F32, .src = &source, .out = x };
    assert_fails(mt_swizzle_scales(&stream, &turn), MT_EINVAL,
                 "format f32 have no swizzled layout");
    args.dtype = MT_F16;
    assert_fails(mt_quantize(&stream, &args), MT_EUNSUPPORTED, "no kernels for f16");
    result_free(&r);
    test_free(x);
}

/* A group without members has no codes and no scales, whatever room there is behind them. */
static void test_room_for_nobody(void **state)
{
    (void)state;
    static const char *const specs[] = { "mxfp8", "nvfp4", "fp8_tensor", "bf16" };
    enum { ROWS = 4, K = 32 };
    const int64_t none = 0, offset = 0;
    mt_stream stream = the_stream();
    float *x = test_alloc(ROWS * K, MT_F32), *y = test_alloc(ROWS * K, MT_F32);
    mt_group group = mt_group_ragged_rows(0, ROWS, K, &none, &offset);
    mt_qtensor source = mt_qtensor_plain(group, MT_F32, x);
    for (size_t f = 0; f < sizeof specs / sizeof specs[0]; f++) {
        mt_format_spec spec;
        mt_qtensor q = { .group = group };
        assert_ok(mt_format_spec_parse(&spec, specs[f]));
        for (int dir = 0; dir < MT_DIR_COUNT; dir++) q.dir[dir] = mt_direction_of(spec);
        assert_int_equal(mt_qtensor_bytes(&q), 0);
        for (int placed = 0; placed < 2; placed++) {
            if (placed) mt_qtensor_place(&q, y);
            assert_ok(mt_quantize(
                &stream, &(struct mt_quantize_args){ .dtype = MT_F32, .src = &source, .out = &q }));
            for (int dir = 0; dir < MT_DIR_COUNT; dir++)
                assert_ok(
                    mt_dequantize(&stream, &(struct mt_dequantize_args){ .dtype = MT_F32,
                                                                         .src = &q,
                                                                         .dir = (mt_dir)dir,
                                                                         .y = y,
                                                                         .y_dtype = MT_F32 }));
        }
    }
    test_free(x), test_free(y);
}

/* The second call of a shape takes no memory. */
static void test_steady_state(void **state)
{
    (void)state;
    struct quantize_case c;
    struct quantize_result r;
    case_make(&c, MT_GROUP_UNIFORM, 4, &(int64_t){ 200 }, &(int64_t){ 300 }, 0);
    void *x = case_source(&c, MT_F32, 1, false);
    result_make(&r, &c, "nvfp4", "nvfp4:rht", false);
    assert_ok(case_quantize(test_device(), &c, x, MT_F32, &r, 0));
    int64_t peak = test_device()->peak[MT_MEMORY_WORKSPACE];
    for (int i = 0; i < 3; i++) assert_ok(case_quantize(test_device(), &c, x, MT_F32, &r, 0));
    assert_int_equal(test_device()->peak[MT_MEMORY_WORKSPACE], peak);
    result_free(&r);
    test_free(x);
}

/* What ops before have left in the CPU's workspace is not read: the sanitizers see more than bits.
 */
static void test_used_workspace(void **state)
{
    (void)state;
    static const char *const specs[] = { "fp8_tensor:rht", "nvfp4:rht", "nvfp4:rht+sr", "mxfp8:rht",
                                         "nvfp4:source=dequantized" };
    mt_device *device = NULL;
    struct quantize_case c;
    const char *set = getenv("MIXTAPE_TEST_DEVICE") ? NULL : getenv("MIXTAPE_KERNELS");
    assert_ok(test_open(&device, "cpu", set, 1)); /* which may be another device's */
    mt_stream stream = { device, NULL };
    case_make(&c, MT_GROUP_VARYING_FIRST, 3, (int64_t[]){ 33, 0, 150 }, &(int64_t){ 40 }, 0);
    void *x = case_source(&c, MT_F32, 21, false), *workspace;
    for (size_t f = 0; f < sizeof specs / sizeof specs[0]; f++) {
        struct quantize_result fresh, used;
        result_make(&fresh, &c, NULL, specs[f], false);
        result_make(&used, &c, NULL, specs[f], false);
        assert_ok(case_quantize(device, &c, x, MT_F32, &fresh, 1));
        size_t bytes = (size_t)device->peak[MT_MEMORY_WORKSPACE];
        assert_ok(mt_cpu_scratch(&stream, &workspace, bytes));
        memset(workspace, 0xa5, bytes);
        assert_ok(case_quantize(device, &c, x, MT_F32, &used, 1));
        assert_same_direction(&fresh, &used, MT_COL);
        result_free(&fresh), result_free(&used);
    }
    test_free(x);
    mt_device_destroy(&device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bias_and_nan),   cmocka_unit_test(test_passes),
        cmocka_unit_test(test_hybrid),         cmocka_unit_test(test_output_types),
        cmocka_unit_test(test_swizzle),        cmocka_unit_test(test_delayed),
        cmocka_unit_test(test_refusals),       cmocka_unit_test(test_steady_state),
        cmocka_unit_test(test_used_workspace), cmocka_unit_test(test_room_for_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
