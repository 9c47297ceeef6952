/* GEMMs of the expert layer on Hopper: of a narrow down projection's dY, gathered and weighted
 * after the product. */
#include "kernels/cuda/moe_gemm_after_sm90.cuh"
#include "kernels/cuda/moe_gemm_sm90_variants.cuh"

struct moe_turned : moe<MT_GEMM_NT, 1, false, true, MOE_NOTHING> {
    enum { TURNED = true };
};
template <> struct sm90_beside<moe_turned> {
    enum { GATHERS = 128, PRODUCES = true };
    typedef sm90_result<moe_turned> result;
};

const gemm_sm90_variant mt_cuda_moe_gemm_after = sm90_variant_of<moe_after<1>>();
const gemm_sm90_variant mt_cuda_moe_gemm_wgrad_turned = sm90_variant_of<moe_turned>();
