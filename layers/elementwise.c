/* Embedding, residual add, rows of a matrix, SwiGLU: forward beside backward. */
#include "layers/contribution.h"
#include "layers/linear_priv.h"

#include <string.h>

struct embedding_attrs {
    const int32_t *tokens;
    int64_t count;
};

mt_status mt_embedding(mt_tape *tape, mt_value **y, const int32_t *tokens, int64_t count,
                       mt_param *w)
{
    MT_REQUIRE(w, MT_EINVAL, "embedding: the layer has no weight");
    mt_dtype dtype = w->compute;
    MT_TRY(mt_param_need(w, MT_ROW));
    MT_TRY(mt_tape_value(tape, y, dtype, 2, (int64_t[]){ count, w->group.k }));
    MT_TRY(mt_embedding_fwd(mt_tape_stream(tape),
                            &(struct mt_embedding_fwd_args){ .dtype = dtype,
                                                             .tokens_count = count,
                                                             .vocab = w->group.m,
                                                             .width = w->group.k,
                                                             .y = (*y)->data.data,
                                                             .w = w->master,
                                                             .tokens = tokens }));
    struct embedding_attrs attrs = { tokens, count };
    return mt_tape_record(tape, &(mt_node_spec){ .op = &mt_op_embedding,
                                                 .attrs = &attrs,
                                                 .attrs_bytes = sizeof attrs,
                                                 .outputs = { *y },
                                                 .params = { w } });
}

static mt_status run_embedding_wgrad(mt_tape *tape, const struct mt_wgrad *job, bool accumulate)
{
    struct embedding_attrs a;
    const mt_param *w = job->param;
    memcpy(&a, job->attrs, sizeof a);
    return mt_embedding_bwd(mt_tape_stream(tape),
                            &(struct mt_embedding_bwd_args){ .dtype = job->dy.dtype,
                                                             .tokens_count = a.count,
                                                             .vocab = w->group.m,
                                                             .width = w->group.k,
                                                             .accumulate = accumulate,
                                                             .dw = w->grad,
                                                             .dy = job->dy.data,
                                                             .tokens = a.tokens });
}

/* A weight gradient like a linear layer's, in one queue with it: a tied matrix receives both. */
static mt_status embedding_backward(mt_tape *tape, mt_node *node)
{
    struct mt_wgrad job = { .run = run_embedding_wgrad, .param = mt_node_param(node, 0) };
    _Static_assert(sizeof(struct embedding_attrs) <= sizeof job.attrs,
                   "the job carries the node's attributes");
    memcpy(job.attrs, mt_node_attrs(node), sizeof(struct embedding_attrs));
    return mt_tape_wgrad(tape, node, &job, -1, NULL, (int[MT_WGRAD_EXTRAS]){ -1, -1, -1, -1 });
}

const mt_op mt_op_embedding = { "embedding", embedding_backward, NULL };

mt_status mt_residual_add(mt_tape *tape, mt_value **y, mt_value *a, mt_value *b)
{
    mt_dtype dtype = a->data.dtype;
    MT_TRY(mt_tensor_check(&b->data, "residual_add: b", dtype, a->data.ndim, a->data.shape));
    MT_TRY(mt_tape_value(tape, y, dtype, a->data.ndim, a->data.shape));
    MT_TRY(mt_add(mt_tape_stream(tape), &(struct mt_add_args){ .dtype = dtype,
                                                               .count = mt_tensor_count(&a->data),
                                                               .y = (*y)->data.data,
                                                               .a = a->data.data,
                                                               .b = b->data.data }));
    return mt_tape_record(
        tape, &(mt_node_spec){ .op = &mt_op_residual_add, .inputs = { a, b }, .outputs = { *y } });
}

static mt_status residual_add_backward(mt_tape *tape, mt_node *node)
{
    for (int i = 0; i < 2; i++) {
        bool wanted;
        if (mt_node_grad_pass(tape, node, 0, i, &wanted) || !wanted) continue;
        mt_tensor grad, add, dy = mt_node_grad_out(node, 0);
        MT_TRY(mt_node_grad_in(tape, node, i, &grad, &add));
        MT_TRY(mt_add(mt_tape_stream(tape), &(struct mt_add_args){ .dtype = dy.dtype,
                                                                   .count = mt_tensor_count(&dy),
                                                                   .y = grad.data,
                                                                   .a = add.data,
                                                                   .b = dy.data }));
    }
    return MT_OK;
}

const mt_op mt_op_residual_add = { "residual_add", residual_add_backward, NULL };

struct slice_attrs {
    int64_t first;
};

mt_status mt_slice_rows(mt_tape *tape, mt_value **y, mt_value *x, int64_t first, int64_t count)
{
    int64_t rows = mt_tensor_rows(&x->data), width = mt_tensor_cols(&x->data);
    size_t line = (size_t)width * mt_dtype_size(x->data.dtype);
    MT_REQUIRE(first >= 0 && count > 0 && first + count <= rows, MT_EINVAL,
               "slice_rows: rows %lld to %lld of %lld", (long long)first,
               (long long)(first + count), (long long)rows);
    MT_TRY(mt_tape_value(tape, y, x->data.dtype, 2, (int64_t[]){ count, width }));
    MT_TRY(mt_device_copy_async(mt_tape_stream(tape), (*y)->data.data,
                                (const char *)x->data.data + (size_t)first * line,
                                (size_t)count * line));
    struct slice_attrs attrs = { first };
    return mt_tape_record(tape, &(mt_node_spec){ .op = &mt_op_slice_rows,
                                                 .attrs = &attrs,
                                                 .attrs_bytes = sizeof attrs,
                                                 .inputs = { x },
                                                 .outputs = { *y } });
}

