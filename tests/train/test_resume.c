/* Going on with a run otherwise than it was begun: what is refused, what is forced, and what is
 * kept of it. */
#include "tests/train/runs.h"

static void assert_changes(const char *run, const char *want)
{
    char path[256], *text;
    size_t bytes;
    snprintf(path, sizeof path, "%s/changes.jsonl", run);
    if (!*want) {
        assert_false(mt_path_exists(path));
        return;
    }
    assert_ok(mt_file_read_all(&text, &bytes, path, 1 << 20));
    assert_string_equal(text, want);
    free(text);
}

#define CHANGE(step, key, from, to)                                                                \
    "{\"step\":" #step ",\"key\":\"" key "\",\"from\":\"" from "\",\"to\":\"" to "\"}\n"

/* Metrics go on over it, as they do over other stops; the configuration is the last one. */
static void what_changes_is_kept(void **state)
{
    (void)state;
    assert_changes("straight", "");
    assert_program("train t.yaml --run kept --set train.steps=5", 0, "done");
    assert_program("train t.yaml --run kept --resume --set train.steps=10 --set optim.lr=1e-3", 0,
                   "done");
    assert_changes("kept",
                   CHANGE(5, "train.steps", "5", "10") CHANGE(5, "optim.lr", "0.003", "0.001"));
    assert_program("train t.yaml --run kept --resume --set train.steps=10 --set optim.lr=2e-3 "
                   "--set parallel.timeout=20",
                   0, "all made before");
    assert_program("train t.yaml --run kept --resume --set train.steps=10 --set optim.lr=1e-3 "
                   "--set parallel.timeout=20",
                   0, "all made before");
    assert_changes("kept",
                   CHANGE(5, "train.steps", "5", "10") CHANGE(5, "optim.lr", "0.003", "0.001")
                       CHANGE(10, "parallel.timeout", "300", "20"));
    assert_program("compare kept", 0,
                   "kept changed after step 5: train.steps 5 -> 10, optim.lr 0.003 -> 0.001.\n");
    assert_null(strstr(program_text, "timeout"));
    /* from the checkpoint before, from which on all that was changed holds; and from none */
    assert_int_equal(unlink("kept/ckpt/step_00000010/DONE"), 0);
    assert_program("train t.yaml --run kept --resume --set train.steps=10 --set optim.lr=2e-3", 0,
                   "resumed from kept/ckpt/step_00000005");
    assert_changes("kept",
                   CHANGE(5, "train.steps", "5", "10") CHANGE(5, "optim.lr", "0.003", "0.002"));
    assert_ok(mt_dir_remove("kept/ckpt"));
    assert_program("train t.yaml --run kept --resume --force --set train.steps=3", 0,
                   "nothing saved in kept yet");
    assert_changes("kept", "");
    assert_program("train t.yaml --run kept --resume --force --set train.steps=4 "
                   "--set data.train=other.h5",
                   0, "done");
    assert_true(file_has("kept/changes.jsonl", "{\"step\":3,\"key\":\"data.train\",\"from\":"));
    assert_true(file_has("kept/changes.jsonl", "{\"step\":3,\"key\":\"train_corpus\",\"from\":"));
    assert_program("compare kept", 0,
                   "kept changed after step 3: train.steps 3 -> 4, train_corpus");
}

static void damaged_changes_are_named_before_anything_is_written(void **state)
{
    (void)state;
    assert_program("train t.yaml --run hurt --set train.steps=3", 0, "done");
    write_file("hurt/changes.jsonl", "???\n");
    assert_program("train t.yaml --run hurt --resume --set train.steps=4", 5,
                   "hurt/changes.jsonl line 1: ");
    assert_true(file_has("hurt/config.resolved.yaml", "steps: 3"));
    assert_int_equal(unlink("hurt/changes.jsonl"), 0);
    assert_program("train t.yaml --run hurt --resume --set train.steps=4", 0, "done");
    assert_changes("hurt", CHANGE(3, "train.steps", "3", "4"));
}

/* Before the trainer is made, of the configuration; and, where no configuration is recorded that
 * says otherwise, by the checkpoint. */
static void force_is_offered_where_it_works(void **state)
{
    (void)state;
    static const char offer[] = "(--force to go on all the same)\n";
    static const struct {
        const char *set;
        bool works;
    } cases[] = {
        { "model.num_experts=8", false },
        { "model.tie_word_embeddings=true", false },
        { "model.model_type=mixtral", false },
        { "train.dtype=f64", false },
        { "optim.moments=bf16", false },
        { "recipe.delayed.history=8", false },
        { "train.seed=3 --set optim.moments=bf16", false },
        { "model.num_experts_per_tok=1", true },
        { "model.rope_theta=1e4", true },
        { "train.seed=3", true },
        { "recipe=mxfp8", true },
    };
    char text[2048], line[512];
    snprintf(text, sizeof text, "%srecipe: {delayed: {history: 4}, use: fp8_delayed}\n", config);
    write_file("f.yaml", text);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_program("train f.yaml --run forced --set train.steps=2", 0, "done");
        snprintf(line, sizeof line, "train f.yaml --run forced --resume --set %s", cases[i].set);
        assert_program(line, 2, "it belongs to the run");
        if (!strstr(program_text, offer) == cases[i].works)
            fail_msg("%s:\n%s", cases[i].set, program_text);
        snprintf(line, sizeof line,
                 "train f.yaml --run forced --resume --force --set train.steps=2"
                 " --set %s",
                 cases[i].set);
        assert_program(line, cases[i].works ? 0 : 2, "");
        assert_ok(mt_dir_remove("forced"));
    }
    /* nothing is saved yet that it would have to fit */
    assert_program("train f.yaml --run forced --set train.steps=2", 0, "done");
    assert_ok(mt_dir_remove("forced/ckpt"));
    assert_program("train f.yaml --run forced --resume --set model.num_experts=8", 2, offer);
    assert_program("train f.yaml --run forced --resume --force --set train.steps=2 "
                   "--set model.num_experts=8",
                   0, "done");
}

