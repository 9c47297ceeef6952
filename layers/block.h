/* A transformer block: h += Attn(RMSNorm(h)); h += FFN(RMSNorm(h)). */
#pragma once

#include "layers/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_block {
    int64_t index;
    mt_param *input_norm, *post_attention_norm; /* [1; 1, D] */
    mt_param *q_norm, *k_norm;                  /* NULL without QK-norm */
    mt_grouped_linear_layer qkv, o;             /* [1; (nq + 2 nkv) d, D], [1; D, nq d] */
    bool is_moe;
    mt_moe_layer moe;
    mt_mlp_layer mlp;
    double eps;
} mt_block;

/* What a block needs besides its input; lives as long as the pass. */
typedef struct mt_block_context {
    const mt_block *block;
    mt_attention_shape attention;
} mt_block_context;

enum { MT_BLOCK_OUTPUTS = 4 }; /* h, prob_sum, z_sum, counts; only h without experts */

/* An mt_segment_fn: context is an mt_block_context, inputs {h [T, D]}. */
mt_status mt_block_forward(mt_tape *tape, void *context, mt_value *const *inputs,
                           mt_value **outputs);

#ifdef __cplusplus
}
#endif
