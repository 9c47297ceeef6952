/* Instructions of tensor cores of compute capability 8.0 and later: mma.sync, its operands from
 * shared memory, copies that do not wait, exp2. */
#pragma once

#include "kernels/cuda/copies.cuh"
#include "kernels/cuda/element.cuh"

/* Two elements of an operand in one register, the first in the lower half. */
static __device__ __forceinline__ uint32_t mt_pack(float x, float y)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

/* sum [16, 8] += a [16, 16] b [16, 8]: the lanes' fragments of mma.m16n8k16. */
static __device__ __forceinline__ void mt_mma(float *sum, const uint32_t *a, uint32_t b0,
                                              uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Sum, or maximum, over the four lanes that have a row of a fragment. */
static __device__ __forceinline__ float mt_row_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
static __device__ __forceinline__ float mt_row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

/* Four 8 x 8 matrices; lane 8 i + r gives the address of row r of matrix i, on 16 bytes. */
static __device__ __forceinline__ void mt_load_matrices(uint32_t *m, const mt_bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}
static __device__ __forceinline__ void mt_load_transposed(uint32_t *m, const mt_bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

static __device__ __forceinline__ float mt_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
