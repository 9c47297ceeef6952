/* Inside the way of quantize to bytes: which tiles are a thread block's, and where their parts lie.
 * Warps look up a tile each, all at the same time, for the turns to come: what one warp did alone
 * in every turn, all others would wait for. */
#pragma once

#include "kernels/cuda/quantize_packed.cuh"

/* Where codes and scales of a tile in a direction begin, and the steps between them. */
struct part {
    uint8_t *codes, *scales;
    int64_t codes_down, codes_across; /* bytes from a tile to the next */
    int64_t scales_down, scales_across;
    uint32_t pitch;       /* of lines of codes */
    uint32_t line, block; /* steps of scales, in scales */
    float whole;          /* of the member: what all its elements are multiplied by */
    bool swizzled;
    bool padded;  /* lines of a tile are as long as a tile, zeros at their end */
    bool aligned; /* lines begin at multiples of 16 bytes */
};

/* A tile. */
struct spot {
    part parts[MT_DIR_COUNT];
    mt_bf16 *plain;     /* its first element as it lies */
    int64_t plain_down; /* elements from a tile to the one below */
    int64_t first_row;  /* the member's among those of all, where rows are gathered */
    int index, cols;    /* of the member */
    int i, k;           /* the tile's place among its tiles */
    int height, width;  /* rows and columns of the tile */
    bool exists;
};

static __device__ __forceinline__ lattice scales_of(const part &d)
{
    return lattice{ d.scales, d.line, d.block, d.swizzled };
}
static __device__ __forceinline__ bool is_even(const spot &p, int dir)
{
    const part &d = p.parts[dir];
    return d.aligned && (d.padded || p.height % 16 == 0);
}

/* Side `which` of a member's first tile; all of a part but `whole`. */
static __device__ __forceinline__ void fill_part(part *to, const side &s, const member &m,
                                                 int which)
{
    const shape p = shape_of(s, m.rows, m.cols);
    const int half = s.codes_per_byte - 1, wide = s.scale == MT_SCALE_F32 ? 4 : 1;
    const int64_t along = TILE >> half, lines = TILE * p.pitch;
    const lattice l = lattice_of(s, p, s.scales + m.at[AT_SCALES + which] * wide, 0, 0);
    int64_t line = (s.shared ? TILE >> s.block_shift : TILE) * p.line_stride * wide;
    int64_t block = (TILE >> s.block_shift) * p.block_stride * wide;
    if (s.swizzled)
        line = shift_up(p.scale_blocks, 2) * 512, block = (TILE >> s.block_shift) / 4 * 512;
    if (s.whole) line = block = 0;
    to->codes = s.codes + m.at[AT_CODES + which];
    to->scales = l.at;
    to->pitch = (uint32_t)p.pitch;
    to->codes_down = s.transposed ? along : lines, to->codes_across = s.transposed ? lines : along;
    to->scales_down = s.dir == MT_ROW ? line : block;
    to->scales_across = s.dir == MT_ROW ? block : line;
    to->line = (uint32_t)l.line, to->block = (uint32_t)l.block, to->swizzled = l.swizzled;
    to->padded = s.line > 0;
    to->aligned = (((uintptr_t)to->codes | (uintptr_t)p.pitch) & 15) == 0;
}

/* By a warp: looks a unit up. Tiles of a member follow each other along the rows, or where a run is
 * longer than 1, down the columns for at least as many before the next column's. `fill(p, m, lane)`
 * gives the rest of the member's first tile, of member m in memory. */
template <typename F>
static __device__ __forceinline__ void look_up(spot *p, const plan &of, int unit, int run, F fill)
{
    const int lane = lane_of_warp();
    p->exists = unit < (int)of.units[of.group.members];
    if (unit >= (int)of.units[of.group.members]) return;
    const int64_t index = member_at_by_warp(of.units, of.group.members, unit);
    const member &m = of.members[index];
    const int rows = (int)m.rows, cols = (int)m.cols, at = unit - (int)m.at[AT_UNIT];
    const int down = (rows + TILE - 1) / TILE, across = (cols + TILE - 1) / TILE;
    int first = at / across, place = at - first * across, most = 1, i = first, k = place;
    if (run > 1) {
        const int parts = down / run;
        most = parts > 1 ? (down + parts - 1) / parts : down;
        first = at / (most * across) * most, place = at - first * across;
        if (down - first < most) most = down - first;
        i = first + place % most, k = place / most;
    }
    fill(p, m, lane, index);
    if (lane < MT_DIR_COUNT) {
        part *d = &p->parts[lane];
        d->codes += i * d->codes_down + k * d->codes_across;
        d->scales += i * d->scales_down + k * d->scales_across;
    }
    if (lane == MT_DIR_COUNT) p->plain += i * p->plain_down + k * TILE;
    if (lane == MT_DIR_COUNT + 1) {
        p->index = (int)index, p->cols = cols, p->i = i, p->k = k;
        p->height = i + 1 < down ? (int)TILE : rows - i * TILE;
        p->width = k + 1 < across ? (int)TILE : cols - k * TILE;
    }
}

/* Turns: a block has `many` units that follow each other at a time, at the end what is left. */
enum { LOOKERS = TILE_THREADS / 32, SPOTS = 2 * LOOKERS };

static __device__ __forceinline__ int unit_of(int units, int many, int turn)
{
    const int blocks = (int)gridDim.x, block = (int)blockIdx.x;
    const int rounds = units / (blocks * many), turns = rounds * many,
              rest = units - turns * blocks;
    const int last = (rest + blocks - 1) / blocks;
    if (turn < turns) return (turn / many * blocks + block) * many + turn % many;
    return turn - turns < last ? turns * blocks + block * last + turn - turns : units;
}

/* At turn n, which counts from -2, before its barrier: the spots of turns to come, where it is
 * time. After it those of n + 1 and n + 2 are known. A block's barriers need not be more than those
 * of turns with is_met. strips: tiles of the width of all members; above 1, a column of tiles of
 * all members comes before the next one. */
template <typename F>
static __device__ __forceinline__ void look_ahead(spot spots[SPOTS], const plan &of, int n,
                                                  int many, int run, int strips, F fill)
{
    if ((n & (LOOKERS - 1)) != LOOKERS - 2) return;
    const int turn = n + 2 + (int)threadIdx.x / 32, units = (int)of.units[of.group.members];
    int unit = unit_of(units, many, turn);
    if (strips > 1 && unit < units) {
        const int down = units / strips;
        unit = unit % down * strips + unit / down, run = 1;
    }
    look_up(&spots[turn & (SPOTS - 1)], of, unit, run, fill);
    __syncwarp();
}
static __device__ __forceinline__ bool is_met(int n)
{
    return (n & 3) == 2;
}

/* Whether `next` is the tile below, beside another in the same member. */
static __device__ __forceinline__ bool is_below(const spot &next, const spot &p)
{
    return next.exists && next.index == p.index && next.k == p.k && next.i == p.i + 1;
}
static __device__ __forceinline__ bool is_beside(const spot &next, const spot &p)
{
    return next.exists && next.index == p.index && next.i == p.i && next.k == p.k + 1;
}
