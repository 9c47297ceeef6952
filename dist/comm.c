/* The contract of comm: checks, the watchdog's notes, the choice of a backend. */
#include "dist/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"
#include "dist/comm_priv.h"

enum { DEFAULT_TIMEOUT_S = 300, REASON = 400 };

/* Who connects processes of a device: only what their launcher has prepared works. */
static const struct backend {
    const char *name, *title;
    const char *device;        /* its name; NULL: any that has no row of its own */
    const char *launchers;     /* a list, or NULL: any */
    mt_comm_backend_open open; /* NULL: not in this build */
} backends[] = {
    { "nccl", "NCCL", "cuda", NULL, mt_comm_nccl_open },
    { "mpi", "MPI", NULL, "Open MPI PMI SLURM", mt_comm_mpi_open },
};
enum { BACKENDS = sizeof backends / sizeof backends[0] };

bool mt_comm_has(const char *backend)
{
    for (int i = 0; i < BACKENDS; i++)
        if (!strcmp(backends[i].name, backend)) return backends[i].open != NULL;
    return false;
}

static bool connects(const struct backend *b, const char *device)
{
    for (int i = 0; !b->device && i < BACKENDS; i++)
        if (backends[i].device && !strcmp(backends[i].device, device)) return false;
    return !b->device || !strcmp(b->device, device);
}

static mt_status open_backend(mt_comm *c, const mt_launch *launch, const mt_comm_options *options)
{
    const char *device = options->device ? options->device->name : "cpu";
    for (int i = 0; i < BACKENDS; i++) {
        const struct backend *b = &backends[i];
        if (!connects(b, device)) continue;
        if (b->launchers && !strstr(b->launchers, launch->launcher)) continue;
        MT_REQUIRE(b->open, MT_EUNSUPPORTED,
                   "%d processes of %s on %s: this build has no %s to connect them", launch->world,
                   launch->launcher, device, b->title);
        return b->open(c, launch, options);
    }
    return MT_FAIL(
        MT_EUNSUPPORTED,
        "%d processes of %s on %s: nothing here connects them; CPU processes run under mpirun",
        launch->world, launch->launcher, device);
}

