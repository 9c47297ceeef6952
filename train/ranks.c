/* Ranks of a run. */
#include "train/ranks.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/clock.h"
#include "kernels/backends.h"
#include "kernels/ops.h"
#include "train/cli.h"
#include "train/nearest.h"
#include "train/supervise.h"

enum { LINE = 160, DEPTH = 4, MOST_RANKS = 1024, SUGGESTED = 256 };
static const double grace_s = 10; /* for the others to hear of a failure, and end */
static const double leave_s = 1;  /* for rank 0 to speak before a launcher ends it */

/* On the watchdog's thread. Rank 0 speaks; where it is the one that is gone, rank 1. The others
 * leave later: the launcher ends everybody when the first process ends. */
static void end_process(void *context, int by, const char *sentence)
{
    int rank = *(const int *)context;
    bool leaderless =
        by == 0 && (strstr(sentence, "is gone") || strstr(sentence, "does not answer"));
    if (rank == 0 || (rank == 1 && leaderless)) {
        if (by > 0 && !strstr(sentence, "rank "))
            fprintf(stderr, "mixtape train: rank %d: %s\n", by, sentence);
        else
            fprintf(stderr, "mixtape train: %s\n", sentence);
    }
    mt_nap(rank == 0 ? 0.3 : leave_s);
    _exit(MT_EXIT_DEVICE);
}

mt_status mt_ranks_start(int64_t count, const char *device, char *const *argv)
{
    mt_launch launch;
    int code, rank, gpus;
    if (count == MT_OPTION_ABSENT) return MT_OK;
    MT_REQUIRE(strcmp(device, "cpu") != 0, MT_ECONFIG,
               "--gpus %lld on device cpu: CPU processes run under mpirun", (long long)count);
    MT_REQUIRE(count == 1 || strncmp(device, "cuda:", 5), MT_ECONFIG,
               "--gpus %lld on device %s: one GPU", (long long)count, device);
    MT_REQUIRE(count > 0 && count <= MOST_RANKS, MT_ECONFIG, "--gpus %lld: must be from 1 to %d",
               (long long)count, MOST_RANKS);
    MT_REQUIRE(MT_CUDA_BUILT, MT_EUNSUPPORTED, "--gpus %lld: this build has no CUDA",
               (long long)count);
    MT_REQUIRE(count == 1 || mt_comm_has("nccl"), MT_EUNSUPPORTED,
               "--gpus %lld: this build has no NCCL to connect them", (long long)count);
    if (count == 1) MT_TRY(mt_device_count(&gpus, "cuda")); /* auto would do without */
    MT_TRY(mt_launch_detect(&launch));
    MT_REQUIRE(launch.world == 1 || !strcmp(launch.launcher, "mixtape"), MT_ECONFIG,
               "--gpus %lld: %s has started this as rank %d of %d already", (long long)count,
               launch.launcher, launch.rank, launch.world);
    if (launch.world > 1 || count == 1) return MT_OK;
    MT_TRY(mt_supervise(&code, &rank, "/proc/self/exe", argv, (int)count, grace_s));
    if (code > 128)
        fprintf(stderr, "mixtape train: rank %d of %d was ended by signal %d (%s)\n", rank,
                (int)count, code - 128, strsignal(code - 128));
    fflush(NULL);
    _exit(code);
}

mt_status mt_ranks_copy_words(char ***words, int argc, char **argv)
{
    *words = calloc((size_t)argc + 2, sizeof **words);
    MT_REQUIRE(*words, MT_ENOMEM, "no memory for the command line");
    (*words)[0] = program_invocation_name;
    memcpy(*words + 1, argv, (size_t)argc * sizeof *argv);
    return MT_OK;
}

const char *mt_ranks_launcher(void)
{
    mt_launch launch;
    if (mt_launch_detect(&launch) != MT_OK) {
        mt_error_clear();
        return "";
    }
    return launch.world > 1 && strcmp(launch.launcher, "mixtape") != 0 ? launch.launcher : "";
}

