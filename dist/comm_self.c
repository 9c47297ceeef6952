/* One process: every collective is a copy to itself, or nothing. */
#include "dist/comm_priv.h"

static mt_status copy(mt_stream *stream, void *to, const void *from, size_t bytes)
{
    if (to == from) return MT_OK;
    if (stream) return mt_device_copy_async(stream, to, from, bytes);
    memmove(to, from, bytes);
    return MT_OK;
}

static mt_status self_split(mt_comm *part, const mt_comm *whole, int color)
{
    (void)whole, (void)color;
    part->size = 1;
    return MT_OK;
}

static mt_status self_all_gather(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 size_t bytes)
{
    (void)c;
    return copy(stream, to, from, bytes);
}

static mt_status self_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                     const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce)
{
    size_t size = mt_dtype_size(dtype), skip = (size_t)parts->first * size;
    (void)c, (void)reduce;
    return copy(stream, (char *)to + skip, (const char *)from + skip,
                (size_t)parts->end * size - skip);
}

static mt_status self_all_reduce(mt_comm *c, mt_stream *stream, void *data, int64_t count,
                                 mt_dtype dtype, mt_reduce reduce)
{
    (void)c, (void)stream, (void)data, (void)count, (void)dtype, (void)reduce;
    return MT_OK;
}

static mt_status self_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 size_t block_bytes)
{
    (void)c;
    return copy(stream, to, from, block_bytes);
}

static mt_status self_broadcast(mt_comm *c, mt_stream *stream, void *data, size_t bytes, int root)
{
    (void)c, (void)stream, (void)data, (void)bytes, (void)root;
    return MT_OK;
}

static mt_status self_barrier(mt_comm *c)
{
    (void)c;
    return MT_OK;
}

static void self_close(mt_comm *c)
{
    (void)c;
}

const struct mt_comm_ops mt_comm_self = {
    .name = "self",
    .split = self_split,
    .all_gather = self_all_gather,
    .reduce_scatter = self_reduce_scatter,
    .all_reduce = self_all_reduce,
    .all_to_all = self_all_to_all,
    .broadcast = self_broadcast,
    .barrier = self_barrier,
    .close = self_close,
};
