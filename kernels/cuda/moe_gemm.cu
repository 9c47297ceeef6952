/* GEMMs of the expert layer with the ops beside them. */
#include "kernels/cuda/element.cuh"

template <typename T> static mt_status moe_gemm(mt_stream *stream, const struct mt_moe_gemm_args *a)
{
    return mt_moe_gemm_parts(stream, a);
}
MT_CUDA_OP(moe_gemm)
