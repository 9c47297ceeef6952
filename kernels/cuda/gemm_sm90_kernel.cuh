/* The kernel of the Hopper GEMM: one warpgroup brings tiles of P and Q into a ring of stages, two
 * or three multiply and store. */
#pragma once

#include <type_traits>

#include "kernels/cuda/gemm_sm90.cuh"
#include "kernels/cuda/gemm_sm90_ptx.cuh"
#include "kernels/cuda/gemm_sm90_wgmma.cuh"

/* Shared memory: stages, pieces of the result on their way, descriptions of the last tiles,
 * barriers, the first rows of members and the numbers of tiles before each. PINGPONG: each
 * multiplying warpgroup has tiles of its own, else each has half of the rows of every tile. TURNED:
 * NT whose P is X and Q dY, so that D(i, j) is the element (j, i) of the result. */
template <int LAYOUT_, int CLUSTER_M_, int CLUSTER_N_, bool PINGPONG_, sm90_sums SUMS,
          bool TURNED_ = false, int STAGES_ = PINGPONG_ ? 4 : 3, int BUFFERS_ = 3>
struct sm90 {
    enum {
        LAYOUT = LAYOUT_,
        CLUSTER_M = CLUSTER_M_,
        CLUSTER_N = CLUSTER_N_,
        PINGPONG = PINGPONG_,
        WARPGROUPS = 2, /* that multiply */
        THREADS = (WARPGROUPS + 1) * 128,
        WGRAD = LAYOUT == MT_GEMM_NT,
        RANKED = WGRAD,             /* see sm90_order */
        PLAIN = SUMS != SM90_ANY,   /* nothing is added */
        TIMES = SUMS == SM90_TIMES, /* the factor is there */
        FRESH = false,              /* see sm90_consumer, */
        HELPED = false,             /* and moe_help; */
        AFTER = false,              /* see moe_gemm_after_sm90.cuh */
        SPLIT = 0,     /* stages of P, where its ring is its own: half as many as of Q */
        STORES = 128,  /* of so many threads, one stores */
        AHEAD = false, /* see sm90_fp8 */
        CARRIED = false,
        BY_ROWS = false,
        ACROSS_P = LAYOUT != MT_GEMM_TN,
        ACROSS_Q = WGRAD,
        CLUSTER = CLUSTER_M * CLUSTER_N,
        FP8 = false, /* see sm90_fp8 */
        PARTS = 1,
        SCALED = false,
        PACKED = false,
        LEVELED = false,
        FACTOR = TIMES || (WGRAD && PINGPONG && !PLAIN), /* of sums that nothing is added to */
        TURNED = TURNED_,
        ELEMENTS = 0,
        SCALES = 0,
        SCALES_P = 0,
        SCALE_LINE = 0,
        BLOCKS_M = 2, /* 64-row instructions of a warpgroup */
        TILE = PINGPONG ? 128 : 256,
        DEPTH = 64, /* elements of 128 bytes */
        WIDTH = SM90_WIDTH,
        GRAIN = WGRAD ? 64 : 8, /* of widths */
        STAGES = STAGES_,
        BOX_Q = WGRAD || CLUSTER_M == 1 ? 64 : WIDTH / 2,
        P_BYTES = TILE * 128,
        STAGE = P_BYTES + WIDTH * 128,
        BUFFERS = BUFFERS_, /* of a warpgroup */
        BUFFER = 8192,
        PIECES = STAGES * STAGE,
        TILES = PIECES + WARPGROUPS * BUFFERS * BUFFER,
        TILE_BYTES = 32,
        RING = 8, /* tiles; more than a producer can be ahead */
        FULL = TILES + RING * TILE_BYTES,
        EMPTY = FULL + STAGES * 8,
        ORDER = EMPTY + STAGES * 8,
        HAND = ORDER + 16,
        OLD = HAND + 16,
        TABLE = OLD + WARPGROUPS * BUFFERS * 8,
        PIECE = WGRAD ? 32 : 64, /* columns of D(i, j) in a piece of the result */
        PRODUCER_REGISTERS = 56,
        CONSUMER_REGISTERS = 224
    };
};

