/* Inside quantize of nvfp4: squares of sixteen columns and sixteen rows of a tile, read turned by a
 * warp, and their rotation (rht) by the tensor cores. */
#pragma once

#include "kernels/cuda/quantize_turns.cuh"

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* The larger magnitude of COUNT words' elements; NaNs do not count, but are counted. */
template <int COUNT>
static __device__ __forceinline__ uint32_t magnitude_of(const uint32_t w[COUNT], int *nans)
{
    uint32_t most = larger_half(magnitudes<COUNT>(w));
    if (most <= 0x7f80) return most;
    most = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) most = found_among_nans(w[i], most);
    *nans += (int)(most >> 16);
    return most & 0xffff;
}

/* ---- squares ----------------------------------------------------------------------------------
 * A thread has eight elements of one: of column g = lane / 4 words 0 and 2, of column g + 8 words 1
 * and 3: four rows that follow each other, 4 (lane % 4) being the first. */

/* Where a thread's address of a warp's squares is; from one square to the next. */
enum { STRIP_WORDS = TILE * SEGMENT / 2, SQUARE_WORDS = SEGMENT * SEGMENT / 2 };

static __device__ __forceinline__ int square_place(int strip)
{
    const int lane = lane_of_warp(), i = lane % 8, right = lane / 8 % 2, upper = lane / 16;
    return chunk_place<NIBBLES>(i / 2 * 4 + i % 2 + upper * 2, strip * 2 + right);
}

/* from: of shared memory. */
static __device__ __forceinline__ void get_square(uint32_t x[4], uint32_t from)
{
#if defined(__CUDA_ARCH__)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
#endif
}

/* The larger magnitudes of both columns: that of g in the low half. */
static __device__ __forceinline__ uint32_t larger_of_columns(const uint32_t x[4])
{
    const uint32_t a = larger_pair(x[0], x[2]), b = larger_pair(x[1], x[3]);
    return larger_pair(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)) & 0x7fff7fffu;
}
static __device__ __forceinline__ uint32_t smaller_of_columns(const uint32_t x[4])
{
    const uint32_t a = smaller_pair(x[0], x[2]), b = smaller_pair(x[1], x[3]);
    return smaller_pair(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)) & 0x7fff7fffu;
}

/* ---- rotations --------------------------------------------------------------------------------
 */

/* What squares are multiplied by to rotate them, twice eight columns of it: of a thread, signs of a
 * quarter. */
static __device__ __forceinline__ void make_rotation(uint32_t h[4], uint32_t mask)
{
    const int first = lane_of_warp() % 4 * 4, g = lane_of_warp() / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t k = (uint32_t)(g / 2 * 4 + g % 2 + i / 2 * 2);
        h[i] = 0x3e803e80u;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const uint32_t row = (uint32_t)(first + i % 2 * 2 + e);
            h[i] |= (((uint32_t)__popc(row & k) ^ mask >> row) & 1) << (15 + 16 * e);
        }
    }
}

/* A thread's sums as NUMERICS has them, one after the other: of the rows of four threads in turn.
 */
static __device__ __forceinline__ void sum_in_order(float y[8], const uint32_t x[4], uint32_t mask)
{
    const uint32_t mine = (uint32_t)lane_of_warp() % 4;
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = 0;
#pragma unroll 1
    for (uint32_t from = 0; from < 4; from++, mask >>= 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = __shfl_sync(~0u, x[i], (int)from, 4);
        const uint32_t turned = (uint32_t)__popc(from & mine);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float by = (turned ^ mask >> i) & 1 ? -0.25f : 0.25f;
            const uint32_t a_word = w[i / 2 * 2], b_word = w[i / 2 * 2 + 1];
            const float a = by * (i % 2 ? high_bf16(a_word) : low_bf16(a_word));
            const float b = by * (i % 2 ? high_bf16(b_word) : low_bf16(b_word));
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int o = k / 2 * 4 + k % 2;
                const bool minus = ((i & k) ^ (i & k) >> 1) & 1;
                y[o] = minus ? y[o] - a : y[o] + a;
                y[o + 2] = minus ? y[o + 2] - b : y[o + 2] + b;
            }
        }
    }
}

