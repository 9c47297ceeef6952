/* The gradient checker's cases: every differentiable op, over ragged, empty and one-sided routings.
 */
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/gradcheck_priv.h"

/* ---- routings -------------------------------------------------------------------------------- */

/* Rows of four members, and what is particular about them. A capacity tail follows where `rows` is
 * larger. */
struct routing_case {
    const char *name;
    int64_t counts[4], rows;
};

static const struct routing_case routings[] = {
    { "ragged", { 3, 1, 4, 2 }, 10 },
    { "empty experts", { 5, 0, 6, 0 }, 11 },
    { "all in one", { 0, 0, 9, 0 }, 9 },
    { "capacity tail", { 2, 3, 0, 1 }, 9 },
};
enum { ROUTINGS = sizeof routings / sizeof *routings, EXPERTS = CHECK_MEMBERS };

static mt_status copy_in(mt_tape *tape, mt_value **v, const int64_t *from, int ndim,
                         const int64_t *shape)
{
    MT_TRY(mt_tape_value(tape, v, MT_I64, ndim, shape));
    memcpy((*v)->data.data, from, mt_tensor_bytes(&(*v)->data));
    return MT_OK;
}

/* The arrays of a route plan for these counts and widths; released by ragged_release. */
static mt_status ragged_make(mt_tape *tape, mt_ragged *r, const struct routing_case *routing,
                             const int64_t widths[MT_ROUTE_WIDTHS])
{
    int64_t offsets[EXPERTS + 1] = { 0 }, elements[MT_ROUTE_WIDTHS * (EXPERTS + 1)];
    for (int e = 0; e < EXPERTS; e++) offsets[e + 1] = offsets[e] + routing->counts[e];
    for (int w = 0; w < MT_ROUTE_WIDTHS; w++) {
        r->widths[w] = widths[w];
        for (int e = 0; e <= EXPERTS; e++) elements[w * (EXPERTS + 1) + e] = offsets[e] * widths[w];
    }
    r->members = EXPERTS;
    MT_TRY(copy_in(tape, &r->counts, routing->counts, 1, (int64_t[]){ EXPERTS }));
    MT_TRY(copy_in(tape, &r->offsets, offsets, 1, (int64_t[]){ EXPERTS + 1 }));
    return copy_in(tape, &r->elements, elements, 2, (int64_t[]){ MT_ROUTE_WIDTHS, EXPERTS + 1 });
}

static void ragged_release(mt_tape *tape, mt_ragged *r)
{
    mt_value_release(tape, &r->counts);
    mt_value_release(tape, &r->offsets);
    mt_value_release(tape, &r->elements);
}

static int64_t used_rows(const struct routing_case *r)
{
    return r->counts[0] + r->counts[1] + r->counts[2] + r->counts[3];
}

/* ---- what the cases share -------------------------------------------------------------------- */

static mt_status run_case(const mt_check_session *s, const char *op, const mt_tape_options *options,
                          mt_check_setup setup, int variant, double shift)
{
    check *c;
    MT_TRY(mt_check_create(&c, s->device, op, options, 1));
    mt_status status = setup(c, variant);
    if (status == MT_OK) status = mt_check_draw(c, shift);
    if (status == MT_OK) status = mt_check_run(c, s->report, s->context, false, s->failed);
    mt_check_destroy(&c);
    return status;
}

mt_status mt_check_variants(const mt_check_session *s, const char *op, mt_check_setup setup,
                            int variants, double shift)
{
    for (int i = 0; i < variants; i++) MT_TRY(run_case(s, op, NULL, setup, i, shift));
    return MT_OK;
}

/* ---- embedding, residual add, rows, RMSNorm
 * -------------------------------------------------------- */

static mt_status embedding_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    (void)in;
    return mt_embedding(tape, &out[0], c->tokens, 9, c->params[0]);
}

static mt_status embedding_setup(check *c, int variant)
{
    (void)variant;
    static const int32_t tokens[9] = { 3, 0, 3, 4, 1, 1, 3, 0, 4 }; /* 2 is never used */
    memcpy(c->tokens, tokens, sizeof tokens);
    snprintf(c->name, sizeof c->name, "repeated and absent tokens");
    c->forward = embedding_forward;
    return mt_check_param(c, &c->params[0], "w", 1, 5, 6, false, false);
}

