/* The router: logits, softmax, top-k, and its backward. A warp holds tokens' rows of experts in
 * registers. Sums over tokens go through fixed blocks of tokens in order. */
#include "kernels/cuda/router_few.cuh"
#include "kernels/cuda/router_product.cuh"
#include "kernels/cuda/rowsums.cuh"
#include "kernels/cuda/scratch.h"

enum {
    THREADS = 256,
    FORMS = 6,        /* 1, 2, 4, .. 32 experts to a lane */
    SUM_BLOCKS = 640, /* blocks of tokens that are summed by themselves, at most: at once */
    SUM_TOKENS = 16,  /* whose number of tokens is a multiple of these */
    FEW_FORMS = 3,    /* forms whose tokens have FEW lanes each */
    SUM_THREADS = 128,
    TILE = 128,       /* dwr is cut into tiles of so many rows and columns, and its tokens into */
    TILES = 256,      /* parts, so that there are so many tiles, */
    LEAST_PART = 256, /* of so many tokens at least, */
    PART_STEP = 32    /* a multiple of this many */
};

/* Of the kernels with 1, 2, 4, .. experts to a lane, the one with room for all. */
static int form_of(int64_t experts)
{
    int form = 0;
    while ((32 << form) < experts) form++;
    return form;
}

static mt_status check_experts(const char *op, int64_t experts)
{
    static_assert(MT_CUDA_MOST_EXPERTS == 16 << FORMS, "room for all");
    MT_REQUIRE(experts <= MT_CUDA_MOST_EXPERTS, MT_EUNSUPPORTED,
               "%s: experts is %lld, at most %d on cuda", op, (long long)experts,
               (int)MT_CUDA_MOST_EXPERTS);
    return MT_OK;
}

/* ---- forward ----------------------------------------------------------------------------------
 */

/* So many that the warps' rows of experts have room in shared memory. */
static constexpr int threads_of(int per, int lanes = 32)
{
    return lanes < 32 ? THREADS / 2 : per < 16 ? THREADS : THREADS * 8 / per;
}

/* Whether runs of experts are whole and aligned in rows of `line` reals. */
template <typename R> static bool runs_aligned(const void *p, int64_t line, int per)
{
    const int64_t bytes = (per < 4 ? per : 4) * (int64_t)sizeof(R);
    return ((uintptr_t)p | (uintptr_t)(line * (int64_t)sizeof(R))) % (uintptr_t)bytes == 0;
}

/* A block of `size` tokens, a warp for some in turn; then its sums: for each expert its
 * probabilities and choices, and as column E the squares of lse. A warp's logarithms are found 32
 * at a time, a lane for each. */
template <int PER, int LANES, typename LOGITS> static constexpr int choosers()
{
    return LOGITS::THREADS_OF ? (int)LOGITS::THREADS_OF : threads_of(PER, LANES);
}

