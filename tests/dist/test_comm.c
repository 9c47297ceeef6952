/* Collectives against what they mean, on one process and on ranks; what the watchdog finds. */
#include "tests/dist/placed.h"

#include <errno.h>
#include <sys/socket.h>

#include "dist/mesh.h"
#include "dist/watch.h"

/* ---- cases of ranks ----------------------------------------------------------------------------
 */

static mt_status gather_placed(mt_comm *c, mt_stream *stream)
{
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    const int64_t counts[] = { 0, 1, 33, 500000 };
    for (int k = 0; k < 4; k++) {
        int64_t n = counts[k];
        size_t own = (size_t)(n + 1) * 8, all = (size_t)(n * size + 1) * 8;
        double *x = malloc(own), *y = calloc(1, all);
        for (int64_t i = 0; i < n; i++) x[i] = element(rank, i);
        y[n * size] = 7;
        double *from = hold(stream, x, own), *to = hold(stream, y, all);
        MT_TRY(mt_comm_all_gather_of(c, stream, to, from, n, MT_F64, "test"));
        for (int again = 0; again < 2; again++) {
            MT_TRY(look(stream, y, to, all));
            for (int64_t i = 0; i < n * size; i++)
                rank_check(y[i] == element((int)(i / n), i % n), "all_gather %lld: element %lld",
                           (long long)n, (long long)i);
            rank_check(y[n * size] == 7, "all_gather wrote past its end");
            for (int r = 0; r < size; r++)
                if (r != rank) memset(y + r * n, 0, (size_t)n * sizeof *y);
            drop(stream, to, all);
            to = hold(stream, y, all);
            MT_TRY(mt_comm_all_gather(c, stream, to, to + rank * n, (size_t)n * 8, "in place"));
        }
        drop(stream, from, own);
        drop(stream, to, all);
        free(x);
        free(y);
    }
    return MT_OK;
}

static mt_status all_gather(mt_comm *c)
{
    return in_both(c, gather_placed);
}

/* The reduction in order, in the type itself. */
static double reduced(int size, int64_t i, mt_dtype dtype, mt_reduce reduce)
{
    double bits = 0, sum = 0;
    for (int r = 0; r < size; r++) {
        mt_store_f64(&bits, dtype, 0, element(r, i));
        double x = mt_load_f64(&bits, dtype, 0);
        if (reduce == MT_REDUCE_MAX)
            sum = r && sum > x ? sum : x;
        else
            sum = dtype == MT_F64 ? sum + x : (double)((float)sum + (float)x);
    }
    mt_store_f64(&bits, dtype, 0, sum);
    return mt_load_f64(&bits, dtype, 0);
}

static mt_status check_reduced(const char *what, const void *x, int size, int64_t first, int64_t n,
                               mt_dtype dtype, mt_reduce reduce)
{
    for (int64_t i = 0; i < n; i++)
        rank_check(mt_load_f64(x, dtype, i) == reduced(size, first + i, dtype, reduce),
                   "%s of %s: element %lld", what, mt_dtype_name(dtype), (long long)i);
    return MT_OK;
}

static mt_status reduce_one(mt_comm *c, mt_stream *stream, int64_t n, mt_dtype dtype,
                            mt_reduce reduce)
{
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    size_t bytes = (size_t)(n + 1) * 8;
    void *x = calloc((size_t)size, bytes), *y = calloc(1, bytes);
    for (int64_t i = 0; i < n * size; i++) mt_store_f64(x, dtype, i, element(rank, i));
    void *from = hold(stream, x, (size_t)size * bytes), *to = hold(stream, y, bytes);
    MT_TRY(mt_comm_reduce_scatter(c, stream, to, from, n, dtype, reduce, "test"));
    MT_TRY(look(stream, y, to, bytes));
    MT_TRY(check_reduced("reduce_scatter", y, size, rank * n, n, dtype, reduce));
    MT_TRY(mt_comm_all_reduce(c, stream, from, n, dtype, reduce, "test"));
    MT_TRY(look(stream, x, from, (size_t)size * bytes));
    MT_TRY(check_reduced("all_reduce", x, size, 0, n, dtype, reduce));
    drop(stream, from, (size_t)size * bytes);
    drop(stream, to, bytes);
    free(x);
    free(y);
    return MT_OK;
}

