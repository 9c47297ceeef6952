/* The gradient norm, and what it means for a step. Here T is the dtype of gradients, which is never
 * bf16: that instance does what f32's does. */
#include "kernels/cuda/copies.cuh"
#include "kernels/cuda/ordered.cuh"
#include "kernels/cuda/scratch.h"

enum { THREADS = 256, NORM_BLOCK = 4096, LANES = 16 };

/* A block's squares are summed as the CPU does: lane l adds elements l, l + LANES, ... in order,
 * then the lanes in pairs, l with l + 8, 4, 2, 1. A chain of NORM_BLOCK / LANES sums is all that is
 * waited for: half a warp has a block, brings it to shared memory, STAGES of it at a time, and adds
 * from there; as many such warps stay on a multiprocessor as its memory is filled by. */
enum { STAGE = 512, STAGES = 4, ROWS = STAGE / LANES };

/* A warp's two blocks stand apart by half of the banks. */
template <typename E> struct squares_stage {
    alignas(16) E of[2][STAGE + 64 / sizeof(E)];
};

/* The square of an f32 is exact in f64, so that adding it in one operation changes nothing. */
static __device__ __forceinline__ double add_square(double sum, float x)
{
    return fma((double)x, (double)x, sum);
}
static __device__ __forceinline__ double add_square(double sum, double x)
{
    return sum + x * x;
}

/* Elements of the stage from `from` on, N at a time; those past the first `left` are 0, and to add
 * these changes nothing. */
template <int N, bool WHOLE, typename E>
static __device__ __forceinline__ void bring(E *to, const E *from, int left)
{
#pragma unroll
    for (int base = 0; base < STAGE; base += LANES * N) {
        const int i = base + threadIdx.x % LANES * N;
        const int there = WHOLE ? N : max(0, min(N, left - i));
        if constexpr (N * sizeof(E) >= 4)
            mt_copy_ask<N * sizeof(E)>(to + i, from + i, there * (int)sizeof(E));
        else
            to[i] = there ? from[i] : E(0.0f);
    }
    mt_copies_group();
}

/* What a lane adds of its block, of which `left` elements exist. */
template <int N, bool WHOLE, typename E>
static __device__ __forceinline__ double add_squares(squares_stage<E> *stages, const E *g, int left)
{
    const int half = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    double sum = 0;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        bring<N, WHOLE>(stages[s].of[half], g + s * STAGE, left - s * STAGE);
    for (int i = 0; i < NORM_BLOCK / STAGE; i++) {
        const int next = i + STAGES - 1;
        E x[ROWS];
        mt_copies_wait<STAGES - 2>();
        __syncwarp(); /* also: everyone has read the stage that is brought next */
#pragma unroll
        for (int r = 0; r < ROWS; r++) x[r] = stages[i % STAGES].of[half][r * LANES + lane];
        if (next < NORM_BLOCK / STAGE)
            bring<N, WHOLE>(stages[next % STAGES].of[half], g + next * STAGE, left - next * STAGE);
        else
            mt_copies_group();
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum = add_square(sum, mt_get(x + r));
    }
    return sum;
}

/* A warp for each two blocks; N elements are brought at a time. */
template <int N, typename E>
static __global__ void __launch_bounds__(32)
    squares_kernel(double *partial, const E *grad, int64_t count)
{
    __shared__ squares_stage<E> stages[STAGES];
    const int64_t block = (int64_t)blockIdx.x * 2 + threadIdx.x / LANES;
    const int64_t left = count - block * NORM_BLOCK;
    const E *g = grad + block * NORM_BLOCK;
    double sum;
    if (((int64_t)blockIdx.x + 1) * 2 * NORM_BLOCK <= count)
        sum = add_squares<N, true>(stages, g, NORM_BLOCK);
    else
        sum = add_squares<N, false>(stages, g, (int)min(left, (int64_t)NORM_BLOCK));
#pragma unroll
    for (int other = LANES / 2; other; other /= 2) sum += __shfl_down_sync(~0u, sum, other, LANES);
    if (threadIdx.x % LANES == 0 && left > 0) partial[block] = sum;
}

