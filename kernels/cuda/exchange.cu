/* Blocks of rows for experts of other ranks: where rows go, packing, and what has arrived. */
#include "kernels/cuda/rows.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, HEAD_THREADS = 1024 };

/* ---- where rows go ----------------------------------------------------------------------------
 */

static __device__ __forceinline__ int64_t room_of(const struct mt_blocks &b)
{
    return b.lines - b.head_lines;
}

/* Heads and `most` by block 0; lines and choices by all. */
static __global__ void __launch_bounds__(THREADS)
    plan_kernel(struct mt_exchange_plan_args a, int64_t line_bytes)
{
    const struct mt_blocks b = a.blocks;
    int64_t room = room_of(b), words = b.experts + 1;
    if (blockIdx.x == 0)
        for (int64_t i = threadIdx.x; i < b.ranks * words; i += THREADS) {
            int64_t r = i / words, e = i % words;
            const int64_t *offsets = a.offsets + r * b.experts;
            int64_t first = offsets[0], all = offsets[b.experts] - first, rows = min(all, room);
            if (e == 0) {
                a.heads[i] = (b.head_lines + rows) * line_bytes - 8;
                atomicMax((unsigned long long *)a.most, (unsigned long long)all);
            } else {
                a.heads[i] = min(offsets[e] - first, rows) - min(offsets[e - 1] - first, rows);
            }
        }
    MT_GRID_STRIDE(l, b.ranks * b.lines)
    {
        int64_t r = l / b.lines, row = l - r * b.lines - b.head_lines;
        int64_t first = a.offsets[r * b.experts];
        int64_t rows = min(a.offsets[(r + 1) * b.experts] - first, room);
        a.line_token[l] = row >= 0 && row < rows ? a.row_token[first + row] : -1;
    }
    MT_GRID_STRIDE(i, a.tokens * a.top_k)
    {
        int64_t r = a.chosen[i] / b.experts, row = a.position[i] - a.offsets[r * b.experts];
        bool kept = a.position[i] >= 0 && row < room;
        a.token_line[i] = kept ? (int32_t)(r * b.lines + b.head_lines + row) : -1;
    }
}

template <typename T>
static mt_status exchange_plan(mt_stream *stream, const struct mt_exchange_plan_args *a)
{
    int64_t lines = a->blocks.ranks * a->blocks.lines, choices = a->tokens * a->top_k;
    unsigned blocks = mt_blocks(stream, lines > choices ? lines : choices, THREADS);
    plan_kernel<<<blocks, THREADS, 0, mt_cuda_stream(stream)>>>(*a, a->width * (int64_t)sizeof(T));
    MT_LAUNCHED(stream, "exchange_plan");
    return MT_OK;
}
MT_CUDA_OP(exchange_plan)

/* ---- packing ----------------------------------------------------------------------------------
 */

/* Words of the heads to their places, `pitch` words from block to block. */
static __global__ void __launch_bounds__(THREADS)
    head_kernel(struct mt_exchange_pack_args a, int64_t pitch)
{
    int64_t words = a.blocks.experts + 1;
    MT_GRID_STRIDE(i, a.blocks.ranks * words)
    ((int64_t *)a.y)[i / words * pitch + i % words] = a.heads[i];
}

/* Rows of n pieces V. No head is a row. */
template <typename V>
static __global__ void __launch_bounds__(THREADS)
    pack_kernel(struct mt_exchange_pack_args a, int64_t n)
{
    mt_copy_rows((V *)a.y, (const V *)a.x, a.index, a.blocks.ranks * a.blocks.lines, n, 0, n);
}

template <typename T>
static mt_status exchange_pack(mt_stream *stream, const struct mt_exchange_pack_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    cudaStream_t on = mt_cuda_stream(stream);
    int64_t bytes = a->width * (int64_t)sizeof(T);
    head_kernel<<<mt_blocks(stream, b->ranks * (b->experts + 1), THREADS), THREADS, 0, on>>>(
        *a, b->lines * bytes / 8);
    MT_LAUNCHED(stream, "exchange_pack");
    if (!a->index) return MT_OK;
    const void *operands[] = { a->x, a->y };
    unsigned blocks = mt_blocks(stream, b->ranks * b->lines * 8, THREADS);
    if (mt_rows_aligned(operands, 2, bytes))
        pack_kernel<uint4><<<blocks, THREADS, 0, on>>>(*a, bytes / 16);
    else
        pack_kernel<T><<<blocks, THREADS, 0, on>>>(*a, a->width);
    MT_LAUNCHED(stream, "exchange_pack");
    return MT_OK;
}
MT_CUDA_OP(exchange_pack)

