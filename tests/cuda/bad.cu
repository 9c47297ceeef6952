/* A kernel that writes where nothing is. */
#include "tests/cuda/bad.h"

static __global__ void bad_kernel(volatile int *p)
{
    *p = 1;
}

extern "C" mt_status bad_launch(mt_stream *stream)
{
    bad_kernel<<<1, 1, 0, mt_cuda_stream(stream)>>>((int *)(uintptr_t)0x1000);
    MT_LAUNCHED(stream, "bad (a test's)");
    return MT_OK;
}
