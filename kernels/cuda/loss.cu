/* Cross-entropy. */
#include <type_traits>

#include "kernels/cuda/ordered.cuh"
#include "kernels/cuda/scratch.h"
#include "kernels/cuda/words.cuh"

/* Threads of a block, which has one row, or, where vectors are so few that a warp has PART for each
 * lane, a row for each warp; vectors of a thread that are summed in real before the sum goes into
 * f64; vectors of a thread in a block of the backward. */
enum { THREADS = 256, AHEAD = 4, PART = 4 };

/* Threads of a row of so many elements of T. */
template <typename T> static int lanes_of(int64_t vocab)
{
    return vocab * (int64_t)sizeof(T) <= 16 * 32 * PART ? 32 : THREADS;
}
static unsigned blocks_of(int64_t rows, int lanes)
{
    return (unsigned)mt_ceil_div(rows, THREADS / lanes);
}

/* Elements before the first 16-byte boundary from p on, at most n: those done one by one. */
template <typename T> static __device__ __forceinline__ int64_t head_of(const T *p, int64_t n)
{
    int64_t head = (int64_t)(-(uintptr_t)p % 16 / sizeof(T));
    return head < n ? head : n;
}

/* Maximum, and sum exp(x - maximum) kept in f64. A NaN anywhere, or +Inf, makes the sum NaN. */
template <typename R> struct log_sum {
    R most;
    double total;
};

/* All -Inf so far: any finite base gives the sum 0. */
template <typename R> static __device__ __forceinline__ R base_of(R most)
{
    return most == -(R)INFINITY ? 0 : most;
}

/* How much a sum shrinks when its base becomes `to`; in real, whose errors are those of one more
 * exponential. */
template <typename R> static __device__ __forceinline__ double shrink_of(R from, R to)
{
    return (double)exp(from - to);
}

/* exp(x) of a logit of T less the largest; of bf16 in two instructions, within 2^-24 (|x| + 4) of
 * itself: that of the library would be what takes the time. */
template <typename T> static __device__ __forceinline__ mt_real<T> term(mt_real<T> x)
{
    if constexpr (std::is_same<T, mt_bf16>::value) {
        float e;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 0x1.715476p+0f));
        return e;
    } else {
        return exp(x);
    }
}

/* Takes N values in. */
template <typename T, int N>
static __device__ __forceinline__ void take(log_sum<mt_real<T>> *s, const mt_real<T> x[N])
{
    typedef mt_real<T> R;
    R most = s->most, sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) most = fmax(most, x[i]); /* passes over NaN */
    R base = base_of(most);
#pragma unroll
    for (int i = 0; i < N; i++) sum += term<T>(x[i] - base);
    if (most != s->most) s->total *= shrink_of(s->most, base);
    s->total += (double)sum;
    s->most = most;
}

/* The row's, in its first thread. */
template <int LANES, typename R>
static __device__ __forceinline__ log_sum<R> row_merge(log_sum<R> mine)
{
    __shared__ R tops[THREADS / 32];
    __shared__ double totals[THREADS / 32];
    log_sum<R> row = { mt_warp_max(mine.most), 0 };
    double total = mt_warp_sum(mine.total * shrink_of(mine.most, base_of(row.most)));
    if (LANES == 32) return { row.most, total };
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = row.most, totals[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x) return row;
    for (int w = 0; w < THREADS / 32; w++) row.most = tops[w] > row.most ? tops[w] : row.most;
    for (int w = 0; w < THREADS / 32; w++)
        row.total += totals[w] * shrink_of(tops[w], base_of(row.most));
    return row;
}

