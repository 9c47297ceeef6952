/* Elementwise ops, SwiGLU, embedding. */
#include "tests/kernels/dense.h"

static const int64_t counts[] = { 0, 1, 7, 33, 16383, 16385 };
enum { COUNTS = sizeof counts / sizeof counts[0] };

static const double specials[] = {
    0.0,
    -0.0,
    1.0 / 3,
    -1.0 / 3,
    1e-30,
    -1e-30,
    0x1p-149,
    0x1p-1074,
    1e40,
    -1e40,
    3.4e38,
    3.396e38,
    65504,
    65520,
    1e-6,
    6e-8,
    (double)INFINITY,
    -(double)INFINITY,
    (double)NAN,
    0x1.01p0,
};
enum { SPECIALS = sizeof specials / sizeof specials[0] };

static bool same(double a, double b)
{
    return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b);
}

static void fill_stores_the_rounded_value(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++)
        for (int c = 0; c < COUNTS; c++) {
            void *y = test_alloc(counts[c], dtypes[d]);
            double value = specials[c % SPECIALS + 2], want;
            uint64_t stored;
            mt_store_f64(&stored, dtypes[d], 0, value);
            want = mt_load_f64(&stored, dtypes[d], 0);
            assert_ok(mt_fill(
                stream(), &(struct mt_fill_args){
                              .dtype = dtypes[d], .count = counts[c], .y = y, .value = value }));
            for (int64_t i = 0; i < counts[c]; i++)
                assert_true(same(mt_load_f64(y, dtypes[d], i), want));
            test_free(y);
        }
}

static void cast_rounds_once(void **state)
{
    (void)state;
    static const mt_dtype from[] = { MT_F64, MT_F32, MT_BF16, MT_F16 };
    for (int d = 0; d < DTYPES; d++)
        for (int f = 0; f < 4; f++)
            for (int c = 0; c < COUNTS; c++) {
                int64_t count = counts[c];
                void *x = random_buffer(count, from[f], 3, 1), *y = test_alloc(count, dtypes[d]);
                for (int64_t i = 0; i < count && i < SPECIALS; i++)
                    mt_store_f64(x, from[f], i, specials[i]);
                assert_ok(mt_cast(
                    stream(),
                    &(struct mt_cast_args){
                        .dtype = dtypes[d], .count = count, .y = y, .x = x, .x_dtype = from[f] }));
                for (int64_t i = 0; i < count; i++) {
                    uint64_t stored;
                    mt_store_f64(&stored, dtypes[d], 0, mt_load_f64(x, from[f], i));
                    assert_true(
                        same(mt_load_f64(y, dtypes[d], i), mt_load_f64(&stored, dtypes[d], 0)));
                }
                test_free(x);
                test_free(y);
            }
    assert_fails(mt_cast(stream(), &(struct mt_cast_args){ .dtype = MT_F32, .x_dtype = MT_I32 }),
                 MT_EINVAL, "x_dtype is i32");
}

/* y aliases a, b, or neither. The sum of two floats is exact in f64 up to one more rounding, which
 * cannot change it. */
static void add_rounds_once(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++)
        for (int c = 0; c < COUNTS; c++)
            for (int alias = 0; alias < 3; alias++) {
                int64_t count = counts[c];
                mt_dtype dtype = dtypes[d];
                void *a = random_buffer(count, dtype, 3, 1), *b = random_buffer(count, dtype, 1, 2);
                for (int64_t i = 0; i < count && i < SPECIALS; i++)
                    mt_store_f64(a, dtype, i, specials[i]);
                double *x = as_f64(a, dtype, count), *z = as_f64(b, dtype, count);
                void *own = test_alloc(count, dtype), *y = alias == 0 ? own : alias == 1 ? a : b;
                assert_ok(
                    mt_add(stream(), &(struct mt_add_args){
                                         .dtype = dtype, .count = count, .y = y, .a = a, .b = b }));
                for (int64_t i = 0; i < count; i++) {
                    uint64_t stored;
                    mt_store_f64(&stored, dtype, 0, x[i] + z[i]);
                    assert_true(same(mt_load_f64(y, dtype, i), mt_load_f64(&stored, dtype, 0)));
                }
                free(x);
                free(z);
                test_free(a);
                test_free(b);
                test_free(own);
            }
}

