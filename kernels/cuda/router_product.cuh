/* The router's three matrix products: Y(i, j) = sum over k, in order, of A(i, k) B(j, k), each term
 * one fused multiply-add in real. An operand is a matrix in place, of its own type, whose lines run
 * along the sum's depth (ALONG) or across it. */
#pragma once

#include "kernels/cuda/element.cuh"

namespace product
{

enum { TILE = 64, DEPTH = 32, PITCH = TILE + 8, THREADS = 128, ROWS = 8, COLS = 4 };

template <typename S> struct operand {
    const S *data;
    int64_t count, line; /* rows i, elements of a line */
    bool vectors;        /* lines are whole aligned vectors */
};

template <typename S> static operand<S> operand_of(const void *data, int64_t count, int64_t line)
{
    bool vectors = ((uintptr_t)data | (uintptr_t)(line * (int64_t)sizeof(S))) % 16 == 0;
    return { (const S *)data, count, line, vectors };
}

/* A thread's part of a tile of TILE rows and DEPTH terms, on its way to shared memory. */
template <typename S, bool ALONG> struct part {
    enum { N = 16 / sizeof(S), VECTORS = DEPTH * TILE / N / THREADS };
    mt_vec<S, N> at[VECTORS];

    /* Row and term of element 0 of vector q. */
    static __device__ __forceinline__ void where(int q, int *i, int *k)
    {
        int id = threadIdx.x + q * THREADS;
        *i = ALONG ? id % TILE : id % (TILE / N) * N;
        *k = ALONG ? id / TILE * N : id / (TILE / N);
    }

    __device__ __forceinline__ void load(const operand<S> &o, int64_t i0, int64_t k0, int64_t end)
    {
#pragma unroll
        for (int q = 0; q < VECTORS; q++) {
            int di, dk;
            where(q, &di, &dk);
            int64_t i = i0 + di, k = k0 + dk, left = ALONG ? end - k : o.count - i;
            const S *from = o.data + (ALONG ? i * o.line + k : k * o.line + i);
            bool there = ALONG ? i < o.count : k < end;
            if (there && o.vectors && left >= N) {
                at[q] = *(const mt_vec<S, N> *)from;
                continue;
            }
#pragma unroll
            for (int j = 0; j < N; j++) at[q].at[j] = there && j < left ? from[j] : S(0.0f);
        }
    }

    __device__ __forceinline__ void store(mt_real<S> tile[DEPTH][PITCH]) const
    {
#pragma unroll
        for (int q = 0; q < VECTORS; q++) {
            int i, k;
            where(q, &i, &k);
            mt_vec<mt_real<S>, N> x;
#pragma unroll
            for (int j = 0; j < N; j++) x.at[j] = mt_get(&at[q].at[j]);
            if (!ALONG) *(mt_vec<mt_real<S>, N> *)&tile[k][i] = x;
#pragma unroll
            for (int j = 0; ALONG && j < N; j++) tile[k + j][i] = x.at[j];
        }
    }
};

/* Blocks: x row tiles, y column tiles, z parts of `split` terms of the depth. */
template <typename A, bool A_ALONG, typename B, bool B_ALONG, typename Put>
static __global__ void __launch_bounds__(THREADS)
    product_kernel(operand<A> a, operand<B> b, int64_t depth, int64_t split, Put put)
{
    typedef mt_real<A> R;
    __shared__ alignas(64) R as[DEPTH][PITCH], bs[DEPTH][PITCH];
    int64_t i0 = (int64_t)blockIdx.x * TILE, j0 = (int64_t)blockIdx.y * TILE;
    int64_t from = blockIdx.z * split, end = min(depth, from + split);
    int row = threadIdx.x / (TILE / COLS) * ROWS, col = threadIdx.x % (TILE / COLS) * COLS;
    part<A, A_ALONG> next_a;
    part<B, B_ALONG> next_b;
    R sum[ROWS][COLS] = {};
    next_a.load(a, i0, from, end);
    next_b.load(b, j0, from, end);
    for (int64_t k0 = from; k0 < end; k0 += DEPTH) {
        __syncthreads();
        next_a.store(as);
        next_b.store(bs);
        __syncthreads();
        next_a.load(a, i0, k0 + DEPTH, end);
        next_b.load(b, j0, k0 + DEPTH, end);
#pragma unroll 8
        for (int k = 0; k < DEPTH; k++) {
            mt_vec<R, ROWS> x = *(const mt_vec<R, ROWS> *)&as[k][row];
            mt_vec<R, COLS> y = *(const mt_vec<R, COLS> *)&bs[k][col];
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLS; j++) sum[i][j] = fma(x.at[i], y.at[j], sum[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (i0 + row + i < a.count && j0 + col < b.count)
            put.template put<COLS>(blockIdx.z, i0 + row + i, j0 + col, sum[i]);
}

/* Where W elements of a row of the product go, W a divisor of COLS and j a multiple of W: Y real
 * [parts, rows, cols]. */
template <typename R> struct put_real {
    R *y;
    int64_t rows, cols;
    bool vectors;
    template <int W>
    __device__ __forceinline__ void put(int64_t z, int64_t i, int64_t j, const R x[W]) const
    {
        R *to = y + (z * rows + i) * cols + j;
        mt_vec<R, W> out;
#pragma unroll
        for (int c = 0; c < W; c++) out.at[c] = x[c];
        if (vectors) *(mt_vec<R, W> *)to = out;
#pragma unroll
        for (int c = 0; c < W; c++)
            if (!vectors && j + c < cols) to[c] = out.at[c];
    }
};

/* Y = add + the product, [rows, cols] of T. */
template <typename T> struct put_sum {
    T *y;
    const T *add; /* NULL: 0; may alias y */
    int64_t cols;
    bool vectors;
    template <int W>
    __device__ __forceinline__ void put(int64_t, int64_t i, int64_t j, const mt_real<T> x[W]) const
    {
        typedef mt_vec<T, W> vec;
        int64_t at = i * cols + j;
        vec out = {};
        if (add && vectors) out = *(const vec *)(add + at);
#pragma unroll
        for (int c = 0; c < W; c++) {
            if (add && !vectors && j + c < cols) out.at[c] = add[at + c];
            mt_put(&out.at[c], (add ? mt_get(&out.at[c]) : 0) + x[c]);
        }
        if (vectors) *(vec *)(y + at) = out;
#pragma unroll
        for (int c = 0; c < W; c++)
            if (!vectors && j + c < cols) y[at + c] = out.at[c];
    }
};

/* Whether COLS elements from a multiple of COLS on lie aligned in rows of `cols` elements of E. */
template <typename E> static bool columns_aligned(const void *p, int64_t cols)
{
    return cols % COLS == 0 && (uintptr_t)p % (COLS * sizeof(E)) == 0;
}

/* Launches the product of a and b, both with rows. */
template <bool A_ALONG, bool B_ALONG, typename A, typename B, typename Put>
static mt_status run(mt_stream *stream, const char *op, operand<A> a, operand<B> b, int64_t depth,
                     int64_t split, const Put &put)
{
    int64_t parts = split < depth ? mt_ceil_div(depth, split) : 1;
    dim3 grid((unsigned)mt_ceil_div(a.count, TILE), (unsigned)mt_ceil_div(b.count, TILE),
              (unsigned)parts);
    product_kernel<A, A_ALONG, B, B_ALONG, Put>
        <<<grid, THREADS, 0, mt_cuda_stream(stream)>>>(a, b, depth, split, put);
    MT_LAUNCHED(stream, op);
    return MT_OK;
}

} /* namespace product */
