/* The Hopper GEMM: NN, times a factor of each member. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

const gemm_sm90_variant mt_cuda_gemm_sm90_dgrad_times[MT_CUDA_GEMM_BF16] = {
    sm90_variant<MT_GEMM_NN, 1, 2, false, SM90_TIMES>(),
    sm90_variant<MT_GEMM_NN, 1, 1, false, SM90_TIMES>(),
    sm90_variant<MT_GEMM_NN, 2, 1, true, SM90_TIMES>(),
    sm90_deep<MT_GEMM_NN, SM90_TIMES>(),
};
