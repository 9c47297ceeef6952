/* What the plan says of a rank is what the rank takes, at 1, 2 and 4 ranks. */
#include "tests/dist/ranks.h"

#include "dist/mesh.h"
#include "train/plan.h"
#include "train/statistics.h"

static mt_config base_config(void)
{
    const mt_architecture *architecture = NULL;
    mt_config c;
    if (mt_config_defaults(&c) != MT_OK) abort();
    if (mt_architecture_find(&architecture, "qwen3_moe") != MT_OK) abort();
    mt_model_config *m = &c.trainer.model;
    mt_model_config_defaults(m, architecture);
    m->vocab_size = 211, m->hidden_size = 64, m->num_hidden_layers = 3, m->num_attention_heads = 4;
    m->num_key_value_heads = 2, m->head_dim = 16, m->moe_intermediate_size = 72;
    m->num_experts = 5, m->num_experts_per_tok = 2, m->max_position_embeddings = 16;
    c.trainer.batch_size = 8, c.trainer.micro_batch_size = 2, c.trainer.sequence_length = 16;
    c.trainer.steps = 4;
    snprintf(c.device, sizeof c.device, "%s", on_gpus() ? "cuda" : "cpu");
    return c;
}

/* 5 % is the promise of all together; by purpose they are equal, since data decides nothing. The
 * kernels' scratch is left out. On GPUs the world keeps its scratch from one case to the next:
 * there only the promise is held. */
static mt_status check_peaks(const char *what, const mt_plan *plan, const mt_device *device,
                             double before)
{
    double planned = 0, taken = 0;
    for (int i = 0; i < MT_MEMORY_COUNT; i++) {
        if (i == MT_MEMORY_WORKSPACE) continue;
        planned += (double)plan->peak[i], taken += (double)device->peak[i];
    }
    rank_check(planned <= 1.05 * taken && taken <= 1.05 * planned + before,
               "%s: %.0f bytes, planned were %.0f beside %.0f", what, taken, planned, before);
    if (on_gpus()) return MT_OK;
    for (int i = 0; i < MT_MEMORY_COUNT; i++)
        if (i != MT_MEMORY_WORKSPACE)
            rank_check(plan->peak[i] == device->peak[i], "%s: %lld bytes of %s, planned were %lld",
                       what, (long long)device->peak[i], mt_memory_name((mt_memory)i),
                       (long long)plan->peak[i]);
    return MT_OK;
}

/* As a run does. */
static mt_status run(mt_trainer *trainer, const mt_config *config)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    mt_statistics *statistics;
    mt_step_result result;
    int32_t tokens[256] = { 0 };
    double loss;
    int64_t counted;
    mt_status status = MT_OK;
    for (int i = 0; i < 256; i++) tokens[i] = i * 7919 % 211;
    rank_check(c->batch_size * c->sequence_length <= 256, "no room for a batch");
    MT_TRY(mt_statistics_create(&statistics, trainer, config, NULL, "."));
    for (int64_t i = 0; i < c->steps; i++) {
        MT_TRY_CLEANUP(mt_statistics_begin(statistics, i + 1));
        MT_TRY_CLEANUP(mt_trainer_step(trainer, tokens, tokens, &result));
        MT_TRY_CLEANUP(mt_statistics_end(statistics));
    }
    if (*config->valid_corpus)
        MT_TRY_CLEANUP(mt_trainer_check_weights(mt_trainer_model(trainer), c->comm));
    if (*config->valid_corpus)
        status = mt_trainer_eval(trainer, tokens, tokens, c->micro_batch_size, &loss, &counted);
cleanup:
    mt_statistics_destroy(&statistics);
    return status;
}

static mt_status check(mt_comm *comm, const char *what, const mt_config *config)
{
    mt_plan plan;
    mt_trainer *trainer = NULL;
    mt_trainer_config c = config->trainer;
    mt_status status = MT_OK;
    double before = 0; /* what the world has kept */
    for (int i = 0; i < MT_MEMORY_COUNT; i++) {
        before += (double)rank_device->bytes[i];
        rank_device->peak[i] = rank_device->bytes[i];
    }
    MT_TRY(mt_ranks_share(&c, comm));
    MT_TRY_CLEANUP(mt_plan_make(&plan, config, mt_comm_rank(comm), mt_comm_size(comm)));
    MT_TRY_CLEANUP(mt_trainer_create(&trainer, rank_device, &c));
    MT_TRY_CLEANUP(run(trainer, config));
    MT_TRY_CLEANUP(check_peaks(what, &plan, rank_device, before));
cleanup:
    mt_trainer_destroy(&trainer);
    return status;
}

