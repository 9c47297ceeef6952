/* What was given in the place of something else is named: what it is, and what is wanted. */
#include "tests/train/runs.h"

#include <sys/resource.h>

#include "train/fileio.h"
#include "train/h5.h"
#include "train/kind.h"

static int kinds_setup(void **state)
{
    setup(state);
    mt_h5 *file;
    assert_ok(mt_h5_create(&file, "empty.h5"));
    assert_ok(mt_h5_commit(&file));
    assert_int_equal(mkdir("plain", 0700), 0);
    assert_int_equal(symlink("around", "around"), 0);
    assert_program("export straight hf", 0, "hf: from");
    return 0;
}

/* A file behind so many bytes of others, which HDF5 allows. */
static void write_behind(const char *name, size_t before, const char *of)
{
    char *data;
    size_t bytes;
    assert_ok(mt_file_read_all(&data, &bytes, of, 1 << 20));
    FILE *file = fopen(name, "wb");
    assert_non_null(file);
    for (size_t i = 0; i < before; i++) assert_int_equal(fputc('x', file), 'x');
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
    free(data);
}

static void kinds_are_told_apart(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        mt_path_kind kind;
    } cases[] = {
        { "nothing", MT_KIND_NOTHING },
        { "t.yaml/t.yaml", MT_KIND_NOTHING },
        { "around", MT_KIND_UNREADABLE },
        { "/dev/null", MT_KIND_DEVICE },
        { "plain", MT_KIND_DIRECTORY },
        { "straight", MT_KIND_RUN },
        { "straight/ckpt/step_00000024", MT_KIND_CHECKPOINT },
        { "hf", MT_KIND_HUGGING_FACE },
        { "t.yaml", MT_KIND_TEXT },
        { "train.h5", MT_KIND_HDF5 },
        { "after.h5", MT_KIND_HDF5 },
        { "hf/model.safetensors", MT_KIND_SAFETENSORS },
        { "a.empty", MT_KIND_EMPTY },
        { "a.npy", MT_KIND_NUMPY },
        { "a.pt", MT_KIND_ZIP },
        { "a.gguf", MT_KIND_GGUF },
        { "a.gz", MT_KIND_GZIP },
        { "a.other", MT_KIND_OTHER },
    };
    write_file("a.empty", "");
    write_file("a.npy", "\223NUMPY\1");
    write_file("a.pt", "PK\3\4");
    write_file("a.gguf", "GGUF\3");
    write_file("a.gz", "\037\213\b");
    write_file("a.other", "\1\2\3");
    write_behind("after.h5", 1024, "train.h5");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (mt_path_kind_find(cases[i].path) != cases[i].kind)
            fail_msg("%s is %s", cases[i].path, mt_path_kind_of(cases[i].path));
    assert_string_equal(mt_path_kind_of("hf"), "a Hugging Face directory");
    assert_program("data info after.h5", 0, "vocabulary  256");
    assert_program("inspect after.h5", 0, "a corpus");
}

