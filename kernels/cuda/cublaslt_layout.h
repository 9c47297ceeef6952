/* The members of a grouped GEMM as cuBLASLt is told of them. Its matrices are column-major: element
 * (i, j) is at i + j ld. So a row-major matrix is its transpose, D^T = op(A) op(B) is what it
 * computes, and its A is the operand along D's columns, which is our `a`:
 *
 * | layout | D^T [m, n]    | A, stored           | B, stored             | k    |
 * |--------|---------------|---------------------|-----------------------|------|
 * | TN     | Y^T [n, rows] | W^T [k, n], op T    | X^T [k, rows], op N   | k    |
 * | NN     | dX^T [k, rows]| W^T [k, n], op N    | dY^T [n, rows], op N  | n    |
 * | NT     | dW^T [k, n]   | X^T [k, rows], op N | dY^T [n, rows], op T  | rows |
 *
 * n, k: of the weight, rows: of the member. Nothing here needs CUDA. */
#pragma once

#include "kernels/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As it is stored; `transposed`: it is multiplied as its transpose. */
typedef struct mt_lt_matrix {
    int64_t rows, cols, ld;
    bool transposed;
} mt_lt_matrix;

typedef struct mt_lt_shape {
    int64_t m, n, k;
    mt_lt_matrix a, b, d;
} mt_lt_shape;

MT_HOST_DEVICE mt_lt_shape mt_lt_shape_of(mt_gemm_layout layout, int64_t n, int64_t k, int64_t rows)
{
    bool along = layout == MT_GEMM_TN, wgrad = layout == MT_GEMM_NT;
    int64_t width = along ? n : k;
    mt_lt_matrix weight = { k, n, k, along };
    mt_lt_matrix x = { k, rows, k, false };
    mt_lt_matrix dy = { n, rows, n, wgrad };
    mt_lt_matrix d = { width, wgrad ? n : rows, width, false };
    mt_lt_shape s = { d.rows,         d.cols, along ? k : wgrad ? rows : n, wgrad ? x : weight,
                      along ? x : dy, d };
    return s;
}

/* Where a member begins in A, B and D, in elements; `start`: its first row. */
typedef struct mt_lt_place {
    int64_t a, b, d;
} mt_lt_place;

MT_HOST_DEVICE mt_lt_place mt_lt_place_of(mt_gemm_layout layout, int64_t n, int64_t k,
                                          int64_t member, int64_t start)
{
    bool along = layout == MT_GEMM_TN, wgrad = layout == MT_GEMM_NT;
    int64_t weight = member * n * k;
    mt_lt_place at = { wgrad ? start * k : weight, start * (along ? k : n),
                       wgrad ? weight : start * (along ? n : k) };
    return at;
}

/* Bytes, up to 16, that divide a matrix's address and every line's: more is never told, so that the
 * choice of an algorithm does not hang on where memory happens to lie. */
enum { MT_LT_ALIGNED = 16 };
static inline unsigned mt_lt_alignment(const void *p, int64_t ld, size_t size)
{
    uintptr_t both = (uintptr_t)p | (uintptr_t)ld * size | MT_LT_ALIGNED;
    return (unsigned)(both & (~both + 1));
}

/* Grouped layouts, with row counts on the device: since this version on Hopper, and only on cards
 * of these compute capabilities (major * 10 + minor). */
enum { MT_LT_GROUPED_SINCE = 130400, MT_LT_GROUPED_LEAST = 90, MT_LT_GROUPED_MOST = 119 };
static inline bool mt_lt_has_grouped(size_t version, int capability)
{
    return version >= MT_LT_GROUPED_SINCE && capability >= MT_LT_GROUPED_LEAST &&
           capability <= MT_LT_GROUPED_MOST;
}

#ifdef __cplusplus
}
#endif
