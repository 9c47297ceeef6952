/* How ranks talk: one contract, a backend behind it (self: one process; mpi: CPU processes; nccl: a
 * GPU each).
 *
 * Every function below that takes a comm is collective: all its ranks call it, in the same order,
 * with the same sizes. `what` says what is moved, for the watchdog: a literal, or text that lives
 * through the call. Memory is the stream's device's, or host memory where the stream is NULL; a
 * call is ordered after what the stream was given before, and what the stream is given later finds
 * it done. `to` and `from` do not overlap unless said. 0 bytes are legal.
 *
 * With a stream of a device that works behind the host's back (cuda) a call returns when the work
 * is in the stream: memory stays as it is until the stream has done it. Collectives run one after
 * another in the order in which they were called, whatever comms and streams they belong to. Host
 * memory, a barrier and a split are waited for. The watchdog follows a collective until its data
 * are there. None can be recorded in a graph.
 *
 * Sums are made in the order of the ranks, ((x0 + x1) + x2) + ..., each addition rounded to the
 * type (bf16: in f32, rounded once at the end): the same bits on every rank, in every run, from
 * every backend (nccl only moves bytes; it adds nothing up).
 *
 * The ranks' collectives are numbered together, whatever comm they belong to. Errors: MT_EINVAL
 * names the collective and the rule; MT_EDEVICE the backend's reason. A rank that does not come is
 * no error here: the watchdog names it and on_fault ends the process. */
#pragma once

#include "core/device.h"
#include "dist/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_comm mt_comm;

typedef enum mt_reduce { MT_REDUCE_SUM, MT_REDUCE_MAX, MT_REDUCE_COUNT } mt_reduce;

typedef struct mt_comm_options {
    double timeout_s; /* how long a rank may wait for the others, at most 1e6; 0: 300 */
    /* As in dist/watch.h: should print the sentence (on one rank) and end the process. */
    void (*on_fault)(void *context, int by, const char *sentence);
    void *context;
    mt_device *device; /* of the streams, borrowed until the world is closed; NULL: host memory */
} mt_comm_options;

/* Whether this build connects processes by it: "mpi", "nccl". */
bool mt_comm_has(const char *backend);

/* The world that `launch` describes: over NCCL where the device is cuda, else over MPI. options may
 * be NULL. Collective. Errors: MT_EUNSUPPORTED where this build or machine has nothing that
 * connects these processes; MT_ECONFIG of dist/launch.h, MT_EDEVICE of dist/rendezvous.h. */
mt_status mt_comm_open(mt_comm **comm, const mt_launch *launch, const mt_comm_options *options);
/* What a rank does that is not there: collectives take the memory that they would take (over NCCL
 * with `gpus`) and move nothing; what others would give stays as it is. For the plan device, which
 * is borrowed. Split by dist/mesh.h alone. */
mt_status mt_comm_open_plan(mt_comm **comm, mt_device *device, int rank, int size, bool gpus);
/* Closes a comm; the world last, which is collective. Parts are closed in the same order on all of
 * their ranks, none of which waits for another: one that has failed alone closes them, too. The
 * error that stands stays. NULL-safe.
 */
void mt_comm_close(mt_comm **comm);
/* Leaves without the others, after an error of this rank: everyone else is ended, and told this
 * rank and the sentence. The world must not be closed any more, and nothing be moved; what is
 * shared is given back, and parts are closed, as before. The error that stands stays. NULL-safe,
 * and once is enough. */
void mt_comm_abort(mt_comm *comm, const char *sentence);

/* NULL is one rank, alone. */
int mt_comm_rank(const mt_comm *comm);
int mt_comm_size(const mt_comm *comm);
const char *mt_comm_backend(const mt_comm *comm); /* "self", "mpi", "nccl" */
/* Seconds that this process has spent in them: of collectives that return when they are done, how
 * long it waited for the others; of those that a device goes on with, next to nothing. */
double mt_comm_waited(const mt_comm *comm);

/* The ranks of `comm` with this rank's color, in their order there. */
mt_status mt_comm_split(mt_comm **part, mt_comm *comm, int color);

/* to[r] = from of rank r, `bytes` each. `from` may be this rank's place in `to`. */
mt_status mt_comm_all_gather(mt_comm *comm, mt_stream *stream, void *to, const void *from,
                             size_t bytes, const char *what);
