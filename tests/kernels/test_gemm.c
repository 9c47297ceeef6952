/* The grouped GEMM against an f64 (long double) product of the same operands: every kernel set that
 * this machine runs (or the one in MIXTAPE_KERNELS), dtype, layout, form of weight, and shape; the
 * threads must not show. */
#include "tests/kernels/gemm_case.h"

enum { MOST_THREADS = 3 };

static const struct shape shapes[] = {
    { 5, 40, 37, true, { 0, 1, 7, 33, 300 } },
    { 3, 128, 128, true, { 33, 0, 7 } },
    { 3, 260, 324, true, { 33, 0, 150 } }, /* f32 by planes of bf16 */
    { 3, 17, 3, true, { 600, 0, 0 } },
    { 2, 33, 257, true, { 31, 64 } },
    { 2, 257, 33, true, { 17, 13 } },
    { 1, 600, 70, false, { 65 } },
    { 1, 64, 530, false, { 130 } },
    { 3, 16, 32, false, { 12 } },
    { 1, 1, 1, false, { 1 } },
    { 2, 1, 64, false, { 29 } },
    { 2, 64, 1, false, { 29 } },
    { 2, 5, 0, false, { 3 } },
    { 2, 0, 5, false, { 3 } },
    { 2, 0, 256, false, { 3 } },
    { 2, 256, 396, false, { 131 } },
    { 2, 259, 300, false, { 70 } }, /* moved to 16 bytes for planes: dY; X */
    { 2, 300, 259, false, { 70 } },
    { 2, 1032, 64, false, { 0 } },
    { 1, 40, 72, false, { 2048 } },
    { 1, 24, 200, false, { 1024 } },
    { 1, 8, 8, false, { 0 } },
    { 3, 31, 48, true, { 0, 0, 0 } },
    { 0, 31, 48, false, { 4 } },
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static void check_form(mt_device *device, struct problem *p, mt_gemm_layout layout,
                       const struct form *f)
{
    size_t bytes = (size_t)result_count(p, layout) * mt_dtype_size(f->wide_d ? p->real : p->dtype);
    void *first = NULL;
    int threads = device->threads;
    for (int t = 1; t <= MOST_THREADS; t++) {
        device->threads = t;
        void *d = run(device, p, layout, f);
        if (!first) {
            verify(device, p, layout, f, d);
            first = d;
            continue;
        }
        if (memcmp(first, d, bytes))
            fail_msg(
                "%s %s layout %d, n %lld, k %lld, form %d: %d threads give other bits than one",
                device->kernel_set, mt_dtype_name(p->dtype), (int)layout, (long long)p->s.n,
                (long long)p->s.k, (int)(f - forms), t);
        test_free(d);
    }
    test_free(first);
    device->threads = threads;
}

/* The devices under test. */
static mt_device *devices[TEST_GEMM_SETS];

static int open_devices(void **state)
{
    (void)state;
    const char *only = getenv("MIXTAPE_KERNELS"), *name;
    int opened = 0;
    for (int i = 0; i < TEST_GEMM_SETS; i++) {
        if (test_open_set(&devices[i], &name, i, 0) && only && strcmp(only, name) != 0)
            mt_device_destroy(&devices[i]);
        opened += devices[i] != NULL;
    }
    if (!opened) print_error("no kernel set of these tests is %s\n", only ? only : "here");
    return opened ? 0 : 1;
}

static int close_devices(void **state)
{
    (void)state;
    for (int i = 0; i < TEST_GEMM_SETS; i++) mt_device_destroy(&devices[i]);
    return 0;
}

static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };

static void every_device(void (*check)(mt_device *device, mt_dtype dtype))
{
    for (int i = 0; i < TEST_GEMM_SETS; i++)
        for (int t = 0; devices[i] && t < 3; t++) check(devices[i], dtypes[t]);
}

static void check_shapes(mt_device *device, mt_dtype dtype)
{
    for (int s = 0; s < SHAPES; s++) {
        struct problem *p = make(device, &shapes[s], dtype, false);
        for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++)
            for (int f = 0; f < FORMS; f++)
                if (forms[f].has((mt_gemm_layout)layout))
                    check_form(device, p, (mt_gemm_layout)layout, &forms[f]);
        unmake(p);
    }
}

static void shapes_and_forms(void **state)
{
    (void)state;
    every_device(check_shapes);
}

/* NaN and Inf reach the results that they are factors of, and no other. */
static void check_specials(mt_device *device, mt_dtype dtype)
{
    for (int s = 0; s < 9; s++) {
        struct problem *p = make(device, &shapes[s], dtype, true);
        for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++)
            for (int f = 0; f < 6; f++)
                if (forms[f].has((mt_gemm_layout)layout))
                    check_form(device, p, (mt_gemm_layout)layout, &forms[f]);
        unmake(p);
    }
}

static void specials(void **state)
{
    (void)state;
    every_device(check_specials);
}

