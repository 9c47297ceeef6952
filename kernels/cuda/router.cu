/* The router: logits, softmax, top-k, and its backward. A warp holds a token's row of experts in
 * registers. Sums over tokens go through fixed blocks of tokens in order. */
#include "kernels/cuda/router_product.cuh"
#include "kernels/cuda/router_tensor.cuh"
#include "kernels/cuda/scratch.h"

enum {
    THREADS = 256,
    MOST_EXPERTS = 1024, /* 32 to a lane */
    FORMS = 6,           /* 1, 2, 4, .. 32 experts to a lane */
    SUM_BLOCKS = 1024,   /* blocks of tokens that are summed by themselves, at most */
    SUM_TOKENS = 32,     /* tokens of such a block, at least */
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
    MT_REQUIRE(experts <= MOST_EXPERTS, MT_EUNSUPPORTED, "%s: experts is %lld, at most %d on cuda",
               op, (long long)experts, (int)MOST_EXPERTS);
    return MT_OK;
}

/* ---- forward ----------------------------------------------------------------------------------
 */

/* Numbers in the order of scores, above 0; -0 is 0. */
static __device__ __forceinline__ uint32_t key_of(float x)
{
    uint32_t bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}
static __device__ __forceinline__ uint64_t key_of(double x)
{
    uint64_t bits = (uint64_t)__double_as_longlong(x + 0.0);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

static __device__ __forceinline__ uint32_t largest(uint32_t key)
{
    return __reduce_max_sync(~0u, key);
}
static __device__ __forceinline__ uint64_t largest(uint64_t key)
{
    for (int lane = 16; lane; lane >>= 1) {
        uint64_t other = __shfl_xor_sync(~0u, key, lane);
        key = other > key ? other : key;
    }
    return key;
}

/* The expert of the largest key, ties by index, whose key becomes 0. Every lane gets it. */
template <int PER, typename K> static __device__ __forceinline__ int take_best(K key[PER])
{
    const int lane = threadIdx.x % 32;
    K best = key[0];
    int at = lane;
#pragma unroll
    for (int j = 1; j < PER; j++)
        if (key[j] > best) best = key[j], at = j * 32 + lane;
    at = (int)__reduce_min_sync(~0u, best == largest(best) ? (unsigned)at : ~0u);
#pragma unroll
    for (int j = 0; j < PER; j++)
        if (at == j * 32 + lane) key[j] = 0;
    return at;
}

/* x of the lane's expert e. */
template <typename R, int PER> static __device__ __forceinline__ R of_expert(const R x[PER], int e)
{
    R mine = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) {
        R other = __shfl_sync(~0u, x[j], e % 32);
        if (j == e / 32) mine = other;
    }
    return mine;
}

/* Selects by score x, NaN last, and writes the choice and its weights; lane l has the slots l, l +
 * 32, ... Weights are added slot by slot. */
template <typename R, int PER>
static __device__ __forceinline__ void select(const struct mt_router_fwd_args &a, int64_t t,
                                              const R x[PER], const R probs[PER])
{
    R *weights = (R *)a.weights + t * a.top_k, total = 0, mine = 0;
    int32_t *chosen = a.chosen + t * a.top_k;
    int top_k = (int)a.top_k, lane = threadIdx.x % 32;
    decltype(key_of(R())) key[PER];
#pragma unroll
    for (int j = 0; j < PER; j++)
        key[j] = j * 32 + lane < a.experts ? key_of(x[j] == x[j] ? x[j] : -(R)INFINITY) : 0;
    for (int base = 0; base < top_k; base += 32) {
        int slots = min(32, top_k - base), choice = 0;
        for (int i = 0; i < slots; i++) {
            int e = take_best<PER>(key);
            if (lane == i) choice = e;
        }
        mine = of_expert<R, PER>(probs, choice);
        for (int i = 0; i < slots; i++) total += __shfl_sync(~0u, mine, i);
        if (lane < slots) chosen[base + lane] = choice;
        if (lane < slots && top_k > 32) weights[base + lane] = mine;
    }
    if (top_k <= 32) {
        if (lane < top_k) weights[lane] = a.normalize ? mine / total : mine;
        return;
    }
    for (int i = lane; i < top_k && a.normalize; i += 32) weights[i] = weights[i] / total;
}

