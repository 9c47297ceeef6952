/* Differentiable ops: each runs its forward kernel, records a node, and returns a new value of
 * which the caller holds a reference. Matrices are [rows, columns]; T tokens, D width, R routed
 * rows, E experts. Errors: MT_EINVAL names the op and the shapes. */
#pragma once

#include "core/tape.h"
#include "dist/exchange.h"
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y[t] = w[tokens[t]]; tokens device int32 [T], borrowed until the sweep is over. */
mt_status mt_embedding(mt_tape *tape, mt_value **y, const int32_t *tokens, int64_t count,
                       mt_param *w);
/* y = a + b */
mt_status mt_residual_add(mt_tape *tape, mt_value **y, mt_value *a, mt_value *b);
/* y [count, D]: a copy of rows [first, first + count) of x */
mt_status mt_slice_rows(mt_tape *tape, mt_value **y, mt_value *x, int64_t first, int64_t count);
/* y [T, D] = RMSNorm(x) w */
mt_status mt_rmsnorm(mt_tape *tape, mt_value **y, mt_value *x, mt_param *w, double eps);

/* Queries, keys and values of one projection, and constants of attention. */
typedef struct mt_attention_shape {
    int64_t batch, sequence, query_heads, kv_heads, head_dim;
    mt_qk_norm norm;
    double eps;
    const void *cos_table, *sin_table; /* device real [sequence, head_dim / 2] */
} mt_attention_shape;

/* y [B S, (nq + 2 nkv) d]: heads normalised (w_q, w_k, two params, NULL without norm) and rotated.
 */
mt_status mt_qk_norm_rope(mt_tape *tape, mt_value **y, mt_value *qkv, mt_param *w_q, mt_param *w_k,
                          const mt_attention_shape *shape);
/* y [B S, nq d], scale 1/sqrt(d) */
mt_status mt_attention(mt_tape *tape, mt_value **y, mt_value *qkv, const mt_attention_shape *shape);

/* Which rows of a matrix belong to which member: the route plan's arrays. */
typedef struct mt_ragged {
    int64_t members;
    mt_value *counts;   /* int64 [E] */
    mt_value *offsets;  /* int64 [E + 1]: first rows; the last is the number of rows in use */
    mt_value *elements; /* int64 [MT_ROUTE_WIDTHS, E + 1]: element offsets, a row per width */
    int64_t widths[MT_ROUTE_WIDTHS];
} mt_ragged;

/* A linear layer of N members: y = x W^T + b for each member's rows. Its GEMMs compute in the
 * formats of weight->linear. */
typedef struct mt_grouped_linear_layer {
    mt_param *weight; /* [N; out, in], packed */
    mt_param *bias;   /* [N; 1, out] or NULL */
} mt_grouped_linear_layer;

/* Reserves memory for the compute copy of a GEMM weight under `recipe` (NULL: the compute dtype),
 * in the order `device` reads it; before the store is allocated. Several recipes share what the
 * largest needs. */
mt_status mt_linear_reserve(mt_param *weight, const mt_device *device, const mt_recipe *recipe);
/* Lays the compute copy out for the recipe of weight->linear: after allocation, and whenever that
 * recipe has changed. Its contents are undefined until the next refresh. */
mt_status mt_linear_place(mt_param *weight, const mt_device *device);
/* Writes it from the master: after every change of the master. */
mt_status mt_linear_refresh(mt_param *weight, mt_stream *stream);

/* The whole master, device real [N, out, in]: a split one is joined into its view first. */
mt_status mt_linear_master(const mt_param *weight, mt_stream *stream, void **master);

/* What quantizing an operand takes from the layer's state: scales, draws, where amaxes gather. */
struct mt_quantize_args mt_linear_quantize_args(const mt_param *weight, mt_operand operand);

/* y [rows, out] from x [rows, in]; rows NULL when N = 1 (every row belongs to member 0). */
mt_status mt_grouped_linear(mt_tape *tape, mt_value **y, mt_value *x,
                            const mt_grouped_linear_layer *layer, const mt_ragged *rows);