/* Packing moves a weight's elements; it changes no bit of a product. */
static void check_packing(mt_device *device, mt_dtype dtype)
{
    const struct form *compact = &forms[0], *packed = &forms[4];
    for (int s = 0; s < SHAPES; s++) {
        struct problem *p = make(device, &shapes[s], dtype, false);
        for (int layout = MT_GEMM_TN; layout <= MT_GEMM_NN; layout++) {
            void *a = run(device, p, (mt_gemm_layout)layout, compact);
            void *b = run(device, p, (mt_gemm_layout)layout, packed);
            size_t bytes = (size_t)result_count(p, (mt_gemm_layout)layout) * mt_dtype_size(dtype);
            assert_memory_equal(a, b, bytes);
            test_free(a), test_free(b);
        }
        unmake(p);
    }
}

static void packed_equals_compact(void **state)
{
    (void)state;
    every_device(check_packing);
}

/* A gradient in dtype is that in real, rounded once, however its sum was cut: to the bit, where the
 * kernels are ours. c is what both types hold. */
static void check_gradient(mt_device *device, mt_dtype dtype)
{
    if (dtype != MT_BF16 || !strncmp(device->kernel_set, "cublaslt", 8)) return;
    for (int s = 0; s < SHAPES; s++) {
        struct problem *p = make(device, &shapes[s], dtype, s % 2);
        int64_t count = result_count(p, MT_GEMM_NT);
        for (int f = 0; f < FORMS; f++) {
            struct form real = forms[f];
            real.wide_d = true;
            if (!forms[f].has(MT_GEMM_NT) || forms[f].wide_d) continue;
            uint16_t *got = run(device, p, MT_GEMM_NT, &forms[f]);
            float *want = run(device, p, MT_GEMM_NT, &real);
            for (int64_t i = 0; i < count; i++) {
                if (got[i] == mt_f32_to_bf16(want[i])) continue;
                if (isnan(mt_bf16_to_f32(got[i])) && isnan(want[i])) continue;
                fail_msg("%s, shape %d, form %d, element %lld: 0x%04x, but %.9g in f32",
                         device->kernel_set, s, f, (long long)i, got[i], (double)want[i]);
            }
            test_free(got), test_free(want);
        }
        unmake(p);
    }
}

static void gradients_round_once(void **state)
{
    (void)state;
    every_device(check_gradient);
}

/* pack_weight rounds the master as a cast does, and takes one of bf16 as it is: a product with the
 * identity shows the packed values. */
static void check_rounding_of(mt_device *device, mt_dtype dtype, bool halves)
{
    enum { N = 37, K = 70 };
    mt_dtype real = mt_dtype_wide(dtype);
    mt_stream stream = { device, NULL };
    void *master = test_alloc(N * K, real), *eye = test_alloc(K * K, dtype);
    test_random(master, N * K, halves ? MT_BF16 : real, 3, 11);
    for (int i = 0; i < K * K; i++) mt_store_f64(eye, dtype, i, i / K == i % K);
    size_t bytes = device->kernels[dtype]->packed_bytes(dtype, MT_ROW, 1, N, K);
    void *codes = test_alloc((int64_t)bytes, MT_U8), *y = test_alloc(K * N, real);
    mt_qtensor w = mt_qtensor_plain(mt_group_uniform(1, N, K), dtype, NULL);
    w.dir[MT_ROW].codes = codes;
    w.dir[MT_ROW].layout = w.dir[MT_COL].layout = MT_LAYOUT_PACKED;
    mt_qtensor x = mt_qtensor_plain(mt_group_uniform(1, K, K), dtype, eye);
    assert_ok(mt_pack_weight(&stream, &(struct mt_pack_weight_args){ dtype, master, &w, halves }));
    assert_ok(mt_gemm(
        &stream,
        &(struct mt_gemm_args){
            .dtype = dtype, .layout = MT_GEMM_TN, .a = &w, .b = &x, .d = y, .d_dtype = real }));
    for (int i = 0; i < N * K; i++) {
        double want = mt_load_f64(master, halves ? MT_BF16 : real, i);
        if (dtype == MT_BF16 && !halves) want = (double)mt_bf16_to_f32(mt_f32_to_bf16((float)want));
        assert_true(mt_load_f64(y, real, i % K * N + i / K) == want);
    }
    test_free(master), test_free(eye), test_free(codes), test_free(y);
}

static void check_rounding(mt_device *device, mt_dtype dtype)
{
    check_rounding_of(device, dtype, false);
    if (dtype == MT_BF16) check_rounding_of(device, dtype, true);
}

static void rounding(void **state)
{
    (void)state;
    every_device(check_rounding);
}

