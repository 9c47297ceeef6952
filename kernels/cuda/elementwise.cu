/* Elementwise ops, SwiGLU, embedding. */
#include <cuda_fp16.h>

#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/swiglu.cuh"

enum { THREADS = 256 };

/* ---- fill, cast, add --------------------------------------------------------------------------
 */

template <typename T> static __global__ void fill_kernel(T *y, int64_t count, T value)
{
    MT_GRID_STRIDE(i, count) y[i] = value;
}

template <typename T> static mt_status fill(mt_stream *stream, const struct mt_fill_args *a)
{
    if (!a->count) return MT_OK;
    T value;
    mt_store_f64(&value, mt_dtype_of<T>::value, 0, a->value);
    fill_kernel<<<mt_blocks(stream, a->count, THREADS), THREADS, 0, mt_cuda_stream(stream)>>>(
        (T *)a->y, a->count, value);
    MT_LAUNCHED(stream, "fill");
    return MT_OK;
}
MT_CUDA_OP(fill)

/* x as the type of y, one rounding: through f32 to bf16, as mt_store_f64 does. */
template <typename T, typename X> static __device__ __forceinline__ void convert(T *y, X x)
{
    mt_put(y, (mt_real<T>)x);
}
template <typename T> static __device__ __forceinline__ void convert(T *y, mt_bf16 x)
{
    mt_put(y, (mt_real<T>)__bfloat162float(x));
}
template <typename T> static __device__ __forceinline__ void convert(T *y, __half x)
{
    mt_put(y, (mt_real<T>)__half2float(x));
}

