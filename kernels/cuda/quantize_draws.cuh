/* The bits that a tile's elements are rounded by (sr): in shared memory, or drawn where they are
 * needed. Included by quantize_tile.cuh. */
#pragma once

/* Draw d of row r of a tile: 8 elements' bits, placed so that columns do not meet in a bank. */
static __device__ __forceinline__ int draw_place(int r, int d)
{
    return r * TILE + (d ^ (r / SEGMENT & 7)) * 8;
}

static __device__ __forceinline__ uint32_t draw_step(const job &j)
{
    return j.step + (j.first_step ? *j.first_step : 0);
}

/* The bits of eight elements of a row. */
static __device__ __forceinline__ void draw(uint32_t w[4], const job &j, const tile &t, int r,
                                            int d)
{
    const uint32_t counter[4] = { (uint32_t)(t.c0 / 8) + (uint32_t)d,
                                  (uint32_t)t.r0 + (t.index ? 0 : j.first_row) + (uint32_t)r,
                                  j.first_member + (uint32_t)t.index, draw_step(j) };
    mt_philox(w, counter, j.key);
}

static __device__ __forceinline__ void draw_tile(uint16_t *random, const job &j, const tile &t)
{
    for (int i = threadIdx.x; i < t.rows * (TILE / 8); i += TILE_THREADS) {
        int r = i / (TILE / 8), d = i % (TILE / 8);
        uint32_t w[4];
        if (d * 8 >= t.cols) continue;
        draw(w, j, t, r, d);
        *(uint4 *)(random + draw_place(r, d)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

/* Where bits of a tile's elements come from: memory, or NULL: drawn where they are needed, so that
 * each of a column's takes a draw of eight. */
struct source_of_bits {
    const uint16_t *random;
    const job &j;
    const tile &t;
};

template <int DIR>
static __device__ __noinline__ void draw_segment_bits(int32_t bits[SEGMENT], const job &j,
                                                      const tile &t, int line, int at)
{
    uint32_t w[4];
#pragma unroll 1
    for (int i = 0; i < SEGMENT; i++) {
        const int r = DIR == MT_ROW ? line : at * SEGMENT + i;
        const int c = DIR == MT_ROW ? at * SEGMENT + i : line;
        if (DIR == MT_COL || i % 8 == 0) draw(w, j, t, r, c / 8);
        bits[i] = (int32_t)(w[c % 8 / 2] >> c % 2 * 16 & 0xffff);
    }
}

template <int DIR>
static __device__ __forceinline__ void get_random(int32_t bits[SEGMENT], const source_of_bits &from,
                                                  int line, int at)
{
    if (!from.random) {
        draw_segment_bits<DIR>(bits, from.j, from.t, line, at);
        return;
    }
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) {
        int r = DIR == MT_ROW ? line : at * SEGMENT + i,
            c = DIR == MT_ROW ? at * SEGMENT + i : line;
        bits[i] = from.random[draw_place(r, c / 8) + c % 8];
    }
}