template <typename R, int PER, int LANES, typename LOGITS>
static __global__ void __launch_bounds__(choosers<PER, LANES, LOGITS>(), sizeof(R) == 8 ? 1
                                                                         : PER == 8 && LANES == 32
                                                                             ? 3
                                                                             : LOGITS::BLOCKS)
    choose_kernel(struct mt_router_fwd_args a, LOGITS logits, int64_t size, double *sums,
                  int32_t *counts)
{
    enum {
        WARPS = choosers<PER, LANES, LOGITS>() / 32,
        RUN = expert_runs<PER, LANES>::RUN,
        TOKENS = 32 / LANES, /* of a warp, */
        STEP = WARPS * TOKENS
    };
    __shared__ int32_t chosen[PER * LANES];
    __shared__ double own[WARPS][PER][32], squares[WARPS];
    __shared__ alignas(32) R rows[WARPS][TOKENS][PER * LANES];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = (int)a.experts;
    const int64_t end = min(a.tokens, (blockIdx.x + 1) * size);
    const int64_t first = blockIdx.x * size + warp * TOKENS;
    double z = 0;
    logits.begin(a);
#pragma unroll 1
    for (int e = threadIdx.x; e < experts; e += WARPS * 32) chosen[e] = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) own[warp][j][lane] = 0;
    __syncthreads();
    for (int64_t base = first; base < end; base += LANES * STEP) {
        R my_top = 0, my_sum = 1;
        for (int i = 0; i < LANES && base + i * STEP < end; i++) {
            R x[PER], top, sum;
            const int64_t t = base + i * STEP + lane / LANES, there = min(t, end - 1);
            logits.template read<PER, LANES>(x, a, there);
            choose_token<R, PER, LANES>(a, there, t < end, x, logits.vectors, own[warp][0] + lane,
                                        rows[warp][lane / LANES], chosen, &top, &sum);
            if (lane % LANES == i) my_top = top, my_sum = sum;
        }
        const int64_t t = base + lane % LANES * STEP + lane / LANES;
        if (t >= end) continue;
        const R lse = (R)((double)my_top + log((double)my_sum));
        ((R *)a.lse)[t] = lse;
        z += (double)lse * (double)lse;
    }
    z = mt_warp_sum(z);
    if (lane == 0) squares[warp] = z;
    __syncthreads();
    double *to = sums + (int64_t)blockIdx.x * (experts + 1);
#pragma unroll 1
    for (int e = threadIdx.x; e < experts; e += WARPS * 32) {
        double sum = 0;
        for (int w = 0; w < WARPS; w++)
#pragma unroll
            for (int i = 0; i < TOKENS; i++)
                sum += own[w][e / (LANES * RUN) * RUN + e % RUN][i * LANES + e / RUN % LANES];
        to[e] = sum;
        counts[(int64_t)blockIdx.x * experts + e] = chosen[e];
    }
    if (threadIdx.x) return;
    z = 0;
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) z += squares[w];
    to[experts] = z;
}

/* A column of the sums to a block. */
template <typename R>
static __global__ void __launch_bounds__(SUM_THREADS)
    finish_kernel(struct mt_router_fwd_args a, int blocks, const double *sums,
                  const int32_t *counts)
{
    const int c = blockIdx.x, experts = (int)a.experts;
    double sum = 0;
    int64_t count = 0;
#pragma unroll 8
    for (int b = threadIdx.x; b < blocks; b += SUM_THREADS) {
        sum += sums[(int64_t)b * (experts + 1) + c];
        if (c < experts) count += counts[(int64_t)b * experts + c];
    }
    sum = mt_group_sum<SUM_THREADS>(sum), count = mt_group_sum<SUM_THREADS>(count);
    if (threadIdx.x) return;
    if (c == experts) {
        *(R *)a.z_sum = (R)sum;
        return;
    }
    ((R *)a.prob_sum)[c] = (R)sum;
    a.counts[c] = count;
    if (a.load) a.load[c] += count;
}

/* How the forward pass goes about its tokens, and the scratch it takes. */
struct fwd_plan {
    int64_t size; /* tokens of a block of sums */
    int blocks;
    bool few, tensor;
    tensor::logits_plan logits;
    size_t sums, counts; /* bytes */
};

template <typename T>
static fwd_plan plan_fwd(const mt_stream *stream, const struct mt_router_fwd_args *a)
{
    fwd_plan p = {};
    p.few = takes_few<T>(a);
    const int64_t unit = p.few ? (int)FEW_TOKENS : (int)SUM_TOKENS;
    p.size = mt_ceil_div(mt_ceil_div(a->tokens, SUM_BLOCKS), unit) * unit;
    if (p.size < unit) p.size = unit;
    p.blocks = (int)mt_ceil_div(a->tokens, p.size);
    p.tensor = !p.few && tensor::takes<T>(stream, a->x, a->tokens, a->width);
    if (p.tensor) p.logits = tensor::plan_logits(a->tokens, a->width, a->experts);
    p.sums = (size_t)p.blocks * (size_t)(a->experts + 1) * sizeof(double);
    p.counts = (size_t)p.blocks * (size_t)a->experts * sizeof(int32_t);
    return p;
}

