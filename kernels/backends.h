/* The backends behind mt_device_open, one open function each. */
#pragma once

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a backend's device; kernel_set and threads as in mt_device_open. */
typedef mt_status (*mt_backend_open)(mt_device **device, const char *kernel_set, int threads);

mt_status mt_cpu_open(mt_device **device, const char *kernel_set, int threads);
#ifdef MT_HAVE_cuda
/* Opens the card that this thread has selected, the first if none. */
mt_status mt_cuda_open(mt_device **device, const char *kernel_set, int threads);
mt_status mt_cuda_select(int index);
mt_status mt_cuda_count(int *count);
#else
#define mt_cuda_open   NULL
#define mt_cuda_select NULL
#define mt_cuda_count  NULL
#endif
mt_status mt_plan_open(mt_device **device, const char *kernel_set, int threads);

#ifdef __cplusplus
}
#endif
