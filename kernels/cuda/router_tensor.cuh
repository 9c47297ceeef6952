/* The router's products of bf16 activations on Hopper, by the kernels of the GEMM. A real is the
 * sum of three bf16, 8 bits of its significand each (planes); a product of planes is exact in f32.
 *
 * | logits | x by the planes of wr, a sum for each, which are added                               |
 * | dx     | the products of planes p and q with p + q < 2, which give one of reals to 2^-16, for |
 * |        | a result of bf16: as one sum, [tokens, 3 E] by [3 E, width], or planes kept          |
 * | dwr    | x^T by the planes of dlogits: sums of each plane and run of tokens, added in order   |
 */
#pragma once

#include "kernels/cuda/router_sm90.cuh"

namespace tensor
{

enum {
    PLANES = MT_ROUTER_PLANES,
    PAIRS = 3, /* of planes p and q with p + q < 2 */
    CHUNK = 8, /* elements of 16 bytes */
    SIDE = 32, /* of a square that is turned over */
    /* Terms of a logit in a part, where experts are so few that they are one tile. */
    LOGIT_PART = 1024,
    /* Runs of tokens fill so many pairs of processors with dwr's tiles, whatever the card has: its
     * sums are the same on each. Time in tokens: a tile's start and end, a tile's adding. */
    CLUSTERS = 66,
    TILE_M = 256,
    TILE_N = 192,
    TILE_OVERHEAD = 300,
    RUN_OVERHEAD = 12,
    LEAST_RUN = 256,
    /* So that tiles and lines are numbers of the kernels'. */
    MOST_TOKENS = 1 << 22,
    MOST_WIDTH = 1 << 16
};

static inline int64_t rounded(int64_t x, int64_t unit)
{
    return mt_ceil_div(x, unit) * unit;
}

/* Whether x, [tokens, width] of T, is an operand as it lies. */
template <typename T>
static bool takes(const mt_stream *stream, const void *x, int64_t tokens, int64_t width)
{
    return mt_dtype_of<T>::value == MT_BF16 && mt_cuda_is_hopper(stream) && tokens <= MOST_TOKENS &&
           width && width <= MOST_WIDTH && width % CHUNK == 0 && (uintptr_t)x % 16 == 0;
}

/* ---- planes ------------------------------------------------------------------------------------
 */

/* What is left of an Inf would be NaN, which no plane but the first needs: 0. */
static __device__ __forceinline__ void split(mt_bf16 plane[PLANES], float x)
{
#pragma unroll
    for (int p = 0; p < PLANES; p++) {
        plane[p] = __float2bfloat16_rn(x);
        float rest = x - __bfloat162float(plane[p]);
        x = isfinite(rest) ? rest : 0;
    }
}

/* Where the planes of dlogits go: [tokens, copies, columns], the first twice if there is room, so
 * that three that follow one another are dx's and three dwr's; and the first tokens of dwr's
 * `count` runs of `run`, and their end. */
struct dlogits_planes {
    mt_bf16 *to;
    int64_t *starts; /* may be NULL */
    int copies, columns, run, count;