/* Elements [first, end) of parts of which this rank's begins at `begin` and has `own`. */
static mt_status reduce_span(mt_comm *c, mt_stream *stream, const mt_comm_parts *parts,
                             const void *from, int64_t begin)
{
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    int64_t own = parts->counts[rank];
    size_t bytes = (size_t)(own + 1) * 4;
    float *y = calloc(1, bytes);
    for (int64_t i = 0; i <= own; i++) y[i] = 7;
    void *to = hold(stream, y, bytes);
    MT_TRY(mt_comm_reduce_scatter_parts(c, stream, to, from, parts, MT_F32, MT_REDUCE_SUM, "test"));
    MT_TRY(look(stream, y, to, bytes));
    for (int64_t i = 0; i <= own; i++) {
        bool reached = i >= parts->first && i < parts->end && i < own;
        double want = reached ? reduced(size, begin + i, MT_F32, MT_REDUCE_SUM) : 7;
        rank_check((double)y[i] == want, "elements [%lld, %lld): %lld of %lld is %g, not %g",
                   (long long)parts->first, (long long)parts->end, (long long)i, (long long)own,
                   (double)y[i], want);
    }
    drop(stream, to, bytes);
    free(y);
    return MT_OK;
}

/* Parts of different sizes, some of them empty: whole, and what is before and behind an element,
 * which some of the parts do not reach. */
static mt_status reduce_parts(mt_comm *c, mt_stream *stream, int64_t n)
{
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    int64_t counts[64], all = 0, first = 0;
    for (int r = 0; r < size; r++) {
        counts[r] = r % 3 == 1 ? 0 : n + r * 7;
        first += r < rank ? counts[r] : 0;
        all += counts[r];
    }
    size_t bytes = (size_t)(all + 1) * 4;
    float *x = calloc(1, bytes);
    for (int64_t i = 0; i < all; i++) mt_store_f64(x, MT_F32, i, element(rank, i));
    void *from = hold(stream, x, bytes);
    const int64_t cuts[] = { 0, n / 3, n + 3, INT64_MAX };
    for (int i = 0; i < 4; i++)
        for (int j = i; j < 4; j++)
            MT_TRY(
                reduce_span(c, stream, &(mt_comm_parts){ counts, cuts[i], cuts[j] }, from, first));
    rank_check(mt_comm_reduce_scatter_parts(c, stream, x, from, &(mt_comm_parts){ counts, 1, 0 },
                                            MT_F32, MT_REDUCE_SUM, "test") == MT_EINVAL,
               "elements [1, 0) of each part");
    counts[size - 1] = -1;
    rank_check(mt_comm_reduce_scatter_parts(c, stream, x, from, &(mt_comm_parts){ counts, 0, 1 },
                                            MT_F32, MT_REDUCE_SUM, "test") == MT_EINVAL,
               "a part of -1 elements");
    drop(stream, from, bytes);
    free(x);
    return MT_OK;
}