template <typename T, int LANES>
static __global__ void __launch_bounds__(THREADS, 3)
    cross_entropy_fwd_kernel(struct mt_cross_entropy_fwd_args a, mt_real<T> *losses)
{
    enum { N = 16 / sizeof(T) };
    typedef mt_real<T> R;
    typedef mt_words<T, N> words;
    const int lane = threadIdx.x % LANES;
    int64_t t = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, vocab = a.vocab;
    if (LANES < THREADS && t >= a.tokens) return; /* a whole warp */
    int32_t target = a.targets[t];
    if (target == a.ignore) {
        if (lane == 0) losses[t] = 0;
        return;
    }
    const T *logits = (const T *)a.logits + t * vocab;
    int64_t head = head_of(logits, vocab), vectors = (vocab - head) / N;
    log_sum<R> mine = { -(R)INFINITY, 0 };
    const words *from = (const words *)(logits + head);
    R x[AHEAD * N];
    int64_t i = lane;
    for (; i + (AHEAD - 1) * LANES < vectors; i += LANES * AHEAD) {
        words in[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) in[k] = from[i + k * LANES];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) mt_open<T, N>(x + k * N, in[k]);
        take<T, AHEAD * N>(&mine, x);
    }
    for (; i < vectors; i += LANES) {
        mt_open<T, N>(x, from[i]);
        take<T, N>(&mine, x);
    }
    int64_t tail = head + vectors * N; /* head and tail are shorter than a vector */
    if (lane < head + vocab - tail) {
        x[0] = mt_get(logits + lane + (lane < head ? 0 : tail - head));
        take<T, 1>(&mine, x);
    }
    log_sum<R> row = row_merge<LANES>(mine);
    if (lane) return;
    double log_total = log(row.total);
    R at_target = target >= 0 && target < vocab ? mt_get(logits + target) : (R)NAN;
    ((R *)a.lse)[t] = (R)((double)row.most + log_total);
    /* Not lse - logit, which would lose what log_total says of a confident prediction. */
    losses[t] = (R)(((double)row.most - (double)at_target) + log_total);
}

/* A warp adds a run of tokens. */
enum { LOSS_WARPS = 32 };
template <typename R>
static __global__ void __launch_bounds__(LOSS_WARPS * 32)
    loss_kernel(R *loss, const R *losses, int64_t tokens, const R *scale)
{
    __shared__ double runs[LOSS_WARPS];
    const int warp = threadIdx.x / 32;
    double sum = 0;
    for (int64_t base = 0; base < tokens; base += LOSS_WARPS * MT_LOSS_RUN) {
        const int64_t first = base + warp * MT_LOSS_RUN, left = tokens - first;
        const int64_t count = left < 0 ? 0 : left < MT_LOSS_RUN ? left : MT_LOSS_RUN;
        runs[warp] = mt_ordered_sum(losses + first, count);
        __syncthreads();
        for (int w = 0; w < LOSS_WARPS; w++) sum += runs[w]; /* 0 where there is no run */
        __syncthreads();
    }
    if (threadIdx.x == 0) *loss = (R)(sum * (double)*scale);
}

template <typename T>
static size_t cross_entropy_fwd_scratch(const mt_stream *stream,
                                        const struct mt_cross_entropy_fwd_args *a)
{
    (void)stream;
    return a->token_loss ? 0 : (size_t)a->tokens * sizeof(mt_real<T>);
}
MT_CUDA_SCRATCH(cross_entropy_fwd)

template <typename T>
static mt_status cross_entropy_fwd(mt_stream *stream, const struct mt_cross_entropy_fwd_args *a)
{
    typedef mt_real<T> R;
    cudaStream_t on = mt_cuda_stream(stream);
    void *losses = a->token_loss;
    if (!losses) MT_TRY(mt_cuda_scratch(stream, &losses, cross_entropy_fwd_scratch<T>(stream, a)));
    if (a->tokens) {
        const int lanes = lanes_of<T>(a->vocab);
        auto kernel =
            lanes == 32 ? cross_entropy_fwd_kernel<T, 32> : cross_entropy_fwd_kernel<T, THREADS>;
        kernel<<<blocks_of(a->tokens, lanes), THREADS, 0, on>>>(*a, (R *)losses);
        MT_LAUNCHED(stream, "cross_entropy_fwd");
    }
    loss_kernel<R><<<1, LOSS_WARPS * 32, 0, on>>>((R *)a->loss, (const R *)losses, a->tokens,
                                                  (const R *)a->scale);
    MT_LAUNCHED(stream, "cross_entropy_fwd");
    return MT_OK;
}
MT_CUDA_OP(cross_entropy_fwd)

