/* Sharded weights: gathering units when they are needed, reducing gradients when they are final. */
#include "dist/fsdp.h"

#include <stdio.h>
#include <stdlib.h>

#include "dist/fsdp_priv.h"

enum { HERE = 3 }; /* units here at a time: the one in use, and the next two */

static const char *const pass_names[MT_DIR_COUNT] = { "forward", "backward" };

/* ---- gathering ---------------------------------------------------------------------------------
 */

/* "model.layers.3.input_layernorm, forward": the unit by its first param. */
static void wire_label(char text[64], const mt_fsdp *f, int64_t wire)
{
    mt_unit u = mt_param_store_unit(f->store, wire / MT_DIR_COUNT);
    snprintf(text, 64, "%.48s, %s", mt_param_store_get(f->store, u.first)->name,
             pass_names[wire % MT_DIR_COUNT]);
}

/* The slot to fill: the wire's own where all are kept, else the one used longest ago. */
static mt_copy_slot *choose_slot(mt_fsdp *f, int64_t wire)
{
    if (f->options.keep_gathered) return &f->slots[wire];
    mt_copy_slot *oldest = &f->slots[0];
    for (int64_t i = 1; i < f->slot_count; i++)
        if (f->slots[i].used < oldest->used) oldest = &f->slots[i];
    return oldest;
}

/* Begins when the passes are done with what the slot has held, and the own wires are written: with
 * all that they were given until now. */
static mt_status gather(mt_fsdp *f, int64_t wire)
{
    mt_wire *w = &f->wire[wire];
    mt_copy_slot *slot = choose_slot(f, wire);
    char label[64];
    mt_fsdp_evict(f, slot);
    wire_label(label, f, wire);
    MT_TRY(mt_event_record(&f->asked, &f->stream));
    MT_TRY(mt_event_wait(&f->asked, &f->gathering));
    mt_fsdp_place(f, wire, slot->memory);
    MT_TRY(mt_fsdp_fetch(f, wire, label));
    /* A pass may be reading the masters that came with the other direction: these are not here yet.
     */
    const mt_wire *other = &f->wire[wire ^ 1];
    if (other->slot >= 0) mt_fsdp_place(f, wire ^ 1, f->slots[other->slot].memory);
    MT_TRY(mt_event_record(&slot->ready, &f->gathering));
    MT_TRY(mt_event_record(&f->gathered, &f->gathering));
    slot->wire = wire, slot->used = ++f->clock, slot->joined = false;
    w->slot = (int)(slot - f->slots);
    f->counts.gathers++;
    f->counts.gathered_bytes += (int64_t)w->bytes * (mt_fsdp_ranks(f, wire / MT_DIR_COUNT) - 1);
    return MT_OK;
}

static int32_t *after(const mt_fsdp *f, int64_t previous, int64_t wire)
{
    return &f->next[(previous + 1) * f->wires + wire];
}

/* The wire that came after those two the last time; -1: unknown, or after the last pass of a step,
 * when weights change. */
static int64_t next_of(const mt_fsdp *f, int64_t previous, int64_t wire)
{
    bool last = f->last_pass && previous == f->end[0] && wire == f->end[1];
    return last ? -1 : *after(f, previous, wire);
}

/* Fetches so many wires from this one on, in the order in which they are needed, as far as they are
 * written. Those that are here shall not be the ones to go. */
static mt_status fetch_ahead(mt_fsdp *f, int64_t previous, int64_t wire, int64_t count)
{
    for (; count > 0 && wire >= 0 && f->written[wire / MT_DIR_COUNT]; count--) {
        const mt_wire *w = &f->wire[wire];
        if (w->slot >= 0) f->slots[w->slot].used = ++f->clock;
        if (w->slot < 0 && w->bytes) {
            f->counts.ahead++;
            MT_TRY(gather(f, wire));
        }
        int64_t next = next_of(f, previous, wire);
        previous = wire, wire = next;
    }
    return MT_OK;
}

/* Learns the order in which wires are needed, and fetches those that came next the last time. */
static mt_status go_on(mt_fsdp *f, int64_t wire)
{
    if (f->current >= 0)
        *after(f, f->previous, f->current) = (int32_t)wire;
    else
        f->start = wire;
    f->previous = f->current, f->current = wire;
    return fetch_ahead(f, wire, next_of(f, f->previous, wire), f->slot_count - 1);
}

mt_status mt_fsdp_start(mt_fsdp *f)
{
    return fetch_ahead(f, -1, f->start, f->slot_count);
}

