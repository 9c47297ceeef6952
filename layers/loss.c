/* Cross-entropy, of logits or of what becomes logits part by part. */
#include "layers/contribution.h"
#include "layers/linear_priv.h"

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
    mt_tensor logits, lse;
    mt_contribution dx;
    MT_TRY(mt_node_saved(tape, node, 0, &logits));
    MT_TRY(mt_node_saved(tape, node, 1, &lse));
    MT_TRY(mt_contribution_begin(tape, node, 0, &dx));
    if (!dx.to) return MT_OK;
    MT_TRY(mt_cross_entropy_bwd(
        mt_tape_stream(tape),
        &(struct mt_cross_entropy_bwd_args){ .dtype = logits.dtype,
                                             .tokens = mt_tensor_rows(&logits),
                                             .vocab = mt_tensor_cols(&logits),
                                             .ignore = IGNORE,
                                             .dlogits = dx.to,
                                             .logits = logits.data,
                                             .lse = lse.data,
                                             .targets = a->targets,
                                             .scale = a->scale,
                                             .dloss = mt_node_grad_out(node, 0).data }));
    return mt_contribution_end(tape, &dx);
}

const mt_op mt_op_cross_entropy = { "cross_entropy", cross_entropy_backward, NULL };

/* ---- part by part ------------------------------------------------------------------------------
 */

static mt_status part_loss(mt_tape *tape, void *context, mt_value *const *inputs,
                           mt_value **outputs)
{
    const mt_loss_part *p = context;
    mt_value *x, *logits;
    MT_TRY(mt_slice_rows(tape, &x, inputs[0], p->first, p->count));
    MT_TRY(mt_grouped_linear_part(tape, &logits, x, p->head, p->first));
    mt_value_release(tape, &x);
    MT_TRY(mt_cross_entropy(tape, &outputs[0], logits, p->targets + p->first, p->scale));
    mt_value_release(tape, &logits);
    return MT_OK;
}

mt_status mt_head_loss(mt_tape *tape, mt_value **loss, mt_value *x, mt_loss_part *parts,
                       int64_t count)
{
    mt_value *sum, *part = NULL;
    *loss = NULL;
    MT_REQUIRE(count > 0, MT_EINVAL, "head_loss: %lld parts, must be 1 or more", (long long)count);
    for (int64_t i = 0; i < count; i++) {
        MT_TRY(mt_tape_recompute(tape, part_loss, &parts[i], &x, 1, &part, 1));
        if (*loss) {
            MT_TRY(mt_residual_add(tape, &sum, *loss, part));
            mt_value_release(tape, &part);
            mt_value_release(tape, loss);
            part = sum;
        }
        *loss = part;
    }
    return MT_OK;
}
