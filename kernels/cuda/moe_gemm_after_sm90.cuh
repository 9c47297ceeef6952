/* The Hopper GEMM of a narrow down projection's dY W, whose rows are gathered, and weighted after
 * the product.
 *
 * Ping-pong of tiles of all 256 columns of W, so that each row of dY comes once. Lines come later
 * than boxes: W has a ring of three stages, dY one of six. Two warps bring lines, one thread W, one
 * brings z and stores its gradient. Weights of a tile's rows come while it is multiplied; the
 * SwiGLU of z, weighted, is stored straight from the warps' lines. */
#pragma once

#include "kernels/cuda/moe_gemm_sm90.cuh"

template <int CLUSTER_N_> struct moe_after : moe<MT_GEMM_NN, CLUSTER_N_, true, true, MOE_UNGATED> {
    typedef moe<MT_GEMM_NN, CLUSTER_N_, true, true, MOE_UNGATED> base;
    enum {
        AFTER = true,
        GATHERERS = 64,
        BLOCKS_M = 4,
        TILE = 256,
        WIDTH = 96,
        BOX_Q = WIDTH,
        STAGES = 6,
        SPLIT = STAGES / 2,
        BUFFERS = 2,
        P_BYTES = TILE * 128,
        STAGE = WIDTH * 128,
        PIECES = SPLIT * P_BYTES + STAGES * STAGE,
        RING = 16,
        TILES = PIECES + 2 * BUFFERS * base::BUFFER,
        SPLIT_FULL = TILES + RING * base::TILE_BYTES,
        SPLIT_EMPTY = SPLIT_FULL + SPLIT * 8,
        FULL = SPLIT_EMPTY + SPLIT * 8,
        EMPTY = FULL + STAGES * 8,
        ORDER = EMPTY + STAGES * 8,
        HAND = ORDER + 16,
        OLD = HAND + 16,
        DOTS = OLD + 2 * BUFFERS * 8, /* here: the weighted SwiGLU of a warp's piece */
        WRITTEN = DOTS + 8 * base::DOTS_BYTES,
        PLACES = WRITTEN + 2 * BUFFERS * 8,
        WEIGHTS = PLACES + 2 * BUFFERS * 16,
        SUMS = WEIGHTS + 2 * WIDTH * 4,
        TABLE = SUMS + 8 * WIDTH * 4,
    };
};

template <int CLUSTER_N> struct sm90_beside<moe_after<CLUSTER_N>> {
    enum { GATHERS = moe_after<CLUSTER_N>::GATHERERS, PRODUCES = true };
    typedef moe_result<moe_after<CLUSTER_N>> result;
};

/* Weights of the tile's rows. */
template <class C> static __device__ __forceinline__ uint32_t moe_weights_at(const moe_result<C> &r)
{
    return r.base + C::WEIGHTS + r.group() * C::WIDTH * 4;
}
template <class C> static __device__ __forceinline__ void moe_ask_weights(const moe_result<C> &r)
{
    barrier_threads(1 + r.group(), 128); /* those of the tile before have been read */
    const int i = (int)(thread_now() % 128);
    if (i < r.len())
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(moe_weights_at(r) + i * 4),
                     "l"(r.args->row_weight + r.row() + i)
                     : "memory");
}

/* A warp's 16 x 16 sums, rounded, to the gradients of z, which stands where they go, and the
 * weighted SwiGLU of z. i, j: of those of the piece, of the tile. dot: of four rows, the thread's
 * terms of <p, y>. */
template <class C>
static __device__ __forceinline__ void moe_put_after(uint32_t address, const moe_result<C> &r,
                                                     const uint32_t *d, int i, int j,
                                                     float (&dot)[4])
{
    uint32_t g[4], u[4], a[4];
    const uint32_t lane = thread_now() % 32, line = lane / 16 * 8 + lane % 8;
    moe_take(address, g);
    moe_take(address + C::PART, u);
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float2 w =
            shared_pair(moe_weights_at(r) + (j * C::PIECE + i * 16 + y * 8 + lane % 4 * 2) * 4);
        float even = 0, odd = 0;
#pragma unroll
        for (int x = 2 * y; x < 2 * y + 2; x++) {
            float dg0, dg1, du0, du1;
            a[x] = moe_pack(mt_swiglu_of<mt_bf16>(moe_low(g[x]), moe_low(u[x])),
                            mt_swiglu_of<mt_bf16>(moe_high(g[x]), moe_high(u[x])));
            even = fmaf(moe_low(d[x]), moe_low(a[x]), even);
            odd = fmaf(moe_high(d[x]), moe_high(a[x]), odd);
            mt_swiglu_gradient<mt_bf16>(&dg0, &du0, w.x * moe_low(d[x]), moe_low(g[x]),
                                        moe_low(u[x]));
            mt_swiglu_gradient<mt_bf16>(&dg1, &du1, w.y * moe_high(d[x]), moe_high(g[x]),
                                        moe_high(u[x]));
            a[x] = moe_pack(w.x * moe_low(a[x]), w.y * moe_high(a[x]));
            g[x] = moe_pack(dg0, dg1), u[x] = moe_pack(du0, du1);
        }
        dot[2 * y] = even, dot[2 * y + 1] = odd;
    }
    moe_give(address, g);
    moe_give(address + C::PART, u);
    moe_give(r.base + C::DOTS + (thread_now() / 32 - 4) * C::DOTS_BYTES + i * 512 + line * 32 +
                 (lane / 8 % 2 ^ line / 4 % 2) * 16,
             a);
}

