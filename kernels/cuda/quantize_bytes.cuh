/* Inside the way of quantize to bytes: a thread's patch of a tile, its magnitudes, the scales of
 * its rows and columns. */
#pragma once

#include "kernels/cuda/dots.cuh"
#include "kernels/cuda/quantize_strips.cuh"
#include "kernels/cuda/quantize_turned.cuh"

/* where elements come from; gathered, with weights; gradients of what the SwiGLU is of */
enum { LYING, GATHERED, SWIGLU, WEIGHTED, GRADIENT };

enum { BESIDE = 4 }; /* tiles of a strip beside each other, at most */

/* A warp's patches: ACROSS of them beside each other. */
template <int KIND, int DIRS, int FROM> struct layout {
    enum {
        IS_PLANAR = kind<KIND>::IS_PLANAR,
        IN_ROWS = (DIRS & (ROW_CODES | ROW_VALUES)) != 0,
        IN_COLUMNS = (DIRS & (COLUMN_CODES | COLUMN_VALUES)) != 0,
        WORTH = (DIRS & (ROW_VALUES | COLUMN_VALUES)) != 0,
        ROW_SCALES = (DIRS & ROW_CODES) != 0, /* are stored */
        COLUMN_SCALES = (DIRS & COLUMN_CODES) != 0,
        TURNED = COLUMN_SCALES && !IS_PLANAR,
        ACROSS = IS_PLANAR && IN_COLUMNS ? 8 : 16,
        DOWN = 32 / ACROSS,
        SLOTS = FROM == SWIGLU     ? 2 * ROWS
                : FROM == GRADIENT ? 1
                                   : ROWS,
        RESIDENT = FROM == SWIGLU || FROM == GRADIENT ? 2 : 3,
        BY_TOKEN = FROM == GATHERED || FROM == WEIGHTED,
        BY_POWERS = FROM != WEIGHTED /* lines by pairs; registers do not hold weights as well */
    };
    static __device__ __forceinline__ int row(void)
    {
        return ((int)threadIdx.x / 32 / (16 / ACROSS) * DOWN + lane_of_warp() / ACROSS) * ROWS;
    }
    static __device__ __forceinline__ int column(void)
    {
        return ((int)threadIdx.x / 32 % (16 / ACROSS) * ACROSS + lane_of_warp() % ACROSS) * RUN;
    }
};

template <int KIND, int DIRS, int FROM> struct bytes_space {
    typedef layout<KIND, DIRS, FROM> at;
    uint4 slots[at::SLOTS][TILE_THREADS]; /* elements on their way, each thread's own */
    alignas(16) uint8_t codes[at::TURNED ? TURNED_BYTES : 16]; /* of columns, turned */
    alignas(16) uint32_t partial[at::IN_COLUMNS && KIND == LINES ? WARPS : 1][PAIRS];
    alignas(16) float enc[at::IN_COLUMNS && KIND == LINES ? TILE : 4];   /* of columns */
    strip strips[WARPS];                                                 /* each warp's own */
    uint32_t scales[BESIDE][at::IS_PLANAR && at::ROW_SCALES ? TILE : 1]; /* four of each row */
    uint32_t most[WARPS]; /* what warps found of the member */
    int nans[WARPS];
};

/* ---- elements ---------------------------------------------------------------------------------
 */

/* Sends for the patch of a tile `away` from the strip's, which has so many rows and columns; zeros
 * beyond them. token: of row `lane` of the warp's. */
