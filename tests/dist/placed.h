/* Memory of collectives in tests: a device's or the host's. */
#pragma once

#include <math.h>

#include "tests/dist/ranks.h"

/* Memory of the collectives of a case: of the device of `stream`, or the host's where that is NULL.
 * Every case runs with both. */

static inline void *hold(mt_stream *stream, const void *host, size_t bytes)
{
    void *p = NULL;
    if (!stream) p = malloc(bytes);
    if (stream && mt_device_alloc(stream->device, &p, bytes, MT_MEMORY_STATE) != MT_OK) return NULL;
    if (!p || !host) return p;
    if (stream) return mt_device_copy(stream->device, p, host, bytes) == MT_OK ? p : NULL;
    return memcpy(p, host, bytes);
}

static inline mt_status look(mt_stream *stream, void *host, const void *p, size_t bytes)
{
    if (stream) return mt_device_copy(stream->device, host, p, bytes);
    memcpy(host, p, bytes);
    return MT_OK;
}

static inline void drop(mt_stream *stream, void *p, size_t bytes)
{
    if (stream)
        mt_device_free(stream->device, &p, bytes, MT_MEMORY_STATE);
    else
        free(p);
}

typedef mt_status placed_case(mt_comm *comm, mt_stream *stream);

static inline mt_status in_both(mt_comm *c, placed_case *run)
{
    mt_stream stream = { .device = rank_device };
    MT_TRY(run(c, NULL));
    return rank_device ? run(c, &stream) : MT_OK;
}

/* What rank r holds as element i. */
static inline double element(int rank, int64_t i)
{
    uint64_t x = ((uint64_t)rank * 1000003u + (uint64_t)i) * 0x9e3779b97f4a7c15u;
    return ((double)(x >> 40) / 16777216.0 - 0.5) * (double)(1 << (x & 15));
}
