/* One MoE layer and a pass through it, on one rank or over ranks, for tests over ranks. */
#pragma once

#include "tests/dist/training.h"

#include <math.h>

#include "core/rng.h"
#include "layers/functional.h"
#include "layers/moe.h"

enum { T = 24, D = 24, F = 16, EXPERTS = 8, TOP_K = 3 }; /* T: tokens of a rank */

/* What is run, on one rank or over those of a comm. */
typedef struct layer_run {
    mt_comm *comm; /* NULL: all experts are here */
    mt_dtype dtype;
    int64_t first, tokens; /* of all tokens, those of this rank */
    bool defer;
    bool lonely;        /* every token goes to the first experts */
    bool kept;          /* what experts put out, for the routing weights' gradient */
    const char *recipe; /* NULL: none */
    bool frozen;        /* the experts' weights */
    bool plain;         /* rows travel as they are */
    bool odd;           /* values that are large, infinite, NaN */
    bool evaluation;    /* forward only */
} layer_run;

typedef struct layer {
    mt_param_store *store;
    mt_moe_layer moe;
    mt_exchange *exchange;
    mt_linear_state state[2];
    void *nans; /* device int64 [2][3][members here] */
} layer;

static inline size_t nan_bytes(const layer *l)
{
    return 6 * (size_t)l->moe.down.weight->group.members * sizeof(int64_t);
}

static inline void layer_destroy(layer *l)
{
    mt_device_free(rank_device, &l->nans, nan_bytes(l), MT_MEMORY_STATE);
    mt_exchange_destroy(&l->exchange);
    mt_param_store_destroy(&l->store);
}

/* The experts' formats, and where their NaNs are counted. */
static inline mt_status set_recipe(layer *l, mt_param *const p[2], const mt_recipe *recipe)
{
    size_t n = (size_t)p[0]->group.members;
    l->moe.down.weight = p[1];
    MT_TRY(mt_device_alloc(rank_device, &l->nans, nan_bytes(l), MT_MEMORY_STATE));
    MT_TRY(mt_device_zero(rank_device, l->nans, nan_bytes(l)));
    for (size_t i = 0; i < 2; i++) {
        l->state[i].recipe = *recipe;
        for (size_t o = 0; o < 3; o++) l->state[i].nan[o] = (int64_t *)l->nans + (3 * i + o) * n;
        p[i]->linear = &l->state[i];
    }
    return MT_OK;
}

/* All experts, or, with ranks, this rank's. l stays where it is. */
static inline mt_status layer_create(layer *l, const layer_run *run)
{
    mt_comm *comm = run->comm;
    mt_dtype compute = run->dtype, real = mt_dtype_wide(compute);
    mt_recipe recipe;
    int64_t ranks = comm ? mt_comm_size(comm) : 1, here = EXPERTS / ranks;
    mt_param_spec specs[3] = {
        { .name = "gate", .members = 1, .m = EXPERTS, .k = D, .init_std = 1 },
        { .name = "gate_up", .members = here, .m = 2 * F, .k = D, .packed = true, .init_std = 0.3 },
        { .name = "down", .members = here, .m = D, .k = F, .packed = true, .init_std = 0.3 },
    };
    mt_param *p[3];
    *l = (layer){ 0 };
    if (run->recipe) MT_TRY(mt_recipe_parse(&recipe, run->recipe));
    MT_TRY(mt_param_store_create(&l->store, rank_device, real, compute));
    for (int i = 0; i < 3; i++) {
        specs[i].init = MT_INIT_NORMAL;
        specs[i].frozen = i && run->frozen;
        if (i) specs[i].all_members = EXPERTS;
        if (i && comm) specs[i].first_member = mt_comm_rank(comm) * here;
        if (i == 1) mt_param_store_next_unit(l->store);
        MT_TRY(mt_param_store_add(l->store, &p[i], &specs[i]));
        if (i) MT_TRY(mt_linear_reserve(p[i], rank_device, run->recipe ? &recipe : NULL));
    }
    MT_TRY(mt_param_store_allocate(l->store, true));
    MT_TRY(mt_param_store_init(l->store, 3));
    double chosen[EXPERTS * D];
    for (int i = 0; i < EXPERTS * D; i++)
        mt_store_f64(chosen, real, i, i / D < TOP_K ? 1 + i / D : -1 - i / D);
    if (run->lonely) MT_TRY(mt_param_write_master(l->store, p[0], 0, EXPERTS * D, chosen));
    mt_stream stream = { rank_device, NULL };
    if (run->recipe) MT_TRY(set_recipe(l, p + 1, &recipe));
    for (int i = 0; i < 2; i++) l->state[i].save_expert_output = run->kept;
    for (int i = 1; i < 3; i++) {
        MT_TRY(mt_linear_place(p[i], rank_device));
        MT_TRY(mt_linear_refresh(p[i], &stream));
    }
    if (comm)
        MT_TRY(mt_exchange_create(
            &l->exchange, rank_device, comm,
            &(mt_exchange_options){ .experts = EXPERTS, .top_k = TOP_K, .tokens = T }));
    if (comm) mt_exchange_set_plain(l->exchange, run->plain);
    l->moe = (mt_moe_layer){ .router = p[0],
                             .gate_up = { .weight = p[1] },
                             .down = { .weight = p[2] },
                             .shape = { EXPERTS, TOP_K, true, NULL, NULL },
                             .exchange = l->exchange };
    return MT_OK;
}

