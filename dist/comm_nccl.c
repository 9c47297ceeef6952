/* GPUs over NCCL, which is loaded when a world is opened. NCCL moves bytes and nothing else: sums
 * are made here, in the order of the ranks, so that no choice of NCCL's (algorithm, protocol,
 * channels) changes a bit.
 *
 * Collectives begin in the order in which they are called and run one after another, whatever
 * streams they are in. A reduction goes through scratch in pieces of two halves: while one is added
 * up, in a stream of its own, the next piece comes in. What comes into memory that the ranks share
 * is moved by copy engines instead (dist/direct.h). */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dist/comm_nccl_priv.h"
#include "dist/rendezvous.h"
#include "kernels/cuda/fold.h"

enum {
    OLDEST_VERSION = 21800,
    /* Where no copy engine moves: of NCCL, each of which takes a multiprocessor to itself, and
       multiprocessors that add up beside them. */
    CTAS = 24,
    FOLDERS = 8
};

/* From now on its errors are asked for, or no more: before the others may have closed it. */
static void ask(mt_nccl *n)
{
    pthread_mutex_lock(&n->shared->lock);
    n->next = n->shared->asked, n->shared->asked = n;
    pthread_mutex_unlock(&n->shared->lock);
}

static void ask_no_more(const mt_nccl *n)
{
    pthread_mutex_lock(&n->shared->lock);
    mt_nccl **at = &n->shared->asked;
    while (*at && *at != n) at = &(*at)->next;
    if (*at) *at = n->next;
    pthread_mutex_unlock(&n->shared->lock);
}

/* What NCCL has met beside the calls. A part's threads and connections are its own: of their errors
 * the world's comm does not know. */
static mt_status find_failure(mt_nccl_shared *s)
{
    mt_status status = MT_OK;
    pthread_mutex_lock(&s->lock);
    for (const mt_nccl *n = s->asked; n && status == MT_OK; n = n->next) {
        ncclResult_t code = ncclSuccess;
        if (s->nccl.CommGetAsyncError(n->comm, &code) == ncclSuccess)
            status = mt_nccl_check(s, "moving data", code);
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

/* The watchdog's question. */
static bool poll_world(void *context, mt_watch_pending *oldest, char failure[MT_WATCH_TEXT])
{
    mt_nccl_shared *s = context;
    bool any;
    mt_status status = mt_inflight_oldest(s->inflight, oldest, &any);
    if (status == MT_OK) status = find_failure(s);
    if (status != MT_OK) snprintf(failure, MT_WATCH_TEXT, "%.500s", mt_error_message());
    return status == MT_OK && any;
}

/* ---- the contract ------------------------------------------------------------------------------
 */

static mt_status nccl_all_gather(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 size_t bytes)
{
    if (stream) return mt_nccl_all_gather(c, stream, to, from, bytes);
    return mt_staged_all_gather(&mt_nccl_of(c)->shared->staging, c, to, from, bytes);
}

static mt_status nccl_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                     const mt_comm_parts *parts, mt_dtype dtype, mt_reduce how)
{
    if (stream) return mt_nccl_reduce_scatter(c, stream, to, from, parts, dtype, how);
    return mt_staged_reduce_scatter(&mt_nccl_of(c)->shared->staging, c, to, from, parts, dtype,
                                    how);
}

static mt_status nccl_all_reduce(mt_comm *c, mt_stream *stream, void *data, int64_t count,
                                 mt_dtype dtype, mt_reduce how)
{
    if (stream) return mt_nccl_all_reduce(c, stream, data, count, dtype, how);
    return mt_staged_all_reduce(&mt_nccl_of(c)->shared->staging, c, data, count, dtype, how);
}

static mt_status nccl_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 size_t block_bytes)
{
    if (stream) return mt_nccl_all_to_all(c, stream, to, from, block_bytes);
    return mt_staged_all_to_all(&mt_nccl_of(c)->shared->staging, c, to, from, block_bytes);
}

static mt_status nccl_broadcast(mt_comm *c, mt_stream *stream, void *data, size_t bytes, int root)
{
    if (stream) return mt_nccl_broadcast(c, stream, data, bytes, root);
    return mt_staged_broadcast(&mt_nccl_of(c)->shared->staging, c, data, bytes, root);
}

static mt_status nccl_share(mt_comm *c, void *memory, size_t bytes)
{
    return mt_nccl_of(c)->direct ? mt_direct_share(mt_nccl_of(c)->direct, memory, bytes) : MT_OK;
}

static void nccl_unshare(mt_comm *c, const void *memory)
{
    if (mt_nccl_of(c)->direct) mt_direct_unshare(mt_nccl_of(c)->direct, memory);
}

static mt_status nccl_barrier(mt_comm *c)
{
    int32_t x = 0;
    return nccl_all_reduce(c, NULL, &x, 1, MT_I32, MT_REDUCE_MAX);
}