/* The weighted SwiGLU of a warp's 32 x 16, two threads to a row. */
template <class C>
static __device__ __forceinline__ void moe_put_weighted(const moe_result<C> &r, int mi, int j)
{
    const uint32_t lane = thread_now() % 32, line = lane / 2;
    const uint32_t at = r.base + C::DOTS + (thread_now() / 32 - 4) * C::DOTS_BYTES + line * 32 +
                        (lane % 2 ^ line / 4 % 2) * 16;
    const int column = r.column(mi) + (int)(thread_now() / 32 % 4 * 16 + lane % 2 * 8);
    const int row = j * C::PIECE + (int)line;
    __nv_bfloat16 *to =
        (__nv_bfloat16 *)r.args->weighted + (int64_t)(r.row() + row) * r.args->m + column;
    if (!r.args->weighted) return;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (row + i * 16 < r.len())
            *(float4 *)(to + (int64_t)i * 16 * r.args->m) = shared_four(at + i * 512);
}

/* The sum over a warp's 16 columns of one row of a piece; eight threads have terms of each. */
static __device__ __forceinline__ float moe_fold_dots(const float (&dot)[2][4])
{
    const uint32_t lane = thread_now() % 32;
    float v[4], z[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool up = lane & 16;
        v[i] = (up ? dot[1][i] : dot[0][i]) + __shfl_xor_sync(~0u, up ? dot[0][i] : dot[1][i], 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool up = lane & 8;
        z[i] = (up ? v[2 + i] : v[i]) + __shfl_xor_sync(~0u, up ? v[i] : v[2 + i], 8);
    }
    const bool up = lane & 4;
    return (up ? z[1] : z[0]) + __shfl_xor_sync(~0u, up ? z[0] : z[1], 4);
}

/* Of a warp's sums of the tile's rows: a line for each warp. */
template <class C>
static __device__ __forceinline__ uint32_t moe_sum_at(const moe_result<C> &r, uint32_t warp,
                                                      uint32_t row)
{
    return r.base + C::SUMS + ((r.group() * 4 + warp) * C::WIDTH + row) * 4;
}
template <class C>
static __device__ __forceinline__ void moe_add_sum(const moe_result<C> &r, float sum, int mi, int j)
{
    const uint32_t lane = thread_now() % 32;
    const uint32_t row = lane / 16 * 16 + lane / 8 % 2 * 8 + lane % 4 * 2 + lane / 4 % 2;
    const uint32_t at = moe_sum_at(r, thread_now() % 128 / 32, j * C::PIECE + row);
    put_shared(at, mi ? __int_as_float(shared_now(at)) + sum : sum);
}
template <class C> static __device__ __forceinline__ void moe_put_sums(const moe_result<C> &r)
{
    const uint32_t row = thread_now() % 128;
    float sum = 0;
    barrier_threads(1 + r.group(), 128);
    if ((int)row >= r.len() || !r.args->dots) return;
#pragma unroll
    for (int w = 0; w < 4; w++) sum += __int_as_float(shared_now(moe_sum_at(r, w, row)));
    r.args->dots[r.row() + (int)row] = sum;
}

/* As moe_store_ungated, by quarters. */
template <class C>
static __device__ __forceinline__ void moe_store_after(moe_result<C> &r,
                                                       float (&d)[C::BLOCKS_M][C::WIDTH / 2])
{
    enum { ROW = C::WIDTH / 4, ALL = C::BLOCKS_M * ROW, PART = ALL / 4, AT_ONCE = PART / 8 };
    static_assert((int)PART == (int)ROW, "a quarter is 64 rows of W");
    uint32_t sum[ALL];
#pragma unroll
    for (int i = 0; i < ALL / 4; i++)
        moe_rounded(sum + i * 4, &d[i * 4 / ROW][i * 8 % (2 * ROW)], moe_factor<C, true>(r), 0, 0);
#pragma unroll
    for (int i = 0; i < ALL; i++) asm volatile("" : "+r"(sum[i])); /* now, not when they are used */
    asm volatile("cp.async.wait_all;" ::: "memory");
    barrier_threads(1 + r.group(), 128);
#pragma unroll 1
    for (int mi = 0; mi < C::BLOCKS_M; mi++) {
        const int len = r.len();
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            float dot[2][4];
            if (r.column(mi) >= r.args->m || j * C::PIECE >= len) continue;
            barrier_wait(r.old(r.buffer), r.parity);
            const uint32_t to = r.address(r.buffer);
#pragma unroll
            for (int i = 0; i < C::PIECE / 16; i++)
                moe_put_after<C>(to + moe_place(i), r, sum + j * 8 + i * 4, i, j, dot[i]);
            shared_to_copies();
            __syncwarp();
            if (thread_now() % 32 == 0) barrier_arrive(r.written());
            moe_put_weighted(r, mi, j);
            moe_add_sum(r, moe_fold_dots(dot), mi, j);
            __syncwarp();
            r.next();
        }
#pragma unroll
        for (int i = 0; i < ALL - PART; i++) sum[i] = sum[i + PART];
    }
    moe_put_sums(r);
}