/* fp8 codes: tiles of half the rows, so that a warpgroup has registers for two sums: those that
 * the tensor cores take over 128 of the depth, and those in f32 that these are added to. SCALED: by
 * the scales of each 1 x 128 of Q and of 128 x 128 (NT: 1 x 128) of P; PACKED: which are powers of
 * two, so that those of Q's columns take half of what wgmma leaves little of, the way from shared
 * memory. NT: both operands lie along the rows, members at multiples of 128 with zeros between
 * them. BY_ROWS, TN: P are rows and Q weights; scales of both are then two for a thread's 64
 * columns. WARPGROUPS 3: tiles half as high again of two thirds of the columns, by three chains of
 * multiplying and adding, which hide one another better than two. LEVELED: each of Q's columns has
 * one scale (NT: for the member), not one for each 128 of the depth (gemm_level_sm90.cu): steps are
 * scaled by P's and the largest of a tile's, its sums by what each column's is of that as they are
 * stored. CARRIED: see sm90_carry. BLOCKS_M 2, to bf16, without C or bias: a warpgroup has 128 rows
 * of P, in TN of one scale, and multiplies and adds 64 after the other 64: Q passes through shared
 * memory half as often for a product, and a tile's ends are of more products. Registers are left
 * for 144 of Q's columns. */
template <int LAYOUT_, int ELEMENTS_, bool SCALED_, bool PACKED_ = false, bool BY_ROWS_ = false,
          int PARTS_ = 1, bool PAIRS_ = false, int WARPGROUPS_ = 2, bool TURNED_ = false,
          bool LEVELED_ = false, int BLOCKS_M_ = 1>
struct sm90_fp8 {
    enum {
        LAYOUT = LAYOUT_,
        ELEMENTS = ELEMENTS_,
        BY_ROWS = BY_ROWS_,
        WARPGROUPS = WARPGROUPS_,
        THREADS = (WARPGROUPS + 1) * 128,
        CLUSTER_M = BY_ROWS || PAIRS_ ? 1 : 2, /* PAIRS: two pieces share P */
        CLUSTER_N = 3 - CLUSTER_M,
        PINGPONG = false,
        FRESH = false,
        HELPED = false,
        AFTER = false,
        SPLIT = 0,
        STORES = 128,
        WGRAD = LAYOUT == MT_GEMM_NT,
        RANKED = false,
        ACROSS_P = false,
        ACROSS_Q = false,
        CLUSTER = CLUSTER_M * CLUSTER_N,
        FP8 = true,
        PARTS = PARTS_, /* of the columns, that are multiplied one after the other */
        PLAIN = BLOCKS_M_ > 1,
        /* a tile is stored while the first products of the next are under way; one without columns
         * multiplies what lies there, and nothing of it is stored */
        AHEAD = WGRAD || BY_ROWS,
        CARRIED = AHEAD,
        TURNED = TURNED_,
        SCALED = SCALED_,
        PACKED = PACKED_,
        LEVELED = LEVELED_,
        TIMES = false,
        FACTOR = !SCALED, /* of a member's sums */
        BLOCKS_M = BLOCKS_M_,
        TILE = 64 * WARPGROUPS * BLOCKS_M,
        DEPTH = 128,
        WIDTH = WARPGROUPS == 3 || (WGRAD && BLOCKS_M == 2) ? 128
                : BLOCKS_M == 2                             ? 144
                                                            : SM90_WIDTH,
        /* of one width, where no register is left for more */
        LEVELED_BROAD = LEVELED_ && WGRAD && BLOCKS_M_ > 1,
        GRAIN = LEVELED_BROAD      ? 128
                : WGRAD || BY_ROWS ? 64
                                   : 8,
        STAGES = BLOCKS_M == 2 ? 3 : 4,
        BOX_Q = BLOCKS_M == 2 && !WGRAD     ? 48
                : CLUSTER_M == 1 || BY_ROWS ? 64
                                            : WIDTH / 2,
        P_BYTES = TILE * 128,
        STAGE = P_BYTES + WIDTH * 128,
        BUFFERS = WARPGROUPS == 3          ? 2
                  : WGRAD && BLOCKS_M == 2 ? 4
                                           : 3,
        BUFFER = 8192,
        PIECES = STAGES * STAGE,
        TILES = PIECES + WARPGROUPS * BUFFERS * BUFFER,
        TILE_BYTES = 32,
        RING = 8,
        SCALES = TILES + RING * TILE_BYTES,
        /* in the line of a stage, after those of Q */
        SCALES_P = LEVELED ? 0 : (WIDTH + 63) / 64 * 64 * (PACKED ? 2 : 4),
        SCALE_LINE = BY_ROWS             ? WIDTH / 64 * TILE * 4
                     : LEVELED && !WGRAD ? 16
                                         : SCALES_P * BLOCKS_M + (WGRAD ? TILE * 4 : 0),
        /* of each tile, f32; a thread's columns beside each other, in banks of their own */
        LEVELS = SCALES + (SCALED ? STAGES * SCALE_LINE : 0),
        LEVEL_PITCH = WIDTH + 16,
        FULL = LEVELS + (LEVELED ? RING * 4 * LEVEL_PITCH : 0),
        EMPTY = FULL + STAGES * 8,
        ORDER = EMPTY + STAGES * 8,
        HAND = ORDER + 16,
        OLD = HAND + 16,
        WRITTEN = OLD + WARPGROUPS * BUFFERS * 8,
        TAKEN = WRITTEN + WARPGROUPS * 8,
        TABLE = TAKEN + WARPGROUPS * 8,
        PIECE = WGRAD || BY_ROWS ? 32 : 64,
        PRODUCER_REGISTERS = BLOCKS_M == 2 && !LEVELED_BROAD ? 40 : 56,
        CONSUMER_REGISTERS = WARPGROUPS == 3                   ? 152
                             : BLOCKS_M == 2 && !LEVELED_BROAD ? 232
                                                               : 224
    };
};
/* What a kernel does beside multiplying (moe_gemm_sm90.cuh). PRODUCES: by a producer of its own;
 * GATHERS: so many of whose threads bring lines; result: what is stored in its own way. */
