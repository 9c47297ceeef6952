/* What goes wrong around a run: bad input, damaged files and such as cannot be read, full disks,
 * readers that leave and bad numbers end it with the code of their class, or not at all, and lose
 * nothing. */
#include "tests/train/runs.h"

#include "train/corpus.h"
#include "train/fileio.h"

static void bad_input_has_the_code_of_its_class(void **state)
{
    (void)state;
    static const struct {
        const char *options;
        int code;
        const char *words;
    } cases[] = {
        { "--set model.num_expertz=4", 2, "did you mean model.num_experts" },
        { "--set model.num_experts_per_tok=5", 2, "num_experts_per_tok is 5" },
        { "--set model.num_key_value_heads=3", 2, "num_key_value_heads" },
        { "--set model.vocab_size=100", 2, "100" },
        { "--set data.train=short.h5", 2, "not one window of data.sequence_length" },
        { "--set data.valid=short.h5", 2, "not one window of data.sequence_length" },
        { "--set data.train=none.h5", 5, "none.h5" },
        { "--set data.train=train.txt", 5,
          "'train.txt' is a text, not a corpus: `mixtape data pack` makes" },
        { "--set recipe=nvfp5", 2, "nvfp5" },
        { "--set optim.moments_sr=true", 2, "it must be bf16" },
#ifdef MT_HAVE_cuda
        { "--device cuda", 6, "cuda" },
        { "--device cuda:7", 6, "cuda" },
        { "--gpus 1", 6, "cuda" }, /* not a CPU in its place */
#else
        { "--device cuda", 2, "cuda" },
        { "--device cuda:7", 2, "cuda" },
        { "--gpus 1", 2, "--gpus 1: this build has no CUDA" },
        { "--gpus 2", 2, "--gpus 2: this build has no CUDA" },
#endif
        { "--device cuda:x", 2, "not one of auto, cpu, cuda, cuda:N" },
        { "--device cuda:1 --gpus 2", 2, "one GPU" },
        { "--gpus -1", 2, "--gpus -1: must be from 1" },
        { "--device tpu", 2, "tpu" },
        { "--set parallel.expert=2", 2, "parallel.expert is 2, must" },
        { "--set statistics.every=1 --set statistics.layers=*up_proj", 2,
          "*up_proj fits no linear layer; the first of them: model.layers.0.self_attn" },
        { "--set statistics.every=1 --set statistics.layers=*up_proj --set data.train=none.h5", 2,
          "*up_proj fits no linear layer" }, /* before data is read */
    };
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* no GPU here, whatever the machine has */
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char line[256];
        snprintf(line, sizeof line, "train t.yaml --run refused %s", cases[i].options);
        assert_program(line, cases[i].code, cases[i].words);
        assert_int_equal(access("refused", F_OK), -1); /* before anything is written */
    }
#ifdef MT_HAVE_cuda
    enum { NONE = 6 };
#else
    enum { NONE = 2 };
#endif
    assert_program("doctor --gpus 1", NONE, "");
    assert_program("doctor --device cuda", NONE, "");
    assert_program("doctor --gpus 1 --device cpu", 2, "--gpus 1 on device cpu");
    assert_program("doctor", 0, "");
    /* as --gpus starts them: no other device is what was asked for */
    setenv("MIXTAPE_RANK", "0", 1), setenv("MIXTAPE_WORLD_SIZE", "2", 1);
    assert_program("train t.yaml --run refused", program("train t.yaml --device cuda"), "cuda");
    unsetenv("MIXTAPE_RANK"), unsetenv("MIXTAPE_WORLD_SIZE");
    unsetenv("CUDA_VISIBLE_DEVICES");
    assert_program("train t.yaml --run t.yaml", 5, "run t.yaml: Not a directory");
    assert_program("eval straight --device plan", 2, "device 'plan' is not one of auto, cpu, cuda");
    write_file("typed.yaml", config);
    FILE *file = fopen("typed.yaml", "a");
    assert_non_null(file);
    fputs("recipe: [{use: mxfp8}, {layers: '*.0.up_proj', use: bf16}]\n", file);
    assert_int_equal(fclose(file), 0);
    assert_program("train typed.yaml --run typed", 2, "layers=*.0.up_proj fits no linear layer");
    assert_int_equal(access("typed", F_OK), -1);
    assert_program("train t.yaml --run typed --set train.steps=2 --set model.capacity_factor=1e30",
                   0, "done: 2 steps");
}

