/* The grouped GEMM by fused multiply-adds in real: each thread sums a square of the result, each
 * sum takes its products in order. */
#pragma once

#include "kernels/cuda/gemm.cuh"

enum { SIMT_THREADS = 256, SIMT_DEPTH = 16, SIMT_RUN = 4 /* elements a thread moves at once */ };

template <typename T, typename E>
static __device__ __forceinline__ void simt_read(mt_vec<mt_real<T>, SIMT_RUN> &to, const E *from,
                                                 int count, bool vectors)
{
    if (vectors && count >= SIMT_RUN) {
        mt_vec<E, SIMT_RUN> run = *(const mt_vec<E, SIMT_RUN> *)from;
#pragma unroll
        for (int x = 0; x < SIMT_RUN; x++) to.at[x] = mt_get(&run.at[x]);
    } else {
#pragma unroll
        for (int x = 0; x < SIMT_RUN; x++) to.at[x] = x < count ? (mt_real<T>)mt_get(from + x) : 0;
    }
}

/* A tile of an operand, SIDE of D's rows or columns and SIMT_DEPTH deep, on its way from memory to
 * shared memory, where it lies [depth][SIDE + 4]; then the next deeper one. ALONG: the operand's
 * lines run along the depth. */
template <typename T, int SIDE, bool ALONG>
struct simt_panel : gemm_runs<SIDE, SIMT_DEPTH, ALONG, SIMT_RUN, SIMT_THREADS> {
    typedef gemm_runs<SIDE, SIMT_DEPTH, ALONG, SIMT_RUN, SIMT_THREADS> runs;
    using runs::deep, runs::side;
    typedef mt_real<T> R;
    enum { EITHER = sizeof(T) < sizeof(R) };
    enum { RUNS = runs::RUNS, PITCH = SIDE + 4 };
    mt_vec<R, SIMT_RUN> run[RUNS];
    const char *from; /* where its first run is read next */
    int64_t pitch;    /* of lines, in bytes */
    int sides;        /* from the first run's on */

    /* `first`: the member's first element; `extent`: its sides. */
    __device__ __forceinline__ simt_panel(const gemm_operand &x, int64_t first, int64_t side0,
                                          int64_t extent)
    {
        const int64_t i = side0 + side(0), p = deep(0), most = SIDE;
        const int size = EITHER && x.real ? (int)sizeof(R) : (int)sizeof(T);
        pitch = x.width * size;
        from =
            (const char *)x.data + first * size + (ALONG ? i : p) * pitch + (ALONG ? p : i) * size;
        sides = (int)(extent - i < most ? extent - i : most);
    }
    /* left: of the depth, from the tile on. */
    __device__ __forceinline__ void read(const gemm_operand &x, int64_t left)
    {
        const int deeper = (int)(left < SIMT_DEPTH ? left : SIMT_DEPTH);
        const char *at = from;
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            const int beside = sides - (side(r) - side(0)), below = deeper - deep(r);
            const int count = beside <= 0 || below <= 0 ? 0 : ALONG ? below : beside;
            if (EITHER && x.real)
                simt_read<T>(run[r], (const R *)at, count, x.vectors);
            else
                simt_read<T>(run[r], (const T *)at, count, x.vectors);
            at += (ALONG ? side(1) - side(0) : deep(1) - deep(0)) * pitch;
        }
        from += ALONG ? SIMT_DEPTH * (EITHER && x.real ? (int)sizeof(R) : (int)sizeof(T))
                      : SIMT_DEPTH * pitch;
    }
    __device__ __forceinline__ void write(R *to) const
    {
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            R *at = to + deep(r) * PITCH + side(r);
            if (ALONG) {
#pragma unroll
                for (int x = 0; x < SIMT_RUN; x++) at[x * PITCH] = run[r].at[x];
            } else {
                *(mt_vec<R, SIMT_RUN> *)at = run[r];
            }
        }
    }
};

