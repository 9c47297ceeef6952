/* GroupedLinear: N linear layers as one, the rows of each member contiguous. */
#include "layers/contribution.h"
#include "layers/linear_priv.h"

struct linear_attrs {
    int64_t members;       /* N */
    int64_t in, out, rows; /* K, N and M of the GEMM */
    int64_t first_row;     /* see mt_grouped_linear_part */
    int8_t in_at, out_at;  /* where these widths stand among the element offsets; -1: dense */
    /* saved values; -1: none */
    int8_t counts, elements, offsets, row_token, x, position, z, weights, slots, token, own_z;
    bool bias;
    bool weighs;            /* the weights are a second input */
    bool takes_da;          /* the gradient that comes is that of own_z's SwiGLU */
    bool x_coded, dy_coded; /* what wgrad reads are column codes */
    bool swiglu;            /* the saved x is z: what X is the SwiGLU of */
    bool gathers; /* dY [T, out], whose rows are weighted after dgrad's product, which leaves the
                     weighted x in the place of the saved one */
};

static int8_t width_index(const mt_ragged *rows, int64_t width)
{
    for (int8_t i = 0; i < MT_ROUTE_WIDTHS; i++)
        if (rows->widths[i] == width) return i;
    return -1;
}

/* What runs into a layer's GEMMs; NULL: nothing. */
struct beside {
    int64_t first_row;
    const mt_route *route; /* gathers the rows of x */
    mt_value *act;         /* SwiGLU of y */
    mt_value *z;           /* what x is the SwiGLU of; it may be given in place of x */
    mt_value *weights;     /* what the rows of the layer's end, at `slots`, are weighted by; not
                              stored: factors of 1 */
    mt_value *slots;
    bool weighs;             /* their gradient comes from here: they are a second input */
    const mt_route *combine; /* NULL, or the layer ends with mt_combine_fwd of y and `weights` */
    bool gathers;            /* see linear_attrs */
    mt_value *a; /* the SwiGLU of y, or of z, that nobody stores: its gradient is what flows */
};

/* Device address of the number of rows in use. */
static const int64_t *rows_used(const struct linear_attrs *a, const mt_tensor *offsets)
{
    return offsets->data ? (const int64_t *)offsets->data + a->members : NULL;
}

/* A GEMM with what runs into it. */
static mt_status multiply(mt_tape *tape, struct mt_moe_gemm_args *args)
{
    mt_stream *stream = mt_tape_stream(tape);
    mt_value *scratch = NULL;
    size_t bytes;
    if (!args->row_token && !args->act && !args->z) return mt_gemm(stream, &args->gemm);
    args->dtype = args->gemm.dtype;
    MT_TRY(mt_moe_gemm_scratch(stream, args, &bytes));
    if (bytes) {
        MT_TRY(mt_tape_value(tape, &scratch, MT_U8, 1, (int64_t[]){ (int64_t)bytes }));
        args->scratch = scratch->data.data;
    }
    MT_TRY(mt_moe_gemm(stream, args));
    mt_value_release(tape, &scratch);
    return MT_OK;
}

/* The group that a matrix of `width` columns is. */
static mt_group group_of(const struct linear_attrs *a, int64_t width, int at,
                         const mt_tensor *counts, const mt_tensor *elements)
{
    if (at < 0) return mt_group_uniform(1, a->rows, width);
    const int64_t *offsets = (const int64_t *)elements->data + at * (a->members + 1);
    return mt_group_ragged_rows(a->members, a->rows, width, counts->data, offsets);
}

