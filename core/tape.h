/* Tape autograd: nodes recorded as forward runs, swept in reverse.
 *
 * The tape knows no operator; it calls through struct mt_op. Values are reference counted: whoever
 * makes one holds a reference, nodes hold one on what they save, and storage goes back to the step
 * arena with the last of them. Four things hang on the tape, each neutral to the bit: recompute
 * (segments, and single values that are cheap to make again), offload of saved values, deferred
 * weight gradients, and the grad-ready hook. */
#pragma once

#include "core/arena.h"
#include "core/param.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_tape mt_tape;
typedef struct mt_node mt_node;

/* A value on the tape. `data` is valid while a reference is held (saved values: through
 * mt_node_saved). Opaque beyond this first field; the object itself lives until the pass ends. */
typedef struct mt_value {
    mt_tensor data;
} mt_value;

/* A differentiable operator: what the reverse sweep calls. */
typedef struct mt_op {
    const char *name;
    /* Reads gradients of outputs, writes gradients of inputs and params. */
    mt_status (*backward)(mt_tape *tape, mt_node *node);
    /* Optional: computes output 0 again from the node's inputs (MT_VALUE_RECOMPUTE). */
    mt_status (*again)(mt_tape *tape, mt_node *node, mt_tensor *out);
} mt_op;

typedef struct mt_tape_options {
    bool defer_wgrad;          /* queue weight gradients until mt_tape_run_deferred */
    bool offload;              /* move saved values to the host pool between forward and backward */
    bool recompute;            /* mt_tape_segment keeps only its inputs */
    bool recompute_activation; /* values marked MT_VALUE_RECOMPUTE are dropped and made again */
    /* Fires once for each param used in a pass, when its gradient of this backward is final.
     * Optional. */
    mt_status (*grad_ready)(void *context, mt_param *param);
    void *context;
} mt_tape_options;

/* Ownership: the stream is borrowed. Activations live in an arena of the tape's own, offloaded
 * values in a host pool of its own. */
mt_status mt_tape_create(mt_tape **tape, mt_stream *stream, const mt_tape_options *options);
void mt_tape_destroy(mt_tape **tape);

mt_stream *mt_tape_stream(const mt_tape *tape);
const mt_arena *mt_tape_arena(const mt_tape *tape);
const mt_arena *mt_tape_host_pool(const mt_tape *tape);

/* Starts a pass (a micro-batch, or a forward only). `key` names what is run at which shapes: passes
 * of equal keys must make the same calls. `training` false records nothing and frees as it goes. */
mt_status mt_tape_begin(mt_tape *tape, uint64_t key, bool training);
/* Ends a pass: drops every node and frees what is left. MT_EINTERNAL names a value still held. */
mt_status mt_tape_end(mt_tape *tape);
/* Ends a pass that failed: frees everything and leaves the error as it is. */
void mt_tape_abort(mt_tape *tape);
/* Ends a pass that came to `status`: one that failed is aborted, and its status comes back. */
mt_status mt_tape_close(mt_tape *tape, mt_status status);

/* True in a pass that will go backward, whether nodes are recorded or a segment will run again. */
bool mt_tape_training(const mt_tape *tape);

/* True while a segment runs its forward again: ops with lasting side effects leave them out. */
bool mt_tape_recomputing(const mt_tape *tape);

/* True while nodes are recorded: what only backward reads need not be made otherwise (forward only,
 * or a segment that will run again). */
bool mt_tape_recording(const mt_tape *tape);

/* A new value in the arena; the caller holds one reference. Contents are undefined. */
mt_status mt_tape_value(mt_tape *tape, mt_value **value, mt_dtype dtype, int ndim,
                        const int64_t *shape);
/* A value over borrowed memory that outlives the pass (tokens, targets). No gradient flows to it
 * unless `wants_grad`. */
mt_status mt_tape_input(mt_tape *tape, mt_value **value, mt_tensor data, bool wants_grad);
/* Another reference; and the end of one (NULL-safe, sets *value to NULL). */
void mt_value_hold(mt_value *value);
void mt_value_release(mt_tape *tape, mt_value **value);

/* Marks output 0 of the node that made it: if options.recompute_activation, its storage goes once
 * no forward reference is left, and op->again makes it anew in the sweep. */
void mt_value_recompute(mt_tape *tape, mt_value *value);

enum {
    MT_NODE_MAX = 10
}; /* inputs, outputs, saved values or params of a node, at most, and a NULL */

typedef struct mt_node_spec {
    const mt_op *op;
    const void *attrs; /* copied */
    size_t attrs_bytes;
    mt_value *inputs[MT_NODE_MAX]; /* NULL-terminated; a gradient may flow to each */
    mt_value *outputs[MT_NODE_MAX];
    mt_value *saved[MT_NODE_MAX]; /* what backward reads again */
    mt_param *params[MT_NODE_MAX];
} mt_node_spec;

/* Records a node whose forward has run. The tape takes its own references. A param that is not
 * frozen is in one tape's training pass at a time, from its first node to the pass's end. Errors:
 * MT_EINVAL names the param that another tape's open pass has, or what is more than MT_NODE_MAX. */
mt_status mt_tape_record(mt_tape *tape, const mt_node_spec *spec);

