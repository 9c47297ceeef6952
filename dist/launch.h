/* Which process of how many this is, as whoever started it says. */
#pragma once

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_launch {
    int rank, world;
    int local_rank, local_world; /* on this host; local_world 0: not said */
    const char *launcher;        /* "torchrun", "SLURM", "Open MPI", "PMI"; "" for one process */
} mt_launch;

/* Reads the variables of torchrun, SLURM (steps started by srun), Open MPI and PMI, in this order,
 * and takes the first that means more than one process; without any it is one. MT_ECONFIG names the
 * variable, its value and the rule. */
mt_status mt_launch_detect(mt_launch *launch);

#ifdef __cplusplus
}
#endif
