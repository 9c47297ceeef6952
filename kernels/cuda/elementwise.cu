/* Elementwise ops, SwiGLU, embedding. */
#include <cuda_fp16.h>

#include "kernels/cuda/copies.cuh"
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

/* A block of the backward pass owns the rows whose number ends in its bits, and PART bytes of dy's
 * columns. It reads all tokens, SPAN at a time, and keeps those of its rows in a list; before the
 * list can overflow, and at the end, it sorts it by rows and adds it to them. Half a warp adds a
 * row's tokens; those of a row with more than FEW of them the whole block brings to shared memory,
 * ROWS of them a stage, where a thread for each column adds them. */
enum { LIST = 1536, SPAN = 1024, PART = 256, LANES = 16 };
enum { FEW = 16, ROWS = THREADS / LANES, STAGES = 6 };

/* A token of the list: where it is, and its row of dw. */
struct listed {
    int32_t at, row;
};

template <typename T> struct embedding_room {
    enum { COLUMNS = PART / sizeof(T) };
    listed list[LIST];
    alignas(16) T stages[STAGES][ROWS][COLUMNS];
    int32_t many[LIST / FEW];
    int many_count, before[WARPS];
};

/* Appends the tokens from `base` on whose row ends in `mine`, in order; returns what the list has
 * then. Starts and ends with the list as all threads see it. */
static __device__ __forceinline__ int list_span(listed *list, int *before, int count,
                                                const int32_t span[SPAN / THREADS], int64_t base,
                                                int32_t mine, int32_t mask, int64_t tokens)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned lanes[SPAN / THREADS];
    int at = count, found = 0;
    base += warp * (SPAN / WARPS) + lane;
#pragma unroll
    for (int k = 0; k < SPAN / THREADS; k++) {
        lanes[k] = __ballot_sync(~0u, base + k * 32 < tokens && (span[k] & mask) == mine);
        found += __popc(lanes[k]);
    }
    if (lane == 0) before[warp] = found;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) at += before[w];
        count += before[w];
    }
#pragma unroll
    for (int k = 0; k < SPAN / THREADS; k++) {
        if (lanes[k] >> lane & 1)
            list[at + __popc(lanes[k] & ((1u << lane) - 1))] = { (int32_t)(base + k * 32),
                                                                 span[k] };
        at += __popc(lanes[k]);
    }
    __syncthreads();
    return count;
}

/* By rows, those of a row in their order: each counts who comes before it. A thread has at most
 * MOST of them. */
template <int MOST> static __device__ __forceinline__ void sort_list(listed *list, int count)
{
    listed mine[MOST];
    int place[MOST] = {};
    bool one_row = true;
#pragma unroll
    for (int k = 0; k < MOST; k++) {
        const int i = k * THREADS + threadIdx.x;
        mine[k] = list[i < count ? i : 0];
        one_row &= mine[k].row == list[0].row;
    }
    if (__syncthreads_and(one_row)) return;
    for (int j = 0; j < count; j++) {
        const int32_t row = list[j].row;
#pragma unroll
        for (int k = 0; k < MOST; k++) {
            const bool before = j < k * THREADS + (int)threadIdx.x;
            place[k] += before ? row <= mine[k].row : row < mine[k].row;
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < MOST; k++)
        if (k * THREADS + (int)threadIdx.x < count) list[place[k]] = mine[k];
    __syncthreads();
}

/* The columns of a part that a lane has: PIECES of N, LANES * N apart. */
template <typename T, int N> struct lane_columns {
    enum { PIECES = 16 / sizeof(T) / N, AHEAD = N > 1 ? 4 : 1 };
};

/* A row's tokens, of which there are at most FEW, by the lanes of half a warp. */
template <typename T, int N>
static __device__ __forceinline__ void add_few(mt_real<T> *dw, const T *dy, int64_t width,
                                               int64_t from, const listed *list, int count,
                                               bool fresh)
{
    enum { PIECES = lane_columns<T, N>::PIECES, AHEAD = lane_columns<T, N>::AHEAD };
    mt_real<T> sum[PIECES][N] = {}, e[N];
    from += threadIdx.x % LANES * N;
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        if (!fresh && from + p * LANES * N < width)
            mt_get_vec<N>(sum[p], dw + from + p * LANES * N);
    for (int first = 0; first < count; first += AHEAD) {
        mt_words<T, N> in[AHEAD][PIECES];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int p = 0; p < PIECES; p++)
                if (first + i < count && from + p * LANES * N < width)
                    in[i][p] = mt_ask<N>(dy + list[first + i].at * width + from + p * LANES * N);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                if (first + i >= count || from + p * LANES * N >= width) continue;
                mt_open<T, N>(e, in[i][p]);
#pragma unroll
                for (int j = 0; j < N; j++) sum[p][j] += e[j];
            }
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        if (from + p * LANES * N < width) mt_put_vec<N>(dw + from + p * LANES * N, sum[p]);
}

/* Asks for a stage of a row's tokens: LANES threads for each. */
template <typename T, int N>
static __device__ __forceinline__ void bring_rows(T (*stage)[PART / sizeof(T)], const T *dy,
                                                  int64_t width, int64_t from, const listed *list,
                                                  int count)
{
    enum { PIECES = lane_columns<T, N>::PIECES };
    const int r = threadIdx.x / LANES, c = threadIdx.x % LANES * N;
    if (r < count) {
        const T *x = dy + list[r].at * width + from + c;
        T one[PIECES]; /* of a size that no copy has */
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            if (from + c + p * LANES * N >= width) continue;
            if constexpr (N * sizeof(T) >= 4)
                mt_copy_ask<N * sizeof(T)>(&stage[r][c + p * LANES * N], x + p * LANES * N,
                                           N * sizeof(T));
            else
                one[p] = x[p * LANES];
        }
        if constexpr (N * sizeof(T) < 4)
#pragma unroll
            for (int p = 0; p < PIECES; p++) stage[r][c + p * LANES] = one[p];
    }
    mt_copies_group();
}

