/* Router, route plan, gather, combine. */
#include "layers/contribution.h"

struct router_attrs {
    int64_t experts, top_k;
    bool normalize;
};

/* Whether a forward is one that a step counts: of a pass that trains, and not run again. */
static bool counts(const mt_tape *tape)
{
    return mt_tape_training(tape) && !mt_tape_recomputing(tape);
}

static mt_status router_values(mt_tape *tape, mt_routing *r, mt_value **probs, mt_value **lse,
                               int64_t tokens, mt_dtype real, const mt_router_shape *shape)
{
    int64_t e = shape->experts, k = shape->top_k;
    MT_TRY(mt_tape_value(tape, &r->weights, real, 2, (int64_t[]){ tokens, k }));
    MT_TRY(mt_tape_value(tape, &r->prob_sum, real, 1, &e));
    MT_TRY(mt_tape_value(tape, &r->z_sum, real, 1, (int64_t[]){ 1 }));
    MT_TRY(mt_tape_value(tape, &r->counts, MT_I64, 1, &e));
    MT_TRY(mt_tape_value(tape, &r->chosen, MT_I32, 2, (int64_t[]){ tokens, k }));
    MT_TRY(mt_tape_value(tape, probs, real, 2, (int64_t[]){ tokens, e }));
    return mt_tape_value(tape, lse, real, 1, &tokens);
}

mt_status mt_router(mt_tape *tape, mt_routing *routing, mt_value *x, mt_param *w,
                    const mt_router_shape *shape)
{
    int64_t tokens = mt_tensor_rows(&x->data), width = mt_tensor_cols(&x->data);
    mt_value *probs, *lse;
    MT_REQUIRE(w, MT_EINVAL, "router: the layer has no router");
    MT_REQUIRE(mt_dtype_wide(x->data.dtype) == w->dtype, MT_EINVAL, "router: %s is %s, x is %s",
               w->name, mt_dtype_name(w->dtype), mt_dtype_name(x->data.dtype));
    MT_REQUIRE(mt_param_count(w) == shape->experts * width, MT_EINVAL,
               "router: %s has %lld weights, %lld experts of %lld columns need %lld", w->name,
               (long long)mt_param_count(w), (long long)shape->experts, (long long)width,
               (long long)(shape->experts * width));
    MT_TRY(router_values(tape, routing, &probs, &lse, tokens, mt_dtype_wide(x->data.dtype), shape));
    MT_TRY(mt_param_need(w, MT_ROW));
    MT_TRY(mt_router_fwd(mt_tape_stream(tape), &(struct mt_router_fwd_args){
                                                   .dtype = x->data.dtype,
                                                   .tokens = tokens,
                                                   .width = width,
                                                   .experts = shape->experts,
                                                   .top_k = shape->top_k,
                                                   .normalize = shape->normalize,
                                                   .x = x->data.data,
                                                   .wr = w->master,
                                                   .bias = shape->bias,
                                                   .probs = probs->data.data,
                                                   .lse = lse->data.data,
                                                   .weights = routing->weights->data.data,
                                                   .chosen = routing->chosen->data.data,
                                                   .prob_sum = routing->prob_sum->data.data,
                                                   .z_sum = routing->z_sum->data.data,
                                                   .counts = routing->counts->data.data,
                                                   .load = counts(tape) ? shape->load : NULL }));
    struct router_attrs attrs = { shape->experts, shape->top_k, shape->normalize };
    MT_TRY(mt_tape_record(
        tape, &(mt_node_spec){ .op = &mt_op_router,
                               .attrs = &attrs,
                               .attrs_bytes = sizeof attrs,
                               .inputs = { x },
                               .outputs = { routing->weights, routing->prob_sum, routing->z_sum },
                               .saved = { x, probs, lse, routing->weights, routing->chosen },
                               .params = { w } }));
    mt_value_release(tape, &probs);
    mt_value_release(tape, &lse);
    return MT_OK;
}

void mt_routing_release(mt_tape *tape, mt_routing *r)
{
    mt_value_release(tape, &r->weights);
    mt_value_release(tape, &r->prob_sum);
    mt_value_release(tape, &r->z_sum);
    mt_value_release(tape, &r->counts);
    mt_value_release(tape, &r->chosen);
}

