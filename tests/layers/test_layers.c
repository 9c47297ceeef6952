/* The MoE layer against plain loops, expert by expert, over routings that go wrong elsewhere: empty
 * experts, all in one, dropped rows, selection biases. */
#include "tests/support/test.h"

#include <stdio.h>

#include "layers/moe.h"
#include "tests/layers/plain_moe.h"

enum { T = PLAIN_T, D = PLAIN_D, F = PLAIN_F, E = PLAIN_E };

/* ---- cases --------------------------------------------------------------------------------------
 */

struct routing_case {
    const char *name;
    int64_t top_k;
    bool normalize;
    double capacity_factor;
    double bias[E];      /* of selection */
    bool used_elsewhere; /* the weights: a gradient comes to them from there, too */
};

static const struct routing_case cases[] = {
    { "ragged", 2, true, 0, { 0 }, false },
    { "weights as they are", 3, false, 0, { 0 }, false },
    { "one choice", 1, true, 0, { 0 }, false },
    { "empty experts", 2, true, 0, { -9, 0, 0, -9, 0 }, false },
    { "first expert only", 1, false, 0, { 9, 0, 0, 0, 0 }, false },
    { "last expert only", 1, false, 0, { 0, 0, 0, 0, 9 }, false },
    { "two experts take all", 2, false, 0, { 0, 9, 0, 9, 0 }, false },
    { "capacity 1", 2, true, 1, { 0 }, false },
    { "capacity 0.1: one row each", 2, true, 0.1, { 0 }, false },
    { "capacity of a crowd", 1, false, 1, { 0, 0, 9, 0, 0 }, false },
    { "capacity past counting", 2, false, 1e30, { 0, 9, 0, 9, 0 }, false },
    { "weights used elsewhere", 3, false, 0, { 0 }, true },
    { "capacity 1, weights used elsewhere", 2, true, 1, { 0 }, true },
};
enum { CASES = sizeof cases / sizeof *cases };

/* ---- the layer on the tape ----------------------------------------------------------------------
 */

struct rig {
    mt_dtype dtype;
    mt_stream stream;
    mt_tape *tape;
    mt_param_store *store;
    mt_param *router, *gate_up, *down;
    void *x, *dy, *dprob_sum, *dz_sum, *dweights;
    float bias[E];
    int64_t load[E], dropped;
    bool router_alone; /* nothing else takes a gradient: x does not, the experts are frozen */
    mt_linear_state states[2]; /* of the experts' layers, under a recipe */
    uint32_t pass;
    int64_t shown; /* operands that the observer was shown */
    /* what came out, as f64 */
    double y[T * D], dx[T * D], weights[T * PLAIN_K], prob_sum[E], z_sum;
    int64_t counts[E];
    int32_t chosen[T * PLAIN_K];
};

static mt_param *add(struct rig *r, const char *name, int64_t members, int64_t m, int64_t k,
                     bool packed, const mt_recipe *recipe)
{
    mt_param *p;
    mt_param_spec spec = { .name = name, .members = members, .m = m, .k = k, .packed = packed };
    assert_ok(mt_param_store_add(r->store, &p, &spec));
    if (packed) assert_ok(mt_linear_reserve(p, r->stream.device, recipe));
    return p;
}

static void *upload(const double *from, int64_t n, mt_dtype dtype)
{
    void *p = test_alloc(n, dtype);
    for (int64_t i = 0; i < n; i++) mt_store_f64(p, dtype, i, from[i]);
    return p;
}

static void download(double *to, const void *from, int64_t n, mt_dtype dtype)
{
    for (int64_t i = 0; i < n; i++) to[i] = mt_load_f64(from, dtype, i);
}

static void set_master(mt_param *p, const double *from)
{
    for (int64_t i = 0; i < mt_param_count(p); i++) mt_store_f64(p->master, p->dtype, i, from[i]);
}

