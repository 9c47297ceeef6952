/* The grouped GEMM of bf16 on a GPU: its results by every path, and TFLOP/s.
 *
 * Usage: bench_gemm_cuda check [I]        every path at odd sizes (the I-th of them alone, from 0
 *                                         on) against an f64 product
 *        bench_gemm_cuda [time] [SHAPE]   fprop, dgrad and wgrad (of f32 and of bf16) of the shapes
 *                                         with SHAPE in their names, by the path that the GEMM
 *                                         chooses; or of MEMBERSxKxNxROWS
 *        bench_gemm_cuda sweep [SHAPE]    by every variant, two widths and orders of tiles; prints
 *                                         the fastest of them and the chosen one, in turns
 *
 * MIXTAPE_KERNELS chooses the kernel set, one of cuBLASLt too.
 *
 * Times are medians of single launches between events, L2 flushed before each, inputs rotated,
 * random data, rows of the members drawn evenly. Needs a build with CUDA=1. */
#include "tests/bench/gemm_cuda.h"

#include <inttypes.h>

/* The operands of a call; mt_gemm_args points into it. */
struct call {
    mt_qtensor x, dy, w;
    struct mt_gemm_args args;
};

static struct mt_gemm_args *arguments(struct call *c, const struct rows *r, mt_gemm_layout layout,
                                      mt_dtype dtype, int64_t n, int64_t k, void *x, void *dy,
                                      void *w)
{
    mt_group rows_k = mt_group_ragged_rows(r->members, r->capacity, k, r->first_dims, r->offsets_k);
    mt_group rows_n = mt_group_ragged_rows(r->members, r->capacity, n, r->first_dims, r->offsets_n);
    c->x = mt_qtensor_plain(rows_k, dtype, x);
    c->dy = mt_qtensor_plain(rows_n, dtype, dy);
    c->w = mt_qtensor_plain(mt_group_uniform(r->members, n, k), dtype, w);
    c->args = (struct mt_gemm_args){
        .dtype = dtype,
        .layout = layout,
        .a = layout == MT_GEMM_NT ? &c->x : &c->w,
        .b = layout == MT_GEMM_TN ? &c->x : &c->dy,
        .d_dtype = layout == MT_GEMM_NT ? mt_dtype_wide(dtype) : dtype,
    };
    return &c->args;
}

static int64_t result_columns(mt_gemm_layout layout, int64_t n, int64_t k)
{
    return layout == MT_GEMM_TN ? n : k;
}

static int64_t result_rows(const struct rows *r, mt_gemm_layout layout, int64_t n)
{
    return layout == MT_GEMM_NT ? r->members * n : r->total;
}

static const char *const layout_names[] = { "fprop", "dgrad", "wgrad" };

/* ---- check ------------------------------------------------------------------------------------
 */

/* An operand in bf16, its values in f64, and their absolute values. */
struct operand {
    void *bf16, *f64, *size;
};

static void *as_f64(const uint16_t *values, int64_t count)
{
    void *from = upload(values, (size_t)count * sizeof *values);
    void *to = device_buffer((size_t)count * sizeof(double));
    assert_ok(mt_cast(
        &stream, &(struct mt_cast_args){
                     .dtype = MT_F64, .count = count, .y = to, .x = from, .x_dtype = MT_BF16 }));
    CUDA_OK(cudaStreamSynchronize(queue));
    device_free(from);
    return to;
}

/* `tail` more elements are NaN. */
static void make_operand(struct operand *o, int64_t count, int64_t tail, uint64_t seed)
{
    uint16_t *values = malloc((size_t)count * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < count; i++)
        values[i] = mt_f32_to_bf16((float)(2 * mt_rng_uniform(seed, 0, (uint64_t)i) - 1));
    o->bf16 = device_buffer((size_t)(count + tail) * sizeof *values);
    CUDA_OK(cudaMemcpy(o->bf16, values, (size_t)count * sizeof *values, cudaMemcpyDefault));
    o->f64 = as_f64(values, count);
    for (int64_t i = 0; i < count; i++) values[i] &= 0x7fff;
    o->size = as_f64(values, count);
    free(values);
}

static void free_operand(struct operand *o)
{
    device_free(o->bf16), device_free(o->f64), device_free(o->size);
}