static void check_bias_grad(mt_device *device, mt_dtype dtype)
{
    int threads = device->threads;
    for (int s = 0; s < SHAPES; s++) {
        struct problem *p = make(device, &shapes[s], dtype, false);
        int64_t n = p->s.n, count = p->s.members * n;
        mt_qtensor dy = mt_qtensor_plain(rows_group(p, n, p->offsets_n), dtype, p->dy[0]);
        for (int accumulate = 0; accumulate < 2; accumulate++)
            for (device->threads = 1; device->threads <= MOST_THREADS; device->threads++) {
                mt_stream stream = { device, NULL };
                void *db = test_alloc(count, p->real);
                for (int64_t i = 0; accumulate && i < count; i++)
                    mt_store_f64(db, p->real, i, 0.25);
                assert_ok(mt_bias_grad(&stream,
                                       &(struct mt_bias_grad_args){ dtype, &dy, accumulate, db }));
                for (int64_t i = 0; i < count; i++) {
                    int64_t e = i / n, rows = p->start[e + 1] - p->start[e];
                    double want = accumulate ? 0.25 : 0, size = want;
                    for (int64_t r = p->start[e]; r < p->start[e + 1]; r++) {
                        double x = mt_load_f64(p->dy[0], dtype, r * n + i % n);
                        want += x, size += fabs(x);
                    }
                    double limit = 2 * (double)(rows + 1) * test_epsilon(p->real) * size;
                    assert_true(fabs(mt_load_f64(db, p->real, i) - want) <= limit);
                }
                test_free(db);
            }
        device->threads = threads;
        unmake(p);
    }
}

static void bias_gradients(void **state)
{
    (void)state;
    every_device(check_bias_grad);
}

/* What a caller can get wrong is named. */
static void refusals(void **state)
{
    (void)state;
    float data[64] = { 0 };
    mt_qtensor w = mt_qtensor_plain(mt_group_uniform(2, 4, 3), MT_F32, data);
    mt_qtensor x = mt_qtensor_plain(mt_group_uniform(2, 5, 3), MT_F32, data);
    const struct mt_gemm_args good = {
        .dtype = MT_F32, .layout = MT_GEMM_TN, .a = &w, .b = &x, .d = data, .d_dtype = MT_F32
    };
    mt_device *device = NULL;
    for (int i = 0; i < TEST_GEMM_SETS && !device; i++) device = devices[i];
    mt_stream stream = { device, NULL };
    struct mt_gemm_args args = good;
    args.a = NULL;
    assert_fails(mt_gemm(&stream, &args), MT_EINVAL, "a is NULL");
    args = good, args.layout = MT_GEMM_NN;
    assert_fails(mt_gemm(&stream, &args), MT_EINVAL, "b is 3 wide, a needs 4");
    args = good, args.d = NULL;
    assert_fails(mt_gemm(&stream, &args), MT_EINVAL, "d is NULL");
    args = good, args.d_dtype = MT_BF16;
    assert_fails(mt_gemm(&stream, &args), MT_EINVAL, "cannot be bf16");
    mt_qtensor other = mt_qtensor_plain(mt_group_uniform(3, 5, 3), MT_F32, data);
    args = good, args.b = &other;
    assert_fails(mt_gemm(&stream, &args), MT_EINVAL, "a has 2 members, b 3");
    args = good, args.layout = MT_GEMM_NT, args.a = &x, args.bias = data;
    assert_fails(mt_gemm(&stream, &args), MT_EINVAL, "only TN adds a bias");
    mt_qtensor half = mt_qtensor_plain(w.group, MT_F16, data);
    mt_qtensor padded = w;
    padded.dir[MT_ROW].layout = MT_LAYOUT_PADDED;
    args = good, args.a = &padded;
    assert_fails(mt_gemm(&stream, &args), MT_EUNSUPPORTED, "layout");
    padded.dir[MT_ROW].layout = MT_LAYOUT_DECODED; /* it is bf16 then, whatever its format */
    assert_fails(mt_gemm(&stream, &args), MT_EUNSUPPORTED, "gemm TN of f32: a is kept decoded");
    mt_qtensor absent = w;
    absent.dir[MT_ROW].format = NULL;
    args = good, args.a = &absent;
    assert_fails(mt_gemm(&stream, &args), MT_EINVAL, "a has no row direction");
    static const mt_format_id scaled[] = { MT_FORMAT_FP8_TENSOR, MT_FORMAT_MXFP8, MT_FORMAT_NVFP4 };
    for (int i = 0; i < 3; i++) {
        mt_qtensor coded = w;
        mt_direction *d = &coded.dir[MT_ROW];
        *d = mt_direction_of(mt_format_spec_default(scaled[i]));
        d->codes = data, d->amax = data;
        args = good, args.a = &coded;
        assert_fails(mt_gemm(&stream, &args), MT_EINVAL, "its scales are NULL");
        d->scales = data, d->amax = NULL;
        if (d->format->second_level)
            assert_fails(mt_gemm(&stream, &args), MT_EINVAL, "its amax, of which a scale is made");
    }
    struct mt_pack_weight_args pack = { .dtype = MT_F32, .master = data, .out = &w };
    assert_fails(mt_pack_weight(&stream, &pack), MT_EINVAL, "must be packed f32");
    pack.halves = true;
    assert_fails(mt_pack_weight(&stream, &pack), MT_EINVAL, "must be bf16");
    struct mt_bias_grad_args bias = { MT_F32, &half, false, data };
    assert_fails(mt_bias_grad(&stream, &bias), MT_EINVAL, "dy is f16, must be plain f32");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_and_forms),
        cmocka_unit_test(specials),
        cmocka_unit_test(packed_equals_compact),
        cmocka_unit_test(rounding),
        cmocka_unit_test(gradients_round_once),
        cmocka_unit_test(bias_gradients),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
