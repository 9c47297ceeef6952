/* Bytes of scratch and of operand memory that ops ask for (backend.h): what plan.c counts. An op
 * that asks has op_scratch<T>(stream, args) beside it and asks by it; MT_CUDA_SCRATCH(op) ends it.
 */
#pragma once

#include "kernels/cuda/backend.h"
#include "kernels/cuda/gemm_path.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MT_CUDA_SCRATCH_OPS(X)                                                                     \
    X(router_fwd)                                                                                  \
    X(router_bwd)                                                                                  \
    X(grad_norm)                                                                                   \
    X(rmsnorm_bwd)                                                                                 \
    X(qk_norm_rope_bwd)                                                                            \
    X(route_plan)                                                                                  \
    X(exchange_arrivals)                                                                           \
    X(attention_fwd)                                                                               \
    X(attention_bwd)                                                                               \
    X(cross_entropy_fwd)
#define MT_CUDA_SCRATCH_FORMAT_OPS(X) X(quantize) X(dequantize) X(swizzle_scales) X(measure)

#define MT_CUDA_DECLARE_SCRATCH(op, dtype)                                                         \
    size_t mt_cuda_##op##_scratch_##dtype(const mt_stream *stream,                                 \
                                          const struct mt_##op##_args *args);
#define MT_CUDA_DECLARE_SCRATCH_OP(op) MT_CUDA_DTYPES(MT_CUDA_DECLARE_SCRATCH, op)
MT_CUDA_SCRATCH_OPS(MT_CUDA_DECLARE_SCRATCH_OP)
#define MT_CUDA_DECLARE_SCRATCH_FORMAT_OP(op)                                                      \
    size_t mt_cuda_##op##_scratch(const mt_stream *stream, const struct mt_##op##_args *args);
MT_CUDA_SCRATCH_FORMAT_OPS(MT_CUDA_DECLARE_SCRATCH_FORMAT_OP)

/* gemm.cu: of the GEMM, by whatever path but cuBLASLt's grouped one (a line for each member more);
 * of its parts: operands made plain, operands of fp8 as its kernels read them. */
void mt_cuda_gemm_bytes(mt_stream *stream, const struct mt_gemm_args *args, size_t *scratch,
                        size_t *operands);
size_t mt_cuda_gemm_plain_bytes(const struct mt_gemm_args *args);
size_t mt_cuda_gemm_plain_scratch(const mt_stream *stream, const struct mt_gemm_args *args);
struct gemm_problem;
size_t mt_cuda_gemm_codes_bytes(const struct gemm_problem *g, const mt_cuda_gemm_path *path);

#ifdef __cplusplus
}

#define MT_CUDA_SCRATCH_ENTRY(op, type, dtype)                                                     \
    extern "C" size_t mt_cuda_##op##_scratch_##dtype(const mt_stream *stream,                      \
                                                     const struct mt_##op##_args *args)            \
    {                                                                                              \
        return op##_scratch<type>(stream, args);                                                   \
    }
#define MT_CUDA_SCRATCH(op)                                                                        \
    MT_CUDA_SCRATCH_ENTRY(op, double, f64)                                                         \
    MT_CUDA_SCRATCH_ENTRY(op, float, f32) MT_CUDA_SCRATCH_ENTRY(op, mt_bf16, bf16)
#endif
