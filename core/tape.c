/* The tape: passes, segments, the reverse sweep, deferred weight gradients. */
#include "core/tape.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/tape_priv.h"

mt_status mt_tape_create(mt_tape **tape, mt_stream *stream, const mt_tape_options *options)
{
    *tape = NULL;
    MT_REQUIRE(stream && stream->device, MT_EINVAL, "tape: no %s", stream ? "device" : "stream");
    mt_tape *t = calloc(1, sizeof *t);
    MT_REQUIRE(t, MT_ENOMEM, "tape: out of memory");
    t->stream = stream;
    if (options) t->options = *options;
    t->values.size = sizeof(value), t->storages.size = sizeof(storage);
    t->nodes.size = sizeof(mt_node), t->attrs.size = ATTRS_BYTES;
    t->jobs.size = sizeof(deferred_job);
    mt_status status = mt_arena_create(&t->arena, stream->device, MT_MEMORY_ACTIVATIONS);
    if (status == MT_OK)
        status = mt_arena_create(&t->host_pool, stream->device, MT_MEMORY_HOST_POOL);
    if (status == MT_OK) status = mt_offload_open(t);
    if (status != MT_OK) {
        mt_tape_destroy(&t);
        return status;
    }
    *tape = t;
    return MT_OK;
}

void mt_tape_destroy(mt_tape **tape)
{
    mt_tape *t = *tape;
    if (!t) return;
    if (t->active) mt_tape_abort(t);
    mt_offload_close(t);
    mt_arena_destroy(&t->arena);
    mt_arena_destroy(&t->host_pool);
    mt_pool_destroy(&t->values);
    mt_pool_destroy(&t->storages);
    mt_pool_destroy(&t->nodes);
    mt_pool_destroy(&t->attrs);
    mt_pool_destroy(&t->jobs);
    free(t->list);
    free(t->touched);
    free(t);
    *tape = NULL;
}

mt_stream *mt_tape_stream(const mt_tape *tape)
{
    return tape->stream;
}

const mt_arena *mt_tape_arena(const mt_tape *tape)
{
    return tape->arena;
}

const mt_arena *mt_tape_host_pool(const mt_tape *tape)
{
    return tape->host_pool;
}

bool mt_tape_training(const mt_tape *tape)
{
    return tape->training;
}

bool mt_tape_recording(const mt_tape *tape)
{
    return tape->training && !tape->suspended;
}

bool mt_tape_recomputing(const mt_tape *tape)
{
    return tape->recomputing;
}

mt_status mt_tape_begin(mt_tape *tape, uint64_t key, bool training)
{
    MT_REQUIRE(!tape->active, MT_EINVAL, "tape: a pass begun within a pass");
    MT_TRY(mt_arena_begin(tape->arena, key));
    MT_TRY(mt_arena_begin(tape->host_pool, key));
    tape->active = true, tape->training = training;
    return MT_OK;
}

/* Gives back what values still own. Returns how many were held by forward code. */
static int64_t free_values(mt_tape *t)
{
    int64_t held = 0;
    for (int64_t i = 0; i < t->values.used; i++) {
        value *v = (value *)(void *)(t->values.chunks[i / POOL_CHUNK] +
                                     (size_t)(i % POOL_CHUNK) * sizeof(value));
        held += v->holds > 0 && v->data && !v->data->borrowed;
        if (v->where == OFFLOADED) mt_arena_free(t->host_pool, v->host_id);
        mt_storage_release(t, v->data);
        mt_storage_release(t, v->grad);
    }
    return held;
}

static void release_jobs(mt_tape *t)
{
    for (; t->job_done < t->job_count; t->job_done++) {
        deferred_job *j =
            (deferred_job *)(void *)(t->jobs.chunks[t->job_done / POOL_CHUNK] +
                                     (size_t)(t->job_done % POOL_CHUNK) * sizeof(deferred_job));
        for (int i = 0; i < 2 + MT_WGRAD_EXTRAS; i++) mt_storage_release(t, j->held[i]);
        j->job.param->deferred--;
    }
}

static void release_temporaries(mt_tape *t)
{
    while (t->temporary_count) mt_storage_release(t, t->temporaries[--t->temporary_count]);
}

