/* What the Hopper GEMM does beside multiplying for an expert layer.
 *
 * Gathered rows: the producer's warps bring Q line by line (moe_gemm_produce_sm90.cuh), 16 bytes a
 * thread, to where the copies of a box would have put them. Gated: a tile has 64 rows of the gate's
 * weights beside 64 of up's, so that one thread has the sums of both; z and its SwiGLU are stored.
 * Ungated: z comes into the result's buffers, and the gradient of z replaces it there; with `dots`,
 * each warp stores the sum over its 16 columns of up's gradient times up, for each row. */
#pragma once

#include "kernels/cuda/gemm_sm90_kernel.cuh"
#include "kernels/cuda/swiglu.cuh"

enum moe_beside { MOE_NOTHING, MOE_GATED, MOE_UNGATED };

template <int LAYOUT, int CLUSTER_N, bool PINGPONG, bool GATHERS_, int BESIDE_>
struct moe : sm90<LAYOUT, 1, CLUSTER_N, PINGPONG, SM90_ANY> {
    typedef sm90<LAYOUT, 1, CLUSTER_N, PINGPONG, SM90_ANY> plain;
    enum {
        GATHERS = GATHERS_,
        GATHERERS = 128,
        BESIDE = BESIDE_,
        FRESH = BESIDE != MOE_NOTHING,
        HELPED = BESIDE == MOE_UNGATED,
        STORES = BESIDE == MOE_NOTHING ? 128 : 32,
        PRODUCER_REGISTERS = GATHERS ? 56 : 40,
        CONSUMER_REGISTERS = GATHERS ? 224 : 232,
        PIECE = BESIDE == MOE_NOTHING ? (int)plain::PIECE : 32,
        PART = PIECE * 128, /* bytes of a piece of z, or of its SwiGLU */
        DOTS = plain::TABLE,
        DOTS_BYTES = 1024, /* of a warp: eight terms of each row of a piece */
        WRITTEN = DOTS + (HELPED ? 8 * DOTS_BYTES : 0),
        PLACES = WRITTEN + (HELPED ? 2 * plain::BUFFERS * 8 : 0),
        TABLE = PLACES + (HELPED ? 2 * plain::BUFFERS * 16 : 0),
    };
};

/* ---- the result --------------------------------------------------------------------------------
 */

template <class C> struct moe_result : sm90_result<C> {
    /* Gated: two sets of three parts in the place of three buffers; piece j has that of its parity.
     */
    __device__ __forceinline__ uint32_t set(int j) const
    {
        return this->base + C::PIECES + this->group() * C::BUFFERS * C::BUFFER +
               j % 2 * 3 * C::PART;
    }
    /* First column of z in the tile's block: 64 of the gate. */
    __device__ __forceinline__ int column(int mi) const
    {
        int m = this->word(3);
        if (C::BESIDE == MOE_GATED) return m / 2 + (C::PINGPONG ? 0 : this->group() * 64);
        return m + (C::PINGPONG ? mi : this->group() * C::BLOCKS_M + mi) * 64;
    }
    __device__ __forceinline__ void put(const CUtensorMap *map, uint32_t from, int column,
                                        int j) const
    {
        int len = this->len();
        copy_out_ragged(map, from, column, this->row() + len, len, j * C::PIECE);
    }
    /* Ungated: four warps have written the piece. */
    __device__ __forceinline__ uint32_t written() const
    {
        return this->base + C::WRITTEN + (this->group() * C::BUFFERS + this->buffer) * 8;
    }
};

template <int LAYOUT, int CLUSTER_N, bool PINGPONG, bool GATHERS_, int BESIDE>
struct sm90_beside<moe<LAYOUT, CLUSTER_N, PINGPONG, GATHERS_, BESIDE>> {
    typedef moe<LAYOUT, CLUSTER_N, PINGPONG, GATHERS_, BESIDE> C;
    enum { GATHERS = GATHERS_ ? 128 : 0, PRODUCES = GATHERS_ || BESIDE == (int)MOE_GATED };
    typedef typename std::conditional<BESIDE == MOE_NOTHING, sm90_result<C>, moe_result<C>>::type
        result;
};

static __device__ __forceinline__ uint32_t moe_pack(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&pair;
}
static __device__ __forceinline__ float moe_low(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}
static __device__ __forceinline__ float moe_high(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}
static __device__ __forceinline__ void moe_take(uint32_t address, uint32_t (&out)[4])
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}
static __device__ __forceinline__ void moe_give(uint32_t address, const uint32_t (&out)[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(out[0]), "r"(out[1]), "r"(out[2]), "r"(out[3])
        : "memory");
}

