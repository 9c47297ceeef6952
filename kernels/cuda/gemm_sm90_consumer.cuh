/* The multiplying warpgroups of the Hopper GEMM: sums in registers, then the result in pieces of 8
 * KB through shared memory: 64 x 64 of bf16, or 64 x 32 of f32. Included by gemm_sm90_kernel.cuh.
 */
#pragma once

#include "kernels/cuda/gemm_sm90_codes.cuh"

/* What is made of the sums on their way: whatever the arguments say, or nothing but bf16 or f32 of
 * them (C::FACTOR: of their product with the factor), known beforehand. */
enum sm90_stored { SM90_AS_ASKED, SM90_HALF, SM90_REAL };

/* 64 rows of the tile's result: each piece is written to a buffer in the copies' order (128-byte
 * lines, their 16-byte parts exchanged), and stored while the next is written; the next buffer is
 * free, or is waited for where there is but one. C comes into the same buffer first, as many
 * pieces ahead as there are other buffers. */
template <class C, int STORED>
static __device__ __forceinline__ void sm90_store_as(sm90_result<C> &r, float (&d)[C::WIDTH / 2],
                                                     int mi)
{
    constexpr bool ANY = STORED == SM90_AS_ASKED;
    const bool add = ANY && r.args->add;
    const bool pairs = ANY ? r.pairs() : C::WGRAD && STORED == SM90_HALF;
    const uint32_t thread = thread_now() % 128, lane = thread % 32, warp = thread / 32;
    const int len = r.len();
    const float2 *alpha = ANY ? r.args->alpha : nullptr;
    constexpr bool WHOLE = C::FP8 && C::FACTOR && STORED == SM90_HALF;
    sm90_factor by = { ANY ? alpha != nullptr : (bool)C::FACTOR,
                       WHOLE ? sm90_whole(r.factor) : r.factor.x, r.factor.y, C::FP8 && !ANY,
                       WHOLE };
    if (ANY && alpha) by.first = alpha[r.member()].x, by.second = alpha[r.member()].y;
    float bias0 = 0, bias1 = 0;
    if (ANY && C::LAYOUT == MT_GEMM_TN && r.args->bias) {
        int m = r.m(mi) + warp * 16 + lane / 4;
        const float *bias = r.args->bias + (int64_t)r.member() * r.args->m + m;
        if (m < r.args->m) bias0 = bias[0];
        if (m + 8 < r.args->m) bias1 = bias[8];
    }
    int x = add ? mi * r.across() : 0;
#pragma unroll
    for (int j = 0; j < (C::WIDTH + C::PIECE - 1) / C::PIECE; j++) {
        if (j * C::PIECE >= len) continue;
        const bool begins = !pairs || j % 2 == 0,
                   ends = !pairs || j % 2 || (j + 1) * C::PIECE >= len;
        if (begins && add) barrier_wait(r.old(r.buffer), r.parity);
        if (C::BUFFERS == 1 && begins) {
            if (thread == 0) copies_read<0>();
            barrier_threads(1 + r.group(), 128);
        }
        const uint32_t to = r.address(r.buffer);
        if (C::TURNED) {
            sm90_put_turned(to, &d[j * 16], ANY ? pairs : STORED == SM90_HALF, j % 2, add, by);
        } else if (C::WGRAD) {
            sm90_put_wgrad(to, &d[j * 16], ANY ? pairs : STORED == SM90_HALF, j % 2 * 4, add, by);
        } else {
#pragma unroll
            for (int i = 0; i < 4 && j * 64 + i * 16 < C::WIDTH; i++) {
                uint32_t line = i * 16 + lane / 16 * 8 + lane % 8;
                uint32_t part = (warp * 2 + lane / 8 % 2) ^ (lane % 8);
                sm90_put_bf16<true>(to + line * 128 + part * 16, &d[j * 32 + i * 8], add, by, bias0,
                                    bias1);
            }
        }
        if (!ends) continue;
        shared_to_copies();
        if (C::BUFFERS > 1 && !add && thread == 0) copies_read<C::BUFFERS - 2>();
        barrier_threads(1 + r.group(), 128);
        if (thread == 0) {
            r.store(mi, (pairs ? j / 2 * 2 : j) * C::PIECE);
            if (add) {
                copies_read<1>(); /* the buffer of the piece before */
                r.load(x + C::BUFFERS - 1, C::BUFFERS - 1);
            }
        }
        x++;
        r.next();
    }
}

