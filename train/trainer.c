/* One training step: micro-batches through the tape, the update, the refresh of compute weights. */
#include "train/trainer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IGNORE = -100, LOSS = 0, AUX = 1, Z = 2, METRICS = 3 };

struct mt_trainer {
    mt_trainer_config config;
    mt_device *device;
    mt_stream stream;
    mt_model *model;
    mt_tape *tape;
    mt_optimizer *optimizer;
    mt_dtype real;
    void *tokens, *targets; /* device int32 [batch_size, sequence_length] */
    void *scale, *metrics;  /* device real [1], [METRICS] */
    size_t batch_bytes;
    int64_t steps;
};

/* ---- recipes ------------------------------------------------------------------------------------
 */

static mt_status create_model(mt_trainer *t)
{
    const mt_trainer_config *c = &t->config;
    mt_recipe_rules *rules = NULL;
    if (*c->recipe && strcmp(c->recipe, "none") != 0)
        MT_TRY(mt_recipe_rules_create(&rules, c->recipe));
    mt_precision_options options = { .rules = rules,
                                     .save_original_input = c->save_original_input,
                                     .history = c->delayed_history,
                                     .margin = c->delayed_margin,
                                     .most_recent = c->delayed_most_recent,
                                     .seed = c->seed,
                                     .comm = c->comm,
                                     .keep_gathered = c->keep_gathered };
    mt_status status = mt_model_create(&t->model, t->device, &c->model, c->dtype,
                                       c->sequence_length, true, &options);
    mt_recipe_rules_destroy(&rules);
    return status;
}

/* Micro-batches before `step`. */
static uint32_t passes_before(const mt_trainer *t, int64_t step)
{
    return (uint32_t)(step * (t->config.batch_size / t->config.micro_batch_size));
}

static int ranks(const mt_trainer *t)
{
    return t->config.comm ? mt_comm_size(t->config.comm) : 1;
}

static mt_fsdp *shards(const mt_trainer *t)
{
    return mt_precision_fsdp(mt_model_precision(t->model));
}

/* The tape's hook. */
static mt_status grad_ready(void *trainer, mt_param *param)
{
    mt_fsdp *fsdp = shards(trainer);
    return fsdp ? mt_fsdp_grad_ready(fsdp, param) : MT_OK;
}

/* The recipes and draws of the step to come. *changed: compute copies must be written. */
static mt_status settle(mt_trainer *t, bool *changed)
{
    mt_precision *p = mt_model_precision(t->model);
    mt_precision_set_pass(p, passes_before(t, t->steps));
    return mt_precision_set_step(p, t->steps, changed);
}

static mt_status build(mt_trainer *t)
{
    const mt_trainer_config *c = &t->config;
    mt_tape_options options = { .defer_wgrad = c->defer_wgrad,
                                .offload = c->offload,
                                .recompute = c->recompute == MT_RECOMPUTE_BLOCK,
                                .recompute_activation = c->recompute == MT_RECOMPUTE_ACTIVATION,
                                .grad_ready = grad_ready,
                                .context = t };
    size_t real = mt_dtype_size(t->real);
    t->batch_bytes = (size_t)(c->batch_size * c->sequence_length) * sizeof(int32_t);
    MT_TRY(create_model(t));
    t->config.model = *mt_model_get_config(t->model);
    MT_TRY(mt_optimizer_create(&t->optimizer, mt_model_params(t->model), &c->optim));
    mt_optimizer_set_comm(t->optimizer, c->comm);
    MT_TRY(mt_tape_create(&t->tape, &t->stream, &options));
    MT_TRY(mt_device_alloc(t->device, &t->tokens, t->batch_bytes, MT_MEMORY_STATE));
    MT_TRY(mt_device_alloc(t->device, &t->targets, t->batch_bytes, MT_MEMORY_STATE));
    MT_TRY(mt_device_alloc(t->device, &t->scale, real, MT_MEMORY_STATE));
    MT_TRY(mt_device_alloc(t->device, &t->metrics, METRICS * real, MT_MEMORY_STATE));
    MT_TRY(mt_model_init(t->model, c->seed));
    if (c->quantized_init)
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
    int size = c->comm ? mt_comm_size(c->comm) : 1;
    MT_REQUIRE(c->batch_size % (c->micro_batch_size * size) == 0, MT_ECONFIG,
               "batch_size %lld must be a multiple of micro_batch_size %lld on each of %d ranks",
               (long long)c->batch_size, (long long)c->micro_batch_size, size);
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
    mt_tape_destroy(&t->tape);
    mt_optimizer_destroy(&t->optimizer);
    mt_model_destroy(&t->model);
    mt_device_free(t->device, &t->tokens, t->batch_bytes, MT_MEMORY_STATE);
    mt_device_free(t->device, &t->targets, t->batch_bytes, MT_MEMORY_STATE);
    mt_device_free(t->device, &t->scale, real, MT_MEMORY_STATE);
    mt_device_free(t->device, &t->metrics, METRICS * real, MT_MEMORY_STATE);
    free(t);
    *trainer = NULL;
}

