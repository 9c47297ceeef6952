/* What a comm over GPUs asks of them beside the device's contract: sums and maxima over blocks that
 * came from several ranks (no op of the table: what the CPU adds up lies in host memory, and has no
 * device, dist/comm.c), and room to run in. */
#pragma once

#include "core/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* to[i] = the reduction over blocks b of block_b[i], i < count, in the order of the blocks:
 * ((x0 + x1) + x2) + ..., each addition rounded to the type (bf16: in f32, rounded once at the
 * end); the largest: NaN is larger than every number. Block b begins at from + b * stride elements,
 * but block `apart_block` at `apart`, unless that is NULL. `to` may be `apart`. */
struct mt_fold_args {
    mt_dtype dtype; /* f64 f32 bf16 i64 i32; others are MT_EUNSUPPORTED */
    bool largest;
    int blocks; /* at least 1 */
    int apart_block;
    int64_t count, stride;
    void *to;
    const void *from, *apart;
};
mt_status mt_cuda_fold(mt_stream *stream, const struct mt_fold_args *args);

/* From now on, kernels that stay on a multiprocessor for as long as they run leave `count` of them,
 * half of all at most, to others: what comes beside such a kernel would wait for its end. No result
 * depends on it. */
void mt_cuda_spare(mt_device *device, int count);

#ifdef __cplusplus
}
#endif
