/* What a model computes on one batch, written out for comparison with other programs. */
#pragma once

#include "train/h5.h"
#include "train/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A file of tokens: [steps, batch, sequence] (steps 1 where the file has [batch, sequence]). */
typedef struct mt_trace_input {
    int64_t steps, batch, sequence;
    int32_t *tokens, *targets; /* host; -100 where a target is ignored */
    bool shifted;              /* the file has no targets: they are the next tokens */
} mt_trace_input;

/* Reads dataset `tokens` (int64, 2 dimensions, or 3 where `stepped`) and `targets`: where the file
 * has none, position s predicts token s + 1 and the last is ignored. Errors: MT_EIO names a file
 * that is none of tokens, and why not; dataset and index of a token outside [0, vocab). */
mt_status mt_trace_input_read(mt_trace_input *input, const char *path, bool stepped, int64_t vocab);
void mt_trace_input_free(mt_trace_input *input);
/* For losses. MT_ECONFIG names the file, which `path` is, and the batch whose targets are all
 * ignored. */
mt_status mt_trace_input_check_targets(const mt_trace_input *input, const char *path);

typedef struct mt_trace_options {
    bool targets;            /* the losses */
    bool grads;              /* of every param, under exported names; needs targets */
    const char *activations; /* a pattern of names, or NULL */
} mt_trace_options;

/* Runs the first batch through the model as it is (weights refreshed) and writes `logits`, and what
 * the options ask for, in the model's wide dtype. *loss: the total one, finite or not; 0 where none
 * is asked for. Errors: MT_ECONFIG when the pattern fits nothing, naming what there is. */
mt_status mt_trace_batch(double *loss, mt_h5 *out, mt_device *device, mt_model *model,
                         const mt_trace_input *input, const mt_trace_options *options);

/* Makes one optimizer step per batch at the trainer's schedule and writes f64 [steps] `losses`,
 * `aux_losses` and `grad_norms`, each from before its step. Errors: MT_ENUMERIC names the step
 * whose loss or gradient norm is not finite. */
mt_status mt_trace_steps(mt_h5 *out, mt_trainer *trainer, const mt_trace_input *input);

#ifdef __cplusplus
}
#endif