/* y [rows, F] = silu(gate) up of x [rows, 2F]; rows NULL: all rows are used. */
mt_status mt_swiglu(mt_tape *tape, mt_value **y, mt_value *x, const mt_ragged *rows);

typedef struct mt_route mt_route;

/* The two layers of an expert, with what lies beside their GEMMs: one op each where the device has
 * it (mt_moe_gemm), and the same bits where it has not.
 * mt_gate_up: z [rows, 2F] = x W^T (+ b) of x [T, D], whose rows `route` gathers (NULL: x [rows, D]
 * in place), and a [rows, F], its SwiGLU.
 * mt_down: y [rows, D] = a W^T (+ b). Its gradient goes to z, through the SwiGLU. weights: those
 * that mt_combine_down will weigh y's rows by; their gradient comes from these two, and y is not
 * kept for it (mt_weights_bwd). NULL otherwise, and where neither of the next two is true: with a
 * bias, or where some operands alone are quantized, whose products have other errors than y.
 * mt_gate_up_weighs: it takes that gradient from z's, on every device: operands of fprop and the
 * gradient of y are quantized, so that neither way is exact, and nobody asks for y to be kept
 * (mt_linear_state.save_expert_output). Weights that are not stored are factors of 1.
 * mt_down_weighs: mt_down does, on a device that gains by it: neither fprop nor dgrad is quantized.
 * mt_down_reads_z: every reader of a takes it quantized, from z in one pass: mt_gate_up's a and
 * mt_down's are then NULL or not stored (stores_a false).
 * mt_gate_up_takes_da: it is not stored but gets the gradient, and z's is only made as codes.
 * mt_down_combines: given weights, y is [T, D] as mt_combine makes it, and the gradient of the rows
 * is only made as codes, or, where the device weights after the product, not at all. */
bool mt_down_reads_z(const mt_param *down);
mt_status mt_gate_up(mt_tape *tape, mt_value **z, mt_value **a, mt_value *x, mt_value *weights,
                     const mt_grouped_linear_layer *layer, const mt_ragged *rows,
                     const mt_route *route, bool stores_a);
bool mt_gate_up_weighs(const mt_grouped_linear_layer *down);
bool mt_gate_up_takes_da(const mt_grouped_linear_layer *layer, const mt_param *down);
bool mt_down_weighs(const mt_device *device, const mt_grouped_linear_layer *down);
bool mt_down_combines(const mt_device *device, const mt_grouped_linear_layer *down);
mt_status mt_down(mt_tape *tape, mt_value **y, mt_value *z, mt_value *a, mt_value *weights,
                  const mt_grouped_linear_layer *layer, const mt_ragged *rows,
                  const mt_route *route);

typedef struct mt_router_shape {
    int64_t experts, top_k;
    bool normalize;
    const float *bias; /* device f32 [E] or NULL: selection only */
    int64_t *load;     /* device int64 [E] or NULL: += counts, once per pass that trains */
} mt_router_shape;

/* What routing decides; every field a held reference. */
typedef struct mt_routing {
    mt_value *weights;  /* real [T, k], differentiable */
    mt_value *prob_sum; /* real [E], differentiable */
    mt_value *z_sum;    /* real [1], differentiable */
    mt_value *counts;   /* int64 [E]: choices, before any drop */
    mt_value *chosen;   /* int32 [T, k] */
} mt_routing;

mt_status mt_router(mt_tape *tape, mt_routing *routing, mt_value *x, mt_param *w,
                    const mt_router_shape *shape);
void mt_routing_release(mt_tape *tape, mt_routing *routing);

/* The route plan of kernels/moe.h; references held. */
struct mt_route {
    mt_ragged rows;
    mt_value *row_token; /* int32 [R] */
    mt_value *position;  /* int32 [T, k] */
    int64_t tokens, top_k;
    int64_t room; /* rows of what position counts in: R, or, of what came back, P lines */
};

/* capacity: rows an expert takes at most, 0 for all. dropped: device int64 [1] or NULL: += dropped
 * rows, as load. */
mt_status mt_route_tokens(mt_tape *tape, mt_route *route, const mt_routing *routing,
                          int64_t experts, int64_t capacity, const int64_t widths[MT_ROUTE_WIDTHS],
                          int64_t *dropped);
