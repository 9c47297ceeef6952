/* The Hopper GEMM of f32 by wgmma: an element is the sum of three bf16 (planes) of 8 bits of its
 * significand each, but for what is below 2^-134, and a product of planes is exact in f32. Those of
 * planes p and q with p + q < 3 give a product to 2^-24 of itself.
 *
 * A block has 128 x 128 of the result. Each of its threads asks for its part of 16 of the depth a
 * few steps ahead, splits it, and leaves the planes in shared memory; the tensor cores multiply
 * what was left before meanwhile. The products of the first planes have a sum of their own, which
 * is added up in f32 every 128 of the depth, since tensor cores cut what they add. What comes out
 * as no number, as of elements that are none or of sums past f32's range, is summed anew by fused
 * multiply-adds. */
#include "kernels/cuda/gemm_planes.cuh"
#include "kernels/cuda/gemm_sm90_ptx.cuh"
#include "kernels/cuda/gemm_sm90_wgmma.cuh"
#include "kernels/cuda/mma.cuh"

enum {
    PLANES = 3,
    THREADS = 256,
    SIDE = 128,
    DEPTH = 16,
    STAGES = 3,
    PLANE = SIDE * DEPTH * (int)sizeof(mt_bf16), /* bytes */
    STAGE = 2 * PLANES * PLANE,
    AHEAD = 3, /* steps that are asked for before they are split */
    ASKED = 2 * SIDE * DEPTH * (int)sizeof(float),       /* bytes of a step */
    BYTES = STAGES * STAGE + (AHEAD + 1) * ASKED + 1024, /* from a multiple of 1024 on */
    STEP = ASKED / (int)sizeof(float4),
    /* Extents that pay: of the result's columns, and of the depth or, for NT, the result's rows.
     * They decide alone, since planes have bits of their own: how many rows there are may not. */
    LEAST = 256,
    PROMOTE = 8 /* steps that the sum of the first planes has */
};

/* A tile of an operand as wgmma reads it: [side][16 deep], the halves of four lines in eight
 * exchanged, where its lines run ALONG the depth, else [2][16 deep][64 sides], whose eighths are.
 */
template <bool ALONG> struct planes_panel : gemm_runs<SIDE, DEPTH, ALONG, 4, THREADS> {
    typedef gemm_runs<SIDE, DEPTH, ALONG, 4, THREADS> runs;
    using runs::deep, runs::side;
    enum { RUNS = runs::RUNS };
    const float *from[RUNS]; /* the next step's */
    int64_t deeper;          /* elements to the one after it */
    int sides;               /* there are */

    /* The byte of a plane at which a run begins. */
    static __device__ __forceinline__ int place(int r)
    {
        const int i = side(r), p = deep(r);
        return ALONG ? i * 32 + (p * 2 ^ (i & 4) * 4)
                     : i / 64 * 2048 + p * 128 + (i % 64 * 2 ^ (p & 7) * 16);
    }
    /* `first`: the member's first element; `extent`: its sides. */
    __device__ __forceinline__ planes_panel(const gemm_operand &x, int64_t first, int64_t side0,
                                            int64_t extent)
        : deeper(ALONG ? (int64_t)DEPTH : DEPTH * x.width),
          sides((int)(extent - side0 < SIDE ? extent - side0 : (int64_t)SIDE))
    {
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            const int64_t i = side0 + side(r), p = deep(r);
            from[r] = (const float *)x.data + first + (ALONG ? i * x.width + p : p * x.width + i);
        }
    }
    /* To places of the thread's own; left: of the depth. Runs are inside or outside as a whole. */
    __device__ __forceinline__ void ask(float4 *own, int left)
    {
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            mt_copy_ask<16>(own + r * THREADS, from[r], side(r) < sides && deep(r) < left ? 16 : 0);
            from[r] += deeper;
        }
    }
    struct asked {
        float4 run[RUNS];
        __device__ __forceinline__ asked(const float4 *own)
        {
#pragma unroll
            for (int r = 0; r < RUNS; r++) run[r] = own[r * THREADS];
        }
    };
    static __device__ __forceinline__ void split(char *to, const asked &from)
    {
#pragma unroll
        for (int r = 0; r < RUNS; r++) {
            float4 x = from.run[r];
#pragma unroll
            for (int p = 0; p < PLANES; p++) {
                const uint2 plane = { mt_pack(x.x, x.y), mt_pack(x.z, x.w) };
                *(uint2 *)(to + place(r) + p * PLANE) = plane;
                x.x -= __uint_as_float(plane.x << 16), x.y -= __uint_as_float(plane.x & 0xffff0000);
                x.z -= __uint_as_float(plane.y << 16), x.w -= __uint_as_float(plane.y & 0xffff0000);
            }
        }
    }
    static __device__ __forceinline__ uint64_t descriptor(uint32_t address)
    {
        const uint32_t high = ALONG ? 256u >> 4 | 3u << 30 : 1024u >> 4 | 1u << 30;
        return (uint64_t)high << 32 | (ALONG ? 1u : 2048u >> 4) << 16 | address >> 4;
    }
};

/* A sum by fused multiply-adds in order. */
static __device__ __noinline__ float summed_anew(const gemm_problem *g, const gemm_tile *t,
                                                 int64_t i, int64_t j)
{
    const gemm_operand &a = g->a, &b = g->b;
    const bool along_a = g->layout != MT_GEMM_NT, along_b = g->layout == MT_GEMM_TN;
    int64_t at = gemm_member_at(g, &a, t) + (along_a ? i * a.width : i),
            bt = gemm_member_at(g, &b, t) + (along_b ? j * b.width : j);
    float sum = 0;
    for (int64_t p = 0; p < t->depth; p++) {
        sum = fma(((const float *)a.data)[at], ((const float *)b.data)[bt], sum);
        at += along_a ? 1 : a.width, bt += along_b ? 1 : b.width;
    }
    return sum;
}

