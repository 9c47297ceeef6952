/* How fast ranks exchange: `bench_comm --ranks N` on N GPUs of this host, `mpirun -n N bench_comm`
 * on CPU processes. Bandwidth is that of a rank: bytes received a second, of 10^9. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dist/comm.h"
#include "train/ranks.h"
#include "train/supervise.h"

enum { TURNS = 10, SIZES = 4, KINDS = 3 };

typedef struct bench {
    mt_comm *comm;
    mt_stream stream;
    void *whole, *part;
    size_t bytes; /* of the whole, over all ranks */
} bench;

static mt_status gather(bench *b)
{
    size_t part = b->bytes / (size_t)mt_comm_size(b->comm);
    return mt_comm_all_gather(b->comm, &b->stream, b->whole, b->part, part, "bench");
}

static mt_status scatter_of(bench *b, mt_dtype dtype)
{
    int64_t count = (int64_t)(b->bytes / (size_t)mt_comm_size(b->comm) / mt_dtype_size(dtype));
    return mt_comm_reduce_scatter(b->comm, &b->stream, b->part, b->whole, count, dtype,
                                  MT_REDUCE_SUM, "bench");
}

static mt_status scatter_f32(bench *b)
{
    return scatter_of(b, MT_F32);
}

static mt_status scatter_bf16(bench *b)
{
    return scatter_of(b, MT_BF16);
}

static const struct {
    const char *name;
    mt_status (*run)(bench *b);
} kinds[KINDS] = { { "all_gather", gather },
                   { "reduce_scatter f32", scatter_f32 },
                   { "reduce_scatter bf16", scatter_bf16 } };

static mt_status measure(bench *b, int kind)
{
    mt_timer timer;
    double seconds;
    int size = mt_comm_size(b->comm);
    MT_TRY(mt_timer_create(&timer, b->stream.device));
    for (int i = 0; i < 2; i++) MT_TRY(kinds[kind].run(b));
    MT_TRY(mt_comm_barrier(b->comm, "bench"));
    MT_TRY(mt_timer_start(&timer, &b->stream));
    for (int i = 0; i < TURNS; i++) MT_TRY(kinds[kind].run(b));
    MT_TRY(mt_timer_stop(&timer, &b->stream));
    MT_TRY(mt_timer_read(&timer, &seconds));
    mt_timer_destroy(&timer);
    seconds /= TURNS;
    double received = (double)b->bytes * (size - 1) / size;
    if (mt_comm_rank(b->comm) == 0)
        printf("%-20s %8.1f MB %10.1f us %8.1f GB/s\n", kinds[kind].name, (double)b->bytes / 1e6,
               seconds * 1e6, received / seconds / 1e9);
    return MT_OK;
}

static mt_status run(mt_device *device, mt_comm *comm)
{
    static const size_t sizes[SIZES] = { (size_t)1 << 20, (size_t)16 << 20, (size_t)256 << 20,
                                         (size_t)1 << 30 };
    bench b = { .comm = comm, .stream = { .device = device } };
    int most = strcmp(device->name, "cpu") ? SIZES : 2;
    size_t room = sizes[most - 1];
    MT_TRY(mt_device_alloc(device, &b.whole, room, MT_MEMORY_STATE));
    MT_TRY(mt_device_alloc(device, &b.part, room, MT_MEMORY_STATE));
    MT_TRY(mt_device_zero(device, b.whole, room));
    MT_TRY(mt_device_zero(device, b.part, room));
    if (mt_comm_rank(comm) == 0)
        printf("%d ranks over %s\n", mt_comm_size(comm), mt_comm_backend(comm));
    for (int k = 0; k < KINDS; k++)
        for (int s = 0; s < most; s++) {
            b.bytes = sizes[s];
            MT_TRY(measure(&b, k));
        }
    mt_device_free(device, &b.whole, room, MT_MEMORY_STATE);
    mt_device_free(device, &b.part, room, MT_MEMORY_STATE);
    return MT_OK;
}

int main(int argc, char **argv)
{
    mt_device *device = NULL;
    mt_comm *comm = NULL;
    int code = 0, rank;
    mt_status status;
    if (argc > 2 && !strcmp(argv[1], "--ranks")) {
        char *const again[] = { argv[0], NULL };
        status = mt_supervise(&code, &rank, "/proc/self/exe", again, atoi(argv[2]), 10);
        if (status != MT_OK) fprintf(stderr, "bench_comm: %s\n", mt_error_message());
        return status == MT_OK ? code : 1;
    }
    status = mt_ranks_open_device(&device, "auto");
    if (status == MT_OK) status = mt_ranks_open(&comm, device, 60);
    if (status == MT_OK) status = run(device, comm);
    if (status != MT_OK) fprintf(stderr, "bench_comm: %s\n", mt_error_message());
    mt_ranks_close(&comm, status);
    mt_device_destroy(&device);
    return status != MT_OK;
}
