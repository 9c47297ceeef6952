/* The grouped GEMM of bf16 on tensor cores by mma.sync: any card from compute capability 8.0 on,
 * any size and alignment. Its tiles are large, or small for products that have few of them: what
 * these cost is how many instructions a warp takes from its begin to its end, a few cycles each. */
#pragma once

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/mma.cuh"

enum {
    MMA_LARGE = 128, /* sides of tiles */
    MMA_SMALL = 64,
    MMA_RUN = 8,  /* elements a thread moves at once: 16 bytes of an operand, */
    MMA_REALS = 4 /* or of a result of f32 */
};

/* Two rows of ACROSS warps. Shared memory holds stages of both operands, then sums of PASS rows of
 * the tile at a time. */
template <int SIDE_> struct mma_tile {
    enum {
        SIDE = SIDE_,
        ACROSS = SIDE == MMA_SMALL ? 4 : 2,
        THREADS = 2 * ACROSS * 32,
        ROWS = SIDE / 2, /* of a warp */
        COLS = SIDE / ACROSS,
        DEPTH = SIDE == MMA_SMALL ? 64 : 32,
        STAGES = 4,
        ALONG_PITCH = DEPTH + 8, /* pitches that spread eight lines over all banks */
        ACROSS_PITCH = SIDE + 8,
        PANEL = SIDE * ALONG_PITCH > DEPTH *ACROSS_PITCH ? SIDE *ALONG_PITCH : DEPTH *ACROSS_PITCH,
        STAGE = 2 * PANEL,
        BYTES = STAGES * STAGE * (int)sizeof(mt_bf16),
        PASS = 64, /* rows: of both rows of warps, or of one */
        SUM_PITCH = SIDE + 8
    };
    static_assert(PASS % ROWS == 0 && SIDE % PASS == 0, "a warp's rows are of one pass");
    static_assert(BYTES >= PASS * SUM_PITCH * (int)sizeof(float), "stages hold the sums");
};

/* A tile's part of an operand, in shared memory [side][depth] where its lines run ALONG the depth,
 * else [depth][side]. ALIGNED: in runs of 16 bytes. */
