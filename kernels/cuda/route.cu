/* The route plan, and moving rows by it: gather and its backward. */
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch.h"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    SCAN_THREADS = 1024,
    CHUNKS = 128,             /* blocks that share the choices, at most */
    LEAST = 1024,             /* choices of a block, at least */
    COUNTERS = (48 << 10) / 4 /* in a block's shared memory */
};

/* ---- route plan -------------------------------------------------------------------------------
 * A stable counting sort in three kernels. The choices are cut into chunks, one per block:
 *   count  totals[e][chunk] = choices of e in the chunk
 *   scan   per expert, over its chunks: where each chunk's choices of e begin; then, over experts,
 *          counts, offsets and what they give
 *   place  a warp walks over its part of the chunk, 32 choices at a time: a choice's row is the
 *          expert's counter and the number of equal choices in lanes before */

/* Choices of a block, a multiple of those that its warps take at a time; number of blocks. */
struct chunks {
    int64_t rows, size;
    int count, warps;
};

static struct chunks cut(const struct mt_route_plan_args *a)
{
    struct chunks c = { a->tokens * a->top_k, 0, 0, 0 };
    int64_t most = COUNTERS / a->experts;
    c.warps = most < WARPS ? (int)most : WARPS;
    int64_t want = mt_ceil_div(c.rows, CHUNKS), step = c.warps * 32;
    c.size = mt_ceil_div(want < LEAST ? (int64_t)LEAST : want, step) * step;
    c.count = (int)mt_ceil_div(c.rows, c.size);
    return c;
}

/* Counts the choice `e` of each lane, e < 0: none, in `counters`, which other warps use too if
 * `shared`. */
static __device__ __forceinline__ void count_choice(int32_t *counters, int32_t e)
{
    unsigned same = __match_any_sync(~0u, e);
    if (e >= 0 && (same & ((1u << threadIdx.x % 32) - 1)) == 0)
        atomicAdd(counters + e, __popc(same));
}

static __global__ void __launch_bounds__(THREADS)
    count_kernel(struct mt_route_plan_args a, struct chunks c, int32_t *totals)
{
    extern __shared__ int32_t counters[];
    int experts = (int)a.experts;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counters[e] = 0;
    __syncthreads();
    int64_t first = blockIdx.x * c.size, end = min(c.rows, first + c.size);
    for (int64_t base = first; base < end; base += blockDim.x) {
        int64_t i = base + threadIdx.x;
        count_choice(counters, i < end ? a.chosen[i] : -1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x)
        totals[(int64_t)e * CHUNKS + blockIdx.x] = counters[e];
}

/* Exclusive sum over the warp; *total is everyone's. */
static __device__ __forceinline__ int64_t warp_scan(int64_t x, int64_t *total)
{
    int64_t sum = x;
    for (int step = 1; step < 32; step *= 2) {
        int64_t other = __shfl_up_sync(~0u, sum, step);
        if (threadIdx.x % 32 >= step) sum += other;
    }
    *total = __shfl_sync(~0u, sum, 31);
    return sum - x;
}

/* The same over the block's SCAN_THREADS; `room` of 32 is free again after the next barrier. */
static __device__ __forceinline__ int64_t block_scan(int64_t x, int64_t *total, int64_t *room)
{
    int lane = threadIdx.x % 32;
    int64_t warp_total, all;
    int64_t before = warp_scan(x, &warp_total);
    if (lane == 0) room[threadIdx.x / 32] = warp_total;
    __syncthreads();
    int64_t warps = warp_scan(room[lane], &all);
    *total = all;
    return before + __shfl_sync(~0u, warps, threadIdx.x / 32);
}

/* One block. totals becomes, for each expert, the choices of it in earlier chunks. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    scan_kernel(struct mt_route_plan_args a, int chunks, int32_t *totals)
{
    enum { EACH = CHUNKS / 32 };
    __shared__ int64_t room[2][32];
    int lane = threadIdx.x % 32;
    for (int64_t e = threadIdx.x / 32; e < a.experts; e += SCAN_THREADS / 32) {
        int32_t *row = totals + e * CHUNKS, n[EACH], sum = 0;
        int64_t total;
        for (int j = 0; j < EACH; j++) {
            n[j] = lane * EACH + j < chunks ? row[lane * EACH + j] : 0;
            sum += n[j];
        }
        int32_t before = (int32_t)warp_scan(sum, &total);
        for (int j = 0; j < EACH; j++) {
            if (lane * EACH + j < chunks) row[lane * EACH + j] = before;
            before += n[j];
        }
        if (lane == 0) a.counts[e] = total;
    }
    __syncthreads();
    int64_t row = 0, dropped = 0;
    for (int64_t base = 0; base < a.experts; base += SCAN_THREADS) {
        int64_t e = base + threadIdx.x, all = e < a.experts ? a.counts[e] : 0, sum, lost;
        int64_t kept = a.capacity ? min(all, a.capacity) : all;
        int64_t at = row + block_scan(kept, &sum, room[0]);
        block_scan(all - kept, &lost, room[1]);
        if (e < a.experts) {
            a.counts[e] = kept;
            a.offsets[e] = at;
            for (int i = 0; a.element_offsets && i < MT_ROUTE_WIDTHS; i++)
                a.element_offsets[i * (a.experts + 1) + e] = at * a.widths[i];
        }
        row += sum, dropped += lost;
        __syncthreads();
    }
    if (threadIdx.x) return;
    a.offsets[a.experts] = row;
    for (int i = 0; a.element_offsets && i < MT_ROUTE_WIDTHS; i++)
        a.element_offsets[i * (a.experts + 1) + a.experts] = row * a.widths[i];
    if (a.dropped) *a.dropped += dropped;
}

/* next[warp][e]: the row that the warp's next choice of e takes if it is kept. */
static __global__ void __launch_bounds__(THREADS)
    place_kernel(struct mt_route_plan_args a, struct chunks c, const int32_t *totals)
{
    extern __shared__ int32_t next[];
    int experts = (int)a.experts, lane = threadIdx.x % 32;
    int32_t *mine = next + threadIdx.x / 32 * experts;
    uint32_t top_k = (uint32_t)a.top_k;
    for (int i = threadIdx.x; i < experts * c.warps; i += blockDim.x) next[i] = 0;
    __syncthreads();
    int64_t part = c.size / c.warps, first = blockIdx.x * c.size + threadIdx.x / 32 * part;
    int64_t end = min(c.rows, first + part);
    for (int64_t base = first; base < end; base += 32)
        count_choice(mine, base + lane < end ? a.chosen[base + lane] : -1);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        int32_t row = (int32_t)a.offsets[e] + totals[(int64_t)e * CHUNKS + blockIdx.x];
        for (int w = 0; w < c.warps; w++) {
            int32_t count = next[w * experts + e];
            next[w * experts + e] = row;
            row += count;
        }
    }
    __syncthreads();
    for (int64_t base = first; base < end; base += 32) {
        int64_t i = base + lane;
        int32_t e = i < end ? a.chosen[i] : -1, row = 0;
        unsigned same = __match_any_sync(~0u, e);
        int rank = __popc(same & ((1u << lane) - 1));
        if (e >= 0) row = mine[e] + rank;
        __syncwarp();
        if (e >= 0 && rank == 0) mine[e] = row + __popc(same);
        __syncwarp();
        if (e < 0) continue;
        bool kept = !a.capacity || row < (int32_t)a.offsets[e + 1];
        a.position[i] = kept ? row : -1;
        if (kept) a.row_token[row] = (int32_t)((uint32_t)i / top_k);
    }
}

