/* Argument checks of group quantize and dequantize. */
#include "kernels/check.h"

bool mt_check_same_group(const mt_group *a, const mt_group *b)
{
    return a->members == b->members && a->m == b->m && a->k == b->k &&
           a->first_dims == b->first_dims && a->last_dims == b->last_dims &&
           a->offsets == b->offsets;
}

/* Whether codes may lie so. */
static bool is_known(const mt_direction *d, mt_dir dir, const mt_group *group, bool decoded)
{
    return d->layout == MT_LAYOUT_COMPACT || (decoded && d->layout == MT_LAYOUT_DECODED) ||
           (d->layout == MT_LAYOUT_PADDED && mt_direction_pads(d, dir, group));
}

mt_status mt_check_source(const mt_qtensor *q, mt_dir dir, const char *op)
{
    const char *side = dir == MT_ROW ? "row" : "column";
    MT_REQUIRE(q && (unsigned)dir < MT_DIR_COUNT, MT_EINVAL, "%s: no source", op);
    MT_TRY(mt_qtensor_check(q, op));
    const mt_direction *d = &q->dir[dir];
    MT_REQUIRE(d->format, MT_EINVAL, "%s: the source has no %s direction", op, side);
    MT_REQUIRE(is_known(d, dir, &q->group, false), MT_EUNSUPPORTED,
               "%s: the source's %s direction is not compact", op, side);
    bool empty = mt_group_is_empty(&q->group);
    MT_REQUIRE(d->codes || empty, MT_EINVAL, "%s: the source's codes are NULL", op);
    MT_REQUIRE(d->scales || empty || d->format->scale == MT_SCALE_NONE, MT_EINVAL,
               "%s: the source's scales are NULL", op);
    MT_REQUIRE(d->amax || empty || !d->format->second_level, MT_EINVAL,
               "%s: the source's amax is NULL, the scale of %s is made from it", op,
               d->format->name);
    return MT_OK;
}

static mt_status check_result(const struct mt_quantize_args *a, mt_dir dir)
{
    const mt_direction *d = &a->out->dir[dir];
    const char *side = dir == MT_ROW ? "row" : "column";
    if (!d->format) return MT_OK;
    MT_REQUIRE(dir == MT_COL || (!d->options.rht && !d->options.from_dequantized), MT_EINVAL,
               "quantize: rht and source=dequantized are for the column direction");
    const mt_format *row = a->out->dir[MT_ROW].format;
    MT_REQUIRE(!d->options.from_dequantized || !row || row->element != MT_ELEMENT_PLAIN, MT_EINVAL,
               "quantize: source=dequantized takes what the codes of the row direction hold, which "
               "is %s: it has none",
               row->name);
    MT_REQUIRE(is_known(d, dir, &a->out->group, true), MT_EUNSUPPORTED,
               "quantize: the %s direction is not compact", side);
    bool empty = mt_group_is_empty(&a->out->group), codes = a->pass != MT_QUANTIZE_AMAX;
    MT_REQUIRE(d->codes || empty || !codes, MT_EINVAL,
               "quantize: codes of the %s direction are NULL", side);
    bool per_member = d->format->scale != MT_SCALE_NONE && d->format->block == 0;
    bool scales = d->format->scale != MT_SCALE_NONE &&
                  (per_member ? a->out->group.members : !empty && d->layout != MT_LAYOUT_DECODED);
    MT_REQUIRE(d->scales || !scales || !codes, MT_EINVAL,
               "quantize: scales of the %s direction are NULL", side);
    bool amax = d->format->second_level || a->pass == MT_QUANTIZE_AMAX ||
                (a->pass == MT_QUANTIZE_CODES && mt_format_needs_amax(d->format));
    MT_REQUIRE(d->amax || !amax || a->out->group.members == 0, MT_EINVAL,
               "quantize: amax of the %s direction is NULL, this pass of %s needs it", side,
               d->format->name);
    return MT_OK;
}