/* The GPU of this rank, by its number on its host. */
static mt_status choose_gpu(int *index, const mt_launch *launch, int count)
{
    *index = launch->local_rank < count ? launch->local_rank : 0;
    MT_REQUIRE(launch->local_rank < count || count == 1, MT_ECONFIG,
               "rank %d is number %d on its host, where it sees %d GPUs: one rank a GPU",
               launch->rank, launch->local_rank, count);
    return MT_OK;
}

mt_status mt_ranks_open_device(mt_device **device, const char *name)
{
    mt_launch launch;
    int count, index, threads = mt_ranks_threads();
    char numbered[32];
    bool automatic = !strcmp(name, "auto");
    *device = NULL;
    MT_TRY(mt_launch_detect(&launch));
    MT_REQUIRE(launch.world == 1 || strncmp(name, "cuda:", 5), MT_ECONFIG,
               "device %s with %d ranks: each takes the GPU of its own number, say cuda", name,
               launch.world);
    if (launch.world == 1 || (!automatic && strcmp(name, "cuda") != 0))
        return mt_device_open(device, name, NULL, threads);
    mt_status status = mt_device_count(&count, "cuda");
    if (status != MT_OK && automatic && strcmp(launch.launcher, "mixtape") != 0) {
        mt_error_clear(); /* no GPUs here */
        return mt_device_open(device, "cpu", NULL, threads);
    }
    MT_TRY(status);
    MT_TRY(choose_gpu(&index, &launch, count));
    snprintf(numbered, sizeof numbered, "cuda:%d", index);
    return mt_device_open(device, numbered, NULL, threads);
}

mt_status mt_ranks_open(mt_comm **comm, mt_device *device, double timeout_s)
{
    static int rank; /* for the watchdog's thread, which may outlive everything else */
    mt_launch launch;
    MT_TRY(mt_launch_detect(&launch));
    rank = launch.rank;
    const mt_comm_options options = { timeout_s, end_process, &rank, device };
    return mt_comm_open(comm, &launch, &options);
}

int mt_ranks_threads(void)
{
    mt_launch launch;
    cpu_set_t cores;
    const char *given = getenv("OMP_NUM_THREADS");
    if ((given && *given) || mt_launch_detect(&launch) != MT_OK || launch.local_world < 2) return 0;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) < online) return 0;
    return online > launch.local_world ? (int)(online / launch.local_world) : 1;
}

/* ---- shares -------------------------------------------------------------------------------------
 */

/* Ranks and what they share, with a number of it that may be changed. */
typedef struct sharing {
    int64_t ranks, batch, micro, degree, experts;
    bool whole; /* micro-batches of all the batch, the default: they go with it */
    int64_t *changed;
} sharing;

static bool shares(const sharing *s)
{
    int64_t share = s->batch / s->ranks;
    return s->batch % s->ranks == 0 && s->ranks % s->degree == 0 &&
           (s->whole || s->micro >= share || share % s->micro == 0);
}

/* The rest is what a configuration has to keep on one rank too. */
static bool shares_with(void *context, int64_t n)
{
    sharing *s = context;
    *s->changed = n;
    return shares(s) && (s->whole || s->batch % s->micro == 0) && s->experts % s->degree == 0;
}

/* Appends "2 or 4 as NAME": what would do in the place of a number, if any does. */
static void suggest(char text[SUGGESTED], sharing *s, int64_t *number, int64_t most,
                    const char *name)
{
    char numbers[MT_NEAREST_NUMBERS];
    int64_t kept = *number;
    size_t used = strlen(text);
    s->changed = number;
    mt_nearest_numbers(numbers, kept, most, shares_with, s);
    *number = kept;
    if (*numbers)
        snprintf(text + used, SUGGESTED - used, "%s%s as %s", used ? ", or " : ": take ", numbers,
                 name);
}

