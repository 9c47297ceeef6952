/* Collectives of host memory by way of a device: in pieces they go there, are made by the comm's
 * own functions of a stream, and come back. They are done when they return. */
#pragma once

#include "dist/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_STAGING_BYTES = 32 << 20 }; /* of its memory */

typedef struct mt_staging {
    mt_stream stream;
    void *memory; /* two halves: what goes, and what comes back; made when first needed */
} mt_staging;

mt_status mt_staging_create(mt_staging *staging, mt_device *device);
void mt_staging_destroy(mt_staging *staging); /* also one that is all zero */

/* As the functions of mt_comm_ops without a stream. */
mt_status mt_staged_all_gather(mt_staging *staging, mt_comm *comm, void *to, const void *from,
                               size_t bytes);
mt_status mt_staged_reduce_scatter(mt_staging *staging, mt_comm *comm, void *to, const void *from,
                                   const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce);
mt_status mt_staged_all_reduce(mt_staging *staging, mt_comm *comm, void *data, int64_t count,
                               mt_dtype dtype, mt_reduce reduce);
/* MT_EINVAL: a block uses more than it has. */
mt_status mt_staged_all_to_all(mt_staging *staging, mt_comm *comm, void *to, const void *from,
                               size_t block_bytes);
mt_status mt_staged_broadcast(mt_staging *staging, mt_comm *comm, void *data, size_t bytes,
                              int root);

#ifdef __cplusplus
}
#endif
