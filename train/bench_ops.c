/* What a step has besides its grouped GEMMs, op by op, at the sizes of a MoE layer and the model
 * around it. The buffers of one shape serve all ops; each row of the table names the elements that
 * an op cannot avoid moving, and its FLOP. */
#include "train/bench.h"

#include <math.h>
#include <stdlib.h>

#include "core/rng.h"

struct job {
    const mt_bench_layer *s;
    int64_t rows;   /* R = T top_k */
    int64_t params; /* of the experts: what AdamW updates */
    mt_dtype dtype, real;
    void *rows_d[2], *rows_2f[2], *rows_f; /* [R, D], [R, 2F], [R, F] */
    void *x;                               /* [T, D] */
    void *gain, *dgain, *rstd;             /* [D], [D], [R] */
    void *logits, *dlogits, *lse;          /* [T, V], [T, V], [T] */
    int32_t *targets;
    void *qkv, *dqkv, *y, *dy, *attention_lse; /* [T, (nq + 2 nkv) d], [T, nq d], [T, nq] */
    void *head_gain, *dhead_gain, *head_rstd;  /* [d], 2 of [d], [T, nq + nkv] */
    void *cosine, *sine;                       /* [S, d / 2] */
    void *router, *probs, *router_lse, *weights, *dweights, *prob_sum, *z_sum;
    int32_t *chosen, *row_token, *position;
    int64_t *counts, *offsets, *element_offsets;
    void *p, *grad, *bf16_grad, *m, *v, *m_scales, *v_scales;
    int16_t *p_low;
    struct mt_step_state *state;
    void *one; /* 1 in real */
};

/* ---- launches ----------------------------------------------------------------------------------
 */

static mt_status launch_router_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct job *j = context;
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

static mt_status launch_route_plan(mt_bench *b, void *context, int64_t turn)
{
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
    return mt_swiglu_fwd(&b->stream, &(struct mt_swiglu_fwd_args){ .dtype = j->dtype,
                                                                   .rows = j->rows,
                                                                   .width = j->s->expert_width,
                                                                   .y = j->rows_f,
                                                                   .x = j->rows_2f[turn % 2] });
}

static mt_status launch_swiglu_bwd(mt_bench *b, void *context, int64_t turn)
{
    const struct job *j = context;
    return mt_swiglu_bwd(&b->stream, &(struct mt_swiglu_bwd_args){ .dtype = j->dtype,
                                                                   .rows = j->rows,
                                                                   .width = j->s->expert_width,
                                                                   .dx = j->rows_2f[turn % 2],
                                                                   .dy = j->rows_f,
                                                                   .x = j->rows_2f[!(turn % 2)] });
}

