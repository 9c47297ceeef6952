/* Rows to the experts of other ranks, and back: each way is the backward of the other. */
#include "layers/contribution.h"
#include "layers/linear_priv.h"

struct exchange_attrs {
    mt_exchange *exchange;
    struct mt_blocks blocks;
    int64_t tokens, top_k, width;
    mt_format_spec coded; /* what gradients travel as */
    bool weighs;          /* a gradient of each line travels with them, that of e->factors */
};

static const mt_format_spec plain;

static size_t line_bytes(const mt_value *x)
{
    return (size_t)mt_exchange_line(x->data.dtype, mt_tensor_cols(&x->data), &plain);
}

/* Blocks of x's dtype and width. */
static mt_status new_blocks(mt_tape *tape, mt_value **y, const mt_value *x,
                            const struct mt_blocks *b)
{
    return mt_tape_value(tape, y, x->data.dtype, 2,
                         (int64_t[]){ b->ranks * b->lines, mt_tensor_cols(&x->data) });
}

/* Blocks of coded lines. */
static mt_status new_coded(mt_tape *tape, mt_value **y, size_t line, const struct mt_blocks *b)
{
    return mt_tape_value(tape, y, MT_U8, 2, (int64_t[]){ b->ranks * b->lines, (int64_t)line });
}

static mt_status unpack(mt_tape *tape, void *y, mt_dtype dtype, int64_t width, const void *x,
                        const mt_format_spec *coded, const struct mt_blocks *b)
{
    return mt_exchange_unpack(
        mt_tape_stream(tape),
        &(struct mt_exchange_unpack_args){
            .dtype = dtype, .blocks = *b, .width = width, .y = y, .x = x, .coded = *coded });
}

/* The same as codes, which are decoded when they have arrived. */
static mt_status send_coded(mt_tape *tape, mt_value **y, const mt_value *x, const mt_value *index,
                            const mt_value *heads, mt_exchange *exchange, const struct mt_blocks *b,
                            const mt_format_spec *coded, const char *what)
{
    mt_stream *stream = mt_tape_stream(tape);
    mt_value *packed, *got;
    int64_t width = mt_tensor_cols(&x->data);
    size_t line = (size_t)mt_exchange_line(x->data.dtype, width, coded);
    MT_TRY(new_coded(tape, &packed, line, b));
    MT_TRY(new_coded(tape, &got, line, b));
    MT_TRY(mt_exchange_pack(stream, &(struct mt_exchange_pack_args){ .dtype = x->data.dtype,
                                                                     .blocks = *b,
                                                                     .width = width,
                                                                     .y = packed->data.data,
                                                                     .x = x->data.data,
                                                                     .index = index->data.data,
                                                                     .heads = heads->data.data,
                                                                     .coded = *coded }));
    MT_TRY(mt_exchange_send(exchange, stream, got->data.data, packed->data.data, b, line, what));
    MT_TRY(mt_exchange_wait(exchange, stream));
    mt_value_release(tape, &packed);
    MT_TRY(new_blocks(tape, y, x, b));
    MT_TRY(unpack(tape, (*y)->data.data, x->data.dtype, width, got->data.data, coded, b));
    mt_value_release(tape, &got);
    return MT_OK;
}

/* Packs rows of x, which `index` chooses, behind the heads, and sends them: y is what arrives. */
static mt_status pack_and_send(mt_tape *tape, mt_value **y, const mt_value *x,
                               const mt_value *index, const mt_value *heads, mt_exchange *exchange,
                               const struct mt_blocks *b, const mt_format_spec *coded,
                               const char *what)
{
    mt_stream *stream = mt_tape_stream(tape);
    mt_value *packed;
    if (coded->format) return send_coded(tape, y, x, index, heads, exchange, b, coded, what);
    MT_TRY(new_blocks(tape, &packed, x, b));
    MT_TRY(new_blocks(tape, y, x, b));
    MT_TRY(
        mt_exchange_pack(stream, &(struct mt_exchange_pack_args){ .dtype = x->data.dtype,
                                                                  .blocks = *b,
                                                                  .width = mt_tensor_cols(&x->data),
                                                                  .y = packed->data.data,
                                                                  .x = x->data.data,
                                                                  .index = index->data.data,
                                                                  .heads = heads->data.data }));
    MT_TRY(mt_exchange_send(exchange, stream, (*y)->data.data, packed->data.data, b, line_bytes(x),
                            what));
    MT_TRY(mt_exchange_wait(exchange, stream));
    mt_value_release(tape, &packed);
    return MT_OK;
}

/* Blocks of gradients, whose rows are in place, behind heads: *got is what arrives; what was coded
 * is decoded into dy, which has been sent. reals: of lines, or NULL. Weight gradients that wait are
 * computed on the way. */
