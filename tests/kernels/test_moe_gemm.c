/* GEMMs with the ops beside them against these ops one after the other: bit for bit. */
#include "tests/kernels/dense.h"

#ifdef MT_HAVE_cuda
#include "kernels/cuda/moe_gemm_path.h"
#endif

enum { MEMBERS_MAX = 12 };

/* Rows of the members, and where the tokens of the rows lie. */
struct rows {
    int64_t members, used, room, tokens;
    int64_t *counts, *offsets; /* in rows */
    int32_t *row_token;
};

static struct rows rows_make(int64_t members, const int64_t *counts, int64_t tail, int64_t tokens)
{
    struct rows r = { .members = members, .tokens = tokens };
    r.counts = test_alloc(members, MT_I64), r.offsets = test_alloc(members + 1, MT_I64);
    r.offsets[0] = 0;
    for (int64_t e = 0; e < members; e++) {
        r.counts[e] = counts[e];
        r.offsets[e + 1] = r.offsets[e] + counts[e];
    }
    r.used = r.offsets[members], r.room = r.used + tail;
    r.row_token = test_alloc(r.room, MT_I32); /* those past the rows in use name no token */
    for (int64_t i = 0; i < r.used; i++) r.row_token[i] = (int32_t)(i * 7 % tokens);
    return r;
}

static void rows_free(struct rows *r)
{
    void *all[] = { r->counts, r->offsets, r->row_token };
    for (int i = 0; i < 3; i++) test_free(all[i]);
}

/* A ragged matrix of these rows; `offsets` takes what the group points at. */
static mt_qtensor ragged(const struct rows *r, int64_t width, mt_dtype dtype, void *data,
                         int64_t **offsets)
{
    *offsets = test_alloc(r->members + 1, MT_I64);
    for (int64_t e = 0; e <= r->members; e++) (*offsets)[e] = r->offsets[e] * width;
    return mt_qtensor_plain(mt_group_ragged_rows(r->members, r->room, width, r->counts, *offsets),
                            dtype, data);
}

static void *scratch_of(const struct mt_moe_gemm_args *args, size_t *bytes)
{
    assert_ok(mt_moe_gemm_scratch(stream(), args, bytes));
    return test_alloc((int64_t)*bytes, MT_U8);
}

/* One of the fused kernels of cuda instead of what mt_moe_gemm takes, by number; -1: the latter. */
static int forced = -1, fused;

/* False: there is no such kernel, or it does not take these arguments. */
static bool run_forced(const struct mt_moe_gemm_args *args)
{
#ifdef MT_HAVE_cuda
    bool wgrad = args->gemm.layout == MT_GEMM_NT;
    mt_cuda_gemm_path path = { .variant = forced / 2 % 3,
                               .width = forced % 2 ? 192
                                        : wgrad    ? 64
                                                   : 40,
                               .super = forced % 2 ? 8 : 1 };
    mt_status status = mt_cuda_moe_gemm_by(stream(), args, &path);
    if (status == MT_EUNSUPPORTED) return false;
    assert_ok(status);
    fused++;
    return true;
#else
    (void)args;
    return false;
#endif
}

/* False: not run. */
static bool run(struct mt_moe_gemm_args *args)
{
    size_t bytes;
    args->scratch = scratch_of(args, &bytes); /* of parts: more than a forced kernel takes */
    bool ran = forced >= 0 && run_forced(args);
    if (forced < 0) {
        assert_ok(mt_moe_gemm(stream(), args));
        ran = true;
    }
    assert_ok(mt_device_synchronize(test_device()));
    test_free(args->scratch);
    return ran;
}

static void gather(void *y, const void *x, const struct rows *r, int64_t width, mt_dtype dtype)
{
    assert_ok(mt_gather_fwd(stream(),
                            &(struct mt_gather_fwd_args){ .dtype = dtype,
                                                          .tokens = r->tokens,
                                                          .width = width,
                                                          .top_k = 1,
                                                          .rows = r->room,
                                                          .y = y,
                                                          .x = x,
                                                          .row_token = r->row_token,
                                                          .rows_used = r->offsets + r->members }));
}

/* Whether one operand of each product has a scale for each member. */
static bool scaled;

