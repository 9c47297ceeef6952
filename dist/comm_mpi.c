/* CPU processes over MPI: bytes are moved by MPI, sums are made here, in the order of the ranks.
 * The only door to mpi.h. */
#include "dist/comm_priv.h"

#include <limits.h>
#include <math.h>
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A rank's part of what is reduced at a time: bounds the memory that the others' parts need. */
enum { CHUNK_BYTES = 1 << 20, MOST_BYTES = 1 << 30, TURNS = 200, NAP_NS = 20000 };
/* Beyond the timeout, for MPI's own beginning: of rank 0, which has the first word, and of others.
 */
enum { LATE_S = 10, LATER_S = 20 };

typedef struct mpi {
    MPI_Comm comm;
    char *scratch; /* every rank's chunk */
} mpi;

static MPI_Comm of(const mt_comm *c)
{
    return ((const mpi *)c->impl)->comm;
}

static mt_status check(const char *doing, int code)
{
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length;
    if (code == MPI_SUCCESS) return MT_OK;
    MPI_Error_string(code, reason, &length);
    return MT_FAIL(MT_EDEVICE, "MPI: %s: %s", doing, reason);
}
#define MT_MPI(doing, x) MT_TRY(check((doing), (x)))

/* Waits awake for a while, then between naps: MPI's own waiting never sleeps, and where ranks share
 * cores it takes the time that the rank waited for needs. */
static mt_status wait_all(const char *doing, int code, int count, MPI_Request *requests)
{
    int done = 0;
    for (int turn = 0; code == MPI_SUCCESS && !done; turn++) {
        code = MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE);
        if (turn > TURNS) nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
    }
    return check(doing, code);
}

/* Work that the stream was given before has to be done. */
static mt_status settle(mt_stream *stream)
{
    return stream ? mt_device_synchronize(stream->device) : MT_OK;
}

static mt_status wrap(mt_comm *c, MPI_Comm comm)
{
    mpi *impl = calloc(1, sizeof *impl);
    MT_REQUIRE(impl, MT_ENOMEM, "comm: out of memory");
    c->impl = impl, impl->comm = comm;
    MT_MPI("MPI_Comm_rank", MPI_Comm_rank(comm, &c->rank));
    MT_MPI("MPI_Comm_size", MPI_Comm_size(comm, &c->size));
    impl->scratch = malloc((size_t)c->size * CHUNK_BYTES);
    MT_REQUIRE(impl->scratch, MT_ENOMEM, "comm: no memory for %d chunks", c->size);
    return MT_OK;
}

static void mpi_retire(mt_comm *c)
{
    mpi *impl = c->impl;
    free(impl->scratch);
    impl->scratch = NULL;
}

static void mpi_close(mt_comm *c)
{
    mpi *impl = c->impl;
    if (!impl) return;
    bool world = impl->comm == MPI_COMM_WORLD;
    if (!world) MPI_Comm_free(&impl->comm);
    free(impl->scratch);
    free(impl);
    c->impl = NULL;
    if (world) MPI_Finalize();
}

static mt_status mpi_split(mt_comm *part, const mt_comm *whole, int color)
{
    MPI_Comm comm;
    MT_MPI("MPI_Comm_split", MPI_Comm_split(of(whole), color, whole->rank, &comm));
    mt_status status = wrap(part, comm);
    if (status != MT_OK) { /* alone: freeing MPI's may wait for the others */
        free(part->impl);
        part->impl = NULL;
    }
    return status;
}

