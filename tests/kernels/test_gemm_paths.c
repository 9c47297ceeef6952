/* Every path of our own that the cuda GEMM has for a product of bf16, whichever it would choose:
 * within the bounds of NUMERICS, and all that cut rows into as many parts with the same bits. */
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
    { 3, 77, 72, true, { 33, 0, 130 } },
    { 2, 132, 264, false, { 70 } },
    { 2, 77, 201, false, { 70 } },
    { 1, 257, 72, false, { 33 } },
};
static const int widths[] = { 192, 128, 64, 136 };
static const int together[] = { 8, 1 };
static const int parts[] = { 1, 2, 8 };
enum {
    MOVED = 2, /* as they lie, moved to 16 bytes first */
    WIDTHS = sizeof widths / sizeof *widths,
    TOGETHER = sizeof together / sizeof *together,
    PARTS = sizeof parts / sizeof *parts,
    VARIANTS = MT_CUDA_GEMM_BF16 - MT_CUDA_GEMM_SMALL
};

/* How often a variant was taken, of operands as they lie, and moved. */
static int taken[MT_GEMM_LAYOUT_COUNT][VARIANTS], moved[MT_GEMM_LAYOUT_COUNT][VARIANTS];
/* On Hopper those that are not there, or are moe_gemm's alone. */
static bool is_there(int layout, int variant)
{
    if (mt_cuda_gemm_is_tiled(variant) || variant == MT_CUDA_GEMM_PINGPONG ||
        variant == MT_CUDA_GEMM_DEEP)
        return true;
    return (variant == MT_CUDA_GEMM_WIDE || variant == MT_CUDA_GEMM_ALONE) ==
           (layout != MT_GEMM_NT);
}

/* A path, and the size of the result and of its elements. */
struct way {
    mt_cuda_gemm_path path;
    size_t bytes, element;
};

static bool by_path(mt_stream *stream, const struct mt_gemm_args *args, const void *way)
{
    const struct way *w = way;
    if (!mt_cuda_gemm_can(stream, args, &w->path)) return false;
    assert_ok(mt_cuda_gemm_by(stream, args, &w->path));
    return true;
}

