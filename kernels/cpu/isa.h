/* For files of kernels/cpu whose kernels do not depend on the activations' type: compiled once per
 * instruction set (MT_ISA), not per dtype. MT_CPU_ISA(x) is the external name mt_cpu_x_<isa>. */
#pragma once

#include <omp.h>

#include "kernels/cpu/backend.h"

#define MT_ISA_CAT_(a, b) mt_cpu_##a##_##b
#define MT_ISA_CAT(a, b)  MT_ISA_CAT_(a, b)
#define MT_CPU_ISA(name)  MT_ISA_CAT(name, MT_ISA)

#define MT_CPU_ISA_DECLARE(op)                                                                     \
    mt_status MT_CPU_ISA(op)(mt_stream * stream, const struct mt_##op##_args *args);
MT_FORMAT_OPS(MT_CPU_ISA_DECLARE)
#undef MT_CPU_ISA_DECLARE

/* mt_dequantize without the members' f32 factors, which go to `factors` [N]: a whole member's
 * scale, nvfp4's S_dec, else 1. What is left is exact in bf16 but for blocks whose f32 scales are
 * no powers of two. */
mt_status MT_CPU_ISA(decode)(mt_stream *stream, const struct mt_dequantize_args *args,
                             float *factors);
