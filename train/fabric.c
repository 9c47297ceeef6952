/* Patterns that say where every byte comes from. */
#include "train/fabric.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TURNS = 5, TEXT = 160, EVERYONE = -1, WAVE = 7 };
static const size_t check_bytes = (size_t)1 << 16;    /* of a block of a rank */
static const size_t host_bytes = (size_t)1 << 22;     /* of all blocks that are timed, on a CPU */
static const size_t device_bytes = (size_t)256 << 20; /* on a GPU */

typedef struct fabric {
    mt_comm *comm;
    mt_device *device;
    mt_stream stream;
    int rank, size;
    size_t block;          /* bytes of a rank's, at present */
    size_t room;           /* of each of the two */
    void *from, *to;       /* device memory */
    unsigned char *staged; /* the same on the host */
} fabric;

static unsigned char pattern(int from, int to, size_t i)
{
    return (unsigned char)((i * 131 + (i >> 8) * 17 + (size_t)from * 29 + (size_t)(to + 1) * 71) ^
                           0x5a);
}

static float wave(int part, size_t i)
{
    return (float)((i + (size_t)part) % WAVE);
}

static mt_status put(fabric *f, void *to, size_t bytes)
{
    return mt_device_copy(f->device, to, f->staged, bytes);
}

/* What came, after all that the stream was given. */
static mt_status get(fabric *f, const void *from, size_t bytes)
{
    memset(f->staged, 0xee, bytes);
    MT_TRY(mt_device_synchronize(f->device));
    return mt_device_copy(f->device, f->staged, from, bytes);
}

/* A block of the staged bytes, sent by `from` to `to`. */
static mt_status expect_block(const fabric *f, const char *op, int at, int from, int to,
                              size_t skip)
{
    const unsigned char *block = f->staged + (size_t)at * f->block;
    for (size_t i = skip; i < f->block; i++)
        MT_REQUIRE(block[i] == pattern(from, to, i), MT_EDEVICE,
                   "%s: from rank %d to rank %d, byte %zu of %zu is %02x, %02x was sent", op, from,
                   f->rank, i, f->block, block[i], pattern(from, to, i));
    return MT_OK;
}

/* Sums of f32 that are exact in any order. */
static mt_status expect_sums(const fabric *f, const char *op, int part)
{
    float ranks = (float)(f->size * (f->size + 1) / 2), got;
    for (size_t i = 0; i < f->block / sizeof got; i++) {
        memcpy(&got, f->staged + i * sizeof got, sizeof got);
        MT_REQUIRE(got == ranks * wave(part, i), MT_EDEVICE,
                   "%s: element %zu on rank %d is %g, the sum over %d ranks is %g", op, i, f->rank,
                   (double)got, f->size, (double)(ranks * wave(part, i)));
    }
    return MT_OK;
}

static void stage_waves(fabric *f, int parts)
{
    for (int p = 0; p < parts; p++)
        for (size_t i = 0; i < f->block / sizeof(float); i++) {
            float x = (float)(f->rank + 1) * wave(p, i);
            memcpy(f->staged + (size_t)p * f->block + i * sizeof x, &x, sizeof x);
        }
}

/* ---- each collective ---------------------------------------------------------------------------
 */

static mt_status run_all_gather(fabric *f)
{
    return mt_comm_all_gather(f->comm, &f->stream, f->to, f->from, f->block, "doctor");
}

static mt_status check_all_gather(fabric *f)
{
    for (size_t i = 0; i < f->block; i++) f->staged[i] = pattern(f->rank, EVERYONE, i);
    MT_TRY(put(f, f->from, f->block));
    MT_TRY(run_all_gather(f));
    MT_TRY(get(f, f->to, (size_t)f->size * f->block));
    for (int r = 0; r < f->size; r++) MT_TRY(expect_block(f, "all_gather", r, r, EVERYONE, 0));
    return MT_OK;
}

static mt_status run_all_to_all(fabric *f)
{
    return mt_comm_all_to_all(f->comm, &f->stream, f->to, f->from, f->block, "doctor");
}

static mt_status check_all_to_all(fabric *f)
{
    int64_t used = (int64_t)(f->block - sizeof used);
    for (int r = 0; r < f->size; r++) {
        unsigned char *block = f->staged + (size_t)r * f->block;
        for (size_t i = 0; i < f->block; i++) block[i] = pattern(f->rank, r, i);
        memcpy(block, &used, sizeof used);
    }
    MT_TRY(put(f, f->from, (size_t)f->size * f->block));
    MT_TRY(run_all_to_all(f));
    MT_TRY(get(f, f->to, (size_t)f->size * f->block));
    for (int r = 0; r < f->size; r++)
        MT_TRY(expect_block(f, "all_to_all", r, r, f->rank, sizeof used));
    return MT_OK;
}

static mt_status run_reduce_scatter(fabric *f)
{
    return mt_comm_reduce_scatter(f->comm, &f->stream, f->to, f->from,
                                  (int64_t)(f->block / sizeof(float)), MT_F32, MT_REDUCE_SUM,
                                  "doctor");
}

static mt_status check_reduce_scatter(fabric *f)
{
    stage_waves(f, f->size);
    MT_TRY(put(f, f->from, (size_t)f->size * f->block));
    MT_TRY(run_reduce_scatter(f));
    MT_TRY(get(f, f->to, f->block));
    return expect_sums(f, "reduce_scatter", f->rank);
}

