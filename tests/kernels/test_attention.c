/* Causal attention against the textbook sums in f64. */
#include "tests/kernels/dense.h"

#ifdef MT_HAVE_cuda
#include "kernels/cuda/quantize_path.h"
#endif

/* A call with all its buffers. */
struct attention {
    mt_dtype dtype, real;
    int64_t batch, sequence, nq, nkv, dim, width, rows, qkv_count, y_count, lse_count;
    double scale;
    void *qkv, *y, *lse, *dy, *dqkv;
    double size; /* of the loss, for the gradient check */
};

static struct attention attention_create(mt_dtype dtype, int64_t batch, int64_t sequence,
                                         int64_t nq, int64_t nkv, int64_t dim, double spread)
{
    struct attention a = { .dtype = dtype,
                           .real = mt_dtype_wide(dtype),
                           .batch = batch,
                           .sequence = sequence,
                           .nq = nq,
                           .nkv = nkv,
                           .dim = dim,
                           .scale = 1 / sqrt((double)dim) };
    a.width = (nq + 2 * nkv) * dim;
    a.rows = batch * sequence;
    a.qkv_count = a.rows * a.width;
    a.y_count = a.rows * nq * dim;
    a.lse_count = a.rows * nq;
    a.qkv = random_buffer(a.qkv_count, dtype, spread, 1);
    a.dy = random_buffer(a.y_count, dtype, 1, 2);
    a.y = test_alloc(a.y_count, dtype);
    a.dqkv = test_alloc(a.qkv_count, dtype);
    a.lse = test_alloc(a.lse_count, a.real);
    return a;
}

static void attention_destroy(struct attention *a)
{
    void *all[] = { a->qkv, a->y, a->lse, a->dy, a->dqkv };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) test_free(all[i]);
}

static void forward(const struct attention *a)
{
    assert_ok(mt_attention_fwd(stream(), &(struct mt_attention_fwd_args){ .dtype = a->dtype,
                                                                          .batch = a->batch,
                                                                          .sequence = a->sequence,
                                                                          .query_heads = a->nq,
                                                                          .kv_heads = a->nkv,
                                                                          .head_dim = a->dim,
                                                                          .scale = a->scale,
                                                                          .y = a->y,
                                                                          .lse = a->lse,
                                                                          .qkv = a->qkv }));
}

static void backward(const struct attention *a)
{
    assert_ok(mt_attention_bwd(stream(), &(struct mt_attention_bwd_args){ .dtype = a->dtype,
                                                                          .batch = a->batch,
                                                                          .sequence = a->sequence,
                                                                          .query_heads = a->nq,
                                                                          .kv_heads = a->nkv,
                                                                          .head_dim = a->dim,
                                                                          .scale = a->scale,
                                                                          .dqkv = a->dqkv,
                                                                          .dy = a->dy,
                                                                          .y = a->y,
                                                                          .qkv = a->qkv,
                                                                          .lse = a->lse }));
}

/* Elements of a, as f64: rows of queries, keys and values in qkv, of heads in y. */
struct view {
    double *qkv, *y, *dy;
};

static struct view view_of(const struct attention *a)
{
    struct view v = { as_f64(a->qkv, a->dtype, a->qkv_count), as_f64(a->y, a->dtype, a->y_count),
                      as_f64(a->dy, a->dtype, a->y_count) };
    return v;
}

static void view_free(struct view *v)
{
    free(v->qkv);
    free(v->y);
    free(v->dy);
}

/* Where, in an array shaped like qkv, head h of row `row` starts: query heads, then key heads, then
 * value heads. */
static int64_t head_at(const struct attention *a, int64_t row, int64_t h)
{
    return row * a->width + h * a->dim;
}

static double dot(const double *x, const double *y, int64_t count, double *size)
{
    return weighted(x, y, count, size);
}

/* One query: b batch, s position, h head; its keys are those of rows first .. first + s. */
struct query {
    int64_t b, s, h, row, first, key_head, value_head, lse_at;
    const double *q;
};