static mt_status refuse(sharing *s)
{
    enum { MOST_SEQUENCES = 1 << 24 };
    char fits[SUGGESTED] = "";
    long long ranks = s->ranks, batch = s->batch, degree = s->degree, micro = s->micro;
    suggest(fits, s, &s->ranks, s->batch, "the number of ranks");
    if (batch % ranks != 0) {
        suggest(fits, s, &s->batch, MOST_SEQUENCES, "train.batch_size");
        return MT_FAIL(MT_ECONFIG, "train.batch_size %lld does not divide among %lld ranks%s",
                       batch, ranks, fits);
    }
    if (ranks % degree != 0) {
        suggest(fits, s, &s->degree, ranks, "parallel.expert");
        return MT_FAIL(MT_ECONFIG,
                       "parallel.expert is %lld, must divide the number of ranks, %lld%s", degree,
                       ranks, fits);
    }
    suggest(fits, s, &s->micro, batch / ranks, "train.micro_batch_size");
    return MT_FAIL(MT_ECONFIG,
                   "train.micro_batch_size %lld does not divide the %lld sequences that are the "
                   "share of each of %lld ranks%s",
                   micro, batch / ranks, ranks, fits);
}

/* Numbers that are not positive are the trainer's to refuse. */
mt_status mt_ranks_share(mt_trainer_config *c, mt_comm *comm)
{
    sharing s = { .ranks = mt_comm_size(comm),
                  .batch = c->batch_size,
                  .micro = c->micro_batch_size,
                  .whole = c->micro_batch_size == c->batch_size,
                  .degree = c->expert_parallel > 1 ? c->expert_parallel : 1,
                  .experts = c->model.num_experts };
    int64_t share = s.batch / s.ranks;
    c->comm = comm;
    if (s.batch > 0 && s.micro > 0 && !shares(&s)) return refuse(&s);
    if (share > 0 && c->micro_batch_size > share) c->micro_batch_size = share;
    return MT_OK;
}

/* ---- what all must have -------------------------------------------------------------------------
 */

/* A line of a configuration: its key with the sections that it is in, and its value. */
typedef struct line {
    char path[LINE], value[LINE];
    size_t ends[DEPTH + 1]; /* of the path's parts, by depth */
} line;

/* Reads the next line, and goes on to the one after it; false at the end. */
static bool read_line(line *l, const char **text)
{
    const size_t indent = 2;
    size_t n = strcspn(*text, "\n"), space = strspn(*text, " "), depth = space / indent;
    const char *key = *text + space;
    size_t length = strcspn(key, ":\n");
    const char *value = key + length + (key[length] == ':');
    if (!**text || depth >= DEPTH) return false;
    value += strspn(value, " ");
    l->ends[depth + 1] =
        l->ends[depth] + (size_t)snprintf(l->path + l->ends[depth], LINE - l->ends[depth], "%s%.*s",
                                          depth ? "." : "", (int)(length % LINE), key);
    if (l->ends[depth + 1] >= LINE) l->ends[depth + 1] = LINE - 1;
    snprintf(l->value, LINE, "%.*s", (int)(*text + n - value), value);
    *text += n + ((*text)[n] == '\n');
    return true;
}

/* Says what two different configurations differ in first. */
static mt_status first_difference(const char *own, const char *first)
{
    line a = { .path = "" }, b = { .path = "" };
    bool more = true, less = true;
    while (more && less && !strcmp(a.path, b.path) && !strcmp(a.value, b.value))
        more = read_line(&a, &own), less = read_line(&b, &first);
    if (more && less && !strcmp(a.path, b.path))
        return MT_FAIL(MT_ECONFIG, "its configuration is another: %s is %s, on rank 0 %s", a.path,
                       a.value, b.value);
    return MT_FAIL(MT_ECONFIG, "its configuration is another: it has %s where rank 0 has %s",
                   more ? a.path : "no more", less ? b.path : "no more");
}