/* ---- opening and closing -----------------------------------------------------------------------
 */

/* How the ranks of a comm tell each other what only the host knows. */
static mt_status tell(void *context, void *room, void *to, const void *from, size_t bytes)
{
    mt_comm *c = context;
    mt_stream *stream = &mt_nccl_of(c)->shared->staging.stream;
    char *own = (char *)room + (size_t)c->size * bytes;
    MT_TRY(mt_device_copy_async(stream, own, from, bytes));
    MT_TRY(mt_nccl_all_gather(c, stream, room, own, bytes));
    MT_TRY(mt_device_copy_async(stream, to, room, (size_t)c->size * bytes));
    return mt_stream_synchronize(stream);
}

/* What the ranks of a comm have beside NCCL's. What is left to NCCL wants multiprocessors of its
 * own. */
static mt_status equip(mt_comm *c)
{
    mt_nccl *n = mt_nccl_of(c);
    const mt_direct_options options = {
        .device = n->shared->device, .rank = c->rank, .size = c->size, .tell = tell, .context = c
    };
    for (int i = 0; i < 2; i++) MT_TRY(mt_event_create(&n->folded[i], n->shared->device));
    MT_TRY(mt_direct_create(&n->direct, &options));
    if (!n->direct) mt_cuda_spare(n->shared->device, CTAS + FOLDERS);
    return MT_OK;
}