/* The operand as one of fp8 that is kept decoded, where the device has such; NULL: as it is. */
static void *scale_members(mt_qtensor *q, mt_dir dir, mt_dtype dtype)
{
    const struct mt_kernels *kernels;
    assert_ok(mt_device_kernels(test_device(), dtype, &kernels));
    if (!scaled || dtype != MT_BF16 || !kernels->decoded_weights) return NULL;
    float *scales = test_alloc(q->group.members, MT_F32);
    for (int64_t e = 0; e < q->group.members; e++) scales[e] = 0.3f + (float)(e % 5) / 7;
    void *decoded = q->dir[dir].codes;
    q->dir[dir] = mt_direction_of(mt_format_spec_default(MT_FORMAT_FP8_TENSOR));
    q->dir[dir].layout = MT_LAYOUT_DECODED;
    q->dir[dir].codes = decoded, q->dir[dir].scales = scales;
    return scales;
}

/* z = x W^T + b of gathered rows or rows in place, and its SwiGLU. */
static void check_gate_up(const struct rows *r, int64_t f, int64_t k, mt_dtype dtype, bool gathers,
                          bool biased)
{
    int64_t *offsets, n = 2 * f;
    mt_dtype real = mt_dtype_wide(dtype);
    void *x = random_buffer(gathers ? r->tokens * k : r->room * k, dtype, 1, 1);
    void *w = random_buffer(r->members * n * k, dtype, 1, 2);
    void *bias = biased ? random_buffer(r->members * n, real, 1, 3) : NULL;
    void *rows = test_alloc(r->room * k, dtype);
    void *z = test_alloc(r->room * n, dtype), *act = test_alloc(r->room * f, dtype);
    void *want_z = test_alloc(r->room * n, dtype), *want = test_alloc(r->room * f, dtype);
    mt_qtensor qw = mt_qtensor_plain(mt_group_uniform(r->members, n, k), dtype, w);
    mt_qtensor qx = ragged(r, k, dtype, x, &offsets);
    void *scales = scale_members(&qw, MT_ROW, dtype);
    struct mt_moe_gemm_args args = { .dtype = dtype,
                                     .gemm = { .dtype = dtype,
                                               .layout = MT_GEMM_TN,
                                               .a = &qw,
                                               .b = &qx,
                                               .d = z,
                                               .d_dtype = dtype,
                                               .bias = bias },
                                     .row_token = gathers ? r->row_token : NULL,
                                     .tokens = r->tokens,
                                     .rows_used = r->offsets + r->members,
                                     .act = act };
    bool ran = run(&args);
    if (gathers) gather(rows, x, r, k, dtype);
    mt_qtensor qr = mt_qtensor_plain(qx.group, dtype, gathers ? rows : x);
    args.gemm.b = &qr, args.gemm.d = want_z;
    assert_ok(mt_gemm(stream(), &args.gemm));
    assert_ok(
        mt_swiglu_fwd(stream(), &(struct mt_swiglu_fwd_args){ .dtype = dtype,
                                                              .rows = r->room,
                                                              .width = f,
                                                              .rows_used = r->offsets + r->members,
                                                              .y = want,
                                                              .x = want_z }));
    assert_ok(mt_device_synchronize(test_device()));
    if (ran) {
        assert_same_bits("z", z, want_z, r->room * n, dtype); /* the tail is poison in both */
        assert_same_bits("act", act, want, r->room * f, dtype);
    }
    void *all[] = { x, w, bias, rows, z, act, want_z, want, offsets, scales };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_free(all[i]);
}

/* dweights against those of the dz that came with them, whose sums may have another order. */
static void check_dweights(const struct mt_moe_gemm_args *args, int64_t f)
{
    mt_dtype real = mt_dtype_wide(args->dtype);
    for (int64_t slot = 0; slot < args->tokens * args->top_k; slot++) {
        double w = mt_load_f64(args->weights, real, slot), want = 0, size = 0;
        int64_t up = (2 * args->position[slot] + 1) * f;
        for (int64_t j = 0; j < f && args->position[slot] >= 0; j++) {
            double p = mt_load_f64(args->gemm.d, args->dtype, up + j) *
                       mt_load_f64(args->z, args->dtype, up + j);
            want += p / w, size += fabs(p / w);
        }
        double limit = (double)(f + 2) * test_epsilon(real) * size;
        assert_true(fabs(mt_load_f64(args->dweights, real, slot) - want) <= limit);
    }
}