/* A corpus that could not be read stays one, and says why. */
static void what_is_not_to_be_had_is_no_other_kind(void **state)
{
    (void)state;
    struct rlimit before, limit;
    mt_h5 *file;
    int next = dup(0);
    assert_true(next >= 0);
    assert_int_equal(close(next), 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    limit = before, limit.rlim_cur = (rlim_t)next;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    mt_status status = mt_h5_open_given(&file, "train.h5", "a corpus");
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_fails(status, MT_EIO, "cannot open 'train.h5': Too many open files");
}

/* Nothing of it is called damaged, and no library's words stand for what is the matter. */
static void other_kinds_are_named(void **state)
{
    (void)state;
    static const struct {
        const char *line;
        int code;
        const char *words;
    } cases[] = {
        { "train t.yaml --set data.train=straight", 5,
          "data.train: 'straight' is the directory of a run, not a corpus: `mixtape data pack`" },
        { "train t.yaml --set data.valid=straight/ckpt/step_00000024/model.h5", 5,
          "data.valid: 'straight/ckpt/step_00000024/model.h5' is an HDF5 file, not a corpus" },
        { "train t.yaml --set data.train=hf/model.safetensors", 5, "is a safetensors file, not a" },
        { "train t.yaml --set data.train=nothing.h5", 5, "data.train: cannot open 'nothing.h5'" },
        { "data info plain", 5, "'plain' is a directory, not a corpus" },
        { "train train.h5", 2, "'train.h5' is an HDF5 file, not a configuration: that is a YAML" },
        { "train straight", 2, "which is straight/config.resolved.yaml" },
        { "plan hf", 2, "'hf' is a Hugging Face directory, not a configuration" },
        { "plan hf/config.json", 2, "Hugging Face config.json's keys under model:" },
        { "eval hf", 5, "not a checkpoint: `mixtape import hf -o CKPT` makes one of it" },
        { "sample plain", 5, "'plain' is a directory that holds no checkpoint" },
        { "export train.h5 out", 5, "'train.h5' is an HDF5 file: a checkpoint is a directory" },
        { "inspect t.yaml", 5, "'t.yaml' is a text: inspect reads" },
        { "inspect around", 5, "cannot open 'around': Too many levels of symbolic links" },
        { "inspect /proc/self/mem", 5, "cannot read '/proc/self/mem': Input/output error" },
        { "inspect nothing", 5, "there is no file or directory 'nothing'" },
        { "import train.h5 -o imported", 5, "'train.h5' is an HDF5 file, not a Hugging Face" },
        { "import plain -o imported", 5, "'plain' has no config.json" },
        { "import around -o imported", 5, "cannot open 'around': Too many levels" },
        { "import nothing -o imported", 5, "there is no directory 'nothing'" },
        { "compare hf", 2, "'hf' is a Hugging Face directory, not the directory of a run" },
        { "quantize t.yaml -o q.h5 --format mxfp8", 5, "'t.yaml' is a text, not an HDF5 file" },
        { "quantize empty.h5 -o q.h5 --format mxfp8", 5, "'empty.h5' has no dataset x" },
        { "trace straight --tokens t.yaml -o q.h5", 5,
          "'t.yaml' is a text, not an HDF5 file with a dataset tokens" },
        { "train t.yaml --run hf", 2,
          "run hf: it is a Hugging Face directory that is not empty, and no run" },
        { "train t.yaml --run straight/ckpt --resume", 2, "/straight')" },
        { "train t.yaml --run straight/ckpt/step_00000024 --resume", 2,
          "not a run to resume (the run is '/" },
        { "train t.yaml --run straight/ckpt/step_00000024/ --resume", 2, "/straight')" },
        { "train t.yaml --run straight/ckpt/step_00000024", 2, "/straight')" },
        { "data pack train.h5 -o again.h5", 2, "is asked for: --format bytes\n" },
        { "data pack train.txt -o again.h5 --split tail:9", 2, "tokens: --valid FILE.h5" },
        { "data pack train.txt -o again.h5 --sha256 00", 2, "sha256 '00' is not 64 hexadecimal" },
        { "data pack nothing.txt -o again.h5 --sha256 00", 2, "'00' is not 64" }, /* at once */
        { "data pack train.txt -o again.h5 --valid v.h5", 2, "a split rule: --split RULE" },
        { "sample straight --dtype fp8", 2, "dtype 'fp8' is not one of f64, f32, bf16\n" },
        { "train valid.txt", 2, "sections with keys are expected, such as model: and data:" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_program(cases[i].line, cases[i].code, cases[i].words);
    assert_int_equal(access("imported", F_OK), -1);
    write_file("hf/DONE", "");
    assert_program("import hf -o imported", 0, "imported: from hf");
    assert_program("compare straight straight", 2, "'straight' is given twice");
    assert_program("train t.yaml --run straight --resume --set data.sequence_length=16", 2,
                   "data.sequence_length was 32 and is 16 now; it belongs to the run");
    assert_program("train t.yaml --run straight --resume --set model.max_position_embeddings=64", 2,
                   "model.max_position_embeddings was 32 and is 64 now");
    assert_int_equal(rename("valid.h5", "elsewhere.h5"), 0);
    assert_program("eval straight", 5,
                   "data.valid of the run: cannot open 'valid.h5': No such file");
    assert_int_equal(rename("elsewhere.h5", "valid.h5"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kinds_are_told_apart),
        cmocka_unit_test(what_is_not_to_be_had_is_no_other_kind),
        cmocka_unit_test(other_kinds_are_named),
    };
    return cmocka_run_group_tests(tests, kinds_setup, program_teardown);
}
