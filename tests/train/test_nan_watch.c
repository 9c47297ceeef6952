/* NaNs in quantized operands: counted once a micro-batch whatever else is on, told once, saved. */
#include "tests/train/files.h"

#include <math.h>

#include "tests/support/fault.h"
#include "train/checkpoint.h"
#include "train/nan_watch.h"

enum { BATCH = 4, SEQUENCE = 12, TOKENS = BATCH * SEQUENCE, STEPS = 2, MOST = 512 };
#define FP4 "fprop=mxfp4 dgrad=mxfp4 wgrad=mxfp4"

static mt_trainer_config config_of(const char *recipe)
{
    mt_trainer_config c = { .dtype = MT_F32,
                            .batch_size = BATCH,
                            .micro_batch_size = 2,
                            .sequence_length = SEQUENCE,
                            .steps = 100,
                            .seed = 5,
                            .delayed_history = 4 };
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c.model, architecture);
    c.model.vocab_size = 23, c.model.hidden_size = 24, c.model.num_hidden_layers = 2;
    c.model.num_attention_heads = 4, c.model.num_key_value_heads = 2, c.model.head_dim = 8;
    c.model.moe_intermediate_size = 10, c.model.num_experts = 5, c.model.num_experts_per_tok = 2;
    mt_optim_config_defaults(&c.optim);
    snprintf(c.recipe, sizeof c.recipe, "%s", recipe);
    return c;
}

static mt_trainer *make(const mt_trainer_config *c)
{
    mt_trainer *t;
    assert_ok(mt_trainer_create(&t, test_device(), c));
    return t;
}

static void poison(mt_trainer *t, const char *name, int64_t element)
{
    const float nan = NAN;
    mt_param_store *params = mt_model_params(mt_trainer_model(t));
    mt_param *p = mt_param_store_find(params, name);
    assert_non_null(p);
    assert_ok(mt_param_write_master(params, p, element, 1, &nan));
}

static void draw(int32_t *tokens, int32_t *targets, int64_t step)
{
    for (int64_t i = 0; i < TOKENS; i++) {
        tokens[i] = (int32_t)mt_rng_below(1, 1, (uint64_t)(step * TOKENS + i), 23);
        targets[i] = (int32_t)mt_rng_below(1, 2, (uint64_t)(step * TOKENS + i), 23);
    }
}

static void train(mt_trainer *t, int64_t steps)
{
    int32_t tokens[TOKENS], targets[TOKENS];
    mt_step_result r;
    while (steps-- > 0) {
        draw(tokens, targets, mt_trainer_steps(t));
        assert_ok(mt_trainer_step(t, tokens, targets, &r));
    }
}

static int64_t copy_counts(int64_t *counts, const mt_trainer *t)
{
    mt_tensor nans = mt_precision_nans(mt_model_precision(mt_trainer_model(t)));
    assert_in_range(nans.shape[0], 0, MOST);
    memset(counts, 0, MOST * sizeof *counts);
    assert_ok(mt_device_copy(test_device(), counts, nans.data, mt_tensor_bytes(&nans)));
    return nans.shape[0];
}

/* NaNs of a layer's operand, all members. */
static int64_t count_of(const mt_trainer *t, const char *layer, const char *operand)
{
    int64_t counts[MOST], n, sum = 0, found = 0, all = copy_counts(counts, t);
    const mt_precision *p = mt_model_precision(mt_trainer_model(t));
    for (int64_t at = 0; at < all; at += n) {
        const char *of, *name = mt_precision_nans_of(p, at, &of, &n);
        assert_non_null(name);
        if (strcmp(name, layer) != 0 || strcmp(of, operand) != 0) continue;
        for (int64_t i = 0; i < n; i++) sum += counts[at + i];
        found++;
    }
    assert_int_equal(found, 1);
    return sum;
}

/* ---- counting ----------------------------------------------------------------------------------
 */

