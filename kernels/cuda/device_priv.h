/* The cuda device's own state, and the kernel sets: what device.c keeps and plan.c counts by. */
#pragma once

#include "kernels/backends.h"
#include "kernels/cuda/backend.h"
#include "kernels/cuda/cublaslt.h"

enum { MT_CUDA_COMPUTE_DTYPES = 3, MT_CUDA_LANES = 64 };

struct cuda {
    mt_device device;
    struct mt_device_ops ops;
    struct mt_kernels kernels[MT_CUDA_COMPUTE_DTYPES];
    cudaStream_t stream;
    int index;                       /* among the machine's */
    int processors, multiprocessors; /* that there are, and that kernels may stay on */
    bool hopper, fp8, synchronous;   /* MT_SYNC=1 */
    bool in_strips;                  /* quantize_path.h */
    int shared;                      /* bytes of shared memory that a block may have */
    mt_cublaslt *lt;                 /* NULL: GEMMs are ours */
    char gemm_path[MT_GEMM_TEXT];    /* of bf16 */
    struct mt_cuda_scratch {
        void *p;
        size_t bytes;
    } scratch, operands;
    struct mt_cuda_lane {
        void *stream; /* mt_stream's impl; NULL: free */
        struct mt_cuda_scratch scratch;
    } lanes[MT_CUDA_LANES]; /* streams beside the own one whose kernels have asked for scratch */
};

/* Gives back the scratch of a stream that ends. */
void mt_cuda_leave_lane(mt_device *device, const void *stream);

enum {
#define MT_CUDA_SET(name) MT_CUDA_SET_##name,
    MT_CUDA_SETS(MT_CUDA_SET)
#undef MT_CUDA_SET
        MT_CUDA_SET_COUNT
};

/* The kernels that a card may run. */
struct mt_cuda_set {
    const char *name;
    int least, most;       /* compute capability, major * 10 + minor */
    const char *gemm_path; /* of bf16, where it is ours */
    bool by_name;          /* only where it is asked for */
    bool hopper;           /* kernels for 9.0a, on such a card */
    bool fp8;              /* codes of fp8 are multiplied as they are, in fewer bits than f32 */
    bool cublaslt;         /* what of bf16 it takes, and of ragged groups if it is to: */
    mt_lt_groups groups;
};
extern const struct mt_cuda_set mt_cuda_sets[MT_CUDA_SET_COUNT]; /* best first */
/* What products of a dtype wider than bf16 run by; NULL: it is not. */
static inline const char *mt_cuda_wide_gemm_path(mt_dtype dtype, bool hopper)
{
    return dtype == MT_F64   ? "tiled f64"
           : dtype != MT_F32 ? NULL
           : hopper          ? "wgmma of f32's planes, tiled f32"
                             : "tiled f32";
}