/* A file that takes the place of a closed standard one would get what is printed. */
static void records_stay_whole_without_standard_files(void **state)
{
    (void)state;
    char command[8192];
    snprintf(command, sizeof command, "%s train t.yaml --run closed <&- >&- 2>&-", program_path);
    int status = system(command);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), MT_EXIT_FILES); /* nobody could read of its progress */
    assert_same_metrics("closed", "straight");
    assert_same_weights("closed", "straight", 24);
}

/* The limit that a shell sets for all is not what a run of many ranks needs. */
static void files_that_may_be_open_are_open(void **state)
{
    (void)state;
    char command[8192];
    snprintf(command, sizeof command, "ulimit -Sn 4; exec %s data pack train.txt -o few.h5",
             program_path);
    assert_int_equal(system(command), 0);
}

static void a_reader_that_leaves_does_not_end_the_run(void **state)
{
    (void)state;
    char command[8192];
    snprintf(command, sizeof command,
             "(until [ -e gone ]; do sleep 0.01; done; %s train t.yaml --run piped; echo $? "
             ">code) 2>out | { exec <&-; : >gone; }",
             program_path);
    assert_int_equal(system(command), 0);
    FILE *code = fopen("code", "r");
    int number = 0;
    assert_non_null(code);
    assert_int_equal(fscanf(code, "%d", &number), 1);
    fclose(code);
    assert_int_equal(number, MT_EXIT_FILES);
    assert_same_metrics("piped", "straight");
    assert_same_weights("piped", "straight", 24);
}

static void copy_file(const char *from, const char *to)
{
    char *text = NULL;
    size_t bytes = 0;
    assert_ok(mt_file_read_all(&text, &bytes, from, 1 << 26));
    assert_ok(mt_file_write_all(to, text, bytes));
    free(text);
}

static void flip_bit(const char *path, long at_thousandth)
{
    FILE *file = fopen(path, "r+");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    long at = ftell(file) / 1000 * at_thousandth;
    fseek(file, at, SEEK_SET);
    int byte = fgetc(file);
    fseek(file, at, SEEK_SET);
    fputc(byte ^ 16, file);
    assert_int_equal(fclose(file), 0);
}

static void damaged_corpora_are_refused(void **state)
{
    (void)state;
    copy_file("train.h5", "flipped.h5");
    flip_bit("flipped.h5", 700);
    assert_program("train t.yaml --run hurt --set data.train=flipped.h5", 5, "flipped.h5");
    copy_file("train.h5", "cut.h5");
    assert_int_equal(truncate("cut.h5", 20000), 0);
    assert_program("train t.yaml --run hurt --set data.train=cut.h5", 5, "cut.h5");
}

/* Another one copied over it, say. */
static void a_corpus_cut_short_under_a_run_is_an_error(void **state)
{
    (void)state;
    enum { LENGTH = 32, BATCH = 8 };
    int32_t tokens[LENGTH * BATCH], targets[LENGTH * BATCH];
    mt_corpus *corpus;
    copy_file("train.h5", "open.h5");
    assert_ok(mt_corpus_open(&corpus, "open.h5"));
    assert_ok(mt_corpus_batch(corpus, 1, 0, BATCH, LENGTH, tokens, targets));
    assert_int_equal(truncate("open.h5", 4096), 0);
    assert_fails(mt_corpus_batch(corpus, 1, 0, BATCH, LENGTH, tokens, targets), MT_EDAMAGED,
                 "'open.h5': no byte ");
    mt_corpus_close(&corpus);
    copy_file("train.h5", "open.h5"); /* or tokens that it did not have */
    assert_ok(mt_corpus_open(&corpus, "open.h5"));
    FILE *file = fopen("open.h5", "r+");
    assert_non_null(file);
    assert_int_equal(fseek(file, 20000, SEEK_SET), 0);
    for (int i = 0; i < 50000; i++) fputc(255, file);
    fclose(file);
    mt_status status = MT_OK;
    for (int i = 0; status == MT_OK && i < 64; i++)
        status = mt_corpus_batch(corpus, 1, i * BATCH, BATCH, LENGTH, tokens, targets);
    assert_fails(status, MT_EDAMAGED, "'open.h5': token 255 near position ");
    mt_corpus_close(&corpus);
}

