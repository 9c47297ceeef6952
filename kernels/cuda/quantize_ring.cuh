/* Inside the ways of quantize to nvfp4: codes of columns on their way out, in shared memory. */
#pragma once

#include "kernels/cuda/quantize_patch.cuh"

/* Lines of turned codes are rings of TILES tiles' words, so that those of the tile above are at
 * hand. How the words of a line change places: neither patches nor chunks of lines that lie
 * `SPREAD` apart meet in a bank. */
enum { LINE_WORDS = TILE / 8, LINE_BYTES = TILE / 2 };
static __device__ __forceinline__ int line_mask(int c)
{
    return c >> 3 | (c & 1) << 4;
}

/* Leaves the codes of one of a patch's columns, c; half: of the rings. */
static __device__ __forceinline__ void leave_codes(uint32_t *codes, int half, int c, uint32_t eight)
{
    const int word = half * LINE_WORDS + patch_row() / ROWS;
    codes[c * LINE_WORDS * 2 + (word ^ line_mask(c))] = eight;
}

/* Lines that begin at multiples of 16 bytes. */
template <int TILES = 2>
static __device__ __forceinline__ void put_even_lines(const uint32_t *codes, int half, uint8_t *to,
                                                      int64_t pitch, int cols, int bytes)
{
    enum { LANES = LINE_WORDS / 4, STEP = TILE_THREADS / LANES };
    const int at = (int)(threadIdx.x % LANES), first = (int)(threadIdx.x / LANES);
    uint8_t *p = to + first * pitch + at * 16;
    if (at * 16 >= bytes) return;
#pragma unroll
    for (int i = 0; i < TILE / STEP; i++, p += STEP * pitch) {
        const int c = first + i * STEP;
        const int mask = line_mask(c), word = (half * LINE_WORDS + at * 4) ^ (mask & ~3);
        uint4 q = *(const uint4 *)(codes + c * LINE_WORDS * TILES + word);
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
template <int TILES = 2>
static __device__ __forceinline__ void get_chunk(uint32_t q[4], const uneven &u, int c, int place)
{
    const int line = c * LINE_BYTES * TILES ^ line_mask(c) * 4, first = u.half * LINE_BYTES + place;
    uint32_t w[5];
#pragma unroll
    for (int i = 0; i < 5; i++)
        w[i] = *(const uint32_t *)((const uint8_t *)u.codes +
                                   (((first + i * 4) & (LINE_BYTES * TILES - 4)) ^ line));
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = __funnelshift_r(w[i], w[i + 1], place * 8);
}

/* Lines' chunks that are not whole: a thread has the begin of a line, or its end. */
template <int TILES = 2>
static __device__ __forceinline__ void put_ends(const uneven &u, uint8_t *codes, int64_t pitch,
                                                int cols, int bytes)
{
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
        get_chunk<TILES>(q, u, c, first - begin);
        put_tail(p + first, q, begin - first);
        return;
    }
    if (u.on) return;
    if (last > LINE_BYTES) { /* a whole chunk behind those of a line */
        get_chunk<TILES>(q, u, c, LINE_BYTES - begin);
        store_16(p + LINE_BYTES, q[0], q[1], q[2], q[3]);
    }
    get_chunk<TILES>(q, u, c, last - begin);
    if (u.after || last != first) {
        put_head(p + last, q, end - last);
    } else { /* begin and end */
        for (int b = begin; b < end; b++) store_1(p + b, one_of(q, (b & 15) >> 2) >> (b & 3) * 8);
    }
}

template <int TILES = 2>
static __device__ __forceinline__ void put_uneven_lines(const uneven &u, uint8_t *codes,
                                                        int64_t pitch, int cols, int bytes)
{
    enum { LANES = LINE_WORDS / 4, SPREAD = TILE * LANES / 32 /* of a warp's lines */ };
    const int k = (int)(threadIdx.x % LANES) * 16;
    int c = (int)(threadIdx.x / 32) + lane_of_warp() / LANES * SPREAD;
    uint8_t *p = codes + c * pitch;
#pragma unroll 2
    for (int i = 0; i < SPREAD / WARPS; i++, c += WARPS, p += WARPS * pitch) {
        const int begin = (int)((uintptr_t)p & (SECTOR - 1)), place = k - begin;
        uint32_t q[4];
        get_chunk<TILES>(q, u, c, place);
        if (c < cols && (u.after || place >= 0) && (u.on || place + 16 <= bytes))
            store_16(p + place, q[0], q[1], q[2], q[3]);
    }
    if (!(u.after && u.on)) put_ends<TILES>(u, codes, pitch, cols, bytes);
}
