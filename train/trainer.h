/* One training step, whoever calls it: train, trace, gradcheck, bench, tests. Owns model, tape,
 * optimizer. */
#pragma once

#include "layers/model.h"
#include "optim/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_recompute {
    MT_RECOMPUTE_NONE,
    MT_RECOMPUTE_BLOCK,
    MT_RECOMPUTE_ACTIVATION
} mt_recompute;

enum { MT_RECIPE_RULES_TEXT = 1024 };

typedef struct mt_trainer_config {
    mt_model_config model;
    mt_optim_config optim;
    mt_dtype dtype; /* f64, f32, bf16 */
    /* Of the gradients of GEMM weights: bf16 (mt_param_store_set_grad_dtype), or any other: real.
     */
    mt_dtype grad_dtype;
    int64_t batch_size, micro_batch_size, sequence_length;
    int64_t steps; /* of the schedule */
    uint64_t seed;
    mt_recompute recompute;
    bool offload, defer_wgrad;
    int64_t loss_chunk; /* tokens that have logits at a time; 0: a micro-batch's */
    bool forward_only;  /* no gradients, no optimizer: evaluation and logits alone */
    bool weights_come;  /* they are read, or drawn (mt_trainer_draw_weights), after creation */
    bool eager; /* a step's work is launched anew each time, though the device could record it */
    char recipe[MT_RECIPE_RULES_TEXT]; /* rules of core/recipe.h; "" or "none": the dtype everywhere
                                        */
    int64_t delayed_history, delayed_margin; /* as in mt_precision_options */
    bool delayed_most_recent, save_original_input, save_expert_output;
    bool quantized_init;             /* masters begin as the values that the codes hold */
    mt_comm *comm;                   /* ranks that train together, borrowed; NULL: this one alone */
    bool keep_gathered, reduce_bf16; /* as in dist/fsdp.h */
    int64_t expert_parallel;         /* ranks that share a layer's experts; 0 is 1 */
    double expert_capacity;          /* rows that an exchanged block has room for at first, in mean
                                        loads; 0: for any routing */
} mt_trainer_config;

typedef struct mt_step_result {
    int64_t step; /* the step that was made: 0-based */
    double loss, aux_loss, z_loss, grad_norm, lr;
    double max_vio;  /* mean over MoE layers of max load / mean load - 1 */
    int64_t dropped; /* rows of all ranks that experts had no room for (capacity_factor) */
    bool skipped;    /* non-finite gradient norm: no update was made */
    int64_t skipped_in_a_row;
    int64_t voided; /* how often the step began again, with more room for exchanged rows */
    bool loss_finite;
} mt_step_result;

typedef struct mt_trainer mt_trainer;

/* The tape options that a configuration asks for. */
mt_tape_options mt_trainer_tape_options(const mt_trainer_config *config);

/* What layers compute in by a configuration. Ownership: *rules is the caller's, may be NULL, and
 * options borrow it. */
mt_status mt_trainer_precision(mt_precision_options *options, mt_recipe_rules **rules,
                               const mt_trainer_config *config);

/* Micro-batches of the steps before: stochastic rounding draws by their number. */
uint32_t mt_trainer_first_pass(const mt_trainer_config *config, int64_t steps);

/* Builds everything; weights are drawn from the seed, unless they come. Ownership: device borrowed.
 * With ranks, this and every call that trains, evaluates or loads is collective: all ranks pass the
 * same. */
mt_status mt_trainer_create(mt_trainer **trainer, mt_device *device,
                            const mt_trainer_config *config);
void mt_trainer_destroy(mt_trainer **trainer);
/* Weights drawn from the seed, as those of a run that begins. */
mt_status mt_trainer_draw_weights(mt_trainer *trainer);

/* One step on host tokens and targets, int32 [batch_size, sequence_length] each (-100 ignored):
 * with ranks too, the whole batch, of which each rank computes its share, rank r the r-th. A
 * non-finite loss makes no update: result->loss_finite is false, weights are as before. Tokens must
 * be in [0, vocab). */
mt_status mt_trainer_step(mt_trainer *trainer, const int32_t *tokens, const int32_t *targets,
                          mt_step_result *result);
/* The parts of a step: gradients of one whole batch into the store, without the update; and the
 * update at a given learning rate. */
mt_status mt_trainer_gradients(mt_trainer *trainer, const int32_t *tokens, const int32_t *targets,
                               mt_step_result *result);
mt_status mt_trainer_update(mt_trainer *trainer, double lr, mt_step_result *result);

/* Forward only on up to batch_size host sequences: sum of token losses and their number. */
mt_status mt_trainer_eval(mt_trainer *trainer, const int32_t *tokens, const int32_t *targets,
                          int64_t sequences, double *loss_sum, int64_t *count);
/* Forward only of any [batch, sequence] up to sequence_length: logits as f64 into host memory, [V]
 * of the token in `row` of the batch, or (row < 0) [batch, sequence, V]. */
mt_status mt_trainer_logits(mt_trainer *trainer, const int32_t *tokens, int64_t batch,
                            int64_t sequence, int64_t row, double *logits);
/* After a non-finite loss: reruns the batch watching every value; `name` receives the first bad
 * tensor. */
mt_status mt_trainer_find_nonfinite(mt_trainer *trainer, const int32_t *tokens,
                                    const int32_t *targets, char name[128]);
/* MT_ENUMERIC, naming it, where a weight has a NaN or an infinity: a format without a code for them
 * decodes them to numbers, so that no loss may show them. Reads every master, and fails on all
 * ranks of `comm` (NULL: this one alone), between which the weights are shared. Collective. */
mt_status mt_trainer_check_weights(mt_model *model, mt_comm *comm);

const mt_trainer_config *mt_trainer_get_config(const mt_trainer *trainer);
mt_model *mt_trainer_model(const mt_trainer *trainer);
mt_optimizer *mt_trainer_optimizer(const mt_trainer *trainer); /* NULL: forward_only */
mt_tape *mt_trainer_tape(const mt_trainer *trainer);
mt_device *mt_trainer_device(const mt_trainer *trainer);
/* Steps made so far: the next step's index. Set when a checkpoint is loaded: then the recipes of
 * that step hold, and every compute copy is written from its master. */
int64_t mt_trainer_steps(const mt_trainer *trainer);
mt_status mt_trainer_set_steps(mt_trainer *trainer, int64_t steps);
/* Tokens of the steps made so far: the place in the training data. After mt_trainer_set_steps those
 * of so many batches of the configuration; set when other batches went before. */
int64_t mt_trainer_tokens(const mt_trainer *trainer);
void mt_trainer_set_tokens(mt_trainer *trainer, int64_t tokens);
/* Rows that experts had no room for in the steps made so far; set when a checkpoint is loaded. */
int64_t mt_trainer_dropped(const mt_trainer *trainer);
void mt_trainer_set_dropped(mt_trainer *trainer, int64_t dropped);
/* Steps that were replayed from a recorded graph. */
int64_t mt_trainer_replayed(const mt_trainer *trainer);

#ifdef __cplusplus
}
#endif
