/* The model: tables and state on the device, forward, the balancing losses. */
#include "layers/model.h"

#include <math.h>
#include <stdlib.h>

#include "layers/model_priv.h"

static size_t real_size(const mt_model *m)
{
    return mt_dtype_size(m->real);
}

/* cos and sin of s * theta^(-2i/d), computed in f64 and uploaded. */
static mt_status make_tables(mt_model *m)
{
    int64_t half = m->config.head_dim / 2, count = m->max_sequence * half;
    m->tables_bytes = 2 * (size_t)count * real_size(m);
    MT_TRY(mt_device_alloc(m->device, &m->tables, m->tables_bytes, MT_MEMORY_STATE));
    if (!m->device->computes) return MT_OK;
    void *host = malloc(m->tables_bytes);
    MT_REQUIRE(host, MT_ENOMEM, "model: %zu bytes for RoPE tables", m->tables_bytes);
    for (int64_t s = 0; s < m->max_sequence; s++)
        for (int64_t i = 0; i < half; i++) {
            double inverse =
                pow(m->config.rope_theta, -2.0 * (double)i / (double)m->config.head_dim);
            double angle = (double)s * inverse;
            mt_store_f64(host, m->real, s * half + i, cos(angle));
            mt_store_f64(host, m->real, count + s * half + i, sin(angle));
        }
    mt_status status = mt_device_copy(m->device, m->tables, host, m->tables_bytes);
    free(host);
    return status;
}

static mt_status make_state(mt_model *m)
{
    size_t cells = (size_t)(m->moe_layers * m->config.num_experts);
    size_t load = (cells + 1) * sizeof(int64_t), bias = (cells + 1) / 2 * 2 * sizeof(float);
    size_t grads = (cells + (size_t)m->moe_layers + 2) * real_size(m);
    m->state_bytes = load + bias + grads;
    MT_TRY(mt_device_alloc(m->device, &m->state, m->state_bytes, MT_MEMORY_STATE));
    m->load = m->state;
    m->dropped = m->load + cells;
    m->router_bias = (float *)(void *)((char *)m->state + load);
    m->aux_grads = (char *)m->state + load + bias;
    return mt_device_zero(m->device, m->state, m->state_bytes);
}

/* biased: routers choose by their biases, which are not all 0 or will not be. */
static void wire_routers(mt_model *m, bool biased)
{
    const mt_model_config *c = &m->config;
    int64_t moe = 0, e = c->num_experts;
    for (int64_t i = 0; i < c->num_hidden_layers; i++) {
        mt_block *b = &m->blocks[i];
        if (!b->is_moe) continue;
        b->moe.shape = (mt_router_shape){
            .experts = e,
            .top_k = c->num_experts_per_tok,
            .normalize = c->norm_topk_prob,
            .bias = biased ? m->router_bias + moe * e : NULL,
            .load = m->load + moe * e,
        };
        b->moe.capacity_factor = c->capacity_factor;
        b->moe.dropped = m->dropped;
        b->moe.exchange = m->exchange;
        moe++;
    }
}

/* A rank's experts begin where blocks of moments and of draws do. */
static mt_status spread_experts(mt_model *m, const mt_precision_options *o)
{
    enum { BLOCK = 128 };
    const mt_model_config *c = &m->config;
    m->expert_ranks = 1;
    if (!o || !o->mesh || !m->moe_layers) return MT_OK;
    m->expert_rank = mt_comm_rank(o->mesh->experts);
    m->expert_ranks = mt_comm_size(o->mesh->experts);
    int64_t here = c->num_experts / m->expert_ranks;
    MT_TRY(mt_exchange_create(&m->exchange, m->device, o->mesh->experts,
                              &(mt_exchange_options){ .experts = c->num_experts,
                                                      .top_k = c->num_experts_per_tok,
                                                      .tokens = o->exchange_tokens,
                                                      .load = o->expert_load }));
    MT_REQUIRE(
        here * c->moe_intermediate_size * c->hidden_size % BLOCK == 0, MT_ECONFIG,
        "parallel.expert is %lld: a rank's experts have %lld x %lld x %lld elements, must be a "
        "multiple of %d",
        (long long)m->expert_ranks, (long long)here, (long long)c->moe_intermediate_size,
        (long long)c->hidden_size, BLOCK);
    return MT_OK;
}

