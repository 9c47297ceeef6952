/* RMSNorm. */
#include "tests/kernels/dense.h"

static const double eps = 1e-6;

static const struct {
    int64_t rows, width;
} shapes[] = { { 0, 7 },  { 3, 0 },  { 1, 1 },    { 7, 33 },
               { 15, 8 }, { 16, 7 }, { 17, 130 }, { 1100, 16 } };
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

/* rstd against f64; then y, given rstd, to the bit: round(round(x rstd) w), as Hugging Face rounds.
 */
static void rmsnorm_fwd_rounds_like_hugging_face(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++)
        for (int s = 0; s < SHAPES; s++) {
            int64_t rows = shapes[s].rows, width = shapes[s].width, count = rows * width;
            mt_dtype dtype = dtypes[d], real = mt_dtype_wide(dtype);
            void *x = random_buffer(count, dtype, 3, 1), *w = random_buffer(width, real, 2, 2);
            void *y = test_alloc(count, dtype), *rstd = test_alloc(rows, real);
            for (int64_t c = 0; c < width && rows > 1; c++)
                mt_store_f64(x, dtype, c, c % 2 ? 0 : -0.0);
            assert_ok(mt_rmsnorm_fwd(stream(), &(struct mt_rmsnorm_fwd_args){ .dtype = dtype,
                                                                              .rows = rows,
                                                                              .width = width,
                                                                              .eps = eps,
                                                                              .y = y,
                                                                              .rstd = rstd,
                                                                              .x = x,
                                                                              .w = w }));
            double *from = as_f64(x, dtype, count);
            for (int64_t r = 0; r < rows && width; r++) {
                double want = rstd_of(from + r * width, width, eps);
                test_assert_near("rstd", (char *)rstd + (size_t)r * mt_dtype_size(real), real,
                                 &want, 1, 0, rstd_error(width, real));
            }
            for (int64_t i = 0; i < count; i++) {
                double xhat =
                    rounded(times(from[i], mt_load_f64(rstd, real, i / width), real), dtype);
                double want = rounded(times(xhat, mt_load_f64(w, real, i % width), real), dtype);
                assert_true(mt_load_f64(y, dtype, i) == want);
            }
            free(from);
            test_free(x);
            test_free(w);
            test_free(y);
            test_free(rstd);
        }
}

/* A NaN or Inf spoils its row and no other. */
static void rmsnorm_keeps_rows_apart(void **state)
{
    (void)state;
    enum { ROWS = 5, WIDTH = 19 };
    float *x = random_buffer(ROWS * WIDTH, MT_F32, 3, 1), *w = random_buffer(WIDTH, MT_F32, 2, 2);
    float *y = test_alloc(ROWS * WIDTH, MT_F32), *rstd = test_alloc(ROWS, MT_F32);
    x[1 * WIDTH + 4] = NAN;
    x[3 * WIDTH + 18] = INFINITY;
    assert_ok(mt_rmsnorm_fwd(stream(), &(struct mt_rmsnorm_fwd_args){ .dtype = MT_F32,
                                                                      .rows = ROWS,
                                                                      .width = WIDTH,
                                                                      .eps = eps,
                                                                      .y = y,
                                                                      .rstd = rstd,
                                                                      .x = x,
                                                                      .w = w }));
    for (int c = 0; c < WIDTH; c++) {
        assert_true(isnan(y[1 * WIDTH + c]));
        assert_true(c == 18 ? isnan(y[3 * WIDTH + c]) : y[3 * WIDTH + c] == 0);
        for (int r = 0; r < ROWS; r += 2) assert_true(isfinite(y[r * WIDTH + c]));
    }
    test_free(x);
    test_free(w);
    test_free(y);
    test_free(rstd);
}

/* What backward should give, from what it is given, and how far real may be from it. */
struct norm_bwd {
    double *dx, *dx_bound, *dw, *dw_bound;
};

