/* Inside quantize of rotated columns (rht) of nvfp4: a warp's elements in registers, as the tensor
 * cores take them, of bf16 rows that begin at multiples of 16 bytes. */
#pragma once

#include "kernels/cuda/quantize_choose.cuh"
#include "kernels/cuda/quantize_decoded.cuh"
#include "kernels/cuda/quantize_patch.cuh"

enum { LANE_ROWS = 4, COLUMNS = 8, CHUNK_WORDS = COLUMNS / 2 };

/* A warp has sixteen rows, as x[LANE_ROWS][WORDS] of each thread. Of four threads each has four of
 * them: eight elements from its first column on (WORDS is CHUNK_WORDS), or these and eight TILE / 2
 * columns further (2 CHUNK_WORDS). That makes WORDS squares of sixteen columns: of eight such
 * threads, with one column each of the first half of their words and one of the last. */
static __device__ __forceinline__ int first_column(void)
{
    return lane_of_warp() / 4 * COLUMNS;
}

/* The first of a thread's rows among its warp's. */
static __device__ __forceinline__ int first_row(void)
{
    return lane_of_warp() % 4 * LANE_ROWS;
}

/* Of rows `row` below `from`, a part of 16 WORDS columns; as far as the warp's sixteen are there.
 */
template <int WORDS>
static __device__ __forceinline__ void load_lanes(uint32_t x[LANE_ROWS][WORDS], const mt_bf16 *from,
                                                  uint32_t pitch, const uint32_t row[LANE_ROWS],
                                                  int rows, int cols)
{
    enum { CHUNKS = WORDS / CHUNK_WORDS };
    const uint4 *p[LANE_ROWS];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++)
        p[i] = (const uint4 *)((const char *)(from + first_column()) + (uint64_t)row[i] * pitch);
    const auto load = [&](int i, int h, bool inside) {
        uint4 q = make_uint4(0, 0, 0, 0);
        if (inside) q = __ldg(p[i] + h * (TILE / COLUMNS / 2));
        x[i][h * 4] = q.x, x[i][h * 4 + 1] = q.y, x[i][h * 4 + 2] = q.z, x[i][h * 4 + 3] = q.w;
    };
    if (rows >= SEGMENT && cols >= 16 * WORDS) {
#pragma unroll
        for (int i = 0; i < CHUNKS * LANE_ROWS; i++) load(i / CHUNKS, i % CHUNKS, true);
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNKS * LANE_ROWS; i++)
        load(i / CHUNKS, i % CHUNKS,
             first_row() + i / CHUNKS < rows && first_column() + i % CHUNKS * (TILE / 2) < cols);
}

/* The square of columns c of all halves. */
template <int WORDS>
static __device__ __forceinline__ void take_square(uint32_t square[4],
                                                   const uint32_t x[LANE_ROWS][WORDS], int c)
{
    const uint32_t half = c % 2 ? 0x7632 : 0x5410;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i / 2 * 2, word = i % 2 * (WORDS / 2) + c / 2;
        square[i] = __byte_perm(x[row][word], x[row + 1][word], half);
    }
}

/* A thread's elements of its columns c, one of each half to a word. */
template <int WORDS>
static __device__ __forceinline__ void take_pairs(uint32_t z[4], const uint32_t x[LANE_ROWS][WORDS],
                                                  int c)
{
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++)
        z[i] = __byte_perm(x[i][c / 2], x[i][WORDS / 2 + c / 2], c % 2 ? 0x7632 : 0x5410);
}

