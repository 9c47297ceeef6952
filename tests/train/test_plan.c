/* plan: what it says a run needs is what the run takes. */
#include <time.h>

#include "tests/train/verbs.h"
#include "train/evaluate.h"
#include "train/plan.h"
#include "train/statistics.h"

static mt_config base_config(void)
{
    mt_config c;
    assert_ok(mt_config_defaults(&c));
    snprintf(c.name, sizeof c.name, "test");
    snprintf(c.device, sizeof c.device, "%s", test_device_name());
    c.trainer.model = small_model(false);
    c.trainer.batch_size = c.trainer.micro_batch_size = 4;
    c.trainer.sequence_length = 16;
    c.trainer.steps = 2;
    return c;
}

static void print_both(const char *what, const mt_plan *plan, const mt_device *device)
{
    print_message("%s: planned / measured bytes\n", what);
    for (int i = 0; i < MT_MEMORY_COUNT; i++)
        print_message("  %-16s %10lld / %10lld%s\n", mt_memory_name((mt_memory)i),
                      (long long)plan->peak[i], (long long)device->peak[i],
                      i == MT_MEMORY_WORKSPACE && !plan->gpu ? " (not planned)" : "");
}

/* Of the whole, kernels' scratch included where it is planned. */
static void check_total(const mt_plan *plan, const mt_device *device)
{
    double planned = 0, measured = 0;
    for (int i = 0; i < MT_MEMORY_COUNT; i++) {
        if (i == MT_MEMORY_WORKSPACE && !plan->gpu) continue;
        planned += (double)plan->peak[i], measured += (double)device->peak[i];
    }
    assert_true(planned >= 0.95 * measured && planned <= 1.05 * measured);
}

/* Both run the same passes; the plan is made without memory, the run on the tests' device with the
 * kernel set in use. The measured high-water mark is the device's own count of what was allocated
 * at once, first (recording) step included. 5 % is the promise; data decides nothing about sizes,
 * so they are equal. */
static void check_config(const char *what, const mt_config *config)
{
    mt_plan plan;
    mt_device *device;
    mt_trainer *trainer;
    assert_ok(mt_plan_make(&plan, config, 0, 1));
    assert_ok(mt_device_open(&device, config->device, NULL, 0));
    assert_ok(mt_trainer_create(&trainer, device, &config->trainer));
    assert_ok(mt_plan_passes(trainer, config));
    bool equal = true;
    for (int i = 0; i < MT_MEMORY_COUNT; i++)
        if (i != MT_MEMORY_WORKSPACE) equal = equal && plan.peak[i] == device->peak[i];
    const mt_tape *tape = mt_trainer_tape(trainer);
    int64_t slab = mt_arena_bytes(mt_tape_arena(tape)), floor = mt_arena_floor(mt_tape_arena(tape));
    if (!equal || plan.gpu) print_both(what, &plan, device);
    assert_true(equal);
    check_total(&plan, device);
    /* the slab of every later step lies within what was planned */
    assert_true(slab > 0 && floor <= slab && slab <= plan.peak[MT_MEMORY_ACTIVATIONS]);
    assert_int_equal(mt_arena_bytes(mt_tape_host_pool(tape)), plan.peak[MT_MEMORY_HOST_POOL]);
    mt_trainer_destroy(&trainer);
    mt_device_destroy(&device);
}