static mt_status need(void *context, mt_param *param, mt_dir dir)
{
    mt_fsdp *f = context;
    int64_t wire = mt_wire_of(param->unit, f->single[param->unit] ? MT_ROW : dir);
    mt_wire *w = &f->wire[wire];
    if (w->slot < 0) MT_TRY(gather(f, wire));
    mt_copy_slot *slot = &f->slots[w->slot];
    if (!slot->joined) MT_TRY(mt_event_wait(&slot->ready, &f->stream));
    slot->joined = true, slot->used = ++f->clock;
    return wire == f->current ? MT_OK : go_on(f, wire);
}

/* ---- gradients ---------------------------------------------------------------------------------
 */

static mt_dtype wire_dtype(const mt_fsdp *f, const mt_param *p)
{
    return f->options.reduce_bf16 ? MT_BF16 : p->dtype;
}

/* Gradients [first, first + count) of a param to their place in the outbox. */
static mt_status send_gradients(mt_fsdp *f, const mt_param *p, mt_piece piece, char *to)
{
    mt_dtype wire = wire_dtype(f, p);
    size_t size = mt_dtype_size(p->grad_dtype);
    const char *from = (const char *)p->grad + (size_t)piece.first * size;
    if (wire == p->grad_dtype)
        return mt_device_copy_async(&f->reducing[0], to, from, (size_t)piece.count * size);
    return mt_cast(
        &f->reducing[0],
        &(struct mt_cast_args){
            .dtype = wire, .count = piece.count, .y = to, .x = from, .x_dtype = p->grad_dtype });
}

/* A unit's gradients, whole on every rank, into the order of the shards: rank after rank, with
 * zeros between params. */
static mt_status sort_gradients(mt_fsdp *f, const mt_unit *u, size_t size)
{
    for (int r = 0; r < u->ranks; r++) {
        char *to = (char *)f->outbox + (size_t)r * (size_t)u->elements * size;
        int64_t done = 0;
        for (int64_t i = u->first; i < u->first + u->count; i++) {
            const mt_param *p = mt_param_store_get(f->store, i);
            mt_piece piece = mt_param_piece(f->store, p, r);
            int64_t at = piece.offset - u->offset;
            if (!piece.count) continue;
            MT_TRY(mt_device_zero_async(&f->reducing[0], to + (size_t)done * size,
                                        (size_t)(at - done) * size));
            MT_TRY(send_gradients(f, p, piece, to + (size_t)at * size));
            done = at + piece.count;
        }
        MT_TRY(mt_device_zero_async(&f->reducing[0], to + (size_t)done * size,
                                    (size_t)(u->elements - done) * size));
    }
    return MT_OK;
}

/* Whether a unit's gradients lie back to back, and every rank's shard of them without a gap: then
 * they are in the order of the shards already, and parts receives how many are whose. */
static bool lies_in_order(const mt_fsdp *f, const mt_unit *u, int64_t *parts)
{
    const mt_param *first = mt_param_store_get(f->store, u->first), *last = NULL;
    size_t size = mt_dtype_size(first->dtype);
    if (f->options.reduce_bf16 || !first->grad) return false;
    for (int64_t i = u->first; i < u->first + u->count; i++) {
        const mt_param *p = mt_param_store_get(f->store, i);
        if (p->grad_dtype != p->dtype) return false;
        if (last && p->grad != (char *)last->grad + (size_t)mt_param_count(last) * size)
            return false;
        last = p;
    }
    for (int r = 0; r < u->ranks; r++) {
        parts[r] = 0;
        for (int64_t i = u->first; i < u->first + u->count; i++) {
            mt_piece piece = mt_param_piece(f->store, mt_param_store_get(f->store, i), r);
            if (piece.count && piece.offset - u->offset != parts[r]) return false;
            parts[r] += piece.count;
        }
    }
    return true;
}

/* What goes ahead of the rest: from the largest param on, of every rank what lies behind the most
 * that a rank has of the params before. */
static void find_split(const mt_fsdp *f, const mt_unit *u, const int64_t *parts, mt_reduction *r)
{
    int64_t most = 0;
    r->large = u->first, r->split = 0;
    for (int64_t i = u->first; i < u->first + u->count; i++) {
        int64_t count = mt_param_count(mt_param_store_get(f->store, i));
        if (count > most) r->large = i, most = count;
    }
    most = 0;
    for (int rank = 0; rank < u->ranks; rank++) {
        int64_t before = 0;
        for (int64_t i = u->first; i < r->large; i++)
            before += mt_param_piece(f->store, mt_param_store_get(f->store, i), rank).count;
        if (before > r->split) r->split = before;
        if (parts[rank] > most) most = parts[rank];
    }
    if (r->split == 0 || r->split >= most) r->split = INT64_MAX;
}

