/* Layouts of codes that a backend's GEMM reads: padded columns, decoded weights and operands. What
 * is read from them is what compact codes hold, to the bit; a backend without them refuses. */
#include <string.h>

#include "tests/kernels/quantize_case.h"

enum { N = 7 };
static const int64_t rows[N] = { 33, 0, 128, 257, 1, 0, 16 };

static bool has_kernels(void)
{
    return strcmp(test_device_name(), "cpu") != 0;
}

/* The same direction in another layout, over 0xAA. */
static mt_qtensor laid_out(const struct quantize_result *r, mt_dir dir, mt_layout layout)
{
    mt_qtensor q = mt_qtensor_select(&r->q, dir);
    q.dir[dir].layout = layout;
    size_t bytes = mt_qtensor_bytes(&q);
    void *memory = test_alloc((int64_t)bytes, MT_U8);
    memset(memory, 0xAA, bytes);
    mt_qtensor_place(&q, memory);
    return q;
}

static mt_status quantize(mt_group group, mt_dtype dtype, void *x, const mt_qtensor *out)
{
    mt_stream stream = { test_device(), NULL };
    mt_qtensor source = mt_qtensor_plain(group, dtype, x);
    MT_TRY(mt_quantize(
        &stream,
        &(struct mt_quantize_args){
            .dtype = MT_BF16, .src = &source, .out = out, .seed = 3, .stream = 1, .step = 2 }));
    return mt_device_synchronize(test_device());
}

static void check_padding(const mt_qtensor *q)
{
    const uint8_t *codes = q->dir[MT_COL].codes;
    int64_t all = mt_padded_rows(&q->group), k = q->group.k, at = 0;
    for (int64_t i = 0; i < N; i++) {
        int64_t end = at + (rows[i] + 127) / 128 * 128;
        for (int64_t c = 0; c < k; c++)
            for (int64_t p = at + rows[i]; p < end; p++)
                if (codes[(p / 128 * k + c) * 128 + p % 128])
                    fail_msg("member %d, column %d", (int)i, (int)c);
        at = end;
    }
    assert_true(at <= all);
}

static void check_padded(const char *format, mt_dtype dtype, int64_t k)
{
    struct quantize_case c;
    struct quantize_result r;
    case_make(&c, MT_GROUP_VARYING_FIRST, N, rows, &k, 3);
    void *x = case_source(&c, dtype, 2, true);
    result_make(&r, &c, NULL, format, false);
    assert_ok(quantize(c.group, dtype, x, &r.q));
    mt_qtensor q = laid_out(&r, MT_COL, MT_LAYOUT_PADDED);
    mt_status status = quantize(c.group, dtype, x, &q);
    assert_int_equal(status, has_kernels() ? MT_OK : MT_EUNSUPPORTED);
    if (status == MT_OK) {
        check_padding(&q);
        assert_memory_equal(q.dir[MT_COL].scales, r.q.dir[MT_COL].scales, r.scale_bytes[MT_COL]);
        mt_dtype types[] = { MT_BF16, MT_F32 };
        for (int i = 0; i < 2; i++) {
            void *a = case_values(test_device(), &q, MT_COL, types[i]);
            void *b = case_values(test_device(), &r.q, MT_COL, types[i]);
            assert_memory_equal(a, b, (size_t)c.total * mt_dtype_size(types[i]));
            test_free(a), test_free(b);
        }
    }
    test_free(q.dir[MT_COL].codes), test_free(x);
    result_free(&r);
}

static void test_padded(void **state)
{
    (void)state;
    static const char *const formats[] = {
        "fp8_tensor",    "fp8_delayed:e5m2", "fp8_block",
        "fp8_tensor:sr", "fp8_block:2d",     "fp8_block:pow2=off"
    };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        static const int64_t widths[] = { 80, 336 }; /* a tile's columns, more of them */
        for (int w = 0; w < 2; w++) {
            check_padded(formats[i], MT_BF16, widths[w]);
            check_padded(formats[i], MT_F32, widths[w]);
        }
    }
}

/* A product of rows and the weight in `q`, results in f32 or bf16. */
static void *product(mt_gemm_layout layout, const mt_qtensor *w, const mt_qtensor *x, int64_t count)
{
    mt_stream stream = { test_device(), NULL };
    void *d = test_alloc(count, MT_BF16);
    assert_ok(mt_gemm(
        &stream,
        &(struct mt_gemm_args){
            .dtype = MT_BF16, .layout = layout, .a = w, .b = x, .d = d, .d_dtype = MT_BF16 }));
    assert_ok(mt_device_synchronize(test_device()));
    return d;
}