/* Values under way arrive first: their memory is given back. */
static int64_t finish(mt_tape *t, mt_status *status)
{
    *status = mt_offload_drain(t);
    release_temporaries(t);
    release_jobs(t);
    int64_t held = free_values(t);
    for (int64_t i = 0; i < t->touched_count; i++)
        t->touched[i]->uses = 0, t->touched[i]->tape = NULL;
    mt_pool_reset(&t->values);
    mt_pool_reset(&t->storages);
    mt_pool_reset(&t->nodes);
    mt_pool_reset(&t->attrs);
    mt_pool_reset(&t->jobs);
    t->count = t->job_count = t->job_done = t->touched_count = 0;
    t->active = t->training = t->recomputing = false;
    t->late = MT_OK;
    t->suspended = 0;
    return held;
}

mt_status mt_tape_end(mt_tape *tape)
{
    MT_REQUIRE(tape->active, MT_EINVAL, "tape: a pass ended that was not begun");
    MT_REQUIRE(tape->job_done == tape->job_count, MT_EINVAL,
               "tape: %" PRId64 " deferred weight gradients were never run",
               tape->job_count - tape->job_done);
    mt_status status, late = tape->late;
    int64_t held = finish(tape, &status);
    MT_TRY(mt_arena_end(tape->arena));
    MT_TRY(mt_arena_end(tape->host_pool));
    MT_TRY(status);
    if (late != MT_OK) mt_error_put_back(&tape->late_error);
    MT_TRY(late);
    MT_REQUIRE(held == 0, MT_EINTERNAL, "tape: %" PRId64 " values still held at the end of a pass",
               held);
    return MT_OK;
}

void mt_tape_abort(mt_tape *tape)
{
    if (!tape->active) return;
    mt_error_kept before;
    mt_status status;
    mt_error_keep(&before);
    mt_arena_abandon(tape->arena);
    mt_arena_abandon(tape->host_pool);
    finish(tape, &status);
    mt_error_put_back(&before);
}

mt_status mt_tape_close(mt_tape *tape, mt_status status)
{
    if (status == MT_OK) return mt_tape_end(tape);
    mt_tape_abort(tape);
    return mt_error_pass(status, __FILE__, __LINE__);
}

/* ---- what a backward sees -----------------------------------------------------------------------
 */

const void *mt_node_attrs(const mt_node *node)
{
    return node->attrs;
}

mt_param *mt_node_param(const mt_node *node, int i)
{
    return node->params[i];
}

mt_status mt_node_saved(mt_tape *tape, mt_node *node, int i, mt_tensor *out)
{
    MT_TRY(mt_value_fetch(tape, node->saved[i]));
    *out = node->saved[i]->pub.data;
    return MT_OK;
}

mt_tensor mt_node_grad_out(const mt_node *node, int i)
{
    return mt_value_grad(&node->outputs[i]->pub);
}

static mt_status temporary(mt_tape *t, storage *s)
{
    MT_REQUIRE(t->temporary_count < NODE_TEMPORARIES, MT_EINTERNAL,
               "tape: more than %d temporaries in one backward", NODE_TEMPORARIES);
    t->temporaries[t->temporary_count++] = s;
    return MT_OK;
}

mt_status mt_node_grad_in(mt_tape *tape, mt_node *node, int i, mt_tensor *grad, mt_tensor *add)
{
    value *v = node->inputs[i];
    *grad = *add = v->pub.data;
    grad->data = add->data = NULL;
    if (!v->wants_grad) return MT_OK;
    if (v->grad && v->grad->refs == 1) {
        grad->data = add->data = v->grad->p;
        return MT_OK;
    }
    if (v->grad) { /* shared: the sum goes to a buffer of its own */
        add->data = v->grad->p;
        MT_TRY(temporary(tape, v->grad));
        v->grad = NULL;
    }
    MT_TRY(mt_storage_create(tape, &v->grad, mt_tensor_bytes(&v->pub.data)));
    grad->data = v->grad->p;
    return MT_OK;
}

bool mt_node_grad_pass(mt_tape *tape, mt_node *node, int out, int in, bool *wanted)
{
    (void)tape;
    value *from = node->outputs[out], *to = node->inputs[in];
    *wanted = to->wants_grad && from->grad;
    if (!*wanted || to->grad) return false;
    to->grad = from->grad;
    to->grad->refs++;
    return true;
}

