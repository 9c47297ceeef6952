/* One training step: micro-batches through the tape, the update, the refresh of compute weights;
 * and the same as one graph. */
#include "train/trainer_priv.h"

#include <math.h>

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
                             .scale = t->scale,
                             .loss_chunk = c->loss_chunk };
}

static mt_status train_pass(mt_trainer *t, int64_t first)
{
    const mt_trainer_config *c = &t->config;
    mt_model_batch batch = micro_batch(t, first);
    mt_model_output out;
    MT_TRY(mt_model_forward(t->model, t->tape, &batch, false, &out));
    MT_TRY(add_metric(t, MT_TRAINER_LOSS, out.loss));
    MT_TRY(add_metric(t, MT_TRAINER_AUX, out.aux_loss));
    MT_TRY(add_metric(t, MT_TRAINER_Z, out.z_loss));
    double share = (double)c->micro_batch_size / (double)c->batch_size;
    MT_TRY(mt_model_seed(t->model, t->tape, &out, share));
    mt_model_output_release(t->tape, t->model, &out);
    MT_TRY(mt_tape_backward(t->tape));
    return mt_tape_run_deferred(t->tape);
}

/* A NaN without its sign, which would be printed. */
static double plain_nan(double x)
{
    return isnan(x) ? (double)NAN : x;
}

static mt_status read_metrics(mt_trainer *t, mt_step_result *result)
{
    double raw[MT_TRAINER_METRICS] = { 0 }, n = (double)mt_trainer_passes(t);
    MT_TRY(mt_device_copy(t->device, raw, t->metrics, MT_TRAINER_METRICS * mt_dtype_size(t->real)));
    result->loss = plain_nan(mt_load_f64(raw, t->real, MT_TRAINER_LOSS));
    result->aux_loss = plain_nan(mt_load_f64(raw, t->real, MT_TRAINER_AUX) / n);
    result->z_loss = plain_nan(mt_load_f64(raw, t->real, MT_TRAINER_Z) / n);
    result->loss_finite = isfinite(result->loss);
    return MT_OK;
}

/* Mean over layers of max load / mean load - 1, from the step's expert counts. */
static mt_status read_balance(mt_trainer *t, mt_step_result *result)
{
    int64_t layers = mt_model_moe_layers(t->model), e = t->config.model.num_experts;
    MT_TRY(mt_device_copy(t->device, &result->dropped, mt_model_dropped(t->model),
                          sizeof result->dropped));
    if (!layers) return MT_OK;
    MT_TRY(mt_device_copy(t->device, t->load, mt_model_load(t->model, 0),
                          (size_t)(layers * e) * sizeof *t->load));
    for (int64_t l = 0; l < layers; l++) {
        int64_t most = 0, sum = 0;
        for (int64_t i = 0; i < e; i++) {
            sum += t->load[l * e + i];
            if (t->load[l * e + i] > most) most = t->load[l * e + i];
        }
        if (sum) result->max_vio += ((double)most * (double)e / (double)sum - 1) / (double)layers;
    }
    return MT_OK;
}

static mt_status read_gradients(mt_trainer *t, mt_step_result *result)
{
    result->voided = t->voided;
    if (!t->device->computes) return MT_OK;
    MT_TRY(read_metrics(t, result));
    return read_balance(t, result);
}

static mt_status read_update(mt_trainer *t, double lr, mt_step_result *result)
{
    struct mt_step_state state = { 0 };
    if (t->device->computes)
        MT_TRY(mt_device_copy(t->device, &state, mt_optimizer_state(t->optimizer), sizeof state));
    result->lr = lr;
    result->grad_norm = plain_nan(state.grad_norm);
    result->skipped = state.skip;
    result->skipped_in_a_row = state.skipped_in_a_row;
    return MT_OK;
}

/* ---- a step -------------------------------------------------------------------------------------
 */

static mt_status check_trains(const mt_trainer *t)
{
    MT_REQUIRE(!t->config.forward_only, MT_EINVAL, "trainer: made for forward passes only");
    return MT_OK;
}