static struct query query_of(const struct attention *a, const double *qkv, int64_t row, int64_t h)
{
    int64_t g = h / (a->nq / a->nkv);
    struct query q = { .b = row / a->sequence, .s = row % a->sequence, .h = h, .row = row };
    q.first = q.b * a->sequence;
    q.key_head = a->nq + g;
    q.value_head = a->nq + a->nkv + g;
    q.lse_at = (q.b * a->nq + h) * a->sequence + q.s;
    q.q = qkv + head_at(a, row, h);
    return q;
}

/* Kernels that multiply pairs and a GPU's matrix units take probabilities and the gradients of
 * scores as bf16, and flush subnormals. */
static bool on_gpu_tiles(const struct attention *a)
{
    return !strcmp(stream()->device->name, "cuda") && a->dim % 8 == 0 && a->dim <= 128;
}

static bool on_tiles(const struct attention *a)
{
    return a->dtype == MT_BF16 &&
           (on_gpu_tiles(a) || test_multiplies_pairs(stream()->device, a->dtype));
}

static double operand_error(const struct attention *a)
{
    return on_tiles(a) ? 0x1p-8 : 0;
}

/* Of f32 on a GPU: what planes of bf16 hold. */
static double smallest(const struct attention *a)
{
    if (on_tiles(a)) return 0x1p-126;
    if (a->dtype == MT_F32 && on_gpu_tiles(a)) return 0x1p-133;
    return a->real == MT_F64 ? 0x1p-1074 : 0x1p-149;
}

/* y, lse and how far real may be from them. A score has dim + 2 roundings of its terms (products,
 * sums, the scale) and one more when the maximum is taken off; exp turns an absolute error into a
 * relative one and has 2.2 epsilon, which is had by the sum too, once a running maximum shrinks it
 * again, for each block of keys (of 32 or more); the sums over keys have one rounding a key. */
static void forward_reference(const struct attention *a, double *y, double *y_bound, double *lse,
                              double *lse_bound)
{
    double epsilon = test_epsilon(a->real), *scores = zeros(a->sequence);
    struct view v = view_of(a);
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t h = 0; h < a->nq; h++) {
            struct query q = query_of(a, v.qkv, row, h);
            double most = -(double)INFINITY, largest = 0, sum = 0;
            for (int64_t t = 0; t <= q.s; t++) {
                double size;
                scores[t] =
                    a->scale * dot(q.q, v.qkv + head_at(a, q.first + t, q.key_head), a->dim, &size);
                most = fmax(most, scores[t]);
                largest = fmax(largest, a->scale * size);
            }
            for (int64_t t = 0; t <= q.s; t++) sum += exp(scores[t] - most);
            double seen = (double)q.s + 1, score = ((double)a->dim + 5) * largest;
            double error = epsilon * (2 * score + 3 * (seen + 4) + 8 * seen / 32);
            lse[q.lse_at] = most + log(sum);
            lse_bound[q.lse_at] = error + 2 * epsilon * (fabs(most) + fabs(log(sum)));
            for (int64_t c = 0; c < a->dim; c++) {
                int64_t at = (row * a->nq + h) * a->dim + c;
                double size = 0;
                for (int64_t t = 0; t <= q.s; t++) {
                    double p = exp(scores[t] - most) / sum;
                    double value = v.qkv[head_at(a, q.first + t, q.value_head) + c];
                    y[at] += p * value;
                    size += p * fabs(value);
                    y_bound[at] += smallest(a) * fabs(value);
                }
                y_bound[at] += (error + operand_error(a) * (1 + error)) * size;
            }
        }
    view_free(&v);
    free(scores);
}

/* Adds what one query gives to dqkv and its bound, from y and lse as kept. p has the error of its
 * exponent, score - lse, and exp's; ds = p (dp - dot) those of p and of the two inner products;
 * each sum one rounding a term; and what
 * falls below the smallest number, `tiny`, may go. */
