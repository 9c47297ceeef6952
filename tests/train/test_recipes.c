/* Recipes in the trainer: what must not change a bit under any of them, and checkpoints of runs
 * with another one. */
#include "tests/train/files.h"

#include <math.h>

#include "train/checkpoint.h"

enum { BATCH = 4, SEQUENCE = 20, TOKENS = BATCH * SEQUENCE, STEPS = 3 };

static mt_trainer_config config_of(mt_dtype dtype, const char *recipe)
{
    mt_trainer_config c = { .dtype = dtype,
                            .batch_size = BATCH,
                            .micro_batch_size = 2,
                            .sequence_length = SEQUENCE,
                            .steps = 100,
                            .seed = 5,
                            .delayed_history = 3 };
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c.model, architecture);
    c.model.vocab_size = 23, c.model.hidden_size = 24, c.model.num_hidden_layers = 2;
    c.model.num_attention_heads = 2, c.model.num_key_value_heads = 1, c.model.head_dim = 8;
    c.model.moe_intermediate_size = 10, c.model.num_experts = 5, c.model.num_experts_per_tok = 2;
    mt_optim_config_defaults(&c.optim);
    c.optim.lr = 1e-2, c.optim.warmup_steps = 1;
    snprintf(c.recipe, sizeof c.recipe, "%s", recipe);
    return c;
}

/* The losses of three steps, then a hash of the masters. `evaluate`: other tokens between them. */
static void train(double outcome[STEPS + 1], const mt_trainer_config *c, mt_device *device,
                  bool evaluate)
{
    int32_t tokens[TOKENS], targets[TOKENS];
    mt_trainer *t;
    assert_ok(mt_trainer_create(&t, device, c));
    for (int64_t step = 0; step < STEPS; step++) {
        mt_step_result r;
        for (int64_t i = 0; i < TOKENS; i++) {
            tokens[i] = (int32_t)mt_rng_below(1, 1, (uint64_t)(step * TOKENS + i), 23);
            targets[i] = (int32_t)mt_rng_below(1, 2, (uint64_t)(step * TOKENS + i), 23);
        }
        assert_ok(mt_trainer_step(t, tokens, targets, &r));
        assert_true(r.loss_finite && !r.skipped);
        outcome[step] = r.loss;
        double loss;
        int64_t count;
        for (int64_t i = 0; i < TOKENS; i++) tokens[i] = 22 - tokens[i];
        if (evaluate) assert_ok(mt_trainer_eval(t, tokens, targets, 2, &loss, &count));
    }
    mt_param_store *params = mt_model_params(mt_trainer_model(t));
    size_t size = mt_dtype_size(mt_param_store_get(params, 0)->dtype);
    const unsigned char *bytes = mt_param_store_master(params);
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < size * (size_t)mt_param_store_elements(params); i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    outcome[STEPS] = (double)(hash >> 12);
    mt_trainer_destroy(&t);
}

/* Recompute, offload, deferral, saved inputs, threads, and evaluations, which leave no trace in
 * amax histories; stochastic rounding or not. */
static void neutral_under_every_recipe(void **state)
{
    (void)state;
    static const char *const more[] = {
        "fprop=mxfp8:sr dgrad=mxfp6_e2m3:sr wgrad=fp8_block:rht+sr",
        "fprop=fp8_delayed:sr/mxfp4 dgrad=nvfp4:4over6/fp8_tensor wgrad=fp8_delayed/nvfp4:sr",
        "nvfp4 wgrad=mxfp8:source=dequantized; layers=*down* mxfp8; steps=2.. fp8_block",
    };
    enum { MORE = sizeof more / sizeof *more };
    static const mt_dtype dtypes[] = { MT_F32, MT_BF16 };
    const bool on_cpu = strcmp(test_device()->name, "cpu") == 0;
    mt_device *two;
    assert_ok(mt_device_open(&two, "cpu", NULL, 2));
    int presets = 0;
    while (mt_recipe_preset(presets)) presets++;
    for (int i = 0; i < presets + MORE; i++)
        for (int d = 0; d < 2; d++) {
            const char *recipe = i < presets ? mt_recipe_preset(i) : more[i - presets];
            mt_trainer_config c = config_of(dtypes[d], recipe);
            double plain[STEPS + 1], other[STEPS + 1];
            train(plain, &c, test_device(), false);
            for (int bits = 1; bits < 24; bits++) {
                c.recompute = (mt_recompute)(bits % 3), c.offload = bits / 3 & 1;
                c.defer_wgrad = bits / 6 & 1, c.save_original_input = bits / 12;
                train(other, &c, bits == 23 && on_cpu ? two : test_device(), bits % 5 == 4);
                if (memcmp(plain, other, sizeof plain) != 0)
                    fail_msg("%s, %s: recompute %d, offload %d, deferred %d, input saved %d differ",
                             recipe, mt_dtype_name(c.dtype), (int)c.recompute, c.offload,
                             c.defer_wgrad, c.save_original_input);
            }
        }
    mt_device_destroy(&two);
}

