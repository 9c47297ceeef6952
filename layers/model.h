/* A decoder-only MoE language model: description, architecture table, parameters, forward.
 * Names and meanings of the description follow Hugging Face's config.json. */
#pragma once

#include "core/param.h"
#include "core/tape.h"
#include "dist/exchange.h"
#include "kernels/ops.h"
#include "layers/precision.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_MAX_LAYERS = MT_AUX_MAX_LAYERS };

/* What differs between architectures: a row per model_type. A new model is a new row. */
typedef struct mt_architecture {
    const char *model_type; /* "qwen3_moe" */
    const char *hf_class;   /* "Qwen3MoeForCausalLM" */
    mt_qk_norm qk_norm;
    double rope_theta, rms_norm_eps; /* defaults */
    bool norm_topk_prob;             /* default */
    bool norm_topk_fixed;            /* the architecture has no choice (Mixtral) */
    bool dense_layers;               /* honours mlp_only_layers, decoder_sparse_step */
    const char *moe_block;           /* "mlp" or "block_sparse_moe" */
    const char *expert_names[3];     /* gate, up, down: "gate_proj", ... or "w1", "w3", "w2" */
    const char
        *expert_width_key;   /* config key of F: "moe_intermediate_size" or "intermediate_size" */
    const char *experts_key; /* "num_experts" or "num_local_experts" */
} mt_architecture;

extern const mt_architecture mt_architectures[];
extern const int mt_architecture_count;
/* MT_ECONFIG names the text and the known model types. */
mt_status mt_architecture_find(const mt_architecture **architecture, const char *model_type);

typedef struct mt_model_config {
    const mt_architecture *architecture;
    int64_t vocab_size, hidden_size, num_hidden_layers;
    int64_t num_attention_heads, num_key_value_heads, head_dim; /* head_dim 0: hidden / heads */
    int64_t moe_intermediate_size;
    int64_t intermediate_size; /* of dense layers */
    int64_t num_experts, num_experts_per_tok;
    int64_t decoder_sparse_step;
    int64_t mlp_only_layers[MT_MAX_LAYERS];
    int64_t mlp_only_layer_count;
    int64_t max_position_embeddings;
    bool norm_topk_prob, tie_word_embeddings;
    double router_aux_loss_coef, rms_norm_eps, rope_theta;
    /* ours */
    mt_aux_kind aux_loss;
    double z_loss_coef, router_bias_update_rate, capacity_factor; /* capacity_factor 0: dropless */
    double init_std;       /* 0: N(0, 1/fan_in), residual outputs over sqrt(2 layers) */
    double embed_init_std; /* 0: the same rule as init_std (0.3 under fan-in) */
} mt_model_config;

/* The architecture's defaults (sizes are 0 and must be set). */
void mt_model_config_defaults(mt_model_config *config, const mt_architecture *architecture);
/* Fills derived fields and checks every rule (heads divide, top_k <= experts, even head_dim, ...);
 * MT_ECONFIG names the key, its value and the rule. */
mt_status mt_model_config_check(mt_model_config *config);
/* Whether layer i has experts (else a dense MLP). */
bool mt_model_layer_is_moe(const mt_model_config *config, int64_t layer);

typedef struct mt_model mt_model;

/* Builds the model's params (masters zero until initialised or loaded) and constant tables for
 * sequences of up to `max_sequence`. compute: f32, bf16 or f64 (then masters are f64). `training`
 * also allocates gradients. precision: recipes of its linear layers, or NULL. Ownership: device
 * borrowed. */
mt_status mt_model_create(mt_model **model, mt_device *device, const mt_model_config *config,
                          mt_dtype compute, int64_t max_sequence, bool training,
                          const mt_precision_options *precision);
void mt_model_destroy(mt_model **model);

const mt_model_config *mt_model_get_config(const mt_model *model);
mt_param_store *mt_model_params(const mt_model *model);
mt_precision *mt_model_precision(const mt_model *model);
/* How rows travel to experts on other ranks; NULL where all are here. */
mt_exchange *mt_model_exchange(const mt_model *model);
/* Draws every param by its rule. */
mt_status mt_model_init(mt_model *model, uint64_t seed);
/* Writes every compute copy from its master: after init, load, and each optimizer step. */
mt_status mt_model_refresh(mt_model *model, mt_stream *stream);

typedef struct mt_model_batch {
    int64_t batch, sequence;
    const int32_t *tokens;  /* device int32 [batch, sequence] */
    const int32_t *targets; /* device int32 [batch, sequence], -100 ignored; NULL: logits only */
    const void *scale;      /* device real [1]: 1 / targets counted in the whole step */
    int64_t loss_chunk;     /* tokens that have logits at a time (mt_head_loss); 0: all. Ignored
                               where logits are kept or observed */
} mt_model_batch;

/* Each output is a reference the caller releases; absent ones are NULL. */
typedef struct mt_model_output {
    mt_value *logits; /* dtype [batch, sequence, V]; NULL in training (freed as soon as the loss is
                         known) unless keep_logits */
    mt_value *loss;   /* real [1], cross-entropy times scale */
    mt_value *aux_loss; /* real [1], before its coefficient */
    mt_value *z_loss;   /* real [1], before its coefficient */
} mt_model_output;

mt_status mt_model_forward(mt_model *model, mt_tape *tape, const mt_model_batch *batch,
                           bool keep_logits, mt_model_output *output);
/* Seeds loss + coef * aux + z_coef * z, each aux term times aux_scale (1 / micro-batches of the
 * step). */
mt_status mt_model_seed(mt_model *model, mt_tape *tape, const mt_model_output *output,
                        double aux_scale);
void mt_model_output_release(mt_tape *tape, mt_model *model, mt_model_output *output);

/* Expert load of this optimizer step, per MoE layer: device int64 [E] each, summed over
 * micro-batches, which passes that do not train are not; dropped rows device int64 [1] in total.
 * Reset by mt_model_begin_step. */
int64_t mt_model_moe_layers(const mt_model *model);
const int64_t *mt_model_load(const mt_model *model, int64_t moe_layer);
const int64_t *mt_model_dropped(const mt_model *model);
mt_status mt_model_begin_step(mt_model *model);
/* The step's load and dropped rows, summed over ranks. Collective. */
mt_status mt_model_reduce_load(mt_model *model, mt_comm *comm, mt_stream *stream);
/* Aux-loss-free balancing from the step's load, where the configuration asks for it; nothing where
 * *skip (device, NULL: 0) is not 0. */
mt_status mt_model_update_router_bias(mt_model *model, mt_stream *stream, const int64_t *skip);
/* Selection biases, device f32 [E] of a MoE layer (zeros where unused): saved in checkpoints. Who
 * has written them calls mt_model_use_router_bias: routers choose by biases that are not 0 also
 * where a rate of 0 leaves them as they are. */
float *mt_model_router_bias(const mt_model *model, int64_t moe_layer);
mt_status mt_model_use_router_bias(mt_model *model);

#ifdef __cplusplus
}
#endif
