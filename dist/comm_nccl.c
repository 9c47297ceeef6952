/* GPUs over NCCL, which is loaded when a world is opened. NCCL moves bytes and nothing else: sums
 * are made here, in the order of the ranks, so that no choice of NCCL's (algorithm, protocol,
 * channels) changes a bit. The only door to nccl.h.
 *
 * Collectives begin in the order in which they are called and run one after another, whatever
 * streams they are in. A reduction goes through scratch in pieces of two halves: while one is added
 * up, in a stream of its own, the next piece comes in. What comes into memory that the ranks share
 * is moved by copy engines instead (dist/direct.h). */
#include "dist/comm_priv.h"

#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dist/direct.h"
#include "dist/inflight.h"
#include "dist/rendezvous.h"
#include "dist/staging.h"
#include "kernels/cuda/backend.h"
#include "kernels/cuda/fold.h"

enum {
    HALVES = 2,
    OLDEST_VERSION = 21800,
    /* Where no copy engine moves: of NCCL, each of which takes a multiprocessor to itself, and
       multiprocessors that add up beside them. */
    CTAS = 24,
    FOLDERS = 8
};

#define FUNCTIONS(X)                                                                               \
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

typedef struct api {
    void *library;
#define FIELD(name) __typeof__(nccl##name) *name;
    FUNCTIONS(FIELD)
#undef FIELD
} api;

/* What all parts of a world share. */
typedef struct shared {
    api nccl;
    ncclComm_t comm; /* of the whole world */
    mt_device *device;
    mt_inflight *inflight;
    mt_staging staging; /* of collectives of host memory */
    mt_stream folds;    /* where reductions are added up */
    mt_event came, folded[HALVES];
} shared;

typedef struct nccl {
    ncclComm_t comm;
    shared *shared;
    bool asked;        /* whether the ranks reach each other's memory: then `direct` says it */
    mt_direct *direct; /* NULL: they do not */
    void *scratch;     /* of reductions */
    size_t scratch_bytes;
} nccl;

static nccl *of(const mt_comm *c)
{
    return c->impl;
}

static mt_status check(const shared *s, const char *doing, ncclResult_t code)
{
    if (code == ncclSuccess || code == ncclInProgress) return MT_OK;
    const char *why = s->nccl.GetLastError(NULL);
    return MT_FAIL(MT_EDEVICE, "NCCL: %s: %s%s%.300s", doing, s->nccl.GetErrorString(code),
                   why && *why ? ": " : "", why ? why : "");
}
#define MT_NCCL(s, doing, x) MT_TRY(check((s), (doing), (x)))

/* ---- begin and end of a transfer ---------------------------------------------------------------
 */

static mt_status begin(mt_comm *c, mt_stream *stream)
{
    return mt_inflight_follow(of(c)->shared->inflight, stream);
}

/* The stream has been given all of it. */
static mt_status end(mt_comm *c, mt_stream *stream)
{
    const mt_watch_pending call = { .sequence = mt_watch_sequence(c->watch),
                                    .bytes = c->call.bytes,
                                    .group = c->group,
                                    .op = c->call.op,
                                    .what = c->call.what };
    return mt_inflight_add(of(c)->shared->inflight, stream, &call);
}

/* The watchdog's question. */
static bool poll_world(void *context, mt_watch_pending *oldest, char failure[MT_WATCH_TEXT])
{
    shared *s = context;
    bool any;
    ncclResult_t code = ncclSuccess;
    mt_status status = mt_inflight_oldest(s->inflight, oldest, &any);
    if (status == MT_OK && s->nccl.CommGetAsyncError(s->comm, &code) == ncclSuccess)
        status = check(s, "moving data", code);
    if (status != MT_OK) snprintf(failure, MT_WATCH_TEXT, "%.500s", mt_error_message());
    return status == MT_OK && any;
}

/* ---- moving ------------------------------------------------------------------------------------
 */

static mt_status device_broadcast(mt_comm *c, mt_stream *stream, void *data, size_t bytes, int root)
{
    const shared *s = of(c)->shared;
    MT_TRY(begin(c, stream));
    MT_NCCL(
        s, "ncclBroadcast",
        s->nccl.Broadcast(data, data, bytes, ncclUint8, root, of(c)->comm, mt_cuda_stream(stream)));
    return end(c, stream);
}

