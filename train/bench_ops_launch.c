/* One launch of each op that `bench ops` measures, and what the op cannot avoid moving. */
#include "train/bench_ops_priv.h"

#include <math.h>

mt_status mt_bench_launch_router_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    (void)turn;
    return mt_router_fwd(&b->stream, &(struct mt_router_fwd_args){ .dtype = j->dtype,
                                                                   .tokens = j->s->tokens,
                                                                   .width = j->s->width,
                                                                   .experts = j->s->experts,
                                                                   .top_k = j->s->top_k,
                                                                   .normalize = true,
                                                                   .x = j->x,
                                                                   .wr = j->router,
                                                                   .probs = j->probs,
                                                                   .lse = j->router_lse,
                                                                   .weights = j->weights,
                                                                   .chosen = j->chosen,
                                                                   .prob_sum = j->prob_sum,
                                                                   .z_sum = j->z_sum,
                                                                   .counts = j->counts });
}

mt_status mt_bench_launch_route_plan(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    const mt_bench_layer *s = j->s;
    (void)turn;
    return mt_route_plan(&b->stream,
                         &(struct mt_route_plan_args){ .dtype = j->dtype,
                                                       .tokens = s->tokens,
                                                       .experts = s->experts,
                                                       .top_k = s->top_k,
                                                       .chosen = j->chosen,
                                                       .counts = j->counts,
                                                       .offsets = j->offsets,
                                                       .row_token = j->row_token,
                                                       .position = j->position,
                                                       .widths = { s->width, s->expert_width, 1 },
                                                       .element_offsets = j->element_offsets });
}

static mt_status launch_gather_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    return mt_gather_fwd(&b->stream,
                         &(struct mt_gather_fwd_args){ .dtype = j->dtype,
                                                       .tokens = j->s->tokens,
                                                       .width = j->s->width,
                                                       .top_k = j->s->top_k,
                                                       .rows = j->rows,
                                                       .y = j->rows_d[turn % 2],
                                                       .x = j->x,
                                                       .row_token = j->row_token,
                                                       .rows_used = j->offsets + j->s->experts,
                                                       .position = j->position });
}

static mt_status launch_gather_bwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    return mt_gather_bwd(&b->stream, &(struct mt_gather_bwd_args){ .dtype = j->dtype,
                                                                   .tokens = j->s->tokens,
                                                                   .width = j->s->width,
                                                                   .top_k = j->s->top_k,
                                                                   .dx = j->x,
                                                                   .dy = j->rows_d[turn % 2],
                                                                   .position = j->position });
}

static mt_status launch_combine_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    return mt_combine_fwd(&b->stream, &(struct mt_combine_fwd_args){ .dtype = j->dtype,
                                                                     .tokens = j->s->tokens,
                                                                     .width = j->s->width,
                                                                     .top_k = j->s->top_k,
                                                                     .y = j->x,
                                                                     .x = j->rows_d[turn % 2],
                                                                     .weights = j->weights,
                                                                     .position = j->position });
}

static mt_status launch_combine_bwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    return mt_combine_bwd(&b->stream, &(struct mt_combine_bwd_args){ .dtype = j->dtype,
                                                                     .tokens = j->s->tokens,
                                                                     .width = j->s->width,
                                                                     .top_k = j->s->top_k,
                                                                     .dx = j->rows_d[turn % 2],
                                                                     .dweights = j->dweights,
                                                                     .dy = j->x,
                                                                     .x = j->rows_d[!(turn % 2)],
                                                                     .weights = j->weights,
                                                                     .position = j->position });
}

static mt_status launch_rmsnorm_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    return mt_rmsnorm_fwd(&b->stream, &(struct mt_rmsnorm_fwd_args){ .dtype = j->dtype,
                                                                     .rows = j->rows,
                                                                     .width = j->s->width,
                                                                     .eps = 1e-6,
                                                                     .y = j->rows_d[turn % 2],
                                                                     .rstd = j->rstd,
                                                                     .x = j->rows_d[!(turn % 2)],
                                                                     .w = j->gain });
}

static mt_status launch_rmsnorm_bwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    return mt_rmsnorm_bwd(&b->stream, &(struct mt_rmsnorm_bwd_args){ .dtype = j->dtype,
                                                                     .rows = j->rows,
                                                                     .width = j->s->width,
                                                                     .dx = j->rows_2f[0],
                                                                     .dw = j->dgain,
                                                                     .dy = j->rows_d[turn % 2],
                                                                     .x = j->rows_d[!(turn % 2)],
                                                                     .rstd = j->rstd,
                                                                     .w = j->gain });
}

static mt_status launch_swiglu_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    return mt_swiglu_fwd(&b->stream, &(struct mt_swiglu_fwd_args){ .dtype = j->dtype,
                                                                   .rows = j->rows,
                                                                   .width = j->s->expert_width,
                                                                   .y = j->rows_f,
                                                                   .x = j->rows_2f[turn % 2] });
}

