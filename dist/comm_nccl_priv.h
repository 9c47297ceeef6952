/* Inside the comm over NCCL: what its parts share. Together with them the only door to nccl.h. */
#pragma once

#include <nccl.h>
#include <pthread.h>

#include "dist/comm_priv.h"
#include "dist/direct.h"
#include "dist/inflight.h"
#include "dist/staging.h"

#define MT_NCCL_FUNCTIONS(X)                                                                       \
    X(GetErrorString)                                                                              \
    X(GetLastError)                                                                                \
    X(GetVersion)                                                                                  \
    X(GetUniqueId)                                                                                 \
    X(CommInitRankConfig)                                                                          \
    X(CommSplit)                                                                                   \
    X(CommDestroy)                                                                                 \
    X(CommAbort)                                                                                   \
    X(CommGetAsyncError)                                                                           \
    X(AllGather)                                                                                   \
    X(Broadcast)                                                                                   \
    X(Send)                                                                                        \
    X(Recv)                                                                                        \
    X(GroupStart)                                                                                  \
    X(GroupEnd)

typedef struct mt_nccl_api {
    void *library;
#define MT_NCCL_FIELD(name) __typeof__(nccl##name) *name;
    MT_NCCL_FUNCTIONS(MT_NCCL_FIELD)
#undef MT_NCCL_FIELD
} mt_nccl_api;

struct mt_nccl;

/* What all parts of a world share. */
typedef struct mt_nccl_shared {
    mt_nccl_api nccl;
    ncclComm_t comm; /* of the whole world */
    mt_device *device;
    mt_inflight *inflight;
    mt_staging staging; /* of collectives of host memory */
    mt_stream folds;    /* where reductions are added up */
    mt_event came;
    pthread_mutex_t lock;  /* of what follows */
    struct mt_nccl *asked; /* whose errors the watchdog asks for: the world and its parts */
} mt_nccl_shared;

typedef struct mt_nccl {
    ncclComm_t comm;
    mt_nccl_shared *shared;
    struct mt_nccl *next; /* that is asked */
    mt_direct *direct;    /* NULL: the ranks do not reach each other's memory */
    void *scratch;        /* of reductions: two halves, used in turns */
    size_t scratch_bytes;
    int half;           /* whose turn it is */
    mt_event folded[2]; /* what a half held has been added up */
} mt_nccl;

static inline mt_nccl *mt_nccl_of(const mt_comm *c)
{
    return c->impl;
}

mt_status mt_nccl_check(const mt_nccl_shared *s, const char *doing, ncclResult_t code);
#define MT_NCCL(s, doing, x) MT_TRY(mt_nccl_check((s), (doing), (x)))

/* Collectives of device memory, as of comm_priv.h. */
mt_status mt_nccl_all_gather(mt_comm *c, mt_stream *stream, void *to, const void *from,
                             size_t bytes);
bool mt_nccl_reaches(const mt_comm *c, const void *memory, size_t bytes);
mt_status mt_nccl_spread(mt_comm *c, mt_stream *stream, const mt_comm_run *runs, int count);
mt_status mt_nccl_broadcast(mt_comm *c, mt_stream *stream, void *data, size_t bytes, int root);
mt_status mt_nccl_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
                             size_t block_bytes);
mt_status mt_nccl_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce);
mt_status mt_nccl_all_reduce(mt_comm *c, mt_stream *stream, void *data, int64_t count,
                             mt_dtype dtype, mt_reduce reduce);