/* MPI's counts are ints: what is longer goes in pieces. */
static mt_status mpi_all_gather(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                size_t bytes)
{
    MT_TRY(settle(stream));
    char *own = (char *)to + (size_t)c->rank * bytes;
    if (own != from) memcpy(own, from, bytes);
    for (size_t at = 0; at < bytes; at += MOST_BYTES) {
        size_t n = bytes - at < MOST_BYTES ? bytes - at : MOST_BYTES;
        MPI_Datatype run,
            spaced; /* a piece of a rank's place in `to`, and from there to the next */
        MT_MPI("MPI_Type_contiguous", MPI_Type_contiguous((int)n, MPI_BYTE, &run));
        MT_MPI("MPI_Type_create_resized",
               MPI_Type_create_resized(run, 0, (MPI_Aint)bytes, &spaced));
        MT_MPI("MPI_Type_commit", MPI_Type_commit(&spaced));
        MPI_Request request;
        int code = MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, (char *)to + at, 1, spaced,
                                  of(c), &request);
        mt_status status = wait_all("MPI_Iallgather", code, 1, &request);
        MPI_Type_free(&run);
        MPI_Type_free(&spaced);
        MT_TRY(status);
    }
    return MT_OK;
}

/* Chunk after chunk: every rank's part for this one comes in, and is added up in order. */
static mt_status mpi_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                    const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce)
{
    MT_TRY(settle(stream));
    int64_t size = (int64_t)mt_dtype_size(dtype), step = CHUNK_BYTES / size;
    char *scratch = ((mpi *)c->impl)->scratch;
    MPI_Request *requests = malloc(2 * (size_t)c->size * sizeof *requests);
    MT_REQUIRE(requests, MT_ENOMEM, "comm: out of memory");
    mt_status status = MT_OK;
    for (int64_t at = parts->first; at < parts->end && status == MT_OK; at += step) {
        int own = (int)mt_comm_part_count(parts, c->rank, at, step), code = MPI_SUCCESS;
        const char *part = from;
        for (int r = 0; r < c->size && code == MPI_SUCCESS; r++)
            code = MPI_Irecv(scratch + (size_t)r * CHUNK_BYTES, own * (int)size, MPI_BYTE, r, 0,
                             of(c), &requests[2 * r]);
        for (int r = 0; r < c->size && code == MPI_SUCCESS; r++) {
            int there = (int)mt_comm_part_count(parts, r, at, step) * (int)size;
            code = MPI_Isend(part + at * size, there, MPI_BYTE, r, 0, of(c), &requests[2 * r + 1]);
            part += parts->counts[r] * size;
        }
        status = wait_all("reduce_scatter", code, 2 * c->size, requests);
        if (status == MT_OK && own)
            status = mt_comm_fold((char *)to + at * size, scratch, c->size, CHUNK_BYTES / size, own,
                                  dtype, reduce);
    }
    free(requests);
    return status;
}

static mt_status mpi_all_reduce(mt_comm *c, mt_stream *stream, void *data, int64_t count,
                                mt_dtype dtype, mt_reduce reduce)
{
    MT_TRY(settle(stream));
    int64_t size = (int64_t)mt_dtype_size(dtype), step = CHUNK_BYTES / size;
    char *scratch = ((mpi *)c->impl)->scratch;
    for (int64_t at = 0; at < count; at += step) {
        int64_t n = count - at < step ? count - at : step;
        char *here = (char *)data + at * size;
        MPI_Request request;
        int bytes = (int)(n * size);
        int code = MPI_Iallgather(here, bytes, MPI_BYTE, scratch, bytes, MPI_BYTE, of(c), &request);
        MT_TRY(wait_all("MPI_Iallgather", code, 1, &request));
        MT_TRY(mt_comm_fold(here, scratch, c->size, n, n, dtype, reduce));
    }
    return MT_OK;
}