/* A NaN in the norm's weight is one in every token of the projection that follows. Forward alone is
 * not counted; recompute, offload, deferral, saved inputs and threads change no count. */
static void counts_are_exact_under_every_option(void **state)
{
    (void)state;
    static const char *const recipes[] = { FP4, "fprop=f32 dgrad=mxfp4 wgrad=mxfp4",
                                           "fprop=mxfp8 dgrad=mxfp6_e3m2 wgrad=f32", "nvfp4",
                                           "fp8_delayed" };
    for (size_t r = 0; r < sizeof recipes / sizeof *recipes; r++) {
        int64_t first[MOST], counts[MOST];
        for (int bits = 0; bits < 24; bits++) {
            int32_t tokens[TOKENS], targets[TOKENS];
            double loss;
            int64_t counted;
            char name[128];
            mt_trainer_config c = config_of(recipes[r]);
            c.recompute = (mt_recompute)(bits % 3), c.offload = bits / 3 & 1;
            c.defer_wgrad = bits / 6 & 1, c.save_original_input = bits / 12;
            mt_trainer *t = make(&c);
            poison(t, "model.layers.1.input_layernorm", 3);
            train(t, STEPS);
            draw(tokens, targets, 7);
            assert_ok(mt_trainer_eval(t, tokens, targets, 2, &loss, &counted));
            assert_ok(mt_trainer_find_nonfinite(t, tokens, targets, name));
            assert_int_equal(count_of(t, "model.layers.1.self_attn.qkv_proj", "X"), STEPS * TOKENS);
            assert_int_equal(count_of(t, "model.layers.0.self_attn.qkv_proj", "X"), 0);
            assert_int_equal(count_of(t, "model.layers.1.self_attn.qkv_proj", "W"), 0);
            /* backward of the norm is NaN in every element of what goes on below it */
            assert_int_equal(count_of(t, "model.layers.0.mlp.experts.down", "dY"),
                             STEPS * TOKENS * 2 * 24);
            copy_counts(bits ? counts : first, t);
            if (bits) assert_memory_equal(counts, first, sizeof counts);
            mt_trainer_destroy(&t);
        }
    }
}

/* Without rules nothing is quantized, nothing counted. */
static void full_precision_has_no_counts(void **state)
{
    (void)state;
    int64_t counts[MOST], total = -1;
    mt_trainer_config c = config_of("none");
    mt_trainer *t = make(&c);
    mt_nan_watch *watch;
    poison(t, "model.layers.1.input_layernorm", 3);
    assert_ok(mt_nan_watch_create(&watch, mt_trainer_model(t)));
    train(t, 1);
    assert_int_equal(copy_counts(counts, t), 0);
    assert_ok(mt_nan_watch_look(watch, 1, &total, NULL, NULL));
    assert_int_equal(total, 0);
    mt_nan_watch_destroy(&watch);
    mt_trainer_destroy(&t);
}

/* ---- telling -----------------------------------------------------------------------------------
 */

struct notes {
    int count;
    char text[16][512];
};

static void keep(void *context, const char *text)
{
    struct notes *n = context;
    assert_in_range(n->count, 0, 15);
    snprintf(n->text[n->count++], sizeof n->text[0], "%s", text);
}

