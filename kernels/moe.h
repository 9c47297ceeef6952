/* Routing: router probabilities and top-k, the route plan, gather, combine, balancing losses.
 * T tokens, E experts, k = top_k, R = T k routed rows. "real" is f32 (f64 for f64). */
#pragma once

#include "core/device.h"
#include "kernels/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A bias may choose experts none of which has any probability: their weights are then 0, not 0 / 0,
 * and the gradients finite, as in DeepSeek-V3. Sums that have some are the same with it: in f32
 * from 2^-42 on, in f64 from 2^-13 on. */
#define MT_LEAST_SHARE 1e-20

/* logits = x wr^T in real; probs = softmax over all E; the k largest logits (of probs + bias when
 * bias is given: selection only) are chosen, ties to the lowest index; weights = probs of the
 * chosen, divided by their sum + MT_LEAST_SHARE if normalize. x [T, D] of dtype; wr real [E, D];
 * bias f32 [E] or NULL. probs real [T, E]; weights real [T, k] in order of selection (best first);
 * experts int32 [T, k]; prob_sum real [E] = sum_t probs; z_sum real [1] = sum_t
 * logsumexp(logits)^2; counts int64 [E] = times each expert was chosen. lse real [T] =
 * logsumexp(logits). logits real [T, E] or NULL (written only if wanted). Source: arXiv 2101.03961;
 * selection bias: arXiv 2408.15664. */
struct mt_router_fwd_args {
    mt_dtype dtype;
    int64_t tokens, width, experts, top_k;
    bool normalize;
    const void *x;
    const void *wr;
    const float *bias;
    void *logits;
    void *probs;
    void *lse;
    void *weights;
    int32_t *chosen;
    void *prob_sum;
    void *z_sum;
    int64_t *counts;
    int64_t *load; /* int64 [E] += counts: the optimizer step's load; NULL skips */
};

/* From dweights [T, k], dprob_sum [E], dz_sum [1] (each real, each may be NULL: 0) to
 * dx = dx_add + dlogits wr  ([T, D], dtype; dx NULL skips, dx_add NULL is 0, may alias dx) and
 * dwr = (accumulate ? dwr : 0) + dlogits^T x  (real [E, D]; NULL skips).
 * dlogits = P (.) (dP - <dP, P>) + dz 2 lse P, where dP gathers all three; lse is log sum exp of
 * the logits, kept in the forward's `lse`. A backend may count a product of dlogits and wr to 2^-16
 * of its size for a dx of bf16 (cuda does). */
struct mt_router_bwd_args {
    mt_dtype dtype;
    int64_t tokens, width, experts, top_k;
    bool normalize, accumulate;
    void *dx;
    const void *dx_add;
    void *dwr;
    void *dlogits; /* real [T, E] scratch, left holding dlogits */
    const void *x;
    const void *wr;
    const void *probs;
    const void *weights;
    const int32_t *chosen;
    const void *lse; /* real [T] */
    const void *dweights, *dprob_sum, *dz_sum;
};

/* Sorts the R choices by expert, stably by (token, slot).
 * counts int64 [E] rows of each expert that are kept; offsets int64 [E+1] their CSR in rows;
 * row_token int32 [R]: the token of each row; position int32 [T, k]: the row of each
 * choice, or -1 when dropped. capacity 0 keeps everything; otherwise an expert keeps its first
 * `capacity` rows in (token, slot) order and *dropped (int64, NULL skips) += the number of the
 * rest. row_token past offsets[E] is unspecified. element_offsets int64 [MT_ROUTE_WIDTHS][E+1]:
 * offsets times widths[i], the offsets of groups of those widths; NULL is not written. R fits
 * int32. dtype is ignored beyond choosing a table. */
enum { MT_ROUTE_WIDTHS = 3 };
struct mt_route_plan_args {
    mt_dtype dtype;
    int64_t tokens, experts, top_k, capacity;
    const int32_t *chosen;
    int64_t *counts, *offsets;
    int32_t *row_token, *position;
    int64_t *dropped;
    int64_t widths[MT_ROUTE_WIDTHS];
    int64_t *element_offsets;
};

