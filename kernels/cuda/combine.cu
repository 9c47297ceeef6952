/* The weighted sum of each token's expert outputs, and its backward. Each routed row belongs to
 * exactly one (token, slot), so tokens are independent in both directions. */
#include "kernels/cuda/dots.cuh"
#include "kernels/cuda/rows.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS, 3)
    combine_fwd_kernel(struct mt_combine_fwd_args a)
{
    typedef mt_words<T, N> words;
    const int64_t n = a.width / N, groups = mt_row_groups(n), warps = (int64_t)gridDim.x * WARPS;
    int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    for (; warp < a.tokens * groups; warp += warps) {
        const struct mt_row_place p = mt_row_place_of(warp, groups);
        mt_real<T> sum[N] = { 0 };
        if (p.column >= n) continue;
        mt_add_slots<T, N, true>(sum, (const words *)a.x + p.column, n,
                                 a.position + p.token * a.top_k,
                                 (const mt_real<T> *)a.weights + p.token * a.top_k, a.top_k);
        mt_store((words *)a.y + p.token * n + p.column, mt_close<T, N>(sum));
    }
}

template <typename T>
static mt_status combine_fwd(mt_stream *stream, const struct mt_combine_fwd_args *a)
{
    enum { N = 16 / sizeof(T) };
    if (!a->tokens || !a->width) return MT_OK;
    const void *operands[] = { a->y, a->x };
    bool whole = mt_rows_aligned(operands, 2, a->width * (int64_t)sizeof(T));
    int64_t groups = mt_row_groups(a->width / (whole ? N : 1));
    auto kernel = whole ? combine_fwd_kernel<T, N> : combine_fwd_kernel<T, 1>;
    kernel<<<mt_blocks(stream, a->tokens * groups * 32, THREADS), THREADS, 0,
             mt_cuda_stream(stream)>>>(*a);
    MT_LAUNCHED(stream, "combine_fwd");
    return MT_OK;
}
MT_CUDA_OP(combine_fwd)

