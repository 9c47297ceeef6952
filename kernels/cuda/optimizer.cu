/* Gradient norm and AdamW. Here T is the dtype of masters, gradients and moments, which is never
 * bf16: that instance does what f32's does. */
#include "kernels/cuda/copies.cuh"
#include "kernels/cuda/ordered.cuh"
#include "kernels/cuda/stored.cuh"
#include "kernels/cuda/scratch.h"

enum { THREADS = 256, NORM_BLOCK = 4096, LANES = 16 };

/* ---- gradient norm ----------------------------------------------------------------------------
 */

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

/* ---- AdamW ------------------------------------------------------------------------------------
 */

/* A warp updates BLOCK elements, one FP8 block, N in a row to a lane. */
enum { BLOCK = 128, N = BLOCK / 32 };

/* What a moment's element is stored as. */
template <typename R, mt_moments M> struct moment_of {
    typedef R type;
};
template <> struct moment_of<float, MT_MOMENTS_BF16> {
    typedef uint16_t type;
};
template <> struct moment_of<float, MT_MOMENTS_FP8> {
    typedef uint8_t type;
};

/* A lane's elements from p on, of which `left` exist; the others are 0. */
template <typename E>
static __device__ __forceinline__ mt_vec<E, N> load(const E *p, int64_t left, bool vectors)
{
    if (vectors && left >= N) return *(const mt_vec<E, N> *)p;
    mt_vec<E, N> x;
#pragma unroll
    for (int j = 0; j < N; j++) x.at[j] = j < left ? p[j] : E(0);
    return x;
}

/* BYTES as one access, past what the caches keep: of short elements the compiler would make one
 * each. */
template <int BYTES> static __device__ __forceinline__ void store_word(void *p, const void *x)
{
    if constexpr (BYTES == 4) __stcs((uint32_t *)p, *(const uint32_t *)x);
    if constexpr (BYTES == 8) __stcs((uint2 *)p, *(const uint2 *)x);
    if constexpr (BYTES >= 16) __stcs((uint4 *)p, *(const uint4 *)x);
    if constexpr (BYTES == 32) __stcs((uint4 *)p + 1, *((const uint4 *)x + 1));
}

template <typename E>
static __device__ __forceinline__ void store(E *p, const mt_vec<E, N> &x, int64_t left,
                                             bool vectors)
{
    if (vectors && left >= N) {
        store_word<N * sizeof(E)>(p, &x);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++)
        if (j < left) p[j] = x.at[j];
}

/* Where a lane is, and what the forms need. */
struct place {
    int64_t at, left, block;
    bool vectors;
    mt_codec e4m3;
};

/* A moment's reals, and back. ROOT: v, which fp8 keeps as its square root. */
template <typename R, mt_moments M, bool ROOT>
static __device__ __forceinline__ void
open(R x[N], const mt_vec<typename moment_of<R, M>::type, N> &e, float inverse, const place &w)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        if constexpr (M == MT_MOMENTS_REAL) x[j] = e.at[j];
        if constexpr (M == MT_MOMENTS_BF16) x[j] = mt_bf16_to_f32(e.at[j]);
        if constexpr (M == MT_MOMENTS_FP8) {
            x[j] = mt_decode(w.e4m3, e.at[j]) * inverse;
            if (ROOT) x[j] = x[j] * x[j];
        }
    }
}

template <typename R, mt_moments M, bool SR, bool ROOT>
static __device__ __forceinline__ void close(void *codes, float *scales, R x[N],
                                             const struct mt_adamw_args &a, uint32_t step,
                                             const place &w)
{
    mt_vec<typename moment_of<R, M>::type, N> e;
    uint32_t words[2] = { 0, 0 };
    float scale = 1;
    if constexpr (SR)
        stored_draw(words, a.seed, (uint64_t)(a.first + w.at), 2 * a.param + (ROOT ? 1 : 0), step);
    if constexpr (M == MT_MOMENTS_FP8) {
        int32_t amax = 0;
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (ROOT) x[j] = sqrt(x[j]);
            amax = max(amax, mt_magnitude_bits(x[j]));
        }
        scale = stored_scale(w.e4m3, __reduce_max_sync(~0u, amax));
        if (threadIdx.x % 32 == 0) scales[w.block] = 1.0f / scale;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        if constexpr (M == MT_MOMENTS_REAL) e.at[j] = x[j];
        if constexpr (M == MT_MOMENTS_BF16)
            e.at[j] = SR ? stored_stochastic(x[j], words[j / 2] >> (j % 2 * 16) & 0xffff)
                         : __bfloat16_as_ushort(__float2bfloat16_rn(x[j]));
        if constexpr (M == MT_MOMENTS_FP8)
            e.at[j] = ROOT ? stored_encode_up(w.e4m3, x[j] * scale)
                           : (uint8_t)mt_encode(w.e4m3, x[j] * scale);
    }
    store((typename moment_of<R, M>::type *)codes + w.at, e, w.left, w.vectors);
}