static mt_status launch_cross_entropy_fwd(mt_bench *b, void *context, int64_t turn)
{
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
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
    const struct job *j = context;
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

static mt_status launch_grad_norm(mt_bench *b, void *context, int64_t turn)
{
    const struct job *j = context;
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
    const struct job *j = context;
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
static mt_status adamw(mt_bench *b, const struct job *j, mt_master master, mt_moments moments,
                       bool bf16)
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
    return adamw(b, context, MT_MASTER_REAL, MT_MOMENTS_REAL, false);
}

static mt_status launch_adamw_bf16(mt_bench *b, void *context, int64_t turn)
{
    (void)turn;
    return adamw(b, context, MT_MASTER_SPLIT, MT_MOMENTS_BF16, false);
}

static mt_status launch_adamw_bf16_grad(mt_bench *b, void *context, int64_t turn)
{
    (void)turn;
    return adamw(b, context, MT_MASTER_SPLIT, MT_MOMENTS_BF16, true);
}

static mt_status launch_adamw_fp8(mt_bench *b, void *context, int64_t turn)
{
    (void)turn;
    return adamw(b, context, MT_MASTER_REAL, MT_MOMENTS_FP8, false);
}

/* ---- the table ---------------------------------------------------------------------------------
 */

static const struct op {
    const char *name;
    mt_bench_launch launch;
    double td, rd, rf, tv; /* matrices of the dtype that are read or written: [T, D], ... */
    double choices;        /* int32 [T, top_k] */
    double qkv;            /* matrices [T, (nq + nkv) d]: heads in and out */
    double values;         /* matrices [T, nkv d] */
    double params;         /* bytes for each parameter, where real is f32 */
    double attention;      /* products of the causal half of [S, S] scores with a head's width */
    double router;         /* products [T, D] with [D, E] */
    bool updates;          /* masters and moments, which begin as zeros: so every form reads them */
    bool f32_only;         /* forms of storage that f64 does not have */
} ops[] = {
    { "router_fwd", launch_router_fwd, .td = 1, .router = 1 },
    { "route_plan", launch_route_plan, .choices = 3 },
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
    { "grad_norm", launch_grad_norm, .params = 4 },
    { "grad_norm_bf16", launch_grad_norm_bf16, .params = 2, .f32_only = true },
    { "adamw", launch_adamw, .params = 28, .updates = true },
    { "adamw_split_bf16", launch_adamw_bf16, .params = 20, .updates = true, .f32_only = true },
    { "adamw_bf16_grad", launch_adamw_bf16_grad, .params = 18, .updates = true, .f32_only = true },
    { "adamw_f32_fp8", launch_adamw_fp8, .params = 16.125, .updates = true, .f32_only = true },
};
enum { OPS = sizeof ops / sizeof *ops };

struct work {
    double bytes, flop;
};

static struct work work_of(const struct job *j, const struct op *op)
{
    const mt_bench_layer *s = j->s;
    double t = (double)s->tokens, d = (double)s->width, r = (double)j->rows;
    double elements = op->td * t * d + op->rd * r * d + op->rf * r * (double)s->expert_width +
                      op->tv * t * (double)s->vocab +
                      op->qkv * t * (double)((s->heads + s->kv_heads) * s->head_dim) +
                      op->values * t * (double)(s->kv_heads * s->head_dim);
    double real = (double)mt_dtype_size(j->real) / (double)mt_dtype_size(MT_F32);
    /* a query meets (S + 1) / 2 keys on average */
    double meetings = t * ((double)s->sequence + 1) / 2 * (double)(s->heads * s->head_dim);
    struct work w;
    w.bytes = elements * (double)mt_dtype_size(j->dtype) + op->params * (double)j->params * real;
    w.bytes += op->choices * r * (double)sizeof(int32_t);
    w.flop = 2 * op->attention * meetings + 2 * op->router * t * d * (double)s->experts;
    return w;
}

/* ---- buffers -----------------------------------------------------------------------------------
 */

static mt_status make_targets(mt_bench *b, struct job *j)
{
    enum { SEED = 6 };
    size_t bytes = (size_t)j->s->tokens * sizeof(int32_t);
    int32_t *host = malloc(bytes);
    MT_REQUIRE(host, MT_ENOMEM, "bench: out of memory");
    for (int64_t t = 0; t < j->s->tokens; t++)
        host[t] = (int32_t)mt_rng_below(SEED, 0, (uint64_t)t, (uint64_t)j->s->vocab);
    mt_status status = mt_bench_upload(b, (void **)&j->targets, host, bytes);
    free(host);
    return status;
}

/* Routing decided by a router of random weights. */
static mt_status make_routing(mt_bench *b, struct job *j)
{
    const mt_bench_layer *s = j->s;
    size_t real = mt_dtype_size(j->real), rows = (size_t)j->rows, tokens = (size_t)s->tokens;
    size_t experts = (size_t)s->experts;
    const struct {
        void **p;
        size_t bytes;
    } buffers[] = {
        { &j->probs, tokens * experts * real },
        { &j->router_lse, tokens * real },
        { &j->weights, rows * real },
        { &j->dweights, rows * real },
        { &j->prob_sum, experts * real },
        { &j->z_sum, real },
        { (void **)&j->chosen, rows * sizeof(int32_t) },
        { (void **)&j->row_token, rows * sizeof(int32_t) },
        { (void **)&j->position, rows * sizeof(int32_t) },
        { (void **)&j->counts, experts * sizeof(int64_t) },
        { (void **)&j->offsets, (experts + 1) * sizeof(int64_t) },
        { (void **)&j->element_offsets, MT_ROUTE_WIDTHS * (experts + 1) * sizeof(int64_t) },
    };
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        MT_TRY(mt_bench_alloc(b, buffers[i].p, buffers[i].bytes));
    MT_TRY(mt_bench_random(b, &j->router, s->experts * s->width, j->real, 0.02));
    MT_TRY(launch_router_fwd(b, j, 0));
    return launch_route_plan(b, j, 0);
}

static mt_status zero_optimizer(mt_bench *b, struct job *j, bool allocate)
{
    size_t real = mt_dtype_size(j->real), count = (size_t)j->params;
    size_t scales = (size_t)mt_moments_blocks(MT_MOMENTS_FP8, j->params) * sizeof(float);
    const struct {
        void **p;
        size_t bytes;
    } buffers[] = { { &j->p, count * real },  { (void **)&j->p_low, count * sizeof(int16_t) },
                    { &j->m, count * real },  { &j->v, count * real },
                    { &j->m_scales, scales }, { &j->v_scales, scales } };
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        if (allocate) MT_TRY(mt_bench_alloc(b, buffers[i].p, buffers[i].bytes));
        MT_TRY(mt_device_zero(b->device, *buffers[i].p, buffers[i].bytes));
    }
    return MT_OK;
}

