/* RMSNorm; queries and keys normalised and rotated. */
#include "layers/contribution.h"

mt_status mt_rmsnorm(mt_tape *tape, mt_value **y, mt_value *x, mt_param *w, double eps)
{
    int64_t rows = mt_tensor_rows(&x->data), width = mt_tensor_cols(&x->data);
    MT_REQUIRE(w, MT_EINVAL, "rmsnorm: the layer has no weight");
    MT_REQUIRE(mt_dtype_wide(x->data.dtype) == w->dtype, MT_EINVAL, "rmsnorm: %s is %s, x is %s",
               w->name, mt_dtype_name(w->dtype), mt_dtype_name(x->data.dtype));
    MT_REQUIRE(mt_param_count(w) == width, MT_EINVAL,
               "rmsnorm: %s has %lld weights, x has %lld columns", w->name,
               (long long)mt_param_count(w), (long long)width);
    mt_value *rstd;
    MT_TRY(mt_param_need(w, MT_ROW));
    MT_TRY(mt_tape_value(tape, y, x->data.dtype, x->data.ndim, x->data.shape));
    MT_TRY(mt_tape_value(tape, &rstd, mt_dtype_wide(x->data.dtype), 1, &rows));
    MT_TRY(
        mt_rmsnorm_fwd(mt_tape_stream(tape), &(struct mt_rmsnorm_fwd_args){ .dtype = x->data.dtype,
                                                                            .rows = rows,
                                                                            .width = width,
                                                                            .eps = eps,
                                                                            .y = (*y)->data.data,
                                                                            .rstd = rstd->data.data,
                                                                            .x = x->data.data,
                                                                            .w = w->master }));
    MT_TRY(mt_tape_record(tape, &(mt_node_spec){ .op = &mt_op_rmsnorm,
                                                 .inputs = { x },
                                                 .outputs = { *y },
                                                 .saved = { x, rstd },
                                                 .params = { w } }));
    mt_value_release(tape, &rstd);
    return MT_OK;
}

static mt_status rmsnorm_backward(mt_tape *tape, mt_node *node)
{
    mt_param *w = mt_node_param(node, 0);
    mt_tensor x, rstd, dx, add;
    bool accumulate, skip;
    MT_TRY(mt_node_saved(tape, node, 0, &x));
    MT_TRY(mt_node_saved(tape, node, 1, &rstd));
    MT_TRY(mt_node_grad_in(tape, node, 0, &dx, &add));
    MT_TRY(mt_param_need(w, MT_COL));
    MT_TRY(mt_param_grad_begin(tape, w, &accumulate, &skip));
    if (!dx.data) MT_TRY(mt_node_scratch(tape, node, &dx.data, mt_tensor_bytes(&x)));
    MT_TRY(mt_rmsnorm_bwd(mt_tape_stream(tape),
                          &(struct mt_rmsnorm_bwd_args){ .dtype = x.dtype,
                                                         .rows = mt_tensor_rows(&x),
                                                         .width = mt_tensor_cols(&x),
                                                         .accumulate = accumulate,
                                                         .dx = dx.data,
                                                         .dx_add = add.data,
                                                         .dw = skip ? NULL : w->grad,
                                                         .dy = mt_node_grad_out(node, 0).data,
                                                         .x = x.data,
                                                         .rstd = rstd.data,
                                                         .w = w->master }));
    return mt_param_grad_end(tape, w);
}

const mt_op mt_op_rmsnorm = { "rmsnorm", rmsnorm_backward, NULL };

/* rstd values per token of each kind of norm. */
static int64_t norm_groups(const mt_attention_shape *s)
{
    return s->norm == MT_QK_NORM_HEAD         ? s->query_heads + s->kv_heads
           : s->norm == MT_QK_NORM_PROJECTION ? 2
                                              : 0;
}

/* Weights of a norm of x over each of so many heads, or over all of them. */
static mt_status check_norm(const mt_param *w, const mt_tensor *x, const mt_attention_shape *s,
                            int64_t heads)
{
    if (!w) return MT_OK; /* the kernel asks for what is missing */
    MT_REQUIRE(s->norm != MT_QK_NORM_NONE, MT_EINVAL,
               "qk_norm_rope: %s is given, but the norm is none", w->name);
    MT_REQUIRE(mt_dtype_wide(x->dtype) == w->dtype, MT_EINVAL, "qk_norm_rope: %s is %s, x is %s",
               w->name, mt_dtype_name(w->dtype), mt_dtype_name(x->dtype));
    int64_t width = s->head_dim * (s->norm == MT_QK_NORM_HEAD ? 1 : heads);
    MT_REQUIRE(mt_param_count(w) == width, MT_EINVAL,
               "qk_norm_rope: %s has %lld weights, %lld heads of %lld need %lld", w->name,
               (long long)mt_param_count(w), (long long)heads, (long long)s->head_dim,
               (long long)width);
    return MT_OK;
}

