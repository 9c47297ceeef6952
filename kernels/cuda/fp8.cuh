/* Two fp8 elements at a time by the conversions of GPUs from compute capability 8.9 on; others have
 * kernels/codec.h alone. */
#pragma once

#include <cuda_fp16.h>

#include "core/format.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define MT_HAS_NATIVE_FP8 1
/* f16 holds every value, Inf and NaN too. */
static __device__ __forceinline__ void native_values(float v[2], int element, uint32_t codes)
{
    uint32_t h;
    if (element == MT_ELEMENT_E4M3)
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((uint16_t)codes));
    else
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(h) : "h"((uint16_t)codes));
    v[0] = __half2float(__ushort_as_half((uint16_t)h));
    v[1] = __half2float(__ushort_as_half((uint16_t)(h >> 16)));
}
/* Two casts: mt_encode's bits, a NaN product being the one that multiplication makes. */
static __device__ __forceinline__ uint32_t native_pair(mt_element element, float low, float high)
{
    uint16_t w;
    if (element == MT_ELEMENT_E4M3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(w) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(w) : "f"(high), "f"(low));
    return w;
}
#else
#define MT_HAS_NATIVE_FP8 0
static __device__ __forceinline__ void native_values(float *, int, uint32_t) {}
static __device__ __forceinline__ uint32_t native_pair(mt_element, float, float)
{
    return 0;
}
#endif