/* SIDE x SIDE of the result in each block: 4 x 2 warps of 4 x 8 threads, each with SIDE / 64 runs
 * of 4 rows, 16 apart, and as many of 4 columns, 32 apart: what a warp reads at once of either
 * operand fits into the banks once. */
template <typename T, int SIDE, bool ALONG_A, bool ALONG_B>
static __global__ __launch_bounds__(SIMT_THREADS, 2) void gemm_simt_kernel(gemm_problem g)
{
    typedef mt_real<T> R;
    enum { GROUPS = SIDE / 64, EACH = 4 * GROUPS, PITCH = SIDE + 4 };
    __shared__ alignas(32) R sa[2][SIMT_DEPTH * PITCH], sb[2][SIMT_DEPTH * PITCH];
    gemm_tile t;
    if (!gemm_find_tile(&t, &g, SIDE, SIDE)) return;
    int64_t first_a = gemm_member_at(&g, &g.a, &t), first_b = gemm_member_at(&g, &g.b, &t);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = warp / 2 * 16 * GROUPS + lane / 8 * 4,
              col = warp % 2 * 32 * GROUPS + lane % 8 * 4;
    R sum[EACH][EACH] = {};
    simt_panel<T, SIDE, ALONG_A> a(g.a, first_a, t.i0, t.height);
    simt_panel<T, SIDE, ALONG_B> b(g.b, first_b, t.j0, g.cols);
    if (t.depth > 0) a.read(g.a, t.depth), b.read(g.b, t.depth);
    int now = 0;
    for (int64_t p0 = 0; p0 < t.depth; p0 += SIMT_DEPTH, now ^= 1) {
        a.write(sa[now]), b.write(sb[now]);
        __syncthreads(); /* this also keeps writers one buffer ahead of the readers of the other */
        const int64_t left = t.depth - p0 - SIMT_DEPTH;
        if (left > 0) a.read(g.a, left), b.read(g.b, left);
#pragma unroll
        for (int p = 0; p < SIMT_DEPTH; p++) {
            mt_vec<R, 4> x[GROUPS], y[GROUPS];
#pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                x[k] = *(const mt_vec<R, 4> *)&sa[now][p * PITCH + k * 16 + row];
                y[k] = *(const mt_vec<R, 4> *)&sb[now][p * PITCH + k * 32 + col];
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    sum[i][j] = fma(x[i / 4].at[i % 4], y[j / 4].at[j % 4], sum[i][j]);
        }
    }
    gemm_ask_factor(&g, &t);
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            int64_t at = t.i0 + i / 4 * 16 + row + i % 4, j = t.j0 + k * 32 + col;
            R run[4] = { sum[i][k * 4], sum[i][k * 4 + 1], sum[i][k * 4 + 2], sum[i][k * 4 + 3] };
            if (sizeof(T) < sizeof(R) && g.d_real)
                gemm_put<R>(&g, &t, at, j, run);
            else
                gemm_put<T>(&g, &t, at, j, run);
        }
}

template <typename T, int SIDE> static mt_status simt_launch(mt_stream *stream, gemm_problem *g)
{
    static void (*const kernels[MT_GEMM_LAYOUT_COUNT])(gemm_problem) = {
        gemm_simt_kernel<T, SIDE, true, true>,
        gemm_simt_kernel<T, SIDE, true, false>,
        gemm_simt_kernel<T, SIDE, false, false>,
    };
    static_assert(MT_GEMM_TN == 0 && MT_GEMM_NN == 1 && MT_GEMM_NT == 2, "the order of `kernels`");
    int64_t blocks = gemm_blocks(g, SIDE, SIDE);
    if (!blocks) return MT_OK;
    MT_REQUIRE(blocks <= INT32_MAX, MT_EUNSUPPORTED, "gemm: %lld tiles, a grid has at most %d",
               (long long)blocks, INT32_MAX);
    kernels[g->layout]<<<(unsigned)blocks, SIMT_THREADS, 0, mt_cuda_stream(stream)>>>(*g);
    MT_LAUNCHED(stream, "gemm (simt)");
    return MT_OK;
}
