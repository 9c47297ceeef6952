/* Going on with a run otherwise than it was begun: what is refused, what is forced, and what is
 * kept of it. */
#include "tests/train/runs.h"

#include "train/config.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_changes_is_kept),
        cmocka_unit_test(damaged_changes_are_named_before_anything_is_written),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
