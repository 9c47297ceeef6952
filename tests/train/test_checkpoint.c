/* Checkpoints: resume to the bit, fall back to the newest complete one, survive kills and full
 * disks. */
#include <hdf5.h>
#include <xxhash.h>

#include "tests/train/files.h"
#include "train/checkpoint.h"
#include "train/hf.h"

/* ---- a trainer ---------------------------------------------------------------------------------
 */

enum { BATCH = 2, SEQUENCE = 8, VOCAB = 50, WIDTH = 16, EXPERTS = 4 };

static mt_trainer_config trainer_config(mt_dtype dtype)
{
    mt_trainer_config c = { .dtype = dtype,
                            .batch_size = BATCH,
                            .micro_batch_size = 1,
                            .sequence_length = SEQUENCE,
                            .steps = 100,
                            .seed = 42 };
    const mt_architecture *architecture;
    assert_ok(mt_architecture_find(&architecture, "qwen3_moe"));
    mt_model_config_defaults(&c.model, architecture);
    c.model.vocab_size = VOCAB, c.model.hidden_size = WIDTH, c.model.num_hidden_layers = 2;
    c.model.num_attention_heads = 2, c.model.num_key_value_heads = 1, c.model.head_dim = 8;
    c.model.num_experts = EXPERTS, c.model.num_experts_per_tok = 2;
    c.model.moe_intermediate_size = 12;
    c.model.router_bias_update_rate = 0.01;
    mt_optim_config_defaults(&c.optim);
    return c;
}

static mt_trainer *make_trainer(mt_dtype dtype)
{
    mt_trainer *trainer;
    mt_trainer_config c = trainer_config(dtype);
    assert_ok(mt_trainer_create(&trainer, test_device(), &c));
    return trainer;
}

static double step(mt_trainer *trainer)
{
    int32_t tokens[BATCH * SEQUENCE], targets[BATCH * SEQUENCE];
    uint64_t s = (uint64_t)mt_trainer_steps(trainer);
    mt_step_result result;
    for (uint64_t i = 0; i < BATCH * SEQUENCE; i++) {
        tokens[i] = (int32_t)mt_rng_below(1, 1, s * 1000 + i, VOCAB);
        targets[i] = (int32_t)mt_rng_below(1, 2, s * 1000 + i, VOCAB);
    }
    assert_ok(mt_trainer_step(trainer, tokens, targets, &result));
    return result.loss;
}

/* Everything that a step reads is the same to the bit. */
static void expect_same(const mt_trainer *a, const mt_trainer *b)
{
    mt_param_store *x = mt_model_params(mt_trainer_model(a)),
                   *y = mt_model_params(mt_trainer_model(b));
    const mt_optimizer *p = mt_trainer_optimizer(a), *q = mt_trainer_optimizer(b);
    size_t bytes =
        (size_t)mt_param_store_elements(x) * mt_dtype_size(mt_param_store_get(x, 0)->dtype);
    assert_memory_equal(mt_param_store_master(x), mt_param_store_master(y), bytes);
    assert_memory_equal(mt_optimizer_m(p), mt_optimizer_m(q), bytes);
    assert_memory_equal(mt_optimizer_v(p), mt_optimizer_v(q), bytes);
    assert_memory_equal(mt_optimizer_state(p), mt_optimizer_state(q), sizeof(struct mt_step_state));
    assert_int_equal(mt_trainer_steps(a), mt_trainer_steps(b));
    for (int64_t i = 0; i < mt_model_moe_layers(mt_trainer_model(a)); i++)
        assert_memory_equal(mt_model_router_bias(mt_trainer_model(a), i),
                            mt_model_router_bias(mt_trainer_model(b), i), EXPERTS * sizeof(float));
}

static const mt_checkpoint_info info = { .run_config = "model:\n  hidden_size: 16\n",
                                         .git_revision = "abc123",
                                         .corpus = "text 1" };

static void test_resume(void **state)
{
    (void)state;
    static const mt_dtype dtypes[] = { MT_F32, MT_F64, MT_BF16 };
    for (int d = 0; d < 3; d++) {
        char path[MT_CHECKPOINT_PATH];
        mt_trainer *straight = make_trainer(dtypes[d]), *resumed = make_trainer(dtypes[d]);
        for (int i = 0; i < 3; i++) step(straight);
        int64_t tokens = mt_trainer_tokens(straight) + d;
        mt_trainer_set_tokens(straight, tokens);
        assert_ok(mt_checkpoint_save(in_dir("run"), straight, &info, path));
        assert_non_null(strstr(path, "run/step_00000003"));
        assert_ok(mt_checkpoint_load(resumed, path, "text 1", false));
        expect_same(straight, resumed);
        assert_int_equal(mt_trainer_tokens(resumed), tokens);
        for (int i = 0; i < 4; i++) {
            double want = step(straight), got = step(resumed);
            assert_true(want == got);
        }
        expect_same(straight, resumed);
        assert_true(*mt_model_router_bias(mt_trainer_model(resumed), 1) != 0);
        mt_trainer_destroy(&straight);
        mt_trainer_destroy(&resumed);
        assert_ok(mt_dir_remove(in_dir("run")));
    }
}

