/* What makes one source file many kernels. Every file of kernels/cpu that includes this header is
 * compiled once per instruction set and dtype: MT_ISA is portable, avx2 or avx512, MT_ELEM is f64,
 * f32 or bf16.
 *
 *   mt_elem   how activations are stored
 *   mt_real   what sums and scalars are kept in: float, or double for f64
 *   MT_CPU(x) the external name mt_cpu_x_<isa>_<dtype>
 *
 * A kernel is plain loops over mt_get and mt_put; the compiler vectorises them. Contraction is off,
 * so a fused multiply-add appears only where gemm_vec.h, lanes.h or vecmath.h asks for one. */
#pragma once

#include <math.h>
#include <omp.h>

#include "kernels/ops.h"

#define MT_CAT_(a, b, c, d) mt_cpu_##a##_##b##_##c
#define MT_CAT(a, b, c)     MT_CAT_(a, b, c, )
#define MT_CPU(name)        MT_CAT(name, MT_ISA, MT_ELEM)

/* Every kernel of this variant; table.c puts them together. */
#define MT_CPU_DECLARE(op)                                                                         \
    mt_status MT_CPU(op)(mt_stream * stream, const struct mt_##op##_args *args);
MT_DTYPE_OPS(MT_CPU_DECLARE)
#undef MT_CPU_DECLARE
bool MT_CPU(moe_gemm_fuses)(mt_stream *stream, const struct mt_moe_gemm_args *args,
                            size_t *scratch);
mt_dtype MT_CPU(gemm_operand)(const mt_format_spec *spec);
size_t MT_CPU(packed_bytes)(mt_dtype dtype, mt_dir dir, int64_t members, int64_t m, int64_t k);
extern const struct mt_kernels MT_CPU(kernels);

/* MT_ELEM as a number, for #if: MT_ELEM_IS(f32) */
#define MT_ELEM_f64     64
#define MT_ELEM_f32     32
#define MT_ELEM_bf16    16
#define MT_GLUE_(a, b)  a##b
#define MT_GLUE(a, b)   MT_GLUE_(a, b)
#define MT_ELEM_BITS    MT_GLUE(MT_ELEM_, MT_ELEM)
#define MT_ISA_portable 0
#define MT_ISA_avx2     2
#define MT_ISA_avx512   512
#define MT_ISA_LEVEL    MT_GLUE(MT_ISA_, MT_ISA)

#if MT_ELEM_BITS == 64
typedef double mt_elem;
typedef double mt_real;
#define MT_ELEM_DTYPE MT_F64
#define MT_REAL_DTYPE MT_F64
#elif MT_ELEM_BITS == 32
typedef float mt_elem;
typedef float mt_real;
#define MT_ELEM_DTYPE MT_F32
#define MT_REAL_DTYPE MT_F32
#else
typedef uint16_t mt_elem;
typedef float mt_real;
#define MT_ELEM_DTYPE MT_BF16
#define MT_REAL_DTYPE MT_F32
#endif

#define MT_INLINE static inline __attribute__((always_inline))

/* SwiGLU of a row, y = silu(gate) up, and its gradient, where dy may be dgate or dup: in
 * elementwise.c, also for what a product has just left in a cache. */
void MT_CPU(swiglu_row)(mt_elem *y, const mt_elem *gate, const mt_elem *up, int64_t width);
void MT_CPU(swiglu_row_bwd)(mt_elem *dgate, mt_elem *dup, const mt_elem *dy, const mt_elem *gate,
                            const mt_elem *up, int64_t width);

/* An element as real, and a real as an element (one rounding). */
MT_INLINE mt_real mt_get(const mt_elem *p)
{
#if MT_ELEM_BITS == 16
    return mt_bf16_to_f32(*p);
#else
    return *p;
#endif
}

MT_INLINE void mt_put(mt_elem *p, mt_real x)
{
#if MT_ELEM_BITS == 16
    *p = mt_f32_to_bf16(x);
#else
    *p = x;
#endif
}

/* x as it reads back after being stored: the identity but for bf16. */
MT_INLINE mt_real mt_rounded(mt_real x)
{
    mt_elem e;
    mt_put(&e, x);
    return mt_get(&e);
}

MT_INLINE int64_t mt_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

MT_INLINE int64_t mt_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}
