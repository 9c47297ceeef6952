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
#include "tests/bench/gemm_codes_check_cuda.h"

/* ---- check -------------------------------------------------------------------------------------
 */

struct checked {
    const struct product *p;
    const struct rows *rows;
    const double *a, *b, *sum, *size;
    const float *scales[2]; /* of blocks, of each operand */
    int levels;             /* mt_cuda_gemm_leveled */
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

/* Results of a variant that were looked at. */
static int seen[MT_CUDA_GEMM_NAMES];

static void run_and_verify(struct checked *c, struct product *p, const mt_cuda_gemm_path *path)
{
    void *host = malloc((size_t)p->count * mt_dtype_size(p->args.d_dtype) + 1);
    assert_non_null(host);
    run_path(p, path, host);
    c->levels = path ? mt_cuda_gemm_leveled(&p->args, path) : 0;
    if (path) seen[path->variant]++;
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

/* Whether the path can run the product, and levels nothing. */
static bool is_plain(const struct product *p, const mt_cuda_gemm_path *path)
{
    return mt_cuda_gemm_can(&stream, &p->args, path) && !mt_cuda_gemm_leveled(&p->args, path);
}

/* All kernels give the same bits, with and without C; but for leveled ones. */
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
    for (int adds = 0; adds < 2; adds++)
        for (int v = MT_CUDA_GEMM_FP8; mt_cuda_gemm_of_codes(v); v++) {
            const bool other = v != MT_CUDA_GEMM_FP8;
            mt_cuda_gemm_path path = { .variant = v, .width = TALL_WIDTH, .super = 2 };
            p->args.c = adds ? c : NULL;
            if (other && !is_plain(p, &path)) continue;
            run_path(p, &path, host + (other ? bytes : 0));
            if (other && memcmp(host, host + bytes, bytes) != 0)
                fail_msg("%s, n %lld, k %lld, %s: not the bits of others", p->coding->name,
                         (long long)p->n, (long long)p->k, mt_cuda_gemm_path_name(&path));
        }
    p->args.c = NULL;
    device_free(c);
    free(values), free(host);
}

/* Leveled, to bf16, by tall tiles and by broad ones: the same bits. */
static void check_same_levels(struct product *p)
{
    const mt_dtype before = p->args.d_dtype;
    const size_t bytes = (size_t)p->count * mt_dtype_size(MT_BF16);
    char *host = malloc(2 * bytes + 1);
    assert_non_null(host);
    p->args.d_dtype = MT_BF16;
    for (int turned = 0; turned < 2; turned++) {
        mt_cuda_gemm_path tall = { .variant = MT_CUDA_GEMM_FP8_LEVEL + turned,
                                   .width = TALL_WIDTH,
                                   .super = 2 };
        mt_cuda_gemm_path broad = tall;
        broad.variant = MT_CUDA_GEMM_FP8_LEVEL_BROAD + turned;
        run_path(p, &tall, host);
        run_path(p, &broad, host + bytes);
        if (memcmp(host, host + bytes, bytes) != 0)
            fail_msg("n %lld, k %lld, %s: not the bits of tall tiles", (long long)p->n,
                     (long long)p->k, mt_cuda_gemm_path_name(&broad));
    }
    p->args.d_dtype = before;
    free(host);
}

/* Leveled by rows: members that have more rows than are leveled have the bits of other kernels; of
 * members of as many rows each, a uniform group those of a ragged one. */
static void check_rest(struct product *p, const struct rows *rows)
{
    const size_t bytes = (size_t)p->count * mt_dtype_size(MT_BF16);
    const mt_cuda_gemm_path leveled_path = { .variant = MT_CUDA_GEMM_FP8_HIGH_LEVEL,
                                             .width = HIGH_WIDTH,
                                             .super = 2 };
    const mt_cuda_gemm_path other = { .variant = MT_CUDA_GEMM_FP8, .width = 192, .super = 2 };
    char *got = malloc(2 * bytes + 1), *want = got + bytes;
    const mt_group ragged = p->b.group;
    bool alike = true;
    assert_non_null(got);
    run_path(p, &leveled_path, got);
    run_path(p, &other, want);
    for (int64_t e = 0; e < rows->members; e++) {
        const size_t line = (size_t)p->columns * mt_dtype_size(MT_BF16);
        const size_t at = (size_t)rows->start[e] * line, size = (size_t)rows->counts[e] * line;
        alike = alike && rows->counts[e] == rows->counts[0];
        if (rows->counts[e] > MT_GEMM_FP8_LEVELED && memcmp(got + at, want + at, size) != 0)
            fail_msg("%s: %lld rows are leveled", p->coding->name, (long long)rows->counts[e]);
    }
    if (alike) {
        p->b.group = mt_group_uniform(rows->members, rows->counts[0], ragged.k);
        run_path(p, &leveled_path, want);
        if (memcmp(got, want, bytes) != 0)
            fail_msg("%s: a uniform group has other bits than a ragged one", p->coding->name);
        p->b.group = ragged;
    }
    free(got);
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
    static const int widths[] = { 192, HIGH_WIDTH, TALL_WIDTH, 64 };
    c->codes = true, c->lossy = values == NORMAL, c->worst = 0;
    for (int v = MT_CUDA_GEMM_FP8; mt_cuda_gemm_of_codes(v); v++)
        for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
            path.variant = v, path.width = widths[i], path.super = i ? 1 : 8;
            if (!mt_cuda_gemm_can(&stream, &p->args, &path)) continue;
            run_and_verify(c, p, &path);
            if (p->layout == MT_GEMM_NT && widths[i] == TALL_WIDTH) check_padded(p, c->rows, v);
        }
    if (!p->coding->two_d_w || p->coding->pow2) check_same(p); /* else products of scales round */
    if (p->layout == MT_GEMM_NT && p->coding->two_d_w && p->coding->pow2)
        check_same_levels(p), check_level_adds(p);
    if (c->lossy)
        printf("%-18s %s, n %lld, k %lld: %s loses up to %.2f 2^-13 of sum |a b|\n",
               p->coding->name, layout_names[p->layout], (long long)p->n, (long long)p->k,
               mt_cuda_gemm_path_name(&path), c->worst * 0x1p13);
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

static void check_levels_of(const struct coding *c, mt_gemm_layout layout, int64_t members,
                            const int64_t *counts, int64_t n, int64_t k)
{
    const bool nt = layout == MT_GEMM_NT;
    struct rows rows;
    struct product p;
    make_rows(&rows, members, counts, 5, n, k);
    make_product(&p, &rows, layout, c, n, k, INTEGERS, false);
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
    const int widths[] = { 64, nt ? TALL_WIDTH : HIGH_WIDTH };
    for (int half = !nt; runs && half < 2; half++)
        for (int v = MT_CUDA_GEMM_FP8; mt_cuda_gemm_of_codes(v); v++)
            for (int i = 0; i < 2; i++) {
                path.variant = v, path.width = widths[i];
                p.args.d_dtype = half ? MT_BF16 : MT_F32;
                if (mt_cuda_gemm_can(&stream, &p.args, &path) &&
                    mt_cuda_gemm_leveled(&p.args, &path))
                    run_and_verify(&checked, &p, &path);
            }
    if (runs && nt) check_same_levels(&p), check_level_adds(&p);
    if (runs && !nt) check_rest(&p, &rows);
    free(a), free(b), free(sum), free(size), free(scales[0]), free(scales[1]);
    free_product(&p), free_rows(&rows);
    printf("%s %s: lines with scales far from each other: right\n", c->name, layout_names[layout]);
}

static void check_levels(const struct coding *c)
{
    static const int64_t some[] = { 300, 0, 1, 129, 520, 0 };
    static const int64_t many[] = { 263, 288, 512, 513,
                                    0 }; /* tiles of 136 and 144, and long ones */
    static const int64_t alike[] = { 263, 263 };
    for (int l = 0; l < MT_GEMM_LAYOUT_COUNT; l++)
        check_levels_of(c, (mt_gemm_layout)l, sizeof some / sizeof *some, some, 208, 288);
    check_levels_of(c, MT_GEMM_TN, sizeof many / sizeof *many, many, 208, 4240);
    check_levels_of(c, MT_GEMM_TN, sizeof alike / sizeof *alike, alike, 208, 4240);
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
    /* members of many rows, TN alone; all rows one member's; one row */
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

/* Every variant has been compared: by the first size, too. */
static void check_seen(void)
{
    for (int v = MT_CUDA_GEMM_FP8; mt_cuda_gemm_of_codes(v); v++) {
        const mt_cuda_gemm_path path = { .variant = v };
        if (!seen[v]) fail_msg("no product by %s", mt_cuda_gemm_path_name(&path));
        printf("%-54s %d products\n", mt_cuda_gemm_path_name(&path), seen[v]);
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
    const bool levels = has[NATIVE] && mt_cuda_gemm_leveled(&p.args, &path);
    const int turned = s->n < s->k;
    has[OTHER] = has[NATIVE] && c->two_d_w && c->pow2;
    if (layout == MT_GEMM_NT)
        other.variant = (levels ? MT_CUDA_GEMM_FP8_TALL : MT_CUDA_GEMM_FP8_LEVEL) + turned;
    else
        other.variant = levels ? MT_CUDA_GEMM_FP8_HIGH : MT_CUDA_GEMM_FP8_HIGH_LEVEL,
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
        printf(", %sleveled %6.1f (%.2f)", levels ? "not " : "", rates[OTHER],
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
    if (!strcmp(verb, "check")) {
        check(word);
        if (!*word || !strcmp(word, "0")) check_seen();
    } else
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            if (strstr(shapes[i].name, word)) time_shape(&shapes[i], format, pass);
    close_gpu();
    return 0;
}
