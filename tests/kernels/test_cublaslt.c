/* What cuBLASLt is told of a grouped GEMM, held against a model of its column-major products; which
 * version and card may do what; how a kernel set is asked for. With a build for cuda also what the
 * library's door refuses, and on a GPU, that a recorded product gives the bits of one that is not.
 */
#include "tests/support/test.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/backends.h"
#include "kernels/cuda/cublaslt_layout.h"
#ifdef MT_HAVE_cuda
#include "kernels/cuda/cublaslt.h"
#endif

/* ---- layouts -----------------------------------------------------------------------------------
 */

enum { MEMBERS = 4, MOST = 64 };

struct product {
    int64_t n, k, rows[MEMBERS], start[MEMBERS + 1];
    double *x, *dy, *w; /* row-major */
};

static double *numbers(int64_t count, uint64_t seed)
{
    double *p = test_alloc(count, MT_F64);
    test_random(p, count, MT_F64, 8, seed);
    for (int64_t i = 0; i < count; i++) p[i] = rint(p[i]); /* sums are exact */
    return p;
}

static struct product make(int64_t n, int64_t k, const int64_t *rows)
{
    struct product p = { .n = n, .k = k };
    for (int e = 0; e < MEMBERS; e++) p.rows[e] = rows[e], p.start[e + 1] = p.start[e] + rows[e];
    p.x = numbers(p.start[MEMBERS] * k, 1);
    p.dy = numbers(p.start[MEMBERS] * n, 2);
    p.w = numbers(MEMBERS * n * k, 3);
    return p;
}

/* Element (i, j) of a stored matrix's op. */
static double element(const double *x, const mt_lt_matrix *m, int64_t i, int64_t j)
{
    int64_t row = m->transposed ? j : i, col = m->transposed ? i : j;
    assert_true(row >= 0 && row < m->rows && col >= 0 && col < m->cols && m->ld >= m->rows);
    return x[row + col * m->ld];
}

/* D = op(A) op(B), as cublasLtMatmul has it. */
static void multiply(double *d, const double *a, const double *b, const mt_lt_shape *s)
{
    assert_int_equal(s->a.transposed ? s->a.cols : s->a.rows, s->m);
    assert_int_equal(s->a.transposed ? s->a.rows : s->a.cols, s->k);
    assert_int_equal(s->b.transposed ? s->b.cols : s->b.rows, s->k);
    assert_int_equal(s->b.transposed ? s->b.rows : s->b.cols, s->n);
    assert_true(s->d.rows == s->m && s->d.cols == s->n && s->d.ld >= s->m && !s->d.transposed);
    for (int64_t j = 0; j < s->n; j++)
        for (int64_t i = 0; i < s->m; i++) {
            double sum = 0;
            for (int64_t q = 0; q < s->k; q++)
                sum += element(a, &s->a, i, q) * element(b, &s->b, q, j);
            assert_true(isnan(d[i + j * s->d.ld])); /* one writer */
            d[i + j * s->d.ld] = sum;
        }
}

/* kernels/gemm.h, word for word; c: the column of the result. */
static double expected(const struct product *p, mt_gemm_layout layout, int64_t e, int64_t i,
                       int64_t c)
{
    const double *w = p->w + e * p->n * p->k;
    int64_t r = p->start[e] + i;
    double sum = 0;
    if (layout == MT_GEMM_TN)
        for (int64_t q = 0; q < p->k; q++) sum += p->x[r * p->k + q] * w[c * p->k + q];
    else if (layout == MT_GEMM_NN)
        for (int64_t j = 0; j < p->n; j++) sum += p->dy[r * p->n + j] * w[j * p->k + c];
    else
        for (r = p->start[e]; r < p->start[e + 1]; r++)
            sum += p->dy[r * p->n + i] * p->x[r * p->k + c];
    return sum;
}

static void check_product(const struct product *p, mt_gemm_layout layout)
{
    bool along = layout == MT_GEMM_TN, wgrad = layout == MT_GEMM_NT;
    int64_t width = along ? p->n : p->k, at = 0;
    int64_t count = wgrad ? MEMBERS * p->n * p->k : p->start[MEMBERS] * width;
    double *d = test_alloc(count, MT_F64); /* NaN */
    const double *a = wgrad ? p->x : p->w, *b = along ? p->x : p->dy;
    for (int e = 0; e < MEMBERS; e++) {
        mt_lt_shape s = mt_lt_shape_of(layout, p->n, p->k, p->rows[e]);
        mt_lt_place x = mt_lt_place_of(layout, p->n, p->k, e, p->start[e]);
        multiply(d + x.d, a + x.a, b + x.b, &s);
    }
    for (int e = 0; e < MEMBERS; e++)
        for (int64_t i = 0; i < (wgrad ? p->n : p->rows[e]); i++)
            for (int64_t c = 0; c < width; c++, at++)
                assert_true(d[at] == expected(p, layout, e, i, c));
    assert_int_equal(at, count);
    test_free(d);
}