static mt_status reduce_placed(mt_comm *c, mt_stream *stream)
{
    static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    const int64_t counts[] = { 0, 1, 7, 300001 }; /* the last is more than a chunk of the host's */
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    for (int k = 0; k < 24; k++)
        MT_TRY(reduce_one(c, stream, counts[k / 6], dtypes[k % 3], (mt_reduce)(k / 3 % 2)));
    for (int k = 0; k < 4; k++) MT_TRY(reduce_parts(c, stream, counts[k]));
    if (stream && on_gpus()) /* several pieces, the last a short one */
        MT_TRY(reduce_one(c, stream, 40000003 / size, MT_F64, MT_REDUCE_SUM));
    double nan = rank == 0 ? (double)NAN : 1, *device_nan = hold(stream, &nan, sizeof nan);
    MT_TRY(mt_comm_all_reduce(c, stream, device_nan, 1, MT_F64, MT_REDUCE_MAX, "NaN"));
    MT_TRY(look(stream, &nan, device_nan, sizeof nan));
    rank_check(isnan(nan), "the largest of NaN and 1 is %g", nan);
    int64_t x[2] = { rank + ((int64_t)1 << 60), -rank }, *counted = hold(stream, x, sizeof x);
    MT_TRY(mt_comm_all_reduce(c, stream, counted, 2, MT_I64, MT_REDUCE_MAX, "counts"));
    MT_TRY(look(stream, x, counted, sizeof x));
    rank_check(x[0] == size - 1 + ((int64_t)1 << 60) && x[1] == 0, "int64");
    rank_check(mt_comm_all_reduce(c, stream, counted, 1, MT_U16, MT_REDUCE_SUM, "u16") ==
                       MT_EUNSUPPORTED ||
                   size == 1,
               "u16 was summed");
    drop(stream, device_nan, sizeof nan);
    drop(stream, counted, sizeof x);
    return MT_OK;
}

static mt_status reductions(mt_comm *c)
{
    return in_both(c, reduce_placed);
}

/* Rank a sends b what only the two know, as many bytes as a * 5 + b * 3 says. */
static mt_status exchange_placed(mt_comm *c, mt_stream *stream)
{
    enum { BLOCK = 128 };
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    size_t bytes = (size_t)size * BLOCK;
    unsigned char *x = malloc(bytes), *y = malloc(bytes);
    for (int r = 0; r < size; r++) {
        int64_t used = (rank * 5 + r * 3) % (BLOCK - 7);
        memcpy(x + r * BLOCK, &used, sizeof used);
        for (int i = 0; i < used; i++) x[r * BLOCK + 8 + i] = (unsigned char)(rank * 31 + r + i);
    }
    void *from = hold(stream, x, bytes), *to = hold(stream, NULL, bytes);
    MT_TRY(mt_comm_all_to_all(c, stream, to, from, BLOCK, "test"));
    MT_TRY(look(stream, y, to, bytes));
    for (int r = 0; r < size; r++) {
        int64_t used, want = (r * 5 + rank * 3) % (BLOCK - 7);
        memcpy(&used, y + r * BLOCK, sizeof used);
        rank_check(used == want, "all_to_all: %lld bytes of rank %d, want %lld", (long long)used, r,
                   (long long)want);
        for (int i = 0; i < used; i++)
            rank_check(y[r * BLOCK + 8 + i] == (unsigned char)(r * 31 + rank + i),
                       "all_to_all: byte %d of rank %d", i, r);
    }
    drop(stream, from, bytes);
    drop(stream, to, bytes);
    free(x);
    free(y);
    return MT_OK;
}

static mt_status exchange(mt_comm *c)
{
    return in_both(c, exchange_placed);
}

static mt_status broadcast_placed(mt_comm *c, mt_stream *stream)
{
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    for (int root = 0; root < size; root++) {
        int64_t x[3] = { rank, rank * 2, rank * 3 }, *data = hold(stream, x, sizeof x);
        MT_TRY(mt_comm_broadcast_of(c, stream, data, 3, MT_I64, root, "test"));
        MT_TRY(look(stream, x, data, sizeof x));
        rank_check(x[0] == root && x[1] == root * 2 && x[2] == root * 3, "broadcast from %d", root);
        drop(stream, data, sizeof x);
    }
    return mt_comm_barrier(c, "test");
}

static mt_status broadcasts(mt_comm *c)
{
    return in_both(c, broadcast_placed);
}

/* The sum over ranks that all hold the same. */
static double reduced_same(int size, double x)
{
    double sum = x;
    for (int r = 1; r < size; r++) sum += x;
    return sum;
}