mt_status mt_node_scratch(mt_tape *tape, mt_node *node, void **p, size_t bytes)
{
    (void)node;
    storage *s;
    MT_TRY(mt_storage_create(tape, &s, bytes));
    *p = s->p;
    return temporary(tape, s);
}

/* ---- gradients of params ------------------------------------------------------------------------
 */

/* A param's contributions of this backward are all made: one that received none in the whole step
 * is zero. */
static mt_status grad_final(mt_tape *tape, mt_param *param)
{
    if (param->frozen) return MT_OK;
    if (!param->grad_started && param->grad)
        MT_TRY(mt_device_zero(tape->stream->device, param->grad,
                              (size_t)mt_param_count(param) * mt_dtype_size(param->grad_dtype)));
    param->grad_started = true;
    return tape->options.grad_ready ? tape->options.grad_ready(tape->options.context, param)
                                    : MT_OK;
}

/* A contribution is made, or will not be: no gradient reached its node. */
static mt_status contributed(mt_tape *tape, mt_param *param)
{
    if (param->frozen) return MT_OK; /* nobody counts them */
    param->uses--;
    MT_ASSERT(param->uses >= 0);
    return param->uses == 0 ? grad_final(tape, param) : MT_OK;
}

mt_status mt_param_grad_begin(mt_tape *tape, mt_param *param, bool *accumulate, bool *skip)
{
    (void)tape;
    MT_REQUIRE(!param->deferred, MT_EINTERNAL,
               "tape: %s is written directly while weight gradients of it are queued", param->name);
    *accumulate = param->grad_started;
    *skip = param->frozen || !param->grad;
    return MT_OK;
}

mt_status mt_param_grad_end(mt_tape *tape, mt_param *param)
{
    if (!param->frozen) param->grad_started = true;
    return contributed(tape, param);
}

static mt_status run_job(mt_tape *tape, const struct mt_wgrad *job)
{
    const mt_param *param = job->param;
    if (!param->frozen && param->grad) MT_TRY(job->run(tape, job, param->grad_started));
    return mt_param_grad_end(tape, job->param);
}

static storage *hold(storage *s)
{
    s->refs++;
    return s;
}

mt_status mt_tape_wgrad(mt_tape *tape, mt_node *node, const struct mt_wgrad *job, int x_saved,
                        const mt_value *dy, const int extra_saved[MT_WGRAD_EXTRAS])
{
    if (job->param->frozen) return mt_param_grad_end(tape, job->param);
    struct mt_wgrad filled = *job;
    if (x_saved >= 0) MT_TRY(mt_node_saved(tape, node, x_saved, &filled.x));
    filled.dy = dy ? dy->data : mt_node_grad_out(node, 0);
    for (int i = 0; i < MT_WGRAD_EXTRAS; i++)
        if (extra_saved[i] >= 0)
            MT_TRY(mt_node_saved(tape, node, extra_saved[i], &filled.extra[i]));
    if (!tape->options.defer_wgrad && !job->param->deferred) return run_job(tape, &filled);

    deferred_job *d = mt_pool_get(&tape->jobs);
    MT_REQUIRE(d, MT_ENOMEM, "tape: out of memory for a deferred weight gradient");
    d->job = filled;
    if (x_saved >= 0) d->held[0] = hold(node->saved[x_saved]->data);
    d->held[1] = hold(dy ? ((const value *)dy)->data : node->outputs[0]->grad);
    for (int i = 0; i < MT_WGRAD_EXTRAS; i++)
        if (extra_saved[i] >= 0) d->held[2 + i] = hold(node->saved[extra_saved[i]]->data);
    tape->job_count++;
    job->param->deferred++;
    return MT_OK;
}

mt_status mt_tape_run_deferred(mt_tape *tape)
{
    while (tape->job_done < tape->job_count) {
        int64_t i = tape->job_done++;
        deferred_job *d = (deferred_job *)(void *)(tape->jobs.chunks[i / POOL_CHUNK] +
                                                   (size_t)(i % POOL_CHUNK) * sizeof(deferred_job));
        d->job.param->deferred--;
        mt_status status = run_job(tape, &d->job);
        for (int j = 0; j < 2 + MT_WGRAD_EXTRAS; j++) mt_storage_release(tape, d->held[j]);
        if (status != MT_OK) return mt_error_pass(status, __FILE__, __LINE__);
    }
    return MT_OK;
}

