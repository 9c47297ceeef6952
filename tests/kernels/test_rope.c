/* The normalisation and rotation of queries and keys. */
#include "tests/kernels/dense.h"

static const double eps = 1e-6;

/* A case of qk_norm_rope with all its buffers; `spans` sums of squares a token. */
struct qk {
    mt_dtype dtype, real;
    int64_t batch, sequence, nq, nkv, dim, width, count, spans, w_q_count, w_k_count;
    mt_qk_norm norm;
    void *x, *y, *dy, *dx, *rstd, *w_q, *w_k, *dw_q, *dw_k, *cosine, *sine;
    double size; /* of the loss, for the gradient check */
};

static struct qk qk_create(mt_dtype dtype, mt_qk_norm norm, int64_t batch, int64_t sequence,
                           int64_t nq, int64_t nkv, int64_t dim)
{
    struct qk q = { .dtype = dtype,
                    .real = mt_dtype_wide(dtype),
                    .batch = batch,
                    .sequence = sequence,
                    .nq = nq,
                    .nkv = nkv,
                    .dim = dim,
                    .norm = norm };
    q.width = (nq + 2 * nkv) * dim;
    q.count = batch * sequence * q.width;
    q.spans = norm == MT_QK_NORM_HEAD ? nq + nkv : norm == MT_QK_NORM_PROJECTION ? 2 : 0;
    q.w_q_count = norm == MT_QK_NORM_HEAD ? dim : norm == MT_QK_NORM_PROJECTION ? nq * dim : 0;
    q.w_k_count = norm == MT_QK_NORM_HEAD ? dim : norm == MT_QK_NORM_PROJECTION ? nkv * dim : 0;
    q.x = random_buffer(q.count, dtype, 2, 1);
    q.dy = random_buffer(q.count, dtype, 1, 2);
    q.y = test_alloc(q.count, dtype);
    q.dx = test_alloc(q.count, dtype);
    q.rstd = test_alloc(batch * sequence * q.spans, q.real);
    q.w_q = random_buffer(q.w_q_count, q.real, 2, 3);
    q.w_k = random_buffer(q.w_k_count, q.real, 2, 4);
    q.dw_q = random_buffer(q.w_q_count, q.real, 1, 5);
    q.dw_k = random_buffer(q.w_k_count, q.real, 1, 6);
    q.cosine = test_alloc(sequence * dim / 2, q.real);
    q.sine = test_alloc(sequence * dim / 2, q.real);
    for (int64_t i = 0; i < sequence * dim / 2; i++) {
        double angle =
            (double)(i / (dim / 2)) * pow(1e4, -2.0 * (double)(i % (dim / 2)) / (double)dim);
        mt_store_f64(q.cosine, q.real, i, cos(angle));
        mt_store_f64(q.sine, q.real, i, sin(angle));
    }
    return q;
}

static void qk_destroy(struct qk *q)
{
    void *all[] = { q->x,   q->y,    q->dy,   q->dx,     q->rstd, q->w_q,
                    q->w_k, q->dw_q, q->dw_k, q->cosine, q->sine };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) test_free(all[i]);
}

static mt_status qk_fwd(const struct qk *q, void *y)
{
    return mt_qk_norm_rope_fwd(
        stream(), &(struct mt_qk_norm_rope_fwd_args){ .dtype = q->dtype,
                                                      .batch = q->batch,
                                                      .sequence = q->sequence,
                                                      .query_heads = q->nq,
                                                      .kv_heads = q->nkv,
                                                      .head_dim = q->dim,
                                                      .norm = q->norm,
                                                      .eps = eps,
                                                      .y = y,
                                                      .rstd = q->spans ? q->rstd : NULL,
                                                      .x = q->x,
                                                      .w_q = q->spans ? q->w_q : NULL,
                                                      .w_k = q->spans ? q->w_k : NULL,
                                                      .cos_table = q->cosine,
                                                      .sin_table = q->sine });
}