/* Four elements at a time where `fours` says that the pointers allow it, the rest one by one. */
template <typename T, typename X>
static __global__ void cast_kernel(T *y, const X *x, int64_t count, int64_t fours)
{
    MT_GRID_STRIDE(i, fours)
    {
        mt_vec<X, 4> in = ((const mt_vec<X, 4> *)x)[i];
        mt_vec<T, 4> out;
#pragma unroll
        for (int j = 0; j < 4; j++) convert(&out.at[j], in.at[j]);
        ((mt_vec<T, 4> *)y)[i] = out;
    }
    for (int64_t i = fours * 4 + (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x)
        convert(y + i, x[i]);
}

template <typename T, typename X>
static void cast_from(mt_stream *stream, const struct mt_cast_args *a)
{
    bool aligned = (uintptr_t)a->x % (4 * sizeof(X)) == 0 && (uintptr_t)a->y % (4 * sizeof(T)) == 0;
    int64_t fours = aligned ? a->count / 4 : 0;
    unsigned blocks = mt_blocks(stream, fours ? fours : a->count, THREADS);
    cast_kernel<T, X><<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>((T *)a->y, (const X *)a->x,
                                                                      a->count, fours);
}

template <typename T> static mt_status cast(mt_stream *stream, const struct mt_cast_args *a)
{
    static void (*const from[MT_F16 + 1])(mt_stream *, const struct mt_cast_args *) = {
        cast_from<T, double>, cast_from<T, float>, cast_from<T, mt_bf16>, cast_from<T, __half>
    };
    static_assert(MT_F64 == 0 && MT_F32 == 1 && MT_BF16 == 2 && MT_F16 == 3, "the order of `from`");
    if (!a->count) return MT_OK;
    from[a->x_dtype](stream, a);
    MT_LAUNCHED(stream, "cast");
    return MT_OK;
}
MT_CUDA_OP(cast)

/* Whole vectors of 16 bytes where `vectors` says that the pointers allow it, the rest one by one.
 */
template <typename T>
static __global__ void add_kernel(T *y, const T *a, const T *b, int64_t count, int64_t vectors)
{
    enum { N = 16 / sizeof(T) };
    typedef mt_vec<T, N> vec;
    MT_GRID_STRIDE(i, vectors)
    {
        vec x = ((const vec *)a)[i], z = ((const vec *)b)[i], sum;
#pragma unroll
        for (int j = 0; j < N; j++) mt_put(&sum.at[j], mt_get(&x.at[j]) + mt_get(&z.at[j]));
        ((vec *)y)[i] = sum;
    }
    for (int64_t i = vectors * N + (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x)
        mt_put(y + i, mt_get(a + i) + mt_get(b + i));
}

template <typename T> static mt_status add(mt_stream *stream, const struct mt_add_args *a)
{
    if (!a->count) return MT_OK;
    bool aligned = ((uintptr_t)a->y | (uintptr_t)a->a | (uintptr_t)a->b) % 16 == 0;
    int64_t n = 16 / sizeof(T), vectors = aligned ? a->count / n : 0;
    unsigned blocks = mt_blocks(stream, vectors ? vectors : a->count, THREADS);
    add_kernel<T><<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(
        (T *)a->y, (const T *)a->a, (const T *)a->b, a->count, vectors);
    MT_LAUNCHED(stream, "add");
    return MT_OK;
}
MT_CUDA_OP(add)

/* ---- SwiGLU -----------------------------------------------------------------------------------
 * A warp for each row: no division finds its place. */

enum { WARPS = THREADS / 32, AHEAD = 2 };

static __device__ __forceinline__ int64_t rows_of(int64_t rows, const int64_t *rows_used)
{
    return rows_used && *rows_used < rows ? *rows_used : rows;
}
static __device__ __forceinline__ int64_t first_warp()
{
    return ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) swiglu_fwd_kernel(struct mt_swiglu_fwd_args a)
{
    typedef mt_vec<T, N> vec;
    int64_t n = a.width / N, rows = rows_of(a.rows, a.rows_used);
    for (int64_t r = first_warp(); r < rows; r += (int64_t)gridDim.x * WARPS) {
        const vec *gate = (const vec *)a.x + r * 2 * n, *up = gate + n;
        vec *y = (vec *)a.y + r * n;
        for (int64_t base = threadIdx.x % 32; base < n; base += 32 * AHEAD) {
            vec g[AHEAD], u[AHEAD];
#pragma unroll
            for (int s = 0; s < AHEAD; s++)
                if (base + s * 32 < n) g[s] = gate[base + s * 32], u[s] = up[base + s * 32];
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                if (base + s * 32 >= n) continue;
                vec out;
#pragma unroll
                for (int j = 0; j < N; j++)
                    mt_put(&out.at[j], mt_swiglu_of<T>(mt_get(&g[s].at[j]), mt_get(&u[s].at[j])));
                y[base + s * 32] = out;
            }
        }
    }
}

template <typename T>
static mt_status swiglu_fwd(mt_stream *stream, const struct mt_swiglu_fwd_args *a)
{
    if (!a->rows || !a->width) return MT_OK;
    unsigned blocks = mt_blocks(stream, a->rows * 32, THREADS);
    const void *operands[] = { a->y, a->x };
    cudaStream_t on = mt_cuda_stream(stream);
    if (mt_rows_aligned(operands, 2, a->width * (int64_t)sizeof(T)))
        swiglu_fwd_kernel<T, 16 / sizeof(T)><<<blocks, THREADS, 0, on>>>(*a);
    else
        swiglu_fwd_kernel<T, 1><<<blocks, THREADS, 0, on>>>(*a);
    MT_LAUNCHED(stream, "swiglu_fwd");
    return MT_OK;
}
MT_CUDA_OP(swiglu_fwd)

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) swiglu_bwd_kernel(struct mt_swiglu_bwd_args a)
{
    typedef mt_vec<T, N> vec;
    int64_t n = a.width / N, rows = rows_of(a.rows, a.rows_used);
    for (int64_t r = first_warp(); r < rows; r += (int64_t)gridDim.x * WARPS) {
        const vec *gate = (const vec *)a.x + r * 2 * n, *up = gate + n;
        const vec *dy = (const vec *)a.dy + r * n;
        vec *dgate = (vec *)a.dx + r * 2 * n, *dup = dgate + n;
        for (int64_t base = threadIdx.x % 32; base < n; base += 32 * AHEAD) {
            vec g[AHEAD], u[AHEAD], d[AHEAD];
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                int64_t c = base + s * 32;
                if (c < n) g[s] = gate[c], u[s] = up[c], d[s] = dy[c];
            }
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                if (base + s * 32 >= n) continue;
                vec out_g, out_u;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    mt_real<T> dg, du;
                    mt_swiglu_gradient<T>(&dg, &du, mt_get(&d[s].at[j]), mt_get(&g[s].at[j]),
                                          mt_get(&u[s].at[j]));
                    mt_put(&out_g.at[j], dg);
                    mt_put(&out_u.at[j], du);
                }
                dgate[base + s * 32] = out_g, dup[base + s * 32] = out_u;
            }
        }
    }
}

