/* How quantize, and attention, go about their work, where tests have to choose. */
#pragma once

#include "core/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Strips of tiles on a cuda device: of several even in groups so small that each tile would get a
 * thread block; not so at first. */
void mt_cuda_quantize_in_strips(mt_device *device, bool always);

/* A cuda device as if its thread blocks had so many bytes of shared memory, which they do. */
void mt_cuda_limit_shared(mt_device *device, int bytes);
int mt_cuda_shared(const mt_device *device);

#ifdef __cplusplus
}
#endif
