/* The Hopper GEMM: NT. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

const gemm_sm90_variant mt_cuda_gemm_sm90_wgrad[MT_CUDA_GEMM_VARIANTS + 1] = {
    sm90_variant<MT_GEMM_NT, 1, 2, false, true>(),
    sm90_variant<MT_GEMM_NT, 1, 1, false, true>(),
    sm90_variant<MT_GEMM_NT, 2, 1, true, true>(),
    sm90_variant<MT_GEMM_NT, 2, 1, true, false>(),
};
const gemm_sm90_variant mt_cuda_gemm_sm90_turned[2] = {
    sm90_variant<MT_GEMM_NT, 2, 1, true, true, true>(),
    sm90_variant<MT_GEMM_NT, 2, 1, true, false, true>(),
};
const gemm_sm90_variant mt_cuda_gemm_sm90_turned_wide =
    sm90_variant<MT_GEMM_NT, 1, 2, false, true, true>();
const gemm_sm90_variant mt_cuda_gemm_sm90_panel = sm90_variant_of<sm90_panel>();
const gemm_sm90_variant mt_cuda_gemm_sm90_deep_wgrad[2] = {
    sm90_deep<MT_GEMM_NT, false>(),
    sm90_deep<MT_GEMM_NT, true>(),
};
const gemm_sm90_variant mt_cuda_gemm_sm90_adding =
    sm90_variant_of<sm90<MT_GEMM_NT, 2, 1, true, false, false, 3, 6>>();