static void a_damaged_checkpoint_gives_way_to_the_one_before(void **state)
{
    (void)state;
    assert_int_equal(program("train t.yaml --run fallback"), 0);
    flip_bit("fallback/ckpt/step_00000024/model.h5", 500);
    assert_program("eval fallback", 0, "left aside: step_00000024");
    assert_program("sample fallback --tokens 1", 0, "left aside: step_00000024");
    assert_null(strstr(program_text, "\n\n"));
    assert_program("train t.yaml --run fallback --resume", 0,
                   "resumed from fallback/ckpt/step_00000020");
    assert_null(strstr(program_text, "\n\n"));
    assert_same_run("straight", "fallback");
    assert_int_equal(unlink("fallback/ckpt/step_00000024/DONE"), 0);
    assert_program("train t.yaml --run fallback --resume", 0,
                   "resumed from fallback/ckpt/step_00000020");
    assert_same_run("straight", "fallback");
    static const char *const names[] = { "model.h5", "DONE" };
    for (int i = 0; i < 2; i++) { /* a directory in a file's place */
        char path[64];
        snprintf(path, sizeof path, "fallback/ckpt/step_00000024/%s", names[i]);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(mkdir(path, 0700), 0);
        assert_program("eval fallback", 0, "' is not a regular file");
        assert_program("train t.yaml --run fallback --resume", 0,
                       "resumed from fallback/ckpt/step_00000020");
        assert_same_run("straight", "fallback");
    }
    flip_bit("fallback/ckpt/step_00000024/model.h5", 500);
    flip_bit("fallback/ckpt/step_00000020/model.h5", 500);
    assert_program("train t.yaml --run fallback --resume", 5, "no complete checkpoint");
    const char *reason = "step_00000020: '", *first = strstr(program_text, reason);
    assert_true(first && !strstr(first + 1, reason)); /* each once, each in a line */
    assert_null(strstr(program_text, "\n\n"));
}

static void a_damaged_record_of_a_run_is_named(void **state)
{
    (void)state;
    const char *path = "unrecorded/config.resolved.yaml";
    assert_program("train t.yaml --run unrecorded --set train.steps=2", 0, "done");
    write_file(path, "");
    assert_program("train t.yaml --run unrecorded --resume", 5,
                   "unrecorded/config.resolved.yaml: the file is empty (--force to go on");
    write_file(path, "model:\n  vocab_size: 256\n");
    assert_program("train t.yaml --run unrecorded --resume", 5,
                   "unrecorded/config.resolved.yaml: the file is not whole: it has no "
                   "model.hidden_size");
    write_file(path, "model: [\n");
    assert_program("train t.yaml --run unrecorded --resume", 5, "(--force to go on");
    assert_program("train t.yaml --run unrecorded --resume --force --set train.steps=3", 0, "done");
    assert_program("train t.yaml --run unrecorded --resume --set train.steps=4", 0, "done");
    FILE *metrics = fopen("unrecorded/metrics.jsonl", "a"); /* and nothing has been written then */
    assert_non_null(metrics);
    fputs("???\n{\"step\":1}\n", metrics), fclose(metrics);
    assert_program("train t.yaml --run unrecorded --resume --set train.steps=5 "
                   "--set optim.lr=0.5",
                   5, "metrics.jsonl line 8 cannot be read");
    size_t bytes;
    char *recorded = NULL;
    assert_ok(mt_file_read_all(&recorded, &bytes, path, 1 << 20));
    assert_null(strstr(recorded, "lr: 0.5"));
    free(recorded);
}

