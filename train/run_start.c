/* The start of a run: what it is refused for is found before anything is written. */
#include "train/run_priv.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "train/paths.h"
#include "train/ranks.h"

/* ---- what the loop shares -----------------------------------------------------------------------
 */

mt_status mt_run_together(run *r, mt_status status, const char *what)
{
    return status == MT_OK ? MT_OK : mt_comm_agree(r->comm, status, what);
}

void mt_run_note(void *context, const char *text)
{
    mt_progress_note(context, "%s", text);
}

mt_status mt_run_plan(const run *r, mt_plan *plan)
{
    return mt_plan_make(plan, r->config, mt_comm_rank(r->comm), mt_comm_size(r->comm));
}

/* ---- corpora ------------------------------------------------------------------------------------
 */

/* The same on every rank. */
static mt_status open_corpora(run *r)
{
    const mt_config *c = r->config;
    mt_status status = mt_corpora_open(&r->train, "data.train", c->train_corpus, c);
    if (status == MT_OK && *c->valid_corpus)
        status = mt_corpora_open(&r->valid, "data.valid", c->valid_corpus, c);
    if (status == MT_OK && r->valid)
        status = mt_corpora_check_pair(mt_corpus_get_info(r->train), "data.valid",
                                       mt_corpus_get_info(r->valid));
    MT_TRY(mt_comm_agree(r->comm, status, "corpora"));
    mt_corpora_identify(r->corpus, r->train);
    MT_TRY(mt_ranks_check_same(r->comm, r->corpus, "training corpus"));
    if (!r->valid) return MT_OK;
    mt_corpora_identify(r->valid_corpus, r->valid);
    return mt_ranks_check_same(r->comm, r->valid_corpus, "validation corpus");
}

/* ---- what is announced --------------------------------------------------------------------------
 */

