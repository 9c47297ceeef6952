/* Strips: a few tiles of a member below, or beside, each other. Thread blocks that have one each,
 * in the order in which the card begins them, come nearer to a copy's speed than resident ones that
 * take turns, if they need not look up where it lies: the plan writes that ahead, and a block reads
 * it at once.
 */
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

/* A strip. In the table it is that in the first column of tiles, and nobody knows `whole` yet; a
 * warp then moves its own. */
struct alignas(16) strip {
    part parts[MT_DIR_COUNT];
    mt_bf16 *plain; /* its first element as it lies; where rows are gathered, the first token's */
    int64_t plain_down;          /* elements from a tile to the one below */
    int64_t first_row;           /* among those of all members */
    int index, cols;             /* of the member */
    int rows;                    /* 0: there is none */
    int height, width;           /* of the tile */
    int span;                    /* columns of the strip */
    uint32_t seen[MT_DIR_COUNT]; /* bits of the member's amaxes when the strip was begun */
    int row;                     /* the tile's first in the member */
};

static __device__ __forceinline__ lattice scales_of(const part &d)
{
    return lattice{ d.scales, d.line, d.block, d.swizzled };
}
static __device__ __forceinline__ bool is_even(const strip &p, int dir)
{
    const part &d = p.parts[dir];
    return d.aligned && (d.padded || p.height % 16 == 0);
}

/* Side `which` of a member's first tile; all of a part but `whole`. */
static __device__ __forceinline__ void fill_part(part *to, const side &s, const member &m,
                                                 int which)
{
    const shape p = shape_of(s, m.rows, m.cols);
    const int wide = s.scale == MT_SCALE_F32 ? 4 : 1;
    const int64_t along = p.tile, lines = TILE * p.pitch;
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
    to->padded = s.padded;
    to->aligned = (((uintptr_t)to->codes | (uintptr_t)p.pitch) & 15) == 0;
    if (s.decoded) { /* elements as they lie */
        to->codes = s.codes + m.offset * 2, to->pitch = (uint32_t)m.cols * 2;
        to->codes_down = TILE * m.cols * 2, to->codes_across = TILE * 2;
    }
}

/* Strip n of member m in the first column of tiles. */
static __device__ __forceinline__ void fill_strip(strip *to, const plan &p, const strip_table &t,
                                                  const member &m, int index, int n)
{
    const int i = n * (t.rows / TILE), left = (int)m.rows - n * t.rows;
    const int wide = t.swiglu ? 2 : 1;
    strip s = {};
#pragma unroll
    for (int k = 0; k < MT_DIR_COUNT; k++) {
        part &d = s.parts[k];
        if (!p.sides[k].present) continue;
        fill_part(&d, p.sides[k], m, k);
        d.codes += i * d.codes_down, d.scales += i * d.scales_down;
    }
    s.plain = (mt_bf16 *)p.sides[SOURCE].codes;
    if (!t.gathered) {
        s.plain_down = m.cols * wide * TILE;
        s.plain += m.offset * wide + i * s.plain_down;
    }
    s.first_row = m.offset / m.cols + i * TILE;
    s.index = index, s.cols = (int)m.cols, s.row = i * TILE;
    s.rows = left < t.rows ? left : t.rows;
    s.height = left < TILE ? left : (int)TILE;
    *to = s;
}

/* Moves a strip to the column `from` of its rows. */
static __device__ __forceinline__ void set_span(strip *own, int from, int wide)
{
    const int left = own->cols - from;
    own->plain += from;
    own->span = left < wide * TILE ? left : wide * (int)TILE;
    own->width = left < TILE ? left : (int)TILE;
}

/* By a warp: its block's strip in its block's column of strips; false: there is none. down: a
 * column of tiles of all members comes before the next, so that what rows are gathered from, as
 * wide as that, stays in the cache for as long as it is read. */
static __device__ __forceinline__ bool take_strip(strip *own, const strip_table &t, int64_t cols,
                                                  bool down)
{
    const int lane = lane_of_warp();
    const uint32_t wide = (uint32_t)t.wide * TILE, most = (uint32_t)t.most;
    const uint32_t across = (uint32_t)((cols + wide - 1) / wide);
    const uint32_t slow = blockIdx.x / (down ? most : across);
    const uint32_t fast = blockIdx.x - slow * (down ? most : across);
    const uint32_t n = down ? fast : slow, k = down ? slow : fast;
    static_assert(sizeof(strip) % 16 == 0 && sizeof(strip) <= 512, "a warp reads it at once");
    if (lane < (int)sizeof(strip) / 16)
        ((uint4 *)own)[lane] = __ldcg((const uint4 *)(t.strips + n) + lane);
    __syncwarp();
    if (own->rows == 0) return false;
    if (lane < MT_DIR_COUNT) {
        part *d = &own->parts[lane];
        const int64_t tiles = (int64_t)k * t.wide;
        d->codes += tiles * d->codes_across, d->scales += tiles * d->scales_across;
    }
    if (lane == MT_DIR_COUNT) set_span(own, (int)(k * wide), t.wide);
    __syncwarp();
    return true;
}

/* By a warp: from a tile to the one below, of `height` rows. */
static __device__ __forceinline__ void step_down(strip *own, int height)
{
    const int lane = lane_of_warp();
    __syncwarp();
    if (lane < MT_DIR_COUNT) {
        part *d = &own->parts[lane];
        d->codes += d->codes_down, d->scales += d->scales_down;
    }
    if (lane == MT_DIR_COUNT)
        own->plain += own->plain_down, own->first_row += TILE, own->row += TILE,
            own->height = height;
    __syncwarp();
}

/* By a warp: from a tile to the one beside it, of `width` columns. Scales of rows stay: they are of
 * the strip. */
static __device__ __forceinline__ void step_right(strip *own, int width)
{
    const int lane = lane_of_warp();
    __syncwarp();
    if (lane < MT_DIR_COUNT) {
        part *d = &own->parts[lane];
        d->codes += d->codes_across;
        if (lane == MT_COL) d->scales += d->scales_across;
    }
    if (lane == MT_DIR_COUNT) own->plain += TILE, own->width = width;
    __syncwarp();
}
