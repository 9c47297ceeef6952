/* Experts over ranks: training against one rank, steps that begin again, meshes, what is refused.
 */
#include "tests/dist/copies.h"
#include "tests/dist/training.h"

#include <math.h>

#include "layers/functional.h"
#include "layers/moe.h"

static mt_trainer_config config_of(mt_dtype dtype, const char *recipe)
{
    return small_config(dtype, recipe, 8, 3);
}

typedef struct history {
    mt_step_result step[STEPS];
    double validation;
} history;

static mt_status steps(mt_trainer *t, history *h)
{
    const mt_trainer_config *c = mt_trainer_get_config(t);
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    int64_t counted;
    for (int s = 0; s < STEPS; s++) {
        draw_batch(c, s % 4, tokens, targets);
        MT_TRY(mt_trainer_step(t, tokens, targets, &h->step[s]));
    }
    return mt_trainer_eval(t, tokens, targets, BATCH, &h->validation, &counted);
}

static mt_status train(const mt_trainer_config *c, history *h)
{
    mt_trainer *t;
    memset(h, 0, sizeof *h);
    MT_TRY(mt_trainer_create(&t, rank_device, c));
    mt_status status = steps(t, h);
    mt_trainer_destroy(&t);
    return status;
}

static mt_status close_to(const char *what, int step, double got, double want, double limit)
{
    rank_check(fabs(got - want) <= limit * fabs(want), "step %d: %s is %.17g, on one rank %.17g",
               step, what, got, want);
    return MT_OK;
}

/* `limit`: relative; gradient norms ten times that. */
static mt_status close_histories(const history *many, const history *one, double limit)
{
    for (int s = 0; s < STEPS; s++) {
        const mt_step_result *a = &many->step[s], *b = &one->step[s];
        MT_TRY(close_to("loss", s, a->loss, b->loss, limit));
        MT_TRY(close_to("aux loss", s, a->aux_loss, b->aux_loss, limit));
        MT_TRY(close_to("z loss", s, a->z_loss, b->z_loss, limit));
        MT_TRY(close_to("gradient norm", s, a->grad_norm, b->grad_norm, 10 * limit));
        rank_check(a->max_vio == b->max_vio && a->dropped == b->dropped,
                   "step %d: max_vio %g, dropped %lld, on one rank %g, %lld", s, a->max_vio,
                   (long long)a->dropped, b->max_vio, (long long)b->dropped);
    }
    rank_check(one->step[STEPS - 1].loss < one->step[0].loss - 0.2, "nothing was learned");
    return close_to("validation", STEPS, many->validation, one->validation, 10 * limit);
}

/* The same numbers, whatever was begun again. */
static mt_status same_histories(const char *what, const history *a, const history *b)
{
    for (int s = 0; s < STEPS; s++) {
        mt_step_result x = a->step[s], y = b->step[s];
        x.voided = y.voided = 0;
        rank_check(!memcmp(&x, &y, sizeof x),
                   "%s: step %d: loss %.17g and %.17g, gradient norm %.17g and %.17g", what, s,
                   x.loss, y.loss, x.grad_norm, y.grad_norm);
    }
    rank_check(a->validation == b->validation, "%s: validation %.17g and %.17g", what,
               a->validation, b->validation);
    return MT_OK;
}

/* Degrees that so many ranks can have: 1, 2, 4. */
static mt_status training(mt_comm *comm)
{
    static history one, many, again;
    mt_trainer_config c = config_of(MT_F64, "none");
    MT_TRY(train(&c, &one));
    c.comm = comm;
    for (c.expert_parallel = 1; c.expert_parallel <= mt_comm_size(comm); c.expert_parallel *= 2) {
        MT_TRY(train(&c, &many));
        MT_TRY(close_histories(&many, &one, 1e-12));
        c.defer_wgrad = true, c.recompute = MT_RECOMPUTE_BLOCK, c.keep_gathered = true;
        MT_TRY(train(&c, &again));
        MT_TRY(same_histories("deferred, recomputed, kept", &many, &again));
        c.defer_wgrad = false, c.recompute = MT_RECOMPUTE_NONE, c.keep_gathered = false;
    }
    return MT_OK;
}