/* What the run will take in memory, where a plan can be made of it. */
static void announce_plan(run *r)
{
    mt_plan plan;
    if (mt_run_plan(r, &plan) != MT_OK) {
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
    mt_plan plan = { .ranks = 0 };
    mt_plan_count_work(&plan, r->trainer);
    mt_progress_note(
        &r->progress,
        "%s: %s, %.2f M params (%.2f M active), %s on %s: kernels %s, GEMM %s, %d thread%s",
        r->config->name, t->model.architecture->model_type, (double)plan.parameters / 1e6,
        (double)plan.active_parameters / 1e6, mt_dtype_name(t->dtype), r->device->name,
        r->device->kernel_set, r->gemm_path, r->device->threads,
        r->device->threads == 1 ? "" : "s");
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
    const mt_config *c = r->config;
    bool asked = *c->statistics_layers || *c->statistics_tensors || *c->statistics_what_if;
    if (c->statistics_every > t->steps || (asked && !c->statistics_every))
        mt_progress_note(&r->progress,
                         "statistics.every is %lld, train.steps %lld: no statistics will be made",
                         (long long)c->statistics_every, (long long)t->steps);
    mt_corpora_doubts(r->train, r->valid, t->model.vocab_size, mt_run_note, &r->progress);
    return mt_gemm_paths(t, r->device, mt_run_note, &r->progress);
}

/* ---- going on -----------------------------------------------------------------------------------
 */

/* Rank 0's: how many checkpoints there are. Were they moved away, what the metrics say of their
 * steps would be lost. When they were due is what the run had recorded. */
static mt_status count_checkpoints(const run *r, bool force, int64_t *there)
{
    const int64_t every = r->dir.checkpoint_every;
    int64_t last = 0;
    if (!force) MT_TRY(mt_checkpoint_check_moved(r->dir.checkpoints));
    MT_TRY(mt_checkpoint_count_dirs(there, r->dir.checkpoints));
    if (force || *there || !every) return MT_OK;
    MT_TRY(mt_metrics_last_step(&last, r->dir.metrics));
    MT_REQUIRE(
        last <= every, MT_EIO,
        "%s tells of step %lld, a checkpoint was due at %lld, and %s has none: put them back, "
        "or --force to begin again without them",
        r->dir.metrics, (long long)last, (long long)every, r->dir.checkpoints);
    return MT_OK;
}

/* Whether there is a checkpoint, as rank 0 sees it. */
static mt_status look_for_checkpoints(run *r, bool force, int64_t *there)
{
    *there = 0;
    mt_status status = r->lead ? count_checkpoints(r, force, there) : MT_OK;
    MT_TRY(mt_comm_agree(r->comm, status, "a directory of checkpoints"));
    MT_TRY(mt_ranks_largest(r->comm, there, "a directory of checkpoints"));
    if (!*there)
        mt_progress_note(&r->progress, "nothing saved in %s yet: from the beginning", r->dir.path);
    return MT_OK;
}

void mt_run_settle_checkpoints(run *r)
{
    if (r->lead && mt_checkpoint_name_latest(r->dir.checkpoints, r->saved_path) != MT_OK)
        mt_progress_note(&r->progress,
                         "the checkpoint of step %lld is saved, %s/latest does not "
                         "name it: %s",
                         (long long)r->saved_step, r->dir.checkpoints, mt_error_message());
    if (r->lead && !r->skips &&
        mt_checkpoint_prune(r->dir.checkpoints, r->config->keep_last, r->config->keep_every) !=
            MT_OK)
        mt_progress_note(&r->progress, "old checkpoints stay: %s", mt_error_message());
}

/* Goes on from the newest complete checkpoint. */
static mt_status resume(run *r, bool force)
{
    char path[MT_CHECKPOINT_PATH] = "", skipped[MT_RUN_REASONS] = "";
    int64_t there;
    MT_TRY(look_for_checkpoints(r, force, &there));
    if (!there) return MT_OK;
    mt_status status = mt_checkpoint_load_latest(r->trainer, path, skipped, sizeof skipped,
                                                 r->dir.checkpoints, r->corpus, force);
    if (*skipped) mt_progress_note(&r->progress, "left aside: %s", skipped);
    r->damaged = *skipped != '\0';
    MT_TRY(mt_comm_agree(r->comm, status, "loading a checkpoint"));
    r->saved_step = mt_trainer_steps(r->trainer);
    MT_TRY(mt_path_format(r->saved_path, "%s", path));
    if (r->lead && r->damaged) MT_TRY(mt_checkpoint_prune_after(r->dir.checkpoints, r->saved_step));
    mt_progress_note(&r->progress, "resumed from %s, after %lld sequences of %lld tokens", path,
                     (long long)mt_run_sequences(r), (long long)r->config->trainer.sequence_length);
    if (r->saved_step <= r->config->trainer.steps) {
        mt_run_settle_checkpoints(r);
        return MT_OK;
    }
    status = MT_FAIL(MT_ECONFIG, "%.300s has made %lld steps, train.steps is %lld", path,
                     (long long)r->saved_step, (long long)r->config->trainer.steps);
    return mt_run_together(r, status, "steps to go");
}

/* What a run is to begin with; of one that goes on before its first checkpoint, too. */
static mt_status open_source(run *r)
{
    const mt_config *c = r->config;
    char skipped[MT_RUN_REASONS] = "";
    if (!*c->init_from) return MT_OK;
    MT_TRY(mt_checkpoint_open_source(&r->source, skipped, sizeof skipped, c->init_from,
                                     &c->trainer.model, r->comm));
    if (*skipped) mt_progress_note(&r->progress, "left aside: %s", skipped);
    return MT_OK;
}

/* A run that begins draws its weights, but where it is given some. */
static mt_status begin(run *r)
{
    if (!r->source) MT_TRY(open_source(r));
    if (!r->source) return mt_trainer_draw_weights(r->trainer);
    MT_TRY(mt_checkpoint_begin(r->trainer, r->source));
    mt_progress_note(&r->progress, "begins with the weights of %s", mt_checkpoint_path(r->source));
    mt_checkpoint_close(&r->source);
    return MT_OK;
}

/* Of weights that are no numbers no step is made: some formats would make numbers of them. */
static mt_status check_weights(run *r)
{
    const mt_config *c = r->config;
    mt_status status = mt_trainer_check_weights(mt_trainer_model(r->trainer), r->comm);
    if (status != MT_ENUMERIC) return status;
    return MT_FAIL(status, "%.250s: %.300s",
                   r->saved_step >= 0 ? r->saved_path
                   : *c->init_from    ? c->init_from
                                      : "the first weights",
                   mt_error_message());
}

/* ---- start --------------------------------------------------------------------------------------
 */

/* Checkpoints say in which micro-batches a rank computes, on which its draws and some formats'
 * scales depend: whoever evaluates one does as the run did. */
static mt_status note_share(run *r)
{
    mt_config own = *r->config;
    own.trainer.micro_batch_size = r->trainer_config.micro_batch_size;
    free(r->config_text);
    r->config_text = NULL;
    return mt_config_text(&r->config_text, &own);
}

/* The device, the world, and what the configuration means in it: a rank's micro-batches are of its
 * share. Kernel sets have layouts of their own, in which weights travel. */
static mt_status join_ranks(run *r)
{
    mt_trainer_config *t = &r->trainer_config;
    *t = r->config->trainer;
    t->weights_come = true; /* resume, begin */
    MT_TRY(mt_ranks_open_device(&r->device, r->config->device));
    MT_TRY(mt_ranks_open(&r->comm, r->device, r->config->rank_timeout));
    r->lead = mt_comm_rank(r->comm) == 0;
    MT_TRY(mt_ranks_check_config(r->comm, r->config_text));
    MT_TRY(mt_ranks_check_same(r->comm, r->device->kernel_set, "kernel set"));
    MT_TRY(mt_ranks_check_same(
        r->comm,
        r->options->resume ? r->options->force ? "--resume --force" : "--resume" : "a new run",
        "command line"));
    MT_TRY(mt_run_together(r, mt_ranks_share(t, r->comm), "configuration"));
    return note_share(r);
}

/* A file of rank 0's for a moment, by whose name the others know its directory. */
static mt_status put_token(char token[MT_PATH_BYTES], const mt_rundir *dir)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    MT_TRY(mt_path_format(token, "%s/.rank_0_%lld_%lld", dir->path, (long long)getpid(),
                          (long long)now.tv_sec * 1000000000 + now.tv_nsec));
    return mt_file_write_all(token, "", 0);
}

