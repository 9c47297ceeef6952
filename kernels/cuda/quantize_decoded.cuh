/* Inside quantize of nvfp4: directions that are kept decoded (MT_LAYOUT_DECODED), as what their
 * codes are times the block's scale. */
#pragma once

#include "kernels/cuda/quantize_squares.cuh"

/* A stored scale's value twice, in bf16, which holds it. */
static __device__ __forceinline__ uint32_t scale_twice(uint32_t stored)
{
    const uint32_t bits = mt_f32_bits(mt_f32_from_bits(stored << 20) * 0x1p120f);
    return __byte_perm(bits, bits, 0x3232);
}

/* y = two elements' values times their scales, which bf16 holds. */
static __device__ __forceinline__ uint32_t times_scale(uint32_t y, uint32_t scale)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(y) : "r"(scale));
    return y;
#else
    return bf16_pair(low_bf16(y) * low_bf16(scale), high_bf16(y) * high_bf16(scale));
#endif
}

/* Bytes of the eight of a and b; selectors are below 8, which __byte_perm would see to. */
static __device__ __forceinline__ uint32_t bytes_at(uint32_t a, uint32_t b, uint32_t selectors)
{
#if defined(__CUDA_ARCH__)
    uint32_t w;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(w) : "r"(a), "r"(b), "r"(selectors));
    return w;
#else
    return __byte_perm(a, b, selectors);
#endif
}

/* Sign bits of two elements, of which NaNs have none. */
static __device__ __noinline__ uint32_t signs_of_numbers(uint32_t w)
{
    uint32_t signs = w & 0x80008000u;
    if ((w & 0x7fff) > 0x7f80) signs &= 0xffff0000u;
    if ((w >> 16 & 0x7fff) > 0x7f80) signs &= 0xffffu;
    return signs;
}

/* The values of eight codes less their signs, those of the elements w. */
static __device__ __forceinline__ void signed_nibbles(uint32_t y[4], uint32_t codes,
                                                      const uint32_t w[4], bool nans)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t four = codes >> 16 * h;
        const uint32_t high = bytes_at(0x3f3f3f00u, 0x40404040u, four);
        const uint32_t low = bytes_at(0xc0800000u, 0xc0804000u, four);
        y[h * 2] = __byte_perm(low, high, 0x5140), y[h * 2 + 1] = __byte_perm(low, high, 0x7362);
    }
    uint32_t signs[4] = { w[0], w[1], w[2], w[3] };
    if (nans) {
#pragma unroll
        for (int i = 0; i < 4; i++) signs[i] = signs_of_numbers(w[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] |= signs[i] & 0x80008000u;
}

/* Half of them under each scale. */
static __device__ __forceinline__ void nibble_values(uint32_t y[4], uint32_t codes,
                                                     const uint32_t w[4], const uint32_t scales[2],
                                                     bool nans)
{
    signed_nibbles(y, codes, w, nans);
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = times_scale(y[i], scales[i / 2]);
}

/* ---- rows -------------------------------------------------------------------------------------
 */

/* Sixteen elements of a row, as far as `count`. */
static __device__ __forceinline__ void put_segment_values(uint8_t *to, const uint32_t q[2],
                                                          const uint32_t w[8], uint32_t stored,
                                                          bool nans, int count)
{
    const uint32_t scale = scale_twice(stored), scales[2] = { scale, scale };
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t y[4];
        nibble_values(y, q[i], w + i * 4, scales, nans);
        if (i * 8 < count) store_16(to + i * 16, y[0], y[1], y[2], y[3]);
    }
}

/* ---- columns ----------------------------------------------------------------------------------
 */

/* A square to where get_square had it from. */
static __device__ __forceinline__ void put_square(uint32_t to, const uint32_t x[4])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
#elif defined(__CUDA_ARCH__)
#pragma unroll
    for (int i = 0; i < 4; i++) /* lanes 8 i .. have the addresses of lines of matrix i */
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int lane = lane_of_warp();
            const uint32_t line = __shfl_sync(~0u, to, i * 8 + lane % 4 * 2 + e);
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(line + lane / 4 * 2),
                         "h"((uint16_t)(x[i] >> e * 16))
                         : "memory");
        }
#endif
}

/* A square's codes, less their signs, in its place. */
static __device__ __forceinline__ void put_square_values(uint32_t to, uint32_t codes,
                                                         const uint32_t w[4], uint32_t left,
                                                         uint32_t right, bool nans)
{
    const uint32_t scales[2] = { scale_twice(left), scale_twice(right) };
    uint32_t y[4];
    nibble_values(y, codes, w, scales, nans);
    const uint32_t x[4] = { y[0], y[2], y[1], y[3] };
    put_square(to, x);
}

/* A warp's columns to where they go; k is a multiple of 8. */
static __device__ __forceinline__ void put_strip_values(const uint32_t *words, const target &to,
                                                        const frame &f, int strip)
{
    const int chunk = strip * 2 + lane_of_warp() % 2, rows = f.t.rows;
    const int64_t pitch = to.pitch;
    const uint32_t *from = words + chunk_place<NIBBLES>(lane_of_warp() / 2, chunk);
    uint8_t *p = to.codes + lane_of_warp() / 2 * pitch + chunk * 16;
    if (chunk * 8 >= f.t.cols) return;
#pragma unroll 4
    for (int r = lane_of_warp() / 2; r < rows;
         r += SEGMENT, p += SEGMENT * pitch, from += ROWS_WORDS<NIBBLES>) {
        const uint4 q = *(const uint4 *)from;
        store_16(p, q.x, q.y, q.z, q.w);
    }
}