static void a_run_takes_what_was_planned(void **state)
{
    (void)state;
    mt_config c = base_config();
    check_config("f32", &c);
    snprintf(c.valid_corpus, sizeof c.valid_corpus, "v.h5");
    check_config("with an evaluation", &c);
    c.trainer.dtype = MT_BF16;
    check_config("bf16", &c);
    static const char *const recipes[] = { "mxfp8", "fp8_current", "fp8_block", "nvfp4" };
    for (int i = 0; i < 4; i++) {
        snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "%s", recipes[i]);
        check_config(recipes[i], &c);
    }
    c.trainer.optim.master = MT_MASTER_SPLIT;
    check_config("split masters under nvfp4", &c);
    *c.trainer.recipe = '\0';
    check_config("split masters", &c);
    c.trainer.optim.master = MT_MASTER_REAL;
    c.trainer.dtype = MT_F64;
    check_config("f64", &c);
    c = base_config();
    c.trainer.micro_batch_size = 1;
    check_config("micro-batches", &c);
    c.trainer.recompute = MT_RECOMPUTE_BLOCK;
    check_config("recompute block", &c);
    c.trainer.recompute = MT_RECOMPUTE_ACTIVATION;
    check_config("recompute activation", &c);
    c.trainer.offload = true;
    check_config("offload", &c);
    c.trainer.defer_wgrad = true;
    check_config("deferred wgrad", &c);
    c = base_config();
    c.trainer.model = small_model(true);
    c.trainer.model.capacity_factor = 1.25;
    check_config("tied, with a capacity", &c);
}

/* Of two micro-batches. */
static void evaluate(mt_trainer *trainer)
{
    const mt_trainer_config *c = mt_trainer_get_config(trainer);
    char text[256] = "", line[256];
    mt_corpus *corpus;
    mt_evaluation e;
    memset(text, '\t', (size_t)(2 * c->micro_batch_size * c->sequence_length + 1));
    put_text(in_dir("v.txt"), text);
    snprintf(line, sizeof line, "data pack %s -o %s", in_dir("v.txt"), in_dir("v.h5"));
    assert_verb(line, 0, "tokens");
    assert_ok(mt_corpus_open(&corpus, in_dir("v.h5")));
    assert_ok(mt_evaluate(&e, trainer, corpus, 0));
    mt_corpus_close(&corpus);
}

/* The steps of a run, in its order, and its last evaluation. */
static void check_steps(const mt_config *c)
{
    mt_plan plan;
    mt_device *device;
    mt_trainer *trainer;
    mt_statistics *statistics;
    mt_step_result result;
    int32_t tokens[64] = { 0 };
    assert_ok(mt_plan_make(&plan, c, 0, 1));
    assert_ok(mt_device_open(&device, c->device, NULL, 0));
    assert_ok(mt_trainer_create(&trainer, device, &c->trainer));
    assert_ok(mt_statistics_create(&statistics, trainer, c, NULL, ""));
    for (int64_t i = 0; i < c->trainer.steps; i++) {
        assert_ok(mt_statistics_begin(statistics, i + 1));
        assert_ok(mt_trainer_step(trainer, tokens, tokens, &result));
        assert_ok(mt_statistics_end(statistics));
    }
    if (*c->valid_corpus) evaluate(trainer);
    for (int i = 0; i < MT_MEMORY_COUNT; i++)
        if (i != MT_MEMORY_WORKSPACE) assert_int_equal(plan.peak[i], device->peak[i]);
    mt_statistics_destroy(&statistics);
    mt_trainer_destroy(&trainer);
    mt_device_destroy(&device);
}

/* A run that changes its recipe on the way takes what was planned, too. */
static void recipes_of_later_steps_are_planned(void **state)
{
    (void)state;
    mt_config c = base_config();
    c.trainer.steps = 5;
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "mxfp8; steps=2..4 none; steps=6.. nvfp4");
    check_steps(&c);
    /* the last step alone: what only the last evaluation is made with takes no step */
    snprintf(c.valid_corpus, sizeof c.valid_corpus, "v.h5");
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe,
             "mxfp8; layers=*.layers.0.* steps=4.. bf16; steps=5.. bf16");
    check_steps(&c);
}

