/* Products of fp8 codes read as they are, on Hopper: which there are, and where they lie. */
#include "kernels/cuda/gemm_places.cuh"
#include "kernels/cuda/gemm_sm90_plan.cuh"
#include "kernels/cuda/scratch.h"

enum { THREADS = 256, ALIGN = 256, PER_MULTIPROCESSOR = 8 };

/* ---- which there are ---------------------------------------------------------------------------
 */

/* The kind of mt_cuda_gemm_sm90_codes that multiplies a weight (NT: X) and rows of these formats;
 * -1 if none does. */
static int kind_of(mt_gemm_layout layout, const mt_format_spec *w, const mt_format_spec *rows)
{
    const mt_format *a = w->format, *b = rows->format;
    bool wide = rows->options.element != MT_ELEMENT_E4M3, wgrad = layout == MT_GEMM_NT;
    int first = wgrad ? MT_CUDA_FP8_WGRAD : 0;
    if (a->scale != MT_SCALE_F32 || b->scale != MT_SCALE_F32 ||
        w->options.element != MT_ELEMENT_E4M3)
        return -1;
    if (a->block && b->block && w->options.two_d == !wgrad && !rows->options.two_d) {
        bool pow2 = w->options.pow2 && rows->options.pow2;
        return wide ? -1 : first + (pow2 ? MT_CUDA_FP8_BLOCKS : MT_CUDA_FP8_BLOCKS_ANY);
    }
    if (a->block || b->block) return -1;
    return first + (wide ? MT_CUDA_FP8_E5M2 : MT_CUDA_FP8_E4M3);
}

mt_gemm_reading mt_cuda_gemm_reads_codes(mt_gemm_layout layout, const mt_format_spec *a,
                                         const mt_format_spec *b)
{
    const int kind = kind_of(layout, a, b);
    if (kind < 0) return MT_GEMM_DECODES;
    for (const gemm_sm90_codes &variant : mt_cuda_gemm_sm90_codes)
        if (layout != MT_GEMM_NT && variant.of[kind].leveled) return MT_GEMM_LEVELS;
    return MT_GEMM_READS;
}

/* The codes of W's column direction are W^T, along the depth of dgrad: both passes are TN. Those of
 * wgrad's operands lie along the rows of a member: padded, or they are placed so. */
static bool is_placed(mt_gemm_layout layout, const mt_direction *d)
{
    return layout == MT_GEMM_NT && d->layout == MT_LAYOUT_COMPACT;
}

extern "C" bool mt_cuda_gemm_codes(gemm_problem *g, const struct mt_gemm_args *args)
{
    const mt_direction *w = mt_gemm_a(args), *rows = mt_gemm_b(args);
    const mt_group *weight = &args->a->group;
    bool along = args->layout == MT_GEMM_TN, wgrad = args->layout == MT_GEMM_NT;
    if (args->dtype != MT_BF16 || (!wgrad && args->d_dtype != MT_BF16)) return false;
    for (const mt_direction *d : { w, rows })
        if (d->layout != MT_LAYOUT_COMPACT && !(wgrad && d->layout == MT_LAYOUT_PADDED))
            return false;
    mt_format_spec first = mt_direction_spec(w), second = mt_direction_spec(rows);
    int kind = kind_of(args->layout, &first, &second);
    if (kind < 0) return false;
    *g = {};
    g->layout = wgrad ? MT_GEMM_NT : MT_GEMM_TN;
    g->rows = args->b->group;
    g->height = wgrad ? g->rows.k : 0;
    if (wgrad && !g->height) return false;
    g->cols = along ? weight->m : weight->k;
    g->depth = along ? weight->k : weight->m;
    int64_t line = wgrad ? mt_padded_rows(&g->rows) : g->depth;
    g->a = { is_placed(args->layout, rows) ? NULL : rows->codes, false, false, true, line };
    g->b = { is_placed(args->layout, w) ? NULL : w->codes, false, false, wgrad, line };
    g->c = args->c, g->d = args->d, g->d_width = g->cols, g->bias = args->bias;
    g->d_real = args->d_dtype != MT_BF16;
    g->fp8 = kind + 1;
    if (kind % MT_CUDA_FP8_WGRAD >= MT_CUDA_FP8_BLOCKS)
        g->scales_a = (const float *)rows->scales, g->scales_b = (const float *)w->scales;
    return true;
}

/* ---- where they lie ----------------------------------------------------------------------------
 * A member's compact column codes are lines of as many bytes as it has rows. Maps want lines at
 * multiples of 16 bytes: MT_LAYOUT_PADDED, whose steps of 128 rows lie beside each other. */

/* 16 bytes that begin at any address, of which `count` are there; reads the words that those touch.
 */
static __host__ __device__ __forceinline__ void read_codes(uint32_t (&to)[4], const uint8_t *from,
                                                           int count)
{
    unsigned skip = (unsigned)((uintptr_t)from & 3), bytes = (unsigned)count + skip;
    const uint32_t *words = (const uint32_t *)(from - skip);
    uint32_t w[5];
    for (unsigned i = 0; i < 5; i++) w[i] = i * 4 < bytes && count > 0 ? words[i] : 0;
    for (int i = 0; i < 4; i++) {
        uint64_t both = (uint64_t)w[i + 1] << 32 | w[i];
        int left = count - i * 4;
        uint32_t mask = left >= 4 ? ~0u : left > 0 ? (1u << left * 8) - 1 : 0;
        to[i] = (uint32_t)(both >> skip * 8) & mask;
    }
}