/* Collectives in three streams at once, each after what the one before has made, more of them than
 * the host may be ahead: round after round the numbers grow as they would in one stream. */
static mt_status streams(mt_comm *c)
{
    enum { ROUNDS = 400, COUNT = 5000 };
    int size = mt_comm_size(c);
    if (!rank_device) return MT_OK;
    mt_stream own = { .device = rank_device }, gathers, sums;
    mt_event begun, gathered, summed;
    size_t bytes = COUNT * sizeof(double), all = (size_t)size * bytes;
    double *x = malloc(all);
    for (int i = 0; i < COUNT; i++) x[i] = i % 3;
    MT_TRY(mt_stream_create(&gathers, rank_device));
    MT_TRY(mt_stream_create(&sums, rank_device));
    MT_TRY(mt_event_create(&begun, rank_device));
    MT_TRY(mt_event_create(&gathered, rank_device));
    MT_TRY(mt_event_create(&summed, rank_device));
    void *data = hold(&own, x, bytes), *many = hold(&own, NULL, all);
    int64_t zero = 0, *most = hold(&own, &zero, sizeof zero);
    for (int round = 0; round < ROUNDS; round++) {
        MT_TRY(mt_event_record(&begun, &own));
        MT_TRY(mt_event_wait(&begun, &gathers));
        MT_TRY(mt_comm_all_gather(c, &gathers, many, data, bytes, "in a stream"));
        MT_TRY(mt_event_record(&gathered, &gathers));
        MT_TRY(mt_event_wait(&gathered, &sums));
        MT_TRY(mt_comm_reduce_scatter(c, &sums, data, many, COUNT, MT_F64,
                                      round % 3 ? MT_REDUCE_MAX : MT_REDUCE_SUM, "in another"));
        MT_TRY(mt_event_record(&summed, &sums));
        MT_TRY(mt_event_wait(&summed, &own));
        MT_TRY(mt_comm_all_reduce(c, &own, most, 1, MT_I64, MT_REDUCE_MAX, "in the own"));
    }
    MT_TRY(look(&own, x, data, bytes));
    for (int i = 0; i < COUNT; i++) {
        double want = i % 3;
        for (int round = 0; round < ROUNDS; round += 3) want = reduced_same(size, want);
        rank_check(x[i] == want, "element %d is %g, want %g", i, x[i], want);
    }
    drop(&own, data, bytes);
    drop(&own, many, all);
    drop(&own, most, sizeof zero);
    mt_event_destroy(&begun);
    mt_event_destroy(&gathered);
    mt_event_destroy(&summed);
    mt_stream_destroy(&gathers);
    mt_stream_destroy(&sums);
    free(x);
    return MT_OK;
}

/* Parts: members, ranks in order, collectives that stay inside. */
static mt_status parts(mt_comm *c)
{
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    for (int64_t degree = 1; degree <= size; degree++) {
        mt_mesh mesh;
        if (size % degree) {
            rank_check(mt_mesh_create(&mesh, c, degree) == MT_ECONFIG &&
                           strstr(mt_error_message(), "parallel.expert"),
                       "a degree that does not divide");
            continue;
        }
        MT_TRY(mt_mesh_create(&mesh, c, degree));
        rank_check(mt_comm_size(mesh.experts) == degree, "size of a row");
        rank_check(mt_comm_rank(mesh.experts) == rank % degree, "place in a row");
        rank_check(mt_comm_size(mesh.replicas) == size / degree, "size of a column");
        rank_check(mt_comm_rank(mesh.replicas) == rank / degree, "place in a column");
        int64_t row = rank, column = rank;
        MT_TRY(mt_comm_all_reduce(mesh.experts, NULL, &row, 1, MT_I64, MT_REDUCE_MAX, "row"));
        MT_TRY(mt_comm_all_reduce(mesh.replicas, NULL, &column, 1, MT_I64, MT_REDUCE_MAX, "col"));
        rank_check(row == rank / degree * degree + degree - 1, "row reduces to %lld",
                   (long long)row);
        rank_check(column == size - degree + rank % degree, "column reduces to %lld",
                   (long long)column);
        mt_mesh_destroy(&mesh);
    }
    return MT_OK;
}