static mt_status qk_bwd(const struct qk *q, void *dx, bool accumulate, bool frozen_q, bool frozen_k)
{
    return mt_qk_norm_rope_bwd(
        stream(), &(struct mt_qk_norm_rope_bwd_args){ .dtype = q->dtype,
                                                      .batch = q->batch,
                                                      .sequence = q->sequence,
                                                      .query_heads = q->nq,
                                                      .kv_heads = q->nkv,
                                                      .head_dim = q->dim,
                                                      .norm = q->norm,
                                                      .accumulate_q = accumulate,
                                                      .accumulate_k = accumulate,
                                                      .dx = dx,
                                                      .dw_q = frozen_q ? NULL : q->dw_q,
                                                      .dw_k = frozen_k ? NULL : q->dw_k,
                                                      .dy = q->dy,
                                                      .x = q->spans ? q->x : NULL,
                                                      .rstd = q->spans ? q->rstd : NULL,
                                                      .w_q = q->spans ? q->w_q : NULL,
                                                      .w_k = q->spans ? q->w_k : NULL,
                                                      .cos_table = q->cosine,
                                                      .sin_table = q->sine });
}

/* Where element i of a row lies: which sum of squares it belongs to, how long that is, and its
 * weight. */
struct place {
    int64_t span, width, first; /* first element of the span in the row */
    const void *w;
    int64_t at; /* index into w */
    bool value; /* of a value head: copied */
};

static struct place place_of(const struct qk *q, int64_t i)
{
    int64_t head = i / q->dim, keys = q->nq * q->dim;
    bool key = head >= q->nq;
    struct place p = { .value = head >= q->nq + q->nkv, .w = key ? q->w_k : q->w_q };
    if (q->norm == MT_QK_NORM_HEAD) {
        p.span = head, p.width = q->dim, p.first = head * q->dim, p.at = i % q->dim;
    } else {
        p.span = key, p.width = (key ? q->nkv : q->nq) * q->dim;
        p.first = key ? keys : 0, p.at = i - p.first;
    }
    return p;
}

/* The element that i is rotated with, and the sign of the sine. */
static int64_t partner(const struct qk *q, int64_t i, double *sign)
{
    bool low = i % q->dim < q->dim / 2;
    *sign = low ? -1 : 1;
    return low ? i + q->dim / 2 : i - q->dim / 2;
}

/* Element i of token t normalised, as rmsnorm_fwd stores it, from the rstd that forward kept. */
static double normalised(const struct qk *q, int64_t t, int64_t i)
{
    double x = mt_load_f64(q->x, q->dtype, t * q->width + i);
    if (!q->spans) return x;
    struct place p = place_of(q, i);
    double rstd = mt_load_f64(q->rstd, q->real, t * q->spans + p.span);
    double xhat = rounded(times(x, rstd, q->real), q->dtype);
    return rounded(times(xhat, mt_load_f64(p.w, q->real, p.at), q->real), q->dtype);
}

static void check_qk_fwd(const struct qk *q)
{
    double *x = as_f64(q->x, q->dtype, q->count);
    assert_ok(qk_fwd(q, q->y));
    for (int64_t t = 0; t < q->batch * q->sequence; t++)
        for (int64_t i = 0; i < q->width; i++) {
            double got = mt_load_f64(q->y, q->dtype, t * q->width + i), sign;
            struct place p = place_of(q, i);
            if (p.value) {
                assert_true(got == mt_load_f64(q->x, q->dtype, t * q->width + i));
                continue;
            }
            if (q->spans) {
                double want = rstd_of(x + t * q->width + p.first, p.width, eps);
                double kept = mt_load_f64(q->rstd, q->real, t * q->spans + p.span);
                assert_true(fabs(kept - want) <= rstd_error(p.width, q->real) * want);
            }
            int64_t angle = t % q->sequence * (q->dim / 2) + i % (q->dim / 2);
            double c = mt_load_f64(q->cosine, q->real, angle),
                   s = mt_load_f64(q->sine, q->real, angle);
            double other = normalised(q, t, partner(q, i, &sign));
            double turned = times(other, s, q->real);
            double want = minus(times(normalised(q, t, i), c, q->real), -sign * turned, q->real);
            assert_true(got == rounded(want, q->dtype));
        }
    free(x);
}

