/* The grouped GEMM of quantized operands on a GPU: exact products (codes decoded, that counted) and
 * fp8 tensor cores, against an f64 product and against bf16.
 *
 * Usage: bench_gemm_codes_cuda check [I]      every format and pass at odd sizes (the I-th of them
 *                                             alone, from 0 on); what fp8 tensor cores lose
 *        bench_gemm_codes_cuda [time [SHAPE [FORMAT [PASS]]]]
 *                                             what has these in the names, wgrad in bf16 and in
 *                                             f32, written and added to
 *
 * Times are medians of single launches between events, L2 flushed before each, the ways to multiply
 * taking turns. Needs a build with CUDA=1. */
#include "tests/bench/gemm_codes_cuda.h"

/* ---- check -------------------------------------------------------------------------------------
 */

/* The values of an operand; those past the last member's are 0. */
static double *decoded(const mt_qtensor *q, const mt_direction *d)
{
    size_t bytes = (size_t)mt_group_capacity(&q->group) * sizeof(double);
    double *host = malloc(bytes + 1);
    assert_non_null(host);
    void *y = device_buffer(bytes);
    CUDA_OK(cudaMemset(y, 0, bytes));
    assert_ok(mt_dequantize(
        &stream,
        &(struct mt_dequantize_args){
            .dtype = MT_BF16, .src = q, .dir = (mt_dir)(d - q->dir), .y = y, .y_dtype = MT_F64 }));
    CUDA_OK(cudaStreamSynchronize(queue));
    CUDA_OK(cudaMemcpy(host, y, bytes, cudaMemcpyDefault));
    device_free(y);
    return host;
}

/* The f64 product of these operands. */
static double *reference(const struct product *p, const double *a, const double *b, bool sizes)
{
    int64_t counts[] = { mt_group_capacity(&p->a.group), mt_group_capacity(&p->b.group) };
    const double *from[] = { a, b };
    void *there[2];
    double *d = malloc((size_t)p->count * sizeof *d + 1);
    assert_non_null(d);
    for (int o = 0; o < 2; o++) {
        double *values = malloc((size_t)counts[o] * sizeof *values + 1);
        assert_non_null(values);
        for (int64_t i = 0; i < counts[o]; i++) values[i] = sizes ? fabs(from[o][i]) : from[o][i];
        there[o] = upload(values, (size_t)counts[o] * sizeof *values);
        free(values);
    }
    mt_qtensor x = mt_qtensor_plain(p->a.group, MT_F64, there[0]);
    mt_qtensor y = mt_qtensor_plain(p->b.group, MT_F64, there[1]);
    struct mt_gemm_args args = { .dtype = MT_F64,
                                 .layout = p->layout,
                                 .a = &x,
                                 .b = &y,
                                 .d = device_buffer((size_t)p->count * sizeof *d),
                                 .d_dtype = MT_F64 };
    assert_ok(mt_gemm(&stream, &args));
    CUDA_OK(cudaStreamSynchronize(queue));
    CUDA_OK(cudaMemcpy(d, args.d, (size_t)p->count * sizeof *d, cudaMemcpyDefault));
    device_free(args.d), device_free(there[0]), device_free(there[1]);
    return d;
}

/* Which of a product's operands a path levels: 1 the first (X of NT), 2 the second, 0 neither. */
static int leveled(const mt_cuda_gemm_path *path)
{
    return !path                                            ? 0
           : path->variant == MT_CUDA_GEMM_FP8_LEVEL        ? 1
           : path->variant == MT_CUDA_GEMM_FP8_LEVEL_TURNED ? 2
           : path->variant == MT_CUDA_GEMM_FP8_HIGH_LEVEL   ? 2
                                                            : 0;
}

/* Lines of codes in member e of ragged rows: its columns, or its rows, and how long they are. */
static int64_t lines_of(const mt_qtensor *q, mt_dir dir, const struct rows *rows, int64_t e)
{
    return dir == MT_COL ? q->group.k : rows->counts[e];
}

static int64_t length_of(const mt_qtensor *q, mt_dir dir, const struct rows *rows, int64_t e)
{
    return dir == MT_COL ? rows->counts[e] : q->group.k;
}

/* Where its scales begin: of blocks of each line beside each other. */
static int64_t first_scale(const mt_qtensor *q, mt_dir dir, const struct rows *rows, int64_t e)
{
    int64_t first = 0;
    for (int64_t m = 0; m < e; m++)
        first += (length_of(q, dir, rows, m) + 127) / 128 * lines_of(q, dir, rows, m);
    return first;
}