/* ---- SwiGLU ---- */

static const struct {
    int64_t rows, used, width;
} swiglu_shapes[] = { { 0, 0, 7 }, { 5, 5, 0 }, { 1, 1, 1 },      { 7, 3, 33 },
                      { 9, 0, 7 }, { 3, 3, 7 }, { 130, 129, 200 } };
enum { SWIGLU_SHAPES = sizeof swiglu_shapes / sizeof swiglu_shapes[0] };

static const double gates[] = { 0.0,
                                -0.0,
                                1e-30,
                                -1e-30,
                                20,
                                -20,
                                80,
                                -80,
                                95,
                                -95.0,
                                1e4,
                                -1e4,
                                (double)INFINITY,
                                -(double)INFINITY,
                                (double)NAN,
                                -1.2784645 };
enum { GATES = sizeof gates / sizeof gates[0] };

static void *gate_up(int64_t rows, int64_t width, mt_dtype dtype)
{
    void *x = random_buffer(rows * 2 * width, dtype, 4, 3);
    for (int64_t i = 0; i < width && i < GATES && rows; i++) mt_store_f64(x, dtype, i, gates[i]);
    return x;
}

/* Epsilons in the sigmoid of g: exp has 1.1 ulp = 2.2, then one rounding each for 1 + e and the
 * quotient; of bf16, what the contract allows. */
static double sigmoid_epsilons(double g, mt_dtype dtype)
{
    return dtype == MT_BF16 ? 8 + 2 * fmin(fabs(g), 100) : 5;
}

/* One more for the product by u, or by g and by u. Where exp(-g) overflows, or a sigmoid may be 0,
 * the result is less than |u| times g / FLT_MIN. */
static void swiglu_fwd_matches_f64(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++)
        for (int c = 0; c < SWIGLU_SHAPES; c++) {
            int64_t rows = swiglu_shapes[c].rows, used = swiglu_shapes[c].used;
            int64_t width = swiglu_shapes[c].width;
            mt_dtype dtype = dtypes[d];
            double epsilon = test_epsilon(mt_dtype_wide(dtype));
            double tiny = 1e4 * (dtype == MT_F64 ? 0x1p-1024 : 0x1p-128);
            void *x = gate_up(rows, width, dtype), *y = test_alloc(rows * width, dtype);
            double *want = zeros(used * width), *bound = zeros(used * width);
            for (int64_t i = 0; i < used * width; i++) {
                int64_t at = i / width * 2 * width + i % width;
                double g = mt_load_f64(x, dtype, at), u = mt_load_f64(x, dtype, at + width);
                want[i] = g / (1 + exp(-g)) * u;
                bound[i] = (1 + sigmoid_epsilons(g, dtype)) * epsilon * fabs(want[i]) + tiny;
            }
            assert_ok(mt_swiglu_fwd(
                stream(), &(struct mt_swiglu_fwd_args){ .dtype = dtype,
                                                        .rows = rows,
                                                        .width = width,
                                                        .rows_used = used == rows ? NULL : &used,
                                                        .y = y,
                                                        .x = x }));
            assert_within("swiglu", y, dtype, want, bound, used * width);
            assert_poison(y, dtype, used * width, rows * width);
            free(want);
            free(bound);
            test_free(x);
            test_free(y);
        }
}