static mt_status launch_swiglu_bwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    return mt_swiglu_bwd(&b->stream, &(struct mt_swiglu_bwd_args){ .dtype = j->dtype,
                                                                   .rows = j->rows,
                                                                   .width = j->s->expert_width,
                                                                   .dx = j->rows_2f[turn % 2],
                                                                   .dy = j->rows_f,
                                                                   .x = j->rows_2f[!(turn % 2)] });
}

static mt_status launch_cross_entropy_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    (void)turn;
    return mt_cross_entropy_fwd(&b->stream,
                                &(struct mt_cross_entropy_fwd_args){ .dtype = j->dtype,
                                                                     .tokens = j->s->tokens,
                                                                     .vocab = j->s->vocab,
                                                                     .ignore = -100,
                                                                     .loss = j->z_sum,
                                                                     .lse = j->lse,
                                                                     .logits = j->logits,
                                                                     .targets = j->targets,
                                                                     .scale = j->one });
}

static mt_status launch_cross_entropy_bwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    (void)turn;
    return mt_cross_entropy_bwd(&b->stream,
                                &(struct mt_cross_entropy_bwd_args){ .dtype = j->dtype,
                                                                     .tokens = j->s->tokens,
                                                                     .vocab = j->s->vocab,
                                                                     .ignore = -100,
                                                                     .dlogits = j->dlogits,
                                                                     .logits = j->logits,
                                                                     .lse = j->lse,
                                                                     .targets = j->targets,
                                                                     .scale = j->one,
                                                                     .dloss = j->one });
}

static mt_status launch_attention_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    const mt_bench_layer *s = j->s;
    (void)turn;
    return mt_attention_fwd(&b->stream,
                            &(struct mt_attention_fwd_args){ .dtype = j->dtype,
                                                             .batch = s->tokens / s->sequence,
                                                             .sequence = s->sequence,
                                                             .query_heads = s->heads,
                                                             .kv_heads = s->kv_heads,
                                                             .head_dim = s->head_dim,
                                                             .scale = 1 / sqrt((double)s->head_dim),
                                                             .y = j->y,
                                                             .lse = j->attention_lse,
                                                             .qkv = j->qkv });
}

static mt_status launch_attention_bwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    const mt_bench_layer *s = j->s;
    (void)turn;
    return mt_attention_bwd(&b->stream,
                            &(struct mt_attention_bwd_args){ .dtype = j->dtype,
                                                             .batch = s->tokens / s->sequence,
                                                             .sequence = s->sequence,
                                                             .query_heads = s->heads,
                                                             .kv_heads = s->kv_heads,
                                                             .head_dim = s->head_dim,
                                                             .scale = 1 / sqrt((double)s->head_dim),
                                                             .dqkv = j->dqkv,
                                                             .dy = j->dy,
                                                             .qkv = j->qkv,
                                                             .y = j->y,
                                                             .lse = j->attention_lse });
}

static mt_status launch_qk_norm_rope_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    const mt_bench_layer *s = j->s;
    (void)turn;
    return mt_qk_norm_rope_fwd(&b->stream,
                               &(struct mt_qk_norm_rope_fwd_args){ .dtype = j->dtype,
                                                                   .batch = s->tokens / s->sequence,
                                                                   .sequence = s->sequence,
                                                                   .query_heads = s->heads,
                                                                   .kv_heads = s->kv_heads,
                                                                   .head_dim = s->head_dim,
                                                                   .norm = MT_QK_NORM_HEAD,
                                                                   .eps = 1e-6,
                                                                   .y = j->dqkv,
                                                                   .rstd = j->head_rstd,
                                                                   .x = j->qkv,
                                                                   .w_q = j->head_gain,
                                                                   .w_k = j->head_gain,
                                                                   .cos_table = j->cosine,
                                                                   .sin_table = j->sine });
}

static mt_status launch_qk_norm_rope_bwd(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    const mt_bench_layer *s = j->s;
    size_t one = (size_t)s->head_dim * mt_dtype_size(j->real);
    (void)turn;
    return mt_qk_norm_rope_bwd(
        &b->stream, &(struct mt_qk_norm_rope_bwd_args){ .dtype = j->dtype,
                                                        .batch = s->tokens / s->sequence,
                                                        .sequence = s->sequence,
                                                        .query_heads = s->heads,
                                                        .kv_heads = s->kv_heads,
                                                        .head_dim = s->head_dim,
                                                        .norm = MT_QK_NORM_HEAD,
                                                        .dx = j->dqkv,
                                                        .dw_q = j->dhead_gain,
                                                        .dw_k = (char *)j->dhead_gain + one,
                                                        .dy = j->dqkv,
                                                        .x = j->qkv,
                                                        .rstd = j->head_rstd,
                                                        .w_q = j->head_gain,
                                                        .w_k = j->head_gain,
                                                        .cos_table = j->cosine,
                                                        .sin_table = j->sine });
}

mt_status mt_bench_launch_grad_norm(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    (void)turn;
    return mt_grad_norm(&b->stream, &(struct mt_grad_norm_args){ .dtype = j->real,
                                                                 .count = j->params,
                                                                 .max_norm = 1,
                                                                 .beta1 = 0.9,
                                                                 .beta2 = 0.95,
                                                                 .grad = j->grad,
                                                                 .state = j->state });
}

