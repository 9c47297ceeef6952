/* Functions that run wherever their header is included: on the host, and in GPU code under nvcc. */
#pragma once

#if defined(__CUDACC__)
#define MT_HOST_DEVICE static inline __host__ __device__
#else
#define MT_HOST_DEVICE static inline
#endif