/* The largest scale of line n of an operand in member e, of blocks that are not all 0. */
static double level_of(const mt_qtensor *q, mt_dir dir, const struct rows *rows,
                       const float *scales, const double *values, int64_t e, int64_t n)
{
    const int64_t lines = lines_of(q, dir, rows, e), first = first_scale(q, dir, rows, e);
    const int64_t start = rows->start[e], columns = q->group.k;
    double level = 0;
    for (int64_t r = 0; r < length_of(q, dir, rows, e); r++)
        if (values[dir == MT_COL ? (start + r) * columns + n : (start + n) * columns + r] != 0)
            level = fmax(level, (double)scales[first + r / 128 * lines + n]);
    return level;
}

/* What fp8 tensor cores may lose in element (i, j) of member e: mt_gemm_fp8_loss of each 128; and
 * what levels do of the operands that have one (not 0). */
static double loss_of(const struct product *p, const struct rows *rows, const double *a,
                      const double *b, int64_t e, int64_t i, int64_t j, const double level[2])
{
    double loss = 0, largest = 0, sum = 0;
    bool wgrad = p->layout == MT_GEMM_NT, along = p->layout == MT_GEMM_TN;
    int64_t start = rows->start[e], depth = wgrad ? rows->counts[e] : p->depth;
    for (int64_t q = 0; q < depth; q++) {
        if (q % 128 == 0) loss += mt_gemm_fp8_loss(largest), largest = sum = 0;
        int64_t at = wgrad   ? (start + q) * p->k + j
                     : along ? (e * p->n + j) * p->k + q
                             : (e * p->n + q) * p->k + j;
        double y = b[wgrad ? (start + q) * p->n + i : (start + i) * p->depth + q], x = a[at] * y;
        sum += x, largest = fmax(largest, fmax(fabs(x), fabs(sum)));
        loss += mt_gemm_fp8_level_loss(level[0], fabs(y)) +
                mt_gemm_fp8_level_loss(level[1], fabs(a[at]));
    }
    return loss + mt_gemm_fp8_loss(largest);
}

struct checked {
    const struct product *p;
    const struct rows *rows;
    const double *a, *b, *sum, *size;
    const float *scales[2]; /* of blocks, of each operand */
    int levels;             /* leveled(path) */
    bool codes;             /* multiplied by fp8 tensor cores: mt_gemm_fp8_loss */
    bool lossy;             /* and values that they round */
    double worst;
};

static void verify(struct checked *c, const char *path, const void *got)
{
    const struct product *p = c->p;
    bool wgrad = p->layout == MT_GEMM_NT;
    int scales = mt_gemm_scale_roundings(mt_gemm_a(&p->args)->format, mt_gemm_b(&p->args)->format);
    if (c->codes) scales = 3;
    for (int64_t e = 0, at = 0; e < c->rows->members; e++) {
        int64_t rows = c->rows->counts[e], depth = wgrad ? rows : p->depth;
        int64_t first = at, end = at + (wgrad ? p->n : rows) * p->columns;
        for (; at < end; at++) {
            if (c->lossy && at % 61) continue;
            double want = c->sum[at], value = mt_load_f64(got, p->args.d_dtype, at);
            double limit = (double)(depth + 1 + scales) * test_epsilon(MT_F32) * c->size[at];
            int64_t i = (at - first) / p->columns, j = (at - first) % p->columns;
            if (c->lossy) {
                const mt_dir dir = wgrad ? MT_COL : MT_ROW;
                const int levels = wgrad || rows <= MT_GEMM_FP8_LEVELED ? c->levels : 0;
                const double level[2] = {
                    levels & 1 ? level_of(&p->a, dir, c->rows, c->scales[0], c->a, e, j) : 0,
                    levels & 2 ? level_of(&p->b, dir, c->rows, c->scales[1], c->b, e, i) : 0
                };
                limit += loss_of(p, c->rows, c->a, c->b, e, i, j, level);
            }
            if (p->args.d_dtype == MT_BF16) limit += test_epsilon(MT_BF16) * (fabs(want) + limit);
            if (!(fabs(value - want) <= limit))
                fail_msg("%s %s by %s, n %lld, k %lld: row %lld, column %lld of member %lld is "
                         "%.9g, must be %.9g within %.3g",
                         p->coding->name, layout_names[p->layout], path, (long long)p->n,
                         (long long)p->k, (long long)i, (long long)j, (long long)e, value, want,
                         limit);
            double lost = fabs(value - want) - test_epsilon(MT_BF16) * fabs(want);
            if (c->size[at] > 0) c->worst = fmax(c->worst, lost / c->size[at]);
        }
    }
}