mt_status mt_comm_open(mt_comm **comm, const mt_launch *launch, const mt_comm_options *options)
{
    *comm = NULL;
    mt_comm_options o = options ? *options : (mt_comm_options){ 0 };
    if (o.timeout_s <= 0) o.timeout_s = DEFAULT_TIMEOUT_S;
    mt_comm *c = calloc(1, sizeof *c);
    MT_REQUIRE(c, MT_ENOMEM, "rank %d: comm: out of memory", launch->rank);
    c->call.op = c->call.what = "";
    c->ops = &mt_comm_self, c->size = 1;
    mt_status status = launch->world > 1 ? open_backend(c, launch, &o) : MT_OK;
    if (status != MT_OK) {
        free(c);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    *comm = c;
    return MT_OK;
}

void mt_comm_abort(mt_comm *comm, const char *sentence)
{
    mt_error_kept before;
    if (!comm || !comm->watch || comm->aborted) return;
    comm->aborted = true;
    mt_error_keep(&before);
    mt_watch_fault(comm->watch, sentence);
    if (comm->ops->give_up) comm->ops->give_up(comm);
    mt_error_put_back(&before);
}

int mt_comm_rank(const mt_comm *comm)
{
    return comm ? comm->rank : 0;
}

int mt_comm_size(const mt_comm *comm)
{
    return comm ? comm->size : 1;
}

const char *mt_comm_backend(const mt_comm *comm)
{
    return comm->ops->name;
}

double mt_comm_waited(const mt_comm *comm)
{
    return (comm->world ? comm->world : comm)->waited;
}

/* ---- collectives -------------------------------------------------------------------------------
 */

static void enter(mt_comm *c, const char *op, const char *what, size_t bytes)
{
    c->call.op = op, c->call.what = what, c->call.bytes = bytes;
    c->failed_together = false;
    if (c->watch) mt_watch_enter(c->watch, op, what, bytes, c->group);
    (c->world ? c->world : c)->entered = mt_now();
}

static mt_status leave(mt_comm *c, mt_status status)
{
    mt_comm *world = c->world ? c->world : c;
    world->waited += mt_now() - world->entered;
    if (c->watch) mt_watch_leave(c->watch);
    return status == MT_OK ? MT_OK : mt_error_pass(status, __FILE__, __LINE__);
}

static void release(mt_comm *c)
{
    c->ops->close(c);
    free(c->counts);
    free(c);
}

/* Once all ranks have come to the same place, everyone has retired what this one has. */
static void release_retired(mt_comm *world)
{
    for (mt_comm **at = &world->parts; *at;) {
        mt_comm *part = *at;
        if (part->retired) {
            *at = part->next;
            release(part);
        } else {
            at = &part->next;
        }
    }
}

static void close_world(mt_comm *c)
{
    if (c->watch) { /* what is still under way ends, or is found, before that */
        enter(c, "close", "", 0);
        (void)leave(c, c->ops->barrier(c));
        mt_watch_stop(&c->watch);
    }
    release_retired(c);
    release(c);
}

void mt_comm_close(mt_comm **comm)
{
    mt_comm *c = *comm;
    mt_error_kept before;
    if (!c) return;
    *comm = NULL;
    mt_error_keep(&before);
    if (!c->world) {
        close_world(c);
    } else if (c->ops->retire) {
        c->ops->retire(c);
        c->retired = true;
    } else {
        release(c);
    }
    mt_error_put_back(&before);
}

mt_status mt_comm_split(mt_comm **part, mt_comm *comm, int color)
{
    *part = NULL;
    MT_REQUIRE(color >= 0, MT_EINVAL, "comm: a part of color %d, must not be negative", color);
    mt_comm *p = calloc(1, sizeof *p);
    MT_REQUIRE(p, MT_ENOMEM, "comm: out of memory");
    p->ops = comm->ops, p->watch = comm->watch;
    p->call.op = "split", p->call.what = "";
    p->world = comm->world ? comm->world : comm;
    /* Distinct for distinct parts: parents differ, or how many parts they had, or the color. */
    p->group =
        (comm->group * 0x9e3779b97f4a7c15u ^ (uint64_t)++comm->splits) * 0xff51afd7ed558ccdu ^
        ((uint64_t)color + 1);
    enter(comm, "split", "", 0);
    mt_status status = leave(comm, comm->ops->split(p, comm, color));
    if (status != MT_OK) {
        free(p);
        return status;
    }
    if (!comm->world) release_retired(comm);
    if (p->ops->retire) p->next = p->world->parts, p->world->parts = p;
    *part = p;
    return MT_OK;
}

mt_status mt_comm_all_gather(mt_comm *c, mt_stream *stream, void *to, const void *from,
                             size_t bytes, const char *what)
{
    MT_REQUIRE((to && from) || !bytes, MT_EINVAL, "all_gather (%s): NULL", what);
    enter(c, "all_gather", what, bytes);
    return leave(c, bytes ? c->ops->all_gather(c, stream, to, from, bytes) : MT_OK);
}

static mt_status check_reduce(const char *op, const char *what, const void *data, int64_t count,
                              mt_reduce reduce)
{
    MT_REQUIRE(count >= 0 && (data || !count), MT_EINVAL, "%s (%s): %lld elements at %p", op, what,
               (long long)count, data);
    MT_REQUIRE((unsigned)reduce < MT_REDUCE_COUNT, MT_EINVAL, "%s (%s): reduction %d", op, what,
               (int)reduce);
    return MT_OK;
}

mt_status mt_comm_reduce_scatter_parts(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                       const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce,
                                       const char *what)
{
    mt_comm_parts p = { parts->counts, parts->first, 0 };
    int64_t all = 0;
    MT_REQUIRE(parts->first >= 0 && parts->end >= parts->first, MT_EINVAL,
               "reduce_scatter (%s): elements [%lld, %lld) of each part", what,
               (long long)parts->first, (long long)parts->end);
    for (int r = 0; r < c->size; r++) {
        MT_REQUIRE(p.counts[r] >= 0, MT_EINVAL, "reduce_scatter (%s): %lld elements for rank %d",
                   what, (long long)p.counts[r], r);
        int64_t end = p.counts[r] < parts->end ? p.counts[r] : parts->end;
        if (end > p.end) p.end = end;
        all += end > p.first ? end - p.first : 0;
    }
    MT_TRY(check_reduce("reduce_scatter", what, from, all, reduce));
    MT_TRY(check_reduce("reduce_scatter", what, to, mt_comm_part_count(&p, c->rank, p.first, p.end),
                        reduce));
    enter(c, "reduce_scatter", what, (size_t)all * mt_dtype_size(dtype));
    return leave(c, all ? c->ops->reduce_scatter(c, stream, to, from, &p, dtype, reduce) : MT_OK);
}

mt_status mt_comm_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 int64_t count, mt_dtype dtype, mt_reduce reduce, const char *what)
{
    if (!c->counts) c->counts = calloc((size_t)c->size, sizeof *c->counts);
    MT_REQUIRE(c->counts, MT_ENOMEM, "comm: out of memory");
    for (int r = 0; r < c->size; r++) c->counts[r] = count;
    const mt_comm_parts parts = { c->counts, 0, count };
    return mt_comm_reduce_scatter_parts(c, stream, to, from, &parts, dtype, reduce, what);
}