/* A weight whose format has no NaN: the loss stays finite, updates are made, and it is told. */
static void what_is_new_is_told_once(void **state)
{
    (void)state;
    int64_t total = -1;
    struct notes notes = { 0 };
    mt_trainer_config c = config_of(FP4);
    mt_trainer *t = make(&c);
    mt_nan_watch *watch;
    poison(t, "model.layers.1.mlp.experts.gate_up", 3 * 20 * 24); /* of member 3 */
    assert_ok(mt_nan_watch_create(&watch, mt_trainer_model(t)));
    train(t, 3);
    int64_t before = fault_allocations();
    assert_ok(mt_nan_watch_look(watch, 3, &total, keep, &notes));
    assert_int_equal(fault_allocations(), before);
    assert_int_equal(total, 3); /* one for every refresh */
    assert_int_equal(notes.count, 1);
    assert_string_equal(notes.text[0], "step 3: 3 NaN met in quantizing W of "
                                       "model.layers.1.mlp.experts.gate_up, members 3");
    assert_ok(mt_nan_watch_look(watch, 3, &total, keep, &notes));
    assert_int_equal(total, 3);
    assert_int_equal(notes.count, 1);
    poison(t, "model.layers.0.input_layernorm", 3);
    poison(t, "model.layers.0.self_attn.qkv_proj", 0);
    train(t, 1);
    assert_ok(mt_nan_watch_look(watch, 4, &total, keep, &notes));
    assert_true(total >= 3 + 1 + 1 + TOKENS);
    assert_string_equal(notes.text[1], "step 4: 1 NaN met in quantizing W of "
                                       "model.layers.0.self_attn.qkv_proj");
    assert_string_equal(notes.text[2], "step 4: 48 NaN met in quantizing X of "
                                       "model.layers.0.self_attn.qkv_proj");
    mt_nan_watch_destroy(&watch);
    assert_ok(mt_nan_watch_create(&watch, mt_trainer_model(t))); /* nothing old is told */
    notes.count = 0;
    assert_ok(mt_nan_watch_look(watch, 4, &total, keep, &notes));
    assert_int_equal(notes.count, 0);
    mt_nan_watch_destroy(&watch);
    assert_null(watch);
    mt_trainer_destroy(&t);
}

/* ---- passes that do not train ------------------------------------------------------------------
 */

/* What no loss shows is found all the same, and leaves no count behind. */
static void watched_evaluations_find_nans(void **state)
{
    (void)state;
    for (int only = 0; only < 2; only++) {
        int32_t tokens[TOKENS], targets[TOKENS];
        int64_t before[MOST], after[MOST], counted;
        double loss;
        mt_nan_watch *watch;
        mt_trainer_config c = config_of(FP4);
        c.forward_only = only;
        mt_trainer *t = make(&c);
        draw(tokens, targets, 7);
        assert_ok(mt_nan_watch_create_forward(&watch, mt_trainer_model(t)));
        assert_ok(mt_trainer_eval(t, tokens, targets, 2, &loss, &counted));
        assert_ok(mt_nan_watch_check(watch));
        mt_nan_watch_destroy(&watch);
        poison(t, "model.layers.1.input_layernorm", 3);
        if (!only) train(t, 1);
        copy_counts(before, t);
        assert_ok(mt_nan_watch_create_forward(&watch, mt_trainer_model(t)));
        for (int again = 0; again < 2; again++) {
            assert_ok(mt_trainer_eval(t, tokens, targets, 2, &loss, &counted));
            assert_true(isfinite(loss));
            assert_fails(mt_nan_watch_check(watch), MT_ENUMERIC,
                         "24 NaN met in quantizing X of model.layers.1.self_attn.qkv_proj: what");
            copy_counts(after, t);
            assert_memory_equal(after, before, sizeof after);
        }
        mt_nan_watch_destroy(&watch);
        assert_ok(mt_trainer_eval(t, tokens, targets, 2, &loss, &counted));
        copy_counts(after, t);
        assert_memory_equal(after, before, sizeof after);
        mt_trainer_destroy(&t);
    }
}

