/* The program over ranks: the same training, checkpoints that any number of ranks goes on from,
 * ranks that disagree. */
#include "tests/dist/runs.h"

#include <math.h>

#include "train/cli.h"

/* Every number after `field` in a run's metrics; returns how many. */
static int read_field(const char *run, const char *field, double values[64])
{
    char path[256], line[4096], quoted[64];
    int n = 0;
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    snprintf(quoted, sizeof quoted, "\"%s\":", field);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (n < 64 && fgets(line, sizeof line, file)) {
        const char *at = strstr(line, quoted);
        if (at) values[n++] = strtod(at + strlen(quoted), NULL);
    }
    fclose(file);
    return n;
}

static void assert_same_run(const char *run, const char *other, double limit)
{
    static const char *const fields[] = { "step", "loss", "aux_loss", "max_vio", "valid_loss" };
    for (size_t f = 0; f < sizeof fields / sizeof fields[0]; f++) {
        double a[64], b[64];
        int n = read_field(run, fields[f], a);
        assert_int_equal(n, read_field(other, fields[f], b));
        assert_int_equal(n, f == 4   ? 1
                            : f == 0 ? STEPS + 1
                                     : STEPS); /* a line each, one of validation */
        for (int i = 0; i < n; i++)
            if (fabs(a[i] - b[i]) > limit * fabs(b[i]))
                fail_msg("%s of %s is %.17g, of %s %.17g", fields[f], run, a[i], other, b[i]);
    }
}

static void test_same_training(void **state)
{
    (void)state;
    need_ranks(2);
    assert_train(2, "--run two", 0, "done: 8 steps");
    assert_non_null(strstr(ranks_output, on_gpus() ? "2 ranks over nccl" : "2 ranks over mpi"));
    assert_same_run("two", "one", 1e-12);
    double ranks[64], slow[64], fast[64], most[64], own[64];
    assert_int_equal(read_field("one", "ranks", ranks), 0);
    assert_int_equal(read_field("two", "slowest_rank", ranks), STEPS);
    assert_int_equal(read_field("two", "slowest_seconds", slow), STEPS);
    assert_int_equal(read_field("two", "fastest_seconds", fast), STEPS);
    assert_int_equal(read_field("two", "most_memory_bytes", most), STEPS);
    assert_int_equal(read_field("two", "memory_bytes", own), STEPS);
    for (int i = 0; i < STEPS; i++)
        assert_true((ranks[i] == 0 || ranks[i] == 1) && slow[i] >= fast[i] && fast[i] > 0 &&
                    most[i] >= own[i] && own[i] > 0);
}

/* Goes on from the middle of `from` with so many ranks. */
static void go_on(const char *from, int ranks, const char *to, const char *sets)
{
    char line[4096];
    snprintf(line, sizeof line, "rm -rf %s && cp -r %s %s && rm -r %s/ckpt/step_00000008", to, from,
             to, to);
    assert_int_equal(system(line), 0);
    snprintf(line, sizeof line, "--run %s --resume %s", to, sets);
    assert_train(ranks, line, 0, "resumed from");
}

static void test_other_counts(void **state)
{
    (void)state;
    need_ranks(4);
    assert_train(4, "--run four", 0, "done: 8 steps");
    assert_same_run("four", "one", 1e-12);
    static const struct {
        const char *from;
        int ranks;
    } rows[] = { { "one", 2 }, { "one", 4 }, { "four", 1 }, { "four", 2 } };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        go_on(rows[i].from, rows[i].ranks, "next", "");
        assert_same_run("next", "one", 1e-12);
    }
}

/* What ranks have saved is one model to every reader, wherever its directory is. */
static void test_one_reader(void **state)
{
    (void)state;
    need_ranks(2);
    double loss[64];
    char words[64];
    assert_train(2, "--run set", 0, "done: 8 steps");
    assert_int_equal(read_field("set", "valid_loss", loss), 1);
    snprintf(words, sizeof words, "loss %.6f", loss[0]);
    assert_int_equal(system("mkdir away && mv set away/moved"), 0);
    assert_program("eval away/moved", 0, words);
    assert_program("sample away/moved --prompt in --tokens 3", 0, "");
    assert_program("inspect away/moved", 0, "39 tensors");
    assert_program("inspect away/moved/ckpt/step_00000008/model.h5", 0,
                   "/optim/m/model.embed_tokens.weight");
    assert_program("export away/moved hf", 0, "step_00000008");
    assert_program("import hf -o back", 0, "back");
    assert_program("eval back --data valid.h5 --sequence 16 --dtype f64", 0, words);
    assert_int_equal(unlink("away/moved/ckpt/step_00000008/rank_0001.h5"), 0);
    assert_program("eval away/moved/ckpt/step_00000008", MT_EXIT_FILES, "rank_0001.h5");
    assert_program("eval away/moved", 0, "step_00000004");
}

