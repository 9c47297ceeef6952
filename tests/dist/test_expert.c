/* Experts over ranks: training against one rank, steps that begin again, meshes, what is refused.
 */
#include "tests/dist/copies.h"
#include "tests/dist/history.h"
#include "tests/dist/moe_layer.h"

static mt_trainer_config config_of(mt_dtype dtype, const char *recipe)
{
    return small_config(dtype, recipe, 8, 3);
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

static mt_status train_alone(mt_comm *comm, const mt_trainer_config *c, history *h)
{
    return share_first(comm, mt_comm_rank(comm) ? MT_OK : train(c, h), h, sizeof *h);
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

/* Degrees that so many ranks can have: 1, 2, 4. */
static mt_status training(mt_comm *comm)
{
    static history one, many, again;
    mt_trainer_config c = config_of(MT_F64, "none");
    MT_TRY(train_alone(comm, &c, &one));
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
    layer_run run = { .dtype = dtype, .tokens = ranks * T, .defer = defer, .lonely = lonely };
    MT_TRY(run_layer_alone(comm, &one, &run));
    run.comm = comm, run.first = rank * T, run.tokens = T;
    MT_TRY(run_layer(&many, &run));
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
    static const char *const recipes[] = { "none", "fp8_delayed", "nvfp4; steps=6.. mxfp8" };
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

static mt_status look(void *context, const char *name, const mt_tensor *data)
{
    (void)context, (void)name, (void)data;
    return MT_OK;
}

/* Blocks of a step that somebody looks at have room for any routing: what they needed is no reason
 * for the next one to begin again. Nothing is learned, so that a batch needs the same each time. */
static mt_status looked_at(mt_comm *comm)
{
    mt_trainer_config c = config_of(MT_F32, "none");
    int32_t even[BATCH * SEQUENCE], uneven[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    mt_trainer *t;
    mt_step_result r;
    double sum;
    int64_t counted;
    c.comm = comm, c.expert_parallel = 2, c.optim.lr = 0, c.model.router_bias_update_rate = 0;
    c.expert_capacity = 0.1;
    draw_batch(&c, 0, even, targets);
    for (int i = 0; i < BATCH * SEQUENCE; i++) uneven[i] = 3;
    MT_TRY(mt_trainer_create(&t, rank_device, &c));
    for (int i = 0; i < 2; i++) MT_TRY(mt_trainer_step(t, even, targets, &r));
    rank_check(!r.voided, "a batch needs more room than it had");
    mt_tape_set_observer(mt_trainer_tape(t), look, NULL);
    MT_TRY(mt_trainer_step(t, uneven, targets, &r));
    rank_check(!r.voided, "a step is void that had room for all");
    MT_TRY(mt_trainer_eval(t, uneven, targets, 1, &sum, &counted));
    mt_tape_set_observer(mt_trainer_tape(t), NULL, NULL);
    MT_TRY(mt_trainer_step(t, even, targets, &r));
    rank_check(!r.voided, "the step after one that was looked at is void, for the other's rows");
    MT_TRY(mt_trainer_step(t, uneven, targets, &r));
    rank_check(r.voided == 1, "the other needs no more room");
    mt_trainer_destroy(&t);
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
        MT_TRY(train_alone(comm, &c, &one));
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
    { "looked_at", looked_at }, { "copies", copies },     { "recipes", recipes },
    { "refusals", refusals },
};
enum { CASES = sizeof cases / sizeof cases[0] };

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1) return rank_main(cases, CASES, argv[1], on_gpus() ? 60 : 20);
    const struct CMUnitTest tests[] = {
        RANKS_TEST(on_two_and_four, "one_layer"), RANKS_TEST(on_two_and_four, "training"),
        RANKS_TEST(on_two_and_four, "overflow"),  RANKS_TEST(on_two, "looked_at"),
        RANKS_TEST(on_two_and_four, "copies"),    RANKS_TEST(on_two_and_four, "recipes"),
        RANKS_TEST(on_two, "refusals"),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