/* And one whose steps have statistics, be it every one, the first of a recipe or a later one. */
static void steps_with_statistics_are_planned(void **state)
{
    (void)state;
    mt_config c = base_config();
    c.trainer.steps = 7;
    for (c.statistics_every = 1; c.statistics_every <= 8; c.statistics_every++) {
        snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "none");
        check_steps(&c);
        snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "mxfp8; steps=2.. bf16");
        check_steps(&c);
    }
    /* what a step after the last would have of them takes nothing */
    c.trainer.steps = 1, c.statistics_every = 2;
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "fp8_block; steps=1.. bf16");
    check_steps(&c);
    c.trainer.steps = 0; /* only an evaluation, or not even that */
    check_steps(&c);
    snprintf(c.valid_corpus, sizeof c.valid_corpus, "v.h5");
    check_steps(&c);
}

/* What the options are for shows in the plan. */
static void options_change_the_plan(void **state)
{
    (void)state;
    mt_config c = base_config();
    mt_plan plain, plan;
    assert_ok(mt_plan_make(&plain, &c, 0, 1));
    assert_int_equal(plain.peak[MT_MEMORY_HOST_POOL], 0);
    c.trainer.recompute = MT_RECOMPUTE_BLOCK;
    assert_ok(mt_plan_make(&plan, &c, 0, 1));
    assert_true(plan.peak[MT_MEMORY_ACTIVATIONS] < plain.peak[MT_MEMORY_ACTIVATIONS]);
    c.trainer.recompute = MT_RECOMPUTE_NONE, c.trainer.offload = true;
    assert_ok(mt_plan_make(&plan, &c, 0, 1));
    assert_true(plan.peak[MT_MEMORY_HOST_POOL] > 0);
    c = base_config();
    c.trainer.micro_batch_size = 1;
    assert_ok(mt_plan_make(&plan, &c, 0, 1));
    assert_true(plan.peak[MT_MEMORY_ACTIVATIONS] < plain.peak[MT_MEMORY_ACTIVATIONS] / 2);
    c.trainer.dtype = MT_F64;
    assert_ok(mt_plan_make(&plan, &c, 0, 1));
    assert_int_equal(plan.peak[MT_MEMORY_MASTER], 2 * plain.peak[MT_MEMORY_MASTER]);
}

/* A GPU is planned for where there is none: its weights lie in one copy for both directions, its
 * kernels' scratch counts where the build has them, and what is offloaded is the host's. */
static void a_gpu_is_planned_for_without_one(void **state)
{
    (void)state;
    mt_config c = base_config();
    mt_plan cpu, gpu;
    c.trainer.dtype = MT_BF16;
    c.trainer.offload = true;
    snprintf(c.device, sizeof c.device, "cpu");
    assert_ok(mt_plan_make(&cpu, &c, 0, 1));
    snprintf(c.device, sizeof c.device, "cuda:3");
    assert_ok(mt_plan_make(&gpu, &c, 0, 1));
    assert_true(gpu.gpu && !cpu.gpu);
    assert_int_equal(gpu.peak[MT_MEMORY_MASTER], cpu.peak[MT_MEMORY_MASTER]);
    assert_int_equal(gpu.peak[MT_MEMORY_MOMENTS], cpu.peak[MT_MEMORY_MOMENTS]);
    bool one_copy = !strcmp(cpu.kernel_set, "portable"); /* of portable kernels, too */
    assert_int_equal(gpu.peak[MT_MEMORY_COMPUTE] < cpu.peak[MT_MEMORY_COMPUTE], !one_copy);
    assert_true(mt_plan_pinned_bytes(&gpu) > 0 && mt_plan_pinned_bytes(&cpu) == 0);
    mt_plan lent, copied;
    c.trainer.optim.master = MT_MASTER_SPLIT; /* layers multiply the masters' bf16 halves */
    assert_ok(mt_plan_make(&lent, &c, 0, 1));
    assert_int_equal(lent.peak[MT_MEMORY_COMPUTE], 0);
    c.trainer.optim.offload = true; /* which are not on the device */
    assert_ok(mt_plan_make(&copied, &c, 0, 1));
    assert_int_equal(copied.peak[MT_MEMORY_COMPUTE], gpu.peak[MT_MEMORY_COMPUTE]);
    c.trainer.optim.master = MT_MASTER_REAL, c.trainer.optim.offload = false;
#ifdef MT_HAVE_cuda
    assert_true(gpu.peak[MT_MEMORY_WORKSPACE] > 0);
    int64_t plain = gpu.peak[MT_MEMORY_WORKSPACE];
    snprintf(c.trainer.recipe, sizeof c.trainer.recipe, "mxfp8"); /* operands are decoded */
    c.trainer.model.hidden_size = 512;
    assert_ok(mt_plan_make(&gpu, &c, 0, 1));
    assert_true(gpu.peak[MT_MEMORY_WORKSPACE] > plain);
#endif
}