template <class C> struct sm90_result;
template <class C> struct sm90_beside {
    enum { PRODUCES = false, GATHERS = 0 };
    typedef sm90_result<C> result;
};
template <class C> struct sm90_order;
template <class C>
static __device__ __forceinline__ void
moe_produce(uint8_t *shared, uint32_t base, const gemm_sm90_maps &maps, const gemm_sm90_args &a,
            sm90_order<C> order, int cn);
template <class C>
static __device__ __forceinline__ void moe_help(uint8_t *shared, uint32_t base,
                                                const gemm_sm90_maps &maps, const gemm_sm90_args &a,
                                                sm90_order<C> order, int cn, int group);
template <class C>
static __device__ __forceinline__ void
moe_help_both(uint8_t *shared, uint32_t base, const gemm_sm90_maps &maps, const gemm_sm90_args &a,
              sm90_order<C> order, int cn);
template <class C> struct moe_result;
template <class C> static __device__ __forceinline__ void moe_ask_weights(const moe_result<C> &r);

/* As the producer describes it to the consumers. */
struct sm90_tile {
    int n;   /* width of the instruction; 0: no columns here, the block loads for others */
    int len; /* columns that there are */
    int row; /* first row in the ragged matrices */
    int m0;  /* first row of P */
    int member;
    int n0;     /* first column of D: NT */
    int whole;  /* steps of 128 bytes */
    int rest;   /* wgmmas of one more: NT */
    int column; /* NT: the member's first row, of fp8 among padded ones; no rows: past the last */
};

/* ---- the order of tiles ------------------------------------------------------------------------
 * Members one after another; within each, blocks of `super` tiles along the fast direction (pieces
 * of Q, or for NT tiles of P), all tiles of the slow one for each: what a fast tile reads of P is
 * read by its neighbours at the same time. RANKED, where rounds of the grid are few: those of most
 * rows first, every other round from the last block to the first, so that who has the longest
 * tiles of a round has the shortest of the next. */

enum { SM90_FEW_ROUNDS = 4, SM90_MOST_RANKED = 128 /* members: each is held against each */ };

static __device__ __forceinline__ bool sm90_has_few_rounds(int units, int clusters)
{
    return units > clusters && units < SM90_FEW_ROUNDS * clusters;
}

/* The unit (tiles of a cluster) that this cluster takes in a round. */
template <class C>
static __device__ __forceinline__ int sm90_unit(int round, int units, int clusters)
{
    const int mine = (int)blockIdx.x / C::CLUSTER;
    const bool back = C::RANKED && round % 2 && sm90_has_few_rounds(units, clusters);
    return round * clusters + (back ? clusters - 1 - mine : mine);
}