static mt_status embedding_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "embedding", embedding_setup, 1, 0);
}

static mt_status add_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    return mt_residual_add(tape, &out[0], in[0], in[c->input_count - 1]);
}

static mt_status add_setup(check *c, int variant)
{
    snprintf(c->name, sizeof c->name, variant ? "x + x" : "a + b");
    c->forward = add_forward;
    MT_TRY(mt_check_input(c, 3, 5));
    return variant ? MT_OK : mt_check_input(c, 3, 5);
}

static mt_status add_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "residual_add", add_setup, 2, 0);
}

/* The ranges overlap, and leave rows out. */
static mt_status slice_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    MT_TRY(mt_slice_rows(tape, &out[0], in[0], 1, 4));
    if (c->input_count > 1) return mt_residual_add(tape, &out[1], in[0], in[1]);
    return mt_slice_rows(tape, &out[1], in[0], 3, 3);
}

static mt_status slice_setup(check *c, int variant)
{
    snprintf(c->name, sizeof c->name, variant ? "beside another use" : "twice");
    c->forward = slice_forward;
    MT_TRY(mt_check_input(c, 7, 5));
    return variant ? mt_check_input(c, 7, 5) : MT_OK;
}

static mt_status slice_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "slice_rows", slice_setup, 2, 0);
}

static mt_status rmsnorm_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    return mt_rmsnorm(tape, &out[0], in[0], c->params[0], 1e-5);
}

/* The pre-norm pattern: the gradient of x is shared with the branch, then added to. */
static mt_status residual_norm_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    mt_value *y;
    MT_TRY(mt_rmsnorm(tape, &y, in[0], c->params[0], 1e-5));
    MT_TRY(mt_residual_add(tape, &out[0], in[0], y));
    mt_value_release(tape, &y);
    return MT_OK;
}

static mt_status rmsnorm_setup(check *c, int variant)
{
    static const int64_t shapes[][2] = { { 6, 7 }, { 1, 1 }, { 33, 8 }, { 5, 6 } };
    int64_t rows = shapes[variant][0], cols = shapes[variant][1];
    snprintf(c->name, sizeof c->name, "%lld x %lld%s", (long long)rows, (long long)cols,
             variant == 3 ? " with residual" : "");
    c->forward = variant == 3 ? residual_norm_forward : rmsnorm_forward;
    MT_TRY(mt_check_input(c, rows, cols));
    return mt_check_param(c, &c->params[0], "w", 1, 1, cols, false, false);
}

static mt_status rmsnorm_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "rmsnorm", rmsnorm_setup, 4, 1);
}

/* ---- grouped linear: the cross product of its options ---------------------------------------- */

enum linear_option {
    BIAS = 1,
    DEFERRED = 2,
    ACCUMULATED = 4,
    FROZEN = 8,
    SAVED_INPUT = 16,
    RECOMPUTED = 32,
    LINEAR_OPTIONS = CHECK_LINEAR_OPTIONS
};
static const char *const linear_names[] = { "bias",   "deferred",    "accumulated",
                                            "frozen", "saved input", "recomputed" };
enum { DENSE = ROUTINGS, LINEAR_ROUTINGS = ROUTINGS + 1, IN = 5, OUT = 7 };

static mt_status linear_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    int routing = (int)c->experts;
    mt_ragged ragged;
    const mt_ragged *rows = NULL;
    if (routing != DENSE) {
        MT_TRY(ragged_make(tape, &ragged, &routings[routing], (int64_t[]){ IN, OUT, 1 }));
        rows = &ragged;
    }
    MT_TRY(mt_grouped_linear(tape, &out[0], in[0], &c->linear, rows));
    if (rows) ragged_release(tape, &ragged);
    return MT_OK;
}

const int64_t *mt_check_linear_counts(const check *c)
{
    return c->experts == DENSE ? NULL : routings[c->experts].counts;
}