/* The last three: more heads than a block of a GPU has room for at once, more pairs than a warp. */
static const struct {
    int64_t batch, sequence, nq, nkv, dim;
} heads[] = { { 0, 5, 2, 1, 4 },   { 2, 0, 2, 1, 4 },   { 1, 1, 1, 1, 2 },  { 2, 7, 4, 2, 6 },
              { 1, 33, 3, 1, 16 }, { 3, 11, 2, 2, 34 }, { 1, 5, 3, 2, 64 }, { 1, 2, 35, 33, 80 },
              { 1, 2, 9, 9, 66 },  { 1, 2, 2, 1, 132 } };
enum { HEADS = sizeof heads / sizeof heads[0] };

static void for_all_heads(void (*check)(const struct qk *))
{
    for (int d = 0; d < DTYPES; d++)
        for (int norm = MT_QK_NORM_NONE; norm <= MT_QK_NORM_PROJECTION; norm++)
            for (int h = 0; h < HEADS; h++) {
                struct qk q = qk_create(dtypes[d], (mt_qk_norm)norm, heads[h].batch,
                                        heads[h].sequence, heads[h].nq, heads[h].nkv, heads[h].dim);
                check(&q);
                qk_destroy(&q);
            }
}

/* rstd against f64; then y, given rstd, to the bit. */
static void qk_norm_rope_fwd_rounds_like_rmsnorm(void **state)
{
    (void)state;
    for_all_heads(check_qk_fwd);
}

static void check_qk_in_place(const struct qk *q)
{
    assert_ok(qk_fwd(q, q->y));
    if (q->norm == MT_QK_NORM_NONE) {
        assert_ok(qk_fwd(q, q->x));
        assert_same_bits("y in x", q->x, q->y, q->count, q->dtype);
    } else if (q->count) {
        assert_fails(qk_fwd(q, q->x), MT_EINVAL, "y is x");
    }
    assert_ok(qk_bwd(q, q->dx, false, false, false));
    double *dw = as_f64(q->dw_q, q->real, q->w_q_count);
    if (q->norm != MT_QK_NORM_NONE) assert_ok(qk_bwd(q, q->dy, false, false, false));
    if (q->norm != MT_QK_NORM_NONE) assert_same_bits("dx in dy", q->dy, q->dx, q->count, q->dtype);
    test_assert_near("dw_q", q->dw_q, q->real, dw, q->w_q_count, 0, 0);
    free(dw);
}

static void qk_norm_rope_works_in_place(void **state)
{
    (void)state;
    for_all_heads(check_qk_in_place);
}

/* The gradient of the normalised element i of token t, and the size of its two terms. */
static double unrotated(const struct qk *q, int64_t t, int64_t i, double *size)
{
    double sign;
    int64_t other = partner(q, i, &sign), angle = t % q->sequence * (q->dim / 2) + i % (q->dim / 2);
    double a =
        mt_load_f64(q->dy, q->dtype, t * q->width + i) * mt_load_f64(q->cosine, q->real, angle);
    double b =
        mt_load_f64(q->dy, q->dtype, t * q->width + other) * mt_load_f64(q->sine, q->real, angle);
    *size = fabs(a) + fabs(b);
    return a - sign * b;
}

/* Element i of token t of dx. dn has three roundings of its terms; the rest as for rmsnorm_bwd.
 * Adds to dw. */
