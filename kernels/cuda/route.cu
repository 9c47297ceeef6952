/* The route plan, and moving rows by it: gather and its backward. */
#include <cooperative_groups.h>

#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch.h"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    CHUNKS = 128,              /* blocks that share the choices, at most */
    LEAST = 1024,              /* choices of a block, at least */
    TOTALS = 1 << 15,          /* that each block reads, or those of one chunk */
    AHEAD = 8,                 /* choices that a thread asks for at a time, */
    TOGETHER = 32,             /* and totals */
    COUNTERS = (44 << 10) / 4, /* in a block's shared memory: each warp's and the block's */
    MOST_EXPERTS = COUNTERS / 2
};
static_assert((int)MOST_EXPERTS >= (int)MT_CUDA_MOST_EXPERTS, "the router's choices are placed");

/* ---- route plan -------------------------------------------------------------------------------
 * A stable counting sort, whose choices are cut into chunks, one per block. A block counts those of
 * each expert in its chunk; once all have done so, every block sums the counts: over earlier
 * chunks, and over experts, where its choices of e begin. Then a warp walks over its part of the
 * chunk, 32 choices at a time: a choice's place among its expert's is the expert's counter and the
 * number of equal choices in lanes before. */

/* Choices of a block, a multiple of those that its warps take at a time; number of blocks. */
struct chunks {
    int64_t rows, size;
    int count, warps;
};

static struct chunks cut(const mt_stream *stream, const struct mt_route_plan_args *a)
{
    struct chunks c = { a->tokens * a->top_k, 0, 0, 0 };
    int64_t most = COUNTERS / a->experts - 1, chunks = TOTALS / a->experts;
    c.warps = most < 1 ? 1 : most < WARPS ? (int)most : WARPS;
    if (chunks > CHUNKS) chunks = CHUNKS;
    /* they wait for one another */
    if (chunks > mt_cuda_multiprocessors(stream)) chunks = mt_cuda_multiprocessors(stream);
    int64_t want = mt_ceil_div(c.rows, chunks > 0 ? chunks : 1), step = c.warps * 32;
    c.size = mt_ceil_div(want < LEAST ? (int64_t)LEAST : want, step) * step;
    c.count = (int)mt_ceil_div(c.rows, c.size);
    return c;
}

/* AHEAD choices of each lane, and which lanes have an equal one. */
struct batch {
    int32_t e[AHEAD];
    unsigned same[AHEAD];

    /* Those at `first` and every 32 after it, before `end`; past it -1. */
    __device__ __forceinline__ void read(const int32_t *chosen, int64_t first, int64_t end,
                                         int experts)
    {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) e[i] = first + i * 32 < end ? chosen[first + i * 32] : -1;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) same[i] = __ballot_sync(~0u, e[i] >= 0);
#pragma unroll 1
        for (int bit = 1; bit < experts; bit *= 2)
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const unsigned set = __ballot_sync(~0u, e[i] & bit);
                same[i] &= e[i] & bit ? set : ~set;
            }
    }
    /* Of choice i among the equal ones. */
    __device__ __forceinline__ int rank(int i) const
    {
        return __popc(same[i] & ((1u << threadIdx.x % 32) - 1));
    }
};

/* Sum over the warp's lanes up to this one. */
static __device__ __forceinline__ int32_t warp_scan(int32_t x)
{
    for (int step = 1; step < 32; step *= 2) {
        int32_t other = __shfl_up_sync(~0u, x, step);
        if (threadIdx.x % 32 >= step) x += other;
    }
    return x;
}

/* Sum over the threads before this one; *total is everyone's. `room`: a word for each warp, free
 * again after the next barrier. */
static __device__ __forceinline__ int32_t block_scan(int32_t x, int32_t *total, int32_t *room)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t sum = warp_scan(x), before = sum - x;
    if (lane == 31) room[warp] = sum;
    __syncthreads();
    *total = 0;
    for (int w = 0; w < blockDim.x / 32; w++) {
        if (w < warp) before += room[w];
        *total += room[w];
    }
    return before;
}