/* To a result that begins an element later than its memory. */
static bool by_path_at_odd(mt_stream *stream, const struct mt_gemm_args *args, const void *way)
{
    const struct way *w = way;
    unsigned char *memory = test_alloc((int64_t)(w->bytes + w->element), MT_U8);
    struct mt_gemm_args odd = *args;
    odd.d = memory + w->element;
    if (args->c == args->d) odd.c = memcpy(odd.d, args->d, w->bytes);
    const bool made = by_path(stream, &odd, way);
    if (made) memcpy(args->d, odd.d, w->bytes);
    test_free(memory);
    return made;
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

/* Whether it was taken; *first: the result that all others must be like. */
static bool check_path(mt_device *device, struct problem *p, mt_gemm_layout layout,
                       const struct form *f, const mt_cuda_gemm_path *path, void **first)
{
    const size_t element = mt_dtype_size(f->wide_d ? p->real : p->dtype);
    const struct way way = { *path, (size_t)result_count(p, layout) * element, element };
    bool any_made = false;
    for (int odd = 0; odd < 2; odd++) {
        void *d = run_by(device, p, layout, f, odd ? by_path_at_odd : by_path, &way);
        if (!d) continue;
        any_made = true;
        verify(device, p, layout, f, d);
        if (*first)
            assert_same(p, layout, f, path, *first, d);
        else
            *first = d;
        if (*first != d) test_free(d);
    }
    return any_made;
}

static void check_form(mt_device *device, struct problem *p, mt_gemm_layout layout,
                       const struct form *f)
{
    const bool plain = !f->wide_x && !f->wide_w, runs = p->s.n % 8 == 0 && p->s.k % 8 == 0,
               moves = !p->s.ragged && !runs;
    void *first[PARTS] = { NULL };
    for (int v = MT_CUDA_GEMM_SMALL; v < MT_CUDA_GEMM_BF16; v++) {
        int count[MOVED] = { 0 };
        for (int i = 0; i < MOVED * PARTS * WIDTHS * TOGETHER; i++) {
            const int cut = i / MOVED / PARTS;
            const mt_cuda_gemm_path path = { .variant = v,
                                             .width = widths[cut % WIDTHS],
                                             .super = together[cut / WIDTHS],
                                             .parts = parts[i / MOVED % PARTS],
                                             .aligned = i % MOVED };
            if (mt_cuda_gemm_is_tiled(v) && cut > 0) break;
            count[i % MOVED] += check_path(device, p, layout, f, &path, &first[i / MOVED % PARTS]);
        }
        taken[layout][v - MT_CUDA_GEMM_SMALL] += count[0];
        if (mt_cuda_gemm_is_tiled(v) && (v == MT_CUDA_GEMM_SMALL || runs) && plain)
            assert_true(count[0] > 0);
        moved[layout][v - MT_CUDA_GEMM_SMALL] += count[1];
        if (mt_cuda_gemm_is_tiled(v) && moves && plain) assert_true(count[1] > 0);
    }
    for (int i = 0; i < PARTS; i++) test_free(first[i]);
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
    const int end = strcmp(device->kernel_set, "sm_90a") == 0 ? MT_CUDA_GEMM_BF16 : 0;
    for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++)
        for (int v = MT_CUDA_GEMM_SMALL; v < end; v++)
            if (is_there(layout, v) != (taken[layout][v - MT_CUDA_GEMM_SMALL] > 0) ||
                is_there(layout, v) != (moved[layout][v - MT_CUDA_GEMM_SMALL] > 0))
                fail_msg("%s, layout %d: ran %d products, %d of what was moved",
                         mt_cuda_gemm_path_name(&(mt_cuda_gemm_path){ .variant = v }), layout,
                         taken[layout][v - MT_CUDA_GEMM_SMALL],
                         moved[layout][v - MT_CUDA_GEMM_SMALL]);
}

/* An LM head's products, of more than a vocabulary of 16 bytes. */
static void odd_vocabularies(void **state)
{
    enum { TOKENS = 4096, VOCABULARY = 50257, D = 768, ANYWHERE = 256 };
    (void)state;
    mt_device *device = test_device();
    if (strcmp(device->name, "cuda") != 0 || strcmp(device->kernel_set, "sm_90a") != 0) skip();
    mt_stream stream = { device, NULL };
    void *p = (void *)ANYWHERE;
    const mt_qtensor x = mt_qtensor_plain(mt_group_uniform(1, TOKENS, D), MT_BF16, p),
                     dy = mt_qtensor_plain(mt_group_uniform(1, TOKENS, VOCABULARY), MT_BF16, p),
                     w = mt_qtensor_plain(mt_group_uniform(1, VOCABULARY, D), MT_BF16, p);
    for (int layout = 0; layout < MT_GEMM_LAYOUT_COUNT; layout++) {
        const struct mt_gemm_args args = { .dtype = MT_BF16,
                                           .layout = (mt_gemm_layout)layout,
                                           .a = layout == MT_GEMM_NT ? &x : &w,
                                           .b = layout == MT_GEMM_TN ? &x : &dy,
                                           .d = p,
                                           .d_dtype = MT_BF16 };
        mt_cuda_gemm_path path;
        assert_ok(mt_cuda_gemm_choose(&stream, &args, &path));
        assert_true(path.aligned && !mt_cuda_gemm_is_tiled(path.variant));
    }
}
#else
static void odd_vocabularies(void **state)
{
    (void)state;
    skip();
}
static void every_path(void **state)
{
    (void)state;
    skip();
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_path),
                                        cmocka_unit_test(odd_vocabularies) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