/* The result, on the host, by a path, or by exact decoding. */
static void run_path(struct product *p, const mt_cuda_gemm_path *path, void *host)
{
    size_t bytes = (size_t)p->count * mt_dtype_size(p->args.d_dtype);
    p->args.d = device_buffer(bytes);
    assert_ok(path ? mt_cuda_gemm_by(&stream, &p->args, path) : mt_gemm(&stream, &p->args));
    CUDA_OK(cudaStreamSynchronize(queue));
    CUDA_OK(cudaMemcpy(host, p->args.d, bytes, cudaMemcpyDefault));
    expect_poison("before the result", (char *)p->args.d - GUARD, GUARD);
    expect_poison("after the result", (char *)p->args.d + bytes, GUARD);
    device_free(p->args.d);
}

static void run_and_verify(struct checked *c, struct product *p, const mt_cuda_gemm_path *path)
{
    void *host = malloc((size_t)p->count * mt_dtype_size(p->args.d_dtype) + 1);
    assert_non_null(host);
    run_path(p, path, host);
    c->levels = leveled(path);
    verify(c, path ? mt_cuda_gemm_path_name(path) : "exact decoding", host);
    free(host);
}

/* The path of fp8 codes, if there is one for this product. */
static bool native(mt_cuda_gemm_path *path, const struct product *p)
{
    const mt_format *f = mt_gemm_a(&p->args)->format;
    return f->scale == MT_SCALE_F32 && mt_cuda_gemm_choose(&stream, &p->args, path) == MT_OK &&
           mt_cuda_gemm_of_codes(path->variant);
}

enum { TALL_WIDTH = 128, HIGH_WIDTH = 144 };

/* Tall tiles, and high ones, have scales of blocks only where they are powers of two. */
static bool goes_tall(const struct product *p)
{
    return !p->coding->two_d_w || p->coding->pow2;
}

/* Broad tiles are of results of bf16, without C. */
static bool is_broad(int variant)
{
    return variant == MT_CUDA_GEMM_FP8_BROAD || variant == MT_CUDA_GEMM_FP8_BROAD_TURNED;
}

static bool goes_broad(const struct product *p)
{
    return !p->coding->two_d_w && p->args.d_dtype == MT_BF16;
}

/* All kernels give the same bits, NT's with and without C; but for leveled ones. */
static void check_same(struct product *p)
{
    enum { BLOCK = 99991 };
    size_t bytes = (size_t)p->count * mt_dtype_size(p->args.d_dtype);
    float *values = malloc(BLOCK * sizeof *values);
    char *host = malloc(2 * bytes + 1);
    assert_true(values && host);
    for (int i = 0; i < BLOCK; i++)
        mt_store_f64(values, p->args.d_dtype, i, mt_rng_normal(60, 0, (uint64_t)i));
    void *c = repeated(values, BLOCK * mt_dtype_size(p->args.d_dtype), bytes);
    const bool nt = p->layout == MT_GEMM_NT;
    const int first = nt ? MT_CUDA_GEMM_FP8_TALL : MT_CUDA_GEMM_FP8_HIGH;
    const int last = nt ? MT_CUDA_GEMM_FP8_BROAD_TURNED : MT_CUDA_GEMM_FP8_ROWS_TALL;
    for (int adds = 0; adds <= (int)nt; adds++)
        for (int v = 0; v <= last - first + 1; v++) {
            mt_cuda_gemm_path path = { .variant = v ? first + v - 1 : MT_CUDA_GEMM_FP8,
                                       .width = TALL_WIDTH,
                                       .super = 2 };
            if (is_broad(path.variant) && (adds || !goes_broad(p))) continue;
            p->args.c = adds ? c : NULL;
            run_path(p, &path, host + (v > 0 ? bytes : 0));
            if (memcmp(host, host + (v > 0 ? bytes : 0), bytes) != 0)
                fail_msg("%s, n %lld, k %lld, %s: not the bits of others", p->coding->name,
                         (long long)p->n, (long long)p->k, mt_cuda_gemm_path_name(&path));
        }
    p->args.c = NULL;
    device_free(c);
    free(values), free(host);
}