static mt_status check(const mt_value *x, const mt_grouped_linear_layer *layer,
                       const mt_ragged *rows, const struct linear_attrs *a)
{
    const mt_param *w = layer->weight;
    const char *name = w->name;
    MT_REQUIRE(x->data.dtype == w->compute, MT_EINVAL,
               "grouped_linear %s: x is %s, the layer computes in %s", name,
               mt_dtype_name(x->data.dtype), mt_dtype_name(w->compute));
    MT_REQUIRE(!layer->bias || mt_param_count(layer->bias) == a->members * a->out, MT_EINVAL,
               "grouped_linear %s: %lld biases, the weight has %lld rows", name,
               (long long)mt_param_count(layer->bias), (long long)(a->members * a->out));
    MT_REQUIRE(!layer->bias || layer->bias->dtype == mt_dtype_wide(w->compute), MT_EINVAL,
               "grouped_linear %s: the bias is %s, the layer computes in %s", name,
               mt_dtype_name(layer->bias ? layer->bias->dtype : w->compute),
               mt_dtype_name(w->compute));
    MT_REQUIRE(mt_tensor_cols(&x->data) == (a->swiglu ? 2 : 1) * a->in, MT_EINVAL,
               "grouped_linear %s: x has %lld columns, the weight takes %lld%s", name,
               (long long)mt_tensor_cols(&x->data), (long long)a->in,
               a->swiglu ? " of half of them" : "");
    MT_REQUIRE(rows || a->members == 1, MT_EINVAL,
               "grouped_linear %s: %lld members need the rows of each", name,
               (long long)a->members);
    MT_REQUIRE(!rows || (a->in_at >= 0 && a->out_at >= 0), MT_EINVAL,
               "grouped_linear %s: the route plan has no offsets for widths %lld and %lld", name,
               (long long)a->in, (long long)a->out);
    MT_REQUIRE(!rows || rows->members == a->members, MT_EINVAL,
               "grouped_linear %s: rows of %lld members for a weight of %lld", name,
               (long long)(rows ? rows->members : 0), (long long)a->members);
    return MT_OK;
}

/* What backward reads: which rows are whose, and, for wgrad, x or its column codes. */
static void save(mt_node_spec *spec, struct linear_attrs *a, mt_value *x, mt_value *codes,
                 mt_value *y, const mt_ragged *rows, const struct beside *beside)
{
    int8_t n = 0;
    a->counts = a->elements = a->offsets = a->row_token = a->x = a->position = a->z = -1;
    a->weights = a->slots = a->token = a->own_z = -1;
    if (rows) {
        spec->saved[a->counts = n++] = rows->counts;
        spec->saved[a->elements = n++] = rows->elements;
    }
    if (rows && (beside->route || beside->z)) spec->saved[a->offsets = n++] = rows->offsets;
    if (beside->route) spec->saved[a->position = n++] = beside->route->position;
    if (beside->z && !beside->a) spec->saved[a->z = n++] = beside->z;
    if (!beside->z && (beside->a || beside->weighs)) spec->saved[a->own_z = n++] = y;
    if (beside->weights && beside->weights->data.data)
        spec->saved[a->weights = n++] = beside->weights;
    if (beside->weights) spec->saved[a->slots = n++] = beside->slots;
    if (beside->combine) spec->saved[a->token = n++] = beside->combine->row_token;
    if (spec->params[0]->frozen) return;
    if (beside->route && !codes) spec->saved[a->row_token = n++] = beside->route->row_token;
    a->x_coded = codes != NULL;
    spec->saved[a->x = n] = codes ? codes : x;
}

/* y [T, out] of the layer's rows. */
static mt_status combine(mt_tape *tape, mt_value **y, const mt_value *rows,
                         const struct beside *beside)
{
    const mt_route *route = beside->combine;
    int64_t width = mt_tensor_cols(&rows->data);
    MT_TRY(mt_tape_value(tape, y, rows->data.dtype, 2, (int64_t[]){ route->tokens, width }));
    return mt_combine_fwd(mt_tape_stream(tape),
                          &(struct mt_combine_fwd_args){ .dtype = rows->data.dtype,
                                                         .tokens = route->tokens,
                                                         .width = width,
                                                         .top_k = route->top_k,
                                                         .y = (*y)->data.data,
                                                         .x = rows->data.data,
                                                         .weights = beside->weights->data.data,
                                                         .position = route->position->data.data });
}