/* It may be whole: nothing is begun again, cut back or removed in its place. */
static void a_checkpoint_that_cannot_be_read_ends_the_run(void **state)
{
    (void)state;
    assert_int_equal(program("train t.yaml --run unread"), 0);
    assert_int_equal(rename("unread/ckpt/step_00000024/model.h5", "unread/kept"), 0);
    assert_int_equal(symlink("/elsewhere/model.h5", "unread/ckpt/step_00000024/model.h5"), 0);
    assert_program("train t.yaml --run unread --resume", 5, "model.h5': No such file");
    assert_program("eval unread", 5, "model.h5': No such file");
    assert_int_equal(unlink("unread/ckpt/step_00000024/model.h5"), 0);
    assert_int_equal(rename("unread/kept", "unread/ckpt/step_00000024/model.h5"), 0);
    assert_same_run("straight", "unread");
    assert_int_equal(rename("unread/ckpt/step_00000024", "unread/kept"), 0);
    assert_int_equal(symlink("step_00000024", "unread/ckpt/step_00000024"), 0); /* to itself */
    assert_program("train t.yaml --run unread --resume", 5,
                   "cannot look at 'unread/ckpt/step_00000024/DONE': ");
    assert_int_equal(unlink("unread/ckpt/step_00000024"), 0);
    assert_int_equal(rename("unread/kept", "unread/ckpt/step_00000024"), 0);
    assert_int_equal(rename("unread/ckpt", "unread/kept"), 0);
    write_file("unread/ckpt", "");
    assert_program("train t.yaml --run unread --resume", 5, "cannot list 'unread/ckpt'");
    assert_int_equal(unlink("unread/ckpt"), 0);
    assert_int_equal(rename("unread/kept", "unread/ckpt"), 0);
    assert_same_run("straight", "unread");
}

/* Their steps' metrics are not lost with them. */
static void checkpoints_that_were_moved_away_are_missed(void **state)
{
    (void)state;
    assert_program("train t.yaml --run moved --set train.steps=5", 0, "done");
    assert_int_equal(rename("moved/ckpt/step_00000005", "elsewhere"), 0);
    assert_program("train t.yaml --run moved --resume", 5,
                   "'moved/ckpt/latest' names a checkpoint, and there is none beside it");
    assert_true(has_line("moved", "\"step\":5,"));
    assert_program("train t.yaml --run moved --resume --force --set optim.lr=1e30 "
                   "--set optim.grad_clip=0 --set optim.warmup_steps=0",
                   3, "nothing saved in moved yet");
    assert_false(has_line("moved", "\"step\":5,"));
    assert_program("train t.yaml --run moved --resume --set train.steps=2", 0,
                   "nothing saved in moved yet"); /* nor is anything missed again */
    assert_program("train t.yaml --run away --set train.steps=7", 0, "done");
    assert_int_equal(rename("away/ckpt", "away/kept"), 0); /* `latest` with it */
    assert_program("train t.yaml --run away --resume", 5,
                   "away/metrics.jsonl tells of step 7, a checkpoint was due at 5");
    assert_program("train t.yaml --run away --resume --set checkpoint.every=400", 5,
                   "away/metrics.jsonl tells of step 7, a checkpoint was due at 5");
    assert_true(has_line("away", "\"step\":7,"));
    assert_program("train t.yaml --run away --resume --force --set train.steps=3", 0,
                   "nothing saved in away yet");
    assert_program("train t.yaml --run rare --set checkpoint.every=1000 --set optim.lr=1e30 --set "
                   "optim.grad_clip=0 --set optim.warmup_steps=0",
                   3, "nothing was saved after the start");
    assert_program("train t.yaml --run rare --resume --set checkpoint.every=1 --set train.steps=2",
                   0, "nothing saved in rare yet"); /* nor was it due */
}

/* What a run was to be, which ended before its first step, is no run that another may not begin. */
static void a_run_that_has_made_nothing_gives_way(void **state)
{
    (void)state;
    assert_program("train t.yaml --run retried --set train.steps=2", 0, "done");
    assert_program("train t.yaml --run retried --set train.batch_size=8", 2,
                   "run retried is not empty: --resume goes on with it");
    assert_int_equal(system("rm -r retried/ckpt"), 0);
    assert_program("train t.yaml --run retried --set train.batch_size=8", 2, "is not empty");
    assert_int_equal(truncate("retried/metrics.jsonl", 0), 0);
    assert_program("train t.yaml --run retried --set train.batch_size=8 --set train.steps=2", 0,
                   "done");
    assert_program("train t.yaml --run retried --resume --set train.batch_size=8 "
                   "--set train.steps=3",
                   0, "done");
}

