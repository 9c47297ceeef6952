/* The loss of a model on a validation corpus. */
#pragma once

#include "train/corpus.h"
#include "train/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_evaluation {
    double loss; /* nats a token, mean over the windows */
    int64_t windows, tokens;
    bool full;    /* every window of the corpus was used */
    bool stopped; /* a signal asked to stop: the rest means nothing */
} mt_evaluation;

/* Windows of the model's sequence length: all of them, or `windows` spread evenly (0: all). Errors:
 * MT_ECONFIG when the corpus has no window; MT_ENUMERIC when a weight or the loss is not finite, or
 * a NaN was quantized. */
mt_status mt_evaluate(mt_evaluation *result, mt_trainer *trainer, const mt_corpus *corpus,
                      int64_t windows);
/* Nats as bits: a byte, for a corpus of bytes. */
double mt_bits(double nats);

#ifdef __cplusplus
}
#endif
