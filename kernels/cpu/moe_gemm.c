/* GEMMs of the expert layer with the ops beside them: rows are gathered, and SwiGLU is done, while
 * what they are about is in a core's caches. BLAS and bf16 have the ops in turn. */
#include "kernels/cpu/gemm_priv.h"

static bool is_plain(const mt_direction *d)
{
    return d->format == mt_format_plain(MT_ELEM_DTYPE);
}

bool MT_CPU(moe_gemm_fuses)(mt_stream *stream, const struct mt_moe_gemm_args *args, size_t *scratch)
{
    (void)stream;
    *scratch = 0;
    const struct mt_gemm_args *g = &args->gemm;
    bool known = args->rows_used || !g->b->group.first_dims; /* rows of members are all rows */
    if (args->gathers_b || (g->layout == MT_GEMM_NN && args->row_token)) return false;
    return MT_ISA_LEVEL > 0 && MT_ELEM_BITS != 16 && known && is_plain(mt_gemm_a(g)) &&
           is_plain(mt_gemm_b(g));
}

mt_status MT_CPU(moe_gemm)(mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    gemm_beside beside = { .row_token = args->row_token, .act = args->act, .z = args->z };
    int64_t rows = args->gemm.b->group.first_dims
                       ? args->gemm.b->group.m
                       : args->gemm.b->group.members * args->gemm.b->group.m;
    size_t scratch;
    bool whole;
    if (!MT_CPU(moe_gemm_fuses)(stream, args, &scratch)) return mt_moe_gemm_parts(stream, args);
    MT_TRY(MT_CPU(gemm_run)(stream, &args->gemm, &MT_CPU(gemm_blocks), &beside, &whole));
    if (!args->act) return mt_moe_gemm_weights(stream, args);
    if (whole) return MT_OK;
    return mt_swiglu_fwd(stream, &(struct mt_swiglu_fwd_args){ .dtype = args->dtype,
                                                               .rows = rows,
                                                               .width = args->gemm.a->group.m / 2,
                                                               .rows_used = args->rows_used,
                                                               .y = args->act,
                                                               .x = args->gemm.d });
}
