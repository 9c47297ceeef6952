/* Inside the shortest ways of quantize: codes of columns on their way out, in shared memory. */
#pragma once

#include "kernels/cuda/quantize_patch.cuh"

/* Lines of turned codes are rings of TILES tiles' words, so that those of the tile above are at
 * hand. How the words of a line change places: neither patches nor chunks of lines that lie
 * `SPREAD` apart meet in a bank. */
template <int KIND> static __device__ __forceinline__ int line_mask(int c)
{
    const int patch = c >> 3;
    return patches<KIND>::HALF ? patch | (c & 1) << 4
                               : (patch ^ patch >> 3) << 1 | (patch >> 2 & 1);
}

/* Leaves the codes of one of a patch's columns, c; half: of the rings. */
template <int KIND>
static __device__ __forceinline__ void leave_codes(uint32_t *codes, int half, int c, uint32_t low,
                                                   uint32_t high)
{
    typedef patches<KIND> at;
    const int word = half * at::LINE + patch_row() / ROWS * at::WORDS, mask = line_mask<KIND>(c);
    uint32_t *to = codes + c * at::LINE * 2 + (word ^ (mask & ~(at::WORDS - 1)));
    if (at::HALF)
        *to = low;
    else
        *(uint2 *)to = mask & 1 ? make_uint2(high, low) : make_uint2(low, high);
}

/* Whether all lines of columns are known to begin and end at multiples of 16 bytes. */
static inline bool has_even_lines(const job *j)
{
    const side *col = &j->p.sides[MT_COL];
    const mt_group *g = &j->p.group;
    const bool whole = mt_group_mode_of(g) == MT_GROUP_UNIFORM && g->m % 32 == 0;
    return (whole || col->line) && (uintptr_t)col->codes % 16 == 0;
}

/* Lines that begin at multiples of 16 bytes. */
template <int KIND, int TILES = 2>
static __device__ __forceinline__ void put_even_lines(const uint32_t *codes, int half, uint8_t *to,
                                                      int64_t pitch, int cols, int bytes)
{
    enum { LINE = patches<KIND>::LINE, LANES = LINE / 4, STEP = TILE_THREADS / LANES };
    const int at = (int)(threadIdx.x % LANES), first = (int)(threadIdx.x / LANES);
    uint8_t *p = to + first * pitch + at * 16;
    if (at * 16 >= bytes) return;
#pragma unroll
    for (int i = 0; i < TILE / STEP; i++, p += STEP * pitch) {
        const int c = first + i * STEP;
        const int mask = line_mask<KIND>(c), word = (half * LINE + at * 4) ^ (mask & ~3);
        uint4 q = *(const uint4 *)(codes + c * LINE * TILES + word);
        if (mask & 2) q = make_uint4(q.z, q.w, q.x, q.y);
        if (mask & 1) q = make_uint4(q.y, q.x, q.w, q.z);
        if (c < cols) store_16(p, q.x, q.y, q.z, q.w);
    }
}

/* Lines that begin anywhere leave in sectors, which are written once and whole: what begins a
 * line's last one is left to the tile below, if that is the block's next one. */
struct uneven {
    const uint32_t *codes;
    int half;
    bool after, on; /* a tile has left ends of its lines to this one; this one does so */
};

/* Sixteen bytes of line c, from `place` on, less than none being those of the tile above. */
template <int KIND, int TILES = 2>
static __device__ __forceinline__ void get_chunk(uint32_t q[4], const uneven &u, int c, int place)
{
    enum { LINE = patches<KIND>::LINE * 4 };
    const int line = c * LINE * TILES ^ line_mask<KIND>(c) * 4, first = u.half * LINE + place;
    uint32_t w[5];
#pragma unroll
    for (int i = 0; i < 5; i++)
        w[i] = *(const uint32_t *)((const uint8_t *)u.codes +
                                   (((first + i * 4) & (LINE * TILES - 4)) ^ line));
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = __funnelshift_r(w[i], w[i + 1], place * 8);
}

