/* The loop of a run. What is due at a step (evaluation, checkpoint, end) is a function of the step
 * and of what the run's files already hold, so that going on after any stop makes the same lines
 * and files as going straight through. */
#include "train/run_priv.h"

#include <stdlib.h>

#include "core/clock.h"
#include "train/build_info.h"
#include "train/evaluate.h"
#include "train/ranks.h"
#include "train/signals.h"

enum { SKIPS_END_A_RUN = 10 };

/* ---- evaluation and checkpoints -----------------------------------------------------------------
 */

static bool multiple(int64_t step, int64_t every)
{
    return every && step && step % every == 0;
}

/* What is no number in a step's end; what was saved before it stands. */
static mt_status name_step(const run *r, int64_t step, mt_status status)
{
    if (status != MT_ENUMERIC) return status;
    return MT_FAIL(status, "step %lld: %.300s; nothing was saved after %.200s", (long long)step,
                   mt_error_message(), r->saved_step < 0 ? "the start" : r->saved_path);
}

/* Unless the metrics have it already. A full evaluation at the end, else every so often. */
static mt_status evaluate_if_due(run *r, int64_t step, bool last, bool *stopped)
{
    const mt_config *c = r->config;
    mt_evaluation e;
    bool due = last ? r->past.last_full_eval < step
                    : multiple(step, c->eval_every) && r->past.last_eval < step &&
                          r->past.last_full_eval < step;
    *stopped = false;
    if (!r->valid || !due) return MT_OK;
    const bool all = last || c->eval_batches > INT64_MAX / c->trainer.batch_size;
    mt_status status =
        mt_evaluate(&e, r->trainer, r->valid, all ? 0 : c->eval_batches * c->trainer.batch_size);
    MT_TRY(name_step(r, step, status));
    *stopped = e.stopped;
    if (e.stopped) return MT_OK;
    const char *unit = mt_corpus_unit(mt_corpus_get_info(r->valid));
    if (r->lead) MT_TRY(mt_metrics_eval(r->metrics, step, e.loss, unit, e.full));
    *(e.full ? &r->past.last_full_eval : &r->past.last_eval) = step;
    mt_progress_note(&r->progress, "step %lld: validation loss %.4f, %.4f bits/%s (%lld windows%s)",
                     (long long)step, e.loss, mt_bits(e.loss), unit, (long long)e.windows,
                     e.full ? ", all" : "");
    return MT_OK;
}

/* Formats without NaN make numbers of weights that are none, so that no loss shows them. */
static mt_status save(run *r, int64_t step)
{
    char path[MT_CHECKPOINT_PATH];
    const mt_checkpoint_info info = { .run_config = r->config_text,
                                      .git_revision = mt_build_revision(),
                                      .corpus = r->corpus };
    MT_TRY(name_step(r, step, mt_trainer_check_weights(mt_trainer_model(r->trainer), r->comm)));
    if (r->lead) MT_TRY(mt_metrics_sync(r->metrics));
    mt_status status = mt_checkpoint_save(r->dir.checkpoints, r->trainer, &info, path);
    r->unfit |= status != MT_OK;
    if (status != MT_OK)
        return MT_FAIL(status, "the checkpoint of step %lld was not saved: %.700s (%s%.200s)",
                       (long long)step, mt_error_message(),
                       r->saved_step < 0 ? "there is no earlier one" : "there is still ",
                       r->saved_path);
    r->saved_step = step, r->saved = true;
    MT_TRY(mt_path_format(r->saved_path, "%s", path));
    mt_run_settle_checkpoints(r);
    return MT_OK;
}

/* While updates are skipped the weights stay, and may be past help: what was saved before that is
 * not given up for them. */
static mt_status save_if_due(run *r, int64_t step, bool last)
{
    bool due = last || (multiple(step, r->config->checkpoint_every) && !r->skips);
    return due && r->saved_step != step ? save(r, step) : MT_OK;
}

/* ---- one step -----------------------------------------------------------------------------------
 */

static mt_status fail_on_loss(run *r, const mt_step_result *result)
{
    char name[128] = "";
    MT_TRY(mt_trainer_find_nonfinite(r->trainer, r->tokens, r->targets, name));
    mt_status status =
        MT_FAIL(MT_ENUMERIC,
                "the loss of step %lld is %g; the first tensor that is not finite: %s; nothing "
                "was saved after %.200s",
                (long long)result->step + 1, result->loss,
                *name ? name : "none of the forward pass when run again",
                r->saved_step < 0 ? "the start" : r->saved_path);
    return mt_run_together(r, status, "loss");
}

