/* Gradients of dense weights in parts: a result of few tiles leaves most of the card idle while
 * sums over all rows are made, so rows are taken as those of several members, whose results are
 * added. */
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/gemm_path.h"
#include "kernels/cuda/scratch.h"

enum { THREADS = 256, N = 4, MOST_PARTS = MT_CUDA_GEMM_PARTS };
/* Extents decide, of results at 16 bytes, since parts have bits of their own: the card, and what of
 * it ranks leave to products, may not. */
enum { BLOCKS = 132, LEAST_ROWS = 512, TILE_ROWS = 128, TILE_COLS = 192 };

bool mt_cuda_gemm_divides(const gemm_problem *g, int parts)
{
    const mt_group *rows = &g->rows;
    return g->layout == MT_GEMM_NT && rows->members == 1 && !rows->first_dims && !g->fp8 &&
           !g->bias && parts > 0 && parts <= MOST_PARTS && rows->m % parts == 0 &&
           g->cols % (2 * N) == 0 && ((uintptr_t)g->d | (uintptr_t)g->c) % 16 == 0;
}

int mt_cuda_gemm_parts(const gemm_problem *g)
{
    const int64_t tiles = mt_ceil_div(g->height, TILE_ROWS) * mt_ceil_div(g->cols, TILE_COLS);
    if (!tiles || !g->rows.m) return 1;
    for (int parts = MOST_PARTS; parts > 1; parts /= 2)
        if (parts * tiles <= BLOCKS && g->rows.m % (parts * LEAST_ROWS) == 0 &&
            mt_cuda_gemm_divides(g, parts))
            return parts;
    return 1;
}

size_t mt_cuda_gemm_parts_bytes(const gemm_problem *g, int parts)
{
    return parts > 1 ? (size_t)(parts * g->height * g->cols) * sizeof(float) : 0;
}

gemm_problem mt_cuda_gemm_part(const gemm_problem *g, int parts, void *results)
{
    gemm_problem p = *g;
    p.rows.members = parts, p.rows.m = g->rows.m / parts;
    p.c = NULL, p.d = results, p.d_width = g->cols, p.d_real = true, p.factor = mt_gemm_factor();
    return p;
}

/* D = C + the sum of the parts, in order. */
template <typename D, bool SCALED>
static __global__ void __launch_bounds__(THREADS)
    add_kernel(D *d, const D *c, const float *results,
               const __grid_constant__ mt_gemm_factor factor, int parts, int64_t count)
{
    __shared__ float2 by;
    if (SCALED) {
        if (threadIdx.x == 0) by = gemm_factor(&factor, 0);
        __syncthreads();
    }
    MT_GRID_STRIDE(i, count / N)
    {
        float4 x[MOST_PARTS];
#pragma unroll
        for (int p = 0; p < MOST_PARTS; p++)
            if (p < parts) x[p] = __ldcs((const float4 *)(results + p * count) + i);
        float sum[N] = { x[0].x, x[0].y, x[0].z, x[0].w };
#pragma unroll
        for (int p = 1; p < MOST_PARTS; p++) {
            if (p >= parts) continue;
            sum[0] += x[p].x, sum[1] += x[p].y, sum[2] += x[p].z, sum[3] += x[p].w;
        }
        mt_vec<D, N> y, old;
        if (c) old = ((const mt_vec<D, N> *)c)[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float own = SCALED ? gemm_scaled(sum[j], by.x, by.y) : sum[j];
            mt_put(&y.at[j], c ? own + mt_get(&old.at[j]) : own);
        }
        ((mt_vec<D, N> *)d)[i] = y;
    }
}

template <typename D>
static void launch_add(cudaStream_t on, unsigned blocks, const gemm_problem *g,
                       const float *results, int parts, int64_t count)
{
    D *d = (D *)g->d;
    const D *c = (const D *)g->c;
    if (mt_gemm_has_factor(&g->factor))
        add_kernel<D, true><<<blocks, THREADS, 0, on>>>(d, c, results, g->factor, parts, count);
    else
        add_kernel<D, false><<<blocks, THREADS, 0, on>>>(d, c, results, g->factor, parts, count);
}

mt_status mt_cuda_gemm_add_parts(mt_stream *stream, const gemm_problem *g, const float *results,
                                 int parts)
{
    const int64_t count = g->height * g->cols;
    const unsigned blocks = mt_blocks(stream, count / N, THREADS);
    if (g->d_real)
        launch_add<float>(mt_cuda_stream(stream), blocks, g, results, parts, count);
    else
        launch_add<mt_bf16>(mt_cuda_stream(stream), blocks, g, results, parts, count);
    MT_LAUNCHED(stream, "gemm: parts");
    return MT_OK;
}