static mt_status router_backward(mt_tape *tape, mt_node *node)
{
    const struct router_attrs *a = mt_node_attrs(node);
    mt_param *w = mt_node_param(node, 0);
    mt_tensor saved[5], dx, add;
    bool accumulate, skip;
    void *dlogits;
    for (int i = 0; i < 5; i++) MT_TRY(mt_node_saved(tape, node, i, &saved[i]));
    const mt_tensor *x = &saved[0], *probs = &saved[1];
    MT_TRY(mt_node_scratch(tape, node, &dlogits, mt_tensor_bytes(probs)));
    MT_TRY(mt_node_grad_in(tape, node, 0, &dx, &add));
    MT_TRY(mt_param_need(w, MT_COL));
    MT_TRY(mt_param_grad_begin(tape, w, &accumulate, &skip));
    MT_TRY(mt_router_bwd(mt_tape_stream(tape),
                         &(struct mt_router_bwd_args){ .dtype = x->dtype,
                                                       .tokens = mt_tensor_rows(x),
                                                       .width = mt_tensor_cols(x),
                                                       .experts = a->experts,
                                                       .top_k = a->top_k,
                                                       .normalize = a->normalize,
                                                       .accumulate = accumulate,
                                                       .dx = dx.data,
                                                       .dx_add = add.data,
                                                       .dwr = skip ? NULL : w->grad,
                                                       .dlogits = dlogits,
                                                       .x = x->data,
                                                       .wr = w->master,
                                                       .probs = probs->data,
                                                       .weights = saved[3].data,
                                                       .chosen = saved[4].data,
                                                       .lse = saved[2].data,
                                                       .dweights = mt_node_grad_out(node, 0).data,
                                                       .dprob_sum = mt_node_grad_out(node, 1).data,
                                                       .dz_sum = mt_node_grad_out(node, 2).data }));
    return mt_param_grad_end(tape, w);
}

const mt_op mt_op_router = { "router", router_backward, NULL };

mt_status mt_route_tokens(mt_tape *tape, mt_route *route, const mt_routing *routing,
                          int64_t experts, int64_t capacity, const int64_t widths[MT_ROUTE_WIDTHS],
                          int64_t *dropped)
{
    const mt_tensor *chosen = &routing->chosen->data;
    int64_t tokens = chosen->shape[0], k = chosen->shape[1], rows = tokens * k;
    route->tokens = tokens, route->top_k = k, route->room = rows;
    route->rows.members = experts;
    MT_TRY(mt_tape_value(tape, &route->rows.counts, MT_I64, 1, &experts));
    MT_TRY(mt_tape_value(tape, &route->rows.offsets, MT_I64, 1, (int64_t[]){ experts + 1 }));
    MT_TRY(mt_tape_value(tape, &route->rows.elements, MT_I64, 2,
                         (int64_t[]){ MT_ROUTE_WIDTHS, experts + 1 }));
    MT_TRY(mt_tape_value(tape, &route->row_token, MT_I32, 1, &rows));
    MT_TRY(mt_tape_value(tape, &route->position, MT_I32, 2, (int64_t[]){ tokens, k }));
    struct mt_route_plan_args args = { .dtype = routing->weights->data.dtype,
                                       .tokens = tokens,
                                       .experts = experts,
                                       .top_k = k,
                                       .capacity = capacity,
                                       .chosen = chosen->data,
                                       .counts = route->rows.counts->data.data,
                                       .offsets = route->rows.offsets->data.data,
                                       .row_token = route->row_token->data.data,
                                       .position = route->position->data.data,
                                       .dropped = counts(tape) ? dropped : NULL,
                                       .element_offsets = route->rows.elements->data.data };
    for (int i = 0; i < MT_ROUTE_WIDTHS; i++) args.widths[i] = route->rows.widths[i] = widths[i];
    return mt_route_plan(mt_tape_stream(tape), &args);
}

void mt_route_release(mt_tape *tape, mt_route *route)
{
    mt_value_release(tape, &route->rows.counts);
    mt_value_release(tape, &route->rows.offsets);
    mt_value_release(tape, &route->rows.elements);
    mt_value_release(tape, &route->row_token);
    mt_value_release(tape, &route->position);
}

struct rows_attrs {
    int64_t tokens, top_k;
};

mt_status mt_gather(mt_tape *tape, mt_value **y, mt_value *x, const mt_route *route)
{
    int64_t width = mt_tensor_cols(&x->data), rows = route->tokens * route->top_k;
    MT_REQUIRE(mt_tensor_rows(&x->data) == route->tokens, MT_EINVAL,
               "gather: x has %lld rows, the route %lld tokens",
               (long long)mt_tensor_rows(&x->data), (long long)route->tokens);
    MT_TRY(mt_tape_value(tape, y, x->data.dtype, 2, (int64_t[]){ rows, width }));
    MT_TRY(mt_gather_fwd(
        mt_tape_stream(tape),
        &(struct mt_gather_fwd_args){ .dtype = x->data.dtype,
                                      .tokens = route->tokens,
                                      .width = width,
                                      .top_k = route->top_k,
                                      .rows = rows,
                                      .y = (*y)->data.data,
                                      .x = x->data.data,
                                      .row_token = route->row_token->data.data,
                                      .rows_used = (const int64_t *)route->rows.offsets->data.data +
                                                   route->rows.members,
                                      .position = route->position->data.data }));
    struct rows_attrs attrs = { route->tokens, route->top_k };
    return mt_tape_record(tape, &(mt_node_spec){ .op = &mt_op_gather,
                                                 .attrs = &attrs,
                                                 .attrs_bytes = sizeof attrs,
                                                 .inputs = { x },
                                                 .outputs = { *y },
                                                 .saved = { route->position } });
}