void mt_route_release(mt_tape *tape, mt_route *route);

/* y [R, D]: the tokens' rows in expert order. */
mt_status mt_gather(mt_tape *tape, mt_value **y, mt_value *x, const mt_route *route);
/* y [T, D]: the experts' rows weighted and summed per token. */
mt_status mt_combine(mt_tape *tape, mt_value **y, mt_value *x, mt_value *weights,
                     const mt_route *route);
/* The same of rows that mt_down made with these weights, which gives them their gradient. */
mt_status mt_combine_down(mt_tape *tape, mt_value **y, mt_value *x, mt_value *weights,
                          const mt_route *route);

/* Rows on other ranks; references held. */
typedef struct mt_exchanged {
    mt_route there; /* what has arrived for this rank's experts: rows of the blocks, each line at
                       most once (top_k 1) */
    mt_route home;  /* where a token's rows come back: only tokens, top_k, room and position are
                       set */
    mt_value *sent, *received; /* int64 [P, 1 + S]: heads of the blocks */
    mt_value *factors; /* real [P lines, 1], of 1, on what the experts make of lines: not stored; or
                          NULL */
    struct mt_blocks blocks;
    mt_format_spec coded[2]; /* what rows, and the gradients of what comes back, travel as; without
                                a format: as they are */
} mt_exchanged;

/* Experts that are spread over ranks, with the layers gate_up and down, which say what may travel
 * as codes (both NULL: nothing). mt_dispatch sends the tokens' rows to them: y [P lines, D], the
 * blocks that this rank has received. `route` and `routing` are of all E experts;
 * widths as in mt_route_tokens. Where mt_gate_up_weighs, the gradient of the routing weights comes
 * from that of e->factors, mt_gate_up's weights, and mt_combine_down ends the layer. mt_collect
 * sends the experts' rows x back: y [P lines, D], from which mt_combine takes them by e->home.
 * Weight gradients that wait run beside the exchanges of backward. Collective over the ranks that
 * share the experts, in forward and in backward. */
mt_status mt_dispatch(mt_tape *tape, mt_value **y, mt_exchanged *e, mt_value *x,
                      const mt_route *route, const mt_routing *routing, mt_exchange *exchange,
                      const int64_t widths[MT_ROUTE_WIDTHS], const mt_grouped_linear_layer *gate_up,
                      const mt_grouped_linear_layer *down);
mt_status mt_collect(mt_tape *tape, mt_value **y, mt_value *x, const mt_exchanged *e,
                     mt_exchange *exchange);
void mt_exchanged_release(mt_tape *tape, mt_exchanged *e);

/* loss real [1]: see mt_cross_entropy_fwd. targets device int32 [T], scale device real [1], both
 * borrowed until the sweep is over. */
mt_status mt_cross_entropy(mt_tape *tape, mt_value **loss, mt_value *logits, const int32_t *targets,
                           const void *scale);

/* Of the tokens [first, first + count), which have their logits only while they are needed. */
typedef struct mt_loss_part {
    const mt_grouped_linear_layer *head;
    const int32_t *targets; /* of all tokens */
    const void *scale;
    int64_t first, count;
} mt_loss_part;

/* loss real [1]: the sum of the parts', each from its own logits x head^T, which are dropped when
 * the part's loss is known and made again in the sweep. The parts outlive the pass. A quantized
 * head quantizes each part for itself. */
mt_status mt_head_loss(mt_tape *tape, mt_value **loss, mt_value *x, mt_loss_part *parts,
                       int64_t count);

/* Every differentiable op, for whoever must cover them all. */
extern const mt_op *const mt_layer_ops[];
extern const int mt_layer_op_count;
extern const mt_op mt_op_embedding, mt_op_residual_add, mt_op_rmsnorm, mt_op_qk_norm_rope,
    mt_op_attention, mt_op_grouped_linear, mt_op_swiglu, mt_op_router, mt_op_gather, mt_op_combine,
    mt_op_dispatch, mt_op_collect, mt_op_cross_entropy, mt_op_slice_rows;

#ifdef __cplusplus
}
#endif