/* In the micro-batches of the ranks, on which scales of whole members and draws depend. */
static void test_evaluates_alike(void **state)
{
    (void)state;
    need_ranks(2);
    static const char *const recipes[] = { "fp8_current",
                                           "'fprop=mxfp4:sr backward=high_precision'" };
    for (int i = 0; i < 2; i++) {
        double loss[64];
        char line[512], words[64];
        snprintf(line, sizeof line,
                 "--run alike%d --set train.micro_batch_size=4 --set train.dtype=f32 "
                 "--set recipe.use=%s",
                 i, recipes[i]);
        assert_train(2, line, 0, "done: 8 steps");
        snprintf(line, sizeof line, "alike%d", i);
        assert_int_equal(read_field(line, "valid_loss", loss), 1);
        snprintf(words, sizeof words, "loss %.6f", loss[0]);
        snprintf(line, sizeof line, "eval alike%d", i);
        assert_program(line, 0, words);
    }
}

/* Ranks started in another directory find the run's all the same. */
static void test_other_directories(void **state)
{
    (void)state;
    char words[2400], command[8192], where[512];
    need_ranks(2);
    if (on_gpus()) skip();
    assert_non_null(getcwd(where, sizeof where));
    assert_int_equal(system("mkdir -p elsewhere"), 0);
    snprintf(words, sizeof words,
             "%.800s train %s/t.yaml --run here/hosts --set train.steps=2 "
             "--set data.train=%s/train.h5 --set data.valid=",
             program_path, where, where);
    snprintf(command, sizeof command, "%s : -n 1 -wdir %s/elsewhere %s", words, where, words);
    if (run_ranks(1, command) != 0 || !strstr(ranks_output, "done: 2 steps"))
        fail_msg("%s", ranks_output);
    assert_int_equal(access("here/hosts/ckpt/step_00000002/rank_0001.h5", F_OK), 0);
    assert_int_equal(access("elsewhere/here", F_OK), -1);
}

/* Ranks begin with the weights of one checkpoint, as one rank does: that which rank 0 finds, be
 * another of its name where the others were started. */
static void test_begins_with(void **state)
{
    (void)state;
    char run[1200], command[8192], where[512];
    need_ranks(2);
    assert_program("train t.yaml --run begun1 --set train.init_from=one", 0,
                   "begins with the weights of one/ckpt/step_00000008");
    assert_train(2, "--run begun2 --set train.init_from=one", 0, "one/ckpt/step_00000008");
    assert_same_run("begun2", "begun1", 1e-12);
    assert_train(2, "--run begun3 --set train.init_from=begun2/ckpt/step_00000004", 0,
                 "begun2/ckpt/step_00000004");
    assert_train(2, "--run begun4 --set train.init_from=nowhere", MT_EXIT_FILES,
                 "train.init_from: there is no checkpoint or run 'nowhere'");
    assert_int_equal(access("begun4", F_OK), -1);
    if (on_gpus()) return;
    assert_non_null(getcwd(where, sizeof where));
    assert_int_equal(system("mkdir -p apart/one/ckpt && cp -r one/ckpt/step_00000004 apart/one/"
                            "ckpt && cp t.yaml train.h5 valid.h5 apart"),
                     0);
    snprintf(run, sizeof run, "%.800s train t.yaml --run begun5 --set train.init_from=one",
             program_path);
    snprintf(command, sizeof command, "%s : -n 1 -wdir %s/apart %s", run, where, run);
    if (run_ranks(1, command) != 0) fail_msg("%s", ranks_output);
    assert_same_run("begun5", "begun2", 0);
}

/* The same number of ranks goes on bit for bit, whatever is sharded. */
static void test_resume_exactly(void **state)
{
    (void)state;
    need_ranks(2);
    static const char *const sets[] = {
        "--set train.dtype=bf16 --set recipe=fp8_delayed --set recipe.delayed.history=3 "
        "--set optim.moments=fp8 --set train.log_every=1",
        "--set train.dtype=f32 --set recipe=nvfp4 --set optim.moments=bf16 "
        "--set optim.moments_sr=true --set optim.master=bf16+i16 --set parallel.keep_gathered=true"
    };
    for (int i = 0; i < 2; i++) {
        char line[1024];
        snprintf(line, sizeof line, "--run whole%d %s", i, sets[i]);
        assert_train(2, line, 0, "done: 8 steps");
        snprintf(line, sizeof line, "whole%d", i);
        go_on(line, 2, "next", sets[i]);
        assert_same_run("next", line, 0);
    }
}

