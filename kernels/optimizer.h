/* Gradient norm and AdamW over flat buffers. "real" is f32 (f64 under f64 compute). dtype here is
 * the dtype of gradients, masters and moments unless they are stored otherwise: f32 or f64. */
#pragma once

#include "core/master.h"
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

enum { MT_NORM_RUN = 512 };

typedef enum mt_norm_pass {
    MT_NORM_ALL,
    MT_NORM_SUM,
    MT_NORM_FINISH,
    MT_NORM_PASS_COUNT
} mt_norm_pass;

/* state->grad_norm = sqrt(sum g^2) in f64: partial sums over fixed blocks of 4096, of `grad` and
 * then of `bf16_grad`; each run of MT_NORM_RUN of these added in order, then the runs' sums.
 * state->clip = max_norm > 0 ? min(1, max_norm / (norm + 1e-6)) : 1. state->skip = norm, or *loss
 * where given, is not finite; then skipped and skipped_in_a_row count, else power1 *= beta1, power2
 * *= beta2, bias1, bias2, applied follow and skipped_in_a_row = 0. */
struct mt_grad_norm_args {
    mt_dtype dtype;
    int64_t count;
    double max_norm, beta1, beta2;
    const void *grad;
    const void *loss; /* scalar of dtype, or NULL */
    int64_t bf16_count;
    const uint16_t *bf16_grad; /* gradients that are stored in bf16; dtype f32 only */
    /* Where ranks hold shards of the gradient, two calls: MT_NORM_SUM only writes sum g^2 of these
     * elements to *sum (f64); after it was added up over ranks, MT_NORM_FINISH does the rest from
     * *sum and reads no gradient. */
    mt_norm_pass pass;
    double *sum; /* NULL under MT_NORM_ALL */
    struct mt_step_state *state;
};

/* How Adam's moments are stored between steps. */
typedef enum mt_moments {
    MT_MOMENTS_REAL,
    MT_MOMENTS_BF16,
    MT_MOMENTS_FP8,
    MT_MOMENTS_COUNT
} mt_moments;

typedef struct mt_moments_form {
    const char *name; /* "f32", "bf16", "fp8": as configurations and checkpoints call it */
    mt_dtype dtype;   /* of an element; f32 stands for real */
    int block;        /* elements in a row that share an f32 scale; 0: no scales */
    bool stochastic;  /* can be rounded stochastically */
} mt_moments_form;

/* A row for each form. */
extern const mt_moments_form mt_moments_forms[MT_MOMENTS_COUNT];
/* Type and bytes of a stored element, and blocks that `count` elements have. */
mt_dtype mt_moments_dtype(mt_moments moments, mt_dtype real);
size_t mt_moments_size(mt_moments moments, mt_dtype real);
int64_t mt_moments_blocks(mt_moments moments, int64_t count);

/* NUMERICS section 6, each operation rounded in the order written, no contraction; g is the
 * gradient times state->clip (one rounding; exact when clip is 1). Elements [0, count) with weight
 * decay `decay`. Does nothing when state->skip. eps, beta1, beta2, decay rounded to real once;
 * 1-beta in f64 and rounded once.
 *
 * m, v and p are read from their storage, updated in real, and stored again; u is of the m and v
 * that were not yet stored. With f64, everything is stored as real.
 *
 * moments: REAL. BF16, the cast of NUMERICS section 2 (nearest even); `stochastic`: the bits, as an
 * integer, plus u16, cut to the upper 16 (NaN and Inf stay). FP8: E4M3 codes and, for every 128
 * elements from element 0 on, the stored inverse RN(1/s) of s = F(amax, 448, 0, pow2 off, FLT_MAX);
 * elements that the last block lacks count as 0. m has the codes of RN(m s). v is kept as r =
 * RN(sqrt(v)): the codes of RN(r s) rounded up, at most 448, and read back as RN(d d), d = RN(code
 * inverse); so a code is 0 exactly where v is. Zeroed storage is 0 in every form.
 *
 * u16 is a function of the element's place alone: with e = first + its index in this call, output
 * word (e >> 1) & 3, its low half when e is even, the high half when odd, of Philox4x32-10 with key
 * = (seed, seed >> 32), counter = (e >> 3, e >> 35, 2 param for m or 2 param + 1 for v,
 * state->applied), each cut to 32 bits. `first` must be a multiple of 128: a call on part of a
 * param passes its first element.
 *
 * grad: of dtype, or bf16, which counts as the f32 that it is (f32 only).
 *
 * master: REAL, or SPLIT into p (bf16) and p_low (core/master.h). cast: NULL, or receives what p
 * becomes, cast to bf16 (nearest even; REAL and f32 only). p, p_low, cast, m, v, grad and scales
 * must not overlap.
 *
 * next: another param that is updated in the same call, so that many small ones cost no launch
 * each; all of a call share dtype, betas, eps, master, moments, stochastic, seed and state. */
struct mt_adamw_args {
    mt_dtype dtype;
    int64_t count;
    double beta1, beta2, eps, decay;
    mt_master master;
    mt_moments moments;
    bool stochastic;
    void *p;                    /* real; uint16_t where split */
    int16_t *p_low;             /* NULL unless split */
    uint16_t *cast;             /* [count] or NULL */
    void *m, *v;                /* of the form's dtype */
    float *m_scales, *v_scales; /* [ceil(count / block)]; NULL without blocks */
    const void *grad;
    bool grad_bf16;
    int64_t first;
    uint64_t seed; /* with param: of stochastic rounding */
    uint32_t param;
    const struct mt_step_state *state;
    const struct mt_adamw_args *next; /* NULL: none */
};

/* y[i] = the f32 whose halves are high[i] and low[i] (core/master.h). dtype must be f32. */
struct mt_join_master_args {
    mt_dtype dtype;
    int64_t count;
    float *y;
    const uint16_t *high;
    const int16_t *low;
};

#ifdef __cplusplus
}
#endif