static struct norm_bwd rmsnorm_bwd_reference(const struct mt_rmsnorm_bwd_args *a)
{
    mt_dtype real = mt_dtype_wide(a->dtype);
    int64_t width = a->width, count = a->rows * width;
    double epsilon = test_epsilon(real);
    struct norm_bwd want = { zeros(count), zeros(count), zeros(width), zeros(width) };
    for (int64_t r = 0; r < a->rows; r++) {
        double rstd = mt_load_f64(a->rstd, real, r), sum = 0, size = 0;
        for (int64_t c = 0; c < width; c++) {
            double xhat = mt_load_f64(a->x, a->dtype, r * width + c) * rstd;
            double dy = mt_load_f64(a->dy, a->dtype, r * width + c);
            double term = dy * mt_load_f64(a->w, real, c) * xhat;
            sum += term;
            size += fabs(term);
            want.dw[c] += dy * xhat;
            want.dw_bound[c] += ((double)a->rows + 4) * epsilon * fabs(dy * xhat);
        }
        for (int64_t c = 0; c < width; c++) {
            int64_t i = r * width + c;
            double xhat = mt_load_f64(a->x, a->dtype, i) * rstd;
            double g = mt_load_f64(a->dy, a->dtype, i) * mt_load_f64(a->w, real, c);
            double add = a->dx_add ? mt_load_f64(a->dx_add, a->dtype, i) : 0;
            want.dx[i] = add + rstd * (g - xhat * sum / (double)width);
            want.dx_bound[i] =
                epsilon * (fabs(add) + rstd * (4 * fabs(g) + ((double)width + 8) * fabs(xhat) *
                                                                 size / (double)width));
        }
    }
    return want;
}

static void add_old_gradient(struct norm_bwd *want, const void *dw, mt_dtype real, int64_t width)
{
    for (int64_t c = 0; c < width; c++) {
        double old = mt_load_f64(dw, real, c);
        want->dw[c] += old;
        want->dw_bound[c] += 2 * test_epsilon(real) * (fabs(old) + fabs(want->dw[c]));
    }
}

static void run_rmsnorm_bwd(void *context)
{
    assert_ok(mt_rmsnorm_bwd(stream(), context));
}

/* mode 0: dx_add NULL, 1: another buffer, 2: dx itself; dw accumulated, overwritten, or left out.
 */
static void check_rmsnorm_bwd(mt_dtype dtype, int64_t rows, int64_t width, int mode, int dw_mode)
{
    mt_dtype real = mt_dtype_wide(dtype);
    int64_t count = rows * width;
    void *x = random_buffer(count, dtype, 3, 1), *w = random_buffer(width, real, 2, 2);
    void *dy = random_buffer(count, dtype, 1, 3), *add = random_buffer(count, dtype, 1, 4);
    void *other = test_alloc(count, dtype), *rstd = test_alloc(rows, real);
    void *dw = random_buffer(width, real, 1, 5), *dx = mode == 2 ? add : other;
    double *from = as_f64(x, dtype, count);
    for (int64_t r = 0; r < rows; r++)
        mt_store_f64(rstd, real, r, width ? rstd_of(from + r * width, width, eps) : 0);
    struct mt_rmsnorm_bwd_args args = { .dtype = dtype,
                                        .rows = rows,
                                        .width = width,
                                        .accumulate = dw_mode == 1,
                                        .dx = dx,
                                        .dx_add = mode ? add : NULL,
                                        .dw = dw_mode == 2 ? NULL : dw,
                                        .dy = dy,
                                        .x = x,
                                        .rstd = rstd,
                                        .w = w };
    struct norm_bwd want = rmsnorm_bwd_reference(&args);
    if (dw_mode == 1) add_old_gradient(&want, dw, real, width);
    double *old = as_f64(dw, real, width);
    assert_ok(mt_rmsnorm_bwd(stream(), &args));
    assert_within("dx", dx, dtype, want.dx, want.dx_bound, count);
    if (dw_mode == 2)
        test_assert_near("dw", dw, real, old, width, 0, 0);
    else
        assert_within("dw", dw, real, want.dw, want.dw_bound, width);
    if (dw_mode == 0) assert_thread_independent("dw", run_rmsnorm_bwd, &args, dw, width, real);
    free(from);
    free(old);
    free(want.dx);
    free(want.dx_bound);
    free(want.dw);
    free(want.dw_bound);
    test_free(x);
    test_free(w);
    test_free(dy);
    test_free(add);
    test_free(other);
    test_free(rstd);
    test_free(dw);
}

