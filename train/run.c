/* The loop of a run. What is due at a step (evaluation, checkpoint, end) is a function of the step
 * and of what the run's files already hold, so that going on after any stop makes the same lines
 * and files as going straight through. */
#include "train/run.h"

#include <math.h>
#include <stdlib.h>

#include "train/build_info.h"
#include "train/checkpoint.h"
#include "train/corpora.h"
#include "train/evaluate.h"
#include "train/metrics.h"
#include "train/nan_watch.h"
#include "train/paths.h"
#include "train/plan.h"
#include "train/progress.h"
#include "train/ranks.h"
#include "train/signals.h"
#include "train/statistics.h"

enum { SKIPS_END_A_RUN = 10, REASONS = 2048 };

typedef struct run {
    const mt_config *config;
    const mt_rundir_options *options;
    mt_trainer_config trainer_config; /* config's, with the ranks */
    mt_comm *comm;
    bool lead; /* rank 0: keeps the run's directory, and speaks */
    mt_rundir dir;
    mt_corpus *train, *valid; /* valid: NULL for none */
    char corpus[MT_CORPORA_IDENTITY],
        valid_corpus[MT_CORPORA_IDENTITY]; /* what they hold; "" for none */
    char *config_text, *changed;
    mt_device *device;
    const char *gemm_path;
    mt_trainer *trainer;
    mt_metrics *metrics;
    mt_statistics *statistics;
    mt_nan_watch *nans;
    mt_metrics_past past;
    mt_progress progress;
    int32_t *tokens, *targets; /* [batch_size, sequence_length] */
    bool damaged;              /* a newer checkpoint than the one resumed from */
    int64_t saved_step;        /* of the newest checkpoint; -1: none */
    char saved_path[MT_CHECKPOINT_PATH];
    int64_t signal;      /* that some rank has received */
    double seconds;      /* trained in this session */
    double pace_seconds; /* the same since the last metrics line, */
    int64_t pace_tokens; /* the tokens of it, */
    double pace_waited;  /* and what of it was spent in collectives */
} run;

/* ---- corpora ------------------------------------------------------------------------------------
 */

/* The same on every rank. */
static mt_status open_corpora(run *r)
{
    const mt_config *c = r->config;
    mt_status status = mt_corpora_open(&r->train, "data.train", c->train_corpus, c);
    if (status == MT_OK && *c->valid_corpus)
        status = mt_corpora_open(&r->valid, "data.valid", c->valid_corpus, c);
    if (status == MT_OK && r->valid) status = mt_corpora_check_pair(r->train, r->valid);
    MT_TRY(mt_comm_agree(r->comm, status, "corpora"));
    mt_corpora_identify(r->corpus, r->train);
    MT_TRY(mt_ranks_check_same(r->comm, r->corpus, "training corpus"));
    if (!r->valid) return MT_OK;
    mt_corpora_identify(r->valid_corpus, r->valid);
    return mt_ranks_check_same(r->comm, r->valid_corpus, "validation corpus");
}

/* ---- start --------------------------------------------------------------------------------------
 */

/* What every rank finds by itself, a fault of the configuration or of numbers that all have, they
 * find together: one of them speaks. */
static mt_status together(run *r, mt_status status, const char *what)
{
    return status == MT_OK ? MT_OK : mt_comm_agree(r->comm, status, what);
}

static int64_t memory_bytes(const mt_device *device)
{
    int64_t bytes = 0;
    for (int i = 0; i < MT_MEMORY_COUNT; i++) bytes += device->bytes[i];
    return bytes;
}

/* Parameters, and those that one token passes through. */
static void count_params(const mt_trainer *trainer, int64_t *all, int64_t *active)
{
    const mt_model_config *m = &mt_trainer_get_config(trainer)->model;
    mt_param_store *store = mt_model_params(mt_trainer_model(trainer));
    *all = *active = 0;
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *p = mt_param_store_get(store, i);
        int64_t each = p->group.m * p->group.k;
        *all += each * p->all_members;
        *active += each * (p->all_members > 1 ? m->num_experts_per_tok : 1);
    }
}

