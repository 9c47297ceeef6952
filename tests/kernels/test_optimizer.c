/* AdamW bit for bit against the formula in scalar code, and the gradient norm against long double.
 */
#include "tests/kernels/threads.h"

enum { MOST = 100003 };

static const int64_t counts[] = { 0, 1, 7, 33, 4095, 4096, 4097, 40000, MOST };
enum { COUNTS = sizeof counts / sizeof counts[0] };

static const struct mt_step_state fresh = { .lr = 1e-3, .power1 = 1, .power2 = 1 };
static const double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;

/* Flat buffers of one optimizer. */
struct adam {
    mt_dtype dtype;
    int64_t count;
    void *p, *m, *v, *grad;
    struct mt_step_state *state;
};

static struct adam adam_make(mt_dtype dtype, int64_t count)
{
    struct adam a = { dtype,
                      count,
                      test_alloc(count, dtype),
                      test_alloc(count, dtype),
                      test_alloc(count, dtype),
                      test_alloc(count, dtype),
                      test_alloc(sizeof *a.state, MT_U8) };
    test_random(a.p, count, dtype, 1, 1);
    memset(a.m, 0, (size_t)count * mt_dtype_size(dtype));
    memset(a.v, 0, (size_t)count * mt_dtype_size(dtype));
    *a.state = fresh;
    return a;
}

static void adam_free(struct adam *a)
{
    test_free(a->p), test_free(a->m), test_free(a->v), test_free(a->grad), test_free(a->state);
}

/* Gradients of step t: of all sizes, some 0, some subnormal. */
static void set_grad(struct adam *a, uint64_t t)
{
    test_random(a->grad, a->count, a->dtype, 1, 100 + t);
    for (int64_t i = 0; i < a->count; i += 5) mt_store_f64(a->grad, a->dtype, i, i % 2 ? 0 : 1e-41);
    for (int64_t i = 3; i < a->count; i += 11) mt_store_f64(a->grad, a->dtype, i, 1e6);
}

static void adam_step_with_loss(struct adam *a, int threads, double max_norm, const void *loss)
{
    mt_stream stream = on_threads(threads);
    assert_ok(mt_grad_norm(&stream, &(struct mt_grad_norm_args){ .dtype = a->dtype,
                                                                 .count = a->count,
                                                                 .max_norm = max_norm,
                                                                 .beta1 = beta1,
                                                                 .beta2 = beta2,
                                                                 .grad = a->grad,
                                                                 .loss = loss,
                                                                 .state = a->state }));
    assert_ok(mt_adamw(&stream, &(struct mt_adamw_args){ .dtype = a->dtype,
                                                         .count = a->count,
                                                         .beta1 = beta1,
                                                         .beta2 = beta2,
                                                         .eps = eps,
                                                         .decay = decay,
                                                         .p = a->p,
                                                         .m = a->m,
                                                         .v = a->v,
                                                         .grad = a->grad,
                                                         .state = a->state }));
}

static void adam_step(struct adam *a, int threads, double max_norm)
{
    adam_step_with_loss(a, threads, max_norm, NULL);
}

/* NUMERICS section 6 with volatile steps: one rounding each, in the order written. */
static void scalar_f32(float *p, float *m, float *v, float grad, const struct mt_step_state *s)
{
    volatile float b1 = (float)beta1, b2 = (float)beta2, r1 = (float)(1 - beta1),
                   r2 = (float)(1 - beta2);
    volatile float g = grad * (float)s->clip, kept = b1 * *m, added = r1 * g;
    *m = kept + added;
    volatile float scaled = r2 * g, square = scaled * g, old = b2 * *v;
    *v = old + square;
    volatile float mean = *m / (float)s->bias1, variance = *v / (float)s->bias2,
                   root = sqrtf(variance);
    volatile float below = root + (float)eps, u = mean / below, shrink = (float)decay * *p;
    volatile float both = u + shrink, step = (float)s->lr * both;
    *p = *p - step;
}

static void scalar_f64(double *p, double *m, double *v, double grad, const struct mt_step_state *s)
{
    volatile double r1 = 1 - beta1, r2 = 1 - beta2, g = grad * s->clip;
    volatile double kept = beta1 * *m, added = r1 * g;
    *m = kept + added;
    volatile double scaled = r2 * g, square = scaled * g, old = beta2 * *v;
    *v = old + square;
    volatile double mean = *m / s->bias1, variance = *v / s->bias2, root = sqrt(variance);
    volatile double below = root + eps, u = mean / below, shrink = decay * *p;
    volatile double both = u + shrink, step = s->lr * both;
    *p = *p - step;
}

