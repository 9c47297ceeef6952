/* Inside the cpu backend: its kernel tables, and scratch for the kernels. */
#pragma once

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One table per instruction set and dtype, made by table.c; MT_HAVE_<isa> comes from the build. */
#ifdef MT_HAVE_avx2
#define MT_CPU_TABLES_avx2(X) X(avx2, f64) X(avx2, f32) X(avx2, bf16)
#else
#define MT_CPU_TABLES_avx2(X)
#endif
#ifdef MT_HAVE_avx512
#define MT_CPU_TABLES_avx512(X) X(avx512, f64) X(avx512, f32) X(avx512, bf16)
#else
#define MT_CPU_TABLES_avx512(X)
#endif
#define MT_CPU_TABLES(X)                                                                           \
    X(portable, f64)                                                                               \
    X(portable, f32) X(portable, bf16) MT_CPU_TABLES_avx2(X) MT_CPU_TABLES_avx512(X)

#define MT_CPU_DECLARE_TABLE(isa, dtype)                                                           \
    extern const struct mt_kernels mt_cpu_kernels_##isa##_##dtype;
MT_CPU_TABLES(MT_CPU_DECLARE_TABLE)
#undef MT_CPU_DECLARE_TABLE

#ifdef MT_HAVE_avx512
/* The kernels that multiply pairs (*_pairs.c), which replace those of avx512 for bf16. */
#define MT_CPU_PAIRS(X) X(amx) X(dots)
#define MT_CPU_DECLARE_PAIRS(way)                                                                  \
    mt_status mt_cpu_attention_fwd_##way##_bf16(mt_stream *stream,                                 \
                                                const struct mt_attention_fwd_args *args);         \
    mt_status mt_cpu_attention_bwd_##way##_bf16(mt_stream *stream,                                 \
                                                const struct mt_attention_bwd_args *args);         \
    mt_status mt_cpu_gemm_##way##_bf16(mt_stream *stream, const struct mt_gemm_args *args);        \
    mt_dtype mt_cpu_gemm_operand_##way##_bf16(const mt_format_spec *spec);                         \
    mt_status mt_cpu_pack_weight_##way##_bf16(mt_stream *stream,                                   \
                                              const struct mt_pack_weight_args *args);             \
    size_t mt_cpu_packed_bytes_##way##_bf16(mt_dtype dtype, mt_dir dir, int64_t members,           \
                                            int64_t m, int64_t k);
MT_CPU_PAIRS(MT_CPU_DECLARE_PAIRS)
#undef MT_CPU_DECLARE_PAIRS
#endif

/* Scratch of the stream's device, 64-byte aligned, kept between calls and grown when a call needs
 * more: no allocation in steady state. One user at a time: a kernel's outermost level asks once,
 * before its parallel region, and hands each thread its part (round parts up to 64 bytes). Parallel
 * regions run num_threads(stream->device->threads). mt_cpu_operands: more of it, for operands that
 * are made before the kernel runs which reads them. */
mt_status mt_cpu_scratch(mt_stream *stream, void **p, size_t bytes);
mt_status mt_cpu_operands(mt_stream *stream, void **p, size_t bytes);

#ifdef __cplusplus
}
#endif
