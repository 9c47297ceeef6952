/* Quantize as one with the gather, weighted or not, the SwiGLU or its gradient before it, with that
 * of the rows' weights or without, against these ops one after the other: bit for bit. */
#include <math.h>
#include <string.h>

#include "tests/kernels/quantize_case.h"

enum { N = 9, PADDED = 1 << MT_DIR_COUNT };

static const struct pair {
    const char *row, *col;
    int decoded; /* bits of directions that are kept so; PADDED: the column direction is so */
} pairs[] = { { "fp8_tensor", "fp8_tensor", 0 },
              { "fp8_delayed:e5m2", "fp8_delayed:e5m2", 0 },
              { "fp8_block", "fp8_block", 0 },
              { "mxfp8", "mxfp8", 0 },
              { "mxfp4", "mxfp4", 0 },
              { "nvfp4", "nvfp4:rht", 0 },
              { "nvfp4:sr", "nvfp4:rht+sr", 0 },
              { "nvfp4:4over6", "nvfp4:4over6", 0 },
              { "fp8_tensor", "mxfp8", 0 },
              { "mxfp6_e2m3", "fp8_block:2d", 0 },
              { "nvfp4", NULL, 0 },
              { "fp8_tensor", NULL, 0 },
              { "fp8_delayed", NULL, 0 },
              { "fp8_block", NULL, 0 },
              { NULL, "fp8_block", 0 },
              { NULL, "fp8_tensor", 0 },
              { "nvfp4", "nvfp4:rht", 1 },
              { "nvfp4:sr", "nvfp4:rht+sr", 3 },
              { "nvfp4:sr", "nvfp4:rht", 3 },
              { NULL, "nvfp4:rht+sr", 2 },
              { "nvfp4", "nvfp4", 3 },
              { "fp8_tensor", "fp8_tensor", PADDED },
              { "fp8_delayed:e5m2", "fp8_delayed:e5m2", PADDED },
              { "fp8_block", "fp8_block", PADDED },
              { "fp8_block:pow2=off", "fp8_block:pow2=off", PADDED },
              { NULL, "fp8_block", PADDED },
              { "fp8_tensor", "fp8_tensor", 1 },
              { "fp8_tensor", "fp8_tensor", 1 | PADDED },
              { "fp8_tensor", "fp8_tensor", 2 },
              { "fp8_tensor", "fp8_tensor", 3 },
              { "fp8_tensor:pow2", "fp8_tensor", 3 },
              { "fp8_tensor:e5m2", "fp8_tensor:e5m2", 3 },
              { "fp8_tensor:e5m2", "fp8_tensor:e5m2", 1 | PADDED },
              { "fp8_tensor", NULL, 1 },
              { NULL, "fp8_tensor", 2 },
              { "fp8_delayed", "fp8_delayed", 1 },
              { "fp8_delayed:e5m2", "fp8_delayed:e5m2", 3 },
              { "fp8_delayed", NULL, 1 },
              { NULL, "fp8_delayed", 2 },
              { NULL, "fp8_delayed:e5m2", 2 },
              { "fp8_block", "fp8_block", 1 },
              { "fp8_block", "fp8_block:pow2=off", 1 | PADDED },
              { "fp8_block", "fp8_block", 2 },
              { "fp8_block", "fp8_block", 3 },
              { "fp8_block:e5m2", "fp8_block:e5m2", 3 },
              { "fp8_block", NULL, 1 },
              { NULL, "fp8_block", 2 },
              { "mxfp8", "mxfp8", 1 },
              { "mxfp8", "mxfp8", 2 },
              { "mxfp8", "mxfp8", 3 },
              { "mxfp8:e5m2", "mxfp8:e5m2", 3 },
              { "mxfp8:e5m2", "mxfp8:e5m2", 1 },
              { "mxfp8:scale=floor", "mxfp8", 3 },
              { "mxfp8", NULL, 1 },
              { NULL, "mxfp8", 2 },
              { "fp8_tensor", "mxfp8", 3 },
              { "mxfp8", "fp8_block", 1 | PADDED },
              { "mxfp8", "nvfp4:rht", 3 },
              { "mxfp8", "mxfp8:e5m2", 3 } };

enum way { GATHERED, WEIGHTED, SWIGLU, GRADIENT, WAYS };

