/* The gradient checker on whole models: loss, balancing losses, every param. */
#include <stdio.h>
#include <string.h>

#include "core/rng.h"
#include "train/gradcheck_priv.h"

enum { SEEDS = 32, MAX_TOKENS = 64 };

/* What a model case fixes besides the model. */
struct model_case {
    const char *name;
    const mt_model_config *config;
    int64_t batch, sequence, samples;
    mt_tape_options options;
    const float *bias; /* selection bias of every router, or NULL */
    int64_t loss_chunk;
};

static mt_status forward(check *c, bool training, double *value)
{
    const mt_model_config *config = mt_model_get_config(c->model);
    mt_model_batch batch = { .batch = c->experts,
                             .sequence = c->top_k,
                             .tokens = c->tokens,
                             .targets = c->tokens + 1,
                             .scale = c->scale,
                             .loss_chunk = c->loss_chunk };
    mt_model_output out;
    MT_TRY(mt_model_forward(c->model, c->tape, &batch, false, &out));
    if (value) {
        *value = *(const double *)out.loss->data.data;
        if (out.aux_loss && config->aux_loss != MT_AUX_NONE)
            *value += config->router_aux_loss_coef * *(const double *)out.aux_loss->data.data;
        if (out.z_loss) *value += config->z_loss_coef * *(const double *)out.z_loss->data.data;
    }
    if (training) MT_TRY(mt_model_seed(c->model, c->tape, &out, 1));
    mt_model_output_release(c->tape, c->model, &out);
    if (!training) return MT_OK;
    MT_TRY(mt_tape_backward(c->tape));
    return mt_tape_run_deferred(c->tape);
}

static mt_status pass(check *c, bool training, double *value)
{
    MT_TRY(mt_model_refresh(c->model, &c->stream));
    MT_TRY(mt_tape_begin(c->tape, training, training));
    return mt_tape_close(c->tape, forward(c, training, value));
}

static mt_status evaluate(check *c, double *value)
{
    return pass(c, false, value);
}

static mt_status gradient(check *c)
{
    MT_TRY(mt_model_begin_step(c->model));
    return pass(c, true, NULL);
}

/* Norm weights leave 1 and every matrix gets entries of a trained model's size. */
static void shake(mt_param_store *store, uint64_t seed)
{
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        mt_param *p = mt_param_store_get(store, i);
        double *w = p->master;
        for (int64_t j = 0; j < mt_param_count(p); j++)
            w[j] += 0.1 * mt_rng_normal(seed, 900 + (uint32_t)i, (uint64_t)j);
    }
}

static mt_status setup(check *c, const struct model_case *m)
{
    static const double scale[1] = { 0.125 };
    mt_param_store_destroy(&c->store);
    MT_TRY(mt_model_create(&c->model, c->device, m->config, MT_F64, m->sequence, true, NULL));
    c->store = mt_model_params(c->model);
    MT_TRY(mt_model_init(c->model, c->seed));
    shake(c->store, c->seed);
    const mt_model_config *config = mt_model_get_config(c->model);
    for (int64_t l = 0; m->bias && l < mt_model_moe_layers(c->model); l++)
        memcpy(mt_model_router_bias(c->model, l), m->bias,
               (size_t)config->num_experts * sizeof *m->bias);
    for (int i = 0; i < MAX_TOKENS; i++)
        c->tokens[i] =
            (int32_t)mt_rng_below(c->seed, 99, (uint64_t)i, (uint64_t)config->vocab_size);
    snprintf(c->name, sizeof c->name, "%s", m->name);
    c->evaluate = evaluate, c->gradient = gradient;
    c->experts = m->batch, c->top_k = m->sequence;
    c->samples = m->samples, c->scale = scale, c->step = 1e-4;
    c->loss_chunk = m->loss_chunk;
    return MT_OK;
}

/* Results wait until a whole case went through: one whose routing moved is taken again with another
 * seed. */
struct buffer {
    mt_gradcheck_result results[256];
    int count;
};

static void keep(void *context, const mt_gradcheck_result *r)
{
    struct buffer *b = context;
    if (b->count < 256) b->results[b->count++] = *r;
}