static void note(void *context, const char *text)
{
    mt_progress_note(context, "%s", text);
}

static mt_status make_plan(const run *r, mt_plan *plan)
{
    if (!r->comm) return mt_plan_make(plan, r->config);
    return mt_plan_make_rank(plan, r->config, mt_comm_rank(r->comm), mt_comm_size(r->comm));
}

/* What the run will take in memory, where a plan can be made of it. */
static void announce_plan(run *r)
{
    mt_plan plan;
    if (make_plan(r, &plan) != MT_OK) {
        mt_error_clear();
        return;
    }
    mt_progress_note(&r->progress, "memory planned: %.2f MiB%s%s, see `mixtape plan`",
                     (double)mt_plan_device_bytes(&plan) / 0x1p20, plan.gpu ? " of the GPU's" : "",
                     mt_plan_pinned_bytes(&plan) ? ", and pinned memory for what is offloaded"
                                                 : "");
}

static mt_status announce(run *r)
{
    const mt_trainer_config *t = &r->config->trainer;
    int64_t all, active;
    count_params(r->trainer, &all, &active);
    mt_progress_note(
        &r->progress,
        "%s: %s, %.2f M params (%.2f M active), %s on %s: kernels %s, GEMM %s, %d thread%s",
        r->config->name, t->model.architecture->model_type, (double)all / 1e6, (double)active / 1e6,
        mt_dtype_name(t->dtype), r->device->name, r->device->kernel_set, r->gemm_path,
        r->device->threads, r->device->threads == 1 ? "" : "s");
    mt_progress_note(&r->progress,
                     "run %s: %lld step%s of %lld x %lld tokens, %lld tokens an epoch", r->dir.path,
                     (long long)t->steps, t->steps == 1 ? "" : "s", (long long)t->batch_size,
                     (long long)t->sequence_length,
                     (long long)mt_corpus_windows_per_epoch(r->train, t->sequence_length) *
                         (long long)t->sequence_length);
    if (mt_comm_size(r->comm) > 1)
        mt_progress_note(&r->progress, "%d ranks over %s, weights sharded, experts over %lld",
                         mt_comm_size(r->comm), mt_comm_backend(r->comm),
                         (long long)t->expert_parallel);
    if (r->changed) mt_progress_note(&r->progress, "changed since: %s", r->changed);
    if (r->lead) announce_plan(r);
    if (r->config->statistics_every > t->steps)
        mt_progress_note(&r->progress,
                         "statistics.every is %lld, train.steps %lld: no statistics will be made",
                         (long long)r->config->statistics_every, (long long)t->steps);
    mt_corpora_doubts(r->train, r->valid, t->model.vocab_size, note, &r->progress);
    return mt_gemm_paths(t, r->device, note, &r->progress);
}

/* Finds the newest complete checkpoint, as rank 0 sees it; *path is "" where there is none at all.
 */
static mt_status find_checkpoint(run *r, char path[MT_CHECKPOINT_PATH])
{
    char skipped[REASONS] = "";
    int64_t there = 0;
    mt_status status = r->lead ? mt_checkpoint_count_dirs(&there, r->dir.checkpoints) : MT_OK;
    *path = '\0';
    MT_TRY(mt_comm_agree(r->comm, status, "a directory of checkpoints"));
    MT_TRY(mt_ranks_largest(r->comm, &there, "a directory of checkpoints"));
    if (!there) {
        mt_progress_note(&r->progress, "nothing saved in %s yet: from the beginning", r->dir.path);
        return MT_OK;
    }
    status = mt_checkpoint_find_latest(path, skipped, sizeof skipped, r->dir.checkpoints, r->comm);
    if (*skipped) mt_progress_note(&r->progress, "left aside: %s", skipped);
    r->damaged = *skipped != '\0';
    return status;
}

/* The place in the data is kept in tokens: sequences may have had another length. */
static int64_t sequences_so_far(const run *r)
{
    return mt_trainer_tokens(r->trainer) / r->config->trainer.sequence_length;
}