/* y = the tensor cores' sums of products with eight columns of the rotation. */
static __device__ __forceinline__ void multiply_square(float y[4], const uint32_t x[4],
                                                       const uint32_t h[2])
{
#if defined(__CUDA_ARCH__)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(h[0]), "r"(h[1]), "f"(0.0f));
#endif
}

/* Magnitudes between which no sum overflows and nothing that is lost counts; as bf16 bits. */
enum { LEAST = 40 << 7, MOST = 240 << 7, BINADES = 12 << 7 };

/* Whether a column's sums, wherever they round, become the same bf16 as y does. They and the tensor
 * cores' lie less than 9.5 2^-23 of the sum of the products' magnitudes and 2^-19 of the largest
 * product apart: 15 roundings of sums, and what tensor cores that keep 24 bits cut of 16 products
 * and 2 sums. most, sum: of magnitudes of elements, four times those of products; the sum has been
 * rounded four times and is off by less than 2 of 256, as y by `off` by 2^-24 of it. */
static __device__ __forceinline__ bool rounds_alike(const float y[8], int column, uint32_t most,
                                                    uint32_t sum)
{
    const float off =
        fmaf(mt_f32_from_bits(sum << 16), 0x3p-23f, mt_f32_from_bits(most << 16) * 0x1p-21f);
    bool alike = true;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float a = y[i + column * 2], b = y[i + column * 2 + 1];
        alike &= bf16_pair(a - off, b - off) == bf16_pair(a + off, b + off);
    }
    return alike;
}

static __device__ __forceinline__ void round_square(uint32_t x[4], const float y[8])
{
    x[0] = bf16_pair(y[0], y[1]), x[2] = bf16_pair(y[4], y[5]);
    x[1] = bf16_pair(y[2], y[3]), x[3] = bf16_pair(y[6], y[7]);
}

/* Whether sums of columns may round, two columns to a word: of their largest and least magnitudes.
 * Where a column's elements are within 12 binades no sum of them has more than 24 bits: the tensor
 * cores' is exact, as are all in NUMERICS' order. */
static __device__ __forceinline__ uint32_t rounds(uint32_t most, uint32_t least)
{
    const uint32_t both = 0x10001;
    return (larger_halves(most - least, BINADES * both) ^ BINADES * both) |
           (larger_halves(most, MOST * both) ^ MOST * both) |
           (smaller_halves(least, LEAST * both) ^ LEAST * both);
}

/* Sums of two words' magnitudes, rounded to bf16. */
static __device__ __forceinline__ uint32_t magnitude_sums(uint32_t a, uint32_t b)
{
    uint32_t w = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("{\n\t.reg .b32 c, d;\n\tabs.bf16x2 c, %1;\n\tabs.bf16x2 d, %2;\n\t"
        "add.rn.bf16x2 %0, c, d;\n\t}"
        : "=r"(w)
        : "r"(a), "r"(b));
#endif
    return w;
}

/* As `rounds`, of the sums of columns' magnitudes and the least of them, with any sign: no sum has
 * more than 24 bits, nor any element one beyond 24 from its column's largest, where the sum is
 * below 2^17 times the least one's power of two; the sums have been rounded four times, and are off
 * by less than 4 of 256. */
static __device__ __forceinline__ uint32_t sums_round(uint32_t sum, uint32_t least)
{
    const uint32_t both = 0x10001, within = ((17 << 7) - 4) * both;
    return (larger_halves(sum - (least & 0x7f807f80u), within) ^ within) |
           (larger_halves(sum, MOST * both) ^ MOST * both) |
           (smaller_halves(least & 0x7fff7fffu, LEAST * both) ^ LEAST * both);
}

/* The sums of columns' magnitudes, that of g in the low half. */
static __device__ __forceinline__ uint32_t sum_of_columns(const uint32_t x[4])
{
    const uint32_t a = magnitude_sums(x[0], x[2]), b = magnitude_sums(x[1], x[3]);
    return magnitude_sums(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}

/* The least magnitudes but for zeros, which no sum rounds for: there they are the largest ones. */
static __device__ __forceinline__ uint32_t least_of_columns(const uint32_t x[4])
{
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t m = x[i] & 0x7fff7fffu, zeros = ~(m + 0x7fff7fffu) & 0x80008000u;
        w[i] = m | ((zeros - (zeros >> 15)) & 0x7f7f7f7fu);
    }
    return smaller_of_columns(w);
}

