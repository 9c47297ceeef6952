/* Tests over ranks. The program without arguments is the cmocka runner; it starts itself for the
 * cases that need ranks, and `program CASE` is then one rank of a case: CPU processes under mpirun,
 * or a GPU each with MIXTAPE_TEST_DEVICE=cuda. Where there is one GPU, NCCL 2.30 lets them share it
 * under NCCL_MULTI_RANK_GPU_ENABLE=1, with MIXTAPE_TEST_RANKS for how many; they take turns, or run
 * side by side under CUDA MPS, which a rank that is killed takes down (test_comm, test_checkpoint,
 * test_run_faults). */
#pragma once

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/test.h"

#include "dist/comm.h"
#include "train/ranks.h"
#include "train/supervise.h"

/* A case, as one rank runs it: MT_OK, or what it found wrong. */
typedef struct rank_case {
    const char *name;
    mt_status (*run)(mt_comm *comm);
} rank_case;

/* Fails the case on this rank. */
#define rank_check(rule, ...)                                                                      \
    do {                                                                                           \
        if (!(rule)) return MT_FAIL(MT_EINTERNAL, __VA_ARGS__);                                    \
    } while (0)

static char ranks_output[1 << 22];

/* No memory of these programs is pinned: ranks have a GPU each, and copy to and fro. */
extern const bool test_own_memory;
const bool test_own_memory = true;

static inline bool on_gpus(void)
{
    return !strcmp(test_device_name(), "cuda");
}

/* How many ranks can be started here: MIXTAPE_TEST_RANKS if set, else one a GPU, or 4 processes. */
static inline int most_ranks(void)
{
    const char *given = getenv("MIXTAPE_TEST_RANKS");
    char path[32];
    int n = 0;
    if (given) return atoi(given);
    if (!on_gpus()) return 4;
    for (int i = 0; i < 64; i++) {
        snprintf(path, sizeof path, "/dev/nvidia%d", i);
        n += access(path, F_OK) == 0;
    }
    return n;
}

/* Whether so many ranks can be started here; skips the test otherwise. */
static inline void need_ranks(int ranks)
{
    if (ranks > most_ranks()) skip();
    if (on_gpus()) return;
#ifndef MT_HAVE_mpi
    skip();
#endif
    if (system("command -v mpirun >/dev/null 2>&1") != 0) skip();
}

/* Runs a line of the shell and returns its exit code; what it wrote is in ranks_output. */
static inline int run_line(const char *line)
{
    FILE *out = popen(line, "r");
    assert_non_null(out);
    size_t n = fread(ranks_output, 1, sizeof ranks_output - 1, out);
    ranks_output[n] = '\0';
    int status = pclose(out);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static inline const char *this_program(void)
{
    static char self[1024];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = '\0';
    return self;
}

/* Runs `command` as so many ranks, under mpirun, or on GPUs as children of this program; as
 * run_line. MPI is told how to move bytes: looking for networks takes half of its start. */
static inline int run_ranks(int ranks, const char *command)
{
    char line[16384];
    if (on_gpus())
        snprintf(line, sizeof line, "OMP_NUM_THREADS=1 timeout 300 %s --ranks %d %s 2>&1",
                 this_program(), ranks, command);
    else
        snprintf(line, sizeof line,
                 "OMP_NUM_THREADS=1 timeout 120 mpirun --oversubscribe --allow-run-as-root "
                 "--mca mpi_yield_when_idle 1 --mca pml ob1 -n %d %s 2>&1",
                 ranks, command);
    return run_line(line);
}

/* Runs a case of this program on so many ranks and asserts that all of them passed. */
static inline void assert_ranks(int ranks, const char *name)
{
    char command[1200];
    snprintf(command, sizeof command, "%s %s", this_program(), name);
    int code = run_ranks(ranks, command);
    if (code != 0 || !strstr(ranks_output, "every rank passed"))
        fail_msg("%s on %d ranks: exit code %d:\n%s", name, ranks, code, ranks_output);
}

/* Tests that are a case of the program, on two ranks, or also on four where there are so many:
 * RANKS_TEST(on_two, "training"). */
static inline void on_two(void **state)
{
    need_ranks(2);
    assert_ranks(2, *state);
}
static inline void on_two_and_four(void **state)
{
    on_two(state);
    if (most_ranks() >= 4) assert_ranks(4, *state);
}
#define RANKS_TEST(ranks, name)                                                                    \
    {                                                                                              \
        name, ranks, NULL, NULL, name                                                              \
    }

/* `program --ranks N COMMAND...`: the ranks of this host as children. */
static inline int ranks_main(char **argv)
{
    int code = 0, rank;
    if (mt_supervise(&code, &rank, argv[3], argv + 3, atoi(argv[2]), 10) != MT_OK) {
        fprintf(stderr, "%s\n", mt_error_message());
        return 1;
    }
    if (code) fprintf(stderr, "rank %d was the first that failed: %d\n", rank, code);
    return code;
}

/* What a rank computes on: a GPU of its own, or the device under test. NULL in the runner. */
static mt_device *rank_device;

/* Ends a rank when its watchdog speaks. */
static inline void rank_fault(void *context, int by, const char *sentence)
{
    fprintf(stderr, "rank %d hears of rank %d: %s\n", *(const int *)context, by, sentence);
    sleep(1); /* the others shall hear it too, before they are ended */
    _exit(6);
}

/* One rank of a case: the verdict is that of all ranks. */
static inline int rank_main(const rank_case *cases, int count, const char *name, double timeout_s)
{
    static int rank;
    mt_launch launch;
    mt_comm *world;
    mt_status status = mt_launch_detect(&launch);
    rank = launch.rank;
    if (status == MT_OK && on_gpus())
        status = mt_ranks_open_device(&rank_device, "cuda");
    else
        rank_device = test_device();
    mt_comm_options options = { timeout_s, rank_fault, &rank, rank_device };
    if (status == MT_OK) status = mt_comm_open(&world, &launch, &options);
    if (status != MT_OK) {
        fprintf(stderr, "rank %d: %s\n", launch.rank, mt_error_message());
        return 1;
    }
    status = MT_FAIL(MT_EINVAL, "there is no case '%s'", name);
    for (int i = 0; i < count; i++)
        if (!strcmp(cases[i].name, name)) status = cases[i].run(world);
    if (status != MT_OK)
        fprintf(stderr, "rank %d: %s [%s]\n", launch.rank, mt_error_message(), mt_error_trace());
    status = mt_comm_agree(world, status, "verdict");
    if (status == MT_OK && launch.rank == 0) printf("every rank passed\n");
    fflush(stdout);
    mt_comm_close(&world);
    return status != MT_OK;
}