static void swiglu_bwd_matches_f64(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++)
        for (int c = 0; c < SWIGLU_SHAPES; c++) {
            int64_t rows = swiglu_shapes[c].rows, used = swiglu_shapes[c].used;
            int64_t width = swiglu_shapes[c].width, count = used * 2 * width;
            mt_dtype dtype = dtypes[d];
            double epsilon = test_epsilon(mt_dtype_wide(dtype));
            double tiny = 1e5 * (dtype == MT_F64 ? 0x1p-1024 : 0x1p-128);
            void *x = gate_up(rows, width, dtype), *dx = test_alloc(rows * 2 * width, dtype);
            void *dy = random_buffer(rows * width, dtype, 1, 4);
            double *want = zeros(count), *bound = zeros(count);
            for (int64_t i = 0; i < used * width; i++) {
                int64_t at = i / width * 2 * width + i % width;
                double g = mt_load_f64(x, dtype, at), u = mt_load_f64(x, dtype, at + width);
                double dv = mt_load_f64(dy, dtype, i), s = 1 / (1 + exp(-g));
                want[at] = dv * u * s * (1 + g * (1 - s));
                want[at + width] = dv * g * s;
                /* 1 - s has one epsilon more than s, absolute, and g times that. */
                double e = sigmoid_epsilons(g, dtype) * epsilon;
                bound[at] = (2 * e + 6 * epsilon) * fabs(dv * u * s) * (1 + fabs(g)) + tiny;
                bound[at + width] = (e + 3 * epsilon) * fabs(want[at + width]) + tiny;
            }
            assert_ok(mt_swiglu_bwd(
                stream(), &(struct mt_swiglu_bwd_args){ .dtype = dtype,
                                                        .rows = rows,
                                                        .width = width,
                                                        .rows_used = used == rows ? NULL : &used,
                                                        .dx = dx,
                                                        .dy = dy,
                                                        .x = x }));
            assert_within("dx", dx, dtype, want, bound, count);
            assert_poison(dx, dtype, count, rows * 2 * width);
            free(want);
            free(bound);
            test_free(x);
            test_free(dx);
            test_free(dy);
        }
}

struct swiglu_case {
    struct mt_swiglu_fwd_args args;
    const double *weights;
    double size;
};

static double swiglu_loss(void *context)
{
    struct swiglu_case *c = context;
    assert_ok(mt_swiglu_fwd(stream(), &c->args));
    return weighted(c->weights, c->args.y, c->args.rows * c->args.width, &c->size);
}

static void swiglu_gradient(void **state)
{
    (void)state;
    enum { ROWS = 3, WIDTH = 7 };
    double *x = random_buffer(ROWS * 2 * WIDTH, MT_F64, 3, 5),
           *y = test_alloc(ROWS * WIDTH, MT_F64);
    double *dy = random_buffer(ROWS * WIDTH, MT_F64, 1, 6);
    double *dx = test_alloc(ROWS * 2 * WIDTH, MT_F64);
    struct swiglu_case c = { { .dtype = MT_F64, .rows = ROWS, .width = WIDTH, .y = y, .x = x },
                             dy,
                             0 };
    assert_ok(mt_swiglu_bwd(
        stream(), &(struct mt_swiglu_bwd_args){
                      .dtype = MT_F64, .rows = ROWS, .width = WIDTH, .dx = dx, .dy = dy, .x = x }));
    swiglu_loss(&c);
    assert_gradient("dx", swiglu_loss, &c, x, dx, ROWS * 2 * WIDTH, c.size, 8 + ROWS * WIDTH);
    test_free(x);
    test_free(y);
    test_free(dy);
    test_free(dx);
}

/* ---- embedding ---- */

static const struct {
    int64_t tokens, vocab, width;
} embeddings[] = { { 0, 5, 7 },   { 3, 5, 0 },    { 0, 0, 3 },     { 1, 1, 1 },
                   { 33, 4, 33 }, { 200, 7, 15 }, { 500, 50, 130 } };
enum { EMBEDDINGS = sizeof embeddings / sizeof embeddings[0] };

static int32_t *draw_tokens(int64_t count, int64_t vocab)
{
    int32_t *tokens = test_alloc(count, MT_I32);
    for (int64_t t = 0; t < count; t++) tokens[t] = (int32_t)((t * t + 3 * t) % vocab);
    return tokens;
}

static void embedding_fwd_copies_rows(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++)
        for (int c = 0; c < EMBEDDINGS; c++) {
            int64_t tokens = embeddings[c].tokens, vocab = embeddings[c].vocab;
            int64_t width = embeddings[c].width;
            mt_dtype dtype = dtypes[d], real = mt_dtype_wide(dtype);
            void *w = random_buffer(vocab * width, real, 2, 7);
            void *y = test_alloc(tokens * width, dtype);
            int32_t *ids = draw_tokens(tokens, vocab);
            assert_ok(
                mt_embedding_fwd(stream(), &(struct mt_embedding_fwd_args){ .dtype = dtype,
                                                                            .tokens_count = tokens,
                                                                            .vocab = vocab,
                                                                            .width = width,
                                                                            .y = y,
                                                                            .w = w,
                                                                            .tokens = ids }));
            for (int64_t i = 0; i < tokens * width; i++) {
                uint64_t stored;
                mt_store_f64(&stored, dtype, 0,
                             mt_load_f64(w, real, ids[i / width] * width + i % width));
                assert_true(mt_load_f64(y, dtype, i) == mt_load_f64(&stored, dtype, 0));
            }
            test_free(w);
            test_free(y);
            test_free(ids);
        }
}