/* ---- the sweep ----------------------------------------------------------------------------------
 */

mt_status mt_tape_seed_room(mt_tape *tape, mt_value *pub, mt_tensor *grad)
{
    value *v = mt_value_of(pub);
    MT_REQUIRE(!v->grad, MT_EINVAL, "tape: a value seeded twice");
    MT_TRY(mt_storage_create(tape, &v->grad, mt_tensor_bytes(&v->pub.data)));
    *grad = pub->data;
    grad->data = v->grad->p;
    return MT_OK;
}

mt_status mt_tape_seed_tensor(mt_tape *tape, mt_value *pub, mt_tensor grad)
{
    size_t bytes = mt_tensor_bytes(&pub->data);
    mt_tensor room;
    MT_REQUIRE(grad.dtype == pub->data.dtype && mt_tensor_bytes(&grad) == bytes, MT_EINVAL,
               "tape: a seed of %zu bytes for a value of %zu", mt_tensor_bytes(&grad), bytes);
    MT_TRY(mt_tape_seed_room(tape, pub, &room));
    return mt_device_copy_async(tape->stream, room.data, grad.data, bytes);
}

mt_status mt_tape_seed(mt_tape *tape, mt_value *pub, double seed)
{
    MT_REQUIRE(mt_tensor_count(&pub->data) == 1, MT_EINVAL,
               "tape: only a scalar takes a scalar seed");
    double bits = 0;
    mt_tensor room;
    mt_store_f64(&bits, pub->data.dtype, 0, seed);
    MT_TRY(mt_tape_seed_room(tape, pub, &room));
    return mt_device_copy(tape->stream->device, room.data, &bits, mt_dtype_size(room.dtype));
}

static bool reached(const mt_node *n)
{
    for (int i = 0; i < n->output_count; i++)
        if (n->outputs[i]->grad) return true;
    return false;
}

static mt_status run_node(mt_tape *t, mt_node *n)
{
    if (reached(n)) {
        MT_TRY(n->op->backward(t, n));
    } else {
        for (int i = 0; i < n->param_count; i++) MT_TRY(contributed(t, n->params[i]));
    }
    release_temporaries(t);
    for (int i = 0; i < n->output_count; i++) {
        mt_storage_release(t, n->outputs[i]->grad);
        n->outputs[i]->grad = NULL;
    }
    for (int i = 0; i < n->saved_count; i++) mt_value_unsave(t, n->saved[i]);
    return MT_OK;
}

/* Runs nodes [base, count) backwards and forgets them. While one runs, the next one's offloaded
 * values are already on their way back; its own have arrived before they set out. */
static mt_status sweep(mt_tape *t, int64_t base)
{
    while (t->count > base) {
        mt_node *n = t->list[t->count - 1];
        for (int i = 0; i < n->saved_count; i++)
            if (n->saved[i]->where == OFFLOADED || n->saved[i]->where == ARRIVING)
                MT_TRY(mt_value_fetch(t, n->saved[i]));
        mt_node *next = t->count - 2 >= base ? t->list[t->count - 2] : NULL;
        for (int i = 0; next && i < next->saved_count; i++)
            if (next->saved[i]->where == OFFLOADED) MT_TRY(mt_value_bring(t, next->saved[i]));
        MT_TRY(run_node(t, n));
        t->count--;
    }
    return MT_OK;
}

mt_status mt_tape_backward(mt_tape *tape)
{
    MT_REQUIRE(tape->active && tape->training, MT_EINVAL, "tape: backward outside a training pass");
    MT_TRY(sweep(tape, 0));
    for (int64_t i = 0; i < tape->touched_count;
         i++) { /* used in segments that no gradient reached */
        mt_param *param = tape->touched[i];
        if (param->uses == param->deferred) continue;
        param->uses = param->deferred;
        if (param->uses == 0) MT_TRY(grad_final(tape, param));
    }
    return MT_OK;
}

/* ---- segments -----------------------------------------------------------------------------------
 */

struct segment {
    mt_segment_fn run;
    void *context;
};

