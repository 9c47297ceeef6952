/* Causal attention of f32 on tensor cores, as planes of bf16, any card from compute capability 8.0
 * on. */
#include "kernels/cuda/attention_mma.cuh"

mt_status mt_attention_fwd_planes(mt_stream *stream, const struct mt_attention_fwd_args *a,
                                  bool *done)
{
    return forward_any<float>(stream, a, done);
}

mt_status mt_attention_bwd_planes(mt_stream *stream, const struct mt_attention_bwd_args *a,
                                  const float *dot, bool *done)
{
    return backward_any<float>(stream, a, dot, done);
}