template <typename AT, int FROM>
static __device__ __forceinline__ void send_patch(uint4 (*slots)[TILE_THREADS], const strip &p,
                                                  int64_t away, int height, int width, int token)
{
    const int first = AT::row(), column = AT::column();
    const int rows = column < width ? height - first : 0;
    const uint32_t up = (uint32_t)p.cols, pitch = FROM == SWIGLU ? 2 * up : up;
    uint4 *to = slots[0] + threadIdx.x;
    const mt_bf16 *from = p.plain + (rows > 0 ? away + column : 0);
    if (AT::BY_TOKEN) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int of = __shfl_sync(~0u, token, lane_of_warp() / AT::ACROSS * ROWS + i);
            copy_16(to + i * TILE_THREADS, from + (uint64_t)(uint32_t)of * pitch,
                    i < rows ? 16 : 0);
        }
        return;
    }
    from += rows > 0 ? (uint64_t)(uint32_t)first * pitch : 0;
    if (rows >= ROWS) {
#pragma unroll
        for (int i = 0; i < ROWS; i++, from += pitch) {
            copy_16(to + i * TILE_THREADS, from);
            if (FROM == SWIGLU) copy_16(to + (ROWS + i) * TILE_THREADS, from + up);
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
        const mt_bf16 *at = from + (i < rows ? (uint64_t)i * pitch : 0);
        copy_16(to + i * TILE_THREADS, at, i < rows ? 16 : 0);
        if (FROM == SWIGLU)
            copy_16(to + (ROWS + i) * TILE_THREADS, at + (i < rows ? up : 0), i < rows ? 16 : 0);
    }
}

/* The patch of the first tile, of rows as they lie: it takes registers alone. */
template <typename AT>
static __device__ __forceinline__ void load_patch(uint32_t x[ROWS][4], const strip &p)
{
    const int first = AT::row(), column = AT::column();
    const int rows = column < p.width ? p.height - first : 0;
    const uint32_t pitch = (uint32_t)p.cols;
    const mt_bf16 *from = p.plain + (uint64_t)(uint32_t)first * pitch + column;
#pragma unroll
    for (int i = 0; i < ROWS; i++, from += pitch) {
        uint4 q = make_uint4(0, 0, 0, 0);
        if (i < rows) q = __ldg((const uint4 *)from);
        x[i][0] = q.x, x[i][1] = q.y, x[i][2] = q.z, x[i][3] = q.w;
    }
}

/* Of a warp's rows of the tile `down` rows below, a lane each: what `of` rows has of them. */
template <typename AT, typename T>
static __device__ __forceinline__ T row_value(const T *of, const strip &p, int down, int height)
{
    const int lane = lane_of_warp(), r = AT::row() - lane / AT::ACROSS * ROWS + lane;
    if (lane >= AT::DOWN * ROWS || r >= height) return 0;
    return of[p.first_row + down + r];
}

/* Elements times a weight, rounded. */
static __device__ __forceinline__ uint4 weighted(const uint4 &x, float weight)
{
    const uint32_t w[4] = { x.x, x.y, x.z, x.w };
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = bf16_pair(weight * low_bf16(w[i]), weight * high_bf16(w[i]));
    return make_uint4(y[0], y[1], y[2], y[3]);
}

/* weight: of row `lane` of the warp's. Columns beyond the tile's `width` stay 0. */
template <typename AT, int FROM>
static __device__ __forceinline__ void
take_patch(uint32_t x[ROWS][4], const uint4 (*slots)[TILE_THREADS], float weight, int width)
{
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        uint4 q = slots[i][threadIdx.x];
        if (FROM == SWIGLU) q = swiglu_of(q, slots[ROWS + i][threadIdx.x]);
        if (FROM == WEIGHTED) {
            const float own = __shfl_sync(~0u, weight, lane_of_warp() / AT::ACROSS * ROWS + i);
            q = weighted(q, AT::column() < width ? own : 0);
        }
        x[i][0] = q.x, x[i][1] = q.y, x[i][2] = q.z, x[i][3] = q.w;
    }
}

/* Makes a patch of gradients of z: those of its first half's columns take all of d, g and u, of its
 * second half's d and g. Dots, where they are wanted, are those of the first half's. */
