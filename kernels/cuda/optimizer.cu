/* AdamW. T, the dtype of masters, gradients and moments, is never bf16: that instance is f32's. */
#include "kernels/cuda/copies.cuh"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/stored.cuh"

/* A warp updates BLOCK elements, one FP8 block, N in a row to a lane. */
enum { THREADS = 256, WARPS = THREADS / 32, BLOCK = 128, N = BLOCK / 32 };

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

/* From where a lane's elements are read: in place, or out of shared memory. */
struct source {
    const void *grad, *p, *p_low, *m, *v;
    float inverse_m, inverse_v;
};

static __device__ __forceinline__ void open_halves(float x[N], const mt_vec<uint16_t, N> &halves)
{
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        const uint32_t pair = *(const uint32_t *)(halves.at + j);
        x[j] = __uint_as_float(pair << 16), x[j + 1] = __uint_as_float(pair & 0xffff0000);
    }
}
static __device__ __forceinline__ void open_halves(double *, const mt_vec<uint16_t, N> &) {}

/* A moment's reals, without scales. */
template <typename R, mt_moments M>
static __device__ __forceinline__ void open(R x[N], const void *codes, const place &w)
{
    typedef typename moment_of<R, M>::type moment;
    const mt_vec<moment, N> e = load((const moment *)codes, w.left, w.vectors);
    if constexpr (M == MT_MOMENTS_BF16) open_halves(x, e);
#pragma unroll
    for (int j = 0; j < N; j++)
        if constexpr (M == MT_MOMENTS_REAL) x[j] = e.at[j];
}

/* Of fp8; ROOT: v, which is kept as its square root. */
template <bool ROOT>
static __device__ __forceinline__ void open_fp8(float x[N], uint32_t codes, float inverse,
                                                const place &w)
{
    stored_values(x, w.e4m3, codes & 0xffff);
    stored_values(x + 2, w.e4m3, codes >> 16);
#pragma unroll
    for (int j = 0; j < N; j++) {
        x[j] = x[j] * inverse;
        if (ROOT) x[j] = x[j] * x[j];
    }
}
static __device__ __forceinline__ uint32_t load_codes(const void *p, const place &w)
{
    if (w.vectors && w.left >= N) return *(const uint32_t *)p;
    uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < N; j++)
        if (j < w.left) codes |= (uint32_t)((const uint8_t *)p)[j] << 8 * j;
    return codes;
}
static __device__ __forceinline__ void store_codes(void *p, uint32_t codes, const place &w)
{
    if (w.vectors && w.left >= N) {
        __stcs((uint32_t *)p, codes);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++)
        if (j < w.left) ((uint8_t *)p)[j] = (uint8_t)(codes >> 8 * j);
}

/* And back, without scales; SR: by the random bits in words. */
template <typename R, mt_moments M, bool SR>
static __device__ __forceinline__ void close(void *codes, const R x[N], const uint32_t words[2],
                                             const place &w)
{
    typedef typename moment_of<R, M>::type moment;
    mt_vec<moment, N> e;
#pragma unroll
    for (int j = 0; j < N; j++) {
        if constexpr (M == MT_MOMENTS_REAL) e.at[j] = x[j];
        if constexpr (M == MT_MOMENTS_BF16)
            e.at[j] = SR ? stored_stochastic(x[j], words[j / 2] >> (j % 2 * 16) & 0xffff)
                         : __bfloat16_as_ushort(__float2bfloat16_rn(x[j]));
    }
    store((moment *)codes + w.at, e, w.left, w.vectors);
}

/* The bits of a block's largest magnitude; NaN counts as 0. */
static __device__ __forceinline__ int32_t block_amax(const float x[N])
{
    float amax = 0;
#pragma unroll
    for (int j = 0; j < N; j++) amax = fmaxf(amax, fabsf(x[j]));
    return (int32_t)__reduce_max_sync(~0u, (unsigned)mt_bits(amax));
}

/* Both moments of a block in fp8; half a warp makes the scale of each. */
static __device__ __forceinline__ void close_fp8(const struct mt_adamw_args &a, const float m[N],
                                                 const float root[N], const place &w)
{
    const int lane = (int)threadIdx.x % 32;
    const bool of_v = lane >= 16;
    const int32_t amax_m = block_amax(m), amax_v = block_amax(root);
    const stored_scale own = stored_scale_of(w.e4m3, of_v ? amax_v : amax_m);
    if (lane % 16 == 0) (of_v ? a.v_scales : a.m_scales)[w.block] = own.inverse;
    const float by_m = __shfl_sync(~0u, own.scale, 0), by_v = __shfl_sync(~0u, own.scale, 16);
    uint32_t em = 0, ev = 0;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        em |= stored_codes(w.e4m3, m[j] * by_m, m[j + 1] * by_m) << 8 * j;
        ev |= stored_codes_up(w.e4m3, root[j] * by_v, root[j + 1] * by_v) << 8 * j;
    }
    store_codes((uint8_t *)a.m + w.at, em, w);
    store_codes((uint8_t *)a.v + w.at, ev, w);
}