static mt_status agreement(mt_comm *c)
{
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    rank_check(mt_comm_agree(c, MT_OK, "test") == MT_OK, "all is well, but not agreed");
    mt_status own = rank == size - 1 ? MT_FAIL(MT_EIO, "disk %d is full", rank) : MT_OK;
    mt_status got = mt_comm_agree(c, own, "test");
    char words[64];
    snprintf(words, sizeof words, size == 1 ? "disk %d is full" : "disk %d", size - 1);
    rank_check(got == MT_EIO && strstr(mt_error_message(), words), "agreed on %d '%s'", (int)got,
               mt_error_message());
    return MT_OK;
}

/* ---- faults: rank 1 of these goes wrong, and the others must hear of it -------------------------
 */

static mt_status never_comes(mt_comm *c)
{
    MT_TRY(mt_comm_barrier(c, "the start"));
    if (mt_comm_rank(c) == 1) sleep(120);
    return mt_comm_barrier(c, "the step's end");
}

static mt_status is_killed(mt_comm *c)
{
    MT_TRY(mt_comm_barrier(c, "the start"));
    if (mt_comm_rank(c) == 1) {
        setsid(); /* out of mpirun's sight for a moment: the watchdog has to see it by itself */
        raise(SIGKILL);
    }
    return mt_comm_barrier(c, "the step's end");
}

static mt_status disagrees(mt_comm *c)
{
    int64_t to[3], from[3] = { 0 };
    if (mt_comm_rank(c) == 1) return mt_comm_all_to_all(c, NULL, to, from, sizeof *to, "b");
    return mt_comm_barrier(c, "a");
}

static mt_status fails_alone(mt_comm *c)
{
    mt_mesh m;
    mt_stream stream = { .device = rank_device };
    MT_TRY(mt_mesh_create(&m, c, mt_comm_size(c)));
    if (mt_comm_rank(c) != 1) return mt_comm_barrier(c, "the step's end");
    void *data = hold(&stream, NULL, 8);
    if (on_gpus()) MT_TRY(mt_comm_broadcast(m.experts, &stream, data, 8, 0, "in a part"));
    mt_comm_abort(c, "no memory for 42 bytes");
    mt_mesh_destroy(&m); /* waits for the device: what has begun in the part has ended */
    fprintf(stderr, "rank 1 has left\n");
    _exit(3);
}

static const rank_case cases[] = {
    { "all_gather", all_gather },
    { "reductions", reductions },
    { "exchange", exchange },
    { "broadcasts", broadcasts },
    { "parts", parts },
    { "agreement", agreement },
    { "streams", streams },
    { "never_comes", never_comes },
    { "is_killed", is_killed },
    { "disagrees", disagrees },
    { "fails_alone", fails_alone },
};
enum { CASES = sizeof cases / sizeof cases[0], PLAIN = 7 };

static mt_status every_case(mt_comm *c)
{
    for (int i = 0; i < PLAIN; i++) MT_TRY(cases[i].run(c));
    return MT_OK;
}
static const rank_case all_cases[] = { { "every", every_case } };

/* ---- the runner --------------------------------------------------------------------------------
 */