/* Leveled, with C: what it holds and the same sums, added in f32 and rounded once. */
static void check_level_adds(struct product *p)
{
    const mt_dtype before = p->args.d_dtype;
    const size_t count = (size_t)p->count;
    float *plain = malloc(count * sizeof *plain + 1), *values = malloc(count * sizeof *values + 1);
    char *got = malloc(count * sizeof *plain + 1), *want = malloc(count * sizeof *plain + 1);
    assert_true(plain && values && got && want);
    for (int v = MT_CUDA_GEMM_FP8_LEVEL; v <= MT_CUDA_GEMM_FP8_LEVEL_TURNED; v++) {
        mt_cuda_gemm_path path = { .variant = v, .width = TALL_WIDTH, .super = 2 };
        p->args.c = NULL, p->args.d_dtype = MT_F32;
        run_path(p, &path, plain);
        for (int half = 0; half < 2; half++) {
            p->args.d_dtype = half ? MT_BF16 : MT_F32;
            const size_t bytes = count * mt_dtype_size(p->args.d_dtype);
            for (int64_t i = 0; i < p->count; i++) {
                const double near = fabs((double)plain[i]) + 0x1p-60;
                mt_store_f64(values, p->args.d_dtype, i, near * mt_rng_normal(61, 0, (uint64_t)i));
                const float c = (float)mt_load_f64(values, p->args.d_dtype, i);
                mt_store_f64(want, p->args.d_dtype, i, (double)(plain[i] + c));
            }
            void *there = upload(values, bytes);
            p->args.c = there;
            run_path(p, &path, got);
            if (memcmp(got, want, bytes) != 0)
                fail_msg("%s, n %lld, k %lld, %s to %s: not the bits of its sums and C",
                         p->coding->name, (long long)p->n, (long long)p->k,
                         mt_cuda_gemm_path_name(&path), mt_dtype_name(p->args.d_dtype));
            device_free(there);
        }
    }
    p->args.c = NULL, p->args.d_dtype = before;
    free(plain), free(values), free(got), free(want);
}

/* Compact codes of columns, by steps of 128 rows. */
static uint8_t *padded_codes(mt_direction *d, const mt_qtensor *q, const struct rows *rows)
{
    const int64_t lines = q->group.k;
    const size_t compact = mt_direction_code_bytes(d, MT_COL, &q->group);
    d->layout = MT_LAYOUT_PADDED;
    const size_t bytes = mt_direction_code_bytes(d, MT_COL, &q->group);
    uint8_t *from = malloc(compact + 1), *to = calloc(bytes + 1, 1);
    assert_true(from && to);
    if (compact > 0) CUDA_OK(cudaMemcpy(from, d->codes, compact, cudaMemcpyDefault));
    int64_t steps = 0; /* before the member */
    for (int64_t e = 0; e < rows->members; steps += (rows->counts[e++] + 127) / 128)
        for (int64_t n = 0; n < lines; n++)
            for (int64_t r = 0; r < rows->counts[e]; r++)
                to[((steps + r / 128) * lines + n) * 128 + r % 128] =
                    from[rows->start[e] * lines + n * rows->counts[e] + r];
    d->codes = upload(to, bytes);
    free(from), free(to);
    return d->codes;
}

/* NT of padded codes has the bits of that of compact ones. */
static void check_padded(const struct product *compact, const struct rows *rows, int variant)
{
    struct product p = *compact;
    mt_cuda_gemm_path path = { .variant = variant, .width = TALL_WIDTH, .super = 2 };
    const size_t bytes = (size_t)p.count * mt_dtype_size(p.args.d_dtype);
    char *host = malloc(2 * bytes + 1);
    assert_non_null(host);
    run_path(&p, &path, host);
    p.args.a = &p.a, p.args.b = &p.b;
    uint8_t *const codes[] = { padded_codes(&p.a.dir[MT_COL], &p.a, rows),
                               padded_codes(&p.b.dir[MT_COL], &p.b, rows) };
    run_path(&p, &path, host + bytes);
    if (memcmp(host, host + bytes, bytes) != 0)
        fail_msg("%s, n %lld, k %lld, %s: padded codes have other bits than compact ones",
                 p.coding->name, (long long)p.n, (long long)p.k, mt_cuda_gemm_path_name(&path));
    device_free(codes[0]), device_free(codes[1]);
    free(host);
}

