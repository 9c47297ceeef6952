/* GFLOP/s of the grouped GEMM against the machine's fused multiply-add peak and OpenBLAS per
 * member.
 *
 * Usage: bench_gemm [f64|f32|bf16] [threads]    MIXTAPE_KERNELS chooses the kernel set.
 * Each figure is the best of several short turns, taken alternately. Weights are packed, as in
 * training; "compact" packs them within the call. */
#include "tests/support/test.h"

#include <cblas.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/rng.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MOST_MEMBERS = 16, TURNS = 7, REST = 20000 /* us: lets the last pool's threads sleep */ };

/* ---- the machine's peak: independent chains of multiply-adds ---- */

#if defined(__x86_64__)
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

__attribute__((target("avx2,fma"))) static float chains_avx2(int64_t loops)
{
    __m256 sums[12], x = _mm256_set1_ps(0.5f);
    UNROLL
    for (int i = 0; i < 12; i++) sums[i] = _mm256_set1_ps((float)i);
    for (int64_t l = 0; l < loops; l++) {
        UNROLL
        for (int i = 0; i < 12; i++) sums[i] = _mm256_fmadd_ps(sums[i], x, x);
        __asm__ volatile("" : "+x"(x));
    }
    UNROLL
    for (int i = 1; i < 12; i++) sums[0] = _mm256_add_ps(sums[0], sums[i]);
    return _mm256_cvtss_f32(sums[0]);
}

__attribute__((target("avx512f"))) static float chains_avx512(int64_t loops)
{
    __m512 sums[24], x = _mm512_set1_ps(0.5f);
    UNROLL
    for (int i = 0; i < 24; i++) sums[i] = _mm512_set1_ps((float)i);
    for (int64_t l = 0; l < loops; l++) {
        UNROLL
        for (int i = 0; i < 24; i++) sums[i] = _mm512_fmadd_ps(sums[i], x, x);
        __asm__ volatile("" : "+v"(x));
    }
    UNROLL
    for (int i = 1; i < 24; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    return _mm512_cvtss_f32(sums[0]);
}

/* GFLOP/s of f32 on `threads` threads; 0 where it is not known. */
static double peak(int threads)
{
    const int64_t loops = 200000;
    bool wide = __builtin_cpu_supports("avx512f");
    if (!wide && !__builtin_cpu_supports("fma")) return 0;
    double best = 0;
    volatile float sink = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        double t = mt_now();
#pragma omp parallel num_threads(threads)
        {
            float x = wide ? chains_avx512(loops) : chains_avx2(loops);
#pragma omp critical
            sink = sink + x;
        }
        double rate =
            (wide ? 24 * 16 : 12 * 8) * 2.0 * (double)loops * threads / (mt_now() - t) * 1e-9;
        if (rate > best) best = rate;
    }
    return best;
}
#else
static double peak(int threads)
{
    (void)threads;
    return 0;
}
#endif

/* ---- one case ---- */

struct job {
    mt_device *device;
    mt_dtype dtype, real;
    int64_t members, rows, n, k;
    int64_t first_dims[MOST_MEMBERS], offsets[2][MOST_MEMBERS + 1]; /* in n, in k */
    void *x, *dy, *w, *master, *packed[2], *out;
    float *fx, *fdy, *fout;
    mt_gemm_layout layout;
    bool compact;
};

/* Members of random sizes that add up to `rows`. */
static void make(struct job *j, mt_device *device, mt_dtype dtype, int64_t members, int64_t rows,
                 int64_t n, int64_t k)
{
    *j = (struct job){ .device = device, .dtype = dtype, .real = mt_dtype_wide(dtype) };
    j->members = members, j->rows = rows, j->n = n, j->k = k;
    for (int64_t r = 0; r < rows; r++)
        j->first_dims[(int64_t)(mt_rng_uniform(5, 5, (uint64_t)r) * (double)members)]++;
    for (int64_t e = 0; e < members; e++) {
        j->offsets[0][e + 1] = j->offsets[0][e] + j->first_dims[e] * n;
        j->offsets[1][e + 1] = j->offsets[1][e] + j->first_dims[e] * k;
    }
    int64_t most = rows * (n > k ? n : k);
    if (members * n * k > most) most = members * n * k;
    j->x = test_alloc(rows * k, dtype), j->dy = test_alloc(rows * n, dtype);
    j->w = test_alloc(members * n * k, dtype), j->master = test_alloc(members * n * k, j->real);
    j->out = test_alloc(most, j->real), j->fout = test_alloc(most, MT_F32);
    j->fx = test_alloc(rows * k, MT_F32), j->fdy = test_alloc(rows * n, MT_F32);
    test_random(j->x, rows * k, dtype, 1, 1), test_random(j->fx, rows * k, MT_F32, 1, 1);
    test_random(j->dy, rows * n, dtype, 1, 2), test_random(j->fdy, rows * n, MT_F32, 1, 2);
    test_random(j->w, members * n * k, dtype, 1, 3),
        test_random(j->master, members * n * k, j->real, 1, 3);
    for (int d = 0; d < 2; d++)
        j->packed[d] = test_alloc(
            (int64_t)device->kernels[dtype]->packed_bytes(dtype, (mt_dir)d, members, n, k), MT_U8);
}

static void unmake(struct job *j)
{
    void *all[] = { j->x,         j->dy,  j->w,    j->master, j->packed[0],
                    j->packed[1], j->out, j->fout, j->fx,     j->fdy };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) test_free(all[i]);
}

static mt_qtensor weight(const struct job *j)
{
    mt_qtensor w = mt_qtensor_plain(mt_group_uniform(j->members, j->n, j->k), j->dtype, j->w);
    for (int d = 0; d < 2 && !j->compact; d++)
        w.dir[d].codes = j->packed[d], w.dir[d].layout = MT_LAYOUT_PACKED;
    return w;
}