/* What goes to and comes from rank r: bytes [at, at + bytes) of its own places. */
typedef struct place {
    char *to;
    const char *from;
    size_t come, go;
} place;

typedef place (*place_of)(const mt_comm *c, const void *context, int rank);

/* By copy engines: what comes from this rank lies in the others' memory where its own place is
 * here. */
static mt_status swap_directly(mt_comm *c, mt_stream *stream, place_of where, const void *context)
{
    mt_direct_part *part = calloc((size_t)c->size, sizeof *part);
    MT_REQUIRE(part, MT_ENOMEM, "comm: out of memory");
    for (int r = 0; r < c->size; r++) {
        place x = where(c, context, r);
        part[r] = (mt_direct_part){ x.from, x.go };
    }
    mt_status status =
        mt_direct_exchange(of(c)->direct, stream, where(c, context, c->rank).to, part);
    free(part);
    return status;
}

static bool is_shared(const mt_comm *c, const void *to)
{
    return of(c)->direct && mt_direct_has(of(c)->direct, to);
}

/* Every rank sends to every other what the two have agreed on: `where` says it for one. */
static mt_status swap(mt_comm *c, mt_stream *stream, bool own, place_of where, const void *context)
{
    const shared *s = of(c)->shared;
    place mine = where(c, context, c->rank);
    if (is_shared(c, mine.to)) {
        if (own && mine.to != mine.from)
            MT_TRY(mt_device_copy_async(stream, mine.to, mine.from, mine.go));
        return swap_directly(c, stream, where, context);
    }
    cudaStream_t cuda = mt_cuda_stream(stream);
    MT_NCCL(s, "ncclGroupStart", s->nccl.GroupStart());
    ncclResult_t code = ncclSuccess;
    for (int turn = own ? 0 : 1; turn < c->size && code == ncclSuccess; turn++) {
        int there = (c->rank + turn) % c->size, back = (c->rank - turn + c->size) % c->size;
        place out = where(c, context, there), in = where(c, context, back);
        if (out.go) code = s->nccl.Send(out.from, out.go, ncclUint8, there, of(c)->comm, cuda);
        if (in.come && code == ncclSuccess)
            code = s->nccl.Recv(in.to, in.come, ncclUint8, back, of(c)->comm, cuda);
    }
    ncclResult_t ended = s->nccl.GroupEnd();
    MT_NCCL(s, "ncclSend, ncclRecv", code);
    MT_NCCL(s, "ncclGroupEnd", ended);
    return MT_OK;
}

struct blocks {
    char *to;
    const char *from;
    size_t bytes;
};

static place block_of(const mt_comm *c, const void *context, int rank)
{
    const struct blocks *b = context;
    (void)c;
    return (place){ b->to + (size_t)rank * b->bytes, b->from + (size_t)rank * b->bytes, b->bytes,
                    b->bytes };
}

static place gathered(const mt_comm *c, const void *context, int rank)
{
    const struct blocks *b = context;
    (void)c;
    return (place){ b->to + (size_t)rank * b->bytes, b->from, b->bytes, b->bytes };
}

static mt_status device_all_gather(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                   size_t bytes)
{
    const shared *s = of(c)->shared;
    const struct blocks blocks = { to, from, bytes };
    MT_TRY(begin(c, stream));
    if (is_shared(c, to))
        MT_TRY(swap(c, stream, true, gathered, &blocks));
    else
        MT_NCCL(s, "ncclAllGather",
                s->nccl.AllGather(from, to, bytes, ncclUint8, of(c)->comm, mt_cuda_stream(stream)));
    return end(c, stream);
}

static mt_status device_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                   size_t block_bytes)
{
    const struct blocks blocks = { to, from, block_bytes };
    MT_TRY(begin(c, stream));
    MT_TRY(swap(c, stream, true, block_of, &blocks));
    return end(c, stream);
}

/* ---- reductions --------------------------------------------------------------------------------
 */