/* A square rotated, whatever it is. */
static __device__ __noinline__ uint4 rotated_square(uint4 square, uint4 rotation, uint32_t mask)
{
    const uint32_t x[4] = { square.x, square.y, square.z, square.w };
    uint32_t z[4];
    float y[8];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t h[4] = { rotation.x, rotation.y, rotation.z, rotation.w };
    uint32_t most = larger_of_columns(x), least = least_of_columns(x), sum = sum_of_columns(x);
    multiply_square(y, x, h), multiply_square(y + 4, x, h + 2);
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
        most = larger_halves(most, __shfl_xor_sync(~0u, most, lane));
        least = smaller_halves(least, __shfl_xor_sync(~0u, least, lane));
        sum = magnitude_sums(sum, __shfl_xor_sync(~0u, sum, lane));
    }
    const uint32_t odd = sums_round(sum, smaller_halves(least, sum)); /* 0 of zeros alone */
    bool alike = true;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const uint32_t m = most >> 16 * c & 0xffff;
        if (odd >> 16 * c & 0xffff)
            alike &= rounds_alike(y, c, m, sum >> 16 * c & 0xffff) &&
                     (m == 0 || (m >= LEAST && m <= MOST));
    }
    if (!__all_sync(~0u, alike)) sum_in_order(y, x, mask);
#else
    sum_in_order(y, x, mask);
#endif
    round_square(z, y);
    return make_uint4(z[0], z[1], z[2], z[3]);
}

/* Rotates a square, rounded to bf16; exact: no sum of it rounds. h: of make_rotation. */
static __device__ __forceinline__ void rotate_square(uint32_t x[4], const uint32_t h[4],
                                                     uint32_t mask, bool exact)
{
    float y[8];
    if (exact) {
        multiply_square(y, x, h), multiply_square(y + 4, x, h + 2);
        round_square(x, y);
    } else {
        const uint4 z = rotated_square(make_uint4(x[0], x[1], x[2], x[3]),
                                       make_uint4(h[0], h[1], h[2], h[3]), mask);
        x[0] = z.x, x[1] = z.y, x[2] = z.z, x[3] = z.w;
    }
}
static __device__ __forceinline__ void rotate_square(uint32_t x[4], const uint32_t h[4],
                                                     uint32_t mask)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t most = larger_of_columns(x), least = smaller_of_columns(x);
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
        most = larger_halves(most, __shfl_xor_sync(~0u, most, lane));
        least = smaller_halves(least, __shfl_xor_sync(~0u, least, lane));
    }
    rotate_square(x, h, mask, !__any_sync(~0u, rounds(most, least)));
#else
    rotate_square(x, h, mask, false);
#endif
}

/* Magnitudes of a square rotated, all but those that sums' roundings change; with any sign. */
static __device__ __forceinline__ uint32_t magnitudes_near(const uint32_t x[4], const uint32_t h[4])
{
    float y[8];
    uint32_t z[4];
    multiply_square(y, x, h), multiply_square(y + 4, x, h + 2);
    round_square(z, y);
    return larger_pair(larger_pair(z[0], z[1]), larger_pair(z[2], z[3]));
}

/* Raises `most` to the largest magnitude of a square rotated. The tensor cores' sums are within
 * 2^-15 of the largest one of a column (no element is larger than its column's Euclidean length,
 * which is at most four times the largest sum): only what comes near `most` is looked at. */
static __device__ __forceinline__ void measure_rotated(uint32_t *most, uint32_t x[4],
                                                       const uint32_t h[4], uint32_t mask)
{
    int nans = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    float y[8];
    uint32_t near[4];
    multiply_square(y, x, h), multiply_square(y + 4, x, h + 2);
    round_square(near, y);
    const bool looks = larger_half(magnitudes<4>(near)) >= *most || *most < LEAST || *most > MOST;
    if (!__any_sync(~0u, looks)) return;
#endif
    rotate_square(x, h, mask);
    raise(most, magnitude_of<4>(x, &nans));
#if defined(__CUDA_ARCH__)
    *most = __reduce_max_sync(~0u, *most);
#endif
}