/* A warp for each (token, slot): dx = w dy of its row, and <dy, x>. The warps of a token's slots
 * are neighbours, so that dy is read from memory once. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS, 4)
    combine_bwd_kernel(struct mt_combine_bwd_args a)
{
    typedef mt_words<T, N> words;
    enum { AHEAD = 3 };
    const int64_t n = a.width / N, warps = (int64_t)gridDim.x * WARPS, slots = a.tokens * a.top_k;
    const uint32_t top_k = (uint32_t)a.top_k;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; i < slots; i += warps) {
        const int64_t row = a.position[i];
        const words *dy = (const words *)a.dy + (uint32_t)i / top_k * n,
                    *x = (const words *)a.x + row * n;
        words *dx = (words *)a.dx + row * n;
        const mt_real<T> w = ((const mt_real<T> *)a.weights)[i];
        mt_real<T> dot = 0;
        for (int64_t base = threadIdx.x % 32; row >= 0 && base < n; base += 32 * AHEAD) {
            words g[AHEAD], z[AHEAD];
#pragma unroll
            for (int s = 0; s < AHEAD; s++)
                if (base + s * 32 < n) g[s] = dy[base + s * 32], z[s] = x[base + s * 32];
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                mt_real<T> e[N], f[N], out[N];
                if (base + s * 32 >= n) continue;
                mt_open<T, N>(e, g[s]), mt_open<T, N>(f, z[s]);
#pragma unroll
                for (int j = 0; j < N; j++) out[j] = w * e[j], dot += e[j] * f[j];
                mt_store(dx + base + s * 32, mt_close<T, N>(out));
            }
        }
        dot = mt_warp_sum(dot);
        if (threadIdx.x % 32 == 0) ((mt_real<T> *)a.dweights)[i] = dot;
    }
}

/* <dy, x> alone. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS, 3) dots_kernel(struct mt_combine_bwd_args a)
{
    typedef mt_words<T, N> words;
    enum { AHEAD = 6 };
    const int64_t n = a.width / N, warps = (int64_t)gridDim.x * WARPS, slots = a.tokens * a.top_k;
    const uint32_t top_k = (uint32_t)a.top_k;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; i < slots; i += warps) {
        const int64_t row = a.position[i];
        const words *dy = (const words *)a.dy + (uint32_t)i / top_k * n,
                    *x = (const words *)a.x + row * n;
        mt_real<T> dot = 0;
        for (int64_t base = threadIdx.x % 32; row >= 0 && base < n; base += 32 * AHEAD) {
            words g[AHEAD], z[AHEAD];
#pragma unroll
            for (int s = 0; s < AHEAD; s++)
                if (base + s * 32 < n) g[s] = dy[base + s * 32], z[s] = x[base + s * 32];
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                mt_real<T> e[N], f[N];
                if (base + s * 32 >= n) continue;
                mt_open<T, N>(e, g[s]), mt_open<T, N>(f, z[s]);
#pragma unroll
                for (int j = 0; j < N; j++) dot += e[j] * f[j];
            }
        }
        dot = mt_warp_sum(dot);
        if (threadIdx.x % 32 == 0) ((mt_real<T> *)a.dweights)[i] = dot;
    }
}

/* dx alone. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) spread_kernel(struct mt_combine_bwd_args a)
{
    typedef mt_words<T, N> words;
    mt_spread_rows<T, N, true>((words *)a.dx, (const words *)a.dy, a.tokens, a.width / N,
                               a.position, (const mt_real<T> *)a.weights, a.top_k);
}

template <typename T, int N>
static mt_status launch_combine_bwd(mt_stream *stream, const struct mt_combine_bwd_args *a)
{
    cudaStream_t on = mt_cuda_stream(stream);
    const unsigned spreaders = mt_spread_blocks(a->tokens, a->width / N, WARPS);
    const unsigned blocks = mt_blocks(stream, a->tokens * a->top_k * 32, THREADS);
    auto kernel = a->dx ? combine_bwd_kernel<T, N> : dots_kernel<T, N>;
    if (a->dweights && blocks)
        kernel<<<blocks, THREADS, 0, on>>>(*a);
    else if (!a->dweights && spreaders)
        spread_kernel<T, N><<<spreaders, THREADS, 0, on>>>(*a);
    MT_LAUNCHED(stream, "combine_bwd");
    return MT_OK;
}

template <typename T>
static mt_status combine_bwd(mt_stream *stream, const struct mt_combine_bwd_args *a)
{
    if (!a->tokens) return MT_OK;
    const void *operands[] = { a->dx, a->dy, a->x };
    return mt_rows_aligned(operands, 3, a->width * (int64_t)sizeof(T))
               ? launch_combine_bwd<T, 16 / sizeof(T)>(stream, a)
               : launch_combine_bwd<T, 1>(stream, a);
}
MT_CUDA_OP(combine_bwd)

/* A warp for each (token, slot): <du, u> of its row, over the weight. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) weights_bwd_kernel(struct mt_weights_bwd_args a)
{
    typedef mt_vec<T, N> vec;
    enum { AHEAD = 4 };
    int64_t n = a.width / N, warps = (int64_t)gridDim.x * WARPS, slots = a.tokens * a.top_k;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; i < slots; i += warps) {
        int64_t row = a.position[i];
        mt_real<T> dot = 0, w = a.weights ? ((const mt_real<T> *)a.weights)[i] : 1;
        const vec *du = (const vec *)a.dz + (2 * row + 1) * n,
                  *u = (const vec *)a.z + (2 * row + 1) * n;
        for (int64_t base = threadIdx.x % 32; row >= 0 && base < n; base += 32 * AHEAD) {
            vec d[AHEAD], z[AHEAD];
#pragma unroll
            for (int s = 0; s < AHEAD; s++)
                if (base + s * 32 < n) d[s] = du[base + s * 32], z[s] = u[base + s * 32];
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                if (base + s * 32 >= n) continue;
#pragma unroll
                for (int j = 0; j < N; j++) dot += mt_get(&d[s].at[j]) * mt_get(&z[s].at[j]);
            }
        }
        dot = mt_warp_sum(dot);
        if (threadIdx.x % 32 == 0) ((mt_real<T> *)a.dweights)[i] = row >= 0 && w != 0 ? dot / w : 0;
    }
}

/* The same of bf16, in the order of dots.cuh: a lane has eight columns, eight lanes a part. */
static __global__ void __launch_bounds__(THREADS) weigh_rows_kernel(struct mt_weights_bwd_args a)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t n = a.width / 8, warps = (int64_t)gridDim.x * WARPS, slots = a.tokens * a.top_k;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; i < slots; i += warps) {
        const int64_t row = a.position[i];
        const float w = a.weights ? ((const float *)a.weights)[i] : 1;
        const uint4 *du = (const uint4 *)a.dz + (2 * row + 1) * n,
                    *u = (const uint4 *)a.z + (2 * row + 1) * n;
        float dot = 0;
#pragma unroll 4
        for (int64_t base = 0; row >= 0 && base < n; base += 32) {
            const int64_t c = base + lane;
            float s = c < n ? mt_dot_of_eight(du[c], u[c]) : 0;
#pragma unroll
            for (int mask = 1; mask < 8; mask *= 2) s += __shfl_xor_sync(~0u, s, mask);
#pragma unroll
            for (int from = 0; from < 32; from += 8) {
                const float part = __shfl_sync(~0u, s, from);
                if (base + from < n) dot += part;
            }
        }
        if (lane == 0) ((float *)a.dweights)[i] = row >= 0 && w != 0 ? dot / w : 0;
    }
}