template <typename R, bool SPLIT>
static __device__ __forceinline__ void open_master(R p[N], const struct mt_adamw_args &a,
                                                   const place &w)
{
    if constexpr (SPLIT) {
        mt_vec<uint16_t, N> high = load((const uint16_t *)a.p + w.at, w.left, w.vectors);
        mt_vec<int16_t, N> low = load((const int16_t *)a.p_low + w.at, w.left, w.vectors);
#pragma unroll
        for (int j = 0; j < N; j++) p[j] = mt_f32_from_bits(mt_master_join(high.at[j], low.at[j]));
    } else {
        mt_vec<R, N> x = load((const R *)a.p + w.at, w.left, w.vectors);
#pragma unroll
        for (int j = 0; j < N; j++) p[j] = x.at[j];
    }
}

/* The compute copy, as pack_weight makes it. */
template <typename R>
static __device__ __forceinline__ void store_cast(const R p[N], const struct mt_adamw_args &a,
                                                  const place &w)
{
    mt_vec<uint16_t, N> half;
#pragma unroll
    for (int j = 0; j < N; j++) half.at[j] = __bfloat16_as_ushort(__float2bfloat16_rn((float)p[j]));
    store(a.cast + w.at, half, w.left, w.vectors);
}

template <typename R, bool SPLIT>
static __device__ __forceinline__ void close_master(const R p[N], const struct mt_adamw_args &a,
                                                    const place &w)
{
    if constexpr (SPLIT) {
        mt_vec<uint16_t, N> high;
        mt_vec<int16_t, N> low;
#pragma unroll
        for (int j = 0; j < N; j++) {
            uint32_t bits = mt_f32_bits(p[j]);
            high.at[j] = mt_master_high(bits), low.at[j] = mt_master_low(bits);
        }
        store((uint16_t *)a.p + w.at, high, w.left, w.vectors);
        store(a.p_low + w.at, low, w.left, w.vectors);
    } else {
        mt_vec<R, N> x;
#pragma unroll
        for (int j = 0; j < N; j++) x.at[j] = p[j];
        store((R *)a.p + w.at, x, w.left, w.vectors);
        if (a.cast) store_cast(p, a, w);
    }
}

/* The gradients of a lane, of either type: a choice here costs less than twice as many kernels. */
template <typename R>
static __device__ __forceinline__ void open_grad(R g[N], const struct mt_adamw_args &a,
                                                 const place &w)
{
    if (a.grad_bf16) {
        mt_vec<uint16_t, N> half = load((const uint16_t *)a.grad + w.at, w.left, w.vectors);
#pragma unroll
        for (int j = 0; j < N; j++) g[j] = (R)mt_bf16_to_f32(half.at[j]);
    } else {
        mt_vec<R, N> grad = load((const R *)a.grad + w.at, w.left, w.vectors);
#pragma unroll
        for (int j = 0; j < N; j++) g[j] = grad.at[j];
    }
}

static __device__ __forceinline__ adam_fast fast_of(const adam<float> &c)
{
    return adam_fast_of(c);
}
static __device__ __forceinline__ adam_fast fast_of(const adam<double> &)
{
    return { 0, 0, false };
}

/* adam_element, out of the way of the fast one. */
struct adam_state {
    float p, m, v;
};
static __device__ __noinline__ adam_state update_one(float p, float m, float v, float g,
                                                     const struct mt_adamw_args &a)
{
    adam_element(&p, &m, &v, g, adam_of<float>(&a));
    return { p, m, v };
}

