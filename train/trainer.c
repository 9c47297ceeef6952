/* A trainer: what it is made of, its inputs, and forward passes. */
#include "train/trainer_priv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { IGNORE = -100 };

/* ---- recipes ------------------------------------------------------------------------------------
 */

/* One rank makes a mesh of degree 1, and of no other. */
static mt_status create_mesh(mt_trainer *t)
{
    const mt_trainer_config *c = &t->config;
    if (c->expert_parallel <= 1) return MT_OK;
    MT_REQUIRE(c->comm, MT_ECONFIG, "parallel.expert is %lld, must be 1 on one rank",
               (long long)c->expert_parallel);
    return mt_mesh_create(&t->mesh, c->comm, c->expert_parallel);
}

mt_status mt_trainer_precision(mt_precision_options *options, mt_recipe_rules **rules,
                               const mt_trainer_config *c)
{
    *rules = NULL;
    if (*c->recipe && strcmp(c->recipe, "none") != 0)
        MT_TRY(mt_recipe_rules_create(rules, c->recipe, c->dtype));
    *options = (mt_precision_options){ .rules = *rules,
                                       .save_original_input = c->save_original_input,
                                       .save_expert_output = c->save_expert_output,
                                       .history = c->delayed_history,
                                       .margin = c->delayed_margin,
                                       .most_recent = c->delayed_most_recent,
                                       .seed = c->seed,
                                       .bf16_grads = c->grad_dtype == MT_BF16 && !c->forward_only,
                                       .master = c->optim.master };
    return MT_OK;
}

static mt_status create_model(mt_trainer *t)
{
    const mt_trainer_config *c = &t->config;
    mt_recipe_rules *rules;
    mt_precision_options options;
    MT_TRY(create_mesh(t));
    MT_TRY(mt_trainer_precision(&options, &rules, c));
    options.comm = c->comm;
    options.mesh = c->expert_parallel > 1 ? &t->mesh : NULL;
    options.expert_load = c->expert_capacity;
    options.exchange_tokens = c->micro_batch_size * c->sequence_length;
    options.shards =
        (mt_fsdp_options){ .keep_gathered = c->keep_gathered, .reduce_bf16 = c->reduce_bf16 };
    options.offload = c->optim.offload;
    mt_status status = mt_model_create(&t->model, t->device, &c->model, c->dtype,
                                       c->sequence_length, !c->forward_only, &options);
    mt_recipe_rules_destroy(&rules);
    return status;
}

uint32_t mt_trainer_first_pass(const mt_trainer_config *c, int64_t steps)
{
    return (uint32_t)(steps * (c->batch_size / c->micro_batch_size));
}

/* Draws of the step to come count from here. */
mt_status mt_trainer_begin_draws(mt_trainer *t)
{
    return mt_precision_set_first_pass(mt_model_precision(t->model),
                                       mt_trainer_first_pass(&t->config, t->steps));
}

/* The tape's hook. */
static mt_status grad_ready(void *trainer, mt_param *param)
{
    mt_fsdp *fsdp = mt_trainer_shards(trainer);
    return fsdp ? mt_fsdp_grad_ready(fsdp, param) : MT_OK;
}

/* The optimizer's. */
static mt_status updated(void *trainer, mt_param *param)
{
    mt_fsdp *fsdp = mt_trainer_shards(trainer);
    return fsdp ? mt_fsdp_updated(fsdp, param) : MT_OK;
}

mt_tape_options mt_trainer_tape_options(const mt_trainer_config *c)
{
    return (mt_tape_options){ .defer_wgrad = c->defer_wgrad,
                              .offload = c->offload,
                              .recompute = c->recompute == MT_RECOMPUTE_BLOCK,
                              .recompute_activation = c->recompute == MT_RECOMPUTE_ACTIVATION };
}

static mt_status build(mt_trainer *t)
{
    const mt_trainer_config *c = &t->config;
    mt_tape_options options = mt_trainer_tape_options(c);
    options.grad_ready = grad_ready, options.context = t;
    size_t real = mt_dtype_size(t->real);
    t->batch_bytes = (size_t)(c->batch_size * c->sequence_length) * sizeof(int32_t);
    MT_TRY(create_model(t));
    t->config.model = *mt_model_get_config(t->model);
    if (!c->forward_only) {
        MT_TRY(mt_optimizer_create(&t->optimizer, mt_model_params(t->model), &c->optim));
        mt_optimizer_set_comm(t->optimizer, c->comm);
        mt_optimizer_set_updated(t->optimizer, updated, t);
    }
    MT_TRY(mt_tape_create(&t->tape, &t->stream, &options));
    size_t load = (size_t)(mt_model_moe_layers(t->model) * c->model.num_experts);
    t->load = calloc(load + 1, sizeof *t->load);
    MT_REQUIRE(t->load, MT_ENOMEM, "trainer: out of memory");
    MT_TRY(mt_device_alloc(t->device, &t->tokens, t->batch_bytes, MT_MEMORY_STATE));
    MT_TRY(mt_device_alloc(t->device, &t->targets, t->batch_bytes, MT_MEMORY_STATE));
    MT_TRY(mt_device_alloc(t->device, &t->scale, real, MT_MEMORY_STATE));
    MT_TRY(mt_device_alloc(t->device, &t->metrics, MT_TRAINER_METRICS * real, MT_MEMORY_STATE));
    return c->weights_come ? MT_OK : mt_trainer_draw_weights(t);
}

