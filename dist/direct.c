/* Transfers between GPUs of one host by copy engines. */
#include "dist/direct.h"

#include <stdlib.h>
#include <string.h>

#include "dist/host.h"
#include "kernels/cuda/peer.h"

enum { WINDOWS = 8 }; /* memories shared at a time, the words among them */

/* Memory of this rank that the others write to. */
typedef struct window {
    char *memory;
    size_t bytes;
    void **mapped; /* the same of every rank; this one's NULL */
} window;

struct mt_direct {
    mt_direct_options options;
    void *words;             /* and the room to tell */
    window windows[WINDOWS]; /* memory NULL: none; the first is that of the words */
    uint32_t number;         /* of the last transfer */
};

/* Words of a rank, written by each other rank: the transfer for which its memory is free, and the
 * one that has arrived from it. */
static uint32_t *free_word(char *words, int writer)
{
    return (uint32_t *)(void *)words + writer;
}
static uint32_t *arrived_word(char *words, int writer, int ranks)
{
    return (uint32_t *)(void *)words + ranks + writer;
}

/* ---- windows -----------------------------------------------------------------------------------
 */

static void unmap(mt_direct *d, window *w)
{
    for (int r = 0; w->mapped && r < d->options.size; r++)
        mt_cuda_unmap_memory(d->options.device, w->mapped[r]);
    free(w->mapped);
    *w = (window){ 0 };
}

static const window *window_of(const mt_direct *d, const void *p)
{
    const char *at = p;
    for (int i = 0; i < WINDOWS; i++) {
        const window *w = &d->windows[i];
        if (w->memory && at >= w->memory && at < w->memory + w->bytes) return w;
    }
    return NULL;
}

/* What a rank says of a memory: where it is, and whether it could be exported. */
typedef struct offer {
    mt_host host;
    bool good;
    mt_cuda_export exported;
} offer;

static bool map_all(const mt_direct *d, window *w, const offer *all)
{
    const mt_direct_options *o = &d->options;
    for (int r = 0; r < o->size; r++) {
        const offer *other = &all[r];
        const mt_host *there = &other->host, *here = &all[o->rank].host;
        if (!other->good || strcmp(there->name, here->name) != 0 ||
            strcmp(there->boot, here->boot) != 0)
            return false;
        if (r != o->rank && mt_cuda_map_memory(&w->mapped[r], o->device, &other->exported) != MT_OK)
            return false;
    }
    return true;
}

static mt_status tell(const mt_direct *d, void *to, const void *from, size_t bytes)
{
    const mt_direct_options *o = &d->options;
    return o->tell(o->context, (char *)d->words + MT_DIRECT_BYTES - MT_DIRECT_ROOM, to, from,
                   bytes);
}

/* Whether it is so on every rank. */
static mt_status on_all(const mt_direct *d, bool *all, bool own)
{
    const mt_direct_options *o = &d->options;
    bool *each = calloc((size_t)o->size, sizeof *each);
    MT_REQUIRE(each, MT_ENOMEM, "comm: out of memory");
    mt_status status = tell(d, each, &own, sizeof own);
    *all = status == MT_OK;
    for (int r = 0; r < o->size; r++) *all = *all && each[r];
    free(each);
    return status;
}

/* Opens a window on every rank or on none. */
static mt_status open_window(mt_direct *d, window *w, char *memory, size_t bytes)
{
    const mt_direct_options *o = &d->options;
    bool opened = false;
    offer own = { .good = false }, *all = calloc((size_t)o->size, sizeof *all);
    *w = (window){ memory, bytes, calloc((size_t)o->size, sizeof *w->mapped) };
    mt_status status = all && w->mapped ? MT_OK : MT_FAIL(MT_ENOMEM, "comm: out of memory");
    if (status == MT_OK) {
        const char *disabled = getenv("NCCL_P2P_DISABLE");
        mt_host_here(&own.host);
        own.good = bytes >= MT_DIRECT_BYTES && (!disabled || !atoi(disabled)) &&
                   mt_cuda_export_memory(&own.exported, o->device, memory) == MT_OK;
        status = tell(d, all, &own, sizeof own);
    }
    if (status == MT_OK) status = on_all(d, &opened, map_all(d, w, all));
    free(all);
    if (status != MT_OK || !opened) unmap(d, w);
    return status;
}

