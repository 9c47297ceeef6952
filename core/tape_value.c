/* Values of a tape: storage, references, and where saved values wait for the sweep. */
#include "core/tape_priv.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *mt_pool_get(pool *p)
{
    int64_t chunk = p->used / POOL_CHUNK;
    if (chunk == p->chunk_count) {
        char **grown = realloc(p->chunks, (size_t)(chunk + 1) * sizeof *grown);
        if (!grown) return NULL;
        p->chunks = grown;
        p->chunks[chunk] = malloc(POOL_CHUNK * p->size);
        if (!p->chunks[chunk]) return NULL;
        p->chunk_count++;
    }
    void *object = p->chunks[chunk] + (size_t)(p->used++ % POOL_CHUNK) * p->size;
    return memset(object, 0, p->size);
}

void mt_pool_reset(pool *p)
{
    p->used = 0;
}

void mt_pool_destroy(pool *p)
{
    for (int64_t i = 0; i < p->chunk_count; i++) free(p->chunks[i]);
    free(p->chunks);
    p->chunks = NULL, p->chunk_count = p->used = 0;
}

mt_status mt_storage_create(mt_tape *tape, storage **s, size_t bytes)
{
    *s = NULL; /* what failed must not look like a block to give back */
    storage *made = mt_pool_get(&tape->storages);
    MT_REQUIRE(made, MT_ENOMEM, "tape: out of memory for a value of %zu bytes", bytes);
    MT_TRY(mt_arena_alloc(tape->arena, &made->p, &made->id, bytes));
    made->bytes = bytes, made->refs = 1;
    *s = made;
    return MT_OK;
}

void mt_storage_release(mt_tape *tape, storage *s)
{
    if (!s || --s->refs > 0 || s->borrowed) return;
    mt_arena_free(tape->arena, s->id);
}

/* Whether a value may have this type and shape now. */
static mt_status check_value(const mt_tape *tape, mt_dtype dtype, int ndim, const int64_t *shape)
{
    MT_REQUIRE(tape->active, MT_EINVAL, "tape: a value made outside a pass");
    MT_REQUIRE((unsigned)dtype < MT_DTYPE_COUNT, MT_EINVAL, "tape: a value of dtype %d",
               (int)dtype);
    MT_REQUIRE(ndim >= 0 && ndim <= MT_MAX_DIMS, MT_EINVAL, "tape: a value of %d dims", ndim);
    for (int i = 0; i < ndim; i++)
        MT_REQUIRE(shape[i] >= 0, MT_EINVAL,
                   "tape: a value of %lld elements in dimension %d, must not be negative",
                   (long long)shape[i], i);
    return MT_OK;
}

mt_status mt_tape_value(mt_tape *tape, mt_value **out, mt_dtype dtype, int ndim,
                        const int64_t *shape)
{
    *out = NULL;
    MT_TRY(check_value(tape, dtype, ndim, shape));
    value *v = mt_pool_get(&tape->values);
    MT_REQUIRE(v, MT_ENOMEM, "tape: out of memory");
    v->pub.data.dtype = dtype, v->pub.data.ndim = ndim;
    size_t bytes = mt_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) {
        v->pub.data.shape[i] = shape[i];
        MT_REQUIRE(!__builtin_mul_overflow(bytes, (uint64_t)shape[i], &bytes), MT_ENOMEM,
                   "tape: a value of %lld elements in dimension %d has more bytes than there are "
                   "addresses",
                   (long long)shape[i], i);
    }
    MT_TRY(mt_storage_create(tape, &v->data, bytes));
    v->pub.data.data = v->data->p;
    v->holds = 1;
    *out = &v->pub;
    return MT_OK;
}

mt_status mt_tape_input(mt_tape *tape, mt_value **out, mt_tensor data, bool wants_grad)
{
    *out = NULL;
    MT_TRY(check_value(tape, data.dtype, data.ndim, data.shape));
    value *v = mt_pool_get(&tape->values);
    storage *s = mt_pool_get(&tape->storages);
    MT_REQUIRE(v && s, MT_ENOMEM, "tape: out of memory");
    s->p = data.data, s->borrowed = true, s->refs = 1;
    v->pub.data = data, v->data = s, v->holds = 1, v->wants_grad = wants_grad;
    *out = &v->pub;
    return MT_OK;
}

