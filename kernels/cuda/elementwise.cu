/* Elementwise ops, SwiGLU, embedding. */
#include "kernels/cuda/element.cuh"

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

template <typename T, typename X>
static __global__ void cast_kernel(T *y, const X *x, int64_t count)
{
    MT_GRID_STRIDE(i, count) convert(y + i, x[i]);
}

template <typename T, typename X>
static void cast_from(mt_stream *stream, const struct mt_cast_args *a)
{
    cast_kernel<T, X><<<mt_blocks(stream, a->count, THREADS), THREADS, 0, mt_cuda_stream(stream)>>>(
        (T *)a->y, (const X *)a->x, a->count);
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
 */

static __device__ __forceinline__ int64_t rows_of(int64_t rows, const int64_t *rows_used)
{
    return rows_used && *rows_used < rows ? *rows_used : rows;
}

template <typename T> static __global__ void swiglu_fwd_kernel(struct mt_swiglu_fwd_args a)
{
    int64_t width = a.width, count = rows_of(a.rows, a.rows_used) * width;
    MT_GRID_STRIDE(i, count)
    {
        const T *gate = (const T *)a.x + i / width * 2 * width + i % width;
        mt_real<T> g = mt_get(gate);
        mt_put((T *)a.y + i, g / (1 + exp(-g)) * mt_get(gate + width));
    }
}

template <typename T>
static mt_status swiglu_fwd(mt_stream *stream, const struct mt_swiglu_fwd_args *a)
{
    if (!a->rows || !a->width) return MT_OK;
    swiglu_fwd_kernel<T>
        <<<mt_blocks(stream, a->rows * a->width, THREADS), THREADS, 0, mt_cuda_stream(stream)>>>(
            *a);
    MT_LAUNCHED(stream, "swiglu_fwd");
    return MT_OK;
}
MT_CUDA_OP(swiglu_fwd)

template <typename T> static __global__ void swiglu_bwd_kernel(struct mt_swiglu_bwd_args a)
{
    int64_t width = a.width, count = rows_of(a.rows, a.rows_used) * width;
    MT_GRID_STRIDE(i, count)
    {
        int64_t at = i / width * 2 * width + i % width;
        mt_real<T> g = mt_get((const T *)a.x + at), u = mt_get((const T *)a.x + at + width);
        mt_real<T> dy = mt_get((const T *)a.dy + i), s = 1 / (1 + exp(-g));
        mt_put((T *)a.dx + at, dy * u * s * (1 + g * (1 - s)));
        mt_put((T *)a.dx + at + width, dy * g * s);
    }
}

template <typename T>
static mt_status swiglu_bwd(mt_stream *stream, const struct mt_swiglu_bwd_args *a)
{
    if (!a->rows || !a->width) return MT_OK;
    swiglu_bwd_kernel<T>
        <<<mt_blocks(stream, a->rows * a->width, THREADS), THREADS, 0, mt_cuda_stream(stream)>>>(
            *a);
    MT_LAUNCHED(stream, "swiglu_bwd");
    return MT_OK;
}
MT_CUDA_OP(swiglu_bwd)

/* ---- embedding --------------------------------------------------------------------------------
 */

template <typename T> static __global__ void embedding_fwd_kernel(struct mt_embedding_fwd_args a)
{
    const mt_real<T> *w = (const mt_real<T> *)a.w;
    MT_GRID_STRIDE(i, a.tokens_count * a.width)
    {
        mt_put((T *)a.y + i, w[a.tokens[i / a.width] * a.width + i % a.width]);
    }
}

template <typename T>
static mt_status embedding_fwd(mt_stream *stream, const struct mt_embedding_fwd_args *a)
{
    if (!a->tokens_count || !a->width) return MT_OK;
    embedding_fwd_kernel<T><<<mt_blocks(stream, a->tokens_count * a->width, THREADS), THREADS, 0,
                              mt_cuda_stream(stream)>>>(*a);
    MT_LAUNCHED(stream, "embedding_fwd");
    return MT_OK;
}
MT_CUDA_OP(embedding_fwd)

/* A block for each token; the block of a row's first token adds all tokens of that row, in order.
 * Each thread keeps COLUMNS columns in registers and so passes over the tokens once for every
 * THREADS * COLUMNS columns. */
template <typename T> static __global__ void embedding_bwd_kernel(struct mt_embedding_bwd_args a)
{
    enum { COLUMNS = 8 };
    __shared__ int64_t tokens[THREADS];
    __shared__ int found;
    int64_t first = blockIdx.x;
    int32_t row = a.tokens[first];
    bool earlier = false;
    for (int64_t t = threadIdx.x; t < first && !earlier; t += THREADS) earlier = a.tokens[t] == row;
    if (__syncthreads_or(earlier)) return;
    mt_real<T> *dw = (mt_real<T> *)a.dw + row * a.width;
    for (int64_t from = threadIdx.x; from - threadIdx.x < a.width; from += THREADS * COLUMNS) {
        mt_real<T> sum[COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            int64_t c = from + j * THREADS;
            sum[j] = a.accumulate && c < a.width ? dw[c] : 0;
        }
        for (int64_t base = first; base < a.tokens_count; base += THREADS) {
            int64_t t = base + threadIdx.x;
            bool mine = t < a.tokens_count && a.tokens[t] == row;
            /* the places of this row's tokens, in order: warps one after another */
            if (threadIdx.x == 0) found = 0;
            for (int warp = 0; warp < THREADS / 32; warp++) {
                __syncthreads();
                if (threadIdx.x / 32 != warp) continue;
                unsigned lanes = __ballot_sync(~0u, mine);
                int at = found;
                __syncwarp();
                if (mine) tokens[at + __popc(lanes & ((1u << threadIdx.x % 32) - 1))] = t;
                if (threadIdx.x % 32 == 0) found = at + __popc(lanes);
            }
            __syncthreads();
            for (int i = 0; i < found; i++) {
                const T *dy = (const T *)a.dy + tokens[i] * a.width;
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
                    int64_t c = from + j * THREADS;
                    if (c < a.width) sum[j] += mt_get(dy + c);
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            int64_t c = from + j * THREADS;
            if (c < a.width) dw[c] = sum[j];
        }
    }
}

template <typename T>
static mt_status embedding_bwd(mt_stream *stream, const struct mt_embedding_bwd_args *a)
{
    cudaStream_t on = mt_cuda_stream(stream);
    size_t bytes = (size_t)(a->vocab * a->width) * sizeof(mt_real<T>);
    if (!a->accumulate && bytes) MT_CUDA(cudaMemsetAsync(a->dw, 0, bytes, on));
    if (a->tokens_count && a->width)
        embedding_bwd_kernel<T><<<(unsigned)a->tokens_count, THREADS, 0, on>>>(*a);
    MT_LAUNCHED(stream, "embedding_bwd");
    return MT_OK;
}
MT_CUDA_OP(embedding_bwd)