static mt_status gather_backward(mt_tape *tape, mt_node *node)
{
    const struct rows_attrs *a = mt_node_attrs(node);
    mt_tensor position, dx, add, dy = mt_node_grad_out(node, 0);
    MT_TRY(mt_node_saved(tape, node, 0, &position));
    MT_TRY(mt_node_grad_in(tape, node, 0, &dx, &add));
    if (!dx.data) return MT_OK;
    return mt_gather_bwd(mt_tape_stream(tape),
                         &(struct mt_gather_bwd_args){ .dtype = dy.dtype,
                                                       .tokens = a->tokens,
                                                       .width = mt_tensor_cols(&dy),
                                                       .top_k = a->top_k,
                                                       .dx = dx.data,
                                                       .dx_add = add.data,
                                                       .dy = dy.data,
                                                       .position = position.data });
}

const mt_op mt_op_gather = { "gather", gather_backward, NULL };

enum { COMBINE_WEIGHTS, COMBINE_POSITION, COMBINE_X }; /* saved */

struct combine_attrs {
    int64_t tokens, top_k;
    bool weighs; /* the weights' gradient is this node's, from x */
};

static mt_status combine(mt_tape *tape, mt_value **y, mt_value *x, mt_value *weights,
                         const mt_route *route, bool weighs)
{
    int64_t width = mt_tensor_cols(&x->data);
    MT_TRY(mt_tensor_check(&weights->data, "combine: weights", mt_dtype_wide(x->data.dtype), 2,
                           (int64_t[]){ route->tokens, route->top_k }));
    MT_REQUIRE(mt_tensor_rows(&x->data) == route->room, MT_EINVAL,
               "combine: x has %lld rows, the route %lld", (long long)mt_tensor_rows(&x->data),
               (long long)route->room);
    MT_TRY(mt_tape_value(tape, y, x->data.dtype, 2, (int64_t[]){ route->tokens, width }));
    MT_TRY(mt_combine_fwd(mt_tape_stream(tape),
                          &(struct mt_combine_fwd_args){ .dtype = x->data.dtype,
                                                         .tokens = route->tokens,
                                                         .width = width,
                                                         .top_k = route->top_k,
                                                         .y = (*y)->data.data,
                                                         .x = x->data.data,
                                                         .weights = weights->data.data,
                                                         .position = route->position->data.data }));
    struct combine_attrs attrs = { route->tokens, route->top_k, weighs };
    return mt_tape_record(
        tape, &(mt_node_spec){ .op = &mt_op_combine,
                               .attrs = &attrs,
                               .attrs_bytes = sizeof attrs,
                               .inputs = { x, weighs ? weights : NULL },
                               .outputs = { *y },
                               .saved = { weights, route->position, weighs ? x : NULL } });
}

mt_status mt_combine(mt_tape *tape, mt_value **y, mt_value *x, mt_value *weights,
                     const mt_route *route)
{
    return combine(tape, y, x, weights, route, true);
}

mt_status mt_combine_down(mt_tape *tape, mt_value **y, mt_value *x, mt_value *weights,
                          const mt_route *route)
{
    return combine(tape, y, x, weights, route, false);
}

static mt_status combine_backward(mt_tape *tape, mt_node *node)
{
    const struct combine_attrs *a = mt_node_attrs(node);
    mt_tensor dy = mt_node_grad_out(node, 0), weights, position, x = { 0 };
    mt_contribution dx, dweights = { 0 };
    MT_TRY(mt_node_saved(tape, node, COMBINE_WEIGHTS, &weights));
    MT_TRY(mt_node_saved(tape, node, COMBINE_POSITION, &position));
    MT_TRY(mt_contribution_begin(tape, node, 0, &dx));
    if (a->weighs) {
        MT_TRY(mt_node_saved(tape, node, COMBINE_X, &x));
        MT_TRY(mt_contribution_begin(tape, node, 1, &dweights));
    }
    if (!dx.to && !a->weighs) return MT_OK;
    if (!dx.to) MT_TRY(mt_node_scratch(tape, node, &dx.to, mt_tensor_bytes(&x)));
    if (a->weighs && !dweights.to)
        MT_TRY(mt_node_scratch(tape, node, &dweights.to, mt_tensor_bytes(&weights)));
    MT_TRY(mt_combine_bwd(mt_tape_stream(tape),
                          &(struct mt_combine_bwd_args){ .dtype = dx.grad.dtype,
                                                         .tokens = a->tokens,
                                                         .width = mt_tensor_cols(&dx.grad),
                                                         .top_k = a->top_k,
                                                         .dx = dx.to,
                                                         .dweights = dweights.to,
                                                         .dy = dy.data,
                                                         .x = x.data,
                                                         .weights = weights.data,
                                                         .position = position.data }));
    MT_TRY(mt_contribution_end(tape, &dx));
    return mt_contribution_end(tape, &dweights);
}

const mt_op mt_op_combine = { "combine", combine_backward, NULL };