struct problem {
    struct rows rows;
    int64_t n, k;
    struct operand x, dy, w;
    float *bias, *factors; /* host */
    void *bias_there, *factors_there;
    double *sum[MT_GEMM_LAYOUT_COUNT], *size[MT_GEMM_LAYOUT_COUNT]; /* host */
};

static double *product(struct problem *p, mt_gemm_layout layout, void *x, void *dy, void *w)
{
    int64_t count = result_rows(&p->rows, layout, p->n) * result_columns(layout, p->n, p->k);
    size_t bytes = (size_t)count * sizeof(double);
    struct call call;
    struct mt_gemm_args *args = arguments(&call, &p->rows, layout, MT_F64, p->n, p->k, x, dy, w);
    double *host = malloc(bytes);
    assert_non_null(host);
    args->d = device_buffer(bytes);
    assert_ok(mt_gemm(&stream, args));
    CUDA_OK(cudaStreamSynchronize(queue));
    CUDA_OK(cudaMemcpy(host, args->d, bytes, cudaMemcpyDefault));
    device_free(args->d);
    return host;
}

enum { NO_C, SAME_C, OTHER_C, C_FORMS };

static double old_value(int64_t i)
{
    return (double)(i % 257 - 128) / 64; /* bf16 holds it */
}

static void *old_values(int64_t count, mt_dtype dtype)
{
    size_t bytes = (size_t)count * mt_dtype_size(dtype);
    void *host = malloc(bytes);
    assert_non_null(host);
    for (int64_t i = 0; i < count; i++) mt_store_f64(host, dtype, i, old_value(i));
    void *p = upload(host, bytes);
    free(host);
    return p;
}

/* Bound of NUMERICS section 5: K + 1 roundings of f32, that of the factor, and that of the result.
 */
static void verify(const struct problem *p, mt_gemm_layout layout, const char *path,
                   const void *got, mt_dtype dtype, int c, bool bias, bool factor)
{
    int64_t columns = result_columns(layout, p->n, p->k), at = 0;
    for (int64_t e = 0; e < p->rows.members; e++) {
        int64_t rows = p->rows.counts[e], height = layout == MT_GEMM_NT ? p->n : rows;
        int64_t depth = layout == MT_GEMM_TN ? p->k : layout == MT_GEMM_NN ? p->n : rows;
        double times = factor ? (double)p->factors[e] : 1;
        for (int64_t end = at + height * columns; at < end; at++) {
            double old = c ? old_value(at) : 0;
            double b = bias ? (double)p->bias[e * columns + at % columns] : 0;
            double want = times * p->sum[layout][at] + old + b, value = mt_load_f64(got, dtype, at);
            double limit = (double)(depth + 1 + factor) * test_epsilon(MT_F32) *
                           (times * p->size[layout][at] + fabs(old) + fabs(b));
            if (dtype == MT_BF16) limit += test_epsilon(MT_BF16) * (fabs(want) + limit);
            if (!(fabs(value - want) <= limit))
                fail_msg("%s by %s, n %lld, k %lld, c %d, bias %d, factor %d: row %lld, column "
                         "%lld of member %lld is %.9g, must be %.9g within %.3g",
                         layout_names[layout], path, (long long)p->n, (long long)p->k, c, bias,
                         factor, (long long)((at - end) / columns + height),
                         (long long)(at % columns), (long long)e, value, want, limit);
        }
    }
}

/* The operand as one of fp8 with a scale for each member, which is kept decoded. */
static void scale_members(mt_qtensor *q, mt_dir dir, void *scales)
{
    void *decoded = q->dir[dir].codes;
    q->dir[dir] = mt_direction_of(mt_format_spec_default(MT_FORMAT_FP8_TENSOR));
    q->dir[dir].layout = MT_LAYOUT_DECODED;
    q->dir[dir].codes = decoded, q->dir[dir].scales = scales;
}