static void scalar_step(struct adam *a)
{
    for (int64_t i = 0; i < a->count; i++)
        if (a->dtype == MT_F64)
            scalar_f64((double *)a->p + i, (double *)a->m + i, (double *)a->v + i,
                       ((double *)a->grad)[i], a->state);
        else
            scalar_f32((float *)a->p + i, (float *)a->m + i, (float *)a->v + i,
                       ((float *)a->grad)[i], a->state);
}

static void equal_bits(const char *what, const struct adam *a, const struct adam *b)
{
    size_t bytes = (size_t)a->count * mt_dtype_size(a->dtype);
    if (bytes == 0) return;
    if (memcmp(a->p, b->p, bytes) || memcmp(a->m, b->m, bytes) || memcmp(a->v, b->v, bytes))
        fail_msg("%s: %s of %lld elements differ", what, mt_dtype_name(a->dtype),
                 (long long)a->count);
}

static void test_adamw_bits(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++)
        for (int i = 0; i < COUNTS; i++)
            for (int clipped = 0; clipped < 2; clipped++) {
                struct adam a[MAX_THREADS], want = adam_make(dtypes[d], counts[i]);
                for (int j = 0; j < MAX_THREADS; j++) a[j] = adam_make(dtypes[d], counts[i]);
                for (uint64_t t = 0; t < 4; t++) {
                    set_grad(&want, t);
                    for (int j = 0; j < MAX_THREADS; j++) {
                        set_grad(&a[j], t);
                        adam_step(&a[j], j + 1, clipped ? 0.5 : 0);
                        assert_memory_equal(a[j].state, a[0].state, sizeof *a[0].state);
                    }
                    *want.state = *a[0].state;
                    scalar_step(&want);
                    for (int j = 0; j < MAX_THREADS; j++) equal_bits("adamw", &a[j], &want);
                }
                for (int j = 0; j < MAX_THREADS; j++) adam_free(&a[j]);
                adam_free(&want);
            }
}

/* 50 steps against the textbook in f64. m and v are convex averages, so their relative errors stay
 * within a few rounding units per remembered step (1 / (1 - beta) of them); u is then within 64
 * units, and p gathers one unit a step. */
static void test_adamw_textbook(void **state)
{
    (void)state;
    enum { N = 500, STEPS = 50 };
    static double p[N], m[N], v[N];
    struct adam a = adam_make(MT_F32, N);
    for (int i = 0; i < N; i++) p[i] = (double)((float *)a.p)[i], m[i] = v[i] = 0;
    for (int t = 1; t <= STEPS; t++) {
        test_random(a.grad, N, MT_F32, 1, (uint64_t)t);
        adam_step(&a, 1, 0);
        for (int i = 0; i < N; i++) {
            double g = (double)((float *)a.grad)[i];
            m[i] = beta1 * m[i] + (1 - beta1) * g;
            v[i] = beta2 * v[i] + (1 - beta2) * g * g;
            double u = m[i] / (1 - pow(beta1, t)) / (sqrt(v[i] / (1 - pow(beta2, t))) + eps);
            p[i] -= 1e-3 * (u + decay * p[i]);
        }
    }
    test_assert_near("p", a.p, MT_F32, p, N, STEPS * (0x1p-24 + 1e-3 * 64 * 0x1p-24), 0);
    assert_int_equal(a.state->applied, STEPS);
    assert_true(fabs(a.state->bias1 - (1 - pow(beta1, STEPS))) < STEPS * 0x1p-52);
    adam_free(&a);
}

static void test_grad_norm(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++)
        for (int i = 0; i < COUNTS; i++) {
            struct adam a = adam_make(dtypes[d], counts[i]);
            set_grad(&a, 9);
            long double sum = 0;
            for (int64_t j = 0; j < a.count; j++) {
                long double g = (long double)mt_load_f64(a.grad, a.dtype, j);
                sum += g * g;
            }
            double norm = (double)sqrtl(sum);
            adam_step(&a, 2, 0.25);
            /* squares and their sum: at most count + 1 roundings of positive terms, halved by the
             * root */
            double limit = norm * (double)(a.count + 4) * 0x1p-53;
            assert_true(fabs(a.state->grad_norm - norm) <= limit);
            double clip = 0.25 / (a.state->grad_norm + 1e-6);
            assert_true(a.state->clip == (clip < 1 ? clip : 1));
            assert_int_equal(a.state->skip, 0);
            adam_free(&a);
        }
}

