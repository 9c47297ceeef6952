/* Inside the precision of a model: its layers, and what they carry from step to step. */
#pragma once

#include "layers/functional.h"
#include "layers/precision.h"

/* Directions of operands: slot s is direction s % MT_DIR_COUNT of operand s / MT_DIR_COUNT. */
enum { MT_PRECISION_SLOTS = MT_OPERAND_COUNT * MT_DIR_COUNT };
extern const char *const mt_precision_operands[MT_OPERAND_COUNT]; /* "W" */
extern const char *const mt_precision_dirs[MT_DIR_COUNT];         /* "row" */

typedef struct mt_precision_layer {
    mt_param *weight;
    mt_linear_state state;
    bool delayed[MT_PRECISION_SLOTS]; /* some rule makes this slot fp8_delayed */
    mt_element element[MT_PRECISION_SLOTS];
} mt_precision_layer;

enum { MT_PRECISION_LANES = 3 }; /* beside the stream that asks */

struct mt_precision {
    mt_param_store *store;
    mt_recipe_rules *rules; /* NULL: none */
    mt_precision_layer *layers;
    int64_t count;
    int64_t history;
    int margin;
    bool most_recent;
    uint32_t pass;
    void *first_pass; /* device uint32 */
    uint64_t epoch;
    void *memory; /* scales and histories, device f32 */
    size_t bytes;
    void *nans; /* counts of NaN, device int64: layer by layer, W X dY, members */
    int64_t nan_count;
    mt_comm *comm;
    mt_fsdp_options shards;
    mt_fsdp *fsdp; /* NULL with one rank */
    /* With ranks: slot 0 of every history, device f32; those of weights with some members last. */
    void *amaxes;
    int64_t amax_count, amax_shared; /* shared: before those */
    void *kept; /* the same, and behind it the counts of NaN, when a step begins */
    size_t kept_bytes;
    /* Small weights are refreshed side by side: each is a chain of launches that have little work.
     */
    mt_stream lanes[MT_PRECISION_LANES];
    mt_event begun, ended[MT_PRECISION_LANES];
};

static inline bool mt_precision_is_shared(const mt_precision *p)
{
    return mt_comm_size(p->comm) > 1;
}

static inline mt_device *mt_precision_device(const mt_precision *p)
{
    return mt_param_store_device(p->store);
}

/* Memory of delayed scaling, which begins, and counts of NaN, of 0. */
mt_status mt_precision_make_state(mt_precision *precision);
void mt_precision_free_state(mt_precision *precision);
