/* The grouped GEMM and what feeds it: one contract for dense and ragged, every format.
 *
 * | layout | pass  | a               | b                | result                            |
 * |--------|-------|-----------------|------------------|-----------------------------------|
 * | TN     | fprop | W row [N; n, k] | X row [rows, k]  | y[r, j] = sum_k x[r, k] w[j, k]   |
 * | NN     | dgrad | W col [N; n, k] | dY row [rows, n] | dx[r, c] = sum_j dy[r, j] w[j, c] |
 * | NT     | wgrad | X col [rows, k] | dY col [rows, n] | dw[j, c] = sum_r dy[r, j] x[r, c] |
 *
 * W is a uniform group of N members [n, k] (any layout; PACKED where pack_weight wrote it). X and
 * dY are groups of N members with ragged rows (or uniform: N equal members), compact, rows in
 * place, never padded. Rows past the last member are not read and not written. */
#pragma once

#include "core/qtensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_gemm_layout {
    MT_GEMM_TN,
    MT_GEMM_NN,
    MT_GEMM_NT,
    MT_GEMM_LAYOUT_COUNT
} mt_gemm_layout;

/* What a kernel set makes of codes: not 0, it multiplies them. */
typedef enum mt_gemm_reading {
    MT_GEMM_DECODES,
    MT_GEMM_READS, /* on fp8 tensor cores: mt_gemm_fp8_loss */
    MT_GEMM_LEVELS /* there, and a row's bits depend on how many are beside it:
                      mt_gemm_fp8_level_loss */
} mt_gemm_reading;

/* d = op(a, b) + (c ? c : 0) + (bias ? bias : 0), accumulated in real (f32; f64 for f64), rounded
 * once to out: with a d of bf16, the f32 sum plus the old value. d_dtype: dtype or real. c: same
 * type and shape as d, may alias d (beta = 1), NULL is beta = 0. With NT and c NULL the gradient of
 * a member without rows is written as zeros; with c it is c. bias real [N, n], TN only. Operands
 * are of any format: those that are neither dtype nor real are decoded to real first (or to dtype,
 * where that holds them exactly). One of MT_LAYOUT_DECODED is bf16 already: dtype must be, too.
 * Bound per element: (K + 1 + mt_gemm_scale_roundings) 2^-24 sum |a b| (+ one output rounding). A
 * kernel set that multiplies bf16 in pairs (the cpu's amx and avx512_bf16) takes subnormals for
 * zeros, as operands and as sums: K 2^-126 more, and 2^-126 |b| for each subnormal a, 2^-126 |a|
 * for each subnormal b. On Hopper cuda multiplies f32 as sums of three bf16
 * (gemm_planes_sm90.cu), each without what it has below 2^-134: 2^-134 (sum |a| + sum |b|) more. */
struct mt_gemm_args {
    mt_dtype dtype;
    mt_gemm_layout layout;
    const mt_qtensor *a, *b;
    void *d;
    mt_dtype d_dtype;
    const void *c;
    const void *bias;
};

/* The direction of each operand that a layout reads: the table above. */
static inline const mt_direction *mt_gemm_a(const struct mt_gemm_args *args)
{
    return &args->a->dir[args->layout == MT_GEMM_TN ? MT_ROW : MT_COL];
}
static inline const mt_direction *mt_gemm_b(const struct mt_gemm_args *args)
{
    return &args->b->dir[args->layout == MT_GEMM_NT ? MT_COL : MT_ROW];
}

/* A backend may keep the f32 scale that a whole member has (fp8_tensor, fp8_delayed, the second
 * level of nvfp4) out of the sum: codes are exact then, and the sum is multiplied by the product of
 * the scales (what f32 has no normal number for may lose K 2^-117; of codes by numbers of bf16 near
 * f32's largest the sum is infinite). The bound is about dequantized values, whose own roundings,
 * one or two an operand, the sum is then without, and the factor has one. */
static inline int mt_gemm_scale_roundings(const mt_format *a, const mt_format *b)
{
    const int n =
        mt_format_has_factor(a) + a->second_level + mt_format_has_factor(b) + b->second_level;
    return n ? n + 1 : 0;
}

/* What a kernel set adds to the bound that multiplies codes on fp8 tensor cores (cuda's sm_90a_fp8,
 * never chosen but by its name), for each 128 of K: of 32 products and the sum so far, 33 numbers,
 * these cut what is below 2^-13 of the largest one's binade, four times before the 128 are added in
 * f32. largest: of the products' sizes, by their scales, and of the sums of the 128 on the way.
 * There, scales of blocks that are no powers of two stay out of the sum as well: three roundings;
 * of those that are, products under 2^-133, far under f32's normal numbers, count as 0. */
static inline double mt_gemm_fp8_loss(double largest)
{
    return 4 * 33 * 0x1p-13 * largest;
}

/* What that kernel set adds besides, for each product of fp8_block with scales that are powers of
 * two: it may bring one operand's codes to the largest scale that their column has in the member
 * (wgrad), or b's to that of their row (in members of at most MT_GEMM_FP8_LEVELED rows: there a
 * row's result depends on how many are beside it), 2^-126 at least, so that the product is not
 * scaled by both operands' blocks. They are then multiples of 2^-9 of that scale: an element moves
 * by 2^-10 of it, under 2^-17 of its row's or column's largest. other: the element of the other
 * operand; `largest` above is of the elements so moved. A row or column whose scale is under 2^-126
 * of the largest of 144 of them counts as 0; where the other operand's scale times that largest, or
 * a sum by it, is past f32's largest, results are infinite or NaN. */
enum { MT_GEMM_FP8_LEVELED = 512 };
static inline double mt_gemm_fp8_level_loss(double scale, double other)
{
    return 0x1p-10 * scale * other;
}

/* db[i, j] = (accumulate ? db : 0) + sum over the rows r of member i of dy[r, j]. dy ragged [rows,
 * n] of dtype; db real [N, n]. */
struct mt_bias_grad_args {
    mt_dtype dtype;
    const mt_qtensor *dy;
    bool accumulate;
    void *db;
};

/* Writes the packed compute copy of a weight from its master: both directions that `out` has (codes
 * not NULL), each mt_kernels.packed_bytes long. master real [N, m, k] of the group; values are
 * rounded to dtype first. halves: master is of bf16, which are the values; dtype bf16 only. */
struct mt_pack_weight_args {
    mt_dtype dtype;
    const void *master;
    mt_qtensor *out;
    bool halves;
};

#ifdef __cplusplus
}
#endif