mt_status mt_direct_share(mt_direct *d, void *memory, size_t bytes)
{
    for (int i = 0; i < WINDOWS; i++)
        if (!d->windows[i].memory) return open_window(d, &d->windows[i], memory, bytes);
    return MT_OK;
}

void mt_direct_unshare(mt_direct *d, const void *memory)
{
    for (int i = 1; i < WINDOWS; i++)
        if (memory && d->windows[i].memory == memory) unmap(d, &d->windows[i]);
}

mt_status mt_direct_barrier(mt_direct *d)
{
    bool all;
    return on_all(d, &all, true);
}

bool mt_direct_has(const mt_direct *d, const void *p)
{
    return window_of(d, p) != NULL;
}

/* ---- transfers ---------------------------------------------------------------------------------
 */

static mt_status send_to(const mt_direct *d, mt_stream *stream, int rank,
                         const mt_direct_part *part, int count)
{
    for (int i = 0; i < count; i++) {
        const mt_direct_part *x = &part[i];
        if ((x->rank != rank && x->rank != MT_DIRECT_ALL) || !x->bytes) continue;
        const window *w = window_of(d, x->to);
        char *memory = rank == d->options.rank ? w->memory : w->mapped[rank];
        MT_TRY(
            mt_device_copy_async(stream, memory + ((char *)x->to - w->memory), x->from, x->bytes));
    }
    return MT_OK;
}

mt_status mt_direct_exchange(mt_direct *d, mt_stream *stream, const mt_direct_part *part, int count)
{
    const window *words = &d->windows[0];
    int rank = d->options.rank, size = d->options.size;
    uint32_t number = ++d->number;
    for (int turn = 1; turn < size; turn++)
        MT_TRY(mt_cuda_post(stream, free_word(words->mapped[(rank + turn) % size], rank), number));
    for (int turn = 1; turn < size; turn++) {
        int r = (rank + turn) % size;
        MT_TRY(mt_cuda_await(stream, free_word(words->memory, r), number));
        MT_TRY(send_to(d, stream, r, part, count));
        MT_TRY(mt_cuda_post(stream, arrived_word(words->mapped[r], rank, size), number));
    }
    MT_TRY(send_to(d, stream, rank, part, count));
    for (int turn = 1; turn < size; turn++)
        MT_TRY(
            mt_cuda_await(stream, arrived_word(words->memory, (rank + turn) % size, size), number));
    return MT_OK;
}

/* ---- opening and closing -----------------------------------------------------------------------
 */

mt_status mt_direct_create(mt_direct **direct, const mt_direct_options *options)
{
    *direct = NULL;
    /* Too many to tell each other of their memory are not on one host either. */
    if ((size_t)options->size + 1 > MT_DIRECT_ROOM / sizeof(offer)) return MT_OK;
    mt_direct *d = calloc(1, sizeof *d);
    MT_REQUIRE(d, MT_ENOMEM, "comm: out of memory");
    d->options = *options;
    mt_status status =
        mt_device_alloc(options->device, &d->words, MT_DIRECT_BYTES, MT_MEMORY_STATE);
    if (status == MT_OK) status = mt_device_zero(options->device, d->words, MT_DIRECT_BYTES);
    if (status == MT_OK) status = mt_device_synchronize(options->device);
    if (status == MT_OK) status = open_window(d, &d->windows[0], d->words, MT_DIRECT_BYTES);
    if (status == MT_OK && d->windows[0].memory)
        *direct = d;
    else
        mt_direct_destroy(&d);
    return status;
}

void mt_direct_destroy(mt_direct **direct)
{
    mt_direct *d = *direct;
    if (!d) return;
    for (int i = 0; i < WINDOWS; i++) unmap(d, &d->windows[i]);
    mt_device_free(d->options.device, &d->words, MT_DIRECT_BYTES, MT_MEMORY_STATE);
    free(d);
    *direct = NULL;
}

void mt_direct_give_up(mt_direct *d)
{
    mt_stream stream;
    if (!d || mt_stream_create(&stream, d->options.device) != MT_OK) return;
    for (int i = 0; i < 2 * d->options.size; i++)
        (void)mt_cuda_post(&stream, free_word(d->windows[0].memory, i), d->number);
    mt_stream_destroy(&stream);
}
