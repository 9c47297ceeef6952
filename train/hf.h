/* Hugging Face model directories: config.json and safetensors, in both directions and without loss.
 */
#pragma once

#include "layers/model.h"
#include "train/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads a model description from the text of a config.json; `what` names it in errors. Accepts
 * num_experts or num_local_experts, rope_theta or rope_parameters.rope_theta, an absent or null
 * head_dim. Keys of ours (aux_loss, z_loss_coef, ...) are honoured where `own`; otherwise the aux
 * loss is `hf`, as transformers computes it. Errors: MT_ECONFIG or MT_EUNSUPPORTED names the key,
 * its value and the rule: whatever changes the model's function and is not implemented here is
 * refused when it is active. */
mt_status mt_hf_config_parse(mt_model_config *config, const char *text, size_t bytes,
                             const char *what, bool own);
/* Reads DIR/config.json; *text, if not NULL, receives it (freed by the caller). */
mt_status mt_hf_config_read(mt_model_config *config, char **text, const char *dir);

/* Writes it as JSON, freed by the caller: for `own`, with our keys, for checkpoints. `dtype` of the
 * tensors beside it (MT_DTYPE_COUNT: not written). `base`: text of the config.json that the model
 * came with, whose other keys are kept, or NULL. */
mt_status mt_hf_config_format(char **text, const mt_model_config *config, mt_dtype dtype,
                              const char *base, bool own);

/* Reads DIR (config.json, model.safetensors or an index with its shards; experts one by one or
 * fused) and writes the checkpoint directory `checkpoint`, tensors in the dtype they came in. An
 * existing checkpoint there is replaced, anything else refused; a failure leaves nothing new.
 * Errors name the tensor that is missing, unexpected, or of another shape. */
mt_status mt_hf_import(const char *checkpoint, const char *dir);
/* The same for params made by the caller; `config_text` is recorded, or NULL. */
mt_status mt_hf_import_params(const char *checkpoint, const char *dir,
                              const mt_model_config *config, const mt_param_store *params,
                              const char *config_text);

/* What a model computes with and transformers' models have no place for. */
typedef struct mt_hf_left_out {
    bool router_bias;       /* of some router: selection biases other than 0 */
    double capacity_factor; /* 0: no expert drops rows */
    int64_t head_dim;       /* 0: hidden_size / num_attention_heads, as OLMoE's norms have it */
} mt_hf_left_out;

/* Writes the checkpoint's model into DIR (made if absent): config.json, one tensor per expert, each
 * in the dtype it has in the checkpoint, in files of at most shard_bytes (0: one file). *left,
 * which may be NULL, says what is not in it. Errors, with nothing written: MT_EDAMAGED names a
 * tensor that the configuration calls for and the checkpoint has not, or the other way, or in
 * another shape; MT_ECONFIG where DIR is a complete checkpoint or in one, or while another process
 * writes there. */
mt_status mt_hf_export_checkpoint(const char *dir, mt_checkpoint *checkpoint, int64_t shard_bytes,
                                  mt_hf_left_out *left);
/* Opens the checkpoint, does that, closes. */
mt_status mt_hf_export(const char *dir, const char *checkpoint, int64_t shard_bytes,
                       mt_hf_left_out *left);

#ifdef __cplusplus
}
#endif