static void release_shared(mt_nccl_shared *s)
{
    mt_cuda_spare(s->device, 0);
    mt_event_destroy(&s->came);
    mt_stream_destroy(&s->folds);
    mt_inflight_destroy(&s->inflight);
    mt_staging_destroy(&s->staging);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* The error that stands may be the reason. */
static void strip(mt_nccl *n)
{
    mt_device *device = n->shared->device;
    mt_error_kept before;
    mt_error_keep(&before);
    (void)mt_device_synchronize(device);
    mt_error_put_back(&before);
    ask_no_more(n);
    mt_direct_destroy(&n->direct);
    mt_device_free(device, &n->scratch, n->scratch_bytes, MT_MEMORY_STATE);
    for (int i = 0; i < 2; i++) mt_event_destroy(&n->folded[i]);
}

static void nccl_retire(mt_comm *part)
{
    strip(mt_nccl_of(part));
}

/* NCCL may wait for the other ranks of this host. */
static void nccl_close(mt_comm *c)
{
    mt_nccl *impl = c->impl;
    mt_nccl_shared *s = impl->shared;
    bool world = impl->comm == s->comm;
    if (world) strip(impl);
    (void)s->nccl.CommDestroy(impl->comm);
    if (world) release_shared(s);
    free(impl);
    c->impl = NULL;
}

/* What is under way ends without the others, and device memory can be freed. NCCL frees some itself
 * before it returns, and waits for the device: all are told to end before any is waited for. */
static void nccl_give_up(mt_comm *world)
{
    const mt_nccl_shared *s = mt_nccl_of(world)->shared;
    mt_watch_set_poll(world->watch, NULL, NULL);
    mt_direct_give_up(mt_nccl_of(world)->direct);
    for (mt_comm *part = world->parts; part; part = part->next)
        mt_direct_give_up(mt_nccl_of(part)->direct);
    (void)s->nccl.GroupStart();
    for (mt_comm *part = world->parts; part; part = part->next)
        (void)s->nccl.CommAbort(mt_nccl_of(part)->comm);
    (void)s->nccl.CommAbort(s->comm);
    (void)s->nccl.GroupEnd();
}

static mt_status nccl_split(mt_comm *part, const mt_comm *whole, int color)
{
    mt_nccl_shared *s = mt_nccl_of(whole)->shared;
    mt_nccl *impl = calloc(1, sizeof *impl);
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
        status = mt_nccl_check(
            s, "ncclCommSplit",
            s->nccl.CommSplit(mt_nccl_of(whole)->comm, color, whole->rank, &impl->comm, NULL));
    part->impl = impl;
    bool alone = status == MT_OK && part->size == 1; /* nothing of NCCL is needed */
    if (status == MT_OK && !alone) {
        ask(impl);
        status = equip(part);
        if (status == MT_OK) return MT_OK;
    }
    strip(impl);
    if (impl->comm) /* one that has failed does not wait for the others */
        (void)(alone ? s->nccl.CommDestroy(impl->comm) : s->nccl.CommAbort(impl->comm));
    free(impl);
    part->impl = NULL;
    if (alone) part->ops = &mt_comm_self;
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
    .reaches = mt_nccl_reaches,
    .spread = mt_nccl_spread,
    .give_up = nccl_give_up,
    .retire = nccl_retire,
    .close = nccl_close,
};

/* The library stays loaded for the life of the process: its threads may outlive a world. Multicast
 * over NVLink reduces in the switch, which nothing here uses: off, unless the user says otherwise.
 */
static mt_status load(mt_nccl_api *f)
{
    int version = 0;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    f->library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    MT_REQUIRE(f->library, MT_EUNSUPPORTED,
               "NCCL is not installed where programs find it (LD_LIBRARY_PATH): %.200s", dlerror());
#define LOAD(name)                                                                                 \
    *(void **)&f->name = dlsym(f->library, "nccl" #name);                                          \
    MT_REQUIRE(f->name, MT_EUNSUPPORTED, "libnccl.so.2 has no nccl" #name);
    MT_NCCL_FUNCTIONS(LOAD)
#undef LOAD
    MT_REQUIRE(f->GetVersion(&version) == ncclSuccess && version >= OLDEST_VERSION, MT_EUNSUPPORTED,
               "libnccl.so.2 is version %d, at least %d is needed", version, OLDEST_VERSION);
    return MT_OK;
}

static mt_status make_shared(mt_nccl_shared **made, mt_device *device)
{
    mt_nccl_shared *s = calloc(1, sizeof *s);
    MT_REQUIRE(s, MT_ENOMEM, "comm: out of memory");
    *made = s, s->device = device;
    pthread_mutex_init(&s->lock, NULL);
    MT_TRY(load(&s->nccl));
    MT_TRY(mt_inflight_create(&s->inflight, device));
    MT_TRY(mt_staging_create(&s->staging, device));
    MT_TRY(mt_stream_create(&s->folds, device));
    MT_TRY(mt_event_create(&s->came, device));
    return MT_OK;
}

/* What rank 0 tells everyone: where its watchdog listens, and the name of the world. */
typedef struct introduction {
    char watch[MT_HOST_ADDRESS];
    ncclUniqueId id;
} introduction;

/* Everyone meets, the watchdog starts, and under its eyes NCCL connects the GPUs. */
static mt_status connect_world(mt_comm *c, mt_nccl_shared *s, const mt_launch *launch,
                               const mt_comm_options *options)
{
    mt_watch_options watch = { .rank = launch->rank,
                               .world = launch->world,
                               .timeout_s = options->timeout_s,
                               .on_fault = options->on_fault,
                               .context = options->context };
    introduction told = { .watch = "" };
    mt_meeting meeting;
    char host[MT_MEETING_HOST], own_name[MT_HOST_NAME], address[MT_HOST_ADDRESS];
    const char *boot;
    int listener = -1, port;
    MT_TRY(mt_launch_meeting(&meeting, launch));
    if (launch->rank == 0) {
        MT_NCCL(s, "ncclGetUniqueId", s->nccl.GetUniqueId(&told.id));
        MT_TRY(mt_watch_listen(&listener, told.watch));
    }
    mt_status status =
        mt_rendezvous(&told, sizeof told, host, launch, &meeting, options->timeout_s);
    if (status != MT_OK) {
        if (listener >= 0) close(listener);
        return status;
    }
    MT_TRY(mt_host_parts(own_name, &port, &boot, told.watch)); /* a name that rank 0 has itself */
    mt_host_address(address, host, port, boot);
    MT_TRY(mt_watch_start(&c->watch, &watch, listener, address));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = CTAS;
    mt_watch_enter(c->watch, "connect", "NCCL", 0, 0);
    status = mt_nccl_check(
        s, "ncclCommInitRankConfig",
        s->nccl.CommInitRankConfig(&s->comm, launch->world, told.id, launch->rank, &config));
    mt_watch_leave(c->watch);
    if (status != MT_OK) return status;
    mt_watch_set_poll(c->watch, poll_world, s);
    return MT_OK;
}

mt_status mt_comm_nccl_open(mt_comm *c, const mt_launch *launch, const mt_comm_options *options)
{
    mt_nccl_shared *s = NULL;
    mt_nccl *impl = calloc(1, sizeof *impl);
    mt_status status =
        impl ? make_shared(&s, options->device) : MT_FAIL(MT_ENOMEM, "comm: out of memory");
    if (status == MT_OK) status = connect_world(c, s, launch, options);
    if (status == MT_OK) {
        *impl = (mt_nccl){ .comm = s->comm, .shared = s };
        c->impl = impl, c->ops = &mt_comm_nccl;
        c->rank = launch->rank, c->size = launch->world;
        ask(impl);
        status = equip(c);
        if (status == MT_OK) return MT_OK;
        strip(impl);
    }
    c->impl = NULL;
    if (c->watch) mt_watch_fault(c->watch, mt_error_message());
    mt_watch_stop(&c->watch);
    if (s) release_shared(s);
    free(impl);
    return mt_error_pass(status, __FILE__, __LINE__);
}
