/* The router of few experts without tensor cores, whose operands would have to be made first: a
 * launch for the logits and the choice, one for their gradient and dx. */
#pragma once

#include "kernels/cuda/router_gradient.cuh"
#include "kernels/cuda/words.cuh"

enum {
    FEW = 8, /* lanes of a token: a warp's reductions and top_k steps are those of several tokens */
    FEW_EXPERTS = 32,
    FEW_PER = FEW_EXPERTS / FEW,
    FEW_WEIGHTS = 8192, /* of wr, */
    FEW_WIDTH = 512, /* and of rows of x, which are in shared memory together, a row for each of */
    FEW_TOKENS = 32, /* of a block */
    FEW_THREADS = FEW_TOKENS * FEW,
    FEW_SHARED = 80 << 10 /* bytes of both, at most: beside the sums, what any card's blocks have */
};

/* Whether rows of T, and wr's, lie on 16 bytes. */
template <typename T> static bool few_aligned(const void *x, const void *wr, int64_t width)
{
    return mt_dtype_of<T>::value != MT_F64 && width && width * (int64_t)sizeof(T) % 16 == 0 &&
           width % 4 == 0 && ((uintptr_t)x | (uintptr_t)wr) % 16 == 0;
}

/* ---- forward ----------------------------------------------------------------------------------
 */

/* Logits as their warp makes them, term by term, of GROUPS times FEW experts. In shared memory: wr,
 * and FEW_TOKENS rows of x, with 16 bytes after each row, so that lanes of several experts, or
 * tokens, read from all banks. */
template <typename T, int GROUPS> struct few_logits {
    enum { PAD = 16, CHUNK = 16 / sizeof(T), THREADS_OF = FEW_THREADS, BLOCKS = 2 };
    bool vectors; /* as logit_parts */

    static size_t bytes(const struct mt_router_fwd_args *a)
    {
        return (size_t)a->experts * (a->width * sizeof(float) + PAD) +
               FEW_TOKENS * (a->width * sizeof(T) + PAD);
    }
    static __device__ __forceinline__ char *shared()
    {
        extern __shared__ __align__(16) char few_shared[];
        return few_shared;
    }
    /* wr to shared memory, by every thread; they wait for one another later. */
    __device__ __forceinline__ void begin(const struct mt_router_fwd_args &a) const
    {
        const unsigned line = (unsigned)a.width / 4, count = (unsigned)a.experts * line;
#pragma unroll 8
        for (unsigned i = threadIdx.x; i < count; i += blockDim.x)
            *(float4 *)(shared() + i * sizeof(float4) + i / line * PAD) =
                __ldg((const float4 *)a.wr + i);
    }
    template <int PER, int LANES>
    __device__ __forceinline__ void read(float x[PER], const struct mt_router_fwd_args &a,
                                         int64_t t) const
    {
        static_assert(LANES == (int)FEW && GROUPS <= PER && expert_runs<PER, LANES>::RUN == 1,
                      "a lane's experts are FEW apart");
        const int lane = threadIdx.x % LANES, width = (int)a.width, experts = (int)a.experts;
        const int pitch = width * (int)sizeof(float) + PAD;
        char *row =
            shared() + experts * pitch + threadIdx.x / LANES * (width * (int)sizeof(T) + PAD);
        const uint4 *from = (const uint4 *)((const T *)a.x + t * width);
        __syncwarp(); /* the token before has been read */
#pragma unroll 8
        for (int c = lane; c < width / CHUNK; c += LANES) ((uint4 *)row)[c] = __ldg(from + c);
        __syncwarp();
        const float *w[GROUPS];
#pragma unroll
        for (int j = 0; j < PER; j++) x[j] = 0;
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
            w[j] = (const float *)(shared() + min(j * LANES + lane, experts - 1) * pitch);
#pragma unroll 4
        for (int c = 0; c < width; c += CHUNK) {
            float in[CHUNK], by[GROUPS][CHUNK];
            mt_get_vec<CHUNK>(in, (const T *)row + c);
#pragma unroll
            for (int j = 0; j < GROUPS; j++) mt_get_vec<CHUNK>(by[j], w[j] + c);
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
#pragma unroll
                for (int j = 0; j < GROUPS; j++) x[j] = fma(in[i], by[j][i], x[j]);
        }
#pragma unroll
        for (int j = 0; j < PER; j++)
            if (j * LANES + lane >= experts) x[j] = -INFINITY;
        if (a.logits)
            write_experts<float, PER, LANES>((float *)a.logits + t * experts, x, experts, vectors);
    }
};