template <typename AT>
static __device__ __forceinline__ void make_patch(uint32_t x[ROWS][4], const job &j, const strip &p)
{
    enum { MANY = 4 }; /* rows whose loads are under way */
    const mt_bf16 *from = (const mt_bf16 *)j.p.sides[SOURCE].codes;
    const int half = p.cols / 2, column = (int)(p.plain - from) + AT::column();
    const bool second = column >= half;
    const int rows = AT::column() < p.width ? p.height - AT::row() : 0;
    const int64_t row = p.first_row + AT::row();
    const mt_bf16 *d = from + row * half + column - (second ? half : 0);
    const mt_bf16 *g = j.z + row * p.cols + column - (second ? half : 0);
    mt_eight_dots dots;
    static_assert(ROWS == 8, "dots");
#pragma unroll
    for (int first = 0; first < ROWS; first += MANY) {
        uint4 in[MANY][3];
#pragma unroll
        for (int i = 0; i < MANY; i++, d += half, g += p.cols) {
            in[i][0] = in[i][1] = in[i][2] = make_uint4(0, 0, 0, 0);
            if (first + i >= rows) continue;
            in[i][0] = __ldg((const uint4 *)d), in[i][1] = __ldg((const uint4 *)g);
            if (!second) in[i][2] = __ldg((const uint4 *)(g + half));
        }
#pragma unroll
        for (int i = 0; i < MANY; i++) {
            uint4 dg, du;
            swiglu_gradients(&dg, &du, in[i][0], in[i][1], in[i][2]);
            const uint4 q = second ? du : dg;
            uint32_t *to = x[first + i];
            to[0] = q.x, to[1] = q.y, to[2] = q.z, to[3] = q.w;
            dots.take(first + i, second ? 0 : mt_dot_of_eight(du, in[i][2]), 1);
        }
    }
    const int own = lane_of_warp() & 7, part = column & ~(DOTS_PART - 1);
    if (j.dots && part < half && AT::row() + own < p.height)
        j.dots[(row + own) * mt_dot_parts(half) + part / DOTS_PART] = dots.of[0];
}

/* ---- magnitudes -------------------------------------------------------------------------------
 */

/* Those of two rows a word, of two columns a word. */
struct reach {
    uint32_t rows[ROWS / 2], pairs[4], all;
    int nans;
};

static __device__ __forceinline__ uint32_t row_pair(const uint32_t x[2][4])
{
    const uint32_t a = magnitudes<4>(x[0]), b = magnitudes<4>(x[1]);
    return larger_halves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}

template <bool BY_ROWS>
static __device__ __forceinline__ void find_reach(reach *it, const uint32_t x[ROWS][4])
{
#pragma unroll
    for (int i = 0; BY_ROWS && i < ROWS; i += 2) it->rows[i / 2] = row_pair(x + i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t m = x[0][k];
#pragma unroll
        for (int i = 1; i < ROWS; i++) m = larger_pair(m, x[i][k]);
        it->pairs[k] = m & 0x7fff7fffu;
    }
    it->all = larger_half(BY_ROWS ? larger_halves(larger_halves(it->rows[0], it->rows[1]),
                                                  larger_halves(it->rows[2], it->rows[3]))
                                  : larger_halves(larger_halves(it->pairs[0], it->pairs[1]),
                                                  larger_halves(it->pairs[2], it->pairs[3])));
    it->nans = 0;
    if (it->all <= 0x7f80) return;
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
        uint32_t w[2][4];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const uint32_t v = x[i + k / 4][k % 4];
            w[k / 4][k % 4] = without_nans(v);
            it->nans += (w[k / 4][k % 4] ^ v) & 0x7fff ? 1 : 0;
            it->nans += (w[k / 4][k % 4] ^ v) & 0x7fff0000u ? 1 : 0;
        }
        it->rows[i / 2] = row_pair(w);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t m = larger_pair(w[0][k], w[1][k]) & 0x7fff7fffu;
            it->pairs[k] = i ? larger_halves(it->pairs[k], m) : m;
        }
    }
    it->all = larger_half(larger_halves(larger_halves(it->rows[0], it->rows[1]),
                                        larger_halves(it->rows[2], it->rows[3])));
}

/* The larger of the words of threads that differ by `far` and by `near`: those with both bits of
 * their lane get the last word, .. */