/* What the plan says of expert e, or, past the last, of all rows; by block 0. */
static __device__ __forceinline__ void put_offset(const struct mt_route_plan_args &a, int64_t e,
                                                  int64_t row)
{
    a.offsets[e] = row;
    for (int i = 0; a.element_offsets && i < MT_ROUTE_WIDTHS; i++)
        a.element_offsets[i * (a.experts + 1) + e] = row * a.widths[i];
}

/* start[e]: the first row of expert e; next[warp][e]: how many choices of e there are before the
 * warp's next one. By every thread, once next[warp][e] are the choices of e in the warp's part. */
static __device__ __forceinline__ void begin_places(int32_t *start, int32_t *next,
                                                    const struct mt_route_plan_args &a,
                                                    const struct chunks &c, const int32_t *totals)
{
    __shared__ int32_t room[2][WARPS], sums[2][THREADS];
    const int experts = (int)a.experts, chunk = (int)blockIdx.x, threads = (int)blockDim.x;
    const int parts = max(1, threads / experts), each = (c.count + parts - 1) / parts;
    int32_t row = 0, dropped = 0;
    for (int base = 0; base < experts; base += threads) {
        const int part = parts > 1 ? (int)threadIdx.x / experts : 0;
        const int of = base + (int)threadIdx.x - part * experts,
                  end = min(c.count, (part + 1) * each);
        const int e = base + (int)threadIdx.x;
        int32_t before = 0, all = 0, rows, lost;
        const int32_t *from = totals + (int64_t)part * each * experts + of;
        for (int i = part * each; i < end && of < experts; i += TOGETHER) {
            int32_t n[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++, from += experts) n[j] = i + j < end ? *from : 0;
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) all += n[j], before += i + j < chunk ? n[j] : 0;
        }
        sums[0][threadIdx.x] = before, sums[1][threadIdx.x] = all;
        __syncthreads();
        for (int p = 1; p < parts && e < experts; p++)
            before += sums[0][p * experts + e], all += sums[1][p * experts + e];
        if (e >= experts) all = 0;
        const int32_t kept = a.capacity ? (int32_t)min((int64_t)all, a.capacity) : all;
        const int32_t at = row + block_scan(kept, &rows, room[0]);
        block_scan(all - kept, &lost, room[1]);
        if (e < experts) {
            start[e] = at;
            for (int w = 0; w < c.warps; w++) {
                int32_t count = next[w * experts + e];
                next[w * experts + e] = before;
                before += count;
            }
            if (chunk == 0) a.counts[e] = kept, put_offset(a, e, at);
        }
        row += rows, dropped += lost;
        __syncthreads();
    }
    if (chunk || threadIdx.x) return;
    put_offset(a, experts, row);
    if (a.dropped) *a.dropped += dropped;
}

/* Places choice i of each lane, of expert e, e < 0: none, the rank-th of `same` equal ones. */
static __device__ __forceinline__ void place_choice(const struct mt_route_plan_args &a,
                                                    const int32_t *start, int32_t *mine, int64_t i,
                                                    int32_t e, int rank, int same)
{
    int32_t place = 0;
    if (e >= 0) place = mine[e] + rank;
    __syncwarp();
    if (e >= 0 && rank == 0) mine[e] = place + same;
    __syncwarp();
    if (e < 0) return;
    const bool kept = !a.capacity || place < a.capacity;
    const int32_t row = start[e] + place;
    a.position[i] = kept ? row : -1;
    if (kept) a.row_token[row] = (int32_t)((uint32_t)i / (uint32_t)a.top_k);
}

