/* The Hopper kernels of moe_gemm, in the order of mt_cuda_gemm_path's variants. */
#pragma once

#include "kernels/cuda/gemm_sm90.cuh"

/* [gathered] */
extern "C" const gemm_sm90_variant mt_cuda_moe_gemm_fwd[2][MT_CUDA_GEMM_VARIANTS];
extern "C" const gemm_sm90_variant mt_cuda_moe_gemm_dgrad[MT_CUDA_GEMM_VARIANTS];
extern "C" const gemm_sm90_variant mt_cuda_moe_gemm_wgrad[MT_CUDA_GEMM_PINGPONG];
/* NN of gathered rows, weighted after the product; NT of such dY, the result turned. */
extern "C" const gemm_sm90_variant mt_cuda_moe_gemm_after, mt_cuda_moe_gemm_wgrad_turned;
enum { SM90_AFTER_WIDTH = 96 };

/* Rows that there are partial sums of dweights for. */
static inline int64_t mt_cuda_moe_gemm_room(const mt_group *rows)
{
    return rows->first_dims ? rows->m : rows->members * rows->m;
}

/* Where the weights of rows are that are weighted after the product: behind whole sums. */
static inline float *mt_cuda_moe_gemm_row_weights(const struct mt_moe_gemm_args *args,
                                                  const gemm_problem *g)
{
    return (float *)args->scratch + mt_cuda_moe_gemm_room(&g->rows);
}

/* Whether they can run it so: alignment, whole blocks of the gate. */
extern "C" bool mt_cuda_moe_gemm_sm90_suits(const struct mt_moe_gemm_args *args,
                                            const gemm_problem *g, const mt_cuda_gemm_path *path);
/* What the kernel takes. */
extern "C" mt_status mt_cuda_moe_gemm_sm90_prepare(
    gemm_sm90_maps *maps, gemm_sm90_args *kernel_args, const gemm_sm90_variant **variant,
    const struct mt_moe_gemm_args *args, const gemm_problem *g, const mt_cuda_gemm_path *path);
extern "C" mt_status mt_cuda_moe_gemm_sm90(mt_stream *stream, const struct mt_moe_gemm_args *args,
                                           const gemm_problem *g, const mt_cuda_gemm_path *path);
