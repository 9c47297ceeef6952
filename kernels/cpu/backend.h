/* Inside the cpu backend: its kernel tables, and scratch for the kernels. */
#pragma once

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One table per instruction set and dtype, made by table.c. */
#define MT_CPU_TABLES(X)                                                                           \
    X(portable, f64) X(portable, f32) X(portable, bf16)                                            \
    X(avx2, f64) X(avx2, f32) X(avx2, bf16)                                                        \
    X(avx512, f64) X(avx512, f32) X(avx512, bf16)

/* Scratch of the stream's device, 64-byte aligned, kept between calls and grown when a call needs more: no allocation in
 * steady state. One user at a time: a kernel's outermost level asks once, before its parallel region, and
 * hands each thread its part (round parts up to 64 bytes). */
mt_status mt_cpu_scratch(mt_stream *stream, void **p, size_t bytes);

#ifdef __cplusplus
}
#endif