static mt_status upload_scalar(mt_trainer *t, void *to, double x)
{
    double bits = 0;
    mt_store_f64(&bits, t->real, 0, x);
    return mt_device_copy(t->device, to, &bits, mt_dtype_size(t->real));
}

/* Copies a batch to the device; *counted receives the targets that are not ignored. */
static mt_status upload(mt_trainer *t, const int32_t *tokens, const int32_t *targets, int64_t count,
                        int64_t *counted)
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
    size_t bytes = (size_t)count * sizeof(int32_t);
    MT_TRY(mt_device_copy(t->device, t->tokens, tokens, bytes));
    return targets ? mt_device_copy(t->device, t->targets, targets, bytes) : MT_OK;
}

enum pass_kind { PASS_TRAIN, PASS_EVAL, PASS_LOGITS };

/* Names what is run at which shapes, in which formats. */
static uint64_t pass_key(const mt_trainer *t, enum pass_kind kind, int64_t batch, int64_t sequence)
{
    uint64_t epoch = mt_precision_epoch(mt_model_precision(t->model));
    return epoch * 0x9e3779b97f4a7c15u ^
           ((uint64_t)kind << 56 | (uint64_t)batch << 28 | (uint64_t)sequence);
}

static mt_status add_metric(mt_trainer *t, int which, const mt_value *x)
{
    if (!x) return MT_OK;
    void *at = (char *)t->metrics + (size_t)which * mt_dtype_size(t->real);
    return mt_add(
        &t->stream,
        &(struct mt_add_args){ .dtype = t->real, .count = 1, .y = at, .a = at, .b = x->data.data });
}

static mt_model_batch micro_batch(const mt_trainer *t, int64_t first)
{
    const mt_trainer_config *c = &t->config;
    int64_t at = first * c->sequence_length;
    return (mt_model_batch){ .batch = c->micro_batch_size,
                             .sequence = c->sequence_length,
                             .tokens = (const int32_t *)t->tokens + at,
                             .targets = (const int32_t *)t->targets + at,
                             .scale = t->scale };
}

static mt_status train_pass(mt_trainer *t, int64_t first)
{
    const mt_trainer_config *c = &t->config;
    mt_model_batch batch = micro_batch(t, first);
    mt_model_output out;
    MT_TRY(mt_model_forward(t->model, t->tape, &batch, false, &out));
    MT_TRY(add_metric(t, LOSS, out.loss));
    MT_TRY(add_metric(t, AUX, out.aux_loss));
    MT_TRY(add_metric(t, Z, out.z_loss));
    double share = (double)c->micro_batch_size / (double)c->batch_size;
    MT_TRY(mt_model_seed(t->model, t->tape, &out, share));
    mt_model_output_release(t->tape, t->model, &out);
    MT_TRY(mt_tape_backward(t->tape));
    return mt_tape_run_deferred(t->tape);
}

/* Runs `body` between begin and end of a pass; a failure leaves no pass open. */
static mt_status in_pass(mt_trainer *t, uint64_t key, bool training,
                         mt_status (*body)(mt_trainer *, int64_t), int64_t first)
{
    MT_TRY(mt_tape_begin(t->tape, key, training));
    mt_status status = body(t, first);
    if (status == MT_OK) return mt_tape_end(t->tape);
    mt_tape_abort(t->tape);
    return mt_error_pass(status, __FILE__, __LINE__);
}