template <class C> struct sm90_order {
    /* Rows before a member; after these, units before it, or, RANKED, members by rank and units. */
    const int *start;
    int tiles_m, tiles_n, unit, member, column;

    __device__ __forceinline__ bool next(sm90_tile *t, const gemm_sm90_args &a, int cm, int cn)
    {
        const int members = (int)a.rows.members, *before = start + members + 1;
        int local, units;
        if constexpr (C::RANKED) { /* unit: rounds */
            const int all = before[members],
                      at = sm90_unit<C>(unit++, all, grid_now() / C::CLUSTER);
            if (at >= all) return false;
            units = tiles_m * tiles_n;
            member = at / units;
            local = at - member * units;
            member = before[member];
        } else {
            for (; member < members && unit >= before[member + 1]; member++)
                if constexpr (C::FP8 && C::WGRAD)
                    column += (start[member + 1] - start[member] + 127) / 128 * 128;
            if (member >= members) return false;
            local = unit - before[member], units = before[member + 1] - before[member];
            unit += grid_now() / C::CLUSTER;
        }
        int first = start[member], rows = start[member + 1] - first;
        int fast_tiles = C::WGRAD ? tiles_m : units / (C::BY_ROWS ? tiles_n : tiles_m);
        int slow_tiles = C::WGRAD || C::BY_ROWS ? tiles_n : tiles_m;
        int together = a.super * slow_tiles, block = local / together;
        int in_block = local - block * together, fast0 = block * a.super;
        int height = min(a.super, fast_tiles - fast0), slow = in_block / height;
        int fast = fast0 + in_block - slow * height, depth;
        t->member = member;
        if (C::WGRAD) {
            t->m0 = (fast * C::CLUSTER_M + cm) * C::TILE;
            t->n0 = (slow * C::CLUSTER_N + cn) * a.width;
            t->len = max(0, min(a.width, a.n - t->n0));
            t->row = first;
            t->column = !C::FP8 ? first : rows ? column : a.k;
            depth = rows;
        } else if (C::BY_ROWS) {
            t->m0 = (fast * C::CLUSTER_M + cm) * C::TILE;
            const int grain = C::CLUSTER_N * C::GRAIN;
            int from = slow * C::CLUSTER_N * a.width, left = a.n - from; /* the last: in two */
            if (C::SCALED) { /* a narrow tile costs more than its columns: the last two alike */
                const int piece = C::CLUSTER_N * a.width, two = a.n - (tiles_n - 2) * piece;
                const int half = tiles_n > 1 ? (two + 2 * grain - 1) / (2 * grain) * grain : piece;
                from = slow * piece - (slow == tiles_n - 1 ? piece - half : 0);
                left = slow == tiles_n - 2 ? half : a.n - from;
            }
            const int each = min(a.width, (left + grain - 1) / grain * C::GRAIN);
            t->n0 = from + cn * each;
            t->len = max(0, min(each, a.n - t->n0));
            t->row = first;
            depth = a.k;
        } else {
            int pieces = fast_tiles * C::CLUSTER_N;
            int each = ((rows + pieces - 1) / pieces + C::GRAIN - 1) / C::GRAIN * C::GRAIN;
            int r = (fast * C::CLUSTER_N + cn) * each;
            t->m0 = (slow * C::CLUSTER_M + cm) * C::TILE;
            t->n0 = 0;
            t->len = max(0, min(each, rows - r));
            t->row = first + r;
            depth = a.k;
        }
        t->n = (t->len + C::GRAIN - 1) / C::GRAIN * C::GRAIN;
        if (C::WGRAD) { /* a member without rows has one step of zeros, which writes its zeros */
            t->whole = depth / C::DEPTH;
            t->rest = depth ? (depth % C::DEPTH + C::DEPTH / 4 - 1) / (C::DEPTH / 4) : 1;
        } else { /* past the depth both operands are zero */
            t->whole = (depth + C::DEPTH - 1) / C::DEPTH;
            t->rest = 0;
        }
        return true;
    }
};