/* Of any weight, however it is stored; its compute copy may hold numbers alone. */
static void a_weight_that_is_not_finite_is_named(void **state)
{
    (void)state;
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    mt_trainer_config c = config_of(FP4);
    for (int split = 0; split < 2; split++) {
        c.dtype = split ? MT_BF16 : MT_F32;
        c.optim.master = split ? MT_MASTER_SPLIT : MT_MASTER_REAL;
        mt_trainer *t = make(&c);
        mt_model *model = mt_trainer_model(t);
        mt_param_store *params = mt_model_params(model);
        assert_ok(mt_trainer_check_weights(model, NULL));
        for (int64_t i = 0; i < mt_param_store_count(params); i++) {
            char words[256];
            float was;
            mt_param *p = mt_param_store_get(params, i);
            const int64_t last = mt_param_count(p) - 1;
            assert_ok(mt_param_read_master(params, p, last, 1, &was));
            assert_ok(mt_param_write_master(params, p, last, 1, &bad[i % 3]));
            snprintf(words, sizeof words, "the weight %s holds a NaN or an infinity", p->name);
            assert_fails(mt_trainer_check_weights(model, NULL), MT_ENUMERIC, words);
            assert_ok(mt_param_write_master(params, p, last, 1, &was));
        }
        assert_ok(mt_trainer_check_weights(model, NULL));
        mt_trainer_destroy(&t);
    }
}

/* ---- checkpoints -------------------------------------------------------------------------------
 */

static void counts_go_on_after_resuming(void **state)
{
    (void)state;
    char path[MT_CHECKPOINT_PATH];
    int64_t want[MOST], got[MOST], n;
    const mt_checkpoint_info info = { .run_config = "", .git_revision = "", .corpus = "" };
    mt_trainer_config c = config_of(FP4), plain = config_of("none");
    mt_trainer *straight = make(&c), *resumed = make(&c), *without = make(&plain);
    poison(straight, "model.layers.1.mlp.experts.gate_up", 5);
    poison(straight, "model.layers.0.input_layernorm", 3);
    train(straight, 2);
    assert_ok(mt_checkpoint_save(in_dir("run"), straight, &info, path));
    assert_ok(mt_checkpoint_load(resumed, path, NULL, false));
    train(straight, 2), train(resumed, 2);
    n = copy_counts(want, straight);
    assert_int_equal(copy_counts(got, resumed), n);
    assert_memory_equal(got, want, sizeof got);
    assert_int_equal(count_of(resumed, "model.layers.1.mlp.experts.gate_up", "W"), 4);
    /* from a run that counted nothing: from 0; the other way they are left out */
    train(without, 1);
    assert_ok(mt_checkpoint_save(in_dir("plain"), without, &info, path));
    assert_ok(mt_checkpoint_load(resumed, path, NULL, false));
    copy_counts(got, resumed);
    memset(want, 0, sizeof want);
    assert_memory_equal(got, want, sizeof got);
    assert_ok(mt_checkpoint_save(in_dir("run"), straight, &info, path));
    assert_ok(mt_checkpoint_load(without, path, NULL, false));
    mt_trainer_destroy(&straight), mt_trainer_destroy(&resumed), mt_trainer_destroy(&without);
}

static void opening_survives_want_of_memory(void **state)
{
    (void)state;
    mt_trainer_config c = config_of("mxfp8");
    mt_trainer *t = make(&c);
    bool failed = true;
    for (int64_t n = 1; failed; n++) {
        mt_nan_watch *watch;
        int64_t live = fault_live();
        fault_arm(n, FAULT_ONCE);
        mt_status status = mt_nan_watch_create(&watch, mt_trainer_model(t));
        failed = fault_disarm();
        assert_int_equal(status, failed ? MT_ENOMEM : MT_OK);
        assert_true(failed == (watch == NULL));
        mt_nan_watch_destroy(&watch);
        assert_int_equal(fault_live(), live);
    }
    mt_trainer_destroy(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_are_exact_under_every_option),
        cmocka_unit_test(full_precision_has_no_counts),
        cmocka_unit_test(what_is_new_is_told_once),
        cmocka_unit_test(watched_evaluations_find_nans),
        cmocka_unit_test(a_weight_that_is_not_finite_is_named),
        cmocka_unit_test(counts_go_on_after_resuming),
        cmocka_unit_test(opening_survives_want_of_memory),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