/* By exact decoding and, where there is one, by the path of codes. */
static void check_paths(struct checked *c, struct product *p, enum values values)
{
    mt_cuda_gemm_path path;
    c->codes = c->lossy = false;
    run_and_verify(c, p, NULL);
    p->args.d = (void *)(uintptr_t)c->sum; /* any: what is chosen does not depend on where it is */
    if (!native(&path, p)) return;
    static const int widths[] = { 192, 128, 64 };
    c->codes = true, c->lossy = values == NORMAL, c->worst = 0;
    for (int i = 0; i < 3; i++)
        for (int v = MT_CUDA_GEMM_FP8; v <= MT_CUDA_GEMM_FP8_LEVEL_TURNED; v++) {
            bool blocks = p->coding->two_d_w && p->coding->pow2, nt = v >= MT_CUDA_GEMM_FP8_TALL;
            if (v != MT_CUDA_GEMM_FP8 && nt != (p->layout == MT_GEMM_NT)) continue;
            if ((nt || v == MT_CUDA_GEMM_FP8_ROWS_TALL) && widths[i] > TALL_WIDTH) continue;
            if (nt && !goes_tall(p)) continue;
            if (is_broad(v) && !goes_broad(p)) continue;
            const bool levels = v >= MT_CUDA_GEMM_FP8_LEVEL || v == MT_CUDA_GEMM_FP8_HIGH_LEVEL;
            const bool high = v == MT_CUDA_GEMM_FP8_HIGH || v == MT_CUDA_GEMM_FP8_HIGH_LEVEL;
            if ((levels && !blocks) || (high && !goes_tall(p))) continue;
            path.width = high && widths[i] > HIGH_WIDTH ? (int)HIGH_WIDTH : widths[i];
            path.variant = v, path.super = i ? 1 : 8;
            run_and_verify(c, p, &path);
            if (p->layout == MT_GEMM_NT && widths[i] == TALL_WIDTH) check_padded(p, c->rows, v);
        }
    if (goes_tall(p)) check_same(p);
    if (p->layout == MT_GEMM_NT && p->coding->two_d_w && p->coding->pow2) check_level_adds(p);
    if (c->lossy)
        printf("%-18s %s, n %lld, k %lld: %s loses up to %.2f 2^-13 of sum |a b|\n",
               p->coding->name, layout_names[p->layout], (long long)p->n, (long long)p->k,
               mt_cuda_gemm_path_name(&path), c->worst * 0x1p13);
}

/* A direction's on the host. */
static float *block_scales(const mt_qtensor *q, const mt_direction *d)
{
    size_t bytes = mt_direction_scale_bytes(d, (mt_dir)(d - q->dir), &q->group);
    float *scales = malloc(bytes + 1);
    assert_non_null(scales);
    if (bytes > 0) CUDA_OK(cudaMemcpy(scales, d->scales, bytes, cudaMemcpyDefault));
    return scales;
}

static void check_product(const struct rows *rows, mt_gemm_layout layout, const struct coding *c,
                          int64_t n, int64_t k, enum values values)
{
    struct product p;
    make_product(&p, rows, layout, c, n, k, values, false);
    double *a = decoded(&p.a, mt_gemm_a(&p.args)), *b = decoded(&p.b, mt_gemm_b(&p.args));
    double *sum = reference(&p, a, b, false), *size = reference(&p, a, b, true);
    const bool blocks = c->id == MT_FORMAT_FP8_BLOCK;
    float *scales[2] = { blocks ? block_scales(&p.a, mt_gemm_a(&p.args)) : NULL,
                         blocks ? block_scales(&p.b, mt_gemm_b(&p.args)) : NULL };
    struct checked checked = { .p = &p,
                               .rows = rows,
                               .a = a,
                               .b = b,
                               .sum = sum,
                               .size = size,
                               .scales = { scales[0], scales[1] } };
    check_paths(&checked, &p, values);
    p.args.d_dtype = MT_BF16; /* of gradients, too */
    if (layout == MT_GEMM_NT) check_paths(&checked, &p, values);
    free(a), free(b), free(sum), free(size), free(scales[0]), free(scales[1]);
    free_product(&p);
}

/* An operand whose lines have scales far from each other, as from their own, and blocks of zeros,
 * whose scale is 1. */