static void test_alone(void **state)
{
    (void)state;
    mt_launch launch = { .world = 1, .launcher = "" };
    mt_comm *c;
    assert_ok(mt_comm_open(&c, &launch, NULL));
    assert_string_equal(mt_comm_backend(c), "self");
    assert_int_equal(mt_comm_rank(c), 0);
    assert_int_equal(mt_comm_size(c), 1);
    assert_ok(every_case(c));
    int64_t block[2] = { 8, 1 }, to[2];
    assert_fails(mt_comm_all_to_all(c, NULL, to, block, 12, "odd"), MT_EINVAL, "12 bytes");
    assert_fails(mt_comm_broadcast(c, NULL, to, 8, 1, "odd"), MT_EINVAL, "rank 1 of 1");
    assert_fails(mt_comm_all_gather(c, NULL, NULL, block, 8, "odd"), MT_EINVAL, "NULL");
    mt_comm_close(&c);
    assert_null(c);
    mt_comm_close(&c);
    launch = (mt_launch){ .world = 2, .launcher = "torchrun" };
    assert_fails(mt_comm_open(&c, &launch, NULL), MT_EUNSUPPORTED,
                 "2 processes of torchrun on cpu");
}

static void test_ranks(void **state)
{
    (void)state;
    need_ranks(2);
    for (int n = 2; n <= 4 && n <= most_ranks(); n++) assert_ranks(n, "every");
}

/* The case ends in bounded time, and somebody says `words`. GPUs take seconds to be connected,
 * which the watchdog counts, too: its patience there is more. */
static void assert_fault(const char *name, const char *words)
{
    char command[1200];
    time_t began = time(NULL);
    snprintf(command, sizeof command, "%s %s", this_program(), name);
    int code = run_ranks(most_ranks() < 3 ? 2 : 3, command);
    if (code == 0 || !strstr(ranks_output, words))
        fail_msg("%s: exit code %d, want words '%s' in:\n%s", name, code, words, ranks_output);
    assert_true(time(NULL) - began < 60);
}

/* NCCL's connecting is a collective, too. */
static void test_faults(void **state)
{
    (void)state;
    need_ranks(2);
    assert_fault("never_comes", on_gpus() ? "s for rank 1, which has left barrier #2 (the start)"
                                          : "s for rank 1, which has left barrier #1 (the start)");
    assert_non_null(strstr(ranks_output, "(the step's end): rank"));
    assert_fault("is_killed", "rank 1 is gone: its process has ended without a word, ");
    assert_fault("disagrees",
                 on_gpus() ? "in all_to_all #2 (b) of 8" : "in all_to_all #1 (b) of 8");
    assert_non_null(strstr(ranks_output, "rank 1 "));
    assert_fault("fails_alone", "hears of rank 1: no memory for 42 bytes");
    assert_non_null(strstr(ranks_output, "rank 1 has left"));
}

/* A rank's watchdog whose words nobody takes any more: rank 0's process stands still. */
static int watch_unheard(void)
{
    const mt_watch_options options = { .rank = 1, .world = 2, .timeout_s = 60 };
    const char junk[4096] = "";
    char address[MT_HOST_ADDRESS];
    int listener, few = 1;
    mt_watch *watch;
    alarm(5);
    if (mt_watch_listen(&listener, address) != MT_OK) return 1;
    int upward = dup(0); /* from here on files of the watchdog, its socket among them */
    close(upward);
    if (mt_watch_start(&watch, &options, -1, address) != MT_OK) return 2;
    for (; setsockopt(upward, SOL_SOCKET, SO_SNDBUF, &few, sizeof few) != 0; upward++)
        if (errno != ENOTSOCK) return 3;
    for (int i = 0; i < 50; i++) { /* what has been sent may still move on */
        while (send(upward, junk, sizeof junk, MSG_DONTWAIT) > 0) continue;
        nanosleep(&(struct timespec){ .tv_nsec = 4000000 }, NULL);
    }
    mt_watch_stop(&watch);
    return 0;
}

