/* A transformer block. */
#include "layers/block.h"

#include <stdio.h>

static mt_status attention_half(mt_tape *tape, mt_value **y, mt_value *h, const mt_block_context *c)
{
    const mt_block *b = c->block;
    long long n = (long long)b->index;
    mt_value *x, *qkv, *rotated, *heads, *o;
    MT_TRY(mt_rmsnorm(tape, &x, h, b->input_norm, b->eps));
    MT_TRY(mt_tape_observe(tape, x, "model.layers.%lld.input_layernorm", n));
    MT_TRY(mt_grouped_linear(tape, &qkv, x, &b->qkv, NULL));
    mt_value_release(tape, &x);
    MT_TRY(mt_tape_observe(tape, qkv, "model.layers.%lld.self_attn.qkv_proj", n));
    MT_TRY(mt_qk_norm_rope(tape, &rotated, qkv, b->q_norm, b->k_norm, &c->attention));
    mt_value_release(tape, &qkv);
    MT_TRY(mt_attention(tape, &heads, rotated, &c->attention));
    mt_value_release(tape, &rotated);
    MT_TRY(mt_grouped_linear(tape, &o, heads, &b->o, NULL));
    mt_value_release(tape, &heads);
    MT_TRY(mt_tape_observe(tape, o, "model.layers.%lld.self_attn", n));
    MT_TRY(mt_residual_add(tape, y, h, o));
    mt_value_release(tape, &o);
    return MT_OK;
}

mt_status mt_block_forward(mt_tape *tape, void *context, mt_value *const *inputs,
                           mt_value **outputs)
{
    const mt_block_context *c = context;
    const mt_block *b = c->block;
    char name[64];
    snprintf(name, sizeof name, "model.layers.%lld.mlp", (long long)b->index);
    mt_value *h, *x, *ffn;
    mt_routing routing;
    MT_TRY(attention_half(tape, &h, inputs[0], c));
    MT_TRY(mt_rmsnorm(tape, &x, h, b->post_attention_norm, b->eps));
    MT_TRY(mt_tape_observe(tape, x, "model.layers.%lld.post_attention_layernorm",
                           (long long)b->index));
    if (b->is_moe)
        MT_TRY(mt_moe_forward(tape, &ffn, &routing, x, &b->moe, name));
    else
        MT_TRY(mt_mlp_forward(tape, &ffn, x, &b->mlp));
    mt_value_release(tape, &x);
    MT_TRY(mt_tape_observe(tape, ffn, "%s", name));
    MT_TRY(mt_residual_add(tape, &outputs[0], h, ffn));
    mt_value_release(tape, &ffn);
    mt_value_release(tape, &h);
    MT_TRY(mt_tape_observe(tape, outputs[0], "model.layers.%lld", (long long)b->index));
    if (!b->is_moe) return MT_OK;
    mt_value *stats[] = { routing.prob_sum, routing.z_sum, routing.counts };
    for (int i = 0; i < 3; i++) {
        mt_value_hold(stats[i]);
        outputs[1 + i] = stats[i];
    }
    mt_routing_release(tape, &routing);
    return MT_OK;
}