/* A logit is the sum of its parts [count, tokens, line], in order. */
template <typename R, int PER>
static __global__ void __launch_bounds__(THREADS)
    choose_kernel(struct mt_router_fwd_args a, const R *parts, int count, int line)
{
    int lane = threadIdx.x % 32, experts = (int)a.experts;
    int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
    for (int64_t t = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; t < a.tokens; t += warps) {
        R x[PER], p[PER], top = -(R)INFINITY, sum = 0;
#pragma unroll
        for (int j = 0; j < PER; j++) {
            int e = j * 32 + lane;
            x[j] = e < experts ? parts[t * line + e] : -(R)INFINITY;
        }
#pragma unroll 1
        for (int i = 1; i < count; i++)
#pragma unroll
            for (int j = 0; j < PER; j++)
                if (j * 32 + lane < experts)
                    x[j] += parts[(i * a.tokens + t) * line + j * 32 + lane];
#pragma unroll
        for (int j = 0; j < PER; j++) {
            int e = j * 32 + lane;
            if (e < experts && a.logits && a.logits != parts)
                ((R *)a.logits)[t * experts + e] = x[j];
            top = x[j] > top ? x[j] : top; /* NaN is passed over */
        }
        top = mt_warp_max(top);
#pragma unroll
        for (int j = 0; j < PER; j++) {
            p[j] = j * 32 + lane < experts ? exp(x[j] - top) : 0;
            sum += p[j];
        }
        sum = mt_warp_sum(sum);
#pragma unroll
        for (int j = 0; j < PER; j++) {
            int e = j * 32 + lane;
            p[j] = p[j] / sum;
            if (e >= experts) continue;
            ((R *)a.probs)[t * experts + e] = p[j];
            if (a.bias) x[j] = p[j] + (R)a.bias[e];
        }
        if (lane == 0) ((R *)a.lse)[t] = (R)((double)top + log((double)sum));
        select<R, PER>(a, t, x, p);
    }
}

/* A block of tokens: for each expert its probabilities and choices, and as column E the squares of
 * lse. */
template <typename R>
static __global__ void __launch_bounds__(THREADS)
    sums_kernel(struct mt_router_fwd_args a, int64_t size, double *sums, int32_t *counts)
{
    __shared__ int32_t chosen[MOST_EXPERTS];
    int experts = (int)a.experts;
    int64_t first = blockIdx.x * size, end = min(a.tokens, first + size);
    double *mine = sums + (int64_t)blockIdx.x * (experts + 1);
    for (int e = threadIdx.x; e < experts; e += THREADS) chosen[e] = 0;
    __syncthreads();
    for (int64_t i = first * a.top_k + threadIdx.x; i < end * a.top_k; i += THREADS)
        atomicAdd(chosen + a.chosen[i], 1);
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        const R *p = (const R *)a.probs + e;
        double sum = 0;
#pragma unroll 8
        for (int64_t t = first; t < end; t++) sum += (double)p[t * experts];
        mine[e] = sum;
    }
    if (threadIdx.x < 32) {
        double z = 0;
        for (int64_t t = first + threadIdx.x; t < end; t += 32) {
            double lse = (double)((const R *)a.lse)[t];
            z += lse * lse;
        }
        z = mt_warp_sum(z);
        if (threadIdx.x == 0) mine[experts] = z;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS)
        counts[(int64_t)blockIdx.x * experts + e] = chosen[e];
}

/* 32 columns of the sums to a block; a warp adds a run of the blocks of tokens, then the runs are
 * added in order. */
