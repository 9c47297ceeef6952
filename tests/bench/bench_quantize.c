/* GB/s of group_quantize and group_dequantize against memcpy of the same bytes.
 *
 * Usage: bench_quantize [threads] [MiB]    MIXTAPE_KERNELS chooses the kernel set.
 *
 * Bytes are those of the source (of the result, for dequantize): reading or writing codes comes on
 * top of them. memcpy moves as many bytes from one buffer to another, cut over the same threads.
 * Everything is taken in turns, the best of each counts: other work on the machine disturbs single
 * turns. Dequantize gives bf16 and f32. */
#include "tests/support/test.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"

enum { COLS = 4096, TURNS = 11 };

struct job {
    mt_device *device;
    mt_dtype dtype;    /* of the source, and of dequantized values */
    size_t bytes;      /* of them */
    mt_qtensor source; /* plain */
    mt_qtensor q;      /* quantized: one direction or both */
    void *copy;        /* as large as the source */
    mt_dir dir;        /* that is dequantized */
};

static void run_memcpy(const struct job *j)
{
    const char *from = j->source.dir[MT_ROW].codes;
#pragma omp parallel num_threads(j->device->threads)
    {
        size_t part = j->bytes / (size_t)omp_get_num_threads(),
               at = part * (size_t)omp_get_thread_num();
        memcpy((char *)j->copy + at, from + at, part);
    }
}

static void run_quantize(const struct job *j)
{
    mt_stream stream = { j->device, NULL };
    assert_ok(mt_quantize(
        &stream, &(struct mt_quantize_args){ .dtype = MT_F32, .src = &j->source, .out = &j->q }));
}

static void run_dequantize(const struct job *j)
{
    mt_stream stream = { j->device, NULL };
    assert_ok(mt_dequantize(
        &stream,
        &(struct mt_dequantize_args){
            .dtype = MT_F32, .src = &j->q, .dir = j->dir, .y = j->copy, .y_dtype = j->dtype }));
}

/* Repeats for about 40 ms, so that what is short is tried often enough to be undisturbed once. */
static void keep_best(double *best, void (*run)(const struct job *), const struct job *j)
{
    double spent = 0;
    do {
        double t = mt_now();
        run(j);
        t = mt_now() - t;
        spent += t;
        if (t < *best) *best = t;
    } while (spent < 0.04);
}

/* What can be done with a format, in the order of the columns. */
enum { ROW, COL, BOTH, DEQUANTIZE_ROW, DEQUANTIZE_COL, COPY, WAYS };

static void bench(struct job *j, const char *format)
{
    double best[WAYS] = { 1e9, 1e9, 1e9, 1e9, 1e9, 1e9 };
    mt_format_spec spec;
    assert_ok(mt_format_spec_parse(&spec, format));
    mt_qtensor whole = { .group = j->source.group };
    for (int dir = 0; dir < MT_DIR_COUNT; dir++) whole.dir[dir] = mt_direction_of(spec);
    void *memory = test_alloc((int64_t)mt_qtensor_bytes(&whole), MT_U8);
    mt_qtensor_place(&whole, memory);
    for (int turn = 0; turn <= TURNS; turn++) {
        if (turn == 1) /* the first only warms up */
            for (int i = 0; i < WAYS; i++) best[i] = 1e9;
        keep_best(&best[COPY], run_memcpy, j);
        j->q = mt_qtensor_select(&whole, MT_ROW);
        keep_best(&best[ROW], run_quantize, j);
        j->q = mt_qtensor_select(&whole, MT_COL);
        keep_best(&best[COL], run_quantize, j);
        j->q = whole;
        keep_best(&best[BOTH], run_quantize, j);
        j->dir = MT_ROW;
        keep_best(&best[DEQUANTIZE_ROW], run_dequantize, j);
        j->dir = MT_COL;
        keep_best(&best[DEQUANTIZE_COL], run_dequantize, j);
    }
    printf("%-16s %-5s %7.2f", format, mt_dtype_name(j->dtype),
           1e-9 * (double)j->bytes / best[COPY]);
    for (int i = 0; i < COPY; i++)
        printf("  %6.2f %5.2fx", 1e-9 * (double)j->bytes / best[i], best[i] / best[COPY]);
    printf("\n");
    fflush(stdout);
    test_free(memory);
}

int main(int argc, char **argv)
{
    static const char *const formats[] = { "fp8_tensor", "fp8_block", "mxfp8", "nvfp4",
                                           "nvfp4:sr" };
    static const mt_dtype dtypes[] = { MT_BF16, MT_F32 };
    struct job j = { 0 };
    assert_ok(mt_device_open(&j.device, "cpu", NULL, argc > 1 ? atoi(argv[1]) : 0));
    int64_t mib = argc > 2 ? atoi(argv[2]) : 64;
    printf("%s, %d threads, %lld MiB; GB/s of source or result, and time over that of memcpy\n",
           j.device->kernel_set, j.device->threads, (long long)mib);
    printf("                        memcpy  quantize row    column          both          "
           "dequantize row  column\n");
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        j.dtype = dtypes[d], j.bytes = (size_t)mib << 20;
        int64_t count = (int64_t)(j.bytes / mt_dtype_size(j.dtype));
        mt_group group = mt_group_uniform(1, count / COLS, COLS);
        void *x = test_alloc(count, j.dtype);
        j.copy = test_alloc(count, j.dtype);
        test_random(x, count, j.dtype, 1, 1);
        j.source = mt_qtensor_plain(group, j.dtype, x);
        for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) bench(&j, formats[f]);
        test_free(x), test_free(j.copy);
    }
    mt_device_destroy(&j.device);
    return 0;
}
