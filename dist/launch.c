/* Launchers, a row each: their variables; and where the ranks of each meet. */
#include "dist/launch.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct launcher {
    const char *name;
    const char *rank, *world;             /* both are set, or it is not this launcher */
    const char *local_rank, *local_world; /* optional */
} launcher;

/* mpirun starts its daemons by srun: below them SLURM's variables are those of the daemons. */
static const launcher launchers[] = {
    { "mixtape", "MIXTAPE_RANK", "MIXTAPE_WORLD_SIZE", "MIXTAPE_LOCAL_RANK",
      "MIXTAPE_LOCAL_WORLD_SIZE" },
    { "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" },
    { "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
      "OMPI_COMM_WORLD_LOCAL_SIZE" },
    { "SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
      "SLURM_STEP_TASKS_PER_NODE" },
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

/* ---- where they meet ---------------------------------------------------------------------------
 */

enum { PORTS = 65536, FIRST_PORT = 20000, PORT_RANGE = 20000 };

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static mt_status read_port(int *port, const char *name, const char *text)
{
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    MT_REQUIRE(end != text && !*end && !errno && n > 0 && n < PORTS, MT_ECONFIG,
               "environment: %s is '%.100s', its port must be a number from 1 to 65535", name,
               text);
    *port = (int)n;
    return MT_OK;
}

static mt_status read_host(mt_meeting *m, const char *name, const char *host, size_t length)
{
    bool brackets = length >= 2 && host[0] == '[' && host[length - 1] == ']'; /* of IPv6 */
    if (brackets) length -= 2;
    MT_REQUIRE(length > 0 && length < sizeof m->host, MT_ECONFIG,
               "environment: %s is '%.100s', must name a host", name, host);
    memcpy(m->host, host + brackets, length);
    m->host[length] = '\0';
    return MT_OK;
}

static mt_status read_rendezvous(mt_meeting *m, const char *text)
{
    static const char name[] = "MIXTAPE_RENDEZVOUS", prefix[] = "file:";
    if (!strncmp(text, prefix, sizeof prefix - 1)) {
        const char *path = text + sizeof prefix - 1;
        MT_REQUIRE(*path && strlen(path) < sizeof m->file - 16, MT_ECONFIG,
                   "environment: %s is '%.100s', must be file: and a path of at most %d bytes",
                   name, text, (int)sizeof m->file - 17);
        snprintf(m->file, sizeof m->file, "%s", path);
        return MT_OK;
    }
    const char *colon = strrchr(text, ':');
    MT_REQUIRE(colon, MT_ECONFIG, "environment: %s is '%.100s', must be HOST:PORT or file:PATH",
               name, text);
    MT_TRY(read_host(m, name, text, (size_t)(colon - text)));
    return read_port(&m->port, name, colon + 1);
}

static mt_status read_master(mt_meeting *m)
{
    const char *host = variable("MASTER_ADDR"), *port = variable("MASTER_PORT");
    const char *agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    MT_REQUIRE(host && port, MT_ECONFIG,
               "environment: %s is set, %s is not: both say where rank 0 is",
               host ? "MASTER_ADDR" : "MASTER_PORT", host ? "MASTER_PORT" : "MASTER_ADDR");
    MT_TRY(read_host(m, "MASTER_ADDR", host, strlen(host)));
    MT_TRY(read_port(&m->port, "MASTER_PORT", port));
    if (agent && !strcmp(agent, "True")) m->port += m->port < PORTS - 1 ? 1 : -1;
    return MT_OK;
}

/* The first of "gpu[03-06,9],login1": gpu03. */
static mt_status read_nodes(mt_meeting *m, const char *name, const char *nodes)
{
    size_t n = strcspn(nodes, "[,"), digits = 0;
    if (nodes[n] == '[')
        while (isdigit((unsigned char)nodes[n + 1 + digits])) digits++;
    MT_REQUIRE(n + digits > 0 && n + digits < sizeof m->host && (nodes[n] != '[' || digits),
               MT_ECONFIG, "environment: %s is '%.100s', must be a list of hosts", name, nodes);
    snprintf(m->host, sizeof m->host, "%.*s%.*s", (int)n, nodes, (int)digits, nodes + n + 1);
    return MT_OK;
}

/* A port that the steps of a job do not share, and jobs on one host hardly ever do. */
static int port_of(const char *job, const char *step)
{
    unsigned long n = strtoul(job, NULL, 10) * 16 + (step ? strtoul(step, NULL, 10) : 0);
    return FIRST_PORT + (int)(n % PORT_RANGE);
}

/* What the processes of one job on this host have in common, and others have not. */
static void name_job(char *to, size_t size)
{
    const char *job = variable("PMIX_NAMESPACE");
    if (!job) job = variable("OMPI_MCA_ess_base_jobid");
    if (job)
        snprintf(to, size, "%.100s", job);
    else
        snprintf(to, size, "%ld", (long)getppid());
    for (; *to; to++)
        if (!isalnum((unsigned char)*to)) *to = '_';
}

static mt_status choose_file(mt_meeting *m, const mt_launch *launch)
{
    char job[128];
    const char *folder = variable("TMPDIR");
    MT_REQUIRE(launch->local_world == launch->world, MT_ECONFIG,
               "%d processes of %s, not all known to be on this host: nothing says where rank 0 "
               "is; set MASTER_ADDR and MASTER_PORT, or MIXTAPE_RENDEZVOUS",
               launch->world, launch->launcher);
    name_job(job, sizeof job);
    int n = snprintf(m->file, sizeof m->file, "%s/mixtape-%ld-%s", folder ? folder : "/tmp",
                     (long)getuid(), job);
    MT_REQUIRE(n > 0 && (size_t)n < sizeof m->file - 16, MT_ECONFIG,
               "environment: TMPDIR is '%.100s', too long a path", folder ? folder : "");
    snprintf(m->host, sizeof m->host, "127.0.0.1");
    return MT_OK;
}

mt_status mt_launch_meeting(mt_meeting *m, const mt_launch *launch)
{
    const char *rendezvous = variable("MIXTAPE_RENDEZVOUS"), *job = variable("SLURM_JOB_ID");
    const char *nodes_name =
        variable("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    const char *nodes = variable(nodes_name), *inherited = variable("MIXTAPE_LISTENER");
    *m = (mt_meeting){ .listener = -1 };
    if (inherited && launch->rank == 0)
        MT_TRY(read_number(&m->listener, "MIXTAPE_LISTENER", false));
    if (rendezvous) return read_rendezvous(m, rendezvous);
    if (variable("MASTER_ADDR") || variable("MASTER_PORT")) return read_master(m);
    if (strcmp(launch->launcher, "SLURM") != 0 || !nodes || !job) return choose_file(m, launch);
    MT_TRY(read_nodes(m, nodes_name, nodes));
    m->port = port_of(job, variable("SLURM_STEP_ID"));
    return MT_OK;
}