/* It does not wait for that: it has to find the fault itself. */
static void test_unheard(void **state)
{
    int status;
    (void)state;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(watch_unheard());
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* Variables of launchers, in place of the environment's own. */
static void set_launch(const char *const *variables)
{
    static const char *const all[] = { "MIXTAPE_RANK",
                                       "MIXTAPE_WORLD_SIZE",
                                       "RANK",
                                       "WORLD_SIZE",
                                       "LOCAL_RANK",
                                       "LOCAL_WORLD_SIZE",
                                       "SLURM_PROCID",
                                       "SLURM_STEP_NUM_TASKS",
                                       "SLURM_LOCALID",
                                       "OMPI_COMM_WORLD_RANK",
                                       "OMPI_COMM_WORLD_SIZE",
                                       "OMPI_COMM_WORLD_LOCAL_RANK",
                                       "OMPI_COMM_WORLD_LOCAL_SIZE",
                                       "PMI_RANK",
                                       "PMI_SIZE" };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) unsetenv(all[i]);
    for (; *variables; variables += 2) setenv(variables[0], variables[1], 1);
}

static void test_launch(void **state)
{
    (void)state;
    static const struct {
        const char *variables[16];
        const char *launcher, *error;
        int rank, world, local_rank;
    } rows[] = {
        { { NULL }, "", NULL, 0, 1, 0 },
        { { "RANK", "3", "WORLD_SIZE", "8", "LOCAL_RANK", "1" }, "torchrun", NULL, 3, 8, 1 },
        { { "OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2" }, "Open MPI", NULL, 1, 2, 0 },
        { { "SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "1", "OMPI_COMM_WORLD_RANK", "1",
            "OMPI_COMM_WORLD_SIZE", "2" },
          "Open MPI",
          NULL,
          1,
          2,
          0 },
        /* mpirun on several hosts of a job: its daemons are a step of SLURM's */
        { { "SLURM_PROCID", "1", "SLURM_STEP_NUM_TASKS", "2", "SLURM_LOCALID", "0",
            "OMPI_COMM_WORLD_RANK", "6", "OMPI_COMM_WORLD_SIZE", "8", "OMPI_COMM_WORLD_LOCAL_RANK",
            "2" },
          "Open MPI",
          NULL,
          6,
          8,
          2 },
        { { "SLURM_PROCID", "5", "SLURM_STEP_NUM_TASKS", "6", "SLURM_LOCALID", "2" },
          "SLURM",
          NULL,
          5,
          6,
          2 },
        { { "PMI_RANK", "1", "PMI_SIZE", "2" }, "PMI", NULL, 1, 2, 0 },
        { { "MIXTAPE_RANK", "1", "MIXTAPE_WORLD_SIZE", "2", "RANK", "0", "WORLD_SIZE", "4" },
          "mixtape",
          NULL,
          1,
          2,
          0 },
        { { "RANK", "0" }, "", NULL, 0, 1, 0 },
        { { "RANK", "2", "WORLD_SIZE", "2" },
          NULL,
          "RANK is 2, must be below WORLD_SIZE 2",
          0,
          0,
          0 },
        { { "RANK", "x", "WORLD_SIZE", "2" }, NULL, "RANK is 'x'", 0, 0, 0 },
        { { "RANK", "0", "WORLD_SIZE", "0" }, NULL, "below WORLD_SIZE 0", 0, 0, 0 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        mt_launch launch;
        set_launch(rows[i].variables);
        if (rows[i].error) {
            assert_fails(mt_launch_detect(&launch), MT_ECONFIG, rows[i].error);
            continue;
        }
        assert_ok(mt_launch_detect(&launch));
        assert_string_equal(launch.launcher, rows[i].launcher);
        assert_int_equal(launch.rank, rows[i].rank);
        assert_int_equal(launch.world, rows[i].world);
        assert_int_equal(launch.local_rank, rows[i].local_rank);
    }
    set_launch((const char *[]){ NULL });
}

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1 && !strcmp(argv[1], "every"))
        return rank_main(all_cases, 1, argv[1], on_gpus() ? 60 : 20);
    if (argc > 1) return rank_main(cases, CASES, argv[1], on_gpus() ? 20 : 4);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_launch), cmocka_unit_test(test_alone),   cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_faults), cmocka_unit_test(test_unheard),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
