/* mt_gather_fwd by bulk copies, on Hopper. */
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/moe.h"

/* Whether it takes rows of this length; they and the operands are on 16 bytes. */
extern "C" bool mt_cuda_gather_sm90_suits(const struct mt_gather_fwd_args *a, int64_t row_bytes);
extern "C" mt_status mt_cuda_gather_sm90(mt_stream *stream, const struct mt_gather_fwd_args *a,
                                         int64_t row_bytes);