static mt_status send_back(mt_tape *tape, mt_node *node, void **got, const mt_tensor *dy,
                           const mt_tensor *heads, const void *reals, const char *what)
{
    const struct exchange_attrs *a = mt_node_attrs(node);
    mt_stream *stream = mt_tape_stream(tape);
    size_t line = (size_t)mt_exchange_line(dy->dtype, a->width, &a->coded);
    size_t bytes = (size_t)(a->blocks.ranks * a->blocks.lines) * line;
    bool coded = a->coded.format != NULL;
    void *packed = dy->data;
    if (coded) MT_TRY(mt_node_scratch(tape, node, &packed, bytes));
    MT_TRY(mt_node_scratch(tape, node, got, bytes));
    MT_TRY(mt_exchange_pack(stream, &(struct mt_exchange_pack_args){ .dtype = dy->dtype,
                                                                     .blocks = a->blocks,
                                                                     .width = a->width,
                                                                     .y = packed,
                                                                     .x = coded ? dy->data : NULL,
                                                                     .heads = heads->data,
                                                                     .reals = reals,
                                                                     .coded = a->coded }));
    MT_TRY(mt_exchange_send(a->exchange, stream, *got, packed, &a->blocks, line, what));
    MT_TRY(mt_tape_run_deferred(tape));
    MT_TRY(mt_exchange_wait(a->exchange, stream));
    if (!coded) return MT_OK;
    MT_TRY(unpack(tape, dy->data, dy->dtype, a->width, *got, &a->coded, &a->blocks));
    *got = dy->data;
    return MT_OK;
}

/* ---- to the experts ----------------------------------------------------------------------------
 */

static mt_status plan(mt_tape *tape, mt_exchanged *e, mt_value **line_token, const mt_value *x,
                      const mt_route *route, const mt_value *chosen, mt_exchange *exchange,
                      const struct mt_blocks *b)
{
    int64_t words = b->experts + 1, lines = b->ranks * b->lines;
    e->home = (mt_route){ .tokens = route->tokens, .top_k = route->top_k, .room = lines };
    MT_TRY(mt_tape_value(tape, &e->sent, MT_I64, 2, (int64_t[]){ b->ranks, words }));
    MT_TRY(mt_tape_value(tape, &e->home.position, MT_I32, 2,
                         (int64_t[]){ route->tokens, route->top_k }));
    MT_TRY(mt_tape_value(tape, line_token, MT_I32, 1, &lines));
    return mt_exchange_plan(mt_tape_stream(tape), &(struct mt_exchange_plan_args){
                                                      .dtype = x->data.dtype,
                                                      .blocks = *b,
                                                      .tokens = route->tokens,
                                                      .top_k = route->top_k,
                                                      .width = mt_tensor_cols(&x->data),
                                                      .chosen = chosen->data.data,
                                                      .position = route->position->data.data,
                                                      .row_token = route->row_token->data.data,
                                                      .offsets = route->rows.offsets->data.data,
                                                      .heads = e->sent->data.data,
                                                      .token_line = e->home.position->data.data,
                                                      .line_token = (*line_token)->data.data,
                                                      .most = mt_exchange_most(exchange) });
}

/* Which rows have arrived for which expert. */
static mt_status sort_arrivals(mt_tape *tape, mt_exchanged *e, const mt_value *y,
                               const struct mt_blocks *b, const int64_t widths[MT_ROUTE_WIDTHS])
{
    int64_t s = b->experts, lines = b->ranks * b->lines;
    mt_route *r = &e->there;
    *r = (mt_route){ .rows = { .members = s }, .tokens = lines, .top_k = 1, .room = lines };
    MT_TRY(mt_tape_value(tape, &e->received, MT_I64, 2, (int64_t[]){ b->ranks, s + 1 }));
    MT_TRY(mt_tape_value(tape, &r->rows.counts, MT_I64, 1, &s));
    MT_TRY(mt_tape_value(tape, &r->rows.offsets, MT_I64, 1, (int64_t[]){ s + 1 }));
    MT_TRY(
        mt_tape_value(tape, &r->rows.elements, MT_I64, 2, (int64_t[]){ MT_ROUTE_WIDTHS, s + 1 }));
    MT_TRY(mt_tape_value(tape, &r->row_token, MT_I32, 1, &lines));
    MT_TRY(mt_tape_value(tape, &r->position, MT_I32, 2, (int64_t[]){ lines, 1 }));
    struct mt_exchange_arrivals_args args = { .dtype = y->data.dtype,
                                              .blocks = *b,
                                              .width = mt_tensor_cols(&y->data),
                                              .y = y->data.data,
                                              .heads = e->received->data.data,
                                              .counts = r->rows.counts->data.data,
                                              .offsets = r->rows.offsets->data.data,
                                              .element_offsets = r->rows.elements->data.data,
                                              .row_line = r->row_token->data.data,
                                              .line_row = r->position->data.data };
    for (int i = 0; i < MT_ROUTE_WIDTHS; i++) args.widths[i] = r->rows.widths[i] = widths[i];
    return mt_exchange_arrivals(mt_tape_stream(tape), &args);
}

