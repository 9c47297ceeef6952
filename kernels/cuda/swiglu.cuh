/* SwiGLU of single elements: the same operations wherever it is computed, so the same bits. T: as
 * they are stored. */
#pragma once

#include <type_traits>

#include "kernels/cuda/element.cuh"

/* 1 / (1 + exp(-g)); of bf16 in four instructions, within 2^-24 (2 |g| + 8) of itself. */
template <typename T> static __device__ __forceinline__ mt_real<T> mt_sigmoid(mt_real<T> g)
{
    if constexpr (std::is_same<T, mt_bf16>::value) {
        float e, s;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(g * -0x1.715476p+0f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1 + e));
        return s;
    } else {
        return 1 / (1 + exp(-g));
    }
}

/* silu(g) u */
template <typename T>
static __device__ __forceinline__ mt_real<T> mt_swiglu_of(mt_real<T> g, mt_real<T> u)
{
    if constexpr (std::is_same<T, mt_bf16>::value)
        return g * mt_sigmoid<T>(g) * u;
    else
        return g / (1 + exp(-g)) * u;
}

/* From d to the gradients of g and u. */
template <typename T>
static __device__ __forceinline__ void mt_swiglu_gradient(mt_real<T> *dg, mt_real<T> *du,
                                                          mt_real<T> d, mt_real<T> g, mt_real<T> u)
{
    mt_real<T> s = mt_sigmoid<T>(g);
    *dg = d * u * (s * (1 + g * (1 - s)));
    *du = d * (g * s);
}
