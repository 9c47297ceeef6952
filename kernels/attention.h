/* Causal attention with grouped query heads. */
#pragma once

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[b, s, h] = sum_{t <= s} softmax_t(scale q[b,s,h] . k[b,t,g]) v[b,t,g], g = h / (nq / nkv).
 * qkv [batch, sequence, (nq + 2 nkv) d] (query heads, key heads, value heads), y [batch, sequence,
 * nq d], lse real [batch, nq, sequence] = log sum exp, kept for backward. Scores and softmax in
 * real; probabilities and the gradients of scores may be rounded to dtype before the next product.
 * A GPU multiplies f32 (heads of a multiple of 8 up to 128) as sums of three bf16, each without
 * what it has below 2^-134; there what meets an Inf may be NaN. scale is usually 1/sqrt(d).
 * kv_heads divides query_heads. Source: arXiv 2205.14135 (blocked, exact). */
struct mt_attention_fwd_args {
    mt_dtype dtype;
    int64_t batch, sequence, query_heads, kv_heads, head_dim;
    double scale;
    void *y;
    void *lse;
    const void *qkv;
};

/* dqkv [batch, sequence, (nq + 2 nkv) d], overwritten whole, from dy and what forward kept. */
struct mt_attention_bwd_args {
    mt_dtype dtype;
    int64_t batch, sequence, query_heads, kv_heads, head_dim;
    double scale;
    void *dqkv;
    const void *dy, *qkv, *y;
    const void *lse;
};

#ifdef __cplusplus
}
#endif