static void check_decoded(const char *format, const char *rows_format, mt_dir dir)
{
    enum { MEMBERS = 3, M = 144, WIDE = 96, ROWS = 40 };
    struct quantize_case weight, activations;
    struct quantize_result w, a;
    bool along = dir == MT_ROW;
    int64_t width = along ? WIDE : M, count = MEMBERS * ROWS * (along ? M : WIDE);
    case_make(&weight, MT_GROUP_UNIFORM, MEMBERS, &(int64_t){ M }, &(int64_t){ WIDE }, 0);
    case_make(&activations, MT_GROUP_UNIFORM, MEMBERS, &(int64_t){ ROWS }, &width, 0);
    void *from = case_source(&weight, MT_F32, 3, false),
         *x = case_source(&activations, MT_BF16, 4, false);
    result_make(&w, &weight, along ? format : NULL, along ? NULL : format, false);
    result_make(&a, &activations, rows_format, NULL, false);
    assert_ok(quantize(weight.group, MT_F32, from, &w.q));
    assert_ok(quantize(activations.group, MT_BF16, x, &a.q));
    mt_qtensor q = laid_out(&w, dir, MT_LAYOUT_DECODED);
    mt_status status = quantize(weight.group, MT_F32, from, &q);
    assert_int_equal(status, has_kernels() ? MT_OK : MT_EUNSUPPORTED);
    if (status == MT_OK) {
        mt_gemm_layout layout = along ? MT_GEMM_TN : MT_GEMM_NN;
        void *got = product(layout, &q, &a.q, count), *want = product(layout, &w.q, &a.q, count);
        assert_memory_equal(got, want, (size_t)count * mt_dtype_size(MT_BF16));
        test_free(got), test_free(want);
    }
    test_free(q.dir[dir].codes), test_free(from), test_free(x);
    result_free(&w), result_free(&a);
}

static void test_decoded(void **state)
{
    (void)state;
    static const char *const formats[] = { "mxfp8",        "mxfp8:2d",        "mxfp8:sr",
                                           "mxfp6_e2m3",   "mxfp4",           "nvfp4",
                                           "nvfp4:2d",     "nvfp4:4over6+2d", "nvfp4:sr",
                                           "fp8_block:2d", "fp8_block" };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        for (int dir = 0; dir < MT_DIR_COUNT; dir++) {
            check_decoded(formats[i], "mxfp8", (mt_dir)dir);
            check_decoded(formats[i], "nvfp4", (mt_dir)dir);
        }
}

/* ---- operands of nvfp4 --------------------------------------------------------------------------
 */

static void check_operand(const char *row, const char *col, int decoded, int64_t k)
{
    struct quantize_case c;
    struct quantize_result r;
    case_make(&c, MT_GROUP_VARYING_FIRST, N, rows, &k, 3);
    void *x = case_source(&c, MT_BF16, 5, true);
    result_make(&r, &c, row, col, false);
    assert_ok(quantize(c.group, MT_BF16, x, &r.q));
    mt_qtensor q = r.q;
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        if (decoded >> dir & 1) q.dir[dir].layout = MT_LAYOUT_DECODED;
    size_t bytes = mt_qtensor_bytes(&q);
    void *memory = test_alloc((int64_t)bytes, MT_U8);
    memset(memory, 0xAA, bytes);
    mt_qtensor_place(&q, memory);
    mt_status status = quantize(c.group, MT_BF16, x, &q);
    assert_int_equal(status, has_kernels() ? MT_OK : MT_EUNSUPPORTED);
    for (int dir = 0; dir < MT_DIR_COUNT && status == MT_OK; dir++) {
        const mt_direction *a = &q.dir[dir], *b = &r.q.dir[dir];
        if (!b->format) continue;
        assert_memory_equal(a->amax, b->amax, N * sizeof(float));
        if (decoded >> dir & 1) {
            uint16_t *want = case_bare_values(&c, b, (mt_dir)dir);
            assert_memory_equal(a->codes, want, (size_t)mt_group_capacity(&c.group) * sizeof *want);
            test_free(want);
        } else {
            assert_memory_equal(a->codes, b->codes, r.code_bytes[dir]);
            assert_memory_equal(a->scales, b->scales, r.scale_bytes[dir]);
        }
    }
    test_free(memory), test_free(x);
    result_free(&r);
}

