/* The producer of the Hopper GEMM of an expert layer: rows are gathered line by line. */
#pragma once

#include "kernels/cuda/gemm_sm90_kernel.cuh"

/* Asks for 16 bytes, or zeros where there are none. AHEAD: the L2 takes the line after this one,
 * too. */
template <bool AHEAD>
static __device__ __forceinline__ void copy_line(uint32_t to, const void *from, bool there)
{
    if (AHEAD)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(there ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(there ? 16 : 0)
                     : "memory");
}
/* The thread's arrival, made when all that it has asked for is there. */
static __device__ __forceinline__ void lines_arrive(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

/* from + line * pitch bytes, made here: the compiler may not make it anew at each use. */
static __device__ __forceinline__ const uint8_t *line_at(uint32_t line, uint32_t pitch,
                                                         const void *from)
{
    const uint8_t *at;
    asm volatile("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(line), "r"(pitch), "l"(from));
    return at;
}

/* Eight threads bring a line of 128 bytes. What a copy takes is made before the wait for its stage:
 * what counts is how long a warp needs from there to its last. */
static __device__ __forceinline__ int moe_line()
{
    return (int)thread_now() / 8;
}
static __device__ __forceinline__ int moe_chunk()
{
    return (int)thread_now() % 8;
}
/* Of a thread's first 16 bytes in a box. */
static __device__ __forceinline__ uint32_t moe_line_place()
{
    return anew(moe_line() * 128 + (moe_chunk() ^ moe_line() % 8) * 16);
}

/* TN: rows of X are lines, whose places are looked up once for a tile. Lines past the tile's rows
 * repeat its last: what is made of them is not stored. */
template <class C> struct moe_rows {
    enum { LINES = C::GATHERERS / 8, EACH = C::WIDTH / LINES };
    const uint32_t place = moe_line_place();
    const uint8_t *at[EACH];
    int lines, depth; /* left from a thread's first on */

    __device__ __forceinline__ void begin(const gemm_sm90_args &a, const sm90_tile &t, int end)
    {
        const int first = t.row + moe_line(), last = min(t.row + t.len, end) - 1;
        const uint8_t *from = line_at(moe_chunk(), 16, a.gathered);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            at[i] = line_at(a.row_token[min(first + i * LINES, last)], a.k * 2, from);
        lines = t.n - moe_line(), depth = a.k - moe_chunk() * 8;
    }
    __device__ __forceinline__ void bring(uint32_t q) const
    {
        const int n = depth > 0 ? lines : 0;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            copy_line<C::AFTER>(q + place + i * LINES * 128, at[i], i * LINES < n);
    }
    __device__ __forceinline__ void next()
    {
#pragma unroll
        for (int i = 0; i < EACH; i++) at[i] += 128;
        depth -= 64;
    }
};

/* NT: a step has the lines of 64 rows, in boxes of 64 columns. The tokens of the step after the
 * next are asked for as the next one's lines are found. */
template <class C> struct moe_depth {
    enum { LINES = C::GATHERERS / 8, EACH = 64 / LINES };
    const uint32_t place = moe_line_place();
    const uint8_t *at[EACH], *from;
    const int32_t *row;
    uint32_t token[EACH] = {}, pitch;
    int rows, columns; /* left from a thread's first on, at the step whose lines `at` has */

    __device__ __forceinline__ void look()
    {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (i * LINES + 64 < rows) token[i] = row[i * LINES];
        row += 64;
    }
    __device__ __forceinline__ void begin(const gemm_sm90_args &a, const sm90_tile &t, int end)
    {
        row = a.row_token + t.row + moe_line(), pitch = a.n * 2;
        from = line_at(moe_chunk(), 16, (const __nv_bfloat16 *)a.gathered + t.n0);
        rows = end - t.row - moe_line() + 64, columns = t.len - moe_chunk() * 8;
        look();
        next();
    }
    __device__ __forceinline__ void bring(uint32_t q) const
    {
#pragma unroll
        for (int b = 0; b < C::WIDTH / 64; b++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
                copy_line<C::TURNED>(q + place + b * 8192 + i * LINES * 128, at[i] + b * 128,
                                     i * LINES < rows && b * 64 < columns);
    }
    __device__ __forceinline__ void next()
    {
#pragma unroll
        for (int i = 0; i < EACH; i++) at[i] = line_at(token[i], pitch, from);
        rows -= 64;
        look();
    }
};

/* This block's part of P. TN, which is gated: of each 128 rows, 64 of the gate and 64 of up. */
template <class C>
static __device__ __forceinline__ void
moe_bring_p(uint32_t to, const gemm_sm90_maps &maps, const gemm_sm90_args &a, uint32_t bar,
            const sm90_tile &t, int step, int end, int cn, uint16_t blocks)
{
    constexpr bool SHARED = C::CLUSTER_N > 1;
    constexpr int PART = C::TILE / 64 / C::CLUSTER_N;
    if constexpr (C::WGRAD) {
        sm90_bring_p<C>(to, maps, bar, t, step, end, cn, blocks);
    } else {
#pragma unroll
        for (int i = 0; i < PART; i++) {
            const int b = cn * PART + i;
            copy_in<SHARED>(to + b * 8192, &maps.p, bar, step * 64,
                            t.m0 / 2 + b / 2 * 64 + b % 2 * (a.m / 2), t.member, blocks);
        }
    }
}

/* P and the descriptions of tiles, where P has a ring of its own. */
template <class C>
static __device__ __forceinline__ void
moe_produce_p(uint8_t *shared, uint32_t base, const gemm_sm90_maps &maps, const gemm_sm90_args &a,
              sm90_order<C> order, int cn)
{
    int slot = 0;
    uint32_t parity = 1;
    sm90_tile t;
    for (int tile = 0; order.next(&t, a, 0, cn); tile++) {
        sm90_describe<C>(shared, tile, t, t.m0 < a.m ? t.n : 0, t.rest);
        for (int step = 0; step < t.whole; step++) {
            const uint32_t full = base + C::SPLIT_FULL + slot * 8;
            barrier_wait(base + C::SPLIT_EMPTY + slot * 8, parity);
            barrier_expect(full, C::P_BYTES);
            sm90_bring_p<C>(base + slot * C::P_BYTES, maps, full, t, step, 0, cn,
                            (uint16_t)((1 << C::CLUSTER_N) - 1));
            if (++slot == C::SPLIT) slot = 0, parity ^= 1;
        }
    }
}

/* Who brings P and describes tiles. All warps elect: where only one did, what follows would not be
 * uniform to the compiler. */
template <class C> static __device__ __forceinline__ bool moe_leads()
{
    return !C::SPLIT && (!C::GATHERS || (elected() && threadIdx.x < 32));
}

/* As sm90_produce, by GATHERERS threads where rows are gathered, else by one. P comes last: its
 * boxes are sooner there than lines. With SPLIT its ring lies before the stages. */
template <class C>
static __device__ __forceinline__ void
moe_produce(uint8_t *shared, uint32_t base, const gemm_sm90_maps &maps, const gemm_sm90_args &a,
            sm90_order<C> order, int cn)
{
    typedef typename std::conditional<C::WGRAD, moe_depth<C>, moe_rows<C>>::type gathered;
    const uint16_t row = (uint16_t)((1 << C::CLUSTER_N) - 1);
    if (!C::GATHERS && threadIdx.x > 0) return;
    if constexpr (C::SPLIT > 0) {
        if (threadIdx.x == C::GATHERERS) moe_produce_p<C>(shared, base, maps, a, order, cn);
        if (threadIdx.x >= C::GATHERERS) return;
    }
    gathered lines;
    int stage = 0;
    uint32_t parity = 1;
    sm90_tile t;
    for (int tile = 0; order.next(&t, a, 0, cn); tile++) {
        if (moe_leads<C>()) sm90_describe<C>(shared, tile, t, t.m0 < a.m ? t.n : 0, t.rest);
        const int end = order.start[t.member + 1], steps = t.whole + (t.rest > 0);
        if (C::GATHERS) lines.begin(a, t, end);
        int boxes = (t.n + C::BOX_Q - 1) / C::BOX_Q;
        uint32_t bytes = C::P_BYTES + (C::GATHERS ? 0 : boxes * (C::BOX_Q * 128));
        for (int step = 0; step < steps; step++) {
            uint32_t p = base + stage * C::STAGE, full = base + C::FULL + stage * 8;
            barrier_wait(base + C::EMPTY + stage * 8, parity);
            if constexpr (C::GATHERS) {
                lines.bring(p + (C::SPLIT ? C::SPLIT : 1) * C::P_BYTES);
                lines_arrive(full);
            }
            if (moe_leads<C>()) {
                barrier_expect(full, bytes);
                moe_bring_p<C>(p, maps, a, full, t, step, end, cn, row);
                if constexpr (!C::GATHERS)
                    sm90_bring_q<C>(p + C::P_BYTES, maps, full, t, step, end, 0, 1);
            }
            if constexpr (C::GATHERS) lines.next();
            if (++stage == C::STAGES) stage = 0, parity ^= 1;
        }
    }
}
