/* Saved values in the host's memory: they go and come back in a stream of their own, beside the
 * tape's work. Which memory is whose follows from the order of calls alone, so passes repeat, and
 * events make the streams keep to it: recorded as a graph, they are its edges.
 *
 * A value that goes keeps its memory on the device until its copy is made, which is waited for when
 * OFFLOADS_AT_ONCE others have left after it. One that comes back is under way while the node
 * before its reader runs. */
#include "core/tape_priv.h"

mt_status mt_offload_open(mt_tape *tape)
{
    mt_device *device = tape->stream->device;
    if (!tape->options.offload) return MT_OK;
    MT_TRY(mt_stream_create(&tape->side, device));
    MT_TRY(mt_event_create(&tape->turn, device));
    for (int i = 0; i < OFFLOADS_AT_ONCE; i++)
        MT_TRY(mt_event_create(&tape->leaving[i].gone, device));
    return MT_OK;
}

void mt_offload_close(mt_tape *tape)
{
    for (int i = 0; i < OFFLOADS_AT_ONCE; i++) mt_event_destroy(&tape->leaving[i].gone);
    mt_event_destroy(&tape->turn);
    mt_stream_destroy(&tape->side);
}

/* What `after` is given from now on finds done what `before` was given. */
static mt_status order(mt_tape *tape, mt_stream *before, mt_stream *after)
{
    MT_TRY(mt_event_record(&tape->turn, before));
    return mt_event_wait(&tape->turn, after);
}

/* The oldest value that left gives up its memory. */
static mt_status retire(mt_tape *tape)
{
    leaving *l = &tape->leaving[tape->retired++ % OFFLOADS_AT_ONCE];
    mt_status status = mt_event_wait(&l->gone, tape->stream);
    mt_storage_release(tape, l->data);
    l->data = NULL;
    return status;
}

mt_status mt_offload_drain(mt_tape *tape)
{
    mt_status status = MT_OK;
    while (tape->retired < tape->left) {
        mt_status now = retire(tape);
        if (status == MT_OK) status = now;
    }
    if (status == MT_OK && tape->arriving) status = order(tape, &tape->side, tape->stream);
    tape->left = tape->retired = tape->arriving = 0;
    return status;
}

static mt_status copy_out(mt_tape *tape, leaving *l, const value *v)
{
    MT_TRY(order(tape, tape->stream, &tape->side));
    MT_TRY(mt_device_copy_async(&tape->side, v->host, v->data->p, v->data->bytes));
    return mt_event_record(&l->gone, &tape->side);
}

mt_status mt_value_offload(mt_tape *tape, value *v)
{
    if (tape->left - tape->retired == OFFLOADS_AT_ONCE) MT_TRY(retire(tape));
    leaving *l = &tape->leaving[tape->left % OFFLOADS_AT_ONCE];
    MT_TRY(mt_arena_try(tape->host_pool, &v->host, &v->host_id, v->data->bytes));
    if (!v->host) return MT_OK; /* the host has no room: slower to run out, never wrong */
    mt_status status = copy_out(tape, l, v);
    if (status != MT_OK) {
        mt_arena_free(tape->host_pool, v->host_id);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    l->data = v->data, tape->left++;
    v->data = NULL, v->pub.data.data = NULL;
    v->where = OFFLOADED;
    return MT_OK;
}

mt_status mt_value_bring(mt_tape *tape, value *v)
{
    MT_TRY(mt_storage_create(tape, &v->data, mt_tensor_bytes(&v->pub.data)));
    v->pub.data.data = v->data->p;
    v->where = ARRIVING, tape->arriving++;
    mt_status status = order(tape, tape->stream, &tape->side);
    if (status == MT_OK)
        status = mt_device_copy_async(&tape->side, v->data->p, v->host, v->data->bytes);
    mt_arena_free(tape->host_pool, v->host_id); /* the next to lie there goes by the same stream */
    v->host = NULL;
    return status;
}

mt_status mt_value_land(mt_tape *tape, value *v)
{
    v->where = RESIDENT, tape->arriving--;
    return order(tape, &tape->side, tape->stream);
}
