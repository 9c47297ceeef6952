/* Ranks of one host whose GPUs write into each other's memory: copy engines move what is sent, and
 * leave every multiprocessor to the passes (NCCL's kernels take 24 of an H200's 132 to move as
 * fast). Streams wait for each other by words in memory, the host for nobody.
 *
 * Each transfer has a number, the same on all ranks. A rank posts to the others that its memory is
 * free, copies to each of them when that one has, and posts that what it sent has arrived. */
#pragma once

#include "dist/comm.h"

enum { MT_DIRECT_BYTES = 2 << 20 }; /* that one takes on each rank */

typedef struct mt_direct mt_direct;

/* to[r] = from of rank r, `bytes` each, of host memory, by way of `room` on the device: how the
 * ranks of `context` agree. */
typedef mt_status (*mt_direct_tell)(void *context, void *room, void *to, const void *from,
                                    size_t bytes);
enum { MT_DIRECT_ROOM = 1 << 20 };

typedef struct mt_direct_options {
    mt_device *device;
    int rank, size;
    mt_direct_tell tell;
    void *context;
} mt_direct_options;

/* *direct is NULL on every rank where they cannot: not on one host, GPUs that do not reach each
 * other, or NCCL_P2P_DISABLE is set. Collective. */
mt_status mt_direct_create(mt_direct **direct, const mt_direct_options *options);
/* Others may still have its memory mapped, and must not write there any more. NULL-safe. */
void mt_direct_destroy(mt_direct **direct);
/* All that this rank waits for comes true. */
void mt_direct_give_up(mt_direct *direct);

/* From now on, the others write into this memory of mt_device_alloc's, each rank's as large. Too
 * small to be shared is not. Collective. */
mt_status mt_direct_share(mt_direct *direct, void *memory, size_t bytes);
/* Before it is freed; what is not shared is left alone. */
void mt_direct_unshare(mt_direct *direct, const void *memory);
/* Everyone has come here: what was unshared before is nobody's any more. Collective. */
mt_status mt_direct_barrier(mt_direct *direct);
/* Whether the others write to what is at `p`. */
bool mt_direct_has(const mt_direct *direct, const void *p);

/* What this rank sends to another, or, of itself, keeps: `bytes` that come to lie where `to` is in
 * this rank's memory, which is shared. */
typedef struct mt_direct_part {
    int rank; /* MT_DIRECT_ALL: everyone */
    void *to;
    const void *from;
    size_t bytes;
} mt_direct_part;
enum { MT_DIRECT_ALL = -1 };

/* Collective; each rank with parts of its own. */
mt_status mt_direct_exchange(mt_direct *direct, mt_stream *stream, const mt_direct_part *part,
                             int count);