typedef struct reduction {
    const char *from; /* scatter: counts[0] elements for rank 0, and so on; else the same as `to` */
    char *to;
    const int64_t *counts; /* scatter; else NULL */
    int64_t most;          /* elements of the largest part, or of all */
    mt_dtype dtype;
    mt_reduce reduce;
} reduction;

/* Elements [at, at + step) of every part, as far as it goes. */
typedef struct piece {
    const reduction *r;
    int64_t at, step;
    char *into; /* a place of `step` elements for each rank */
} piece;

static int64_t elements_of(const piece *p, int rank)
{
    int64_t left = (p->r->counts ? p->r->counts[rank] : p->r->most) - p->at;
    return left < 0 ? 0 : left < p->step ? left : p->step;
}

/* Where the piece for a rank begins in `from`. */
static const char *part_of(const piece *p, int rank)
{
    int64_t first = p->at;
    for (int r = 0; p->r->counts && r < rank; r++) first += p->r->counts[r];
    return p->r->from + (size_t)first * mt_dtype_size(p->r->dtype);
}

static place piece_of(const mt_comm *c, const void *context, int rank)
{
    const piece *p = context;
    size_t size = mt_dtype_size(p->r->dtype);
    return (place){ p->into + (size_t)rank * (size_t)p->step * size, part_of(p, rank),
                    (size_t)elements_of(p, c->rank) * size, (size_t)elements_of(p, rank) * size };
}

static mt_status nccl_barrier(mt_comm *c);

/* How the ranks of a comm tell each other what only the host knows. */
static mt_status tell(void *context, void *to, const void *from, size_t bytes)
{
    mt_comm *c = context;
    return mt_staged_all_gather(&of(c)->shared->staging, c, to, from, bytes);
}

static mt_status find_direct(mt_comm *c)
{
    nccl *n = of(c);
    mt_device *device = n->shared->device;
    if (n->asked) return MT_OK;
    n->asked = true;
    MT_TRY(mt_direct_create(
        &n->direct,
        &(mt_direct_options){
            .device = device, .rank = c->rank, .size = c->size, .tell = tell, .context = c }));
    if (!n->direct) mt_cuda_spare(device, CTAS + FOLDERS);
    return MT_OK;
}

/* Growing waits for the device, where earlier reductions may still read the old one, and for the
 * others, which have it mapped. */
static mt_status reserve(mt_comm *c, size_t bytes)
{
    nccl *n = of(c);
    mt_device *device = n->shared->device;
    MT_TRY(find_direct(c));
    if (bytes <= n->scratch_bytes) return MT_OK;
    MT_TRY(mt_device_synchronize(device));
    if (n->direct && n->scratch) {
        mt_direct_unshare(n->direct, n->scratch);
        MT_TRY(nccl_barrier(c));
    }
    mt_device_free(device, &n->scratch, n->scratch_bytes, MT_MEMORY_STATE);
    n->scratch_bytes = 0;
    MT_TRY(mt_device_alloc(device, &n->scratch, bytes, MT_MEMORY_STATE));
    n->scratch_bytes = bytes;
    return n->direct ? mt_direct_share(n->direct, n->scratch, bytes) : MT_OK;
}

/* A piece of every rank into one half of the scratch, then added up. */
static mt_status reduce_piece(mt_comm *c, mt_stream *stream, const piece *p, int half)
{
    shared *s = of(c)->shared;
    const reduction *r = p->r;
    size_t size = mt_dtype_size(r->dtype);
    int64_t n = elements_of(p, c->rank);
    struct mt_fold_args fold = { .dtype = r->dtype,
                                 .largest = r->reduce == MT_REDUCE_MAX,
                                 .blocks = c->size,
                                 .apart_block = c->rank,
                                 .count = n,
                                 .stride = r->counts ? p->step : n,
                                 .to = r->to + (size_t)p->at * size,
                                 .from = p->into };
    MT_TRY(mt_event_wait(&s->folded[half], stream));
    if (r->counts) {
        fold.apart = part_of(p, c->rank);
        MT_TRY(swap(c, stream, false, piece_of, p));
    } else {
        MT_NCCL(s, "ncclAllGather",
                s->nccl.AllGather(part_of(p, c->rank), p->into, (size_t)n * size, ncclUint8,
                                  of(c)->comm, mt_cuda_stream(stream)));
    }
    MT_TRY(mt_event_record(&s->came, stream));
    MT_TRY(mt_event_wait(&s->came, &s->folds));
    MT_TRY(mt_cuda_fold(&s->folds, &fold));
    return mt_event_record(&s->folded[half], &s->folds);
}

