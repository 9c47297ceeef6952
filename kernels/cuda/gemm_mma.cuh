/* The grouped GEMM of bf16 on tensor cores by mma.sync: any card from compute capability 8.0 on,
 * any size and alignment. A product of few tiles takes as long as a block from its begin to its
 * end, some cycles for each instruction of a warp: small tiles are for those. */
#pragma once

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/mma.cuh"

enum {
    MMA_LARGE = 128, /* sides of tiles */
    MMA_SMALL = 64,
    MMA_RUN = 8 /* elements a thread moves at once: 16 bytes of an operand */
};

/* Two rows of ACROSS warps. Shared memory holds stages of both operands, then sums of PASS rows of
 * the tile at a time. ALONG: the lines of A run along the depth: a stage of large tiles has then
 * whole ones of 128 bytes. */
template <int SIDE_, bool ALONG> struct mma_tile {
    enum {
        SIDE = SIDE_,
        ACROSS = SIDE == MMA_SMALL ? 4 : 2,
        THREADS = 2 * ACROSS * 32,
        ROWS = SIDE / 2, /* of a warp */
        COLS = SIDE / ACROSS,
        DEPTH = SIDE == MMA_SMALL || ALONG ? 64 : 32,
        STAGES = DEPTH == 32 || SIDE == MMA_SMALL ? 4 : 2,
        ALONG_PITCH = DEPTH + 8, /* pitches that spread eight lines over all banks */
        ACROSS_PITCH = SIDE + 8,
        AS_LINES = SIDE * ALONG_PITCH,
        AS_COLUMNS = DEPTH * ACROSS_PITCH,
        PANEL = AS_LINES > AS_COLUMNS ? (int)AS_LINES : (int)AS_COLUMNS,
        STAGE = 2 * PANEL,
        BYTES = STAGES * STAGE * (int)sizeof(mt_bf16),
        PASS = 64, /* rows: of both rows of warps, or of one */
        SUM_PITCH = SIDE + 8
    };
    static_assert(PASS % ROWS == 0 && SIDE % PASS == 0, "a warp's rows are of one pass");
    static_assert(BYTES >= PASS * SUM_PITCH * (int)sizeof(float), "stages hold the sums");
};

/* A tile's part of an operand, in shared memory [side][depth] where its lines run ALONG the depth,
 * else [depth][side]. RUN: elements of a line that a thread has, MMA_RUN by asynchronous copies or,
 * of an operand that does not lie at 16 bytes, one after another, through registers. */
template <class C, bool ALONG, int RUN> struct mma_operand {
    enum {
        LINE = ALONG ? C::DEPTH : C::SIDE,
        PITCH = ALONG ? C::ALONG_PITCH : C::ACROSS_PITCH,
        LINES = C::THREADS * RUN / LINE, /* that the block's threads bring at once */
        RUNS = C::SIDE * C::DEPTH / RUN / C::THREADS,
        POINTERS = RUN == MMA_RUN ? (int)RUNS : 1
    };
    const mt_bf16 *from[POINTERS]; /* at the next depth: of each run, or of the first */
    int64_t step;                  /* from one depth to the next */
    int64_t apart;                 /* from run to run */
    int to;                        /* of a panel */
    int left;                      /* of the depth, from the first run on */
    int sides;                     /* from the first run's line, or from the run, on */
    mt_bf16 element[RUN == MMA_RUN ? 1 : (int)RUNS];

    /* sides: from side0 on */
    __device__ __forceinline__ mma_operand(const gemm_operand *x, int64_t first, int64_t side0,
                                           int64_t sides_, int depth)
        : step(C::DEPTH * (ALONG ? 1 : x->width)), apart(LINES * x->width)
    {
        const int line = (int)threadIdx.x / (LINE / RUN),
                  at = (int)threadIdx.x % (LINE / RUN) * RUN;
        sides = (int)min(sides_, C::SIDE + 0L) - (ALONG ? line : at);
        left = depth - (ALONG ? at : line);
        to = mt_opaque(line * PITCH + at);
        from[0] = (const mt_bf16 *)x->data + first + (ALONG ? side0 + line : line) * x->width +
                  (ALONG ? at : side0 + at);
#pragma unroll
        for (int r = 1; r < POINTERS; r++) from[r] = from[r - 1] + apart;
    }
    __device__ __forceinline__ bool has(int r) const
    {
        return ALONG ? left > 0 && sides > r * LINES : left > r * LINES && sides > 0;
    }
    /* Asks for the next DEPTH, for a panel; what is not there becomes 0. */
    __device__ __forceinline__ void ask(mt_bf16 *panel)
    {
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            if constexpr (RUN == MMA_RUN)
                mt_copy_ask<16>(panel + to + r * LINES * PITCH, from[r], has(r) ? 16 : 0);
            else
                element[r] = has(r) ? from[0][r * apart] : __float2bfloat16_rn(0);
        }
#pragma unroll
        for (int r = 0; r < POINTERS; r++) from[r] += step;
        left -= C::DEPTH;
    }
    /* What went to registers to the panel. */
    __device__ __forceinline__ void land(mt_bf16 *panel) const
    {
        if constexpr (RUN != MMA_RUN) {
#pragma unroll
            for (int r = 0; r < RUNS; r++) panel[to + r * LINES * PITCH] = element[r];
        }
    }
};