/* A batch and its place in the run, where the step's work finds them. */
static mt_status put_inputs(mt_trainer *t, const int32_t *tokens, const int32_t *targets)
{
    const mt_trainer_config *c = &t->config;
    int64_t counted, count = c->batch_size * c->sequence_length;
    MT_TRY(check_trains(t));
    MT_REQUIRE(targets, MT_EINVAL, "trainer: a step without targets");
    MT_TRY(mt_trainer_upload(t, tokens, targets, count, &counted));
    MT_REQUIRE(counted > 0, MT_EINVAL, "trainer: every target of the batch is ignored");
    MT_TRY(mt_trainer_upload_scalar(t, t->scale, 1 / (double)counted));
    t->voided = 0;
    return mt_trainer_begin_draws(t);
}

/* What the ranks' micro-batches add up to: gradients that are still whole, losses, loads. */
static mt_status reduce_step(mt_trainer *t)
{
    if (!mt_trainer_shards(t)) return MT_OK;
    MT_TRY(mt_fsdp_end_reduce(mt_trainer_shards(t), &t->stream));
    MT_TRY(mt_comm_all_reduce(t->config.comm, &t->stream, t->metrics, MT_TRAINER_METRICS, t->real,
                              MT_REDUCE_SUM, "losses"));
    return mt_model_reduce_load(t->model, t->config.comm, &t->stream);
}

/* The micro-batch behind `first`. On a device that only counts, the last one comes behind the
 * second: those between would count the same again, for minutes where there are millions. */
static int64_t next_pass(const mt_trainer *t, int64_t first, int64_t begin, int64_t end)
{
    int64_t size = t->config.micro_batch_size, next = first + size;
    return !t->device->computes && first > begin && next < end ? end - size : next;
}

static mt_status make_gradients(mt_trainer *t)
{
    const mt_trainer_config *c = &t->config;
    MT_TRY(mt_device_zero(t->device, t->metrics, MT_TRAINER_METRICS * mt_dtype_size(t->real)));
    MT_TRY(mt_model_begin_step(t->model));
    uint64_t key = mt_trainer_pass_key(t, MT_PASS_TRAIN, c->micro_batch_size, c->sequence_length);
    int64_t share = c->batch_size / mt_comm_size(c->comm);
    int64_t begin = mt_comm_rank(c->comm) * share, end = begin + share;
    for (int64_t first = begin; first < end; first = next_pass(t, first, begin, end)) {
        bool last = first + c->micro_batch_size == end;
        if (last && mt_trainer_shards(t)) mt_fsdp_begin_reduce(mt_trainer_shards(t));
        mt_precision_set_pass(mt_model_precision(t->model),
                              (uint32_t)(first / c->micro_batch_size));
        MT_TRY(mt_tape_begin(t->tape, key, true));
        MT_TRY(mt_tape_close(t->tape, train_pass(t, first)));
    }
    MT_TRY(mt_param_store_end_step(mt_model_params(t->model)));
    return reduce_step(t);
}

/* Where rows for experts were left out, the step is void: nothing has been made of it yet but
 * gradients, loads and losses, which begin anew, and what the formats gather, which comes back. */
static mt_status work_gradients(mt_trainer *t)
{
    mt_precision *p = mt_model_precision(t->model);
    bool again;
    if (!mt_model_exchange(t->model)) return make_gradients(t);
    mt_trainer_open_exchange(t);
    MT_TRY(mt_precision_keep(p, &t->stream));
    MT_TRY(make_gradients(t));
    MT_TRY(mt_trainer_settle(t, &again));
    for (; again; t->voided++) {
        MT_TRY(mt_precision_restore(p, &t->stream));
        MT_TRY(make_gradients(t));
        MT_TRY(mt_trainer_settle(t, &again));
    }
    return MT_OK;
}

static mt_status work_update(mt_trainer *t)
{
    if (mt_trainer_shards(t)) MT_TRY(mt_fsdp_begin_update(mt_trainer_shards(t), &t->stream));
    MT_TRY(mt_optimizer_step(t->optimizer, &t->stream, t->metrics));
    return mt_precision_end_step(mt_model_precision(t->model), &t->stream);
}

/* Draws go on where the micro-batches ended. */
static mt_status work_refresh(mt_trainer *t)
{
    mt_precision_set_pass(mt_model_precision(t->model), (uint32_t)mt_trainer_passes(t));
    MT_TRY(mt_model_refresh(t->model, &t->stream));
    return mt_model_update_router_bias(t->model, &t->stream,
                                       &mt_optimizer_state(t->optimizer)->skip);
}