template <class C, bool ALONG, bool ALIGNED> struct mma_operand {
    enum {
        LINE = ALONG ? C::DEPTH : C::SIDE,
        PITCH = ALONG ? C::ALONG_PITCH : C::ACROSS_PITCH,
        LINES = C::THREADS * MMA_RUN / LINE, /* that the block's threads bring at once */
        RUNS = C::SIDE * C::DEPTH / MMA_RUN / C::THREADS
    };
    const mt_bf16 *from[RUNS]; /* at the next depth */
    int64_t step;              /* from one depth to the next */
    int to;                    /* of a panel */
    int left;                  /* of the depth, from the first run on */
    int sides;                 /* from the first run's line, or from the run, on */

    /* sides: from side0 on */
    __device__ __forceinline__ mma_operand(const gemm_operand *x, int64_t first, int64_t side0,
                                           int64_t sides_, int depth)
        : step(C::DEPTH * (ALONG ? 1 : x->width))
    {
        const int line = (int)threadIdx.x / (LINE / MMA_RUN),
                  at = (int)threadIdx.x % (LINE / MMA_RUN) * MMA_RUN;
        sides = (int)min(sides_, C::SIDE + 0L) - (ALONG ? line : at);
        left = depth - (ALONG ? at : line);
        to = mt_opaque(line * PITCH + at);
        from[0] = (const mt_bf16 *)x->data + first + (ALONG ? side0 + line : line) * x->width +
                  (ALONG ? at : side0 + at);
#pragma unroll
        for (int r = 1; r < RUNS; r++) from[r] = from[r - 1] + LINES * x->width;
    }
    /* Asks for the next DEPTH; what is not there becomes 0. */
    __device__ __forceinline__ void ask(mt_bf16 *panel)
    {
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            const int deep = ALONG ? left : left - r * LINES;
            const int across = ALONG ? sides - r * LINES : sides;
            if constexpr (ALIGNED) {
                mt_copy_ask<16>(panel + to + r * LINES * PITCH, from[r],
                                deep > 0 && across > 0 ? 16 : 0);
            } else {
                const int count = deep > 0 && across > 0 ? (ALONG ? deep : across) : 0;
#pragma unroll
                for (int e = 0; e < MMA_RUN; e++)
                    panel[to + r * LINES * PITCH + e] =
                        e < count ? from[r][e] : __float2bfloat16_rn(0);
            }
            from[r] += step;
        }
        left -= C::DEPTH;
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
 * the same columns of some rows, whose C it asks for some at a time. */
template <class C, typename D>
static __device__ __forceinline__ void mma_put(const gemm_problem *g, const gemm_tile *t,
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
    const int count = (int)min(g->cols - j, MMA_RUN + 0L),
              rows = (int)min(t->height - i0, C::PASS + 0L);
    const bool scaled = mt_gemm_has_factor(&g->factor), whole = g->d_vectors && count == MMA_RUN;
    const float *bias = g->bias ? (const float *)g->bias + t->member * g->cols + j : NULL;
#pragma unroll 1
    for (int r0 = threadIdx.x / (C::SIDE / MMA_RUN); r0 < rows; r0 += BATCH * LINES) {
        const int64_t at = gemm_result_at(g, t) + (i0 + r0) * g->cols + j;
        const D *from = g->c ? (const D *)g->c + at : NULL;
        D *to = (D *)g->d + at;
        mt_vec<D, PER> y[BATCH][MMA_RUN / PER];
        if (whole && from) {
#pragma unroll
            for (int b = 0; b < BATCH; b++)
#pragma unroll
                for (int x = 0; x < MMA_RUN && r0 + b * LINES < rows; x += PER)
                    y[b][x / PER] = *(const mt_vec<D, PER> *)(from + b * LINES * g->cols + x);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int r = r0 + b * LINES;
            const float *sum = sums + r * C::SUM_PITCH + c;
            if (r >= rows) break;
            if (whole) {
                float own[MMA_RUN], add[MMA_RUN] = {};
#pragma unroll
                for (int x = 0; x < MMA_RUN; x += 4)
                    *(float4 *)(own + x) = *(const float4 *)(sum + x);
#pragma unroll
                for (int x = 0; x < MMA_RUN && bias; x++) add[x] = bias[x];
#pragma unroll
                for (int x = 0; x < MMA_RUN && from; x++)
                    add[x] += mt_get(&y[b][x / PER].at[x % PER]);
#pragma unroll
                for (int x = 0; x < MMA_RUN; x++) {
                    if (scaled) own[x] = gemm_scaled(own[x], t->factor.x, t->factor.y);
                    mt_put(&y[b][x / PER].at[x % PER], own[x] + add[x]);
                }
#pragma unroll
                for (int x = 0; x < MMA_RUN; x += PER)
                    *(mt_vec<D, PER> *)(to + b * LINES * g->cols + x) = y[b][x / PER];
                continue;
            }
#pragma unroll 1
            for (int x = 0; x < count; x++) {
                const float own = scaled ? gemm_scaled(sum[x], t->factor.x, t->factor.y) : sum[x];
                const D *old = from ? from + b * LINES * g->cols + x : NULL;
                mt_put(to + b * LINES * g->cols + x,
                       own + ((bias ? bias[x] : 0) + (old ? mt_get(old) : 0)));
            }
        }
    }
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

template <int SIDE, bool ALONG_A, bool ALONG_B, bool ALIGNED>
static __global__ __launch_bounds__(mma_tile<SIDE>::THREADS,
                                    2) void gemm_mma_kernel(const __grid_constant__ gemm_problem g)
{
    typedef mma_tile<SIDE> C;
    extern __shared__ __align__(128) mt_bf16 stages[];
    gemm_tile t;
    if (!gemm_find_tile(&t, &g, SIDE, SIDE)) return;
    const int depth = (int)t.depth, steps = (depth + C::DEPTH - 1) / C::DEPTH;
    mma_operand<C, ALONG_A, ALIGNED> a(&g.a, gemm_member_at(&g, &g.a, &t), t.i0, t.height - t.i0,
                                       depth);
    mma_operand<C, ALONG_B, ALIGNED> b(&g.b, gemm_member_at(&g, &g.b, &t), t.j0, g.cols - t.j0,
                                       depth);
    const int warp = (int)threadIdx.x / 32, row = warp / C::ACROSS * C::ROWS,
              col = warp % C::ACROSS * C::COLS, of_a = mma_place<C, ALONG_A, true>(row),
              of_b = C::PANEL + mma_place<C, ALONG_B, false>(col);
    mma_sums<C> sum = {};
#pragma unroll 1
    for (int s = 0; s < C::STAGES - 1; s++) {
        if (s < steps) a.ask(stages + s * C::STAGE), b.ask(stages + s * C::STAGE + C::PANEL);
        mt_copies_group();
    }
    int take = 0, put = (C::STAGES - 1) * C::STAGE;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        mt_copies_wait<C::STAGES - 2>();
        __syncthreads(); /* and all have multiplied what the next stage held */
        if (step + C::STAGES - 1 < steps) a.ask(stages + put), b.ask(stages + put + C::PANEL);
        mt_copies_group();
        mma_stage<C, ALONG_A, ALONG_B>(sum, stages + take + of_a, stages + take + of_b);
        put = take;
        take = take == (C::STAGES - 1) * C::STAGE ? 0 : take + C::STAGE;
    }
    mma_result<C>(&g, &t, sum, (float *)stages, row, col);
}

/* Whether large tiles can run it. */
static bool mma_aligned(const gemm_problem *g)
{
    return g->a.vectors && g->b.vectors;
}

template <int SIDE, bool ALIGNED> static mt_status mma_tiles(mt_stream *stream, gemm_problem *g)
{
    static void (*const kernels[MT_GEMM_LAYOUT_COUNT])(const gemm_problem) = {
        gemm_mma_kernel<SIDE, true, true, ALIGNED>,
        gemm_mma_kernel<SIDE, true, false, ALIGNED>,
        gemm_mma_kernel<SIDE, false, false, ALIGNED>,
    };
    static_assert(MT_GEMM_TN == 0 && MT_GEMM_NN == 1 && MT_GEMM_NT == 2, "the order of `kernels`");
    typedef mma_tile<SIDE> C;
    int64_t blocks = gemm_blocks(g, SIDE, SIDE);
    if (!blocks) return MT_OK;
    MT_REQUIRE(blocks <= INT32_MAX, MT_EUNSUPPORTED, "gemm: %lld tiles, a grid has at most %d",
               (long long)blocks, INT32_MAX);
    MT_TRY(mt_cuda_give_shared(stream, (const void *)kernels[g->layout], C::BYTES, "gemm"));
    kernels[g->layout]<<<(unsigned)blocks, C::THREADS, C::BYTES, mt_cuda_stream(stream)>>>(*g);
    MT_LAUNCHED(stream, "gemm (mma)");
    return MT_OK;
}

static mt_status mma_launch(mt_stream *stream, gemm_problem *g, bool small)
{
    if (!mma_aligned(g)) return mma_tiles<MMA_SMALL, false>(stream, g);
    return small ? mma_tiles<MMA_SMALL, true>(stream, g) : mma_tiles<MMA_LARGE, true>(stream, g);
}