/* half: a wgrad's result in bf16; the others are. */
static void check_path(struct problem *p, mt_gemm_layout layout, const mt_cuda_gemm_path *path,
                       int c, bool bias, bool half, bool factor)
{
    int64_t columns = result_columns(layout, p->n, p->k);
    int64_t count = result_rows(&p->rows, layout, p->n) * columns;
    struct call call;
    struct mt_gemm_args *args =
        arguments(&call, &p->rows, layout, MT_BF16, p->n, p->k, p->x.bf16, p->dy.bf16, p->w.bf16);
    if (half) args->d_dtype = MT_BF16;
    if (factor)
        scale_members(layout == MT_GEMM_TN ? &call.x : &call.dy,
                      layout == MT_GEMM_NT ? MT_COL : MT_ROW, p->factors_there);
    size_t bytes = (size_t)count * mt_dtype_size(args->d_dtype);
    void *old = c ? old_values(count, args->d_dtype) : NULL, *host = malloc(bytes);
    assert_non_null(host);
    args->d = c == SAME_C ? old : device_buffer(bytes);
    args->c = old;
    args->bias = bias ? p->bias_there : NULL;
    assert_ok(mt_cuda_gemm_by(&stream, args, path));
    CUDA_OK(cudaStreamSynchronize(queue));
    CUDA_OK(cudaMemcpy(host, args->d, bytes, cudaMemcpyDefault));
    verify(p, layout, mt_cuda_gemm_path_name(path), host, args->d_dtype, c, bias, factor);
    expect_poison("before the result", (char *)args->d - GUARD, GUARD);
    expect_poison("after the result", (char *)args->d + bytes, GUARD);
    if (c == OTHER_C) device_free(args->d);
    device_free(c ? old : args->d);
    free(host);
}

static void make_problem(struct problem *p, int64_t members, const int64_t *counts, int64_t n,
                         int64_t k)
{
    enum { TAIL = 5 };
    *p = (struct problem){ .n = n, .k = k };
    make_rows(&p->rows, members, counts, TAIL, n, k);
    make_operand(&p->x, p->rows.total * k, TAIL * k, 1);
    make_operand(&p->dy, p->rows.total * n, TAIL * n, 2);
    make_operand(&p->w, members * n * k, 0, 3);
    p->bias = malloc((size_t)(members * n) * sizeof *p->bias);
    assert_non_null(p->bias);
    for (int64_t i = 0; i < members * n; i++)
        p->bias[i] = (float)(4 * mt_rng_uniform(4, 0, (uint64_t)i) - 2);
    p->bias_there = upload(p->bias, (size_t)(members * n) * sizeof *p->bias);
    p->factors = malloc((size_t)members * sizeof *p->factors);
    assert_non_null(p->factors);
    for (int64_t e = 0; e < members; e++)
        p->factors[e] = (float)(3 * mt_rng_uniform(5, 0, (uint64_t)e) + 0.1);
    p->factors_there = upload(p->factors, (size_t)members * sizeof *p->factors);
    for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++) {
        p->sum[layout] = product(p, (mt_gemm_layout)layout, p->x.f64, p->dy.f64, p->w.f64);
        p->size[layout] = product(p, (mt_gemm_layout)layout, p->x.size, p->dy.size, p->w.size);
    }
}

static void free_problem(struct problem *p)
{
    free_rows(&p->rows);
    free_operand(&p->x), free_operand(&p->dy), free_operand(&p->w);
    device_free(p->bias_there), device_free(p->factors_there);
    free(p->bias), free(p->factors);
    for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++)
        free(p->sum[layout]), free(p->size[layout]);
}

static const int widths[] = { 192, 128, 64, 136, 176, 160 };
static const int together[] = { 8, 1, 16 };
enum {
    WIDTHS = sizeof widths / sizeof *widths,
    TOGETHER = sizeof together / sizeof *together,
    TILED = 2 /* ways */
};

/* The i-th path; false past the last. */
static bool path_at(mt_cuda_gemm_path *path, int i)
{
    int per = WIDTHS * TOGETHER;
    if (i < TILED) {
        *path = (mt_cuda_gemm_path){ .variant = i ? MT_CUDA_GEMM_TILED : MT_CUDA_GEMM_SMALL };
        return true;
    }
    int variant = (i - TILED) / per;
    if (variant >= MT_CUDA_GEMM_BF16) return false;
    *path = (mt_cuda_gemm_path){ .variant = variant,
                                 .width = widths[(i - TILED) % per / TOGETHER],
                                 .super = together[(i - TILED) % TOGETHER] };
    return true;
}

