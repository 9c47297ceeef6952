/* The program over ranks that are asked to stop, die, stand still, or have no memory, disk or data.
 */
#include "tests/dist/runs.h"

#include <dirent.h>

#include "core/clock.h"
#include "tests/support/fault.h"
#include "train/checkpoint.h"
#include "train/cli.h"
#include "train/run.h"

/* ---- signals -----------------------------------------------------------------------------------
 */

static const char *run_path(const char *run)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/ckpt", run);
    return path;
}

/* Whether a process has `variable`, "NAME=value", and works here. */
static bool is_rank(const char *process, const char *variable)
{
    static char text[1 << 18];
    char path[300], folder[4096] = "";
    snprintf(path, sizeof path, "/proc/%s/cwd", process);
    if (readlink(path, folder, sizeof folder - 1) < 0 || strcmp(folder, program_dir) != 0)
        return false;
    snprintf(path, sizeof path, "/proc/%s/environ", process);
    FILE *file = fopen(path, "r");
    size_t n = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[n] = '\0';
    for (const char *at = text; at < text + n; at += strlen(at) + 1)
        if (!strcmp(at, variable)) return true;
    return false;
}

/* The process of `rank`, from its environment. */
static pid_t find_rank(int rank)
{
    char variable[64];
    pid_t found = 0;
    DIR *processes = opendir("/proc");
    assert_non_null(processes);
    snprintf(variable, sizeof variable, "%s=%d",
             on_gpus() ? "MIXTAPE_RANK" : "OMPI_COMM_WORLD_RANK", rank);
    for (struct dirent *d; !found && (d = readdir(processes));)
        if (atoi(d->d_name) > 0 && is_rank(d->d_name, variable)) found = atoi(d->d_name);
    closedir(processes);
    return found;
}

/* In place of a signal: from then on no file of the process can be larger than this; or the corpus
 * cut.h5 has no tokens any more. */
enum { FILL_DISK = -1, FILE_LIMIT = 20000, CUT_CORPUS = -2 };

static void disturb(pid_t process, int number)
{
    const struct rlimit limit = { FILE_LIMIT, FILE_LIMIT };
    if (number == FILL_DISK)
        assert_int_equal(prlimit(process, RLIMIT_FSIZE, &limit, NULL), 0);
    else if (number == CUT_CORPUS)
        assert_int_equal(truncate("cut.h5", 2048), 0);
    else
        assert_int_equal(kill(process, number), 0);
}

/* Starts a run without end on two ranks, disturbs one of them once it has saved, and returns the
 * launcher's exit code. */
static int signal_one(const char *run, const char *sets, int rank, int number)
{
    char line[6000], path[512];
    snprintf(path, sizeof path, "%s/ckpt/step_00000004/DONE", run);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        snprintf(line, sizeof line, "--run %s --set train.steps=1000000 %s", run, sets);
        int code = train(2, line);
        write_file("said", ranks_output);
        _exit(code > 255 ? 255 : code);
    }
    for (int i = 0; i < 1200 && access(path, F_OK) != 0; i++) nap(0.05);
    pid_t one = find_rank(rank);
    assert_true(one > 0);
    disturb(one, number);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    FILE *file = fopen("said", "r");
    assert_non_null(file);
    ranks_output[fread(ranks_output, 1, sizeof ranks_output - 1, file)] = '\0';
    fclose(file);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The last complete checkpoint loads: the run goes on from it, over as many ranks, for a step. */
static void assert_goes_on(const char *run)
{
    char path[MT_CHECKPOINT_PATH], skipped[512], line[1024];
    assert_ok(mt_checkpoint_find_latest(path, skipped, sizeof skipped, run_path(run), NULL));
    const char *step = strstr(path, "step_");
    assert_non_null(step);
    snprintf(line, sizeof line, "--run %s --resume --set train.steps=%lld", run,
             atoll(step + strlen("step_")) + 1);
    assert_train(2, line, 0, "resumed from");
    assert_non_null(strstr(ranks_output, "done: "));
}

static void test_asked_to_stop(void **state)
{
    (void)state;
    need_ranks(2);
    assert_int_equal(signal_one("asked", "", 1, SIGTERM), 4);
    assert_non_null(strstr(ranks_output, "SIGTERM after step"));
    assert_non_null(strstr(ranks_output, on_gpus() ? "; to go on: "
                                                   : "; to go on, under the same launcher (Open "
                                                     "MPI): "));
    assert_goes_on("asked");
}

static void test_killed(void **state)
{
    (void)state;
    need_ranks(2);
    assert_int_not_equal(signal_one("killed", "", 1, SIGKILL), 0);
    if (!strstr(ranks_output, "rank 1 is gone") && !strstr(ranks_output, "process rank 1") &&
        !strstr(ranks_output, "rank 1 of 2 was ended by signal 9"))
        fail_msg("nobody names rank 1:\n%s", ranks_output);
    assert_goes_on("killed");
}

