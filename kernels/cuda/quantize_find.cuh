/* Finding a strip without the plan: a warp counts the members' rows itself. Blocks that the card
 * begins first do so and need not wait for the plan, which others find it in. */
#pragma once

#include "kernels/cuda/quantize_strips.cuh"

enum { MOST_FOUND = 1 << 30 }; /* rows of all members: they are counted in int */

/* Of members before another: rows, tiles, blocks of 32 rows. */
struct counts {
    int rows, tiles, blocks;
};

static __device__ __forceinline__ void count_rows(counts *c, int rows)
{
    c->rows += rows, c->tiles += (rows + TILE - 1) / TILE, c->blocks += (rows + 31) / 32;
}

/* Rows of member i, and the strips of `each` rows that they take. */
static __device__ __forceinline__ int rows_of_member(const mt_group &g, int64_t i)
{
    return (int)mt_group_rows(&g, i);
}
static __device__ __forceinline__ int strips_of_rows(const mt_group &g, int rows, int each)
{
    return g.k ? (rows + each - 1) / each : 0;
}

/* What member `index`'s parts begin at, as the plan has it. */
static __device__ __forceinline__ int64_t codes_before(const side &s, int64_t k, const counts &c)
{
    if (s.padded) return c.tiles * k * TILE;
    return c.rows * (s.transposed ? k : shift_up(k, s.codes_per_byte - 1));
}
static __device__ __forceinline__ int64_t scales_before(const side &s, int64_t k, int index,
                                                        const counts &c)
{
    const int64_t across = shift_up(k, s.block_shift);
    if (s.scale == MT_SCALE_NONE) return 0;
    if (s.whole) return index;
    if (s.swizzled) return c.tiles * (s.dir == MT_ROW ? shift_up(across, 2) : shift_up(k, 7)) * 512;
    if (s.dir == MT_ROW) return (s.shared ? c.tiles : c.rows) * across;
    return (s.block_shift == 7 ? c.tiles : c.blocks) * (s.shared ? across : k);
}

/* Where a strip lies: which one of a member of so many rows it is. */
struct located {
    counts before; /* of members before it */
    int index, rows, at;
};

/* By a warp: strip n of those of `each` rows; false: there is none. Lanes have members that follow
 * each other. */
static __device__ __forceinline__ bool locate_strip(located *to, const mt_group &g, int each, int n)
{
    const int lane = lane_of_warp(), count = (int)g.members, share = (count + 31) / 32;
    const int begin = lane * share, end = begin + share < count ? begin + share : count;
    counts c = {};
    int strips = 0;
    for (int i = begin; i < end; i++) {
        const int rows = rows_of_member(g, i);
        strips += strips_of_rows(g, rows, each), count_rows(&c, rows);
    }
    int sum = strips;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += below;
    }
    const int owner = __ffs((int)__ballot_sync(~0u, sum > n)) - 1;
    if (owner < 0) return false;
    int index = begin, at = n - (sum - strips), rows = 0;
    if (lane >= owner) c = counts{};
    if (lane == owner) {
        for (;; index++) {
            rows = rows_of_member(g, index);
            const int of = strips_of_rows(g, rows, each);
            if (at < of) break;
            at -= of, count_rows(&c, rows);
        }
    }
    to->index = __shfl_sync(~0u, index, owner), to->at = __shfl_sync(~0u, at, owner);
    to->rows = __shfl_sync(~0u, rows, owner);
    to->before.rows = __reduce_add_sync(~0u, c.rows);
    to->before.tiles = __reduce_add_sync(~0u, c.tiles);
    to->before.blocks = __reduce_add_sync(~0u, c.blocks);
    return true;
}

/* As take_strip, without the table. */
static __device__ __noinline__ bool find_strip(strip *own, const plan &p, const strip_table &t,
                                               bool down_first)
{
    const mt_group &g = p.group;
    const int lane = lane_of_warp();
    const unsigned wide = (unsigned)t.wide * TILE, most = (unsigned)t.most;
    const unsigned across = ((unsigned)g.k + wide - 1) / wide;
    const unsigned slow = blockIdx.x / (down_first ? most : across);
    const unsigned fast = blockIdx.x - slow * (down_first ? most : across);
    const int n = (int)(down_first ? fast : slow), k = (int)(down_first ? slow : fast) * t.wide;
    located it;
    if (!locate_strip(&it, g, t.rows, n)) return false;
    const int down = it.at * (t.rows / TILE), left = it.rows - it.at * t.rows;
    if (lane < MT_DIR_COUNT && p.sides[lane].present) {
        const side &s = p.sides[lane];
        part *d = &own->parts[lane];
        member m = {};
        m.rows = it.rows, m.cols = g.k, m.offset = it.before.rows * g.k;
        m.at[AT_CODES] = codes_before(s, g.k, it.before);
        m.at[AT_SCALES] = scales_before(s, g.k, it.index, it.before);
        fill_part(d, s, m, 0);
        d->codes += down * d->codes_down + k * d->codes_across;
        d->scales += down * d->scales_down + k * d->scales_across;
    }
    if (lane == MT_DIR_COUNT) {
        const int64_t pitch = t.swiglu ? 2 * g.k : g.k;
        own->first_row = it.before.rows + down * TILE;
        own->plain_down = t.gathered ? 0 : pitch * TILE;
        own->plain = (mt_bf16 *)p.sides[SOURCE].codes;
        if (!t.gathered) own->plain += own->first_row * pitch;
        own->index = it.index, own->cols = (int)g.k;
        own->rows = left < t.rows ? left : t.rows;
        own->height = left < TILE ? left : (int)TILE;
        set_span(own, k * TILE, t.wide);
    }
    __syncwarp();
    return true;
}