/* As moe_help, one thread for both warpgroups, which have every other tile. */
template <class C>
static __device__ __forceinline__ void
moe_help_both(uint8_t *shared, uint32_t base, const gemm_sm90_maps &maps, const gemm_sm90_args &a,
              sm90_order<C> order, int cn)
{
    int4 *places = (int4 *)(shared + C::PLACES);
    int b[2] = { 0, 0 }, pieces[2] = { 0, 0 };
    uint32_t parity[2] = { 1, 1 };
    auto store = [&](auto group) __attribute__((always_inline))
    {
        constexpr int G = decltype(group)::value;
        const uint32_t from = base + C::PIECES + (G * C::BUFFERS + b[G]) * C::BUFFER;
        const int4 p = places[G * C::BUFFERS + b[G]];
        barrier_wait(base + C::WRITTEN + (G * C::BUFFERS + b[G]) * 8, parity[G]);
        copy_out_ragged(&maps.d, from, p.x, p.y, p.z, p.w);
        copy_out_ragged(&maps.d, from + C::PART, a.m + p.x, p.y, p.z, p.w);
        copies_commit();
    };
    auto next = [&](auto group) __attribute__((always_inline))
    {
        constexpr int G = decltype(group)::value;
        if (++b[G] == C::BUFFERS) b[G] = 0, parity[G] ^= 1;
    };
    auto bring = [&](auto group, int m, const sm90_tile &t, int row) __attribute__((always_inline))
    {
        constexpr int G = decltype(group)::value;
        if (pieces[G] >= C::BUFFERS) {
            store(group);
            copies_read<0>();
        }
        const uint32_t to = base + C::PIECES + (G * C::BUFFERS + b[G]) * C::BUFFER;
        const uint32_t bar = base + C::OLD + (G * C::BUFFERS + b[G]) * 8;
        barrier_expect(bar, 2 * C::PART);
        copy_in_ragged<false>(to, &maps.c, bar, m, t.row + t.len, t.len, row, 0);
        copy_in_ragged<false>(to + C::PART, &maps.c, bar, a.m + m, t.row + t.len, t.len, row, 0);
        places[G * C::BUFFERS + b[G]] = make_int4(m, t.row + t.len, t.len, row);
        pieces[G]++;
        next(group);
    };
    auto finish = [&](auto group) __attribute__((always_inline))
    {
        constexpr int G = decltype(group)::value;
        if (pieces[G] < C::BUFFERS) b[G] = 0, parity[G] = 0;
        for (int left = min(pieces[G], (int)C::BUFFERS); left > 0; left--) {
            store(group);
            next(group);
        }
    };
    const std::integral_constant<int, 0> first;
    const std::integral_constant<int, 1> second;
    sm90_tile t;
    for (int tile = 0; order.next(&t, a, 0, cn); tile++)
        for (int mi = 0; mi < C::BLOCKS_M && t.m0 + mi * 64 < a.m; mi++)
            for (int row = 0; row < t.len; row += C::PIECE) {
                if (tile % 2 == 0)
                    bring(first, t.m0 + mi * 64, t, row);
                else
                    bring(second, t.m0 + mi * 64, t, row);
            }
    finish(first);
    finish(second);
    copies_done<0>();
}
