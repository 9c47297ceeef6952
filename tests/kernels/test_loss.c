/* Cross-entropy. */
#include "tests/kernels/dense.h"

enum { IGNORE = -100 };

static const struct {
    int64_t tokens, vocab;
} shapes[] = { { 0, 5 },    { 1, 1 },    { 1, 2 },     { 7, 33 },   { 33, 256 },
               { 9, 512 },  { 10, 513 }, { 11, 1024 }, { 9, 1025 }, { 3, 2047 },
               { 3, 2048 }, { 5, 2049 }, { 2, 20000 } };
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* A batch of logits and all that the two ops read and write. */
struct batch {
    mt_dtype dtype, real;
    int64_t tokens, vocab;
    void *logits, *dlogits, *lse, *loss, *token_loss, *scale, *dloss;
    int32_t *targets;
    double size; /* of the loss, for the gradient check */
};

static struct batch batch_create(mt_dtype dtype, int64_t tokens, int64_t vocab, double spread)
{
    struct batch b = {
        .dtype = dtype, .real = mt_dtype_wide(dtype), .tokens = tokens, .vocab = vocab
    };
    b.logits = random_buffer(tokens * vocab, dtype, spread, 1);
    b.dlogits = test_alloc(tokens * vocab, dtype);
    b.lse = test_alloc(tokens, b.real);
    b.token_loss = test_alloc(tokens, b.real);
    b.loss = test_alloc(1, b.real);
    b.scale = test_alloc(1, b.real);
    b.dloss = test_alloc(1, b.real);
    b.targets = test_alloc(tokens, MT_I32);
    mt_store_f64(b.scale, b.real, 0, 1 / (double)(tokens + 1));
    mt_store_f64(b.dloss, b.real, 0, 0.75);
    for (int64_t t = 0; t < tokens; t++)
        b.targets[t] = t % 5 == 3 ? IGNORE : (int32_t)((t * 7919 + vocab - 1) % vocab);
    return b;
}

static void batch_destroy(struct batch *b)
{
    void *all[] = { b->logits,     b->dlogits, b->lse,   b->loss,
                    b->token_loss, b->scale,   b->dloss, b->targets };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) test_free(all[i]);
}

static void forward(const struct batch *b, void *token_loss)
{
    assert_ok(mt_cross_entropy_fwd(stream(),
                                   &(struct mt_cross_entropy_fwd_args){ .dtype = b->dtype,
                                                                        .tokens = b->tokens,
                                                                        .vocab = b->vocab,
                                                                        .ignore = IGNORE,
                                                                        .loss = b->loss,
                                                                        .lse = b->lse,
                                                                        .token_loss = token_loss,
                                                                        .logits = b->logits,
                                                                        .targets = b->targets,
                                                                        .scale = b->scale }));
}

static void backward(const struct batch *b, void *dlogits)
{
    assert_ok(
        mt_cross_entropy_bwd(stream(), &(struct mt_cross_entropy_bwd_args){ .dtype = b->dtype,
                                                                            .tokens = b->tokens,
                                                                            .vocab = b->vocab,
                                                                            .ignore = IGNORE,
                                                                            .dlogits = dlogits,
                                                                            .logits = b->logits,
                                                                            .lse = b->lse,
                                                                            .targets = b->targets,
                                                                            .scale = b->scale,
                                                                            .dloss = b->dloss }));
}

/* log sum exp of a row and, in *relative, what real may make of the sum: each argument x - max is
 * rounded, exp has 2.2 epsilon, and at most 2048 terms are added in real (the rest in f64). */
static double reference(const struct batch *b, int64_t t, double *most, double *relative)
{
    double sum = 0, arguments = 0;
    *most = -(double)INFINITY;
    for (int64_t v = 0; v < b->vocab; v++)
        *most = fmax(*most, mt_load_f64(b->logits, b->dtype, t * b->vocab + v));
    for (int64_t v = 0; v < b->vocab; v++) {
        double x = mt_load_f64(b->logits, b->dtype, t * b->vocab + v) - *most;
        sum += exp(x);
        arguments += exp(x) * (isinf(x) ? 0 : fabs(x));
    }
    double terms =
        b->vocab < 2048 ? (double)b->vocab : 2048 + (b->real == MT_F64 ? (double)b->vocab : 0);
    *relative = test_epsilon(b->real) * (arguments / sum + terms + 4);
    return log(sum);
}