/* Whether the device's kernels route among so many. */
static mt_status check_experts(const mt_model *m)
{
    const struct mt_kernels *kernels;
    int64_t experts = m->moe_layers ? m->config.num_experts : 0;
    MT_TRY(mt_device_kernels(m->device, m->compute, &kernels));
    MT_REQUIRE(!kernels->most_experts || experts <= kernels->most_experts, MT_EUNSUPPORTED,
               "num_experts is %lld, the kernels of %s route among at most %lld",
               (long long)experts, m->device->kernel_set, (long long)kernels->most_experts);
    return MT_OK;
}

static mt_status build(mt_model *m, bool training, const mt_precision_options *precision)
{
    int64_t layers = m->config.num_hidden_layers;
    m->blocks = calloc((size_t)layers, sizeof *m->blocks);
    m->contexts = calloc((size_t)layers, sizeof *m->contexts);
    MT_REQUIRE(m->blocks && m->contexts, MT_ENOMEM, "model: out of memory for %lld layers",
               (long long)layers);
    for (int64_t i = 0; i < layers; i++) m->moe_layers += mt_model_layer_is_moe(&m->config, i);
    MT_TRY(check_experts(m));
    MT_TRY(mt_param_store_create(&m->params, m->device, m->real, m->compute));
    MT_TRY(spread_experts(m, precision));
    MT_TRY(mt_model_add_params(m));
    MT_TRY(mt_precision_create(&m->precision, m->params, precision));
    MT_TRY(mt_param_store_allocate(m->params, training));
    MT_TRY(mt_precision_start(m->precision));
    MT_TRY(make_tables(m));
    MT_TRY(make_state(m));
    wire_routers(m, m->config.router_bias_update_rate > 0);
    return MT_OK;
}