/* The norm as the contract orders its sums: lane l of 16 adds elements l, l + 16, ... of a block of
 * 4096, the lanes in pairs, runs of blocks, the runs. */
static double scalar_norm(const void *grad, mt_dtype dtype, int64_t count)
{
    volatile double sum = 0, run = 0;
    for (int64_t block = 0; block * 4096 < count; block++) {
        volatile double lane[16] = { 0 };
        int64_t first = block * 4096, n = count - first < 4096 ? count - first : 4096;
        for (int64_t i = 0; i < n; i++) {
            double g = mt_load_f64(grad, dtype, first + i);
            volatile double square = g * g;
            lane[i % 16] += square;
        }
        for (int half = 8; half > 0; half /= 2)
            for (int l = 0; l < half; l++) lane[l] += lane[l + half];
        run += lane[0];
        if ((block + 1) % MT_NORM_RUN == 0) sum += run, run = 0;
    }
    return sqrt(sum + run);
}

static void expect_norm(const void *grad, mt_dtype dtype, int64_t count)
{
    struct mt_step_state *s = test_alloc(sizeof *s, MT_U8);
    mt_stream stream = on_threads(1);
    bool half = dtype == MT_BF16;
    *s = fresh;
    assert_ok(mt_grad_norm(&stream, &(struct mt_grad_norm_args){ .dtype = half ? MT_F32 : dtype,
                                                                 .count = half ? 0 : count,
                                                                 .grad = half ? NULL : grad,
                                                                 .bf16_count = half ? count : 0,
                                                                 .bf16_grad = half ? grad : NULL,
                                                                 .state = s }));
    double want = scalar_norm(grad, dtype, count);
    if (isnan(want) ? !isnan(s->grad_norm) : s->grad_norm != want)
        fail_msg("the norm of %lld elements of %s is %.17g, must be %.17g", (long long)count,
                 mt_dtype_name(dtype), s->grad_norm, want);
    assert_int_equal(s->skip, !isfinite(want));
    test_free(s);
}

/* Bit for bit, whole blocks and parts of them, wherever the gradient begins. A scale for each
 * element lets an order of sums show; what lies behind the gradient is NaN. */
static void test_norm_bits(void **state)
{
    (void)state;
    static const int64_t sizes[] = { 1,     15,    16,    17,    511,   512,    513,     1535,
                                     1537,  4095,  4096,  4097,  8191,  8192,   8193,    12287,
                                     12288, 12289, 16384, 24581, 65536, 100003, 2097152, 2101249 };
    enum { SIZES = sizeof sizes / sizeof *sizes };
    for (int d = 0; d < 3; d++)
        for (int i = 0; i < SIZES; i++)
            for (int shift = 0; shift < 4; shift += shift ? 2 : 1) {
                size_t size = mt_dtype_size(dtypes[d]);
                unsigned char *all = test_alloc(sizes[i] + 3 + 16, dtypes[d]);
                void *grad = all + (size_t)shift * size;
                test_random(grad, sizes[i], dtypes[d], 1, 7);
                for (int64_t j = 0; j < sizes[i]; j++)
                    mt_store_f64(grad, dtypes[d], j,
                                 ldexp(mt_load_f64(grad, dtypes[d], j), (int)(j * 7 % 61) - 30));
                expect_norm(grad, dtypes[d], sizes[i]);
                static const double bad[] = { HUGE_VAL, -HUGE_VAL, (double)NAN };
                for (int b = 0; b < 3 && sizes[i] <= 24581; b++) {
                    mt_store_f64(grad, dtypes[d], b < 2 ? sizes[i] - 1 : sizes[i] / 2, bad[b]);
                    expect_norm(grad, dtypes[d], sizes[i]);
                }
                test_free(all);
            }
}

/* Gradients in bf16 come after the others, in blocks of their own: the same bits as one buffer of
 * f32 whose first part is filled up with zeros. Of all sizes, so that an order of sums would show.
 */