static void spread(mt_qtensor *q, mt_dir dir, const struct rows *rows, uint64_t seed)
{
    const mt_direction *d = &q->dir[dir];
    size_t bytes = mt_direction_code_bytes(d, dir, &q->group);
    size_t scale_bytes = mt_direction_scale_bytes(d, dir, &q->group);
    uint8_t *codes = calloc(bytes, 1);
    float *scales = calloc(scale_bytes, 1);
    mt_codec codec = mt_codec_of(d->options.element);
    assert_true(codes && scales);
    for (int64_t e = 0; e < rows->members; e++) {
        const int64_t lines = lines_of(q, dir, rows, e), length = length_of(q, dir, rows, e);
        const int64_t first = first_scale(q, dir, rows, e);
        for (int64_t n = 0; n < lines; n++)
            for (int64_t r = 0; r < length; r++) {
                const int64_t block = e * 3 + r / 128;
                bool zero = (block * 5 + n) % 7 == 0 || n == 3;
                uint64_t at = (uint64_t)(rows->start[e] * q->group.k + n * length + r);
                int code = 1 + (int)(4 * mt_rng_uniform(seed, 0, at));
                scales[first + r / 128 * lines + n] =
                    zero ? 1 : ldexpf(1, -40 + (int)(n % 23) + (int)((block * 3 + n) % 9));
                codes[at] = zero ? 0 : (uint8_t)mt_encode(codec, (float)(at % 3 ? code : -code));
            }
    }
    CUDA_OK(cudaMemcpy(d->codes, codes, bytes, cudaMemcpyDefault));
    CUDA_OK(cudaMemcpy(d->scales, scales, scale_bytes, cudaMemcpyDefault));
    free(codes), free(scales);
}

static void check_levels_of(const struct coding *c, mt_gemm_layout layout)
{
    static const int64_t counts[] = { 300, 0, 1, 129, 520, 0 };
    enum { N = 208, K = 288 };
    const bool nt = layout == MT_GEMM_NT;
    struct rows rows;
    struct product p;
    make_rows(&rows, sizeof counts / sizeof *counts, counts, 5, N, K);
    make_product(&p, &rows, layout, c, N, K, INTEGERS, false);
    if (nt) spread(&p.a, MT_COL, &rows, 1);
    spread(&p.b, nt ? MT_COL : MT_ROW, &rows, 2);
    double *a = decoded(&p.a, mt_gemm_a(&p.args)), *b = decoded(&p.b, mt_gemm_b(&p.args));
    double *sum = reference(&p, a, b, false), *size = reference(&p, a, b, true);
    float *scales[2] = { block_scales(&p.a, mt_gemm_a(&p.args)),
                         block_scales(&p.b, mt_gemm_b(&p.args)) };
    struct checked checked = { .p = &p,
                               .rows = &rows,
                               .a = a,
                               .b = b,
                               .sum = sum,
                               .size = size,
                               .scales = { scales[0], scales[1] },
                               .codes = true,
                               .lossy = true };
    mt_cuda_gemm_path path = { .super = 2 };
    p.args.d = (void *)(uintptr_t)checked.sum;
    const bool runs = native(&path, &p);
    const int first = nt ? MT_CUDA_GEMM_FP8_LEVEL : MT_CUDA_GEMM_FP8_HIGH_LEVEL;
    const int last = nt ? MT_CUDA_GEMM_FP8_LEVEL_TURNED : MT_CUDA_GEMM_FP8_HIGH_LEVEL;
    for (int half = !nt; runs && half < 2; half++)
        for (int v = first; v <= last; v++)
            for (path.width = 64; path.width <= TALL_WIDTH; path.width *= 2) {
                path.variant = v, p.args.d_dtype = half ? MT_BF16 : MT_F32;
                run_and_verify(&checked, &p, &path);
            }
    if (runs && nt) check_level_adds(&p);
    free(a), free(b), free(sum), free(size), free(scales[0]), free(scales[1]);
    free_product(&p), free_rows(&rows);
    printf("%s %s: lines with scales far from each other: right\n", c->name, layout_names[layout]);
}

static void check_levels(const struct coding *c)
{
    for (int l = 0; l < MT_GEMM_LAYOUT_COUNT; l++) check_levels_of(c, (mt_gemm_layout)l);
}