/* Goes on from the newest complete checkpoint. */
static mt_status resume(run *r, bool force)
{
    char path[MT_CHECKPOINT_PATH] = "";
    MT_TRY(find_checkpoint(r, path));
    if (!*path) return MT_OK;
    mt_status status = mt_checkpoint_load(r->trainer, path, r->corpus, force);
    MT_TRY(mt_comm_agree(r->comm, status, "loading a checkpoint"));
    r->saved_step = mt_trainer_steps(r->trainer);
    MT_TRY(mt_path_format(r->saved_path, "%s", path));
    if (r->lead && r->damaged) MT_TRY(mt_checkpoint_prune_after(r->dir.checkpoints, r->saved_step));
    mt_progress_note(&r->progress, "resumed from %s, after %lld sequences of %lld tokens", path,
                     (long long)sequences_so_far(r), (long long)r->config->trainer.sequence_length);
    if (r->saved_step <= r->config->trainer.steps) return MT_OK;
    status = MT_FAIL(MT_ECONFIG, "%.300s has made %lld steps, train.steps is %lld", path,
                     (long long)r->saved_step, (long long)r->config->trainer.steps);
    return together(r, status, "steps to go");
}

/* The device, the world, and what the configuration means in it: a rank's micro-batches are of its
 * share. Kernel sets have layouts of their own, in which weights travel. */
static mt_status join_ranks(run *r)
{
    mt_trainer_config *t = &r->trainer_config;
    *t = r->config->trainer;
    MT_TRY(mt_ranks_open_device(&r->device, r->config->device));
    MT_TRY(mt_ranks_open(&r->comm, r->device, r->config->rank_timeout));
    r->lead = mt_comm_rank(r->comm) == 0;
    MT_TRY(mt_ranks_check_config(r->comm, r->config_text));
    MT_TRY(mt_ranks_check_same(r->comm, r->device->kernel_set, "kernel set"));
    MT_TRY(mt_ranks_check_same(
        r->comm,
        r->options->resume ? r->options->force ? "--resume --force" : "--resume" : "a new run",
        "command line"));
    return together(r, mt_ranks_share(t, r->comm), "configuration");
}

/* The directory is rank 0's; the others only learn where it is. */
static mt_status enter_directory(run *r)
{
    mt_status status =
        r->lead ? mt_rundir_open(&r->dir, &r->changed, r->config, r->options) : MT_OK;
    MT_TRY(mt_comm_agree(r->comm, status, "the run's directory"));
    MT_TRY(mt_comm_broadcast(r->comm, NULL, r->dir.path, sizeof r->dir.path, 0, "its path"));
    return mt_comm_broadcast(r->comm, NULL, r->dir.checkpoints, sizeof r->dir.checkpoints, 0,
                             "its checkpoints");
}

/* Rank 0's files of the run, and what they say of its past. */
static mt_status open_records(run *r)
{
    const mt_rundir_record record = { .config = r->config,
                                      .device = r->device,
                                      .gemm_path = r->gemm_path,
                                      .train_corpus = r->corpus,
                                      .valid_corpus = r->valid_corpus };
    mt_status status = MT_OK;
    char *changed = NULL;
    if (r->lead) {
        status = mt_rundir_write(&changed, &r->dir, &record);
        if (changed) mt_progress_note(&r->progress, "changed since: %s", changed);
        free(changed);
        if (status == MT_OK)
            status = mt_metrics_open(&r->metrics, &r->past, r->dir.metrics,
                                     mt_trainer_steps(r->trainer));
    }
    MT_TRY(mt_comm_agree(r->comm, status, "the run's records"));
    MT_TRY(mt_comm_broadcast(r->comm, NULL, &r->past, sizeof r->past, 0, "the run's past"));
    MT_TRY(mt_statistics_create(&r->statistics, r->trainer, r->config, r->metrics, r->dir.path));
    return mt_nan_watch_create(&r->nans, r->trainer);
}

