/* Inside a run: its state, and what its start and its loop share. */
#pragma once

#include "train/checkpoint.h"
#include "train/corpora.h"
#include "train/metrics.h"
#include "train/nan_watch.h"
#include "train/plan.h"
#include "train/progress.h"
#include "train/run.h"
#include "train/statistics.h"

enum { MT_RUN_REASONS = 2048 };

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
    mt_checkpoint *source; /* to begin with, until it has; or NULL */
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
    bool saved;                /* by this process */
    int64_t skips;             /* updates in a row that were skipped last */
    bool unfit;                /* to be saved: amid a step, its loss is not finite, saving failed */
    char saved_path[MT_CHECKPOINT_PATH];
    int64_t signal;      /* that some rank has received */
    double token_share;  /* a token's products, of what all GPUs are said to do in a second; 0: not
                            known */
    double seconds;      /* trained in this session */
    double pace_seconds; /* the same since the last metrics line, */
    int64_t pace_tokens; /* the tokens of it, */
    double pace_waited;  /* and what of it was spent in collectives */
} run;

/* From nothing to before the first step: ranks meet, everything that can be refused is, the run's
 * directory is entered, and a checkpoint loaded where it goes on. What has been made so far is r's,
 * on failure too. Collective. */
mt_status mt_run_start(run *r);

/* What every rank finds by itself, a fault of the configuration or of numbers that all have, they
 * find together: one of them speaks. Collective where `status` is no success. */
mt_status mt_run_together(run *r, mt_status status, const char *what);
/* What follows a checkpoint's last rename: `latest` names the newest, r's, and older ones go. A
 * kill may come between, so a run that goes on does it, too. */
void mt_run_settle_checkpoints(run *r);
/* What this rank will take in memory. */
mt_status mt_run_plan(const run *r, mt_plan *plan);
/* A line of progress; `context` is a mt_progress. */
void mt_run_note(void *context, const char *text);
/* The place in the data is kept in tokens: sequences may have had another length. */
static inline int64_t mt_run_sequences(const run *r)
{
    return mt_trainer_tokens(r->trainer) / r->config->trainer.sequence_length;
}