static mt_status check_all_reduce(fabric *f)
{
    stage_waves(f, 1);
    MT_TRY(put(f, f->to, f->block));
    MT_TRY(mt_comm_all_reduce(f->comm, &f->stream, f->to, (int64_t)(f->block / sizeof(float)),
                              MT_F32, MT_REDUCE_SUM, "doctor"));
    MT_TRY(get(f, f->to, f->block));
    return expect_sums(f, "all_reduce", 0);
}

static mt_status check_broadcast(fabric *f)
{
    for (int root = 0; root < f->size; root++) {
        for (size_t i = 0; i < f->block; i++)
            f->staged[i] = f->rank == root ? pattern(root, EVERYONE, i) : 0;
        MT_TRY(put(f, f->to, f->block));
        MT_TRY(mt_comm_broadcast(f->comm, &f->stream, f->to, f->block, root, "doctor"));
        MT_TRY(get(f, f->to, f->block));
        MT_TRY(expect_block(f, "broadcast", 0, root, EVERYONE, 0));
    }
    return MT_OK;
}

static mt_status check_barrier(fabric *f)
{
    return mt_comm_barrier(f->comm, "doctor");
}

/* Those that have something to time move a block from every rank to every other. */
static const struct kind {
    const char *name;
    mt_status (*check)(fabric *f);
    mt_status (*run)(fabric *f);
} kinds[] = {
    { "all_gather", check_all_gather, run_all_gather },
    { "reduce_scatter", check_reduce_scatter, run_reduce_scatter },
    { "all_to_all", check_all_to_all, run_all_to_all },
    { "all_reduce", check_all_reduce, NULL },
    { "broadcast", check_broadcast, NULL },
    { "barrier", check_barrier, NULL },
};

/* Seconds of one, by the device's clock. */
static mt_status time_one(double *seconds, fabric *f, const struct kind *k)
{
    mt_timer timer;
    MT_TRY(mt_timer_create(&timer, f->device));
    mt_status status = k->run(f);
    MT_TRY_CLEANUP(status);
    MT_TRY_CLEANUP(mt_comm_barrier(f->comm, "doctor"));
    MT_TRY_CLEANUP(mt_timer_start(&timer, &f->stream));
    for (int i = 0; i < TURNS; i++) MT_TRY_CLEANUP(k->run(f));
    MT_TRY_CLEANUP(mt_timer_stop(&timer, &f->stream));
    MT_TRY_CLEANUP(mt_timer_read(&timer, seconds));
    *seconds /= TURNS;
cleanup:
    mt_timer_destroy(&timer);
    return status;
}

/* Blocks of an exchange begin with how much they hold. */
static mt_status fill_blocks(fabric *f)
{
    int64_t used = (int64_t)(f->block - sizeof used);
    MT_TRY(mt_device_zero(f->device, f->from, f->room));
    for (int r = 0; r < f->size; r++)
        MT_TRY(
            mt_device_copy(f->device, (char *)f->from + (size_t)r * f->block, &used, sizeof used));
    return MT_OK;
}

static mt_status check_kind(fabric *f, const struct kind *k, char text[TEXT])
{
    double seconds;
    f->block = check_bytes;
    MT_TRY(mt_comm_agree(f->comm, k->check(f), "doctor"));
    snprintf(text, TEXT, "right bits on %d ranks", f->size);
    if (!k->run) return MT_OK;
    f->block = f->room / (size_t)f->size / 64 * 64;
    MT_TRY(fill_blocks(f));
    MT_TRY(time_one(&seconds, f, k));
    double received = (double)f->block * (f->size - 1);
    snprintf(text, TEXT, "right bits on %d ranks; %.1f MB from each in %.2f ms: %.2f GB/s a rank",
             f->size, (double)f->block / 1e6, seconds * 1e3, received / seconds / 1e9);
    return MT_OK;
}

static mt_status allocate(fabric *f)
{
    size_t least = (size_t)f->size * check_bytes;
    f->room = strcmp(f->device->name, "cpu") ? device_bytes : host_bytes;
    if (f->room < least) f->room = least;
    f->staged = malloc(least);
    MT_REQUIRE(f->staged, MT_ENOMEM, "doctor: no memory for %zu bytes", least);
    MT_TRY(mt_device_alloc(f->device, &f->from, f->room, MT_MEMORY_STATE));
    return mt_device_alloc(f->device, &f->to, f->room, MT_MEMORY_STATE);
}

mt_status mt_fabric_check(mt_comm *comm, mt_device *device,
                          void (*row)(void *context, const char *name, const char *text),
                          void *context)
{
    fabric f = { .comm = comm, .device = device, .stream = { .device = device } };
    f.rank = mt_comm_rank(comm), f.size = mt_comm_size(comm);
    mt_status status = mt_comm_agree(comm, allocate(&f), "doctor");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds && status == MT_OK; i++) {
        char text[TEXT];
        status = check_kind(&f, &kinds[i], text);
        if (status == MT_OK) row(context, kinds[i].name, text);
    }
    mt_device_free(device, &f.from, f.room, MT_MEMORY_STATE);
    mt_device_free(device, &f.to, f.room, MT_MEMORY_STATE);
    free(f.staged);
    return status;
}