static __global__ void __launch_bounds__(THREADS)
    weights_of_dots_kernel(struct mt_weights_bwd_args a, const float *dots)
{
    const int64_t parts = mt_dot_parts(a.width);
    MT_GRID_STRIDE(i, a.tokens * a.top_k)
    {
        const int64_t row = a.position[i];
        const float w = a.weights ? ((const float *)a.weights)[i] : 1, *of = dots + row * parts;
        float dot = 0;
#pragma unroll 4
        for (int64_t p = 0; row >= 0 && p < parts; p++) dot += of[p];
        ((float *)a.dweights)[i] = row >= 0 && w != 0 ? dot / w : 0;
    }
}

extern "C" mt_status mt_cuda_weights_of_dots(mt_stream *stream, const struct mt_weights_bwd_args *a,
                                             const float *dots)
{
    const int64_t slots = a->tokens * a->top_k;
    if (!slots) return MT_OK;
    weights_of_dots_kernel<<<mt_blocks(stream, slots, THREADS), THREADS, 0,
                             mt_cuda_stream(stream)>>>(*a, dots);
    MT_LAUNCHED(stream, "weights_bwd of dots");
    return MT_OK;
}

template <typename T>
static mt_status weights_bwd(mt_stream *stream, const struct mt_weights_bwd_args *a)
{
    if (!a->tokens) return MT_OK;
    unsigned blocks = mt_blocks(stream, a->tokens * a->top_k * 32, THREADS);
    const void *operands[] = { a->dz, a->z };
    cudaStream_t on = mt_cuda_stream(stream);
    const bool whole = mt_rows_aligned(operands, 2, a->width * (int64_t)sizeof(T));
    if (whole && std::is_same<T, mt_bf16>::value)
        weigh_rows_kernel<<<blocks, THREADS, 0, on>>>(*a);
    else if (whole)
        weights_bwd_kernel<T, 16 / sizeof(T)><<<blocks, THREADS, 0, on>>>(*a);
    else
        weights_bwd_kernel<T, 1><<<blocks, THREADS, 0, on>>>(*a);
    MT_LAUNCHED(stream, "weights_bwd");
    return MT_OK;
}
MT_CUDA_OP(weights_bwd)