static void test_bf16_norm(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = { { 0, 0 },        { 0, 1 },      { 5, 0 },
                                        { 4096, 4096 },  { 5000, 3 },   { 1, 4097 },
                                        { 100, 123457 }, { 40000, 33 }, { 70000, 300001 } };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t n = sizes[i][0], first = (n + 4095) / 4096 * 4096, m = sizes[i][1];
        float *grad = test_alloc(n, MT_F32), *all = test_alloc(first + m, MT_F32);
        uint16_t *half = test_alloc(m, MT_U16);
        struct mt_step_state *s = test_alloc(2 * sizeof *s, MT_U8);
        memset(all, 0, (size_t)(first + m) * sizeof *all);
        test_random(grad, n, MT_F32, 1, 5), memcpy(all, grad, (size_t)n * sizeof *all);
        for (int64_t j = 0; j < m; j++) {
            half[j] = mt_f32_to_bf16(ldexpf((float)j * 0.37f - 100, (int)(j * 7 % 61) - 30));
            all[first + j] = mt_bf16_to_f32(half[j]);
        }
        struct mt_grad_norm_args args = {
            .dtype = MT_F32, .count = first + m, .grad = all, .max_norm = 1, .state = s
        };
        for (int bad = 0; bad < 2; bad++) {
            mt_stream stream = on_threads(bad + 1);
            s[0] = s[1] = fresh;
            args.count = first + m, args.grad = all, args.bf16_count = 0, args.state = s;
            assert_ok(mt_grad_norm(&stream, &args));
            args.count = n, args.grad = grad, args.state = s + 1;
            args.bf16_count = m, args.bf16_grad = half;
            assert_ok(mt_grad_norm(&stream, &args));
            assert_memory_equal(s, s + 1, sizeof *s);
            assert_int_equal(s->skip, bad && m > 0);
            if (m > 0) half[m - 1] = 0x7f80, all[first + m - 1] = HUGE_VALF;
        }
        test_free(grad), test_free(all), test_free(half), test_free(s);
    }
}

/* A gradient or a loss that is not finite changes nothing but the counts of skipped steps. */
static void test_skip(void **state)
{
    (void)state;
    static const double bad[] = { HUGE_VAL, -HUGE_VAL, (double)NAN };
    for (int d = 0; d < 2; d++) {
        struct adam a = adam_make(dtypes[d], 5000), before = adam_make(dtypes[d], 5000);
        set_grad(&a, 1), set_grad(&before, 1);
        adam_step(&a, 2, 1), adam_step(&before, 2, 1);
        for (int i = 0; i < 3; i++) {
            set_grad(&a, 2);
            mt_store_f64(a.grad, a.dtype, 4321, bad[i]);
            adam_step(&a, 2, 1);
            assert_int_equal(a.state->skip, 1);
            assert_int_equal(a.state->skipped, i + 1);
            assert_int_equal(a.state->skipped_in_a_row, i + 1);
            assert_int_equal(a.state->applied, 1);
            assert_true(a.state->power1 == before.state->power1);
            equal_bits("a skipped step", &a, &before);
        }
        unsigned char loss[8];
        set_grad(&a, 3), set_grad(&before, 3);
        mt_store_f64(loss, a.dtype, 0, (double)NAN);
        adam_step_with_loss(&a, 2, 1, loss);
        assert_int_equal(a.state->skipped_in_a_row, 4);
        equal_bits("a step with a bad loss", &a, &before);
        mt_store_f64(loss, a.dtype, 0, 2);
        adam_step_with_loss(&a, 2, 1, loss), adam_step(&before, 2, 1);
        equal_bits("after skipping", &a, &before);
        assert_int_equal(a.state->skip, 0);
        assert_int_equal(a.state->skipped, 4);
        assert_int_equal(a.state->skipped_in_a_row, 0);
        assert_int_equal(a.state->applied, 2);
        adam_free(&a), adam_free(&before);
    }
}