template <typename T>
static size_t router_fwd_scratch(const mt_stream *stream, const struct mt_router_fwd_args *a)
{
    fwd_plan p = plan_fwd<T>(stream, a);
    return p.logits.planes + p.logits.parts + p.sums + p.counts;
}
MT_CUDA_SCRATCH(router_fwd)

template <typename R>
static mt_status choose(mt_stream *stream, const struct mt_router_fwd_args *a, const fwd_plan &p,
                        const R *logits, int count, int64_t line, char *scratch)
{
    typedef logit_parts<R> from;
    typedef void (*entry)(struct mt_router_fwd_args, from, int64_t, double *, int32_t *);
    static const entry entries[FORMS] = {
        choose_kernel<R, 4, FEW, from>,  choose_kernel<R, 8, FEW, from>,
        choose_kernel<R, 16, FEW, from>, choose_kernel<R, 8, 32, from>,
        choose_kernel<R, 16, 32, from>,  choose_kernel<R, 32, 32, from>
    };
    const int form = form_of(a->experts), per = 1 << form;
    const int threads = threads_of(per, form < FEW_FORMS ? FEW : 32);
    const bool vectors = runs_aligned<R>(logits, line, per) &&
                         runs_aligned<R>(a->probs, a->experts, per) &&
                         runs_aligned<R>(a->logits, a->experts, per);
    const from parts = { logits, count, (int)line, vectors };
    double *sums = (double *)(scratch + p.logits.planes + p.logits.parts);
    int32_t *counts = (int32_t *)((char *)sums + p.sums);
    entries[form]<<<p.blocks, threads, 0, mt_cuda_stream(stream)>>>(*a, parts, p.size, sums,
                                                                    counts);
    MT_LAUNCHED(stream, "router_fwd");
    return MT_OK;
}

/* Of few experts, logits and choice by one kernel. */
template <typename T, int GROUPS>
static mt_status choose_few(mt_stream *stream, const struct mt_router_fwd_args *a,
                            const fwd_plan &p, char *scratch)
{
    typedef few_logits<T, GROUPS> from;
    auto kernel = choose_kernel<mt_real<T>, FEW_PER, FEW, from>;
    const size_t bytes = from::bytes(a);
    double *sums = (double *)scratch;
    MT_CUDA(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)bytes));
    kernel<<<p.blocks, FEW_THREADS, bytes, mt_cuda_stream(stream)>>>(
        *a, from{ true }, p.size, sums, (int32_t *)((char *)sums + p.sums));
    MT_LAUNCHED(stream, "router_fwd");
    return MT_OK;
}

/* The logits as the tensor cores' parts, or where they are wanted, else where the probabilities
 * will be; then the choice. */
template <typename T>
static mt_status choose_experts(mt_stream *stream, const struct mt_router_fwd_args *a,
                                const fwd_plan &p, char *scratch)
{
    typedef mt_real<T> R;
    if constexpr (mt_dtype_of<T>::value != MT_F64)
        if (p.few)
            return (a->experts <= FEW       ? choose_few<T, 1>
                    : a->experts <= 2 * FEW ? choose_few<T, 2>
                                            : choose_few<T, 4>)(stream, a, p, scratch);
    if constexpr (mt_dtype_of<T>::value == MT_BF16)
        if (p.tensor) {
            float *parts = (float *)(scratch + p.logits.planes);
            MT_TRY(tensor::logits(stream, a, p.logits, parts, scratch));
            return choose<float>(stream, a, p, parts, (int)p.logits.count, p.logits.columns,
                                 scratch);
        }
    R *logits = (R *)(a->logits ? a->logits : a->probs);
    bool vectors = product::columns_aligned<R>(logits, a->experts);
    product::put_real<R> put = { logits, a->tokens, a->experts, vectors };
    MT_TRY((product::run<true, true>(
        stream, "router_fwd", product::operand_of<T>(a->x, a->tokens, a->width),
        product::operand_of<R>(a->wr, a->experts, a->width), a->width, a->width, put)));
    return choose<R>(stream, a, p, logits, 1, a->experts, scratch);
}