static mt_status slice_rows_backward(mt_tape *tape, mt_node *node)
{
    const struct slice_attrs *a = mt_node_attrs(node);
    mt_stream *stream = mt_tape_stream(tape);
    mt_tensor dx, add, dy = mt_node_grad_out(node, 0);
    MT_TRY(mt_node_grad_in(tape, node, 0, &dx, &add));
    if (!dx.data) return MT_OK;
    if (!add.data)
        MT_TRY(mt_fill(stream, &(struct mt_fill_args){ .dtype = dx.dtype,
                                                       .count = mt_tensor_count(&dx),
                                                       .y = dx.data }));
    else if (add.data != dx.data)
        MT_TRY(mt_device_copy_async(stream, dx.data, add.data, mt_tensor_bytes(&dx)));
    size_t from = (size_t)(a->first * mt_tensor_cols(&dx)) * mt_dtype_size(dx.dtype);
    char *rows = (char *)dx.data + from;
    return mt_add(
        stream,
        &(struct mt_add_args){
            .dtype = dx.dtype, .count = mt_tensor_count(&dy), .y = rows, .a = rows, .b = dy.data });
}

const mt_op mt_op_slice_rows = { "slice_rows", slice_rows_backward, NULL };

struct swiglu_attrs {
    int64_t members; /* 0: not ragged */
};

/* Device address of the number of rows in use, NULL when all are. */
static const int64_t *rows_used(int64_t members, const mt_tensor *offsets)
{
    return members ? (const int64_t *)offsets->data + members : NULL;
}

static mt_status swiglu_run(mt_tape *tape, void *y, const mt_tensor *x, const int64_t *used)
{
    return mt_swiglu_fwd(mt_tape_stream(tape),
                         &(struct mt_swiglu_fwd_args){ .dtype = x->dtype,
                                                       .rows = mt_tensor_rows(x),
                                                       .width = mt_tensor_cols(x) / 2,
                                                       .rows_used = used,
                                                       .y = y,
                                                       .x = x->data });
}

mt_status mt_swiglu_record(mt_tape *tape, mt_value *y, mt_value *x, const mt_ragged *rows)
{
    struct swiglu_attrs attrs = { rows ? rows->members : 0 };
    return mt_tape_record(tape, &(mt_node_spec){ .op = &mt_op_swiglu,
                                                 .attrs = &attrs,
                                                 .attrs_bytes = sizeof attrs,
                                                 .inputs = { x },
                                                 .outputs = { y },
                                                 .saved = { x, rows ? rows->offsets : NULL } });
}

mt_status mt_swiglu(mt_tape *tape, mt_value **y, mt_value *x, const mt_ragged *rows)
{
    int64_t n = mt_tensor_rows(&x->data), width = mt_tensor_cols(&x->data) / 2;
    MT_REQUIRE(mt_tensor_cols(&x->data) == 2 * width, MT_EINVAL,
               "swiglu: x has %lld columns, must be gates and as many values",
               (long long)mt_tensor_cols(&x->data));
    MT_TRY(mt_tape_value(tape, y, x->data.dtype, 2, (int64_t[]){ n, width }));
    MT_TRY(swiglu_run(tape, (*y)->data.data, &x->data,
                      rows ? rows_used(rows->members, &rows->offsets->data) : NULL));
    return mt_swiglu_record(tape, *y, x, rows);
}

static mt_status swiglu_saved(mt_tape *tape, mt_node *node, mt_tensor *x, const int64_t **used)
{
    const struct swiglu_attrs *a = mt_node_attrs(node);
    mt_tensor offsets = { 0 };
    MT_TRY(mt_node_saved(tape, node, 0, x));
    if (a->members) MT_TRY(mt_node_saved(tape, node, 1, &offsets));
    *used = rows_used(a->members, &offsets);
    return MT_OK;
}

static mt_status swiglu_backward(mt_tape *tape, mt_node *node)
{
    mt_tensor x;
    mt_contribution dx;
    const int64_t *used = NULL;
    MT_TRY(swiglu_saved(tape, node, &x, &used));
    MT_TRY(mt_contribution_begin(tape, node, 0, &dx));
    if (!dx.to) return MT_OK;
    MT_TRY(mt_swiglu_bwd(mt_tape_stream(tape),
                         &(struct mt_swiglu_bwd_args){ .dtype = x.dtype,
                                                       .rows = mt_tensor_rows(&x),
                                                       .width = mt_tensor_cols(&x) / 2,
                                                       .rows_used = used,
                                                       .dx = dx.to,
                                                       .dy = mt_node_grad_out(node, 0).data,
                                                       .x = x.data }));
    return mt_contribution_end(tape, &dx);
}

static mt_status swiglu_again(mt_tape *tape, mt_node *node, mt_tensor *out)
{
    mt_tensor x;
    const int64_t *used = NULL;
    MT_TRY(swiglu_saved(tape, node, &x, &used));
    return swiglu_run(tape, out->data, &x, used);
}

const mt_op mt_op_swiglu = { "swiglu", swiglu_backward, swiglu_again };