static void test_arguments(void **state)
{
    (void)state;
    mt_stream stream = on_threads(1);
    struct mt_step_state s = fresh;
    float x[4] = { 0 };
    struct mt_adamw_args a = {
        .dtype = MT_F32, .count = 4, .p = x, .m = x, .v = x, .grad = x, .state = &s
    };
    struct mt_grad_norm_args n = { .dtype = MT_F32, .count = 4, .grad = x };
    assert_fails(mt_grad_norm(&stream, &n), MT_EINVAL, "state is NULL");
    n.state = &s, n.beta2 = 1;
    assert_fails(mt_grad_norm(&stream, &n), MT_EINVAL, "beta2 1");
    a.dtype = MT_BF16;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "must be f32 or f64");
    a.dtype = MT_F32, a.count = -1;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "count is -1");
    a.count = 4, a.grad = NULL;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "grad is NULL");
    a.grad = x, a.cast = (uint16_t *)(void *)x, a.master = MT_MASTER_SPLIT;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "must be f32 as it is");
    a.dtype = MT_F64, a.cast = NULL, a.master = MT_MASTER_REAL, a.grad_bf16 = true;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "f64 has no gradient in bf16");
    n.beta2 = 0, n.bf16_count = 3;
    assert_fails(mt_grad_norm(&stream, &n), MT_EINVAL, "bf16_grad is NULL");
    n.dtype = MT_F64, n.bf16_grad = (const uint16_t *)(const void *)x;
    assert_fails(mt_grad_norm(&stream, &n), MT_EINVAL, "f64 has no gradients in bf16");
}

/* ---- params that are updated together ----------------------------------------------------------
 */

/* Memory of a param, in any form; `shift` elements are before its first one. */
enum { ARRAYS = 8, WIDEST = 8 };
struct piece {
    int64_t count;
    int shift;
    void *array[ARRAYS]; /* p, p_low, cast, m, v, m_scales, v_scales, grad */
};

static struct piece piece_make(int i)
{
    static const int64_t sizes[] = { 1, 0, 128, 127, 129, 5000, 3, 1024, 40001 };
    struct piece x = { .count = sizes[i % (int)(sizeof sizes / sizeof sizes[0])], .shift = i % 3 };
    for (int k = 0; k < ARRAYS; k++) {
        const int64_t bytes = (x.count + x.shift + 1) * WIDEST;
        x.array[k] = test_alloc(bytes, MT_U8);
        memset(x.array[k], 0, (size_t)bytes);
    }
    return x;
}

static void piece_free(struct piece *x)
{
    for (int k = 0; k < ARRAYS; k++) test_free(x->array[k]);
}

/* Of param i: some decay, some have a copy cast, some gradients in bf16. */
static struct mt_adamw_args piece_args(const struct piece *x, const struct mt_adamw_args *form,
                                       int i)
{
    struct mt_adamw_args a = *form;
    const size_t real = mt_dtype_size(a.dtype), at = (size_t)x->shift;
    const bool split = a.master == MT_MASTER_SPLIT;
    a.count = x->count, a.param = (uint32_t)i, a.first = 128 * i, a.decay = i % 2 ? decay : 0;
    a.p = (char *)x->array[0] + at * (split ? sizeof(uint16_t) : real);
    a.p_low = split ? (int16_t *)x->array[1] + at : NULL;
    a.cast = !split && a.dtype == MT_F32 && i % 4 < 2 ? (uint16_t *)x->array[2] + at : NULL;
    a.m = (char *)x->array[3] + at * mt_moments_size(a.moments, a.dtype);
    a.v = (char *)x->array[4] + at * mt_moments_size(a.moments, a.dtype);
    a.m_scales = a.moments == MT_MOMENTS_FP8 ? (float *)x->array[5] + at : NULL;
    a.v_scales = a.moments == MT_MOMENTS_FP8 ? (float *)x->array[6] + at : NULL;
    a.grad_bf16 = a.dtype == MT_F32 && i % 5 == 3;
    a.grad = (char *)x->array[7] + at * (a.grad_bf16 ? sizeof(uint16_t) : real);
    return a;
}

