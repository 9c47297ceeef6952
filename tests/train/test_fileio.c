/* Files: one writer at a time. */
#include "tests/train/files.h"
#include "train/corpus.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_one_writer) };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
