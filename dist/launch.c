/* Launchers, a row each: their variables. */
#include "dist/launch.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct launcher {
    const char *name;
    const char *rank, *world;             /* both are set, or it is not this launcher */
    const char *local_rank, *local_world; /* optional */
} launcher;

static const launcher launchers[] = {
    { "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" },
    { "SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
      "SLURM_STEP_TASKS_PER_NODE" },
    { "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
      "OMPI_COMM_WORLD_LOCAL_SIZE" },
    { "PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS" },
};
enum { LAUNCHERS = sizeof launchers / sizeof launchers[0] };

/* SLURM writes "2(x4)" where nodes differ: what follows the number may be anything in `tail`. */
static mt_status read_number(int *to, const char *name, bool tail)
{
    const char *text = getenv(name);
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    MT_REQUIRE(end != text && (tail || !*end) && !errno && n >= 0 && n <= INT_MAX, MT_ECONFIG,
               "environment: %s is '%.40s', must be a number of ranks", name, text);
    *to = (int)n;
    return MT_OK;
}

static mt_status read_launcher(mt_launch *launch, const launcher *l)
{
    *launch = (mt_launch){ .launcher = l->name };
    MT_TRY(read_number(&launch->rank, l->rank, false));
    MT_TRY(read_number(&launch->world, l->world, false));
    if (getenv(l->local_rank)) MT_TRY(read_number(&launch->local_rank, l->local_rank, false));
    if (getenv(l->local_world)) MT_TRY(read_number(&launch->local_world, l->local_world, true));
    MT_REQUIRE(launch->world > 0 && launch->rank < launch->world, MT_ECONFIG,
               "environment: %s is %d, must be below %s %d", l->rank, launch->rank, l->world,
               launch->world);
    return MT_OK;
}

mt_status mt_launch_detect(mt_launch *launch)
{
    *launch = (mt_launch){ .world = 1, .local_world = 1, .launcher = "" };
    /* One process of its own goes on looking: mpirun within a batch step of SLURM. */
    for (int i = 0; i < LAUNCHERS && launch->world == 1; i++)
        if (getenv(launchers[i].rank) && getenv(launchers[i].world))
            MT_TRY(read_launcher(launch, &launchers[i]));
    return MT_OK;
}
