/* The gradient checker's cases of routing: the router, rows to experts and back, over ragged, empty
 * and one-sided routings. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/gradcheck_priv.h"

static mt_status router_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    mt_routing r;
    MT_TRY(mt_router(tape, &r, in[0], c->params[0], &c->router));
    MT_TRY(mt_tape_observe(tape, r.chosen, "chosen_experts"));
    mt_value *kept[] = { r.weights, r.prob_sum, r.z_sum };
    for (int i = 0; i < 3; i++) {
        mt_value_hold(kept[i]);
        out[i] = kept[i];
    }
    mt_routing_release(tape, &r);
    return MT_OK;
}

/* E, top_k, normalised. */
static const int64_t router_shapes[][3] = {
    { 5, 2, 1 }, { 5, 2, 0 }, { 4, 1, 1 }, { 4, 1, 0 }, { 3, 3, 1 }, { 3, 3, 0 }, { 1, 1, 0 },
};
enum { ROUTER_SHAPES = sizeof router_shapes / sizeof *router_shapes };

static mt_status router_setup(check *c, int variant)
{
    static const float bias[5] = { 0.1f, -0.2f, 0.3f, 0, -0.1f };
    const int64_t *n = router_shapes[variant % ROUTER_SHAPES];
    bool biased = variant / ROUTER_SHAPES;
    snprintf(c->name, sizeof c->name, "E%lld top-%lld%s%s", (long long)n[0], (long long)n[1],
             n[2] ? " normalised" : "", biased ? " with selection bias" : "");
    c->router = (mt_router_shape){ n[0], n[1], n[2], biased ? bias : NULL, NULL };
    c->forward = router_forward;
    c->step = 2e-4;
    MT_TRY(mt_check_input(c, 6, 7));
    return mt_check_param(c, &c->params[0], "w", 1, n[0], 7, false, false);
}

/* Choices of five tokens among four experts, two each, and the rows an expert takes at most. */
struct plan_case {
    const char *name;
    int32_t chosen[10];
    int64_t capacity;
};
static const struct plan_case plans[] = {
    { "ragged", { 0, 2, 1, 0, 3, 2, 2, 0, 0, 3 }, 0 },
    { "empty experts", { 0, 2, 2, 0, 0, 2, 2, 0, 0, 2 }, 0 },
    { "all in one", { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 }, 0 },
    { "dropped rows", { 0, 2, 2, 0, 0, 2, 2, 0, 0, 3 }, 2 },
};
enum { PLANS = sizeof plans / sizeof *plans, TOKENS = 5, TOP_K = 2 };

static mt_status plan_route(mt_tape *tape, mt_route *route, mt_value **chosen,
                            const struct plan_case *p)
{
    mt_routing routing = { 0 };
    int64_t shape[] = { TOKENS, TOP_K };
    MT_TRY(mt_tape_value(tape, &routing.weights, MT_F64, 2, shape));
    MT_TRY(mt_tape_value(tape, &routing.chosen, MT_I32, 2, shape));
    memcpy(routing.chosen->data.data, p->chosen, sizeof p->chosen);
    MT_TRY(mt_route_tokens(tape, route, &routing, CHECK_MEMBERS, p->capacity,
                           (int64_t[]){ 1, 1, 1 }, NULL));
    *chosen = routing.chosen, routing.chosen = NULL;
    mt_routing_release(tape, &routing);
    return MT_OK;
}

static int64_t kept_rows(const struct plan_case *p)
{
    int64_t counts[CHECK_MEMBERS] = { 0 }, sum = 0;
    for (int i = 0; i < TOKENS * TOP_K; i++) counts[p->chosen[i]]++;
    for (int e = 0; e < CHECK_MEMBERS; e++)
        sum += p->capacity && counts[e] > p->capacity ? p->capacity : counts[e];
    return sum;
}