/* dz from dy W through the SwiGLU; `weighs`: and the gradient of weights, two of a token, whose
 * rows are in no order, one dropped. */
static void check_down_dgrad(const struct rows *r, int64_t f, int64_t n, mt_dtype dtype,
                             bool weighs)
{
    int64_t *offsets, slots = (r->used / 2 + 1) * 2;
    void *weights = random_buffer(slots, mt_dtype_wide(dtype), 1, 4);
    void *dweights = test_alloc(slots, mt_dtype_wide(dtype));
    int32_t *position = test_alloc(slots, MT_I32);
    for (int64_t i = 0; i < slots; i++) position[i] = (int32_t)(r->used - 1 - i); /* then -1, -2 */
    void *dy = random_buffer(r->room * n, dtype, 1, 1);
    void *w = random_buffer(r->members * n * f, dtype, 1, 2);
    void *z = random_buffer(r->room * 2 * f, dtype, 3, 3);
    void *da = test_alloc(r->room * f, dtype);
    void *dz = test_alloc(r->room * 2 * f, dtype), *want = test_alloc(r->room * 2 * f, dtype);
    mt_qtensor qw = mt_qtensor_plain(mt_group_uniform(r->members, n, f), dtype, w);
    mt_qtensor qdy = ragged(r, n, dtype, dy, &offsets);
    void *scales = scale_members(&qw, MT_COL, dtype);
    struct mt_moe_gemm_args args = { .dtype = dtype,
                                     .gemm = { .dtype = dtype,
                                               .layout = MT_GEMM_NN,
                                               .a = &qw,
                                               .b = &qdy,
                                               .d = dz,
                                               .d_dtype = dtype },
                                     .rows_used = r->offsets + r->members,
                                     .z = z };
    if (weighs) {
        args.weights = weights, args.dweights = dweights, args.position = position;
        args.tokens = slots / 2, args.top_k = 2;
    }
    bool ran = run(&args);
    if (ran && weighs) check_dweights(&args, f);
    args.gemm.d = da;
    assert_ok(mt_gemm(stream(), &args.gemm));
    assert_ok(
        mt_swiglu_bwd(stream(), &(struct mt_swiglu_bwd_args){ .dtype = dtype,
                                                              .rows = r->room,
                                                              .width = f,
                                                              .rows_used = r->offsets + r->members,
                                                              .dx = want,
                                                              .dy = da,
                                                              .x = z }));
    assert_ok(mt_device_synchronize(test_device()));
    if (ran) assert_same_bits("dz", dz, want, r->room * 2 * f, dtype);
    void *all[] = { dy, w, z, da, dz, want, offsets, weights, dweights, position, scales };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_free(all[i]);
}

/* dw = dy^T x (+ dw) of gathered rows of x, or of dy, stored as `to`. */
static void check_wgrad(const struct rows *r, int64_t n, int64_t k, mt_dtype dtype, mt_dtype to,
                        bool accumulate, bool of_dy)
{
    int64_t *x_offsets, *dy_offsets, count = r->members * n * k;
    void *x = random_buffer((of_dy ? r->room : r->tokens) * k, dtype, 1, 1),
         *dy = random_buffer((of_dy ? r->tokens : r->room) * n, dtype, 1, 2);
    void *rows = test_alloc(r->room * (of_dy ? n : k), dtype);
    void *dw = random_buffer(count, to, 1, 3), *want = random_buffer(count, to, 1, 3);
    mt_qtensor qx = ragged(r, k, dtype, x, &x_offsets), qdy = ragged(r, n, dtype, dy, &dy_offsets);
    void *scales = scale_members(of_dy ? &qx : &qdy, MT_COL, dtype); /* not what is gathered */
    struct mt_moe_gemm_args args = { .dtype = dtype,
                                     .gemm = { .dtype = dtype,
                                               .layout = MT_GEMM_NT,
                                               .a = &qx,
                                               .b = &qdy,
                                               .d = dw,
                                               .d_dtype = to,
                                               .c = accumulate ? dw : NULL },
                                     .row_token = r->row_token,
                                     .gathers_b = of_dy,
                                     .tokens = r->tokens,
                                     .rows_used = r->offsets + r->members };
    bool ran = run(&args);
    gather(rows, of_dy ? dy : x, r, of_dy ? n : k, dtype);
    mt_qtensor qr = mt_qtensor_plain(of_dy ? qdy.group : qx.group, dtype, rows);
    *(of_dy ? &args.gemm.b : &args.gemm.a) = &qr, args.gemm.d = want,
                             args.gemm.c = accumulate ? want : NULL;
    assert_ok(mt_gemm(stream(), &args.gemm));
    assert_ok(mt_device_synchronize(test_device()));
    if (ran) assert_same_bits("dw", dw, want, count, to);
    void *all[] = { x, dy, rows, dw, want, x_offsets, dy_offsets, scales };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_free(all[i]);
}