template <typename T>
static size_t route_plan_scratch(const mt_stream *stream, const struct mt_route_plan_args *a)
{
    (void)stream;
    return (size_t)(a->experts * CHUNKS) * sizeof(int32_t);
}
MT_CUDA_SCRATCH(route_plan)

template <typename T>
static mt_status route_plan(mt_stream *stream, const struct mt_route_plan_args *a)
{
    MT_REQUIRE(a->experts <= COUNTERS, MT_EUNSUPPORTED,
               "route_plan: experts is %lld, at most %d on cuda", (long long)a->experts, COUNTERS);
    cudaStream_t on = mt_cuda_stream(stream);
    const struct chunks c = cut(a);
    void *scratch;
    MT_TRY(mt_cuda_scratch(stream, &scratch, route_plan_scratch<T>(stream, a)));
    int32_t *totals = (int32_t *)scratch;
    size_t counters = (size_t)a->experts * sizeof(int32_t);
    if (c.count) {
        count_kernel<<<c.count, THREADS, counters, on>>>(*a, c, totals);
        MT_LAUNCHED(stream, "route_plan");
    }
    scan_kernel<<<1, SCAN_THREADS, 0, on>>>(*a, c.count, totals);
    MT_LAUNCHED(stream, "route_plan");
    if (c.count) {
        place_kernel<<<c.count, c.warps * 32, counters * c.warps, on>>>(*a, c, totals);
        MT_LAUNCHED(stream, "route_plan");
    }
    return MT_OK;
}
MT_CUDA_OP(route_plan)

/* ---- gather -----------------------------------------------------------------------------------
 */

/* Rows of n pieces V; blockIdx.y: the columns. */
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
    const void *operands[] = { a->x, a->y };
    if (mt_rows_aligned(operands, 2, a->width * (int64_t)sizeof(T)))
        launch_gather<uint4>(stream, a, a->width * (int64_t)sizeof(T) / 16);
    else
        launch_gather<T>(stream, a, a->width);
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
