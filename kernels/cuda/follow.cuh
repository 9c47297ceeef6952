/* Kernels that follow others: such a one may be on the card before the other has ended, and waits
 * for its results first of all. What one block has to prepare then costs no launch between. */
#pragma once

#include "kernels/cuda/backend.h"

/* In the kernel that follows, before it reads anything another kernel wrote. */
static __device__ __forceinline__ void wait_for_results(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* In the kernel before: the next one may come. */
static __device__ __forceinline__ void let_follow(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Launches a kernel that begins with wait_for_results. */
template <typename J>
static inline mt_status follow(mt_stream *stream, void (*kernel)(J), unsigned blocks,
                               unsigned threads, size_t bytes, const J &j)
{
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(blocks), config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = mt_cuda_stream(stream);
    config.attrs = &early;
    config.numAttrs = mt_cuda_is_hopper(stream) ? 1 : 0;
    MT_CUDA(cudaLaunchKernelEx(&config, kernel, j));
    return MT_OK;
}