struct moe_case {
    int64_t members, counts[MEMBERS_MAX], tail, tokens, d, f;
};

/* Widths that a fused kernel takes, and such that it must leave to the parts. */
static const struct moe_case cases[] = {
    { 3, { 33, 0, 64 }, 5, 40, 136, 64 },
    { 7, { 0, 70, 1, 0, 205, 9, 0 }, 0, 90, 72, 192 },
    { 2, { 400, 40 }, 3, 64, 200, 320 },
    { 4, { 0, 0, 0, 0 }, 4, 1, 64, 64 },
    { 1, { 1 }, 0, 1, 8, 64 },
    { 2, { 0, 0 }, 0, 1, 72, 256 }, /* no room for rows at all */
    { 12, { 17, 8, 0, 3, 31, 1, 12, 2, 0, 64, 5, 7 }, 1, 33, 64, 128 },
    { 3, { 5, 0, 9 }, 2, 7, 24, 40 },  /* F is no multiple of 64 */
    { 2, { 3, 4 }, 0, 5, 7, 3 },       /* nothing is aligned */
    { 2, { 60, 3 }, 1, 20, 300, 600 }, /* more than one block wide, and than one chunk deep */
};
enum { CASES = sizeof cases / sizeof *cases, WIDE = 100 };

static void check_case(const struct moe_case *x, mt_dtype dtype)
{
    struct rows r = rows_make(x->members, x->counts, x->tail, x->tokens);
    for (int bits = 0; bits < 4; bits++) check_gate_up(&r, x->f, x->d, dtype, bits & 1, bits & 2);
    for (int weighs = 0; weighs < 2; weighs++) check_down_dgrad(&r, x->f, x->d, dtype, weighs);
    for (int add = 0; add < 2; add++) {
        for (int of_dy = 0; of_dy < 2; of_dy++) {
            check_wgrad(&r, 2 * x->f, x->d, dtype, mt_dtype_wide(dtype), add, of_dy);
            if (dtype != mt_dtype_wide(dtype))
                check_wgrad(&r, 2 * x->f, x->d, dtype, dtype, add, of_dy);
        }
    }
    rows_free(&r);
}

static void test_same_as_its_parts(void **state)
{
    (void)state;
    for (int c = 0; c < CASES; c++)
        for (int t = 0; t < DTYPES; t++)
            if (!test_small() || dtypes[t] == MT_F32 || cases[c].d < WIDE)
                check_case(&cases[c], dtypes[t]);
}

static void test_scaled_members(void **state)
{
    (void)state;
    if (strcmp(test_device_name(), "cuda") != 0) skip();
    scaled = true;
    for (forced = -1; forced < 6; forced++)
        for (int c = 0; c < CASES; c++) check_case(&cases[c], MT_BF16);
    scaled = false, forced = -1;
}

/* Each kernel by name, wherever it takes the case; on a GPU other than Hopper, and on the cpu,
 * there are none. */
static void test_every_fused_kernel(void **state)
{
    (void)state;
    if (strcmp(test_device_name(), "cuda") != 0) skip();
    for (forced = 0; forced < 6; forced++)
        for (int c = 0; c < CASES; c++) check_case(&cases[c], MT_BF16);
    forced = -1;
    if (fused == 0) print_message("no kernel of this device fuses\n");
}

/* Rows of dY gathered and weighted after the product, two of a token, by powers of two, which leave
 * bits as the ops in turn make them. */
