/* A training run from its configuration to its last checkpoint. */
#pragma once

#include "train/config.h"
#include "train/rundir.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Trains, or goes on with a run; prints progress to stdout. Everything that can be refused is
 * refused before anything is written. Errors: MT_EPREEMPTED after a signal, state saved;
 * MT_ENUMERIC when the loss is not finite or ten updates in a row were skipped; MT_EIO when the
 * disk is full. */
mt_status mt_run_train(const mt_config *config, const mt_rundir_options *options);

#ifdef __cplusplus
}
#endif