static mt_status read_metrics(mt_trainer *t, mt_step_result *result)
{
    double raw[METRICS] = { 0 };
    MT_TRY(mt_device_copy(t->device, raw, t->metrics, METRICS * mt_dtype_size(t->real)));
    double passes = (double)t->config.batch_size / (double)t->config.micro_batch_size;
    result->loss = mt_load_f64(raw, t->real, LOSS);
    result->aux_loss = mt_load_f64(raw, t->real, AUX) / passes;
    result->z_loss = mt_load_f64(raw, t->real, Z) / passes;
    result->loss_finite = isfinite(result->loss);
    return MT_OK;
}

/* Mean over layers of max load / mean load - 1, from the step's expert counts. */
static mt_status read_balance(mt_trainer *t, mt_step_result *result)
{
    int64_t layers = mt_model_moe_layers(t->model), e = t->config.model.num_experts;
    int64_t load[512];
    MT_TRY(mt_device_copy(t->device, &result->dropped, mt_model_dropped(t->model),
                          sizeof result->dropped));
    for (int64_t l = 0; l < layers; l++) {
        int64_t most = 0, sum = 0;
        for (int64_t at = 0; at < e; at += 512) {
            int64_t n = e - at < 512 ? e - at : 512;
            MT_TRY(mt_device_copy(t->device, load, mt_model_load(t->model, l) + at,
                                  (size_t)n * sizeof *load));
            for (int64_t i = 0; i < n; i++) {
                sum += load[i];
                if (load[i] > most) most = load[i];
            }
        }
        if (sum) result->max_vio += ((double)most * (double)e / (double)sum - 1) / (double)layers;
    }
    return MT_OK;
}

/* What the ranks' micro-batches add up to: gradients that are still whole, losses, loads. */
static mt_status reduce_step(mt_trainer *t)
{
    if (!shards(t)) return MT_OK;
    MT_TRY(mt_fsdp_end_reduce(shards(t), &t->stream));
    MT_TRY(mt_comm_all_reduce(t->config.comm, &t->stream, t->metrics, METRICS, t->real,
                              MT_REDUCE_SUM, "losses"));
    return mt_model_reduce_load(t->model, t->config.comm, &t->stream);
}

mt_status mt_trainer_gradients(mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                               mt_step_result *result)
{
    const mt_trainer_config *c = &t->config;
    int64_t counted, count = c->batch_size * c->sequence_length;
    *result = (mt_step_result){ .step = t->steps };
    MT_REQUIRE(targets, MT_EINVAL, "trainer: a step without targets");
    MT_TRY(upload(t, tokens, targets, count, &counted));
    MT_REQUIRE(counted > 0, MT_EINVAL, "trainer: every target of the batch is ignored");
    MT_TRY(upload_scalar(t, t->scale, 1 / (double)counted));
    MT_TRY(mt_device_zero(t->device, t->metrics, METRICS * mt_dtype_size(t->real)));
    MT_TRY(mt_model_begin_step(t->model));
    uint64_t key = pass_key(t, PASS_TRAIN, c->micro_batch_size, c->sequence_length);
    int64_t share = c->batch_size / ranks(t), begin = c->comm ? mt_comm_rank(c->comm) * share : 0;
    for (int64_t first = begin; first < begin + share; first += c->micro_batch_size) {
        bool last = first + c->micro_batch_size == begin + share;
        if (last && shards(t)) mt_fsdp_begin_reduce(shards(t));
        uint32_t pass = passes_before(t, t->steps) + (uint32_t)(first / c->micro_batch_size);
        mt_precision_set_pass(mt_model_precision(t->model), pass);
        MT_TRY(in_pass(t, key, true, train_pass, first));
    }
    MT_TRY(mt_param_store_end_step(mt_model_params(t->model)));
    MT_TRY(reduce_step(t));
    if (!t->device->computes) return MT_OK;
    MT_TRY(read_metrics(t, result));
    return read_balance(t, result);
}