/* RANKED: members by rank, and the number of units; by every warp. */
template <class C>
static __device__ __forceinline__ void sm90_rank(int *ranked, const int *start, int members,
                                                 int units)
{
    const int lane = threadIdx.x % 32;
    const bool ranks = members <= SM90_MOST_RANKED &&
                       sm90_has_few_rounds(members * units, (int)gridDim.x / C::CLUSTER);
#pragma unroll 1
    for (int e = threadIdx.x / 32; ranks && e < members; e += C::THREADS / 32) {
        const int rows = start[e + 1] - start[e];
        int rank = 0;
#pragma unroll 1
        for (int base = 0; base < members; base += 32) {
            const int other = base + lane;
            const int its = other < members ? start[other + 1] - start[other] : -1;
            rank += __popc(__ballot_sync(~0u, its > rows || (its == rows && other < e)));
        }
        if (lane == 0) ranked[rank] = e;
    }
    for (int e = threadIdx.x; !ranks && e < members; e += C::THREADS) ranked[e] = e;
    if (threadIdx.x == 0) ranked[members] = members * units;
}

/* First rows of the members, units before each, and factors, into shared memory; by every thread.
 */
template <class C>
static __device__ __forceinline__ void
sm90_members(int *start, int *before, const gemm_sm90_args &a, int tiles_m, int tiles_n)
{
    int members = (int)a.rows.members, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int e = threadIdx.x; e <= members; e += C::THREADS)
        start[e] = (int)(a.rows.offsets ? a.rows.offsets[e] / a.rows.k : e * a.rows.m);
    if ((C::FACTOR || !(C::PLAIN || C::SCALED)) && a.factors)
#pragma unroll 1
        for (int e = threadIdx.x; e < members; e += C::THREADS)
            ((float2 *)(before + members + 1))[e] = gemm_factor(&a.factor, e);
    __syncthreads();
    if constexpr (C::RANKED) return sm90_rank<C>(before, start, members, tiles_m * tiles_n);
    if (threadIdx.x >= 32) return;
    int sum = 0, wide = a.width * C::CLUSTER_N, high = C::TILE * C::CLUSTER_M;
#pragma unroll 1
    for (int base = 0; base < members; base += 32) {
        int e = base + lane, units = 0;
        if (e < members) {
            const int rows = start[e + 1] - start[e];
            units = C::WGRAD     ? tiles_m * tiles_n
                    : C::BY_ROWS ? (rows + high - 1) / high * tiles_n
                                 : (rows + wide - 1) / wide * tiles_m;
            if (C::FP8 && !C::WGRAD && (rows < a.least || rows > a.most)) units = 0;
        }
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            int other = __shfl_up_sync(~0u, units, step);
            if (lane >= step) units += other;
        }
        if (e < members) before[e + 1] = sum + units;
        sum += __shfl_sync(~0u, units, 31);
    }
    if (lane == 0) before[0] = 0;
}

#include "kernels/cuda/gemm_sm90_produce.cuh"

#include "kernels/cuda/gemm_sm90_result.cuh"

#include "kernels/cuda/gemm_sm90_store.cuh"

#include "kernels/cuda/gemm_sm90_consumer.cuh"

/* ---- the kernel --------------------------------------------------------------------------------
 */

