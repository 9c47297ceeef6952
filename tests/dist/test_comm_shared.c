/* Memory that ranks write to in each other's place: gathers into it, and runs that go straight
 * there. On GPUs alone; what is made of it is tested anywhere (test_fsdp_copies.c). */
#include "tests/dist/placed.h"

/* Memory that the others write to: gathers of every size into it, until it is taken back. */
static mt_status shared(mt_comm *c)
{
    enum { TURNS = 6, MOST = 70000 };
    mt_stream stream = { .device = rank_device };
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    size_t all = ((size_t)size * MOST + 8) * sizeof(double);
    if (!rank_device) return MT_OK;
    double *y = calloc(1, all), *x = malloc(MOST * sizeof *x);
    char *to = hold(&stream, y, all), *from = hold(&stream, y, all);
    MT_TRY(mt_comm_share(c, to, all, "test"));
    for (int turn = 0; turn < TURNS; turn++) {
        int64_t n = turn ? MOST >> (turn - 1) : 1;
        for (int64_t i = 0; i < n; i++) x[i] = element(rank + turn, i);
        MT_TRY(mt_device_copy(rank_device, from, x, (size_t)n * sizeof *x));
        MT_TRY(mt_comm_all_gather_of(c, &stream, to + 64, from, n, MT_F64, "test"));
        if (turn == TURNS - 2) {
            mt_comm_unshare(c, to);
            MT_TRY(mt_comm_barrier(c, "test"));
        }
        MT_TRY(look(&stream, y, to, all));
        for (int64_t i = 0; i < n * size; i++)
            rank_check(y[8 + i] == element((int)(i / n) + turn, i % n),
                       "shared, turn %d: element %lld", turn, (long long)i);
        rank_check(y[0] == 0 && y[7] == 0, "a gather wrote before its beginning");
    }
    drop(&stream, from, all);
    drop(&stream, to, all);
    free(x);
    free(y);
    return MT_OK;
}

/* Run k of a rank, and where it lies; the whole is that of one past the last. */
static int64_t run_length(int rank, int k)
{
    return 1 + rank * 5000 + k * 131;
}
static int64_t run_place(int rank, int k)
{
    int64_t at = 3;
    for (int r = 0; r <= rank; r++)
        for (int i = 0; i < (r < rank ? r + 2 : k); i++) at += run_length(r, i) + 1;
    return at;
}

/* Runs of every size, of some ranks more than of others, time and again to the same places. */
static mt_status spread(mt_comm *c)
{
    enum { TURNS = 5, MOST = 16 };
    mt_stream stream = { .device = rank_device };
    int rank = mt_comm_rank(c), size = mt_comm_size(c);
    int64_t n = run_place(size, 0) + (1 << 18);
    size_t all = (size_t)n * sizeof(double);
    mt_comm_run runs[MOST];
    if (!rank_device || size + 2 > MOST) return MT_OK;
    double *y = calloc(1, all), *x = malloc(all);
    double *to = hold(&stream, y, all), *from = hold(&stream, y, all);
    MT_TRY(mt_comm_share(c, to, all, "test"));
    bool reaches = mt_comm_reaches(c, to, all);
    rank_check(!reaches || size > 1, "alone, and others are reached");
    for (int turn = 0; turn < TURNS && reaches; turn++) {
        for (int64_t i = 0; i < n; i++) x[i] = element(rank + turn, i);
        MT_TRY(mt_device_copy(rank_device, from, x, all));
        for (int k = 0; k < rank + 2; k++) {
            int64_t at = run_place(rank, k);
            runs[k] =
                (mt_comm_run){ to + at, from + at, (size_t)run_length(rank, k) * sizeof(double) };
        }
        MT_TRY(mt_comm_spread(c, &stream, runs, rank + 2, all, "test"));
        MT_TRY(look(&stream, y, to, all));
        for (int r = 0; r < size; r++)
            for (int k = 0; k < r + 2; k++) {
                int64_t at = run_place(r, k), end = at + run_length(r, k);
                for (int64_t i = at; i < end; i++)
                    rank_check(y[i] == element(r + turn, i), "turn %d, run %d of %d: element %lld",
                               turn, k, r, (long long)i);
                rank_check(y[end] == 0, "turn %d, run %d of %d: too long", turn, k, r);
            }
        if (turn == 0)
            rank_check(mt_comm_reaches(c, from, all) == false, "reaches what is not shared");
    }
    mt_comm_unshare(c, to);
    MT_TRY(mt_comm_barrier(c, "test"));
    drop(&stream, from, all);
    drop(&stream, to, all);
    free(x);
    free(y);
    return MT_OK;
}

static const rank_case cases[] = { { "shared", shared }, { "spread", spread } };

static void on_gpus_alone(void **state)
{
    if (!on_gpus()) skip();
    on_two_and_four(state);
}

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1) return rank_main(cases, 2, argv[1], on_gpus() ? 60 : 20);
    const struct CMUnitTest tests[] = { RANKS_TEST(on_two_and_four, "shared"),
                                        RANKS_TEST(on_gpus_alone, "spread") };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