mt_status mt_comm_all_reduce(mt_comm *c, mt_stream *stream, void *data, int64_t count,
                             mt_dtype dtype, mt_reduce reduce, const char *what)
{
    MT_TRY(check_reduce("all_reduce", what, data, count, reduce));
    enter(c, "all_reduce", what, (size_t)count * mt_dtype_size(dtype));
    return leave(c, count ? c->ops->all_reduce(c, stream, data, count, dtype, reduce) : MT_OK);
}

mt_status mt_comm_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
                             size_t block_bytes, const char *what)
{
    MT_REQUIRE(block_bytes >= sizeof(int64_t) && block_bytes % sizeof(int64_t) == 0, MT_EINVAL,
               "all_to_all (%s): blocks of %zu bytes, must be a positive multiple of 8", what,
               block_bytes);
    MT_REQUIRE(to && from, MT_EINVAL, "all_to_all (%s): NULL", what);
    enter(c, "all_to_all", what, block_bytes);
    return leave(c, c->ops->all_to_all(c, stream, to, from, block_bytes));
}

mt_status mt_comm_broadcast(mt_comm *c, mt_stream *stream, void *data, size_t bytes, int root,
                            const char *what)
{
    MT_REQUIRE(root >= 0 && root < c->size, MT_EINVAL, "broadcast (%s): rank %d of %d", what, root,
               c->size);
    MT_REQUIRE(data || !bytes, MT_EINVAL, "broadcast (%s): NULL", what);
    enter(c, "broadcast", what, bytes);
    return leave(c, bytes ? c->ops->broadcast(c, stream, data, bytes, root) : MT_OK);
}

mt_status mt_comm_barrier(mt_comm *c, const char *what)
{
    enter(c, "barrier", what, 0);
    return leave(c, c->ops->barrier(c));
}

mt_status mt_comm_share(mt_comm *c, void *memory, size_t bytes, const char *what)
{
    if (!c->ops->share || !bytes) return MT_OK;
    enter(c, "share", what, bytes);
    return leave(c, c->ops->share(c, memory, bytes));
}

void mt_comm_unshare(mt_comm *c, const void *memory)
{
    if (c->ops->unshare) c->ops->unshare(c, memory);
}

bool mt_comm_reaches(const mt_comm *c, const void *memory, size_t bytes)
{
    return c->ops->reaches && c->ops->reaches(c, memory, bytes);
}