static void run_embedding_bwd(void *context)
{
    assert_ok(mt_embedding_bwd(stream(), context));
}

/* What dw will be: sums in order of the tokens, known to the bit. */
static double *embedding_sums(const struct mt_embedding_bwd_args *a)
{
    const mt_dtype real = mt_dtype_wide(a->dtype);
    const int64_t width = a->width;
    double *want = a->accumulate ? as_f64(a->dw, real, a->vocab * width) : zeros(a->vocab * width);
    for (int64_t i = 0; i < a->tokens_count * width; i++) {
        double *sum = want + a->tokens[i / width] * width + i % width;
        double next = *sum + mt_load_f64(a->dy, a->dtype, i);
        *sum = real == MT_F32 ? (double)(float)next : next;
    }
    return want;
}

static void embedding_bwd_sums_in_order(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++)
        for (int c = 0; c < EMBEDDINGS; c++)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                int64_t tokens = embeddings[c].tokens, vocab = embeddings[c].vocab;
                int64_t width = embeddings[c].width;
                mt_dtype dtype = dtypes[d], real = mt_dtype_wide(dtype);
                void *dw = random_buffer(vocab * width, real, 2, 8);
                void *dy = random_buffer(tokens * width, dtype, 2, 9);
                int32_t *ids = draw_tokens(tokens, vocab);
                struct mt_embedding_bwd_args args = { .dtype = dtype,
                                                      .tokens_count = tokens,
                                                      .vocab = vocab,
                                                      .width = width,
                                                      .accumulate = accumulate,
                                                      .dw = dw,
                                                      .dy = dy,
                                                      .tokens = ids };
                double *want = embedding_sums(&args);
                assert_ok(mt_embedding_bwd(stream(), &args));
                test_assert_near("dw", dw, real, want, vocab * width, 0, 0);
                args.accumulate = false;
                assert_thread_independent("dw", run_embedding_bwd, &args, dw, vocab * width, real);
                free(want);
                test_free(dw);
                test_free(dy);
                test_free(ids);
            }
}

/* Tokens of which half are row 0 in runs, the others spread over the vocabulary; or, with `few`
 * rows, of these alone. */
static int32_t *skewed_tokens(int64_t count, int64_t vocab, int64_t few)
{
    int32_t *tokens = test_alloc(count, MT_I32);
    for (int64_t t = 0; t < count; t++)
        tokens[t] = (int32_t)(few           ? (t * t + t / 7) % few * (vocab / few)
                              : t % 64 < 32 ? 0
                                            : t * 7919 % vocab);
    return tokens;
}

/* Shapes at which a frequent row is longer than what is looked at, listed or brought at a time, of
 * rows that lie anywhere: bit for bit, with values that are not finite and zeros of both signs. */