/* For mt_op.backward: the node's attributes, and its param i. */
const void *mt_node_attrs(const mt_node *node);
mt_param *mt_node_param(const mt_node *node, int i);
/* Saved value i, brought back if it was offloaded or dropped. Valid until backward returns. */
mt_status mt_node_saved(mt_tape *tape, mt_node *node, int i, mt_tensor *out);
/* Gradient of output i; data is NULL when none has flowed. */
mt_tensor mt_node_grad_out(const mt_node *node, int i);
/* Where to write the gradient of input i: the op computes grad = add + contribution. add->data is
 * NULL for the first contribution, equal to grad->data to accumulate in place, or another buffer
 * when the present gradient is shared. grad->data is NULL when input i takes no gradient: skip it.
 */
mt_status mt_node_grad_in(mt_tape *tape, mt_node *node, int i, mt_tensor *grad, mt_tensor *add);
/* Hands the gradient of output `out` on to input `in` unchanged, without a copy. False when input
 * `in` already has one (then the op adds), or wants none (*wanted false). */
bool mt_node_grad_pass(mt_tape *tape, mt_node *node, int out, int in, bool *wanted);
/* Arena scratch for the time of one backward call. */
mt_status mt_node_scratch(mt_tape *tape, mt_node *node, void **p, size_t bytes);

enum { MT_WGRAD_EXTRAS = 4 };
/* A weight gradient: computes param->grad = (accumulate ? grad : 0) + contribution from saved
 * tensors. `x` and `dy` are what it reads; the tape keeps both alive until it has run. */
struct mt_wgrad {
    mt_status (*run)(mt_tape *tape, const struct mt_wgrad *job, bool accumulate);
    mt_param *param;
    mt_tensor x, dy;
    mt_tensor extra[MT_WGRAD_EXTRAS]; /* further inputs, such as counts and offsets */
    unsigned char attrs[64];
};
/* Fills in job->x from saved value `x_saved` (-1: absent), job->dy from `dy`, a value made for it,
 * or from the gradient of output 0 where that is NULL, job->extra[j] from saved value
 * `extra_saved[j]` (-1: absent), and runs the job now, or queues it (options.defer_wgrad, or the
 * param already has queued ones). A frozen param's job does not run.
 */
mt_status mt_tape_wgrad(mt_tape *tape, mt_node *node, const struct mt_wgrad *job, int x_saved,
                        const mt_value *dy, const int extra_saved[MT_WGRAD_EXTRAS]);
/* Runs the queue in order. */
mt_status mt_tape_run_deferred(mt_tape *tape);
/* For small param gradients written directly in backward: begin says whether to accumulate, end
 * counts the contribution. Between them nothing else may write the gradient. A frozen param: *skip
 * is set and the gradient must not be written; end is still called. A param that also has
 * mt_tape_wgrad contributions must be written through those alone, or the order would depend on
 * deferral. */
mt_status mt_param_grad_begin(mt_tape *tape, mt_param *param, bool *accumulate, bool *skip);
mt_status mt_param_grad_end(mt_tape *tape, mt_param *param);

/* Seeds d(total)/d(value) = seed for a scalar of dtype f32 or f64; several losses may be seeded. */
mt_status mt_tape_seed(mt_tape *tape, mt_value *value, double seed);
/* Seeds with a whole tensor of gradients on the device, copied. */
mt_status mt_tape_seed_tensor(mt_tape *tape, mt_value *value, mt_tensor grad);
/* Room for it, like the value, for the caller to fill on the device. */
mt_status mt_tape_seed_room(mt_tape *tape, mt_value *value, mt_tensor *grad);
/* The reverse sweep. Values released by everyone else keep their storage until their node has run.
 */
mt_status mt_tape_backward(mt_tape *tape);
/* The gradient that reached a value made by mt_tape_input with wants_grad, after the sweep. */
mt_tensor mt_value_grad(const mt_value *value);

/* A stretch of forward that may be recomputed as one. `run` makes outputs from inputs and must be a
 * pure function of (context, inputs): it is called again in the sweep when options.recompute is
 * set. `context` is borrowed and must outlive the pass. The caller holds a reference on each
 * output. No two of its inputs and outputs may be one value. */
typedef mt_status (*mt_segment_fn)(mt_tape *tape, void *context, mt_value *const *inputs,
                                   mt_value **outputs);
mt_status mt_tape_segment(mt_tape *tape, mt_segment_fn run, void *context, mt_value *const *inputs,
                          int input_count, mt_value **outputs, int output_count);
/* The same, recomputed whatever the options say. */
mt_status mt_tape_recompute(mt_tape *tape, mt_segment_fn run, void *context,
                            mt_value *const *inputs, int input_count, mt_value **outputs,
                            int output_count);

/* Observes values by name as forward makes them (trace, statistics): called by layers through
 * mt_tape_observe; never in a recompute. */
typedef mt_status (*mt_observer)(void *context, const char *name, const mt_tensor *data);
void mt_tape_set_observer(mt_tape *tape, mt_observer observer, void *context);
bool mt_tape_observed(const mt_tape *tape);
mt_status mt_tape_observe(mt_tape *tape, const mt_value *value, const char *format, ...)
    MT_PRINTF(3, 4);

#ifdef __cplusplus
}
#endif
