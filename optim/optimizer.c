/* AdamW over the store's flat buffers. */
#include "optim/optimizer.h"

#include <stdlib.h>

/* Params next to each other with one decay, as one stretch of the flat buffers. */
typedef struct run {
    int64_t first, count;
    double decay;
} run;

struct mt_optimizer {
    mt_param_store *store;
    mt_device *device;
    mt_optim_config config;
    mt_dtype dtype;
    void *m, *v;
    struct mt_step_state *state;
    size_t moment_bytes;
    run *runs;
    int64_t run_count;
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
    MT_REQUIRE(c->lr >= 0, MT_ECONFIG, "optim.lr is %g, must not be negative", c->lr);
    MT_REQUIRE(c->min_lr >= 0 && c->min_lr <= c->lr, MT_ECONFIG,
               "optim.min_lr is %g, must be from 0 to optim.lr %g", c->min_lr, c->lr);
    MT_REQUIRE(c->warmup_steps >= 0, MT_ECONFIG, "optim.warmup_steps is %lld, must not be negative",
               (long long)c->warmup_steps);
    MT_REQUIRE(c->weight_decay >= 0, MT_ECONFIG, "optim.weight_decay is %g, must not be negative",
               c->weight_decay);
    MT_REQUIRE(c->beta1 >= 0 && c->beta1 < 1, MT_ECONFIG, "optim.beta1 is %g, must be in [0, 1)",
               c->beta1);
    MT_REQUIRE(c->beta2 >= 0 && c->beta2 < 1, MT_ECONFIG, "optim.beta2 is %g, must be in [0, 1)",
               c->beta2);
    MT_REQUIRE(c->eps > 0, MT_ECONFIG,
               "optim.eps is %g, must be positive: an expert without tokens would be 0 / 0",
               c->eps);
    MT_REQUIRE(c->grad_clip >= 0, MT_ECONFIG, "optim.grad_clip is %g, must not be negative",
               c->grad_clip);
    return MT_OK;
}

/* Frozen params are in no run; alignment gaps stay 0 under any update. */
static mt_status make_runs(mt_optimizer *o)
{
    int64_t n = mt_param_store_count(o->store);
    o->runs = calloc((size_t)(n ? n : 1), sizeof *o->runs);
    MT_REQUIRE(o->runs, MT_ENOMEM, "optimizer: out of memory");
    bool open = false;
    for (int64_t i = 0; i < n; i++) {
        const mt_param *p = mt_param_store_get(o->store, i);
        double decay = p->decay ? o->config.weight_decay : 0;
        if (p->frozen) {
            open = false;
            continue;
        }
        if (!open || o->runs[o->run_count - 1].decay != decay)
            o->runs[o->run_count++] = (run){ p->offset, 0, decay };
        run *r = &o->runs[o->run_count - 1];
        r->count = p->offset + mt_param_count(p) - r->first;
        open = true;
    }
    return MT_OK;
}

static mt_status allocate(mt_optimizer *o)
{
    o->moment_bytes = (size_t)mt_param_store_elements(o->store) * mt_dtype_size(o->dtype);
    void *state = NULL;
    MT_TRY(mt_device_alloc(o->device, &o->m, o->moment_bytes, MT_MEMORY_MOMENTS));
    MT_TRY(mt_device_alloc(o->device, &o->v, o->moment_bytes, MT_MEMORY_MOMENTS));
    MT_TRY(mt_device_alloc(o->device, &state, sizeof *o->state, MT_MEMORY_STATE));
    o->state = state;
    MT_TRY(mt_device_zero(o->device, o->m, o->moment_bytes));
    MT_TRY(mt_device_zero(o->device, o->v, o->moment_bytes));
    struct mt_step_state start = { .power1 = 1, .power2 = 1 };
    return mt_device_copy(o->device, o->state, &start, sizeof start);
}

mt_status mt_optimizer_create(mt_optimizer **optimizer, mt_param_store *store,
                              const mt_optim_config *config)
{
    *optimizer = NULL;
    MT_TRY(mt_optim_config_check(config));
    MT_REQUIRE(mt_param_store_count(store) > 0, MT_EINVAL, "optimizer: no params");
    mt_optimizer *o = calloc(1, sizeof *o);
    MT_REQUIRE(o, MT_ENOMEM, "optimizer: out of memory");
    o->store = store, o->device = mt_param_store_device(store), o->config = *config;
    o->dtype = mt_param_store_get(store, 0)->dtype;
    mt_status status = make_runs(o);
    if (status == MT_OK) status = allocate(o);
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
    mt_device_free(o->device, &o->m, o->moment_bytes, MT_MEMORY_MOMENTS);
    mt_device_free(o->device, &o->v, o->moment_bytes, MT_MEMORY_MOMENTS);
    mt_device_free(o->device, &state, sizeof *o->state, MT_MEMORY_STATE);
    free(o->runs);
    free(o);
    *optimizer = NULL;
}

mt_status mt_optimizer_step(mt_optimizer *o, mt_stream *stream, double lr, const void *loss)
{
    const mt_optim_config *c = &o->config;
    size_t size = mt_dtype_size(o->dtype);
    MT_TRY(mt_device_copy(o->device, &o->state->lr, &lr, sizeof lr));
    MT_TRY(mt_grad_norm(stream,
                        &(struct mt_grad_norm_args){ .dtype = o->dtype,
                                                     .count = mt_param_store_elements(o->store),
                                                     .max_norm = c->grad_clip,
                                                     .beta1 = c->beta1,
                                                     .beta2 = c->beta2,
                                                     .grad = mt_param_store_grad(o->store),
                                                     .loss = loss,
                                                     .state = o->state }));
    for (int64_t i = 0; i < o->run_count; i++) {
        const run *r = &o->runs[i];
        size_t at = (size_t)r->first * size;
        MT_TRY(mt_adamw(stream, &(struct mt_adamw_args){
                                    .dtype = o->dtype,
                                    .count = r->count,
                                    .beta1 = c->beta1,
                                    .beta2 = c->beta2,
                                    .eps = c->eps,
                                    .decay = r->decay,
                                    .p = (char *)mt_param_store_master(o->store) + at,
                                    .m = (char *)o->m + at,
                                    .v = (char *)o->v + at,
                                    .grad = (const char *)mt_param_store_grad(o->store) + at,
                                    .state = o->state }));
    }
    return MT_OK;
}

struct mt_step_state *mt_optimizer_state(const mt_optimizer *o)
{
    return o->state;
}

void *mt_optimizer_m(const mt_optimizer *o)
{
    return o->m;
}

void *mt_optimizer_v(const mt_optimizer *o)
{
    return o->v;
}
