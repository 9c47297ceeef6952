/* The recipes of a model's linear layers: what each computes in at a step, the compute copies that
 * follow from it, and what delayed scaling carries from step to step. */
#pragma once

#include "core/param.h"
#include "dist/fsdp.h"
#include "dist/mesh.h"
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The largest margin with which every finite amax has a scale whose inverse is finite, too: the
 * largest value of an element, 448 or more, times 2^-margin is 1 or more. */
enum { MT_MARGIN_MAX = 8 };

enum { MT_HISTORY_MAX = 65536 };

typedef struct mt_precision_options {
    const mt_recipe_rules
        *rules;               /* borrowed for the call; NULL: every layer in the compute dtype */
    bool save_original_input; /* wgrad quantizes saved inputs again */
    bool save_expert_output;  /* experts' rows are kept for the routing weights' gradient */
    int64_t history;          /* fp8_delayed: length of the amax history, 2 to MT_HISTORY_MAX */
    int64_t margin;           /* powers of two kept free above the amax, to MT_MARGIN_MAX */
    bool most_recent;         /* the last amax decides, not the largest of the history */
    uint64_t seed;            /* of stochastic rounding */
    mt_comm *comm;            /* ranks that share every weight, borrowed; NULL: this one alone */
    const mt_mesh *mesh;     /* of comm's ranks, borrowed, where experts are spread over them; NULL:
                                every rank computes every expert */
    double expert_load;      /* as mt_exchange_options.load, */
    int64_t exchange_tokens; /* and .tokens */
    mt_fsdp_options shards;  /* how they share it */
    bool bf16_grads;         /* as in mt_param_store_set_grad_dtype */
    mt_master master;        /* as in mt_param_store_set_master */
    bool offload;            /* as mt_param_store_offload */
} mt_precision_options;

typedef struct mt_precision mt_precision;

/* Gives every packed param of the store its state and reserves its compute copy, large enough for
 * every rule that may ever apply; cuts the store where ranks share it. Before the store is
 * allocated, which must outlive it. options NULL: no rules. Errors: MT_ECONFIG names the option or
 * the layer and the rule. */
mt_status mt_precision_create(mt_precision **precision, mt_param_store *store,
                              const mt_precision_options *options);
void mt_precision_destroy(mt_precision **precision);

/* After the store is allocated: memory of delayed scaling, compute copies laid out for step 0. */
mt_status mt_precision_start(mt_precision *precision);

/* Selects the recipes of `step`, 0 or more. *changed: some layer computes in other formats than
 * before; its compute copy must be refreshed, and what was planned for its activations no longer
 * holds. */
mt_status mt_precision_set_step(mt_precision *precision, int64_t step, bool *changed);
/* Changes so far: a part of the key of a tape's pass. */
uint64_t mt_precision_epoch(const mt_precision *precision);
/* Number of the micro-batch, in its step, that draws come next. */
void mt_precision_set_pass(mt_precision *precision, uint32_t pass);
/* Number in the run of a step's first micro-batch; pass becomes 0. Kept on the device, so that a
 * recorded step draws anew each time. */
mt_status mt_precision_set_first_pass(mt_precision *precision, uint32_t first);
/* Whether what a row of a layer's input comes to depends on the rows beside it: they share scales
 * that are found in them, or their number decides how codes are multiplied
 * (mt_gemm_fp8_level_loss). */
bool mt_precision_rows_share(const mt_precision *precision);
/* Whether the step after `step` has other recipes. */
bool mt_precision_changes_after(const mt_precision *precision, int64_t step);

/* How the weights are shared; NULL with one rank. */
mt_fsdp *mt_precision_fsdp(const mt_precision *precision);

/* Writes every compute copy from its master. Collective, as the next two are, where the store is
 * shared. */
mt_status mt_precision_refresh(mt_precision *precision, mt_stream *stream);
/* Masters of quantized weights become what their codes hold, before any step; to be refreshed. */
mt_status mt_precision_quantized_init(mt_precision *precision, mt_stream *stream);
/* What training passes leave behind until a step ends, amaxes and counts of NaN, is kept, and comes
 * back when the step is to be made again. */
mt_status mt_precision_keep(mt_precision *precision, mt_stream *stream);
mt_status mt_precision_restore(mt_precision *precision, mt_stream *stream);
/* Delayed scaling begins anew, with scales of 1 and histories of 0: the masters have become others
 * than those whose amaxes were gathered. Before they are refreshed. */
mt_status mt_precision_forget(const mt_precision *precision);
/* Rolls the amax histories: once per optimizer step, before the weights are refreshed. */
mt_status mt_precision_end_step(mt_precision *precision, mt_stream *stream);

/* Sets mt_linear_state.observe of the layers whose name matches `layers`, a glob, and clears that
 * of the others. */
void mt_precision_observe(mt_precision *precision, const char *layers,
                          mt_status (*observe)(void *observer, const mt_param *weight,
                                               mt_operand operand, const mt_qtensor *plain),
                          void *observer);

bool mt_precision_observed(const mt_precision *precision);

/* What a checkpoint holds of delayed scaling: tensor i, device f32, under a name such as
 * "model.layers.0.self_attn.qkv_proj.X_row.scale" [N] or "....history" [length, N]. */
int64_t mt_precision_state_count(const mt_precision *precision);
mt_tensor mt_precision_state(const mt_precision *precision, int64_t i, char name[256]);
/* Whose it is: where this rank has only some members of the weight, N is their number here. */
const mt_param *mt_precision_state_weight(const mt_precision *precision, int64_t i);

/* NaNs met so far in quantized operands: device int64 [sum over layers of 3 N], for each layer the
 * N members of W, of X, of dY; empty without rules. X and dY count once per micro-batch of
 * training, W whenever its compute copy is written. A checkpoint holds them. */
mt_tensor mt_precision_nans(const mt_precision *precision);
/* Whether X counts in passes that do not train, too: a part of the key of such a pass. */
void mt_precision_count_all(mt_precision *precision, bool all);
bool mt_precision_counts_all(const mt_precision *precision);
/* The same with all members of every weight: their number; what the ranks have counted together,
 * into host memory (collective); and the way back, which one rank takes for all. */
int64_t mt_precision_nan_count(const mt_precision *precision);
mt_status mt_precision_sum_nans(const mt_precision *precision, int64_t *counts);
mt_status mt_precision_set_nans(const mt_precision *precision, const int64_t *counts);
/* The layer and the operand ("X") whose `members` counts begin at `first` of these; NULL past the
 * last. */
const char *mt_precision_nans_of(const mt_precision *precision, int64_t first, const char **operand,
                                 int64_t *members);

#ifdef __cplusplus
}
#endif
