/* The Hopper GEMM: NN. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

const gemm_sm90_variant mt_cuda_gemm_sm90_dgrad[MT_CUDA_GEMM_VARIANTS + 1] = {
    sm90_variant<MT_GEMM_NN, 1, 2, false, true>(),
    sm90_variant<MT_GEMM_NN, 1, 1, false, true>(),
    sm90_variant<MT_GEMM_NN, 2, 1, true, true>(),
    sm90_variant<MT_GEMM_NN, 1, 1, false, false>(),
};
const gemm_sm90_variant mt_cuda_gemm_sm90_deep_dgrad = sm90_deep<MT_GEMM_NN, false>();
