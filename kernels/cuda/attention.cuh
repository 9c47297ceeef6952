/* Causal attention: its shape, and the paths on tensor cores. */
#pragma once

#include "kernels/cuda/element.cuh"

/* Rows of qkv are `width` elements, rows of y `pitch`. */
struct mt_attention_shape {
    int64_t batch, sequence, nq, nkv, dim, width, pitch;
};

static inline struct mt_attention_shape mt_attention_shape_of(int64_t batch, int64_t sequence,
                                                              int64_t nq, int64_t nkv, int64_t dim)
{
    return { batch, sequence, nq, nkv, dim, (nq + 2 * nkv) * dim, nq * dim };
}

/* Where the head of a block begins, in rows of qkv: h counts query heads, then key heads, then
 * value heads. */
static __device__ __forceinline__ int64_t mt_head_at(const struct mt_attention_shape &s, int64_t b,
                                                     int64_t h)
{
    return b * s.sequence * s.width + h * s.dim;
}

/* On the tensor cores: bf16, heads of a multiple of 8 up to 128, all on 16 bytes, scale > 0, rows
 * of less than 2^24 elements. *done is false where a call is not of this kind, or the device has
 * too little shared memory for it. dot [batch, nq, sequence] = <dy, y>. */
extern "C" mt_status mt_attention_fwd_mma(mt_stream *stream, const struct mt_attention_fwd_args *a,
                                          bool *done);
extern "C" mt_status mt_attention_bwd_mma(mt_stream *stream, const struct mt_attention_bwd_args *a,
                                          const float *dot, bool *done);
/* The same of f32, by planes of bf16. */
extern "C" mt_status mt_attention_fwd_planes(mt_stream *stream,
                                             const struct mt_attention_fwd_args *a, bool *done);
extern "C" mt_status mt_attention_bwd_planes(mt_stream *stream,
                                             const struct mt_attention_bwd_args *a,
                                             const float *dot, bool *done);
/* On Hopper: bf16, heads of 64 or 128, all on 16 bytes, scale > 0. */
extern "C" mt_status mt_attention_fwd_sm90(mt_stream *stream, const struct mt_attention_fwd_args *a,
                                           bool *done);
extern "C" mt_status mt_attention_bwd_sm90(mt_stream *stream, const struct mt_attention_bwd_args *a,
                                           bool *done);
/* The scratch of it; 0 where it does not suit. */
extern "C" size_t mt_attention_bwd_sm90_scratch(const mt_stream *stream,
                                                const struct mt_attention_bwd_args *a);