/* The lines of statistics of a tensor, but for the step: a line's text from "statistics" on. */
static int read_statistics(const char *run, const char *tensor, char lines[64][1024])
{
    char path[256], line[4096], quoted[64];
    int n = 0;
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    snprintf(quoted, sizeof quoted, "\"tensor\":\"%s\"", tensor);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (n < 64 && fgets(line, sizeof line, file))
        if (strstr(line, quoted)) snprintf(lines[n++], 1024, "%s", strstr(line, "\"statistics\""));
    fclose(file);
    return n;
}

static double number_after(const char *line, const char *field)
{
    const char *at = strstr(line, field);
    assert_non_null(at);
    return strtod(at + strlen(field), NULL);
}

/* Weights are whole and those of one rank; of what passes, every rank's first micro-batch counts.
 */
static void test_statistics(void **state)
{
    (void)state;
    need_ranks(2);
    static char one[64][1024], two[64][1024];
    const char *sets = "--set train.dtype=f32 --set recipe=mxfp8 --set train.steps=1 "
                       "--set statistics.every=1 --set statistics.layers='*0.mlp*' "
                       "--set model.num_experts=4 --set parallel.expert_capacity=0.4";
    char line[1024];
    for (int i = 0; i < 3; i++) { /* the third: on two ranks, each with half of the experts */
        snprintf(line, sizeof line, "--run s%d %s --set parallel.expert=%d", i, sets, i / 2 + 1);
        assert_train(i ? 2 : 1, line, 0, "done: 1 step in");
    }
    for (int i = 1; i < 3; i++) {
        const char *run = i == 1 ? "s1" : "s2";
        int n = read_statistics("s0", "W", one);
        assert_true(n >= 4 && n == read_statistics(run, "W", two));
        for (int j = 0; j < n; j++) assert_string_equal(one[j], two[j]);
        n = read_statistics("s0", "X", one);
        assert_true(n >= 4 && n == read_statistics(run, "X", two));
        for (int j = 0; j < n; j++)
            if (strstr(one[j], "\"member\":-1"))
                assert_true(number_after(two[j], "\"count\":") ==
                            2 * number_after(one[j], "\"count\":"));
    }
    assert_int_equal(access("s2/statistics/step_00000001.h5", F_OK), 0);
}

/* Experts over ranks: one rank's run, whatever the degree, also where it goes on with another;
 * blocks that are too small at first. */
static void test_experts(void **state)
{
    (void)state;
    need_ranks(2);
    const char *sets = "--set model.num_experts=4";
    char line[1024];
    int most = most_ranks() >= 4 ? 4 : 2;
    snprintf(line, sizeof line, "--run e1 %s", sets);
    assert_train(1, line, 0, "done: 8 steps");
    snprintf(line, sizeof line,
             "--run e2 %s --set parallel.expert_capacity=0.4 --set parallel.expert=2", sets);
    assert_train(most, line, 0, "begun again 1 time with more room for rows of experts");
    assert_same_run("e2", "e1", 1e-12);
    assert_program("eval e2", 0, "bits/byte"); /* by one rank, as any run */
    snprintf(line, sizeof line, "%s --set parallel.expert=%d", sets, most);
    go_on("e2", most, "next", line);
    assert_same_run("next", "e1", 1e-12);
    go_on("e2", 1, "next", sets);
    assert_same_run("next", "e1", 1e-12);
    assert_train(2, "--run no --set parallel.expert=3", 2, "must divide the number of ranks, 2");
    assert_train(2, "--run no --set parallel.expert=2", 2, "must divide model.num_experts 3");
    assert_train(2, "--run no --set train.batch_size=3", 2,
                 "train.batch_size 3 does not divide among 2 ranks: take 1 or 3 as the number of "
                 "ranks, or 2 or 4 as train.batch_size");
    assert_train(2, "--run no --set train.batch_size=12 --set train.micro_batch_size=4", 2,
                 "take 1 or 3 as the number of ranks, or 3 or 6 as train.micro_batch_size");
    assert_int_equal(access("no", F_OK), -1);
}

/* Two ranks under mpirun, `first` and `second` after each one's program; `before` is in front of
 * the first one's, `options` are mpirun's for the second. */
static void assert_apart(const char *before, const char *first, const char *options,
                         const char *second, const char *words)
{
    char command[12000];
    snprintf(command, sizeof command, "%s %s train t.yaml %s : -n 1 %s %s train t.yaml %s", before,
             program_path, first, options, program_path, second);
    int code = run_ranks(1, command);
    if (code != MT_EXIT_USAGE || !strstr(ranks_output, words))
        fail_msg("exit code %d, want 2 with '%s':\n%s", code, words, ranks_output);
}