template <typename T>
static mt_status swiglu_bwd(mt_stream *stream, const struct mt_swiglu_bwd_args *a)
{
    if (!a->rows || !a->width) return MT_OK;
    unsigned blocks = mt_blocks(stream, a->rows * 32, THREADS);
    const void *operands[] = { a->dx, a->dy, a->x };
    cudaStream_t on = mt_cuda_stream(stream);
    if (mt_rows_aligned(operands, 3, a->width * (int64_t)sizeof(T)))
        swiglu_bwd_kernel<T, 16 / sizeof(T)><<<blocks, THREADS, 0, on>>>(*a);
    else
        swiglu_bwd_kernel<T, 1><<<blocks, THREADS, 0, on>>>(*a);
    MT_LAUNCHED(stream, "swiglu_bwd");
    return MT_OK;
}
MT_CUDA_OP(swiglu_bwd)

/* ---- embedding --------------------------------------------------------------------------------
 */

/* A warp for each token, N reals of its row at a time. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    embedding_fwd_kernel(struct mt_embedding_fwd_args a)
{
    enum { LOADS = 4 };
    typedef mt_vec<mt_real<T>, N> source;
    typedef mt_vec<T, N> vec;
    int64_t n = a.width / N;
    for (int64_t t = first_warp(); t < a.tokens_count; t += (int64_t)gridDim.x * WARPS) {
        const source *w = (const source *)a.w + a.tokens[t] * n;
        vec *y = (vec *)a.y + t * n;
        for (int64_t base = threadIdx.x % 32; base < n; base += 32 * LOADS) {
            source in[LOADS];
#pragma unroll
            for (int s = 0; s < LOADS; s++)
                if (base + s * 32 < n) in[s] = w[base + s * 32];
#pragma unroll
            for (int s = 0; s < LOADS; s++) {
                if (base + s * 32 >= n) continue;
                vec out;
#pragma unroll
                for (int j = 0; j < N; j++) mt_put(&out.at[j], in[s].at[j]);
                y[base + s * 32] = out;
            }
        }
    }
}

template <typename T>
static mt_status embedding_fwd(mt_stream *stream, const struct mt_embedding_fwd_args *a)
{
    if (!a->tokens_count || !a->width) return MT_OK;
    enum { N = 16 / sizeof(mt_real<T>) };
    unsigned blocks = mt_blocks(stream, a->tokens_count * 32, THREADS);
    cudaStream_t on = mt_cuda_stream(stream);
    bool aligned =
        a->width % N == 0 && (uintptr_t)a->w % 16 == 0 && (uintptr_t)a->y % (N * sizeof(T)) == 0;
    if (aligned)
        embedding_fwd_kernel<T, N><<<blocks, THREADS, 0, on>>>(*a);
    else
        embedding_fwd_kernel<T, 1><<<blocks, THREADS, 0, on>>>(*a);
    MT_LAUNCHED(stream, "embedding_fwd");
    return MT_OK;
}
MT_CUDA_OP(embedding_fwd)

/* Adds the rows of `count` tokens, N columns from dy on, in order; loads running ROWS ahead. */
template <typename T, int N>
static __device__ __forceinline__ void add_tokens(mt_real<T> *sum, const T *dy, int64_t width,
                                                  const int32_t *tokens, int count)
{
    enum { ROWS = 8 };
    for (int first = 0; first < count; first += ROWS) {
        mt_words<T, N> in[ROWS];
        mt_real<T> e[N];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (first + i < count) in[i] = mt_ask<N>(dy + tokens[first + i] * width);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (first + i >= count) continue;
            mt_open<T, N>(e, in[i]);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += e[j];
        }
    }
}

