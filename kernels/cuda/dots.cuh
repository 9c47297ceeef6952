/* Dots <du, u> of rows of bf16 at multiples of 16 bytes, from which the routing weights' gradient
 * is made (mt_weights_bwd): the same bits wherever they are summed, four columns in turn, two of
 * these, eight such neighbours by halves, and parts of DOTS_PART columns in turn. */
#pragma once

#include "kernels/cuda/element.cuh"

enum { DOTS_PART = 64 };

extern "C" {
/* combine.cu: dweights from parts of dots [rows, parts], in float. */
mt_status mt_cuda_weights_of_dots(mt_stream *stream, const struct mt_weights_bwd_args *args,
                                  const float *dots);
}

static __host__ __device__ __forceinline__ int64_t mt_dot_parts(int64_t width)
{
    return (width + DOTS_PART - 1) / DOTS_PART;
}

/* a is opened by other instructions than elsewhere: reals of it would be kept for what follows. */
static __device__ __forceinline__ float mt_dot_of_four(const uint2 &a, const uint2 &b)
{
    float s = 0;
    const uint32_t x[2] = { a.x, a.y }, y[2] = { b.x, b.y };
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s = fmaf(__uint_as_float(__byte_perm(x[i], 0, 0x1044)), __uint_as_float(y[i] << 16), s);
        s = fmaf(__uint_as_float(__byte_perm(x[i], 0, 0x3244)), __uint_as_float(y[i] & 0xffff0000u),
                 s);
    }
    return s;
}

static __device__ __forceinline__ float mt_dot_of_eight(const uint4 &a, const uint4 &b)
{
    return mt_dot_of_four(make_uint2(a.x, a.y), make_uint2(b.x, b.y)) +
           mt_dot_of_four(make_uint2(a.z, a.w), make_uint2(b.z, b.w));
}

/* Of two rows, sums over threads whose lanes differ by `mask`: those with that bit get b's. */
static __device__ __forceinline__ float mt_halve_dots(float a, float b, int mask)
{
    const bool up = threadIdx.x & (unsigned)mask;
    return (up ? b : a) + __shfl_xor_sync(~0u, up ? a : b, mask);
}

/* Of eight rows, one after the other: with the last a thread gets the sum of row lane / first % 8
 * over lanes that differ by first, 2 first and 4 first. */
struct mt_eight_dots {
    float of[3];
    __device__ __forceinline__ void take(int row, float dot, int first)
    {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if (!(row >> i & 1)) {
                of[i] = dot;
                return;
            }
            dot = mt_halve_dots(of[i], dot, first << i);
        }
        of[0] = dot;
    }
};
