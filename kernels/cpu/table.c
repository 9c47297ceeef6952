/* The kernel table of one instruction set and dtype. */
#include "kernels/cpu/isa.h"
#include "kernels/cpu/variant.h"

const struct mt_kernels MT_CPU(kernels) = {
#define MT_ENTRY(op) .op = MT_CPU(op),
    MT_DTYPE_OPS(MT_ENTRY)
#define MT_ISA_ENTRY(op) .op = MT_CPU_ISA(op),
        MT_FORMAT_OPS(MT_ISA_ENTRY)
            .packed_bytes = MT_CPU(packed_bytes),
    .packed_shared = MT_ISA_LEVEL == 0, /* GEMM_PLAIN */
    .moe_gemm_fuses = MT_CPU(moe_gemm_fuses),
    .gemm_operand = MT_CPU(gemm_operand),
};