mt_status mt_check_linear_setup(check *c, int variant)
{
    int options = variant % LINEAR_OPTIONS, routing = variant / LINEAR_OPTIONS, used = 0;
    bool dense = routing == DENSE;
    used = snprintf(c->name, sizeof c->name, "%s", dense ? "dense" : routings[routing].name);
    for (int i = 0; 1 << i < LINEAR_OPTIONS; i++)
        if (options >> i & 1)
            used +=
                snprintf(c->name + used, sizeof c->name - (size_t)used, ", %s", linear_names[i]);
    c->forward = linear_forward;
    c->experts = routing;
    c->segment = options & RECOMPUTED;
    c->passes = options & ACCUMULATED ? 2 : 1;
    c->valid_rows = dense ? -1 : used_rows(&routings[routing]);
    int64_t members = dense ? 1 : EXPERTS;
    MT_TRY(mt_check_input(c, dense ? 6 : routings[routing].rows, IN));
    MT_TRY(
        mt_check_param(c, &c->linear.weight, "weight", members, OUT, IN, true, options & FROZEN));
    if (options & BIAS)
        MT_TRY(mt_check_param(c, &c->linear.bias, "bias", members, 1, OUT, false, false));
    c->linear.weight->linear = &c->state;
    c->state.save_original_input = options & SAVED_INPUT;
    c->state.recipe = mt_recipe_plain(MT_F64);
    return MT_OK;
}

static mt_status linear_cases(const mt_check_session *s)
{
    for (int i = 0; i < LINEAR_ROUTINGS * LINEAR_OPTIONS; i++) {
        int options = i % LINEAR_OPTIONS;
        MT_TRY(run_case(s, "grouped_linear",
                        &(mt_tape_options){ .defer_wgrad = options & DEFERRED,
                                            .recompute = options & RECOMPUTED },
                        mt_check_linear_setup, i, 0));
    }
    return MT_OK;
}

/* The second layer of an expert: its input is what its gradient goes to, through the SwiGLU. */
enum { DOWN_IN = 3 };

static mt_status down_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    int routing = (int)c->experts;
    mt_ragged ragged;
    const mt_ragged *rows = NULL;
    mt_value *a;
    if (routing != DENSE) {
        MT_TRY(ragged_make(tape, &ragged, &routings[routing],
                           (int64_t[]){ DOWN_IN, OUT, 2 * DOWN_IN }));
        rows = &ragged;
    }
    MT_TRY(mt_swiglu(tape, &a, in[0], rows));
    MT_TRY(mt_down(tape, &out[0], in[0], a, NULL, &c->linear, rows, NULL));
    mt_value_release(tape, &a);
    if (rows) ragged_release(tape, &ragged);
    return MT_OK;
}

static mt_status down_setup(check *c, int variant)
{
    bool dense = variant == DENSE;
    snprintf(c->name, sizeof c->name, "%s, behind SwiGLU",
             dense ? "dense" : routings[variant].name);
    c->experts = variant, c->forward = down_forward;
    c->valid_rows = dense ? -1 : used_rows(&routings[variant]);
    MT_TRY(mt_check_input(c, dense ? 6 : routings[variant].rows, 2 * DOWN_IN));
    MT_TRY(mt_check_param(c, &c->linear.weight, "weight", dense ? 1 : EXPERTS, OUT, DOWN_IN, true,
                          false));
    c->linear.weight->linear = &c->state;
    c->state.recipe = mt_recipe_plain(MT_F64);
    return MT_OK;
}

static mt_status down_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "grouped_linear", down_setup, LINEAR_ROUTINGS, 0);
}

/* Every recipe over every option; the routings take turns. */
static mt_status quantized_cases(const mt_check_session *s)
{
    bool found = true;
    for (int i = 0; found; i++)
        for (int options = 0; found && options < LINEAR_OPTIONS; options++) {
            check *c;
            int routing = (i + options) % LINEAR_ROUTINGS;
            mt_tape_options tape = { .defer_wgrad = options & DEFERRED,
                                     .recompute = options & RECOMPUTED };
            MT_TRY(mt_check_create(&c, s->device, "grouped_linear", &tape, 1));
            mt_status status =
                mt_check_quantized_setup(c, i, routing * LINEAR_OPTIONS + options, &found);
            if (status == MT_OK && found) status = mt_check_draw(c, 0);
            if (status == MT_OK && found)
                status = mt_check_run(c, s->report, s->context, false, s->failed);
            mt_check_destroy(&c);
            MT_TRY(status);
        }
    return MT_OK;
}

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