static double qk_dx(const struct qk *q, int64_t t, int64_t i, double *bound, double *dw,
                    double *dw_bound)
{
    struct place p = place_of(q, i);
    double size, epsilon = test_epsilon(q->real), dn;
    *bound = 0;
    if (p.value) return mt_load_f64(q->dy, q->dtype, t * q->width + i);
    dn = unrotated(q, t, i, &size);
    *bound = 3 * epsilon * size;
    if (!q->spans) return dn;
    double rstd = mt_load_f64(q->rstd, q->real, t * q->spans + p.span), sum = 0, all = 0;
    for (int64_t j = p.first; j < p.first + p.width; j++) {
        double each, g = unrotated(q, t, j, &each);
        double wx = mt_load_f64(p.w, q->real, place_of(q, j).at) *
                    mt_load_f64(q->x, q->dtype, t * q->width + j) * rstd;
        sum += g * wx;
        all += each * fabs(wx);
    }
    double w = mt_load_f64(p.w, q->real, p.at),
           xhat = mt_load_f64(q->x, q->dtype, t * q->width + i) * rstd;
    dw[p.at] += dn * xhat;
    dw_bound[p.at] +=
        ((double)(q->batch * q->sequence * (q->nq + 1)) + 8) * epsilon * size * fabs(xhat);
    *bound = epsilon * rstd *
             (8 * size * fabs(w) + ((double)p.width + 12) * fabs(xhat) * all / (double)p.width);
    return rstd * (dn * w - xhat * sum / (double)p.width);
}

static void check_qk_bwd(const struct qk *q)
{
    double *want = zeros(q->count), *bound = zeros(q->count);
    assert_ok(qk_fwd(q, q->y));
    for (int mode = 0; mode < 4; mode++) { /* overwritten, accumulated, w_q frozen, w_k frozen */
        bool kept_q = mode == 1 || mode == 2, kept_k = mode == 1 || mode == 3;
        double *dw_q = kept_q ? as_f64(q->dw_q, q->real, q->w_q_count) : zeros(q->w_q_count);
        double *dw_k = kept_k ? as_f64(q->dw_k, q->real, q->w_k_count) : zeros(q->w_k_count);
        double *spare = zeros(q->w_q_count + q->w_k_count);
        double *q_bound = zeros(q->w_q_count), *k_bound = zeros(q->w_k_count);
        for (int64_t c = 0; c < q->w_q_count; c++)
            q_bound[c] = mode == 1 ? 2 * test_epsilon(q->real) * fabs(dw_q[c]) : 0;
        for (int64_t c = 0; c < q->w_k_count; c++)
            k_bound[c] = mode == 1 ? 2 * test_epsilon(q->real) * fabs(dw_k[c]) : 0;
        for (int64_t i = 0; i < q->count; i++) {
            bool key = i % q->width / q->dim >= q->nq, frozen = mode == (key ? 3 : 2);
            double *dw = frozen ? spare : key ? dw_k : dw_q;
            want[i] = qk_dx(q, i / q->width, i % q->width, bound + i, dw,
                            frozen ? spare
                            : key  ? k_bound
                                   : q_bound);
        }
        assert_ok(qk_bwd(q, q->dx, mode == 1, mode == 2, mode == 3));
        assert_within("dx", q->dx, q->dtype, want, bound, q->count);
        assert_within("dw_q", q->dw_q, q->real, dw_q, q_bound, q->w_q_count);
        assert_within("dw_k", q->dw_k, q->real, dw_k, k_bound, q->w_k_count);
        free(dw_q);
        free(dw_k);
        free(spare);
        free(q_bound);
        free(k_bound);
    }
    free(want);
    free(bound);
}

static void qk_norm_rope_bwd_matches_f64(void **state)
{
    (void)state;
    for_all_heads(check_qk_bwd);
}

/* A GPU's blocks are no more than 512: of these they take more heads, or rows of weights'
 * gradients, than they have threads for, and begin again; the last turn is not a whole one. */
