/* The parameters of a model: shapes, initial values, decay, and the names other programs know them
 * by. */
#include <math.h>
#include <stdio.h>

#include "layers/model_priv.h"

/* Standard deviation of a matrix with `fan_in` columns; outputs into the residual stream are scaled
 * down. */
static double matrix_std(const mt_model_config *c, int64_t fan_in, bool residual)
{
    if (c->init_std > 0) return c->init_std;
    double depth = residual ? 2.0 * (double)c->num_hidden_layers : 1.0;
    return 1 / sqrt((double)fan_in * depth);
}

static mt_status add_matrices(mt_model *m, mt_param **p, const char *name, int64_t members,
                              int64_t first, int64_t all, int64_t rows, int64_t cols, bool residual)
{
    mt_param_spec spec = { .name = name,
                           .members = members,
                           .first_member = first,
                           .all_members = all,
                           .m = rows,
                           .k = cols,
                           .decay = true,
                           .packed = true,
                           .init = MT_INIT_NORMAL,
                           .init_std = matrix_std(&m->config, cols, residual) };
    return mt_param_store_add(m->params, p, &spec);
}

static mt_status add_matrix(mt_model *m, mt_param **p, const char *name, int64_t rows, int64_t cols,
                            bool residual)
{
    return add_matrices(m, p, name, 1, 0, 1, rows, cols, residual);
}

static mt_status add_norm(mt_model *m, mt_param **p, const char *name, int64_t width)
{
    mt_param_spec spec = { .name = name, .members = 1, .m = 1, .k = width, .init = MT_INIT_ONE };
    MT_TRY(mt_param_store_add(m->params, p, &spec));
    return mt_param_add_part(*p, 0, 0, 1, 1, "%s.weight", name);
}

static mt_status add_embedding(mt_model *m)
{
    const mt_model_config *c = &m->config;
    double std = c->embed_init_std > 0 ? c->embed_init_std : c->init_std > 0 ? c->init_std : 0.3;
    mt_param_spec spec = { .name = "model.embed_tokens",
                           .members = 1,
                           .m = c->vocab_size,
                           .k = c->hidden_size,
                           .packed = c->tie_word_embeddings,
                           .direct = true,
                           .init = MT_INIT_NORMAL,
                           .init_std = std };
    MT_TRY(mt_param_store_add(m->params, &m->embed, &spec));
    return mt_param_add_part(m->embed, 0, 0, c->vocab_size, 2, "model.embed_tokens.weight");
}

static mt_status add_attention(mt_model *m, mt_block *b, const char *prefix)
{
    const mt_model_config *c = &m->config;
    int64_t d = c->head_dim, q = c->num_attention_heads * d, kv = c->num_key_value_heads * d;
    const char *names[3] = { "q_proj", "k_proj", "v_proj" };
    int64_t rows[3] = { q, kv, kv }, at = 0;
    char name[128];
    snprintf(name, sizeof name, "%s.self_attn.qkv_proj", prefix);
    MT_TRY(add_matrix(m, &b->qkv.weight, name, q + 2 * kv, c->hidden_size, false));
    for (int i = 0; i < 3; at += rows[i++])
        MT_TRY(mt_param_add_part(b->qkv.weight, 0, at, rows[i], 2, "%s.self_attn.%s.weight", prefix,
                                 names[i]));
    snprintf(name, sizeof name, "%s.self_attn.o_proj", prefix);
    MT_TRY(add_matrix(m, &b->o.weight, name, c->hidden_size, q, true));
    MT_TRY(mt_param_add_part(b->o.weight, 0, 0, c->hidden_size, 2, "%s.weight", name));
    if (c->architecture->qk_norm == MT_QK_NORM_NONE) return MT_OK;
    bool head = c->architecture->qk_norm == MT_QK_NORM_HEAD;
    snprintf(name, sizeof name, "%s.self_attn.q_norm", prefix);
    MT_TRY(add_norm(m, &b->q_norm, name, head ? d : q));
    snprintf(name, sizeof name, "%s.self_attn.k_norm", prefix);
    return add_norm(m, &b->k_norm, name, head ? d : kv);
}

