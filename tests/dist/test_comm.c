/* Collectives against what they mean, on one process and on ranks; what the watchdog finds. */
#include "tests/dist/ranks.h"

#include <math.h>

#include "dist/mesh.h"

/* What rank r holds as element i. */
static double element(int rank, int64_t i)
{
    uint64_t x = ((uint64_t)rank * 1000003u + (uint64_t)i) * 0x9e3779b97f4a7c15u;
    return ((double)(x >> 40) / 16777216.0 - 0.5) * ldexp(1, (int)(x & 15));
}

/* ---- cases of ranks ----------------------------------------------------------------------------
 */

static mt_status all_gather(mt_comm *c)
{
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    const int64_t counts[] = { 0, 1, 33, 500000 };
    for (int k = 0; k < 4; k++) {
        int64_t n = counts[k];
        double *from = malloc((size_t)(n + 1) * sizeof *from);
        double *to = calloc((size_t)(n * size + 1), sizeof *to);
        for (int64_t i = 0; i < n; i++) from[i] = element(rank, i);
        to[n * size] = 7;
        MT_TRY(mt_comm_all_gather_of(c, NULL, to, from, n, MT_F64, "test"));
        for (int again = 0; again < 2; again++) {
            for (int64_t i = 0; i < n * size; i++)
                rank_check(to[i] == element((int)(i / n), i % n), "all_gather %lld: element %lld",
                           (long long)n, (long long)i);
            for (int r = 0; r < size; r++)
                if (r != rank) memset(to + r * n, 0, (size_t)n * sizeof *to);
            MT_TRY(mt_comm_all_gather(c, NULL, to, to + rank * n, (size_t)n * 8, "in place"));
        }
        rank_check(to[n * size] == 7, "all_gather wrote past its end");
        free(from);
        free(to);
    }
    return MT_OK;
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

static mt_status reductions(mt_comm *c)
{
    static const mt_dtype dtypes[] = { MT_F64, MT_F32, MT_BF16 };
    const int64_t counts[] = { 0, 1, 7, 300001 }; /* the last is more than a chunk */
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    for (int k = 0; k < 24; k++) {
        mt_dtype dtype = dtypes[k % 3];
        mt_reduce reduce = (mt_reduce)(k / 3 % 2);
        int64_t n = counts[k / 6];
        size_t bytes = (size_t)(n + 1) * 8;
        void *from = calloc((size_t)size, bytes), *to = calloc(1, bytes);
        for (int64_t i = 0; i < n * size; i++) mt_store_f64(from, dtype, i, element(rank, i));
        MT_TRY(mt_comm_reduce_scatter(c, NULL, to, from, n, dtype, reduce, "test"));
        for (int64_t i = 0; i < n; i++)
            rank_check(mt_load_f64(to, dtype, i) == reduced(size, rank * n + i, dtype, reduce),
                       "reduce_scatter of %s: element %lld", mt_dtype_name(dtype), (long long)i);
        MT_TRY(mt_comm_all_reduce(c, NULL, from, n, dtype, reduce, "test"));
        for (int64_t i = 0; i < n; i++)
            rank_check(mt_load_f64(from, dtype, i) == reduced(size, i, dtype, reduce),
                       "all_reduce of %s: element %lld", mt_dtype_name(dtype), (long long)i);
        free(from);
        free(to);
    }
    double nan = rank == 0 ? NAN : 1;
    MT_TRY(mt_comm_all_reduce(c, NULL, &nan, 1, MT_F64, MT_REDUCE_MAX, "NaN"));
    rank_check(isnan(nan), "the largest of NaN and 1 is %g", nan);
    int64_t counts_of[2] = { rank + ((int64_t)1 << 60), -rank };
    MT_TRY(mt_comm_all_reduce(c, NULL, counts_of, 2, MT_I64, MT_REDUCE_MAX, "counts"));
    rank_check(counts_of[0] == size - 1 + ((int64_t)1 << 60) && counts_of[1] == 0, "int64");
    uint16_t u = 0;
    rank_check(mt_comm_all_reduce(c, NULL, &u, 1, MT_U16, MT_REDUCE_SUM, "u16") ==
                       MT_EUNSUPPORTED ||
                   size == 1,
               "u16 was summed");
    return MT_OK;
}

/* Rank a sends b what only the two know, as many bytes as a * 5 + b * 3 says. */
static mt_status exchange(mt_comm *c)
{
    enum { BLOCK = 128 };
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    unsigned char *from = malloc((size_t)size * BLOCK), *to = malloc((size_t)size * BLOCK);
    for (int r = 0; r < size; r++) {
        int64_t used = (rank * 5 + r * 3) % (BLOCK - 7);
        memcpy(from + r * BLOCK, &used, sizeof used);
        for (int i = 0; i < used; i++) from[r * BLOCK + 8 + i] = (unsigned char)(rank * 31 + r + i);
    }
    MT_TRY(mt_comm_all_to_all(c, NULL, to, from, BLOCK, "test"));
    for (int r = 0; r < size; r++) {
        int64_t used, want = (r * 5 + rank * 3) % (BLOCK - 7);
        memcpy(&used, to + r * BLOCK, sizeof used);
        rank_check(used == want, "all_to_all: %lld bytes of rank %d, want %lld", (long long)used, r,
                   (long long)want);
        for (int i = 0; i < used; i++)
            rank_check(to[r * BLOCK + 8 + i] == (unsigned char)(r * 31 + rank + i),
                       "all_to_all: byte %d of rank %d", i, r);
    }
    free(from);
    free(to);
    return MT_OK;
}

static mt_status broadcasts(mt_comm *c)
{
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    for (int root = 0; root < size; root++) {
        int64_t x[3] = { rank, rank * 2, rank * 3 };
        MT_TRY(mt_comm_broadcast_of(c, NULL, x, 3, MT_I64, root, "test"));
        rank_check(x[0] == root && x[1] == root * 2 && x[2] == root * 3, "broadcast from %d", root);
    }
    return mt_comm_barrier(c, "test");
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
    uint64_t before = mt_comm_sequence(c);
    MT_TRY(mt_comm_barrier(c, "count"));
    rank_check(mt_comm_sequence(c) == before + 1, "a barrier is one collective");
    return MT_OK;
}

/* ---- faults: rank 1 of these goes wrong, and the others must hear of it -------------------------
 */

static mt_status never_comes(mt_comm *c)
{
    MT_TRY(mt_comm_barrier(c, "the start"));
    if (mt_comm_rank(c) == 1) sleep(60);
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
    if (mt_comm_rank(c) == 1) {
        mt_comm_abort(c, "no memory for 42 bytes");
        _exit(3);
    }
    return mt_comm_barrier(c, "the step's end");
}

static const rank_case cases[] = {
    { "all_gather", all_gather },   { "reductions", reductions }, { "exchange", exchange },
    { "broadcasts", broadcasts },   { "parts", parts },           { "agreement", agreement },
    { "never_comes", never_comes }, { "is_killed", is_killed },   { "disagrees", disagrees },
    { "fails_alone", fails_alone },
};
enum { CASES = sizeof cases / sizeof cases[0], PLAIN = 6 };

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
    assert_fails(mt_comm_open(&c, &launch, NULL), MT_EUNSUPPORTED, "2 processes of torchrun");
}