/* What a call is made of. */
struct made {
    struct quantize_case c;
    mt_dtype dtype;
    bool swiglu, counts;
    void *from; /* x [tokens, k], z [rows, 2k], or of a gradient [rows, k / 2] */
    void *z;
    int32_t *row_token, *position;
    void *weights;
    int64_t tokens, top_k, rows, *rows_used;
};

static void *values(int64_t count, mt_dtype dtype, uint64_t seed)
{
    void *p = test_alloc(count, dtype);
    for (int64_t i = 0; i < count; i++) {
        double x = (double)(int64_t)(case_mix((uint64_t)i + (seed << 32)) >> 40) * 0x1p-21 - 4;
        mt_store_f64(p, dtype, i, i % 611 == 17 ? (double)NAN : i % 89 == 5 ? x * 0x1p-9 : x);
    }
    return p;
}

/* A place for each row. */
static void place(struct made *m)
{
    m->top_k = m->rows / m->tokens + 1;
    m->position = test_alloc(m->tokens * m->top_k, MT_I32);
    for (int64_t i = 0; i < m->tokens * m->top_k; i++) m->position[i] = -1;
    for (int64_t r = 0; r < *m->rows_used; r++)
        m->position[m->row_token[r] * m->top_k + r / m->tokens] = (int32_t)r;
}

/* A weight for each; those that have no order among them too. */
static void weigh(struct made *m)
{
    mt_dtype real = mt_dtype_wide(m->dtype);
    int64_t slots = m->tokens * m->top_k;
    m->weights = test_alloc(slots, real);
    for (int64_t i = 0; i < slots; i++) {
        double w = (double)(int64_t)(case_mix((uint64_t)i) >> 40) * 0x1p-24;
        mt_store_f64(m->weights, real, i,
                     i % 97 == 9    ? 0
                     : i % 307 == 8 ? (double)NAN
                     : i % 401 == 7 ? (double)INFINITY
                                    : w);
    }
}

static void make(struct made *m, mt_dtype dtype, enum way way, const int64_t *rows, int64_t k,
                 int64_t tail)
{
    const bool swiglu = way == SWIGLU;
    if (way == GRADIENT) k += k % 2;
    *m = (struct made){ .dtype = dtype, .swiglu = swiglu, .tokens = 331 };
    case_make(&m->c, MT_GROUP_VARYING_FIRST, N, rows, &k, tail);
    m->rows = m->c.group.m;
    m->rows_used = test_alloc(1, MT_I64), *m->rows_used = m->rows - tail;
    m->from = values(way == GRADIENT ? m->rows * k / 2
                     : swiglu        ? m->rows * 2 * k
                                     : m->tokens * k,
                     dtype, 5);
    if (way == GRADIENT) m->z = values(m->rows * k, dtype, 6);
    if (swiglu) return;
    m->row_token = test_alloc(m->rows, MT_I32); /* those past the rows in use name no token */
    for (int64_t r = 0; r < *m->rows_used; r++) m->row_token[r] = (int32_t)(r * 37 % m->tokens);
    place(m);
    if (way != GATHERED) weigh(m);
    if (way == GRADIENT) test_free(m->row_token), m->row_token = NULL;
}

static void made_free(struct made *m)
{
    test_free(m->from), test_free(m->row_token), test_free(m->rows_used);
    test_free(m->weights), test_free(m->position), test_free(m->z);
}

/* What a call of a made source gives beside directions. */
struct made_beside {
    int64_t *nan;
    float *bias;
    void *dweights;
};

/* The column direction's codes as products read them. */
static void pad_result(struct quantize_result *r, const struct quantize_case *c)
{
    mt_direction *d = &r->q.dir[MT_COL];
    int64_t bytes = c->group.k * mt_padded_rows(&c->group);
    test_free(d->codes);
    d->layout = MT_LAYOUT_PADDED, d->codes = test_alloc(bytes, MT_U8);
    memset(d->codes, 0xAA, (size_t)bytes);
    r->code_bytes[MT_COL] = (size_t)bytes;
}

/* Whether this device makes the pair. */
static bool is_made(const struct made *m, const struct pair *p)
{
    return !p->decoded ||
           (strcmp(test_device_name(), "cpu") != 0 && m->dtype == MT_BF16 && m->c.group.k % 8 == 0);
}

