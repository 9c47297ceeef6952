/* changes.jsonl: what is kept of it where a run goes on from an earlier step, and what is none. */
#include "tests/support/fault.h"
#include "tests/train/files.h"

#include "train/changes.h"

#define LR(step, from, to)                                                                         \
    "{\"step\":" #step ",\"key\":\"optim.lr\",\"from\":\"" from "\",\"to\":\"" to "\"}\n"
#define STEPS(step, from, to)                                                                      \
    "{\"step\":" #step ",\"key\":\"train.steps\",\"from\":\"" from "\",\"to\":\"" to "\"}\n"

static void assert_written(const mt_changes *c, const char *want)
{
    char path[256];
    size_t bytes;
    snprintf(path, sizeof path, "%s", in_dir("changes.jsonl"));
    assert_ok(mt_changes_write(c, path));
    assert_int_equal(mt_path_exists(path), *want != '\0');
    if (!*want) return;
    char *text = get_file(path, &bytes);
    assert_string_equal(text, want);
    free(text);
}

static void changes_are_written_and_read(void **state)
{
    (void)state;
    mt_changes c;
    assert_ok(mt_changes_read(&c, in_dir("none")));
    assert_int_equal(c.count, 0);
    assert_ok(mt_changes_add(&c, 0, "optim.lr", "1", "2")); /* no step was made with 1 */
    assert_ok(mt_changes_add(&c, 5, "optim.lr", "2", "2"));
    assert_written(&c, "");
    assert_ok(mt_changes_add(&c, 5, "optim.lr", "2", "3"));
    assert_ok(mt_changes_add(&c, 5, "train.steps", "10", "20"));
    assert_ok(mt_changes_add(&c, 9, "optim.lr", "3", "2"));
    assert_written(&c, LR(5, "2", "3") STEPS(5, "10", "20") LR(9, "3", "2"));
    mt_changes_free(&c);
    assert_ok(mt_changes_read(&c, in_dir("changes.jsonl")));
    assert_int_equal(c.count, 3);
    assert_int_equal(c.items[2].step, 9);
    assert_string_equal(c.items[2].key, "optim.lr");
    assert_string_equal(c.items[2].from, "3");
    assert_string_equal(c.items[2].to, "2");
    mt_changes_free(&c);
    assert_null(c.items);
}

static void a_key_changes_once_after_a_step(void **state)
{
    (void)state;
    mt_changes c = { 0 };
    assert_ok(mt_changes_add(&c, 5, "optim.lr", "2", "3"));
    assert_ok(mt_changes_add(&c, 5, "train.steps", "10", "20"));
    assert_ok(mt_changes_add(&c, 5, "optim.lr", "3", "4"));
    assert_written(&c, LR(5, "2", "4") STEPS(5, "10", "20"));
    assert_ok(mt_changes_add(&c, 5, "optim.lr", "4", "2")); /* as if it had never been */
    assert_written(&c, STEPS(5, "10", "20"));
    mt_changes_free(&c);
}

static void going_on_from_an_earlier_step_moves_changes_there(void **state)
{
    (void)state;
    static const struct {
        int64_t step;
        const char *after;
    } cases[] = {
        { 20, LR(5, "2", "3") STEPS(7, "10", "20") LR(9, "3", "4") },
        { 9, LR(5, "2", "3") STEPS(7, "10", "20") LR(9, "3", "4") },
        { 8, LR(5, "2", "3") STEPS(7, "10", "20") LR(8, "3", "4") },
        { 5, LR(5, "2", "4") STEPS(5, "10", "20") },
        { 3, LR(3, "2", "4") STEPS(3, "10", "20") },
        { 0, "" },
    };
    mt_changes c;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_text(in_dir("changes.jsonl"), cases[0].after);
        assert_ok(mt_changes_read(&c, in_dir("changes.jsonl")));
        assert_ok(mt_changes_rewind(&c, cases[i].step));
        assert_written(&c, cases[i].after);
        mt_changes_free(&c);
    }
}

static void a_damaged_line_is_named(void **state)
{
    (void)state;
    static const char *const lines[] = { "{\"step\":9}\n", "{\"step\":9,\n", "[]\n", "\n" };
    char text[512];
    mt_changes c;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        snprintf(text, sizeof text, LR(5, "2", "3") "%s", lines[i]);
        put_text(in_dir("changes.jsonl"), text);
        assert_fails(mt_changes_read(&c, in_dir("changes.jsonl")), MT_EDAMAGED,
                     "changes.jsonl line 2: ");
        assert_int_equal(c.count, 0);
    }
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    bool failed = true;
    char path[256];
    put_text(in_dir("changes.jsonl"), LR(5, "2", "3") STEPS(7, "10", "20") LR(9, "3", "4"));
    snprintf(path, sizeof path, "%s", in_dir("changes.jsonl"));
    int64_t live = fault_live();
    for (int64_t n = 1; failed; n++) {
        mt_changes c;
        fault_arm(n, FAULT_ONCE);
        mt_status status = mt_changes_read(&c, path);
        if (status == MT_OK) status = mt_changes_rewind(&c, 8);
        if (status == MT_OK) status = mt_changes_add(&c, 8, "optim.lr", "4", "5");
        if (status == MT_OK) status = mt_changes_add(&c, 8, "optim.eps", "1", "2");
        failed = fault_disarm();
        assert_int_equal(status, failed ? MT_ENOMEM : MT_OK);
        mt_changes_free(&c);
        assert_int_equal(fault_live(), live);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(changes_are_written_and_read),
        cmocka_unit_test(a_key_changes_once_after_a_step),
        cmocka_unit_test(going_on_from_an_earlier_step_moves_changes_there),
        cmocka_unit_test(a_damaged_line_is_named),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