static void test_ranks(void **state)
{
    (void)state;
    need_ranks();
    for (int n = 2; n <= 4; n++) assert_ranks(n, "every");
}

/* The case ends in bounded time, and somebody says `words`. */
static void assert_fault(const char *name, const char *words)
{
    char self[1024], command[1200];
    struct timespec began, ended;
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = '\0';
    snprintf(command, sizeof command, "%s %s", self, name);
    clock_gettime(CLOCK_MONOTONIC, &began);
    int code = run_ranks(3, command);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    if (code == 0 || !strstr(ranks_output, words))
        fail_msg("%s: exit code %d, want words '%s' in:\n%s", name, code, words, ranks_output);
    assert_true(ended.tv_sec - began.tv_sec < 20);
}

static void test_faults(void **state)
{
    (void)state;
    need_ranks();
    assert_fault("never_comes", "s for rank 1, which has left barrier #1 (the start)");
    assert_non_null(strstr(ranks_output, "barrier #2 (the step's end): rank"));
    assert_fault("is_killed", "rank 1 is gone: its process has ended without a word, ");
    assert_fault("disagrees", "rank 1 in all_to_all #1 (b) of 8");
    assert_fault("fails_alone", "hears of rank 1: no memory for 42 bytes");
}

/* Variables of launchers, in place of the environment's own. */
static void set_launch(const char *const *variables)
{
    static const char *const all[] = { "RANK",
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
        { { "SLURM_PROCID", "5", "SLURM_STEP_NUM_TASKS", "6", "SLURM_LOCALID", "2" },
          "SLURM",
          NULL,
          5,
          6,
          2 },
        { { "PMI_RANK", "1", "PMI_SIZE", "2" }, "PMI", NULL, 1, 2, 0 },
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
    if (argc > 1 && !strcmp(argv[1], "every")) return rank_main(all_cases, 1, argv[1], 20);
    if (argc > 1) return rank_main(cases, CASES, argv[1], 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_launch),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
