/* Gradient norm and AdamW over flat buffers. "real" is f32 (f64 under f64 compute). dtype here is
 * the dtype of masters, gradients and moments: f32 or f64. */
#pragma once

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a step needs that changes every step, in device memory. The host writes lr before a step;
 * grad_norm sets the rest. Zero-initialised but for power1 = power2 = 1. */
struct mt_step_state {
    double lr;
    double power1,
        power2; /* beta1^t, beta2^t: running products over applied updates, saved in checkpoints */
    double bias1, bias2; /* 1 - power1, 1 - power2 (NUMERICS section 6) */
    double clip;         /* gradients are scaled by this */
    double grad_norm;    /* global L2 norm before clipping */
    int64_t skip;        /* 1: the norm is not finite, this update changes nothing */
    int64_t applied;     /* updates made */
    int64_t skipped;     /* updates skipped, in all */
    int64_t skipped_in_a_row;
};

/* state->grad_norm = sqrt(sum g^2) in f64: partial sums over fixed blocks of 4096, added in order.
 * state->clip = max_norm > 0 ? min(1, max_norm / (norm + 1e-6)) : 1. state->skip = norm, or *loss
 * where given, is not finite; then skipped and skipped_in_a_row count, else power1 *= beta1, power2
 * *= beta2, bias1, bias2, applied follow and skipped_in_a_row = 0. */
struct mt_grad_norm_args {
    mt_dtype dtype;
    int64_t count;
    double max_norm, beta1, beta2;
    const void *grad;
    const void *loss; /* scalar of dtype, or NULL */
    struct mt_step_state *state;
};

/* NUMERICS section 6, each operation rounded in the order written, no contraction; g is the
 * gradient times state->clip (one rounding; exact when clip is 1). Elements [0, count) with weight
 * decay `decay`. Does nothing when state->skip. eps, beta1, beta2, decay rounded to real once;
 * 1-beta in f64 and rounded once. */
struct mt_adamw_args {
    mt_dtype dtype;
    int64_t count;
    double beta1, beta2, eps, decay;
    void *p, *m, *v;
    const void *grad;
    const struct mt_step_state *state;
};

#ifdef __cplusplus
}
#endif
