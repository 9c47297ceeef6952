/* Collectives of host memory by way of a device. */
#include "dist/staging.h"

#include <stdlib.h>
#include <string.h>

#include "dist/comm_priv.h"

static const size_t HALF_BYTES = MT_STAGING_BYTES / 2;
enum { GRAIN = 64 };

/* A collective of lines: `in` of them go to the device, `out` come back, `bytes` each. */
typedef struct staged {
    void *to;
    const void *from;
    size_t first, bytes; /* first: the bytes before it are left out */
    int in, out;
    const int64_t *counts; /* of reduce_scatter; `bytes` are those of the largest part */
    mt_dtype dtype;        /* of reductions */
    mt_reduce reduce;
    int root;
    /* Bytes [0, bytes) of each line, one after another; *to may be changed to `from`. */
    mt_status (*run)(mt_comm *c, mt_stream *stream, const struct staged *call, void **to,
                     void *from, size_t bytes);
} staged;

mt_status mt_staging_create(mt_staging *staging, mt_device *device)
{
    *staging = (mt_staging){ 0 };
    return mt_stream_create(&staging->stream, device);
}

void mt_staging_destroy(mt_staging *staging)
{
    if (staging->memory)
        mt_device_free(staging->stream.device, &staging->memory, 2 * HALF_BYTES, MT_MEMORY_STATE);
    mt_stream_destroy(&staging->stream);
}

static size_t at_most(size_t bytes, size_t at, size_t most)
{
    return at >= bytes ? 0 : bytes - at < most ? bytes - at : most;
}

static size_t line_bytes(const staged *call, int rank)
{
    return call->counts ? (size_t)call->counts[rank] * mt_dtype_size(call->dtype) : call->bytes;
}

/* Bytes [at, at + n) of each line to the device, one line after another. */
static mt_status send(mt_staging *s, const staged *call, size_t at, size_t n)
{
    const char *from = call->from;
    for (int r = 0; r < call->in; r++) {
        size_t line = line_bytes(call, r);
        MT_TRY(mt_device_copy_async(&s->stream, (char *)s->memory + (size_t)r * n, from + at,
                                    at_most(line, at, n)));
        from += line;
    }
    return MT_OK;
}

static mt_status move(mt_staging *s, mt_comm *c, const staged *call, size_t at, size_t n)
{
    size_t own = line_bytes(call, c->rank);
    void *out = (char *)s->memory + HALF_BYTES;
    MT_TRY(send(s, call, at, n));
    MT_TRY(call->run(c, &s->stream, call, &out, s->memory, n));
    for (int r = 0; r < call->out; r++)
        MT_TRY(mt_device_copy_async(&s->stream, (char *)call->to + (size_t)r * own + at,
                                    (char *)out + (size_t)r * n, at_most(own, at, n)));
    return MT_OK;
}

static mt_status run(mt_staging *s, mt_comm *c, const staged *call)
{
    size_t step = HALF_BYTES / (size_t)c->size / GRAIN * GRAIN;
    if (!s->memory)
        MT_TRY(mt_device_alloc(s->stream.device, &s->memory, 2 * HALF_BYTES, MT_MEMORY_STATE));
    MT_REQUIRE(step > 0, MT_EUNSUPPORTED, "comm: host memory of %d ranks", c->size);
    for (size_t at = call->first; at < call->bytes; at += step) {
        mt_status status = move(s, c, call, at, at_most(call->bytes, at, step));
        mt_status waited = mt_stream_synchronize(&s->stream); /* nothing is left behind */
        MT_TRY(status);
        MT_TRY(waited);
    }
    return MT_OK;
}

static mt_status run_all_gather(mt_comm *c, mt_stream *stream, const staged *call, void **to,
                                void *from, size_t bytes)
{
    (void)call;
    return c->ops->all_gather(c, stream, *to, from, bytes);
}

