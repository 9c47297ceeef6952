/* The MoE layer and the dense MLP. */
#include "layers/moe.h"

#include <math.h>

static mt_status check_weights(const mt_grouped_linear_layer *gate_up,
                               const mt_grouped_linear_layer *down, const char *name)
{
    MT_REQUIRE(gate_up->weight && down->weight, MT_EINVAL, "%s: the layer has no weight %s", name,
               gate_up->weight ? "down" : "gate_up");
    return MT_OK;
}

/* gate_up, SwiGLU, down. route: gathers the rows of x, NULL: they are in expert order already.
 * early: the weights for mt_gate_up; weights: for mt_down. */
static mt_status experts(mt_tape *tape, mt_value **y, mt_value *x, mt_value *early,
                         mt_value *weights, const mt_grouped_linear_layer *gate_up,
                         const mt_grouped_linear_layer *down, const mt_ragged *rows,
                         const mt_route *route)
{
    mt_value *h, *a = NULL;
    bool stores_a = !mt_down_reads_z(down->weight);
    bool makes_a = stores_a || mt_gate_up_takes_da(gate_up, down->weight);
    MT_TRY(mt_gate_up(tape, &h, makes_a ? &a : NULL, x, early, gate_up, rows, route, stores_a));
    if (stores_a) mt_value_recompute(tape, a);
    MT_TRY(mt_down(tape, y, h, a, weights, down, rows, route));
    mt_value_release(tape, &h);
    mt_value_release(tape, &a);
    return MT_OK;
}

/* y of experts that are on this rank. */
static mt_status run_here(mt_tape *tape, mt_value **y, mt_value *x, const mt_moe_layer *layer,
                          const mt_route *route, mt_value *weights)
{
    const mt_device *device = mt_tape_stream(tape)->device;
    mt_value *rows, *early = mt_gate_up_weighs(&layer->down) ? weights : NULL;
    bool weighs = early || mt_down_weighs(device, &layer->down);
    if (mt_down_combines(device, &layer->down))
        return experts(tape, y, x, early, weights, &layer->gate_up, &layer->down, &route->rows,
                       route);
    MT_TRY(experts(tape, &rows, x, early, weighs ? weights : NULL, &layer->gate_up, &layer->down,
                   &route->rows, route));
    MT_TRY((weighs ? mt_combine_down : mt_combine)(tape, y, rows, weights, route));
    mt_value_release(tape, &rows);
    return MT_OK;
}

/* Of experts on all ranks: rows go to them, and come back. */
static mt_status run_there(mt_tape *tape, mt_value **y, mt_value *x, const mt_moe_layer *layer,
                           const mt_route *route, const mt_routing *routing,
                           const int64_t widths[MT_ROUTE_WIDTHS])
{
    mt_exchanged e = { 0 };
    mt_value *rows, *out, *back;
    MT_TRY(mt_dispatch(tape, &rows, &e, x, route, routing, layer->exchange, widths, &layer->gate_up,
                       &layer->down));
    MT_TRY(experts(tape, &out, rows, e.factors, NULL, &layer->gate_up, &layer->down, &e.there.rows,
                   &e.there));
    mt_value_release(tape, &rows);
    MT_TRY(mt_collect(tape, &back, out, &e, layer->exchange));
    mt_value_release(tape, &out);
    MT_TRY((e.factors ? mt_combine_down : mt_combine)(tape, y, back, routing->weights, &e.home));
    mt_value_release(tape, &back);
    mt_exchanged_release(tape, &e);
    return MT_OK;
}

/* Rows that an expert keeps; 0: all, which are no more than there are tokens. */
static int64_t capacity_of(const mt_moe_layer *layer, int64_t tokens)
{
    const mt_router_shape *s = &layer->shape;
    double fair = (double)(tokens * s->top_k) / (double)s->experts;
    double rows = ceil(layer->capacity_factor * fair);
    return rows < (double)tokens ? (int64_t)rows : 0;
}

mt_status mt_moe_forward(mt_tape *tape, mt_value **y, mt_routing *routing, mt_value *x,
                         const mt_moe_layer *layer, const char *name)
{
    const mt_router_shape *s = &layer->shape;
    int64_t tokens = mt_tensor_rows(&x->data), width = mt_tensor_cols(&x->data);
    MT_TRY(check_weights(&layer->gate_up, &layer->down, name));
    int64_t f = layer->down.weight->group.k;
    int64_t widths[MT_ROUTE_WIDTHS] = { width, f, 2 * f };
    mt_route route;
    MT_TRY(mt_router(tape, routing, x, layer->router, s));
    MT_TRY(mt_tape_observe(tape, routing->weights, "%s.routing_weights", name));
    MT_TRY(mt_tape_observe(tape, routing->chosen, "%s.chosen_experts", name));
    MT_TRY(mt_route_tokens(tape, &route, routing, s->experts, capacity_of(layer, tokens), widths,
                           layer->dropped));
    if (layer->exchange)
        MT_TRY(run_there(tape, y, x, layer, &route, routing, widths));
    else
        MT_TRY(run_here(tape, y, x, layer, &route, routing->weights));
    mt_route_release(tape, &route);
    return MT_OK;
}

mt_status mt_mlp_forward(mt_tape *tape, mt_value **y, mt_value *x, const mt_mlp_layer *layer)
{
    MT_TRY(check_weights(&layer->gate_up, &layer->down, "mlp"));
    return experts(tape, y, x, NULL, NULL, &layer->gate_up, &layer->down, NULL, NULL);
}
