/* Sharded weights: what each rank keeps, and how the rest comes and goes.
 *
 * The store's params are cut into shards (core/param.h). A rank quantizes its own shard from its
 * own masters, each direction into a *wire*: the bytes that it contributes to a gather. When a pass
 * needs a unit, the ranks all-gather the wires of one direction to compute copies as one rank would
 * have them, bit for bit. Three units are here at a time, the one in use and the next two, which
 * are fetched ahead: which come next is learned from the passes before. Gradients of a unit are
 * reduced and scattered as soon as its last one is final, most of them before: when those of its
 * large weights are, with which backward begins.
 *
 * On a device with streams, units are gathered in one stream of their own and gradients are reduced
 * in two others, beside what the device's own stream computes; events say who waits for whom, and
 * the host for nobody. Where ranks reach each other's memory (mt_comm_spread), what is gathered
 * goes straight to its place in the copies. */
#pragma once

#include "core/param.h"
#include "dist/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_fsdp mt_fsdp;

typedef struct mt_fsdp_options {
    bool keep_gathered; /* every unit that was gathered stays until the weights change */
    bool reduce_bf16;   /* gradients are rounded to bf16 for the wire, and their sum again */
    mt_comm *replicas;  /* ranks that have the same members of params of which no rank has all: who
                           they are cut among (dist/mesh.h); NULL: there are no such params */
} mt_fsdp_options;

/* For a store cut over the ranks of `comm` and allocated; becomes the source of its params. Passes
 * run in the device's own stream. Ownership: store and comms are borrowed. */
mt_status mt_fsdp_create(mt_fsdp **fsdp, mt_param_store *store, mt_comm *comm,
                         const mt_fsdp_options *options);
void mt_fsdp_destroy(mt_fsdp **fsdp);

/* Lays wires and copies out for the recipes in force (mt_param.linear): before the first refresh,
 * and when a recipe has changed. */
mt_status mt_fsdp_layout(mt_fsdp *fsdp);
/* Before an update of masters in that stream, which writes their casts, too (mt_param.cast): what
 * was gathered before no longer counts. A refresh without an update begins with it. */
mt_status mt_fsdp_begin_update(mt_fsdp *fsdp, mt_stream *stream);
/* A param has been updated, params in the order of the store: a unit without quantized directions
 * is written with its last one, and fetched while others are updated, as far as there is room for
 * what passes begin with. Collective. */
mt_status mt_fsdp_updated(void *fsdp, mt_param *param);
/* Writes the own wires from the masters, but those that an update has. Collective. */
mt_status mt_fsdp_refresh(mt_fsdp *fsdp, mt_stream *stream);
/* Masters of quantized weights become what their codes hold; after a refresh. */
mt_status mt_fsdp_quantized_masters(mt_fsdp *fsdp, mt_stream *stream);

/* From now on, a unit whose last gradient is final (mt_fsdp_grad_ready, a tape's hook) is reduced
 * over the ranks into own_grad. */
void mt_fsdp_begin_reduce(mt_fsdp *fsdp);
mt_status mt_fsdp_grad_ready(void *fsdp, mt_param *param);
/* Reduces the units that are left: those with a param that no pass has used. Collective. */
mt_status mt_fsdp_end_reduce(mt_fsdp *fsdp, mt_stream *stream);

/* What was moved since the start. */
typedef struct mt_fsdp_counts {
    int64_t gathers, ahead;    /* ahead: of the gathers, before they were needed */
    int64_t reduces, in_place; /* of units; in_place: of these, sent as backward wrote */
    int64_t early;             /* of those: most of the unit before its last gradient was final */
    int64_t gathered_bytes, reduced_bytes; /* received by a rank */
} mt_fsdp_counts;
mt_fsdp_counts mt_fsdp_get_counts(const mt_fsdp *fsdp);

#ifdef __cplusplus
}
#endif
