/* Inside the trainer: its state, and what its files share. */
#pragma once

#include "train/trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_TRAINER_LOSS, MT_TRAINER_AUX, MT_TRAINER_Z, MT_TRAINER_METRICS };
typedef enum mt_pass_kind { MT_PASS_TRAIN, MT_PASS_EVAL, MT_PASS_LOGITS } mt_pass_kind;

struct mt_trainer {
    mt_trainer_config config;
    mt_device *device;
    mt_stream stream;
    mt_model *model;
    mt_mesh mesh; /* of the ranks, where experts are spread over some */
    mt_tape *tape;
    mt_optimizer *optimizer;
    mt_dtype real;
    void *tokens, *targets; /* device int32 [batch_size, sequence_length] */
    void *scale, *metrics;  /* device real [1], [METRICS] */
    size_t batch_bytes;
    int64_t *load;         /* host [moe layers, experts] */
    int64_t steps, voided; /* voided: beginnings of this step that were */
    int64_t sampled;       /* tokens of the steps made */
    int64_t dropped;       /* rows that they left out */
    int64_t replayed;      /* steps that were launched as a graph */
    mt_graph graph;        /* a recorded step, and what it was recorded for */
    uint64_t kind;
    int64_t frees;
};

/* Micro-batches of a step, of all ranks. */
static inline int64_t mt_trainer_passes(const mt_trainer *t)
{
    return t->config.batch_size / t->config.micro_batch_size;
}

/* How the weights are shared; NULL with one rank. */
static inline mt_fsdp *mt_trainer_shards(const mt_trainer *t)
{
    return mt_precision_fsdp(mt_model_precision(t->model));
}

/* Rows for experts on other ranks have all the room that they may need while someone observes. */
void mt_trainer_open_exchange(mt_trainer *trainer);
/* Whether what ran since the last call left out rows for experts on other ranks, on any rank: then
 * it must run again, and there is more room now. Collective. */
mt_status mt_trainer_settle(mt_trainer *trainer, bool *again);
/* Draws of the step to come count from here. */
mt_status mt_trainer_begin_draws(mt_trainer *trainer);
/* x as real, to the device. */
mt_status mt_trainer_upload_scalar(mt_trainer *trainer, void *to, double x);
/* Copies a batch to the device; *counted receives the targets that are not ignored. */
mt_status mt_trainer_upload(mt_trainer *trainer, const int32_t *tokens, const int32_t *targets,
                            int64_t count, int64_t *counted);
/* Names what is run at which shapes, in which formats. */
uint64_t mt_trainer_pass_key(const mt_trainer *trainer, mt_pass_kind kind, int64_t batch,
                             int64_t sequence);
/* Forward of [batch, sequence] on uploaded tokens; loss and logits (f64, host; of one row, or with
 * row < 0 of all) where asked. */
mt_status mt_trainer_forward(mt_trainer *trainer, mt_pass_kind kind, int64_t batch,
                             int64_t sequence, double *loss, int64_t row, double *logits);

#ifdef __cplusplus
}
#endif
