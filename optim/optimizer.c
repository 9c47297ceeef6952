/* AdamW, param by param. */
#include "optim/optimizer.h"

#include <math.h>
#include <stdlib.h>

/* m or v, flat. */
typedef struct moment {
    void *codes, *scales;
} moment;

struct mt_optimizer {
    mt_param_store *store;
    mt_device *device;
    mt_optim_config config;
    mt_dtype dtype;
    moment m, v;
    size_t code_bytes, scale_bytes; /* of one moment */
    struct mt_step_state *state;
    mt_comm *comm; /* NULL: this rank has everything */
    mt_optimizer_updated updated;
    void *context; /* of `updated` */
    void *sum;     /* device f64: of squares, over ranks */
};

void mt_optim_config_defaults(mt_optim_config *config)
{
    *config = (mt_optim_config){ .lr = 1e-3,
                                 .schedule = MT_SCHEDULE_COSINE,
                                 .weight_decay = 0.1,
                                 .beta1 = 0.9,
                                 .beta2 = 0.95,
                                 .eps = 1e-8,
                                 .grad_clip = 1.0 };
}

mt_status mt_optim_config_check(const mt_optim_config *c)
{
    MT_REQUIRE(c->lr >= 0 && isfinite(c->lr), MT_ECONFIG,
               "optim.lr is %g, must be finite and not negative", c->lr);
    MT_REQUIRE(c->min_lr >= 0 && c->min_lr <= c->lr, MT_ECONFIG,
               "optim.min_lr is %g, must be from 0 to optim.lr %g", c->min_lr, c->lr);
    MT_REQUIRE(c->warmup_steps >= 0, MT_ECONFIG, "optim.warmup_steps is %lld, must not be negative",
               (long long)c->warmup_steps);
    MT_REQUIRE(c->weight_decay >= 0 && isfinite(c->weight_decay), MT_ECONFIG,
               "optim.weight_decay is %g, must be finite and not negative", c->weight_decay);
    MT_REQUIRE(c->beta1 >= 0 && c->beta1 < 1, MT_ECONFIG, "optim.beta1 is %g, must be in [0, 1)",
               c->beta1);
    MT_REQUIRE(c->beta2 >= 0 && c->beta2 < 1, MT_ECONFIG, "optim.beta2 is %g, must be in [0, 1)",
               c->beta2);
    MT_REQUIRE(c->eps > 0, MT_ECONFIG,
               "optim.eps is %g, must be positive: an expert without tokens would be 0 / 0",
               c->eps);
    MT_REQUIRE(c->grad_clip >= 0, MT_ECONFIG, "optim.grad_clip is %g, must not be negative",
               c->grad_clip);
    const mt_moments_form *form = &mt_moments_forms[c->moments];
    MT_REQUIRE(!c->moments_sr || form->stochastic, MT_ECONFIG,
               "optim.moments_sr is true, but optim.moments %s is not rounded stochastically: it "
               "must be bf16",
               form->name);
    return MT_OK;
}

mt_status mt_optim_config_check_real(const mt_optim_config *c, mt_dtype real)
{
    MT_REQUIRE(real == MT_F32 || c->moments == MT_MOMENTS_REAL, MT_ECONFIG,
               "optim.moments is %s, must be f32 under train.dtype f64, which keeps f64",
               mt_moments_forms[c->moments].name);
    MT_REQUIRE(real == MT_F32 || c->master == MT_MASTER_REAL, MT_ECONFIG,
               "optim.master is %s, must be f32 under train.dtype f64, which keeps f64",
               mt_master_name(c->master));
    MT_REQUIRE(real != MT_F32 || (float)c->eps > 0, MT_ECONFIG,
               "optim.eps is %g, which is 0 in f32: must be positive there", c->eps);
    return MT_OK;
}

/* A moment's memory, zeroed, where masters are. */
static mt_status allocate_moment(mt_optimizer *o, moment *x)
{
    MT_TRY(mt_param_store_alloc_state(o->store, &x->codes, o->code_bytes, MT_MEMORY_MOMENTS));
    return mt_param_store_alloc_state(o->store, &x->scales, o->scale_bytes, MT_MEMORY_MOMENTS);
}

static void free_moment(mt_optimizer *o, moment *x)
{
    mt_param_store_free_state(o->store, &x->codes, o->code_bytes, MT_MEMORY_MOMENTS);
    mt_param_store_free_state(o->store, &x->scales, o->scale_bytes, MT_MEMORY_MOMENTS);
}

