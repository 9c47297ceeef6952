/* Every path of the cuda GEMM that can run a product of bf16, whichever the GEMM would choose,
 * within the bounds of NUMERICS, and with the same bits but where rows are cut into parts. */
#include "tests/kernels/gemm_case.h"

#ifdef MT_HAVE_cuda
#include "kernels/cuda/gemm_path.h"

static const struct shape shapes[] = {
    { 4, 200, 392, true, { 0, 385, 1, 193 } },
    { 3, 128, 128, true, { 33, 0, 7 } },
    { 2, 40, 72, true, { 600, 65 } },
    { 5, 40, 37, true, { 0, 1, 7, 33, 300 } },
    { 1, 600, 72, false, { 65 } },
    { 1, 136, 264, false, { 2048 } },
    { 3, 16, 32, false, { 12 } },
};
static const int widths[] = { 192, 128, 64, 136 };
static const int together[] = { 8, 1 };

/* The paths that were taken of those tried, by name. */
static int taken[MT_CUDA_GEMM_BF16 - MT_CUDA_GEMM_SMALL];

static bool by_path(mt_stream *stream, const struct mt_gemm_args *args, const void *path)
{
    if (!mt_cuda_gemm_can(stream, args, path)) return false;
    assert_ok(mt_cuda_gemm_by(stream, args, path));
    return true;
}

static void assert_same(const struct problem *p, mt_gemm_layout layout, const struct form *f,
                        const mt_cuda_gemm_path *path, const void *want, const void *got)
{
    const mt_dtype dtype = f->wide_d ? p->real : p->dtype;
    for (int64_t i = 0; i < result_count(p, layout); i++) {
        const double x = mt_load_f64(want, dtype, i), y = mt_load_f64(got, dtype, i);
        if ((x == y && signbit(x) == signbit(y)) || (isnan(x) && isnan(y))) continue;
        fail_msg("%s, width %d, %d together: layout %d, n %lld, k %lld, form %d: element %lld is "
                 "%.9g, by other paths %.9g",
                 mt_cuda_gemm_path_name(path), path->width, path->super, (int)layout,
                 (long long)p->s.n, (long long)p->s.k, (int)(f - forms), (long long)i, y, x);
    }
}

static void check_path(mt_device *device, struct problem *p, mt_gemm_layout layout,
                       const struct form *f, const mt_cuda_gemm_path *path, void **first)
{
    void *d = run_by(device, p, layout, f, by_path, path);
    if (!d) return;
    taken[path->variant - MT_CUDA_GEMM_SMALL]++;
    verify(device, p, layout, f, d);
    if (!*first) {
        *first = d;
        return;
    }
    assert_same(p, layout, f, path, *first, d);
    test_free(d);
}

static void check_form(mt_device *device, struct problem *p, mt_gemm_layout layout,
                       const struct form *f)
{
    void *first = NULL;
    for (int v = MT_CUDA_GEMM_SMALL; v < MT_CUDA_GEMM_BF16; v++)
        for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
            for (size_t j = 0; j < sizeof together / sizeof *together; j++) {
                mt_cuda_gemm_path path = {
                    .variant = v, .width = widths[i], .super = together[j], .parts = 1
                };
                if (mt_cuda_gemm_is_tiled(v) && i + j > 0) continue;
                check_path(device, p, layout, f, &path, &first);
            }
    test_free(first);
}

static void every_path(void **state)
{
    (void)state;
    mt_device *device = test_device();
    if (strcmp(device->name, "cuda") != 0) skip();
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        struct problem *p = make(device, &shapes[s], MT_BF16, s == 1);
        for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++)
            for (size_t f = 0; f < sizeof forms / sizeof *forms; f++)
                if (forms[f].has((mt_gemm_layout)layout))
                    check_form(device, p, (mt_gemm_layout)layout, &forms[f]);
        unmake(p);
    }
    const bool hopper = !strcmp(device->kernel_set, "sm_90a");
    for (int v = MT_CUDA_GEMM_SMALL; v < (hopper ? MT_CUDA_GEMM_BF16 : 0); v++)
        if (!taken[v - MT_CUDA_GEMM_SMALL])
            fail_msg("%s ran none of the products",
                     mt_cuda_gemm_path_name(&(mt_cuda_gemm_path){ .variant = v }));
}
#else
static void every_path(void **state)
{
    (void)state;
    skip();
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_path) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