/* Whether the block has so many tiles; the last of the units before members is the sum of all. */
template <class C>
static __device__ __forceinline__ bool sm90_has_tile(uint32_t base, const gemm_sm90_args &a,
                                                     int tile)
{
    const int first = blockIdx.x / C::CLUSTER, step = gridDim.x / C::CLUSTER;
    const uint32_t last = base + C::TABLE + ((uint32_t)a.rows.members * 2 + 1) * sizeof(int);
    return first + tile * step < shared_now(last);
}

/* CARRIED: whether tiles are, for all of a launch: bf16 to which nothing is added. */
template <class C> static __device__ __forceinline__ bool sm90_carries(const gemm_sm90_args &a)
{
    return C::BY_ROWS || C::PLAIN || (a.half && !a.add && !a.bias && C::FACTOR == !!a.alpha);
}

/* 64 rows of a tile, all of whose rows the buffers hold, written for sm90_carry. */
template <class C>
static __device__ __forceinline__ void sm90_write(sm90_result<C> &r, float (&d)[C::WIDTH / 2],
                                                  int mi)
{
    static_assert(C::WIDTH / 64 * C::BLOCKS_M <= (int)C::BUFFERS,
                  "a warpgroup's rows of a tile have room");
    const sm90_factor by = { (bool)C::FACTOR, C::FACTOR ? sm90_whole(r.factor) : 1, 0, true, true };
    const int len = r.m(mi) < r.rows() ? r.len() : 0, first = mi * (C::WIDTH / 64);
    if (mi == 0 && r.tile > 0) barrier_wait(r.base + C::TAKEN + r.group() * 8, (r.tile - 1) & 1);
#pragma unroll
    for (int j = 0; j < C::WIDTH / C::PIECE; j++)
        if (j * C::PIECE >= len)
            continue;
        else if (C::TURNED)
            sm90_put_turned(r.address(first + j / 2), &d[j * 16], true, j % 2, false, by);
        else
            sm90_put_wgrad(r.address(first + j / 2), &d[j * 16], true, j % 2 * 4, false, by);
    if (mi + 1 < C::BLOCKS_M) return;
    shared_to_copies();
    __syncwarp();
    if (thread_now() % 32 == 0) barrier_arrive(r.base + C::WRITTEN + r.group() * 8);
}

/* A thread of the producer's warpgroup stores what each warpgroup has written, tile by tile, so
 * that these neither wait for their own four warps nor issue copies. */
template <class C>
static __device__ __forceinline__ void sm90_carry(uint32_t base, const gemm_sm90_maps &maps,
                                                  const gemm_sm90_args &a)
{
    if (!sm90_carries<C>(a)) return;
    for (int tile = 0; sm90_has_tile<C>(base, a, tile); tile++) {
        const uint32_t told = base + C::TILES + tile % C::RING * C::TILE_BYTES;
#pragma unroll 1
        for (int g = 0; g < C::WARPGROUPS; g++) {
            barrier_wait(base + C::WRITTEN + g * 8, tile & 1);
            const int len = shared_now(told + 4), row = shared_now(told + 8),
                      m0 = shared_now(told + 12) + g * C::BLOCKS_M * 64,
                      member = shared_now(told + 16), n0 = shared_now(told + 20);
            const int end = C::BY_ROWS ? shared_now(base + C::TABLE + (member + 1) * 4) : 0;
            const int rows = C::BY_ROWS ? end - row : a.m;
            const uint32_t from = base + C::PIECES + g * C::BUFFERS * C::BUFFER;
            for (int x = 0; x < C::BLOCKS_M * (C::WIDTH / 64); x++) {
                const int j = x % (C::WIDTH / 64), m = m0 + x / (C::WIDTH / 64) * 64;
                if (m >= rows || j * 64 >= len) continue;
                if (C::BY_ROWS)
                    copy_out_ragged(&maps.d, from + x * C::BUFFER, n0 + j * 64, end, rows, m);
                else if (C::TURNED)
                    copy_out(&maps.d, from + x * C::BUFFER, m, n0 + j * 64, member);
                else
                    copy_out(&maps.d, from + x * C::BUFFER, n0 + j * 64, m, member);
            }
            copies_commit();
            copies_read<0>();
            barrier_arrive(base + C::TAKEN + g * 8);
        }
    }
    copies_done<0>();
}