/* ---- one layer ---------------------------------------------------------------------------------
 */

enum { T = 24, D = 24, F = 16, EXPERTS = 8, TOP_K = 3 }; /* T: tokens of a rank */

typedef struct layer {
    mt_param_store *store;
    mt_param *router;
    mt_moe_layer moe;
    mt_exchange *exchange;
} layer;

static void layer_destroy(layer *l)
{
    mt_exchange_destroy(&l->exchange);
    mt_param_store_destroy(&l->store);
}

/* All experts, or, with ranks, this rank's; lonely: every token goes to the first ones. */
static mt_status layer_create(layer *l, mt_comm *comm, mt_dtype compute, bool lonely)
{
    mt_dtype real = mt_dtype_wide(compute);
    int64_t ranks = comm ? mt_comm_size(comm) : 1, here = EXPERTS / ranks;
    mt_param_spec specs[3] = {
        { .name = "gate", .members = 1, .m = EXPERTS, .k = D, .init_std = 1 },
        { .name = "gate_up", .members = here, .m = 2 * F, .k = D, .packed = true, .init_std = 0.3 },
        { .name = "down", .members = here, .m = D, .k = F, .packed = true, .init_std = 0.3 },
    };
    mt_param *p[3];
    *l = (layer){ 0 };
    MT_TRY(mt_param_store_create(&l->store, rank_device, real, compute));
    for (int i = 0; i < 3; i++) {
        specs[i].init = MT_INIT_NORMAL;
        if (i) specs[i].all_members = EXPERTS;
        if (i && comm) specs[i].first_member = mt_comm_rank(comm) * here;
        if (i == 1) mt_param_store_next_unit(l->store);
        MT_TRY(mt_param_store_add(l->store, &p[i], &specs[i]));
        if (i) MT_TRY(mt_linear_reserve(p[i], rank_device, NULL));
    }
    MT_TRY(mt_param_store_allocate(l->store, true));
    MT_TRY(mt_param_store_init(l->store, 3));
    double chosen[EXPERTS * D];
    for (int i = 0; i < EXPERTS * D; i++)
        mt_store_f64(chosen, real, i, i / D < TOP_K ? 1 + i / D : -1 - i / D);
    if (lonely) MT_TRY(mt_param_write_master(l->store, p[0], 0, EXPERTS * D, chosen));
    mt_stream stream = { rank_device, NULL };
    for (int i = 1; i < 3; i++) {
        MT_TRY(mt_linear_place(p[i], rank_device));
        MT_TRY(mt_linear_refresh(p[i], &stream));
    }
    if (comm)
        MT_TRY(mt_exchange_create(
            &l->exchange, rank_device, comm,
            &(mt_exchange_options){ .experts = EXPERTS, .top_k = TOP_K, .tokens = T }));
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
} outcome;

static void outcome_free(outcome *o)
{
    free(o->y), free(o->dx);
    for (int i = 0; i < 3; i++) free(o->grads[i]);
}

static mt_status fetch(double **to, const void *from, mt_dtype dtype, int64_t count)
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

/* Draws of tokens [first, first + tokens) of `what`, positive where lonely, on the device. */
static mt_status draw_rows(void **p, mt_dtype dtype, int64_t first, int64_t tokens, uint32_t what,
                           bool positive)
{
    size_t bytes = (size_t)(tokens * D) * mt_dtype_size(dtype);
    void *host = malloc(bytes);
    rank_check(host, "no memory");
    for (int64_t i = 0; i < tokens * D; i++) {
        double x = mt_rng_normal(17, what, (uint64_t)(first * D + i));
        mt_store_f64(host, dtype, i, positive ? fabs(x) : x);
    }
    *p = NULL;
    mt_status status = mt_device_alloc(rank_device, p, bytes, MT_MEMORY_STATE);
    if (status == MT_OK) status = mt_device_copy(rank_device, *p, host, bytes);
    free(host);
    return status;
}