/* Lines' chunks that are not whole: a thread has the begin of a line, or its end. */
template <int KIND, int TILES = 2>
static __device__ __forceinline__ void put_ends(const uneven &u, uint8_t *codes, int64_t pitch,
                                                int cols, int bytes)
{
    enum { LINE = patches<KIND>::LINE * 4 };
    static_assert(TILE_THREADS == 2 * TILE, "a line has two ends");
    const int c = (int)(threadIdx.x % TILE);
    uint8_t *p = codes + c * pitch;
    const int begin = (int)((uintptr_t)p & (SECTOR - 1)), end = begin + bytes;
    const int first = begin & ~15, last = end & ~15;
    uint32_t q[4];
    if (c >= cols) return;
    p -= begin;
    if (threadIdx.x < TILE) {
        if (u.after || first == begin || (!u.on && last == first)) return;
        get_chunk<KIND, TILES>(q, u, c, first - begin);
        put_tail(p + first, q, begin - first);
        return;
    }
    if (u.on) return;
    if (last > LINE) { /* a whole chunk behind those of a line */
        get_chunk<KIND, TILES>(q, u, c, LINE - begin);
        store_16(p + LINE, q[0], q[1], q[2], q[3]);
    }
    get_chunk<KIND, TILES>(q, u, c, last - begin);
    if (u.after || last != first) {
        put_head(p + last, q, end - last);
    } else { /* begin and end */
        for (int b = begin; b < end; b++) store_1(p + b, one_of(q, (b & 15) >> 2) >> (b & 3) * 8);
    }
}

template <int KIND, int TILES = 2>
static __device__ __forceinline__ void put_uneven_lines(const uneven &u, uint8_t *codes,
                                                        int64_t pitch, int cols, int bytes)
{
    enum { LANES = patches<KIND>::LINE / 4, SPREAD = TILE * LANES / 32 /* of a warp's lines */ };
    const int k = (int)(threadIdx.x % LANES) * 16;
    int c = (int)(threadIdx.x / 32) + lane_of_warp() / LANES * SPREAD;
    uint8_t *p = codes + c * pitch;
#pragma unroll 2
    for (int i = 0; i < SPREAD / WARPS; i++, c += WARPS, p += WARPS * pitch) {
        const int begin = (int)((uintptr_t)p & (SECTOR - 1)), place = k - begin;
        uint32_t q[4];
        get_chunk<KIND, TILES>(q, u, c, place);
        if (c < cols && (u.after || place >= 0) && (u.on || place + 16 <= bytes))
            store_16(p + place, q[0], q[1], q[2], q[3]);
    }
    if (!(u.after && u.on)) put_ends<KIND, TILES>(u, codes, pitch, cols, bytes);
}

/* Turned nibbles and their scales to where they go. */
template <int TILES = 2>
static __device__ __forceinline__ void put_turned(const uint8_t *scales, const frame &f,
                                                  const uneven &u)
{
    const target &to = f.to[MT_COL];
    const int bytes = ((to.padded ? (int)TILE : f.t.rows) + 1) / 2;
    if (to.even)
        put_even_lines<NIBBLES, TILES>(u.codes, u.half, to.codes, to.pitch, f.t.cols, bytes);
    else
        put_uneven_lines<NIBBLES, TILES>(u, to.codes, to.pitch, f.t.cols, bytes);
    const int block = (int)(threadIdx.x % SEGMENTS), line = (int)(threadIdx.x / SEGMENTS);
    if (block * SEGMENT >= f.t.rows) return;
    static_assert(TILE_THREADS == 32 * SEGMENTS, "a turn is 32 lines");
    const int64_t step = lines_step(to.scales);
    uint8_t *p = to.scales.at + scale_offset(to.scales, line, block);
#pragma unroll
    for (int i = 0; i < TILE; i += 32, p += step)
        if (line + i < f.t.cols) store_1(p, scales[threadIdx.x + i * SEGMENTS]);
}

/* Whether the tile of `next` is below that of f, in the same member. */
static __device__ __forceinline__ bool is_below(const frame &next, const frame &f)
{
    return next.t.index == f.t.index && next.t.c0 == f.t.c0 && next.t.r0 == f.t.r0 + TILE;
}