/* Rank 0's text, to be freed. */
static mt_status receive_text(char **first, mt_comm *comm, const char *text, const char *what)
{
    int64_t bytes = (int64_t)strlen(text) + 1;
    MT_TRY(mt_comm_broadcast(comm, NULL, &bytes, sizeof bytes, 0, what));
    *first = calloc(1, (size_t)bytes);
    mt_status status =
        *first ? MT_OK
               : MT_FAIL(MT_ENOMEM, "no memory for the %s of %lld bytes", what, (long long)bytes);
    MT_TRY(mt_comm_agree(comm, status, what));
    if (mt_comm_rank(comm) == 0) memcpy(*first, text, (size_t)bytes);
    return mt_comm_broadcast(comm, NULL, *first, (size_t)bytes, 0, what);
}

mt_status mt_ranks_check_config(mt_comm *comm, const char *text)
{
    char *first = NULL;
    if (mt_comm_size(comm) == 1) return MT_OK;
    mt_status status = receive_text(&first, comm, text, "configuration");
    if (status == MT_OK && strcmp(first, text) != 0) status = first_difference(text, first);
    free(first);
    return mt_comm_agree(comm, status, "configuration");
}

mt_status mt_ranks_check_same(mt_comm *comm, const char *text, const char *what)
{
    char *first = NULL;
    if (mt_comm_size(comm) == 1) return MT_OK;
    mt_status status = receive_text(&first, comm, text, what);
    if (status == MT_OK && strcmp(first, text) != 0)
        status =
            MT_FAIL(MT_ECONFIG, "its %s is another: %.300s, on rank 0 %.300s", what, text, first);
    free(first);
    return mt_comm_agree(comm, status, what);
}

mt_status mt_ranks_largest(mt_comm *comm, int64_t *x, const char *what)
{
    return mt_comm_all_reduce(comm, NULL, x, 1, MT_I64, MT_REDUCE_MAX, what);
}

mt_status mt_ranks_extremes(mt_metrics_ranks *e, mt_comm *comm, double seconds, int64_t bytes)
{
    struct own {
        double seconds;
        int64_t bytes;
    } own = { seconds, bytes };
    int size = mt_comm_size(comm);
    *e = (mt_metrics_ranks){ size, 0, 0, seconds, seconds, bytes, bytes };
    if (size == 1) return MT_OK;
    struct own *all = calloc((size_t)size, sizeof *all);
    MT_REQUIRE(all, MT_ENOMEM, "no memory for what %d ranks measure", size);
    mt_status status = mt_comm_all_gather(comm, NULL, all, &own, sizeof own, "extremes");
    for (int r = 0; status == MT_OK && r < size; r++) {
        if (all[r].seconds > all[e->slowest].seconds) e->slowest = r;
        if (all[r].bytes > all[e->fullest].bytes) e->fullest = r;
        if (all[r].seconds < e->fastest_seconds) e->fastest_seconds = all[r].seconds;
        if (all[r].bytes < e->least_bytes) e->least_bytes = all[r].bytes;
    }
    e->slowest_seconds = all[e->slowest].seconds, e->most_bytes = all[e->fullest].bytes;
    free(all);
    return status;
}

/* A failure that every rank knows of needs no word to the others, which could end one of them
 * before it has spoken. */
static bool failed_alone(const mt_comm *comm, mt_status status)
{
    return mt_comm_size(comm) > 1 && status != MT_OK && status != MT_EPREEMPTED &&
           !mt_comm_failed_together(comm);
}

static void leave(mt_status status)
{
    fflush(NULL);
    _exit(mt_exit_code(status));
}

void mt_ranks_fail(mt_comm *comm, mt_status status)
{
    if (!failed_alone(comm, status)) return;
    mt_comm_abort(comm, mt_error_message());
    if (mt_comm_rank(comm)) leave(status);
}

void mt_ranks_close(mt_comm **comm, mt_status status)
{
    int rank = mt_comm_rank(*comm);
    if (failed_alone(*comm, status)) {
        mt_ranks_fail(*comm, status);
        return;
    }
    mt_comm_close(comm);
    if (rank && status != MT_OK) {
        fflush(NULL);
        mt_nap(leave_s); /* rank 0 speaks when this has returned */
        leave(status);
    }
}
