/* How quantize goes about its work, where tests have to choose. */
#pragma once

#include "core/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Strips of tiles on a cuda device: of several even in groups so small that each tile would get a
 * thread block; not so at first. */
void mt_cuda_quantize_in_strips(mt_device *device, bool always);

#ifdef __cplusplus
}
#endif