static mt_status make_optimizer(mt_bench *b, struct job *j)
{
    struct mt_step_state state = { .lr = 1e-4, .power1 = 1, .power2 = 1, .clip = 1 };
    double one = 0;
    MT_TRY(zero_optimizer(b, j, true));
    MT_TRY(mt_bench_random(b, &j->grad, j->params, j->real, 1e-3));
    MT_TRY(mt_bench_random(b, &j->bf16_grad, j->params, MT_BF16, 1e-3));
    mt_store_f64(&one, j->real, 0, 1);
    MT_TRY(mt_bench_upload(b, &j->one, &one, mt_dtype_size(j->real)));
    MT_TRY(mt_bench_upload(b, (void **)&j->state, &state, sizeof state));
    return launch_grad_norm(b, j, 0); /* sets what an update needs */
}

static mt_status make_activations(mt_bench *b, struct job *j)
{
    const mt_bench_layer *s = j->s;
    int64_t t = s->tokens, d = s->width, r = j->rows, f = s->expert_width;
    int64_t wide = 2 * f > d ? 2 * f : d; /* rmsnorm's dx is kept there too */
    int64_t qkv = t * (s->heads + 2 * s->kv_heads) * s->head_dim, y = t * s->heads * s->head_dim;
    const struct {
        void **p;
        int64_t count;
        mt_dtype dtype;
    } buffers[] = {
        { &j->rows_d[0], r * d, j->dtype },
        { &j->rows_d[1], r * d, j->dtype },
        { &j->rows_2f[0], r * wide, j->dtype },
        { &j->rows_2f[1], r * wide, j->dtype },
        { &j->rows_f, r * f, j->dtype },
        { &j->x, t * d, j->dtype },
        { &j->gain, d, j->real },
        { &j->dgain, d, j->real },
        { &j->rstd, r, j->real },
        { &j->logits, t * s->vocab, j->dtype },
        { &j->dlogits, t * s->vocab, j->dtype },
        { &j->lse, t, j->real },
        { &j->qkv, qkv, j->dtype },
        { &j->dqkv, qkv, j->dtype },
        { &j->y, y, j->dtype },
        { &j->dy, y, j->dtype },
        { &j->attention_lse, t * s->heads, j->real },
        { &j->head_gain, s->head_dim, j->real },
        { &j->dhead_gain, 2 * s->head_dim, j->real },
        { &j->head_rstd, t * (s->heads + s->kv_heads), j->real },
        { &j->cosine, s->sequence * (s->head_dim / 2), j->real },
        { &j->sine, s->sequence * (s->head_dim / 2), j->real },
    };
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        MT_TRY(mt_bench_random(b, buffers[i].p, buffers[i].count, buffers[i].dtype, 1));
    return MT_OK;
}

/* ---- reports -----------------------------------------------------------------------------------
 */

static mt_status bench_op(mt_bench *b, struct job *j, const struct op *op, mt_bench_case *c)
{
    struct work w = work_of(j, op);
    double seconds;
    c->what = op->name;
    if (op->updates) MT_TRY(zero_optimizer(b, j, false));
    MT_TRY(mt_bench_measure(b, &seconds, op->launch, j));
    c->unit = op->attention > 0 ? "TFLOP/s" : "GB/s";
    c->amount = op->attention > 0 ? w.flop * 1e-12 : w.bytes * 1e-9;
    c->floor = mt_bench_floor(b, w.flop, w.bytes);
    return mt_bench_report(b, c, seconds);
}

static mt_status bench_layer(mt_bench *b, const mt_bench_layer *s)
{
    struct job j = { .s = s,
                     .rows = s->tokens * s->top_k,
                     .params = 3 * s->experts * s->width * s->expert_width,
                     .dtype = b->options.dtype,
                     .real = mt_dtype_wide(b->options.dtype) };
    mt_bench_case c = { "ops", s->name, "all", NULL, "GB/s", 0, 0, { { NULL, 0 } } };
    mt_status status = MT_OK;
    MT_TRY_CLEANUP(make_activations(b, &j));
    MT_TRY_CLEANUP(make_targets(b, &j));
    MT_TRY_CLEANUP(make_routing(b, &j));
    MT_TRY_CLEANUP(make_optimizer(b, &j));
    for (int i = 0; i < OPS; i++) {
        if (ops[i].f32_only && j.real != MT_F32) continue;
        status = bench_op(b, &j, &ops[i], &c);
        if (status == MT_EUNSUPPORTED) status = mt_bench_leave_out(b, &c, mt_error_message());
        MT_TRY_CLEANUP(status);
    }
cleanup:
    if (status != MT_OK) status = mt_bench_give_up(b, &c, status);
    mt_bench_release(b);
    return status;
}

mt_status mt_bench_ops(mt_bench *b)
{
    for (int i = 0; i < mt_bench_layer_count; i++)
        if (mt_bench_selected(b, mt_bench_layers[i].name, mt_bench_layers[i].op_devices))
            MT_TRY(bench_layer(b, &mt_bench_layers[i]));
    return MT_OK;
}
