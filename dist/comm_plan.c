/* Ranks that are not there: memory is taken as over MPI or NCCL, and nothing moves. */
#include <stdlib.h>
#include <string.h>

#include "dist/comm_priv.h"
#include "dist/direct.h"
#include "dist/staging.h"

typedef struct plan {
    mt_device *device;
    bool gpus;
    int first, last; /* ranks of the world, among which the comm's are */
    void *scratch, *staging, *words;
    size_t scratch_bytes, staging_bytes, words_bytes;
} plan;

static mt_status grow(plan *p, void **memory, size_t *bytes, size_t need)
{
    if (*bytes >= need) return MT_OK;
    mt_device_free(p->device, memory, *bytes, MT_MEMORY_STATE);
    *bytes = 0;
    MT_TRY(mt_device_alloc(p->device, memory, need, MT_MEMORY_STATE));
    *bytes = need;
    return MT_OK;
}

/* GPUs add up in scratch. */
static mt_status fold(mt_comm *c, const mt_stream *stream, mt_dtype dtype, int64_t most)
{
    plan *p = c->impl;
    int64_t step;
    if (!p->gpus || !stream || mt_dtype_size(dtype) == 0) return MT_OK;
    return grow(p, &p->scratch, &p->scratch_bytes,
                2 * mt_comm_half_bytes(&step, c->size, dtype, most));
}

static mt_status plan_split(mt_comm *part, const mt_comm *whole, int color)
{
    (void)part, (void)whole;
    return MT_FAIL(MT_EUNSUPPORTED, "comm: color %d of ranks that are not there", color);
}

static mt_status plan_all_gather(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 size_t bytes)
{
    if (!stream && (char *)to + (size_t)c->rank * bytes != from)
        memmove((char *)to + (size_t)c->rank * bytes, from, bytes);
    return MT_OK;
}

static mt_status plan_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                     const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce)
{
    (void)to, (void)from, (void)reduce;
    return fold(c, stream, dtype, parts->end - parts->first);
}

static mt_status plan_all_reduce(mt_comm *c, mt_stream *stream, void *data, int64_t count,
                                 mt_dtype dtype, mt_reduce reduce)
{
    (void)data, (void)reduce;
    return fold(c, stream, dtype, count);
}

static mt_status plan_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 size_t block_bytes)
{
    (void)c, (void)stream, (void)to, (void)from, (void)block_bytes;
    return MT_OK;
}

/* Each as many ranks of the world as a host has GPUs are taken to be on one. */
static bool plan_reaches(const mt_comm *c, const void *memory, size_t bytes)
{
    enum { GPUS_OF_A_HOST = 8 };
    const plan *p = c->impl;
    (void)memory;
    bool one_host = p->first / GPUS_OF_A_HOST == p->last / GPUS_OF_A_HOST;
    return p->gpus && c->size > 1 && one_host && bytes >= MT_DIRECT_BYTES;
}

static mt_status plan_spread(mt_comm *c, mt_stream *stream, const mt_comm_run *runs, int count)
{
    (void)c, (void)stream, (void)runs, (void)count;
    return MT_OK;
}

static mt_status plan_broadcast(mt_comm *c, mt_stream *stream, void *data, size_t bytes, int root)
{
    (void)c, (void)stream, (void)data, (void)bytes, (void)root;
    return MT_OK;
}

static mt_status plan_barrier(mt_comm *c)
{
    (void)c;
    return MT_OK;
}

static void plan_close(mt_comm *c)
{
    plan *p = c->impl;
    mt_device_free(p->device, &p->scratch, p->scratch_bytes, MT_MEMORY_STATE);
    mt_device_free(p->device, &p->staging, p->staging_bytes, MT_MEMORY_STATE);
    mt_device_free(p->device, &p->words, p->words_bytes, MT_MEMORY_STATE);
    free(p);
}

const struct mt_comm_ops mt_comm_plan = {
    .name = "plan",
    .split = plan_split,
    .all_gather = plan_all_gather,
    .reduce_scatter = plan_reduce_scatter,
    .all_reduce = plan_all_reduce,
    .all_to_all = plan_all_to_all,
    .broadcast = plan_broadcast,
    .barrier = plan_barrier,
    .reaches = plan_reaches,
    .spread = plan_spread,
    .close = plan_close,
};

static mt_status open_ranks(mt_comm **comm, mt_device *device, int rank, int size, bool gpus)
{
    MT_REQUIRE(rank >= 0 && rank < size, MT_EINVAL, "comm: rank %d of %d", rank, size);
    mt_comm *c = calloc(1, sizeof *c);
    plan *p = calloc(1, sizeof *p);
    if (!c || !p) {
        free(c), free(p);
        return MT_FAIL(MT_ENOMEM, "comm: out of memory");
    }
    *p = (plan){ .device = device, .gpus = gpus, .last = size - 1 };
    c->call.op = c->call.what = "";
    c->ops = &mt_comm_plan, c->rank = rank, c->size = size, c->impl = p;
    mt_status status =
        gpus && size > 1 ? grow(p, &p->words, &p->words_bytes, MT_DIRECT_BYTES) : MT_OK;
    if (status == MT_OK)
        *comm = c;
    else
        mt_comm_close(&c);
    return status;
}

mt_status mt_comm_open_plan(mt_comm **comm, mt_device *device, int rank, int size, bool gpus)
{
    *comm = NULL;
    MT_TRY(open_ranks(comm, device, rank, size, gpus));
    if (!gpus) return MT_OK;
    /* Collectives of host memory go by way of a GPU, and every run has some. */
    plan *p = (*comm)->impl;
    mt_status status = grow(p, &p->staging, &p->staging_bytes, MT_STAGING_BYTES);
    if (status != MT_OK) mt_comm_close(comm);
    return status;
}

mt_status mt_comm_plan_part(mt_comm **part, mt_comm *world, int rank, int size, int stride)
{
    const plan *whole = world->impl;
    MT_TRY(open_ranks(part, whole->device, rank, size, whole->gpus));
    plan *p = (*part)->impl;
    /* Memory is that of the rank that takes most: where one column is on two hosts, all are. */
    p->first = stride == 1 ? world->rank - rank : 0;
    p->last = stride == 1 ? p->first + size - 1 : world->size - 1;
    (*part)->world = world;
    return MT_OK;
}
