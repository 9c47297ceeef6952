/* Causal attention of bf16 on tensor cores, any card from compute capability 8.0 on. */
#include "kernels/cuda/attention_mma.cuh"

mt_status mt_attention_fwd_mma(mt_stream *stream, const struct mt_attention_fwd_args *a, bool *done)
{
    return forward_any<mt_bf16>(stream, a, done);
}

mt_status mt_attention_bwd_mma(mt_stream *stream, const struct mt_attention_bwd_args *a,
                               const float *dot, bool *done)
{
    return backward_any<mt_bf16>(stream, a, dot, done);
}