    /* Those of N experts from e, a multiple of N, below `columns` on; past the experts x is 0. */
    template <int N, typename R>
    __device__ __forceinline__ void put(int64_t t, int e, const R x[N]) const
    {
        typedef mt_vec<mt_bf16, N> vec;
        vec plane[PLANES];
#pragma unroll
        for (int j = 0; j < N; j++) {
            mt_bf16 one[PLANES];
            split(one, (float)x[j]);
#pragma unroll
            for (int p = 0; p < PLANES; p++) plane[p].at[j] = one[p];
        }
        vec *at = (vec *)(to + t * copies * columns + e);
        const int next = columns / N;
        if (copies > PLANES) *at = plane[0], at += next;
#pragma unroll
        for (int p = 0; p < PLANES; p++) at[p * next] = plane[p];
    }
    /* By every thread of a block. */
    __device__ __forceinline__ void put_starts(int64_t tokens) const
    {
        for (int i = threadIdx.x; starts && i <= count; i += blockDim.x)
            starts[i] = min((int64_t)i * run, tokens);
    }
};

/* Copies of wr [experts, width], with rows of zeros up to all_rows: those of each `group` rows
 * follow one another. */
struct wr_planes {
    mt_bf16 *to;
    const float *wr;
    int64_t width;
    int experts, all_rows, group;
};

/* A thread has a chunk of a line of every copy: of the planes in order, or for dx of the second
 * and then the first. */
template <int COPIES, bool FOR_DX>
static __global__ void __launch_bounds__(256) wr_kernel(wr_planes a)
{
    const int c = (blockIdx.x * SIDE + threadIdx.x) * CHUNK;
    const bool vectors = (uintptr_t)a.wr % 16 == 0;
    if (c >= a.width) return;
    for (int r = blockIdx.y * 8 + threadIdx.y; r < a.all_rows; r += gridDim.y * 8) {
        const float *from = a.wr + r * a.width + c;
        alignas(16) float x[CHUNK] = {};
        mt_vec<mt_bf16, CHUNK> plane[PLANES];
        if (vectors && r < a.experts) {
            *(float4 *)x = *(const float4 *)from;
            *(float4 *)(x + 4) = *(const float4 *)(from + 4);
        } else if (r < a.experts) {
#pragma unroll
            for (int j = 0; j < CHUNK; j++) x[j] = from[j];
        }
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            mt_bf16 one[PLANES];
            split(one, x[j]);
#pragma unroll
            for (int p = 0; p < PLANES; p++) plane[p].at[j] = one[p];
        }
        int64_t row = r / a.group * (COPIES * a.group) + r % a.group;
#pragma unroll
        for (int s = 0; s < COPIES; s++)
            *(mt_vec<mt_bf16, CHUNK> *)(a.to + (row + s * a.group) * a.width + c) =
                plane[FOR_DX ? s == 0 : s];
    }
}

template <int COPIES, bool FOR_DX>
static mt_status split_wr(mt_stream *stream, const char *op, const wr_planes &a)
{
    dim3 grid((unsigned)mt_ceil_div(a.width, SIDE * CHUNK), (unsigned)mt_ceil_div(a.all_rows, 8));
    wr_kernel<COPIES, FOR_DX><<<grid, dim3(SIDE, 8), 0, mt_cuda_stream(stream)>>>(a);
    MT_LAUNCHED(stream, op);
    return MT_OK;
}

/* ---- logits ------------------------------------------------------------------------------------
 */

/* Tiles of `tile` experts in all `columns` logits of a token, whose sums over `part` terms lie in
 * `count` parts. None of it depends on the number of tokens. */
struct logits_plan {
    int64_t tile, columns, part, count;
    size_t planes, parts; /* bytes */
};

static inline logits_plan plan_logits(int64_t tokens, int64_t width, int64_t experts)
{
    logits_plan p = {};
    p.tile = experts <= MT_ROUTER_FEW ? MT_ROUTER_FEW : MT_ROUTER_EXPERTS;
    p.columns = rounded(experts, p.tile);
    p.count = p.columns == p.tile ? mt_ceil_div(width, LOGIT_PART) : 1;
    p.part = rounded(mt_ceil_div(width, p.count), 64);
    p.count = mt_ceil_div(width, p.part);
    p.planes = (size_t)rounded(PLANES * p.columns * width * (int64_t)sizeof(mt_bf16), 256);
    p.parts = (size_t)rounded(p.count * tokens * p.columns * (int64_t)sizeof(float), 256);
    return p;
}

/* parts [count, tokens, columns] of x wr^T; `planes`: room for those of wr. */
static mt_status logits(mt_stream *stream, const struct mt_router_fwd_args *a, const logits_plan &p,
                        float *parts, void *planes)
{
    const gemm_sm90_variant *variant = &mt_cuda_router_logits;
    const int64_t lines = PLANES * p.columns;
    wr_planes wr = { (mt_bf16 *)planes, (const float *)a->wr, a->width,
                     (int)a->experts,   (int)p.columns,       (int)p.tile };
    MT_TRY((split_wr<PLANES, false>(stream, "router_fwd", wr)));
    gemm_sm90_matrix x = { "x", a->x, a->width, a->tokens, 1, variant->tile, sizeof(mt_bf16) };
    gemm_sm90_matrix w = { "wr", planes, a->width, lines, 1, variant->box_q, sizeof(mt_bf16) };
    gemm_sm90_matrix y = { "logits", parts, p.columns, a->tokens, p.count, 64, sizeof(float) };
    gemm_sm90_maps maps;
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.p, &x));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.q, &w));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.d, &y));
    maps.c = maps.d;
    gemm_sm90_args args = {};
    args.rows = mt_group_uniform(p.count, p.part, 1);
    args.m = (int)a->tokens, args.n = (int)lines;
    args.width = (int)(PLANES * p.tile), args.super = 8;
    return mt_cuda_gemm_sm90_launch(stream, variant, &maps, &args);
}