template <typename T>
static mt_status router_fwd(mt_stream *stream, const struct mt_router_fwd_args *a)
{
    typedef mt_real<T> R;
    MT_TRY(check_experts("router_fwd", a->experts));
    cudaStream_t on = mt_cuda_stream(stream);
    const fwd_plan p = plan_fwd<T>(stream, a);
    void *scratch;
    MT_TRY(mt_cuda_scratch(stream, &scratch, router_fwd_scratch<T>(stream, a)));
    double *sums = (double *)((char *)scratch + p.logits.planes + p.logits.parts);
    int32_t *counts = (int32_t *)((char *)sums + p.sums);
    if (a->tokens) MT_TRY(choose_experts<T>(stream, a, p, (char *)scratch));
    finish_kernel<R>
        <<<(unsigned)(a->experts + 1), SUM_THREADS, 0, on>>>(*a, p.blocks, sums, counts);
    MT_LAUNCHED(stream, "router_fwd");
    return MT_OK;
}
MT_CUDA_OP(router_fwd)

/* ---- backward ---------------------------------------------------------------------------------
 */

template <typename R, int PER, int LANES>
static __global__ void __launch_bounds__(threads_of(PER, LANES))
    dlogits_kernel(struct mt_router_bwd_args a, tensor::dlogits_planes planes, bool vectors)
{
    enum { WARPS = threads_of(PER, LANES) / 32, TOKENS = 32 / LANES };
    __shared__ alignas(32) R rows[WARPS][TOKENS][PER * LANES];
    const int lane = threadIdx.x % 32;
    R *row = rows[threadIdx.x / 32][lane / LANES], x[PER];
    if (blockIdx.x == 0) planes.put_starts(a.tokens);
    const int64_t step = (int64_t)gridDim.x * WARPS * TOKENS;
    int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * TOKENS;
    for (; first < a.tokens; first += step) {
        const int64_t t = min(first + lane / LANES, a.tokens - 1); /* the last one more than once */
        token_dlogits<R, PER, LANES>(x, a, t, row, vectors);
        put_dlogits<R, PER, LANES>(x, a, t, planes, vectors);
    }
}

template <typename R>
static mt_status find_dlogits(mt_stream *stream, const struct mt_router_bwd_args *a,
                              const tensor::dlogits_planes &planes)
{
    typedef void (*entry)(struct mt_router_bwd_args, tensor::dlogits_planes, bool);
    static const entry entries[FORMS] = { dlogits_kernel<R, 4, FEW>,  dlogits_kernel<R, 8, FEW>,
                                          dlogits_kernel<R, 16, FEW>, dlogits_kernel<R, 8, 32>,
                                          dlogits_kernel<R, 16, 32>,  dlogits_kernel<R, 32, 32> };
    const int form = form_of(a->experts), per = 1 << form, lanes = form < FEW_FORMS ? FEW : 32;
    const int threads = threads_of(per, lanes);
    const bool vectors = runs_aligned<R>(a->probs, a->experts, per) &&
                         runs_aligned<R>(a->dlogits, a->experts, per) &&
                         runs_aligned<R>(a->dprob_sum, a->experts, per);
    const int blocks = mt_blocks(stream, a->tokens * lanes, threads);
    entries[form]<<<blocks, threads, 0, mt_cuda_stream(stream)>>>(*a, planes, vectors);
    MT_LAUNCHED(stream, "router_bwd");
    return MT_OK;
}

