/* Copies to shared memory that run while a thread does something else. */
#pragma once

#include <stdint.h>

/* Asks for BYTES (4, 8 or 16), at an address that is a multiple of them; those past the first
 * `there` become 0, and are not read. */
template <int BYTES>
static __device__ __forceinline__ void mt_copy_ask(void *to, const void *from, int there)
{
#ifdef __CUDA_ARCH__
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                     "r"(there)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(at), "l"(from),
                     "r"(there), "n"(BYTES)
                     : "memory");
#endif
}
/* What the thread has asked for since the last call is a group. */
static __device__ __forceinline__ void mt_copies_group()
{
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/* Waits for all of the thread's groups but the last LATER. */
template <int LATER> static __device__ __forceinline__ void mt_copies_wait()
{
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#endif
}
/* For all that the thread has asked for, whether of a group or not. */
static __device__ __forceinline__ void mt_copies_wait_all()
{
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