/* recipe: of the experts, NULL: none. */
static void rig_open(struct rig *r, mt_dtype dtype, const mt_tape_options *options,
                     const struct plain_moe *m, const mt_recipe *recipe)
{
    memset(r, 0, sizeof *r);
    r->dtype = dtype, r->stream.device = test_device();
    assert_ok(mt_tape_create(&r->tape, &r->stream, options));
    assert_ok(mt_param_store_create(&r->store, r->stream.device, mt_dtype_wide(dtype), dtype));
    r->router = add(r, "router", 1, E, D, false, NULL);
    r->gate_up = add(r, "gate_up", E, 2 * F, D, true, recipe);
    r->down = add(r, "down", E, D, F, true, recipe);
    assert_ok(mt_param_store_allocate(r->store, true));
    set_master(r->router, m->wr[0]);
    set_master(r->gate_up, m->gate_up[0][0]);
    set_master(r->down, m->down[0][0]);
    mt_param *packed[] = { r->gate_up, r->down };
    for (int i = 0; i < 2; i++) {
        if (recipe) r->states[i] = (mt_linear_state){ .recipe = *recipe, .pass = &r->pass };
        if (recipe) packed[i]->linear = &r->states[i];
        assert_ok(mt_linear_place(packed[i], r->stream.device));
        assert_ok(mt_linear_refresh(packed[i], &r->stream));
    }
    r->x = upload(m->x[0], T * D, dtype), r->dy = upload(m->dy[0], T * D, dtype);
    r->dprob_sum = upload(m->dprob_sum, E, mt_dtype_wide(dtype));
    r->dz_sum = upload(&m->dz_sum, 1, mt_dtype_wide(dtype));
    r->dweights = upload(m->dweights, T * m->top_k, mt_dtype_wide(dtype));
    for (int e = 0; e < E; e++) r->bias[e] = (float)m->bias[e];
}

static void rig_close(struct rig *r)
{
    mt_tape_destroy(&r->tape);
    mt_param_store_destroy(&r->store);
    void *all[] = { r->x, r->dy, r->dprob_sum, r->dz_sum, r->dweights };
    for (int i = 0; i < 5; i++) test_free(all[i]);
}

struct segment {
    struct rig *rig;
    const mt_moe_layer *layer;
};

/* Inputs {x}, outputs {y, prob_sum, z_sum, weights, counts, chosen}. */
static mt_status run_layer(mt_tape *tape, void *context, mt_value *const *inputs,
                           mt_value **outputs)
{
    const struct segment *s = context;
    mt_routing routing;
    MT_TRY(mt_moe_forward(tape, &outputs[0], &routing, inputs[0], s->layer, "moe"));
    mt_value *kept[] = { routing.prob_sum, routing.z_sum, routing.weights, routing.counts,
                         routing.chosen };
    for (int i = 0; i < 5; i++) {
        mt_value_hold(kept[i]);
        outputs[1 + i] = kept[i];
    }
    mt_routing_release(tape, &routing);
    return MT_OK;
}

static void rig_run(struct rig *r, const struct plain_moe *m, const struct routing_case *c)
{
    mt_dtype real = mt_dtype_wide(r->dtype);
    mt_moe_layer layer = { .router = r->router,
                           .gate_up = { .weight = r->gate_up },
                           .down = { .weight = r->down },
                           .shape = { .experts = E,
                                      .top_k = m->top_k,
                                      .normalize = m->normalize,
                                      .bias = r->bias,
                                      .load = r->load },
                           .capacity_factor = c->capacity_factor,
                           .dropped = &r->dropped };
    struct segment s = { r, &layer };
    mt_value *x, *out[6];
    mt_param_store_begin_step(r->store);
    assert_ok(mt_tape_begin(r->tape, 1, true));
    assert_ok(mt_tape_input(r->tape, &x, mt_tensor_2d(r->x, r->dtype, T, D), !r->router_alone));
    assert_ok(mt_tape_segment(r->tape, run_layer, &s, &x, 1, out, 6));
    download(r->y, out[0]->data.data, T * D, r->dtype);
    download(r->prob_sum, out[1]->data.data, E, real);
    download(&r->z_sum, out[2]->data.data, 1, real);
    download(r->weights, out[3]->data.data, T * m->top_k, real);
    memcpy(r->counts, out[4]->data.data, sizeof r->counts);
    memcpy(r->chosen, out[5]->data.data, (size_t)(T * m->top_k) * sizeof *r->chosen);
    assert_ok(mt_tape_seed_tensor(r->tape, out[0], mt_tensor_2d(r->dy, r->dtype, T, D)));
    assert_ok(mt_tape_seed_tensor(r->tape, out[1], mt_tensor_1d(r->dprob_sum, real, E)));
    assert_ok(mt_tape_seed_tensor(r->tape, out[2], mt_tensor_1d(r->dz_sum, real, 1)));
    if (c->used_elsewhere)
        assert_ok(
            mt_tape_seed_tensor(r->tape, out[3], mt_tensor_2d(r->dweights, real, T, m->top_k)));
    for (int i = 0; i < 6; i++) mt_value_release(r->tape, &out[i]);
    assert_ok(mt_tape_backward(r->tape));
    assert_ok(mt_tape_run_deferred(r->tape));
    if (!r->router_alone) download(r->dx, mt_value_grad(x).data, T * D, r->dtype);
    mt_value_release(r->tape, &x);
    assert_ok(mt_tape_end(r->tape));
    assert_ok(mt_param_store_end_step(r->store));
}

