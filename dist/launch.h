/* Which process of how many this is, as whoever started it says. */
#pragma once

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_launch {
    int rank, world;
    int local_rank, local_world; /* on this host; local_world 0: not said */
    const char *launcher; /* "mixtape", "torchrun", "Open MPI", "SLURM", "PMI"; "": one process */
} mt_launch;

/* Reads the variables of our own --gpus (MIXTAPE_RANK, ...), torchrun, Open MPI, SLURM (steps
 * started by srun) and PMI, in this order, and takes the first that means more than one process;
 * without any it is one. MT_ECONFIG names the variable, its value and the rule. */
mt_status mt_launch_detect(mt_launch *launch);

/* Where the ranks find rank 0, before anything else connects them. */
typedef struct mt_meeting {
    char host[256]; /* that rank 0 listens at; a loopback address: only to this host. Of IPv6:
                       without the brackets that it may be given in */
    int port;
    int listener;   /* rank 0 has inherited the listening socket; else -1 */
    char file[256]; /* not "": rank 0 writes "host:port" here, and host and port are not given */
} mt_meeting;

/* In this order: MIXTAPE_RENDEZVOUS, "HOST:PORT" or "file:PATH" (a file that all ranks see);
 * MASTER_ADDR and MASTER_PORT (the next port where torchrun's agent keeps its own store at that
 * one, TORCHELASTIC_USE_AGENT_STORE); in steps of SLURM the first host of the step and a port made
 * of job and step; where all ranks are on this host, a file in TMPDIR or /tmp named by the job.
 * MT_ECONFIG names variable, value and rule, or what has to be set. */
mt_status mt_launch_meeting(mt_meeting *meeting, const mt_launch *launch);

#ifdef __cplusplus
}
#endif
