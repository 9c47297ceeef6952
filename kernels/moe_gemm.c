/* GEMMs of the expert layer as several ops: the checks, and what is done where they are not one. */
#include "kernels/check.h"

/* X or dY as it is given and where it stands. */
static const mt_qtensor *gathered(const struct mt_moe_gemm_args *args)
{
    return args->gemm.layout == MT_GEMM_NT && !args->gathers_b ? args->gemm.a : args->gemm.b;
}

static mt_status check_gather(const struct mt_moe_gemm_args *args)
{
    const mt_qtensor *x = gathered(args);
    const mt_direction *d = args->gemm.layout == MT_GEMM_NT ? &x->dir[MT_COL] : &x->dir[MT_ROW];
    MT_REQUIRE(args->gemm.layout != MT_GEMM_NN || (args->z && args->weights && args->position),
               MT_EINVAL, "moe_gemm NN: gathered rows need z, weights and position");
    MT_REQUIRE(d->format == mt_format_plain(args->dtype) && d->layout == MT_LAYOUT_COMPACT,
               MT_EINVAL, "moe_gemm: gathered rows are %s, must be plain %s", d->format->name,
               mt_dtype_name(args->dtype));
    MT_CHECK_EXTENT("moe_gemm", args, tokens);
    MT_REQUIRE(args->rows_used, MT_EINVAL, "moe_gemm: rows_used is NULL");
    return MT_OK;
}

mt_status mt_moe_gemm_check(const struct mt_moe_gemm_args *args)
{
    const struct mt_gemm_args *g = &args->gemm;
    MT_REQUIRE(args->dtype == g->dtype, MT_EINVAL, "moe_gemm: dtype is %s, that of the gemm %s",
               mt_dtype_name(args->dtype), mt_dtype_name(g->dtype));
    MT_TRY(mt_gemm_check(g));
    if (args->row_token) MT_TRY(check_gather(args));
    bool rounded = g->d_dtype == args->dtype && !g->c;
    bool after = g->layout == MT_GEMM_NN && args->row_token;
    MT_REQUIRE(!args->act || after ||
                   (g->layout == MT_GEMM_TN && rounded && g->a->group.m % 2 == 0),
               MT_EINVAL, "moe_gemm: act is of a TN result of dtype, of even width, without c");
    MT_REQUIRE(!args->z || (g->layout == MT_GEMM_NN && rounded), MT_EINVAL,
               "moe_gemm: z is for an NN result of dtype, without c");
    MT_REQUIRE(!args->dweights || (args->z && args->weights && args->position), MT_EINVAL,
               "moe_gemm: dweights needs z, weights and position");
    return MT_OK;
}

/* Elements that the steps keep in between: gathered rows, or the product before its SwiGLU. */
static int64_t between(const struct mt_moe_gemm_args *args)
{
    const struct mt_gemm_args *g = &args->gemm;
    int64_t rows = g->b->group.first_dims ? g->b->group.m : g->b->group.members * g->b->group.m;
    if (args->row_token) return rows * gathered(args)->group.k;
    return args->z ? rows * g->a->group.k : 0;
}

mt_status mt_moe_gemm_scratch(mt_stream *stream, const struct mt_moe_gemm_args *args, size_t *bytes)
{
    const struct mt_kernels *kernels;
    MT_TRY(mt_device_kernels(stream->device, args->dtype, &kernels));
    if (!kernels->moe_gemm_fuses || !kernels->moe_gemm_fuses(stream, args, bytes))
        *bytes = (size_t)between(args) * mt_dtype_size(args->dtype);
    return MT_OK;
}

static mt_status gather(mt_stream *stream, mt_qtensor *x, const struct mt_moe_gemm_args *args)
{
    const mt_qtensor *from = gathered(args);
    const mt_direction *d =
        args->gemm.layout == MT_GEMM_NT ? &from->dir[MT_COL] : &from->dir[MT_ROW];
    const mt_group *group = &from->group;
    *x = mt_qtensor_plain(*group, args->dtype, args->scratch);
    return mt_gather_fwd(stream,
                         &(struct mt_gather_fwd_args){
                             .dtype = args->dtype,
                             .tokens = args->tokens,
                             .width = group->k,
                             .top_k = args->top_k,
                             .rows = group->first_dims ? group->m : group->members * group->m,
                             .y = args->scratch,
                             .x = d->codes,
                             .row_token = args->row_token,
                             .rows_used = args->rows_used,
                             .position = args->position });
}

mt_status mt_moe_gemm_parts(mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    struct mt_gemm_args g = args->gemm;
    mt_qtensor x;
    int64_t rows = g.b->group.first_dims ? g.b->group.m : g.b->group.members * g.b->group.m;
    MT_REQUIRE(args->scratch || between(args) == 0, MT_EINVAL, "moe_gemm: scratch is NULL");
    if (!rows && g.layout != MT_GEMM_NT) return mt_moe_gemm_weights(stream, args);
    MT_REQUIRE(g.layout != MT_GEMM_NN || !args->row_token, MT_EUNSUPPORTED,
               "moe_gemm NN: this device weights rows before the product");
    if (args->row_token) {
        MT_TRY(gather(stream, &x, args));
        *(g.layout == MT_GEMM_NT && !args->gathers_b ? &g.a : &g.b) = &x;
    }
    if (args->z) g.d = args->scratch;
    MT_TRY(mt_gemm(stream, &g));
    if (args->act)
        MT_TRY(mt_swiglu_fwd(stream, &(struct mt_swiglu_fwd_args){ .dtype = args->dtype,
                                                                   .rows = rows,
                                                                   .width = g.a->group.m / 2,
                                                                   .rows_used = args->rows_used,
                                                                   .y = args->act,
                                                                   .x = g.d }));
    if (args->z)
        MT_TRY(mt_swiglu_bwd(stream, &(struct mt_swiglu_bwd_args){ .dtype = args->dtype,
                                                                   .rows = rows,
                                                                   .width = g.a->group.k,
                                                                   .rows_used = args->rows_used,
                                                                   .dx = args->gemm.d,
                                                                   .dy = g.d,
                                                                   .x = args->z }));
    return mt_moe_gemm_weights(stream, args);
}

mt_status mt_moe_gemm_weights(mt_stream *stream, const struct mt_moe_gemm_args *args)
{
    if (!args->dweights) return MT_OK;
    return mt_weights_bwd(stream, &(struct mt_weights_bwd_args){ .dtype = args->dtype,
                                                                 .tokens = args->tokens,
                                                                 .width = args->gemm.a->group.k,
                                                                 .top_k = args->top_k,
                                                                 .dweights = args->dweights,
                                                                 .dz = args->gemm.d,
                                                                 .z = args->z,
                                                                 .weights = args->weights,
                                                                 .position = args->position });
}