static __global__ void __launch_bounds__(THREADS)
    plan_kernel(struct mt_route_plan_args a, struct chunks c, int32_t *totals)
{
    extern __shared__ int32_t start[];
    const int experts = (int)a.experts, lane = threadIdx.x % 32, chunk = (int)blockIdx.x;
    int32_t *next = start + experts, *mine = next + threadIdx.x / 32 * experts;
    struct batch now;
    for (int i = threadIdx.x; i < experts * c.warps; i += blockDim.x) next[i] = 0;
    __syncthreads();
    int64_t part = c.size / c.warps, first = chunk * c.size + threadIdx.x / 32 * part;
    int64_t end = min(c.rows, first + part);
    for (int64_t base = first; base < end; base += AHEAD * 32) {
        now.read(a.chosen, base + lane, end, experts);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (now.e[i] >= 0 && now.rank(i) == 0) atomicAdd(mine + now.e[i], __popc(now.same[i]));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < experts && chunk < c.count; i += blockDim.x) {
        int32_t sum = 0;
        for (int w = 0; w < c.warps; w++) sum += next[w * experts + i];
        totals[chunk * experts + i] = sum;
    }
    cooperative_groups::this_grid().sync();
    begin_places(start, next, a, c, totals);
    __syncthreads();
    for (int64_t base = first; base < end; base += AHEAD * 32) {
        if (part > AHEAD * 32) now.read(a.chosen, base + lane, end, experts);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            place_choice(a, start, mine, base + i * 32 + lane, now.e[i], now.rank(i),
                         __popc(now.same[i]));
    }
}

template <typename T>
static size_t route_plan_scratch(const mt_stream *stream, const struct mt_route_plan_args *a)
{
    return (size_t)(a->experts * cut(stream, a).count) * sizeof(int32_t);
}
MT_CUDA_SCRATCH(route_plan)

template <typename T>
static mt_status route_plan(mt_stream *stream, const struct mt_route_plan_args *a)
{
    MT_REQUIRE(a->experts <= MOST_EXPERTS, MT_EUNSUPPORTED,
               "route_plan: experts is %lld, at most %d on cuda", (long long)a->experts,
               (int)MOST_EXPERTS);
    cudaStream_t on = mt_cuda_stream(stream);
    const struct chunks c = cut(stream, a);
    void *scratch;
    MT_TRY(mt_cuda_scratch(stream, &scratch, route_plan_scratch<T>(stream, a)));
    void *parameters[] = { (void *)a, (void *)&c, &scratch };
    const size_t shared = (size_t)a->experts * (c.warps + 1) * sizeof(int32_t);
    MT_CUDA(cudaLaunchCooperativeKernel((const void *)plan_kernel, dim3(c.count ? c.count : 1),
                                        dim3(c.warps * 32), parameters, shared, on));
    MT_LAUNCHED(stream, "route_plan");
    return MT_OK;
}
MT_CUDA_OP(route_plan)

/* ---- gather -----------------------------------------------------------------------------------
 */

/* By token, from where its rows are. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) spread_kernel(struct mt_gather_fwd_args a)
{
    typedef mt_words<T, N> words;
    mt_spread_rows<T, N, false>((words *)a.y, (const words *)a.x, a.tokens, a.width / N, a.position,
                                NULL, a.top_k);
}

/* The same with eight slots a token: the rows of four tokens are asked for, and where they go,
 * before any is written. */
enum { EIGHT = 8, FOUR = 4 };
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) spread_eight_kernel(struct mt_gather_fwd_args a)
{
    typedef mt_words<T, N> words;
    const int64_t n = a.width / N;
    const int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    const struct mt_row_place p = mt_row_place_of(warp, mt_row_groups(n));
    const int64_t token = p.token * FOUR;
    words in[FOUR];
    int4 places[FOUR][2];
    if (p.column >= n) return;
#pragma unroll
    for (int i = 0; i < FOUR; i++) {
        places[i][0] = places[i][1] = make_int4(-1, -1, -1, -1);
        if (token + i >= a.tokens) continue;
        in[i] = __ldcs((const words *)a.x + (token + i) * n + p.column);
#pragma unroll
        for (int h = 0; h < 2; h++)
            places[i][h] = __ldg((const int4 *)(a.position + (token + i) * EIGHT) + h);
    }
#pragma unroll
    for (int i = 0; i < FOUR; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int4 &four = places[i][h];
            const int32_t row[4] = { four.x, four.y, four.z, four.w };
#pragma unroll
            for (int s = 0; s < 4; s++)
                if (row[s] >= 0) mt_store((words *)a.y + row[s] * n + p.column, in[i]);
        }
}