static void check_forward(const struct batch *b)
{
    double epsilon = test_epsilon(b->real), total = 0, total_bound = 0;
    double scale = mt_load_f64(b->scale, b->real, 0);
    forward(b, b->token_loss);
    for (int64_t t = 0; t < b->tokens; t++) {
        double got = mt_load_f64(b->token_loss, b->real, t);
        if (b->targets[t] == IGNORE) {
            assert_true(got == 0);
            continue;
        }
        double most, relative, log_sum = reference(b, t, &most, &relative);
        double target = mt_load_f64(b->logits, b->dtype, t * b->vocab + b->targets[t]);
        double lse = most + log_sum, loss = most - target + log_sum;
        double lse_bound = relative + 2 * epsilon * fabs(lse),
               bound = relative + 4 * epsilon * fabs(loss);
        assert_within("lse", (char *)b->lse + (size_t)t * mt_dtype_size(b->real), b->real, &lse,
                      &lse_bound, 1);
        assert_within("token_loss", (char *)b->token_loss + (size_t)t * mt_dtype_size(b->real),
                      b->real, &loss, &bound, 1);
        total += loss * scale;
        total_bound += (bound + epsilon * fabs(loss)) * scale;
    }
    total_bound += epsilon * fabs(total) * (b->real == MT_F64 ? (double)b->tokens + 2 : 2);
    assert_within("loss", b->loss, b->real, &total, &total_bound, 1);
}

static void forward_matches_f64(void **state)
{
    (void)state;
    static const double spreads[] = { 0, 3, 60, 3000 };
    for (int d = 0; d < DTYPES; d++)
        for (int s = 0; s < SHAPES; s++)
            for (int i = 0; i < 4; i++) {
                struct batch b =
                    batch_create(dtypes[d], shapes[s].tokens, shapes[s].vocab, spreads[i]);
                check_forward(&b);
                batch_destroy(&b);
            }
}

/* The loss is the sum, in order, of what token_loss shows, whether it is asked for or not. */
static void loss_is_the_sum_of_token_losses(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++) {
        struct batch b = batch_create(dtypes[d], 33, 100, 4);
        forward(&b, b.token_loss);
        double sum = 0, got = mt_load_f64(b.loss, b.real, 0);
        for (int64_t t = 0; t < b.tokens; t++) sum += mt_load_f64(b.token_loss, b.real, t);
        sum *= mt_load_f64(b.scale, b.real, 0);
        assert_true(got == (b.real == MT_F32 ? (double)(float)sum : sum));
        forward(&b, NULL);
        assert_true(mt_load_f64(b.loss, b.real, 0) == got);
        for (int64_t t = 0; t < b.tokens; t++) b.targets[t] = IGNORE;
        forward(&b, NULL);
        assert_true(mt_load_f64(b.loss, b.real, 0) == 0);
        batch_destroy(&b);
    }
}

/* A prediction so sure that lse rounds to the logit still has its loss: exp(-12) = 6.1e-6 next to a
 * logit of 500. */
static void sure_predictions_keep_their_loss(void **state)
{
    (void)state;
    struct batch b = batch_create(MT_F32, 1, 2, 1);
    float *logits = b.logits, *loss = b.token_loss;
    logits[0] = 488;
    logits[1] = 500;
    b.targets[0] = 1;
    forward(&b, b.token_loss);
    /* One rounding of 1 + exp(-12) in f32 is the whole error. */
    assert_true(fabs((double)*loss - log1p(exp(-12))) <= 0x1p-24);
    batch_destroy(&b);
}

static void infinities_and_nan(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++) {
        struct batch b = batch_create(dtypes[d], 4, 5000, 2);
        for (int64_t v = 0; v < 4000; v++)
            mt_store_f64(b.logits, b.dtype, v, -(double)INFINITY); /* two blocks of them */
        mt_store_f64(b.logits, b.dtype, 1 * b.vocab + 4500, (double)NAN);
        mt_store_f64(b.logits, b.dtype, 2 * b.vocab + 10, -(double)NAN);
        for (int64_t t = 0; t < 4; t++) b.targets[t] = 4999;
        b.targets[3] = 5000; /* outside the vocabulary */
        forward(&b, b.token_loss);
        double most, relative, want = reference(&b, 0, &most, &relative);
        want += most;
        relative += 2 * test_epsilon(b.real) * fabs(want);
        assert_within("lse", b.lse, b.real, &want, &relative, 1);
        for (int t = 1; t < 4; t++) assert_true(isnan(mt_load_f64(b.token_loss, b.real, t)));
        assert_true(isnan(mt_load_f64(b.loss, b.real, 0)));
        batch_destroy(&b);
    }
}

