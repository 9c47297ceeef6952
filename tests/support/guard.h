/* A device whose memory the host cannot touch: the cpu's kernels behind pages that are open only
 * while an op or a copy runs. What works here reads no device value on the host, so it works on a
 * GPU; a program that does faults at the line that did it. */
#pragma once

#include "kernels/ops.h"

/* Closed again by mt_device_destroy. Programs of tests whose environment says
 * MIXTAPE_TEST_DEVICE=guarded get it wherever they open "cpu". */
mt_status guard_open(mt_device **device, const char *kernel_set, int threads);
