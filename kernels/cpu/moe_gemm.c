/* GEMMs of the expert layer with the ops beside them: here, in turn. */
#include "kernels/cpu/backend.h"
#include "kernels/cpu/variant.h"

mt_status MT_CPU(moe_gemm)(mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    return mt_moe_gemm_parts(stream, args);
}