/* Whenever that is, within a save as well, what was saved before is there. */
static void test_killed_saving(void **state)
{
    (void)state;
    need_ranks(2);
    static const char sets[] = "--set checkpoint.every=1 --set checkpoint.keep_last=1000000";
    for (int rank = 0; rank < 2; rank++) {
        const char *run = rank ? "saving1" : "saving0";
        assert_int_not_equal(signal_one(run, sets, rank, SIGKILL), 0);
        assert_goes_on(run);
    }
}

/* What the run said of its end. */
static const char *last_words(void)
{
    const char *said = strstr(ranks_output, "mixtape train: ");
    return said ? said : ranks_output;
}

/* A disk that is full for one rank ends the run, and says where and why; the checkpoint before
 * stays. Steps are not logged: rank 0's metrics would be over the limit first. */
static void test_full_disk(void **state)
{
    (void)state;
    need_ranks(2);
    for (int rank = 0; rank < 2; rank++) {
        const char *run = rank ? "full1" : "full0";
        /* rank 0's own, or the one over all of them */
        const char *file = rank ? "rank_0001.h5': File too large" : ".h5': File too large";
        int code = signal_one(run, "--set train.log_every=1000000", rank, FILL_DISK);
        if (code != MT_EXIT_FILES || !strstr(ranks_output, file) ||
            !strstr(ranks_output, "was not saved") || !strstr(ranks_output, "there is still"))
            fail_msg("nobody says that rank %d's disk is full (exit code %d):\n%s", rank, code,
                     last_words());
        assert_int_not_equal(system("ls full?/ckpt | grep -q tmp"), 0);
        assert_goes_on(run);
    }
}

/* All ranks meet it, or some before the others: one of them speaks. */
static void test_cut_corpus(void **state)
{
    (void)state;
    need_ranks(2);
    static const char *const sets[] = { "--set data.train=cut.h5",
                                        "--set data.valid=cut.h5 --set train.eval_every=1" };
    for (int i = 0; i < 2; i++) {
        assert_int_equal(system("cp train.h5 cut.h5"), 0);
        int code = signal_one(i ? "unseen" : "cut", sets[i], 0, CUT_CORPUS);
        const char *said = strstr(ranks_output, "cut.h5': no byte ");
        if (code != MT_EXIT_FILES || !said || strstr(said + 1, "cut.h5': no byte "))
            fail_msg("a corpus cut short, exit code %d:\n%s", code, last_words());
    }
}

/* A rank that stands still: the others wait as long as they were told to, and no longer. */
static void test_stuck(void **state)
{
    (void)state;
    need_ranks(2);
    static const char *const words[] = { "rank 0 does not answer", "s for rank 1, which " };
    for (int rank = 0; rank < 2; rank++) {
        const char *run = rank ? "stuck" : "headless";
        double began = mt_now();
        assert_int_not_equal(signal_one(run, "--set parallel.timeout=4", rank, SIGSTOP), 0);
        assert_true(mt_now() - began < 60);
        if (!strstr(last_words(), words[rank]))
            fail_msg("nobody names rank %d:\n%s", rank, last_words());
        assert_goes_on(run);
    }
}

/* A rank that never comes, to MPI itself: whoever is there waits for it no longer than that. */
static void test_late(void **state)
{
    (void)state;
    need_ranks(2);
    if (on_gpus()) skip();
    static const char *const words[] = { "rank 0 does not answer: MPI has not brought the 2 ranks",
                                         "not every rank has come" };
    for (int rank = 0; rank < 2; rank++) {
        char command[8192];
        double began = mt_now();
        snprintf(command, sizeof command,
                 "sh -c '[ $OMPI_COMM_WORLD_RANK = %d ] && sleep 100; exec %s train t.yaml --run "
                 "late --set parallel.timeout=1'",
                 rank, program_path);
        assert_int_not_equal(run_ranks(2, command), 0);
        assert_true(mt_now() - began < 60);
        if (!strstr(ranks_output, words[rank]))
            fail_msg("without rank %d:\n%s", rank, ranks_output);
        assert_int_not_equal(access("late", F_OK), 0);
    }
}

/* ---- memory ------------------------------------------------------------------------------------
 */

#ifdef MT_HAVE_mpi
/* Takes the place of MPI's own in these programs, and waits for the other ranks, as it may: of one
 * that has failed alone they would never come. Handles are pointers, as Open MPI has them. */
int PMPI_Barrier(void *comm);
int PMPI_Comm_free(void **comm);
int MPI_Comm_free(void **comm);
int MPI_Comm_free(void **comm)
{
    int code = PMPI_Barrier(*comm);
    return code ? code : PMPI_Comm_free(comm);
}
#endif

/* `program --memory N RANK MODE`: one rank of a run, whose experts are over both, in which the N-th
 * allocation of that rank fails (a fault_mode); 0: none, and the rank says how many there were. */