/* to[i] = the reduction over ranks of their from[rank * count + i], i < count. */
mt_status mt_comm_reduce_scatter(mt_comm *comm, mt_stream *stream, void *to, const void *from,
                                 int64_t count, mt_dtype dtype, mt_reduce reduce, const char *what);
/* Parts of different sizes, back to back: counts[0] elements for rank 0, then counts[1] for rank 1,
 * ... Elements [first, end) of each, as far as it goes, are what a call is about. All of it is host
 * memory, the same on every rank. */
typedef struct mt_comm_parts {
    const int64_t *counts;
    int64_t first, end;
} mt_comm_parts;
/* to[i] = the reduction over ranks of element i of this rank's part of their from, first <= i <
 * end; the rest of `to` stays as it is. */
mt_status mt_comm_reduce_scatter_parts(mt_comm *comm, mt_stream *stream, void *to, const void *from,
                                       const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce,
                                       const char *what);
/* data[i] = the reduction over ranks of their data[i]. MAX: NaN is larger than every number. */
mt_status mt_comm_all_reduce(mt_comm *comm, mt_stream *stream, void *data, int64_t count,
                             mt_dtype dtype, mt_reduce reduce, const char *what);
/* Block r of `from` goes to rank r, whose block for this rank comes into block r of `to`. A block
 * is `block_bytes` long, a multiple of 8, and begins with an int64: how many of the bytes that
 * follow are in use. What is beyond them may not be sent: it is undefined in `to`. Counts in host
 * memory are checked (MT_EINVAL), those on a device are not looked at. */
mt_status mt_comm_all_to_all(mt_comm *comm, mt_stream *stream, void *to, const void *from,
                             size_t block_bytes, const char *what);
/* data of every rank = that of rank `root`. */
mt_status mt_comm_broadcast(mt_comm *comm, mt_stream *stream, void *data, size_t bytes, int root,
                            const char *what);
mt_status mt_comm_barrier(mt_comm *comm, const char *what);

/* Memory of a device, of mt_device_alloc's, that all_gather and all_to_all of this comm write to:
 * what comes into it may then be written there by the others' copy engines. Results are the same.
 * Collective, of the same size on every rank. */
mt_status mt_comm_share(mt_comm *comm, void *memory, size_t bytes, const char *what);
/* Whether that has come true of this memory of so many bytes: it is the same on every rank. */
bool mt_comm_reaches(const mt_comm *comm, const void *memory, size_t bytes);
/* Bytes that one rank has, for the same place in every rank's memory. */
typedef struct mt_comm_run {
    void *to;
    const void *from; /* not `to`, and outside of what is shared by it */
    size_t bytes;
} mt_comm_run;
/* Every rank's runs, of any number and size, come to lie in their places in the memory of all, this
 * rank's own among them: memory that the comm reaches, and that is the others' from this call on
 * until it is done. `bytes`: the most that a rank has, the same on all. */
mt_status mt_comm_spread(mt_comm *comm, mt_stream *stream, const mt_comm_run *runs, int count,
                         size_t bytes, const char *what);
/* Before it is freed. Others may have it mapped until they have said so as well: a barrier after
 * that makes sure. */
void mt_comm_unshare(mt_comm *comm, const void *memory);

/* Elements in place of bytes. */
static inline mt_status mt_comm_all_gather_of(mt_comm *comm, mt_stream *stream, void *to,
                                              const void *from, int64_t count, mt_dtype dtype,
                                              const char *what)
{
    return mt_comm_all_gather(comm, stream, to, from, (size_t)count * mt_dtype_size(dtype), what);
}
static inline mt_status mt_comm_broadcast_of(mt_comm *comm, mt_stream *stream, void *data,
                                             int64_t count, mt_dtype dtype, int root,
                                             const char *what)
{
    return mt_comm_broadcast(comm, stream, data, (size_t)count * mt_dtype_size(dtype), root, what);
}

/* Fails on every rank if it failed on any, after all have come: `status` is this rank's. The others
 * get MT_EDEVICE, or the failed rank's own code, and a sentence that names the first failed rank
 * and its reason. NULL: `status`. */
mt_status mt_comm_agree(mt_comm *comm, mt_status status, const char *what);
/* Whether that has failed, and nothing was done together since: then every rank knows, and nobody
 * has to be told. */
bool mt_comm_failed_together(const mt_comm *comm);

#ifdef __cplusplus
}
#endif
