/* The backends behind mt_device_open, one open function each. */
#pragma once

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kernel sets, best first. A name of MIXTAPE_KERNELS counts for the backend that has it, and leaves
 * the other alone: a run on a GPU computes on the CPU too. */
#define MT_CPU_SETS(X)                                                                             \
    X(amx)                                                                                         \
    X(avx512_bf16)                                                                                 \
    X(avx512)                                                                                      \
    X(avx2)                                                                                        \
    X(portable)
#define MT_CUDA_SETS(X)                                                                            \
    X(sm_90a)                                                                                      \
    X(sm_90a_fp8)                                                                                  \
    X(cublaslt_grouped)                                                                            \
    X(cublaslt)                                                                                    \
    X(cublaslt_loop)                                                                               \
    X(generic)

/* The set that MIXTAPE_KERNELS names, as far as it concerns a backend: NULL where it is not set, or
 * names a set of another. */
const char *mt_kernel_set_asked(const char *backend);

/* Opens a backend's device; kernel_set and threads as in mt_device_open. */
typedef mt_status (*mt_backend_open)(mt_device **device, const char *kernel_set, int threads);

mt_status mt_cpu_open(mt_device **device, const char *kernel_set, int threads);
#ifdef MT_HAVE_cuda
/* Opens the card that this thread has selected, the first if none. */
mt_status mt_cuda_open(mt_device **device, const char *kernel_set, int threads);
mt_status mt_cuda_select(int index);
mt_status mt_cuda_count(int *count);
/* Makes a plan device count as the backend with this kernel set would take memory: its impl, its
 * set, and what `tables` (of ops that do nothing) say and do. */
mt_status mt_cuda_plan(mt_device *device, const char *kernel_set,
                       struct mt_kernels tables[MT_DTYPE_COUNT]);
/* The set that the selected card would get, "sm_90a" without one; its multiprocessors and compute
 * capability, major * 10 + minor, both 0 without one. */
const char *mt_cuda_usual_set(void);
int mt_cuda_processors(int *capability, int *shared);
enum { MT_CUDA_BUILT = 1 };
#else
enum { MT_CUDA_BUILT = 0 };
#define mt_cuda_plan(device, kernel_set, tables)                                                   \
    ((void)(device), (void)(kernel_set), (void)(tables), MT_EUNSUPPORTED)
#define mt_cuda_usual_set() NULL
#define mt_cuda_open        NULL
#define mt_cuda_select      NULL
#define mt_cuda_count       NULL
#endif
mt_status mt_plan_open(mt_device **device, const char *kernel_set, int threads);

#ifdef __cplusplus
}
#endif
