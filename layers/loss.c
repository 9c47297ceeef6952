/* Cross-entropy. */
#include "layers/functional.h"

enum { IGNORE = -100 };

struct loss_attrs {
    const int32_t *targets;
    const void *scale;
};

mt_status mt_cross_entropy(mt_tape *tape, mt_value **loss, mt_value *logits, const int32_t *targets,
                           const void *scale)
{
    int64_t tokens = mt_tensor_rows(&logits->data), vocab = mt_tensor_cols(&logits->data);
    mt_dtype dtype = logits->data.dtype, real = mt_dtype_wide(dtype);
    mt_value *lse;
    MT_TRY(mt_tape_value(tape, loss, real, 1, (int64_t[]){ 1 }));
    MT_TRY(mt_tape_value(tape, &lse, real, 1, &tokens));
    MT_TRY(mt_cross_entropy_fwd(mt_tape_stream(tape),
                                &(struct mt_cross_entropy_fwd_args){ .dtype = dtype,
                                                                     .tokens = tokens,
                                                                     .vocab = vocab,
                                                                     .ignore = IGNORE,
                                                                     .loss = (*loss)->data.data,
                                                                     .lse = lse->data.data,
                                                                     .logits = logits->data.data,
                                                                     .targets = targets,
                                                                     .scale = scale }));
    struct loss_attrs attrs = { targets, scale };
    MT_TRY(mt_tape_record(tape, &(mt_node_spec){ .op = &mt_op_cross_entropy,
                                                 .attrs = &attrs,
                                                 .attrs_bytes = sizeof attrs,
                                                 .inputs = { logits },
                                                 .outputs = { *loss },
                                                 .saved = { logits, lse } }));
    mt_value_release(tape, &lse);
    return MT_OK;
}

static mt_status cross_entropy_backward(mt_tape *tape, mt_node *node)
{
    const struct loss_attrs *a = mt_node_attrs(node);
    mt_tensor logits, lse, dx, add;
    MT_TRY(mt_node_saved(tape, node, 0, &logits));
    MT_TRY(mt_node_saved(tape, node, 1, &lse));
    MT_TRY(mt_node_grad_in(tape, node, 0, &dx, &add));
    if (!dx.data) return MT_OK;
    MT_REQUIRE(!add.data, MT_EINTERNAL, "cross_entropy: its logits have a second consumer");
    return mt_cross_entropy_bwd(
        mt_tape_stream(tape),
        &(struct mt_cross_entropy_bwd_args){ .dtype = logits.dtype,
                                             .tokens = mt_tensor_rows(&logits),
                                             .vocab = mt_tensor_cols(&logits),
                                             .ignore = IGNORE,
                                             .dlogits = dx.data,
                                             .logits = logits.data,
                                             .lse = lse.data,
                                             .targets = a->targets,
                                             .scale = a->scale,
                                             .dloss = mt_node_grad_out(node, 0).data });
}

const mt_op mt_op_cross_entropy = { "cross_entropy", cross_entropy_backward, NULL };
