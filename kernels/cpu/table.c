/* The kernel table of one instruction set and dtype. */
#include "kernels/cpu/variant.h"

#define MT_DECLARE(op) mt_status MT_CPU(op)(mt_stream *, const struct mt_##op##_args *);
MT_OPS(MT_DECLARE)
size_t MT_CPU(packed_bytes)(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k);
extern const struct mt_kernels MT_CPU(kernels);

const struct mt_kernels MT_CPU(kernels) = {
#define MT_ENTRY(op) .op = MT_CPU(op),
    MT_OPS(MT_ENTRY)
    .packed_bytes = MT_CPU(packed_bytes),
};