static mt_status pass(mt_tape *tape, outcome *o, const layer *l, mt_dtype dtype, int64_t first,
                      int64_t tokens, bool lonely)
{
    void *x, *dy;
    mt_value *in, *y;
    mt_routing routing;
    MT_TRY(draw_rows(&x, dtype, first, tokens, 1, lonely));
    MT_TRY(draw_rows(&dy, dtype, first, tokens, 2, false));
    MT_TRY(mt_tape_begin(tape, 1, true));
    MT_TRY(mt_tape_input(tape, &in, mt_tensor_2d(x, dtype, tokens, D), true));
    MT_TRY(mt_moe_forward(tape, &y, &routing, in, &l->moe, "moe"));
    MT_TRY(fetch(&o->y, y->data.data, dtype, tokens * D));
    MT_TRY(mt_tape_seed_tensor(tape, y, mt_tensor_2d(dy, dtype, tokens, D)));
    mt_value_release(tape, &y);
    mt_routing_release(tape, &routing);
    MT_TRY(mt_tape_backward(tape));
    MT_TRY(mt_tape_run_deferred(tape));
    MT_TRY(fetch(&o->dx, mt_value_grad(in).data, dtype, tokens * D));
    for (int i = 0; i < 3; i++) {
        const mt_param *p = mt_param_store_get(l->store, i);
        MT_TRY(fetch(&o->grads[i], p->grad, p->grad_dtype, mt_param_count(p)));
    }
    mt_value_release(tape, &in);
    MT_TRY(mt_tape_end(tape));
    size_t bytes = (size_t)(tokens * D) * mt_dtype_size(dtype);
    mt_device_free(rank_device, &x, bytes, MT_MEMORY_STATE);
    mt_device_free(rank_device, &dy, bytes, MT_MEMORY_STATE);
    return MT_OK;
}

static mt_status run_layer(outcome *o, mt_comm *comm, mt_dtype dtype, int64_t first, int64_t tokens,
                           bool defer, bool lonely)
{
    layer l;
    mt_tape *tape;
    mt_stream stream = { rank_device, NULL };
    *o = (outcome){ 0 };
    MT_TRY(layer_create(&l, comm, dtype, lonely));
    MT_TRY(mt_tape_create(&tape, &stream, &(mt_tape_options){ .defer_wgrad = defer }));
    MT_TRY(pass(tape, o, &l, dtype, first, tokens, lonely));
    mt_tape_destroy(&tape);
    layer_destroy(&l);
    return MT_OK;
}

/* On the CPU to the bit: each row is computed by itself, and each weight's gradient from the same
 * rows in the same order. A GPU may choose other kernels for other shapes. */
static mt_status same_values(const char *what, const double *a, const double *b, int64_t count)
{
    double most = 0, limit = on_gpus() ? 1e-13 : 0;
    for (int64_t i = 0; i < count; i++) most = fmax(most, fabs(b[i]));
    for (int64_t i = 0; i < count; i++)
        rank_check(fabs(a[i] - b[i]) <= limit * most,
                   "%s: element %lld is %.17g, on one rank %.17g", what, (long long)i, a[i], b[i]);
    rank_check(most > 0, "%s is all zero", what);
    return MT_OK;
}

static mt_status compare_layer(mt_comm *comm, mt_dtype dtype, bool defer, bool lonely)
{
    outcome one, many;
    int64_t ranks = mt_comm_size(comm), rank = mt_comm_rank(comm), here = EXPERTS / ranks;
    int64_t counts[3] = { EXPERTS * D, here * 2 * F * D, here * D * F };
    MT_TRY(run_layer(&one, NULL, dtype, 0, ranks * T, defer, lonely));
    MT_TRY(run_layer(&many, comm, dtype, rank * T, T, defer, lonely));
    MT_TRY(same_values("y", many.y, one.y + rank * T * D, T * D));
    MT_TRY(same_values("dx", many.dx, one.dx + rank * T * D, T * D));
    for (int64_t i = 0; i < 2 * here; i++) {
        int w = 1 + (int)(i % 2);
        int64_t each = counts[w] / here, at = i / 2 * each;
        bool used = !lonely || rank * here + i / 2 < TOP_K;
        if (used)
            MT_TRY(same_values(w == 1 ? "dW gate_up" : "dW down", many.grads[w] + at,
                               one.grads[w] + rank * counts[w] + at, each));
        for (int64_t j = 0; !used && j < each; j++)
            rank_check(many.grads[w][at + j] == 0, "an expert without tokens has a gradient");
    }
    MT_TRY(mt_comm_all_reduce(comm, NULL, many.grads[0], counts[0], MT_F64, MT_REDUCE_SUM,
                              "the router's gradient"));
    double limit = dtype == MT_F64 ? 1e-13 : 1e-5, most = 1e-3;
    for (int64_t j = 0; j < counts[0]; j++) most = fmax(most, fabs(one.grads[0][j]));
    for (int64_t j = 0; j < counts[0]; j++)
        rank_check(fabs(many.grads[0][j] - one.grads[0][j]) <= limit * most,
                   "router: element %lld is %.17g, on one rank %.17g", (long long)j,
                   many.grads[0][j], one.grads[0][j]);
    outcome_free(&one), outcome_free(&many);
    return MT_OK;
}

