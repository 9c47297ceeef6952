/* GEMMs of the expert layer on Hopper: NT of gathered rows. */
#include "kernels/cuda/moe_gemm_sm90.cuh"
#include "kernels/cuda/moe_gemm_sm90_variants.cuh"

const gemm_sm90_variant mt_cuda_moe_gemm_wgrad[MT_CUDA_GEMM_PINGPONG] = {
    {},
    moe_variant<MT_GEMM_NT, 1, false, true, MOE_NOTHING>(),
};