static mt_status check_skips(run *r, const mt_step_result *result)
{
    r->skips = result->skipped ? result->skipped_in_a_row : 0;
    if (!result->skipped) return MT_OK;
    mt_progress_note(&r->progress, "step %lld: the gradient norm is %g, no update (%lld in a row)",
                     (long long)result->step + 1, result->grad_norm,
                     (long long)result->skipped_in_a_row);
    if (result->skipped_in_a_row < SKIPS_END_A_RUN) return MT_OK;
    mt_status status = MT_FAIL(
        MT_ENUMERIC,
        "step %lld: %d updates in a row were skipped, the gradient norm is not finite; nothing was "
        "saved after %.200s",
        (long long)result->step + 1, SKIPS_END_A_RUN,
        r->saved_step < 0 ? "the start" : r->saved_path);
    return mt_run_together(r, status, "gradient norm");
}

static mt_status skipped_so_far(const run *r, int64_t *skipped)
{
    struct mt_step_state state;
    MT_TRY(mt_device_copy(r->device, &state, mt_optimizer_state(mt_trainer_optimizer(r->trainer)),
                          sizeof state));
    *skipped = state.skipped;
    return MT_OK;
}

static int64_t memory_bytes(const mt_device *device)
{
    int64_t bytes = 0;
    for (int i = 0; i < MT_MEMORY_COUNT; i++) bytes += device->bytes[i];
    return bytes;
}

/* Progress after every step, a line of metrics at intervals and after the last. An update that was
 * skipped may be the last: what is known of its NaNs is said at once. */
static mt_status report(run *r, const mt_step_result *result)
{
    const mt_trainer_config *t = &r->config->trainer;
    int64_t step = result->step + 1, batch_tokens = t->batch_size * t->sequence_length;
    bool due = step % r->config->log_every == 0 || step == t->steps || !result->loss_finite;
    mt_metrics_step line = { .step = step,
                             .tokens = mt_trainer_tokens(r->trainer),
                             .seconds = r->past.seconds + r->seconds,
                             .loss = result->loss,
                             .aux_loss = result->aux_loss,
                             .grad_norm = result->grad_norm,
                             .lr = result->lr,
                             .tokens_per_second = (double)r->pace_tokens / r->pace_seconds,
                             .mfu = (double)r->pace_tokens / r->pace_seconds * r->token_share,
                             .max_vio = result->max_vio,
                             .dropped = mt_trainer_dropped(r->trainer),
                             .memory_bytes = memory_bytes(r->device) };
    if (due) {
        double steps = (double)(r->pace_tokens / batch_tokens);
        MT_TRY(mt_ranks_extremes(&line.ranks, r->comm, (r->pace_seconds - r->pace_waited) / steps,
                                 line.memory_bytes));
    }
    if (result->voided)
        mt_progress_note(
            &r->progress, "step %lld: begun again %lld time%s with more room for rows of experts",
            (long long)step, (long long)result->voided, result->voided == 1 ? "" : "s");
    mt_progress_step(&r->progress, &line, due);
    if (due || result->skipped)
        MT_TRY(mt_nan_watch_look(r->nans, step, &line.nan, mt_run_note, &r->progress));
    if (!due) return MT_OK;
    MT_TRY(skipped_so_far(r, &line.skipped));
    r->pace_seconds = r->pace_waited = 0;
    r->pace_tokens = 0;
    return r->lead ? mt_metrics_train(r->metrics, &line) : MT_OK;
}

static void count_seconds(run *r, double began)
{
    double took = mt_now() - began;
    r->seconds += took;
    r->pace_seconds += took;
}

/* The batch of the step to come: every rank reads all of it. */
static mt_status read_batch(run *r)
{
    const mt_trainer_config *t = &r->config->trainer;
    double began = mt_now();
    MT_TRY(mt_corpus_batch(r->train, t->seed, mt_run_sequences(r), t->batch_size,
                           t->sequence_length, r->tokens, r->targets));
    count_seconds(r, began);
    return MT_OK;
}

static mt_status one_step(run *r, int64_t step)
{
    const mt_trainer_config *t = &r->config->trainer;
    mt_step_result result;
    double began = mt_now(), waited = mt_comm_waited(r->comm);
    MT_TRY(mt_statistics_begin(r->statistics, step + 1));
    r->unfit = true;
    MT_TRY(mt_trainer_step(r->trainer, r->tokens, r->targets, &result));
    r->unfit = !result.loss_finite;
    MT_TRY(mt_statistics_end(r->statistics));
    count_seconds(r, began);
    r->pace_waited += mt_comm_waited(r->comm) - waited;
    r->pace_tokens += t->batch_size * t->sequence_length;
    MT_TRY(report(r, &result));
    if (!result.loss_finite) return fail_on_loss(r, &result);
    return check_skips(r, &result);
}

/* ---- the loop -----------------------------------------------------------------------------------
 */

static mt_status stop(run *r, int64_t step)
{
    if (r->saved_step != step) MT_TRY(save(r, step));
    char command[MT_RUNDIR_COMMAND], under[64] = "";
    const char *launcher = mt_ranks_launcher(); /* whose own words are not known */
    if (*launcher) snprintf(under, sizeof under, ", under the same launcher (%s)", launcher);
    mt_rundir_options options = *r->options;
    options.force &= !r->saved; /* what is saved is this run's */
    mt_rundir_resume_command(command, &r->dir, &options);
    return MT_FAIL(MT_EPREEMPTED, "%s after step %lld of %lld, saved in %.250s; to go on%s: %s",
                   mt_signals_name((int)r->signal), (long long)step,
                   (long long)r->config->trainer.steps, r->saved_path, under, command);
}