/* The kernels that there are (gemm_path.h); add: to C or a bias. */
static bool runs(const mt_cuda_gemm_path *path, mt_gemm_layout layout, int64_t n, int64_t k,
                 bool add)
{
    static const bool adding[2][MT_CUDA_GEMM_BF16] = { { [MT_CUDA_GEMM_ALONE] = true },
                                                       { [MT_CUDA_GEMM_PINGPONG] = true,
                                                         [MT_CUDA_GEMM_TURNED] = true,
                                                         [MT_CUDA_GEMM_ADDING] = true } };
    const int variant = path->variant;
    const bool nt = layout == MT_GEMM_NT;
    if (mt_cuda_gemm_is_tiled(variant))
        return variant == MT_CUDA_GEMM_SMALL || (n % 8 == 0 && k % 8 == 0);
    if (add && !adding[nt][variant]) return false;
    if (!add && variant == MT_CUDA_GEMM_ADDING) return false;
    if (nt ? variant < MT_CUDA_GEMM_PINGPONG : variant >= MT_CUDA_GEMM_TURNED) return false;
    return !strcmp(device->kernel_set, "sm_90a") && n % 8 == 0 && k % 8 == 0 &&
           (!nt || path->width % 64 == 0);
}

/* The same where the kernel set is one of cuBLASLt, which then chooses it. */
static int64_t check_cublaslt(struct problem *p, mt_gemm_layout layout)
{
    struct call call;
    mt_cuda_gemm_path path;
    struct mt_gemm_args *args =
        arguments(&call, &p->rows, layout, MT_BF16, p->n, p->k, p->x.bf16, p->dy.bf16, p->w.bf16);
    int64_t done = 0;
    args->d = p->w.bf16; /* nothing runs yet */
    for (int half = 0; half <= (layout == MT_GEMM_NT); half++) {
        if (half) args->d_dtype = MT_BF16;
        assert_ok(mt_cuda_gemm_choose(&stream, args, &path));
        if (path.why) printf("%s: not cuBLASLt: %s\n", layout_names[layout], path.why);
        if (path.variant < MT_CUDA_GEMM_CUBLASLT) continue;
        for (int c = 0; c < C_FORMS; c++)
            check_path(p, layout, &path, c, false, half, false), done++;
    }
    return done;
}

static void check(const char *alone)
{
    static const int64_t counts[] = { 0,   1,   7,   63,  64,  65, 127, 128,  129, 191,
                                      192, 193, 255, 256, 257, 0,  385, 1000, 5,   0 };
    static const int64_t checked[][2] = { { 512, 320 },  { 328, 1096 }, { 768, 256 },
                                          { 1024, 136 }, { 8, 8 },      { 37, 41 } };
    for (size_t s = 0; s < sizeof checked / sizeof *checked; s++) {
        if (*alone && strtoul(alone, NULL, 10) != s) continue;
        struct problem p;
        int64_t n = checked[s][0], k = checked[s][1], done = 0;
        make_problem(&p, sizeof counts / sizeof *counts, counts, n, k);
        for (int l = 0; l < MT_GEMM_LAYOUT_COUNT; l++) {
            mt_gemm_layout layout = (mt_gemm_layout)l;
            mt_cuda_gemm_path path;
            for (int i = 0; path_at(&path, i); i++)
                for (int way = 0; way < C_FORMS * 2 * 2; way++) {
                    const int c = way % C_FORMS;
                    const bool factor = way / C_FORMS % 2, other = way / C_FORMS / 2;
                    const bool bias = other && layout == MT_GEMM_TN;
                    const bool half = other && layout == MT_GEMM_NT;
                    if (other && !bias && !half) continue;
                    if (!runs(&path, layout, n, k, c || bias)) continue;
                    check_path(&p, layout, &path, c, bias, half, factor), done++;
                }
            done += check_cublaslt(&p, layout);
        }
        free_problem(&p);
        printf("n %lld, k %lld: %lld products right\n", (long long)n, (long long)k,
               (long long)done);
        fflush(stdout);
    }
}

/* ---- time -------------------------------------------------------------------------------------
 */