static void embedding_bwd_of_frequent_rows(void **state)
{
    (void)state;
    static const struct {
        int64_t tokens, vocab, width, few;
    } shapes[] = {
        { 16, 1, 8, 0 },         { 17, 1, 8, 0 },         { 18, 1, 9, 0 },
        { 80, 1, 64, 0 },        { 81, 1, 64, 0 },        { 97, 1, 65, 0 },
        { 512, 1, 33, 0 },       { 513, 1, 128, 0 },      { 1023, 3, 24, 3 },
        { 1024, 3, 24, 3 },      { 1025, 3, 24, 3 },      { 1536, 1, 16, 0 },
        { 1537, 1, 1, 0 },       { 2048, 256, 64, 0 },    { 2049, 255, 63, 0 },
        { 5000, 256, 264, 0 },   { 5000, 2, 1, 2 },       { 2600, 5000, 40, 0 },
        { 2600, 151936, 8, 0 },  { 3000, 151936, 2, 70 }, { 1500, 4096, 2064, 300 },
        { 300, 4096, 2051, 12 },
    };
    static const double odd[] = { 0.0, -0.0, HUGE_VAL, -HUGE_VAL, (double)NAN };
    for (int d = 0; d < DTYPES; d++)
        for (size_t c = 0; c < sizeof shapes / sizeof *shapes; c++)
            for (int kind = 0; kind < 4; kind++) {
                const bool accumulate = kind & 1;
                const int64_t tokens = shapes[c].tokens, vocab = shapes[c].vocab;
                const int64_t width = shapes[c].width, shift = kind / 2;
                const mt_dtype dtype = dtypes[d], real = mt_dtype_wide(dtype);
                void *dw = random_buffer(vocab * width, real, 2, 8);
                char *all = random_buffer(tokens * width + shift, dtype, 2, 9);
                void *dy = all + (size_t)shift * mt_dtype_size(dtype);
                int32_t *ids = skewed_tokens(tokens, vocab, shapes[c].few);
                for (int64_t i = 0; i < tokens * width; i += 977)
                    mt_store_f64(dy, dtype, i, odd[i % (kind & 1 ? 5 : 2)]);
                struct mt_embedding_bwd_args args = { .dtype = dtype,
                                                      .tokens_count = tokens,
                                                      .vocab = vocab,
                                                      .width = width,
                                                      .accumulate = accumulate,
                                                      .dw = dw,
                                                      .dy = dy,
                                                      .tokens = ids };
                double *want = embedding_sums(&args);
                assert_ok(mt_embedding_bwd(stream(), &args));
                for (int64_t i = 0; i < vocab * width; i++)
                    if (!same(mt_load_f64(dw, real, i), want[i]))
                        fail_msg("dw[%lld] of %lld tokens (%s) is %.17g, must be %.17g",
                                 (long long)i, (long long)tokens, mt_dtype_name(dtype),
                                 mt_load_f64(dw, real, i), want[i]);
                free(want);
                test_free(dw);
                test_free(all);
                test_free(ids);
            }
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    double x[8] = { 0 };
    assert_fails(mt_fill(stream(), &(struct mt_fill_args){ .dtype = MT_F64, .count = -1, .y = x }),
                 MT_EINVAL, "fill: count is -1");
    assert_fails(
        mt_add(stream(), &(struct mt_add_args){ .dtype = MT_F64, .count = 2, .y = x, .a = x }),
        MT_EINVAL, "add: b is NULL");
    assert_fails(mt_swiglu_fwd(stream(),
                               &(struct mt_swiglu_fwd_args){
                                   .dtype = MT_F64, .rows = 1, .width = 2, .y = x }),
                 MT_EINVAL, "swiglu_fwd: x is NULL");
    assert_fails(
        mt_swiglu_bwd(stream(),
                      &(struct mt_swiglu_bwd_args){ .dtype = MT_F64, .rows = 1, .width = -2 }),
        MT_EINVAL, "swiglu_bwd: width is -2");
    assert_fails(mt_embedding_fwd(
                     stream(),
                     &(struct mt_embedding_fwd_args){ .dtype = MT_F64,
                                                      .tokens_count = 1,
                                                      .width = 2,
                                                      .y = x,
                                                      .w = x,
                                                      .tokens = (const int32_t *)(const void *)x }),
                 MT_EINVAL, "vocab is 0");
    assert_fails(
        mt_embedding_bwd(
            stream(), &(struct mt_embedding_bwd_args){ .dtype = MT_F64, .vocab = 1, .width = 2 }),
        MT_EINVAL, "embedding_bwd: dw is NULL");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fill_stores_the_rounded_value),
        cmocka_unit_test(cast_rounds_once),
        cmocka_unit_test(add_rounds_once),
        cmocka_unit_test(swiglu_fwd_matches_f64),
        cmocka_unit_test(swiglu_bwd_matches_f64),
        cmocka_unit_test(swiglu_gradient),
        cmocka_unit_test(embedding_fwd_copies_rows),
        cmocka_unit_test(embedding_bwd_sums_in_order),
        cmocka_unit_test(embedding_bwd_of_frequent_rows),
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
