/* Runs that begin with the weights of a checkpoint (train.init_from). */
#include "tests/train/runs.h"

/* A step at a rate of 0, which leaves the weights as they were. */
#define STILL                                                                                      \
    "train t.yaml --set train.steps=1 --set optim.warmup_steps=0 --set optim.lr=0 "                \
    "--set model.router_bias_update_rate=0 "

/* The loss line of `eval`, without the name of what was evaluated. */
static void evaluate(char result[256], const char *given)
{
    char line[640];
    snprintf(line, sizeof line, "eval %s --data valid.h5 --sequence 32 --dtype f32", given);
    assert_program(line, 0, "loss ");
    snprintf(result, 256, "%s", strstr(program_text, "loss "));
}

static void the_weights_are_those_of_the_checkpoint(void **state)
{
    (void)state;
    static const char *const settings[] = { "", "--set optim.master=bf16+i16 ",
                                            "--set optim.offload=true ",
                                            "--set recipe=fp8_delayed ", "--set train.dtype=f64 " };
    char want[256], got[256], line[512];
    evaluate(want, "straight");
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        snprintf(line, sizeof line, STILL "%s--run still%zu --set train.init_from=straight",
                 settings[i], i);
        assert_program(line, 0, "begins with the weights of straight");
        snprintf(line, sizeof line, "still%zu", i);
        if (strstr(settings[i], "recipe")) continue; /* evaluated in it */
        evaluate(got, line);
        assert_string_equal(got, want);
    }
}

/* What comes of a Hugging Face directory is trained on, goes on after a stop without it, and goes
 * back. */
static void imported_models_are_trained(void **state)
{
    (void)state;
    char want[256], got[256];
    assert_program("export straight there", 0, "there: from straight");
    assert_program("import there -o imported", 0, "imported: from there");
    assert_program("train t.yaml --run whole --set train.init_from=imported --set train.steps=6", 0,
                   "done: 6 steps");
    assert_program("train t.yaml --run parts --set train.init_from=imported --set train.steps=6 "
                   "--set checkpoint.every=3",
                   0, "done: 6 steps");
    assert_int_equal(rename("parts/ckpt/step_00000006", "aside"), 0);
    assert_int_equal(rename("imported", "moved"), 0);
    assert_program("train t.yaml --run parts --set train.init_from=imported --set train.steps=6 "
                   "--set checkpoint.every=3 --resume",
                   0, "resumed from parts/ckpt/step_00000003");
    assert_null(strstr(program_text, "begins with"));
    evaluate(want, "whole"), evaluate(got, "parts");
    assert_string_equal(got, want);
    assert_program("export whole back", 0, "back: from whole");
    assert_program("train t.yaml --run parts --set train.steps=6 --resume", 2,
                   "train.init_from was imported and is");
}

/* One that is no number is named before the first step, also where a format makes a number of it.
 */
static void weights_that_are_not_finite_are_refused(void **state)
{
    (void)state;
    static const uint32_t nan = 0x7fc00000;
    assert_program("export straight spoilt", 0, "spoilt: from straight");
    FILE *f = fopen("spoilt/model.safetensors", "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -(long)sizeof nan, SEEK_END), 0);
    assert_int_equal(fwrite(&nan, sizeof nan, 1, f), 1);
    assert_int_equal(fclose(f), 0);
    assert_program("import spoilt -o spoilt.ckpt", 0, "spoilt.ckpt: from spoilt");
    assert_program("train t.yaml --run never --set train.init_from=spoilt.ckpt --set recipe=nvfp4",
                   3, "numerics: spoilt.ckpt: the weight model.");
    assert_false(file_has("never/metrics.jsonl", "\"loss\""));
}

/* What a run began with stays what its record says; before there is a checkpoint it can be another.
 */
static void a_run_has_begun_once(void **state)
{
    (void)state;
    static const char resume[] = "train t.yaml --run once --set train.steps=2 --resume --force";
    char line[256];
    assert_program("train t.yaml --run once --set train.init_from=straight --set train.steps=2", 0,
                   "done: 2 steps");
    snprintf(line, sizeof line, "%s --set train.init_from=other", resume);
    assert_program(line, 2,
                   "train.init_from was straight and is other now; the run began with the former");
    assert_program(resume, 2,
                   "train.init_from was straight and is \"\" now; the run began with the former");
    assert_true(file_has("once/config.resolved.yaml", "init_from: straight"));
    assert_int_equal(access("once/changes.jsonl", F_OK), -1);
    assert_ok(mt_dir_remove("once/ckpt"));
    snprintf(line, sizeof line, "%s --set train.init_from=straight/ckpt/step_00000020", resume);
    assert_program(line, 0, "begins with the weights of straight/ckpt/step_00000020");
    assert_true(file_has("once/config.resolved.yaml", "init_from: straight/ckpt/step_00000020"));
}

static void what_is_another_model_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *set, *words;
        int code;
    } cases[] = {
        { "train.init_from=nowhere", "train.init_from: there is no checkpoint or run 'nowhere'",
          MT_EXIT_FILES },
        { "train.init_from=train.h5", "train.init_from: ", MT_EXIT_FILES },
        { "train.init_from=straight --set model.rope_theta=7", "rope_theta", MT_EXIT_USAGE },
        { "train.init_from=straight --set model.num_experts_per_tok=1", "num_experts_per_tok",
          MT_EXIT_USAGE },
        { "train.init_from=straight --set model.moe_intermediate_size=16",
          "tensors and shapes must be the model's", MT_EXIT_USAGE },
        { "train.init_from=straight --set model.num_hidden_layers=1",
          "tensors and shapes must be the model's", MT_EXIT_USAGE },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[256];
        snprintf(line, sizeof line, "train t.yaml --run refused --set %s", cases[i].set);
        assert_program(line, cases[i].code, cases[i].words);
        assert_int_equal(access("refused", F_OK), -1);
        assert_null(strstr(program_text, "memory planned"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_weights_are_those_of_the_checkpoint),
        cmocka_unit_test(imported_models_are_trained),
        cmocka_unit_test(weights_that_are_not_finite_are_refused),
        cmocka_unit_test(a_run_has_begun_once),
        cmocka_unit_test(what_is_another_model_is_refused),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
