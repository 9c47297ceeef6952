/* The Hopper GEMM's sums on their way to memory: in pieces of 8 KB through shared memory, 64 x 64
 * of bf16, or 64 x 32 of f32, which the warpgroup that has them stores, or a thread beside it.
 * Included by gemm_sm90_kernel.cuh. */
#pragma once

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
    const bool scaled = ANY && r.args->factors != 0;
    constexpr bool WHOLE = C::FP8 && C::FACTOR && STORED == SM90_HALF;
    sm90_factor by = { ANY ? scaled : (bool)C::FACTOR, WHOLE ? sm90_whole(r.factor) : r.factor.x,
                       r.factor.y, C::FP8 && !ANY, WHOLE };
    if (scaled) {
        const float2 own = r.own_factor();
        by.first = own.x, by.second = own.y;
    }
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

/* Whether the block has so many tiles; the last of the table is the number of all units. */
template <class C>
static __device__ __forceinline__ bool sm90_has_tile(uint32_t base, const gemm_sm90_args &a,
                                                     int tile)
{
    const uint32_t last = base + C::TABLE + ((uint32_t)a.rows.members * 2 + 1) * sizeof(int);
    const int units = shared_now(last);
    return sm90_unit<C>(tile, units, gridDim.x / C::CLUSTER) < units;
}

/* Whether sums have the factor that C says they have; codes with scales of blocks have none. */
template <class C> static __device__ __forceinline__ bool sm90_factors(const gemm_sm90_args &a)
{
    return C::SCALED || C::FACTOR == (a.factors != 0);
}

/* CARRIED: whether tiles are, for all of a launch: bf16 to which nothing is added. */
template <class C> static __device__ __forceinline__ bool sm90_carries(const gemm_sm90_args &a)
{
    return C::BY_ROWS || C::PLAIN || (a.half && !a.add && !a.bias && sm90_factors<C>(a));
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

/* LEVELED: a tile's sums by what its columns' levels are of the largest of them, which the sums
 * were scaled by. */
template <class C>
static __device__ __forceinline__ void sm90_apply_levels(uint32_t base, int tile,
                                                         float (&d)[C::WIDTH / 2])
{
    const uint32_t at =
        base + C::LEVELS + (anew(tile) % C::RING * 4 + thread_now() % 4) * C::LEVEL_PITCH;
#pragma unroll
    for (int i = 0; i < C::WIDTH / 16; i++) { /* two of eight columns and of the next eight */
        const float4 by = shared_four(at + i * 16);
        float *const sum = &d[i * 8];
        sum[0] *= by.x, sum[2] *= by.x, sum[1] *= by.y, sum[3] *= by.y;
        sum[4] *= by.z, sum[6] *= by.z, sum[5] *= by.w, sum[7] *= by.w;
    }
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
        const bool plain =
            C::PLAIN || (sm90_beside<C>::GATHERS && !r.args->add && r.args->factors == 0) ||
            ((C::FP8 || C::FACTOR) && !r.args->add && !r.args->bias && sm90_factors<C>(*r.args));
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
