/* RMSNorm, and the normalisation and rotation of queries and keys. "real" is f32 (f64 for f64). */
#pragma once

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y = round(x * rstd) * w, rstd = 1 / sqrt(mean(x^2) + eps), in real; as Hugging Face does, the
 * normalised x is rounded to dtype before it is multiplied by w (no-op for f32, f64). x, y [rows,
 * D]; w real [D]; rstd real [rows], kept for backward. Source: arXiv 1910.07467. */
struct mt_rmsnorm_fwd_args {
    mt_dtype dtype;
    int64_t rows, width;
    double eps;
    void *y;
    void *rstd; /* real [rows] */
    const void *x;
    const void *w;
};

/* dx = dx_add + rstd * (dy w - xhat mean(dy w xhat)), xhat = x rstd; dw = (accumulate ? dw : 0) +
 * sum_r dy xhat. dx_add may be NULL (0), or alias dx. dw NULL skips it. dw real [D]. */
struct mt_rmsnorm_bwd_args {
    mt_dtype dtype;
    int64_t rows, width;
    bool accumulate;
    void *dx;
    const void *dx_add;
    void *dw;
    const void *dy, *x;
    const void *rstd, *w;
};

typedef enum mt_qk_norm {
    MT_QK_NORM_NONE,      /* Mixtral */
    MT_QK_NORM_HEAD,      /* Qwen3: each head by itself, w [d] */
    MT_QK_NORM_PROJECTION /* OLMoE: the whole projection, w [heads * d] */
} mt_qk_norm;

/* Queries and keys normalised, then rotated; values copied.
 * x, y [batch, sequence, (nq + 2 nkv) d]: nq query heads, nkv key heads, nkv value heads of d each.
 * Norm as rmsnorm_fwd with w_q, w_k. RoPE rotates pairs (i, i + d/2) of a head at position s by the
 * angle s * theta^(-2i/d): y_i = x_i cos - x_j sin, y_j = x_j cos + x_i sin. cos, sin: real
 * [sequence, d/2], precomputed in f64. rstd real [batch * sequence, nq + nkv] (HEAD) or [.., 2]
 * (PROJECTION), unused for NONE. y may alias x for NONE only. Source: arXiv 2104.09864 in Hugging
 * Face's pairing. */
struct mt_qk_norm_rope_fwd_args {
    mt_dtype dtype;
    int64_t batch, sequence, query_heads, kv_heads, head_dim;
    mt_qk_norm norm;
    double eps;
    void *y;
    void *rstd;
    const void *x;
    const void *w_q, *w_k; /* real; NULL for NONE */
    const void *cos_table, *sin_table;
};

/* dx from dy (same shape as x), overwriting; dw_q, dw_k = (accumulate ? dw : 0) + sums. Either dw
 * may be NULL (skip); they do not overlap. dx may alias dy. */
struct mt_qk_norm_rope_bwd_args {
    mt_dtype dtype;
    int64_t batch, sequence, query_heads, kv_heads, head_dim;
    mt_qk_norm norm;
    bool accumulate_q, accumulate_k;
    void *dx;
    void *dw_q, *dw_k;
    const void *dy, *x;
    const void *rstd;
    const void *w_q, *w_k;
    const void *cos_table, *sin_table;
};

#ifdef __cplusplus
}
#endif