static bool is_made(const struct mt_quantize_args *a)
{
    return a->row_token || a->swiglu || a->z;
}

/* A source that ops before it make. */
static mt_status check_made(const struct mt_quantize_args *a)
{
    const mt_direction *d = &a->src->dir[a->src_dir];
    MT_REQUIRE((a->row_token != NULL) + a->swiglu + (a->z != NULL) == 1, MT_EINVAL,
               "quantize: two of row_token, swiglu and z at once");
    MT_REQUIRE(!a->z || a->src->group.k % 2 == 0, MT_EINVAL, "quantize: z has %lld columns",
               (long long)a->src->group.k);
    MT_REQUIRE(d->format == mt_format_plain(a->dtype), MT_EINVAL,
               "quantize: %s is %s, must be plain %s",
               a->row_token ? "the source of gathered rows"
               : a->swiglu  ? "what the SwiGLU is of"
                            : "the gradient of the SwiGLU",
               d->format->name, mt_dtype_name(a->dtype));
    MT_REQUIRE(!a->src->group.last_dims, MT_EINVAL,
               "quantize: rows that are made have one width, not the group's last_dims");
    MT_CHECK_EXTENT("quantize", a, tokens);
    MT_REQUIRE(!a->row_token || a->rows_used, MT_EINVAL, "quantize: rows_used is NULL");
    if (!a->weights) return MT_OK;
    MT_REQUIRE((a->row_token || a->dweights) && a->position, MT_EINVAL,
               "quantize: weights need row_token, or dweights, and position");
    MT_CHECK_POSITIVE("quantize", a, top_k);
    return MT_OK;
}

mt_status mt_quantize_check(const struct mt_quantize_args *a)
{
    MT_TRY(mt_check_source(a->src, a->src_dir, "quantize"));
    MT_REQUIRE(a->out, MT_EINVAL, "quantize: no result");
    MT_TRY(mt_qtensor_check(a->out, "quantize"));
    MT_REQUIRE((unsigned)a->pass < MT_QUANTIZE_PASS_COUNT, MT_EINVAL, "quantize: pass %d",
               (int)a->pass);
    MT_REQUIRE(mt_check_same_group(&a->src->group, &a->out->group), MT_EINVAL,
               "quantize: source and result are not of one group");
    MT_REQUIRE(!a->dweights || (a->z && a->position), MT_EINVAL,
               "quantize: dweights need z and position");
    if (is_made(a)) MT_TRY(check_made(a));
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) MT_TRY(check_result(a, (mt_dir)dir));
    return MT_OK;
}

mt_status mt_quantize_scratch(mt_stream *stream, const struct mt_quantize_args *args, size_t *bytes)
{
    const struct mt_kernels *kernels;
    *bytes = 0;
    if (!is_made(args)) return MT_OK;
    MT_TRY(mt_device_kernels(stream->device, args->dtype, &kernels));
    if (kernels->quantize_fuses && kernels->quantize_fuses(stream, args)) return MT_OK;
    *bytes = (size_t)mt_group_capacity(&args->src->group) * mt_dtype_size(args->dtype);
    return MT_OK;
}

