/* A model that trains within seconds, and its batches, for tests over ranks. */
#pragma once

#include "tests/dist/ranks.h"

#include "core/rng.h"
#include "train/trainer.h"

enum { SEQUENCE = 16, BATCH = 4, STEPS = 12 };

/* Widths of no round number, so that shards end within members and within their rows. */
static inline mt_trainer_config small_config(mt_dtype dtype, const char *recipe, int64_t experts,
                                             int64_t top_k)
{
    mt_trainer_config c = { .dtype = dtype,
                            .batch_size = BATCH,
                            .micro_batch_size = 1,
                            .sequence_length = SEQUENCE,
                            .steps = STEPS,
                            .seed = 5,
                            .delayed_history = 4 };
    const mt_architecture *architecture = NULL;
    if (mt_architecture_find(&architecture, "qwen3_moe") != MT_OK) return c;
    mt_model_config_defaults(&c.model, architecture);
    c.model.vocab_size = 67, c.model.hidden_size = 32, c.model.num_hidden_layers = 2;
    c.model.num_attention_heads = c.model.num_key_value_heads = 3, c.model.head_dim = 16;
    c.model.moe_intermediate_size = 40;
    c.model.num_experts = experts, c.model.num_experts_per_tok = top_k;
    c.model.z_loss_coef = 1e-3, c.model.router_bias_update_rate = 1e-3;
    mt_optim_config_defaults(&c.optim);
    c.optim.lr = 1e-2, c.optim.warmup_steps = 3;
    snprintf(c.recipe, sizeof c.recipe, "%s", recipe);
    return c;
}

/* Members and rows that shards cut through, at every atom. */
static inline mt_trainer_config wide_config(mt_dtype dtype, const char *recipe)
{
    mt_trainer_config c = small_config(dtype, recipe, 3, 2);
    c.model.vocab_size = 301, c.model.hidden_size = 64, c.model.moe_intermediate_size = 136;
    c.model.num_attention_heads = c.model.num_key_value_heads = 5;
    c.optim.lr = 3e-3;
    return c;
}

/* In every fourth batch the second half has no targets: ranks with nothing to learn from. */
static inline void draw_batch(const mt_trainer_config *c, int64_t step, int32_t *tokens,
                              int32_t *targets)
{
    int64_t n = c->batch_size * c->sequence_length;
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)(step * n + i), vocab = (uint64_t)c->model.vocab_size;
        tokens[i] = (int32_t)mt_rng_below(11, 1, at, vocab);
        targets[i] = mt_rng_below(11, 2, at, 10) ? (int32_t)mt_rng_below(11, 3, at, vocab) : -100;
        if (step % 4 == 3 && i >= n / 2) targets[i] = -100;
    }
}

/* What the first rank has made by itself becomes what all have: one rank's run, which the others
 * would make again. */
static inline mt_status share_first(mt_comm *comm, mt_status status, void *made, size_t bytes)
{
    MT_TRY(mt_comm_agree(comm, status, "made by one rank"));
    return mt_comm_broadcast(comm, NULL, made, bytes, 0, "made by one rank");
}
