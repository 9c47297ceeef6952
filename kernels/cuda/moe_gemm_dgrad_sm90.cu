/* GEMMs of the expert layer on Hopper: NN to the gradient of SwiGLU's input. */
#include "kernels/cuda/moe_gemm_sm90.cuh"
#include "kernels/cuda/moe_gemm_sm90_variants.cuh"

const gemm_sm90_variant mt_cuda_moe_gemm_dgrad[MT_CUDA_GEMM_VARIANTS] = {
    moe_variant<MT_GEMM_NN, 2, false, false, MOE_UNGATED>(),
    moe_variant<MT_GEMM_NN, 1, false, false, MOE_UNGATED>(),
    moe_variant<MT_GEMM_NN, 1, true, false, MOE_UNGATED>(),
};