/* y[r, :] = x[row_token[r], :] for r < offsets[E]. x [T, D], y [R, D]. position, of the same
 * plan: which a backend may go by, or NULL. */
struct mt_gather_fwd_args {
    mt_dtype dtype;
    int64_t tokens, width, top_k, rows;
    void *y;
    const void *x;
    const int32_t *row_token;
    const int64_t *rows_used; /* device int64[1]: offsets + E */
    const int32_t *position;  /* int32 [T, k] */
};

/* dx[t, :] = dx_add + sum over slots (in order) of dy[position[t, slot], :], dropped slots left
 * out. */
struct mt_gather_bwd_args {
    mt_dtype dtype;
    int64_t tokens, width, top_k;
    void *dx;
    const void *dx_add; /* NULL is 0; may alias dx */
    const void *dy;
    const int32_t *position;
};

/* y[t, :] = sum over slots in order of weights[t, slot] x[position[t, slot], :] in real, one
 * rounding. x [R, D], weights real [T, k], y [T, D]. A token whose slots are all dropped gets 0. */
struct mt_combine_fwd_args {
    mt_dtype dtype;
    int64_t tokens, width, top_k;
    void *y;
    const void *x;
    const void *weights;
    const int32_t *position;
};

/* dx[position[t, slot], :] = weights[t, slot] dy[t, :]; dweights[t, slot] = <dy[t, :], x[position,
 * :]> (0 if dropped). dx [R, D], overwritten for rows < rows used, or NULL: not computed (see
 * mt_quantize_args); dweights real [T, k], or NULL and x with it: not computed (see
 * mt_weights_bwd). */
struct mt_combine_bwd_args {
    mt_dtype dtype;
    int64_t tokens, width, top_k;
    void *dx;
    void *dweights;
    const void *dy, *x;
    const void *weights;
    const int32_t *position;
};

/* The gradient of the weights where the rows x of mt_combine are a down projection's, x = a W^T, a
 * the SwiGLU of z [R, 2F]: without x, from dz, the gradient of z that W and the SwiGLU make of
 * mt_combine_bwd's dx. For <dx, x> = <dx W, a> and each term of the latter is du u, u the second
 * half of z and du of dz:
 *
 *     dweights[t, slot] = (sum over f of dz[r, F + f] z[r, F + f]) / weights[t, slot],
 *
 * r = position[t, slot], in real; 0 if dropped, and where the weight is 0: that of a softmax gives
 * nothing on to its logit (mt_router_bwd). Where operands are quantized, it holds to their errors.
 * dweights real [T, k]; dz and z NULL: there are no rows. weights NULL: what is to be divided
 * by them, which is the gradient of a factor of 1 on each row. Source: arXiv 2512.14080, which
 * takes it from <dA, a> in the same way, before rows are weighted. */
struct mt_weights_bwd_args {
    mt_dtype dtype;
    int64_t tokens, width, top_k; /* width = F */
    void *dweights;
    const void *dz, *z;
    const void *weights;
    const int32_t *position;
};

/* A GEMM of an expert layer and the ops beside it, as one. The result is, to the bit, that of the
 * same device's ops in turn, but for the order of dweights' sums:
 *
 * TN, row_token: row r of X is row row_token[r] of gemm.b (mt_gather_fwd, with position).
 * TN, act: the SwiGLU of d as it is stored (mt_swiglu_fwd), [rows, n / 2].
 * NN, z: d [rows, 2k] = from the product, rounded to dtype, to the gradient of z [rows, 2k]
 * (mt_swiglu_bwd). dweights: of the weights that b's rows are weighted by (mt_weights_bwd).
 * NN, z, row_token, where mt_kernels.weighs_after: row r of dY is row row_token[r] of gemm.b, and
 * its weight s comes after the product: of the product p and the SwiGLU y of z, both rounded to
 * dtype, d is the gradient of z that s p gives, in real, act [rows, k] = s y (NULL: not stored),
 * and dweights = <p, y>, 0 if dropped.
 *
 * NT, row_token: row r of X is row row_token[r] of gemm.a; gathers_b: that of dY, of gemm.b.
 *
 * A gathered operand is plain, of dtype: its group gives the rows, its codes are [tokens, k]. TN
 * with act and NN with z have c NULL and results of dtype. */