template <bool ALONG_A, bool ALONG_B>
static __global__ void __launch_bounds__(THREADS, 1)
    planes_sm90_kernel(const __grid_constant__ gemm_problem g)
{
    typedef planes_panel<ALONG_A> panel_a;
    typedef planes_panel<ALONG_B> panel_b;
    extern __shared__ char memory[];
    char *base = memory + (-(uint32_t)__cvta_generic_to_shared(memory) & 1023);
    gemm_tile t;
    if (!gemm_find_tile(&t, &g, SIDE, SIDE)) return;
    const uint32_t group = __reduce_max_sync(~0u, threadIdx.x / 128),
                   shared = (uint32_t)__cvta_generic_to_shared(base);
    float sum[SIDE / 2] = {}, first[SIDE / 2] = {}, rest[SIDE / 2] = {};
    panel_a a(g.a, gemm_member_at(&g, &g.a, &t), t.i0, t.height);
    panel_b b(g.b, gemm_member_at(&g, &g.b, &t), t.j0, g.cols);
    float4 *own = (float4 *)(base + STAGES * STAGE) + threadIdx.x;
    const int depth = (int)t.depth;
    for (int ahead = 0; ahead < AHEAD; ahead++) {
        a.ask(own + ahead * STEP, depth - ahead * DEPTH);
        b.ask(own + ahead * STEP + STEP / 2, depth - ahead * DEPTH);
        mt_copies_group();
    }
    int stage = 0, step = 0;
    for (int left = depth; left > 0; left -= DEPTH, step++) {
        float4 *now = own + step % (AHEAD + 1) * STEP,
               *next = own + (step + AHEAD) % (AHEAD + 1) * STEP;
        a.ask(next, left - AHEAD * DEPTH), b.ask(next + STEP / 2, left - AHEAD * DEPTH);
        mt_copies_group();
        mt_copies_wait<AHEAD>();
        const typename panel_a::asked xs(now); /* both before what is stored */
        const typename panel_b::asked ys(now + STEP / 2);
        panel_a::split(base + stage * STAGE, xs);
        panel_b::split(base + stage * STAGE + PLANES * PLANE, ys);
        shared_to_copies();
        __syncthreads(); /* also: both warpgroups have waited for all but the last two steps */
        const uint64_t x = panel_a::descriptor(shared + stage * STAGE + group * (PLANE / 2)),
                       y = panel_b::descriptor(shared + stage * STAGE + PLANES * PLANE);
        if (step % PROMOTE == 0 && step > 0) {
            wgmma_finish<SIDE, 0>(first);
#pragma unroll
            for (int i = 0; i < SIDE / 2; i++) sum[i] += first[i];
        }
        wgmma_fence();
#pragma unroll
        for (int q = PLANES - 1; q > 0; q--)
#pragma unroll
            for (int p = 0; p <= q; p++)
                wgmma<SIDE, !ALONG_A, !ALONG_B>(rest, x + p * (PLANE >> 4),
                                                y + (q - p) * (PLANE >> 4), 1);
        wgmma<SIDE, !ALONG_A, !ALONG_B>(first, x, y, step % PROMOTE != 0);
        wgmma_commit();
        wgmma_wait<1>();
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wgmma_finish<SIDE, 0>(rest);
    wgmma_finish<SIDE, 0>(first);
    gemm_ask_factor(&g, &t);
    const int64_t row = t.i0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4,
                  col = t.j0 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < SIDE / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t i = row + h * 8, c = col + j * 8;
            float run[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int at = j * 4 + h * 2 + k;
                run[k] = (sum[at] + first[at]) + rest[at];
                if (!isfinite(run[k]) && i < t.height && c + k < g.cols)
                    run[k] = summed_anew(&g, &t, i, c + k);
            }
            if (g.d_real)
                gemm_put<float>(&g, &t, i, c, run);
            else
                gemm_put<mt_bf16>(&g, &t, i, c, run);
        }
}

static bool in_runs(const gemm_operand *x)
{
    return x->real && gemm_is_at_16(x->data, x->width, sizeof(float));
}

bool mt_cuda_gemm_splits(const mt_stream *stream, const gemm_problem *g)
{
    const int64_t other = g->layout == MT_GEMM_NT ? g->height : g->depth;
    return mt_cuda_is_hopper(stream) && in_runs(&g->a) && in_runs(&g->b) && other >= LEAST &&
           g->cols >= LEAST && g->rows.m <= INT32_MAX && other <= INT32_MAX;
}

mt_status mt_cuda_gemm_planes(mt_stream *stream, gemm_problem *g)
{
    static void (*const kernels[MT_GEMM_LAYOUT_COUNT])(gemm_problem) = {
        planes_sm90_kernel<true, true>,
        planes_sm90_kernel<true, false>,
        planes_sm90_kernel<false, false>,
    };
    static_assert(MT_GEMM_TN == 0 && MT_GEMM_NN == 1 && MT_GEMM_NT == 2, "the order of `kernels`");
    const int64_t blocks = gemm_blocks(g, SIDE, SIDE);
    if (!blocks) return MT_OK;
    MT_REQUIRE(blocks <= INT32_MAX, MT_EUNSUPPORTED, "gemm: %lld tiles, a grid has at most %d",
               (long long)blocks, INT32_MAX);
    MT_TRY(mt_cuda_give_shared(stream, (const void *)kernels[g->layout], BYTES, "gemm"));
    kernels[g->layout]<<<(unsigned)blocks, THREADS, BYTES, mt_cuda_stream(stream)>>>(*g);
    MT_LAUNCHED(stream, "gemm (planes)");
    return MT_OK;
}