static __device__ __forceinline__ uint32_t share_out(const uint32_t w[4], int far, int near)
{
    const bool up = lane_of_warp() & far, odd = lane_of_warp() & near;
    uint32_t keep[2], mine;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        keep[i] = up ? w[2 + i] : w[i];
        keep[i] = larger_halves(keep[i], __shfl_xor_sync(~0u, up ? w[i] : w[2 + i], far));
    }
    mine = odd ? keep[1] : keep[0];
    return larger_halves(mine, __shfl_xor_sync(~0u, odd ? keep[0] : keep[1], near));
}

/* ---- scales -----------------------------------------------------------------------------------
 */

/* What elements are multiplied by, a power of two, has no more bits than bf16. */
static __device__ __forceinline__ uint32_t power_pair(uint32_t exponents)
{
    const uint32_t low = (254 - (exponents & 0xffff)) << 7, high = (254 - (exponents >> 16)) << 7;
    return (low ? low : 0x40) | (high ? high : 0x40) << 16;
}
/* The exponents of two blocks of 32, from their magnitudes. */
static __device__ __forceinline__ uint32_t exponent_pair(const side &s, uint32_t most)
{
    const int32_t low = mt_e8m0_exponent(low_bf16(most), s.inverse, s.emax, s.options.scale_floor);
    const int32_t high =
        mt_e8m0_exponent(high_bf16(most), s.inverse, s.emax, s.options.scale_floor);
    return (uint32_t)low | (uint32_t)high << 16;
}

/* Of rows' blocks of 32, whose scales are left, if they are stored. */
template <typename AT>
static __device__ __forceinline__ void planar_rows(float enc[ROWS], const job &j,
                                                   uint32_t scales[TILE], const reach &it)
{
    const int word = lane_of_warp() & 3, row = AT::row() + word * 2;
    const uint32_t e = exponent_pair(j.p.sides[MT_ROW], share_out(it.rows, 2, 1));
    const uint32_t own = power_pair(e);
    uint8_t *to = (uint8_t *)(scales + row) + AT::column() / 32;
    if (AT::ROW_SCALES) to[0] = (uint8_t)e, to[4] = (uint8_t)(e >> 16);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint32_t w = __shfl_sync(~0u, own, (lane_of_warp() & ~3) + k);
        enc[k * 2] = low_bf16(w), enc[k * 2 + 1] = high_bf16(w);
    }
}

/* Scales of rows of so many columns to where they go: in whole words, and those of a whole strip at
 * once, for what is written to a part of a sector costs as much as the sector. */
static __device__ __forceinline__ void put_row_scales(const uint32_t (*scales)[TILE],
                                                      const strip &p, int cols)
{
    const lattice l = scales_of(p.parts[MT_ROW]);
    const int r = (int)threadIdx.x, blocks = (cols + 31) / 32;
    if (r >= p.height) return;
    uint8_t *to = l.at + scale_offset(l, r, 0);
    if (!l.swizzled && blocks == 16 && (uintptr_t)to % 16 == 0) {
        store_16(to, scales[0][r], scales[1][r], scales[2][r], scales[3][r]);
        return;
    }
    if (!l.swizzled && blocks == 8 && (uintptr_t)to % 8 == 0) {
        store_8(to, scales[0][r], scales[1][r]);
        return;
    }
    for (int i = 0; i * 4 < blocks; i++) {
        const uint32_t w = scales[i][r];
        to = l.at + scale_offset(l, r, i * 4);
        if (blocks - i * 4 >= 4 && (uintptr_t)to % 4 == 0)
            store_4(to, w);
        else
            for (int b = 0; b < 4 && i * 4 + b < blocks; b++) store_1(to + b, w >> b * 8);
    }
}