static mt_status allocate(mt_optimizer *o)
{
    int64_t elements = mt_param_store_elements(o->store);
    o->code_bytes = (size_t)elements * mt_moments_size(o->config.moments, o->dtype);
    o->scale_bytes = (size_t)mt_moments_blocks(o->config.moments, elements) * sizeof(float);
    void *state = NULL;
    MT_TRY(allocate_moment(o, &o->m));
    MT_TRY(allocate_moment(o, &o->v));
    MT_TRY(mt_device_alloc(o->device, &state, sizeof *o->state, MT_MEMORY_STATE));
    o->state = state;
    MT_TRY(mt_device_alloc(o->device, &o->sum, sizeof(double), MT_MEMORY_STATE));
    struct mt_step_state start = { .power1 = 1, .power2 = 1 };
    return mt_device_copy(o->device, o->state, &start, sizeof start);
}

mt_status mt_optimizer_create(mt_optimizer **optimizer, mt_param_store *store,
                              const mt_optim_config *config)
{
    *optimizer = NULL;
    MT_REQUIRE(mt_param_store_count(store) > 0, MT_EINVAL, "optimizer: no params");
    MT_REQUIRE(
        mt_param_store_elements(store) > 0, MT_EINVAL,
        "optimizer: the params have no elements, or no memory yet (mt_param_store_allocate)");
    mt_dtype dtype = mt_param_store_get(store, 0)->dtype;
    MT_TRY(mt_optim_config_check(config));
    MT_TRY(mt_optim_config_check_real(config, dtype));
    MT_REQUIRE(mt_param_store_master_form(store) == config->master, MT_EINVAL,
               "optimizer: optim.master is %s, the store's masters are %s",
               mt_master_name(config->master), mt_master_name(mt_param_store_master_form(store)));
    mt_optimizer *o = calloc(1, sizeof *o);
    MT_REQUIRE(o, MT_ENOMEM, "optimizer: out of memory");
    o->store = store, o->device = mt_param_store_device(store), o->config = *config;
    o->dtype = dtype;
    mt_status status = allocate(o);
    if (status != MT_OK) {
        mt_optimizer_destroy(&o);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    *optimizer = o;
    return MT_OK;
}

void mt_optimizer_destroy(mt_optimizer **optimizer)
{
    mt_optimizer *o = *optimizer;
    if (!o) return;
    void *state = o->state;
    free_moment(o, &o->m);
    free_moment(o, &o->v);
    mt_device_free(o->device, &state, sizeof *o->state, MT_MEMORY_STATE);
    mt_device_free(o->device, &o->sum, sizeof(double), MT_MEMORY_STATE);
    free(o);
    *optimizer = NULL;
}

void mt_optimizer_set_comm(mt_optimizer *optimizer, mt_comm *comm)
{
    optimizer->comm = comm;
}

void mt_optimizer_set_updated(mt_optimizer *optimizer, mt_optimizer_updated updated, void *context)
{
    optimizer->updated = updated, optimizer->context = context;
}

/* The scales from a param's first block on. */
static float *scales_at(const mt_optimizer *o, const moment *x, int64_t offset)
{
    return x->scales ? (float *)x->scales + mt_moments_blocks(o->config.moments, offset) : NULL;
}

static struct mt_adamw_args update_of(const mt_optimizer *o, const mt_param *p, uint32_t index)
{
    const mt_optim_config *c = &o->config;
    const size_t at = (size_t)p->offset * mt_moments_size(c->moments, o->dtype);
    return (struct mt_adamw_args){ .dtype = o->dtype,
                                   .count = p->own.count,
                                   .beta1 = c->beta1,
                                   .beta2 = c->beta2,
                                   .eps = c->eps,
                                   .decay = p->decay ? c->weight_decay : 0,
                                   .master = p->own_master ? MT_MASTER_REAL : MT_MASTER_SPLIT,
                                   .moments = c->moments,
                                   .stochastic = c->moments_sr,
                                   .p = p->own_master ? p->own_master : p->high,
                                   .p_low = p->low,
                                   .cast = p->cast,
                                   .m = (char *)o->m.codes + at,
                                   .v = (char *)o->v.codes + at,
                                   .m_scales = scales_at(o, &o->m, p->offset),
                                   .v_scales = scales_at(o, &o->v, p->offset),
                                   .grad = p->own_grad,
                                   .grad_bf16 = mt_param_own_grad_dtype(p) == MT_BF16,
                                   .first = mt_param_base(p) + p->own.first,
                                   .seed = c->seed,
                                   .param = index,
                                   .state = o->state };
}

/* Params whose updates are one call: so many, none of them large, which takes long enough alone and
 * may be waited for. */
enum { TOGETHER = 64, LARGE = 1 << 22 };
struct updates {
    struct mt_adamw_args of[TOGETHER];
    mt_param *params[TOGETHER];
    int count;
};

static mt_status run_updates(mt_optimizer *o, mt_stream *stream, struct updates *u)
{
    const int count = u->count;
    if (!count) return MT_OK;
    u->count = 0;
    for (int i = 0; i + 1 < count; i++) u->of[i].next = &u->of[i + 1];
    MT_TRY(mt_adamw(stream, u->of));
    for (int i = 0; i < count; i++) {
        mt_param *p = u->params[i];
        p->cast_written = p->cast != NULL;
        if (o->updated) MT_TRY(o->updated(o->context, p));
    }
    return MT_OK;
}

/* The norm of the whole gradient, each param counted once: shards do not overlap. */
static mt_status norm(mt_optimizer *o, mt_stream *stream, const void *loss)
{
    const mt_optim_config *c = &o->config;
    mt_flat_grads grads = mt_param_store_grads(o->store);
    struct mt_grad_norm_args args = { .dtype = o->dtype,
                                      .count = grads.real_count,
                                      .max_norm = c->grad_clip,
                                      .beta1 = c->beta1,
                                      .beta2 = c->beta2,
                                      .grad = grads.real,
                                      .bf16_count = grads.bf16_count,
                                      .bf16_grad = grads.bf16,
                                      .loss = loss,
                                      .state = o->state,
                                      .sum = o->sum };
    if (mt_param_store_world(o->store) == 1) return mt_grad_norm(stream, &args);
    MT_REQUIRE(o->comm, MT_EINVAL, "optimizer: a shard of the gradients, and no comm");
    args.pass = MT_NORM_SUM;
    MT_TRY(mt_grad_norm(stream, &args));
    MT_TRY(mt_comm_all_reduce(o->comm, stream, o->sum, 1, MT_F64, MT_REDUCE_SUM, "gradient norm"));
    args.pass = MT_NORM_FINISH;
    return mt_grad_norm(stream, &args);
}

mt_status mt_optimizer_set_lr(mt_optimizer *o, double lr)
{
    MT_REQUIRE(lr >= 0 && isfinite(lr), MT_EINVAL,
               "optimizer: the learning rate is %g, must be finite and not negative", lr);
    return mt_device_copy(o->device, &o->state->lr, &lr, sizeof lr);
}

mt_status mt_optimizer_step(mt_optimizer *o, mt_stream *stream, const void *loss)
{
    MT_REQUIRE(mt_param_store_grad(o->store), MT_EINVAL,
               "optimizer: the store has no gradients (mt_param_store_allocate)");
    MT_TRY(norm(o, stream, loss));
    struct updates u = { .count = 0 };
    for (int64_t i = 0; i < mt_param_store_count(o->store); i++) {
        mt_param *p = mt_param_store_get(o->store, i);
        if (p->frozen) continue;
        const struct mt_adamw_args update = update_of(o, p, (uint32_t)i);
        const bool large = p->own.count >= LARGE;
        if (large || u.count == TOGETHER || u.of[0].master != update.master)
            MT_TRY(run_updates(o, stream, &u));
        u.of[u.count] = update, u.params[u.count++] = p;
        if (large) MT_TRY(run_updates(o, stream, &u));
    }
    return run_updates(o, stream, &u);
}

struct mt_step_state *mt_optimizer_state(const mt_optimizer *o)
{
    return o->state;
}

mt_moments mt_optimizer_moments(const mt_optimizer *o)
{
    return o->config.moments;
}

void *mt_optimizer_m(const mt_optimizer *o)
{
    return o->m.codes;
}

void *mt_optimizer_v(const mt_optimizer *o)
{
    return o->v.codes;
}

float *mt_optimizer_m_scales(const mt_optimizer *o)
{
    return o->m.scales;
}

float *mt_optimizer_v_scales(const mt_optimizer *o)
{
    return o->v.scales;
}