/* What cuBLASLt does not do is done by the kernels of the card: beside its own workspace, and what
 * lies between the ops of ragged groups that are its own, a run takes what it takes with ours. */
static void cublaslt_has_the_kernels_of_the_card(void **state)
{
    (void)state;
#ifdef MT_HAVE_cuda
    static const struct {
        const char *name;
        int64_t workspace; /* cuBLASLt's */
    } sets[] = { { "cublaslt", 32 << 20 },
                 { "cublaslt_grouped", 32 << 20 },
                 { "cublaslt_loop", 4 * 32 << 20 } };
    mt_config c = base_config();
    mt_plan ours, plan;
    char *before = getenv("MIXTAPE_KERNELS");
    if (before) before = strdup(before);
    c.trainer.dtype = MT_BF16;
    c.trainer.sequence_length = c.trainer.model.max_position_embeddings = 512;
    c.trainer.model.hidden_size = c.trainer.model.moe_intermediate_size = 256; /* fused kernels */
    c.trainer.model.num_experts = 32;
    snprintf(c.device, sizeof c.device, "cuda");
    unsetenv("MIXTAPE_KERNELS");
    assert_ok(mt_plan_make(&ours, &c, 0, 1));
    bool hopper = !strcmp(ours.kernel_set, "sm_90a"); /* the card here, or that of a plan */
    for (int i = 0; hopper && i < 3; i++) {
        setenv("MIXTAPE_KERNELS", sets[i].name, 1);
        assert_ok(mt_plan_make(&plan, &c, 0, 1));
        assert_string_equal(plan.kernel_set, sets[i].name);
        assert_string_equal(plan.gemm_path, ours.gemm_path);
        for (int m = 0; m < MT_MEMORY_COUNT; m++)
            if (m == MT_MEMORY_WORKSPACE)
                assert_int_equal(plan.peak[m] - sets[i].workspace, ours.peak[m]);
            else if (m == MT_MEMORY_ACTIVATIONS && i > 0)
                assert_true(plan.peak[m] > ours.peak[m]);
            else
                assert_int_equal(plan.peak[m], ours.peak[m]);
    }
    unsetenv("MIXTAPE_KERNELS");
    if (before) setenv("MIXTAPE_KERNELS", before, 1);
    free(before);
#endif
}

/* What a GPU's kernels cannot do is said by the plan, before there is one. */
static void experts_of_a_gpu_are_counted(void **state)
{
    (void)state;
    mt_config c = base_config();
    mt_plan plan;
    c.trainer.model.num_experts = 1025;
    snprintf(c.device, sizeof c.device, "cpu");
    assert_ok(mt_plan_make(&plan, &c, 0, 1));
#ifdef MT_HAVE_cuda
    snprintf(c.device, sizeof c.device, "cuda");
    assert_fails(mt_plan_make(&plan, &c, 0, 1), MT_EUNSUPPORTED, "num_experts is 1025");
    c.trainer.model.num_experts = 1024;
    assert_ok(mt_plan_make(&plan, &c, 0, 1));
#endif
}