static void find_parts(mt_fsdp *f)
{
    for (int64_t i = 0; i < f->units; i++) {
        int64_t *parts = mt_fsdp_parts(f, i);
        mt_unit u = mt_param_store_unit(f->store, i);
        f->reduction[i].split = INT64_MAX;
        if (u.count && lies_in_order(f, &u, parts))
            find_split(f, &u, parts, &f->reduction[i]);
        else
            *parts = -1;
    }
}

/* Elements [begin, r->end) of every rank's part. */
static mt_status reduce_in_place(mt_fsdp *f, const mt_unit *u, const mt_param *first, int64_t begin,
                                 char *own, const char *label)
{
    mt_reduction *r = &f->reduction[first->unit];
    const mt_comm_parts parts = { mt_fsdp_parts(f, first->unit), begin, r->end };
    int64_t last = parts.counts[u->rank] < r->end ? parts.counts[u->rank] : r->end;
    f->counts.in_place += begin == 0, f->counts.early += begin > 0;
    if (last > begin)
        f->counts.reduced_bytes +=
            (last - begin) * (int64_t)mt_dtype_size(first->dtype) * (u->ranks - 1);
    r->end = begin;
    return mt_comm_reduce_scatter_parts(mt_fsdp_comm(f, first->unit), &f->reducing[f->lane], own,
                                        first->grad, &parts, first->dtype, MT_REDUCE_SUM, label);
}

static mt_status reduce_sorted(mt_fsdp *f, const mt_unit *u, const mt_param *first, char *own,
                               const char *label)
{
    mt_dtype wire = wire_dtype(f, first);
    size_t size = mt_dtype_size(wire);
    void *to = wire == first->dtype ? (void *)own : f->sum;
    f->counts.reduced_bytes += u->elements * (int64_t)size * (u->ranks - 1);
    MT_TRY(sort_gradients(f, u, size));
    MT_TRY(mt_comm_reduce_scatter(mt_fsdp_comm(f, first->unit), &f->reducing[0], to, f->outbox,
                                  u->elements, wire, MT_REDUCE_SUM, label));
    if (to == own) return MT_OK;
    return mt_cast(
        &f->reducing[0],
        &(struct mt_cast_args){
            .dtype = first->dtype, .count = u->elements, .y = own, .x = to, .x_dtype = wire });
}

/* What is left of a unit, or, from element `begin` of the parts on, what goes ahead. Begins when
 * the passes have done all that they were given until now. */
static mt_status reduce(mt_fsdp *f, int64_t unit, int64_t begin)
{
    mt_unit u = mt_param_store_unit(f->store, unit);
    const mt_param *first = mt_param_store_get(f->store, u.first);
    char *own =
             (char *)mt_param_store_grad(f->store) + (size_t)u.offset * mt_dtype_size(first->dtype),
         label[64];
    snprintf(label, sizeof label, "%.40s, %sgradients", first->name, begin ? "large " : "");
    bool in_place = *mt_fsdp_parts(f, unit) >= 0;
    f->lane = in_place ? (f->lane + 1) % MT_LANES : 0;
    MT_TRY(mt_event_record(&f->final, &f->stream));
    MT_TRY(mt_event_wait(&f->final, &f->reducing[f->lane]));
    MT_TRY(in_place ? reduce_in_place(f, &u, first, begin, own, label)
                    : reduce_sorted(f, &u, first, own, label));
    f->counts.reduces += begin == 0;
    if (begin == 0) f->reduction[unit].pending = -1;
    return mt_event_record(&f->reduced[f->lane], &f->reducing[f->lane]);
}

void mt_fsdp_begin_reduce(mt_fsdp *f)
{
    f->last_pass = true;
    for (int64_t u = 0; u < f->units; u++) {
        mt_reduction *r = &f->reduction[u];
        r->pending = r->pending_large = 0, r->end = INT64_MAX;
    }
    for (int64_t i = 0; i < mt_param_store_count(f->store); i++) {
        const mt_param *p = mt_param_store_get(f->store, i);
        mt_reduction *r = &f->reduction[p->unit];
        r->pending += !p->frozen, r->pending_large += !p->frozen && i >= r->large;
    }
}

