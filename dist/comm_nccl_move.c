/* How bytes move between GPUs, and how they are added up: over NCCL, or by copy engines into memory
 * that the ranks share (dist/direct.h). */
#include <stdlib.h>

#include "dist/comm_nccl_priv.h"
#include "kernels/cuda/backend.h"
#include "kernels/cuda/fold.h"

mt_status mt_nccl_check(const mt_nccl_shared *s, const char *doing, ncclResult_t code)
{
    if (code == ncclSuccess || code == ncclInProgress) return MT_OK;
    const char *why = s->nccl.GetLastError(NULL);
    return MT_FAIL(MT_EDEVICE, "NCCL: %s: %s%s%.300s", doing, s->nccl.GetErrorString(code),
                   why && *why ? ": " : "", why ? why : "");
}

/* ---- begin and end of a transfer ---------------------------------------------------------------
 */

static mt_status begin(mt_comm *c, mt_stream *stream)
{
    return mt_inflight_follow(mt_nccl_of(c)->shared->inflight, stream);
}

/* The stream has been given all of it. */
static mt_status end(mt_comm *c, mt_stream *stream)
{
    const mt_watch_pending call = { .sequence = mt_watch_sequence(c->watch),
                                    .bytes = c->call.bytes,
                                    .group = c->group,
                                    .op = c->call.op,
                                    .what = c->call.what };
    return mt_inflight_add(mt_nccl_of(c)->shared->inflight, stream, &call);
}

/* ---- moving ------------------------------------------------------------------------------------
 */