/* Where a lane's line of four 8 x 8 matrices begins in a panel: a 16 x 16 block of A, or two
 * 8-column blocks of B, each of its two depths, from `side` on. */
template <class C, bool ALONG, bool OF_A> static __device__ __forceinline__ int mma_place(int side)
{
    const int lane = (int)threadIdx.x % 32, odd = lane / 8 % 2 * 8, upper = lane / 16 * 8,
              line = lane % 8, sides = side + (OF_A ? odd : upper), deep = OF_A ? upper : odd;
    return mt_opaque(ALONG ? (sides + line) * C::ALONG_PITCH + deep
                           : (deep + line) * C::ACROSS_PITCH + sides);
}
/* Those `sides` and `p` further on. */
template <class C, bool ALONG>
static __device__ __forceinline__ void mma_fragments(uint32_t (&f)[4], const mt_bf16 *panel,
                                                     int sides, int p)
{
    if (ALONG)
        mt_load_matrices(f, panel + sides * C::ALONG_PITCH + p);
    else
        mt_load_transposed(f, panel + p * C::ACROSS_PITCH + sides);
}

/* What a warp sums: 16 x 8 at a time. */
template <class C> struct mma_sums {
    float at[C::ROWS / 16][C::COLS / 8][4];
};

/* a, b: the warp's places in the stage. */
template <class C, bool ALONG_A, bool ALONG_B>
static __device__ __forceinline__ void mma_stage(mma_sums<C> &sum, const mt_bf16 *a,
                                                 const mt_bf16 *b)
{
#pragma unroll
    for (int p = 0; p < C::DEPTH; p += 16) {
        uint32_t y[C::COLS / 16][4];
#pragma unroll
        for (int j = 0; j < C::COLS / 16; j++) mma_fragments<C, ALONG_B>(y[j], b, j * 16, p);
#pragma unroll
        for (int i = 0; i < C::ROWS / 16; i++) {
            uint32_t x[4];
            mma_fragments<C, ALONG_A>(x, a, i * 16, p);
#pragma unroll
            for (int j = 0; j < C::COLS / 8; j++)
                mt_mma(sum.at[i][j], x, y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
        }
    }
}

/* Rows of sums in shared memory to the result, from row i0 of the tile's member on: each thread has
 * the same run of columns of some rows, whose C it asks for some at a time. */
template <class C, typename D>
static __device__ __forceinline__ void mma_put_runs(const gemm_problem *g, const gemm_tile *t,
                                                    const float *sums, int64_t i0)
{
    enum {
        LINES = C::THREADS * MMA_RUN / C::SIDE,
        PER = 16 / sizeof(D), /* of an access */
        BATCH = C::SIDE == MMA_SMALL ? 2 : 4
    };
    static_assert(C::PASS % (LINES * BATCH) == 0, "batches are whole");
    const int c = (int)threadIdx.x % (C::SIDE / MMA_RUN) * MMA_RUN;
    const int64_t j = t->j0 + c;
    const int rows = j < g->cols ? (int)min(t->height - i0, C::PASS + 0L) : 0;
    const bool scaled = mt_gemm_has_factor(&g->factor);
    const float *bias = g->bias ? (const float *)g->bias + t->member * g->cols + j : NULL;
#pragma unroll 1
    for (int r0 = threadIdx.x / (C::SIDE / MMA_RUN); r0 < rows; r0 += BATCH * LINES) {
        const int64_t at = (gemm_result_row(g, t) + i0 + r0) * g->d_width + j;
        const D *from = g->c ? (const D *)g->c + at : NULL;
        D *to = (D *)g->d + at;
        mt_vec<D, PER> y[BATCH][MMA_RUN / PER];
#pragma unroll
        for (int b = 0; b < BATCH && from; b++)
#pragma unroll
            for (int x = 0; x < MMA_RUN && r0 + b * LINES < rows; x += PER)
                y[b][x / PER] = *(const mt_vec<D, PER> *)(from + b * LINES * g->d_width + x);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int r = r0 + b * LINES;
            float own[MMA_RUN], add[MMA_RUN] = {};
            if (r >= rows) break;
#pragma unroll
            for (int x = 0; x < MMA_RUN; x += 4)
                *(float4 *)(own + x) = *(const float4 *)(sums + r * C::SUM_PITCH + c + x);
#pragma unroll
            for (int x = 0; x < MMA_RUN && bias; x++) add[x] = bias[x];
#pragma unroll
            for (int x = 0; x < MMA_RUN && from; x++) add[x] += mt_get(&y[b][x / PER].at[x % PER]);
#pragma unroll
            for (int x = 0; x < MMA_RUN; x++) {
                if (scaled) own[x] = gemm_scaled(own[x], t->factor.x, t->factor.y);
                mt_put(&y[b][x / PER].at[x % PER], own[x] + add[x]);
            }
#pragma unroll
            for (int x = 0; x < MMA_RUN; x += PER)
                *(mt_vec<D, PER> *)(to + b * LINES * g->d_width + x) = y[b][x / PER];
        }
    }
}