static mt_status reduce(mt_comm *c, mt_stream *stream, const reduction *r)
{
    static const bool sums[MT_DTYPE_COUNT] = {
        [MT_F64] = true, [MT_F32] = true, [MT_BF16] = true, [MT_I64] = true, [MT_I32] = true
    };
    MT_REQUIRE((unsigned)r->dtype < MT_DTYPE_COUNT && sums[r->dtype], MT_EUNSUPPORTED,
               "comm: %s cannot be reduced", mt_dtype_name(r->dtype));
    shared *s = of(c)->shared;
    int64_t step;
    int halves;
    size_t half_bytes = mt_comm_fold_bytes(&step, &halves, c->size, r->dtype, r->most);
    MT_REQUIRE(step > 0, MT_EUNSUPPORTED, "comm: a reduction over %d ranks", c->size);
    MT_TRY(reserve(c, (size_t)halves * half_bytes));
    MT_TRY(begin(c, stream));
    for (int i = 0; i < HALVES; i++) MT_TRY(mt_event_wait(&s->folded[i], stream));
    int half = 0;
    for (int64_t at = 0; at < r->most; at += step, half = (half + 1) % HALVES) {
        const piece p = { r, at, step, (char *)of(c)->scratch + (size_t)half * half_bytes };
        MT_TRY(reduce_piece(c, stream, &p, half));
    }
    MT_TRY(end(c, stream));
    for (int i = 0; i < halves; i++) MT_TRY(mt_event_wait(&s->folded[i], stream));
    return MT_OK;
}

static mt_status device_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                       const int64_t *counts, mt_dtype dtype, mt_reduce how)
{
    reduction r = { from, to, counts, 0, dtype, how };
    for (int i = 0; i < c->size; i++)
        if (counts[i] > r.most) r.most = counts[i];
    return reduce(c, stream, &r);
}

static mt_status device_all_reduce(mt_comm *c, mt_stream *stream, void *data, int64_t count,
                                   mt_dtype dtype, mt_reduce how)
{
    const reduction r = { data, data, NULL, count, dtype, how };
    return reduce(c, stream, &r);
}

/* ---- the contract ------------------------------------------------------------------------------
 */

static mt_status nccl_all_gather(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 size_t bytes)
{
    if (stream) return device_all_gather(c, stream, to, from, bytes);
    return mt_staged_all_gather(&of(c)->shared->staging, c, to, from, bytes);
}

static mt_status nccl_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                     const int64_t *counts, mt_dtype dtype, mt_reduce how)
{
    if (stream) return device_reduce_scatter(c, stream, to, from, counts, dtype, how);
    return mt_staged_reduce_scatter(&of(c)->shared->staging, c, to, from, counts, dtype, how);
}

static mt_status nccl_all_reduce(mt_comm *c, mt_stream *stream, void *data, int64_t count,
                                 mt_dtype dtype, mt_reduce how)
{
    if (stream) return device_all_reduce(c, stream, data, count, dtype, how);
    return mt_staged_all_reduce(&of(c)->shared->staging, c, data, count, dtype, how);
}

static mt_status nccl_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 size_t block_bytes)
{
    if (stream) return device_all_to_all(c, stream, to, from, block_bytes);
    return mt_staged_all_to_all(&of(c)->shared->staging, c, to, from, block_bytes);
}

static mt_status nccl_broadcast(mt_comm *c, mt_stream *stream, void *data, size_t bytes, int root)
{
    if (stream) return device_broadcast(c, stream, data, bytes, root);
    return mt_staged_broadcast(&of(c)->shared->staging, c, data, bytes, root);
}

