/* The step arena: memory for values that live within one step, without allocating in steady state.
 *
 * The first pass of a plan (a key: what is run, at which shapes) allocates each block by itself and
 * records when it is born and freed. Interval colouring then gives every block a fixed offset in
 * one slab, and later passes of the same key replay the same sequence of calls into the slab. A
 * pass that departs from its recording starts a new recording. One slab serves all keys. */
#pragma once

#include "core/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_arena mt_arena;

/* Ownership: `device` is borrowed and must outlive the arena. */
mt_status mt_arena_create(mt_arena **arena, mt_device *device, mt_memory memory);
void mt_arena_destroy(mt_arena **arena);

/* Starts a pass. Every block of the last pass must have been freed. */
mt_status mt_arena_begin(mt_arena *arena, uint64_t key);
/* Ends it: a recording is coloured and the slab grown where needed. */
mt_status mt_arena_end(mt_arena *arena);
/* Ends a pass that broke off: nothing is learnt of it, nor allocated. What lives may still be
 * freed. */
void mt_arena_abandon(mt_arena *arena);

/* A block of this pass; `id` names it to mt_arena_free. 0 bytes is a block without memory. */
mt_status mt_arena_alloc(mt_arena *arena, void **p, int64_t *id, size_t bytes);
void mt_arena_free(mt_arena *arena, int64_t id);
/* As mt_arena_alloc, of 1 byte or more; where there is no memory for it *p is NULL, now and
 * whenever the pass is replayed: a device is not asked again. */
mt_status mt_arena_try(mt_arena *arena, void **p, int64_t *id, size_t bytes);

/* Bytes of the slab: the high-water mark of every key seen so far. */
int64_t mt_arena_bytes(const mt_arena *arena);
/* The largest sum of live blocks in any recording: what no colouring can go below. */
int64_t mt_arena_floor(const mt_arena *arena);

#ifdef __cplusplus
}
#endif