mt_status mt_qk_norm_rope(mt_tape *tape, mt_value **y, mt_value *qkv, mt_param *w_q, mt_param *w_k,
                          const mt_attention_shape *shape)
{
    int64_t tokens = shape->batch * shape->sequence;
    mt_value *rstd;
    MT_TRY(mt_tensor_check(
        &qkv->data, "qk_norm_rope: qkv", qkv->data.dtype, 2,
        (int64_t[]){ tokens, (shape->query_heads + 2 * shape->kv_heads) * shape->head_dim }));
    MT_TRY(check_norm(w_q, &qkv->data, shape, shape->query_heads));
    MT_TRY(check_norm(w_k, &qkv->data, shape, shape->kv_heads));
    MT_REQUIRE(!w_q || w_q != w_k, MT_EINVAL,
               "qk_norm_rope: %s is given for queries and for keys, must be two params",
               w_q ? w_q->name : "w_q");
    MT_TRY(mt_tape_value(tape, y, qkv->data.dtype, qkv->data.ndim, qkv->data.shape));
    MT_TRY(mt_tape_value(tape, &rstd, mt_dtype_wide(qkv->data.dtype), 2,
                         (int64_t[]){ tokens, norm_groups(shape) }));
    if (w_q) MT_TRY(mt_param_need(w_q, MT_ROW));
    if (w_k) MT_TRY(mt_param_need(w_k, MT_ROW));
    MT_TRY(mt_qk_norm_rope_fwd(
        mt_tape_stream(tape), &(struct mt_qk_norm_rope_fwd_args){ .dtype = qkv->data.dtype,
                                                                  .batch = shape->batch,
                                                                  .sequence = shape->sequence,
                                                                  .query_heads = shape->query_heads,
                                                                  .kv_heads = shape->kv_heads,
                                                                  .head_dim = shape->head_dim,
                                                                  .norm = shape->norm,
                                                                  .eps = shape->eps,
                                                                  .y = (*y)->data.data,
                                                                  .rstd = rstd->data.data,
                                                                  .x = qkv->data.data,
                                                                  .w_q = w_q ? w_q->master : NULL,
                                                                  .w_k = w_k ? w_k->master : NULL,
                                                                  .cos_table = shape->cos_table,
                                                                  .sin_table = shape->sin_table }));
    MT_TRY(mt_tape_record(tape, &(mt_node_spec){ .op = &mt_op_qk_norm_rope,
                                                 .attrs = shape,
                                                 .attrs_bytes = sizeof *shape,
                                                 .inputs = { qkv },
                                                 .outputs = { *y },
                                                 .saved = { qkv, rstd },
                                                 .params = { w_q, w_k } }));
    mt_value_release(tape, &rstd);
    return MT_OK;
}

static mt_status qk_norm_rope_backward(mt_tape *tape, mt_node *node)
{
    const mt_attention_shape *s = mt_node_attrs(node);
    bool norm = s->norm != MT_QK_NORM_NONE, accumulate[2] = { 0 }, skip[2] = { true, true };
    mt_param *w[2] = { NULL, NULL };
    mt_tensor x, rstd;
    mt_contribution dx;
    MT_TRY(mt_node_saved(tape, node, 0, &x));
    MT_TRY(mt_node_saved(tape, node, 1, &rstd));
    MT_TRY(mt_contribution_begin(tape, node, 0, &dx));
    for (int i = 0; i < 2 && norm; i++) {
        w[i] = mt_node_param(node, i);
        MT_TRY(mt_param_need(w[i], MT_COL));
        MT_TRY(mt_param_grad_begin(tape, w[i], &accumulate[i], &skip[i]));
    }
    if (!dx.to) MT_TRY(mt_node_scratch(tape, node, &dx.to, mt_tensor_bytes(&x)));
    MT_TRY(mt_qk_norm_rope_bwd(mt_tape_stream(tape), &(struct mt_qk_norm_rope_bwd_args){
                                                         .dtype = x.dtype,
                                                         .batch = s->batch,
                                                         .sequence = s->sequence,
                                                         .query_heads = s->query_heads,
                                                         .kv_heads = s->kv_heads,
                                                         .head_dim = s->head_dim,
                                                         .norm = s->norm,
                                                         .accumulate_q = accumulate[0],
                                                         .accumulate_k = accumulate[1],
                                                         .dx = dx.to,
                                                         .dw_q = skip[0] ? NULL : w[0]->grad,
                                                         .dw_k = skip[1] ? NULL : w[1]->grad,
                                                         .dy = mt_node_grad_out(node, 0).data,
                                                         .x = x.data,
                                                         .rstd = rstd.data,
                                                         .w_q = norm ? w[0]->master : NULL,
                                                         .w_k = norm ? w[1]->master : NULL,
                                                         .cos_table = s->cos_table,
                                                         .sin_table = s->sin_table }));
    for (int i = 0; i < 2 && norm; i++) MT_TRY(mt_param_grad_end(tape, w[i]));
    return mt_contribution_end(tape, &dx);
}

const mt_op mt_op_qk_norm_rope = { "qk_norm_rope", qk_norm_rope_backward, NULL };