static mt_status nccl_share(mt_comm *c, void *memory, size_t bytes)
{
    MT_TRY(find_direct(c));
    return of(c)->direct ? mt_direct_share(of(c)->direct, memory, bytes) : MT_OK;
}

static void nccl_unshare(mt_comm *c, const void *memory)
{
    if (of(c)->direct) mt_direct_unshare(of(c)->direct, memory);
}

static mt_status nccl_barrier(mt_comm *c)
{
    int32_t x = 0;
    return nccl_all_reduce(c, NULL, &x, 1, MT_I32, MT_REDUCE_MAX);
}

/* ---- opening and closing -----------------------------------------------------------------------
 */

static void release_shared(shared *s)
{
    mt_cuda_spare(s->device, 0);
    for (int i = 0; i < HALVES; i++) mt_event_destroy(&s->folded[i]);
    mt_event_destroy(&s->came);
    mt_stream_destroy(&s->folds);
    mt_inflight_destroy(&s->inflight);
    mt_staging_destroy(&s->staging);
    free(s);
}

static void nccl_close(mt_comm *c)
{
    nccl *impl = c->impl;
    shared *s = impl->shared;
    bool world = impl->comm == s->comm;
    (void)mt_device_synchronize(s->device);
    mt_direct_destroy(&impl->direct);
    mt_device_free(s->device, &impl->scratch, impl->scratch_bytes, MT_MEMORY_STATE);
    (void)s->nccl.CommDestroy(impl->comm);
    if (world) release_shared(s);
    free(impl);
    c->impl = NULL;
}

/* What is under way ends without the others, and device memory can be freed. */
static void nccl_give_up(mt_comm *c)
{
    const shared *s = of(c)->shared;
    mt_watch_set_poll(c->watch, NULL, NULL);
    mt_direct_give_up(of(c)->direct);
    (void)s->nccl.CommAbort(s->comm);
}

static mt_status nccl_split(mt_comm *part, const mt_comm *whole, int color)
{
    shared *s = of(whole)->shared;
    nccl *impl = calloc(1, sizeof *impl);
    MT_REQUIRE(impl, MT_ENOMEM, "comm: out of memory");
    impl->shared = s;
    /* Who is in it, in their order there. */
    int *colors = calloc((size_t)whole->size, sizeof *colors);
    mt_status status = colors ? MT_OK : MT_FAIL(MT_ENOMEM, "comm: out of memory");
    if (status == MT_OK) {
        mt_comm asking = *whole;
        status = nccl_all_gather(&asking, NULL, colors, &color, sizeof color);
    }
    for (int r = 0; status == MT_OK && r < whole->size; r++) {
        part->size += colors[r] == color;
        part->rank += r < whole->rank && colors[r] == color;
    }
    free(colors);
    if (status == MT_OK)
        status = check(s, "ncclCommSplit",
                       s->nccl.CommSplit(of(whole)->comm, color, whole->rank, &impl->comm, NULL));
    if (status == MT_OK && part->size == 1) { /* alone: nothing of NCCL is needed */
        (void)s->nccl.CommDestroy(impl->comm);
        part->ops = &mt_comm_self;
    }
    if (status != MT_OK || part->size == 1)
        free(impl);
    else
        part->impl = impl;
    return status;
}

const struct mt_comm_ops mt_comm_nccl = {
    .name = "nccl",
    .split = nccl_split,
    .all_gather = nccl_all_gather,
    .reduce_scatter = nccl_reduce_scatter,
    .all_reduce = nccl_all_reduce,
    .all_to_all = nccl_all_to_all,
    .broadcast = nccl_broadcast,
    .barrier = nccl_barrier,
    .share = nccl_share,
    .unshare = nccl_unshare,
    .give_up = nccl_give_up,
    .close = nccl_close,
};

/* The library stays loaded for the life of the process: its threads may outlive a world. Multicast
 * over NVLink reduces in the switch, which nothing here uses: off, unless the user says otherwise.
 */