/* The same of a result that does not lie at 16 bytes: neighbouring threads have neighbouring
 * columns. */
template <class C, typename D>
static __device__ __forceinline__ void mma_put_elements(const gemm_problem *g, const gemm_tile *t,
                                                        const float *sums, int64_t i0)
{
    enum { LINES = C::THREADS / C::SIDE };
    const int c = (int)threadIdx.x % C::SIDE;
    const int64_t j = t->j0 + c;
    const int rows = j < g->cols ? (int)min(t->height - i0, C::PASS + 0L) : 0;
    const bool scaled = mt_gemm_has_factor(&g->factor);
    const float bias = g->bias && rows > 0 ? ((const float *)g->bias)[t->member * g->cols + j] : 0;
#pragma unroll 4
    for (int r = threadIdx.x / C::SIDE; r < rows; r += LINES) {
        const int64_t at = (gemm_result_row(g, t) + i0 + r) * g->d_width + j;
        float own = sums[r * C::SUM_PITCH + c], add = bias;
        if (scaled) own = gemm_scaled(own, t->factor.x, t->factor.y);
        if (g->c) add += mt_get((const D *)g->c + at);
        mt_put((D *)g->d + at, own + add);
    }
}

template <class C, typename D>
static __device__ __forceinline__ void mma_put(const gemm_problem *g, const gemm_tile *t,
                                               const float *sums, int64_t i0)
{
    if (g->d_vectors)
        mma_put_runs<C, D>(g, t, sums, i0);
    else
        mma_put_elements<C, D>(g, t, sums, i0);
}

template <class C>
static __device__ __forceinline__ void mma_result(const gemm_problem *g, gemm_tile *t,
                                                  const mma_sums<C> &sum, float *shared, int row,
                                                  int col)
{
    const int lane = (int)threadIdx.x % 32;
    gemm_ask_factor(g, t);
#pragma unroll 1
    for (int i0 = 0; i0 < C::SIDE; i0 += C::PASS) {
        __syncthreads();
        if (row / C::PASS * C::PASS == i0) {
            float *to = shared + (row % C::PASS + lane / 4) * C::SUM_PITCH + col + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < C::ROWS / 8; i++)
#pragma unroll
                for (int j = 0; j < C::COLS / 8; j++)
                    *(float2 *)(to + i * 8 * C::SUM_PITCH + j * 8) =
                        make_float2(sum.at[i / 2][j][i % 2 * 2], sum.at[i / 2][j][i % 2 * 2 + 1]);
        }
        __syncthreads();
        if (g->d_real)
            mma_put<C, float>(g, t, shared, t->i0 + i0);
        else
            mma_put<C, mt_bf16>(g, t, shared, t->i0 + i0);
    }
}

