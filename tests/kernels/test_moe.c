/* Route plan, gather and combine against naive references: integers and sequential sums exact, for
 * every number of threads. */
#include "tests/kernels/threads.h"

#include "core/rng.h"

/* A route plan and its buffers. */
struct route {
    int64_t tokens, experts, top_k, rows, dropped;
    int32_t *chosen, *row_token, *position;
    int64_t *counts, *offsets, *elements;
};

/* skew 0: random choices; 1: every token chooses the last experts; 2: only even experts. */
static struct route route_make(int64_t tokens, int64_t experts, int64_t top_k, int64_t capacity,
                               int skew)
{
    int64_t rows = tokens * top_k;
    struct route r = { tokens,
                       experts,
                       top_k,
                       rows,
                       5,
                       test_alloc(rows, MT_I32),
                       test_alloc(rows, MT_I32),
                       test_alloc(rows, MT_I32),
                       test_alloc(experts, MT_I64),
                       test_alloc(experts + 1, MT_I64),
                       test_alloc(3 * (experts + 1), MT_I64) };
    for (int64_t t = 0; t < tokens; t++) {
        int64_t first = skew == 1 ? experts - top_k
                                  : (int64_t)mt_rng_below(6, 1, (uint64_t)t, (uint64_t)experts);
        for (int64_t i = 0; i < top_k; i++) {
            int64_t e = (first + i) % experts;
            r.chosen[t * top_k + i] = (int32_t)(skew == 2 ? e / 2 * 2 : e);
        }
    }
    mt_stream stream = on_threads(1);
    assert_ok(
        mt_route_plan(&stream, &(struct mt_route_plan_args){ .dtype = MT_F32,
                                                             .tokens = tokens,
                                                             .experts = experts,
                                                             .top_k = top_k,
                                                             .capacity = capacity,
                                                             .chosen = r.chosen,
                                                             .counts = r.counts,
                                                             .offsets = r.offsets,
                                                             .row_token = r.row_token,
                                                             .position = r.position,
                                                             .dropped = &r.dropped,
                                                             .widths = { 1, 8, 100 },
                                                             .element_offsets = r.elements }));
    return r;
}

static void route_free(struct route *r)
{
    void *all[] = { r->chosen, r->row_token, r->position, r->counts, r->offsets, r->elements };
    for (int i = 0; i < 6; i++) test_free(all[i]);
}

/* A stable sort by expert, by scanning all choices once per expert. */
static void check_route(const struct route *r, int64_t capacity)
{
    static const int64_t widths[] = { 1, 8, 100 };
    int64_t row = 0, dropped = 5;
    for (int64_t e = 0; e < r->experts; e++) {
        int64_t kept = 0;
        assert_int_equal(r->offsets[e], row);
        for (int64_t i = 0; i < r->rows; i++) {
            if (r->chosen[i] != e) continue;
            if (capacity && kept == capacity) {
                assert_int_equal(r->position[i], -1);
                dropped++;
                continue;
            }
            assert_int_equal(r->position[i], row);
            assert_int_equal(r->row_token[row], i / r->top_k);
            row++, kept++;
        }
        assert_int_equal(r->counts[e], kept);
    }
    assert_int_equal(r->offsets[r->experts], row);
    assert_int_equal(r->dropped, dropped);
    for (int i = 0; i < MT_ROUTE_WIDTHS; i++)
        for (int64_t e = 0; e <= r->experts; e++)
            assert_int_equal(r->elements[i * (r->experts + 1) + e], r->offsets[e] * widths[i]);
}

static void test_route_plan(void **state)
{
    (void)state;
    static const int64_t tokens[] = { 0, 1, 7, 33, 257 }, experts[] = { 1, 2, 16, 65 };
    for (int t = 0; t < 5; t++)
        for (int e = 0; e < 4; e++)
            for (int64_t k = 1; k <= experts[e]; k = k * 3 + 1)
                for (int skew = 0; skew < 3; skew++)
                    for (int64_t capacity = 0; capacity < 40; capacity = capacity * 4 + 1) {
                        struct route r = route_make(tokens[t], experts[e], k, capacity, skew);
                        check_route(&r, capacity);
                        route_free(&r);
                    }
}

/* More experts than a block has threads, up to the most that a GPU places choices of. */
static void test_route_plan_of_many_experts(void **state)
{
    (void)state;
    static const int64_t tokens[] = { 0, 33, 901 }, experts[] = { 130, 300, 1024, 5632 };
    for (int t = 0; t < 3; t++)
        for (int e = 0; e < 4; e++)
            for (int skew = 0; skew < 3; skew++)
                for (int64_t capacity = 0; capacity < 8; capacity += 5) {
                    struct route r = route_make(tokens[t], experts[e], 5, capacity, skew);
                    check_route(&r, capacity);
                    route_free(&r);
                }
}