mt_status mt_staged_all_gather(mt_staging *staging, mt_comm *c, void *to, const void *from,
                               size_t bytes)
{
    const staged call = {
        .to = to, .from = from, .bytes = bytes, .in = 1, .out = c->size, .run = run_all_gather
    };
    return run(staging, c, &call);
}

/* Of parts that end before the others, the rest is whatever lies there. */
static mt_status run_reduce_scatter(mt_comm *c, mt_stream *stream, const staged *call, void **to,
                                    void *from, size_t bytes)
{
    int64_t *equal = malloc((size_t)c->size * sizeof *equal);
    MT_REQUIRE(equal, MT_ENOMEM, "comm: out of memory");
    const mt_comm_parts parts = { equal, 0, (int64_t)(bytes / mt_dtype_size(call->dtype)) };
    for (int r = 0; r < c->size; r++) equal[r] = parts.end;
    mt_status status =
        c->ops->reduce_scatter(c, stream, *to, from, &parts, call->dtype, call->reduce);
    free(equal);
    return status;
}

mt_status mt_staged_reduce_scatter(mt_staging *staging, mt_comm *c, void *to, const void *from,
                                   const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce)
{
    const staged call = { .to = to,
                          .from = from,
                          .first = (size_t)parts->first * mt_dtype_size(dtype),
                          .bytes = (size_t)parts->end * mt_dtype_size(dtype),
                          .in = c->size,
                          .out = 1,
                          .counts = parts->counts,
                          .dtype = dtype,
                          .reduce = reduce,
                          .run = run_reduce_scatter };
    return run(staging, c, &call);
}

static mt_status run_all_reduce(mt_comm *c, mt_stream *stream, const staged *call, void **to,
                                void *from, size_t bytes)
{
    *to = from;
    return c->ops->all_reduce(c, stream, from, (int64_t)(bytes / mt_dtype_size(call->dtype)),
                              call->dtype, call->reduce);
}

mt_status mt_staged_all_reduce(mt_staging *staging, mt_comm *c, void *data, int64_t count,
                               mt_dtype dtype, mt_reduce reduce)
{
    const staged call = { .to = data,
                          .from = data,
                          .bytes = (size_t)count * mt_dtype_size(dtype),
                          .in = 1,
                          .out = 1,
                          .dtype = dtype,
                          .reduce = reduce,
                          .run = run_all_reduce };
    return run(staging, c, &call);
}

static mt_status run_all_to_all(mt_comm *c, mt_stream *stream, const staged *call, void **to,
                                void *from, size_t bytes)
{
    (void)call;
    return c->ops->all_to_all(c, stream, *to, from, bytes);
}

mt_status mt_staged_all_to_all(mt_staging *staging, mt_comm *c, void *to, const void *from,
                               size_t block_bytes)
{
    for (int r = 0; r < c->size; r++) {
        int64_t used, room = (int64_t)(block_bytes - sizeof used);
        memcpy(&used, (const char *)from + (size_t)r * block_bytes, sizeof used);
        MT_REQUIRE(used >= 0 && used <= room, MT_EINVAL,
                   "all_to_all: the block for rank %d uses %lld of %lld bytes", r, (long long)used,
                   (long long)room);
    }
    const staged call = { .to = to,
                          .from = from,
                          .bytes = block_bytes,
                          .in = c->size,
                          .out = c->size,
                          .run = run_all_to_all };
    return run(staging, c, &call);
}

static mt_status run_broadcast(mt_comm *c, mt_stream *stream, const staged *call, void **to,
                               void *from, size_t bytes)
{
    *to = from;
    return c->ops->broadcast(c, stream, from, bytes, call->root);
}

mt_status mt_staged_broadcast(mt_staging *staging, mt_comm *c, void *data, size_t bytes, int root)
{
    const staged call = { .to = data,
                          .from = data,
                          .bytes = bytes,
                          .in = 1,
                          .out = 1,
                          .root = root,
                          .run = run_broadcast };
    return run(staging, c, &call);
}
