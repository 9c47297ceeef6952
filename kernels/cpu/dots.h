/* Steps of pairs (pairs.h) by AVX-512's dot products of pairs of bf16 (VDPBF16PS). */
#pragma once

#include "kernels/cpu/pairs.h"

/* Up to MOST_ROWS rows of a step are summed in registers at a time. */
enum { MOST_ROWS = 12, REACH = 3, POINTERS = MOST_ROWS / REACH };

MT_INLINE void begin_steps(int64_t rows)
{
    (void)rows;
}

MT_INLINE void end_steps(void) {}

MT_INLINE __m512bh pairs_at(const mt_elem *p)
{
    return (__m512bh)_mm512_loadu_si512(p);
}

MT_INLINE __m512bh pair_in_all(const mt_elem *p)
{
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

MT_INLINE void multiply_rows(int rows, float *sums, int64_t ld, bool add, const struct steps *x,
                             const mt_elem *a)
{
    __m512 sum[2 * MOST_ROWS];
    const mt_elem *lines[POINTERS]; /* three rows are within reach of one: at 0, pitch, 2 pitch */
    const mt_elem *b0 = x->b, *b1 = x->b + x->apart;
    MT_UNROLL
    for (int i = 0; i < 2 * rows; i++)
        sum[i] = add ? _mm512_loadu_ps(sums + i / 2 * ld + i % 2 * HALF) : _mm512_setzero_ps();
    MT_UNROLL
    for (int i = 0; i * REACH < rows; i++) lines[i] = a + i * REACH * x->pitch;
    for (int64_t s = 0; s < x->count; s++) {
        for (int64_t q = 0; q < HALF; q++, b0 += STEP, b1 += STEP) {
            __m512bh left = pairs_at(b0), right = pairs_at(b1);
            MT_UNROLL
            for (int r = 0; r < rows; r++) {
                __m512bh pair = pair_in_all(lines[r / REACH] + r % REACH * x->pitch + 2 * q);
                sum[2 * r] = _mm512_dpbf16_ps(sum[2 * r], pair, left);
                sum[2 * r + 1] = _mm512_dpbf16_ps(sum[2 * r + 1], pair, right);
            }
        }
        MT_UNROLL
        for (int i = 0; i * REACH < rows; i++) lines[i] += x->stride;
    }
    MT_UNROLL
    for (int i = 0; i < 2 * rows; i++) _mm512_storeu_ps(sums + i / 2 * ld + i % 2 * HALF, sum[i]);
}

/* One function for each number of rows. */
#define ROW_COUNTS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#define MULTIPLY(R)                                                                                \
    static void multiply_##R(float *sums, int64_t ld, bool add, const struct steps *x,             \
                             const mt_elem *a)                                                     \
    {                                                                                              \
        multiply_rows(R, sums, ld, add, x, a);                                                     \
    }
ROW_COUNTS(MULTIPLY)

/* sums [rows, STEP], lines `ld` apart: the product, added to what is there or in its place. */
MT_INLINE void multiply(float *sums, int64_t ld, bool add, int64_t rows, const struct steps *x)
{
    static void (*const some[MOST_ROWS + 1])(float *, int64_t, bool, const struct steps *,
                                             const mt_elem *) = {
#define AT_COUNT(R) [R] = multiply_##R,
        ROW_COUNTS(AT_COUNT)
    };
    int64_t parts = mt_ceil_div(rows, MOST_ROWS);
    for (int64_t part = 0; part < parts; part++) {
        int64_t r = rows * part / parts, end = rows * (part + 1) / parts;
        some[end - r](sums + r * ld, ld, add, x, x->a + r * x->pitch);
    }
}