/* Inputs drawn, rounded to dtype so that both sides start from the same numbers; then the plain
 * result. */
static void draw(struct plain_moe *m, const struct routing_case *c, mt_dtype dtype)
{
    struct {
        double *p;
        int64_t n;
        double scale;
    } parts[] = {
        { m->x[0], T * D, 1.5 },
        { m->wr[0], E * D, 1 },
        { m->gate_up[0][0], E * 2 * F * D, 1 },
        { m->down[0][0], E * D * F, 1 },
        { m->dy[0], T * D, 1 },
        { m->dprob_sum, E, 1 },
        { &m->dz_sum, 1, 0.3 },
        { m->dweights, c->used_elsewhere ? T * c->top_k : 0, 1 },
    };
    memset(m, 0, sizeof *m);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        test_random(parts[i].p, parts[i].n, MT_F64, parts[i].scale, 40 + i);
        for (int64_t j = 0; j < parts[i].n && dtype != MT_F64; j++)
            parts[i].p[j] = (double)(float)parts[i].p[j];
    }
    m->top_k = c->top_k, m->normalize = c->normalize;
    memcpy(m->bias, c->bias, sizeof m->bias);
    m->capacity = (int64_t)fmin(ceil(c->capacity_factor * (double)(T * c->top_k) / E), T);
    plain_forward(m);
    plain_backward(m);
}

/* Within the roundings of the longest chain of sums (router, two GEMMs, the sum over tokens, a few
 * elementwise), each of the size of the tensor's largest value, and doubled for the backward chain.
 */
static void near(const char *name, const char *what, const void *got, mt_dtype dtype,
                 const double *want, int64_t n, double epsilon)
{
    double largest = 0;
    char text[96];
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(want[i]));
    snprintf(text, sizeof text, "%s: %s", name, what);
    test_assert_near(text, got, dtype, want, n, 2 * (2 * D + 2 * F + T + 16) * epsilon * largest,
                     0);
}

static void check_case(const struct routing_case *c, mt_dtype dtype, const mt_tape_options *options)
{
    static struct plain_moe m;
    static struct rig r;
    double epsilon = test_epsilon(dtype);
    draw(&m, c, dtype);
    rig_open(&r, dtype, options, &m, NULL);
    rig_run(&r, &m, c);
    for (int t = 0; t < T; t++)
        for (int s = 0; s < m.top_k; s++)
            assert_int_equal(r.chosen[t * m.top_k + s], m.chosen[t][s]);
    assert_memory_equal(r.counts, m.counts, sizeof r.counts);
    assert_memory_equal(r.load, m.counts, sizeof r.load); /* once, also where forward ran twice */
    assert_int_equal(r.dropped, m.dropped);
    double weights[T * PLAIN_K];
    for (int i = 0; i < T * m.top_k; i++) weights[i] = m.weights[i / m.top_k][i % m.top_k];
    near(c->name, "weights", r.weights, MT_F64, weights, T * m.top_k, epsilon);
    near(c->name, "prob_sum", r.prob_sum, MT_F64, m.prob_sum, E, epsilon);
    near(c->name, "z_sum", &r.z_sum, MT_F64, &m.z_sum, 1, epsilon);
    near(c->name, "y", r.y, MT_F64, m.y[0], T * D, epsilon);
    near(c->name, "dx", r.dx, MT_F64, m.dx[0], T * D, epsilon);
    near(c->name, "dwr", r.router->grad, r.router->dtype, m.dwr[0], E * D, epsilon);
    for (int e = 0; e < E; e++) { /* each by itself: an empty one must be exactly zero */
        size_t size = mt_dtype_size(r.down->dtype);
        char name[64];
        snprintf(name, sizeof name, "%s, expert %d", c->name, e);
        near(name, "dgate_up", (char *)r.gate_up->grad + (size_t)(e * 2 * F * D) * size,
             r.gate_up->dtype, m.dgate_up[e][0], 2 * F * D, epsilon);
        near(name, "ddown", (char *)r.down->grad + (size_t)(e * D * F) * size, r.down->dtype,
             m.ddown[e][0], D * F, epsilon);
    }
    rig_close(&r);
}