static mt_status mpi_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                size_t block_bytes)
{
    MT_TRY(settle(stream));
    MT_REQUIRE(block_bytes <= MOST_BYTES, MT_EUNSUPPORTED,
               "MPI: all_to_all of blocks of %zu bytes, at most %d", block_bytes, MOST_BYTES);
    MPI_Request *requests = malloc(2 * (size_t)c->size * sizeof *requests);
    MT_REQUIRE(requests, MT_ENOMEM, "comm: out of memory");
    int code = MPI_SUCCESS;
    for (int r = 0; r < c->size && code == MPI_SUCCESS; r++)
        code = MPI_Irecv((char *)to + (size_t)r * block_bytes, (int)block_bytes, MPI_BYTE, r, 1,
                         of(c), &requests[2 * r]);
    mt_status status = MT_OK;
    for (int r = 0; r < c->size && code == MPI_SUCCESS; r++) {
        const char *block = (const char *)from + (size_t)r * block_bytes;
        int64_t used, room = (int64_t)(block_bytes - sizeof used);
        memcpy(&used, block, sizeof used);
        if (used < 0 || used > room) {
            status = MT_FAIL(MT_EINVAL, "all_to_all: the block for rank %d uses %lld of %lld bytes",
                             r, (long long)used, (long long)room);
            used = 0;
        }
        code = MPI_Isend(block, (int)(used + (int64_t)sizeof used), MPI_BYTE, r, 1, of(c),
                         &requests[2 * r + 1]);
    }
    mt_status moved = wait_all("all_to_all", code, 2 * c->size, requests);
    free(requests);
    MT_TRY(status);
    return moved;
}

static mt_status mpi_broadcast(mt_comm *c, mt_stream *stream, void *data, size_t bytes, int root)
{
    MT_TRY(settle(stream));
    for (size_t at = 0; at < bytes; at += MOST_BYTES) {
        size_t n = bytes - at < MOST_BYTES ? bytes - at : MOST_BYTES;
        MPI_Request request;
        int code = MPI_Ibcast((char *)data + at, (int)n, MPI_BYTE, root, of(c), &request);
        MT_TRY(wait_all("MPI_Ibcast", code, 1, &request));
    }
    return MT_OK;
}

static mt_status mpi_barrier(mt_comm *c)
{
    MPI_Request request;
    int code = MPI_Ibarrier(of(c), &request);
    return wait_all("MPI_Ibarrier", code, 1, &request);
}

const struct mt_comm_ops mt_comm_mpi = {
    .name = "mpi",
    .split = mpi_split,
    .all_gather = mpi_all_gather,
    .reduce_scatter = mpi_reduce_scatter,
    .all_reduce = mpi_all_reduce,
    .all_to_all = mpi_all_to_all,
    .broadcast = mpi_broadcast,
    .barrier = mpi_barrier,
    .retire = mpi_retire,
    .close = mpi_close,
};

/* Before ranks are watched over: whether all can go on, and where rank 0 listens; else every rank
 * fails, and names the first that cannot, which says its rank as well: it may be the only one that
 * still speaks. Who has failed comes all the same. */
static mt_status greet(const mt_comm *c, char address[MT_HOST_ADDRESS], mt_status status)
{
    struct {
        int64_t status;
        char text[400];
    } said = { (int64_t)status, "" };
    int first = status == MT_OK ? 0 : c->size - c->rank; /* the largest is the first */
    snprintf(said.text, sizeof said.text, "%s", status == MT_OK ? address : mt_error_message());
    MT_MPI("MPI_Allreduce",
           MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD));
    int root = first ? c->size - first : 0;
    MT_MPI("MPI_Bcast", MPI_Bcast(&said, sizeof said, MPI_BYTE, root, MPI_COMM_WORLD));
    bool named = !strncmp(said.text, "rank ", strlen("rank "));
    if (first && named) return MT_FAIL((mt_status)said.status, "%s", said.text);
    if (first) return MT_FAIL((mt_status)said.status, "rank %d: %s", root, said.text);
    snprintf(address, MT_HOST_ADDRESS, "%.*s", MT_HOST_ADDRESS - 1, said.text);
    return MT_OK;
}

/* That MPI has started what the launcher says. */
static mt_status check_world(const mt_comm *c, const mt_launch *launch)
{
    MT_REQUIRE(c->size == launch->world && c->rank == launch->rank, MT_ECONFIG,
               "%s says rank %d of %d, MPI says %d of %d", launch->launcher, launch->rank,
               launch->world, c->rank, c->size);
    return MT_OK;
}