struct mt_moe_gemm_args {
    mt_dtype dtype;
    struct mt_gemm_args gemm;
    const int32_t *row_token; /* int32 [rows]; NULL: rows are in place */
    int64_t tokens;           /* of row_token, or of dweights */
    const int64_t
        *rows_used; /* device int64 [1]: rows of all members; NULL: all there is room for */
    void *act;
    const void *z;
    void *dweights;          /* real [tokens, top_k]; NULL: not computed */
    const void *weights;     /* real [tokens, top_k] */
    const int32_t *position; /* int32 [tokens, top_k]: as mt_route_plan_args has it */
    int64_t top_k;
    void *scratch;  /* mt_moe_gemm_scratch bytes */
    bool gathers_b; /* row_token is of gemm.b: NT */
};

/* Bytes that the op needs: what its parts hand on, or, one kernel, partial sums. */
mt_status mt_moe_gemm_scratch(mt_stream *stream, const struct mt_moe_gemm_args *args,
                              size_t *bytes);
/* The ops in turn: for backends, where they have nothing better. Then dweights alone. */
mt_status mt_moe_gemm_parts(mt_stream *stream, const struct mt_moe_gemm_args *args);
mt_status mt_moe_gemm_weights(mt_stream *stream, const struct mt_moe_gemm_args *args);

typedef enum mt_aux_kind {
    MT_AUX_NONE,
    MT_AUX_SWITCH, /* per layer: E sum_e f_e P_e, f_e = count_e / (T k), P_e = prob_sum_e / T;
                      summed over layers */
    MT_AUX_HF /* over the rows of all layers: E sum_e (sum over slots f_e) P_e, f = count / (L T), P
                 = prob_sum / (L T) */
} mt_aux_kind;

/* loss real [1] from the L layers' prob_sum (L pointers to real [E]) and counts (int64 [E]). The
 * pointer arrays are host memory, at most MT_AUX_MAX_LAYERS. z: z_loss real [1] = (sum over layers
 * of z_sum) / T, i.e. mean of logsumexp^2 summed over layers (z_sums NULL: not computed). Without
 * tokens both are 0. */
enum { MT_AUX_MAX_LAYERS = 128 };
struct mt_aux_loss_fwd_args {
    mt_dtype dtype;
    mt_aux_kind kind;
    int64_t layers, tokens, experts, top_k;
    void *loss;
    void *z_loss;
    const void *const *prob_sums;
    const int64_t *const *counts;
    const void *const *z_sums;
};

/* dprob_sums[l] (real [E]) and dz_sums[l] (real [1]), overwritten, from dloss and dz_loss (real
 * [1], NULL: 0). Counts are constants. */
struct mt_aux_loss_bwd_args {
    mt_dtype dtype;
    mt_aux_kind kind;
    int64_t layers, tokens, experts, top_k;
    void *const *dprob_sums;
    void *const *dz_sums; /* entries may be NULL */
    const void *dloss, *dz_loss;
    const int64_t *const *counts;
};

/* Aux-loss-free balancing, once per optimizer step: bias_e += rate * sign(mean load - load_e), then
 * the mean of bias is subtracted, each in f64 and rounded to f32; load int64 [E] is the step's
 * count. bias f32 [E]. Does nothing where *skip (device int64, NULL: 0) is not 0. */
struct mt_router_bias_update_args {
    mt_dtype dtype;
    int64_t experts;
    double rate;
    float *bias;
    const int64_t *load;
    const int64_t *skip;
};

#ifdef __cplusplus
}
#endif
