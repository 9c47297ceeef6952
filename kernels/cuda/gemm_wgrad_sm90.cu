/* The Hopper GEMM: NT. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

const gemm_sm90_variant mt_cuda_gemm_sm90_wgrad[MT_CUDA_GEMM_BF16] = {
    {},
    {},
    sm90_variant<MT_GEMM_NT, 2, 1, true, SM90_PLAIN>(),
    sm90_deep<MT_GEMM_NT, SM90_PLAIN>(),
    sm90_variant<MT_GEMM_NT, 2, 1, true, SM90_PLAIN, true>(),
    sm90_deep<MT_GEMM_NT, SM90_PLAIN, true>(),
};
const gemm_sm90_variant mt_cuda_gemm_sm90_wgrad_any[MT_CUDA_GEMM_BF16] = {
    {},
    {},
    sm90_variant<MT_GEMM_NT, 2, 1, true, SM90_ANY>(),
    {},
    sm90_variant<MT_GEMM_NT, 2, 1, true, SM90_ANY, true>(),
    {},
    sm90_variant_of<sm90<MT_GEMM_NT, 2, 1, true, SM90_ANY, false, 3, 6>>(),
};