static void test_route_plan_options(void **state)
{
    (void)state;
    struct route r = route_make(9, 4, 2, 3, 0);
    mt_stream stream = on_threads(1);
    struct mt_route_plan_args args = { .dtype = MT_BF16,
                                       .tokens = 9,
                                       .experts = 4,
                                       .top_k = 2,
                                       .capacity = 3,
                                       .chosen = r.chosen,
                                       .counts = r.counts,
                                       .offsets = r.offsets,
                                       .row_token = r.row_token,
                                       .position = r.position };
    assert_ok(mt_route_plan(&stream, &args)); /* no counter, no element offsets */
    check_route(&r, 3);
    args.tokens = INT32_MAX / 2 + 1;
    assert_fails(mt_route_plan(&stream, &args), MT_EINVAL, "int32");
    args.tokens = 9, args.capacity = -1;
    assert_fails(mt_route_plan(&stream, &args), MT_EINVAL, "capacity");
    args.capacity = 0, args.counts = NULL;
    assert_fails(mt_route_plan(&stream, &args), MT_EINVAL, "counts is NULL");
    route_free(&r);
}

/* The sums are sequential in real, as the contracts order them: exact. */
static void exact_at(const char *what, const void *got, mt_dtype dtype, int64_t i, double want)
{
    unsigned char rounded[8];
    mt_store_f64(rounded, dtype, 0, want);
    double g = mt_load_f64(got, dtype, i), w = mt_load_f64(rounded, dtype, 0);
    if (g != w) fail_msg("%s[%lld] is %.17g, must be %.17g", what, (long long)i, g, w);
}

static void check_gather(const struct route *r, mt_dtype dtype, int64_t width, int threads)
{
    mt_dtype real = mt_dtype_wide(dtype);
    mt_stream stream = on_threads(threads);
    void *x = test_alloc(r->tokens * width, dtype), *y = test_alloc(r->rows * width, dtype);
    void *dx = test_alloc(r->tokens * width, dtype), *add = test_alloc(r->tokens * width, dtype);
    test_random(x, r->tokens * width, dtype, 1, 51);
    test_random(add, r->tokens * width, dtype, 1, 52);
    for (int by_token = 0; by_token < 2; by_token++) {
        memset(y, 0xff, (size_t)(r->rows * width) * mt_dtype_size(dtype));
        assert_ok(mt_gather_fwd(
            &stream, &(struct mt_gather_fwd_args){ .dtype = dtype,
                                                   .tokens = r->tokens,
                                                   .width = width,
                                                   .top_k = r->top_k,
                                                   .rows = r->rows,
                                                   .y = y,
                                                   .x = x,
                                                   .row_token = r->row_token,
                                                   .rows_used = r->offsets + r->experts,
                                                   .position = by_token ? r->position : NULL }));
        int64_t used = r->offsets[r->experts];
        for (int64_t i = 0; i < used * width; i++)
            exact_at("gather", y, dtype, i,
                     mt_load_f64(x, dtype, r->row_token[i / width] * width + i % width));
        unsigned char *tail = (unsigned char *)y + (size_t)(used * width) * mt_dtype_size(dtype);
        for (size_t i = 0; i < (size_t)((r->rows - used) * width) * mt_dtype_size(dtype); i++)
            assert_int_equal(tail[i], 0xff); /* past the rows in use nothing is written */
    }

    for (int with_add = 0; with_add < 3; with_add++) { /* none, other memory, in place */
        if (with_add == 2) memcpy(dx, add, (size_t)(r->tokens * width) * mt_dtype_size(dtype));
        assert_ok(
            mt_gather_bwd(&stream, &(struct mt_gather_bwd_args){ .dtype = dtype,
                                                                 .tokens = r->tokens,
                                                                 .width = width,
                                                                 .top_k = r->top_k,
                                                                 .dx = dx,
                                                                 .dx_add = with_add == 0   ? NULL
                                                                           : with_add == 1 ? add
                                                                                           : dx,
                                                                 .dy = y,
                                                                 .position = r->position }));
        for (int64_t i = 0; i < r->tokens * width; i++) {
            double sum = with_add ? mt_load_f64(add, dtype, i) : 0;
            for (int64_t slot = 0; slot < r->top_k; slot++) {
                int64_t row = r->position[i / width * r->top_k + slot];
                if (row >= 0)
                    sum = real_add(real, sum, mt_load_f64(y, dtype, row * width + i % width));
            }
            exact_at("gather dx", dx, dtype, i, sum);
        }
    }
    test_free(x), test_free(y), test_free(dx), test_free(add);
}