mt_status mt_model_create(mt_model **model, mt_device *device, const mt_model_config *config,
                          mt_dtype compute, int64_t max_sequence, bool training,
                          const mt_precision_options *precision)
{
    *model = NULL;
    MT_REQUIRE(compute == MT_F64 || compute == MT_F32 || compute == MT_BF16, MT_ECONFIG,
               "dtype is %s, must be f64, f32 or bf16", mt_dtype_name(compute));
    mt_model *m = calloc(1, sizeof *m);
    MT_REQUIRE(m, MT_ENOMEM, "model: out of memory");
    m->device = device, m->config = *config;
    m->compute = compute, m->real = mt_dtype_wide(compute);
    m->max_sequence = max_sequence;
    mt_status status = mt_model_config_check(&m->config);
    if (status == MT_OK) status = build(m, training, precision);
    if (status != MT_OK) {
        mt_model_destroy(&m);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    *model = m;
    return MT_OK;
}

void mt_model_destroy(mt_model **model)
{
    mt_model *m = *model;
    if (!m) return;
    mt_exchange_destroy(&m->exchange);
    mt_precision_destroy(&m->precision);
    mt_param_store_destroy(&m->params);
    mt_device_free(m->device, &m->tables, m->tables_bytes, MT_MEMORY_STATE);
    mt_device_free(m->device, &m->state, m->state_bytes, MT_MEMORY_STATE);
    free(m->blocks);
    free(m->contexts);
    free(m->loss_parts);
    free(m);
    *model = NULL;
}

const mt_model_config *mt_model_get_config(const mt_model *m)
{
    return &m->config;
}

mt_param_store *mt_model_params(const mt_model *m)
{
    return m->params;
}

mt_status mt_model_init(mt_model *m, uint64_t seed)
{
    return mt_param_store_init(m->params, seed);
}

mt_precision *mt_model_precision(const mt_model *m)
{
    return m->precision;
}

mt_exchange *mt_model_exchange(const mt_model *m)
{
    return m->exchange;
}

mt_status mt_model_refresh(mt_model *m, mt_stream *stream)
{
    return mt_precision_refresh(m->precision, stream);
}

/* Runs block i on *h, which is replaced by its output; keeps what its router reported. */
static mt_status run_block(mt_model *m, mt_tape *tape, int64_t i, int64_t *moe, mt_value **h,
                           const mt_attention_shape *shape)
{
    mt_block_context *c = &m->contexts[i];
    mt_value *inputs[] = { *h }, *outputs[MT_BLOCK_OUTPUTS] = { 0 };
    c->block = &m->blocks[i], c->attention = *shape;
    MT_TRY(mt_tape_segment(tape, mt_block_forward, c, inputs, 1, outputs,
                           c->block->is_moe ? MT_BLOCK_OUTPUTS : 1));
    mt_value_release(tape, h);
    *h = outputs[0];
    if (!c->block->is_moe) return MT_OK;
    m->prob_sums[*moe] = outputs[1], m->z_sums[*moe] = outputs[2], m->counts[*moe] = outputs[3];
    ++*moe;
    return MT_OK;
}

/* The balancing losses of this pass; their gradients wait in mt_model_seed. */
static mt_status balance(mt_model *m, mt_tape *tape, mt_model_output *out)
{
    const void *sums[MT_MAX_LAYERS], *zs[MT_MAX_LAYERS];
    const int64_t *counts[MT_MAX_LAYERS];
    for (int64_t i = 0; i < m->moe_layers; i++) {
        sums[i] = m->prob_sums[i]->data.data;
        zs[i] = m->z_sums[i]->data.data;
        counts[i] = m->counts[i]->data.data;
    }
    MT_TRY(mt_tape_value(tape, &out->aux_loss, m->real, 1, (int64_t[]){ 1 }));
    MT_TRY(mt_tape_value(tape, &out->z_loss, m->real, 1, (int64_t[]){ 1 }));
    return mt_aux_loss_fwd(mt_tape_stream(tape),
                           &(struct mt_aux_loss_fwd_args){ .dtype = m->compute,
                                                           .kind = m->config.aux_loss,
                                                           .layers = m->moe_layers,
                                                           .tokens = m->tokens,
                                                           .experts = m->config.num_experts,
                                                           .top_k = m->config.num_experts_per_tok,
                                                           .loss = out->aux_loss->data.data,
                                                           .z_loss = out->z_loss->data.data,
                                                           .prob_sums = sums,
                                                           .counts = counts,
                                                           .z_sums = zs });
}

static mt_attention_shape attention_shape(const mt_model *m, const mt_model_batch *batch)
{
    const mt_model_config *c = &m->config;
    size_t half = (size_t)(m->max_sequence * (c->head_dim / 2)) * real_size(m);
    return (mt_attention_shape){ .batch = batch->batch,
                                 .sequence = batch->sequence,
                                 .query_heads = c->num_attention_heads,
                                 .kv_heads = c->num_key_value_heads,
                                 .head_dim = c->head_dim,
                                 .norm = c->architecture->qk_norm,
                                 .eps = c->rms_norm_eps,
                                 .cos_table = m->tables,
                                 .sin_table = (const char *)m->tables + half };
}

static mt_status loss_in_parts(mt_model *m, mt_tape *tape, const mt_model_batch *batch, mt_value *x,
                               mt_value **loss)
{
    int64_t each = batch->loss_chunk, parts = (m->tokens + each - 1) / each;
    if (parts > m->loss_room) {
        free(m->loss_parts);
        m->loss_parts = calloc((size_t)parts, sizeof *m->loss_parts);
        m->loss_room = m->loss_parts ? parts : 0;
        MT_REQUIRE(m->loss_parts, MT_ENOMEM, "model: out of memory for %lld parts of the loss",
                   (long long)parts);
    }
    for (int64_t i = 0; i < parts; i++) {
        int64_t first = i * each, left = m->tokens - first;
        m->loss_parts[i] = (mt_loss_part){ &m->lm_head, batch->targets, batch->scale, first,
                                           left < each ? left : each };
    }
    return mt_head_loss(tape, loss, x, m->loss_parts, parts);
}

static mt_status head(mt_model *m, mt_tape *tape, const mt_model_batch *batch, mt_value *x,
                      bool keep_logits, mt_model_output *out)
{
    mt_value *logits;
    MT_TRY(mt_grouped_linear(tape, &logits, x, &m->lm_head, NULL));
    MT_TRY(mt_tape_observe(tape, logits, "lm_head"));
    if (batch->targets)
        MT_TRY(mt_cross_entropy(tape, &out->loss, logits, batch->targets, batch->scale));
    if (keep_logits)
        out->logits = logits;
    else
        mt_value_release(tape, &logits);
    return MT_OK;
}

mt_status mt_model_forward(mt_model *m, mt_tape *tape, const mt_model_batch *batch,
                           bool keep_logits, mt_model_output *out)
{
    *out = (mt_model_output){ 0 };
    for (int64_t i = 0; i < m->moe_layers; i++) /* what a pass that failed has left */
        m->prob_sums[i] = m->z_sums[i] = m->counts[i] = NULL;
    MT_REQUIRE(batch->sequence <= m->max_sequence, MT_EINVAL,
               "model: a sequence of %lld tokens, built for at most %lld",
               (long long)batch->sequence, (long long)m->max_sequence);
    m->tokens = batch->batch * batch->sequence;
    mt_attention_shape shape = attention_shape(m, batch);
    int64_t moe = 0;
    mt_value *h, *x;
    MT_TRY(mt_embedding(tape, &h, batch->tokens, m->tokens, m->embed));
    MT_TRY(mt_tape_observe(tape, h, "model.embed_tokens"));
    for (int64_t i = 0; i < m->config.num_hidden_layers; i++)
        MT_TRY(run_block(m, tape, i, &moe, &h, &shape));
    MT_TRY(mt_rmsnorm(tape, &x, h, m->norm, m->config.rms_norm_eps));
    mt_value_release(tape, &h);
    MT_TRY(mt_tape_observe(tape, x, "model.norm"));
    if (batch->targets && batch->loss_chunk && m->tokens > 0 && !keep_logits &&
        !mt_tape_observed(tape))
        MT_TRY(loss_in_parts(m, tape, batch, x, &out->loss));
    else
        MT_TRY(head(m, tape, batch, x, keep_logits, out));
    mt_value_release(tape, &x);
    return moe ? balance(m, tape, out) : MT_OK;
}

/* Gradients of the balancing losses go straight to what the routers reported: counts are constants,
 * so the losses are linear in the sums of probabilities and need no node of their own. */
static mt_status seed_balance(mt_model *m, mt_tape *tape, double aux, double z)
{
    int64_t e = m->config.num_experts, layers = m->moe_layers;
    size_t size = real_size(m), cells = (size_t)(layers * e);
    char *z_grads = m->aux_grads + cells * size, *seeds = z_grads + (size_t)layers * size;
    void *dsums[MT_MAX_LAYERS], *dzs[MT_MAX_LAYERS];
    const int64_t *counts[MT_MAX_LAYERS];
    for (int64_t i = 0; i < layers; i++) {
        dsums[i] = m->aux_grads + (size_t)(i * e) * size;
        dzs[i] = z_grads + (size_t)i * size;
        counts[i] = m->counts[i]->data.data;
    }
    mt_stream *stream = mt_tape_stream(tape);
    for (int i = 0; i < 2; i++)
        MT_TRY(mt_fill(stream, &(struct mt_fill_args){ .dtype = m->real,
                                                       .count = 1,
                                                       .y = seeds + (size_t)i * size,
                                                       .value = i ? z : aux }));
    MT_TRY(mt_aux_loss_bwd(stream,
                           &(struct mt_aux_loss_bwd_args){ .dtype = m->compute,
                                                           .kind = m->config.aux_loss,
                                                           .layers = layers,
                                                           .tokens = m->tokens,
                                                           .experts = e,
                                                           .top_k = m->config.num_experts_per_tok,
                                                           .dprob_sums = dsums,
                                                           .dz_sums = dzs,
                                                           .dloss = seeds,
                                                           .dz_loss = seeds + size,
                                                           .counts = counts }));
    for (int64_t i = 0; i < layers; i++) {
        MT_TRY(mt_tape_seed_tensor(tape, m->prob_sums[i], mt_tensor_1d(dsums[i], m->real, e)));
        MT_TRY(mt_tape_seed_tensor(tape, m->z_sums[i], mt_tensor_1d(dzs[i], m->real, 1)));
    }
    return MT_OK;
}

mt_status mt_model_seed(mt_model *m, mt_tape *tape, const mt_model_output *out, double aux_scale)
{
    const mt_model_config *c = &m->config;
    MT_REQUIRE(out->loss, MT_EINVAL, "model: a backward without targets");
    mt_tensor one;
    MT_TRY(mt_tape_seed_room(tape, out->loss, &one));
    MT_TRY(mt_fill(
        mt_tape_stream(tape),
        &(struct mt_fill_args){ .dtype = one.dtype, .count = 1, .y = one.data, .value = 1 }));
    double aux = c->aux_loss == MT_AUX_NONE ? 0 : c->router_aux_loss_coef * aux_scale;
    double z = c->z_loss_coef * aux_scale;
    if (!m->moe_layers || (aux == 0 && z == 0)) return MT_OK;
    return seed_balance(m, tape, aux, z);
}

void mt_model_output_release(mt_tape *tape, mt_model *m, mt_model_output *out)
{
    mt_value_release(tape, &out->logits);
    mt_value_release(tape, &out->loss);
    mt_value_release(tape, &out->aux_loss);
    mt_value_release(tape, &out->z_loss);
    for (int64_t i = 0; i < m->moe_layers; i++) {
        mt_value_release(tape, &m->prob_sums[i]);
        mt_value_release(tape, &m->z_sums[i]);
        mt_value_release(tape, &m->counts[i]);
    }
}

int64_t mt_model_moe_layers(const mt_model *m)
{
    return m->moe_layers;
}

const int64_t *mt_model_load(const mt_model *m, int64_t moe_layer)
{
    return m->load + moe_layer * m->config.num_experts;
}

const int64_t *mt_model_dropped(const mt_model *m)
{
    return m->dropped;
}

float *mt_model_router_bias(const mt_model *m, int64_t moe_layer)
{
    return m->router_bias + moe_layer * m->config.num_experts;
}

mt_status mt_model_use_router_bias(mt_model *m)
{
    size_t cells = (size_t)(m->moe_layers * m->config.num_experts);
    bool biased = m->config.router_bias_update_rate > 0;
    float *bias = calloc(cells + 1, sizeof *bias);
    MT_REQUIRE(bias, MT_ENOMEM, "no memory for %zu biases", cells);
    mt_status status = mt_device_copy(m->device, bias, m->router_bias, cells * sizeof *bias);
    for (size_t i = 0; status == MT_OK && i < cells; i++) biased |= bias[i] != 0;
    free(bias);
    wire_routers(m, biased);
    return status;
}

mt_status mt_model_begin_step(mt_model *m)
{
    size_t cells = (size_t)(m->moe_layers * m->config.num_experts);
    mt_param_store_begin_step(m->params);
    return mt_device_zero(m->device, m->load, (cells + 1) * sizeof(int64_t));
}

mt_status mt_model_reduce_load(mt_model *m, mt_comm *comm, mt_stream *stream)
{
    int64_t cells = m->moe_layers * m->config.num_experts;
    return mt_comm_all_reduce(comm, stream, m->load, cells + 1, MT_I64, MT_REDUCE_SUM,
                              "expert loads");
}

mt_status mt_model_update_router_bias(mt_model *m, mt_stream *stream, const int64_t *skip)
{
    if (m->config.router_bias_update_rate <= 0) return MT_OK;
    for (int64_t i = 0; i < m->moe_layers; i++)
        MT_TRY(mt_router_bias_update(stream, &(struct mt_router_bias_update_args){
                                                 .dtype = m->compute,
                                                 .experts = m->config.num_experts,
                                                 .rate = m->config.router_bias_update_rate,
                                                 .bias = mt_model_router_bias(m, i),
                                                 .load = m->load + i * m->config.num_experts,
                                                 .skip = skip }));
    return MT_OK;
}