template <typename R>
static __global__ void __launch_bounds__(1024)
    finish_kernel(struct mt_router_fwd_args a, int blocks, const double *sums,
                  const int32_t *counts)
{
    __shared__ double run_sums[32][33];
    __shared__ int64_t run_counts[32][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = (int)a.experts;
    int c = blockIdx.x * 32 + lane, run = (blocks + 31) / 32;
    int first = warp * run, end = min(blocks, first + run);
    double sum = 0;
    int64_t count = 0;
#pragma unroll 8
    for (int b = first; b < end; b++) {
        if (c <= experts) sum += sums[(int64_t)b * (experts + 1) + c];
        if (c < experts) count += counts[(int64_t)b * experts + c];
    }
    run_sums[warp][lane] = sum, run_counts[warp][lane] = count;
    __syncthreads();
    if (warp || c > experts) return;
    sum = 0, count = 0;
    for (int w = 0; w < 32; w++) sum += run_sums[w][lane], count += run_counts[w][lane];
    if (c == experts) {
        *(R *)a.z_sum = (R)sum;
        return;
    }
    ((R *)a.prob_sum)[c] = (R)sum;
    a.counts[c] = count;
    if (a.load) a.load[c] += count;
}

template <typename R>
static mt_status choose(mt_stream *stream, const struct mt_router_fwd_args *a, const R *parts,
                        int count, int64_t line)
{
    typedef void (*entry)(struct mt_router_fwd_args, const R *, int, int);
    static const entry entries[FORMS] = { choose_kernel<R, 1>,  choose_kernel<R, 2>,
                                          choose_kernel<R, 4>,  choose_kernel<R, 8>,
                                          choose_kernel<R, 16>, choose_kernel<R, 32> };
    entries[form_of(a->experts)]<<<mt_blocks(stream, a->tokens * 32, THREADS), THREADS, 0,
                                   mt_cuda_stream(stream)>>>(*a, parts, count, (int)line);
    MT_LAUNCHED(stream, "router_fwd");
    return MT_OK;
}

/* How the forward pass goes about its tokens, and the scratch it takes. */
struct fwd_plan {
    int64_t size; /* tokens of a block of sums */
    int blocks;
    bool tensor;
    tensor::logits_plan logits;
    size_t sums, counts; /* bytes */
};

template <typename T>
static fwd_plan plan_fwd(const mt_stream *stream, const struct mt_router_fwd_args *a)
{
    fwd_plan p = {};
    p.size = mt_ceil_div(a->tokens, SUM_BLOCKS);
    if (p.size < SUM_TOKENS) p.size = SUM_TOKENS;
    p.blocks = (int)mt_ceil_div(a->tokens, p.size);
    p.tensor = tensor::takes<T>(stream, a->x, a->tokens, a->width);
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

/* The logits as the tensor cores' parts, or where they are wanted, else where the probabilities
 * will be; then the choice. */
template <typename T>
static mt_status choose_experts(mt_stream *stream, const struct mt_router_fwd_args *a,
                                const fwd_plan &p, void *scratch)
{
    typedef mt_real<T> R;
    if constexpr (mt_dtype_of<T>::value == MT_BF16)
        if (p.tensor) {
            float *parts = (float *)((char *)scratch + p.logits.planes);
            MT_TRY(tensor::logits(stream, a, p.logits, parts, scratch));
            return choose<float>(stream, a, parts, (int)p.logits.count, p.logits.columns);
        }
    R *logits = (R *)(a->logits ? a->logits : a->probs);
    bool vectors = product::columns_aligned<R>(logits, a->experts);
    product::put_real<R> put = { logits, a->tokens, a->experts, vectors };
    MT_TRY((product::run<true, true>(
        stream, "router_fwd", product::operand_of<T>(a->x, a->tokens, a->width),
        product::operand_of<R>(a->wr, a->experts, a->width), a->width, a->width, put)));
    return choose<R>(stream, a, logits, 1, a->experts);
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
    if (a->tokens) {
        MT_TRY(choose_experts<T>(stream, a, p, scratch));
        sums_kernel<R><<<p.blocks, THREADS, 0, on>>>(*a, p.size, sums, counts);
        MT_LAUNCHED(stream, "router_fwd");
    }
    finish_kernel<R><<<(unsigned)(a->experts / 32 + 1), 1024, 0, on>>>(*a, p.blocks, sums, counts);
    MT_LAUNCHED(stream, "router_fwd");
    return MT_OK;
}
MT_CUDA_OP(router_fwd)

/* ---- backward ---------------------------------------------------------------------------------
 */

/* Adds what the weights' gradients say to d, the gradient of a token's probabilities; lane l has
 * the slots l, l + 32, ... */
template <typename R, int PER>
static __device__ __forceinline__ void add_dweights(R d[PER], const struct mt_router_bwd_args &a,
                                                    int64_t t)
{
    const R *dw = (const R *)a.dweights + t * a.top_k, *w = (const R *)a.weights + t * a.top_k;
    const R *p = (const R *)a.probs + t * a.experts;
    const int32_t *chosen = a.chosen + t * a.top_k;
    R mean = 0, total = 0; /* w = p / total: dp = (dw - <dw, w>) / total */
    int top_k = (int)a.top_k, lane = threadIdx.x % 32;
    if (a.normalize) {
        for (int i = lane; i < top_k; i += 32) {
            mean += dw[i] * w[i];
            total += p[chosen[i]];
        }
        mean = mt_warp_sum(mean), total = mt_warp_sum(total);
    }
    for (int base = 0; base < top_k; base += 32) {
        bool mine = base + lane < top_k;
        int expert = mine ? chosen[base + lane] : -1;
        R grad = mine ? dw[base + lane] : 0;
        if (a.normalize) grad = (grad - mean) / total;
        for (int i = 0; i < top_k - base && i < 32; i++) {
            int e = __shfl_sync(~0u, expert, i);
            R add = __shfl_sync(~0u, grad, i);
#pragma unroll
            for (int j = 0; j < PER; j++)
                if (e == j * 32 + lane) d[j] += add;
        }
    }
}

template <typename R, int PER>
static __global__ void __launch_bounds__(THREADS)
    dlogits_kernel(struct mt_router_bwd_args a, tensor::dlogits_planes planes)
{
    int lane = threadIdx.x % 32, experts = (int)a.experts;
    if (blockIdx.x == 0) planes.put_starts(a.tokens);
    int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
    for (int64_t t = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32; t < a.tokens; t += warps) {
        R d[PER], p[PER], dot = 0, z = 0;
#pragma unroll
        for (int j = 0; j < PER; j++) {
            int e = j * 32 + lane;
            p[j] = e < experts ? ((const R *)a.probs)[t * experts + e] : 0;
            d[j] = e < experts && a.dprob_sum ? ((const R *)a.dprob_sum)[e] : 0;
        }
        if (a.dweights) add_dweights<R, PER>(d, a, t);
#pragma unroll
        for (int j = 0; j < PER; j++) dot += d[j] * p[j];
        dot = mt_warp_sum(dot);
        if (a.dz_sum) z = *(const R *)a.dz_sum * 2 * ((const R *)a.lse)[t];
#pragma unroll
        for (int j = 0; j < PER; j++) {
            int e = j * 32 + lane;
            R x = p[j] * (d[j] - dot) + z * p[j];
            if (e < experts) ((R *)a.dlogits)[t * experts + e] = x;
            if (e < planes.columns) planes.put(t, e, e < experts ? (float)x : 0);
        }
    }
}

template <typename R>
static mt_status find_dlogits(mt_stream *stream, const struct mt_router_bwd_args *a,
                              const tensor::dlogits_planes &planes)
{
    typedef void (*entry)(struct mt_router_bwd_args, tensor::dlogits_planes);
    static const entry entries[FORMS] = { dlogits_kernel<R, 1>,  dlogits_kernel<R, 2>,
                                          dlogits_kernel<R, 4>,  dlogits_kernel<R, 8>,
                                          dlogits_kernel<R, 16>, dlogits_kernel<R, 32> };
    entries[form_of(a->experts)]<<<mt_blocks(stream, a->tokens * 32, THREADS), THREADS, 0,
                                   mt_cuda_stream(stream)>>>(*a, planes);
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
    bool dx, dwr, tensor;
    tensor::bwd_plan planes;
    size_t bytes;
};

template <typename T>
static bwd_plan plan_bwd(const mt_stream *stream, const struct mt_router_bwd_args *a)
{
    bwd_plan p = {};
    p.dx = a->dx && a->tokens && a->width, p.dwr = a->dwr && a->width;
    bool aligned = ((uintptr_t)a->dx | (uintptr_t)a->dx_add) % 16 == 0;
    p.tensor = (p.dx || p.dwr) && a->tokens && aligned &&
               tensor::takes<T>(stream, a->x, a->tokens, a->width);
    if (p.tensor) {
        p.planes = tensor::plan_gradients(a, p.dx, p.dwr);
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
    tensor::dlogits_planes to = { dlogits, starts, (int)p.planes.columns, (int)p.planes.run,
                                  (int)p.planes.count };
    MT_TRY(find_dlogits<float>(stream, a, to));
    if (p.dx) MT_TRY(tensor::dx(stream, a, p.planes, dlogits, (mt_bf16 *)wr));
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
    if (a->tokens) MT_TRY(find_dlogits<mt_real<T>>(stream, a, {}));
    if (p.dx) MT_TRY(find_dx<T>(stream, a));
    return p.dwr ? find_dwr<T>(stream, a, (mt_real<T> *)scratch) : MT_OK;
}
MT_CUDA_OP(router_bwd)
