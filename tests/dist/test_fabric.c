/* doctor's look at the fabric: right bits pass, and whose byte is wrong is named. */
#include "tests/dist/ranks.h"

#include "dist/comm_priv.h"
#include "tests/train/program.h"
#include "train/fabric.h"

static int rows;

static void count_row(void *context, const char *name, const char *text)
{
    (void)context, (void)name;
    rows += strstr(text, "right bits on") != NULL;
}

static mt_status right(mt_comm *comm)
{
    MT_TRY(mt_fabric_check(comm, rank_device, count_row, NULL));
    rank_check(rows == 6, "%d of 6 collectives are right", rows);
    return MT_OK;
}

/* A link that loses a bit: what the last rank receives in its second block is another. */
static const struct mt_comm_ops *sound;

static mt_status spoil(const mt_comm *c, void *to, size_t at)
{
    unsigned char byte;
    if (c->rank != c->size - 1) return MT_OK;
    MT_TRY(mt_device_synchronize(rank_device));
    MT_TRY(mt_device_copy(rank_device, &byte, (char *)to + at, 1));
    byte ^= 4;
    return mt_device_copy(rank_device, (char *)to + at, &byte, 1);
}

static mt_status bad_all_to_all(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                size_t block_bytes)
{
    MT_TRY(sound->all_to_all(c, stream, to, from, block_bytes));
    return spoil(c, to, block_bytes - 1);
}

static mt_status bad_reduce_scatter(mt_comm *c, mt_stream *stream, void *to, const void *from,
                                    const mt_comm_parts *parts, mt_dtype dtype, mt_reduce reduce)
{
    MT_TRY(sound->reduce_scatter(c, stream, to, from, parts, dtype, reduce));
    return spoil(c, to, 6);
}

static mt_status named(mt_comm *comm, const struct mt_comm_ops *bad, const char *words)
{
    char want[160];
    int last = mt_comm_size(comm) - 1;
    sound = comm->ops, comm->ops = bad;
    mt_status status = mt_fabric_check(comm, rank_device, count_row, NULL);
    comm->ops = sound;
    snprintf(want, sizeof want, words, last, last);
    const char *found = strstr(mt_error_message(), mt_comm_rank(comm) == last ? want : words);
    rank_check(status == MT_EDEVICE && (found || strstr(mt_error_message(), want)),
               "the check says '%s', not '%s'", mt_error_message(), want);
    mt_error_clear();
    return MT_OK;
}

static mt_status wrong(mt_comm *comm)
{
    struct mt_comm_ops bad = *comm->ops;
    bad.all_to_all = bad_all_to_all;
    MT_TRY(named(comm, &bad, "all_to_all: from rank 0 to rank %d, byte 65535 of 65536 is"));
    bad = *comm->ops, bad.reduce_scatter = bad_reduce_scatter;
    return named(comm, &bad, "reduce_scatter: element 1 on rank %d is");
}

static const rank_case cases[] = { { "right", right }, { "wrong", wrong } };

static void test_verb(void **state)
{
    (void)state;
    need_ranks(2);
    char command[12000];
    snprintf(command, sizeof command, "%s doctor", program_path);
    int code = run_ranks(2, command);
    const char *said = strstr(ranks_output, "\nfabric\n");
    if (code != 0 || !said || !strstr(said, "all_to_all") || !strstr(said, "GB/s a rank"))
        fail_msg("exit code %d:\n%s", code, ranks_output);
    assert_null(strstr(said + 1, "\nfabric\n")); /* once, from rank 0 */
    if (on_gpus()) return;
    snprintf(command, sizeof command, "%s doctor : -n 1 %s doctor --device cuda:4096", program_path,
             program_path);
    if (run_ranks(1, command) != 2 || !strstr(ranks_output, "rank 1: device cuda:4096"))
        fail_msg("what rank 1 alone has found:\n%s", ranks_output);
}

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "--ranks")) return ranks_main(argv);
    if (argc > 1) return rank_main(cases, 2, argv[1], on_gpus() ? 60 : 20);
    const struct CMUnitTest tests[] = {
        RANKS_TEST(on_two_and_four, "right"),
        RANKS_TEST(on_two_and_four, "wrong"),
        cmocka_unit_test(test_verb),
    };
    return cmocka_run_group_tests(tests, program_setup, program_teardown);
}