/* Of columns' blocks of 32: a warp's rows. */
template <typename AT>
static __device__ __forceinline__ void planar_columns(float enc[RUN], const job &j, const strip &p,
                                                      const reach &it)
{
    const uint32_t e = exponent_pair(j.p.sides[MT_COL], share_out(it.pairs, 16, 8));
    const uint32_t own = power_pair(e);
    const int c = AT::column(), block = AT::row() / 32;
    uint32_t stored[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int from = (lane_of_warp() & 7) + k * 8;
        const uint32_t w = __shfl_sync(~0u, own, from);
        enc[k * 2] = low_bf16(w), enc[k * 2 + 1] = high_bf16(w);
        stored[k] = 0x00fe00feu - (w >> 7 & 0x00ff00ffu);
    }
    if (!AT::COLUMN_SCALES) return;
    if (lane_of_warp() >= 8 || c >= p.width || block * 32 >= p.height) return;
    const lattice l = scales_of(p.parts[MT_COL]);
    uint8_t *to = l.at + scale_offset(l, c, block);
    if (!l.swizzled && l.line == 1 && (uintptr_t)to % 8 == 0) {
        store_8(to, __byte_perm(stored[0], stored[1], 0x6420),
                __byte_perm(stored[2], stored[3], 0x6420));
        return;
    }
#pragma unroll
    for (int i = 0; i < RUN; i++, to += line_step(l)) store_1(to, stored[i / 2] >> i % 2 * 16);
}

/* Blocks of 128 whose scales are not powers of two. */
static __device__ __forceinline__ float2 odd_cell(const side &s, uint32_t magnitude)
{
    const float enc = mt_encode_scale(mt_f32_from_bits(magnitude << 16), s.max, false, s.overflow);
    return make_float2(enc, 1.0f / enc);
}
static __device__ __forceinline__ float2 line_cell(const side &s, uint32_t magnitude)
{
    if (!s.options.pow2) return odd_cell(s, magnitude);
    const cell e = pow2_cell(s, magnitude << 16);
    return make_float2(e.enc, e.dec);
}

/* Of rows' blocks of 128. */
template <typename AT>
static __device__ __forceinline__ void line_rows(float enc[ROWS], const job &j, const strip &p,
                                                 const reach &it)
{
    const int lane = lane_of_warp(), row = AT::row() + (lane >> 2 & 3) * 2 + (lane & 1);
    uint32_t most = share_out(it.rows, 8, 4);
#pragma unroll
    for (int near = 1; near < 4; near *= 2)
        most = larger_halves(most, __shfl_xor_sync(~0u, most, near));
    const float2 e = line_cell(j.p.sides[MT_ROW], lane & 1 ? most >> 16 : most & 0xffff);
    const lattice l = scales_of(p.parts[MT_ROW]);
    if (AT::ROW_SCALES && !(lane & 2) && row < p.height)
        store_4(l.at + scale_offset(l, row, 0) * 4, mt_f32_bits(e.y));
#pragma unroll
    for (int i = 0; i < ROWS; i++) enc[i] = __shfl_sync(~0u, e.x, (lane & 16) + i / 2 * 4 + i % 2);
}

/* Leaves the magnitudes of a warp's columns. */
static __device__ __forceinline__ void leave_pairs(uint32_t partial[WARPS][PAIRS], const reach &it)
{
    uint32_t m[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        m[k] = larger_halves(it.pairs[k], __shfl_xor_sync(~0u, it.pairs[k], 16));
    if (lane_of_warp() < 16)
        *(uint4 *)(partial[threadIdx.x / 32] + lane_of_warp() * 4) =
            make_uint4(m[0], m[1], m[2], m[3]);
}

/* Of columns' blocks of 128, from what all warps have left: a thread a column. */
template <typename AT>
static __device__ __forceinline__ void line_columns(float enc[TILE], const job &j, const strip &p,
                                                    const uint32_t partial[WARPS][PAIRS])
{
    const int c = (int)threadIdx.x;
    uint32_t most = 0;
    if (c >= TILE) return;
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = larger_halves(most, partial[w][c / 2]);
    const float2 e = line_cell(j.p.sides[MT_COL], c & 1 ? most >> 16 : most & 0xffff);
    enc[c] = e.x;
    const lattice l = scales_of(p.parts[MT_COL]);
    if (AT::COLUMN_SCALES && c < p.width)
        store_4(l.at + scale_offset(l, c, 0) * 4, mt_f32_bits(e.y));
}