static void test_contents(void **state)
{
    (void)state;
    char path[MT_CHECKPOINT_PATH];
    mt_trainer *trainer = make_trainer(MT_F32);
    step(trainer);
    assert_ok(mt_checkpoint_save(in_dir("run"), trainer, &info, path));
    mt_checkpoint *c;
    assert_ok(mt_checkpoint_open(&c, path));
    const mt_checkpoint_meta *meta = mt_checkpoint_get_meta(c);
    assert_string_equal(meta->run_config, info.run_config);
    assert_string_equal(meta->git_revision, "abc123");
    assert_string_equal(meta->corpus, "text 1");
    assert_string_equal(meta->source_config, "");
    assert_string_equal(meta->compute, "f32");
    assert_string_equal(meta->kernel_set, test_device()->kernel_set);
    assert_int_equal(meta->step, 1);
    assert_int_equal(meta->seed, 42);
    assert_true(meta->training);
    assert_true(meta->config.router_bias_update_rate == 0.01);
    assert_int_equal(meta->config.aux_loss, MT_AUX_SWITCH);
    /* embed, norm, head; per layer 8, a router and the experts */
    assert_int_equal(mt_checkpoint_count(c), 3 + 2 * (8 + 1 + 3 * EXPERTS));
    mt_tensor t;
    assert_ok(
        mt_checkpoint_tensor(c, "/optim/m", "model.layers.1.mlp.experts.3.up_proj.weight", &t));
    assert_true(t.dtype == MT_F32 && t.ndim == 2 && t.shape[0] == 12 && t.shape[1] == WIDTH);
    float up[12 * WIDTH];
    t.data = up;
    assert_ok(mt_checkpoint_read(c, "/model", "model.layers.1.mlp.experts.3.up_proj.weight", &t));
    const mt_param *p = mt_param_store_find(mt_model_params(mt_trainer_model(trainer)),
                                            "model.layers.1.mlp.experts.gate_up");
    assert_non_null(p);
    assert_memory_equal(up, (const float *)p->master + (3 * 24 + 12) * WIDTH, sizeof up);
    assert_fails(mt_checkpoint_tensor(c, "/model", "nothing", &t), MT_EDAMAGED, "/model/nothing");
    mt_checkpoint_close(&c);
    /* it exports, and the export imports and loads: the weights of another model become these */
    assert_ok(mt_hf_export(in_dir("hf"), path, 0, NULL));
    assert_ok(mt_hf_import(in_dir("imported"), in_dir("hf")));
    mt_trainer *other = make_trainer(MT_F32);
    step(other), step(other);
    assert_ok(mt_checkpoint_load_model(mt_trainer_model(other), in_dir("imported")));
    mt_param_store *x = mt_model_params(mt_trainer_model(trainer));
    assert_memory_equal(mt_param_store_master(x),
                        mt_param_store_master(mt_model_params(mt_trainer_model(other))),
                        (size_t)mt_param_store_elements(x) * sizeof(float));
    assert_true(*mt_model_router_bias(mt_trainer_model(other), 0) == 0);
    assert_fails(mt_checkpoint_load(other, in_dir("imported"), NULL, true), MT_ECONFIG,
                 "without optimizer state");
    mt_trainer_destroy(&trainer);
    mt_trainer_destroy(&other);
    assert_ok(mt_dir_remove(in_dir("run")));
}

static void test_other_runs(void **state)
{
    (void)state;
    char path[MT_CHECKPOINT_PATH];
    mt_trainer *trainer = make_trainer(MT_F32), *other;
    step(trainer);
    assert_ok(mt_checkpoint_save(in_dir("run"), trainer, &info, path));
    assert_fails(mt_checkpoint_load(trainer, path, "text 2", false), MT_ECONFIG, "'text 2'");
    assert_ok(mt_checkpoint_load(trainer, path, "text 2", true));
    assert_ok(mt_checkpoint_load(trainer, path, NULL, false));
    mt_trainer_config c = trainer_config(MT_F32);
    c.model.rope_theta = 5;
    assert_ok(mt_trainer_create(&other, test_device(), &c));
    assert_fails(mt_checkpoint_load(other, path, NULL, false), MT_ECONFIG, "\"rope_theta\": 5.0");
    assert_ok(mt_checkpoint_load(other, path, NULL, true));
    expect_same(trainer, other);
    mt_trainer_destroy(&other);
    c = trainer_config(MT_F32);
    c.seed = 43;
    assert_ok(mt_trainer_create(&other, test_device(), &c));
    assert_fails(mt_checkpoint_load(other, path, NULL, false), MT_ECONFIG, "seed 42");
    mt_trainer_destroy(&other);
    c = trainer_config(MT_F32);
    c.model.moe_intermediate_size = 13;
    assert_ok(mt_trainer_create(&other, test_device(), &c));
    assert_fails(mt_checkpoint_load(other, path, NULL, true), MT_ECONFIG, "must be f32[13,16]");
    mt_trainer_destroy(&other);
    c = trainer_config(MT_F64);
    assert_ok(mt_trainer_create(&other, test_device(), &c));
    assert_fails(mt_checkpoint_load(other, path, NULL, false), MT_ECONFIG, "must be f64[");
    assert_ok(
        mt_checkpoint_load_model(mt_trainer_model(other), path)); /* weights alone are converted */
    mt_trainer_destroy(&other);
    mt_trainer_destroy(&trainer);
    assert_ok(mt_dir_remove(in_dir("run")));
}

