/* The grouped GEMM of bf16 on tensor cores by mma.sync: any card from compute capability 8.0 on,
 * any size and alignment. */
#pragma once

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/mma.cuh"

enum {
    MMA_SIDE = 128,
    MMA_DEPTH = 32,
    MMA_THREADS = 256,
    MMA_RUN = 8, /* elements a thread moves at once: 16 bytes */
    MMA_RUNS = MMA_SIDE * MMA_DEPTH / MMA_RUN / MMA_THREADS,
    MMA_ALONG_PITCH = MMA_DEPTH + 8, /* pitches that spread eight lines over all banks */
    MMA_ACROSS_PITCH = MMA_SIDE + 8,
    MMA_PANEL = MMA_SIDE * MMA_ALONG_PITCH
};
static_assert(MMA_PANEL >= MMA_DEPTH * MMA_ACROSS_PITCH, "a panel holds either order");

/* A tile of an operand on its way to shared memory: [side][depth] where its lines run ALONG the
 * depth, else [depth][side]. */
template <bool ALONG> struct mma_panel {
    enum {
        LINE = ALONG ? MMA_DEPTH : MMA_SIDE,
        PITCH = ALONG ? MMA_ALONG_PITCH : MMA_ACROSS_PITCH
    };
    mt_vec<mt_bf16, MMA_RUN> run[MMA_RUNS];

    static __device__ __forceinline__ int line(int r)
    {
        return (threadIdx.x + r * MMA_THREADS) / (LINE / MMA_RUN);
    }
    static __device__ __forceinline__ int at(int r)
    {
        return (threadIdx.x + r * MMA_THREADS) % (LINE / MMA_RUN) * MMA_RUN;
    }
    __device__ __forceinline__ void read(const gemm_operand *x, int64_t first, int64_t side0,
                                         int64_t sides, int64_t p0, int64_t depth)
    {
#pragma unroll
        for (int r = 0; r < MMA_RUNS; r++) {
            int64_t i = (ALONG ? side0 : p0) + line(r), j = (ALONG ? p0 : side0) + at(r);
            int64_t lines = ALONG ? sides : depth, width = ALONG ? depth : sides;
            int64_t count = i < lines ? width - j : 0;
            const mt_bf16 *from = (const mt_bf16 *)x->data + first + i * x->width + j;
            if (x->vectors && count >= MMA_RUN) {
                run[r] = *(const mt_vec<mt_bf16, MMA_RUN> *)from;
            } else {
#pragma unroll
                for (int y = 0; y < MMA_RUN; y++)
                    run[r].at[y] = y < count ? from[y] : __float2bfloat16_rn(0);
            }
        }
    }
    __device__ __forceinline__ void write(mt_bf16 *to) const
    {
#pragma unroll
        for (int r = 0; r < MMA_RUNS; r++)
            *(mt_vec<mt_bf16, MMA_RUN> *)(to + line(r) * PITCH + at(r)) = run[r];
    }
    /* Four 8 x 8 matrices in the order that mma wants: sides side0 + 0, 8, 0, 8 and depths p + 0,
     * 0, 8, 8 (a 16 x 16 block of A, or two 8-column blocks of B in the order 0, 2, 1, 3). */
    static __device__ __forceinline__ void fragments(uint32_t (&f)[4], const mt_bf16 *panel,
                                                     int side0, int p)
    {
        int lane = threadIdx.x % 32, half = lane / 8 % 2 * 8, quarter = lane / 16 * 8, l = lane % 8;
        const mt_bf16 *from = ALONG ? panel + (side0 + half + l) * PITCH + p + quarter
                                    : panel + (p + quarter + l) * PITCH + side0 + half;
        if (ALONG)
            mt_load_matrices(f, from);
        else
            mt_load_transposed(f, from);
    }
};

/* 128 x 128 of the result in each block: 2 x 4 warps of 64 x 32. */
template <bool ALONG_A, bool ALONG_B>
static __global__ __launch_bounds__(MMA_THREADS, 2) void gemm_mma_kernel(gemm_problem g)
{
    __shared__ alignas(16) mt_bf16 sa[2][MMA_PANEL], sb[2][MMA_PANEL];
    gemm_tile t;
    if (!gemm_find_tile(&t, &g, MMA_SIDE, MMA_SIDE)) return;
    int64_t first_a = gemm_member_at(&g, &g.a, &t), first_b = gemm_member_at(&g, &g.b, &t);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 4 * 64, col = warp % 4 * 32;
    float sum[4][4][4] = {};
    mma_panel<ALONG_A> a;
    mma_panel<ALONG_B> b;
    if (t.depth > 0) {
        a.read(&g.a, first_a, t.i0, t.height, 0, t.depth);
        b.read(&g.b, first_b, t.j0, g.cols, 0, t.depth);
    }
    int now = 0;
    for (int64_t p0 = 0; p0 < t.depth; p0 += MMA_DEPTH, now ^= 1) {
        a.write(sa[now]), b.write(sb[now]);
        __syncthreads(); /* this also keeps writers one buffer ahead of the readers of the other */
        if (p0 + MMA_DEPTH < t.depth) {
            a.read(&g.a, first_a, t.i0, t.height, p0 + MMA_DEPTH, t.depth);
            b.read(&g.b, first_b, t.j0, g.cols, p0 + MMA_DEPTH, t.depth);
        }
#pragma unroll
        for (int p = 0; p < MMA_DEPTH; p += 16) {
            uint32_t y[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) b.fragments(y[j], sb[now], col + j * 16, p);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t x[4];
                a.fragments(x, sa[now], row + i * 16, p);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mt_mma(sum[i][j], x, y[j / 2][j % 2], y[j / 2][j % 2 + 2]);
            }
        }
    }
    gemm_ask_factor(&g, &t);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int64_t at = t.i0 + row + i * 8 + lane / 4, c = t.j0 + col + j * 8 + lane % 4 * 2;
            float run[2] = { sum[i / 2][j][i % 2 * 2], sum[i / 2][j][i % 2 * 2 + 1] };
            if (g.d_real)
                gemm_put<float>(&g, &t, at, c, run);
            else
                gemm_put<mt_bf16>(&g, &t, at, c, run);
        }
}

static mt_status mma_launch(mt_stream *stream, gemm_problem *g)
{
    static void (*const kernels[MT_GEMM_LAYOUT_COUNT])(gemm_problem) = {
        gemm_mma_kernel<true, true>,
        gemm_mma_kernel<true, false>,
        gemm_mma_kernel<false, false>,
    };
    static_assert(MT_GEMM_TN == 0 && MT_GEMM_NN == 1 && MT_GEMM_NT == 2, "the order of `kernels`");
    int64_t blocks = gemm_blocks(g, MMA_SIDE, MMA_SIDE);
    if (!blocks) return MT_OK;
    MT_REQUIRE(blocks <= INT32_MAX, MT_EUNSUPPORTED, "gemm: %lld tiles, a grid has at most %d",
               (long long)blocks, INT32_MAX);
    kernels[g->layout]<<<(unsigned)blocks, MMA_THREADS, 0, mt_cuda_stream(stream)>>>(*g);
    MT_LAUNCHED(stream, "gemm (mma)");
    return MT_OK;
}