static void check_backward(const struct batch *b)
{
    int64_t count = b->tokens * b->vocab;
    double *want = zeros(count), *bound = zeros(count), epsilon = test_epsilon(b->real);
    double scale = mt_load_f64(b->scale, b->real, 0) * mt_load_f64(b->dloss, b->real, 0);
    forward(b, NULL);
    for (int64_t i = 0; i < count; i++) {
        int32_t target = b->targets[i / b->vocab];
        if (target == IGNORE) continue;
        double x = mt_load_f64(b->logits, b->dtype, i) - mt_load_f64(b->lse, b->real, i / b->vocab);
        double hot = i % b->vocab == target;
        want[i] = scale * (exp(x) - hot);
        /* x rounded, exp's 2.2, the difference, two products; below exp's underflow, nothing. */
        bound[i] = epsilon * scale * (exp(x) * (fabs(x) + 4) + 3 * fabs(exp(x) - hot)) +
                   scale * (b->real == MT_F64 ? 0x1p-1074 : 0x1p-149);
    }
    backward(b, b->dlogits);
    assert_within("dlogits", b->dlogits, b->dtype, want, bound, count);
    backward(b, b->logits);
    assert_same_bits("dlogits in logits", b->logits, b->dlogits, count, b->dtype);
    free(want);
    free(bound);
}

static void backward_matches_f64(void **state)
{
    (void)state;
    static const double spreads[] = { 0, 3, 60, 3000 };
    for (int d = 0; d < DTYPES; d++)
        for (int s = 0; s < SHAPES; s++)
            for (int i = 0; i < 4; i++) {
                struct batch b =
                    batch_create(dtypes[d], shapes[s].tokens, shapes[s].vocab, spreads[i]);
                check_backward(&b);
                batch_destroy(&b);
            }
}

static double loss_of(void *context)
{
    struct batch *b = context;
    forward(b, NULL);
    b->size = 0.75 * fabs(mt_load_f64(b->loss, MT_F64, 0));
    return 0.75 * mt_load_f64(b->loss, MT_F64, 0);
}

static void gradient(void **state)
{
    (void)state;
    struct batch b = batch_create(MT_F64, 7, 11, 2);
    loss_of(&b);
    backward(&b, b.dlogits);
    assert_gradient("dlogits", loss_of, &b, b.logits, b.dlogits, b.tokens * b.vocab, b.size,
                    7 + 11 + 8);
    batch_destroy(&b);
}

static void run_forward(void *context)
{
    forward(context, ((struct batch *)context)->token_loss);
}

static void run_backward(void *context)
{
    backward(context, ((struct batch *)context)->dlogits);
}

static void thread_independent(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++) {
        struct batch b = batch_create(dtypes[d], 37, 3001, 4);
        assert_thread_independent("loss", run_forward, &b, b.loss, 1, b.real);
        assert_thread_independent("lse", run_forward, &b, b.token_loss, b.tokens, b.real);
        assert_thread_independent("dlogits", run_backward, &b, b.dlogits, b.tokens * b.vocab,
                                  b.dtype);
        batch_destroy(&b);
    }
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    double x[4] = { 0 };
    assert_fails(mt_cross_entropy_fwd(stream(),
                                      &(struct mt_cross_entropy_fwd_args){
                                          .dtype = MT_F64, .tokens = 1, .vocab = 0 }),
                 MT_EINVAL, "cross_entropy_fwd: vocab is 0");
    assert_fails(mt_cross_entropy_fwd(stream(),
                                      &(struct mt_cross_entropy_fwd_args){
                                          .dtype = MT_F64, .tokens = 1, .vocab = 1, .loss = x }),
                 MT_EINVAL, "cross_entropy_fwd: scale is NULL");
    assert_fails(mt_cross_entropy_bwd(stream(),
                                      &(struct mt_cross_entropy_bwd_args){
                                          .dtype = MT_F64, .tokens = -1, .vocab = 1 }),
                 MT_EINVAL, "cross_entropy_bwd: tokens is -1");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_matches_f64),
        cmocka_unit_test(loss_is_the_sum_of_token_losses),
        cmocka_unit_test(sure_predictions_keep_their_loss),
        cmocka_unit_test(infinities_and_nan),
        cmocka_unit_test(backward_matches_f64),
        cmocka_unit_test(gradient),
        cmocka_unit_test(thread_independent),
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
