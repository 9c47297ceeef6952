/* Sums along rows and over rows, in an order that the extents alone decide. */
#pragma once

#include "kernels/cuda/words.cuh"

/* Sum over `LANES` consecutive threads (a warp, or the whole block), the same bits in each. A block
 * has at most 1024 threads; every one of them calls it. */
template <int LANES, typename R> static __device__ __forceinline__ R mt_group_sum(R x)
{
    x = mt_warp_sum(x);
    if (LANES == 32) return x;
    __shared__ R warps[32];
    __syncthreads(); /* the previous sum has been read */
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    R sum = 0;
#pragma unroll
    for (int i = 0; i < LANES / 32; i++) sum += warps[i];
    return sum;
}

/* The same of the turn-th sum of a loop, which waits once: its words are written again two turns
 * later, when all have read them. */
template <int LANES, typename R> static __device__ __forceinline__ R mt_group_sum_in(R x, int turn)
{
    x = mt_warp_sum(x);
    if (LANES == 32) return x;
    __shared__ R warps[2][32];
    R *mine = warps[turn & 1];
    if (threadIdx.x % 32 == 0) mine[threadIdx.x / 32] = x;
    __syncthreads();
    R sum = 0;
#pragma unroll
    for (int i = 0; i < LANES / 32; i++) sum += mine[i];
    return sum;
}

/* Rows are cut into at most `most` blocks of at least 4. */
static inline int64_t mt_row_block(int64_t rows, int64_t most)
{
    int64_t block = mt_ceil_div(rows, most);
    return block < 4 ? 4 : block;
}

/* out[c] = (accumulate ? out[c] : 0) + sum of rows[b][c] over `blocks` rows; out NULL: not wanted.
 */
template <typename R> struct mt_partials {
    R *out;
    bool accumulate;
    const R *rows;
    int64_t blocks;
};

/* One, or two, blockIdx.y: 32 columns a block, 32 threads for each, each of which adds a run of
 * rows in order; their sums are added in order too. */
template <typename R>
static __global__ void mt_add_partials_kernel(struct mt_partials<R> one, struct mt_partials<R> two,
                                              int64_t width)
{
    __shared__ R sums[32][33];
    const struct mt_partials<R> p = blockIdx.y ? two : one;
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x, run = mt_ceil_div(p.blocks, 32);
    int64_t from = threadIdx.y * run, to = from + run < p.blocks ? from + run : p.blocks;
    R sum = 0;
    if (c < width) {
#pragma unroll 8
        for (int64_t b = from; b < to; b++) sum += p.rows[b * width + c];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || c >= width) return;
    sum = 0;
    for (int i = 0; i < 32; i++) sum += sums[i][threadIdx.x];
    p.out[c] = (p.accumulate ? p.out[c] : 0) + sum;
}

template <typename R>
static mt_status mt_add_partials(mt_stream *stream, const char *op,
                                 const struct mt_partials<R> &one, const struct mt_partials<R> &two,
                                 int64_t width)
{
    const dim3 blocks((unsigned)mt_ceil_div(width, 32), one.out && two.out ? 2 : 1);
    if (!width || (!one.out && !two.out)) return MT_OK;
    mt_add_partials_kernel<R>
        <<<blocks, dim3(32, 32), 0, mt_cuda_stream(stream)>>>(one.out ? one : two, two, width);
    MT_LAUNCHED(stream, op);
    return MT_OK;
}