static void add_query(const struct attention *a, const struct view *v, const struct query *q,
                      double *dqkv, double *bound)
{
    double epsilon = test_epsilon(a->real), dim = (double)a->dim,
           lse = mt_load_f64(a->lse, a->real, q->lse_at);
    double tiny = smallest(a), operand = operand_error(a);
    int64_t y_at = (q->row * a->nq + q->h) * a->dim, q_at = head_at(a, q->row, q->h);
    double y_size, y_dot = dot(v->dy + y_at, v->y + y_at, a->dim, &y_size);
    double by_query = (double)q->s + 4, by_key = (double)(a->sequence * a->nq / a->nkv) + 4;
    for (int64_t t = 0; t <= q->s; t++) {
        int64_t k = head_at(a, q->first + t, q->key_head),
                value = head_at(a, q->first + t, q->value_head);
        double size, dp_size, score = a->scale * dot(q->q, v->qkv + k, a->dim, &size);
        double dp = dot(v->dy + y_at, v->qkv + value, a->dim, &dp_size), p = exp(score - lse);
        double p_error = epsilon * ((dim + 2) * a->scale * size + fabs(score - lse) + 4);
        double ds = p * (dp - y_dot);
        double ds_size = p * (fabs(dp) + fabs(y_dot));
        double ds_error = p * epsilon * (dim + 4) * (dp_size + y_size) +
                          ds_size * (p_error + 2 * epsilon) + tiny * (fabs(dp) + fabs(y_dot) + 1);
        ds_error += operand * (fabs(ds) + ds_error);
        for (int64_t c = 0; c < a->dim; c++) {
            double qc = a->scale * q->q[c], kc = a->scale * v->qkv[k + c], dy = v->dy[y_at + c];
            dqkv[q_at + c] += ds * kc;
            bound[q_at + c] +=
                fabs(kc) * (ds_error + by_query * epsilon * (fabs(ds) + ds_error)) + tiny;
            dqkv[k + c] += ds * qc;
            bound[k + c] += fabs(qc) * (ds_error + by_key * epsilon * (fabs(ds) + ds_error)) + tiny;
            dqkv[value + c] += p * dy;
            bound[value + c] +=
                fabs(dy) * (p * (p_error + by_key * epsilon + operand) + tiny) + tiny;
        }
    }
}

static void backward_reference(const struct attention *a, double *dqkv, double *bound)
{
    struct view v = view_of(a);
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t h = 0; h < a->nq; h++) {
            struct query q = query_of(a, v.qkv, row, h);
            add_query(a, &v, &q, dqkv, bound);
        }
    view_free(&v);
}

static void check_attention(const struct attention *a)
{
    double *y = zeros(a->y_count), *y_bound = zeros(a->y_count);
    double *lse = zeros(a->lse_count), *lse_bound = zeros(a->lse_count);
    forward_reference(a, y, y_bound, lse, lse_bound);
    forward(a);
    assert_within("y", a->y, a->dtype, y, y_bound, a->y_count);
    assert_within("lse", a->lse, a->real, lse, lse_bound, a->lse_count);
    double *dqkv = zeros(a->qkv_count), *bound = zeros(a->qkv_count);
    backward_reference(a, dqkv, bound);
    backward(a);
    assert_within("dqkv", a->dqkv, a->dtype, dqkv, bound, a->qkv_count);
    free(y);
    free(y_bound);
    free(lse);
    free(lse_bound);
    free(dqkv);
    free(bound);
}

/* Around the blocks of 48 queries and 192 keys, and of 128 of either, odd head widths, every
 * grouping. */
static const struct {
    int64_t batch, sequence, nq, nkv, dim;
} shapes[] = {
    { 0, 7, 2, 1, 4 },    { 2, 0, 2, 1, 4 },     { 1, 1, 1, 1, 1 },     { 2, 7, 4, 2, 3 },
    { 1, 33, 2, 2, 16 },  { 1, 47, 3, 1, 33 },   { 2, 48, 2, 1, 8 },    { 1, 49, 4, 1, 64 },
    { 1, 97, 1, 1, 5 },   { 1, 191, 2, 1, 32 },  { 1, 192, 1, 1, 7 },   { 1, 193, 2, 1, 9 },
    { 1, 250, 2, 2, 40 }, { 1, 401, 1, 1, 4 },   { 2, 131, 4, 2, 128 }, { 1, 128, 1, 1, 128 },
    { 1, 257, 2, 2, 64 }, { 1, 321, 2, 1, 128 }, { 2, 193, 3, 1, 64 },  { 1, 271, 4, 2, 16 },
    { 2, 130, 4, 1, 24 }, { 1, 255, 2, 1, 80 },  { 1, 140, 6, 2, 96 },  { 1, 129, 2, 2, 120 },
    { 1, 65, 1, 1, 136 },
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static void matches_f64(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++)
        for (int s = 0; s < SHAPES; s++) {
            struct attention a = attention_create(dtypes[d], shapes[s].batch, shapes[s].sequence,
                                                  shapes[s].nq, shapes[s].nkv, shapes[s].dim, 2);
            check_attention(&a);
            attention_destroy(&a);
        }
}