/* A block for each token and THREADS * N columns; that of a row's first token adds all tokens of
 * the row, in order. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    embedding_bwd_kernel(struct mt_embedding_bwd_args a)
{
    __shared__ int32_t tokens[THREADS];
    __shared__ int before[WARPS];
    const int64_t first = blockIdx.x, from = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * N;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t row = a.tokens[first];
    bool earlier = false, later = false;
#pragma unroll 8
    for (int64_t t = threadIdx.x; t < a.tokens_count; t += THREADS) {
        bool same = a.tokens[t] == row;
        earlier |= same && t < first;
        later |= same && t > first;
    }
    if (__syncthreads_or(earlier)) return;
    const bool alone = !__syncthreads_or(later), mine = from < a.width;
    mt_real<T> *dw = (mt_real<T> *)a.dw + row * a.width + from, sum[N] = { 0 };
    const T *dy = (const T *)a.dy + from;
    if (a.accumulate && mine) mt_get_vec<N>(sum, dw);
    if (alone) {
        const int32_t only = (int32_t)first;
        if (mine) add_tokens<T, N>(sum, dy, a.width, &only, 1);
    }
    for (int64_t base = first; base < a.tokens_count && !alone; base += THREADS) {
        int64_t t = base + threadIdx.x;
        bool same = t < a.tokens_count && a.tokens[t] == row;
        /* also: everyone has read the list of the last round */
        if (!__syncthreads_or(same)) continue;
        unsigned lanes = __ballot_sync(~0u, same);
        if (lane == 0) before[warp] = __popc(lanes);
        __syncthreads();
        int at = 0, count = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) at += before[w];
            count += before[w];
        }
        if (same) tokens[at + __popc(lanes & ((1u << lane) - 1))] = (int32_t)t;
        __syncthreads();
        if (mine) add_tokens<T, N>(sum, dy, a.width, tokens, count);
    }
    if (mine) mt_put_vec<N>(dw, sum);
}

template <typename T>
static mt_status embedding_bwd(mt_stream *stream, const struct mt_embedding_bwd_args *a)
{
    enum { N = 16 / sizeof(T) };
    cudaStream_t on = mt_cuda_stream(stream);
    size_t bytes = (size_t)(a->vocab * a->width) * sizeof(mt_real<T>);
    if (!a->accumulate && bytes) MT_CUDA(cudaMemsetAsync(a->dw, 0, bytes, on));
    const void *operands[] = { a->dw, a->dy };
    bool whole = mt_rows_aligned(operands, 2, a->width * (int64_t)sizeof(T));
    dim3 grid((unsigned)a->tokens_count,
              (unsigned)mt_ceil_div(a->width, THREADS * (whole ? (int)N : 1)));
    auto kernel = whole ? embedding_bwd_kernel<T, N> : embedding_bwd_kernel<T, 1>;
    if (grid.x && grid.y) kernel<<<grid, THREADS, 0, on>>>(*a);
    MT_LAUNCHED(stream, "embedding_bwd");
    return MT_OK;
}
MT_CUDA_OP(embedding_bwd)