mt_status mt_nccl_broadcast(mt_comm *c, mt_stream *stream, void *data, size_t bytes, int root)
{
    const mt_nccl_shared *s = mt_nccl_of(c)->shared;
    MT_TRY(begin(c, stream));
    MT_NCCL(s, "ncclBroadcast",
            s->nccl.Broadcast(data, data, bytes, ncclUint8, root, mt_nccl_of(c)->comm,
                              mt_cuda_stream(stream)));
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
static mt_status swap_directly(mt_comm *c, mt_stream *stream, bool own, place_of where,
                               const void *context)
{
    place mine = where(c, context, c->rank);
    mt_direct_part *part = calloc((size_t)c->size, sizeof *part);
    MT_REQUIRE(part, MT_ENOMEM, "comm: out of memory");
    for (int r = 0; r < c->size; r++) {
        place x = where(c, context, r);
        bool goes = r != c->rank || (own && mine.to != mine.from);
        part[r] = (mt_direct_part){ r, mine.to, x.from, goes ? x.go : 0 };
    }
    mt_status status = mt_direct_exchange(mt_nccl_of(c)->direct, stream, part, c->size);
    free(part);
    return status;
}

static bool is_shared(const mt_comm *c, const void *to)
{
    return mt_nccl_of(c)->direct && mt_direct_has(mt_nccl_of(c)->direct, to);
}

bool mt_nccl_reaches(const mt_comm *c, const void *memory, size_t bytes)
{
    return is_shared(c, memory) && (!bytes || is_shared(c, (const char *)memory + bytes - 1));
}

mt_status mt_nccl_spread(mt_comm *c, mt_stream *stream, const mt_comm_run *runs, int count)
{
    mt_direct_part *part = calloc((size_t)count + 1, sizeof *part);
    MT_REQUIRE(part, MT_ENOMEM, "comm: out of memory");
    mt_status status = begin(c, stream);
    for (int i = 0; status == MT_OK && i < count; i++) {
        part[i] = (mt_direct_part){ MT_DIRECT_ALL, runs[i].to, runs[i].from, runs[i].bytes };
        if (!mt_nccl_reaches(c, runs[i].to, runs[i].bytes))
            status = MT_FAIL(MT_EINVAL, "spread (%s): run %d goes to memory that is not shared",
                             c->call.what, i);
    }
    if (status == MT_OK) status = mt_direct_exchange(mt_nccl_of(c)->direct, stream, part, count);
    free(part);
    return status == MT_OK ? end(c, stream) : status;
}

/* Every rank sends to every other what the two have agreed on: `where` says it for one. */
static mt_status swap(mt_comm *c, mt_stream *stream, bool own, place_of where, const void *context)
{
    const mt_nccl_shared *s = mt_nccl_of(c)->shared;
    if (is_shared(c, where(c, context, c->rank).to))
        return swap_directly(c, stream, own, where, context);
    cudaStream_t cuda = mt_cuda_stream(stream);
    MT_NCCL(s, "ncclGroupStart", s->nccl.GroupStart());
    ncclResult_t code = ncclSuccess;
    for (int turn = own ? 0 : 1; turn < c->size && code == ncclSuccess; turn++) {
        int there = (c->rank + turn) % c->size, back = (c->rank - turn + c->size) % c->size;
        place out = where(c, context, there), in = where(c, context, back);
        if (out.go)
            code = s->nccl.Send(out.from, out.go, ncclUint8, there, mt_nccl_of(c)->comm, cuda);
        if (in.come && code == ncclSuccess)
            code = s->nccl.Recv(in.to, in.come, ncclUint8, back, mt_nccl_of(c)->comm, cuda);
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

mt_status mt_nccl_all_gather(mt_comm *c, mt_stream *stream, void *to, const void *from,
                             size_t bytes)
{
    const mt_nccl_shared *s = mt_nccl_of(c)->shared;
    const struct blocks blocks = { to, from, bytes };
    MT_TRY(begin(c, stream));
    if (is_shared(c, to))
        MT_TRY(swap(c, stream, true, gathered, &blocks));
    else
        MT_NCCL(s, "ncclAllGather",
                s->nccl.AllGather(from, to, bytes, ncclUint8, mt_nccl_of(c)->comm,
                                  mt_cuda_stream(stream)));
    return end(c, stream);
}

mt_status mt_nccl_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
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
    const char *from; /* scatter: one part after another; else the same as `to` */
    char *to;
    const mt_comm_parts *parts; /* scatter; else NULL */
    int64_t first, end;         /* elements of each part, or of all */
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
    int64_t left = p->r->end - p->at;
    if (p->r->parts) return mt_comm_part_count(p->r->parts, rank, p->at, p->step);
    return left < p->step ? left : p->step;
}

/* Where the piece for a rank begins in `from`. */
static const char *part_of(const piece *p, int rank)
{
    int64_t first = p->at;
    for (int r = 0; p->r->parts && r < rank; r++) first += p->r->parts->counts[r];
    return p->r->from + (size_t)first * mt_dtype_size(p->r->dtype);
}

static place piece_of(const mt_comm *c, const void *context, int rank)
{
    const piece *p = context;
    size_t size = mt_dtype_size(p->r->dtype);
    return (place){ p->into + (size_t)rank * (size_t)p->step * size, part_of(p, rank),
                    (size_t)elements_of(p, c->rank) * size, (size_t)elements_of(p, rank) * size };
}

/* Growing waits for the device, where earlier reductions may still read the old one, and for the
 * others, which have it mapped. */
static mt_status reserve(mt_comm *c, size_t bytes)
{
    mt_nccl *n = mt_nccl_of(c);
    mt_device *device = n->shared->device;
    if (bytes <= n->scratch_bytes) return MT_OK;
    MT_TRY(mt_device_synchronize(device));
    if (n->direct && n->scratch) {
        mt_direct_unshare(n->direct, n->scratch);
        MT_TRY(mt_direct_barrier(n->direct));
    }
    mt_device_free(device, &n->scratch, n->scratch_bytes, MT_MEMORY_STATE);
    n->scratch_bytes = 0;
    MT_TRY(mt_device_alloc(device, &n->scratch, bytes, MT_MEMORY_STATE));
    n->scratch_bytes = bytes;
    return n->direct ? mt_direct_share(n->direct, n->scratch, bytes) : MT_OK;
}

/* A piece of every rank into one half of the scratch, then added up. */
static mt_status reduce_piece(mt_comm *c, mt_stream *stream, const piece *p, mt_event *folded)
{
    mt_nccl_shared *s = mt_nccl_of(c)->shared;
    const reduction *r = p->r;
    size_t size = mt_dtype_size(r->dtype);
    int64_t n = elements_of(p, c->rank);
    struct mt_fold_args fold = { .dtype = r->dtype,
                                 .largest = r->reduce == MT_REDUCE_MAX,
                                 .blocks = c->size,
                                 .apart_block = c->rank,
                                 .count = n,
                                 .stride = r->parts ? p->step : n,
                                 .to = r->to + (size_t)p->at * size,
                                 .from = p->into };
    MT_TRY(mt_event_wait(folded, stream));
    if (r->parts) {
        fold.apart = part_of(p, c->rank);
        MT_TRY(swap(c, stream, false, piece_of, p));
    } else {
        MT_NCCL(s, "ncclAllGather",
                s->nccl.AllGather(part_of(p, c->rank), p->into, (size_t)n * size, ncclUint8,
                                  mt_nccl_of(c)->comm, mt_cuda_stream(stream)));
    }
    MT_TRY(mt_event_record(&s->came, stream));
    MT_TRY(mt_event_wait(&s->came, &s->folds));
    MT_TRY(mt_cuda_fold(&s->folds, &fold));
    return mt_event_record(folded, &s->folds);
}

/* What comes in for the next reduction, in another stream, need not wait until this one is added
 * up. */
static mt_status reduce(mt_comm *c, mt_stream *stream, const reduction *r)
{
    static const bool sums[MT_DTYPE_COUNT] = {
        [MT_F64] = true, [MT_F32] = true, [MT_BF16] = true, [MT_I64] = true, [MT_I32] = true
    };
    MT_REQUIRE((unsigned)r->dtype < MT_DTYPE_COUNT && sums[r->dtype], MT_EUNSUPPORTED,
               "comm: %s cannot be reduced", mt_dtype_name(r->dtype));
    mt_nccl *n = mt_nccl_of(c);
    int64_t step;
    size_t half_bytes = mt_comm_half_bytes(&step, c->size, r->dtype, r->end - r->first);
    MT_REQUIRE(step > 0, MT_EUNSUPPORTED, "comm: a reduction over %d ranks", c->size);
    MT_TRY(reserve(c, 2 * half_bytes));
    MT_TRY(begin(c, stream));
    for (int64_t at = r->first; at < r->end; at += step, n->half = !n->half) {
        char *into = (char *)n->scratch + (n->half ? n->scratch_bytes / 2 : 0);
        MT_TRY(reduce_piece(c, stream, &(const piece){ r, at, step, into }, &n->folded[n->half]));
    }
    MT_TRY(end(c, stream));
    for (int i = 0; i < 2; i++) MT_TRY(mt_event_wait(&n->folded[i], stream));
    return MT_OK;
}

mt_status mt_nccl_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                 const mt_comm_parts *parts, mt_dtype dtype, mt_reduce how)
{
    const reduction r = { from, to, parts, parts->first, parts->end, dtype, how };
    return reduce(c, stream, &r);
}

mt_status mt_nccl_all_reduce(mt_comm *c, mt_stream *stream, void *data, int64_t count,
                             mt_dtype dtype, mt_reduce how)
{
    const reduction r = { data, data, NULL, 0, count, dtype, how };
    return reduce(c, stream, &r);
}