/* ---- what has arrived -------------------------------------------------------------------------
 */

/* out[i] = sum of in[0 .. i), out[n] the total: by one warp. */
static __device__ void warp_sums(int64_t *out, const int64_t *in, int64_t n)
{
    int lane = threadIdx.x % 32;
    int64_t before = 0;
    for (int64_t base = 0; base < n; base += 32) {
        int64_t x = base + lane < n ? in[base + lane] : 0, sum = x;
        for (int step = 1; step < 32; step *= 2) {
            int64_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (base + lane < n) out[base + lane] = before + sum - x;
        before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) out[n] = before;
}

/* One block. starts [P, S + 1]: where the rows of each expert start in a block; bases [P, S]: the
 * row that the first of them becomes. */
static __global__ void __launch_bounds__(HEAD_THREADS)
    heads_kernel(struct mt_exchange_arrivals_args a, int64_t pitch, int64_t *starts, int64_t *bases)
{
    int64_t s = a.blocks.experts, ranks = a.blocks.ranks, words = s + 1;
    for (int64_t i = threadIdx.x; i < ranks * words; i += HEAD_THREADS)
        a.heads[i] = ((const int64_t *)a.y)[i / words * pitch + i % words];
    __syncthreads();
    for (int64_t e = threadIdx.x; e < s; e += HEAD_THREADS) {
        int64_t count = 0;
        for (int64_t r = 0; r < ranks; r++) count += a.heads[r * words + 1 + e];
        a.counts[e] = count;
    }
    __syncthreads();
    for (int64_t r = threadIdx.x / 32; r <= ranks; r += HEAD_THREADS / 32)
        if (r < ranks)
            warp_sums(starts + r * words, a.heads + r * words + 1, s);
        else
            warp_sums(a.offsets, a.counts, s);
    __syncthreads();
    for (int64_t e = threadIdx.x; e <= s; e += HEAD_THREADS) {
        int64_t row = a.offsets[e];
        for (int i = 0; a.element_offsets && i < MT_ROUTE_WIDTHS; i++)
            a.element_offsets[i * words + e] = row * a.widths[i];
        for (int64_t r = 0; e < s && r < ranks; r++) {
            bases[r * s + e] = row;
            row += a.heads[r * words + 1 + e];
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    arrivals_kernel(struct mt_exchange_arrivals_args a, const int64_t *starts, const int64_t *bases)
{
    const struct mt_blocks b = a.blocks;
    MT_GRID_STRIDE(l, b.ranks * b.lines)
    {
        int64_t r = l / b.lines, j = l - r * b.lines - b.head_lines;
        const int64_t *start = starts + r * (b.experts + 1);
        if (j < 0 || j >= start[b.experts]) {
            a.line_row[l] = -1;
            continue;
        }
        int64_t low = 0, high = b.experts; /* the last expert that starts at j or before */
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if (start[middle] <= j)
                low = middle;
            else
                high = middle;
        }
        int64_t row = bases[r * b.experts + low] + j - start[low];
        a.line_row[l] = (int32_t)row;
        a.row_line[row] = (int32_t)l;
    }
}

template <typename T>
static mt_status exchange_arrivals(mt_stream *stream, const struct mt_exchange_arrivals_args *a)
{
    const struct mt_blocks *b = &a->blocks;
    cudaStream_t on = mt_cuda_stream(stream);
    int64_t starts = b->ranks * (b->experts + 1), bases = b->ranks * b->experts;
    void *scratch;
    MT_TRY(mt_cuda_scratch(stream, &scratch, (size_t)(starts + bases) * sizeof(int64_t)));
    int64_t *at = (int64_t *)scratch;
    heads_kernel<<<1, HEAD_THREADS, 0, on>>>(*a, b->lines * a->width * (int64_t)sizeof(T) / 8, at,
                                             at + starts);
    MT_LAUNCHED(stream, "exchange_arrivals");
    arrivals_kernel<<<mt_blocks(stream, b->ranks * b->lines, THREADS), THREADS, 0, on>>>(
        *a, at, at + starts);
    MT_LAUNCHED(stream, "exchange_arrivals");
    return MT_OK;
}
MT_CUDA_OP(exchange_arrivals)
