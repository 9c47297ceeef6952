/* What a backend of comm is. Arguments have been checked; sizes are not 0 and the comm has more
 * than one rank, where it is not `self`. */
#pragma once

#include "dist/comm.h"
#include "dist/watch.h"

struct mt_comm_ops {
    const char *name;
    mt_status (*split)(mt_comm *part, const mt_comm *whole, int color); /* sets rank, size, impl */
    mt_status (*all_gather)(mt_comm *comm, mt_stream *stream, void *to, const void *from,
                            size_t bytes);
    /* Some part has elements from `first` on; `end` is at most that of the longest. */
    mt_status (*reduce_scatter)(mt_comm *comm, mt_stream *stream, void *to, const void *from,
                                const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce);
    mt_status (*all_reduce)(mt_comm *comm, mt_stream *stream, void *data, int64_t count,
                            mt_dtype dtype, mt_reduce reduce);
    mt_status (*all_to_all)(mt_comm *comm, mt_stream *stream, void *to, const void *from,
                            size_t block_bytes);
    mt_status (*broadcast)(mt_comm *comm, mt_stream *stream, void *data, size_t bytes, int root);
    mt_status (*barrier)(mt_comm *comm);
    /* NULL: nothing is to be gained. */
    mt_status (*share)(mt_comm *comm, void *memory, size_t bytes);
    void (*unshare)(mt_comm *comm, const void *memory);
    bool (*reaches)(const mt_comm *comm, const void *memory, size_t bytes);
    mt_status (*spread)(mt_comm *comm, mt_stream *stream, const mt_comm_run *runs, int count);
    void (*give_up)(mt_comm *world); /* ends what is under way; NULL: nothing is */
    /* A part that this rank has closed gives back what it can without the others, and is closed
       when they are known to have come as far. NULL: `close` is such already. */
    void (*retire)(mt_comm *part);
    void (*close)(mt_comm *comm);
};

struct mt_comm {
    const struct mt_comm_ops *ops;
    int rank, size;
    uint64_t group;         /* the same number on its ranks, and only there */
    mt_watch *watch;        /* the world's; NULL with one process */
    mt_comm *world;         /* NULL: this is it */
    mt_comm *parts, *next;  /* the world's that can be retired, the newest first */
    bool retired, aborted;  /* a part; the world */
    int splits;             /* made of it so far */
    double entered, waited; /* the world's: when the present one began; seconds in all of them */
    int64_t *counts;        /* of a reduce_scatter of equal parts; made when first needed */
    bool failed_together;   /* all of its ranks know of the same failure, the last that happened */
    struct {
        const char *op, *what;
        size_t bytes;
    } call; /* the present one, or the last */
    void *impl;
};

extern const struct mt_comm_ops mt_comm_self;
extern const struct mt_comm_ops mt_comm_plan;

/* Of a rank's part: how many elements of [at, at + step) a call is about. */
static inline int64_t mt_comm_part_count(const mt_comm_parts *parts, int rank, int64_t at,
                                         int64_t step)
{
    int64_t end = parts->counts[rank] < parts->end ? parts->counts[rank] : parts->end;
    int64_t left = end - at;
    return left < 0 ? 0 : left < step ? left : step;
}

/* A part of a planned world: this rank's place in it, its size, and how far apart its ranks are in
 * the world. */
mt_status mt_comm_plan_part(mt_comm **part, mt_comm *world, int rank, int size, int stride);

/* Opens the world: sets rank, size, watch, impl. */
typedef mt_status (*mt_comm_backend_open)(mt_comm *comm, const mt_launch *launch,
                                          const mt_comm_options *options);
#ifdef MT_HAVE_mpi
extern const struct mt_comm_ops mt_comm_mpi;
mt_status mt_comm_mpi_open(mt_comm *comm, const mt_launch *launch, const mt_comm_options *options);
#else
#define mt_comm_mpi_open NULL
#endif

#ifdef MT_HAVE_nccl
extern const struct mt_comm_ops mt_comm_nccl;
mt_status mt_comm_nccl_open(mt_comm *comm, const mt_launch *launch, const mt_comm_options *options);
#else
#define mt_comm_nccl_open NULL
#endif

/* How sums over GPUs go through scratch: `most` elements of each rank in pieces of *step, through
 * one half of it and the other in turns. Returns the bytes of a half. */
static inline size_t mt_comm_half_bytes(int64_t *step, int ranks, mt_dtype dtype, int64_t most)
{
    enum { HALF_BYTES = 256 << 20, GRAIN = 64 };
    int64_t across = ranks * (int64_t)mt_dtype_size(dtype); /* an element of every rank */
    int64_t room = HALF_BYTES / across / GRAIN * GRAIN, all = (most + GRAIN - 1) / GRAIN * GRAIN;
    *step = all < room ? all : room;
    return (size_t)(*step * across);
}

/* to[i] = reduction of `blocks` blocks of `count` elements, `stride` elements apart, in order. Host
 * memory; `to` may be the first block. MT_EUNSUPPORTED names a type without arithmetic. */
mt_status mt_comm_fold(void *to, const void *from, int blocks, int64_t stride, int64_t count,
                       mt_dtype dtype, mt_reduce reduce);