/* What a pass over `tokens` gives: y, dx, and the gradients of all params, as f64 on the host. */
typedef struct outcome {
    double *y, *dx, *grads[3];
    int64_t nans[6 * EXPERTS]; /* of the members here */
    int64_t bytes;             /* sent to others */
} outcome;

static inline void outcome_free(outcome *o)
{
    free(o->y), free(o->dx);
    for (int i = 0; i < 3; i++) free(o->grads[i]);
}

static inline mt_status fetch(double **to, const void *from, mt_dtype dtype, int64_t count)
{
    size_t bytes = (size_t)count * mt_dtype_size(dtype);
    void *raw = malloc(bytes + 1);
    *to = malloc((size_t)count * sizeof **to + 1);
    rank_check(raw && *to, "no memory");
    mt_status status = mt_device_copy(rank_device, raw, from, bytes);
    for (int64_t i = 0; i < count; i++) (*to)[i] = mt_load_f64(raw, dtype, i);
    free(raw);
    return status;
}

/* A draw that many runs begin with: made once. */
static inline double draw(uint32_t what, int64_t at)
{
    enum { KEPT = EXPERTS * T * D }; /* no more ranks than experts */
    static double kept[3][KEPT];
    static int64_t count[3];
    for (; count[what] <= at; count[what]++)
        kept[what][count[what]] = mt_rng_normal(17, what, (uint64_t)count[what]);
    return kept[what][at];
}

/* Draws of a run's tokens of `what`, positive where lonely, on the device. */
static inline mt_status draw_rows(void **p, const layer_run *run, uint32_t what)
{
    static const double odd[] = { 0x1.fep127, 1e-39, (double)NAN, (double)INFINITY, 0 };
    mt_dtype dtype = run->dtype;
    int64_t first = run->first, tokens = run->tokens;
    size_t bytes = (size_t)(tokens * D) * mt_dtype_size(dtype);
    void *host = malloc(bytes);
    rank_check(host, "no memory");
    for (int64_t i = 0; i < tokens * D; i++) {
        uint64_t at = (uint64_t)(first * D + i), kind = mt_rng_below(17, 5 + what, at, 150);
        double x = draw(what, first * D + i);
        if (run->odd && kind < 5) x = odd[kind];
        mt_store_f64(host, dtype, i, run->lonely && what == 1 ? fabs(x) : x);
    }
    *p = NULL;
    mt_status status = mt_device_alloc(rank_device, p, bytes, MT_MEMORY_STATE);
    if (status == MT_OK) status = mt_device_copy(rank_device, *p, host, bytes);
    free(host);
    return status;
}

