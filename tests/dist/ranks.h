/* Tests over ranks. The program without arguments is the cmocka runner; it starts itself under
 * mpirun for the cases that need ranks, and `program CASE` is then one rank of a case. */
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

static char ranks_output[1 << 16];

/* Whether ranks can be started here; skips the test otherwise. */
static inline void need_ranks(void)
{
#ifndef MT_HAVE_mpi
    skip();
#endif
    if (system("command -v mpirun >/dev/null 2>&1") != 0) skip();
}

/* Runs `mpirun -n ranks command` and returns its exit code; what it wrote is in ranks_output. */
static inline int run_ranks(int ranks, const char *command)
{
    char line[16384];
    snprintf(line, sizeof line,
             "OMP_NUM_THREADS=1 timeout 120 mpirun --oversubscribe --allow-run-as-root "
             "--mca mpi_yield_when_idle 1 -n %d %s 2>&1",
             ranks, command);
    FILE *out = popen(line, "r");
    assert_non_null(out);
    size_t n = fread(ranks_output, 1, sizeof ranks_output - 1, out);
    ranks_output[n] = '\0';
    int status = pclose(out);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* Runs a case of this program on so many ranks and asserts that all of them passed. */
static inline void assert_ranks(int ranks, const char *name)
{
    char self[1024], command[1200];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = '\0';
    snprintf(command, sizeof command, "%s %s", self, name);
    int code = run_ranks(ranks, command);
    if (code != 0 || !strstr(ranks_output, "every rank passed"))
        fail_msg("%s on %d ranks: exit code %d:\n%s", name, ranks, code, ranks_output);
}

/* Ends a rank when its watchdog speaks. */
static inline void rank_fault(void *context, int by, const char *sentence)
{
    fprintf(stderr, "rank %d hears of rank %d: %s\n", *(const int *)context, by, sentence);
    sleep(1); /* the others shall hear it too, before mpirun ends them */
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
    mt_comm_options options = { timeout_s, rank_fault, &rank, NULL };
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