static mt_status linear(mt_tape *tape, mt_value **y, mt_value *x,
                        const mt_grouped_linear_layer *layer, const mt_ragged *rows,
                        const struct beside *beside)
{
    const mt_route *route = beside->route;
    mt_param *w = layer->weight;
    struct linear_attrs a = { .members = w->group.members,
                              .in = w->group.k,
                              .out = w->group.m,
                              .rows =
                                  route ? route->tokens * route->top_k : mt_tensor_rows(&x->data),
                              .first_row = beside->first_row,
                              .in_at = -1,
                              .out_at = -1,
                              .bias = layer->bias != NULL,
                              .weighs = beside->weighs,
                              .takes_da = !beside->z && beside->a,
                              .swiglu = x == beside->z,
                              .gathers = beside->gathers };
    if (rows) a.in_at = width_index(rows, a.in), a.out_at = width_index(rows, a.out);
    MT_TRY(check(x, layer, rows, &a));
    mt_dtype dtype = x->data.dtype;
    mt_value *made;
    MT_TRY(mt_tape_value(tape, &made, dtype, 2, (int64_t[]){ a.rows, a.out }));
    bool saves_input =
        w->linear && (w->linear->save_original_input || (route && mt_linear_keeps_x(w)));
    struct mt_linear_operand qx = {
        .q = mt_qtensor_plain(group_of(&a, a.in, a.in_at, rows ? &rows->counts->data : NULL,
                                       rows ? &rows->elements->data : NULL),
                              dtype, x->data.data),
        .wanted = { true, mt_tape_recording(tape) && !w->frozen && !saves_input },
        .first_row = a.first_row,
        .row_token = route ? route->row_token->data.data : NULL,
        .tokens = route ? route->tokens : 0,
        .position = route ? route->position->data.data : NULL,
        .top_k = route ? route->top_k : 0,
        .swiglu = a.swiglu,
        .rows_used = rows && rows->offsets ? rows_used(&a, &rows->offsets->data) : NULL,
    };
    MT_TRY(mt_linear_observe(tape, w, MT_OPERAND_X, &qx.q));
    MT_TRY(mt_linear_quantize(tape, w, MT_OPERAND_X, &qx));
    MT_TRY(mt_param_need(w, MT_ROW));
    MT_REQUIRE(w->weight.dir[MT_ROW].format, MT_EINVAL,
               "grouped_linear %s: the weight has no compute copy (mt_linear_reserve, "
               "mt_linear_place, mt_linear_refresh)",
               w->name);
    if (layer->bias) MT_TRY(mt_param_need(layer->bias, MT_ROW));
    struct mt_moe_gemm_args args = {
        .gemm = { .dtype = dtype,
                  .layout = MT_GEMM_TN,
                  .a = &w->weight,
                  .b = &qx.q,
                  .d = made->data.data,
                  .d_dtype = dtype,
                  .bias = layer->bias ? layer->bias->master : NULL },
        .row_token = qx.memory[MT_ROW] ? NULL : qx.row_token,
        .tokens = qx.tokens,
        .position = qx.position,
        .top_k = qx.top_k,
        .rows_used = qx.rows_used,
        .act = beside->act ? beside->act->data.data : NULL,
    };
    MT_TRY(multiply(tape, &args));
    *y = made;
    if (beside->combine) MT_TRY(combine(tape, y, made, beside));
    mt_value *input = beside->z ? beside->z : x, *output = *y;
    if (beside->a) *(beside->z ? &input : &output) = beside->a;
    mt_node_spec spec = { .op = &mt_op_grouped_linear,
                          .attrs = &a,
                          .attrs_bytes = sizeof a,
                          .inputs = { input, beside->weighs ? beside->weights : NULL },
                          .outputs = { output },
                          .params = { w, layer->bias } };
    save(&spec, &a, x, qx.memory[MT_COL], made, rows, beside);
    MT_TRY(mt_tape_record(tape, &spec));
    if (beside->combine) mt_value_release(tape, &made);
    mt_linear_operand_release(tape, &qx);
    return MT_OK;
}

