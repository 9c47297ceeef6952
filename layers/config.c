/* The architecture table, and the rules of a model description. */
#include <math.h>
#include <string.h>

#include "layers/model.h"

/* Of all layers: each expert's matrices are tensors with names of their own. */
enum { MOST_EXPERTS = 1 << 20 };

const mt_architecture mt_architectures[] = {
    { .model_type = "qwen3_moe",
      .hf_class = "Qwen3MoeForCausalLM",
      .qk_norm = MT_QK_NORM_HEAD,
      .rope_theta = 1e6,
      .rms_norm_eps = 1e-6,
      .norm_topk_prob = true,
      .dense_layers = true,
      .moe_block = "mlp",
      .expert_names = { "gate_proj", "up_proj", "down_proj" },
      .expert_width_key = "moe_intermediate_size",
      .experts_key = "num_experts" },
    { .model_type = "olmoe",
      .hf_class = "OlmoeForCausalLM",
      .qk_norm = MT_QK_NORM_PROJECTION,
      .rope_theta = 1e4,
      .rms_norm_eps = 1e-5,
      .norm_topk_prob = false,
      .moe_block = "mlp",
      .expert_names = { "gate_proj", "up_proj", "down_proj" },
      .expert_width_key = "intermediate_size",
      .experts_key = "num_experts" },
    { .model_type = "mixtral",
      .hf_class = "MixtralForCausalLM",
      .qk_norm = MT_QK_NORM_NONE,
      .rope_theta = 1e6,
      .rms_norm_eps = 1e-5,
      .norm_topk_prob = true,
      .norm_topk_fixed = true,
      .moe_block = "block_sparse_moe",
      .expert_names = { "w1", "w3", "w2" },
      .expert_width_key = "intermediate_size",
      .experts_key = "num_local_experts" },
};
const int mt_architecture_count = (int)(sizeof mt_architectures / sizeof *mt_architectures);

mt_status mt_architecture_find(const mt_architecture **architecture, const char *model_type)
{
    char known[128] = "";
    MT_REQUIRE(model_type, MT_EINVAL, "model_type: no name");
    for (int i = 0; i < mt_architecture_count; i++) {
        if (!strcmp(mt_architectures[i].model_type, model_type)) {
            *architecture = &mt_architectures[i];
            return MT_OK;
        }
        strncat(known, " ", sizeof known - strlen(known) - 1);
        strncat(known, mt_architectures[i].model_type, sizeof known - strlen(known) - 1);
    }
    return MT_FAIL(MT_ECONFIG, "model_type '%s' is not one of%s", model_type, known);
}

void mt_model_config_defaults(mt_model_config *config, const mt_architecture *architecture)
{
    *config = (mt_model_config){
        .architecture = architecture,
        .decoder_sparse_step = 1,
        .max_position_embeddings = 4096,
        .norm_topk_prob = architecture->norm_topk_prob,
        .rms_norm_eps = architecture->rms_norm_eps,
        .rope_theta = architecture->rope_theta,
        .router_aux_loss_coef = 0.01,
        .aux_loss = MT_AUX_SWITCH,
    };
}

bool mt_model_layer_is_moe(const mt_model_config *c, int64_t layer)
{
    if (!c->architecture->dense_layers) return true;
    for (int64_t i = 0; i < c->mlp_only_layer_count; i++)
        if (c->mlp_only_layers[i] == layer) return false;
    return c->num_experts > 0 && (layer + 1) % c->decoder_sparse_step == 0;
}

/* A key and the range its value must lie in. */
struct rule {
    const char *key;
    int64_t value, least, most;
};