static mt_status load(api *f)
{
    int version = 0;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    f->library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    MT_REQUIRE(f->library, MT_EUNSUPPORTED,
               "NCCL is not installed where programs find it (LD_LIBRARY_PATH): %.200s", dlerror());
#define LOAD(name)                                                                                 \
    *(void **)&f->name = dlsym(f->library, "nccl" #name);                                          \
    MT_REQUIRE(f->name, MT_EUNSUPPORTED, "libnccl.so.2 has no nccl" #name);
    FUNCTIONS(LOAD)
#undef LOAD
    MT_REQUIRE(f->GetVersion(&version) == ncclSuccess && version >= OLDEST_VERSION, MT_EUNSUPPORTED,
               "libnccl.so.2 is version %d, at least %d is needed", version, OLDEST_VERSION);
    return MT_OK;
}

static mt_status make_shared(shared **made, mt_device *device)
{
    shared *s = calloc(1, sizeof *s);
    MT_REQUIRE(s, MT_ENOMEM, "comm: out of memory");
    *made = s, s->device = device;
    MT_TRY(load(&s->nccl));
    MT_TRY(mt_inflight_create(&s->inflight, device));
    MT_TRY(mt_staging_create(&s->staging, device));
    MT_TRY(mt_stream_create(&s->folds, device));
    MT_TRY(mt_event_create(&s->came, device));
    for (int i = 0; i < HALVES; i++) MT_TRY(mt_event_create(&s->folded[i], device));
    return MT_OK;
}

/* What rank 0 tells everyone: where its watchdog listens, and the name of the world. */
typedef struct introduction {
    char watch[MT_WATCH_ADDRESS];
    ncclUniqueId id;
} introduction;

/* Everyone meets, the watchdog starts, and under its eyes NCCL connects the GPUs. */
static mt_status connect_world(mt_comm *c, shared *s, const mt_launch *launch,
                               const mt_comm_options *options)
{
    mt_watch_options watch = { .rank = launch->rank,
                               .world = launch->world,
                               .timeout_s = options->timeout_s,
                               .on_fault = options->on_fault,
                               .context = options->context };
    introduction told = { .watch = "" };
    mt_meeting meeting;
    char host[MT_MEETING_HOST], address[MT_WATCH_ADDRESS];
    int listener = -1;
    MT_TRY(mt_launch_meeting(&meeting, launch));
    if (launch->rank == 0) {
        MT_TRY(mt_watch_listen(&listener, told.watch));
        MT_NCCL(s, "ncclGetUniqueId", s->nccl.GetUniqueId(&told.id));
    }
    mt_status status =
        mt_rendezvous(&told, sizeof told, host, launch, &meeting, options->timeout_s);
    if (status != MT_OK) {
        if (listener >= 0) close(listener);
        return status;
    }
    const char *port = strrchr(told.watch, ':');
    snprintf(address, sizeof address, "%.110s%s", host, port ? port : "");
    MT_TRY(mt_watch_start(&c->watch, &watch, listener, address));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = CTAS;
    mt_watch_enter(c->watch, "connect", "NCCL", 0, 0);
    status =
        check(s, "ncclCommInitRankConfig",
              s->nccl.CommInitRankConfig(&s->comm, launch->world, told.id, launch->rank, &config));
    mt_watch_leave(c->watch);
    if (status != MT_OK) return status;
    mt_watch_set_poll(c->watch, poll_world, s);
    return MT_OK;
}

mt_status mt_comm_nccl_open(mt_comm *c, const mt_launch *launch, const mt_comm_options *options)
{
    shared *s = NULL;
    nccl *impl = calloc(1, sizeof *impl);
    mt_status status =
        impl ? make_shared(&s, options->device) : MT_FAIL(MT_ENOMEM, "comm: out of memory");
    if (status == MT_OK) status = connect_world(c, s, launch, options);
    if (status == MT_OK) {
        *impl = (nccl){ .comm = s->comm, .shared = s };
        c->impl = impl, c->ops = &mt_comm_nccl;
        c->rank = launch->rank, c->size = launch->world;
        return MT_OK;
    }
    if (c->watch) mt_watch_fault(c->watch, mt_error_message());
    mt_watch_stop(&c->watch);
    if (s) release_shared(s);
    free(impl);
    return mt_error_pass(status, __FILE__, __LINE__);
}