static mt_status add_experts(mt_model *m, mt_block *b, const char *prefix)
{
    const mt_model_config *c = &m->config;
    const mt_architecture *arch = c->architecture;
    int64_t f = c->moe_intermediate_size, e = c->num_experts;
    int64_t here = e / m->expert_ranks, first = m->expert_rank * here;
    char name[128];
    snprintf(name, sizeof name, "%s.%s.gate", prefix, arch->moe_block);
    mt_param_spec router = { .name = name,
                             .members = 1,
                             .m = e,
                             .k = c->hidden_size,
                             .decay = true,
                             .init = MT_INIT_NORMAL,
                             .init_std = matrix_std(c, c->hidden_size, false) };
    MT_TRY(mt_param_store_add(m->params, &b->moe.router, &router));
    MT_TRY(mt_param_add_part(b->moe.router, 0, 0, e, 2, "%s.weight", name));
    snprintf(name, sizeof name, "%s.%s.experts.gate_up", prefix, arch->moe_block);
    if (m->expert_ranks > 1) mt_param_store_next_unit(m->params); /* of fewer ranks */
    MT_TRY(add_matrices(m, &b->moe.gate_up.weight, name, here, first, e, 2 * f, c->hidden_size,
                        false));
    snprintf(name, sizeof name, "%s.%s.experts.down", prefix, arch->moe_block);
    MT_TRY(add_matrices(m, &b->moe.down.weight, name, here, first, e, c->hidden_size, f, true));
    for (int64_t i = 0; i < e; i++) {
        const char *const *n = arch->expert_names;
        snprintf(name, sizeof name, "%s.%s.experts.%lld", prefix, arch->moe_block, (long long)i);
        MT_TRY(mt_param_add_part(b->moe.gate_up.weight, i, 0, f, 2, "%s.%s.weight", name, n[0]));
        MT_TRY(mt_param_add_part(b->moe.gate_up.weight, i, f, f, 2, "%s.%s.weight", name, n[1]));
        MT_TRY(mt_param_add_part(b->moe.down.weight, i, 0, c->hidden_size, 2, "%s.%s.weight", name,
                                 n[2]));
    }
    return MT_OK;
}

static mt_status add_mlp(mt_model *m, mt_block *b, const char *prefix)
{
    const mt_model_config *c = &m->config;
    int64_t f = c->intermediate_size;
    char name[128];
    snprintf(name, sizeof name, "%s.mlp.gate_up", prefix);
    MT_TRY(add_matrix(m, &b->mlp.gate_up.weight, name, 2 * f, c->hidden_size, false));
    MT_TRY(mt_param_add_part(b->mlp.gate_up.weight, 0, 0, f, 2, "%s.mlp.gate_proj.weight", prefix));
    MT_TRY(mt_param_add_part(b->mlp.gate_up.weight, 0, f, f, 2, "%s.mlp.up_proj.weight", prefix));
    snprintf(name, sizeof name, "%s.mlp.down_proj", prefix);
    MT_TRY(add_matrix(m, &b->mlp.down.weight, name, c->hidden_size, f, true));
    return mt_param_add_part(b->mlp.down.weight, 0, 0, c->hidden_size, 2, "%s.weight", name);
}

static mt_status add_block(mt_model *m, int64_t layer)
{
    mt_block *b = &m->blocks[layer];
    char prefix[64], name[128];
    snprintf(prefix, sizeof prefix, "model.layers.%lld", (long long)layer);
    b->index = layer, b->eps = m->config.rms_norm_eps;
    b->is_moe = mt_model_layer_is_moe(&m->config, layer);
    snprintf(name, sizeof name, "%s.input_layernorm", prefix);
    MT_TRY(add_norm(m, &b->input_norm, name, m->config.hidden_size));
    MT_TRY(add_attention(m, b, prefix));
    snprintf(name, sizeof name, "%s.post_attention_layernorm", prefix);
    MT_TRY(add_norm(m, &b->post_attention_norm, name, m->config.hidden_size));
    return b->is_moe ? add_experts(m, b, prefix) : add_mlp(m, b, prefix);
}

mt_status mt_model_add_params(mt_model *m)
{
    const mt_model_config *c = &m->config;
    MT_TRY(add_embedding(m));
    for (int64_t i = 0; i < c->num_hidden_layers; i++) {
        mt_param_store_next_unit(m->params);
        MT_TRY(add_block(m, i));
    }
    mt_param_store_next_unit(m->params);
    MT_TRY(add_norm(m, &m->norm, "model.norm", c->hidden_size));
    if (c->tie_word_embeddings) {
        m->lm_head.weight = m->embed;
        return MT_OK;
    }
    MT_TRY(add_matrix(m, &m->lm_head.weight, "lm_head", c->vocab_size, c->hidden_size, false));
    return mt_param_add_part(m->lm_head.weight, 0, 0, c->vocab_size, 2, "lm_head.weight");
}