/* What any rank has met, all hear of: a signal, which ends the run with a checkpoint whatever else,
 * or a batch that it could not read. */
static mt_status hear(run *r, mt_status read)
{
    int64_t met[] = { mt_signals_pending(), read != MT_OK };
    MT_TRY(mt_comm_all_reduce(r->comm, NULL, met, 2, MT_I64, MT_REDUCE_MAX, "signals"));
    r->signal = met[0];
    if (r->signal && read != MT_OK) mt_error_clear();
    return met[1] && !r->signal ? mt_comm_agree(r->comm, read, "the training data") : MT_OK;
}

static mt_status loop(run *r)
{
    for (;;) {
        int64_t step = mt_trainer_steps(r->trainer);
        bool last = step >= r->config->trainer.steps, stopped;
        MT_TRY(evaluate_if_due(r, step, last, &stopped));
        if (!stopped) MT_TRY(save_if_due(r, step, last));
        MT_TRY(hear(r, last ? MT_OK : read_batch(r)));
        if (stopped || (!last && r->signal)) return stop(r, step);
        if (last) return MT_OK;
        MT_TRY(one_step(r, step));
    }
}

static void announce_end(run *r)
{
    const int64_t steps = r->config->trainer.steps;
    char when[64];
    snprintf(when, sizeof when, " in %.1f s", r->past.seconds + r->seconds);
    if (steps && r->progress.first_step == steps) snprintf(when, sizeof when, ", all made before");
    if (mt_trainer_replayed(r->trainer))
        mt_progress_note(&r->progress, "%lld of %lld steps replayed from a recorded graph",
                         (long long)mt_trainer_replayed(r->trainer), (long long)steps);
    mt_progress_note(&r->progress, "done: %lld step%s%s, %s", (long long)steps,
                     steps == 1 ? "" : "s", when, r->saved_path);
}

/* After a file's fault between steps, be it of metrics, which then lack a line, or of the corpus:
 * the trainer's state is saved where that was not what failed. Of one rank: the others may be in a
 * step. The error stays the one that it was. */
static void rescue(run *r, mt_status status)
{
    mt_error_kept kept;
    const int64_t step = mt_trainer_steps(r->trainer);
    if ((status != MT_EIO && status != MT_EDAMAGED) || r->unfit || step <= 0 ||
        step == r->saved_step || mt_comm_size(r->comm) > 1)
        return;
    mt_error_keep(&kept);
    if (save(r, step) == MT_OK)
        mt_progress_note(&r->progress, "step %lld is saved: %s", (long long)step, r->saved_path);
    else
        mt_progress_note(&r->progress, "%s", mt_error_message());
    mt_error_put_back(&kept);
}

/* After a failure that is no fault of the configuration: what was to be had, and what stands. The
 * error stays the one that it was. */
static void explain(run *r, mt_status status)
{
    mt_error_kept kept;
    mt_plan plan;
    bool memory = status == MT_ENOMEM;
    if (!memory && status != MT_EDEVICE && status != MT_EINTERNAL) return;
    mt_error_keep(&kept);
    if (memory && mt_run_plan(r, &plan) == MT_OK)
        mt_plan_print_bytes(&plan, mt_run_note, &r->progress);
    if (r->saved_step >= 0)
        mt_progress_note(&r->progress, "the checkpoint of step %lld stands: %s",
                         (long long)r->saved_step, r->saved_path);
    mt_error_put_back(&kept);
}

static void finish(run *r)
{
    mt_progress_end(&r->progress);
    mt_statistics_destroy(&r->statistics);
    mt_nan_watch_destroy(&r->nans);
    mt_metrics_close(&r->metrics);
    mt_trainer_destroy(&r->trainer);
    mt_rundir_close(&r->dir);
    mt_checkpoint_close(&r->source);
    mt_corpus_close(&r->train);
    mt_corpus_close(&r->valid);
    free(r->config_text);
    free(r->changed);
    free(r->tokens);
    free(r->targets);
}

mt_status mt_run_train(const mt_config *config, const mt_rundir_options *options)
{
    run *r = calloc(1, sizeof *r);
    MT_REQUIRE(r, MT_ENOMEM, "no memory for a run");
    r->config = config;
    r->options = options;
    r->dir.lock = -1;
    r->saved_step = -1;
    mt_signals_install();
    mt_status status = mt_run_start(r);
    if (status == MT_OK) {
        status = loop(r);
        rescue(r, status);
    }
    if (r->lead) explain(r, status);
    if (status == MT_OK) announce_end(r);
    mt_ranks_fail(r->comm, status);
    finish(r);
    mt_ranks_close(&r->comm, status);
    mt_device_destroy(&r->device);
    free(r);
    return status;
}
