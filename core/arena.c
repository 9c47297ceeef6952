/* The step arena: recording, interval colouring, replay. */
#include "core/arena.h"

#include <stdlib.h>

#include "core/array.h"

/* Offsets in the slab are multiples of this. */
enum { ALIGN = 256 };
/* Bytes of a block, so that events of all kinds are told apart. */
#define MOST_BYTES (PTRDIFF_MAX / 2)

/* The calls of a pass. An event is what an allocation asks for (bytes >= 0), what a free names
 * (-1 - id) or what was asked for in vain (INT64_MIN + bytes); its index is its time. A block's id
 * is its place among the allocations. */
struct plan {
    uint64_t key;
    int64_t *events;
    int64_t event_count, event_room;
    int64_t block_count;
    size_t *offsets; /* of each block in the slab; NULL until coloured */
    size_t bytes;    /* of the slab that the offsets need */
};

/* A block of the running pass. */
struct block {
    void *p;
    size_t bytes;
    bool live, separate; /* separate: allocated by itself, not in the slab */
};

typedef enum phase { PHASE_IDLE, PHASE_RECORD, PHASE_REPLAY } phase;

struct mt_arena {
    mt_device *device;
    mt_memory memory;
    struct plan *plans;
    int64_t plan_count;
    struct block *blocks;
    int64_t block_count, block_room, live;
    phase phase;
    int64_t plan;   /* index of the pass's plan */
    int64_t events; /* of this pass so far */
    void *slab;
    size_t slab_bytes, need, floor;
};

static int64_t in_vain(size_t bytes)
{
    return INT64_MIN + (int64_t)bytes;
}

/* ---- colouring --------------------------------------------------------------------------------
 */

/* A block's time [birth, death) and place. */
struct interval {
    int64_t id, birth, death;
    size_t bytes, offset;
};