enum { ROTATED = 2, FINALISTS = 5, TURNS = 5 };
/* Random values everywhere: a block of them, again and again. */
static void *random_buffer(int64_t count, double scale, uint64_t seed)
{
    enum { BLOCK = (1 << 22) - 4099 };
    uint16_t *values = malloc(BLOCK * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < BLOCK; i++)
        values[i] = mt_f32_to_bf16((float)(scale * mt_rng_normal(seed, 0, (uint64_t)i)));
    uint16_t *p = device_buffer((size_t)count * sizeof *p);
    for (int64_t at = 0; at < count; at += BLOCK) {
        int64_t length = count - at < BLOCK ? count - at : BLOCK;
        CUDA_OK(cudaMemcpy(p + at, at ? p : values, (size_t)length * sizeof *p, cudaMemcpyDefault));
    }
    free(values);
    return p;
}

struct timed {
    const struct timed_shape *shape;
    struct rows rows;
    void *x[ROTATED], *dy[ROTATED], *w, *out, *flush;
};

/* Median TFLOP/s. half: as in check_path. */
static double rate(struct timed *t, mt_gemm_layout layout, bool add, bool half,
                   const mt_cuda_gemm_path *path)
{
    const struct timed_shape *s = t->shape;
    double times[LAUNCHES];
    cudaEvent_t begin[LAUNCHES], end[LAUNCHES];
    for (int i = 0; i < LAUNCHES; i++) {
        struct call call;
        int turn = i % ROTATED;
        struct mt_gemm_args *args =
            arguments(&call, &t->rows, layout, MT_BF16, s->n, s->k, t->x[turn], t->dy[turn], t->w);
        args->d = t->out;
        if (half) args->d_dtype = MT_BF16;
        if (add) args->c = t->out;
        CUDA_OK(cudaEventCreate(&begin[i]));
        CUDA_OK(cudaEventCreate(&end[i]));
        CUDA_OK(cudaMemsetAsync(t->flush, i, FLUSH, queue));
        CUDA_OK(cudaEventRecord(begin[i], queue));
        assert_ok(mt_cuda_gemm_by(&stream, args, path));
        CUDA_OK(cudaEventRecord(end[i], queue));
    }
    CUDA_OK(cudaStreamSynchronize(queue));
    for (int i = 0; i < LAUNCHES; i++) {
        float ms;
        CUDA_OK(cudaEventElapsedTime(&ms, begin[i], end[i]));
        times[i] = (double)ms;
        CUDA_OK(cudaEventDestroy(begin[i]));
        CUDA_OK(cudaEventDestroy(end[i]));
    }
    qsort(times, LAUNCHES, sizeof *times, by_value);
    return 2e-9 * (double)(s->rows * s->n * s->k) / times[LAUNCHES / 2];
}

static void print_rate(const struct timed *t, const char *what, double tflops,
                       const mt_cuda_gemm_path *path, const char *note)
{
    printf("%-18s %-13s %6.1f TFLOP/s  %s, width %d, %d together%s\n", t->shape->name, what, tflops,
           mt_cuda_gemm_path_name(path), path->width, path->super, note);
    fflush(stdout);
}

/* Of the paths that are checked, those worth their time. */
static bool is_swept(const mt_cuda_gemm_path *path)
{
    return mt_cuda_gemm_is_tiled(path->variant) ||
           ((path->width == 192 || path->width == 128) && path->super <= 8);
}

struct contestant {
    mt_cuda_gemm_path path;
    double rates[TURNS];
};

static int faster(const void *a, const void *b)
{
    const struct contestant *x = a, *y = b;
    return (x->rates[TURNS / 2] < y->rates[TURNS / 2]) -
           (x->rates[TURNS / 2] > y->rates[TURNS / 2]);
}

static bool same_path(const mt_cuda_gemm_path *a, const mt_cuda_gemm_path *b)
{
    return a->variant == b->variant && a->width == b->width && a->super == b->super &&
           (a->parts > 1) == (b->parts > 1);
}

/* The fastest of one launch each, then beside the chosen one in turns: medians. A card's clock
 * falls as it warms, so that rates of one turn compare only what follows each other. */