static bool is_large(const mt_fsdp *f, const mt_param *param)
{
    int64_t i = f->reduction[param->unit].large;
    mt_unit u = mt_param_store_unit(f->store, param->unit);
    while (i < u.first + u.count && mt_param_store_get(f->store, i) != param) i++;
    return i < u.first + u.count;
}

mt_status mt_fsdp_grad_ready(void *fsdp, mt_param *param)
{
    mt_fsdp *f = fsdp;
    if (!f->last_pass) return MT_OK;
    mt_reduction *r = &f->reduction[param->unit];
    bool large = is_large(f, param);
    r->pending_large -= large;
    if (--r->pending <= 0) return reduce(f, param->unit, 0);
    return large && r->pending_large == 0 && r->split < INT64_MAX ? reduce(f, param->unit, r->split)
                                                                  : MT_OK;
}

mt_status mt_fsdp_end_reduce(mt_fsdp *f, mt_stream *stream)
{
    f->stream = *stream;
    for (int64_t u = 0; f->last_pass && u < f->units; u++)
        if (f->reduction[u].pending >= 0 && mt_param_store_unit(f->store, u).count)
            MT_TRY(reduce(f, u, 0));
    f->last_pass = false;
    for (int i = 0; i < MT_LANES; i++) MT_TRY(mt_event_wait(&f->reduced[i], stream));
    return MT_OK;
}

/* ---- memory ------------------------------------------------------------------------------------
 */

/* Room for so many bytes; what was there is gone. */
static mt_status resize(mt_fsdp *f, void **p, size_t *bytes, size_t need, mt_memory memory)
{
    if (*bytes >= need) return MT_OK;
    mt_device_free(f->device, p, *bytes, memory);
    *bytes = 0;
    MT_TRY(mt_device_alloc(f->device, p, need, memory));
    *bytes = need;
    return MT_OK;
}

/* As resize, of memory that the other ranks may write to: of the same size on all of them. */
static mt_status resize_shared(mt_fsdp *f, void **p, size_t *bytes, size_t need, const char *what)
{
    mt_comm *const comms[] = { f->comm, f->options.replicas };
    if (*bytes >= need) return MT_OK;
    for (int i = 0; *p && i < 2; i++) {
        if (!comms[i]) continue;
        mt_comm_unshare(comms[i], *p);
        MT_TRY(mt_comm_barrier(comms[i], what));
    }
    MT_TRY(resize(f, p, bytes, need, MT_MEMORY_COMPUTE));
    for (int i = 0; i < 2; i++)
        if (comms[i]) MT_TRY(mt_comm_share(comms[i], *p, *bytes, what));
    return MT_OK;
}

/* Without the barrier that resize_shared makes: a rank that has failed may come here alone. */
static void free_shared(mt_fsdp *f, void **p, size_t bytes)
{
    if (*p) mt_comm_unshare(f->comm, *p);
    if (*p && f->options.replicas) mt_comm_unshare(f->options.replicas, *p);
    mt_device_free(f->device, p, bytes, MT_MEMORY_COMPUTE);
}

static mt_status make_slots(mt_fsdp *f)
{
    size_t most = 0, all = 0;
    for (int64_t i = 0; i < f->wires; i++) {
        if (f->wire[i].copy_bytes > most) most = f->wire[i].copy_bytes;
        all += f->wire[i].copy_bytes;
    }
    if (!f->options.keep_gathered) all = most * (size_t)f->slot_count;
    MT_TRY(resize_shared(f, &f->copies, &f->copies_bytes, all, "copies"));
    char *at = f->copies;
    for (int64_t i = 0; i < f->slot_count; i++) {
        mt_copy_slot *s = &f->slots[i];
        s->wire = -1, s->used = 0, s->memory = at;
        at += f->options.keep_gathered ? f->wire[i].copy_bytes : most;
    }
    return MT_OK;
}

/* What a wire takes of staging: what the ranks send, where that does not go to its place at once.
 */
static size_t staging_of(const mt_fsdp *f, int64_t wire)
{
    const mt_wire *w = &f->wire[wire];
    int64_t unit = wire / MT_DIR_COUNT;
    if (w->plain && mt_fsdp_reaches(f, unit)) return 0;
    return w->bytes * (size_t)mt_param_store_unit(f->store, unit).ranks;
}

/* Memory that all units share, as large as the largest needs it. Staging is that of the rank that
 * needs most: some columns of the mesh may reach each other's copies where others do not, and all
 * ranks are to share it alike. */