/* Each rank writes its part of a checkpoint there: that it sees the directory is found out before
 * there is anything to save. */
static mt_status see_directory(run *r)
{
    char token[MT_PATH_BYTES] = "";
    bool seen = true;
    mt_status status = r->lead ? put_token(token, &r->dir) : MT_OK;
    MT_TRY(mt_comm_agree(r->comm, status, "the run's directory"));
    status = mt_comm_broadcast(r->comm, NULL, token, sizeof token, 0, "a file in it");
    if (status == MT_OK) status = mt_path_look(&seen, token);
    if (status == MT_OK && !seen)
        status = MT_FAIL(MT_EIO,
                         "run %.300s: it is not the directory that rank 0 has there; ranks need a "
                         "file system that all of them see",
                         r->dir.path);
    status = mt_comm_agree(r->comm, status, "the run's directory");
    if (r->lead) unlink(token);
    return status;
}

/* The directory is rank 0's; the others learn where it is, from wherever they were started. */
static mt_status enter_directory(run *r)
{
    mt_status status =
        r->lead ? mt_rundir_open(&r->dir, &r->changed, r->config, r->options) : MT_OK;
    const bool alone = mt_comm_size(r->comm) == 1;
    char *whole = r->lead && status == MT_OK && !alone ? realpath(r->dir.path, NULL) : NULL;
    if (whole) status = mt_rundir_place(&r->dir, whole);
    free(whole);
    MT_TRY(mt_comm_agree(r->comm, status, "the run's directory"));
    MT_TRY(mt_comm_broadcast(r->comm, NULL, r->dir.path, sizeof r->dir.path, 0, "its path"));
    MT_TRY(mt_comm_broadcast(r->comm, NULL, r->dir.checkpoints, sizeof r->dir.checkpoints, 0,
                             "its checkpoints"));
    return alone ? MT_OK : see_directory(r);
}