mt_status mt_comm_spread(mt_comm *c, mt_stream *stream, const mt_comm_run *runs, int count,
                         size_t bytes, const char *what)
{
    MT_REQUIRE(c->ops->spread, MT_EUNSUPPORTED, "spread (%s): over %s", what, c->ops->name);
    enter(c, "spread", what, bytes);
    return leave(c, c->ops->spread(c, stream, runs, count));
}

mt_status mt_comm_agree(mt_comm *c, mt_status status, const char *what)
{
    if (mt_comm_size(c) == 1) return status;
    /* The first failed rank is the largest of these. */
    int64_t first = status == MT_OK ? 0 : c->size - c->rank;
    struct {
        int64_t status;
        char reason[REASON];
    } told = { (int64_t)status, "" };
    snprintf(told.reason, sizeof told.reason, "%s", status == MT_OK ? "" : mt_error_message());
    MT_TRY(mt_comm_all_reduce(c, NULL, &first, 1, MT_I64, MT_REDUCE_MAX, what));
    if (first == 0) return MT_OK;
    int root = c->size - (int)first;
    MT_TRY(mt_comm_broadcast(c, NULL, &told, sizeof told, root, what));
    c->failed_together = true;
    if (status != MT_OK && root == c->rank) return status;
    return MT_FAIL((mt_status)told.status, "rank %d: %s", root, told.reason);
}

bool mt_comm_failed_together(const mt_comm *c)
{
    return c->failed_together;
}

/* ---- sums in a fixed order ---------------------------------------------------------------------
 */

#define FOLD(NAME, TYPE)                                                                           \
    static void NAME(void *to, const void *from, int blocks, int64_t stride, int64_t count,        \
                     mt_reduce reduce)                                                             \
    {                                                                                              \
        TYPE *y = to;                                                                              \
        const TYPE *x = from;                                                                      \
        for (int64_t i = 0; i < count; i++) y[i] = x[i];                                           \
        for (int b = 1; b < blocks; b++)                                                           \
            for (int64_t i = 0; i < count; i++) {                                                  \
                TYPE other = x[b * stride + i];                                                    \
                if (reduce == MT_REDUCE_SUM)                                                       \
                    y[i] += other;                                                                 \
                else if (other > y[i] || other != other)                                           \
                    y[i] = other;                                                                  \
            }                                                                                      \
    }
FOLD(fold_f64, double)
FOLD(fold_f32, float)
FOLD(fold_i64, int64_t)
FOLD(fold_i32, int32_t)
#undef FOLD

static void fold_bf16(void *to, const void *from, int blocks, int64_t stride, int64_t count,
                      mt_reduce reduce)
{
    uint16_t *y = to;
    const uint16_t *x = from;
    for (int64_t i = 0; i < count; i++) {
        float most = mt_bf16_to_f32(x[i]);
        for (int b = 1; b < blocks; b++) {
            float other = mt_bf16_to_f32(x[b * stride + i]);
            if (reduce == MT_REDUCE_SUM)
                most += other;
            else if (other > most || other != other)
                most = other;
        }
        y[i] = mt_f32_to_bf16(most);
    }
}

mt_status mt_comm_fold(void *to, const void *from, int blocks, int64_t stride, int64_t count,
                       mt_dtype dtype, mt_reduce reduce)
{
    static void (*const folds[MT_DTYPE_COUNT])(void *, const void *, int, int64_t, int64_t,
                                               mt_reduce) = {
        [MT_F64] = fold_f64, [MT_F32] = fold_f32, [MT_BF16] = fold_bf16,
        [MT_I64] = fold_i64, [MT_I32] = fold_i32,
    };
    MT_REQUIRE((unsigned)dtype < MT_DTYPE_COUNT && folds[dtype], MT_EUNSUPPORTED,
               "comm: %s cannot be reduced", mt_dtype_name(dtype));
    folds[dtype](to, from, blocks, stride, count, reduce);
    return MT_OK;
}
