/* SwiGLU of single elements: the same operations wherever it is computed, so the same bits. */
#pragma once

#include "kernels/cuda/element.cuh"

/* silu(g) u */
template <typename R> static __device__ __forceinline__ R mt_swiglu_of(R g, R u)
{
    return g / (1 + exp(-g)) * u;
}

/* From d to the gradients of g and u. */
template <typename R>
static __device__ __forceinline__ void mt_swiglu_gradient(R *dg, R *du, R d, R g, R u)
{
    R s = 1 / (1 + exp(-g));
    *dg = d * u * (s * (1 + g * (1 - s)));
    *du = d * (g * s);
}