/* Several, more than any launch holds, as one by one. */
static void updates_together(struct mt_adamw_args form)
{
    enum { PARAMS = 47, STEPS = 3 };
    static struct piece one[PARAMS], all[PARAMS];
    static struct mt_adamw_args list[PARAMS];
    mt_stream stream = on_threads(2);
    struct mt_step_state *state = test_alloc(sizeof *state, MT_U8);
    *state = fresh;
    form.beta1 = beta1, form.beta2 = beta2, form.eps = eps, form.seed = 11, form.state = state;
    for (int i = 0; i < PARAMS; i++) one[i] = piece_make(i), all[i] = piece_make(i);
    for (int t = 1; t <= STEPS; t++) {
        state->applied = t, state->bias1 = 1 - pow(beta1, t), state->bias2 = 1 - pow(beta2, t);
        state->clip = 0.5, state->skip = t == 2;
        for (int i = 0; i < PARAMS; i++) {
            struct mt_adamw_args a = piece_args(&one[i], &form, i);
            list[i] = piece_args(&all[i], &form, i);
            const mt_dtype dtype = a.grad_bf16 ? MT_BF16 : a.dtype;
            test_random((void *)(uintptr_t)a.grad, a.count, dtype, 1, (uint64_t)(t * PARAMS + i));
            memcpy((void *)(uintptr_t)list[i].grad, a.grad, (size_t)a.count * mt_dtype_size(dtype));
            if (i) list[i - 1].next = &list[i];
            assert_ok(mt_adamw(&stream, &a));
        }
        assert_ok(mt_adamw(&stream, list));
        for (int i = 0; i < PARAMS; i++)
            for (int k = 0; k < ARRAYS; k++)
                assert_memory_equal(one[i].array[k], all[i].array[k],
                                    (size_t)(one[i].count + one[i].shift + 1) * WIDEST);
    }
    uint8_t any = 0;
    for (int64_t i = 0; i < one[5].count; i++) any |= ((const uint8_t *)one[5].array[3])[i];
    assert_true(any); /* moments, which began at 0 */
    for (int i = 0; i < PARAMS; i++) piece_free(&one[i]), piece_free(&all[i]);
    test_free(state);
}

static void test_together(void **state)
{
    (void)state;
    updates_together((struct mt_adamw_args){ .dtype = MT_F32 });
    updates_together((struct mt_adamw_args){ .dtype = MT_F64 });
    for (int m = 0; m < MT_MOMENTS_COUNT; m++)
        for (int split = 0; split < 2; split++)
            for (int sr = 0; sr <= (m == MT_MOMENTS_BF16); sr++)
                updates_together((struct mt_adamw_args){
                    .dtype = MT_F32,
                    .moments = (mt_moments)m,
                    .master = split ? MT_MASTER_SPLIT : MT_MASTER_REAL,
                    .stochastic = sr,
                });
}

/* What goes together is of one kind. */
static void test_others(void **state)
{
    (void)state;
    mt_stream stream = on_threads(1);
    struct mt_step_state s = fresh;
    float x[4] = { 0 };
    struct mt_adamw_args a = {
        .dtype = MT_F32, .count = 4, .p = x, .m = x, .v = x, .grad = x, .param = 3, .state = &s
    };
    struct mt_adamw_args b = a;
    a.next = &b, b.param = 4, b.beta1 = 0.5;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "param 4 goes with param 3");
    b.beta1 = 0, b.seed = 1;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "param 4 goes with param 3");
    b.seed = 0, b.moments = MT_MOMENTS_BF16;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "are others");
    b.moments = MT_MOMENTS_REAL, b.v = NULL;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "v is NULL");
    b.v = x, b.first = 5;
    assert_fails(mt_adamw(&stream, &a), MT_EINVAL, "first is 5");
}

/* The kernel sets of this machine agree to the bit. */
static void test_kernel_sets_agree(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++) {
        struct adam want = adam_make(dtypes[d], 40000);
        mt_device *mine = devices[0];
        bool first = true;
        for (int i = 0; i < TEST_SETS; i++) {
            const char *name;
            if (!test_open_set(&devices[0], &name, i, 1)) continue;
            struct adam a = adam_make(dtypes[d], 40000);
            set_grad(&a, 1);
            adam_step(&a, 1, 1);
            if (first) {
                first = false;
                set_grad(&want, 1);
                *want.state = *a.state;
                scalar_step(&want);
            }
            assert_memory_equal(a.state, want.state, sizeof *a.state);
            equal_bits(name, &a, &want);
            adam_free(&a);
            mt_device_destroy(&devices[0]);
        }
        devices[0] = mine;
        adam_free(&want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_adamw_bits), cmocka_unit_test(test_adamw_textbook),
        cmocka_unit_test(test_grad_norm),  cmocka_unit_test(test_norm_bits),
        cmocka_unit_test(test_bf16_norm),  cmocka_unit_test(test_skip),
        cmocka_unit_test(test_arguments),  cmocka_unit_test(test_together),
        cmocka_unit_test(test_others),     cmocka_unit_test(test_kernel_sets_agree),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
