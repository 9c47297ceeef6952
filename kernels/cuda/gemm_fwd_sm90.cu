/* The Hopper GEMM: TN. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

const gemm_sm90_variant mt_cuda_gemm_sm90_fwd[MT_CUDA_GEMM_BF16] = {
    sm90_variant<MT_GEMM_TN, 1, 2, false, SM90_PLAIN>(),
    sm90_variant<MT_GEMM_TN, 1, 1, false, SM90_PLAIN>(),
    sm90_variant<MT_GEMM_TN, 2, 1, true, SM90_PLAIN>(),
    sm90_deep<MT_GEMM_TN, SM90_PLAIN>(),
};
const gemm_sm90_variant mt_cuda_gemm_sm90_fwd_any[MT_CUDA_GEMM_BF16] = {
    {},
    sm90_variant<MT_GEMM_TN, 1, 1, false, SM90_ANY>(),
};
