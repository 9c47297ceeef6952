/* Sums and maxima over blocks that came from several ranks. No op of the table: what the CPU adds
 * up lies in host memory, and has no device (dist/comm.c). */
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

#ifdef __cplusplus
}
#endif