/* ---- gradients ---------------------------------------------------------------------------------
 */

/* Copies of a token's planes and the columns of each; dwr's runs of `run` tokens. */
struct bwd_plan {
    int64_t copies, columns, run, count;
    size_t dlogits, wr, runs, starts; /* bytes */
};

/* The number of runs that fill the processors' rounds of tiles of dwr best. */
static inline int64_t runs_of(int64_t tokens, int64_t tiles)
{
    int64_t best = 1, least = INT64_MAX;
    for (int64_t n = 1; n == 1 || (n <= CLUSTERS && n * LEAST_RUN <= tokens); n++) {
        int64_t rounds = mt_ceil_div(tiles * n, CLUSTERS);
        int64_t cost = rounds * (tokens / n + TILE_OVERHEAD) + n * tiles * RUN_OVERHEAD;
        if (cost < least) best = n, least = cost;
    }
    return best;
}

static inline bwd_plan plan_gradients(const struct mt_router_bwd_args *a, bool dx, bool dwr)
{
    bwd_plan p = {};
    const bool kept = a->experts > MT_ROUTER_FEW && a->experts <= MT_ROUTER_KEPT;
    p.copies = PLANES + (dx && !kept);
    p.columns = rounded(a->experts, kept ? 64 : CHUNK);
    int64_t lines = PLANES * p.columns;
    int64_t tiles = mt_ceil_div(a->width, TILE_M) * mt_ceil_div(lines, TILE_N);
    p.run = rounded(mt_ceil_div(a->tokens, runs_of(a->tokens, tiles)), 64);
    p.count = mt_ceil_div(a->tokens, p.run);
    p.dlogits = (size_t)rounded(a->tokens * p.copies * p.columns * (int64_t)sizeof(mt_bf16), 256);
    if (dx) p.wr = (size_t)rounded(PAIRS * p.columns * a->width * (int64_t)sizeof(mt_bf16), 256);
    if (!dwr) return p;
    p.runs = (size_t)rounded(p.count * a->width * lines * (int64_t)sizeof(float), 256);
    p.starts = (size_t)rounded((p.count + 1) * (int64_t)sizeof(int64_t), 256);
    return p;
}

/* Rows of dx's tiles: those with which its last round of processors does not end early. */
static inline int rows_of_tiles(int64_t tokens, int64_t width, int processors)
{
    enum { OVERHEAD = 24 }; /* rows that a tile's start and end cost */
    int64_t best = TILE_N, least = INT64_MAX;
    for (int64_t rows = TILE_N; rows >= TILE_N / 2; rows -= 8) {
        int64_t tiles = mt_ceil_div(tokens, rows) * mt_ceil_div(width, TILE_M);
        int64_t cost = mt_ceil_div(tiles, processors / 2) * (rows + OVERHEAD);
        if (cost < least) best = rows, least = cost;
    }
    return (int)best;
}

