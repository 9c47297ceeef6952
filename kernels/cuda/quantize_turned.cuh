/* Inside the way of quantize to bytes: codes of columns on their way out, in shared memory. */
#pragma once

#include "kernels/cuda/quantize_patch.cuh"

/* A line has what may be left of the tile above, then two tiles of which one is worked on. Lines of
 * the 16 patches beside each other lie 32 bytes apart in banks, such as are 32 lines apart 8 bytes:
 * neither patches nor chunks of lines meet there. */
enum { LINE_PITCH = SECTOR + 2 * TILE + 16 };
enum { TURNED_BYTES = TILE * LINE_PITCH + TILE / 8 * 32 + 32 };
static_assert(8 * LINE_PITCH % 128 == 0, "of patches beside each other, the same bank");

static __device__ __forceinline__ int line_place(int c)
{
    return c * LINE_PITCH + (c >> 3) * 32 + (c >> 5) * 8;
}
/* Of the tile in `half` of the lines. */
static __device__ __forceinline__ uint8_t *tile_lines(uint8_t *codes, int half)
{
    return codes + SECTOR + half * TILE;
}

/* Leaves the codes of one of a patch's columns, c, the patch beginning at `to`. above: they are
 * left to the tile below, too. */
static __device__ __forceinline__ void leave_column(uint8_t *to, int c, bool above, uint32_t low,
                                                    uint32_t high)
{
    *(uint2 *)(to + c * LINE_PITCH) = make_uint2(low, high);
    if (above) *(uint2 *)(to + c * LINE_PITCH - 2 * TILE) = make_uint2(low, high);
}
/* Whether rows from `row` on of the second half are such. */
static __device__ __forceinline__ bool is_left_above(int half, int row)
{
    return half && row >= TILE - SECTOR;
}

/* Those of all of a patch's columns, where rows and columns have one scale: codes of its rows. */
static __device__ __forceinline__ void leave_turned(uint8_t *to, bool above,
                                                    const uint32_t rows[ROWS][2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t x[2][4], y[2][4];
#pragma unroll
        for (int i = 0; i < ROWS; i++) x[i / 4][i % 4] = rows[i][h];
        turn_bytes(y[0], x[0]), turn_bytes(y[1], x[1]);
#pragma unroll
        for (int c = 0; c < 4; c++) leave_column(to, h * 4 + c, above, y[0][c], y[1][c]);
    }
}

/* Eight chunks of each of four lines are a warp's, four times. */
enum { CHUNK_LINES = TILE / 32, CHUNK_STEP = WARPS * LINE_PITCH + 32 };
static_assert(WARPS == 8 && TILE == 128, "a warp's lines are 32 apart, its next ones 8 below");

static __device__ __forceinline__ int chunk_line(void)
{
    return (int)threadIdx.x / 32 + lane_of_warp() / 8 * 32;
}
static __device__ __forceinline__ int chunk_byte(void)
{
    return lane_of_warp() % 8 * 16;
}

/* Lines that begin at multiples of 16 bytes. */
static __device__ __forceinline__ void put_even_codes(const uint8_t *lines, uint8_t *to,
                                                      uint32_t pitch, int cols, int bytes)
{
    const int first = chunk_line();
    const uint8_t *from = lines + line_place(first) + chunk_byte();
    uint8_t *p = to + (uint64_t)pitch * (uint32_t)first + chunk_byte();
    if (chunk_byte() >= bytes) return;
#pragma unroll
    for (int i = 0; i < CHUNK_LINES; i++, p += (uint64_t)pitch * WARPS) {
        const uint2 a = *(const uint2 *)(from + i * CHUNK_STEP);
        const uint2 b = *(const uint2 *)(from + i * CHUNK_STEP + 8);
        if (first + i * WARPS < cols) store_16(p, a.x, a.y, b.x, b.y);
    }
}

/* Lines that begin anywhere leave in sectors, which are written once and whole: what begins a
 * line's last one is left to the tile below, if that is the block's next one. */
struct unevenly {
    const uint8_t *lines;
    bool after, on; /* a tile has left ends of its lines to this one; this one does so */
};

/* Sixteen bytes of a line, from `place` on, less than none being those of the tile above. */
static __device__ __forceinline__ void chunk_at(uint32_t q[4], const uint8_t *line, int place)
{
    const uint32_t *w = (const uint32_t *)(line + (place & ~3));
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = __funnelshift_r(w[i], w[i + 1], place * 8);
}

/* Lines' chunks that are not whole: a thread has the begin of a line, or its end. */
static __device__ __forceinline__ void put_ends_of(const unevenly &u, uint8_t *codes,
                                                   uint32_t pitch, int cols, int bytes)
{
    static_assert(TILE_THREADS == 2 * TILE, "a line has two ends");
    const int c = (int)threadIdx.x % TILE;
    const uint8_t *line = u.lines + line_place(c);
    uint8_t *p = codes + (uint64_t)pitch * (uint32_t)c;
    const int begin = (int)((uintptr_t)p & (SECTOR - 1)), end = begin + bytes;
    const int first = begin & ~15, last = end & ~15;
    uint32_t q[4];
    if (c >= cols) return;
    p -= begin;
    if (threadIdx.x < TILE) {
        if (u.after || first == begin || (!u.on && last == first)) return;
        chunk_at(q, line, first - begin);
        put_tail(p + first, q, begin - first);
        return;
    }
    if (u.on) return;
    if (last > TILE) { /* a whole chunk behind those of a line */
        chunk_at(q, line, TILE - begin);
        store_16(p + TILE, q[0], q[1], q[2], q[3]);
    }
    chunk_at(q, line, last - begin);
    if (u.after || last != first) {
        put_head(p + last, q, end - last);
    } else { /* begin and end */
        for (int b = begin; b < end; b++) store_1(p + b, one_of(q, (b & 15) >> 2) >> (b & 3) * 8);
    }
}

static __device__ __forceinline__ void put_uneven_codes(const unevenly &u, uint8_t *codes,
                                                        uint32_t pitch, int cols, int bytes)
{
    const int first = chunk_line(), low = u.after ? -SECTOR : 0, high = u.on ? TILE : bytes - 16;
    const uint8_t *line = u.lines + line_place(first);
    uint8_t *p = codes + (uint64_t)pitch * (uint32_t)first;
#pragma unroll
    for (int i = 0; i < CHUNK_LINES; i++, p += (uint64_t)pitch * WARPS) {
        const int place = chunk_byte() - (int)((uintptr_t)p & (SECTOR - 1));
        uint32_t q[4];
        chunk_at(q, line + i * CHUNK_STEP, place);
        if (first + i * WARPS < cols && place >= low && place <= high)
            store_16(p + place, q[0], q[1], q[2], q[3]);
    }
    if (!(u.after && u.on)) put_ends_of(u, codes, pitch, cols, bytes);
}