mt_status mt_quantize_parts(mt_stream *stream, const struct mt_quantize_args *args)
{
    const mt_group *g = &args->src->group;
    struct mt_quantize_args rest = *args;
    mt_qtensor made = mt_qtensor_plain(*g, args->dtype, args->scratch);
    const void *from = args->src->dir[args->src_dir].codes;
    int64_t rows = g->first_dims ? g->m : g->members * g->m;
    MT_REQUIRE(args->scratch || mt_group_capacity(g) == 0, MT_EINVAL, "quantize: scratch is NULL");
    if (args->row_token && args->weights)
        MT_TRY(mt_combine_bwd(stream, &(struct mt_combine_bwd_args){ .dtype = args->dtype,
                                                                     .tokens = args->tokens,
                                                                     .width = g->k,
                                                                     .top_k = args->top_k,
                                                                     .dx = args->scratch,
                                                                     .dy = from,
                                                                     .weights = args->weights,
                                                                     .position = args->position }));
    else if (args->row_token)
        MT_TRY(mt_gather_fwd(stream, &(struct mt_gather_fwd_args){ .dtype = args->dtype,
                                                                   .tokens = args->tokens,
                                                                   .width = g->k,
                                                                   .top_k = args->top_k,
                                                                   .rows = rows,
                                                                   .y = args->scratch,
                                                                   .x = from,
                                                                   .row_token = args->row_token,
                                                                   .rows_used = args->rows_used,
                                                                   .position = args->position }));
    else if (args->z)
        MT_TRY(mt_swiglu_bwd(stream, &(struct mt_swiglu_bwd_args){ .dtype = args->dtype,
                                                                   .rows = rows,
                                                                   .width = g->k / 2,
                                                                   .rows_used = args->rows_used,
                                                                   .dx = args->scratch,
                                                                   .dy = from,
                                                                   .x = args->z }));
    else
        MT_TRY(mt_swiglu_fwd(stream, &(struct mt_swiglu_fwd_args){ .dtype = args->dtype,
                                                                   .rows = rows,
                                                                   .width = g->k,
                                                                   .rows_used = args->rows_used,
                                                                   .y = args->scratch,
                                                                   .x = from }));
    if (args->dweights && args->pass != MT_QUANTIZE_AMAX)
        MT_TRY(mt_weights_bwd(stream,
                              &(struct mt_weights_bwd_args){ .dtype = args->dtype,
                                                             .tokens = args->tokens,
                                                             .width = g->k / 2,
                                                             .top_k = args->top_k,
                                                             .dweights = args->dweights,
                                                             .dz = args->scratch,
                                                             .z = args->scratch ? args->z : NULL,
                                                             .weights = args->weights,
                                                             .position = args->position }));
    rest.src = &made, rest.src_dir = MT_ROW;
    rest.row_token = NULL, rest.weights = rest.z = NULL, rest.swiglu = false;
    rest.dweights = NULL;
    return mt_quantize(stream, &rest);
}

mt_status mt_dequantize_check(const struct mt_dequantize_args *a)
{
    MT_TRY(mt_check_source(a->src, a->dir, "dequantize"));
    MT_REQUIRE(mt_format_plain(a->y_dtype), MT_EINVAL, "dequantize: y cannot be %s",
               mt_dtype_name(a->y_dtype));
    MT_CHECK_POINTER("dequantize", a, y, mt_group_capacity(&a->src->group));
    return MT_OK;
}

mt_status mt_swizzle_scales_check(const struct mt_swizzle_scales_args *a)
{
    MT_TRY(mt_check_source(a->src, a->dir, "swizzle_scales"));
    mt_direction d = a->src->dir[a->dir];
    d.swizzled = !d.swizzled;
    mt_qtensor other = { .group = a->src->group };
    other.dir[a->dir] = d;
    MT_TRY(mt_qtensor_check(&other, "swizzle_scales"));
    MT_CHECK_POINTER("swizzle_scales", a, out, mt_direction_scale_bytes(&d, a->dir, &other.group));
    return MT_OK;
}

mt_status mt_delayed_update_check(const struct mt_delayed_update_args *a)
{
    MT_CHECK_EXTENT("delayed_update", a, members);
    MT_REQUIRE(a->length >= 2, MT_EINVAL, "delayed_update: the history has %lld slots, needs 2",
               (long long)a->length);
    MT_REQUIRE(a->element > MT_ELEMENT_PLAIN && a->element < MT_ELEMENT_COUNT, MT_EINVAL,
               "delayed_update: element type %d", (int)a->element);
    MT_CHECK_POINTER("delayed_update", a, history, a->members);
    MT_CHECK_POINTER("delayed_update", a, scale, a->members);
    return MT_OK;
}