static void check_after(const struct rows *r, int64_t f, int64_t n)
{
    int64_t *offsets, slots = r->room;
    float *weights = test_alloc(slots, MT_F32), *dweights = test_alloc(slots, MT_F32);
    int32_t *position = test_alloc(slots, MT_I32);
    void *dy = random_buffer(r->tokens * n, MT_BF16, 1, 1);
    void *w = random_buffer(r->members * n * f, MT_BF16, 1, 2);
    void *z = random_buffer(r->room * 2 * f, MT_BF16, 3, 3);
    void *rows = test_alloc(r->room * n, MT_BF16), *p = test_alloc(r->room * f, MT_BF16);
    void *dz = test_alloc(r->room * 2 * f, MT_BF16), *act = test_alloc(r->room * f, MT_BF16);
    void *want = test_alloc(r->room * 2 * f, MT_BF16), *y = test_alloc(r->room * f, MT_BF16);
    double *dots = calloc((size_t)r->room + 1, sizeof *dots),
           *sizes = calloc((size_t)r->room + 1, sizeof *sizes);
    assert_true(dots && sizes);
    for (int64_t i = 0; i < slots; i++) {
        position[i] = (int32_t)(i < r->used ? r->used - 1 - i : -1);
        weights[i] = ldexpf(1, -(int)(i % 5));
    }
    mt_qtensor qw = mt_qtensor_plain(mt_group_uniform(r->members, n, f), MT_BF16, w);
    mt_qtensor qdy = ragged(r, n, MT_BF16, dy, &offsets);
    mt_qtensor qrows = mt_qtensor_plain(qdy.group, MT_BF16, rows);
    struct mt_moe_gemm_args args = { .dtype = MT_BF16,
                                     .gemm = { .dtype = MT_BF16,
                                               .layout = MT_GEMM_NN,
                                               .a = &qw,
                                               .b = &qdy,
                                               .d = dz,
                                               .d_dtype = MT_BF16 },
                                     .row_token = r->row_token,
                                     .tokens = slots,
                                     .rows_used = r->offsets + r->members,
                                     .act = act,
                                     .z = z,
                                     .dweights = dweights,
                                     .weights = weights,
                                     .position = position,
                                     .top_k = 1 };
    assert_true(run(&args));
    gather(rows, dy, r, n, MT_BF16);
    args.gemm.b = &qrows, args.gemm.d = p;
    assert_ok(mt_gemm(stream(), &args.gemm));
    assert_ok(mt_swiglu_fwd(stream(), &(struct mt_swiglu_fwd_args){ .dtype = MT_BF16,
                                                                    .rows = r->room,
                                                                    .width = f,
                                                                    .rows_used = args.rows_used,
                                                                    .y = y,
                                                                    .x = z }));
    assert_ok(mt_device_synchronize(test_device()));
    for (int64_t i = 0; i < r->used; i++)
        for (int64_t j = r->used - 1 - i, c = 0; c < f; c++) {
            double a = mt_load_f64(y, MT_BF16, j * f + c), d = mt_load_f64(p, MT_BF16, j * f + c);
            dots[i] += a * d, sizes[i] += fabs(a * d);
            mt_store_f64(y, MT_BF16, j * f + c, (double)weights[i] * a);
            mt_store_f64(p, MT_BF16, j * f + c, (double)weights[i] * d);
        }
    assert_ok(mt_swiglu_bwd(stream(), &(struct mt_swiglu_bwd_args){ .dtype = MT_BF16,
                                                                    .rows = r->room,
                                                                    .width = f,
                                                                    .rows_used = args.rows_used,
                                                                    .dx = want,
                                                                    .dy = p,
                                                                    .x = z }));
    assert_ok(mt_device_synchronize(test_device()));
    assert_same_bits("dz", dz, want, r->room * 2 * f, MT_BF16);
    assert_same_bits("weighted", act, y, r->room * f, MT_BF16);
    for (int64_t i = 0; i < slots; i++)
        assert_true(fabs((double)dweights[i] - dots[i]) <=
                    (double)(f + 2) * test_epsilon(MT_F32) * sizes[i]);
    free(dots), free(sizes);
    void *all[] = { weights, dweights, position, dy, w, z, rows, p, dz, act, want, y, offsets };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_free(all[i]);
}