/* A rule can switch quantization off: to the bit what a run without a recipe computes. */
static void a_rule_of_none_is_the_compute_dtype(void **state)
{
    (void)state;
    static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    for (int d = 0; d < 3; d++) {
        double plain[STEPS + 1], off[STEPS + 1], some[STEPS + 1];
        mt_trainer_config c = config_of(dtypes[d], "none");
        train(plain, &c, test_device(), false);
        c = config_of(dtypes[d], "mxfp8; layers=* none");
        train(off, &c, test_device(), false);
        c = config_of(dtypes[d], "none; layers=*down* mxfp8");
        train(some, &c, test_device(), false);
        assert_memory_equal(plain, off, sizeof plain);
        assert_true(plain[0] != some[0]);
    }
}

/* What a delayed scale needs of the past must be there, and be of its length. */
static void histories_of_another_recipe_are_refused(void **state)
{
    (void)state;
    char path[MT_CHECKPOINT_PATH];
    const mt_checkpoint_info info = { .run_config = "", .git_revision = "", .corpus = "" };
    static const char some[] = "mxfp8; layers=*down* fp8_delayed";
    mt_trainer_config c = config_of(MT_F32, some);
    mt_trainer *t, *other;
    assert_ok(mt_trainer_create(&t, test_device(), &c));
    assert_ok(mt_checkpoint_save(in_dir("run"), t, &info, path));
    c = config_of(MT_F32, "fp8_delayed");
    assert_ok(mt_trainer_create(&other, test_device(), &c));
    assert_fails(mt_checkpoint_load(other, path, NULL, true), MT_ECONFIG,
                 "has no /state/delayed/model.layers.0.self_attn.qkv_proj.W_row.scale: its run's "
                 "recipe was another");
    mt_trainer_destroy(&other);
    c = config_of(MT_F32, some);
    c.delayed_history = 5;
    assert_ok(mt_trainer_create(&other, test_device(), &c));
    assert_fails(mt_checkpoint_load(other, path, NULL, true), MT_ECONFIG,
                 "recipe.delayed.history is 5, the checkpoint's");
    mt_trainer_destroy(&other);
    /* formats that carry nothing may change where the caller has allowed it */
    c = config_of(MT_F32, "nvfp4");
    assert_ok(mt_trainer_create(&other, test_device(), &c));
    assert_ok(mt_checkpoint_load(other, path, NULL, true));
    mt_trainer_destroy(&other);
    mt_trainer_destroy(&t);
}

/* eval and sample compute in what the run came to: the recipe of that step, the scales it left. */
static void weights_are_loaded_with_the_formats_of_their_step(void **state)
{
    (void)state;
    char path[MT_CHECKPOINT_PATH];
    int32_t tokens[TOKENS];
    int64_t count;
    double loss[3];
    const mt_checkpoint_info info = { .run_config = "", .git_revision = "", .corpus = "" };
    mt_trainer_config c = config_of(MT_F32, "nvfp4; steps=1.. fp8_delayed");
    mt_trainer *t, *other;
    mt_step_result r;
    for (int i = 0; i < TOKENS; i++) tokens[i] = i * i % 23;
    assert_ok(mt_trainer_create(&t, test_device(), &c));
    for (int i = 0; i < 3; i++) assert_ok(mt_trainer_step(t, tokens, tokens, &r));
    assert_ok(mt_checkpoint_save(in_dir("run"), t, &info, path));
    assert_ok(mt_trainer_eval(t, tokens, tokens, 2, &loss[0], &count));
    mt_trainer_destroy(&t);
    for (int i = 1; i < 3; i++) { /* then in formats that the run did not have */
        c.forward_only = true;
        assert_ok(mt_trainer_create(&other, test_device(), &c));
        assert_ok(mt_checkpoint_load_model(mt_trainer_model(other), path));
        assert_ok(mt_trainer_eval(other, tokens, tokens, 2, &loss[i], &count));
        mt_trainer_destroy(&other);
        c = config_of(MT_F32, "fprop=fp8_delayed:e5m2 backward=high_precision");
    }
    assert_true(loss[1] == loss[0] && loss[2] != loss[0]);
}

