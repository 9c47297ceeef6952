/* The ranks of a run: how they start, agree and end together. */
#pragma once

#include "train/metrics.h"
#include "train/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --gpus, or MT_OPTION_ABSENT: runs `argv` again as `count` ranks on the GPUs of this host, and
 * exits as the first that failed; where this is one of them, or the only one, returns at once.
 * device: the configuration's. MT_ECONFIG: a count that is not positive, a device that is no GPU or
 * one, or another launcher has started this process as one of several. MT_EUNSUPPORTED: not in this
 * build. MT_EDEVICE: no GPU. */
mt_status mt_ranks_start(int64_t count, const char *device, char *const *argv);

/* The command line as it was, after the program as it was called, for mt_ranks_start; to be freed.
 * Reading options moves words. */
mt_status mt_ranks_copy_words(char ***words, int argc, char **argv);

/* Who has started this process as one of several: "torchrun", "Open MPI", ...; "" for nobody, and
 * where it was mt_ranks_start, whose word is in the command line. Static. */
const char *mt_ranks_launcher(void);

/* The device that a configuration names: among ranks, "cuda" and "auto" are the GPU of this rank's
 * number on its host, or the only one that it sees; "auto" is the CPU where there is none and the
 * ranks are not of mt_ranks_start. MT_ECONFIG: more ranks than GPUs. */
mt_status mt_ranks_open_device(mt_device **device, const char *name);
/* The world that this process was started in; `timeout_s`: how long a rank waits for the others.
 * From then on a fault of another rank ends this process, with a line on stderr from rank 0. */
mt_status mt_ranks_open(mt_comm **comm, mt_device *device, double timeout_s);
/* Threads for this rank: its share of the host's cores; 0 where that is decided elsewhere (one
 * process, OMP_NUM_THREADS, cores bound by the launcher). */
int mt_ranks_threads(void);

/* A rank's share of the batch: micro-batches of no more than it. MT_ECONFIG, which every rank
 * finds, names numbers that would do where the ranks cannot share batch or experts alike. */
mt_status mt_ranks_share(mt_trainer_config *config, mt_comm *comm);
/* Fails on every rank unless all have the same configuration: MT_ECONFIG names a rank, the first
 * key in which it differs from rank 0, and both values. Collective. */
mt_status mt_ranks_check_config(mt_comm *comm, const char *text);
/* The same of one line that all must have, such as what is in a corpus. Collective. */
mt_status mt_ranks_check_same(mt_comm *comm, const char *text, const char *what);
/* The largest of the ranks' numbers: a signal that any of them has received. Collective. */
mt_status mt_ranks_largest(mt_comm *comm, int64_t *x, const char *what);

/* The extremes of what the ranks have each measured. Collective. */
mt_status mt_ranks_extremes(mt_metrics_ranks *extremes, mt_comm *comm, double seconds,
                            int64_t bytes);

/* Before what the ranks share is taken apart: where only this rank failed (`status` is neither
 * MT_OK nor something that all ranks return), the others are ended and told why. Ranks other than 0
 * do not return from that. NULL-safe. */
void mt_ranks_fail(mt_comm *comm, mt_status status);
/* Ends the world after a run, as mt_ranks_fail where that has not been. Ranks other than 0 do not
 * return from a failure: rank 0 speaks for all. */
void mt_ranks_close(mt_comm **comm, mt_status status);

#ifdef __cplusplus
}
#endif
