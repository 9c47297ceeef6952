/* The first meeting of the ranks, over TCP: rank 0 listens, everyone comes to it, and goes with
 * what it has to give: the addresses of all that connects them afterwards. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "dist/host.h"
#include "dist/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_MEETING_HOST = MT_HOST_NAME };

/* `data` of every rank becomes that of rank 0, `bytes` of it; `host` is where rank 0 is for this
 * rank. Returns when all ranks have come, after at most timeout_s. Errors, MT_EDEVICE: rank 0 and
 * all who have come name the ranks that have not; two processes of one rank; ranks that count each
 * other differently; an address at which rank 0 cannot listen, or does not answer. */
mt_status mt_rendezvous(void *data, size_t bytes, char host[MT_MEETING_HOST],
                        const mt_launch *launch, const mt_meeting *meeting, double timeout_s);

#ifdef __cplusplus
}
#endif