/* Blocks that had no room for what was routed have grown; at most to that for any routing. */
static mt_status grown(mt_comm *comm)
{
    mt_config c = base_config(), any;
    mt_plan first, most;
    mt_trainer *trainer;
    double taken = 0, least = 0, limit = 0;
    c.trainer.expert_parallel = mt_comm_size(comm), c.trainer.model.num_experts = 8;
    c.trainer.expert_capacity = 0.25;
    any = c, any.trainer.expert_capacity = 0;
    MT_TRY(mt_plan_make(&first, &c, mt_comm_rank(comm), mt_comm_size(comm)));
    MT_TRY(mt_plan_make(&most, &any, mt_comm_rank(comm), mt_comm_size(comm)));
    for (int i = 0; i < MT_MEMORY_COUNT; i++) rank_device->peak[i] = rank_device->bytes[i];
    MT_TRY(mt_ranks_share(&c.trainer, comm));
    MT_TRY(mt_trainer_create(&trainer, rank_device, &c.trainer));
    mt_status status = run(trainer, &c);
    mt_trainer_destroy(&trainer);
    MT_TRY(status);
    for (int i = 0; i < MT_MEMORY_COUNT; i++) {
        if (i == MT_MEMORY_WORKSPACE) continue;
        taken += (double)rank_device->peak[i];
        least += (double)first.peak[i], limit += (double)most.peak[i];
    }
    rank_check(on_gpus() || (least < taken && taken <= limit),
               "%.0f bytes, planned were %.0f to %.0f", taken, least, limit);
    return MT_OK;
}

static mt_status planned(mt_comm *comm)
{
    mt_config c = base_config();
    MT_TRY(mt_comm_agree(comm, MT_OK,
                         "the start")); /* as in every run; GPUs have their staging then */
    MT_TRY(check(comm, "f32", &c));
    snprintf(c.valid_corpus, sizeof c.valid_corpus, "v.h5");
    c.trainer.dtype = MT_BF16;
    MT_TRY(check(comm, "bf16, evaluated", &c));
    c.trainer.reduce_bf16 = true, c.trainer.grad_dtype = MT_BF16;
    MT_TRY(check(comm, "gradients in bf16", &c));
    c = base_config();
    c.trainer.keep_gathered = true;
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "mxfp8; layers=*experts* nvfp4");
    MT_TRY(check(comm, "mxfp8 and nvfp4, units kept", &c));
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "nvfp4; steps=3.. none");
    MT_TRY(check(comm, "the last step without codes", &c));
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "mxfp8; layers=*experts* nvfp4");
    c.trainer.optim.master = MT_MASTER_SPLIT, c.trainer.optim.moments = MT_MOMENTS_FP8;
    c.trainer.recompute = MT_RECOMPUTE_BLOCK, c.trainer.defer_wgrad = true;
    MT_TRY(check(comm, "split masters, fp8 moments, recomputed blocks", &c));
    c.trainer.expert_parallel = mt_comm_size(comm), c.trainer.model.num_experts = 8;
    MT_TRY(check(comm, "the same, experts over all ranks", &c));
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe,
             "mxfp8 wgrad=mxfp8:source=dequantized; layers=*lm_head* bf16");
    MT_TRY(check(comm, "the same, rows to experts and back as codes", &c));
    c.statistics_every = 3, c.trainer.expert_capacity = 1.75;
    MT_TRY(check(comm, "the same, with statistics", &c));
    c.statistics_every = 1;
    MT_TRY(check(comm, "the same, with statistics of every step", &c));
    c.statistics_every = 0, c.trainer.expert_capacity = base_config().trainer.expert_capacity;
    c.trainer.recompute = MT_RECOMPUTE_NONE, c.trainer.defer_wgrad = false;
    c.trainer.dtype = MT_BF16;
    snprintf(c.valid_corpus, sizeof c.valid_corpus, "v.h5");
    MT_TRY(check(comm, "rows to experts and back as codes, evaluated", &c));
    c = base_config();
    c.trainer.model.tie_word_embeddings = true, c.trainer.offload = true;
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "fp8_delayed");
    MT_TRY(check(comm, "tied, offloaded", &c));
    c.trainer.optim.offload = true;
    return check(comm, "optimizer state in the host's memory", &c);
}

static const rank_case cases[] = { { "planned", planned }, { "grown", grown } };