static void test_disagreement(void **state)
{
    (void)state;
    need_ranks(2);
    static const char words[] =
        "rank 1: its configuration is another: train.seed is 3, on rank 0 0";
    char command[12000];
    snprintf(command, sizeof command,
             "sh -c 'exec %s train t.yaml --run no --set train.seed=$((MIXTAPE_RANK * 3))'",
             program_path);
    if (!on_gpus())
        assert_apart("", "--run no", "", "--run no --set train.seed=3", words);
    else
        assert_true(run_ranks(2, command) == MT_EXIT_USAGE && strstr(ranks_output, words));
    assert_int_not_equal(access("no", F_OK), 0);
    if (most_ranks() >= 3)
        assert_train(3, "--run no", 2, "train.batch_size 4 does not divide among");
}

/* Ranks of other kernels, whose layouts are others, of another command line, and with other
 * corpora: they are what is in them, and rank 1 sees other files. */
static void test_other_start(void **state)
{
    (void)state;
    need_ranks(2);
    if (on_gpus() || !strcmp(test_device()->kernel_set, "portable")) skip();
    assert_apart("env MIXTAPE_KERNELS=portable", "--run odd", "", "--run odd",
                 "rank 1: its kernel set is another: ");
    assert_apart("", "--run odd", "", "--run odd --resume",
                 "rank 1: its command line is another: --resume, on rank 0 a new run");
    assert_int_equal(
        system("mkdir other && cp t.yaml valid.h5 other && cp valid.h5 other/train.h5"), 0);
    assert_apart("", "--run odd", "-wdir other", "", "rank 1: its training corpus is another: ");
    assert_int_equal(system("cp train.h5 other/valid.h5 && cp train.h5 other"), 0);
    assert_apart("", "--run odd", "-wdir other", "", "rank 1: its validation corpus is another: ");
    assert_int_not_equal(access("odd", F_OK), 0);
}

static void assert_said_once(const char *line, int code, const char *words)
{
    assert_train(2, line, code, words);
    if (strstr(strstr(ranks_output, words) + 1, words)) fail_msg("said twice:\n%s", ranks_output);
}

/* What all ranks find by themselves is said once, and decides the exit code. */
static void test_one_word(void **state)
{
    (void)state;
    need_ranks(2);
    static const struct {
        const char *sets, *words;
        int code;
    } rows[] = {
        { "--set train.dtype=f32 --set optim.lr=1e30 --set optim.grad_clip=0", "the loss of step ",
          MT_EXIT_NUMERICS },
        { "--set train.batch_size=3", "train.batch_size 3 does not divide among", MT_EXIT_USAGE },
        { "--set data.valid=none.h5", "cannot open 'none.h5'", MT_EXIT_FILES },
        { "--set optim.lrr=1", "did you mean optim.lr", MT_EXIT_USAGE }, /* before they meet */
        { "--device cuda:4096", "device cuda:4096", MT_EXIT_USAGE },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char line[256];
        snprintf(line, sizeof line, "--run mute%zu %s", i, rows[i].sets);
        assert_said_once(line, rows[i].code, rows[i].words);
    }
    assert_train(2, "--run spoilt", 0, "done");
    assert_int_equal(system("for f in spoilt/ckpt/*/rank_0001.h5; do echo x >> $f; done"), 0);
    assert_said_once("--run spoilt --resume", MT_EXIT_FILES, "there is no complete checkpoint in");
    if (on_gpus()) return;
    assert_apart("", "--run mute", "", "--run mute --set optim.lrr=1", "rank 1: --set optim.lrr=1");
    char command[8192];
    snprintf(command, sizeof command, "%s trian", program_path);
    assert_int_equal(run_ranks(2, command), MT_EXIT_USAGE);
    const char *said = strstr(ranks_output, "unknown verb 'trian'");
    assert_true(said && !strstr(said + 1, "unknown verb"));
}

/* mpirun gives every rank a terminal of its own as standard output, also where it writes to a file.
 */
static void test_lines(void **state)
{
    (void)state;
    need_ranks(2);
    assert_train(2, "--run lines --set train.log_every=4", 0, "step 4/8  loss ");
    assert_non_null(strstr(ranks_output, "  ranks 0."));
    assert_null(strchr(ranks_output, '\r'));
}

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_training),     cmocka_unit_test(test_other_counts),
        cmocka_unit_test(test_resume_exactly),    cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_statistics),        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_one_reader),        cmocka_unit_test(test_evaluates_alike),
        cmocka_unit_test(test_other_directories), cmocka_unit_test(test_one_word),
        cmocka_unit_test(test_other_start),       cmocka_unit_test(test_lines),
        cmocka_unit_test(test_begins_with),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