/* Factors and biases are read again for every block of sums: all registers hold sums. */
template <class C, bool PLAIN>
static __device__ __forceinline__ sm90_factor moe_factor(const moe_result<C> &r)
{
    sm90_factor by = { !PLAIN && r.args->factors, 1, 0 };
    if (!by.given) return by;
    const float2 own = r.own_factor();
    by.first = own.x, by.second = own.y;
    return by;
}

/* A thread's pairs of sums, rounded. add: to the even and the odd ones, which are of two rows. */
static __device__ __forceinline__ void moe_rounded(uint32_t *z, const float *sum,
                                                   const sm90_factor &by, float add0, float add1)
{
#pragma unroll
    for (int x = 0; x < 4; x++) {
        float add = x % 2 ? add1 : add0;
        z[x] = moe_pack(by(sum[2 * x]) + add, by(sum[2 * x + 1]) + add);
    }
}

/* A warp's 16 x 16 sums of the gate, or (`up`) of up, with their bias: z. */
template <class C, bool PLAIN>
static __device__ __forceinline__ void moe_gate(uint32_t (&z)[4], const moe_result<C> &r,
                                                const float *sum, bool up)
{
    float add0 = 0, add1 = 0;
    if (!PLAIN && r.args->bias) {
        int row = r.column(0) + thread_now() % 128 / 32 * 16 + thread_now() % 32 / 4;
        const float *bias = r.args->bias + (int64_t)r.member() * r.args->m + row;
        if (up) bias += r.args->m / 2;
        add0 += bias[0], add1 += bias[8];
    }
    moe_rounded(z, sum, moe_factor<C, PLAIN>(r), add0, add1);
}

/* z of a warp's 16 x 16 sums, and its SwiGLU, each rounded as it is stored. */
template <class C, bool PLAIN>
static __device__ __forceinline__ void moe_put_gated(uint32_t address, const moe_result<C> &r,
                                                     const float *gate, const float *up)
{
    uint32_t g[4], u[4], a[4];
    moe_gate<C, PLAIN>(g, r, gate, false);
    moe_gate<C, PLAIN>(u, r, up, true);
#pragma unroll
    for (int x = 0; x < 4; x++)
        a[x] = moe_pack(mt_swiglu_of<mt_bf16>(moe_low(g[x]), moe_low(u[x])),
                        mt_swiglu_of<mt_bf16>(moe_high(g[x]), moe_high(u[x])));
    moe_give(address, g);
    moe_give(address + C::PART, u);
    moe_give(address + 2 * C::PART, a);
}

/* Terms of rows' sums on their way: of the eight threads that have those of a row, each has a line
 * of the warp's; groups of eight rows are exchanged in it, so that no two threads meet in a bank.
 */
template <class C>
static __device__ __forceinline__ uint32_t moe_dots_at(const moe_result<C> &r, uint32_t line,
                                                       uint32_t group)
{
    return r.base + C::DOTS + (thread_now() / 32 - 4) * C::DOTS_BYTES + line * 128 +
           (group ^ line % 4) * 32;
}

/* Those of two rows of a group. */
template <class C>
static __device__ __forceinline__ void moe_put_dots(const moe_result<C> &r, float even, float odd,
                                                    int group)
{
    const uint32_t lane = thread_now() % 32;
    put_shared_pair(moe_dots_at(r, lane / 4, group) + lane % 4 * 8, even, odd);
}