mt_status mt_grouped_linear(mt_tape *tape, mt_value **y, mt_value *x,
                            const mt_grouped_linear_layer *layer, const mt_ragged *rows)
{
    MT_REQUIRE(layer && layer->weight, MT_EINVAL, "grouped_linear: the layer has no weight");
    return linear(tape, y, x, layer, rows, &(struct beside){ 0 });
}

mt_status mt_grouped_linear_part(mt_tape *tape, mt_value **y, mt_value *x,
                                 const mt_grouped_linear_layer *layer, int64_t first_row)
{
    MT_REQUIRE(layer && layer->weight, MT_EINVAL, "grouped_linear: the layer has no weight");
    return linear(tape, y, x, layer, NULL, &(struct beside){ .first_row = first_row });
}

bool mt_down_reads_z(const mt_param *w)
{
    return !mt_linear_is_native(w, MT_OPERAND_X, MT_ROW) && !mt_linear_observed(w) &&
           (w->frozen || !mt_linear_is_native(w, MT_OPERAND_X, MT_COL));
}

bool mt_gate_up_takes_da(const mt_grouped_linear_layer *layer, const mt_param *down)
{
    const mt_param *w = layer->weight;
    return mt_down_reads_z(down) && !mt_linear_is_native(down, MT_OPERAND_DY, MT_ROW) &&
           !layer->bias && !mt_linear_observed(w) &&
           !mt_linear_is_native(w, MT_OPERAND_DY, MT_ROW) &&
           (w->frozen || !mt_linear_is_native(w, MT_OPERAND_DY, MT_COL));
}

bool mt_gate_up_weighs(const mt_grouped_linear_layer *down)
{
    const mt_param *w = down->weight;
    bool exact = mt_linear_is_native(w, MT_OPERAND_X, MT_ROW) &&
                 mt_linear_is_native(w, MT_OPERAND_W, MT_ROW);
    return !down->bias && !exact && !mt_linear_is_native(w, MT_OPERAND_DY, MT_ROW) &&
           !w->linear->save_expert_output;
}

mt_status mt_gate_up(mt_tape *tape, mt_value **z, mt_value **a, mt_value *x, mt_value *weights,
                     const mt_grouped_linear_layer *layer, const mt_ragged *rows,
                     const mt_route *route, bool stores_a)
{
    mt_value *gathered = NULL, *slots = weights ? route->position : NULL;
    MT_REQUIRE(!route || mt_tensor_rows(&x->data) == route->tokens, MT_EINVAL,
               "gate_up: x has %lld rows, the route %lld tokens",
               (long long)mt_tensor_rows(&x->data), (long long)(route ? route->tokens : 0));
    if (route && mt_linear_observed(layer->weight)) MT_TRY(mt_gather(tape, &gathered, x, route));
    if (gathered) x = gathered, route = NULL;
    int64_t n = route ? route->tokens * route->top_k : mt_tensor_rows(&x->data);
    int64_t width = layer->weight->group.m / 2;
    struct beside beside = {
        .route = route, .weights = weights, .slots = slots, .weighs = weights != NULL
    };
    if (a && !stores_a)
        MT_TRY(mt_tape_input(tape, a, mt_tensor_2d(NULL, x->data.dtype, n, width), false));
    else if (a)
        MT_TRY(mt_tape_value(tape, a, x->data.dtype, 2, (int64_t[]){ n, width }));
    if (a) *(stores_a ? &beside.act : &beside.a) = *a;
    MT_TRY(linear(tape, z, x, layer, rows, &beside));
    mt_value_release(tape, &gathered);
    return beside.act ? mt_swiglu_record(tape, *a, *z, rows) : MT_OK;
}