/* Amaxes and scales that a trainer has. */
static void read_states(float *to, int64_t room, const mt_trainer *t)
{
    const mt_precision *p = mt_model_precision(mt_trainer_model(t));
    char name[256];
    assert_true(mt_precision_state_count(p) > 0);
    memset(to, 0, (size_t)room * sizeof *to);
    for (int64_t i = 0; i < mt_precision_state_count(p); i++) {
        mt_tensor x = mt_precision_state(p, i, name);
        assert_true((room -= mt_tensor_count(&x)) >= 0);
        assert_ok(mt_device_copy(mt_trainer_device(t), to, x.data, mt_tensor_bytes(&x)));
        to += mt_tensor_count(&x);
    }
}

/* Of every member of every operand. */
static void scales_begin_at_one(void **state)
{
    (void)state;
    mt_trainer_config c = config_of(MT_F32, "fp8_delayed");
    mt_trainer *t;
    int64_t ones = 0;
    float scales[8];
    assert_ok(mt_trainer_create(&t, test_device(), &c));
    const mt_param_store *store = mt_model_params(mt_trainer_model(t));
    for (int64_t i = 0; i < mt_param_store_count(store); i++) {
        const mt_param *w = mt_param_store_get(store, i);
        for (int s = 0; w->linear && s < MT_OPERAND_COUNT * MT_DIR_COUNT; s++) {
            const float *at = w->linear->delayed[s / MT_DIR_COUNT][s % MT_DIR_COUNT].scale;
            int64_t n = at ? w->group.members : 0;
            assert_in_range(n, 0, 8);
            assert_ok(mt_device_copy(test_device(), scales, at, (size_t)n * sizeof *at));
            for (int64_t e = 0; e < n; e++, ones++) assert_true(scales[e] == 1);
        }
    }
    assert_true(ones > c.model.num_experts);
    mt_trainer_destroy(&t);
}

/* An operand has one amax, whichever of its directions the steps before have quantized, and rotated
 * or not: both get scales by it. */
static void directions_share_an_amax(void **state)
{
    (void)state;
    static const char *const recipes[] = {
        "fprop=fp8_delayed dgrad=fp8_delayed wgrad=f32; steps=2.. fp8_delayed",
        "nvfp4; steps=2.. fp8_delayed",
    };
    for (int i = 0; i < 2; i++) {
        mt_trainer_config c = config_of(MT_F32, recipes[i]);
        int64_t compared = 0, moved = 0;
        mt_trainer *t;
        assert_ok(mt_trainer_create(&t, test_device(), &c));
        for (int step = 0; step < 2; step++) {
            int32_t tokens[TOKENS];
            mt_step_result r;
            for (int64_t k = 0; k < TOKENS; k++) tokens[k] = (int32_t)(k * 7 % 23);
            assert_ok(mt_trainer_step(t, tokens, tokens, &r));
            const mt_param_store *store = mt_model_params(mt_trainer_model(t));
            for (int64_t p = 0; p < mt_param_store_count(store); p++) {
                const mt_param *w = mt_param_store_get(store, p);
                for (int o = 0; w->linear && o < MT_OPERAND_COUNT; o++) {
                    float scales[MT_DIR_COUNT][8];
                    const struct mt_delayed *d = w->linear->delayed[o];
                    const size_t bytes = (size_t)w->group.members * sizeof(float);
                    assert_in_range(w->group.members, 1, 8);
                    assert_non_null(d[MT_ROW].scale);
                    for (int dir = 0; dir < MT_DIR_COUNT; dir++)
                        assert_ok(mt_device_copy(test_device(), scales[dir], d[dir].scale, bytes));
                    assert_memory_equal(scales[MT_ROW], scales[MT_COL], bytes);
                    for (int64_t e = 0; e < w->group.members; e++, compared++)
                        moved += scales[MT_ROW][e] != 1;
                }
            }
        }
        assert_true(compared > 0 && moved > compared / 2);
        mt_trainer_destroy(&t);
    }
}

/* Weights that are drawn before a checkpoint is read leave no amax, where it has no histories: what
 * follows is the same whatever they were. In two ways: `train --resume --force`, and `trace
 * --steps`, there also from histories of another length, which are not taken. */