static void sweep_layout(struct timed *t, mt_gemm_layout layout, bool add, bool half,
                         const char *what, const mt_cuda_gemm_path *chosen)
{
    struct contestant all[MT_CUDA_GEMM_BF16 * WIDTHS * TOGETHER + TILED], *ours = all;
    mt_cuda_gemm_path path;
    int count = 1;
    ours->path = *chosen, ours->rates[TURNS / 2] = HUGE_VAL; /* always among them */
    for (int i = 0; path_at(&path, i); i++) {
        if (!is_swept(&path) || same_path(&path, chosen)) continue;
        if (!runs(&path, layout, t->shape->n, t->shape->k, add)) continue;
        all[count].path = path;
        all[count++].rates[TURNS / 2] = rate(t, layout, add, half, &path);
    }
    qsort(all, (size_t)count, sizeof *all, faster);
    if (count > FINALISTS) count = FINALISTS;
    for (int turn = 0; turn < TURNS; turn++)
        for (int i = 0; i < count; i++)
            all[i].rates[turn] = rate(t, layout, add, half, &all[i].path);
    for (int i = 0; i < count; i++) qsort(all[i].rates, TURNS, sizeof(double), by_value);
    const double us = ours->rates[TURNS / 2];
    print_rate(t, what, us, chosen, ", chosen");
    qsort(all + 1, (size_t)count - 1, sizeof *all, faster);
    for (int i = 1; i < count; i++) {
        char note[32];
        const double x = all[i].rates[TURNS / 2];
        snprintf(note, sizeof note, " (%.3f)", x / us);
        print_rate(t, what, x, &all[i].path, note);
    }
}

static void time_layout(struct timed *t, mt_gemm_layout layout, bool add, bool half, bool sweep)
{
    static const char *const halves[] = { "wgrad bf16", "wgrad bf16 +=" };
    const struct timed_shape *s = t->shape;
    const char *what = half ? halves[add] : add ? "wgrad +=" : layout_names[layout];
    size_t bytes =
        (size_t)(result_rows(&t->rows, layout, s->n) * result_columns(layout, s->n, s->k)) *
        (layout == MT_GEMM_NT && !half ? sizeof(float) : sizeof(uint16_t));
    mt_cuda_gemm_path chosen;
    struct call call;
    struct mt_gemm_args *args =
        arguments(&call, &t->rows, layout, MT_BF16, s->n, s->k, t->x[0], t->dy[0], t->w);
    args->d = t->out = device_buffer(bytes);
    if (half) args->d_dtype = MT_BF16;
    if (add) args->c = t->out;
    if (add) CUDA_OK(cudaMemset(t->out, 0, bytes));
    assert_ok(mt_cuda_gemm_choose(&stream, args, &chosen));
    (void)rate(t, layout, add, half, &chosen);
    if (sweep)
        sweep_layout(t, layout, add, half, what, &chosen);
    else
        print_rate(t, what, rate(t, layout, add, half, &chosen), &chosen, "");
    device_free(t->out);
}

static void time_shape(const struct timed_shape *s, bool sweep)
{
    struct timed t = { .shape = s };
    draw_rows(&t.rows, s);
    for (int i = 0; i < ROTATED; i++) {
        t.x[i] = random_buffer(s->rows * s->k, 0.2, 10 + (uint64_t)i);
        t.dy[i] = random_buffer(s->rows * s->n, 0.2, 20 + (uint64_t)i);
    }
    t.w = random_buffer(s->members * s->n * s->k, 0.02, 30);
    t.flush = device_buffer(FLUSH);
    for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++)
        time_layout(&t, (mt_gemm_layout)layout, false, false, sweep);
    time_layout(&t, MT_GEMM_NT, true, false, sweep);
    for (int add = 0; add < 2; add++) time_layout(&t, MT_GEMM_NT, add, true, sweep);
    for (int i = 0; i < ROTATED; i++) device_free(t.x[i]), device_free(t.dy[i]);
    device_free(t.w), device_free(t.flush);
    free_rows(&t.rows);
}

int main(int argc, char **argv)
{
    const char *verb = argc > 1 ? argv[1] : "time", *word = argc > 2 ? argv[2] : "";
    struct timed_shape own = { .name = word };
    open_gpu();
    if (!strcmp(verb, "check"))
        check(word);
    else if (sscanf(word, "%" SCNd64 "x%" SCNd64 "x%" SCNd64 "x%" SCNd64, &own.members, &own.k,
                    &own.n, &own.rows) == 4)
        time_shape(&own, !strcmp(verb, "sweep"));
    else
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            if (strstr(shapes[i].name, word)) time_shape(&shapes[i], !strcmp(verb, "sweep"));
    close_gpu();
    return 0;
}