static void run(const struct made *m, const struct pair *p, struct quantize_result *r,
                const struct made_beside *b, bool in_turn)
{
    mt_stream stream = { test_device(), NULL };
    mt_qtensor source = mt_qtensor_plain(m->c.group, m->dtype, m->from);
    size_t bytes;
    result_make(r, &m->c, p->row, p->col, false);
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        if (p->decoded >> dir & 1) result_decode(r, &m->c, (mt_dir)dir);
    if (p->decoded & PADDED) pad_result(r, &m->c);
    struct mt_quantize_args args = { .dtype = m->dtype,
                                     .src = &source,
                                     .out = &r->q,
                                     .nan = b->nan,
                                     .bias_grad = b->bias,
                                     .seed = 7,
                                     .stream = 2,
                                     .step = 3,
                                     .row_token = m->row_token,
                                     .tokens = m->tokens,
                                     .top_k = m->top_k,
                                     .weights = m->weights,
                                     .position = m->position,
                                     .swiglu = m->swiglu,
                                     .z = m->z,
                                     .dweights = b->dweights,
                                     .rows_used = m->rows_used };
    assert_ok(mt_quantize_scratch(&stream, &args, &bytes));
    if (bytes) assert_fails(mt_quantize(&stream, &args), MT_EINVAL, "scratch is NULL");
    if (in_turn) bytes = (size_t)mt_group_capacity(&m->c.group) * mt_dtype_size(m->dtype);
    args.scratch = bytes ? test_alloc((int64_t)bytes, MT_U8) : NULL;
    assert_ok(in_turn ? mt_quantize_parts(&stream, &args) : mt_quantize(&stream, &args));
    assert_ok(mt_device_synchronize(test_device()));
    test_free(args.scratch);
}

/* dots: with the gradient of rows' weights, if they have one. */
static void check_pair(const struct made *m, const struct pair *p, bool sums, bool dots)
{
    if (!is_made(m, p)) return;
    struct quantize_result one, turns;
    int64_t *nan = test_alloc(2 * N, MT_I64), k = m->c.group.k;
    int64_t slots = m->z && dots ? m->tokens * m->top_k : 0;
    mt_dtype real = mt_dtype_wide(m->dtype);
    float *bias = test_alloc(2 * N * k, MT_F32);
    void *dweights[2] = { slots ? test_alloc(slots, real) : NULL,
                          slots ? test_alloc(slots, real) : NULL };
    struct made_beside first = { nan, sums ? bias : NULL, dweights[0] },
                       second = { nan + N, sums ? bias + N * k : NULL, dweights[1] };
    run(m, p, &one, &first, false);
    run(m, p, &turns, &second, true);
    assert_memory_equal(nan, nan + N, N * sizeof *nan);
    if (sums)
        for (int64_t i = 0; i < N * k; i++)
            assert_true(bias[i] == bias[N * k + i] || (isnan(bias[i]) && isnan(bias[N * k + i])));
    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
        if (one.q.dir[dir].format) assert_same_direction(&one, &turns, (mt_dir)dir);
    for (int64_t i = 0; i < slots; i++) {
        double got = mt_load_f64(dweights[0], real, i), want = mt_load_f64(dweights[1], real, i);
        assert_true(got == want || (isnan(got) && isnan(want)));
    }
    result_free(&one), result_free(&turns);
    test_free(nan), test_free(bias), test_free(dweights[0]), test_free(dweights[1]);
}

static void check(mt_dtype dtype, enum way way)
{
    /* of the last one no rows are at 16 bytes */
    static const int64_t widths[] = { 256, 144, 72, 16, 37 };
    bool small = strcmp(test_device_name(), "cpu") == 0;
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        int64_t rows[N] = { 128, 0, 33, 300, 1, 17, 0, 257, 0 };
        struct made m;
        for (int i = 0; i < N && !small; i++) rows[i] *= w == 0 ? 7 : 1;
        make(&m, dtype, way, rows, widths[w], 3);
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
            check_pair(&m, &pairs[i], i % 3 == 2, true);
        if (way == GRADIENT) { /* of rows that nobody weights: of factors of 1, or without */
            test_free(m.weights), m.weights = NULL;
            for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
                for (int dots = 0; dots < 2; dots++) check_pair(&m, &pairs[i], false, dots);
        }
        made_free(&m);
    }
}

/* Pairs that are rotated, of more parts of sixteen rows than a GPU has warps: each goes from one to
 * the next. */
