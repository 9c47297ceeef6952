/* Products of fp8 codes read as they are, on Hopper: which there are, and how they are cut. */
#include "kernels/cuda/gemm_sm90.cuh"

/* The row of mt_cuda_gemm_sm90_fp8 that multiplies a weight and rows of these formats; -1 if none
 * does. */
static int row_of(const mt_format_spec *w, const mt_format_spec *rows)
{
    const mt_format *a = w->format, *b = rows->format;
    bool wide = rows->options.element != MT_ELEMENT_E4M3;
    if (a->scale != MT_SCALE_F32 || b->scale != MT_SCALE_F32 ||
        w->options.element != MT_ELEMENT_E4M3)
        return -1;
    if (a->block && b->block && w->options.two_d && !rows->options.two_d)
        return wide ? -1 : MT_CUDA_FP8_BLOCKS;
    if (a->block || b->block) return -1;
    return wide ? MT_CUDA_FP8_E4M3_E5M2 : MT_CUDA_FP8_E4M3_E4M3;
}

bool mt_cuda_gemm_reads_codes(mt_gemm_layout layout, const mt_format_spec *a,
                              const mt_format_spec *b)
{
    return layout != MT_GEMM_NT && row_of(a, b) >= 0;
}

/* The codes of W's column direction are W^T, along the depth of dgrad: both passes are TN. */
extern "C" bool mt_cuda_gemm_codes(gemm_problem *g, const struct mt_gemm_args *args)
{
    const mt_direction *w = mt_gemm_a(args), *rows = mt_gemm_b(args);
    const mt_group *weight = &args->a->group;
    bool along = args->layout == MT_GEMM_TN;
    if (args->layout == MT_GEMM_NT || args->dtype != MT_BF16 || args->d_dtype != MT_BF16)
        return false;
    if (w->layout != MT_LAYOUT_COMPACT || rows->layout != MT_LAYOUT_COMPACT) return false;
    mt_format_spec first = mt_direction_spec(w), second = mt_direction_spec(rows);
    int row = row_of(&first, &second);
    if (row < 0) return false;
    *g = {};
    g->layout = MT_GEMM_TN;
    g->rows = args->b->group;
    g->cols = along ? weight->m : weight->k;
    g->depth = along ? weight->k : weight->m;
    g->a = { rows->codes, false, false, true, g->depth };
    g->b = { w->codes, false, false, false, g->depth };
    g->c = args->c, g->d = args->d, g->bias = args->bias;
    g->fp8 = row + 1;
    if (row == MT_CUDA_FP8_BLOCKS)
        g->scales_a = (const float *)rows->scales, g->scales_b = (const float *)w->scales;
    return true;
}