template <class C>
static __device__ __forceinline__ void sm90_store(sm90_result<C> &r, float (&d)[C::WIDTH / 2],
                                                  int mi)
{
    if constexpr (C::LEVELED) sm90_apply_levels<C>(r.base, r.tile, d);
    if constexpr (C::CARRIED)
        if (sm90_carries<C>(*r.args)) {
            sm90_write(r, d, mi);
            return;
        }
    if constexpr (!C::BY_ROWS) {
        if (r.m(mi) >= r.rows()) return;
        const bool plain = C::PLAIN ||
                           (sm90_beside<C>::GATHERS && !r.args->add && !r.args->alpha) ||
                           ((C::FP8 || C::FACTOR) && !r.args->add && !r.args->bias &&
                            C::FACTOR == !!r.args->alpha);
        if (!plain)
            sm90_store_as<C, SM90_AS_ASKED>(r, d, mi);
        else if (C::WGRAD && !r.args->half)
            sm90_store_as<C, C::WGRAD ? SM90_REAL : SM90_HALF>(r, d, mi);
        else if constexpr (!C::CARRIED)
            sm90_store_as<C, SM90_HALF>(r, d, mi);
    }
}

template <class C>
static __device__ __forceinline__ void sm90_store_tile(sm90_result<C> &r,
                                                       float (&d)[C::BLOCKS_M][C::WIDTH / 2])
{
#pragma unroll
    for (int mi = 0; mi < C::BLOCKS_M; mi++) sm90_store(r, d[mi], mi);
}

/* Lines that threads brought are seen by the tensor cores from here on. */
template <class C> static __device__ __forceinline__ void sm90_begin_wgmma()
{
    if (sm90_beside<C>::GATHERS) shared_to_copies();
    wgmma_fence();
}

/* A member's factor, asked for where this stands: before the last products are waited for. */
static __device__ __forceinline__ float2 sm90_ask_factor(const float2 *alpha)
{
    float2 by;
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(by.x), "=f"(by.y) : "l"(alpha));
    return by;
}

