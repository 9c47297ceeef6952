/* NaNs in the operands that a run quantizes: formats without a NaN turn them into numbers, so that
 * a loss need not show them. Counted on the device in every step, read when a line is logged. */
#pragma once

#include "layers/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_nan_watch mt_nan_watch;

/* What the model has counted so far is not told again. Borrows the model. */
mt_status mt_nan_watch_create(mt_nan_watch **watch, mt_model *model);
/* The same, and until it is destroyed passes that do not train are counted, too. */
mt_status mt_nan_watch_create_forward(mt_nan_watch **watch, mt_model *model);
void mt_nan_watch_destroy(mt_nan_watch **watch);

/* *total: all of the run so far. `note` gets a sentence for each layer's operand that had some
 * since the last look, at most 8, then how many more. Reads device memory, allocates nothing. */
mt_status mt_nan_watch_look(mt_nan_watch *watch, int64_t step, int64_t *total,
                            void (*note)(void *context, const char *text), void *context);
/* MT_ENUMERIC where there were some since the last look: names the first layer's operand. The
 * counts are those of the last look again. Collective. */
mt_status mt_nan_watch_check(mt_nan_watch *watch);

#ifdef __cplusplus
}
#endif