/* The same of a square. */
static __device__ __forceinline__ void pair_columns(uint32_t z[4], const uint32_t square[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        z[i] = __byte_perm(square[i / 2 * 2], square[i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
}

/* Sign bits of such words where E2M1 codes have them, those of column g in the low half; no NaN has
 * one. */
static __device__ __forceinline__ uint32_t signs_of_columns(const uint32_t z[4])
{
    const uint32_t signs = 0xfbd9, even = 0x0f0f0f0fu; /* a byte of sign bits for each element */
    return ((bytes_at(z[0], z[2], signs) & even) | (bytes_at(z[1], z[3], signs) & ~even)) &
           0x88888888u;
}

/* Codes of such words, less their signs, of products with enc of each column. */
static __device__ __forceinline__ uint32_t nearest_nibbles(const uint32_t z[4], const float enc[2])
{
    uint32_t q = 0u - E2M1_BASE * 0x11111111u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        q += e2m1_above(fabsf(low_bf16(z[i])) * enc[0]) << 4 * i;
        q += e2m1_above(fabsf(high_bf16(z[i])) * enc[1]) << (4 * i + 16);
    }
    return q;
}
static __device__ __forceinline__ uint32_t drawn_nibbles(const uint32_t z[4], const float enc[2],
                                                         const uint32_t drawn[4])
{
    uint32_t w[4], bits[4];
    const float by[8] = { enc[0], enc[0], enc[0], enc[0], enc[1], enc[1], enc[1], enc[1] };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t half = i / 2 ? 0x7632 : 0x5410;
        w[i] = __byte_perm(z[i % 2 * 2], z[i % 2 * 2 + 1], half);
        bits[i] = __byte_perm(drawn[i % 2 * 2], drawn[i % 2 * 2 + 1], half);
    }
    return magnitude_nibbles(w, by, bits);
}

/* Squares of a warp whose sums may round: a bit each. Threads take half of the words from others
 * twice: each ends with a quarter. */
template <int WORDS>
static __device__ __forceinline__ uint32_t odd_squares(const uint32_t x[LANE_ROWS][WORDS])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    enum { HALF = WORDS / 2, OWN = WORDS / 4 };
    const int q = lane_of_warp() % 4;
    uint32_t sum[HALF], least[HALF], odd[OWN], any = 0, bits = 0;
#pragma unroll
    for (int k = 0; k < HALF; k++) {
        uint32_t a[2], b[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int w = h * HALF + k;
            a[h] =
                magnitude_sums(magnitude_sums(x[0][w], x[1][w]), magnitude_sums(x[2][w], x[3][w]));
            b[h] = smaller_pair(smaller_pair(x[0][w], x[1][w]), smaller_pair(x[2][w], x[3][w]));
        }
        sum[k] = magnitude_sums(q & 1 ? a[1] : a[0], __shfl_xor_sync(~0u, q & 1 ? a[0] : a[1], 1));
        least[k] = smaller_pair(q & 1 ? b[1] : b[0], __shfl_xor_sync(~0u, q & 1 ? b[0] : b[1], 1));
    }
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        const uint32_t a = __shfl_xor_sync(~0u, q & 2 ? sum[k] : sum[k + OWN], 2);
        const uint32_t b = __shfl_xor_sync(~0u, q & 2 ? least[k] : least[k + OWN], 2);
        odd[k] = sums_round(magnitude_sums(q & 2 ? sum[k + OWN] : sum[k], a),
                            smaller_pair(q & 2 ? least[k + OWN] : least[k], b));
        any |= odd[k];
    }
    if (!__any_sync(~0u, any)) return 0;
#pragma unroll
    for (int k = 0; k < OWN; k++)
        bits |= (odd[k] & 0xffff ? 1u : 0) << k * 2 | (odd[k] >> 16 ? 2u : 0) << k * 2;
    return __reduce_or_sync(~0u, q & 2 ? bits << 2 * OWN : bits);
#else
    (void)x;
    return (1u << WORDS) - 1;
#endif
}

/* What is found of the columns of a warp's rows; whole: there are sixteen. */
template <int WORDS>
static __device__ __forceinline__ void measure_lanes(const job &j, bool whole,
                                                     const uint32_t x[LANE_ROWS][WORDS],
                                                     const uint32_t rotation[4], found *it)
{
    const uint32_t mask = j.p.sides[MT_COL].options.rht_mask;
    uint32_t all[4];
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) all[i] = magnitude_of<WORDS>(x[i], &it->nans);
    raise(&it->most[MT_ROW],
          larger_halves(larger_halves(all[0], all[1]), larger_halves(all[2], all[3])));
    int again = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t near = 0; /* as measure_rotated looks */
#pragma unroll
    for (int c = 0; whole && c < WORDS; c++) {
        uint32_t square[4];
        take_square(square, x, c);
        near = larger_pair(near, magnitudes_near(square, rotation));
    }
    near = larger_half(near & 0x7fff7fffu);
    const uint32_t most = it->most[MT_COL];
    if (!__any_sync(~0u, !whole || near >= most || most < LEAST || most > MOST)) return;