static mt_status launch_grad_norm_bf16(mt_bench *b, void *context, int64_t turn)
{
    const struct mt_bench_job *j = context;
    (void)turn;
    return mt_grad_norm(&b->stream, &(struct mt_grad_norm_args){ .dtype = MT_F32,
                                                                 .max_norm = 1,
                                                                 .beta1 = 0.9,
                                                                 .beta2 = 0.95,
                                                                 .bf16_count = j->params,
                                                                 .bf16_grad = j->bf16_grad,
                                                                 .state = j->state });
}

/* bf16: the gradient. */
static mt_status adamw(mt_bench *b, const struct mt_bench_job *j, mt_master master,
                       mt_moments moments, bool stochastic, bool bf16)
{
    bool blocks = mt_moments_forms[moments].block > 0;
    return mt_adamw(&b->stream,
                    &(struct mt_adamw_args){ .dtype = j->real,
                                             .count = j->params,
                                             .beta1 = 0.9,
                                             .beta2 = 0.95,
                                             .eps = 1e-8,
                                             .decay = 0.1,
                                             .master = master,
                                             .moments = moments,
                                             .stochastic = stochastic,
                                             .p = j->p,
                                             .p_low = master == MT_MASTER_SPLIT ? j->p_low : NULL,
                                             .m = j->m,
                                             .v = j->v,
                                             .m_scales = blocks ? j->m_scales : NULL,
                                             .v_scales = blocks ? j->v_scales : NULL,
                                             .grad = bf16 ? j->bf16_grad : j->grad,
                                             .grad_bf16 = bf16,
                                             .state = j->state });
}

static mt_status launch_adamw(mt_bench *b, void *context, int64_t turn)
{
    (void)turn;
    return adamw(b, context, MT_MASTER_REAL, MT_MOMENTS_REAL, false, false);
}

static mt_status launch_adamw_bf16(mt_bench *b, void *context, int64_t turn)
{
    (void)turn;
    return adamw(b, context, MT_MASTER_SPLIT, MT_MOMENTS_BF16, false, false);
}

static mt_status launch_adamw_bf16_grad(mt_bench *b, void *context, int64_t turn)
{
    (void)turn;
    return adamw(b, context, MT_MASTER_SPLIT, MT_MOMENTS_BF16, false, true);
}

static mt_status launch_adamw_fp8(mt_bench *b, void *context, int64_t turn)
{
    (void)turn;
    return adamw(b, context, MT_MASTER_REAL, MT_MOMENTS_FP8, false, false);
}

static mt_status launch_adamw_bf16_sr(mt_bench *b, void *context, int64_t turn)
{
    (void)turn;
    return adamw(b, context, MT_MASTER_SPLIT, MT_MOMENTS_BF16, true, true);
}

const struct mt_bench_op mt_bench_op_rows[] = {
    { "router_fwd", mt_bench_launch_router_fwd, .td = 1, .router = 1 },
    { "route_plan", mt_bench_launch_route_plan, .choices = 3 },
    { "gather_fwd", launch_gather_fwd, .td = 1, .rd = 1 },
    { "gather_bwd", launch_gather_bwd, .td = 1, .rd = 1 },
    { "combine_fwd", launch_combine_fwd, .td = 1, .rd = 1 },
    { "combine_bwd", launch_combine_bwd, .td = 1, .rd = 2 },
    { "rmsnorm_fwd", launch_rmsnorm_fwd, .rd = 2 },
    { "rmsnorm_bwd", launch_rmsnorm_bwd, .rd = 3 },
    { "swiglu_fwd", launch_swiglu_fwd, .rf = 3 },
    { "swiglu_bwd", launch_swiglu_bwd, .rf = 5 },
    { "cross_entropy_fwd", launch_cross_entropy_fwd, .tv = 1 },
    { "cross_entropy_bwd", launch_cross_entropy_bwd, .tv = 2 },
    { "attention_fwd", launch_attention_fwd, .qkv = 2, .attention = 2 },
    { "attention_bwd", launch_attention_bwd, .qkv = 4, .attention = 5 },
    { "qk_norm_rope_fwd", launch_qk_norm_rope_fwd, .qkv = 2, .values = 2 },
    { "qk_norm_rope_bwd", launch_qk_norm_rope_bwd, .qkv = 3 },
    { "grad_norm", mt_bench_launch_grad_norm, .params = 4 },
    { "grad_norm_bf16", launch_grad_norm_bf16, .params = 2, .f32_only = true },
    { "adamw", launch_adamw, .params = 28, .updates = true },
    { "adamw_split_bf16", launch_adamw_bf16, .params = 20, .updates = true, .f32_only = true },
    { "adamw_bf16_grad", launch_adamw_bf16_grad, .params = 18, .updates = true, .f32_only = true },
    { "adamw_bf16_sr", launch_adamw_bf16_sr, .params = 18, .updates = true, .f32_only = true },
    { "adamw_f32_fp8", launch_adamw_fp8, .params = 16.125, .updates = true, .f32_only = true },
};
const int mt_bench_op_count = sizeof mt_bench_op_rows / sizeof *mt_bench_op_rows;
