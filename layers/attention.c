/* Causal attention. */
#include "layers/contribution.h"

#include <math.h>

mt_status mt_attention(mt_tape *tape, mt_value **y, mt_value *qkv, const mt_attention_shape *shape)
{
    const mt_attention_shape *s = shape;
    mt_value *lse;
    MT_TRY(mt_tensor_check(
        &qkv->data, "attention: qkv", qkv->data.dtype, 2,
        (int64_t[]){ s->batch * s->sequence, (s->query_heads + 2 * s->kv_heads) * s->head_dim }));
    MT_TRY(mt_tape_value(tape, y, qkv->data.dtype, 2,
                         (int64_t[]){ s->batch * s->sequence, s->query_heads * s->head_dim }));
    MT_TRY(mt_tape_value(tape, &lse, mt_dtype_wide(qkv->data.dtype), 3,
                         (int64_t[]){ s->batch, s->query_heads, s->sequence }));
    MT_TRY(mt_attention_fwd(mt_tape_stream(tape),
                            &(struct mt_attention_fwd_args){ .dtype = qkv->data.dtype,
                                                             .batch = s->batch,
                                                             .sequence = s->sequence,
                                                             .query_heads = s->query_heads,
                                                             .kv_heads = s->kv_heads,
                                                             .head_dim = s->head_dim,
                                                             .scale = 1 / sqrt((double)s->head_dim),
                                                             .y = (*y)->data.data,
                                                             .lse = lse->data.data,
                                                             .qkv = qkv->data.data }));
    MT_TRY(mt_tape_record(tape, &(mt_node_spec){ .op = &mt_op_attention,
                                                 .attrs = shape,
                                                 .attrs_bytes = sizeof *shape,
                                                 .inputs = { qkv },
                                                 .outputs = { *y },
                                                 .saved = { qkv, *y, lse } }));
    mt_value_release(tape, &lse);
    return MT_OK;
}

static mt_status attention_backward(mt_tape *tape, mt_node *node)
{
    const mt_attention_shape *s = mt_node_attrs(node);
    mt_tensor qkv, y, lse;
    mt_contribution dx;
    MT_TRY(mt_node_saved(tape, node, 0, &qkv));
    MT_TRY(mt_node_saved(tape, node, 1, &y));
    MT_TRY(mt_node_saved(tape, node, 2, &lse));
    MT_TRY(mt_contribution_begin(tape, node, 0, &dx));
    if (!dx.to) return MT_OK;
    MT_TRY(mt_attention_bwd(mt_tape_stream(tape),
                            &(struct mt_attention_bwd_args){ .dtype = qkv.dtype,
                                                             .batch = s->batch,
                                                             .sequence = s->sequence,
                                                             .query_heads = s->query_heads,
                                                             .kv_heads = s->kv_heads,
                                                             .head_dim = s->head_dim,
                                                             .scale = 1 / sqrt((double)s->head_dim),
                                                             .dqkv = dx.to,
                                                             .dy = mt_node_grad_out(node, 0).data,
                                                             .qkv = qkv.data,
                                                             .y = y.data,
                                                             .lse = lse.data }));
    return mt_contribution_end(tape, &dx);
}

const mt_op mt_op_attention = { "attention", attention_backward, NULL };
