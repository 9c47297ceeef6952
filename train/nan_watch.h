/* NaNs in the operands that a run quantizes: formats without a NaN turn them into numbers, so that
 * a loss need not show them. Counted on the device in every step, read when a line is logged. */
#pragma once

#include "train/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_nan_watch mt_nan_watch;

/* What the trainer has counted so far is not told again. Borrows the trainer. */
mt_status mt_nan_watch_create(mt_nan_watch **watch, mt_trainer *trainer);
void mt_nan_watch_destroy(mt_nan_watch **watch);

/* *total: all of the run so far. `note` gets a sentence for each layer's operand that had some
 * since the last look, at most 8, then how many more. Reads device memory, allocates nothing. */
mt_status mt_nan_watch_look(mt_nan_watch *watch, int64_t step, int64_t *total,
                            void (*note)(void *context, const char *text), void *context);

#ifdef __cplusplus
}
#endif