/* A block takes lines in turn, a warp members. */
static __global__ void __launch_bounds__(THREADS)
    place_kernel(uint8_t *to, const uint8_t *codes, const __grid_constant__ mt_group rows,
                 int64_t lines)
{
    extern __shared__ int first[];
    const int members = (int)rows.members, lane = threadIdx.x % 32;
    int *place = first + members + 1;
    gemm_find_places(first, place, &rows);
    for (int64_t i = blockIdx.x; i < lines; i += gridDim.x)
        for (int e = threadIdx.x / 32; e < members; e += THREADS / 32) {
            int count = first[e + 1] - first[e], length = place[e + 1] - place[e];
            const uint8_t *from = codes + first[e] * lines + i * count;
            uint8_t *at = to + gemm_padded_place(place[e], i, lines);
            for (int j = lane * 16; j < length; j += 32 * 16) {
                uint32_t w[4];
                read_codes(w, from + j, count - j < 16 ? count - j : 16);
                *(uint4 *)(at + gemm_padded_place(j, 0, lines)) =
                    make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
}

static mt_status place(mt_stream *stream, const gemm_problem *g, gemm_operand *x, const void *codes,
                       int64_t lines, void *memory)
{
    int64_t most = (int64_t)mt_cuda_multiprocessors(stream) * PER_MULTIPROCESSOR;
    place_kernel<<<(unsigned)(lines < most ? lines : most), THREADS,
                   gemm_places_bytes(g->rows.members), mt_cuda_stream(stream)>>>(
        (uint8_t *)memory, (const uint8_t *)codes, g->rows, lines);
    MT_LAUNCHED(stream, "gemm (codes)");
    x->data = memory;
    return MT_OK;
}

static size_t padded(int64_t bytes)
{
    return (size_t)(mt_ceil_div(bytes, ALIGN) * ALIGN);
}

/* Where operands go that are not read where they lie, then the factors and levels. */
struct codes_plan {
    bool places_dy, places_x; /* compact codes */
    bool levels_dy, levels_x, levels_rows;
    size_t dy, x, levels;
};

static int64_t row_room(const gemm_problem *g)
{
    return mt_group_capacity(&g->rows) / g->rows.k;
}

static codes_plan plan_codes(const gemm_problem *g, const mt_cuda_gemm_path *path)
{
    const bool wgrad = g->layout == MT_GEMM_NT;
    const gemm_sm90_variant *variant = mt_cuda_gemm_sm90_variant(g, path->variant);
    codes_plan p = {};
    p.places_dy = wgrad && !g->a.data, p.places_x = wgrad && !g->b.data;
    p.levels_dy = wgrad && variant->leveled && variant->turned;
    p.levels_x = wgrad && variant->leveled && !variant->turned;
    p.levels_rows = !wgrad && variant->leveled;
    if (p.places_dy || p.levels_dy) p.dy = padded(g->height * g->a.width);
    if (p.places_x || p.levels_x) p.x = padded(g->cols * g->b.width);
    const int64_t lines = p.levels_dy ? g->height : p.levels_x ? g->cols : 0;
    p.levels = padded(g->rows.members * mt_cuda_gemm_levels(lines));
    if (p.levels_rows) p.dy = padded(mt_group_capacity(&g->rows)), p.levels = padded(row_room(g));
    return p;
}

extern "C" size_t mt_cuda_gemm_codes_bytes(const gemm_problem *g, const mt_cuda_gemm_path *path)
{
    const codes_plan p = plan_codes(g, path);
    return p.dy + p.x + p.levels;
}

static mt_status level(mt_stream *stream, const gemm_problem *g, gemm_operand *x,
                       const float *scales, int64_t lines, void *to, uint8_t *levels)
{
    MT_TRY(mt_cuda_gemm_level(stream, to, levels, x, scales, &g->rows, lines));
    x->data = to;
    return MT_OK;
}

extern "C" mt_status mt_cuda_gemm_place_codes(mt_stream *stream, gemm_problem *g,
                                              const struct mt_gemm_args *args,
                                              const mt_cuda_gemm_path *path)
{
    const codes_plan p = plan_codes(g, path);
    char *dy;
    MT_TRY(mt_cuda_operands(stream, (void **)&dy, mt_cuda_gemm_codes_bytes(g, path)));
    char *x = dy + p.dy;
    uint8_t *levels = (uint8_t *)x + p.x;
    g->levels = levels, g->factor = mt_cuda_gemm_factor(args);
    if (p.places_dy) MT_TRY(place(stream, g, &g->a, mt_gemm_b(args)->codes, g->height, dy));
    if (p.places_x) MT_TRY(place(stream, g, &g->b, mt_gemm_a(args)->codes, g->cols, x));
    if (p.levels_dy) MT_TRY(level(stream, g, &g->a, g->scales_a, g->height, dy, levels));
    if (p.levels_x) MT_TRY(level(stream, g, &g->b, g->scales_b, g->cols, x, levels));
    if (!p.levels_rows) return MT_OK;
    g->leveled = dy;
    return mt_cuda_gemm_level_rows(stream, dy, levels, &g->a, g->scales_a, &g->rows, row_room(g));
}