static size_t padded(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static int by_birth(const void *a, const void *b)
{
    int64_t x = ((const struct interval *)a)->birth, y = ((const struct interval *)b)->birth;
    return (x > y) - (x < y);
}

static int by_size(const void *a, const void *b)
{
    size_t x = ((const struct interval *)a)->bytes, y = ((const struct interval *)b)->bytes;
    return x != y ? (x < y) - (x > y) : by_birth(a, b);
}

static int by_lifetime(const void *a, const void *b)
{
    const struct interval *p = a, *q = b;
    int64_t x = p->death - p->birth, y = q->death - q->birth;
    return x != y ? (x < y) - (x > y) : by_birth(a, b);
}

/* Orders to place blocks in; the best result is kept. Birth order packs nested lifetimes perfectly,
 * the largest first does best on mixed ones. */
static int (*const orders[])(const void *, const void *) = { by_size, by_birth, by_lifetime };
enum { ORDERS = sizeof orders / sizeof orders[0] };

/* Gives each interval, in order, the lowest offset where it meets no earlier one that lives at the
 * same time. `placed` has room for n. Returns the bytes used. */
static size_t place(struct interval *intervals, int64_t n, struct interval **placed)
{
    size_t used = 0;
    for (int64_t i = 0; i < n; i++) {
        struct interval *b = &intervals[i];
        size_t at = 0;
        int64_t j = 0;
        for (; j < i; j++) { /* placed is sorted by offset */
            const struct interval *o = placed[j];
            if (o->birth >= b->death || b->birth >= o->death) continue;
            if (o->offset >= at + b->bytes) break;
            if (o->offset + o->bytes > at) at = o->offset + o->bytes;
        }
        while (j > 0 && placed[j - 1]->offset > at) j--;
        memmove(placed + j + 1, placed + j, (size_t)(i - j) * sizeof *placed);
        placed[j] = b;
        b->offset = at;
        if (at + b->bytes > used) used = at + b->bytes;
    }
    return used;
}

/* Fills the intervals of the blocks that have memory; returns how many, and the largest sum of live
 * bytes. */
static int64_t lifetimes(struct interval *intervals, const struct plan *plan, size_t *most)
{
    int64_t n = 0, id = 0;
    size_t live = 0;
    *most = 0;
    for (int64_t t = 0; t < plan->event_count; t++) {
        int64_t e = plan->events[t];
        if (e <= in_vain(MOST_BYTES)) continue;
        if (e >= 0) {
            size_t bytes = padded((size_t)e);
            intervals[id] = (struct interval){ id, t, INT64_MAX, bytes, 0 };
            id++, live += bytes;
        } else {
            intervals[-1 - e].death = t;
            live -= intervals[-1 - e].bytes;
        }
        if (live > *most) *most = live;
    }
    for (int64_t i = 0; i < id; i++)
        if (intervals[i].bytes) intervals[n++] = intervals[i];
    return n;
}

static mt_status colour(mt_arena *arena, struct plan *plan)
{
    size_t count = (size_t)plan->block_count + 1, most;
    struct interval *intervals = malloc(count * sizeof *intervals);
    struct interval **placed = malloc(count * sizeof *placed);
    size_t *offsets = calloc(count, sizeof *offsets);
    mt_status status = MT_OK;
    if (!intervals || !placed || !offsets) {
        status = MT_FAIL(MT_ENOMEM, "arena: no memory to colour %lld blocks",
                         (long long)plan->block_count);
        free(offsets);
        goto cleanup;
    }
    int64_t n = lifetimes(intervals, plan, &most);
    plan->bytes = SIZE_MAX;
    for (int i = 0; i < ORDERS && plan->bytes > most; i++) {
        qsort(intervals, (size_t)n, sizeof *intervals, orders[i]);
        size_t bytes = place(intervals, n, placed);
        if (bytes >= plan->bytes) continue;
        plan->bytes = bytes;
        for (int64_t j = 0; j < n; j++) offsets[intervals[j].id] = intervals[j].offset;
    }
    plan->offsets = offsets;
    if (plan->bytes > arena->need) arena->need = plan->bytes;
    if (most > arena->floor) arena->floor = most;
cleanup:
    free(intervals);
    free(placed);
    return status;
}

/* ---- passes -----------------------------------------------------------------------------------
 */

mt_status mt_arena_create(mt_arena **arena, mt_device *device, mt_memory memory)
{
    *arena = calloc(1, sizeof **arena);
    MT_REQUIRE(*arena, MT_ENOMEM, "arena: no %zu bytes for itself", sizeof **arena);
    (*arena)->device = device;
    (*arena)->memory = memory;
    return MT_OK;
}

void mt_arena_destroy(mt_arena **arena)
{
    mt_arena *a = *arena;
    if (!a) return;
    for (int64_t id = 0; id < a->block_count; id++)
        if (a->blocks[id].live && a->blocks[id].separate)
            mt_device_free(a->device, &a->blocks[id].p, a->blocks[id].bytes, a->memory);
    mt_device_free(a->device, &a->slab, a->slab_bytes, a->memory);
    for (int64_t i = 0; i < a->plan_count; i++) {
        free(a->plans[i].events);
        free(a->plans[i].offsets);
    }
    free(a->plans);
    free(a->blocks);
    free(a);
    *arena = NULL;
}

static void free_slab(mt_arena *a)
{
    mt_device_free(a->device, &a->slab, a->slab_bytes, a->memory);
    a->slab_bytes = 0;
}

/* Makes the slab large enough for every plan. No block may live. */
static mt_status fit_slab(mt_arena *a)
{
    if (a->slab_bytes >= a->need) return MT_OK;
    free_slab(a);
    MT_TRY(mt_device_alloc(a->device, &a->slab, a->need, a->memory));
    a->slab_bytes = a->need;
    return MT_OK;
}

static mt_status find_plan(mt_arena *a, uint64_t key)
{
    for (a->plan = 0; a->plan < a->plan_count; a->plan++)
        if (a->plans[a->plan].key == key) return MT_OK;
    struct plan *plans = realloc(a->plans, (size_t)(a->plan_count + 1) * sizeof *plans);
    MT_REQUIRE(plans, MT_ENOMEM, "arena: no memory for plan %lld", (long long)a->plan_count);
    a->plans = plans;
    plans[a->plan_count++] = (struct plan){ .key = key };
    return MT_OK;
}

mt_status mt_arena_begin(mt_arena *a, uint64_t key)
{
    MT_REQUIRE(a->live == 0, MT_EINVAL,
               "arena: a pass begins while %lld blocks of the last one live", (long long)a->live);
    a->phase = PHASE_IDLE;
    a->block_count = 0;
    MT_TRY(find_plan(a, key));
    struct plan *plan = &a->plans[a->plan];
    if (plan->offsets)
        MT_TRY(fit_slab(a));
    else
        free_slab(
            a); /* a recording has its own blocks: both at once would raise the high-water mark */
    if (!plan->offsets) plan->event_count = plan->block_count = 0; /* a pass that never ended */
    MT_TRY(mt_array_reserve(&a->blocks, &a->block_room, plan->block_count, sizeof *a->blocks,
                            "recorded calls"));
    a->events = 0;
    a->phase = plan->offsets ? PHASE_REPLAY : PHASE_RECORD;
    return MT_OK;
}

/* The pass is not the one recorded: what it has done so far is the beginning of a new recording.
 * Blocks in the slab stay there until freed. */
static void depart(mt_arena *a)
{
    struct plan *plan = &a->plans[a->plan];
    free(plan->offsets);
    plan->offsets = NULL;
    plan->event_count = a->events;
    plan->block_count = a->block_count;
    a->phase = PHASE_RECORD;
}

mt_status mt_arena_end(mt_arena *a)
{
    MT_REQUIRE(a->phase != PHASE_IDLE, MT_EINVAL, "arena: a pass ends that has not begun");
    struct plan *plan = &a->plans[a->plan];
    if (a->phase == PHASE_REPLAY && a->events < plan->event_count) depart(a);
    bool recorded = a->phase == PHASE_RECORD;
    a->phase = PHASE_IDLE;
    if (recorded) MT_TRY(colour(a, plan));
    return a->live ? MT_OK : fit_slab(a);
}

void mt_arena_abandon(mt_arena *a)
{
    a->phase = PHASE_IDLE;
}

/* Whether the pass goes on as recorded, with this event; where it does not, it is recorded from
 * here on. */
static bool replays(mt_arena *a, int64_t event)
{
    const struct plan *plan = &a->plans[a->plan];
    if (a->phase != PHASE_REPLAY) return false;
    if (a->events < plan->event_count && plan->events[a->events] == event) return true;
    depart(a);
    return false;
}

mt_status mt_arena_alloc(mt_arena *a, void **p, int64_t *id, size_t bytes)
{
    *p = NULL;
    MT_REQUIRE(a->phase != PHASE_IDLE, MT_EINVAL, "arena: %zu bytes wanted outside a pass", bytes);
    MT_REQUIRE(bytes <= MOST_BYTES, MT_ENOMEM, "arena: a block of %zu bytes", bytes);
    struct plan *plan = &a->plans[a->plan];
    const bool again = replays(a, (int64_t)bytes);
    struct block block = { NULL, bytes, true, !again };
    if (again) {
        if (bytes) block.p = (char *)a->slab + plan->offsets[a->block_count];
    } else { /* this event, and later the free of everything that lives */
        MT_TRY(mt_array_reserve(&plan->events, &plan->event_room, a->events + a->live + 2,
                                sizeof *plan->events, "recorded calls"));
        MT_TRY(mt_array_reserve(&a->blocks, &a->block_room, a->block_count + 1, sizeof *a->blocks,
                                "recorded calls"));
        MT_TRY(mt_device_alloc(a->device, &block.p, bytes, a->memory));
        plan->events[plan->event_count++] = (int64_t)bytes;
        plan->block_count++;
    }
    a->events++, a->live++;
    *p = block.p;
    *id = a->block_count;
    a->blocks[a->block_count++] = block;
    return MT_OK;
}

void mt_arena_free(mt_arena *a, int64_t id)
{
    MT_ASSERT(id >= 0 && id < a->block_count && a->blocks[id].live);
    struct plan *plan = &a->plans[a->plan];
    struct block *block = &a->blocks[id];
    if (!replays(a, -1 - id) && a->phase == PHASE_RECORD)
        plan->events[plan->event_count++] = -1 - id;
    if (block->separate) mt_device_free(a->device, &block->p, block->bytes, a->memory);
    block->live = false;
    a->live--;
    a->events++;
}

mt_status mt_arena_try(mt_arena *a, void **p, int64_t *id, size_t bytes)
{
    struct plan *plan = &a->plans[a->plan];
    mt_error_kept before;
    *p = NULL;
    if (a->phase == PHASE_REPLAY && a->events < plan->event_count &&
        plan->events[a->events] == in_vain(bytes)) {
        a->events++;
        return MT_OK;
    }
    mt_error_keep(&before);
    mt_status status = mt_arena_alloc(a, p, id, bytes);
    if (status != MT_ENOMEM || bytes > MOST_BYTES) return status;
    MT_TRY(mt_array_reserve(&plan->events, &plan->event_room, a->events + a->live + 1,
                            sizeof *plan->events, "recorded calls"));
    mt_error_put_back(&before);
    plan->events[plan->event_count++] = in_vain(bytes);
    a->events++;
    return MT_OK;
}

int64_t mt_arena_bytes(const mt_arena *a)
{
    return (int64_t)a->need;
}

int64_t mt_arena_floor(const mt_arena *a)
{
    return (int64_t)a->floor;
}
