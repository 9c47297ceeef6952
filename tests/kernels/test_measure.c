/* Statistics of quantized tensors on a device: against plain loops, and against the CPU's portable
 * kernels, whose counts, extremes and codes are the same and whose sums have another order. */
#include <math.h>

#include "tests/kernels/quantize_case.h"

enum { MOST = 7 };
static mt_device *cpu;

static bool is_near(double a, double b, double limit)
{
    return a == b || (isnan(a) && isnan(b)) || fabs(a - b) <= limit;
}

static void assert_same(const mt_measured *got, const mt_measured *want, const char *what)
{
    const double most = sqrt(want->squares * (double)want->count);
    const bool counts = got->count == want->count && got->nonfinite == want->nonfinite &&
                        got->nonzero == want->nonzero && got->vanished == want->vanished &&
                        got->saturated == want->saturated && got->scales == want->scales;
    const bool extremes = got->min == want->min && got->max == want->max &&
                          got->amax == want->amax && got->scale_min == want->scale_min &&
                          got->scale_max == want->scale_max;
    if (!counts || !extremes) fail_msg("%s: counts or extremes differ", what);
    assert_memory_equal(got->codes, want->codes, sizeof want->codes);
    assert_true(is_near(got->sum, want->sum, 1e-12 * most));
    assert_true(is_near(got->squares, want->squares, 1e-12 * want->squares));
    assert_true(is_near(got->error_squares, want->error_squares, 1e-12 * want->error_squares));
    assert_true(
        is_near(got->product, want->product, 1e-12 * sqrt(want->squares * want->decoded_squares)));
    assert_true(
        is_near(got->decoded_squares, want->decoded_squares, 1e-12 * want->decoded_squares));
}

/* What a device quantized, measured on it and on the CPU; and twice, for the same bits. */
static void check(const struct quantize_case *c, const void *x, mt_dtype dtype, const char *format,
                  mt_dir dir, bool swizzled)
{
    static float scale[MOST];
    struct quantize_result r;
    mt_format_spec spec;
    assert_ok(mt_format_spec_parse(&spec, format));
    const bool chained = spec.options.from_dequantized;
    const char *row = dir == MT_ROW || chained ? format : NULL;
    result_make(&r, c, row, dir == MT_COL ? format : NULL, swizzled);
    const mt_qtensor source = mt_qtensor_plain(c->group, dtype, (void *)(uintptr_t)x);
    const int64_t n = c->group.members, words = (int64_t)(sizeof(mt_measured) / sizeof(int64_t));
    mt_measured *m = test_alloc((n + 1) * words, MT_I64),
                *again = test_alloc((n + 1) * words, MT_I64),
                *want = test_alloc((n + 1) * words, MT_I64);
    mt_stream stream = { test_device(), NULL }, host = { cpu, NULL };
    for (int i = 0; i < MOST; i++) scale[i] = 0.5f + (float)i * 3;
    struct mt_quantize_args q = {
        .dtype = MT_BF16, .src = &source, .out = &r.q, .seed = 3, .stream = 1, .step = 2
    };
    struct mt_measure_args a = {
        .dtype = MT_BF16, .src = &source, .out = &r.q, .dir = dir, .measured = m
    };
    if (spec.format->delayed) q.scale[dir] = a.scale = scale;
    assert_ok(mt_quantize(&stream, &q));
    assert_ok(mt_measure(&stream, &a));
    a.measured = again;
    assert_ok(mt_measure(&stream, &a));
    assert_ok(mt_device_synchronize(stream.device));
    assert_memory_equal(m, again, (size_t)n * sizeof *m);
    a.measured = want;
    assert_ok(mt_measure(&host, &a));
    for (int64_t i = 0; i < n; i++) {
        assert_true(want[i].count + want[i].nonfinite == c->first[i] * c->last[i]);
        assert_same(&m[i], &want[i], format);
    }
    test_free(m), test_free(again), test_free(want);
    result_free(&r);
}