/* What a kill after a checkpoint's last rename has left undone. */
static void a_run_that_goes_on_settles_its_checkpoints(void **state)
{
    (void)state;
    char *latest = NULL;
    size_t bytes;
    assert_program("train t.yaml --run late --set train.steps=10 --set checkpoint.keep_last=3", 0,
                   "done");
    assert_program("train t.yaml --run late --resume --set train.steps=15 "
                   "--set checkpoint.keep_last=3",
                   0, "done");
    write_file("late/ckpt/latest", "step_00000010\n");
    write_file("late/ckpt/latest.tmp", "step");
    assert_program("train t.yaml --run late --resume --set train.steps=15", 0, "all made before");
    assert_ok(mt_file_read_all(&latest, &bytes, "late/ckpt/latest", 100));
    assert_string_equal(latest, "step_00000015\n");
    free(latest);
    assert_int_equal(access("late/ckpt/latest.tmp", F_OK), -1);
    assert_int_equal(access("late/ckpt/step_00000005", F_OK), -1); /* keep_last is 2 */
    assert_int_equal(access("late/ckpt/step_00000010", F_OK), 0);
}

/* What only people and scripts read does not decide whether a checkpoint is one. */
static void a_checkpoint_without_its_name_in_latest_is_one(void **state)
{
    (void)state;
    assert_program("train t.yaml --run unnamed --set train.steps=5", 0, "done");
    assert_int_equal(unlink("unnamed/ckpt/latest"), 0);
    assert_int_equal(mkdir("unnamed/ckpt/latest", 0700), 0);
    write_file("unnamed/ckpt/step_00000099", "a file");
    assert_program("train t.yaml --run unnamed --resume --set train.steps=10", 0,
                   "the checkpoint of step 10 is saved, unnamed/ckpt/latest does not name it");
    assert_non_null(strstr(program_text, "resumed from unnamed/ckpt/step_00000005"));
    assert_program("inspect unnamed/ckpt/step_00000010", 0, "step 10");
}

static void another_model_is_no_damage(void **state)
{
    (void)state;
    static const char fits[] = "shapes must be the checkpoint's";
    assert_program("train t.yaml --run shapes --set train.steps=2", 0, "done");
    assert_program("train t.yaml --run shapes --resume --force --set model.num_experts=8", 2, fits);
    assert_program("train t.yaml --run shapes --resume --force --set model.num_hidden_layers=3", 2,
                   fits);
    assert_program("train t.yaml --run shapes --resume --force --set train.dtype=f64", 2, fits);
    assert_program("train t.yaml --run shapes --resume", 0, "done: 24 steps");
    assert_program("train t.yaml --run scales --set train.steps=2 --set optim.moments=fp8", 0,
                   "done");
    assert_program("train t.yaml --run scales --resume --force --set optim.moments=fp8 "
                   "--set model.num_experts=8",
                   2, fits);
}

static void more_windows_than_there_are_numbers_are_all(void **state)
{
    (void)state;
    assert_program("train t.yaml --run windows --set train.steps=2 --set train.eval_every=1 "
                   "--set train.eval_batches=9007199254740992 --set train.batch_size=1024 "
                   "--set train.micro_batch_size=1024 --set optim.warmup_steps=1",
                   0, "done: 2 steps");
    json_t *lines = read_metrics("windows"), *first = json_array_get(lines, 1);
    assert_int_equal(json_integer_value(json_object_get(first, "step")), 1);
    assert_true(json_is_true(json_object_get(first, "full")));
    json_decref(lines);
}

static void a_full_disk_leaves_the_old_checkpoint(void **state)
{
    (void)state;
    assert_int_equal(program("train t.yaml --run full --set train.steps=5"), 0);
    /* room for the metrics and the configuration, not for a checkpoint */
    pid_t child = program_start("train t.yaml --run full --resume", "1", 50000);
    assert_int_equal(program_wait(child), MT_EXIT_FILES);
    assert_non_null(strstr(program_text, "the checkpoint of step 10 was not saved"));
    assert_non_null(strstr(program_text, "there is still full/ckpt/step_00000005"));
    assert_program("eval full", 0, "step_00000005");
    assert_program("train t.yaml --run full --resume", 0, "resumed from full/ckpt/step_00000005");
}

