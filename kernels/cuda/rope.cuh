/* What the kernels of queries and keys share: the shape of a call, where a thread stands in it, and
 * what is done to N pairs (i, i + d/2) of a head. */
#pragma once

#include "kernels/cuda/rowsums.cuh"

enum { THREADS = 256, BLOCKS = 512 };

/* The shape of a call. `lanes` is a power of two up to 32; `span`: 1 where each head is normalised
 * by itself. sums: of squares, a token. */
struct shape {
    int64_t tokens, sequence, nq, nkv, dim, width, sums;
    mt_qk_norm norm;
    int lanes;
};

static struct shape shape_of(int64_t batch, int64_t sequence, int64_t nq, int64_t nkv, int64_t dim,
                             mt_qk_norm norm, int n)
{
    struct shape s = { batch * sequence, sequence, nq, nkv, dim, (nq + 2 * nkv) * dim, 0, norm, 1 };
    s.sums = norm == MT_QK_NORM_HEAD ? nq + nkv : norm == MT_QK_NORM_PROJECTION ? 2 : 0;
    while (s.lanes < 32 && (int64_t)s.lanes * n < dim / 2) s.lanes *= 2;
    return s;
}

/* A thread's place among the heads of a block: of group `group` of `groups`, its first element. */
struct place {
    int64_t group, groups, first, step;
};

template <int N> static __device__ __forceinline__ struct place place_of(const struct shape &s)
{
    int lane = threadIdx.x % s.lanes;
    return { threadIdx.x / s.lanes, THREADS / s.lanes, (int64_t)lane * N, (int64_t)s.lanes * N };
}

/* Sum over the threads of a head. All threads of the warp call it. */
template <typename R> static __device__ __forceinline__ R head_total(R x, int lanes)
{
    for (int lane = lanes / 2; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

/* cos and sin of N pairs. */
template <typename R, int N> struct turn {
    R cosine[N], sine[N];
};

template <typename R, int N>
static __device__ __forceinline__ struct turn<R, N> turn_of(const void *cosine, const void *sine,
                                                            int64_t at) {
    struct turn<R, N> t;
    mt_get_constant<N>(t.cosine, (const R *)cosine + at);
    mt_get_constant<N>(t.sine, (const R *)sine + at);
    return t;
}

/* low and high turned. */
template <typename R, int N>
static __device__ __forceinline__ void rotate(R *low, R *high, const struct turn<R, N> &t)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        R u = low[j] * t.cosine[j] - high[j] * t.sine[j];
        high[j] = high[j] * t.cosine[j] + low[j] * t.sine[j];
        low[j] = u;
    }
}

/* x as rmsnorm_fwd would store it. */
template <typename T, int N>
static __device__ __forceinline__ void norm_vec(mt_real<T> *x, mt_real<T> rstd, const mt_real<T> *w)
{
    mt_real<T> weight[N];
    mt_get_constant<N>(weight, w);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = x[j] * rstd;
    mt_round<T, N>(x);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = x[j] * weight[j];
    mt_round<T, N>(x);
}