/* Inputs again, cut off from the outer graph: same data, and the gradient gathered so far moves in.
 */
static mt_status detach(mt_tape *t, mt_node *node, mt_value *inputs[MT_NODE_MAX])
{
    for (int i = 0; i < node->saved_count; i++) {
        value *outer = node->saved[i], *inner = mt_pool_get(&t->values);
        MT_REQUIRE(inner, MT_ENOMEM, "tape: out of memory");
        MT_TRY(mt_value_fetch(t, outer));
        inner->pub = outer->pub, inner->data = hold(outer->data), inner->holds = 1;
        inner->wants_grad = outer->wants_grad;
        inner->grad = outer->grad;
        outer->grad = NULL;
        inputs[i] = &inner->pub;
    }
    return MT_OK;
}

static mt_status segment_backward(mt_tape *tape, mt_node *node)
{
    const struct segment *s = mt_node_attrs(node);
    mt_value *inputs[MT_NODE_MAX] = { 0 }, *outputs[MT_NODE_MAX] = { 0 };
    int64_t base = tape->count;
    MT_TRY(detach(tape, node, inputs));
    tape->recomputing = true;
    MT_TRY(s->run(tape, s->context, inputs, outputs));
    for (int i = 0; i < node->output_count; i++) {
        value *inner = mt_value_of(outputs[i]);
        inner->grad = node->outputs[i]->grad;
        node->outputs[i]->grad = NULL;
        mt_value_release(tape, &outputs[i]);
    }
    MT_TRY(sweep(tape, base));
    tape->recomputing = false;
    for (int i = 0; i < node->saved_count; i++) {
        value *inner = mt_value_of(inputs[i]);
        node->saved[i]->grad = inner->grad;
        inner->grad = NULL;
        mt_value_release(tape, &inputs[i]);
    }
    return MT_OK;
}

static const mt_op segment_op = { "segment", segment_backward, NULL };

static mt_status check_segment(mt_value *const *inputs, int input_count, int output_count)
{
    MT_REQUIRE(input_count < MT_NODE_MAX && output_count < MT_NODE_MAX, MT_EINVAL,
               "tape: a segment of %d inputs and %d outputs, at most %d each", input_count,
               output_count, MT_NODE_MAX - 1);
    for (int i = 0; i < input_count; i++)
        for (int j = 0; j < i; j++)
            MT_REQUIRE(inputs[i] != inputs[j], MT_EINVAL,
                       "tape: inputs %d and %d of a segment are the same value", j, i);
    return MT_OK;
}

mt_status mt_tape_recompute(mt_tape *tape, mt_segment_fn run, void *context,
                            mt_value *const *inputs, int input_count, mt_value **outputs,
                            int output_count)
{
    MT_TRY(check_segment(inputs, input_count, output_count));
    if (!tape->training || tape->suspended || tape->recomputing)
        return run(tape, context, inputs, outputs);

    tape->suspended++;
    mt_status status = run(tape, context, inputs, outputs);
    tape->suspended--;
    if (status != MT_OK) return mt_error_pass(status, __FILE__, __LINE__);
    MT_TRY(mt_segment_check_outputs(inputs, input_count, outputs, output_count));
    struct segment s = { run, context };
    mt_node_spec spec = { .op = &segment_op, .attrs = &s, .attrs_bytes = sizeof s };
    bool wanted = false;
    for (int i = 0; i < input_count; i++) spec.inputs[i] = spec.saved[i] = inputs[i];
    for (int i = 0; i < output_count; i++) {
        spec.outputs[i] = outputs[i];
        wanted = wanted || mt_value_of(outputs[i])->wants_grad;
    }
    return wanted ? mt_tape_add_node(tape, &spec) : MT_OK;
}

mt_status mt_tape_segment(mt_tape *tape, mt_segment_fn run, void *context, mt_value *const *inputs,
                          int input_count, mt_value **outputs, int output_count)
{
    if (tape->options.recompute)
        return mt_tape_recompute(tape, run, context, inputs, input_count, outputs, output_count);
    MT_TRY(check_segment(inputs, input_count, output_count));
    MT_TRY(run(tape, context, inputs, outputs));
    return mt_segment_check_outputs(inputs, input_count, outputs, output_count);
}