/* Scores so far apart that one key takes all (differences beyond exp's range), and all equal. */
static void extreme_scores(void **state)
{
    (void)state;
    static const double spreads[] = { 0, 30, 1000 };
    for (int d = 0; d < DTYPES; d++)
        for (int i = 0; i < 2 * 3; i++) {
            struct attention a =
                attention_create(dtypes[d], 1, 210, 2, 1, i % 2 ? 12 : 24, spreads[i / 2]);
            /* Values and dy of order 1. */
            for (int64_t r = 0; r < a.rows; r++)
                test_random((char *)a.qkv + (size_t)head_at(&a, r, 3) * mt_dtype_size(a.dtype),
                            a.dim, a.dtype, 1, (uint64_t)r);
            check_attention(&a);
            attention_destroy(&a);
        }
}

/* Position s sees nothing after s: other tokens there change no bit of y before, and dy before s is
 * all that reaches the keys and values of tokens before. */
static void causal(void **state)
{
    (void)state;
    for (int d = 0; d < 2 * DTYPES; d++) {
        struct attention a = attention_create(dtypes[d / 2], 1, 101, 4, 2, d % 2 ? 10 : 40, 2);
        int64_t from = 53, y_before = from * a.nq * a.dim;
        forward(&a);
        double *y = as_f64(a.y, a.dtype, a.y_count), *lse = as_f64(a.lse, a.real, a.lse_count);
        test_random((char *)a.qkv + (size_t)(from * a.width) * mt_dtype_size(a.dtype),
                    (a.rows - from) * a.width, a.dtype, 5, 99);
        forward(&a);
        test_assert_near("y", a.y, a.dtype, y, y_before, 0, 0);
        assert_true(mt_load_f64(a.y, a.dtype, y_before) != y[y_before]);
        for (int64_t h = 0; h < a.nq; h++)
            test_assert_near("lse",
                             (char *)a.lse + (size_t)(h * a.sequence) * mt_dtype_size(a.real),
                             a.real, lse + h * a.sequence, from, 0, 0);
        for (int64_t i = 0; i < y_before; i++) mt_store_f64(a.dy, a.dtype, i, 0);
        backward(&a);
        for (int64_t r = 0; r < from; r++)
            for (int64_t c = 0; c < a.nq * a.dim; c++) /* their queries */
                assert_true(mt_load_f64(a.dqkv, a.dtype, r * a.width + c) == 0);
        for (int64_t i = y_before; i < a.y_count; i++) mt_store_f64(a.dy, a.dtype, i, 0);
        test_random(a.dy, y_before, a.dtype, 1, 5);
        backward(&a);
        for (int64_t i = from * a.width; i < a.qkv_count; i++)
            assert_true(mt_load_f64(a.dqkv, a.dtype, i) == 0);
        free(y);
        free(lse);
        attention_destroy(&a);
    }
}

/* A NaN in a key spoils every query that sees it; other batches and key heads never. */
static void nan_spreads_no_further(void **state)
{
    (void)state;
    struct attention a = attention_create(MT_F32, 2, 60, 2, 2, 8, 1);
    int64_t at = 20;
    mt_store_f64(a.qkv, MT_F32, head_at(&a, at, 2) + 3, -(double)NAN); /* key head 0 of batch 0 */
    forward(&a);
    for (int64_t i = 0; i < a.y_count; i++) {
        int64_t row = i / (a.nq * a.dim), h = i / a.dim % a.nq;
        bool sees = row >= at && row < a.sequence && h == 0;
        assert_true(sees == (bool)isnan(mt_load_f64(a.y, MT_F32, i)));
    }
    attention_destroy(&a);
}

static double loss(void *context)
{
    struct attention *a = context;
    forward(a);
    return weighted(a->dy, a->y, a->y_count, &a->size);
}