mt_status mt_trainer_update(mt_trainer *t, double lr, mt_step_result *result)
{
    bool changed;
    MT_TRY(mt_optimizer_step(t->optimizer, &t->stream, lr, t->metrics));
    MT_TRY(mt_precision_end_step(mt_model_precision(t->model), &t->stream));
    t->steps++;
    MT_TRY(settle(t, &changed));
    MT_TRY(mt_model_refresh(t->model, &t->stream));
    MT_TRY(
        mt_model_update_router_bias(t->model, &t->stream, &mt_optimizer_state(t->optimizer)->skip));
    struct mt_step_state state = { 0 };
    if (t->device->computes)
        MT_TRY(mt_device_copy(t->device, &state, mt_optimizer_state(t->optimizer), sizeof state));
    result->lr = lr;
    result->grad_norm = state.grad_norm;
    result->skipped = state.skip;
    result->skipped_in_a_row = state.skipped_in_a_row;
    return MT_OK;
}

mt_status mt_trainer_step(mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                          mt_step_result *result)
{
    double lr = mt_schedule_lr(&t->config.optim, t->steps, t->config.steps);
    MT_TRY(mt_trainer_gradients(t, tokens, targets, result));
    return mt_trainer_update(t, lr, result);
}

/* ---- forward only -------------------------------------------------------------------------------
 */

/* Runs a forward of [batch, sequence] on uploaded tokens; loss and logits (f64, host) where asked.
 */
static mt_status forward(mt_trainer *t, int64_t batch, int64_t sequence, double *loss,
                         double *logits)
{
    mt_model_batch in = { .batch = batch,
                          .sequence = sequence,
                          .tokens = t->tokens,
                          .targets = loss ? t->targets : NULL,
                          .scale = t->scale };
    mt_model_output out;
    MT_TRY(mt_model_forward(t->model, t->tape, &in, logits != NULL, &out));
    if (loss) {
        double bits = 0;
        MT_TRY(mt_device_copy(t->device, &bits, out.loss->data.data, mt_dtype_size(t->real)));
        *loss = mt_load_f64(&bits, t->real, 0);
    }
    if (logits) {
        size_t bytes = mt_tensor_bytes(&out.logits->data);
        void *host = malloc(bytes);
        MT_REQUIRE(host, MT_ENOMEM, "trainer: %zu bytes for logits", bytes);
        mt_status status = mt_device_copy(t->device, host, out.logits->data.data, bytes);
        for (int64_t i = 0; i < mt_tensor_count(&out.logits->data); i++)
            logits[i] = mt_load_f64(host, out.logits->data.dtype, i);
        free(host);
        MT_TRY(status);
    }
    mt_model_output_release(t->tape, t->model, &out);
    return MT_OK;
}

static mt_status forward_pass(mt_trainer *t, enum pass_kind kind, int64_t batch, int64_t sequence,
                              double *loss, double *logits)
{
    const mt_trainer_config *c = &t->config;
    MT_REQUIRE(batch >= 0 && sequence >= 0 && sequence <= c->sequence_length &&
                   batch * sequence <= c->batch_size * c->sequence_length,
               MT_EINVAL, "trainer: %lld sequences of %lld tokens, at most %lld of %lld",
               (long long)batch, (long long)sequence, (long long)c->batch_size,
               (long long)c->sequence_length);
    MT_TRY(mt_tape_begin(t->tape, pass_key(t, kind, batch, sequence), false));
    mt_status status = forward(t, batch, sequence, loss, logits);
    if (status == MT_OK) return mt_tape_end(t->tape);
    mt_tape_abort(t->tape);
    return mt_error_pass(status, __FILE__, __LINE__);
}

mt_status mt_trainer_eval(mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                          int64_t sequences, double *loss_sum, int64_t *count)
{
    int64_t s = t->config.sequence_length;
    MT_REQUIRE(sequences <= t->config.batch_size, MT_EINVAL,
               "trainer: %lld sequences to evaluate at once, at most %lld", (long long)sequences,
               (long long)t->config.batch_size);
    MT_TRY(upload(t, tokens, targets, sequences * s, count));
    MT_TRY(upload_scalar(t, t->scale, 1));
    return forward_pass(t, PASS_EVAL, sequences, s, loss_sum, NULL);
}