#endif
#pragma unroll
    for (int c = 0; c < WORDS; c++) {
        uint32_t square[4];
        take_square(square, x, c);
        if (whole)
            measure_rotated(&it->most[MT_COL], square, rotation, mask);
        else
            raise(&it->most[MT_COL], magnitude_of<4>(square, &again));
    }
    it->most[MT_COL] = __reduce_max_sync(~0u, it->most[MT_COL]);
}

/* The scales of the columns of four squares, as they are stored: of each four threads one has those
 * of a square. most: of a thread's part of their columns. */
static __device__ __forceinline__ uint32_t stored_of_squares(const job &j, float g,
                                                             const uint32_t most[4])
{
    const int q = lane_of_warp() % 4;
    uint32_t a = q & 1 ? most[1] : most[0], b = q & 1 ? most[3] : most[2];
    a = larger_halves(a, __shfl_xor_sync(~0u, q & 1 ? most[0] : most[1], 1));
    b = larger_halves(b, __shfl_xor_sync(~0u, q & 1 ? most[2] : most[3], 1));
    const uint32_t own = q & 2 ? b : a;
    const uint32_t mine = larger_halves(own, __shfl_xor_sync(~0u, q & 2 ? a : b, 2));
    return stored_pair(j, low_bf16(mine) * g, high_bf16(mine) * g);
}

/* What their elements are multiplied by. */
static __device__ __forceinline__ void enc_of_squares(float enc[4][2], const float *scale_enc,
                                                      uint32_t stored)
{
    const float by[2] = { scale_enc[stored & 0xff], scale_enc[stored >> 8] };
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) enc[i][h] = __shfl_sync(~0u, by[h], i, 4);
}

/* What elements are multiplied by under a scale as it is stored, and the member's. */
static __device__ __forceinline__ float enc_of_stored(const job &j, const level &l, uint32_t stored)
{
    float v[2];
    byte_pair_values<CODES_E4M3>(v, j.e4m3, stored);
    return mt_nvfp4_encode(v[0] * l.s_dec);
}

/* Four squares rotated, columns g and g + 8 of each in a word, and the larger magnitudes of both;
 * NaNs, which do not count, without a sign. odd: a bit for each whose sums may round, or that is
 * not whole: those are not rotated. */
template <int WORDS>
static __device__ __forceinline__ void
rotate_squares(uint32_t z[4][4], uint32_t most[4], const uint32_t x[LANE_ROWS][WORDS], int c0,
               const uint32_t rotation[4], uint32_t mask, uint32_t odd, bool whole)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t square[4];
        float y[8];
        take_square(square, x, c0 + i);
        multiply_square(y, square, rotation), multiply_square(y + 4, square, rotation + 2);
        z[i][0] = bf16_pair(y[0], y[2]), z[i][1] = bf16_pair(y[1], y[3]);
        z[i][2] = bf16_pair(y[4], y[6]), z[i][3] = bf16_pair(y[5], y[7]);
    }
    if (odd >> c0 & 15) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t square[4];
            if (!(odd >> (c0 + i) & 1)) continue;
            take_square(square, x, c0 + i);
            if (whole) rotate_square(square, rotation, mask, false);
            pair_columns(z[i], square);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) most[i] = magnitudes<4>(z[i]);
    const uint32_t all = larger_half(
        larger_halves(larger_halves(most[0], most[1]), larger_halves(most[2], most[3])));
    if (all <= 0x7f80) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t numbers[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            numbers[k] = without_nans(z[i][k]);
            z[i][k] = (z[i][k] & 0x7fff7fffu) | signs_of_numbers(z[i][k]);
        }
        most[i] = magnitudes<4>(numbers);
    }
}

/* The bits of a warp's elements, as they lie; row: its first in the tile. */
template <int WORDS>
static __device__ __forceinline__ void draw_lanes(uint32_t bits[LANE_ROWS][WORDS], const job &j,
                                                  const tile &t, int row)
{
#pragma unroll
    for (int h = 0; h < WORDS / CHUNK_WORDS; h++) {
        const draws d = draws_of(j, t, row + first_row(), first_column() + h * (TILE / 2));
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) draw_row(bits[i] + h * CHUNK_WORDS, j, d, i);
    }
}