/* A thread for each row of piece j, once its warp's have put theirs. */
template <class C>
static __device__ __forceinline__ void moe_add_dots(const moe_result<C> &r, int mi, int j)
{
    const uint32_t lane = thread_now() % 32;
    float dot[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        dot[i] = __int_as_float(shared_now(moe_dots_at(r, i, lane / 8) + lane % 8 * 4));
    const float sum =
        ((dot[0] + dot[1]) + (dot[2] + dot[3])) + ((dot[4] + dot[5]) + (dot[6] + dot[7]));
    const int row = j * C::PIECE + (int)lane;
    if (row < r.len())
        r.args->dots[(r.column(mi) / SM90_DOTS + thread_now() / 32 % 4) * r.args->room + r.row() +
                     row] = sum;
    __syncwarp();
}

/* A warp's 16 x 16 sums, rounded, to the gradients of z, which stands where they go. i: of those
 * of its piece. */
template <class C>
static __device__ __forceinline__ void moe_put_ungated(uint32_t address, const moe_result<C> &r,
                                                       const uint32_t *d, int i)
{
    uint32_t g[4], u[4];
    float even = 0, odd = 0;
    moe_take(address, g);
    moe_take(address + C::PART, u);
#pragma unroll
    for (int x = 0; x < 4; x++) {
        float dg0, dg1, du0, du1;
        mt_swiglu_gradient<mt_bf16>(&dg0, &du0, moe_low(d[x]), moe_low(g[x]), moe_low(u[x]));
        mt_swiglu_gradient<mt_bf16>(&dg1, &du1, moe_high(d[x]), moe_high(g[x]), moe_high(u[x]));
        const uint32_t du = moe_pack(du0, du1);
        const float even0 = x % 2 ? even : 0, odd0 = x % 2 ? odd : 0;
        even = fmaf(moe_low(du), moe_low(u[x]), even0);
        odd = fmaf(moe_high(du), moe_high(u[x]), odd0);
        if (x % 2 && r.args->dots) moe_put_dots(r, even, odd, i * 2 + x / 2);
        g[x] = moe_pack(dg0, dg1), u[x] = du;
    }
    moe_give(address, g);
    moe_give(address + C::PART, u);
}

/* Where a lane's row of a 16 x 16 block lies in a part: 128-byte lines, their 16-byte parts
 * exchanged. */
static __device__ __forceinline__ uint32_t moe_place(int i)
{
    const uint32_t warp = thread_now() % 128 / 32, lane = thread_now() % 32;
    uint32_t line = i * 16 + lane / 16 * 8 + lane % 8;
    return line * 128 + ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
}

template <class C, bool PLAIN>
static __device__ __forceinline__ void moe_store_gated(moe_result<C> &r,
                                                       float (&d)[C::BLOCKS_M][WGMMA_SUMS])
{
    if (r.column(0) >= r.args->m / 2) return;
#pragma unroll
    for (int j = 0; j < C::WIDTH / C::PIECE; j++) {
        if (j * C::PIECE >= r.len()) continue;
        if (j == 0) { /* the tile before */
            if (thread_now() % 32 == 0) copies_read<0>();
            barrier_threads(1 + r.group(), 128);
        }
#pragma unroll
        for (int i = 0; i < C::PIECE / 16; i++)
            moe_put_gated<C, PLAIN>(r.set(j) + moe_place(i), r, &d[0][j * 16 + i * 8],
                                    &d[1][j * 16 + i * 8]);
        shared_to_copies();
        if (thread_now() % 32 == 0) copies_read<0>(); /* the piece before */
        barrier_threads(1 + r.group(), 128);
        const uint32_t part = thread_now() % 128 / 32; /* a warp stores each */
        if (thread_now() % 32 == 0 && part < 3) {
            r.put(part < 2 ? &r.maps->d : &r.maps->c, r.set(j) + part * C::PART,
                  r.column(0) + (part == 1 ? r.args->m / 2 : 0), j);
            copies_commit();
        }
        __syncwarp();
    }
}

/* A tile's sums, rounded. */
template <class C, bool PLAIN>
static __device__ __forceinline__ void moe_round(uint32_t (&sum)[C::BLOCKS_M * WGMMA_SUMS / 2],
                                                 const moe_result<C> &r,
                                                 float (&d)[C::BLOCKS_M][WGMMA_SUMS])
{
#pragma unroll
    for (int mi = 0; mi < C::BLOCKS_M; mi++)
#pragma unroll
        for (int i = 0; i < WGMMA_SUMS / 8; i++)
            moe_rounded(sum + mi * (WGMMA_SUMS / 2) + i * 4, &d[mi][i * 8], moe_factor<C, PLAIN>(r),
                        0, 0); /* as ever: -0 becomes 0 */
}

/* An ungated tile; each warp goes at its own pace. All sums are rounded first, which leaves
 * registers to the work. A quarter of them is worked on, then the next moves to its place: the same
 * instructions again, since those of a whole tile are more than their cache holds. */
template <class C>
static __device__ __forceinline__ void moe_store_ungated(moe_result<C> &r,
                                                         float (&d)[C::BLOCKS_M][WGMMA_SUMS])
{
    enum { ALL = C::BLOCKS_M * WGMMA_SUMS / 2, PART = ALL / 4, AT_ONCE = C::WIDTH / C::PIECE / 2 };
    uint32_t sum[ALL];
    if (r.args->factors)
        moe_round<C, false>(sum, r, d);
    else
        moe_round<C, true>(sum, r, d);
#pragma unroll 1
    for (int part = 0; part < 4; part++) {
        const int mi = part / 2, len = r.len();
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int j = part % 2 * AT_ONCE + i;
            if (r.column(mi) >= r.args->m || j * C::PIECE >= len) continue;
            barrier_wait(r.old(r.buffer), r.parity);
            const uint32_t to = r.address(r.buffer);
#pragma unroll
            for (int x = 0; x < C::PIECE / 16; x++)
                moe_put_ungated<C>(to + moe_place(x), r, sum + i * 8 + x * 4, x);
            shared_to_copies();
            __syncwarp();
            if (thread_now() % 32 == 0) barrier_arrive(r.written());
            if (r.args->dots) moe_add_dots(r, mi, j);
            r.next();
        }
#pragma unroll
        for (int i = 0; i < ALL - PART; i++) sum[i] = sum[i + PART];
    }
}