static void begin_progress(run *r)
{
    mt_progress_begin(&r->progress, mt_trainer_steps(r->trainer), r->config->trainer.steps);
    r->progress.silent = !r->lead;
}

/* What the configuration cannot be on so many ranks, or with this model, is said before data is
 * read and anything of the run is there. What else a plan may meet is the plan's own. */
static mt_status check_trainer(run *r)
{
    mt_status status = mt_plan_check(r->config, mt_comm_rank(r->comm), mt_comm_size(r->comm));
    if (status == MT_ECONFIG) return together(r, status, "configuration");
    if (status != MT_OK) mt_error_clear();
    return MT_OK;
}

/* Where memory is short, for one, it may be short for this rank alone. */
static mt_status create_trainer(run *r)
{
    mt_status status = mt_trainer_create(&r->trainer, r->device, &r->trainer_config);
    return status == MT_ECONFIG ? together(r, status, "configuration") : status;
}

static mt_status start(run *r)
{
    const mt_config *c = r->config;
    const struct mt_kernels *kernels = NULL;
    MT_TRY(mt_config_text(&r->config_text, c));
    MT_TRY(join_ranks(r));
    MT_TRY(mt_device_kernels(r->device, c->trainer.dtype, &kernels));
    r->gemm_path = kernels->gemm_path;
    MT_TRY(check_trainer(r));
    MT_TRY(open_corpora(r));
    MT_TRY(enter_directory(r));
    MT_TRY(create_trainer(r));
    size_t count = (size_t)(c->trainer.batch_size * c->trainer.sequence_length);
    r->tokens = malloc(count * sizeof *r->tokens);
    r->targets = malloc(count * sizeof *r->targets);
    MT_REQUIRE(r->tokens && r->targets, MT_ENOMEM, "no memory for a batch of %zu tokens", count);
    begin_progress(r);
    MT_TRY(announce(r));
    if (r->options->resume) MT_TRY(resume(r, r->options->force));
    MT_TRY(open_records(r));
    begin_progress(r);
    return MT_OK;
}

/* ---- evaluation and checkpoints -----------------------------------------------------------------
 */

static bool multiple(int64_t step, int64_t every)
{
    return every && step && step % every == 0;
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
    MT_TRY(
        mt_evaluate(&e, r->trainer, r->valid, last ? 0 : c->eval_batches * c->trainer.batch_size));
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

static mt_status save(run *r, int64_t step)
{
    char path[MT_CHECKPOINT_PATH];
    const mt_checkpoint_info info = { .run_config = r->config_text,
                                      .git_revision = mt_build_revision(),
                                      .corpus = r->corpus };
    if (r->lead) MT_TRY(mt_metrics_sync(r->metrics));
    mt_status status = mt_checkpoint_save(r->dir.checkpoints, r->trainer, &info, path);
    if (status != MT_OK)
        return MT_FAIL(status, "the checkpoint of step %lld was not saved: %.700s (%s%.200s)",
                       (long long)step, mt_error_message(),
                       r->saved_step < 0 ? "there is no earlier one" : "there is still ",
                       r->saved_path);
    r->saved_step = step;
    MT_TRY(mt_path_format(r->saved_path, "%s", path));
    if (r->lead && mt_checkpoint_prune(r->dir.checkpoints, r->config->keep_last,
                                       r->config->keep_every) != MT_OK)
        mt_progress_note(&r->progress, "old checkpoints stay: %s", mt_error_message());
    return MT_OK;
}

static mt_status save_if_due(run *r, int64_t step, bool last)
{
    bool due = last || multiple(step, r->config->checkpoint_every);
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
    return together(r, status, "loss");
}

static mt_status check_skips(run *r, const mt_step_result *result)
{
    if (!result->skipped) return MT_OK;
    mt_progress_note(&r->progress, "step %lld: the gradient norm is %g, no update (%lld in a row)",
                     (long long)result->step + 1, result->grad_norm,
                     (long long)result->skipped_in_a_row);
    if (result->skipped_in_a_row < SKIPS_END_A_RUN) return MT_OK;
    mt_status status = MT_FAIL(
        MT_ENUMERIC, "step %lld: %d updates in a row were skipped, the gradient norm is not finite",
        (long long)result->step + 1, SKIPS_END_A_RUN);
    return together(r, status, "gradient norm");
}

static mt_status skipped_so_far(const run *r, int64_t *skipped)
{
    struct mt_step_state state;
    MT_TRY(mt_device_copy(r->device, &state, mt_optimizer_state(mt_trainer_optimizer(r->trainer)),
                          sizeof state));
    *skipped = state.skipped;
    return MT_OK;
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
                             .max_vio = result->max_vio,
                             .dropped = result->dropped,
                             .memory_bytes = memory_bytes(r->device) };
    if (due) {
        double steps = (double)(r->pace_tokens / batch_tokens);
        MT_TRY(mt_ranks_extremes(&line.ranks, r->comm, (r->pace_seconds - r->pace_waited) / steps,
                                 line.memory_bytes));
    }
    if (result->voided)
        mt_progress_note(&r->progress,
                         "step %lld: begun again %lld times with more room for rows of experts",
                         (long long)step, (long long)result->voided);
    mt_progress_step(&r->progress, &line, due);
    if (due || result->skipped)
        MT_TRY(mt_nan_watch_look(r->nans, step, &line.nan, note, &r->progress));
    if (!due) return MT_OK;
    MT_TRY(skipped_so_far(r, &line.skipped));
    r->pace_seconds = r->pace_waited = 0;
    r->pace_tokens = 0;
    return r->lead ? mt_metrics_train(r->metrics, &line) : MT_OK;
}