static void a_checkpoint_offers_force_where_it_fits(void **state)
{
    (void)state;
    static const char offer[] = "(--force to go on all the same)\n";
    assert_program("train t.yaml --run offers --set train.steps=2", 0, "done");
    assert_program("train t.yaml --run offers --resume --set train.steps=3 "
                   "--set data.train=other.h5",
                   2, "data.train: checkpoint 'offers/ckpt/step_00000002' was trained on corpus");
    assert_non_null(strstr(program_text, offer));
    static const char *const sets[] = { "model.rope_theta=1e4", "model.num_experts=8" };
    for (int i = 0; i < 2; i++) {
        char line[512];
        snprintf(line, sizeof line, "train t.yaml --run taken%d --set train.steps=2 --set %s", i,
                 sets[i]);
        assert_program(line, 0, "done");
        snprintf(line, sizeof line, "rm -r taken%d/ckpt && cp -r offers/ckpt taken%d", i, i);
        assert_int_equal(system(line), 0);
        snprintf(line, sizeof line,
                 "train t.yaml --run taken%d --resume --set train.steps=3 "
                 "--set %s",
                 i, sets[i]);
        assert_program(line, 2,
                       i ? "is of another model: it has \"num_experts\": "
                         : "is of another model: it has \"rope_theta\": 1000000.0, the run "
                           "\"rope_theta\": 10000.0");
        assert_true(!strstr(program_text, offer) == (i == 1));
    }
}

static void a_run_goes_on_without_its_record(void **state)
{
    (void)state;
    assert_program("train t.yaml --run bare --set train.steps=5", 0, "done");
    assert_int_equal(unlink("bare/config.resolved.yaml"), 0);
    assert_program(
        "train t.yaml --run bare --resume", 2,
        "bare has checkpoints and no config.resolved.yaml (--force to go on without it)");
    assert_program("train t.yaml --run bare --resume --force", 0,
                   "changed since: config.resolved.yaml lost -> written anew");
    assert_non_null(strstr(program_text, "resumed from bare/ckpt/step_00000005"));
    assert_changes("bare", CHANGE(5, "config.resolved.yaml", "lost", "written anew"));
    assert_program("compare bare", 0,
                   "bare changed after step 5: config.resolved.yaml lost -> written anew.\n");
    write_file("bare/config.resolved.yaml", "model: [\n");
    assert_program("train t.yaml --run bare --resume --force", 0, "lost -> written anew");
    assert_int_equal(unlink("bare/config.resolved.yaml"), 0);
    assert_ok(mt_dir_remove("bare/ckpt"));
    assert_program("train t.yaml --run bare --resume --force", 2, "not a run to resume");
}

static int64_t dropped_at(const char *run, int64_t step)
{
    json_t *lines = read_metrics(run), *line;
    int64_t dropped = -1;
    size_t i;
    json_array_foreach(lines, i, line)
    {
        const json_t *x = json_object_get(line, "dropped");
        if (x && json_integer_value(json_object_get(line, "step")) == step)
            dropped = json_integer_value(x);
    }
    json_decref(lines);
    return dropped;
}

/* Also those of steps that have no line, before and after a stop. */
static void all_that_was_dropped_is_counted(void **state)
{
    (void)state;
#define FULL                                                                                       \
    " --set model.capacity_factor=1 --set optim.schedule=constant --set train.eval_every=0 "       \
    "--set train.steps="
    assert_program("train t.yaml --run each" FULL "12", 0, "done");
    assert_program("train t.yaml --run some --set train.log_every=5" FULL "12", 0, "done");
    assert_program("train t.yaml --run stops --set train.log_every=50" FULL "7", 0, "done");
    assert_program("train t.yaml --run stops --resume --set train.log_every=5" FULL "12", 0,
                   "done");
    int64_t last = 0;
    for (int64_t step = 1; step <= 12; step++) {
        int64_t now = dropped_at("each", step);
        assert_true(now > last); /* with room for the mean load, some expert has too little */
        last = now;
    }
    assert_int_equal(dropped_at("some", 5), dropped_at("each", 5));
    assert_int_equal(dropped_at("stops", 7), dropped_at("each", 7));
    for (int64_t step = 10; step <= 12; step += 2) {
        assert_int_equal(dropped_at("some", step), dropped_at("each", step));
        assert_int_equal(dropped_at("stops", step), dropped_at("each", step));
    }
#undef FULL
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_changes_is_kept),
        cmocka_unit_test(force_is_offered_where_it_works),
        cmocka_unit_test(a_checkpoint_offers_force_where_it_fits),
        cmocka_unit_test(a_run_goes_on_without_its_record),
        cmocka_unit_test(all_that_was_dropped_is_counted),
        cmocka_unit_test(damaged_changes_are_named_before_anything_is_written),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