static void a_loss_that_is_not_finite_ends_the_run(void **state)
{
    (void)state;
    assert_program("train t.yaml --run bad --set optim.lr=1e30 --set optim.grad_clip=0 --set "
                   "optim.warmup_steps=0 "
                   "--set checkpoint.every=1",
                   3, "the first tensor that is not finite: ");
    assert_null(strstr(program_text, "not finite: none"));
    assert_null(strstr(program_text, "-nan"));
    assert_program("inspect bad/ckpt/step_00000001", 0, "step 1");
    assert_int_equal(access("bad/ckpt/step_00000002", F_OK), -1);
}

/* A format without NaN makes numbers of what is none: the last evaluation is not passed off as one.
 */
static void nans_that_no_loss_shows_end_the_run(void **state)
{
    (void)state;
    static const char words[] = " NaN met in quantizing X of model.layers.";
    assert_program("train t.yaml --run hidden --set recipe=nvfp4 --set optim.lr=1e30 "
                   "--set train.steps=8 --set train.eval_every=0 --set checkpoint.every=1",
                   3, "nothing was saved after hidden/ckpt/step_00000001");
    assert_non_null(strstr(program_text, "numerics: step 8: "));
    assert_non_null(strstr(strstr(program_text, "numerics: "), words));
    assert_false(has_line("hidden", "valid_loss"));
    assert_program("eval hidden", 3, words);
    assert_program("sample hidden --tokens 3", 3, words);
}

/* Weights that are no numbers are not saved, nor begun with. */
static void weights_that_are_not_finite_are_not_saved(void **state)
{
    (void)state;
    static const char *const recipes[] = { "none", "nvfp4" };
    for (int i = 0; i < 2; i++) {
        char run[160];
        snprintf(run, sizeof run,
                 "train t.yaml --run huge%d --set recipe=%s --set optim.lr=1e30 --set "
                 "optim.weight_decay=1e12 "
                 "--set optim.warmup_steps=0 --set checkpoint.every=1",
                 i, recipes[i]);
        assert_program(run, 3, "numerics: step 1: the weight model.");
        assert_non_null(strstr(program_text, "nothing was saved after the start"));
    }
}

/* Gradients that overflow under a loss that does not: embeddings of 1e-15 without an epsilon under
 * the norm. */
static void ten_skipped_updates_end_the_run(void **state)
{
    (void)state;
    assert_program(
        "train t.yaml --run skips --set model.z_loss_coef=1e30 --set model.rms_norm_eps=0 "
        "--set train.embed_init_std=1e-15 --set checkpoint.every=4",
        3,
        "10 updates in a row were skipped, the gradient norm is not finite; nothing was saved "
        "after the start");
    assert_int_equal(access("skips/ckpt/step_00000004", F_OK), -1);
    assert_true(has_line("skips", "\"step\":10,"));
    assert_true(has_line("skips", "\"skipped\":10,"));
    assert_false(has_line("skips", "\"step\":11,"));
}

/* Of a file that grows past what the disk takes the steps made are not lost. */
static void steps_are_saved_where_metrics_cannot_be_written(void **state)
{
    (void)state;
    long size = 0;
    assert_program("train t.yaml --run small --set train.steps=1 --set optim.warmup_steps=0", 0,
                   "done");
    FILE *file = fopen("small/ckpt/step_00000001/model.h5", "r");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    size = ftell(file);
    fclose(file);
    const char *line = "train t.yaml --run grows --set train.steps=1000000 --set train.log_every=1 "
                       "--set train.eval_every=0 --set checkpoint.every=0";
    assert_int_equal(program_wait(program_start(line, "1", size + 65536)), MT_EXIT_FILES);
    char end[2048];
    file = fopen("out", "r");
    assert_non_null(file);
    assert_int_equal(fseek(file, 1 - (long)sizeof end, SEEK_END), 0);
    end[fread(end, 1, sizeof end - 1, file)] = '\0';
    fclose(file);
    assert_non_null(strstr(end, " is saved: grows/ckpt/step_"));
    assert_non_null(strstr(end, "grows/metrics.jsonl: File too large"));
    const char *at = strstr(end, "step_0");
    int64_t step = atoll(at + 5);
    assert_true(step > 1);
    snprintf(end, sizeof end,
             "train t.yaml --run grows --resume --set train.steps=%lld --set train.eval_every=0",
             (long long)step + 1);
    assert_program(end, 0, "done");
    assert_true(has_line("grows", "\"valid_loss\""));
}