static __device__ __forceinline__ void update(float p[N], float m[N], float v[N], const float g[N],
                                              const adam<float> &c, const adam_fast &f,
                                              const struct mt_adamw_args &a)
{
    float new_p[N], new_m[N], new_v[N];
    bool right = f.usable;
#pragma unroll
    for (int j = 0; j < N; j++) {
        new_p[j] = p[j], new_m[j] = m[j], new_v[j] = v[j];
        right &= adam_element_fast(&new_p[j], &new_m[j], &new_v[j], g[j], c, f);
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        const adam_state s = right ? adam_state{ new_p[j], new_m[j], new_v[j] }
                                   : update_one(p[j], m[j], v[j], g[j], a);
        p[j] = s.p, m[j] = s.m, v[j] = s.v;
    }
}
static __device__ __forceinline__ void update(double p[N], double m[N], double v[N],
                                              const double g[N], const adam<double> &c,
                                              const adam_fast &, const struct mt_adamw_args &)
{
#pragma unroll
    for (int j = 0; j < N; j++) adam_element(&p[j], &m[j], &v[j], g[j], c);
}

/* A warp's block of elements. */
template <typename R, mt_moments M, bool SR, bool SPLIT>
static __device__ __forceinline__ void update_block(const struct mt_adamw_args &a, const adam<R> &c,
                                                    const adam_fast &fast, uint32_t step,
                                                    const place &w)
{
    typedef typename moment_of<R, M>::type moment;
    R p[N], m[N], v[N], g[N];
    open_grad(g, a, w);
    mt_vec<moment, N> em = load((const moment *)a.m + w.at, w.left, w.vectors),
                      ev = load((const moment *)a.v + w.at, w.left, w.vectors);
    float inverse_m = M == MT_MOMENTS_FP8 ? a.m_scales[w.block] : 1;
    float inverse_v = M == MT_MOMENTS_FP8 ? a.v_scales[w.block] : 1;
    open_master<R, SPLIT>(p, a, w);
    open<R, M, false>(m, em, inverse_m, w);
    open<R, M, true>(v, ev, inverse_v, w);
    update(p, m, v, g, c, fast, a);
    close_master<R, SPLIT>(p, a, w);
    close<R, M, SR, false>(a.m, a.m_scales, m, a, step, w);
    close<R, M, SR, true>(a.v, a.v_scales, v, a, step, w);
}

/* The params of a launch, as many as its arguments hold, and the blocks before each and all. One
 * alone has its pointers in the kernel's arguments, not in registers. */
enum { MANY = 20 };
template <int MOST> struct adamw_list {
    struct mt_adamw_args params[MOST];
    int64_t before[MOST + 1];
    mt_codec e4m3;
    uint32_t vectors; /* a bit for each */
    int count;
};
static_assert(sizeof(adamw_list<MANY>) <= 4096, "arguments of a kernel");

/* Warps take blocks of all params in turns. */
template <typename R, mt_moments M, bool SR, bool SPLIT, int MOST>
static __global__ void __launch_bounds__(THREADS)
    adamw_kernel(const __grid_constant__ adamw_list<MOST> l)
{
    const struct mt_step_state *state = l.params[0].state;
    if (state->skip) return;
    const uint32_t step = (uint32_t)state->applied;
    const int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
    int64_t next = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    for (int i = 0; i < (MOST == 1 ? 1 : l.count); i++) {
        const int64_t before = MOST == 1 ? 0 : l.before[i], end = l.before[i + 1];
        if (next >= end) continue;
        const struct mt_adamw_args &a = l.params[i];
        const bool vectors = l.vectors >> i & 1;
        const adam<R> c = adam_of<R>(&a);
        const adam_fast fast = fast_of(c);
        for (; next < end; next += warps) {
            const int64_t block = next - before, at = block * BLOCK + threadIdx.x % 32 * N;
            if (vectors && (block + 1) * BLOCK <= a.count) /* the compiler leaves out all tests */
                update_block<R, M, SR, SPLIT>(a, c, fast, step, { at, N, block, true, l.e4m3 });
            else
                update_block<R, M, SR, SPLIT>(a, c, fast, step,
                                              { at, a.count - at, block, vectors, l.e4m3 });
        }
    }
}