static mt_status one_layer(mt_comm *comm)
{
    static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    for (int i = 0; i < (on_gpus() ? 1 : 3); i++)
        for (int variant = 0; variant < 4; variant++)
            MT_TRY(compare_layer(comm, dtypes[i], variant & 1, variant & 2));
    return MT_OK;
}

/* ---- steps that begin again --------------------------------------------------------------------
 */

static void mix(uint64_t *hash, const void *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        *hash = (*hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
}

static mt_status mix_device(uint64_t *hash, const void *p, size_t bytes)
{
    void *host = malloc(bytes + 1);
    rank_check(host, "no memory");
    mt_status status = bytes ? mt_device_copy(rank_device, host, p, bytes) : MT_OK;
    mix(hash, host, bytes);
    free(host);
    return status;
}

/* Everything that a step leaves behind on this rank. */
static mt_status fingerprint(uint64_t *hash, mt_trainer *t)
{
    mt_model *model = mt_trainer_model(t);
    mt_param_store *store = mt_model_params(model);
    const mt_precision *p = mt_model_precision(model);
    mt_optimizer *o = mt_trainer_optimizer(t);
    const mt_model_config *c = &mt_trainer_get_config(t)->model;
    size_t flat = (size_t)mt_param_store_elements(store) *
                  mt_dtype_size(mt_dtype_wide(mt_trainer_get_config(t)->dtype));
    mt_tensor nans = mt_precision_nans(p);
    char name[256];
    *hash = 0xcbf29ce484222325u;
    MT_TRY(mix_device(hash, mt_param_store_master(store), flat));
    MT_TRY(mix_device(hash, mt_optimizer_m(o), flat));
    MT_TRY(mix_device(hash, mt_optimizer_v(o), flat));
    MT_TRY(mix_device(hash, mt_optimizer_state(o), sizeof(struct mt_step_state)));
    MT_TRY(mix_device(hash, nans.data, mt_tensor_bytes(&nans)));
    for (int64_t i = 0; i < mt_precision_state_count(p); i++) {
        mt_tensor state = mt_precision_state(p, i, name);
        MT_TRY(mix_device(hash, state.data, mt_tensor_bytes(&state)));
    }
    for (int64_t i = 0; i < mt_model_moe_layers(model); i++)
        MT_TRY(mix_device(hash, mt_model_router_bias(model, i),
                          (size_t)c->num_experts * sizeof(float)));
    return MT_OK;
}

/* A run with blocks of so many mean loads; the first evaluation comes before any step. */
static mt_status run_with_room(const mt_trainer_config *config, double capacity, history *h,
                               double *first, uint64_t *hash, int64_t *voided)
{
    mt_trainer_config c = *config;
    mt_trainer *t;
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    int64_t counted;
    c.expert_capacity = capacity;
    memset(h, 0, sizeof *h);
    draw_batch(&c, 9, tokens, targets);
    MT_TRY(mt_trainer_create(&t, rank_device, &c));
    MT_TRY(mt_trainer_eval(t, tokens, targets, 1, first, &counted));
    mt_trainer_destroy(&t);
    MT_TRY(mt_trainer_create(&t, rank_device, &c));
    MT_TRY(steps(t, h));
    MT_TRY(fingerprint(hash, t));
    mt_trainer_destroy(&t);
    *voided = 0;
    for (int s = 0; s < STEPS; s++) *voided += h->step[s].voided;
    return MT_OK;
}

static mt_status overflow(mt_comm *comm)
{
    static const char *const recipes[] = { "none", "fp8_delayed", "nvfp4; steps=10.. mxfp8" };
    static history roomy, tight;
    for (int i = 0; i < 3; i++) {
        mt_trainer_config c = config_of(i ? MT_BF16 : MT_F64, recipes[i]);
        uint64_t hashes[2];
        double first[2];
        int64_t voided[2];
        c.comm = comm, c.expert_parallel = i == 2 ? 2 : mt_comm_size(comm);
        c.model.capacity_factor = i == 1 ? 1.5 : 0; /* rows that are dropped, beside */
        c.recompute = i == 1 ? MT_RECOMPUTE_BLOCK : MT_RECOMPUTE_NONE;
        c.defer_wgrad = i == 2;
        MT_TRY(run_with_room(&c, 0, &roomy, &first[0], &hashes[0], &voided[0]));
        MT_TRY(run_with_room(&c, 0.3, &tight, &first[1], &hashes[1], &voided[1]));
        rank_check(voided[0] == 0 && voided[1] > 0, "%s: %lld and %lld steps were void", c.recipe,
                   (long long)voided[0], (long long)voided[1]);
        rank_check(tight.step[0].voided > 0, "the first step had room");
        MT_TRY(same_histories(c.recipe, &roomy, &tight));
        rank_check(first[0] == first[1], "%s: a first evaluation of %.17g and %.17g", c.recipe,
                   first[0], first[1]);
        rank_check(hashes[0] == hashes[1], "%s: a void step has left a trace", c.recipe);
    }
    return MT_OK;
}

/* ---- recipes -----------------------------------------------------------------------------------
 */

static mt_status same_bytes(const char *what, const void *a, const void *b, size_t bytes)
{
    unsigned char *x = malloc(2 * bytes + 1);
    rank_check(x, "no memory");
    mt_status status = mt_device_copy(rank_device, x, a, bytes);
    if (status == MT_OK) status = mt_device_copy(rank_device, x + bytes, b, bytes);
    if (status == MT_OK && memcmp(x, x + bytes, bytes) != 0)
        status = MT_FAIL(MT_EINTERNAL, "%s differ from one rank's", what);
    free(x);
    return status;
}

/* A direction of a weight of which p has some members and q all. */
static mt_status same_members(const mt_param *p, const mt_direction *b, mt_dir dir)
{
    const mt_direction *a = &p->weight.dir[dir];
    const mt_group *g = &p->group;
    rank_check(a->layout == b->layout, "%s: another layout", p->name);
    size_t codes = mt_direction_code_bytes(a, dir, g), scales = mt_direction_scale_bytes(a, dir, g);
    if (a->layout == MT_LAYOUT_PACKED) {
        codes =
            rank_device->kernels[p->compute]->packed_bytes(p->compute, dir, g->members, g->m, g->k);
        scales = 0;
    }
    size_t before = (size_t)p->first_member, n = (size_t)g->members;
    MT_TRY(same_bytes("codes", a->codes, (char *)b->codes + before * (codes / n), codes));
    if (scales)
        MT_TRY(same_bytes("scales", a->scales, (char *)b->scales + before * (scales / n), scales));
    return a->format->second_level
               ? same_bytes("amaxes", a->amax, b->amax + before, n * sizeof *a->amax)
               : MT_OK;
}

/* What a rank's experts are multiplied by is what one rank has of them. */
static mt_status copies(mt_comm *comm)
{
    for (int i = 0; mt_recipe_preset(i); i++) {
        mt_trainer_config c = config_of(i % 2 ? MT_BF16 : MT_F32, mt_recipe_preset(i));
        mt_trainer *one, *many;
        MT_TRY(mt_trainer_create(&one, rank_device, &c));
        c.comm = comm, c.expert_parallel = 2;
        MT_TRY(mt_trainer_create(&many, rank_device, &c));
        mt_param_store *a = mt_model_params(mt_trainer_model(many));
        mt_param_store *b = mt_model_params(mt_trainer_model(one));
        int64_t some = 0;
        for (int64_t k = 0; k < mt_param_store_count(a); k++) {
            mt_param *p = mt_param_store_get(a, k), *q = mt_param_store_get(b, k);
            rank_check(!strcmp(p->name, q->name) && p->all_members == q->group.members, "%s",
                       p->name);
            some += p->group.members < p->all_members;
            for (int d = 0; p->packed && d < MT_DIR_COUNT; d++) {
                MT_TRY(mt_param_need(p, (mt_dir)d));
                MT_TRY(same_as_one_rank(p, q, (mt_dir)d, same_members));
            }
        }
        rank_check(some == 4, "%lld weights are spread over ranks", (long long)some);
        mt_trainer_destroy(&many);
        mt_trainer_destroy(&one);
    }
    return MT_OK;
}

/* Scales of rows' blocks do not see who else's rows an expert has: the first loss is one rank's.
 * Whatever the recipe, a run is the same again. */
static mt_status recipes(mt_comm *comm)
{
    static history one, many, again;
    for (int i = 0; mt_recipe_preset(i); i++) {
        const char *recipe = mt_recipe_preset(i);
        mt_trainer_config c = config_of(MT_BF16, recipe);
        MT_TRY(train(&c, &one));
        c.comm = comm, c.expert_parallel = 2, c.expert_capacity = 2;
        MT_TRY(train(&c, &many));
        MT_TRY(train(&c, &again));
        MT_TRY(same_histories(recipe, &many, &again));
        bool rows = strstr(recipe, "mx") || !strcmp(recipe, "bf16");
        MT_TRY(close_to(recipe, 0, many.step[0].loss, one.step[0].loss, rows ? 1e-6 : 0.02));
        rank_check(many.step[STEPS - 1].loss < many.step[0].loss - 0.2, "nothing was learned");
    }
    return MT_OK;
}

/* ---- what cannot be ----------------------------------------------------------------------------
 */

static mt_status refused(const mt_trainer_config *c, const char *words)
{
    mt_trainer *t;
    mt_status status = mt_trainer_create(&t, rank_device, c);
    rank_check(status == MT_ECONFIG && strstr(mt_error_message(), words),
               "status %d, '%s', must say '%s'", (int)status, mt_error_message(), words);
    mt_error_clear();
    return MT_OK;
}

static mt_status refusals(mt_comm *comm)
{
    mt_trainer_config c = config_of(MT_F32, "none");
    c.expert_parallel = 2;
    MT_TRY(refused(&c, "must be 1 on one rank"));
    c.comm = comm, c.expert_parallel = 3;
    MT_TRY(refused(&c, "must divide the number of ranks"));
    c.expert_parallel = 2, c.model.num_experts = 7;
    MT_TRY(refused(&c, "must divide the number of experts, 7"));
    c.model.num_experts = 6, c.model.moe_intermediate_size = 7, c.model.hidden_size = 34;
    return refused(&c, "multiple of 128");
}

static const rank_case cases[] = {
    { "one_layer", one_layer }, { "training", training }, { "overflow", overflow },
    { "copies", copies },       { "recipes", recipes },   { "refusals", refusals },
};
enum { CASES = sizeof cases / sizeof cases[0] };

static void test_one_layer(void **state)
{
    (void)state;
    assert_two_and_four("one_layer");
}

static void test_training(void **state)
{
    (void)state;
    assert_two_and_four("training");
}

static void test_overflow(void **state)
{
    (void)state;
    assert_two_and_four("overflow");
}

static void test_copies(void **state)
{
    (void)state;
    assert_two_and_four("copies");
}

static void test_recipes(void **state)
{
    (void)state;
    assert_two_and_four("recipes");
}

static void test_refusals(void **state)
{
    (void)state;
    need_ranks(2);
    assert_ranks(2, "refusals");
}

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1) return rank_main(cases, CASES, argv[1], on_gpus() ? 60 : 20);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_layer), cmocka_unit_test(test_training),
        cmocka_unit_test(test_overflow),  cmocka_unit_test(test_copies),
        cmocka_unit_test(test_recipes),   cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
