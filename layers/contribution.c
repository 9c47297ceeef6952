#include "layers/contribution.h"

mt_status mt_contribution_begin(mt_tape *tape, mt_node *node, int input, mt_contribution *c)
{
    mt_tensor add;
    MT_TRY(mt_node_grad_in(tape, node, input, &c->grad, &add));
    c->before = add.data, c->to = c->grad.data;
    return c->before ? mt_node_scratch(tape, node, &c->to, mt_tensor_bytes(&c->grad)) : MT_OK;
}

mt_status mt_contribution_end(mt_tape *tape, const mt_contribution *c)
{
    if (!c->before) return MT_OK;
    return mt_add(mt_tape_stream(tape), &(struct mt_add_args){ .dtype = c->grad.dtype,
                                                               .count = mt_tensor_count(&c->grad),
                                                               .y = c->grad.data,
                                                               .a = c->before,
                                                               .b = c->to });
}