static mt_status work(mt_trainer *t)
{
    MT_TRY(work_gradients(t));
    MT_TRY(work_update(t));
    return work_refresh(t);
}

/* On to the next step and its recipes. */
static mt_status advance(mt_trainer *t)
{
    bool changed;
    t->steps++;
    t->sampled += t->config.batch_size * t->config.sequence_length;
    return mt_precision_set_step(mt_model_precision(t->model), t->steps, &changed);
}

mt_status mt_trainer_gradients(mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                               mt_step_result *result)
{
    *result = (mt_step_result){ .step = t->steps };
    MT_TRY(put_inputs(t, tokens, targets));
    MT_TRY(work_gradients(t));
    return read_gradients(t, result);
}

mt_status mt_trainer_update(mt_trainer *t, double lr, mt_step_result *result)
{
    MT_TRY(check_trains(t));
    MT_TRY(mt_optimizer_set_lr(t->optimizer, lr));
    MT_TRY(work_update(t));
    MT_TRY(advance(t));
    MT_TRY(work_refresh(t));
    return read_update(t, lr, result);
}

/* ---- the step as one graph ----------------------------------------------------------------------
 * In steady state a step launches the same work every time: what changes from step to step lies in
 * device memory. On a device that can record it, the first step of a kind runs as it is, the second
 * is recorded, and from then on it is launched whole. The bits are the same. */

/* What a recording holds for: recipes and shapes, and every address in it. */
static uint64_t kind_of(const mt_trainer *t)
{
    const mt_trainer_config *c = &t->config;
    return mt_trainer_pass_key(t, MT_PASS_TRAIN, c->micro_batch_size, c->sequence_length);
}

/* Whether nobody looks into the step on the host, and the next computes as this one. With ranks the
 * watchdog does: it asks how far collectives are, which nobody can know of recorded ones. */
static bool can_record(const mt_trainer *t)
{
    const mt_precision *p = mt_model_precision(t->model);
    return !t->config.eager && mt_device_records(t->device) && mt_comm_size(t->config.comm) == 1 &&
           !mt_tape_observed(t->tape) && !mt_precision_observed(p) &&
           !mt_precision_changes_after(p, t->steps);
}

static mt_status record(mt_trainer *t)
{
    MT_TRY(mt_graph_begin(t->device));
    mt_status status = work(t);
    mt_status ended = mt_graph_end(&t->graph, t->device, status == MT_OK);
    return status != MT_OK ? mt_error_pass(status, __FILE__, __LINE__) : ended;
}

/* Draws of an evaluation that follows go on where those of work would. */
static mt_status replay(mt_trainer *t)
{
    mt_precision_set_pass(mt_model_precision(t->model), (uint32_t)mt_trainer_passes(t));
    t->replayed++;
    return mt_graph_launch(&t->graph);
}

static mt_status work_or_replay(mt_trainer *t)
{
    bool known = t->kind == kind_of(t) && t->frees == t->device->frees;
    if (!known) mt_graph_destroy(&t->graph);
    if (known && !t->graph.device) MT_TRY(record(t));
    MT_TRY(t->graph.device ? replay(t) : work(t));
    t->kind = kind_of(t), t->frees = t->device->frees;
    return advance(t);
}

/* Work of which the next step's recipes are a part. */
static mt_status work_anew(mt_trainer *t)
{
    MT_TRY(work_gradients(t));
    MT_TRY(work_update(t));
    MT_TRY(advance(t));
    return work_refresh(t);
}

mt_status mt_trainer_step(mt_trainer *t, const int32_t *tokens, const int32_t *targets,
                          mt_step_result *result)
{
    double lr = mt_schedule_lr(&t->config.optim, t->steps, t->config.steps);
    *result = (mt_step_result){ .step = t->steps };
    MT_TRY(put_inputs(t, tokens, targets));
    MT_TRY(mt_optimizer_set_lr(t->optimizer, lr));
    MT_TRY(can_record(t) ? work_or_replay(t) : work_anew(t));
    MT_TRY(read_gradients(t, result));
    t->dropped += result->dropped;
    return read_update(t, lr, result);
}