/* Makes a checkpoint one that was written before they held the place in the data. */
static void forget_tokens(const char *checkpoint)
{
    char path[MT_CHECKPOINT_PATH + 16], hex[MT_HEX128_BYTES], text[256];
    int64_t bytes;
    snprintf(path, sizeof path, "%s/model.h5", checkpoint);
    hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
    assert_true(file >= 0);
    assert_true(H5Adelete_by_name(file, "/data", "tokens", H5P_DEFAULT) >= 0);
    assert_true(H5Fclose(file) >= 0);
    assert_ok(mt_file_xxh128(hex, &bytes, path));
    int used = snprintf(text, sizeof text, "mixtape checkpoint 1\n%lld %s model.h5\n",
                        (long long)bytes, hex);
    snprintf(text + used, sizeof text - (size_t)used, "end %016llx\n",
             (unsigned long long)XXH3_64bits(text, (size_t)used));
    snprintf(path, sizeof path, "%s/DONE", checkpoint);
    put_text(path, text);
}

/* The place in the data is that of so many batches of the run that was saved. */
static void test_older_place(void **state)
{
    (void)state;
    char path[MT_CHECKPOINT_PATH];
    mt_checkpoint_info told = info;
    mt_trainer *trainer = make_trainer(MT_F32), *other;
    mt_trainer_config c = trainer_config(MT_F32);
    for (int i = 0; i < 3; i++) step(trainer);
    told.run_config = "train: {batch_size: 2}\ndata: {sequence_length: 8}\n"
                      "recipe: fprop=bf16 dgrad=bf16 wgrad=mxfp8:source=dequantized\n";
    assert_ok(mt_checkpoint_save(in_dir("run"), trainer, &told, path));
    forget_tokens(path);
    c.batch_size = 2 * BATCH, c.sequence_length = SEQUENCE + 1;
    assert_ok(mt_trainer_create(&other, test_device(), &c));
    assert_ok(mt_checkpoint_load(other, path, "text 1", false));
    assert_int_equal(mt_trainer_tokens(other), 3 * BATCH * SEQUENCE);
    /* a run that says nothing of its batches */
    told.run_config = "";
    step(trainer);
    assert_ok(mt_checkpoint_save(in_dir("run"), trainer, &told, path));
    assert_ok(mt_checkpoint_load(other, path, "text 1", false));
    forget_tokens(path);
    assert_fails(mt_checkpoint_load(trainer, path, NULL, true), MT_EDAMAGED,
                 "how many tokens its 4 steps had");
    mt_trainer_destroy(&other);
    mt_trainer_destroy(&trainer);
    assert_ok(mt_dir_remove(in_dir("run")));
}

static void test_names(void **state)
{
    (void)state;
    char path[MT_CHECKPOINT_PATH], skipped[200];
    mt_trainer *trainer = make_trainer(MT_F32);
    assert_ok(mt_dir_create(in_dir("named")));
    assert_ok(mt_trainer_set_steps(trainer, 123456789));
    assert_ok(mt_checkpoint_save(in_dir("named/ckpt"), trainer, &info, path));
    assert_ok(mt_trainer_set_steps(trainer, 99));
    assert_ok(mt_checkpoint_save(in_dir("named/ckpt"), trainer, &info, path));
    assert_ok(mt_checkpoint_save(in_dir("named/ckpt"), trainer, &info, NULL)); /* again */
    assert_ok(mt_checkpoint_name_latest(in_dir("named/ckpt"), path));
    size_t bytes;
    char *text = get_file(in_dir("named/ckpt/latest"), &bytes);
    assert_string_equal(text, "step_00000099\n");
    free(text);
    static const char *const given[] = { "named", "named/ckpt", "named/ckpt/step_123456789" };
    mt_checkpoint *c;
    for (int i = 0; i < 3; i++) {
        assert_ok(mt_checkpoint_open_given(&c, skipped, sizeof skipped, in_dir(given[i])));
        assert_string_equal(mt_checkpoint_path(c), in_dir("named/ckpt/step_123456789"));
        mt_checkpoint_close(&c);
    }
    assert_fails(mt_checkpoint_open_given(&c, skipped, sizeof skipped, in_dir("none")), MT_EIO,
                 "none");
    mt_trainer_destroy(&trainer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resume),     cmocka_unit_test(test_contents),
        cmocka_unit_test(test_other_runs), cmocka_unit_test(test_older_place),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