static void check_combine(const struct route *r, mt_dtype dtype, int64_t width, int threads)
{
    mt_dtype real = mt_dtype_wide(dtype);
    mt_stream stream = on_threads(threads);
    int64_t used = r->offsets[r->experts];
    void *x = test_alloc(r->rows * width, dtype), *y = test_alloc(r->tokens * width, dtype);
    void *dx = test_alloc(r->rows * width, dtype), *dy = test_alloc(r->tokens * width, dtype);
    void *weights = test_alloc(r->rows, real), *dweights = test_alloc(r->rows, real);
    void *alone = test_alloc(r->rows, real);    /* dweights without dx */
    test_random(x, used * width, dtype, 1, 61); /* rows past those in use stay NaN: never read */
    test_random(dy, r->tokens * width, dtype, 1, 62);
    test_random(weights, r->rows, real, 1, 63);
    assert_ok(mt_combine_fwd(&stream, &(struct mt_combine_fwd_args){ .dtype = dtype,
                                                                     .tokens = r->tokens,
                                                                     .width = width,
                                                                     .top_k = r->top_k,
                                                                     .y = y,
                                                                     .x = x,
                                                                     .weights = weights,
                                                                     .position = r->position }));
    assert_ok(mt_combine_bwd(&stream, &(struct mt_combine_bwd_args){ .dtype = dtype,
                                                                     .tokens = r->tokens,
                                                                     .width = width,
                                                                     .top_k = r->top_k,
                                                                     .dx = dx,
                                                                     .dweights = dweights,
                                                                     .dy = dy,
                                                                     .x = x,
                                                                     .weights = weights,
                                                                     .position = r->position }));
    assert_ok(mt_combine_bwd(&stream, &(struct mt_combine_bwd_args){ .dtype = dtype,
                                                                     .tokens = r->tokens,
                                                                     .width = width,
                                                                     .top_k = r->top_k,
                                                                     .dweights = alone,
                                                                     .dy = dy,
                                                                     .x = x,
                                                                     .weights = weights,
                                                                     .position = r->position }));
    for (int64_t i = 0; i < r->tokens * width; i++) {
        double sum = 0;
        for (int64_t slot = i / width * r->top_k; slot < (i / width + 1) * r->top_k; slot++) {
            int64_t at = r->position[slot] * width + i % width;
            if (at < 0) continue;
            double w = mt_load_f64(weights, real, slot);
            sum = real_add(real, sum, real_multiply(real, w, mt_load_f64(x, dtype, at)));
            exact_at("combine dx", dx, dtype, at,
                     real_multiply(real, w, mt_load_f64(dy, dtype, i)));
        }
        exact_at("combine", y, dtype, i, sum);
    }
    for (int64_t slot = 0; slot < r->rows; slot++) {
        double want = 0, size = 0;
        for (int64_t j = 0; j < width && r->position[slot] >= 0; j++) {
            double p = mt_load_f64(dy, dtype, slot / r->top_k * width + j) *
                       mt_load_f64(x, dtype, r->position[slot] * width + j);
            want += p, size += fabs(p);
        }
        double limit = (double)(width + 1) * real_epsilon(dtype) * size;
        size_t at = (size_t)slot * mt_dtype_size(real);
        near_all("dweights", (char *)dweights + at, real, 1, &want, &limit);
        near_all("dweights alone", (char *)alone + at, real, 1, &want, &limit);
    }
    test_free(x), test_free(y), test_free(dx), test_free(dy), test_free(weights),
        test_free(dweights), test_free(alone);
}

/* dx alone, as with dweights; then dweights from what a down projection and its SwiGLU have: z and
 * its gradient, here any. A weight of 0 has none. */
