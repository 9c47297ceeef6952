/* Quantize of bf16 rows that are made on the way, where columns' codes go to padded lines. */
#pragma once

#include "kernels/cuda/quantize_tile.cuh"

/* quantize_gathered.cu: whether it knows a sweep over codes; that sweep. */
bool mt_cuda_gathered_suffice(const job *j);
mt_status mt_cuda_quantize_gathered(mt_stream *stream, const job *j);
/* quantize_tokens.cu: the same of rows alone, whose places among a token's slots are known. */
bool mt_cuda_tokens_suffice(const job *j, const struct mt_quantize_args *args);
mt_status mt_cuda_quantize_tokens(mt_stream *stream, const job *j,
                                  const struct mt_quantize_args *args);