static mt_status swiglu_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    if (c->experts == DENSE) return mt_swiglu(tape, &out[0], in[0], NULL);
    mt_ragged ragged;
    MT_TRY(ragged_make(tape, &ragged, &routings[c->experts], (int64_t[]){ 1, 1, 1 }));
    MT_TRY(mt_swiglu(tape, &out[0], in[0], &ragged));
    ragged_release(tape, &ragged);
    return MT_OK;
}

static mt_status swiglu_setup(check *c, int variant)
{
    bool dense = variant == DENSE;
    snprintf(c->name, sizeof c->name, "%s", dense ? "dense" : routings[variant].name);
    c->experts = variant, c->forward = swiglu_forward;
    c->valid_rows = dense ? -1 : used_rows(&routings[variant]);
    return mt_check_input(c, dense ? 5 : routings[variant].rows, 6);
}

static mt_status swiglu_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "swiglu", swiglu_setup, LINEAR_ROUTINGS, 0);
}

/* ---- cross-entropy --------------------------------------------------------------------------- */

static mt_status loss_forward(mt_tape *tape, check *c, mt_value *const *in, mt_value **out)
{
    return mt_cross_entropy(tape, &out[0], in[0], c->tokens, c->scale);
}

static mt_status loss_setup(check *c, int variant)
{
    static const int32_t targets[2][6] = { { 3, 0, -100, 8, 2, -100 },
                                           { -100, -100, -100, -100, -100, 1 } };
    static const double scale = 0.25;
    memcpy(c->tokens, targets[variant], sizeof targets[variant]);
    snprintf(c->name, sizeof c->name, variant ? "one target" : "ignored targets");
    c->scale = &scale, c->forward = loss_forward;
    return mt_check_input(c, 6, 9);
}

static mt_status loss_cases(const mt_check_session *s)
{
    return mt_check_variants(s, "cross_entropy", loss_setup, 2, 0);
}

/* ---- the table ------------------------------------------------------------------------------- */

static const struct {
    const mt_op *op;
    mt_status (*run)(const mt_check_session *s);
} cases[] = {
    { &mt_op_embedding, embedding_cases },        { &mt_op_residual_add, add_cases },
    { &mt_op_slice_rows, slice_cases },           { &mt_op_rmsnorm, rmsnorm_cases },
    { &mt_op_qk_norm_rope, mt_check_rope_cases }, { &mt_op_attention, mt_check_attention_cases },
    { &mt_op_grouped_linear, linear_cases },      { &mt_op_grouped_linear, down_cases },
    { &mt_op_grouped_linear, quantized_cases },   { &mt_op_swiglu, swiglu_cases },
    { &mt_op_router, mt_check_router_cases },     { &mt_op_gather, mt_check_gather_cases },
    { &mt_op_combine, mt_check_combine_cases },   { &mt_op_dispatch, mt_check_dispatch_cases },
    { &mt_op_collect, mt_check_collect_cases },   { &mt_op_cross_entropy, loss_cases },
};
enum { CASES = sizeof cases / sizeof *cases };

mt_status mt_gradcheck_ops(mt_device *device, const char *glob, mt_gradcheck_report report,
                           void *context, int64_t *failed)
{
    mt_check_session s = { device, report, context, failed };
    for (int i = 0; i < mt_layer_op_count; i++) {
        const mt_op *op = mt_layer_ops[i];
        if (glob && fnmatch(glob, op->name, 0) != 0) continue;
        int found = 0;
        for (int j = 0; j < CASES; j++) {
            if (cases[j].op != op) continue;
            MT_TRY(cases[j].run(&s));
            found++;
        }
        MT_REQUIRE(found, MT_EINTERNAL, "gradcheck: differentiable op %s has no case", op->name);
    }
    return MT_OK;
}