static void run_pack(const struct job *j)
{
    mt_stream stream = { j->device, NULL };
    mt_qtensor w = weight(j);
    assert_ok(mt_pack_weight(&stream, &(struct mt_pack_weight_args){
                                          .dtype = j->dtype, .master = j->master, .out = &w }));
}

static void run_ours(const struct job *j)
{
    mt_stream stream = { j->device, NULL };
    mt_qtensor w = weight(j);
    mt_qtensor x = mt_qtensor_plain(
        mt_group_ragged_rows(j->members, j->rows, j->k, j->first_dims, j->offsets[1]), j->dtype,
        j->x);
    mt_qtensor dy = mt_qtensor_plain(
        mt_group_ragged_rows(j->members, j->rows, j->n, j->first_dims, j->offsets[0]), j->dtype,
        j->dy);
    bool wgrad = j->layout == MT_GEMM_NT;
    assert_ok(mt_gemm(&stream, &(struct mt_gemm_args){ .dtype = j->dtype,
                                                       .layout = j->layout,
                                                       .a = wgrad ? &x : &w,
                                                       .b = j->layout == MT_GEMM_TN ? &x : &dy,
                                                       .d = j->out,
                                                       .d_dtype = wgrad ? j->real : j->dtype }));
}

static void run_blas(const struct job *j)
{
    int n = (int)j->n, k = (int)j->k;
    const float *w = (const float *)j->master;
    for (int64_t e = 0; e < j->members; e++, w += n * k) {
        const float *x = j->fx + j->offsets[1][e], *dy = j->fdy + j->offsets[0][e];
        float *d = j->fout;
        int rows = (int)j->first_dims[e];
        if (j->layout == MT_GEMM_TN)
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, n, k, 1, x, k, w, k, 0,
                        d + j->offsets[0][e], n);
        else if (j->layout == MT_GEMM_NN)
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, k, n, 1, dy, n, w, k, 0,
                        d + j->offsets[1][e], k);
        else
            cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n, k, rows, 1, dy, n, x, k, 0,
                        d + e * n * k, k);
    }
}

/* The best of some repeats that take about 10 ms together. */
static double best_time(void (*run)(const struct job *), const struct job *j)
{
    double best = 1e9, spent = 0;
    usleep(REST);
    run(j);
    do {
        double t = mt_now();
        run(j);
        t = mt_now() - t;
        spent += t;
        if (t < best) best = t;
    } while (spent < 0.01);
    return best;
}

static double least(double a, double b)
{
    return a < b ? a : b;
}

static void bench_case(mt_device *device, mt_dtype dtype, double top, int64_t members, int64_t rows,
                       int64_t n, int64_t k)
{
    static const char *const names[] = { "TN fprop", "NN dgrad", "NT wgrad" };
    struct job j;
    make(&j, device, dtype, members, rows, n, k);
    double flop = 2e-9 * (double)(rows * n * k), pack = 1e9;
    run_pack(&j);
    for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++) {
        double ours = 1e9, compact = 1e9, blas = 1e9;
        j.layout = (mt_gemm_layout)layout;
        for (int turn = 0; turn < TURNS; turn++) {
            openblas_set_num_threads(1);
            j.compact = false;
            ours = least(ours, best_time(run_ours, &j));
            if (layout == 0) pack = least(pack, best_time(run_pack, &j));
            j.compact = true;
            if (layout < 2) compact = least(compact, best_time(run_ours, &j));
            openblas_set_num_threads(device->threads);
            if (dtype != MT_F64) blas = least(blas, best_time(run_blas, &j));
        }
        printf("%2lld x %-5lld %5lld %5lld  %s  %7.1f %5.1f%%", (long long)members,
               (long long)(rows / members), (long long)n, (long long)k, names[layout], flop / ours,
               100 * flop / ours / top);
        if (layout < 2)
            printf("  %7.1f", flop / compact);
        else
            printf("  %7s", "");
        if (dtype != MT_F64) printf("  %7.1f", flop / blas);
        if (layout == 0) printf("   pack %.3f of %.3f ms", pack * 1e3, ours * 1e3);
        printf("\n");
        fflush(stdout);
    }
    unmake(&j);
}

int main(int argc, char **argv)
{
    static const int64_t cases[][4] = {
        { 1, 2048, 256, 128 },   { 1, 4096, 256, 128 },   { 1, 4096, 128, 128 },
        { 1, 4096, 1024, 512 },  { 1, 4096, 512, 512 },   { 8, 4096, 256, 128 },
        { 16, 4096, 256, 128 },  { 8, 4096, 128, 128 },   { 16, 4096, 128, 128 },
        { 8, 4096, 1024, 512 },  { 16, 4096, 1024, 512 }, { 16, 4096, 512, 512 },
        { 1, 2048, 2048, 2048 },
    };
    mt_dtype dtype = MT_F32;
    mt_device *device;
    assert_ok(mt_dtype_parse(&dtype, argc > 1 ? argv[1] : "f32"));
    assert_ok(mt_device_open(&device, "cpu", NULL, argc > 2 ? atoi(argv[2]) : 0));
    double top = peak(device->threads);
    if (dtype == MT_F64) top /= 2;
    printf("%s, %s, %d threads; multiply-add peak of %s %.1f GFLOP/s\n", device->kernel_set,
           mt_dtype_name(dtype), device->threads, dtype == MT_F64 ? "f64" : "f32", top);
    printf("members x rows  n     k              packed  of peak  compact  OpenBLAS f32\n");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        bench_case(device, dtype, top, cases[i][0], cases[i][1], cases[i][2], cases[i][3]);
    mt_device_destroy(&device);
    return 0;
}
