/* The MoE layer of layers/moe.h through the tape: router, route plan, gather, experts, combine, and
 * the whole sweep back with weight gradients in f32, or in bf16 where that is asked for.
 *
 * fwd is a forward pass that keeps what backward needs; bwd is a pass of both less fwd. refresh
 * writes the compute copies of the experts' weights from their masters, once per optimizer step;
 * fwd and bwd include quantizing activations and gradients. FLOP are those of the experts. */
#include "train/bench.h"

#include "layers/moe.h"

enum { ROTATED = 2, WEIGHTS = 2 };

struct job {
    const mt_bench_layer *shape;
    mt_param_store *store;
    mt_linear_state state;
    mt_tape *tape;
    mt_moe_layer layer;
    void *x[ROTATED], *dy[ROTATED];
    bool backward;
};

/* ---- the layer ---------------------------------------------------------------------------------
 */

static mt_status add_param(struct job *j, mt_param **param, const char *name, int64_t members,
                           int64_t m, int64_t k, bool packed)
{
    return mt_param_store_add(
        j->store, param,
        &(mt_param_spec){
            .name = name, .members = members, .m = m, .k = k, .decay = true, .packed = packed });
}

static mt_status make(mt_bench *b, struct job *j, bool plain)
{
    const mt_bench_layer *s = j->shape;
    mt_dtype dtype = b->options.dtype, real = mt_dtype_wide(dtype);
    mt_moe_layer *l = &j->layer;
    l->shape = (mt_router_shape){ .experts = s->experts, .top_k = s->top_k, .normalize = true };
    MT_TRY(mt_param_store_create(&j->store, b->device, real, dtype));
    if (b->options.bf16_grads) MT_TRY(mt_param_store_set_grad_dtype(j->store, MT_BF16));
    MT_TRY(add_param(j, &l->router, "router", 1, s->experts, s->width, false));
    MT_TRY(add_param(j, &l->gate_up.weight, "gate_up", s->experts, 2 * s->expert_width, s->width,
                     true));
    MT_TRY(add_param(j, &l->down.weight, "down", s->experts, s->width, s->expert_width, true));
    mt_param *weights[WEIGHTS] = { l->gate_up.weight, l->down.weight };
    for (int i = 0; i < WEIGHTS; i++)
        MT_TRY(mt_linear_reserve(weights[i], b->device, plain ? NULL : &j->state.recipe));
    MT_TRY(mt_param_store_allocate(j->store, true));
    MT_TRY(mt_bench_fill(b, l->router->master, mt_param_count(l->router), real, 0.02));
    for (int i = 0; i < WEIGHTS; i++) {
        weights[i]->linear = plain ? NULL : &j->state;
        MT_TRY(mt_linear_place(weights[i], b->device));
        MT_TRY(mt_bench_fill(b, weights[i]->master, mt_param_count(weights[i]), real, 0.02));
        MT_TRY(mt_linear_refresh(weights[i], &b->stream));
    }
    for (int i = 0; i < ROTATED; i++) {
        MT_TRY(mt_bench_random(b, &j->x[i], s->tokens * s->width, dtype, 0.2));
        MT_TRY(mt_bench_random(b, &j->dy[i], s->tokens * s->width, dtype, 0.2));
    }
    return mt_tape_create(&j->tape, &b->stream, &(mt_tape_options){ 0 });
}

static mt_status pass(mt_bench *b, struct job *j, int64_t turn)
{
    const mt_bench_layer *s = j->shape;
    mt_dtype dtype = b->options.dtype;
    mt_routing routing;
    mt_value *x, *y;
    mt_tensor in = mt_tensor_2d(j->x[turn % ROTATED], dtype, s->tokens, s->width);
    mt_tensor dy = mt_tensor_2d(j->dy[turn % ROTATED], dtype, s->tokens, s->width);
    mt_param_store_begin_step(j->store);
    MT_TRY(mt_tape_begin(j->tape, j->backward ? 2 : 1, true));
    MT_TRY(mt_tape_input(j->tape, &x, in, true));
    MT_TRY(mt_moe_forward(j->tape, &y, &routing, x, &j->layer, "moe"));
    if (j->backward) MT_TRY(mt_tape_seed_tensor(j->tape, y, dy));
    mt_value_release(j->tape, &y);
    mt_routing_release(j->tape, &routing);
    if (j->backward) MT_TRY(mt_tape_backward(j->tape));
    mt_value_release(j->tape, &x);
    return mt_tape_end(j->tape);
}

static mt_status launch_pass(mt_bench *b, void *context, int64_t turn)
{
    struct job *j = context;
    mt_status status = pass(b, j, turn);
    if (status != MT_OK) mt_tape_abort(j->tape);
    return status;
}

static mt_status launch_refresh(mt_bench *b, void *context, int64_t turn)
{
    struct job *j = context;
    (void)turn;
    MT_TRY(mt_linear_refresh(j->layer.gate_up.weight, &b->stream));
    return mt_linear_refresh(j->layer.down.weight, &b->stream);
}

/* ---- floors: products and combines, each with bytes that it alone moves -------------------------
 */

struct floors {
    double fwd, bwd;
};