static void histories_begin_with_the_weights_that_are_loaded(void **state)
{
    (void)state;
    enum { STATES = 8192 };
    static float states[2][STATES];
    static const struct {
        const char *before;
        bool run;
    } ways[] = { { "mxfp8", true }, { "mxfp8", false }, { "fp8_delayed", false } };
    const mt_checkpoint_info info = { .run_config = "", .git_revision = "", .corpus = "" };
    char path[MT_CHECKPOINT_PATH];
    int32_t tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = i * i % 23;
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        mt_trainer_config c = config_of(MT_F32, ways[way].before);
        mt_trainer *t;
        mt_step_result r;
        double loss[2];
        assert_ok(mt_trainer_create(&t, test_device(), &c));
        assert_ok(mt_checkpoint_save(in_dir("run"), t, &info, path));
        mt_trainer_destroy(&t);
        c = config_of(MT_F32, "fp8_delayed"), c.delayed_history = 4;
        for (int i = 0; i < 2; i++) {
            c.seed = 100 + (uint64_t)i, c.model.init_std = 1 + i;
            assert_ok(mt_trainer_create(&t, test_device(), &c));
            if (ways[way].run)
                assert_ok(mt_checkpoint_load(t, path, NULL, true));
            else
                assert_ok(mt_checkpoint_load_model(mt_trainer_model(t), path));
            assert_ok(mt_trainer_set_steps(t, 0));
            read_states(states[i], STATES, t);
            for (int step = 0; step < 3; step++) assert_ok(mt_trainer_step(t, tokens, tokens, &r));
            loss[i] = r.loss;
            mt_trainer_destroy(&t);
        }
        assert_memory_equal(states[0], states[1], sizeof states[0]);
        assert_true(loss[0] == loss[1]);
    }
}

/* Nor do those that masters were before they became what their codes hold. */
static void histories_begin_with_quantized_masters(void **state)
{
    (void)state;
    mt_trainer_config c = config_of(MT_F32, "fp8_delayed");
    mt_trainer *t;
    float seen, amax = 0;
    c.quantized_init = true;
    assert_ok(mt_trainer_create(&t, test_device(), &c));
    const mt_param *w = mt_param_store_find(mt_model_params(mt_trainer_model(t)), "lm_head");
    assert_non_null(w);
    for (int64_t i = 0; i < mt_param_count(w); i++)
        amax = fmaxf(amax, fabsf((float)mt_load_f64(w->master, MT_F32, i)));
    assert_ok(mt_device_copy(test_device(), &seen, w->linear->delayed[MT_OPERAND_W][MT_ROW].history,
                             sizeof seen));
    assert_true(seen == amax);
    mt_trainer_destroy(&t);
}

/* As its help says: `mixtape quantize` draws the same with these. */
static void draws_are_those_that_are_documented(void **state)
{
    (void)state;
    mt_trainer *t;
    mt_trainer_config c = config_of(MT_F32, "nvfp4");
    assert_ok(mt_trainer_create(&t, test_device(), &c));
    mt_param_store *params = mt_model_params(mt_trainer_model(t));
    assert_true(MT_OPERAND_W == 0 && MT_OPERAND_X == 1 && MT_OPERAND_DY == 2);
    int64_t linear = 0;
    for (int64_t i = 0; i < mt_param_store_count(params); i++) {
        const mt_param *w = mt_param_store_get(params, i);
        if (!w->packed) continue;
        assert_int_equal(w->linear->seed, 5);
        assert_int_equal(w->linear->stream, 3 * i);
        linear++;
    }
    assert_int_equal(linear, 9); /* four of each block, the head */
    assert_int_equal(mt_trainer_first_pass(&c, 7), 7 * 2);
    mt_trainer_destroy(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(neutral_under_every_recipe),
        cmocka_unit_test(a_rule_of_none_is_the_compute_dtype),
        cmocka_unit_test(histories_of_another_recipe_are_refused),
        cmocka_unit_test(weights_are_loaded_with_the_formats_of_their_step),
        cmocka_unit_test(draws_are_those_that_are_documented),
        cmocka_unit_test(scales_begin_at_one),
        cmocka_unit_test(directions_share_an_amax),
        cmocka_unit_test(histories_begin_with_the_weights_that_are_loaded),
        cmocka_unit_test(histories_begin_with_quantized_masters),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