static const char *const formats[] = {
    "f64",       "f32",           "bf16",
    "f16",       "fp8_tensor",    "fp8_tensor:e5m2+pow2",
    "fp8_block", "fp8_delayed",   "fp8_delayed:e5m2",
    "mxfp8",     "fp8_block:2d",  "fp8_block:pow2=off",
    "mxfp8:2d",  "mxfp8:e5m2",    "mxfp8:scale=floor",
    "mxfp4",     "mxfp6_e3m2",    "mxfp6_e2m3",
    "mxfp4:2d",  "mxfp4:sr",      "nvfp4",
    "nvfp4:2d",  "nvfp4:4over6",  "nvfp4:4over6=256+2d",
    "nvfp4:rht", "nvfp4:rht+sr",  "mxfp8:rht",
    "nvfp4:sr",  "fp8_block:rht",
};
static const char *const of_rows[] = {
    "fp8_block:source=dequantized", "fp8_block:pow2=off+source=dequantized",
    "mxfp8:source=dequantized",     "nvfp4:source=dequantized",
    "nvfp4:rht+source=dequantized", "mxfp4:sr+source=dequantized"
};
#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static void check_formats(const struct quantize_case *c, const void *x, mt_dtype dtype)
{
    for (int i = 0; i < COUNT(formats) * MT_DIR_COUNT; i++) {
        mt_format_spec spec;
        const char *format = formats[i / MT_DIR_COUNT];
        assert_ok(mt_format_spec_parse(&spec, format));
        const bool small =
            spec.format->scale == MT_SCALE_E8M0 || spec.format->scale == MT_SCALE_E4M3;
        if (spec.options.rht && i % MT_DIR_COUNT == MT_ROW) continue;
        for (int swizzled = 0; swizzled <= small; swizzled++)
            check(c, x, dtype, format, (mt_dir)(i % MT_DIR_COUNT), swizzled);
    }
    for (int i = 0; i < COUNT(of_rows) * 2; i++) {
        const bool swizzled = i >= COUNT(of_rows);
        const char *format = of_rows[i % COUNT(of_rows)];
        if (!swizzled || strncmp(format, "fp8", 3) != 0)
            check(c, x, dtype, format, MT_COL, swizzled);
    }
}

static double *widened(float *x, int64_t count)
{
    double *wide = test_alloc(count, MT_F64);
    for (int64_t i = 0; i < count; i++) wide[i] = (double)x[i];
    test_free(x);
    return wide;
}

/* Ragged members in every mode, empty ones among them; values of every magnitude, zeros, Inf, NaN.
 */
static void every_device_counts_the_same(void **state)
{
    (void)state;
    static const int64_t rows[MOST] = { 33, 0, 128, 1, 300, 16, 47 };
    static const int64_t cols[MOST] = { 160, 32, 48, 130, 0, 17, 1 };
    static const mt_dtype dtypes[] = { MT_BF16, MT_F32, MT_F16, MT_F64 };
    static struct quantize_case c;
    for (int mode = MT_GROUP_UNIFORM; mode <= MT_GROUP_VARYING_BOTH; mode++)
        for (int d = 0; d < COUNT(dtypes); d++) {
            if (test_small() && (mode + d) % 3) continue;
            case_make(&c, (mt_group_mode)mode, MOST, rows, cols, 5);
            void *x = case_source(&c, dtypes[d] == MT_F64 ? MT_F32 : dtypes[d], 11, true);
            if (dtypes[d] == MT_F64) x = widened(x, c.total);
            check_formats(&c, x, dtypes[d]);
            test_free(x);
        }
}

/* Members of many tiles, one of them much larger than the rest: parts are shared out. */
static void large_members(void **state)
{
    (void)state;
    static const int64_t rows[] = { 1500, 7, 260 }, cols[] = { 1000, 0, 0 };
    static struct quantize_case c;
    case_make(&c, MT_GROUP_VARYING_FIRST, test_small() ? 1 : 3, rows, cols, 0);
    void *x = case_source(&c, MT_BF16, 12, false);
    check_formats(&c, x, MT_BF16);
    test_free(x);
}