static void check_weights(const struct route *r, mt_dtype dtype, int64_t width, int threads)
{
    mt_dtype real = mt_dtype_wide(dtype);
    mt_stream stream = on_threads(threads);
    int64_t used = r->offsets[r->experts];
    void *dz = test_alloc(r->rows * 2 * width, dtype), *z = test_alloc(r->rows * 2 * width, dtype);
    void *weights = test_alloc(r->rows, real), *dweights = test_alloc(r->rows, real);
    void *dx = test_alloc(r->rows * width, dtype), *dy = test_alloc(r->tokens * width, dtype);
    test_random(z, used * 2 * width, dtype, 1, 64); /* rows past those in use stay NaN */
    test_random(dz, used * 2 * width, dtype, 1, 65);
    test_random(dy, r->tokens * width, dtype, 1, 66);
    test_random(weights, r->rows, real, 1, 67);
    for (int64_t slot = 0; slot < r->rows; slot += 5) mt_store_f64(weights, real, slot, 0);
    for (int64_t slot = 0; slot < r->rows; slot += 3) /* a dropped slot's is not asked for */
        if (r->position[slot] < 0) mt_store_f64(weights, real, slot, NAN);
    assert_ok(mt_combine_bwd(&stream, &(struct mt_combine_bwd_args){ .dtype = dtype,
                                                                     .tokens = r->tokens,
                                                                     .width = width,
                                                                     .top_k = r->top_k,
                                                                     .dx = dx,
                                                                     .dy = dy,
                                                                     .weights = weights,
                                                                     .position = r->position }));
    assert_ok(mt_weights_bwd(&stream, &(struct mt_weights_bwd_args){ .dtype = dtype,
                                                                     .tokens = r->tokens,
                                                                     .width = width,
                                                                     .top_k = r->top_k,
                                                                     .dweights = dweights,
                                                                     .dz = dz,
                                                                     .z = z,
                                                                     .weights = weights,
                                                                     .position = r->position }));
    assert_ok(mt_device_synchronize(stream.device));
    for (int64_t slot = 0; slot < r->rows; slot++) {
        double w = mt_load_f64(weights, real, slot), want = 0, size = 0;
        int64_t row = r->position[slot];
        for (int64_t j = 0; j < width && row >= 0; j++) {
            exact_at("dx", dx, dtype, row * width + j,
                     real_multiply(real, w, mt_load_f64(dy, dtype, slot / r->top_k * width + j)));
            double p = mt_load_f64(dz, dtype, (2 * row + 1) * width + j) *
                       mt_load_f64(z, dtype, (2 * row + 1) * width + j);
            want += p, size += fabs(p);
        }
        const bool asked = row >= 0 && w != 0;
        want = asked ? want / w : 0, size = asked ? size / fabs(w) : 0;
        double limit = (double)(width + 2) * real_epsilon(dtype) * size;
        near_all("dweights", (char *)dweights + (size_t)slot * mt_dtype_size(real), real, 1, &want,
                 &limit);
    }
    void *all[] = { dz, z, weights, dweights, dx, dy };
    for (int i = 0; i < 6; i++) test_free(all[i]);
}

static void test_gather_and_combine(void **state)
{
    (void)state;
    static const struct {
        int64_t tokens, experts, top_k, capacity, width;
        int skew;
    } cases[] = {
        { 0, 4, 2, 0, 8, 0 },     { 1, 1, 1, 0, 1, 0 },     { 33, 5, 5, 0, 7, 0 },
        { 40, 8, 2, 3, 33, 0 },   { 40, 8, 2, 0, 64, 1 },   { 257, 16, 3, 0, 65, 0 },
        { 9, 6, 2, 1, 300, 2 },   { 9, 6, 2, 0, 0, 0 },     { 61, 7, 3, 0, 328, 0 },
        { 63, 12, 8, 0, 520, 0 }, { 41, 16, 8, 9, 264, 0 },
    };
    for (int d = 0; d < 3; d++)
        for (int threads = 1; threads <= MAX_THREADS; threads++)
            for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
                struct route r = route_make(cases[i].tokens, cases[i].experts, cases[i].top_k,
                                            cases[i].capacity, cases[i].skew);
                check_gather(&r, dtypes[d], cases[i].width, threads);
                check_combine(&r, dtypes[d], cases[i].width, threads);
                check_weights(&r, dtypes[d], cases[i].width, threads);
                route_free(&r);
            }
}

/* Gathering and combining with weights that sum to 1 gives the input back, exactly when they are
 * powers of two. */
static void test_round_trip(void **state)
{
    (void)state;
    enum { T = 50, D = 24, K = 2 };
    struct route r = route_make(T, 7, K, 0, 0);
    mt_stream stream = on_threads(2);
    uint16_t *x = test_alloc(T * D, MT_BF16), *rows = test_alloc(T * K * D, MT_BF16),
             *y = test_alloc(T * D, MT_BF16);
    float *half = test_alloc(T * K, MT_F32);
    test_random(x, T * D, MT_BF16, 1, 71);
    for (int i = 0; i < T * K; i++) half[i] = 0.5f;
    assert_ok(mt_gather_fwd(&stream, &(struct mt_gather_fwd_args){ .dtype = MT_BF16,
                                                                   .tokens = T,
                                                                   .width = D,
                                                                   .top_k = K,
                                                                   .rows = T * K,
                                                                   .y = rows,
                                                                   .x = x,
                                                                   .row_token = r.row_token,
                                                                   .rows_used = r.offsets + 7 }));
    assert_ok(mt_combine_fwd(
        &stream, &(struct mt_combine_fwd_args){ MT_BF16, T, D, K, y, rows, half, r.position }));
    assert_memory_equal(x, y, T * D * sizeof *x);
    test_free(x), test_free(rows), test_free(y), test_free(half);
    route_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_route_plan),
        cmocka_unit_test(test_route_plan_of_many_experts),
        cmocka_unit_test(test_route_plan_options),
        cmocka_unit_test(test_gather_and_combine),
        cmocka_unit_test(test_round_trip),
    };
    return cmocka_run_group_tests(tests, open_devices, close_devices);
}
