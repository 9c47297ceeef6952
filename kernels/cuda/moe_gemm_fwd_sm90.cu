/* GEMMs of the expert layer on Hopper: TN with SwiGLU, rows gathered or in place. */
#include "kernels/cuda/moe_gemm_sm90.cuh"
#include "kernels/cuda/moe_gemm_sm90_variants.cuh"

const gemm_sm90_variant mt_cuda_moe_gemm_fwd[2][MT_CUDA_GEMM_VARIANTS] = {
    {
        moe_variant<MT_GEMM_TN, 2, false, false, MOE_GATED>(),
        moe_variant<MT_GEMM_TN, 1, false, false, MOE_GATED>(),
        moe_variant<MT_GEMM_TN, 1, true, false, MOE_GATED>(),
    },
    {
        moe_variant<MT_GEMM_TN, 2, false, true, MOE_GATED>(),
        moe_variant<MT_GEMM_TN, 1, false, true, MOE_GATED>(),
        moe_variant<MT_GEMM_TN, 1, true, true, MOE_GATED>(),
    },
};