/* Ungated: a thread for each multiplying warpgroup brings z of its pieces as soon as there is room,
 * that of the next tile too, and stores what has replaced it. */
template <class C>
static __device__ __forceinline__ void moe_help(uint8_t *shared, uint32_t base,
                                                const gemm_sm90_maps &maps, const gemm_sm90_args &a,
                                                sm90_order<C> order, int cn, int group)
{
    const uint32_t buffers = base + C::PIECES + group * C::BUFFERS * C::BUFFER;
    const uint32_t old = base + C::OLD + group * C::BUFFERS * 8;
    const uint32_t written = base + C::WRITTEN + group * C::BUFFERS * 8;
    int4 *places = (int4 *)(shared + C::PLACES) + group * C::BUFFERS;
    int b = 0, pieces = 0;
    uint32_t parity = 1; /* of what has been written: the first round is not waited for */
    auto store = [&]() __attribute__((always_inline))
    {
        const uint32_t from = buffers + b * C::BUFFER;
        const int4 p = places[b];
        barrier_wait(written + b * 8, parity);
        copy_out_ragged(&maps.d, from, p.x, p.y, p.z, p.w);
        copy_out_ragged(&maps.d, from + C::PART, a.m + p.x, p.y, p.z, p.w);
        copies_commit();
    };
    auto next = [&]() __attribute__((always_inline))
    {
        if (++b == C::BUFFERS) b = 0, parity ^= 1;
    };
    sm90_tile t;
    for (int tile = 0; order.next(&t, a, 0, cn); tile++) {
        if (C::PINGPONG && tile % 2 != group) continue;
        for (int mi = 0; mi < C::BLOCKS_M; mi++) {
            const int m = t.m0 + (C::PINGPONG ? mi : group * C::BLOCKS_M + mi) * 64;
            if (m >= a.m) continue;
            for (int row = 0; row < t.len; row += C::PIECE) {
                if (pieces >= C::BUFFERS) {
                    store();
                    copies_read<0>();
                }
                const uint32_t to = buffers + b * C::BUFFER, bar = old + b * 8;
                barrier_expect(bar, 2 * C::PART);
                copy_in_ragged<false>(to, &maps.c, bar, m, t.row + t.len, t.len, row, 0);
                copy_in_ragged<false>(to + C::PART, &maps.c, bar, a.m + m, t.row + t.len, t.len,
                                      row, 0);
                places[b] = make_int4(m, t.row + t.len, t.len, row);
                pieces++;
                next();
            }
        }
    }
    if (pieces < C::BUFFERS) b = 0, parity = 0;
    for (int left = min(pieces, (int)C::BUFFERS); left > 0; left--) {
        store();
        next();
    }
    copies_done<0>();
}

template <class C>
static __device__ __forceinline__ void moe_store_after(moe_result<C> &r,
                                                       float (&d)[C::BLOCKS_M][C::WIDTH / 2]);

template <class C>
static __device__ __forceinline__ void sm90_store_tile(moe_result<C> &r,
                                                       float (&d)[C::BLOCKS_M][C::WIDTH / 2])
{
    /* The gated ping-pong has no registers for both: its launch sees to it. */
    if constexpr (C::AFTER)
        moe_store_after(r, d);
    else if constexpr (C::BESIDE == MOE_UNGATED)
        moe_store_ungated(r, d);
    else if (!C::PINGPONG && (r.args->factors || r.args->bias))
        moe_store_gated<C, C::PINGPONG>(r, d);
    else
        moe_store_gated<C, true>(r, d);
}

#include "kernels/cuda/moe_gemm_produce_sm90.cuh"

template <int LAYOUT, int CLUSTER_N, bool PINGPONG, bool GATHERS, int BESIDE>
static gemm_sm90_variant moe_variant()
{
    return sm90_variant_of<moe<LAYOUT, CLUSTER_N, PINGPONG, GATHERS, BESIDE>>();
}