/* Rank 0's files of the run, and what they say of its past. */
static mt_status open_records(run *r)
{
    const mt_rundir_record record = { .config = r->config,
                                      .device = r->device,
                                      .gemm_path = r->gemm_path,
                                      .train_corpus = r->corpus,
                                      .valid_corpus = r->valid_corpus,
                                      .step = mt_trainer_steps(r->trainer) };
    mt_status status = MT_OK;
    char *changed = NULL;
    if (r->lead) {
        status = mt_metrics_check(r->dir.metrics, mt_trainer_steps(r->trainer));
        if (status == MT_OK) status = mt_rundir_write(&changed, &r->dir, &record);
        if (changed) mt_progress_note(&r->progress, "changed since: %s", changed);
        free(changed);
        if (status == MT_OK)
            status = mt_metrics_open(&r->metrics, &r->past, r->dir.metrics,
                                     mt_trainer_steps(r->trainer));
        if (status == MT_OK && r->past.unread_line)
            mt_progress_note(&r->progress,
                             "%s: line %lld could not be read, and was cut off with "
                             "what followed it",
                             r->dir.metrics, (long long)r->past.unread_line);
    }
    if (r->lead && status == MT_OK && r->saved_step < 0) /* a run that begins names none */
        status = mt_checkpoint_name_latest(r->dir.checkpoints, NULL);
    MT_TRY(mt_comm_agree(r->comm, status, "the run's records"));
    MT_TRY(mt_comm_broadcast(r->comm, NULL, &r->past, sizeof r->past, 0, "the run's past"));
    MT_TRY(mt_statistics_create(&r->statistics, r->trainer, r->config, r->metrics, r->dir.path));
    return mt_nan_watch_create(&r->nans, mt_trainer_model(r->trainer));
}

/* A training step's products are three times those of a forward pass. */
static double token_share(const run *r)
{
    mt_plan plan = { .ranks = 0 };
    const double all = r->device->bf16_flops * mt_comm_size(r->comm);
    mt_plan_count_work(&plan, r->trainer);
    return r->config->trainer.dtype == MT_BF16 && all > 0 ? 3 * plan.forward_flops / all : 0;
}

static void begin_progress(run *r)
{
    r->token_share = token_share(r);
    mt_progress_begin(&r->progress, mt_trainer_steps(r->trainer), r->config->trainer.steps);
    r->progress.silent = !r->lead;
}

/* Of the configuration, which all ranks have. */
static bool is_common(mt_status status)
{
    return status == MT_ECONFIG || status == MT_EUNSUPPORTED;
}

/* What the configuration cannot be on so many ranks, or with this model, is said before data is
 * read and anything of the run is there. What else a plan may meet is the plan's own. */
static mt_status check_trainer(run *r)
{
    mt_status status = mt_plan_check(r->config, mt_comm_rank(r->comm), mt_comm_size(r->comm));
    if (is_common(status)) return mt_run_together(r, status, "configuration");
    if (status != MT_OK) mt_error_clear();
    return MT_OK;
}

/* Where memory is short, for one, it may be short for this rank alone. */
static mt_status create_trainer(run *r)
{
    mt_status status = mt_trainer_create(&r->trainer, r->device, &r->trainer_config);
    return is_common(status) ? mt_run_together(r, status, "configuration") : status;
}

mt_status mt_run_start(run *r)
{
    const mt_config *c = r->config;
    const struct mt_kernels *kernels = NULL;
    MT_TRY(mt_config_text(&r->config_text, c));
    MT_TRY(join_ranks(r));
    MT_TRY(mt_device_kernels(r->device, c->trainer.dtype, &kernels));
    r->gemm_path = kernels->gemm_path;
    MT_TRY(check_trainer(r));
    MT_TRY(open_corpora(r));
    mt_progress_begin(&r->progress, 0, c->trainer.steps);
    r->progress.silent = !r->lead;
    if (!r->options->resume) MT_TRY(open_source(r));
    MT_TRY(enter_directory(r));
    if (r->lead) announce_plan(r); /* before memory is asked for, which may be the end */
    MT_TRY(create_trainer(r));
    size_t count = (size_t)(c->trainer.batch_size * c->trainer.sequence_length);
    r->tokens = malloc(count * sizeof *r->tokens);
    r->targets = malloc(count * sizeof *r->targets);
    MT_REQUIRE(r->tokens && r->targets, MT_ENOMEM, "no memory for a batch of %zu tokens", count);
    begin_progress(r);
    MT_TRY(announce(r));
    if (r->options->resume) MT_TRY(resume(r, r->options->force));
    if (r->saved_step < 0) MT_TRY(begin(r));
    MT_TRY(check_weights(r));
    MT_TRY(open_records(r));
    begin_progress(r);
    return MT_OK;
}