/* dx = dx_add + dlogits wr. */
template <typename T>
static mt_status find_dx(mt_stream *stream, const struct mt_router_bwd_args *a)
{
    typedef mt_real<T> R;
    bool vectors = product::columns_aligned<T>(a->dx, a->width) &&
                   product::columns_aligned<T>(a->dx_add, a->width);
    product::put_sum<T> put = { (T *)a->dx, (const T *)a->dx_add, a->width, vectors };
    return product::run<true, false>(
        stream, "router_bwd", product::operand_of<R>(a->dlogits, a->tokens, a->experts),
        product::operand_of<R>(a->wr, a->width, a->width), a->experts, a->experts, put);
}

template <typename T>
static mt_status find_dlogits_dx(mt_stream *stream, const struct mt_router_bwd_args *a,
                                 const tensor::dlogits_planes &planes)
{
    typedef mt_real<T> R;
    typedef void (*entry)(struct mt_router_bwd_args, tensor::dlogits_planes, bool);
    static const entry entries[] = { dlogits_dx_kernel<T, 1>, dlogits_dx_kernel<T, 2>,
                                     dlogits_dx_kernel<T, 4>, dlogits_dx_kernel<T, 8> };
    const int64_t pieces = a->width * (int64_t)sizeof(T) / 16;
    const int form = pieces <= 8 ? 0 : pieces <= 16 ? 1 : pieces <= 32 ? 2 : 3;
    const bool vectors = runs_aligned<R>(a->probs, a->experts, FEW_PER) &&
                         runs_aligned<R>(a->dlogits, a->experts, FEW_PER) &&
                         runs_aligned<R>(a->dprob_sum, a->experts, FEW_PER);
    const unsigned blocks = (unsigned)mt_ceil_div(a->tokens, FEW_TOKENS);
    entries[form]<<<blocks, FEW_THREADS, 0, mt_cuda_stream(stream)>>>(*a, planes, vectors);
    MT_LAUNCHED(stream, "router_bwd");
    return MT_OK;
}

/* dwr = (accumulate ? dwr : 0) + the parts in order. */
template <typename R>
static __global__ void add_parts_kernel(R *dwr, const R *parts, int count, int64_t elements,
                                        bool accumulate)
{
    MT_GRID_STRIDE(i, elements)
    {
        R sum = parts[i];
#pragma unroll 4
        for (int p = 1; p < count; p++) sum += parts[p * elements + i];
        dwr[i] = (accumulate ? dwr[i] : 0) + sum;
    }
}

/* Tokens of a part of dwr: parts are summed by themselves where E and D alone give too few tiles.
 */
static int64_t part_of(const struct mt_router_bwd_args *a)
{
    int64_t tiles = mt_ceil_div(a->experts, TILE) * mt_ceil_div(a->width, TILE);
    int64_t most = mt_ceil_div(a->tokens, LEAST_PART), parts = TILES / tiles;
    if (parts > most) parts = most;
    if (parts < 2) return a->tokens;
    return mt_ceil_div(mt_ceil_div(a->tokens, parts), PART_STEP) * PART_STEP;
}

static int64_t parts_of(const struct mt_router_bwd_args *a)
{
    return a->tokens ? mt_ceil_div(a->tokens, part_of(a)) : 1;
}

/* dwr [+]= dlogits^T x; `parts`: room for them. */
template <typename T>
static mt_status find_dwr(mt_stream *stream, const struct mt_router_bwd_args *a, mt_real<T> *parts)
{
    typedef mt_real<T> R;
    const char *op = "router_bwd";
    int64_t elements = a->experts * a->width;
    bool vectors = product::columns_aligned<R>(parts, a->width);
    product::put_real<R> put = { parts, a->experts, a->width, vectors }; /* of each part */
    MT_TRY((product::run<false, false>(
        stream, op, product::operand_of<R>(a->dlogits, a->experts, a->experts),
        product::operand_of<T>(a->x, a->width, a->width), a->tokens, part_of(a), put)));
    add_parts_kernel<R>
        <<<mt_blocks(stream, elements, THREADS), THREADS, 0, mt_cuda_stream(stream)>>>(
            (R *)a->dwr, parts, (int)parts_of(a), elements, a->accumulate);
    MT_LAUNCHED(stream, op);
    return MT_OK;
}