static void test_operands(void **state)
{
    (void)state;
    static const struct {
        const char *row, *col;
    } pairs[] = { { "nvfp4", "nvfp4:rht" },
                  { "nvfp4:sr", "nvfp4:rht+sr" },
                  { "nvfp4:sr", "nvfp4:rht" },
                  { "nvfp4", "nvfp4:rht+sr" },
                  { "nvfp4", "nvfp4" },
                  { "nvfp4:sr", "nvfp4" },
                  { "nvfp4", NULL },
                  { NULL, "nvfp4:rht+sr" },
                  { "nvfp4:sr", "nvfp4:4over6" },
                  { "nvfp4:sr", "nvfp4:rht+sr+4over6" },
                  { "nvfp4:4over6", "nvfp4:sr" } };
    static const int64_t widths[] = { 16, 72, 256, 328, 1040 };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
            for (int decoded = 1; decoded < 4; decoded++) {
                bool there = (pairs[i].row || !(decoded & 1)) && (pairs[i].col || decoded < 2);
                if (there) check_operand(pairs[i].row, pairs[i].col, decoded, widths[w]);
            }
}

/* Decoded directions beside the bias gradient are those without it. */
static void test_beside_bias(void **state)
{
    (void)state;
    enum { MEMBERS = 2, M = 128, WIDE = 128 };
    static const char *const formats[] = { "mxfp8", "fp8_block:2d", "mxfp4", "nvfp4:2d", "nvfp4" };
    static const mt_dtype types[] = { MT_F32, MT_BF16 };
    struct quantize_case c;
    mt_stream stream = { test_device(), NULL };
    float *bias = test_alloc(MEMBERS * WIDE, MT_F32);
    case_make(&c, MT_GROUP_UNIFORM, MEMBERS, &(int64_t){ M }, &(int64_t){ WIDE }, 0);
    for (size_t i = 0; i < sizeof formats / sizeof *formats * 2; i++) {
        const char *format = formats[i / 2];
        struct quantize_result r[2];
        void *x = case_source(&c, types[i % 2], 7, false);
        mt_qtensor source = mt_qtensor_plain(c.group, types[i % 2], x);
        for (int beside = 0; beside < 2; beside++) {
            result_make(&r[beside], &c, format, format, false);
            for (int dir = 0; dir < MT_DIR_COUNT; dir++) result_decode(&r[beside], &c, (mt_dir)dir);
            mt_status status = mt_quantize(
                &stream, &(struct mt_quantize_args){ .dtype = MT_BF16,
                                                     .src = &source,
                                                     .out = &r[beside].q,
                                                     .bias_grad = beside ? bias : NULL });
            assert_int_equal(status, has_kernels() ? MT_OK : MT_EUNSUPPORTED);
        }
        for (int dir = 0; dir < MT_DIR_COUNT; dir++)
            assert_memory_equal(r[0].q.dir[dir].codes, r[1].q.dir[dir].codes, r[0].code_bytes[dir]);
        result_free(&r[0]), result_free(&r[1]);
        test_free(x);
    }
    test_free(bias);
}

/* Directions that are decoded are made one by one: columns made from the codes of rows are not
 * among them, wherever those are. */
static void test_beside_dequantized(void **state)
{
    (void)state;
    static const mt_dtype types[] = { MT_F32, MT_BF16 };
    struct quantize_case c;
    case_make(&c, MT_GROUP_UNIFORM, 2, &(int64_t){ 128 }, &(int64_t){ 128 }, 0);
    for (int i = 0; i < 2; i++)
        for (int decoded = 1; decoded < 4; decoded++) {
            struct quantize_result r;
            void *x = case_source(&c, types[i], 8, false);
            result_make(&r, &c, "mxfp8", "nvfp4:source=dequantized", false);
            for (int dir = 0; dir < MT_DIR_COUNT; dir++)
                if (decoded >> dir & 1) result_decode(&r, &c, (mt_dir)dir);
            assert_int_equal(quantize(c.group, types[i], x, &r.q), MT_EUNSUPPORTED);
            result_free(&r), test_free(x);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_padded),
        cmocka_unit_test(test_decoded),
        cmocka_unit_test(test_operands),
        cmocka_unit_test(test_beside_bias),
        cmocka_unit_test(test_beside_dequantized),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