/* alone: the number of the only size, or nothing. */
static void check(const char *alone)
{
    static const int64_t counts[] = { 0,   1,   7, 63,  64,  65,  127, 128, 129,
                                      145, 193, 0, 320, 385, 416, 600, 5,   0 };
    static const int64_t sizes[][2] = {
        { 512, 320 }, { 448, 80 }, { 336, 1104 }, { 16, 16 }, { 37, 41 }
    };
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        if (*alone && strtoul(alone, NULL, 10) != s) continue;
        int64_t n = sizes[s][0], k = sizes[s][1];
        struct rows rows;
        make_rows(&rows, sizeof counts / sizeof *counts, counts, 5, n, k);
        for (int c = 0; c < CODINGS; c++)
            for (int l = 0; l < MT_GEMM_LAYOUT_COUNT; l++)
                for (int v = INTEGERS; v <= NORMAL; v++)
                    check_product(&rows, (mt_gemm_layout)l, &codings[c], n, k, (enum values)v);
        free_rows(&rows);
        printf("n %lld, k %lld: right\n", (long long)n, (long long)k);
        fflush(stdout);
    }
    const size_t sizes_before = sizeof sizes / sizeof *sizes;
    if (*alone && strtoul(alone, NULL, 10) < sizes_before) return;
    check_levels(&codings[2]);
    /* members of so many rows that pairs share the weights, in pieces of 144 and 136; all rows one
     * member's; one row */
    static const struct {
        int64_t members, counts[4], n, k;
    } others[] = { { 2, { 1433, 1283 }, 448, 1040 },
                   { 4, { 0, 0, 641, 0 }, 400, 272 },
                   { 1, { 1 }, 208, 144 } };
    for (size_t s = 0; s < sizeof others / sizeof *others; s++) {
        if (*alone && strtoul(alone, NULL, 10) != sizes_before + s) continue;
        struct rows rows;
        make_rows(&rows, others[s].members, others[s].counts, 5, others[s].n, others[s].k);
        for (int c = 0; c < CODINGS; c++)
            for (int l = 0; l < (s ? MT_GEMM_LAYOUT_COUNT : MT_GEMM_TN + 1); l++)
                check_product(&rows, (mt_gemm_layout)l, &codings[c], others[s].n, others[s].k,
                              NORMAL);
        free_rows(&rows);
        printf("n %lld, k %lld of %lld members: right\n", (long long)others[s].n,
               (long long)others[s].k, (long long)others[s].members);
    }
}

/* ---- time --------------------------------------------------------------------------------------
 */

enum way { PLAIN, EXACT, NATIVE, OTHER, WAYS };

static double median(double times[LAUNCHES])
{
    qsort(times, LAUNCHES, sizeof *times, by_value);
    return times[LAUNCHES / 2];
}

/* One launch, in milliseconds. */
static double launch(const struct mt_gemm_args *args, const mt_cuda_gemm_path *path, void *flush,
                     int turn)
{
    cudaEvent_t begin, end;
    float ms;
    CUDA_OK(cudaEventCreate(&begin));
    CUDA_OK(cudaEventCreate(&end));
    CUDA_OK(cudaMemsetAsync(flush, turn, FLUSH, queue));
    CUDA_OK(cudaEventRecord(begin, queue));
    assert_ok(path ? mt_cuda_gemm_by(&stream, args, path) : mt_gemm(&stream, args));
    CUDA_OK(cudaEventRecord(end, queue));
    CUDA_OK(cudaStreamSynchronize(queue));
    CUDA_OK(cudaEventElapsedTime(&ms, begin, end));
    CUDA_OK(cudaEventDestroy(begin));
    CUDA_OK(cudaEventDestroy(end));
    return (double)ms;
}

/* Random bf16 values of an operand's shape. */
static void *plain_values(const mt_qtensor *q, double scale)
{
    enum { BLOCK = (1 << 19) - 4099 };
    uint16_t *values = malloc(BLOCK * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < BLOCK; i++)
        values[i] = mt_f32_to_bf16((float)(scale * mt_rng_normal(40, 0, (uint64_t)i)));
    void *p = repeated(values, BLOCK * sizeof *values,
                       (size_t)mt_group_capacity(&q->group) * sizeof *values);
    free(values);
    return p;
}

