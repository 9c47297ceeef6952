/* Collectives whose host part is over while their data still move on a device: which is the oldest,
 * for the watchdog; and that they run one after another, whatever streams they are in, so that two
 * of them never wait for each other's place on the devices in different orders. */
#pragma once

#include "core/device.h"
#include "dist/watch.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_inflight mt_inflight;

/* Ownership: `device` is borrowed. */
mt_status mt_inflight_create(mt_inflight **inflight, mt_device *device);
void mt_inflight_destroy(mt_inflight **inflight);

/* What the stream is given from now on begins after the collective that was added last. */
mt_status mt_inflight_follow(mt_inflight *inflight, mt_stream *stream);
/* A collective ends where the stream is now; its texts are copied. Where very many are under way,
 * the host waits for the oldest. */
mt_status mt_inflight_add(mt_inflight *inflight, mt_stream *stream, const mt_watch_pending *call);
/* The oldest that is not over, its texts until the next call; false: none is. On any one thread.
 * An error is that of the device. */
mt_status mt_inflight_oldest(mt_inflight *inflight, mt_watch_pending *oldest, bool *any);

#ifdef __cplusplus
}
#endif