static mt_status gather_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    mt_route route;
    mt_value *chosen;
    MT_TRY(plan_route(tape, &route, &chosen, &plans[c->experts]));
    mt_value_release(tape, &chosen);
    MT_TRY(mt_gather(tape, &out[0], in[0], &route));
    mt_route_release(tape, &route);
    return MT_OK;
}

static mt_status gather_setup(check *c, int variant)
{
    snprintf(c->name, sizeof c->name, "%s", plans[variant].name);
    c->experts = variant, c->forward = gather_forward;
    c->valid_rows = kept_rows(&plans[variant]);
    return mt_check_input(c, TOKENS, 3);
}

static mt_status combine_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    mt_route route;
    mt_value *chosen;
    MT_TRY(plan_route(tape, &route, &chosen, &plans[c->experts]));
    mt_value_release(tape, &chosen);
    MT_TRY(mt_combine(tape, &out[0], in[0], in[1], &route));
    mt_route_release(tape, &route);
    return MT_OK;
}

/* The tail of the rows, which nobody reads, has no gradient. */
static mt_status combine_setup(check *c, int variant)
{
    enum { ROWS = TOKENS * TOP_K, WIDTH = 3 };
    snprintf(c->name, sizeof c->name, "%s", plans[variant].name);
    c->experts = variant, c->forward = combine_forward;
    c->valid_rows = kept_rows(&plans[variant]);
    MT_TRY(mt_check_input(c, ROWS, WIDTH));
    double *x = c->inputs[0].data;
    for (int64_t i = c->valid_rows * WIDTH; i < ROWS * WIDTH; i++) x[i] = (double)NAN;
    return mt_check_input(c, TOKENS, TOP_K);
}

/* Rows to experts, sorted there; with weights, also back and combined. One process. */
static mt_status exchange_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    mt_route route;
    mt_exchanged e = { 0 };
    mt_value *chosen, *lines, *rows, *back;
    MT_TRY(plan_route(tape, &route, &chosen, &plans[c->experts]));
    const mt_routing routing = { .chosen = chosen };
    MT_TRY(mt_dispatch(tape, &lines, &e, in[0], &route, &routing, c->exchange,
                       (int64_t[]){ 1, 1, 1 }, NULL, NULL));
    MT_TRY(mt_gather(tape, &rows, lines, &e.there));
    mt_value_release(tape, &chosen);
    mt_value_release(tape, &lines);
    if (c->input_count > 1) {
        MT_TRY(mt_collect(tape, &back, rows, &e, c->exchange));
        mt_value_release(tape, &rows);
        MT_TRY(mt_combine(tape, &rows, back, in[1], &e.home));
        mt_value_release(tape, &back);
    }
    out[0] = rows;
    mt_exchanged_release(tape, &e);
    mt_route_release(tape, &route);
    return MT_OK;
}

static mt_status dispatch_setup(check *c, int variant)
{
    const mt_exchange_options options = { .experts = CHECK_MEMBERS, .top_k = TOP_K };
    snprintf(c->name, sizeof c->name, "%s", plans[variant].name);
    c->experts = variant, c->forward = exchange_forward;
    c->valid_rows = kept_rows(&plans[variant]);
    MT_TRY(mt_comm_open(&c->comm, &(mt_launch){ .world = 1, .launcher = "" }, NULL));
    MT_TRY(mt_exchange_create(&c->exchange, c->device, c->comm, &options));
    return mt_check_input(c, TOKENS, 3);
}

static mt_status collect_setup(check *c, int variant)
{
    MT_TRY(dispatch_setup(c, variant));
    c->valid_rows = -1;
    return mt_check_input(c, TOKENS, TOP_K);
}

mt_status mt_check_router_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "router", router_setup, 2 * ROUTER_SHAPES, 0);
}

mt_status mt_check_gather_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "gather", gather_setup, PLANS, 0);
}

mt_status mt_check_combine_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "combine", combine_setup, PLANS, 0);
}

mt_status mt_check_dispatch_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "dispatch", dispatch_setup, PLANS, 0);
}

mt_status mt_check_collect_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "collect", collect_setup, PLANS, 0);
}