static void time_product(const struct timed_shape *s, const struct rows *rows,
                         mt_gemm_layout layout, mt_dtype result, bool adds, const struct coding *c,
                         void *flush)
{
    struct product p;
    mt_cuda_gemm_path path, best;
    make_product(&p, rows, layout, c, s->n, s->k, NORMAL, true);
    void *x = plain_values(&p.a, 0.1), *y = plain_values(&p.b, 0.1);
    mt_qtensor a = mt_qtensor_plain(p.a.group, MT_BF16, x);
    mt_qtensor b = mt_qtensor_plain(p.b.group, MT_BF16, y);
    p.args.d_dtype = result;
    p.args.d = device_buffer((size_t)p.count * mt_dtype_size(result));
    CUDA_OK(cudaMemset(p.args.d, 0, (size_t)p.count * mt_dtype_size(result)));
    if (adds) p.args.c = p.args.d;
    struct mt_gemm_args plain = p.args;
    plain.a = &a, plain.b = &b;
    assert_ok(mt_cuda_gemm_choose(&stream, &plain, &best));
    bool has[WAYS] = { true, true, native(&path, &p) };
    mt_cuda_gemm_path other = { .width = TALL_WIDTH, .super = 8 }; /* with levels, or without */
    const int turned = s->n < s->k;
    has[OTHER] = has[NATIVE] && c->two_d_w && c->pow2;
    if (layout == MT_GEMM_NT)
        other.variant = (leveled(&path) ? MT_CUDA_GEMM_FP8_TALL : MT_CUDA_GEMM_FP8_LEVEL) + turned;
    else
        other.variant = leveled(&path) ? MT_CUDA_GEMM_FP8_HIGH : MT_CUDA_GEMM_FP8_HIGH_LEVEL,
        other.width = HIGH_WIDTH;
    double times[WAYS][LAUNCHES], rates[WAYS] = { 0 };
    for (int i = -1; i < LAUNCHES; i++) /* the first only warms up */
        for (int w = 0; w < WAYS; w++) {
            if (!has[w]) continue;
            double ms = launch(w == PLAIN ? &plain : &p.args,
                               w == PLAIN    ? &best
                               : w == EXACT  ? NULL
                               : w == NATIVE ? &path
                                             : &other,
                               flush, i);
            if (i >= 0) times[w][i] = ms;
        }
    for (int w = 0; w < WAYS; w++)
        if (has[w]) rates[w] = 2e-9 * (double)(s->rows * s->n * s->k) / median(times[w]);
    printf("%-18s %-5s to %-4s %s %-18s bf16 %6.1f, exact %6.1f (%.2f)", s->name,
           layout_names[layout], mt_dtype_name(result), adds ? "+=" : "  ", c->name, rates[PLAIN],
           rates[EXACT], rates[EXACT] / rates[PLAIN]);
    if (has[NATIVE])
        printf(", fp8 %6.1f (%.2f), width %d", rates[NATIVE], rates[NATIVE] / rates[PLAIN],
               path.width);
    if (has[OTHER])
        printf(", %sleveled %6.1f (%.2f)", leveled(&path) ? "not " : "", rates[OTHER],
               rates[OTHER] / rates[PLAIN]);
    printf(" TFLOP/s\n");
    fflush(stdout);
    device_free(x), device_free(y), device_free(p.args.d);
    free_product(&p);
}

static void time_shape(const struct timed_shape *s, const char *format, const char *pass)
{
    static const int timed[] = { 0, 2, 4, 5 }; /* of codings */
    struct rows rows;
    draw_rows(&rows, s);
    void *flush = device_buffer(FLUSH);
    for (size_t i = 0; i < sizeof timed / sizeof *timed; i++) {
        const struct coding *c = &codings[timed[i]];
        for (int l = 0; l < MT_GEMM_LAYOUT_COUNT; l++) {
            if (!strstr(c->name, format) || !strstr(layout_names[l], pass)) continue;
            for (int way = 0; way < (l == MT_GEMM_NT ? 4 : 1);
                 way++) /* gradients, added to or not */
                time_product(s, &rows, (mt_gemm_layout)l, way % 2 ? MT_F32 : MT_BF16, way > 1, c,
                             flush);
        }
    }
    device_free(flush);
    free_rows(&rows);
}

int main(int argc, char **argv)
{
    const char *verb = argc > 1 ? argv[1] : "time", *word = argc > 2 ? argv[2] : "";
    const char *format = argc > 3 ? argv[3] : "", *pass = argc > 4 ? argv[4] : "";
    open_gpu();
    if (!strcmp(verb, "check"))
        check(word);
    else
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            if (strstr(shapes[i].name, word)) time_shape(&shapes[i], format, pass);
    close_gpu();
    return 0;
}