/* Where the gradient of the routing weights is taken from, whatever the device likes best. */
static void take_weights(mt_dtype dtype, bool from_dz)
{
    static struct mt_kernels tables[MT_DTYPE_COUNT];
    mt_device *device = test_device();
    tables[dtype] = *device->kernels[dtype];
    tables[dtype].weights_from_dz = from_dz;
    device->kernels[dtype] = &tables[dtype];
}

static void test_against_plain_loops(void **state)
{
    (void)state;
    for (int i = 0; i < CASES; i++)
        for (int bits = 0; bits < 32; bits++) {
            take_weights(MT_F64, bits & 16), take_weights(MT_F32, bits & 16);
            mt_tape_options options = { .defer_wgrad = bits & 1,
                                        .recompute_activation = bits & 2,
                                        .recompute = bits & 4,
                                        .offload = bits & 8 };
            check_case(&cases[i], MT_F64, &options);
            check_case(&cases[i], MT_F32, &options);
        }
}

/* The router's gradient comes through the experts, whether or not anything in them takes one. */
static void test_router_alone(void **state)
{
    (void)state;
    static struct plain_moe m;
    static struct rig r;
    for (int i = 0; i < CASES; i++)
        for (int bits = 0; bits < 4; bits++) {
            take_weights(MT_F64, bits & 2);
            draw(&m, &cases[i], MT_F64);
            rig_open(&r, MT_F64, &(mt_tape_options){ .recompute = bits & 1 }, &m, NULL);
            r.router_alone = r.gate_up->frozen = r.down->frozen = true;
            rig_run(&r, &m, &cases[i]);
            near(cases[i].name, "dwr", r.router->grad, r.router->dtype, m.dwr[0], E * D,
                 test_epsilon(MT_F64));
            rig_close(&r);
        }
}

/* Values that codes of any width hold, and a router that gives four experts a quarter each: what
 * the gradient of the routing weights is made of is then exact under a recipe, unlike y, whose rows
 * are made of SwiGLUs that are not. */
static void draw_codes(struct plain_moe *m, const struct routing_case *c)
{
    draw(m, c, MT_F32);
    const struct {
        double *p;
        int64_t n;
        int least, most;
    } parts[] = { { m->x[0], T * D, 1, 3 },
                  { m->gate_up[0][0], E * 2 * F * D, -2, 2 },
                  { m->down[0][0], E * D * F, -2, 2 },
                  { m->dy[0], T * D, -3, 3 } };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (int64_t j = 0; j < parts[i].n; j++) {
            int span = parts[i].most - parts[i].least + 1;
            parts[i].p[j] = parts[i].least + (int)(j * 7 + j / 5 + (int64_t)i) % span;
        }
    memset(m->wr, 0, sizeof m->wr);
    for (int i = 0; i < D; i++) m->wr[E - 1][i] = -1000;
    plain_forward(m);
    plain_backward(m);
}

static mt_status count_shown(void *context, const mt_param *weight, mt_operand operand,
                             const mt_qtensor *operands)
{
    (void)weight, (void)operand, (void)operands;
    ++*(int64_t *)context;
    return MT_OK;
}

static void same_gradients(const struct rig *a, const struct rig *b)
{
    size_t size = mt_dtype_size(a->router->dtype);
    assert_memory_equal(a->dx, b->dx, sizeof a->dx);
    assert_memory_equal(a->router->grad, b->router->grad, E * D * size);
    assert_memory_equal(a->gate_up->grad, b->gate_up->grad, E * 2 * F * D * size);
    assert_memory_equal(a->down->grad, b->down->grad, E * D * F * size);
}

/* The router's gradient under recipes: from the gradient of z, whether it is one with quantize or
 * not; the same bits where somebody watches, and whatever the tape keeps. */
