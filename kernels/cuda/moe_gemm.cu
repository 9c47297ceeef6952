/* GEMMs of the expert layer with the ops beside them: one kernel on Hopper where operands are bf16
 * and aligned, else the ops in turn. */
#include <stdio.h>

#include "kernels/check.h"
#include "kernels/cuda/moe_gemm_path.h"
#include "kernels/cuda/moe_gemm_sm90_variants.cuh"

static bool is_bf16(const mt_direction *d)
{
    return d->format == mt_format_plain(MT_BF16);
}

/* The product where a fused kernel may run it: on Hopper, of bf16. */
static bool describe(gemm_problem *g, const mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    const struct mt_gemm_args *gemm = &args->gemm;
    if (!mt_cuda_is_hopper(stream) || args->dtype != MT_BF16) return false;
    if (!is_bf16(mt_gemm_a(gemm)) || !is_bf16(mt_gemm_b(gemm))) return false;
    *g = gemm_problem();
    return mt_cuda_gemm_describe(g, gemm) == MT_OK && g->cols > 0 && g->rows.members > 0;
}

static bool choose(gemm_problem *g, const mt_stream *stream, const struct mt_moe_gemm_args *args,
                   mt_cuda_gemm_path *path)
{
    path->variant = MT_CUDA_GEMM_TILED;
    if (!describe(g, stream, args)) return false;
    mt_cuda_gemm_sm90_plan(path, g, mt_cuda_multiprocessors(stream));
    return mt_cuda_moe_gemm_sm90_suits(args, g, path);
}

bool mt_cuda_moe_gemm_choose(const mt_stream *stream, const struct mt_moe_gemm_args *args,
                             mt_cuda_gemm_path *path)
{
    gemm_problem g;
    return choose(&g, stream, args, path);
}

bool mt_cuda_moe_gemm_fuses(const mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    mt_cuda_gemm_path path;
    return mt_cuda_moe_gemm_choose(stream, args, &path);
}

mt_status mt_cuda_moe_gemm_by(mt_stream *stream, const struct mt_moe_gemm_args *args,
                              const mt_cuda_gemm_path *path)
{
    gemm_problem g;
    MT_TRY(mt_moe_gemm_check(args));
    MT_REQUIRE(describe(&g, stream, args) && path->variant != MT_CUDA_GEMM_TILED &&
                   mt_cuda_moe_gemm_sm90_suits(args, &g, path),
               MT_EUNSUPPORTED, "moe_gemm: variant %d, width %d, %d together cannot run this",
               path->variant, path->width, path->super);
    return mt_cuda_moe_gemm_sm90(stream, args, &g, path);
}

void mt_cuda_moe_gemm_print(char text[MT_CUDA_MOE_GEMM_TEXT], const struct mt_moe_gemm_args *args,
                            const mt_cuda_gemm_path *path, bool fused)
{
    const char *join = fused ? " + " : ", then ";
    snprintf(text, MT_CUDA_MOE_GEMM_TEXT, "%s%s%s%s%s%s", args->row_token ? "gather" : "",
             args->row_token ? join : "", mt_cuda_gemm_path_name(path),
             args->act || args->z ? join : "",
             args->act ? "swiglu"
             : args->z ? "swiglu backward"
                       : "",
             fused ? ", one kernel" : "");
}

template <typename T>
static mt_status moe_gemm(mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    gemm_problem g;
    mt_cuda_gemm_path path;
    return choose(&g, stream, args, &path) ? mt_cuda_moe_gemm_sm90(stream, args, &g, &path)
                                           : mt_moe_gemm_parts(stream, args);
}
MT_CUDA_OP(moe_gemm)