static void qk_norm_rope_takes_many_heads(void **state)
{
    (void)state;
    static const struct {
        mt_dtype dtype;
        mt_qk_norm norm;
        int64_t batch, sequence, nq, nkv, dim;
    } many[] = { { MT_F64, MT_QK_NORM_HEAD, 4, 2111, 6, 2, 8 }, /* 128 heads at once, of 256 */
                 { MT_F64, MT_QK_NORM_HEAD, 1, 8321, 2, 1, 2 }, /* 32 rows of 33 */
                 { MT_BF16, MT_QK_NORM_HEAD, 1, 701, 2, 1, 16 },
                 { MT_BF16, MT_QK_NORM_HEAD, 1, 37, 2, 1, 128 }, /* of several parts, one, and */
                 { MT_BF16, MT_QK_NORM_HEAD, 1, 41, 2, 1, 256 }, /* more columns than threads */
                 { MT_BF16, MT_QK_NORM_HEAD, 1, 19, 2, 1, 512 },
                 { MT_F32, MT_QK_NORM_HEAD, 1, 43, 2, 1, 256 },
                 { MT_F32, MT_QK_NORM_PROJECTION, 3, 5611, 1, 1, 2 },
                 { MT_BF16, MT_QK_NORM_PROJECTION, 3, 5611, 1, 1, 2 } };
    for (size_t i = 0; i < sizeof many / sizeof many[0]; i++) {
        struct qk q = qk_create(many[i].dtype, many[i].norm, many[i].batch, many[i].sequence,
                                many[i].nq, many[i].nkv, many[i].dim);
        check_qk_fwd(&q);
        check_qk_bwd(&q);
        check_qk_in_place(&q);
        qk_destroy(&q);
    }
}

static double qk_loss(void *context)
{
    struct qk *q = context;
    assert_ok(qk_fwd(q, q->y));
    return weighted(q->dy, q->y, q->count, &q->size);
}

static void qk_norm_rope_gradient(void **state)
{
    (void)state;
    for (int norm = MT_QK_NORM_NONE; norm <= MT_QK_NORM_PROJECTION; norm++) {
        struct qk q = qk_create(MT_F64, (mt_qk_norm)norm, 2, 3, 4, 2, 6);
        qk_loss(&q);
        assert_ok(qk_bwd(&q, q.dx, false, false, false));
        double terms = (double)(q.count + q.width);
        assert_gradient("dx", qk_loss, &q, q.x, q.dx, q.count, q.size, terms);
        assert_gradient("dw_q", qk_loss, &q, q.w_q, q.dw_q, q.w_q_count, q.size, terms);
        assert_gradient("dw_k", qk_loss, &q, q.w_k, q.dw_k, q.w_k_count, q.size, terms);
        qk_destroy(&q);
    }
}

static void run_qk_bwd(void *context)
{
    struct qk *q = context;
    assert_ok(qk_bwd(q, q->dx, false, false, false));
}

static void qk_norm_rope_is_thread_independent(void **state)
{
    (void)state;
    struct qk q = qk_create(MT_F32, MT_QK_NORM_HEAD, 3, 101, 4, 2, 16);
    assert_ok(qk_fwd(&q, q.y));
    assert_thread_independent("dw_q", run_qk_bwd, &q, q.dw_q, q.w_q_count, q.real);
    assert_thread_independent("dw_k", run_qk_bwd, &q, q.dw_k, q.w_k_count, q.real);
    qk_destroy(&q);
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    struct qk q = qk_create(MT_F64, MT_QK_NORM_NONE, 1, 2, 2, 1, 4);
    q.dim = 3;
    assert_fails(qk_fwd(&q, q.y), MT_EINVAL, "head_dim is 3");
    assert_fails(qk_bwd(&q, q.dx, false, false, false), MT_EINVAL, "head_dim is 3");
    q.dim = 4;
    q.nkv = 0;
    assert_fails(qk_fwd(&q, q.y), MT_EINVAL, "kv_heads is 0");
    qk_destroy(&q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(qk_norm_rope_fwd_rounds_like_rmsnorm),
        cmocka_unit_test(qk_norm_rope_works_in_place),
        cmocka_unit_test(qk_norm_rope_bwd_matches_f64),
        cmocka_unit_test(qk_norm_rope_takes_many_heads),
        cmocka_unit_test(qk_norm_rope_gradient),
        cmocka_unit_test(qk_norm_rope_is_thread_independent),
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