bool mt_down_weighs(const mt_device *device, const mt_grouped_linear_layer *layer)
{
    const mt_param *w = layer->weight;
    const struct mt_kernels *kernels = device->kernels[w->compute];
    return kernels && kernels->weights_from_dz && !layer->bias &&
           mt_linear_is_native(w, MT_OPERAND_X, MT_ROW) &&
           mt_linear_is_native(w, MT_OPERAND_W, MT_ROW) &&
           mt_linear_is_native(w, MT_OPERAND_W, MT_COL) &&
           mt_linear_is_native(w, MT_OPERAND_DY, MT_ROW);
}

/* By the layer's shape alone: the weights' place is in the bits. */
static bool gathers_dy(const mt_device *device, const mt_grouped_linear_layer *layer)
{
    const mt_param *w = layer->weight;
    return mt_down_weighs(device, layer) && mt_linear_is_native(w, MT_OPERAND_X, MT_COL) &&
           mt_linear_is_native(w, MT_OPERAND_DY, MT_COL) &&
           device->kernels[w->compute]->weighs_after &&
           device->kernels[w->compute]->weighs_after(w->group.m, w->group.k);
}

bool mt_down_combines(const mt_device *device, const mt_grouped_linear_layer *layer)
{
    const mt_param *w = layer->weight;
    if (gathers_dy(device, layer)) return true;
    return mt_gate_up_weighs(layer) && !mt_linear_observed(w) &&
           (w->frozen || !mt_linear_is_native(w, MT_OPERAND_DY, MT_COL));
}

mt_status mt_down(mt_tape *tape, mt_value **y, mt_value *z, mt_value *a, mt_value *weights,
                  const mt_grouped_linear_layer *layer, const mt_ragged *rows,
                  const mt_route *route)
{
    const mt_device *device = mt_tape_stream(tape)->device;
    bool combines = weights && mt_down_combines(device, layer),
         weighs = weights && !mt_gate_up_weighs(layer);
    MT_REQUIRE(!route || mt_tensor_rows(&z->data) == route->room, MT_EINVAL,
               "down: z has %lld rows, the route %lld", (long long)mt_tensor_rows(&z->data),
               (long long)(route ? route->room : 0));
    if (!combines && !weighs) weights = NULL;
    struct beside beside = { .z = z,
                             .weights = weights,
                             .slots = weights ? route->position : NULL,
                             .weighs = weighs,
                             .gathers = weights && gathers_dy(device, layer),
                             .a = a && !a->data.data ? a : NULL,
                             .combine = combines ? route : NULL };
    return linear(tape, y, a && !beside.a ? a : z, layer, rows, &beside);
}

/* The operand of wgrad in `from`: column codes, or a plain tensor to quantize now; o says how its
 * rows are made. */
static mt_status wgrad_operand(mt_tape *tape, struct mt_linear_operand *o, const mt_param *w,
                               mt_operand operand, mt_group group, const mt_tensor *from,
                               bool coded)
{
    o->wanted[MT_COL] = o->again = true;
    if (coded) {
        o->q = mt_linear_codes(mt_tape_stream(tape)->device, w, operand, MT_COL, group, from->data);
        return MT_OK;
    }
    o->q = mt_qtensor_plain(group, from->dtype, from->data);
    return mt_linear_quantize(tape, w, operand, o);
}

