/* The router against naive references: the choice exact given the probabilities, gradients against
 * central differences in f64, everything else within bounds from epsilon and the length of the
 * sums; bits equal for 1, 2, 3 threads. */
#include "tests/kernels/router.h"

/* ---- router -----------------------------------------------------------------------------------
 */

static const struct shape shapes[] = {
    { 0, 8, 4, 2 },      { 1, 1, 1, 1 },      { 7, 33, 5, 5 },      { 64, 16, 16, 2 },
    { 65, 128, 17, 3 },  { 300, 40, 64, 8 },  { 3, 257, 130, 4 },   { 5, 0, 6, 2 },
    { 1030, 24, 12, 1 }, { 37, 2104, 9, 2 },  { 130, 1032, 70, 3 }, { 520, 136, 200, 6 },
    { 37, 40, 300, 11 }, { 70, 24, 513, 33 }, { 21, 16, 1024, 40 }, { 130, 256, 32, 4 },
    { 45, 512, 16, 2 },  { 41, 104, 31, 5 },  { 33, 200, 8, 3 },
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* Logits of token t in f64, and the bound of each: D + 1 roundings. */
static void naive_logits(const struct router *r, int64_t t, double *logits, double *limit)
{
    int64_t width = r->s.width;
    for (int64_t e = 0; e < r->s.experts; e++) {
        double sum = 0, magnitude = 0;
        for (int64_t d = 0; d < width; d++) {
            double p = mt_load_f64(r->x, r->dtype, t * width + d) *
                       mt_load_f64(r->wr, r->real, e * width + d);
            sum += p, magnitude += fabs(p);
        }
        logits[e] = sum;
        limit[e] = (double)(width + 1) * real_epsilon(r->dtype) * magnitude;
    }
}

/* Probabilities of one token against f64 from the kernel's own logits: the subtraction, 4 for exp
 * (2 ulp), E + 1 for the sum, 1 for the division, in units of epsilon, and the argument's rounding
 * scaled by its size. */
static void check_softmax(const struct router *r, int64_t t)
{
    int64_t n = r->s.experts;
    double eps = real_epsilon(r->dtype), top = -HUGE_VAL, least = HUGE_VAL, sum = 0;
    double *want = doubles(n), *limit = doubles(n), lse, lse_limit;
    for (int64_t e = 0; e < n; e++) {
        double l = mt_load_f64(r->logits, r->real, t * n + e);
        top = fmax(top, l), least = fmin(least, l);
    }
    for (int64_t e = 0; e < n; e++) {
        want[e] = exp(mt_load_f64(r->logits, r->real, t * n + e) - top);
        sum += want[e];
    }
    double relative = eps * (2 * (top - least) + 2 * 4 + (double)n + 2) * 1.01;
    for (int64_t e = 0; e < n; e++) {
        want[e] /= sum;
        limit[e] = relative * want[e];
    }
    near_all("probs", (char *)r->probs + (size_t)(t * n) * mt_dtype_size(r->real), r->real, n, want,
             limit);
    lse = top + log(sum), lse_limit = relative + eps * fabs(lse) * 2;
    near_all("lse", (char *)r->lse + (size_t)t * mt_dtype_size(r->real), r->real, 1, &lse,
             &lse_limit);
    free(want);
    free(limit);
}

/* Choice and weights of one token are exact given the kernel's logits and probabilities. */
static void check_choice(const struct router *r, int64_t t, bool normalize)
{
    int64_t n = r->s.experts, k = r->s.top_k;
    bool *taken = calloc((size_t)n, sizeof *taken);
    assert_non_null(taken);
    double total = 0;
    for (int64_t i = 0; i < k; i++) {
        int64_t best = -1;
        double best_score = 0;
        for (int64_t e = 0; e < n; e++) {
            double score = mt_load_f64(r->bias ? r->probs : r->logits, r->real, t * n + e);
            if (r->bias) score = real_add(r->real, score, (double)r->bias[e]);
            if (!taken[e] && (best < 0 || score > best_score)) best = e, best_score = score;
        }
        taken[best] = true;
        assert_int_equal(r->chosen[t * k + i], best);
        total = real_add(r->real, total, mt_load_f64(r->probs, r->real, t * n + best));
    }
    total = real_add(r->real, total, 1e-20);
    for (int64_t i = 0; i < k; i++) {
        double p = mt_load_f64(r->probs, r->real, t * n + r->chosen[t * k + i]);
        double want = normalize ? real_divide(r->real, p, total) : p;
        assert_true(mt_load_f64(r->weights, r->real, t * k + i) == want);
    }
    free(taken);
}

/* Sums over tokens of the kernel's own values: kept in f64, one rounding; counts exact. */
static void check_sums(const struct router *r)
{
    int64_t n = r->s.experts;
    double sum_eps = real_epsilon(r->dtype) + (double)(r->s.tokens + 1) * 0x1p-52, z = 0, z_limit;
    double *want = doubles(n), *limit = doubles(n);
    int64_t *counts = calloc((size_t)n, sizeof *counts);
    assert_non_null(counts);
    for (int64_t t = 0; t < r->s.tokens; t++) {
        double lse = mt_load_f64(r->lse, r->real, t);
        z += lse * lse;
        for (int64_t e = 0; e < n; e++) want[e] += mt_load_f64(r->probs, r->real, t * n + e);
        for (int64_t i = 0; i < r->s.top_k; i++) counts[r->chosen[t * r->s.top_k + i]]++;
    }
    for (int64_t e = 0; e < n; e++) limit[e] = sum_eps * want[e];
    z_limit = sum_eps * z;
    near_all("prob_sum", r->prob_sum, r->real, n, want, limit);
    near_all("z_sum", r->z_sum, r->real, 1, &z, &z_limit);
    for (int64_t e = 0; e < n; e++) {
        assert_int_equal(r->counts[e], counts[e]);
        assert_int_equal(r->load[e], e + counts[e]);
    }
    free(want);
    free(limit);
    free(counts);
}

static void check_router(struct shape s, mt_dtype dtype, bool bias, bool normalize)
{
    struct router r[MAX_THREADS];
    size_t real = mt_dtype_size(mt_dtype_wide(dtype));
    for (int i = 0; i < MAX_THREADS; i++) {
        r[i] = router_make(s, dtype, bias);
        router_run(&r[i], i + 1, normalize);
        same_bits("probs", r[i].probs, r[0].probs, (size_t)(s.tokens * s.experts) * real);
        same_bits("weights", r[i].weights, r[0].weights, (size_t)(s.tokens * s.top_k) * real);
        same_bits("prob_sum", r[i].prob_sum, r[0].prob_sum, (size_t)s.experts * real);
        same_bits("z_sum", r[i].z_sum, r[0].z_sum, real);
        same_bits("counts", r[i].counts, r[0].counts, (size_t)s.experts * sizeof(int64_t));
    }
    double *logits = doubles(s.experts), *limit = doubles(s.experts);
    for (int64_t t = 0; t < s.tokens; t++) {
        naive_logits(&r[0], t, logits, limit);
        near_all("logits", (char *)r[0].logits + (size_t)(t * s.experts) * real, r[0].real,
                 s.experts, logits, limit);
        check_softmax(&r[0], t);
        check_choice(&r[0], t, normalize);
    }
    check_sums(&r[0]);
    free(logits);
    free(limit);
    for (int i = 0; i < MAX_THREADS; i++) router_free(&r[i]);
}

static void test_router_fwd(void **state)
{
    (void)state;
    for (int d = 0; d < 3; d++)
        for (int i = 0; i < SHAPES; i++)
            for (int option = 0; option < 4; option++)
                check_router(shapes[i], dtypes[d], option & 1, option & 2);
}

/* Equal scores go to the lowest index; NaN and huge logits still choose different experts. */
static void test_router_ties_and_extremes(void **state)
{
    (void)state;
    for (int d = 0; d < 3; d++) {
        struct router r = router_make((struct shape){ 3, 2, 6, 4 }, dtypes[d], false);
        for (int64_t i = 0; i < 12; i++) mt_store_f64(r.wr, r.real, i, i / 2 == 4 ? 1 : 0.5);
        for (int64_t i = 0; i < 6; i++) mt_store_f64(r.x, r.dtype, i, 1);
        mt_store_f64(r.x, r.dtype, 2, 1e30), mt_store_f64(r.x, r.dtype, 3, 1e30);
        mt_store_f64(r.x, r.dtype, 4, (double)NAN);
        router_run(&r, 1, true);
        static const int32_t want[8] = { 4, 0, 1, 2, 4, 0, 1, 2 };
        assert_memory_equal(r.chosen, want, sizeof want);
        assert_true(mt_load_f64(r.weights, r.real, 4) == 1); /* all on the largest */
        int seen = 0;
        for (int i = 8; i < 12; i++) {
            assert_in_range(r.chosen[i], 0, 5);
            seen |= 1 << r.chosen[i];
        }
        assert_int_equal(__builtin_popcount((unsigned)seen), 4);
        router_free(&r);
    }
}

/* A bias of NaN or -Inf is chosen last. */
static void test_router_bias_extremes(void **state)
{
    (void)state;
    for (int d = 0; d < 3; d++) {
        struct router r = router_make((struct shape){ 2, 3, 20, 20 }, dtypes[d], true);
        r.bias[2] = -INFINITY, r.bias[0] = NAN, r.bias[17] = INFINITY;
        router_run(&r, 1, false);
        for (int t = 0; t < 2; t++) {
            assert_int_equal(r.chosen[t * 20], 17);
            assert_int_equal(r.chosen[t * 20 + 18], 0);
            assert_int_equal(r.chosen[t * 20 + 19], 2);
        }
        for (int e = 0; e < 20; e++) assert_int_equal(r.counts[e], 2);
        router_free(&r);
    }
}

/* ---- router backward --------------------------------------------------------------------------
 */

struct router_grads {
    void *dx, *dwr, *dlogits, *dweights, *dprob_sum, *dz_sum;
};

static struct router_grads grads_make(const struct router *r)
{
    struct shape s = r->s;
    struct router_grads g = {
        test_alloc(s.tokens * s.width, r->dtype),
        test_alloc(s.experts * s.width, r->real),
        test_alloc(s.tokens * s.experts, r->real),
        test_alloc(s.tokens * s.top_k, r->real),
        test_alloc(s.experts, r->real),
        test_alloc(1, r->real),
    };
    test_random(g.dx, s.tokens * s.width, r->dtype, 1, 31);
    test_random(g.dwr, s.experts * s.width, r->real, 1, 32);
    test_random(g.dweights, s.tokens * s.top_k, r->real, 1, 33);
    test_random(g.dprob_sum, s.experts, r->real, 1, 34);
    test_random(g.dz_sum, 1, r->real, 0.3, 35);
    return g;
}

static void grads_free(struct router_grads *g)
{
    void *all[] = { g->dx, g->dwr, g->dlogits, g->dweights, g->dprob_sum, g->dz_sum };
    for (int i = 0; i < 6; i++) test_free(all[i]);
}

/* `add`: dx and dwr hold values that are added to. */
static void grads_run(const struct router *r, struct router_grads *g, int threads, bool normalize,
                      bool add)
{
    mt_stream stream = on_threads(threads);
    assert_ok(mt_router_bwd(&stream, &(struct mt_router_bwd_args){ .dtype = r->dtype,
                                                                   .tokens = r->s.tokens,
                                                                   .width = r->s.width,
                                                                   .experts = r->s.experts,
                                                                   .top_k = r->s.top_k,
                                                                   .normalize = normalize,
                                                                   .accumulate = add,
                                                                   .dx = g->dx,
                                                                   .dx_add = add ? g->dx : NULL,
                                                                   .dwr = g->dwr,
                                                                   .dlogits = g->dlogits,
                                                                   .x = r->x,
                                                                   .wr = r->wr,
                                                                   .probs = r->probs,
                                                                   .weights = r->weights,
                                                                   .chosen = r->chosen,
                                                                   .lse = r->lse,
                                                                   .dweights = g->dweights,
                                                                   .dprob_sum = g->dprob_sum,
                                                                   .dz_sum = g->dz_sum }));
}

/* <weights, dweights> + <prob_sum, dprob_sum> + z_sum dz_sum. */
static double router_loss(struct router *r, const struct router_grads *g, bool normalize)
{
    router_run(r, 1, normalize);
    double sum = mt_load_f64(r->z_sum, MT_F64, 0) * mt_load_f64(g->dz_sum, MT_F64, 0);
    for (int64_t i = 0; i < r->s.tokens * r->s.top_k; i++)
        sum += ((double *)r->weights)[i] * ((double *)g->dweights)[i];
    for (int64_t e = 0; e < r->s.experts; e++)
        sum += ((double *)r->prob_sum)[e] * ((double *)g->dprob_sum)[e];
    return sum;
}

/* Central differences with step h leave h^2 times a third derivative, here below 100 |scale|, and
 * 2^-52 |loss| / h. */
static void check_difference(struct router *r, const struct router_grads *g, bool normalize,
                             double *at, double got, const char *what)
{
    const double h = 0x1p-17;
    double keep = *at;
    *at = keep + h;
    double up = router_loss(r, g, normalize);
    *at = keep - h;
    double down = router_loss(r, g, normalize);
    *at = keep;
    double want = (up - down) / (2 * h), size = 1 + fabs(want) + fabs(up);
    double limit = 100 * h * h * size + 64 * 0x1p-52 * size / h;
    if (!(fabs(got - want) <= limit))
        fail_msg("%s: gradient %.12g, difference %.12g, limit %.3g", what, got, want, limit);
}

static void test_router_bwd_differences(void **state)
{
    (void)state;
    static const struct shape small[] = {
        { 5, 6, 7, 2 }, { 3, 9, 4, 4 }, { 9, 3, 1, 1 }, { 4, 5, 18, 3 }
    };
    for (int i = 0; i < 4; i++)
        for (int normalize = 0; normalize < 2; normalize++)
            for (int bias = 0; bias < 2; bias++) {
                struct router r = router_make(small[i], MT_F64, bias);
                struct router_grads g = grads_make(&r);
                router_run(&r, 1, normalize);
                grads_run(&r, &g, 1, normalize, false);
                for (int64_t j = 0; j < r.s.tokens * r.s.width; j++)
                    check_difference(&r, &g, normalize, (double *)r.x + j, ((double *)g.dx)[j],
                                     "dx");
                for (int64_t j = 0; j < r.s.experts * r.s.width; j++)
                    check_difference(&r, &g, normalize, (double *)r.wr + j, ((double *)g.dwr)[j],
                                     "dwr");
                grads_free(&g);
                router_free(&r);
            }
}

/* dlogits in f64 from the kernel's forward values. Each term passes through at most E + k + 8
 * roundings; `limit` sums the terms' magnitudes. */
static void naive_dlogits(const struct router *r, const struct router_grads *g, bool normalize,
                          double *want, double *limit)
{
    int64_t n = r->s.experts, k = r->s.top_k;
    double *dp = doubles(n), *size = doubles(n), eps = real_epsilon(r->dtype);
    for (int64_t t = 0; t < r->s.tokens; t++) {
        double total = 0, mean = 0, mean_size = 0, dot = 0, dot_size = 0;
        for (int64_t e = 0; e < n; e++)
            size[e] = fabs(dp[e] = mt_load_f64(g->dprob_sum, r->real, e));
        for (int64_t i = 0; i < k; i++) {
            double dw = mt_load_f64(g->dweights, r->real, t * k + i),
                   w = mt_load_f64(r->weights, r->real, t * k + i);
            total += mt_load_f64(r->probs, r->real, t * n + r->chosen[t * k + i]);
            mean += dw * w, mean_size += fabs(dw * w);
        }
        total = normalize ? total + 1e-20 : 1;
        if (!normalize) mean = mean_size = 0;
        for (int64_t i = 0; i < k; i++) {
            double dw = mt_load_f64(g->dweights, r->real, t * k + i);
            dp[r->chosen[t * k + i]] += (dw - mean) / total;
            size[r->chosen[t * k + i]] += (fabs(dw) + mean_size) / total;
        }
        for (int64_t e = 0; e < n; e++) {
            double p = mt_load_f64(r->probs, r->real, t * n + e);
            dot += dp[e] * p, dot_size += size[e] * p;
        }
        double z = mt_load_f64(g->dz_sum, r->real, 0) * 2 * mt_load_f64(r->lse, r->real, t);
        for (int64_t e = 0; e < n; e++) {
            double p = mt_load_f64(r->probs, r->real, t * n + e);
            want[t * n + e] = p * (dp[e] - dot) + z * p;
            limit[t * n + e] = (double)(n + 2 * k + 8) * eps * p * (size[e] + dot_size + fabs(z));
        }
    }
    free(dp);
    free(size);
}

/* dx and dwr from the kernel's dlogits: one rounding per term and one at the end, and what cuda
 * leaves out of dx's products where it is of bf16. */
static void naive_products(const struct router *r, const struct router_grads *before,
                           const struct router_grads *g, bool add, double *dx, double *dx_limit,
                           double *dwr, double *dwr_limit)
{
    struct shape s = r->s;
    double eps = real_epsilon(r->dtype);
    bool coarse = r->dtype == MT_BF16 && strcmp(test_device_name(), "cuda") == 0;
    double each = (double)(s.experts + 2) * eps + (coarse ? 0x1p-16 : 0);
    for (int64_t i = 0; i < s.tokens * s.width; i++)
        dx_limit[i] = fabs(dx[i] = add ? mt_load_f64(before->dx, r->dtype, i) : 0);
    for (int64_t i = 0; i < s.experts * s.width; i++)
        dwr_limit[i] = fabs(dwr[i] = add ? mt_load_f64(before->dwr, r->real, i) : 0);
    for (int64_t t = 0; t < s.tokens; t++)
        for (int64_t e = 0; e < s.experts; e++) {
            double dl = mt_load_f64(g->dlogits, r->real, t * s.experts + e);
            for (int64_t d = 0; d < s.width; d++) {
                double a = dl * mt_load_f64(r->wr, r->real, e * s.width + d);
                double b = dl * mt_load_f64(r->x, r->dtype, t * s.width + d);
                dx[t * s.width + d] += a, dx_limit[t * s.width + d] += fabs(a);
                dwr[e * s.width + d] += b, dwr_limit[e * s.width + d] += fabs(b);
            }
        }
    for (int64_t i = 0; i < s.tokens * s.width; i++)
        dx_limit[i] = each * dx_limit[i] + test_epsilon(r->dtype) * fabs(dx[i]) * 1.01;
    for (int64_t i = 0; i < s.experts * s.width; i++) dwr_limit[i] *= (double)(s.tokens + 2) * eps;
}

static void check_router_bwd(struct shape s, mt_dtype dtype, bool normalize, bool add)
{
    struct router r = router_make(s, dtype, true);
    struct router_grads before = grads_make(&r), g[MAX_THREADS];
    int64_t te = s.tokens * s.experts, td = s.tokens * s.width, ed = s.experts * s.width;
    router_run(&r, 1, normalize);
    for (int i = 0; i < MAX_THREADS; i++) {
        g[i] = grads_make(&r);
        grads_run(&r, &g[i], i + 1, normalize, add);
        same_bits("dx", g[i].dx, g[0].dx, (size_t)td * mt_dtype_size(dtype));
        same_bits("dwr", g[i].dwr, g[0].dwr, (size_t)ed * mt_dtype_size(r.real));
    }
    double *want[3] = { doubles(te), doubles(td), doubles(ed) };
    double *limit[3] = { doubles(te), doubles(td), doubles(ed) };
    naive_dlogits(&r, &g[0], normalize, want[0], limit[0]);
    near_all("dlogits", g[0].dlogits, r.real, te, want[0], limit[0]);
    naive_products(&r, &before, &g[0], add, want[1], limit[1], want[2], limit[2]);
    near_all("dx", g[0].dx, dtype, td, want[1], limit[1]);
    near_all("dwr", g[0].dwr, r.real, ed, want[2], limit[2]);
    for (int i = 0; i < 3; i++) {
        free(want[i]);
        free(limit[i]);
        grads_free(&g[i]);
    }
    grads_free(&before);
    router_free(&r);
}

static void test_router_bwd(void **state)
{
    (void)state;
    for (int d = 0; d < 3; d++)
        for (int i = 0; i < SHAPES; i++)
            for (int option = 0; option < 4; option++)
                check_router_bwd(shapes[i], dtypes[d], option & 1, option & 2);
}

/* Gradients that are not given count as 0, and outputs that are not wanted are skipped. */
static void test_router_bwd_parts(void **state)
{
    (void)state;
    struct router r = router_make((struct shape){ 6, 5, 4, 2 }, MT_F32, false);
    struct router_grads g = grads_make(&r);
    mt_stream stream = on_threads(1);
    router_run(&r, 1, true);
    struct mt_router_bwd_args args = { .dtype = MT_F32,
                                       .tokens = 6,
                                       .width = 5,
                                       .experts = 4,
                                       .top_k = 2,
                                       .normalize = true,
                                       .dlogits = g.dlogits,
                                       .probs = r.probs };
    assert_ok(mt_router_bwd(&stream, &args));
    for (int i = 0; i < 24; i++) assert_true(((float *)g.dlogits)[i] == 0);
    args.dx = g.dx;
    assert_fails(mt_router_bwd(&stream, &args), MT_EINVAL, "dx needs wr");
    args.wr = r.wr, args.dwr = g.dwr;
    assert_fails(mt_router_bwd(&stream, &args), MT_EINVAL, "dwr needs x");
    args.x = r.x, args.dz_sum = g.dz_sum;
    assert_fails(mt_router_bwd(&stream, &args), MT_EINVAL, "dz_sum needs lse");
    args.dz_sum = NULL;
    assert_ok(mt_router_bwd(&stream, &args));
    for (int i = 0; i < 30; i++) assert_true(((float *)g.dx)[i] == 0);
    args.top_k = 5;
    assert_fails(mt_router_bwd(&stream, &args), MT_EINVAL, "top_k is 5");
    grads_free(&g);
    router_free(&r);
}

/* Experts of these probabilities alone are chosen, by the bias: weights and gradients are those of
 * p / (sum + 1e-20), finite where there is no probability at all or next to none. */
static void check_no_share(mt_dtype dtype, double logit)
{
    struct router r = router_make((struct shape){ 3, 2, 40, 34 }, dtype, true);
    for (int64_t e = 0; e < 40; e++) {
        r.bias[e] = e < 34 ? 4 : 0;
        mt_store_f64(r.wr, r.real, 2 * e, e < 34 ? logit : 0);
        mt_store_f64(r.wr, r.real, 2 * e + 1, 0);
    }
    for (int64_t i = 0; i < 6; i++) mt_store_f64(r.x, r.dtype, i, 1);
    for (int normalize = 0; normalize < 2; normalize++) {
        struct router_grads g = grads_make(&r);
        router_run(&r, 1, normalize);
        grads_run(&r, &g, 1, normalize, false);
        double *want = doubles(3 * 40), *limit = doubles(3 * 40);
        naive_dlogits(&r, &g, normalize, want, limit);
        for (int64_t i = 0; i < 3 * 40; i++) limit[i] += 0x1p-140; /* below the normal numbers */
        near_all("dlogits", g.dlogits, r.real, 3 * 40, want, limit);
        for (int64_t t = 0; t < 3; t++) {
            for (int i = 0; i < 34; i++) assert_in_range(r.chosen[t * 34 + i], 0, 33);
            check_choice(&r, t, normalize);
        }
        for (int64_t i = 0; i < 3 * 34; i++)
            assert_true(isfinite(mt_load_f64(r.weights, r.real, i)));
        for (int64_t i = 0; i < 6; i++) assert_true(isfinite(mt_load_f64(g.dx, r.dtype, i)));
        for (int64_t i = 0; i < 80; i++) assert_true(isfinite(mt_load_f64(g.dwr, r.real, i)));
        free(want);
        free(limit);
        grads_free(&g);
    }
    router_free(&r);
}

static void test_router_no_share(void **state)
{
    (void)state;
    static const double logits[] = { -2000, -700, -100, -96, -88, -60, -46, -40 };
    for (int d = 0; d < 3; d++)
        for (size_t i = 0; i < sizeof logits / sizeof logits[0]; i++)
            check_no_share(dtypes[d], logits[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_router_fwd),
        cmocka_unit_test(test_router_ties_and_extremes),
        cmocka_unit_test(test_router_bias_extremes),
        cmocka_unit_test(test_router_bwd_differences),
        cmocka_unit_test(test_router_bwd),
        cmocka_unit_test(test_router_bwd_parts),
        cmocka_unit_test(test_router_no_share),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