static void layouts(void **state)
{
    (void)state;
    static const int64_t rows[][MEMBERS] = { { 3, 0, 7, 1 }, { 0, 0, 5, 0 }, { 4, 4, 4, 4 } };
    static const int64_t sizes[][2] = { { 5, 9 }, { 9, 5 }, { 1, 8 }, { 8, 1 }, { 6, 6 } };
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            struct product p = make(sizes[s][0], sizes[s][1], rows[r]);
            for (int l = 0; l < MT_GEMM_LAYOUT_COUNT; l++) check_product(&p, (mt_gemm_layout)l);
            test_free(p.x), test_free(p.dy), test_free(p.w);
        }
}

static void alignment(void **state)
{
    (void)state;
    char memory[MOST] __attribute__((aligned(MOST)));
    assert_int_equal(mt_lt_alignment(memory, 8, 2), 16);
    assert_int_equal(mt_lt_alignment(memory, 4, 4), 16);
    assert_int_equal(mt_lt_alignment(memory, 512, 2), 16);
    assert_int_equal(mt_lt_alignment(memory, 4, 2), 8);
    assert_int_equal(mt_lt_alignment(memory, 37, 2), 2);
    assert_int_equal(mt_lt_alignment(memory, 37, 4), 4);
    assert_int_equal(mt_lt_alignment(memory + 4, 8, 2), 4);
    assert_int_equal(mt_lt_alignment(memory + 2, 8, 2), 2);
    assert_int_equal(mt_lt_alignment(memory + 48, 24, 2), 16);
}

/* ---- what may be asked for ---------------------------------------------------------------------
 */

static void versions(void **state)
{
    (void)state;
    assert_false(mt_lt_has_grouped(130100, 90));
    assert_false(mt_lt_has_grouped(130399, 90));
    assert_true(mt_lt_has_grouped(130400, 90));
    assert_true(mt_lt_has_grouped(130802, 90));
    assert_true(mt_lt_has_grouped(130802, 103));
    assert_false(mt_lt_has_grouped(130802, 80));
    assert_false(mt_lt_has_grouped(130802, 89));
    assert_false(mt_lt_has_grouped(130802, 120));
}

static void asked(const char *value, const char *cpu, const char *cuda)
{
    if (value)
        setenv("MIXTAPE_KERNELS", value, 1);
    else
        unsetenv("MIXTAPE_KERNELS");
    const char *got[] = { mt_kernel_set_asked("cpu"), mt_kernel_set_asked("cuda") };
    const char *want[] = { cpu, cuda };
    for (int i = 0; i < 2; i++) {
        assert_int_equal(!got[i], !want[i]);
        if (want[i]) assert_string_equal(got[i], want[i]);
    }
}

/* A name counts for the backend that has it; one that nobody has is refused by any. */
static void kernel_sets(void **state)
{
    (void)state;
    const char *before = getenv("MIXTAPE_KERNELS");
    char *kept = before ? strdup(before) : NULL;
    mt_device *device;
    asked(NULL, NULL, NULL);
    asked("", NULL, NULL);
    asked("avx2", "avx2", NULL);
    asked("sm_90a", NULL, "sm_90a");
    asked("cublaslt", NULL, "cublaslt");
    asked("cublaslt_loop", NULL, "cublaslt_loop");
    asked("cublas", "cublas", "cublas");
    asked("portable avx2", "portable avx2", "portable avx2");
    assert_fails(mt_device_open(&device, "cpu", NULL, 1), MT_ECONFIG, "'portable avx2' is not one");
    asked("cublaslt_grouped", NULL, "cublaslt_grouped");
    assert_ok(mt_device_open(&device, "cpu", NULL, 1));
    mt_device_destroy(&device);
    if (kept) setenv("MIXTAPE_KERNELS", kept, 1);
    if (!kept) unsetenv("MIXTAPE_KERNELS");
    free(kept);
}

#ifdef MT_HAVE_cuda

static void refusals(void **state)
{
    (void)state;
    mt_cublaslt *lt = NULL;
    setenv("MIXTAPE_CUBLASLT", "/nowhere/libcublasLt.so.13", 1);
    assert_fails(mt_cublaslt_open(&lt, MT_LT_OURS, 90), MT_EDEVICE, "MIXTAPE_CUBLASLT names");
    assert_null(lt);
    setenv("MIXTAPE_CUBLASLT", "libm.so.6", 1);
    assert_fails(mt_cublaslt_open(&lt, MT_LT_OURS, 90), MT_EDEVICE, "has no cublasLtGetVersion");
    assert_null(lt);
    unsetenv("MIXTAPE_CUBLASLT");
    mt_status status = mt_cublaslt_open(&lt, MT_LT_GROUPED, 80); /* without the library, that */
    assert_int_equal(status, MT_EDEVICE);
    assert_null(lt);
    mt_cublaslt_close(&lt);
}