/* Rank 0 listens, tells everyone where, and everyone connects. */
static mt_status start_watch(mt_comm *c, const mt_launch *launch, const mt_comm_options *options)
{
    mt_watch_options o = { .rank = c->rank,
                           .world = c->size,
                           .timeout_s = options->timeout_s,
                           .on_fault = options->on_fault,
                           .context = options->context };
    char address[MT_HOST_ADDRESS] = "";
    int listener = -1;
    mt_status status = check_world(c, launch);
    if (status == MT_OK) status = wrap(c, MPI_COMM_WORLD);
    if (status == MT_OK && c->rank == 0) status = mt_watch_listen(&listener, address);
    if (status == MT_OK && c->rank == 0) status = mt_watch_start(&c->watch, &o, listener, "");
    MT_TRY(greet(c, address, status));
    if (c->rank) status = mt_watch_start(&c->watch, &o, -1, address);
    return greet(c, address, status);
}

/* MPI waits without end for a rank that does not come: until all have met, a thread of each looks
 * at the clock. Who is missing MPI does not say. */
typedef struct patience {
    const mt_comm_options *options;
    const mt_launch *launch;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t met;
    bool over;
} patience;

static void *lose_patience(void *user)
{
    patience *p = user;
    bool lead = p->launch->rank == 0;
    double seconds = ceil(p->options->timeout_s) + (lead ? LATE_S : LATER_S);
    char text[MT_WATCH_TEXT];
    struct timespec until;
    int code = 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)seconds;
    pthread_mutex_lock(&p->lock);
    while (!p->over && code == 0)
        code = pthread_cond_clockwait(&p->met, &p->lock, CLOCK_MONOTONIC, &until);
    bool over = p->over;
    pthread_mutex_unlock(&p->lock);
    if (over) return NULL;
    snprintf(text, sizeof text, "%sMPI has not brought the %d ranks together in %.0f s%s",
             lead ? "" : "rank 0 does not answer: ", p->launch->world, seconds,
             lead ? ": not every rank has come" : "");
    p->options->on_fault(p->options->context, lead ? -1 : 0, text);
    return NULL;
}

/* Nobody loses it where nobody would hear of it. */
static mt_status begin_patience(patience *p)
{
    if (!p->options->on_fault) return MT_OK;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->met, NULL);
    int code = pthread_create(&p->thread, NULL, lose_patience, p);
    if (code == 0) return MT_OK;
    pthread_cond_destroy(&p->met);
    pthread_mutex_destroy(&p->lock);
    return MT_FAIL(MT_EDEVICE, "rank %d: comm: cannot start a thread: %s", p->launch->rank,
                   strerror(code));
}

static void end_patience(patience *p)
{
    if (!p->options->on_fault) return;
    pthread_mutex_lock(&p->lock);
    p->over = true;
    pthread_cond_signal(&p->met);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->met);
    pthread_mutex_destroy(&p->lock);
}

static mt_status meet(mt_comm *c, const mt_launch *launch, const mt_comm_options *options)
{
    int given;
    MT_MPI("MPI_Init_thread", MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &given));
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MT_MPI("MPI_Comm_rank", MPI_Comm_rank(MPI_COMM_WORLD, &c->rank));
    MT_MPI("MPI_Comm_size", MPI_Comm_size(MPI_COMM_WORLD, &c->size));
    return start_watch(c, launch, options);
}

mt_status mt_comm_mpi_open(mt_comm *c, const mt_launch *launch, const mt_comm_options *options)
{
    int initialized = 0;
    patience p = { .options = options, .launch = launch };
    MPI_Initialized(&initialized);
    MT_REQUIRE(!initialized, MT_EINVAL, "comm: MPI has been started already");
    MT_TRY(begin_patience(&p));
    mt_status status = meet(c, launch, options);
    end_patience(&p);
    if (status == MT_OK) {
        c->ops = &mt_comm_mpi;
        return MT_OK;
    }
    mt_watch_stop(&c->watch);
    MPI_Initialized(&initialized);
    if (c->impl)
        mpi_close(c);
    else if (initialized)
        MPI_Finalize();
    return status;
}
