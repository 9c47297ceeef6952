/* What a step has besides its grouped GEMMs, op by op, at the sizes of a MoE layer and the model
 * around it. The buffers of one shape serve all ops; each row of the table names the elements that
 * an op cannot avoid moving, and its FLOP. */
#include "train/bench_ops_priv.h"

#include <stdlib.h>

#include "core/rng.h"

struct work {
    double bytes, flop;
};

static struct work work_of(const struct mt_bench_job *j, const struct mt_bench_op *op)
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

static mt_status make_targets(mt_bench *b, struct mt_bench_job *j)
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
static mt_status make_routing(mt_bench *b, struct mt_bench_job *j)
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
    MT_TRY(mt_bench_launch_router_fwd(b, j, 0));
    return mt_bench_launch_route_plan(b, j, 0);
}

static mt_status zero_optimizer(mt_bench *b, struct mt_bench_job *j, bool allocate)
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

static mt_status make_optimizer(mt_bench *b, struct mt_bench_job *j)
{
    struct mt_step_state state = { .lr = 1e-4, .power1 = 1, .power2 = 1, .clip = 1 };
    double one = 0;
    MT_TRY(zero_optimizer(b, j, true));
    MT_TRY(mt_bench_random(b, &j->grad, j->params, j->real, 1e-3));
    MT_TRY(mt_bench_random(b, &j->bf16_grad, j->params, MT_BF16, 1e-3));
    mt_store_f64(&one, j->real, 0, 1);
    MT_TRY(mt_bench_upload(b, &j->one, &one, mt_dtype_size(j->real)));
    MT_TRY(mt_bench_upload(b, (void **)&j->state, &state, sizeof state));
    return mt_bench_launch_grad_norm(b, j, 0); /* sets what an update needs */
}

static mt_status make_activations(mt_bench *b, struct mt_bench_job *j)
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

static mt_status bench_op(mt_bench *b, struct mt_bench_job *j, const struct mt_bench_op *op,
                          mt_bench_case *c)
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
    struct mt_bench_job j = { .s = s,
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
    for (int i = 0; i < mt_bench_op_count; i++) {
        if (mt_bench_op_rows[i].f32_only && j.real != MT_F32) continue;
        status = bench_op(b, &j, &mt_bench_op_rows[i], &c);
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
