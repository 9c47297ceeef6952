/* The multiplying warpgroups of the Hopper GEMM: sums in registers, tile by tile. Included by
 * gemm_sm90_kernel.cuh. */
#pragma once

/* Lines that threads brought are seen by the tensor cores from here on. */
template <class C> static __device__ __forceinline__ void sm90_begin_wgmma()
{
    if (sm90_beside<C>::GATHERS) shared_to_copies();
    wgmma_fence();
}

/* A warpgroup that multiplies, and where it is: its stage, its tile, its sums. */
template <class C> struct sm90_consumer {
    /* The low words of descriptors: addresses, and the distance of 64-wide blocks for operands
     * across the depth. The high word is the same for all: 1024 bytes between groups of eight
     * 128-byte lines, whose parts are exchanged. */
    static constexpr uint32_t HIGH = (1024u >> 4) | 1u << 30;
    static constexpr uint32_t APART_P = (C::ACROSS_P ? 512u : 1u) << 16,
                              APART_Q = (C::ACROSS_Q ? 512u : 1u) << 16;
    enum { STEP_P = C::ACROSS_P ? 128 : 2, STEP_Q = C::ACROSS_Q ? 128 : 2 }; /* of 16 deep */

    uint32_t base;
    const gemm_sm90_args &args;
    int cm, cn; /* the block's place in its cluster */
    /* All that wgmma's descriptors are made of is to be in uniform registers, or each of them takes
     * four instructions more. The compiler sees that a reduction's result is the same for a warp,
     * and, at a fence, that the warp is together after what some of its threads did. */
    int mine; /* PINGPONG: the warpgroup's number */
    int tile; /* of the block */
    typename sm90_beside<C>::result result;
    float d[C::BLOCKS_M][C::WIDTH / 2];
    int stage = 0, lane = 0;
    uint32_t parity = 0, p0 = 0, q0 = 0;
    int n = 0, whole = 0, rest = 0; /* of the tile */
    uint32_t told = 0;              /* fp8: whom this lane tells, found once */

    __device__ __forceinline__ sm90_consumer(uint32_t base_, const gemm_sm90_maps &maps,
                                             const gemm_sm90_args &a, int cm_, int cn_)
        : base(base_), args(a), cm(cm_), cn(cn_), result{ base_, &maps, &a, 0, 0, 0, {} }
    {
        if (!C::FRESH) zeros();
        mine = C::PINGPONG ? (int)__reduce_max_sync(~0u, (uint32_t)result.group()) : 0;
        tile = mine;
    }

    /* FRESH, for each tile: what has been stored of the one before leaves its registers to the work
     * on the rest. */
    __device__ __forceinline__ void zeros()
    {
#pragma unroll
        for (int mi = 0; mi < C::BLOCKS_M; mi++)
#pragma unroll
            for (int i = 0; i < C::WIDTH / 2; i++)
                asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[mi][i]));
    }
    /* What is read of the sums is read after this. */
    __device__ __forceinline__ void settle(int mi)
    {
#pragma unroll
        for (int i = 0; i < C::WIDTH / 2; i++) asm volatile("" : "+f"(d[mi][i])::"memory");
    }

    /* Who brings into a stage that this warp has read: the blocks of the own row of the cluster,
     * then the rest of the column. */
    __device__ __forceinline__ uint32_t block_told() const
    {
        int up = lane - C::CLUSTER_N;
        return (uint32_t)(lane < C::CLUSTER_N ? cm * C::CLUSTER_N + lane
                                              : (up + (up >= cm)) * C::CLUSTER_N + cn);
    }
    /* SPLIT: of P, whose ring goes round twice while Q's does once. */
    __device__ __forceinline__ int p_slot(int s) const
    {
        return !C::SPLIT || s < C::SPLIT ? s : s - C::SPLIT;
    }
    __device__ __forceinline__ void release(int s)
    {
        if constexpr (C::SPLIT > 0) {
            if (lane == 0) barrier_arrive(base + C::EMPTY + s * 8);
            if (lane < C::CLUSTER_N)
                barrier_arrive_at(base + C::SPLIT_EMPTY + p_slot(s) * 8, (uint32_t)lane);
        } else if (C::CLUSTER == 1) {
            if (lane == 0) barrier_arrive(base + C::EMPTY + s * 8);
        } else if (C::FP8 && C::BLOCKS_M > 1) { /* both; whom a lane tells has no register */
            if (elected()) {
                barrier_arrive_at(base + C::EMPTY + s * 8, 0);
                barrier_arrive_at(base + C::EMPTY + s * 8, 1);
            }
        } else if (lane < C::CLUSTER_M + C::CLUSTER_N - 1) {
            barrier_arrive_at(base + C::EMPTY + s * 8, C::FP8 ? told : block_told());
        }
    }
    __device__ __forceinline__ void release_last()
    {
        release(stage == 0 ? C::STAGES - 1 : stage - 1);
    }
    __device__ __forceinline__ void wait_step() const
    {
        if constexpr (C::SPLIT > 0)
            barrier_wait(base + C::SPLIT_FULL + p_slot(stage) * 8, stage >= C::SPLIT);
        barrier_wait(base + C::FULL + stage * 8, parity);
    }
    __device__ __forceinline__ void advance()
    {
        if (++stage == C::STAGES) stage = 0, parity ^= 1;
    }

    /* PINGPONG: the other warpgroup goes on at this stage. It has a word of its own to read it
     * from: of the four warps here, some may not have read theirs. */
    __device__ __forceinline__ void hand_over() const
    {
        if (!C::PINGPONG || lane != 0) return;
        const int other = 1 - result.group();
        if (thread_now() / 32 % 4 == 0)
            asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(base + C::HAND + other * 8),
                         "r"(stage), "r"(parity)
                         : "memory");
        barrier_arrive(base + C::ORDER + other * 8);
    }
    __device__ __forceinline__ void take_over()
    {
        if (!C::PINGPONG) return;
        const int own = anew(mine);
        if (tile > 0) barrier_wait(base + C::ORDER + own * 8, (tile / 2 - (own == 0)) & 1);
        stage = shared_now(base + C::HAND + own * 8);
        parity = shared_now(base + C::HAND + own * 8 + 4);
    }

    /* Once the first step of the tile, or of the one after it, is there. The shuffles show the
     * compiler that these are uniform; else it serialises the wgmmas. */
    __device__ __forceinline__ void describe(int after)
    {
        n = __shfl_sync(~0u, result.word(0, after), 0);
        whole = __shfl_sync(~0u, result.word(6, after), 0);
        rest = __shfl_sync(~0u, result.word(7, after), 0);
    }
    /* Anew for each tile, so that no register holds it while sums are stored. */
    __device__ __forceinline__ void place()
    {
        const uint32_t at_p = anew(base) + (C::PINGPONG ? 0 : result.group() * C::BLOCKS_M * 8192);
        p0 = ((at_p & 0x3ffff) >> 4) | APART_P;
        /* the same for all of the warpgroup, shown to the compiler */
        if (!C::PINGPONG) p0 = __shfl_sync(~0u, p0, 0);
        const uint32_t at_q = anew(base) + (C::SPLIT ? (int)C::SPLIT : 1) * C::P_BYTES;
        q0 = ((at_q & 0x3ffff) >> 4) | APART_Q;
        lane = (int)(thread_now() % 32);
        if (C::FP8) told = anew(block_told());
    }

    /* What the tile's result needs, as soon as there is room for it. */
    __device__ __forceinline__ void begin_result()
    {
        result.tile = tile;
        if constexpr (C::AFTER) moe_ask_weights(result);
        if (!C::PLAIN && !C::BY_ROWS && !C::HELPED && args.add) {
            if (threadIdx.x % 128 == 0) {
                copies_read<0>();
#pragma unroll
                for (int x = 0; x < C::BUFFERS - 1; x++) result.load(x, x);
            }
            __syncwarp();
        }
    }
    __device__ __forceinline__ void begin_factor()
    {
        if (C::FACTOR && !C::TIMES)
            result.factor = args.factors ? result.own_factor() : make_float2(1, 0);
    }
    __device__ __forceinline__ void store_last()
    {
#pragma unroll
        for (int mi = 0; mi < C::BLOCKS_M; mi++) {
            settle(mi);
            sm90_store(result, d[mi], mi);
        }
    }
    /* A tile without columns: the block brings for others. */
    __device__ __forceinline__ void pass_over()
    {
        for (int step = 0; step < whole + (rest > 0); step++) {
            wait_step();
            __syncwarp();
            release(stage);
            advance();
        }
        hand_over();
    }
};

