/* Products of f32 by planes of bf16 on Hopper's tensor cores (gemm_planes_sm90.cu). */
#pragma once

#include "kernels/cuda/gemm.cuh"

/* Whether they are: operands of f32 in runs of four at 16 bytes, of extents that pay. */
extern "C" bool mt_cuda_gemm_splits(const mt_stream *stream, const gemm_problem *g);
extern "C" mt_status mt_cuda_gemm_planes(mt_stream *stream, gemm_problem *g);