/* Nor where those of a step to come cannot be. */
static void steps_are_saved_where_statistics_cannot_be_made(void **state)
{
    (void)state;
    assert_program("train t.yaml --run counted --set train.steps=2", 0, "done");
    write_file("counted/statistics", "a file");
    assert_program("train t.yaml --run counted --resume --set train.steps=9 "
                   "--set checkpoint.every=0 --set statistics.every=6",
                   MT_EXIT_FILES, "step 5 is saved: counted/ckpt/step_00000005");
    assert_int_equal(unlink("counted/statistics"), 0);
    assert_program("train t.yaml --run counted --resume --set train.steps=9", 0,
                   "resumed from counted/ckpt/step_00000005");
}

static void an_import_replaces_no_checkpoint_of_a_run(void **state)
{
    (void)state;
    const char *path = "kept/ckpt/step_00000001";
    assert_program("train t.yaml --run kept --set train.steps=1 --set optim.warmup_steps=0", 0,
                   "done");
    assert_program("export kept kept-hf", 0, "kept-hf");
    assert_program("import kept-hf -o kept/ckpt/step_00000001", 5,
                   "'kept/ckpt/step_00000001' is a run's checkpoint of step 1, with optimizer "
                   "state: not replaced");
    assert_program("import kept-hf -o kept/ckpt/step_00000001/", 5, "optimizer state");
    assert_program("inspect kept", 0, path);
    assert_program("train t.yaml --run kept --resume --set train.steps=2 "
                   "--set optim.warmup_steps=0",
                   0, path);
    for (int i = 0; i < 2; i++) /* what was imported may be imported again */
        assert_program("import kept-hf -o kept-imported", 0, "kept-imported");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_saved_where_metrics_cannot_be_written),
        cmocka_unit_test(steps_are_saved_where_statistics_cannot_be_made),
        cmocka_unit_test(bad_input_has_the_code_of_its_class),
        cmocka_unit_test(an_import_replaces_no_checkpoint_of_a_run),
        cmocka_unit_test(records_stay_whole_without_standard_files),
        cmocka_unit_test(files_that_may_be_open_are_open),
        cmocka_unit_test(a_reader_that_leaves_does_not_end_the_run),
        cmocka_unit_test(damaged_corpora_are_refused),
        cmocka_unit_test(a_corpus_cut_short_under_a_run_is_an_error),
        cmocka_unit_test(a_damaged_checkpoint_gives_way_to_the_one_before),
        cmocka_unit_test(a_damaged_record_of_a_run_is_named),
        cmocka_unit_test(a_checkpoint_that_cannot_be_read_ends_the_run),
        cmocka_unit_test(checkpoints_that_were_moved_away_are_missed),
        cmocka_unit_test(a_run_that_has_made_nothing_gives_way),
        cmocka_unit_test(a_run_that_goes_on_settles_its_checkpoints),
        cmocka_unit_test(a_checkpoint_without_its_name_in_latest_is_one),
        cmocka_unit_test(another_model_is_no_damage),
        cmocka_unit_test(more_windows_than_there_are_numbers_are_all),
        cmocka_unit_test(a_full_disk_leaves_the_old_checkpoint),
        cmocka_unit_test(a_loss_that_is_not_finite_ends_the_run),
        cmocka_unit_test(nans_that_no_loss_shows_end_the_run),
        cmocka_unit_test(weights_that_are_not_finite_are_not_saved),
        cmocka_unit_test(ten_skipped_updates_end_the_run),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