template <class C>
static __device__ __forceinline__ void sm90_consume(uint32_t base, const gemm_sm90_maps &maps,
                                                    const gemm_sm90_args &a, int cm, int cn)
{
    /* The low words of descriptors: addresses, and the distance of 64-wide blocks for operands
     * across the depth. The high word is the same for all: 1024 bytes between groups of eight
     * 128-byte lines, whose parts are exchanged. */
    constexpr uint32_t HIGH = (1024u >> 4) | 1u << 30;
    constexpr uint32_t APART_P = (C::ACROSS_P ? 512u : 1u) << 16,
                       APART_Q = (C::ACROSS_Q ? 512u : 1u) << 16;
    constexpr int STEP_P = C::ACROSS_P ? 128 : 2, STEP_Q = C::ACROSS_Q ? 128 : 2; /* of 16 deep */
    float d[C::BLOCKS_M][C::WIDTH / 2];
    /* FRESH, for each tile: what has been stored of the one before leaves its registers to the work
     * on the rest. */
    auto zeros = [&]() __attribute__((always_inline))
    {
#pragma unroll
        for (int mi = 0; mi < C::BLOCKS_M; mi++)
#pragma unroll
            for (int i = 0; i < C::WIDTH / 2; i++)
                asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[mi][i]));
    };
    if (!C::FRESH) zeros();
    typename sm90_beside<C>::result result = { base, &maps, &a, 0, 0, 0, {} };
    int stage = 0, lane = 0;
    uint32_t parity = 0, p0 = 0, q0 = 0;
    int n = 0, whole = 0, rest = 0; /* of the tile */
    uint32_t told = 0;              /* fp8: whom this lane tells, found once */

    /* Tells who brings into this stage that this warp has read it: the blocks of the own row of the
     * cluster, then the rest of the column. */
    auto block_told = [&]() __attribute__((always_inline))
    {
        int up = lane - C::CLUSTER_N;
        return (uint32_t)(lane < C::CLUSTER_N ? cm * C::CLUSTER_N + lane
                                              : (up + (up >= cm)) * C::CLUSTER_N + cn);
    };
    /* SPLIT: of P, whose ring goes round twice while Q's does once. */
    auto p_slot = [&](int s) __attribute__((always_inline))
    {
        return !C::SPLIT || s < C::SPLIT ? s : s - C::SPLIT;
    };
    auto release = [&](int s) __attribute__((always_inline))
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
    };
    auto release_last = [&]() __attribute__((always_inline))
    {
        release(stage == 0 ? C::STAGES - 1 : stage - 1);
    };
    auto advance = [&]() __attribute__((always_inline))
    {
        if (++stage == C::STAGES) stage = 0, parity ^= 1;
    };
    /* The other warpgroup goes on at this stage. It has a word of its own to read it from: of the
     * four warps here, some may not have read theirs. */
    auto hand_over = [&]() __attribute__((always_inline))
    {
        if (!C::PINGPONG || lane != 0) return;
        const int other = 1 - result.group();
        if (thread_now() / 32 % 4 == 0)
            asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(base + C::HAND + other * 8),
                         "r"(stage), "r"(parity)
                         : "memory");
        barrier_arrive(base + C::ORDER + other * 8);
    };
    /* Once the first step of the tile, or of the one after it, is there. The shuffles show the
     * compiler that these are uniform; else it serialises the wgmmas. */
    auto describe = [&](int after) __attribute__((always_inline))
    {
        n = __shfl_sync(~0u, result.word(0, after), 0);
        whole = __shfl_sync(~0u, result.word(6, after), 0);
        rest = __shfl_sync(~0u, result.word(7, after), 0);
    };
    auto wait_step = [&]() __attribute__((always_inline))
    {
        if constexpr (C::SPLIT > 0)
            barrier_wait(base + C::SPLIT_FULL + p_slot(stage) * 8, stage >= C::SPLIT);
        barrier_wait(base + C::FULL + stage * 8, parity);
    };
    /* Anew for each tile, so that no register holds it while sums are stored. */
    auto place = [&]() __attribute__((always_inline))
    {
        const uint32_t at_p = anew(base) + (C::PINGPONG ? 0 : result.group() * C::BLOCKS_M * 8192);
        p0 = ((at_p & 0x3ffff) >> 4) | APART_P;
        /* the same for all of the warpgroup, shown to the compiler */
        if (!C::PINGPONG) p0 = __shfl_sync(~0u, p0, 0);
        const uint32_t at_q = anew(base) + (C::SPLIT ? (int)C::SPLIT : 1) * C::P_BYTES;
        q0 = ((at_q & 0x3ffff) >> 4) | APART_Q;
        lane = (int)(thread_now() % 32);
        if (C::FP8) told = anew(block_told());
    };
    auto deep16 = [&](auto width, int mi, int k, bool first) __attribute__((always_inline))
    {
        const int at = C::SPLIT ? p_slot(stage) * (C::P_BYTES >> 4) : stage * (C::STAGE >> 4);
        const uint32_t p = p0 + at + k * STEP_P + mi * 512;
        const uint32_t q = q0 + stage * (C::STAGE >> 4) + k * STEP_Q;
        wgmma<decltype(width)::value, C::ACROSS_P, C::ACROSS_Q>(d[mi], (uint64_t)HIGH << 32 | p,
                                                                (uint64_t)HIGH << 32 | q, !first);
    };
    /* A step of 64 rows, or as much of it as there is: a group of wgmmas, in a block of its own. */
    auto multiply_some = [&](auto width, auto deep, int mi, bool first)
        __attribute__((always_inline))
    {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < decltype(deep)::value; k++) deep16(width, mi, k, first && k == 0);
        wgmma_commit();
    };
    auto multiply_rows = [&](auto width, int mi, int step) __attribute__((always_inline))
    {
        if (!C::WGRAD || step < whole)
            multiply_some(width, std::integral_constant<int, 4>(), mi, step == 0);
        else if (rest == 4)
            multiply_some(width, std::integral_constant<int, 4>(), mi, step == 0);
        else if (rest == 3)
            multiply_some(width, std::integral_constant<int, 3>(), mi, step == 0);
        else if (rest == 2)
            multiply_some(width, std::integral_constant<int, 2>(), mi, step == 0);
        else
            multiply_some(width, std::integral_constant<int, 1>(), mi, step == 0);
    };
    auto multiply = [&](auto width) __attribute__((always_inline))
    {
        const int steps = whole + (C::WGRAD && rest > 0);
        for (int step = 0; step < steps; step++) {
            wait_step();
            sm90_begin_wgmma<C>();
            multiply_rows(width, 0, step); /* in a loop, NT's wgmmas are serialised */
            if constexpr (C::BLOCKS_M > 1) multiply_rows(width, 1, step);
#pragma unroll
            for (int mi = 2; mi < C::BLOCKS_M; mi++) multiply_rows(width, mi, step);
            wgmma_wait<C::BLOCKS_M>();
            if (step > 0) release_last();
            advance();
        }
        hand_over();
        if constexpr (C::TIMES) result.factor = sm90_ask_factor(a.alpha + result.member());
        wgmma_wait<0>();
        release_last();
    };
    /* What is read of the sums is read after this. */
    auto settle = [&](int mi) __attribute__((always_inline))
    {
#pragma unroll
        for (int i = 0; i < C::WIDTH / 2; i++) asm volatile("" : "+f"(d[mi][i])::"memory");
    };
    /* All that wgmma's descriptors are made of is to be in uniform registers, or each of them takes
     * four instructions more. The compiler sees that a reduction's result is the same for a warp,
     * and, at a fence, that the warp is together after what some of its threads did. */
    const int mine = C::PINGPONG ? (int)__reduce_max_sync(~0u, (uint32_t)result.group()) : 0;
    int tile = mine;
    /* What the tile's result needs, as soon as there is room for it. */
    auto begin_result = [&]() __attribute__((always_inline))
    {
        result.tile = tile;
        if constexpr (C::AFTER) moe_ask_weights(result);
        if (!C::PLAIN && !C::BY_ROWS && !C::HELPED && a.add) {
            if (threadIdx.x % 128 == 0) {
                copies_read<0>();
#pragma unroll
                for (int x = 0; x < C::BUFFERS - 1; x++) result.load(x, x);
            }
            __syncwarp();
        }
    };
    auto begin_factor = [&]() __attribute__((always_inline))
    {
        if (C::FACTOR && !C::TIMES)
            result.factor = a.alpha ? a.alpha[result.member()] : make_float2(1, 0);
    };
    /* The tile before this one, whose first products are under way. */
    auto store_last = [&]() __attribute__((always_inline))
    {
        if (tile > 0)
#pragma unroll
            for (int mi = 0; mi < C::BLOCKS_M; mi++) {
                settle(mi);
                sm90_store(result, d[mi], mi);
            }
        begin_result();
    };
    /* A step of codes: the tensor cores' sums of 128 of the depth, or of as many 32s of it as there
     * are (NT), are added to the sums. Each warpgroup goes at its own pace: taking turns, one
     * adding while the other multiplies, was slower. */
    auto multiply_codes = [&](auto width, auto deep, auto &part, int mi)
        __attribute__((always_inline))
    {
        constexpr int N = decltype(width)::value / C::PARTS;
        const uint32_t p = p0 + stage * (C::STAGE >> 4) + mi * 512,
                       q = q0 + stage * (C::STAGE >> 4);
#pragma unroll
        for (int i = 0; i < C::PARTS; i++) {
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < decltype(deep)::value; k++)
                wgmma_fp8<N, C::ELEMENTS>(part[i], (uint64_t)HIGH << 32 | (p + k * 2),
                                          (uint64_t)HIGH << 32 | (q + i * N * 8 + k * 2), k > 0);
            wgmma_commit();
        }
    };
    auto add_codes = [&](auto width, auto first, auto &part, auto &scales, auto block)
        __attribute__((always_inline))
    {
        constexpr int MI = decltype(block)::value;
        constexpr int N = decltype(width)::value, HALF = C::GRAIN % 64 == 0 ? N / 2 : 0;
        constexpr bool FIRST = decltype(first)::value;
        typedef typename std::remove_reference<decltype(scales)>::type scales_of_step;
        constexpr bool AT_ONCE = C::PARTS == 1 && scales_of_step::all_before(0);
        constexpr bool BETWEEN = !AT_ONCE && scales_of_step::all_before(HALF);
        auto release_step = [&](bool now) __attribute__((always_inline))
        {
            if (!now) return;
            if (C::SCALED) scales.settle();
            if (MI + 1 < C::BLOCKS_M) return;
            __syncwarp();
            release(stage);
        };
        wgmma_finish<N / C::PARTS, C::PARTS - 1>(part[0]);
        release_step(AT_ONCE);
        if (HALF) sm90_promote<C, 0, HALF, FIRST, MI == 1>(d[MI], part[0], scales);
        if constexpr (C::PARTS == 2) wgmma_finish<N / C::PARTS, 0>(part[C::PARTS - 1]);
        release_step(BETWEEN);
        sm90_promote<C, HALF, N, FIRST, MI == 1>(
            d[MI], C::PARTS == 2 ? part[C::PARTS - 1] : &part[0][HALF / 2], scales);
        release_step(!AT_ONCE && !BETWEEN);
        if (MI + 1 == C::BLOCKS_M) advance();
    };
    auto multiply_fp8 = [&](auto width) __attribute__((always_inline))
    {
        constexpr int N = decltype(width)::value;
        constexpr std::integral_constant<int, 4> four;
        constexpr std::integral_constant<int, 0> first_block;
        float part[C::PARTS][C::WIDTH / 2 / C::PARTS];
#pragma unroll
        for (int i = 0; i < N / 2; i++) /* they were anything: or wgmmas are serialised */
            asm volatile("" : "=f"(part[i % C::PARTS][i / C::PARTS]));
        typename std::conditional<C::BY_ROWS || C::LEVELED, sm90_row_scales<C>,
                                  sm90_scales<C, N>>::type scales;
        auto begin_scales = [&]() __attribute__((always_inline))
        {
            if (C::SCALED) scales.begin(base + C::SCALES + stage * C::SCALE_LINE);
        };
        if (C::AHEAD) { /* past the depth there are zeros */
            multiply_codes(width, four, part, 0);
            store_last();
            begin_scales();
            add_codes(width, std::true_type(), part, scales, first_block);
            if constexpr (C::BLOCKS_M == 2) {
                multiply_codes(width, four, part, 1);
                add_codes(width, std::true_type(), part, scales, std::integral_constant<int, 1>());
            }
            begin_factor();
        } else {
#pragma unroll
            for (int mi = 0; mi < C::BLOCKS_M; mi++)
#pragma unroll
                for (int i = 0; i < N / 2; i++) d[mi][i] = 0;
        }
        int left = whole * 4 + rest - C::AHEAD * 4;
        auto multiply_left = [&](int mi) __attribute__((always_inline))
        {
            if (!C::WGRAD || left >= 4)
                multiply_codes(width, four, part, mi);
            else if (left == 3)
                multiply_codes(width, std::integral_constant<int, 3>(), part, mi);
            else if (left == 2)
                multiply_codes(width, std::integral_constant<int, 2>(), part, mi);
            else
                multiply_codes(width, std::integral_constant<int, 1>(), part, mi);
        };
        for (; left > 0; left -= 4) {
            wait_step();
            begin_scales();
            multiply_left(0);
            add_codes(width, std::false_type(), part, scales, first_block);
            if constexpr (C::BLOCKS_M == 2) {
                multiply_left(1);
                add_codes(width, std::false_type(), part, scales, std::integral_constant<int, 1>());
            }
        }
    };
    auto pick = [&](auto self, auto width, auto work) __attribute__((always_inline))->void
    {
        constexpr int N = decltype(width)::value;
        if constexpr (N == C::GRAIN)
            work(width);
        else if (n == N)
            work(width);
        else
            self(self, std::integral_constant<int, N - C::GRAIN>(), work);
    };
    constexpr std::integral_constant<int, C::WIDTH> widest;