static mt_status run_wgrad(mt_tape *tape, const struct mt_wgrad *job, bool accumulate)
{
    const struct linear_attrs *a = (const void *)job->attrs;
    const mt_tensor *counts = &job->extra[0], *elements = &job->extra[1];
    mt_param *w = job->param;
    const int64_t *used = rows_used(a, &job->extra[3]);
    const int32_t *row_token = job->extra[2].data;
    struct mt_linear_operand x = { .first_row = a->first_row,
                                   .row_token = a->gathers ? NULL : row_token,
                                   .tokens = mt_tensor_rows(&job->x),
                                   .swiglu = a->swiglu && !a->x_coded,
                                   .rows_used = used };
    struct mt_linear_operand dy = { .first_row = a->first_row };
    MT_TRY(wgrad_operand(tape, &x, w, MT_OPERAND_X, group_of(a, a->in, a->in_at, counts, elements),
                         &job->x, a->x_coded));
    MT_TRY(wgrad_operand(tape, &dy, w, MT_OPERAND_DY,
                         group_of(a, a->out, a->out_at, counts, elements), &job->dy, a->dy_coded));
    struct mt_moe_gemm_args args = { .gemm = { .dtype = w->compute,
                                               .layout = MT_GEMM_NT,
                                               .a = &x.q,
                                               .b = &dy.q,
                                               .d = w->grad,
                                               .d_dtype = w->grad_dtype,
                                               .c = accumulate ? w->grad : NULL },
                                     .row_token = x.memory[MT_COL] ? NULL : row_token,
                                     .gathers_b = a->gathers,
                                     .tokens = a->gathers ? mt_tensor_rows(&job->dy) : x.tokens,
                                     .rows_used = used };
    MT_TRY(multiply(tape, &args));
    mt_linear_operand_release(tape, &x);
    mt_linear_operand_release(tape, &dy);
    return MT_OK;
}

/* Quantizes dy for the GEMMs that follow, and sums the gradient of the bias: in the same pass where
 * there is one and both are f32. */
static mt_status prepare_dy(mt_tape *tape, mt_node *node, struct mt_linear_operand *dy)
{
    const mt_param *w = mt_node_param(node, 0);
    const struct linear_attrs *a = mt_node_attrs(node);
    mt_param *bias = a->bias ? mt_node_param(node, 1) : NULL;
    bool accumulate = false, skip = true, passes = false;
    if (bias) MT_TRY(mt_param_grad_begin(tape, bias, &accumulate, &skip));
    for (int d = 0; d < MT_DIR_COUNT; d++)
        passes |= dy->wanted[d] && !mt_linear_is_native(w, MT_OPERAND_DY, (mt_dir)d);
    bool fused = !skip && passes && bias->dtype == MT_F32;
    if (fused) dy->bias_grad = bias->grad, dy->accumulate = accumulate;
    if (!skip && !fused)
        MT_TRY(mt_bias_grad(
            mt_tape_stream(tape),
            &(struct mt_bias_grad_args){
                .dtype = w->compute, .dy = &dy->q, .accumulate = accumulate, .db = bias->grad }));
    MT_TRY(mt_linear_quantize(tape, w, MT_OPERAND_DY, dy));
    return bias ? mt_param_grad_end(tape, bias) : MT_OK;
}

/* dx = add + dy W, to the input of the layer, or through what runs into it. dweights: NULL data, or
 * the gradient of the second input. */