/* dx = dx_add + dlogits wr, of the planes of dlogits; `planes`: room for those of wr. */
static mt_status dx(mt_stream *stream, const struct mt_router_bwd_args *a, const bwd_plan &p,
                    const mt_bf16 *dlogits, mt_bf16 *planes)
{
    const gemm_sm90_variant *variant = &mt_cuda_router_dx;
    const int64_t depth = PAIRS * p.columns;
    const size_t size = sizeof(mt_bf16);
    int columns = (int)p.columns;
    wr_planes wr = { planes, (const float *)a->wr, a->width, (int)a->experts, columns, columns };
    if (p.copies == PLANES) {
        MT_TRY((split_wr<MT_ROUTER_DX_PLANES, true>(stream, "router_bwd", wr)));
        return mt_cuda_router_dx_kept(stream, a, p.columns, dlogits, planes);
    }
    MT_TRY((split_wr<PAIRS, true>(stream, "router_bwd", wr)));
    gemm_sm90_matrix w = { "wr", planes, a->width, depth, 1, 64, size };
    gemm_sm90_matrix y = { "dlogits", dlogits, p.copies * columns, 0, 1, variant->box_q, size };
    gemm_sm90_matrix d = { "dx", a->dx, a->width, 0, 1, 64, size }, c = d;
    if (a->dx_add) c.data = a->dx_add;
    gemm_sm90_maps maps;
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.p, &w));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.q, &y));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.d, &d));
    MT_TRY(mt_cuda_gemm_sm90_map(&maps.c, &c));
    gemm_sm90_args args = {};
    args.rows = mt_group_uniform(1, a->tokens, depth);
    args.m = (int)a->width, args.k = (int)depth, args.super = 8;
    args.width = rows_of_tiles(a->tokens, a->width, mt_cuda_multiprocessors(stream));
    args.add = a->dx_add != NULL, args.half = true;
    return mt_cuda_gemm_sm90_launch(stream, variant, &maps, &args);
}

/* dwr = (accumulate ? dwr : 0) + the runs in order, of each the planes in order: runs [count,
 * width, planes, columns]. A block turns a square over. */
static __global__ void __launch_bounds__(SIDE *SIDE)
    add_runs_kernel(float *dwr, const float *runs, int count, int64_t experts, int64_t width,
                    int64_t columns, bool accumulate)
{
    __shared__ float square[SIDE][SIDE + 1];
    int64_t d0 = (int64_t)blockIdx.x * SIDE, e0 = (int64_t)blockIdx.y * SIDE;
    int64_t d = d0 + threadIdx.y, e = e0 + threadIdx.x;
    float sum = 0;
    if (d < width && e < experts) {
        const float *from = runs + d * PLANES * columns + e;
#pragma unroll 4
        for (int n = 0; n < count; n++, from += width * PLANES * columns)
            sum += (from[2 * columns] + from[columns]) + from[0];
    }
    square[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    d = d0 + threadIdx.x, e = e0 + threadIdx.y;
    if (d >= width || e >= experts) return;
    float *to = dwr + e * width + d;
    *to = (accumulate ? *to : 0) + square[threadIdx.x][threadIdx.y];
}

/* dwr [+]= dlogits^T x, of the planes of dlogits; `runs`: room for its transposed sums. */
static mt_status dwr(mt_stream *stream, const struct mt_router_bwd_args *a, const bwd_plan &p,
                     const mt_bf16 *dlogits, float *runs, const int64_t *starts)
{
    gemm_problem g = {};
    g.layout = MT_GEMM_NT, g.height = a->width, g.cols = PLANES * p.columns;
    g.rows = mt_group_ragged_rows(p.count, a->tokens, 1, starts, starts);
    g.a = { a->x, false, true, true, a->width };
    const mt_bf16 *planes = dlogits + (p.copies - PLANES) * p.columns;
    g.b = { planes, false, true, true, p.copies * p.columns };
    g.d = runs, g.d_width = g.cols, g.d_real = true;
    mt_cuda_gemm_path path = {};
    path.variant = MT_CUDA_GEMM_PINGPONG, path.super = 8;
    path.width = (int)min(rounded(g.cols, 64), (int64_t)TILE_N);
    MT_TRY(mt_cuda_gemm_sm90(stream, &g, &path));
    dim3 grid((unsigned)mt_ceil_div(a->width, SIDE), (unsigned)mt_ceil_div(a->experts, SIDE));
    add_runs_kernel<<<grid, dim3(SIDE, SIDE), 0, mt_cuda_stream(stream)>>>(
        (float *)a->dwr, runs, (int)p.count, a->experts, a->width, p.columns, a->accumulate);
    MT_LAUNCHED(stream, "router_bwd");
    return MT_OK;
}

} /* namespace tensor */