/* Counted by hand from the shapes. */
static void parameters_and_work_are_counted(void **state)
{
    (void)state;
    enum { V = 29, D = 12, H = 4, KV = 2, HEAD = 6, F = 10, DENSE = 14, E = 8, K = 2, S = 16 };
    enum {
        ATTENTION = (2 * H + 2 * KV) * HEAD * D, /* q, k, v, o */
        NORMS = 2 * D + 2 * HEAD,
        EXPERT = 3 * F * D,
        MOE = E * D + E * EXPERT,
        MOE_ACTIVE = E * D + K * EXPERT,
        MLP = 3 * DENSE * D
    };
    mt_config c = base_config();
    mt_plan plan;
    assert_ok(mt_plan_make(&plan, &c, 0, 1));
    int64_t shared = 2 * V * D + D + 3 * (ATTENTION + NORMS) + MLP;
    assert_int_equal(plan.parameters, shared + 2 * MOE);
    assert_int_equal(plan.active_parameters, shared + 2 * MOE_ACTIVE);
    double products = V * D + 3 * ATTENTION + MLP + 2 * MOE_ACTIVE;
    double attention = 3 * 2 * 2 * H * HEAD * ((S + 1) / 2.0);
    assert_true(plan.forward_flops == 2 * products + attention);
    c.trainer.model =
        small_model(true); /* the head is the embedding: as much work, fewer weights */
    mt_plan tied;
    assert_ok(mt_plan_make(&tied, &c, 0, 1));
    assert_int_equal(tied.parameters, plan.parameters - V * D);
    assert_true(tied.forward_flops == plan.forward_flops);
}

/* Where the last rule that matches is always another one, a rule is in use nowhere. */
static void rules_under_later_ones_are_said_to_be_idle(void **state)
{
    (void)state;
    char line[512];
    put_text(
        in_dir("r.yaml"),
        "model: {vocab_size: 256, hidden_size: 64, num_hidden_layers: 2,\n"
        "  num_attention_heads: 4, moe_intermediate_size: 32, num_experts: 4,\n"
        "  num_experts_per_tok: 2}\n"
        "data: {train: none.h5, sequence_length: 32}\n"
        "recipe: [{use: fp8_block}, {layers: '*experts*', use: nvfp4}, {steps: 3-, use: bf16},\n"
        "  {use: mxfp8}, {layers: '*experts*', steps: 2-9, use: bf16},\n"
        "  {layers: '*experts*', steps: 2-, use: nvfp4}, {layers: '*experts*', use: bf16,\n"
        "  steps: 4-}]\n");
    snprintf(line, sizeof line, "plan %s", in_dir("r.yaml"));
    assert_verb(line, 0, "recipe of every layer\n  fprop: W row mxfp8");
    int said = 0, idle = 0;
    for (const char *at = verb_output; (at = strstr(at, "recipe of ")); at++) said++;
    for (const char *at = verb_output; (at = strstr(at, ": never in use, a later")); at++) idle++;
    assert_int_equal(said, 7);
    assert_int_equal(idle, 4);
    assert_non_null(
        strstr(verb_output, "recipe of layers *experts*, steps 2..\n  fprop: W row nvfp4"));
    assert_non_null(
        strstr(verb_output, "recipe of layers *experts*, steps 4..\n  fprop: W row bf16"));
}

