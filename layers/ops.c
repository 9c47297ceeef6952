/* The table of differentiable ops. */
#include "layers/functional.h"

const mt_op *const mt_layer_ops[] = {
    &mt_op_embedding,     &mt_op_residual_add,   &mt_op_rmsnorm,  &mt_op_qk_norm_rope,
    &mt_op_attention,     &mt_op_grouped_linear, &mt_op_swiglu,   &mt_op_router,
    &mt_op_gather,        &mt_op_combine,        &mt_op_dispatch, &mt_op_collect,
    &mt_op_cross_entropy, &mt_op_slice_rows,
};
const int mt_layer_op_count = (int)(sizeof mt_layer_ops / sizeof *mt_layer_ops);
