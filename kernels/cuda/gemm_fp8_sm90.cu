/* The Hopper GEMM of fp8 codes. */
#include "kernels/cuda/gemm_sm90_kernel.cuh"

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8[MT_CUDA_FP8_VARIANTS] = {
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, false>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E5M2, false>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, true, true>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, true>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_NT, WGMMA_E4M3_E4M3, false>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_NT, WGMMA_E5M2_E4M3, false>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_NT, WGMMA_E4M3_E4M3, true, true, false, 2>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_NT, WGMMA_E4M3_E4M3, true, false, false, 2>>(),
};

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_pairs =
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, true, true, false, 1, true>>();

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_rows[MT_CUDA_FP8_BLOCKS + 2] = {
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, false, false, true>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E5M2_E4M3, false, false, true>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, true, false, true>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, true, false, true, 1, true>>(),
};