static void check_router(const struct routing_case *c, mt_dtype dtype, const char *text)
{
    static struct plain_moe m;
    static struct rig plain, other;
    mt_recipe recipe;
    assert_ok(mt_recipe_parse(&recipe, text));
    draw_codes(&m, c);
    rig_open(&plain, dtype, NULL, &m, &recipe);
    rig_run(&plain, &m, c);
    near(text, "dwr", plain.router->grad, plain.router->dtype, m.dwr[0], E * D,
         test_epsilon(dtype));
    for (int bits = 0; bits < 5; bits++) { /* watched, or each of the tape's options */
        mt_tape_options options = { .defer_wgrad = bits == 1,
                                    .recompute_activation = bits == 2,
                                    .recompute = bits == 3,
                                    .offload = bits == 4 };
        rig_open(&other, dtype, &options, &m, &recipe);
        for (int i = 0; i < 2 && !bits; i++)
            other.states[i].observe = count_shown, other.states[i].observer = &other.shown;
        rig_run(&other, &m, c);
        assert_true(bits || other.shown > 0);
        same_gradients(&other, &plain);
        rig_close(&other);
    }
    rig_close(&plain);
    rig_open(&plain, dtype, NULL, &m, &recipe);
    plain.router_alone = plain.gate_up->frozen = plain.down->frozen = true;
    rig_run(&plain, &m, c);
    near(text, "dwr alone", plain.router->grad, plain.router->dtype, m.dwr[0], E * D,
         test_epsilon(dtype));
    rig_close(&plain);
}

/* From what a token's only expert puts out, a quarter of which is y: where that is to be kept. */
static void check_kept_output(mt_dtype dtype, const char *text)
{
    static const struct routing_case one = { "one of four", 1, false, 0, { 0, 0, 3, 0, 0 }, false };
    static struct plain_moe m;
    static struct rig r;
    mt_recipe recipe;
    assert_ok(mt_recipe_parse(&recipe, text));
    draw_codes(&m, &one);
    rig_open(&r, dtype, NULL, &m, &recipe);
    for (int i = 0; i < 2; i++) r.states[i].save_expert_output = true;
    rig_run(&r, &m, &one);
    memset(m.dwr, 0, sizeof m.dwr);
    for (int t = 0; t < T; t++) {
        double dweight = plain_dot(m.dy[t], r.y + t * D, D) / 0.25;
        plain_router_backward(&m, t, &dweight);
    }
    near(text, "dwr of what is kept", r.router->grad, r.router->dtype, m.dwr[0], E * D,
         test_epsilon(dtype));
    rig_close(&r);
}