/* A warp adds a run of partial sums. */
static __device__ __forceinline__ void add_run(double *runs, int64_t run, const double *partial,
                                               int64_t blocks)
{
    const int64_t left = blocks - run * MT_NORM_RUN;
    if (left <= 0) return;
    double sum =
        mt_ordered_sum(partial + run * MT_NORM_RUN, left < MT_NORM_RUN ? left : MT_NORM_RUN);
    if (threadIdx.x % 32 == 0) runs[run] = sum;
}
static __global__ void __launch_bounds__(THREADS)
    runs_kernel(double *runs, const double *partial, int64_t blocks)
{
    add_run(runs, ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32, partial, blocks);
}

/* What a norm means for the step: how much to clip, whether to skip, and the bias corrections. Of
 * few runs, it adds them first (blocks: of partial sums; 0: they are there). */
template <typename R>
static __global__ void __launch_bounds__(THREADS)
    finish_norm_kernel(struct mt_grad_norm_args a, double *runs, int64_t count,
                       const double *partial, int64_t blocks)
{
    add_run(runs, threadIdx.x / 32, partial, blocks);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    double sum = a.pass == MT_NORM_FINISH ? *a.sum : mt_ordered_sum(runs, count);
    if (threadIdx.x) return;
    if (a.pass == MT_NORM_SUM) {
        *a.sum = sum;
        return;
    }
    double norm = sqrt(sum);
    struct mt_step_state *s = a.state;
    double clip = a.max_norm > 0 ? a.max_norm / (norm + 1e-6) : 1;
    s->grad_norm = norm;
    s->clip = clip < 1 ? clip : 1;
    s->skip = !isfinite(norm) || (a.loss && !isfinite(*(const R *)a.loss));
    if (s->skip) {
        s->skipped++, s->skipped_in_a_row++;
        return;
    }
    s->power1 *= a.beta1, s->power2 *= a.beta2;
    s->bias1 = 1 - s->power1, s->bias2 = 1 - s->power2;
    s->applied++, s->skipped_in_a_row = 0;
}

template <typename E>
static mt_status squares(mt_stream *stream, double *partial, const E *grad, int64_t count,
                         int64_t blocks)
{
    if (!blocks) return MT_OK;
    auto kernel =
        (uintptr_t)grad % 16 == 0 ? squares_kernel<16 / sizeof(E), E> : squares_kernel<1, E>;
    kernel<<<(unsigned)mt_ceil_div(blocks, 2), 32, 0, mt_cuda_stream(stream)>>>(partial, grad,
                                                                                count);
    MT_LAUNCHED(stream, "grad_norm");
    return MT_OK;
}

static int64_t norm_blocks(const struct mt_grad_norm_args *a, int64_t count)
{
    return a->pass == MT_NORM_FINISH ? 0 : mt_ceil_div(count, NORM_BLOCK);
}

template <typename T>
static size_t grad_norm_scratch(const mt_stream *stream, const struct mt_grad_norm_args *a)
{
    (void)stream;
    int64_t all = norm_blocks(a, a->count) + norm_blocks(a, a->bf16_count);
    return (size_t)(all + mt_ceil_div(all, MT_NORM_RUN)) * sizeof(double);
}
MT_CUDA_SCRATCH(grad_norm)

template <typename T>
static mt_status grad_norm(mt_stream *stream, const struct mt_grad_norm_args *a)
{
    typedef mt_real<T> R;
    cudaStream_t on = mt_cuda_stream(stream);
    int64_t blocks = norm_blocks(a, a->count), halves = norm_blocks(a, a->bf16_count);
    int64_t all = blocks + halves, runs = mt_ceil_div(all, MT_NORM_RUN);
    void *scratch;
    MT_TRY(mt_cuda_scratch(stream, &scratch, grad_norm_scratch<T>(stream, a)));
    double *partial = (double *)scratch, *run = partial + all;
    MT_TRY(squares(stream, partial, (const R *)a->grad, a->count, blocks));
    MT_TRY(squares(stream, partial + blocks, (const mt_bf16 *)a->bf16_grad, a->bf16_count, halves));
    const bool few = runs <= THREADS / 32;
    if (!few) {
        runs_kernel<<<(unsigned)mt_ceil_div(runs * 32, THREADS), THREADS, 0, on>>>(run, partial,
                                                                                   all);
        MT_LAUNCHED(stream, "grad_norm");
    }
    finish_norm_kernel<R><<<1, THREADS, 0, on>>>(*a, run, runs, partial, few ? all : 0);
    MT_LAUNCHED(stream, "grad_norm");
    return MT_OK;
}
MT_CUDA_OP(grad_norm)