/* ---- backward ---------------------------------------------------------------------------------
 */

/* scale (exp(x - lse) - [v is the target]) */
template <typename R>
static __device__ __forceinline__ R gradient(R x, R lse, R scale, bool is_target)
{
    R p = exp(x - lse);
    return scale * (is_target ? p - 1 : p);
}

/* LANES for each token and PART * LANES vectors of its row. */
template <typename T, int LANES>
static __global__ void __launch_bounds__(THREADS)
    cross_entropy_bwd_kernel(struct mt_cross_entropy_bwd_args a)
{
    enum { N = 16 / sizeof(T) };
    typedef mt_real<T> R;
    typedef mt_vec<T, N> vec;
    const int lane = threadIdx.x % LANES;
    int64_t t = (int64_t)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, vocab = a.vocab;
    if (LANES < THREADS && t >= a.tokens) return;
    int32_t target = a.targets[t];
    bool ignored = target == a.ignore;
    const T *logits = (const T *)a.logits + t * vocab;
    T *dlogits = (T *)a.dlogits + t * vocab;
    R scale = *(const R *)a.dloss * *(const R *)a.scale;
    R lse = ignored ? 0 : ((const R *)a.lse)[t];
    bool alike = ((uintptr_t)logits ^ (uintptr_t)dlogits) % 16 == 0;
    int64_t head = alike ? head_of(logits, vocab) : vocab, vectors = (vocab - head) / N;
    int64_t first = (int64_t)blockIdx.y * LANES * PART + lane;
    vec in[PART];
#pragma unroll
    for (int k = 0; k < PART; k++)
        if (first + k * LANES < vectors && !ignored)
            in[k] = ((const vec *)(logits + head))[first + k * LANES];
#pragma unroll
    for (int k = 0; k < PART; k++) {
        int64_t i = first + k * LANES;
        if (i >= vectors) continue;
        vec out;
#pragma unroll
        for (int j = 0; j < N; j++) {
            bool is_target = head + i * N + j == target;
            mt_put(&out.at[j], ignored ? 0 : gradient(mt_get(&in[k].at[j]), lse, scale, is_target));
        }
        ((vec *)(dlogits + head))[i] = out;
    }
    /* what is not in vectors: less than two of them, or, where the rows are not alike, all */
    int64_t tail = head + vectors * N, rest = head + vocab - tail;
    int64_t step = (int64_t)gridDim.y * LANES;
    for (int64_t i = (int64_t)blockIdx.y * LANES + lane; i < rest; i += step) {
        int64_t v = i < head ? i : i - head + tail;
        mt_put(dlogits + v, ignored ? 0 : gradient(mt_get(logits + v), lse, scale, v == target));
    }
}

template <typename T>
static mt_status cross_entropy_bwd(mt_stream *stream, const struct mt_cross_entropy_bwd_args *a)
{
    if (!a->tokens) return MT_OK;
    const int lanes = lanes_of<T>(a->vocab);
    int64_t part = (int64_t)lanes * PART * 16 / (int64_t)sizeof(T);
    int64_t parts = mt_ceil_div(a->vocab, part);
    MT_REQUIRE(parts <= 65535, MT_EUNSUPPORTED,
               "cross_entropy_bwd: vocab is %lld, at most %lld on cuda", (long long)a->vocab,
               (long long)(65535 * part));
    auto kernel =
        lanes == 32 ? cross_entropy_bwd_kernel<T, 32> : cross_entropy_bwd_kernel<T, THREADS>;
    kernel<<<dim3(blocks_of(a->tokens, lanes), (unsigned)parts), THREADS, 0,
             mt_cuda_stream(stream)>>>(*a);
    MT_LAUNCHED(stream, "cross_entropy_bwd");
    return MT_OK;
}
MT_CUDA_OP(cross_entropy_bwd)