template <class C>
static __global__
__launch_bounds__(C::THREADS, 1) void gemm_sm90_kernel(const __grid_constant__ gemm_sm90_maps maps,
                                                       const __grid_constant__ gemm_sm90_args a)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    int *start = (int *)(shared + C::TABLE), *before = start + a.rows.members + 1;
    const int rank = C::CLUSTER > 1 ? (int)cluster_rank() : 0;
    const int cm = C::CLUSTER_M > 1 ? rank / C::CLUSTER_N : 0;
    const int cn = C::CLUSTER_N > 1 ? rank % C::CLUSTER_N : 0;
    const int tiles_m = (a.m + C::TILE * C::CLUSTER_M - 1) / (C::TILE * C::CLUSTER_M);
    const int tiles_n =
        C::WGRAD || C::BY_ROWS ? (a.n + a.width * C::CLUSTER_N - 1) / (a.width * C::CLUSTER_N) : 1;
    if (threadIdx.x == 0) {
        map_prefetch(&maps.p);
        map_prefetch(&maps.q);
        map_prefetch(&maps.d);
        for (int i = 0; i < C::STAGES; i++) {
            barrier_init(base + C::FULL + i * 8,
                         !C::SPLIT + (C::SCALED ? 32 : 0) + (int)sm90_beside<C>::GATHERS);
            /* every warp that reads what this block brings */
            barrier_init(base + C::EMPTY + i * 8, (C::SPLIT ? 1 : C::CLUSTER_M + C::CLUSTER_N - 1) *
                                                      (C::PINGPONG ? 4 : C::WARPGROUPS * 4));
        }
        if constexpr (C::SPLIT > 0)
            for (int i = 0; i < C::SPLIT; i++) {
                barrier_init(base + C::SPLIT_FULL + i * 8, 1);
                barrier_init(base + C::SPLIT_EMPTY + i * 8, C::CLUSTER_N * 4);
            }
        for (int i = 0; i < 2; i++) barrier_init(base + C::ORDER + i * 8, 4);
        for (int i = 0; i < C::WARPGROUPS * C::BUFFERS; i++) barrier_init(base + C::OLD + i * 8, 1);
        if constexpr (C::CARRIED)
            for (int i = 0; i < C::WARPGROUPS; i++) {
                barrier_init(base + C::WRITTEN + i * 8, 4);
                barrier_init(base + C::TAKEN + i * 8, 1);
            }
        if constexpr (C::HELPED)
            for (int i = 0; i < 2 * C::BUFFERS; i++) barrier_init(base + C::WRITTEN + i * 8, 4);
        *(int2 *)(shared + C::HAND) = make_int2(0, 0); /* the first stage and its parity */
        barrier_init_done();
    }
    sm90_members<C>(start, before, a, tiles_m, tiles_n);
    if (C::CLUSTER > 1) cluster_meet();
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<C::PRODUCER_REGISTERS>();
        const uint32_t at = shared_anew(shared);
        const int first = C::RANKED ? 0 : (int)blockIdx.x / C::CLUSTER;
        sm90_order<C> order = { start, tiles_m, tiles_n, first, 0, 0 };
        if constexpr (sm90_beside<C>::PRODUCES)
            moe_produce<C>(shared, at, maps, a, order, cn);
        else if (threadIdx.x < (C::FP8 ? 1 : 32))
            sm90_produce<C>(shared, at, maps, a, order, cm, cn);
        if constexpr (C::AFTER) {
            if (threadIdx.x == 96) moe_help_both<C>(shared, at, maps, a, order, cn);
        } else if constexpr (C::HELPED)
            if (threadIdx.x == 32 || threadIdx.x == 64)
                moe_help<C>(shared, at, maps, a, order, cn, (int)threadIdx.x / 32 - 1);
        if constexpr (C::CARRIED)
            if (threadIdx.x == 32) sm90_carry<C>(at, maps, a);
        if constexpr (C::SCALED)
            if (threadIdx.x >= 32 * sm90_first_of_scales<C>())
                sm90_bring_scales<C>(at, a, order, cm, cn);
        __syncwarp();
    } else {
        registers_up<C::CONSUMER_REGISTERS>();
        sm90_consume<C>(shared_anew(shared), maps, a, cm, cn);
    }
    if (C::CLUSTER > 1) cluster_sync();
}

/* The row of a table of variants. */
template <class C> static gemm_sm90_variant sm90_variant_of()
{
    static_assert(C::STAGE % 1024 == 0 && C::WIDTH % C::BOX_Q == 0, "stages and boxes are whole");
    static_assert(C::WARPGROUPS * C::CONSUMER_REGISTERS + C::PRODUCER_REGISTERS <=
                      65536 / C::THREADS / 8 * 8 * (C::WARPGROUPS + 1),
                  "what is asked for is given back: the block has no more than it began with");
    static_assert((int)C::STAGES + 3 <= (int)C::RING,
                  "tiles of a step each: two stored, one ahead");
    return { (const void *)gemm_sm90_kernel<C>,
             C::THREADS,
             C::TILE,
             C::WIDTH,
             C::CLUSTER_M,
             C::CLUSTER_N,
             C::BOX_Q,
             C::BY_ROWS,
             C::TURNED,
             C::LEVELED,
             C::PLAIN || C::BY_ROWS,
             C::TABLE };
}

template <int LAYOUT, int CLUSTER_M, int CLUSTER_N, bool PINGPONG, sm90_sums SUMS,
          bool TURNED = false>
static gemm_sm90_variant sm90_variant()
{
    return sm90_variant_of<sm90<LAYOUT, CLUSTER_M, CLUSTER_N, PINGPONG, SUMS, TURNED>>();
}

/* Ping-pong by five stages; what is left holds one buffer for a warpgroup's results. */
template <int LAYOUT, sm90_sums SUMS, bool TURNED = false> static gemm_sm90_variant sm90_deep()
{
    return sm90_variant_of<sm90<LAYOUT, 2, 1, true, SUMS, TURNED, 5, 1>>();
}