static void test_alone(void **state)
{
    (void)state;
    if (on_gpus()) skip();
    mt_launch launch = { .world = 1, .launcher = "" };
    mt_comm *comm;
    rank_device = test_device();
    assert_ok(mt_comm_open(&comm, &launch, NULL));
    assert_ok(planned(comm));
    mt_comm_close(&comm);
}

/* Of a GPU that is not here, and of more ranks than there are: the shards shrink, the whole does
 * not; what has to be here for a pass does not shrink. */
static void test_elsewhere(void **state)
{
    (void)state;
    mt_config c = base_config();
    mt_plan one, four, many, spread;
    snprintf(c.device, sizeof c.device, "cuda");
    c.trainer.batch_size = 16, c.trainer.micro_batch_size = 1, c.trainer.model.num_experts = 6;
    assert_ok(mt_plan_make(&one, &c, 0, 1));
    assert_ok(mt_plan_make(&four, &c, 3, 4));
    assert_ok(mt_plan_make(&many, &c, 15, 16));
    assert_true(one.gpu && many.gpu);
    assert_int_equal(one.parameters, many.parameters);
    assert_in_range(four.peak[MT_MEMORY_MASTER], one.peak[MT_MEMORY_MASTER] / 4,
                    one.peak[MT_MEMORY_MASTER] / 3);
    assert_true(many.peak[MT_MEMORY_MOMENTS] < four.peak[MT_MEMORY_MOMENTS]);
    c.trainer.expert_parallel = 2;
    assert_ok(mt_plan_make(&spread, &c, 3, 4));
    c.trainer.expert_parallel = 1;
    assert_int_equal(spread.parameters, one.parameters);
    assert_int_equal(spread.active_parameters, one.active_parameters);
    assert_true(spread.peak[MT_MEMORY_COMPUTE] < four.peak[MT_MEMORY_COMPUTE]);
    assert_int_equal(four.peak[MT_MEMORY_ACTIVATIONS], many.peak[MT_MEMORY_ACTIVATIONS]);
    /* staging and scratch over NCCL */
    assert_true(four.peak[MT_MEMORY_STATE] > one.peak[MT_MEMORY_STATE]);
    assert_fails(mt_plan_make(&one, &c, 0, 3), MT_ECONFIG, "2 or 4 as the number of ranks");
    /* weights are gathered as the recipe of a later step has them */
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "nvfp4");
    assert_ok(mt_plan_make(&four, &c, 3, 4));
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "nvfp4; steps=3.. none");
    assert_ok(mt_plan_make(&many, &c, 3, 4));
    assert_true(many.peak[MT_MEMORY_COMPUTE] > 2 * four.peak[MT_MEMORY_COMPUTE]);
}

/* Eight neighbours are on a host: which parts of a mesh are, and so reach each other's memory. */
static void test_hosts(void **state)
{
    static const struct {
        int ranks, rank, degree;
        bool world, row, column;
    } grids[] = {
        { 8, 3, 2, true, true, true },     { 8, 3, 8, true, true, false },
        { 16, 9, 1, false, false, false }, { 16, 9, 2, false, true, false },
        { 16, 9, 8, false, true, false },  { 32, 9, 16, false, false, false },
        { 24, 10, 3, false, true, false }, { 24, 8, 3, false, false, false },
        { 12, 11, 4, false, true, false }, { 12, 1, 6, false, true, false },
    };
    enum { GRIDS = sizeof grids / sizeof grids[0], BYTES = 64 << 20 };
    mt_device *device;
    (void)state;
    assert_ok(mt_device_open(&device, "plan", "cuda", 0));
    for (int i = 0; i < GRIDS; i++) {
        mt_comm *world;
        mt_mesh mesh;
        assert_ok(mt_comm_open_plan(&world, device, grids[i].rank, grids[i].ranks, true));
        assert_ok(mt_mesh_create(&mesh, world, grids[i].degree));
        assert_int_equal(mt_comm_reaches(world, world, BYTES), grids[i].world);
        assert_int_equal(mt_comm_reaches(mesh.experts, world, BYTES), grids[i].row);
        assert_int_equal(mt_comm_reaches(mesh.replicas, world, BYTES), grids[i].column);
        mt_mesh_destroy(&mesh);
        mt_comm_close(&world);
    }
    mt_device_destroy(&device);
}

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1) return rank_main(cases, 2, argv[1], on_gpus() ? 60 : 20);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone),         RANKS_TEST(on_two_and_four, "planned"),
        RANKS_TEST(on_two_and_four, "grown"), cmocka_unit_test(test_elsewhere),
        cmocka_unit_test(test_hosts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