/* Extents decide: sums have an order of their own. */
template <typename T> static bool takes_few(const struct mt_router_fwd_args *a)
{
    return a->experts <= FEW_EXPERTS && a->width <= FEW_WIDTH &&
           a->experts * a->width <= FEW_WEIGHTS && few_aligned<T>(a->x, a->wr, a->width) &&
           few_logits<T, 1>::bytes(a) <= FEW_SHARED;
}

/* ---- backward ---------------------------------------------------------------------------------
 */

/* Of few experts, dlogits and dx by one kernel: a block has FEW_TOKENS tokens, a thread N columns
 * of PER_THREAD of them at a time. */
template <typename T, int PER_THREAD>
static __global__ void __launch_bounds__(FEW_THREADS, 2)
    dlogits_dx_kernel(struct mt_router_bwd_args a, tensor::dlogits_planes planes, bool vectors)
{
    typedef mt_real<T> R;
    enum {
        N = 16 / sizeof(T),
        TOKENS = 32 / FEW, /* of a warp */
        SIDE = FEW_THREADS * PER_THREAD / FEW_TOKENS,
        AT_ONCE = 4
    };
    static_assert(FEW_THREADS / 32 * TOKENS == FEW_TOKENS, "a warp's tokens are one for FEW lanes");
    __shared__ alignas(32) R rows[FEW_TOKENS][FEW_EXPERTS];
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * TOKENS + lane / FEW;
    const int64_t first = (int64_t)blockIdx.x * FEW_TOKENS;
    if (blockIdx.x == 0) planes.put_starts(a.tokens);
    {
        R x[FEW_PER];
        const int64_t t = min(first + own, a.tokens - 1); /* the last one more than once */
        token_dlogits<R, FEW_PER, FEW>(x, a, t, rows[own], vectors);
        put_dlogits<R, FEW_PER, FEW>(x, a, t, planes, vectors);
        __syncwarp();
        write_experts<R, FEW_PER, FEW>(rows[own], x, FEW_EXPERTS, true);
    }
    __syncthreads();
    const int mine = threadIdx.x / SIDE * PER_THREAD;
    for (int64_t c = threadIdx.x % SIDE * N; c < a.width; c += SIDE * N) {
        R sum[PER_THREAD][N] = {};
        for (int base = 0; base < a.experts; base += AT_ONCE) {
            R w[AT_ONCE][N];
#pragma unroll
            for (int e = 0; e < AT_ONCE; e++) {
                if (base + e < a.experts) {
                    mt_get_constant<N>(w[e], (const R *)a.wr + (base + e) * a.width + c);
                } else { /* nothing of an Inf is to be multiplied by 0 */
#pragma unroll
                    for (int j = 0; j < N; j++) w[e][j] = 0;
                }
            }
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                const mt_vec<R, AT_ONCE> d = *(const mt_vec<R, AT_ONCE> *)(rows[mine + i] + base);
#pragma unroll
                for (int e = 0; e < AT_ONCE; e++)
#pragma unroll
                    for (int j = 0; j < N; j++) sum[i][j] = fma(d.at[e], w[e][j], sum[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int64_t t = first + mine + i, at = t * a.width + c;
            if (t >= a.tokens) break;
            R old[N] = {};
            if (a.dx_add) mt_get_vec<N>(old, (const T *)a.dx_add + at);
#pragma unroll
            for (int j = 0; j < N; j++) sum[i][j] = old[j] + sum[i][j];
            mt_put_vec<N>((T *)a.dx + at, sum[i]);
        }
    }
}

/* Extents decide. Multiply-adds for an element of dx are as many as experts: of more than 16 they
 * would take longer than the memory does, where launches do not count. */
template <typename T> static bool takes_few(const struct mt_router_bwd_args *a)
{
    const int most = a->width <= FEW_WIDTH ? FEW_EXPERTS : FEW_EXPERTS / 2;
    return a->experts <= most && few_aligned<T>(a->dx, a->wr, a->width) &&
           (uintptr_t)a->dx_add % 16 == 0;
}