template <typename T, int N>
static void launch_spread(mt_stream *stream, const struct mt_gather_fwd_args *a)
{
    const bool eight = a->top_k == EIGHT && (uintptr_t)a->position % sizeof(int4) == 0;
    const int64_t tokens = eight ? mt_ceil_div(a->tokens, FOUR) : a->tokens;
    const unsigned blocks = mt_spread_blocks(tokens, a->width / N, THREADS / 32);
    auto kernel = eight ? spread_eight_kernel<T, N> : spread_kernel<T, N>;
    if (blocks) kernel<<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(*a);
}

/* By row, of n pieces V; blockIdx.y: the columns. */
template <typename V>
static __global__ void __launch_bounds__(THREADS)
    gather_kernel(struct mt_gather_fwd_args a, int64_t n, int64_t part)
{
    int64_t first = blockIdx.y * part;
    mt_copy_rows((V *)a.y, (const V *)a.x, a.row_token, min(a.rows, *a.rows_used), n, first,
                 min(first + part, n));
}

template <typename V>
static void launch_gather(mt_stream *stream, const struct mt_gather_fwd_args *a, int64_t n)
{
    int64_t part = mt_row_part(a->tokens, n);
    dim3 grid(mt_blocks(stream, a->rows * 8, THREADS), (unsigned)mt_ceil_div(n, part));
    gather_kernel<V><<<grid, THREADS, 0, mt_cuda_stream(stream)>>>(*a, n, part);
}

template <typename T>
static mt_status gather_fwd(mt_stream *stream, const struct mt_gather_fwd_args *a)
{
    if (!a->rows || !a->width) return MT_OK;
    enum { N = 16 / sizeof(T) };
    const void *operands[] = { a->x, a->y };
    const bool whole = mt_rows_aligned(operands, 2, a->width * (int64_t)sizeof(T));
    if (a->position)
        whole ? launch_spread<T, N>(stream, a) : launch_spread<T, 1>(stream, a);
    else
        whole ? launch_gather<uint4>(stream, a, a->width / N)
              : launch_gather<T>(stream, a, a->width);
    MT_LAUNCHED(stream, "gather_fwd");
    return MT_OK;
}
MT_CUDA_OP(gather_fwd)

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS) gather_bwd_kernel(struct mt_gather_bwd_args a)
{
    typedef mt_words<T, N> words;
    const int64_t n = a.width / N, groups = mt_row_groups(n), warps = (int64_t)gridDim.x * WARPS;
    int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    for (; warp < a.tokens * groups; warp += warps) {
        const struct mt_row_place p = mt_row_place_of(warp, groups);
        const int64_t at = p.token * n + p.column;
        mt_real<T> sum[N] = { 0 };
        if (p.column >= n) continue;
        if (a.dx_add) mt_open<T, N>(sum, ((const words *)a.dx_add)[at]);
        mt_add_slots<T, N, false>(sum, (const words *)a.dy + p.column, n,
                                  a.position + p.token * a.top_k, nullptr, a.top_k);
        mt_store((words *)a.dx + at, mt_close<T, N>(sum));
    }
}

template <typename T>
static mt_status gather_bwd(mt_stream *stream, const struct mt_gather_bwd_args *a)
{
    if (!a->tokens || !a->width) return MT_OK;
    enum { N = 16 / sizeof(T) };
    const void *operands[] = { a->dx, a->dx_add, a->dy };
    bool whole = mt_rows_aligned(operands, 3, a->width * (int64_t)sizeof(T));
    int64_t groups = mt_row_groups(a->width / (whole ? N : 1));
    auto kernel = whole ? gather_bwd_kernel<T, N> : gather_bwd_kernel<T, 1>;
    kernel<<<mt_blocks(stream, a->tokens * groups * 32, THREADS), THREADS, 0,
             mt_cuda_stream(stream)>>>(*a);
    MT_LAUNCHED(stream, "gather_bwd");
    return MT_OK;
}
MT_CUDA_OP(gather_bwd)
