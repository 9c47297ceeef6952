/* The grouped GEMM against an f64 (long double) product of the same operands: every kernel set that
 * this machine runs (or the one in MIXTAPE_KERNELS), dtype, layout, form of weight, and shape; the
 * threads must not show. */
#include "tests/support/test.h"

#include <math.h>
#include <stdlib.h>

#include "core/rng.h"

enum { MOST_MEMBERS = 8, TAIL = 3, MOST_THREADS = 3 };

struct shape {
    int64_t members, n, k;
    bool ragged; /* else every member has rows[0] */
    int64_t rows[MOST_MEMBERS];
};

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
    { 2, 1032, 64, false, { 0 } },
    { 1, 40, 72, false, { 2048 } },
    { 1, 24, 200, false, { 1024 } },
    { 1, 8, 8, false, { 0 } },
    { 3, 31, 48, true, { 0, 0, 0 } },
    { 0, 31, 48, false, { 4 } },
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* How the operands and the result of one call are given. Wide means real (f32, or f64 for f64). */
struct form {
    bool packed, wide_w, wide_x, wide_d;
    enum { NO_C, SAME_C, OTHER_C } c;
    bool bias;
    bool (*has)(mt_gemm_layout layout);
};

static bool any(mt_gemm_layout layout)
{
    (void)layout;
    return true;
}

static bool weighted(mt_gemm_layout layout)
{
    return layout != MT_GEMM_NT;
}

static bool fprop(mt_gemm_layout layout)
{
    return layout == MT_GEMM_TN;
}

static bool wgrad(mt_gemm_layout layout)
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
static void *operand(void **wide, int64_t count, int64_t tail, const struct problem *p,
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

static mt_group rows_group(const struct problem *p, int64_t width, const int64_t *offsets)
{
    return p->s.ragged
               ? mt_group_ragged_rows(p->s.members, p->rows + TAIL, width, p->first_dims, offsets)
               : mt_group_uniform(p->s.members, p->s.rows[0], width);
}

static int64_t result_count(const struct problem *p, mt_gemm_layout layout)
{
    return layout == MT_GEMM_NT ? p->weights : p->rows * (layout == MT_GEMM_TN ? p->s.n : p->s.k);
}

/* The sum and the sum of absolute products of every element of a layout's result. */
static void reference(struct problem *p, mt_gemm_layout layout)
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

static struct problem *make(mt_device *device, const struct shape *s, mt_dtype dtype, bool special)
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

static void unmake(struct problem *p)
{
    void *all[] = { p->x[0],   p->x[1],      p->dy[0],     p->dy[1],   p->w[0],
                    p->w[1],   p->packed[0], p->packed[1], p->bias,    p->sum[0],
                    p->sum[1], p->sum[2],    p->size[0],   p->size[1], p->size[2] };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) test_free(all[i]);
    free(p);
}

/* Element i of C, which every type of a result of dtype holds. */
static double c_at(const struct problem *p, int64_t i, int64_t count)
{
    double x = 0.5 - (double)i / (double)count;
    if (p->dtype == MT_F64) return x;
    if (p->dtype == MT_F32) return (double)(float)x;
    return (double)mt_bf16_to_f32(mt_f32_to_bf16((float)x));
}

/* The result of one call, tail included, in new memory. */
static void *run(mt_device *device, struct problem *p, mt_gemm_layout layout, const struct form *f)
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
    assert_ok(mt_gemm(&stream, &(struct mt_gemm_args){
                                   .dtype = p->dtype,
                                   .layout = layout,
                                   .a = layout == MT_GEMM_NT ? &x : &w,
                                   .b = layout == MT_GEMM_TN ? &x : &dy,
                                   .d = d,
                                   .d_dtype = d_dtype,
                                   .c = c,
                                   .bias = f->bias ? p->bias : NULL,
                               }));
    for (int64_t i = 0; i < tail * (int64_t)mt_dtype_size(d_dtype); i++)
        if (((unsigned char *)d)[count * (int64_t)mt_dtype_size(d_dtype) + i] != 0xff)
            fail_msg("the capacity tail was written at byte %lld", (long long)i);
    if (f->c == OTHER_C) test_free(c);
    return d;
}

/* Bound of NUMERICS section 5 with K + 1 roundings, C and bias among the terms, and one output
 * rounding. */
static void verify(mt_device *device, const struct problem *p, mt_gemm_layout layout,
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