static struct exchange_attrs attrs_of(mt_exchange *exchange, const mt_exchanged *e,
                                      const mt_value *x, const mt_format_spec *coded)
{
    return (struct exchange_attrs){
        exchange, e->blocks, e->home.tokens, e->home.top_k, mt_tensor_cols(&x->data), *coded, false
    };
}

/* What travels as codes, and blocks of one number of lines for all that travels: where codes are
 * fewer bytes. */
static void choose(mt_tape *tape, mt_exchanged *e, const mt_value *x, mt_exchange *exchange,
                   int64_t tokens, const mt_grouped_linear_layer *const layers[2])
{
    static const mt_operand operands[] = { MT_OPERAND_X, MT_OPERAND_DY };
    size_t least = line_bytes(x);
    for (int i = 0; i < 2; i++) {
        mt_format_spec spec;
        e->coded[i] = plain;
        if (mt_exchange_plain(exchange) || !layers[i] ||
            !mt_linear_travels_coded(tape, layers[i], operands[i], &spec))
            continue;
        size_t line = (size_t)mt_exchange_line(x->data.dtype, mt_tensor_cols(&x->data), &spec);
        if (line >= line_bytes(x)) continue;
        e->coded[i] = spec;
        if (line < least) least = line;
    }
    bool weighs = layers[1] && mt_gate_up_weighs(layers[1]);
    e->blocks =
        mt_exchange_blocks(exchange, x->data.dtype, tokens, least, weighs ? line_bytes(x) : 0);
}

enum { DISPATCH_LINE, DISPATCH_HEADS, DISPATCH_WEIGHTS }; /* saved */

mt_status mt_dispatch(mt_tape *tape, mt_value **y, mt_exchanged *e, mt_value *x,
                      const mt_route *route, const mt_routing *routing, mt_exchange *exchange,
                      const int64_t widths[MT_ROUTE_WIDTHS], const mt_grouped_linear_layer *gate_up,
                      const mt_grouped_linear_layer *down)
{
    MT_REQUIRE(mt_tensor_rows(&x->data) == route->tokens, MT_EINVAL,
               "dispatch: x has %lld rows, the route %lld tokens",
               (long long)mt_tensor_rows(&x->data), (long long)route->tokens);
    choose(tape, e, x, exchange, route->tokens,
           (const mt_grouped_linear_layer *[]){ gate_up, down });
    const struct mt_blocks b = e->blocks;
    mt_value *line_token;
    MT_REQUIRE(route->rows.members == b.ranks * b.experts, MT_EINVAL,
               "dispatch: a route to %lld experts, %lld ranks have %lld each",
               (long long)route->rows.members, (long long)b.ranks, (long long)b.experts);
    MT_TRY(plan(tape, e, &line_token, x, route, routing->chosen, exchange, &b));
    MT_TRY(pack_and_send(tape, y, x, line_token, e->sent, exchange, &b, &e->coded[0],
                         "rows to experts"));
    mt_value_release(tape, &line_token);
    MT_TRY(sort_arrivals(tape, e, *y, &b, widths));
    struct exchange_attrs attrs = attrs_of(exchange, e, x, &plain);
    attrs.weighs = down && mt_gate_up_weighs(down);
    mt_value *weights = attrs.weighs ? routing->weights : NULL;
    e->factors = NULL;
    if (weights) {
        mt_tensor t = mt_tensor_2d(NULL, weights->data.dtype, b.ranks * b.lines, 1);
        MT_TRY(mt_tape_input(tape, &e->factors, t, false));
    }
    return mt_tape_record(tape,
                          &(mt_node_spec){ .op = &mt_op_dispatch,
                                           .attrs = &attrs,
                                           .attrs_bytes = sizeof attrs,
                                           .inputs = { x, weights },
                                           .outputs = { *y, e->factors },
                                           .saved = { e->home.position, e->received, weights } });
}

/* The gradient of the routing weights, from what has come back. */
static mt_status weigh(mt_tape *tape, mt_node *node, const void *got, mt_dtype dtype,
                       const mt_tensor *token_line)
{
    const struct exchange_attrs *a = mt_node_attrs(node);
    mt_contribution dweights;
    mt_tensor weights;
    MT_TRY(mt_node_saved(tape, node, DISPATCH_WEIGHTS, &weights));
    MT_TRY(mt_contribution_begin(tape, node, 1, &dweights));
    if (!dweights.to) return MT_OK;
    MT_TRY(mt_exchange_weights_bwd(mt_tape_stream(tape), &(struct mt_exchange_weights_bwd_args){
                                                             .dtype = dtype,
                                                             .blocks = a->blocks,
                                                             .tokens = a->tokens,
                                                             .top_k = a->top_k,
                                                             .width = a->width,
                                                             .dweights = dweights.to,
                                                             .x = got,
                                                             .weights = weights.data,
                                                             .token_line = token_line->data }));
    return mt_contribution_end(tape, &dweights);
}