/* ---- on a GPU ----------------------------------------------------------------------------------
 */

static const int64_t counts[MEMBERS] = { 40, 0, 129, 7 };
enum { N = 64, K = 96, ROWS = 176, CAPACITY = 190 };

struct call {
    int64_t first_dims[MEMBERS], offsets[MEMBERS + 1];
    mt_qtensor w, x;
    struct mt_gemm_args args;
    void *values[2];
};

static void make_call(struct call *c)
{
    for (int e = 0; e < MEMBERS; e++) {
        c->first_dims[e] = counts[e];
        c->offsets[e + 1] = c->offsets[e] + counts[e] * K;
    }
    c->values[0] = test_alloc(MEMBERS * N * K, MT_BF16);
    c->values[1] = test_alloc(CAPACITY * K, MT_BF16);
    test_random(c->values[0], MEMBERS * N * K, MT_BF16, 1, 1);
    test_random(c->values[1], CAPACITY * K, MT_BF16, 1, 2);
    c->w = mt_qtensor_plain(mt_group_uniform(MEMBERS, N, K), MT_BF16, c->values[0]);
    c->x = mt_qtensor_plain(mt_group_ragged_rows(MEMBERS, CAPACITY, K, c->first_dims, c->offsets),
                            MT_BF16, c->values[1]);
    c->args = (struct mt_gemm_args){ .dtype = MT_BF16,
                                     .layout = MT_GEMM_TN,
                                     .a = &c->w,
                                     .b = &c->x,
                                     .d = test_alloc(CAPACITY * N, MT_BF16),
                                     .d_dtype = MT_BF16 };
}

static void free_call(struct call *c)
{
    test_free(c->values[0]), test_free(c->values[1]), test_free(c->args.d);
}

/* Opens a set that a test of this program is about; false: not on this machine. */
static bool open_set(mt_device **device, const char *name)
{
    if (strcmp(test_device_name(), "cuda") != 0) return false;
    unsetenv("MT_SYNC"); /* which records no graphs */
    mt_status status = test_open(device, "cuda", name, 0);
    if (status != MT_EDEVICE) assert_ok(status);
    return status == MT_OK;
}

static void check_path(mt_device *device, const struct mt_gemm_args *args, const char *words)
{
    char text[MT_GEMM_TEXT];
    mt_stream stream = { device, NULL };
    assert_ok(device->kernels[MT_BF16]->gemm_chosen(text, &stream, args));
    if (!strstr(text, words)) fail_msg("'%s' does not say '%s'", text, words);
}

static void check_record(const char *name, const char *path)
{
    mt_device *device;
    mt_graph graph;
    struct call *c = calloc(1, sizeof *c);
    size_t bytes = (size_t)ROWS * N * 2;
    if (!open_set(&device, name)) {
        free(c);
        return;
    }
    mt_stream stream = { device, NULL };
    make_call(c);
    void *first = test_alloc(ROWS * N, MT_BF16);
    check_path(device, &c->args, path);
    assert_ok(mt_gemm(&stream, &c->args));
    assert_ok(mt_device_synchronize(device));
    memcpy(first, c->args.d, bytes);
    memset(c->args.d, 0xff, bytes);
    assert_ok(mt_graph_begin(device));
    mt_status status = mt_gemm(&stream, &c->args);
    assert_ok(mt_graph_end(&graph, device, status == MT_OK));
    assert_ok(status);
    for (int i = 0; i < 2; i++) assert_ok(mt_graph_launch(&graph));
    assert_ok(mt_device_synchronize(device));
    assert_memory_equal(first, c->args.d, bytes);
    float *bias = test_alloc(MEMBERS * N, MT_F32);
    test_random(bias, MEMBERS * N, MT_F32, 1, 3);
    c->args.bias = bias;
    check_path(device, &c->args, "bias");
    mt_graph_destroy(&graph);
    test_free(first), test_free(bias), free_call(c);
    free(c);
    mt_device_destroy(&device);
}

static void recorded(void **state)
{
    (void)state;
    check_record("cublaslt_grouped", "cuBLASLt, grouped");
    check_record("cublaslt", "not cuBLASLt: ragged rows");
}

/* The loop waits for the device, so it is never recorded. */
static void loop(void **state)
{
    (void)state;
    mt_device *device;
    struct call c = { 0 };
    if (!open_set(&device, "cublaslt_loop")) return;
    make_call(&c);
    assert_false(mt_device_records(device));
    assert_fails(mt_graph_begin(device), MT_EUNSUPPORTED, "cublaslt_loop");
    check_path(device, &c.args, "cuBLASLt, a call per member");
    free_call(&c);
    mt_device_destroy(&device);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts),     cmocka_unit_test(alignment), cmocka_unit_test(versions),
        cmocka_unit_test(kernel_sets),
#ifdef MT_HAVE_cuda
        cmocka_unit_test(refusals),    cmocka_unit_test(recorded),  cmocka_unit_test(loop),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