static mt_status run(mt_device *device, const struct model_case *m, bool per_tensor,
                     mt_gradcheck_report report, void *context, int64_t *failed)
{
    static _Thread_local struct buffer buffer;
    mt_status status = MT_OK;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        check *c;
        int64_t bad = 0;
        buffer.count = 0;
        MT_TRY(mt_check_create(&c, device, "model", &m->options, seed));
        status = setup(c, m);
        if (status == MT_OK) status = mt_check_run(c, keep, &buffer, per_tensor, &bad);
        mt_check_destroy(&c);
        if (status == MT_ENUMERIC) continue;
        MT_TRY(status);
        for (int i = 0; i < buffer.count && report; i++) report(context, &buffer.results[i]);
        *failed += bad;
        return MT_OK;
    }
    return mt_error_pass(status, __FILE__, __LINE__);
}

mt_status mt_gradcheck_model(mt_device *device, const mt_trainer_config *config, int64_t batch,
                             int64_t sequence, int64_t samples, const char *name,
                             mt_gradcheck_report report, void *context, int64_t *failed)
{
    MT_REQUIRE(batch > 0 && sequence > 0 && batch * sequence < MAX_TOKENS, MT_EINVAL,
               "gradcheck: %lld x %lld tokens, must be from 1 to %d", (long long)batch,
               (long long)sequence, MAX_TOKENS - 1);
    struct model_case m = { .name = name,
                            .config = &config->model,
                            .batch = batch,
                            .sequence = sequence,
                            .samples = samples,
                            .options = mt_trainer_tape_options(config),
                            .loss_chunk = config->loss_chunk };
    return run(device, &m, true, report, context, failed);
}

static mt_status two_blocks(mt_model_config *config, const char *model_type)
{
    const mt_architecture *architecture;
    MT_TRY(mt_architecture_find(&architecture, model_type));
    mt_model_config_defaults(config, architecture);
    config->vocab_size = 11, config->hidden_size = 8, config->num_hidden_layers = 2;
    config->num_attention_heads = 4, config->num_key_value_heads = 2, config->head_dim = 4;
    config->moe_intermediate_size = 6, config->intermediate_size = 6;
    config->num_experts = 4, config->num_experts_per_tok = 2;
    config->router_aux_loss_coef = 0.5, config->z_loss_coef = 0.1;
    return MT_OK;
}

mt_status mt_gradcheck_models(mt_device *device, mt_gradcheck_report report, void *context,
                              int64_t *failed)
{
    static const float empty[4] = { 0, -100, 0, 0 }, one[4] = { 0, 0, 100, 0 };
    mt_model_config qwen, olmoe, mixtral, mixed, biased, single, capacity;
    MT_TRY(two_blocks(&qwen, "qwen3_moe"));
    MT_TRY(two_blocks(&olmoe, "olmoe"));
    MT_TRY(two_blocks(&mixtral, "mixtral"));
    olmoe.aux_loss = mixtral.aux_loss = MT_AUX_HF;
    mixed = biased = single = capacity = qwen;
    mixed.mlp_only_layers[0] = 0, mixed.mlp_only_layer_count = 1, mixed.tie_word_embeddings = true;
    biased.router_bias_update_rate = single.router_bias_update_rate = 0.001;
    single.num_experts_per_tok = 1, single.norm_topk_prob = false;
    capacity.capacity_factor = 1;
    const struct model_case models[] = {
        { "qwen3_moe", &qwen, 2, 4, 0, { 0 }, NULL, 0 },
        { "olmoe, aux loss hf", &olmoe, 2, 4, 0, { 0 }, NULL, 0 },
        { "mixtral, aux loss hf", &mixtral, 2, 4, 0, { 0 }, NULL, 0 },
        { "dense layer, tied embeddings", &mixed, 2, 4, 0, { 0 }, NULL, 0 },
        { "empty expert", &biased, 2, 4, 0, { 0 }, empty, 0 },
        { "all in one expert", &single, 2, 4, 0, { 0 }, one, 0 },
        { "capacity factor 1", &capacity, 2, 4, 0, { 0 }, NULL, 0 },
        { "loss of 3 tokens at a time", &qwen, 2, 4, 0, { 0 }, NULL, 3 },
        { "recompute block", &qwen, 2, 4, 0, { .recompute = true }, NULL, 0 },
        { "recompute activation", &qwen, 2, 4, 0, { .recompute_activation = true }, NULL, 0 },
        { "offload", &qwen, 2, 4, 0, { .offload = true }, NULL, 0 },
        { "deferred wgrad", &qwen, 2, 4, 0, { .defer_wgrad = true }, NULL, 0 },
        { "all options, tied",
          &mixed,
          2,
          4,
          0,
          { .recompute = true, .recompute_activation = true, .offload = true, .defer_wgrad = true },
          NULL,
          3 },
    };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        MT_TRY(run(device, &models[i], false, report, context, failed));
    return MT_OK;
}