static void count_seconds(run *r, double began)
{
    double took = mt_progress_clock() - began;
    r->seconds += took;
    r->pace_seconds += took;
}

/* The batch of the step to come: every rank reads all of it. */
static mt_status read_batch(run *r)
{
    const mt_trainer_config *t = &r->config->trainer;
    double began = mt_progress_clock();
    MT_TRY(mt_corpus_batch(r->train, t->seed, sequences_so_far(r), t->batch_size,
                           t->sequence_length, r->tokens, r->targets));
    count_seconds(r, began);
    return MT_OK;
}

static mt_status one_step(run *r, int64_t step)
{
    const mt_trainer_config *t = &r->config->trainer;
    mt_step_result result;
    double began = mt_progress_clock(), waited = mt_comm_waited(r->comm);
    MT_TRY(mt_statistics_begin(r->statistics, step + 1));
    MT_TRY(mt_trainer_step(r->trainer, r->tokens, r->targets, &result));
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
    mt_rundir_resume_command(command, &r->dir, r->options);
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

/* After a failure that is no fault of the configuration: what was to be had, and what stands. The
 * error stays the one that it was. */
static void explain(run *r, mt_status status)
{
    char sentence[REASONS];
    mt_plan plan;
    bool memory = status == MT_ENOMEM;
    if (!memory && status != MT_EDEVICE && status != MT_EINTERNAL) return;
    snprintf(sentence, sizeof sentence, "%s", mt_error_message());
    if (memory && make_plan(r, &plan) == MT_OK) mt_plan_print_bytes(&plan, note, &r->progress);
    if (r->saved_step >= 0)
        mt_progress_note(&r->progress, "the checkpoint of step %lld stands: %s",
                         (long long)r->saved_step, r->saved_path);
    (void)MT_FAIL(status, "%s", sentence);
}

static void finish(run *r)
{
    mt_progress_end(&r->progress);
    mt_statistics_destroy(&r->statistics);
    mt_nan_watch_destroy(&r->nans);
    mt_metrics_close(&r->metrics);
    mt_trainer_destroy(&r->trainer);
    mt_rundir_close(&r->dir);
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
    mt_status status = start(r);
    if (status == MT_OK) status = loop(r);
    if (r->lead) explain(r, status);
    if (status == MT_OK) announce_end(r);
    finish(r);
    mt_ranks_close(&r->comm, status);
    mt_device_destroy(&r->device);
    free(r);
    return status;
}
