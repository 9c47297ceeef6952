/* A model from a checkpoint, ready to run forward. */
#pragma once

#include "train/checkpoint.h"
#include "train/config.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_inference_options {
    const char *device;                  /* NULL: that of the run, or auto */
    const char *dtype;                   /* NULL: that of the run, or f32 */
    const char *recipe;                  /* NULL: that of the run, or none */
    int64_t sequence_length, batch_size; /* 0: those of the run (its micro-batch), or 512 and 8 */
} mt_inference_options;

typedef struct mt_inference {
    char path[MT_CHECKPOINT_PATH]; /* of the checkpoint */
    char skipped[2048]; /* newer checkpoints that were left aside, and why; "" for none */
    bool has_run;       /* `config` is that of the run; otherwise of the model alone */
    mt_config config;
    uint32_t first_pass; /* micro-batches that the run had made: stochastic rounding counts them */
    mt_device *device;
    mt_trainer *trainer;
} mt_inference;

/* `given`: a checkpoint, a directory of them, or a run. Errors: those of mt_checkpoint_open;
 * MT_ECONFIG. */
mt_status mt_inference_open(mt_inference **inference, const char *given,
                            const mt_inference_options *options);
/* NULL-safe; sets *inference to NULL. */
void mt_inference_close(mt_inference **inference);

#ifdef __cplusplus
}
#endif