static mt_status run_dgrad(mt_tape *tape, mt_node *node, const mt_qtensor *dy, const mt_tensor *dx,
                           const mt_tensor *add, const mt_tensor *dweights)
{
    const struct linear_attrs *a = mt_node_attrs(node);
    mt_param *w = mt_node_param(node, 0);
    mt_tensor offsets = { 0 }, z = { 0 }, weights = { 0 }, slots = { 0 }, token = { 0 }, x = { 0 };
    mt_tensor position;
    void *to = dx->data;
    if (a->offsets >= 0) MT_TRY(mt_node_saved(tape, node, a->offsets, &offsets));
    if (a->z >= 0) MT_TRY(mt_node_saved(tape, node, a->z, &z));
    if (dweights->data || a->gathers) {
        MT_TRY(mt_node_saved(tape, node, a->weights, &weights));
        MT_TRY(mt_node_saved(tape, node, a->slots, &slots));
    }
    if (a->gathers) MT_TRY(mt_node_saved(tape, node, a->token, &token));
    if (a->gathers && a->x >= 0) MT_TRY(mt_node_saved(tape, node, a->x, &x));
    bool beside = z.data && add->data; /* a kernel that does not add */
    if (!to || beside) MT_TRY(mt_node_scratch(tape, node, &to, mt_tensor_bytes(&z)));
    if (a->position >= 0)
        MT_TRY(
            mt_node_scratch(tape, node, &to, (size_t)(a->rows * a->in) * mt_dtype_size(dx->dtype)));
    MT_TRY(mt_param_need(w, MT_COL));
    struct mt_moe_gemm_args args = { .gemm = { .dtype = dx->dtype,
                                               .layout = MT_GEMM_NN,
                                               .a = &w->weight,
                                               .b = dy,
                                               .d = to,
                                               .d_dtype = dx->dtype,
                                               .c = a->position < 0 && !beside ? add->data : NULL },
                                     .row_token = token.data,
                                     .rows_used = rows_used(a, &offsets),
                                     .act = x.data,
                                     .z = z.data,
                                     .dweights = dweights->data,
                                     .weights = weights.data,
                                     .position = slots.data };
    if (weights.data) args.tokens = slots.shape[0], args.top_k = slots.shape[1];
    MT_TRY(multiply(tape, &args));
    if (beside)
        return mt_contribution_end(
            tape, &(mt_contribution){ .grad = *dx, .before = add->data, .to = to });
    if (a->position < 0) return MT_OK;
    MT_TRY(mt_node_saved(tape, node, a->position, &position));
    return mt_gather_bwd(mt_tape_stream(tape),
                         &(struct mt_gather_bwd_args){ .dtype = dx->dtype,
                                                       .tokens = position.shape[0],
                                                       .width = a->in,
                                                       .top_k = position.shape[1],
                                                       .dx = dx->data,
                                                       .dx_add = add->data,
                                                       .dy = to,
                                                       .position = position.data });
}

/* The weights of rows, for what dY becomes on its way to codes. */
static mt_status take_weights(mt_tape *tape, mt_node *node, struct mt_linear_operand *qdy)
{
    const struct linear_attrs *a = mt_node_attrs(node);
    mt_tensor weights = { 0 }, slots;
    if (a->weights >= 0) MT_TRY(mt_node_saved(tape, node, a->weights, &weights));
    MT_TRY(mt_node_saved(tape, node, a->slots, &slots));
    qdy->weights = weights.data, qdy->position = slots.data;
    qdy->tokens = slots.shape[0], qdy->top_k = slots.shape[1];
    return MT_OK;
}

/* Behind mt_combine_fwd: dy [T, out] becomes the gradient of rows. */
static mt_status spread_dy(mt_tape *tape, mt_node *node, struct mt_linear_operand *qdy)
{
    const struct linear_attrs *a = mt_node_attrs(node);
    mt_tensor token, offsets;
    MT_TRY(take_weights(tape, node, qdy));
    MT_TRY(mt_node_saved(tape, node, a->token, &token));
    MT_TRY(mt_node_saved(tape, node, a->offsets, &offsets));
    qdy->row_token = token.data, qdy->rows_used = rows_used(a, &offsets);
    return MT_OK;
}

/* Where y is what a SwiGLU is of: the gradient that comes is y's or, takes_da, becomes it. dweights
 * NULL, or made of it. */
static mt_status through_swiglu(mt_tape *tape, mt_node *node, struct mt_linear_operand *qdy,
                                const mt_tensor *dy, void *dweights)
{
    const struct linear_attrs *a = mt_node_attrs(node);
    mt_tensor z, offsets = { 0 };
    MT_TRY(mt_node_saved(tape, node, a->own_z, &z));
    if (a->offsets >= 0) MT_TRY(mt_node_saved(tape, node, a->offsets, &offsets));
    if (dweights) MT_TRY(take_weights(tape, node, qdy));
    if (a->takes_da) {
        qdy->z = z.data, qdy->rows_used = rows_used(a, &offsets), qdy->dweights = dweights;
        qdy->wanted[MT_ROW] |= dweights != NULL;
        return MT_OK;
    }
    if (!dweights) return MT_OK;
    MT_TRY(mt_weights_bwd(mt_tape_stream(tape),
                          &(struct mt_weights_bwd_args){ .dtype = dy->dtype,
                                                         .tokens = qdy->tokens,
                                                         .width = a->out / 2,
                                                         .top_k = qdy->top_k,
                                                         .dweights = dweights,
                                                         .dz = dy->data,
                                                         .z = z.data,
                                                         .weights = qdy->weights,
                                                         .position = qdy->position }));
    qdy->weights = NULL;
    return MT_OK;
}