static void the_verb_reports_it(void **state)
{
    (void)state;
    char line[512];
    put_text(in_dir("c.yaml"),
             "model: {vocab_size: 256, hidden_size: 4096, num_hidden_layers: 48,\n"
             "  num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128,\n"
             "  moe_intermediate_size: 1536, num_experts: 128,\n"
             "  num_experts_per_tok: 8}\n"
             "data: {train: none.h5, sequence_length: 128}\n"
             "train: {batch_size: 1}\n"
             "recipe: [{use: bf16}, {layers: '*experts*', use: none}, {steps: 5-9, use: mxfp8}]\n");
    /* far more than this machine has: nothing of it is allocated */
    snprintf(line, sizeof line, "plan %s", in_dir("c.yaml"));
    assert_verb(line, 0, "master weights");
    assert_non_null(strstr(verb_output, "GEMM path: "));
    const char *every = strstr(verb_output, "recipe of every layer\n  fprop: W row bf16");
    const char *some = strstr(verb_output, "recipe of layers *experts*\n  fprop: W row f32, X row");
    const char *late = strstr(verb_output, "recipe of every layer, steps 5..9\n  fprop: W row mx");
    assert_true(every && every < some && some < late);
    snprintf(line, sizeof line, "plan %s --device cpu", in_dir("c.yaml"));
    assert_verb(line, 0, "kernels' scratch, the program");
#ifdef MT_HAVE_cuda
    snprintf(line, sizeof line, "plan %s --device cuda", in_dir("c.yaml"));
    assert_verb(line, 0, "bytes of the GPU's memory");
    assert_non_null(strstr(verb_output, "workspace"));
    assert_non_null(strstr(verb_output, "pinned host"));
#endif
    snprintf(line, sizeof line, "plan %s --set train.batchsize=2", in_dir("c.yaml"));
    assert_verb(line, MT_EXIT_USAGE, "did you mean train.batch_size");
    snprintf(line, sizeof line, "plan %s", in_dir("none.yaml"));
    assert_verb(line, MT_EXIT_FILES, "none.yaml");
}

/* What no count of bytes holds, or what would have millions of names, is refused and not planned
 * wrong or for minutes. */
/* Where ranks cannot share what there is, the numbers next to those given are said that would do.
 */
static void ranks_that_share_are_named(void **state)
{
    (void)state;
    static const struct {
        const char *options, *words;
    } cases[] = {
        { "--ranks 3", "train.batch_size 8 does not divide among 3 ranks: take 2 or 4 as the "
                       "number of ranks, or 6 or 9 as train.batch_size" },
        { "--ranks 3 --set train.micro_batch_size=2",
          "take 2 or 4 as the number of ranks, or 6 or 12 as train.batch_size" },
        { "--ranks 12", "12 ranks: take 8 as the number of ranks, or " },
        { "--ranks 3 --set parallel.expert=2", "3 ranks: take 2 or 4 as the number of ranks\n" },
        { "--ranks 2 --set parallel.expert=4",
          "parallel.expert is 4, must divide the number of ranks, 2: take 4 as the number of "
          "ranks, or 2 as parallel.expert" },
        { "--ranks 2 --set train.batch_size=12 --set train.micro_batch_size=4",
          "train.micro_batch_size 4 does not divide the 6 sequences that are the share of each of "
          "2 ranks: take 1 or 3 as the number of ranks, or 3 or 6 as train.micro_batch_size" },
    };
    put_text(in_dir("ranks.yaml"),
             "model: {vocab_size: 256, hidden_size: 32, num_hidden_layers: 1,\n"
             "  num_attention_heads: 2, moe_intermediate_size: 32, num_experts: 4,\n"
             "  num_experts_per_tok: 2}\n"
             "data: {train: none.h5, sequence_length: 16}\n"
             "train: {batch_size: 8}\n");
    char line[512];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(line, sizeof line, "plan %s --device cpu %s", in_dir("ranks.yaml"),
                 cases[i].options);
        assert_verb(line, 2, cases[i].words);
    }
    snprintf(line, sizeof line, "plan %s --device cpu --ranks 4", in_dir("ranks.yaml"));
    assert_verb(line, 0, "batch 8 x 16 tokens, 2 sequences at once");
    assert_non_null(strstr(verb_output, "4 ranks, 2 sequences each"));
    assert_null(strstr(verb_output, "blocks grow"));
    snprintf(line, sizeof line, "plan %s --device cpu --ranks 4 --set parallel.expert=4 --set %s",
             in_dir("ranks.yaml"), "parallel.expert_capacity=0");
    assert_verb(line, 0, "");
    assert_null(strstr(verb_output, "blocks grow"));
    char total[64], *at = strstr(verb_output, "  total "), want[128];
    assert_int_equal(sscanf(at, " total %60s", total), 1);
    snprintf(want, sizeof want, "blocks grow; for any routing the total is %s, ", total);
    strcpy(strstr(line, "capacity=0"), "capacity=0.5");
    assert_verb(line, 0, want);
    assert_non_null(strstr(verb_output, "more than parallel.expert_capacity, 0.5 mean loads"));
}

