/* Elementwise ops, SwiGLU, embedding. "real" is f32 (f64 for f64). */
#pragma once

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[i] = value, rounded to dtype. */
struct mt_fill_args {
    mt_dtype dtype;
    int64_t count;
    void *y;
    double value;
};

/* y[i] = x[i] rounded to the type of y. dtype is that of y; x is any of f64 f32 bf16 f16.
 * f32 -> bf16 and the like; exact where wider. */
struct mt_cast_args {
    mt_dtype dtype;
    int64_t count;
    void *y;
    const void *x;
    mt_dtype x_dtype;
};

/* y[i] = a[i] + b[i] in real, one rounding. y may alias a or b. */
struct mt_add_args {
    mt_dtype dtype;
    int64_t count;
    void *y;
    const void *a, *b;
};

/* y[r, f] = silu(g) * u, g = x[r, f], u = x[r, F + f], silu(g) = g / (1 + exp(-g)).
 * x [rows, 2F], y [rows, F]. Rows past `*rows_used` (device int64, may be NULL for all) are neither
 * read nor written: the capacity tail of a ragged group. Backends may compute the sigmoid of a bf16
 * gate to within 2^-24 (2 |g| + 8) of itself, or zero where it is below 2^-126. Source: Shazeer
 * 2020, arXiv 2002.05202. */
struct mt_swiglu_fwd_args {
    mt_dtype dtype;
    int64_t rows, width; /* width = F */
    const int64_t *rows_used;
    void *y;
    const void *x;
};

/* dx[r, f] = dy u s (1 + g (1 - s)), dx[r, F + f] = dy g s, s = sigmoid(g). Overwrites dx [rows,
 * 2F]. */
struct mt_swiglu_bwd_args {
    mt_dtype dtype;
    int64_t rows, width;
    const int64_t *rows_used;
    void *dx;
    const void *dy, *x;
};

/* y[t, :] = w[tokens[t], :] rounded to dtype. w real [V, D] (the master), tokens int32 [T], each in
 * [0, V) (the data reader guarantees it). y [T, D]. */
struct mt_embedding_fwd_args {
    mt_dtype dtype;
    int64_t tokens_count, vocab, width;
    void *y;
    const void *w;
    const int32_t *tokens;
};

/* dw[v, :] = (accumulate ? dw : 0) + sum over t with tokens[t] = v, in order of t, of dy[t, :]. dw
 * real [V, D]. */
struct mt_embedding_bwd_args {
    mt_dtype dtype;
    int64_t tokens_count, vocab, width;
    bool accumulate;
    void *dw;
    const void *dy;
    const int32_t *tokens;
};

#ifdef __cplusplus
}
#endif