/* The kernel of a call's forms. */
template <typename R, int MOST>
static void (*choose(const struct mt_adamw_args *a))(adamw_list<MOST>)
{
    if constexpr (sizeof(R) == sizeof(double)) {
        return adamw_kernel<double, MT_MOMENTS_REAL, false, false, MOST>;
    } else {
#define FORMS(M, SR)                                                                               \
    {                                                                                              \
        adamw_kernel<float, M, SR, false, MOST>, adamw_kernel<float, M, SR, true, MOST>            \
    }
        static void (*const entries[MT_MOMENTS_COUNT][2][MT_MASTER_COUNT])(adamw_list<MOST>) = {
            { FORMS(MT_MOMENTS_REAL, false) },
            { FORMS(MT_MOMENTS_BF16, false), FORMS(MT_MOMENTS_BF16, true) },
            { FORMS(MT_MOMENTS_FP8, false) },
        };
#undef FORMS
        static_assert(MT_MOMENTS_REAL == 0 && MT_MOMENTS_BF16 == 1 && MT_MOMENTS_FP8 == 2 &&
                          MT_MASTER_REAL == 0 && MT_MASTER_SPLIT == 1,
                      "the order of `entries`");
        return entries[a->moments][a->stochastic][a->master];
    }
}

static bool aligned(const void *p, size_t element)
{
    return (uintptr_t)p % (N * element) == 0;
}

template <typename R> static bool has_vectors(const struct mt_adamw_args *a)
{
    const size_t moment = mt_moments_size(a->moments, mt_dtype_of<R>::value);
    const bool split = a->master == MT_MASTER_SPLIT;
    return aligned(a->p, split ? sizeof(uint16_t) : sizeof(R)) &&
           aligned(a->p_low, sizeof(int16_t)) && aligned(a->cast, sizeof(uint16_t)) &&
           aligned(a->m, moment) && aligned(a->v, moment) &&
           aligned(a->grad, a->grad_bf16 ? sizeof(mt_bf16) : sizeof(R));
}

template <typename R, int MOST>
static mt_status update(mt_stream *stream, const struct mt_adamw_args *const *params, int count)
{
    adamw_list<MOST> l = {};
    l.e4m3 = mt_codec_of(MT_ELEMENT_E4M3), l.count = count;
    for (int i = 0; i < count; i++) {
        l.params[i] = *params[i];
        l.before[i + 1] = l.before[i] + mt_ceil_div(params[i]->count, BLOCK);
        l.vectors |= (uint32_t)has_vectors<R>(params[i]) << i;
    }
    choose<R, MOST>(params[0])<<<mt_blocks(stream, l.before[count] * 32, THREADS), THREADS, 0,
                                 mt_cuda_stream(stream)>>>(l);
    MT_LAUNCHED(stream, "adamw");
    return MT_OK;
}

template <typename T> static mt_status adamw(mt_stream *stream, const struct mt_adamw_args *args)
{
    typedef mt_real<T> R;
    const struct mt_adamw_args *params[MANY];
    int count = 0;
    for (const struct mt_adamw_args *a = args; a; a = a->next) {
        if (a->count) params[count++] = a;
        if (!count || (a->next && count < MANY)) continue;
        MT_TRY((count == 1 ? update<R, 1> : update<R, MANY>)(stream, params, count));
        count = 0;
    }
    return MT_OK;
}
MT_CUDA_OP(adamw)

/* ---- join_master ------------------------------------------------------------------------------
 */

static __global__ void join_kernel(struct mt_join_master_args a, bool vectors)
{
    MT_GRID_STRIDE(i, mt_ceil_div(a.count, N))
    {
        int64_t left = a.count - i * N;
        mt_vec<uint16_t, N> high = load(a.high + i * N, left, vectors);
        mt_vec<int16_t, N> low = load(a.low + i * N, left, vectors);
        mt_vec<float, N> y;
#pragma unroll
        for (int j = 0; j < N; j++)
            y.at[j] = mt_f32_from_bits(mt_master_join(high.at[j], low.at[j]));
        store(a.y + i * N, y, left, vectors);
    }
}

template <typename T>
static mt_status join_master(mt_stream *stream, const struct mt_join_master_args *a)
{
    if (!a->count) return MT_OK;
    bool vectors = aligned(a->y, sizeof(float)) && aligned(a->high, sizeof(uint16_t)) &&
                   aligned(a->low, sizeof(int16_t));
    join_kernel<<<mt_blocks(stream, mt_ceil_div(a->count, N), THREADS), THREADS, 0,
                  mt_cuda_stream(stream)>>>(*a, vectors);
    MT_LAUNCHED(stream, "join_master");
    return MT_OK;
}
MT_CUDA_OP(join_master)