/* Gradients of the lines go where the rows came from, and into their tokens there. */
static mt_status dispatch_backward(mt_tape *tape, mt_node *node)
{
    const struct exchange_attrs *a = mt_node_attrs(node);
    mt_tensor position, heads, dx, add, dy = mt_node_grad_out(node, 0);
    const void *reals = a->weighs ? mt_node_grad_out(node, 1).data : NULL;
    void *got;
    MT_TRY(mt_node_saved(tape, node, DISPATCH_LINE, &position));
    MT_TRY(mt_node_saved(tape, node, DISPATCH_HEADS, &heads));
    MT_TRY(send_back(tape, node, &got, &dy, &heads, reals, "gradients of experts' inputs"));
    if (reals) MT_TRY(weigh(tape, node, got, dy.dtype, &position));
    MT_TRY(mt_node_grad_in(tape, node, 0, &dx, &add));
    if (!dx.data) return MT_OK;
    return mt_gather_bwd(mt_tape_stream(tape),
                         &(struct mt_gather_bwd_args){ .dtype = dy.dtype,
                                                       .tokens = a->tokens,
                                                       .width = a->width,
                                                       .top_k = a->top_k,
                                                       .dx = dx.data,
                                                       .dx_add = add.data,
                                                       .dy = got,
                                                       .position = position.data });
}

const mt_op mt_op_dispatch = { "dispatch", dispatch_backward, NULL };

/* ---- and back ----------------------------------------------------------------------------------
 */

mt_status mt_collect(mt_tape *tape, mt_value **y, mt_value *x, const mt_exchanged *e,
                     mt_exchange *exchange)
{
    const struct mt_blocks b = e->blocks;
    MT_REQUIRE(mt_tensor_rows(&x->data) == b.ranks * b.lines, MT_EINVAL,
               "collect: x has %lld rows, the blocks %lld lines",
               (long long)mt_tensor_rows(&x->data), (long long)(b.ranks * b.lines));
    MT_TRY(pack_and_send(tape, y, x, e->there.position, e->received, exchange, &b, &plain,
                         "rows from experts"));
    struct exchange_attrs attrs = attrs_of(exchange, e, x, &e->coded[1]);
    return mt_tape_record(
        tape, &(mt_node_spec){ .op = &mt_op_collect,
                               .attrs = &attrs,
                               .attrs_bytes = sizeof attrs,
                               .inputs = { x },
                               .outputs = { *y },
                               .saved = { e->sent, e->there.row_token, e->there.rows.offsets } });
}

static mt_status collect_backward(mt_tape *tape, mt_node *node)
{
    const struct exchange_attrs *a = mt_node_attrs(node);
    mt_tensor heads, row_line, offsets, dy = mt_node_grad_out(node, 0);
    mt_contribution dx;
    void *got;
    MT_TRY(mt_node_saved(tape, node, 0, &heads));
    MT_TRY(mt_node_saved(tape, node, 1, &row_line));
    MT_TRY(mt_node_saved(tape, node, 2, &offsets));
    MT_TRY(send_back(tape, node, &got, &dy, &heads, NULL, "gradients of experts' outputs"));
    MT_TRY(mt_contribution_begin(tape, node, 0, &dx));
    if (!dx.to) return MT_OK;
    int64_t lines = a->blocks.ranks * a->blocks.lines;
    MT_TRY(mt_gather_fwd(mt_tape_stream(tape),
                         &(struct mt_gather_fwd_args){ .dtype = dy.dtype,
                                                       .tokens = lines,
                                                       .width = a->width,
                                                       .top_k = 1,
                                                       .rows = lines,
                                                       .y = dx.to,
                                                       .x = got,
                                                       .row_token = row_line.data,
                                                       .rows_used = (const int64_t *)offsets.data +
                                                                    a->blocks.experts }));
    return mt_contribution_end(tape, &dx);
}

const mt_op mt_op_collect = { "collect", collect_backward, NULL };

void mt_exchanged_release(mt_tape *tape, mt_exchanged *e)
{
    mt_route_release(tape, &e->there);
    mt_route_release(tape, &e->home);
    mt_value_release(tape, &e->sent);
    mt_value_release(tape, &e->received);
    mt_value_release(tape, &e->factors);
}