static mt_status make_staging(mt_fsdp *f)
{
    int64_t staging = 0;
    size_t elements = 0;
    for (int64_t i = 0; i < f->wires; i++) {
        mt_unit u = mt_param_store_unit(f->store, i / MT_DIR_COUNT);
        size_t ranks = (size_t)u.ranks;
        int64_t bytes = (int64_t)staging_of(f, i);
        if (bytes > staging) staging = bytes;
        bool sorted = *mt_fsdp_parts(f, i / MT_DIR_COUNT) < 0;
        if (sorted && (size_t)u.elements * ranks > elements) elements = (size_t)u.elements * ranks;
    }
    const mt_param *any = mt_param_store_get(f->store, 0);
    size_t size = mt_dtype_size(wire_dtype(f, any));
    MT_TRY(mt_comm_all_reduce(f->comm, NULL, &staging, 1, MT_I64, MT_REDUCE_MAX, "wires"));
    MT_TRY(resize_shared(f, &f->staging, &f->staging_bytes, (size_t)staging, "wires"));
    MT_TRY(resize(f, &f->outbox, &f->outbox_bytes, elements * size, MT_MEMORY_GRAD));
    return f->options.reduce_bf16
               ? resize(f, &f->sum, &f->sum_bytes, elements * size, MT_MEMORY_GRAD)
               : MT_OK;
}

mt_status mt_fsdp_layout(mt_fsdp *f)
{
    size_t own = f->own_bytes, real = f->real_bytes;
    MT_TRY(mt_device_synchronize(f->device)); /* nobody uses what goes */
    MT_TRY(mt_fsdp_cut_wires(f));
    size_t need_own = f->own_bytes, need_real = f->real_bytes;
    f->own_bytes = own, f->real_bytes = real; /* what is allocated */
    for (int64_t i = 0; i < f->wires; i++) f->wire[i].slot = -1;
    for (int64_t i = 0; i < f->wires; i++) mt_fsdp_place(f, i, NULL);
    MT_TRY(resize(f, &f->own, &f->own_bytes, need_own, MT_MEMORY_COMPUTE));
    MT_TRY(resize(f, &f->real, &f->real_bytes, need_real, MT_MEMORY_COMPUTE));
    MT_TRY(make_slots(f));
    MT_TRY(make_staging(f));
    for (int64_t i = 0; i < (f->wires + 1) * f->wires; i++) f->next[i] = -1;
    f->previous = f->current = f->start = f->end[0] = f->end[1] = -1;
    for (int64_t i = 0; i < f->units; i++) f->written[i] = false;
    mt_fsdp_place_casts(f);
    return mt_device_zero(f->device, f->own, f->own_bytes);
}

static mt_status make_amaxes(mt_fsdp *f)
{
    int64_t count = mt_param_store_count(f->store), at = 0;
    f->amax_at = calloc((size_t)count + 1, sizeof *f->amax_at);
    MT_REQUIRE(f->amax_at, MT_ENOMEM, "fsdp: out of memory");
    for (int some = 0; some < 2; some++) {
        for (int64_t i = 0; i < count; i++) {
            const mt_param *p = mt_param_store_get(f->store, i);
            if (mt_param_store_unit(f->store, p->unit).some_members != some) continue;
            f->amax_at[i] = p->packed ? at : -1;
            at += p->packed ? p->group.members * MT_DIR_COUNT : 0;
        }
        if (!some) f->amax_shared = at;
    }
    void *amax = NULL;
    MT_TRY(mt_device_alloc(f->device, &amax, (size_t)at * sizeof(float), MT_MEMORY_STATE));
    f->amax = amax, f->amax_bytes = (size_t)at * sizeof(float);
    return mt_device_zero(f->device, f->amax, f->amax_bytes);
}

static mt_status make_streams(mt_fsdp *f)
{
    mt_event *const events[] = { &f->asked, &f->gathered, &f->final };
    MT_TRY(mt_stream_create(&f->gathering, f->device));
    for (int i = 0; i < 3; i++) MT_TRY(mt_event_create(events[i], f->device));
    for (int i = 0; i < MT_LANES; i++) {
        MT_TRY(mt_stream_create(&f->reducing[i], f->device));
        MT_TRY(mt_event_create(&f->reduced[i], f->device));
    }
    for (int64_t i = 0; i < f->slot_count; i++)
        MT_TRY(mt_event_create(&f->slots[i].ready, f->device));
    return MT_OK;
}

