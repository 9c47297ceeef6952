/* The kernel table of one instruction set and dtype. */
#include "kernels/cpu/variant.h"

const struct mt_kernels MT_CPU(kernels) = {
#define MT_ENTRY(op) .op = MT_CPU(op),
    MT_OPS(MT_ENTRY)
    .packed_bytes = MT_CPU(packed_bytes),
};