/* ---- bf16 --------------------------------------------------------------------------------------
 */

/* DEEP times 16 of a step's depth: a group of wgmmas, in a block of its own. */
template <int N, int DEEP, class C>
static __device__ __forceinline__ void sm90_multiply_some(sm90_consumer<C> &w, int mi, bool first)
{
    typedef sm90_consumer<C> W;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEEP; k++) {
        const int at = C::SPLIT ? w.p_slot(w.stage) * (C::P_BYTES >> 4) : w.stage * (C::STAGE >> 4);
        const uint32_t p = w.p0 + at + k * W::STEP_P + mi * 512;
        const uint32_t q = w.q0 + w.stage * (C::STAGE >> 4) + k * W::STEP_Q;
        wgmma<N, C::ACROSS_P, C::ACROSS_Q>(w.d[mi], (uint64_t)W::HIGH << 32 | p,
                                           (uint64_t)W::HIGH << 32 | q, !(first && k == 0));
    }
    wgmma_commit();
}

/* A step of 64 rows, or as much of it as there is. */
template <int N, class C>
static __device__ __forceinline__ void sm90_multiply_rows(sm90_consumer<C> &w, int mi, int step)
{
    if (!C::WGRAD || step < w.whole)
        sm90_multiply_some<N, 4>(w, mi, step == 0);
    else if (w.rest == 4)
        sm90_multiply_some<N, 4>(w, mi, step == 0);
    else if (w.rest == 3)
        sm90_multiply_some<N, 3>(w, mi, step == 0);
    else if (w.rest == 2)
        sm90_multiply_some<N, 2>(w, mi, step == 0);
    else
        sm90_multiply_some<N, 1>(w, mi, step == 0);
}

