/* The Hopper GEMM: TN. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

const gemm_sm90_variant mt_cuda_gemm_sm90_fwd[MT_CUDA_GEMM_VARIANTS + 1] = {
    sm90_variant<MT_GEMM_TN, 1, 2, false, true>(),
    sm90_variant<MT_GEMM_TN, 1, 1, false, true>(),
    sm90_variant<MT_GEMM_TN, 2, 1, true, true>(),
    sm90_variant<MT_GEMM_TN, 1, 1, false, false>(),
};
const gemm_sm90_variant mt_cuda_gemm_sm90_deep_fwd = sm90_deep<MT_GEMM_TN, false>();
