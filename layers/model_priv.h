/* Inside the model: its blocks and device state. */
#pragma once

#include "layers/block.h"
#include "layers/model.h"

struct mt_model {
    mt_device *device;
    mt_model_config config;
    mt_dtype compute, real;
    int64_t max_sequence, moe_layers;
    int64_t expert_rank, expert_ranks; /* of those that share a layer's experts */
    mt_exchange *exchange;             /* NULL: all experts are here */
    mt_param_store *params;
    mt_precision *precision;
    mt_param *embed, *norm;
    mt_grouped_linear_layer lm_head; /* its weight is `embed` when tied */
    mt_block *blocks;
    mt_block_context *contexts;
    mt_loss_part *loss_parts; /* room for the most of any pass */
    int64_t loss_room;
    void *tables; /* cos, sin: real [max_sequence, d/2] each */
    void *state; /* load int64 [L, E], dropped int64 [1], router bias f32 [L, E], aux gradients real
                    [L, E + 1] */
    size_t tables_bytes, state_bytes;
    int64_t *load, *dropped;
    float *router_bias;
    char *
        aux_grads; /* real [L, E] of prob_sums, then [L] of z_sums, then aux and z loss seeds [2] */
    /* This pass: what routers reported, one per MoE layer. */
    mt_value *prob_sums[MT_MAX_LAYERS], *z_sums[MT_MAX_LAYERS], *counts[MT_MAX_LAYERS];
    int64_t tokens;
};

/* Adds every param of the model with its exported names; fills the blocks. */
mt_status mt_model_add_params(mt_model *model);