static void absurd_sizes_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *sets, *words;
    } cases[] = {
        { "--set model.num_hidden_layers=128",
          "num_experts is 65536, in 128 layers 8388608: must be at most 1048576" },
        { "--set model.moe_intermediate_size=1048576",
          "experts.gate_up' of 65536 x [2097152, 1048576]: more than 2^56 elements" },
    };
    put_text(in_dir("absurd.yaml"),
             "model: {vocab_size: 256, hidden_size: 1048576, num_hidden_layers: 2,\n"
             "  num_attention_heads: 4, head_dim: 64, moe_intermediate_size: 32,\n"
             "  num_experts: 65536, num_experts_per_tok: 2}\n"
             "data: {train: none.h5}\ndevice: cpu\n");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[512];
        snprintf(line, sizeof line, "plan %s %s", in_dir("absurd.yaml"), cases[i].sets);
        assert_verb(line, MT_EXIT_USAGE, cases[i].words);
    }
}

/* 2^34 tokens, in 2^24 passes and in one: what is planned does not grow with their number. */
static void many_tokens_are_planned_at_once(void **state)
{
    (void)state;
    char line[512];
    clock_t before = clock();
    put_text(in_dir("many.yaml"),
             "model: {vocab_size: 256, hidden_size: 32, num_hidden_layers: 1,\n"
             "  num_attention_heads: 2, moe_intermediate_size: 32, num_experts: 4,\n"
             "  num_experts_per_tok: 2}\n"
             "data: {train: none.h5, sequence_length: 1024}\n"
             "train: {batch_size: 16777216}\n");
    snprintf(line, sizeof line, "plan %s --device cpu", in_dir("many.yaml"));
    assert_verb(line, 2, "micro_batch_size is 16777216, of 1024 tokens each");
    snprintf(line, sizeof line, "plan %s --device cpu --set train.micro_batch_size=1048576",
             in_dir("many.yaml"));
    assert_verb(line, 2, "of 1024 tokens each for 2 experts: must be at most"); /* as the run */
    snprintf(line, sizeof line, "plan %s --device cpu --set train.micro_batch_size=524288",
             in_dir("many.yaml"));
    assert_verb(line, 0, "batch 16777216 x 1024 tokens, 524288 sequences at once");
    snprintf(line, sizeof line, "plan %s --device cpu --set train.micro_batch_size=1",
             in_dir("many.yaml"));
    assert_verb(line, 0, "1 sequence at once");
    snprintf(line, sizeof line, "plan %s --device cpu --set train.micro_batch_size=1 --ranks 2",
             in_dir("many.yaml"));
    assert_verb(line, 0, "2 ranks");
    assert_true(clock() - before < 5 * CLOCKS_PER_SEC);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_run_takes_what_was_planned),
        cmocka_unit_test(recipes_of_later_steps_are_planned),
        cmocka_unit_test(steps_with_statistics_are_planned),
        cmocka_unit_test(options_change_the_plan),
        cmocka_unit_test(a_gpu_is_planned_for_without_one),
        cmocka_unit_test(cublaslt_has_the_kernels_of_the_card),
        cmocka_unit_test(experts_of_a_gpu_are_counted),
        cmocka_unit_test(parameters_and_work_are_counted),
        cmocka_unit_test(rules_under_later_ones_are_said_to_be_idle),
        cmocka_unit_test(the_verb_reports_it),
        cmocka_unit_test(ranks_that_share_are_named),
        cmocka_unit_test(absurd_sizes_are_refused),
        cmocka_unit_test(many_tokens_are_planned_at_once),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