template <typename R, bool SPLIT>
static __device__ __forceinline__ void open_master(R p[N], const source &s, const place &w)
{
    if constexpr (SPLIT) {
        mt_vec<uint16_t, N> high = load((const uint16_t *)s.p, w.left, w.vectors);
        mt_vec<int16_t, N> low = load((const int16_t *)s.p_low, w.left, w.vectors);
#pragma unroll
        for (int j = 0; j < N; j++) p[j] = mt_f32_from_bits(mt_master_join(high.at[j], low.at[j]));
    } else {
        mt_vec<R, N> x = load((const R *)s.p, w.left, w.vectors);
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
static __device__ __forceinline__ void open_grad(R g[N], bool bf16, const source &s, const place &w)
{
    if (bf16) {
        open_halves(g, load((const uint16_t *)s.grad, w.left, w.vectors));
    } else {
        mt_vec<R, N> grad = load((const R *)s.grad, w.left, w.vectors);
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
    adam_element(&p, &m, &v, g, adam_of(adam_rates_of<float>(&a), (float)a.decay, a.state));
    return { p, m, v };
}

/* Whether the fast way was right: then v lies where adam_root is, too. */
static __device__ __forceinline__ bool update(float p[N], float m[N], float v[N], const float g[N],
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
    if (!right) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const adam_state s = update_one(p[j], m[j], v[j], g[j], a);
            new_p[j] = s.p, new_m[j] = s.m, new_v[j] = s.v;
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) p[j] = new_p[j], m[j] = new_m[j], v[j] = new_v[j];
    return right;
}
static __device__ __forceinline__ bool update(double p[N], double m[N], double v[N],
                                              const double g[N], const adam<double> &c,
                                              const adam_fast &, const struct mt_adamw_args &)
{
#pragma unroll
    for (int j = 0; j < N; j++) adam_element(&p[j], &m[j], &v[j], g[j], c);
    return false;
}

/* A warp's block of elements. */
template <typename R, mt_moments M, bool SR, bool SPLIT>
static __device__ __forceinline__ void update_block(const struct mt_adamw_args &a, const adam<R> &c,
                                                    const adam_fast &fast, uint32_t step,
                                                    const source &s, const place &w)
{
    R p[N], m[N], v[N], g[N];
    open_grad(g, a.grad_bf16, s, w);
    open_master<R, SPLIT>(p, s, w);
    if constexpr (M == MT_MOMENTS_FP8) {
        open_fp8<false>(m, load_codes(s.m, w), s.inverse_m, w);
        open_fp8<true>(v, load_codes(s.v, w), s.inverse_v, w);
    } else {
        open<R, M>(m, s.m, w), open<R, M>(v, s.v, w);
    }
    const bool right = update(p, m, v, g, c, fast, a);
    close_master<R, SPLIT>(p, a, w);
    if constexpr (M == MT_MOMENTS_FP8) {
        if (right) {
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = adam_root(v[j]);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++) v[j] = sqrtf(v[j]);
        }
        close_fp8(a, m, v, w);
    } else {
        uint32_t of_m[2], of_v[2];
        if constexpr (SR)
            stored_draw(of_m, of_v, a.seed, (uint64_t)(a.first + w.at), 2 * a.param, step);
        close<R, M, SR>(a.m, m, of_m, w);
        close<R, M, SR>(a.v, v, of_v, w);
    }
}

/* The same, in place: what is not whole, or not aligned. */
template <typename R, mt_moments M, bool SR, bool SPLIT>
static __device__ __forceinline__ void
update_in_place(const struct mt_adamw_args &a, const adam<R> &c, const adam_fast &fast,
                uint32_t step, const mt_codec &e4m3, int64_t block, bool vectors)
{
    typedef typename moment_of<R, M>::type moment;
    const int64_t at = block * BLOCK + threadIdx.x % 32 * N;
    source s = { a.grad_bf16 ? (const void *)((const uint16_t *)a.grad + at)
                             : (const void *)((const R *)a.grad + at),
                 SPLIT ? (const void *)((const uint16_t *)a.p + at)
                       : (const void *)((const R *)a.p + at),
                 a.p_low + at,
                 (const moment *)a.m + at,
                 (const moment *)a.v + at,
                 1,
                 1 };
    if (M == MT_MOMENTS_FP8) s.inverse_m = a.m_scales[block], s.inverse_v = a.v_scales[block];
    update_block<R, M, SR, SPLIT>(a, c, fast, step, s, { at, a.count - at, block, vectors, e4m3 });
}

/* Blocks that a warp asks for while it updates another. */
template <mt_moments M> struct ahead {
    enum { OF = M == MT_MOMENTS_FP8 ? 3 : 2 };
};

/* The scales of its block, which each thread has for itself. */
template <mt_moments M> struct adamw_scales {
    static __device__ __forceinline__ void ask(const struct mt_adamw_args &, int64_t) {}
    static __device__ __forceinline__ void put(source *) {}
};
template <> struct adamw_scales<MT_MOMENTS_FP8> {
    float of_m[THREADS], of_v[THREADS];

    __device__ __forceinline__ void ask(const struct mt_adamw_args &a, int64_t block)
    {
        mt_copy_ask<sizeof(float)>(of_m + threadIdx.x, a.m_scales + block, sizeof(float));
        mt_copy_ask<sizeof(float)>(of_v + threadIdx.x, a.v_scales + block, sizeof(float));
    }
    __device__ __forceinline__ void put(source *s) const
    {
        s->inverse_m = of_m[threadIdx.x], s->inverse_v = of_v[threadIdx.x];
    }
};

/* What the threads read of a block each, every one its own part. */
template <mt_moments M, bool SPLIT> struct adamw_stage : adamw_scales<M> {
    typedef typename moment_of<float, M>::type moment;
    typedef mt_vec<moment, N> moments;
    enum { HALVES = N * sizeof(uint16_t) };
    mt_vec<float, N> grad[THREADS], master[THREADS];
    moments m[THREADS], v[THREADS];

    __device__ __forceinline__ void ask(const struct mt_adamw_args &a, int64_t block)
    {
        const int t = (int)threadIdx.x;
        const int64_t at = block * BLOCK + t % 32 * N;
        char *high = (char *)(master + t);
        if (a.grad_bf16)
            mt_copy_ask<HALVES>(grad + t, (const uint16_t *)a.grad + at, HALVES);
        else
            mt_copy_ask<sizeof *grad>(grad + t, (const float *)a.grad + at, sizeof *grad);
        if constexpr (SPLIT) {
            mt_copy_ask<HALVES>(high, (const uint16_t *)a.p + at, HALVES);
            mt_copy_ask<HALVES>(high + HALVES, a.p_low + at, HALVES);
        } else {
            mt_copy_ask<sizeof *master>(high, (const float *)a.p + at, sizeof *master);
        }
        mt_copy_ask<sizeof(moments)>(m + t, (const moment *)a.m + at, sizeof(moments));
        mt_copy_ask<sizeof(moments)>(v + t, (const moment *)a.v + at, sizeof(moments));
        adamw_scales<M>::ask(a, block);
    }
    __device__ __forceinline__ source lane() const
    {
        const int t = (int)threadIdx.x;
        source s = {
            grad + t, master + t, (const char *)(master + t) + HALVES, m + t, v + t, 1, 1
        };
        adamw_scales<M>::put(&s);
        return s;
    }
};

/* A warp's share, from `block` on, of the blocks before `whole`, which are aligned; returns the
 * next one. */
template <mt_moments M, bool SR, bool SPLIT>
static __device__ __forceinline__ int64_t update_whole(adamw_stage<M, SPLIT> *stages,
                                                       const struct mt_adamw_args &a,
                                                       const adam<float> &c, const adam_fast &fast,
                                                       uint32_t step, const mt_codec &e4m3,
                                                       int64_t block, int64_t whole, int64_t turn)
{
    typedef adamw_stage<M, SPLIT> stage;
    enum { AHEAD = ahead<M>::OF };
    const int shared = mt_opaque((int)__cvta_generic_to_shared(stages));
    const auto at = [=](int i) {
        return (stage *)__cvta_shared_to_generic((size_t)(shared + i * (int)sizeof(stage)));
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (block + i * turn < whole) at(i)->ask(a, block + i * turn);
        mt_copies_group();
    }
    for (int now = 0; block < whole; block += turn) {
        const int64_t next = block + AHEAD * turn;
        mt_copies_wait<AHEAD - 1>();
        if (next < whole) at(now ? now - 1 : (int)AHEAD)->ask(a, next);
        mt_copies_group();
        update_block<float, M, SR, SPLIT>(
            a, c, fast, step, at(now)->lane(),
            { block * BLOCK + threadIdx.x % 32 * N, N, block, true, e4m3 });
        now = now == AHEAD ? 0 : now + 1;
    }
    return block;
}

/* So many thread blocks share a part of all params' blocks, of which each warp has a run, in turns:
 * what is read and written at a time lies together. */
struct adamw_shares {
    int run, beside;
};

/* The params of a launch, as many as its arguments hold, and the blocks before each and all. One
 * alone has its pointers in the kernel's arguments, not in registers. */
enum { MANY = 20 };
template <typename R, int MOST> struct adamw_list {
    struct mt_adamw_args params[MOST];
    int64_t before[MOST + 1];
    adam_rates<R> rates;
    R decay[MOST];
    mt_codec e4m3;
    uint32_t vectors; /* a bit for each */
    int count;
    adamw_shares shares;
};
static_assert(sizeof(adamw_list<double, MANY>) <= 4096, "arguments of a kernel");

template <typename R, mt_moments M, bool SR, bool SPLIT, int MOST>
static __global__ void __launch_bounds__(THREADS)
    adamw_kernel(const __grid_constant__ adamw_list<R, MOST> l)
{
    const struct mt_step_state *state = l.params[0].state;
    if (state->skip) return;
    const uint32_t step = (uint32_t)state->applied;
    const int beside = l.shares.beside;
    const int64_t turn = (int64_t)beside * WARPS, first = blockIdx.x / beside * l.shares.run * turn,
                  last = first + l.shares.run * turn;
    int64_t next = first + blockIdx.x % beside * WARPS + threadIdx.x / 32;
    for (int i = 0; i < (MOST == 1 ? 1 : l.count); i++) {
        const int64_t before = MOST == 1 ? 0 : l.before[i], end = min(l.before[i + 1], last);
        if (next >= end) continue;
        const struct mt_adamw_args &a = l.params[i];
        const bool vectors = l.vectors >> i & 1;
        const adam<R> c = adam_of(l.rates, l.decay[MOST == 1 ? 0 : i], state);
        const adam_fast fast = fast_of(c);
        if constexpr (sizeof(R) == sizeof(float)) {
            __shared__ adamw_stage<M, SPLIT> stages[ahead<M>::OF + 1];
            if (vectors)
                next = before +
                       update_whole<M, SR, SPLIT>(stages, a, c, fast, step, l.e4m3, next - before,
                                                  min(a.count / BLOCK, last - before), turn);
        }
        for (; next < end; next += turn)
            update_in_place<R, M, SR, SPLIT>(a, c, fast, step, l.e4m3, next - before, vectors);
    }
}

/* The kernel of a call's forms. */
template <typename R, int MOST>
static void (*choose(const struct mt_adamw_args *a))(adamw_list<R, MOST>)
{
    if constexpr (sizeof(R) == sizeof(double)) {
        return adamw_kernel<double, MT_MOMENTS_REAL, false, false, MOST>;
    } else {
#define FORMS(M, SR)                                                                               \
    {                                                                                              \
        adamw_kernel<float, M, SR, false, MOST>, adamw_kernel<float, M, SR, true, MOST>            \
    }
        static void (*const entries[MT_MOMENTS_COUNT][2][MT_MASTER_COUNT])(adamw_list<R, MOST>) = {
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

/* Measured on an H200: what has more to begin with, and more arithmetic, takes longer runs and more
 * thread blocks beside each other, of fp8 all; shorter ones where processors would have none. */
static adamw_shares shares_of(const mt_stream *stream, const struct mt_adamw_args *a,
                              int64_t blocks)
{
    const bool fp8 = a->moments == MT_MOMENTS_FP8;
    const int processors = mt_cuda_multiprocessors(stream);
    const int most = fp8 ? 62 : a->stochastic ? 24 : 3;
    const int64_t even = blocks / ((int64_t)processors * WARPS * 16);
    adamw_shares s = { even < 1 ? 1 : even < most ? (int)even : most, 1 };
    if (s.run > 1 && a->stochastic) s.beside = 2 * processors;
    if (s.run > 1 && fp8) s.beside = (int)mt_ceil_div(blocks, (int64_t)s.run * WARPS);
    return s;
}

template <typename R, int MOST>
static mt_status update(mt_stream *stream, const struct mt_adamw_args *const *params, int count)
{
    adamw_list<R, MOST> l = {};
    l.rates = adam_rates_of<R>(params[0]);
    l.e4m3 = mt_codec_of(MT_ELEMENT_E4M3), l.count = count;
    for (int i = 0; i < count; i++) {
        l.params[i] = *params[i], l.decay[i] = (R)params[i]->decay;
        l.before[i + 1] = l.before[i] + mt_ceil_div(params[i]->count, BLOCK);
        l.vectors |= (uint32_t)has_vectors<R>(params[i]) << i;
    }
    l.shares = shares_of(stream, params[0], l.before[count]);
    const int64_t part = (int64_t)l.shares.run * l.shares.beside * WARPS;
    const int64_t grid = mt_ceil_div(l.before[count], part) * l.shares.beside;
    choose<R, MOST>(params[0])<<<(unsigned)grid, THREADS, 0, mt_cuda_stream(stream)>>>(l);
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

/* ---- join_master ---------------------------------------------------------------------------- */

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