static inline mt_status pass(mt_tape *tape, outcome *o, const layer *l, const layer_run *run)
{
    void *x, *dy;
    mt_value *in, *y;
    mt_routing routing;
    mt_dtype dtype = run->dtype;
    int64_t tokens = run->tokens;
    MT_TRY(draw_rows(&x, run, 1));
    MT_TRY(draw_rows(&dy, run, 2));
    MT_TRY(mt_tape_begin(tape, 1, !run->evaluation));
    MT_TRY(mt_tape_input(tape, &in, mt_tensor_2d(x, dtype, tokens, D), true));
    MT_TRY(mt_moe_forward(tape, &y, &routing, in, &l->moe, "moe"));
    MT_TRY(fetch(&o->y, y->data.data, dtype, tokens * D));
    if (!run->evaluation) MT_TRY(mt_tape_seed_tensor(tape, y, mt_tensor_2d(dy, dtype, tokens, D)));
    mt_value_release(tape, &y);
    mt_routing_release(tape, &routing);
    if (!run->evaluation) {
        MT_TRY(mt_tape_backward(tape));
        MT_TRY(mt_tape_run_deferred(tape));
        MT_TRY(fetch(&o->dx, mt_value_grad(in).data, dtype, tokens * D));
    }
    for (int i = 0; i < 3 && !run->evaluation; i++) {
        const mt_param *p = mt_param_store_get(l->store, i);
        if (!p->frozen) MT_TRY(fetch(&o->grads[i], p->grad, p->grad_dtype, mt_param_count(p)));
    }
    mt_value_release(tape, &in);
    MT_TRY(mt_tape_end(tape));
    size_t bytes = (size_t)(tokens * D) * mt_dtype_size(dtype);
    mt_device_free(rank_device, &x, bytes, MT_MEMORY_STATE);
    mt_device_free(rank_device, &dy, bytes, MT_MEMORY_STATE);
    return MT_OK;
}

static inline mt_status run_layer(outcome *o, const layer_run *run)
{
    layer l;
    mt_tape *tape;
    mt_stream stream = { rank_device, NULL };
    *o = (outcome){ 0 };
    MT_TRY(layer_create(&l, run));
    MT_TRY(mt_tape_create(&tape, &stream, &(mt_tape_options){ .defer_wgrad = run->defer }));
    MT_TRY(pass(tape, o, &l, run));
    mt_tape_destroy(&tape);
    if (l.nans) MT_TRY(mt_device_copy(rank_device, o->nans, l.nans, nan_bytes(&l)));
    if (l.exchange) o->bytes = mt_exchange_bytes(l.exchange);
    layer_destroy(&l);
    return MT_OK;
}

/* What all experts on one rank give, made by the first rank for all. */
static inline mt_status run_layer_alone(mt_comm *comm, outcome *o, const layer_run *run)
{
    int64_t all = run->tokens * D;
    double **const values[] = { &o->y, &o->dx, &o->grads[0], &o->grads[1], &o->grads[2] };
    const int64_t counts[] = { all, all, EXPERTS * D, EXPERTS * 2 * F * D, EXPERTS * D * F };
    int used = run->evaluation ? 1 : run->frozen ? 3 : 5;
    bool first = mt_comm_rank(comm) == 0;
    *o = (outcome){ 0 };
    mt_status status = first ? run_layer(o, run) : MT_OK;
    MT_TRY(share_first(comm, status, o->nans, sizeof o->nans));
    for (int i = 0; i < used; i++) {
        size_t bytes = (size_t)counts[i] * sizeof(double);
        if (!first) *values[i] = malloc(bytes);
        rank_check(*values[i], "no memory");
        MT_TRY(mt_comm_broadcast(comm, NULL, *values[i], bytes, 0, "made by one rank"));
    }
    return MT_OK;
}
