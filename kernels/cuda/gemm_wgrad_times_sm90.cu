/* The Hopper GEMM: NT, times a factor of each member. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

const gemm_sm90_variant mt_cuda_gemm_sm90_wgrad_times[MT_CUDA_GEMM_BF16] = {
    {},
    {},
    sm90_variant<MT_GEMM_NT, 2, 1, true, SM90_TIMES>(),
    sm90_deep<MT_GEMM_NT, SM90_TIMES>(),
    sm90_variant<MT_GEMM_NT, 2, 1, true, SM90_TIMES, true>(),
    sm90_deep<MT_GEMM_NT, SM90_TIMES, true>(),
};
