/* Inside the cuda backend: errors, streams, scratch, and what every .cu file shares.
 *
 * A kernel file mirrors the one of kernels/cpu: `name.cu` holds the templates over the stored type
 * T (double, float, bf16) and ends with MT_CUDA_OP(op) for each op, which makes the entries
 * mt_cuda_<op>_{f64,f32,bf16} of table.c. Contraction is off (-fmad=false): a fused multiply-add
 * appears only where fma() asks for one. Every output element has one writer and a fixed order of
 * summation; there are no float atomics. Counts, offsets and scalars of a step are read on the
 * device: nothing here waits for it. */
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What mt_stream.impl points at is the cudaStream_t itself; NULL is the device's own stream. */
cudaStream_t mt_cuda_stream(const mt_stream *stream);
int mt_cuda_multiprocessors(const mt_stream *stream);
/* Whether quantize takes strips of tiles of small groups as well (quantize_path.h). */
bool mt_cuda_in_strips(const mt_stream *stream);
/* Lets a kernel's blocks have so many bytes of dynamic shared memory. MT_EDEVICE: the GPU has less
 * for a block (99 KB at 8.6, 8.9 and 12.0, where 8.0 has 163 and 9.0 227). */
mt_status mt_cuda_give_shared(const mt_stream *stream, const void *kernel, size_t bytes,
                              const char *what);
int mt_cuda_block_shared(const mt_stream *stream); /* as many as there are */
/* Whether the device runs the kernels written for compute capability 9.0a (wgmma, TMA). */
bool mt_cuda_is_hopper(const mt_stream *stream);
/* Whether the kernel set multiplies fp8 codes as they are (sm_90a_fp8). */
bool mt_cuda_reads_fp8(const mt_stream *stream);
/* cuBLASLt (cublaslt.h), where the kernel set multiplies bf16 by it; else NULL. */
struct mt_cublaslt *mt_cuda_cublaslt(const mt_stream *stream);

/* Scratch of the stream, 256-byte aligned, kept between calls and grown when a call needs more. One
 * user at a time: an op asks once and divides what it got; kernels in stream order share it.
 * mt_cuda_operands: more of it, for operands that are made before the kernel runs which reads them,
 * on the device's own stream.
 * Growing waits for the device and is refused while a graph is captured. */
mt_status mt_cuda_scratch(mt_stream *stream, void **p, size_t bytes);
mt_status mt_cuda_operands(mt_stream *stream, void **p, size_t bytes);

/* Every call of the runtime goes through MT_CUDA, every launch is followed by MT_LAUNCHED, which
 * also waits for the device when MT_SYNC=1. */
mt_status mt_cuda_error(cudaError_t error, const char *call, const char *file, int line);
mt_status mt_cuda_launched(mt_stream *stream, const char *op, const char *file, int line);
#define MT_CUDA(call)                                                                              \
    do {                                                                                           \
        cudaError_t mt_cuda_ = (call);                                                             \
        if (mt_cuda_ != cudaSuccess) return mt_cuda_error(mt_cuda_, #call, __FILE__, __LINE__);    \
    } while (0)
#define MT_LAUNCHED(stream, op) MT_TRY(mt_cuda_launched((stream), (op), __FILE__, __LINE__))

#define MT_CUDA_DTYPES(X, op) X(op, f64) X(op, f32) X(op, bf16)
#define MT_CUDA_DECLARE(op, dtype)                                                                 \
    mt_status mt_cuda_##op##_##dtype(mt_stream *stream, const struct mt_##op##_args *args);
#define MT_CUDA_DECLARE_OP(op) MT_CUDA_DTYPES(MT_CUDA_DECLARE, op)
MT_DTYPE_OPS(MT_CUDA_DECLARE_OP)
#define MT_CUDA_DECLARE_FORMAT_OP(op)                                                              \
    mt_status mt_cuda_##op(mt_stream *stream, const struct mt_##op##_args *args);
MT_FORMAT_OPS(MT_CUDA_DECLARE_FORMAT_OP)

/* dequantize; `codes`: without the f32 scale that a member has one of (fp8_tensor, fp8_delayed, the
 * second level of nvfp4). */
mt_status mt_cuda_decode(mt_stream *stream, const struct mt_dequantize_args *args, bool codes);

/* quantize.cu, moe_gemm.cu */
bool mt_cuda_quantize_fuses(mt_stream *stream, const struct mt_quantize_args *args);
bool mt_cuda_weighs_after(int64_t d, int64_t f);
bool mt_cuda_quantize_decodes(const mt_format_spec *spec);
bool mt_cuda_moe_gemm_fuses(mt_stream *stream, const struct mt_moe_gemm_args *args,
                            size_t *scratch);
/* gemm_pack.cu, gemm_operands.cu: what the GEMM's table entries need besides the op. */
size_t mt_cuda_packed_bytes(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k);
mt_dtype mt_cuda_gemm_operand_f64(const mt_format_spec *spec);
mt_dtype mt_cuda_gemm_operand_f32(const mt_format_spec *spec);
mt_dtype mt_cuda_gemm_operand_bf16(const mt_format_spec *spec);
/* gemm.cu: mt_kernels.gemm_chosen */
mt_status mt_cuda_gemm_chosen_bf16(char text[MT_GEMM_TEXT], mt_stream *stream,
                                   const struct mt_gemm_args *args);
/* gemm_codes.cu, where the kernel set reads fp8 */
mt_gemm_reading mt_cuda_gemm_reads_codes(mt_gemm_layout layout, const mt_format_spec *a,
                                         const mt_format_spec *b);

/* Experts that a token can be routed among: router.cu has 32 of them to a lane. */
enum { MT_CUDA_MOST_EXPERTS = 1024 };

/* table.c */
extern const struct mt_kernels mt_cuda_kernels_f64, mt_cuda_kernels_f32, mt_cuda_kernels_bf16;

#ifdef __cplusplus
}
#endif