static void gradient(void **state)
{
    (void)state;
    static const int64_t sequences[] = { 7, 53 };
    for (int i = 0; i < 2; i++) {
        struct attention a =
            attention_create(MT_F64, i ? 1 : 2, sequences[i], i ? 2 : 4, i ? 1 : 2, 3, 1);
        loss(&a);
        backward(&a);
        double terms = (double)(a.sequence + a.dim + a.y_count);
        assert_gradient("dqkv", loss, &a, a.qkv, a.dqkv, a.qkv_count, a.size, terms);
        attention_destroy(&a);
    }
}

static void run_forward(void *context)
{
    forward(context);
}

static void run_backward(void *context)
{
    backward(context);
}

static void thread_independent(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++) {
        struct attention a = attention_create(dtypes[d], 3, 100, 4, 2, 24, 1);
        assert_thread_independent("y", run_forward, &a, a.y, a.y_count, a.dtype);
        assert_thread_independent("lse", run_forward, &a, a.lse, a.lse_count, a.real);
        assert_thread_independent("dqkv", run_backward, &a, a.dqkv, a.qkv_count, a.dtype);
        attention_destroy(&a);
    }
}

#ifdef MT_HAVE_cuda
/* Where a GPU's blocks have 99 KB of shared memory, attention has the same bits. */
static void small_shared_memory(void **state)
{
    (void)state;
    static const int64_t dims[] = { 64, 72, 96, 128 };
    mt_device *device = test_device();
    if (strcmp(test_device_name(), "cpu") == 0) skip();
    const int own = mt_cuda_shared(device);
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
        for (int64_t sequence = 1; sequence < 400; sequence = sequence * 5 / 2 + 1) {
            struct attention a = attention_create(MT_BF16, 2, sequence, 4, 2, dims[i], 2),
                             b = attention_create(MT_BF16, 2, sequence, 4, 2, dims[i], 2);
            forward(&a), backward(&a);
            mt_cuda_limit_shared(device, 99 << 10);
            forward(&b), backward(&b);
            assert_ok(mt_device_synchronize(device));
            mt_cuda_limit_shared(device, own);
            assert_memory_equal(a.y, b.y, (size_t)a.y_count * 2);
            assert_memory_equal(a.lse, b.lse, (size_t)a.lse_count * sizeof(float));
            assert_memory_equal(a.dqkv, b.dqkv, (size_t)a.qkv_count * 2);
            attention_destroy(&a), attention_destroy(&b);
        }
}
#endif

static void bad_arguments_are_named(void **state)
{
    (void)state;
    double x[4] = { 0 };
    assert_fails(mt_attention_fwd(stream(), &(struct mt_attention_fwd_args){ .dtype = MT_F64,
                                                                             .batch = 1,
                                                                             .sequence = 1,
                                                                             .query_heads = 3,
                                                                             .kv_heads = 2,
                                                                             .head_dim = 1 }),
                 MT_EINVAL, "query_heads 3 must be a positive multiple of kv_heads 2");
    assert_fails(mt_attention_fwd(stream(), &(struct mt_attention_fwd_args){ .dtype = MT_F64,
                                                                             .batch = 1,
                                                                             .sequence = 1,
                                                                             .query_heads = 2,
                                                                             .kv_heads = 2,
                                                                             .head_dim = 1,
                                                                             .y = x,
                                                                             .qkv = x }),
                 MT_EINVAL, "attention_fwd: lse is NULL");
    assert_fails(mt_attention_bwd(stream(), &(struct mt_attention_bwd_args){ .dtype = MT_F64,
                                                                             .batch = 1,
                                                                             .sequence = 1,
                                                                             .query_heads = 2,
                                                                             .kv_heads = 2,
                                                                             .head_dim = 0 }),
                 MT_EINVAL, "attention_bwd: head_dim is 0");
    assert_fails(mt_attention_bwd(stream(), &(struct mt_attention_bwd_args){ .dtype = MT_F64,
                                                                             .batch = 1,
                                                                             .sequence = -1 }),
                 MT_EINVAL, "attention_bwd: sequence is -1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_f64),
        cmocka_unit_test(extreme_scores),
        cmocka_unit_test(causal),
        cmocka_unit_test(nan_spreads_no_further),
        cmocka_unit_test(gradient),
        cmocka_unit_test(thread_independent),
#ifdef MT_HAVE_cuda
        cmocka_unit_test(small_shared_memory),
#endif
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
