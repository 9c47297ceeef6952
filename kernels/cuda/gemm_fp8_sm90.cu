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

template <int ELEMENTS, bool SCALED, bool TURNED, bool LEVELED = false>
static gemm_sm90_variant tall()
{
    return sm90_variant_of<sm90_fp8<MT_GEMM_NT, ELEMENTS, SCALED, SCALED && !LEVELED, false, 1,
                                    true, 3, TURNED, LEVELED>>();
}

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_tall[2][MT_CUDA_FP8_BLOCKS + 1] = {
    { tall<WGMMA_E4M3_E4M3, false, false>(), tall<WGMMA_E5M2_E4M3, false, false>(),
      tall<WGMMA_E4M3_E4M3, true, false>() },
    { tall<WGMMA_E4M3_E4M3, false, true>(), tall<WGMMA_E4M3_E5M2, false, true>(),
      tall<WGMMA_E4M3_E4M3, true, true>() },
};

template <int ELEMENTS, bool TURNED, bool LEVELED = false> static gemm_sm90_variant broad()
{
    return sm90_variant_of<
        sm90_fp8<MT_GEMM_NT, ELEMENTS, LEVELED, false, false, 1, true, 2, TURNED, LEVELED, 2>>();
}

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_broad[2][MT_CUDA_FP8_BLOCKS] = {
    { broad<WGMMA_E4M3_E4M3, false>(), broad<WGMMA_E5M2_E4M3, false>() },
    { broad<WGMMA_E4M3_E4M3, true>(), broad<WGMMA_E4M3_E5M2, true>() },
};

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_level[2] = {
    tall<WGMMA_E4M3_E4M3, true, false, true>(),
    tall<WGMMA_E4M3_E4M3, true, true, true>(),
};

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_level_broad[2] = {
    broad<WGMMA_E4M3_E4M3, false, true>(),
    broad<WGMMA_E4M3_E4M3, true, true>(),
};

template <int ELEMENTS, bool SCALED, bool LEVELED = false> static gemm_sm90_variant high()
{
    return sm90_variant_of<sm90_fp8<MT_GEMM_TN, ELEMENTS, SCALED, SCALED && !LEVELED, false, 1,
                                    true, 2, false, LEVELED, 2>>();
}

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_high[MT_CUDA_FP8_BLOCKS + 1] = {
    high<WGMMA_E4M3_E4M3, false>(),
    high<WGMMA_E4M3_E5M2, false>(),
    high<WGMMA_E4M3_E4M3, true>(),
};

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_high_level = high<WGMMA_E4M3_E4M3, true, true>();

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_rows[MT_CUDA_FP8_BLOCKS + 2] = {
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, false, false, true>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E5M2_E4M3, false, false, true>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, true, false, true>>(),
    sm90_variant_of<sm90_fp8<MT_GEMM_TN, WGMMA_E4M3_E4M3, true, false, true, 1, true>>(),
};

template <int ELEMENTS, bool SCALED> static gemm_sm90_variant tall_rows()
{
    return sm90_variant_of<sm90_fp8<MT_GEMM_TN, ELEMENTS, SCALED, false, true, 1, false, 3>>();
}

const gemm_sm90_variant mt_cuda_gemm_sm90_fp8_rows_tall[MT_CUDA_FP8_BLOCKS + 1] = {
    tall_rows<WGMMA_E4M3_E4M3, false>(),
    tall_rows<WGMMA_E5M2_E4M3, false>(),
    tall_rows<WGMMA_E4M3_E4M3, true>(),
};