/* Activations in the dtype, read and written once; weights and tokens once; weight gradients as
 * they are stored. */
static struct floors floors(const mt_bench *b, const mt_bench_layer *s)
{
    double size = (double)mt_dtype_size(b->options.dtype);
    double grad =
        (double)mt_dtype_size(b->options.bf16_grads ? MT_BF16 : mt_dtype_wide(b->options.dtype));
    double t = (double)s->tokens, d = (double)s->width, f = (double)s->expert_width;
    double e = (double)s->experts, r = t * (double)s->top_k;
    double up = 4 * r * f * d, down = 2 * r * f * d;
    double combine = mt_bench_floor(b, 0, size * (r * d + t * d));
    struct floors floors;
    floors.fwd = mt_bench_floor(b, up, size * (t * d + 2 * e * f * d + 3 * r * f)) +
                 mt_bench_floor(b, down, size * (r * f + e * f * d + r * d)) + combine;
    floors.bwd = mt_bench_floor(b, down, size * (t * d + e * f * d + 5 * r * f)) +
                 mt_bench_floor(b, up, size * (2 * r * f + 2 * e * f * d + r * d)) + combine +
                 mt_bench_floor(b, down, size * (t * d + r * f) + grad * e * f * d) +
                 mt_bench_floor(b, up, size * (t * d + 2 * r * f) + grad * 2 * e * f * d);
    return floors;
}

/* Bytes of the compute copies and of the masters they are made from. */
static double refresh_bytes(const struct job *j)
{
    const mt_param *weights[WEIGHTS] = { j->layer.gate_up.weight, j->layer.down.weight };
    double bytes = 0;
    for (int i = 0; i < WEIGHTS; i++)
        bytes += (double)weights[i]->compute_bytes +
                 (double)mt_param_count(weights[i]) * (double)mt_dtype_size(weights[i]->dtype);
    return bytes;
}

/* ---- reports -----------------------------------------------------------------------------------
 */

static mt_status report(mt_bench *b, mt_bench_case *c, const char *what, double flop, double floor,
                        double seconds)
{
    c->what = what, c->unit = "TFLOP/s", c->amount = flop * 1e-12, c->floor = floor;
    return mt_bench_report(b, c, seconds);
}

static mt_status measure(mt_bench *b, struct job *j, mt_bench_case *c)
{
    const mt_bench_layer *s = j->shape;
    double flop = 6 * (double)(s->tokens * s->top_k) * (double)s->width * (double)s->expert_width;
    struct floors f = floors(b, s);
    double fwd, both, refresh, bytes = refresh_bytes(j);
    c->what = "fwd", j->backward = false;
    MT_TRY(mt_bench_measure(b, &fwd, launch_pass, j));
    MT_TRY(report(b, c, "fwd", flop, f.fwd, fwd));
    c->what = "bwd", j->backward = true;
    MT_TRY(mt_bench_measure(b, &both, launch_pass, j));
    c->notes[0].name = "activations_gb";
    c->notes[0].value = (double)b->device->peak[MT_MEMORY_ACTIVATIONS] * 1e-9;
    if (both > fwd)
        MT_TRY(report(b, c, "bwd", 2 * flop, f.bwd, both - fwd));
    else
        MT_TRY(mt_bench_leave_out(b, c, "fwd+bwd took no longer than fwd: more launches tell"));
    MT_TRY(report(b, c, "fwd+bwd", 3 * flop, f.fwd + f.bwd, both));
    c->notes[0].name = NULL, c->what = "refresh";
    MT_TRY(mt_bench_measure(b, &refresh, launch_refresh, j));
    c->unit = "GB/s", c->amount = bytes * 1e-9, c->floor = mt_bench_floor(b, 0, bytes);
    return mt_bench_report(b, c, refresh);
}

static mt_status bench_layer(mt_bench *b, const mt_bench_layer *s, const char *recipe)
{
    struct job j = { .shape = s, .state = { .seed = 1 } };
    mt_bench_case c = { "moe", s->name, "fwd", recipe, "TFLOP/s", 0, 0, { { NULL, 0 } } };
    bool plain;
    mt_status status;
    MT_TRY(mt_bench_recipe(recipe, &j.state.recipe, &plain));
    b->device->peak[MT_MEMORY_ACTIVATIONS] = b->device->bytes[MT_MEMORY_ACTIVATIONS];
    MT_TRY_CLEANUP(make(b, &j, plain));
    MT_TRY_CLEANUP(measure(b, &j, &c));
cleanup:
    mt_tape_destroy(&j.tape);
    mt_param_store_destroy(&j.store);
    if (status != MT_OK) status = mt_bench_give_up(b, &c, status);
    mt_bench_release(b);
    return status;
}

mt_status mt_bench_moe(mt_bench *b)
{
    for (int i = 0; i < mt_bench_layer_count; i++)
        for (int r = 0; r < b->options.recipe_count; r++)
            if (mt_bench_selected(b, mt_bench_layers[i].name, mt_bench_layers[i].devices))
                MT_TRY(bench_layer(b, &mt_bench_layers[i], b->options.recipes[r]));
    return MT_OK;
}
