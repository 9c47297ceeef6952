/* Cross-entropy over a vocabulary. "real" is f32 (f64 for f64). */
#pragma once

#include "core/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_LOSS_RUN = 256 };

/* loss real [1] = scale * sum over t with targets[t] != ignore of (lse_t - logits[t, targets[t]]).
 * logits [T, V] of dtype, targets int32 [T], lse real [T] kept for backward (undefined where
 * ignored); scale real [1] on the device, usually 1 / (targets not ignored in the whole step).
 * token_loss real [T] (0 where ignored), may be NULL. Sums in f64: of each run of MT_LOSS_RUN
 * tokens in order, then of the runs. */
struct mt_cross_entropy_fwd_args {
    mt_dtype dtype;
    int64_t tokens, vocab;
    int32_t ignore; /* -100 */
    void *loss;
    void *lse;
    void *token_loss;
    const void *logits;
    const int32_t *targets;
    const void *scale;
};

/* dlogits[t, v] = dloss * scale * (softmax - onehot), 0 for ignored t. dloss real [1]. dlogits may
 * alias logits. */
struct mt_cross_entropy_bwd_args {
    mt_dtype dtype;
    int64_t tokens, vocab;
    int32_t ignore;
    void *dlogits;
    const void *logits;
    const void *lse;
    const int32_t *targets;
    const void *scale;
    const void *dloss;
};

#ifdef __cplusplus
}
#endif
