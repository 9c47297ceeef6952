/* Between the choice of a variant of the Hopper GEMM (gemm_plan_sm90.cu) and its launch. */
#pragma once

#include "kernels/cuda/gemm_sm90.cuh"

/* Extents: rows of ragged maps, and numbers that are int in the kernel. */
enum { SM90_MOST = 1 << 30 };

static inline size_t gemm_sm90_shared_bytes(const gemm_sm90_variant *variant, int64_t members,
                                            bool factors)
{
    return variant->shared + (size_t)(members + 1) * SM90_MEMBER_BYTES +
           (factors ? (size_t)members * SM90_FACTOR_BYTES : 0);
}
/* Whether a block can have what the product takes. */
static inline bool gemm_sm90_has_room(const gemm_sm90_variant *variant, const gemm_problem *g)
{
    return gemm_sm90_shared_bytes(variant, g->rows.members, mt_gemm_has_factor(&g->factor)) <=
           SM90_SHARED;
}

/* Of an element of the result. */
static inline size_t gemm_sm90_result_size(const gemm_problem *g)
{
    return g->d_real ? sizeof(float) : sizeof(mt_bf16);
}

/* Of mt_cuda_gemm_path: one of bf16, or of codes where the operands are. */
extern "C" const gemm_sm90_variant *mt_cuda_gemm_sm90_variant(const gemm_problem *g, int variant);
/* MT_CUDA_GEMM_FP8_HIGH_LEVEL: how members go that are not leveled. */
extern "C" mt_cuda_gemm_path mt_cuda_gemm_sm90_plan_rest(const gemm_problem *g);