static void test_weights_after(void **state)
{
    (void)state;
    static const int64_t widths[] = { 8, 72, 136, 1536 };
    const struct mt_kernels *kernels;
    assert_ok(mt_device_kernels(test_device(), MT_BF16, &kernels));
    if (!kernels->weighs_after) skip();
    for (int c = 0; c < CASES; c++)
        for (int i = 0; i < 4; i++) {
            struct rows r =
                rows_make(cases[c].members, cases[c].counts, cases[c].tail, cases[c].tokens);
            assert_true(kernels->weighs_after(widths[i], 256));
            check_after(&r, 256, widths[i]);
            for (int add = 0; add < 2; add++) {
                check_wgrad(&r, widths[i], 256, MT_BF16, MT_F32, add, true);
                check_wgrad(&r, widths[i], 256, MT_BF16, MT_BF16, add, true);
            }
            rows_free(&r);
        }
}

static void test_paths_have_names(void **state)
{
    (void)state;
#ifdef MT_HAVE_cuda
    char text[MT_CUDA_MOE_GEMM_TEXT];
    mt_cuda_gemm_path path = { .variant = MT_CUDA_GEMM_WIDE, .width = 192, .super = 8 };
    int32_t rows = 0;
    struct mt_moe_gemm_args args = { .row_token = &rows, .act = text };
    mt_cuda_moe_gemm_print(text, &args, &path, true);
    assert_string_equal(text, "gather + wgmma 256x192, pairs + swiglu, one kernel");
    mt_cuda_moe_gemm_print(text, &args, &path, false);
    assert_string_equal(text, "gather, then wgmma 256x192, pairs, then swiglu");
    args = (struct mt_moe_gemm_args){ .z = text };
    mt_cuda_moe_gemm_print(text, &args, &path, true);
    assert_string_equal(text, "wgmma 256x192, pairs + swiglu backward, one kernel");
#else
    skip();
#endif
}

static void test_refusals(void **state)
{
    (void)state;
    int64_t counts[] = { 2, 2 }, *offsets;
    size_t bytes;
    struct rows r = rows_make(2, counts, 0, 3);
    void *x = random_buffer(4 * 8, MT_F32, 1, 1), *w = random_buffer(2 * 8 * 8, MT_F32, 1, 2);
    void *d = test_alloc(4 * 8, MT_F32);
    mt_qtensor qw = mt_qtensor_plain(mt_group_uniform(2, 8, 8), MT_F32, w);
    mt_qtensor qx = ragged(&r, 8, MT_F32, x, &offsets);
    struct mt_moe_gemm_args good = {
        .dtype = MT_F32,
        .gemm = { .dtype = MT_F32, .a = &qw, .b = &qx, .d = d, .d_dtype = MT_F32 },
        .tokens = 3
    };
    struct mt_moe_gemm_args args = good;
    args.row_token = r.row_token;
    assert_fails(mt_moe_gemm(stream(), &args), MT_EINVAL, "rows_used is NULL");
    args.rows_used = r.offsets + 2;
    assert_ok(mt_moe_gemm_scratch(stream(), &args, &bytes)); /* 0: one kernel */
    if (bytes) assert_fails(mt_moe_gemm(stream(), &args), MT_EINVAL, "scratch is NULL");
    args.gemm.layout = MT_GEMM_NN;
    assert_fails(mt_moe_gemm(stream(), &args), MT_EINVAL, "need z, weights and position");
    args = good, args.z = x;
    assert_fails(mt_moe_gemm(stream(), &args), MT_EINVAL, "z is for an NN result");
    args = good, args.dweights = d;
    assert_fails(mt_moe_gemm(stream(), &args), MT_EINVAL, "dweights needs z");
    args = good, args.act = d, args.gemm.c = d;
    assert_fails(mt_moe_gemm(stream(), &args), MT_EINVAL, "without c");
    args = good, args.gemm.dtype = MT_BF16;
    assert_fails(mt_moe_gemm(stream(), &args), MT_EINVAL, "dtype is f32, that of the gemm bf16");
    void *all[] = { x, w, d, offsets };
    for (int i = 0; i < 4; i++) test_free(all[i]);
    rows_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_as_its_parts), cmocka_unit_test(test_every_fused_kernel),
        cmocka_unit_test(test_scaled_members),    cmocka_unit_test(test_weights_after),
        cmocka_unit_test(test_paths_have_names),  cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