/* dY as it comes: of tokens where it is gathered. */
static mt_status observe_dy(mt_tape *tape, mt_node *node, const mt_qtensor *q, const mt_tensor *dy)
{
    const struct linear_attrs *a = mt_node_attrs(node);
    mt_qtensor tokens =
        mt_qtensor_plain(mt_group_uniform(1, mt_tensor_rows(dy), a->out), dy->dtype, dy->data);
    return mt_linear_observe(tape, mt_node_param(node, 0), MT_OPERAND_DY, a->gathers ? &tokens : q);
}

static mt_status linear_backward(mt_tape *tape, mt_node *node)
{
    const struct linear_attrs *a = mt_node_attrs(node);
    mt_param *w = mt_node_param(node, 0);
    mt_tensor dy = mt_node_grad_out(node, 0), counts = { 0 }, elements = { 0 }, dx, add;
    mt_tensor dweights = { 0 };
    mt_contribution weights = { 0 };
    if (a->counts >= 0) {
        MT_TRY(mt_node_saved(tape, node, a->counts, &counts));
        MT_TRY(mt_node_saved(tape, node, a->elements, &elements));
    }
    MT_TRY(mt_node_grad_in(tape, node, 0, &dx, &add));
    if (a->weighs) {
        MT_TRY(mt_contribution_begin(tape, node, 1, &weights));
        if (a->own_z < 0) dweights = weights.grad, dweights.data = weights.to;
    }
    bool dgrad = dx.data || dweights.data || (a->gathers && !w->frozen);
    struct mt_linear_operand qdy = {
        .q =
            mt_qtensor_plain(group_of(a, a->out, a->out_at, &counts, &elements), dy.dtype, dy.data),
        .wanted = { dgrad, !w->frozen && w->grad },
        .first_row = a->first_row,
    };
    if (a->own_z >= 0) MT_TRY(through_swiglu(tape, node, &qdy, &dy, weights.to));
    if (a->token >= 0 && !a->gathers)
        MT_TRY(spread_dy(tape, node, &qdy));
    else if (dy.data && !a->takes_da)
        MT_TRY(observe_dy(tape, node, &qdy.q, &dy));
    MT_TRY(prepare_dy(tape, node, &qdy));
    if (dgrad && a->gathers) MT_TRY(run_dgrad(tape, node, &qdy.q, &dx, &add, &dweights));
    /* Else the weight's gradient comes first: ranks reduce it while the rest is computed. */
    struct mt_wgrad job = { .run = run_wgrad, .param = w };
    struct linear_attrs attrs = *a;
    attrs.dy_coded = qdy.memory[MT_COL] != NULL;
    _Static_assert(sizeof attrs <= sizeof job.attrs, "the job carries the node's attributes");
    memcpy(job.attrs, &attrs, sizeof attrs);
    MT_TRY(
        mt_tape_wgrad(tape, node, &job, a->x, qdy.memory[MT_COL],
                      (int[MT_WGRAD_EXTRAS]){ a->counts, a->elements,
                                              a->gathers ? a->token : a->row_token, a->offsets }));
    if (dgrad && !a->gathers) MT_TRY(run_dgrad(tape, node, &qdy.q, &dx, &add, &dweights));
    mt_linear_operand_release(tape, &qdy);
    return mt_contribution_end(tape, &weights);
}

const mt_op mt_op_grouped_linear = { "grouped_linear", linear_backward, NULL };