static int memory_main(int64_t n, int rank, fault_mode mode)
{
    const char *const sets[] = { "model.num_experts=4", "parallel.expert=2" };
    mt_config c;
    mt_launch launch;
    const mt_rundir_options options = { .path = n ? "short" : "enough" };
    mt_status status = mt_launch_detect(&launch);
    if (status == MT_OK) status = mt_config_load(&c, "t.yaml", sets, 2);
    if (n && launch.rank == rank) fault_arm(n, mode);
    int64_t before = fault_allocations();
    if (status == MT_OK) status = mt_run_train(&c, &options);
    if (launch.rank == 1)
        printf("it made %lld allocations\n", (long long)(fault_allocations() - before));
    fault_disarm();
    if (status != MT_OK) fprintf(stderr, "mixtape train: %s\n", mt_error_message());
    return mt_exit_code(status);
}

/* `program --begin N RANK`: one rank that finds the others, of which that rank's N-th allocation
 * fails; it says whether there were as many. */
static int begin_main(int64_t n, int rank)
{
    mt_launch launch;
    mt_comm *comm = NULL;
    mt_device *device = NULL;
    mt_status status = mt_launch_detect(&launch);
    if (status == MT_OK) status = mt_ranks_open_device(&device, "cpu");
    if (launch.rank == rank) fault_arm(n, FAULT_ONCE);
    if (status == MT_OK) status = mt_ranks_open(&comm, device, 20);
    if (!fault_disarm() && launch.rank == rank) printf("nothing failed\n");
    if (status != MT_OK) fprintf(stderr, "mixtape train: %s\n", mt_error_message());
    fflush(stdout);
    mt_ranks_close(&comm, status);
    mt_device_destroy(&device);
    return mt_exit_code(status);
}

static int run_memory(int64_t n, int rank, fault_mode mode)
{
    char command[1200];
    snprintf(command, sizeof command, "%s --memory %lld %d %d", this_program(), (long long)n, rank,
             (int)mode);
    return run_ranks(2, command);
}

/* The rank and what there was no memory for are named. */
static void assert_named(int64_t n, int rank, int code)
{
    if (code == 0 || (rank && !strstr(ranks_output, "rank 1: ")) ||
        (!strstr(ranks_output, "memory") && !strstr(ranks_output, ": no ")))
        fail_msg("allocation %lld of rank %d: exit code %d:\n%s", (long long)n, rank, code,
                 ranks_output);
}

/* At once. */
static void assert_short(int64_t n, int rank)
{
    double began = mt_now();
    assert_named(n, rank, run_memory(n, rank, FAULT_FROM));
    assert_true(mt_now() - began < 20);
    assert_int_equal(system("rm -rf short"), 0);
}

/* Wherever in a run it happens, what the ranks share being taken apart after that. On GPUs CUDA's
 * own allocations would fail too, which it does not survive (their memory: tests/cuda/faults.sh).
 */
static void test_out_of_memory(void **state)
{
    (void)state;
    need_ranks(2);
    if (on_gpus()) skip();
    if (run_memory(0, 1, FAULT_FROM) != 0) fail_msg("with enough memory:\n%s", ranks_output);
    const char *said = strstr(ranks_output, "it made ");
    assert_non_null(said);
    int64_t all = atoll(said + strlen("it made "));
    assert_true(all > 100);
    const int64_t at[] = { all / 20, all / 3, all * 2 / 3, all - all / 10 };
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++)
        for (int rank = 0; rank < 2; rank++) assert_short(at[i], rank);
}

/* Each allocation with which ranks find each other, where nobody watches over them yet, until there
 * are no more. */
static void test_no_memory_to_begin(void **state)
{
    enum { LEAST = 3, MOST = 100 };
    (void)state;
    need_ranks(2);
    if (on_gpus()) skip();
    for (int rank = 0; rank < 2; rank++)
        for (int64_t n = 1;; n++) {
            char command[1200];
            double began = mt_now();
            snprintf(command, sizeof command, "%s --begin %lld %d", this_program(), (long long)n,
                     rank);
            int code = run_ranks(2, command);
            assert_true(mt_now() - began < 20);
            assert_true(n < MOST);
            if (code == 0 && n > LEAST && strstr(ranks_output, "nothing failed")) break;
            assert_named(n, rank, code);
        }
}

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 3 && !strcmp(argv[1], "--begin")) return begin_main(atoll(argv[2]), atoi(argv[3]));
    if (argc > 4 && !strcmp(argv[1], "--memory"))
        return memory_main(atoll(argv[2]), atoi(argv[3]), (fault_mode)atoi(argv[4]));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_asked_to_stop), cmocka_unit_test(test_killed),
        cmocka_unit_test(test_stuck),         cmocka_unit_test(test_cut_corpus),
        cmocka_unit_test(test_out_of_memory), cmocka_unit_test(test_killed_saving),
        cmocka_unit_test(test_full_disk),     cmocka_unit_test(test_no_memory_to_begin),
        cmocka_unit_test(test_late),
    };
    return cmocka_run_group_tests(tests, setup, program_teardown);
}
