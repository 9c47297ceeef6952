/* The Hopper GEMM: NT. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

const gemm_sm90_variant mt_cuda_gemm_sm90_wgrad[MT_CUDA_GEMM_VARIANTS] = {
    sm90_variant<MT_GEMM_NT, 1, 2, false>(),
    sm90_variant<MT_GEMM_NT, 1, 1, false>(),
    sm90_variant<MT_GEMM_NT, 2, 1, true>(),
};
