/* Stored and computed types of a kernel, and the small device functions that every kernel uses. */
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/backend.h"

typedef __nv_bfloat16 mt_bf16;

/* mt_real<T>: what sums over T are kept in. */
template <typename T> struct mt_real_of {
    typedef float type;
};
template <> struct mt_real_of<double> {
    typedef double type;
};
template <typename T> using mt_real = typename mt_real_of<T>::type;

template <typename T> struct mt_dtype_of;
template <> struct mt_dtype_of<double> {
    static const mt_dtype value = MT_F64;
};
template <> struct mt_dtype_of<float> {
    static const mt_dtype value = MT_F32;
};
template <> struct mt_dtype_of<mt_bf16> {
    static const mt_dtype value = MT_BF16;
};

static __device__ __forceinline__ double mt_get(const double *p)
{
    return *p;
}
static __device__ __forceinline__ float mt_get(const float *p)
{
    return *p;
}
static __device__ __forceinline__ float mt_get(const mt_bf16 *p)
{
    return __bfloat162float(*p);
}
static __device__ __forceinline__ void mt_put(double *p, double x)
{
    *p = x;
}
static __device__ __forceinline__ void mt_put(float *p, float x)
{
    *p = x;
}
static __device__ __forceinline__ void mt_put(mt_bf16 *p, float x)
{
    *p = __float2bfloat16_rn(x); /* NaN becomes 0x7FFF, as NUMERICS has it */
}
/* x as it reads back after being stored. */
template <typename T> static __device__ __forceinline__ mt_real<T> mt_rounded(mt_real<T> x)
{
    T e;
    mt_put(&e, x);
    return mt_get(&e);
}

/* N consecutive elements moved as one access; the address is a multiple of its size. */
template <typename T, int N> struct alignas(sizeof(T) * N) mt_vec {
    T at[N];
};

static __host__ __device__ __forceinline__ int64_t mt_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Sum over a warp: the same tree, so the same bits, in every lane. */
template <typename R> static __device__ __forceinline__ R mt_warp_sum(R x)
{
    for (int lane = 16; lane; lane >>= 1) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}
template <typename R> static __device__ __forceinline__ R mt_warp_max(R x)
{
    for (int lane = 16; lane; lane >>= 1) {
        R y = __shfl_xor_sync(~0u, x, lane);
        x = x > y || x != x ? x : y;
    }
    return x;
}

/* A number that the compiler keeps, not makes anew where it is used. */
static __device__ __forceinline__ int mt_opaque(int x)
{
    asm("" : "+r"(x));
    return x;
}

/* Blocks of `threads` that cover `count` items, or as many as keep the device busy with a
 * grid-stride loop. */
static inline unsigned mt_blocks(const mt_stream *stream, int64_t count, int threads)
{
    int64_t blocks = mt_ceil_div(count, threads),
            most = (int64_t)mt_cuda_multiprocessors(stream) * (8192 / threads);
    return (unsigned)(blocks < most ? blocks : most);
}
/* for each i in [0, count) over the whole grid */
#define MT_GRID_STRIDE(i, count)                                                                   \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (count);                  \
         i += (int64_t)gridDim.x * blockDim.x)

#define MT_CUDA_ENTRY(op, type, dtype)                                                             \
    extern "C" mt_status mt_cuda_##op##_##dtype(mt_stream *stream,                                 \
                                                const struct mt_##op##_args *args)                 \
    {                                                                                              \
        return op<type>(stream, args);                                                             \
    }
#define MT_CUDA_OP(op)                                                                             \
    MT_CUDA_ENTRY(op, double, f64) MT_CUDA_ENTRY(op, float, f32) MT_CUDA_ENTRY(op, mt_bf16, bf16)

/* The larger magnitude; NaN if one of them is. */
static __device__ __forceinline__ float mt_larger_or_nan(float a, float b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(fabsf(a)), "f"(fabsf(b)));
    return most;
#else
    return a != a ? a : b != b ? b : fmaxf(fabsf(a), fabsf(b));
#endif
}