/* Gives up the value's storage; its data stays unreachable until a fetch. */
static void drop_data(mt_tape *tape, value *v)
{
    mt_storage_release(tape, v->data);
    v->data = NULL;
    v->pub.data.data = NULL;
}

/* Of what nobody waits for: its failure is kept for the next call that can tell it, and the error
 * that stands, of what is being cleaned up, stays. */
static void quietly(mt_tape *tape, value *v, mt_status (*act)(mt_tape *, value *))
{
    mt_error_kept before;
    mt_error_keep(&before);
    mt_status status = act(tape, v);
    if (status == MT_OK) return;
    if (tape->late == MT_OK) tape->late = status, mt_error_keep(&tape->late_error);
    mt_error_put_back(&before);
}

void mt_value_settle(mt_tape *tape, value *v)
{
    if (v->holds > 0 || !v->data) return;
    if (v->saved == 0) {
        drop_data(tape, v);
    } else if (v->again && tape->options.recompute_activation && v->producer &&
               v->producer->op->again) {
        drop_data(tape, v);
        v->where = DROPPED;
    } else if (tape->options.offload && !tape->recomputing && !v->data->borrowed &&
               v->data->refs == 1 && v->data->bytes) {
        quietly(tape, v, mt_value_offload);
    }
}

void mt_value_hold(mt_value *v)
{
    mt_value_of(v)->holds++;
}

void mt_value_release(mt_tape *tape, mt_value **out)
{
    if (!*out) return;
    value *v = mt_value_of(*out);
    *out = NULL;
    v->holds--;
    MT_ASSERT(v->holds >= 0);
    mt_value_settle(tape, v);
}

void mt_value_recompute(mt_tape *tape, mt_value *v)
{
    (void)tape;
    mt_value_of(v)->again = true;
}

mt_status mt_value_fetch(mt_tape *tape, value *v)
{
    if (v->where == RESIDENT) return MT_OK;
    if (v->where == OFFLOADED) MT_TRY(mt_value_bring(tape, v));
    if (v->where == ARRIVING) return mt_value_land(tape, v);
    MT_TRY(mt_storage_create(tape, &v->data, mt_tensor_bytes(&v->pub.data)));
    v->pub.data.data = v->data->p;
    v->where = RESIDENT;
    return v->producer->op->again(tape, v->producer, &v->pub.data);
}

void mt_value_unsave(mt_tape *tape, value *v)
{
    if (--v->saved > 0 || v->holds > 0) return;
    if (v->where == OFFLOADED) mt_arena_free(tape->host_pool, v->host_id);
    if (v->where == ARRIVING) quietly(tape, v, mt_value_land);
    v->where = RESIDENT;
    if (v->data) drop_data(tape, v);
}

static bool is_among(const mt_value *v, mt_value *const *values, int count)
{
    for (int i = 0; i < count; i++)
        if (values[i] == v) return true;
    return false;
}

mt_status mt_segment_check_outputs(mt_value *const *inputs, int input_count,
                                   mt_value *const *outputs, int output_count)
{
    for (int i = 0; i < output_count; i++) {
        MT_REQUIRE(!is_among(outputs[i], inputs, input_count), MT_EINVAL,
                   "tape: output %d of a segment is one of its inputs", i);
        MT_REQUIRE(!is_among(outputs[i], outputs, i), MT_EINVAL,
                   "tape: output %d of a segment is the same value as one before it", i);
    }
    return MT_OK;
}

mt_tensor mt_value_grad(const mt_value *pub)
{
    const value *v = (const value *)pub;
    mt_tensor t = v->pub.data;
    t.data = v->grad ? v->grad->p : NULL;
    return t;
}

bool mt_tape_observed(const mt_tape *tape)
{
    return tape->observer != NULL;
}

void mt_tape_set_observer(mt_tape *tape, mt_observer observer, void *context)
{
    tape->observer = observer;
    tape->observer_context = context;
}

mt_status mt_tape_observe(mt_tape *tape, const mt_value *v, const char *format, ...)
{
    if (!tape->observer || tape->recomputing) return MT_OK;
    char name[192];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    return tape->observer(tape->observer_context, name, &v->data);
}