/* What the backward pass computes, and the scratch it takes. */
struct bwd_plan {
    bool dx, dwr, few, tensor;
    tensor::bwd_plan planes;
    size_t bytes;
};

template <typename T>
static bwd_plan plan_bwd(const mt_stream *stream, const struct mt_router_bwd_args *a)
{
    bwd_plan p = {};
    p.dx = a->dx && a->tokens && a->width, p.dwr = a->dwr && a->width;
    p.few = p.dx && takes_few<T>(a);
    bool aligned = ((uintptr_t)a->dx | (uintptr_t)a->dx_add) % 16 == 0;
    p.tensor = ((p.dx && !p.few) || p.dwr) && a->tokens && aligned &&
               tensor::takes<T>(stream, a->x, a->tokens, a->width);
    if (p.tensor) {
        p.planes = tensor::plan_gradients(a, p.dx && !p.few, p.dwr);
        p.bytes = p.planes.dlogits + p.planes.wr + p.planes.runs + p.planes.starts;
    } else if (p.dwr) {
        p.bytes = (size_t)(parts_of(a) * a->experts * a->width) * sizeof(mt_real<T>);
    }
    return p;
}

template <typename T>
static size_t router_bwd_scratch(const mt_stream *stream, const struct mt_router_bwd_args *a)
{
    return plan_bwd<T>(stream, a).bytes;
}
MT_CUDA_SCRATCH(router_bwd)

/* dlogits and both products of their planes. */
static mt_status multiply_planes(mt_stream *stream, const struct mt_router_bwd_args *a,
                                 const bwd_plan &p, void *scratch)
{
    mt_bf16 *dlogits = (mt_bf16 *)scratch;
    char *wr = (char *)scratch + p.planes.dlogits, *runs = wr + p.planes.wr;
    int64_t *starts = p.dwr ? (int64_t *)(runs + p.planes.runs) : NULL;
    tensor::dlogits_planes to = { dlogits,
                                  starts,
                                  (int)p.planes.copies,
                                  (int)p.planes.columns,
                                  (int)p.planes.run,
                                  (int)p.planes.count };
    if (p.few)
        MT_TRY(find_dlogits_dx<mt_bf16>(stream, a, to));
    else
        MT_TRY(find_dlogits<float>(stream, a, to));
    if (p.dx && !p.few) MT_TRY(tensor::dx(stream, a, p.planes, dlogits, (mt_bf16 *)wr));
    return p.dwr ? tensor::dwr(stream, a, p.planes, dlogits, (float *)runs, starts) : MT_OK;
}

template <typename T>
static mt_status router_bwd(mt_stream *stream, const struct mt_router_bwd_args *a)
{
    MT_TRY(check_experts("router_bwd", a->experts));
    const bwd_plan p = plan_bwd<T>(stream, a);
    void *scratch;
    MT_TRY(mt_cuda_scratch(stream, &scratch, p.bytes));
    if (p.tensor) return multiply_planes(stream, a, p, scratch);
    if constexpr (mt_dtype_of<T>::value != MT_F64)
        if (p.few) MT_TRY(find_dlogits_dx<T>(stream, a, {}));
    if (a->tokens && !p.few) MT_TRY(find_dlogits<mt_real<T>>(stream, a, {}));
    if (p.dx && !p.few) MT_TRY(find_dx<T>(stream, a));
    return p.dwr ? find_dwr<T>(stream, a, (mt_real<T> *)scratch) : MT_OK;
}
MT_CUDA_OP(router_bwd)
