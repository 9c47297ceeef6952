/* Linked into a copy of the program: wherever it opens a device that computes, it gets the guarded
 * one. */
#include "tests/support/guard.h"

mt_status __real_mt_device_open(mt_device **device, const char *name, const char *kernel_set,
                                int threads);
mt_status __wrap_mt_device_open(mt_device **device, const char *name, const char *kernel_set,
                                int threads);

mt_status __wrap_mt_device_open(mt_device **device, const char *name, const char *kernel_set,
                                int threads)
{
    if (strcmp(name, "plan") != 0 && strcmp(name, "cuda") != 0)
        return guard_open(device, kernel_set, threads);
    return __real_mt_device_open(device, name, kernel_set, threads);
}
