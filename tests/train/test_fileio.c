/* Files: one writer at a time. */
#include "tests/train/files.h"
#include "train/checkpoint_priv.h"
#include "train/corpus.h"
#include "train/signals.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* Two at once would mix their tokens. The second has touched nothing; what one that died has left
 * holds nobody. */
static void test_one_writer(void **state)
{
    (void)state;
    const char *input = in_dir("w.txt");
    char out[300], valid[300], temp[MT_PATH_BYTES];
    snprintf(out, sizeof out, "%s/w.h5", files_dir);
    snprintf(valid, sizeof valid, "%s/wv.h5", files_dir);
    const mt_corpus_pack_args args = {
        .inputs = &input, .input_count = 1, .output = out, .valid_output = valid, .split = "tail:2"
    };
    const char *const paths[2] = { out, valid };
    mt_corpus_pack_result r;
    mt_file_writer *writer;
    put_text(input, "abcdefgh");
    for (int k = 0; k < 2; k++) {
        size_t bytes;
        int other;
        assert_ok(mt_file_begin(&other, temp, paths[k]));
        assert_int_equal(write(other, "half", 4), 4);
        assert_fails(mt_corpus_pack(&r, &args), MT_ECONFIG,
                     k ? "wv.h5': another process is writing it"
                       : "w.h5': another process is writing it");
        assert_fails(mt_file_writer_open(&writer, paths[k]), MT_ECONFIG, "another process");
        char *text = get_file(temp, &bytes);
        assert_string_equal(text, "half");
        free(text);
        assert_false(mt_path_exists(out) || mt_path_exists(valid));
        close(other);
    }
    assert_ok(mt_corpus_pack(&r, &args));
    assert_int_equal(r.tokens + r.valid_tokens, 8);
    assert_false(mt_path_exists(temp));
}

/* What a signal that ends a process finds begun goes, what has its name already, or another's file
 * of the name it had, stays; a signal that is ignored is. */
static void test_ended_by_a_signal(void **state)
{
    (void)state;
    char path[300], done[300], temp[MT_PATH_BYTES], other[MT_PATH_BYTES];
    snprintf(path, sizeof path, "%s/ended", files_dir);
    snprintf(done, sizeof done, "%s/done", files_dir);
    for (int k = 0; k < 3; k++) {
        static const int numbers[] = { SIGTERM, SIGINT, SIGHUP };
        int status, fd, own;
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            for (int n = 0; n < 3; n++) signal(numbers[n], SIG_DFL); /* whoever began the test */
            if (k == 2) signal(SIGINT, SIG_IGN);
            mt_signals_clean_up();
            bool ok = mt_file_begin(&own, other, done) == MT_OK && rename(other, done) == 0 &&
                      (fd = open(other, O_CREAT | O_WRONLY, 0600)) >= 0 &&
                      mt_file_begin(&own, temp, path) == MT_OK;
            if (k == 2) raise(SIGINT);
            if (ok) raise(numbers[k]);
            _exit(1);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == numbers[k]);
        assert_ok(mt_path_format(temp, "%s.tmp", path));
        assert_ok(mt_path_format(other, "%s.tmp", done));
        assert_false(mt_path_exists(temp));
        assert_true(mt_path_exists(done) && mt_path_exists(other));
        assert_int_equal(unlink(other), 0);
    }
}

/* So does a checkpoint, be it just begun, or all but renamed. */
static void test_checkpoint_ended_by_a_signal(void **state)
{
    (void)state;
    for (int late = 0; late < 2; late++) {
        char temp[300];
        int status;
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            mt_checkpoint_stage stage;
            signal(SIGTERM, SIG_DFL);
            mt_signals_clean_up();
            bool ok = mt_checkpoint_stage_begin(&stage, in_dir("ckpt")) == MT_OK;
            snprintf(stage.path, sizeof stage.path, "%s/nowhere/ckpt", files_dir);
            if (late) ok = ok && mt_checkpoint_stage_publish(&stage, NULL, 0) == MT_EIO;
            if (ok && access(in_dir(late ? "ckpt.tmp/DONE" : "ckpt.tmp/model.h5.tmp"), F_OK) == 0)
                raise(SIGTERM);
            _exit(1);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
        snprintf(temp, sizeof temp, "%s/ckpt.tmp", files_dir);
        assert_false(mt_path_exists(temp));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_one_writer),
                                        cmocka_unit_test(test_ended_by_a_signal),
                                        cmocka_unit_test(test_checkpoint_ended_by_a_signal) };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