/* A row's tokens by the whole block. */
template <typename T, int N>
static __device__ __forceinline__ void add_many(embedding_room<T> &room, mt_real<T> *dw,
                                                const T *dy, int64_t width, int64_t from,
                                                const listed *list, int count, bool fresh)
{
    const int c = threadIdx.x;
    const bool adds = c < embedding_room<T>::COLUMNS && from + c < width;
    mt_real<T> sum = adds && !fresh ? dw[from + c] : 0;
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++)
        bring_rows<T, N>(room.stages[s], dy, width, from, list + s * ROWS, count - s * ROWS);
    int stage = 0;
    for (int first = 0; first < count; first += ROWS) {
        const int next = first + (STAGES - 1) * ROWS, free = stage ? stage - 1 : STAGES - 1;
        mt_copies_wait<STAGES - 2>();
        __syncthreads(); /* also: everyone has added the stage that is brought next */
        bring_rows<T, N>(room.stages[free], dy, width, from, list + next, count - next);
        if (adds && first + ROWS <= count) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum += mt_get(&room.stages[stage][r][c]);
        } else if (adds) {
            for (int r = 0; r < count - first; r++) sum += mt_get(&room.stages[stage][r][c]);
        }
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    if (adds) dw[from + c] = sum;
    mt_copies_wait<0>();
    __syncthreads();
}

/* Adds the list to its rows. fresh: dw has nothing of them that counts. */
template <typename T, int N>
static __device__ __forceinline__ void add_list(embedding_room<T> &room,
                                                const struct mt_embedding_bwd_args &a, int64_t from,
                                                int count, bool fresh)
{
    const listed *list = room.list;
    const T *dy = (const T *)a.dy;
    if (threadIdx.x == 0) room.many_count = 0;
    if (count <= THREADS)
        sort_list<1>(room.list, count);
    else
        sort_list<LIST / THREADS>(room.list, count);
    for (int i = threadIdx.x / LANES; i < count; i += ROWS) {
        const int32_t row = list[i].row;
        if (i && list[i - 1].row == row) continue;
        if (i + FEW < count && list[i + FEW].row == row) {
            if (threadIdx.x % LANES == 0) room.many[atomicAdd(&room.many_count, 1)] = i;
            continue;
        }
        int n = 1;
        while (i + n < count && list[i + n].row == row) n++;
        add_few<T, N>((mt_real<T> *)a.dw + row * a.width, dy, a.width, from, list + i, n, fresh);
    }
    __syncthreads();
    for (int m = 0; m < room.many_count; m++) {
        const int i = room.many[m];
        const int32_t row = list[i].row;
        int end = i + FEW, past = count; /* the row's last token is in [end, past) */
        while (past - end > 1) {
            const int middle = (end + past) / 2;
            if (list[middle].row == row)
                end = middle;
            else
                past = middle;
        }
        add_many<T, N>(room, (mt_real<T> *)a.dw + row * a.width, dy, a.width, from, list + i,
                       past - i, fresh);
    }
    __syncthreads();
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS, N > 1 ? 4 : 3)
    embedding_bwd_kernel(struct mt_embedding_bwd_args a, int parts, int32_t mask)
{
    __shared__ embedding_room<T> room;
    const int32_t mine = (int32_t)(blockIdx.x / parts);
    const int64_t from = (int64_t)(blockIdx.x % parts) * embedding_room<T>::COLUMNS;
    const int first = threadIdx.x / 32 * (SPAN / WARPS) + threadIdx.x % 32;
    bool fresh = !a.accumulate;
    int count = 0;
    int32_t next[SPAN / THREADS], span[SPAN / THREADS];
#pragma unroll
    for (int k = 0; k < SPAN / THREADS; k++)
        next[k] = first + k * 32 < a.tokens_count ? a.tokens[first + k * 32] : 0;
    for (int64_t base = 0; base < a.tokens_count; base += SPAN) {
#pragma unroll
        for (int k = 0; k < SPAN / THREADS; k++) {
            const int64_t t = base + SPAN + first + k * 32;
            span[k] = next[k];
            next[k] = t < a.tokens_count ? a.tokens[t] : 0;
        }
        count = list_span(room.list, room.before, count, span, base, mine, mask, a.tokens_count);
        if (count == 0 || (count <= LIST - SPAN && base + SPAN < a.tokens_count)) continue;
        add_list<T, N>(room, a, from, count, fresh);
        fresh = false, count = 0;
    }
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
    int64_t parts = mt_ceil_div(a->width, embedding_room<T>::COLUMNS), rows = 1;
    while (rows < a->vocab && 2 * rows * parts <= 8 * mt_cuda_multiprocessors(stream)) rows *= 2;
    auto kernel = whole ? embedding_bwd_kernel<T, N> : embedding_bwd_kernel<T, 1>;
    if (a->tokens_count && parts)
        kernel<<<(unsigned)(rows * parts), THREADS, 0, on>>>(*a, (int)parts, (int32_t)(rows - 1));
    MT_LAUNCHED(stream, "embedding_bwd");
    return MT_OK;
}
MT_CUDA_OP(embedding_bwd)