/* RUN_A, RUN_B: of the operands, see mma_operand. */
template <int SIDE, bool ALONG_A, bool ALONG_B, int RUN_A, int RUN_B>
static __global__ __launch_bounds__(mma_tile<SIDE, ALONG_A>::THREADS,
                                    2) void gemm_mma_kernel(const __grid_constant__ gemm_problem g)
{
    typedef mma_tile<SIDE, ALONG_A> C;
    extern __shared__ __align__(128) mt_bf16 stages[];
    gemm_tile t;
    if (!gemm_find_tile(&t, &g, SIDE, SIDE)) return;
    const int depth = (int)t.depth, steps = (depth + C::DEPTH - 1) / C::DEPTH;
    mma_operand<C, ALONG_A, RUN_A> a(&g.a, gemm_member_at(&g, &g.a, &t), t.i0, t.height - t.i0,
                                     depth);
    mma_operand<C, ALONG_B, RUN_B> b(&g.b, gemm_member_at(&g, &g.b, &t), t.j0, g.cols - t.j0,
                                     depth);
    const int warp = (int)threadIdx.x / 32, row = warp / C::ACROSS * C::ROWS,
              col = warp % C::ACROSS * C::COLS, of_a = mma_place<C, ALONG_A, true>(row),
              of_b = C::PANEL + mma_place<C, ALONG_B, false>(col);
    mma_sums<C> sum = {};
#pragma unroll 1
    for (int s = 0; s < C::STAGES - 1; s++) {
        mt_bf16 *to = stages + s * C::STAGE;
        if (s < steps) {
            a.ask(to), b.ask(to + C::PANEL);
            a.land(to), b.land(to + C::PANEL);
        }
        mt_copies_group();
    }
    int take = 0, put = (C::STAGES - 1) * C::STAGE;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        mt_copies_wait<C::STAGES - 2>();
        __syncthreads(); /* and all have multiplied what the next stage held */
        const bool more = step + C::STAGES - 1 < steps;
        mt_bf16 *to = stages + put;
        if (more) a.ask(to), b.ask(to + C::PANEL);
        mt_copies_group();
        mma_stage<C, ALONG_A, ALONG_B>(sum, stages + take + of_a, stages + take + of_b);
        if (more) a.land(to), b.land(to + C::PANEL);
        put = take;
        take = take == (C::STAGES - 1) * C::STAGE ? 0 : take + C::STAGE;
    }
    mma_result<C>(&g, &t, sum, (float *)stages, row, col);
}

/* Whether both operands lie in runs of 16 bytes: large tiles are of these alone. */
static bool mma_aligned(const gemm_problem *g)
{
    return g->a.vectors && g->b.vectors;
}

template <int SIDE, bool ALONG_A, bool ALONG_B, int RUN_A, int RUN_B>
static mt_status mma_kernel(mt_stream *stream, gemm_problem *g)
{
    typedef mma_tile<SIDE, ALONG_A> C;
    const auto kernel = gemm_mma_kernel<SIDE, ALONG_A, ALONG_B, RUN_A, RUN_B>;
    const int64_t blocks = gemm_blocks(g, SIDE, SIDE),
                  depth = g->layout == MT_GEMM_NT ? g->rows.m : g->depth;
    if (!blocks) return MT_OK;
    MT_REQUIRE(blocks <= INT32_MAX, MT_EUNSUPPORTED, "gemm: %lld tiles, a grid has at most %d",
               (long long)blocks, INT32_MAX);
    MT_REQUIRE(depth <= INT32_MAX - C::DEPTH, MT_EUNSUPPORTED,
               "gemm: a depth of %lld, must be at most %d", (long long)depth, INT32_MAX - C::DEPTH);
    MT_TRY(mt_cuda_give_shared(stream, (const void *)kernel, C::BYTES, "gemm"));
    kernel<<<(unsigned)blocks, C::THREADS, C::BYTES, mt_cuda_stream(stream)>>>(*g);
    MT_LAUNCHED(stream, "gemm (mma)");
    return MT_OK;
}

template <int SIDE, int RUN_A, int RUN_B>
static mt_status mma_tiles(mt_stream *stream, gemm_problem *g)
{
    return g->layout == MT_GEMM_TN   ? mma_kernel<SIDE, true, true, RUN_A, RUN_B>(stream, g)
           : g->layout == MT_GEMM_NN ? mma_kernel<SIDE, true, false, RUN_A, RUN_B>(stream, g)
                                     : mma_kernel<SIDE, false, false, RUN_A, RUN_B>(stream, g);
}

static mt_status mma_launch(mt_stream *stream, gemm_problem *g, bool small)
{
    if (mma_aligned(g))
        return small ? mma_tiles<MMA_SMALL, MMA_RUN, MMA_RUN>(stream, g)
                     : mma_tiles<MMA_LARGE, MMA_RUN, MMA_RUN>(stream, g);
    return g->a.vectors   ? mma_tiles<MMA_SMALL, MMA_RUN, 1>(stream, g)
           : g->b.vectors ? mma_tiles<MMA_SMALL, 1, MMA_RUN>(stream, g)
                          : mma_tiles<MMA_SMALL, 1, 1>(stream, g);
}
