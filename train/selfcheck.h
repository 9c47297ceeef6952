/* Small computations whose results are known: that this program on this machine computes at all. */
#pragma once

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Philox4x32-10 against the published known answers. Errors: MT_EINTERNAL names the vector. */
mt_status mt_selfcheck_philox(void);

/* fprop, dgrad and wgrad of three ragged members, one of them empty, by the device's path for
 * `dtype`, against f64. `*worst` receives the largest error in units of its limit. Errors:
 * MT_EINTERNAL above the limit, naming pass and element. */
mt_status mt_selfcheck_gemm(mt_device *device, mt_dtype dtype, double *worst);

#ifdef __cplusplus
}
#endif
