/* Whether the ranks' collectives give the right bits, and how fast they are: for `mixtape doctor`.
 */
#pragma once

#include "dist/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes every collective on memory of `device`, checks each byte on every rank,
 * then measures the larger ones. `row` is told of each, on every rank. Collective. Errors, on every
 * rank: MT_EDEVICE names the rank that received other bytes, and where a block is that of one rank,
 * the rank it came from. */
mt_status mt_fabric_check(mt_comm *comm, mt_device *device,
                          void (*row)(void *context, const char *name, const char *text),
                          void *context);

#ifdef __cplusplus
}
#endif