/* More members than a GPU has blocks for, each of a tile at most. */
static void many_members(void **state)
{
    (void)state;
    enum { MANY = 1100, ROWS = 3, COLS = 20 };
    const int64_t words = (int64_t)(sizeof(mt_measured) / sizeof(int64_t)) * MANY;
    float *x = test_alloc(MANY * ROWS * COLS, MT_F32);
    mt_measured *m = test_alloc(words, MT_I64), *want = test_alloc(words, MT_I64);
    mt_qtensor plain = mt_qtensor_plain(mt_group_uniform(MANY, ROWS, COLS), MT_F32, x), q = plain;
    mt_stream stream = { test_device(), NULL }, host = { cpu, NULL };
    mt_format_spec spec;
    test_random(x, MANY * ROWS * COLS, MT_F32, 1, 4);
    assert_ok(mt_format_spec_parse(&spec, "mxfp8"));
    q.dir[MT_ROW] = mt_direction_of(spec), q.dir[MT_COL].format = NULL;
    void *memory = test_alloc((int64_t)mt_qtensor_bytes(&q), MT_U8);
    mt_qtensor_place(&q, memory);
    struct mt_measure_args a = {
        .dtype = MT_F32, .src = &plain, .out = &q, .dir = MT_ROW, .measured = m
    };
    assert_ok(mt_quantize(&stream,
                          &(struct mt_quantize_args){ .dtype = MT_F32, .src = &plain, .out = &q }));
    assert_ok(mt_measure(&stream, &a));
    assert_ok(mt_device_synchronize(stream.device));
    a.measured = want;
    assert_ok(mt_measure(&host, &a));
    for (int i = 0; i < MANY; i++) assert_same(&m[i], &want[i], "many");
    test_free(x), test_free(m), test_free(want), test_free(memory);
}

/* What plain loops over all elements say, and the same bits by any number of threads. */
static void parts_add_up(void **state)
{
    (void)state;
    static const char *const some[] = { "fp8_tensor", "mxfp8",        "nvfp4",
                                        "fp8_block",  "fp8_block:2d", "bf16" };
    static const int64_t rows[] = { 777 }, cols[] = { 200 };
    static struct quantize_case c;
    case_make(&c, MT_GROUP_UNIFORM, 1, rows, cols, 0);
    float *x = test_alloc(c.total, MT_F32);
    test_random(x, c.total, MT_F32, 2, 5);
    for (int64_t i = 0; i < c.total; i += 91) x[i] = 0;
    for (int64_t i = 0; i < c.total; i += 89) x[i] *= 1e-9f;
    x[0] = NAN, x[c.total - 1] = -INFINITY, x[401 * 200] = INFINITY;
    const mt_qtensor plain = mt_qtensor_plain(c.group, MT_F32, x);
    const int64_t words = (int64_t)(sizeof(mt_measured) / sizeof(int64_t));
    mt_measured *m = test_alloc(words, MT_I64), *alone = test_alloc(words, MT_I64);
    for (int f = 0; f < COUNT(some) * MT_DIR_COUNT; f++) {
        const mt_dir dir = (mt_dir)(f % MT_DIR_COUNT);
        const char *format = some[f / MT_DIR_COUNT];
        struct quantize_result r;
        mt_stream stream = { test_device(), NULL }, host = { cpu, NULL };
        mt_measured want = { 0 };
        result_make(&r, &c, dir == MT_ROW ? format : NULL, dir == MT_COL ? format : NULL, false);
        assert_ok(mt_quantize(
            &stream,
            &(struct mt_quantize_args){ .dtype = MT_F32, .src = &plain, .out = &r.q, .seed = 1 }));
        assert_ok(mt_device_synchronize(stream.device));
        struct mt_measure_args a = {
            .dtype = MT_F32, .src = &plain, .out = &r.q, .dir = dir, .measured = m
        };
        float *q = case_values(cpu, &r.q, dir, MT_F32);
        for (int64_t i = 0; i < c.total; i++) {
            if (!isfinite(x[i])) continue;
            const double v = (double)x[i], w = (double)q[i];
            want.count++, want.nonzero += v != 0, want.vanished += v != 0 && w == 0;
            want.min = fmin(want.min, v), want.max = fmax(want.max, v);
            want.sum += v, want.squares += v * v, want.error_squares += (v - w) * (v - w);
            want.product += v * w, want.decoded_squares += w * w;
        }
        assert_ok(mt_measure(&stream, &a));
        assert_ok(mt_device_synchronize(stream.device));
        want.nonfinite = 3, want.amax = fmax(-want.min, want.max);
        want.saturated = m->saturated, want.scales = m->scales; /* every_device_counts_the_same */
        want.scale_min = m->scale_min, want.scale_max = m->scale_max;
        memcpy(want.codes, m->codes, sizeof want.codes);
        assert_int_equal(want.count, c.total - 3);
        assert_same(m, &want, format);
        a.measured = m;
        assert_ok(mt_measure(&host, &a));
        const int threads = cpu->threads;
        cpu->threads = threads == 1 ? 3 : 1, a.measured = alone;
        assert_ok(mt_measure(&host, &a));
        cpu->threads = threads;
        assert_memory_equal(m, alone, sizeof *m);
        test_free(q);
        result_free(&r);
    }
    test_free(x), test_free(m), test_free(alone);
}