mt_status mt_trainer_draw_weights(mt_trainer *t)
{
    MT_TRY(mt_model_init(t->model, t->config.seed));
    if (t->config.quantized_init)
        MT_TRY(mt_precision_quantized_init(mt_model_precision(t->model), &t->stream));
    return mt_model_refresh(t->model, &t->stream);
}

mt_status mt_trainer_create(mt_trainer **trainer, mt_device *device,
                            const mt_trainer_config *config)
{
    *trainer = NULL;
    const mt_trainer_config *c = config;
    MT_REQUIRE(c->sequence_length > 0, MT_ECONFIG, "sequence_length is %lld, must be positive",
               (long long)c->sequence_length);
    MT_REQUIRE(c->batch_size > 0 && c->micro_batch_size > 0 &&
                   c->batch_size % c->micro_batch_size == 0,
               MT_ECONFIG, "batch_size %lld must be a positive multiple of micro_batch_size %lld",
               (long long)c->batch_size, (long long)c->micro_batch_size);
    MT_REQUIRE(c->micro_batch_size <= INT32_MAX / c->sequence_length, MT_ECONFIG,
               "micro_batch_size is %lld, of %lld tokens each: must be at most 2^31-1 in all",
               (long long)c->micro_batch_size, (long long)c->sequence_length);
    int64_t tokens = c->micro_batch_size * c->sequence_length, k = c->model.num_experts_per_tok;
    MT_REQUIRE(k <= 0 || tokens <= INT32_MAX / k, MT_ECONFIG,
               "micro_batch_size is %lld, of %lld tokens each for %lld experts: must be at most "
               "2^31-1 rows in all",
               (long long)c->micro_batch_size, (long long)c->sequence_length, (long long)k);
    int size = mt_comm_size(c->comm);
    MT_REQUIRE(c->batch_size % (c->micro_batch_size * size) == 0, MT_ECONFIG,
               "batch_size %lld must be a multiple of micro_batch_size %lld on each of %d ranks",
               (long long)c->batch_size, (long long)c->micro_batch_size, size);
    if (!c->forward_only) MT_TRY(mt_optim_config_check_real(&c->optim, mt_dtype_wide(c->dtype)));
    mt_trainer *t = calloc(1, sizeof *t);
    MT_REQUIRE(t, MT_ENOMEM, "trainer: out of memory");
    t->config = *config, t->device = device, t->stream.device = device;
    t->real = mt_dtype_wide(c->dtype);
    t->config.optim.seed = c->seed;
    mt_status status = build(t);
    if (status != MT_OK) {
        mt_trainer_destroy(&t);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    *trainer = t;
    return MT_OK;
}

void mt_trainer_destroy(mt_trainer **trainer)
{
    mt_trainer *t = *trainer;
    if (!t) return;
    size_t real = mt_dtype_size(t->real);
    mt_graph_destroy(&t->graph);
    mt_tape_destroy(&t->tape);
    mt_optimizer_destroy(&t->optimizer);
    mt_model_destroy(&t->model);
    mt_mesh_destroy(&t->mesh);
    mt_device_free(t->device, &t->tokens, t->batch_bytes, MT_MEMORY_STATE);
    mt_device_free(t->device, &t->targets, t->batch_bytes, MT_MEMORY_STATE);
    mt_device_free(t->device, &t->scale, real, MT_MEMORY_STATE);
    mt_device_free(t->device, &t->metrics, MT_TRAINER_METRICS * real, MT_MEMORY_STATE);
    free(t->load);
    free(t);
    *trainer = NULL;
}

mt_status mt_trainer_upload_scalar(mt_trainer *t, void *to, double x)
{
    double bits = 0;
    mt_store_f64(&bits, t->real, 0, x);
    return mt_device_copy(t->device, to, &bits, mt_dtype_size(t->real));
}

/* Targets that are not ignored, of a batch that the model can read. */
static mt_status check_batch(const mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                             int64_t count, int64_t *counted)
{
    int64_t vocab = t->config.model.vocab_size;
    *counted = 0;
    for (int64_t i = 0; i < count; i++) {
        MT_REQUIRE(tokens[i] >= 0 && tokens[i] < vocab, MT_EINVAL,
                   "token %lld of the batch is %d, must be in [0, vocab_size %lld)", (long long)i,
                   (int)tokens[i], (long long)vocab);
        if (!targets || targets[i] == IGNORE) continue;
        MT_REQUIRE(targets[i] >= 0 && targets[i] < vocab, MT_EINVAL,
                   "target %lld of the batch is %d, must be in [0, vocab_size %lld) or %d",
                   (long long)i, (int)targets[i], (long long)vocab, IGNORE);
        ++*counted;
    }
    return MT_OK;
}

/* Copies a batch to the device; *counted receives the targets that are not ignored. A device that
 * only counts asks no token: a planned batch may have billions. */
mt_status mt_trainer_upload(mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                            int64_t count, int64_t *counted)
{
    *counted = count;
    if (t->device->computes) MT_TRY(check_batch(t, tokens, targets, count, counted));
    size_t bytes = (size_t)count * sizeof(int32_t);
    MT_TRY(mt_device_copy(t->device, t->tokens, tokens, bytes));
    return targets ? mt_device_copy(t->device, t->targets, targets, bytes) : MT_OK;
}

void mt_trainer_open_exchange(mt_trainer *t)
{
    mt_exchange *exchange = mt_model_exchange(t->model);
    bool observed =
        mt_tape_observed(t->tape) || mt_precision_observed(mt_model_precision(t->model));
    if (exchange) mt_exchange_open(exchange, observed);
}

mt_status mt_trainer_settle(mt_trainer *t, bool *again)
{
    mt_exchange *exchange = mt_model_exchange(t->model);
    *again = false;
    return exchange ? mt_exchange_settle(exchange, t->config.comm, &t->stream, again) : MT_OK;
}

/* Names what is run at which shapes, in which formats. */
uint64_t mt_trainer_pass_key(const mt_trainer *t, mt_pass_kind kind, int64_t batch,
                             int64_t sequence)
{
    const mt_exchange *exchange = mt_model_exchange(t->model);
    const mt_precision *precision = mt_model_precision(t->model);
    uint64_t epoch = mt_precision_epoch(precision);
    uint64_t counting = kind != MT_PASS_TRAIN && mt_precision_counts_all(precision);
    uint64_t observed = mt_precision_observed(precision); /* rows are put together for it */
    if (exchange) epoch += mt_exchange_epoch(exchange) << 32;
    return epoch * 0x9e3779b97f4a7c15u ^ (counting << 63 | observed << 62 | (uint64_t)kind << 56 |
                                          (uint64_t)batch << 28 | (uint64_t)sequence);
}

/* ---- forward only -------------------------------------------------------------------------------
 */

/* Logits as f64 in host memory: of one row, or (row < 0) of all. */
static mt_status read_logits(const mt_trainer *t, const mt_tensor *from, int64_t row,
                             double *logits)
{
    int64_t first = row < 0 ? 0 : row, vocab = mt_tensor_cols(from);
    int64_t count = row < 0 ? mt_tensor_count(from) : vocab;
    size_t size = mt_dtype_size(from->dtype), bytes = (size_t)count * size;
    void *host = malloc(bytes);
    MT_REQUIRE(host, MT_ENOMEM, "trainer: %zu bytes for logits", bytes);
    mt_status status = mt_device_copy(
        t->device, host, (const char *)from->data + (size_t)(first * vocab) * size, bytes);
    for (int64_t i = 0; status == MT_OK && i < count; i++)
        logits[i] = mt_load_f64(host, from->dtype, i);
    free(host);
    return status;
}

/* Runs a forward of [batch, sequence] on uploaded tokens; loss and logits (f64, host) where asked.
 */
static mt_status forward(mt_trainer *t, int64_t batch, int64_t sequence, double *loss, int64_t row,
                         double *logits)
{
    mt_model_batch in = { .batch = batch,
                          .sequence = sequence,
                          .tokens = t->tokens,
                          .targets = loss ? t->targets : NULL,
                          .scale = t->scale,
                          .loss_chunk = t->config.loss_chunk };
    mt_model_output out;
    MT_TRY(mt_model_forward(t->model, t->tape, &in, logits != NULL, &out));
    if (loss) {
        double bits = 0;
        MT_TRY(mt_device_copy(t->device, &bits, out.loss->data.data, mt_dtype_size(t->real)));
        *loss = mt_load_f64(&bits, t->real, 0);
    }
    if (logits) MT_TRY(read_logits(t, &out.logits->data, row, logits));
    mt_model_output_release(t->tape, t->model, &out);
    return MT_OK;
}

mt_status mt_trainer_forward(mt_trainer *t, mt_pass_kind kind, int64_t batch, int64_t sequence,
                             double *loss, int64_t row, double *logits)
{
    const mt_trainer_config *c = &t->config;
    MT_REQUIRE(batch >= 0 && sequence >= 0 && sequence <= c->sequence_length &&
                   batch * sequence <= c->batch_size * c->sequence_length,
               MT_EINVAL, "trainer: %lld sequences of %lld tokens, at most %lld of %lld",
               (long long)batch, (long long)sequence, (long long)c->batch_size,
               (long long)c->sequence_length);
    mt_precision *precision = mt_model_precision(t->model);
    const bool kept = mt_model_exchange(t->model) && mt_precision_counts_all(precision);
    bool again = true;
    mt_trainer_open_exchange(t);
    if (kept) MT_TRY(mt_precision_keep(precision, &t->stream));
    while (again) {
        MT_TRY(mt_tape_begin(t->tape, mt_trainer_pass_key(t, kind, batch, sequence), false));
        MT_TRY(mt_tape_close(t->tape, forward(t, batch, sequence, loss, row, logits)));
        MT_TRY(mt_trainer_settle(t, &again));
        if (kept && again) MT_TRY(mt_precision_restore(precision, &t->stream));
    }
    return MT_OK;
}

mt_status mt_trainer_eval(mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                          int64_t sequences, double *loss_sum, int64_t *count)
{
    int64_t s = t->config.sequence_length;
    MT_REQUIRE(sequences >= 0 && sequences <= t->config.batch_size, MT_EINVAL,
               "trainer: %lld sequences to evaluate at once, at most %lld", (long long)sequences,
               (long long)t->config.batch_size);
    MT_TRY(mt_trainer_upload(t, tokens, targets, sequences * s, count));
    MT_TRY(mt_trainer_upload_scalar(t, t->scale, 1));
    return mt_trainer_forward(t, MT_PASS_EVAL, sequences, s, loss_sum, -1, NULL);
}

mt_status mt_trainer_logits(mt_trainer *t, const int32_t *tokens, int64_t batch, int64_t sequence,
                            int64_t row, double *logits)
{
    int64_t counted;
    MT_REQUIRE(batch >= 0 && sequence >= 0 &&
                   batch * sequence <= t->config.batch_size * t->config.sequence_length,
               MT_EINVAL, "trainer: %lld tokens at once, at most %lld",
               (long long)(batch * sequence),
               (long long)(t->config.batch_size * t->config.sequence_length));
    MT_REQUIRE(row < batch * sequence, MT_EINVAL, "trainer: logits of row %lld of %lld",
               (long long)row, (long long)(batch * sequence));
    MT_TRY(mt_trainer_upload(t, tokens, NULL, batch * sequence, &counted));
    return mt_trainer_forward(t, MT_PASS_LOGITS, batch, sequence, NULL, row, logits);
}

/* ---- accessors ----------------------------------------------------------------------------------
 */

const mt_trainer_config *mt_trainer_get_config(const mt_trainer *t)
{
    return &t->config;
}

mt_model *mt_trainer_model(const mt_trainer *t)
{
    return t->model;
}

mt_optimizer *mt_trainer_optimizer(const mt_trainer *t)
{
    return t->optimizer;
}

mt_tape *mt_trainer_tape(const mt_trainer *t)
{
    return t->tape;
}

mt_device *mt_trainer_device(const mt_trainer *t)
{
    return t->device;
}

int64_t mt_trainer_steps(const mt_trainer *t)
{
    return t->steps;
}

int64_t mt_trainer_tokens(const mt_trainer *t)
{
    return t->sampled;
}

void mt_trainer_set_tokens(mt_trainer *t, int64_t tokens)
{
    t->sampled = tokens;
}

int64_t mt_trainer_dropped(const mt_trainer *t)
{
    return t->dropped;
}

void mt_trainer_set_dropped(mt_trainer *t, int64_t dropped)
{
    t->dropped = dropped;
}

int64_t mt_trainer_replayed(const mt_trainer *t)
{
    return t->replayed;
}

mt_status mt_trainer_set_steps(mt_trainer *t, int64_t steps)
{
    bool changed;
    t->steps = steps;
    t->sampled = steps * t->config.batch_size * t->config.sequence_length;
    MT_TRY(mt_trainer_begin_draws(t));
    MT_TRY(mt_precision_set_step(mt_model_precision(t->model), steps, &changed));
    return mt_model_refresh(t->model, &t->stream);
}
