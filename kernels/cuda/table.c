/* The kernel tables of the cuda backend. */
#include "kernels/cuda/backend.h"

#define ENTRY_f64(op)    .op = mt_cuda_##op##_f64,
#define ENTRY_f32(op)    .op = mt_cuda_##op##_f32,
#define ENTRY_bf16(op)   .op = mt_cuda_##op##_bf16,
#define ENTRY_FORMAT(op) .op = mt_cuda_##op,

#define TABLE(type)                                                                                \
    {                                                                                              \
        MT_DTYPE_OPS(ENTRY_##type)                                                                 \
        MT_FORMAT_OPS(ENTRY_FORMAT).packed_bytes = mt_cuda_packed_bytes, .packed_shared = true,    \
        .moe_gemm_fuses = mt_cuda_moe_gemm_fuses, .quantize_fuses = mt_cuda_quantize_fuses,        \
        .quantize_decodes = mt_cuda_quantize_decodes, .weights_from_dz = true,                     \
        .decoded_weights = true, .gemm_operand = mt_cuda_gemm_operand_##type,                      \
        .most_experts = MT_CUDA_MOST_EXPERTS,                                                      \
    }

const struct mt_kernels mt_cuda_kernels_f64 = TABLE(f64);
const struct mt_kernels mt_cuda_kernels_f32 = TABLE(f32);
const struct mt_kernels mt_cuda_kernels_bf16 = TABLE(bf16);