static void rmsnorm_bwd_matches_f64(void **state)
{
    (void)state;
    for (int d = 0; d < DTYPES; d++)
        for (int s = 0; s < SHAPES; s++)
            for (int mode = 0; mode < 3; mode++)
                for (int dw_mode = 0; dw_mode < 3; dw_mode++)
                    check_rmsnorm_bwd(dtypes[d], shapes[s].rows, shapes[s].width, mode, dw_mode);
}

struct rmsnorm_case {
    struct mt_rmsnorm_fwd_args args;
    const double *weights;
    double size;
};

static double rmsnorm_loss(void *context)
{
    struct rmsnorm_case *c = context;
    assert_ok(mt_rmsnorm_fwd(stream(), &c->args));
    return weighted(c->weights, c->args.y, c->args.rows * c->args.width, &c->size);
}

static void rmsnorm_gradient(void **state)
{
    (void)state;
    enum { ROWS = 3, WIDTH = 7, COUNT = ROWS * WIDTH };
    double *x = random_buffer(COUNT, MT_F64, 2, 1), *w = random_buffer(WIDTH, MT_F64, 2, 2);
    double *y = test_alloc(COUNT, MT_F64), *rstd = test_alloc(ROWS, MT_F64);
    double *dy = random_buffer(COUNT, MT_F64, 1, 3), *dx = test_alloc(COUNT, MT_F64);
    double *dw = test_alloc(WIDTH, MT_F64);
    struct rmsnorm_case c = { { .dtype = MT_F64,
                                .rows = ROWS,
                                .width = WIDTH,
                                .eps = eps,
                                .y = y,
                                .rstd = rstd,
                                .x = x,
                                .w = w },
                              dy,
                              0 };
    rmsnorm_loss(&c);
    assert_ok(mt_rmsnorm_bwd(stream(), &(struct mt_rmsnorm_bwd_args){ .dtype = MT_F64,
                                                                      .rows = ROWS,
                                                                      .width = WIDTH,
                                                                      .dx = dx,
                                                                      .dw = dw,
                                                                      .dy = dy,
                                                                      .x = x,
                                                                      .rstd = rstd,
                                                                      .w = w }));
    assert_gradient("dx", rmsnorm_loss, &c, x, dx, COUNT, c.size, COUNT + WIDTH + 8);
    assert_gradient("dw", rmsnorm_loss, &c, w, dw, WIDTH, c.size, COUNT + WIDTH + 8);
    test_free(x);
    test_free(w);
    test_free(y);
    test_free(rstd);
    test_free(dy);
    test_free(dx);
    test_free(dw);
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    double x[8] = { 0 };
    assert_fails(
        mt_rmsnorm_fwd(stream(), &(struct mt_rmsnorm_fwd_args){ .dtype = MT_F64, .rows = -3 }),
        MT_EINVAL, "rmsnorm_fwd: rows is -3");
    assert_fails(mt_rmsnorm_bwd(stream(),
                                &(struct mt_rmsnorm_bwd_args){
                                    .dtype = MT_F64, .rows = 1, .width = 1, .dx = x }),
                 MT_EINVAL, "rmsnorm_bwd: dy is NULL");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm_fwd_rounds_like_hugging_face),
        cmocka_unit_test(rmsnorm_keeps_rows_apart),
        cmocka_unit_test(rmsnorm_bwd_matches_f64),
        cmocka_unit_test(rmsnorm_gradient),
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
