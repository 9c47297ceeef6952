/* Statistics of the operands of chosen linear layers in a run (NUMERICS section 7): lines of
 * metrics.jsonl, and statistics/step_<8 digits>.h5 in the run's directory, which also has the
 * distribution of codes. Other formats can be measured on the same tensors without being used. */
#pragma once

#include "train/config.h"
#include "train/metrics.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_statistics mt_statistics;

/* NULL-able result: *statistics is NULL where the configuration asks for none. Borrows everything.
 * With ranks, this and what follows is collective: the first micro-batch of each is measured, and
 * what they count is folded in their order; whole weights are rank 0's. `metrics` is NULL on the
 * others, which write nothing. Errors: MT_ECONFIG names the key. */
mt_status mt_statistics_create(mt_statistics **statistics, mt_trainer *trainer,
                               const mt_config *config, mt_metrics *metrics, const char *run_path);
void mt_statistics_destroy(mt_statistics **statistics);

/* Around the step that makes `step` steps complete. Between them the first micro-batch is measured,
 * if this step's turn has come; of an LM head that works through it in parts (loss_chunk), those
 * that come by first: the first of X, the last of dY. NULL-safe. */
mt_status mt_statistics_begin(mt_statistics *statistics, int64_t step);
mt_status mt_statistics_end(mt_statistics *statistics);

/* Fails where the configuration's section cannot be carried out. */
mt_status mt_statistics_check(const mt_config *config);
/* The same of statistics.layers, once the layers are known. */
mt_status mt_statistics_check_layers(const mt_config *config, mt_trainer *trainer);

#ifdef __cplusplus
}
#endif
