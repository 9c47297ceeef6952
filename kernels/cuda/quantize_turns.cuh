/* The turns of a thread block of the short ways of quantize: which tile is whose, and what blocks
 * find of members. */
#pragma once

#include "kernels/cuda/quantize_short.cuh"
#include "kernels/cuda/quantize_strips.cuh"

/* Whether what a sweep finds of members is wanted. */
static __device__ __forceinline__ bool is_measured(const job &j)
{
    return j.nans || j.measure[MT_ROW] || j.measure[MT_COL];
}

static __device__ __forceinline__ void give_found(block_found *to, const job &j, found *it)
{
    const uint32_t most[MT_DIR_COUNT] = { it->most[0] << 16, it->most[1] << 16 };
    give_block(to, j, most, it->nans);
    *it = found{};
}

/* The block that is done last gives the members' results. */
static __device__ __forceinline__ void end_block(const job &j)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = (uint32_t)atomicAdd(j.blocks_done, 1ull) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int64_t i = threadIdx.x; i < j.p.group.members; i += TILE_THREADS) give_results(j, i);
}

/* Turn `turn` of the sweep, if there is one. A sweep before that over codes ends where that begins:
 * its last tiles are still at hand. */
static __device__ __forceinline__ void find_turn(frame *f, const job &j, int64_t units,
                                                 int64_t turn)
{
    if (turn < units) find_tile(f, j, j.codes ? turn : units - 1 - turn);
}
static __device__ __forceinline__ void set_turn(frame *f, const job &j, int64_t units, int64_t turn,
                                                int dir)
{
    if (turn < units && lane_of_warp() == 0) set_target(&f->to[dir], j, f->t, dir);
}

/* Whether a direction is kept decoded. */
static inline bool keeps_values(const job *j)
{
    const side *row = &j->p.sides[MT_ROW], *col = &j->p.sides[MT_COL];
    return (row->present && row->decoded) || (col->present && col->decoded);
}

/* What all elements of a member are multiplied by. */
static __device__ __forceinline__ float whole_scale(const job &j, int dir, int member)
{
    const side &s = j.p.sides[dir];
    if (!s.delayed) return mt_encode_scale(j.amax[dir][member], s.max, s.options.pow2, FLT_MAX);
    return j.scale[dir] ? j.scale[dir][member] : 1.0f;
}

/* Raises the member's amax; `bits` is not negative. */
static __device__ __forceinline__ void raise_amax(const job &j, int dir, int member, uint32_t bits)
{
    atomicMax((int *)j.amax[dir] + member, (int)bits);
    if (j.gives && j.out.running[dir]) atomicMax((int *)j.out.running[dir] + member, (int)bits);
}

/* Adds to the count that there is of the member's NaNs. */
static __device__ __forceinline__ void add_nans(const job &j, int member, int nans)
{
    atomicAdd(j.nans + member, (unsigned long long)nans);
    if (j.gives && j.out.running_nan)
        atomicAdd((unsigned long long *)j.out.running_nan + member, (unsigned long long)nans);
}

/* Raises the member's values by what each of a block's warps has left, where that is more than it
 * has had. */
template <int COUNT, typename SPACE>
static __device__ __forceinline__ void raise_by(const job &j, SPACE *sp, const strip &p)
{
    const int lane = lane_of_warp();
    __syncthreads(); /* all have left theirs */
    if (threadIdx.x >= COUNT) return;
    const uint32_t most = __reduce_max_sync((1u << COUNT) - 1, sp->most[lane]) << 16;
    const int nans = __reduce_add_sync((1u << COUNT) - 1, sp->nans[lane]);
    if (lane < MT_DIR_COUNT && j.measure[lane] && most > p.seen[lane])
        raise_amax(j, lane, p.index, most);
    if (lane == 0 && j.nans && nans) add_nans(j, p.index, nans);
}

template <typename SPACE>
static __device__ __forceinline__ void raise_member(const job &j, SPACE *sp, const strip &p,
                                                    uint32_t most, int nans)
{
    const int warp = (int)threadIdx.x / 32;
    most = __reduce_max_sync(~0u, most), nans = __reduce_add_sync(~0u, nans);
    if (lane_of_warp() == 0) sp->most[warp] = most, sp->nans[warp] = nans;
    raise_by<WARPS>(j, sp, p);
}