/* What is asked wrongly is refused by name. */
static void arguments_are_checked(void **state)
{
    (void)state;
    static const int64_t rows[] = { 32 }, cols[] = { 32 };
    static struct quantize_case c;
    struct quantize_result r;
    mt_stream stream = { test_device(), NULL };
    mt_measured m;
    case_make(&c, MT_GROUP_UNIFORM, 1, rows, cols, 0);
    void *x = case_source(&c, MT_F32, 1, false);
    const mt_qtensor plain = mt_qtensor_plain(c.group, MT_F32, x);
    result_make(&r, &c, NULL, "nvfp4:source=dequantized", false);
    const struct mt_measure_args good = {
        .dtype = MT_F32, .src = &plain, .out = &r.q, .dir = MT_COL, .measured = &m
    };
    struct mt_measure_args a = good;
    assert_fails(mt_measure(&stream, &a), MT_EINVAL, "measure: the rows: the source has no row");
    r.q.dir[MT_COL].options.from_dequantized = false;
    a.dir = MT_ROW;
    assert_fails(mt_measure(&stream, &a), MT_EINVAL, "no row direction");
    a = good, a.src = &r.q;
    assert_fails(mt_measure(&stream, &a), MT_EINVAL, "no row direction");
    a = good, a.measured = NULL;
    assert_fails(mt_measure(&stream, &a), MT_EINVAL, "measured is NULL");
    float *const amax = r.q.dir[MT_COL].amax;
    a = good, r.q.dir[MT_COL].amax = NULL;
    assert_fails(mt_measure(&stream, &a), MT_EINVAL, "amax is NULL");
    r.q.dir[MT_COL].amax = amax;
    mt_qtensor other = plain;
    other.group.m = 16;
    a = good, a.src = &other;
    assert_fails(mt_measure(&stream, &a), MT_EINVAL, "not of one group");
    test_free(x);
    result_free(&r);
}

static int open_cpu(void **state)
{
    (void)state;
    return mt_device_open(&cpu, "cpu", "portable", 0) == MT_OK ? 0 : -1;
}

static int close_cpu(void **state)
{
    (void)state;
    mt_device_destroy(&cpu);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_device_counts_the_same),
        cmocka_unit_test(large_members),
        cmocka_unit_test(many_members),
        cmocka_unit_test(parts_add_up),
        cmocka_unit_test(arguments_are_checked),
    };
    return cmocka_run_group_tests(tests, open_cpu, close_cpu);
}