mt_status mt_trainer_logits(mt_trainer *t, const int32_t *tokens, int64_t batch, int64_t sequence,
                            double *logits)
{
    int64_t counted;
    MT_REQUIRE(batch * sequence <= t->config.batch_size * t->config.sequence_length, MT_EINVAL,
               "trainer: %lld tokens at once, at most %lld", (long long)(batch * sequence),
               (long long)(t->config.batch_size * t->config.sequence_length));
    MT_TRY(upload(t, tokens, NULL, batch * sequence, &counted));
    return forward_pass(t, PASS_LOGITS, batch, sequence, NULL, logits);
}

/* ---- the first bad tensor -----------------------------------------------------------------------
 */

struct watch {
    mt_trainer *trainer;
    char *name;
};

static bool is_float(mt_dtype dtype)
{
    return dtype == MT_F64 || dtype == MT_F32 || dtype == MT_BF16 || dtype == MT_F16;
}

static bool has_nonfinite(const void *data, mt_dtype dtype, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(mt_load_f64(data, dtype, i))) return true;
    return false;
}

static mt_status look(void *context, const char *name, const mt_tensor *data)
{
    struct watch *w = context;
    if (w->name[0] || !is_float(data->dtype)) return MT_OK;
    size_t bytes = mt_tensor_bytes(data);
    void *host = malloc(bytes ? bytes : 1);
    MT_REQUIRE(host, MT_ENOMEM, "trainer: %zu bytes to look at %s", bytes, name);
    mt_status status = mt_device_copy(w->trainer->device, host, data->data, bytes);
    if (status == MT_OK && has_nonfinite(host, data->dtype, mt_tensor_count(data)))
        snprintf(w->name, 128, "%s", name);
    free(host);
    return status;
}

static mt_status look_at_master(struct watch *w, const mt_param_store *store, const mt_param *p)
{
    int64_t n = p->own.count;
    void *host = malloc((size_t)n * mt_dtype_size(p->dtype) + 1);
    MT_REQUIRE(host, MT_ENOMEM, "trainer: no memory to look at %s", p->name);
    mt_status status = mt_param_read_master(store, p, p->own.first, n, host);
    if (status == MT_OK && has_nonfinite(host, p->dtype, n)) snprintf(w->name, 128, "%s", p->name);
    free(host);
    return status;
}

/* The name that the first rank which has one has found. */
static mt_status agree_on_name(mt_comm *comm, char name[128])
{
    int64_t first = *name ? mt_comm_size(comm) - mt_comm_rank(comm) : 0;
    MT_TRY(mt_comm_all_reduce(comm, NULL, &first, 1, MT_I64, MT_REDUCE_MAX, "a bad tensor"));
    if (!first) return MT_OK;
    return mt_comm_broadcast(comm, NULL, name, 128, mt_comm_size(comm) - (int)first, "its name");
}

/* A weight that is not finite already is the first bad tensor. */
static mt_status look_at_params(struct watch *w)
{
    mt_param_store *store = mt_model_params(w->trainer->model);
    for (int64_t i = 0; i < mt_param_store_count(store) && !w->name[0]; i++) {
        const mt_param *p = mt_param_store_get(store, i);
        MT_TRY(look_at_master(w, store, p));
    }
    mt_comm *comm = w->trainer->config.comm;
    return comm ? agree_on_name(comm, w->name) : MT_OK;
}

mt_status mt_trainer_find_nonfinite(mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                                    char name[128])
{
    struct watch w = { t, name };
    int64_t counted, s = t->config.sequence_length;
    double loss = 0;
    name[0] = '\0';
    MT_TRY(look_at_params(&w));
    mt_tape_set_observer(t->tape, look, &w);
    mt_status status = MT_OK;
    for (int64_t i = 0; i < t->config.batch_size && !name[0] && status == MT_OK; i++) {
        status = upload(t, tokens + i * s, targets + i * s, s, &counted);
        if (status == MT_OK) status = upload_scalar(t, t->scale, 1);
        if (status == MT_OK) status = forward_pass(t, PASS_EVAL, 1, s, &loss, NULL);
        if (status == MT_OK && !name[0] && !isfinite(loss)) snprintf(name, 128, "loss");
    }
    mt_tape_set_observer(t->tape, NULL, NULL);
    return status;
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

mt_status mt_trainer_set_steps(mt_trainer *t, int64_t steps)
{
    bool changed;
    t->steps = steps;
    MT_TRY(settle(t, &changed));
    return mt_model_refresh(t->model, &t->stream);
}