static mt_status build(mt_fsdp *f)
{
    f->wire = calloc((size_t)f->wires, sizeof *f->wire);
    f->single = calloc((size_t)f->units, sizeof *f->single);
    f->slot_count = f->options.keep_gathered ? f->wires : HERE;
    f->slots = calloc((size_t)f->slot_count, sizeof *f->slots);
    f->next = calloc((size_t)((f->wires + 1) * f->wires), sizeof *f->next);
    f->written = calloc((size_t)f->units, sizeof *f->written);
    f->reduction = calloc((size_t)f->units, sizeof *f->reduction);
    f->parts = calloc((size_t)(f->units * mt_comm_size(f->comm)), sizeof *f->parts);
    MT_REQUIRE(f->wire && f->single && f->slots && f->next && f->written && f->reduction &&
                   f->parts,
               MT_ENOMEM, "fsdp: out of memory");
    find_parts(f);
    MT_TRY(make_streams(f));
    MT_TRY(make_amaxes(f));
    MT_TRY(mt_fsdp_layout(f));
    for (int64_t i = 0; i < mt_param_store_count(f->store); i++)
        mt_param_store_get(f->store, i)->source = &f->source;
    return MT_OK;
}

mt_status mt_fsdp_create(mt_fsdp **fsdp, mt_param_store *store, mt_comm *comm,
                         const mt_fsdp_options *options)
{
    *fsdp = NULL;
    MT_REQUIRE(mt_param_store_world(store) == mt_comm_size(comm), MT_EINVAL,
               "fsdp: a store cut for %d ranks, there are %d", mt_param_store_world(store),
               mt_comm_size(comm));
    for (int64_t i = 0; i < mt_param_store_units(store); i++) {
        mt_unit u = mt_param_store_unit(store, i);
        MT_REQUIRE(!u.some_members ||
                       (options->replicas && mt_comm_size(options->replicas) == u.ranks),
                   MT_EINVAL, "fsdp: experts cut for %d ranks, and no comm of so many", u.ranks);
    }
    mt_fsdp *f = calloc(1, sizeof *f);
    MT_REQUIRE(f, MT_ENOMEM, "fsdp: out of memory");
    f->store = store, f->comm = comm, f->options = *options;
    f->device = mt_param_store_device(store);
    f->stream.device = f->device;
    f->source = (mt_param_source){ need, f };
    f->units = mt_param_store_units(store), f->wires = f->units * MT_DIR_COUNT;
    mt_status status = build(f);
    if (status != MT_OK) {
        mt_fsdp_destroy(&f);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    *fsdp = f;
    return MT_OK;
}

void mt_fsdp_destroy(mt_fsdp **fsdp)
{
    mt_fsdp *f = *fsdp;
    if (!f) return;
    void *amax = f->amax;
    mt_event *const events[] = { &f->asked, &f->gathered, &f->final };
    mt_stream_destroy(&f->gathering);
    for (int i = 0; i < 3; i++) mt_event_destroy(events[i]);
    for (int i = 0; i < MT_LANES; i++) {
        mt_stream_destroy(&f->reducing[i]);
        mt_event_destroy(&f->reduced[i]);
    }
    for (int64_t i = 0; f->slots && i < f->slot_count; i++) mt_event_destroy(&f->slots[i].ready);
    for (int64_t i = 0; i < mt_param_store_count(f->store); i++)
        mt_param_store_get(f->store, i)->source = NULL;
    for (int64_t i = 0; f->wire && i < f->wires; i++) free(f->wire[i].list);
    mt_device_free(f->device, &f->own, f->own_bytes, MT_MEMORY_COMPUTE);
    mt_device_free(f->device, &f->real, f->real_bytes, MT_MEMORY_COMPUTE);
    free_shared(f, &f->copies, f->copies_bytes);
    free_shared(f, &f->staging, f->staging_bytes);
    mt_device_free(f->device, &f->outbox, f->outbox_bytes, MT_MEMORY_GRAD);
    mt_device_free(f->device, &f->sum, f->sum_bytes, MT_MEMORY_GRAD);
    mt_device_free(f->device, &amax, f->amax_bytes, MT_MEMORY_STATE);
    free(f->wire);
    free(f->single);
    free(f->slots);
    free(f->next);
    free(f->written);
    free(f->reduction);
    free(f->parts);
    free(f->amax_at);
    free(f);
    *fsdp = NULL;
}

mt_fsdp_counts mt_fsdp_get_counts(const mt_fsdp *f)
{
    return f->counts;
}
