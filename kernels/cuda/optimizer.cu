/* Gradient norm and AdamW. Here T is the dtype of masters, gradients and moments, which is never
 * bf16: that instance does what f32's does. */
#include "kernels/cuda/ordered.cuh"
#include "kernels/cuda/stored.cuh"

enum { THREADS = 256, NORM_BLOCK = 4096, LANES = 16 };

/* ---- gradient norm ----------------------------------------------------------------------------
 */

/* Half a warp sums the squares of a block as the CPU does: lane l adds elements l, l + LANES, ...
 * in order, then the lanes in pairs, l with l + 8, 4, 2, 1. */
template <typename E>
static __global__ void squares_kernel(double *partial, const E *grad, int64_t count)
{
    enum { AHEAD = sizeof(E) == sizeof(mt_bf16) ? 16 : 8 }; /* loads of a lane in flight */
    int64_t blocks = mt_ceil_div(count, NORM_BLOCK);
    int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
    int lane = threadIdx.x % LANES, half = threadIdx.x % 32 / LANES;
    for (int64_t pair = warp; pair * 2 < blocks; pair += warps) {
        int64_t block = pair * 2 + half, left = count - block * NORM_BLOCK;
        int n = (int)(left < 0 ? 0 : left < NORM_BLOCK ? left : NORM_BLOCK);
        const E *g = grad + block * NORM_BLOCK;
        double sum = 0;
#pragma unroll AHEAD
        for (int i = lane; i < n; i += LANES) sum += (double)mt_get(g + i) * (double)mt_get(g + i);
        __syncwarp();
        for (int other = LANES / 2; other; other /= 2)
            sum += __shfl_down_sync(~0u, sum, other, LANES);
        if (lane == 0 && n) partial[block] = sum;
    }
}

/* What a norm means for the step: how much to clip, whether to skip, and the bias corrections. */
template <typename R>
static __global__ void finish_norm_kernel(struct mt_grad_norm_args a, const double *partial,
                                          int64_t blocks)
{
    double sum = a.pass == MT_NORM_FINISH ? *a.sum : mt_ordered_sum(partial, blocks);
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
    squares_kernel<E>
        <<<mt_blocks(stream, blocks * LANES, THREADS), THREADS, 0, mt_cuda_stream(stream)>>>(
            partial, grad, count);
    MT_LAUNCHED(stream, "grad_norm");
    return MT_OK;
}

template <typename T>
static mt_status grad_norm(mt_stream *stream, const struct mt_grad_norm_args *a)
{
    typedef mt_real<T> R;
    bool sums = a->pass != MT_NORM_FINISH;
    int64_t blocks = sums ? mt_ceil_div(a->count, NORM_BLOCK) : 0;
    int64_t halves = sums ? mt_ceil_div(a->bf16_count, NORM_BLOCK) : 0;
    void *partial;
    MT_TRY(mt_cuda_scratch(stream, &partial, (size_t)(blocks + halves) * sizeof(double)));
    double *to = (double *)partial;
    MT_TRY(squares(stream, to, (const R *)a->grad, a->count, blocks));
    MT_TRY(squares(stream, to + blocks, (const mt_bf16 *)a->bf16_grad, a->bf16_count, halves));
    finish_norm_kernel<R>
        <<<1, 32, 0, mt_cuda_stream(stream)>>>(*a, (const double *)partial, blocks + halves);
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

template <typename E>
static __device__ __forceinline__ void store(E *p, const mt_vec<E, N> &x, int64_t left,
                                             bool vectors)
{
    if (vectors && left >= N) {
        *(mt_vec<E, N> *)p = x;
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
                         : mt_f32_to_bf16(x[j]);
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
    }
}

template <typename R, mt_moments M, bool SR, bool SPLIT>
static __global__ void __launch_bounds__(THREADS)
    adamw_kernel(struct mt_adamw_args a, mt_codec e4m3, bool vectors)
{
    typedef typename moment_of<R, M>::type moment;
    if (a.state->skip) return;
    const adam<R> c = adam_of<R>(&a);
    const uint32_t step = (uint32_t)a.state->applied;
    int64_t blocks = mt_ceil_div(a.count, BLOCK), warps = (int64_t)gridDim.x * (THREADS / 32);
    for (int64_t block = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; block < blocks;
         block += warps) {
        int64_t at = block * BLOCK + threadIdx.x % 32 * N;
        const place w = { at, a.count - at, block, vectors, e4m3 };
        R p[N], m[N], v[N];
        /* one of the two: a choice here costs less than twice as many kernels */
        mt_vec<R, N> grad = load((const R *)a.grad + at, a.grad_bf16 ? 0 : w.left, vectors);
        mt_vec<uint16_t, N> half =
            load((const uint16_t *)a.grad + at, a.grad_bf16 ? w.left : 0, vectors);
        mt_vec<moment, N> em = load((const moment *)a.m + at, w.left, vectors),
                          ev = load((const moment *)a.v + at, w.left, vectors);
        float inverse_m = M == MT_MOMENTS_FP8 ? a.m_scales[block] : 1;
        float inverse_v = M == MT_MOMENTS_FP8 ? a.v_scales[block] : 1;
        open_master<R, SPLIT>(p, a, w);
        open<R, M, false>(m, em, inverse_m, w);
        open<R, M, true>(v, ev, inverse_v, w);
#pragma unroll
        for (int j = 0; j < N; j++)
            adam_element(&p[j], &m[j], &v[j],
                         a.grad_bf16 ? (R)mt_bf16_to_f32(half.at[j]) : grad.at[j], c);
        close_master<R, SPLIT>(p, a, w);
        close<R, M, SR, false>(a.m, a.m_scales, m, a, step, w);
        close<R, M, SR, true>(a.v, a.v_scales, v, a, step, w);
    }
}

typedef void (*adamw_entry)(struct mt_adamw_args, mt_codec, bool);

/* The kernel of a call's forms. */
static adamw_entry choose(const struct mt_adamw_args *a, float)
{
#define FORMS(M, SR)                                                                               \
    {                                                                                              \
        adamw_kernel<float, M, SR, false>, adamw_kernel<float, M, SR, true>                        \
    }
    static const adamw_entry entries[MT_MOMENTS_COUNT][2][MT_MASTER_COUNT] = {
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
static adamw_entry choose(const struct mt_adamw_args *, double)
{
    return adamw_kernel<double, MT_MOMENTS_REAL, false, false>;
}

static bool aligned(const void *p, size_t element)
{
    return (uintptr_t)p % (N * element) == 0;
}

template <typename T> static mt_status adamw(mt_stream *stream, const struct mt_adamw_args *a)
{
    typedef mt_real<T> R;
    if (!a->count) return MT_OK;
    size_t moment = mt_moments_size(a->moments, mt_dtype_of<R>::value);
    bool split = a->master == MT_MASTER_SPLIT;
    bool vectors = aligned(a->p, split ? sizeof(uint16_t) : sizeof(R)) &&
                   aligned(a->p_low, sizeof(int16_t)) && aligned(a->m, moment) &&
                   aligned(a->v, moment) &&
                   aligned(a->grad, a->grad_bf16 ? sizeof(mt_bf16) : sizeof(R));
    unsigned blocks = mt_blocks(stream, mt_ceil_div(a->count, BLOCK) * 32, THREADS);
    choose(a, R(0))<<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(
        *a, mt_codec_of(MT_ELEMENT_E4M3), vectors);
    MT_LAUNCHED(stream, "adamw");
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