static void check_many(enum way way)
{
    const int64_t by = strcmp(test_device_name(), "cpu") == 0 ? 1 : 140;
    int64_t rows[N] = { 128, 0, 33, 300, 1, 17, 0, 257, 0 };
    struct made m;
    for (int i = 0; i < N; i++) rows[i] *= by;
    make(&m, MT_BF16, way, rows, 48, 3);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        if (pairs[i].col && strstr(pairs[i].col, "rht")) check_pair(&m, &pairs[i], false, true);
    made_free(&m);
}

static void test_gathered(void **state)
{
    (void)state;
    check(MT_BF16, GATHERED);
    check(MT_F32, GATHERED);
    check_many(GATHERED);
}

static void test_weighted(void **state)
{
    (void)state;
    check(MT_BF16, WEIGHTED);
    check(MT_F32, WEIGHTED);
}

static void test_swiglu(void **state)
{
    (void)state;
    check(MT_BF16, SWIGLU);
    check(MT_F32, SWIGLU);
}

static void test_gradient(void **state)
{
    (void)state;
    check(MT_BF16, GRADIENT);
    check(MT_F32, GRADIENT);
    check_many(GRADIENT);
}

/* No token, no row: nothing is read. */
static void test_nothing(void **state)
{
    (void)state;
    struct made m;
    int64_t rows[N] = { 0 };
    for (int way = 0; way < WAYS; way++) {
        make(&m, MT_BF16, (enum way)way, rows, 64, 5);
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
            check_pair(&m, &pairs[i], true, true);
        made_free(&m);
    }
}

/* What cannot be made. */
static void test_refused(void **state)
{
    (void)state;
    mt_stream stream = { test_device(), NULL };
    struct made m;
    struct quantize_result r;
    int64_t rows[N] = { 4 };
    make(&m, MT_BF16, WEIGHTED, rows, 32, 0);
    result_make(&r, &m.c, "mxfp8", NULL, false);
    mt_qtensor source = mt_qtensor_plain(m.c.group, MT_BF16, m.from);
    struct mt_quantize_args good = { .dtype = MT_BF16,
                                     .src = &source,
                                     .out = &r.q,
                                     .row_token = m.row_token,
                                     .tokens = m.tokens,
                                     .rows_used = m.rows_used };
    struct mt_quantize_args bad = good;
    bad.swiglu = true;
    assert_int_equal(mt_quantize(&stream, &bad), MT_EINVAL);
    bad = good, bad.dtype = MT_F32;
    assert_int_equal(mt_quantize(&stream, &bad), MT_EINVAL);
    bad = good, bad.rows_used = NULL;
    assert_int_equal(mt_quantize(&stream, &bad), MT_EINVAL);
    bad = good, bad.tokens = -1;
    assert_int_equal(mt_quantize(&stream, &bad), MT_EINVAL);
    bad = good, bad.weights = m.weights, bad.top_k = m.top_k; /* of which rows? */
    assert_int_equal(mt_quantize(&stream, &bad), MT_EINVAL);
    bad = good, bad.weights = m.weights, bad.position = m.position, bad.top_k = m.top_k;
    bad.dweights = m.from; /* of what SwiGLU? */
    assert_int_equal(mt_quantize(&stream, &bad), MT_EINVAL);
    bad.row_token = NULL, bad.z = m.from, bad.weights = NULL;
    assert_int_equal(mt_quantize(&stream, &bad), MT_EINVAL);
    bad.weights = m.weights, bad.position = NULL;
    assert_int_equal(mt_quantize(&stream, &bad), MT_EINVAL);
    result_free(&r), made_free(&m);
    make(&m, MT_BF16, GRADIENT, rows, 32, 0);
    result_make(&r, &m.c, NULL, "nvfp4:rht", false);
    source = mt_qtensor_plain(m.c.group, MT_BF16, m.from);
    bad = (struct mt_quantize_args){ .dtype = MT_BF16, .src = &source, .out = &r.q, .z = m.z };
    assert_fails(mt_quantize(&stream, &bad), MT_EINVAL, "scratch"); /* where is it made? */
    result_free(&r), made_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gathered), cmocka_unit_test(test_weighted),
        cmocka_unit_test(test_swiglu),   cmocka_unit_test(test_gradient),
        cmocka_unit_test(test_nothing),  cmocka_unit_test(test_refused)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