template <int N, class C> static __device__ __forceinline__ void sm90_multiply(sm90_consumer<C> &w)
{
    const int steps = w.whole + (C::WGRAD && w.rest > 0);
    for (int step = 0; step < steps; step++) {
        w.wait_step();
        sm90_begin_wgmma<C>();
        sm90_multiply_rows<N>(w, 0, step); /* in a loop, NT's wgmmas are serialised */
        if constexpr (C::BLOCKS_M > 1) sm90_multiply_rows<N>(w, 1, step);
#pragma unroll
        for (int mi = 2; mi < C::BLOCKS_M; mi++) sm90_multiply_rows<N>(w, mi, step);
        wgmma_wait<C::BLOCKS_M>();
        if (step > 0) w.release_last();
        w.advance();
    }
    w.hand_over();
    if constexpr (C::TIMES) w.result.factor = w.result.own_factor();
    wgmma_wait<0>();
    w.release_last();
}

#include "kernels/cuda/gemm_sm90_codes.cuh"

/* ---- tile by tile ------------------------------------------------------------------------------
 */

/* By instructions as wide as the tile, at most N. */
template <int N, class C>
static __device__ __forceinline__ void sm90_multiply_tile(sm90_consumer<C> &w)
{
    if constexpr (N > C::GRAIN)
        if (w.n != N) {
            sm90_multiply_tile<N - C::GRAIN>(w);
            return;
        }
    if constexpr (C::FP8)
        sm90_multiply_codes<N>(w);
    else
        sm90_multiply<N>(w);
}

template <class C>
static __device__ __forceinline__ void sm90_consume(uint32_t base, const gemm_sm90_maps &maps,
                                                    const gemm_sm90_args &a, int cm, int cn)
{
    sm90_consumer<C> w(base, maps, a, cm, cn);
#pragma unroll 1
    for (; sm90_has_tile<C>(base, a, w.tile); w.tile += C::PINGPONG ? 2 : 1) {
        if (!C::AHEAD) w.result.tile = w.tile;
        if (C::FRESH) w.zeros();
        w.take_over();
        w.place();
        w.wait_step();
        w.describe(C::AHEAD && w.tile > 0);
        if (!C::AHEAD && w.n == 0) {
            w.pass_over();
            continue;
        }
        if (!C::AHEAD) {
            w.begin_result();
            w.begin_factor();
        }
        sm90_multiply_tile<C::WIDTH>(w);
        if (!C::AHEAD) {
#pragma unroll
            for (int mi = 0; mi < C::BLOCKS_M; mi++) w.settle(mi);
            sm90_store_tile(w.result, w.d);
            wgmma_fence();
        }
    }
    if (C::AHEAD && w.tile > 0) w.store_last();
    if (threadIdx.x % C::STORES == 0) copies_done<0>();
}