#pragma unroll 1
    for (; sm90_has_tile<C>(base, a, tile); tile += C::PINGPONG ? 2 : 1) {
        if (!C::AHEAD) result.tile = tile;
        if (C::FRESH) zeros();
        if (C::PINGPONG) {
            const int own = anew(mine);
            if (tile > 0) barrier_wait(base + C::ORDER + own * 8, (tile / 2 - (own == 0)) & 1);
            stage = shared_now(base + C::HAND + own * 8);
            parity = shared_now(base + C::HAND + own * 8 + 4);
        }
        place();
        wait_step();
        describe(C::AHEAD && tile > 0);
        if (!C::AHEAD && n == 0) {
            for (int step = 0; step < whole + (rest > 0); step++) {
                wait_step();
                __syncwarp();
                release(stage);
                advance();
            }
            hand_over();
            continue;
        }
        if (!C::AHEAD) {
            begin_result();
            begin_factor();
        }
        if constexpr (C::FP8)
            pick(pick, widest, multiply_fp8);
        else
            pick(pick, widest, multiply);
        if (!C::AHEAD) {
#pragma unroll
            for (int mi = 0; mi < C::BLOCKS_M; mi++) settle(mi);
            sm90_store_tile(result, d);
            wgmma_fence();
        }
    }
    if (C::AHEAD && tile > 0)
#pragma unroll
        for (int mi = 0; mi < C::BLOCKS_M; mi++) {
            settle(mi);
            sm90_store(result, d[mi], mi);
        }
    if (threadIdx.x % C::STORES == 0) copies_done<0>();
}