static mt_status check_ranges(const mt_model_config *c)
{
    const struct rule rules[] = {
        { "vocab_size", c->vocab_size, 1, INT32_MAX },
        { "hidden_size", c->hidden_size, 1, 1 << 20 },
        { "num_hidden_layers", c->num_hidden_layers, 1, MT_MAX_LAYERS },
        { "num_attention_heads", c->num_attention_heads, 1, 1 << 16 },
        { "num_key_value_heads", c->num_key_value_heads, 1, 1 << 16 },
        { "head_dim", c->head_dim, 1, 1 << 16 },
        { "num_experts", c->num_experts, 0, 1 << 16 },
        { "num_experts_per_tok", c->num_experts_per_tok, c->num_experts ? 1 : 0, 1 << 16 },
        { "moe_intermediate_size", c->moe_intermediate_size, c->num_experts ? 1 : 0, 1 << 20 },
        { "intermediate_size", c->intermediate_size, 0, 1 << 20 },
        { "decoder_sparse_step", c->decoder_sparse_step, 1, 1 << 16 },
        { "max_position_embeddings", c->max_position_embeddings, 1, 1 << 30 },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        MT_REQUIRE(rules[i].value >= rules[i].least && rules[i].value <= rules[i].most, MT_ECONFIG,
                   "%s is %lld, must be from %lld to %lld", rules[i].key, (long long)rules[i].value,
                   (long long)rules[i].least, (long long)rules[i].most);
    return MT_OK;
}

/* Numbers from 0 up. */
static mt_status check_weights(const mt_model_config *c)
{
    const struct {
        const char *key;
        double value;
    } weights[] = {
        { "router_aux_loss_coef", c->router_aux_loss_coef },
        { "z_loss_coef", c->z_loss_coef },
        { "router_bias_update_rate", c->router_bias_update_rate },
        { "capacity_factor", c->capacity_factor },
        { "init_std", c->init_std },
        { "embed_init_std", c->embed_init_std },
    };
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        MT_REQUIRE(weights[i].value >= 0 && isfinite(weights[i].value), MT_ECONFIG,
                   "%s is %g, must be 0 or more", weights[i].key, weights[i].value);
    return MT_OK;
}

/* Architectures that call the width of an expert intermediate_size have both names for it. */
static mt_status settle_expert_width(mt_model_config *c)
{
    if (strcmp(c->architecture->expert_width_key, "intermediate_size") != 0) return MT_OK;
    if (!c->moe_intermediate_size) c->moe_intermediate_size = c->intermediate_size;
    if (!c->intermediate_size) c->intermediate_size = c->moe_intermediate_size;
    MT_REQUIRE(c->moe_intermediate_size == c->intermediate_size, MT_ECONFIG,
               "moe_intermediate_size is %lld and intermediate_size %lld: in %s both are the "
               "width of an expert",
               (long long)c->moe_intermediate_size, (long long)c->intermediate_size,
               c->architecture->model_type);
    return MT_OK;
}

mt_status mt_model_config_check(mt_model_config *c)
{
    MT_REQUIRE(c->architecture, MT_ECONFIG, "model_type is not set");
    MT_TRY(settle_expert_width(c));
    if (!c->num_key_value_heads) c->num_key_value_heads = c->num_attention_heads;
    if (!c->head_dim && c->num_attention_heads > 0) {
        MT_REQUIRE(c->hidden_size % c->num_attention_heads == 0, MT_ECONFIG,
                   "hidden_size %lld is not divisible by num_attention_heads %lld, and head_dim is "
                   "not set",
                   (long long)c->hidden_size, (long long)c->num_attention_heads);
        c->head_dim = c->hidden_size / c->num_attention_heads;
    }
    MT_TRY(check_ranges(c));
    MT_REQUIRE(c->mlp_only_layer_count >= 0 && c->mlp_only_layer_count <= MT_MAX_LAYERS, MT_ECONFIG,
               "mlp_only_layers has %lld layers, must have from 0 to %d",
               (long long)c->mlp_only_layer_count, MT_MAX_LAYERS);
    MT_REQUIRE(c->num_attention_heads % c->num_key_value_heads == 0, MT_ECONFIG,
               "num_attention_heads %lld is not divisible by num_key_value_heads %lld",
               (long long)c->num_attention_heads, (long long)c->num_key_value_heads);
    MT_REQUIRE(c->head_dim % 2 == 0, MT_ECONFIG, "head_dim is %lld, RoPE needs an even one",
               (long long)c->head_dim);
    MT_REQUIRE(c->num_experts_per_tok <= c->num_experts, MT_ECONFIG,
               "num_experts_per_tok is %lld, must not exceed num_experts %lld",
               (long long)c->num_experts_per_tok, (long long)c->num_experts);
    MT_REQUIRE(c->rms_norm_eps >= 0 && c->rms_norm_eps < 1, MT_ECONFIG,
               "rms_norm_eps is %g, must be in [0, 1)", c->rms_norm_eps);
    MT_REQUIRE(c->rope_theta > 0, MT_ECONFIG, "rope_theta is %g, must be positive", c->rope_theta);
    MT_TRY(check_weights(c));
    MT_REQUIRE(!c->architecture->norm_topk_fixed ||
                   c->norm_topk_prob == c->architecture->norm_topk_prob,
               MT_ECONFIG, "norm_topk_prob cannot be changed in %s", c->architecture->model_type);
    MT_REQUIRE(c->architecture->dense_layers ||
                   (c->decoder_sparse_step == 1 && !c->mlp_only_layer_count),
               MT_ECONFIG,
               "decoder_sparse_step is %lld and mlp_only_layers has %lld layers: every layer of %s "
               "has experts",
               (long long)c->decoder_sparse_step, (long long)c->mlp_only_layer_count,
               c->architecture->model_type);
    int64_t moe = 0;
    for (int64_t i = 0; i < c->num_hidden_layers; i++) moe += mt_model_layer_is_moe(c, i);
    MT_REQUIRE(moe == c->num_hidden_layers || c->intermediate_size > 0, MT_ECONFIG,
               "intermediate_size is %lld, dense layers need a positive one",
               (long long)c->intermediate_size);
    MT_REQUIRE(!moe || c->num_experts > 0, MT_ECONFIG, "num_experts is 0, %s needs experts",
               c->architecture->model_type);
    MT_REQUIRE(moe * c->num_experts <= MOST_EXPERTS, MT_ECONFIG,
               "num_experts is %lld, in %lld layers %lld: must be at most %d in all",
               (long long)c->num_experts, (long long)moe, (long long)(moe * c->num_experts),
               MOST_EXPERTS);
    for (int64_t i = 0; i < c->mlp_only_layer_count; i++)
        MT_REQUIRE(c->mlp_only_layers[i] >= 0 && c->mlp_only_layers[i] < c->num_hidden_layers,
                   MT_ECONFIG, "mlp_only_layers has %lld, there are %lld layers",
                   (long long)c->mlp_only_layers[i], (long long)c->num_hidden_layers);
    return MT_OK;
}