static void test_router_under_recipes(void **state)
{
    (void)state;
    static const char *const texts[] = { "fp8_block",
                                         "mxfp8",
                                         "fprop=mxfp4/mxfp4 dgrad=mxfp4/mxfp4 wgrad=mxfp4/mxfp4",
                                         "fprop=bf16/bf16 dgrad=mxfp8/mxfp8 wgrad=bf16/bf16",
                                         "fprop=mxfp8/mxfp8 dgrad=fp8_block/mxfp8 wgrad=bf16/bf16",
                                         "fprop=fp8_block/mxfp8 dgrad=mxfp8/bf16 wgrad=bf16/bf16" };
    static const struct routing_case quarters[] = {
        { "three of four", 3, false, 0, { 4, 0, 3, 1, 0 }, false },
        { "capacity, used elsewhere", 2, false, 0.5, { 0, 4, 3, 1, 0 }, true },
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        for (int c = 0; c < 2; c++) {
            check_router(&quarters[c], MT_F64, texts[i]);
            check_router(&quarters[c], MT_F32, texts[i]);
            check_router(&quarters[c], MT_BF16, texts[i]);
        }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        for (int d = 0; d < 2; d++) check_kept_output(d ? MT_F32 : MT_F64, texts[i]);
}

/* The cases are what their names say. */
static void test_cases(void **state)
{
    (void)state;
    static struct plain_moe m;
    draw(&m, &cases[3], MT_F64);
    assert_int_equal(m.counts[0] + m.counts[3], 0);
    draw(&m, &cases[4], MT_F64);
    assert_int_equal(m.counts[0], T);
    draw(&m, &cases[7], MT_F64);
    assert_true(m.dropped > 0);
    draw(&m, &cases[9], MT_F64);
    assert_int_equal(m.dropped, T - 2); /* capacity ceil(9 / 5) */
}

/* ---- contracts ----------------------------------------------------------------------------------
 */

static void test_refusals(void **state)
{
    (void)state;
    static struct plain_moe m;
    static struct rig r;
    draw(&m, &cases[0], MT_F32);
    rig_open(&r, MT_F32, NULL, &m, NULL);
    mt_grouped_linear_layer linear = { .weight = r.gate_up };
    mt_value *x, *y, *narrow;
    assert_ok(mt_tape_begin(r.tape, 1, true));
    assert_ok(mt_tape_input(r.tape, &x, mt_tensor_2d(r.x, MT_F32, T, D), true));
    assert_ok(mt_tape_input(r.tape, &narrow, mt_tensor_2d(r.x, MT_F32, T, D - 1), true));
    mt_ragged rows = { .members = E, .widths = { D, D, D } },
              few = { .members = E - 1, .widths = { D, 2 * F, 1 } };
    assert_fails(mt_grouped_linear(r.tape, &y, narrow, &linear, &few), MT_EINVAL,
                 "gate_up: x has 5 columns");
    assert_fails(mt_grouped_linear(r.tape, &y, x, &linear, NULL), MT_EINVAL,
                 "5 members need the rows");
    assert_fails(mt_grouped_linear(r.tape, &y, x, &linear, &rows), MT_EINVAL,
                 "no offsets for widths 6 and 10");
    assert_fails(mt_grouped_linear(r.tape, &y, x, &linear, &few), MT_EINVAL, "rows of 4 members");
    mt_value *wide;
    assert_ok(mt_tape_input(r.tape, &wide, mt_tensor_2d(r.x, MT_F64, T, D), true));
    assert_fails(mt_grouped_linear(r.tape, &y, wide, &linear, &rows), MT_EINVAL,
                 "x is f64, the layer computes in f32");
    linear.bias = r.router;
    assert_fails(mt_grouped_linear(r.tape, &y, x, &linear, &rows), MT_EINVAL,
                 "30 biases, the weight has 50 rows");
    mt_param_store *other;
    assert_ok(mt_param_store_create(&other, r.stream.device, MT_F64, MT_F64));
    assert_ok(mt_param_store_add(
        other, &linear.bias, &(mt_param_spec){ .name = "bias", .members = E, .m = 1, .k = 2 * F }));
    assert_fails(mt_grouped_linear(r.tape, &y, x, &linear, &rows), MT_EINVAL,
                 "the bias is f64, the layer computes in f32");
    mt_param_store_destroy(&other);
    assert_fails(mt_linear_place(r.router, r.stream.device), MT_EINVAL, "has no memory");
    linear = (mt_grouped_linear_layer){ .weight = r.router }; /* not packed */
    assert_fails(mt_grouped_linear(r.tape, &y, x, &linear, NULL), MT_EINVAL, "no compute copy");
    linear = (mt_grouped_linear_layer){ NULL, NULL };
    assert_fails(mt_grouped_linear(r.tape, &y, x, &linear, &rows), MT_EINVAL, "has no weight");
    assert_fails(mt_grouped_linear(r.tape, &y, x, NULL, &rows), MT_EINVAL, "has no weight");
    assert_fails(mt_embedding(r.tape, &y, NULL, 0, NULL), MT_EINVAL,
                 "embedding: the layer has no weight");
    assert_fails(mt_rmsnorm(r.tape, &y, x, NULL, 0), MT_EINVAL, "rmsnorm: the layer has no weight");
    assert_fails(mt_head_loss(r.tape, &y, x, NULL, 0), MT_EINVAL, "head_loss: 0 parts");
    mt_routing routing;
    mt_moe_layer half = { .router = r.router, .gate_up = { .weight = r.gate_up } };
    assert_fails(mt_moe_forward(r.tape, &y, &routing, x, &half, "moe"), MT_EINVAL,
                 "moe: the layer has no weight down");
    mt_mlp_layer mlp = { .down = { .weight = r.down } };
    assert_fails(mt_mlp_forward(r.tape, &y, x, &mlp), MT_EINVAL, "has no weight gate_up");
    mt_router_shape shape = { .experts = E, .top_k = E + 1 };
    assert_fails(mt_router(r.tape, &routing, x, NULL, &shape), MT_EINVAL, "has no router");
    assert_fails(mt_router(r.tape, &routing, wide, r.router, &shape), MT_EINVAL, "x is f64");
    assert_fails(mt_rmsnorm(r.tape, &y, wide, r.router, 0), MT_EINVAL, "x is f64");
    assert_fails(mt_router(r.tape, &routing, x, r.router, &shape), MT_EINVAL, "top_k is 6");
    shape.experts = E + 1;
    assert_fails(mt_router(r.tape, &routing, x, r.router, &shape), MT_EINVAL, "router has 30");
    shape = (mt_router_shape){ .experts = E, .top_k = 2 };
    assert_fails(mt_router(r.tape, &routing, narrow, r.router, &shape), MT_EINVAL, "of 5 columns");
    mt_route route = { .tokens = T + 1, .top_k = 2 };
    assert_fails(mt_gather(r.tape, &y, x, &route), MT_EINVAL, "the route 10 tokens");
    assert_fails(mt_combine(r.tape, &y, x, narrow, &route), MT_EINVAL, "must be f32[10,2]");
    mt_value *weights;
    mt_exchanged sent = { 0 };
    route.room = 2 * (T + 1);
    assert_ok(mt_tape_input(r.tape, &weights, mt_tensor_2d(r.x, MT_F32, T + 1, 2), true));
    assert_fails(mt_combine(r.tape, &y, x, weights, &route), MT_EINVAL,
                 "combine: x has 9 rows, the route 20");
    assert_fails(mt_dispatch(r.tape, &y, &sent, x, &route, &routing, NULL, rows.widths, NULL, NULL),
                 MT_EINVAL, "dispatch: x has 9 rows, the route 10 tokens");
    assert_fails(mt_gate_up(r.tape, &y, NULL, x, NULL, &half.gate_up, &rows, &route, false),
                 MT_EINVAL, "gate_up: x has 9 rows, the route 10 tokens");
    assert_fails(mt_down(r.tape, &y, x, NULL, NULL, &mlp.down, &rows, &route), MT_EINVAL,
                 "down: z has 9 rows, the route 20");
    assert_fails(mt_swiglu(r.tape, &y, narrow, NULL), MT_EINVAL, "swiglu: x has 5 columns");
    mt_attention_shape heads = { 1, T, 2, 1, 2, MT_QK_NORM_HEAD, 0, r.x, r.x };
    assert_fails(mt_attention(r.tape, &y, x, &heads), MT_EINVAL, "attention: qkv is f32[9,6]");
    assert_fails(mt_qk_norm_rope(r.tape, &y, x, r.router, r.router, &heads), MT_EINVAL,
                 "must be f32[9,8]");
    heads.query_heads = 1;
    assert_fails(mt_qk_norm_rope(r.tape, &y, x, r.router, r.router, &heads), MT_EINVAL,
                 "1 heads of 2 need 2");
    assert_fails(mt_qk_norm_rope(r.tape, &y, wide, NULL, r.router, &heads), MT_EINVAL,
                 "router is f32, x is f64");
    mt_param one = { .name = "one", .dtype = MT_F32, .group = mt_group_uniform(1, 1, 2) };
    assert_fails(mt_qk_norm_rope(r.tape, &y, x, &one, &one, &heads), MT_EINVAL,
                 "one is given for queries and for keys");
    heads.norm = MT_QK_NORM_NONE;
    assert_fails(mt_qk_norm_rope(r.tape, &y, x, r.router, NULL, &heads), MT_EINVAL,
                 "router is given, but the norm is none");
    mt_tape_abort(r.tape);
    rig_close(&r);
}

/* Every op has its own name: gradcheck and error messages go by it. */
static void test_op_table(void **state)
{
    (void)state;
    for (int i = 0; i < mt_layer_op_count; i++) {
        assert_non_null(mt_layer_ops[i]->backward);
        for (int j = 0; j < i; j++)
            assert_string_not_equal(mt_layer_ops[i]->name, mt_layer_ops[j]->name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),        cmocka_unit_test(test_against_plain_loops),
        cmocka_unit_test(test_router_alone), cmocka_unit_test(test_router_under_recipes),
        cmocka_unit_test(test_refusals),     cmocka_unit_test(test_op_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
